"""Detection of numbers in JSON texts beyond the range of a float, which the parser silently makes infinite.

Every function is thread safe.
"""

from __future__ import annotations

import cmath
import math
from typing import Any, Final

from pydantic import BaseModel

from messaging.codecs.bounds import leaves

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
            found = each.bit_length() > _FLOAT_BITS if isinstance(each, int) else _is_vast_text(each)
    return found


def _is_vast_text(text: Any) -> bool:
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
