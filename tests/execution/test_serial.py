"""Serial work: one thread at a time, and a failure to start it."""

from __future__ import annotations

import threading

import pytest

from messaging.execution import Serial, threads


def test_work_is_done_after_a_time_without_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    class NoWorkers:
        def submit(self, _job: object) -> None:
            raise RuntimeError("can't start new thread")

    done = threading.Event()
    work = Serial(done.set, lambda: False)
    with monkeypatch.context() as patched:
        patched.setattr(threads, "workers", NoWorkers)
        with pytest.raises(RuntimeError, match="new thread"):
            work.wake()
    assert work.wake()
    assert done.wait(5)


def test_waking_tells_whether_a_worker_was_started() -> None:
    begun, go_on = threading.Event(), threading.Event()

    def drain() -> None:
        begun.set()
        go_on.wait(5)

    work = Serial(drain, lambda: False)
    try:
        assert work.wake()
        assert begun.wait(5)
        assert not work.wake()
    finally:
        go_on.set()
