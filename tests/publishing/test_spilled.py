"""The promises of messages that are only on the disk: held weakly, and failed at their deadlines."""

from __future__ import annotations

import tracemalloc
from typing import Any, cast

from hypothesis import example, given
from hypothesis import strategies as st

from messaging.publishing.backlog import Spilled
from messaging.publishing.stored import StoredPublication


class Double:
    """A publication that notes that its deadline has passed."""

    def __init__(self, offset: int, deadline: float) -> None:
        self.offset = offset
        self.deadline = deadline
        self.is_passed = False

    def done(self) -> bool:
        return self.is_passed

    def pass_deadline(self) -> None:
        assert not self.is_passed
        self.is_passed = True


def add(spilled: Spilled, double: Double) -> Double:
    spilled.add(cast("StoredPublication", double))
    return double


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.integers(0, 60)),
        st.tuples(st.just("drop"), st.integers(0, 40)),
        st.tuples(st.just("pop"), st.integers(0, 40)),
        st.tuples(st.just("pop_before"), st.integers(0, 40)),
        st.tuples(st.just("pass"), st.integers(0, 20)),
    ),
    max_size=80,
)


@example([("add", 60), ("add", 5), ("pop", 1), ("pass", 1)])
@example([("add", 60), ("add", 5), ("drop", 1), ("pass", 9), ("pass", 1)])
@given(STEPS)
def test_promises_are_found_until_they_are_dropped_popped_or_due(steps: list[tuple[str, int]]) -> None:
    spilled = Spilled()
    held: dict[int, Double] = {}
    now, offset = 0.0, 0
    for step, number in steps:
        if step == "add":
            held[offset] = add(spilled, Double(offset, now + number))
            offset += 1
        elif step == "drop":
            held.pop(number, None)
        elif step == "pop":
            assert cast("Any", spilled.pop(number)) is held.pop(number, None)
        elif step == "pop_before":
            expected = [held.pop(each) for each in [*held] if each < number]
            assert cast("Any", spilled.pop_before(number)) == expected
        else:
            now += number
            left = spilled.pass_deadlines(now)
            assert all(each.is_passed or each.deadline > now for each in held.values())
            assert all(not each.is_passed or each.deadline <= now for each in held.values())
            # no variable keeps a publication that a later step drops
            held = {offset: each for offset, each in held.items() if not each.is_passed}
            earliest = min((each.deadline for each in held.values()), default=None)
            assert (left is None) == (earliest is None)
            assert left is None or earliest is None or left == earliest - now


def test_dropped_promises_take_no_memory() -> None:
    spilled = Spilled()
    kept = [add(spilled, Double(number, 1000.0)) for number in range(100)]
    tracemalloc.start()
    try:
        for number in range(100, 100_000):
            add(spilled, Double(number, 1000.0 if number % 2 else 500.0))
        size, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert size < 1_000_000
    assert spilled.pass_deadlines(500.0) == 500.0
    assert [cast("Any", spilled.pop(number)) for number in range(100)] == kept
