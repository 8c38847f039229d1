"""Who may publish to a bus, and who may receive (157.8). Permissions themselves (157.9.2): ``tests/dispatch``."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from messaging.errors import ArgumentError, InvalidTopicError, NullEventError, PermissionDeniedError
from messaging.services import ServiceRegistry
from messaging.testing.tables import table
from messaging.testing.waiting import PATIENCE
from messaging.typedevent import (
    RangePolicy,
    TopicPermission,
    TopicPolicy,
    TypedEventHandler,
    UnhandledEventHandler,
    UntypedEventHandler,
    topic_of,
)
from tests.dispatch.helpers import renewed
from tests.typedevent.conftest import Bus, Recorder, register

PUBLISH, SUBSCRIBE = TopicPermission.PUBLISH, TopicPermission.SUBSCRIBE
BOTH = "publish,subscribe"


# --- on a bus (157.8.2)


@dataclasses.dataclass
class Order:
    n: int


ORDERS = topic_of(Order)


class World(Bus):
    """A bus where one principal may do this, and another one that."""

    def __init__(self) -> None:
        self.policy = TopicPolicy(
            {
                "producer": [TopicPermission("*", PUBLISH)],
                "meter": [TopicPermission("meters/*", PUBLISH), TopicPermission(ORDERS, PUBLISH)],
                "clerk": [TopicPermission("public/*", SUBSCRIBE)],
                None: [TopicPermission("free", BOTH)],
            }
        )
        super().__init__(ServiceRegistry(), permissions=self.policy)

    def produce(self, *events: str) -> None:
        """Publish as a principal that may publish everything; ``"a 1"`` is event 1 on topic ``a``."""
        self.numbered(*events, principal="producer")
        self.drain()

    def handle(self, interface: type[Any], topics: Any, principal: str | None, **properties: Any) -> Recorder:
        if interface is TypedEventHandler:
            properties["type"] = Order
        handler = Recorder()
        register(interface, self.services, handler, topics, principal=principal, **properties)
        return handler


#: gives each row of a table a world of its own
own_world = renewed("world", World)


@pytest.fixture
def world() -> Iterator[World]:
    with World() as world:
        yield world


@table("way", ["deliver", "mapping", "deliver_untyped", "create_publisher"])
@own_world
def test_event_sources_require_permission_for_each_topic_they_publish_to(world: World, way: str) -> None:
    """157.8.1, 157.8.2, 157.9.2.3: whichever way; a permission to receive is none to publish."""
    bus = world
    world.policy.grant("reader", TopicPermission("*", SUBSCRIBE))
    handler = world.handle(UntypedEventHandler, "*", "reader")

    def publish(topic: str, number: int, principal: str | None) -> None:
        if way == "deliver":
            bus.deliver(Order(number), topic, principal=principal)
        elif way == "mapping":
            bus.deliver({"n": number}, topic, principal=principal)
        elif way == "deliver_untyped":
            bus.deliver_untyped(topic, {"n": number}, principal=principal)
        else:
            with bus.create_publisher(topic, Order, principal=principal) as publisher:
                publisher.deliver(Order(number))

    publish("meters/a", 1, "meter")
    publish("free", 2, None)
    for topic, principal, who in (
        ("meters", "meter", "the principal 'meter'"),
        ("other", "meter", "the principal 'meter'"),
        ("meters/a", None, "a caller without a principal"),
        ("meters/a", "stranger", "the principal 'stranger'"),
        ("free", "stranger", "the principal 'stranger'"),
        ("public/a", "clerk", "the principal 'clerk'"),  # may only receive
    ):
        with pytest.raises(PermissionDeniedError, match=f"{bus.name!r}: {who} may not publish '{topic}'"):
            publish(topic, 3, principal)
    bus.drain()
    assert handler.numbered == ["meters/a 1", "free 2"]


def test_default_topics_require_permission_too(world: World) -> None:
    """157.8.2."""
    bus = world
    got: list[Order] = []
    world.policy.grant("reader", TopicPermission(ORDERS, SUBSCRIBE))
    bus.on(Order, handler=got.append, type=Order, principal="reader")
    bus.deliver(Order(1), principal="meter")
    bus.create_publisher(Order, principal="meter").deliver(Order(2))
    for principal in (None, "clerk"):
        with pytest.raises(PermissionDeniedError):
            bus.deliver(Order(3), principal=principal)
        with pytest.raises(PermissionDeniedError):
            bus.create_publisher(Order, principal=principal)
    bus.drain()
    assert got == [Order(1), Order(2)]


def test_an_invalid_topic_is_reported_before_a_denied_permission(world: World) -> None:
    with pytest.raises(InvalidTopicError):
        world.deliver_untyped("a//b", {})
    with pytest.raises(InvalidTopicError):
        world.create_publisher("a/*")
    with pytest.raises(NullEventError):
        world.deliver(None, "secret")


def test_a_publisher_is_checked_when_it_is_made_and_not_again(world: World) -> None:
    """157.3.4: must be checked during ``create_publisher``, and should not for each delivery."""
    world.policy.grant("reader", TopicPermission("*", SUBSCRIBE))
    handler = world.handle(UntypedEventHandler, "*", "reader")
    publisher = world.create_publisher("meters/a", principal="meter")
    world.policy.revoke("meter")
    publisher.deliver(Order(1))
    publisher.deliver_untyped({"n": 2})
    with pytest.raises(PermissionDeniedError):
        world.create_publisher("meters/a", principal="meter")
    world.drain()
    assert handler.numbered == ["meters/a 1", "meters/a 2"]


@table("interface", [TypedEventHandler, UntypedEventHandler, UnhandledEventHandler])
@own_world
def test_event_consumers_require_permission_for_each_topic_they_are_notified_of(
    world: World, interface: type[Any]
) -> None:
    """157.8.2: whatever a handler asks for, it gets what it may; there is nothing wrong with asking."""
    topics = [["public/a", "secret"], ["*"], ["+/a", "secret", "+"], ["public/*"]]
    handlers = [world.handle(interface, each, "clerk") for each in topics]
    unnamed = world.handle(interface, "*", None)
    strangers = world.handle(interface, "*", "stranger")
    publishers = world.handle(interface, "*", "producer")
    world.produce("public/a 1", "secret 2", "public/b 3", "public 4", "secret/a 5", "free 6")
    assert [each.numbered for each in handlers] == [
        ["public/a 1"], ["public/a 1", "public/b 3"], ["public/a 1"], ["public/a 1", "public/b 3"],
    ]  # fmt: skip
    assert unnamed.numbered == ["free 6"]
    assert strangers.numbered == publishers.numbered == []


def test_an_event_that_no_handler_may_have_is_unhandled(world: World) -> None:
    """157.4.4: for those handlers of unhandled events that may have it."""
    world.policy.grant("guard", TopicPermission("secret", SUBSCRIBE))
    handler = world.handle(UntypedEventHandler, "*", "clerk")
    guard = world.handle(UnhandledEventHandler, None, "guard")
    clerk = world.handle(UnhandledEventHandler, None, "clerk")
    world.produce("secret 1", "public/a 2", "public 3")
    assert (handler.numbered, guard.numbered, clerk.numbered) == (["public/a 2"], ["secret 1"], [])


def test_handlers_given_to_the_bus_are_refused_topics_they_may_not_have(world: World) -> None:
    """Exact topics, and topics made of the name of a class; a wildcard stands for the permitted topics."""
    bus, got = world, Recorder()
    for topics in (["secret"], ["public/a", "secret"], ["public/*", "public"], [Order]):
        with pytest.raises(PermissionDeniedError, match="the principal 'clerk' may not subscribe"):
            bus.on(*topics, handler=got.notify_untyped, principal="clerk")
    with pytest.raises(PermissionDeniedError, match="a caller without a principal may not subscribe"):
        bus.on(handler=got.notify, type=Order)
    with pytest.raises(PermissionDeniedError):
        bus.on_unhandled("secret", handler=got.notify_unhandled, principal="clerk")
    with pytest.raises(PermissionDeniedError):

        @bus.on("secret")
        def handle(event: dict[str, Any]) -> None: ...

    assert bus.get_dto().handlers == ()
    bus.on("*", handler=got.notify_untyped, principal="clerk")
    bus.on("free", handler=got.notify_untyped)
    bus.on_unhandled(handler=got.notify_unhandled, principal="clerk")
    world.produce("secret 1", "public/a 2", "free 3", "free/a 4")
    assert got.numbered == ["public/a 2", "free 3"]


@table("interface", [TypedEventHandler, UntypedEventHandler, UnhandledEventHandler])
@own_world
def test_granted_and_revoked_permissions_count_from_the_next_event(world: World, interface: type[Any]) -> None:
    """157.8.2: for handlers that are there already."""
    exact = world.handle(interface, "secret/a", "clerk")
    wildcard = world.handle(interface, "*", "clerk")
    late = world.handle(interface, "*", "late")
    world.produce("secret/a 1", "public/a 2")
    world.policy.grant("clerk", TopicPermission("secret/*", SUBSCRIBE))
    world.produce("secret/a 3")
    world.policy.grant("late", TopicPermission("+/a", SUBSCRIBE))
    world.produce("secret/a 4", "secret/b 5")
    world.policy.revoke("clerk")
    world.produce("secret/a 6", "public/a 7")
    assert exact.numbered == ["secret/a 3", "secret/a 4"]
    assert wildcard.numbered == ["public/a 2", "secret/a 3", "secret/a 4", "secret/b 5"]
    assert late.numbered == ["secret/a 4", "secret/a 6", "public/a 7"]


def test_publishing_is_granted_and_revoked_at_run_time(world: World) -> None:
    bus = world
    for _ in range(3):
        with pytest.raises(PermissionDeniedError):
            bus.deliver_untyped("b", {}, principal="writer")
        world.policy.grant("writer", TopicPermission("b", PUBLISH))
        bus.deliver_untyped("b", {}, principal="writer")
        world.policy.revoke("writer")


def test_past_events_are_replayed_to_handlers_with_permission_at_registration(world: World) -> None:
    """157.4.7 and 157.8.2: what they may not have does not count either."""
    world.monitor.configure_history_storage("*", RangePolicy.unlimited())
    world.produce("public/a 1", "secret 2", "public/b 3", "secret 4", "secret 5")
    history = {"history": 2}
    clerk = world.handle(UntypedEventHandler, "*", "clerk", **history)
    exact = world.handle(UntypedEventHandler, ["secret", "public/a"], "clerk", **history)
    stranger = world.handle(UntypedEventHandler, "*", "stranger", **history)
    world.policy.grant("stranger", TopicPermission("secret", SUBSCRIBE))
    later = world.handle(UntypedEventHandler, "*", "stranger", **history)
    world.drain()
    assert clerk.numbered == ["public/a 1", "public/b 3"]
    assert exact.numbered == ["public/a 1"]
    assert stranger.numbered == []
    assert later.numbered == ["secret 4", "secret 5"]


def test_a_principal_that_an_update_changes_counts_from_then_on(world: World) -> None:
    got = Recorder()
    registration = world.services.register(UntypedEventHandler, got, {"event.topics": "*", "event.principal": "clerk"})
    world.produce("public/a 1", "free 2")
    registration.update({"event.topics": "*"})
    world.produce("public/a 3", "free 4")
    assert got.numbered == ["public/a 1", "free 4"]
    assert world.get_dto().handlers[0].principal is None


def test_a_notified_handler_has_only_its_own_permissions(world: World) -> None:
    """157.8.3: neither the publisher's nor the bus's; what it does, it does by its own."""
    denied: list[PermissionDeniedError] = []

    def forward(topic: str, event: dict[str, Any]) -> None:
        try:
            world.deliver_untyped("meters/a", event)
        except PermissionDeniedError as error:
            denied.append(error)
        world.deliver_untyped("meters/b", event, principal="meter")

    world.policy.grant("reader", TopicPermission("meters/b", SUBSCRIBE))
    world.on("public/*", handler=forward, principal="clerk")
    handler = world.handle(UntypedEventHandler, "*", "reader")
    world.produce("public/a 1")
    world.produce()
    assert len(denied) == 1
    assert handler.numbered == ["meters/b 1"]


def test_without_a_policy_everything_is_permitted() -> None:
    with Bus(ServiceRegistry()) as bus:
        got = Recorder()
        bus.on("a", handler=got.notify_untyped, principal="anybody")
        bus.deliver_untyped("a", {"n": 1})
        bus.deliver(Order(2), "a", principal="somebody")
        bus.create_publisher("a", principal="else").deliver_untyped({"n": 3})
        bus.drain()
        assert got.numbered == ["a 1", "a 2", "a 3"]


BAD_PRINCIPALS = [5, b"clerk", ["clerk"], ("clerk",), True, object()]


@table("has_policy", [True, False])
@table("principal", BAD_PRINCIPALS)
def test_a_principal_of_another_type_is_refused(world: World, principal: Any, has_policy: bool) -> None:
    """Also where no permission is required: it is a mistake of the caller."""
    with Bus(ServiceRegistry()) as open_to_all:
        bus = world if has_policy else open_to_all
        calls: list[Callable[[], object]] = [
            lambda: bus.deliver(Order(1), principal=principal),
            lambda: bus.deliver(Order(1), "free", principal=principal),
            lambda: bus.deliver_untyped("free", {}, principal=principal),
            lambda: bus.create_publisher("free", principal=principal),
            lambda: bus.on("free", handler=Recorder().notify_untyped, principal=principal),
            lambda: bus.on_unhandled(handler=Recorder().notify_unhandled, principal=principal),
            lambda: bus.monitor.monitor_events(principal=principal),
            lambda: world.policy.grant(principal, TopicPermission("a", PUBLISH)),
        ]
        for call in calls:
            with pytest.raises(ArgumentError, match="principal"):
                call()
        assert bus.get_dto().handlers == ()


@table(("what", "count"), [("_ANSWERS", 2), ("_ROUTES", 1)])
def test_full_caches_do_not_bring_back_revoked_permissions(
    what: str, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A policy that changes during a query: the answer is outdated, and is not cached."""
    monkeypatch.setattr(f"messaging.dispatch.dispatcher.{what}", count)

    class Changing(TopicPolicy):
        is_next = False

        def permits(self, principal: str | None, permission: TopicPermission) -> bool:
            found = super().permits(principal, permission)
            if self.is_next and permission.actions == SUBSCRIBE:
                self.is_next = False
                self.revoke("clerk")
            return found

    policy = Changing({None: [TopicPermission("*", PUBLISH)], "clerk": [TopicPermission("*", SUBSCRIBE)]})
    with Bus(ServiceRegistry(), permissions=policy) as bus:
        got = Recorder()
        bus.on("*", handler=got.notify_untyped, principal="clerk")
        bus.deliver_untyped("a", {"n": 1})
        policy.is_next = True
        bus.deliver_untyped("b", {"n": 2})  # it was permitted when it was asked
        bus.deliver_untyped("b", {"n": 3})
        bus.send("a", {"n": 4})
        assert got.numbered == ["a 1", "b 2"]


def test_a_policy_may_use_the_bus_that_asks_it() -> None:
    """To record what it denies, say; no lock of the bus is held while it does, also where the past is asked for."""
    buses: list[Bus] = []

    class Auditing(TopicPolicy):
        def permits(self, principal: str | None, permission: TopicPermission) -> bool:
            if permission.name != "audit":
                thread = threading.Thread(target=buses[0].deliver_untyped, args=("audit", {"n": 0}), daemon=True)
                thread.start()
                thread.join(PATIENCE)
                assert not thread.is_alive()
            return super().permits(principal, permission)

    policy = Auditing({None: [TopicPermission("*", BOTH)]})
    with Bus(ServiceRegistry(), permissions=policy, history={"*": RangePolicy.unlimited()}) as bus:
        buses.append(bus)
        got = Recorder()
        seen: list[str] = []
        bus.monitor.monitor_events(10).subscribe(lambda event: seen.append(event.topic))
        bus.deliver_untyped("a", {"n": 1})
        bus.on("a", handler=got.notify_untyped, history=1)
        bus.monitor.monitor_events(10, True).subscribe(lambda event: None)
        bus.send("a", {"n": 2})
        assert got.numbered == ["a 1", "a 2"]
