"""The disk of a world: real files in a folder of memory, below which the world notes what was not synced yet.

The stand-ins of ``os.open``, ``os.pwritev``, ``os.fsync`` … do what the real ones do, after a fault of the disk if one
is due, and take virtual time. A process that is killed loses nothing that it had written; it may be killed in the midst
of a write. After a crash of its machine (:meth:`Disk.lose_power`) files and folders are as :mod:`.durable` says.

SQLite writes its files itself. Its connections are of a class that takes the time of a sync for each transaction, and
fails as SQLite does on a full or failing disk. A killed process rolls its open transactions back
(:meth:`Disk.close_all`).
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import sqlite3
import tempfile
from dataclasses import dataclass, field
from functools import cache
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self

from tests.simulation.world import current
from tests.simulation.world.durable import Unsynced, content_of

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Iterator

#: where the folders of worlds are made: in memory, if the machine has such a place
_MEMORY: Final = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
#: free bytes of a disk that is not full
_ROOM: Final = 2**40
#: free bytes that a transaction of SQLite needs
_TRANSACTION: Final = 4096
_BLOCK: Final = 512
#: pause after which a connection of SQLite looks whether another one still writes, seconds
_BUSY: Final = 0.02
#: share of the writes in the midst of which other threads may run, and the process be killed
_SPLIT: Final = 0.3

_real: Final[dict[str, Callable[..., Any]]] = {
    name: getattr(os, name)
    for name in (
        "open", "close", "write", "pwrite", "writev", "pwritev", "fsync", "fdatasync", "ftruncate", "truncate",
        "replace", "rename", "unlink", "remove", "mkdir", "rmdir", "statvfs", "scandir", "listdir",
    )
}  # fmt: skip
_real_connect: Final = sqlite3.connect


class DiskFaults:
    """What the disk does wrong.

    Attributes:
        fails: the next so many syncs fail with ``EIO``.
        failing_writes: the next so many writes fail likewise, after some of their bytes.
        sync_time: longest time that a sync takes, seconds.
    """

    def __init__(self) -> None:
        self.fails = 0
        self.failing_writes = 0
        self.sync_time = 0.002


@dataclass
class _Open:
    """An open file or folder.

    Attributes:
        path: empty when it was removed.
        number: of the file, which tells it from one that has its descriptor later.
    """

    process: Any
    path: str
    number: int
    is_folder: bool = False


@dataclass
class Copy:
    """An older state of a folder: its files by their paths in it, and its folders."""

    files: dict[str, bytes] = field(default_factory=dict)
    folders: list[str] = field(default_factory=list)


class Disk:
    """The files of a world, below :attr:`folder`."""

    def __init__(self, random: random.Random) -> None:
        self.random = random
        self.folder = Path(tempfile.mkdtemp(prefix="world-", dir=_MEMORY))
        self._root = str(self.folder)
        self._prefix = self._root + os.sep
        self.faults = DiskFaults()
        #: bytes that all files may have together
        self._capacity: float = inf
        #: what is open, by descriptor
        self.files: dict[int, _Open] = {}
        self.unsynced = Unsynced()
        self.databases: dict[sqlite3.Connection, Any] = {}
        self.counts: dict[str, int] = {}
        #: when a write, a sync or a transaction failed last, virtual seconds
        self.failed_at = -inf
        #: whether the world itself is at work on the files
        self.is_at_work = False

    def owns(self, path: Any) -> bool:
        """Return whether ``path`` is a file of the world."""
        if not isinstance(path, (str, os.PathLike)):
            return False
        text = os.fspath(path)
        return isinstance(text, str) and (text.startswith(self._prefix) or text == self._root)

    def opened(self, descriptor: int, path: Any, *, is_folder: bool = False) -> None:
        """Note that the current process opened a file or a folder."""
        fiber = current.scheduler.current
        process = None if fiber is None else fiber.process
        self.files[descriptor] = _Open(process, os.fspath(path), os.fstat(descriptor).st_ino, is_folder)

    def count(self, kind: str) -> None:
        """Count a fault."""
        if kind in ("EIO", "full disk"):
            self.failed_at = current.scheduler.now
        self.counts[kind] = self.counts.get(kind, 0) + 1

    def left_open(self) -> Iterator[tuple[Any, str]]:
        """Yield what living processes have open: the process, and the path of the file or the database."""
        for descriptor, opened in self.files.items():
            if opened.process is None or not opened.process.is_alive:
                continue
            with contextlib.suppress(OSError):  # a file object has closed it, unseen
                if os.fstat(descriptor).st_ino == opened.number:
                    yield opened.process, opened.path.replace(self._root, "disk") or "removed"
        for database, process in self.databases.items():
            if process.is_alive:
                yield process, str(getattr(database, "path", "")).replace(self._root, "disk")

    # --- room

    def fill(self, left: int = 0) -> None:
        """Have room for ``left`` more bytes only, and for those that are removed."""
        self._capacity = self._used() + left

    def make_room(self) -> None:
        """End what :meth:`fill` began."""
        self._capacity = inf

    @property
    def is_full(self) -> bool:
        """Return whether :meth:`fill` holds."""
        return self._capacity < inf

    @property
    def room(self) -> int:
        """Return the free bytes."""
        return _ROOM if self._capacity == inf else max(0, int(self._capacity) - self._used())

    def _used(self) -> int:
        return sum(os.stat(path).st_size for path in _paths(self._root))

    def refuse_full(self) -> None:
        """Raise the error of a full disk."""
        self.count("full disk")
        raise OSError(errno.ENOSPC, "No space left on device")

    # --- writing

    def write(self, descriptor: int, parts: list[Any], at: int | None) -> int:
        """Write as much of ``parts`` as there is room for; return the number of bytes."""
        opened = self.files[descriptor]
        current.scheduler.point()
        data = b"".join(bytes(part) for part in parts)
        if opened.path:
            self.unsynced.writing(machine(), opened.path)
        if self.faults.failing_writes > 0:
            self.faults.failing_writes -= 1
            self.count("EIO")
            self._put(descriptor, data[: int(self.random.random() * len(data))], at)
            raise OSError(errno.EIO, "Input/output error")
        if self.is_full:
            size = os.fstat(descriptor).st_size
            begin = size if at is None else at
            fitting = max(0, size - begin) + self.room
            if fitting < len(data):
                data = data[:fitting]
                if not data:
                    self.refuse_full()
        if len(data) > 1 and self.random.random() < _SPLIT:
            middle = 1 + int(self.random.random() * (len(data) - 1))
            self._put(descriptor, data[:middle], at)
            current.scheduler.point()
            self._put(descriptor, data[middle:], None if at is None else at + middle)
        else:
            self._put(descriptor, data, at)
        return len(data)

    def _put(self, descriptor: int, data: bytes, at: int | None) -> None:
        while data:
            done = _real["write"](descriptor, data) if at is None else _real["pwrite"](descriptor, data, at)
            data = data[done:]
            at = None if at is None else at + done

    def cut_off(self, descriptor: int, size: int) -> None:
        """Give a file a size."""
        current.scheduler.point()
        path = self.files[descriptor].path
        if path:
            self.unsynced.writing(machine(), path)
            self.unsynced.cutting_off(path, size)
        _real["ftruncate"](descriptor, size)

    def sync(self, descriptor: int) -> None:
        """Take the time of a sync, and fail if a fault is due."""
        opened = self.files[descriptor]
        content = None if opened.is_folder or not opened.path else content_of(opened.path)
        self.wait()
        if self.faults.fails > 0:
            self.faults.fails -= 1
            self.count("EIO")
            if content is not None and opened.path:
                self.unsynced.failed(opened.path, content)
            raise OSError(errno.EIO, "Input/output error")
        if self.is_full and self._used() > self._capacity:  # bytes for which the system has found no place
            self.refuse_full()
        if opened.is_folder:
            self.unsynced.folder_synced(opened.path)
        elif content is not None and opened.path:
            self.unsynced.synced(opened.path, content)

    def wait(self) -> None:
        """Take the time of a sync."""
        current.scheduler.hold(self.random.random() * self.faults.sync_time, "the disk")

    # --- names

    def removing(self, path: str, *, is_folder: bool = False) -> None:
        """Note that a file or a folder is about to be removed."""
        self.unsynced.removing(machine(), path, is_folder=is_folder)
        for opened in self.files.values():
            if opened.path == path:
                opened.path = ""

    def renaming(self, before: str, after: str) -> None:
        """Note that a file or a folder is about to be renamed."""
        self.unsynced.renaming(machine(), before, after)
        inside = before + os.sep
        for opened in self.files.values():
            if opened.path == after:
                opened.path = ""
            elif opened.path == before or opened.path.startswith(inside):
                opened.path = after + opened.path[len(before) :]

    # --- faults

    def lose_power(self, process: Any) -> None:
        """Take back what the machine of a process has not synced, or a part of it."""
        with self.work():
            for told in self.unsynced.lose(machine(process), self.random):
                self.count("unsynced changes lost")
                current.world.note("disk", told)

    def copy(self, name: str) -> Copy:
        """Return a copy of a folder, as a file system makes it in one moment."""
        made = Copy()
        root = self._prefix + name
        with self.work():
            for folder, _, files in os.walk(root):
                made.folders.append(os.path.relpath(folder, root))
                for file in sorted(files):
                    if not file.endswith("-shm"):  # the memory that connections of SQLite share
                        path = os.path.join(folder, file)
                        made.files[os.path.relpath(path, root)] = content_of(path) or b""
        return made

    def restore(self, name: str, copy: Copy) -> None:
        """Put a copy in the place of a folder that no process has open. The disk has it when this returns."""
        root = Path(self._prefix + name)
        self.count("older copy")
        with self.work():
            shutil.rmtree(root, ignore_errors=True)
            for folder in copy.folders:
                (root / folder).mkdir(0o700, parents=True, exist_ok=True)
            for file, content in copy.files.items():
                (root / file).write_bytes(content)
                (root / file).chmod(0o600)
            self.unsynced.forget(str(root))

    def change_bytes(self, path: Path, count: int, *, begin: int = 0) -> tuple[int, int] | None:
        """Change ``count`` bytes of a file behind ``begin``, in one place; return where, ``None`` if there are none."""
        with self.work():
            content = bytearray(content_of(str(path)) or b"")
            if len(content) <= begin:
                return None
            at = begin + int(self.random.random() * (len(content) - begin))
            end = min(len(content), at + count)
            for place in range(at, end):
                content[place] ^= 1 + int(self.random.random() * 255)
            with open(path, "r+b") as file:
                file.seek(at)
                file.write(content[at:end])
            self.unsynced.forget(str(path))
        self.count("changed bytes")
        return at, end

    @contextlib.contextmanager
    def work(self) -> Iterator[None]:
        """Let the world itself change files with the functions of ``os``: without time, faults and traces."""
        before, self.is_at_work = self.is_at_work, True
        try:
            yield
        finally:
            self.is_at_work = before

    def close_all(self, process: Any) -> None:
        """Close what a killed process had open."""
        for connection, owner in [*self.databases.items()]:
            if owner is process:
                connection.close()
        for descriptor, opened in [*self.files.items()]:
            if opened.process is process:
                del self.files[descriptor]
                with contextlib.suppress(OSError):  # a file object has closed it
                    if os.fstat(descriptor).st_ino == opened.number:
                        # objects of the process live on, and may close it when they are collected: nothing else must
                        # have its number then
                        os.dup2(_nothing(), descriptor)

    def remove(self) -> None:
        """Remove the folder. To be called outside of the world."""
        shutil.rmtree(self.folder, ignore_errors=True)


@cache
def _nothing() -> int:
    made: int = _real["open"](os.devnull, os.O_RDWR | os.O_CLOEXEC)
    return made


def machine(process: Any = None) -> str:
    """Return the name of the machine of a process, by default of the current one: all lives of a role have one."""
    if process is None:
        fiber = current.scheduler.current
        process = None if fiber is None else fiber.process
    return "" if process is None else str(process.name).partition(".")[0]


def _paths(root: str) -> Iterator[str]:
    for folder, _, files in os.walk(root):
        for file in files:
            yield os.path.join(folder, file)


def _disk() -> Disk | None:
    """Return the disk of the world, unless the world is at work on it itself."""
    world = current.world
    return None if world is None or world.disk.is_at_work else world.disk


# --- the stand-ins of the functions of os


def _full_path(path: Any, dir_fd: int | None) -> Any:
    if dir_fd is None or not isinstance(path, str) or os.path.isabs(path):
        return path
    return os.path.join(os.readlink(f"/proc/self/fd/{dir_fd}"), path)


def _open(path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
    disk = _disk()
    full = _full_path(path, dir_fd)
    if disk is None or not disk.owns(full):
        plain: int = _real["open"](path, flags, mode, dir_fd=dir_fd)
        return plain
    current.scheduler.point()
    text = os.fspath(full)
    is_new = bool(flags & os.O_CREAT) and not os.path.exists(text)
    is_cut = bool(flags & os.O_TRUNC) and os.path.exists(text)
    if is_cut:
        disk.unsynced.writing(machine(), text)
        disk.unsynced.cutting_off(text, 0)
    made: int = _real["open"](path, flags, mode, dir_fd=dir_fd)
    if is_new:
        disk.unsynced.made(machine(), text)
        if flags & (os.O_WRONLY | os.O_RDWR):  # a file object may write it without these functions
            disk.unsynced.writing(machine(), text)
    disk.opened(made, text, is_folder=bool(flags & os.O_DIRECTORY))
    return made


def _close(descriptor: int) -> None:
    disk = _disk()
    if disk is not None:
        disk.files.pop(descriptor, None)
    _real["close"](descriptor)


def _writing(name: str) -> Callable[..., Any]:
    real = _real[name]

    def write(descriptor: int, data: Any, *rest: Any) -> Any:
        disk = _disk()
        if disk is None or descriptor not in disk.files:
            return real(descriptor, data, *rest)
        return disk.write(descriptor, [*data] if name.endswith("v") else [data], rest[0] if rest else None)

    return write


def _ftruncate(descriptor: int, size: int) -> None:
    disk = _disk()
    if disk is None or descriptor not in disk.files:
        _real["ftruncate"](descriptor, size)
    else:
        disk.cut_off(descriptor, size)


def _truncate(path: Any, size: int) -> None:
    disk = _disk()
    if disk is None or not disk.owns(path):
        _real["truncate"](path, size)
        return
    descriptor = _open(path, os.O_WRONLY)
    try:
        disk.cut_off(descriptor, size)
    finally:
        _close(descriptor)


def _syncing(name: str) -> Callable[..., Any]:
    real = _real[name]

    def sync(descriptor: Any) -> None:
        disk = _disk()
        number = descriptor if isinstance(descriptor, int) else descriptor.fileno()
        if disk is not None and number in disk.files:
            disk.sync(number)
        elif disk is None:
            real(descriptor)

    return sync


def _moving(name: str) -> Callable[..., Any]:
    real = _real[name]

    def move(before: Any, after: Any, **keywords: Any) -> None:
        disk = _disk()
        if disk is not None and disk.owns(before):
            current.scheduler.point()
            if os.path.exists(before):
                disk.renaming(os.fspath(before), os.fspath(after))
        real(before, after, **keywords)

    return move


def _removing(name: str) -> Callable[..., Any]:
    real = _real[name]

    def remove(path: Any, *, dir_fd: int | None = None) -> None:
        disk = _disk()
        full = _full_path(path, dir_fd)
        if disk is not None and disk.owns(full):
            current.scheduler.point()
            text = os.fspath(full)
            if os.path.isdir(text) and not os.listdir(text) if name == "rmdir" else os.path.isfile(text):
                disk.removing(text, is_folder=name == "rmdir")
        real(path, dir_fd=dir_fd)

    return remove


def _mkdir(path: Any, mode: int = 0o777, *, dir_fd: int | None = None) -> None:
    disk = _disk()
    full = _full_path(path, dir_fd)
    if disk is not None and disk.owns(full):
        current.scheduler.point()
        if disk.is_full and disk.room < _BLOCK and not os.path.exists(full):
            disk.refuse_full()
    _real["mkdir"](path, mode, dir_fd=dir_fd)
    if disk is not None and disk.owns(full):
        disk.unsynced.made(machine(), os.fspath(full), is_folder=True)


def _statvfs(path: Any) -> Any:
    disk = _disk()
    if disk is None or not disk.owns(path):
        return _real["statvfs"](path)
    free = disk.room // _BLOCK
    return os.statvfs_result((_BLOCK, _BLOCK, _ROOM // _BLOCK, free, free, _ROOM, _ROOM, _ROOM, 0, 255))


class _Entries:
    """What ``os.scandir`` returns, in the order of the names: that of a file system is not the same in each run."""

    def __init__(self, entries: Any) -> None:
        with entries:
            self._entries = iter(sorted(entries, key=lambda entry: entry.name))

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> os.DirEntry[Any]:
        return next(self._entries)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """See ``os.scandir``."""


def _scandir(path: Any = ".") -> Any:
    return _Entries(_real["scandir"](path))


def _listdir(path: Any = ".") -> list[Any]:
    return sorted(_real["listdir"](path))


# --- SQLite


class Connection(sqlite3.Connection):
    """A connection whose transactions take the time of a sync, and fail with a full or failing disk.

    Attributes:
        path, folder: of the database, if it is one of the world.
        patience: how long it waits for another one, seconds.
        is_alone: it needs no memory that is shared with other connections.
    """

    folder = path = ""
    is_alone = False
    patience = 0.0
    _is_open = False
    _has_committed = False

    def _fail(self, name: str, text: str) -> None:
        error = sqlite3.OperationalError(text)
        error.sqlite_errorname = name
        raise error

    def _before(self, statement: str) -> Disk | None:
        disk = _disk()
        if disk is None or not self.folder:
            return None
        current.scheduler.point()
        if statement.startswith("PRAGMA locking_mode=EXCLUSIVE"):
            self.is_alone = True
        elif (
            not self._is_open
            and not self.is_alone
            and disk.is_full
            and disk.room < _TRANSACTION
            and not os.path.exists(f"{self.path}-shm")
        ):
            disk.count("full disk")
            self._fail("SQLITE_IOERR_SHMSIZE", "disk I/O error")
        else:
            self._is_open = True
        return disk

    def _commit(self, disk: Disk) -> None:
        disk.wait()
        if disk.is_full and disk.room < _TRANSACTION:
            disk.count("full disk")
            self._fail("SQLITE_FULL", "database or disk is full")
        if disk.faults.fails > 0:
            disk.faults.fails -= 1
            disk.count("EIO")
            self._fail("SQLITE_IOERR_FSYNC", "disk I/O error")
        if not self._has_committed:
            self._has_committed = True
            disk.unsynced.folder_synced(self.folder)  # SQLite syncs it when it has made its files

    def execute(self, statement: str, *arguments: Any) -> sqlite3.Cursor:
        """See ``sqlite3.Connection``."""
        disk = self._before(statement)
        if disk is not None and statement.startswith("COMMIT"):
            self._commit(disk)
        if disk is None:
            return super().execute(statement, *arguments)
        if statement.startswith("PRAGMA busy_timeout="):
            self.patience = int(statement.partition("=")[2]) / 1000
            statement = "PRAGMA busy_timeout"
        until = current.scheduler.now + self.patience
        while True:
            try:
                found = super().execute(statement, *arguments)
                break
            except sqlite3.OperationalError as error:
                if error.sqlite_errorname != "SQLITE_BUSY" or current.scheduler.now >= until:
                    raise
            current.scheduler.hold(_BUSY, "a database")
        current.scheduler.point()
        return found

    def executescript(self, script: str) -> sqlite3.Cursor:
        """See ``sqlite3.Connection``. The script is one transaction."""
        disk = self._before(script)
        if disk is not None:
            self._commit(disk)
        return super().executescript(script)

    def close(self) -> None:
        """See ``sqlite3.Connection``."""
        if current.world is not None:
            current.world.disk.databases.pop(self, None)
        super().close()


def _connect(database: Any, *arguments: Any, **keywords: Any) -> sqlite3.Connection:
    disk = _disk()
    text = os.fspath(database) if isinstance(database, (str, os.PathLike)) else ""
    path = str(text).removeprefix("file://").partition("?")[0]
    if disk is None or current.scheduler.current is None or not disk.owns(path):
        plain: sqlite3.Connection = _real_connect(database, *arguments, **keywords)
        return plain
    current.scheduler.point()
    patience = keywords.get("timeout", 5.0)
    given = {"factory": Connection, **keywords, "timeout": 0.0}  # SQLite itself would wait in real time
    made: sqlite3.Connection = _real_connect(database, *arguments, **given)
    if isinstance(made, Connection):
        made.path, made.folder, made.patience = path, os.path.dirname(path), patience
    disk.unsynced.forget(path)
    disk.databases[made] = current.scheduler.current.process
    return made


def install() -> None:
    """Replace the functions of ``os`` and ``sqlite3``. Once, and for ever."""
    names: dict[str, Callable[..., Any]] = {
        "open": _open, "close": _close, "ftruncate": _ftruncate, "truncate": _truncate, "mkdir": _mkdir,
        "statvfs": _statvfs, "scandir": _scandir, "listdir": _listdir,
    }  # fmt: skip
    names |= {name: _writing(name) for name in ("write", "pwrite", "writev", "pwritev")}
    names |= {name: _syncing(name) for name in ("fsync", "fdatasync")}
    names |= {name: _moving(name) for name in ("replace", "rename")}
    names |= {name: _removing(name) for name in ("unlink", "remove", "rmdir")}
    for name, value in names.items():
        setattr(os, name, value)
    setattr(sqlite3, "connect", _connect)  # noqa: B010  # mypy: it is a function
