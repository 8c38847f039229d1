"""Mailboxes: generators store events at a mailbox for owners that come and go.

What is promised, and checked (``docs/remote-events.md``, EV.3.3):

- each event that a generator has on its disk is taken by, or pushed to, each owner whose registration and interest
  live, unless the owner wanted only the latest ones, or a bounded number;
- no event arrives that was not generated; its number, kind and handback are right;
- the events of a kind come in their order, however the owner takes them, and twice only after a failure;
- a registration ends only by its lease or its owner: never because a party was closed, killed, or could not be reached;
- nothing is pushed long after delivery was disabled, or after the registration was cancelled;
- a lease that the mailbox renews is renewed, or the owner finds a notice in its box;
- what was dropped or suppressed is counted;
- what a disk that is full or fails does not take is refused, by an error that says so; everything goes on after that;
- each call has an outcome when its deadline has passed.
"""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING, Any, Final

from messaging.errors import UnknownLeaseError
from messaging.execution import clock
from messaging.leases import LeaseRenewalManager
from messaging.remoteevent import (
    EventMailbox,
    ListenerReference,
    ListenerServer,
    MailboxServer,
    RemoteMailbox,
    RetryPolicy,
)
from tests.simulation.fault_plans import watch_channels
from tests.simulation.plans import Plan, Step
from tests.simulation.services.parties import (
    KINDS,
    Generator,
    Ledger,
    generator_steps,
    is_calm,
    is_proven,
    make_disk_faults,
    make_faults,
    make_power_losses,
)
from tests.simulation.services.takers import MAILBOX, Box, Interest, Taker
from tests.simulation.simulation import Keeper, Simulation, scheduling, span

if TYPE_CHECKING:
    import random

#: how many targets an owner in the process of the mailbox has
_TARGETS: Final = 3
#: how long an owner that drops events takes them at rest, virtual seconds
_SETTLING: Final = 60.0


class Owner(Taker):
    """An owner in a process of its own."""

    def open(self) -> None:
        """Connect, and register at the first step."""
        self.begin_life()
        self._open()

    def _open(self) -> None:
        self.m = self.connect()
        self.mailbox = RemoteMailbox(self.m, MAILBOX, timeout=self.simulation.timeout)
        self.server: ListenerServer | None = None
        #: how many there were in this life
        self.listeners = 0
        if self.own["target"] == "named":
            self.insist("serve a listener", self._serve)
        if self.own["renewal"] == "manager":
            self.manager = LeaseRenewalManager()
        self.ensure()

    def _serve(self) -> None:
        self.server = ListenerServer(self.m, f"owners/{self.name}")
        self._add_listener(self.server)

    def _add_listener(self, server: ListenerServer) -> None:
        self.listeners += 1
        server.add(self.listener(self.listeners), "owner")

    def do_remove_listener(self, seconds: float, waits: float = 0.0) -> None:
        """Step: remove the listener, and add another one with its name later; ``waits`` is that of ``do_enable``."""
        server = self.server
        if server is None:
            return
        self.await_event(waits)
        self.is_enabled = False  # its senders are told that it is gone
        server.remove(ListenerReference(server.channel, "owner"))
        self.silent[self.listeners] = self.world.scheduler.now
        clock.pause(seconds)
        self._add_listener(server)

    def register(self) -> Any:
        """See ``Taker``."""
        own = self.own
        return self.mailbox.register(own["duration"], keep=own["keep"], max_events=own["max_events"], full=own["full"])

    def find(self, box: Box) -> Any:
        """See ``Taker``."""
        return self.mailbox.registration(box.id, max(1e-3, box.expires - self.world.scheduler.now))

    def target(self) -> Any:
        """See ``Taker``."""
        if self.server is not None:
            return ListenerReference(self.server.channel, "owner")
        return self.notified_soon if self.own["is_coroutine"] else self.notified

    def renew_interest(self, interest: Interest) -> Any:
        """See ``Taker``."""
        assert interest.lease is not None
        return self.registration.renew_lease(interest.lease)

    def do_reopen(self) -> None:
        """Step: close everything, and open it again."""
        self.close()
        manager = self.lease
        box = self.box
        if box is not None and manager is not None:
            box.expires = self.world.scheduler.now + manager.remaining
        self.begin_life()
        self._open()

    def close(self) -> None:
        """Close everything."""
        self.close_taker()
        if self.server is not None:
            self.stop_serving(self.server)
        self.mailbox.close()
        self.disconnect()


class Mailbox(Taker):
    """The mailbox and its server, with an owner in the same process if the plan says so."""

    #: number of the target that was enabled last
    enabled = 0
    #: closing has raised that the last state is not stored
    has_lost_state = False

    def open(self) -> None:
        """Connect, and open the mailbox."""
        self.begin_life()
        self._open()

    def _open(self) -> None:
        options = self.simulation.plan.options
        self.m = self.connect()
        retry = None if options["mailbox_retry"] is None else RetryPolicy(**options["mailbox_retry"])
        is_owner = self.name in options["owners"]
        self.targets = {str(number): self.listener(number) for number in range(_TARGETS)} if is_owner else {}
        self.mailbox = self.insist_on(
            "open the mailbox",
            lambda: EventMailbox(
                self.world.disk.folder / "mailbox",
                messaging=self.m,
                listeners=self.targets,
                max_duration=inf,
                retry=retry,
                max_open_boxes=options["max_open_boxes"],
            ),
        )
        self.insist("serve", self._serve)

    def _serve(self) -> None:
        self.server = MailboxServer(self.m, MAILBOX, self.mailbox)

    def register(self) -> Any:
        """See ``Taker``."""
        own = self.own
        return self.mailbox.register(own["duration"], keep=own["keep"], max_events=own["max_events"], full=own["full"])

    def find(self, box: Box) -> Any:
        """See ``Taker``."""
        return self.mailbox.registration(box.id)

    def target(self) -> Any:
        """See ``Taker``: each time another one."""
        self.enabled = (self.enabled + 1) % _TARGETS
        return self.targets[str(self.enabled)]

    def do_enable(self, waits: float = 0.0) -> None:
        """See ``Taker``."""
        self.await_event(waits)
        self.silent.clear()
        super().do_enable()
        if self.is_enabled:
            now = self.world.scheduler.now
            self.silent = {number: now for number in range(_TARGETS) if number != self.enabled}

    def silence(self) -> None:
        """See ``Taker``."""
        self.silent = dict.fromkeys(range(_TARGETS), self.world.scheduler.now)

    def renew_interest(self, interest: Interest) -> Any:
        """See ``Taker``."""
        assert interest.lease is not None
        self.mailbox.renew_lease(self.registration, interest.lease)

    def ensure(self) -> bool:
        """See ``Taker``: only if the plan has an owner here."""
        if self.name not in self.simulation.plan.options["owners"]:
            return False
        try:
            return super().ensure()
        except UnknownLeaseError as error:
            self._ended(error, "find")
            return False

    def _ensure_box(self) -> None:
        try:
            super()._ensure_box()
        except UnknownLeaseError as error:
            self._ended(error, "find")
            super()._ensure_box()

    def do_reopen(self, server_first: bool, gap: float = 0.0) -> None:
        """Step: close the mailbox and its server, in one order or the other, and open them again.

        Args:
            server_first: the server is closed first.
            gap: how long it still answers for a mailbox that was closed first, virtual seconds.
        """
        self.simulation.mailbox_ends += 1
        self._close(server_first=server_first, gap=gap)
        self.begin_life()
        self._open()

    def do_reopen_server(self) -> None:
        """Step: close the server alone, and open it again."""
        self.stop_serving(self.server)
        self.insist("serve", self._serve)

    def _close(self, *, server_first: bool, gap: float = 0.0) -> None:
        self.close_taker()
        if server_first:
            self.stop_serving(self.server)
        self.is_closing = True
        if not self.attempt("close the mailbox", self.mailbox.close):
            self.has_lost_state = True
        if not server_first:
            clock.pause(gap)
            self.stop_serving(self.server)
        self.disconnect()

    def close(self) -> None:
        """Close everything."""
        self._close(server_first=True)


class Mailboxes(Simulation):
    """Generators, a mailbox, and owners."""

    name = "mailbox"

    def begin(self) -> None:
        """See ``Simulation``."""
        options = self.plan.options
        self.ledger = Ledger()
        self.timeout: float = options["timeout"]
        self.breaks = watch_channels(self)
        self.mailbox_ends = 0
        self.is_resting = False
        self.wants_pulling = not options["is_pushed_at_rest"]
        self.resting_since = inf
        if self.protocol == "memory":
            self.roles.append(Keeper(self, "keeper"))
        self.mailbox = Mailbox(self, "mailbox")
        self.roles.append(self.mailbox)
        self.generators = [Generator(self, f"generator-{number + 1}") for number in range(options["generators"])]
        self.roles += self.generators
        self.takers: list[Taker] = [Owner(self, name) for name in options["owners"] if name != "mailbox"]
        self.roles += self.takers
        if "mailbox" in options["owners"]:
            self.takers.append(self.mailbox)

    def may_lose_renewals(self, expires: float) -> bool:
        """Return whether a registration may end before its owner thinks so: a renewal of it was not stored.

        "If the process is killed before that, or `close()` cannot store it either, the next run has the older end"
        (``docs/remote-events.md``).
        """
        return expires < inf and (self.mailbox.lives > 1 or self.mailbox.has_lost_state)

    # --- judging

    def is_at_rest(self) -> bool:
        """See ``Simulation``."""
        now = self.world.scheduler.now
        self.resting_since = min(self.resting_since, now)
        if not is_proven(self, self.generators):
            return False
        settling: float = self.plan.options["settling"]
        if now < self.resting_since + settling or not self.ledger.is_settled():
            return False
        return not any(self._missing(taker) for taker in self.takers)

    def _missing(self, taker: Taker) -> list[str]:
        """Return what has to reach an owner, and has not."""
        box = taker.box if taker.boxes else None
        if not taker.own["interests"]:
            return []
        if box is None:
            return [f"{taker.name} has no registration"]
        found: list[str] = []
        for interest in box.interests:
            if interest.is_over:
                continue
            is_alive = self._is_alive(interest)
            if not is_alive and interest.is_forever:
                found.append(f"{box.name}: the interest {interest.lease_id} in {interest.kind} has ended")
            elif not is_alive and interest.is_renewed:
                found.append(f"{box.name}: no notice that the lease {interest.lease_id} was not renewed")
            if is_alive and taker.own["full"] == "refuse":
                found += self._missing_of(box, interest)
        return found

    def _is_alive(self, interest: Interest) -> bool:
        generator = next(each for each in self.generators if each.name == interest.kind[0])
        return generator.landlord.lease(interest.lease_id) is not None

    def _missing_of(self, box: Box, interest: Interest) -> list[str]:
        expected = self.ledger.confirmed_after(interest.kind, interest.after, box.lost_before)
        seen = box.seen.get(interest.kind, {})
        if box.keep != "all":  # an event behind the last one may be on the disk of a generator that was killed
            expected = [each for each in expected[-1:] if each[0] > max(seen, default=0)]
        return [f"{box.name}: {text}, number {number}, is lost" for number, text in expected if number not in seen]

    def judge(self) -> None:
        """See ``Simulation``."""
        if not self.ledger.is_settled():
            self.broken("an event has no outcome")
        if not is_proven(self, self.generators):
            self.broken("a generator does not go on after the faults of the disk")
        is_sure = self.plan.options["is_durable"] or not self.plan.faults
        for taker in self.takers:
            for what in self._missing(taker):
                if is_sure or "lost" not in what:
                    self.broken(what)
                    break
            for box in taker.boxes:
                self._judge_counts(taker, box)

    def _judge_counts(self, taker: Taker, box: Box) -> None:
        if not is_calm(self) or box.keep != "latest_and_count" or box.has_ended or taker.own["full"] != "refuse":
            return
        for kind, seen in box.seen.items():
            after = min((each.after for each in box.interests if each.kind == kind), default=0)
            count = max(seen) - after
            if len(seen) + box.suppressed[kind] < count:
                self.broken(
                    f"{box.name}: of {kind}, {len(seen)} arrived and {box.suppressed[kind]} were suppressed of {count}"
                )

    # --- plans

    @classmethod
    def make_plan(cls, random: random.Random, protocol: str) -> Plan:
        """See ``Simulation``."""
        generators = random.choice((1, 1, 2))
        is_durable = random.random() < 0.85
        has_expiry = random.random() < 0.4
        owners: dict[str, dict[str, Any]] = {}
        names = [f"owner-{number + 1}" for number in range(random.choice((1, 1, 2)))]
        if random.random() < 0.25:
            names.append("mailbox")
        for name in names:
            interests = [
                [f"generator-{number + 1}", kind]
                for number in range(generators)
                for kind in KINDS
                if random.random() < 0.7
            ] or [["generator-1", "a"]]
            keep = random.choice(("all", "all", "all", "latest", "latest_and_count"))
            full = random.choice(("refuse", "refuse", "refuse", "drop_oldest", "drop_newest"))
            renewal = random.choice(("manager", "owner")) if has_expiry and name != "mailbox" else "none"
            owners[name] = {
                "interests": interests, "keep": keep, "full": full,
                "max_events": random.choice((None, None, 5, 50) if keep == "all" else (None, None, 2)),
                "renewal": renewal,
                "duration": inf if renewal == "none" else random.choice((30.0, 60.0, 200.0)),
                "interest": random.choice((30.0, 60.0, 120.0)) if has_expiry else inf,
                "target": random.choice(("named", "generated")),
                "is_coroutine": random.random() < 0.2,
            }  # fmt: skip
            if full != "refuse" and owners[name]["max_events"] is None:
                owners[name]["max_events"] = 10
            if owners[name]["max_events"] == 2 and full == "refuse":
                owners[name]["max_events"] = 4  # a kind that has no room is refused, until the owner takes the others
        steps: list[Step] = []
        extra = [("wait", 0.05)]
        if is_durable:
            extra += [("reopen", 0.04), ("reopen_server", 0.02)]
        is_quiet = random.random() < 0.2
        for number in range(generators):
            steps += generator_steps(random, f"generator-{number + 1}", extra[:1] if is_quiet else extra, 8, 25)
        for name in names:
            steps += cls._owner_steps(random, name, owners[name], is_quiet=is_quiet)
        if not is_quiet:
            for _ in range(random.randint(1, 6)):
                kind = random.choice(("pause", "pause", "reopen", "reopen_server"))
                arguments: dict[str, Any] = {}
                if kind == "pause":
                    arguments = {"seconds": span(random, 0.01, 20.0)}
                elif kind == "reopen":
                    arguments = {"server_first": random.random() < 0.5}
                    if not arguments["server_first"]:
                        arguments["gap"] = random.choice((0.0, span(random, 1e-3, 5.0)))
                at = random.randint(0, len(steps))
                steps.insert(at, Step("mailbox", kind, arguments))
        roles = [
            "mailbox",
            *[f"generator-{number + 1}" for number in range(generators)],
            *[each for each in names if each != "mailbox"],
        ]
        mortal = [each for each in roles if is_durable or not each.startswith("generator")]
        retries = (None, {"first_delay": 0.05, "max_delay": 0.5}, {"first_delay": 0.1, "max_delay": 5.0})
        settings: dict[str, Any] = {"reconnect_max": random.choice((1.0, 5.0, 30.0))}
        if protocol.startswith("mqtt"):
            settings["keepalive"] = random.choice((2, 10, 60))
        elif protocol == "amqp":
            settings["heartbeat"] = random.choice((2, 10, 60))
        options = {
            **scheduling(random),
            "generators": generators, "is_durable": is_durable, "owners": owners,
            "retry": random.choice(retries), "mailbox_retry": random.choice(retries),
            "max_open_boxes": random.choice((None, None, 1)),
            "timeout": random.choice((3.0, 10.0, 30.0)),
            "is_pushed_at_rest": random.random() < 0.5,
            "settings": settings,
            "settling": _SETTLING if has_expiry or any(each["full"] != "refuse" for each in owners.values()) else 0.0,
        }  # fmt: skip
        faults = make_faults(random, protocol, roles, mortal)
        faults += make_power_losses(random, protocol, mortal)
        faults += make_disk_faults(random)
        return Plan(options, tuple(steps), tuple(sorted(faults, key=lambda fault: fault.at)))

    @classmethod
    def _owner_steps(cls, random: random.Random, name: str, own: dict[str, Any], *, is_quiet: bool) -> list[Step]:
        steps: list[Step] = []
        ways, timeouts, counts = ("next", "next", "batch", "soon"), (0.0, 0.0, 0.5, 5.0, 20.0), (1, 3, 20, 300)

        def take() -> tuple[str, dict[str, Any]]:
            way, count, timeout = random.choice(ways), random.choice(counts), random.choice(timeouts)
            return "take", {"way": way, "count": count, "timeout": timeout}

        makers: list[tuple[float, Any]] = [
            (5, lambda: ("pause", {"seconds": span(random, 0.01, 20.0)})),
            (4, take),
            (0.5, lambda: ("take_beside", {"seconds": span(random, 0.1, 20.0)})),
            (2, lambda: ("close_iterator", {})),
            (2, lambda: ("drain", {"most": random.choice((None, None, None, 0, 1, 10))})),
            (3, lambda: ("enable", {})),
            (2, lambda: ("disable", {})),
            (1, lambda: ("slow", {"seconds": random.choice((0.0, span(random, 1e-3, 0.5)))})),
        ]  # fmt: skip
        if not is_quiet:
            makers += [
                (
                    1.0,
                    lambda: (
                        "fail",
                        {"count": random.choice((1, 1, 2, 5)), "failure": random.choice(("later", "gone", "bad"))},
                    ),
                ),
                (0.5, lambda: ("cancel", {})),
                (0.5, lambda: ("cancel_interest", {"number": random.randint(0, 3)})),
            ]
            if name != "mailbox":
                makers.append((1, lambda: ("reopen", {})))
            if name != "mailbox" and own["target"] == "named":
                makers.append((1, lambda: ("remove_listener", {"seconds": span(random, 1e-3, 5.0)})))
        if random.random() < 0.3:
            # a batch takes at most 50 ms: it meets what ends it if it has several events that take their time
            steps.append(Step(name, "slow", {"seconds": span(random, 1e-3, 0.05)}))
            makers.append((5, lambda: ("enable", {"waits": span(random, 0.1, 20.0)})))
            if name != "mailbox" and own["target"] == "named":
                makers.append(
                    (
                        4,
                        lambda: (
                            "remove_listener",
                            {"seconds": span(random, 1e-3, 2.0), "waits": span(random, 0.1, 20.0)},
                        ),
                    )
                )
        if own["renewal"] == "owner":
            makers.append((3, lambda: ("renew", {"seconds": random.choice((30.0, 60.0, 200.0))})))
        for _ in range(random.randint(8, 25)):
            _, make = random.choices(makers, [weight for weight, _ in makers])[0]
            kind, arguments = make()
            steps.append(Step(name, kind, arguments))
        return steps
