"""Dead letters of a durable outbox: messages that this instance or its broker refuses for good."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final

from messaging.errors import MessagingError
from messaging.execution import workers

if TYPE_CHECKING:
    from collections.abc import Callable

    from messaging.execution import Engine
    from messaging.journal import Journal, Record

logger = logging.getLogger(__name__)

#: dead letters that are kept
_DEAD_LETTERS: Final = 10_000


class DeadLetters:
    """Keeps the messages that cannot be published, beside the journal. On the loop; worker threads write.

    Args:
        engine: its loop.
        name: of the instance, for logs.
        journal: keeps them.
        settle: called with the offset of a message that is kept.
    """

    def __init__(self, engine: Engine, name: str, journal: Journal, settle: Callable[[int], object]) -> None:
        self._engine = engine
        self._name = name
        self._journal = journal
        self._settle = settle

    def add(self, record: Record, error: MessagingError) -> None:
        """Keep a message, then settle it."""
        logger.error(
            "%s: message %s to %r cannot be published: %s; it is a dead letter of %s",
            self._name, record.message_id, record.channel, error, self._journal.path,
        )  # fmt: skip
        workers().submit(lambda: self._store(record, f"{type(error).__name__}: {error}"))

    def _store(self, record: Record, reason: str) -> None:
        """Keep a message. On a worker thread."""
        try:
            dropped = self._journal.add_dead_letter(record, reason, most=_DEAD_LETTERS)
        except MessagingError as failure:
            logger.error("%s: %s; the message is sent again after a restart", self._name, failure)
            return
        if dropped:
            logger.warning("%s: dropped the oldest dead letter: there are %d", self._name, _DEAD_LETTERS)
        self._engine.call(self._settle, record.offset)
