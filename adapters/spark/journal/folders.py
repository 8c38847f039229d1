"""The folder of a journal: on the local file system, or on any other that pyarrow or fsspec supports.

A local folder appends to files and waits until the disk has them. Other file systems, such as object stores, cannot
append: there each write is an object of its own, which exists as a whole or not at all.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import re
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Final, TypeAlias
from urllib.parse import unquote

import pyarrow as pa
from pyarrow import fs

from adapters.spark.errors import JournalLockedError, JournalUnreadableError

#: how long a stopped query may take to release its journal, in seconds
LOCK_SECONDS = 15.0

#: pause between two attempts to get a lock, in seconds
_PAUSE: Final = 0.05
#: the beginning of a path that is meant as a URL
_SCHEME: Final = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:(?=/)")


def open_folder(path: str) -> Folder:
    """Return the folder at ``path``: a local path (``~`` is the home of the user), or a URL for pyarrow or fsspec."""
    if path.lower().startswith("file:"):
        return LocalFolder(_of_file_url(path))
    scheme, is_url, _ = path.partition("://")
    if not scheme or (not is_url and _SCHEME.match(path)):
        raise JournalUnreadableError(path, "a URL looks like scheme://bucket/folder")
    if not is_url:
        return LocalFolder(path)
    try:
        try:
            filesystem, inner = fs.FileSystem.from_uri(path)
        except (pa.ArrowInvalid, NotImplementedError):
            return _fsspec(path)
    except (OSError, ValueError, ImportError) as error:
        raise JournalUnreadableError(path, f"no such file system: {error}") from None
    if isinstance(filesystem, fs.LocalFileSystem):
        return LocalFolder(inner)
    return RemoteFolder(path, filesystem, inner)


def _of_file_url(path: str) -> str:
    """Return the path of ``file:///folder`` or ``file:/folder``."""
    rest = path[len("file:") :]
    if rest.startswith("//"):
        rest = rest[2:].removeprefix("localhost")
    if not rest.startswith("/"):
        raise JournalUnreadableError(path, "the URL of a local folder looks like file:///folder")
    return unquote(rest)


def _fsspec(path: str) -> Folder:
    try:
        import fsspec
        from fsspec.implementations.local import LocalFileSystem
    except ImportError:
        raise JournalUnreadableError(path, "pyarrow does not know it, and package fsspec is not installed") from None
    filesystem, inner = fsspec.core.url_to_fs(path)
    if isinstance(filesystem, LocalFileSystem):
        return LocalFolder(inner)
    return RemoteFolder(path, fs.PyFileSystem(fs.FSSpecHandler(filesystem)), inner)


# --- local ----------------------------------------------------------------------------------------------------------


def lock_file(path: Path, patience: float, refused: Exception, *, mode: int = 0o644, flags: int = 0) -> int:
    """Return a descriptor of the lock file ``path`` with its lock; raise ``refused`` after ``patience`` seconds."""
    deadline = time.monotonic() + patience
    while (file := _try_lock(path, mode, flags)) is None:
        if time.monotonic() > deadline:
            raise refused
        time.sleep(_PAUSE)
    return file


def _try_lock(path: Path, mode: int, flags: int) -> int | None:
    """Return a descriptor of the lock file ``path`` with its lock, or ``None`` if another process has the lock."""
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | flags, mode)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(file), path.stat()):  # its holder may have deleted the file
            return file
    except (BlockingIOError, FileNotFoundError):
        pass
    except BaseException:
        os.close(file)
        raise
    os.close(file)
    return None


class LocalFolder:
    """A folder of this machine, or of a mounted shared file system. Names are relative, with ``/``. Thread safe.

    Attributes:
        path: the argument with which :func:`open_folder` opens it in any process: absolute, with its whole URL.
        appends: whether files can grow.
    """

    appends = True

    def __init__(self, path: str) -> None:
        try:
            self._root = Path(path).expanduser().absolute()
        except RuntimeError as error:
            raise JournalUnreadableError(path, str(error)) from None
        if "\0" in path:
            raise JournalUnreadableError(repr(path), "no path has a NUL")
        self.path = str(self._root)

    def make(self, name: str = "") -> None:
        """Create the folder ``name``, and its parents, if they are missing, and wait until the disk has them."""
        folder = self._root / name
        missing = [each for each in (folder, *folder.parents) if not each.exists()]
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except FileExistsError:
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR)) from None
        # also existing folders: their creator may have been killed before they were on the disk
        _sync(folder)
        for each in missing or [folder]:
            _sync(each.parent)

    def list(self, name: str = "") -> dict[str, int]:
        """Return the names and sizes of the files in the folder ``name``; nothing if there is no such folder."""
        found = {}
        with contextlib.suppress(FileNotFoundError), os.scandir(self._root / name) as entries:
            for entry in entries:
                with contextlib.suppress(FileNotFoundError):
                    if entry.is_file():
                        found[entry.name] = entry.stat().st_size
        return found

    def read(self, name: str, start: int = 0, length: int | None = None, *, copy: bool = False) -> pa.Buffer:
        """Return a part of a file, as far as it exists. Local files are mapped.

        With ``copy`` they are not: a writer may truncate the file, which ends a process that then reads mapped bytes.
        """
        with (self._root / name).open("rb") as file:
            size = max(0, os.fstat(file.fileno()).st_size - start)
            wanted = size if length is None else min(length, size)
            if copy or not wanted:
                file.seek(start)
                return pa.py_buffer(file.read(wanted))
            skipped = start % mmap.ALLOCATIONGRANULARITY
            mapped = mmap.mmap(file.fileno(), skipped + wanted, access=mmap.ACCESS_READ, offset=start - skipped)
        return pa.py_buffer(mapped).slice(skipped, wanted)

    def write(self, name: str, parts: Iterable[Any]) -> int:
        """Write a file as a whole, or not at all; return its size when the disk has it."""
        path = self._root / name
        temporary = path.with_name(f".{path.name}.new")  # there is one writer
        try:
            with temporary.open("wb") as file:
                for part in parts:
                    file.write(part)
                file.flush()
                os.fsync(file.fileno())
                size = file.tell()
            temporary.replace(path)
        except BaseException:
            with contextlib.suppress(OSError):
                temporary.unlink()
            raise
        _sync(path.parent)
        return size

    def append_to(self, name: str, keep: int = 0) -> Appender:
        """Open a file that grows, and truncate it to its first ``keep`` bytes. Only where :attr:`appends`."""
        return Appender(self._root / name, keep)

    def delete(self, name: str) -> None:
        """Delete a file, if it exists."""
        path = self._root / name
        path.unlink(missing_ok=True)
        _sync(path.parent)  # a file that is deleted later must not disappear earlier

    def lock(self) -> contextlib.AbstractContextManager[Any]:
        """Lock out other writers until the context is left. The kernel releases the lock however its holder ends."""
        error = JournalLockedError(self.path, "another query is using this journal; give each query one of its own")
        held = contextlib.ExitStack()
        held.callback(os.close, lock_file(self._root / "lock", LOCK_SECONDS, error))
        return held

    def check_lock(self) -> None:
        """Raise :class:`JournalLockedError` if another writer has taken the folder. Here the kernel prevents that."""


class Appender:
    """A local file that grows, from its first ``keep`` bytes on. For one thread."""

    def __init__(self, path: Path, keep: int) -> None:
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        #: bytes that the disk has
        self.size = keep
        try:
            if os.fstat(self._file).st_size != keep:
                os.ftruncate(self._file, keep)
            # existing bytes count from now on, and their writer may have been killed before the disk had them
            os.fsync(self._file)
            _sync(path.parent)
        except BaseException:
            self.close()
            raise

    def append(self, parts: Iterable[Any]) -> None:
        """Write all of ``parts`` and wait until the disk has them; if that fails, truncate the file if possible."""
        views = [memoryview(part).cast("B") for part in parts]
        end = self.size + sum(len(view) for view in views)
        at = self.size
        try:
            while at < end:
                count = os.pwritev(self._file, views[:64], at)
                if not count:
                    raise OSError(errno.EIO, "nothing was written")
                at += count
                while views and count >= len(views[0]):
                    count -= len(views.pop(0))
                if count:
                    views[0] = views[0][count:]
            os.fdatasync(self._file)
            if not os.fstat(self._file).st_nlink:
                raise OSError(errno.ENOENT, "the segment was removed")  # by another program: readers cannot find it
        except BaseException:
            with contextlib.suppress(OSError):
                os.ftruncate(self._file, self.size)
            raise
        self.size = end

    def close(self) -> None:
        """Close the file. Idempotent."""
        file, self._file = self._file, -1
        if file >= 0:
            os.close(file)


def _sync(folder: Path) -> None:
    """Wait until the disk has the names in ``folder``, if this user may open it."""
    with contextlib.suppress(PermissionError):
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


# --- any other ------------------------------------------------------------------------------------------------------


class RemoteFolder:
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
        """See :class:`LocalFolder`."""
        with _os_errors():
            self._filesystem.create_dir(self._full(name), recursive=True)

    def list(self, name: str = "") -> dict[str, int]:
        """See :class:`LocalFolder`."""
        with _os_errors():
            return {
                info.base_name: info.size or 0
                for info in self._filesystem.get_file_info(fs.FileSelector(self._full(name), allow_not_found=True))
                if info.type == fs.FileType.File
            }

    def read(self, name: str, start: int = 0, length: int | None = None, *, copy: bool = False) -> pa.Buffer:
        """See :class:`LocalFolder`."""
        del copy  # it always copies
        with _os_errors(), self._filesystem.open_input_file(self._full(name)) as file:
            size = max(0, file.size() - start)
            return pa.py_buffer(file.read_at(size if length is None else min(length, size), start))

    def write(self, name: str, parts: Iterable[Any]) -> int:
        """See :class:`LocalFolder`. An object store shows an object when it is closed."""
        data = b"".join(parts)
        with _os_errors(), self._filesystem.open_output_stream(self._full(name)) as file:
            file.write(data)
        return len(data)

    def append_to(self, name: str, keep: int = 0) -> Appender:
        """See :class:`LocalFolder`. Not supported."""
        raise NotImplementedError(name)

    def delete(self, name: str) -> None:
        """See :class:`LocalFolder`."""
        with contextlib.suppress(FileNotFoundError), _os_errors():
            self._filesystem.delete_file(self._full(name))

    def lock(self) -> contextlib.AbstractContextManager[Any]:
        """Write a token. The last writer has the folder; earlier ones detect it with their next write."""
        self._token = os.urandom(16).hex().encode()
        self.write("owner", [self._token])
        return contextlib.nullcontext()

    def check_lock(self) -> None:
        """See :class:`LocalFolder`."""
        if self._token is not None and self.read("owner").to_pybytes() != self._token:
            raise JournalLockedError(
                self.path, "another query has taken this journal over; give each query one of its own"
            )


@contextlib.contextmanager
def _os_errors() -> Iterator[None]:
    """Raise any error of a file system as an :class:`OSError`: clients of object stores have errors of their own."""
    try:
        yield
    except OSError:
        raise
    except Exception as error:
        raise OSError(errno.EIO, f"{type(error).__name__}: {error}") from error


Folder: TypeAlias = LocalFolder | RemoteFolder
