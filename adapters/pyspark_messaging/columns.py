"""The columns of a message: named as in Spark's Kafka source, and as the journal stores them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, TypeAlias

import pyarrow as pa

from messaging import Message, MessageContext
from messaging.model import as_text

#: the sender's message id, or the packet identifier of the MQTT session; the channel; the payload
Identity: TypeAlias = tuple[str | int, str | None, bytes]

_TIME: Final = pa.timestamp("us", tz="UTC")

#: the columns of a read
MESSAGE: Final = pa.schema(
    [
        ("value", pa.binary()),
        ("channel", pa.string()),
        ("key", pa.string()),
        ("partition", pa.int32()),
        ("offset", pa.int64()),
        ("timestamp", _TIME),
        ("content_type", pa.string()),
        ("correlation_id", pa.string()),
        ("reply_to", pa.string()),
        ("headers", pa.map_(pa.string(), pa.string())),
    ]
)
#: the columns of the journal: two more identify redeliveries. They are the packet identifier of the MQTT session, and
#: the sender's message id if the sender also has a header of that name
JOURNAL: Final = MESSAGE.append(pa.field("packet", pa.int32())).append(pa.field("message_id", pa.string()))

#: headers of rows for properties without a column
MESSAGE_ID: Final = "message-id"
CONTENT_ENCODING: Final = "content-encoding"

#: seconds from the epoch to the first and the last time that pandas supports in all time zones, in 1677 and 2262: a
#: sender must not break later processing of its rows
_FAR_SECONDS: Final = 2.0**63 / 1e9 - 86_400

_TEXT: Final = pa.string()
_HEADERS: Final = MESSAGE.field("headers").type


def batch_of(messages: Sequence[Message], partition: int, first: int, now: int | None) -> pa.RecordBatch:
    """Return the rows of ``messages`` for the journal. No content of a message fails: it would be redelivered forever.

    Args:
        messages: in their order.
        partition: their partition.
        first: the offset of the first message.
        now: microseconds since the epoch, for messages without a time, or with one out of range;
            ``None`` leaves their time empty.
    """
    count = len(messages)
    contexts = [message.context for message in messages]
    extensions = [context.extensions for context in contexts]
    headers, identities = _headers(contexts, extensions)
    return pa.RecordBatch.from_arrays(
        [
            pa.array([message.payload for message in messages], pa.binary()),
            _texts([context.channel for context in contexts]),
            _texts([context.channel_extension for context in contexts]),
            pa.repeat(pa.scalar(partition, pa.int32()), count),
            pa.array(range(first, first + count), pa.int64()),
            _times([each.get("timestamp") for each in extensions], now),
            _texts([context.content_type for context in contexts]),
            _texts([context.correlation_id for context in contexts]),
            _texts([context.reply_to_channel for context in contexts]),
            headers,
            pa.array([each.get("packetId") for each in extensions], pa.int32()),
            identities,
        ],
        schema=JOURNAL,
    )


def _times(values: list[float | None], now: int | None) -> pa.Array:
    """Return seconds since the epoch as a column."""
    if values.count(None) == len(values):
        return pa.repeat(pa.scalar(now, _TIME), len(values))
    far = _FAR_SECONDS
    return pa.array(
        [round(value * 1e6) if value is not None and -far <= value <= far else now for value in values], _TIME
    )


def _texts(values: Sequence[str | None]) -> pa.Array:
    if values.count(None) == len(values):
        return pa.nulls(len(values), _TEXT)
    try:
        return pa.array(values, _TEXT)
    except (UnicodeError, pa.ArrowException):
        return pa.array([None if value is None else _text(value) for value in values], _TEXT)


def _text(value: object) -> str:
    """Return valid Unicode: lone surrogates become question marks."""
    return str(value).encode(errors="replace").decode()


def _headers(contexts: list[MessageContext], extensions: list[Mapping[str, Any]]) -> tuple[pa.Array, pa.Array]:
    """Return the headers of each message as a map, with the properties without a column; null if there are none.

    The second array is the column ``message_id``: ids that are not among the headers.
    """
    ends: list[int | None] = []
    names: list[str] = []
    values: list[str] = []
    hidden: dict[int, str] = {}
    for context, each in zip(contexts, extensions, strict=True):
        before = len(names)
        headers = each.get("headers")
        if headers:
            names += headers
            values += map(as_text, headers.values())
        identity = each.get("messageId")
        if headers and MESSAGE_ID in headers:
            hidden[len(ends)] = identity or ""
        elif identity is not None:
            names.append(MESSAGE_ID)
            values.append(identity)
        if context.content_encoding is not None and not (headers and CONTENT_ENCODING in headers):
            names.append(CONTENT_ENCODING)
            values.append(context.content_encoding)
        ends.append(None if len(names) == before else before)
    count = len(contexts)
    identities = _texts([hidden.get(number) for number in range(count)]) if hidden else pa.nulls(count, _TEXT)
    if not names:
        return pa.nulls(count, _HEADERS), identities
    # an offset that is null makes its map null
    return pa.MapArray.from_arrays(pa.array([*ends, len(names)], pa.int32()), _texts(names), _texts(values)), identities


def identities(rows: pa.Table) -> set[Identity]:
    """Return the identities of ``rows``, by which redeliveries are found."""
    found = set()
    for own, packet, headers, channel, value in zip(
        *(rows.column(name).to_pylist() for name in ("message_id", "packet", "headers", "channel", "value")),
        strict=True,
    ):
        known = (dict(headers or ()).get(MESSAGE_ID) if own is None else own) or packet
        if known is not None:
            found.add((known, channel, value))
    return found


def identity_of(message: Message) -> Identity | None:
    """Return the identity of a message; ``None`` if it has neither a message id nor a packet identifier."""
    context = message.context
    identity = context.extensions.get("messageId")
    known = _text(identity) if identity else context.extensions.get("packetId")
    if known is None:
        return None
    return known, None if context.channel is None else _text(context.channel), message.payload
