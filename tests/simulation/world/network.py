"""The network of a world: TCP connections between the sockets of its processes and its brokers.

A connection carries bytes both ways, in order, each piece after a delay, in pieces other than those in which it was
sent. A side that does not read slows the other down: a direction holds :attr:`Conditions.window` bytes.

What may happen to a connection:

=============  =====================================================================================================
``cut``        both ends see a reset; what was in flight is lost, up to any byte
``black_hole`` nothing passes, either way, until it ends: nothing is lost by itself, and neither end is told
``vanish``     the client is gone without a word: the broker sees silence
``stall``      the broker does not read for a time
=============  =====================================================================================================

And to a host: connections are refused, or not answered at all; its name is not resolved.
"""

from __future__ import annotations

import errno
import socket
from collections import deque
from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING, Any, Final

from tests.simulation.world import current
from tests.simulation.world.unix_sockets import UnixSocket

if TYPE_CHECKING:
    import random
    from collections.abc import Callable

    from tests.simulation.brokers.host import Broker, Connection
    from tests.simulation.world.scheduler import Fiber, Scheduler

_END: Final = b""
#: descriptors of the world's sockets begin here: those of the machine are smaller
FIRST_DESCRIPTOR: Final = 1_000_000


@dataclass
class Conditions:
    """How the network is.

    Attributes:
        delay: shortest and longest time of a piece on its way, seconds.
        window: bytes that a direction holds before its sender has to wait.
        piece: longest piece that arrives at once, bytes.
    """

    delay: tuple[float, float] = (5e-5, 5e-4)
    window: int = 65_536
    piece: int = 65_536


class Flow:
    """One direction of a connection. Calls ``arrived`` on the hub."""

    __slots__ = ("_arrived", "_in_flight", "_last", "_network", "is_dead", "is_held", "on_room", "size", "waiting")

    def __init__(self, network: Network, arrived: Callable[[bytes], object]) -> None:
        self._network = network
        self._arrived = arrived
        #: pieces that are on their way, with the moments of their arrival
        self._in_flight: deque[bytes] = deque()
        self._last = 0.0
        #: bytes sent that the receiver has not taken
        self.size = 0
        #: pieces that arrive only when the flow is released
        self.waiting: deque[bytes] = deque()
        self.is_held = False
        self.is_dead = False
        #: called when the receiver has taken something
        self.on_room: Callable[[], object] | None = None

    @property
    def room(self) -> int:
        """Number of bytes that may be sent now."""
        return max(0, self._network.conditions.window - self.size)

    def send(self, data: bytes) -> None:
        """Send ``data``; an empty one ends the stream."""
        network = self._network
        self.size += len(data)
        piece = max(network.conditions.piece, len(data) >> 8)  # each takes memory, however short it is
        if len(data) <= piece:
            self._post(data)
            return
        at = 0
        while at < len(data):
            length = 1 + int(network.random.random() * piece)
            self._post(data[at : at + length])
            at += length

    def _post(self, data: bytes) -> None:
        network = self._network
        low, high = network.conditions.delay
        when = max(self._last, network.scheduler.now + low + (high - low) * network.random.random())
        self._last = when
        self._in_flight.append(data)
        network.scheduler.call_at(when, self._arrive)

    def _arrive(self) -> None:
        if self.is_dead or not self._in_flight:
            return
        data = self._in_flight.popleft()
        if self.is_held:
            self.waiting.append(data)
        else:
            self._arrived(data)

    def taken(self, count: int) -> None:
        """Note that the receiver took so many bytes."""
        self.size -= count
        if self.on_room is not None:
            self.on_room()

    def hold(self) -> None:
        """Let nothing arrive until :meth:`release`."""
        self.is_held = True

    def release(self) -> None:
        """Let everything arrive that was held."""
        self.is_held = False
        while self.waiting and not self.is_dead and not self.is_held:
            self._arrived(self.waiting.popleft())

    def kill(self, *, keep: float = 0.0) -> None:
        """Lose what is on its way, but for the share ``keep`` of it, which arrives at once."""
        if self.is_dead:
            return
        left = [*self.waiting, *self._in_flight]
        self.waiting.clear()
        self._in_flight.clear()
        if keep > 0 and not self.is_held:
            data = b"".join(left)
            data = data[: int(len(data) * keep)]
            if data:
                self._arrived(data)
        self.is_dead = True


class Link:
    """A connection of a socket with a broker."""

    def __init__(self, network: Network, sock: Socket, service: Service, name: str) -> None:
        self.name = name
        self._network = network
        self._sock: Socket | None = sock
        #: the process that opened it
        self.owner = sock.process
        self.service = service
        self.to_broker = Flow(network, self._at_broker)
        self.to_client = Flow(network, self._at_client)
        self.to_broker.on_room = sock.changed
        self.is_over = False
        self.is_cut = False
        self._broker_closed = False
        self._connection: Connection | None = service.broker.accept(self)

    # --- brokers.host.Peer

    def send(self, data: bytes) -> None:
        """See ``Peer``."""
        if data and not self.is_over and not self._broker_closed:
            self.to_client.send(data)

    def close(self) -> None:
        """See ``Peer``."""
        if not self.is_over and not self._broker_closed:
            self._broker_closed = True
            self.to_client.send(_END)
            self._connection = None

    def abort(self) -> None:
        """See ``Peer``."""
        self._connection = None
        self.cut(keep_to_broker=0.0)

    @property
    def unsent(self) -> int:
        """See ``Peer``."""
        return self.to_client.size

    @property
    def has_client(self) -> bool:
        """Whether the client has its end open: otherwise the connection is over, or half open."""
        return self._sock is not None

    # --- arrivals, on the hub

    def _at_broker(self, data: bytes) -> None:
        connection = self._connection
        if connection is None:
            if data is not _END and data and not self.is_over:  # the broker has closed: its machine resets
                self._network.scheduler.call_later(self._network.conditions.delay[0], self.cut)
            return
        if data:
            self.to_broker.taken(len(data))
            connection.received(data)
        else:
            self._connection = None
            connection.lost()
            self._finish()

    def _at_client(self, data: bytes) -> None:
        if self._sock is not None:
            self._sock.arrived(data)

    # --- the client's side

    def client_closed(self, *, is_reset: bool) -> None:
        """The socket was closed: by the program, or by the kernel after the process was killed."""
        self._sock = None
        self.to_client.kill()
        if is_reset:
            self.cut(keep_to_broker=self._network.random.random())
        else:
            self.to_broker.send(_END)

    # --- faults

    def cut(self, keep_to_broker: float | None = None) -> None:
        """Reset the connection for both ends. Some of what was on its way arrives first."""
        if self.is_over:
            return
        chance = self._network.random.random
        self.is_cut = True
        self.to_broker.kill(keep=chance() if keep_to_broker is None else keep_to_broker)
        self.to_client.kill(keep=chance())
        self._finish()
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.lost()
        if self._sock is not None:
            self._sock.was_reset()

    def black_hole(self) -> None:
        """Let nothing pass."""
        self.to_broker.hold()
        self.to_client.hold()

    def heal(self) -> None:
        """End a black hole, or a stall."""
        if not self.is_over:
            self.to_broker.release()
            self.to_client.release()

    def vanish(self) -> None:
        """Take the client away without a word to the broker."""
        self._sock = None
        self.to_client.kill()
        self.to_broker.kill()

    def stall(self) -> None:
        """Have the broker read nothing."""
        self.to_broker.hold()

    def _finish(self) -> None:
        self.is_over = True
        self.to_broker.is_dead = True
        self._network.links.pop(self.name, None)


class Service:
    """A broker at a host and port.

    Attributes:
        is_refusing: connections are refused.
        is_silent: attempts to connect are not answered.
    """

    def __init__(self, broker: Broker) -> None:
        self.broker = broker
        self.is_refusing = False
        self.is_silent = False


class Network:
    """The hosts and connections of a world."""

    def __init__(self, scheduler: Scheduler, random: random.Random, conditions: Conditions) -> None:
        self.scheduler = scheduler
        self.random = random
        self.conditions = conditions
        #: by address and port
        self.services: dict[tuple[str, int], Service] = {}
        #: addresses of hosts, by name
        self.addresses: dict[str, str] = {}
        #: the open connections, oldest first
        self.links: dict[str, Link] = {}
        self.unresolved: dict[str, None] = {}
        self._links_made = 0
        self._descriptors = FIRST_DESCRIPTOR
        self.sockets: dict[int, Socket | UnixSocket] = {}
        #: Unix sockets that listen, by device and number of their files
        self.listeners: dict[tuple[int, int], UnixSocket] = {}

    def serve(self, host: str, port: int, broker: Broker) -> Service:
        """Have a broker listen at a port of a host."""
        address = self.addresses.setdefault(host, f"10.0.0.{len(self.addresses) + 2}")
        made = self.services[address, port] = Service(broker)
        return made

    def descriptor(self, sock: Socket | UnixSocket) -> int:
        """Return a new descriptor for ``sock``."""
        self._descriptors += 1
        self.sockets[self._descriptors] = sock
        return self._descriptors

    def link(self, sock: Socket, service: Service) -> Link:
        """Return a new connection."""
        self._links_made += 1
        name = f"link-{self._links_made}"
        made = self.links[name] = Link(self, sock, service, name)
        return made

    def dial(self, sock: Socket, address: tuple[str, int]) -> None:
        """Answer an attempt to connect, after some time."""
        low, high = self.conditions.delay
        service = self.services.get(address)
        if service is not None and service.is_silent:
            return

        def answer() -> None:
            if sock.is_closed:
                return
            found = self.services.get(address)
            if found is None or found.is_refusing:
                sock.refused(errno.ECONNREFUSED)
            elif not found.is_silent:
                sock.connected(self.link(sock, found))

        self.scheduler.call_later(2 * (low + (high - low) * self.random.random()), answer)


class Socket:
    """``socket.socket`` of the world: TCP clients, and Unix sockets."""

    def __new__(cls, family: int = -1, *_: object, **__: object) -> Any:
        """Return a Unix socket if one is asked for."""
        return UnixSocket() if family == socket.AF_UNIX else super().__new__(cls)

    def __init__(
        self,
        family: int = -1,
        type: int = -1,  # noqa: A002  # the name in socket.socket
        proto: int = -1,
        fileno: int | None = None,
    ) -> None:
        if fileno is not None or family not in (-1, socket.AF_INET):
            raise OSError(errno.EAFNOSUPPORT, "the world has TCP over IPv4, and Unix sockets")
        del type
        self.family, self.type, self.proto = socket.AF_INET, socket.SOCK_STREAM, max(proto, 0)
        world = current.world
        self._network: Network = world.network
        self._process = None if current.scheduler.current is None else current.scheduler.current.process
        self._descriptor = self._network.descriptor(self)
        self._timeout: float | None = None
        self._link: Link | None = None
        self._address: tuple[str, int] | None = None
        self._error = 0
        self._data = bytearray()
        self._is_at_end = False
        #: whether the program has shut it for sending; for receiving
        self._is_shut = self._is_deaf = False
        self.is_closed = False
        self._watchers: list[Callable[[], object]] = []
        self._waiting: list[Fiber] = []

    # --- events, on the hub

    def connected(self, link: Link) -> None:
        """The attempt to connect succeeded."""
        self._link = link
        self.changed()

    def refused(self, error: int) -> None:
        """The attempt to connect failed."""
        self._error = error
        self.changed()

    def arrived(self, data: bytes) -> None:
        """Bytes came, or the end of the stream."""
        if data:
            self._data += data
        else:
            self._is_at_end = True
        self.changed()

    def was_reset(self) -> None:
        """The connection was reset."""
        self._link = None
        self._error = errno.ECONNRESET
        self.changed()

    def changed(self) -> None:
        """Wake whoever waits for this socket."""
        for fiber in self._waiting:
            current.scheduler.wake(fiber)
        self._waiting.clear()
        for watcher in self._watchers:
            watcher()

    def watch(self, watcher: Callable[[], object]) -> None:
        """Call ``watcher`` on each change."""
        self._watchers.append(watcher)

    def unwatch(self, watcher: Callable[[], object]) -> None:
        """Undo :meth:`watch`."""
        self._watchers.remove(watcher)

    @property
    def is_readable(self) -> bool:
        """Whether ``recv`` would return or raise."""
        return bool(self._data) or self._is_at_end or bool(self._error) or self._is_deaf

    @property
    def is_writable(self) -> bool:
        """Whether ``send`` would take something or raise."""
        link = self._link
        return bool(self._error) or self._is_shut or (link is not None and link.to_broker.room > 0)

    # --- socket.socket

    def _wait(self, is_ready: Callable[[], bool], what: str) -> None:
        """Wait as the time-out of the socket says."""
        world = current.scheduler
        world.point()
        if is_ready():
            return
        if self._timeout == 0:
            raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")
        until = inf if self._timeout is None else world.now + self._timeout
        fiber = world.current
        assert fiber is not None
        while not is_ready():
            self._waiting.append(fiber)
            if not world.block(until, what) and not is_ready():
                raise TimeoutError("timed out")

    def _check(self) -> None:
        if self.is_closed:
            raise OSError(errno.EBADF, "Bad file descriptor")

    def connect(self, address: tuple[str, int]) -> None:
        """See ``socket.socket``."""
        self._check()
        if self._address is None:
            self._address = (address[0], address[1])
            self._network.dial(self, self._address)
        if self._timeout == 0 and self._link is None and not self._error:
            raise BlockingIOError(errno.EINPROGRESS, "Operation now in progress")
        self._wait(lambda: self._link is not None or bool(self._error) or self._is_shut, "a connection")
        self._raise_error()
        if self._is_shut:
            raise OSError(errno.ECONNABORTED, "Software caused connection abort")

    def _raise_error(self) -> None:
        if self._error:
            error, self._error = self._error, 0
            if error == errno.ECONNRESET:
                self._is_at_end = True
            raise OSError(error, _TEXTS[error])

    def recv(self, size: int, flags: int = 0) -> bytes:
        """See ``socket.socket``."""
        del flags
        self._check()
        self._wait(lambda: self.is_readable, "bytes")
        if self._data:
            conditions = self._network.conditions
            if size > conditions.piece:
                size = conditions.piece
            found = bytes(self._data[:size])
            del self._data[:size]
            if self._link is not None:
                self._link.to_client.taken(len(found))
            return found
        self._raise_error()
        return b""

    def recv_into(self, buffer: Any, size: int = 0, flags: int = 0) -> int:
        """See ``socket.socket``."""
        found = self.recv(size or len(buffer), flags)
        buffer[: len(found)] = found
        return len(found)

    def send(self, data: Any, flags: int = 0) -> int:
        """See ``socket.socket``."""
        del flags
        self._check()
        if self._is_shut or (self._is_at_end and self._link is None):
            raise BrokenPipeError(errno.EPIPE, "Broken pipe")
        if self._link is None and not self._error:
            raise OSError(errno.ENOTCONN, "Transport endpoint is not connected")
        self._wait(lambda: self.is_writable, "room to send")
        self._raise_error()
        link = self._link
        if link is None:
            raise BrokenPipeError(errno.EPIPE, "Broken pipe")
        sent = bytes(memoryview(data)[: link.to_broker.room])
        link.to_broker.send(sent)
        return len(sent)

    def sendall(self, data: Any, flags: int = 0) -> None:
        """See ``socket.socket``."""
        rest = memoryview(data)
        while len(rest):
            rest = rest[self.send(rest, flags) :]

    def sendmsg(self, buffers: Any, *_: object) -> int:
        """See ``socket.socket``."""
        return self.send(b"".join(buffers))

    def shutdown(self, how: int) -> None:
        """See ``socket.socket``."""
        self._check()
        if self._link is None and self._address is None:
            raise OSError(errno.ENOTCONN, "Transport endpoint is not connected")
        link = self._link
        self._is_deaf = self._is_deaf or how != socket.SHUT_WR
        if how in (socket.SHUT_WR, socket.SHUT_RDWR):
            self._is_shut = True
            if link is not None:
                link.to_broker.send(_END)
        self.changed()

    def close(self) -> None:
        """See ``socket.socket``."""
        if not self.is_closed:
            self.is_closed = True
            self._network.sockets.pop(self._descriptor, None)
            link, self._link = self._link, None
            if link is not None:
                link.client_closed(is_reset=bool(self._data))  # as Linux does: unread data are a reset

    def killed(self, *, vanishes: bool) -> None:
        """End with its process; ``vanishes``: with its machine."""
        if not self.is_closed:
            self.is_closed = True
            self._network.sockets.pop(self._descriptor, None)
            link, self._link = self._link, None
            if link is not None and vanishes:
                link.vanish()
            elif link is not None:
                link.client_closed(is_reset=bool(self._data))

    @property
    def process(self) -> Any:
        """The process that opened it."""
        return self._process

    def detach(self) -> int:
        """See ``socket.socket``."""
        raise OSError(errno.ENOTSUP, "sockets of a world are not detached")

    def fileno(self) -> int:
        """See ``socket.socket``."""
        return -1 if self.is_closed else self._descriptor

    def setblocking(self, flag: bool) -> None:
        """See ``socket.socket``."""
        self._timeout = None if flag else 0.0

    def settimeout(self, value: float | None) -> None:
        """See ``socket.socket``."""
        self._timeout = value

    def gettimeout(self) -> float | None:
        """See ``socket.socket``."""
        return self._timeout

    def getblocking(self) -> bool:
        """See ``socket.socket``."""
        return self._timeout != 0

    def getsockopt(self, level: int, option: int, size: int = 0) -> Any:
        """See ``socket.socket``."""
        del size
        if level == socket.SOL_SOCKET and option == socket.SO_ERROR:
            error, self._error = self._error, 0
            return error
        return 0

    def setsockopt(self, *_: object) -> None:
        """See ``socket.socket``. Nothing of it matters here."""

    def getpeername(self) -> tuple[str, int]:
        """See ``socket.socket``."""
        if self._link is None or self._address is None:
            raise OSError(errno.ENOTCONN, "Transport endpoint is not connected")
        return self._address

    def getsockname(self) -> tuple[str, int]:
        """See ``socket.socket``."""
        return "10.0.0.1", 40_000 + self._descriptor % 10_000

    def __enter__(self) -> Socket:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


_TEXTS: Final = {
    errno.ECONNREFUSED: "Connection refused",
    errno.ECONNRESET: "Connection reset by peer",
    errno.ETIMEDOUT: "Connection timed out",
}


def _getaddrinfo(host: Any, port: Any, *_: object, **__: object) -> list[Any]:
    network: Network = current.world.network
    current.scheduler.point()
    name = host.decode() if isinstance(host, bytes) else str(host)
    if name in network.unresolved:
        raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")
    address = name if name in network.addresses.values() else network.addresses.get(name)
    if address is None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
    return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, int(port or 0)))]


def install() -> None:
    """Replace the functions and classes of ``socket``. Once, and for ever; after ``ssl`` was imported."""
    import ssl  # its classes derive from the real socket

    del ssl
    names: dict[str, Any] = {"socket": Socket, "SocketType": Socket, "getaddrinfo": _getaddrinfo}
    for name, value in names.items():
        setattr(socket, name, value)
