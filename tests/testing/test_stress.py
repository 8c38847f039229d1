"""``make test-stress``: which tests it runs, how it counts, and that its load ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from messaging.testing.waiting import PATIENCE, eventually
from tests import stress
from tests.processes import has_ended
from tests.scripts import ROOT
from tests.stress import BUSY, QUIET, Failure, Tally, changed_tests, load, read_report

#: fails in each run under load, which is every second
FLAKY = """
import pathlib

def test_steady():
    pass

def test_flaky():
    path = pathlib.Path("{folder}/runs")
    before = path.read_text() if path.exists() else ""
    path.write_text(before + "x")
    assert len(before) % 2 == 0, "the other half"
"""


def git(folder: Path, *arguments: str) -> None:
    who = ("-c", "user.name=x", "-c", "user.email=x@example.com")
    subprocess.run(["git", "-C", str(folder), *who, *arguments], check=True, capture_output=True)


def test_test_files_that_differ_are_chosen(tmp_path: Path) -> None:
    (tmp_path / "tests" / "room").mkdir(parents=True)
    files = {
        name: tmp_path / "tests" / "room" / f"{name}.py" for name in ("test_same", "test_old", "test_gone", "helper")
    }
    for file in files.values():
        file.write_text("1")
    git(tmp_path, "init", "-q", "-b", "main")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-qm", "x")
    assert changed_tests("main", tmp_path) == []
    files["test_old"].write_text("2")
    files["helper"].write_text("2")
    files["test_gone"].unlink()
    (tmp_path / "tests" / "test_new.py").write_text("2")
    (tmp_path / "test_outside.py").write_text("2")
    assert changed_tests("main", tmp_path) == ["tests/room/test_old.py", "tests/test_new.py"]
    with pytest.raises(SystemExit, match=r"stress: git diff: .*nowhere"):
        changed_tests("nowhere", tmp_path)


def test_a_report_tells_failures_and_errors_by_the_id_of_their_test(tmp_path: Path) -> None:
    report = tmp_path / "report.xml"
    report.write_text(
        """<testsuites><testsuite>
        <testcase file="tests/a/test_b.py" classname="tests.a.test_b" name="test_c[1]"/>
        <testcase file="tests/a/test_b.py" classname="tests.a.test_b.TestD" name="test_e">
          <failure message="wrong">here</failure><system-out>printed</system-out></testcase>
        <testcase file="tests/a/test_b.py" classname="tests.a.test_b.TestD" name="test_e">
          <error message="after"/></testcase>
        <testcase file="tests/a/test_b.py" classname="tests.a.test_b" name="test_f"><skipped message="no"/></testcase>
        </testsuite></testsuites>"""
    )
    count, (failure,) = read_report(report)
    assert count == 3
    assert failure.test == "tests/a/test_b.py::TestD::test_e"
    assert [word for word in ("wrong", "here", "printed", "after") if word not in failure.output] == []


def test_failures_are_counted_by_half_the_most_frequent_first(tmp_path: Path) -> None:
    tally = Tally(tmp_path)
    tally.add(QUIET, [])
    tally.add(BUSY, [Failure("a.py::test_a[x/y]", "first"), Failure("a.py::test_b", "b")])
    tally.add(QUIET, [Failure("a.py::test_a[x/y]", "second")])
    assert tally.lines() == [
        "3 runs: 2 quiet, 1 busy",
        "failed 2 times (1 quiet, 1 busy): a.py::test_a[x/y]",
        f"    {tmp_path}/a.py-test_a-x-y-.txt",
        "failed 1 times (0 quiet, 1 busy): a.py::test_b",
        f"    {tmp_path}/a.py-test_b.txt",
    ]
    assert tally.file("a.py::test_a[x/y]").read_text() == "===== run 2, busy\nfirst\n===== run 3, quiet\nsecond\n"


def test_the_load_ends_with_its_block() -> None:
    found: list[int] = []

    def crash(pids: list[int]) -> None:
        assert len(pids) == 2
        assert not any(map(has_ended, pids))
        found.extend(pids)
        raise LookupError

    with pytest.raises(LookupError), load(2) as pids:
        crash(pids)
    assert len(found) == 2
    assert all(map(has_ended, found))


def test_the_load_ends_with_a_process_that_is_killed() -> None:
    code = "import os; from tests.stress import load\n"
    code += "with load(1) as pids: print(*pids, flush=True); os.kill(os.getpid(), 9)"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True, timeout=60, check=False
    )
    assert done.returncode == -signal.SIGKILL
    eventually(lambda: has_ended(done.stdout))


@pytest.mark.slow  # half of its runs load both cores
def test_a_test_that_fails_now_and_then_is_listed_and_its_output_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    suite = tmp_path / "test_suite.py"
    suite.write_text(FLAKY.format(folder=tmp_path))
    results = tmp_path / "results"
    assert stress.main(["--times", "4", "--processes", "1", "--results", str(results), str(suite)]) == 1
    told = capfd.readouterr().out.splitlines()
    assert [line.partition(" tests, ")[2][:8] for line in told[:4]] == ["0 failed", "1 failed", "0 failed", "1 failed"]
    assert told[4] == "4 runs: 2 quiet, 2 busy"
    assert told[5].startswith("failed 2 times (0 quiet, 2 busy): ")
    assert told[5].endswith("test_suite.py::test_flaky")
    assert Path(told[6].strip()).read_text().count("the other half") >= 2
    assert stress.main(["--times", "1", "--processes", "1", "--results", str(results), f"{suite}::test_steady"]) == 0
    assert capfd.readouterr().out.splitlines()[-1] == "no test failed"
    assert stress.main(["--times", "1", "--results", str(results), str(tmp_path / "missing.py")]) == 1
    assert "pytest itself" in capfd.readouterr().out
    ours = str(ROOT / "tests" / "testing" / "test_tables.py")  # with the configuration of this project
    assert stress.main(["--times", "1", "--processes", "1", "--results", str(results), ours]) == 0


def test_an_interrupt_ends_the_runs_and_tells_what_was_found(tmp_path: Path) -> None:
    suite = tmp_path / "test_suite.py"
    suite.write_text(
        f"import time\ndef test_it():\n    open('{tmp_path}/begun', 'w').close(); "
        "time.sleep(60)\n"  # sleeps: until it is interrupted
    )
    command = [
        sys.executable,
        "-m",
        "tests.stress",
        "--processes",
        "1",
        "--results",
        str(tmp_path / "results"),
        str(suite),
    ]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
        assert process.stdout is not None
        eventually((tmp_path / "begun").exists, patience=3 * PATIENCE)  # three processes start one after the other
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does
        told = process.stdout.read()
        assert process.wait(3 * PATIENCE) == 130
    assert told.splitlines() == ["0 runs: 0 quiet, 0 busy", "no test failed"]

    def is_gone() -> bool:
        try:
            os.killpg(process.pid, 0)
        except ProcessLookupError:
            return True
        return False

    eventually(is_gone, "the processes of the run ended")
