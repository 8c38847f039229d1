"""The two sides of the comparison: clients of a real RabbitMQ, and of the simulated one.

Both sides execute the same steps, and know the same frames. What the clients of the real broker receive is told in the
names of the simulated one: queues, consumers and reply addresses that brokers name are translated.
"""

from __future__ import annotations

import contextlib
import re
import selectors
import socket
from typing import Any, Final
from urllib.parse import unquote, urlsplit

from pamqp import commands
from pamqp.base import Frame

from tests.simulation.brokers.amqp import frames, methods, properties, tables
from tests.simulation.brokers.amqp.broker import AmqpBroker
from tests.simulation.brokers.amqp.fake_host import CAPABILITIES, Assembler, FakeClient, FakeHost, Received
from tests.simulation.brokers.amqp.frames import short
from tests.simulation.brokers.amqp.tables import Field, Table
from tests.simulation.brokers.amqp.views import Events, Publish, Step
from tests.simulation.brokers.amqp.virtual_host import REPLY_TO

#: the name of a queue that a broker has named
_GIVEN: Final = re.compile(r"amq\.gen-[\w-]{22}")


def encode_publish(channel: int, message: Publish) -> bytes:
    """Return the frames of a message."""
    method = methods.encode(
        commands.Basic.Publish, channel, exchange=message.exchange, routing_key=message.routing_key,
        mandatory=message.mandatory, immediate=message.immediate,
    )  # fmt: skip
    return frames.content(channel, method[7:-1], message.raw, message.body, 131_072)


def answer(event: Received) -> bytes:
    """Return what a client answers by itself."""
    if event.name == "Channel.Close":
        return methods.encode(commands.Channel.CloseOk, event.channel)
    if event.name == "Connection.Close":
        return methods.encode(commands.Connection.CloseOk, 0)
    return b""


class SimulatedSide:
    """Clients of the simulated broker."""

    def __init__(self, seed: int, vhost: str) -> None:
        self.host = FakeHost(seed)
        self.vhost = vhost
        self.broker = AmqpBroker(self.host, vhosts=(vhost,), sync=(0.001, 0.002))
        self.clients: dict[int, FakeClient] = {}

    def execute(self, step: Step) -> None:
        """Execute a step, and let time pass until what it began is stored."""
        if step.action == "connect":
            client = self.clients[step.connection] = FakeClient(self.broker, f"client-{step.connection}")
            client.open(vhost=self.vhost)
        elif step.action == "drop":
            self.clients.pop(step.connection).lose()
        elif step.action == "publish":
            self.clients[step.connection].write(b"".join(encode_publish(step.channel, each) for each in step.messages))
        elif step.method is not None:
            self.clients[step.connection].call(step.channel, step.method, **step.values)
        self.host.advance(0.01)

    def take(self) -> Events:
        """Return what was received since the last call."""
        found: Events = {}
        for number, client in [*self.clients.items()]:
            while client.received:
                for event in client.take():
                    found.setdefault((number, event.channel), []).append(event)
                    data = answer(event)
                    if data and not client.ended:
                        client.write(data)
            if client.ended:
                del self.clients[number]
        return found

    def call(self, connection: int, channel: int, method: type[Frame], **values: Any) -> Received:
        """Call a method whose answer is the only thing that is received, and return it."""
        client = self.clients[connection]
        client.call(channel, method, **values)
        return client.take()[-1]


class _Socket:
    """A connection to the real broker."""

    def __init__(self, address: tuple[str, int]) -> None:
        self.socket = socket.create_connection(address, timeout=10)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.assembler = Assembler()
        self.is_ended = False

    def read(self) -> list[Received]:
        """Return what has arrived; waits for something."""
        try:
            data = self.socket.recv(1 << 16)
        except OSError:
            data = b""
        if not data:
            self.is_ended = True
            self.socket.close()
            return []
        return [event for event in self.assembler.feed(data) if event.name != "Heartbeat"]

    def expect(self, name: str) -> Received:
        """Wait for a method during the handshake."""
        while True:
            found = self.read()
            assert found, f"closed instead of {name}"
            assert found[0].name == name, found
            return found[0]

    def send(self, data: bytes) -> None:
        """Send bytes; an end of the connection shows when it is read."""
        with contextlib.suppress(OSError):
            self.socket.sendall(data)


class RealSide:
    """Clients of a RabbitMQ.

    Args:
        url: with user and password.

    Attributes:
        names: names that the real broker has given, and those of the simulated one.
        real_tags: of deliveries, by connection, channel and the simulated tag.
    """

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._address = (parts.hostname or "127.0.0.1", parts.port or 5672)
        self._user, self._password = parts.username or "guest", parts.password or "guest"
        self.vhost = unquote(parts.path[1:]) or "/"
        self.sockets: dict[int, _Socket] = {}
        self.names: dict[str, str] = {}
        self._simulated: dict[str, str] = {}
        self.real_tags: dict[tuple[int, int, int], int] = {}
        self.received: Events = {}

    def close(self) -> None:
        """Drop all connections."""
        for each in self.sockets.values():
            each.socket.close()
        self.sockets.clear()

    def learn(self, real: str, simulated: str) -> None:
        """Remember that two names are the same thing."""
        if real != simulated:
            self.names[real] = simulated
            self._simulated[simulated] = real

    def forget_tags(self, connection: int, channel: int) -> None:
        """Forget the tags of a channel that was closed."""
        for key in [key for key in self.real_tags if key[:2] == (connection, channel)]:
            del self.real_tags[key]

    def real_name(self, simulated: str) -> str:
        """Return the real name of something that has a name of the simulated broker."""
        return self._simulated.get(simulated, simulated)

    def connect(self, number: int) -> None:
        """Do the handshake of a new connection."""
        link = self.sockets[number] = _Socket(self._address)
        link.send(b"AMQP\0\0\t\1")
        link.expect("Connection.Start")
        table: Table = {"capabilities": Field("F", {name: Field("t", True) for name in CAPABILITIES})}
        link.send(
            methods.encode(
                commands.Connection.StartOk,
                0,
                client_properties=table,
                mechanism="PLAIN",
                response=f"\0{self._user}\0{self._password}".encode(),
                locale="en_US",
            )
        )
        link.expect("Connection.Tune")
        link.send(methods.encode(commands.Connection.TuneOk, 0, channel_max=2047, frame_max=131_072, heartbeat=0))
        link.send(methods.encode(commands.Connection.Open, 0, virtual_host=self.vhost))
        link.expect("Connection.OpenOk")

    def execute(self, step: Step) -> None:
        """Send what a step asks for."""
        if step.action == "connect":
            self.connect(step.connection)
            return
        link = self.sockets[step.connection]
        if step.action == "drop":
            link.socket.close()
            del self.sockets[step.connection]
        elif step.action == "publish":
            link.send(b"".join(encode_publish(step.channel, self._translated(each)) for each in step.messages))
        elif step.method is not None:
            self.call(step.connection, step.channel, step.method, **step.values)

    def call(self, connection: int, channel: int, method: type[Frame], **values: Any) -> None:
        """Send a method, with the real names and tags."""
        given: dict[str, Any] = {name: self.real_name(each) if isinstance(each, str) else each
                 for name, each in values.items()}  # fmt: skip
        if "delivery_tag" in given:
            tag = given["delivery_tag"]
            given["delivery_tag"] = self.real_tags.get((connection, channel, tag), tag)
        self.sockets[connection].send(methods.encode(method, channel, **given))

    def _translated(self, message: Publish) -> Publish:
        key = self.real_name(message.routing_key)
        return Publish(message.exchange, key, message.raw, message.body, message.mandatory, message.immediate)

    def read(self, timeout: float) -> None:
        """Read what has arrived on any connection; wait up to ``timeout`` seconds for something."""
        with selectors.DefaultSelector() as selector:
            for number, link in self.sockets.items():
                selector.register(link.socket, selectors.EVENT_READ, number)
            ready = selector.select(timeout) if self.sockets else []
        for key, _ in ready:
            number = int(key.data)
            link = self.sockets[number]
            for event in link.read():
                self.received.setdefault((number, event.channel), []).append(event)
                data = answer(event)
                if data:
                    link.send(data)
            if link.is_ended:
                del self.sockets[number]


# --- comparing


def normal(event: Received, names: dict[str, str]) -> tuple[Any, ...]:
    """Return an event in a form that two brokers have in common, names translated by ``names``."""
    values = {name: _renamed(each, names) for name, each in event.values.items() if name != "delivery_tag"}
    if event.name in ("Connection.Close", "Channel.Close"):
        for real, simulated in names.items():
            values["reply_text"] = values["reply_text"].replace(real, simulated)
        values["reply_text"] = _GIVEN.sub("amq.gen-", values["reply_text"])
    found = {} if event.properties is None else dict(properties.split(event.properties))
    headers = found.pop(properties.HEADERS, None)
    if properties.REPLY_TO in found:
        name = found[properties.REPLY_TO][1:].decode()
        if name.startswith(f"{REPLY_TO}."):
            found[properties.REPLY_TO] = short(names.get(name, name))
    table = {} if headers is None else _plain_table(tables.read_table(headers, 0)[0], names)
    return (event.name, sorted(values.items()), sorted(found.items()), sorted(table.items()), event.body)


def _renamed(value: Any, names: dict[str, str]) -> Any:
    return names.get(value, value) if isinstance(value, str) else value


def _plain_table(table: Table, names: dict[str, str]) -> dict[str, Any]:
    return {name: _plain_field(field, names) for name, field in table.items() if (name, field.kind) != ("time", "T")}


def _plain_field(field: Field, names: dict[str, str]) -> Any:
    if field.kind == "F":
        return sorted(_plain_table(field.value, names).items())
    if field.kind == "A":
        return [_plain_field(each, names) for each in field.value]
    if field.kind == "S":
        name: str = field.value.decode("utf-8", "replace")
        return names.get(name, name)
    return (field.kind, field.value)
