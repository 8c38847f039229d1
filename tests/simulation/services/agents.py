"""Chains of third parties: agents, filters and multiplexers between generators and listeners, each in its process.

What is promised, and checked (``docs/remote-events.md``, EV.3.1, EV.3.2, EV.3.4):

- each event that a generator has on its disk reaches each listener at the end, unless a filter does not want it;
- no event arrives that was not generated, or that a filter has consumed; its number and handback are right;
- the events of a kind come in their order, and twice only after a failure; behind an ``IdempotentListener`` never, and
  it reports no event as missed;
- no registration ends because a party was closed, killed, or could not be reached;
- what a disk that is full or fails does not take is refused, by an error that says so; everything goes on after that;
- an event that a listener refuses as unusable is dropped alone;
- counters add up.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from messaging.execution import clock
from messaging.leases import Landlord, Lease
from messaging.remoteevent import (
    Arrival,
    EventRegistration,
    EventServer,
    IdempotentListener,
    ListenerReference,
    ListenerServer,
    NotificationFilter,
    NotificationMultiplexer,
    RemoteEvent,
    RemoteListener,
    RetryPolicy,
    SequenceTracker,
    StoreAndForwardAgent,
)
from tests.simulation.fault_plans import watch_channels
from tests.simulation.plans import Plan, Step
from tests.simulation.services.parties import (
    KINDS,
    Generator,
    Ledger,
    Noted,
    Party,
    generator_steps,
    is_calm,
    is_proven,
    make_disk_faults,
    make_faults,
    make_power_losses,
)
from tests.simulation.simulation import Keeper, Simulation, scheduling, span
from tests.simulation.world.world import PlannedError

if TYPE_CHECKING:
    import random

    from messaging.remoteevent.event import EventKind

END: Final = "listeners/end"


class _LaterError(Exception):
    """What a listener raises that cannot take an event now."""


@dataclass(slots=True)
class Heard:
    """What one listener at the end has to get, and what it got.

    Attributes:
        every: for each filter on its way, it consumes events whose numbers this divides.
        handback: of its events.
        seen: numbers, by kind, in the order of their first arrival.
        in_life: those that it got since its process began.
    """

    every: tuple[int, ...]
    handback: Any
    seen: dict[EventKind, dict[int, None]] = field(default_factory=dict)
    in_life: dict[EventKind, dict[int, None]] = field(default_factory=dict)

    def wants(self, number: int) -> bool:
        """Return whether no filter on its way consumes the event with a number."""
        return all(number % each for each in self.every)


class Source(Generator):
    """A generator whose events go into the chain."""

    simulation: Chains

    def open(self) -> None:
        """Open the generator, and register the first party of the chain once."""
        super().open()
        self.interests: dict[str, EventRegistration] = getattr(self, "interests", {})
        for kind in KINDS:
            if kind not in self.interests:
                listener = RemoteListener(self.m, self.simulation.first(), timeout=self.simulation.timeout)
                self.interests[kind] = self.insist_on(
                    "register",
                    lambda kind=kind, listener=listener: self.generator.register(  # type: ignore[misc]
                        kind, {"from": self.name}, listener, Lease.FOREVER
                    ),
                )


class Hop(Party):
    """A third party, in a process of its own."""

    simulation: Chains

    @property
    def own(self) -> dict[str, Any]:
        """The options of this party."""
        found: dict[str, Any] = self.simulation.plan.options["hops"][int(self.name.partition("-")[2]) - 1]
        return found

    def open(self) -> None:
        """Connect, and open the party."""
        self.m = self.connect()
        self.party = self._made()
        self.insist("serve", self._serve)

    def _made(self) -> Any:
        own, simulation = self.own, self.simulation
        following = RemoteListener(self.m, simulation.after(self.name), timeout=simulation.timeout)
        target: Any = following
        if own["every"]:
            target = NotificationFilter(lambda event: event.sequence_number % own["every"] != 0, target)
        if own["kind"] == "filter":
            return target
        landlord = self.landlord = Landlord(f"landlord of {self.name}", max_duration=Lease.FOREVER)
        if own["kind"] == "multiplexer":
            spread = NotificationMultiplexer(landlord=landlord, retry=RetryPolicy(**own["retry"]))
            beside = RemoteListener(self.m, ListenerReference(END, "beside"), timeout=simulation.timeout)
            for source, kind in simulation.kinds:
                for each in (following, beside):
                    spread.register(source, kind, {"by": self.name}, each, Lease.FOREVER)
            return spread
        agent = self.insist_on(
            "open the agent",
            lambda: StoreAndForwardAgent(
                self.world.disk.folder / self.name,
                target=None if own["kind"] == "registered" else target,
                retry=RetryPolicy(**own["retry"]),
                messaging=self.m,
                landlord=landlord,
                max_bytes=own["max_bytes"],
                full=own["full"],
            ),
        )
        self.registered: dict[str, EventRegistration] = getattr(self, "registered", {})
        if own["kind"] == "registered":
            for source, kind in simulation.kinds:
                if f"{source}/{kind}" not in self.registered:
                    self.registered[f"{source}/{kind}"] = self.insist_on(
                        "register at the agent",
                        lambda source=source, kind=kind: agent.register(  # type: ignore[misc]
                            source, kind, {"by": self.name}, following, Lease.FOREVER
                        ),
                    )
        return agent

    def _serve(self) -> None:
        self.server = EventServer(self.m, simulation_channel(self.name), self.party)

    def do_reopen(self, server_first: bool) -> None:
        """Step: close the party and its server, in one order or the other, and open them again."""
        self._close(server_first=server_first)
        self.open()

    def do_reopen_server(self) -> None:
        """Step: close the server alone, and open it again."""
        self.stop_serving(self.server)
        self.insist("serve", self._serve)

    def _close(self, *, server_first: bool) -> None:
        if server_first:
            self.stop_serving(self.server)
        close = getattr(self.party, "close", None)
        if close is not None:
            self.attempt("close the party", close)
            self.landlord.close()
        if not server_first:
            self.stop_serving(self.server)
        self.disconnect()

    def close(self) -> None:
        """Close everything."""
        self._close(server_first=True)


class End(Party):
    """The listeners at the end of the chain."""

    simulation: Chains

    def open(self) -> None:
        """Connect, and add the listeners."""
        self.failing = 0
        self.failure = ""
        self.slow = 0.0
        for each in self.simulation.heard.values():
            each.in_life.clear()
        self.m = self.connect()
        self.insist("serve", self._serve)

    def _serve(self) -> None:
        options = self.simulation.plan.options
        self.server = ListenerServer(self.m, END)
        for name, heard in self.simulation.heard.items():
            listener: Any = lambda event, heard=heard: self.notified(heard, event)  # noqa: E731
            if options["is_idempotent"]:
                tracker = SequenceTracker()
                if not heard.every:
                    for source in self.simulation.sources:
                        for each in getattr(source, "interests", {}).values():
                            tracker.expect(each)
                listener = IdempotentListener(listener, tracker, on_missed=self._missed)
            self.server.add(listener, name)

    def _missed(self, event: RemoteEvent, arrival: Arrival) -> None:
        self.note(f"{arrival.newly_missed} events before {event.sequence_number} of {event.kind} are missed")
        if self.lives == 1 and not any(
            step.name == "reopen" and step.role == self.name for step in self.simulation.plan.steps
        ):
            self.simulation.broken(
                f"{arrival.newly_missed} events before {event.sequence_number} of {event.kind} are missed"
            )

    def notified(self, heard: Heard, event: RemoteEvent) -> None:
        """Take an event, or fail as planned."""
        if self.failing > 0:
            self.failing -= 1
            self.note(f"fails: {self.failure}")
            if self.failure == "later":
                raise _LaterError("as planned")
            self._arrived(heard, event)
            raise PlannedError("as planned")
        if self.slow:
            clock.pause(self.slow)
        self._arrived(heard, event)

    def _arrived(self, heard: Heard, event: RemoteEvent) -> None:
        simulation = self.simulation
        name = next(each for each, found in simulation.heard.items() if found is heard)
        if not isinstance(event, Noted):
            simulation.broken(f"{name}: an event arrived that nobody generated: {event!r}"[:300])
            return
        text, kind, number = event.text.rstrip("."), event.kind, event.sequence_number
        sent = simulation.ledger.sent.get(text)
        seen, in_life = heard.seen.setdefault(kind, {}), heard.in_life.setdefault(kind, {})
        self.note(f"{name}: {text} number {number}" + (" again" if number in seen else ""))
        if sent is None or sent.kind != kind or sent.state not in ("sent", "confirmed", "killed"):
            simulation.broken(f"{name}: {text} arrived as {kind}, and was sent as {sent}")
            return
        if sent.state == "confirmed" and sent.number != number:
            simulation.broken(f"{name}: {text} arrived with the number {number}, and has {sent.number}")
        if not heard.wants(number):
            simulation.broken(f"{name}: {number} of {kind} arrived, although a filter does not want it")
        wanted = {"from": sent.kind[0]} if heard.handback is None else heard.handback
        if event.handback != wanted:
            simulation.broken(f"{name}: {text} arrived with the handback {event.handback}, not {wanted}")
        if number not in seen:
            if seen and number < max(seen):
                simulation.broken(f"{name}: {number} of {kind} arrived behind {max(seen)}")
        elif is_calm(simulation):
            simulation.broken(f"{name}: {text} arrived again, although nothing failed")
        if number in in_life and simulation.plan.options["is_idempotent"]:
            simulation.broken(f"{name}: {text} arrived again behind a tracker")
        seen[number] = in_life[number] = None

    def do_fail(self, count: int, failure: str) -> None:
        """Step: fail the next notifications."""
        self.failing, self.failure = count, failure

    def do_slow(self, seconds: float) -> None:
        """Step: take so long for each event."""
        self.slow = seconds

    def do_reopen(self) -> None:
        """Step: close the server, and open another one with the same listeners."""
        self.close()
        self.open()

    def rest(self) -> None:
        """Fail no more."""
        self.failing = 0
        self.slow = 0.0

    def close(self) -> None:
        """Close everything."""
        self.stop_serving(self.server)
        self.disconnect()


def simulation_channel(name: str) -> str:
    """Return the channel of a party of the chain."""
    return f"chain/{name}"


class Chains(Simulation):
    """Generators, third parties, and listeners."""

    name = "agents"

    def begin(self) -> None:
        """See ``Simulation``."""
        options = self.plan.options
        self.ledger = Ledger()
        self.timeout: float = options["timeout"]
        self.breaks = watch_channels(self)
        self.is_resting = False
        self.heard = self._listeners()
        names = [f"generator-{number + 1}" for number in range(options["generators"])]
        self.kinds: list[EventKind] = [(name, kind) for name in names for kind in KINDS]
        if self.protocol == "memory":
            self.roles.append(Keeper(self, "keeper"))
        self.hops = [Hop(self, f"hop-{number + 1}") for number in range(len(options["hops"]))]
        self.sources = [Source(self, name) for name in names]
        self.roles += [End(self, "end"), *reversed(self.hops), *self.sources]

    def _listeners(self) -> dict[str, Heard]:
        every: tuple[int, ...] = ()
        handback: Any = None
        found: dict[str, Heard] = {}
        for number, hop in enumerate(self.plan.options["hops"]):
            if hop["kind"] in ("registered", "multiplexer"):
                handback = {"by": f"hop-{number + 1}"}
            if hop["kind"] == "multiplexer":
                found["beside"] = Heard(every, handback)
            if hop["every"]:
                every = (*every, hop["every"])
        return {"end": Heard(every, handback), **found}

    def first(self) -> ListenerReference:
        """Return where the first party of the chain is reached."""
        return ListenerReference(simulation_channel("hop-1"))

    def after(self, name: str) -> ListenerReference:
        """Return where the party behind another one is reached."""
        number = int(name.partition("-")[2])
        if number < len(self.plan.options["hops"]):
            return ListenerReference(simulation_channel(f"hop-{number + 1}"))
        return ListenerReference(END, "end")

    # --- judging

    def is_at_rest(self) -> bool:
        """See ``Simulation``."""
        return is_proven(self, self.sources) and self.ledger.is_settled() and not self._problems()

    def _problems(self) -> list[str]:
        found: list[str] = []
        for source in self.sources:
            for kind, interest in source.interests.items():
                if source.landlord.lease(interest.lease.id) is None:
                    found.append(f"{source.name}: the registration for {kind} has ended")
        for hop in self.hops:
            for key, registration in getattr(hop, "registered", {}).items():
                if hop.landlord.lease(registration.lease.id) is None:
                    found.append(f"{hop.name}: the registration for {key} has ended")
        for name, heard in self.heard.items():
            for source in self.sources:
                for kind in KINDS:
                    key = (source.name, kind)
                    seen = heard.seen.get(key, {})
                    for number, text in self.ledger.confirmed_after(key, source.interests[kind].sequence_number):
                        if number not in seen and heard.wants(number):
                            found.append(f"{name}: {text}, number {number} of {key}, is lost")
                            break
        return found

    def judge(self) -> None:
        """See ``Simulation``."""
        if not is_proven(self, self.sources):
            self.broken("a generator does not go on after the faults of the disk")
        for what in self._problems()[:5]:
            self.broken(what)

    # --- plans

    @classmethod
    def make_plan(cls, random: random.Random, protocol: str) -> Plan:
        """See ``Simulation``."""
        generators = random.choice((1, 1, 2))
        retries: tuple[dict[str, float], ...] = (
            {"first_delay": 0.05, "max_delay": 0.5},
            {"first_delay": 0.1, "max_delay": 5.0},
            {},
        )
        hops: list[dict[str, Any]] = []
        for _ in range(random.choice((1, 2, 2, 3))):
            kind = random.choice(("agent", "agent", "registered", "filter", "multiplexer"))
            if kind == "multiplexer" and any(each["kind"] == "multiplexer" for each in hops):
                kind = "agent"
            is_filtering = kind == "filter" or (kind == "agent" and random.random() < 0.3)
            hops.append({
                "kind": kind, "every": random.choice((2, 3, 7)) if is_filtering else 0,
                "retry": random.choice(retries),
                "max_bytes": random.choice((None, None, 100_000)), "full": random.choice(("reject", "block")),
            })  # fmt: skip
        is_quiet = random.random() < 0.2
        steps: list[Step] = []
        extra = [("wait", 0.05)] if is_quiet else [("wait", 0.05), ("reopen", 0.05)]
        names = [f"generator-{number + 1}" for number in range(generators)]
        for name in names:
            steps += generator_steps(random, name, extra, 8, 20)
        hop_names = [f"hop-{number + 1}" for number in range(len(hops))]
        for name in hop_names:
            for _ in range(random.randint(2, 8)):
                chosen = random.random()
                if chosen < 0.25 and not is_quiet:
                    steps.append(Step(name, "reopen", {"server_first": random.random() < 0.5}))
                elif chosen < 0.35 and not is_quiet:
                    steps.append(Step(name, "reopen_server", {}))
                else:
                    steps.append(Step(name, "pause", {"seconds": span(random, 1e-3, 10.0)}))
        for _ in range(random.randint(4, 12)):
            chosen = random.random()
            if chosen < 0.2 and not is_quiet:
                failure = {"count": random.choice((1, 1, 3, 10)), "failure": random.choice(("later", "later", "bad"))}
                steps.append(Step("end", "fail", failure))
            elif chosen < 0.3 and not is_quiet:
                steps.append(Step("end", "reopen", {}))
            elif chosen < 0.5:
                steps.append(Step("end", "slow", {"seconds": random.choice((0.0, span(random, 1e-3, 0.2)))}))
            else:
                steps.append(Step("end", "pause", {"seconds": span(random, 1e-3, 10.0)}))
        settings: dict[str, Any] = {"reconnect_max": random.choice((1.0, 5.0, 30.0))}
        if protocol.startswith("mqtt"):
            settings["keepalive"] = random.choice((2, 10, 60))
        elif protocol == "amqp":
            settings["heartbeat"] = random.choice((2, 10, 60))
        chances = scheduling(random)
        # a listener has to be added within 10 s after its server has begun
        chances["longest"] = min(chances["longest"], 2.0)
        options = {
            **chances,
            "generators": generators, "is_durable": True, "retry": random.choice((None, *retries)), "hops": hops,
            "is_idempotent": random.random() < 0.5, "timeout": random.choice((2.0, 10.0)), "settings": settings,
        }  # fmt: skip
        roles = ["end", *hop_names, *names]
        faults = make_faults(random, protocol, roles, roles) + make_power_losses(random, protocol, roles)
        faults += make_disk_faults(random)
        return Plan(options, tuple(steps), tuple(sorted(faults, key=lambda fault: fault.at)))
