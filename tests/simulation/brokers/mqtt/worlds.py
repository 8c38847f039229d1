"""A simulated MQTT broker with clients, for tests of the broker alone."""

from __future__ import annotations

from typing import Any

import pytest

from tests.simulation.brokers.fake_host import FakeHost, FakePeer
from tests.simulation.brokers.mqtt import MqttBroker, MqttFaults, MqttSettings
from tests.simulation.brokers.mqtt.packets import (
    V5,
    V311,
    Connack,
    Connect,
    Disconnect,
    Framer,
    Packet,
    Publish,
    Reasons,
    Request,
    Subscribe,
    decode,
    encode,
)
from tests.simulation.brokers.mqtt.properties import Properties, Property
from tests.simulation.brokers.mqtt.session import NEVER

both_versions = pytest.mark.parametrize("version", [V311, V5])


class World:
    """A broker, its time and its clients."""

    def __init__(self, seed: int = 0, faults: MqttFaults | None = None, **settings: Any) -> None:
        self.host = FakeHost(seed)
        self.broker = MqttBroker(self.host, MqttSettings(**settings), faults)
        self.accepted: list[tuple[str, str, bytes, int]] = []
        self.dropped: list[tuple[str, str, bytes]] = []
        self.broker.on_accepted = lambda *event: self.accepted.append(event)
        self.broker.on_dropped = lambda reason, client_id, _topic, payload, _qos: self.dropped.append(
            (reason, client_id, payload)
        )
        self._peers = 0

    @property
    def faults(self) -> MqttFaults:
        return self.broker.faults

    def open(self, version: int = V5) -> Client:
        """Open a connection without CONNECT."""
        self._peers += 1
        return Client(self.broker, FakePeer(f"client-{self._peers}"), version)

    def connect(self, client_id: str, version: int = V5, **fields: Any) -> Client:
        """Connect a client, which has to be accepted; the packets after CONNACK are left to take."""
        client = self.open(version)
        properties: dict[int, Any] = fields.pop("properties", {})
        if "expiry" in fields:
            properties = {**properties, Property.SESSION_EXPIRY: fields.pop("expiry")}
        client.send(Connect(client_id, version, properties=properties, **fields))
        first = client.next()
        assert isinstance(first, Connack)
        assert first.reason == 0, first
        client.connack = first
        return client

    def resume(self, client_id: str, version: int = V5, **fields: Any) -> Client:
        """Connect without a clean start, with a session that never expires."""
        if version == V5:
            fields.setdefault("expiry", NEVER)
        return self.connect(client_id, version, is_clean=False, **fields)


class Client:
    """A client that does nothing by itself."""

    connack: Connack

    def __init__(self, broker: MqttBroker, peer: FakePeer, version: int) -> None:
        self.version = version
        self.peer = peer
        self.connection = broker.accept(peer)
        self._framer = Framer()
        self._arrived: list[Packet] = []

    def send(self, *packets: Packet) -> None:
        for packet in packets:
            self.connection.received(encode(packet, self.version))

    def take(self) -> list[Packet]:
        """Return the packets that arrived since the last call."""
        self._receive()
        taken, self._arrived = self._arrived, []
        return taken

    def next(self) -> Packet:
        """Return the first packet that was not taken yet."""
        self._receive()
        return self._arrived.pop(0)

    def messages(self) -> list[Publish]:
        """Return the messages among the packets that arrived since the last call."""
        return [packet for packet in self.take() if isinstance(packet, Publish)]

    def payloads(self) -> list[bytes]:
        return [message.payload for message in self.messages()]

    def subscribe(self, *filters: str, qos: int = 2, **options: Any) -> list[int]:
        """Subscribe; return the reason codes. What came before is dropped, what comes after is left to take."""
        self.take()
        self.send(Subscribe(1, [Request(each, qos, **options) for each in filters]))
        answer = self.next()
        assert isinstance(answer, Reasons)
        return answer.reasons

    def publish(self, topic: str, payload: bytes, qos: int = 0, packet_id: int = 1, **fields: Any) -> list[Packet]:
        """Publish; return what arrived since, the answer included."""
        self.send(Publish(topic, payload, qos, packet_id=packet_id if qos else 0, **fields))
        return self.take()

    def drop(self) -> None:
        """Lose the connection."""
        self.connection.lost()

    def leave(self, reason: int = 0, properties: Properties | None = None) -> None:
        self.send(Disconnect(reason, properties or {}))

    def _receive(self) -> None:
        for first, body in self._framer.feed(self.peer.take()):
            self._arrived.append(decode(first, body, self.version))


def disconnect_reason(client: Client) -> int:
    """Return the reason of the DISCONNECT with which the broker ended the connection."""
    assert client.peer.ended
    last = client.take()[-1]
    assert isinstance(last, Disconnect)
    return last.reason
