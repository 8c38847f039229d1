"""A program with a typed event bus, its handlers and observers, connected to the buses of other programs."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from datetime import timedelta
from math import inf
from typing import TYPE_CHECKING, Any, Final

from messaging import MessagingError
from messaging.dispatch import TYPED_EVENTS
from messaging.errors import ClosedError
from messaging.execution import clock
from messaging.services import ServiceRegistry
from messaging.typedevent import DurableHistory, RangePolicy, TypedEventBus
from tests.simulation.services.distributed_ledger import Consumer, Event
from tests.simulation.services.joining import network_of
from tests.simulation.simulation import Role
from tests.simulation.world.world import PlannedError

if TYPE_CHECKING:
    from messaging import Promise
    from messaging.dispatch.eventnetwork import NodeDTO
    from messaging.typedevent import BusConnection
    from tests.simulation.services.typedevents import TypedEvents

SLACK: Final = 60.0
#: time in which an event arrives that nothing disturbs, seconds
ARRIVES: Final = 45.0
#: topics of which the buses keep events
KEPT: Final = "ev/kept"
#: exceptions in a row after which a handler is blocked
BLOCKED_AFTER: Final = 10
LASTING: Final = (("wild", "ev/*", None), ("exact", "ev/a", None), ("filtered", "ev/+", 1))


@dataclass
class Payload:
    """A typed event."""

    p: str
    n: int
    t: str
    k: int


@dataclass(eq=False)
class Handler(Consumer):
    """A handler.

    Attributes:
        history: how many past events it asked for.
        before: the events of its bus that were published when its registration began; ``past``: those that it got.
    """

    history: int = 0
    before: dict[str, None] = field(default_factory=dict)
    past: list[str] = field(default_factory=list)

    def wants(self, event: Event) -> bool:
        """See ``Consumer``."""
        is_for_it = TYPED_EVENTS.parse(self.topics).matches(event.topic)
        return bool(is_for_it) and (self.residue is None or event.number % 3 == self.residue)


@dataclass(eq=False)
class Watch:
    """What an observer of a monitor or of a replay got: keys of events, and sequences."""

    name: str
    member: str
    on: float
    is_replay: bool
    #: when subscribing began
    began: float = inf
    got: dict[str, int] = field(default_factory=dict)
    last: int = 0
    over: list[str] = field(default_factory=list)
    is_disposed: bool = False
    highest: dict[str, int] = field(default_factory=dict)
    #: of a replay: sequence of the first event that it asked for; and the first number that it got of each publisher
    since: int = 0
    first: dict[str, int] = field(default_factory=dict)
    #: since when it sees all events: "while past events are left on the disk, events of topics that are not recorded
    #: are left out" (``TypedEventMonitor.replay``)
    is_whole: float = inf

    def must_see(self, event: Event) -> bool:
        """Return whether it should see an event of its bus."""
        return event.at > self.on and (event.topic == KEPT or event.at > self.is_whole)


class BusProgram(Role):
    """The program."""

    simulation: TypedEvents
    bus: TypedEventBus
    connection: BusConnection

    def __init__(self, simulation: TypedEvents, name: str, form: dict[str, Any]) -> None:
        super().__init__(simulation, name)
        self.form = form
        self.member = ""
        self.slow = 0.0
        self.is_joined = False
        self._openings = 0
        self._threads = 0
        self.joined: dict[str, tuple[Any, Handler]] = {}
        self.watches: dict[str, tuple[Any, Watch]] = {}
        self.source = None

    def node(self) -> NodeDTO | None:
        """Return what it knows of the network."""
        return self.connection.get_dto().node

    # --- opening and closing

    def open(self) -> None:
        """See ``Role``."""
        self._openings = 0
        self.slow = 0.0
        self._connect()

    def _connect(self) -> None:
        settings = dict(self.form["settings"])
        if self.form["has_outbox"]:
            settings["outbox_path"] = str(self.world.disk.folder / f"{self.name}-outbox")
        self.m = self.simulation.connect(self, retry_connect=True, **settings)
        self._join()

    def _join(self) -> None:
        self._openings += 1
        self.member = f"{self.name}.{self.lives}.{self._openings}"
        self.joined.clear()
        self.watches.clear()
        began = self.world.scheduler.now
        self.simulation.admins.pop(self.name, None)
        durable = None
        if self.form["is_recorded"]:
            path = str(self.world.disk.folder / f"{self.name}-history")
            durable = DurableHistory(path, window=self.form["window"])
        for _ in range(200):
            try:
                self.bus = TypedEventBus(
                    ServiceRegistry(), history={KEPT: RangePolicy.at_most(self.form["kept"])}, durable_history=durable
                )
                break
            except MessagingError as error:  # the disk may be full
                self.note(f"cannot open the bus: {error}")
                if not self.simulation.has_disk_faults:
                    self.simulation.broken(f"{self.member}: the bus cannot be opened: {error!r}")
                clock.pause(1.0)
        self.is_joined = True
        lasting = [self._register(*each, manner="good", began=began) for each in LASTING]
        past = self.form["past"]
        self.connection = self.bus.connect(
            self.m,
            "ev/*",
            network=network_of(self),
            shares_history=self.form["shares"],
            history=None if past is None else timedelta(hours=past),
        )
        self._wait(self.connection.ready)
        self._announce([*lasting])
        self._caught_up(self.connection.caught_up)
        self.simulation.ledger.up[self.member] = self.world.scheduler.now
        self.simulation.admins[self.name] = self
        self.note(f"is up as {self.member}")

    def _caught_up(self, promise: Promise[None]) -> None:
        if self._wait(promise, 30.0 + SLACK) is not None and not promise.done():
            self.simulation.broken(f"{self.member}: caught_up has no outcome")

    def _wait(self, promise: Promise[None], timeout: float = 120.0) -> MessagingError | None:
        try:
            return promise.exception(timeout)
        except MessagingError as error:
            self.note(f"waited in vain: {error}")
            return error

    def _announce(self, handlers: list[Handler]) -> None:
        for _ in range(20):
            node = self.node()
            before = [] if node is None else [each.name for each in node.members if not each.is_lost]
            error = self._wait(self.connection.announced(10.0))
            if error is None:
                self.simulation.check_announced(self, before, [*handlers])
                for each in handlers:
                    each.known = min(each.known, self.world.scheduler.now)
                return

    def _leave(self) -> None:
        """Close the bus, and look at what it promised."""
        now = self.world.scheduler.now
        self.is_joined = False
        self.simulation.admins.pop(self.name, None)
        mine = [each for each in self.simulation.ledger.consumers if each.member == self.member]
        for each in mine:
            each.end(now, "closed")
        self.bus.close()
        for each in mine:
            each.left = self.world.scheduler.now
        for _, watch in self.watches.values():
            self._completes(watch)
        with contextlib.suppress(ClosedError):
            self.bus.deliver_untyped("ev/a", {"late": True})
            self.simulation.broken(f"{self.member} took an event after close()")
        if self.form["is_recorded"] and not self.simulation.has_disk_faults:
            for event in self.simulation.ledger.events.values():
                if event.member == self.member and event.topic == KEPT and event.until < now:
                    event.stored = min(event.stored, self.world.scheduler.now)

    def _completes(self, watch: Watch) -> None:
        life = self.lives

        def check() -> None:
            if not watch.over and not watch.is_disposed and self.lives == life and self.process.is_alive:
                self.simulation.broken(f"{watch.name} did not complete after its bus was closed")

        self.world.scheduler.call_later(SLACK, check)

    def do_reopen(self) -> None:
        """Step: close the bus, and open another one."""
        self._leave()
        self._join()

    def do_reopen_all(self) -> None:
        """Step: close the instance, too."""
        self._leave()
        self.m.close()
        self._connect()

    def close(self) -> None:
        """See ``Role``."""
        self._leave()
        self.m.close()

    # --- handlers

    def _register(
        self, label: str, topics: str, residue: int | None, *, manner: str, began: float | None = None, history: int = 0
    ) -> Handler:
        now = self.world.scheduler.now
        made = Handler(self.member, label, topics, now if began is None else began, residue)
        made.history = history
        known = self.simulation.ledger.events.values()
        made.before = {each.key: None for each in known if each.member == self.member and each.until < inf}
        self.simulation.ledger.consumers.append(made)
        failures = [0]

        def took(topic: str, payload: dict[str, Any]) -> str:
            event = self.simulation.ledger.arrived(made, payload)
            self.note(f"{made.name} got {None if event is None else event.key}")
            if event is None:
                return ""
            if topic != event.topic:
                self.simulation.broken(f"{made.name} got {event.key} on {topic}, which was published on {event.topic}")
            if event.key in made.before:
                made.past.append(event.key)
            return event.key

        def handle(topic: str, payload: dict[str, Any]) -> None:
            key = took(topic, payload)
            if self.slow and manner == "good":
                clock.pause(self.slow)
            if manner == "raises":
                failures[0] += 1
                if failures[0] == BLOCKED_AFTER:
                    made.end(self.world.scheduler.now, "discarded")  # unless it is being unregistered
                raise PlannedError("as planned")
            made.done[key] = self.world.scheduler.now

        async def handle_in_loop(topic: str, payload: dict[str, Any]) -> None:
            key = took(topic, payload)
            await clock.sleep(self.slow)
            made.done[key] = self.world.scheduler.now

        def handle_typed(topic: str, payload: Payload) -> None:
            if not isinstance(payload, Payload):
                self.simulation.broken(f"{made.name} got a {type(payload).__name__}")
            made.done[took(topic, vars(payload))] = self.world.scheduler.now

        options: dict[str, Any] = {} if residue is None else {"filter": f"(k={residue})"}
        handler: Any = {"coroutine": handle_in_loop, "typed": handle_typed}.get(manner, handle)
        if manner == "typed":
            options["type"] = Payload
        elif manner != "coroutine":
            options["type"] = dict
        made.registration = self.bus.on(topics, handler=handler, history=history, **options)
        made.on = self.world.scheduler.now
        return made

    def do_join(self, label: str, topics: str, residue: int | None, manner: str, history: int) -> None:
        """Step: register a handler."""
        if label not in self.joined:
            handler = self._register(label, topics, residue, manner=manner, history=history)
            self.joined[label] = handler.registration, handler

    def do_leave(self, label: str) -> None:
        """Step: unregister a handler."""
        found = self.joined.pop(label, None)
        if found is not None:
            registration, handler = found
            handler.end(self.world.scheduler.now, "left")
            registration.unregister()
            handler.left = min(handler.left, self.world.scheduler.now)

    def do_announce(self) -> None:
        """Step: wait until the other processes know all handlers."""
        ours = [each for each in self.simulation.ledger.consumers if each.member == self.member and not each.why]
        if self._wait(self.connection.announced(10.0)) is None:
            for each in ours:
                each.known = min(each.known, self.world.scheduler.now)

    def do_slow(self, seconds: float) -> None:
        """Step: have handlers take so long for each event from now on."""
        self.slow = seconds

    def do_flush(self) -> None:
        """Step: wait until the handlers here have the events that were published here."""
        begin = self.world.scheduler.now
        handlers = [each for each in self.simulation.ledger.consumers if each.member == self.member and not each.why]
        error = self._wait(self.bus.flush(), 600.0)
        if error is not None:
            self.simulation.broken(f"{self.member}: flush() failed with {error}")
            return
        for event in self.simulation.ledger.events.values():
            if event.member == self.member and event.until < begin:
                for each in handlers:
                    if each.on < event.at and not each.why and each.wants(event) and event.key not in each.got:
                        self.simulation.broken(f"{each.name} does not have {event.key} after flush()")

    # --- publishing

    def do_publish(self, topics: list[str], manner: str) -> None:
        """Step: publish events."""
        for topic in topics:
            self._publish(f"{self.member}.main", topic, manner)

    def do_publish_aside(self, topics: list[str], manner: str, pause: float) -> None:
        """Step: publish events on another thread."""
        self._threads += 1
        publisher, bus = f"{self.member}.t{self._threads}", self.bus

        def run() -> None:
            for topic in topics:
                if self.bus is not bus:
                    return
                self._publish(publisher, topic, manner)
                clock.pause(pause)

        self.process.start(run, "publisher")

    def _publish(self, publisher: str, topic: str, manner: str) -> None:
        simulation, bus = self.simulation, self.bus
        event = simulation.ledger.event(publisher, self.member, topic, manner)
        seen, whole = simulation.view(self), simulation.whole()
        payload: Any = event.payload
        try:
            if manner == "typed":
                bus.deliver(Payload(**payload), topic)
            else:
                bus.deliver_untyped(topic, payload)
        except MessagingError as error:
            event.state = type(error).__name__
            if not isinstance(error, ClosedError) or (self.is_joined and self.bus is bus):
                simulation.broken(f"publishing {event.key} raised {error!r}")
            return
        event.until = self.world.scheduler.now
        event.state = "confirmed"
        after, still = simulation.view(self), simulation.whole()
        event.seen = {
            name: tuple(each for each in wanted if each in after[name][1])
            for name, (_, wanted) in seen.items()
            if name in after
        }
        event.whole = {name: None for name in whole if name in still}
        self.note(f"{event.key} on {topic}")

    # --- monitors

    def do_monitor(self, label: str, history: int, is_replay: bool) -> None:
        """Step: observe all events; with ``is_replay`` those that are stored, and then all."""
        if label in self.watches:
            return
        watch = Watch(f"{self.member} {label}", self.member, inf, is_replay, since=history if is_replay else 0)
        simulation = self.simulation

        def saw(seen: Any) -> None:
            key = f"{seen.event_data.get('p')}/{seen.event_data.get('n')}"
            event = simulation.ledger.events.get(key)
            if event is None:
                # not the whole event: its origin, the UUID of this process, is none of the seed
                simulation.broken(f"{watch.name} saw an event that was not published: {seen.topic} {seen.event_data}")
                return
            if watch.over or watch.is_disposed > 1:
                simulation.broken(f"{watch.name} saw {key} after its end")
            if key in watch.got and not simulation.ledger.came_before(self.name, watch.member, event):
                simulation.broken(f"{watch.name} saw {key} again")
            watch.got[key] = seen.sequence
            if event.topic != KEPT:
                watch.is_whole = min(watch.is_whole, self.world.scheduler.now)
            elif seen.sequence:
                watch.first.setdefault(event.publisher, event.number)
            if is_replay and seen.sequence:
                if seen.sequence <= watch.last:
                    simulation.broken(f"{watch.name} saw sequence {seen.sequence} after {watch.last}")
                watch.last = seen.sequence
            if event.number < watch.highest.get(event.publisher, -1) and event.member == watch.member:
                simulation.broken(f"{watch.name} saw {key} after {watch.highest[event.publisher]}")
            watch.highest[event.publisher] = event.number
            # MonitorEvent: "the framework that a remote event came from"; docs/events.md: "A bus that starts again may
            # get an event" that "an earlier run had taken, or published": of this process, too
            if (event.member == watch.member) != (seen.origin is None) and not is_replay and not history:
                origin = "no origin" if seen.origin is None else "an origin"
                simulation.broken(f"{watch.name} saw {key} with {origin}")
            simulation.check_sequence(self.name, seen.sequence, key, is_recorded=self.form["is_recorded"])

        stream = self.bus.monitor.replay(history) if is_replay else self.bus.monitor.monitor_events(history)
        watch.began = self.world.scheduler.now
        disposable = stream.subscribe(
            saw, lambda error: self._ended(watch, f"failed: {error!r}"), lambda: self._ended(watch, "completed")
        )
        watch.on = self.world.scheduler.now
        is_from_disk = is_replay and self.form["is_recorded"]
        watch.is_whole = min(watch.is_whole, watch.on + (ARRIVES if is_from_disk else 0.0))
        simulation.watches.append(watch)
        self.watches[label] = disposable, watch

    def _ended(self, watch: Watch, how: str) -> None:
        if watch.over:
            self.simulation.broken(f"{watch.name} {how} after it {watch.over[0]}")
        if how != "completed" and not self.simulation.has_disk_faults:
            self.simulation.broken(f"{watch.name} {how}")
        watch.over.append(how)

    def do_unmonitor(self, label: str) -> None:
        """Step: stop observing."""
        found = self.watches.pop(label, None)
        if found is not None:
            found[1].is_disposed = True
            found[0].dispose()

    def do_flush_monitor(self) -> None:
        """Step: wait until observers have what was published here."""
        begin = self.world.scheduler.now
        watches = [watch for _, watch in self.watches.values()]
        error = self._wait(self.bus.monitor.flush(), 600.0)
        if error is not None:
            self.simulation.broken(f"{self.member}: monitor.flush() failed with {error}")
            return
        now = self.world.scheduler.now
        for event in self.simulation.ledger.events.values():
            if event.member == self.member and event.until < begin:
                for watch in watches:
                    if watch.must_see(event) and event.key not in watch.got and not watch.over:
                        self.simulation.broken(f"{watch.name} has not seen {event.key} after flush()")
        for watch in watches:
            watch.is_whole = min(watch.is_whole, now)

    def do_ask(self, count: int, timeout: float) -> None:
        """Step: ask the other buses for past events."""
        got: list[str] = []
        over: list[str] = []
        name = f"{self.member} asking at {self.world.scheduler.now:.3f}"

        def saw(seen: Any) -> None:
            key = f"{seen.event_data['p']}/{seen.event_data['n']}"
            if key in got:
                self.simulation.broken(f"{name} got {key} again")
            if key not in self.simulation.ledger.events:
                self.simulation.broken(f"{name} got {key}, which was not published")
            if over:
                self.simulation.broken(f"{name} got {key} after its end")
            got.append(key)

        stream = self.connection.replay(KEPT, count, timeout=timeout)
        stream.subscribe(saw, lambda error: over.append(type(error).__name__), lambda: over.append("completed"))
        life = self.lives

        def check() -> None:
            if not over and self.lives == life and self.process.is_alive:
                self.simulation.broken(f"{name} has no outcome after {timeout + SLACK:g} s")
            if len(got) > count:
                self.simulation.broken(f"{name} got {len(got)} events of {count}")
            if len(over) > 1:
                self.simulation.broken(f"{name} ended twice: {over}")

        self.world.scheduler.call_later(timeout + SLACK, check)
