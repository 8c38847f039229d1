"""The folder of a journal: its files, and the lock of its writer.

A local folder appends to files and waits until the disk has them. A file system that cannot append, such as an object
store, writes each file as a whole: an adapter can bring a folder of its own, see :class:`Folder`.

Only their owner may read the files that are created here, whatever the mode of the folder: they hold payloads.
"""

from __future__ import annotations

import builtins
import contextlib
import errno
import fcntl
import mmap
import os
import re
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Final, Protocol, TypeVar

from messaging.environment.forks import LiveObjects, hold_over_fork
from messaging.environment.signals import on_failure
from messaging.errors import JournalError, JournalFullError, JournalLockedError, JournalUnreadableError
from messaging.execution import Closeable, clock

E = TypeVar("E", bound=JournalError)

#: pause between two attempts to get a lock, seconds
_PAUSE: Final = 0.01
#: shortest time for which a lock is tried, seconds: a child that its dead holder was starting has it until it runs
_GRACE: Final = 0.1
_LOCKED: Final = "another writer has this journal open; a journal has one writer at a time"
#: name of the folder of a partition
_PARTITION: Final = re.compile(r"0|[1-9][0-9]{0,8}", re.ASCII)
#: errors of the operating system for a full disk
_FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


class Folder(Protocol):
    """The files of a journal. Names are relative, with ``/``. Thread safe. Every method may raise ``OSError``."""

    #: the argument that opens the folder in any process, with its secrets
    path: str
    #: the path without secrets, for errors and logs
    shown: str
    #: whether files can grow
    appends: bool

    def error(self, kind: type[E], message: str) -> E:
        """Return an error of this folder."""

    def make(self, name: str = "") -> None:
        """Create the folder ``name``, and its parents, if they are missing, and wait until the disk has them."""

    def list(self, name: str = "") -> dict[str, int]:
        """Return the names and sizes of the files in the folder ``name``; nothing if there is no such folder."""

    def read(self, name: str, start: int = 0, length: int | None = None, *, copy: bool = False) -> memoryview:
        """Return a part of a file, as far as it exists. The bytes may be mapped, unless ``copy`` is set."""

    def write(self, name: str, parts: Iterable[Any]) -> int:
        """Write a file as a whole, or not at all; return its size when the disk has it."""

    def append_to(self, name: str, keep: int = 0) -> Appender:
        """Open a file that grows, and truncate it to its first ``keep`` bytes. Only where :attr:`appends`."""

    def delete(self, name: str) -> None:
        """Delete a file, if it exists."""

    def room(self) -> int | None:
        """Return the free bytes of the disk, ``None`` if they are not known."""

    def lock(self) -> contextlib.AbstractContextManager[Any]:
        """Lock out other writers until the context is left; raise :class:`JournalLockedError` if there is one."""

    def check_lock(self) -> None:
        """Raise :class:`JournalLockedError` if another writer has taken the folder."""


@contextlib.contextmanager
def journal_errors(folder: Folder, what: str, kind: type[JournalError] = JournalError) -> Iterator[None]:
    """Raise an :class:`OSError` as a :class:`JournalFullError` if the disk is full, else as ``kind``."""
    try:
        yield
    except OSError as error:
        if error.errno in _FULL:
            kind = JournalFullError
        raise folder.error(kind, f"{what}: {error.strerror or error}") from error


class HeldLock(Closeable):
    """A lock of some files. A context manager that releases it.

    A child process that another thread of the holder is starting has the descriptors, too. It keeps no lock: the holder
    unlocks the files, and does not only close them, and a forked child closes its copies.
    """

    def __init__(self) -> None:
        #: descriptors, each from its opening on: an interrupt keeps none from being closed
        self.files: list[int] = []
        self._process = os.getpid()
        _held.add(self)

    def close(self) -> None:
        """Release the lock; in a forked child leave it to the parent alone. Idempotent."""
        files, self.files = getattr(self, "files", []), []  # an interrupt may have ended __init__ before
        for file in files:
            try:
                if self._process == os.getpid():
                    fcntl.flock(file, fcntl.LOCK_UN)
            finally:
                os.close(file)

    #: in a forked child, too: the lock of the parent would otherwise last as long as the child
    __del__ = after_fork = close


_held: Final = LiveObjects[HeldLock]()
#: held until a new lock is in ``_held``
_locking: Final = threading.Lock()
hold_over_fork(_locking)


def lock_file(
    path: Path, patience: float, refused: Exception, *, flags: int = 0, with_folder: bool = False
) -> HeldLock:
    """Return the lock of the file ``path``; raise ``refused`` after ``patience`` seconds, but not before 0.1 s.

    Args:
        path: of the file, which is created if it is missing.
        patience: seconds.
        refused: the error if another process has the lock.
        flags: further flags to open it.
        with_folder: whether to lock its folder, too, which other programs do not delete as they do a file.
    """
    deadline = clock.monotonic() + max(patience, _GRACE)
    while (lock := _try_lock(path, flags, with_folder)) is None:
        if clock.monotonic() > deadline:
            raise refused
        clock.pause(_PAUSE)
    return lock


def _try_lock(path: Path, flags: int, with_folder: bool) -> HeldLock | None:
    """Return the lock of the file ``path``, or ``None`` if another process has it."""
    with _locking:
        lock = HeldLock()
        with on_failure(lock.close), contextlib.suppress(BlockingIOError, FileNotFoundError):
            lock.files.append(private(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | flags))
            fcntl.flock(lock.files[0], fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(lock.files[0]), path.stat()):  # its holder may have deleted the file
                if with_folder:
                    lock.files.append(os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
                    _lock_folder(lock.files[1])
                return lock
        lock.close()
        return None


def _lock_folder(folder: int) -> None:
    """Lock a folder, where the file system can do that. Raises ``BlockingIOError``."""
    try:
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise
    except OSError:  # NFS locks only files that are open for writing
        return


def private(path: str | Path, flags: int) -> int:
    """Open a file, which only its owner may read or write if it is created. An *opener*, see ``open``."""
    return os.open(path, flags, 0o600)


class LocalFolder:
    """A folder of this machine, or of a mounted shared file system. Thread safe.

    Args:
        path: of the folder, which need not exist; ``~`` is the home of the user.
        option: the setting or option with the path, for errors.
        lock_timeout: how long :meth:`lock` waits for another writer that is ending, seconds.
        locked: text of the error if there is another writer.
        private: whether only the owner may use a folder that :meth:`make` creates.

    Raises:
        JournalUnreadableError: no folder can have this path.
    """

    appends = True

    def __init__(
        self,
        path: str,
        *,
        option: str | None = None,
        lock_timeout: float = 0.0,
        locked: str = _LOCKED,
        private: bool = False,
    ) -> None:
        self.path = self.shown = path
        self._option = option
        self._lock_timeout = lock_timeout
        self._locked = locked
        self._mode = 0o700 if private else 0o777
        #: the last lock, which is released when neither its caller nor a user of the folder is left
        self._held: HeldLock | None = None
        if "\0" in path:
            self.shown = repr(path)
            raise self.error(JournalUnreadableError, "no path has a NUL")
        try:
            self._root = Path(path).expanduser().absolute()
        except RuntimeError as error:
            raise self.error(JournalUnreadableError, str(error)) from None
        self.path = self.shown = str(self._root)

    def error(self, kind: type[E], message: str) -> E:
        """See :class:`Folder`."""
        return kind(self.shown, message, self._option)

    def make(self, name: str = "") -> None:
        """See :class:`Folder`."""
        folder = self._root / name
        missing = [each for each in (folder, *folder.parents) if not each.exists()]
        try:
            folder.mkdir(self._mode, parents=True, exist_ok=True)
        except FileExistsError:
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR)) from None
        # also existing folders: their creator may have been killed before they were on the disk
        sync_folder(folder)
        for each in missing or [folder]:
            sync_folder(each.parent)

    def list(self, name: str = "") -> dict[str, int]:
        """See :class:`Folder`."""
        try:
            with os.scandir(self._root / name) as entries:
                # all names before the sizes: a file that is listed with a later one has its last size
                listed = [*entries]
        except FileNotFoundError:
            return {}
        found = {}
        for entry in listed:
            with contextlib.suppress(FileNotFoundError):
                if entry.is_file():
                    found[entry.name] = entry.stat().st_size
        return found

    def partitions(self) -> builtins.list[int]:
        """Return the numbers of the partitions, which have a folder each."""
        with os.scandir(self._root) as entries:
            return sorted(int(entry.name) for entry in entries if _PARTITION.fullmatch(entry.name) and entry.is_dir())

    def read(self, name: str, start: int = 0, length: int | None = None, *, copy: bool = False) -> memoryview:
        """See :class:`Folder`.

        A file that its writer may truncate must be copied: reading mapped bytes that are gone ends the process.
        """
        with (self._root / name).open("rb") as file:
            size = max(0, os.fstat(file.fileno()).st_size - start)
            wanted = size if length is None else min(length, size)
            if copy or not wanted:
                file.seek(start)
                return memoryview(file.read(wanted))
            skipped = start % mmap.ALLOCATIONGRANULARITY
            mapped = mmap.mmap(file.fileno(), skipped + wanted, access=mmap.ACCESS_READ, offset=start - skipped)
        return memoryview(mapped)[skipped : skipped + wanted]

    def write(self, name: str, parts: Iterable[Any]) -> int:
        """See :class:`Folder`."""
        path = self._root / name
        temporary = path.with_name(f".{path.name}.new")  # there is one writer
        with on_failure(_discard, temporary):
            with open(temporary, "wb", opener=private) as file:
                for part in parts:
                    file.write(part)
                file.flush()
                os.fsync(file.fileno())
                size = file.tell()
            temporary.replace(path)
        sync_folder(path.parent)
        return size

    def append_to(self, name: str, keep: int = 0) -> Appender:
        """See :class:`Folder`."""
        return Appender(self._root / name, keep)

    def delete(self, name: str) -> None:
        """See :class:`Folder`."""
        path = self._root / name
        path.unlink(missing_ok=True)
        sync_folder(path.parent)  # a file that is deleted later must not disappear earlier

    def room(self) -> int | None:
        """See :class:`Folder`."""
        with contextlib.suppress(OSError):
            found = os.statvfs(self._root)
            return found.f_bfree * found.f_frsize
        return None

    def lock(self, *, with_folder: bool = False) -> HeldLock:
        """See :class:`Folder`. The kernel releases the lock however its holder ends.

        Args:
            with_folder: see :func:`lock_file`; a deleted lock file admits no second writer then.
        """
        error = self.error(JournalLockedError, self._locked)
        self._held = lock_file(self._root / "lock", self._lock_timeout, error, with_folder=with_folder)
        return self._held

    def check_lock(self) -> None:
        """See :class:`Folder`. The kernel prevents that."""


class Appender:
    """A local file that grows, from its first ``keep`` bytes on. For one thread."""

    def __init__(self, path: Path, keep: int) -> None:
        self.path = path
        self._file = private(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC)
        #: bytes that the disk has
        self.size = keep
        with on_failure(self.close):
            if os.fstat(self._file).st_size != keep:
                os.ftruncate(self._file, keep)
            # existing bytes count from now on, and their writer may have been killed before the disk had them
            os.fsync(self._file)
            sync_folder(path.parent)

    def append(self, parts: Iterable[Any], *, sync: bool = True) -> None:
        """Write all of ``parts``; if that fails, truncate the file if possible.

        Args:
            parts: bytes-like objects.
            sync: whether to wait until the disk has them.
        """
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
            if sync:
                os.fdatasync(self._file)
            if not os.fstat(self._file).st_nlink:
                raise OSError(errno.ENOENT, "the segment was removed")  # by another program: readers cannot find it
        except BaseException:
            with contextlib.suppress(OSError):
                os.ftruncate(self._file, self.size)
            raise
        self.size = end

    def sync(self) -> None:
        """Wait until the disk has everything that was appended."""
        os.fdatasync(self._file)

    def close(self) -> None:
        """Close the file. Idempotent."""
        file, self._file = self._file, -1
        if file >= 0:
            os.close(file)


def _discard(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.unlink()


def sync_file(path: Path) -> None:
    """Wait until the disk has all bytes of a file, if it still exists."""
    with contextlib.suppress(FileNotFoundError):
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fdatasync(descriptor)
        finally:
            os.close(descriptor)


def sync_folder(folder: Path) -> None:
    """Wait until the disk has the names in ``folder``, if this user may open it."""
    with contextlib.suppress(PermissionError):
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
