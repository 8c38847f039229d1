"""The queue of one consumer object."""

from __future__ import annotations

import pytest

from messaging.distributedeventing.queues import ConsumerQueue
from messaging.execution import Pool, ThreadLane
from messaging.testing.waiting import Recorder, eventually


def test_flushing_a_queue_that_is_being_closed_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    reached: Recorder[int] = Recorder()
    queue = ConsumerQueue(lambda _: 0.0, Pool(1), "test", timeout=0.0, stalled=lambda _: None, limit=10)
    close = ThreadLane.close

    def close_later(lane: ThreadLane) -> int:
        queue.when_done(lambda: reached.append(1))
        return close(lane)

    monkeypatch.setattr(ThreadLane, "close", close_later)
    queue.close()
    eventually(lambda: reached == [1])
