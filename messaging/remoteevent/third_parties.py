"""Parties that pass events on and store none: filters, correlators, demultiplexers and multiplexers (EV.3.2).

They acknowledge an event when the next party has acknowledged it, or when the event is consumed. So they lose nothing
when their process is killed.

**Threads.** Functions of the application run on worker threads: for one batch of a sender at a time, and for several
senders side by side. The listeners of a multiplexer are notified side by side, each by its target.

**A multiplexer** acknowledges an event when each listener has acknowledged it, or has refused it for good. A listener
that fails makes the sender try again; the listeners that have acknowledged the event do not get it again. Listeners
that are away hold up the others for as long as the retry policy says. From then on their events are dropped and
counted, and the listener is tried again every ``max_delay`` seconds. A listener that is often away belongs behind a
:class:`~messaging.remoteevent.StoreAndForwardAgent`.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from messaging.dispatch.eventdata import from_portable, to_portable
from messaging.errors import ArgumentError, ClosedError, DeadlineError, MessagingError, UnknownEventError
from messaging.errors.checks import check_instance, plain_function
from messaging.errors.text import SafeLog
from messaging.execution import Promise, clock, workers
from messaging.leases import Landlord, Lease, LeaseEnd, release
from messaging.remoteevent.delivery import SHORT, DeliveryCounts, RetryPolicy
from messaging.remoteevent.event import EventKind, EventRegistration, RemoteEvent, as_kind, check_kind
from messaging.remoteevent.generator import EventGenerator
from messaging.remoteevent.listener import (
    TIME_LIMIT,
    BatchListener,
    Disposition,
    LimitedCall,
    LocalTarget,
    NotifiedEvents,
    TimeLimits,
    WantedEvents,
    WithdrawnError,
    as_failure,
    as_target,
    disposition,
    outcomes_of,
    settled,
    wanted_test,
)
from messaging.remoteevent.party import Party

if TYPE_CHECKING:
    from messaging.remoteevent.event import EventId, EventKind
    from messaging.remoteevent.listener import EventTarget, Outcome

logger = SafeLog(__name__)


class NotificationFilter(BatchListener):
    """Passes the events on that a predicate wants (EV.3.2). A listener; thread safe.

    An event that the predicate does not want is consumed: the sender is not told, and the next party misses its number,
    which is legal.

    Args:
        predicate: called with each event; also a function that returns another event of the same kind and number, or
            ``None``, to change what is passed on. If it raises, the sender is told, as of any listener that raises.
        target: the next party: a listener, a third party, or a stub of a listener in another process.
        time_limit: seconds that one call of the predicate may take.

    Attributes:
        passed, consumed: numbers of events.

    Raises:
        ArgumentError: an argument is not as described.
    """

    def __init__(self, predicate: Callable[[RemoteEvent], Any], target: Any, *, time_limit: float = TIME_LIMIT) -> None:
        self._predicate = plain_function(predicate, "a predicate")
        self._target = as_target(target)
        self._limits = TimeLimits(time_limit)
        self._lock = threading.Lock()  # guards the following two
        self.passed = self.consumed = 0

    def deliver(self, events: Sequence[RemoteEvent], /) -> Promise[list[Outcome]]:
        """See :class:`~messaging.remoteevent.listener.EventTarget`."""
        if self._limits.is_stuck:
            return settled([DeadlineError("the predicate of a filter has not returned from an earlier event")])
        batch = NotifiedEvents(events)
        call = LimitedCall(lambda: batch.fail(DeadlineError("the predicate of a filter took too long")))
        self._limits.begin(call)
        workers().submit(lambda: self._filter(batch, call))
        return batch.promise

    def _filter(self, batch: NotifiedEvents, call: LimitedCall) -> None:
        wanted: list[RemoteEvent] = []
        #: for each event that was decided on, whether it is passed on
        is_wanted: list[bool] = []
        failure: Outcome = None
        is_still_wanted = wanted_test(batch.events)
        try:
            for event in batch.events:
                if not is_still_wanted():
                    break
                found = self._predicate(event)
                is_wanted.append(bool(found))
                if found:
                    wanted.append(found if isinstance(found, RemoteEvent) else event)
                self._limits.go_on(call)
        except BaseException as error:  # noqa: BLE001  # of the application
            failure = as_failure(error)
        finally:
            self._limits.end(call)
        if batch.is_settled:
            return
        if not is_wanted and failure is None:
            batch.fail(WithdrawnError("the events are no longer wanted"))
            return
        if not wanted:
            self._settle(batch, is_wanted, [], failure)
            return
        try:
            answer = self._target.deliver(WantedEvents(wanted, is_still_wanted))
            answer.listen(lambda: self._settle(batch, is_wanted, outcomes_of(answer), failure))
        except Exception as error:  # noqa: BLE001  # a target of the application
            self._settle(batch, is_wanted, [as_failure(error)], None)

    def _settle(self, batch: NotifiedEvents, is_wanted: list[bool], passed: list[Outcome], failure: Outcome) -> None:
        outcomes = self._merged(is_wanted, passed, failure)
        delivered = min(len(passed), sum(is_wanted))
        with self._lock:
            self.passed += delivered
            self.consumed += max(0, min(len(outcomes), len(is_wanted)) - delivered)
        batch.settle_with(outcomes)

    @staticmethod
    def _merged(is_wanted: list[bool], passed: list[Outcome], failure: Outcome) -> list[Outcome]:
        """Return the outcomes of the batch: of consumed events ``None``, of others those of the next party."""
        outcomes: list[Outcome] = []
        following = iter(passed)
        for each in is_wanted:
            try:
                outcomes.append(next(following) if each else None)
            except StopIteration:
                return outcomes
        return outcomes if failure is None else [*outcomes, failure]


class EventCorrelator(LocalTarget, BatchListener):
    """Generates an event when the received ones fit a pattern (EV.3.2.2). A listener; thread safe.

    The program registers the correlator as the listener for all kinds that the pattern is about. A received event is
    acknowledged when the events that it causes are generated: with a persistent generator, when they are on the disk.

    Args:
        match: called with each received event; returns the fields of each event to generate, as a list of dicts. It
            keeps what it needs of earlier events. A duplicate is passed on as it arrives: wrap the correlator in
            :class:`~messaging.remoteevent.IdempotentListener` if the pattern counts.
        generator, event_id: generates the new events; the kind is declared.
        event_type: class of the new events.
        time_limit: seconds that one call of ``match`` may take.

    Raises:
        ArgumentError: an argument is not as described.
        UnknownEventError: the generator has not declared the kind.
    """

    def __init__(
        self,
        match: Callable[[RemoteEvent], Iterable[dict[str, Any]] | None],
        generator: EventGenerator,
        event_id: EventId,
        event_type: type[RemoteEvent] | None = None,
        *,
        time_limit: float = TIME_LIMIT,
    ) -> None:
        check_instance("generator", generator, EventGenerator)
        matching = plain_function(match, "a pattern", is_iterated=True)
        generator.sequence_number(event_id)
        self._match = matching
        self._generator = generator
        self._event_id = event_id
        self._types = () if event_type is None else (event_type,)
        super().__init__(self._take, time_limit)

    def _take(self, event: RemoteEvent) -> None:
        promises = [
            self._generator.generate(self._event_id, *self._types, **fields) for fields in self._match(event) or ()
        ]
        for each in promises:
            each.result()


class NotificationDemultiplexer(BatchListener):
    """Passes each event to the listener of its kind. A listener; thread safe.

    An event of a kind without a listener is refused with ``UnknownEventError``, which asks the sender to send no
    further ones. The demultiplexer stores nothing: the outcome of an event is that of its listener.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards the following
        self._targets: dict[EventKind, EventTarget] = {}

    def add(self, kind: EventRegistration | EventKind, listener: Any) -> None:
        """Pass the events of a kind to ``listener``, instead of an earlier one.

        Args:
            kind: a registration, or source and id.
            listener: see :meth:`EventGenerator.register <messaging.remoteevent.EventGenerator.register>`.

        Raises:
            ArgumentError, InvalidEventError: an argument is not as described.
        """
        target = as_target(listener)
        with self._lock:
            self._targets[as_kind(kind)] = target

    def remove(self, kind: EventRegistration | EventKind) -> bool:
        """Refuse the events of a kind from now on; return whether there was a listener. Raises as :meth:`add`."""
        with self._lock:
            return self._targets.pop(as_kind(kind), None) is not None

    def deliver(self, events: Sequence[RemoteEvent], /) -> Promise[list[Outcome]]:
        """See :class:`~messaging.remoteevent.listener.EventTarget`: passes on the first events that have one kind."""
        kind = events[0].kind
        target = self._targets.get(kind)
        if target is None:
            return settled([UnknownEventError(f"no listener for event {kind[1]!r} of {kind[0]!r:.80}")])
        count = next((at for at, each in enumerate(events) if each.kind != kind), len(events))
        is_wanted = wanted_test(events)
        return target.deliver(WantedEvents(events[:count], lambda: is_wanted() and self._targets.get(kind) is target))


#: events that one listener has acknowledged and its sender has not been told of; more make duplicates
_MAX_AHEAD: Final = 10_000


class _Branch:
    """One listener of a multiplexer. Guarded by the lock of the multiplexer."""

    __slots__ = ("ahead", "counts", "failing_since", "failures", "handback", "kind", "lease", "retry_at", "target")

    lease: Lease

    def __init__(self, kind: EventKind, handback: Any, target: EventTarget) -> None:
        self.kind = kind
        self.handback = handback
        self.target = target
        #: numbers of the events that it has acknowledged, and its sender has not been told of
        self.ahead: OrderedDict[int, None] = OrderedDict()
        self.counts = DeliveryCounts()
        #: failed notifications in a row, and when the first one was
        self.failures = 0
        self.failing_since = 0.0
        #: monotonic time until which its events are dropped; 0: they are not
        self.retry_at = 0.0

    def acknowledge(self, number: int) -> None:
        """Remember that the listener has an event."""
        self.ahead[number] = None
        if len(self.ahead) > _MAX_AHEAD:
            self.ahead.popitem(last=False)


class NotificationMultiplexer(BatchListener, Party):
    """Passes each event to all listeners that registered for its kind here (EV.3.2.1). A listener; thread safe.

    Args:
        name: for the log and for the view of the leases.
        landlord: grants the leases; ``None``: one of its own.
        retry: how long a listener that fails holds up the others; by default 10 attempts of the sender, within a
            minute.
    """

    def __init__(
        self, name: str = "multiplexer", *, landlord: Landlord | None = None, retry: RetryPolicy | None = None
    ) -> None:
        if not isinstance(name, str) or not name:
            raise ArgumentError(f"name must be a non-empty text, not {name!r:.80}")
        self.name = name
        super().__init__(f"multiplexer '{name}'", landlord, name)
        self._retry = retry or SHORT
        # the lock guards the following two
        self._branches: dict[EventKind, tuple[_Branch, ...]] = {}
        #: number of the last event of each kind
        self._numbers: dict[EventKind, int] = {}

    def register(
        self, source: str, event_id: int | str, handback: Any, listener: Any, duration: float = Lease.ANY
    ) -> EventRegistration:
        """Register a listener for the events of a kind that reach this multiplexer.

        Args:
            source, event_id: the kind, as the registration at the generator has it.
            handback: replaces that of the events; ``None``: none.
            listener: see :meth:`EventGenerator.register <messaging.remoteevent.EventGenerator.register>`.
            duration: seconds that are asked for.

        Raises:
            ArgumentError, InvalidEventError: an argument is not as described.
            LeaseDeniedError: the landlord refuses.
            ClosedError: the multiplexer, or its landlord, is closed.
        """
        kind = check_kind(source, event_id)
        form = None if handback is None else from_portable(to_portable(handback))
        branch = _Branch(kind, form, as_target(listener))
        lease = branch.lease = self.landlord.grant(duration, about=f"{self.name} {kind!r}")
        with self._lock:
            self._branches[kind] = (*self._branches.get(kind, ()), branch)
            number = self._numbers.get(kind, 0)
        # last: it is called at once if the lease has ended meanwhile
        lease.when_ended(lambda end: self._end(branch, end))
        return EventRegistration(event_id, source, lease, number)

    def counts(self, registration: EventRegistration) -> DeliveryCounts | None:
        """Return the numbers of notifications of a registration; ``None`` if it has ended."""
        check_instance("registration", registration, EventRegistration)
        for each in self._branches.get(registration.kind, ()):
            if each.lease.id == registration.lease.id:
                return each.counts
        return None

    def _end(self, branch: _Branch, _end: LeaseEnd) -> None:
        with self._lock:
            left = tuple(each for each in self._branches.get(branch.kind, ()) if each is not branch)
            if left:
                self._branches[branch.kind] = left
            else:
                self._branches.pop(branch.kind, None)
                self._numbers.pop(branch.kind, None)

    def deliver(self, events: Sequence[RemoteEvent], /) -> Promise[list[Outcome]]:
        """See :class:`~messaging.remoteevent.listener.EventTarget`."""
        fan_out = _FanOut(events)
        now = clock.monotonic()
        with self._lock:
            for index, event in enumerate(events):
                branches = [each for each in self._branches.get(event.kind, ()) if not each.lease.is_ended]
                if not branches:
                    fan_out.fail(index, self._refusal(event.kind))
                    continue
                self._numbers[event.kind] = max(self._numbers.get(event.kind, 0), event.sequence_number)
                for branch in branches:
                    if event.sequence_number in branch.ahead:
                        continue
                    if branch.retry_at > now:
                        branch.counts.dropped += 1
                    else:
                        fan_out.add(index, branch, event)
        fan_out.start(self._note, self._forget)
        return fan_out.promise

    def _refusal(self, kind: EventKind) -> MessagingError:
        """Return why no listener gets an event of a kind.

        A sender that is told ``UnknownEventError`` ends its registration for good.
        """
        if self.landlord.is_closed:
            return ClosedError(f"multiplexer '{self.name}': closed")
        return UnknownEventError(f"{self.name}: no listener for event {kind[1]!r} of {kind[0]!r}")

    def _forget(self, events: Sequence[RemoteEvent]) -> None:
        """Forget events that are acknowledged to the sender: it does not pass them again."""
        with self._lock:
            for event in events:
                for branch in self._branches.get(event.kind, ()):
                    branch.ahead.pop(event.sequence_number, None)

    def _note(self, branch: _Branch, parts: list[tuple[int, RemoteEvent]], outcomes: list[Outcome]) -> list[Outcome]:
        """Return the outcomes of one listener as its sender sees them, and note what follows from them."""
        seen: list[Outcome] = []
        for (_index, event), outcome in zip(parts, outcomes, strict=False):
            found = None if outcome is None else disposition(outcome)
            if found is Disposition.RETRY:
                if isinstance(outcome, WithdrawnError) and branch.lease.is_ended:
                    seen += [None] * (len(parts) - len(seen))  # as of a listener that is gone
                    break
                if isinstance(outcome, WithdrawnError) or not self._is_given_up(branch):
                    seen.append(outcome)
                    break
                logger.warning(
                    "multiplexer '%s': a listener of %r fails: %s; its events are dropped for %g s",
                    self.name, event.kind, outcome, self._retry.max_delay,
                )  # fmt: skip
                branch.counts.dropped += len(parts) - len(seen)
                seen += [None] * (len(parts) - len(seen))
                break
            branch.failures = 0
            if found is None:
                branch.counts.delivered += 1
            elif found in (Disposition.UNKNOWN_EVENT, Disposition.GONE):
                release(branch.lease)
            elif found is Disposition.BAD_EVENT:
                logger.warning(
                    "multiplexer '%s': a listener refused event %d of %r: %s; the event is dropped",
                    self.name, event.sequence_number, event.kind, outcome,
                )  # fmt: skip
            with self._lock:
                branch.acknowledge(event.sequence_number)
            seen.append(None)
            if found is Disposition.GONE:
                seen += [None] * (len(parts) - len(seen))
                break
        return seen

    def _is_given_up(self, branch: _Branch) -> bool:
        """Return whether a listener that failed once more holds up the others no longer."""
        now = clock.monotonic()
        branch.failures += 1
        if branch.failures == 1:
            branch.failing_since = now
        branch.counts.retries += 1
        if not self._retry.is_exhausted(branch.failures, now - branch.failing_since):
            return False
        branch.retry_at = now + self._retry.max_delay
        return True


class _FanOut:
    """One batch on its way to several listeners."""

    def __init__(self, events: Sequence[RemoteEvent]) -> None:
        self._batch = NotifiedEvents(events)
        self._is_still_wanted = wanted_test(events)
        self.promise = self._batch.promise
        self._parts: dict[_Branch, list[tuple[int, RemoteEvent]]] = {}
        self._lock = threading.Lock()  # guards the following two
        self._failures: list[Outcome] = [None] * len(events)
        #: listeners without outcomes
        self._left = 0
        #: number of events that each listener was tried with
        self._until = len(events)

    def fail(self, index: int, error: MessagingError) -> None:
        """Note that no listener gets an event."""
        self._failures[index] = error
        if disposition(error) is Disposition.RETRY:
            self._until = min(self._until, index + 1)

    def add(self, index: int, branch: _Branch, event: RemoteEvent) -> None:
        """Pass an event to a listener."""
        self._parts.setdefault(branch, []).append((index, event.with_handback(branch.handback)))

    def start(self, note: Any, forget: Callable[[Sequence[RemoteEvent]], object]) -> None:
        """Notify the listeners, and resolve the promise when all have outcomes."""
        self._forget = forget
        self._left = len(self._parts)
        if not self._parts:
            self._settle()
            return
        for branch, parts in self._parts.items():
            try:
                answer = branch.target.deliver(
                    WantedEvents((event for _, event in parts), partial(self._is_wanted, branch))
                )
            except Exception as error:  # noqa: BLE001  # a target of the application
                answer = settled([as_failure(error)])
            answer.listen(partial(self._answered, note, branch, parts, answer))

    def _is_wanted(self, branch: _Branch) -> bool:
        return not branch.lease.is_ended and self._is_still_wanted()

    def _settle(self) -> None:
        outcomes = self._failures[: self._until]
        passed = next((at for at, each in enumerate(outcomes) if each is not None), len(outcomes))
        self._forget(self._batch.events[:passed])
        self._batch.settle_with(outcomes)

    def _answered(
        self, note: Any, branch: _Branch, parts: list[tuple[int, RemoteEvent]], answer: Promise[list[Outcome]]
    ) -> None:
        outcomes = note(branch, parts, outcomes_of(answer))
        with self._lock:
            for (index, _), outcome in zip(parts, outcomes, strict=False):
                if outcome is not None:
                    self._failures[index] = outcome
                    self._until = min(self._until, index + 1)
            if len(outcomes) < len(parts) and outcomes[-1] is None:  # the listener takes no more at once
                self._until = min(self._until, parts[len(outcomes)][0])
            self._left -= 1
            if self._left:
                return
        self._settle()
