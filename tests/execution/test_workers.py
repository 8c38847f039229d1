"""Worker threads: reused, as many as are busy, gone when idle; a blocked job does not starve others."""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from messaging import Messaging
from messaging.execution import threads as module
from messaging.execution import workers
from messaging.execution.threads import Lanes, Workers
from messaging.testing.waiting import PATIENCE, eventually
from tests.doubles.fake import FakeBroker
from tests.threads import in_threads, no_more_threads


@pytest.fixture
def pool(monkeypatch: pytest.MonkeyPatch) -> Iterator[Workers]:
    """A pool of our own, whose threads leave at once when the test is over."""
    pool = Workers()
    yield pool
    monkeypatch.setattr(module, "IDLE_SECONDS", 0.0)
    for _ in range(len(pool._idle)):
        pool.submit(lambda: None)
    eventually(lambda: not pool._idle, "the threads gone")


def threads() -> int:
    return sum(thread.name == "messaging-worker" for thread in threading.enumerate())


def test_one_job_after_the_other_uses_one_thread(pool: Workers) -> None:
    idents = set()
    for number in range(20):
        done = threading.Event()

        def job(done: threading.Event = done) -> None:
            idents.add(threading.get_ident())
            done.set()

        pool.submit(job)
        assert done.wait(PATIENCE)
        eventually(lambda: len(pool._idle) == 1, f"the thread free after job {number}")
    assert len(idents) == 1


def test_blocked_jobs_do_not_starve_others(pool: Workers) -> None:
    release = threading.Event()
    entered = threading.Semaphore(0)

    def block() -> None:
        entered.release()
        release.wait(PATIENCE)

    for _ in range(30):
        pool.submit(block)
    for _ in range(30):
        assert entered.acquire(timeout=PATIENCE)
    done = threading.Event()
    pool.submit(done.set)
    assert done.wait(PATIENCE)
    release.set()
    eventually(lambda: len(pool._idle) == 31)


def test_idle_threads_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "IDLE_SECONDS", 0.01)
    pool = Workers()
    before = threads()
    together = threading.Barrier(11)
    for _ in range(10):
        pool.submit(lambda: together.wait(PATIENCE) and None)
    together.wait(PATIENCE)
    eventually(lambda: not pool._idle and threads() <= before, "the threads gone")


def test_leaving_races_with_new_jobs_and_loses_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that gives up just when a job is handed to it takes it."""
    monkeypatch.setattr(module, "IDLE_SECONDS", 0.0005)
    pool = Workers()
    done = threading.Semaphore(0)
    jobs = 3000
    for number in range(jobs):
        pool.submit(done.release)
        if number % 3 == 0:
            deadline = time.monotonic() + 0.0005
            while time.monotonic() < deadline:
                pass
    for _ in range(jobs):
        assert done.acquire(timeout=PATIENCE)
    eventually(lambda: not pool._idle, "the threads gone")


def test_submitting_from_many_threads_runs_each_job_once(pool: Workers) -> None:
    lock = threading.Lock()
    seen: list[tuple[int, int]] = []

    def storm(thread: int) -> None:
        for number in range(200):

            def job(number: int = number) -> None:
                with lock:
                    seen.append((thread, number))

            pool.submit(job)

    in_threads(8, storm)
    eventually(lambda: len(seen) == 1600)
    assert sorted(seen) == [(thread, number) for thread in range(8) for number in range(200)]


@pytest.mark.parametrize("kind", [ValueError, SystemExit, KeyboardInterrupt])
def test_a_job_that_raises_is_logged_and_its_thread_goes_on(
    pool: Workers, caplog: pytest.LogCaptureFixture, kind: type[BaseException]
) -> None:
    def job() -> None:
        raise kind("a defect")

    pool.submit(job)
    eventually(lambda: len(pool._idle) == 1)
    done = threading.Event()
    pool.submit(done.set)
    assert done.wait(PATIENCE)
    assert "worker job failed" in caplog.text
    assert f"{kind.__name__}: a defect" in caplog.text
    caplog.clear()


def test_threads_are_daemons_and_named(pool: Workers) -> None:
    found: list[threading.Thread] = []
    done = threading.Event()

    def job() -> None:
        found.append(threading.current_thread())
        done.set()

    pool.submit(job)
    assert done.wait(PATIENCE)
    assert found[0].daemon
    assert found[0].name == "messaging-worker"


def test_a_finished_job_is_not_kept(pool: Workers) -> None:
    freed = threading.Event()

    class Job:
        def __call__(self) -> None:
            pass

        def __del__(self) -> None:
            freed.set()

    pool.submit(Job())
    assert freed.wait(PATIENCE)


def test_there_is_one_pool_per_process() -> None:
    ours = workers()
    assert workers() is ours
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.write(write, b"1" if workers() is not ours and not workers()._idle else b"0")
        finally:
            os._exit(0)
    os.waitpid(pid, 0)
    assert os.read(read, 1) == b"1"
    os.close(read)
    os.close(write)


def test_where_no_thread_can_be_started_the_one_in_reserve_does_everything(pool: Workers) -> None:
    pool.hold(pool)
    eventually(lambda: len(pool._idle) == 1)
    with no_more_threads():
        done: list[int] = []
        for number in range(50):
            pool.submit(lambda number=number: done.append(number))  # type: ignore[misc]
        eventually(lambda: len(done) == 50)
    assert sorted(done) == [*range(50)]
    pool.release(pool)


def test_the_thread_in_reserve_stays_while_it_is_held(pool: Workers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "IDLE_SECONDS", 0.0)
    pool.hold(pool)
    eventually(lambda: len(pool._idle) == 1)
    with no_more_threads():
        for _ in range(20):  # it would have left between any two of them
            ran = threading.Event()
            pool.submit(ran.set)
            eventually(ran.is_set)
    pool.release(pool)


def test_without_a_reserve_the_caller_is_told() -> None:
    pool = Workers()
    with no_more_threads(), pytest.raises(RuntimeError, match="can't start new thread"):
        pool.submit(lambda: None)
    assert not pool._jobs


def test_streams_go_on_where_no_thread_can_be_started(broker: FakeBroker, m: Messaging) -> None:
    seen: list[bytes] = []
    for _ in range(5):
        m.subscribe("a").subscribe(lambda message: seen.append(message.payload))
    with no_more_threads():
        for number in range(5):
            broker.deliver(*[b"x"] * 20, handle=number)
        eventually(lambda: len(seen) == 100)
        m.close()
    assert m.runtime.get_runtime_dto().subscriptions == ()


# --- lanes


def test_lanes_run_in_order_and_no_wider_than_their_limit() -> None:
    lanes = Lanes(3)
    release = threading.Event()
    started: list[int] = []

    def job(number: int) -> None:
        started.append(number)
        release.wait(PATIENCE)

    for number in range(10):
        lanes.submit(lambda number=number: job(number))  # type: ignore[misc]
    eventually(lambda: len(started) == 3)
    assert sorted(started) == [0, 1, 2]
    release.set()
    eventually(lambda: len(started) == 10)


def test_lanes_lose_no_job_between_the_last_and_the_next() -> None:
    lanes = Lanes(2)
    done = threading.Semaphore(0)
    for _ in range(2000):
        lanes.submit(done.release)
        assert done.acquire(timeout=PATIENCE)


def test_the_table_of_threads_is_complete() -> None:
    """It names every thread that the core starts: the command line, adapters and tools for tests have others.

    The page on the architecture names the same threads.
    """
    table = {*re.findall(r"^``(messaging-[a-z-]+)``", module.__doc__ or "", re.MULTILINE)}
    started: set[str] = set()
    package = Path(module.__file__).parents[1]
    for path in package.rglob("*.py"):
        if path.is_relative_to(package / "testing"):
            continue
        source = path.read_text()
        started |= {*re.findall(r'"(messaging-[a-z-]+)"', source)} if "start_thread" in source else set()
        assert "threading.Thread(" not in source or path.parent.name in ("cli", "execution"), path
    page = (package.parent / "docs" / "architecture.md").read_text(encoding="utf-8")
    assert table == started == {*re.findall(r"^\| `(messaging-[a-z-]+)` \|", page, re.MULTILINE)}
