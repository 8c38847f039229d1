"""The way back of a step that was not finished."""

from __future__ import annotations

import pytest

from messaging.environment.signals import on_failure


class InterruptError(BaseException):
    """What a signal handler raises."""


@pytest.mark.parametrize("kind", [ValueError, InterruptError])
def test_whatever_a_block_raises_is_undone_and_goes_on(kind: type[BaseException]) -> None:
    undone: list[object] = []
    error = kind()
    with pytest.raises(kind) as raised, on_failure(undone.append, 1):
        raise error
    assert raised.value is error
    assert undone == [1]


def test_a_block_that_ends_is_not_undone() -> None:
    undone: list[object] = []
    with on_failure(undone.append, 1):
        pass
    assert undone == []


def test_an_error_of_the_way_back_has_the_first_one_as_its_context() -> None:
    first = ValueError()

    def undo() -> None:
        raise OSError

    with pytest.raises(OSError) as raised, on_failure(undo):
        raise first
    assert raised.value.__context__ is first
