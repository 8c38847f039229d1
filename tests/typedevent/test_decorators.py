"""Handlers by decorators: the component property types (157.12), and ``on`` and ``on_unhandled`` of a bus."""

from __future__ import annotations

import asyncio
import functools
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any, TypedDict

import pytest

from messaging.errors import ArgumentError, InvalidFilterError, InvalidTopicError, MessagingError, NullEventError
from messaging.services import ServiceRegistration, ServiceRegistry
from messaging.testing.tables import table
from messaging.typedevent import (
    EventFilter,
    EventTopics,
    EventType,
    RangePolicy,
    TypedEventConstants,
    TypedEventHandler,
    UnhandledEventHandler,
    UntypedEventHandler,
    topic_of,
)
from tests.typedevent.conftest import ORDERS, Bus, Invoice, Order, Recorder, RushOrder, own_bus, untyped


class Row(TypedDict):
    id: int


# --- component property types


@EventTopics("foo", "foo/bar")
@EventFilter("(id>=2)")
class Untyped(Recorder, UntypedEventHandler):
    pass


@EventType(RushOrder)
class Typed(Recorder, TypedEventHandler[Order]):
    pass


@EventTopics("left/*")
@EventFilter("(id>=2)")
class Left(Recorder, UnhandledEventHandler):
    pass


class Inherited(Untyped):
    pass


@EventTopics("other")
class Overridden(Untyped):
    """Has the filter of its base class still."""


def test_declarations_of_a_class_count_as_service_properties(bus: Bus) -> None:
    """157.12.2 to 157.12.4."""
    handlers = [Untyped(), Typed(), Left(), Inherited(), Overridden()]
    typed_, left = handlers[1:3]
    for each in (handlers[0], *handlers[3:]):
        bus.untyped(each)
    bus.typed(typed_)
    bus.unhandled(left)
    for topic in ("foo", "foo/bar", "other", "left/a", "left", topic_of(RushOrder), ORDERS):
        for number in (1, 2):
            bus.deliver_untyped(topic, {"id": number})
    bus.drain()
    assert [each.topics for each in handlers] == [
        ["foo", "foo/bar"],
        [topic_of(RushOrder)] * 2,
        ["left/a"],
        ["foo", "foo/bar"],
        ["other"],
    ]
    assert typed_.data == [RushOrder(1), RushOrder(2)]


def test_properties_of_a_registration_override_declarations_of_the_class(bus: Bus) -> None:
    by_topics = Untyped()
    bus.services.register(UntypedEventHandler, by_topics, {"Event.Topics": "a"})
    by_filter = Untyped().untyped(bus, filter="(id=1)")
    by_type = Typed().typed(bus, "a", type=Invoice)
    for topic in ("a", "foo"):
        for number in (1, 2):
            bus.deliver_untyped(topic, {"id": number, "customer": "c"})
    bus.drain()
    assert by_topics.events == [("a", {"id": 2, "customer": "c"})]
    assert by_filter.events == [("foo", {"id": 1, "customer": "c"})]
    assert by_type.data == [Invoice("1", "c"), Invoice("2", "c")]


def test_functions_may_declare_properties_too(bus: Bus) -> None:
    """In the registry, and for ``on``."""
    received: dict[str, list[Any]] = defaultdict(list)

    @EventTopics("a")
    @EventFilter("(id=2)")
    def filtered(event: Any) -> None:
        received["filtered"].append(event)

    @EventTopics("a")
    @EventType(topic_of(Order).replace("/", "."))
    def typed(event: Any) -> None:
        received["typed"].append(event)

    @EventType(Order)
    def by_class(event: Any) -> None:
        received["by class"].append(event)

    @EventTopics("a")
    async def coroutine(event: Any) -> None:
        received["coroutine"].append(event)

    bus.untyped(filtered)
    bus.typed(typed)
    for each in (filtered, by_class, coroutine):
        bus.on(handler=each)
    for topic in ("a", ORDERS):
        for number in (1, 2):
            bus.deliver_untyped(topic, {"id": number})
    bus.drain()
    orders, maps = [Order(1), Order(2)], [{"id": 1}, {"id": 2}]
    assert received == {"filtered": maps[1:] * 2, "typed": orders, "by class": orders, "coroutine": maps}


@table(
    ("declare", "error"),
    [
        (lambda: EventTopics(), ArgumentError),
        (lambda: EventTopics("a*"), InvalidTopicError),
        (lambda: EventTopics("a", "b/"), InvalidTopicError),
        (lambda: EventTopics(None), NullEventError),  # type: ignore[arg-type]
        (lambda: EventTopics(["a"]), InvalidTopicError),  # type: ignore[arg-type]
        (lambda: EventFilter("(a=1"), InvalidFilterError),
        (lambda: EventFilter(5), InvalidFilterError),  # type: ignore[arg-type]
    ],
)
def test_declared_properties_are_checked_by_the_decorator(
    declare: Callable[[], object], error: type[MessagingError]
) -> None:
    with pytest.raises(error):
        declare()


def test_a_type_that_is_declared_is_loaded_when_it_is_needed(bus: Bus) -> None:
    """It may be the name of a class that does not exist yet."""

    @EventType("no.such.Class")
    class Handler(Recorder):
        pass

    registration = bus.typed(Handler(), "a")
    assert "no.such.Class" in bus.ignored(registration)
    with pytest.raises(ArgumentError, match=r"no\.such\.Class"):
        bus.on("a", handler=Handler())


def test_the_names_of_the_specification_are_there() -> None:
    """157.9.4."""
    names = TypedEventConstants
    assert names.TYPED_EVENT_FILTER == "event.filter"
    assert names.TYPED_EVENT_HISTORY == "event.history"
    assert names.TYPED_EVENT_IMPLEMENTATION == "osgi.typedevent"
    assert names.TYPED_EVENT_SPECIFICATION_VERSION == "1.1"
    assert names.TYPED_EVENT_TOPICS == "event.topics"
    assert names.TYPED_EVENT_TYPE == "event.type"


# --- on


def test_a_decorated_function_receives_the_annotated_type(bus: Bus) -> None:
    """157.4.1: without topics, of the topic of that class."""
    received: dict[str, list[Any]] = {name: [] for name in ("bare", "called", "topics", "both", "class", "coroutine")}

    @bus.on
    def bare(event: Order) -> None:
        received["bare"].append(event)

    @bus.on()
    def called(event: Order) -> None:
        received["called"].append(event)

    @bus.on("a", "b/*")
    def topics(event: Order) -> None:
        received["topics"].append(event)

    @bus.on("a")
    def both(topic: str, event: Order) -> None:
        received["both"].append((topic, event))

    @bus.on(Order)
    def of_class(event: dict[str, Any]) -> None:
        received["class"].append(event["id"])

    @bus.on("a")
    async def coroutine(event: Order) -> None:
        await asyncio.sleep(0)
        received["coroutine"].append(event)

    assert bare.__name__ == "bare"  # still themselves
    assert both.__name__ == "both"
    bus.send_to((ORDERS, "a", "b/c"), {"id": "1"})
    assert received == {
        "bare": [Order(1)],
        "called": [Order(1)],
        "topics": [Order(1), Order(1)],
        "both": [("a", Order(1))],
        "class": ["1"],
        "coroutine": [Order(1)],
    }


@table("annotation", [None, dict, dict[str, Any], dict[str, int], Mapping, Mapping[str, Any], Any, object], ids=str)
@own_bus
def test_without_annotation_or_with_a_mapping_a_function_gets_a_map(bus: Bus, annotation: Any) -> None:
    received: list[Any] = []

    def handle(event: Any) -> None:
        received.append(event)

    if annotation is None:
        del handle.__annotations__["event"]
    else:
        handle.__annotations__["event"] = annotation
    registration = bus.on("a", handler=handle)
    bus.send("a", {"id": "1"}, RushOrder(1))
    assert received == [{"id": "1"}, {"id": 1, "customer": "nobody", "items": [], "hours": 24}]
    assert registration.reference.interfaces[0].endswith("UntypedEventHandler")
    with pytest.raises(ArgumentError, match="needs a topic"):
        bus.on(handler=handle)


@table("wanted", [Order, ORDERS.replace("/", "."), dict[str, Any], Any, Row], ids=str)
@own_bus
def test_the_option_type_overrides_the_annotation(bus: Bus, wanted: Any) -> None:
    received: list[Any] = []

    def handle(event: Invoice) -> None:
        received.append(event)

    bus.on("a", handler=handle, type=wanted)
    bus.send("a", {"id": "1"})
    expected = {Row: {"id": 1}, Any: {"id": "1"}, dict[str, Any]: {"id": "1"}}
    assert received == [expected.get(wanted, Order(1))]


def test_one_decorator_may_be_used_for_several_functions(bus: Bus) -> None:
    """Each has its own type."""
    received: list[Any] = []
    decorate = bus.on("a", filter="(id=*)")

    @decorate
    def first(event: Order) -> None:
        received.append(event)

    @decorate
    def second(event: dict[str, Any]) -> None:
        received.append(event)

    @decorate
    def third(event: Invoice) -> None:
        received.append(event)

    bus.send("a", {"id": "1", "customer": "c"})
    assert received == [Order(1, "c"), {"id": "1", "customer": "c"}, Invoice("1", "c")]
    assert not bus.logged()


def test_options_set_the_service_properties(services: ServiceRegistry) -> None:
    """157.4.8."""
    with Bus(services, history={"a": RangePolicy.unlimited()}) as bus:
        bus.count(range(5))
        received: list[Any] = []
        registration = bus.on(
            "a",
            handler=received.append,
            filter="(n>=1)",
            history=2,
            timeout=7,
            ranking=3,
            principal="me",
        )
        bus.send("a", {"n": 0}, {"n": 5})
        assert [each["n"] for each in received] == [3, 4, 5]
        found = bus.state_of(registration)
        assert (found.filter, found.principal, found.topics) == ("(n>=1)", "me", ("a",))
        assert registration.reference.ranking == 3
        assert registration.reference.properties["event.timeout"] == 7


def test_a_function_in_the_place_of_topics_takes_options_too(bus: Bus) -> None:
    received: list[Any] = []

    def handle(event: Order) -> None:
        received.append(event)

    assert bus.on(handle, filter="(id=2)") is handle  # type: ignore[call-overload]
    left: list[Any] = []
    assert bus.on_unhandled(left.append, filter="(id=1)") == left.append  # type: ignore[call-overload]
    for number in (1, 2, 3):
        bus.deliver(Order(number))
    bus.drain()
    assert received == [Order(2)]
    assert [each["id"] for each in left] == [1]


def test_handlers_of_higher_ranking_are_preferred(bus: Bus) -> None:
    """OSGi core: their registrations come first. Handlers do not wait for each other all the same."""
    for ranking in (1, 3, 2):
        bus.on("a", handler=lambda event: None, ranking=ranking)
    route = bus.dispatcher.route("a")
    names = [lane.name for lane in route.lanes]
    rankings = {repr(each): each.ranking for each in bus.services.find(UntypedEventHandler)}
    assert [rankings[each.partition(" (")[0]] for each in names] == [3, 2, 1]


@table(
    ("arguments", "options", "error"),
    [
        (("a", "b/"), {}, InvalidTopicError),
        ((None,), {}, NullEventError),
        (("a",), {"filter": "(a=1"}, InvalidFilterError),
        (("a",), {"ranking": "high"}, ArgumentError),
        ((), {}, ArgumentError),
        ((), {"type": Order | None}, ArgumentError),
    ],
    ids=str,
)
@own_bus
def test_on_raises_errors_that_the_registry_only_logs(
    bus: Bus, arguments: Any, options: Any, error: type[MessagingError]
) -> None:
    """157.4.9: and nothing is registered."""

    def handle(event: Any) -> None:
        pass

    before = bus.services.find()
    with pytest.raises(error):
        bus.on(*arguments, handler=handle, **options)
    with pytest.raises(error):
        bus.on(*arguments, **options)(handle)
    if "type" not in options and "history" not in options and arguments:
        with pytest.raises(error):
            bus.on_unhandled(*arguments, handler=handle, **options)
    assert bus.services.find() == before


def test_objects_with_the_method_of_their_interface_may_be_given_too(bus: Bus) -> None:
    typed_, untyped_, left = Typed(), Untyped(), Left()
    bus.on(handler=typed_)
    bus.on(handler=untyped_)
    bus.on_unhandled(handler=left)
    bus.deliver_untyped(topic_of(RushOrder), {"id": 1})
    bus.deliver_untyped("foo", {"id": 2})
    bus.send("left/a", {"id": 3})
    assert typed_.data == [RushOrder(1)]
    assert untyped_.data == [{"id": 2}]
    assert left.data == [{"id": 3}]


def test_the_registration_ends_it_and_changes_it(bus: Bus) -> None:
    received: list[Any] = []
    registration = bus.on("a", handler=received.append)
    assert isinstance(registration, ServiceRegistration)
    bus.send("a", {"n": 0})
    registration.update({**registration.reference.properties, "event.topics": "b"})
    for topic in ("a", "b"):
        bus.deliver_untyped(topic, {"n": topic})
    bus.drain()
    registration.unregister()
    bus.send("b", {"n": 2})
    assert [each["n"] for each in received] == [0, "b"]


def test_unhandled_events_go_to_decorated_functions(bus: Bus) -> None:
    """157.4.4."""
    received: dict[str, list[str]] = {"bare": [], "called": [], "topics": [], "coroutine": []}

    @bus.on_unhandled
    def bare(topic: str, event: dict[str, Any]) -> None:
        received["bare"].append(topic)

    @bus.on_unhandled()
    def called(topic: str, event: Any) -> None:
        received["called"].append(topic)

    @bus.on_unhandled("a", "b/+", filter="(n=1)")
    def topics(topic: str, event: Any) -> None:
        received["topics"].append(topic)

    @bus.on_unhandled("*")
    async def coroutine(topic: str, event: Any) -> None:
        received["coroutine"].append(topic)

    bus.on("handled", handler=lambda event: None)
    for topic in ("a", "b/c", "c", "handled"):
        bus.deliver_untyped(topic, {"n": 1})
    bus.send("a", {"n": 2})
    everything = ["a", "b/c", "c", "a"]
    assert received == {"bare": everything, "called": everything, "topics": ["a", "b/c"], "coroutine": everything}


# --- on, and its bus


def test_on_is_for_its_own_bus_even_among_those_of_the_same_name(services: ServiceRegistry) -> None:
    for names in (("first", "second"), ("same", "same"), ("*", "a"), ("(a)", "(a)(b)"), ("a\\*", "a\\b")):
        with Bus(services, name=names[0]) as first, Bus(services, name=names[1]) as second:
            received: dict[str, list[Any]] = {"first": [], "second": [], "both": [], "unhandled": []}
            registrations = [
                first.on("a", handler=received["first"].append),
                second.on("a", handler=received["second"].append),
                second.on_unhandled(handler=received["unhandled"].append),
                untyped(services, received["both"].append, "a"),
            ]
            first.deliver_untyped("a", {"n": 1})
            first.deliver_untyped("b", {"n": 2})
            for each in (first, second):
                each.drain()
            assert received == {"first": [{"n": 1}], "second": [], "both": [{"n": 1}], "unhandled": []}
            for registration in registrations:
                registration.unregister()


def test_a_method_of_each_object_may_be_a_handler(bus: Bus) -> None:
    class Counter:
        def __init__(self) -> None:
            self.orders: list[Order] = []
            bus.on(handler=self.count)
            bus.on(handler=functools.partial(self.count_with, "x"))

        def count(self, event: Order) -> None:
            self.orders.append(event)

        def count_with(self, prefix: str, event: Order) -> None:
            self.orders.append(event)

    counters = [Counter(), Counter()]
    bus.send(None, Order(1))
    assert [each.orders for each in counters] == [[Order(1)] * 2] * 2
