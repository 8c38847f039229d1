"""The backlog of a durable outbox: reads messages that are only on the disk, and makes plans of them."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

from messaging.bounded import BoundedCache
from messaging.errors import MessagingError, UnsupportedFeatureError
from messaging.execution import workers
from messaging.publishing.stored import RecordPlan

if TYPE_CHECKING:
    from messaging.execution import Engine
    from messaging.journal import Journal, Record
    from messaging.model import MessageContext, PublishPlan

logger = logging.getLogger(__name__)

#: records that are read at a time
LOAD: Final = 512
#: pause before a read that failed is tried again, seconds
_RETRY: Final = 1.0


class Loaded(NamedTuple):
    """A message from the disk."""

    record: Record
    #: or the error of a message that this instance cannot publish
    plan: PublishPlan | MessagingError


class Backlog:
    """Reads the messages of a journal in order, some at a time. On the engine's loop; a worker thread reads.

    Args:
        engine: its loop.
        name: of the instance, for logs.
        journal: holds the messages.
        loaded: called on the loop with the messages, and the offset after them: the journal does not have the offsets
            in between that are missing.

    Attributes:
        compile: compiles the plan of a restored context, on the worker thread.
        is_loading: whether a read is under way.
    """

    def __init__(
        self, engine: Engine, name: str, journal: Journal, loaded: Callable[[Sequence[Loaded], int], object]
    ) -> None:
        self._engine = engine
        self._name = name
        self._journal = journal
        self._on_loaded = loaded
        self.compile: Callable[[MessageContext], PublishPlan] = _uncompiled
        self.is_loading = False
        # --- the worker thread: one at a time
        self._plans: BoundedCache[tuple[str, str], PublishPlan] = BoundedCache(1024)
        #: the offset that comes next, and the one at which the iterator ends
        self._records: Iterator[Record] = iter(())
        self._next = self._until = -1

    def load(self, start: int, end: int) -> None:
        """Read the next messages, of those from offset ``start`` to before ``end``."""
        self.is_loading = True
        workers().submit(lambda: self._load(start, end))

    def _load(self, start: int, end: int) -> None:
        loaded: list[Loaded] = []
        try:
            if self._next != start or self._until <= start:
                self._records = self._journal.read(max(start, self._journal.begin), end)
                self._until = end
            loaded.extend(Loaded(record, self._plan_of(record)) for record in itertools.islice(self._records, LOAD))
        except MessagingError as error:
            self._next = -1
            self._engine.call(self._failed, start, end, error)
            return
        # an iterator without a record has passed its end: the journal does not have them any more
        self._next = loaded[-1].record.offset + 1 if loaded else self._until
        self._engine.call(self._finish, loaded, self._next)

    def _plan_of(self, record: Record) -> PublishPlan | MessagingError:
        key = record.channel, record.properties
        plan = self._plans.get(key)
        if plan is None:
            try:
                context = record.context
                plan = self.compile(context)
            except MessagingError as error:
                return error
            if plan.record is None:
                plan.record = RecordPlan(record.channel, context, context.extensions)
            self._plans[key] = plan
        return plan

    def _finish(self, loaded: Sequence[Loaded], following: int) -> None:
        self.is_loading = False
        self._on_loaded(loaded, following)

    def _failed(self, start: int, end: int, error: MessagingError) -> None:
        logger.error("%s: cannot read the outbox: %s; trying again in %g s", self._name, error, _RETRY)
        self._engine.loop.call_later(_RETRY, self.load, start, end)


def _uncompiled(context: MessageContext) -> PublishPlan:
    raise UnsupportedFeatureError("outbox_path", str(context.channel))
