"""Where a journal is kept: a folder of the local file system, or of any other that pyarrow or fsspec knows.

A local folder appends to files and waits until the disk has them. Other file systems, object stores among them, know
no appending: there each piece is an object of its own, which is there as a whole or not at all.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final
from urllib.parse import unquote, urlsplit

import pyarrow as pa
from pyarrow import fs

from adapters.spark.errors import JournalLockedError, JournalUnreadableError
from messaging.errors import MissingExtraError

#: how long a query that was ended may take to let go of its journal, seconds
LOCK_SECONDS: Final = 15.0


class Appender(ABC):
    """A file that grows. For one thread."""

    #: bytes that are safely there
    size: int

    @abstractmethod
    def append(self, parts: Iterable[Any]) -> None:
        """Write all of ``parts`` and wait until the disk has them.

        Raises:
            OSError: it does not; the file is as long as before, as far as that can be had.
        """

    @abstractmethod
    def close(self) -> None:
        """Let go of the file. Idempotent."""


class Folder(ABC):
    """A folder and what can be done with the files below it. Names are relative, with ``/``. Thread safe.

    Attributes:
        path: as it was given, fit for error messages.
        appends: whether files can grow.
    """

    path: str
    appends: bool

    @abstractmethod
    def make(self, name: str = "") -> None:
        """Make the folder ``name``, and those above it, if they are missing."""

    @abstractmethod
    def list(self, name: str = "") -> dict[str, int]:
        """Names of the files in the folder ``name`` and their sizes; nothing if there is no such folder."""

    @abstractmethod
    def read(self, name: str, start: int = 0, length: int | None = None) -> pa.Buffer:
        """A part of a file. Local files are mapped, not copied.

        Raises:
            FileNotFoundError: it is gone.
        """

    @abstractmethod
    def write(self, name: str, parts: Iterable[Any]) -> int:
        """Write a file as a whole, or not at all; returns its size when it is safely there."""

    @abstractmethod
    def append_to(self, name: str, keep: int = 0) -> Appender:
        """Open a file that grows, and cut off what is behind its first ``keep`` bytes."""

    @abstractmethod
    def delete(self, name: str) -> None:
        """Delete a file; nothing if there is none."""

    @abstractmethod
    def lock(self) -> contextlib.AbstractContextManager[None]:
        """Keep other writers away until the context is left.

        Raises:
            JournalLockedError: another writer has the folder.
        """

    @abstractmethod
    def check_lock(self) -> None:
        """Raise :class:`JournalLockedError` if another writer took the folder meanwhile."""


def open_folder(path: str) -> Folder:
    """The folder at ``path``: a local path, or a URI that pyarrow or fsspec knows.

    Raises:
        JournalUnreadableError: nobody knows such a file system, or it cannot be reached.
    """
    if "://" not in path:
        return LocalFolder(path)
    parts = urlsplit(path)
    if parts.scheme == "file":
        return LocalFolder(unquote(parts.path))
    try:
        try:
            filesystem, inner = fs.FileSystem.from_uri(path)
        except pa.ArrowInvalid:
            filesystem, inner = _fsspec(path, parts.scheme)
    except (OSError, ValueError, ImportError) as error:
        raise JournalUnreadableError(path, f"no such file system: {error}") from None
    if isinstance(filesystem, fs.LocalFileSystem):
        return LocalFolder(inner)
    return RemoteFolder(path, filesystem, inner)


def _fsspec(path: str, scheme: str) -> tuple[fs.FileSystem, str]:
    try:
        import fsspec
    except ImportError:
        raise MissingExtraError("fsspec", f"journalPath {scheme}://") from None
    filesystem, inner = fsspec.core.url_to_fs(path)
    return fs.PyFileSystem(fs.FSSpecHandler(filesystem)), inner


# --- local ----------------------------------------------------------------------------------------------------------


class LocalFolder(Folder):
    """A folder of this machine, or of a shared file system that is mounted on it."""

    appends = True

    def __init__(self, path: str) -> None:
        self.path = path
        self._root = Path(path).absolute()

    def make(self, name: str = "") -> None:
        """See :class:`Folder`."""
        folder = self._root / name
        missing = [each for each in (folder, *folder.parents) if not each.exists()]
        folder.mkdir(parents=True, exist_ok=True)
        for each in missing:
            _sync(each.parent)

    def list(self, name: str = "") -> dict[str, int]:
        """See :class:`Folder`."""
        found = {}
        with contextlib.suppress(FileNotFoundError), os.scandir(self._root / name) as entries:
            for entry in entries:
                with contextlib.suppress(FileNotFoundError):
                    if entry.is_file():
                        found[entry.name] = entry.stat().st_size
        return found

    def read(self, name: str, start: int = 0, length: int | None = None) -> pa.Buffer:
        """See :class:`Folder`."""
        with (self._root / name).open("rb") as file:
            size = os.fstat(file.fileno()).st_size
        wanted = max(0, size - start) if length is None else min(length, max(0, size - start))
        if not wanted:
            return pa.py_buffer(b"")
        with pa.memory_map(str(self._root / name)) as mapped:
            return mapped.read_buffer(size).slice(start, wanted)

    def write(self, name: str, parts: Iterable[Any]) -> int:
        """See :class:`Folder`."""
        path = self._root / name
        temporary = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            with temporary.open("wb") as file:
                for part in parts:
                    file.write(part)
                file.flush()
                os.fsync(file.fileno())
                size = file.tell()
            temporary.replace(path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        _sync(path.parent)
        return size

    def append_to(self, name: str, keep: int = 0) -> Appender:
        """See :class:`Folder`."""
        return _LocalAppender(self._root / name, keep)

    def delete(self, name: str) -> None:
        """See :class:`Folder`."""
        (self._root / name).unlink(missing_ok=True)

    @contextlib.contextmanager
    def lock(self) -> Any:
        """A lock on the file ``lock``, which the kernel gives back however its holder ends."""
        path = self._root / "lock"
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            deadline = time.monotonic() + LOCK_SECONDS
            while True:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() > deadline:
                        raise JournalLockedError(
                            self.path, "another query is using this journal; give each query one of its own"
                        ) from None
                    time.sleep(0.05)
            yield
        finally:
            os.close(file)

    def check_lock(self) -> None:
        """Nobody can: the kernel keeps the lock."""


class _LocalAppender(Appender):
    def __init__(self, path: Path, keep: int) -> None:
        is_new = not path.exists()
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        self.size = keep
        try:
            if os.fstat(self._file).st_size != keep:
                os.ftruncate(self._file, keep)
                os.fsync(self._file)
            if is_new:
                _sync(path.parent)
        except BaseException:
            self.close()
            raise

    def append(self, parts: Iterable[Any]) -> None:
        views = [memoryview(part).cast("B") for part in parts]
        wanted = sum(len(view) for view in views)
        written = 0
        try:
            while views:
                count = os.pwritev(self._file, views[:64], self.size + written)
                written += count
                while views and count >= len(views[0]):
                    count -= len(views.pop(0))
                if views and count:
                    views[0] = views[0][count:]
            os.fdatasync(self._file)
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(self._file, self.size)
            raise
        self.size += wanted

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def _sync(folder: Path) -> None:
    """Have the disk know the names in ``folder``."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# --- any other ------------------------------------------------------------------------------------------------------


class RemoteFolder(Folder):
    """A folder of a file system without appending: pyarrow's own, or fsspec's through pyarrow."""

    appends = False

    def __init__(self, path: str, filesystem: fs.FileSystem, root: str) -> None:
        self.path = path
        self._filesystem = filesystem
        self._root = root.rstrip("/")
        self._token: bytes | None = None

    def _full(self, name: str) -> str:
        return f"{self._root}/{name}" if name else self._root

    def make(self, name: str = "") -> None:
        """See :class:`Folder`."""
        self._filesystem.create_dir(self._full(name), recursive=True)

    def list(self, name: str = "") -> dict[str, int]:
        """See :class:`Folder`."""
        selector = fs.FileSelector(self._full(name), allow_not_found=True)
        return {
            info.base_name: info.size or 0
            for info in self._filesystem.get_file_info(selector)
            if info.type == fs.FileType.File
        }

    def read(self, name: str, start: int = 0, length: int | None = None) -> pa.Buffer:
        """See :class:`Folder`."""
        with self._filesystem.open_input_file(self._full(name)) as file:
            size = file.size()
            wanted = max(0, size - start) if length is None else min(length, max(0, size - start))
            return pa.py_buffer(file.read_at(wanted, start))

    def write(self, name: str, parts: Iterable[Any]) -> int:
        """See :class:`Folder`. An object appears when it is closed."""
        size = 0
        with self._filesystem.open_output_stream(self._full(name)) as file:
            for part in parts:
                file.write(part)
                size += len(memoryview(part).cast("B"))
        return size

    def append_to(self, name: str, keep: int = 0) -> Appender:
        """There is none."""
        raise NotImplementedError(name)

    def delete(self, name: str) -> None:
        """See :class:`Folder`."""
        with contextlib.suppress(FileNotFoundError):
            self._filesystem.delete_file(self._full(name))

    @contextlib.contextmanager
    def lock(self) -> Any:
        """Leave a mark: the last one to come has the folder, those before notice it with their next piece."""
        self._token = os.urandom(16).hex().encode()
        self.write("owner", [self._token])
        try:
            yield
        finally:
            self._token = None

    def check_lock(self) -> None:
        """See :class:`Folder`."""
        if self._token is not None and self.read("owner").to_pybytes() != self._token:
            raise JournalLockedError(
                self.path, "another query has taken this journal over; give each query one of its own"
            )
