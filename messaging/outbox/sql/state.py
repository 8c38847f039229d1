"""The state of a run of a relay that its parts share: whether it is to stop, its problem, and its counters."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from messaging.errors.text import SafeLog
from messaging.execution import Backoff, clock

if TYPE_CHECKING:
    from messaging.errors import DatabaseError

logger = SafeLog(__name__)

#: pauses after a failure of the database or the broker, seconds
_SHORTEST_PAUSE: Final = 0.1
_LONGEST_PAUSE: Final = 15.0


class RunState:
    """The shared state of one run. On one event loop, but for :attr:`is_stopping`.

    Args:
        name: of the relay, for logs.
        count: adds to the counters of the relay.
        until_idle: whether the run ends when no row is ready, and fails where another one waits.

    Attributes:
        is_stopping: whether nothing more is to be claimed and published. Another thread may set it before the run
            has begun.
        stopped: is set when the run is to stop.
    """

    def __init__(self, name: str, count: Callable[..., None], *, until_idle: bool) -> None:
        self.name: Final = name
        self.count: Final = count
        self.until_idle: Final = until_idle
        self.is_stopping = False
        self.stopped: Final = asyncio.Event()
        self._pauses = Backoff(_SHORTEST_PAUSE, _LONGEST_PAUSE)
        #: the present failure of database or broker, for logs
        self._trouble: str | None = None

    async def pause(self) -> None:
        """Wait for a time that grows from call to call, or until the run is to stop."""
        try:
            await clock.wait_for(self.stopped.wait(), next(self._pauses))
        except TimeoutError:
            return

    async def after_failure(self, error: DatabaseError) -> None:
        """Count and log a failure of the database, and pause.

        Raises:
            DatabaseError: the run is one until idle.
        """
        self.count(database_failures=1)
        self.note_trouble(str(error))
        if self.until_idle:
            raise error
        await self.pause()

    def note_trouble(self, trouble: str) -> None:
        """Log ``trouble``, unless one is logged already and not over."""
        if self._trouble is None:
            logger.warning("outbox relay '%s': %s; trying again until it works", self.name, trouble)
        self._trouble = trouble

    def note_recovery(self) -> None:
        """Log that the trouble is over, if there was one; the next pause is a short one."""
        if self._trouble is not None:
            logger.warning("outbox relay '%s': works again, after: %s", self.name, self._trouble)
            self._trouble = None
        self._pauses = Backoff(_SHORTEST_PAUSE, _LONGEST_PAUSE)
