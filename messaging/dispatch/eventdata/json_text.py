"""JSON text of portable values (:mod:`messaging.dispatch.eventdata.values`), written and read fast.

The text is that of ``json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))``, in UTF-8; with
``ensure_ascii=True`` if it has a lone surrogate, which UTF-8 cannot encode. pydantic's parser reads it in half the time
of the standard library's. Its writer would be four times as fast, and is not used: it writes some floats in other
digits (``1e-7`` for ``1e-07``), and turns bytes and dates into text, where an error is due.

Every function is thread safe.
"""

from __future__ import annotations

import json
from typing import Any, Final, NoReturn

from pydantic_core import from_json

from messaging.errors import DecodeError, InvalidEventError

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
