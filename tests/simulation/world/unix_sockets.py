"""Unix sockets of a world: servers and clients on one machine, over files of the world's disk.

The file of a server is a real one, and stays when its process is killed. What is sent arrives at once. A socket that is
closed does not wake a thread that waits for it, as on Linux.
"""

from __future__ import annotations

import _socket
import errno
import os
import socket
import struct
from collections import deque
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from tests.simulation.world import current

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.simulation.world.scheduler import Fiber


class UnixSocket:
    """``socket.socket`` of the family ``AF_UNIX``."""

    def __init__(self) -> None:
        self.family, self.type, self.proto = socket.AF_UNIX, socket.SOCK_STREAM, 0
        self._network = current.world.network
        self.process = None if current.scheduler.current is None else current.scheduler.current.process
        self._descriptor = self._network.descriptor(self)
        self._timeout: float | None = None
        self._file: tuple[int, int] | None = None
        self._pending: deque[UnixSocket] = deque()
        self._peer: UnixSocket | None = None
        self._data = bytearray()
        self._is_at_end = False
        self.is_closed = False
        self._waiting: list[Fiber] = []

    def _wait(self, is_ready: Callable[[], bool], what: str) -> None:
        world = current.scheduler
        world.point()
        until = inf if self._timeout is None else world.now + self._timeout
        fiber = world.current
        assert fiber is not None
        while not is_ready():
            self._waiting.append(fiber)
            if not world.block(until, what) and not is_ready():
                raise TimeoutError("timed out")

    def _changed(self) -> None:
        for fiber in self._waiting:
            current.scheduler.wake(fiber)
        self._waiting.clear()

    def _check(self) -> None:
        if self.is_closed:
            raise OSError(errno.EBADF, "Bad file descriptor")

    # --- servers

    def bind(self, path: str) -> None:
        """See ``socket.socket``."""
        self._check()
        real = _socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            real.bind(path)
        finally:
            real.close()
        self._file = _number(path)

    def listen(self, backlog: int = 0) -> None:
        """See ``socket.socket``."""
        del backlog
        assert self._file is not None
        self._network.listeners[self._file] = self

    def accept(self) -> tuple[UnixSocket, str]:
        """See ``socket.socket``."""
        self._check()
        self._wait(lambda: bool(self._pending), "a client")
        return self._pending.popleft(), ""

    # --- clients

    def connect(self, path: str) -> None:
        """See ``socket.socket``."""
        self._check()
        current.scheduler.point()
        server = self._network.listeners.get(_number(path))
        if server is None:
            raise ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused")
        other = UnixSocket()
        other.process = server.process
        self._peer, other._peer = other, self
        server._pending.append(other)
        server._changed()

    # --- both ends of a connection

    def recv(self, size: int, flags: int = 0) -> bytes:
        """See ``socket.socket``."""
        del flags
        self._check()
        self._wait(lambda: bool(self._data) or self._is_at_end, "bytes")
        found = bytes(self._data[:size])
        del self._data[:size]
        return found

    def sendall(self, data: Any, flags: int = 0) -> None:
        """See ``socket.socket``."""
        del flags
        self._check()
        current.scheduler.point()
        peer = self._peer
        if peer is None or peer.is_closed:
            raise BrokenPipeError(errno.EPIPE, "Broken pipe")
        peer._data += data
        peer._changed()

    def getsockopt(self, level: int, option: int, size: int = 0) -> Any:
        """See ``socket.socket``: process, user and group of the other end."""
        del level, option, size
        return struct.pack("3i", os.getpid(), os.geteuid(), os.getegid())

    def close(self) -> None:
        """See ``socket.socket``."""
        if self.is_closed:
            return
        self.is_closed = True
        self._network.sockets.pop(self._descriptor, None)
        if self._file is not None and self._network.listeners.get(self._file) is self:
            del self._network.listeners[self._file]
        for each in self._pending:
            each.close()
        peer = self._peer
        if peer is not None and not peer.is_closed:
            peer._is_at_end = True
            peer._changed()

    def killed(self, *, vanishes: bool) -> None:
        """End with its process."""
        del vanishes
        self.close()

    def fileno(self) -> int:
        """See ``socket.socket``."""
        return -1 if self.is_closed else self._descriptor

    def settimeout(self, value: float | None) -> None:
        """See ``socket.socket``."""
        self._timeout = value

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _number(path: str) -> tuple[int, int]:
    """Return what identifies the file of a server. Raises ``FileNotFoundError``."""
    found = Path(path).stat()
    return found.st_dev, found.st_ino
