"""Event ids that were seen: an event that arrives twice, or by two ways, is taken once."""

from __future__ import annotations

import threading
from typing import Final

#: ids that are remembered at least
MAX_SEEN: Final = 100_000


class SeenEvents:
    """The ids of the events that were taken last. Thread safe.

    The ids are bounded by number: at least the last ``limit`` ids are known, and at most twice as many. They are in two
    sets; when the newer one is full it replaces the older one.
    """

    __slots__ = ("_limit", "_lock", "_newer", "_older")

    def __init__(self, limit: int = MAX_SEEN) -> None:
        self._limit = limit
        self._lock = threading.Lock()  # guards the following
        self._newer: set[str] = set()
        self._older: set[str] = set()

    def is_new(self, event_id: str) -> bool:
        """Note an event; return whether it was not seen before."""
        with self._lock:
            newer = self._newer
            if event_id in newer or event_id in self._older:
                return False
            newer.add(event_id)
            if len(newer) >= self._limit:
                self._older, self._newer = newer, set()
            return True

    def __len__(self) -> int:
        """Return the number of ids that are known."""
        return len(self._newer) + len(self._older)
