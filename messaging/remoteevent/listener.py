"""Listeners of remote events (EV.2.3.1): how senders pass events to them, and what their failures mean.

**Threads.** ``notify`` of a listener of this process runs on a worker thread, or as a task on the loop that was running
when its target was made if it is a coroutine function. It is called for one event of a sender at a time; several
senders may call it side by side. Between two events the target looks whether the rest is still wanted.

**Time limits.** A call that exceeds its time limit counts as failed, and its thread or task is left to itself; until it
returns, further events fail at once. :meth:`TimeLimits.begin` and :meth:`TimeLimits.end` may be called on any thread;
calls expire on the loop of the engine.
"""

from __future__ import annotations

import asyncio
import enum
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final, Protocol, runtime_checkable

from messaging.environment.forks import LiveObjects
from messaging.errors import (
    ArgumentError,
    CodecError,
    ConversionError,
    DeadlineError,
    InvalidEventError,
    ListenerGoneError,
    MessagingError,
    ReplyError,
    UnknownEventError,
)
from messaging.errors.checks import check_result, is_coroutine
from messaging.errors.text import brief
from messaging.execution import (
    Deadlines,
    Promise,
    clock,
    engine,
    handlers_loop,
    mailbox,
    result_of,
    running_loop,
    seconds,
    workers,
)
from messaging.remoteevent.event import EventKind, RemoteEvent

#: the outcome of a notification: ``None`` if the listener returned, otherwise the failure
Outcome = MessagingError | None


@runtime_checkable
class RemoteEventListener(Protocol):
    """Receives notifications of events (EV.2.3.1)."""

    def notify(self, event: RemoteEvent, /) -> Any:
        """Note the event, and return soon (EV.2.3.2).

        Returning acknowledges the notification. The same event may arrive again: source, id and sequence number tell.

        Raises:
            UnknownEventError: the listener has no interest in this kind of event: the sender drops the event, sends no
                further ones of the kind, and may cancel the registration (EV.2.3.3).
            ListenerGoneError: the listener does not exist any more: the sender stops the delivery.
            ValueError, TypeError, DecodeError: the event itself is unusable: the sender drops it.
            Exception: any other one: the sender tries again, as its policy says.
        """


@runtime_checkable
class EventTarget(Protocol):
    """Takes several events at a time: third parties and stubs of listeners (EV.3.4).

    Events that are passed together travel in one request, and are stored with one sync of the disk.
    """

    def deliver(self, events: Sequence[RemoteEvent], /) -> Promise[list[Outcome]]:
        """Notify of events, in order. It returns soon and does not raise. On any thread that may block for moments.

        Callers have one batch of a stream under way at a time: with two, a failure of the first would change the order.

        Args:
            events: at least one.

        Returns:
            The promise of the outcomes of the first events, one for each. The list ends behind the first failure whose
            disposition is ``RETRY`` or ``GONE``, and where the target takes no more at once: later events were not
            tried. It has at least one outcome. The promise never fails, and has a deadline.
        """


class WantedEvents(list["RemoteEvent"]):
    """Events of one delivery that may stop being wanted before all are passed: their lease ends, say (EV.2.1).

    A target that passes events one by one looks between two of them; see :func:`wanted_test`.

    Args:
        events: the events.
        is_wanted: returns whether the rest of them is still to be passed. Quick; on any thread.
    """

    __slots__ = ("is_wanted",)

    def __init__(self, events: Iterable[RemoteEvent], is_wanted: Callable[[], bool]) -> None:
        super().__init__(events)
        self.is_wanted = is_wanted


class WithdrawnError(DeadlineError):
    """The events stopped being wanted before the first one was passed. It counts against neither event nor listener."""


def wanted_test(events: Sequence[RemoteEvent]) -> Callable[[], bool]:
    """Return the function that tells whether the rest of ``events`` is still to be passed."""
    return events.is_wanted if isinstance(events, WantedEvents) else lambda: True


def outcomes_of(promise: Promise[list[Outcome]]) -> list[Outcome]:
    """Return the outcomes that a target promised: at least one, also if its answer is not as it must be."""
    error = promise.exception(0)
    if error is not None:
        return [error]
    outcomes = promise.result(0)
    if not isinstance(outcomes, list) or not outcomes:
        return [DeadlineError("the listener returned no outcome")]
    return outcomes


class BatchListener:
    """Base of listeners that take several events at a time: they define ``deliver``, and ``notify`` is made of it."""

    def deliver(self, events: Sequence[RemoteEvent], /) -> Promise[list[Outcome]]:
        """See :class:`EventTarget`."""
        raise NotImplementedError

    def notify(self, event: RemoteEvent, /) -> None:
        """Notify of one event, and wait for its outcome.

        Raises:
            UnknownEventError, ListenerGoneError: see :class:`RemoteEventListener`.
            MessagingError: the notification failed otherwise.
            WouldBlockError: the thread runs an event loop: ``await`` :meth:`deliver`. Nothing was done.
        """
        outcome = result_of(lambda: self.deliver([event]), "the listener", "`await` deliver([event])")[0]
        if outcome is not None:
            raise outcome


#: exceptions of listeners in other processes that refuse the value, not the time
_REFUSALS: Final = frozenset({"ValueError", "TypeError"})


class Disposition(enum.Enum):
    """What a sender does after a notification failed."""

    #: drop the event, and send no further events of its kind (EV.2.3.3)
    UNKNOWN_EVENT = "unknown event"
    #: keep the event, and stop the delivery: the listener does not exist any more
    GONE = "gone"
    #: drop the event, and go on with the next one: the listener refuses the event itself
    BAD_EVENT = "bad event"
    #: keep the event, and try again: whether the listener got it is not known, or it cannot take it now
    RETRY = "retry"


def disposition(error: MessagingError) -> Disposition:
    """Return what a sender does after ``error``."""
    if isinstance(error, UnknownEventError):
        return Disposition.UNKNOWN_EVENT
    if isinstance(error, ListenerGoneError):
        return Disposition.GONE
    if isinstance(error, (InvalidEventError, ArgumentError, CodecError, ConversionError)):
        return Disposition.BAD_EVENT
    if isinstance(error, ReplyError) and error.kind in _REFUSALS:
        return Disposition.BAD_EVENT
    return Disposition.RETRY


def as_failure(error: BaseException) -> MessagingError:
    """Return the exception of a listener as a failure of the notification."""
    if isinstance(error, MessagingError):
        return error
    # classes of subclasses are not known to senders in other processes
    name = type(error).__name__
    kind = next((each.__name__ for each in (ValueError, TypeError) if isinstance(error, each)), name)
    return ReplyError(kind, f"{'' if kind == name else f'{name}: '}{error}"[:500])


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
                outcome: Outcome = None
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
                outcome: Outcome = None
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
        """Yield the events that a listener takes at once, as long as they are wanted, but for kinds that it refused."""
        is_wanted = wanted_test(self.events)
        until = clock.monotonic() + _LONGEST
        for count, event in enumerate(self.events):
            if count and (count >= _MOST or clock.monotonic() >= until):
                return
            if not is_wanted():
                if not count:
                    self.note(WithdrawnError("the events are no longer wanted"))
                return
            if not self._refused or (refusal := self._refused.get(event.kind)) is None:
                yield event
            elif not self.note(refusal):
                return

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
