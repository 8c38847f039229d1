"""The check of distributed events passes sessions that are right, and finds each kind of wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from messaging.testing.tables import table
from tests.faults.distributed import PROCESSES
from tests.faults.member import LINGER
from tests.faults.promises import NOTICE, Fault, Lines, check

#: when the run ends, and when the process is killed whose session is open; seconds
END, KILLED = 100.0, 50.0

Entries = list[tuple[float, str, *tuple[Any, ...]]]


def problems(folder: Path, sent: Entries, taken: Entries, *, killed: bool = False, end: float = END) -> list[str]:
    """Return what the check finds in the ledgers of a sender ``a.1`` and a receiver ``b.1``."""
    common: Entries = [(1.0, "up"), (2.0, "seen", "a.1.admin"), (2.0, "seen", "b.1.admin")]
    for life, entries in {"a.1": sent, "b.1": taken}.items():
        lines = [json.dumps(each) + "\n" for each in sorted([*common, *entries], key=lambda each: each[0])]
        (folder / f"{life}.ledger").write_text("".join(lines))
    faults = [Fault("kill", "a.1", KILLED, KILLED + 60.0)] if killed else []
    return check(folder, faults, PROCESSES, "amqp", end).problems


#: a session of two events that is closed
SENT: Entries = [
    (40.0, "session", "s"), (40.1, "session-pub", "s", 0), (40.2, "session-pub", "s", 1),
    (41.2, "session-over", "s", "close"), (41.2, "session-closed", "s"),
]  # fmt: skip
TAKEN: Entries = [
    (40.1, "session-got", "s", 0), (40.2, "session-got", "s", 1), (41.3, "session-end", "s", "close", "NoneType"),
]  # fmt: skip
REPLIES: Entries = [(40.3 + number, "reply", "s", number, by) for number in (0, 1) for by in ("a.1", "b.1")]


@table(
    "sent, taken, problem",
    {
        "right": ([*SENT, *REPLIES], TAKEN, ""),
        "no end": ([*SENT, *REPLIES], TAKEN[:2], "1 broken sessions"),
        "the end of another kind": (
            [*SENT, *REPLIES],
            [*TAKEN[:2], (41.3, "session-end", "s", "error", "X")],
            "broken",
        ),
        "an event is missing": ([*SENT, *REPLIES], TAKEN[1:], "1 broken sessions"),
        "a reply is missing": ([*SENT, *REPLIES[:-1]], TAKEN, "replies"),
    },
)
def test_a_session_is_complete_and_has_its_end(tmp_path: Path, sent: Entries, taken: Entries, problem: str) -> None:
    found = problems(tmp_path, [*sent, *TAKEN], taken)
    assert [problem in each for each in found] == ([True] if problem else []), found


LOST: Entries = [(KILLED + 1.0, "lost", "a.1.admin")]
OPEN: Entries = [(49.0, "session", "s"), (49.1, "session-pub", "s", 0)]
LATE: float = KILLED + 1.0 + LINGER


def ended(at: float, kind: str = "error") -> Entries:
    return [(at, "session-end", "s", kind, "EventSessionLostError")]


@table(
    "taken, end, is_right",
    {
        "with the loss": ([(49.2, "session-got", "s", 0), *ended(KILLED + 1.0)], END, True),
        "never": ([(49.2, "session-got", "s", 0)], END, False),
        "closed": ([(49.2, "session-got", "s", 0), *ended(KILLED + 1.0, "close")], END, False),
        "too late": ([(49.2, "session-got", "s", 0), *ended(KILLED + NOTICE + 0.1)], END, False),
        "taken after the loss, when the sender is forgotten": (
            [(KILLED + 1.5, "session-got", "s", 0), *ended(LATE)], END, True,
        ),
        "taken after the loss, too late": (
            [(KILLED + 1.5, "session-got", "s", 0), *ended(KILLED + NOTICE + LINGER + 0.1)], END, False,
        ),
        "taken after the loss, before the ledger has it": (
            [(KILLED + 0.99, "session-got", "s", 0), *ended(LATE)], END, True,
        ),
        "the run ended before": ([(49.2, "session-got", "s", 0)], KILLED + NOTICE - 0.1, True),
        "nothing was taken": ([], END, True),
    },
)  # fmt: skip
def test_an_open_session_of_a_killed_process_ends_with_an_error(
    tmp_path: Path, taken: Entries, end: float, is_right: bool
) -> None:
    found = problems(tmp_path, OPEN, [*LOST, *taken], killed=True, end=end)
    assert [each for each in found if "broken sessions" in each] == found
    assert (found == []) is is_right, found


def test_a_process_has_confirmed_everything_when_nothing_was_pending_after_its_last_session(tmp_path: Path) -> None:
    """A run that ends earlier misses the end of the session."""
    ledger = tmp_path / "a.1.ledger"
    steps: Entries = [
        (1.0, "pub", "t", 0, "x"), (1.1, "session", "s"), (2.0, "confirmed", {"t": 0}),
        (3.0, "session-over", "s", "close"), (3.1, "confirmed", {"t": 0}), (3.2, "session-closed", "s"),
        (3.25, "confirmed", {"t": 0}), (3.4, "confirmed", {"t": 0}),
    ]  # fmt: skip
    lines = Lines(ledger)
    found = []
    for step in steps:
        with ledger.open("a") as file:
            file.write(json.dumps(step) + "\n")
        found.append(lines.all_confirmed())
    assert found == [False] * (len(steps) - 1) + [True]


def test_an_event_that_never_arrived_is_lost(tmp_path: Path) -> None:
    sent: Entries = [(40.0, "pub", "t", number, "ev/x") for number in range(3)] + [(40.1, "confirmed", {"t": 2})]
    taken: Entries = [
        (3.0, "on", "wild", "ev/**"),
        (40.1, "got", "wild", "a.1.t", 0),
        (40.1, "got", "wild", "a.1.t", 2),
    ]
    (problem,) = problems(tmp_path, sent, taken)
    assert problem.startswith("1 lost: ['a.1.t 1 on ev/x")
