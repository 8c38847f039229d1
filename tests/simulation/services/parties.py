"""What the services of remote events have in common: a ledger of events, generators, and the faults that they meet."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf
from typing import TYPE_CHECKING, Any, Final, TypeVar

from messaging.errors import (
    BrokerError,
    ClosedError,
    DeadlineError,
    JournalError,
    MessagingError,
    ReplyError,
)
from messaging.execution import Promise, clock
from messaging.leases import Landlord, Lease
from messaging.remoteevent import EventGenerator, EventServer, RemoteEvent, RetryPolicy
from tests.simulation.plans import Fault, Step
from tests.simulation.simulation import AMQP_FAULTS, MQTT_FAULTS, Role, Simulation, span

T = TypeVar("T")

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Sequence

    import messaging
    from messaging.remoteevent.event import EventKind
    from tests.simulation.fault_plans import Breaks

#: the kinds of each generator
KINDS: Final = ("a", "b")
#: time that a promise may take beyond its deadline, virtual seconds. Threads are held up for up to 20 s at each point
SLACK: Final = 60.0
#: faults of the disk, after which calls may fail
DISK_FAULTS: Final = frozenset({"full_disk", "failing_sync", "failing_write"})
#: errors of calls that have to store something, and the texts in them
_NOT_STORED: Final = {"JournalError": "", "JournalFullError": "", "JournalUnreadableError": "cannot open"}
#: how long a write waits for a disk that is full, virtual seconds: the ``timeout`` of a journal (``docs/journal.md``)
_WRITE: Final = 30.0
#: states of events that may arrive, and need not
OPEN: Final = frozenset({"sent", "killed", "OutcomeUnknownError", "DeadlineError"})


@dataclass(frozen=True, kw_only=True)
class Noted(RemoteEvent):
    """An event with a text of its own."""

    text: str


@dataclass(slots=True)
class Sent:
    """An event that was generated.

    Attributes:
        kind: source and id.
        state: "sent", "confirmed", "killed", or the name of an error.
        number: its sequence number, once that is known; 0 before.
        at: when it was confirmed, virtual seconds.
        scope: the transaction that it was generated in; empty without one.
    """

    kind: EventKind
    state: str = "sent"
    number: int = 0
    at: float = 0.0
    scope: str = ""


@dataclass(slots=True)
class Ledger:
    """The events that were generated, by their texts, in the order of the calls."""

    sent: dict[str, Sent] = field(default_factory=dict)
    #: number of the last event of each kind that was confirmed
    last: dict[EventKind, int] = field(default_factory=dict)
    texts: dict[tuple[EventKind, int], str] = field(default_factory=dict)
    #: number, text and moment of each event that was confirmed, by kind
    _confirmed: dict[EventKind, list[tuple[int, str, float]]] = field(default_factory=dict)

    def confirm(self, text: str, number: int, at: float) -> None:
        """Note the number of an event, and when it was confirmed."""
        sent = self.sent[text]
        sent.state, sent.number, sent.at = "confirmed", number, at
        self._confirmed.setdefault(sent.kind, []).append((number, text, at))

    def confirmed_after(self, kind: EventKind, number: int, since: float = 0.0) -> list[tuple[int, str]]:
        """Return number and text of the events of a kind that were confirmed, behind a number and a moment."""
        return [(each, text) for each, text, at in self._confirmed.get(kind, ()) if each > number and at >= since]

    def is_settled(self) -> bool:
        """Return whether each event has an outcome."""
        return all(each.state != "sent" for each in self.sent.values())


def is_trouble(error: BaseException) -> bool:
    """Return whether an error is one that users reckon with when brokers, parties and networks fail."""
    return isinstance(error, (BrokerError, DeadlineError, ClosedError))


class Party(Role):
    """A program of remote events. It has one instance.

    Attributes:
        m: the instance.
        is_closing: the instance, or a server of it, is being closed.
        closed_at: when the last one was closed, virtual seconds.
    """

    m: messaging.Messaging
    is_closing = False
    closed_at = -inf

    def connect(self) -> messaging.Messaging:
        """Return a new instance, with the settings of the plan."""
        self.is_closing = False
        settings = dict(self.simulation.plan.options.get("settings", {}))
        if self.simulation.protocol == "mqtt311":
            settings["envelope"] = True
        return self.simulation.connect(self, retry_connect=True, **settings)

    def stop_serving(self, server: Any) -> None:
        """Close a server, and remember when."""
        self.is_closing = True
        server.close()
        self.is_closing = False
        self.closed_at = self.world.scheduler.now

    def disconnect(self) -> None:
        """Close the instance, and remember when."""
        self.is_closing = True
        self.m.close()
        self.is_closing = False
        self.closed_at = self.world.scheduler.now

    def _is_fault_of_closing(self, error: MessagingError) -> bool:
        """Return whether a call was left unanswered by an instance that was closed meanwhile.

        "An instance that closes waits up to half of its `close_timeout`, and reports a fault (`ClosedError`) then",
        "requests that were not begun [...] get a fault" (``docs/reply-to.md``); "gets `ClosedError` [...], and tries
        again later" (``docs/remote-events.md``).
        """
        if not isinstance(error, ReplyError) or error.kind != ClosedError.__name__:
            return False
        limit: float = self.simulation.timeout + SLACK  # type: ignore[attr-defined]
        others = [each for each in self.simulation.roles if isinstance(each, Party) and each is not self]
        return any(each.closed_at > self.world.scheduler.now - limit or each.is_closing for each in others)

    def _is_fault_of_disk(self, error: MessagingError) -> bool:
        """Return whether a call says that something is not stored, and a disk has failed while it ran.

        "What cannot be stored is refused: with `JournalError`, or `JournalFullError` on a full disk [...] over the
        network as `ReplyError` of that kind" (``docs/remote-events.md``).
        """
        name = error.kind if isinstance(error, ReplyError) else type(error).__name__
        text = _NOT_STORED.get(name)
        if text is None or text not in str(error):
            return False
        limit: float = self.simulation.timeout + _WRITE + SLACK  # type: ignore[attr-defined]
        disk = self.world.disk
        return disk.is_full or disk.failed_at > self.world.scheduler.now - limit

    def _is_fault_of_channel(self, error: MessagingError) -> bool:
        """Return whether the broker may have refused the reply to a call: it has closed a channel of another role."""
        breaks: Breaks | None = self.simulation.breaks  # type: ignore[attr-defined]
        if breaks is None or not isinstance(error, ReplyError):
            return False
        now, limit = self.world.scheduler.now, self.simulation.timeout + SLACK  # type: ignore[attr-defined]
        others = (each.name for each in self.simulation.roles if each is not self)
        return breaks.has_refused(error.kind, others, now - limit, now)

    def settled(self, found: Any, limit: float, what: str) -> Any:
        """Return the result of a promise, which must be there in time; return any other value as it is."""
        if not isinstance(found, Promise):
            return found
        found.was_retrieved = True
        try:
            error = found.exception(limit + SLACK)
        except DeadlineError:
            self.simulation.broken(f"{self.name}: the promise of {what} has no outcome {SLACK:g} s after its deadline")
            raise
        if error is not None:
            raise error
        return found.result(0)

    def attempt(self, what: str, function: Callable[[], Any]) -> bool:
        """Call a function, which may fail as users reckon with; return whether it has returned."""
        try:
            function()
        except MessagingError as error:
            self.failed(what, error)
            return False
        return True

    def failed(self, what: str, error: MessagingError) -> None:
        """Judge the failure of a call."""
        self.note(f"{what}: {type(error).__name__}: {error}"[:200])
        faults = self._is_fault_of_closing, self._is_fault_of_disk, self._is_fault_of_channel
        if not (is_trouble(error) or any(is_fault(error) for is_fault in faults)):
            self.simulation.broken(f"{self.name}: {what} failed with {type(error).__name__}: {error}"[:400])

    def insist(self, what: str, function: Callable[[], Any]) -> None:
        """Call a function until it returns."""
        while not self.attempt(what, function):
            clock.pause(0.5)

    def insist_on(self, what: str, make: Callable[[], T]) -> T:
        """Return what a function makes, which is called until it returns."""
        made: list[T] = []
        self.insist(what, lambda: made.append(make()))
        return made[0]


class Generator(Party):
    """Generates events of two kinds, and serves its registrations.

    Its name is the source of its events, and a part of its channel.

    Attributes:
        is_proven: it has generated events after the last fault of a disk.
    """

    is_proven = False

    def open(self) -> None:
        """Connect, and open the generator."""
        ledger: Ledger = self.simulation.ledger  # type: ignore[attr-defined]
        for each in ledger.sent.values():
            if each.kind[0] == self.name and each.state == "sent":
                each.state = "killed"
        self.count = getattr(self, "count", 0)
        self.promises: list[Promise[Any]] = []
        self._open()

    def _doubt_last(self) -> None:
        """Note that the events after the last one that was stored may arrive.

        "The event is lost, unless the generator ends before it has stored another one: then it may be there in the next
        run" (``docs/remote-events.md``).
        """
        ledger: Ledger = self.simulation.ledger  # type: ignore[attr-defined]
        for each in reversed(ledger.sent.values()):
            if each.kind[0] == self.name:
                if each.state == "confirmed":
                    break
                if each.state in _NOT_STORED:
                    each.state = "killed"

    def _open(self) -> None:
        self._doubt_last()
        options = self.simulation.plan.options
        self.m = self.connect()
        retry = None if options["retry"] is None else RetryPolicy(**options["retry"])
        durable: dict[str, Any] = {}
        if options["is_durable"]:
            durable = {"path": self.world.disk.folder / self.name, "retry": retry, "messaging": self.m}
            durable["listeners"] = self.listeners()
        self.landlord = Landlord(f"landlord of {self.name}", max_duration=Lease.FOREVER)
        self.generator = self.insist_on(
            "open the generator",
            lambda: EventGenerator(self.name, events=KINDS, landlord=self.landlord, **durable),
        )
        self.server: EventServer | None = None
        self.insist("serve", self._serve)

    def listeners(self) -> dict[str, Any]:
        """Return the listeners of this process that are found again, by name."""
        return {}

    def _serve(self) -> None:
        self.server = EventServer(self.m, channel_of(self.name), self.generator)

    def do_generate(self, kind: str, count: int, size: int) -> None:
        """Step: generate so many events at once."""
        for _ in range(count):
            text = f"{self.name}:{self.count}"
            self.count += 1
            self.generate(text, kind, size)

    def generate(self, text: str, kind: str, size: int, **options: Any) -> Sent:
        """Generate one event."""
        ledger: Ledger = self.simulation.ledger  # type: ignore[attr-defined]
        sent = ledger.sent[text] = Sent((self.name, kind))
        promise = self.generator.generate(kind, Noted, text=text.ljust(size, "."), **options)
        self.promises.append(promise)
        promise.listen(lambda: self._settle(text, promise))
        return sent

    def _settle(self, text: str, promise: Promise[int]) -> None:
        ledger: Ledger = self.simulation.ledger  # type: ignore[attr-defined]
        sent = ledger.sent[text]
        error = promise.exception(0)
        if error is not None:
            sent.state = type(error).__name__
            self.note(f"{text} {sent.state}")
            if isinstance(error, JournalError) and not self._is_fault_of_disk(error):
                self.simulation.broken(f"{text} is not stored, although no disk fails: {error}"[:400])
            return
        self.confirm(text, promise.result(0))

    def confirm(self, text: str, number: int) -> None:
        """Note the number of an event."""
        ledger: Ledger = self.simulation.ledger  # type: ignore[attr-defined]
        sent = ledger.sent[text]
        ledger.confirm(text, number, self.world.scheduler.now)
        self.note(f"{text} is number {number} of {sent.kind[1]}")
        if number <= ledger.last.get(sent.kind, 0):
            self.simulation.broken(f"{text} has the number {number}, after {ledger.last[sent.kind]} of {sent.kind}")
        ledger.last[sent.kind] = number
        if ledger.texts.setdefault((sent.kind, number), text) != text:
            self.simulation.broken(f"{text} and {ledger.texts[sent.kind, number]} have one number: {number}")

    def do_wait(self) -> None:
        """Step: wait for the outcomes of all events."""
        for each in self.promises:
            each.exception(SLACK)
        self.promises.clear()

    def do_reopen(self, server_first: bool) -> None:
        """Step: close the generator and its server, in one order or the other, and open them again."""
        self._close(server_first=server_first)
        self._open()

    def do_reopen_server(self) -> None:
        """Step: close the server alone, and open it again."""
        if self.server is not None:
            self.stop_serving(self.server)
        self.insist("serve", self._serve)

    def _close(self, *, server_first: bool) -> None:
        if server_first and self.server is not None:
            self.stop_serving(self.server)
        self.attempt("close the generator", self.generator.close)
        for each in self.promises:
            if not each.done():
                self.simulation.broken(f"{self.name}: an event has no outcome after close()")
        if not server_first and self.server is not None:
            self.stop_serving(self.server)
        self.landlord.close()
        self.disconnect()

    def rest(self) -> None:
        """Generate again after faults of the disk: the generator has to go on."""
        if needs_proof(self.simulation) and not self.is_proven:
            self.is_proven = self.attempt("generate again", self._generate_again)

    def _generate_again(self) -> None:
        for kind in KINDS:
            text = f"{self.name}:{self.count}"
            self.count += 1
            self.generate(text, kind, 0)
            self.settled(self.promises[-1], _WRITE, "an event")

    def close(self) -> None:
        """Close everything."""
        self._close(server_first=True)


def channel_of(name: str) -> str:
    """Return the channel of a generator."""
    return f"generators/{name}"


def generator_steps(
    random: random.Random, name: str, kinds: list[tuple[str, float]], low: int, high: int
) -> list[Step]:
    """Return steps of a generator.

    Args:
        random: decides.
        name: of its role.
        kinds: further steps without arguments beside "generate" and "pause", with their probabilities.
        low, high: bounds of the number of steps.
    """
    steps = []
    for _ in range(random.randint(low, high)):
        chosen = random.random()
        if chosen < 0.55:
            arguments: dict[str, Any] = {"kind": random.choice(KINDS), "count": random.choice((1, 1, 2, 5, 40)),
                                         "size": random.choice((0, 0, 40, 2000))}  # fmt: skip
            steps.append(Step(name, "generate", arguments))
            continue
        at = 0.55
        for kind, part in kinds:
            at += part
            if chosen < at:
                steps.append(Step(name, kind, {"server_first": random.random() < 0.5} if kind == "reopen" else {}))
                break
        else:
            steps.append(Step(name, "pause", {"seconds": span(random, 1e-3, 10.0)}))
    return steps


def make_faults(random: random.Random, protocol: str, roles: list[str], mortal: list[str]) -> list[Fault]:
    """Return the faults of a plan: none in a tenth of all.

    Args:
        random: decides.
        protocol: of the plan.
        roles: whose connections and clocks may fail.
        mortal: roles that may be killed.
    """
    if random.random() < 0.1:
        return []
    makers: list[Any] = [
        lambda: ("slow_sync", {"seconds": span(random, 0.1, 20.0), "longest": span(random, 0.01, 1.0)}),
    ]
    if protocol != "mqtt311":  # its envelopes end by the wall clock of their senders
        offsets = (-3600.0, -5.0, 5.0, 86_400.0)
        makers.append(lambda: ("wall_clock", {"role": random.choice(roles), "offset": random.choice(offsets)}))
    if protocol != "memory":
        kinds = AMQP_FAULTS if protocol == "amqp" else MQTT_FAULTS
        makers = [
            *makers,
            *[lambda: ("cut", {"role": random.choice([*roles, None])})] * 4,
            *[lambda: ("black_hole", {"role": random.choice([*roles, None]), "seconds": span(random, 0.01, 60.0)})] * 2,
            lambda: ("stall", {"role": random.choice([*roles, None]), "seconds": span(random, 0.01, 10.0)}),
            lambda: ("refuse", {"seconds": span(random, 0.01, 20.0)}),
            lambda: ("silence", {"seconds": span(random, 0.01, 20.0)}),
            lambda: (
                "slow_network",
                {
                    "seconds": span(random, 0.1, 20.0),
                    "longest": span(random, 0.001, 1.0),
                    "piece": random.choice((1, 3, 50, 65_536)),
                },
            ),
            *[lambda: ("restart_broker", {"seconds": span(random, 0.01, 10.0), "is_kill": random.random() < 0.5})] * 2,
            *[lambda: ("broker", {"seconds": span(random, 0.1, 20.0), **random.choice(kinds)})] * 2,
            *[lambda: kill(random, mortal)] * 6,
        ]  # fmt: skip
    faults = []
    for _ in range(random.choice((1, 2, 2, 3, 3, 4, 6))):
        name, arguments = random.choice(makers)()
        faults.append(Fault(span(random, 1e-3, 60.0), name, arguments))
    return sorted(faults, key=lambda fault: fault.at)


def make_power_losses(random: random.Random, protocol: str, mortal: list[str]) -> list[Fault]:
    """Return faults by which machines lose power, and what they have not synced: none in half of all plans.

    Args:
        random: decides.
        protocol: of the plan.
        mortal: roles whose machines may lose power.
    """
    if protocol == "memory" or random.random() < 0.5:
        return []
    return [
        Fault(span(random, 1e-3, 60.0), "kill", {**kill(random, mortal)[1], "vanishes": True})
        for _ in range(random.choice((1, 2, 3)))
    ]


def make_disk_faults(random: random.Random) -> list[Fault]:
    """Return faults of the disk: none in half of all plans.

    Args:
        random: decides.
    """
    if random.random() < 0.5:
        return []
    makers: list[Any] = [
        lambda: ("full_disk", {"seconds": span(random, 0.05, 30.0), "left": random.choice((0, 100, 1000, 10_000))}),
        lambda: ("failing_sync", {"count": random.choice((1, 1, 3))}),
        lambda: ("failing_write", {"count": random.choice((1, 1, 3))}),
    ]
    faults = []
    for _ in range(random.choice((1, 2, 3, 4))):
        name, arguments = random.choice(makers)()
        faults.append(Fault(span(random, 1e-2, 60.0), name, arguments))
    return faults


def has_disk_faults(simulation: Simulation) -> bool:
    """Return whether the disk fails in a run."""
    return any(fault.name in DISK_FAULTS for fault in simulation.plan.faults)


def needs_proof(simulation: Any) -> bool:
    """Return whether the faults of the disk are over, and the parties have to show that they go on."""
    return simulation.is_resting and has_disk_faults(simulation)


def is_proven(simulation: Any, generators: Sequence[Generator]) -> bool:
    """Return whether the generators have gone on after the faults of the disk. Asked at rest."""
    simulation.is_resting = True
    return not has_disk_faults(simulation) or all(each.is_proven for each in generators)


def kill(random: random.Random, roles: list[str]) -> tuple[str, dict[str, Any]]:
    """Return name and arguments of the fault that kills a role for some time."""
    return "kill", {"role": random.choice(roles), "seconds": span(random, 0.01, 30.0), "vanishes": False}


def is_calm(simulation: Simulation) -> bool:
    """Return whether nothing fails, is closed or is held up for long, so that nothing is tried again."""
    options = simulation.plan.options
    if options["hold_up"] > 0 and options["longest"] > 0.5:
        return False
    if any(fault.name not in ("wall_clock", "slow_sync") for fault in simulation.plan.faults):
        return False
    return not any(step.name.startswith(("reopen", "fail", "cancel")) for step in simulation.plan.steps)
