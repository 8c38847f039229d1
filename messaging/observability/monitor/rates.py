"""Rates: differences of numbers between two reports, per second."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, TypeAlias

#: names of the fields and keys of the items that lead to a value
Path: TypeAlias = tuple[str, ...]

#: fields that tell the items of a list apart, the best first; a dotted name is a field of a field
_KEYS: Final = (
    "id", "service_id", "name", "channel.name", "request_channel.name", "topic", "pattern", "channel", "key",
)  # fmt: skip


def keyed(items: Sequence[Any]) -> Iterator[tuple[str, Any]]:
    """Yield each item of a list with a key that it keeps when others come and go."""
    seen: dict[str, int] = {}
    for number, item in enumerate(items):
        key = _key(item)
        if key is None:
            yield f"#{number}", item
            continue
        count = seen[key] = seen.get(key, 0) + 1
        yield (key if count == 1 else f"{key}#{count}"), item


def _key(item: Any) -> str | None:
    if not isinstance(item, Mapping):
        return None
    for name in _KEYS:
        value: Any = item
        for part in name.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        if isinstance(value, (str, int)) and not isinstance(value, bool) and value != "":
            return f"{name}={value}"
    return None


def numbers(data: Any) -> dict[Path, float]:
    """Return all numbers of a report by their paths."""
    found: dict[Path, float] = {}
    _collect(data, (), found)
    return found


def _collect(value: Any, path: Path, found: dict[Path, float]) -> None:
    if isinstance(value, bool):
        return
    if isinstance(value, (int, float)):
        found[path] = value
    elif isinstance(value, Mapping):
        for name, each in value.items():
            _collect(each, (*path, name), found)
    elif isinstance(value, list):
        for key, each in keyed(value):
            _collect(each, (*path, key), found)


class Rates:
    """The changes of the numbers of one report since the one before, per second.

    Args:
        now: the numbers.
        before: the earlier numbers; ``None``: there are none, and no rates.
        seconds: between the two.
    """

    __slots__ = ("_before", "_now", "_seconds")

    def __init__(
        self, now: Mapping[Path, float], before: Mapping[Path, float] | None = None, seconds: float = 0.0
    ) -> None:
        self._now = now
        self._before = before if seconds > 0 else None
        self._seconds = seconds

    def of(self, path: Path) -> float | None:
        """Return the increase of a counter per second; ``None`` if it is unknown, or the counter began anew."""
        if self._before is None:
            return None
        now, before = self._now.get(path), self._before.get(path)
        if now is None or before is None or now < before:
            return None
        return (now - before) / self._seconds

    def total(self, paths: Sequence[Path]) -> float | None:
        """Return the sum of the known rates; ``None`` without an earlier report."""
        if self._before is None:
            return None
        return sum(filter(None, map(self.of, paths)))
