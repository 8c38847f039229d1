"""Positions of the keys of a TOML document, which :mod:`tomllib` does not tell.

:func:`toml_positions` reads a text that ``tomllib`` has accepted, so that it refuses nothing and checks nothing: it
only has to find where keys, and elements of arrays, begin.
"""

from __future__ import annotations

import itertools
import re
import tomllib
from bisect import bisect_right
from typing import Final

from messaging.gateway.problems import KeyPath, TextPosition

_BLANK: Final = re.compile(r"[ \t]*")
#: what stands between pairs, and between the elements of an array
_GAP: Final = re.compile(r"(?:[ \t\n,]|#[^\n]*)*")
_REST_OF_LINE: Final = re.compile(r"[^\n]*")
_BARE_KEY: Final = re.compile(r"[^\s.=\]\"']+")
#: numbers, booleans, dates and times, which may hold one space
_BARE_VALUE: Final = re.compile(r"[^,\]}#\n]*")
#: the long forms first
_TEXT: Final = re.compile(
    r'"""(?:[^"\\]|\\.|"{1,2}(?!"))*"{3,5}'
    r"|'{3}(?:[^']|'{1,2}(?!'))*'{3,5}"
    r'|"(?:[^"\\\n]|\\.)*"'
    r"|'[^'\n]*'",
    re.DOTALL,
)


def toml_positions(text: str) -> dict[KeyPath, TextPosition]:
    """Return where each key and each element of an array of a TOML document stands.

    A table that several headers and dotted keys mention stands at its own header, or else where it is mentioned first.

    Args:
        text: a document that ``tomllib.loads`` accepts, nested at most as deep as Python recurses.
    """
    scanner = _Scanner(text.replace("\r\n", "\n"))
    scanner.scan()
    return scanner.found


class _Scanner:
    """Walks over a document once."""

    def __init__(self, text: str) -> None:
        self.found: dict[KeyPath, TextPosition] = {}
        self._text = text
        self._at = 0
        self._lines = [0, *(match.end() for match in re.finditer("\n", text))]
        #: arrays of tables -> index of the last element
        self._last: dict[KeyPath, int] = {}

    def scan(self) -> None:
        table: KeyPath = ()
        while True:
            self._skip(_GAP)
            if self._at >= len(self._text):
                return
            if self._text.startswith("[[", self._at):
                table = self._array_header()
            elif self._text[self._at] == "[":
                self._at += 1
                table = self._path((), self._key())
                self._skip(_REST_OF_LINE)
            else:
                self._pair(table)

    def _array_header(self) -> KeyPath:
        self._at += 2
        *outer, (name, start) = self._key()
        array = (*self._path((), outer, mentioned=True), name)
        position = self._position(start)
        self.found.setdefault(array, position)
        index = self._last[array] = self._last.get(array, -1) + 1
        self.found[(*array, index)] = position
        self._skip(_REST_OF_LINE)
        return (*array, index)

    def _pair(self, table: KeyPath) -> None:
        path = self._path(table, self._key())
        self._skip(_BLANK)
        self._at += 1  # =
        self._skip(_BLANK)
        self._value(path)

    def _value(self, path: KeyPath) -> None:
        if self._skip(_TEXT):
            return
        if self._text.startswith(("[", "{"), self._at):
            self._elements(path, "]" if self._text[self._at] == "[" else "}")
        else:
            self._skip(_BARE_VALUE)

    def _elements(self, path: KeyPath, end: str) -> None:
        """Read an array or an inline table, up to ``end``."""
        self._at += 1
        for index in itertools.count():
            self._skip(_GAP)
            if self._text[self._at : self._at + 1] in (end, ""):
                self._at += 1
                return
            if end == "}":
                self._pair(path)
            else:
                self.found[(*path, index)] = self._position(self._at)
                self._value((*path, index))

    # --- keys

    def _key(self) -> list[tuple[str, int]]:
        """Read a dotted key; return its parts, and where each begins."""
        parts = []
        while True:
            self._skip(_BLANK)
            start = self._at
            if self._skip(_TEXT):  # escapes are as in a value
                parts.append((str(tomllib.loads("key = " + self._text[start : self._at])["key"]), start))
            else:
                self._skip(_BARE_KEY)
                parts.append((self._text[start : self._at], start))
            self._skip(_BLANK)
            if not self._text.startswith(".", self._at):
                return parts
            self._at += 1

    def _path(self, table: KeyPath, parts: list[tuple[str, int]], *, mentioned: bool = False) -> KeyPath:
        """Return the path of a key below ``table``; record its parts. A name of an array is its last element.

        Args:
            table: the path of the table around.
            parts: of the key.
            mentioned: whether the last part, too, is the name of a table that may have its own header elsewhere.
        """
        path = table
        for name, start in parts:
            path = (*path, name)
            position = self._position(start)
            # the last part is the key itself; those before it may be mentioned elsewhere, too
            if start == parts[-1][1] and not mentioned:
                self.found[path] = position
            else:
                self.found.setdefault(path, position)
            if path in self._last:
                path = (*path, self._last[path])
        return path

    # --- characters

    def _skip(self, pattern: re.Pattern[str]) -> bool:
        """Skip a match; return whether there is one."""
        match = pattern.match(self._text, self._at)
        if match is not None:
            self._at = match.end()
        return match is not None

    def _position(self, offset: int) -> TextPosition:
        line = bisect_right(self._lines, offset)
        return TextPosition(line, offset - self._lines[line - 1] + 1)
