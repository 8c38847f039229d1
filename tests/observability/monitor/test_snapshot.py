"""Snapshots: their form in JSON, their bounds, and the board that keeps the newest of each process."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from messaging.errors import DecodeError
from messaging.observability.monitor import board as boards
from messaging.observability.monitor.board import Board
from messaging.observability.monitor.plain import Masking
from messaging.observability.monitor.snapshot import (
    FORGET,
    MAX_BYTES,
    Report,
    Snapshot,
    SnapshotSampler,
    decoded,
    encoded,
)
from messaging.observability.monitor.views import keyed
from messaging.services import ServiceRegistry
from messaging.services.reporting import PartReporter, register_reporter
from messaging.testing.tables import table

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
GOOD: dict[str, Any] = {
    "v": 1, "process": "p", "host": "h", "pid": 7, "started": 1.5, "uptime": 2.5, "time": 4.0, "interval": 1.0,
    "reports": [{"kind": "press", "name": "x", "data": {"strokes": 3}, "problems": ["hot"], "roles": {}}], "omitted": 0,
}  # fmt: skip


def test_a_snapshot_is_read_as_it_was_written() -> None:
    services = ServiceRegistry()
    register_reporter(services, PartReporter("press", "x", lambda: {"strokes": 3, "oil": 1.5}, lambda: ["hot"]))
    payload = SnapshotSampler(services, "press-1", 1.0, Masking()).encode()
    snapshot = decoded(payload, Masking())
    assert (snapshot.process, snapshot.interval) == ("press-1", 1.0)
    (report,) = snapshot.reports
    assert (report.kind, report.name, report.data) == ("press", "x", {"strokes": 3, "oil": 1.5})
    assert tuple(report.problems) == ("hot",)
    assert encoded(snapshot) == payload


def test_secrets_in_reports_and_problems_do_not_leave_the_process() -> None:
    services = ServiceRegistry()
    report = {"url": "amqp://u:hunter2@h", "password": "hunter2", "text": "token=hunter2"}
    register_reporter(services, PartReporter("press", "x", lambda: report, lambda: ["amqp://u:hunter2@h is away"]))
    assert b"hunter2" not in SnapshotSampler(services, "p", 1.0, Masking()).encode()


@table("most", [MAX_BYTES, 20_000, 1_000])
def test_a_snapshot_that_is_too_large_is_narrowed_and_says_so(most: int) -> None:
    services = ServiceRegistry()
    for number in range(30):
        report = {f"field-{each}": ["x" * 500] * 100 for each in range(100)}
        register_reporter(services, PartReporter("press", f"x{number}", lambda report=report: report))  # type: ignore[misc]
    payload = SnapshotSampler(services, "p", 1.0, Masking()).encode(most)
    assert len(payload) <= most
    assert decoded(payload, Masking()).omitted > 0


@table(
    "changes",
    [
        {"v": 2}, {"v": True}, {"process": ""}, {"process": 3}, {"host": None}, {"pid": "7"}, {"pid": -1},
        {"uptime": float("nan")}, {"interval": 0}, {"interval": 1e9}, {"reports": {}}, {"reports": [3]},
        {"reports": [{"kind": "a"}]}, {"reports": [{"kind": "a", "name": "b", "problems": "x"}]},
        {"reports": [{"kind": "a", "name": "b", "error": 3}]}, {"omitted": -1},
        {"reports": [{"kind": "a", "name": "b", "roles": {"a": 1}}]},
    ],
)  # fmt: skip
def test_a_message_that_is_no_snapshot_is_refused(changes: dict[str, Any]) -> None:
    decoded(json.dumps(GOOD).encode(), Masking())
    with pytest.raises(DecodeError):
        decoded(json.dumps({**GOOD, **changes}).encode(), Masking())


@table("payload", [b"", b"x", b"\xff", b"[]", b"null", b"[" * 100_000, b" " * (MAX_BYTES + 1), b"9" * 9999])
def test_bytes_that_are_no_snapshot_are_refused(payload: bytes) -> None:
    with pytest.raises(DecodeError):
        decoded(payload, Masking())


@given(st.sampled_from([*GOOD]), JSON)
def test_whatever_a_process_publishes_can_be_refused_or_shown(name: str, value: Any) -> None:
    try:
        snapshot = decoded(json.dumps({**GOOD, name: value}).encode(), Masking())
    except DecodeError:
        return
    json.dumps([change.view for change in Board().add("p", snapshot)], allow_nan=False)


@given(
    st.sampled_from(["instance", "gateway", "journal", "typed_event_bus", "press"]),
    JSON,
    st.dictionaries(st.text(), st.text()),
)
def test_whatever_a_process_reports_can_be_shown(kind: str, data: Any, roles: dict[str, str]) -> None:
    report = {"kind": kind, "name": "x", "data": data, "problems": [], "roles": roles}
    snapshot = decoded(json.dumps({**GOOD, "reports": [report, report]}).encode(), Masking())
    (change,) = Board().add("p", snapshot)
    json.dumps(change.view, allow_nan=False)


def test_items_keep_their_keys_when_others_come_and_go() -> None:
    items: list[Any] = [{"name": "a"}, {"name": "a"}, {"id": 0, "name": "c"}, 7, {"channel": {"name": "x"}}]
    assert [key for key, _ in keyed(items)] == ["name=a", "name=a#2", "id=0", "#3", "channel.name=x"]


# --- the board


class Clock:
    """A monotonic clock that the test sets."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr(boards, "clock", found)
    return found


def snapshot(uptime: float, strokes: int, *, pid: int = 7) -> Snapshot:
    report = Report("press", "x", {"strokes": strokes})
    return Snapshot("p", "h", pid, 1.0, uptime, 1.0 + uptime, 1.0, (report,))


def strokes_of(view: Any) -> Any:
    return view["reports"][0]["tables"][0]["rows"][0][1]


def test_rates_come_from_the_clock_of_the_process(clock: Clock) -> None:
    board = Board()
    board.add("p", snapshot(10.0, 100))
    clock.now += 7
    (change,) = board.add("p", snapshot(12.0, 150))
    assert strokes_of(change.view) == [150, 25.0, ""]


def test_a_restarted_process_has_no_rate_and_an_older_snapshot_is_ignored() -> None:
    board = Board()
    board.add("p", snapshot(10.0, 100))
    assert board.add("p", snapshot(9.0, 90)) == []
    (change,) = board.add("p", snapshot(1.0, 5, pid=8))
    assert strokes_of(change.view) == 5


def test_a_process_without_snapshots_is_silent_and_then_forgotten(clock: Clock) -> None:
    board = Board()
    board.add("p", snapshot(1.0, 1))
    assert board.tick() == []
    clock.now += 4
    (change,) = board.tick()
    assert change.view is not None
    assert change.view["status"] == "silent"
    assert board.tick() == [], "said once"
    clock.now += FORGET
    (change,) = board.tick()
    assert (change.key, change.view) == ("p", None)
    assert board.snapshots() == {}


def test_the_number_of_processes_is_bounded_and_a_silent_one_makes_room(clock: Clock) -> None:
    board = Board(2)
    for key in ("a", "b"):
        board.add(key, snapshot(1.0, 1))
    assert board.add("c", snapshot(1.0, 1)) == []
    assert board.refused == 1
    clock.now += 4
    board.add("b", snapshot(5.0, 1))
    board.tick()
    assert [(change.key, change.view is None) for change in board.add("c", snapshot(1.0, 1))] == [
        ("a", True),
        ("c", False),
    ]


def test_the_values_of_charts_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(boards, "POINTS", 5)
    board = Board()
    journal = {
        "path": "/j", "begin": 0, "end": 9, "backlog": 3, "backlog_bytes": 1, "oldest": 0.0, "unstored": 0,
        "dropped": 0, "dead_letters": 0, "bytes": 1, "max_records": None, "max_bytes": None, "cursors": [],
    }  # fmt: skip
    for number in range(10):
        board.add(
            "p", replace(snapshot(float(number), 1), reports=(Report("journal", "x", {**journal, "backlog": number}),))
        )
    assert board.histories()["p"]["journal/x"]["backlog"] == [5, 6, 7, 8, 9]
    assert board.remove("p")
    assert board.histories() == {}
