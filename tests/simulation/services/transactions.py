"""Transactions: clients commit or abort what several generators and participants of their own have done.

What is promised, and checked (``docs/remote-events.md``, EV.2.4):

- a transaction is committed or aborted, for all its participants, whatever is killed, closed or not reached meanwhile;
- events of a transaction reach listeners outside of it when it is committed, never before, and never if it is aborted;
- an event whose ``generate`` failed is not notified of; one that follows the decision is refused;
- a participant that has prepared is told the outcome, once it is there, or asks for it; it is never told two outcomes;
- a commit that returned is a commit; one that failed with ``CannotCommitError`` is none;
- a registration inside gets the events of the transaction in their order, without a gap, and none after its end;
- what a disk that is full or fails does not take is refused, by an error that says so; everything goes on after that;
- neither the manager nor a generator keeps a transaction for ever;
- each call has an outcome when its deadline has passed.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf
from typing import TYPE_CHECKING, Any, Final

from messaging.errors import (
    CannotAbortError,
    CannotCommitError,
    CannotJoinError,
    DeadlineError,
    MessagingError,
    OutcomeUnknownError,
    TransactionError,
    UnknownTransactionError,
)
from messaging.execution import clock
from messaging.remoteevent import RemoteEvent, RetryPolicy
from messaging.remoteevent.transactions import (
    RemoteTransactionManager,
    TransactionManager,
    TransactionServer,
    TransactionState,
    Vote,
)
from tests.simulation.fault_plans import watch_channels
from tests.simulation.plans import Plan, Step
from tests.simulation.services.parties import (
    KINDS,
    Generator,
    Ledger,
    Noted,
    Party,
    Sent,
    is_calm,
    is_proven,
    make_disk_faults,
    make_faults,
    make_power_losses,
    needs_proof,
)
from tests.simulation.simulation import Keeper, Simulation, scheduling, span
from tests.simulation.world.world import PlannedError

if TYPE_CHECKING:
    import random
    from collections.abc import Callable

    from messaging.remoteevent.event import EventKind
    from messaging.remoteevent.transactions import TransactionInfo

CHANNEL: Final = "transactions"
#: how long a client waits for the generators, virtual seconds
_PROMPT: Final = 20.0
#: events of a transaction that a registration inside may still get after its end, virtual seconds
_AFTER: Final = 60.0
#: how the names begin that participants without a name get
_UNNAMED: Final = "Account "


@dataclass(slots=True)
class Order:
    """What a client asks of a generator: to generate events within a transaction, or to register inside.

    Attributes:
        transaction: what it belongs to.
        kind: of the events.
        count: number of the events; 0: to register.
        state: "waiting", "taken", "done", or the name of an error.
    """

    transaction: Known
    kind: str
    count: int
    state: str = "waiting"


@dataclass(slots=True)
class Known:
    """A transaction, as the test knows it.

    Attributes:
        id: of the transaction.
        is_ending: its client has asked for an end, or has left it to its lease.
        outcome: "committed" or "aborted", once its client knows; otherwise empty.
        texts: its events, of all generators.
        votes: how its own participants vote, by their names.
        is_lost: a participant without a name was killed: nobody else can tell its outcome.
        is_gone: returns whether the participants without a name are: each is closed with the manager of its client.
        ended_at: when the outcome was known, virtual seconds.
    """

    id: str
    is_ending: bool = False
    outcome: str = ""
    texts: list[str] = field(default_factory=list)
    votes: dict[str, str] = field(default_factory=dict)
    is_lost: bool = False
    is_gone: Callable[[], bool] = lambda: False
    ended_at: float = inf


class Account:
    """A participant of a client. What it knows is on its disk."""

    def __init__(self, simulation: Transacting, name: str, calls: dict[str, list[str]]) -> None:
        self._simulation = simulation
        self.name = name
        #: by transaction
        self.calls = calls
        self.failing = 0

    def _note(self, transaction_id: str, operation: str) -> None:
        if self.failing > 0 and operation != "prepare":
            self.failing -= 1
            raise PlannedError("as planned")
        calls = self.calls.setdefault(transaction_id, [])
        calls.append(operation)
        self._simulation.world.note(self.name, f"{operation} {transaction_id}")
        if {"commit", "abort"} <= {*calls}:
            self._simulation.broken(f"{self.name} was told two outcomes of {transaction_id}: {calls}")
        if operation == "commit" and "prepare" not in calls:
            self._simulation.broken(f"{self.name} commits {transaction_id}, which it has not prepared: {calls}")

    def prepare(self, transaction_id: str) -> Vote:
        """See ``TransactionParticipant``."""
        vote = self._simulation.known[transaction_id].votes[self.name]
        if vote == "fails":
            raise PlannedError("as planned")
        if vote == "slow":
            clock.pause(1.0)
        if vote in ("prepared", "slow"):
            self._note(transaction_id, "prepare")
        return {"not changed": Vote.NOTCHANGED, "aborted": Vote.ABORTED}.get(vote, Vote.PREPARED)

    def commit(self, transaction_id: str) -> None:
        """See ``TransactionParticipant``."""
        self._note(transaction_id, "commit")

    def abort(self, transaction_id: str) -> None:
        """See ``TransactionParticipant``."""
        self._note(transaction_id, "abort")

    @property
    def in_doubt(self) -> list[str]:
        """The transactions that it has prepared, and of which it knows no outcome."""
        return [key for key, calls in self.calls.items() if "prepare" in calls and not {"commit", "abort"} & {*calls}]


class Client(Party):
    """Makes transactions. Derived classes say how the manager is reached."""

    simulation: Transacting
    manager: Any

    def begin_life(self) -> None:
        """Begin in a new process: the participants with names go on."""
        self.calls: dict[str, dict[str, list[str]]] = getattr(self, "calls", {})
        self.number: int = getattr(self, "number", 0)
        self.life: int = getattr(self, "life", 0) + 1
        #: transactions on other threads of this life
        self.beside = 0
        self.ongoing: dict[str, Known] = getattr(self, "ongoing", {})
        for known in self.ongoing.values():
            known.is_lost = known.is_lost or any("unnamed" in name for name in known.votes)
        self.ongoing.clear()
        self.accounts: dict[str, Account] = {}

    def account(self, name: str) -> Account:
        """Return a participant of this client."""
        found = self.accounts.get(name)
        if found is None:
            calls = self.calls.setdefault(name, {})
            found = self.accounts[name] = Account(self.simulation, f"{self.name}/{name}", calls)
        return found

    def recover(self) -> None:
        """Have the manager tell the outcomes to the participants of earlier lives."""
        for name in [*self.calls]:
            if "unnamed" not in name:
                account = self.account(name)
                in_doubt = account.in_doubt
                pending = self.settled(self.manager.recover(account.name, account), self.simulation.timeout, "recover")
                for each in in_doubt:
                    if each not in pending and each in account.in_doubt:
                        account.abort(each)

    # --- steps

    def do_transact(
        self, orders: list[list[Any]], accounts: list[list[str]], duration: float, ending: str, pause: float,
        timeout: float | None, is_beside: bool,
    ) -> None:  # fmt: skip
        """Step: make a transaction, and end it; on another thread if the plan says so."""

        life = self.life

        def run() -> None:
            try:
                self._transact(orders, accounts, duration, ending, pause, timeout)
            except TransactionError as error:
                self.note(f"transact: {type(error).__name__}: {error}")
            except MessagingError as error:
                self.failed("transact", error)

        def run_beside() -> None:
            run()
            if self.life == life:
                self.beside -= 1

        if is_beside:
            self.beside += 1
            self.process.start(run_beside, f"{self.name} beside")
        else:
            run()

    def _transact(
        self, orders: list[list[Any]], accounts: list[list[str]], duration: float, ending: str, pause: float,
        timeout: float | None,
    ) -> Known:  # fmt: skip
        transaction = self.manager.create(duration)
        known = self.simulation.known[transaction.id] = self.ongoing[transaction.id] = Known(transaction.id)
        life = self.life
        known.is_gone = lambda: self.life > life
        self.note(f"created {known.id}")
        given = []
        for generator, kind, count in orders:
            order = Order(known, kind, count)
            self.simulation.desks[generator].append(order)
            given.append(order)
        for name, vote in accounts:
            account = self.account(f"{name} {self.number}" if name == "unnamed" else name)
            self.number += 1
            known.votes[account.name] = vote
            transaction.join(account, name=None if name == "unnamed" else account.name)
        until = self.world.scheduler.now + _PROMPT
        while any(each.state in ("waiting", "taken") for each in given) and self.world.scheduler.now < until:
            clock.pause(0.1)
        clock.pause(pause)
        known.is_ending = True
        if ending != "leave":
            self._end(transaction, known, ending, timeout)
        self.ongoing.pop(known.id, None)
        return known

    def _end(self, transaction: Any, known: Known, ending: str, timeout: float | None) -> None:
        for attempt in range(5):
            try:
                ended = transaction.commit_soon(timeout) if ending == "commit" else transaction.abort_soon(timeout)
                self.settled(ended, self.simulation.timeout + (timeout or 0.0) + 20.0, ending)
            except CannotCommitError:
                self._know(known, "aborted")
            except CannotAbortError:
                self._know(known, "committed")
            except UnknownTransactionError as error:
                self.note(f"{ending} {known.id}: {error}")
                return
            except OutcomeUnknownError as error:
                self.note(f"{ending} {known.id}: {error}")
            except DeadlineError as error:
                self.note(f"{ending} {known.id}: {error}")
                if "is committed, and" in str(error):
                    self._know(known, "committed")
                elif "is aborted, and" in str(error):
                    self._know(known, "aborted")
            except MessagingError as error:
                self.failed(ending, error)
            else:
                self._know(known, "committed" if ending == "commit" else "aborted")
            if known.outcome:
                return
            clock.pause(0.5 * (attempt + 1))

    def _know(self, known: Known, outcome: str) -> None:
        self.note(f"{known.id} is {outcome}")
        known.ended_at = min(known.ended_at, self.world.scheduler.now)
        if known.outcome and known.outcome != outcome:
            self.simulation.broken(f"{known.id} is {outcome}, and was {known.outcome}")
        known.outcome = outcome

    def do_fail(self, count: int) -> None:
        """Step: have the participants fail to end the next transactions."""
        for account in self.accounts.values():
            account.failing = count

    def rest(self) -> None:
        """Ask for the outcomes that are not known."""
        for account in [*self.accounts.values()]:
            account.failing = 0
            for each in account.in_doubt:
                try:
                    state = self.settled(self.manager.state(each), self.simulation.timeout, "state")
                except UnknownTransactionError:
                    state = TransactionState.ABORTED
                except MessagingError as error:
                    self.failed("state", error)
                    continue
                if state is TransactionState.ABORTED and each in account.in_doubt:
                    account.abort(each)
        clock.pause(1.0)


class RemoteClient(Client):
    """A client in a process of its own.

    Attributes:
        has_committed: a transaction, after the last fault of a disk.
    """

    has_committed = False

    def open(self) -> None:
        """Connect, and recover."""
        self.begin_life()
        self.m = self.connect()
        self.manager = RemoteTransactionManager(self.m, CHANNEL, timeout=self.simulation.timeout)
        self.insist("recover", self.recover)

    def rest(self) -> None:
        """See ``Client``; then commit after faults of the disk: all have to go on."""
        super().rest()
        if needs_proof(self.simulation) and not self.has_committed:
            orders = [[each.name, KINDS[0], 1] for each in self.simulation.generators]
            try:
                known = self._transact(orders, [], 100.0, "commit", 0.0, None)
                self.has_committed = known.outcome == "committed"
            except TransactionError as error:
                self.note(f"transact: {type(error).__name__}: {error}")
            except MessagingError as error:
                self.failed("transact", error)

    def do_reopen(self) -> None:
        """Step: close everything, and open it again."""
        self.close()
        self.open()

    def close(self) -> None:
        """Close everything."""
        self.manager.close()
        self.disconnect()


class Manager(Client):
    """The transaction manager and its server; also a client in the same process."""

    def open(self) -> None:
        """Connect, and open the manager."""
        self.begin_life()
        options = self.simulation.plan.options
        self.m = self.connect()
        path = self.world.disk.folder / "manager" if options["manager"]["is_durable"] else None
        retry = RetryPolicy(**options["manager"]["retry"])
        self.manager = self.insist_on(
            "open the manager",
            lambda: TransactionManager(
                path, messaging=self.m, retry=retry, time_limit=options["manager"]["time_limit"], max_duration=inf
            ),
        )
        self.insist("serve", self._serve)
        self.recover()

    def _serve(self) -> None:
        self.server = TransactionServer(self.m, CHANNEL, self.manager)

    def do_reopen(self, server_first: bool) -> None:
        """Step: close the manager and its server, in one order or the other, and open them again."""
        self._close(server_first=server_first)
        self.open()

    def do_reopen_server(self) -> None:
        """Step: close the server alone, and open it again."""
        self.stop_serving(self.server)
        self.insist("serve", self._serve)

    def _close(self, *, server_first: bool) -> None:
        if server_first:
            self.stop_serving(self.server)
        self.attempt("close the manager", self.manager.close)
        if not server_first:
            self.stop_serving(self.server)
        self.disconnect()

    def close(self) -> None:
        """Close everything."""
        self._close(server_first=True)


class Transactor(Generator):
    """A generator that takes orders of clients. Its listeners outside and inside of transactions are its own."""

    simulation: Transacting

    def open(self) -> None:
        """Open the generator, recover, and take orders."""
        for order in self.simulation.desks[self.name]:
            if order.state == "taken":
                order.state = "killed"
        super().open()

    def listeners(self) -> dict[str, Any]:
        """See ``Generator``."""
        return {"heard": self.heard}

    def _open(self) -> None:
        super()._open()
        self.transactions = RemoteTransactionManager(self.m, CHANNEL, timeout=self.simulation.timeout)
        if not getattr(self, "after", None) or not self.simulation.plan.options["is_durable"]:
            self.after = {
                kind: self.insist_on(
                    "register",
                    lambda kind=kind: self.generator.register(kind, None, self.heard, inf),  # type: ignore[misc]
                ).sequence_number
                for kind in KINDS
            }
        self.insist("recover", self._recover)
        self.is_serving = True
        self.process.start(self._serve_orders, f"{self.name} orders")

    def _recover(self) -> None:
        participant = self.generator.participant
        known = [*self.simulation.known]
        promise = self.transactions.recover(participant.name, participant)
        pending = self.settled(promise, self.simulation.timeout, "recover")
        for each in known:
            if each not in pending:
                self.insist("abort", lambda each=each: participant.abort(each))  # type: ignore[misc]

    def _serve_orders(self) -> None:
        generator = self.generator
        while self.is_serving and generator is self.generator:
            waiting = [each for each in self.simulation.desks[self.name] if each.state == "waiting"]
            if not waiting:
                clock.pause(0.2)
                continue
            order = waiting[0]
            order.state = "taken"
            try:
                self._serve_order(order)
            except CannotJoinError as error:
                order.state = type(error).__name__
                if not order.transaction.is_ending and is_calm(self.simulation):
                    self.simulation.broken(f"{self.name} cannot join {order.transaction.id}: {error}")
            except TransactionError as error:
                order.state = type(error).__name__
            except MessagingError as error:
                order.state = type(error).__name__
                self.failed("an order", error)
            else:
                order.state = "done"
            self.note(f"order of {order.transaction.id}: {order.state}")

    def _serve_order(self, order: Order) -> None:
        known = order.transaction
        transaction: Any = self.transactions.transaction(known.id)
        if not order.count:
            inside = Inside(self, known)
            self.generator.register(order.kind, None, inside.heard, 300.0, transaction=transaction)
        for _ in range(order.count):
            text = f"{self.name}:{self.count}"
            self.count += 1
            sent = self.simulation.ledger.sent[text] = Sent((self.name, order.kind), "killed", scope=known.id)
            try:
                self.generator.generate(order.kind, Noted, text=text, transaction=transaction)
            except MessagingError as error:
                sent.state = type(error).__name__
                raise
            sent.state = "scoped"
            known.texts.append(text)

    def heard(self, event: RemoteEvent) -> None:
        """Note an event outside of transactions, and judge it."""
        simulation = self.simulation
        if not isinstance(event, Noted):
            simulation.broken(f"{self.name}: an event that nobody generated: {event!r}"[:300])
            return
        text, kind, number = event.text.rstrip("."), event.kind, event.sequence_number
        sent = simulation.ledger.sent.get(text)
        self.note(f"{text} arrives as {number}")
        if sent is None or sent.kind != kind or sent.state not in ("sent", "killed", "scoped", "confirmed"):
            simulation.broken(f"{text} arrived as {kind}, and was sent as {sent}")
            return
        if sent.scope:
            known = simulation.known[sent.scope]
            if not known.is_ending:
                simulation.broken(f"{text} arrived before {known.id} was committed")
            if known.outcome == "aborted":
                simulation.broken(f"{text} arrived, although {known.id} is aborted")
        elif sent.number and sent.number != number:
            simulation.broken(f"{text} arrived as {number}, and is {sent.number}")
        arrived = simulation.arrived.setdefault(kind, {})
        if number in arrived:
            if arrived[number] != text:
                simulation.broken(f"{text} and {arrived[number]} have one number: {number}")
            elif is_calm(simulation):
                simulation.broken(f"{text} arrived again, although nothing failed")
            return
        if arrived and number < max(arrived):
            simulation.broken(f"{text}, number {number} of {kind}, arrived behind {max(arrived)}")
        if text in simulation.texts:
            simulation.broken(f"{text} arrived as {simulation.texts[text]} and as {number}")
        arrived[number] = text
        simulation.texts[text] = number

    def _close(self, *, server_first: bool) -> None:
        self.is_serving = False
        for order in self.simulation.desks[self.name]:
            if order.state == "taken":
                clock.pause(0.1)
        self.transactions.close()
        super()._close(server_first=server_first)


class Inside:
    """A listener within a transaction."""

    def __init__(self, role: Transactor, known: Known) -> None:
        self._role = role
        self._known = known
        self._last = 0

    def heard(self, event: RemoteEvent) -> None:
        """Note an event, and judge it."""
        role, known = self._role, self._known
        text = event.text.rstrip(".") if isinstance(event, Noted) else ""
        sent = role.simulation.ledger.sent.get(text)
        role.note(f"inside of {known.id}: {text} as {event.sequence_number}")
        if sent is None:
            role.simulation.broken(f"inside of {known.id}: an event that nobody generated: {event!r}"[:300])
        if event.sequence_number > self._last + 1 and self._last:
            role.simulation.broken(f"inside of {known.id}: number {event.sequence_number} after {self._last}")
        self._last = max(self._last, event.sequence_number)
        if role.world.scheduler.now > known.ended_at + _AFTER:
            role.simulation.broken(f"inside of {known.id}: {text} arrived {_AFTER:g} s after its end")


class Transacting(Simulation):
    """Clients, generators and a manager."""

    name = "transactions"

    def begin(self) -> None:
        """See ``Simulation``."""
        options = self.plan.options
        self.ledger = Ledger()
        self.timeout: float = options["timeout"]
        self.breaks = watch_channels(self)
        self.is_resting = False
        self.known: dict[str, Known] = {}
        #: what arrived outside: text by number, by kind; and number by text
        self.arrived: dict[EventKind, dict[int, str]] = {}
        self.texts: dict[str, int] = {}
        names = [f"generator-{number + 1}" for number in range(options["generators"])]
        self.desks: dict[str, list[Order]] = {name: [] for name in names}
        if self.protocol == "memory":
            self.roles.append(Keeper(self, "keeper"))
        self.manager = Manager(self, "manager")
        self.generators = [Transactor(self, name) for name in names]
        self.clients = [RemoteClient(self, f"client-{number + 1}") for number in range(options["clients"])]
        self.roles += [self.manager, *self.generators, *self.clients]

    # --- judging

    def is_at_rest(self) -> bool:
        """See ``Simulation``."""
        if any(isinstance(each, Client) and each.beside for each in self.roles):
            return False
        return self._is_proven() and self.ledger.is_settled() and not self._problems()

    def _is_proven(self) -> bool:
        """Return whether all go on after the faults of the disk."""
        if not is_proven(self, self.generators):
            return False
        return not needs_proof(self) or all(each.has_committed for each in self.clients)

    def _outcome(self, known: Known) -> str:
        """Return the outcome of a transaction, by what its participants and listeners saw; empty: nothing of it."""
        if known.outcome:
            return known.outcome
        told = [call for each in self._accounts() for call in each.calls.get(known.id, ())]
        if "commit" in told or any(text in self.texts for text in known.texts):
            return "committed"
        return "aborted" if "abort" in told else ""

    def _accounts(self) -> list[Account]:
        return [each for client in (self.manager, *self.clients) for each in client.accounts.values()]

    def _awaited(self, kept: TransactionInfo) -> bool:
        """Return whether a transaction that the manager keeps has to be completed.

        A participant without a name is closed with the manager of its client (``RemoteTransaction.join``), and does not
        outlive its process (``Transaction.join``): then it is told without end.
        """
        known = self.known.get(kept.id)
        if known is None:
            return True
        if known.is_lost:
            return False
        return not known.is_gone() or any(not each.startswith(_UNNAMED) for each in kept.waiting_for)

    def _problems(self) -> list[str]:
        """Return what is not as it has to be at rest."""
        found: list[str] = []
        for known in self.known.values():
            outcome = self._outcome(known)
            missing = [text for text in known.texts if text not in self.texts]
            if outcome == "committed" and missing:
                found.append(f"{known.id} is committed, and {missing[0]} is lost")
            if outcome == "aborted" and len(missing) < len(known.texts):
                found.append(f"{known.id} is aborted, and some of its events arrived")
        for account in self._accounts():
            for each in account.in_doubt:
                if not self.known[each].is_lost:
                    found.append(f"{account.name} knows no outcome of {each}")
            for each, calls in account.calls.items():
                wrong = {"committed": "abort", "aborted": "commit"}.get(self._outcome(self.known[each]), "")
                if wrong in calls:
                    found.append(
                        f"{account.name} was told {wrong} of {each}, which is {self._outcome(self.known[each])}"
                    )
        found += [
            f"the manager keeps {each.id}, which waits for {each.waiting_for}"
            for each in self.manager.manager.transactions()
            if self._awaited(each)
        ]
        found += [
            f"{each.name} keeps a transaction" for each in self.generators if each.generator.participant.is_active
        ]
        for generator in self.generators:
            for kind in KINDS:
                key = (generator.name, kind)
                seen = self.arrived.get(key, {})
                found += [
                    f"{text}, number {number} of {key}, is lost"
                    for number, text in self.ledger.confirmed_after(key, generator.after[kind])
                    if number not in seen
                ]
        return found

    def judge(self) -> None:
        """See ``Simulation``."""
        if not self._is_proven():
            self.broken("a generator or a client does not go on after the faults of the disk")
        for what in self._problems()[:5]:
            self.broken(what)

    # --- plans

    @classmethod
    def make_plan(cls, random: random.Random, protocol: str) -> Plan:
        """See ``Simulation``."""
        generators, clients = random.choice((1, 2, 2)), random.choice((1, 1, 2))
        names = [f"generator-{number + 1}" for number in range(generators)]
        is_durable, is_kept = random.random() < 0.85, random.random() < 0.85
        is_quiet = random.random() < 0.2
        steps: list[Step] = []
        for name in names:
            for _ in range(random.randint(3, 12)):
                chosen = random.random()
                if chosen < 0.4:
                    arguments = {"kind": random.choice(KINDS), "count": random.choice((1, 2, 10)), "size": 0}
                    steps.append(Step(name, "generate", arguments))
                elif chosen < 0.5 and is_durable and not is_quiet:
                    steps.append(Step(name, "reopen", {"server_first": random.random() < 0.5}))
                else:
                    steps.append(Step(name, "pause", {"seconds": span(random, 1e-3, 10.0)}))
        makers = [f"client-{number + 1}" for number in range(clients)]
        for name in [*makers, "manager"]:
            for _ in range(random.randint(4, 12) if name != "manager" else random.randint(0, 5)):
                steps.append(cls._client_step(random, name, names, is_kept=is_kept, is_quiet=is_quiet))
        mortal = [*makers, *(names if is_durable else []), *(["manager"] if is_kept else [])]
        settings: dict[str, Any] = {"reconnect_max": random.choice((1.0, 5.0, 30.0))}
        if protocol.startswith("mqtt"):
            settings["keepalive"] = random.choice((2, 10, 60))
        elif protocol == "amqp":
            settings["heartbeat"] = random.choice((2, 10, 60))
        retries = ({"first_delay": 0.05, "max_delay": 0.5}, {"first_delay": 0.1, "max_delay": 30.0})
        options = {
            **scheduling(random),
            "generators": generators, "clients": clients, "is_durable": is_durable,
            "retry": random.choice((None, *retries)),
            "manager": {
                "is_durable": is_kept, "retry": random.choice(retries), "time_limit": random.choice((2.0, 10.0)),
            },
            "timeout": random.choice((5.0, 15.0, 30.0)),
            "settings": settings,
        }  # fmt: skip
        faults = make_faults(random, protocol, ["manager", *names, *makers], mortal)
        for name in makers:
            for _ in range(random.randint(1, 3)):
                steps.append(cls._client_step(random, name, names, is_kept=is_kept, is_quiet=is_quiet))
        for name in names:
            for _ in range(random.randint(1, 3)):
                steps.append(Step(name, "generate", {"kind": random.choice(KINDS), "count": 1, "size": 0}))
        # behind the others, so that kept cases can leave them out
        faults += make_power_losses(random, protocol, mortal)
        faults += make_disk_faults(random)
        return Plan(options, tuple(steps), tuple(faults))

    @staticmethod
    def _client_step(random: random.Random, name: str, names: list[str], *, is_kept: bool, is_quiet: bool) -> Step:
        chosen = random.random()
        if chosen < 0.65:
            orders = [
                [each, random.choice(KINDS), random.choice((0, 1, 1, 2, 20))]
                for each in names
                for _ in range(random.choice((0, 1, 1, 2)))
            ]
            votes = ("prepared",) * 6 + ("not changed", "aborted", "fails", "slow")
            accounts = [
                [account, random.choice(votes)] for account in ("one", "two", "unnamed") if random.random() < 0.4
            ]
            return Step(name, "transact", {
                "orders": orders, "accounts": accounts,
                "duration": random.choice((60.0, 100.0, 100.0, span(random, 0.5, 30.0))),
                "ending": random.choice(("commit", "commit", "commit", "commit", "abort", "leave")),
                "pause": random.choice((0.0, 0.0, span(random, 1e-3, 5.0))),
                "timeout": random.choice((None, None, 0.0, 5.0)),
                "is_beside": random.random() < 0.3,
            })  # fmt: skip
        if not is_quiet and chosen < 0.7:
            return Step(name, "fail", {"count": random.choice((1, 2, 8))})
        if not is_quiet and chosen < 0.78 and (name != "manager" or is_kept):
            return Step(name, "reopen", {"server_first": random.random() < 0.5} if name == "manager" else {})
        return Step(name, "pause", {"seconds": span(random, 1e-3, 10.0)})
