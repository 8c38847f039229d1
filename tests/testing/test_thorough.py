"""Property tests run with more examples in ``make test-slow``."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.scripts import ROOT
from tests.thorough import FACTOR

CONFTEST = """
import pytest
from tests import thorough

thorough.load_profile()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    thorough.mark(items)


def pytest_configure(config):
    config.addinivalue_line("markers", "slow: x")
"""
SUITE = """
import atexit
import json
from collections import Counter
from hypothesis import given, settings, strategies
from hypothesis.stateful import RuleBasedStateMachine, rule

runs = Counter()
atexit.register(lambda: open("runs", "w").write(json.dumps(runs)))


@settings(max_examples=7, database=None)
@given(strategies.integers())
def test_of_its_own_number(number):
    runs["own"] += 1


@settings(database=None)
@given(strategies.integers())
def test_of_the_profile(number):
    runs["profile"] += 1


class Machine(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        runs["machine"] += 1

    @rule(number=strategies.integers())
    def step(self, number):
        pass


TestMachine = Machine.TestCase
TestMachine.settings = settings(max_examples=3, stateful_step_count=4, database=None)


def test_plain():
    runs["plain"] += 1
"""


@pytest.mark.parametrize(
    ("profile", "selection", "expected"),
    [
        ("suite", "not slow", {"own": 7, "profile": 100, "machine": 3, "plain": 1}),
        ("suite", "slow", {}),
        ("thorough", "slow", {"own": 7 * FACTOR, "profile": 100 * FACTOR, "machine": 3 * FACTOR}),
        ("thorough", "not slow", {"plain": 1}),
    ],
)
def test_the_profile_decides_how_many_examples_there_are_and_in_which_tier(
    tmp_path: Path, profile: str, selection: str, expected: dict[str, int]
) -> None:
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_suite.py").write_text(SUITE)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", selection]
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "HYPOTHESIS_PROFILE": profile},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == (0 if expected else 5), done.stdout
    found = json.loads((tmp_path / "runs").read_text())
    assert found.keys() == expected.keys()
    for name, count in expected.items():
        assert count <= found[name] < 2 * count + 2  # of a machine there are some that repeat others
