"""A bounded cache.

Imports nothing of this project.
"""

from __future__ import annotations

from typing import TypeVar

K = TypeVar("K")
V = TypeVar("V")


class BoundedCache(dict[K, V]):
    """A dict that holds at most ``limit`` entries: a further entry removes all others. Add entries by ``cache[key]``.

    Reading costs as much as with a dict; to keep an order of use would cost more than to fill the cache again.
    """

    __slots__ = ("_limit",)

    def __init__(self, limit: int = 1024) -> None:
        super().__init__()
        self._limit = limit

    def __setitem__(self, key: K, value: V) -> None:
        if len(self) >= self._limit and key not in self:
            self.clear()
        super().__setitem__(key, value)
