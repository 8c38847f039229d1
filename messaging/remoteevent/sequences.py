"""Sequence numbers at the receiver: each event acts once, and lost events are counted (EV.2.3.2).

**Duplicates.** An event may arrive twice, since a sender that got no answer sends it again. Equal numbers of one source
and id mean the same event.

**Losses.** Only a registration that is fully ordered lets a gap tell something: then so many events were generated, and
did not arrive. An event that arrives later takes itself out of the count. Otherwise a gap tells nothing, and no loss is
reported.

**Bounds.** A tracker remembers a bounded number of kinds; the one that was longest without an event is forgotten. Of a
kind it remembers ranges of numbers (:class:`SequenceRanges`): an event that is later than 1000 gaps counts as a
duplicate.

**Threads.** Any thread may use a tracker. One lock guards the kinds; no code of the application runs under it.
"""

from __future__ import annotations

import enum
import threading
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from messaging.errors import ArgumentError, DecodeError
from messaging.errors.checks import check_instance, plain_function
from messaging.errors.text import SafeLog, tolerant
from messaging.execution import Promise, workers
from messaging.remoteevent.event import EventKind, EventRegistration, RemoteEvent, check_sequence_number
from messaging.remoteevent.listener import (
    BatchListener,
    Disposition,
    Outcome,
    WantedEvents,
    as_target,
    disposition,
    outcomes_of,
    wanted_test,
)

logger = SafeLog(__name__)


#: ranges above the floor, unless the caller sets another bound
MAX_RANGES: Final = 1000


class SequenceRanges:
    """A set of sequence numbers, kept as ranges. The owner serialises the calls; reading is not safe meanwhile.

    Numbers of one kind of event rise, and arrive mostly in order: numbers without gaps cost one range, however many
    there are. The lowest range begins at 0 and ends at the *floor*. A set keeps at most ``max_ranges`` ranges above it.
    With one more, the lowest one is forgotten: its events are taken for new if they arrive again, and no event is lost.
    With ``closes_gaps`` the floor moves up to its end instead: events of the gap are taken for duplicates if they still
    arrive, and no event is taken for new twice.

    Args:
        floor: every number up to this one is contained from the start; -1 for an empty set.
        max_ranges: ranges above the floor, at least 1.
        closes_gaps: whether one range more closes the lowest gap, instead of being forgotten.

    Attributes:
        floor: the highest number below which no number is missing; -1 if 0 is missing.

    Raises:
        ArgumentError: ``floor`` is below -1, or ``max_ranges`` below 1.
    """

    __slots__ = ("_first", "_last", "closes_gaps", "floor", "max_ranges")

    def __init__(self, floor: int = -1, *, max_ranges: int = MAX_RANGES, closes_gaps: bool = False) -> None:
        if not isinstance(max_ranges, int) or max_ranges < 1:
            raise ArgumentError(f"max_ranges must be an int of at least 1, not {max_ranges!r:.80}")
        self.floor = floor if floor == -1 else check_sequence_number(floor)
        self.max_ranges = max_ranges
        self.closes_gaps = closes_gaps
        #: first and last number of each range above the floor, in rising order; at least one number is between two
        self._first: list[int] = []
        self._last: list[int] = []

    def __contains__(self, number: int) -> bool:
        if number <= self.floor:
            return True
        at = bisect_left(self._last, number)
        return at < len(self._last) and self._first[at] <= number

    def __iter__(self) -> Iterator[tuple[int, int]]:
        """Iterate over the ranges above the floor as (first, last), in rising order."""
        return iter(list(zip(self._first, self._last, strict=True)))

    def __len__(self) -> int:
        """Return the number of ranges above the floor."""
        return len(self._first)

    def __bool__(self) -> bool:
        """Return whether the set holds a number."""
        return self.highest >= 0

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, SequenceRanges):
            return NotImplemented
        return self.floor == other.floor and self._first == other._first and self._last == other._last

    __hash__ = None  # type: ignore[assignment]  # the set is mutable

    @property
    def highest(self) -> int:
        """The highest number in the set; -1 if it is empty."""
        return self._last[-1] if self._last else self.floor

    @property
    def missing(self) -> int:
        """How many numbers between the floor and the highest number are not in the set."""
        return self.highest - self.floor - sum(self._last) + sum(self._first) - len(self._first)

    def add(self, number: int) -> bool:
        """Add a number; return whether it is new: ``False`` if the set contained it.

        Args:
            number: from 0 to 2**63-1, as :class:`~messaging.remoteevent.RemoteEvent` checks it.
        """
        last = self._last
        if not last:
            if number == self.floor + 1:  # the usual case: in order, without gaps
                self.floor = number
                return True
        elif number == last[-1] + 1:  # in order, behind a gap
            last[-1] = number
            return True
        if number in self:
            return False
        self._put(number, number)
        return True

    def add_range(self, first: int, last: int) -> None:
        """Add the numbers from ``first`` to ``last``; none if ``last`` is lower."""
        first = max(first, self.floor + 1)
        if first <= last:
            self._put(first, last)

    def _put(self, first: int, last: int) -> None:
        """Add a range above the floor; join it with the ranges that it touches."""
        begin = bisect_left(self._last, first - 1)  # the first range that ends at first - 1 or later
        end = begin
        while end < len(self._first) and self._first[end] <= last + 1:
            end += 1
        if begin < end:
            first = min(first, self._first[begin])
            last = max(last, self._last[end - 1])
        self._first[begin:end] = [first]
        self._last[begin:end] = [last]
        if self._first[0] == self.floor + 1:
            self._lift()
        elif len(self._first) > self.max_ranges:
            if self.closes_gaps:
                self._lift()
            else:
                del self._first[0], self._last[0]

    def _lift(self) -> None:
        """Move the floor to the end of the lowest range."""
        del self._first[0]
        self.floor = self._last.pop(0)

    def to_value(self) -> list[Any]:
        """Return the set in portable form, for :meth:`from_value`: the floor, then first and last of each range."""
        value = [self.floor]
        for each in self:
            value += each
        return value

    @classmethod
    def from_value(cls, value: object, *, max_ranges: int = MAX_RANGES, closes_gaps: bool = False) -> SequenceRanges:
        """Return the set that :meth:`to_value` returned.

        Args:
            value: the portable form.
            max_ranges, closes_gaps: of the new set, see :class:`SequenceRanges`.

        Raises:
            DecodeError: the value is no such form.
        """
        if not isinstance(value, list | tuple) or len(value) % 2 == 0:
            raise DecodeError("not a set of sequence numbers: it must be a list with an odd number of integers")
        before = -2
        for number in value:
            if not isinstance(number, int) or isinstance(number, bool) or not -1 <= number < 2**63 or number < before:
                raise DecodeError(f"not a set of sequence numbers: {number!r:.80} follows {before}")
            before = number
        found = cls(value[0], max_ranges=max_ranges, closes_gaps=closes_gaps)
        for first, last in zip(value[1::2], value[2::2], strict=True):
            found.add_range(first, last)
        return found

    @tolerant
    def __repr__(self) -> str:
        ranges = ", ".join(f"{first}..{last}" for first, last in list(self)[:10])
        more = f", and {len(self) - 10} ranges" if len(self) > 10 else ""
        return f"<SequenceRanges up to {self.floor}{', ' if ranges else ''}{ranges}{more}>"


#: kinds of events that a tracker remembers
MAX_KINDS: Final = 10_000


class ArrivalKind(enum.Enum):
    """Whether an event arrived before."""

    NEW = "new"
    DUPLICATE = "duplicate"


@dataclass(frozen=True, slots=True)
class Arrival:
    """What a tracker knows after an event arrived. Immutable.

    Attributes:
        kind: ``NEW`` or ``DUPLICATE``.
        missed: events of the same source and id that are known to be lost so far; 0 unless it is fully ordered.
        newly_missed: how many of them were not known to be lost before.
    """

    kind: ArrivalKind
    missed: int = 0
    newly_missed: int = 0

    @property
    def is_new(self) -> bool:
        """Whether the event arrived for the first time."""
        return self.kind is ArrivalKind.NEW


class _Numbers:
    """The numbers of one source and id. Guarded by the lock of the tracker."""

    __slots__ = ("highest", "is_fully_ordered", "missed", "seen", "uncounted")

    def __init__(self, floor: int) -> None:
        self.seen = SequenceRanges(floor, closes_gaps=True)
        #: numbers up to this one are seen or missed
        self.highest = floor
        self.is_fully_ordered = False
        self.missed = 0
        #: numbers between two registrations: an event of them is new, and its absence is no loss
        self.uncounted = SequenceRanges(closes_gaps=True)

    def expect(self, number: int) -> None:
        if number > self.highest:
            self.uncounted.add_range(self.highest + 1, number)
            self.highest = number

    def note(self, number: int) -> Arrival:
        if not self.seen.add(number):
            return Arrival(ArrivalKind.DUPLICATE, self.missed)
        gap = 0
        if number > self.highest:
            if self.is_fully_ordered:
                gap = number - self.highest - 1
                self.missed += gap
            elif number > self.highest + 1:
                self.uncounted.add_range(self.highest + 1, number - 1)
            self.highest = number
        elif self.missed and number not in self.uncounted:
            self.missed -= 1
        return Arrival(ArrivalKind.NEW, self.missed, gap)


class SequenceTracker:
    """Remembers which events arrived, by source, id and number. Thread safe.

    Example::

        tracker = SequenceTracker()
        registration = generator.register("overheated", None, IdempotentListener(cool, tracker))
        tracker.expect(registration)

    Args:
        max_kinds: kinds of events that are remembered.

    Raises:
        ArgumentError: ``max_kinds`` is no int from 1.
    """

    def __init__(self, *, max_kinds: int = MAX_KINDS) -> None:
        if isinstance(max_kinds, bool) or not isinstance(max_kinds, int) or max_kinds < 1:
            raise ArgumentError(f"max_kinds must be an int from 1, not {max_kinds!r:.80}")
        self._most = max_kinds
        self._lock = threading.Lock()  # guards the following
        #: the kind with the latest event last
        self._kinds: OrderedDict[EventKind, _Numbers] = OrderedDict()

    def expect(self, registration: EventRegistration) -> None:
        """Note the number from which on events of a registration arrive, and whether they are fully ordered.

        It may be called after the first events have arrived. Numbers up to the one of the first registration of a kind
        count as duplicates unless they have arrived before. Events between two registrations of one kind do not count
        as lost.

        Raises:
            ArgumentError: it is no registration.
        """
        if not isinstance(registration, EventRegistration):
            raise ArgumentError(f"a registration is needed, not {type(registration).__name__}")
        with self._lock:
            numbers = self._numbers(registration.kind, registration.sequence_number)
            numbers.expect(registration.sequence_number)
            numbers.is_fully_ordered = registration.is_fully_ordered

    def note(self, event: RemoteEvent) -> Arrival:
        """Note that an event has arrived; return whether it is new, and how many are known to be lost.

        Raises:
            ArgumentError: it is no remote event.
        """
        if not isinstance(event, RemoteEvent):
            raise ArgumentError(f"a remote event is needed, not {type(event).__name__}")
        with self._lock:
            return self._numbers(event.kind, -1).note(event.sequence_number)

    def has(self, event: RemoteEvent) -> bool:
        """Return whether an event has arrived already, without noting it."""
        check_instance("event", event, RemoteEvent)
        with self._lock:
            numbers = self._kinds.get(event.kind)
            return numbers is not None and event.sequence_number in numbers.seen

    def missed(self, kind: EventRegistration | EventKind) -> int:
        """Return how many events of a kind are known to be lost; 0 for a kind that is not known, or not ordered."""
        key = kind.kind if isinstance(kind, EventRegistration) else kind
        with self._lock:
            numbers = self._kinds.get(key)
            return 0 if numbers is None else numbers.missed

    def forget(self, kind: EventRegistration | EventKind) -> bool:
        """Forget a kind, as of a generator that begins anew; return whether it was known."""
        key = kind.kind if isinstance(kind, EventRegistration) else kind
        with self._lock:
            return self._kinds.pop(key, None) is not None

    def __len__(self) -> int:
        """Return the number of kinds that are remembered."""
        return len(self._kinds)

    def _numbers(self, kind: EventKind, floor: int) -> _Numbers:
        """Return the numbers of a kind, new ones if there are none. With the lock."""
        found = self._kinds.get(kind)
        if found is None:
            found = self._kinds[kind] = _Numbers(floor)
            if len(self._kinds) > self._most:
                self._kinds.popitem(last=False)
        else:
            self._kinds.move_to_end(kind)
        return found


class IdempotentListener(BatchListener):
    """Passes each event to a listener once, however often it arrives. A listener; thread safe.

    An event counts as arrived when the listener has taken it, or has refused the event itself; after another failure
    the sender tries again, and the listener gets it again. Several senders of the same event at the same moment may
    each get it to the listener.

    Args:
        listener: an object with ``notify`` or ``deliver``, or a function of one parameter.
        tracker: remembers the events; several listeners may share one if each gets events of other kinds.
        on_missed: called with the event and its :class:`Arrival` when events before it are found to be lost; it runs on
            the thread that resolves the outcome, so it must be quick.

    Raises:
        ArgumentError: an argument is not as described.
    """

    def __init__(
        self,
        listener: Any,
        tracker: SequenceTracker | None = None,
        *,
        on_missed: Callable[[RemoteEvent, Arrival], object] | None = None,
    ) -> None:
        if tracker is not None and not isinstance(tracker, SequenceTracker):
            raise ArgumentError(f"a SequenceTracker is needed, not {type(tracker).__name__}")
        self._target = as_target(listener)
        self._on_missed = None if on_missed is None else plain_function(on_missed, "on_missed")
        self.tracker = SequenceTracker() if tracker is None else tracker

    def deliver(self, events: Sequence[RemoteEvent], /) -> Promise[list[Outcome]]:
        """See :class:`~messaging.remoteevent.listener.EventTarget`; acknowledges what has arrived before."""
        fresh: list[RemoteEvent] = []
        known: set[tuple[Any, int]] = set()
        for each in events:
            key = (each.kind, each.sequence_number)
            if key not in known and not self.tracker.has(each):
                known.add(key)
                fresh.append(each)
        promise: Promise[list[Outcome]] = Promise("notify an idempotent listener")
        if not fresh:
            promise.resolve([None] * len(events))
            return promise
        answer = self._target.deliver(WantedEvents(fresh, wanted_test(events)))
        if self._on_missed is None:
            answer.listen(lambda: self._answered(events, fresh, answer, promise))
        else:  # the callback must not run on the event loop of the engine
            answer.listen(lambda: workers().submit(lambda: self._answered(events, fresh, answer, promise)))
        return promise

    def _answered(
        self,
        events: Sequence[RemoteEvent],
        fresh: list[RemoteEvent],
        answer: Promise[list[Outcome]],
        promise: Promise[list[Outcome]],
    ) -> None:
        """Give the outcome of each event, in order; that of a duplicate is the one of its first arrival."""
        found = outcomes_of(answer)
        by_event = {(event.kind, event.sequence_number): outcome for event, outcome in zip(fresh, found, strict=False)}
        asked = {(each.kind, each.sequence_number) for each in fresh}
        outcomes: list[Outcome] = []
        for each in events:
            key = (each.kind, each.sequence_number)
            if key in asked and key not in by_event:
                break  # not tried
            outcome = by_event.get(key)
            outcomes.append(outcome)
            if outcome is None or disposition(outcome) is Disposition.BAD_EVENT:
                self._note(each)
        promise.resolve(outcomes)

    def _note(self, event: RemoteEvent) -> None:
        arrival = self.tracker.note(event)
        if arrival.newly_missed and self._on_missed is not None:
            try:
                self._on_missed(event, arrival)
            except Exception:
                logger.exception("a callback for lost events of %r failed", event.kind)
