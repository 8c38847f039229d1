"""Bounds of received numbers: a few bytes can represent a number that takes minutes to convert.

Python bounds the conversion between text and ``int`` (``sys.set_int_max_str_digits``), but neither that between ``int``
and ``Decimal`` nor the exponents of ``Decimal`` and ``Fraction``: ``int(Decimal("1e10000000"))`` takes 20 s, with the
GIL held. Exact numbers beyond these bounds are refused when they are received and when they would be converted.

A JSON number beyond the range of a float is another matter: the parser silently makes it infinite.

Every function is thread safe.
"""

from __future__ import annotations

import cmath
import math
import re
from collections.abc import Iterator, Mapping, Sequence, Set
from decimal import Decimal
from fractions import Fraction
from typing import Any, Final

from pydantic import BaseModel

#: bits of an integer: as many as 4,300 decimal digits, the bound of Python's own conversion from text
MAX_INT_BITS: Final = 14_284
#: powers of ten between the first or last digit of a decimal and its point; IEEE 754 decimal128 has at most 6,176.
#: Also the maximum number of digits in the text of a number.
MAX_EXPONENT: Final = 10_000

#: a decimal number, as ``Decimal`` and ``Fraction`` read it
_NUMBER: Final = re.compile(r"\s*+[-+]?([\d_.]++)(?:e([-+]?[\d_]++))?\s*+", re.IGNORECASE)
_TEXTS: Final = (str, bytes, bytearray, memoryview)


def is_vast(number: Any) -> bool:
    """Return whether ``number`` is an exact number beyond the bounds. A float is never beyond them."""
    if isinstance(number, Decimal):
        exponent = number.as_tuple().exponent
        return isinstance(exponent, int) and not (exponent >= -MAX_EXPONENT and number.adjusted() <= MAX_EXPONENT)
    if isinstance(number, int):
        return number.bit_length() > MAX_INT_BITS
    return isinstance(number, Fraction) and (is_vast(number.numerator) or is_vast(number.denominator))


def is_vast_text(text: str) -> bool:
    """Return whether ``text`` is a decimal number with more digits, or a larger exponent, than the bounds."""
    found = _NUMBER.fullmatch(text)
    if found is None:
        return False
    exponent = (found[2] or "").replace("_", "").lstrip("-+").lstrip("0")
    return len(found[1]) > MAX_EXPONENT or len(exponent) > len(str(MAX_EXPONENT)) or int(exponent or 0) > MAX_EXPONENT


def holds_vast(value: Any) -> bool:
    """Return whether ``value`` or its mappings and collections hold a number beyond the bounds, or a text of one."""
    return any(is_vast_text(each) if isinstance(each, str) else is_vast(each) for each in leaves(value))


def leaves(value: Any) -> Iterator[Any]:
    """Yield the values in ``value`` that are neither mappings nor collections, and the keys of mappings."""
    todo = [value]
    seen: set[int] = set()
    while todo:
        each = todo.pop()
        if isinstance(each, (Mapping, Sequence, Set)) and not isinstance(each, _TEXTS):
            if id(each) not in seen:
                seen.add(id(each))
                todo.extend(each)
                if isinstance(each, Mapping):
                    todo.extend(each.values())
        else:
            yield each


def may_collide(value: Any, most: int) -> bool:
    """Return whether more than ``most`` numbers, or texts of numbers, in ``value`` may share a hash on purpose."""
    found = 0
    for each in leaves(value):
        if isinstance(each, (str, bytes)):
            text = each if isinstance(each, str) else each.decode("ascii", "replace")
            found += len(text) > _LONG and _LIKE_NUMBER.fullmatch(text) is not None
        elif isinstance(each, int):
            found += each.bit_length() > _LONG_BITS
        elif isinstance(each, Decimal):
            found += len(str(each)) > _LONG
        else:
            found += isinstance(each, Fraction)
        if found > most:
            return True
    return False


#: bits and characters of numbers that share their hash with few other numbers
_LONG_BITS: Final = 64
_LONG: Final = 20
_LIKE_NUMBER: Final = re.compile(r"\s*+[\d_.e/+-]++\s*+", re.IGNORECASE)


# --- JSON numbers beyond the range of a float

BEYOND_FLOAT: Final = "a number is beyond the range of a float"

#: A float has at most 309 digits before the point. A larger number has an exponent of three digits or, with a shorter
#: exponent, at least this many digits.
_MANY_DIGITS: Final = b"0" * 200
#: a plus sign becomes a digit as well: removing characters takes many times longer
_DIGITS: Final = bytes.maketrans(b"123456789E+", b"000000000e0")
#: bits of the largest integer that a float can hold
_FLOAT_BITS: Final = 1023
#: characters of the shortest text of a number beyond the range of a float: 1e309
_SHORTEST: Final = 5


def may_overflow(data: bytes) -> bool:
    """Return whether a JSON text may have a number beyond the range of a float; ``False`` is certain."""
    digits = data.translate(_DIGITS)
    # not `in`, which raises and catches an exception internally, because the text is no integer
    return digits.find(b"0e000") >= 0 or (len(digits) >= len(_MANY_DIGITS) and _MANY_DIGITS in digits)


def has_vast_numbers(value: Any) -> bool:
    """Return whether a model may make an integer or text in ``value`` infinite. ``value`` comes from the parser.

    Raises:
        ValueError: ``value`` has an infinite float, although the JSON text had no constants.
    """
    found = False
    for each in leaves(value):
        if type(each) is float:
            if math.isinf(each):
                raise ValueError(BEYOND_FLOAT)
        elif not found:
            found = each.bit_length() > _FLOAT_BITS if isinstance(each, int) else _is_infinite_text(each)
    return found


def _is_infinite_text(text: Any) -> bool:
    # a number begins with a digit, a sign, a point, a parenthesis or a space, which all sort before the colon
    if not isinstance(text, str) or len(text) < _SHORTEST or text[0] > ":":
        return False
    try:
        number = complex(text)
    except ValueError:
        return False
    return cmath.isinf(number) and any(map(str.isdigit, text))


def holds_infinity(value: Any) -> bool:
    """Return whether an object that a model made of a JSON text has an infinite float.

    The float may also be a default value of the model: call it only if :func:`has_vast_numbers` is true.
    """
    todo = [value]
    seen: set[int] = set()
    while todo:
        for each in leaves(todo.pop()):
            if isinstance(each, float):
                if math.isinf(each):
                    return True
            elif isinstance(each, complex):
                todo += [each.real, each.imag]
            elif (isinstance(each, BaseModel) or hasattr(each, "__dataclass_fields__")) and id(each) not in seen:
                seen.add(id(each))
                todo.append([getattr(each, name, None) for name in _fields(each)])
    return False


def _fields(instance: Any) -> list[str]:
    if isinstance(instance, BaseModel):
        return [*type(instance).model_fields, *(instance.model_extra or ())]
    return [*type(instance).__dataclass_fields__]
