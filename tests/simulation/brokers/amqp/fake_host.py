"""A host with virtual timers, and a client at the level of frames, for tests of the broker alone."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from pamqp import commands
from pamqp.base import Frame

from tests.simulation.brokers.amqp import frames, methods, properties
from tests.simulation.brokers.amqp.broker import AmqpBroker
from tests.simulation.brokers.amqp.tables import Field, Table, text


class FakeTimer:
    """A call that is due at ``due``, virtual seconds."""

    __slots__ = ("due", "function", "number")

    def __init__(self, due: float, number: int, function: Callable[[], object]) -> None:
        self.due = due
        self.number = number
        self.function: Callable[[], object] | None = function

    def cancel(self) -> None:
        """Withdraw the call. Idempotent."""
        self.function = None

    def __lt__(self, other: FakeTimer) -> bool:
        return (self.due, self.number) < (other.due, other.number)


class FakeHost:
    """Virtual time that only :meth:`advance` moves, and seeded chance.

    Attributes:
        notes: lines of the history.
    """

    def __init__(self, seed: int = 0) -> None:
        self.random = random.Random(seed)
        self.notes: list[str] = []
        self._now = 0.0
        self._timers: list[FakeTimer] = []
        self._count = 0

    def now(self) -> float:
        """See ``Host.now``."""
        return self._now

    def call_later(self, delay: float, function: Callable[[], object]) -> FakeTimer:
        """See ``Host.call_later``."""
        self._count += 1
        timer = FakeTimer(self._now + delay, self._count, function)
        heapq.heappush(self._timers, timer)
        return timer

    def note(self, text: str) -> None:
        """See ``Host.note``."""
        self.notes.append(text)

    def advance(self, seconds: float) -> None:
        """Move the time by ``seconds``, and make the calls that fall due, each at its own time."""
        end = self._now + seconds
        while self._timers and self._timers[0].due <= end:
            timer = heapq.heappop(self._timers)
            function, timer.function = timer.function, None
            if function is not None:
                self._now = max(self._now, timer.due)
                function()
        self._now = end

    @property
    def pending(self) -> int:
        """Return the number of calls that are due later."""
        return sum(timer.function is not None for timer in self._timers)


class Received(NamedTuple):
    """What a client has received: a method, and its content if it has one."""

    channel: int
    #: "Basic.Deliver"; "Heartbeat"
    name: str
    #: arguments by name
    values: dict[str, Any]
    properties: bytes | None = None
    body: bytes | None = None

    def __getattr__(self, name: str) -> Any:
        try:
            return self.values[name]
        except KeyError:
            raise AttributeError(name) from None

    @property
    def headers(self) -> Table:
        """Return the headers of a message."""
        return properties.headers(self.properties or b"\0\0")


class Assembler:
    """Splits the bytes of a broker into methods with their contents."""

    def __init__(self) -> None:
        self._rest = b""
        self._partial: dict[int, tuple[Received, bytes, int]] = {}

    def feed(self, data: bytes) -> Iterator[Received]:
        """Take bytes, and yield what is complete."""
        data, at = self._rest + data, 0
        while len(data) - at >= 7:
            kind, channel, length = frames.PREFIX.unpack_from(data, at)
            end = at + 8 + length
            if end > len(data):
                break
            assert data[end - 1] == frames.END_MARK, data[at:end]
            yield from self._frame(kind, channel, data[at + 7 : end - 1])
            at = end
        self._rest = data[at:]

    def _frame(self, kind: int, channel: int, payload: bytes) -> Iterator[Received]:
        if kind == frames.HEARTBEAT:
            yield Received(channel, "Heartbeat", {})
            return
        if kind == frames.METHOD:
            index = int.from_bytes(payload[:4], "big")
            found = Received(channel, methods.NAMES[index], vars(methods.decode(index, payload, 4)))
            if index in (frames.DELIVER, frames.RETURN, frames.GET_OK):
                self._partial[channel] = (found, b"", -1)
            else:
                yield found
            return
        found, body, size = self._partial[channel]
        if kind == frames.HEADER:
            size = int.from_bytes(payload[4:12], "big")
            found = found._replace(properties=payload[12:])
        else:
            body += payload
        self._partial[channel] = (found, body, size)
        if len(body) >= size:
            del self._partial[channel]
            yield found._replace(body=body)


#: that a client announces unless a test wants others
CAPABILITIES = ("consumer_cancel_notify", "connection.blocked", "authentication_failure_close", "basic.nack")


class FakeClient:
    """A client over a network without delay; ``host.Peer`` for the broker.

    Attributes:
        received: what the broker has sent, and :meth:`take` has not returned yet.
        ended: "closed" or "aborted" once the broker has ended the connection.
    """

    def __init__(self, broker: AmqpBroker, name: str = "client-1") -> None:
        self.name = name
        self.received: list[Received] = []
        self.ended = ""
        self.backlog = 0
        self._assembler = Assembler()
        self.connection = broker.accept(self)

    # --- host.Peer

    def send(self, data: bytes) -> None:
        """See ``Peer.send``."""
        assert not self.ended, f"{self.name}: data sent after the end of the connection"
        if data != b"AMQP\0\0\t\1":
            self.received += self._assembler.feed(data)

    def close(self) -> None:
        """See ``Peer.close``."""
        self.ended = "closed"

    def abort(self) -> None:
        """See ``Peer.abort``."""
        self.ended = "aborted"

    @property
    def unsent(self) -> int:
        """See ``Peer.unsent``."""
        return self.backlog

    # --- what the client does

    def write(self, data: bytes) -> None:
        """Send bytes."""
        self.connection.received(data)

    def call(self, channel: int, kind: type[Frame], **values: Any) -> None:
        """Send a method."""
        self.write(methods.encode(kind, channel, **values))

    def take(self, name: str | None = None) -> list[Received]:
        """Return what was received, all or the methods ``name``, and forget that."""
        taken = [each for each in self.received if name in (None, each.name)]
        self.received = [each for each in self.received if name not in (None, each.name)]
        return taken

    def only(self, name: str) -> Received:
        """Return the only thing that was received."""
        (found,) = self.take()
        assert found.name == name, found
        return found

    def open(
        self,
        *channels: int,
        user: str = "guest",
        password: str = "guest",
        vhost: str = "/",
        heartbeat: int = 0,
        capabilities: tuple[str, ...] = CAPABILITIES,
    ) -> None:
        """Do the handshake, and open channels."""
        self.write(b"AMQP\0\0\t\1")
        table: Table = {"capabilities": Field("F", {name: Field("t", True) for name in capabilities})}
        self.call(
            0, commands.Connection.StartOk, client_properties=table, mechanism="PLAIN",
            response=f"\0{user}\0{password}".encode(), locale="en_US",
        )  # fmt: skip
        if self.ended:
            return
        self.call(0, commands.Connection.TuneOk, channel_max=2047, frame_max=131_072, heartbeat=heartbeat)
        self.call(0, commands.Connection.Open, virtual_host=vhost)
        for channel in channels:
            self.call(channel, commands.Channel.Open)
        self.take()

    def publish(
        self, channel: int, exchange: str, key: str, body: bytes = b"", raw: bytes = b"\0\0", **flags: bool
    ) -> None:
        """Publish a message; ``raw`` are its properties as on the wire."""
        self.write(publish(channel, exchange, key, body, raw, **flags))

    def lose(self) -> None:
        """Lose the connection."""
        self.connection.lost()
        self.ended = "lost"


def publish(channel: int, exchange: str, key: str, body: bytes, raw: bytes, **flags: bool) -> bytes:
    """Return the frames of a publish."""
    method = methods.encode(commands.Basic.Publish, channel, exchange=exchange, routing_key=key, **flags)
    return frames.content(channel, method[7:-1], raw, body, 131_072)


#: properties of a persistent message
PERSISTENT = b"\x10\x00\x02"


def expiring(milliseconds: int, *, persistent: bool = False) -> bytes:
    """Return the properties of a message that expires."""
    value = str(milliseconds).encode()
    flags = properties.EXPIRATION | (properties.DELIVERY_MODE if persistent else 0)
    return flags.to_bytes(2, "big") + (b"\x02" if persistent else b"") + bytes([len(value)]) + value


def arguments(**given: Any) -> Table:
    """Return a table of arguments: ``x_max_length=1`` is x-max-length."""
    table: Table = {}
    for name, value in given.items():
        kind = Field("t", value) if isinstance(value, bool) else Field("I", value) if isinstance(value, int) else None
        table[name.replace("_", "-")] = kind or text(value)
    return table
