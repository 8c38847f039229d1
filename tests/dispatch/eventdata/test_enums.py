"""Members of enums cross between processes as themselves, where their class is imported."""

from __future__ import annotations

import enum
import http
import json
import sys
import types
from dataclasses import dataclass
from typing import Any

import pytest

from messaging.dispatch.eventdata import WireEvent, convert, decode, encode
from messaging.dispatch.eventdata.enums import MAX_CLASSES
from messaging.errors import ConversionError, DecodeError, InvalidEventError
from messaging.testing.tables import table


class Colour(enum.Enum):
    RED = "crimson"
    ALSO_RED = "crimson"  # noqa: PIE796  # an alias
    BLUE = 1
    PAIR = (1, 1)
    WORDS = frozenset({"a", "b"})


class Permission(enum.Flag):
    READ = 1
    WRITE = 2
    ALL = 3


class Number(enum.IntFlag):
    ONE = 1
    FOUR = 4


class Outer:
    class Level(enum.IntEnum):
        LOW = 1


class Word(enum.StrEnum):
    A = "a"


class Ratio(float, enum.Enum):
    HALF = 0.5


@dataclass
class Record:
    colour: Colour
    levels: list[Outer.Level]


MEMBERS = [
    Colour.RED, Colour.ALSO_RED, Colour.BLUE, Colour.PAIR, Colour.WORDS, Permission.READ, Permission.ALL,
    Number.ONE | Number.FOUR, Outer.Level.LOW, Word.A, Ratio.HALF, http.HTTPStatus.OK,
]  # fmt: skip


def _sent(value: Any, **changes: Any) -> Any:
    """Return what a reader gets of an event, whose fields are changed on the way."""
    fields = {**json.loads(encode(WireEvent.of("a", value))), **changes}
    return decode(json.dumps(fields).encode()).value()


@table("member", MEMBERS)
def test_a_member_is_itself_where_its_class_is_imported(member: Any) -> None:
    value = {"plain": member, "list": [member], "map": {"a": {"b": member}}}
    found = _sent(value)
    assert found["plain"] is found["list"][0] is found["map"]["a"]["b"]
    assert found["plain"] is member or (found["plain"] == member and type(found["plain"]) is type(member))


def test_members_in_sets_and_records_are_themselves() -> None:
    assert _sent({"set": {Colour.RED, Colour.BLUE}}) == {"set": {Colour.RED, Colour.BLUE}}
    record = Record(Colour.RED, [Outer.Level.LOW])
    assert _sent(record) == {"colour": Colour.RED, "levels": [Outer.Level.LOW]}
    assert convert(_sent(record), Record) == record


@table("member", MEMBERS)
def test_a_reader_that_does_not_know_the_field_reads_what_it_read_before(member: Any) -> None:
    """The form of the value itself has not changed."""
    found = _sent(member, enums=None)
    assert type(found) is not type(member)
    assert (found.name, type(found).__name__) == (member.name, type(member).__name__)
    assert isinstance(found, (int, float, str)) is isinstance(member, (int, float, str))
    assert convert(found, type(member)) == member


def test_events_without_members_have_no_further_field() -> None:
    assert "enums" not in json.loads(encode(WireEvent.of("a", {"a": [1, "x"]})))


#: what an event may name that this process does not know
FOREIGN = {
    "no such module": ["shop.models:Colour"],
    "a module that is not imported": ["antigravity:Colour"],
    "no such class": [f"{__name__}:Outer.Colour"],
    "no enum": [f"{__name__}:Record", "os:environ", f"{__name__}:_sent.__globals__.Colour"],
    "no path": ["", ":", "Colour", f"{__name__}:", ":Colour", f"{__name__}:.Colour"],
    "another class": [f"{__name__}:Word"],
}


@table("paths", FOREIGN)
def test_a_class_that_is_not_there_is_neither_imported_nor_taken_for_another_one(paths: list[str]) -> None:
    found = _sent(Colour.RED, enums=paths)
    assert type(found) is not Colour
    assert (found.name, found.value) == ("RED", "crimson")
    assert "antigravity" not in sys.modules


def test_reading_runs_no_code_of_a_module(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> Any:
        raise AssertionError("code of the module ran")

    class Lazy(types.ModuleType):
        __getattribute__ = fail

    module = types.ModuleType("plain")
    module.__dict__["__getattr__"] = fail
    monkeypatch.setitem(sys.modules, "plain", module)
    monkeypatch.setitem(sys.modules, "lazy", Lazy("lazy"))
    for path in ("plain:Colour", "lazy:Colour"):
        assert _sent(Colour.RED, enums=[path]).value == "crimson"


#: what another version of the class may have
OTHERS = [["Colour", "GREEN", "lime"], ["Colour", "RED", "dark red"], ["Colour", "BLUE", True], ["Colour", "BLUE", 1.0]]


@table("form", OTHERS)
def test_a_member_that_the_class_here_has_not_is_read_as_it_was_sent(form: list[Any]) -> None:
    found = _sent(None, data={"$enum": form}, enums=[f"{__name__}:Colour"])
    assert type(found) is not Colour
    assert (found.name, found.value) == (form[1], form[2])
    with pytest.raises(ConversionError):
        convert(_sent(None, data={"$enum": ["Colour", "GREEN", "lime"]}), Colour)


class Unequal(enum.Enum):
    HERE = 1

    def __eq__(self, _: object) -> bool:
        raise OSError("the code of the class")

    __hash__ = enum.Enum.__hash__


class Unhashable(enum.Enum):
    HERE = 1

    def __hash__(self) -> int:
        raise OSError("the code of the class")


class Formless(enum.Enum):
    A = object()


class RaisingValue(enum.Enum):
    A = Unequal.HERE


class RaisingFlag(enum.Flag):
    A = 1
    B = 2

    def __or__(self, _: object) -> Any:
        raise OSError("the code of the class")


class RaisingNames(enum.EnumMeta):
    @property
    def __members__(cls) -> Any:  # type: ignore[override]
        raise OSError("the code of the class")


class Nameless(enum.Enum, metaclass=RaisingNames):
    A = 1


#: class, name, value
UNREADABLE = [
    ["Formless", "A", 1], ["RaisingValue", "A", {"$enum": ["Unequal", "HERE", 1]}], ["RaisingFlag", "A|B", 3],
    ["Nameless", "A", 1],
]  # fmt: skip


@table("form", UNREADABLE)
def test_a_member_whose_class_here_fails_is_read_as_it_was_sent(form: list[Any]) -> None:
    name, member, _ = form
    found = _sent(None, data={"a": {"$enum": form}}, enums=[f"{__name__}:{name}", f"{__name__}:Unequal"])["a"]
    assert found.__class__ is not globals()[name]
    assert (type(found).__name__, found.name) == (name, member)


def test_elements_of_a_set_whose_class_here_fails_are_refused() -> None:
    with pytest.raises(DecodeError, match="set"):
        _sent(None, data={"$set": [{"$enum": ["Unhashable", "HERE", 1]}]}, enums=[f"{__name__}:Unhashable"])


class Counted(enum.Flag):
    A = 1
    B = 2
    C = 4

    def __or__(self, other: Any) -> Any:
        counted.append(self)
        return super().__or__(other)


counted: list[Counted] = []


def test_a_combination_has_at_most_as_many_names_as_its_class_has_members() -> None:
    for name, value, most in (("|".join("ABC" * 1000), 7, 0), ("|".join("ABCA"), 7, 0), ("|".join("ABC"), 7, 2)):
        counted.clear()
        found = _sent(None, data={"$enum": ["Counted", name, value]}, enums=[f"{__name__}:Counted"])
        assert len(counted) == most
        assert type(found) is (Counted if most else type(found))
        assert found.value == value


def test_unknown_bits_of_flags_are_read_as_they_were_sent() -> None:
    for name, value in (("READ|EXECUTE", 9), ("READ|WRITE", 7), ("READ|", 1)):
        found = _sent(None, data={"$enum": ["Permission", name, value]}, enums=[f"{__name__}:Permission"])
        assert type(found) is not Permission
        assert found.value == value


def test_classes_of_one_name_are_told_apart_by_their_members() -> None:
    scope: dict[str, Any] = {}
    for number, name in enumerate(("first", "second")):
        module = types.ModuleType(name)
        scope[name] = module.__dict__["Colour"] = enum.Enum("Colour", {"RED": number}, module=name, qualname="Colour")
        sys.modules[name] = module
    try:
        assert _sent([scope["first"].RED, scope["second"].RED, Colour.RED]) == [
            scope["first"].RED, scope["second"].RED, Colour.RED,
        ]  # fmt: skip
    finally:
        del sys.modules["first"], sys.modules["second"]


def test_a_class_that_no_other_process_can_find_is_not_named() -> None:
    local = enum.Enum("local", {"A": 1})
    event = WireEvent.of("a", [local.A, _sent(Colour.RED, enums=None)])
    assert event.enums == ()


def test_the_classes_of_one_event_are_bounded() -> None:
    made = types.ModuleType("many")
    sys.modules["many"] = made
    try:
        for number in range(MAX_CLASSES + 8):
            made.__dict__[f"E{number}"] = enum.Enum(f"E{number}", {"A": 1}, module="many", qualname=f"E{number}")
        event = WireEvent.of("a", [made.__dict__[f"E{number}"].A for number in range(MAX_CLASSES + 8)])
        assert len(event.enums) == MAX_CLASSES
        assert len([each for each in decode(encode(event)).value() if type(each).__module__ == "many"]) == MAX_CLASSES
    finally:
        del sys.modules["many"]


@table("enums", [5, "a:b", ["x"] * (MAX_CLASSES + 1), [5], ["x" * 201], {}])
def test_a_malformed_list_of_classes_is_not_written(enums: Any) -> None:
    event = WireEvent.of("a", 1)
    event.enums = enums
    with pytest.raises(InvalidEventError, match="'enums'"):
        encode(event)


COLOUR = f"{__name__}:Colour"
#: lists of other versions of the layout, and whether they name the class
LISTS: list[tuple[Any, bool]] = [
    (5, False), ("a:b", False), ({}, False), (True, False), ([COLOUR, 5, None, ["x"], "x" * 201, "\ud800"], True),
    (["x" * 201, COLOUR], True), ([5] * 100 + [COLOUR], True), (["a:b"] * MAX_CLASSES + [COLOUR], False),
]  # fmt: skip


@table(("enums", "names_it"), LISTS)
def test_a_reader_takes_what_it_understands_of_a_list_of_classes(enums: Any, names_it: bool) -> None:
    """They are hints: an event is not refused for one."""
    found = _sent(Colour.RED, enums=enums)
    assert (found is Colour.RED) is names_it
    assert found.value == "crimson"
    event = decode(json.dumps({"event": 1, "topic": "a", "data": 1, "enums": enums}).encode())
    assert len(event.enums) <= MAX_CLASSES
    encode(event)
