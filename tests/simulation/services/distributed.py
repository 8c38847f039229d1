"""Distributed events: admins of several processes, with consumers, notifications, sessions and sources.

What is promised, and checked (``docs/distributed-events.md``, RFC 214):

- a consumer is called only with events that were published, on its topics, that pass its filter, each once, and those
  of one thread in their order; with none after it was unregistered, was discarded, or its admin was closed;
- an event that the broker confirmed reaches every consumer that its sender knew, unless that consumer's process or
  connection is lost; a process whose events the broker keeps misses none. A ``PERSISTENT`` event that was stored is
  sent by the next process;
- a notification has its outcome by its deadline; it resolves only if each consumer had returned by then;
- ``announced()`` resolves only if the other processes know the consumers;
- a session consumer gets the data of one session, and then its end, and nothing after; the end comes for each session;
- a source is open while it has consumers; streams complete;
- at rest all members know each other, and nobody else.
"""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING, Any, ClassVar, Final

from messaging.errors import ClosedError, ConnectionLostError, PartialNotificationError
from tests.simulation.fault_plans import CHANNEL_FAULTS, Breaks, draw_faults
from tests.simulation.plans import Plan, Step
from tests.simulation.services.distributed_ledger import Consumer, Event, Ledger, SessionView, matches
from tests.simulation.services.distributed_member import LASTING, SLACK, Member
from tests.simulation.simulation import Keeper, Simulation, scheduling, span
from tests.simulation.world.scheduler import BEGIN

if TYPE_CHECKING:
    import random
    from collections.abc import Iterator

    from messaging.errors import MessagingError

#: time in which an event arrives at a consumer that nothing disturbs, seconds
ARRIVES: Final = 45.0
#: time in which the queue of one connection may be missing after a fault of a channel, seconds
REPAIR: Final = 30.0
#: time in which a process that comes back has to register its consumers, seconds
BACK_WITHIN: Final = 25.0


class DistributedEvents(Simulation):
    """Members of a network."""

    name = "distributed"
    #: whether members announce just the topics of their consumers
    has_exact_interests: ClassVar[bool] = True
    _next_look = 0.0
    _pause = 0.05

    def begin(self) -> None:
        """See ``Simulation``."""
        self.ledger = Ledger(self.broken, lambda: self.world.scheduler.now)
        options = self.plan.options
        self.ledger.may_reorder = options["may_reorder"]
        #: the members that are joined, by role
        self.admins: dict[str, Member] = {}
        self.breaks: Breaks | None = None
        if self.service is not None:
            self.breaks = Breaks(self.broker, self.world.scheduler)
            self.service.broker = self.breaks
            self.ledger.ghost_until = self.ghost_until
        else:
            self.roles.append(Keeper(self, "keeper"))
        for name, form in options["members"].items():
            self.roles.append(Member(self, name, form))

    def ghost_until(self, role: str) -> float:
        """Return until when the broker gave events of a role to a connection whose end it had not noticed."""
        is_shared = self.protocol == "amqp" and self.plan.options["members"][role]["is_durable"]
        return 0.0 if self.breaks is None or not is_shared else self.breaks.ghost_until(role)

    # --- what members know

    def view(self, member: Member) -> dict[str, tuple[bool, tuple[str, ...]]]:
        """Return the other members that a member knows: whether they are lost, and their interests."""
        node = member.node()
        return {} if node is None else {each.name: (each.is_lost, each.interests) for each in node.members}

    def whole(self) -> dict[str, None]:
        """Return the members that are connected, with all their subscriptions."""
        found = {}
        for each in [*self.admins.values()]:
            node = each.node()
            if node is not None and node.is_connected and node.is_settled:
                found[each.member] = None
        return found

    # --- promises that are checked at once

    def check_announced(self, member: Member, before: list[str], consumers: list[Consumer]) -> None:
        """Check that ``announced()`` was right to resolve."""
        if self.plan.options["linger"] < SLACK:
            return
        node, now = member.node(), self.world.scheduler.now
        is_ended = self.breaks is not None and self.breaks.ended_between(member.name, now - REPAIR, now)
        if is_ended and (node is None or not node.is_settled):
            # docs/distributed-events.md: "A subscription that the broker ends … is logged, and its interests are
            # withdrawn", here since the promise resolved: the member has noticed, and is not settled again yet
            return
        for other in [*self.admins.values()]:
            if other.member not in before or not other.process.is_alive:
                continue
            if self.ledger.ghost_until(other.name) > now - ARRIVES:
                continue  # the broker may have given the announcement to a connection whose end it had not noticed
            known = self.view(other).get(member.member)
            if is_ended and known is not None and known[1]:
                # docs/distributed-events.md: "It does not wait for consumers whose own subscription is refused": the
                # broker closed the channel on which one of several was being made
                continue
            for each in consumers:
                if not each.why and (known is None or each.topics not in known[1]):
                    self.broken(
                        f"{other.member} does not know {each.name} although {member.member} announced it: {known}"
                    )

    def _reaches(self, event: Event, consumer: Consumer) -> bool:
        """Return whether a consumer is one that an event is sent to, as far as its publisher knew."""
        if consumer.on >= event.at or not consumer.wants(event):
            return False
        if consumer.member == event.member:
            return True
        return consumer.known < event.at and consumer.topics in event.seen.get(consumer.member, ())

    def check_notified(self, event: Event) -> None:
        """Check that a notification was right to resolve."""
        sender = self.admins.get(event.role)
        now, moment = {} if sender is None else self.view(sender), self.world.scheduler.now
        for each in self.ledger.consumers:
            if each.why or not self._reaches(event, each) or each.member in event.lost:
                continue
            if each.member != event.member and each.topics not in now.get(each.member, (False, ()))[1]:
                continue  # it withdrew its interest: the broker ended its subscription
            if self.breaks is not None and self.breaks.ended_between(each.role, event.at - REPAIR, moment):
                continue  # the same, and it has the interest again
            if each.label.startswith("s-"):
                if event.key not in each.got and not each.over:
                    continue  # a stream has it; its observer need not
            elif event.key not in each.done:
                self.broken(f"the notification of {event.key} resolved, and {each.name} has not handled it")

    def check_failure(self, member: Member, event: Event, error: MessagingError) -> None:
        """Check that a notification was right to fail."""
        if not isinstance(error, (PartialNotificationError, ConnectionLostError, ClosedError)) and not self.plan.faults:
            self.broken(f"the notification of {event.key} failed: {error!r}")
        if isinstance(error, ClosedError) and member.is_joined and member.member == event.member:
            self.broken(f"the notification of {event.key} failed, although nothing was closed: {error}")
        if self.plan.options["is_calm"]:
            self.broken(f"the notification of {event.key} failed without a cause: {error}")

    def fault_kill(self, role: str, seconds: float, vanishes: bool) -> None:
        """See ``Simulation``."""
        for each in self.roles:
            if each.name == role and each.process.is_alive:
                self.admins.pop(role, None)
                self.ledger.killed(role)
        super().fault_kill(role, seconds, vanishes)

    def fault_restart_broker(self, seconds: float, is_kill: bool, site: int = 0) -> None:
        """See ``Simulation``."""
        self.ledger.restarts.append(self.world.scheduler.now)
        super().fault_restart_broker(seconds, is_kill, site)

    def fault_broker(self, seconds: float, site: int = 0, **faults: Any) -> None:
        """See ``Simulation``."""
        now = self.world.scheduler.now
        if any(each in faults for each in CHANNEL_FAULTS):
            self.ledger.troubles.append((now, now + seconds + REPAIR))
        super().fault_broker(seconds, site, **faults)

    # --- at rest

    def is_time(self) -> bool:
        """Return whether to look at everything again: that takes its time, and so is done less and less often."""
        now = self.world.scheduler.now
        if now < self._next_look:
            return False
        self._pause = min(2 * self._pause, 10.0)
        self._next_look = now + self._pause
        return True

    def is_at_rest(self) -> bool:
        """See ``Simulation``."""
        if any(event.state == "sent" for event in self.ledger.events.values()) or not self.is_time():
            return False
        return next(self._findings(), None) is None

    def judge(self) -> None:
        """See ``Simulation``."""
        for event in self.ledger.events.values():
            if event.state == "sent":
                self.broken(f"the promise of {event.key} ({event.manner}) has no outcome")
        for text in self._findings():
            self.broken(text)
        for member in [*self.admins.values()]:
            node = member.node()
            # "copies that a broker delivers twice look the same: they are counted in NodeDTO.replayed" (signing); a
            # last will costs a second connection, so without faults, too
            if node is not None and (node.refused or (node.replayed and not self.plan.options["is_signed"])):
                self.broken(f"{member.member} refused {node.refused} messages, and {node.replayed} as replayed")

    def _findings(self) -> Iterator[str]:
        """Yield what is not as it has to be at rest."""
        for find in (self._strangers, self._missing, self._uneven, self._broken_sessions, self._sources):
            yield from find()

    def _strangers(self) -> list[str]:
        """Return in which way the members do not know each other."""
        names = {each.member: each for each in [*self.admins.values()]}
        found = []
        for each in [*self.admins.values()]:
            known = {name: view for name, view in self.view(each).items() if not view[0]}
            for name, other in names.items():
                if other is each:
                    continue
                if name not in known:
                    found.append(f"{each.member} does not know {name}")
                    continue
                wanted = {
                    consumer.topics: None
                    for consumer in self.ledger.consumers
                    if consumer.member == name and not consumer.why and consumer.on < inf
                }
                if self.has_exact_interests and [*sorted(wanted)] != [*known[name][1]]:
                    found.append(f"{each.member} takes {name} to want {known[name][1]}, and not {sorted(wanted)}")
            found += [f"{each.member} takes {name} for a living member" for name in known if name not in names]
        return found

    def _missing(self) -> list[str]:
        """Return the events that did not arrive, and should have."""
        ledger = self.ledger
        found = []
        chains: dict[str, list[Consumer]] = {}
        for consumer in ledger.consumers:
            if consumer.label in ("wild", "exact", "filtered"):
                chains.setdefault(f"{consumer.role} {consumer.label}", []).append(consumer)
            elif consumer.label != "sessions":
                chains[consumer.name + f" {consumer.began}"] = [consumer]
        for event in ledger.events.values():
            if event.manner == "session":
                continue
            for chain in chains.values():
                if any(event.key in each.got for each in chain):
                    continue
                for each in chain:
                    if self._reaches(event, each) and self._is_promised(event, each, chain):
                        found.append(
                            f"{event.key} ({event.manner}, {event.state}, on {event.topic}, at {event.at - BEGIN:.3f})"
                            f" did not arrive at {each.name} ({each.topics}, until {each.off - BEGIN:.3f} {each.why})"
                        )
                        break
        return found

    def _uneven(self) -> list[str]:
        """Return the events that arrived at some consumers of a member, and not at others that were there before.

        A connection or a process that is lost has an event arrive, or not: for all consumers of the member alike.
        """
        members: dict[str, list[Consumer]] = {}
        for each in self.ledger.consumers:
            if not each.why and each.label != "sessions" and not each.label.startswith("s-"):
                members.setdefault(each.member, []).append(each)
        # "Consumers that are in the ServiceRegistry before the admin is opened all get it"
        first = [label for label, *_ in LASTING] if self.plan.options["registers_first"] else []
        found = []
        for event in self.ledger.events.values():
            for consumers in members.values():
                missing = [
                    each
                    for each in consumers
                    if (each.on < event.at or each.label in first) and event.key not in each.got and each.wants(event)
                ]
                if missing and (had := next((each for each in consumers if event.key in each.got), None)):
                    found += [f"{each.name} did not get {event.key}, which {had.name} got" for each in missing]
        return found

    def _is_promised(self, event: Event, consumer: Consumer, chain: list[Consumer]) -> bool:
        """Return whether an event that reaches a consumer has to arrive there."""
        ledger, last = self.ledger, chain[-1]
        if consumer.member == event.member:
            return event.until < inf and consumer.off > event.until + ARRIVES
        if event.manner == "once" and (self.plan.faults or self.plan.options["is_harsh"]):
            return False
        at = event.confirmed
        if event.stored < inf and event.state == "killed":
            at = ledger.up.get(self.admins[event.role].member, inf) if event.role in self.admins else inf
        if at == inf:
            return False
        form = self.plan.options["members"][consumer.role]
        until = at + ARRIVES
        if not form["is_durable"]:
            if consumer.off < until or consumer.member not in event.whole:
                return False
            breaks = self.breaks
            if breaks is not None and (
                breaks.between(consumer.role, event.at - 1.0, until)
                or breaks.is_away_between(consumer.role, event.at - 1.0, until)
            ):
                return False
            return not any(begin <= until and event.at <= end for begin, end in ledger.troubles)
        if any(begin <= until and event.at <= end for begin, end in ledger.troubles):
            return False  # a subscription that the broker ends is made again, and what arrives meanwhile is dropped
        if any(kill > event.at for kill in ledger.kills.get(consumer.role, ())):
            return False  # it may have been taken in by the process that was killed
        is_emptied = self.protocol == "amqp" and any(restart > event.at for restart in ledger.restarts)
        if is_emptied and event.manner != "persistent":
            return False
        if any(each.why in ("left", "closed", "discarded") and each.off < until for each in chain):
            return False
        if any(each.on - each.began > BACK_WITHIN for each in chain):
            return False
        if any(ledger.came_before(each, event) for each in chain):
            return False
        return last.why == ""

    def _broken_sessions(self) -> list[str]:
        found = []
        ledger = self.ledger
        for view in ledger.views:
            consumer = view.consumer
            session = ledger.sessions.get(view.session)
            if session is None or consumer.why:
                continue
            name = (
                f"session {session.id} at {consumer.member}: sent {[*session.sent]}, got {view.got},"
                f" its end {session.end!r}"
            )
            if session.end and not view.end and self._hears_end(view):
                found.append(f"{name} did not arrive")
            if view.end == "lost" and not session.end and self.plan.options["is_calm"]:
                found.append(f"{name}: lost without a cause")
            if view.end in ("close", "error") and view.end != session.end:
                found.append(f"{name}: arrived as {view.end}")
            if view.end == "lost" and session.member == consumer.member:
                found.append(f"{name}: lost in its own process")
            if view.end in ("close", "error") and session.opened > consumer.known and self._is_near(view):
                wanted = [number for number, event in session.sent.items() if event.until < inf]
                if sorted(view.got) != sorted(wanted):
                    found.append(f"{name}: not all data arrived")
        return found

    def _is_near(self, view: SessionView) -> bool:
        """Return whether nothing came between the sender of a session and its consumer."""
        session, consumer = self.ledger.sessions[view.session], view.consumer
        if session.member == consumer.member:
            return True
        return not self.plan.faults and not self.plan.options["is_harsh"]

    def _hears_end(self, view: SessionView) -> bool:
        """Return whether the end of a session has to arrive."""
        session, consumer = self.ledger.sessions[view.session], view.consumer
        if session.member == consumer.member:
            return True
        sender = self.admins.get(session.member.split(".")[0])
        if sender is None or sender.member != session.member:
            return True  # its process is gone, or its admin: that is noticed
        if consumer.known > session.over:
            return False
        if self.breaks is None:
            return True
        if self.plan.options["members"][consumer.role]["is_durable"]:
            return not self.ledger.troubles and (
                self.protocol != "amqp" or not any(each > session.opened for each in self.ledger.restarts)
            )
        return not self.breaks.between(consumer.role, session.opened, inf) and not self.ledger.troubles

    def _sources(self) -> list[str]:
        found = []
        for member in [*self.admins.values()]:
            topic = f"sources/{member.name}"
            is_wanted = any(each.wants_source(topic) for each in [*self.admins.values()])
            # a member that was lost may return within its linger: its interests count until then
            is_wanted |= any(
                is_lost and any(matches(each, topic) for each in wanted)
                for is_lost, wanted in self.view(member).values()
            )
            is_open = member.source is not None and member.source.is_open
            if is_wanted != is_open:
                found.append(f"the source of {member.member} is {'open' if is_open else 'closed'}, wanted: {is_wanted}")
        return found

    # --- plans

    @classmethod
    def make_plan(cls, random: random.Random, protocol: str) -> Plan:
        """See ``Simulation``."""
        names = ["a", "b", "c"][: random.choice((2, 2, 3))]
        heartbeat = random.choice((1.0, 2.0, 5.0))
        linger = random.choice((3.0, 120.0, 3600.0))
        members = {name: form_of(random, protocol, name, heartbeat, linger) for name in names}
        steps: list[Step] = []
        for name in names:
            steps += _steps(random, name, names, members[name])
        faults = draw_faults(random, protocol, names)
        chances = scheduling(random)
        is_harsh = chances["hold_up"] > 0 and chances["longest"] > 0.2
        done = {step.name for step in steps}
        options = {
            **chances,
            "members": members,
            "linger": linger,
            "notified_within": random.choice((3.0, 10.0, 30.0)),
            "is_harsh": is_harsh,
            "may_reorder": any("nack" in fault.arguments for fault in faults),
        }
        options["is_calm"] = (
            not faults
            and not chances["hold_up"]
            and not {"reopen", "reopen_all", "slow"} & done
            and options["notified_within"] >= 10.0
        )
        options["is_signed"] = random.random() < 0.3
        #: whether the lasting consumers of a member are registered before its admin is opened
        options["registers_first"] = random.random() < 0.4
        return Plan(options, tuple(steps), tuple(faults))


def form_of(random: random.Random, protocol: str, name: str, heartbeat: float, linger: float) -> dict[str, Any]:
    """Return how a process takes part: settings of its instance, and of its member."""
    settings: dict[str, Any] = {
        "timeout": random.choice((60.0, 600.0)),
        "reconnect_min": 0.05,
        "reconnect_max": random.choice((1.0, 5.0)),
    }
    network: dict[str, Any] = {
        "heartbeat": heartbeat,
        "linger": linger,
        "as_cbor": random.random() < 0.2,
        "last_will": random.random() < 0.7,
    }
    is_durable = protocol != "memory" and random.random() < 0.6
    if protocol == "amqp":
        settings["heartbeat"] = random.choice((2, 10, 60))
        if random.random() < 0.3:
            settings["publish_window"] = random.choice((1, 2, 7))
        if is_durable:
            network["queue"] = f"events-{name}"
    elif protocol != "memory":
        settings["keepalive"] = random.choice((2, 10, 60))
        if is_durable:
            settings |= {"client_id": name, "clean_start": False}
            if protocol == "mqtt5":
                settings["session_expiry"] = 86_400
    return {
        "settings": settings, "network": network, "is_durable": is_durable, "has_outbox": random.random() < 0.5,
    }  # fmt: skip


_TOPICS: Final = ("ev/admin/0", "ev/admin/1", "ev/x/0", "ev/x/y/z")
_FILTERS: Final = ("ev/**", "ev/admin/*", "ev/admin/0", "ev/a**", "sources/*", "ev/admin/1")


def _steps(random: random.Random, name: str, names: list[str], form: dict[str, Any]) -> list[Step]:
    """Return the steps of one member."""
    manners = ["transient", "transient", "notified", "notified", "once"] + ["persistent"] * (2 * form["has_outbox"])
    steps: list[Step] = []

    def add(step: str, **arguments: Any) -> None:
        steps.append(Step(name, step, arguments))

    sessions = 0
    for number in range(random.randint(10, 28)):
        chosen = random.random()
        topics = [random.choice(_TOPICS) for _ in range(random.choice((1, 1, 2, 3, 8)))]
        if chosen < 0.28:
            add("publish", topics=topics, manner=random.choice(manners))
        elif chosen < 0.36:
            add("publish_aside", topics=topics, manner=random.choice(manners), pause=span(random, 1e-4, 0.3))
        elif chosen < 0.55:
            add("pause", seconds=span(random, 1e-4, 3.0))
        elif chosen < 0.65:
            manner = random.choice(("good", "coroutine", "raises", "aborts", "delays"))
            add(
                "join",
                label=f"j{number}",
                topics=random.choice(_FILTERS),
                residue=random.choice((None, None, 2)),
                manner=manner,
            )
        elif chosen < 0.72:
            add("leave", label=f"j{random.randrange(number + 1)}")
        elif chosen < 0.75:
            add("subscribe", label=f"s-{number}", topics=random.choice(_FILTERS[:4]))
        elif chosen < 0.77:
            add("unsubscribe", label=f"s-{random.randrange(number + 1)}")
        elif chosen < 0.80:
            add("announce")
        elif chosen < 0.83:
            add("flush")
        elif chosen < 0.85:
            add("slow", seconds=random.choice((0.0, span(random, 1e-3, 0.5))))
        elif chosen < 0.95:
            sessions += 1
            add("session", label=f"{sessions}", to=random.choice(names), takes_replies=random.random() < 0.5)
            for _ in range(random.choice((1, 2, 3))):
                add("say", label=f"{sessions}", count=random.choice((1, 2, 5)), is_aside=random.random() < 0.2)
                if random.random() < 0.4:
                    add("pause", seconds=span(random, 1e-4, 1.0))
            if random.random() < 0.8:
                add("finish", label=f"{sessions}", how=random.choice(("close", "error", "notified")))
        elif chosen < 0.97:
            add("wait")
        elif chosen < 0.99:
            add("reopen")
        else:
            add("reopen_all")
    return steps


__all__ = ["LASTING", "DistributedEvents"]
