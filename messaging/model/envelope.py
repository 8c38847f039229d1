r"""The envelope: message properties in front of the payload, for MQTT 3.1.1, which has none.

Used only with the setting ``envelope``, on both sides, and only for messages that have properties to carry. Clients of
another protocol at the same broker can use it too, see ``docs/amqp.md``::

    89 52 58 4D 0D 0A 1A 0A   magic: \x89 R X M \r \n \x1A \n
    01                        version of this layout
    nn nn nn nn               length of the header, big endian, at most 4 MiB
    {...}                     header: a JSON object in UTF-8
    ...                       the payload, unchanged

Keys of the header, all optional, unknown ones ignored: ``contentType contentEncoding correlationId replyTo messageId``
(strings), ``headers`` (object of strings), ``repeated`` (object of arrays of strings: all values of a header with
several; ``headers`` has the last one), ``expires`` (number: seconds since the epoch, by the sender's clock).

The magic is modelled on PNG's: it is not UTF-8, so no text starts with it, and transfers that mangle line ends or
stop at a control character break it. A payload that starts with it is wrapped in an envelope with an empty header. A
malformed envelope, or one of another version, is treated as a plain payload.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from pydantic_core import from_json, to_json

from messaging.execution import clock
from messaging.model.features import Features
from messaging.model.headers import as_text, is_repeated_text
from messaging.model.plan import Outgoing

MAGIC: Final = b"\x89RXM\r\n\x1a\n"
VERSION: Final = 1
#: bytes of the header; more than the longest allowed strings and headers need, escaped as JSON
MAX_HEADER: Final = 2**22

START: Final = MAGIC + bytes((VERSION,))
_TEXTS: Final = frozenset({"contentType", "contentEncoding", "correlationId", "replyTo", "messageId"})
_KNOWN: Final = _TEXTS | {"headers", "repeated", "expires"}
_NOTHING: Final[Mapping[str, Any]] = MappingProxyType({})


class Unwrapped(NamedTuple):
    """The payload and the properties of a message that was in an envelope."""

    payload: bytes
    content_type: str | None
    content_encoding: str | None
    correlation_id: str | None
    reply_to_channel: str | None
    #: read-only
    extensions: MappingProxyType[str, Any]


def encode(payload: bytes, header: Mapping[str, Any]) -> bytes:
    """Put ``payload`` into an envelope if there is a header, or if the payload looks like an envelope.

    Args:
        payload: any bytes.
        header: keys and types of values as listed above.
    """
    if not header and not payload.startswith(MAGIC):
        return payload
    text = to_json(header, fallback=dict)
    return b"".join((START, len(text).to_bytes(4, "big"), text, payload))


def wrap(outgoing: Outgoing, payload: bytes, *, expires: bool = True) -> bytes:
    """Put the payload of a message into an envelope, with the properties of the message.

    Args:
        outgoing: the message.
        payload: its payload, which a settled message has released.
        expires: whether its time to live starts now.
    """
    plan, options = outgoing.plan, outgoing.plan.options
    header: dict[str, Any] = {}
    if plan.content_type is not None:
        header["contentType"] = plan.content_type
    if plan.content_encoding is not None:
        header["contentEncoding"] = plan.content_encoding
    if outgoing.correlation_id is not None:
        header["correlationId"] = outgoing.correlation_id
    if plan.reply_to_channel is not None:
        header["replyTo"] = plan.reply_to_channel
    if options.headers:
        header |= _of_headers(options.headers)
    if options.time_to_live and expires:
        header["expires"] = clock.wall() + options.time_to_live
    if options.message_id is not None or (header and options.qos != "0"):
        header["messageId"] = outgoing.message_id
    return encode(payload, header)


def _of_headers(headers: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys for user headers. A reader that does not know ``repeated`` reads the last of several values."""
    repeated = {name: value for name, value in headers.items() if value and is_repeated_text(value)}
    plain = {name: value[-1] if name in repeated else as_text(value) for name, value in headers.items()}
    return {"headers": plain, "repeated": repeated} if repeated else {"headers": plain}


def unwrap(data: bytes, extensions: MappingProxyType[str, Any]) -> Unwrapped | None:
    """Return the message that :func:`wrap` put into an envelope; ``None`` if it has expired.

    Args:
        data: the received bytes.
        extensions: the values that the protocol reported.
    """
    payload, header = decode(data)
    if not header:
        return Unwrapped(payload, None, None, None, None, extensions)
    found = extensions.copy()
    if "expires" in header:
        left = header["expires"] - clock.wall()
        if left <= 0:
            return None
        found[Features.EXTENSION_TIME_TO_LIVE] = left
    if "messageId" in header:
        found["messageId"] = header["messageId"]
    headers = header.get("headers")
    if headers:
        for name, values in header.get("repeated", _NOTHING).items():
            if name in headers and len(values) > 1:
                headers[name] = (*values,)
        found[Features.EXTENSION_HEADERS] = MappingProxyType(headers)
    return Unwrapped(
        payload,
        header.get("contentType"),
        header.get("contentEncoding"),
        header.get("correlationId"),
        header.get("replyTo"),
        MappingProxyType(found),
    )


def decode(data: bytes) -> tuple[bytes, Mapping[str, Any]]:
    """Split an envelope into payload and header.

    Returns:
        The payload, and the known keys of the header, with values of the right types. If ``data`` is no envelope:
        ``data`` and an empty header. Never raises.
    """
    if not data.startswith(START):
        return data, _NOTHING
    at = len(START) + 4
    end = at + int.from_bytes(data[len(START) : at], "big")
    if not at < end <= len(data) or end - at > MAX_HEADER:
        return data, _NOTHING
    try:
        header = _checked(from_json(data[at:end]))
    except (ValueError, OverflowError):  # not UTF-8, not JSON, or larger or deeper than Python takes
        return data, _NOTHING
    return (data, _NOTHING) if header is None else (data[end:], header)


def _checked(header: Any) -> dict[str, Any] | None:
    """Return the known keys, or ``None`` if a value has the wrong type."""
    if not isinstance(header, dict):
        return None
    for key, value in header.items():
        if key in _TEXTS:
            if not isinstance(value, str):
                return None
        elif key == "headers":
            if not isinstance(value, dict) or not all(isinstance(each, str) for each in value.values()):
                return None
        elif key == "repeated":
            if not isinstance(value, dict) or not all(map(_is_texts, value.values())):
                return None
        elif key == "expires" and (
            isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value)
        ):
            return None
    return header if _KNOWN.issuperset(header) else {key: header[key] for key in header.keys() & _KNOWN}


def _is_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(each, str) for each in value)
