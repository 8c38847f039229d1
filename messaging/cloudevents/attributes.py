"""Context attributes: their names, their types, and the canonical text of their values (CloudEvents 1.0.2, 3).

Every function is thread safe, and raises :class:`~messaging.errors.InvalidEventError` that names the attribute and a
correct value. The error does not quote the value.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta, timezone
from typing import Any, Final

from messaging.errors import InvalidEventError

SPECVERSION: Final = "1.0"
REQUIRED: Final = ("specversion", "id", "source", "type")
#: attributes of the specification whose values are text
_TEXTS: Final = frozenset({*REQUIRED, "datacontenttype", "dataschema", "subject"})
#: names that the JSON format uses for the data
_RESERVED: Final = frozenset({"data", "data_base64"})

#: attributes of one event
MAX_ATTRIBUTES: Final = 256
#: characters of one value; the specification has events of up to 64 KiB forwarded
MAX_TEXT: Final = 65_536
_MAX_NAME: Final = 100
_INTEGERS: Final = range(-(2**31), 2**31)

_NAME: Final = re.compile(r"[a-z0-9]+")
#: control characters, surrogates and noncharacters (CloudEvents 3, String)
_FORBIDDEN: Final = re.compile(
    "[\x00-\x1f\x7f-\x9f\ud800-\udfff\ufdd0-\ufdef"
    + "".join(f"{chr(plane + 0xFFFE)}{chr(plane + 0xFFFF)}" for plane in range(0, 0x110000, 0x10000))
    + "]"
)
#: RFC 3339, whose letters may be in lower case
_TIMESTAMP: Final = re.compile(
    r"(\d{4})-(\d\d)-(\d\d)T(\d\d):(\d\d):(\d\d)(?:\.(\d{1,30}))?(?:Z|([+-])(\d\d):(\d\d))", re.IGNORECASE | re.ASCII
)
#: RFC 3986: the characters of a URI reference
_URI: Final = re.compile(r"(?:[A-Za-z0-9._~:/?#\[\]@!$&'()*+,;=-]|%[0-9A-Fa-f]{2})+")
_SCHEME: Final = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:")
_MEDIA_TYPE: Final = re.compile(r"[\w!#$&^.+-]+/[\w!#$&^.+*-]+\s*(?:;.*)?", re.ASCII | re.DOTALL)


def is_name(name: str) -> bool:
    """Return whether ``name`` can be the name of an attribute, rather than of another header."""
    return len(name) <= _MAX_NAME and _NAME.fullmatch(name) is not None and name not in _RESERVED


def checked(attributes: Mapping[Any, Any]) -> dict[str, Any]:
    """Return a copy of the attributes of an event, with every value checked, without those that are ``None``.

    Raises:
        InvalidEventError: a required attribute is missing, or a name or value is invalid.
    """
    if len(attributes) > MAX_ATTRIBUTES:
        raise InvalidEventError(f"a CloudEvent has at most {MAX_ATTRIBUTES} attributes, not {len(attributes)}")
    found = {check_name(name): check_value(name, each) for name, each in attributes.items() if each is not None}
    for name in REQUIRED:
        if name not in found:
            raise InvalidEventError(
                f"attribute {name!r} is missing: a CloudEvent needs {', '.join(map(repr, REQUIRED))}"
            )
    return found


def check_name(name: Any) -> str:
    """Return the name of an attribute.

    Raises:
        InvalidEventError: it is malformed.
    """
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        shown = repr(name[:_MAX_NAME]) if isinstance(name, str) else type(name).__name__
        raise InvalidEventError(f"attribute name {shown}: must be lower-case letters a-z and digits 0-9 only")
    if name in _RESERVED or len(name) > _MAX_NAME:
        raise InvalidEventError(
            f"attribute name {name[:_MAX_NAME]!r}: must be at most {_MAX_NAME} characters, and not 'data'"
        )
    return str.__str__(name)


def check_value(name: str, value: Any) -> Any:
    """Return the value of the attribute ``name``: a plain str, int, bool, bytes or aware datetime.

    Raises:
        InvalidEventError: it is of another type, out of range, or not of the form that the attribute has.
    """
    if name == "time":
        if not isinstance(value, datetime):
            raise _wrong(name, f"must be a datetime with a time zone, not {type(value).__name__}")
    elif name in _TEXTS and not isinstance(value, str):
        raise _wrong(name, f"must be a str, not {type(value).__name__}")
    if isinstance(value, str):
        return _checked_text(name, str.__str__(value))
    if isinstance(value, bool):
        return value
    if isinstance(value, int):
        if value not in _INTEGERS:
            raise _wrong(name, "must be an integer of 32 bits; send a larger one as text")
        return int(value)
    if isinstance(value, (bytes, bytearray)):
        if len(value) > MAX_TEXT:
            raise _wrong(name, f"must be at most {MAX_TEXT} bytes long")
        return bytes(value)
    if isinstance(value, datetime):
        return _checked_time(name, value)
    raise _wrong(name, f"must be a str, int, bool, bytes or datetime, not {type(value).__name__}")


def _checked_text(name: str, value: str) -> str:
    if not value and name in _TEXTS:
        raise _wrong(name, "must not be empty; leave the attribute out instead" if name not in REQUIRED else
                     "must not be empty")  # fmt: skip
    if len(value) > MAX_TEXT:
        raise _wrong(name, f"must be at most {MAX_TEXT} characters long")
    if _FORBIDDEN.search(value):
        raise _wrong(name, "must not hold control characters, surrogates or noncharacters")
    if name == "specversion" and value != SPECVERSION:
        raise _wrong(name, f"must be {SPECVERSION!r}: this is the version of CloudEvents that is supported")
    if name == "datacontenttype" and not _MEDIA_TYPE.fullmatch(value):
        raise _wrong(name, "must be a media type, such as 'application/json' or 'text/plain; charset=utf-8'")
    return value


def _checked_time(name: str, value: datetime) -> datetime:
    offset = value.utcoffset()
    if offset is None:
        raise _wrong(name, "needs its time zone: datetime(..., tzinfo=timezone.utc)")
    if offset % timedelta(minutes=1):
        raise _wrong(name, "must have a time zone of whole minutes, because RFC 3339 has no others")
    # of a subclass of datetime only the time is kept
    return datetime.combine(value.date(), value.time(), timezone(offset) if offset else UTC)


def check_uris(attributes: Mapping[str, Any]) -> None:
    """Refuse a new event whose ``source`` or ``dataschema`` is no URI. Those of others are sent on as they are.

    Raises:
        InvalidEventError: see above.
    """
    if not _URI.fullmatch(attributes["source"]):
        raise _wrong(
            "source", "must be a URI reference, with other characters percent-encoded, such as '/plant/line%203'"
        )
    schema = attributes.get("dataschema")
    if schema is not None and not (_URI.fullmatch(schema) and _SCHEME.match(schema)):
        raise _wrong("dataschema", "must be an absolute URI, such as 'https://example.com/reading.json'")


def canonical(value: Any) -> str:
    """Return the canonical text of a checked value: ``true``, ``-5``, base64, RFC 3339 (CloudEvents 3)."""
    if isinstance(value, str):
        return value
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return str(value)
    if isinstance(value, bytes):
        return base64.b64encode(value).decode("ascii")
    text: str = value.isoformat()
    return text[:-6] + "Z" if text.endswith("+00:00") else text


def timestamp(name: str, text: Any) -> datetime:
    """Return the time that ``text`` says (RFC 3339). Digits beyond microseconds are cut off.

    Raises:
        InvalidEventError: it is no such text, or no such time.
    """
    found = _TIMESTAMP.fullmatch(text) if isinstance(text, str) else None
    if found is None:
        raise _wrong(name, "must be a time as in RFC 3339, such as '2018-04-05T17:31:00Z'")
    *numbers, fraction, sign, hours, minutes = found.groups()
    year, month, day, hour, minute, second = map(int, numbers)
    offset = timedelta(hours=int(hours or 0), minutes=int(minutes or 0)) * (-1 if sign == "-" else 1)
    try:
        leap = second == 60  # RFC 3339 5.7: a leap second is the second after it
        zone = timezone(offset) if offset else UTC
        microsecond = int((fraction or "")[:6].ljust(6, "0"))
        time = datetime(year, month, day, hour, minute, 59 if leap else second, microsecond, zone)
        return time + timedelta(seconds=1) if leap else time
    except (ValueError, OverflowError):
        raise _wrong(name, "is no time of the calendar") from None


def is_json(media_type: Any) -> bool:
    """Return whether data of that content type is JSON (JSON event format 3.1.1); without one it is."""
    if not media_type:
        return True
    subtype = str(media_type).partition(";")[0].strip().lower().partition("/")[2]
    return subtype == "json" or subtype.endswith("+json")


def is_text(media_type: str) -> bool:
    """Return whether data of that content type, which is not JSON, is text: ``text/*`` and XML."""
    kind, _, subtype = media_type.partition(";")[0].strip().lower().partition("/")
    return kind == "text" or subtype == "xml" or subtype.endswith("+xml")


def _wrong(name: str, problem: str) -> InvalidEventError:
    return InvalidEventError(f"attribute {name!r}: {problem}")
