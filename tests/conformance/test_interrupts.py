"""A signal handler that raises while a program publishes or receives loses no message, on any adapter."""

from __future__ import annotations

from messaging import Features, Messaging
from messaging.testing.conformance.backends import Backend
from messaging.testing.conformance.helpers import feature
from messaging.testing.waiting import PATIENCE, eventually
from tests.interrupts import RECEIVING_MODULES, again, interrupt_everywhere


@feature(Features.ACKNOWLEDGE)
def test_every_message_arrives_and_is_settled_whatever_is_interrupted(
    backend: Backend, m: Messaging, channel: str
) -> None:
    with m.subscribe(channel, prefetch=2, **backend.reliable) as stream:

        def run() -> None:
            for payload in (b"1", b"2"):
                m.publish(channel, payload, **backend.reliable).result(PATIENCE)
            assert [again(lambda: stream.receive(PATIENCE)).payload for _ in range(2)] == [b"1", b"2"]

        def check() -> None:
            counters = stream.counters
            eventually(lambda: counters.acknowledged >= counters.delivered - 1, "all but the last one acknowledged")
            assert counters.delivered == counters.received

        assert interrupt_everywhere(run, check, *RECEIVING_MODULES) > 50
