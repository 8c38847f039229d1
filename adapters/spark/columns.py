"""The columns of a message: as people know them from Kafka, and as the journal keeps them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import pyarrow as pa

if TYPE_CHECKING:
    from collections.abc import Mapping

    from messaging import Message, MessageContext

#: the sender's message id, or the packet identifier of the MQTT session; the channel; the payload
Identity: TypeAlias = tuple[str | int, str | None, bytes]

_TIME: Final = pa.timestamp("us", tz="UTC")

#: what a row of the source is
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
#: what the journal keeps: beside it the packet identifier of the MQTT session, to know a delivery that is made again
JOURNAL: Final = MESSAGE.append(pa.field("packet", pa.int32()))

#: headers of rows for what has no column
MESSAGE_ID: Final = "message-id"
CONTENT_ENCODING: Final = "content-encoding"

_TEXT: Final = pa.string()
_HEADERS: Final = MESSAGE.field("headers").type


def batch_of(messages: Sequence[Message], partition: int, first: int, now: int) -> pa.RecordBatch:
    """The rows of ``messages`` for the journal.

    Args:
        messages: in their order.
        partition: their partition.
        first: the offset of the first of them.
        now: microseconds since the epoch, for those whose sender gave no time.
    """
    count = len(messages)
    contexts = [message.context for message in messages]
    extensions = [context.extensions for context in contexts]
    times = [each.get("timestamp") for each in extensions]
    return pa.RecordBatch.from_arrays(
        [
            pa.array([message.payload for message in messages], pa.binary()),
            pa.array([context.channel for context in contexts], _TEXT),
            _texts([context.channel_extension for context in contexts]),
            pa.repeat(pa.scalar(partition, pa.int32()), count),
            pa.array(range(first, first + count), pa.int64()),
            pa.array([now if time is None else int(time * 1_000_000) for time in times], _TIME),
            _texts([context.content_type for context in contexts]),
            _texts([context.correlation_id for context in contexts]),
            _texts([context.reply_to_channel for context in contexts]),
            _headers(contexts, extensions),
            pa.array([each.get("packetId") for each in extensions], pa.int32()),
        ],
        schema=JOURNAL,
    )


def _texts(values: list[str | None]) -> pa.Array:
    return pa.array(values, _TEXT) if any(value is not None for value in values) else pa.nulls(len(values), _TEXT)


def _headers(contexts: list[MessageContext], extensions: list[Mapping[str, Any]]) -> pa.Array:
    """The headers of the sender, and what else has no column, as one map for each message; null if there is nothing."""
    ends: list[int | None] = []
    names: list[str] = []
    values: list[str] = []
    for context, each in zip(contexts, extensions, strict=True):
        before = len(names)
        headers = each.get("headers")
        if headers:
            names += headers
            values += headers.values()
        identity = each.get("messageId")
        if identity is not None and (headers is None or MESSAGE_ID not in headers):
            names.append(MESSAGE_ID)
            values.append(identity)
        if context.content_encoding is not None and (headers is None or CONTENT_ENCODING not in headers):
            names.append(CONTENT_ENCODING)
            values.append(context.content_encoding)
        ends.append(None if len(names) == before else before)
    if not names:
        return pa.nulls(len(contexts), _HEADERS)
    # an offset that is null makes its map null
    return pa.MapArray.from_arrays(
        pa.array([*ends, len(names)], pa.int32()), pa.array(names, _TEXT), pa.array(values, _TEXT)
    )


def identities(rows: pa.Table) -> set[Identity]:
    """What tells the deliveries of ``rows`` from others, also when the broker makes them again."""
    found = set()
    for packet, headers, channel, value in zip(
        *(rows.column(name).to_pylist() for name in ("packet", "headers", "channel", "value")), strict=True
    ):
        known = dict(headers or ()).get(MESSAGE_ID) or packet
        if known is not None:
            found.add((known, channel, value))
    return found


def identity_of(message: Message) -> Identity | None:
    """The same for a message; ``None`` if nothing tells it from another with the same content."""
    context = message.context
    known = context.extensions.get("messageId") or context.extensions.get("packetId")
    return None if known is None else (known, context.channel, message.payload)
