"""Devices with a will and a birth, that are lost, sleep and come back, and those who watch whether they are there.

What is promised, and checked (``docs/devices.md``):

- a device that has a connection is never shown as lost for good: after each connection its birth is published, and
  that of an earlier connection, or a will, comes before it;
- a device that is killed is shown as lost, unless it is back before its will is due;
- no will is published of a device that has closed in good order;
- the birth comes before anything that has waited in the outbox.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING, Any, Final

from messaging import Message, MessagingError
from messaging.execution import clock
from tests.simulation.fault_plans import Breaks, draw_faults
from tests.simulation.plans import Fault, Plan, Step
from tests.simulation.simulation import Keeper, Role, Simulation, scheduling, span

if TYPE_CHECKING:
    import random

SLACK: Final = 60.0
#: faults after which the broker may learn late, or never, that a device has closed its connection
_OF_CONNECTIONS: Final = frozenset({"cut", "black_hole", "stall", "slow_network", "restart_broker", "broker"})


@dataclass(slots=True)
class Life:
    """The time of one instance of a device.

    Attributes:
        begin: when it was made, virtual seconds.
        end: when the device began to close it, or was killed.
        is_closed: the device has closed it in good order.
        is_lost: the device was killed, and had not begun to close it.
        was_connected: the broker had its connection when the device was killed.
        seen: since when its birth has arrived somewhere.
        states: how many other states it has published.
    """

    begin: float
    end: float = inf
    is_closed: bool = False
    is_lost: bool = False
    was_connected: bool = False
    seen: float = inf
    states: int = 0


class Device(Role):
    """Shows its state on a channel of its own."""

    simulation: Devices

    def open(self) -> None:
        """Connect."""
        self._connect()

    def _connect(self) -> None:
        lives = self.simulation.lives[self.name]
        options = self.simulation.plan.options
        number = len(lives)
        settings: dict[str, Any] = dict(options["device"])
        settings["name" if self.simulation.protocol == "memory" else "client_id"] = self.name
        lives.append(Life(self.world.scheduler.now))
        will = {**self._presence(f"offline:{number}"), **options["will"]}
        self.m = self.simulation.connect(
            self,
            retry_connect=not settings.get("start_offline", False),
            birth=self._presence(f"online:{number}"),
            **settings,
            **({} if options["is_will_later"] else {"will": will}),
        )
        if options["is_will_later"]:
            content = will.pop("content")
            self.m.publish(will.pop("channel"), content, last_will=True, **will)

    def _presence(self, state: str) -> dict[str, Any]:
        return {
            "channel": f"status/{self.name}",
            "content": state.encode(),
            "qos": self.simulation.plan.options["qos"],
            "retain": True,
        }

    def do_publish(self) -> None:
        """Step: publish another state."""
        lives = self.simulation.lives[self.name]
        life = lives[-1]
        presence = self._presence(f"busy:{len(lives) - 1}:{life.states}")
        life.states += 1
        try:
            self.m.publish(presence.pop("channel"), presence.pop("content"), **presence)
        except MessagingError as error:
            self.note(f"{type(error).__name__}: {error}")

    def do_sleep(self, seconds: float) -> None:
        """Step: close the instance, and open another later."""
        self._close()
        clock.pause(seconds)
        self._connect()

    def _close(self) -> None:
        life = self.simulation.lives[self.name][-1]
        life.end = self.world.scheduler.now
        self.m.close()
        life.is_closed = True

    def close(self) -> None:
        """Close the instance."""
        self._close()


class Watcher(Role):
    """Sees the states of all devices."""

    simulation: Devices

    def open(self) -> None:
        """Connect and subscribe."""
        #: the last state of each device that arrived
        self.last: dict[str, str] = {}
        #: all that have arrived, by the moment when they did
        self.seen: dict[str, float] = {}
        self.m = self.simulation.connect(self, retry_connect=True, **self.simulation.plan.options["watcher"])
        while True:
            try:
                self.stream = self.m.on("status/#", self._take, qos=self.simulation.plan.options["qos"])
            except MessagingError as error:
                self.note(f"cannot subscribe: {type(error).__name__}: {error}")
                clock.pause(0.5)
            else:
                break
        self.since = self.world.scheduler.now

    def _take(self, message: Message) -> None:
        device = (message.context.channel or "").partition("/")[2]
        state = message.payload.decode("utf-8", "replace")
        self.note(f"{device} is {state}")
        self.simulation.judge_state(self, device, state, is_retained=bool(message.context.extensions.get("retain")))
        self.last[device] = state
        self.seen.setdefault(f"{device} {state}", self.world.scheduler.now)

    def close(self) -> None:
        """Close the instance."""
        self.m.close()


class Devices(Simulation):
    """See the module."""

    name = "devices"
    protocols = ("memory", "mqtt311", "mqtt5")

    def begin(self) -> None:
        """See ``Simulation``."""
        if self.service is not None:
            self.breaks = self.service.broker = Breaks(self.broker, self.world.scheduler)
        self.faults = {fault.name for fault in self.plan.faults}
        self.cuts: list[float] = []
        if self.protocol == "memory":
            self.roles.append(Keeper(self, "keeper"))
        self.roles += [Watcher(self, f"watcher-{number + 1}") for number in range(self.plan.options["watchers"])]
        devices = [f"device-{number + 1}" for number in range(self.plan.options["devices"])]
        #: the instances of each device, in their order
        self.lives: dict[str, list[Life]] = {name: [] for name in devices}
        self.roles += [Device(self, name) for name in devices]

    def fault_cut(self, role: str | None) -> None:
        """See ``Simulation``."""
        self.cuts.append(self.world.scheduler.now)
        super().fault_cut(role)

    def fault_kill(self, role: str, seconds: float, vanishes: bool) -> None:
        """See ``Simulation``."""
        life = self.lives[role][-1] if self.lives.get(role) else None
        if life is not None and life.end == inf:
            life.is_lost, life.end = True, self.world.scheduler.now
            session = self.broker.sessions.get(role)
            life.was_connected = session is not None and session.connection is not None
        super().fault_kill(role, seconds, vanishes)

    def _has_broken(self, role: str, begin: float, end: float) -> bool:
        """Return whether a role may have lost a connection in that time."""
        if self.protocol == "memory":
            return any(begin <= each <= end for each in self.cuts)
        return self.breaks.between(role, begin, end)

    # --- judging

    def judge_state(self, watcher: Watcher, device: str, state: str, *, is_retained: bool) -> None:
        """Check a state that arrived."""
        kind, _, rest = state.partition(":")
        number, _, count = rest.partition(":")
        lives = self.lives.get(device, [])
        if not number.isdigit() or int(number) >= len(lives) or (count and int(count) >= lives[int(number)].states):
            self.broken(f"a state of {device} arrived that was not published: {state!r}")
            return
        life, now = lives[int(number)], self.world.scheduler.now
        if kind == "online":
            life.seen = min(life.seen, now)
        elif kind == "offline":
            self._judge_will(device, life, state)
        elif (
            not is_retained
            and f"{device} online:{number}" not in watcher.seen
            and life.begin > watcher.since
            and not self._has_broken(watcher.name, watcher.since, now)
        ):
            self.broken(f"{watcher.name} gets {state} of {device} before its birth")

    def _judge_will(self, device: str, life: Life, state: str) -> None:
        now = self.world.scheduler.now
        # the end of the connection that is closed in good order is no break
        end = life.end if life.is_closed and not self.faults & _OF_CONNECTIONS else now
        if life.is_lost or (life.end < inf and not life.is_closed):
            return  # while it closes, the socket ends as well
        if not self._has_broken(device, life.begin, end):
            self.broken(f"the will {state} of {device} arrives, and it was not lost")

    def _current(self, device: str) -> str:
        """Return the number of the last instance of a device."""
        return str(len(self.lives[device]) - 1)

    def is_at_rest(self) -> bool:
        """See ``Simulation``."""
        return not [*self._wrong()]

    def _wrong(self) -> Any:
        """Yield what watchers take for the state of a device that is connected."""
        for each in self.roles:
            for device in self.lives if isinstance(each, Watcher) else ():
                last = each.last.get(device, "nothing") if isinstance(each, Watcher) else ""
                if last.startswith("offline") or last.partition(":")[2].partition(":")[0] != self._current(device):
                    yield f"{each.name} takes {device} for {last}, and it is online:{self._current(device)}"

    def judge(self) -> None:
        """See ``Simulation``."""
        for wrong in self._wrong():
            self.broken(wrong)
        if "restart_broker" not in self.faults:
            for device, lives in self.lives.items():
                for number, life in enumerate(lives[:-1]):
                    self._judge_loss(device, f"offline:{number}", life, lives[number + 1])

    def _judge_loss(self, device: str, will: str, life: Life, following: Life) -> None:
        """Check that the loss of a device was seen: of one that was killed while it was connected."""
        if not life.was_connected or life.seen > life.end or self.plan.options["is_will_later"]:
            return
        # the broker notices late that a machine has vanished; it counts the delay from then on
        options, now = self.plan.options, self.world.scheduler.now
        if following.begin < life.end + 1.5 * options["device"]["keepalive"] + options["will"].get("will_delay", 0) + 2:
            return  # it may be back before it was missed
        for each in self.roles:
            if not isinstance(each, Watcher) or each.since > life.end or self._has_broken(each.name, life.end, now):
                continue
            if f"{device} {will}" not in each.seen:
                self.broken(f"{each.name} has not learned that {device} was lost: {will}")

    # --- plans

    @classmethod
    def make_plan(cls, random: random.Random, protocol: str) -> Plan:
        """See ``Simulation``."""
        devices, watchers = random.choice((1, 2)), random.choice((1, 1, 2))
        device: dict[str, Any] = {
            "timeout": random.choice((20.0, 60.0, 600.0)),
            "reconnect_max": random.choice((1.0, 5.0, 30.0)),
        }
        watcher: dict[str, Any] = {"reconnect_max": random.choice((1.0, 5.0, 30.0))}
        will: dict[str, Any] = {}
        if random.random() < 0.4:
            device["start_offline"] = True
        if protocol != "memory":
            device["keepalive"], watcher["keepalive"] = random.choice((2, 10, 60)), random.choice((2, 10, 60))
        if protocol == "mqtt5" and random.random() < 0.4:
            device["session_expiry"] = random.choice((5, 60, 600))
            will["will_delay"] = random.choice((1, 5, 30))
        steps: list[Step] = []
        for number in range(devices):
            name = f"device-{number + 1}"
            for _ in range(random.randint(16, 26)):
                chosen = random.random()
                if chosen < 0.5:
                    steps.append(Step(name, "publish", {}))
                elif chosen < 0.8:
                    steps.append(Step(name, "pause", {"seconds": span(random, 1e-3, 4.0)}))
                else:
                    steps.append(Step(name, "sleep", {"seconds": span(random, 1e-3, 10.0)}))
        for number in range(watchers):
            for _ in range(random.randint(10, 16)):
                steps.append(Step(f"watcher-{number + 1}", "pause", {"seconds": span(random, 1e-2, 4.0)}))
        roles = sorted({step.role for step in steps})
        if protocol != "memory" and random.random() < 0.2:
            faults = [cls._kill(random, devices) for _ in range(random.randint(2, 4))]
        else:
            faults = draw_faults(random, protocol, roles, until=20.0, least=2)
        if protocol == "memory" and faults:
            faults += [Fault(span(random, 1e-3, 10.0), "cut", {"role": random.choice(roles)}) for _ in range(2)]
        options = {
            **scheduling(random),
            "devices": devices,
            "watchers": watchers,
            "device": device,
            "watcher": watcher,
            "will": will,
            "is_will_later": protocol != "mqtt311" and not will and random.random() < 0.15,
            "qos": 1 if protocol == "memory" else random.choice((1, 2)),
        }
        return Plan(options, tuple(steps), tuple(sorted(faults, key=lambda fault: fault.at)))

    @classmethod
    def _kill(cls, random: random.Random, devices: int) -> Fault:
        arguments = {
            "role": f"device-{random.randint(1, devices)}",
            "seconds": random.choice((span(random, 0.01, 10.0), 200.0)),
            "vanishes": random.random() < 0.3,
        }
        return Fault(span(random, 1e-2, 20.0), "kill", arguments)
