"""The layout of one event on the wire: written, read, refused."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from messaging.dispatch.eventdata import WireError, WireEvent, decode, encode, microseconds, time_of
from messaging.errors import DecodeError, InvalidEventError
from messaging.testing.tables import table
from tests.dispatch.eventdata.strategies import typed, values

SENDER = "0b8f8a5e-1c1e-4c0e-9c59-6a5a2f0a3b11"
NOON = 1_773_489_600_000_000
FULL = {
    "event": 1,
    "recorder": "bus-1",
    "sender": SENDER,
    "sequence": 17,
    "topic": "orders/placed",
    "time": NOON,
    "id": "e-1",
    "origin": SENDER,
    "bundle": 0,
    "path": [SENDER, SENDER],
    "session": "s-1",
    "reply": ".replies/1",
    "correlation": "c-1",
    "principal": "meter",
    "notify": True,
    "data": {"id": 3, "total": 99.5},
}
COPY = WireEvent(
    "orders/placed",
    {"id": 3, "total": 99.5},
    time=NOON,
    id="e-1",
    origin=SENDER,
    bundle=0,
    recorder="bus-1",
    sender=SENDER,
    sequence=17,
    path=(SENDER, SENDER),
    session="s-1",
    reply_to=".replies/1",
    correlation_id="c-1",
    principal="meter",
    notify=True,
)


def dumped(event: Any) -> bytes:
    return json.dumps(event).encode()


def cbor(value: Any) -> bytes:
    payload: bytes = pytest.importorskip("cbor2").dumps(value)
    return payload


def test_every_field_has_its_key() -> None:
    assert json.loads(encode(COPY)) == FULL
    assert [*json.loads(encode(COPY))] == [*FULL]
    assert decode(dumped(FULL)) == COPY
    assert decode(encode(COPY)).value() == {"id": 3, "total": 99.5}


def test_a_recorded_event_is_written_byte_for_byte_as_ever() -> None:
    data = {"id": 3, "total": 1e-07, "by": "Zoë", "at": {"$date": "2025-10-09"}, "no": None}
    event = WireEvent("orders/placed", data, time=NOON, recorder="bus-5c1f", sequence=17)
    payload = (
        '{"event":1,"recorder":"bus-5c1f","sequence":17,"topic":"orders/placed","time":1773489600000000,'
        '"data":{"id":3,"total":1e-07,"by":"Zoë","at":{"$date":"2025-10-09"},"no":null}}'
    ).encode()
    assert encode(event) == payload
    assert decode(payload) == event


@table("payload", [b'{"event":1,"data":5}', b' {"data": 5, "event": 1, "more": {"x": [1]}}\n'])
def test_a_plain_program_sends_little(payload: bytes) -> None:
    assert decode(payload, "a/b") == WireEvent("a/b", 5)
    with pytest.raises(DecodeError, match="without 'topic'"):
        decode(payload)


@table("data", [None, 0, "text", [1], {}, False])
def test_any_value_may_be_the_data(data: Any) -> None:
    event = WireEvent.of("a", data)
    assert json.loads(encode(event)) == {"event": 1, "topic": "a", "data": data}
    assert typed(decode(encode(event)).value()) == typed(data)


@dataclass
class Order:
    id: int


def test_an_object_with_fields_is_sent_as_a_map() -> None:
    event = WireEvent.of("a", Order(3), sequence=0)
    assert event.data == {"id": 3}
    assert decode(encode(event)) == event


def test_fields_that_are_null_are_missing() -> None:
    found = {key: None for key in FULL if key not in ("event", "data")}
    assert decode(dumped({**found, "event": 1, "data": None}), "a") == WireEvent("a")


@table("as_cbor", [False, True])
def test_close_and_error(as_cbor: bool) -> None:
    close = WireEvent("a", kind="close", session="s")
    assert decode(encode(close, as_cbor=as_cbor)) == close
    assert close.value() is None
    failed = WireEvent("a", kind="error", error=WireError("ValueError", "no such order"))
    assert decode(encode(failed, as_cbor=as_cbor)) == failed
    assert json.loads(encode(failed)) == {
        "event": 1,
        "topic": "a",
        "kind": "error",
        "error": {"type": "ValueError", "message": "no such order"},
    }


def test_the_topic_of_the_channel_is_that_of_the_event() -> None:
    assert decode(encode(COPY), "orders/placed") == COPY
    with pytest.raises(DecodeError, match="must be that of its channel, 'orders/paid'"):
        decode(encode(COPY), "orders/paid")


def test_uuids_are_read_in_lower_case() -> None:
    found = decode(dumped({**FULL, "sender": SENDER.upper(), "path": [SENDER.upper()]}))
    assert (found.sender, found.path) == (SENDER, (SENDER,))


WRONG: list[tuple[str, Any, str]] = [
    ("topic", "", "text of 1 to 65535 characters"),
    ("topic", "a" * 65_536, "text of 1 to 65535"),
    ("topic", "\ud800", "text of 1 to 65535"),
    ("topic", 5, "text of 1 to 65535"),
    ("time", 1.5, "microseconds since 1970"),
    ("time", True, "microseconds since 1970"),
    ("time", 2**62, "years 1 to 9999"),
    ("time", -(2**62), "years 1 to 9999"),
    ("kind", "other", "'data', 'close' or 'error'"),
    ("kind", 1, "'data', 'close' or 'error'"),
    ("kind", [], "'data', 'close' or 'error'"),
    ("id", "a" * 201, "at most 200 characters"),
    ("id", 5, "at most 200 characters"),
    ("id", "\ud800", "at most 200 characters"),
    ("origin", "x", "a UUID"),
    ("origin", SENDER.replace("-", "x"), "a UUID"),
    ("origin", SENDER + "\n", "a UUID"),
    ("origin", SENDER[:-1] + "\u0661", "a UUID"),
    ("bundle", -1, "from 0"),
    ("bundle", 2**63, "from 0"),
    ("bundle", 1.0, "from 0"),
    ("recorder", "", "1 to 200 characters"),
    ("recorder", "a" * 201, "200 characters"),
    ("sender", "bus-1", "a UUID"),
    ("sequence", -1, "from 0"),
    ("sequence", "1", "from 0"),
    ("sequence", 10**400, "from 0"),
    ("path", [SENDER] * 33, "at most 32"),
    ("path", SENDER, "at most 32"),
    ("path", [1], "a UUID"),
    ("path", {}, "at most 32"),
    ("session", [], "at most 200 characters"),
    ("reply", {}, "at most 200 characters"),
    ("correlation", 1, "at most 200 characters"),
    ("principal", "a" * 201, "at most 200 characters"),
    ("notify", 1, "true or false"),
    ("notify", "yes", "true or false"),
    ("error", "x", "'type'"),
    ("error", {"type": "x"}, "'type'"),
    ("error", {"type": "a" * 201, "message": ""}, "'type'"),
    ("error", {"type": "x", "message": "\ud800"}, "'type'"),
]


@table("key, value, problem", WRONG)
def test_a_wrong_field_is_refused_with_its_name_and_what_would_be_right(key: str, value: Any, problem: str) -> None:
    with pytest.raises(DecodeError, match=f"a wrong '{key}', an? .*: it must be .*{problem}") as caught:
        decode(dumped({**FULL, key: value}))
    assert len(str(caught.value)) < 300
    attribute = {"reply": "reply_to", "correlation": "correlation_id"}.get(key, key)
    event = decode(dumped(FULL))
    setattr(event, attribute, value)
    with pytest.raises(InvalidEventError, match=f"a wrong '{key}'"):
        encode(event)


@table(
    "payload, problem",
    [
        (b"", "no JSON in UTF-8"),
        (b"{", "no JSON in UTF-8"),
        (b'{"event":1,"data":NaN}', "no JSON in UTF-8"),
        (b'{"event":1,"data":"\xff"}', "no JSON in UTF-8"),
        (b"\xff\xfe", "no JSON in UTF-8"),
        (b'{"event":1,"data":' + b"9" * 5000 + b"}", "no JSON in UTF-8"),
        (b"[" * 100_000, "no JSON in UTF-8"),
        (b"[]", "no object with the version"),
        (b"{}", "no object with the version"),
        (b"null", "no object with the version"),
        (b'{"event":2,"data":1}', "of layout 2: this version of the library reads layout 1"),
        (b'{"event":true,"data":1}', "of layout a bool"),
        (b'{"event":1.0,"data":1}', "of layout a float"),
        (b'{"event":null,"data":1}', "of layout a NoneType"),
        (b'{"event":1}', "without 'data'"),
        (b'{"event":1,"kind":"error"}', "without 'error'"),
    ],
)
def test_payloads_that_are_no_events_are_refused(payload: bytes, problem: str) -> None:
    with pytest.raises(DecodeError, match=problem):
        decode(payload, "a")


@table("payload", ["text", None, 5, [1]])
def test_payloads_that_are_no_bytes_are_refused(payload: Any) -> None:
    with pytest.raises(DecodeError, match=r"a payload is bytes, not an? "):
        decode(payload)


@table("make", [bytearray, memoryview])
def test_other_kinds_of_bytes_are_read(make: Callable[[bytes], Any]) -> None:
    assert decode(make(encode(COPY))) == COPY


@table(
    "event, problem",
    [
        (WireEvent("a", math.nan), "cannot be written as JSON"),
        (WireEvent("a", object()), "cannot be written as JSON"),
        (WireEvent("a", kind="error"), "without its error"),
        (WireEvent(None), "a wrong 'topic'"),  # type: ignore[arg-type]
        (WireEvent("a", kind=None), "a wrong 'kind'"),  # type: ignore[arg-type]
    ],
)
def test_an_event_that_cannot_be_sent_is_refused(event: WireEvent, problem: str) -> None:
    with pytest.raises(InvalidEventError, match=problem):
        encode(event)


@table("data", ['{"$other":1}', '{"a":{"$int":5}}', "1e999", "[" * 150 + "]" * 150, '{"x":{"$set":[[]]}}'])
def test_an_event_with_broken_data_can_be_routed_but_not_read(data: str) -> None:
    event = decode(f'{{"event":1,"topic":"a","id":"e","data":{data}}}'.encode())
    assert (event.topic, event.id) == ("a", "e")
    for _ in range(2):
        with pytest.raises(DecodeError, match="data of an event"):
            event.value()


def test_each_reader_has_a_copy_of_the_data() -> None:
    event = decode(b'{"event":1,"data":{"a":[1]}}', "a")
    event.value()["a"].append(2)
    assert event.value() == {"a": [1]}


# --- CBOR


@settings(max_examples=50, deadline=None)
@given(values)
def test_cbor_has_the_same_map(value: Any) -> None:
    cbor2 = pytest.importorskip("cbor2")
    event = WireEvent.of("a", value, sender=SENDER, sequence=1)
    try:
        payload = encode(event, as_cbor=True)
    except InvalidEventError as error:
        assert "surrogate" in str(error)  # noqa: PT017  # CBOR has no escapes
        return
    assert cbor2.loads(payload) == json.loads(encode(event))
    assert decode(payload) == event
    assert typed(decode(payload).value()) == typed(value)


def test_cbor_of_another_program() -> None:
    minimal = {"event": 1, "data": {"raw": b"\0\1", "id": uuid.UUID(int=5), "big": 2**70, "inf": math.inf}}
    assert decode(cbor(minimal), "a").value() == minimal["data"]
    described = b"\xd9\xd9\xf7" + cbor(minimal)
    assert decode(described, "a").value() == minimal["data"]
    indefinite = b"\xbf\x65event\x01\x64data\x05\xff"
    assert decode(indefinite, "a") == WireEvent("a", 5)


@table(
    "payload",
    [
        b"\xa1",
        b"\xbf",
        b"\xa0",
        b"\xd9\xd9\xf7",
        b"\xa1\x01\x02",
        b"\xd9",
        b"\xa1\x65event\x01\xff",
        b"\xba\xff\xff\xff\xff",
    ],
)
def test_cbor_that_is_no_event_is_refused(payload: bytes) -> None:
    pytest.importorskip("cbor2")
    with pytest.raises(DecodeError, match="not an event"):
        decode(payload, "a")


@table("data", [{1: 2}, {"a": {b"k": 1, "x": 2}}, {"x": {"$int": b"1"}}])
def test_cbor_data_that_json_would_not_have_is_refused(data: Any) -> None:
    event = decode(cbor({"event": 1, "data": data}), "a")
    with pytest.raises(DecodeError, match="data of an event"):
        event.value()


WITHOUT_CBOR = """
import sys
sys.modules["cbor2"] = None
from messaging.errors import MissingExtraError
from messaging.dispatch.eventdata import WireEvent, decode, encode
event = WireEvent("a", 5)
for _ in range(2):
    for call in (lambda: encode(event, as_cbor=True), lambda: decode(b"\\xa2\\x65event\\x01\\x64data\\x05", "a")):
        try:
            call()
        except MissingExtraError as error:
            assert error.extra == "cbor"
        else:
            raise AssertionError
assert decode(encode(event)) == event
"""


def test_cbor_needs_its_extra_and_json_does_not() -> None:
    subprocess.run([sys.executable, "-c", WITHOUT_CBOR], check=True, timeout=60)


# --- hostile input


def read_or_refused(payload: bytes, topic: str | None = "a") -> None:
    try:
        event = decode(payload, topic)
        event.value()
    except DecodeError:
        return
    assert decode(encode(event), topic) == event


parts = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(), max_size=8) | st.binary(),
    lambda each: st.lists(each, max_size=3)
    | st.dictionaries(st.sampled_from([*FULL, "$int", "$set", "$enum", "$map", "type", "message"]), each, max_size=3),
    max_leaves=8,
)  # fmt: skip


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=40), st.sampled_from([b"", b'{"event":1,', b"\xa2\x65event\x01\x64data", b"\xd9", b"{"]))
def test_any_bytes_are_read_or_refused(payload: bytes, before: bytes) -> None:
    read_or_refused(before + payload)


@settings(max_examples=300, deadline=None)
@given(parts, st.dictionaries(st.sampled_from([*FULL, "kind", "error"]), parts, max_size=3), st.booleans())
def test_any_json_and_any_change_of_an_event_are_read_or_refused(other: Any, change: Any, is_cbor: bool) -> None:
    write = cbor if is_cbor else lambda value: json.dumps(value, default=repr).encode()
    for event in (other, {**FULL, **change}, {**FULL, "data": other}):
        try:
            payload = write(event)
        except UnicodeEncodeError:
            continue
        read_or_refused(payload, None)


@settings(max_examples=300, deadline=None)
@given(st.data(), st.booleans())
def test_any_mutation_of_a_payload_is_read_or_refused(data: st.DataObject, as_cbor: bool) -> None:
    payload = bytearray(encode(COPY, as_cbor=as_cbor))
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, len(payload) - 1))
        payload[place : place + data.draw(st.integers(0, 3))] = data.draw(st.binary(max_size=3))
        if not payload:
            break
    read_or_refused(bytes(payload), None)


# --- small things


def test_a_repr_does_not_show_the_data() -> None:
    assert repr(WireEvent("a", {"password": "secret"}, id="e")) == "WireEvent('a', kind='data', id='e')"


def test_events_with_equal_fields_are_equal() -> None:
    assert WireEvent("a", 1) == WireEvent("a", 1)
    assert WireEvent("a", 1) != WireEvent("a", 1, time=0)
    assert WireEvent("a", 1) != "a"


def test_times_survive_microseconds() -> None:
    for count in (0, -1, NOON + 1):
        assert microseconds(time_of(count)) == count


_USUAL = st.fixed_dictionaries(
    {"sequence": st.integers(0, 2**63 - 1), "time": st.integers(0, 10**16)},
    optional={
        "id": st.text(max_size=20) | st.from_regex(r"[0-9a-f-]{1,40}", fullmatch=True),
        "origin": st.uuids().map(str),
        "bundle": st.integers(0, 5),
        "sender": st.uuids().map(str),
        "correlation_id": st.text(max_size=5),
        "principal": st.none() | st.text(max_size=5),
        "notify": st.booleans(),
    },
)


@given(st.sampled_from(["a", "a/b", "x/ö", "q'\"\\"]), st.text(max_size=5) | st.integers() | st.none(), _USUAL)
def test_events_whose_constant_fields_are_remembered_are_written_as_any_other(
    topic: str, data: Any, fields: dict[str, Any]
) -> None:
    def payload(**more: Any) -> bytes:
        try:
            return encode(WireEvent.of(topic, data, **fields, **more))
        except InvalidEventError as error:
            return str(error).encode()

    # a recorder makes it an event of another kind, which is written field by field
    usual, unusual = payload(), payload(recorder="r")
    assert unusual.replace(b'"recorder":"r",', b"") == usual
    if usual.startswith(b"{"):
        assert payload() == usual
        assert decode(usual) == WireEvent.of(topic, data, **fields)
