"""What the members of a run of distributed events published, and what their consumers were called with."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf
from typing import TYPE_CHECKING, Final

from messaging.dispatch import DISTRIBUTED_EVENTS

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from messaging.services import ServiceRegistration

#: outcomes of a publication after which its event may arrive
OPEN_OUTCOMES: Final = frozenset({"sent", "confirmed", "killed", "OutcomeUnknownError", "ClosedError"})


@dataclass(eq=False, slots=True)
class Event:
    """An event.

    Attributes:
        publisher: the member and its thread; ``number`` counts its events.
        manner: ``transient``, ``persistent``, ``once`` (at most once), ``notified`` or ``session``.
        at, until: when publishing began, and returned.
        confirmed: when its promise resolved; ``stored``: when it was stored.
        state: ``sent``, ``confirmed``, ``killed`` or the name of an error.
        seen: the other members that its publisher knew before and after, with the interests of each; ``lost``: those of
            them that it held for lost.
        whole: members that were connected, with all subscriptions, before and after.
    """

    publisher: str
    member: str
    number: int
    topic: str
    manner: str
    at: float
    until: float = inf
    confirmed: float = inf
    stored: float = inf
    state: str = "sent"
    seen: dict[str, tuple[str, ...]] = field(default_factory=dict)
    lost: dict[str, None] = field(default_factory=dict)
    whole: dict[str, None] = field(default_factory=dict)
    notified: str = ""

    @property
    def key(self) -> str:
        """Return what tells it from all others."""
        return f"{self.publisher}/{self.number}"

    @property
    def role(self) -> str:
        """Return the role of its member."""
        return self.member.split(".")[0]

    @property
    def payload(self) -> dict[str, object]:
        """Return what is published."""
        return {"p": self.publisher, "n": self.number, "t": self.topic, "k": self.number % 3}


@dataclass(eq=False)
class Consumer:
    """A consumer of one member.

    Attributes:
        label: of the consumer; lasting ones have the same in each life of their role.
        topics, residue: the events that it wants: topic filter, and value of the field ``k``.
        began, on: when its registration began, and was done.
        known: since when the other processes are known to know it.
        off: since when it is not called any more, or may not be: withdrawn, its admin was closed, its process killed.
        why: ``""``, ``left``, ``closed`` or ``killed``; ``discarded``: it raised, or asked for it.
        got, done: moments at which it was called with an event, and returned.
    """

    member: str
    label: str
    topics: str
    began: float
    residue: int | None = None
    on: float = inf
    known: float = inf
    off: float = inf
    why: str = ""
    left: float = inf
    late: int = 0
    #: how its stream ended, for a subscription; its registration, for a consumer that may leave
    over: list[str] = field(default_factory=list)
    registration: ServiceRegistration | None = None
    got: dict[str, float] = field(default_factory=dict)
    done: dict[str, float] = field(default_factory=dict)
    highest: dict[str, int] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Return its member and label."""
        return f"{self.member} {self.label}"

    @property
    def role(self) -> str:
        """Return the role of its member."""
        return self.member.split(".")[0]

    def wants(self, event: Event) -> bool:
        """Return whether an event is for it."""
        return matches(self.topics, event.topic) and (self.residue is None or event.number % 3 == self.residue)

    def end(self, now: float, why: str) -> None:
        """Note that it is not called any more; the first reason counts."""
        if not self.why:
            self.off, self.why = now, why


@dataclass(eq=False, slots=True)
class Session:
    """A session.

    Attributes:
        sent: numbers of the data that were accepted, with the states of their promises.
        end: ``""``, ``close``, ``error``, or ``lost``: its process was killed.
        over: when its end began; ``left``: when that had returned.
        opened: when it began.
        speakers: number of other threads that publish to it.
        replies: what its reply handler got, by consumer and number.
    """

    id: str
    member: str
    topic: str
    opened: float
    sent: dict[int, Event] = field(default_factory=dict)
    end: str = ""
    over: float = inf
    replies: dict[str, int] = field(default_factory=dict)
    left: float = inf
    late: int = 0
    speakers: int = 0


@dataclass(eq=False, slots=True)
class SessionView:
    """What one consumer object of a session got.

    Attributes:
        consumer: its registration.
        got: numbers of the data; ``highest``: by the thread that published them.
        end: ``""``, ``close``, ``error`` or ``lost``.
    """

    consumer: Consumer
    session: str = ""
    got: list[int] = field(default_factory=list)
    highest: dict[str, int] = field(default_factory=dict)
    end: str = ""
    over: float = inf


class Ledger:
    """Everything that happened. ``broken`` reports a promise that was broken."""

    def __init__(self, broken: Callable[[str], object], now: Callable[[], float]) -> None:
        self.events: dict[str, Event] = {}
        self.consumers: list[Consumer] = []
        self.sessions: dict[str, Session] = {}
        self.views: list[SessionView] = []
        self.numbers: dict[str, int] = {}
        #: when processes were killed, by role; and when members were up
        self.kills: dict[str, list[float]] = {}
        self.up: dict[str, float] = {}
        #: when the broker was restarted, and times in which it may have removed queues of connections
        self.restarts: list[float] = []
        self.troubles: list[tuple[float, float]] = []
        self.may_reorder = False
        #: returns until when an AMQP broker gave events of a role to a connection whose end it had not noticed
        self.ghost_until: Callable[[str], float] = lambda role: 0.0
        self._broken = broken
        self._now = now

    def event(self, publisher: str, member: str, topic: str, manner: str) -> Event:
        """Return a new event."""
        number = self.numbers.get(publisher, 0)
        self.numbers[publisher] = number + 1
        made = Event(publisher, member, number, topic, manner, self._now())
        self.events[made.key] = made
        return made

    def killed(self, role: str) -> None:
        """Note that the process of a role was killed."""
        now = self._now()
        self.kills.setdefault(role, []).append(now)
        for consumer in self.consumers:
            if consumer.role == role:
                consumer.end(now, "killed")
        for event in self.events.values():
            if event.role == role and event.state == "sent":
                event.state = "killed"
        for session in self.sessions.values():
            if session.member.split(".")[0] == role and not session.end:
                session.end, session.over = "lost", now

    def arrived(self, consumer: Consumer, payload: Mapping[str, object]) -> Event | None:
        """Note that a consumer is called; return the event, ``None`` if it is none."""
        now = self._now()
        event = self.events.get(f"{payload['p']}/{payload['n']}")
        if event is None or event.topic != payload["t"]:
            self._broken(f"{consumer.name} got an event that was not published: {payload}")
            return None
        key = event.key
        if key in consumer.got and not self.may_repeat(consumer, event):
            self._broken(f"{consumer.name} got {key} again, first after {now - consumer.got[key]:.3f} s")
        consumer.got[key] = now
        if not consumer.wants(event):
            self._broken(f"{consumer.name} for {consumer.topics} got {key} on {event.topic}")
        if event.state not in OPEN_OUTCOMES and event.member != consumer.member:
            self._broken(f"{consumer.name} got {key}, whose promise failed with {event.state}")
        if consumer.left < inf or consumer.why == "discarded":
            consumer.late += 1
            if consumer.late > 1 or consumer.why == "discarded":
                self._broken(f"{consumer.name} got {key} after it was {consumer.why}")
        self._check_order(consumer, event)
        return event

    def _check_order(self, consumer: Consumer, event: Event) -> None:
        kind = f"{event.publisher} {event.manner == 'once'}"
        highest = consumer.highest.get(kind, -1)
        consumer.highest[kind] = max(highest, event.number)
        if event.number > highest or self.may_overtake(consumer, event) or self.may_repeat(consumer, event):
            return
        self._broken(f"{consumer.name} got {event.key} after {event.publisher}/{highest}")

    def came_before(self, consumer: Consumer, event: Event) -> bool:
        """Return whether an event came to the member of a consumer before the consumer was registered.

        docs/distributed-events.md: "An event waits for the first consumer whose topics match it: one that is registered
        later misses it". Another consumer of the same member had it by then.
        """
        return any(
            each.member == consumer.member and each.got.get(event.key, inf) <= consumer.on for each in self.consumers
        )

    def may_repeat(self, consumer: Consumer, event: Event) -> bool:
        """Return whether a consumer may get an event again."""
        return False

    def may_overtake(self, consumer: Consumer, event: Event) -> bool:
        """Return whether newer events may have come before this one."""
        # docs/distributed-events.md: "RabbitMQ gives events of a `queue` to the lost connection of its member, too,
        # until it notices the loss … These events come again after newer ones"
        if self.may_reorder or event.at < self.ghost_until(consumer.role):
            return True
        # "Copies are recognized for the life" of the receiver: the former one took the event, and its sender, whose
        # confirmation was lost, published it again behind newer ones
        is_copy = any(
            each.role == consumer.role and each.member != consumer.member and event.key in each.got
            for each in self.consumers
        )
        if is_copy:
            return True
        if event.at >= self.up.get(consumer.member, inf):
            return False
        # a killed process leaves events at the broker that are given back after newer ones; docs/durability.md:
        # "After a crash at most 4,096 messages are sent again": a member that was not up yet may have missed the first
        # copy of one, and have newer ones
        return consumer.role in self.kills or any(kill > event.at for kill in self.kills.get(event.role, ()))


def matches(topics: str, topic: str) -> bool:
    """Return whether a topic filter has a topic."""
    return bool(DISTRIBUTED_EVENTS.parse(topics).matches(topic))
