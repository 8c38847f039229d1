"""``messaging.testing.tables``: every row runs, and each row that fails is named."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from messaging.testing.tables import table
from messaging.testing.waiting import Recorder

if TYPE_CHECKING:
    from pathlib import Path

seen: list[tuple[Any, ...]] = []


def failures(test: Any, *args: Any, **fixtures: Any) -> dict[str, str]:
    """Run a table, and return the errors of its rows by the notes with their names."""
    try:
        test(*args, **fixtures)
    except ExceptionGroup as group:
        return {"; ".join(each.__notes__): str(each) for each in group.exceptions}
    return {}


def test_every_row_runs_and_those_that_fail_are_named() -> None:
    ran: list[int] = []

    @table("value, expected", [(1, 1), (2, 3), pytest.param(4, 5, id="four")])
    def test(value: int, expected: int) -> None:
        ran.append(value)
        assert value == expected, f"{value} is not {expected}"

    found = failures(test)
    assert ran == [1, 2, 4]
    assert [*found] == ["row: 2-3", "row: four"]
    assert all("is not" in text for text in found.values())


def test_a_mapping_and_ids_name_the_rows() -> None:
    @table("value", {"one": 1, "two": 2})
    def mapped(value: int) -> None:
        assert not value

    @table("value", [1, 2], ids=["first", None])
    def listed(value: int) -> None:
        assert not value

    @table("value", [1, 2], ids=lambda value: f"<{value}>")
    def named(value: int) -> None:
        assert not value

    assert [*failures(mapped)] == ["row: one", "row: two"]
    assert [*failures(listed)] == ["row: first", "row: 2"]
    assert [*failures(named)] == ["row: <1>", "row: <2>"]


def test_stacked_tables_combine_their_rows() -> None:
    ran: list[tuple[int, str]] = []

    @table("number", [1, 2])
    @table("letter", ["a", "b"])
    def test(number: int, letter: str) -> None:
        ran.append((number, letter))

    test()
    assert ran == [(1, "a"), (1, "b"), (2, "a"), (2, "b")]


def test_rows_that_skip_are_not_failures_and_a_table_that_only_skips_is_skipped() -> None:
    @table("value", [1, 2])
    def test(value: int, first: int) -> None:
        if value >= first:
            pytest.skip("not here")

    test(first=2)
    with pytest.raises(pytest.skip.Exception, match="1: not here; 2: not here"):
        test(first=1)


def test_a_call_of_pytest_fail_is_the_failure_of_its_row() -> None:
    @table("value", [1, 2])
    def test(value: int) -> None:
        if value == 2:
            pytest.fail("two")

    assert failures(test) == {"row: 2": "two"}


def test_a_row_after_the_time_limit_of_the_test_does_not_run() -> None:
    """Nothing would end it if it hangs, too."""
    ran: list[int] = []

    @table("value", [1, 2, 3])
    def test(value: int) -> None:
        ran.append(value)
        if value == 2:
            pytest.fail("Timeout (>120.0s) from pytest-timeout.")
        assert value != 1

    assert [*failures(test)] == ["row: 1", "row: 2"]
    assert ran == [1, 2]


def test_each_row_has_fixtures_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    @table("value", ["1", "2"])
    def test(value: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        assert not [*tmp_path.iterdir()]
        (tmp_path / "file").touch()
        assert "TABLE_ROW" not in os.environ
        monkeypatch.setenv("TABLE_ROW", value)

    assert not failures(test, tmp_path=tmp_path, monkeypatch=monkeypatch)
    assert "TABLE_ROW" not in os.environ


@pytest.mark.parametrize(
    ("rows", "reason"),
    [
        ([], "without rows"),
        ([(1, 2, 3)], "row 0 has 3 values for 2"),
        ([pytest.param(1, 2, marks=pytest.mark.slow)], "marks"),
    ],
)
def test_a_table_that_cannot_run_is_refused(rows: list[Any], reason: str) -> None:
    with pytest.raises(TypeError, match=reason):

        @table("a, b", rows)
        def test(a: int, b: int) -> None: ...


@pytest.mark.parametrize("ids", [["one"], ["one", "two", "three"]])
def test_a_table_with_too_few_or_too_many_ids_is_refused(ids: list[str]) -> None:
    with pytest.raises(TypeError, match=f"{len(ids)} ids for 2 rows"):

        @table("a", [1, 2], ids=ids)
        def test(a: int) -> None: ...


def test_a_parameter_that_the_test_lacks_is_refused() -> None:
    with pytest.raises(TypeError, match="has no parameter b"):

        @table("a, b", [(1, 2)])
        def test(a: int) -> None: ...


class TestInAClass:
    @table("value", [1, 2])
    def test_rows_run_in_a_class(self, value: int) -> None:
        assert isinstance(self, TestInAClass)
        assert value


@table("least", [0, 10])
@given(st.integers(min_value=10))
def test_a_row_runs_all_examples_of_hypothesis(least: int, number: int) -> None:
    assert number >= least


@table("value", [1, 2])
def test_pytest_gives_fixtures_to_a_table(value: int, request: pytest.FixtureRequest) -> None:
    assert request.node.name == "test_pytest_gives_fixtures_to_a_table"
    assert value


class Counter:
    """A fixture that each row has for itself."""

    def __init__(self) -> None:
        self.count = 0

    def for_row(self, _: object) -> Counter:
        return Counter()


@pytest.fixture
def counter() -> Counter:
    return Counter()


@table("row", range(3))
def test_a_fixture_with_for_row_is_made_for_each_row(counter: Counter, row: int) -> None:
    counter.count += 1
    assert counter.count == 1


class Worker:
    """A fixture that rows share, and that records."""

    def __init__(self) -> None:
        self.begun: Recorder[int] = Recorder()


@pytest.fixture
def worker() -> Worker:
    return Worker()


@pytest.fixture
def listener() -> Recorder[int]:
    return Recorder()


@table("row", range(3))
def test_recorders_begin_each_row_empty(worker: Worker, listener: Recorder[int], row: int) -> None:
    worker.begun(row)
    listener(row)
    assert worker.begun == listener == [row]
