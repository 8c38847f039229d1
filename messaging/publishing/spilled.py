"""The promises of messages that a durable outbox has on disk only, until these are read or the deadlines pass."""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from itertools import takewhile
from typing import TYPE_CHECKING, Final
from weakref import ref

if TYPE_CHECKING:
    from messaging.publishing.stored import StoredPublication

#: how much later than its deadline a promise may fail, because of the deadline of the one before it, seconds
_SLACK: Final = 0.1
#: smallest number of publications of which the ones that the application dropped are removed
_LEAST_SWEPT: Final = 1024


class Spilled:
    """Publications by offset, held weakly: a promise that the application dropped takes no memory. On the loop.

    Publications are added in the order of their offsets, and mostly in that of their deadlines. Only those with an
    earlier deadline than one before them are entered into a heap.

    Dropped publications are removed when the number has doubled. A ``WeakValueDictionary`` would run Python code when
    each of them is added, dropped and removed.
    """

    def __init__(self) -> None:
        self._known: dict[int, ref[StoredPublication]] = {}
        #: the number at which dropped publications are removed
        self._sweep_at = _LEAST_SWEPT
        #: the latest deadline, and the deadlines before it with their offsets
        self._latest = 0.0
        self._early: list[tuple[float, int]] = []

    def add(self, publication: StoredPublication) -> None:
        """Add the publication of a message whose payload is released, unless it has its outcome."""
        if publication.done():
            return
        known = self._known
        if not known:
            self._latest = 0.0
            self._early.clear()
        elif len(known) >= self._sweep_at:
            self._sweep()
        self._known[publication.offset] = ref(publication)
        if publication.deadline < self._latest - _SLACK:
            heappush(self._early, (publication.deadline, publication.offset))
        else:
            self._latest = max(self._latest, publication.deadline)

    def _sweep(self) -> None:
        self._known = {offset: each for offset, each in self._known.items() if each() is not None}
        self._early = [each for each in self._early if each[1] in self._known]
        heapify(self._early)
        self._sweep_at = max(_LEAST_SWEPT, 2 * len(self._known))

    def pop(self, offset: int) -> StoredPublication | None:
        """Remove and return the publication of the message at ``offset``, if there is one."""
        found = self._known.pop(offset, None)
        return None if found is None else found()

    def pop_before(self, end: int) -> list[StoredPublication]:
        """Remove and return the publications of the messages before offset ``end``."""
        found = [self.pop(offset) for offset in [*takewhile(end.__gt__, self._known)]]
        return [each for each in found if each is not None]

    def __len__(self) -> int:
        return len(self._known)

    def pass_deadlines(self, now: float) -> float | None:
        """Fail the promises whose deadline has passed; return the seconds until the next one, about."""
        while self._early and self._early[0][0] <= now:
            offset = heappop(self._early)[1]
            publication = self._get(offset)
            if publication is not None and publication.deadline <= now:
                del self._known[offset]
                publication.pass_deadline()
        passed: dict[int, StoredPublication | None] = {}
        for offset in self._known:
            publication = self._get(offset)
            if publication is not None and publication.deadline > now:
                break
            passed[offset] = publication
        else:
            publication = None
        for offset, each in passed.items():
            del self._known[offset]
            if each is not None:
                each.pass_deadline()
        if publication is None:
            return None
        return (min(publication.deadline, self._early[0][0]) if self._early else publication.deadline) - now

    def _get(self, offset: int) -> StoredPublication | None:
        found = self._known.get(offset)
        return None if found is None else found()
