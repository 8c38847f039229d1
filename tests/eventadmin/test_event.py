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
from typing import Any, Final
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

NAMES: Final = EventConstants.EVENT_TOPIC_NAMES
TOPIC: Final = "org/acme/Orders/PLACED"
OF_NAMES: Final = {"topic": 1, "event.topic": 2, "event.topics": 3}
OTHER_TYPES: Final = [None, 5, "a/b", {"event.topics": "a/b"}, ("a/b", {}), object()]


class Odd:
    """A value that cannot be compared, nor hashed."""

    def __eq__(self, other: object) -> bool:
        raise RuntimeError("not with me")

    __hash__ = None  # type: ignore[assignment]


# --- topics

NO_TOPICS: Final = [
    *("", "/", "a/", "/a", "a//b", "a b", "a.b", "*", "a/*", "a/+", "+", "a\n", "a/b\n", "a/\u200b", "a:b", "a/b?"),
    *("\ud800", "org.osgi/service/upnp/UPnPEvent"),
]


@table(
    "topic, error, says",
    [
        *((each, InvalidTopicError, "") for each in NO_TOPICS),
        *((each, InvalidTopicError, "must be a str") for each in (5, b"a/b", ["a"], object())),
        (None, NullEventError, ""),
    ],
)
def test_the_topic_must_conform_to_the_grammar(topic: Any, error: type[Exception], says: str) -> None:
    """Scenarios 1 and 49; RFC 97 5.1.1.1, 6.3.1: refused when the event is made."""
    with pytest.raises(error, match=says or None):
        Event(topic)
    assert issubclass(InvalidTopicError, ArgumentError)


class Topic(str, enum.Enum):  # noqa: UP042  # the way it was before StrEnum
    ORDERS = "shop/orders"

    def __str__(self) -> str:
        return "something else"


@table(
    "topic",
    ["a", "a/b", "org/osgi/framework/BundleEvent/STARTED", "A-1/_b/$c", "ä/日本", "0", Topic.ORDERS],
)
def test_any_tokens_with_solidi_between_them_are_a_topic(topic: str) -> None:
    """RFC 97 5.1.1.1: case-sensitive; a subclass of ``str`` becomes a plain one."""
    event = Event(topic)
    assert event.topic == event.get_topic() == f"{event.topic}" == topic
    assert type(event.topic) is str
    assert topic == "0" or Event(topic.swapcase()) != event


# --- the topic among the properties


@table(
    "properties, names, expected",
    {
        # the names are never empty
        "without properties": (None, None, {"event.topics": "a/b"}),
        "an empty mapping": ({}, None, {"event.topics": "a/b"}),
        "others": ({"x": 1}, None, {"event.topics": "a/b", "x": 1}),
        # the real topic wins
        **{name: ({name: "c/d", "x": 1}, None, {"event.topics": "a/b", "x": 1}) for name in NAMES},
        # the switch for what has properties of such names; ``event.topics`` is always the topic
        "no names": (OF_NAMES, (), {"event.topics": "a/b", "topic": 1, "event.topic": 2}),
        "one name": (OF_NAMES, "topic", {"event.topics": "a/b", "event.topic": 2}),
        "the other name": (OF_NAMES, ["event.topic"], {"event.topics": "a/b", "topic": 1}),
    },
)
def test_the_topic_is_available_as_a_property_and_the_real_topic_wins(
    properties: Any, names: Any, expected: dict[str, Any]
) -> None:
    """Scenarios 2, 3 and 4; RFC 97 5.1.1.2, 6.3.3: under the name of the text, of the constants, of later versions."""
    event = Event("a/b", properties) if names is None else Event("a/b", properties, topic_names=names)
    assert dict(event.properties) == expected
    assert event.get_property_names() == [*event.properties]
    assert event.matches("(event.topics=a/b)")
    if names is None:
        assert [event.get_property(each) for each in NAMES] == ["a/b"] * 3
        assert event == Event("a/b", {name: value for name, value in expected.items() if name == "x"})


def test_names_of_the_topic_are_text() -> None:
    with pytest.raises(InvalidEventError, match="must be str"):
        Event("a", topic_names=["x", 5])  # type: ignore[list-item]


# --- properties


def test_an_absent_property_is_none() -> None:
    """Scenarios 8 and 11; RFC 97 6.3.2. Keys that are no text are dropped."""
    assert Event("a").get_property("x") is None
    assert Event("a", {"X": 1}).get_property("x") is None  # names are case-sensitive
    assert Event("a").get_property(5) is None  # type: ignore[arg-type]
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

ODD: Final = Odd()
NAN: Final = math.nan
circle: list[Any] = []
circle.append(circle)
square: list[Any] = []
square.append(square)


@table(
    "one, other, are_equal",
    [
        ({"x": [1, 2], "y": {"z": 1.0}}, {"y": {"z": 1}, "x": [1, 2]}, True),
        *(({"x": 1}, other, False) for other in ({"x": 2}, {"x": 1, "y": 2}, {}, {"X": 1})),
        # one and the same value need not be compared
        ({"x": ODD}, {"x": ODD}, True),
        ({"x": ODD}, {"x": Odd()}, False),
        ({"x": circle}, {"x": square}, False),
        ({"x": NAN}, {"x": NAN}, True),
        ({"x": float("nan")}, {"x": float("nan")}, False),
    ],
)
def test_equal_topic_and_equal_properties_make_equal_events(one: Any, other: Any, are_equal: bool) -> None:
    """Scenarios 5 and 6; RFC 97 6.3.6, 6.3.7."""
    first, second = Event("a/b", one), Event("a/b", other)
    assert (first == second) is are_equal
    assert (first != second) is not are_equal
    assert first != Event("a/c", one)
    if are_equal:
        assert len({first, second}) == 1


@table("other, is_equal", [*((each, False) for each in OTHER_TYPES), (mock.ANY, True)])
def test_comparing_with_another_type_is_false(other: Any, is_equal: bool) -> None:
    """Scenario 6: unless that equals everything."""
    assert (Event("a/b") == other) is is_equal
    assert (other == Event("a/b")) is is_equal


def test_values_need_no_hash() -> None:
    event = Event("a", {"x": [], "y": {}, "z": Odd()})
    assert {event: 1}[event] == 1


# --- filters


@table(
    "properties, matching, others",
    [
        # names are case-sensitive, and values are
        ({"Colour": "red"}, ["(Colour=red)"], ["(colour=red)", "(COLOUR=red)", "(Colour=Red)"]),
        (ServiceProperties({"Colour": "red"}), ["(Colour=red)"], ["(colour=red)"]),
        # the topic can be asked for
        (
            {},
            [f"({name}={text})" for name in NAMES for text in ("org/acme/*", TOPIC)],
            ["(Topic=*)", "(topic=org/os*)"],
        ),
        # values that cannot be compared do not match
        (
            {"odd": ODD, "nan": math.nan, "none": None, "list": [[1], Odd(), 1]},
            ["(odd=*)", "(list=1)"],
            ["(odd=1)", "(nan>=0)", "(none=*)"],
        ),
    ],
)
def test_filters_match_as_names_and_values_do(properties: Any, matching: list[str], others: list[str]) -> None:
    """Scenarios 9 and 10; RFC 97 5.1.1.2, 5.7.1: ``matchCase``, whatever the filter was made for."""
    event = Event(TOPIC, properties)
    for text in (*matching, *others):
        assert event.matches(text) is (text in matching)
        for case_sensitive in (False, True):
            assert event.matches(LdapFilter(text, case_sensitive=case_sensitive)) is (text in matching)


@table("text", ["", "x=1", "(x=1", "(&)", None, 5])
def test_objects_that_are_no_filters_are_refused(text: Any) -> None:
    with pytest.raises(InvalidFilterError):
        Event("a").matches(text)


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
