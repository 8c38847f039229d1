"""The soak, for a minute. The hour is a command of its own: ``make soak``."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from messaging.testing.brokers import require
from messaging.testing.tables import table
from tests.faults.soak import MEMORY_SLACK, WARM_UP, Sample, counts_grown, growth

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.timeout(420)
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="measures itself in /proc")
def test_random_faults_leave_nothing_behind(tmp_path: Path) -> None:
    """Both protocols at once, in a process of its own."""
    require("mosquitto", "rabbitmq")
    report = tmp_path / "report.json"
    command = [sys.executable, "-m", "tests.faults.soak", "--minutes", "1", "--round", "12", "--json", str(report)]
    done = subprocess.run(command, cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr[-4000:]}"
    told = json.loads(report.read_text())
    assert told["problems"] == []
    assert told["rounds"] > WARM_UP
    for protocol in ("mqtt", "amqp"):
        assert sum(told["faults"][protocol].values()) > 4 * told["rounds"]
        assert told["ledgers"][protocol]["confirmed"] > 1000


def sample(memory: int = 10**8, files: int = 10, threads: int = 5, tasks: int = 3) -> Sample:
    return Sample(0.0, memory, files, threads, tasks)


def test_memory_that_grows_is_noticed() -> None:
    warm = [sample()] * WARM_UP
    flat = [sample(10**8 + wobble) for wobble in (0, 10**6, 0, 2 * 10**6, 0, 10**6)]
    growing = [sample(10**8 + step * MEMORY_SLACK // 2) for step in range(6)]
    assert [*growth([*warm, *flat])] == []
    assert len([*growth([*warm, *growing])]) == 1
    assert [*growth(warm)] == []


@table("name", ["files", "threads", "tasks"])
def test_counts_that_grow_are_noticed(name: str) -> None:
    known = [sample(), sample(files=12, threads=7, tasks=4), sample()]
    assert [*counts_grown(sample(files=12, threads=7, tasks=4), known)] == []
    assert [each.split()[0] for each in counts_grown(sample(**{name: 13}), known)] == [name]
