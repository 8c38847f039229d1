"""Copies of requests: counted, bounded, forgotten after a while, and settled as their request is."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from messaging import Message, MessageContext
from messaging.receiving import Verdict
from messaging.replyto import request_copies
from messaging.replyto.request_copies import ExpectedCopies, SharedVerdict, identity_of


class Holder:
    """A subscription that keeps the verdicts it is given."""

    def __init__(self) -> None:
        self.verdicts: list[tuple[Message, Verdict]] = []

    def settle(self, request: Message, verdict: Verdict) -> None:
        self.verdicts.append((request, verdict))


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


def test_no_more_than_a_few_thousand_copies_are_expected() -> None:
    expected = ExpectedCopies()
    for number in range(10_000):
        expected.expect(number, SharedVerdict())
    assert expected.take(0) is None
    assert expected.take(9_999) is not None
    assert sum(expected.take(number) is not None for number in range(10_000)) == 4_095


def test_a_copy_that_does_not_come_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(request_copies.time, "monotonic", lambda: now)
    expected = ExpectedCopies()
    expected.expect(1, SharedVerdict())
    now += 59
    later = SharedVerdict()
    expected.expect(1, later)
    now += 2
    assert expected.take(1) is later
    assert expected.take(1) is None


@pytest.mark.parametrize("verdict", list(Verdict))
def test_copies_share_the_verdict_whether_they_come_before_or_after_it(verdict: Verdict) -> None:
    claim, holder = SharedVerdict(), Holder()
    early, late = Message(b"1", MessageContext("a")), Message(b"1", MessageContext("a"))
    claim.add(holder, early)
    assert holder.verdicts == []
    claim.settle(verdict)
    claim.add(holder, late)
    assert [(message is early, given) for message, given in holder.verdicts] == [(True, verdict), (False, verdict)]


def test_copies_are_told_by_what_they_carry() -> None:
    def identity(payload: bytes, channel: str, reply_to: str | None, correlation_id: str | None) -> int:
        context = MessageContext(channel, None, "x/y", None, correlation_id, reply_to)
        return identity_of(Message(payload, context))

    assert identity(b"1", "a", "r", "c") == identity(b"1", "a", "r", "c")
    others = {identity(*each) for each in [(b"2", "a", "r", "c"), (b"1", "b", "r", "c"), (b"1", "a", "s", "c")]}
    others |= {identity(b"1", "a", "r", "d"), identity(b"1", "a", None, "c"), identity(b"1", "a", "r", None)}
    assert len(others) == 6
    assert identity(b"1", "a", "r", "c") not in others


def test_no_more_than_a_few_thousand_equal_copies_are_expected() -> None:
    expected = ExpectedCopies()
    for _ in range(10_000):
        expected.expect(1, SharedVerdict())
    assert sum(expected.take(1) is not None for _ in range(10_000)) == 4_096


def test_a_copy_is_expected_while_its_subscription_is_full(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slow handler: the copy waits at the broker, for longer than a minute."""
    now = 1000.0
    monkeypatch.setattr(request_copies.time, "monotonic", lambda: now)
    expected, claim = ExpectedCopies(), SharedVerdict()
    expected.expect(1, claim)
    expected.expect(2, claim)
    now += 500
    expected.was_full()
    assert expected.take(1) is claim
    now += 61
    assert expected.take(2) is None


def test_a_copy_of_a_request_that_is_handled_again_is_not_taken_for_the_first_attempt() -> None:
    expected, refused, again = ExpectedCopies(), SharedVerdict(), SharedVerdict()
    expected.expect(1, refused)
    refused.settle(Verdict.REFUSE)
    expected.expect(1, again)
    assert expected.take(1) is again
    expected.expect(1, refused)
    assert expected.take(1) is None


def test_a_copy_that_arrived_before_its_request_is_not_expected(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(request_copies.time, "monotonic", lambda: now)
    expected = ExpectedCopies()
    expected.arrived_early(1)
    expected.expect(1, SharedVerdict())
    assert expected.take(1) is None
    expected.arrived_early(1)
    now += 61
    expected.expect(1, SharedVerdict())
    assert expected.take(1) is not None


@pytest.mark.parametrize("is_known", [True, False])
def test_a_copy_that_may_not_exist_is_expected_for_a_second(monkeypatch: pytest.MonkeyPatch, is_known: bool) -> None:
    now = 1000.0
    monkeypatch.setattr(request_copies.time, "monotonic", lambda: now)
    expected, holder = ExpectedCopies(), Holder()
    claim = SharedVerdict(holder)
    for _ in range(2):
        expected.expect(1, claim, is_uncertain=is_known)
    if not is_known:
        expected.doubt(Holder())
        now += 2
        assert expected.take(1) is claim
        expected.doubt(holder)
    else:
        assert expected.take(1) is claim
        now += 2
    assert expected.take(1) is None
