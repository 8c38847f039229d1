"""Packets as bytes: compared with paho's own, and robust against any bytes."""

from __future__ import annotations

import contextlib
from typing import Any

import paho.mqtt.client as mqtt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from paho.mqtt.enums import CallbackAPIVersion
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties as PahoProperties
from paho.mqtt.subscribeoptions import SubscribeOptions

from messaging.testing.tables import table
from messaging_adapters.mqtt import packets
from messaging_adapters.mqtt.packets import PacketProperties, ProtocolError
from tests.mqtt.foreign import MemorySocket

TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\x00"), max_size=20)
TOPIC = TEXT.filter(lambda text: text and not set(text) & set("+#"))


@st.composite
def properties(draw: st.DrawFn) -> PacketProperties:
    made = PacketProperties()
    made.content_type = draw(st.none() | TEXT)
    made.response_topic = draw(st.none() | TOPIC)
    made.correlation = draw(st.none() | st.binary(max_size=20))
    made.expiry = draw(st.none() | st.integers(0, 2**32 - 1))
    made.user = draw(st.lists(st.tuples(TEXT, TEXT), max_size=3))
    return made


def same(one: PacketProperties, other: PacketProperties) -> bool:
    return all(getattr(one, name) == getattr(other, name) for name in PacketProperties.__slots__)


def body(frame: bytes) -> bytes:
    """What follows the fixed header."""
    at = 1
    while frame[at] > 127:
        at += 1
    return frame[at + 1 :]


def new_properties() -> Any:
    return PahoProperties(PacketTypes.PUBLISH)  # type: ignore[no-untyped-call]


@pytest.fixture(scope="module", params=[True, False], ids=["5", "3.1.1"])
def paho(request: pytest.FixtureRequest) -> Any:
    """Two things: whether it is MQTT 5, and a function that returns the PUBLISH packet paho makes."""
    v5 = request.param
    memory = MemorySocket(CallbackAPIVersion.VERSION2, "c", protocol=mqtt.MQTTv5 if v5 else mqtt.MQTTv311)
    client = memory.client
    client.max_inflight_messages_set(0)
    memory.connect(client.connect)
    memory.take()

    def make(topic: str, payload: bytes, qos: int, retain: bool, given: PacketProperties) -> tuple[bytes, int]:
        wanted = None
        if v5:
            wanted = new_properties()
            for name, value in (
                ("ContentType", given.content_type),
                ("ResponseTopic", given.response_topic),
                ("CorrelationData", given.correlation),
                ("MessageExpiryInterval", given.expiry),
                ("UserProperty", given.user or None),
            ):
                if value is not None:
                    setattr(wanted, name, value)
        info = client.publish(topic, payload, qos, retain, wanted)
        return memory.take(), info.mid

    return v5, make


@given(TOPIC, st.binary(max_size=300), st.integers(0, 2), st.booleans(), properties())
def test_paho_makes_packets_we_read(
    paho: Any, topic: str, payload: bytes, qos: int, retain: bool, given: PacketProperties
) -> None:
    v5, make = paho
    frame, mid = make(topic, payload, qos, retain, given)
    publish = packets.parse_publish(frame[0], body(frame), v5)
    assert (publish.topic, publish.payload, publish.qos, publish.retain) == (topic, payload, qos, retain)
    assert publish.id == (mid if qos else 0)
    assert not publish.dup
    if v5:
        assert same(publish.properties, given)


@pytest.fixture(scope="module", params=[True, False], ids=["5", "3.1.1"])
def subscriber(request: pytest.FixtureRequest) -> tuple[bool, MemorySocket]:
    """Whether it is MQTT 5, and the socket of a connected paho."""
    v5 = request.param
    memory = MemorySocket(CallbackAPIVersion.VERSION2, "c", protocol=mqtt.MQTTv5 if v5 else mqtt.MQTTv311)
    memory.connect(memory.client.connect)
    memory.take()
    return v5, memory


@given(
    TOPIC, st.integers(0, 2), st.booleans(), st.booleans(), st.integers(0, 2), st.none() | st.integers(1, 268_435_455)
)
def test_subscribe_and_unsubscribe_are_what_paho_makes(
    subscriber: tuple[bool, MemorySocket],
    topic: str,
    qos: int,
    no_local: bool,
    as_published: bool,
    retain: int,
    identifier: int | None,
) -> None:
    v5, memory = subscriber
    options = packets.subscribe_options(qos, no_local=no_local, as_published=as_published, retain_handling=retain)
    if v5:
        given = PahoProperties(PacketTypes.SUBSCRIBE)  # type: ignore[no-untyped-call]
        if identifier is not None:
            given.SubscriptionIdentifier = identifier
        wanted = SubscribeOptions(qos, no_local, as_published, retain)
        _, packet_id = memory.client.subscribe(topic, options=wanted, properties=given)
    else:
        _, packet_id = memory.client.subscribe(topic, qos)
    assert packet_id is not None
    assert packets.subscribe(packet_id, topic, options, v5, identifier) == memory.take()
    _, packet_id = memory.client.unsubscribe(topic)
    assert packet_id is not None
    assert packets.unsubscribe(packet_id, topic, v5) == memory.take()


@table("expiry", [None, 0, 60])
def test_disconnect_is_what_paho_makes(expiry: int | None) -> None:
    memory = MemorySocket(CallbackAPIVersion.VERSION2, "c", protocol=mqtt.MQTTv5)
    memory.connect(memory.client.connect)
    memory.take()
    given = None
    if expiry is not None:
        given = PahoProperties(PacketTypes.DISCONNECT)  # type: ignore[no-untyped-call]
        given.SessionExpiryInterval = expiry
    memory.client.disconnect(properties=given)
    assert packets.disconnect(session_expiry=expiry) == memory.take()


@given(properties())
def test_paho_reads_properties_we_make(given: PacketProperties) -> None:
    data = packets.properties_bytes(given)
    read = new_properties()
    read.unpack(packets.varint(len(data)) + data)
    assert getattr(read, "ContentType", None) == given.content_type
    assert getattr(read, "ResponseTopic", None) == given.response_topic
    assert getattr(read, "CorrelationData", None) == given.correlation
    assert getattr(read, "MessageExpiryInterval", None) == given.expiry
    assert getattr(read, "UserProperty", []) == given.user


@given(properties(), st.lists(st.integers(1, 2**28 - 1), max_size=3))
def test_properties_survive_the_way_there_and_back(given: PacketProperties, identifiers: list[int]) -> None:
    data = packets.properties_bytes(given) + b"".join(b"\x0b" + packets.varint(each) for each in identifiers)
    body = packets.text("t") + packets.varint(len(data)) + data + b"payload"
    publish = packets.parse_publish(packets.PUBLISH, body, True)
    given.subscriptions = tuple(dict.fromkeys(identifiers))
    assert same(publish.properties, given)
    assert publish.payload == b"payload"


@given(st.integers(0, 2**28 - 1))
def test_variable_byte_integers(value: int) -> None:
    data = packets.varint(value)
    assert len(data) == (1 if value < 128 else 2 if value < 2**14 else 3 if value < 2**21 else 4)
    assert packets._parse_varint(data + b"\xff", 0) == (value, len(data))


@given(st.integers(0, 15), st.binary(max_size=60), st.booleans())
def test_any_bytes_parse_or_break_the_protocol(flags: int, data: bytes, v5: bool) -> None:
    try:
        publish = packets.parse_publish(packets.PUBLISH | flags, data, v5)
    except ProtocolError:
        return
    assert publish.topic
    assert publish.qos in (0, 1, 2)
    assert data.endswith(publish.payload)


@given(st.binary(max_size=30))
def test_any_bytes_are_an_acknowledgement_or_break_the_protocol(data: bytes) -> None:
    try:
        packet_id, reason = packets.parse_acknowledgement(data)
    except ProtocolError:
        return
    assert packet_id == int.from_bytes(data[:2], "big")
    assert reason == (data[2] if len(data) > 2 else 0)
    with contextlib.suppress(ProtocolError):
        assert isinstance(packets.reason_string(data), str | None)


@table(
    "head, data",
    [
        (0x30, b""),
        (0x30, b"\x00\x05a"),
        (0x30, b"\x00\x00"),  # a topic alias, which was not offered
        (0x30, b"\x00\x01\xff\x00"),
        (0x32, b"\x00\x01a"),
        (0x32, b"\x00\x01a\x00\x00\x00"),
        (0x36, b"\x00\x01a\x00\x01\x00"),
        (0x30, b"\x00\x01a\x05\x03"),
        (0x30, b"\x00\x01a\x02\x7f\x00"),
        (0x30, b"\x00\x01a\x03\x03\x00\x05abcdefgh"),
        (0x30, b"\x00\x01a\xff\xff\xff\xff\x01"),
    ],
)
def test_malformed_packets_are_protocol_errors(head: int, data: bytes) -> None:
    with pytest.raises(ProtocolError):
        packets.parse_publish(head, data, True)


def test_acknowledgements() -> None:
    assert packets.acknowledgement(packets.PUBACK, 258) == b"\x40\x02\x01\x02"
    assert packets.acknowledgement(packets.PUBREL, 1) == b"\x62\x02\x00\x01"
    assert packets.parse_acknowledgement(b"\x00\x07") == (7, 0)
    for body, detail in ((b"\x00\x07\x87", None), (b"\x00\x07\x87\x06\x1f\x00\x03why", "why")):
        assert packets.parse_acknowledgement(body) == (7, 0x87)
        assert packets.reason_string(body) == detail
