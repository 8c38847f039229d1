"""Time limits of calls to code of the application."""

from __future__ import annotations

import multiprocessing
import threading
from typing import Any

import pytest

from messaging.errors import ArgumentError
from messaging.remoteevent.listener import LimitedCall, TimeLimits
from messaging.testing.tables import table
from messaging.testing.waiting import PATIENCE


@table("limit", [True, False, 0, -1, float("nan"), "1", None])
def test_a_limit_that_is_no_number_of_seconds_is_refused(limit: Any) -> None:
    with pytest.raises(ArgumentError, match="time_limit"):
        TimeLimits(limit)


def expires(limits: TimeLimits) -> bool:
    """Return whether a call that does not return exceeds its limit."""
    expired = threading.Event()
    call = LimitedCall(expired.set)
    limits.begin(call)
    found = expired.wait(PATIENCE) and limits.is_stuck
    limits.end(call)
    return found and not limits.is_stuck


def _in_child(limits: TimeLimits, results: Any) -> None:
    is_free = not limits.is_stuck
    results.put(is_free and expires(limits))


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_calls_expire_in_a_forked_child() -> None:
    limits = TimeLimits(0.05)
    assert expires(limits)
    stuck = LimitedCall(lambda: None)
    limits.begin(stuck)
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    child = context.Process(target=_in_child, args=(limits, results))
    child.start()
    try:
        assert results.get(timeout=PATIENCE)
    finally:
        child.join(PATIENCE)
        child.kill()
    limits.end(stuck)
