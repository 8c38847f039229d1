"""Frames encoded and decoded by hand, against those of pamqp, which aiormq uses."""

from __future__ import annotations

import asyncio
import math
import tracemalloc
from types import SimpleNamespace

import pamqp.frame
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pamqp import body, commands, header, heartbeat
from pamqp.commands import Basic

from messaging.testing.tables import table
from messaging_adapters.amqp import frames
from messaging_adapters.amqp.protocol import FrameProtocol, cut
from messaging_adapters.amqp.publish_channels import ConfirmChannel
from tests.amqp.harness import bare_consumer, run

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


@given(CHANNEL, SHORT, SHORT, st.booleans())
def test_publish(channel: int, exchange: str, key: str, mandatory: bool) -> None:
    [(number, frame)] = decoded(frames.publish(channel, exchange, key, mandatory=mandatory))
    assert isinstance(frame, Basic.Publish)
    assert (number, frame.exchange, frame.routing_key) == (channel, exchange, key)
    assert (frame.mandatory, frame.immediate) == (mandatory, False)


@given(CHANNEL, st.integers(0, 65_535), SHORT, st.text("abc.:-", max_size=40), SHORT)
def test_return(channel: int, code: int, text: str, exchange: str, key: str) -> None:
    data = b"before" + pamqp.frame.marshal(Basic.Return(code, text, exchange, key), channel) + b"after"
    start, end = 6 + 7, len(data) - 6
    assert data[start : start + 4] == frames.BASIC_RETURN
    assert frames.read_return(data, start, end) == (code, text, key)


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
    assert isinstance(frame, Basic.Reject)
    assert (number, frame.delivery_tag, frame.requeue) == (channel, tag, True)


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


def test_a_short_string_is_short() -> None:
    assert frames.short_string("ä" * 127)[0] == 254
    with pytest.raises(ValueError, match="256 bytes"):
        frames.short_string("ä" * 128)


# --- who gets which frame


class Tap:
    """A lane that takes what belongs to deliveries."""

    def __init__(self) -> None:
        self.taken: list[tuple[int, bytes]] = []
        self.reasons: list[tuple[int, str]] = []

    def take(self, kind: int, data: bytes, at: int, end: int) -> bool:
        if kind == frames.METHOD and data[at : at + 4] != frames.BASIC_DELIVER:
            return False
        self.taken.append((kind, data[at:end]))
        return True

    def closed(self, code: int, text: str) -> None:
        self.reasons.append((code, text))


class Stream:
    """A protocol that only the test reads and feeds."""

    def __init__(self, lanes: dict[int, Tap], *, settled: bool = True) -> None:
        self.protocol = FrameProtocol(asyncio.get_running_loop())
        self.protocol.lanes.update(lanes)
        self.ends: list[str] = []
        self.blocks: list[str | None] = []
        if settled:
            self.protocol.end_handshake(131_072, self.blocks.append, lambda reason, _: self.ends.append(reason))

    async def rest(self, pieces: list[bytes]) -> bytes:
        """What is left for aiormq of ``pieces``."""
        for piece in pieces:
            self.protocol.data_received(piece)
        if not self.ends:
            self.protocol.reader.ends_quietly = False
            self.protocol.reader.feed_eof()
        return await self.protocol.reader.read()


def split(pieces: list[bytes], lanes: dict[int, Tap], *, settled: bool = True) -> tuple[bytes, Stream]:
    async def main() -> tuple[bytes, Stream]:
        stream = Stream(lanes, settled=settled)
        return await stream.rest(pieces), stream

    return run(main())


DELIVERY = [
    pamqp.frame.marshal(Basic.Deliver("c", 1, False, "e", "k"), 5),
    pamqp.frame.marshal(header.ContentHeader(body_size=3), 5),
    pamqp.frame.marshal(body.ContentBody(b"abc"), 5),
]
OTHERS = [
    pamqp.frame.marshal(commands.Queue.DeclareOk("q", 0, 0), 5),
    pamqp.frame.marshal(Basic.QosOk(), 6),
    pamqp.frame.marshal(heartbeat.Heartbeat(), 0),
]
CLOSE_OK = pamqp.frame.marshal(commands.Connection.CloseOk(), 0)


@given(st.lists(st.integers(1, 40)))
def test_a_lane_gets_its_frames_and_aiormq_the_rest_however_they_are_cut(cuts: list[int]) -> None:
    stream = OTHERS[0] + DELIVERY[0] + OTHERS[1] + DELIVERY[1] + OTHERS[2] + DELIVERY[2] + OTHERS[0]
    pieces = []
    for size in cuts:
        pieces.append(stream[:size])
        stream = stream[size:]
    pieces.append(stream)
    tap = Tap()
    rest, _ = split(pieces, {5: tap})
    assert [(kind, data) for kind, data in tap.taken] == [(frame[0], frame[7:-1]) for frame in DELIVERY]
    assert rest == OTHERS[0] + OTHERS[1] + OTHERS[2] + OTHERS[0]


NO_FRAMES = [
    b"HTTP/1.1 400 Bad Request\r\n\r\n",
    b"AMQP\x00\x00\x09\x01",
    frames.PREFIX.pack(frames.METHOD, 5, 2**31) + b"x" * 50,
    DELIVERY[0][:-1] + b"\x00" + DELIVERY[1],
]


@table("stream", NO_FRAMES)
def test_bytes_that_are_not_amqp_are_passed_to_aiormq_during_the_handshake(stream: bytes) -> None:
    tap = Tap()
    rest, _ = split([stream[:3], stream[3:], b"more"], {5: tap}, settled=False)
    assert rest == stream + b"more"
    assert tap.taken == []


@given(st.binary(max_size=60), st.sampled_from([1, 2, 3, 8]), st.integers(0, 6))
def test_no_frame_makes_the_protocol_raise(payload: bytes, kind: int, channel: int) -> None:
    async def main() -> None:
        stream = Stream({})
        stream.protocol.lanes[5] = ConfirmChannel(5)
        stream.protocol.lanes[6] = bare_consumer(SimpleNamespace(alive=True, write=lambda _: True))
        for method in (b"", frames.BASIC_DELIVER, frames.BASIC_RETURN, frames.BASIC_ACK, frames.BASIC_CANCEL):
            data = method + payload
            stream.protocol.data_received(frames.PREFIX.pack(kind, channel, len(data)) + data + b"\xce")
        assert len(stream.ends) <= 1

    run(main())


@table("step", [1, 7, 1000])
def test_a_frame_that_arrives_in_pieces_costs_time_in_proportion_to_its_size(step: int) -> None:
    """Counted in bytes that are allocated for it, of two sizes."""

    def allocated(size: int) -> int:
        frame = pamqp.frame.marshal(body.ContentBody(bytes(size)), 5)
        pieces = [frame[at : at + step] for at in range(0, len(frame), step)]

        async def main() -> int:
            stream = Stream({5: (tap := Tap())})
            total = 0
            for piece in pieces:
                tracemalloc.reset_peak()
                before = tracemalloc.get_traced_memory()[0]
                stream.protocol.data_received(piece)
                total += tracemalloc.get_traced_memory()[1] - before
            assert tap.taken == [(frames.BODY, bytes(size))]
            return total

        tracemalloc.start()
        try:
            return run(main())
        finally:
            tracemalloc.stop()

    small, large = allocated(8_000), allocated(64_000)
    assert large < 8 * small * 1.5


def test_the_broker_says_why_it_takes_no_messages_and_when_it_does_again() -> None:
    blocked = pamqp.frame.marshal(commands.Connection.Blocked("low on memory"), 0)
    unblocked = pamqp.frame.marshal(commands.Connection.Unblocked(), 0)
    rest, end = split([blocked + OTHERS[0], unblocked], {})
    assert (rest, end.blocks, end.ends) == (OTHERS[0], ["low on memory", None], [])


def test_a_broker_that_closes_the_connection_says_why_and_over_what() -> None:
    close = pamqp.frame.marshal(commands.Connection.Close(503, "COMMAND_INVALID", 40, 10), 0)
    rest, end = split([OTHERS[0] + close + DELIVERY[0]], {5: (tap := Tap())})
    assert rest == OTHERS[0] + CLOSE_OK
    assert (end.ends, tap.taken) == (["503 COMMAND_INVALID"], [])
    assert (end.protocol.close_reason, end.protocol.culprit) == (
        (503, "COMMAND_INVALID"),
        commands.Exchange.Declare.index,
    )


@table("is_first", {"after the end": False, "in place of it": True})
def test_a_quiet_end_hides_an_error_of_the_transport(is_first: bool) -> None:
    async def main() -> bytes:
        stream = Stream({})
        if not is_first:
            stream.protocol.reader.feed_eof()
        stream.protocol.reader.set_exception(ConnectionResetError())
        return await stream.protocol.reader.read()

    assert run(main()) == CLOSE_OK


def test_a_lane_hears_first_that_its_channel_is_closed() -> None:
    close = pamqp.frame.marshal(commands.Channel.Close(404, "NOT_FOUND", 60, 40), 5)
    tap = Tap()
    rest, end = split([close], {5: tap})
    assert (rest, end.protocol.lanes) == (close, {})
    assert tap.reasons == [(404, "NOT_FOUND")]
    assert tap.taken == []


@table("is_closing", [True, False])
def test_only_an_open_transport_may_fail_to_abort(is_closing: bool) -> None:
    """asyncio's TLS transport of Python 3.11.2 raises once it has let go of its connection."""

    class Broken(asyncio.Transport):
        def is_closing(self) -> bool:
            return is_closing

        def abort(self) -> None:
            raise AttributeError("'NoneType' object has no attribute '_abort'")

    if is_closing:
        cut(Broken())
    else:
        with pytest.raises(AttributeError, match="_abort"):
            cut(Broken())
