"""Values of user headers: accepted values, carried values, and their text."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta, timezone, tzinfo
from decimal import Decimal, Inexact, Rounded, localcontext
from enum import IntEnum
from types import MappingProxyType
from typing import Any

import pytest

import messaging
from messaging import Messaging
from messaging.errors import InvalidHeaderError
from messaging.model import carried_headers, headers, parse_url, requested
from messaging.model.context import ForwardedContext
from messaging.testing.tables import table
from messaging.testing.waiting import PATIENCE
from messaging_adapters.memory import MemoryAdapter, MemorySettings
from tests.doubles.fake import FakeBroker
from tests.doubles.fixtures import Connect

NOON = datetime(2026, 11, 22, 12, 0, 30, 500_000, timezone(timedelta(hours=2)))


class Text(str):
    """Equal to nothing."""

    __slots__ = ()
    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        return False


@table("given, seen",
    [
        ("text", "text"), (5, 5), (-(2**63), -(2**63)), (2**63 - 1, 2**63 - 1), (True, True), (False, False),
        (0.1, 0.1), (b"\xff", b"\xff"), (bytearray(b"a"), b"a"), (None, None), (Decimal("1.25"), Decimal("1.25")),
        (NOON, datetime(2026, 11, 22, 10, 0, 30, 500_000, UTC)),
        (["a", 1, [True, None]], ("a", 1, (True, None))), (("a",), ("a",)), ([], ()),
        ({"a": {"b": [1]}}, {"a": {"b": (1,)}}), ({}, {}),
    ],
)  # fmt: skip
def test_a_value_is_taken_with_its_type_and_cannot_be_changed_afterwards(given: Any, seen: Any) -> None:
    found = headers.check({"h": given})["h"]
    assert (found, type(found) if not isinstance(seen, dict) else dict) == (seen, type(seen))
    if isinstance(given, list):
        given.append("later")
        assert found == seen
    if isinstance(seen, dict):
        with pytest.raises(TypeError):
            found["x"] = 1


class Silent(tzinfo):
    """A time zone that has no offset to tell."""

    def utcoffset(self, _: datetime | None) -> None:
        return None


class Moment(datetime):
    """A time of a library, such as pandas or pendulum."""


class Money(Decimal):
    """An amount of an application."""


class Level(IntEnum):
    HIGH = 3


def test_of_a_subclass_only_its_value_is_taken() -> None:
    [(name, value)] = headers.check({Text("name"): Text("value")}).items()
    assert (type(name), type(value), name, value) == (str, str, "name", "value")


@table("given, seen",
    [
        (Moment(2026, 11, 22, 12, tzinfo=UTC), datetime(2026, 11, 22, 12, tzinfo=UTC)),
        (Moment(2026, 11, 22, 12, tzinfo=timezone(timedelta(hours=2))), datetime(2026, 11, 22, 10, tzinfo=UTC)),
        (Money("1.50"), Decimal("1.50")), (Level.HIGH, 3),
    ],
)  # fmt: skip
def test_a_value_of_a_subclass_is_carried_as_its_base(given: Any, seen: Any) -> None:
    found = headers.check({"h": given, "list": [given]})
    assert (found["h"], type(found["h"]), type(found["list"][0])) == (seen, type(seen), type(seen))
    assert headers.uncarried(found, headers.TYPED) is None


@table("precision", [1, 28])
def test_decimals_are_checked_whatever_the_decimal_context_of_the_caller(precision: int) -> None:
    with localcontext() as context:
        context.prec = precision
        context.traps[Inexact] = context.traps[Rounded] = True
        assert headers.check({"h": Decimal("21474836.47")})["h"] == Decimal("21474836.47")
        with pytest.raises(ValueError, match="digits in 31 bits"):
            headers.check({"h": Decimal("21474836.48")})


def test_views_of_bytes_count_with_their_bytes() -> None:
    view = memoryview(bytes(40_000)).cast("B", (2, 20_000))
    with pytest.raises(ValueError, match="too large"):
        headers.check({"h": view})


def deep(levels: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(levels - 1):
        value = [value]
    return value


@table("value, why",
    [
        (2**63, "64 bits"), (-(2**63) - 1, "64 bits"), (object(), "must be str, int"), ({1, 2}, "must be str, int"),
        (1j, "not complex"), (datetime(2026, 1, 1), "time zone"),
        (datetime(2026, 1, 1, tzinfo=Silent()), "time zone"), (datetime(1969, 12, 31, tzinfo=UTC), "before 1970"),
        (datetime.max.replace(tzinfo=timezone(timedelta(hours=-1))), "out of range"),
        (Decimal("NaN"), "digits"), (Decimal("-1"), "digits"), (Decimal("1E+400"), "digits"),
        (Decimal(2**31), "digits"),
        (Decimal((0, (1,), -256)), "digits"), ({1: "a"}, "name must be a str"), ({"": 1}, "name is empty"),
        ({"a\n": 1}, "U\\+000A"), (["a\r"], "U\\+000D"), (deep(17), "16 levels"), (["x" * 20_000] * 2, "too large"),
        ([1] * 5_000, "too large"), ([[]] * 5_000, "too large"),
    ],
)  # fmt: skip
def test_a_value_that_no_protocol_carries_is_refused_with_the_accepted_types(value: Any, why: str) -> None:
    with pytest.raises(ValueError, match=why) as caught:
        headers.check({"authorization": value})
    assert "xxxx" not in str(caught.value)


def test_values_nest_as_deep_as_they_are_read() -> None:
    assert headers.check({"h": deep(16)})["h"] == headers.frozen(deep(16))
    endless: list[Any] = []
    endless.append(endless)
    with pytest.raises(ValueError, match="16 levels"):
        headers.check({"h": endless})


@table("value, types, is_carried",
    [
        ("a", headers.TEXT, True), (1, headers.TEXT, False), (True, frozenset({str, int}), False),
        (("a", "b"), headers.TEXT | {tuple}, True), (("a", 1), headers.TEXT | {tuple}, False),
        ((("a",),), headers.TEXT | {tuple}, False), ((("a",),), headers.TYPED, True),
        (MappingProxyType({"a": (1, None)}), headers.TYPED, True), (MappingProxyType({}), headers.TEXT, False),
    ],
)  # fmt: skip
def test_a_protocol_carries_values_of_its_types(value: Any, types: frozenset[type], is_carried: bool) -> None:
    assert (headers.uncarried({"h": value}, types) is None) == is_carried


def test_a_value_that_the_protocol_cannot_carry_is_refused_before_anything_is_sent(
    broker: FakeBroker, m: Messaging
) -> None:
    with pytest.raises(InvalidHeaderError, match=f"'n' is a int; {m.name} carries str: make it a str"):
        m.publish("a", b"1", headers={"k": "v", "n": 5})
    assert broker.calls == ["open"]


@table("value, text",
    [
        ("text", "text"), ("", ""), (None, ""), (True, "true"), (-7, "-7"), (2**40, "1099511627776"), (1.5, "1.5"),
        (Decimal("1.25"), "1.25"), (b"\xff\x00", "ff00"), ("ü".encode(), "ü"),
        (datetime.fromtimestamp(1_700_000_000, UTC), "1700000000"), (NOON, "1795341630.5"),
        ([1, "ü", None, Decimal("0.5")], '[1,"ü",null,"0.5"]'), ((b"a", NOON), '["a",1795341630.5]'),
        (MappingProxyType({"a": MappingProxyType({"b": (True,)})}), '{"a":{"b":[true]}}'),
        ([float("nan")], '["nan"]'),
    ],
)  # fmt: skip
def test_every_value_has_a_text(value: Any, text: str) -> None:
    assert headers.as_text(value) == text
    if isinstance(value, (list, tuple, MappingProxyType)):
        json.loads(text)


def test_a_received_message_is_passed_on_with_values_as_text_where_the_protocol_has_no_types(
    broker: FakeBroker, connect: Connect
) -> None:
    connect(broker)
    can = broker.adapter.capabilities
    told = MappingProxyType({"n": 5, "k": "v", "list": ("a\n", 1)})
    assert carried_headers(told, can) == {"n": "5", "k": "v", "list": '["a\\n",1]'}
    context = ForwardedContext("a", extensions=MappingProxyType({"headers": told}))
    assert requested(context, can)["headers"] == carried_headers(told, can)
    memory = MemoryAdapter(parse_url("memory://typed"), MemorySettings(), "typed")
    assert carried_headers(told, memory.capabilities) == {"n": 5, "k": "v", "list": ("a\\u000a", 1)}


def test_a_received_message_crosses_from_typed_headers_to_text(broker: FakeBroker, m: Messaging) -> None:
    with messaging.connect("memory://crossing") as there, there.subscribe("a") as stream:
        stream.ready.result(PATIENCE)
        there.publish("a", b"1", headers={"n": 5, "at": NOON}).result(PATIENCE)
        message = stream.receive(PATIENCE)
        assert message.context.extensions["headers"] == {"n": 5, "at": NOON}
        broker.hold = True
        m.publisher.publish(message, "b")
        broker.wait_sent(1)
    assert broker.held[0].plan.options.headers == {"n": "5", "at": "1795341630.5"}
