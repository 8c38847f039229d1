"""The backlog of a durable outbox: reads messages that are only on the disk, and makes plans of them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Final

from messaging.bounded import BoundedCache
from messaging.errors import MessagingError
from messaging.execution import clock, workers

if TYPE_CHECKING:
    from messaging.execution import Engine
    from messaging.journal import Journal, Record
    from messaging.model import MessageContext, PublishPlan

logger = logging.getLogger(__name__)

#: records that are read at a time, at most
LOAD: Final = 512
#: pause before a read that failed is tried again, seconds
_RETRY: Final = 1.0


class Backlog:
    """Reads the messages of a journal in order, some at a time. On the engine's loop; a worker thread reads.

    Args:
        engine: its loop.
        name: of the instance, for logs.
        journal: holds the messages.
        loaded: called on the loop with records, the plan of each (or the error of a message that this instance cannot
            publish), and the offset after them: the journal does not have the offsets in between that are missing.

    Attributes:
        restore: returns the plan of a payload and a restored context, on the worker thread. Set before the first read.
        is_loading: whether a read is under way.
        is_closed: whether a read that failed is not tried again.
    """

    def __init__(
        self,
        engine: Engine,
        name: str,
        journal: Journal,
        loaded: Callable[[Sequence[Record], Sequence[PublishPlan | MessagingError], int], object],
    ) -> None:
        self._engine = engine
        self._name = name
        self._journal = journal
        self._on_loaded = loaded
        self.restore: Callable[[bytes, MessageContext], PublishPlan]
        self.is_loading = self.is_closed = False
        # --- the worker thread: one at a time
        #: with their plans
        self._contexts: BoundedCache[tuple[str, str], MessageContext] = BoundedCache(1024)
        #: of the last message: many in a row are alike
        self._channel = self._properties = ""
        self._context: MessageContext | None = None
        #: the offset that comes next, and the one at which the iterator ends
        self._records: Iterator[Record] = iter(())
        self._next = self._until = -1

    def load(self, start: int, end: int, most: int, most_bytes: int) -> None:
        """Read the next messages, of those from offset ``start`` to before ``end``.

        Args:
            start, end: the offsets.
            most: number of messages, at most.
            most_bytes: bytes of payloads. The last message may exceed them.
        """
        self.is_loading = True
        workers().submit(lambda: self._load(start, end, most, most_bytes))

    def _load(self, start: int, end: int, most: int, most_bytes: int) -> None:
        records: list[Record] = []
        plans: list[PublishPlan | MessagingError] = []
        try:
            if self._next != start or self._until <= start:
                self._records = self._journal.read(max(start, self._journal.begin), end)
                self._until = end
            for record in self._records:
                records.append(record)
                plans.append(self._plan_of(record))
                most_bytes -= len(record.payload)
                if len(records) >= most or most_bytes <= 0:
                    break
        except MessagingError as error:
            self._next = -1
            self._engine.call(self._failed, (start, end, most, most_bytes), error)
            return
        # an iterator without a record has passed its end: the journal does not have them any more
        self._next = records[-1].offset + 1 if records else self._until
        self._engine.call(self._finish, records, plans, self._next)

    def _plan_of(self, record: Record) -> PublishPlan | MessagingError:
        channel, properties = record.channel, record.properties
        try:
            context = self._context
            if context is None or channel != self._channel or properties != self._properties:
                context = self._contexts.get((channel, properties))
                if context is None:
                    context = self._contexts[channel, properties] = record.context
                self._channel, self._properties, self._context = channel, properties, context
            return self.restore(record.payload, context)
        except MessagingError as error:
            return error
        except Exception as error:  # a defect: it must not hold up the messages behind
            logger.exception("%s: cannot restore the message at offset %d", self._name, record.offset)
            return MessagingError(f"the message cannot be restored: {type(error).__name__}: {error}")

    def _finish(self, records: Sequence[Record], plans: Sequence[PublishPlan | MessagingError], following: int) -> None:
        self.is_loading = False
        self._on_loaded(records, plans, following)

    def _failed(self, wanted: tuple[int, int, int, int], error: MessagingError) -> None:
        if self.is_closed:
            return
        logger.error("%s: cannot read the outbox: %s; trying again in %g s", self._name, error, _RETRY)
        clock.call_later(self._engine.loop, _RETRY, self.load, *wanted)
