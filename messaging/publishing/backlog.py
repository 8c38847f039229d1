"""The backlog of a durable outbox: loads messages that are only on the disk, and makes plans of them."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Final, NamedTuple

from messaging.codecs.cache import BoundedCache
from messaging.errors import MessagingError
from messaging.execution import clock, workers

if TYPE_CHECKING:
    from messaging.execution import Engine
    from messaging.journal import DurableQueue, Record
    from messaging.model import MessageContext, PublishPlan
    from messaging.publishing.stored import StoredPublication

logger = logging.getLogger(__name__)

#: messages that are read from the disk at a time, at most
_LOAD: Final = 512
#: pause before a read that failed is tried again, seconds
_RETRY: Final = 1.0
#: restored contexts that are kept
_CONTEXTS: Final = 1024


class LoadedMessage(NamedTuple):
    """A message that was read from the disk: its plan, or why this instance cannot publish it."""

    offset: int
    payload: bytes
    record: Record
    plan: PublishPlan | MessagingError


class Backlog:
    """Loads the messages of a queue into memory when there is much room. On the loop; a worker thread reads.

    Args:
        engine: its loop.
        name: of the instance, for logs.
        max_messages, max_bytes: bounds of the messages in memory.
        loaded: called on the loop after messages were loaded.

    Attributes:
        queue: the messages. Set before the first read.
        restore: returns the plan of a payload and a restored context, on the worker thread. Set before the first read.
        loaded: messages that were loaded and not taken; those of a read that ends just now are not counted yet.
        is_loading: whether a read is under way.
        is_closed: whether nothing more is read.
    """

    queue: DurableQueue[StoredPublication | LoadedMessage]
    restore: Callable[[bytes, MessageContext], PublishPlan]

    def __init__(
        self, engine: Engine, name: str, max_messages: int, max_bytes: int, loaded: Callable[[], object]
    ) -> None:
        self._engine = engine
        self._name = name
        self._max_messages = max_messages
        self._max_bytes = max_bytes
        self._on_loaded = loaded
        self.loaded = 0
        self.is_loading = self.is_closed = False
        # --- the worker thread: one at a time
        self._contexts: BoundedCache[tuple[str, str], MessageContext] = BoundedCache(_CONTEXTS)

    def read_ahead(self) -> None:
        """Load messages if there is much room in memory."""
        queue = self.queue
        if self.is_closed or self.is_loading or queue.in_memory >= _LOAD:
            return
        room, room_bytes = queue.room()
        if room == self._max_messages or (
            room >= min(_LOAD, self._max_messages // 2 + 1) and room_bytes >= self._max_bytes // 2
        ):
            self.is_loading = True
            workers().submit(partial(self._load, min(room, _LOAD), max(room_bytes, 1)))

    def _load(self, most: int, most_bytes: int) -> None:
        """Load messages. On the worker thread."""
        count, failure = 0, None
        try:
            count = len(self.queue.load(most, most_bytes))
        except MessagingError as error:
            failure = error
        self._engine.call(self._note_loaded, count, failure)

    def restored(self, record: Record) -> LoadedMessage:
        """Return the message of a record. On the worker thread."""
        plan: PublishPlan | MessagingError
        try:
            key = (record.channel, record.properties)
            context = self._contexts.get(key)
            if context is None:
                context = self._contexts[key] = record.context
            plan = self.restore(record.payload, context)
        except MessagingError as error:
            plan = error
        except Exception as error:  # a defect: it must not hold up the messages behind
            logger.exception("%s: cannot restore the message at offset %d", self._name, record.offset)
            plan = MessagingError(f"the message cannot be restored: {type(error).__name__}: {error}")
        return LoadedMessage(record.offset, record.payload, record, plan)

    def _note_loaded(self, count: int, failure: MessagingError | None) -> None:
        self.loaded += count
        if self.is_closed:
            return
        if failure is not None:
            logger.error("%s: cannot read the outbox: %s; trying again in %g s", self._name, failure, _RETRY)
            clock.call_later(self._engine.loop, _RETRY, self._note_loaded, 0, None)
            return
        self.is_loading = False
        self.queue.pass_over()
        self._on_loaded()
