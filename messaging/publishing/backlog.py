"""The messages of a durable outbox that are only on the disk: the backlog loads them, and their promises are kept.

A promise is kept until its message is read, or until its deadline passes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from heapq import heapify, heappop, heappush
from itertools import takewhile
from math import inf
from typing import TYPE_CHECKING, Final, NamedTuple
from weakref import ref

from messaging.codecs.cache import BoundedCache
from messaging.errors import MessagingError
from messaging.execution import Engine, clock, workers
from messaging.model import MessageContext

if TYPE_CHECKING:
    from messaging.journal import DurableQueue, Record
    from messaging.publishing.stored import DiskIntake, StoredPublication

logger = logging.getLogger(__name__)

#: messages that are read from the disk at a time, at most
_LOAD: Final = 512
#: pause before a read that failed is tried again, seconds
_RETRY: Final = 1.0
#: restored contexts that are kept
_CONTEXTS: Final = 1024


class Unpublishable(NamedTuple):
    """A message of the disk that this instance cannot publish."""

    offset: int
    payload: bytes
    record: Record
    error: MessagingError
    deadline: float = inf


class Backlog:
    """Loads the messages of a queue into memory when there is much room. On the loop; a worker thread reads.

    Args:
        engine: its loop.
        name: of the instance, for logs.
        intake: restores the publications.
        loaded: called on the loop after messages were loaded.

    Attributes:
        queue: the messages. Set before the first read.
        is_loading: whether a read is under way.
        is_closed: whether nothing more is read.
        has_unpublishable: whether a message was read that this instance cannot publish.
    """

    queue: DurableQueue[StoredPublication | Unpublishable]

    def __init__(self, engine: Engine, name: str, intake: DiskIntake, loaded: Callable[[], object]) -> None:
        self._engine = engine
        self._intake = intake
        self._name = name
        self._on_loaded = loaded
        self.is_loading = self.is_closed = False
        # --- the worker thread: one at a time
        self._contexts: BoundedCache[tuple[str, str], MessageContext] = BoundedCache(_CONTEXTS)
        self.has_unpublishable = False

    def read_ahead(self) -> None:
        """Load messages if there is much room in memory."""
        if self.is_closed or self.is_loading:
            return
        room, room_bytes = self.queue.room_to_load(_LOAD)
        if room:
            self.is_loading = True
            workers().submit(partial(self._load, room, room_bytes))

    def _load(self, most: int, most_bytes: int) -> None:
        """Load messages. On the worker thread."""
        failure = None
        try:
            self.queue.load(most, most_bytes)
        except MessagingError as error:
            failure = error
        self._engine.call(self._note_loaded, failure)

    def restored(self, record: Record) -> StoredPublication | Unpublishable:
        """Return a publication for a record, as if the application had dropped its promise. On the worker thread."""
        try:
            key = (record.channel, record.properties)
            context = self._contexts.get(key)
            if context is None:
                context = self._contexts[key] = record.context
            return self._intake.restored(record, self._intake.restore(record.payload, context))
        except MessagingError as error:
            reason = error
        except Exception as error:  # a defect: it must not hold up the messages behind
            logger.exception("%s: cannot restore the message at offset %d", self._name, record.offset)
            reason = MessagingError(f"the message cannot be restored: {type(error).__name__}: {error}")
        self.has_unpublishable = True
        return Unpublishable(record.offset, record.payload, record, reason)

    def _note_loaded(self, failure: MessagingError | None) -> None:
        if self.is_closed:
            return
        if failure is not None:
            logger.error("%s: cannot read the outbox: %s; trying again in %g s", self._name, failure, _RETRY)
            clock.call_later(self._engine.loop, _RETRY, self._note_loaded, None)
            return
        self.is_loading = False
        self.queue.pass_over()
        self._on_loaded()


#: smallest number of publications of which the dropped ones are removed
_LEAST_SWEPT: Final = 1024
#: a deadline that is earlier than one before it by less counts as later, seconds: those of several threads mix
_SLACK: Final = 0.1


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
        #: the latest deadline, and a heap of the deadlines before it with their offsets
        self._latest = 0.0
        self._early: list[tuple[float, int]] = []

    def add(self, publication: StoredPublication) -> None:
        """Add the publication of a message whose payload is released, unless it has its outcome."""
        if publication.done():
            return
        known, offset, deadline = self._known, publication.offset, publication.deadline
        if not known:
            self._latest = 0.0
            self._early.clear()
        elif len(known) >= self._sweep_at:
            self._sweep()
        self._known[offset] = ref(publication)
        if deadline < self._latest - _SLACK:
            heappush(self._early, (deadline, offset))
        elif deadline > self._latest:
            self._latest = deadline

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

    def _is_held(self, offset: int) -> bool:
        found = self._known.get(offset)
        return found is not None and found() is not None

    def pass_deadlines(self, now: float) -> float | None:
        """Fail the promises whose deadline has passed; return the seconds until the next one, about."""
        passed: list[int] = []
        while self._early and (self._early[0][0] <= now or not self._is_held(self._early[0][1])):
            passed.append(heappop(self._early)[1])
        following: float | None = None
        for offset, each in self._known.items():
            publication = each()
            if publication is not None and publication.deadline > now:
                following = publication.deadline
                break
            passed.append(offset)
        for offset in passed:
            publication = self.pop(offset)
            if publication is not None:
                publication.pass_deadline()
        if following is None:
            return None
        return min(following, self._early[0][0] if self._early else inf) - now
