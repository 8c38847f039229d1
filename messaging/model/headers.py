"""User headers: the types of their values, and the text of a value that a protocol cannot carry.

A value is ``str``, ``int``, ``float``, ``bool``, ``bytes``, ``Decimal``, an aware ``datetime``, ``None``, or a sequence
or mapping of such values. Received sequences are tuples, received mappings are read-only, received times are in UTC.

An adapter announces the types that its protocol carries (``Adapter.header_types``). A value of another type is refused
when an application sets it. A received message that is published again, or dead-lettered, carries it as text.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from decimal import Decimal
from types import MappingProxyType, NoneType
from typing import Any, Final

from messaging.model import channels

#: header types of a protocol whose headers are text
TEXT: Final[frozenset[type]] = frozenset({str})
#: header types of a protocol whose headers are text and may repeat a name: several values of one name are a sequence
REPEATED_TEXT: Final[frozenset[type]] = TEXT | {tuple}
#: header types of a protocol that carries every value; ``tuple`` stands for sequences, ``dict`` for mappings
TYPED: Final[frozenset[type]] = frozenset(
    {str, int, float, bool, bytes, Decimal, datetime, NoneType, tuple, dict}
)  # fmt: skip
#: bounds that every protocol of this project can carry
MAX_HEADERS: Final = 256
MAX_HEADER_BYTES: Final = 32_768
#: nesting of sequences and mappings
MAX_DEPTH: Final = 16

_MAX_INT: Final = 2**63 - 1
#: an AMQP decimal: digits in 31 bits, and a scale in 8
_MAX_DIGITS: Final = 2**31 - 1
_MAX_SCALE: Final = 255
#: bytes that count for a value without text
_SIZE: Final = 8
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_VALUES: Final = "str, int, float, bool, bytes, Decimal, datetime, None, or a list or mapping of them"


def check(value: Any) -> Mapping[str, Any]:
    """Return headers with checked values, as immutable copies.

    Raises:
        ValueError: names the problem and correct values. The value is not shown: it may be a secret.
    """
    if not isinstance(value, Mapping):
        raise ValueError(f"must be a mapping of str to values, not {type(value).__name__}")
    if len(value) > MAX_HEADERS:
        raise ValueError(f"{len(value)} headers are too many; at most {MAX_HEADERS}")
    headers, total = _checked_mapping(value, 0)
    if total > MAX_HEADER_BYTES:
        raise ValueError(f"headers of {total} bytes are too large; at most {MAX_HEADER_BYTES}")
    return MappingProxyType(headers)


def _checked_mapping(value: Mapping[Any, Any], depth: int) -> tuple[dict[str, Any], int]:
    checked: dict[str, Any] = {}
    total = 0
    for name, each in value.items():
        total += _check_text(name, "name")
        if not name:
            raise ValueError("a header name is empty")
        # of a subclass of str only the text is kept
        checked[str.__str__(name)], size = _checked(each, f"value of {_shown(name)}", depth)
        total += size
    return checked, total


def _check_text(text: Any, what: str) -> int:
    """Return the size of ``text`` in bytes."""
    if not isinstance(text, str):
        raise ValueError(f"header {what} must be a str, not {type(text).__name__}")
    bad = channels.forbidden_character(text)
    if bad is not None:
        raise ValueError(f"header {what} holds {bad}")
    return len(text.encode())


def _checked(value: Any, what: str, depth: int) -> tuple[Any, int]:
    """Return the checked value and its size in bytes."""
    if isinstance(value, str):
        return str.__str__(value), _check_text(value, what)
    if value is None or isinstance(value, bool):
        return value, _SIZE
    if isinstance(value, int):
        if not ~_MAX_INT <= value <= _MAX_INT:
            raise ValueError(f"header {what} must be an int of 64 bits")
        return int(value), _SIZE
    if isinstance(value, float):
        return float(value), _SIZE
    if isinstance(value, (bytes, bytearray, memoryview)):
        data = bytes(value)
        return data, len(data)
    if isinstance(value, datetime):
        return _checked_time(value, what), _SIZE
    if isinstance(value, Decimal):
        return _checked_decimal(value, what), _SIZE
    if depth == MAX_DEPTH:
        raise ValueError(f"header {what} is nested more than {MAX_DEPTH} levels deep")
    if isinstance(value, (list, tuple)):
        pairs = [_checked(each, what, depth + 1) for each in value]
        return tuple(each for each, _ in pairs), _SIZE + sum(size for _, size in pairs)
    if isinstance(value, Mapping):
        mapping, size = _checked_mapping(value, depth + 1)
        return MappingProxyType(mapping), _SIZE + size
    raise ValueError(f"header {what} must be {_VALUES}, not {type(value).__name__}")


def _checked_time(value: datetime, what: str) -> datetime:
    if value.utcoffset() is None:
        raise ValueError(f"header {what} needs its time zone: datetime(..., tzinfo=timezone.utc)")
    try:
        value = value.astimezone(UTC)
    except OverflowError:
        raise ValueError(f"header {what} is out of range in UTC") from None
    if value < _EPOCH:
        raise ValueError(f"header {what} is a time before 1970")
    # astimezone() keeps the class, and no protocol carries the datetime class of a library
    return datetime.combine(value.date(), value.time(), UTC)


def _checked_decimal(value: Decimal, what: str) -> Decimal:
    sign, digits, exponent = value.as_tuple()
    fits = isinstance(exponent, int) and -_MAX_SCALE <= exponent <= 0 and len(digits) <= 10 and not sign
    # computed from the digits, because arithmetic depends on the caller's decimal context
    if not fits or int("".join(map(str, digits))) > _MAX_DIGITS:
        raise ValueError(f"header {what} must be a Decimal of 0 or more, with digits in 31 bits and no exponent")
    return Decimal(value)


def _shown(name: Any) -> str:
    return repr(name[:60]) if isinstance(name, str) else type(name).__name__


def is_repeated_text(value: Any) -> bool:
    """Return whether a checked header value is a sequence of texts, which can be sent as several headers."""
    return type(value) is tuple and all(type(each) is str for each in value)


def gathered(pairs: Iterable[tuple[str, str]]) -> dict[str, str | tuple[str, ...]]:
    """Return received pairs as headers: several values of one name become a tuple, in order."""
    found: dict[str, list[str]] = {}
    for name, value in pairs:
        found.setdefault(name, []).append(value)
    return {name: values[0] if len(values) == 1 else (*values,) for name, values in found.items()}


def frozen(value: Any) -> Any:
    """Return an immutable copy of a received value: sequences as tuples, mappings read-only."""
    if isinstance(value, (list, tuple)):
        return tuple(map(frozen, value))
    if isinstance(value, Mapping):
        return MappingProxyType({name: frozen(each) for name, each in value.items()})
    return value


def uncarried(headers: Mapping[str, Any], types: frozenset[type]) -> str | None:
    """Return the name of the first header whose value has none of ``types``; ``None`` if there is none."""
    return next((name for name, value in headers.items() if not _is_carried(value, types)), None)


def _is_carried(value: Any, types: frozenset[type]) -> bool:
    if type(value) in types and not isinstance(value, (tuple, dict)):
        return True
    if isinstance(value, Mapping):
        return dict in types and all(_is_carried(each, types) for each in value.values())
    # a sequence of sequences needs a protocol with nested values
    return (
        isinstance(value, (list, tuple))
        and tuple in types
        and all(_is_carried(each, types if dict in types else types - {tuple}) for each in value)
    )


def carried(headers: Mapping[str, Any], types: frozenset[type]) -> Mapping[str, Any]:
    """Return received headers in a form that can be published.

    Characters that applications may not use are escaped, because another program may have sent a header with a line
    feed. Values of other types than ``types`` become text.
    """
    found = {
        _escaped(name): _escaped(value if _is_carried(value, types) else as_text(value))
        for name, value in headers.items()
    }
    return headers if found == headers else MappingProxyType(found)


def _escaped(value: Any) -> Any:
    if isinstance(value, str):
        return value if channels.forbidden_character(value) is None else channels.escape_forbidden(value)
    if isinstance(value, (list, tuple)):
        return tuple(map(_escaped, value))
    if isinstance(value, Mapping):
        return {_escaped(name): _escaped(each) for name, each in value.items()}
    return value


def as_text(value: Any) -> str:
    """Return a header value as text.

    Numbers are written in decimal, times in seconds since the epoch, truth values and structures in JSON, bytes in
    UTF-8 or hexadecimal, and ``None`` as an empty text.
    """
    if type(value) is str:
        return value
    if value is None:
        return ""
    if isinstance(value, (bool, list, tuple, Mapping)):
        return json.dumps(_jsonable(value), ensure_ascii=False, separators=(",", ":"))
    return str(_plain(value))


def _plain(value: Any) -> Any:
    """Return bytes and times as text and numbers."""
    if isinstance(value, bytes):
        try:
            return value.decode()
        except UnicodeDecodeError:
            return value.hex()
    if isinstance(value, datetime):
        seconds = value.timestamp()
        return int(seconds) if seconds.is_integer() else seconds
    return value


def _jsonable(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _jsonable(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_jsonable(each) for each in value]
    if isinstance(value, Decimal) or (isinstance(value, float) and not math.isfinite(value)):
        return str(value)
    return _plain(value)


def described(types: frozenset[type]) -> str:
    """Return ``types`` for an error text."""
    names = {tuple: "list", NoneType: "None", dict: "mapping"}
    return ", ".join(sorted(names.get(each, each.__name__) for each in types))
