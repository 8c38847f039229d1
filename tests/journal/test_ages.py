"""The age of a record while the wall clock is set, and after a restart."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from messaging.journal import Journal, State
from messaging.testing.clock import VirtualClock
from messaging.testing.tables import table
from messaging.testing.waiting import eventually

HOUR = 3600.0
#: what happens to the wall clock between the parts of a test
CHANGES: dict[str, Callable[[VirtualClock], None]] = {
    "nothing": lambda _: None,
    "set forward": lambda time: time.shift_wall(8 * HOUR),
    "set back": lambda time: time.shift_wall(-8 * HOUR),
}


def stored(journal: Journal) -> int:
    """Append a record; return its offset when its age is known."""
    offset = journal.append("a", b"x")
    journal.append("a", b"the next batch")
    return offset


def age_of(journal: Journal, offset: int) -> float:
    record = next(iter(journal.read(offset)))
    return journal.ages.age_of(offset, record.timestamp)


@table("before", [*CHANGES])
@table("after", [*CHANGES])
def test_a_clock_that_is_set_changes_no_age_of_a_record_of_this_run(
    virtual_clock: VirtualClock, tmp_path: Path, before: str, after: str
) -> None:
    with Journal.open(tmp_path / f"{before}-{after}") as journal:
        stored(journal)
        virtual_clock.advance(HOUR)
        CHANGES[before](virtual_clock)
        offset = stored(journal)
        virtual_clock.advance(100.0)
        CHANGES[after](virtual_clock)
        assert age_of(journal, offset) == pytest.approx(100.0, abs=2.0)


def test_the_time_for_which_a_machine_is_suspended_counts_to_the_age(
    virtual_clock: VirtualClock, tmp_path: Path
) -> None:
    with Journal.open(tmp_path) as journal:
        offset = stored(journal)
        virtual_clock.suspend(HOUR)
        assert age_of(journal, offset) == pytest.approx(HOUR, abs=2.0)
        assert journal.ages.age_of(offset) == pytest.approx(HOUR, abs=2.0)


def test_the_age_of_a_record_of_an_earlier_run_is_right_once_the_clock_is(
    virtual_clock: VirtualClock, tmp_path: Path
) -> None:
    """A machine without a battery for its clock goes on where it was switched off, until it knows the time."""
    with Journal.open(tmp_path) as journal:
        offset = stored(journal)
    virtual_clock.advance(60.0)
    with Journal.open(tmp_path) as journal:
        stored(journal)
        virtual_clock.shift_wall(8 * HOUR)
        assert age_of(journal, offset) == pytest.approx(8 * HOUR + 60.0, abs=2.0)


def test_records_of_an_earlier_run_expire_once_the_clock_is_right(virtual_clock: VirtualClock, tmp_path: Path) -> None:
    with Journal.open(tmp_path, max_age=HOUR) as journal:
        journal.append("a", b"x")
    virtual_clock.advance(HOUR / 2)
    with Journal.open(tmp_path, max_age=HOUR) as journal:
        journal.append("a", b"y")
        virtual_clock.shift_wall(8 * HOUR)
        virtual_clock.advance(HOUR / 10)
        eventually(lambda: journal.begin == 1, "the record of the earlier run to be dropped, and no other one")


def test_a_clock_that_is_set_right_forgets_no_id_early(virtual_clock: VirtualClock, tmp_path: Path) -> None:
    """The machine starts ten minutes behind, and gets the time from the network."""
    state = State(tmp_path)
    state.open_seen()
    state.add_seen([("c", "before")])
    state.close()
    virtual_clock.shift_wall(-600.0)
    state = State(tmp_path)
    state.open_seen()
    state.add_seen([("c", "behind")])
    virtual_clock.shift_wall(600.0)
    state.add_seen([("c", "right")])
    state.forget_seen(oldest=state.seen_time() - 300.0, most=100)
    assert {each[1] for each in state.seen(oldest=0)} == {"before", "behind", "right"}
    virtual_clock.advance(301.0)
    state.forget_seen(oldest=state.seen_time() - 300.0, most=100)
    assert state.seen(oldest=0) == []
    state.close()


def test_ids_that_are_stored_after_the_clock_was_set_right_are_known_to_the_next_run(
    virtual_clock: VirtualClock, tmp_path: Path
) -> None:
    state = State(tmp_path)
    state.open_seen()
    virtual_clock.shift_wall(8 * HOUR)
    state.add_seen([("c", "right")])
    state.close()
    state = State(tmp_path)
    state.open_seen()
    assert [each[1] for each in state.seen(oldest=state.seen_time() - 300.0)] == ["right"]
    state.close()
