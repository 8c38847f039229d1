"""The drain of a route, beside others of the same target."""

from __future__ import annotations

import threading
from typing import Any

import messaging
from messaging.execution import workers
from messaging.gateway.drain import Drain, Target
from messaging.testing.waiting import PATIENCE
from tests.gateway.kit import unique

IN_FLIGHT = 5
#: looks after which a drain counts as one that never rests
MOST = 500


class FullBuffer:
    """Has messages, and as many as may be in flight that are not recorded as confirmed; its own queue."""

    unrecorded = IN_FLIGHT

    def __init__(self) -> None:
        self.looks = 0
        self.queue = self

    @property
    def has_next(self) -> bool:
        self.looks += 1
        return self.looks < MOST

    def begin_range(self) -> None:
        pass


def _pass_workers() -> None:
    """Wait until the workers have done what was submitted before."""
    done = threading.Event()
    workers().submit(done.set)
    assert done.wait(PATIENCE)


def test_routes_whose_windows_are_full_do_not_wake_each_other_for_ever() -> None:
    with messaging.connect(f"memory://{unique('drain')}") as m:
        target = Target(m, 2 * IN_FLIGHT)
        buffers: list[Any] = [FullBuffer(), FullBuffer()]
        drains = [
            Drain("r", each, target, priority=4, in_flight=IN_FLIGHT, rate=None, dead_letter=lambda *_: True)
            for each in buffers
        ]
        for each in drains:
            each.note_target_back()
        for _ in range(50):
            _pass_workers()
        for each in drains:
            each.stop()
        assert max(each.looks for each in buffers) < 50
