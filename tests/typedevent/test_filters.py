"""Filters of handlers (157.4.5): over the top level of the data as it was published, with case."""

from __future__ import annotations

import datetime
import decimal
import enum
import threading
import uuid
from dataclasses import dataclass, field
from typing import Any

import pytest

from messaging.errors import InvalidFilterError
from messaging.services import LdapFilter, ServiceRegistry
from messaging.typedevent import TypedEventBus
from tests.typedevent.conftest import (
    Item,
    Order,
    Recorder,
    flush,
    handler_of,
    ignored,
    logged,
    named,
    typed,
    unhandled,
    untyped,
)


class Colour(enum.Enum):
    RED = 1


@dataclass
class Rich:
    text: str = "a"
    number: int = 5
    exact: decimal.Decimal = decimal.Decimal("1.50")
    when: datetime.datetime = datetime.datetime(2024, 5, 1, 12, tzinfo=datetime.UTC)
    day: datetime.date = datetime.date(2024, 5, 1)
    colour: Colour = Colour.RED
    key: uuid.UUID = field(default_factory=lambda: uuid.UUID(int=1))
    flag: bool = True
    nothing: Any = None
    tags: list[str] = field(default_factory=lambda: ["x", "y"])
    item: Item = field(default_factory=lambda: Item("pen", 2.5))


def test_what_does_not_match_does_not_arrive(bus: TypedEventBus, services: ServiceRegistry) -> None:
    """Scenario 47; 157.4.5: for handlers of all kinds."""
    handlers = [Recorder(), Recorder(), Recorder(), Recorder()]
    untyped(services, handlers[0], "a", filter="(n>=5)")
    typed(services, handlers[1], "a", type=dict[str, int], filter="(n>=5)")
    untyped(services, handlers[2], "a", filter=LdapFilter("(n>=5)"))  # one that does not respect case: see there
    unhandled(services, handlers[3], "b", filter="(n>=5)")
    for number in range(10):
        bus.deliver_untyped("a", {"n": number})
        bus.deliver_untyped("b", {"n": number})
    flush(bus)
    assert [each.of("n") for each in handlers] == [[5, 6, 7, 8, 9]] * 4


def test_an_event_that_only_filters_keep_off_is_unhandled(bus: TypedEventBus, services: ServiceRegistry) -> None:
    """Scenario 48; 157.4.5.2."""
    handler, left = Recorder(), Recorder()
    untyped(services, handler, "a", filter="(n=1)")
    unhandled(services, left)
    for number in range(3):
        bus.deliver_untyped("a", {"n": number})
    flush(bus)
    assert handler.of("n") == [1]
    assert left.of("n") == [0, 2]


def test_an_event_that_a_handler_received_is_not_unhandled_whatever_it_did_with_it(
    bus: TypedEventBus, services: ServiceRegistry
) -> None:
    """Scenario 49; 157.4.5.2."""
    left, filtered = Recorder(), Recorder()
    untyped(services, lambda topic, event: None, "a")
    untyped(services, filtered, "a", filter="(n=1)")
    unhandled(services, left)
    bus.deliver_untyped("a", {"n": 0})
    flush(bus)
    assert left.events == filtered.events == []


@pytest.mark.parametrize(
    "text",
    ["nonsense", "(", "(a=1", "a=1", "()", "(a)", "(&)", " ", "(a=1)(b=2)", "(n=1", "(!)", 5, b"(a=1)", ["(a=1)"]],
)
def test_a_filter_that_does_not_parse_makes_the_handler_ignored(
    bus: TypedEventBus, services: ServiceRegistry, caplog: pytest.LogCaptureFixture, text: Any
) -> None:
    """Scenario 50; 157.4.9: of all kinds."""
    handler = Recorder()
    for register, more in ((untyped, {}), (unhandled, {}), (typed, {"type": Order})):
        registration = register(services, handler, "a", filter=text, **more)
        assert handler_of(bus, registration) is None
        ignored(caplog, registration)
    with pytest.raises(InvalidFilterError):
        bus.on("a", handler=handler.notify, filter=text)
    bus.deliver(Order(1), "a")
    flush(bus)
    assert handler.events == []


def test_an_empty_text_is_no_filter(bus: TypedEventBus, services: ServiceRegistry) -> None:
    """Scenario 51: in contrast to what the parser says of it."""
    handler, left = Recorder(), Recorder()
    registration = untyped(services, handler, "a", filter="")
    unhandled(services, left, filter="")
    bus.deliver_untyped("a", {})
    bus.deliver_untyped("b", {})
    flush(bus)
    assert handler.topics == ["a"]
    assert left.topics == ["b"]
    found = handler_of(bus, registration)
    assert found is not None
    assert found.filter is None
    with pytest.raises(InvalidFilterError):
        LdapFilter("")


def test_nested_data_cannot_be_reached_but_its_presence_can(bus: TypedEventBus, services: ServiceRegistry) -> None:
    """Scenario 52; 157.4.5.1."""
    by_path, by_value, by_presence = Recorder(), Recorder(), Recorder()
    untyped(services, by_path, "a", filter="(|(item.name=*)(item.name=pen)(name=pen)(item/name=pen))")
    untyped(services, by_value, "a", filter="(|(item=pen)(item=*pen*)(item>=a))")
    untyped(services, by_presence, "a", filter="(item=*)")
    bus.deliver(Rich(), "a")
    bus.deliver_untyped("a", {"item": {"name": "pen"}})
    flush(bus)
    assert by_path.events == by_value.events == []
    assert len(by_presence.events) == 2


def test_a_key_with_dots_is_a_key_like_others(bus: TypedEventBus, services: ServiceRegistry) -> None:
    handler = Recorder()
    untyped(services, handler, "a", filter="(item.name=pen)")
    bus.deliver_untyped("a", {"item.name": "pen"})
    flush(bus)
    assert len(handler.events) == 1


def test_the_filter_sees_what_was_published_and_not_what_the_handler_gets(
    bus: TypedEventBus, services: ServiceRegistry
) -> None:
    """Scenario 53; 157.4.5: in map form, before it is converted."""
    as_published, as_converted, by_default = Recorder(), Recorder(), Recorder()
    typed(services, as_published, "a", type=Order, filter="(&(id=7*)(extra=*))")  # a text, and not part of an Order
    typed(services, as_converted, "a", type=Order, filter="(customer=nobody)")  # the default of Order
    typed(services, by_default, "b", type=Order, filter="(customer=nobody)")
    bus.deliver_untyped("a", {"id": "7", "extra": 1})
    bus.deliver(Order(8), "b")
    flush(bus)
    assert as_published.data == [Order(7)]
    assert as_converted.data == []
    assert by_default.data == [Order(8)]


@pytest.mark.parametrize(
    ("text", "matches"),
    [
        ("(text=a)", True),
        ("(text=A)", False),
        ("(number>=5)", True),
        ("(number>=5.5)", False),
        ("(number=5.0)", True),
        ("(exact=1.5)", True),
        ("(when>=2024-05-01T00:00:00+00:00)", True),
        ("(day<=2024-04-30)", False),
        ("(colour=RED)", True),
        ("(key=00000000-0000-0000-0000-000000000001)", True),
        ("(flag=true)", True),
        ("(nothing=*)", False),
        ("(!(nothing=*))", True),
        ("(tags=y)", True),
        ("(&(tags=x)(tags=y)(!(tags=z)))", True),
        ("(item=*)", True),
        ("(missing=*)", False),
        ("(!(missing=1))", True),
        ("(|(missing=1)(text=a*))", True),
    ],
)
def test_values_of_all_types_compare_as_such(
    bus: TypedEventBus, services: ServiceRegistry, text: str, matches: bool
) -> None:
    """157.4.5."""
    handler = Recorder()
    untyped(services, handler, "a", filter=text)
    bus.deliver(Rich(), "a")
    flush(bus)
    assert bool(handler.events) == matches


def test_keys_respect_case(bus: TypedEventBus, services: ServiceRegistry) -> None:
    """Scenario 54: unlike those of service properties."""
    lower, upper, given = Recorder(), Recorder(), Recorder()
    untyped(services, lower, "a", filter="(total=1)")
    untyped(services, upper, "a", filter="(TOTAL=1)")
    untyped(services, given, "a", filter=LdapFilter("(total=1)", case_sensitive=False))
    bus.deliver_untyped("a", {"total": 1})
    bus.deliver_untyped("a", {"Total": 1})
    bus.deliver_untyped("a", {"Total": 1, "TOTAL": 2, "total": 3})
    flush(bus)
    assert len(lower.events) == len(given.events) == 1
    assert upper.events == []


class Odd(str):
    """Raises when it is looked at."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        raise LookupError("do not look")

    def __ge__(self, other: object) -> bool:
        raise LookupError("do not look")

    __hash__ = str.__hash__


def test_odd_data_does_not_match_and_harms_no_other(bus: TypedEventBus, services: ServiceRegistry) -> None:
    """Scenario 55: neither the publisher nor other handlers."""
    handlers = [Recorder() for _ in range(3)]
    left = Recorder()
    untyped(services, handlers[0], "a", filter="(n=1)")
    untyped(services, handlers[1], "a", filter="(n>=1)")
    untyped(services, handlers[2], "a", filter="(m=1)")
    unhandled(services, left)
    for odd in (Odd("1"), float("nan"), decimal.Decimal("sNaN"), b"1", range(1), [[1]], {"n": 1}):
        bus.deliver_untyped("a", {"n": odd})
        bus.deliver_untyped("a", {"n": odd, "m": 1})
    flush(bus)
    assert handlers[0].events == handlers[1].events == []
    assert len(handlers[2].events) == 7
    assert len(left.events) == 7


def test_data_that_cannot_be_read_does_not_match_which_is_logged(
    bus: TypedEventBus, services: ServiceRegistry, caplog: pytest.LogCaptureFixture
) -> None:
    """Scenario 55; 157.4.9."""

    class Unreadable:
        n: int

        def __getattribute__(self, name: str) -> Any:
            if name == "n":
                raise LookupError("do not look")
            return super().__getattribute__(name)

    filtered, other = Recorder(), Recorder()
    registration = untyped(services, filtered, "a", filter="(n=*)")
    typed(services, other, "a", type=Unreadable)
    bus.deliver(Unreadable(), "a")
    bus.deliver_untyped("a", {"n": 1})
    flush(bus)
    assert filtered.data == [{"n": 1}]
    assert len(other.data) == 2
    (text,) = logged(caplog, repr(registration.reference), "does not get", "'a'")
    assert "do not look" not in text


def test_a_filter_is_tested_where_it_is_published(bus: TypedEventBus, services: ServiceRegistry) -> None:
    """Whether an event is unhandled is known at once; and what happens to its source later does not matter."""
    seen: list[str] = []

    class Source:
        n: int = 1

        def __getattribute__(self, name: str) -> Any:
            if name == "n":
                seen.append(threading.current_thread().name)
            return super().__getattribute__(name)

    handlers = [Recorder() for _ in range(5)]
    for number, each in enumerate(handlers):
        untyped(services, each, "a", filter=f"(n>={number % 2})")
    bus.deliver(Source(), "a")
    flush(bus)
    assert [len(each.events) for each in handlers] == [1] * 5
    assert set(seen) == {threading.current_thread().name}
    assert len(seen) == 1  # the map is made once, for all filters and handlers


def test_a_filter_may_be_changed_given_and_taken_away(bus: TypedEventBus, services: ServiceRegistry) -> None:
    """157.4.6: the registration is updated."""
    handler = Recorder()
    registration = untyped(services, handler, "a")
    for properties in (named("a", filter="(n=1)"), named("a"), named("a", filter="(n=2)"), named("a", filter="")):
        registration.update(properties)
        for number in range(3):
            bus.deliver_untyped("a", {"n": number})
        flush(bus)
    assert handler.of("n") == [1, 0, 1, 2, 2, 0, 1, 2]
