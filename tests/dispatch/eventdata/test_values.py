"""Values of events in portable form: round trips, bounds, hostile input."""

from __future__ import annotations

import datetime
import enum
import json
import math
import sys
import threading
import time
import uuid
from collections import deque
from dataclasses import dataclass, field
from decimal import Decimal
from fractions import Fraction
from pathlib import PurePosixPath
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, RootModel, SecretStr

from messaging.dispatch.eventdata import convert, from_portable, read_json, to_portable, write_json
from messaging.dispatch.eventdata.enums import MAX_ENUMS
from messaging.dispatch.eventdata.values import MAX_DEPTH, MAX_EQUAL_HASHES, with_tags
from messaging.errors import DecodeError, InvalidEventError
from messaging.testing.tables import table
from tests.dispatch.eventdata.strategies import typed, values

UTC = datetime.UTC
NOON = datetime.datetime(2026, 3, 14, 12, tzinfo=UTC)


class Colour(enum.Enum):
    RED = "r"


class Level(enum.IntEnum):
    LOW = 1


@dataclass
class Item:
    name: str
    made: datetime.datetime = NOON
    parts: list[Any] = field(default_factory=list)


class Model(BaseModel):
    number: int
    item: Item
    secret: SecretStr = SecretStr("hidden")


class Numbers(RootModel[list[int]]):
    pass


class Pair(NamedTuple):
    left: int
    right: Any


def through_json(value: Any, **options: Any) -> Any:
    return from_portable(read_json(write_json(to_portable(value, **options))), **options)


@settings(max_examples=100, deadline=None)
@given(values)
def test_any_value_survives_a_round_trip(value: Any) -> None:
    found = through_json(value)
    assert typed(found) == typed(value)


# pydantic parses faster; it must not show
json_values = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(),
        st.floats(allow_nan=False, allow_infinity=False),
        st.text(st.characters()),
    ),
    lambda parts: st.lists(parts, max_size=3) | st.dictionaries(st.text(st.characters()), parts, max_size=3),
    max_leaves=8,
)


@settings(max_examples=200, deadline=None)
@given(json_values)
def test_json_is_that_of_the_standard_library(value: Any) -> None:
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    try:
        expected = text.encode()
    except UnicodeEncodeError:
        expected = json.dumps(value, allow_nan=False, separators=(",", ":")).encode()
    assert write_json(value) == expected
    assert typed(read_json(expected)) == typed(json.loads(expected))


@table(
    "value, form",
    [
        (1e-7, b"1e-07"),
        ([1e-7, "1e-7,"], b'[1e-07,"1e-7,"]'),
        ("Zo\xeb", b'"Zo\xc3\xab"'),
        ("\ud800", b'"\\ud800"'),
        ("NaN", b'"NaN"'),
    ],
)
def test_json_of_a_value(value: Any, form: bytes) -> None:
    assert write_json(value) == form


@table("value", [math.nan, [math.inf], {"a": -math.inf}, object(), {"\ud800": threading.Lock()}])
def test_values_that_are_not_portable_are_not_written(value: Any) -> None:
    with pytest.raises(InvalidEventError, match="cannot be written as JSON"):
        write_json(value)


@table(
    "value, form",
    [
        (5, 5),
        ("text", "text"),
        (None, None),
        (math.inf, {"$float": "inf"}),
        (2**63, {"$int": "0x8000000000000000"}),
        ((1, (2,)), [1, [2]]),
        (deque([1]), [1]),
        (Item("a"), {"name": "a", "made": {"$datetime": "2026-03-14T12:00:00+00:00"}, "parts": []}),
        ([Pair(1, Item)], [{"left": 1, "right": f"{__name__}.Item"}]),
        (Numbers([1, 2]), [1, 2]),
        ({"m": Numbers([1])}, {"m": [1]}),
        (Level.LOW, {"$enum": ["Level", "LOW", 1, True]}),
        ({1: "a"}, {"1": "a"}),
        ({"$x": 1}, {"$map": {"$x": 1}}),
        ({"$x": 1, "y": 2}, {"$x": 1, "y": 2}),
        (frozenset({Fraction(1, 3)}), {"$frozenset": [{"$fraction": "1/3"}]}),
    ],
)
def test_form_of_a_value(value: Any, form: Any) -> None:
    assert to_portable(value) == form


def test_objects_with_fields_at_any_place_are_maps_and_secrets_stay_hidden() -> None:
    model = Model(number=1, item=Item("a", parts=[Item("b"), Pair(1, {2})]))
    found = through_json([model])
    item = {"name": "b", "made": NOON, "parts": []}
    parts = [item, {"left": 1, "right": {2}}]
    assert found == [{"number": 1, "item": {"name": "a", "made": NOON, "parts": parts}, "secret": "**********"}]
    assert convert(found[0]["item"], Item).made == NOON


def test_forms_share_nothing_mutable_with_the_value() -> None:
    value = {"a": [1], "b": {"c": []}}
    form = to_portable(value)
    again = from_portable(form)
    value["a"].append(2)  # type: ignore[attr-defined]
    form["b"]["c"].append(3)
    assert again == {"a": [1], "b": {"c": []}}
    assert form["a"] == [1]


def nested(depth: int, make: Any = lambda inner: [inner]) -> Any:
    found: Any = 1
    for _ in range(depth):
        found = make(found)
    return found


@table(
    "make, levels",
    [
        (lambda inner: [inner], 1),
        (lambda inner: (inner,), 1),
        (lambda inner: {"a": inner}, 1),
        (lambda inner: {"a": inner, "b": 1}, 1),
        (lambda inner: {"$a": inner}, 2),
        (lambda inner: Pair(1, inner), 1),
        (lambda inner: frozenset({inner}), 2),
    ],
)
def test_depth_is_bounded_and_what_is_written_can_be_read(make: Any, levels: int) -> None:
    deepest = MAX_DEPTH // levels
    value = nested(deepest, make)
    form = to_portable(value)
    assert to_portable(from_portable(form)) == form
    with pytest.raises(InvalidEventError, match="deeper"):
        to_portable(make(value))
    with pytest.raises(DecodeError, match="deeper"):
        from_portable([form])


@table(
    "leaf",
    [
        math.nan,
        2**70,
        b"x",
        NOON,
        Decimal(1),
        Fraction(1, 2),
        1j,
        Colour.RED,
        {1},
        datetime.timedelta(1),
        {"$a": 1},
        [],
    ],
)
def test_a_value_that_is_written_at_the_last_level_can_be_read(leaf: Any) -> None:
    for depth in range(MAX_DEPTH - 3, MAX_DEPTH + 1):
        try:
            form = to_portable(nested(depth, lambda inner: [inner, leaf]))
        except InvalidEventError:
            continue
        from_portable(form)
    from_portable(to_portable(nested(MAX_DEPTH - 3, lambda inner: [inner, leaf])))


def test_a_cycle_and_endless_depth_are_refused() -> None:
    cycle: list[Any] = []
    cycle.append(cycle)
    for value in (cycle, {"a": cycle}, Item("a", parts=cycle), nested(100_000)):
        for is_bounded in (True, False):
            with pytest.raises(InvalidEventError):
                to_portable(value, is_bounded=is_bounded)
    for is_bounded in (True, False):
        with pytest.raises(DecodeError, match="deep"):
            from_portable(nested(100_000), is_bounded=is_bounded)


@table(
    "value",
    [
        pytest.param(2**20_000, id="int"),
        Decimal("1e20000"),
        Decimal("1e-20000"),
        pytest.param(Fraction(1, 2**20_000), id="fraction"),
    ],
)
def test_numbers_beyond_the_bounds_are_refused_on_both_sides(value: Any) -> None:
    with pytest.raises(InvalidEventError, match="bounds of numbers"):
        to_portable(value)
    if isinstance(value, Fraction):
        form: Any = {"$fraction": "1/" + "9" * 5000}
    else:
        form = to_portable(value, is_bounded=False)
        assert from_portable(form, is_bounded=False) == value
    with pytest.raises(DecodeError):
        from_portable(form)
    if not isinstance(value, int):
        assert with_tags(value) is value


def test_a_vast_number_takes_no_time() -> None:
    started = time.perf_counter()
    for form in (
        {"$decimal": "1e999999999"},
        {"$decimal": "9" * 1_000_000},
        {"$int": "0x" + "f" * 1_000_000},
        {"$fraction": "9" * 1_000_000 + "/3"},
    ):
        with pytest.raises(DecodeError):
            from_portable(form)
    assert time.perf_counter() - started < 5


P = sys.hash_info.modulus


@table(
    "parts",
    [
        [{"$uuid": str(uuid.UUID(int=n * P + 1))} for n in range(20_000)],
        [{"$complex": [float(-1_000_003 * n), float(n)]} for n in range(20_000)],
        [{"$int": hex(n * P)} for n in range(20, 20_000)],
    ],
)
def test_sets_with_many_equal_hashes_are_refused(parts: list[Any]) -> None:
    started = time.perf_counter()
    for tag in ("$set", "$frozenset"):
        with pytest.raises(DecodeError, match="equal hashes"):
            from_portable({tag: parts})
    assert time.perf_counter() - started < 10
    assert len(from_portable({"$set": parts[:MAX_EQUAL_HASHES]})) == MAX_EQUAL_HASHES


def test_large_sets_of_distinct_hashes_are_read() -> None:
    value = {uuid.UUID(int=n) for n in range(5000)}
    assert through_json(value) == value


@table(
    "form, problem",
    [
        ({"$unknown": 1}, "the tag '\\$unknown'"),
        ({"$": 1}, "the tag"),
        ({"$int": 5}, "'\\$int' must have the text of an integer in hexadecimal"),
        ({"$float": []}, "'\\$float' must have 'nan', 'inf' or '-inf'"),
        ({"$float": "1.5"}, "must have"),
        ({"$bytes": "?"}, "base64"),
        ({"$decimal": "x"}, "decimal number"),
        ({"$decimal": 0.1}, "decimal number"),
        ({"$fraction": "1/0"}, "fraction"),
        ({"$fraction": "1/2/3"}, "fraction"),
        ({"$duration": [1e300, 0, 0]}, "days, seconds and microseconds"),
        ({"$duration": "abc"}, "days"),
        ({"$complex": [1]}, "real"),
        ({"$complex": ["a", "b"]}, "real"),
        ({"$set": [[]]}, "a set can have"),
        ({"$set": {"a": 1}}, "a set can have"),
        ({"$set": [{"$decimal": "sNaN"}]}, "a set can have"),
        ({"$enum": [1, 2, 3]}, "name of a member"),
        ({"$enum": "abc"}, "name of a member"),
        ({"$enum": []}, "name of a member"),
        ({"$map": 3}, "'\\$map' must have a map"),
        ({"$uuid": 5}, "a UUID"),
        ({"$path": None}, "text"),
        ({"$datetime": 5}, "date and time"),
        (math.inf, "a number beyond the range of a float"),
        ([math.nan], "a number beyond the range of a float"),
        ({1: 2}, "a key of a map is text, not an int"),
        (object(), "an object"),
        ((1,), "a tuple, which JSON has not"),
        (b"x", "a bytes"),
        (NOON, "a datetime"),
    ],
)
def test_a_broken_form_is_refused_with_what_would_be_right(form: Any, problem: str) -> None:
    with pytest.raises(DecodeError, match=problem):
        from_portable({"x": form})


def test_values_that_cbor_has_get_their_tags_and_tags_stay() -> None:
    value = {"a": b"\0", "b": [NOON], "c": Decimal("1.5"), "d": {uuid.UUID(int=1)}, "e": Fraction(1, 3), "f": 2**70}
    form = with_tags({**value, "g": {"$int": "0x1"}, "h": math.inf})
    assert typed(from_portable(form)) == typed({**value, "g": 1, "h": math.inf})
    assert read_json(write_json(form)) == form
    strange = object()
    assert with_tags([strange, {1: 2}]) == [strange, {1: 2}]


names = st.text(st.characters(), max_size=5) | st.sampled_from(
    ["mro", "name", "value", "_ignore_", "_order_", "_missing_", "__new__", "__del__", "__init_subclass__", "__class__",
     "_generate_next_value_", "_x", "__x", "_value_", "a" * 300]
)  # fmt: skip


@settings(max_examples=200, deadline=None)
@given(names, names, json_values, st.lists(st.booleans(), max_size=2))
def test_any_enum_is_read_as_a_member_or_as_its_value(name: str, member: str, value: Any, more: list[bool]) -> None:
    try:
        found = from_portable({"$enum": [name, member, value, *more]})
    except DecodeError:
        return
    if isinstance(found, enum.Enum):
        assert found.name == member
        found = found.value
    assert typed(found) == typed(from_portable(value))


def test_generated_enums_are_bounded_for_each_event() -> None:
    members = [{"$enum": ["A", f"m{n}", n]} for n in range(MAX_ENUMS + 1100)]
    for _ in range(2):
        with pytest.raises(DecodeError, match="members of enums that differ"):
            from_portable(members)
        assert len(from_portable(members[:MAX_ENUMS])) == MAX_ENUMS
    same = [{"$enum": ["A", "m", 1]}] * 5000
    assert len(set(from_portable(same))) == 1
    assert len(from_portable(members, is_bounded=False)) == len(members)


tags = st.sampled_from(
    ["$map", "$float", "$int", "$bytes", "$datetime", "$date", "$time", "$duration", "$decimal", "$fraction",
     "$complex", "$uuid", "$path", "$windowspath", "$set", "$frozenset", "$enum", "$other", "a"]
)  # fmt: skip
forms = st.recursive(
    json_values | st.sampled_from(["1/3", "0x1", "2026-01-01", "nan", "1e5", "12:00", "1e99999", math.inf, b"x"]),
    lambda parts: st.lists(parts, max_size=4) | st.dictionaries(tags, parts, max_size=2),
    max_leaves=8,
)


@settings(max_examples=300, deadline=None)
@given(forms)
def test_any_form_is_read_or_refused_with_one_type_of_error(form: Any) -> None:
    try:
        value = from_portable(form)
    except DecodeError:
        return
    to_portable(value)


class Raises:
    """An object whose only field cannot be read."""

    __slots__ = ("field",)

    def __getattribute__(self, name: str) -> Any:
        if name == "field":
            raise LookupError("secret")
        return super().__getattribute__(name)


@table("value", [object(), {object(): 1}, {1: 0, "1": 0}, {None: 1}, threading.Lock(), Raises()])
def test_values_without_a_form_are_refused(value: Any) -> None:
    with pytest.raises(InvalidEventError) as caught:
        to_portable([value])
    assert "secret" not in str(caught.value)


def test_paths_are_read_as_they_were() -> None:
    assert through_json(PurePosixPath("/a b")) == PurePosixPath("/a b")
