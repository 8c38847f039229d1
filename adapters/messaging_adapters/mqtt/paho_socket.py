"""The socket of paho's client: the one module that reaches below the public API of paho-mqtt.

paho makes the control packets and reads the broker's. The connection is not its own: packets of data go past it, see
the package. So paho needs a socket whose other end is in this process. There are two ways to give it one:

==========================  ==========================================================================================
:class:`MemorySocket`       Replaces ``Client._create_socket``, a private method. No system call, no descriptor. For
                            the releases of paho in :data:`TESTED_RELEASES`.
:class:`LoopbackSocket`     Public API only: paho connects to a listening socket of the loopback interface. For all
                            other releases.
==========================  ==========================================================================================

Both carry only CONNECT, CONNACK and DISCONNECT. Messages are equally fast with either, and connecting is, too (2 ms of
CPU). The first opens no listening socket, which a sandbox may forbid, and no descriptors.
"""

from __future__ import annotations

import logging
import select
import socket
from typing import TYPE_CHECKING, Any, Final

import paho.mqtt
import paho.mqtt.client as mqtt

from messaging.execution import clock

if TYPE_CHECKING:
    from collections.abc import Callable

logger = logging.getLogger(__name__)

#: releases whose ``Client._create_socket`` is known, as major and minor version
TESTED_RELEASES: Final = frozenset({"2.2"})
#: seconds that a packet may take through the loopback interface
_LOOPBACK_TIMEOUT: Final = 5.0


def is_tested(release: str = paho.mqtt.__version__) -> bool:
    """Return whether ``release`` is known to take its socket from ``Client._create_socket``."""
    return ".".join(release.split(".")[:2]) in TESTED_RELEASES and "_create_socket" in vars(mqtt.Client)


def new_socket(*arguments: Any, **keywords: Any) -> MemorySocket | LoopbackSocket:
    """Return the socket for this release of paho, with a client of these arguments."""
    if is_tested():
        return MemorySocket(*arguments, **keywords)
    logger.info(
        "paho-mqtt %s is not among the tested releases %s: it is connected through the loopback interface",
        paho.mqtt.__version__, ", ".join(sorted(TESTED_RELEASES)),
    )  # fmt: skip
    return LoopbackSocket(*arguments, **keywords)


class MemorySocket:
    """Both ends in memory. paho takes it for a non-blocking socket.

    Attributes:
        client: its callbacks are called by :meth:`give` and :meth:`connect`.
    """

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        self.client: mqtt.Client = _MemoryClient(self, *arguments, **keywords)
        self._to_paho = b""
        self._from_paho = bytearray()

    def connect(self, connect: Callable[[str, int], object]) -> None:
        """Have ``connect(host, port)`` call ``client.connect`` for this socket."""
        connect("memory", 1)  # neither is used

    def take(self) -> bytes:
        """Return the packets that paho has written since the last call."""
        data = bytes(self._from_paho)
        self._from_paho.clear()
        return data

    def give(self, packet: bytes, is_read: Callable[[], object]) -> None:
        """Let paho read a packet; ``is_read`` returns whether one of its callbacks was called for it."""
        self._to_paho += packet
        while self._to_paho and self.client.socket() is not None and not is_read():
            self.client.loop_read()

    # --- the methods that paho calls

    def recv(self, size: int) -> bytes:
        """Return bytes that were given, or raise ``BlockingIOError``."""
        if not self._to_paho:
            raise BlockingIOError
        data, self._to_paho = self._to_paho[:size], self._to_paho[size:]
        return data

    def send(self, data: bytes | bytearray) -> int:
        """Keep ``data`` for :meth:`take`."""
        self._from_paho += data
        return len(data)

    def setblocking(self, flag: bool) -> None:
        """Do nothing: it never blocks."""

    def fileno(self) -> int:
        """Return -1: there is no descriptor."""
        return -1

    def close(self) -> None:
        """Do nothing: packets that were written can still be taken."""


class _MemoryClient(mqtt.Client):
    """A client that uses a :class:`MemorySocket`."""

    def __init__(self, memory: MemorySocket, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self._memory = memory

    def _create_socket(self) -> MemorySocket:
        return self._memory


class LoopbackSocket:
    """A TCP connection of this process with itself."""

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        self.client = mqtt.Client(*arguments, **keywords)
        self._ours: socket.socket | None = None
        self._closed = False

    def connect(self, connect: Callable[[str, int], object]) -> None:
        """See :class:`MemorySocket`."""
        with socket.create_server(("127.0.0.1", 0)) as server:
            server.settimeout(_LOOPBACK_TIMEOUT)
            connect(*server.getsockname())
            theirs: Any = self.client.socket()
            name = theirs.getsockname()  # fails if it was closed meanwhile
            while True:
                ours, address = server.accept()
                if address == name:  # and not another program's
                    break
                ours.close()
        ours.settimeout(_LOOPBACK_TIMEOUT)
        self._ours = ours
        if self._closed:
            self.close()

    def take(self) -> bytes:
        """See :class:`MemorySocket`. paho writes a packet before its method returns, so it is there or about to be."""
        data = b""
        while self._ours is not None and not _is_complete(data):
            more = self._ours.recv(4096)
            if not more:
                break
            data += more
        return data

    def give(self, packet: bytes, is_read: Callable[[], object]) -> None:
        """See :class:`MemorySocket`."""
        if self._ours is None:
            return
        self._ours.sendall(packet)
        deadline = clock.monotonic() + _LOOPBACK_TIMEOUT
        while not is_read() and clock.monotonic() < deadline:
            theirs: Any = self.client.socket()
            if theirs is None:
                return
            select.select([theirs], [], [], _LOOPBACK_TIMEOUT)
            self.client.loop_read()

    def close(self) -> None:
        """Release everything. Idempotent."""
        self._closed = True
        ours, self._ours = self._ours, None
        if ours is not None:
            ours.close()
        theirs: Any = self.client.socket()
        if theirs is not None:
            theirs.close()


def _is_complete(data: bytes) -> bool:
    """Return whether ``data`` is one whole packet."""
    length = 0
    for at, digit in enumerate(data[1:5]):
        length |= (digit & 127) << 7 * at
        if digit < 128:
            return len(data) >= 2 + at + length
    return False
