"""What ``tests.lateness`` delays."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import messaging
from messaging import DeadlineError, Messaging
from messaging.testing.waiting import PATIENCE, results
from tests import lateness


@pytest.fixture
def m() -> Iterator[Messaging]:
    with messaging.connect("memory://lateness") as found:
        yield found


def test_a_message_is_published_before_a_late_subscription_is_confirmed(
    m: Messaging, monkeypatch: pytest.MonkeyPatch
) -> None:
    lateness.delay(monkeypatch, subscriptions=10 * PATIENCE, deliveries=0)
    stream = m.subscribe("a")
    m.publish("a", b"1").result(PATIENCE)
    assert not stream.ready.done()
    stream.close().result(PATIENCE)


def test_a_publisher_has_its_confirmation_before_a_late_delivery(m: Messaging, monkeypatch: pytest.MonkeyPatch) -> None:
    lateness.delay(monkeypatch, subscriptions=0, deliveries=10 * PATIENCE)
    with m.subscribe("a") as stream:
        m.publish("a", b"1").result(PATIENCE)
        with pytest.raises(DeadlineError):
            stream.receive(0.01)


def test_late_deliveries_keep_their_order(m: Messaging, monkeypatch: pytest.MonkeyPatch) -> None:
    lateness.delay(monkeypatch, subscriptions=0.01, deliveries=0.01)
    with m.subscribe("a") as stream:
        results(m.publish("a", b"%d" % number) for number in range(200))
        assert [stream.receive(PATIENCE).payload for _ in range(200)] == [b"%d" % number for number in range(200)]
