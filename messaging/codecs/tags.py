"""Decoders of CBOR tags whose content can represent far more than its own size (RFC 8949, 3.4).

They replace the decoders of cbor2, which have no bounds. Each raises ``ValueError`` if it refuses the content.
"""

from __future__ import annotations

from collections.abc import Callable
from decimal import Decimal
from typing import Any, Final

from messaging.codecs.bounds import MAX_EXPONENT, MAX_INT_BITS, is_vast, leaves

#: total bytes and characters of the strings in a payload with string references (tag 25)
MAX_REFERENCED: Final = 64 * 2**20
#: exponent of two that equals the maximum exponent of ten
_MAX_BINARY_EXPONENT: Final = 33_219


class StringReferenceFoundError(ValueError):
    """The payload has string references, so its content may be much larger than the payload."""


def _positive(content: Any, _immutable: bool) -> int:
    if not isinstance(content, bytes):
        raise ValueError("the content of a bignum is a byte string")
    number = int.from_bytes(content, "big")
    if is_vast(number):
        raise ValueError(f"bignum of more than {MAX_INT_BITS} bits")
    return number


def _parts(content: Any) -> tuple[int, int]:
    exponent, mantissa = content
    if type(exponent) is not int or type(mantissa) is not int:
        raise ValueError("exponent and mantissa are integers")
    return exponent, mantissa


def _decimal_fraction(content: Any, _immutable: bool) -> Decimal:
    exponent, mantissa = _parts(content)
    if abs(exponent) > MAX_EXPONENT:
        raise ValueError(f"decimal fraction with an exponent beyond {MAX_EXPONENT}")
    return _bounded(Decimal(f"{mantissa}E{exponent}"))


def _bigfloat(content: Any, _immutable: bool) -> Decimal:
    exponent, mantissa = _parts(content)
    if abs(exponent) > _MAX_BINARY_EXPONENT:
        raise ValueError(f"bigfloat with an exponent beyond {_MAX_BINARY_EXPONENT}")
    return _bounded(Decimal(mantissa) * 2 ** Decimal(exponent))


def _bounded(number: Decimal) -> Decimal:
    if is_vast(number):
        raise ValueError(f"number with an exponent beyond {MAX_EXPONENT}")
    return number


def _refuse(*_: Any) -> Any:
    raise ValueError("refused: shared value, regular expression or MIME message")


def _report_reference(*_: Any) -> Any:
    raise StringReferenceFoundError("string reference")


#: tag -> decoder. Shared values (29) may contain themselves, regular expressions (35) may take any time to match, and
#: no model can request MIME messages (36).
WITH_REFERENCES: Final[dict[int, Callable[..., Any]]] = {
    2: _positive,
    3: lambda content, immutable: -1 - _positive(content, immutable),
    4: _decimal_fraction,
    5: _bigfloat,
    29: _refuse,
    35: _refuse,
    36: _refuse,
}
WITHOUT_REFERENCES: Final = WITH_REFERENCES | {25: _report_reference}


def check_references(value: Any) -> None:
    """Raise ``ValueError`` if the strings in ``value`` are larger together than :data:`MAX_REFERENCED`."""
    size = 0
    for each in leaves(value):
        if isinstance(each, (str, bytes)):
            size += len(each)
            if size > MAX_REFERENCED:
                raise ValueError(f"string references stand for more than {MAX_REFERENCED} bytes")
