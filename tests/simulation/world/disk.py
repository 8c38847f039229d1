"""The disk of a world: real files in a folder of memory, below which the world notes what was not synced yet.

The stand-ins of ``os.fsync``, ``os.pwritev`` … do what the real ones do, after a fault of the disk if one is due, and take
virtual time. After a crash of the machine (:meth:`Disk.lose_power`) files hold what was synced, and any part of what was
written since. A process that is killed loses nothing that it had written.

SQLite writes its files itself. A killed process rolls its open transactions back (:meth:`Disk.close_all`).
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import sqlite3
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from tests.simulation.world import current

if TYPE_CHECKING:
    import random
    from collections.abc import Callable

#: where the folders of worlds are made: in memory, if the machine has such a place
_MEMORY: Final = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None  # noqa: S108  # a folder with a random name

_real: Final[dict[str, Callable[..., Any]]] = {
    name: getattr(os, name)
    for name in ("open", "close", "write", "pwrite", "pwritev", "fsync", "fdatasync", "ftruncate", "replace", "unlink")
}
_real_connect: Final = sqlite3.connect


class DiskFaults:
    """What the disk does wrong.

    Attributes:
        is_full: writes fail with ``ENOSPC``, after some of their bytes.
        fails: the next so many syncs fail with ``EIO``.
        sync_time: longest time that a sync takes, seconds.
    """

    def __init__(self) -> None:
        self.is_full = False
        self.fails = 0
        self.sync_time = 0.002


class Disk:
    """The files of a world, below :attr:`folder`."""

    def __init__(self, random: random.Random) -> None:
        self._random = random
        self.folder = Path(tempfile.mkdtemp(prefix="world-", dir=_MEMORY))
        self._prefix = str(self.folder) + os.sep
        self.faults = DiskFaults()
        #: the open files of each process, by descriptor
        self.files: dict[int, tuple[Any, str]] = {}
        #: what a crash of the machine may take back: size and content at the last sync, by path
        self._synced: dict[str, bytes] = {}
        self.databases: dict[sqlite3.Connection, Any] = {}
        self.counts: dict[str, int] = {}

    def owns(self, path: Any) -> bool:
        """Return whether ``path`` is a file of the world."""
        return isinstance(path, (str, os.PathLike)) and os.fspath(path).startswith(self._prefix)

    def opened(self, descriptor: int, path: Any) -> None:
        """Note that the current process opened a file."""
        fiber = current.scheduler.current
        self.files[descriptor] = (None if fiber is None else fiber.process, os.fspath(path))

    def before_write(self, descriptor: int) -> None:
        """Fail if a fault is due, and keep what the file holds, unless that was done since its last sync."""
        current.scheduler.point()
        path = self.files[descriptor][1]
        if path not in self._synced:
            try:
                self._synced[path] = Path(path).read_bytes()
            except OSError:
                self._synced[path] = b""
        if self.faults.is_full:
            self.count("full disk")
            raise OSError(errno.ENOSPC, "No space left on device")

    def sync(self, descriptor: int) -> None:
        """Take the time of a sync, and fail if a fault is due."""
        scheduler = current.scheduler
        scheduler.hold(self._random.random() * self.faults.sync_time, "the disk")
        path = self.files[descriptor][1]
        if self.faults.fails > 0:
            self.faults.fails -= 1
            self.count("EIO")
            raise OSError(errno.EIO, "Input/output error")
        self._synced.pop(path, None)

    def count(self, kind: str) -> None:
        """Count a fault."""
        self.counts[kind] = self.counts.get(kind, 0) + 1

    def lose_power(self) -> None:
        """Take back what was not synced, or a part of it, of every file."""
        for path, before in self._synced.items():
            file = Path(path)
            try:
                after = file.read_bytes()
            except OSError:
                continue
            if len(after) < len(before) or after[: len(before)] != before:
                kept = before if self._random.random() < 0.5 else after
            else:
                kept = after[: len(before) + int(self._random.random() * (len(after) - len(before) + 1))]
                if self._random.random() < 0.2 and len(kept) < len(
                    after
                ):  # its length was written, its content was not
                    kept += bytes(len(after) - len(kept))
            if kept != after:
                self.count("unsynced writes lost")
                file.write_bytes(kept)
        self._synced.clear()

    def close_all(self, process: Any) -> None:
        """Close what a killed process had open."""
        for connection, owner in [*self.databases.items()]:
            if owner is process:
                del self.databases[connection]
                connection.close()
        for descriptor, (owner, path) in [*self.files.items()]:
            if owner is process:
                del self.files[descriptor]
                with contextlib.suppress(OSError):  # a file object has closed it
                    if os.readlink(f"/proc/self/fd/{descriptor}") == path:
                        _real["close"](descriptor)

    def remove(self) -> None:
        """Remove the folder. To be called outside of the world."""
        shutil.rmtree(self.folder, ignore_errors=True)


def _disk() -> Disk | None:
    return None if current.world is None else current.world.disk


def _open(path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
    disk = _disk()
    if disk is not None and disk.owns(path):
        current.scheduler.point()
    made: int = _real["open"](path, flags, mode, dir_fd=dir_fd)
    if disk is not None and disk.owns(path):
        disk.opened(made, path)
    return made


def _close(descriptor: int) -> None:
    disk = _disk()
    if disk is not None:
        disk.files.pop(descriptor, None)
    _real["close"](descriptor)


def _writing(name: str) -> Callable[..., Any]:
    real = _real[name]

    def write(descriptor: int, *arguments: Any) -> Any:
        disk = _disk()
        if disk is not None and descriptor in disk.files:
            disk.before_write(descriptor)
        return real(descriptor, *arguments)

    return write


def _syncing(name: str) -> Callable[..., Any]:
    real = _real[name]

    def sync(descriptor: int) -> None:
        disk = _disk()
        if disk is not None and descriptor in disk.files:
            disk.sync(descriptor)
        elif disk is None:
            real(descriptor)

    return sync


def _moving(name: str) -> Callable[..., Any]:
    real = _real[name]

    def move(*arguments: Any, **keywords: Any) -> Any:
        if _disk() is not None:
            current.scheduler.point()
        return real(*arguments, **keywords)

    return move


def _connect(*arguments: Any, **keywords: Any) -> sqlite3.Connection:
    disk = _disk()
    made = _real_connect(*arguments, **keywords)
    if disk is not None and current.scheduler.current is not None:
        disk.databases[made] = current.scheduler.current.process
    return made


def install() -> None:
    """Replace the functions of ``os`` and ``sqlite3``. Once, and for ever."""
    names: dict[str, Callable[..., Any]] = {"open": _open, "close": _close}
    names |= {name: _writing(name) for name in ("write", "pwrite", "pwritev", "ftruncate")}
    names |= {name: _syncing(name) for name in ("fsync", "fdatasync")}
    names |= {name: _moving(name) for name in ("replace", "unlink")}
    for name, value in names.items():
        setattr(os, name, value)
    setattr(sqlite3, "connect", _connect)  # noqa: B010  # mypy: it is a function
