"""Properties of a service: read-only, keys case-insensitive but kept as they were written (OSGi core 5.2.5)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from messaging.errors import ArgumentError, check_mapping
from messaging.text import exact, printable, tolerant


class ServiceProperties(Mapping[str, Any]):
    """An immutable mapping; safe to share between threads.

    Iteration yields the keys as they were written; looking up ignores their case.

    Args:
        properties: copied; the values are not, so do not change them afterwards.

    Raises:
        ArgumentError: they are no mapping, a key is not a non-empty str, or two keys differ only by case.
    """

    __slots__ = ("_folded", "_written")

    def __init__(self, properties: Mapping[str, Any]) -> None:
        self._written: dict[str, Any] = {}
        self._folded: dict[str, Any] = {}
        for key, value in check_mapping("properties", properties).items():
            if not isinstance(key, str) or not key:
                raise ArgumentError(f"a property key must be a non-empty str, not {key!r:.80}")
            key = exact(key)
            folded = key.casefold()
            if folded in self._folded:
                raise ArgumentError(f"property {key!r:.80} is given twice; keys that differ only by case are the same")
            self._folded[folded] = value
            self._written[key] = value

    def __getitem__(self, key: str) -> Any:
        try:
            return self._folded[key.casefold()]
        except AttributeError:  # not a str
            raise KeyError(key) from None

    def get(self, key: str, default: Any = None) -> Any:
        """The value of ``key`` in any case."""
        try:
            return self._folded.get(key.casefold(), default)
        except AttributeError:  # not a str
            return default

    def __contains__(self, key: object) -> bool:
        return isinstance(key, str) and key.casefold() in self._folded

    def __iter__(self) -> Iterator[str]:
        return iter(self._written)

    def __len__(self) -> int:
        return len(self._written)

    @tolerant
    def __repr__(self) -> str:
        # values may be secrets of the application: names only
        return f"<ServiceProperties {', '.join(map(printable, self._written))}>"
