"""Frames encoded and decoded by hand, against those of pamqp, which aiormq uses."""

from __future__ import annotations

import asyncio
import math

import pamqp.frame
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pamqp import body, commands, header, heartbeat
from pamqp.commands import Basic

from adapters.amqp import frames
from adapters.amqp.connection import _FrameProtocol
from tests.amqp.harness import run

CHANNEL = st.integers(1, 65_535)
TAG = st.integers(1, 2**63 - 1)
SHORT = st.text(st.characters(exclude_categories=["Cs"]), max_size=60)


def decoded(data: bytes) -> list[tuple[int, object]]:
    """Channel and frame of everything in ``data``, as pamqp sees it."""
    found: list[tuple[int, object]] = []
    while data:
        consumed, channel, frame = pamqp.frame.unmarshal(data)
        found.append((channel, frame))
        data = data[consumed:]
    return found


@given(CHANNEL, SHORT, SHORT)
def test_publish(channel: int, exchange: str, key: str) -> None:
    [(number, frame)] = decoded(frames.publish(channel, exchange, key))
    assert isinstance(frame, Basic.Publish)
    assert (number, frame.exchange, frame.routing_key) == (channel, exchange, key)
    assert (frame.mandatory, frame.immediate) == (False, False)


@given(CHANNEL, st.binary(max_size=300), st.integers(32, 200))
def test_content(channel: int, payload: bytes, frame_max: int) -> None:
    properties = Basic.Properties(content_type="text/plain", delivery_mode=2).marshal()
    data = b"".join(frames.content(channel, properties, payload, frame_max))
    [(number, head), *bodies] = decoded(data)
    assert isinstance(head, header.ContentHeader)
    assert number == channel
    assert head.body_size == len(payload)
    assert head.properties.content_type == "text/plain"
    assert [each for each, _ in bodies] == [channel] * math.ceil(len(payload) / (frame_max - 8))
    assert b"".join(part.value for _, part in bodies if isinstance(part, body.ContentBody)) == payload
    while data:
        kind, _, size = frames.PREFIX.unpack_from(data)
        assert kind == frames.HEADER or size + 8 <= frame_max
        data = data[size + 8 :]


@given(CHANNEL, TAG, st.booleans())
def test_acknowledgements(channel: int, tag: int, multiple: bool) -> None:
    data = frames.ack(channel, tag, multiple=multiple)
    [(number, frame)] = decoded(data)
    assert isinstance(frame, Basic.Ack)
    assert (number, frame.delivery_tag, frame.multiple) == (channel, tag, multiple)
    assert data[7:11] == frames.BASIC_ACK
    assert frames.read_settlement(data, 7) == (tag, multiple)
    data = frames.requeue(channel, tag)
    [(number, frame)] = decoded(data)
    assert isinstance(frame, Basic.Nack)
    assert (number, frame.delivery_tag, frame.multiple, frame.requeue) == (channel, tag, False, True)
    assert frames.read_settlement(data, 7) == (tag, False)


@given(CHANNEL, SHORT, TAG, st.booleans(), st.text("abc.:-", max_size=40), SHORT)
def test_deliver(channel: int, consumer: str, tag: int, redelivered: bool, exchange: str, key: str) -> None:
    frame = Basic.Deliver(consumer, tag, redelivered, exchange, key)
    data = b"before" + pamqp.frame.marshal(frame, channel) + b"after"
    start, end = 6 + 7, len(data) - 6
    assert data[start : start + 4] == frames.BASIC_DELIVER
    found, again, route = frames.read_delivery(data, start, end)
    assert (found, again, frames.read_route(route)) == (tag, redelivered, (exchange, key))


def test_a_route_that_is_not_utf8_is_readable_and_stays_distinct() -> None:
    one, other = (frames.read_route(b"\x01e\x01" + key) for key in (b"\xff", b"\xfe"))
    assert (one, other) == (("e", "\\xff"), ("e", "\\xfe"))


@pytest.mark.parametrize(
    ("frame", "method"),
    [
        (commands.Connection.Close(320, "CONNECTION_FORCED - bye", 0, 0), frames.CONNECTION_CLOSE),
        (commands.Channel.Close(404, "NOT_FOUND - ü", 60, 40), frames.CHANNEL_CLOSE),
    ],
)
def test_close_reasons(frame: commands.Connection.Close | commands.Channel.Close, method: bytes) -> None:
    data = pamqp.frame.marshal(frame, 3)
    assert data[7:11] == method
    assert frames.read_close(data, 7, len(data) - 1) == (frame.reply_code, frame.reply_text)


def test_method_numbers() -> None:
    known = {
        frames.CONNECTION_BLOCKED: commands.Connection.Blocked("low on memory"),
        frames.CONNECTION_UNBLOCKED: commands.Connection.Unblocked(),
        frames.CHANNEL_CLOSE_OK: commands.Channel.CloseOk(),
        frames.BASIC_CANCEL: Basic.Cancel("consumer"),
    }
    for method, frame in known.items():
        assert pamqp.frame.marshal(frame, 1)[7:11] == method
    assert pamqp.frame.marshal(heartbeat.Heartbeat(), 0) == frames.HEARTBEAT_FRAME


def test_a_short_string_is_short() -> None:
    assert frames.short_string("ä" * 127)[0] == 254
    with pytest.raises(ValueError, match="256 bytes"):
        frames.short_string("ä" * 128)


# --- who gets which frame


class Tap:
    """A lane that takes what belongs to deliveries."""

    def __init__(self) -> None:
        self.taken: list[tuple[int, bytes]] = []
        self.reasons: list[str] = []

    def take(self, kind: int, data: bytes, at: int, end: int) -> bool:
        if kind == frames.METHOD and data[at : at + 4] != frames.BASIC_DELIVER:
            return False
        self.taken.append((kind, data[at:end]))
        return True

    def closed(self, reason: str) -> None:
        self.reasons.append(reason)


async def split(pieces: list[bytes], lanes: dict[int, Tap]) -> bytes:
    """What is left for aiormq of ``pieces``."""
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(loop=loop)
    protocol = _FrameProtocol(reader, loop)
    protocol.lanes.update(lanes)
    for piece in pieces:
        protocol.data_received(piece)
    reader.feed_eof()
    return await reader.read()


DELIVERY = [
    pamqp.frame.marshal(Basic.Deliver("c", 1, False, "e", "k"), 5),
    pamqp.frame.marshal(header.ContentHeader(body_size=3), 5),
    pamqp.frame.marshal(body.ContentBody(b"abc"), 5),
]
OTHERS = [
    pamqp.frame.marshal(commands.Queue.DeclareOk("q", 0, 0), 5),
    pamqp.frame.marshal(body.ContentBody(b"abc"), 6),
    pamqp.frame.marshal(heartbeat.Heartbeat(), 0),
]


@given(st.lists(st.integers(1, 40)))
def test_a_lane_gets_its_frames_and_aiormq_the_rest_however_they_are_cut(cuts: list[int]) -> None:
    stream = OTHERS[0] + DELIVERY[0] + OTHERS[1] + DELIVERY[1] + OTHERS[2] + DELIVERY[2] + OTHERS[0]
    pieces = []
    for cut in cuts:
        pieces.append(stream[:cut])
        stream = stream[cut:]
    pieces.append(stream)
    tap = Tap()
    rest = run(split(pieces, {5: tap}))
    assert [(kind, data) for kind, data in tap.taken] == [(frame[0], frame[7:-1]) for frame in DELIVERY]
    # a heartbeat may be added, to tell aiormq that the peer is alive
    assert rest.replace(frames.HEARTBEAT_FRAME, b"") == OTHERS[0] + OTHERS[1] + OTHERS[0]
    assert rest.count(frames.HEARTBEAT_FRAME) >= 1


def test_aiormq_hears_that_the_peer_is_alive_even_if_it_gets_none_of_the_frames() -> None:
    assert run(split(DELIVERY, {5: Tap()})) == frames.HEARTBEAT_FRAME


@pytest.mark.parametrize(
    "stream",
    [
        b"HTTP/1.1 400 Bad Request\r\n\r\n",
        b"AMQP\x00\x00\x09\x01",
        frames.PREFIX.pack(frames.METHOD, 5, 2**31) + b"x" * 50,
        DELIVERY[0][:-1] + b"\x00" + DELIVERY[1],
    ],
)
def test_what_is_not_amqp_is_left_to_aiormq_as_it_is(stream: bytes) -> None:
    tap = Tap()
    assert run(split([stream[:3], stream[3:], b"more"], {5: tap})) == stream + b"more"
    assert tap.taken == []


def test_a_lane_hears_first_that_its_channel_is_closed() -> None:
    close = pamqp.frame.marshal(commands.Channel.Close(404, "NOT_FOUND", 60, 40), 5)
    tap = Tap()
    assert run(split([close + DELIVERY[0]], {5: tap})) == close + DELIVERY[0]
    assert tap.reasons == ["404 NOT_FOUND"]
    assert tap.taken == []
