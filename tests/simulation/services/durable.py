"""Durable messages: publishers with an outbox on the disk, and a consumer that knows what it has handled before.

What is promised, and checked (``docs/durability.md``, ``docs/guarantees.md``):

- each message that is stored is handled, becomes a dead letter of its consumer or of the outbox, or expires; so it is
  after a kill, and after a loss of power as ``outbox_fsync`` says;
- a message that was not accepted never arrives;
- the first deliveries of a thread come in its order, also after a restart of the publisher;
- the promises of each message have outcomes in time;
- no message is handled twice, but for those whose consumer has died: at most ``prefetch`` of them for each death, or
  those whose ids are beyond ``inbox_size`` or the window;
- when everything has come to rest, outboxes are empty.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from tests.simulation.fault_plans import CHANNEL_FAULTS, HALF_LOSSES, draw_faults
from tests.simulation.plans import Fault, Plan, Step
from tests.simulation.services.durable_ledger import FOREVER, Ledger
from tests.simulation.services.durable_roles import DurableConsumer, DurablePublisher
from tests.simulation.services.messages import DEAD, open_outcomes
from tests.simulation.simulation import Keeper, Role, Simulation, scheduling, span

if TYPE_CHECKING:
    import random

    from messaging import MessagingError
    from tests.simulation.services.durable_ledger import Handled, Sent

#: faults of the disk, after which calls may fail
DISK_FAULTS: Final = frozenset({"full_disk", "failing_sync", "failing_write"})
#: how long a dead letter may wait when a disk has room again, seconds: "trying again each 1 s", and threads are held up
_TRY_AGAIN: Final = 3.0


class Durable(Simulation):
    """Publishers with an outbox, and a consumer with an inbox."""

    name = "durable"

    def begin(self) -> None:
        """See ``Simulation``."""
        options, faults = self.plan.options, self.plan.faults
        self.ledger = Ledger(self.broken)
        names = {fault.name for fault in faults}
        self.has_disk_faults = bool(names & DISK_FAULTS)
        self.may_be_damaged = self.has_disk_faults or any(
            fault.name == "kill" and fault.arguments["vanishes"] for fault in faults
        )
        self.has_clock_faults = "wall_clock" in names
        #: until when the disk may be full
        self.full_until = 0.0
        if self.protocol == "memory":
            self.roles.append(Keeper(self, "keeper"))
        self.roles.append(DurableConsumer(self, "consumer-1"))
        self.publishers = [DurablePublisher(self, f"publisher-{each + 1}") for each in range(options["publishers"])]
        self.roles += self.publishers

    def is_at_rest(self) -> bool:
        """See ``Simulation``."""
        ledger, now = self.ledger, self.world.scheduler.now
        if any(each.waiting != 0 for each in self.publishers):
            return False
        for message, sent in ledger.sent.items():
            if sent.outcome == "sent" or (ledger.must_be_there(message, now) and not ledger.is_there(message)):
                return False
        return True

    def judge(self) -> None:
        """See ``Simulation``."""
        ledger, options, now = self.ledger, self.plan.options, self.world.scheduler.now
        for publisher in self.publishers:
            if publisher.waiting != 0:
                self.broken(f"the outbox of {publisher.name} still holds {publisher.waiting} messages")
        for message, sent in ledger.sent.items():
            if sent.outcome == "sent":
                self.broken(f"the promise of {message} has no outcome")
            if ledger.must_be_there(message, now) and not ledger.is_there(message) and not self._may_be_lost(sent):
                self.broken(f"{message} is lost: {sent}")
        if options["concurrency"] == 1 and not options["may_reorder"]:
            ledger.check_order()

    def _may_be_lost(self, sent: Sent) -> bool:
        """Return whether a stored message may be gone."""
        options = self.plan.options["publisher"]
        if sent.lasts < FOREVER and self.has_clock_faults:
            return True  # its age in the outbox of another life comes from the wall clock
        is_known = sent.outcome == "confirmed"
        # "drop_oldest: the oldest messages are dropped, counted and logged": by whom is known to its promise alone
        return options["outbox_full"] == "drop_oldest" and self.may_be_full and not is_known

    @property
    def may_be_full(self) -> bool:
        """Return whether an outbox may have had no room."""
        return self.has_disk_faults or "outbox_disk_bytes" in self.plan.options["publisher"]

    # --- what the roles see

    def unexpected(self, role: Role, what: str, error: MessagingError) -> None:
        """Note an error that a fault of the disk explains; report any other."""
        role.note(f"{what}: {type(error).__name__}: {error}"[:300])
        if not self.has_disk_faults:
            self.broken(f"{role.name}: {what} failed without a fault of the disk: {type(error).__name__}: {error}")

    def arrived(self, message: str) -> None:
        """Check a message that arrives."""
        self.ledger.check_arrival(message)

    def ended(self, publisher: DurablePublisher) -> None:
        """Note that the instance of a publisher has ended."""
        if self.world.scheduler.now < self.full_until:
            self.ledger.ended_on_full_disk(publisher.name)

    def check_outcome(self, message: str, sent: Sent, error: BaseException | None) -> None:
        """Check an outcome."""
        name = sent.outcome
        if error is None:
            if sent.kind == "nowhere":
                self.broken(f"{message} goes nowhere, and was confirmed")
            return
        if name == "ClosedError" or name in open_outcomes(self.plan):
            return
        if name == "DeadlineError" and sent.lasts < FOREVER:
            if self.world.scheduler.now < sent.at + sent.lasts - 0.001:
                self.broken(f"{message} has expired before its time: {error}")
        elif name == "OutboxFullError":
            bounds = self.plan.options["publisher"]
            if not self.may_be_full and "outbox_size" not in bounds and "slow_sync" not in self.world.faults:
                self.broken(f"{message} has no room, and nothing is full: {error}")
        elif name == "PayloadTooLargeError":
            pass
        elif not (name == "UnroutableError" and sent.kind == "nowhere"):
            self.broken(f"{message} failed with {name}: {error}")

    def check_repeated(self, role: DurableConsumer, message: str, before: Handled) -> None:
        """Check whether a message may be handled again."""
        options, ledger, now = self.plan.options, self.ledger, self.world.scheduler.now
        window = options["subscribe"]["deduplicate"]
        if window is not True and now - before.at >= window:
            return
        if len({*ledger.settlements[before.place :]}) >= options["most_ids"]:
            return
        if not options["has_inbox_path"] and (before.life != role.lives or options["may_forget"]):
            return  # "without it they are kept in memory, until the stream is closed"
        if message in role.held:
            return  # "the messages that a consumer with manual acknowledgement still holds" are released
        if self.has_disk_faults and before.at <= role.since:
            # "their ids are stored when there is room again, and may not outlive their stream before that"
            return
        if before.life == role.lives:
            self.broken(f"{message} was handled again in the same process")
            return
        if self.has_clock_faults and window is not True:
            return  # "a wall clock that is ahead at a start cannot be told from time that has passed"
        ledger.again[role.lives] = ledger.again.get(role.lives, 0) + 1
        if ledger.again[role.lives] > options["prefetch"]:
            self.broken(f"more than {options['prefetch']} messages were handled again after one death: {message}")

    # --- faults

    def fault_full_disk(self, seconds: float, left: int = 0) -> None:
        """Fault: as everywhere."""
        self.full_until = max(self.full_until, self.world.scheduler.now + seconds + _TRY_AGAIN)
        super().fault_full_disk(seconds, left)

    def fault_kill(self, role: str, seconds: float, vanishes: bool) -> None:
        """Fault: as everywhere."""
        for each in self.publishers:
            if each.name == role and each.process.is_alive:
                fsync = self.plan.options["publisher"].get("outbox_fsync", "always")
                self.ledger.died(
                    role, self.world.scheduler.now, vanishes=vanishes, fsync=fsync, is_failing=self.has_disk_faults
                )
                self.ended(each)
        super().fault_kill(role, seconds, vanishes)

    # --- plans

    @classmethod
    def make_plan(cls, random: random.Random, protocol: str) -> Plan:
        """See ``Simulation``."""
        is_amqp, is_mqtt = protocol == "amqp", protocol.startswith("mqtt")
        publishers = random.choice((1, 1, 2))
        way = random.choice(("on", "coroutine", "iterator", "manual"))
        publisher: dict[str, Any] = {
            "timeout": random.choice((5.0, 20.0, 60.0, 600.0)),
            "reconnect_max": random.choice((1.0, 5.0, 30.0)),
            "outbox_fsync": random.choice(("always", "always", "always", "always", "interval", "never")),
            "outbox_full": random.choice(("block", "block", "drop_oldest", "reject")),
            "close_timeout": random.choice((0.1, 1.0, 5.0)),
        }
        if random.random() < 0.25:
            publisher["outbox_disk_bytes"] = 65_536
        if random.random() < 0.4:
            publisher["outbox_size"] = random.choice((1, 3, 20))
        consumer: dict[str, Any] = {"reconnect_max": random.choice((1.0, 5.0, 30.0))}
        most_ids = random.choice((5, 40, 100_000))
        if most_ids < 100_000:
            consumer["inbox_size"] = most_ids
        concurrency = random.choice((1, 1, 3)) if way in ("on", "coroutine") else 1
        prefetch = random.choice((max(1, concurrency), 5, 20))
        subscribe: dict[str, Any] = {
            "qos": random.choice((1, 2)) if is_mqtt else 1,
            "keep_subscription": True,
            "deduplicate": random.choice((True, True, True, 5.0, 600.0)),
            "prefetch": prefetch,
        }
        publish: dict[str, Any] = {"qos": random.choice((1, 2))} if is_mqtt else {}
        if is_mqtt:
            consumer["clean_start"] = False
            if protocol == "mqtt5":
                consumer["session_expiry"] = 86_400
            for settings in (publisher, consumer):
                settings["keepalive"] = random.choice((2, 10, 60))
                if protocol == "mqtt311":
                    settings["envelope"] = True  # it carries the ids
        else:
            subscribe["queue"] = "orders"
            if is_amqp:
                if random.random() < 0.3:
                    subscribe["queue_type"] = "quorum"
                for settings in (publisher, consumer):
                    settings["heartbeat"] = random.choice((2, 10, 60))
                if random.random() < 0.3:
                    publisher["publish_window"] = random.choice((1, 2, 7))
        may_fail = way != "iterator" and random.random() < 0.4
        if may_fail and random.random() < 0.6:
            subscribe |= {"dead_letter_channel": DEAD, "max_deliveries": random.choice((1, 2, 3))}
        steps: list[Step] = []
        for number in range(publishers):
            steps += cls._publisher_steps(random, f"publisher-{number + 1}", protocol, publisher["timeout"])
        steps += cls._consumer_steps(random, "consumer-1", may_fail=may_fail)
        roles = sorted({step.role for step in steps})
        faults = [*draw_faults(random, protocol, roles, until=20.0), *cls._disk_faults(random, protocol, roles)]
        faults.sort(key=lambda fault: fault.at)
        done = {step.name for step in steps if step.role == "consumer-1"}
        options = {
            **scheduling(random),
            "publishers": publishers,
            "way": way,
            "concurrency": concurrency,
            "publisher": publisher,
            "consumer": consumer,
            "publish": publish,
            "subscribe": subscribe,
            "prefetch": prefetch,
            "most_ids": max(most_ids, prefetch),
            "has_inbox_path": random.random() < 0.8,
            # "on MQTT and AMQP each confirmed message travels with an id", "in MQTT 3.1.1 only if it has an envelope"
            "has_own_ids": protocol in ("memory", "mqtt311") or random.random() < 0.3,
            "has_letter_outbox": random.random() < 0.5,
            "may_forget": bool({"reopen_stream", "reopen"} & done) or cls._ends_streams(faults),
            "may_reorder": cls._may_reorder(faults, done, is_amqp=is_amqp),
        }
        return Plan(options, tuple(steps), tuple(faults))

    @staticmethod
    def _ends_streams(faults: list[Fault]) -> bool:
        """Return whether the broker may end a stream, so that another one follows."""
        return any(fault.name == "broker" and set(CHANNEL_FAULTS) & set(fault.arguments) for fault in faults)

    @staticmethod
    def _may_reorder(faults: list[Fault], done: set[str], *, is_amqp: bool) -> bool:
        """Return whether first deliveries may come out of order, which the death of a publisher does not cause."""
        if {"fail", "reopen_stream", "reopen"} & done:
            return True
        return any(
            fault.name in ("broker", "restart_broker")
            or (fault.name == "kill" and fault.arguments["role"] == "consumer-1")
            or (is_amqp and fault.name in HALF_LOSSES and fault.arguments["role"] in (None, "consumer-1"))
            for fault in faults
        )

    @staticmethod
    def _publisher_steps(random: random.Random, name: str, protocol: str, timeout: float) -> list[Step]:
        kinds = ["plain"] * 5 + ["forward"] * 3
        if protocol != "mqtt311":  # nothing tells there that nobody receives a message
            kinds.append("nowhere")
        steps = []
        for _ in range(random.randint(12, 30)):
            chosen = random.random()
            if chosen < 0.55:
                arguments = {
                    "count": random.choice((1, 1, 2, 5, 20)),
                    "size": random.choice((0, 0, 40, 400, 5000)),
                    "kind": random.choice(kinds),
                    "lasts": span(random, 0.1, 3000.0) if random.random() < 0.2 else FOREVER,
                    "timeout": span(random, 0.01, 10.0) if random.random() < 0.2 else timeout,
                }
                steps.append(Step(name, "publish", arguments))
            elif chosen < 0.6:
                arguments = {"threads": random.choice((2, 3)), "count": random.choice((1, 5, 20)),
                             "size": random.choice((0, 400))}  # fmt: skip
                steps.append(Step(name, "branch", arguments))
            elif chosen < 0.8:
                steps.append(Step(name, "pause", {"seconds": span(random, 1e-4, 3.0)}))
            elif chosen < 0.92:
                steps.append(Step(name, "wait", {"what": random.choice(("stored", "outcome"))}))
            else:
                steps.append(Step(name, "reopen", {"limit": random.choice((None, None, 1000))}))
        return steps

    @staticmethod
    def _consumer_steps(random: random.Random, name: str, *, may_fail: bool) -> list[Step]:
        steps = []
        is_reopened = random.random() < 0.5
        for _ in range(random.randint(12, 20)):
            chosen = random.random()
            if chosen < 0.6:
                steps.append(Step(name, "pause", {"seconds": span(random, 1e-4, 3.0)}))
            elif chosen < 0.7:
                steps.append(Step(name, "slow", {"seconds": random.choice((0.0, span(random, 1e-4, 0.2)))}))
            elif chosen < 0.85:
                if may_fail:
                    steps.append(Step(name, "fail", {"count": random.choice((1, 1, 2, 5))}))
            elif is_reopened:
                steps.append(Step(name, "reopen_stream" if chosen < 0.93 else "reopen", {}))
        return steps

    @staticmethod
    def _disk_faults(random: random.Random, protocol: str, roles: list[str]) -> list[Fault]:
        if random.random() < 0.3:
            return []
        makers: list[Any] = [
            lambda: ("full_disk", {"seconds": span(random, 0.05, 30.0), "left": random.choice((0, 100, 1000, 10_000))}),
            lambda: ("failing_sync", {"count": random.choice((1, 1, 3))}),
            lambda: ("failing_write", {"count": random.choice((1, 1, 3))}),
            lambda: ("slow_sync", {"seconds": span(random, 0.1, 10.0), "longest": span(random, 0.01, 2.0)}),
        ]
        if random.random() < 0.5 and protocol != "memory":
            makers = [makers[-1]]  # what holds after a death without a fault of the disk is more
        if protocol != "memory":
            makers += [
                lambda: ("kill", {"role": random.choice(roles), "seconds": span(random, 0.01, 10.0),
                                  "vanishes": random.random() < 0.5}),
            ] * 5  # fmt: skip
        faults = []
        for _ in range(random.choice((1, 1, 2, 3))):
            name, arguments = random.choice(makers)()
            faults.append(Fault(span(random, 1e-3, 20.0), name, arguments))
        return faults
