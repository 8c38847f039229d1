"""Random programs in simulated worlds keep their promises, and the same seed gives the same world."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from tests.house import ROOT
from tests.simulation.kept import KEPT

#: real seconds that the runs of a test may take
LIMIT = 1500


def simulate(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run seeds in a process of their own: worlds replace parts of the standard library."""
    return subprocess.run(
        [sys.executable, "-m", "tests.simulation", *arguments],
        cwd=ROOT, env={**os.environ, **environment}, capture_output=True, text=True, timeout=LIMIT, check=False,
    )  # fmt: skip


def check(done: subprocess.CompletedProcess[str]) -> None:
    assert not done.returncode, f"{done.stdout[-6000:]}\n{done.stderr[-3000:]}"


@pytest.mark.timeout(900)
def test_random_programs_keep_their_promises() -> None:
    check(simulate("--seeds", "1", "--jobs", "1", "--stop", "3"))


@pytest.mark.slow
@pytest.mark.timeout(LIMIT)
def test_many_random_programs_keep_their_promises() -> None:
    check(simulate("--seeds", "15", "--first", "100001", "--stop", "3"))


@pytest.mark.timeout(900)
def test_cases_that_have_failed_keep_their_promises() -> None:
    check(simulate("--quiet", *(argument for case in KEPT for argument in ("--case", case))))


def _digests(hash_seed: int, *arguments: str) -> list[str]:
    done = simulate("--seeds", "1", "--first", "50", "--digests", *arguments, PYTHONHASHSEED=str(hash_seed))
    check(done)
    return sorted(line for line in done.stdout.splitlines() if "/50 " in line)


@pytest.mark.timeout(900)
def test_the_same_seed_gives_the_same_history_with_any_hash_seed() -> None:
    several = ["--service", "messages", "--service", "distributed", "--service", "gateway", "--protocol", "amqp"]
    digests = _digests(1, *several, "--jobs", "1")
    assert len(digests) == 3
    assert digests == _digests(2, *several, "--jobs", "1")


@pytest.mark.slow
@pytest.mark.timeout(LIMIT)
def test_the_same_seed_gives_the_same_history_ten_times() -> None:
    several = {tuple(_digests(number, "--protocol", "memory", "--protocol", "amqp")) for number in range(10)}
    assert len(several) == 1


@pytest.mark.slow
@pytest.mark.timeout(LIMIT)
def test_the_code_that_did_not_run_is_reported() -> None:
    done = simulate("--service", "journal", "--seeds", "2", "--coverage")
    check(done)
    rows = {line.split()[0]: line.split() for line in done.stdout.splitlines() if line.startswith("messaging/")}
    share = {name: int(row[5].rstrip("%")) for name, row in rows.items()}
    assert share["messaging/journal/journal.py"] > share["messaging/remoteevent/mailbox/mailbox.py"] > 0


def test_faults_that_did_not_happen_are_named() -> None:
    done = simulate("--service", "messages", "--protocol", "memory", "--seeds", "1", "--jobs", "1")
    check(done)
    assert "faults that did not happen: " in done.stdout


def test_a_planted_fault_is_found() -> None:
    done = simulate(
        *("--plant", "messages of a resumed session that have no stream yet are acknowledged and lost"),
        *("--service", "messages", "--protocol", "mqtt5", "--seeds", "200", "--jobs", "1", "--stop", "1"),
    )
    assert done.returncode == 1, f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    assert "FAILED messages/mqtt5/" in done.stdout


def test_interrupted_runs_are_summed_up() -> None:
    """As by Ctrl-C: all processes of the terminal get the signal."""
    arguments = ["--seeds", "100000", "--service", "journal", "--digests", "--jobs", "1"]
    command = [sys.executable, "-m", "tests.simulation", *arguments]
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as running:
        assert running.stdout is not None
        assert running.stdout.readline().startswith("journal/memory/")
        os.killpg(running.pid, signal.SIGINT)
        output, errors = running.communicate(timeout=60)
    assert "\ninterrupted\n" in f"\n{output}"
    assert " runs, 0 failed, in " in output
    assert not errors
    assert running.returncode == 130
