"""The payload of a recorded event: its layout, version 1.

A recorded event is a JSON object in UTF-8::

    {"event": 1, "recorder": "bus-5c1f…", "sequence": 17, "topic": "orders/placed", "time": 1760000000123456,
     "data": {"id": 3, "total": 99.5, "placed": {"$datetime": "2025-10-09T08:53:20+00:00"}}}

``event`` is the version of the layout. ``recorder`` and ``sequence`` identify an event: a recorder has a unique name
for each run, and numbers the events of its topics from 0, so that a missing number is a lost event. ``time`` is the
publication time, in microseconds since 1970, UTC. Other fields are ignored, so that later versions may add some.

``data`` is the event in map form (157.2.2). Text, ``true``, ``false``, ``null``, lists, maps, finite floats and
integers of 64 bits are plain JSON. Any other value is an object with one key that begins with ``$``:

====================  =====================================================================================
``$float``            ``"nan"``, ``"inf"``, ``"-inf"``
``$int``              an integer beyond 64 bits, in hexadecimal: ``"-0x8000000000000001"``
``$bytes``            base64
``$datetime``         ISO 8601: a time zone is kept as its offset, and ``fold`` is not
``$date``, ``$time``  ISO 8601
``$duration``         ``[days, seconds, microseconds]``
``$decimal``          text: ``"1.10"``
``$fraction``         text: ``"1/3"``
``$complex``          ``[real, imaginary]``
``$uuid``             text
``$path``             text; ``$windowspath`` of Windows
``$set``              a list; ``$frozenset``
``$enum``             ``[class, name, value]``; a fourth element ``true``: the member is its value, too (``IntEnum``)
``$map``              a map with one key that begins with ``$``, as it is
====================  =====================================================================================

Nothing in a payload is executed or imported. A member of an enum is read as a member of a generated enum with the same
name and value: the bus converts it to the original as it does with members of any other enum, by its name or else its
value. Collections are read as the bus has them anyway: lists and sets. Keys that are no text are converted to text as
the bus does. Any other value without fields is recorded as pydantic serialises it for JSON: an IP address or a URL as
its text. A value that pydantic cannot serialise cannot be recorded.
"""

from __future__ import annotations

import base64
import datetime
import enum
import json
import math
import numbers
import pathlib
import re
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence, Set
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from functools import lru_cache
from typing import Any, Final, NoReturn

from pydantic_core import PydanticSerializationError, to_jsonable_python

from messaging.dispatch.topics import is_topic
from messaging.errors import ConversionError, DecodeError, InvalidEventError
from messaging.typedevent import convert

#: the version of the layout
LAYOUT: Final = 1

_EPOCH: Final = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)
_MICROSECOND: Final = datetime.timedelta(microseconds=1)
_FIRST: Final = (datetime.datetime.min.replace(tzinfo=datetime.UTC) - _EPOCH) // _MICROSECOND
_LAST: Final = (datetime.datetime.max.replace(tzinfo=datetime.UTC) - _EPOCH) // _MICROSECOND
_LONG: Final = range(-(2**63), 2**63)
#: types that JSON has
_PLAIN: Final = frozenset({str, bool, type(None)})
#: generated enums that are kept
_MAX_ENUMS: Final = 1024
#: characters of the name of a recorder
_MAX_NAME: Final = 200


@dataclass(frozen=True, slots=True)
class RecordedEvent:
    """One event of an archive.

    Attributes:
        topic: the topic of the event.
        time: the publication time, in UTC.
        recorder, sequence: identify the event; see the module.
        data: the event in map form.
    """

    topic: str
    time: datetime.datetime
    recorder: str
    sequence: int
    data: dict[str, Any]


def microseconds(time: datetime.datetime) -> int:
    """Return the microseconds since 1970 of a time with a zone."""
    return (time - _EPOCH) // _MICROSECOND


def time_of(count: int) -> datetime.datetime:
    """Return the time of a number of microseconds since 1970, in UTC."""
    return _EPOCH + count * _MICROSECOND


def dump_event(event: RecordedEvent) -> bytes:
    """Return a recorded event as a payload; ``InvalidEventError`` tells the type of a value that has no form."""
    return _written(
        lambda: {
            "event": LAYOUT,
            "recorder": event.recorder,
            "sequence": event.sequence,
            "topic": event.topic,
            "time": microseconds(event.time),
            "data": _dumped_map(event.data),
        }
    ).encode()


def load_event(payload: bytes) -> RecordedEvent:
    """Return the recorded event in a payload; ``DecodeError`` tells why it is none."""
    found = _parsed(payload)
    if not isinstance(found, dict) or "event" not in found:
        raise DecodeError("not a recorded event: no object with a version in 'event'")
    if found["event"] != LAYOUT or type(found["event"]) is not int:
        raise DecodeError(f"a recorded event of layout {found['event']!r:.20}, which this version does not know")
    topic, recorder, data = found.get("topic"), found.get("recorder"), found.get("data")
    time, sequence = found.get("time"), found.get("sequence")
    if not isinstance(topic, str) or not is_topic(topic):
        raise DecodeError("a recorded event without a valid topic")
    if not isinstance(recorder, str) or not 0 < len(recorder) <= _MAX_NAME or not _is_unicode(recorder):
        raise DecodeError("a recorded event without the name of its recorder")
    if type(sequence) is not int or sequence not in _LONG or sequence < 0:
        raise DecodeError("a recorded event without a sequence number")
    if type(time) is not int or not _FIRST <= time <= _LAST:
        raise DecodeError("a recorded event without a time")
    return RecordedEvent(topic, time_of(time), recorder, sequence, _loaded_map(data))


def dump_data(data: Mapping[str, Any]) -> str:
    """Return the data of an event as JSON. Raises ``InvalidEventError`` as :func:`dump_event`."""
    return _written(lambda: _dumped_map(data))


def load_data(text: str) -> dict[str, Any]:
    """Return the data from the JSON of :func:`dump_data`. Raises ``DecodeError`` as :func:`load_event`."""
    return _loaded_map(_parsed(text))


_encode: Final = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode
_encode_in_ascii: Final = json.JSONEncoder(allow_nan=False, separators=(",", ":")).encode


def _written(make: Callable[[], dict[str, Any]]) -> str:
    """Return the result of ``make`` as JSON that UTF-8 can encode."""
    try:
        values = make()
        text = _encode(values)
        return text if text.isascii() or _is_unicode(text) else _encode_in_ascii(values)
    except RecursionError:
        raise InvalidEventError("the event is nested too deeply to be recorded") from None
    except InvalidEventError:
        raise
    except Exception as error:  # values may raise anything when they are read
        raise InvalidEventError(f"the event cannot be recorded: {type(error).__name__}") from error


def _is_unicode(text: str) -> bool:
    """Return whether ``text`` has no lone surrogate, which UTF-8 cannot encode."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _parsed(text: bytes | str) -> Any:
    try:
        if not isinstance(text, str):
            text = text.decode()
        return json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise DecodeError(f"not a recorded event: no JSON in UTF-8 ({type(error).__name__})") from None


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(name)


# --- to JSON


def _dumped(value: Any) -> Any:
    kind = type(value)
    if kind in _PLAIN:
        return value
    if kind is int:
        return value if value in _LONG else {"$int": hex(value)}
    if kind is float:
        return value if math.isfinite(value) else {"$float": repr(value)}
    if kind is list:
        return [_dumped(each) for each in value]
    if isinstance(value, Mapping):
        return _dumped_map(value)
    return _dumped_rare(value)


def _dumped_map(data: Mapping[Any, Any]) -> dict[str, Any]:
    found = {key if type(key) is str else _key(key): _dumped(value) for key, value in data.items()}
    if len(found) != len(data):
        raise InvalidEventError("two keys of a map are the same as text")
    return {"$map": found} if len(found) == 1 and next(iter(found)).startswith("$") else found


def _key(key: Any) -> str:
    try:
        text: str = convert(key, str)
    except ConversionError:
        raise InvalidEventError(f"a key of a map, a {type(key).__name__}, does not become text") from None
    return text


def _dumped_rare(value: Any) -> Any:
    if isinstance(value, enum.Enum):
        return _dumped_enum(value)
    for kind, tag, dump in _KINDS:
        if isinstance(value, kind):
            content = dump(value)
            return content if tag is None else {tag: content}
    try:
        return _dumped(to_jsonable_python(value, inf_nan_mode="constants"))
    except (PydanticSerializationError, ValueError, TypeError):
        raise InvalidEventError(f"a {type(value).__name__} cannot be recorded") from None


def _dumped_enum(member: Any) -> Any:
    if member.name is None:  # a combination of flags without a name
        return _dumped(member.value)
    parts = [type(member).__name__, member.name, _dumped(member.value)]
    if isinstance(member, (str, int, float)):
        parts.append(True)
    return {"$enum": parts}


def _dumped_number(value: Any) -> Any:
    """Dump a number of a library, or of a subclass of a Python number."""
    if isinstance(value, numbers.Integral):
        return _dumped(int(value))
    if isinstance(value, numbers.Rational):
        return {"$fraction": f"{int(value.numerator)}/{int(value.denominator)}"}
    if isinstance(value, numbers.Real):
        return _dumped(float(value))
    if isinstance(value, numbers.Complex):
        number = complex(value)
        return {"$complex": [_dumped(number.real), _dumped(number.imag)]}
    raise InvalidEventError(f"a {type(value).__name__} cannot be recorded")


def _several(values: Collection[Any]) -> list[Any]:
    return [_dumped(each) for each in values]


#: types with their tag and their form in JSON; the first match counts
_KINDS: Final[tuple[tuple[Any, str | None, Callable[[Any], Any]], ...]] = (
    (str, None, str.__str__),
    ((bytes, bytearray, memoryview), "$bytes", lambda value: base64.b64encode(value).decode()),
    (datetime.datetime, "$datetime", datetime.datetime.isoformat),
    (datetime.date, "$date", datetime.date.isoformat),
    (datetime.time, "$time", datetime.time.isoformat),
    (datetime.timedelta, "$duration", lambda value: [value.days, value.seconds, value.microseconds]),
    (Decimal, "$decimal", str),
    (uuid.UUID, "$uuid", str),
    (numbers.Number, None, _dumped_number),
    (pathlib.PureWindowsPath, "$windowspath", str),
    (pathlib.PurePath, "$path", str),
    (re.Pattern, None, lambda value: _dumped(value.pattern)),
    (type, None, lambda value: f"{value.__module__}.{value.__qualname__}"),
    (datetime.tzinfo, None, str),
    (frozenset, "$frozenset", _several),
    (Set, "$set", _several),
    (Sequence, None, _several),
    (Collection, None, _several),
)


# --- from JSON


def _loaded_map(data: Any) -> dict[str, Any]:
    try:
        found = _loaded(data)
    except DecodeError:
        raise
    except (ValueError, TypeError, ArithmeticError, LookupError, AttributeError, RecursionError) as error:
        raise DecodeError(f"a recorded event with an invalid value in its data: {type(error).__name__}") from None
    if type(found) is not dict:
        raise DecodeError("a recorded event whose data is no map")
    return found


def _loaded(value: Any) -> Any:
    kind = type(value)
    if kind is list:
        return [_loaded(each) for each in value]
    if kind is not dict:
        return value
    if len(value) == 1:
        ((tag, content),) = value.items()
        if tag.startswith("$"):
            load = _TAGS.get(tag)
            if load is None:
                raise DecodeError(f"a recorded event with a {tag[:20]!r}, which this version does not know")
            return load(content)
    return {key: _loaded(each) for key, each in value.items()}


def _loaded_decimal(text: str) -> Decimal:
    if not isinstance(text, str):
        raise TypeError("no text")
    return Decimal(text)


def _loaded_duration(parts: list[int]) -> datetime.timedelta:
    days, seconds, micros = parts
    return datetime.timedelta(days, seconds, micros)


def _loaded_complex(parts: list[Any]) -> complex:
    real, imaginary = (_loaded(each) for each in parts)
    return complex(real, imaginary)


def _loaded_enum(parts: list[Any]) -> Any:
    name, member, value, *more = parts
    value = _loaded(value)
    if type(name) is not str or type(member) is not str:
        raise TypeError("no enum")
    try:
        return _cached_stand_in(name, member, value, bool(more), type(value).__name__)
    except TypeError:  # the value has no hash: it cannot be cached
        return _stand_in(name, member, value, bool(more))


@lru_cache(_MAX_ENUMS)
def _cached_stand_in(name: str, member: str, value: Any, is_value: bool, _: str) -> Any:
    """Return a cached :func:`_stand_in`. The key has the type of the value, since ``1 == True``."""
    return _stand_in(name, member, value, is_value)


def _stand_in(name: str, member: str, value: Any, is_value: bool) -> Any:
    """Return a member of an enum that is generated for it."""
    make: Any = enum.Enum
    try:
        return make(name, [(member, value)], type=type(value) if is_value else None)[member]
    except (ValueError, TypeError, KeyError):  # not a valid name of a member
        return value


_FLOATS: Final = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}
_TAGS: Final[dict[str, Callable[[Any], Any]]] = {
    "$map": lambda content: {key: _loaded(each) for key, each in content.items()},
    "$float": _FLOATS.__getitem__,
    "$int": lambda text: int(text, 16),
    "$bytes": lambda text: base64.b64decode(text, validate=True),
    "$datetime": datetime.datetime.fromisoformat,
    "$date": datetime.date.fromisoformat,
    "$time": datetime.time.fromisoformat,
    "$duration": _loaded_duration,
    "$decimal": _loaded_decimal,
    "$fraction": lambda text: Fraction(*map(int, text.split("/"))),
    "$complex": _loaded_complex,
    "$uuid": uuid.UUID,
    "$path": pathlib.PurePosixPath,
    "$windowspath": pathlib.PureWindowsPath,
    "$set": lambda parts: {_loaded(each) for each in parts},
    "$frozenset": lambda parts: frozenset(_loaded(each) for each in parts),
    "$enum": _loaded_enum,
}
