"""A gateway between two brokers: devices, the gateway with its buffers on the disk, and a receiver.

What is promised, and checked (``docs/gateway.md``):

- a message that the devices' broker confirmed while a route was subscribed arrives, is a dead letter, or is counted as
  dropped where the buffer is bounded; so it is after kills, losses of power, outages, full disks and reloads;
- nothing arrives that was not sent, and nothing that a filter lets out;
- the first arrivals of a route are in the order of each device;
- a message that arrives twice has one id; equal messages without ids stay separate messages;
- at most ``in_flight`` messages come twice after a crash;
- the counters of a route add up, and buffers are empty when everything has come to rest;
- the retained state of devices is mirrored;
- a close takes no longer than its limit, and leaves nothing over.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final

from tests.simulation.brokers.mqtt.broker import MqttBroker
from tests.simulation.fault_plans import Breaks
from tests.simulation.plans import Fault, Plan, Step
from tests.simulation.services.durable import DISK_FAULTS
from tests.simulation.services.gateway_ledger import EQUAL, OPEN_OUTCOMES, Ledger, Sent
from tests.simulation.services.gateway_roles import Device, GatewayRole, Receiver
from tests.simulation.simulation import AMQP_FAULTS, MQTT_FAULTS, Keeper, Role, Simulation, scheduling, span

if TYPE_CHECKING:
    import random
    from pathlib import Path

    from messaging import MessagingError
    from messaging.gateway.reports import RouteDTO

#: the second name of the route of the kind "data"
OTHER: Final = "data-b"
#: faults of the target's broker after which a message is published again behind those that came after it
_REFUSING: Final = ("nack", "internal_error", "close_channel", "force_close", "drop_before", "drop_after")
CLOUD: Final = "memory://cloud"
#: the text of a message in its payload
_TEXT: Final = re.compile(rb"device-\d+:\d+")
#: what the journal of a route logs of a damaged end
_DAMAGED_END: Final = re.compile(r"/routes/([\w-]+): segment \d+ is damaged .* it held at most (\d+) records")


class CloudKeeper(Keeper):
    """Keeps the other broker of ``memory://``."""

    def open(self) -> None:
        """Connect."""
        import messaging

        self.m = messaging.connect(CLOUD)


class GatewayWorld(Simulation):
    """Devices, a gateway, and a receiver."""

    name = "gateway"

    def begin(self) -> None:
        """See ``Simulation``."""
        options, faults = self.plan.options, self.plan.faults
        self.ledger = Ledger()
        names = {fault.name for fault in faults}
        self.has_disk_faults = bool(names & DISK_FAULTS)
        self.is_changing = False
        self.restarts = 0
        self.depth = -1
        self.reports: dict[str, RouteDTO] = {}
        self.problems: list[str] = []
        self._epochs: dict[str, int] = {}
        #: by kind: routes that are subscribed for certain
        self._covering: dict[str, dict[str, None]] = {}
        self.breaks: dict[str, Breaks] = {}
        for site in self.sites:
            self.breaks[site.host] = made = Breaks(site.broker, self.world.scheduler)
            site.service.broker = made
        if self.protocol == "memory":
            self.roles.append(Keeper(self, "keeper"))
        else:
            self._count_copies(self.sites[0].broker)
        if options["target"] == "memory":
            self.roles.append(CloudKeeper(self, "cloud-keeper"))
        self.roles.append(Receiver(self, "receiver"))
        self.gateway = GatewayRole(self, "gateway")
        self.roles.append(self.gateway)
        self.roles += [Device(self, f"device-{number + 1}") for number in range(options["devices"])]

    def _count_copies(self, broker: Any) -> None:
        """Count how often the devices' broker takes each message, but for those that are equal."""

        def take(payload: bytes) -> None:
            found = _TEXT.search(payload)  # in JSON, or in an envelope
            if found is not None and (sent := self.ledger.sent.get(found[0].decode())) is not None:
                sent.copies += 1

        if isinstance(broker, MqttBroker):
            broker.on_accepted = lambda _client_id, _topic, payload, _qos: take(payload)
        else:
            broker.on_accepted = lambda _exchange, _key, body: take(body)

    # --- the configuration

    def cloud_url(self) -> str:
        """Return the URL of the other broker."""
        return CLOUD if self.plan.options["target"] == "memory" else self.url_of(self.sites[-1])

    def routes_of(self, variant: dict[str, Any]) -> list[str]:
        """Return the names of the routes of a variant of the configuration."""
        names = [each for each in self.plan.options["routes"] if each != "data"]
        data = {"here": ["data"], "renamed": [OTHER], "both": ["data", OTHER], "gone": [], "disabled": ["data"]}
        return [*data[variant["data"]], *names]

    def final(self, variant: dict[str, Any]) -> dict[str, Any]:
        """Return the variant with all routes that there ever were."""
        final = {**variant, "data": self.plan.options["final"], "rate": None, "mends": False}
        return {**final, "retain": "keep"} if "retain" in final else final

    def settings(self, variant: dict[str, Any], folder: Path) -> dict[str, Any]:
        """Return the configuration of a variant."""
        options = self.plan.options
        plant = {**options["plant"], "url": self.url(), "reconnect_max": variant["plant"]}
        cloud = {**options["cloud"], "url": self.cloud_url(), "reconnect_max": variant["cloud"]}
        for each, protocol in ((plant, self.protocol), (cloud, options["target"])):
            if protocol == "memory":
                del each["reconnect_max"]
        return {
            "name": "gw",
            "data": str(folder),
            "instances": {"plant": plant, "cloud": cloud},
            "routes": {name: self._route(name, variant) for name in self.routes_of(variant)},
            "drain_timeout": options["drain_timeout"],
        }

    def _route(self, name: str, variant: dict[str, Any]) -> dict[str, Any]:
        options = self.plan.options
        kind = self.kind_of(name)
        source: dict[str, Any] = {"instance": "plant", "channel": f"plant/{{device}}/{kind}"}
        target: dict[str, Any] = {"instance": "cloud", "channel": f"cloud/{name}/{{device}}"}
        if not self.protocol.startswith("mqtt"):
            source["queue"] = f"gw-{name}"
        else:
            source["qos"] = options["source_qos"]
        if options["target"].startswith("mqtt"):
            target["qos"] = options["target_qos"]
        route = {"from": source, "to": target, "buffer": {**options["buffers"][kind]}}
        if kind == "data":
            source["prefetch"] = variant["prefetch"]
            route["enabled"] = variant["data"] != "disabled"
            route["priority"] = variant["priority"]
            route["buffer"]["in_flight"] = variant["in_flight"]
            if variant["is_moved"]:
                target["channel"] = f"cloud/{name}-moved/{{device}}"
            if variant["rate"] is not None:
                route["rate"] = {"messages": variant["rate"], "burst": 1}
        elif kind == "state" and options["target"].startswith("mqtt"):
            target["retain"] = variant.get("retain", "keep")
        elif kind == "batch":
            route["batch"] = {"count": options["batch"], "delay": options["batch_delay"]}
        elif kind == "objects":
            route["where"] = "(quality=good)"
            route["transform"] = [
                {"rename": {"t": "temperature"}},
                {"unit": {"field": "temperature", "from": "degF", "to": "degC"}},
                {"set": {"site": "{device}"}},
            ]
            if variant["mends"]:  # what is broken passes as it is
                del route["transform"][1]
        return route

    @staticmethod
    def kind_of(route: str) -> str:
        """Return the kind of the messages of a route."""
        return "data" if route == OTHER else route

    def touched(self, now: dict[str, Any], after: dict[str, Any]) -> list[str]:
        """Return the routes that do not go on: those that are gone, disabled, or have another source.

        With MQTT 5 the subscription of a route whose ``retain`` changes is made again: "the broker receives it between
        the two packets: lost" (``docs/mqtt.md``).
        """
        found = []
        for name, route in now["routes"].items():
            other = after["routes"].get(name)
            if (
                other is None
                or (route.get("enabled", True) and not other.get("enabled", True))
                or now["instances"]["plant"] != after["instances"]["plant"]
                or (self.protocol == "mqtt5" and route["to"].get("retain") != other["to"].get("retain"))
            ):
                found.append(name)
        return found

    # --- which kinds are subscribed for certain

    def epoch(self, kind: str) -> int:
        """Return the number of the present time in which a kind is subscribed; -1: it may not be."""
        return self._epochs.get(kind, 0) if self._covering.get(kind) else -1

    def cover(self, route: str) -> None:
        """Note that a route is subscribed."""
        self._covering.setdefault(self.kind_of(route), {})[route] = None

    def lose_cover(self, route: str) -> None:
        """Note that a route may not be subscribed any more."""
        kind = self.kind_of(route)
        covering = self._covering.get(kind)
        if covering:
            covering.pop(route, None)
            if not covering:
                self._epochs[kind] = self._epochs.get(kind, 0) + 1

    # --- judging

    def has_lost(self, device: str, since: float) -> bool:
        """Return whether a device has lost a connection, or a channel of it, since a moment."""
        breaks = self.breaks.get(self.sites[0].host) if self.protocol != "memory" else None
        now = self.world.scheduler.now
        return breaks is not None and (breaks.between(device, since, now) or breaks.ended_between(device, since, now))

    def unexpected(self, role: Role, what: str, error: MessagingError) -> None:
        """Note an error that a fault of the disk explains; report any other."""
        role.note(f"{what}: {type(error).__name__}: {error}"[:300])
        if not self.has_disk_faults:
            self.broken(
                f"{role.name}: {what} failed without a fault of the disk: {type(error).__name__}: {error}"[:400]
            )

    @property
    def carries_ids(self) -> bool:
        """Return whether messages have ids at the target."""
        target = self.plan.options["target"]
        return target in ("mqtt5", "amqp") or bool(self.plan.options["cloud"].get("envelope"))

    def _is_missing(self, text: str, sent: Sent) -> bool:
        if sent.state != "confirmed" or not sent.is_owed or sent.is_filtered or text.startswith(EQUAL):
            return False
        return not self.ledger.is_there(text) and not self._may_be_lost(sent)

    def _may_be_lost(self, sent: Sent) -> bool:
        if sent.kind == "bounded":
            return True  # counted: see ``_check_bounded``
        if sent.kind in self.plan.options["may_expire"]:
            return True
        return bool(self.plan.options["may_lose"])

    def _equal_missing(self) -> int:
        """Return how many equal messages are missing at least."""
        owed = [each for each in self.ledger.equal() if each.state == "confirmed" and each.is_owed]
        if any(map(self._may_be_lost, owed)):
            return 0
        if self.carries_ids:
            arrived = sum(len(self.ledger.equal_ids(route)) for route in ("data", OTHER))
        else:
            arrived = sum(len(self.ledger.arrived.get((route, EQUAL), ())) for route in ("data", OTHER))
        return len(owed) - arrived

    def is_at_rest(self) -> bool:
        """See ``Simulation``."""
        if not self.gateway.is_resting or self.depth or any(each.state == "sent" for each in self.ledger.sent.values()):
            return False
        if self._equal_missing() > 0 or self._bounded_missing() > 0 or not self._is_mirrored():
            return False
        return not any(self._is_missing(text, sent) for text, sent in self.ledger.sent.items())

    def judge(self) -> None:
        """See ``Simulation``."""
        ledger = self.ledger
        if self.depth:
            self.broken(f"the buffers hold {self.depth} messages: {self.problems}")
        for text, sent in ledger.sent.items():
            if sent.state == "sent":
                self.broken(f"the promise of {text} has no outcome")
            elif self._is_missing(text, sent):
                self.broken(f"{text} is lost: {sent}")
            elif ledger.is_there(text) and sent.state not in ("confirmed", *OPEN_OUTCOMES, "PublishRefusedError"):
                self.broken(f"{text} arrived although its promise failed with {sent.state}")
        missing = self._equal_missing()
        if missing > 0:
            self.broken(f"{missing} of the equal messages are lost")
        if not self._is_mirrored():
            self.broken(f"the retained state is not mirrored: {self._states(0)} is {self._states(1)}")
        self._check_ids()
        self._check_order()
        self._check_repeated()
        self._check_counters()
        self._check_bounded()

    def _check_ids(self) -> None:
        if not self.carries_ids or self.protocol == "memory":  # its messages have no ids
            return
        # MQTT 3.1.1 makes none, an envelope only carries those that devices give
        has_own_ids = self.protocol != "mqtt311"
        for (route, text), arrivals in self.ledger.arrived.items():
            if text == EQUAL:
                most = sum(1 + each.may_repeat + each.forgotten for each in self.ledger.equal())
                found = len({each.message_id for each in arrivals})
                if not has_own_ids and found > most:
                    self.broken(f"{found} equal messages have arrived by {route}, of {most}")
                continue
            if route == "state":
                continue  # a new subscription gets retained messages again
            sent = self.ledger.sent[text]
            ids = {each.message_id: None for each in arrivals}
            if route == "batch":  # it has an id of its own; a message that a device sends again is none that it knows
                if len(ids) > 1 and not self._may_have_two_ids(sent):
                    self.broken(f"{text} is in {len(ids)} batches: {[*ids]}")
                continue
            if None in ids:
                self.broken(f"{text} arrived by {route} without an id")
            if len(ids) > 1 and (has_own_ids or not self._may_have_two_ids(sent)):
                self.broken(f"{text} arrived by {route} with {len(ids)} ids: {[*ids]}")

    def _may_have_two_ids(self, sent: Sent) -> bool:
        """Return whether the devices' broker has a message twice, or the gateway cannot know that it had it."""
        return sent.may_repeat or sent.qos == 0 or sent.forgotten > 0

    def _check_order(self) -> None:
        if self.plan.options["may_reorder"]:
            return
        last: dict[tuple[str, str, int], int] = {}
        for route, text in self.ledger.arrived:
            sent = self.ledger.sent.get(text)
            if sent is None or route in ("state", "newest") or sent.is_bad or text in self.ledger.dead:
                continue
            # only messages of one quality of service are in order [MQTT-4.6.0-6]
            key = route, sent.device, sent.qos
            if sent.number < last.get(key, -1):
                self.broken(f"{text} arrived by {route} for the first time behind {sent.device}:{last[key]}")
                return
            last[key] = sent.number

    def _check_repeated(self) -> None:
        """At most as many messages as are in flight come twice after a crash, or a loss of the link.

        "Copies that a device itself sends again pass": see ``Ledger.repeated``.
        """
        if not self.plan.options["counts_repeated"] or self.has_disk_faults:
            return  # "a crash now makes more duplicates", says the log where a position cannot be written
        losses = self.restarts
        if self.sites and self.plan.options["target"] != "memory":
            breaks = self.breaks[self.sites[-1].host]
            # with memory:// gateway and receiver are in one process, and nothing tells whose connection it was
            receiver = "program" if self.protocol == "memory" else "receiver"
            for times in (breaks.times, breaks.ended):
                if times.get(receiver):
                    return
                losses += len(times.get("gateway", ()))
        for route in ("data", OTHER, "objects", "newest"):
            most = self.plan.options["most_in_flight"] if self.kind_of(route) == "data" else 20
            repeated = self.ledger.repeated(route)
            if repeated > losses * most:
                self.broken(f"{repeated} messages came twice by {route}, after {losses} losses of at most {most}")

    def _check_counters(self) -> None:
        for route in self.reports.values():
            imbalance = self.gateway.imbalance(route)
            if imbalance:
                self.broken(f"the counters of {route.name} differ by {imbalance}: {route}, {self.gateway.depths}")
            kind = self.kind_of(route.name)
            is_bounded = kind == "bounded" or kind in self.plan.options["may_expire"]
            most = self._most_unwritten(kind) + self._most_in_damaged_ends(route.name)
            if route.buffer.dropped > most and not is_bounded:
                self.broken(f"{route.name} has dropped {route.buffer.dropped} messages, and has room: {route}")

    def _most_unwritten(self, kind: str) -> int:
        """Return how many records of a kind a loss of power may have taken, at most.

        "Those that the next start finds missing count as dropped, also where the target has them and the gateway had
        not recorded that yet" (``docs/gateway.md``).
        """
        sent = [each for each in self.ledger.sent.values() if each.kind == kind and each.forgotten]
        return sum(max(each.copies, 1 + each.may_repeat) for each in sent)

    def _most_in_damaged_ends(self, route: str) -> int:
        """Return how many records the damaged ends of a buffer can have held.

        "Of a damaged end as many count as it can have held": nothing tells what a loss of power has left of a write
        that had not ended from what it has left of stored records (``docs/gateway.md``).
        """
        found = [_DAMAGED_END.search(what) for _, _, what in self.world.history]
        return sum(int(end[2]) for end in found if end is not None and end[1] == route)

    def _bounded_missing(self) -> int:
        """Return how many messages of a bounded buffer are missing, and not counted.

        The counter begins with each start. What the target has confirmed is on its way to the receiver for a time.
        """
        route = self.reports.get("bounded")
        if route is None or self.restarts or "bounded" not in self.gateway.counted:
            return 0
        missing = [
            text for text, sent in self.ledger.sent.items()
            if sent.kind == "bounded" and sent.is_owed and not self.ledger.is_there(text)
        ]  # fmt: skip
        return len(missing) - route.buffer.dropped

    def _check_bounded(self) -> None:
        """What is missing of a bounded buffer is counted."""
        missing = self._bounded_missing()
        if missing > 0:
            self.broken(f"{missing} messages of a bounded buffer are missing, and not counted")

    # --- faults

    def fault_kill(self, role: str, seconds: float, vanishes: bool) -> None:
        """See ``Simulation``: a loss of power may take records that the disk does not have yet."""
        if vanishes and self.gateway.name == role and self.gateway.process.is_alive:
            # "the records that it has not written are lost" (``docs/journal.md``), and with them the packet identifiers
            # by which the gateway recognises what "the source's broker sends again" (``docs/gateway.md``)
            for sent in self.ledger.sent.values():
                sent.forgotten += self.plan.options["buffers"][sent.kind].get("fsync", "always") != "always"
        super().fault_kill(role, seconds, vanishes)

    # --- retained states

    def _states(self, site: int) -> dict[str, bytes]:
        broker = self.sites[site].broker
        assert isinstance(broker, MqttBroker)
        found = {}
        for message in broker.retained:
            levels = message.topic.split("/")
            if "state" in levels:
                found[levels[2] if site else levels[1]] = message.payload
        return found

    def _is_mirrored(self) -> bool:
        """Return whether the target has the states that the devices' broker has."""
        options = self.plan.options
        if not options["mirrors"] or self.has_disk_faults:
            return True  # "in the order in which they were stored": what the disk refused is stored behind newer ones
        target = self._states(1)
        for device, payload in self._states(0).items():
            text = payload.rstrip(b".").decode()
            sent = self.ledger.sent[text]
            later = [
                each for each in self.ledger.sent.values()
                if each.device == device and each.kind == "state" and each.number > sent.number
            ]  # fmt: skip
            is_owed = sent.state == "confirmed" and sent.is_owed
            # it may be in an envelope
            if is_owed and not later and not target.get(device, b"").rstrip(b".").endswith(text.encode()):
                return False
        return True

    # --- plans

    @classmethod
    def make_plan(cls, random: random.Random, protocol: str) -> Plan:
        """See ``Simulation``."""
        targets = ("mqtt311", "mqtt5", "mqtt5", "amqp")
        target = random.choice((*targets, "memory", "memory")) if protocol == "memory" else random.choice(targets)
        routes = [
            "data",
            *random.sample(("state", "objects", "bounded", "batch", "newest"), random.choice((0, 1, 1, 2))),
        ]
        devices = random.choice((1, 1, 2))
        in_flight = random.choice((1, 2, 5, 20, 1000))
        is_small = random.random() < 0.4
        buffers = {
            kind: {
                "full": "block",
                "in_flight": 20,
                "fsync": "always",
                **({"max_bytes": random.choice((16_384, 32_768))} if is_small else {}),
            }
            for kind in ("data", "state", "objects", "batch", "newest")
        }
        buffers["newest"]["order"] = "newest_first"
        for kind in ("data", "objects", "newest"):
            if random.random() < 0.3:
                # "a full disk: the source is held back until there is room, whatever `full` says"
                buffers[kind]["full"] = random.choice(("drop_oldest", "drop_newest"))
                buffers[kind]["max_bytes"] = 2**24
            if random.random() < 0.2:
                buffers[kind]["max_age"] = 7200.0
        buffers["bounded"] = {
            "full": random.choice(("block", "drop_oldest", "drop_newest")),
            "max_bytes": random.choice((4096, 16_384)),
            "in_flight": 20,
        }
        if random.random() < 0.3:
            buffers["bounded"]["max_age"] = random.choice((1.0, 20.0))
        variant = {
            "data": "here", "is_moved": False, "rate": None, "in_flight": in_flight, "priority": 4, "plant": 5.0,
            "cloud": 5.0, "prefetch": random.choice((1, 5, 100, 1024)), "mends": False,
        }  # fmt: skip
        steps: list[Step] = []
        for number in range(devices):
            steps += cls._device_steps(random, f"device-{number + 1}", protocol, routes)
        gateway = cls._gateway_steps(random, variant)
        steps += gateway
        steps += cls._receiver_steps(random)
        variants = [variant, *(step.arguments["variant"] for step in gateway if step.name == "reload")]
        is_renamed = any(each["data"] in ("renamed", "both") for each in variants)
        faults = cls._faults(random, protocol, target, [f"device-{number + 1}" for number in range(devices)])
        names = {fault.name for fault in faults}
        loses_power = any(
            fault.name == "kill" and fault.arguments["vanishes"] and fault.arguments["role"] == "gateway"
            for fault in faults
        )
        if random.random() < 0.2:
            buffers["data"]["fsync"] = random.choice(("interval", "never"))
        # the devices' broker of memory:// has no site
        target_site = 0 if protocol == "memory" else 1
        at_target = [
            fault for fault in faults
            if fault.arguments.get("site") == target_site and (fault.name == "broker" or fault.name == "restart_broker")
        ]  # fmt: skip
        is_weak = buffers["data"]["fsync"] != "always"
        starts = "kill" in names or any(step.name == "reopen" for step in gateway)
        # "after a restart their age comes from the wall clock"
        may_expire = [kind for kind, each in buffers.items() if "max_age" in each and starts and "wall_clock" in names]
        envelope = {"envelope": True}
        options = {
            **scheduling(random),
            "others": (target,) if target != "memory" else (),
            "target": target,
            "routes": routes,
            "devices": devices,
            "buffers": buffers,
            "batch": random.choice((2, 10, 500)),
            "variant": variant,
            "final": "both" if is_renamed else "here",
            "drain_timeout": random.choice((0.1, 1.0, 10.0)),
            "timeout": random.choice((20.0, 60.0, 600.0)),
            "source_qos": random.choice((1, 1, 2)),
            "target_qos": random.choice((1, 1, 2)),
            "most_in_flight": max(each["in_flight"] for each in variants),
            "device": cls._instance(random, protocol),
            "plant": cls._instance(random, protocol),
            "cloud": cls._instance(random, target),
            "receiver": cls._instance(random, target),
            "may_lose": is_weak and loses_power,
            "may_expire": may_expire,
            # "in the order in which they were stored": a message that the disk refused is stored behind others
            "may_reorder": bool(at_target)
            or ("amqp" in (protocol, target) and cls._may_hold_back(faults))
            or any(each != variant for each in variants)
            or bool({"failing_sync", "failing_write"} & names),
            "counts_repeated": not at_target and not any(step.name == "replay" for step in gateway),
            "mirrors": "state" in routes and protocol == "mqtt5" and target.startswith("mqtt"),
        }
        if protocol == "mqtt311" and random.random() < 0.4:
            options["device"] |= envelope
            options["plant"] |= envelope
        if target == "mqtt311" and random.random() < 0.7:
            options["cloud"] |= envelope
            options["receiver"] |= envelope
        if "state" in routes and random.random() < 0.6:
            steps = [cls._with_retain(random, step) for step in steps]
        options["batch_delay"] = random.choice((0.5, 0.5, 5.0))
        return Plan(options, tuple(steps), tuple(faults))

    @staticmethod
    def _may_hold_back(faults: list[Fault]) -> bool:
        """Return whether an AMQP broker may keep messages for a connection that is gone, and deliver them later."""
        return any(
            fault.arguments.get("vanishes") or fault.name in ("black_hole", "stall", "broker") for fault in faults
        )

    @staticmethod
    def _instance(random: random.Random, protocol: str) -> dict[str, Any]:
        if protocol == "memory":
            return {}
        if protocol == "amqp":
            return {"heartbeat": random.choice((2, 10, 60))}
        settings: dict[str, Any] = {"keepalive": random.choice((2, 10, 60)), "keep_session": True}
        return settings

    @staticmethod
    def _device_steps(random: random.Random, name: str, protocol: str, routes: list[str]) -> list[Step]:
        steps = []
        kinds = [*routes, *routes, "data", "equal"]
        for _ in range(random.randint(12, 24)):
            chosen = random.random()
            if chosen < 0.6:
                kind = random.choice(kinds)
                qos = random.choice((1, 1, 1, 2, 2, 0)) if protocol.startswith("mqtt") else 1
                count = random.choice((1, 1, 2, 5, 20))
                size = random.choice((0, 0, 40, 400, 3000 if kind == "bounded" else 400))
                steps.append(Step(name, "publish", {"kind": kind, "count": count, "size": size, "qos": qos}))
            elif chosen < 0.85:
                steps.append(Step(name, "pause", {"seconds": span(random, 1e-3, 5.0)}))
            elif chosen < 0.95:
                steps.append(Step(name, "wait", {}))
            else:
                steps.append(Step(name, "reopen", {}))
        return steps

    @staticmethod
    def _receiver_steps(random: random.Random) -> list[Step]:
        steps = []
        for _ in range(random.randint(2, 5)):
            steps.append(Step("receiver", "pause", {"seconds": span(random, 1e-2, 5.0)}))
            steps.append(Step("receiver", "slow", {"seconds": random.choice((0.0, 0.0, span(random, 1e-3, 0.1)))}))
        return steps

    @staticmethod
    def _gateway_steps(random: random.Random, variant: dict[str, Any]) -> list[Step]:
        steps = []
        reloads = random.random() < 0.6
        changes: dict[str, Any] = {
            "data": ("here", "here", "renamed", "both", "gone", "disabled"),
            "is_moved": (False, True),
            "rate": (None, 3.3, 50.0),
            "in_flight": (1, 5, 20),
            "priority": (0, 4, 9),
            "plant": (5.0, 1.0),
            "cloud": (5.0, 1.0),
            "prefetch": (1, 5, 100),
            "mends": (False, True),
        }
        for _ in range(random.randint(8, 16)):
            chosen = random.random()
            if chosen < 0.4:
                steps.append(Step("gateway", "pause", {"seconds": span(random, 1e-3, 5.0)}))
            elif chosen < 0.7:
                if reloads:
                    for key in random.sample([*changes], random.choice((0, 1, 1, 2))):
                        variant = {**variant, key: random.choice(changes[key])}
                    way = random.choice(("call", "call", "control"))
                    steps.append(Step("gateway", "reload", {"variant": variant, "way": way}))
            elif chosen < 0.75:
                steps.append(Step("gateway", "refused", {}))
            elif chosen < 0.82:
                steps.append(Step("gateway", "status", {}))
            elif chosen < 0.88:
                steps.append(Step("gateway", "replay", {}))
            else:
                timeout = random.choice((None, 0.0, span(random, 1e-3, 5.0)))
                steps.append(Step("gateway", "reopen", {"timeout": timeout}))
        return steps

    @staticmethod
    def _with_retain(random: random.Random, step: Step) -> Step:
        if step.name != "reload":
            return step
        variant = {**step.arguments["variant"], "retain": random.choice(("keep", "never"))}
        return Step(step.role, step.name, {**step.arguments, "variant": variant})

    @classmethod
    def _faults(cls, random: random.Random, protocol: str, target: str, devices: list[str]) -> list[Fault]:
        if random.random() < 0.1:
            return []
        sites = [] if protocol == "memory" else [0, 1]
        if protocol == "memory" and target != "memory":
            sites = [0]
        kinds = [protocol, target] if protocol != "memory" else [target]

        def site() -> int:
            return random.choice(sites)

        def broker() -> tuple[str, dict[str, Any]]:
            chosen = site()
            faults = AMQP_FAULTS if kinds[chosen] == "amqp" else MQTT_FAULTS
            return "broker", {"site": chosen, "seconds": span(random, 0.1, 20.0), **random.choice(faults)}

        roles = ["gateway", "gateway", "gateway", *devices, "receiver"]
        makers: list[Any] = [
            lambda: ("slow_sync", {"seconds": span(random, 0.1, 10.0), "longest": span(random, 0.01, 1.0)}),
            lambda: ("full_disk", {"seconds": span(random, 0.05, 30.0), "left": random.choice((0, 100, 1000, 10_000))}),
            lambda: ("failing_sync", {"count": random.choice((1, 1, 3))}),
            lambda: ("failing_write", {"count": random.choice((1, 1, 3))}),
            lambda: ("wall_clock", {"role": "gateway", "offset": random.choice((-3600.0, -5.0, 5.0, 86_400.0))}),
        ]
        if random.random() < 0.6:
            makers = [makers[0], makers[-1]]  # what holds without a fault of the disk is more
        if sites:
            makers += [
                *[lambda: ("cut", {"role": random.choice(roles), "site": site()})] * 4,
                *[lambda: ("black_hole", {"role": random.choice(roles), "site": site(),
                                          "seconds": span(random, 0.01, 60.0)})] * 4,
                lambda: ("stall", {"role": random.choice(roles), "site": site(), "seconds": span(random, 0.01, 10.0)}),
                lambda: ("refuse", {"site": site(), "seconds": span(random, 0.01, 20.0)}),
                lambda: ("silence", {"site": site(), "seconds": span(random, 0.01, 20.0)}),
                lambda: ("slow_network", {
                    "seconds": span(random, 0.1, 20.0), "longest": span(random, 0.001, 1.0),
                    "piece": random.choice((1, 3, 50, 65_536)),
                }),
                *[lambda: ("restart_broker", {"site": site(), "seconds": span(random, 0.01, 10.0),
                                              "is_kill": random.random() < 0.5})] * 3,
                *[broker] * 3,
            ]  # fmt: skip
        if protocol != "memory":
            makers += [
                lambda: ("kill", {"role": random.choice(roles), "seconds": span(random, 0.01, 10.0),
                                  "vanishes": random.random() < 0.4}),
            ] * 8  # fmt: skip
        faults = []
        for _ in range(random.choice((1, 2, 2, 3, 3, 4, 6))):
            name, arguments = random.choice(makers)()
            faults.append(Fault(span(random, 1e-2, 20.0), name, arguments))
        if protocol != "memory" and random.random() < 0.4:
            # the gateway stores and publishes what its source does not hear of
            at = span(random, 0.02, 5.0)
            seconds = span(random, 0.05, 5.0)
            faults.append(Fault(at, "stall", {"role": "gateway", "site": 0, "seconds": seconds}))
            end = at + span(random, 0.01, 1.0)
            if random.random() < 0.8:
                arguments = {"role": "gateway", "seconds": span(random, 0.01, 1.0), "vanishes": random.random() < 0.3}
                faults.append(Fault(end, "kill", arguments))
            else:
                faults.append(Fault(end, "cut", {"role": "gateway", "site": 0}))
        return sorted(faults, key=lambda fault: fault.at)
