"""Leases: holders in other processes ask landlords for leases, renew them, and cancel them or leave them behind.

What is promised, and checked (``docs/leases.md``):

- a lease that a manager renews goes on, or its listener is told, once; in a calm world it goes on; so it is for each of
  several users of the manager;
- a batch tells the error of each lease that failed, and all others are renewed, or cancelled;
- a lease that a landlord does not know has ended;
- a holder never takes a lease for longer than its landlord does, whatever wall clocks say;
- a desired expiration is reported when it is reached, not before;
- a lease that nobody renews expires, and its callback gets the right reason, once;
- each call has an outcome when its deadline has passed.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf
from typing import TYPE_CHECKING, Any, Final

from messaging.dispatch.calls import CallServer, call
from messaging.errors import LeaseMapError, MessagingError, UnknownLeaseError
from messaging.leases import (
    Landlord,
    Lease,
    LeaseEnd,
    LeaseRenewalManager,
    LeaseServer,
    cancel_all,
    lease_from_value,
    lease_time,
    lease_to_value,
    renew_all,
)
from tests.simulation.fault_plans import watch_channels
from tests.simulation.plans import Plan, Step
from tests.simulation.services.parties import Party, is_calm, make_faults
from tests.simulation.simulation import Keeper, Simulation, scheduling, span

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Mapping

    from messaging.leases import GrantedLease, LeaseRenewalEvent

#: channels of an owner
LEASES: Final = "leases/hall/{}"
DESK: Final = "leases/desk/{}"
#: the second user of a lease in a manager
SECOND: Final = "second"
#: a callback and a report may come so much later, virtual seconds: threads are held up for up to 2 s at a point
_LATE: Final = 30.0
#: time that a lease has to last for to be renewed for a second user, seconds
_LASTS: Final = 5.0
#: precision of clocks and timers, seconds
_PRECISION: Final = 0.01


@dataclass(slots=True)
class Use:
    """The renewal of a lease for one user of a manager.

    Attributes:
        desired: when it is to end, virtual seconds.
        is_removed: the manager was told to renew it no more.
        reports: what the listener was told.
    """

    desired: float
    is_removed: bool = False
    reports: list[str] = field(default_factory=list)

    @property
    def is_open(self) -> bool:
        """Whether it goes on."""
        return not self.is_removed and not self.reports


@dataclass(slots=True)
class Tenancy:
    """A lease, as the test knows it.

    Attributes:
        owner: role that has granted it.
        id: of the lease.
        holder: role that asked for it; ``None``: its answer was not received.
        life: of that role.
        lease: as the holder has it.
        uses: for which a manager renews it.
        is_cancelling: its holder has asked for its end.
        is_kept: its end was asked for beside its manager, and failed: the manager goes on.
        ends: reasons that the callback got.
    """

    owner: Owner
    id: str = ""
    holder: Holder | None = None
    life: int = 0
    lease: Lease | None = None
    uses: list[Use] = field(default_factory=list)
    is_cancelling: bool = False
    is_kept: bool = False
    ends: list[LeaseEnd] = field(default_factory=list)

    @property
    def is_held(self) -> bool:
        """Whether the process of its holder goes on."""
        return self.holder is not None and self.holder.life == self.life and self.holder.process.is_alive

    @property
    def is_alive(self) -> bool:
        """Whether its landlord has it."""
        return self.owner.landlord.lease(self.id) is not None


class Owner(Party):
    """Grants leases."""

    simulation: Leasing

    def open(self) -> None:
        """Connect, and grant leases."""
        self.m = self.connect()
        self.landlord = Landlord(f"hall of {self.name}", max_duration=self.simulation.plan.options["max_duration"])
        self.insist("serve", self._serve)

    def _serve(self) -> None:
        self.server = LeaseServer(self.m, LEASES.format(self.name), self.landlord)
        self.desk = CallServer(self.m, DESK.format(self.name), {"grant": self._grant})

    def _grant(self, arguments: Mapping[str, Any], _body: bytes) -> list[Any]:
        tenancy = Tenancy(self)
        lease: GrantedLease = self.landlord.grant(arguments["duration"], lambda end: self._ended(tenancy, end))
        tenancy.id = lease.id
        self.simulation.tenancies[lease.id] = tenancy
        return lease_to_value(lease)

    def _ended(self, tenancy: Tenancy, end: LeaseEnd) -> None:
        self.note(f"{tenancy.id} ends: {end.value}")
        tenancy.ends.append(end)
        broken = self.simulation.broken
        if len(tenancy.ends) > 1:
            broken(f"{tenancy.id} ended twice: {tenancy.ends}")
        if end is LeaseEnd.CANCELLED and not tenancy.is_cancelling:
            broken(f"{tenancy.id} ended as cancelled, and nobody has cancelled it")
        if end is LeaseEnd.EXPIRED and tenancy.lease is not None and tenancy.is_held:
            left = tenancy.lease.remaining
            if left > _PRECISION:
                broken(f"{tenancy.id} has expired, and its holder takes it for {left:g} s longer")

    def do_reopen_server(self) -> None:
        """Step: close the servers, and open them again."""
        self.stop_serving(self.server)
        self.desk.close()
        self.insist("serve", self._serve)

    def do_reopen(self) -> None:
        """Step: close everything, and open it again: the leases are gone."""
        self.close()
        self.open()

    def close(self) -> None:
        """Close everything."""
        self.stop_serving(self.server)
        self.desk.close()
        self.landlord.close()
        self.disconnect()


class Watcher:
    """The listener of one use of a lease."""

    def __init__(self, holder: Holder, tenancy: Tenancy, use: Use) -> None:
        self._holder = holder
        self._tenancy = tenancy
        self._use = use

    def _note(self, kind: str, event: LeaseRenewalEvent) -> None:
        holder, name, use = self._holder, self._tenancy.id, self._use
        holder.note(f"{name}: {kind}: {event.error}")
        use.reports.append(kind)
        if len(use.reports) > 1:
            holder.simulation.broken(f"{name}: its listener was told twice: {use.reports}")

    def notify(self, event: LeaseRenewalEvent) -> None:
        """See ``LeaseListener``."""
        self._note("given up", event)
        if is_calm(self._holder.simulation) and not self._tenancy.is_cancelling:
            self._holder.simulation.broken(f"{self._tenancy.id} was given up, although nothing failed: {event.error}")

    def expiration_reached(self, event: LeaseRenewalEvent) -> None:
        """See ``DesiredExpirationListener``."""
        self._note("expiration reached", event)
        early = self._use.desired - self._holder.world.scheduler.now
        if early > _PRECISION:
            self._holder.simulation.broken(f"{self._tenancy.id}: its desired expiration is reported {early:g} s early")


class Holder(Party):
    """Asks for leases, and renews them."""

    simulation: Leasing

    def open(self) -> None:
        """Connect."""
        self.life: int = getattr(self, "life", 0) + 1
        self.held: list[Tenancy] = []
        self.m = self.connect()
        self.manager = LeaseRenewalManager()

    def do_lease(self, owner: str, duration: float, desired: float, renew: float | None) -> None:
        """Step: ask for a lease, and have it renewed for some time; 0: never."""
        self.attempt("grant", lambda: self._lease(owner, duration, desired, renew))

    def _lease(self, owner: str, duration: float, desired: float, renew: float | None) -> None:
        limit, desk = self.simulation.timeout, DESK.format(owner)
        asked_at = lease_time()
        value = self.settled(call(self.m, desk, "grant", {"duration": duration}, timeout=limit), limit, "grant")
        lease = lease_from_value(self.m, LEASES.format(owner), value, duration, asked_at, timeout=limit)
        tenancy = self.simulation.tenancies[lease.id]
        tenancy.holder, tenancy.life, tenancy.lease = self, self.life, lease
        self.held.append(tenancy)
        self.note(f"{lease.id} is granted for {lease.duration:g} s")
        if desired:
            self._use(tenancy, desired, renew, None)

    def _use(self, tenancy: Tenancy, desired: float, renew: float | None, user: str | None) -> None:
        """Have the manager renew a lease for a user."""
        assert tenancy.lease is not None
        use = Use(self.world.scheduler.now + desired)
        tenancy.uses.append(use)
        watcher = Watcher(self, tenancy, use)
        self.manager.renew_until(tenancy.lease, desired, Lease.ANY if renew is None else renew, watcher, owner=user)

    def do_share(self, number: int, desired: float, renew: float | None) -> None:
        """Step: have a lease that is renewed, and lasts for a while, renewed for a second user, too."""

        def share(tenancy: Tenancy) -> None:
            assert tenancy.lease is not None
            is_used_once = len(tenancy.uses) == 1 and tenancy.uses[0].is_open
            if is_used_once and not tenancy.is_cancelling and tenancy.lease.remaining > _LASTS:
                self._use(tenancy, desired, renew, SECOND)

        self._with(number, "share", share)

    def do_leave(self, number: int) -> None:
        """Step: have a lease renewed for its second user no more."""

        def leave(tenancy: Tenancy) -> None:
            assert tenancy.lease is not None
            if len(tenancy.uses) > 1:
                tenancy.uses[1].is_removed = True
                self.manager.remove(tenancy.lease, owner=SECOND)

        self._with(number, "leave", leave)

    def do_extend(self, number: int, desired: float) -> None:
        """Step: change the desired expiration of a lease that has one user."""

        def extend(tenancy: Tenancy) -> None:
            assert tenancy.lease is not None
            if len(tenancy.uses) != 1 or not tenancy.uses[0].is_open:
                return
            use, end = tenancy.uses[0], self.world.scheduler.now + desired
            use.desired = min(use.desired, end)
            self.manager.set_expiration(tenancy.lease, desired)
            use.desired = self.world.scheduler.now + desired

        self._with(number, "extend", extend)

    def do_cancel(self, number: int) -> None:
        """Step: cancel a lease."""
        self._with(number, "cancel", self._cancel)

    def _cancel(self, tenancy: Tenancy) -> None:
        assert tenancy.lease is not None
        tenancy.is_cancelling, tenancy.is_kept = True, False
        end = self.manager.cancel(tenancy.lease) if tenancy.uses else tenancy.lease.cancel()
        self.settled(end, self.simulation.timeout, "cancel")

    def do_renew(self, number: int, seconds: float) -> None:
        """Step: renew a lease by hand, or have its manager do so now."""

        def renew(tenancy: Tenancy) -> None:
            assert tenancy.lease is not None
            if tenancy.uses:
                self.manager.renew_now(tenancy.lease)
                return
            granted = self.settled(tenancy.lease.renew(seconds), self.simulation.timeout, "renew")
            self._check_granted(tenancy, granted, seconds)

        self._with(number, "renew", renew)

    def do_overlap(self, number: int, seconds: list[float]) -> None:
        """Step: renew a lease by hand several times at once."""

        def renew(tenancy: Tenancy) -> None:
            assert tenancy.lease is not None
            if tenancy.uses:
                return
            promises = [tenancy.lease.renew(each) for each in seconds]
            for promise in promises:
                promise.was_retrieved = True
            for promise, each in zip(promises, seconds, strict=True):
                self._check_granted(tenancy, self.settled(promise, self.simulation.timeout, "renew"), each)

        self._with(number, "overlap", renew)

    def _check_granted(self, tenancy: Tenancy, granted: float, seconds: float) -> None:
        if granted > seconds + _PRECISION:
            self.simulation.broken(f"{tenancy.id} is granted for {granted:g} s, of {seconds:g}")

    def do_renew_all(self, numbers: list[int], seconds: float) -> None:
        """Step: renew several leases together, also of several landlords."""
        chosen = [each for each in self._several(numbers) if not each.uses]
        leases = {each.lease: seconds for each in chosen if each.lease is not None}
        failed = self._batch("renew_all", lambda: renew_all(leases))
        for each in chosen:
            if failed is not None and each.lease not in failed and each.lease is not None:
                self._check_granted(each, each.lease.duration, seconds)

    def do_cancel_all(self, numbers: list[int]) -> None:
        """Step: cancel several leases together."""
        chosen = self._several(numbers)
        first = [each for each in chosen if not each.is_cancelling]
        for each in chosen:
            each.is_cancelling = True
        failed = self._batch("cancel_all", lambda: cancel_all([each.lease for each in chosen if each.lease]))
        for each in chosen:
            if failed is not None and each.lease not in failed and each.is_alive:
                self.simulation.broken(f"{each.id} was cancelled with others, and goes on")
        for each in first:
            each.is_kept = failed is None or each.lease in failed

    def _several(self, numbers: list[int]) -> list[Tenancy]:
        found = {number % len(self.held): None for number in numbers} if self.held else {}
        return [self.held[number] for number in found]

    def _batch(self, what: str, function: Callable[[], Any]) -> dict[Lease, MessagingError] | None:
        """Call a function for several leases; return the error of each that failed, ``None`` if that is not known."""
        try:
            self.settled(function(), self.simulation.timeout, what)
        except LeaseMapError as error:
            for lease, problem in error.failures.items():
                self._failed(what, self.simulation.tenancies[lease.id], problem)
            return dict(error.failures)
        except MessagingError as error:
            self.failed(what, error)
            return None
        return {}

    def _with(self, number: int, what: str, function: Callable[[Tenancy], object]) -> None:
        if not self.held:
            return
        tenancy = self.held[number % len(self.held)]
        try:
            function(tenancy)
        except MessagingError as error:
            self._failed(what, tenancy, error)

    def _failed(self, what: str, tenancy: Tenancy, error: MessagingError) -> None:
        """Judge the failure of a call for a lease."""
        if not isinstance(error, UnknownLeaseError):
            self.failed(what, error)
            return
        self.note(f"{what} {tenancy.id}: {error}")
        if tenancy.is_alive and "manager does not renew" not in str(error):
            self.simulation.broken(f"{what}: {tenancy.id} is unknown, and goes on: {error}")

    def do_reopen(self) -> None:
        """Step: close everything, and open it again: the leases are left behind."""
        self.close()
        self.open()

    def close(self) -> None:
        """Close everything."""
        self.manager.close()
        self.disconnect()


class Leasing(Simulation):
    """A landlord and holders."""

    name = "leases"

    def begin(self) -> None:
        """See ``Simulation``."""
        self.timeout: float = self.plan.options["timeout"]
        self.breaks = watch_channels(self)
        self.tenancies: dict[str, Tenancy] = {}
        if self.protocol == "memory":
            self.roles.append(Keeper(self, "keeper"))
        self.owners = [Owner(self, f"owner-{number + 1}") for number in range(self.plan.options["owners"])]
        self.holders = [Holder(self, f"holder-{number + 1}") for number in range(self.plan.options["holders"])]
        self.roles += [*self.owners, *self.holders]

    def is_at_rest(self) -> bool:
        """See ``Simulation``."""
        return not self._problems()

    def _problems(self) -> list[str]:
        found: list[str] = []
        now = self.world.scheduler.now
        for each in self.tenancies.values():
            is_alive = each.is_alive
            renewed = [use for use in each.uses if use.is_open and each.is_held]
            used = [] if each.is_cancelling else renewed
            if is_alive and not (renewed if each.is_kept else used):
                found.append(f"{each.id} is not renewed, and goes on")
            if not is_alive and used:
                found.append(f"{each.id} has ended, and its listener was not told")
            if any(now > use.desired + _LATE for use in used):
                found.append(f"{each.id}: its desired expiration is over, and was not reported")
        return found

    def judge(self) -> None:
        """See ``Simulation``."""
        for what in self._problems()[:5]:
            self.broken(what)

    @classmethod
    def make_plan(cls, random: random.Random, protocol: str) -> Plan:
        """See ``Simulation``."""
        names = [f"holder-{number + 1}" for number in range(random.choice((1, 2, 2)))]
        owners = [f"owner-{number + 1}" for number in range(random.choice((1, 1, 2)))]
        is_quiet = random.random() < 0.2
        steps: list[Step] = []
        for name in names:
            steps += [Step(name, *cls._holder_step(random, owners, is_quiet)) for _ in range(random.randint(14, 28))]
        for name in owners:
            for _ in range(random.randint(1, 6)):
                kind = (
                    "pause"
                    if is_quiet
                    else random.choice(("pause", "pause", "reopen_server", "reopen_server", "reopen"))
                )
                steps.append(Step(name, kind, {"seconds": span(random, 0.1, 20.0)} if kind == "pause" else {}))
        settings: dict[str, Any] = {"reconnect_max": random.choice((1.0, 5.0))}
        if protocol.startswith("mqtt"):
            settings["keepalive"] = random.choice((2, 10, 60))
        elif protocol == "amqp":
            settings["heartbeat"] = random.choice((2, 10, 60))
        options = {
            **scheduling(random), "holders": len(names), "owners": len(owners), "timeout": random.choice((2.0, 10.0)),
            "max_duration": random.choice((15.0, 60.0)), "settings": settings,
        }  # fmt: skip
        roles = [*owners, *names]
        return Plan(options, tuple(steps), tuple(make_faults(random, protocol, roles, roles)))

    @staticmethod
    def _holder_step(random: random.Random, owners: list[str], is_quiet: bool) -> tuple[str, dict[str, Any]]:
        number, numbers = random.randint(0, 9), [random.randint(0, 9) for _ in range(random.randint(1, 6))]
        desired, renew = random.choice((inf, inf, span(random, 1.0, 200.0))), random.choice((None, 10.0, 30.0))
        times = (10.0, 30.0, 60.0)
        steps: list[tuple[float, str, dict[str, Any]]] = [
            (0.35, "lease", {
                "owner": random.choice(owners), "duration": random.choice((5.0, 20.0, 60.0)),
                "desired": random.choice((0.0, desired)), "renew": renew,
            }),
            (0.07, "renew", {"number": number, "seconds": random.choice(times)}),
            (0.05, "renew_all", {"numbers": numbers, "seconds": random.choice(times)}),
            (0.04, "overlap", {"number": number, "seconds": [random.choice((2.0, *times)) for _ in range(3)]}),
            (0.06, "share", {"number": number, "desired": desired, "renew": renew}),
            (0.03, "leave", {"number": number}),
            (0.04, "extend", {"number": number, "desired": span(random, 1.0, 200.0)}),
            (0.30, "pause", {"seconds": span(random, 0.01, 15.0)}),
        ]  # fmt: skip
        if not is_quiet:
            steps += [
                (0.07, "cancel", {"number": number}),
                (0.03, "cancel_all", {"numbers": numbers}),
                (0.03, "reopen", {}),
            ]
        _, name, arguments = random.choices(steps, [part for part, _, _ in steps])[0]
        return name, arguments
