"""The position of a durable outbox: which of its messages need not be sent any more, in memory and on the disk."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final

from messaging.errors import MessagingError
from messaging.execution import clock, workers

if TYPE_CHECKING:
    from collections.abc import Callable

    from messaging.execution import Engine
    from messaging.journal import Cursor

logger = logging.getLogger(__name__)

#: pause before the position is stored: confirms gather, seconds
_PAUSE: Final = 0.003
#: pause before it is stored again after a failure, seconds
_RETRY: Final = 1.0


class Position:
    """Follows the first message that is not settled. On the engine's loop; a worker thread stores it.

    Args:
        engine: its loop.
        name: of the instance, for logs.
        cursor: of the journal; stores the position.
        on_stored: called when a newer position is stored.

    Attributes:
        first: offset of the first message that is not settled.
        stored: the position that is on the disk. On a full disk it is the position that could not be stored: sending
            must go on, because that frees the disk.
    """

    def __init__(self, engine: Engine, name: str, cursor: Cursor, on_stored: Callable[[], object]) -> None:
        self._engine = engine
        self._name = name
        self._cursor = cursor
        self._on_stored = on_stored
        self.first = self.stored = cursor.position
        #: settled offsets beyond ``first``
        self._settled: set[int] = set()
        #: offsets that the journal does not have any more: the first -> the one after the last
        self._missing: dict[int, int] = {}
        self._is_storing = False
        self._is_closed = False

    def settle(self, offset: int) -> None:
        """Note that a message needs not be sent any more."""
        if offset == self.first:
            self._move_to(offset + 1)
        elif offset > self.first:
            self._settled.add(offset)

    def skip(self, first: int, end: int) -> None:
        """Note that the journal does not have the messages from ``first`` to before ``end`` any more."""
        self._missing[first] = end
        if first == self.first:
            self._move_to(first)

    def _move_to(self, position: int) -> None:
        while True:
            if self._settled and position in self._settled:
                self._settled.remove(position)
                position += 1
            elif self._missing and position in self._missing:
                position = self._missing.pop(position)
            else:
                break
        self.first = position
        if not self._is_storing:
            self._store_in(_PAUSE)

    def _store_in(self, pause: float) -> None:
        self._is_storing = True
        clock.call_later(self._engine.loop, pause, self._submit)

    def _submit(self) -> None:
        position = self.first
        workers().submit(lambda: self._store(position))

    def _store(self, position: int) -> None:
        """Store a position. On a worker thread."""
        failure: MessagingError | None = None
        try:
            self._cursor.commit(position)
        except MessagingError as error:
            failure = error
        self._engine.call(self._note_stored, position, failure)

    def _note_stored(self, position: int, failure: MessagingError | None) -> None:
        self._is_storing = False
        self.stored = max(self.stored, position)
        if self._is_closed:
            return
        if failure is not None:
            logger.warning(
                "%s: %s; trying again in %g s; a crash until then sends messages again", self._name, failure, _RETRY
            )
            self._store_in(_RETRY)
        elif self.first > position:
            self._store_in(_PAUSE)
        self._on_stored()

    def close(self) -> None:
        """Store nothing more by itself: :meth:`store_last` follows."""
        self._is_closed = True

    def store_last(self) -> None:
        """Store the position. On a worker thread; raises ``JournalError``."""
        self._cursor.commit(self.first)
