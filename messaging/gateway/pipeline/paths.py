"""Paths into JSON values: ``status.battery``, ``readings[0].value``, ``$`` for the value itself."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, Final

from messaging.errors import ArgumentError

_STEP: Final = re.compile(r"([^.\[\]]+)|\[(\d{1,9})\]")
#: the value itself, before a step
_ROOT: Final = re.compile(r"^\$(?:\.|(?=\[))")
#: stands for a value that is not there
MISSING: Final = object()


class FieldPath:
    """A path into a JSON value. Immutable, thread safe.

    Raises:
        ArgumentError: the text is no path.
    """

    __slots__ = ("is_optional", "steps", "text")

    def __init__(self, text: str) -> None:
        self.text = text
        self.is_optional = text.endswith("?")
        bare = text.removesuffix("?")
        self.steps = () if bare == "$" else _steps(_ROOT.sub("", bare), text)

    def get(self, value: Any) -> Any:
        """Return what is at the path; ``MISSING`` if nothing is."""
        step: Any
        for step in self.steps:
            if not isinstance(value, dict if isinstance(step, str) else list):  # a text has items, too
                return MISSING
            try:
                value = value[step]
            except (KeyError, IndexError):
                return MISSING
        return value

    def put(self, value: Any, found: Any) -> Any:
        """Return ``value`` with ``found`` at the path. Objects on the way are copied, or made where there are none.

        Raises:
            ArgumentError: something on the way is neither an object nor an array with that index.
        """
        return self._put(value, found, 0)

    def _put(self, value: Any, found: Any, depth: int) -> Any:
        if depth == len(self.steps):
            return found
        step = self.steps[depth]
        if isinstance(step, int):
            if not isinstance(value, list) or step >= len(value):
                raise ArgumentError(f"{self.text!r}: there is no array with index {step}")
            items = list(value)
            items[step] = self._put(value[step], found, depth + 1)
            return items
        if value is not None and not isinstance(value, dict):
            raise ArgumentError(f"{self.text!r}: the value around {step!r} is no object")
        made = dict(value or {})
        made[step] = self._put(made.get(step), found, depth + 1)
        return made

    def remove(self, value: Any) -> Any:
        """Return ``value`` without what is at the path."""
        return self._remove(value, 0) if self.steps and self.get(value) is not MISSING else value

    @property
    def has_index(self) -> bool:
        """Return whether it leads through an array."""
        return any(isinstance(step, int) for step in self.steps)

    def _remove(self, value: Any, depth: int) -> Any:
        step: Any = self.steps[depth]
        made: Any = dict(value) if isinstance(value, dict) else list(value)
        if depth == len(self.steps) - 1:
            del made[step]
        else:
            made[step] = self._remove(value[step], depth + 1)
        return made


def remove_all(value: Any, paths: Iterable[FieldPath]) -> Any:
    """Return ``value`` without what is at the paths, which are those of ``value`` as it is given."""
    # later items of an array first: without an item, the later ones have other indexes
    for path in sorted(paths, key=lambda path: [(0, step, 0) if isinstance(step, str) else (1, "", -step)
                                                for step in path.steps]):  # fmt: skip
        value = path.remove(value)
    return value


def _steps(text: str, shown: str) -> tuple[str | int, ...]:
    found: list[str | int] = []
    at = 0
    while at < len(text):
        follows_dot = bool(found) and text[at] == "."
        at += follows_dot
        step = _STEP.match(text, at)
        if step is None or (found and (step.group(1) is not None) != follows_dot):
            raise ArgumentError(f"{shown!r:.90} is no path of a field; write 'status.battery', 'readings[0]' or '$'")
        found.append(step.group(1) if step.group(1) is not None else int(step.group(2)))
        at = step.end()
    if not found or text.endswith("."):
        raise ArgumentError(f"{shown!r:.90} is no path of a field; write 'status.battery', 'readings[0]' or '$'")
    return tuple(found)
