"""Values of events in portable form: what JSON has, and tags for what it lacks.

Text, ``true``, ``false``, ``null``, lists, maps with keys of text, finite floats and integers of 64 bits are plain
JSON. Any other value is an object with one key that begins with ``$``:

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

Objects with fields (pydantic models, dataclasses, …) become maps, as :func:`messaging.dispatch.eventdata.to_map` makes
them. Keys that are no text are converted to text as the typed event bus does. Any other value without fields takes the
form that pydantic gives it in JSON: an IP address or a URL its text. A value that pydantic cannot serialise has no
form.

Reading executes and imports nothing. A member of an enum is read as itself if its class is named beside the value, and
imported already (:mod:`messaging.dispatch.eventdata.enums`); otherwise as a member of a generated enum with the same
name and value: :func:`messaging.dispatch.eventdata.convert` makes the original of it as of members of any other enum,
by its name or else its value. Lists, tuples and other sequences are read as lists.

**Bounds.** Lists and objects nest at most :data:`MAX_DEPTH` levels, those of tags included (the lists in ``$duration``
and ``$complex`` do not count). Integers, decimals and
fractions stay within the bounds of :mod:`messaging.codecs.bounds`. Elements of a set with equal hashes, which a sender
can choose, are refused beyond :data:`MAX_EQUAL_HASHES`, and generated enums, which take 50 us each to make, beyond
:data:`messaging.dispatch.eventdata.enums.MAX_ENUMS` in one event.

**Text.** It is that of ``json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))``, in UTF-8;
with ``ensure_ascii=True`` if it has a lone surrogate, which UTF-8 cannot encode. pydantic's parser reads it in half the
time of the standard library's. Its writer would be four times as fast, and is not used: it writes some floats in other
digits (``1e-7`` for ``1e-07``), and turns bytes and dates into text, where an error is due.

Every function is thread safe. A value must not change while it is written.
"""

from __future__ import annotations

import base64
import contextlib
import datetime
import enum
import json
import math
import numbers
import pathlib
import re
import uuid
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence, Set
from decimal import Decimal
from fractions import Fraction
from typing import Any, Final, NoReturn, TypeAlias, TypeVar

from pydantic_core import PydanticSerializationError, from_json, to_jsonable_python

from messaging.codecs.bounds import is_vast, is_vast_text
from messaging.dispatch.eventdata.conversion import convert
from messaging.dispatch.eventdata.converters import with_article
from messaging.dispatch.eventdata.enums import MAX_ENUMS, classes_at, note_class, read_member, state
from messaging.dispatch.eventdata.maps import as_data
from messaging.dispatch.eventdata.schema import schema_of
from messaging.errors import ConversionError, DecodeError, InvalidEventError

N = TypeVar("N")

#: levels of lists and objects in a portable value
MAX_DEPTH: Final = 100
#: elements of a set that may have the same hash; only sets of more elements are checked
MAX_EQUAL_HASHES: Final = 100

_LONG: Final = range(-(2**63), 2**63)
#: types that JSON has
_PLAIN: Final = frozenset({str, bool, type(None)})
#: types of most values that need a tag; they have no fields
_SIMPLE: Final = frozenset({bytes, datetime.datetime, datetime.date, datetime.timedelta, Decimal, uuid.UUID, set})
#: in place of the levels that are left: no bounds
_UNBOUNDED: Final = -1


def to_portable(value: Any, *, is_bounded: bool = True, enums: list[str] | None = None) -> Any:
    """Return any value of an event in portable form, which shares no mutable value with it.

    Args:
        value: an event, or a part of one.
        is_bounded: whether the bounds of the module apply. The archive of recorded events does without.
        enums: gets the classes of the members of enums, see :mod:`messaging.dispatch.eventdata.enums`.

    Raises:
        InvalidEventError: the value or a part of it has no portable form, is beyond the bounds or cannot be read.
    """
    earlier = state.found
    if enums is not earlier:
        state.found = enums
    try:
        return _dumped(value, MAX_DEPTH if is_bounded else _UNBOUNDED)
    except InvalidEventError:
        raise
    except RecursionError:
        raise _too_deep() from None
    except Exception as error:  # values may raise anything when they are read
        raise InvalidEventError(f"the event cannot be read: {type(error).__name__}") from error
    finally:
        if enums is not earlier:
            state.found = earlier


def from_portable(value: Any, *, is_bounded: bool = True, enums: Collection[str] = ()) -> Any:
    """Return the value of a portable form, which shares no mutable value with it.

    Args:
        value: what a parser of JSON returned, or :func:`with_tags`.
        is_bounded: whether the bounds of depth and numbers apply. The archive of recorded events does without.
        enums: classes that were noted when it was written.

    Raises:
        DecodeError: a tag is unknown or has the wrong content, a float is not finite, a value is beyond the bounds, or
            it is of a type that JSON has not.
    """
    state.left = MAX_ENUMS if is_bounded else _UNBOUNDED
    if enums:
        state.classes = classes_at(enums)
    try:
        return _loaded(value, MAX_DEPTH if is_bounded else _UNBOUNDED)
    except RecursionError:
        pass
    finally:
        if enums:
            state.classes = {}
    raise DecodeError("data of an event: nested too deeply")


def with_tags(value: Any) -> Any:
    """Return the portable form of what a parser of CBOR returned.

    Tags stay as they are. Values that JSON has not get theirs: byte strings, dates, decimals, sets, NaN. A value that
    events cannot have stays, and :func:`from_portable` refuses it.

    Raises:
        RecursionError: it is nested too deeply. The parser refuses more than 200 levels.
    """
    kind = type(value)
    if kind in _PLAIN:
        return value
    if kind is dict:
        return {key: with_tags(each) for key, each in value.items()}
    if kind is list:
        return [with_tags(each) for each in value]
    if isinstance(value, _NATIVE):
        with contextlib.suppress(InvalidEventError):
            return to_portable(value)
    return value


#: values that CBOR has beside JSON, or in other bounds
_NATIVE: Final = (int, float, bytes, datetime.date, Decimal, Fraction, uuid.UUID, set, frozenset)


# --- to JSON


def _too_deep() -> InvalidEventError:
    return InvalidEventError(f"an event is nested deeper than {MAX_DEPTH} levels, or a part of itself")


def _below(room: int) -> int:
    """Return the levels that are left below one more level."""
    if room == 0:
        raise _too_deep()
    return room - 1


def _dumped(value: Any, room: int) -> Any:
    """Return the form of ``value``. ``room`` is the number of levels that are left, negative without bounds."""
    kind = type(value)
    if kind in _PLAIN:
        return value
    if kind is int:
        return value if value in _LONG else {"$int": hex(_checked(value, _below(room)))}
    if kind is float:
        if math.isfinite(value):
            return value
        _below(room)
        return {"$float": repr(value)}
    if kind is list:
        return _dumped_list(value, room)
    if isinstance(value, Mapping):
        return _dumped_map(value, room)
    return _dumped_rare(value, room)


def _dumped_map(data: Mapping[Any, Any], room: int) -> dict[str, Any]:
    room = _below(room)
    if len(data) == 1:
        ((key, value),) = data.items()
        text = key if type(key) is str else _key(key)
        if text.startswith("$"):
            return {"$map": {text: _dumped(value, _below(room))}}
        return {text: _dumped(value, room)}
    found = {
        key if type(key) is str else _key(key): value if type(value) in _PLAIN else _dumped(value, room)
        for key, value in data.items()
    }
    if len(found) != len(data):
        raise InvalidEventError("two keys of a map are the same as text")
    return found


def _dumped_list(values: Collection[Any], room: int) -> list[Any]:
    room = _below(room)
    return [_dumped(each, room) for each in values]


def _key(key: Any) -> str:
    try:
        text: str = convert(key, str)
    except ConversionError:
        raise InvalidEventError(f"a key of a map, {with_article(type(key))}, does not become text") from None
    return text


def _checked(number: Any, room: int) -> Any:
    if room >= 0 and is_vast(number):
        raise InvalidEventError(f"{with_article(type(number))} beyond the bounds of numbers has no portable form")
    return number


def _dumped_rare(value: Any, room: int) -> Any:
    kind = type(value)
    if isinstance(value, enum.Enum):
        return _dumped_enum(value, room)
    if kind not in _SIMPLE and schema_of(kind) is not None:
        return _dumped(as_data(value), room)  # no instances of schemas are left
    for kinds, tag, dump in _KINDS:
        if isinstance(value, kinds):
            if tag is None:
                return dump(value, room)
            return {tag: dump(value, _below(room))}
    try:
        plain = to_jsonable_python(value, inf_nan_mode="constants")
    except (PydanticSerializationError, ValueError, TypeError):
        raise InvalidEventError(f"{with_article(kind)} has no portable form") from None
    return _dumped(plain, room)


def _dumped_enum(member: Any, room: int) -> Any:
    if member.name is None:  # a combination of flags without a name
        return _dumped(member.value, room)
    note_class(type(member))
    parts = [type(member).__name__, member.name, _dumped(member.value, _below(_below(room)))]
    if isinstance(member, (str, int, float)):
        parts.append(True)
    return {"$enum": parts}


def _dumped_number(value: Any, room: int) -> Any:
    """Dump a number of a library, or of a subclass of a Python number."""
    if isinstance(value, numbers.Integral):
        return _dumped(int(value), room)
    if isinstance(value, numbers.Rational):
        room = _below(room)
        parts = (_checked(int(each), room) for each in (value.numerator, value.denominator))
        return {"$fraction": "/".join(map(str, parts))}
    if isinstance(value, numbers.Real):
        return _dumped(float(value), room)
    if isinstance(value, numbers.Complex):
        number = complex(value)
        room = _below(room)
        return {"$complex": [_dumped(number.real, room), _dumped(number.imag, room)]}
    raise InvalidEventError(f"{with_article(type(value))} has no portable form")


_Dump: TypeAlias = Callable[[Any, int], Any]

#: types with their tag and their form in JSON; the first match counts
_KINDS: Final[tuple[tuple[Any, str | None, _Dump], ...]] = (
    (str, None, lambda value, _: str.__str__(value)),
    ((bytes, bytearray, memoryview), "$bytes", lambda value, _: base64.b64encode(value).decode()),
    (datetime.datetime, "$datetime", lambda value, _: datetime.datetime.isoformat(value)),
    (datetime.date, "$date", lambda value, _: datetime.date.isoformat(value)),
    (datetime.time, "$time", lambda value, _: datetime.time.isoformat(value)),
    (datetime.timedelta, "$duration", lambda value, _: [value.days, value.seconds, value.microseconds]),
    (Decimal, "$decimal", lambda value, room: str(_checked(value, room))),
    (uuid.UUID, "$uuid", lambda value, _: str(value)),
    (numbers.Number, None, _dumped_number),
    (pathlib.PureWindowsPath, "$windowspath", lambda value, _: str(value)),
    (pathlib.PurePath, "$path", lambda value, _: str(value)),
    (re.Pattern, None, lambda value, room: _dumped(value.pattern, room)),
    (type, None, lambda value, _: f"{value.__module__}.{value.__qualname__}"),
    (datetime.tzinfo, None, lambda value, _: str(value)),
    (frozenset, "$frozenset", _dumped_list),
    (Set, "$set", _dumped_list),
    (Sequence, None, _dumped_list),
    (Collection, None, _dumped_list),
)


# --- from JSON


def _inside(room: int) -> int:
    """Return the levels that are left inside one more level."""
    if room == 0:
        raise DecodeError(f"data of an event: nested deeper than {MAX_DEPTH} levels")
    return room - 1


def _loaded(value: Any, room: int) -> Any:
    """Return the value of a form. ``room`` is as in :func:`_dumped`."""
    kind = type(value)
    if kind in _PLAIN:
        return value
    if kind is int:
        return value if value in _LONG else _bounded(value, room)
    if kind is dict:
        return _loaded_map(value, room)
    if kind is list:
        return _loaded_list(value, room)
    if kind is float:
        if math.isfinite(value):
            return value
        raise DecodeError("data of an event: a number beyond the range of a float; '$float' has infinity and NaN")
    raise DecodeError(f"data of an event: {with_article(kind)}, which JSON has not")


def _loaded_map(value: dict[Any, Any], room: int) -> Any:
    room = _inside(room)
    if len(value) == 1:
        ((tag, content),) = value.items()
        if type(tag) is str and tag.startswith("$"):
            return _loaded_tag(tag, content, room)
    return _loaded_items(value, room)


def _loaded_items(value: dict[Any, Any], room: int) -> dict[str, Any]:
    for key in value:
        if type(key) is not str:  # only CBOR has others
            raise DecodeError(f"data of an event: a key of a map is text, not {with_article(type(key))}")
    return {key: each if type(each) in _PLAIN else _loaded(each, room) for key, each in value.items()}


def _loaded_list(values: list[Any], room: int) -> list[Any]:
    room = _inside(room)
    return [_loaded(each, room) for each in values]


def _loaded_tag(tag: str, content: Any, room: int) -> Any:
    known = _TAGS.get(tag)
    if known is None:
        raise DecodeError(f"data of an event: the tag {tag[:20]!r}, which this version does not know")
    load, wanted = known
    try:
        return load(content, room)
    except (DecodeError, RecursionError):
        raise
    except Exception:  # noqa: BLE001, S110  # also of the code of members that are elements of a set
        pass
    raise DecodeError(f"data of an event: {tag!r} must have {wanted}")


def _text(content: Any) -> str:
    if type(content) is not str:
        raise TypeError
    return content


def _list(content: Any) -> list[Any]:
    if type(content) is not list:
        raise TypeError
    return content


def _loaded_int(content: Any, room: int) -> int:
    return _bounded(int(_text(content), 16), room)


def _loaded_decimal(content: Any, room: int) -> Decimal:
    if room >= 0 and is_vast_text(_text(content)):
        raise _vast("a Decimal")
    return _bounded(Decimal(_text(content)), room)


def _loaded_fraction(content: Any, room: int) -> Fraction:
    numerator, denominator = _text(content).split("/")
    if room >= 0 and (is_vast_text(numerator) or is_vast_text(denominator)):
        raise _vast("a Fraction")
    return _bounded(Fraction(int(numerator), int(denominator)), room)


def _bounded(number: N, room: int) -> N:
    if room >= 0 and is_vast(number):
        raise _vast(with_article(type(number)))
    return number


def _vast(kind: str) -> DecodeError:
    return DecodeError(f"data of an event: {kind} beyond the bounds of numbers")


def _loaded_duration(content: Any, _: int) -> datetime.timedelta:
    days, seconds, micros = _list(content)
    return datetime.timedelta(days, seconds, micros)


def _loaded_complex(content: Any, room: int) -> complex:
    real, imaginary = (_loaded(each, room) for each in _list(content))
    return complex(real, imaginary)


def _loaded_elements(content: Any, room: int) -> list[Any]:
    """Return the elements of a set; ``TypeError`` if one has no hash."""
    parts = _loaded_list(_list(content), room)
    if len(parts) > MAX_EQUAL_HASHES:
        # Numbers and UUIDs can be chosen to have equal hashes; making a set of them takes quadratic time.
        ((_, most),) = Counter(map(hash, parts)).most_common(1)
        if most > MAX_EQUAL_HASHES:
            raise DecodeError(f"data of an event: a set with more than {MAX_EQUAL_HASHES} equal hashes")
    return parts


def _loaded_enum(content: Any, room: int) -> Any:
    name, member, form, *more = _list(content)
    _text(name), _text(member)
    room = _inside(room)
    value = _loaded(form, room)

    def has_value(known: enum.Enum) -> bool:
        other = _loaded(_dumped(known._value_, room), room)
        return type(other) is type(value) and bool(other == value)

    return read_member(name, member, value, bool(more), has_value)


_FLOATS: Final = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}
#: tag -> its reader, which may raise what Python raises for wrong values, and what its content must be
_TAGS: Final[dict[str, tuple[Callable[[Any, int], Any], str]]] = {
    "$map": (lambda content, room: _loaded_inner(content, room), "a map"),
    "$float": (lambda content, _: _FLOATS[content], "'nan', 'inf' or '-inf'"),
    "$int": (_loaded_int, "the text of an integer in hexadecimal, such as '-0x8000000000000001'"),
    "$bytes": (lambda content, _: base64.b64decode(_text(content), validate=True), "base64"),
    "$datetime": (lambda content, _: datetime.datetime.fromisoformat(content), "the text of a date and time, ISO 8601"),
    "$date": (lambda content, _: datetime.date.fromisoformat(content), "the text of a date, ISO 8601"),
    "$time": (lambda content, _: datetime.time.fromisoformat(content), "the text of a time, ISO 8601"),
    "$duration": (_loaded_duration, "a list of days, seconds and microseconds"),
    "$decimal": (_loaded_decimal, "the text of a decimal number, such as '1.10'"),
    "$fraction": (_loaded_fraction, "the text of a fraction, such as '1/3'"),
    "$complex": (_loaded_complex, "a list of the real and the imaginary part"),
    "$uuid": (lambda content, _: uuid.UUID(_text(content)), "the text of a UUID"),
    "$path": (lambda content, _: pathlib.PurePosixPath(_text(content)), "text"),
    "$windowspath": (lambda content, _: pathlib.PureWindowsPath(_text(content)), "text"),
    "$set": (lambda content, room: set(_loaded_elements(content, room)), "a list of values that a set can have"),
    "$frozenset": (
        lambda content, room: frozenset(_loaded_elements(content, room)),
        "a list of values that a set can have",
    ),
    "$enum": (_loaded_enum, "a list of the name of a class, the name of a member, and its value"),
}


def _loaded_inner(content: Any, room: int) -> dict[str, Any]:
    """Return the map in a ``$map``, whose only key begins with ``$``."""
    if type(content) is not dict:
        raise TypeError
    return _loaded_items(content, _inside(room))


# Without the search for cycles, which takes a fourth of the time: a cycle ends with a RecursionError.
_encode: Final = json.JSONEncoder(
    ensure_ascii=False, check_circular=False, allow_nan=False, separators=(",", ":")
).encode
_encode_in_ascii: Final = json.JSONEncoder(check_circular=False, allow_nan=False, separators=(",", ":")).encode


def write_json(value: Any) -> bytes:
    """Return a portable value as JSON text in UTF-8.

    Raises:
        InvalidEventError: it is nested too deeply, or has a value that JSON has not.
    """
    try:
        text = _encode(value)
        return (text if is_unicode(text) else _encode_in_ascii(value)).encode()
    except RecursionError:
        problem = "it is nested too deeply"
    except (ValueError, TypeError) as error:
        problem = f"a value in it has no form in JSON ({type(error).__name__})"
    raise InvalidEventError(f"an event cannot be written as JSON: {problem}")


def is_unicode(text: str) -> bool:
    """Return whether ``text`` has no lone surrogate, which UTF-8 cannot encode."""
    if text.isascii():
        return True
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def read_json(text: bytes | str) -> Any:
    """Return the value of a JSON text. A number beyond the range of a float is infinite.

    Raises:
        DecodeError: it is no JSON in UTF-8, has ``NaN`` or ``Infinity``, an integer of more digits than Python converts
            (4,300), or is nested deeper than the parser of the standard library goes.
    """
    try:
        return from_json(text, allow_inf_nan=False)
    except ValueError:
        pass  # it may have a lone surrogate, or be nested deeper than 200 levels
    try:
        return json.loads(text if isinstance(text, str) else bytes(text).decode(), parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        problem = type(error).__name__
    raise DecodeError(f"not an event: no JSON in UTF-8 ({problem})")


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(name)
