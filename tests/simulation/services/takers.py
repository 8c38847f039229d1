"""Owners of registrations at a mailbox: they take events in all ways, and judge what arrives."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from math import inf
from typing import TYPE_CHECKING, Any, Final

from messaging.errors import InvalidIteratorError, ListenerGoneError, MessagingError, UnknownLeaseError
from messaging.execution import clock
from messaging.leases import Lease, LeaseRenewalManager
from messaging.remoteevent import ListenerReference, RemoteEvent, RemoteGenerator, RenewalFailureEvent
from tests.simulation.services.parties import Noted, Party, channel_of, is_calm
from tests.simulation.world.world import PlannedError

if TYPE_CHECKING:
    from messaging import Messaging
    from messaging.remoteevent.event import EventKind
    from tests.simulation.services.mailbox import Mailboxes

MAILBOX: Final = "mailboxes/field"
#: how long a target may get events after delivery was disabled: a request that is under way, virtual seconds
_AFTER: Final = 60.0


class _LaterError(Exception):
    """What a target raises that cannot take an event now."""


@dataclass(slots=True)
class Interest:
    """A registration of a box at a generator.

    Attributes:
        kind: source and id.
        lease_id: at the generator.
        after: number of the last event before it.
        is_renewed: the mailbox renews it.
        is_forever: its lease needs no renewal.
        is_over: the owner has given it up, or was told that it has ended.
        lease: as long as the process lives that has registered.
    """

    kind: EventKind
    lease_id: str
    after: int
    is_forever: bool
    is_renewed: bool = False
    is_over: bool = False
    lease: Lease | None = None


@dataclass(slots=True)
class Box:
    """A registration at the mailbox, as its owner knows it.

    Attributes:
        id: of the registration.
        name: for handbacks and reports.
        keep: which events are kept.
        expires: when its lease ends, as far as the owner knows, virtual seconds.
        may_be_cancelled: the owner has asked for it.
        has_ended: the owner knows that it has.
        asked: the kinds that it was to be registered for.
        seen: numbers of the events that arrived, by kind, in the order of their first arrival.
        highest: number of the last event of a kind that arrived in one way for the first time.
        again: how many events arrived more than once.
        suppressed: of each kind, what the events said.
        doubled: the kinds for which it may have had several registrations.
        failures: the leases of whose end a notice was found.
        lost_before: a drain was interrupted then: what it had removed is lost with the owner.
        silent_since: nothing may be pushed since then; infinite while delivery may be enabled.
    """

    id: str
    name: str
    keep: str
    expires: float
    may_be_cancelled: bool = False
    has_ended: bool = False
    interests: list[Interest] = field(default_factory=list)
    asked: dict[EventKind, None] = field(default_factory=dict)
    seen: dict[EventKind, dict[int, None]] = field(default_factory=dict)
    highest: dict[tuple[EventKind, str], int] = field(default_factory=dict)
    again: int = 0
    suppressed: dict[EventKind, int] = field(default_factory=dict)
    doubled: dict[EventKind, None] = field(default_factory=dict)
    failures: dict[str, None] = field(default_factory=dict)
    lost_before: float = 0.0
    silent_since: float = 0.0


class Taker(Party):
    """An owner of a box, wherever that is: takes events in all ways."""

    simulation: Mailboxes
    m: Messaging

    def begin_life(self) -> None:
        """Begin in a new process."""
        self.boxes: list[Box] = getattr(self, "boxes", [])
        if getattr(self, "is_draining", False):
            self.boxes[-1].lost_before = self.world.scheduler.now
        for box in self.boxes:
            for interest in box.interests:
                interest.lease = None  # its instance is gone
        self.is_draining = False
        self.failing = 0
        self.failure = ""
        self.slow = 0.0
        self.manager: LeaseRenewalManager | None = None
        self.lease: Lease | None = None
        self.iterator: Any = None
        self.registration: Any = None
        self.is_enabled = False
        #: since when each target of this process is to get nothing more, by number
        self.silent: dict[int, float] = {}
        #: how many events targets of this process have begun
        self.begun = 0
        self.generators: dict[str, RemoteGenerator] = {}

    @property
    def own(self) -> dict[str, Any]:
        """The options of this owner."""
        found: dict[str, Any] = self.simulation.plan.options["owners"][self.name]
        return found

    @property
    def box(self) -> Box | None:
        """The present box; ``None`` if there is none, or it has ended."""
        return self.boxes[-1] if self.boxes and not self.boxes[-1].has_ended else None

    @property
    def has_company(self) -> bool:
        """Whether another thread takes events beside the role's own."""
        steps = self.simulation.plan.steps
        return any(step.role == self.name and step.name == "take_beside" for step in steps)

    # --- to be defined

    def register(self) -> Any:
        """Register at the mailbox; return the registration or its promise."""
        raise NotImplementedError

    def find(self, box: Box) -> Any:
        """Return the registration of an earlier life."""
        raise NotImplementedError

    def target(self) -> Any:
        """Return the target of deliveries."""
        raise NotImplementedError

    def silence(self) -> None:
        """Note that no target of this process is to get anything more: delivery was disabled."""

    def renew_interest(self, interest: Interest) -> Any:
        """Have the mailbox renew the lease of an interest."""
        raise NotImplementedError

    # --- registering

    def ensure(self) -> bool:
        """Register what is not registered, as far as possible; return whether all is."""
        return self.attempt("register", self._ensure_box) and self._ensure_interests()

    def _ensure_box(self) -> None:
        options = self.own
        if self.box is None:
            asked_at = self.world.scheduler.now
            registration = self.settled(self.register(), self.simulation.timeout, "a registration")
            box = Box(
                registration.id,
                f"{self.name}#{len(self.boxes) + 1}",
                options["keep"],
                asked_at + registration.lease.duration,
            )
            self.boxes.append(box)
            self.note(f"{box.name} registered for {registration.lease.duration:g} s")
            self._use(registration)
        elif self.registration is None:
            self._use(self.find(self.boxes[-1]))

    def _use(self, registration: Any) -> None:
        self.registration, self.lease = registration, registration.lease
        self.is_enabled, self.iterator = False, None
        if self.own["renewal"] == "manager" and self.manager is not None:
            self.manager.renew_until(self.lease)

    def _ensure_interests(self) -> bool:
        box = self.box
        if box is None:
            return False
        is_complete = True
        for kind in [(source, event_id) for source, event_id in self.own["interests"]]:
            living = [each for each in box.interests if each.kind == kind and not each.is_over]
            for each in living:
                if not each.is_forever and not each.is_renewed and box is self.box:
                    self.attempt("have a lease renewed", lambda each=each: self._renew_interest(each))  # type: ignore[misc]
            if not any(not each.is_over for each in living) and box is self.box:
                self.attempt(f"register for {kind}", lambda kind=kind: self._register_interest(box, kind))  # type: ignore[misc]
            is_complete = is_complete and any(
                each.is_forever or each.is_renewed for each in box.interests if each.kind == kind and not each.is_over
            )
        return is_complete

    def _register_interest(self, box: Box, kind: EventKind) -> None:
        source, event_id = kind
        generator = self.generators.get(source)
        if generator is None:
            generator = self.generators[source] = RemoteGenerator(
                self.m, channel_of(source), timeout=self.simulation.timeout
            )
        duration = self.own["interest"]
        if kind in box.asked:
            box.doubled[kind] = None
        box.asked[kind] = None
        promise = generator.register(event_id, {"box": box.name}, ListenerReference(MAILBOX, box.id), duration)
        found = self.settled(promise, self.simulation.timeout, "an interest")
        interest = Interest(kind, found.lease.id, found.sequence_number, duration == inf, lease=found.lease)
        box.interests.append(interest)
        self.note(f"{box.name}: interest {interest.lease_id} in {kind} after {interest.after}")
        if found.kind != kind or not found.is_fully_ordered:
            self.simulation.broken(
                f"{box.name}: the registration is of {found.kind}, fully ordered: {found.is_fully_ordered}"
            )
        if not interest.is_forever:
            self._renew_interest(interest)

    def _renew_interest(self, interest: Interest) -> None:
        if interest.lease is None or interest.lease.remaining < 1.0:
            interest.is_over = True
            return
        try:
            self.settled(self.renew_interest(interest), self.simulation.timeout, "renew_lease")
        except UnknownLeaseError as error:
            self._ended(error, "renew_lease")
        else:
            interest.is_renewed = True

    # --- arrivals

    def arrived(self, box: Box, event: RemoteEvent, way: str) -> None:
        """Note an event, and judge it."""
        simulation = self.simulation
        if isinstance(event, RenewalFailureEvent):
            self._note_failure(box, event)
            return
        if not isinstance(event, Noted):
            simulation.broken(f"{box.name}: an event arrived that nobody generated: {event!r}"[:300])
            return
        text, kind, number = event.text.rstrip("."), event.kind, event.sequence_number
        sent = simulation.ledger.sent.get(text)
        if sent is None or sent.kind != kind or sent.state not in ("sent", "confirmed", "killed"):
            simulation.broken(f"{box.name}: {text} arrived as {kind}, and was sent as {sent}")
            return
        if sent.state == "confirmed" and sent.number != number:
            simulation.broken(f"{box.name}: {text} arrived with the number {number}, and has {sent.number}")
        if event.handback != {"box": box.name}:
            simulation.broken(f"{box.name}: {text} arrived with the handback {event.handback}")
        seen = box.seen.setdefault(kind, {})
        highest = box.highest.get((kind, way), 0)
        is_new = number not in seen
        # two registrations for one kind each keep their order
        is_ordered = not self.has_company and kind not in box.doubled
        self.note(f"{box.name}: {text} number {number} {way}" + ("" if is_new else " again"))
        if is_new and number < highest and is_ordered:
            simulation.broken(f"{box.name}: {number} of {kind} arrived by {way} behind {highest}")
        box.highest[kind, way] = max(highest, number)
        seen[number] = None
        if is_new:
            box.suppressed[kind] = box.suppressed.get(kind, 0) + event.suppressed
        else:
            box.again += 1
            if is_calm(simulation) and box.keep == "all":
                simulation.broken(f"{box.name}: {text} arrived again by {way}, although nothing failed")

    def _note_failure(self, box: Box, event: RenewalFailureEvent) -> None:
        self.note(f"{box.name}: notice of {event.lease_id}: {event.error}")
        box.failures[event.lease_id] = None
        known = [each for each in box.interests if each.lease_id == event.lease_id]
        if not known and self.lives == 1:
            self.simulation.broken(f"{box.name}: a notice of a lease that it has not: {event.lease_id}")
        for each in known:
            if each.is_forever:
                self.simulation.broken(f"{box.name}: a notice of a lease that was not to be renewed: {event.lease_id}")
            each.is_over = True

    def listener(self, number: int) -> Any:
        """Return a target of its own, a function or a coroutine function."""
        if self.own["is_coroutine"]:

            async def listen_soon(event: RemoteEvent) -> None:
                self._begun(number)
                await self.notified_soon(event)

            return listen_soon

        def listen(event: RemoteEvent) -> None:
            self._begun(number)
            self.notified(event)

        return listen

    def await_event(self, seconds: float) -> None:
        """Wait until a target begins an event, for at most so many seconds."""
        begun, until = self.begun, self.world.scheduler.now + seconds
        while self.begun == begun and self.world.scheduler.now < until:
            clock.pause(0.001)

    def _begun(self, number: int) -> None:
        self.begun += 1
        since = self.silent.get(number, inf)
        options = self.simulation.plan.options
        # "nothing follows within a batch" (EV.2.1); the event that it has is finished
        slack = _AFTER if options["hold_up"] > 0.0 else 0.0
        if self.world.scheduler.now > since + slack:
            self.simulation.broken(
                f"{self.name}: its target {number} gets an event {self.world.scheduler.now - since:g} s after its end"
            )

    def notified(self, event: RemoteEvent) -> None:
        """Take a pushed event, or fail as planned. On any thread of the process."""
        if self.failing > 0:
            self.failing -= 1
            self.note(f"fails: {self.failure}")
            if self.failure == "later":
                raise _LaterError("as planned")
            if self.failure == "gone":
                self.is_enabled = False
                raise ListenerGoneError("as planned")
        if self.slow:
            clock.pause(self.slow)
        self._pushed(event)
        if self.failure == "bad" and self.failing > 0:
            raise PlannedError("as planned")

    def _pushed(self, event: RemoteEvent) -> None:
        handback = event.handback
        name = handback["box"] if isinstance(handback, dict) else ""
        boxes = [each for each in self.boxes if each.name == name] or self.boxes[-1:]
        for box in boxes:
            self.arrived(box, event, "push")
            if self.world.scheduler.now > box.silent_since + _AFTER:
                self.simulation.broken(f"{box.name}: an event is pushed {_AFTER:g} s after delivery was disabled")

    async def notified_soon(self, event: RemoteEvent) -> None:
        """As :meth:`notified`, on an event loop."""
        slow, self.slow = self.slow, 0.0
        if slow:
            await clock.sleep(slow)
        self.slow = slow
        box = self.box
        if box is not None:
            self._pushed(event)

    # --- steps

    def call(self, what: str, function: Any) -> None:
        """Call something of the box, once all is registered."""
        self.ensure()
        box = self.box
        if box is None or self.registration is None:
            return
        try:
            function(box)
        except (UnknownLeaseError, InvalidIteratorError) as error:
            if isinstance(error, InvalidIteratorError):
                self._invalid(box, error, what)
            else:
                self._ended(error, what)
        except MessagingError as error:
            self.failed(what, error)

    def _ended(self, error: MessagingError, what: str) -> None:
        """Note that the box has ended: judge whether it may have."""
        box = self.box
        self.note(f"{what}: {error}")
        if box is None:
            return
        left = inf if self.lease is None else self.lease.remaining
        if left > 0.01 and not box.may_be_cancelled and not self.simulation.may_lose_renewals(box.expires):
            self.simulation.broken(
                f"{box.name}: {what} says that it has ended, {left:g} s before the end of its lease: {error}"
            )
        box.has_ended = True
        box.silent_since = min(box.silent_since, self.world.scheduler.now)
        self.registration = self.iterator = None
        self.is_enabled = False
        if self.manager is not None and self.lease is not None:
            self.manager.remove(self.lease)

    def _invalid(self, box: Box, error: InvalidIteratorError, what: str) -> None:
        self.note(f"{what}: {error}")
        is_own = self.iterator is not None and not self.is_enabled
        if is_own and is_calm(self.simulation) and not self.has_company:
            self.simulation.broken(f"{box.name}: {what}: {error}, although nothing took its place")
        self.iterator = None

    def _iterator(self, box: Box) -> Any:
        if self.iterator is None:
            self.is_enabled = False  # also if the call fails: "a change of the delivery may have been stored"
            iterator = self.settled(self.registration.remote_events(), self.simulation.timeout, "an iterator")
            self.iterator = iterator
            self.silence()
            box.silent_since = min(box.silent_since, self.world.scheduler.now)
        return self.iterator

    def do_take(self, way: str, count: int, timeout: float) -> None:
        """Step: pull events with an iterator."""

        def take(box: Box) -> None:
            iterator = self._iterator(box)
            if way == "batch":
                for event in iterator.batch(count, timeout):
                    self.arrived(box, event, "pull")
                return
            for _ in range(count):
                event = asyncio.run(iterator.next_soon(timeout)) if way == "soon" else iterator.next(timeout)
                if event is None:
                    return
                self.arrived(box, event, "pull")

        self.call(f"take by {way}", take)

    def do_take_beside(self, seconds: float) -> None:
        """Step: have another thread pull events for some time; each of the two ends the iterator of the other."""
        box, registration = self.box, self.registration
        if box is None or registration is None:
            return
        until = self.world.scheduler.now + seconds

        def take() -> None:
            try:
                iterator = self.settled(registration.remote_events(), self.simulation.timeout, "an iterator")
                while self.world.scheduler.now < until:
                    event = iterator.next(1.0)
                    if event is not None:
                        self.arrived(box, event, "pull beside")
            except (UnknownLeaseError, InvalidIteratorError) as error:
                self.note(f"pull beside: {error}")
            except MessagingError as error:
                self.failed("pull beside", error)

        self.process.start(take, f"{self.name} beside")

    def do_close_iterator(self) -> None:
        """Step: close the iterator."""

        def close(_box: Box) -> None:
            if self.iterator is not None:
                iterator = self.iterator
                iterator.close()
                self.iterator = None

        self.call("close the iterator", close)

    def do_drain(self, most: int | None) -> None:
        """Step: take what is stored."""

        def drain(box: Box) -> None:
            self.is_enabled = False  # as in `_iterator`
            self.is_draining = True
            try:
                for event in self.registration.drain(most):
                    self.arrived(box, event, "pull")
            finally:
                self.is_draining = False
            self.iterator = None
            self.silence()
            box.silent_since = min(box.silent_since, self.world.scheduler.now)

        self.call("drain", drain)

    def do_enable(self, waits: float = 0.0) -> None:
        """Step: have the events pushed. If it ``waits``, for at most so long, a batch may be under way."""
        self.await_event(waits)

        def enable(box: Box) -> None:
            box.silent_since = inf
            self.is_enabled = True  # a target that is gone says so before the answer comes
            try:
                found = self.registration.enable_delivery(self.target())
                self.settled(found, self.simulation.timeout, "enable_delivery")
            except MessagingError:
                self.is_enabled = False
                raise
            self.iterator = None

        self.call("enable delivery", enable)

    def do_disable(self) -> None:
        """Step: have the events stored only."""

        def disable(box: Box) -> None:
            self.is_enabled = False  # as in `_iterator`
            self.settled(self.registration.disable_delivery(), self.simulation.timeout, "disable_delivery")
            self.silence()
            box.silent_since = min(box.silent_since, self.world.scheduler.now)

        self.call("disable delivery", disable)

    def do_renew(self, seconds: float) -> None:
        """Step: renew the lease of the registration."""

        def renew(box: Box) -> None:
            lease = self.lease
            if lease is None:
                return
            asked_at = self.world.scheduler.now
            box.expires = min(box.expires, asked_at + seconds)  # it may be shorter than before, whatever is answered
            granted = self.settled(lease.renew(seconds), self.simulation.timeout, "renew")
            box.expires = asked_at + granted

        if self.own["renewal"] == "owner":
            self.call("renew", renew)

    def do_cancel(self) -> None:
        """Step: end the registration."""

        def cancel(box: Box) -> None:
            lease = self.lease
            if lease is None:
                return
            box.may_be_cancelled = True
            self.settled(lease.cancel(), self.simulation.timeout, "cancel")
            self.note(f"{box.name} is cancelled")
            self._ended(UnknownLeaseError("cancelled"), "cancel")

        self.call("cancel", cancel)

    def do_cancel_interest(self, number: int) -> None:
        """Step: end an interest, and register again."""
        box = self.box
        if box is None:
            return
        living = [each for each in box.interests if not each.is_over and each.lease is not None]
        if living:
            interest = living[number % len(living)]
            interest.is_over = True
            lease = interest.lease
            assert lease is not None
            try:
                self.settled(lease.cancel(), self.simulation.timeout, "cancel")
            except UnknownLeaseError as error:
                self.note(f"cancel an interest: {error}")
                if interest.is_forever:
                    self.simulation.broken(
                        f"{box.name}: its interest {interest.lease_id} in {interest.kind} has ended: {error}"
                    )
            except MessagingError as error:
                self.failed("cancel an interest", error)
        self.ensure()

    def do_fail(self, count: int, failure: str) -> None:
        """Step: have the target fail for the next events."""
        self.failing, self.failure = count, failure

    def do_slow(self, seconds: float) -> None:
        """Step: have the target take so long for each event."""
        self.slow = seconds

    # --- rest

    def rest(self) -> None:
        """Take what is left, as the owner does anyway."""
        self.failing = 0
        if not self.ensure():
            clock.pause(1.0)
            return
        lease = self.lease
        if self.own["renewal"] == "owner" and lease is not None and lease.remaining < 60.0:
            self.do_renew(600.0)
        if not self.is_enabled or self.simulation.wants_pulling or self.has_company:
            self.do_drain(None)
        clock.pause(1.0)

    def close_taker(self) -> None:
        """Close what the owner has opened."""
        for each in self.generators.values():
            each.close()
        if self.manager is not None:
            self.manager.close()
