"""Typed events: buses of several processes with handlers, history, monitors and replays, also durable ones.

What is promised, and checked (``docs/events.md``, chapter 157):

- a handler is called with each event of its topics that passes its filter, once, in the order of each thread that
  published; with none after it was unregistered, was blocked, or its bus was closed; ``flush()`` waits for that;
- a handler with ``history`` gets the newest past events first, the oldest of them first, and then every later event,
  none twice;
- an observer sees every event from its subscription on, once and in order; it completes with its bus. A replay is in
  the order of the sequences; no sequence stands for two events, over all runs;
- an event that was recorded longer than the window before its process was killed is replayed by the next one;
- buses that are connected take each other's events once and in order, and lose none but those of lost connections.
"""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING, Any, ClassVar, Final

from tests.simulation.fault_plans import Breaks, draw_faults
from tests.simulation.plans import Plan, Step
from tests.simulation.services.distributed import ARRIVES, BACK_WITHIN, REPAIR, DistributedEvents, form_of
from tests.simulation.services.distributed_ledger import Consumer, Event, Ledger
from tests.simulation.services.typed_bus import KEPT, BusProgram, Handler, Watch
from tests.simulation.simulation import Keeper, scheduling, span

if TYPE_CHECKING:
    import random
    from collections.abc import Callable

#: time that storing an event may take beyond its window, seconds
STORES: Final = 30.0


class BusLedger(Ledger):
    """The ledger of typed event buses.

    Attributes:
        late: members that ask for the past events of others when they connect.
        recorded: members with a durable history.
        is_broken: returns whether a connection of a role to a queue of its own was lost in a time.
        has_lost: returns whether any connection of a role was lost in a time.
    """

    def __init__(
        self, broken: Callable[[str], object], now: Callable[[], float], late: frozenset[str], recorded: frozenset[str]
    ) -> None:
        super().__init__(broken, now)
        self.late = late
        self.recorded = recorded
        self.is_broken: Callable[[str, float, float], bool] = lambda role, begin, end: False
        self.has_lost: Callable[[str, float, float], bool] = lambda role, begin, end: False

    def may_repeat(self, consumer: Consumer, event: Event) -> bool:
        """See ``Ledger``."""
        if not isinstance(consumer, Handler) or not consumer.history:
            return False
        return self.came_before(consumer.role, consumer.member, event)

    def came_before(self, role: str, member: str, event: Event) -> bool:
        """Return whether the history of a role may have an event twice.

        "A bus that starts again may get an event that a broker kept for it and an earlier run had taken, or published:
        its durable history has it twice then" (``docs/events.md``). A run may have recorded an event for which none of
        its handlers was called before its end.
        """
        if role not in self.recorded or event.topic != KEPT:
            return False
        is_own = event.role == role and event.member != member
        former = (each for each in self.consumers if each.role == role and each.member != member)
        return is_own or any(event.at <= self._end_of(each) for each in former)

    def _end_of(self, consumer: Consumer) -> float:
        """Return when a consumer of an earlier run, which was closed or killed, may no longer have been called."""
        return min([consumer.left, *(kill for kill in self.kills.get(consumer.role, ()) if kill >= consumer.off)])

    def may_overtake(self, consumer: Consumer, event: Event) -> bool:
        """See ``Ledger``: "live events wait for the past ones", which are only the newest that the others keep."""
        # "Its unsettled messages are … requeued; another consumer receives them": a bus that was closed without a
        # connection held them until its subscription ended, and the next one had the messages behind them
        up = self.up.get(consumer.member, inf)
        closings = (each.off for each in self.consumers if each.role == consumer.role and each.why == "closed")
        if event.at < up and any(off < up and self.is_broken(consumer.role, off - 1.0, up) for off in closings):
            return True
        is_late = consumer.role in self.late and isinstance(consumer, Handler) and consumer.history > 0
        if is_late and event.member != consumer.member and event.at < self.up.get(consumer.member, inf):
            return True
        # the outbox of a killed process sends events again: a member that had lost its connection missed them
        is_sent_again = any(kill > event.at for kill in self.kills.get(event.role, ()))
        if is_sent_again and self.has_lost(consumer.role, event.at, self._now()):
            return True
        return super().may_overtake(consumer, event)


class TypedEvents(DistributedEvents):
    """Buses that are connected."""

    name = "typedevents"

    has_exact_interests: ClassVar[bool] = False

    def begin(self) -> None:
        """See ``Simulation``."""
        options = self.plan.options
        late = frozenset(name for name, form in options["members"].items() if form["past"] is not None)
        recorded = frozenset(name for name, form in options["members"].items() if form["is_recorded"])
        self.ledger = BusLedger(self.broken, lambda: self.world.scheduler.now, late, recorded)
        self.ledger.may_reorder = options["may_reorder"]
        self.has_disk_faults = options["has_disk_faults"]
        self.admins: dict[str, Any] = {}
        self.watches: list[Watch] = []
        #: event by role and sequence
        self.sequences: dict[tuple[str, int], str] = {}
        self.breaks: Breaks | None = None
        if self.service is not None:
            self.breaks = Breaks(self.broker, self.world.scheduler)
            self.service.broker = self.breaks
            self.ledger.ghost_until = self.ghost_until
            self.ledger.has_lost = self.breaks.between
            if self.protocol == "amqp":
                queues = frozenset(name for name, form in options["members"].items() if form["is_durable"])
                between = self.breaks.between
                self.ledger.is_broken = lambda role, begin, end: role in queues and between(role, begin, end)
        else:
            self.roles.append(Keeper(self, "keeper"))
        for name, form in options["members"].items():
            self.roles.append(BusProgram(self, name, form))  # type: ignore[arg-type]

    def check_sequence(self, role: str, sequence: int, key: str, *, is_recorded: bool) -> None:
        """Check that a sequence stands for one event."""
        if sequence and is_recorded:
            known = self.sequences.setdefault((role, sequence), key)
            if known != key:
                self.broken(f"{role}: sequence {sequence} is that of {known}, and of {key}")

    def is_at_rest(self) -> bool:
        """See ``Simulation``."""
        return self.is_time() and not [*self._strangers(), *self._missing(), *self._unseen(), *self._past()]

    def judge(self) -> None:
        """See ``Simulation``."""
        for text in (*self._strangers(), *self._missing(), *self._unseen(), *self._past()):
            self.broken(text)
        for member in [*self.admins.values()]:
            dto = member.connection.get_dto()
            if dto.dropped or dto.unfit or dto.failed:
                self.broken(f"{member.member} dropped {dto.dropped}, unfit {dto.unfit}, failed {dto.failed} events")

    def _is_promised(self, event: Event, consumer: Consumer, chain: list[Consumer]) -> bool:
        ledger, last = self.ledger, chain[-1]
        if consumer.member == event.member:
            return event.state == "confirmed" and consumer.off > event.until + ARRIVES
        if event.state != "confirmed":
            return False
        until = event.until + ARRIVES
        if any(kill > event.at for kill in ledger.kills.get(event.role, ())):
            return False  # it was on its way to the outbox
        closings = [each.off for each in ledger.consumers if each.member == event.member and each.why == "closed"]
        if any(each < until for each in closings):
            return False  # closing waits for it for a few seconds only
        breaks = self.breaks
        if breaks is not None and (
            # the publication of the event may have been on a channel of its sender: "that publish … fails"
            breaks.ended_between(event.role, event.at, until)
            # "the events of … do not arrive": the subscription is made again after a while, see ``OwnInterests``
            or breaks.ended_between(consumer.role, event.at - REPAIR, until)
        ):
            return False
        form = self.plan.options["members"][consumer.role]
        if not form["is_durable"]:
            if consumer.off < until or consumer.member not in event.whole:
                return False
            return breaks is None or not (
                breaks.between(consumer.role, event.at - 1.0, until + ARRIVES)
                or breaks.is_away_between(consumer.role, event.at - 1.0, until)
                or breaks.between(event.role, event.at - 1.0, until)
            )
        if any(kill > event.at for kill in ledger.kills.get(consumer.role, ())):
            return False
        if self.protocol == "amqp" and any(restart > event.at for restart in ledger.restarts):
            return False
        if any(each.why in ("left", "closed", "discarded") and each.off < until + ARRIVES for each in chain):
            return False
        return not any(each.on - each.began > BACK_WITHIN for each in chain) and last.why == ""

    def _unseen(self) -> list[str]:
        """Return the events that observers should have seen."""
        found = []
        for watch in self.watches:
            program = next((each for each in self.admins.values() if each.member == watch.member), None)
            if program is None or watch.is_disposed or watch.over:
                continue
            for event in self.ledger.events.values():
                if event.member == watch.member and event.state == "confirmed" and event.at > watch.on:
                    if event.key not in watch.got and watch.must_see(event):
                        found.append(f"{watch.name} has not seen {event.key}")
                elif watch.is_replay and program.form["is_recorded"] and self._is_stored(event, program, watch):
                    found.append(f"{watch.name} has not replayed {event.key} of {event.at - 10_000:.3f}")
        return found

    def _is_stored(self, event: Event, program: BusProgram, watch: Watch) -> bool:
        """Return whether an event of an earlier run was on the disk, and was not seen."""
        if self.has_disk_faults or event.role != program.name or event.topic != KEPT or event.key in watch.got:
            return False
        if event.state != "confirmed" or event.member == watch.member or event.until > watch.began:
            return False
        known = [number for (role, number), key in self.sequences.items() if role == program.name and key == event.key]
        is_asked_for = any(number >= watch.since for number in known) or watch.since <= 1
        if not is_asked_for and event.number < watch.first.get(event.publisher, event.number + 1):
            return False  # its sequence is not known, and may be before the first one that was asked for
        kills = [each for each in self.ledger.kills.get(program.name, ()) if each > event.at]
        return (
            event.stored < min([*kills, 1e12]) or not kills or event.until + program.form["window"] + STORES < kills[0]
        )

    def _past(self) -> list[str]:
        """Check that handlers with history got the newest events, in order."""
        found = []
        for each in self.ledger.consumers:
            if not isinstance(each, Handler) or each.why in ("killed", "closed"):
                continue
            if len(each.past) > each.history:
                found.append(f"{each.name} got {len(each.past)} past events, and asked for {each.history}: {each.past}")
            before: dict[str, list[str]] = {}
            for event in map(self.ledger.events.__getitem__, each.before):
                if event.topic == KEPT and each.wants(event):
                    before.setdefault(event.publisher, []).append(event.key)
            for publisher in dict.fromkeys(self.ledger.events[key].publisher for key in each.past):
                known = before[publisher]
                got = [key for key in each.past if self.ledger.events[key].publisher == publisher]
                # a handler that left, or was blocked, may have left before the newer ones
                end = known.index(got[-1]) + 1 if each.why else len(known)
                if known[max(0, end - len(got)) : end] != got:
                    found.append(f"{each.name} got the past events {got}, and the newest are {known[-len(got) :]}")
            least = self._least_past(each, sum(map(len, before.values())))
            if len(each.past) < least:
                found.append(f"{each.name} got {len(each.past)} past events: {each.past}, and there were {least}")
        return found

    def _least_past(self, handler: Handler, published: int) -> int:
        """Return how many events of its own bus a handler had to get first, of those that were published before."""
        if handler.why or handler.residue is not None:
            return 0
        # those of other buses, and those that were being published, may be past events, too
        others = sum(
            event.topic == KEPT and event.at < handler.on and event.key not in handler.before
            for event in map(self.ledger.events.__getitem__, handler.got)
        )
        kept = self.plan.options["members"][handler.role]["kept"]
        return min(handler.history, kept, published) - others

    # --- plans

    @classmethod
    def make_plan(cls, random: random.Random, protocol: str) -> Plan:
        """See ``Simulation``."""
        names = ["a", "b", "c"][: random.choice((2, 2, 3))]
        heartbeat = random.choice((1.0, 2.0, 5.0))
        linger = random.choice((3.0, 120.0, 3600.0))
        members = {name: form_of(random, protocol, name, heartbeat, linger) for name in names}
        for form in members.values():
            form |= {
                "kept": random.choice((3, 10, 1000)),
                "is_recorded": random.random() < 0.6,
                "window": random.choice((0.0, 0.2, 1.0)),
                "shares": random.random() < 0.6,
                "past": random.choice((None, None, 1)),
            }
        steps: list[Step] = []
        for name in names:
            steps += _steps(random, name)
        faults = draw_faults(random, protocol, names)
        chances = scheduling(random)
        options = {
            **chances,
            "members": members,
            "linger": linger,
            "is_harsh": chances["hold_up"] > 0 and chances["longest"] > 0.2,
            "may_reorder": any("nack" in fault.arguments for fault in faults),
            "has_disk_faults": any(
                fault.name in ("full_disk", "failing_sync") or fault.arguments.get("vanishes") for fault in faults
            ),
            "is_calm": False,
            "is_signed": random.random() < 0.3,
        }
        return Plan(options, tuple(steps), tuple(faults))


_TOPICS: Final = ("ev/a", "ev/b", KEPT, KEPT, "ev/x/y")
_FILTERS: Final = ("ev/*", "ev/+", "ev/a", KEPT, "ev/x/+")


def _steps(random: random.Random, name: str) -> list[Step]:
    """Return the steps of one program."""
    steps: list[Step] = []

    def add(step: str, **arguments: Any) -> None:
        steps.append(Step(name, step, arguments))

    for number in range(random.randint(12, 30)):
        chosen = random.random()
        topics = [random.choice(_TOPICS) for _ in range(random.choice((1, 1, 2, 3, 8, 15)))]
        manner = random.choice(("untyped", "typed"))
        if chosen < 0.25:
            add("publish", topics=topics, manner=manner)
        elif chosen < 0.36:
            add("publish_aside", topics=topics, manner=manner, pause=span(random, 1e-4, 0.3))
        elif chosen < 0.53:
            add("pause", seconds=span(random, 1e-4, 3.0))
        elif chosen < 0.66:
            add(
                "join", label=f"j{number}", topics=random.choice(_FILTERS), residue=random.choice((None, None, 2)),
                manner=random.choice(("good", "coroutine", "typed", "raises")), history=random.choice((0, 0, 2, 20)),
            )  # fmt: skip
        elif chosen < 0.72:
            add("leave", label=f"j{random.randrange(number + 1)}")
        elif chosen < 0.80:
            add("monitor", label=f"m{number}", history=random.choice((0, 0, 3)), is_replay=random.random() < 0.5)
        elif chosen < 0.83:
            add("unmonitor", label=f"m{random.randrange(number + 1)}")
        elif chosen < 0.85:
            add("announce")
        elif chosen < 0.89:
            add("flush")
        elif chosen < 0.91:
            add("flush_monitor")
        elif chosen < 0.93:
            add("slow", seconds=random.choice((0.0, span(random, 1e-3, 0.3))))
        elif chosen < 0.96:
            add("ask", count=random.choice((1, 5, 100)), timeout=random.choice((3.0, 10.0)))
        elif chosen < 0.99:
            add("reopen")
        else:
            add("reopen_all")
    return steps
