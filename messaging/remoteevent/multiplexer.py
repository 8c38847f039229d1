"""Notification multiplexing: one registration at the source serves many listeners (EV.3.2.1).

**Threads.** The listeners of a batch are notified side by side, each by its target. A multiplexer stores nothing: it
acknowledges an event when each listener has acknowledged it, or has refused it for good. A listener that fails makes
the sender try again; the listeners that have acknowledged the event do not get it again.

**Listeners that are away** hold up the others for as long as the retry policy says. From then on their events are
dropped and counted, and the listener is tried again every ``max_delay`` seconds. A listener that is often away belongs
behind a :class:`~messaging.remoteevent.StoreAndForwardAgent`.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from messaging.dispatch.eventdata import from_portable, to_portable
from messaging.errors import ArgumentError, ClosedError, UnknownEventError
from messaging.errors.checks import check_instance
from messaging.errors.text import SafeLog
from messaging.execution import clock
from messaging.leases import Landlord, Lease, LeaseEnd, release
from messaging.remoteevent.delivery import SHORT, DeliveryCounts, RetryPolicy
from messaging.remoteevent.event import EventKind, EventRegistration, RemoteEvent, check_kind
from messaging.remoteevent.listener import (
    BatchListener,
    Disposition,
    WantedEvents,
    WithdrawnError,
    as_failure,
    disposition,
    outcomes_of,
    wanted_test,
)
from messaging.remoteevent.party import Party
from messaging.remoteevent.targets import NotifiedEvents, as_target
from messaging.remoteevent.targets import settled as settled_with

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from messaging.errors import MessagingError
    from messaging.execution import Promise
    from messaging.remoteevent.listener import EventTarget, Outcome

logger = SafeLog(__name__)

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
        fan_out.start(self._note, self._settled)
        return fan_out.promise

    def _refusal(self, kind: EventKind) -> MessagingError:
        """Return why no listener gets an event of a kind.

        A sender that is told ``UnknownEventError`` ends its registration for good.
        """
        if self.landlord.is_closed:
            return ClosedError(f"multiplexer '{self.name}': closed")
        return UnknownEventError(f"{self.name}: no listener for event {kind[1]!r} of {kind[0]!r}")

    def _settled(self, events: Sequence[RemoteEvent]) -> None:
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

    def start(self, note: Any, settled: Callable[[Sequence[RemoteEvent]], object]) -> None:
        """Notify the listeners, and resolve the promise when all have outcomes."""
        self._settled = settled
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
                answer = settled_with([as_failure(error)])
            answer.listen(partial(self._answered, note, branch, parts, answer))

    def _is_wanted(self, branch: _Branch) -> bool:
        return not branch.lease.is_ended and self._is_still_wanted()

    def _settle(self) -> None:
        outcomes = self._failures[: self._until]
        passed = next((at for at, each in enumerate(outcomes) if each is not None), len(outcomes))
        self._settled(self._batch.events[:passed])
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
