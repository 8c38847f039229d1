r"""The envelope: message properties in front of the payload, for MQTT 3.1.1, which has none.

Only with the setting ``envelope``, on both sides, and only around messages that have something to carry::

    89 52 58 4D 0D 0A 1A 0A   magic: \x89 R X M \r \n \x1A \n
    01                        version of this layout
    nn nn nn nn               length of the header, big endian, at most 4 MiB
    {...}                     header: a JSON object in UTF-8
    ...                       the payload, as it is

Keys of the header, all optional, unknown ones ignored: ``contentType contentEncoding correlationId replyTo messageId``
(strings), ``headers`` (object of strings), ``expires`` (number: seconds since the epoch, by the sender's clock).

The magic is modelled on PNG's: it is not UTF-8, so no text starts with it, and transfers that mangle line ends or
stop at a control character break it. A payload that does start with it is wrapped in an envelope with an empty
header. What looks like an envelope but is malformed, or of another version, is a payload like any other.
"""

from __future__ import annotations

import json
import math
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Mapping

MAGIC: Final = b"\x89RXM\r\n\x1a\n"
VERSION: Final = 1
#: more than the longest strings and headers of messaging can need, escaped as JSON
MAX_HEADER: Final = 2**22

_START: Final = MAGIC + bytes((VERSION,))
_TEXTS: Final = ("contentType", "contentEncoding", "correlationId", "replyTo", "messageId")
_NOTHING: Final[Mapping[str, Any]] = MappingProxyType({})


def encode(payload: bytes, header: Mapping[str, Any]) -> bytes:
    """Put ``payload`` into an envelope if there is a header, or the payload could be taken for one.

    Args:
        payload: any bytes.
        header: of the keys above, values of the types given there.
    """
    if not header and not payload.startswith(MAGIC):
        return payload
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":"), default=dict).encode()
    return b"".join((_START, len(text).to_bytes(4, "big"), text, payload))


def decode(data: bytes) -> tuple[bytes, Mapping[str, Any]]:
    """Take a message out of its envelope.

    Returns:
        The payload and the known keys of the header; ``data`` itself and an empty header if it is no envelope. Never
        raises, whatever the bytes are.
    """
    if not data.startswith(_START):
        return data, _NOTHING
    at = len(_START) + 4
    end = at + int.from_bytes(data[len(_START) : at], "big")
    if not at < end <= len(data) or end - at > MAX_HEADER:
        return data, _NOTHING
    try:
        # a str is parsed from decoded text: bytes could be UTF-16, and would be guessed
        header = _checked(json.loads(str(data[at:end], "utf-8")))
    except (ValueError, OverflowError, RecursionError):  # not UTF-8, not JSON, or larger or deeper than Python takes
        return data, _NOTHING
    return (data, _NOTHING) if header is None else (data[end:], header)


def _checked(header: Any) -> dict[str, Any] | None:
    """The known keys, or ``None`` if one has the wrong type."""
    if not isinstance(header, dict):
        return None
    known: dict[str, Any] = {}
    for key in _TEXTS:
        if key in header:
            if not _is_text(header[key]):
                return None
            known[key] = header[key]
    if "headers" in header:
        headers = header["headers"]
        if not isinstance(headers, dict) or not all(_is_text(part) for pair in headers.items() for part in pair):
            return None
        known["headers"] = headers
    if "expires" in header:
        expires = header["expires"]
        if isinstance(expires, bool) or not isinstance(expires, (int, float)) or not math.isfinite(expires):
            return None
        known["expires"] = expires
    return known


def _is_text(value: Any) -> bool:
    # JSON may hold escaped lone surrogates, which no protocol can carry any further
    return isinstance(value, str) and not any("\ud800" <= letter <= "\udfff" for letter in value)
