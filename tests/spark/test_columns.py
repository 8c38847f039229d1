"""Columns: every message becomes a row, whatever its sender wrote, and is known when it comes again."""

from __future__ import annotations

import math
import struct
from datetime import UTC, datetime
from types import MappingProxyType
from typing import Any

import pyarrow as pa
from hypothesis import given, settings
from hypothesis import strategies as st

from messaging import Message, MessageContext
from messaging.testing.tables import table
from messaging_adapters.amqp import properties
from pyspark_messaging.columns import JOURNAL, MESSAGE, batch_of, identities, identity_of

NOW = 1_700_000_000_000_000


def message(payload: bytes = b"x", channel: str | None = "a/b", /, **extensions: Any) -> Message:
    return Message(payload, MessageContext(channel, extensions=MappingProxyType(extensions)))


def row(one: Message) -> dict[str, Any]:
    batch = batch_of([one], 2, 17, NOW)
    batch.validate(full=True)
    [found] = batch.to_pylist()
    return found


def test_every_part_of_a_message_has_its_column() -> None:
    context = MessageContext(
        "a/b", "key", "text/plain", "gzip", "c-1", "reply/to",
        {"headers": {"h": "1"}, "messageId": "m-1", "timestamp": 1.5, "packetId": 7},
    )  # fmt: skip
    assert row(Message(b"\x00\xff", context)) == {
        "value": b"\x00\xff",
        "channel": "a/b",
        "key": "key",
        "partition": 2,
        "offset": 17,
        "timestamp": datetime.fromtimestamp(1.5, UTC),
        "content_type": "text/plain",
        "correlation_id": "c-1",
        "reply_to": "reply/to",
        "headers": [("h", "1"), ("message-id", "m-1"), ("content-encoding", "gzip")],
        "packet": 7,
        "message_id": None,
    }


def test_rows_that_are_read_again_get_no_time_of_their_own() -> None:
    batch = batch_of([message(), message(timestamp=1), message(timestamp=1e30)], 0, 0, None)
    assert batch.column("timestamp").to_pylist() == [None, datetime.fromtimestamp(1, UTC), None]
    assert batch_of([message()], 0, 0, None).column("timestamp").null_count == 1


def test_absent_properties_of_a_message_are_null() -> None:
    found = row(message(b""))
    assert found["value"] == b""
    assert found["timestamp"] == datetime.fromtimestamp(NOW / 1e6, UTC)
    for name in ("key", "content_type", "correlation_id", "reply_to", "headers", "packet", "message_id"):
        assert found[name] is None


def test_rows_keep_their_order_and_their_headers() -> None:
    messages = [
        message(b"0", headers={"a": "1", "b": "2"}),
        message(b"1"),
        message(b"2", messageId="m"),
        message(b"3", headers={}),
        message(b"4", headers={"": ""}),
    ]
    batch = batch_of(messages, 0, 5, NOW)
    assert batch.schema == JOURNAL
    assert batch.column("value").to_pylist() == [b"0", b"1", b"2", b"3", b"4"]
    assert batch.column("offset").to_pylist() == [5, 6, 7, 8, 9]
    headers = [[("a", "1"), ("b", "2")], None, [("message-id", "m")], None, [("", "")]]
    assert batch.column("headers").to_pylist() == headers
    back = pa.ipc.read_record_batch(batch.serialize(), JOURNAL)
    assert back.equals(batch)


def test_headers_of_the_sender_are_not_replaced() -> None:
    own = {"message-id": "theirs", "content-encoding": "none"}
    context = MessageContext("a", content_encoding="gzip", extensions={"headers": own, "messageId": "m"})
    assert row(Message(b"", context))["headers"] == list(own.items())


def test_no_messages_are_no_rows() -> None:
    assert batch_of([], 0, 0, NOW).num_rows == 0


@table("time", [1e17, -1e17, 1.8e19, 2.0**63, 9_223_300_000, -9_223_300_000, math.inf, -math.inf, math.nan, 10**30])
def test_a_time_that_is_far_out_is_the_time_of_arrival(time: float) -> None:
    batch = batch_of([message(timestamp=time), message(timestamp=1), message()], 0, 0, NOW)
    arrival = datetime.fromtimestamp(NOW / 1e6, UTC)
    assert batch.column("timestamp").to_pylist() == [arrival, datetime.fromtimestamp(1, UTC), arrival]


@table("time", [0, 0.000001, 1_700_000_000.123, 9_223_200_000, -9_223_200_000, -0.5])
def test_times_are_exact_to_the_microsecond(time: float) -> None:
    found = batch_of([message(timestamp=time)], 0, 0, NOW).column("timestamp").cast(pa.int64()).to_pylist()
    assert found == [round(time * 1_000_000)]


@settings(deadline=None)
@given(st.integers(0, 2**64 - 1))
def test_any_timestamp_of_amqp_becomes_a_row(time: int) -> None:
    data = struct.pack(">HQ", 1 << 6, time)
    extensions = properties.read(data, 0, len(data), False).extensions
    assert batch_of([message(**extensions)], 0, 0, NOW).to_pandas()["timestamp"].notna().all()


texts = st.text(st.characters(), max_size=10)  # lone surrogates too
contexts = st.builds(
    MessageContext,
    *[st.none() | texts] * 6,
    st.fixed_dictionaries(
        {},
        optional={
            "headers": st.dictionaries(st.just("message-id") | st.just("content-encoding") | texts, texts, max_size=3),
            "messageId": texts,
            "packetId": st.integers(1, 65_535),
            "timestamp": st.floats() | st.integers(),
            "redelivered": st.booleans(),
            "deliveryCount": st.integers(),
        },
    ),
)
messages = st.builds(Message, st.binary(max_size=20), contexts)


@settings(deadline=None)
@given(st.lists(messages, max_size=6))
def test_no_sender_can_break_the_batch(given: list[Message]) -> None:
    batch = batch_of(given, 0, 3, NOW)
    batch.validate(full=True)
    assert batch.column("value").to_pylist() == [each.payload for each in given]
    batch.to_pandas()  # all of it is text, and times that pandas has


@settings(deadline=None)
@given(messages)
def test_a_message_is_known_by_its_row(one: Message) -> None:
    rows = pa.Table.from_batches([batch_of([one], 0, 0, NOW)])
    identity = identity_of(one)
    assert identities(rows) == (set() if identity is None else {identity})


def test_lone_surrogates_become_question_marks() -> None:
    context = MessageContext("a/\ud800", correlation_id="ok", extensions={"headers": {"\udfff": "\ud800b"}})
    found = row(Message(b"", context))
    assert (found["channel"], found["correlation_id"], found["headers"]) == ("a/?", "ok", [("?", "?b")])


def test_deliveries_that_only_look_alike_are_told_apart() -> None:
    """An application may put the same header ``message-id`` into all of its messages."""
    constant = {"message-id": "constant"}
    pairs = [
        (message(messageId="m1"), message(messageId="m2")),
        (message(headers=constant, messageId="m1"), message(headers=constant, messageId="m2")),
        (message(headers=constant, packetId=1), message(headers=constant, packetId=2)),
        (message(packetId=1), message(b"y", packetId=1)),
        (message(packetId=1), message(b"x", "a/c", packetId=1)),
        (message(messageId="1"), message(packetId=1)),
    ]
    for one, other in pairs:
        rows = pa.Table.from_batches([batch_of([one], 0, 0, NOW)])
        assert identity_of(one) in identities(rows)
        assert identity_of(other) not in identities(rows)
    rows = pa.Table.from_batches([batch_of([message(headers=constant)], 0, 0, NOW)])
    assert identities(rows) == set()
    assert identity_of(message(headers=constant)) is None


def test_the_journal_keeps_all_columns_of_the_source_first() -> None:
    assert JOURNAL.names[: len(MESSAGE)] == MESSAGE.names
