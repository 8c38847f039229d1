"""One run: the roles of a service in a world, its faults, and the promises that have to hold.

A run goes through these phases:

1. The roles begin, in the order in which they were added; each when the one before says that it is ready.
2. They do their steps, while the faults happen. A role whose process is killed begins again in a new one, and goes on
   behind the step that it was killed in.
3. *Rest*: all faults end; what has to arrive arrives, within :data:`REST`.
4. The roles close what they have opened, and the world is searched for what was left over.

Promises are checked when something happens (:meth:`Simulation.broken`) and at the end of phases 3 and 4.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import inf
from typing import TYPE_CHECKING, Any, ClassVar, Final

import messaging
from messaging.execution import clock, engine
from messaging_adapters.memory.broker import join
from tests.simulation.brokers.amqp import AmqpBroker
from tests.simulation.brokers.amqp.faults import AmqpFaults
from tests.simulation.brokers.mqtt.broker import MqttBroker
from tests.simulation.brokers.mqtt.settings import MqttFaults, MqttSettings
from tests.simulation.world.scheduler import WorldError
from tests.simulation.world.world import World

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Iterator

    from tests.simulation.plans import Plan
    from tests.simulation.world.network import Link, Service
    from tests.simulation.world.processes import Process
    from tests.simulation.world.world import Host

#: virtual time within which everything has to arrive after the last fault, seconds
REST: Final = 600.0
#: how often the roles look whether that is so, seconds
_LOOK: Final = 0.05
#: virtual time within which a role has to close what it has opened, seconds
_CLOSE: Final = 120.0

PROTOCOLS: Final = ("memory", "mqtt311", "mqtt5", "amqp")
HOST: Final = "broker"
#: hosts of the brokers: of the first one, and of the others that a plan asks for
HOSTS: Final = (HOST, "broker-2")
PORTS: Final = {"mqtt311": 1883, "mqtt5": 1883, "amqp": 5672}


class Role:
    """A program. It lives in one process after another. Derived classes have methods ``do_NAME`` for its steps.

    Attributes:
        name: of the role.
        process: the process that it lives in now.
        lives: how many processes it has lived in.
        is_ready: it has begun, so the next role may begin; stays true.
    """

    #: how often it rests, and looks whether all roles close, seconds
    pace: ClassVar[float] = _LOOK

    def __init__(self, simulation: Simulation, name: str) -> None:
        self.simulation = simulation
        self.world = simulation.world
        self.name = name
        self.process: Process = simulation.process_for(name)
        self.lives = 0
        self.is_ready = False
        self.is_open = False
        self.is_closed = False
        self._steps = [step for step in simulation.plan.steps if step.role == name]
        self._next = 0
        #: whether it does a step
        self._is_busy = False

    # --- to be overridden

    def open(self) -> None:
        """Begin, in a new process, on its first thread. The former process may have ended anywhere."""

    def close(self) -> None:
        """Close everything that :meth:`open` and the steps have opened."""

    def rest(self) -> None:
        """Do what is to be done until all roles close; called again and again after the last step."""

    # ---

    @property
    def is_done(self) -> bool:
        """Whether it has done all its steps, and is not dead."""
        return self._next >= len(self._steps) and self.process.is_alive and self.is_open and not self._is_busy

    def note(self, text: str) -> None:
        """Write a line of the history."""
        self.world.note(self.name, text)

    def start(self) -> None:
        """Begin in a new process."""
        self.lives += 1
        if self.lives > 1:
            self.process = self.simulation.process_for(f"{self.name}.{self.lives}")
        self.is_open = self._is_busy = False
        self.process.start(self._live, self.name)

    def _live(self) -> None:
        self.open()
        self.is_open = self.is_ready = True
        while self._next < len(self._steps):
            step = self._steps[self._next]
            self._next += 1  # a step that kills the process is not repeated
            self._is_busy = True
            self.note(f"step {step.name} {step.arguments}")
            getattr(self, f"do_{step.name}")(**step.arguments)
            self._is_busy = False
        while not self.simulation.is_closing:
            self.rest()
            clock.pause(self.pace)
        self.close()
        self.is_closed = True

    def do_pause(self, seconds: float) -> None:
        """Step: do nothing for a time."""
        clock.pause(seconds)


class Keeper(Role):
    """Keeps the broker of ``memory://`` while other instances come and go: it ends with the last of them."""

    def open(self) -> None:
        """Connect."""
        self.m = self.simulation.connect(self)

    def close(self) -> None:
        """Close the instance."""
        self.m.close()


@dataclass
class Site:
    """A broker that programs reach over the network.

    Attributes:
        host: its name.
        protocol: ``mqtt311``, ``mqtt5`` or ``amqp``.
        broker: itself.
        service: what the network has of it.
    """

    host: str
    protocol: str
    broker: Any
    service: Service


class Simulation:
    """One run of a service. Derived classes make a plan, and the roles, and know what was promised.

    Attributes:
        plan: what happens.
        world: where.
        protocol: ``memory``, ``mqtt311``, ``mqtt5`` or ``amqp``.
        sites: the brokers on the network: the first one, and one more of each protocol of the option ``others``.
        failures: the promises that were broken, in the order in which that was seen.
    """

    #: name of the service, as on the command line
    name: ClassVar[str] = ""
    #: protocols that it runs on
    protocols: ClassVar[tuple[str, ...]] = PROTOCOLS
    #: false: its ledger still takes permitted outcomes for broken promises, so it runs only if it is asked for by name
    is_complete: ClassVar[bool] = True
    #: false: nothing is sent, so there is neither a broker nor a process that holds one
    has_broker: ClassVar[bool] = True

    def __init__(self, seed: str, protocol: str, plan: Plan) -> None:
        self.plan = plan
        self.protocol = protocol
        chance = plan.options
        self.world = World(
            seed, gap=chance.get("gap", 20.0), hold_up=chance.get("hold_up", 0.02), longest=chance.get("longest", 0.5)
        )
        self.world.begin()
        self.failures: list[str] = []
        self.roles: list[Role] = []
        self._busy: Role | None = None
        self.is_closing = False
        self.sites: list[Site] = []
        self._unhealed: dict[str, Callable[[], object]] = {}
        if protocol != "memory" and self.has_broker:
            self._serve(protocol)
        for other in chance.get("others", ()):
            self._serve(other)
        first = self.sites[0] if self.sites else None
        self.broker: Any = None if first is None else first.broker
        self.service: Service | None = None if first is None else first.service

    # --- to be overridden

    @classmethod
    def make_plan(cls, random: random.Random, protocol: str) -> Plan:
        """Return a plan."""
        raise NotImplementedError

    def begin(self) -> None:
        """Add the roles: ``self.roles``."""
        raise NotImplementedError

    def is_at_rest(self) -> bool:
        """Return whether everything has arrived that has to. Asked in phase 3 until it is true, or time is up."""
        raise NotImplementedError

    def judge(self) -> None:
        """Check what was promised; report with :meth:`broken`. After phase 3."""
        raise NotImplementedError

    # --- brokers

    def make_broker(self, protocol: str, host: Host) -> Any:
        """Return the broker of a site."""
        return AmqpBroker(host) if protocol == "amqp" else MqttBroker(host, MqttSettings(max_queued=0))

    def _serve(self, protocol: str) -> None:
        name = HOSTS[len(self.sites)]
        broker = self.make_broker(protocol, self.world.host(name))
        self.sites.append(Site(name, protocol, broker, self.world.serve(name, PORTS[protocol], broker)))

    def process_for(self, name: str) -> Process:
        """Return a new process; on ``memory://`` the only one: its broker is a part of the process."""
        if self.protocol != "memory" or not self.has_broker:
            return self.world.process(name)
        if not self.world.processes:
            self.world.process("program")
        return self.world.processes[0]

    def url(self) -> str:
        """Return the URL of the first broker."""
        return "memory://simulation" if self.protocol == "memory" else self.url_of(self.sites[0])

    @staticmethod
    def url_of(site: Site) -> str:
        """Return the URL of a broker."""
        if site.protocol == "amqp":
            return f"amqp://guest:guest@{site.host}"
        return f"mqtt://{site.host}?version={'5' if site.protocol == 'mqtt5' else '3.1.1'}"

    def connect(self, role: Role, **settings: Any) -> messaging.Messaging:
        """Return a new instance for ``role``."""
        role.note(f"connect {settings}".replace(str(self.world.disk.folder), "disk"))
        return messaging.connect(self.url(), **settings)

    # --- judging

    def broken(self, what: str) -> None:
        """Report a promise that was broken."""
        if what not in self.failures:
            self.failures.append(what)
            self.world.note("judge", f"BROKEN: {what}")

    # --- running

    def run(self) -> None:
        """Run all phases."""
        world = self.world
        try:
            self._run()
        except WorldError as error:
            self.broken(f"{error}"[:3000])
        for defect in world.defects:
            self.broken(f"defect: {defect}")

    def _run(self) -> None:
        world = self.world
        self.begin()
        for role in self.roles:
            role.start()
            world.run(lambda role=role: role.is_ready or bool(world.defects), horizon=REST)  # type: ignore[misc]
            if world.defects:
                return
        for fault in self.plan.faults:
            world.scheduler.call_later(fault.at, lambda fault=fault: self._inject(fault))  # type: ignore[misc]
        last = world.scheduler.now + max((fault.at for fault in self.plan.faults), default=0.0)
        world.run(lambda: bool(world.defects) or (world.scheduler.now >= last and self._is_done()), horizon=3600.0)
        if world.defects:
            return
        world.note("phase", "rest")
        world.scheduler.hold_ups = 0
        self.heal()
        end = world.scheduler.now + REST
        self._ask_until(end, lambda: self._is_done() and self.is_at_rest())
        if not self._is_done():
            self.broken("not done: " + world.scheduler.waiting())
            return
        self.judge()
        if self.failures or world.defects:
            return
        world.note("phase", "close")
        self.is_closing = True
        self._ask_until(world.scheduler.now + _CLOSE, lambda: all(role.is_closed for role in self.roles))
        for role in self.roles:
            if not role.is_closed:
                self.broken(f"{role.name} did not close: {world.scheduler.waiting()}")
        if not self.failures:
            self._ask_until(world.scheduler.now + 30.0, lambda: not [*self._leftovers()])
            self.search()

    def _ask_until(self, end: float, holds: Callable[[], bool]) -> None:
        """Run until ``holds()``, which is asked from time to time, or until the moment ``end``."""
        world = self.world
        while world.scheduler.now < end and not world.defects and not holds():
            due = world.scheduler.now + _LOOK
            world.scheduler.call_at(due, _nothing)
            world.run(lambda due=due: world.scheduler.now >= due, horizon=REST)  # type: ignore[misc]

    def _is_done(self) -> bool:
        # asked after each change of threads: the role that was busy then is probably busy now
        busy = self._busy
        if busy is not None and not busy.is_done:
            return False
        self._busy = next((role for role in self.roles if not role.is_done), None)
        return self._busy is None

    def search(self) -> None:
        """Search the world for what was left over. After phase 4."""
        for what in self._leftovers():
            self.broken(f"left over: {what}")

    def _leftovers(self) -> Iterator[str]:
        """Yield what is left over; derived classes add to it."""
        world = self.world
        for fiber in world.scheduler.fibers:
            if fiber.has_ended or fiber.is_crashed or fiber.process is None or fiber.name.startswith("asyncio_"):
                continue
            is_idle = fiber.waits_for in ("a lock", "events")
            if is_idle and fiber.name in ("messaging-engine", "messaging-handlers", "messaging-worker"):
                continue
            yield f"thread {fiber.where()}"
        for sock in world.network.sockets.values():
            yield f"a socket of {sock.process}"
        for role in self.roles:
            for made in role.process.objects.values():
                if tasks := [repr(each) for each in getattr(made, "_tasks", ())]:
                    yield f"tasks on the engine of {role.name}: {tasks}"[:500]
        for process, path in world.disk.left_open():  # a lock is held by an open file
            yield f"a file that {process} has left open: {path}"

    # --- faults

    def _inject(self, fault: Any) -> None:
        self.world.fault(fault.name, str(fault.arguments))
        getattr(self, f"fault_{fault.name}")(**fault.arguments)

    def _for(self, seconds: float, name: str, undo: Callable[[], object]) -> None:
        """End a fault after some time, or when all faults end."""

        def end() -> None:
            if self._unhealed.pop(name, None) is not None:
                self.world.note("fault", f"{name} ends")
                undo()

        if name not in self._unhealed:
            self._unhealed[name] = undo
            if seconds < inf:
                self.world.scheduler.call_later(seconds, end)

    def heal(self) -> None:
        """End all faults."""
        for name, undo in [*self._unhealed.items()]:
            if self._unhealed.pop(name, None) is not None:
                undo()
        for role in self.roles:
            if not role.process.is_alive:
                role.start()

    def _site(self, number: int) -> Site | None:
        return self.sites[number] if number < len(self.sites) else None

    def _links(self, role: str | None, site: int | None = None) -> list[Link]:
        found = []
        for link in [*self.world.network.links.values()]:
            owner = link.owner
            if site is not None and link.service is not self.sites[site].service:
                continue
            if role is None or (owner is not None and owner.name.split(".")[0] == role):
                found.append(link)
        return found

    def fault_cut(self, role: str | None, site: int | None = None) -> None:
        """Fault: reset the connections of a role, or all."""
        if self.protocol == "memory":
            for each in self.roles:
                m = getattr(each, "m", None)
                if role in (None, each.name) and each.is_open and m is not None:
                    each.process.start(lambda name=m.name: engine().call(_drop, name), "drop")  # type: ignore[misc]
        for link in self._links(role, site):
            link.cut()

    def fault_black_hole(self, role: str | None, seconds: float, site: int | None = None) -> None:
        """Fault: nothing passes."""
        for link in self._links(role, site):
            link.black_hole()
            self._for(seconds, f"black hole of {link.name}", link.heal)

    def fault_stall(self, role: str | None, seconds: float, site: int | None = None) -> None:
        """Fault: the broker does not read."""
        for link in self._links(role, site):
            link.stall()
            self._for(seconds, f"stall of {link.name}", link.heal)

    def fault_refuse(self, seconds: float, site: int = 0) -> None:
        """Fault: connections are refused."""
        found = self._site(site)
        if found is not None:
            found.service.is_refusing = True
            self._for(seconds, _named("refusing", site), lambda: setattr(found.service, "is_refusing", False))

    def fault_silence(self, seconds: float, site: int = 0) -> None:
        """Fault: attempts to connect are not answered."""
        found = self._site(site)
        if found is not None:
            found.service.is_silent = True
            self._for(seconds, _named("silence", site), lambda: setattr(found.service, "is_silent", False))

    def fault_slow_network(self, seconds: float, longest: float, piece: int) -> None:
        """Fault: everything takes longer, and comes in pieces."""
        network = self.world.network
        before = network.conditions
        network.conditions = replace(before, delay=(before.delay[0], longest), piece=piece)
        self._for(seconds, "slow network", lambda: setattr(network, "conditions", before))

    def fault_no_names(self, seconds: float) -> None:
        """Fault: the name of the broker is not resolved."""
        self.world.network.unresolved[HOST] = None
        self._for(seconds, "no names", lambda: self.world.network.unresolved.pop(HOST, None))

    def fault_restart_broker(self, seconds: float, is_kill: bool, site: int = 0) -> None:
        """Fault: the broker ends, and starts again."""
        found = self._site(site)
        if found is None or not found.broker.is_running:
            return
        broker, service = found.broker, found.service
        if is_kill:
            broker.kill()
        else:
            broker.stop()
        service.is_refusing = True

        def start() -> None:
            broker.start()
            service.is_refusing = False

        self._for(seconds, _named("broker is down", site), start)

    def fault_broker(self, seconds: float, site: int = 0, **faults: Any) -> None:
        """Fault: the broker does something that it may do, but seldom does."""
        found = self._site(site)
        if found is None:
            return
        broker, none = found.broker, AmqpFaults if found.protocol == "amqp" else MqttFaults
        broker.faults = none(**faults)
        self._for(seconds, _named("faults of the broker", site), lambda: setattr(broker, "faults", none()))

    def fault_kill(self, role: str, seconds: float, vanishes: bool) -> None:
        """Fault: the process of a role is killed, or its machine ends; it begins again after some time."""
        for each in self.roles:
            if each.name == role and each.process.is_alive:
                each.process.kill(vanishes=vanishes)
                self._for(seconds, f"{role} is dead", each.start)

    def fault_full_disk(self, seconds: float, left: int = 0) -> None:
        """Fault: the disk is full, but for ``left`` bytes, and what is deleted meanwhile."""
        disk = self.world.disk
        disk.fill(left)
        self._for(seconds, "full disk", disk.make_room)

    def fault_failing_sync(self, count: int) -> None:
        """Fault: some syncs fail."""
        faults = self.world.disk.faults
        faults.fails = count
        self._for(inf, "failing syncs", lambda: setattr(faults, "fails", 0))

    def fault_failing_write(self, count: int) -> None:
        """Fault: some writes fail, after a part of their bytes."""
        faults = self.world.disk.faults
        faults.failing_writes = count
        self._for(inf, "failing writes", lambda: setattr(faults, "failing_writes", 0))

    def fault_slow_sync(self, seconds: float, longest: float) -> None:
        """Fault: syncs take longer."""
        faults = self.world.disk.faults
        before = faults.sync_time
        faults.sync_time = longest
        self._for(seconds, "slow sync", lambda: setattr(faults, "sync_time", before))

    def fault_wall_clock(self, role: str, offset: float) -> None:
        """Fault: the wall clock of a role's machine is set."""
        for each in self.roles:
            if each.name == role:
                each.process.wall_offset += offset


def _nothing() -> None:
    """Do nothing: time passes."""


def _named(fault: str, site: int) -> str:
    """Return the name of a fault of one of the brokers."""
    return f"{fault} at {HOSTS[site]}" if site else fault


def _drop(name: str) -> None:
    """Have the broker of ``memory://`` drop the connection of an instance. On the engine's loop."""
    broker = join("simulation")
    broker.release()
    broker.disconnect(name)


# --- plans


def scheduling(random: random.Random) -> dict[str, Any]:
    """Return options of the scheduler: from runs without interruptions to runs with one at every point."""
    return {
        "gap": random.choice((1.5, 3.0, 8.0, 20.0, 60.0, 200.0, inf)),
        "hold_up": random.choice((0.0, 0.0, 0.01, 0.05, 0.2)),
        "longest": random.choice((0.001, 0.01, 0.2, 2.0)),
    }


def span(random: random.Random, low: float, high: float) -> float:
    """Return a time between two, evenly over the orders of magnitude, seconds."""
    return round(low * (high / low) ** random.random(), 6)


MQTT_FAULTS: Final[tuple[dict[str, float], ...]] = (
    {"ack_delay": 0.3, "ack_delay_limit": 2.0},
    {"close_before": 0.05},
    {"close_after": 0.05},
    {"busy": 0.5},
    {"slow_delivery": 0.2, "slow_delivery_limit": 0.5},
    {"disconnect": 0.03},
)
AMQP_FAULTS: Final[tuple[dict[str, float], ...]] = (
    {"late_confirm": 0.3, "late_confirm_max": 2.0},
    {"shuffle_confirms": 0.5},
    {"nack": 0.1},
    {"close_channel": 0.02},
    {"internal_error": 0.01},
    {"force_close": 0.01},
    {"drop_before": 0.02},
    {"drop_after": 0.02},
    {"block": 0.02, "block_max": 3.0},
    {"slow_delivery": 0.1},
    {"cancel_consumer": 0.02},
)
