"""Event Admin: events that are sent and posted in one process, with handlers that come, go, fail, stall and publish.

What is promised, and checked (RFC 97, ``messaging/eventadmin/admin.py``):

- a handler gets exactly the events of its topics that pass its filter, each once; the receivers of a posted event are
  determined when it is posted, and one that is unregistered or blocked before its turn is not called;
- all receivers have returned from a posted event before one gets the next (requirement 15); a handler that needs no
  order (``async.unordered``) is outside of that. Posted events are handled on other threads;
- a sent event was handled on the sending thread when ``send_event`` returns, by all handlers that remained;
- an exception keeps no event from the others, and blocks nobody; a handler that does not return in time is blocked
  until its registration is updated, and the others get their events;
- ``flush()`` waits for the events posted before; ``close()`` delivers them, or drops them after its timeout. A closed
  Event Admin refuses events, and calls no handler but for events that are being sent.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from math import inf
from typing import TYPE_CHECKING, Any, ClassVar, Final

from messaging import MessagingError
from messaging.dispatch import EVENT_ADMIN, Tolerance
from messaging.errors import ClosedError
from messaging.eventadmin import Event, EventAdmin, EventConstants, EventHandler
from messaging.execution import clock
from messaging.services import ServiceRegistry
from tests.simulation.fault_plans import draw_faults
from tests.simulation.plans import Plan, Step
from tests.simulation.simulation import Role, Simulation, scheduling, span
from tests.simulation.world.world import PlannedError

if TYPE_CHECKING:
    import random

    from messaging.services import ServiceRegistration
    from tests.simulation.world.processes import Process

#: time in which a handler gets an event that nothing disturbs, seconds
ARRIVES: Final = 60.0
#: longest pause between two looks for calls that take too long, seconds: see ``messaging.execution.deadlines``
_LOOK: Final = 0.25
TOPICS: Final = ("ev/a", "ev/b", "ev/x/c", "other/d")
FILTERS: Final = ("*", "ev/*", "ev/a", "ev/x/*", "ev/b", "other/d")
NAMES: Final = ("main", "one", "two")


@dataclass(eq=False, slots=True)
class Published:
    """An event.

    Attributes:
        key: of its publisher, which is one thread, and ``number``.
        at, until: moments of the history between which it was published, see ``EventAdminAlone.moment``.
        thread: that published it.
        admin: number of the Event Admin; ``was_open``: whether that was open just before the call.
        state: ``open``, ``done``, or ``refused``.
    """

    key: str
    publisher: str
    number: int
    topic: str
    is_sent: bool
    at: int
    thread: int
    admin: int
    was_open: bool
    until: float = inf
    returned: float = inf
    state: str = "open"


@dataclass(eq=False)
class Terms:
    """What a handler wants from the moment ``began`` or ``done`` on, until ``gone``; ``time``: when that began."""

    topics: str
    residue: int | None
    began: int
    time: float
    done: float = inf
    gone: float = inf

    def wants(self, event: Published) -> bool:
        """Return whether an event is for it."""
        is_for_it = EVENT_ADMIN.parse(self.topics).matches(event.topic)
        return bool(is_for_it) and (self.residue is None or event.number % 3 == self.residue)


@dataclass(eq=False)
class Handler:
    """A registered handler.

    Attributes:
        terms: its terms, one after the other; an update makes new ones.
        ended: moment at which it began to end; ``silent``: time since when it must not be called.
        limit: how long it may take for a posted event, seconds; ``own``: the same, if it says so itself.
        calls: events that it has now: the time of the call, and how long it may take.
        stalls: times at which it had had an event for too long, with the seconds that it returned later, or almost: it
            is blocked from then on, until an update.
        is_close: it took almost too long, or was held up so that it may have taken too long.
    """

    label: str
    admin: int
    manner: str
    is_ordered: bool
    limit: float
    own: float | None
    terms: list[Terms] = field(default_factory=list)
    ended: float = inf
    silent: float = inf
    is_close: bool = False
    got: dict[str, int] = field(default_factory=dict)
    done: dict[str, int] = field(default_factory=dict)
    calls: dict[str, tuple[float, float]] = field(default_factory=dict)
    highest: dict[str, int] = field(default_factory=dict)
    stalls: list[tuple[float, float]] = field(default_factory=list)
    registration: ServiceRegistration | None = None

    def may_get(self, event: Published) -> bool:
        """Return whether it was a receiver at some moment of the publication."""
        return any(each.began <= event.until and each.gone >= event.at and each.wants(event) for each in self.terms)

    def has_to_get(self, event: Published) -> bool:
        """Return whether it was a receiver at every moment of the publication, and remained one."""
        if self.ended < inf or self.admin != event.admin or event.state != "done":
            return False
        now = [each for each in self.terms if each.began <= event.until and each.gone >= event.at]
        return bool(now) and now[0].done < event.at and all(each.wants(event) for each in now)


class Program(Role):
    """A thread that publishes; the first one has the Event Admin, too."""

    simulation: EventAdminAlone

    def open(self) -> None:
        """See ``Role``."""
        self._threads = 0
        if self.name == "main":
            self.simulation.open_admin()

    def close(self) -> None:
        """See ``Role``."""
        if self.name == "main":
            self.simulation.close_admin(60.0)

    # --- publishing

    def do_publish(self, topics: list[str], way: str) -> None:
        """Step: post or send events."""
        for topic in topics:
            self.simulation.publish(self.name, topic, way == "send")

    def do_publish_aside(self, topics: list[str], way: str, pause: float) -> None:
        """Step: post or send events on another thread."""
        self._threads += 1
        publisher = f"{self.name}.t{self._threads}"

        def run() -> None:
            for topic in topics:
                self.simulation.publish(publisher, topic, way == "send")
                clock.pause(pause)

        self.process.start(run, "publisher")

    # --- handlers

    def do_join(
        self, label: str, topics: str, residue: int | None, manner: str, is_ordered: bool, timeout: float | None
    ) -> None:
        """Step: register a handler."""
        self.simulation.join(label, topics, residue, manner, is_ordered=is_ordered, timeout=timeout)

    def do_leave(self, label: str) -> None:
        """Step: unregister a handler."""
        handler = self.simulation.joined.get(label)
        if handler is not None and handler.registration is not None:
            self.simulation.joined.pop(label, None)
            self.simulation.leave(handler)

    def do_update(self, label: str, topics: str, residue: int | None) -> None:
        """Step: update the registration of a handler; one that is blocked gets events again."""
        handler = self.simulation.joined.get(label)
        if handler is not None and handler.registration is not None:
            self.simulation.update(handler, topics, residue)

    def do_flush(self) -> None:
        """Step: wait until handlers have the events that were posted before."""
        self.simulation.flush()

    def do_reopen(self, timeout: float) -> None:
        """Step: close the Event Admin, and open another one."""
        self.simulation.close_admin(timeout)
        self.simulation.open_admin()


class EventAdminAlone(Simulation):
    """One Event Admin."""

    name = "eventadmin"
    protocols: ClassVar[tuple[str, ...]] = ("memory",)
    has_broker: ClassVar[bool] = False
    _next_look = 0.0
    _pause = 0.05

    def begin(self) -> None:
        """See ``Simulation``."""
        self.events: dict[str, Published] = {}
        self.handlers: list[Handler] = []
        self.joined: dict[str, Handler] = {}
        self.numbers: dict[str, int] = {}
        self.admins = 0
        #: when each Event Admin began to close, and had closed
        self.closing: dict[int, int] = {}
        self.closed: dict[int, float] = {}
        self._moment = 0
        self._inside = threading.local()
        for name in NAMES:
            self.roles.append(Program(self, name))

    def process_for(self, name: str) -> Process:
        """See ``Simulation``: all programs are threads of one process."""
        return self.world.processes[0] if self.world.processes else self.world.process(name)

    def moment(self) -> int:
        """Return a number that grows: in the order of these numbers everything happened."""
        self._moment += 1
        return self._moment

    @property
    def now(self) -> float:
        """Virtual time, seconds."""
        return self.world.scheduler.now

    @property
    def slack(self) -> float:
        """Time that a thread may be held up between two lines, seconds."""
        return ARRIVES if self.plan.options["hold_up"] else 0.01

    # --- the Event Admin

    def open_admin(self) -> None:
        """Open one."""
        options = self.plan.options
        number = self.admins + 1
        services = ServiceRegistry()
        admin = EventAdmin(
            services, name=f"admin-{number}", tolerance=Tolerance(failures=0, timeout=options["timeout"]),
            send_timeout=options["send_timeout"], threads=options["threads"],
        )  # fmt: skip
        self.admin, self.admins = admin, number
        #: replaced as a whole, which other threads read
        self.current = admin, number, services
        for number, (topics, residue) in enumerate((("*", None), ("ev/*", 1), ("ev/a", None))):
            self.join(f"lasting-{number}", topics, residue, "good", is_ordered=number != 1, timeout=None)

    def close_admin(self, timeout: float) -> None:
        """Close it, and look at what it promised."""
        admin, number, began = self.admin, self.admins, self.now
        self.closing[number] = self.moment()
        mine = [each for each in self.handlers if each.admin == number]
        posted = [each for each in self.events.values() if each.admin == number and each.until < self.closing[number]]
        admin.close(timeout)
        took = self.now - began
        is_in_time = took < timeout and not any(each.stalls or each.is_close for each in mine)
        self.closed[number] = self.now
        for handler in mine:
            for event in posted if is_in_time else ():
                if handler.has_to_get(event) and event.key not in handler.done and not self._is_blocked(handler, event):
                    self.broken(f"{handler.label} does not have {event.key} after close(), which took {took:g} s")
            handler.ended = min(handler.ended, self.moment())
            handler.silent = min(handler.silent, self.now)
        self.joined.clear()
        try:
            admin.post_event(Event("ev/a", {"late": True}))
        except ClosedError:
            pass
        else:
            self.broken(f"admin {number} took an event after close()")

    def flush(self) -> None:
        """Flush it."""
        admin, number, _ = self.current
        began = self.moment()
        try:
            admin.flush().result(600.0)
        except MessagingError as error:
            self.broken(f"flush() failed: {error}")
            return
        for handler in [*self.handlers]:
            for event in self.events.values() if handler.admin == number else ():
                is_due = event.until < began and handler.has_to_get(event) and event.key not in handler.done
                if is_due and not self._is_blocked(handler, event) and number not in self.closing:
                    self.broken(f"{handler.label} does not have {event.key} after flush()")

    # --- handlers

    def join(
        self, label: str, topics: str, residue: int | None, manner: str, *, is_ordered: bool, timeout: float | None
    ) -> None:
        """Register a handler."""
        if label in self.joined:
            return
        limit = self.plan.options["timeout"] if timeout is None else timeout
        _, number, services = self.current
        handler = Handler(f"{number} {label}", number, manner, is_ordered, limit, timeout)
        handler.terms.append(Terms(topics, residue, self.moment(), self.now))
        self.handlers.append(handler)
        self.joined[label] = handler
        properties = self._properties(handler)
        handler.registration = services.register(EventHandler, lambda event: self._handle(handler, event), properties)
        handler.terms[-1].done = self.moment()

    @staticmethod
    def _properties(handler: Handler) -> dict[str, Any]:
        terms = handler.terms[-1]
        properties: dict[str, Any] = {EventConstants.EVENT_TOPIC: terms.topics, "label": handler.label}
        if terms.residue is not None:
            properties[EventConstants.EVENT_FILTER] = f"(k={terms.residue})"
        if handler.own is not None:
            properties[EventConstants.EVENT_TIMEOUT] = handler.own
        if not handler.is_ordered:
            properties[EventConstants.EVENT_DELIVERY] = EventConstants.DELIVERY_ASYNC_UNORDERED
        return properties

    def update(self, handler: Handler, topics: str, residue: int | None) -> None:
        """Update a registration."""
        former = handler.terms[-1]
        made = Terms(topics, residue, self.moment(), self.now)
        handler.terms.append(made)
        properties = self._properties(handler)
        assert handler.registration is not None
        try:
            handler.registration.update(properties)
        except ClosedError:  # it has left meanwhile
            if handler.ended == inf:
                self.broken(f"{handler.label} cannot be updated, and has not left")
        made.done = former.gone = self.moment()

    def leave(self, handler: Handler) -> None:
        """Unregister a handler."""
        handler.ended = min(handler.ended, self.moment())
        assert handler.registration is not None
        handler.registration.unregister()
        handler.silent = min(handler.silent, self.now)

    def _handle(self, handler: Handler, given: Event) -> None:
        if given.get_property("late"):
            self.broken(f"{handler.label} got an event that was refused")
            return
        event = self.events[given.get_property("key")]
        name, key, now = handler.label, event.key, self.now
        self._began(handler, event)
        handler.got[key] = self.moment()
        limit = self._limit(handler, event)
        handler.calls[key] = now, limit
        try:
            self._behave(handler, event)
        finally:
            took = self.now - now
            if took >= 0.9 * limit:
                handler.stalls.append((now + limit, took - limit))
            handler.is_close |= took + (4.0 if self.plan.options["hold_up"] else 0.0) >= 0.9 * limit
            del handler.calls[key]
            handler.done[key] = self.moment()
            self.world.note("handler", f"{name} had {key} for {took:g} s")

    def _limit(self, handler: Handler, event: Published) -> float:
        """Return how long a handler may take for an event, seconds."""
        if not event.is_sent:
            return handler.limit
        within: float = self.plan.options["send_timeout"]
        return (handler.own or within) if within else inf

    def _began(self, handler: Handler, event: Published) -> None:
        """Check that a handler may get an event now."""
        name, key = handler.label, event.key
        if key in handler.got:
            self.broken(f"{name} got {key} again")
        if event.admin != handler.admin:
            self.broken(f"{name} got {key} of admin {event.admin}")
        if not handler.may_get(event):
            self.broken(f"{name} got {key} on {event.topic}, and wanted {handler.terms}")
        # "send_event: returns when all handlers have returned": closing does not end one that has begun
        is_begun = event.is_sent and event.was_open and self.closing.get(event.admin, inf) <= handler.ended
        if self.now > handler.silent + self.slack and not is_begun:
            self.broken(f"{name} got {key} {self.now - handler.silent:g} s after it ended")
        if event.is_sent:
            if not self.plan.options["send_timeout"] and event.thread != threading.get_ident():
                self.broken(f"{name} got {key}, which was sent, on another thread")
            if event.returned < inf:
                self.broken(f"{name} got {key} after send_event() had returned")
            return
        if event.thread == threading.get_ident() and not event.publisher.startswith("in "):
            self.broken(f"{name} got {key}, which was posted, on the thread that posted it")
        if not handler.is_ordered:
            return
        if event.number < handler.highest.get(event.publisher, -1):
            self.broken(f"{name} got {key} after {event.publisher}/{handler.highest[event.publisher]}")
        handler.highest[event.publisher] = event.number
        for other in self.handlers:
            if other.admin != handler.admin or not other.is_ordered:
                continue
            for busy, (since, limit) in [*other.calls.items()]:
                is_late = self.now - since >= 0.9 * limit  # "delivery continues with the next handler"
                if busy != key and not self.events[busy].is_sent and not is_late:
                    self.broken(f"{name} got {key} while {other.label} had {busy}")

    def _behave(self, handler: Handler, event: Published) -> None:
        manner = handler.manner
        if manner == "slow":
            clock.pause(0.1)
        elif manner == "raises":
            raise PlannedError("as planned")
        elif manner == "stalls" and len(handler.got) % 4 == 3:
            clock.pause(2.0 * handler.limit + 1.0)
        elif manner in ("posts", "sends") and not event.publisher.startswith("in "):
            self.publish(f"in {handler.label} of {event.key}", "ev/x/c", manner == "sends")
        elif manner == "leaves" and handler.registration is not None:  # otherwise it is being registered
            self.joined.pop(handler.label.split(" ")[1], None)
            self.leave(handler)
        elif manner == "joins" and event.admin == self.admins and event.admin not in self.closing:
            self.join(f"of-{event.key}", "ev/a", None, "good", is_ordered=True, timeout=None)

    # --- publishing

    def publish(self, publisher: str, topic: str, is_sent: bool) -> None:
        """Publish an event."""
        admin, number, _ = self.current
        count = self.numbers.get(publisher, 0)
        self.numbers[publisher] = count + 1
        event = Published(
            f"{publisher}/{count}", publisher, count, topic, is_sent, self.moment(), threading.get_ident(), number,
            admin.is_open,
        )  # fmt: skip
        self.events[event.key] = event
        given = Event(topic, {"key": event.key, "k": count % 3})
        began = self.now
        try:
            if is_sent:
                admin.send_event(given)
            else:
                admin.post_event(given)
        except ClosedError:
            event.state = "refused"
            if number not in self.closing:
                self.broken(f"{event.key} was refused, and nothing was closed")
        except MessagingError as error:
            self.broken(f"publishing {event.key} raised {error!r}")
        else:
            event.state = "done"
            # the moment of `closing` is before close(): an event of the time between is accepted, and the delivery of
            # a sent one goes on after close() has returned
            is_over = event.at > self.closing.get(number, inf) and self.now > self.closed.get(number, inf) + self.slack
            if not event.was_open or (is_over and not is_sent):
                self.broken(f"admin {number} took {event.key} after close()")
        event.until = self.moment()
        event.returned = self.now
        self.world.note(publisher, f"{event.key} on {topic} {'sent' if is_sent else 'posted'}: {event.state}")
        if is_sent and event.state == "done":
            self._check_sent(event, self.now - began)

    def _check_sent(self, event: Published, _: float) -> None:
        for handler in [*self.handlers]:
            if handler.has_to_get(event) and event.key not in handler.done and not self._is_blocked(handler, event):
                self.broken(f"{handler.label} does not have {event.key} after send_event()")

    def _is_blocked(self, handler: Handler, event: Published) -> bool:
        """Return whether a handler may have been blocked when an event was its turn."""
        if any(self.now - since >= 0.9 * limit for since, limit in handler.calls.values()):
            return True
        updated = max((each.time for each in handler.terms if each.began < event.at), default=0.0)
        is_held_up = bool(self.plan.options["hold_up"])
        # an update between the end of the time limit and the next look at it ends no call: the handler is blocked then
        since = updated - self.slack - _LOOK
        return any(each >= since for each, _ in handler.stalls) or (is_held_up and handler.is_close)

    # --- judging

    def _missing(self) -> list[str]:
        found = []
        for handler in self.handlers:
            for event in self.events.values():
                is_due = handler.has_to_get(event) and event.key not in handler.done
                if is_due and not self._is_blocked(handler, event):
                    found.append(f"{handler.label} ({handler.terms[-1].topics}) did not get {event.key}")
        return found

    def is_at_rest(self) -> bool:
        """See ``Simulation``."""
        is_idle = not any(each.calls for each in self.handlers) and not self.admin.get_dto().waiting
        if not is_idle or any(each.until == inf for each in self.events.values()) or self.now < self._next_look:
            return False
        self._pause = min(2 * self._pause, 10.0)  # looking at everything takes its time
        self._next_look = self.now + self._pause
        return not self._missing()

    def judge(self) -> None:
        """See ``Simulation``."""
        for text in self._missing():
            self.broken(text)
        blocked = {each.service_id for each in self.admin.get_dto().handlers if each.blocked is not None}
        for handler in self.joined.values():
            if handler.admin != self.admins or handler.registration is None:
                continue
            is_blocked = handler.registration.reference.id in blocked
            if is_blocked and not handler.is_close:
                self.broken(f"{handler.label} is blocked, and always returned in time")
            late = [late for at, late in handler.stalls if at > handler.terms[-1].time + self.slack]
            if not is_blocked and late and max(late) > 1.0 + self.slack:
                self.broken(f"{handler.label} is not blocked, and returned {max(late):g} s too late")

    # --- plans

    @classmethod
    def make_plan(cls, random: random.Random, protocol: str) -> Plan:
        """See ``Simulation``."""
        steps = [step for name in NAMES for step in _steps(random, name)]
        options = {
            **scheduling(random),
            "timeout": random.choice((1.0, 5.0, 30.0)),
            "send_timeout": random.choice((0.0, 0.0, 3.0)),
            "threads": random.choice((None, 1, 2, 5)),
        }
        return Plan(options, tuple(steps), tuple(draw_faults(random, protocol, NAMES, least=2)))


def _steps(random: random.Random, name: str) -> list[Step]:
    """Return the steps of one thread."""
    steps: list[Step] = []

    def add(step: str, **arguments: Any) -> None:
        steps.append(Step(name, step, arguments))

    labels: list[str] = []
    for number in range(random.randint(10, 24)):
        chosen = random.random()
        topics = [random.choice(TOPICS) for _ in range(random.choice((1, 1, 2, 3, 8)))]
        way = random.choice(("post", "post", "send"))
        if chosen < 0.30:
            add("publish", topics=topics, way=way)
        elif chosen < 0.40:
            add("publish_aside", topics=topics, way=way, pause=span(random, 1e-4, 0.3))
        elif chosen < 0.55:
            add("pause", seconds=span(random, 1e-4, 2.0))
        elif chosen < 0.77:
            labels.append(f"{name}{number}")
            add(
                "join", label=labels[-1], topics=random.choice(FILTERS), residue=random.choice((None, None, 2)),
                manner=random.choice(("good", "slow", "raises", "stalls", "posts", "sends", "leaves", "joins")),
                is_ordered=random.random() < 0.7, timeout=random.choice((None, None, 0.5, 2.0)),
            )  # fmt: skip
        elif chosen < 0.84:
            add("leave", label=random.choice(labels) if labels else "none")
        elif chosen < 0.93:
            add(
                "update", label=random.choice(labels) if labels else "none", topics=random.choice(FILTERS),
                residue=random.choice((None, None, 2)),
            )  # fmt: skip
        elif chosen < 0.97 or name != "main":
            add("flush")
        else:
            add("reopen", timeout=random.choice((0.0, 1.0, 60.0)))
    return steps
