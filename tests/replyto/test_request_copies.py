"""Copies of requests: counted, bounded, forgotten after a while, and settled as their request is."""

from __future__ import annotations

import itertools
from functools import partial
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from messaging import Message, MessageContext
from messaging.receiving import HandlingVerdict
from messaging.replyto import request_copies
from messaging.replyto.request_copies import ExpectedCopies, SharedVerdict, identity_of
from messaging.testing.tables import table


class Receiver:
    """A subscription that keeps the verdicts it is given."""

    def __init__(self) -> None:
        self.verdicts: list[tuple[Message, HandlingVerdict]] = []

    def settle_copy(self, request: Message, verdict: HandlingVerdict) -> None:
        self.verdicts.append((request, verdict))


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The time of the module, in seconds: the test sets it."""
    clock = SimpleNamespace(now=1000.0)
    monkeypatch.setattr(request_copies, "clock", SimpleNamespace(monotonic=lambda: clock.now))
    return clock


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 3)), max_size=60))
def test_as_many_copies_are_taken_as_were_expected_in_their_order(steps: list[tuple[bool, int]]) -> None:
    expected = ExpectedCopies()
    model: dict[int, list[SharedVerdict]] = {number: [] for number in range(4)}
    for is_expected, number in steps:
        if is_expected:
            model[number].append(SharedVerdict())
            expected.expect(number, model[number][-1])
        else:
            wanted = model[number].pop(0) if model[number] else None
            assert expected.take(number) is wanted


@table("are_equal", [False, True])
def test_at_most_4096_copies_are_expected_and_the_oldest_are_dropped(are_equal: bool) -> None:
    expected = ExpectedCopies()
    numbers = [1 if are_equal else number for number in range(10_000)]
    for number in numbers:
        expected.expect(number, SharedVerdict())
    assert [expected.take(number) is not None for number in reversed(numbers)] == [True] * 4_096 + [False] * 5_904


def test_a_copy_that_does_not_arrive_is_forgotten_after_a_minute(clock: SimpleNamespace) -> None:
    expected, later = ExpectedCopies(), SharedVerdict()
    expected.expect(1, SharedVerdict())
    clock.now += 59
    expected.expect(1, later)
    clock.now += 2
    assert expected.take(1) is later
    assert expected.take(1) is None


def test_a_copy_is_expected_while_its_subscription_is_full(clock: SimpleNamespace) -> None:
    """A slow handler: the copy waits at the broker, for longer than a minute."""
    expected, shared = ExpectedCopies(), SharedVerdict()
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
        expected.expect(1, SharedVerdict())
        assert (expected.take(1) is not None) == is_expected


def test_a_copy_that_may_not_exist_is_expected_for_a_second(clock: SimpleNamespace) -> None:
    expected, shared = ExpectedCopies(), SharedVerdict(Receiver())
    for _ in range(2):
        expected.expect(1, shared, is_uncertain=True)
    assert expected.take(1) is shared
    clock.now += 2
    assert expected.take(1) is None


def test_a_copy_is_expected_for_a_second_after_the_subscription_of_its_request_ended(clock: SimpleNamespace) -> None:
    expected, receiver = ExpectedCopies(), Receiver()
    shared = SharedVerdict(receiver)
    for _ in range(2):
        expected.expect(1, shared)
    expected.doubt(Receiver())
    clock.now += 2
    assert expected.take(1) is shared
    expected.doubt(receiver)
    assert expected.take(1) is None


@table("verdict", list(HandlingVerdict))
def test_copies_share_the_verdict_whether_they_arrive_before_or_after_it(verdict: HandlingVerdict) -> None:
    shared, receiver = SharedVerdict(), Receiver()
    early, late = Message(b"1", MessageContext("a")), Message(b"1", MessageContext("a"))
    shared.add(partial(receiver.settle_copy, early))
    assert receiver.verdicts == []
    shared.settle(verdict)
    shared.add(partial(receiver.settle_copy, late))
    assert [(message is early, given) for message, given in receiver.verdicts] == [(True, verdict), (False, verdict)]


def test_a_copy_of_a_request_that_is_handled_again_does_not_share_the_first_verdict() -> None:
    expected, refused, again = ExpectedCopies(), SharedVerdict(), SharedVerdict()
    expected.expect(1, refused)
    refused.settle(HandlingVerdict.REFUSE)
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
