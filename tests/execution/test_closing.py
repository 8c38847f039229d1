"""Objects that a ``with`` statement closes."""

from __future__ import annotations

import pytest

from messaging.execution import Closeable


class Door(Closeable):
    closed = 0

    def close(self) -> None:
        self.closed += 1


def test_the_end_of_a_block_closes_it_and_an_exception_goes_on() -> None:
    door = Door()
    with door as entered:
        assert entered is door
        assert door.closed == 0
    assert door.closed == 1
    with pytest.raises(KeyError), door:
        raise KeyError
    assert door.closed == 2
