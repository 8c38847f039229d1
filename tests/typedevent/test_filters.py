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
from messaging.services import LdapFilter
from messaging.typedevent import TypedEventBus
from tests.typedevent.conftest import (
    Item,
    Order,
    Recorder,
    count,
    flush,
    handler_of,
    ignored,
    logged,
    named,
    send,
    state_of,
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


def test_events_that_do_not_match_do_not_arrive(bus: TypedEventBus) -> None:
    """Scenario 47; 157.4.5: for handlers of all kinds."""
    handlers = [Recorder(), Recorder(), Recorder(), Recorder()]
    untyped(bus, handlers[0], "a", filter="(n>=5)")
    typed(bus, handlers[1], "a", type=dict[str, int], filter="(n>=5)")
    untyped(bus, handlers[2], "a", filter=LdapFilter("(n>=5)"))  # one that does not respect case: see there
    unhandled(bus, handlers[3], "b", filter="(n>=5)")
    for number in range(10):
        bus.deliver_untyped("a", {"n": number})
        bus.deliver_untyped("b", {"n": number})
    flush(bus)
    assert [each.of("n") for each in handlers] == [[5, 6, 7, 8, 9]] * 4


def test_an_event_that_only_filters_keep_off_is_unhandled(bus: TypedEventBus) -> None:
    """Scenario 48; 157.4.5.2."""
    handler, left = Recorder(), Recorder()
    untyped(bus, handler, "a", filter="(n=1)")
    unhandled(bus, left)
    count(bus, range(3))
    flush(bus)
    assert handler.of("n") == [1]
    assert left.of("n") == [0, 2]


def test_an_event_that_a_handler_received_is_never_unhandled(bus: TypedEventBus) -> None:
    """Scenario 49; 157.4.5.2."""
    left, filtered = Recorder(), Recorder()
    untyped(bus, lambda topic, event: None, "a")
    untyped(bus, filtered, "a", filter="(n=1)")
    unhandled(bus, left)
    send(bus, "a", {"n": 0})
    assert left.events == filtered.events == []


@pytest.mark.parametrize(
    "text",
    ["nonsense", "(", "(a=1", "a=1", "()", "(a)", "(&)", " ", "(a=1)(b=2)", "(n=1", "(!)", 5, b"(a=1)", ["(a=1)"]],
)
def test_a_filter_that_does_not_parse_makes_the_handler_ignored(
    bus: TypedEventBus, caplog: pytest.LogCaptureFixture, text: Any
) -> None:
    """Scenario 50; 157.4.9: of all kinds."""
    handler = Recorder()
    for register, more in ((untyped, {}), (unhandled, {}), (typed, {"type": Order})):
        registration = register(bus, handler, "a", filter=text, **more)
        assert handler_of(bus, registration) is None
        ignored(caplog, registration)
    with pytest.raises(InvalidFilterError):
        bus.on("a", handler=handler.notify, filter=text)
    send(bus, "a", Order(1))
    assert handler.events == []


def test_an_empty_text_is_no_filter(bus: TypedEventBus) -> None:
    """Scenario 51: in contrast to what the parser says of it."""
    handler, left = Recorder(), Recorder()
    registration = untyped(bus, handler, "a", filter="")
    unhandled(bus, left, filter="")
    bus.deliver_untyped("a", {})
    send(bus, "b", {})
    assert handler.topics == ["a"]
    assert left.topics == ["b"]
    found = state_of(bus, registration)
    assert found.filter is None
    with pytest.raises(InvalidFilterError):
        LdapFilter("")


def test_nested_data_cannot_be_reached_but_its_presence_can(bus: TypedEventBus) -> None:
    """Scenario 52; 157.4.5.1."""
    by_path, by_value, by_presence = Recorder(), Recorder(), Recorder()
    untyped(bus, by_path, "a", filter="(|(item.name=*)(item.name=pen)(name=pen)(item/name=pen))")
    untyped(bus, by_value, "a", filter="(|(item=pen)(item=*pen*)(item>=a))")
    untyped(bus, by_presence, "a", filter="(item=*)")
    send(bus, "a", Rich(), {"item": {"name": "pen"}})
    assert by_path.events == by_value.events == []
    assert len(by_presence.events) == 2


def test_a_key_with_dots_is_a_key_like_others(bus: TypedEventBus) -> None:
    handler = Recorder()
    untyped(bus, handler, "a", filter="(item.name=pen)")
    send(bus, "a", {"item.name": "pen"})
    assert len(handler.events) == 1


def test_a_filter_sees_the_published_data_and_not_the_converted_event(bus: TypedEventBus) -> None:
    """Scenario 53; 157.4.5: in map form, before it is converted."""
    as_published, as_converted, by_default = Recorder(), Recorder(), Recorder()
    typed(bus, as_published, "a", type=Order, filter="(&(id=7*)(extra=*))")  # a text, and not part of an Order
    typed(bus, as_converted, "a", type=Order, filter="(customer=nobody)")  # the default of Order
    typed(bus, by_default, "b", type=Order, filter="(customer=nobody)")
    bus.deliver_untyped("a", {"id": "7", "extra": 1})
    send(bus, "b", Order(8))
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
def test_values_of_all_types_compare_as_such(bus: TypedEventBus, text: str, matches: bool) -> None:
    """157.4.5."""
    handler = Recorder()
    untyped(bus, handler, "a", filter=text)
    send(bus, "a", Rich())
    assert bool(handler.events) == matches


def test_keys_respect_case(bus: TypedEventBus) -> None:
    """Scenario 54: unlike those of service properties."""
    lower, upper, given = Recorder(), Recorder(), Recorder()
    untyped(bus, lower, "a", filter="(total=1)")
    untyped(bus, upper, "a", filter="(TOTAL=1)")
    untyped(bus, given, "a", filter=LdapFilter("(total=1)", case_sensitive=False))
    send(bus, "a", {"total": 1}, {"Total": 1}, {"Total": 1, "TOTAL": 2, "total": 3})
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


def test_odd_data_does_not_match_and_harms_no_other(bus: TypedEventBus) -> None:
    """Scenario 55: neither the publisher nor other handlers."""
    handlers = [Recorder() for _ in range(3)]
    left = Recorder()
    untyped(bus, handlers[0], "a", filter="(n=1)")
    untyped(bus, handlers[1], "a", filter="(n>=1)")
    untyped(bus, handlers[2], "a", filter="(m=1)")
    unhandled(bus, left)
    for odd in (Odd("1"), float("nan"), decimal.Decimal("sNaN"), b"1", range(1), [[1]], {"n": 1}):
        bus.deliver_untyped("a", {"n": odd})
        bus.deliver_untyped("a", {"n": odd, "m": 1})
    flush(bus)
    assert handlers[0].events == handlers[1].events == []
    assert len(handlers[2].events) == 7
    assert len(left.events) == 7


def test_data_that_cannot_be_read_does_not_match_which_is_logged(
    bus: TypedEventBus, caplog: pytest.LogCaptureFixture
) -> None:
    """Scenario 55; 157.4.9."""

    class Unreadable:
        n: int

        def __getattribute__(self, name: str) -> Any:
            if name == "n":
                raise LookupError("do not look")
            return super().__getattribute__(name)

    filtered, other = Recorder(), Recorder()
    registration = untyped(bus, filtered, "a", filter="(n=*)")
    typed(bus, other, "a", type=Unreadable)
    send(bus, "a", Unreadable(), {"n": 1})
    assert filtered.data == [{"n": 1}]
    assert len(other.data) == 2
    (text,) = logged(caplog, repr(registration.reference), "does not get", "'a'")
    assert "do not look" not in text


def test_a_filter_is_tested_where_it_is_published(bus: TypedEventBus) -> None:
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
        untyped(bus, each, "a", filter=f"(n>={number % 2})")
    send(bus, "a", Source())
    assert [len(each.events) for each in handlers] == [1] * 5
    assert set(seen) == {threading.current_thread().name}
    assert len(seen) == 1  # the map is made once, for all filters and handlers


def test_a_filter_may_be_changed_given_and_taken_away(bus: TypedEventBus) -> None:
    """157.4.6: the registration is updated."""
    handler = Recorder()
    registration = untyped(bus, handler, "a")
    for properties in (named("a", filter="(n=1)"), named("a"), named("a", filter="(n=2)"), named("a", filter="")):
        registration.update(properties)
        count(bus, range(3))
        flush(bus)
    assert handler.of("n") == [1, 0, 1, 2, 2, 0, 1, 2]
