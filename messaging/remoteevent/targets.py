"""Listeners of this process as targets: each notification runs on a worker thread, or on an event loop.

**Threads.** ``notify`` of a listener runs on a worker thread, or as a task on the loop that was running when the target
was made if it is a coroutine function. It is called for one event of a sender at a time; several senders may call it
side by side. Between two events the target looks whether the rest is still wanted.

**Time limits.** A call that exceeds its time limit counts as failed, and its thread or task is left to itself; until it
returns, further events fail at once. :meth:`TimeLimits.begin` and :meth:`TimeLimits.end` may be called on any thread;
calls expire on the loop of the engine."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, Final

from messaging.environment.forks import LiveObjects
from messaging.errors import ArgumentError, DeadlineError, MessagingError, UnknownEventError
from messaging.errors.checks import check_result, is_coroutine
from messaging.errors.text import brief
from messaging.execution import (
    Deadlines,
    Promise,
    clock,
    engine,
    handlers_loop,
    mailbox,
    running_loop,
    seconds,
    workers,
)
from messaging.remoteevent.listener import Disposition, WithdrawnError, as_failure, disposition, wanted_test

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Iterator, Sequence

    from messaging.remoteevent.event import EventKind, RemoteEvent
    from messaging.remoteevent.listener import EventTarget, Outcome, RemoteEventListener


#: time limit of one notification, seconds
TIME_LIMIT: Final = 30.0


def check_wait(timeout: object) -> float:
    """Return the seconds that a call waits at most. Raises ``ArgumentError`` unless it is a number from 0."""
    limit = seconds(timeout)
    if isinstance(timeout, bool) or limit < 0:
        raise ArgumentError(f"timeout must be a number of seconds from 0, not {brief(timeout)}")
    return limit


class LimitedCall:
    """One call, or several calls one after the other, each with the time limit.

    Args:
        expire: called once if a call takes too long; it must be quick.
    """

    __slots__ = ("deadline", "expire", "is_expired")

    def __init__(self, expire: Callable[[], object]) -> None:
        self.expire = expire
        #: monotonic time
        self.deadline = 0.0
        self.is_expired = False


class TimeLimits:
    """Watches the calls to one object. Thread safe.

    Args:
        limit: seconds that each call may take.

    Raises:
        ArgumentError: ``limit`` is no number above 0.
    """

    def __init__(self, limit: float = TIME_LIMIT) -> None:
        self.limit = seconds(limit, "time_limit")
        if isinstance(limit, bool) or self.limit <= 0:
            raise ArgumentError(f"time_limit must be a number of seconds above 0, not {brief(limit)}")
        self.after_fork()
        _time_limits.add(self)

    def after_fork(self) -> None:
        """See ``Forkable``: the calls are made by threads of the parent; the child has an engine of its own."""
        self._lock = threading.Lock()  # guards the following
        self._calls: set[LimitedCall] = set()
        self._stuck: set[LimitedCall] = set()
        self._deadlines: Deadlines | None = None

    @property
    def is_stuck(self) -> bool:
        """Whether a call that exceeded its limit has not returned yet."""
        return bool(self._stuck)

    def begin(self, call: LimitedCall) -> None:
        """Watch a call that is about to be made."""
        call.deadline = clock.monotonic() + self.limit
        with self._lock:
            self._calls.add(call)
            if self._deadlines is None:
                self._deadlines = Deadlines(engine(), self.limit, self._scan)
            deadlines = self._deadlines
        deadlines.watch(self.limit)

    def go_on(self, call: LimitedCall) -> None:
        """Begin the time limit anew: one call returned, and the next one follows."""
        call.deadline = clock.monotonic() + self.limit

    def end(self, call: LimitedCall) -> None:
        """Watch a call no more: it has returned."""
        with self._lock:
            self._calls.discard(call)
            self._stuck.discard(call)

    def _scan(self, now: float) -> float | None:
        with self._lock:
            expired = [each for each in self._calls if each.deadline <= now]
            for each in expired:
                each.is_expired = True
                self._calls.discard(each)
                self._stuck.add(each)
            left = min((each.deadline - now for each in self._calls), default=None)
        for each in expired:
            each.expire()
        return left


_time_limits: Final = LiveObjects[TimeLimits]()


#: bounds of what a listener of this process takes at once: as many events arrive again after their sender was killed
_MOST: Final = 32
#: the same, seconds
_LONGEST: Final = 0.05


class LocalTarget:
    """Calls a listener of this process. Thread safe.

    It takes up to 32 events at once, and no further one after 50 ms: their sender learns these outcomes first.

    Args:
        listener: an object with ``notify``, or a function of one parameter, also a coroutine function.
        time_limit: seconds that one call may take.

    Raises:
        ArgumentError: the listener cannot be called.
    """

    def __init__(self, listener: Any, time_limit: float = TIME_LIMIT) -> None:
        self._notify: Callable[[RemoteEvent], Any] = notifier_of(listener)
        self._limits = TimeLimits(time_limit)
        self._loop = (running_loop() or handlers_loop()) if is_coroutine(self._notify) else None

    def deliver(self, events: Sequence[RemoteEvent]) -> Promise[list[Outcome]]:
        """See :class:`~messaging.remoteevent.listener.EventTarget`."""
        limits = self._limits
        if limits.is_stuck:
            return settled([DeadlineError("the listener has not returned from an earlier notification")])
        batch = NotifiedEvents(events)
        call = LimitedCall(
            lambda: batch.fail(DeadlineError(f"the listener took longer than {limits.limit:g} s for one notification"))
        )
        limits.begin(call)
        if self._loop is None:
            workers().submit(lambda: self._call(batch, call))
        else:
            loop = self._loop
            mailbox(loop).post(lambda: batch.start(loop, self._call_async(batch, call)))
        return batch.promise

    def _call(self, batch: NotifiedEvents, call: LimitedCall) -> None:
        try:
            for event in batch.further():
                outcome = batch.refusal(event)
                if outcome is None:
                    try:
                        check_result(self._notify(event), "a listener")
                    except Exception as error:  # noqa: BLE001  # of the listener
                        outcome = as_failure(error)
                if not batch.note(outcome):
                    break
                self._limits.go_on(call)
        finally:
            self._limits.end(call)
            batch.settle()

    async def _call_async(self, batch: NotifiedEvents, call: LimitedCall) -> None:
        try:
            for event in batch.further():
                outcome = batch.refusal(event)
                if outcome is None:
                    try:
                        await self._notify(event)
                    except Exception as error:  # noqa: BLE001  # of the listener
                        outcome = as_failure(error)
                if not batch.note(outcome):
                    break
                self._limits.go_on(call)
        finally:
            self._limits.end(call)
            batch.settle()


class NotifiedEvents:
    """Events on their way to code of the application, and their outcomes so far. Thread safe."""

    __slots__ = ("_lock", "_outcomes", "_refused", "_task", "events", "is_settled", "promise")

    def __init__(self, events: Sequence[RemoteEvent]) -> None:
        self.events = events
        self.promise: Promise[list[Outcome]] = Promise("notify a listener")
        self.is_settled = False
        self._lock = threading.Lock()  # guards the outcomes and `is_settled`
        self._outcomes: list[Outcome] = []
        #: kinds that the listener does not know
        self._refused: dict[EventKind, Outcome] = {}
        self._task: asyncio.Task[None] | None = None

    def start(self, loop: asyncio.AbstractEventLoop, coroutine: Any) -> None:
        """Run the calls as a task. On ``loop``."""
        self._task = loop.create_task(coroutine)

    def further(self) -> Iterator[RemoteEvent]:
        """Yield the events that a listener takes at once, as long as they are wanted."""
        is_wanted = wanted_test(self.events)
        until = clock.monotonic() + _LONGEST
        for count, event in enumerate(self.events):
            if count and (count >= _MOST or clock.monotonic() >= until):
                return
            if not is_wanted():
                if not count:
                    self.note(WithdrawnError("the events are no longer wanted"))
                return
            yield event

    def refusal(self, event: RemoteEvent) -> Outcome:
        """Return the refusal of an earlier event of this kind in the batch: the listener is not asked again."""
        return self._refused.get(event.kind) if self._refused else None

    def note(self, outcome: Outcome) -> bool:
        """Add the outcome of the next event; return whether the one after it is to be tried."""
        with self._lock:
            if self.is_settled:
                return False
            if isinstance(outcome, UnknownEventError):
                self._refused[self.events[len(self._outcomes)].kind] = outcome
            self._outcomes.append(outcome)
        return outcome is None or disposition(outcome) in (Disposition.UNKNOWN_EVENT, Disposition.BAD_EVENT)

    def fail(self, error: MessagingError) -> None:
        """Settle with ``error`` as the outcome of the next event."""
        self.note(error)
        self.settle()

    def settle(self) -> None:
        """Resolve the promise with the outcomes so far; idempotent."""
        self.settle_with(self._outcomes or [DeadlineError("the notification was cancelled")])

    def settle_with(self, outcomes: list[Outcome]) -> None:
        """Resolve the promise with these outcomes, unless it has some."""
        with self._lock:
            if self.is_settled:
                return
            self.is_settled = True
        self.promise.resolve(outcomes)


def notifier_of(listener: Any) -> Callable[[RemoteEvent], Any]:
    """Return the function that notifies ``listener``; raise ``ArgumentError`` if it is no listener."""
    notify = None if isinstance(listener, type) else getattr(listener, "notify", None)
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
    deliver = None if isinstance(listener, type) else getattr(listener, "deliver", None)
    if callable(deliver) and not is_coroutine(deliver):
        return listener  # type: ignore[return-value]
    return LocalTarget(listener)


def settled(outcomes: list[Outcome]) -> Promise[list[Outcome]]:
    """Return a promise that has its outcomes already."""
    return Promise.resolved(outcomes, "notify a listener")
