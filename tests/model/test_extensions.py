"""Extensions: each key has a type, a range and a meaning; a key that is not announced is refused at the call."""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Iterator, Mapping
from decimal import Decimal
from types import MappingProxyType
from typing import Any
from uuid import UUID

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from messaging import Features, Messaging
from messaging.errors import (
    ArgumentError,
    InvalidExtensionError,
    InvalidHeaderError,
    UnsupportedFeatureError,
)
from messaging.model import (
    CHECKS,
    MAX_MESSAGE_ID,
    Capabilities,
    MessageContext,
    PublishOptions,
    SubscribeOptions,
    boolean,
    identified,
    publish_options,
    requested,
    subscribe_options,
)
from messaging.model.context import ForwardedContext
from messaging.model.extensions import (
    EXTENSIONS,
    MAX_HEADER_BYTES,
    MAX_HEADERS,
    RECEIVED_ONLY,
    check_extensions,
    known,
)
from messaging.testing.tables import table
from messaging.testing.waiting import PATIENCE
from tests.doubles.fake import EVERYTHING, NEXT_TO_NOTHING, FakeBroker, FakeSettings


def colour(value: Any) -> Any:
    if value not in ("red", "green"):
        raise ValueError("must be 'red' or 'green'")
    return value.upper()


def stand(features: frozenset[str] = EVERYTHING, default_qos: str = "1", **more: Any) -> Capabilities:
    """Return the capabilities of an instance with extensions of its own."""
    given: dict[str, Any] = {
        "publish_extensions": {"fakeColour": colour, "fakeStamp": bool},
        "subscribe_extensions": {"fakeColour": colour, "fakeSpeed": float},
        "ways_out": {"fakeColour": "set colour=on"},
    }
    given |= {"protocols": (), "features": features, "qos_levels": ("0", "1"), "default_qos": default_qos, **more}
    return Capabilities(name="stand", **given)


def subscribing(extensions: Any, capabilities: Capabilities, **settings: Any) -> SubscribeOptions:
    return subscribe_options(extensions, capabilities, FakeSettings(**settings))


BOOLEANS = [
    Features.EXTENSION_GUARANTEED_ORDERING,
    Features.EXTENSION_GUARANTEED_DELIVERY,
    Features.EXTENSION_AUTO_ACKNOWLEDGE,
    Features.EXTENSION_LAST_WILL,
    Features.EXTENSION_RETAIN,
    Features.EXTENSION_AUTOCREATE,
    Features.EXTENSION_MANDATORY,
    Features.EXTENSION_STORE_AND_FORWARD,
]
AS_THEY_ARE: dict[str, list[Any]] = {
    **{key: [True, False] for key in BOOLEANS},
    "qos": ["0", "1"],
    "priority": [0, 9],
    "headers": [{}, {"a": "b", "é": ""}],
    "queue": ["jobs"],
    "deadLetterChannel": ["a/b"],
    "deduplicate": [0.5, 86400.0],
    "maxDeliveries": [1, 10**9],
    "prefetch": [1, 65_535],
    "bufferSize": [1],
    "overflow": ["block", "fail"],
    "messageId": ["m", "größe 1/2 #+", "x" * 255, "é" * 127],
    "timeToLive": [0.001],
}
GOOD: list[tuple[str, Any, Any]] = [
    *((key, value, value) for key, values in AS_THEY_ARE.items() for value in values),
    *(
        ("qos", 1, "1"),
        ("timeToLive", 1, 1.0),
        ("timeout", 3, 3.0),
        ("fakeColour", "red", "RED"),
        ("deduplicate", True, 3600.0),
    ),
]
BAD: dict[str, list[Any]] = {
    **{key: [1, 0, "true", "maybe", None, []] for key in BOOLEANS},
    "qos": ["3", "", "one", 5, -1, 1.0, True, None, b"1", [], "\N{FULLWIDTH DIGIT ONE}"],
    **{
        key: [0, -1, float("nan"), float("inf"), "1", None, True, 10**400, 1e200, Decimal(1), 1j]
        for key in ("timeToLive", "timeout")
    },
    "priority": [-1, 10, 1.0, "1", None, True],
    "headers": [
        *(None, [], "a", {"a": 1}, {1: "a"}, {"": "a"}, {b"a": b"b"}),
        *({"a\x00": "b"}, {"a": "\x00"}, {"a": "\ud800"}),
        *({"a\n": "b"}, {"a": "b\r\nc: d"}, {"a": "\t"}, {"a": "\x85"}, {"a": "\ufffe"}, {"\ufdd0": "a"}),
    ],
    "queue": ["", "a/b", "a+", "#", "a\x00", "x" * 201, 1, None, b"q", []],
    "deadLetterChannel": ["", "+", "a/#", "a\x00", 1, None, [], {}, b"a"],
    **{key: [0, -1, 1.0, "1", None, True] for key in ("maxDeliveries", "bufferSize")},
    "deduplicate": [0, -1.0, "yes", None, [], float("inf")],
    "prefetch": [0, -1, 1.0, "1", None, True, 65_536],
    "overflow": ["", "drop", "BLOCK", None, 1, [], {}],
    "messageId": [
        *("", "x" * 256, "é" * 128, "a\x00", "\n", "\x7f", "\x85", "\ud800", "\ufffe"),
        *(None, 1, True, b"m", [], {}, UUID(int=1)),
    ],
    "fakeColour": ["blue", []],
}


@table("key, value, expected", GOOD)
def test_good_values_are_taken(key: str, value: Any, expected: Any) -> None:
    """Scenario 95 [S], among others: qos as text."""
    checked = check_extensions({key: value}, stand())
    assert checked == {key: expected}
    assert type(checked[key]) is type(expected) or isinstance(checked[key], Mapping)


@table("key, value", [(key, value) for key in BAD for value in BAD[key]], ids=lambda value: f"{value!r:.20}")
def test_bad_values_name_their_key(key: str, value: Any) -> None:
    """Scenario 92 [S]."""
    with pytest.raises(InvalidExtensionError, match=f"extension '{key}'") as caught:
        check_extensions({key: value}, stand())
    assert caught.value.key == key
    assert isinstance(caught.value, ArgumentError)
    assert isinstance(caught.value, InvalidHeaderError) == (key == "headers")
    assert caught.value.__cause__ is None
    assert len(str(caught.value)) < 500


def test_values_of_any_size_are_not_repeated_in_full() -> None:
    """An error ends up in a log."""
    for key in ("qos", "retain", "priority", "overflow", "timeout", "queue", "deadLetterChannel"):
        with pytest.raises(InvalidExtensionError) as caught:
            check_extensions({key: ["x" * 100_000]}, stand())
        assert len(str(caught.value)) < 1000, key


@table("key", ["colour", "QOS", "quality", "", "will", "messageid", 7, None, ("a", "b")])
def test_unknown_extensions_are_refused(key: Any) -> None:
    """Scenario 90 [S][B]."""
    with pytest.raises(UnsupportedFeatureError, match="unknown extension") as caught:
        check_extensions({key: 1}, stand())
    assert caught.value.instance == "stand"
    assert "qos" in str(caught.value)  # what would be right


@table("key", sorted(CHECKS))
def test_extensions_that_are_not_announced_are_refused(key: str) -> None:
    """Scenario 91 [S]."""
    good = next(value for name, value, _ in GOOD if name == key and value is not EXTENSIONS[key].default)
    with pytest.raises(UnsupportedFeatureError) as caught:
        check_extensions({key: good}, stand(EVERYTHING - {key}))
    assert caught.value.feature == key


@table("key", sorted({*CHECKS} & {*BOOLEANS} - {Features.EXTENSION_AUTOCREATE}))
def test_turning_off_an_extension_that_is_not_announced_is_accepted(key: str) -> None:
    assert check_extensions({key: False}, stand(NEXT_TO_NOTHING - {key})) == {key: False}


def test_a_feature_that_a_setting_brings_is_refused_with_that_setting() -> None:
    here = stand(EVERYTHING - {"fakeColour", "priority"})
    with pytest.raises(UnsupportedFeatureError, match="does not support 'fakeColour': set colour=on"):
        publish_options({"fakeColour": "red"}, here)
    with pytest.raises(UnsupportedFeatureError) as caught:
        publish_options({"priority": 1}, here)
    assert "set " not in str(caught.value)


def test_not_creating_is_a_request_like_any_other() -> None:
    assert check_extensions({Features.EXTENSION_AUTOCREATE: True}, stand(NEXT_TO_NOTHING))
    with pytest.raises(UnsupportedFeatureError):
        check_extensions({Features.EXTENSION_AUTOCREATE: False}, stand(NEXT_TO_NOTHING))


def test_a_qos_beyond_those_of_the_instance_is_unsupported() -> None:
    with pytest.raises(UnsupportedFeatureError, match="qos levels here: 0, 1") as caught:
        check_extensions({"qos": "2"}, stand())
    assert caught.value.feature == "qos=2"


def test_extensions_that_only_received_messages_carry_are_ignored() -> None:
    given = dict.fromkeys(RECEIVED_ONLY, object())
    assert check_extensions(given, stand()) == {}


def test_extensions_of_received_messages_are_checked_where_they_can_be_requested() -> None:
    adapter = stand(EVERYTHING | {"streamOffset"}, subscribe_extensions={"streamOffset": int})
    assert check_extensions({"streamOffset": "7", "timestamp": object()}, adapter) == {"streamOffset": 7}
    with pytest.raises(InvalidExtensionError, match="streamOffset"):
        check_extensions({"streamOffset": "x"}, adapter)


def test_an_extension_of_subscriptions_does_not_keep_a_message_from_being_passed_on() -> None:
    adapter = stand(EVERYTHING | {"packetId"}, subscribe_extensions={"packetId": boolean})
    assert publish_options({"packetId": 17}, adapter) == publish_options({"packetId": True}, adapter)
    assert subscribing({"packetId": True}, adapter).custom == {"packetId": True}
    with pytest.raises(InvalidExtensionError, match="packetId"):
        subscribing({"packetId": 17}, adapter)


def test_a_request_for_packet_ids_is_not_ignored_where_there_are_none() -> None:
    for compile_ in (publish_options, subscribing):
        compile_({"packetId": 1}, stand())
        with pytest.raises(UnsupportedFeatureError, match="packetId"):
            compile_({"packetId": True}, stand())


def test_options_with_another_message_id_are_otherwise_the_same() -> None:
    asked = {"messageId": "a", "priority": 3, "fakeColour": "red", "headers": {"h": "1"}, "timeToLive": 5}
    one = publish_options(asked, stand())
    assert one.message_id == "a"
    assert identified(one, "b") == publish_options({**asked, "messageId": "b"}, stand())
    with pytest.raises(InvalidExtensionError, match=f"1 to {MAX_MESSAGE_ID} bytes"):
        identified(one, "")


@table("value", ["", "x" * 256, "a\nb", 7, None, []])
def test_a_received_message_id_that_is_none_here_asks_for_nothing(value: Any) -> None:
    told = MappingProxyType({"messageId": value, "qos": "1"})
    assert requested(ForwardedContext("a", extensions=told), stand()) == {"qos": "1"}
    assert requested(MessageContext("a", extensions=told), stand()) == told


def test_a_received_message_id_is_kept_where_it_can_travel() -> None:
    told = MappingProxyType({"messageId": "m", "qos": "1"})
    context = ForwardedContext("a", extensions=told)
    assert requested(context, stand()) == told
    assert requested(context, stand(EVERYTHING - {"messageId"})) == {"qos": "1"}


def test_headers_of_a_received_message_are_passed_on_with_unprintable_characters_escaped() -> None:
    told = MappingProxyType({"headers": MappingProxyType({"two\r\nlines": "a\nb", "plain": "é\\n"}), "qos": "1"})
    carried = requested(ForwardedContext("a", extensions=told), stand())
    assert carried == {"headers": {r"two\u000d\u000alines": r"a\u000ab", "plain": "é\\n"}, "qos": "1"}
    publish_options(carried, stand())
    with pytest.raises(InvalidHeaderError):
        publish_options(requested(MessageContext("a", extensions=told), stand()), stand())


def test_absent_booleans_are_off() -> None:
    """Scenario 93 [S]."""
    publishing = publish_options({}, stand())
    assert publishing == PublishOptions(qos="1")
    for name in ("guaranteed_delivery", "guaranteed_ordering", "last_will", "retain"):
        assert getattr(publishing, name) is False
    consuming = subscribing({}, stand())
    assert consuming.auto_acknowledge is consuming.guaranteed_ordering is False
    assert (consuming.max_deliveries, consuming.dead_letter_channel, consuming.queue) == (None, None, None)
    assert publishing.autocreate
    assert consuming.autocreate


def test_guaranteed_delivery_raises_the_qos() -> None:
    """Scenario 27 [S]."""
    for default in ("0", "1"):
        here = stand(EVERYTHING, default)
        assert publish_options({}, here).qos == default
        assert publish_options({"guaranteedDelivery": True}, here).qos == "1"
        assert subscribing({"guaranteedDelivery": True}, here).qos == "1"
        assert publish_options({"guaranteedDelivery": True, "qos": "1"}, here).qos == "1"
        with pytest.raises(InvalidExtensionError, match="contradicts guaranteedDelivery"):
            publish_options({"guaranteedDelivery": True, "qos": "0"}, here)


def test_custom_extensions_arrive_checked_beside_the_known_ones() -> None:
    here = stand()
    assert publish_options({"fakeColour": "red", "qos": "1"}, here).custom == {"fakeColour": "RED"}
    assert subscribing({"fakeColour": "green"}, here).custom == {"fakeColour": "GREEN"}
    assert publish_options({}, here).custom == {}
    both = {"fakeColour": "red", "fakeStamp": True, "fakeSpeed": 2}
    here = stand(EVERYTHING | both.keys())
    assert publish_options(both, here).custom == {"fakeColour": "RED", "fakeStamp": True}
    assert subscribing(both, here).custom == {"fakeColour": "RED", "fakeSpeed": 2.0}
    with pytest.raises(TypeError):
        publish_options({"fakeColour": "red"}, here).custom["x"] = 1  # type: ignore[index]


def test_known_extensions_are_the_announced_ones() -> None:
    assert set(known(stand())) == {*CHECKS, "fakeColour"}  # the others are not announced
    assert set(known(stand(NEXT_TO_NOTHING))) == {*CHECKS} & NEXT_TO_NOTHING


def test_headers_are_bounded_and_cannot_be_written_to() -> None:
    here = stand()
    most = {str(number): "" for number in range(MAX_HEADERS)}
    headers = publish_options({"headers": most}, here).headers
    assert headers == most
    with pytest.raises(TypeError):
        headers["x"] = "y"  # type: ignore[index]
    with pytest.raises(InvalidHeaderError, match=f"{MAX_HEADERS + 1} headers are too many"):
        publish_options({"headers": {**most, "more": ""}}, here)
    publish_options({"headers": {"a": "x" * (MAX_HEADER_BYTES - 1)}}, here)
    with pytest.raises(InvalidHeaderError, match=f"{MAX_HEADER_BYTES + 1} bytes"):
        publish_options({"headers": {"a": "x" * MAX_HEADER_BYTES}}, here)


def test_an_error_about_a_header_never_shows_its_value() -> None:
    for value in ("secret\x00", "secret\ud800", b"secret"):
        with pytest.raises(InvalidHeaderError) as caught:
            publish_options({"headers": {"authorization": value}}, stand())
        assert "secret" not in str(caught.value)
        assert "authorization" in str(caught.value)


class Hostile:
    """Says no to everything that can be asked of an object."""

    def __eq__(self, other: object) -> bool:
        raise RuntimeError("no ==")

    def __hash__(self) -> int:
        raise RuntimeError("no hash")

    def __repr__(self) -> str:
        raise RuntimeError("no repr")

    def __bool__(self) -> bool:
        raise RuntimeError("no bool")


class HostileMapping(Mapping[str, str]):
    def __getitem__(self, key: str) -> str:
        raise RuntimeError("no item")

    def __iter__(self) -> Iterator[str]:
        raise RuntimeError("no iteration")

    def __len__(self) -> int:
        raise RuntimeError("no length")


class Level(enum.IntEnum):
    ONE = 1


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(10**5, 10**6).map(lambda exponent: 10 ** (exponent % 5000))
    | st.floats()
    | st.complex_numbers()
    | st.decimals()
    | st.text(max_size=10)
    | st.binary(max_size=10)
    | st.sampled_from([object(), int, Level.ONE, ..., NotImplemented, range(3), MappingProxyType({"a": "b"})]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(max_size=3) | st.integers(), inner, max_size=3)
        | st.tuples(inner)
        | st.frozensets(st.integers(), max_size=2)
    ),
    max_leaves=4,
)


@given(
    extensions=st.dictionaries(
        st.sampled_from([*CHECKS, *RECEIVED_ONLY, "fakeColour"]) | st.text(max_size=5), VALUES, max_size=4
    ),
    announced=st.sets(st.sampled_from(sorted(EVERYTHING))),
)
@settings(max_examples=400)
def test_arbitrary_values_raise_nothing_but_the_declared_errors(
    extensions: dict[str, Any], announced: set[str]
) -> None:
    here = stand(frozenset(announced))
    for compile_ in (publish_options, subscribing):
        with contextlib.suppress(InvalidExtensionError, UnsupportedFeatureError):
            assert compile_(extensions, here).qos in ("0", "1")


@table("key", [*CHECKS, "fakeColour"])
@table("value", [Hostile(), HostileMapping()], ids=["object", "mapping"])
def test_hostile_values_raise_nothing_but_the_declared_errors(key: str, value: object) -> None:
    if key == "fakeColour":
        return  # that check is the adapter's
    with pytest.raises(InvalidExtensionError, match=f"extension '{key}'"):
        check_extensions({key: value}, stand())


@table(
    "bad, good",
    [({"retain": 1}, {"retain": True}), ({"qos": True}, {"qos": 1}), ({"priority": True}, {"priority": 1})],
)
def test_the_short_way_does_not_take_one_value_for_another_that_is_equal(
    broker: FakeBroker, m: Messaging, bad: dict[str, Any], good: dict[str, Any]
) -> None:
    """1 == True, in Python; a context that was refused must not stand in for a good one, nor the other way round."""
    with pytest.raises(InvalidExtensionError):
        m.publish("a", b"1", **bad)
    before = len(broker.payloads)
    assert m.publish("a", b"2", **good).result(PATIENCE) is None
    with pytest.raises(InvalidExtensionError):
        m.publish("a", b"3", **bad)
    assert broker.payloads[before:] == [b"2"]


def test_the_short_way_spells_extensions_in_snake_case(broker: FakeBroker, m: Messaging) -> None:
    broker.hold = True
    m.publish("a", b"1", time_to_live=5, guaranteed_delivery=True, fake_colour="red", headers={"a": "b"})
    broker.wait_sent(1)
    options = broker.held[0].plan.options
    assert (options.time_to_live, options.guaranteed_delivery) == (5.0, True)
    assert options.custom == {"fakeColour": "red"}
    assert options.headers == {"a": "b"}
    broker.confirm()
    with pytest.raises(UnsupportedFeatureError, match="'time_to_lve'; did you mean 'time_to_live'"):
        m.publish("a", b"1", time_to_lve=5)
