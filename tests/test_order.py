"""The order in which the files of tests begin."""

from __future__ import annotations

from pathlib import Path

from tests.conftest import LONGEST


def test_the_files_that_begin_first_exist() -> None:
    assert [name for name in LONGEST if not (Path(__file__).parent / name).is_file()] == []
