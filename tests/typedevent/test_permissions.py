"""Who may publish and who may receive (157.8, 157.9.2): permissions, and what becomes of them on a bus."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import pickle
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from messaging.dispatch.topics import parse_filter
from messaging.errors import ArgumentError, InvalidTopicError, NullEventError, PermissionDeniedError
from messaging.services import ServiceRegistry
from messaging.typedevent import (
    RangePolicy,
    TopicPermission,
    TopicPermissionCollection,
    TopicPolicy,
    TypedEventBus,
    TypedEventHandler,
    UnhandledEventHandler,
    UntypedEventHandler,
    topic_of,
)

PATIENCE = 10.0

PUBLISH, SUBSCRIBE = TopicPermission.PUBLISH, TopicPermission.SUBSCRIBE
BOTH = "publish,subscribe"


# --- permissions (157.9.2)


@pytest.mark.parametrize(
    ("one", "other", "is_implied"),
    [
        # 157.8.1, 157.9.2.7
        (("x/y/*", PUBLISH), ("x/y/z", PUBLISH), True),
        (("x/y/*", PUBLISH), ("x/y", PUBLISH), False),
        (("*", SUBSCRIBE), ("x/y", SUBSCRIBE), True),
        (("*", PUBLISH), ("x/y", SUBSCRIBE), False),
        (("*", SUBSCRIBE), ("x/y", PUBLISH), False),
        (("x/y", PUBLISH), ("x/y/z", PUBLISH), False),
        (("a/b/*", PUBLISH), ("a/b/c", PUBLISH), True),
        (("a/b/*", PUBLISH), ("x/y/z", PUBLISH), False),
        (("a/b/*", PUBLISH), ("a/b", PUBLISH), False),
        (("a/b/*", PUBLISH), ("a/b/c/d", PUBLISH), True),
        (("a/b/*", PUBLISH), ("a/bc", PUBLISH), False),
        # single-level wildcards
        (("com/+/*", PUBLISH), ("com/foo/x", PUBLISH), True),
        (("com/+/*", PUBLISH), ("com/foo", PUBLISH), False),
        (("com/+/service3", PUBLISH), ("com/+/+", PUBLISH), False),
        (("com/+/+", PUBLISH), ("com/+/service3", PUBLISH), True),
        (("com/+", PUBLISH), ("com/*", PUBLISH), False),
        (("com/*", PUBLISH), ("com/+", PUBLISH), True),
        (("+", PUBLISH), ("*", PUBLISH), False),
        # actions
        (("a", BOTH), ("a", PUBLISH), True),
        (("a", BOTH), ("a", BOTH), True),
        (("a", PUBLISH), ("a", BOTH), False),
        (("*", SUBSCRIBE), ("a", BOTH), False),
        # case
        (("a/B", PUBLISH), ("a/b", PUBLISH), False),
    ],
)
def test_what_a_permission_implies(one: tuple[str, str], other: tuple[str, str], is_implied: bool) -> None:
    """Scenarios 85 and 87."""
    assert TopicPermission(*one).implies(TopicPermission(*other)) is is_implied
    assert TopicPermissionCollection([TopicPermission(*one)]).implies(TopicPermission(*other)) is is_implied


def test_neither_action_implies_the_other() -> None:
    """157.8.1."""
    for one, other in ((PUBLISH, SUBSCRIBE), (SUBSCRIBE, PUBLISH)):
        assert not TopicPermission("a", one).implies(TopicPermission("a", other))
        assert not TopicPermission("*", one).implies(TopicPermission("a", other))


def test_a_permission_implies_those_whose_topics_are_among_its_own() -> None:
    """157.9.2.7: all filters of up to three levels, against all topics that they could match."""
    tokens = ("a", "b", "+")
    names = ["/".join(each) for count in (1, 2, 3) for each in itertools.product(tokens, repeat=count)]
    names += ["*", *(f"{each}/*" for each in names if each.count("/") < 2)]
    topics = ["/".join(each) for count in (1, 2, 3, 4) for each in itertools.product("abc", repeat=count)]
    matched = {name: {topic for topic in topics if parse_filter(name).matches(topic)} for name in names}
    for one, other in itertools.product(names, names):
        implied = TopicPermission(one, PUBLISH).implies(TopicPermission(other, PUBLISH))
        assert implied is (matched[one] >= matched[other]), (one, other)


def test_nothing_else_is_implied() -> None:
    permission = TopicPermission("*", BOTH)
    for other in (None, "a", ("a", PUBLISH), object()):
        assert not permission.implies(other)
        assert not TopicPermissionCollection([permission]).implies(other)


@pytest.mark.parametrize(
    ("given", "canonical"),
    [
        ("publish", "publish"),
        ("subscribe", "subscribe"),
        ("publish,subscribe", BOTH),
        ("subscribe,publish", BOTH),
        ("  SubScribe ,\tPUBLISH\n", BOTH),
        ("PUBLISH", "publish"),
        ("publish,publish", "publish"),
    ],
)
def test_actions_always_read_publish_subscribe(given: str, canonical: str) -> None:
    """Scenario 86; 157.9.2.5: in any case, with blanks, in either order."""
    assert TopicPermission("a", given).actions == canonical


@pytest.mark.parametrize("bad", ["", " ", ",", ",publish", "publish,", "publish,,subscribe", "publish subscribe",
                                 "publish;subscribe", "read", "publish,read", "*", "pub lish"])  # fmt: skip
def test_other_actions_are_refused(bad: str) -> None:
    """Scenario 86."""
    with pytest.raises(ArgumentError, match="actions must be 'publish', 'subscribe' or 'publish,subscribe'"):
        TopicPermission("a", bad)


@pytest.mark.parametrize("bad", [None, 5, b"publish", ["publish"]])
def test_actions_are_a_str(bad: Any) -> None:
    with pytest.raises(ArgumentError):
        TopicPermission("a", bad)


@pytest.mark.parametrize("bad", ["", " ", "a//b", "/a", "a/", "a/*/b", "a*", "+a", 5])
def test_names_that_are_no_topic_filter_are_refused(bad: Any) -> None:
    """Scenario 86; 157.9.2.3: the empty one first of all."""
    with pytest.raises(InvalidTopicError):
        TopicPermission(bad, PUBLISH)
    with pytest.raises(NullEventError):
        TopicPermission(None, PUBLISH)  # type: ignore[arg-type]


def test_permissions_are_equal_by_name_and_actions() -> None:
    """157.9.2.4, 157.9.2.6."""
    one, other = TopicPermission("a/*", BOTH), TopicPermission("a/*", "Subscribe, Publish")
    assert one == other
    assert hash(one) == hash(other)
    for different in (TopicPermission("a/+", BOTH), TopicPermission("a/*", PUBLISH), "a/*", None):
        assert one != different
    assert len({one, other, TopicPermission("a/*", PUBLISH)}) == 2


def test_a_permission_never_changes_and_can_be_copied() -> None:
    """157.9.2: thread safe."""
    permission = TopicPermission("a/*", BOTH)
    for name in ("name", "actions", "other"):
        with pytest.raises(AttributeError):
            setattr(permission, name, "b")
    assert pickle.loads(pickle.dumps(permission)) == copy.deepcopy(permission) == permission
    assert eval(repr(permission)) == permission


def test_a_collection_implies_what_its_permissions_imply_together() -> None:
    """157.9.2.8."""
    collection = TopicPermission("a", PUBLISH).new_permission_collection()
    assert isinstance(collection, TopicPermissionCollection)
    assert not collection.implies(TopicPermission("a", PUBLISH))
    for permission in (TopicPermission("a/*", PUBLISH), TopicPermission("a/b", SUBSCRIBE), TopicPermission("c", BOTH)):
        collection.add(permission)
        collection.add(permission)
    assert len(collection) == len([*collection]) == 3
    assert collection.implies(TopicPermission("a/b", BOTH))
    assert not collection.implies(TopicPermission("a/c", BOTH))
    assert not collection.implies(TopicPermission("a/+", SUBSCRIBE))
    for bad in (None, "a", object()):
        with pytest.raises(ArgumentError):
            collection.add(bad)  # type: ignore[arg-type]


# --- on a bus (157.8.2)


@dataclasses.dataclass
class Order:
    n: int


ORDERS = topic_of(Order)


class Got:
    """A handler of any kind that remembers topics and numbers."""

    def __init__(self) -> None:
        self.events: list[str] = []

    def notify(self, topic: str, event: Order) -> None:
        self.events.append(f"{topic} {event.n}")

    def notify_untyped(self, topic: str, event: dict[str, Any]) -> None:
        self.events.append(f"{topic} {event['n']}")

    notify_unhandled = notify_untyped


class World:
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
        self.services = ServiceRegistry()
        self.bus = TypedEventBus(self.services, permissions=self.policy)

    def publish(self, *events: str) -> None:
        """``"a 1"`` is event 1 on topic ``a``, published by somebody who may publish everything."""
        for event in events:
            topic, number = event.split()
            self.bus.deliver_untyped(topic, {"n": int(number)}, principal="producer")
        self.bus.flush().result(PATIENCE)

    def register(self, interface: type[Any], topics: Any, principal: str | None, **properties: Any) -> Got:
        handler = Got()
        given = {"event.topics": topics, "event.principal": principal, **properties}
        self.services.register(interface, handler, {name: each for name, each in given.items() if each is not None})
        return handler


@pytest.fixture
def world() -> Iterator[World]:
    world = World()
    with world.bus:
        yield world


@pytest.mark.parametrize("way", ["deliver", "mapping", "deliver_untyped", "create_publisher"])
def test_event_sources_require_permission_for_each_topic_they_publish_to(world: World, way: str) -> None:
    """157.8.2, 157.9.2.3: whichever way, and nothing comes of what is denied."""
    bus = world.bus
    world.policy.grant("reader", TopicPermission("*", SUBSCRIBE))
    handler = world.register(UntypedEventHandler, "*", "reader")

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
    bus.flush().result(PATIENCE)
    assert handler.events == ["meters/a 1", "free 2"]


def test_default_topics_require_permission_too(world: World) -> None:
    """157.8.2."""
    bus = world.bus
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
    bus.flush().result(PATIENCE)
    assert got == [Order(1), Order(2)]


def test_what_is_wrong_with_the_topic_is_told_before_what_is_denied(world: World) -> None:
    with pytest.raises(InvalidTopicError):
        world.bus.deliver_untyped("a//b", {})
    with pytest.raises(InvalidTopicError):
        world.bus.create_publisher("a/*")
    with pytest.raises(NullEventError):
        world.bus.deliver(None, "secret")


def test_a_publisher_is_checked_when_it_is_made_and_not_again(world: World) -> None:
    """157.3.4: must be checked during ``create_publisher``, and should not for each delivery."""
    world.policy.grant("reader", TopicPermission("*", SUBSCRIBE))
    handler = world.register(UntypedEventHandler, "*", "reader")
    publisher = world.bus.create_publisher("meters/a", principal="meter")
    world.policy.revoke("meter")
    publisher.deliver(Order(1))
    publisher.deliver_untyped({"n": 2})
    with pytest.raises(PermissionDeniedError):
        world.bus.create_publisher("meters/a", principal="meter")
    world.bus.flush().result(PATIENCE)
    assert handler.events == ["meters/a 1", "meters/a 2"]


@pytest.mark.parametrize("interface", [TypedEventHandler, UntypedEventHandler, UnhandledEventHandler])
def test_event_consumers_require_permission_for_each_topic_they_are_notified_of(
    world: World, interface: type[Any]
) -> None:
    """157.8.2: whatever a handler asks for, it gets what it may; there is nothing wrong with asking."""
    topics = [["public/a", "secret"], ["*"], ["+/a", "secret", "+"], ["public/*"]]
    handlers = [world.register(interface, each, "clerk") for each in topics]
    nobodys = world.register(interface, "*", None)
    strangers = world.register(interface, "*", "stranger")
    publishers = world.register(interface, "*", "producer")
    world.publish("public/a 1", "secret 2", "public/b 3", "public 4", "secret/a 5", "free 6")
    assert [each.events for each in handlers] == [
        ["public/a 1"], ["public/a 1", "public/b 3"], ["public/a 1"], ["public/a 1", "public/b 3"],
    ]  # fmt: skip
    assert nobodys.events == ["free 6"]
    assert strangers.events == publishers.events == []


def test_an_event_that_no_handler_may_have_is_unhandled(world: World) -> None:
    """157.4.4: for those handlers of unhandled events that may have it."""
    world.policy.grant("guard", TopicPermission("secret", SUBSCRIBE))
    handler = world.register(UntypedEventHandler, "*", "clerk")
    guard = world.register(UnhandledEventHandler, None, "guard")
    clerk = world.register(UnhandledEventHandler, None, "clerk")
    world.publish("secret 1", "public/a 2", "public 3")
    assert (handler.events, guard.events, clerk.events) == (["public/a 2"], ["secret 1"], [])


def test_handlers_given_to_the_bus_are_refused_topics_they_may_not_have(world: World) -> None:
    """Exact ones, and those made of the name of a class; a wildcard stands for those that they may have."""
    bus, got = world.bus, Got()
    for topics in (["secret"], ["public/a", "secret"], ["public/*", "public"], [Order]):
        with pytest.raises(PermissionDeniedError, match="the principal 'clerk' may not subscribe"):
            bus.on(*topics, handler=got.notify_untyped, principal="clerk")
    with pytest.raises(PermissionDeniedError, match="a caller without a principal may not subscribe"):
        bus.on(handler=got.notify)
    with pytest.raises(PermissionDeniedError):
        bus.on_unhandled("secret", handler=got.notify_unhandled, principal="clerk")
    with pytest.raises(PermissionDeniedError):

        @bus.on("secret")
        def handle(event: dict[str, Any]) -> None: ...

    assert bus.get_dto().handlers == ()
    bus.on("*", handler=got.notify_untyped, principal="clerk")
    bus.on("free", handler=got.notify_untyped)
    bus.on_unhandled(handler=got.notify_unhandled, principal="clerk")
    world.publish("secret 1", "public/a 2", "free 3", "free/a 4")
    assert got.events == ["public/a 2", "free 3"]


@pytest.mark.parametrize("interface", [TypedEventHandler, UntypedEventHandler, UnhandledEventHandler])
def test_what_is_granted_or_revoked_counts_from_the_next_event(world: World, interface: type[Any]) -> None:
    """157.8.2: for handlers that are there already."""
    exact = world.register(interface, "secret/a", "clerk")
    wildcard = world.register(interface, "*", "clerk")
    late = world.register(interface, "*", "late")
    world.publish("secret/a 1", "public/a 2")
    world.policy.grant("clerk", TopicPermission("secret/*", SUBSCRIBE))
    world.publish("secret/a 3")
    world.policy.grant("late", TopicPermission("+/a", SUBSCRIBE))
    world.publish("secret/a 4", "secret/b 5")
    world.policy.revoke("clerk")
    world.publish("secret/a 6", "public/a 7")
    assert exact.events == ["secret/a 3", "secret/a 4"]
    assert wildcard.events == ["public/a 2", "secret/a 3", "secret/a 4", "secret/b 5"]
    assert late.events == ["secret/a 4", "secret/a 6", "public/a 7"]


def test_publishing_is_granted_and_revoked_at_run_time(world: World) -> None:
    bus = world.bus
    for _ in range(3):
        with pytest.raises(PermissionDeniedError):
            bus.deliver_untyped("b", {}, principal="writer")
        world.policy.grant("writer", TopicPermission("b", PUBLISH))
        bus.deliver_untyped("b", {}, principal="writer")
        world.policy.revoke("writer")


def test_the_past_is_shown_to_those_who_may_have_it_when_they_come(world: World) -> None:
    """157.4.7 and 157.8.2: what they may not have does not count either."""
    world.bus.monitor.configure_history_storage("*", RangePolicy.unlimited())
    world.publish("public/a 1", "secret 2", "public/b 3", "secret 4", "secret 5")
    history = {"event.history": 2}
    clerk = world.register(UntypedEventHandler, "*", "clerk", **history)
    exact = world.register(UntypedEventHandler, ["secret", "public/a"], "clerk", **history)
    stranger = world.register(UntypedEventHandler, "*", "stranger", **history)
    world.policy.grant("stranger", TopicPermission("secret", SUBSCRIBE))
    later = world.register(UntypedEventHandler, "*", "stranger", **history)
    world.bus.flush().result(PATIENCE)
    assert clerk.events == ["public/a 1", "public/b 3"]
    assert exact.events == ["public/a 1"]
    assert stranger.events == []
    assert later.events == ["secret 4", "secret 5"]


def test_a_principal_that_an_update_changes_counts_from_then_on(world: World) -> None:
    got = Got()
    registration = world.services.register(UntypedEventHandler, got, {"event.topics": "*", "event.principal": "clerk"})
    world.publish("public/a 1", "free 2")
    registration.update({"event.topics": "*"})
    world.publish("public/a 3", "free 4")
    assert got.events == ["public/a 1", "free 4"]
    assert world.bus.get_dto().handlers[0].principal is None


def test_notifying_a_handler_lends_it_nobodys_permissions(world: World) -> None:
    """157.8.3: neither the publisher's nor the bus's; what it does, it does by its own."""
    denied: list[PermissionDeniedError] = []

    def forward(topic: str, event: dict[str, Any]) -> None:
        try:
            world.bus.deliver_untyped("meters/a", event)
        except PermissionDeniedError as error:
            denied.append(error)
        world.bus.deliver_untyped("meters/b", event, principal="meter")

    world.policy.grant("reader", TopicPermission("meters/b", SUBSCRIBE))
    world.bus.on("public/*", handler=forward, principal="clerk")
    handler = world.register(UntypedEventHandler, "*", "reader")
    world.publish("public/a 1")
    world.publish()
    assert len(denied) == 1
    assert handler.events == ["meters/b 1"]


def test_without_a_policy_everybody_may_everything() -> None:
    with TypedEventBus(ServiceRegistry()) as bus:
        got = Got()
        bus.on("a", handler=got.notify_untyped, principal="anybody")
        bus.deliver_untyped("a", {"n": 1})
        bus.deliver(Order(2), "a", principal="somebody")
        bus.create_publisher("a", principal="else").deliver_untyped({"n": 3})
        bus.flush().result(PATIENCE)
        assert got.events == ["a 1", "a 2", "a 3"]


BAD_PRINCIPALS = [5, b"clerk", ["clerk"], ("clerk",), True, object()]


@pytest.mark.parametrize("has_policy", [True, False])
@pytest.mark.parametrize("principal", BAD_PRINCIPALS)
def test_a_principal_of_another_type_is_refused(world: World, principal: Any, has_policy: bool) -> None:
    """It has no permissions, and whoever gives it means something else: also where nobody is asked for any."""
    with TypedEventBus(ServiceRegistry()) as open_to_all:
        bus = world.bus if has_policy else open_to_all
        calls: list[Callable[[], object]] = [
            lambda: bus.deliver(Order(1), principal=principal),
            lambda: bus.deliver(Order(1), "free", principal=principal),
            lambda: bus.deliver_untyped("free", {}, principal=principal),
            lambda: bus.create_publisher("free", principal=principal),
            lambda: bus.on("free", handler=Got().notify_untyped, principal=principal),
            lambda: bus.on_unhandled(handler=Got().notify_unhandled, principal=principal),
            lambda: bus.monitor.monitor_events(principal=principal),
            lambda: world.policy.grant(principal, TopicPermission("a", PUBLISH)),
        ]
        for call in calls:
            with pytest.raises(ArgumentError, match="principal"):
                call()
        assert bus.get_dto().handlers == ()


@pytest.mark.parametrize("principal", BAD_PRINCIPALS)
def test_a_handler_with_a_principal_of_another_type_is_ignored_and_logged(
    world: World, principal: Any, caplog: pytest.LogCaptureFixture
) -> None:
    handler = world.register(UntypedEventHandler, "*", principal)
    world.publish("free 1")
    assert handler.events == []
    assert f"{world.bus.name!r}: the handler" in caplog.text
    assert "event.principal must be a str" in caplog.text


@pytest.mark.parametrize(("what", "count"), [("_ANSWERS", 2), ("_ROUTES", 1)])
def test_what_is_forgotten_for_room_does_not_bring_back_what_was_revoked(
    what: str, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A policy that changes while somebody is asking it: the answer is out of date, and is not remembered."""
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
    with TypedEventBus(ServiceRegistry(), permissions=policy) as bus:
        got = Got()
        bus.on("*", handler=got.notify_untyped, principal="clerk")
        bus.deliver_untyped("a", {"n": 1})
        policy.is_next = True
        bus.deliver_untyped("b", {"n": 2})  # it was permitted when it was asked
        bus.deliver_untyped("b", {"n": 3})
        bus.deliver_untyped("a", {"n": 4})
        bus.flush().result(PATIENCE)
        assert got.events == ["a 1", "b 2"]


def test_a_policy_may_use_the_bus_that_asks_it() -> None:
    """To record what it denies, say; no lock of the bus is held while it does, also where the past is asked for."""
    buses: list[TypedEventBus] = []

    class Auditing(TopicPolicy):
        def permits(self, principal: str | None, permission: TopicPermission) -> bool:
            if permission.name != "audit":
                thread = threading.Thread(target=buses[0].deliver_untyped, args=("audit", {"n": 0}), daemon=True)
                thread.start()
                thread.join(PATIENCE)
                assert not thread.is_alive()
            return super().permits(principal, permission)

    policy = Auditing({None: [TopicPermission("*", BOTH)]})
    with TypedEventBus(ServiceRegistry(), permissions=policy, history={"*": RangePolicy.unlimited()}) as bus:
        buses.append(bus)
        got = Got()
        seen: list[str] = []
        bus.monitor.monitor_events(10).subscribe(lambda event: seen.append(event.topic))
        bus.deliver_untyped("a", {"n": 1})
        bus.on("a", handler=got.notify_untyped, history=1)
        bus.monitor.monitor_events(10, True).subscribe(lambda event: None)
        bus.deliver_untyped("a", {"n": 2})
        bus.flush().result(PATIENCE)
        assert got.events == ["a 1", "a 2"]
