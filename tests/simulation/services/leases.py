"""Leases: holders in other processes ask a landlord for leases, renew them, and cancel them or leave them behind.

What is promised, and checked (``docs/leases.md``):

- a lease that a manager renews goes on, or its listener is told, once; in a calm world it goes on;
- a holder never takes a lease for longer than its landlord does, whatever wall clocks say;
- a desired expiration is reported when it is reached, not before;
- a lease that nobody renews expires, and its callback gets the right reason, once;
- each call has an outcome when its deadline has passed.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf
from typing import TYPE_CHECKING, Any, Final

from messaging.calls import CallServer, call
from messaging.errors import MessagingError, UnknownLeaseError
from messaging.leases import (
    Landlord,
    Lease,
    LeaseEnd,
    LeaseRenewalManager,
    LeaseServer,
    lease_from_value,
    lease_time,
    lease_to_value,
)
from tests.simulation.plans import Plan, Step
from tests.simulation.services.parties import Party, is_calm, make_faults
from tests.simulation.simulation import Keeper, Simulation, scheduling, span

if TYPE_CHECKING:
    import random
    from collections.abc import Mapping

    from messaging.leases import GrantedLease, LeaseRenewalEvent

LEASES: Final = "leases/hall"
DESK: Final = "leases/desk"
#: a callback and a report may come so much later, virtual seconds: threads are held up for up to 2 s at a point
_LATE: Final = 30.0
#: precision of clocks and timers, seconds
_PRECISION: Final = 0.01


@dataclass(slots=True)
class Tenancy:
    """A lease, as the test knows it.

    Attributes:
        id: of the lease.
        holder: role that asked for it; ``None``: its answer was not received.
        life: of that role.
        lease: as the holder has it.
        desired: when its renewal is to end, virtual seconds.
        is_managed: a manager renews it.
        is_cancelling: its holder has asked for its end.
        reports: what the listener was told.
        ends: reasons that the callback got.
    """

    id: str
    holder: Holder | None = None
    life: int = 0
    lease: Lease | None = None
    desired: float = 0.0
    is_managed: bool = False
    is_cancelling: bool = False
    reports: list[str] = field(default_factory=list)
    ends: list[LeaseEnd] = field(default_factory=list)

    @property
    def is_held(self) -> bool:
        """Whether the process of its holder goes on."""
        return self.holder is not None and self.holder.life == self.life and self.holder.process.is_alive


class Owner(Party):
    """Grants leases."""

    simulation: Leasing

    def open(self) -> None:
        """Connect, and grant leases."""
        self.m = self.connect()
        self.landlord = Landlord("hall", max_duration=self.simulation.plan.options["max_duration"])
        self.insist("serve", self._serve)

    def _serve(self) -> None:
        self.server = LeaseServer(self.m, LEASES, self.landlord)
        self.desk = CallServer(self.m, DESK, {"grant": self._grant})

    def _grant(self, arguments: Mapping[str, Any], _body: bytes) -> list[Any]:
        tenancy = Tenancy("")
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
        self.server.close()
        self.desk.close()
        self.insist("serve", self._serve)

    def do_reopen(self) -> None:
        """Step: close everything, and open it again: the leases are gone."""
        self.close()
        self.open()

    def close(self) -> None:
        """Close everything."""
        self.server.close()
        self.desk.close()
        self.landlord.close()
        self.disconnect()


class Watcher:
    """The listener of one lease."""

    def __init__(self, holder: Holder, tenancy: Tenancy) -> None:
        self._holder = holder
        self._tenancy = tenancy

    def _note(self, kind: str, event: LeaseRenewalEvent) -> None:
        holder, tenancy = self._holder, self._tenancy
        holder.note(f"{tenancy.id}: {kind}: {event.error}")
        tenancy.reports.append(kind)
        if len(tenancy.reports) > 1:
            holder.simulation.broken(f"{tenancy.id}: its listener was told twice: {tenancy.reports}")

    def notify(self, event: LeaseRenewalEvent) -> None:
        """See ``LeaseListener``."""
        self._note("given up", event)
        if is_calm(self._holder.simulation) and not self._tenancy.is_cancelling:
            self._holder.simulation.broken(f"{self._tenancy.id} was given up, although nothing failed: {event.error}")

    def expiration_reached(self, event: LeaseRenewalEvent) -> None:
        """See ``DesiredExpirationListener``."""
        self._note("expiration reached", event)
        early = self._tenancy.desired - self._holder.world.scheduler.now
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

    def do_lease(self, duration: float, desired: float, renew: float | None) -> None:
        """Step: ask for a lease, and have it renewed for some time; 0: never."""
        self.attempt("grant", lambda: self._lease(duration, desired, renew))

    def _lease(self, duration: float, desired: float, renew: float | None) -> None:
        limit = self.simulation.timeout
        asked_at = lease_time()
        value = self.settled(call(self.m, DESK, "grant", {"duration": duration}, timeout=limit), limit, "grant")
        lease = lease_from_value(self.m, LEASES, value, duration, asked_at, timeout=limit)
        tenancy = self.simulation.tenancies[lease.id]
        tenancy.holder, tenancy.life, tenancy.lease = self, self.life, lease
        self.held.append(tenancy)
        self.note(f"{lease.id} is granted for {lease.duration:g} s")
        if desired:
            tenancy.is_managed = True
            tenancy.desired = self.world.scheduler.now + desired
            self.manager.renew_until(lease, desired, Lease.ANY if renew is None else renew, Watcher(self, tenancy))

    def do_cancel(self, number: int) -> None:
        """Step: cancel a lease."""
        self._with(number, "cancel", self._cancel)

    def _cancel(self, tenancy: Tenancy) -> None:
        assert tenancy.lease is not None
        tenancy.is_cancelling = True
        end = self.manager.cancel(tenancy.lease) if tenancy.is_managed else tenancy.lease.cancel()
        self.settled(end, self.simulation.timeout, "cancel")

    def do_renew(self, number: int, seconds: float) -> None:
        """Step: renew a lease by hand, or have its manager do so now."""

        def renew(tenancy: Tenancy) -> None:
            assert tenancy.lease is not None
            if tenancy.is_managed:
                self.manager.renew_now(tenancy.lease)
                return
            granted = self.settled(tenancy.lease.renew(seconds), self.simulation.timeout, "renew")
            if granted > seconds + _PRECISION:
                self.simulation.broken(f"{tenancy.id} is granted for {granted:g} s, of {seconds:g}")

        self._with(number, "renew", renew)

    def _with(self, number: int, what: str, function: Any) -> None:
        if not self.held:
            return
        tenancy = self.held[number % len(self.held)]
        try:
            function(tenancy)
        except UnknownLeaseError as error:
            self.note(f"{what} {tenancy.id}: {error}")
        except MessagingError as error:
            self.failed(what, error)

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
        self.tenancies: dict[str, Tenancy] = {}
        if self.protocol == "memory":
            self.roles.append(Keeper(self, "keeper"))
        self.owner = Owner(self, "owner")
        self.holders = [Holder(self, f"holder-{number + 1}") for number in range(self.plan.options["holders"])]
        self.roles += [self.owner, *self.holders]

    def is_at_rest(self) -> bool:
        """See ``Simulation``."""
        return not self._problems()

    def _problems(self) -> list[str]:
        found: list[str] = []
        now = self.world.scheduler.now
        for each in self.tenancies.values():
            is_alive = self.owner.landlord.lease(each.id) is not None
            is_renewed = each.is_managed and each.is_held and not each.reports and not each.is_cancelling
            if is_alive and not is_renewed:
                found.append(f"{each.id} is not renewed, and goes on")
            if not is_alive and is_renewed:
                found.append(f"{each.id} has ended, and its listener was not told")
            if is_renewed and now > each.desired + _LATE:
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
        is_quiet = random.random() < 0.2
        steps: list[Step] = []
        for name in names:
            for _ in range(random.randint(14, 28)):
                chosen = random.random()
                number = random.randint(0, 9)
                if chosen < 0.35:
                    steps.append(Step(name, "lease", {
                        "duration": random.choice((5.0, 20.0, 60.0)),
                        "desired": random.choice((0.0, inf, inf, span(random, 1.0, 200.0))),
                        "renew": random.choice((None, 10.0, 30.0)),
                    }))  # fmt: skip
                elif chosen < 0.45 and not is_quiet:
                    steps.append(Step(name, "cancel", {"number": number}))
                elif chosen < 0.55:
                    seconds = random.choice((10.0, 30.0, 60.0))
                    steps.append(Step(name, "renew", {"number": number, "seconds": seconds}))
                elif chosen < 0.58 and not is_quiet:
                    steps.append(Step(name, "reopen", {}))
                else:
                    steps.append(Step(name, "pause", {"seconds": span(random, 0.01, 15.0)}))
        for _ in range(random.randint(1, 6)):
            kind = (
                "pause" if is_quiet else random.choice(("pause", "pause", "reopen_server", "reopen_server", "reopen"))
            )
            steps.append(Step("owner", kind, {"seconds": span(random, 0.1, 20.0)} if kind == "pause" else {}))
        settings: dict[str, Any] = {"reconnect_max": random.choice((1.0, 5.0))}
        if protocol.startswith("mqtt"):
            settings["keepalive"] = random.choice((2, 10, 60))
        elif protocol == "amqp":
            settings["heartbeat"] = random.choice((2, 10, 60))
        options = {
            **scheduling(random), "holders": len(names), "timeout": random.choice((2.0, 10.0)),
            "max_duration": random.choice((15.0, 60.0)), "settings": settings,
        }  # fmt: skip
        roles = ["owner", *names]
        return Plan(options, tuple(steps), tuple(make_faults(random, protocol, roles, roles)))
