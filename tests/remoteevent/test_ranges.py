"""Sets of sequence numbers beside plain sets."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from messaging.errors import ArgumentError, DecodeError
from messaging.remoteevent.sequences import SequenceRanges
from messaging.testing.tables import table

NUMBERS = st.lists(st.integers(0, 40), max_size=60)


def numbers_of(ranges: SequenceRanges, most: int = 45) -> set[int]:
    return {number for number in range(most) if number in ranges}


@given(NUMBERS, st.integers(-1, 10))
def test_a_set_of_ranges_holds_what_a_set_holds(numbers: list[int], floor: int) -> None:
    """Scenario 2."""
    ranges, model = SequenceRanges(floor), set(range(floor + 1))
    for number in numbers:
        assert ranges.add(number) is (number not in model)
        model.add(number)
        assert number in ranges
    assert numbers_of(ranges) == model
    assert ranges.highest == max(model, default=-1)
    assert ranges.missing == ranges.highest + 1 - len(model)
    assert ranges.floor == next(number for number in range(-1, 50) if number + 1 not in model)
    assert SequenceRanges.from_value(ranges.to_value()) == ranges
    assert bool(ranges) is bool(model)
    pairs = list(ranges)
    assert len(ranges) == len(pairs)
    assert all(last + 1 < first for (_, last), (first, _) in itertools.pairwise(pairs))


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), max_size=20))
def test_ranges_are_added_as_their_numbers(pairs: list[tuple[int, int]]) -> None:
    ranges, model = SequenceRanges(), set[int]()
    for first, last in pairs:
        ranges.add_range(first, last)
        model.update(range(first, last + 1))
        assert numbers_of(ranges) == model


@given(NUMBERS, st.integers(1, 3))
def test_beyond_the_bound_no_number_is_new_twice_with_closed_gaps(numbers: list[int], most: int) -> None:
    ranges, model = SequenceRanges(max_ranges=most, closes_gaps=True), set[int]()
    for number in numbers:
        is_new = ranges.add(number)
        assert not (is_new and number in model)
        model.add(number)
        assert model <= numbers_of(ranges)
        assert len(ranges) <= most


@given(NUMBERS, st.integers(1, 3))
def test_beyond_the_bound_no_number_is_lost_when_ranges_are_forgotten(numbers: list[int], most: int) -> None:
    ranges, model = SequenceRanges(max_ranges=most), set[int]()
    for number in numbers:
        is_new = ranges.add(number)
        assert is_new or number in model
        model.add(number)
        assert numbers_of(ranges) <= model
        assert len(ranges) <= most


def test_a_million_numbers_in_a_row_are_one_range() -> None:
    ranges = SequenceRanges()
    for number in range(5, 1_000_005):
        ranges.add(number)
    assert ranges.to_value() == [-1, 5, 1_000_004]
    ranges.add_range(0, 4)
    assert (ranges.to_value(), ranges.missing) == ([1_000_004], 0)
    assert repr(ranges) == "<SequenceRanges up to 1000004>"


@table("value", [None, [], "x", [0, 5], [0, 5, 3], [-2], [2**63], [0, True, 3], ["a"], [0, 3.5, 4]])
def test_malformed_values_are_refused(value: Any) -> None:
    with pytest.raises(DecodeError):
        SequenceRanges.from_value(value)


@table("options", [{"floor": -2}, {"max_ranges": 0}, {"max_ranges": "x"}, {"floor": "x"}])
def test_junk_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ArgumentError):
        SequenceRanges(**options)
