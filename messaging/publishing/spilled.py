"""The promises of messages that a durable outbox has on disk only, until these are read or the deadlines pass."""

from __future__ import annotations

from heapq import heappop, heappush
from typing import TYPE_CHECKING, Final
from weakref import WeakValueDictionary

if TYPE_CHECKING:
    from messaging.publishing.stored import StoredPublication

#: how much later than its deadline a promise may fail, because of the deadline of the one before it, seconds
_SLACK: Final = 0.1


class Spilled:
    """Publications by offset, held weakly: a promise that the application dropped takes no memory. On the loop.

    Publications are added in the order of their offsets, and mostly in that of their deadlines. Only those with an
    earlier deadline than one before them are entered into a heap.
    """

    def __init__(self) -> None:
        self._known: WeakValueDictionary[int, StoredPublication] = WeakValueDictionary()
        #: the latest deadline, and the deadlines before it with their offsets
        self._latest = 0.0
        self._early: list[tuple[float, int]] = []

    def add(self, publication: StoredPublication) -> None:
        """Add the publication of a message whose payload is released, unless it has its outcome."""
        if publication.done():
            return
        if not self._known:
            self._latest = 0.0
            self._early.clear()
        self._known[publication.offset] = publication
        if publication.deadline < self._latest - _SLACK:
            heappush(self._early, (publication.deadline, publication.offset))
        else:
            self._latest = max(self._latest, publication.deadline)

    def pop(self, offset: int) -> StoredPublication | None:
        """Remove and return the publication of the message at ``offset``, if there is one."""
        return self._known.pop(offset, None)

    def pop_range(self, first: int, end: int) -> list[StoredPublication]:
        """Remove and return the publications of the messages from offset ``first`` to before ``end``."""
        return [self._known.pop(each.offset) for each in [*self._known.values()] if first <= each.offset < end]

    def pass_deadlines(self, now: float) -> float | None:
        """Fail the promises whose deadline has passed; return the seconds until the next one, about."""
        while self._early and self._early[0][0] <= now:
            self._pass(heappop(self._early)[1], now)
        while (first := next(iter(self._known.values()), None)) is not None and first.deadline <= now:
            self._pass(first.offset, now)
        if first is None:
            return None
        return (min(first.deadline, self._early[0][0]) if self._early else first.deadline) - now

    def _pass(self, offset: int, now: float) -> None:
        publication = self._known.get(offset)
        if publication is not None and publication.deadline <= now:
            del self._known[offset]
            publication.pass_deadline()
