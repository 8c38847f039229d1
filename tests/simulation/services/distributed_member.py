"""A member of a run of distributed events: a program with a distributed event admin, its consumers and sources."""

from __future__ import annotations

import contextlib
from math import inf
from typing import TYPE_CHECKING, Any

from messaging import MessagingError
from messaging.distributedeventing import (
    ABORT,
    AT_MOST_ONCE,
    PERSISTENT,
    DistributableEventConsumer,
    DistributedEventAdmin,
    PushEvent,
    PushEventConsumer,
    PushEventSource,
)
from messaging.errors import ClosedError, EventSessionLostError, PartialNotificationError
from messaging.execution import clock
from messaging.services import ServiceRegistry
from tests.simulation.services.distributed_ledger import Consumer, Event, Session, SessionView, matches
from tests.simulation.services.joining import network_of
from tests.simulation.simulation import Role
from tests.simulation.world.world import PlannedError

if TYPE_CHECKING:
    from messaging import Promise
    from messaging.distributedeventing import EventPublisherSession, EventSubscription, NodeDTO
    from tests.simulation.services.distributed import DistributedEvents

#: time that a promise may take beyond its deadline, virtual seconds: threads are held up for up to 20 s at each point
SLACK = 60.0
#: consumers that each member has as long as it lives: label, topic filter, value of the field ``k``
LASTING = (("wild", "ev/**", None), ("exact", "ev/admin/0", None), ("filtered", "ev/**", 1))


class Source(PushEventSource[Any]):
    """Notes when it is open, and publishes one event then."""

    def __init__(self, member: Member) -> None:
        self._member = member
        self.is_open = False

    def open(self, consumer: Any) -> Any:
        """See ``PushEventSource``."""
        if self.is_open:
            self._member.simulation.broken(f"the source of {self._member.member} was opened twice")
        self.is_open = True
        self._member.note("source opens")
        consumer.accept(PushEvent.data({"opened": self._member.member}))
        return self

    def close(self) -> None:
        """Close it; called by the admin."""
        if not self.is_open:
            self._member.simulation.broken(f"the source of {self._member.member} was closed twice")
        self.is_open = False
        self._member.note("source closes")


class SessionConsumer(DistributableEventConsumer[Any]):
    """One object of a consumer with the lifecycle of a session; answers each event."""

    def __init__(self, member: Member, consumer: Consumer) -> None:
        self._member = member
        self.view = SessionView(consumer)
        member.simulation.ledger.views.append(self.view)

    def accept(self, event: PushEvent[Any]) -> None:
        """See ``PushEventConsumer``."""
        member, view = self._member, self.view
        broken = member.simulation.broken
        name = f"{view.consumer.name}, session {view.session},"
        if view.end:
            broken(f"{name} got a {event.kind} event after its end")
        if event.kind != "data":
            is_lost = isinstance(event.failure, EventSessionLostError)
            view.end, view.over = "lost" if is_lost else event.kind, member.world.scheduler.now
            member.note(f"{name} ends: {view.end}")
            return
        data = event.value.data
        view.session = view.session or data["s"]
        if data["s"] != view.session:
            broken(f"{name} got an event of {data['s']}")
        number = data["m"]
        if number in view.got:
            broken(f"{name} got {number} again")
        ledger = member.simulation.ledger
        event_of = ledger.events[f"{data['p']}/{data['n']}"]
        if data["n"] <= view.highest.get(data["p"], -1) and not ledger.may_overtake(view.consumer, event_of):
            broken(f"{name} got {data['n']} of {data['p']} after {view.highest[data['p']]}")
        view.highest[data["p"]] = data["n"]
        session = member.simulation.ledger.sessions[view.session]
        if number not in session.sent or session.sent[number].state == "refused":
            broken(f"{name} got {number}, which was not published")
        view.got.append(number)
        view.consumer.got[event_of.key] = member.world.scheduler.now
        member.note(f"{name} got {number}")
        if member.slow:
            clock.pause(member.slow)
        if event.value.reply_to is not None:
            with contextlib.suppress(MessagingError):
                member.admin.publish_event(
                    event.value.reply_to, {"s": view.session, "m": number, "by": view.consumer.name}
                )


class Member(Role):
    """A program with a distributed event admin."""

    simulation: DistributedEvents
    admin: DistributedEventAdmin

    def __init__(self, simulation: DistributedEvents, name: str, form: dict[str, Any]) -> None:
        super().__init__(simulation, name)
        self.form = form
        self.member = ""
        self.slow = 0.0
        self.is_joined = False
        self.is_away = False
        self._openings = 0
        self._threads = 0
        self.promises: list[tuple[Event, Promise[None]]] = []
        self.sessions: dict[str, tuple[EventPublisherSession[Any], Session]] = {}
        self.joined: dict[str, tuple[Any, Consumer]] = {}
        self.subscriptions: dict[str, tuple[EventSubscription[Any], Consumer]] = {}
        self.source: Source | None = None

    @property
    def is_durable(self) -> bool:
        """Return whether the broker keeps its events while it is away."""
        return bool(self.form["is_durable"])

    def node(self) -> NodeDTO | None:
        """Return what it knows of the network."""
        return self.admin.get_dto().node

    # --- opening and closing

    def open(self) -> None:
        """See ``Role``."""
        self._openings = 0
        self.slow = 0.0
        self.is_away = False
        self._connect()

    def _connect(self) -> None:
        settings = dict(self.form["settings"])
        if self.form["has_outbox"]:
            settings["outbox_path"] = str(self.world.disk.folder / self.name)
        self.m = self.simulation.connect(self, retry_connect=True, **settings)
        self._join()

    def _join(self) -> None:
        """Open an admin."""
        self._openings += 1
        self.member = f"{self.name}.{self.lives}.{self._openings}"
        self.promises.clear()
        self.sessions.clear()
        self.joined.clear()
        self.subscriptions.clear()
        self.services = ServiceRegistry()
        began = self.world.scheduler.now
        self.simulation.admins.pop(self.name, None)
        lasting = []
        if self.simulation.plan.options["registers_first"]:
            lasting = [self._register(*each, manner="good", began=began, is_first=True) for each in LASTING]
        self.admin = DistributedEventAdmin(
            self.services,
            self.m,
            network=network_of(self),
            notification_timeout=self.simulation.plan.options["notified_within"],
        )
        self.is_joined = True
        self.source = Source(self)
        self.services.register(PushEventSource, self.source, {"event.topic": f"sources/{self.name}"})
        lasting = lasting or [self._register(*each, manner="good", began=began) for each in LASTING]
        consumer = self._consumer("sessions", "sessions/*", None, began)
        self.services.register(
            DistributableEventConsumer,
            lambda: SessionConsumer(self, consumer),
            {"event.topics": ["sessions/*"]},
            scope="prototype",
        )
        consumer.on = self.world.scheduler.now
        self._wait(self.admin.ready)
        self._announce([*lasting, consumer])
        ledger = self.simulation.ledger
        ledger.up[self.member] = self.world.scheduler.now
        self.simulation.admins[self.name] = self
        self.note(f"is up as {self.member}")

    def _wait(self, promise: Promise[None], timeout: float = 120.0) -> MessagingError | None:
        try:
            return promise.exception(timeout)
        except MessagingError as error:
            self.note(f"waited in vain: {error}")
            return error

    def _announce(self, consumers: list[Consumer]) -> None:
        """Wait until the other processes know the consumers, as often as it takes."""
        for _ in range(20):
            before = [each.name for each in self.admin.members() if not each.is_lost]
            error = self._wait(self.admin.announced(10.0))
            now = self.world.scheduler.now
            self.note(f"announced: {'yes' if error is None else type(error).__name__}")
            if error is None:
                self.simulation.check_announced(self, before, consumers)
                for each in consumers:
                    each.known = min(each.known, now)
                return
            if isinstance(error, ClosedError):
                self.simulation.broken(f"{self.member}: announced() failed with {error}")
                return

    def _leave(self) -> None:
        """Close the admin, and look at what it promised."""
        now = self.world.scheduler.now
        ledger = self.simulation.ledger
        self.is_joined = False
        self.simulation.admins.pop(self.name, None)
        mine = [each for each in ledger.consumers if each.member == self.member]
        for each in mine:
            each.end(now, "closed")
        for session in ledger.sessions.values():
            if session.member == self.member and not session.end:
                session.end, session.over = "close", now
        self.admin.close()
        self.note("closed")
        for each in mine:
            if each.why != "discarded":
                each.left = self.world.scheduler.now
        if self.source is not None and self.source.is_open:
            self.world.scheduler.call_later(SLACK, self._source_is_closed(self.source))
        for _, consumer in self.subscriptions.values():
            consumer.end(now, "closed")
        with contextlib.suppress(ClosedError):
            self.admin.publish_event("ev/admin/0", {"late": True})
            self.simulation.broken(f"{self.member} took an event after close()")
        for event, promise in self.promises:
            if event.manner == "notified" and not promise.done():
                self._due(event, promise, SLACK, "after its admin was closed")

    def _source_is_closed(self, source: Source) -> Any:
        life, member = self.lives, self.member

        def check() -> None:
            if source.is_open and self.lives == life and self.process.is_alive:
                self.simulation.broken(f"the source of {member} is open after its admin was closed")

        return check

    def _due(self, event: Event, promise: Promise[None], seconds: float, what: str) -> None:
        """Have a promise checked later."""
        life = self.lives

        def check() -> None:
            if not promise.done() and self.lives == life and self.process.is_alive:
                self.simulation.broken(
                    f"the promise of {event.key} ({event.manner}) has no outcome {seconds:g} s {what}"
                )

        self.world.scheduler.call_later(seconds, check)

    def do_reopen(self) -> None:
        """Step: close the admin, and open another one."""
        self._leave()
        self._join()

    def do_reopen_all(self) -> None:
        """Step: close the instance, too, and open others."""
        self._leave()
        self.m.close()
        self._connect()

    def close(self) -> None:
        """See ``Role``."""
        self._leave()
        self.m.close()

    # --- consumers

    def _consumer(self, label: str, topics: str, residue: int | None, began: float) -> Consumer:
        made = Consumer(self.member, label, topics, began, residue)
        self.simulation.ledger.consumers.append(made)
        return made

    def _register(
        self,
        label: str,
        topics: str,
        residue: int | None,
        *,
        manner: str,
        began: float | None = None,
        is_first: bool = False,
    ) -> Consumer:
        now = self.world.scheduler.now
        consumer = self._consumer(label, topics, residue, now if began is None else began)
        options: dict[str, Any] = {} if residue is None else {"filter": f"(k={residue})"}
        left = [3]

        def consume(event: PushEvent[Any]) -> int | None:
            if event.kind != "data":
                self.simulation.broken(f"{consumer.name} got a {event.kind} event")
                return None
            found = self._took(consumer, event.value)
            left[0] -= 1
            if self.slow and manner == "good":
                clock.pause(self.slow)
            if found is not None:
                consumer.done[found.key] = self.world.scheduler.now
            if left[0] < 0 and manner in ("raises", "aborts"):
                consumer.end(self.world.scheduler.now, "discarded")
                consumer.why = "discarded"
                if manner == "raises":
                    raise PlannedError("as planned")
                return ABORT
            return 20 if manner == "delays" else None

        async def consume_in_loop(event: PushEvent[Any]) -> int | None:
            found = self._took(consumer, event.value)
            await clock.sleep(self.slow)
            if found is not None:
                consumer.done[found.key] = self.world.scheduler.now
            return None

        handler: Any = consume_in_loop if manner == "coroutine" else consume
        if is_first:  # the admin finds it when it is opened
            properties = {"event.topics": [topics], **{f"event.{name}": value for name, value in options.items()}}
            consumer.registration = self.services.register(PushEventConsumer, handler, properties)
        else:
            consumer.registration = self.admin.on(topics, handler=handler, **options)
        consumer.on = self.world.scheduler.now
        return consumer

    def _took(self, consumer: Consumer, payload: dict[str, Any]) -> Event | None:
        if "opened" in payload:
            self.note(f"{consumer.name} got the event of a source")
            return None
        event = self.simulation.ledger.arrived(consumer, payload)
        self.note(f"{consumer.name} got {None if event is None else event.key}")
        return event

    def do_join(self, label: str, topics: str, residue: int | None, manner: str) -> None:
        """Step: register a consumer; the other processes need not know it yet."""
        if label not in self.joined:
            consumer = self._register(label, topics, residue, manner=manner)
            self.joined[label] = consumer.registration, consumer

    def do_announce(self) -> None:
        """Step: wait until the other processes know all consumers."""
        consumers = [each for each in self.simulation.ledger.consumers if each.member == self.member and not each.why]
        error = self._wait(self.admin.announced(10.0))
        if error is None:
            for each in consumers:
                each.known = min(each.known, self.world.scheduler.now)

    def do_leave(self, label: str) -> None:
        """Step: unregister a consumer."""
        found = self.joined.pop(label, None)
        if found is None:
            return
        registration, consumer = found
        consumer.end(self.world.scheduler.now, "left")
        registration.unregister()
        consumer.left = min(consumer.left, self.world.scheduler.now)

    def do_subscribe(self, label: str, topics: str) -> None:
        """Step: subscribe to a stream of payloads."""
        if label in self.subscriptions:
            return
        consumer = self._consumer(label, topics, None, self.world.scheduler.now)
        subscription = self.admin.create_subscription(topics)
        consumer.on = self.world.scheduler.now
        over: list[str] = []

        def got(payload: Any) -> None:
            if over:
                self.simulation.broken(f"{consumer.name} got a payload after it was {over[0]}")
            event = self._took(consumer, payload)
            if event is not None:
                consumer.done[event.key] = self.world.scheduler.now

        def ended(how: str) -> None:
            if over:
                self.simulation.broken(f"{consumer.name} was {how} after it was {over[0]}")
            if not consumer.why:
                self.simulation.broken(f"{consumer.name} was {how} although it was not closed")
            over.append(how)
            self.note(f"{consumer.name} is {how}")

        subscription.subscribe(got, lambda error: ended(f"failed: {error}"), lambda: ended("completed"))
        consumer.over = over
        self.subscriptions[label] = subscription, consumer

    def do_unsubscribe(self, label: str) -> None:
        """Step: close a stream; it completes."""
        found = self.subscriptions.pop(label, None)
        if found is None:
            return
        subscription, consumer = found
        consumer.end(self.world.scheduler.now, "left")
        subscription.close()
        self._completes(consumer)

    def _completes(self, consumer: Consumer) -> None:
        life = self.lives

        def check() -> None:
            if not consumer.over and self.lives == life and self.process.is_alive:
                self.simulation.broken(f"{consumer.name} did not complete after it was closed")

        self.world.scheduler.call_later(SLACK, check)

    def do_slow(self, seconds: float) -> None:
        """Step: have consumers take so long for each event from now on."""
        self.slow = seconds

    def do_flush(self) -> None:
        """Step: wait until the consumers here have the events that were published here."""
        begin = self.world.scheduler.now
        consumers = [each for each in self.simulation.ledger.consumers if each.member == self.member and not each.why]
        error = self._wait(self.admin.flush(), 600.0)
        if error is not None:
            self.simulation.broken(f"{self.member}: flush() failed with {error}")
            return
        for event in self.simulation.ledger.events.values():
            if event.member == self.member and event.until < begin:
                for each in consumers:
                    if (
                        each.on < event.at
                        and not each.why
                        and each.label[:2] != "s-"
                        and each.label != "sessions"
                        and each.wants(event)
                        and event.key not in each.done
                    ):
                        self.simulation.broken(f"{each.name} does not have {event.key} after flush()")

    # --- publishing

    def do_publish(self, topics: list[str], manner: str) -> None:
        """Step: publish events to these topics, one after the other."""
        for topic in topics:
            self._publish(f"{self.member}.main", topic, manner)

    def do_publish_aside(self, topics: list[str], manner: str, pause: float) -> None:
        """Step: publish events on another thread."""
        self._threads += 1
        publisher = f"{self.member}.t{self._threads}"
        member = self.member

        def run() -> None:
            for topic in topics:
                if self.member != member:
                    return
                self._publish(publisher, topic, manner)
                clock.pause(pause)

        self.process.start(run, "publisher")

    def _publish(self, publisher: str, topic: str, manner: str) -> None:
        simulation = self.simulation
        event = simulation.ledger.event(publisher, self.member, topic, manner)
        payload = event.payload
        admin = self.admin
        seen, whole = simulation.view(self), simulation.whole()
        try:
            if manner == "notified":
                promise = admin.publish_event_with_notification(topic, payload)
            elif manner == "persistent":
                promise = admin.publish_event(topic, payload, qos=PERSISTENT)
            elif manner == "once":
                promise = admin.publish_event(topic, payload, qos=AT_MOST_ONCE)
            else:
                promise = admin.publish_event(topic, payload)
        except MessagingError as error:
            event.state = type(error).__name__
            self.note(f"{event.key} raised {event.state}: {error}")
            if not isinstance(error, ClosedError) or (self.is_joined and self.admin is admin):
                simulation.broken(f"publishing {event.key} raised {error!r}")
            return
        event.until = self.world.scheduler.now
        after = simulation.view(self)
        event.seen = {
            name: tuple(each for each in wanted if each in after[name][1])
            for name, (_, wanted) in seen.items() if name in after
        }  # fmt: skip
        event.lost = dict.fromkeys(name for name in event.seen if seen[name][0] or after[name][0])
        still = simulation.whole()
        event.whole = {name: None for name in whole if name in still}
        self.note(f"{event.key} on {topic} {manner}")
        self.promises.append((event, promise))
        if manner == "notified":
            promise.add_done_callback(lambda done: self._notified(event, done))
            self._due(event, promise, simulation.plan.options["notified_within"] + SLACK, "after it was published")
        else:
            promise.add_done_callback(lambda done: self._settled(event, done))
            self._due(event, promise, self.form["settings"]["timeout"] + SLACK, "after it was published")
        if manner == "persistent":
            promise.stored.add_done_callback(lambda done: self._stored(event, done))

    def _settled(self, event: Event, promise: Promise[None]) -> None:
        error = promise.exception(0)
        event.state = "confirmed" if error is None else type(error).__name__
        if error is None:
            event.confirmed = self.world.scheduler.now
        self.note(f"{event.key} {event.state}")

    def _stored(self, event: Event, promise: Promise[None]) -> None:
        if promise.exception(0) is None:
            event.stored = self.world.scheduler.now
            self.note(f"{event.key} stored")

    def _notified(self, event: Event, promise: Promise[None]) -> None:
        error = promise.exception(0)
        event.state = "confirmed"
        event.notified = "yes" if error is None else type(error).__name__
        self.note(f"{event.key} notified: {event.notified} {error or ''}")
        if error is None:
            # it waits for living members only ("Note that a member is lost: it is not waited for"): that the broker has
            # the event for the others, its message says
            message = getattr(promise, "message", None)
            if message is None:
                event.confirmed = self.world.scheduler.now
            else:
                message.add_done_callback(lambda done: self._sent(event, done))
            self.simulation.check_notified(event)
            return
        event.state = "OutcomeUnknownError"
        is_named = getattr(error, "missing", ()) or "answers of the members" in str(error)
        if isinstance(error, PartialNotificationError) and not is_named:
            self.simulation.broken(f"the notification of {event.key} names nobody: {error}")
        self.simulation.check_failure(self, event, error)

    def _sent(self, event: Event, message: Promise[None]) -> None:
        if message.exception(0) is None:
            event.confirmed = self.world.scheduler.now

    def do_wait(self) -> None:
        """Step: wait for the outcomes of all events."""
        for _, promise in [*self.promises]:
            self._wait(promise, 700.0 + SLACK)
        self.promises.clear()

    # --- sessions

    def do_session(self, label: str, to: str, takes_replies: bool) -> None:
        """Step: open a session."""
        ledger = self.simulation.ledger
        if label in self.sessions:
            return
        id_ = f"{self.member}/{len(ledger.sessions)}"
        record = ledger.sessions[id_] = Session(id_, self.member, f"sessions/{to}", self.world.scheduler.now)

        def replied(event: PushEvent[Any]) -> None:
            if event.kind != "data":
                return
            data = event.value
            key = f"{data['by']} {data['m']}"
            record.replies[key] = record.replies.get(key, 0) + 1
            if data["s"] != id_:
                self.simulation.broken(f"session {id_} got a reply to {data['s']}")
            if record.replies[key] > 1:
                self.simulation.broken(f"session {id_} got the reply of {key} {record.replies[key]} times")
            if record.end and record.left < inf:
                record.late += 1
                if record.late > 1:
                    self.simulation.broken(f"session {id_} got replies after its end")

        handler = {"response_handler": replied} if takes_replies else {}
        session: EventPublisherSession[Any] = self.admin.create_session(record.topic, **handler)
        record.opened = self.world.scheduler.now
        self.sessions[label] = session, record

    def do_say(self, label: str, count: int, is_aside: bool) -> None:
        """Step: publish to a session."""
        found = self.sessions.get(label)
        if found is None:
            return
        if not is_aside:
            for _ in range(count):
                self._say(f"{self.member}.main", found)
            return
        self._threads += 1
        publisher = f"{self.member}.t{self._threads}"

        found[1].speakers += 1

        def run() -> None:
            for _ in range(count):
                self._say(publisher, found)
            found[1].speakers -= 1

        self.process.start(run, "speaker")

    def _say(self, publisher: str, found: tuple[EventPublisherSession[Any], Session]) -> None:
        session, record = found
        member = self.member
        number = len(record.sent)
        event = self.simulation.ledger.event(publisher, member, record.topic, "session")
        record.sent[number] = event
        try:
            promise = session.publish_event({**event.payload, "s": record.id, "m": number})
        except ClosedError:
            event.state = "refused"
            if not record.end:
                self.simulation.broken(f"session {record.id} refused an event before its end")
            return
        except MessagingError as error:
            event.state = type(error).__name__
            self.simulation.broken(f"publishing to session {record.id} raised {error!r}")
            return
        event.until = self.world.scheduler.now
        self.promises.append((event, promise))
        promise.add_done_callback(lambda done: self._settled(event, done))

    def do_finish(self, label: str, how: str) -> None:
        """Step: end a session."""
        found = self.sessions.pop(label, None)
        if found is None:
            return
        session, record = found
        record.end, record.over = "error" if how == "error" else "close", self.world.scheduler.now
        if how == "error":
            session.error(PlannedError("as planned"))
        elif how == "notified":
            promise = session.close_with_notification()
            event = Event(record.id, self.member, -1, record.topic, "notified", self.world.scheduler.now)
            self._due(event, promise, self.simulation.plan.options["notified_within"] + SLACK, "after its end")
        else:
            session.close()
        if not record.speakers:  # otherwise the last of them publishes the end
            record.left = self.world.scheduler.now

    # --- sources

    def wants_source(self, topic: str) -> bool:
        """Return whether a consumer here wants the events of a source."""
        return self.is_joined and any(
            each.member == self.member and not each.why and matches(each.topics, topic)
            for each in self.simulation.ledger.consumers
        )
