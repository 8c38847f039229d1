"""Parties that pass events on and store none: filters, correlators and demultiplexers (EV.3.2).

They acknowledge an event when the next party has acknowledged it, or when the event is consumed. So they lose nothing
when their process is killed.

**Threads.** Functions of the application run on worker threads: for one batch of a sender at a time, and for several
senders side by side."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from messaging.errors import ArgumentError, DeadlineError, UnknownEventError
from messaging.errors.checks import check_instance, plain_function
from messaging.errors.text import SafeLog
from messaging.execution import Promise, workers
from messaging.remoteevent.event import EventRegistration, RemoteEvent, check_kind
from messaging.remoteevent.generator import EventGenerator
from messaging.remoteevent.listener import (
    BatchListener,
    WantedEvents,
    WithdrawnError,
    as_failure,
    outcomes_of,
    wanted_test,
)
from messaging.remoteevent.targets import (
    TIME_LIMIT,
    LimitedCall,
    LocalTarget,
    NotifiedEvents,
    TimeLimits,
    as_target,
    settled,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

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
            self._targets[_kind(kind)] = target

    def remove(self, kind: EventRegistration | EventKind) -> bool:
        """Refuse the events of a kind from now on; return whether there was a listener. Raises as :meth:`add`."""
        with self._lock:
            return self._targets.pop(_kind(kind), None) is not None

    def deliver(self, events: Sequence[RemoteEvent], /) -> Promise[list[Outcome]]:
        """See :class:`~messaging.remoteevent.listener.EventTarget`: passes on the first events that have one kind."""
        kind = events[0].kind
        target = self._targets.get(kind)
        if target is None:
            return settled([UnknownEventError(f"no listener for event {kind[1]!r} of {kind[0]!r:.80}")])
        count = next((at for at, each in enumerate(events) if each.kind != kind), len(events))
        is_wanted = wanted_test(events)
        return target.deliver(WantedEvents(events[:count], lambda: is_wanted() and self._targets.get(kind) is target))


def _kind(kind: object) -> EventKind:
    if isinstance(kind, EventRegistration):
        return kind.kind
    if isinstance(kind, tuple) and len(kind) == 2:
        return check_kind(*kind)
    raise ArgumentError(f"a kind of event must be a registration, or (source, id), not {kind!r:.80}")
