"""Listeners of this process as targets: each notification runs on a worker thread, or on an event loop.

**Threads.** ``notify`` of a listener runs on a worker thread, or as a task on the loop that was running when the target
was made if it is a coroutine function. It is called for one event at a time. A call that exceeds its time limit counts
as failed, and its thread or task is left to itself; until it returns, further events fail at once.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

from messaging.errors import ArgumentError, DeadlineError
from messaging.execution import (
    Deadlines,
    Promise,
    engine,
    handlers_loop,
    is_coroutine,
    mailbox,
    running_loop,
    seconds,
    workers,
)
from messaging.remoteevent.failures import Disposition, as_failure, disposition

if TYPE_CHECKING:
    from messaging.remoteevent.event import RemoteEvent
    from messaging.remoteevent.listener import EventTarget, Outcome, RemoteEventListener

#: time limit of one notification, seconds
TIME_LIMIT: Final = 30.0


class LocalTarget:
    """Calls a listener of this process. Thread safe.

    Args:
        listener: an object with ``notify``, or a function of one parameter, also a coroutine function.
        time_limit: seconds that one call may take.

    Raises:
        ArgumentError: the listener cannot be called.
    """

    def __init__(self, listener: Any, time_limit: float = TIME_LIMIT) -> None:
        self._notify: Callable[[RemoteEvent], Any] = notifier_of(listener)
        self._time_limit = _positive(time_limit)
        self._is_async = is_coroutine(self._notify)
        self._loop = (running_loop() or handlers_loop()) if self._is_async else None
        self._lock = threading.Lock()  # guards the following
        self._batch: _Batch | None = None
        self._deadlines = Deadlines(engine(), self._time_limit, self._scan)

    def deliver(self, events: Sequence[RemoteEvent]) -> Promise[list[Outcome]]:
        """See :class:`~messaging.remoteevent.listener.EventTarget`."""
        batch = _Batch(events)
        with self._lock:
            busy = self._batch
            if busy is None:
                self._batch = batch
        if busy is not None:
            batch.promise.resolve([DeadlineError("the listener has not returned from an earlier notification")])
            return batch.promise
        batch.deadline = time.monotonic() + self._time_limit
        self._deadlines.watch(self._time_limit)
        if self._loop is None:
            workers().submit(lambda: self._call(batch))
        else:
            loop = self._loop
            mailbox(loop).post(lambda: batch.start(loop, self._call_async(batch)))
        return batch.promise

    def _call(self, batch: _Batch) -> None:
        for event in batch.events:
            try:
                self._notify(event)
            except Exception as error:  # noqa: BLE001  # of the listener
                if not batch.note(as_failure(error)):
                    break
            else:
                if not batch.note(None):
                    break
            batch.deadline = time.monotonic() + self._time_limit
        self._end(batch)

    async def _call_async(self, batch: _Batch) -> None:
        try:
            for event in batch.events:
                try:
                    await self._notify(event)
                except Exception as error:  # noqa: BLE001  # of the listener
                    if not batch.note(as_failure(error)):
                        break
                else:
                    if not batch.note(None):
                        break
                batch.deadline = time.monotonic() + self._time_limit
        finally:
            self._end(batch)

    def _end(self, batch: _Batch) -> None:
        with self._lock:
            if self._batch is batch:
                self._batch = None
        batch.settle()

    def _scan(self, now: float) -> float | None:
        """Fail a call that takes too long. On the loop of the engine."""
        batch = self._batch
        if batch is None or batch.is_settled:
            return None
        left = batch.deadline - now
        if left > 0:
            return left
        batch.note(DeadlineError(f"the listener took longer than {self._time_limit:g} s"))
        batch.settle()
        return None


class _Batch:
    """Events on their way to a listener."""

    __slots__ = ("_lock", "_outcomes", "_task", "deadline", "events", "is_settled", "promise")

    def __init__(self, events: Sequence[RemoteEvent]) -> None:
        self.events = events
        self.promise: Promise[list[Outcome]] = Promise("notify a listener")
        self.deadline = 0.0
        self.is_settled = False
        self._lock = threading.Lock()  # guards the outcomes and `is_settled`
        self._outcomes: list[Outcome] = []
        self._task: asyncio.Task[None] | None = None

    def start(self, loop: asyncio.AbstractEventLoop, coroutine: Any) -> None:
        """Run the calls as a task. On ``loop``."""
        self._task = loop.create_task(coroutine)

    def note(self, outcome: Outcome) -> bool:
        """Add the outcome of the next event; return whether the one after it is to be tried."""
        with self._lock:
            if self.is_settled:
                return False
            self._outcomes.append(outcome)
        return outcome is None or disposition(outcome) in (Disposition.UNKNOWN_EVENT, Disposition.BAD_EVENT)

    def settle(self) -> None:
        """Resolve the promise with the outcomes so far; idempotent."""
        with self._lock:
            if self.is_settled:
                return
            self.is_settled = True
            outcomes = self._outcomes or [DeadlineError("the notification was cancelled")]
        self.promise.resolve(outcomes)


def notifier_of(listener: Any) -> Callable[[RemoteEvent], Any]:
    """Return the function that notifies ``listener``; raise ``ArgumentError`` if it is none."""
    notify = getattr(listener, "notify", None)
    if callable(notify):
        return notify  # type: ignore[no-any-return]
    if callable(listener) and not isinstance(listener, type):
        return listener  # type: ignore[no-any-return]
    raise ArgumentError(
        f"a listener of remote events must have a method `notify`, or be a function, not {type(listener).__name__}"
    )


def as_target(listener: RemoteEventListener | EventTarget | Callable[[RemoteEvent], Any]) -> EventTarget:
    """Return ``listener`` if it takes several events at a time, otherwise a :class:`LocalTarget` that calls it.

    Raises:
        ArgumentError: it is no listener.
    """
    if not isinstance(listener, type) and callable(getattr(listener, "deliver", None)):
        return listener  # type: ignore[return-value]
    return LocalTarget(listener)


def settled(outcomes: list[Outcome]) -> Promise[list[Outcome]]:
    """Return a promise that has its outcomes already."""
    promise: Promise[list[Outcome]] = Promise("notify a listener")
    promise.resolve(outcomes)
    return promise


def _positive(value: float) -> float:
    found = seconds(value, "time_limit")
    if found <= 0:
        raise ArgumentError(f"time_limit must be above 0 seconds, not {value!r:.80}")
    return found
