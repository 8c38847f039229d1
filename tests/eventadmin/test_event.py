"""Events: a topic and properties, which do not change (RFC 97 5.1.1, 5.7.1, 6.3)."""

from __future__ import annotations

import copy
import enum
import itertools
import math
import pickle
from collections import ChainMap, OrderedDict
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any
from unittest import mock

import pytest

from messaging.errors import (
    ArgumentError,
    InvalidEventError,
    InvalidFilterError,
    InvalidTopicError,
    NullEventError,
)
from messaging.eventadmin import Event, EventConstants
from messaging.services import LdapFilter, ServiceProperties
from messaging.testing.tables import table
from tests.dispatch.helpers import meanwhile, switching_often

NAMES = EventConstants.EVENT_TOPIC_NAMES


class Odd:
    """A value that cannot be compared, nor hashed."""

    def __eq__(self, other: object) -> bool:
        raise RuntimeError("not with me")

    __hash__ = None  # type: ignore[assignment]


# --- topics


@table(
    "topic",
    ["", "/", "a/", "/a", "a//b", "a b", "a.b", "*", "a/*", "a/+", "+", "a\n", "a/b\n", "a/\u200b", "a:b", "a/b?",
     "\ud800", "org.osgi/service/upnp/UPnPEvent"],
)  # fmt: skip
def test_the_topic_must_conform_to_the_grammar(topic: str) -> None:
    """Scenarios 1 and 49; RFC 97 5.1.1.1, 6.3.1: refused when the event is made."""
    with pytest.raises(InvalidTopicError):
        Event(topic)
    assert issubclass(InvalidTopicError, ArgumentError)


@table("topic", [5, b"a/b", ["a"], object()])
def test_a_topic_is_a_str(topic: Any) -> None:
    with pytest.raises(InvalidTopicError, match="must be a str"):
        Event(topic)


def test_there_is_no_event_without_a_topic() -> None:
    with pytest.raises(NullEventError):
        Event(None)  # type: ignore[arg-type]


@table("topic", ["a", "a/b", "org/osgi/framework/BundleEvent/STARTED", "A-1/_b/$c", "ä/日本", "0"])
def test_any_tokens_with_solidi_between_them_are_a_topic(topic: str) -> None:
    """RFC 97 5.1.1.1."""
    event = Event(topic)
    assert (event.topic, event.get_topic()) == (topic, topic)


def test_topics_are_case_sensitive() -> None:
    """RFC 97 5.1.1.1."""
    assert Event("a/B") != Event("a/b")


def test_a_topic_of_a_subclass_of_str_becomes_a_plain_one() -> None:
    class Topic(str, enum.Enum):  # noqa: UP042  # the way it was before StrEnum
        ORDERS = "shop/orders"

        def __str__(self) -> str:
            return "something else"

    topic = Event(Topic.ORDERS).topic
    assert (type(topic), topic, f"{topic}") == (str, "shop/orders", "shop/orders")


# --- the topic among the properties


def test_an_event_without_properties_has_its_topic_as_the_only_one() -> None:
    """Scenario 2; RFC 97 6.3.3: the names are never empty."""
    for event in (Event("a/b"), Event("a/b", None), Event("a/b", {})):
        assert event.get_property_names() == ["event.topics"]
        assert dict(event.properties) == {"event.topics": "a/b"}


@table("name", ["topic", "event.topic", "event.topics"])
def test_the_topic_is_available_as_a_property(name: str) -> None:
    """Scenario 3; RFC 97 5.1.1.2: under the name of the text, of the constants, and of later versions."""
    event = Event("a/b", {"x": 1})
    assert event.get_property(name) == "a/b"
    assert event.get_property_names() == ["event.topics", "x"]


@table("name", ["topic", "event.topic", "event.topics"])
def test_the_real_topic_wins(name: str) -> None:
    """Scenario 4."""
    event = Event("a/b", {name: "c/d", "x": 1})
    assert [event.get_property(each) for each in NAMES] == ["a/b"] * 3
    assert event.get_property_names() == ["event.topics", "x"]
    assert event == Event("a/b", {"x": 1})


@table(
    ("names", "left"),
    [((), {"topic": 1, "event.topic": 2}), ("topic", {"event.topic": 2}), (["event.topic"], {"topic": 1})],
)
def test_which_names_the_topic_has_can_be_said(names: Any, left: dict[str, int]) -> None:
    """Scenario 3: the switch for what has properties of such names; ``event.topics`` is always the topic."""
    event = Event("a/b", {"topic": 1, "event.topic": 2, "event.topics": 3}, topic_names=names)
    assert dict(event.properties) == {"event.topics": "a/b", **left}
    assert sorted(event.get_property_names()) == sorted(event.properties)
    assert event.matches("(event.topics=a/b)")


def test_names_of_the_topic_are_text() -> None:
    with pytest.raises(InvalidEventError, match="must be str"):
        Event("a", topic_names=["x", 5])  # type: ignore[list-item]


# --- properties


def test_an_absent_property_is_none() -> None:
    """Scenario 11; RFC 97 6.3.2."""
    assert Event("a").get_property("x") is None
    assert Event("a", {"X": 1}).get_property("x") is None  # names are case-sensitive
    assert Event("a").get_property(5) is None  # type: ignore[arg-type]


def test_keys_that_are_no_text_are_dropped() -> None:
    """Scenario 8."""
    event = Event("a", {1: "x", None: "y", b"k": "z", ("t",): 0, "s": 1})  # type: ignore[dict-item]
    assert event.get_property_names() == ["event.topics", "s"]


@table("properties", [[], "ab", 5, {"a"}, [("a", 1)], object()])
def test_properties_are_a_mapping(properties: Any) -> None:
    with pytest.raises(InvalidEventError, match="mapping"):
        Event("a", properties)


def test_the_caller_may_change_the_mapping_afterwards() -> None:
    """Scenario 7."""
    given = {"x": 1, "y": 2}
    event = Event("a", given)
    given["x"] = 5
    del given["y"]
    given["z"] = 3
    assert event == Event("a", {"x": 1, "y": 2})


def test_the_caller_may_change_the_mapping_meanwhile() -> None:
    """Scenario 7: the copy is atomic, so an event has the properties of one moment."""
    given: dict[str, int] = {f"k{number}": 0 for number in range(50)}
    numbers = itertools.count(50)

    def change(_: int) -> None:
        number = next(numbers)
        given[f"k{number}"] = 0
        given.pop(f"k{number - 50}")

    with switching_often(), meanwhile(change, [0]):
        for _ in range(2000):
            assert len(Event("a", given).get_property_names()) in (51, 52)


def test_results_of_an_event_cannot_change_it() -> None:
    event = Event("a", {"x": 1})
    event.get_property_names().clear()
    with pytest.raises(TypeError):
        event.properties["x"] = 2  # type: ignore[index]
    with pytest.raises(AttributeError):
        event.topic = "b"  # type: ignore[misc]
    with pytest.raises(AttributeError):
        event.more = 1  # type: ignore[attr-defined]
    assert (event.topic, dict(event.properties)) == ("a", {"event.topics": "a", "x": 1})


class Shouting(Mapping[str, int]):
    """A mapping of an application, without any of the shortcuts."""

    def __getitem__(self, key: str) -> int:
        return {"x": 1, "y": 2}[key]

    def __iter__(self) -> Iterator[str]:
        return iter(["x", "y"])

    def __len__(self) -> int:
        return 2

    def __bool__(self) -> bool:
        raise RuntimeError("neither true nor false")


@table(
    "properties",
    [
        {"y": 2, "x": 1},
        MappingProxyType({"x": 1, "y": 2}),
        OrderedDict(y=2, x=1),
        ChainMap({"x": 1}, {"x": 5, "y": 2}),
        ServiceProperties({"x": 1, "y": 2}),
        Shouting(),
    ],
    ids=lambda each: type(each).__name__,
)
def test_any_mapping_will_do(properties: Mapping[str, Any]) -> None:
    """Scenario 5: the kind of the mapping makes no difference."""
    event, other = Event("a", properties), Event("a", {"x": 1, "y": 2})
    assert event == other
    assert hash(event) == hash(other)
    assert event.matches("(&(x=1)(y=2))")
    assert type(event.get_property_names()) is list


# --- equality


def test_equal_topic_and_equal_properties_make_equal_events() -> None:
    """Scenario 5; RFC 97 6.3.6, 6.3.7."""
    one, other = Event("a/b", {"x": [1, 2], "y": {"z": 1.0}}), Event("a/b", {"y": {"z": 1}, "x": [1, 2]})
    assert one == other
    assert hash(one) == hash(other)
    assert len({one, other}) == 1


def test_another_topic_or_property_makes_another_event() -> None:
    """Scenario 6; RFC 97 6.3.6."""
    event = Event("a/b", {"x": 1})
    for other in (
        Event("a/c", {"x": 1}),
        Event("a/b", {"x": 2}),
        Event("a/b", {"x": 1, "y": 2}),
        Event("a/b"),
        Event("a/b", {"X": 1}),
    ):
        assert event != other
        assert not event == other  # noqa: SIM201  # both are asked for


@table("other", [None, 5, "a/b", {"event.topics": "a/b"}, ("a/b", {}), object()])
def test_comparing_with_another_type_is_false(other: Any) -> None:
    """Scenario 6."""
    assert (Event("a/b") == other) is False
    assert (other == Event("a/b")) is False


def test_an_object_equal_to_everything_equals_events() -> None:
    assert Event("a") == mock.ANY
    assert mock.ANY == Event("a")  # noqa: SIM300


def test_values_need_no_hash() -> None:
    event = Event("a", {"x": [], "y": {}, "z": Odd()})
    assert {event: 1}[event] == 1


def test_events_with_values_that_cannot_be_compared_are_not_equal() -> None:
    odd = Odd()
    assert Event("a", {"x": odd}) != Event("a", {"x": Odd()})
    assert Event("a", {"x": odd}) == Event("a", {"x": odd})  # one and the same value need not be compared
    circle: list[Any] = []
    circle.append(circle)
    square: list[Any] = []
    square.append(square)
    assert Event("a", {"x": circle}) != Event("a", {"x": square})


def test_no_number_equals_itself_only() -> None:
    assert Event("a", {"x": math.nan}) == Event("a", {"x": math.nan})
    assert Event("a", {"x": float("nan")}) != Event("a", {"x": float("nan")})


# --- filters


def test_names_are_case_sensitive_in_filters() -> None:
    """Scenario 9; RFC 97 5.7.1."""
    event = Event("a", {"Colour": "red"})
    assert event.matches("(Colour=red)")
    assert not event.matches("(colour=red)")
    assert not event.matches("(COLOUR=red)")
    assert not event.matches("(Colour=Red)")


def test_case_counts_even_with_filters_for_which_it_does_not() -> None:
    """RFC 97 5.7.1: ``matchCase``, whatever the filter was made for."""
    event = Event("a", {"Colour": "red"})
    for case_sensitive in (False, True):
        assert event.matches(LdapFilter("(Colour=red)", case_sensitive=case_sensitive))
        assert not event.matches(LdapFilter("(colour=red)", case_sensitive=case_sensitive))
    assert not Event("a", ServiceProperties({"Colour": "red"})).matches("(colour=red)")


def test_the_topic_can_be_asked_for_in_filters() -> None:
    """Scenario 10; RFC 97 5.1.1.2."""
    event = Event("org/acme/Orders/PLACED")
    for name in NAMES:
        assert event.matches(f"({name}=org/acme/*)")
        assert event.matches(f"({name}=org/acme/Orders/PLACED)")
        assert not event.matches(f"({name}=org/osgi/*)")
    assert not event.matches("(Topic=*)")


@table("text", ["", "x=1", "(x=1", "(&)", None, 5])
def test_objects_that_are_no_filters_are_refused(text: Any) -> None:
    with pytest.raises(InvalidFilterError):
        Event("a").matches(text)


def test_values_that_cannot_be_compared_do_not_match() -> None:
    event = Event("a", {"odd": Odd(), "nan": math.nan, "none": None, "list": [[1], Odd(), 1]})
    assert not event.matches("(odd=1)")
    assert event.matches("(odd=*)")
    assert not event.matches("(nan>=0)")
    assert not event.matches("(none=*)")
    assert event.matches("(list=1)")


# --- subclasses


def test_an_event_may_have_more_than_the_class_says() -> None:
    """RFC 97 7.2: handlers of a sent event can answer its sender."""

    class Question(Event):
        def __init__(self, topic: str) -> None:
            super().__init__(topic)
            self.answers: list[str] = []

    question = Question("a/b")
    question.answers.append("yes")
    assert question == Event("a/b")
    assert Event("a/b") == question
    assert hash(question) == hash(Event("a/b"))
    assert repr(question).startswith("<Question 'a/b'")


@table(
    "name",
    ["topic", "get_topic", "properties", "get_property", "get_property_names", "matches", "__eq__", "__hash__",
     "__str__"],
)  # fmt: skip
def test_the_operations_of_events_must_not_be_overridden(name: str) -> None:
    """RFC 97 6.3; neither here nor by a base that comes before it."""
    with pytest.raises(TypeError, match=f"must not override .*{name}"):
        type("Own", (Event,), {name: lambda self, *_: None})
    mixin = type("Mixin", (), {name: lambda self, *_: None})
    with pytest.raises(TypeError, match=f"must not override .*{name}"):
        type("Mixed", (mixin, Event), {})
    type("Fine", (Event, mixin), {})


# --- text, copies


def test_the_text_of_an_event_has_no_values() -> None:
    """RFC 97 6.3.8. They may be secrets."""
    assert repr(Event("a/b", {"password": "hunter2"})) == "<Event 'a/b': event.topics, password>"
    assert str(Event("a")) == "<Event 'a': event.topics>"


def test_events_can_be_copied() -> None:
    event = Event("a/b", {"x": [1], "y": None}, topic_names="topic")
    for other in (copy.copy(event), copy.deepcopy(event), pickle.loads(pickle.dumps(event))):
        assert other == event
        assert other.get_property_names() == event.get_property_names()
        assert other.matches("(topic=a/b)")
