"""The simulated MQTT broker: the same as Mosquitto, and what Mosquitto cannot show: time, kills, faults."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from messaging.testing.brokers import require
from tests.simulation.brokers.fake_host import FakeHost, FakePeer
from tests.simulation.brokers.mqtt import MqttBroker, MqttFaults, MqttSettings
from tests.simulation.brokers.mqtt.compare import compare
from tests.simulation.brokers.mqtt.packets import (
    AUTH,
    PINGREQ_BYTES,
    PINGRESP,
    PUBACK,
    PUBCOMP,
    PUBREC,
    PUBREL,
    SUBACK,
    UNSUBACK,
    V5,
    V311,
    Ack,
    Connack,
    Connect,
    Disconnect,
    Framer,
    Packet,
    Ping,
    Publish,
    Reasons,
    Request,
    Subscribe,
    Unsubscribe,
    Will,
    decode,
    encode,
    frame,
)
from tests.simulation.brokers.mqtt.properties import Properties, Property, encode_text
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


# The model.


def test_the_broker_does_what_mosquitto_does() -> None:
    require("mosquitto")
    steps, differences = compare(range(40), seed=1, length=50)
    assert differences == []
    assert steps >= 40 * 50


# Packets.

PACKETS: list[Packet] = [
    Connect("c", V5, False, 30, "u", b"p", Will("w", b"x", 1, True, {0x18: 3, 0x26: [("a", "b")]}), {0x11: 7}),
    Publish("a/b", b"payload", 2, True, True, 77, {0x01: 1, 0x02: 9, 0x0B: [1, 300], 0x09: b"\0", 0x08: "r", 0x23: 3}),
    Publish("ü", b"x" * 20_000),
    *(Ack(kind, 0xFFFF, 0x10, {0x1F: "why"}) for kind in (PUBACK, PUBREC, PUBREL, PUBCOMP)),
    Ack(PUBACK, 1, 0x80),
    Subscribe(3, [Request("a/#", 1, True, True, 2), Request("+")], {0x0B: 268_435_455}),
    Unsubscribe(4, ["a/#", "+"], {0x26: [("k", "v")]}),
    Reasons(SUBACK, 3, [0, 1, 0x80]),
    Reasons(UNSUBACK, 4, [0, 0x11]),
    Connack(True, 0, {0x12: "id", 0x21: 20, 0x24: 1, 0x27: 1000}),
    Disconnect(0x8E, {0x1F: "gone", 0x1C: "other"}),
    Disconnect(0x18, {0x15: "m", 0x16: b"d"}, AUTH),
    Ping(PINGRESP),
]  # fmt: skip


@pytest.mark.parametrize("packet", PACKETS, ids=lambda packet: type(packet).__name__)
def test_packets_survive_their_encoding(packet: Packet) -> None:
    ((first, body),) = Framer().feed(encode(packet, V5))
    assert decode(first, body, V5) == packet


@both_versions
def test_packets_may_arrive_in_any_fragments(version: int) -> None:
    world = World()
    whole = encode(Connect("c", version), version)
    whole += encode(Subscribe(1, [Request("t", 1)]), version)
    whole += encode(Publish("t", b"x" * 200, 1, packet_id=5), version) + PINGREQ_BYTES
    in_one, in_bytes = world.open(version), World().open(version)
    in_one.connection.received(whole)
    for index in range(len(whole)):
        in_bytes.connection.received(whole[index : index + 1])
    assert in_bytes.take() == (arrived := in_one.take())
    assert len(arrived) == 5
    assert arrived[-1] == Ping(PINGRESP)


# What the programs of the comparison leave out, since Mosquitto does something else.

ERRORS = {
    "second CONNECT": (encode(Connect("again"), V5), 0x82),
    "No Local on a shared subscription": (encode(Subscribe(1, [Request("$share/g/a", no_local=True)]), V5), 0x82),
    "shared subscription without filter": (encode(Subscribe(1, [Request("$share/g")]), V5), 0x8F),
    "wildcard in a group": (encode(Subscribe(1, [Request("$share/+/a")]), V5), 0x8F),
    "malformed filter": (encode(Subscribe(1, [Request("a/#/b")]), V5), 0x8F),
    "unsubscribing a malformed filter": (encode(Unsubscribe(1, ["a+"]), V5), 0x8F),
    "wildcard in a topic": (encode(Publish("a/+", b""), V5), 0x90),
    "subscription identifier": (encode(Publish("a", b"", properties={0x0B: 3}), V5), 0x82),
    "wildcard in a response topic": (encode(Publish("a", b"", properties={0x08: "a/#"}), V5), 0x82),
    "topic alias 0": (encode(Publish("a", b"", properties={0x23: 0}), V5), 0x94),
    "topic alias above the maximum": (encode(Publish("a", b"", properties={0x23: 11}), V5), 0x94),
    "topic alias that is not set": (encode(Publish("", b"", properties={0x23: 1}), V5), 0x82),
    "AUTH": (encode(Disconnect(kind=AUTH), V5), 0x82),
    "flag of 2": (frame(0x30, encode_text("a") + b"\x02\x01\x02"), 0x82),
    "unknown property": (frame(0x30, encode_text("a") + b"\x02\x7f\x00"), 0x81),
    "QoS 3": (frame(0x36, encode_text("a") + b"\0\1\0"), 0x81),
    "DUP with QoS 0": (frame(0x38, encode_text("a") + b"\0"), 0x81),
    "length of five bytes": (b"\x30\xff\xff\xff\xff\x01", 0x81),
    "expiry interval after none": (encode(Disconnect(0, {0x11: 5}), V5), 0x82),
}


@pytest.mark.parametrize("error", ERRORS)
def test_protocol_errors_end_the_connection_with_their_reason(error: str) -> None:
    data, reason = ERRORS[error]
    world = World()
    client = world.connect("c")
    client.connection.received(data)
    assert disconnect_reason(client) == reason
    assert world.broker.counters.protocol_errors == 1
    assert world.broker.describe() == {"sessions": {}, "connections": [], "retained": {}}


def test_an_error_of_a_client_of_3_1_1_just_ends_the_connection() -> None:
    client = World().connect("c", V311)
    client.publish("a/#", b"")
    assert client.peer.closed
    assert client.take() == []


def test_the_first_packet_must_be_connect_and_of_a_known_version() -> None:
    world = World()
    client = world.open()
    client.send(Publish("a", b""))
    assert (client.peer.closed, client.take()) == (True, [])
    old = world.open(V311)
    old.connection.received(frame(0x10, encode_text("MQTT") + b"\x09\x02\0\0" + encode_text("x")))
    assert (old.peer.closed, old.take()) == (True, [Connack(False, 1)])


def test_a_client_that_exceeds_the_receive_maximum_is_disconnected() -> None:
    world = World(max_inflight=2)
    client = world.connect("c")
    assert client.connack.properties[Property.RECEIVE_MAXIMUM] == 2
    for packet_id in (1, 2):
        assert client.publish("t", b"", 2, packet_id) == [Ack(PUBREC, packet_id)]
    assert client.publish("t", b"", 2, 2, duplicate=True) == [Ack(PUBREC, 2)]
    client.send(Ack(PUBREL, 1))
    assert client.take() == [Ack(PUBCOMP, 1)]
    client.publish("t", b"", 2, 3)
    client.send(Publish("t", b"", 1, packet_id=4))
    assert disconnect_reason(client) == 0x93


def test_the_window_of_a_client_is_kept_also_when_it_shrinks() -> None:
    world = World()
    client = world.resume("c", properties={Property.RECEIVE_MAXIMUM: 3})
    client.subscribe("t", qos=1)
    publisher = world.connect("p")
    for number in range(5):
        publisher.publish("t", b"%d" % number, 1)
    sent = client.messages()
    assert [message.payload for message in sent] == [b"0", b"1", b"2"]
    client.send(Ack(PUBACK, sent[1].packet_id))
    assert client.payloads() == [b"3"]
    client.drop()
    client = world.resume("c", properties={Property.RECEIVE_MAXIMUM: 1})
    received = []
    while messages := client.messages():
        (message,) = messages
        received.append((message.payload, message.duplicate))
        client.send(Ack(PUBACK, message.packet_id))
    assert received == [(b"0", True), (b"2", True), (b"3", True), (b"4", False)]
    assert world.broker.describe()["sessions"]["c"]["inflight"] == 0


def test_a_negative_pubrec_completes_a_delivery_and_makes_room_for_the_next() -> None:
    world = World(max_inflight=1)
    client = world.connect("c")
    client.subscribe("t")
    publisher = world.connect("p")
    for packet_id, payload in enumerate((b"1", b"2"), 1):
        publisher.send(Publish("t", payload, 2, packet_id=packet_id), Ack(PUBREL, packet_id))
        publisher.take()
    (first,) = client.messages()
    client.send(Ack(PUBREC, first.packet_id, 0x80))
    assert client.payloads() == [b"2"]


def test_a_taken_over_client_of_5_is_told() -> None:
    world = World()
    first = world.connect("c", expiry=10)
    second = world.connect("c", is_clean=False, expiry=10)
    assert disconnect_reason(first) == 0x8E
    assert second.connack.session_present
    assert world.broker.describe()["connections"] == ["client-2"]


def test_client_ids_are_assigned_and_differ() -> None:
    world = World()
    ids = [world.connect("").connack.properties[Property.ASSIGNED_CLIENT_ID] for _ in range(3)]
    assert len(dict.fromkeys(ids)) == 3
    assert list(world.broker.sessions) == ids


@both_versions
def test_a_predicate_decides_who_may_connect(version: int) -> None:
    world = World(authenticate=lambda client_id, user, password: (client_id, user, password) == ("c", "u", b"p"))
    world.connect("c", version, username="u", password=b"p")
    client = world.open(version)
    client.send(Connect("c", version, username="u", password=b"q"))
    assert client.take() == [Connack(False, 0x87 if version == V5 else 5)]
    assert client.peer.closed
    assert world.broker.counters.refused == 1


# Choices.


def shared_world(**settings: Any) -> tuple[World, Client, Client, Client]:
    """Return a world, a publisher, and two consumers of a shared subscription that each hold a message."""
    world = World(**settings)
    first, second = world.connect("1"), world.connect("2")
    for consumer in (first, second):
        consumer.subscribe("$share/g/t", qos=1)
    publisher = world.connect("p")
    for number in range(2):
        publisher.publish("t", b"%d" % number, 1)
    assert (first.payloads(), second.payloads()) == ([b"0"], [b"1"])
    return world, publisher, first, second


def test_messages_of_a_lost_consumer_are_dropped_as_mosquitto_does() -> None:
    world, _, first, second = shared_world()
    first.drop()
    assert second.payloads() == []
    assert world.dropped == [("session ended", "1", b"0")]


def test_messages_of_a_lost_consumer_go_to_another_member_if_redistributed() -> None:
    world, publisher, first, second = shared_world(redistribute_shared=True)
    first.drop()
    assert second.payloads() == [b"0"]
    assert world.dropped == []
    second.drop()
    assert world.dropped == [("session ended", "2", b"1"), ("session ended", "2", b"0")]
    assert publisher.publish("t", b"", 1) == [Ack(PUBACK, 1, 0x10)]


def test_an_offline_member_of_a_shared_subscription_takes_its_turn_unless_told_otherwise() -> None:
    for share_to_connected, expected in ((False, [b"1"]), (True, [b"0", b"1"])):
        world = World(share_to_connected=share_to_connected)
        away, present = world.resume("away"), world.resume("present")
        for consumer in (away, present):
            consumer.subscribe("$share/g/t", qos=1)
        away.drop()
        publisher = world.connect("p")
        for number in range(2):
            publisher.publish("t", b"%d" % number, 1)
        assert present.payloads() == expected


@pytest.mark.parametrize(
    ("overlapping", "version", "expected"),
    [
        ("mosquitto", V5, [(0, [7]), (1, [8])]),
        ("mosquitto", V311, [(0, [])]),
        ("each", V311, [(0, []), (1, [])]),
        ("once", V5, [(1, [7, 8])]),
        ("once", V311, [(1, [])]),
    ],
)
def test_overlapping_subscriptions(overlapping: str, version: int, expected: list[tuple[int, list[int]]]) -> None:
    world = World(overlapping=overlapping)
    client = world.connect("c", version)
    client.send(Subscribe(1, [Request("t", 0)], {0x0B: 7}), Subscribe(2, [Request("#", 1)], {0x0B: 8}))
    client.take()
    world.connect("p").publish("t", b"", 1)
    found = [(message.qos, message.properties.get(0x0B, [])) for message in client.messages()]
    assert found == expected


def test_properties_are_forwarded_in_their_order() -> None:
    world = World()
    client = world.connect("c")
    client.subscribe("t")
    sent = {0x26: [("b", "1"), ("a", "2"), ("b", "3")], 0x09: b"\0\1", 0x08: "r", 0x03: "text", 0x01: 1}
    world.connect("p").publish("t", b"", properties={**sent, 0x23: 4})
    (message,) = client.messages()
    assert message.properties == sent
    assert list(message.properties) == list(sent)


def test_what_is_too_large_is_dropped_or_refused() -> None:
    world = World(max_packet_size=300)
    client = world.connect("c", properties={Property.MAXIMUM_PACKET_SIZE: 100})
    assert client.connack.properties[Property.MAXIMUM_PACKET_SIZE] == 300
    client.subscribe("t", qos=1)
    publisher = world.connect("p")
    publisher.publish("t", b"x" * 200, 1)
    publisher.publish("t", b"small", 1)
    assert client.payloads() == [b"small"]
    assert world.broker.counters.dropped == {"too large": 1}
    publisher.send(Publish("t", b"x" * 300))
    assert disconnect_reason(publisher) == 0x95


def test_limits_are_announced_and_enforced() -> None:
    world = World(max_qos=1, has_retained=False, has_shared=False, max_keep_alive=50)
    client = world.connect("c", keep_alive=600)
    told = client.connack.properties
    assert [told[each] for each in (0x24, 0x25, 0x2A, 0x13)] == [1, 0, 0, 50]
    assert client.subscribe("t", "$share/g/t") == [1, 0x9E]
    client.send(Publish("t", b"", 2, packet_id=1))
    assert disconnect_reason(client) == 0x9B
    client = world.connect("c")
    client.send(Publish("t", b"", retain=True))
    assert disconnect_reason(client) == 0x9A


def test_a_slow_reader_gets_no_more_qos_0() -> None:
    world = World(max_unsent=1000)
    client = world.connect("c")
    client.subscribe("t")
    publisher = world.connect("p")
    client.peer.backlog = 1001
    publisher.publish("t", b"0")
    publisher.publish("t", b"1", 1)
    client.peer.backlog = 1000
    publisher.publish("t", b"2")
    assert client.payloads() == [b"1", b"2"]
    assert world.dropped == [("slow reader", "c", b"0")]


def test_a_full_queue_drops_the_newest() -> None:
    world = World(max_queued=2)
    world.resume("c").subscribe("t", qos=1)
    world.connect("c", is_clean=False, expiry=NEVER).drop()
    publisher = world.connect("p")
    for number in range(4):
        publisher.publish("t", b"%d" % number, 1)
    assert world.dropped == [("queue full", "c", b"2"), ("queue full", "c", b"3")]
    assert world.resume("c").payloads() == [b"0", b"1"]


def test_unacknowledged_messages_count_in_the_queue_of_an_offline_client() -> None:
    world = World(max_queued=3)
    client = world.resume("c")
    client.subscribe("t", qos=1)
    publisher = world.connect("p")
    for number in range(5):
        if number == 2:
            client.drop()
        publisher.publish("t", b"%d" % number, 1)
    assert client.payloads() == [b"0", b"1"]
    assert world.resume("c").payloads() == [b"0", b"1", b"2"]


def test_repeated_pubrels_do_not_widen_the_window() -> None:
    world = World()
    client = world.resume("c", properties={Property.RECEIVE_MAXIMUM: 3})
    client.subscribe("t")
    publisher = world.connect("p")
    for packet_id in range(1, 4):
        publisher.send(Publish("t", b"", 2, packet_id=packet_id), Ack(PUBREL, packet_id))
    for message in client.messages():
        client.send(Ack(PUBREC, message.packet_id))
    client = world.resume("c", properties={Property.RECEIVE_MAXIMUM: 1})
    released = [packet for packet in client.take() if isinstance(packet, Ack)]
    assert [packet.kind for packet in released] == [PUBREL] * 3
    for packet in released:
        client.send(Ack(PUBCOMP, packet.packet_id))
    publisher.publish("t", b"1", 1, 1)
    publisher.publish("t", b"2", 1, 2)
    assert client.payloads() == [b"1"]


@both_versions
def test_wildcards_at_the_first_level_do_not_match_topics_with_a_dollar(version: int) -> None:
    world = World()
    publisher = world.connect("p", version)
    publisher.publish("$own/a", b"1", retain=True)
    publisher.publish("a", b"2", retain=True)
    client, other = world.connect("c", version), world.connect("o", version)
    client.subscribe("#", "+/a")
    other.subscribe("$own/#")
    assert (client.payloads(), other.payloads()) == ([b"2"], [b"1"])
    publisher.publish("$own/a", b"3")
    assert (client.payloads(), other.payloads()) == ([], [b"3"])


@both_versions
def test_an_empty_message_deletes_a_retained_one(version: int) -> None:
    world = World()
    publisher, client = world.connect("p", version), world.connect("c", version)
    client.subscribe("t")
    for payload in (b"1", b"2", b""):
        publisher.publish("t", payload, retain=True)
    assert [(message.payload, message.retain) for message in client.messages()] == [
        (b"1", False),
        (b"2", False),
        (b"", False),
    ]
    late = world.connect("late", version)
    late.subscribe("t")
    assert late.messages() == []


@both_versions
def test_a_subscription_takes_part_at_once_in_topics_that_are_known(version: int) -> None:
    world = World()
    publisher, client = world.connect("p", version), world.connect("c", version)
    publisher.publish("t", b"1")
    client.subscribe("t")
    publisher.publish("t", b"2")
    assert client.payloads() == [b"2"]


@both_versions
def test_an_unsubscribed_filter_receives_nothing_more(version: int) -> None:
    world = World()
    client, publisher = world.connect("c", version), world.connect("p")
    client.subscribe("t/#", "u", qos=0)
    publisher.publish("t", b"1")
    client.send(Unsubscribe(2, ["t/#", "never"]))
    publisher.publish("t", b"2")
    publisher.publish("u", b"3")
    arrived = client.take()
    assert [packet.payload for packet in arrived if isinstance(packet, Publish)] == [b"1", b"3"]
    assert arrived[1] == Reasons(UNSUBACK, 2, [0, 0x11] if version == V5 else [])
    client.subscribe("t/+")
    publisher.publish("t/x", b"4")
    assert client.payloads() == [b"4"]


# Time.


def test_a_session_expires_after_its_interval_and_not_before() -> None:
    world = World()
    client = world.connect("c", expiry=10)
    client.subscribe("t", qos=1)
    client.drop()
    world.host.advance(9.9)
    world.connect("p").publish("t", b"m", 1)
    client = world.connect("c", is_clean=False, expiry=10)
    assert client.connack.session_present
    assert client.payloads() == [b"m"]
    world.host.advance(100)
    client.drop()
    world.host.advance(10)
    assert list(world.broker.sessions) == ["p"]
    assert world.broker.counters.expired_sessions == 1
    assert world.dropped == [("session ended", "c", b"m")]
    assert world.broker.tree.match("t") == []


def test_disconnect_changes_the_expiry_interval() -> None:
    world = World()
    world.connect("short", expiry=1000).leave(properties={Property.SESSION_EXPIRY: 5})
    world.connect("none", expiry=1000).leave(properties={Property.SESSION_EXPIRY: 0})
    world.connect("forever", expiry=NEVER).leave()
    world.connect("311", V311, is_clean=False).leave()
    assert list(world.broker.sessions) == ["short", "forever", "311"]
    world.host.advance(5)
    assert list(world.broker.sessions) == ["forever", "311"]
    world.host.advance(1e9)
    assert list(world.broker.sessions) == ["forever", "311"]
    assert world.host.pending == 0


def with_will(world: World, delay: int = 0, **fields: Any) -> tuple[Client, Client]:
    """Return a client with a will, and one that is subscribed to it."""
    watcher = world.connect("watcher")
    watcher.subscribe("will")
    properties: dict[int, Any] = {Property.WILL_DELAY: delay} if delay else {}
    return world.connect("c", will=Will("will", b"gone", 0, False, properties), **fields), watcher


def test_a_will_is_published_after_its_delay() -> None:
    world = World()
    client, watcher = with_will(world, 10, expiry=100)
    client.drop()
    world.host.advance(9.9)
    assert watcher.payloads() == []
    world.host.advance(0.1)
    assert watcher.payloads() == [b"gone"]
    assert world.broker.counters.wills == 1


def test_a_return_in_time_cancels_a_will() -> None:
    world = World()
    client, watcher = with_will(world, 10, expiry=100)
    client.drop()
    world.host.advance(9)
    world.connect("c", is_clean=False, expiry=100)
    world.host.advance(100)
    assert watcher.payloads() == []


@pytest.mark.parametrize("ends_by", ["expiry", "clean start"])
def test_a_will_is_published_when_its_session_ends_before_the_delay(ends_by: str) -> None:
    world = World()
    client, watcher = with_will(world, 1000, expiry=10)
    client.drop()
    if ends_by == "expiry":
        world.host.advance(10)
    else:
        world.connect("c")
    assert watcher.payloads() == [b"gone"]


@pytest.mark.parametrize(("reason", "expected"), [(0, []), (4, [b"gone"]), (0x80, [b"gone"])])
def test_disconnect_decides_about_the_will(reason: int, expected: list[bytes]) -> None:
    client, watcher = with_will(World())
    client.leave(reason)
    assert watcher.payloads() == expected


@pytest.mark.parametrize(("at_takeover", "expected"), [(False, []), (True, [b"gone"])])
def test_the_will_at_a_takeover_is_a_choice(at_takeover: bool, expected: list[bytes]) -> None:
    world = World(will_at_takeover=at_takeover)
    _, watcher = with_will(world, expiry=10)
    world.resume("c")
    assert watcher.payloads() == expected


@both_versions
def test_a_silent_client_is_disconnected_after_one_and_a_half_keep_alives(version: int) -> None:
    world = World()
    client = world.connect("c", version, keep_alive=10)
    world.host.advance(14)
    client.connection.received(PINGREQ_BYTES)
    world.host.advance(14.9)
    assert client.take() == [Ping(PINGRESP)]
    assert not client.peer.ended
    world.host.advance(0.2)
    if version == V5:
        assert disconnect_reason(client) == 0x8D
    assert client.peer.closed
    assert world.broker.counters.timeouts == 1
    assert world.host.pending == 0


def test_a_connection_without_connect_is_closed() -> None:
    world = World(connect_timeout=20)
    client = world.open()
    client.connection.received(b"\x10")
    world.host.advance(20)
    assert client.peer.closed
    assert world.broker.describe()["connections"] == []


def test_the_expiry_interval_of_a_message_counts_down_while_it_waits() -> None:
    world = World()
    world.resume("c").subscribe("t", qos=1)
    world.resume("c").drop()
    publisher = world.connect("p")
    for payload, expiry in ((b"short", 10), (b"long", 20)):
        publisher.publish("t", payload, 1, retain=True, properties={Property.MESSAGE_EXPIRY: expiry})
    world.host.advance(12.5)
    (message,) = world.resume("c").messages()
    assert (message.payload, message.properties) == (b"long", {Property.MESSAGE_EXPIRY: 8})
    assert world.dropped == [("expired", "c", b"short")]
    late = world.connect("late")
    late.subscribe("t")
    assert [each.properties[Property.MESSAGE_EXPIRY] for each in late.messages()] == [8]
    world.host.advance(7.5)
    late.subscribe("t")
    assert late.messages() == []
    assert world.broker.describe()["retained"] == {}


# Stopping, killing and starting.


def test_a_stopped_broker_keeps_what_is_to_be_kept() -> None:
    world = World(autosave="at stop only")
    away, present, clean = world.resume("away"), world.resume("present"), world.connect("clean")
    for client in (away, present, clean):
        client.subscribe("t", qos=1)
    away.drop()
    publisher = world.resume("p")
    publisher.publish("t", b"m", 1, retain=True)
    assert publisher.publish("t", b"open", 2, 9) == [Ack(PUBREC, 9)]
    world.broker.stop()
    assert [disconnect_reason(each) for each in (present, clean, publisher)] == [0x8B] * 3
    assert world.broker.describe() == {"sessions": {}, "connections": [], "retained": {}}
    assert world.host.pending == 0
    world.broker.start()
    assert list(world.broker.sessions) == ["away", "present", "p"]
    (sent,) = world.resume("away").messages()
    (again,) = world.resume("present").messages()
    assert (sent.payload, sent.duplicate, again.payload, again.duplicate) == (b"m", False, b"m", True)
    late = world.connect("late")
    late.subscribe("t")
    assert late.payloads() == [b"m"]
    world.resume("p").send(Ack(PUBREL, 9))
    assert late.payloads() == [b"open"]


@both_versions
def test_a_killed_broker_that_saves_every_change_loses_nothing_of_a_session(version: int) -> None:
    world = World()
    client, publisher = world.resume("c", version), world.resume("p", version)
    world.connect("clean", version)
    client.subscribe("t")
    assert publisher.publish("t", b"1", 1, 1) == [Ack(PUBACK, 1)]
    assert publisher.publish("t", b"2", 2, 2) == [Ack(PUBREC, 2)]
    (first,) = client.messages()
    world.broker.kill()
    assert client.peer.aborted
    world.broker.start()
    assert list(world.broker.sessions) == ["c", "p"]
    publisher = world.resume("p", version)
    publisher.send(Publish("t", b"2", 2, duplicate=True, packet_id=2), Ack(PUBREL, 2), Ack(PUBREL, 2))
    assert publisher.take() == [Ack(PUBREC, 2), Ack(PUBCOMP, 2), Ack(PUBCOMP, 2)]
    client = world.resume("c", version)
    again, second = client.messages()
    assert (again.packet_id, again.duplicate, again.payload) == (first.packet_id, True, b"1")
    assert second.packet_id != again.packet_id
    client.send(Ack(PUBACK, again.packet_id), Ack(PUBREC, second.packet_id))
    assert client.take() == [Ack(PUBREL, second.packet_id)]
    world.broker.kill()
    world.broker.start()
    client = world.resume("c", version)
    assert client.take() == [Ack(PUBREL, second.packet_id)]
    client.send(Ack(PUBCOMP, second.packet_id))
    assert world.broker.describe()["sessions"]["c"]["inflight"] == 0
    assert world.dropped == []


def test_a_kill_goes_back_to_the_last_save() -> None:
    world = World(autosave="at stop only")
    world.resume("c").subscribe("t", qos=1)
    world.broker.stop()
    world.broker.start()
    client, publisher = world.resume("c"), world.connect("p")
    publisher.publish("t", b"m", 1, retain=True)
    client.subscribe("other")
    assert client.payloads() == []
    world.broker.kill()
    world.broker.start()
    described = world.broker.describe()
    assert described["sessions"]["c"]["subscriptions"] == {"t": 1}
    assert (described["sessions"]["c"]["inflight"], described["retained"]) == (0, {})


def test_saves_happen_at_multiples_of_the_interval_if_something_has_changed() -> None:
    world = World(autosave=30.0)
    world.host.advance(100)
    assert (world.broker.counters.saves, world.host.pending) == (0, 0)
    world.resume("c").subscribe("t", qos=1)  # at 100 s, to be saved at 120 s
    world.host.advance(19)
    publisher = world.connect("p")
    publisher.publish("t", b"saved", 1)
    world.host.advance(2)
    publisher.publish("t", b"lost", 1)
    assert world.broker.counters.saves == 1
    world.broker.kill()
    world.broker.start()
    assert world.resume("c").payloads() == [b"saved"]
    world.host.advance(100)
    assert world.broker.counters.saves == 2


def test_expiry_intervals_go_on_while_the_broker_is_down() -> None:
    world = World()
    world.connect("away", expiry=10).drop()
    world.connect("present", expiry=10)
    world.host.advance(4)
    world.broker.kill()
    world.host.advance(4)
    world.broker.start()
    world.host.advance(2)
    assert list(world.broker.sessions) == ["present"]  # its interval began when the broker started
    world.host.advance(8)
    assert list(world.broker.sessions) == []


def test_wills_are_published_by_a_stop_and_forgotten_by_a_kill() -> None:
    for end, expected in ((MqttBroker.stop, [b"gone"]), (MqttBroker.kill, [])):
        world = World()
        world.resume("watcher").subscribe("will", qos=1)
        world.resume("watcher").drop()
        world.connect("c", expiry=100, will=Will("will", b"gone", 1, False, {Property.WILL_DELAY: 50}))
        end(world.broker)
        world.broker.start()
        world.host.advance(1000)
        assert world.resume("watcher").payloads() == expected


def test_a_broker_that_does_not_run_resets_connections() -> None:
    world = World()
    world.broker.kill()
    client = world.open()
    assert client.peer.aborted
    client.send(Connect("c"))
    assert client.take() == []
    world.broker.start()
    world.connect("c")


# Faults.


def test_late_acknowledgements_keep_their_order() -> None:
    world = World(seed=3, max_inflight=100, faults=MqttFaults(ack_delay=0.5, ack_delay_limit=2.0))
    client = world.connect("c")
    client.send(Subscribe(99, [Request("t", 1)]))
    for packet_id in range(1, 31):
        client.send(Publish("t", b"", 1 + packet_id % 2, packet_id=packet_id))
    at_once = len(client.take())
    world.host.advance(2.0)
    late = [packet for packet in client.take() if isinstance(packet, Ack)]
    assert 0 < len(late) <= 30
    assert at_once + len(late) >= 30
    for kind in (PUBACK, PUBREC):
        ids = [packet.packet_id for packet in late if packet.kind == kind]
        assert ids == sorted(ids)
        assert ids
    assert world.broker.counters.faults["ack_delay"] > 0
    world.host.advance(100)
    assert client.messages() == []
    client.send(Publish("t", b"", 1, packet_id=50))
    client.drop()
    world.host.advance(10)  # a late answer is not sent any more: the peer would complain


@pytest.mark.parametrize(("fault", "has_effect"), [("close_before", False), ("close_after", True)])
@pytest.mark.parametrize(("reset_share", "end"), [(0.0, "closed"), (1.0, "aborted")])
@both_versions
def test_connections_are_closed_instead_of_an_answer(
    fault: str, has_effect: bool, reset_share: float, end: str, version: int
) -> None:
    world = World()
    publisher = world.resume("p", version)
    world.faults.reset_share = reset_share
    setattr(world.faults, fault, 1.0)
    assert publisher.publish("t", b"m", 1) == []
    assert getattr(publisher.peer, end)
    assert len(world.accepted) == has_effect
    again = world.open(version)
    again.send(Connect("q", version))
    assert (again.take(), again.peer.ended) == ([], True)
    setattr(world.faults, fault, 0.0)
    publisher = world.resume("p", version)
    publisher.publish("t", b"2", 2)
    setattr(world.faults, fault, 1.0)
    publisher.send(Ack(PUBREL, 1))
    assert (publisher.take(), publisher.peer.ended) == ([], True)
    assert len(world.accepted) == 2 * has_effect
    setattr(world.faults, fault, 0.0)
    publisher = world.resume("p", version)
    publisher.send(Ack(PUBREL, 1))
    assert publisher.take() == [Ack(PUBCOMP, 1)]
    assert len(world.accepted) == 1 + has_effect
    setattr(world.faults, fault, 1.0)
    publisher.send(Subscribe(1, [Request("t")]))
    assert (publisher.take(), publisher.peer.ended) == ([], True)
    assert (world.broker.describe()["sessions"]["p"]["subscriptions"] == {"t": 0}) == has_effect


def test_publications_are_refused_without_effect() -> None:
    world = World(max_inflight=2, faults=MqttFaults(refuse_publish=1.0))
    client = world.connect("c")
    answers = [client.publish("t", b"", 1 + number % 2, 1 + number) for number in range(20)]
    assert not client.peer.ended  # refused messages do not count against the receive maximum
    reasons = {(answer.kind, answer.reason): None for (answer,) in answers if isinstance(answer, Ack)}
    assert sorted(reasons) == [(PUBACK, 0x80), (PUBACK, 0x97), (PUBREC, 0x80), (PUBREC, 0x97)]
    assert world.accepted == []
    old = world.connect("old", V311)
    assert old.publish("t", b"", 1) == [Ack(PUBACK, 1)]  # it cannot be told
    assert len(world.accepted) == 1


def test_subscriptions_are_refused_or_downgraded() -> None:
    world = World(faults=MqttFaults(refuse_subscribe=1.0))
    assert world.connect("old", V311).subscribe("a", "b") == [0x80, 0x80]
    found = world.connect("c").subscribe(*(f"t{number}" for number in range(20)))
    assert sorted(dict.fromkeys(found)) == [0x80, 0x87]
    assert world.broker.describe()["sessions"]["c"]["subscriptions"] == {}
    world.faults.refuse_subscribe, world.faults.downgrade = 0.0, 1.0
    client = world.connect("c")
    granted = client.subscribe(*(f"t{number}" for number in range(20)))
    assert sorted(dict.fromkeys(granted)) == [0, 1]
    assert list(world.broker.describe()["sessions"]["c"]["subscriptions"].values()) == granted


@pytest.mark.parametrize(("version", "code"), [(V311, 3), (V5, 0x89)])
def test_a_busy_broker_refuses_connections(version: int, code: int) -> None:
    world = World(faults=MqttFaults(busy=1.0))
    client = world.open(version)
    client.send(Connect("c", version))
    assert client.take() == [Connack(False, code)]
    assert client.peer.closed
    assert world.broker.describe()["sessions"] == {}
    assert world.host.pending == 0


def test_slow_deliveries_keep_their_order_and_end_with_the_connection() -> None:
    world = World(seed=1, faults=MqttFaults(slow_delivery=0.9, slow_delivery_limit=1.0))
    client = world.resume("c")
    client.subscribe("t", qos=1)
    publisher = world.connect("p")
    for number in range(10):
        publisher.publish("t", b"%d" % number, number % 2)
    assert len(client.payloads()) < 10
    world.faults.slow_delivery = 1.0
    world.host.advance(10)
    world.faults.slow_delivery = 0.0
    client.drop()
    client = world.resume("c")
    kept = client.payloads()
    assert kept == [b"1", b"3", b"5", b"7", b"9"]
    world.faults.slow_delivery = 1.0
    publisher.publish("t", b"zero", 0)
    publisher.publish("t", b"one", 1)
    assert client.payloads() == []
    client.drop()
    assert world.dropped[-1] == ("offline", "c", b"zero")
    assert world.broker.describe()["sessions"]["c"]["queued"] == 1


def test_every_slow_delivery_arrives_in_the_end() -> None:
    world = World(faults=MqttFaults(slow_delivery=1.0, slow_delivery_limit=1.0))
    client = world.connect("c")
    client.subscribe("t")
    publisher = world.connect("p")
    for number in range(10):
        publisher.publish("t", b"%d" % number)
    world.host.advance(10)
    assert client.payloads() == [b"%d" % number for number in range(10)]


def test_clients_of_5_are_disconnected_with_a_reason() -> None:
    world = World(faults=MqttFaults(disconnect=1.0, disconnect_reasons=(0x98,)))
    client = world.connect("c")
    client.send(Publish("t", b"", 1, packet_id=1))
    assert disconnect_reason(client) == 0x98
    assert world.accepted == []


def test_the_owner_can_end_a_connection() -> None:
    world = World()
    told, closed, reset = (world.connect(each) for each in ("told", "closed", "reset"))
    assert world.broker.drop_connection("told", 0x98)
    assert world.broker.drop_connection("closed")
    assert world.broker.drop_connection("reset", is_reset=True)
    assert not world.broker.drop_connection("reset")
    assert disconnect_reason(told) == 0x98
    assert (closed.peer.closed, reset.peer.aborted, closed.take(), reset.take()) == (True, True, [], [])


# The whole.


def random_run(seed: int) -> tuple[list[str], bytes, dict[str, Any]]:
    """Return notes, bytes and state of a world with every fault, driven by a client that goes on and on."""
    faults = MqttFaults(0.3, 1.0, 0.05, 0.05, 0.5, 0.1, (0x97, 0x80), 0.1, (0x80, 0x87), 0.1, 0.1, 0.2, 1.0, 0.02)
    world = World(seed, faults, autosave=3.0)
    sent = bytearray()
    clients: dict[str, Client] = {}
    for step in range(400):
        client_id = f"c{step % 3}"
        client = clients.get(client_id)
        if client is None or client.peer.ended:
            client = clients[client_id] = world.open()
            client.send(Connect(client_id, V5, False, 10, properties={Property.SESSION_EXPIRY: 20}))
            client.send(Subscribe(1, [Request("t/#", 2), Request("$share/g/t", 1)]))
        client.send(Publish("t", b"%d" % step, step % 3, step % 7 == 0, packet_id=step + 2 if step % 3 else 0))
        sent += client.peer.take()
        world.host.advance(0.3)
        if step % 90 == 89:
            world.broker.kill()
            world.host.advance(1)
            world.broker.start()
    return world.host.notes, bytes(sent), world.broker.describe()


def test_the_same_seed_gives_the_same_history() -> None:
    assert random_run(5) == random_run(5)
    assert random_run(5) != random_run(6)


def test_the_history_does_not_depend_on_hashing() -> None:
    command = f"from {__name__} import random_run; print(random_run(5))"
    histories = [
        subprocess.run(
            [sys.executable, "-c", command],
            cwd=Path(__file__).parents[2],
            env={**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": os.pathsep.join(sys.path)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for hash_seed in ("1", "2")
    ]
    assert histories[0] == histories[1] == f"{random_run(5)}\n"


def test_nothing_is_left_when_all_clients_have_gone() -> None:
    world = World()
    clients = [world.connect(f"c{number}", expiry=number, keep_alive=60) for number in range(3)]
    for client in clients:
        client.subscribe("a/+", "$share/g/#", "b")
        client.publish("a/b", b"x", 1)
    for client in clients:
        client.leave()
    world.host.advance(2)
    assert world.broker.describe() == {"sessions": {}, "connections": [], "retained": {}}
    assert world.broker.tree.match("a/b") == []
    assert world.host.pending == 0
