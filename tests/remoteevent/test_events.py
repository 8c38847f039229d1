"""Remote events and registrations, and their form on the wire (EV.2.3.2, EV.2.3.5, EV.2.5)."""

from __future__ import annotations

import datetime
from dataclasses import FrozenInstanceError, dataclass
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from messaging.errors import ConversionError, DecodeError, InvalidEventError
from messaging.remoteevent import NotificationFilter, RemoteEvent
from messaging.remoteevent.event import NumberedLine, decode_event, encode_event
from messaging.testing.tables import table
from tests.remoteevent.helpers import Recorder

ids = st.one_of(st.integers(-(2**63), 2**63 - 1), st.text(st.characters(codec="utf-8"), min_size=1, max_size=20))
texts = st.text(st.characters(codec="utf-8"))
values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False)
    | texts
    | st.binary()
    | st.datetimes(timezones=st.just(datetime.UTC)),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(st.characters(codec="utf-8")), inner, max_size=3)
    ),
    max_leaves=6,
)


@dataclass(frozen=True, kw_only=True)
class Overheated(RemoteEvent):
    celsius: float
    at: datetime.datetime
    parts: list[str]


def overheated() -> Overheated:
    return Overheated(
        "boiler",
        "hot",
        7,
        {"room": 1},
        celsius=99.5,
        at=datetime.datetime(2026, 1, 2, tzinfo=datetime.UTC),
        parts=["a"],
    )


@given(
    source=st.text(st.characters(codec="utf-8"), min_size=1),
    event_id=ids,
    number=st.integers(0, 2**63 - 1),
    handback=values,
)
def test_an_event_survives_the_wire(source: str, event_id: Any, number: int, handback: Any) -> None:
    """Scenario 1: source, id, number and handback are readable, and survive a round trip."""
    event = RemoteEvent(source, event_id, number, handback)
    line = encode_event(event)
    assert b"\n" not in line
    again = decode_event(line)
    assert again == event
    assert (again.source, again.id, again.sequence_number, again.handback) == (source, event_id, number, handback)
    assert encode_event(again) == line
    assert NumberedLine(RemoteEvent(source, event_id, 0, handback)).numbered(number) == line


@given(line=st.binary() | st.text().map(str.encode))
def test_junk_on_the_wire_is_refused(line: bytes) -> None:
    with pytest.raises((DecodeError, ConversionError)):
        decode_event(line)


@table(
    "line",
    [
        b"5", b"[]", b"{}", b'{"source":"a","id":1}', b'{"source":"a","sequence":1}',
        b'{"source":5,"id":1,"sequence":1}',
        b'{"source":"a","id":1.5,"sequence":1}', b'{"source":"a","id":true,"sequence":1}',
        b'{"source":"a","id":1,"sequence":-1}', b'{"source":"a","id":1,"sequence":"1"}',
        b'{"source":"a","id":1,"sequence":1,"suppressed":"x"}', b'{"source":"a","id":9223372036854775808,"sequence":1}',
    ],
)  # fmt: skip
def test_an_incomplete_event_is_refused(line: bytes) -> None:
    with pytest.raises(DecodeError):
        decode_event(line)


@table(
    "arguments",
    [
        ("", 1, 1),
        (5, 1, 1),
        ("a", "", 1),
        ("a", True, 1),
        ("a", 2**63, 1),
        ("a", None, 1),
        ("a", 1, -1),
        ("a", 1, True),
    ],
)
def test_a_malformed_event_is_not_made(arguments: tuple[Any, ...]) -> None:
    with pytest.raises(InvalidEventError):
        RemoteEvent(*arguments)


def test_an_event_cannot_be_changed() -> None:
    with pytest.raises(FrozenInstanceError):
        overheated().celsius = 5.0  # type: ignore[misc]


def test_numbers_and_kinds_tell_events_apart() -> None:
    """Scenarios 2 and 3."""
    assert RemoteEvent("a", 1, 5) == RemoteEvent("a", 1, 5)
    assert len({RemoteEvent("a", 1, 5), RemoteEvent("a", 1, 6), RemoteEvent("a", "1", 5), RemoteEvent("b", 1, 5)}) == 4
    assert RemoteEvent("a", 1, 5).kind == ("a", 1)


def test_an_event_of_a_subclass_keeps_its_class_and_fields() -> None:
    event = overheated()
    again = decode_event(encode_event(event))
    assert type(again) is Overheated
    assert again == event
    assert again.data == {"celsius": 99.5, "at": event.at, "parts": ["a"]}


def test_a_party_that_does_not_know_the_class_passes_the_event_on_unchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scenario 15."""
    event = overheated()
    line = encode_event(event)
    known = RemoteEvent._known
    monkeypatch.setattr(RemoteEvent, "_known", {})
    foreign = decode_event(line)
    assert type(foreign) is not Overheated
    assert foreign.type_name == Overheated.event_type
    assert foreign.data["celsius"] == 99.5
    target = Recorder()
    NotificationFilter(lambda each: each.data["celsius"] > 90, target).notify(foreign)
    assert encode_event(target.events[0]) == line
    changed = encode_event(foreign.with_handback("other"))
    monkeypatch.setattr(RemoteEvent, "_known", known)
    assert decode_event(changed) == event.with_handback("other")


def test_an_event_of_another_version_of_its_class_travels_on_unchanged(caplog: pytest.LogCaptureFixture) -> None:
    line = encode_event(overheated()).replace(b"99.5", b'"hot"')
    event = decode_event(line)
    assert not isinstance(event, Overheated)
    assert (event.type_name, event.data["celsius"]) == (overheated().type_name, "hot")
    assert encode_event(event) == line
    assert "is not a " in caplog.text


def test_a_value_without_a_form_cannot_travel() -> None:
    with pytest.raises(InvalidEventError):
        encode_event(RemoteEvent("a", 1, 1, object()))
