"""Pauses between attempts to connect, and limits of attempts, in virtual time."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

from messaging.errors import ConnectionLostError
from messaging.execution import clock
from messaging.testing.clock import VirtualClock
from tests.doubles.fake import FakeBroker
from tests.doubles.fixtures import Connect


class _Refusals:
    """The errors of a broker that refuses connections. Remembers when they were asked for."""

    def __init__(self) -> None:
        self.at: list[float] = []
        self.is_over = False

    def __bool__(self) -> bool:
        self.at.append(clock.monotonic())
        return not self.is_over

    def popleft(self) -> BaseException:
        return ConnectionLostError("refused")


@pytest.fixture
def refusals(virtual_clock: VirtualClock, broker: FakeBroker) -> _Refusals:
    errors: Any = broker.errors
    errors["open"] = found = _Refusals()
    found.is_over = True
    return found


def test_attempts_to_reconnect_come_ever_later_up_to_the_longest_pause(
    virtual_clock: VirtualClock, broker: FakeBroker, refusals: _Refusals, connect: Connect
) -> None:
    m = connect(broker, reconnect_min=1.0, reconnect_max=60.0)
    refusals.at.clear()
    refusals.is_over = False
    broker.lose()
    virtual_clock.advance(3600.0)
    pauses = [after - before for before, after in pairwise(refusals.at)]
    assert 1.0 <= min(pauses) <= max(pauses) < 60.001
    assert pauses[0] <= 3.0  # pauses are random: each up to three times as long as the one before
    assert 60 <= len(pauses) < 600
    refusals.is_over = True
    virtual_clock.advance(60.0)
    assert m.connection_state.value.name == "connected"


def test_a_connection_that_is_lost_again_and_again_is_made_again_each_time(
    virtual_clock: VirtualClock, broker: FakeBroker, refusals: _Refusals, connect: Connect
) -> None:
    m = connect(broker, reconnect_min=1.0, reconnect_max=30.0)
    for number in range(1, 20):
        broker.lose()
        virtual_clock.until(lambda number=number: broker.opened == number + 1, within=31.0)  # type: ignore[misc]
        assert m.connection_state.value.name == "connected"
        virtual_clock.advance(120.0)
