"""Delivery of queued events to one listener: in order, with retries (EV.3.1).

**Threads.** Everything runs on worker threads, on one at a time for each delivery. Events are passed to the target in
batches, one at a time: the next one follows when the outcomes of the last one are known, so a failure never changes the
order. Callbacks run on the same worker threads, without a lock.

**Bounds.** A batch has at most 256 events. The queue belongs to the owner of the delivery, which bounds it. A target
has deadlines of its own, so a batch always ends.
"""

from __future__ import annotations

import contextlib
import random
import threading
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any, Final, Protocol

from messaging.environment.signals import on_failure
from messaging.errors import ArgumentError, DeadlineError, MessagingError
from messaging.errors.text import SafeLog
from messaging.execution import Promise, Serial, clock, engine, may_block, seconds
from messaging.leases import GrantedLease, Lease, release
from messaging.remoteevent.event import EventId, EventKind, RemoteEvent
from messaging.remoteevent.listener import Disposition, WantedEvents, WithdrawnError, disposition, outcomes_of

if TYPE_CHECKING:
    from messaging.remoteevent.listener import EventTarget, Outcome

logger = SafeLog(__name__)

#: begins the names of the positions of registrations in the journal of a durable party
POSITION: Final = "lease "
#: events of one batch
BATCH: Final = 256
#: how long closing waits for the batches that are with listeners, seconds
CLOSE_TIMEOUT: Final = 5.0
#: each delay is this many times as long as the one before
_GROWTH: Final = 2.0
#: part of a delay that is random
_JITTER: Final = 0.2


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """How often and how long an event is tried again after an indefinite failure. Immutable.

    Attributes:
        attempts: notifications of one event until it is dropped; ``None``: unlimited.
        max_age: seconds from the first failed notification of an event until it is dropped; ``None``: unlimited.
        first_delay: seconds between the first two attempts; later delays are twice as long each.
        max_delay: longest delay, seconds.

    Raises:
        ArgumentError: a value is not as described.
    """

    attempts: int | None = None
    max_age: float | None = None
    first_delay: float = 0.1
    max_delay: float = 30.0

    def __post_init__(self) -> None:
        attempts = self.attempts
        if attempts is not None and (isinstance(attempts, bool) or not isinstance(attempts, int) or attempts < 1):
            raise ArgumentError(f"attempts must be an int from 1, or None, not {attempts!r:.80}")
        for name in ("max_age", "first_delay", "max_delay"):
            value = getattr(self, name)
            if value is None and name == "max_age":
                continue
            if isinstance(value, bool) or seconds(value, name) <= 0:
                raise ArgumentError(f"{name} must be a number of seconds above 0, not {value!r:.80}")

    def delay_after(self, failures: int) -> float:
        """Return the seconds until the next attempt, after so many failed ones."""
        delay = min(self.first_delay * _GROWTH ** min(failures - 1, 60), self.max_delay)
        return delay * (1 - _JITTER * random.random())  # noqa: S311  # no secret

    def is_exhausted(self, failures: int, age: float) -> bool:
        """Return whether an event that failed so often, the first time ``age`` seconds ago, is dropped."""
        return (self.attempts is not None and failures >= self.attempts) or (
            self.max_age is not None and age >= self.max_age
        )


#: of generators without a disk: a listener that is away for longer misses events. The last attempt follows 41 s to
#: 51 s after the first, also where each fails at once: a broker that restarts has its clients back by then
SHORT: Final = RetryPolicy(attempts=10, max_age=60.0)
#: of durable parties
PATIENT: Final = RetryPolicy()


class EventQueue(Protocol):
    """The events that wait for one listener. Used by one thread at a time, beside the threads that add events."""

    def peek(self, most: int) -> list[RemoteEvent]:
        """Return the first events, in order, without removing them; none if the queue is empty.

        Raises:
            MessagingError: they cannot be read now.
        """

    def settle(self, count: int) -> None:
        """Remove the next ``count`` events of the last :meth:`peek`, in order. Raises ``MessagingError``."""


class MemoryQueue:
    """A bounded queue of events in memory; an ``EventQueue``. When it is full, the oldest event is dropped.

    Any thread puts; one thread at a time reads.

    Args:
        limit: events that may wait.
        handback: of the registration; each event gets it when it is read.
    """

    def __init__(self, limit: int, handback: Any = None) -> None:
        self._limit = limit
        self._handback = handback
        self._lock = threading.Lock()  # guards the following
        self._events: deque[RemoteEvent] = deque()
        #: numbers of events that left the queue, and that had left it when the last peek, or settled part of it, ended
        self._left = self._read = 0

    def put(self, event: RemoteEvent) -> bool:
        """Add an event; return whether the oldest one was dropped for it."""
        with self._lock:
            is_full = len(self._events) >= self._limit
            if is_full:
                self._events.popleft()
                self._left += 1
            self._events.append(event)
        return is_full

    def peek(self, most: int) -> list[RemoteEvent]:
        """See ``EventQueue``."""
        with self._lock:
            self._read = self._left
            events = list(islice(self._events, most))
        if self._handback is None:
            return events
        return [event.with_handback(self._handback) for event in events]

    def settle(self, count: int) -> None:
        """See ``EventQueue``. Events that were dropped meanwhile count among the settled ones."""
        with self._lock:
            self._read += count
            while self._left < self._read and self._events:
                self._events.popleft()
                self._left += 1

    def __len__(self) -> int:
        return len(self._events)


@dataclass(slots=True)
class DeliveryCounts:
    """Numbers of events since the delivery was made.

    Attributes:
        delivered: acknowledged by the listener.
        refused: dropped, because the listener does not know their kind.
        invalid: dropped, because the listener refused the event itself.
        dropped: dropped, because the retry policy was exhausted.
        retries: notifications after a failed one.
        overflowed: dropped, because too many events waited in memory.
    """

    delivered: int = 0
    refused: int = 0
    invalid: int = 0
    dropped: int = 0
    retries: int = 0
    overflowed: int = 0


class EventDelivery:
    """Passes the events of a queue to one listener. Thread safe.

    Args:
        name: of the delivery, for the log.
        target: the listener.
        queue: the events.
        policy: for indefinite failures.
        on_unknown_event: called with the kind when the listener does not know it.
        on_gone: called when the listener does not exist any more; delivery has stopped.
        lease: of the registration: when it has expired nothing is delivered, also before its landlord has noticed.
        is_enabled: whether delivery begins at once.
    """

    def __init__(
        self,
        name: str,
        target: EventTarget,
        queue: EventQueue,
        *,
        policy: RetryPolicy = PATIENT,
        on_unknown_event: Callable[[EventKind], Any] | None = None,
        on_gone: Callable[[MessagingError], Any] | None = None,
        lease: Lease | None = None,
        is_enabled: bool = True,
    ) -> None:
        self.name = name
        self.counts = DeliveryCounts()
        self._target = target
        self._queue = queue
        self._policy = policy
        self._on_unknown_event = on_unknown_event
        self._on_gone = on_gone
        self._lease = lease
        self._lock = threading.Lock()  # guards the following five
        self._is_enabled = is_enabled
        #: rises when delivery is enabled
        self._enabled = 0
        self._is_closed = False
        #: a batch is with the target
        self._is_busy = False
        #: monotonic time of the next attempt after a failure; 0 without one
        self._retry_at = 0.0
        self._stopped: list[Promise[None]] = []
        # --- of the worker
        self._batch: list[RemoteEvent] = []
        #: the target that has the batch
        self._asked: EventTarget = target
        self._outcomes: list[Outcome] | None = None
        #: failed notifications of the first event, and when the first one was
        self._failures = 0
        self._failing_since = 0.0
        #: failures of the queue, and of the target to answer as it must, in a row
        self._problems = 0
        #: whether events may wait that the worker has not seen
        self._is_pending = True
        self._serial = Serial(self._work, self._has_work)

    # --- any thread

    def wake(self) -> None:
        """Deliver: events were added to the queue."""
        self._is_pending = True
        self._start()

    def enable(self, target: EventTarget | None = None) -> None:
        """Deliver from now on; the next attempt is made at once.

        Args:
            target: takes the place of the present one, after the event that that has; ``None``: the present one. What
                the present one acknowledges counts; the rest of its batch is passed to the new target.
        """
        with self._lock:
            if target is not None:
                self._target = target
            self._is_enabled = not self._is_closed
            self._enabled += 1
            self._retry_at = 0.0
        self._is_pending = True
        self._start()

    def disable(self) -> Promise[None]:
        """Stop after the event that is with the listener; return the promise that its outcome is known.

        A listener in another process may have up to a batch.
        """
        promise: Promise[None] = Promise(f"stop the delivery to {self.name!r}")
        promise.was_retrieved = True
        with self._lock:
            self._is_enabled = False
            is_busy = self._is_busy
            if is_busy:
                self._stopped.append(promise)
        if not is_busy:
            promise.resolve(None)
        return promise

    def close(self) -> Promise[None]:
        """Stop for good; as :meth:`disable`."""
        self._is_closed = True
        return self.disable()

    @property
    def is_enabled(self) -> bool:
        """Whether events are delivered."""
        return self._is_enabled

    @property
    def is_busy(self) -> bool:
        """Whether a batch is with the listener."""
        return self._is_busy

    # --- worker threads

    def _start(self) -> None:
        if self._has_work():
            self._serial.wake()

    def _has_work(self) -> bool:
        if self._outcomes is not None:
            return True
        return (
            self._is_pending
            and self._is_enabled
            and not self._is_busy
            and (not self._retry_at or clock.monotonic() >= self._retry_at)
        )

    def _work(self) -> None:
        while self._has_work():
            outcomes, self._outcomes = self._outcomes, None
            try:
                if outcomes is not None:
                    self._settle(outcomes)
                else:
                    self._pass_on()
            except MessagingError as error:
                self._note_problem(error)
            except Exception as error:
                logger.exception("delivery to '%s' failed; it is tried again", self.name)
                self._note_problem(error)

    @property
    def _has_ended(self) -> bool:
        return self._lease is not None and self._lease.is_ended

    def _pass_on(self) -> None:
        self._is_pending = False
        enabled = self._enabled
        if self._has_ended:
            return
        events = self._queue.peek(BATCH)
        if not events:
            return
        with self._lock:
            if not self._is_enabled or self._enabled != enabled:  # another reader may have taken them
                self._is_pending = True
                return
            self._is_busy = True
            target = self._asked = self._target
        self._batch = events
        with on_failure(self._release):
            promise = target.deliver(WantedEvents(events, lambda: self._is_wanted(target)))
            promise.listen(lambda: self._answered(promise))

    def _is_wanted(self, target: EventTarget) -> bool:
        """Return whether ``target`` is to get the rest of its batch. On any thread."""
        return self._is_enabled and self._target is target and not self._has_ended

    def _answered(self, promise: Promise[list[Outcome]]) -> None:
        """Hand the outcomes to the worker. On the resolving thread, also the engine's."""
        promise.was_retrieved = True
        self._outcomes = outcomes_of(promise)
        self._serial.wake()

    def _settle(self, outcomes: list[Outcome]) -> None:
        events, self._batch = self._batch, []
        self._problems = 0
        with self._lock:
            is_replaced = self._asked is not self._target
        done = 0
        stop: MessagingError | None = None
        delivered = 0
        for event, outcome in zip(events, outcomes, strict=False):
            if outcome is None:
                delivered += 1
            elif is_replaced or isinstance(outcome, WithdrawnError):
                break  # the failure is one of the earlier target, or none
            else:
                found = disposition(outcome)
                if found is Disposition.UNKNOWN_EVENT:
                    self.counts.refused += 1
                    self._call(self._on_unknown_event, event.kind)
                elif found is Disposition.BAD_EVENT:
                    self.counts.invalid += 1
                    logger.warning(
                        "delivery to '%s': the listener refused event %d of %r: %s; the event is dropped",
                        self.name, event.sequence_number, event.kind, outcome,
                    )  # fmt: skip
                else:
                    stop = outcome
                    break
            done += 1
        self.counts.delivered += delivered
        is_gone = stop is not None and disposition(stop) is Disposition.GONE
        try:
            if done:
                self._failures = 0
                self._queue.settle(done)
            if stop is not None and not is_gone:
                self._fail(events[done], stop)
        finally:
            if is_gone:
                with self._lock:
                    self._is_enabled = False
            self._is_pending = True
            self._release()
        if is_gone and stop is not None:
            logger.warning("delivery to '%s': the listener is gone: %s; delivery stops", self.name, stop)
            self._call(self._on_gone, stop)

    def _release(self) -> None:
        with self._lock:
            self._is_busy = False
            stopped, self._stopped = self._stopped, []
        for each in stopped:
            each.resolve(None)

    def _fail(self, event: RemoteEvent, error: MessagingError) -> None:
        """Try an event again later, or drop it."""
        now = clock.monotonic()
        self._failures += 1
        if self._has_ended:
            return
        if self._failures == 1:
            self._failing_since = now
            logger.info("delivery to '%s' failed: %s; it is tried again", self.name, error)
        if self._policy.is_exhausted(self._failures, now - self._failing_since):
            logger.warning(
                "delivery to '%s': event %d of %r failed %d times: %s; the event is dropped",
                self.name, event.sequence_number, event.kind, self._failures, error,
            )  # fmt: skip
            self.counts.dropped += 1
            self._failures = 0
            self._queue.settle(1)
            return
        self.counts.retries += 1
        self._wait(self._policy.delay_after(self._failures))

    def _note_problem(self, error: Exception) -> None:
        """Wait after the queue or the target failed."""
        if isinstance(error, MessagingError):
            logger.warning("delivery to '%s' failed: %s; it is tried again", self.name, error)
        self._problems += 1
        self._is_pending = True
        self._wait(self._policy.delay_after(self._problems))

    def _wait(self, delay: float) -> None:
        at = clock.monotonic() + delay
        with self._lock:
            self._retry_at = at
        running = engine()
        running.call(lambda: clock.call_later(running.loop, delay, self._retry, at))

    def _retry(self, at: float) -> None:
        """Make the attempt that was planned for a time, unless another plan took its place. On the engine's loop.

        The time is not looked at again: timers fire up to some milliseconds early.
        """
        with self._lock:
            if self._retry_at != at:
                return
            self._retry_at = 0.0
        self._start()

    def _call(self, callback: Callable[[Any], Any] | None, argument: Any) -> None:
        if callback is not None:
            try:
                callback(argument)
            except Exception:
                logger.exception("delivery to '%s': a callback failed", self.name)


class Interest:
    """One registration at a generator or an agent.

    Attributes:
        kind: source and id of the events, as registered.
        listener: as registered.
        handback: in the form in which it travels.
        after: sequence number of the last event before the registration.
        lease: of the registration; set when it is granted.
        delivery: passes the events to the listener; set when it begins.
        queue: of a generator without a disk.
    """

    __slots__ = ("after", "delivery", "handback", "kind", "lease", "listener", "queue")

    lease: GrantedLease
    delivery: EventDelivery

    def __init__(self, kind: EventKind, listener: Any, handback: Any, after: int = 0) -> None:
        self.kind = kind
        self.listener = listener
        self.handback = handback
        self.after = after
        self.queue: MemoryQueue | None = None

    def begin(
        self, name: str, target: EventTarget, queue: EventQueue, policy: RetryPolicy, *, ends_when_gone: bool = True
    ) -> None:
        """Make the delivery, which ends the lease when the listener does not know the kind, or is gone.

        Args:
            name, target, queue, policy: see ``EventDelivery``.
            ends_when_gone: whether the lease ends when the listener is gone; otherwise the delivery stops.
        """
        self.delivery = EventDelivery(
            name,
            target,
            queue,
            policy=policy,
            on_unknown_event=self._end_lease,
            on_gone=self._end_lease if ends_when_gone else None,
            lease=self.lease,
        )

    def _end_lease(self, _reason: object) -> None:
        release(self.lease)

    def stop(self) -> None:
        """Stop the delivery. A lease may end before its delivery has begun."""
        delivery: EventDelivery | None = getattr(self, "delivery", None)
        if delivery is not None:
            delivery.close()

    @property
    def position(self) -> str:
        """Name of its position in the journal of a durable party."""
        return f"{POSITION}{self.lease.id}"

    def event_for(self, event: RemoteEvent) -> RemoteEvent | None:
        """Return an event as the listener gets it; ``None`` for one from before the registration."""
        if event.sequence_number <= self.after:
            return None
        if self.handback is None and event.handback is None:
            return event
        return event.with_handback(self.handback)


class GeneratedKind:
    """A kind of event of one generator, or of one transaction of it."""

    __slots__ = ("id", "interests", "sequence")

    def __init__(self, event_id: EventId, sequence: int = 0) -> None:
        self.id = event_id
        #: number of the last event
        self.sequence = sequence
        #: replaced, never changed in place
        self.interests: tuple[Interest, ...] = ()

    def remove(self, interest: Interest) -> None:
        """Remove a registration. With the lock of the generator."""
        self.interests = tuple(each for each in self.interests if each is not interest)


def wait_for_all(stopped: Iterable[Promise[None]], timeout: float = CLOSE_TIMEOUT) -> None:
    """Wait until deliveries have stopped, for at most ``timeout`` seconds; in an event loop not at all."""
    deadline = clock.monotonic() + timeout
    for each in stopped:
        if may_block():
            with contextlib.suppress(DeadlineError):
                each.result(max(0.0, deadline - clock.monotonic()))
