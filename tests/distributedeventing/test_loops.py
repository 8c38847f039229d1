"""Loop guards in real set-ups: each event is delivered exactly once everywhere, and nothing goes round."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any
from uuid import uuid4

import pytest

import messaging
from messaging.distributedeventing import DistributedEventAdmin, EventNetwork
from messaging.eventadmin import Event, EventAdmin, EventConstants, EventHandler
from messaging.eventadmin.bridge import EventBridge
from messaging.services import ServiceRegistry
from messaging.testing.brokers import Mosquitto, require
from messaging.testing.waiting import PATIENCE, eventually
from messaging.typedevent import BusConnection, TypedEventBus

TOPIC = "loops/a"


class Corners:
    """Places where events begin and arrive, by name."""

    def __init__(self) -> None:
        self.publish: dict[str, Callable[[str], object]] = {}
        #: (corner, event) -> how often it arrived
        self.arrived: Counter[tuple[str, str]] = Counter()

    def bus(self, name: str, bus: TypedEventBus) -> None:
        """Add a typed event bus."""

        def handle(_: str, event: dict[str, Any]) -> None:
            self.arrived[name, event["key"]] += 1

        bus.on(TOPIC, handler=handle, type=dict)
        self.publish[name] = lambda key: bus.deliver_untyped(TOPIC, {"key": key})

    def event_admin(self, name: str, admin: EventAdmin) -> None:
        """Add an Event Admin."""

        def handle(event: Event) -> None:
            self.arrived[name, event.get_property("key")] += 1

        admin.services.register(EventHandler, handle, {EventConstants.EVENT_TOPIC: TOPIC})
        self.publish[name] = lambda key: admin.post_event(Event(TOPIC, {"key": key}))

    def distributed(self, name: str, admin: DistributedEventAdmin) -> None:
        """Add a distributed event admin."""

        def handle(event: Any) -> None:
            if event.kind == "data":
                self.arrived[name, event.value["key"]] += 1

        admin.on(TOPIC, handler=handle)
        self.publish[name] = lambda key: admin.publish_event(TOPIC, {"key": key})

    def check(self, rounds: int = 5) -> None:
        """Publish from every corner; each event arrives once at every corner, also after all later ones."""
        wanted: Counter[tuple[str, str]] = Counter()
        for number in range(rounds):
            for name, publish in self.publish.items():
                key = f"{name} {number}"
                publish(key)
                wanted.update((each, key) for each in self.publish)
        eventually(lambda: len(self.arrived) == len(wanted), lambda: f"missing: {sorted(wanted - self.arrived)}")
        for name, publish in self.publish.items():  # what still goes round arrives before
            publish(f"{name} end")
        ends = {(each, f"{name} end") for each in self.publish for name in self.publish}
        wanted.update(ends)
        eventually(lambda: ends <= self.arrived.keys(), lambda: f"missing: {ends - self.arrived.keys()}")
        assert self.arrived == wanted


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture(params=["memory", "mosquitto"])
def urls(request: pytest.FixtureRequest, stack: ExitStack) -> list[str]:
    """The URLs of two brokers."""
    if request.param == "memory":
        return [f"memory://loops-{uuid4().hex}" for _ in range(2)]
    require("mosquitto")
    return [stack.enter_context(Mosquitto()).url for _ in range(2)]


def connected(stack: ExitStack, bus: TypedEventBus, url: str) -> BusConnection:
    instance = stack.enter_context(messaging.connect(url))
    return stack.enter_context(bus.connect(instance, "loops/*", network=EventNetwork(heartbeat=2.0)))


def announced(*members: BusConnection | DistributedEventAdmin) -> None:
    """Wait until every member knows every other."""
    for each in members:
        each.ready.result(PATIENCE)
    for _ in range(2):  # those that begin at the same time
        for each in members:
            each.announced(PATIENCE).result(PATIENCE)


def sent(connection: BusConnection) -> int:
    return connection.get_dto().node.sent


def test_event_admins_that_are_bridged_over_buses_and_a_broker(stack: ExitStack, urls: list[str]) -> None:
    corners, connections = Corners(), []
    for side in "ab":
        services = ServiceRegistry()
        admin = stack.enter_context(EventAdmin(services))
        bus = stack.enter_context(TypedEventBus(services))
        stack.enter_context(EventBridge(admin, bus, "loops/*"))
        connections.append(connected(stack, bus, urls[0]))
        corners.event_admin(f"admin-{side}", admin)
        corners.bus(f"bus-{side}", bus)
    announced(*connections)
    corners.check(rounds=5)
    assert [sent(each) for each in connections] == [12, 12]  # its own events of two corners, and no other


def test_two_processes_that_relay_between_two_brokers(stack: ExitStack, urls: list[str]) -> None:
    corners, members, relays = Corners(), [], []
    for relay in ("r1", "r2"):
        bus = stack.enter_context(TypedEventBus(ServiceRegistry()))
        relays += [connected(stack, bus, url) for url in urls]
        corners.bus(relay, bus)
    for number, url in enumerate(urls):
        bus = stack.enter_context(TypedEventBus(ServiceRegistry()))
        members.append(connected(stack, bus, url))
        corners.bus(f"bus-{number}", bus)
        instance = stack.enter_context(messaging.connect(url))
        admin = stack.enter_context(DistributedEventAdmin(ServiceRegistry(), instance))
        members.append(admin)  # type: ignore[arg-type]
        corners.distributed(f"distributed-{number}", admin)
    announced(*relays, *members)
    corners.check(rounds=5)
    before = [sent(each) for each in relays]
    # a relay sends each event once to each broker at most
    assert all(count <= 6 * len(corners.publish) for count in before)


def test_two_brokers_that_are_bridged_by_mosquitto_itself(stack: ExitStack) -> None:
    require("mosquitto")
    far = stack.enter_context(Mosquitto())
    lines = ["connection bridge", f"address {far.host}:{far.port}", "topic # both 1", "restart_timeout 1"]
    near = stack.enter_context(Mosquitto(lines))
    corners, members = Corners(), []
    for side, broker in (("near", near), ("far", far)):
        bus = stack.enter_context(TypedEventBus(ServiceRegistry()))
        members.append(connected(stack, bus, broker.url))
        corners.bus(f"bus-{side}", bus)
        instance = stack.enter_context(messaging.connect(broker.url))
        admin = stack.enter_context(DistributedEventAdmin(ServiceRegistry(), instance))
        members.append(admin)  # type: ignore[arg-type]
        corners.distributed(f"distributed-{side}", admin)
    for each in members:
        each.ready.result(PATIENCE)
    eventually(
        lambda: all(len(each.members()) == 3 for each in members if isinstance(each, DistributedEventAdmin)),
        "the members beyond the bridge",
    )
    announced(*members)
    corners.check()


def test_a_relay_in_a_circle_of_three_brokers_ends_each_event(stack: ExitStack) -> None:
    urls = [f"memory://loops-{uuid4().hex}" for _ in range(3)]
    corners, relays = Corners(), []
    for number in range(3):
        bus = stack.enter_context(TypedEventBus(ServiceRegistry()))
        relays += [connected(stack, bus, urls[number]), connected(stack, bus, urls[(number + 1) % 3])]
        corners.bus(f"relay-{number}", bus)
    announced(*relays)
    corners.check()
