"""The folder at ``journalPath``: on the local file system, or on any other that pyarrow or fsspec supports."""

from __future__ import annotations

import contextlib
import errno
import os
import re
from collections.abc import Iterable, Iterator
from typing import Any, Final, TypeVar
from urllib.parse import unquote

import pyarrow as pa
from pyarrow import fs

from messaging.errors import JournalError, JournalLockedError, JournalUnreadableError
from messaging.journal.folders import Appender, Folder, LocalFolder
from pyspark_messaging.errors import OPTION, redacted

#: how long a stopped query may take to release its journal, in seconds
LOCK_SECONDS = 15.0

E = TypeVar("E", bound=JournalError)

_LOCKED: Final = "another query is using this journal; give each query one of its own"
_OVERTAKEN: Final = "another query has taken this journal over; give each query one of its own"
#: the beginning of a path that is meant as a URL
_SCHEME: Final = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:(?=/)")


def open_folder(path: str) -> Folder:
    """Return the folder at ``path``: a local path (``~`` is the home of the user), or a URL for pyarrow or fsspec."""
    if path.lower().startswith("file:"):
        return _local(_of_file_url(path))
    scheme, is_url, _ = path.partition("://")
    if not scheme or (not is_url and _SCHEME.match(path)):
        raise _unreadable(path, "a URL looks like scheme://bucket/folder")
    if not is_url:
        return _local(path)
    try:
        try:
            filesystem, inner = fs.FileSystem.from_uri(path)
        except (pa.ArrowInvalid, NotImplementedError):
            return _fsspec(path)
    except (OSError, ValueError, ImportError) as error:
        raise _unreadable(path, f"no such file system: {error}") from None
    if isinstance(filesystem, fs.LocalFileSystem):
        return _local(inner)
    return RemoteFolder(path, filesystem, inner)


def _local(path: str) -> Folder:
    return LocalFolder(path, option=OPTION, lock_timeout=LOCK_SECONDS, locked=_LOCKED)


def _unreadable(path: str, message: str) -> JournalUnreadableError:
    return JournalUnreadableError(redacted(path), redacted(message), OPTION)


def _of_file_url(path: str) -> str:
    """Return the path of ``file:///folder`` or ``file:/folder``."""
    rest = path[len("file:") :]
    if rest.startswith("//"):
        rest = rest[2:].removeprefix("localhost")
    if not rest.startswith("/"):
        raise _unreadable(path, "the URL of a local folder looks like file:///folder")
    return unquote(rest)


def _fsspec(path: str) -> Folder:
    try:
        import fsspec
        from fsspec.implementations.local import LocalFileSystem
    except ImportError:
        raise _unreadable(path, "pyarrow does not know it, and package fsspec is not installed") from None
    filesystem, inner = fsspec.core.url_to_fs(path)
    if isinstance(filesystem, LocalFileSystem):
        return _local(inner)
    return RemoteFolder(path, fs.PyFileSystem(fs.FSSpecHandler(filesystem)), inner)


class RemoteFolder:
    """A folder of a file system without appending: pyarrow's own, or fsspec's through pyarrow."""

    appends = False

    def __init__(self, path: str, filesystem: fs.FileSystem, root: str) -> None:
        self.path = path
        self.shown = redacted(path)
        self._filesystem = filesystem
        self._root = root.rstrip("/")
        self._token: bytes | None = None

    def error(self, kind: type[E], message: str) -> E:
        """See :class:`Folder`."""
        return kind(self.shown, redacted(message), OPTION)

    def _full(self, name: str) -> str:
        return f"{self._root}/{name}" if name else self._root

    def make(self, name: str = "") -> None:
        """See :class:`Folder`."""
        with _os_errors():
            self._filesystem.create_dir(self._full(name), recursive=True)

    def list(self, name: str = "") -> dict[str, int]:
        """See :class:`Folder`."""
        with _os_errors():
            return {
                info.base_name: info.size or 0
                for info in self._filesystem.get_file_info(fs.FileSelector(self._full(name), allow_not_found=True))
                if info.type == fs.FileType.File
            }

    def read(self, name: str, start: int = 0, length: int | None = None, *, copy: bool = False) -> memoryview:
        """See :class:`Folder`."""
        del copy  # it always copies
        with _os_errors(), self._filesystem.open_input_file(self._full(name)) as file:
            size = max(0, file.size() - start)
            return memoryview(file.read_at(size if length is None else min(length, size), start))

    def write(self, name: str, parts: Iterable[Any]) -> int:
        """See :class:`Folder`. An object store shows an object when it is closed."""
        data = b"".join(parts)
        with _os_errors(), self._filesystem.open_output_stream(self._full(name)) as file:
            file.write(data)
        return len(data)

    def append_to(self, name: str, keep: int = 0) -> Appender:
        """See :class:`Folder`. Not supported."""
        raise NotImplementedError(name)

    def delete(self, name: str) -> None:
        """See :class:`Folder`."""
        with contextlib.suppress(FileNotFoundError), _os_errors():
            self._filesystem.delete_file(self._full(name))

    def room(self) -> int | None:
        """See :class:`Folder`. An object store has no bound."""
        return None

    def lock(self) -> contextlib.AbstractContextManager[Any]:
        """Write a token. The last writer has the folder; earlier ones detect it with their next write."""
        self._token = os.urandom(16).hex().encode()
        self.write("owner", [self._token])
        return contextlib.nullcontext()

    def check_lock(self) -> None:
        """See :class:`Folder`."""
        if self._token is not None and bytes(self.read("owner")) != self._token:
            raise self.error(JournalLockedError, _OVERTAKEN)


@contextlib.contextmanager
def _os_errors() -> Iterator[None]:
    """Raise any error of a file system as an :class:`OSError`: clients of object stores have errors of their own."""
    try:
        yield
    except OSError:
        raise
    except Exception as error:
        raise OSError(errno.EIO, f"{type(error).__name__}: {error}") from error
