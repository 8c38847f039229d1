"""Copies of requests: counted, bounded, forgotten after a while, and settled as their request is."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from messaging import Message, MessageContext
from messaging.execution import Promise
from messaging.receiving import HandlingVerdict
from messaging.replyto import request_copies
from messaging.replyto.request_copies import ExpectedCopies, identity_of
from messaging.testing.tables import table


def verdict() -> Promise[HandlingVerdict]:
    return Promise("the verdict on a request")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The time of the module, in seconds: the test sets it."""
    clock = SimpleNamespace(now=1000.0)
    monkeypatch.setattr(request_copies, "clock", SimpleNamespace(monotonic=lambda: clock.now))
    return clock


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 3)), max_size=60))
def test_as_many_copies_are_taken_as_were_expected_in_their_order(steps: list[tuple[bool, int]]) -> None:
    expected = ExpectedCopies()
    model: dict[int, list[Promise[HandlingVerdict]]] = {number: [] for number in range(4)}
    for is_expected, number in steps:
        if is_expected:
            model[number].append(verdict())
            expected.expect(number, model[number][-1])
        else:
            wanted = model[number].pop(0) if model[number] else None
            assert expected.take(number) is wanted


@table("are_equal", [False, True])
def test_at_most_4096_copies_are_expected_and_the_oldest_are_dropped(are_equal: bool) -> None:
    expected = ExpectedCopies()
    numbers = [1 if are_equal else number for number in range(10_000)]
    for number in numbers:
        expected.expect(number, verdict())
    assert [expected.take(number) is not None for number in reversed(numbers)] == [True] * 4_096 + [False] * 5_904


def test_a_copy_that_does_not_arrive_is_forgotten_after_a_minute(clock: SimpleNamespace) -> None:
    expected, later = ExpectedCopies(), verdict()
    expected.expect(1, verdict())
    clock.now += 59
    expected.expect(1, later)
    clock.now += 2
    assert expected.take(1) is later
    assert expected.take(1) is None


def test_a_copy_is_expected_while_its_subscription_is_full(clock: SimpleNamespace) -> None:
    """A slow handler: the copy waits at the broker, for longer than a minute."""
    expected, shared = ExpectedCopies(), verdict()
    expected.expect(1, shared)
    expected.expect(2, shared)
    clock.now += 500
    expected.was_full()
    assert expected.take(1) is shared
    clock.now += 61
    assert expected.take(2) is None


def test_a_copy_that_arrived_before_its_request_is_not_expected(clock: SimpleNamespace) -> None:
    expected = ExpectedCopies()
    for seconds, is_expected in ((0, False), (61, True)):
        expected.arrived_early(1)
        clock.now += seconds
        expected.expect(1, verdict())
        assert (expected.take(1) is not None) == is_expected


def test_a_copy_that_may_not_exist_is_expected_for_a_second(clock: SimpleNamespace) -> None:
    expected, shared = ExpectedCopies(), verdict()
    for _ in range(2):
        expected.expect(1, shared, is_uncertain=True)
    assert expected.take(1) is shared
    clock.now += 2
    assert expected.take(1) is None


def test_a_copy_is_expected_for_a_second_after_the_subscription_of_its_request_ended(clock: SimpleNamespace) -> None:
    expected, shared, origin = ExpectedCopies(), verdict(), object()
    for _ in range(2):
        expected.expect(1, shared, origin)
    expected.doubt(object())
    clock.now += 2
    assert expected.take(1) is shared
    expected.doubt(origin)
    assert expected.take(1) is None


def test_a_copy_of_a_request_that_is_handled_again_does_not_share_the_first_verdict() -> None:
    expected, refused, again = ExpectedCopies(), verdict(), verdict()
    expected.expect(1, refused)
    refused.resolve(HandlingVerdict.REFUSE)
    expected.expect(1, again)
    assert expected.take(1) is again
    expected.expect(1, refused)
    assert expected.take(1) is None


def test_copies_are_recognized_by_payload_channel_reply_channel_and_correlation_id() -> None:
    def identity(payload: bytes, channel: str, reply_to: str | None, correlation_id: str | None) -> int:
        context = MessageContext(channel, None, "x/y", None, correlation_id, reply_to)
        return identity_of(Message(payload, context))

    cases = [*itertools.product((b"1", b"2"), ("a", "b"), ("r", "s", None), ("c", "d", None))]
    assert len({identity(*case) for case in cases}) == len(cases)
    assert all(identity(*case) == identity(*case) for case in cases)
