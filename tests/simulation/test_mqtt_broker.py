"""The simulated MQTT broker does what Mosquitto does; and what the specifications say where Mosquitto does not."""

from __future__ import annotations

from typing import Any

import pytest

from messaging.testing.brokers import require
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
from tests.simulation.brokers.mqtt.properties import Property, encode_text
from tests.simulation.brokers.mqtt.session import NEVER
from tests.simulation.brokers.mqtt.worlds import Client, World, both_versions, disconnect_reason

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


def test_the_will_of_a_client_that_starts_anew_does_not_go_to_its_own_former_subscription() -> None:
    world = World()
    for client_id in ("c", "other"):
        client = world.connect(client_id, expiry=10, will=Will("t", client_id.encode()))
        client.subscribe("$share/g/t")
    world.connect("c")
    assert client.payloads() == [b"c"]


@both_versions
def test_a_packet_identifier_that_is_used_again_replaces_the_message(version: int) -> None:
    world = World()
    client, publisher = world.connect("c", version), world.connect("p", version)
    client.subscribe("t")
    for payload in (b"1", b"2", b"2"):
        assert publisher.publish("t", payload, 2, 5) == [Ack(PUBREC, 5)]
    publisher.send(Ack(PUBREL, 5))
    assert client.payloads() == [b"2"]


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


def test_a_client_authenticates_again_with_the_method_of_its_connection() -> None:
    world = World(auth_method="TOKEN", authenticate=lambda _client_id, _user, secret: secret in (b"1", b"2"))
    told: dict[int, Any] = {Property.AUTHENTICATION_METHOD: "TOKEN"}
    client = world.connect("c", properties={**told, Property.AUTHENTICATION_DATA: b"1"})
    assert client.connack.properties[Property.AUTHENTICATION_METHOD] == "TOKEN"
    client.send(Disconnect(0x19, {**told, Property.AUTHENTICATION_DATA: b"2"}, AUTH))
    assert client.take() == [Disconnect(0, told, AUTH)]
    assert client.connection.secret == b"2"
    client.send(Disconnect(0x19, {**told, Property.AUTHENTICATION_DATA: b"3"}, AUTH))
    assert disconnect_reason(client) == 0x87


def test_a_client_with_an_unknown_authentication_method_is_refused() -> None:
    client = World(auth_method="TOKEN").open()
    client.send(Connect("c", V5, properties={Property.AUTHENTICATION_METHOD: "OTHER"}))
    assert client.take() == [Connack(False, 0x8C)]


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
