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
from tests.typedevent.conftest import Bus, Item, Order, Recorder


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


def test_an_empty_text_is_no_filter(bus: Bus) -> None:
    """Scenario 51: in contrast to what the parser says of it."""
    handler = Recorder().untyped(bus, "a", filter="")
    left = Recorder().unhandled(bus, filter="")
    bus.deliver_untyped("a", {})
    bus.send("b", {})
    assert handler.topics == ["a"]
    assert left.topics == ["b"]
    found = bus.state_of(handler.registration)
    assert found.filter is None
    with pytest.raises(InvalidFilterError):
        LdapFilter("")


def test_nested_data_cannot_be_reached_but_its_presence_can(bus: Bus) -> None:
    """Scenario 52; 157.4.5.1."""
    by_path = Recorder().untyped(bus, "a", filter="(|(item.name=*)(item.name=pen)(name=pen)(item/name=pen))")
    by_value = Recorder().untyped(bus, "a", filter="(|(item=pen)(item=*pen*)(item>=a))")
    by_presence = Recorder().untyped(bus, "a", filter="(item=*)")
    bus.send("a", Rich(), {"item": {"name": "pen"}})
    assert by_path.events == by_value.events == []
    assert len(by_presence.events) == 2


def test_a_key_with_dots_is_a_key_like_others(bus: Bus) -> None:
    handler = Recorder().untyped(bus, "a", filter="(item.name=pen)")
    bus.send("a", {"item.name": "pen"})
    assert len(handler.events) == 1


def test_a_filter_sees_the_published_data_and_not_the_converted_event(bus: Bus) -> None:
    """Scenario 53; 157.4.5: in map form, before it is converted."""
    as_published = Recorder().typed(
        bus, "a", type=Order, filter="(&(id=7*)(extra=*))"
    )  # a text, and not part of an Order
    as_converted = Recorder().typed(bus, "a", type=Order, filter="(customer=nobody)")  # the default of Order
    by_default = Recorder().typed(bus, "b", type=Order, filter="(customer=nobody)")
    bus.deliver_untyped("a", {"id": "7", "extra": 1})
    bus.send("b", Order(8))
    assert as_published.data == [Order(7)]
    assert as_converted.data == []
    assert by_default.data == [Order(8)]


def test_values_of_all_types_compare_as_such(bus: Bus) -> None:
    """157.4.5."""
    matching = [
        *("(text=a)", "(number>=5)", "(number=5.0)", "(exact=1.5)", "(when>=2024-05-01T00:00:00+00:00)", "(item=*)"),
        *("(key=00000000-0000-0000-0000-000000000001)", "(flag=true)", "(!(nothing=*))", "(tags=y)", "(colour=RED)"),
        *("(&(tags=x)(tags=y)(!(tags=z)))", "(!(missing=1))", "(|(missing=1)(text=a*))"),
    ]
    others = ["(text=A)", "(number>=5.5)", "(day<=2024-04-30)", "(nothing=*)", "(missing=*)"]
    handlers = {text: Recorder().untyped(bus, "a", filter=text) for text in [*matching, *others]}
    bus.send("a", Rich())
    assert [text for text, handler in handlers.items() if handler.events] == matching


def test_keys_respect_case(bus: Bus) -> None:
    """Scenario 54: unlike those of service properties."""
    lower = Recorder().untyped(bus, "a", filter="(total=1)")
    upper = Recorder().untyped(bus, "a", filter="(TOTAL=1)")
    given = Recorder().untyped(bus, "a", filter=LdapFilter("(total=1)", case_sensitive=False))
    bus.send("a", {"total": 1}, {"Total": 1}, {"Total": 1, "TOTAL": 2, "total": 3})
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


def test_odd_data_does_not_match_and_harms_no_other(bus: Bus) -> None:
    """Scenario 55: neither the publisher nor other handlers."""
    handlers = [Recorder() for _ in range(3)]
    bus.untyped(handlers[0], "a", filter="(n=1)")
    bus.untyped(handlers[1], "a", filter="(n>=1)")
    bus.untyped(handlers[2], "a", filter="(m=1)")
    left = Recorder().unhandled(bus)
    for odd in (Odd("1"), float("nan"), decimal.Decimal("sNaN"), b"1", range(1), [[1]], {"n": 1}):
        bus.deliver_untyped("a", {"n": odd})
        bus.deliver_untyped("a", {"n": odd, "m": 1})
    bus.drain()
    assert handlers[0].events == handlers[1].events == []
    assert len(handlers[2].events) == 7
    assert len(left.events) == 7


def test_data_that_cannot_be_read_does_not_match_which_is_logged(bus: Bus) -> None:
    """Scenario 55; 157.4.9."""

    class Unreadable:
        n: int

        def __getattribute__(self, name: str) -> Any:
            if name == "n":
                raise LookupError("do not look")
            return super().__getattribute__(name)

    filtered = Recorder().untyped(bus, "a", filter="(n=*)")
    other = Recorder().typed(bus, "a", type=Unreadable)
    bus.send("a", Unreadable(), {"n": 1})
    assert filtered.data == [{"n": 1}]
    assert len(other.data) == 2
    (text,) = bus.logged(repr(filtered.registration.reference), "event on 'a' skipped")
    assert "do not look" not in text


def test_a_filter_is_tested_where_it_is_published(bus: Bus) -> None:
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
        bus.untyped(each, "a", filter=f"(n>={number % 2})")
    bus.send("a", Source())
    assert [len(each.events) for each in handlers] == [1] * 5
    assert set(seen) == {threading.current_thread().name}
    assert len(seen) == 1  # the map is made once, for all filters and handlers
