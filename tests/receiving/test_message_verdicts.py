"""``Message.acknowledge()`` and ``Message.reject()``: the short way to the handler of the context, and no other."""

from __future__ import annotations

from collections.abc import Callable

from messaging import AcknowledgeType, Message, MessageContext
from messaging.testing.tables import table
from messaging.testing.waiting import PATIENCE, eventually
from tests.doubles.consumers import acknowledge, manual, reject, state
from tests.doubles.fake import FakeBroker, settle_loop
from tests.doubles.fixtures import Connect

VERDICTS = [Message.acknowledge, Message.reject, acknowledge, reject]
ACCEPTING = (Message.acknowledge, acknowledge)


@table("first", VERDICTS)
@table("second", VERDICTS)
def test_the_first_verdict_counts_whichever_way_it_was_given(
    broker: FakeBroker, connect: Connect, first: Callable[[Message], bool], second: Callable[[Message], bool]
) -> None:
    """Scenarios 69 [S], 70, 71 [S], 72 [I][B]."""
    stream = manual(connect(broker))
    tokens = broker.deliver(b"1")
    message = stream.receive(PATIENCE)
    assert state(message) is AcknowledgeType.RECEIVED
    assert first(message) is True
    decided = AcknowledgeType.ACKNOWLEDGED if first in ACCEPTING else AcknowledgeType.REJECTED
    for _ in range(2):
        assert state(message) is decided
        assert second(message) is False
    eventually(lambda: broker.acknowledged or broker.rejected)
    settle_loop()
    assert (broker.acknowledged, broker.rejected) == ((tokens, []) if first in ACCEPTING else ([], tokens))


@table("verdict", [Message.acknowledge, Message.reject])
def test_a_verdict_in_the_observer_counts(
    broker: FakeBroker, connect: Connect, verdict: Callable[[Message], bool]
) -> None:
    answers: list[bool] = []
    connect(broker).subscribe("a").subscribe(lambda message: answers.append(verdict(message)))
    broker.deliver(b"1")
    eventually(lambda: answers and (broker.acknowledged or broker.rejected))
    settle_loop()
    assert answers == [True]
    assert [len(broker.acknowledged), len(broker.rejected)] == ([1, 0] if verdict is Message.acknowledge else [0, 1])


@table("verdict", [Message.acknowledge, Message.reject])
def test_a_verdict_on_a_message_that_was_not_received_is_refused(verdict: Callable[[Message], bool]) -> None:
    assert verdict(Message(b"", MessageContext("a"))) is False
