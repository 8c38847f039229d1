"""Event data becomes what handlers ask for: 157.4.1, 157.4.9, after the rules of OSGi's converter."""

from __future__ import annotations

import datetime
import decimal
import enum
import fractions
import ipaddress
import itertools
import math
import pathlib
import re
import sys
import threading
import time
import traceback
import types
import typing
import uuid
from collections import ChainMap, Counter, OrderedDict, UserDict, UserList, defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, MutableMapping, MutableSet, Sequence, Set
from dataclasses import dataclass, field, make_dataclass
from typing import (
    Annotated,
    Any,
    ClassVar,
    Final,
    ForwardRef,
    Generic,
    Literal,
    NamedTuple,
    NewType,
    NotRequired,
    Optional,
    Protocol,
    Required,
    TypeVar,
    runtime_checkable,
)

import pytest
import typing_extensions
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import (
    AfterValidator,
    AnyUrl,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    PlainValidator,
    RootModel,
    SecretStr,
    TypeAdapter,
    WrapValidator,
    create_model,
    field_validator,
    model_validator,
)
from pydantic import Field as PydanticField
from pydantic.dataclasses import dataclass as pydantic_dataclass
from typing_extensions import TypeAliasType, TypedDict

from messaging.dispatch.eventdata.conversion import convert, converter_to
from messaging.dispatch.eventdata.maps import checked_copy, to_map
from messaging.errors import ConversionError
from messaging.testing.tables import table
from tests.dispatch.eventdata.test_schema import KINDS, Data, Named, OwnInit, Page, Tags
from tests.dispatch.eventdata.test_schema import Plain as PlainData

T = TypeVar("T")
UTC = datetime.UTC
NOON = datetime.datetime(2026, 1, 2, 12, 0, 0, 250_000, tzinfo=UTC)
DAY = NOON.date()
MILLISECONDS = 1_767_355_200_250
#: no error may ever tell it
SECRET = "hunter2"


Colour = enum.Enum("Colour", {"RED": "crimson", "GREEN": "lime", "BLUE": "navy"})
Level = enum.Enum("Level", {"LOW": 1, "HIGH": 2})
Rank = enum.IntEnum("Rank", {"NONE": 0, "FIRST": 1})
Word = enum.StrEnum("Word", {"RED": "r", "BLUE": "b"})
Permission = enum.Flag("Permission", {"READ": 1, "WRITE": 2})
Pair = enum.Enum("Pair", {"ONE": (1, 1), "TWO": (2, 2)})


class Celsius(float):
    pass


class UserName(str):
    __slots__ = ()


UserId = NewType("UserId", int)


class Point(NamedTuple):
    x: int
    y: int = 0


@dataclass
class Item:
    name: str
    price: float = 1.0


@dataclass
class Invoice:
    name: str
    price: float
    more: int


@dataclass
class Order:
    id: int
    items: list[Item] = field(default_factory=list)
    by_name: dict[str, Item] = field(default_factory=dict)
    first: Item | None = None
    colour: Colour = Colour.RED
    note: str = "none"


class Plain:
    """As OSGi's DTOs are."""

    number: int
    text: str = "x"


# --- the rows of the table


def rows(target: Any, *pairs: tuple[Any, Any]) -> list[tuple[Any, Any, Any]]:
    """Return parameters of a table: value, target and expected result."""
    return [(value, target, expected) for value, expected in pairs]


def refused(target: Any, *values: Any) -> list[tuple[Any, Any]]:
    """Return parameters of a table: value and target."""
    return [(value, target) for value in values]


@table(
    "value, target, expected",
    [
        *rows(bool, (True, True), (0, False), (2, True), (0.0, False), (decimal.Decimal(0), False), (" TRUE ", True)),
        *rows(bool, ("yes", True), ("On", True), ("1", True), ("false", False), ("No", False), ("off", False)),
        *rows(bool, ("0", False), ("", False), (None, False)),
        *rows(int, ("12", 12), (" -3 ", -3), (3.9, 3), (-3.9, -3), (True, 1), (2**80, 2**80)),
        *rows(int, (decimal.Decimal("2.5"), 2), (fractions.Fraction(5, 2), 2), (Rank.FIRST, 1), (None, 0)),
        *rows(int, (Level.HIGH, 2), (NOON, MILLISECONDS), (datetime.timedelta(seconds=1.5), 1)),
        *rows(int, (DAY, MILLISECONDS - 12 * 3_600_000 - 250), ([1, 2], 1), ([], 0)),
        *rows(float, ("1.5", 1.5), (1, 1.0), (False, 0.0), (None, 0.0), ("inf", math.inf), (NOON, float(MILLISECONDS))),
        *rows(float, (datetime.timedelta(seconds=1.5), 1.5)),
        *rows(decimal.Decimal, ("1.10", decimal.Decimal("1.10")), (0.1, decimal.Decimal("0.1"))),
        *rows(decimal.Decimal, (7, decimal.Decimal(7)), (None, decimal.Decimal(0))),
        *rows(complex, ("1+2j", 1 + 2j), (2, 2 + 0j)),
        *rows(fractions.Fraction, ("1/3", fractions.Fraction(1, 3)), ("0.25", fractions.Fraction(1, 4))),
        *rows(fractions.Fraction, (0.5, fractions.Fraction(1, 2)), (None, fractions.Fraction(0))),
        *rows(fractions.Fraction, (decimal.Decimal("1e-3"), fractions.Fraction(1, 1000))),
        *rows(Celsius, ("21.5", Celsius(21.5))),
        *rows(UserName, (7, UserName("7")), (deque(["x"]), UserName("x"))),
        *rows(UserId, ("5", 5)),
        *rows(str, (1, "1"), (1.5, "1.5"), (True, "true"), (False, "false"), (b"\xc3\xa9", "é"), (Colour.RED, "RED")),
        *rows(str, (Word.RED, "r"), (Rank.FIRST, "FIRST"), (re.compile("a+"), "a+")),
        *rows(str, (uuid.UUID(int=1), str(uuid.UUID(int=1))), (pathlib.PurePosixPath("a/b"), "a/b")),
        *rows(str, (decimal.Decimal("1.10"), "1.10"), (UserName("u"), "u"), (re.compile(b"a"), "a")),
        *rows(str, (NOON, "2026-01-02T12:00:00.250000+00:00"), (DAY, "2026-01-02"), (NOON.time(), "12:00:00.250000")),
        *rows(str, (datetime.timedelta(days=1, hours=2), "P1DT2H"), (("a",), "a")),
        *rows(bytes, ("é", b"\xc3\xa9"), ([1, 255], b"\x01\xff"), ([b"a"], b"a"), ([], b""), (bytearray(b"a"), b"a")),
        *rows(bytes, (memoryview(b"a"), b"a")),
        *rows(bytearray, (b"a", bytearray(b"a"))),
        *rows(datetime.datetime, ("2026-01-02T12:00:00.250Z", NOON), (MILLISECONDS, NOON), (float(MILLISECONDS), NOON)),
        *rows(datetime.datetime, (DAY, datetime.datetime(2026, 1, 2))),
        *rows(datetime.date, ("2026-01-02", DAY), (NOON, DAY), (MILLISECONDS, DAY), (["2026-01-02"], DAY)),
        *rows(datetime.time, ("12:00:00.25", NOON.time()), (NOON, NOON.timetz()), (str(NOON), NOON.timetz())),
        *rows(datetime.time, (MILLISECONDS, NOON.timetz())),
        *rows(datetime.timedelta, ("P1DT2H", datetime.timedelta(hours=26)), (1.5, datetime.timedelta(seconds=1.5))),
        *rows(uuid.UUID, (str(uuid.UUID(int=5)), uuid.UUID(int=5)), (uuid.UUID(int=5).bytes, uuid.UUID(int=5))),
        *rows(re.Pattern, ("a+", re.compile("a+"))),
        *rows(pathlib.PurePosixPath, ("a/b", pathlib.PurePosixPath("a/b"))),
        *rows(pathlib.Path, ("a", pathlib.Path("a"))),
        *rows(ipaddress.IPv4Address, ("127.0.0.1", ipaddress.ip_address("127.0.0.1"))),
        *rows(Colour, ("RED", Colour.RED), (" green ", Colour.GREEN), ("crimson", Colour.RED), (2, Colour.BLUE)),
        *rows(Colour, (Word.BLUE, Colour.BLUE)),
        *rows(Level, (2, Level.HIGH), ("2", Level.HIGH), ("low", Level.LOW), (1.0, Level.LOW)),
        *rows(Level, ([Level.LOW], Level.LOW)),
        *rows(Rank, (0, Rank.NONE), ("0", Rank.NONE), ("none", Rank.NONE)),
        *rows(Permission, (3, Permission.READ | Permission.WRITE)),
        *rows(Pair, ((2, 2), Pair.TWO)),
        *rows(list[int], ([[None]], [0]), ([1, "2"], [1, 2]), (None, [])),
        *rows(list[str], ((1, 2), ["1", "2"]), ("a", ["a"]), (range(2), ["0", "1"]), (UserList([1]), ["1"])),
        *rows(list[str], ({"a": 1}.keys(), ["a"])),
        *rows(list, ({1}, [1])),
        *rows(set[str], (5, {"5"})),
        *rows(frozenset[int], ([1, 1], frozenset({1}))),
        *rows(deque[str], ([1], deque(["1"]))),
        *rows(tuple[str, int], ([1, 2], ("1", 2))),
        *rows(tuple[int, ...], (["1", 2], (1, 2))),
        *rows(tuple, ([1], (1,))),
        *rows(tuple[()], ([], ())),
        *rows(Sequence[str], ([1], ["1"])),
        *rows(Iterable[str], ([1], ["1"])),
        *rows(Collection[str], ([1], ["1"])),
        *rows(MutableSet[str], ([1], {"1"})),
        *rows(Set[str], ([1], frozenset({"1"}))),
        *rows(list[dict[str, str]], ({"a": 1}, [{"a": "1"}])),
        *rows(list[bytes], (b"ab", [b"ab"])),
        *rows(UserList, ([1], UserList([1]))),
        *rows(list[Point], (Point(1), [Point(1)])),
        *rows(tuple[int, *tuple[str, ...]], ([1, "a"], (1, "a"))),
        *rows(tuple[*tuple[int, ...], str], (["1", 2, 3], (1, 2, "3"))),
        *rows(tuple[str, *tuple[int, ...], str], (["1", 2, 3], ("1", 2, "3"))),
        *rows(tuple[int, typing_extensions.Unpack[tuple[str, ...]]], (["1", 2], (1, "2"))),  # noqa: UP044
        *rows(dict[int, float], ({"1": "2"}, {1: 2.0})),
        *rows(Mapping[str, str], ({1: 2}, {"1": "2"})),
        *rows(dict, ({"a": [1]}, {"a": [1]}), ({}, {})),
        *rows(dict[str, str], (Item("a"), {"name": "a", "price": "1.0"})),
        *rows(dict[str, int], ([{"a": 1}], {"a": 1}), (UserDict(a="1"), {"a": 1})),
        *rows(OrderedDict[str, int], ({"a": "1"}, OrderedDict(a=1))),
        *rows(Counter[str], ({"a": "1"}, Counter(a=1))),
        *rows(ChainMap[str, str], ({"a": 1}, ChainMap({"a": "1"}))),
        *rows(defaultdict[str, int], ({"a": "1"}, defaultdict(int, a=1))),
        *rows(MutableMapping, ({"a": 1}, {"a": 1})),
        *rows(types.MappingProxyType, ({"a": 1}, types.MappingProxyType({"a": 1}))),
        *rows(Item, ({"name": "a"}, Item("a")), ({"name": 5, "price": "2", "more": 1}, Item("5", 2.0))),
        *rows(Item, ([{"name": "a"}], Item("a")), ([Item("a"), 5], Item("a"))),
        *rows(Point, ({"x": "1"}, Point(1))),
        *rows(Any, (1, 1)),
        *rows(object, ([1], [1])),
        *rows(None, (None, None)),
        *rows("Unknown", (5, 5)),
        *rows(ForwardRef("Unknown"), ([1], [1])),
        *rows(Final[int], ("5", 5)),
        *rows(ClassVar[int], ("5", 5)),
        *rows(Final, (5, 5)),
        *rows(Literal[1, "a"], (1, 1), ("1", 1), ("a", "a")),
        *rows(Literal[1, True], (True, True)),
        *rows(Literal["a", None], (None, None)),
        *rows(Literal[Colour.RED], ("RED", Colour.RED)),
        *rows(Literal["a"], (b"a", "a"), (["a"], "a")),
    ],
)
def test_values_become_the_target_type(value: Any, target: Any, expected: Any) -> None:
    """157.4.1: at least what OSGi's converter does."""
    found = convert(value, target)
    assert found == expected
    assert type(found) is type(expected)


@table(
    "value, target",
    [
        *refused(bool, "maybe", "2", b"true", NOON, {}, object()),
        *refused(int, "x", "1.5", "", math.nan, math.inf, 1j, b"1", {}, "9" * 10_000, decimal.Decimal("NaN")),
        *refused(int, decimal.Decimal("1e999999"), object(), {"a": 1}, Item("a"), [[1]], uuid.UUID(int=1), int),
        *refused(float, 10**400, "x", 1j, Colour.RED),
        *refused(decimal.Decimal, "1e"),
        *refused(complex, "x"),
        *refused(str, None, b"\xff", {}, object(), int, [], [["a"]], Item("a")),
        *refused(bytes, "\ud800", 5, [256], [-1], None, {}, ["\ud800"]),
        *refused(datetime.datetime, "x", math.nan, 10**400, True, None),
        *refused(datetime.date, "2026-13-01", math.inf, NOON.time()),
        *refused(datetime.time, "25:00"),
        *refused(datetime.timedelta, "x", 1e300, NOON),
        *refused(uuid.UUID, "x", b"x", 5),
        *refused(re.Pattern, "(", "a{99999999999}", 5),
        *refused(pathlib.Path, 5),
        *refused(ipaddress.IPv4Address, "x"),
        *refused(fractions.Fraction, "x"),
        *refused(Colour, "PINK", 3, -1, True, None, [], {}),
        *refused(Level, 0, 3, Word.BLUE, math.nan),
        *refused(Permission, 5),
        *refused(Pair, (3, 3)),
        *refused(list[int], ["x"]),
        *refused(tuple[int, int], [1, 2, 3]),
        *refused(tuple[int], None),
        *refused(set[Any], [[]]),
        *refused(tuple[int, *tuple[str, ...]], ["a", 1]),
        *refused(dict, None, 5, [], [1]),
        *refused(dict[str, int], "a", {"a": "x"}),
        *refused(dict[int, int], {"x": 1}),
        *refused(dict[list[str], int], {"a": 1}),
        *refused(Item, None, 5, [], "a", {}),
        *refused(None, 5, {}),
        *refused(list[None], 1),
        *refused(Callable[[], int], object()),
        *refused(types.GeneratorType, [1]),
        *refused(type, 1),
        *refused(range, 1),
        *refused(threading.Event, 1),
        *refused(Protocol, 1),
        *refused(Generic, 1),
        *refused(5, 1),
    ],
)
def test_values_that_do_not_become_the_target_type_are_refused(value: Any, target: Any) -> None:
    with pytest.raises(ConversionError):
        convert(value, target)


class Raw(BaseModel):
    """Has a validator that sees the data before it is converted."""

    value: int = 0
    share: fractions.Fraction = fractions.Fraction(0)

    @model_validator(mode="before")
    @classmethod
    def look(cls, data: Any) -> Any:
        return data


@table(
    "value",
    [decimal.Decimal("1e3000000"), decimal.Decimal("-1e-3000000"), "1e3000000", "-1E-3000000", "0." + "9" * 500_000],
    ids=["large", "small", "text", "small text", "digits"],
)
@table(
    "target",
    [*(int, fractions.Fraction, Annotated[fractions.Fraction, PydanticField(gt=0)], fractions.Fraction | None), Raw]
    + [*(dict[str, int], list[fractions.Fraction], ipaddress.IPv4Address)],
)
def test_numbers_that_take_very_long_to_convert_are_refused_at_once(value: Any, target: Any) -> None:
    """Such an event may come from a payload of a few bytes."""
    start = time.process_time()
    with pytest.raises(ConversionError):
        convert({"value": value, "share": value} if target in (Raw, dict[str, int]) else value, target)
    assert time.process_time() - start < 1


Gap = enum.Flag("Gap", {"FIRST": 1, "LAST": 8})
Kept = enum.Flag("Kept", {"READ": 1}, boundary=enum.KEEP)
Ejected = enum.Flag("Ejected", {"READ": 1}, boundary=enum.EJECT)
Number = enum.IntFlag("Number", {"READ": 1})
Bounded = enum.Flag("Bounded", {"READ": 1}, boundary=enum.STRICT)


@table("target", [Permission, Gap, Bounded])
@table("value", [4, 5, 6, 7, 16, -17, 2**70, "5", "16", [4], 5.0])
def test_unknown_bits_of_a_flag_are_an_error_on_every_interpreter(value: Any, target: Any) -> None:
    with pytest.raises(ConversionError):
        convert(value, target)


@table(
    "value, expected",
    [(0, Gap(0)), (9, Gap.FIRST | Gap.LAST), (True, Gap.FIRST), (8.0, Gap.LAST), ("1", Gap.FIRST)]
    + [(-1, Permission.READ | Permission.WRITE), (-4, Permission(0)), (-2, Permission.WRITE), (3, Permission(3))]
    + [(5, Kept(5)), (6, Number(6)), ("READ", Kept.READ)],
)
def test_a_flag_has_known_bits_and_others_if_its_boundary_keeps_them(value: Any, expected: enum.Flag) -> None:
    found = convert(value, type(expected))
    # Python 3.11.2 makes two unequal members of one unknown value
    assert (type(found), found.value) == (type(expected), expected.value)
    assert convert(5, Ejected) == 5


@table("flag, text", [(Permission(0), "0"), (Kept(4), "4"), (Number(0), "0"), (Permission.READ, "READ")])
def test_a_flag_becomes_its_name_or_its_number_if_it_has_no_name(flag: Any, text: str) -> None:
    assert convert(flag, str) == text
    assert convert({"a": flag}, dict[str, str]) == {"a": text}


@table(
    "value",
    [*(True, 1, 1.5, 1j, "a", b"a", NOON, DAY, NOON.time(), datetime.timedelta(1), decimal.Decimal(1))]
    + [*(uuid.UUID(int=1), re.compile("a"), pathlib.Path("a"), Colour.RED, Rank.NONE, Permission(3), Celsius(1))]
    + [*(Item("a"), Point(1), Plain(), fractions.Fraction(1, 2), ipaddress.ip_address("::1"), UserName("a"))],
)
def test_an_instance_of_the_type_is_passed_on(value: Any) -> None:
    """Scenario 36."""
    assert convert(value, type(value)) is value
    assert convert(value, type(value) | None) is value
    assert convert(value, type(value) | list[int]) is value


def test_collections_are_made_as_annotated() -> None:
    for target, factory in (
        (defaultdict[str, int], int),
        (defaultdict[str, list[int]], list),
        (defaultdict[str, Item], None),
        (defaultdict, None),
    ):
        assert convert({}, target).default_factory is factory
    assert [*convert([1], Iterator[str])] == ["1"]


def test_an_instance_of_a_subclass_is_passed_on() -> None:
    @dataclass
    class Special(Item):
        more: int = 0

    special = Special("a")
    assert convert(special, Item) is special
    assert convert([special], list[Item])[0] is special
    assert convert(special, Order | Item) is special
    assert convert(special, Invoice | Item) is special  # though it has as many of its fields
    name = UserName("a")
    assert type(convert(name, str)) is str  # a handler that asks for text gets text
    assert type(convert(Rank.FIRST, int)) is int


@given(st.datetimes(timezones=st.timezones() | st.none()))
def test_dates_survive_as_text_and_as_numbers(when: datetime.datetime) -> None:
    again = convert(convert(when, str), datetime.datetime)
    assert again.replace(tzinfo=None) == when.replace(tzinfo=None)
    assert again.utcoffset() == when.utcoffset()
    back = convert(convert(when, float), datetime.datetime)
    assert abs(back - (when if when.tzinfo else when.replace(tzinfo=UTC))) < datetime.timedelta(milliseconds=1)
    assert convert(convert(when, str), datetime.date) == when.date()


@given(st.timedeltas())
def test_timedeltas_survive_as_text(span: datetime.timedelta) -> None:
    assert convert(convert(span, str), datetime.timedelta) == span


@given(st.text() | st.binary() | st.integers() | st.floats() | st.decimals() | st.complex_numbers())
def test_every_simple_value_becomes_every_simple_type_or_an_error(value: Any) -> None:
    for target in (*LEAVES, complex, Level, re.Pattern, pathlib.Path):
        try:
            found = convert(value, target)
        except ConversionError:
            continue
        assert isinstance(found, target)


# --- None


@dataclass
class Nothing:
    number: int = 5
    flag: bool = True
    text: str = "default"
    when: datetime.date = DAY
    item: Item = field(default_factory=lambda: Item("default"))
    items: list[Item] | str = "default"
    maybe: str | None = "default"
    numbers: list[int] = field(default_factory=lambda: [1])
    anything: Any = 1


NothingModel: Any = create_model(
    "NothingModel", **{name: (hint, getattr(Nothing(), name)) for name, hint in typing.get_type_hints(Nothing).items()}
)


@table("target", [Nothing, NothingModel])
def test_none_is_nothing_where_there_is_no_none(target: Any) -> None:
    """OSGi's converter makes 0 and false of null, and empty collections; the rest takes its default."""
    expected = Nothing(number=0, flag=False, items=[], maybe=None, numbers=[], anything=None)
    assert to_map(convert(dict.fromkeys(vars(expected)), target)) == to_map(expected)


def test_fields_of_a_dto_that_nothing_is_known_of_are_none() -> None:
    for data in ({}, {"number": None, "text": None}):
        found = convert(data, Plain)
        assert (found.number, found.text) == (0 if data else None, "x")


# --- schemas


def test_fields_are_found_by_name_and_their_values_converted() -> None:
    """Scenario 31."""
    found = convert(
        {
            "id": "7",
            "items": [{"name": "a", "price": "2.5"}, Item("b")],
            "by_name": {1: {"name": "c"}},
            "first": [{"name": 5}],
            "colour": "green",
            "unknown": object(),
        },
        Order,
    )
    expected = Order(7, [Item("a", 2.5), Item("b")], {"1": Item("c")}, Item("5"), Colour.GREEN)
    assert found == expected


def test_nested_events_become_maps_and_the_reverse() -> None:
    """Scenario 32."""
    order = Order(1, [Item("a")], {"b": Item("b")}, Item("c"))
    data = to_map(order)
    assert data["items"] == [{"name": "a", "price": 1.0}]
    assert data["by_name"] == {"b": {"name": "b", "price": 1.0}}
    assert convert(data, Order) == order
    assert convert(order, dict[str, Any]) == data
    assert convert(order, Any) == data


def test_paths_are_of_limited_length() -> None:
    target: Any = int
    value: Any = "x"
    for _ in range(100):
        target, value = dict[str, target], {"k" * 200: value}
    with pytest.raises(ConversionError) as caught:
        convert(value, target)
    assert len(str(caught.value)) < 400


# --- every kind of schema, into every other


class TypedData(TypedDict):
    number: Required[int]
    text: str
    more: NotRequired[list[int]]


SCHEMAS: dict[str, Callable[[], Any]] = {
    **{name: lambda make=make: type(make()(number=1)) for name, make in KINDS.items()},  # type: ignore[misc]
    "TypedDict": lambda: TypedData,
    "dict": lambda: dict[str, Any],
}


def canonical(event: Any) -> dict[str, Any]:
    data = to_map(event)
    return {
        "number": convert(data["number"], int),
        "text": convert(data["text"], str),
        "more": sorted(convert(data["more"], list[int])),
    }


@table("source, target", [*itertools.product(SCHEMAS, repeat=2)])
def test_every_kind_of_schema_becomes_every_other(source: str, target: str) -> None:
    """Scenario 31."""
    data = {"number": "7", "text": NOON, "more": ["1", 2]}
    expected = canonical(data)
    event = convert(data, SCHEMAS[source]())
    assert canonical(event) == expected
    wanted = SCHEMAS[target]()
    found = convert(event, wanted)
    assert canonical(found) == expected
    assert canonical(convert(to_map(found), SCHEMAS[source]())) == expected
    if target not in ("TypedDict", "dict"):
        assert type(found).__name__ == wanted.__name__


@table("target", [Data, Named, PlainData])
def test_only_public_fields_are_set(target: Any) -> None:
    """157.2.1: of a record its components, of a DTO its public instance fields."""
    found = convert({"number": "1", "twice": 7, "method": 8, "_private": 9, "LIMIT": 10, "count": 11}, target)
    assert (found.number, found.twice, found.method()) == (1, 2, None)
    assert getattr(found, "_private", 7) == 7
    assert getattr(found, "LIMIT", 3) == 3


# --- round trips

NAMES = st.sampled_from(["a", "b", "c", "d"])
LEAVES: dict[Any, st.SearchStrategy[Any]] = {
    int: st.integers(),
    float: st.floats(allow_nan=False),
    str: st.text(max_size=5),
    bool: st.booleans(),
    bytes: st.binary(max_size=5),
    datetime.datetime: st.datetimes(),
    datetime.date: st.dates(),
    datetime.timedelta: st.timedeltas(),
    decimal.Decimal: st.decimals(allow_nan=False, allow_infinity=False),
    uuid.UUID: st.uuids(),
    Colour: st.sampled_from(Colour),
    Rank: st.sampled_from(Rank),
}
_numbers = itertools.count()


@st.composite
def types_and_values(draw: st.DrawFn, depth: int = 3) -> tuple[Any, st.SearchStrategy[Any]]:
    """A type, and a strategy for its instances."""
    kind = draw(
        st.sampled_from(
            ["leaf", "list", "dict", "optional", "tuple", "dataclass", "model", "named"][: 8 if depth else 1]
        )
    )
    if kind == "leaf":
        leaf = draw(st.sampled_from(list(LEAVES)))
        return leaf, LEAVES[leaf]
    if kind in ("dataclass", "model", "named"):
        parts = {name: draw(types_and_values(depth - 1)) for name in draw(st.lists(NAMES, unique=True, min_size=1))}
        annotations: Any = {name: part[0] for name, part in parts.items()}
        number = next(_numbers)
        made: Any
        if kind == "dataclass":
            made = make_dataclass(f"Data{number}", list(annotations.items()))
        elif kind == "named":
            made = NamedTuple(f"Named{number}", list(annotations.items()))  # type: ignore[misc]
        else:
            made = type(f"Model{number}", (BaseModel,), {"__annotations__": annotations, "__module__": __name__})
        return made, st.fixed_dictionaries({name: part[1] for name, part in parts.items()}).map(lambda it: made(**it))
    inner, values = draw(types_and_values(depth - 1))
    if kind == "list":
        return list[inner], st.lists(values, max_size=3)
    if kind == "dict":
        return dict[str, inner], st.dictionaries(st.text(max_size=3), values, max_size=3)
    if kind == "tuple":
        return tuple[inner, int], st.tuples(values, st.integers())
    return inner | None, st.none() | values


@settings(max_examples=50)
@given(st.data())
def test_any_tree_survives_as_a_map(data: st.DataObject) -> None:
    """157.2.2: an untyped event can have all that a typed one has."""
    parts = {name: data.draw(types_and_values()) for name in data.draw(st.lists(NAMES, unique=True))}
    top = make_dataclass("Top", [(name, part[0]) for name, part in parts.items()])
    event = top(**{name: data.draw(part[1]) for name, part in parts.items()})
    as_map = checked_copy(to_map(event))  # which an untyped event can be
    assert as_map == to_map(event)
    assert convert(as_map, top) == event
    assert convert(event, top) is event


# --- pydantic's models


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    price: float = PydanticField(gt=0)
    name: str = PydanticField("x", min_length=1)


class Open(BaseModel):
    model_config = ConfigDict(extra="allow")

    number: int = PydanticField(0, alias="theNumber")


class Aliased(BaseModel):
    order_id: int = PydanticField(alias="orderId")
    customer: str = PydanticField("nobody", alias="theCustomer")


def test_models_that_allow_more_get_more() -> None:
    found = convert({"theNumber": "1", "other": Item("a"), 5: 5, "_hidden": 1}, Open)
    assert found.number == 1
    assert found.model_extra == {"other": {"name": "a", "price": 1.0}}


class Splitting(BaseModel):
    tags: list[str] = []
    code: Annotated[int, BeforeValidator(lambda value: int(value, 16) if isinstance(value, str) else value)] = 0

    @field_validator("tags", mode="before")
    @classmethod
    def split(cls, value: Any) -> Any:
        return value.split(",") if isinstance(value, str) else value


@pydantic_dataclass
class SplittingData:
    tags: list[str] = PydanticField(default_factory=list)

    @field_validator("tags", mode="before")
    @classmethod
    def split(cls, value: Any) -> Any:
        return value.split(",") if isinstance(value, str) else value


class Renaming(BaseModel):
    name: str

    @model_validator(mode="before")
    @classmethod
    def rename(cls, data: Any) -> Any:
        return {"name": data["title"]} if "title" in data else data


class Items(RootModel[list[Item]]):
    pass


class Words(RootModel[list[str]]):
    @model_validator(mode="before")
    @classmethod
    def split(cls, data: Any) -> Any:
        return data.split() if isinstance(data, str) else data


@dataclass
class Tagged:
    tags: Tags
    items: Items | None = None


class Later(BaseModel):
    more: DefinedLater | None = None  # type: ignore[name-defined]  # noqa: F821


def test_a_model_may_refer_to_one_that_is_defined_after_its_converter_is_made() -> None:
    to_later = converter_to(Later)
    with pytest.raises(ConversionError, match=r"^Later refers to a class that is not defined$"):
        to_later({})

    class DefinedLater(BaseModel):
        number: int

    Later.model_rebuild(_types_namespace={"DefinedLater": DefinedLater})
    assert to_later({"more": {"number": "1"}}).more == DefinedLater(number=1)


class GenericModel(BaseModel, Generic[T]):
    items: list[T]
    first: T | None = None


class ItemPage(Page[Item]):
    pass


@table("target", [GenericModel[Item], Page[Item], ItemPage])
def test_fields_of_generic_classes_convert_to_their_arguments(target: Any) -> None:
    found = convert({"items": [{"name": 1}], "first": {"name": "b"}}, target)
    assert isinstance(found, typing.get_origin(target) or target)
    assert (found.items, found.first) == ([Item("1")], Item("b"))
    with pytest.raises(ConversionError, match=r"^items\[0\].name: is missing"):
        convert({"items": [{}]}, target)


def test_fields_of_structs_are_found_by_name_or_alias() -> None:
    msgspec = pytest.importorskip("msgspec")
    renamed = msgspec.defstruct("Renamed", [("order_id", int)], rename="camel")
    assert convert({"orderId": "1"}, renamed) == convert({"order_id": 1}, renamed) == renamed(1)


@pytest.mark.skipif(sys.version_info < (3, 12), reason="syntax of Python 3.12")
def test_generic_classes_and_aliases_in_the_new_syntax(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("made_by_test")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    source = """
@dataclass
class Box[T]:
    items: list[T]
    first: "T | None" = None
class IntBox(Box[int]): ...
type Tree = dict[str, Tree] | int
type Twice[T] = tuple[T, T]
type Endless = Endless
type Unknown = Nowhere
"""
    vars(module)["dataclass"] = dataclass
    exec(source, vars(module))
    for target in (module.Box[int], module.IntBox):
        found = convert({"items": ["1"], "first": "2"}, target)
        assert (found.items, found.first) == ([1], 2)
    assert convert({"a": {"b": "1"}}, module.Tree) == {"a": {"b": 1}}
    assert convert(["1", 2.5], module.Twice[int]) == (1, 2)
    for target in (module.Endless, module.Unknown):
        with pytest.raises(ConversionError):
            convert(1, target)


# --- annotations


class Movie(TypedDict, total=False):
    title: Required[str]
    year: int
    cast: list[Item]


class OldMovie(typing.TypedDict):
    title: str
    year: NotRequired[int]


class GenericMovie(TypedDict, Generic[T]):
    extra: T


class ReadMovie(TypedDict, total=False):
    title: typing_extensions.ReadOnly[str]
    year: typing_extensions.ReadOnly[Required[int]]


def even(value: int) -> int:
    if value % 2:
        raise ValueError(f"{value} is odd")
    return value


@dataclass
class Circle:
    radius: float = 0
    name: str = ""


@dataclass
class Square:
    side: float = 0
    name: str = ""


@dataclass
class Tagged1:
    kind: Literal["one"]
    value: int = 0


@dataclass
class Tagged2:
    kind: Literal["two"]
    value: int = 0


class NodeDict(TypedDict):
    value: int
    children: NotRequired[list[NodeDict]]


Pairs = TypeAliasType("Pairs", tuple[T, T], type_params=(T,))
Forest = TypeAliasType("Forest", "list[Forest] | int")  # type: ignore[misc]


@table(
    "value, target, expected",
    [
        # unions
        *rows(int | str, ("1", "1"), (True, 1), (2.5, "2.5"), (math.nan, "nan")),
        *rows(int | str, (decimal.Decimal("1e999999"), "1E+999999")),
        *rows(str | int, (1, 1), (3.0, 3)),
        *rows(int | bool, (True, True), ("yes", True)),
        *rows(int | None, (None, None)),
        *rows(int | float, (1.5, 1.5), ("5", 5), ("1.5", 1.5)),
        *rows(datetime.date | datetime.datetime, (NOON, NOON)),
        *rows(str | bytes, (b"a", b"a")),
        *rows(str | Colour, (Colour.RED, Colour.RED)),
        *rows(str | float, (1, 1.0)),
        *rows(str | datetime.date, (NOON, DAY)),
        *rows(str | list[str], ([1], ["1"])),
        *rows(str | Item, ({"name": 1}, Item("1"))),
        *rows(Item | dict[str, str], ({"a": 1}, {"a": "1"})),
        *rows(dict[str, str] | str, (Item("a"), {"name": "a", "price": "1.0"})),
        *rows(Circle | Square, ({"side": 1, "name": "a"}, Square(1, "a")), ({"name": "a"}, Circle(0, "a"))),
        *rows(Circle | Square, (Square(2), Square(2))),
        *rows(Tagged1 | Tagged2, ({"kind": "two", "value": "1"}, Tagged2("two", 1))),
        *rows(int | Colour | None | list[str], ("x", ["x"])),
        *rows(int | datetime.date, ("2026-01-02", DAY)),
        *rows(list[int] | dict[str, int], (5, [5])),
        *rows(int | bytes, ([1], 1)),
        # models, their aliases, and validators that want data as it came; refused data is converted
        *rows(Strict, ({"price": "2", "name": 5, "unknown": 1}, Strict(price=2.0, name="5"))),
        *rows(Aliased, ({"order_id": 1, "theCustomer": "a"}, Aliased(orderId=1, theCustomer="a"))),
        *rows(Aliased, ({"orderId": "1", "customer": "a"}, Aliased(orderId=1, theCustomer="a"))),
        *rows(Aliased, (Aliased(orderId=1), Aliased(orderId=1)), ({"order_id": 1, "orderId": 2}, Aliased(orderId=1))),
        *rows(Splitting, ({"tags": "a,b", "code": "ff"}, Splitting(tags=["a", "b"], code=255))),
        *rows(SplittingData, ({"tags": "a,b"}, SplittingData(tags=["a", "b"]))),
        *rows(Splitting, ({"tags": ["a", 5]}, Splitting(tags=["a", "5"]))),
        *rows(Renaming, ({"title": "a"}, Renaming(name="a")), ({"name": "a"}, Renaming(name="a"))),
        *rows(list[Renaming], ([{"title": Word.RED}], [Renaming(name="r")])),
        # root models stand for their content
        *rows(Tagged, ({"tags": [1], "items": [{"name": "b"}]}, Tagged(Tags(["1"]), Items([Item("b")])))),
        *rows(Words, ("a b", Words(["a", "b"])), ([1], Words(["1"]))),
        *rows(list[str], (Tags(["a"]), ["a"])),
        *rows(Item | dict[str, str] | list[str], (Tags(["a"]), ["a"])),
        *rows(int, (Tags(["5"]), 5)),
        *rows(Item, (RootModel[dict[str, int]]({"name": 1}), Item("1"))),
        # typed dicts
        *rows(Movie, ({"title": 5, "year": "1999", "unknown": 1}, {"title": "5", "year": 1999})),
        *rows(OldMovie, ({"title": 5, "year": "1999", "unknown": 1}, {"title": "5", "year": 1999})),
        *rows(Movie, ({"title": "a", "year": None, "cast": None}, {"title": "a", "year": 0, "cast": []})),
        *rows(OldMovie, ({"title": "a", "year": None}, {"title": "a", "year": 0})),
        *rows(ReadMovie, ({"year": "1", "title": None}, {"year": 1})),
        *rows(Movie, ({"title": "a", "cast": [{"name": 1}]}, {"title": "a", "cast": [Item("1")]})),
        *rows(GenericMovie[int], ({"extra": "5"}, {"extra": 5})),
        *rows(NodeDict, ({"value": "1", "children": {"value": "2"}}, {"value": 1, "children": [{"value": 2}]})),
        # annotated types, also by metadata without a hash
        *rows(Annotated[int, PydanticField(gt=0)], ("2", 2)),
        *rows(Annotated[int, AfterValidator(even)], ("2", 2)),
        *rows(Annotated[int, AfterValidator(lambda value: value + 1)], ("2", 3)),
        *rows(Annotated[list[int], PydanticField(min_length=1)], (["1"], [1])),
        *rows(Annotated[list[Annotated[Item, "doc"]], "doc"], ([{"name": 1}], [Item("1")])),
        *rows(Annotated[int | None, PydanticField(gt=0)], (None, None)),
        *rows(Annotated[int, BeforeValidator(lambda value: int(value, 16))], ("0xff", 255)),
        *rows(Annotated[int, PlainValidator(lambda value: 7)], ("x", 7)),
        *rows(Annotated[int, WrapValidator(lambda value, handler: handler(value) + 1)], ("5", 6)),
        *rows(Annotated[int, []], (5, 5)),
        # type variables, for their bounds if they have no arguments, and aliases
        *rows(TypeVar("bound", bound=Item), ({"name": 1}, Item("1"))),
        *rows(TypeVar("chosen", int, bytes), ("5", 5)),
        *rows(Page, ({"items": [{"name": 1}]}, Page([{"name": 1}]))),
        *rows(TypeAliasType("numbers", list[int]), (["1"], [1])),
        *rows(Pairs[int], (["1", 2.5], (1, 2))),
        *rows(Forest, ([[1]], [[1]])),  # a string, which is not resolved
    ],
)
def test_values_become_what_annotations_and_validators_ask_for(value: Any, target: Any, expected: Any) -> None:
    found = convert(value, target)
    assert found == expected
    assert type(found) is type(expected)


def test_the_order_of_several_types_counts_though_unions_are_equal() -> None:
    assert convert(Level.LOW, list[int | str]) == [1]
    assert convert(Level.LOW, list[str | int]) == ["LOW"]
    assert converter_to(int | str) is not converter_to(str | int)
    assert converter_to(int | str) is converter_to(int | str)


class Handled(Protocol):
    number: int


@runtime_checkable
class Checked(Protocol):
    number: int


def test_instances_of_a_protocol_pass_and_no_value_becomes_one() -> None:
    plain = convert({"number": 1}, Plain)
    assert convert(plain, Checked) is plain
    for target in (Handled, Checked):
        with pytest.raises(ConversionError):
            convert({"number": 1}, target)


def test_types_that_pydantic_knows() -> None:
    assert convert("abc", SecretStr).get_secret_value() == "abc"
    assert str(convert("http://a/b", AnyUrl)) == "http://a/b"
    with pytest.raises(ConversionError):
        convert("", AnyUrl)
    secret = SecretStr(SECRET)
    assert convert(secret, SecretStr) is secret
    with pytest.raises(ConversionError):
        convert(secret, str)  # a handler cannot reveal it by asking for text


# --- recursion


@dataclass
class Node:
    value: int = 0
    next: Node | None = None
    children: list[Node] = field(default_factory=list)
    named: dict[str, Node] = field(default_factory=dict)


class ModelNode(BaseModel):
    value: int = 0
    next: ModelNode | None = None
    children: list[ModelNode] = []
    named: dict[str, ModelNode] = {}


class LeftOrRight(NamedTuple):
    value: int = 0
    next: LeftOrRight | list[LeftOrRight] | None = None


@table("target", [Node, ModelNode])
def test_trees_are_rebuilt(target: Any) -> None:
    data = {
        "value": "1",
        "next": {"value": 2},
        "children": [{"children": [{"value": "3"}]}],
        "named": {"a": {"next": {}}},
    }
    found = convert(data, target)
    assert isinstance(found.named["a"].next, target)
    assert found.children[0].children[0].value == 3
    assert convert(to_map(found), target) == found
    with pytest.raises(ConversionError, match=r"^children\[0\].named\['x'\].value: a str that does not become an int$"):
        convert({"children": [{"named": {"x": {"value": "x"}}}]}, target)


def chain(depth: int, wrap: Callable[[Any], Any], key: str) -> Any:
    data: Any = {"value": depth}
    for number in range(depth):
        data = {"value": number, key: wrap(data)}
    return data


@table("target", [Node, ModelNode])
@table("depth", [100, 500, 5_000])
@table(
    "key, wrap, unwrap",
    [
        ("next", lambda it: it, lambda it: it),
        ("children", lambda it: [it], lambda it: it[0] if it else None),
        ("named", lambda it: {"a": it}, lambda it: it.get("a")),
    ],
)
def test_deep_data_is_converted_or_refused(
    target: Any, depth: int, key: str, wrap: Callable[[Any], Any], unwrap: Callable[[Any], Any]
) -> None:
    data = chain(depth, wrap, key)
    found = error = None
    try:
        found = convert(data, target)
    except ConversionError as raised:
        error = raised
    if error is None:
        levels = -1
        while found is not None:
            found, levels = unwrap(getattr(found, key)), levels + 1
        assert levels == depth
    else:
        assert depth >= 500
        assert error.reason == "is nested too deeply, or a part of itself"
        assert len(str(error)) < 400
    # what asks for nothing in particular has no limit
    assert convert(data, dict)["value"] == depth - 1


@table("depth", [100, 500, 5_000])
def test_deep_data_of_several_types_is_converted_or_refused(depth: int) -> None:
    data = chain(depth, lambda it: [it], "next")
    if depth > 100:
        with pytest.raises(ConversionError):
            convert(data, LeftOrRight)
    else:
        assert convert(data, LeftOrRight).next[0].next[0].value == depth - 3


def test_a_value_that_is_a_part_of_itself_is_refused() -> None:
    data: Any = {"value": 1}
    data["next"] = data
    data["children"] = [data]
    cycle: list[Any] = []
    cycle.append(cycle)
    for target in (Node, ModelNode, dict, dict[str, Any], Any, LeftOrRight):
        with pytest.raises(ConversionError):
            convert(data, target)
    for target in (list, list[list[Any]], Any, Node):
        with pytest.raises(ConversionError):
            convert(cycle, target)


@dataclass
class Ambiguous:
    value: int
    below: Ambiguous | Doubtful | list[Ambiguous | Doubtful] | None = None


@dataclass
class Doubtful:
    value: int
    below: Doubtful | Ambiguous | dict[str, Ambiguous | Doubtful] | None = None


@table("leaf, top", [("x", 1), (1, "x"), ("x", "x"), (1, 1)])
def test_values_that_fit_several_types_at_every_level_do_not_take_exponential_time(leaf: Any, top: Any) -> None:
    """With two types that fail at each of a hundred levels, 2**100 attempts otherwise."""
    data: Any = {"value": leaf}
    for _ in range(100):
        data = {"value": 1, "below": data}
    data["value"] = top
    started = time.perf_counter()
    try:
        convert({"a": data}, dict[str, Ambiguous | Doubtful])
    except ConversionError:
        assert "x" in (leaf, top)
    assert time.perf_counter() - started < 5


def test_results_of_outer_attempts_are_forgotten() -> None:
    to_either = converter_to(Ambiguous | Doubtful)
    data = {"value": "x"}
    for _ in range(2):
        with pytest.raises(ConversionError):
            to_either(data)
        data["value"] = "1"
        assert to_either(data) == Ambiguous(1)
        data["value"] = "x"


# --- whatever else may happen


class Raising:
    """Raises what it is told to."""

    error: ClassVar[Callable[[str], BaseException]] = ValueError

    def __init__(self, value: str = "") -> None:
        if value:
            raise type(self).error(value)


@dataclass
class RaisingData:
    value: str

    def __post_init__(self) -> None:
        raise LookupError(self.value)


class RaisingModel(BaseModel):
    value: str

    @field_validator("value")
    @classmethod
    def refuse(cls, value: str) -> str:
        raise ValueError(f"bad: {value}")


class AssertingModel(BaseModel):
    value: str

    @model_validator(mode="after")
    def refuse(self) -> AssertingModel:
        raise AssertionError(self.value)


class OddModel(BaseModel):
    value: str

    @field_validator("value", mode="before")
    @classmethod
    def refuse(cls, value: str) -> str:
        raise KeyError(value)


class RaisingSetter:
    value: str

    @property
    def value(self) -> str:  # type: ignore[no-redef]
        raise RuntimeError(SECRET)

    @value.setter
    def value(self, value: str) -> None:
        raise RuntimeError(value)


class RaisingEnum(enum.Enum):
    A = 1

    @classmethod
    def _missing_(cls, value: object) -> Any:
        raise RuntimeError(value)


class RaisingNumber(int):
    def __new__(cls, value: Any) -> RaisingNumber:
        raise RuntimeError(value)


class Instances(type):
    def __instancecheck__(cls, instance: object) -> bool:
        raise RuntimeError(instance)


class RaisingClass(metaclass=Instances):
    value: int


class Numbers(BaseModel):
    value: int


class Union1(BaseModel):
    kind: Literal["a"]


class Union2(BaseModel):
    kind: Literal["b"]


TARGETS: list[Any] = [
    *(Raising, RaisingData, RaisingModel, AssertingModel, OddModel, RaisingSetter, RaisingEnum, RaisingNumber),
    *(RaisingClass, Numbers, int, bool, float, decimal.Decimal, datetime.datetime, datetime.timedelta, uuid.UUID),
    *(Colour, Literal["a", 1], list[int], dict[str, int], dict[int, str], set[int], tuple[int, int], Item, Point),
    *(Movie, int | bool, Item | Point, Annotated[int, PydanticField(gt=0)], Annotated[str, AfterValidator(even)]),
    *(AnyUrl, ipaddress.IPv4Address, SecretStr, Annotated[Union1 | Union2, PydanticField(discriminator="kind")]),
    *(RootModel[list[int]], GenericModel[int], Page[int], Annotated[datetime.datetime, PydanticField(gt=NOON)]),
    *(Annotated[uuid.UUID, PydanticField()], fractions.Fraction, Splitting, Renaming, type, Callable[[int], int]),
    *(threading.Event, typing.Hashable, bytes, re.Pattern, pathlib.Path),
]


class BrokenMapping(Mapping[str, int]):
    def __getitem__(self, key: str) -> int:
        raise RuntimeError(SECRET)

    def __iter__(self) -> Iterator[str]:
        return iter(["value"])

    def __len__(self) -> int:
        return 1


class Hostile:
    def _raise(self, *_: Any) -> Any:
        raise RuntimeError(SECRET)

    __bool__ = __str__ = __repr__ = __eq__ = __hash__ = __len__ = __iter__ = __int__ = __float__ = _raise  # type: ignore[assignment]
    value = property(_raise)  # type: ignore[assignment]


class HostileZone(datetime.tzinfo):
    def utcoffset(self, _: Any) -> Any:
        raise RuntimeError(SECRET)


VALUES: list[Callable[[], Any]] = [
    lambda: SECRET,
    lambda: SECRET.encode(),
    lambda: f"\ud800{SECRET}",
    lambda: UserName(SECRET),
    lambda: decimal.Decimal("sNaN"),
    lambda: [SECRET],
    lambda: {SECRET},
    lambda: (SECRET, SECRET),
    lambda: {"value": SECRET},
    lambda: {"value": {"a": SECRET}},
    lambda: {"name": [SECRET], "price": SECRET, "title": {"a": SECRET}},
    lambda: {"kind": SECRET, "items": [SECRET], "x": SECRET, "tags": {"a": SECRET}, "code": SECRET},
    lambda: {"a": {"b": [SECRET]}},
    lambda: Item(SECRET),
    lambda: Numbers.model_construct(value=SECRET),
    lambda: {"value": Hostile()},
    lambda: [Hostile()],
    Hostile,
    BrokenMapping,
    lambda: NOON.replace(tzinfo=HostileZone()),
    lambda: datetime.time(1, tzinfo=HostileZone()),
    lambda: SecretStr(SECRET),
    lambda: ValueError(SECRET),
    lambda: iter([SECRET]),
    lambda: itertools.count(),
    lambda: RootModel[list[str]]([SECRET]),
    lambda: 10**5000,
    threading.Lock,
    object,
]


@table("target", TARGETS, ids=lambda it: getattr(it, "__name__", str(it))[:40])
def test_only_conversion_errors_are_raised_and_they_contain_no_value(target: Any) -> None:
    """157.4.9: the handler misses the event, and the log must not contain its values."""
    to_target = converter_to(target)
    told: list[str] = []
    for make in VALUES:
        try:
            to_target(make())
        except ConversionError as error:
            told.append("".join(traceback.format_exception_only(error)) + str(error.__cause__ or ""))
            if not error.__suppress_context__:
                told.append(str(error.__context__ or ""))
    assert not [each for each in told if SECRET in each]


@table("error", [ValueError, TypeError, RuntimeError, RecursionError, StopIteration, OSError, MemoryError])
def test_an_exception_of_a_constructor_becomes_a_conversion_error(error: type[Exception]) -> None:
    class Raises(Raising):
        pass

    Raises.error = error
    with pytest.raises(ConversionError) as caught:
        convert({"value": SECRET}, Raises)
    assert SECRET not in str(caught.value)


def test_interrupts_are_not_conversion_errors() -> None:
    class Interrupted(Raising):
        error = KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert([{"value": "a"}], list[Interrupted])


class ManyNumbers(BaseModel):
    numbers: Any

    @model_validator(mode="wrap")
    @classmethod
    def check(cls, data: Any, _: Any) -> Any:
        return TypeAdapter(list[int]).validate_python(data["numbers"])


MISSING = "is missing, and has no default"


def no(value: str, target: str) -> str:
    return f"{value} that does not become {target}"


@table(
    "value, target, told",
    [
        *rows(Order, ({}, f"id: {MISSING}"), ({"id": "x"}, "id: " + no("a str", "an int"))),
        *rows(Order, ({"id": 1, "items": [{}]}, f"items[0].name: {MISSING}")),
        *rows(list[Item], ([{"name": "a"}, {"name": "b", "price": "x"}], "[1].price: " + no("a str", "a float"))),
        *rows(Order, ({"id": 1, "by_name": {"k": {"name": []}}}, "by_name['k'].name: " + no("a NoneType", "a str"))),
        *rows(Order, ({"id": 1, "by_name": {5: 5}}, "by_name[...]: " + no("an int", "an Item"))),
        *rows(Order, ({"id": 1, "first": {"price": 1}}, f"first.name: {MISSING}")),
        *rows(Order, ({"id": 1, "colour": {}}, "colour: " + no("a dict", "a member of Colour"))),
        *rows(Order, (5, no("an int", "an Order"))),
        *rows(Item, ({"name": None}, "name: " + no("a NoneType", "a str"))),
        *rows(dict[str, set[Any]], ({"a": [[1]]}, "['a']: has elements that no set can have")),
        *rows(tuple[str, *tuple[int, ...], str], ([], "0 elements where 2 are wanted")),
        *rows(dict[str, list[Strict]], ({"a": [{"price": -1}]}, "['a'][0].price: Input should be greater than 0")),
        *rows(list[Strict], ([{"price": 1, "name": ""}], "[0].name: String should have at least 1 character")),
        *rows(list[Strict], ([{"price": -1, "name": ""}], "[0].price: Input should be greater than 0 (and 1 more)")),
        *rows(list[Strict], ([{"name": "a"}], f"[0].price: {MISSING}")),
        *rows(Tagged, ({"tags": [], "items": [{}]}, f"items[0].name: {MISSING}")),
        *rows(Movie, ({"year": 1}, "title: is missing"), (5, no("an int", "a Movie"))),
        *rows(OldMovie, ({"year": 1}, "title: is missing")),
        *rows(Movie, ({"title": None}, "title: " + no("a NoneType", "a str"))),
        *rows(ReadMovie, ({}, "year: is missing")),
        *rows(
            Movie, ({"title": "a", "cast": [{"name": "a", "price": "x"}]}, "cast[0].price: " + no("a str", "a float"))
        ),
        *rows(Annotated[int, PydanticField(gt=0)], (-1, "Input should be greater than 0")),
        *rows(Annotated[int, PydanticField(gt=0)], ("x", no("a str", "an int"))),
        *rows(Annotated[int, AfterValidator(even)], (3, "is refused by a validator (value_error)")),
        *rows(Annotated[int, AfterValidator(lambda value: 1 // 0)], (3, "converting it raised ZeroDivisionError")),
        *rows(
            Annotated[list[int], PydanticField(min_length=1)],
            ([], "List should have at least 1 item after validation, not 0"),
        ),
        *rows(Literal["a"], ("b", no("a str", "one of 'a'")), ({}, no("a dict", "one of 'a'"))),
        *rows(Literal[1], (2, no("an int", "one of 1")), (math.nan, no("a float", "one of 1"))),
        *rows(Literal[0, False, ""], (None, no("a NoneType", "one of 0, False, ''"))),
        # of a union, that of its only member of the same kind
        *rows(Item | str | None, ({"name": "a", "price": "x"}, "price: " + no("a str", "a float"))),
        *rows(str | list[Item], ([{"name": []}], "[0].name: " + no("a NoneType", "a str"))),
        *rows(Item | Point | int, ({}, no("a dict", "Item or Point or int"))),
        *rows(int | float, ("x", no("a str", "int or float"))),
        *rows(Optional[int], ("x", no("a str", "an int"))),  # noqa: UP045
        # of constructors and setters, the kind of the exception; of many problems, how many
        *rows(list[Raising], ([{"value": SECRET}], "[0]: Raising() raised ValueError")),
        *rows(list[RaisingData], ([{"value": SECRET}], "[0]: RaisingData() raised LookupError")),
        *rows(list[RaisingModel], ([{"value": SECRET}], "[0].value: is refused by a validator (value_error)")),
        *rows(list[AssertingModel], ([{"value": SECRET}], "[0]: is refused by a validator (assertion_error)")),
        *rows(list[OddModel], ([{"value": SECRET}], "[0]: OddModel() raised KeyError")),
        *rows(list[RaisingSetter], ([{"value": SECRET}], "[0].value: setting it raised RuntimeError")),
        *rows(dict[str, ManyNumbers], ({"a": {"numbers": ["x"] * 5000}}, "['a']: 5000 problems with ManyNumbers")),
    ],
)
def test_errors_say_where_and_why(value: Any, target: Any, told: str) -> None:
    with pytest.raises(ConversionError) as caught:
        convert(value, target)
    assert str(caught.value) == told


@dataclass(frozen=True)
class Area:
    width: float
    height: float = 1
    area: float = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "area", self.width * self.height)


@dataclass
class Counted:
    name: str
    count: int = field(default=0, init=False)


def test_fields_that_constructors_do_not_take_are_set_unless_they_are_computed() -> None:
    assert convert({"width": 2, "height": 3, "area": 999}, Area) == Area(2, 3)
    counted = convert({"name": "a", "count": "5"}, Counted)
    assert (counted.name, counted.count) == ("a", 5)
    assert convert(to_map(counted), Counted) == counted
    own = convert({"total": "3", "parts": ["1", 2]}, OwnInit)
    assert (own.total, own.parts) == (3, [1, 2])


# --- sharing, threads


def test_a_converted_value_shares_no_mutable_part_with_its_source() -> None:
    data: dict[str, Any] = {"a": [1], "b": {"c": [2]}, "d": bytearray(b"x")}
    for target in (dict, dict[str, Any], Any, Mapping[str, object]):
        found = convert(data, target)
        assert found == {"a": [1], "b": {"c": [2]}, "d": b"x"}
        found["a"].append(2)
        found["b"]["c"].clear()
        found["new"] = 1
    assert data == {"a": [1], "b": {"c": [2]}, "d": bytearray(b"x")}
    numbers = [1, 2]
    assert convert(numbers, list[int]) == numbers
    assert convert(numbers, list[int]) is not numbers


def test_converters_are_made_once() -> None:
    for target in (Order, list[int], int | None, Annotated[int, PydanticField(gt=0)], Page[int], dict[str, Order]):
        assert converter_to(target) is converter_to(target)
    assert converter_to(list[int]) is converter_to(list[int])


def test_threads_convert_to_the_same_new_types_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    module = types.ModuleType("made_by_test")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    scope = vars(module)
    scope |= {"dataclass": dataclass, "BaseModel": BaseModel}
    for number in range(30):
        exec(
            f"@dataclass\nclass Data{number}:\n    x: int\n    y: 'Data{number} | None' = None\n"
            f"class Model{number}(BaseModel):\n    x: int\n    items: list[Data{number}]\n"
            f"    y: 'Model{number} | None' = None\n",
            scope,
        )
        made += [scope[f"Data{number}"], scope[f"Model{number}"]]
    barrier = threading.Barrier(8)
    failures: list[BaseException] = []

    def run() -> None:
        try:
            barrier.wait()
            for target in made:
                data = {"x": "1", "items": [{"x": "2"}], "y": {"x": 3, "items": []}}
                found = convert(data, target)
                assert type(found) is type(found.y) is target
                assert (found.x, found.y.x) == (1, 3)
                assert convert([data], list[target | None])[0] == found  # type: ignore[valid-type]
        except BaseException as error:  # noqa: BLE001
            failures.append(error)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=run) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert failures == []


def test_untyped_events_become_typed_ones_without_touching_the_source() -> None:
    """Scenarios 14 and 32."""
    source: dict[str, Any] = {"id": 1, "items": [{"name": "a"}]}
    data = checked_copy(source)
    order = convert(data, Order)
    order.items.append(Item("b"))
    assert data == source == {"id": 1, "items": [{"name": "a"}]}
