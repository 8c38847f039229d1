"""``make durations``: a run is recorded, and its record becomes a page."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import durations
from tests.scripts import ROOT

SUITE = """
import time
import pytest

@pytest.fixture
def slow():
    time.sleep(0.2)  # sleeps: what is measured
    yield
    time.sleep(0.1)  # sleeps: what is measured

def test_quick():
    pass

def test_busy():
    started = time.process_time()
    while time.process_time() < started + 0.3:
        pass

@pytest.mark.parametrize("what", ["a|b"])
def test_slow(slow, what):
    time.sleep(0.1)  # sleeps: what is measured
"""


@pytest.mark.parametrize("options", [(), ("-n", "1")])
def test_a_run_is_recorded(tmp_path: Path, options: tuple[str, ...]) -> None:
    (tmp_path / "test_suite.py").write_text(SUITE)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.durations", "--record-durations", "record.json"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    done = subprocess.run(
        [*command, *options], cwd=tmp_path, env={**environment, "PYTHONPATH": str(ROOT)}, timeout=60, check=False
    )
    assert done.returncode == 0
    record = json.loads((tmp_path / "record.json").read_text())
    assert set(record) == {"test_suite.py::test_quick", "test_suite.py::test_busy", "test_suite.py::test_slow[a|b]"}
    slow = record["test_suite.py::test_slow[a|b]"]
    assert slow["setup"] >= 0.2
    assert slow["call"] >= 0.1
    assert slow["teardown"] >= 0.1
    assert slow["processor"] < 0.3 <= record["test_suite.py::test_busy"]["processor"]


def test_the_page_has_a_row_for_each_room_and_the_tests_that_take_most(tmp_path: Path) -> None:
    record = {f"tests/mqtt/test_a.py::test_{n}": {"call": 0.01, "processor": 0.01} for n in range(1_200)}
    record |= {
        "tests/gateway/pipe/test_b.py::test_b[a|b]": {
            "setup": 3.0,
            "call": 20.25,
            "teardown": 1.0,
            "processor": 2.5,
        },
        "tests/gateway/test_c.py::test_c": {"setup": 0.5, "call": 5.0, "processor": 30.0},
        "tests/test_d.py::test_d": {"setup": 0.5, "processor": 0.0},  # it was skipped
        "messaging/testing/conformance/test_e.py::test_e[memory]": {"call": 1.0, "processor": 1.0},
    }
    path, page = tmp_path / "record.json", tmp_path / "page.md"
    path.write_text(json.dumps(record))
    assert durations.main([str(path), "--page", str(page)]) == 0
    lines = page.read_text().splitlines()
    assert [line for line in lines if line.startswith(("| `tests", "| `messaging", "| all"))][:5] == [
        "| `tests/gateway` | 2 | 32.5 | 25.2 | 4.5 |",
        "| `tests/mqtt` | 1,200 | 12.0 | 12.0 | 0.0 |",
        "| `messaging/testing/conformance` | 1 | 1.0 | 1.0 | 0.0 |",
        "| `tests` | 1 | 0.0 | 0.0 | 0.5 |",
        "| all | 1,204 | 45.5 | 38.2 | 5.0 |",
    ]
    dearest = lines[lines.index("| test | processor, s | with its fixtures, s |") + 2 :]
    assert dearest[:2] == [
        "| `tests/gateway/test_c.py::test_c` | 30.0 | 5.5 |",
        "| `tests/gateway/pipe/test_b.py::test_b[a\\|b]` | 2.5 | 24.2 |",
    ]
    assert len(dearest) == durations.DEAREST
