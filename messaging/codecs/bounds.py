"""Bounds of received numbers: a few bytes can represent a number that takes minutes to convert.

Python bounds the conversion between text and ``int`` (``sys.set_int_max_str_digits``), but neither that between ``int``
and ``Decimal`` nor the exponents of ``Decimal`` and ``Fraction``: ``int(Decimal("1e10000000"))`` takes 20 s, with the
GIL held. Exact numbers beyond these bounds are refused when they are received and when they would be converted.

A JSON number beyond the range of a float, which the parser silently makes infinite, is refused by the JSON codec.

Every function is thread safe.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence, Set
from decimal import Decimal
from fractions import Fraction
from typing import Any, Final

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
