"""Running something on other threads, with their errors raised in the test."""

from __future__ import annotations

import _thread
import threading
from collections.abc import Callable
from typing import Final

import pytest

#: seconds a thread of a test may take
PATIENCE: Final = 20.0


def in_background(call: Callable[[], object], patience: float = PATIENCE) -> Callable[[], None]:
    """Call it on another thread; return a function that waits for its end and raises its error."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            call()
        except BaseException as error:  # noqa: BLE001  # raised by join
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()

    def join() -> None:
        thread.join(patience)
        assert not thread.is_alive()
        if errors:
            raise errors[0]

    return join


def in_threads(count: int, run: Callable[[int], object]) -> None:
    """Call ``run`` with 0, 1, ... on as many threads at the same moment, and raise what it raises."""
    barrier = threading.Barrier(count)

    def start(number: int) -> Callable[[], None]:
        def work() -> None:
            barrier.wait(PATIENCE)
            run(number)

        return in_background(work, 6 * PATIENCE)

    for join in [start(number) for number in range(count)]:
        join()


def together(*jobs: Callable[[], object]) -> None:
    """Run jobs at the same time, each on a thread of its own, until all are done."""
    in_threads(len(jobs), lambda number: jobs[number]())


def no_more_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no thread be started, as at a limit of the system."""

    def start(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    monkeypatch.setattr(_thread, "start_new_thread", start)
