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

from collections.abc import Mapping
from functools import lru_cache
from typing import Any, Final, NoReturn, TypeAlias

from messaging.errors import ArgumentError, InvalidFilterError
from messaging.errors.text import tolerant
from messaging.services.matching import Lookup, Match, combine, comparison, presence, shown, substring
from messaging.services.reference import ServiceProperties

#: bounds of a filter's text: characters, nested parentheses, operations
MAX_LENGTH: Final = 65_536
MAX_DEPTH: Final = 100
MAX_OPERATIONS: Final = 2_000

_SPECIAL: Final = frozenset("\\*()")
_NAME_ENDS: Final = frozenset("=~<>()")
_OPERATORS: Final = ("~=", ">=", "<=", "=")
#: characters before and after the error that an error text shows
_CONTEXT: Final = 40

#: the normalised text of a part of a filter, and its match
_Node: TypeAlias = tuple[str, Match]


class _Parser:
    """Reads one filter from left to right, without recursion: the depth of the text does not use the stack.

    Raises:
        InvalidFilterError: ``text`` is no str, or too long.
    """

    def __init__(self, text: str) -> None:
        if not isinstance(text, str):
            raise InvalidFilterError(f"an LDAP filter must be a str, not {type(text).__name__}", 0)
        if len(text) > MAX_LENGTH:
            raise InvalidFilterError(
                f"LDAP filter of {len(text)} characters is too long; at most {MAX_LENGTH} are allowed", MAX_LENGTH
            )
        self._text = text
        self._at = 0

    def parse(self) -> _Node:
        """Return the normalised text and the match of the filter; the error names the expected text and its index."""
        open_lists: list[tuple[str, list[_Node]]] = []
        operations = 0
        while True:
            self._expect("(")
            self._skip_space()
            operator = self._peek()
            if operator and operator in "&|!":
                start = self._at
                self._at += 1
                self._skip_space()
                if self._peek() == "(":
                    if len(open_lists) == MAX_DEPTH:
                        self._fail(f"nested too deep; at most {MAX_DEPTH} levels are allowed")
                    open_lists.append((operator, []))
                    continue
                if self._peek() == ")":
                    self._fail(f"expected a filter in parentheses after {operator!r}")
                self._at = start
            if operations == MAX_OPERATIONS:
                self._fail(f"too many operations; at most {MAX_OPERATIONS} are allowed")
            operations += 1
            node = self._operation()
            while True:
                self._skip_space()
                if not open_lists:
                    if self._at < len(self._text):
                        self._fail("expected the end of the filter")
                    return node
                operator, nodes = open_lists[-1]
                nodes.append(node)
                if self._peek() == "(" and operator != "!":
                    break
                self._expect(")", "another filter or " if operator != "!" else "")
                open_lists.pop()
                text = "".join(each for each, _ in nodes)
                node = f"({operator}{text})", combine(operator, [match for _, match in nodes])

    def _operation(self) -> _Node:
        text, start = self._text, self._at
        while self._at < len(text) and text[self._at] not in _NAME_ENDS:
            self._at += 1
        name = text[start : self._at].rstrip()
        if not name:
            self._fail("expected an attribute name")
        for operator in _OPERATORS:
            if text.startswith(operator, self._at):
                break
        else:
            self._fail(f"expected '=', '~=', '>=' or '<=' after the attribute {shown(name)}")
        self._at += len(operator)
        if operator == "=":
            start = self._at
            if self._peek() == "*":
                self._at += 1
                self._skip_space()
                if self._peek() == ")":
                    self._at += 1
                    return f"({name}=*)", presence(name)
                self._at = start
        pieces = self._value(split=operator == "=")
        if len(pieces) > 1:
            return f"({name}={_pattern(pieces)})", substring(name, pieces)
        if operator != "=" and not pieces[0]:
            self._at -= 1
            self._fail(f"expected a value after {operator!r}")
        return f"({name}{operator}{escaped(pieces[0])})", comparison(name, operator, pieces[0])

    def _value(self, *, split: bool) -> list[str]:
        """Read the value up to its ')', unescaped; with ``split`` return the pieces between the asterisks."""
        pieces: list[str] = []
        piece: list[str] = []
        text = self._text
        while self._at < len(text):
            char = text[self._at]
            self._at += 1
            if char == ")":
                pieces.append("".join(piece))
                return pieces
            if char == "(":
                self._at -= 1
                self._fail("expected ')'; a '(' that belongs to the value is written '\\('")
            if char == "*" and split:
                pieces.append("".join(piece))
                piece = []
                continue
            if char == "\\":
                if self._at == len(text):
                    self._fail("expected a character after the backslash")
                char = text[self._at]
                self._at += 1
            piece.append(char)
        return self._fail("expected ')'")

    def _peek(self) -> str:
        return self._text[self._at : self._at + 1]

    def _skip_space(self) -> None:
        while self._peek().isspace():
            self._at += 1

    def _expect(self, char: str, otherwise: str = "") -> None:
        self._skip_space()
        if self._peek() != char:
            self._fail(f"expected {otherwise}{char!r}")
        self._at += 1

    def _fail(self, problem: str) -> NoReturn:
        left = max(0, self._at - _CONTEXT)
        excerpt = "".join(char if char.isprintable() else "?" for char in self._text[left : self._at + _CONTEXT])
        caret = " " * (self._at - left) + "^"
        raise InvalidFilterError(f"LDAP filter: {problem} at index {self._at}\n  {excerpt}\n  {caret}", self._at)


def escaped(value: str) -> str:
    """Return ``value`` as it is written in a filter that matches it."""
    return "".join("\\" + char if char in _SPECIAL else char for char in value)


def _pattern(pieces: list[str]) -> str:
    text = "*".join(map(escaped, pieces))
    if text.startswith("*") and text[1:].isspace():  # unescaped, it would mean presence
        return "*\\" + text[1:]
    return text


class LdapFilter:
    """A parsed filter; immutable, safe to share between threads. ``str()`` is its normalised text.

    Two filters are equal if their normalised texts and their case sensitivity are.

    Args:
        text: the filter, at most 65,536 characters, 100 levels and 2,000 operations.
        case_sensitive: whether attribute names are case-sensitive. If not, the exact spelling is preferred; of several
            other spellings the first counts. Values are case-sensitive except for ``~=``.

    Raises:
        InvalidFilterError: ``text`` is no filter; names the expected text and its index.
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
        """Return whether ``properties`` match. A value that cannot be compared does not match; it never raises.

        Raises:
            ArgumentError: ``properties`` is no mapping.
        """
        lookup: Lookup
        folded: dict[str, Any]
        if type(properties) is not dict and isinstance(properties, ServiceProperties):  # the slower check comes second
            lookup, folded = properties.get_exact, properties.folded
        else:
            lookup, folded = _lookup_of(properties), {}
        return self._match(lookup, properties, None if self._case_sensitive else folded)

    def match_case(self, properties: Mapping[str, Any]) -> bool:
        """Return whether ``properties`` match, always with case-sensitive names (RFC 97 5.7.1)."""
        lookup = properties.get_exact if isinstance(properties, ServiceProperties) else _lookup_of(properties)
        return self._match(lookup, properties, None)

    @property
    def case_sensitive(self) -> bool:
        """Return whether attribute names are case-sensitive."""
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


def _lookup_of(properties: Mapping[str, Any]) -> Lookup:
    if type(properties) is not dict and not isinstance(properties, Mapping):
        raise ArgumentError(f"properties must be a mapping, not {type(properties).__name__}")
    return properties.get


#: returns the filter with a text, remembered
_cached_filter: Final = lru_cache(256)(LdapFilter)


def as_filter(given: str | LdapFilter | None) -> LdapFilter | None:
    """Return the filter that a caller gave as a text or compiled, or ``None``; equal texts are compiled once.

    Raises:
        InvalidFilterError: ``given`` is no filter.
    """
    if given is None or isinstance(given, LdapFilter):
        return given
    return _cached_filter(given) if isinstance(given, str) else LdapFilter(given)  # raises the error
