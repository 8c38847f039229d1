"""Problems of a configuration: each with its place in the file, what is wrong, and what would be right."""

from __future__ import annotations

import enum
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final, NamedTuple

from messaging.errors import GatewaySettingsError

#: the place of a value in a document: keys of tables, and indexes of arrays from 0
KeyPath = tuple[str | int, ...]

_BARE: Final = re.compile(r"[A-Za-z0-9_-]+")


class Severity(enum.StrEnum):
    """How bad a problem is."""

    #: the gateway does not start
    ERROR = "error"
    #: the gateway starts; messages may be lost, or a setting has no effect
    WARNING = "warning"


class TextPosition(NamedTuple):
    """A place in a text. Line and column count from 1; the column counts characters."""

    line: int
    column: int


#: where the keys of a document stand
Positions = Mapping[KeyPath, TextPosition]


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """A problem of a configuration. Holds no secret.

    Attributes:
        severity: error or warning.
        file: the file, as it was named; ``None`` for settings that come from no file.
        line, column: of the key, or of the nearest one around it; counted from 1; ``None`` without a file.
        key: the place as a person writes it, such as ``routes.telemetry.to.channel``; empty for the whole file.
        text: what is wrong, and what would be right.
    """

    severity: Severity = Severity.ERROR
    file: str | None = None
    line: int | None = None
    column: int | None = None
    key: str = ""
    text: str

    def __str__(self) -> str:
        """Return one line: ``gateway.toml:12:3: error: routes.telemetry.to.channel: …``."""
        place = "" if self.file is None else self.file
        for number in (self.line, self.column):
            if number is not None:
                place += f":{number}"
        parts = [place, self.severity.value, self.key, self.text]
        return ": ".join(part for part in parts if part)

    def as_dict(self) -> dict[str, Any]:
        """Return the attributes, for JSON."""
        return asdict(self)


class Finding(NamedTuple):
    """What a rule finds at a key. See :func:`error` and :func:`warning`."""

    severity: Severity
    path: KeyPath
    text: str


def error(path: KeyPath, text: str) -> Finding:
    """Return an error at a key."""
    return Finding(Severity.ERROR, path, text)


def warning(path: KeyPath, text: str) -> Finding:
    """Return a warning at a key."""
    return Finding(Severity.WARNING, path, text)


class Problems:
    """Collects the problems of one document, each at the position of its key. For one thread.

    Args:
        file: name of the file; ``None`` for settings that come from no file.
        positions: where its keys stand.
    """

    def __init__(self, file: str | None = None, positions: Positions | None = None) -> None:
        self.file = file
        self._positions = {} if positions is None else positions
        self._found: dict[tuple[str, str], Problem] = {}

    def error(self, path: KeyPath, text: str) -> None:
        """Record an error at a key."""
        self.add_all((error(path, text),))

    def add_all(self, findings: Iterable[Finding], part: KeyPath = ()) -> None:
        """Record what a rule finds; its keys are below ``part``."""
        for severity, below, text in findings:
            path = (*part, *below)
            # errors of filters show the place in a second line
            self._add(severity, nearest_position(self._positions, path), shown_path(path), text.splitlines()[0])

    def at(self, position: TextPosition, text: str) -> None:
        """Record an error at a position."""
        self._add(Severity.ERROR, position, "", text)

    def _add(self, severity: Severity, position: TextPosition | None, key: str, text: str) -> None:
        line, column = (None, None) if position is None else position
        found = Problem(severity=severity, file=self.file, line=line, column=column, key=key, text=text)
        self._found.setdefault((key, text), found)

    @property
    def found(self) -> list[Problem]:
        """Return the problems in the order of their lines."""
        return sorted(self._found.values(), key=lambda each: (each.line or 0, each.column or 0))

    @property
    def has_errors(self) -> bool:
        """Return whether one of the problems is an error."""
        return any(each.severity is Severity.ERROR for each in self._found.values())

    def raise_errors(self) -> None:
        """Raise ``GatewaySettingsError`` with all problems if one of them is an error."""
        if self.has_errors:
            raise GatewaySettingsError(self.found)


def nearest_position(positions: Positions, path: KeyPath) -> TextPosition | None:
    """Return where a key stands; where it has no position of its own, that of the nearest key around it.

    A document that is not empty has a line 1, which stands for the whole of it.
    """
    for length in range(len(path), 0, -1):
        found = positions.get(path[:length])
        if found is not None:
            return found
    return TextPosition(1, 1) if positions else None


def shown_path(path: Iterable[str | int]) -> str:
    """Return a path as a person writes it: ``routes.telemetry.transform[1].rename``, unusual keys in quotes."""
    text = ""
    for part in path:
        if isinstance(part, int):
            text += f"[{part}]"
        else:
            word = part if _BARE.fullmatch(part) else json.dumps(part)
            text += f".{word}" if text else word
    return text
