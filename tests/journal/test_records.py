"""The formats: what is encoded comes back, and any other bytes are refused with one kind of error."""

from __future__ import annotations

import math
import struct
import time
import zlib
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from messaging.errors import ArgumentError
from messaging.journal import Record, encode_message, encode_record, frames
from messaging.journal.records import FORMAT, decode_records
from messaging.model import Message, MessageContext
from messaging.testing.tables import table

SEED = 4711
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)
RECORDS = st.tuples(
    TEXTS, st.binary(max_size=200), TEXTS, st.none() | TEXTS.filter(bool), st.integers(-(10**9), 4 * 10**9)
)


@given(st.lists(RECORDS, max_size=8), st.integers(0, 2**60))
def test_records_come_back(records: list[tuple[str, bytes, str, str | None, int]], first: int) -> None:
    body = b"".join(encode_record(*each) for each in records)
    assert decode_records(memoryview(body), first) == [
        Record(first + n, timestamp, channel, payload, properties, message_id)
        for n, (channel, payload, properties, message_id, timestamp) in enumerate(records)
    ]


@given(st.lists(RECORDS, min_size=1, max_size=3), st.data())
def test_any_other_bytes_are_refused_with_value_error(
    records: list[tuple[str, bytes, str, str | None, int]], data: st.DataObject
) -> None:
    body = bytearray(b"".join(encode_record(*each) for each in records))
    for _ in range(data.draw(st.integers(1, 4))):
        body[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))
    del body[data.draw(st.integers(0, len(body))) :]
    try:
        decode_records(memoryview(bytes(body)), 0)
    except ValueError:
        return


@given(st.binary(max_size=300))
@example(b"\0" * 20)
@example(b"\xff" * 40)
@example(struct.pack("<IqHHI", 20, 0, 0, 0, 2**32 - 1))
def test_garbage_is_refused_with_value_error(body: bytes) -> None:
    try:
        decode_records(memoryview(body), 0)
    except ValueError:
        return
    assert body == b"" or len(body) >= 20


def test_a_message_comes_back_with_its_context() -> None:
    message = Message(
        b"\0x", MessageContext("a/b", "key", "text/plain", None, "c", "r", {"qos": 1, "headers": {"a": "b"}})
    )
    (record,) = decode_records(memoryview(encode_message(message, "id", 5.5)), 3)
    assert record.message == message
    assert (record.offset, record.message_id, record.timestamp) == (3, "id", 5.5)


def test_a_record_has_the_time_at_which_it_is_made() -> None:
    before = time.time()
    (record,) = decode_records(memoryview(encode_record("a", b"")), 0)
    assert before - 1e-3 <= record.timestamp <= time.time() + 1e-3


@table(
    "arguments",
    [
        ("a" * 65_536, b""),
        ("a", b"", "", "i" * 65_536),
        ("\ud800", b""),
        ("a", b"", "\udfff"),
        ("a", "text"),
        ("a", None),
        *(("a", b"", "", None, timestamp) for timestamp in (math.nan, math.inf, -math.inf, 1e300, "now")),
    ],
    ids=range(11),
)
def test_what_cannot_be_stored_is_refused(arguments: Any) -> None:
    with pytest.raises(ArgumentError, match="a record"):
        encode_record(*arguments)


def test_a_channel_of_the_greatest_length_and_other_kinds_of_bytes_are_stored() -> None:
    for payload in (bytearray(b"ab"), memoryview(b"ab"), memoryview(b"ab").cast("H")):
        (record,) = decode_records(memoryview(encode_record("é" * 32_767, payload)), 0)  # type: ignore[arg-type]
        assert (len(record.channel), record.payload) == (32_767, b"ab")


def image(*bodies: bytes, first: int = 5, seed: int = SEED) -> bytes:
    """Frames with these bodies."""
    return b"".join(
        bytes(part) for number, body in enumerate(bodies) for part in frames.encode(first + number, 1, [body], seed)
    )


@given(st.lists(st.binary(max_size=50), max_size=6), st.integers(0, 2**32 - 1))
def test_frames_come_back(bodies: list[bytes], seed: int) -> None:
    data = image(*bodies, seed=seed)
    found = list(frames.scan(memoryview(data), seed))
    assert [bytes(each.body) for each in found] == bodies
    assert all(each.is_intact() for each in found)
    assert not bodies or not list(frames.scan(memoryview(data), seed ^ 1))


@given(st.binary(max_size=200), st.none() | st.integers(0, 50))
def test_walking_through_garbage_ends(data: bytes, until: int | None) -> None:
    for prefix in (b"", image(FORMAT), image(b"x", b"y", first=0)):
        found = list(frames.walk(memoryview(prefix + data), 0, until=until, seed=SEED))
        ends = [each.end for each in found]
        assert ends == sorted(ends)


@table("gap", [0, 1, 31, 2**20 - 34, 2**20 - 2, 2**20 - 1, 2**20, 2**20 + 1])
def test_an_intact_frame_is_found_anywhere_behind_damage(gap: int) -> None:
    damaged = b"x" + b"\0" * gap
    assert frames.next_intact(memoryview(damaged + image(b"whole")), 0, SEED)
    assert not frames.next_intact(memoryview(damaged + image(b"whole")[:-1]), 0, SEED)
    assert not frames.next_intact(memoryview(damaged), 0, SEED)


def test_a_payload_that_looks_like_frames_is_no_frame() -> None:
    """A sender puts a journal into a message, and a crash tears the frame of that message."""
    torn = image(image(b"inner", b"inner", seed=0) * 10)[1:]
    assert not frames.next_intact(memoryview(torn), 0, SEED)


def test_a_length_that_no_body_has_is_damage() -> None:
    fields = struct.pack("<4sIQQI", frames.MAGIC, 1, 0, 2**40, 0)
    assert frames.header(fields + struct.pack("<I", zlib.crc32(fields))) is None
