"""Announcements: their layout in both directions, and what hostile peers make of it."""

from __future__ import annotations

import json
import random
import time
from dataclasses import replace
from typing import Any, Final
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from messaging.dispatch.eventnetwork.announcements import (
    KINDS,
    MAX_BYTES,
    MAX_ENTRIES,
    MAX_SECONDS,
    MAX_TEXT,
    MIN_HEARTBEAT,
    Announcement,
    TopicInterest,
    dump_announcement,
    load_announcement,
)
from messaging.errors import DecodeError
from messaging.testing.tables import table

MEMBER: Final = "1c0e54a8-0000-4000-8000-000000000001"
OTHER: Final = "1c0e54a8-0000-4000-8000-000000000002"

uuids = st.uuids().map(str)
texts = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=30)
interests = st.builds(TopicInterest, texts, st.none() | texts, st.booleans())
seconds = st.floats(MIN_HEARTBEAT, MAX_SECONDS)


@st.composite
def announcements(draw: st.DrawFn) -> Announcement:
    kind = draw(st.sampled_from(KINDS))
    found = Announcement(
        kind=kind,
        member=draw(uuids),
        version=draw(st.integers(0, 2**53)),
        framework=draw(st.none() | uuids),
        name=draw(st.none() | texts),
        qos=tuple(draw(st.lists(texts, max_size=5))),
        to=draw(st.none() | uuids),
        token=draw(st.none() | texts),
        event=draw(st.none() | texts),
        is_lost=draw(st.booleans()),
    )
    if draw(st.booleans()):
        found = replace(found, heartbeat=draw(seconds), linger=draw(seconds))
    if kind in ("update", "add", "remove"):
        wanted = draw(st.lists(interests, max_size=5, unique=True))
        offers = draw(st.lists(texts, max_size=5, unique=True))
        found = replace(found, interests=tuple(wanted), offers=tuple(offers))
    return found


@given(announcements())
def test_an_announcement_is_read_as_it_was_written(announcement: Announcement) -> None:
    assert load_announcement(dump_announcement(announcement)) == announcement


def good(**changes: Any) -> dict[str, Any]:
    return {
        "announcement": 1, "kind": "update", "member": MEMBER, "framework": OTHER, "name": "billing", "version": 4,
        "heartbeat": 5.0, "linger": 30.0, "qos": ["AT_LEAST_ONCE"], "to": OTHER, "token": "t", "event": "e",
        "interests": [{"topics": "orders/**"}, {"topics": "audit/login", "filter": "(failed=true)", "hidden": True}],
        "offers": ["invoices/sent"], **changes,
    }  # fmt: skip


def load(found: Any) -> Announcement:
    return load_announcement(json.dumps(found).encode())


def test_the_fields_of_other_programs_are_read() -> None:
    found = load(good(further={"a": [1]}))
    assert found.interests == (TopicInterest("orders/**"), TopicInterest("audit/login", "(failed=true)", True))
    assert (found.heartbeat, found.linger, found.offers) == (5.0, 30.0, ("invoices/sent",))


def test_kind_and_member_are_enough() -> None:
    assert load({"announcement": 1, "kind": "query", "member": MEMBER}) == Announcement(kind="query", member=MEMBER)


SURROGATE: Final = "\ud800"
UUID_RULE: Final = "must be a UUID in lower case"
TEXT_RULE: Final = "must have text of 1 to 1000 characters"
WRONG: Final[list[tuple[str, list[Any], str]]] = [
    ("announcement", [2, 0, True, 1.0, "1", None, [[]], 10**400], "reads version 1"),
    ("kind", ["", "beat", 1, None, [], {}, SURROGATE], "must be one of query, update"),
    ("kind", ["updates", "Heartbeat"], "did you mean"),
    ("member", ["", "x", MEMBER.upper(), 1, [], {}, True, f"{MEMBER}\n", "1" * 10**5], UUID_RULE),
    ("member", [None], "without 'member'"),
    ("to", ["all", 1, "#"], UUID_RULE),
    ("version", [-1, 1.5, "1", True, None, 2**53 + 1, 10**400], "must be an integer from 0 to"),
    ("interests", [None, {}, "a", 1], "must be a list"),
    ("offers", [None, {}, "a"], "must be a list"),
    *((name, ["", 1, [], "x" * (MAX_TEXT + 1), SURROGATE], TEXT_RULE) for name in ("token", "event")),
]  # fmt: skip


#: fields that an announcement can do without
LEFT_OUT: Final[list[tuple[str, list[Any], str]]] = [
    ("framework", ["x", 1, [], MEMBER.upper()], UUID_RULE),
    ("heartbeat", [-1, "5", True, None, 10**400, [], 1e300], "must be seconds, from 0 to 86400"),
    ("heartbeat", [0.001, 1e-300], "must be seconds, at least 0.05"),
    ("linger", [-0.1, "x", False, {}], "must be seconds, from 0 to 86400"),
    ("interests", [["a"], [None], [[]]], "must have objects with a topic filter in 'topics'"),
    ("interests", [[{}], [{"topics": ""}], [{"topics": 1}], [{"topics": SURROGATE}]], TEXT_RULE),
    ("interests", [[{"topics": "a", "filter": each}] for each in ("", 1, [], "x" * (MAX_TEXT + 1), SURROGATE)],
     TEXT_RULE),
    ("interests", [[{"topics": "a"}] * (MAX_ENTRIES + 1)], "at most 10000 are read; announce wider filters"),
    ("offers", [[1], [None], [""], ["x" * (MAX_TEXT + 1)], [SURROGATE]], TEXT_RULE),
    ("qos", [["x"] * 33], "at most 32 are read"),
    ("qos", [[1], [SURROGATE]], TEXT_RULE),
    ("name", ["", 1, [], "x" * (MAX_TEXT + 1), SURROGATE], TEXT_RULE),
]  # fmt: skip


@table("field, values, rule", LEFT_OUT)
def test_a_field_that_is_not_needed_is_left_out_with_the_rule_that_it_breaks(
    field: str, values: list[Any], rule: str
) -> None:
    for value in values:
        found = load(good(**{field: value}))
        assert len(found.problems) == 1
        assert rule in found.problems[0], value
        assert field in found.problems[0]
        assert len(found.problems[0]) < 400
        default = getattr(Announcement(kind="query", member=MEMBER), field)
        kept = getattr(found, field)
        assert kept == default or kept == (TopicInterest("a"),) or kept == ("x",) * 32
        assert (found.kind, found.version) == (load(good()).kind, load(good()).version)


@table("field, values, rule", WRONG)
def test_a_wrong_field_is_refused_with_the_rule_that_it_breaks(field: str, values: list[Any], rule: str) -> None:
    for value in values:
        with pytest.raises(DecodeError) as caught:
            load(good(**{field: value}))
        assert rule in str(caught.value), value
        assert field in str(caught.value) or field == "announcement"
        assert len(str(caught.value)) < 400


@table(
    "payload",
    [
        b"", b"null", b"1", b"[]", b"{}", b"\xff", b'{"announcement":1', b'"announcement"', b"[" * 100_000,
        b'{"announcement":' * 50_000, b'{"announcement": NaN}', b'{"announcement": 1' + b"0" * 5000 + b"}",
        json.dumps(good()).encode("utf-16"), json.dumps(good()).encode("utf-32-be"),
        b'{"announcement":1,"kind":"ping","member":"' + MEMBER.encode() + b'","token":"\xed\xa0\x80"}',
    ],
)  # fmt: skip
def test_what_is_no_announcement_is_refused(payload: bytes) -> None:
    with pytest.raises(DecodeError, match="announcement"):
        load_announcement(payload)


def test_a_payload_that_is_too_large_is_not_parsed() -> None:
    with pytest.raises(DecodeError, match=f"at most {MAX_BYTES} are read"):
        load_announcement(b" " * (MAX_BYTES + 1))


def test_a_long_kind_is_refused_at_once() -> None:
    """A search for a similar kind would take a tenth of a second for a megabyte."""
    payload = json.dumps(good(kind="update" * 150_000)).encode()
    times = []
    for _ in range(5):
        begun = time.perf_counter()
        with pytest.raises(DecodeError):
            load_announcement(payload)
        times.append(time.perf_counter() - begun)
    assert min(times) < 0.05


def nested(depth: int) -> Any:
    found: Any = []
    for _ in range(depth):
        found = [found]
    return found


JUNK: Final[list[Any]] = [
    None, True, False, 0, -1, 1, 10**30, -(10**400), 1.5, -0.0, 1e308, float("nan"), float("inf"), "", "x", SURROGATE,
    "\0", "x" * 5000, MEMBER, [], [None], {}, {"topics": "a"}, [{"topics": "a"}], [{"topics": {}}], nested(50),
    nested(900), ["a"] * 40,
]  # fmt: skip


def mutated(random_: random.Random) -> bytes:
    """Return a damaged announcement."""
    found = good(kind=random_.choice(KINDS))
    for _ in range(random_.randint(0, 3)):
        found[random_.choice([*found, "is_lost", "unknown"])] = random_.choice(JUNK)
    payload = bytearray(json.dumps(found).encode())
    what = random_.randrange(4)
    if what == 0:
        for _ in range(random_.randint(1, 8)):
            payload[random_.randrange(len(payload))] = random_.randrange(256)
    elif what == 1:
        del payload[random_.randrange(len(payload)) :]
    elif what == 2:
        start = random_.randrange(len(payload))
        payload[start : start + random_.randrange(20)] = random_.randbytes(random_.randrange(20))
    return bytes(payload)


def test_two_thousand_damaged_announcements_are_read_or_refused_and_what_is_read_can_be_sent() -> None:
    random_ = random.Random(214)
    refused: list[str] = []
    for _ in range(2_000):
        payload = mutated(random_)
        try:
            found = load_announcement(payload)
        except DecodeError as error:
            refused.append(str(error))
            continue
        assert str(UUID(found.member)) == found.member
        again = load_announcement(dump_announcement(found))
        assert again.token == found.token
        assert again.event == found.event
    assert 500 < len(refused) < 2_000
    assert all(each.isprintable() for each in refused)
