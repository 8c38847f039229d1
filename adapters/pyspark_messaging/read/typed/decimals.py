"""Decimals: exact from the text of a payload to the column, or an error."""

from __future__ import annotations

import re
from decimal import Context, Decimal, Inexact, InvalidOperation
from typing import Any, Final

from pyspark.sql import types as spark

from messaging.codecs.bounds import is_vast_text

_NUMBER: Final = re.compile(r"[+-]?[0-9]+(\.[0-9]*)?([eE][+-]?[0-9]+)?", re.ASCII)


class Decimals:
    """Values of ``decimal(precision, scale)``, exact or an error.

    All decimals for Arrow pass here, also because an exponent such as -999999999 makes Arrow end the process (seen with
    pyarrow 26).
    """

    def __init__(self, precision: int, scale: int) -> None:
        self._unit = Decimal(1).scaleb(-scale)
        self._context = Context(prec=precision, traps=[Inexact, InvalidOperation])

    def exact(self, value: Decimal) -> Decimal:
        """Return ``value`` with all digits after the point; raise if it does not fit."""
        if not isinstance(value, Decimal):
            raise TypeError("no decimal")
        return value.quantize(self._unit, context=self._context)

    def read(self, value: Any) -> Decimal:
        """Return the number of a payload."""
        if isinstance(value, float):
            value = repr(value)
        elif isinstance(value, bool) or not isinstance(value, (str, int, Decimal)):
            raise ValueError("no number")
        if isinstance(value, str) and not _NUMBER.fullmatch(value):
            raise ValueError("no number")
        return self.exact(Decimal(value))


def has_decimals(kind: spark.DataType) -> bool:
    """Return whether ``kind`` has a decimal, at any depth."""
    if isinstance(kind, spark.StructType):
        return any(has_decimals(field.dataType) for field in kind)
    if isinstance(kind, spark.ArrayType):
        return has_decimals(kind.elementType)
    return isinstance(kind, spark.DecimalType) or (isinstance(kind, spark.MapType) and has_decimals(kind.valueType))


def bounded(number: str) -> Decimal:
    """Return the number, which may become an integer; raise if that would take very long."""
    if is_vast_text(number):
        raise ValueError("exponent out of bounds")
    return Decimal(number)


def quoted_if_rounded(number: str) -> str | float:
    """Return a number of JSON as a double, or as its text if the double would be rounded."""
    nearest = float(number)
    return nearest if Decimal(repr(nearest)) == Decimal(number) else number
