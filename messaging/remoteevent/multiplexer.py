"""Notification multiplexing: one registration at the source serves many listeners (EV.3.2.1).

**Threads.** The listeners of a batch are notified side by side, each by its target. A multiplexer stores nothing: it
acknowledges an event when each listener has acknowledged it, or has refused it for good. A listener that fails makes
the sender try again; the listeners that have acknowledged the event do not get it again. A listener that is often away
belongs behind a :class:`~messaging.remoteevent.StoreAndForwardAgent`.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from messaging.errors import ArgumentError, UnknownEventError
from messaging.eventdata import from_portable, to_portable
from messaging.leases import Landlord, Lease, LeaseEnd, release
from messaging.remoteevent.event import EventKind, EventRegistration, RemoteEvent, check_kind
from messaging.remoteevent.failures import Disposition, disposition
from messaging.remoteevent.listener import BatchListener
from messaging.remoteevent.targets import Batch, as_target
from messaging.text import SafeLog

if TYPE_CHECKING:
    from messaging.execution import Promise
    from messaging.remoteevent.listener import EventTarget, Outcome

logger = SafeLog(__name__)

#: events that one listener has acknowledged and its sender has not been told of; more make duplicates
_MAX_AHEAD: Final = 10_000


class _Branch:
    """One listener of a multiplexer. Guarded by the lock of the multiplexer."""

    __slots__ = ("ahead", "handback", "kind", "lease", "target")

    lease: Lease

    def __init__(self, kind: EventKind, handback: Any, target: EventTarget) -> None:
        self.kind = kind
        self.handback = handback
        self.target = target
        #: numbers of the events that it has acknowledged while another listener failed
        self.ahead: OrderedDict[int, None] = OrderedDict()

    def acknowledge(self, number: int) -> None:
        """Remember that the listener has an event."""
        self.ahead[number] = None
        if len(self.ahead) > _MAX_AHEAD:
            self.ahead.popitem(last=False)


class NotificationMultiplexer(BatchListener):
    """Passes each event to all listeners that registered for its kind here (EV.3.2.1). A listener; thread safe.

    Args:
        name: for the log and for the view of the leases.
        landlord: grants the leases; ``None``: one of its own.
    """

    def __init__(self, name: str = "multiplexer", *, landlord: Landlord | None = None) -> None:
        if not isinstance(name, str) or not name:
            raise ArgumentError(f"name must be a non-empty text, not {name!r:.80}")
        self.name = name
        self.landlord = Landlord(name) if landlord is None else landlord
        self._owns_landlord = landlord is None
        self._lock = threading.Lock()  # guards the following two
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
        """
        kind = check_kind(source, event_id)
        form = None if handback is None else from_portable(to_portable(handback))
        branch = _Branch(kind, form, as_target(listener))
        branch.lease = self.landlord.grant(duration, lambda end: self._end(branch, end), about=f"{self.name} {kind!r}")
        with self._lock:
            self._branches[kind] = (*self._branches.get(kind, ()), branch)
            number = self._numbers.get(kind, 0)
        return EventRegistration(event_id, source, branch.lease, number)

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
        with self._lock:
            for index, event in enumerate(events):
                branches = [each for each in self._branches.get(event.kind, ()) if not each.lease.is_ended]
                if not branches:
                    fan_out.unknown(index, self.name)
                    continue
                self._numbers[event.kind] = max(self._numbers.get(event.kind, 0), event.sequence_number)
                for branch in branches:
                    if event.sequence_number not in branch.ahead:
                        fan_out.add(index, branch, event)
        fan_out.start(self._note)
        return fan_out.promise

    def _note(self, branch: _Branch, parts: list[tuple[int, RemoteEvent]], outcomes: list[Outcome]) -> list[Outcome]:
        """Return the outcomes of one listener as its sender sees them, and note what follows from them."""
        seen: list[Outcome] = []
        for (_index, event), outcome in zip(parts, outcomes, strict=False):
            found = None if outcome is None else disposition(outcome)
            if found is Disposition.RETRY:
                seen.append(outcome)
                break
            if found in (Disposition.UNKNOWN_EVENT, Disposition.GONE):
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

    def close(self) -> None:
        """End all registrations. Idempotent."""
        if self._owns_landlord:
            self.landlord.close()


class _FanOut:
    """One batch on its way to several listeners."""

    def __init__(self, events: Sequence[RemoteEvent]) -> None:
        self._batch = Batch(events)
        self.promise = self._batch.promise
        self._parts: dict[_Branch, list[tuple[int, RemoteEvent]]] = {}
        self._lock = threading.Lock()  # guards the following two
        self._failures: list[Outcome] = [None] * len(events)
        #: listeners without outcomes
        self._left = 0
        #: number of events that each listener was tried with
        self._until = len(events)

    def unknown(self, index: int, name: str) -> None:
        """Note that no listener wants an event."""
        event = self._batch.events[index]
        self._failures[index] = UnknownEventError(f"{name}: no listener for event {event.id!r} of {event.source!r}")

    def add(self, index: int, branch: _Branch, event: RemoteEvent) -> None:
        """Pass an event to a listener."""
        self._parts.setdefault(branch, []).append((index, event.with_handback(branch.handback)))

    def start(self, note: Any) -> None:
        """Notify the listeners, and resolve the promise when all have outcomes."""
        self._left = len(self._parts)
        if not self._parts:
            self._batch.settle_with(self._failures)
            return
        for branch, parts in self._parts.items():
            answer = branch.target.deliver([event for _, event in parts])
            answer.listen(partial(self._answered, note, branch, parts, answer))

    def _answered(
        self, note: Any, branch: _Branch, parts: list[tuple[int, RemoteEvent]], answer: Promise[list[Outcome]]
    ) -> None:
        error = answer.exception(0)
        outcomes = note(branch, parts, [error] if error is not None else answer.result(0))
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
        self._batch.settle_with(self._failures[: self._until])
