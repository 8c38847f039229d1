"""Which fields classes have, and events as nested maps: 157.2, 157.4.2."""

from __future__ import annotations

import collections
import datetime
import decimal
import enum
import fractions
import functools
import io
import ipaddress
import re
import sys
import threading
import types
import uuid
from collections import UserDict, UserList, deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import KW_ONLY, InitVar, dataclass, field, make_dataclass
from pathlib import Path, PurePosixPath
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import (
    AliasChoices,
    BaseModel,
    ConfigDict,
    Field,
    PrivateAttr,
    RootModel,
    SecretStr,
    computed_field,
    create_model,
)
from pydantic.dataclasses import dataclass as pydantic_dataclass

from messaging.dispatch.eventdata.maps import checked_copy, to_map
from messaging.dispatch.eventdata.schema import has_fields, hints_of, is_simple, schema_of
from messaging.errors import InvalidEventError
from messaging.testing.tables import table

T = TypeVar("T")
U = TypeVar("U")
NOW = datetime.datetime(2026, 1, 2, 3, 4, 5, tzinfo=datetime.UTC)


class Colour(enum.Enum):
    RED = 1


# --- one class of each kind, all with the same fields


class Model(BaseModel):
    model_config = ConfigDict(validate_by_name=False)

    LIMIT: ClassVar[int] = 3
    number: int = Field(alias="theNumber")
    text: str = Field("x", validation_alias=AliasChoices("theText", "TEXT"))
    more: list[int] = []
    _private: int = PrivateAttr(7)

    @computed_field  # type: ignore[prop-decorator]
    @property
    def twice(self) -> int:
        return 2 * self.number

    @functools.cached_property
    def thrice(self) -> int:
        return 3 * self.number

    def method(self) -> None: ...


@dataclass
class Data:
    LIMIT: ClassVar[int] = 3
    number: int
    text: str = "x"
    more: list[int] = field(default_factory=list)
    _private: int = 7

    @property
    def twice(self) -> int:
        return 2 * self.number

    def method(self) -> None: ...


@dataclass(frozen=True, slots=True)
class FrozenData:
    number: int
    _: KW_ONLY
    text: str = "x"
    more: list[int] = field(default_factory=list)
    _private: int = 7


@pydantic_dataclass
class CheckedData:
    number: int = Field(alias="theNumber")
    text: str = "x"
    more: list[int] = Field(default_factory=list)


class Named(NamedTuple):
    number: int
    text: str = "x"
    more: list[int] = []  # noqa: RUF012

    @property
    def twice(self) -> int:
        return 2 * self.number

    def method(self) -> None: ...


class Plain:
    """As OSGi's DTOs are."""

    LIMIT: ClassVar[int] = 3
    static = 5
    number: int
    text: str = "x"
    more: list[int]
    _private: int = 7

    @property
    def twice(self) -> int:
        return 2 * self.number

    @staticmethod
    def helper() -> None: ...

    def method(self) -> None: ...


class Made:
    def __init__(self, number: int, *, text: str = "x", more: list[int] | None = None, **rest: Any) -> None:
        self.number = number
        self.text = text
        self.more = more or []
        self._private = rest


class Slotted:
    __slots__ = ("_private", "more", "number", "text")

    def __init__(self, number: int, text: str = "x", more: list[int] | None = None) -> None:
        self.number = number
        self.text = text
        self.more = more or []
        self._private = 7


def plain(number: int, text: str = "x", more: list[int] | None = None) -> Plain:
    made = Plain()
    made.number, made.text, made.more = number, text, more or []
    return made


def struct() -> Callable[..., Any]:
    msgspec = pytest.importorskip("msgspec")
    return msgspec.defstruct(  # type: ignore[no-any-return]
        "Struct", [("number", int), ("text", str, "x"), ("more", list[int], msgspec.field(default_factory=list))]
    )


def frozen_struct() -> Callable[..., Any]:
    msgspec = pytest.importorskip("msgspec")
    return msgspec.defstruct(  # type: ignore[no-any-return]
        "FrozenStruct",
        [("number", int), ("text", str, "x"), ("more", list[int], msgspec.field(default_factory=list))],
        frozen=True,
        kw_only=True,
        rename="camel",
    )


def with_attrs() -> Callable[..., Any]:
    attrs = pytest.importorskip("attrs")

    @attrs.define
    class WithAttrs:
        number: int
        text: str = "x"
        more: list[int] = attrs.field(factory=list)
        _private: int = 7
        later: int = attrs.field(default=0, init=False)

        def __attrs_post_init__(self) -> None:
            del self.later

    return WithAttrs


#: makes instances from number, text, more
KINDS: dict[str, Callable[[], Callable[..., Any]]] = {
    "pydantic": lambda: (
        lambda number, **more: Model(
            theNumber=number, **({"theText": more.pop("text")} if "text" in more else {}), **more
        )
    ),
    "dataclass": lambda: Data,
    "frozen dataclass": lambda: FrozenData,
    "pydantic dataclass": lambda: lambda number, **more: CheckedData(theNumber=number, **more),
    "NamedTuple": lambda: Named,
    "msgspec": struct,
    "frozen msgspec": frozen_struct,
    "attrs": with_attrs,
    "plain": lambda: plain,
    "with __init__": lambda: Made,
    "with __slots__": lambda: Slotted,
}
ALL_KINDS = pytest.mark.parametrize("kind", KINDS)


@ALL_KINDS
def test_the_map_of_an_event_has_its_public_fields_and_nothing_else(kind: str) -> None:
    """Scenario 35; 157.2.1."""
    make = KINDS[kind]()
    event = make(number=1, text="a", more=[2])
    assert has_fields(event)
    assert to_map(event) == {"number": 1, "text": "a", "more": [2]}
    schema = schema_of(type(event))
    assert schema is not None
    assert schema.read(event) == {"number": 1, "text": "a", "more": [2]}
    assert to_map(make(number=5)) == {"number": 5, "text": "x", "more": []}


@ALL_KINDS
def test_the_map_shares_nothing_that_can_be_changed(kind: str) -> None:
    """Scenario 14."""
    more: Any = [1, [2], {"a": {3}}]
    event = KINDS[kind]()(number=1, more=[]) if "pydantic" in kind else KINDS[kind]()(number=1, more=more)
    if "pydantic" in kind:
        event.more.extend(more)
    data = to_map(event)
    event.more[1].append(3)
    event.more[2]["a"].add(4)
    event.more.append(5)
    assert data["more"] == [1, [2], {"a": {3}}]


@ALL_KINDS
def test_a_schema_marks_its_required_fields(kind: str) -> None:
    schema = schema_of(type(KINDS[kind]()(number=1)))
    assert schema is not None
    required = {each.name: each.is_required for each in schema.fields}
    # what a plain class without a constructor has not, is null
    assert required.pop("number") is (kind != "plain")
    assert not any(required.values())


@ALL_KINDS
def test_computed_attributes_are_no_fields_even_when_they_are_there(kind: str) -> None:
    event = KINDS[kind]()(number=1)
    for name in ("twice", "thrice"):
        getattr(event, name, None)
    assert "twice" not in to_map(event)
    assert "thrice" not in to_map(event)


# --- schemas in detail


def annotations_of(type_: Any) -> dict[str, Any]:
    schema = schema_of(type_)
    assert schema is not None
    return {each.name: each.annotation for each in schema.fields}


class Base:
    first: int
    second: str = "base"


class Derived(Base):
    second: bytes = b""  # type: ignore[assignment]
    third: list[Derived]


@dataclass
class BaseData:
    first: int


@dataclass
class DerivedData(BaseData):
    second: DerivedData | None = None


def test_fields_are_inherited_and_overridden() -> None:
    assert annotations_of(Derived) == {"first": int, "second": bytes, "third": list[Derived]}
    assert annotations_of(DerivedData) == {"first": int, "second": DerivedData | None}
    derived = Derived()
    derived.first, derived.third = 1, []
    assert to_map(derived) == {"first": 1, "second": b"", "third": []}
    assert to_map(DerivedData(1, DerivedData(2))) == {"first": 1, "second": {"first": 2, "second": None}}


class Unresolvable:
    limit: ClassVar[Missing] = 1  # type: ignore[name-defined]  # noqa: F821
    good: list[int]
    bad: Missing  # type: ignore[name-defined]  # noqa: F821
    own: Unresolvable
    nested: dict[str, Missing]  # type: ignore[name-defined]  # noqa: F821


class UnresolvableInit:
    def __init__(self, good: int, bad: Missing = None) -> None:  # type: ignore[name-defined]  # noqa: F821
        self.good = good
        self.bad = bad


def test_annotations_that_cannot_be_resolved_ask_for_anything() -> None:
    assert annotations_of(Unresolvable) == {"good": list[int], "bad": Any, "own": Unresolvable, "nested": Any}
    assert annotations_of(UnresolvableInit) == {"good": int, "bad": Any}


def test_annotations_of_local_classes_refer_to_themselves() -> None:
    @dataclass
    class Node:
        children: list[Node]
        stranger: Local  # noqa: F821  # type: ignore[name-defined]
        when: datetime.datetime

    assert annotations_of(Node) == {"children": list[Node], "stranger": Any, "when": datetime.datetime}


def test_annotations_may_be_types_or_texts() -> None:
    made = make_dataclass("Made", [("a", int), ("b", "int | None"), ("c", "Nowhere")])
    assert annotations_of(made) == {"a": int, "b": int | None, "c": Any}
    assert hints_of(lambda: None) == {}
    assert hints_of(5) == {}


@table("early", ["class Early(BaseModel):", "@dataclass\nclass Early:"])
def test_a_model_may_refer_to_one_that_is_defined_later(monkeypatch: pytest.MonkeyPatch, early: str) -> None:
    module = types.ModuleType("made_by_test")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    scope = vars(module) | {"BaseModel": BaseModel, "dataclass": pydantic_dataclass}
    vars(module).update(scope)
    exec(f"{early}\n    later: 'Later | None' = None", vars(module))
    schema = schema_of(module.Early)
    assert schema is not None
    assert not schema.is_complete
    exec("class Later(BaseModel):\n    number: int", vars(module))
    assert annotations_of(module.Early) == {"later": module.Later | None}
    schema = schema_of(module.Early)
    assert schema is not None
    assert schema.is_complete


def test_fields_may_have_names_that_programs_cannot_write() -> None:
    fields: Any = {"class": (int, 1), "a.b": (int, 2), "a": (Any, None), "\ufb01": (int, 3)}
    for names in (["class"], ["a", "a.b"], ["\ufb01"], ["a"], [*fields]):
        model = create_model("Odd", **{name: fields[name] for name in names})
        assert to_map(model()) == {name: fields[name][1] for name in names}


def test_attributes_of_attrs_classes_may_be_annotated_or_not() -> None:
    attr = pytest.importorskip("attr")
    made = attr.make_class("Made", {"a": attr.ib(type=int), "b": attr.ib(default=1)})
    assert annotations_of(made) == {"a": int, "b": Any}


class Open(BaseModel):
    model_config = ConfigDict(extra="allow")

    number: int = 0


def test_models_that_allow_more_fields_have_them() -> None:
    assert to_map(Open()) == {"number": 0}
    event = Open(number=1, other="a", _hidden=2)  # type: ignore[call-arg]
    assert to_map(event) == {"number": 1, "other": "a"}
    schema = schema_of(Open)
    assert schema is not None
    assert schema.takes_more


def test_a_model_that_was_not_checked_has_the_fields_that_are_there() -> None:
    assert to_map(Model.model_construct(text="a")) == {"text": "a", "more": []}


class Tags(RootModel[list[str]]):
    pass


class Attributes(RootModel[dict[str, int]]):
    pass


@dataclass
class Tagged:
    tags: Tags


def test_a_root_model_stands_for_its_content() -> None:
    assert to_map(Tagged(Tags(["a"]))) == {"tags": ["a"]}
    assert to_map(Attributes({"a": 1})) == {"a": 1}
    for event in (Tags(["a"]), RootModel[int](5)):
        for call in (to_map, to_map, checked_copy):  # known by the second
            with pytest.raises(InvalidEventError):
                call(event)


@dataclass
class Computed:
    price: float
    currency: InitVar[str]
    label: str = field(init=False)
    count: int = field(default=1, init=False)

    def __post_init__(self, currency: str) -> None:
        self.label = f"{self.price} {currency}"


@dataclass(init=False)
class OwnInit:
    total: int
    parts: list[int]

    def __init__(self, *parts: int, total: int = 0) -> None:
        self.parts = [*parts]
        self.total = total or sum(parts)


def test_fields_that_constructors_do_not_take_are_set_afterwards() -> None:
    keywords = {type_: {each.name: each.keyword for each in schema_of(type_).fields} for type_ in (Computed, OwnInit)}  # type: ignore[union-attr]
    assert keywords[Computed] == {"price": "price", "label": None, "count": None}
    assert keywords[OwnInit] == {"total": "total", "parts": None}
    assert to_map(Computed(1.5, "EUR")) == {"price": 1.5, "label": "1.5 EUR", "count": 1}


def test_attributes_of_plain_classes_are_fields_though_nothing_announced_them() -> None:
    class Empty:
        pass

    event: Any = Empty()
    event.shown, event._hidden = 1, 2
    assert to_map(event) == {"shown": 1}
    event = plain(1)
    event.added = Empty()
    assert to_map(event)["added"] == {}


def test_attributes_of_dataclasses_are_fields_only_if_they_are_announced() -> None:
    event: Any = Data(1)
    event.added = 2
    assert "added" not in to_map(event)


@dataclass
class Page(Generic[T]):
    items: list[T]
    first: T | None = None


@dataclass
class Pair(Page[U], Generic[T, U]):
    other: T | None = None


class IntPage(Page[int]):
    pass


class SpecialPage(IntPage):
    pass


@dataclass
class Outer(Generic[T]):
    page: Page[list[T]]
    pair: Pair[T, str]


def test_generic_classes_have_the_types_they_are_given() -> None:
    assert annotations_of(Page[int]) == {"items": list[int], "first": int | None}
    assert annotations_of(IntPage) == annotations_of(SpecialPage) == {"items": list[int], "first": int | None}
    assert annotations_of(Page) == {"items": list[T], "first": T | None}
    assert annotations_of(Pair[int, str]) == {"items": list[str], "first": str | None, "other": int | None}
    assert annotations_of(Outer[int]) == {"page": Page[list[int]], "pair": Pair[int, str]}


@table(
    "type_",
    [
        *(int, str, list, dict, tuple, set, object, type, Colour, datetime.datetime, Path, fractions.Fraction),
        *(deque, UserDict, UserList, collections.Counter, Mapping, Iterator, io.StringIO, types.ModuleType),
        *(ipaddress.IPv4Network, threading.Event, ValueError, types.SimpleNamespace, SecretStr, BaseModel, Callable),
        *(list[int], int | None, None, Any, "Model", 5, [], T, functools.partial, type(threading.Lock())),
    ],
)
def test_types_that_are_no_schemas(type_: Any) -> None:
    assert schema_of(type_) is None


def test_a_class_whose_instances_can_have_no_attributes_is_no_schema() -> None:
    class Nothing:
        __slots__ = ("_hidden",)

    assert schema_of(Nothing) is None


def test_an_annotation_without_a_hash_is_no_schema() -> None:
    assert schema_of(types.GenericAlias(list, ([],))) is None


# --- simple values


@table(
    "value",
    [
        *(None, True, 1, 1.5, 1j, "a", b"a", decimal.Decimal(1), fractions.Fraction(1, 2), NOW, NOW.date(), NOW.time()),
        *(datetime.timedelta(1), datetime.UTC, uuid.UUID(int=1), Colour.RED, re.compile("a"), PurePosixPath("a"), int),
    ],
)
def test_simple_values_pass_as_they_are(value: Any) -> None:
    assert is_simple(value)
    event = plain(value)
    assert to_map(event)["number"] is value
    assert checked_copy({"a": value, "b": [value]}) == {"a": value, "b": [value]}


@table("value", [[], (), {}, set(), Data(1), Named(1), plain(1), object(), threading.Lock(), len])
def test_values_with_parts_and_odd_objects_are_not_simple(value: Any) -> None:
    assert not is_simple(value)


# --- events as maps


@dataclass
class Nested:
    value: Any


@table(
    "value, expected",
    [
        ((1, 2), [1, 2]),
        ([(1, [2])], [[1, [2]]]),
        (deque([1]), [1]),
        (UserList([1]), [1]),
        (range(2), [0, 1]),
        ({"a": 1}.keys(), ["a"]),
        ({1, 2}, {1, 2}),
        (frozenset({1}), frozenset({1})),
        (frozenset({(1, 2)}), [[1, 2]]),
        (UserDict(a=[1]), {"a": [1]}),
        (types.MappingProxyType({"a": Data(1)}), {"a": {"number": 1, "text": "x", "more": []}}),
        ({1: "a", (2, 3): "b"}, {1: "a", (2, 3): "b"}),
        (bytearray(b"a"), b"a"),
        (memoryview(b"a"), b"a"),
        ([Named(1), Slotted(2)], [{"number": 1, "text": "x", "more": []}, {"number": 2, "text": "x", "more": []}]),
        (Nested(Nested(Nested(None))), {"value": {"value": {"value": None}}}),
        ([], []),
        ({}, {}),
    ],
)
def test_parts_of_events_become_maps_lists_and_simple_values(value: Any, expected: Any) -> None:
    """157.4.2: nested maps."""
    assert to_map(Nested(value)) == {"value": expected}
    assert type(to_map(Nested(value))["value"]) is type(expected)


def test_order_is_kept() -> None:
    data = {"z": [1], "a": 1, "m": {"y": [2], "b": 3}}
    for copy in (to_map(Nested(data))["value"], checked_copy(data)):
        assert [*copy] == ["z", "a", "m"]
        assert [*copy["m"]] == ["y", "b"]


def test_odd_objects_in_typed_events_are_passed_on() -> None:
    for odd in (object(), threading.Lock(), len, ValueError("a"), SecretStr("a"), ipaddress.ip_address("::1")):
        assert to_map(Nested([odd]))["value"][0] is odd


def test_the_map_of_a_map_is_a_copy() -> None:
    data = {"a": [1], "b": {1: {2}}}
    copy = to_map(data)
    assert copy == data
    assert copy is not data
    assert copy["a"] is not data["a"]
    assert copy["b"] is not data["b"]
    assert copy["b"][1] is not data["b"][1]


def test_there_is_no_limit_to_depth() -> None:
    """157.2.1.1."""
    event: Any = None
    for number in range(5_000):
        event = (Nested(event), {"value": event}, plain(event))[number % 3]
    data = to_map(event)
    for copy in (data, checked_copy(data)):
        depth = 0
        while copy is not None:
            copy = copy["value"] if "value" in copy else copy["number"]
            depth += 1
        assert depth == 5_000


def test_a_part_that_occurs_twice_is_no_cycle_and_copied_once() -> None:
    shared: Any = [1]
    event = Nested([shared, {"a": shared}, Nested(shared)])
    copy = to_map(event)["value"]
    assert copy == [[1], {"a": [1]}, {"value": [1]}]
    assert copy[0] is copy[1]["a"] is copy[2]["value"]
    assert copy[0] is not shared
    for _ in range(64):  # a path for every subset of these levels
        shared = [shared, {"a": shared}, Nested(shared)]
    assert len(to_map(Nested(shared))["value"]) == 3


@table(
    "place, told",
    [
        (lambda event: event, "value is a part of itself"),
        (lambda event: [1, {"a": [event]}], r"value\[1\].a\[0\] is a part of itself"),
        (lambda event: Nested((event,)), r"value.value\[0\] is a part of itself"),
        (lambda event: {1: {"x": {("odd",): event}}}, r"value\[1\].x\[...\] is a part of itself"),
    ],
)
def test_an_event_that_is_a_part_of_itself_is_refused_with_the_place(place: Callable[[Any], Any], told: str) -> None:
    """157.2.1.1: a tree."""
    event = Nested(None)
    event.value = place(event)
    with pytest.raises(InvalidEventError, match=f"^an event must be a tree: {told}$"):
        to_map(event)


def test_cycles_far_below_are_told_shortly() -> None:
    cycle: Any = []
    cycle.append(cycle)
    for _ in range(1_000):
        cycle = {"a" * 10: cycle}
    with pytest.raises(InvalidEventError) as caught:
        to_map(Nested(cycle))
    assert len(str(caught.value)) < 300


class Secret:
    number: int

    @property
    def number(self) -> int:  # type: ignore[no-redef]
        raise ValueError("hunter2")


class BrokenMapping(Mapping[str, int]):
    def __getitem__(self, key: str) -> int:
        raise KeyError("hunter2")

    def __iter__(self) -> Iterator[str]:
        return iter("a")

    def __len__(self) -> int:
        return 1


def test_unreadable_parts_are_refused_with_the_place() -> None:
    for event, told in (
        (Secret(), "the event, a Secret, cannot be read: ValueError"),
        (Nested([Secret()]), r"value\[0\], a Secret, cannot be read: ValueError"),
        (Nested(BrokenMapping()), "value, a BrokenMapping, cannot be read: KeyError"),
    ):
        with pytest.raises(InvalidEventError, match=f"^{told}$"):
            to_map(event)
    with pytest.raises(InvalidEventError):
        checked_copy(BrokenMapping())


# --- untyped events

TREES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text(max_size=3)
    | st.binary(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=15,
)


def spoil(value: Any) -> None:
    """Change all that can be changed."""
    for part in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        spoil(part)
    if isinstance(value, (dict, list)):
        value.clear()


@given(st.dictionaries(st.text(max_size=3), TREES, max_size=4))
def test_nothing_that_is_done_to_the_source_reaches_the_copy(data: dict[str, Any]) -> None:
    """Scenario 14; 157.2.4.2."""
    first, second = checked_copy(data), to_map(data)
    assert first == second == data
    spoil(data)
    spoil(second)
    assert first == checked_copy(first)
    assert data == second == {}


def test_a_flat_map_is_copied_too() -> None:
    """Scenario 7 of Event Admin."""
    data = {"a": 1, "b": "text", "c": None, "d": NOW}
    copy = checked_copy(data)
    data["a"] = 2
    assert copy == {"a": 1, "b": "text", "c": None, "d": NOW}


@table("made", [UserDict, types.MappingProxyType, collections.OrderedDict, collections.ChainMap])
def test_any_mapping_is_an_untyped_event_and_becomes_a_dict(made: Callable[[Any], Any]) -> None:
    copy = checked_copy(made({"a": made({"b": [1]})}))
    assert copy == {"a": {"b": [1]}}
    assert type(copy) is type(copy["a"]) is dict


class Key(enum.StrEnum):
    A = "a"


def test_keys_may_be_of_a_kind_of_text() -> None:
    assert checked_copy({Key.A: {Key.A: 1}}) == {"a": {"a": 1}}


@ALL_KINDS
def test_untyped_events_have_no_instances_of_schemas_in_them(kind: str) -> None:
    """157.2.2."""
    event = KINDS[kind]()(number=1)
    name = type(event).__name__
    for data, place in (({"a": event}, "a"), ({"a": [{"b": event}]}, r"a\[0\].b"), (event, "the event")):
        with pytest.raises(InvalidEventError, match=f"no instances of schemas in it: {place} is a {name}$"):
            checked_copy(data)
