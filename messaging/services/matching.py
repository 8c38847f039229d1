"""Matching properties: the operations of a filter as closures, nested no deeper than its text.

A match is called with the lookup of a property by its exact name, all properties, and the values by names without case.
Closures compare the most frequent types, ``str`` and ``int``, without a call.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence, Set, ValuesView
from datetime import date, datetime
from decimal import Decimal
from enum import Enum
from math import nan
from numbers import Integral, Real
from operator import eq, ge, le
from typing import Any, Final, TypeAlias
from uuid import UUID

from messaging.services.reference import Version, order_of

logger = logging.getLogger(__name__)

Lookup: TypeAlias = Callable[[str], Any]
#: the values by names without case, filled from the properties when first needed; ``None`` for a case-sensitive match
Folded: TypeAlias = dict[str, Any] | None
Match: TypeAlias = Callable[[Lookup, Mapping[str, Any], Folded], bool]
_Test: TypeAlias = Callable[[Any], bool]
#: tests for values of exactly these types; they never raise
_Quick: TypeAlias = dict[type, _Test]

_COLLECTIONS: Final = (Sequence, Set, ValuesView)
_USUAL_COLLECTIONS: Final = (list, tuple, set, frozenset)
#: collections that count as one value
_ONE_VALUE: Final = (str, bytes, bytearray, memoryview, range)
_PARSERS: Final[Mapping[type, Callable[[str], Any]]] = {
    datetime: datetime.fromisoformat,
    date: date.fromisoformat,
    UUID: UUID,
}


def _in_other_case(name: str, properties: Mapping[str, Any], folded: Folded) -> Any:
    """Return the value of the first key that is ``name``, which is folded, in any case; ``None`` if case counts."""
    if folded is None:
        return None
    if not folded:
        for key, value in properties.items():
            if isinstance(key, str) and value is not None:
                folded.setdefault(key.casefold(), value)
    return folded.get(name)


def combine(operator: str, matches: list[Match]) -> Match:
    """Return the match of ``&``, ``|`` or ``!`` over ``matches``."""
    if operator == "!":
        negated = matches[0]

        def match_not(lookup: Lookup, properties: Mapping[str, Any], folded: Folded) -> bool:
            return not negated(lookup, properties, folded)

        return match_not

    # loops, since all() and any() over a generator cost another frame per level
    def match_all(lookup: Lookup, properties: Mapping[str, Any], folded: Folded) -> bool:
        for each in matches:
            if not each(lookup, properties, folded):
                break
        else:
            return True
        return False

    def match_any(lookup: Lookup, properties: Mapping[str, Any], folded: Folded) -> bool:
        for each in matches:
            if each(lookup, properties, folded):
                break
        else:
            return False
        return True

    return match_all if operator == "&" else match_any


def presence(name: str) -> Match:
    """Return the match of ``(name=*)``."""
    without_case = name.casefold()

    def match(lookup: Lookup, properties: Mapping[str, Any], folded: Folded) -> bool:
        return lookup(name) is not None or _in_other_case(without_case, properties, folded) is not None

    return match


def _operation(name: str, quick: _Quick, test: _Test) -> Match:
    without_case = name.casefold()
    guarded = _guarded(name, test)

    def test_one(value: Any) -> bool:
        return quick.get(type(value), guarded)(value)

    def test_any(values: Any) -> bool:
        return any(map(test_one, values))

    def test_other(value: Any) -> bool:
        if isinstance(value, _COLLECTIONS) and not isinstance(value, _ONE_VALUE):
            return test_any(value)
        return test(value)

    tests: _Quick = dict.fromkeys(_USUAL_COLLECTIONS, _guarded(name, test_any)) | quick
    matches_other = _guarded(name, test_other)

    def match(lookup: Lookup, properties: Mapping[str, Any], folded: Folded) -> bool:
        value = lookup(name)
        if value is None:
            value = _in_other_case(without_case, properties, folded)
            if value is None:
                return False
        return tests.get(type(value), matches_other)(value)

    return match


def shown(name: str) -> str:
    """Return a name for an error text or the log: quoted, escaped and shortened."""
    return ascii(name if len(name) <= 80 else name[:77] + "...")


def _guarded(name: str, test: _Test) -> _Test:
    def guarded(value: Any) -> bool:
        try:
            return test(value)
        except Exception as error:  # noqa: BLE001 - code of foreign types; a value that fails does not match
            logger.debug(
                "LDAP filter: property %s of type %s does not match: %s",
                shown(name),
                type(value).__name__,
                type(error).__name__,
            )
            return False

    return guarded


def substring(name: str, pieces: list[str]) -> Match:
    """Return the match of ``(name=a*b*c)``; ``pieces`` are the texts between the asterisks."""
    initial, *middle, final = pieces
    middle = [piece for piece in middle if piece]

    def test(value: Any) -> bool:
        text = _text(value)
        if text is None or not (text.startswith(initial) and text.endswith(final)):
            return False
        at, end = len(initial), len(text) - len(final)
        if at > end:
            return False
        for piece in middle:
            at = text.find(piece, at, end)
            if at < 0:
                return False
            at += len(piece)
        return True

    otherwise = _operation(name, {str: test}, test)
    return otherwise if middle or final else _beginning(name, initial, otherwise)


def comparison(name: str, operator: str, value: str) -> Match:
    """Return the match of an operator with a value."""
    compare = {"=": eq, "~=": eq, ">=": ge, "<=": le}[operator]
    approximate = operator == "~="
    wanted = _approximate(value) if approximate else value
    truth = {"true": True, "false": False}.get(value.strip().lower())
    as_float, as_decimal, as_int = _numbers(value)

    def test(item: Any) -> bool:
        if isinstance(item, Version):
            order, asked = item.order, order_of(value)
            return order is not None and asked is not None and bool(compare(order, asked))
        text = _text(item)
        if text is not None:
            return bool(compare(_approximate(text) if approximate else text, wanted))
        if isinstance(item, bool):
            return item is truth
        number: Any
        if isinstance(item, (int, Integral)):
            item, number = int(item), as_int
        elif isinstance(item, Decimal):
            number = as_decimal
        elif isinstance(item, (float, Real)):
            item, number = float(item), as_float
        else:
            parse = _PARSERS.get(type(item))
            return parse is not None and bool(compare(item, parse(value.strip())))
        return number is not None and bool(compare(item, number))

    def quick_test(operand: Any) -> _Test:
        return (lambda _: False) if operand is None else (lambda item: compare(item, operand))

    quick: _Quick = {int: quick_test(as_int), float: quick_test(as_float), bool: lambda item: item is truth}
    if approximate:
        return _operation(name, quick, test)
    quick[str] = quick_test(value)
    return _AT_ONCE[operator](name, value, nan if as_int is None else as_int, _operation(name, quick, test))


# --- the most frequent types, str and int, compared without a further call: hence three functions of the same shape


def _equal(name: str, text: str, number: int | Decimal | float, otherwise: Match) -> Match:
    def match(lookup: Lookup, properties: Mapping[str, Any], folded: Folded) -> bool:
        value = lookup(name)
        if type(value) is str:
            return value == text
        if type(value) is int:
            return value == number
        return otherwise(lookup, properties, folded)

    return match


def _at_least(name: str, text: str, number: int | Decimal | float, otherwise: Match) -> Match:
    def match(lookup: Lookup, properties: Mapping[str, Any], folded: Folded) -> bool:
        value = lookup(name)
        if type(value) is str:
            return value >= text
        if type(value) is int:
            return value >= number
        return otherwise(lookup, properties, folded)

    return match


def _at_most(name: str, text: str, number: int | Decimal | float, otherwise: Match) -> Match:
    def match(lookup: Lookup, properties: Mapping[str, Any], folded: Folded) -> bool:
        value = lookup(name)
        if type(value) is str:
            return value <= text
        if type(value) is int:
            return value <= number
        return otherwise(lookup, properties, folded)

    return match


def _beginning(name: str, initial: str, otherwise: Match) -> Match:
    size = len(initial)

    def match(lookup: Lookup, properties: Mapping[str, Any], folded: Folded) -> bool:
        value = lookup(name)
        if type(value) is str:
            return value[:size] == initial
        return otherwise(lookup, properties, folded)

    return match


_AT_ONCE: Final = {"=": _equal, ">=": _at_least, "<=": _at_most}


def _text(value: Any) -> str | None:
    if isinstance(value, str):
        return value
    if isinstance(value, Enum) and not isinstance(value, (int, float)):
        return value.name
    return None


def _approximate(text: str) -> str:
    return "".join(text.split()).casefold()


def _numbers(value: str) -> tuple[float | None, Decimal | None, int | Decimal | None]:
    """Return ``value`` for comparing with float, Decimal and int; a float counts as its shortest text, not its bits."""
    text = value.strip()
    if not text.isascii() or "_" in text:  # Python reads these as numbers, too
        return None, None, None
    try:
        exact = Decimal(text)
        if exact.is_nan():  # equal to nothing and without an order
            return None, None, None
        return float(text), exact, int(text) if text.lstrip("+-").isdigit() else exact
    except (ArithmeticError, ValueError):  # not a number, or an int of more digits than Python converts
        return None, None, None
