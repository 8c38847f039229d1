"""Reading the text of an LDAP filter, without recursion: the depth of the text does not use the stack."""

from __future__ import annotations

from typing import Final, NoReturn, TypeAlias

from messaging.errors import InvalidFilterError
from messaging.services.matching import Match, combine, comparison, presence, shown, substring

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


class Parser:
    """Reads one filter, from left to right.

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
        """Return the normalised text and the match of the filter.

        Raises:
            InvalidFilterError: the text is no filter; names the expected text and its index.
        """
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
