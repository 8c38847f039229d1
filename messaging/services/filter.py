r"""LDAP filters (RFC 1960, as OSGi core 3.2.7 uses them) over mappings of properties.

::

    filter    ::= '(' ( '&' filter+ | '|' filter+ | '!' filter | operation ) ')'
    operation ::= attribute ( '=' | '~=' | '>=' | '<=' ) value      compare
                | attribute '=*'                                    present
                | attribute '=' [value] ('*' [value])+              substring

White space around parentheses and around attribute names is ignored; in values it counts. A backslash takes the
next character literally: ``\*``, ``\(``, ``\)`` and ``\\`` are how these stand in a value. An attribute name is
anything without ``= ~ < > ( )``, inner spaces included; ``(!a=b)`` therefore asks for an attribute called ``!a``,
as the grammar has it: negation is written ``(!(a=b))``.

How a value compares depends on the type of the property, not on the filter:

========================  =============================================================================
``str``                   code point order; ``~=`` ignores case and all white space
``bool``                  any operator but substring asks for equality with ``true`` or ``false``, in any case
``int float Decimal`` …   as numbers, exactly; a value that is no number does not match, NaN never matches
``Enum``                  as the str or number it also is, otherwise its name
``Version``               as versions: ``1.0`` equals ``1.0.0`` and comes before ``1.0.0.beta`` and ``1.10``
``datetime date UUID``    the value is read as ISO 8601 or a UUID; naive and aware times are never equal or ordered
list, array, set, …       matches if one element does; collections within collections do not match
anything else             only presence (``=*``) matches
========================  =============================================================================

Substrings match text only. A missing property and ``None`` are the same: nothing matches them, not even ``=*``.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence, Set, ValuesView
from datetime import date, datetime
from decimal import Decimal
from enum import Enum
from functools import lru_cache
from math import nan
from numbers import Integral, Real
from operator import eq, ge, le
from typing import Any, Final, NoReturn, TypeAlias
from uuid import UUID

from messaging.errors import ArgumentError, InvalidFilterError
from messaging.services.properties import ServiceProperties
from messaging.services.version import Version, order_of
from messaging.text import tolerant

logger = logging.getLogger(__name__)

#: bounds of a filter's text: characters, nested parentheses, operations
MAX_LENGTH: Final = 65_536
MAX_DEPTH: Final = 100
MAX_OPERATIONS: Final = 2_000

_Lookup: TypeAlias = Callable[[str], Any]
#: the values by names without case, made from the properties when first needed; ``None`` if case counts
_Folded: TypeAlias = dict[str, Any] | None
_Match: TypeAlias = Callable[[_Lookup, Mapping[str, Any], _Folded], bool]
_Test: TypeAlias = Callable[[Any], bool]
#: tests for values of exactly these types, of which none raises
_Quick: TypeAlias = dict[type, _Test]

_SPECIAL: Final = frozenset("\\*()")
_NAME_ENDS: Final = frozenset("=~<>()")
_OPERATORS: Final = ("~=", ">=", "<=", "=")
_COLLECTIONS: Final = (Sequence, Set, ValuesView)
_USUAL_COLLECTIONS: Final = (list, tuple, set, frozenset)
#: what is one value all the same
_ONE_VALUE: Final = (str, bytes, bytearray, memoryview, range)
_PARSERS: Final[Mapping[type, Callable[[str], Any]]] = {
    datetime: datetime.fromisoformat,
    date: date.fromisoformat,
    UUID: UUID,
}


class LdapFilter:
    """A parsed filter; immutable, safe to share between threads. ``str()`` is its normalised text.

    Two filters are equal if their normalised texts and their case sensitivity are.

    Args:
        text: the filter, at most 65,536 characters, 100 levels and 2,000 operations.
        case_sensitive: whether attribute names are. If not, the exact spelling is preferred; of several others
            the first counts. Values are always case-sensitive, but for ``~=``.

    Raises:
        InvalidFilterError: ``text`` is not a filter; says what was expected and where.
    """

    __slots__ = ("_case_sensitive", "_match", "_text")

    def __init__(self, text: str, *, case_sensitive: bool = False) -> None:
        self._text, self._match = _Parser(text).parse()
        self._case_sensitive = case_sensitive

    @classmethod
    def parse(cls, text: str, case_sensitive: bool = False) -> LdapFilter:
        """Parse ``text``; parameters and errors as for the class."""
        return cls(text, case_sensitive=case_sensitive)

    def matches(self, properties: Mapping[str, Any]) -> bool:
        """Whether ``properties`` match. Never raises because of what the values are: such a value does not match.

        Raises:
            ArgumentError: ``properties`` is no mapping.
        """
        lookup: _Lookup
        folded: dict[str, Any]
        if type(properties) is not dict and isinstance(properties, ServiceProperties):  # which takes longer to find out
            lookup, folded = properties._written.get, properties._folded
        else:
            lookup, folded = _lookup_of(properties), {}
        return self._match(lookup, properties, None if self._case_sensitive else folded)

    def match_case(self, properties: Mapping[str, Any]) -> bool:
        """As :meth:`matches`, but names count as they are written, whatever the filter says (RFC 97 5.7.1)."""
        lookup = properties._written.get if isinstance(properties, ServiceProperties) else _lookup_of(properties)
        return self._match(lookup, properties, None)

    @property
    def case_sensitive(self) -> bool:
        """Whether attribute names are case-sensitive."""
        return self._case_sensitive

    def __str__(self) -> str:
        return self._text

    @tolerant
    def __repr__(self) -> str:
        return f"LdapFilter({self._text!r}{', case_sensitive=True' if self._case_sensitive else ''})"

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, LdapFilter):
            return NotImplemented
        return self._text == other._text and self._case_sensitive == other._case_sensitive

    def __hash__(self) -> int:
        return hash((self._text, self._case_sensitive))


def _lookup_of(properties: Mapping[str, Any]) -> _Lookup:
    if type(properties) is not dict and not isinstance(properties, Mapping):
        raise ArgumentError(f"properties must be a mapping, not {type(properties).__name__}")
    return properties.get


@lru_cache(maxsize=256)
def cached_filter(text: str) -> LdapFilter:
    """``LdapFilter(text)``, remembered: for texts that are looked up again and again."""
    return LdapFilter(text)


def as_filter(given: str | LdapFilter | None) -> LdapFilter | None:
    """What callers may give for a filter, compiled; texts once for all that use the same.

    Raises:
        InvalidFilterError: it is none.
    """
    if given is None or isinstance(given, LdapFilter):
        return given
    return cached_filter(given) if isinstance(given, str) else LdapFilter(given)  # which says what is wrong


def _in_other_case(name: str, properties: Mapping[str, Any], folded: _Folded) -> Any:
    """The value of the first key that is ``name``, which is folded, in any case; ``None`` if case counts."""
    if folded is None:
        return None
    if not folded:
        for key, value in properties.items():
            if isinstance(key, str) and value is not None:
                folded.setdefault(key.casefold(), value)
    return folded.get(name)


# --- parsing: without recursion, so that the text decides nothing about the stack --------------------------


class _Parser:
    def __init__(self, text: str) -> None:
        if not isinstance(text, str):
            raise InvalidFilterError(f"an LDAP filter must be a str, not {type(text).__name__}", 0)
        if len(text) > MAX_LENGTH:
            raise InvalidFilterError(
                f"LDAP filter of {len(text)} characters is too long; at most {MAX_LENGTH} are allowed", MAX_LENGTH
            )
        self.text = text
        self.at = 0

    def parse(self) -> tuple[str, _Match]:
        open_lists: list[tuple[str, list[tuple[str, _Match]]]] = []
        operations = 0
        while True:
            self.expect("(")
            self.skip_space()
            operator = self.peek()
            if operator and operator in "&|!":
                start = self.at
                self.at += 1
                self.skip_space()
                if self.peek() == "(":
                    if len(open_lists) == MAX_DEPTH:
                        self.fail(f"nested too deep; at most {MAX_DEPTH} levels are allowed")
                    open_lists.append((operator, []))
                    continue
                if self.peek() == ")":
                    self.fail(f"expected a filter in parentheses after {operator!r}")
                self.at = start
            if operations == MAX_OPERATIONS:
                self.fail(f"too many operations; at most {MAX_OPERATIONS} are allowed")
            operations += 1
            node = self.operation()
            while True:
                self.skip_space()
                if not open_lists:
                    if self.at < len(self.text):
                        self.fail("expected the end of the filter")
                    return node
                operator, nodes = open_lists[-1]
                nodes.append(node)
                if self.peek() == "(" and operator != "!":
                    break
                self.expect(")", "another filter or " if operator != "!" else "")
                open_lists.pop()
                node = _combine(operator, nodes)

    def operation(self) -> tuple[str, _Match]:
        text, start = self.text, self.at
        while self.at < len(text) and text[self.at] not in _NAME_ENDS:
            self.at += 1
        name = text[start : self.at].rstrip()
        if not name:
            self.fail("expected an attribute name")
        for operator in _OPERATORS:
            if text.startswith(operator, self.at):
                break
        else:
            self.fail(f"expected '=', '~=', '>=' or '<=' after the attribute {_shown(name)}")
        self.at += len(operator)
        if operator == "=":
            start = self.at
            if self.peek() == "*":
                self.at += 1
                self.skip_space()
                if self.peek() == ")":
                    self.at += 1
                    return f"({name}=*)", _presence(name)
                self.at = start
        pieces = self.value(split=operator == "=")
        if len(pieces) > 1:
            return f"({name}={_pattern(pieces)})", _substring(name, pieces)
        if operator != "=" and not pieces[0]:
            self.at -= 1
            self.fail(f"expected a value after {operator!r}")
        return f"({name}{operator}{escaped(pieces[0])})", _comparison(name, operator, pieces[0])

    def value(self, *, split: bool) -> list[str]:
        """The value up to its ')', unescaped; with ``split`` in the pieces between the asterisks."""
        pieces: list[str] = []
        piece: list[str] = []
        text = self.text
        while self.at < len(text):
            char = text[self.at]
            self.at += 1
            if char == ")":
                pieces.append("".join(piece))
                return pieces
            if char == "(":
                self.at -= 1
                self.fail("expected ')'; a '(' that belongs to the value is written '\\('")
            if char == "*" and split:
                pieces.append("".join(piece))
                piece = []
                continue
            if char == "\\":
                if self.at == len(text):
                    self.fail("expected a character after the backslash")
                char = text[self.at]
                self.at += 1
            piece.append(char)
        return self.fail("expected ')'")

    def peek(self) -> str:
        return self.text[self.at : self.at + 1]

    def skip_space(self) -> None:
        while self.peek().isspace():
            self.at += 1

    def expect(self, char: str, otherwise: str = "") -> None:
        self.skip_space()
        if self.peek() != char:
            self.fail(f"expected {otherwise}{char!r}")
        self.at += 1

    def fail(self, problem: str) -> NoReturn:
        left = max(0, self.at - 40)
        excerpt = "".join(char if char.isprintable() else "?" for char in self.text[left : self.at + 40])
        caret = " " * (self.at - left) + "^"
        raise InvalidFilterError(f"LDAP filter: {problem} at index {self.at}\n  {excerpt}\n  {caret}", self.at)


def _shown(name: str) -> str:
    return ascii(name if len(name) <= 80 else name[:77] + "...")


def escaped(value: str) -> str:
    """``value`` as it is written in a filter that is to match it."""
    return "".join("\\" + char if char in _SPECIAL else char for char in value)


def _pattern(pieces: list[str]) -> str:
    text = "*".join(map(escaped, pieces))
    if text.startswith("*") and text[1:].isspace():  # unescaped, it would ask for presence
        return "*\\" + text[1:]
    return text


# --- matching: compiled to closures, nested no deeper than the text was --------------------------------------


def _combine(operator: str, nodes: list[tuple[str, _Match]]) -> tuple[str, _Match]:
    text = f"({operator}{''.join(node for node, _ in nodes)})"
    matches = tuple(match for _, match in nodes)
    first = matches[0]

    def match_not(lookup: _Lookup, properties: Mapping[str, Any], folded: _Folded) -> bool:
        return not first(lookup, properties, folded)

    def match_and(lookup: _Lookup, properties: Mapping[str, Any], folded: _Folded) -> bool:
        for match in matches:  # noqa: SIM110 - all() over a generator costs another frame per level
            if not match(lookup, properties, folded):
                return False
        return True

    def match_or(lookup: _Lookup, properties: Mapping[str, Any], folded: _Folded) -> bool:
        for match in matches:  # noqa: SIM110
            if match(lookup, properties, folded):
                return True
        return False

    return text, {"!": match_not, "&": match_and, "|": match_or}[operator]


def _presence(name: str) -> _Match:
    without_case = name.casefold()

    def match(lookup: _Lookup, properties: Mapping[str, Any], folded: _Folded) -> bool:
        return lookup(name) is not None or _in_other_case(without_case, properties, folded) is not None

    return match


def _operation(name: str, quick: _Quick, test: _Test) -> _Match:
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

    def match(lookup: _Lookup, properties: Mapping[str, Any], folded: _Folded) -> bool:
        value = lookup(name)
        if value is None:
            value = _in_other_case(without_case, properties, folded)
            if value is None:
                return False
        return tests.get(type(value), matches_other)(value)

    return match


def _guarded(name: str, test: _Test) -> _Test:
    def guarded(value: Any) -> bool:
        try:
            return test(value)
        except Exception as error:  # noqa: BLE001 - may run code of foreign types; what fails does not match
            logger.debug("property %s of type %s: %s", _shown(name), type(value).__name__, type(error).__name__)
            return False

    return guarded


def _substring(name: str, pieces: list[str]) -> _Match:
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


def _comparison(name: str, operator: str, value: str) -> _Match:
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
        return _never if operand is None else _COMPARING[operator](operand)

    quick: _Quick = {int: quick_test(as_int), float: quick_test(as_float), bool: _COMPARING["="](truth)}
    if approximate:
        return _operation(name, quick, test)
    quick[str] = quick_test(value)
    return _AT_ONCE[operator](name, value, nan if as_int is None else as_int, _operation(name, quick, test))


def _never(_: Any) -> bool:
    return False


# --- the most frequent of all, a str or an int, without a frame of its own for the comparison: so, all alike


def _equal(name: str, text: str, number: int | Decimal | float, otherwise: _Match) -> _Match:
    def match(lookup: _Lookup, properties: Mapping[str, Any], folded: _Folded) -> bool:
        value = lookup(name)
        if type(value) is str:
            return value == text
        if type(value) is int:
            return value == number
        return otherwise(lookup, properties, folded)

    return match


def _at_least(name: str, text: str, number: int | Decimal | float, otherwise: _Match) -> _Match:
    def match(lookup: _Lookup, properties: Mapping[str, Any], folded: _Folded) -> bool:
        value = lookup(name)
        if type(value) is str:
            return value >= text
        if type(value) is int:
            return value >= number
        return otherwise(lookup, properties, folded)

    return match


def _at_most(name: str, text: str, number: int | Decimal | float, otherwise: _Match) -> _Match:
    def match(lookup: _Lookup, properties: Mapping[str, Any], folded: _Folded) -> bool:
        value = lookup(name)
        if type(value) is str:
            return value <= text
        if type(value) is int:
            return value <= number
        return otherwise(lookup, properties, folded)

    return match


def _beginning(name: str, initial: str, otherwise: _Match) -> _Match:
    size = len(initial)

    def match(lookup: _Lookup, properties: Mapping[str, Any], folded: _Folded) -> bool:
        value = lookup(name)
        if type(value) is str:
            return value[:size] == initial
        return otherwise(lookup, properties, folded)

    return match


_AT_ONCE: Final = {"=": _equal, ">=": _at_least, "<=": _at_most}
#: operator -> operand -> comparison with values of its own type
_COMPARING: Final[Mapping[str, Callable[[Any], _Test]]] = {
    "=": lambda operand: lambda value: value == operand,
    "~=": lambda operand: lambda value: value == operand,
    ">=": lambda operand: lambda value: value >= operand,
    "<=": lambda operand: lambda value: value <= operand,
}


def _text(value: Any) -> str | None:
    if isinstance(value, str):
        return value
    if isinstance(value, Enum) and not isinstance(value, (int, float)):
        return value.name
    return None


def _approximate(text: str) -> str:
    return "".join(text.split()).casefold()


def _numbers(value: str) -> tuple[float | None, Decimal | None, int | Decimal | None]:
    """``value`` as it compares with float, Decimal and int: a float is what its shortest text says, not its bits."""
    text = value.strip()
    if not text.isascii() or "_" in text:  # Python reads more than one would expect
        return None, None, None
    try:
        exact = Decimal(text)
        if exact.is_nan():  # equals nothing, and has no order
            return None, None, None
        return float(text), exact, int(text) if text.lstrip("+-").isdigit() else exact
    except (ArithmeticError, ValueError):  # not a number, or an int of more digits than Python converts
        return None, None, None
