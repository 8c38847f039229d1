"""Retained messages: owners publish the state of their channels, and watchers subscribe sooner or later.

What is promised, and checked (``docs/extensions.md``, ``docs/devices.md``, ``docs/mqtt.md``, ``docs/memory.md``):

- a new subscriber gets the last retained message of each channel that it matches, marked as retained, and only that;
- an empty payload removes it; one whose time to live is over does not come;
- ``retainHandling`` 2, and a queue, exclude retained messages;
- whoever has subscribed before gets each message of QoS 1 or 2, in the order of its owner, without that mark.

A message that was sent and not confirmed may have arrived, so it may be the last one.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING, Any, Final

from messaging import DeadlineError, Message, Messaging, MessagingError
from messaging.execution import clock
from tests.simulation.brokers.mqtt.broker import MqttBroker
from tests.simulation.brokers.mqtt.settings import MqttSettings
from tests.simulation.fault_plans import Breaks, draw_faults
from tests.simulation.plans import Fault, Plan, Step
from tests.simulation.simulation import Keeper, Role, Simulation, scheduling, span

if TYPE_CHECKING:
    import random

    from tests.simulation.world.world import Host

SLACK: Final = 60.0
#: how long a watcher waits for retained messages, seconds
_LOOK: Final = 2.0
#: an outcome after which a message may arrive or not
_OPEN: Final = ("sent", "killed", "OutcomeUnknownError", "ConnectionLostError")


@dataclass(slots=True)
class State:
    """A message that replaces, or removes, the retained one of its channel.

    Attributes:
        number: of its channel, from 0.
        is_removal: its payload is empty.
        is_retained: it was published with ``retain``.
        at: when it was published, virtual seconds.
        ttl: its time to live, seconds; infinite without one.
        outcome: "sent", "confirmed", "killed", or the name of an error.
        confirmed: when.
    """

    number: int
    is_removal: bool
    is_retained: bool
    at: float
    ttl: float
    outcome: str = "sent"
    confirmed: float = inf


class Owner(Role):
    """Publishes the state of its own channels."""

    simulation: Retained

    def open(self) -> None:
        """Connect."""
        for states in self.simulation.owned(self.name).values():
            for state in states:
                if state.outcome == "sent":
                    state.outcome = "killed"
        self.promises: list[Any] = []
        self._connect()

    def _connect(self) -> None:
        self.m = self.simulation.connect(self, retry_connect=True, **self.simulation.plan.options["owner"])

    def do_publish(self, channel: int, kind: str, ttl: float | None = None) -> None:
        """Step: publish a state, remove it, or publish something that is not retained."""
        name = f"state/{self.name}/{channel}"
        states = self.simulation.states.setdefault(name, [])
        state = State(len(states), kind == "remove", kind != "passing", self.world.scheduler.now, ttl or inf)
        states.append(state)
        payload = b"" if state.is_removal else f"{name}:{state.number}".encode()
        try:
            promise = self.m.publish(
                name, payload, qos=self.simulation.plan.options["qos"], retain=state.is_retained, time_to_live=ttl
            )
        except MessagingError as error:
            self._settled(name, state, error)
            return
        self.promises.append(promise)
        promise.add_done_callback(lambda promise: self._settled(name, state, promise.exception(0)))

    def _settled(self, name: str, state: State, error: BaseException | None) -> None:
        state.outcome = "confirmed" if error is None else type(error).__name__
        state.confirmed = self.world.scheduler.now
        self.note(f"{name}:{state.number} {state.outcome}")

    def do_wait(self) -> None:
        """Step: wait for all outcomes."""
        for promise in self.promises:
            promise.exception(self.simulation.plan.options["owner"]["timeout"] + SLACK)
        self.promises.clear()

    def do_reopen(self) -> None:
        """Step: close the instance, and open another."""
        self.m.close()
        self._connect()

    def close(self) -> None:
        """Close the instance."""
        self.m.close()


class Watcher(Role):
    """Has a subscription to all states, and looks at some of them with others, on an instance of their own."""

    simulation: Retained

    def open(self) -> None:
        """Connect and subscribe."""
        #: the last number of each channel that arrived
        self.last: dict[str, int] = {}
        self.seen: dict[str, None] = {}
        self.m = self.simulation.connect(self, retry_connect=True, **self.simulation.plan.options["watcher"])
        while True:
            try:
                self.stream = self.m.on("state/#", self._take, qos=self.simulation.plan.options["qos"])
            except MessagingError as error:
                self.note(f"cannot subscribe: {type(error).__name__}: {error}")
                clock.pause(0.5)
            else:
                break
        self.since = self.world.scheduler.now

    def _take(self, message: Message) -> None:
        simulation = self.simulation
        name = message.context.channel or ""
        is_retained = bool(message.context.extensions.get("retain"))
        number = simulation.number(name, message.payload)
        self.note(f"{name}:{number} comes" + (" as retained" if is_retained else ""))
        if number is None:
            return
        self.seen[f"{name}:{number}"] = None
        has_failed = simulation.has_failed(self.name)
        if number < self.last.get(name, -1) and not has_failed:
            simulation.broken(f"{self.name} gets {name}:{number} behind {self.last[name]}")
        self.last[name] = max(number, self.last.get(name, -1))
        state = simulation.states[name][number]
        if is_retained and not has_failed and state.at > self.since:
            simulation.broken(f"{self.name} gets {name}:{number} as retained, although it had subscribed before")

    def do_look(self, channel: str, how: str) -> None:
        """Step: subscribe anew, and take what is retained."""
        simulation = self.simulation
        options: dict[str, Any] = {"qos": simulation.plan.options["qos"]}
        if how == "never":
            options["retain_handling"] = 2
        elif how == "queue":
            options["queue"] = f"{self.name}-{simulation.number_of_look()}"
        elif how == "new":
            options["retain_handling"] = 1
        world = self.world
        try:
            m = simulation.connect(self, **simulation.plan.options["watcher"])
        except MessagingError as error:
            self.note(f"cannot connect: {type(error).__name__}: {error}")
            return
        begin = world.scheduler.now
        arrived: list[tuple[str, int | None]] = []
        is_whole = True
        stream: Any = None
        try:
            with m.subscribe(channel, **options) as stream:
                end = clock.monotonic() + _LOOK
                while (left := end - clock.monotonic()) > 0:
                    message = stream.receive(left)
                    if message.context.extensions.get("retain"):
                        name = message.context.channel or ""
                        arrived.append((name, simulation.number(name, message.payload)))
        except DeadlineError:
            is_whole = stream.ready.done()  # the subscription may wait for its connection
        except MessagingError as error:
            self.note(f"looking failed: {type(error).__name__}: {error}")
            is_whole = False
        m.close()
        self.note(f"looks at {channel} ({how}): {arrived}")
        simulation.judge_look(self.name, channel, how, begin, arrived, is_whole=is_whole)

    def close(self) -> None:
        """Close the instance."""
        self.m.close()


class Retained(Simulation):
    """See the module."""

    name = "retained"
    protocols = ("memory", "mqtt311", "mqtt5")

    def make_broker(self, protocol: str, host: Host) -> Any:
        """See ``Simulation``.

        Mosquitto sends retained messages to shared subscriptions "unless told not to (which queues do here, with MQTT
        5)" (``docs/mqtt.md``).
        """
        del protocol
        return MqttBroker(host, MqttSettings(max_queued=0, retained_to_shared=True))

    def begin(self) -> None:
        """See ``Simulation``."""
        if self.service is not None:
            self.breaks = self.service.broker = Breaks(self.broker, self.world.scheduler)
        #: of each channel, in the order of publishing
        self.states: dict[str, list[State]] = {}
        self._looks = 0
        #: how many instances each role has made
        self._instances: dict[str, int] = {}
        self.cuts: list[float] = []
        if self.protocol == "memory":
            self.roles.append(Keeper(self, "keeper"))
        self.roles += [Watcher(self, f"watcher-{number + 1}") for number in range(self.plan.options["watchers"])]
        self.roles += [Owner(self, f"owner-{number + 1}") for number in range(self.plan.options["owners"])]

    def owned(self, owner: str) -> dict[str, list[State]]:
        """Return the states of an owner."""
        return {name: states for name, states in self.states.items() if name.split("/")[1] == owner}

    def number_of_look(self) -> int:
        """Return a new number."""
        self._looks += 1
        return self._looks

    def number(self, name: str, payload: bytes) -> int | None:
        """Return the number of a state that arrived; ``None`` for a removal."""
        if not payload:
            return None
        channel, _, number = payload.decode("utf-8", "replace").rpartition(":")
        if channel != name or not number.isdigit() or int(number) >= len(self.states.get(name, ())):
            self.broken(f"a message arrived on {name} that was not sent: {payload!r}")
            return None
        return int(number)

    def connect(self, role: Role, **settings: Any) -> Messaging:
        """See ``Simulation``."""
        self._instances[role.name] = self._instances.get(role.name, 0) + 1
        return super().connect(role, **settings)

    def has_failed(self, role: str) -> bool:
        """Return whether something may have failed for a role: a fault, or its thread was held up over its keep-alive.

        Then the broker has ended a connection, and the instance has made another one.
        """
        made = 0 if self.service is None else self.breaks.made.get(role, 0)
        return bool(self.plan.faults) or made > self._instances.get(role, 0)

    def fault_cut(self, role: str | None) -> None:
        """See ``Simulation``."""
        self.cuts.append(self.world.scheduler.now)
        super().fault_cut(role)

    # --- judging

    def judge_look(
        self, who: str, channel: str, how: str, begin: float, arrived: list[tuple[str, int | None]], *, is_whole: bool
    ) -> None:
        """Check the retained messages that a new subscription got."""
        now = self.world.scheduler.now
        if how in ("never", "queue") and arrived and (how == "never" or self.protocol != "mqtt311"):
            self.broken(f"{who} gets retained messages of {channel} although it wants none: {arrived}")
            return
        has_broken = self.has_failed(who) and (
            self.protocol == "memory" or self.breaks.between(who, begin, now) or bool(self.cuts)
        )
        found: dict[str, list[int]] = {}
        for name, number in arrived:
            if number is None:
                self.broken(f"{who} gets an empty retained message of {name}")
                return
            found.setdefault(name, []).append(number)
        for name, numbers in found.items():
            if len(numbers) > 1 and not has_broken:
                self.broken(f"{who} gets several retained messages of {name}: {numbers}")
        for name, states in self.states.items():
            if _matches(channel, name):
                self._judge_channel(who, name, states, begin, found.get(name, []), how, is_whole and not has_broken)

    def _judge_channel(
        self, who: str, name: str, states: list[State], begin: float, numbers: list[int], how: str, is_whole: bool
    ) -> None:
        kept = [state for state in states if state.is_retained]
        sure = [state for state in kept if state.outcome == "confirmed" and state.confirmed < begin]
        last = sure[-1] if sure else None
        # what may be the last one: the confirmed one, those behind it, and those of which nobody knows whether and when
        # they arrived
        later = [state for state in kept if last is None or state.number > last.number]
        later = [state for state in later if state.outcome in (*_OPEN, "confirmed")]
        stray = [state for state in kept if state.outcome in ("killed", "OutcomeUnknownError", "ConnectionLostError")]
        possible = {state.number for state in (*later, *stray)} | ({last.number} if last is not None else set())
        for number in numbers:
            state = states[number]
            if number not in possible:
                self.broken(f"{who} gets {name}:{number} as retained, and the last one is {last and last.number}")
            # rounded up to whole seconds; and it may be on its way
            elif begin > self._end(state):
                self.broken(f"{who} gets {name}:{number} as retained {begin - state.at:g} s after it was published")
            elif state.is_removal or not state.is_retained:
                self.broken(f"{who} gets {name}:{number} as retained, which is not")
        if how in ("all", "new") and is_whole and not later and not stray and last is not None:
            is_there = not last.is_removal and self.world.scheduler.now < last.at + last.ttl
            if is_there and last.number not in numbers:
                self.broken(f"{who} does not get {name}:{last.number}, which is retained")

    def _end(self, state: State) -> float:
        """Return until when a retained message may come."""
        if state.ttl == inf:
            return inf
        if self.plan.options["hold_up"] or self.plan.faults:
            # the broker counts from when it has taken the message, which may be late
            return state.confirmed + state.ttl + 1.0
        return state.at + state.ttl + 1.0

    def is_at_rest(self) -> bool:
        """See ``Simulation``."""
        return all(state.outcome != "sent" for states in self.states.values() for state in states)

    def judge(self) -> None:
        """See ``Simulation``."""
        for name, states in self.states.items():
            for state in states:
                if state.outcome == "sent":
                    self.broken(f"the promise of {name}:{state.number} has no outcome")
                if state.outcome != "confirmed" or state.is_removal or state.ttl < inf:
                    continue
                for each in self.roles:
                    if not isinstance(each, Watcher) or self.has_failed(each.name):
                        continue
                    if f"{name}:{state.number}" not in each.seen:
                        self.broken(f"{each.name} has not got {name}:{state.number}, although nothing failed")

    # --- plans

    @classmethod
    def make_plan(cls, random: random.Random, protocol: str) -> Plan:
        """See ``Simulation``."""
        owners, watchers = random.choice((1, 2)), random.choice((1, 1, 2))
        owner: dict[str, Any] = {
            "timeout": random.choice((20.0, 60.0, 600.0)),
            "reconnect_max": random.choice((1.0, 5.0, 30.0)),
        }
        watcher: dict[str, Any] = {"reconnect_max": random.choice((1.0, 5.0, 30.0))}
        if protocol != "memory":
            owner["keepalive"], watcher["keepalive"] = random.choice((2, 10, 60)), random.choice((2, 10, 60))
        channels = random.choice((1, 2, 3))
        has_ttl = protocol != "mqtt311" and random.random() < 0.5
        steps: list[Step] = []
        for number in range(owners):
            name = f"owner-{number + 1}"
            for _ in range(random.randint(14, 26)):
                chosen = random.random()
                if chosen < 0.55:
                    arguments: dict[str, Any] = {
                        "channel": random.randrange(channels),
                        "kind": random.choice(("state", "state", "state", "remove", "passing")),
                    }
                    if has_ttl and arguments["kind"] == "state" and random.random() < 0.5:
                        arguments["ttl"] = random.choice((span(random, 0.05, 5.0), 1.0, 7200.0))
                    steps.append(Step(name, "publish", arguments))
                elif chosen < 0.8:
                    steps.append(Step(name, "pause", {"seconds": span(random, 1e-3, 4.0)}))
                elif chosen < 0.95:
                    steps.append(Step(name, "wait", {}))
                else:
                    steps.append(Step(name, "reopen", {}))
        looked = ["state/#", "state/+/0", "state/owner-1/0", "state/owner-1/#", "state/owner-1/1"]
        ways = ["all", "all", "all", "queue"] + (["never", "new"] if protocol != "mqtt311" else [])
        if protocol == "memory":
            ways.remove("new")
        for number in range(watchers):
            name = f"watcher-{number + 1}"
            for _ in range(random.randint(10, 16)):
                if random.random() < 0.6:
                    steps.append(Step(name, "look", {"channel": random.choice(looked), "how": random.choice(ways)}))
                else:
                    steps.append(Step(name, "pause", {"seconds": span(random, 1e-3, 2.0)}))
        roles = sorted({step.role for step in steps})
        faults = draw_faults(random, protocol, roles, until=20.0, least=2)
        if protocol == "memory" and faults:
            faults += [Fault(span(random, 1e-3, 10.0), "cut", {"role": random.choice(roles)}) for _ in range(2)]
        options = {
            **scheduling(random),
            "owners": owners,
            "watchers": watchers,
            "owner": owner,
            "watcher": watcher,
            "qos": 1 if protocol == "memory" else random.choice((1, 2)),
        }
        return Plan(options, tuple(steps), tuple(sorted(faults, key=lambda fault: fault.at)))


def _matches(pattern: str, name: str) -> bool:
    levels, parts = pattern.split("/"), name.split("/")
    for at, level in enumerate(levels):
        if level == "#":
            return True
        if at >= len(parts) or level not in ("+", parts[at]):
            return False
    return len(levels) == len(parts)
