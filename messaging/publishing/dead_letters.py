"""Dead letters of a durable outbox: messages that this instance or its broker refuses for good."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from messaging.errors import JournalFullError, MessagingError
from messaging.execution import Engine, clock, workers

if TYPE_CHECKING:
    from messaging.journal import Journal, Record

logger = logging.getLogger(__name__)

#: dead letters that are kept
_DEAD_LETTERS: Final = 10_000
#: pause before a dead letter is written again after a failure, seconds
_RETRY: Final = 1.0


class DeadLetters:
    """Keeps the messages that cannot be published, beside the journal. On the loop; worker threads write.

    Args:
        engine: its loop.
        name: of the instance, for logs.
        journal: keeps them.
        release: called with the offset and the size of a message that is kept.
    """

    def __init__(self, engine: Engine, name: str, journal: Journal, release: Callable[[int, int], object]) -> None:
        self._engine = engine
        self._name = name
        self._journal = journal
        self._release = release
        #: not kept yet: the messages with their reasons. The first one is written, or tried again after a pause
        self._waiting: deque[tuple[Record, str]] = deque()
        #: whether the first one was released before it is kept, and its failure reported
        self._is_released = self._is_reported = False
        #: whether a worker thread writes the first one, and whether the instance ends; set when a write has ended
        self._is_writing = self._is_finishing = False
        self._written = asyncio.Event()

    def add(self, record: Record, error: MessagingError) -> None:
        """Keep a message, then release it."""
        logger.error(
            "%s: message %s to %r cannot be published: %s; it is a dead letter of %s",
            self._name, record.message_id, record.channel, error, self._journal.path,
        )  # fmt: skip
        self._waiting.append((record, f"{type(error).__name__}: {error}"))
        if len(self._waiting) == 1:
            self._submit()

    def _submit(self) -> None:
        self._is_writing = True
        record, reason = self._waiting[0]
        workers().submit(lambda: self._store(record, reason))

    def _store(self, record: Record, reason: str) -> None:
        """Keep a message. On a worker thread."""
        failure: MessagingError | None = None
        try:
            if self._journal.add_dead_letter(record, reason, most=_DEAD_LETTERS):
                logger.warning("%s: dropped the oldest dead letter: there are %d", self._name, _DEAD_LETTERS)
        except MessagingError as error:
            failure = error
        self._engine.call(self._note_stored, failure)

    def _note_stored(self, failure: MessagingError | None) -> None:
        self._is_writing = False
        self._written.set()
        if not self._waiting:
            return  # it took longer than ``finish`` waits
        record, _ = self._waiting[0]
        # a full disk gets room when the position moves on: the message is tried again, unless this was the last attempt
        has_later_attempt = isinstance(failure, JournalFullError) and not self._is_finishing
        if not self._is_released and (failure is None or has_later_attempt):
            self._is_released = True
            self._release(record.offset, len(record.payload))
        if failure is None:
            self._waiting.popleft()
            self._is_released = self._is_reported = False
            if self._waiting:
                self._submit()
            return
        if self._is_finishing:
            logger.error("%s: dead letters were not kept: %s", self._name, failure)
            return
        if not self._is_reported:
            self._is_reported = True
            logger.error("%s: cannot keep a dead letter: %s; trying again each %g s", self._name, failure, _RETRY)
        clock.call_later(self._engine.loop, _RETRY, self._try_again)

    def _try_again(self) -> None:
        if not self._is_finishing:
            self._submit()

    async def finish(self, timeout: float) -> None:
        """Keep the messages that wait, for at most ``timeout`` seconds or until one cannot be kept.

        The others stay in the journal, for the next instance.
        """
        self._is_finishing = True
        if self._waiting and not self._is_writing:
            self._submit()
        with suppress(TimeoutError):
            async with clock.timeout(timeout):
                while self._is_writing:
                    self._written.clear()
                    await self._written.wait()
        self._waiting.clear()
