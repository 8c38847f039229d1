"""TypedEventHandler (157.4.1, 157.9.5): which type a handler is written for, and what it gets."""

from __future__ import annotations

import abc
import asyncio
import functools
import itertools
import logging
import threading
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Final, Generic, Optional, TypeVar

import pytest

from messaging.errors import ArgumentError
from messaging.testing.tables import table
from messaging.testing.waiting import PATIENCE
from messaging.typedevent import TypedEventHandler, UntypedEventHandler, topic_of
from tests.dispatch.helpers import switching_often
from tests.typedevent.conftest import (
    ORDERS,
    Bus,
    Invoice,
    Item,
    Order,
    Recorder,
    RushOrder,
    coroutine_of,
    named,
    own_bus,
)

T = TypeVar("T")
U = TypeVar("U")

NO_ORDER = Order(0)


class Shop:
    @dataclass
    class Order:
        id: int


class Orders(Recorder, TypedEventHandler[Order]):
    """Written for orders."""


class Base(Recorder, TypedEventHandler[T]):
    """Of a type that those derived from it say."""


class Pair(Base[U], Generic[T, U]):
    """Its second parameter is that of its base."""


class Several(Base[list[T]]):
    """Its parameter is within that of its base."""


def derived(name: str, *bases: Any) -> type[Any]:
    return types.new_class(name, bases, exec_body=lambda body: body.update(__module__=__name__))


OfPair: Any = derived("OfPair", Pair[Item, Order])
OF_ORDERS: Final = [
    *(Orders, Base[Order], Pair[Item, Order], OfPair, derived("OfChild", OfPair)),
    *(derived("OfBase", Base[Order]), derived("BaseByName", Base["Order"]), derived("Mixed", Base[Order], abc.ABC)),
    derived("ByName", Recorder, TypedEventHandler["Order"]),
]
OF_SEVERAL_ORDERS: Final = [
    derived("SeveralOrders", Several[Order]),
    derived("SeveralByName", Recorder, TypedEventHandler[list["Order"]]),
]


def of_order(function: Any) -> Any:
    """Annotate the event of a function."""
    function.__annotations__["event"] = Order
    return function


class Duck:
    """Does not inherit from anything; with methods of all kinds."""

    def __init__(self) -> None:
        self.data: list[Order] = []

    def notify(self, topic: str, event: Order) -> None:
        self.data.append(event)

    async def later(self, topic: str, event: Order) -> None:
        await asyncio.sleep(0)
        self.data.append(event)

    def keep(self, event: Order) -> None:
        self.data.append(event)

    def with_prefix(self, prefix: str, topic: str, event: Order) -> None:
        self.data.append(event)

    def with_defaults(self, topic: str = "", event: Order = NO_ORDER, *more: int) -> None:
        self.data.append(event)


class ByAnnotation(Duck, TypedEventHandler[Any]):
    """Its parameter says nothing, so the annotation counts."""


class Unknown(Recorder, TypedEventHandler["Missing"]):  # type: ignore[name-defined]
    """Of a name that is not there; but its method has one that is."""

    def notify(self, topic: str, event: Order) -> None:
        super().notify(topic, event)


def duck(name: str, **members: Any) -> Any:
    return type(name, (Duck,), members)


DUCKS: Final = [
    *(Duck, ByAnnotation, Unknown, duck("Defaults", notify=Duck.with_defaults), duck("OnlyEvent", notify=Duck.keep)),
    *(duck("AsyncNotify", notify=Duck.later), duck("CallableObject", notify=None, __call__=Duck.keep)),
    duck("AsyncCallableObject", notify=None, __call__=Duck.later),
    # does not say that it has to be awaited
    duck("SyncAwaitable", notify=of_order(lambda self, topic, event: self.later(topic, event))),
]
FUNCTIONS: Final[dict[str, Callable[[Duck], Any]]] = {
    "event": lambda to: of_order(lambda event: to.keep(event)),
    "topic and event": lambda to: of_order(lambda topic, event: to.keep(event)),
    "with default": lambda to: of_order(lambda event, prefix="x": to.keep(event)),
    "one default": lambda to: of_order(lambda event=NO_ORDER: to.keep(event)),
    "wrapper": lambda to: functools.wraps(to.notify)(lambda *arguments, **keywords: to.keep(arguments[1])),
    "partial": lambda to: functools.partial(to.with_prefix, "x"),
    "nested": lambda to: functools.partial(functools.partial(Duck.with_prefix, to), "x"),
    "defaults": lambda to: to.with_defaults,
    "coroutine": lambda to: to.later,
    "coroutine of the event": lambda to: functools.partial(to.later, "topic"),
    "method": lambda to: to.keep,
    "static method": lambda to: type("Static", (), {"keep": staticmethod(to.keep)})().keep,
    "class method": lambda to: type("C", (), {"keep": classmethod(of_order(lambda _, event: to.keep(event)))}).keep,
}


# --- which topic, which type


def test_without_topics_a_handler_gets_those_of_the_topic_of_its_type_as_instances(bus: Bus) -> None:
    """Scenario 26; 157.4.1."""
    handler = Orders().typed(bus)
    bus.deliver_untyped(ORDERS, {"id": "5", "items": [{"name": "a"}]})
    bus.deliver_untyped("other", {"id": 6})
    bus.send(None, Order(7))
    assert handler.events == [(ORDERS, Order(5, items=[Item("a")])), (ORDERS, Order(7))]


@table("wanted", [RushOrder, topic_of(RushOrder).replace("/", ".")], ids=["class", "name"])
@own_bus
def test_event_type_goes_before_the_reified_type_as_target_and_as_default_topic(bus: Bus, wanted: Any) -> None:
    """Scenario 27; 157.4.1."""
    handler = Orders().typed(bus, type=wanted)
    bus.deliver(Order(1))
    bus.deliver_untyped(topic_of(RushOrder), {"id": 2, "hours": "3"})
    bus.send(None, RushOrder(4))
    assert handler.data == [RushOrder(2, hours=3), RushOrder(4)]


def test_topics_select_events_and_the_type_converts_them(bus: Bus) -> None:
    """Scenario 28; 157.4.1."""
    handler = Orders().typed(bus, ["foo", "foo/bar"])
    bus.deliver(Order(1))
    bus.deliver(Order(2), "foo")
    bus.deliver(Invoice("3", "c"), "foo/bar")
    bus.send("foo/baz", Order(4))
    assert handler.events == [("foo", Order(2)), ("foo/bar", Order(3, "c"))]


@table("topics", [None, ["foo"], "*"])
@table("make", [lambda: Base[Any](), Recorder, lambda: lambda topic, event: None])
@own_bus
def test_a_handler_whose_type_cannot_be_found_is_ignored_and_logged(
    bus: Bus, make: Callable[[], Any], topics: Any
) -> None:
    """Scenario 29; 157.4.9: also if it lists topics."""
    handler = make()
    registration = bus.typed(handler, topics)
    bus.send("foo", Order(1))
    assert getattr(handler, "events", []) == []
    assert bus.name in bus.ignored(registration)
    registration.update(named(topics, type=Order))  # and it is found once it is known
    assert bus.handler_of(registration) is not None


@table(
    "name",
    [
        *("no.such.module.Order", "Order", "", "...", ".a.B", "a..B"),
        *(f"tests.typedevent.conftest{each}" for each in ("", ".Missing", ".Order.Missing", ".PATIENCE", ".register")),
        "tests.typedevent.test_typed_handlers.test.<locals>.Order",
        *(f"broken_{each}.Order" for each in ("import", "value", "exit", "syntax", "attribute")),
        *(5, ["a"], object(), object, Any, T, Order(1)),
    ],
    ids=lambda each: repr(each).partition(" at 0x")[0][:40],
)
@own_bus
def test_a_handler_whose_event_type_cannot_be_loaded_is_ignored_and_logged(
    bus: Bus, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: Any
) -> None:
    """Scenario 30; 157.4.9."""
    for module, source in {
        "broken_import": "import no_such_module",
        "broken_value": "raise ValueError('hush')",
        "broken_exit": "raise SystemExit(3)",
        "broken_syntax": "class Order(",
        "broken_attribute": "def __getattr__(name): raise LookupError(name)",
    }.items():
        (tmp_path / f"{module}.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    handler = Orders().typed(bus, "*", type=name)
    bus.send(None, Order(1))
    assert handler.events == []
    assert "event.type" in bus.ignored(handler.registration)
    if not any(name is each for each in (Any, object, T)):  # these say that it does not matter
        with pytest.raises(ArgumentError, match=r"event\.type"):
            bus.on("*", handler=handler.notify, type=name)


@table(
    "name",
    [
        "tests.typedevent.test_typed_handlers.Shop.Order",
        "tests.typedevent.test_typed_handlers:Shop.Order",
        Shop.Order,
    ],
    ids=str,
)
@own_bus
def test_event_type_may_be_a_class_within_a_class(bus: Bus, name: Any) -> None:
    handler = Recorder().typed(bus, type=name)
    bus.send(topic_of(Shop.Order), {"id": 1})
    assert [(type(each).__qualname__, each.id) for each in handler.data] == [("Shop.Order", 1)]


def test_event_type_may_be_in_a_module_that_is_not_loaded_yet(
    bus: Bus, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """157.4.1: it is loaded."""
    package = tmp_path / "fresh_package"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "fresh_module.py").write_text("class Fresh:\n    class Inner:\n        x: int\n")
    monkeypatch.syspath_prepend(tmp_path)
    handler = Recorder().typed(bus, type="fresh_package.fresh_module.Fresh.Inner")
    bus.send("fresh_package/fresh_module/Fresh/Inner", {"x": "1"})
    (event,) = handler.data
    assert (type(event).__qualname__, event.x) == ("Fresh.Inner", 1)


def test_properties_are_found_in_any_case(bus: Bus) -> None:
    """OSGi core 5.2.5: the keys of service properties are the same if they differ only by case."""
    handler, filtered = Recorder(), Recorder()
    bus.services.register(TypedEventHandler, handler, {"Event.Type": Order, "EVENT.TOPICS": ["a"]})
    bus.services.register(UntypedEventHandler, filtered, {"event.Topics": ["a"], "eVent.filter": "(id=2)"})
    bus.send("a", {"id": "1"}, {"id": 2})
    assert handler.data == [Order(1), Order(2)]
    assert filtered.data == [{"id": 2}]


@table("make", [*OF_ORDERS, *DUCKS])
@own_bus
def test_the_type_is_found_wherever_a_class_says_it(bus: Bus, make: Callable[[], Any]) -> None:
    """157.4.1: the parameter of the interface, through bases and type variables; or an annotation, if it has none."""
    handler = make()
    registration = bus.typed(handler)
    bus.send(ORDERS, *({"id": str(number)} for number in range(20)))
    assert handler.data == [Order(number) for number in range(20)]
    found = bus.state_of(registration)
    assert found.topics == (ORDERS,)
    assert type(handler).__name__ in found.name


@table("make", OF_SEVERAL_ORDERS)
@own_bus
def test_type_variables_and_names_are_found_within_a_type(bus: Bus, make: Callable[[], Any]) -> None:
    handler = make()
    bus.typed(handler, "a")
    bus.send("a", {"id": "1"})
    assert handler.data == [[Order(1)]]


def test_the_parameter_of_the_interface_goes_before_annotations(bus: Bus) -> None:
    class Handler(TypedEventHandler[RushOrder]):
        def notify(self, topic: str, event: Order) -> None:
            received.append(event)

    received: list[Order] = []
    bus.typed(Handler())
    bus.send(topic_of(RushOrder), {"id": 1})
    assert received == [RushOrder(1)]


@table("make", FUNCTIONS)
@own_bus
def test_functions_of_all_kinds_are_typed_handlers_by_their_annotation(bus: Bus, make: Callable[[Duck], Any]) -> None:
    """157.4.1."""
    seen = Duck()
    bus.typed(make(seen))
    bus.send(ORDERS, *({"id": str(number)} for number in range(5)))
    assert seen.data == [Order(number) for number in range(5)]


# --- annotations


def missing(event: Missing) -> None:  # type: ignore[name-defined]  # noqa: F821
    pass


def missing_elsewhere(topic: Missing, event: Order) -> Missing:  # type: ignore[name-defined]  # noqa: F821
    received_elsewhere.append(event)


def failing(event: Order[5]) -> None:  # type: ignore[type-arg]
    pass


received_elsewhere: list[Order] = []


class MissingMethod:
    def notify(self, topic: str, event: Missing) -> None:  # type: ignore[name-defined]  # noqa: F821
        pass


@table("handler", [missing, failing, MissingMethod(), functools.partial(missing)])
@own_bus
def test_an_annotation_that_cannot_be_resolved_is_refused_and_in_the_registry_ignored_and_logged(
    bus: Bus, handler: Any
) -> None:
    """157.4.9."""
    with pytest.raises(ArgumentError, match="cannot be resolved"):
        bus.on("a", handler=handler)
    registration = bus.typed(handler, "a")
    assert "cannot be resolved" in bus.ignored(registration)
    bus.on("a", handler=handler, type=Order)  # what need not be known is not looked at
    bus.typed(handler, "a", type=Order)


def test_only_the_annotation_of_the_event_is_looked_at(bus: Bus) -> None:
    """Others may be there for type checkers only."""
    received_elsewhere.clear()
    bus.on(handler=missing_elsewhere)
    bus.send(None, Order(1))
    assert received_elsewhere == [Order(1)]


def test_unions_options_and_collections_may_be_types_if_there_are_topics(bus: Bus) -> None:
    """No topic can be made of them."""
    kinds: dict[str, Any] = {
        "union": RushOrder | Invoice,
        "optional": Optional[Order],  # noqa: UP045
        "list": list[Order],
        "annotated": Annotated[Order, "documented"],
    }
    handlers = {name: Recorder() for name in kinds}
    for name, kind in kinds.items():
        bus.typed(handlers[name], "a", type=kind)
        with pytest.raises(ArgumentError, match="a topic can be made of a class"):
            bus.on(handler=lambda event: None, type=kind)
        assert "a topic can be made of a class" in bus.ignored(bus.typed(Recorder(), type=kind))
    bus.send("a", {"id": "1", "customer": "c", "is_paid": True}, RushOrder(2))
    assert handlers["union"].data == [Invoice("1", "c", True), RushOrder(2)]
    assert handlers["optional"].data == [Order(1, "c"), RushOrder(2)]
    assert handlers["list"].data == [[Order(1, "c")], [RushOrder(2)]]
    assert handlers["annotated"].data == [Order(1, "c"), RushOrder(2)]


# --- conversion


def test_an_event_of_one_class_is_converted_to_another_one_by_the_names_of_its_fields(bus: Bus) -> None:
    """Scenario 31; 157.4.1: values are converted, too; missing fields keep their defaults."""
    invoices = Recorder().typed(bus, "a", type=Invoice)
    orders = Recorder().typed(bus, "a", type=Order)
    bus.send("a", Invoice("7", "c", True), Order(8, "d", [Item("x")]))
    assert orders.data == [Order(7, "c"), Order(8, "d", [Item("x")])]
    assert invoices.data == [Invoice("7", "c", True), Invoice("8", "d")]


def test_a_handler_misses_an_event_that_cannot_be_converted_and_that_is_logged(bus: Bus) -> None:
    """Scenario 33; 157.4.9: others get it, and the handler gets the next one."""
    handler = Orders().typed(bus, "a")
    other = Recorder().untyped(bus, "a")
    bus.send("a", {"id": 1}, {"id": "one, and a secret"}, {"id": [{}]}, {}, {"id": 2})
    assert handler.data == [Order(1), Order(2)]
    assert len(other.data) == 5
    found = bus.logged(repr(handler.registration.reference), "notify", "'a'", level=logging.ERROR)
    assert len(found) == 3
    assert all("event on 'a' skipped" in each for each in found)
    assert not bus.logged("secret")


def test_an_event_that_its_only_handler_cannot_have_is_not_unhandled(bus: Bus) -> None:
    """Scenario 34: the specification does not say. Who gets an event is decided before it is converted, on the thread
    that publishes; so it counts as delivered, as in Aries."""
    handler = Orders().typed(bus, "a")
    left = Recorder().unhandled(bus)
    bus.deliver_untyped("a", {"id": "one"})
    bus.send("b", {})
    assert handler.data == []
    assert left.topics == ["b"]


def test_failing_to_convert_is_not_the_handler_s_failure(bus: Bus) -> None:
    """It is not blocked for it, however often it happens."""
    handler = Orders().typed(bus, "a")
    bus.send("a", *[{"id": "one"}] * 50, {"id": 1})
    assert handler.data == [Order(1)]
    found = bus.state_of(handler.registration)
    assert (found.failures, found.blocked) == (0, None)


def meeting(recorder: Recorder, barrier: threading.Barrier) -> Callable[[str, Any], None]:
    """Return a handler that waits in each event for others: they need a thread each, and go on together."""

    def handle(topic: str, event: Any) -> None:
        recorder.notify(topic, event)
        barrier.wait(PATIENCE)

    return handle


class Counted:
    """Counts how often it is made."""

    made: ClassVar[itertools.count[int]]
    x: int

    def __init__(self, x: int) -> None:
        next(self.made)
        self.x = x


def test_an_event_is_converted_once_however_many_handlers_want_it(bus: Bus) -> None:
    """On however many threads and loops; the one who comes first does it."""
    Counted.made = itertools.count()
    handlers = [Recorder() for _ in range(6)]
    together, later = [Recorder() for _ in range(4)], Recorder()
    barrier = threading.Barrier(4)
    for each in (*handlers, *(meeting(each, barrier) for each in together), coroutine_of(later)):
        bus.typed(each, "a", type=Counted)
    with switching_often():
        bus.send("a", *({"x": number} for number in range(10)))
    assert next(Counted.made) == 10
    for each in (*handlers, *together, later):
        assert [event.x for event in each.data] == [*range(10)]
        assert all(event is other for event, other in zip(each.data, later.data, strict=True))


class Stubborn:
    """Raises whatever it is told to when it is made."""

    error: ClassVar[type[BaseException] | None] = None
    x: int

    def __init__(self, x: int) -> None:
        if self.error is not None and x:
            raise self.error("hush")
        self.x = x


@table("error", [ValueError, RecursionError, SystemExit, KeyboardInterrupt])
@own_bus
def test_a_constructor_may_raise_anything_and_no_handler_gets_anything_else_instead(
    bus: Bus, monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    """Neither the handler that converted it, nor handlers that waited for it on other threads."""
    handlers, barrier = [Recorder() for _ in range(4)], threading.Barrier(4)
    for each in handlers:
        bus.typed(meeting(each, barrier), "a", type=Stubborn)
    monkeypatch.setattr(Stubborn, "error", error)
    with switching_often():
        bus.send("a", *({"x": number} for number in range(4)))
    monkeypatch.setattr(Stubborn, "error", None)
    bus.send("a", {"x": 4})
    assert [[event.x for event in each.data] for each in handlers] == [[0, 4]] * 4


def test_a_hanging_constructor_delays_only_its_own_handler(bus: Bus) -> None:
    """Others make their own after a while."""
    opened = threading.Event()
    calls = itertools.count()

    class Hanging:
        x: int

        def __init__(self, x: int) -> None:
            if next(calls) == 0:
                assert opened.wait(PATIENCE)
            self.x = x

    received = Recorder()
    for _ in range(2):
        bus.typed(received, "a", type=Hanging)
    bus.deliver_untyped("a", {"x": 1})
    received.events.wait_for(1)
    opened.set()
    bus.drain()
    assert [each.x for each in received.data] == [1, 1]


# --- one service, several roles


def test_a_service_with_two_interfaces_is_called_by_each_of_them(bus: Bus) -> None:
    """Each is a handler of its own, with the same properties."""

    class Both(Duck):
        def notify_untyped(self, topic: str, event: dict[str, Any]) -> None:
            untyped.append(event)

    both, untyped = Both(), list[dict[str, Any]]()
    registration = bus.services.register([TypedEventHandler, UntypedEventHandler], both, {"event.topics": "a"})
    bus.send("a", {"id": "1"})
    assert both.data == [Order(1)]
    assert untyped == [{"id": "1"}]
    registration.update({"event.topics": "b", "event.filter": "(id=2)"})
    bus.send_to(("a", "b"), {"id": "2"})
    assert (len(both.data), len(untyped)) == (2, 2)
    registration.unregister()
    assert bus.get_dto().handlers == ()


def test_of_two_interfaces_the_one_that_is_wrong_is_ignored(bus: Bus) -> None:
    duck = Duck()
    registration = bus.services.register([TypedEventHandler, UntypedEventHandler], duck, {"event.topics": "a"})
    bus.send("a", Order(1))
    assert duck.data == [Order(1)]
    assert bus.logged(repr(registration.reference), "is ignored", "notify_untyped")


def test_of_a_prototype_the_bus_gets_one_and_keeps_it(bus: Bus) -> None:
    made: list[Orders] = []

    def factory() -> Orders:
        made.append(Orders())
        return made[-1]

    registration = bus.services.register(TypedEventHandler, factory, scope="prototype")
    for number in range(3):
        bus.deliver(Order(number))
    registration.update(named([ORDERS, "b"]))
    bus.send("b", Order(3))
    assert [each.data for each in made] == [[Order(number) for number in range(4)]]
    with Bus(bus.services):
        assert len(made) == 2  # one for each bus

    def failing() -> None:
        raise LookupError("no handler today")

    for bad, says in ((failing, "no handler today"), (lambda: None, "None")):
        broken = bus.services.register(TypedEventHandler, bad, scope="prototype")
        assert says in bus.ignored(broken)


def test_the_type_may_be_changed_by_an_update(bus: Bus) -> None:
    handler = Orders().typed(bus, "a")
    bus.send("a", {"id": "1", "customer": "c"})
    handler.registration.update(named("a", type=Invoice))
    bus.send("a", {"id": "1", "customer": "c"})
    handler.registration.update({})
    bus.send(None, Order(2))
    assert handler.data == [Order(1, "c"), Invoice("1", "c"), Order(2)]


def test_the_type_of_a_typed_handler_may_be_a_mapping(bus: Bus) -> None:
    """Through the registry it is a type like others: its values are converted."""
    handler = Recorder().typed(bus, "a", type=dict[str, int])
    bus.typed(handler, "b", type=Mapping[str, str])
    bus.send("a", {"x": "1"})
    bus.send("b", {"x": 1})
    assert handler.data == [{"x": 1}, {"x": "1"}]
