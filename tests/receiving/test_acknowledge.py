"""Direct acknowledgement by filter, handler and post (RFC 5.8): effects on the wire, failures, the builder.

The conformance suite (``test_acknowledge``) has the state machine and the order of the callbacks, for every adapter.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from messaging import (
    AcknowledgeConsumer,
    AcknowledgeFilter,
    AcknowledgeType,
    Features,
    Message,
    MessageContext,
    MessageStream,
)
from messaging.errors import ArgumentError, InvalidFilterError, UnsupportedFeatureError
from messaging.instance import Messaging
from messaging.model.acknowledge import Settler
from messaging.services import ServiceRegistry
from messaging.testing.tables import table
from messaging.testing.waiting import PATIENCE, Recorder, eventually, in_thread, results
from tests.doubles.consumers import acknowledge, manual, reject, state
from tests.doubles.fake import FakeBroker, settle_loop
from tests.doubles.fixtures import Connect

RECEIVED, ACKNOWLEDGED = AcknowledgeType.RECEIVED, AcknowledgeType.ACKNOWLEDGED
REJECTED, UNSUPPORTED = AcknowledgeType.REJECTED, AcknowledgeType.UNSUPPORTED


class Journal(Recorder[tuple[str, bytes, AcknowledgeType]]):
    """Callbacks that write down, in order, that they were called, with the state they saw."""

    def __init__(self) -> None:
        super().__init__()
        self.messages: list[Message] = []

    def for_row(self, _: object) -> Journal:
        return Journal()

    def note(self, what: str, message: Message) -> None:
        self.append((what, message.payload, state(message)))

    def filter(self, message: Message) -> bool:
        self.note("filter", message)
        return True

    def post(self, message: Message) -> None:
        self.note("post", message)

    def stream(self, message: Message) -> None:
        self.messages.append(message)
        self.note("stream", message)

    def wait(self, count: int = 1) -> None:
        """Wait for so many calls of ``post`` and ``stream``."""
        self.wait_until(lambda calls: sum(what in ("post", "stream") for what, _, _ in calls) >= count, "calls")
        settle_loop()


@pytest.fixture
def journal() -> Journal:
    return Journal()


def subscribe(
    m: Messaging, journal: Journal, model: Any = None, extensions: dict[str, Any] | None = None, **callbacks: Any
) -> MessageStream:
    """A stream with direct acknowledgement, observed by the journal."""
    builder = m.acknowledge_context_builder()
    for name, callback in callbacks.items():
        getattr(builder, name)(callback)
    context = builder.message_context_builder().channel("a").extensions(extensions or {}).build_context()
    stream = m.subscription.subscribe(context, model=model)
    stream.subscribe(journal.stream)
    return stream


# --- the state machine


def test_without_the_feature_a_context_cannot_ask_for_it(broker: FakeBroker, m: Messaging) -> None:
    context = m.acknowledge_context_builder().message_context_builder().channel("a").build_context()
    broker.features = broker.features - {Features.ACKNOWLEDGE}
    with pytest.raises(UnsupportedFeatureError, match="acknowledge"):
        m.acknowledge_context_builder()
    with pytest.raises(UnsupportedFeatureError, match="acknowledge"):
        m.subscription.subscribe(context)


class Meeting:
    """Settles a message once two threads are about to, both of which have seen it unsettled."""

    def __init__(self, settler: Settler) -> None:
        self._settler = settler
        self._both = threading.Barrier(2)

    def settle(self, incoming: Any, acknowledged: bool) -> bool:
        self._both.wait(PATIENCE)
        return self._settler.settle(incoming, acknowledged)


@table("other", [acknowledge, reject], ids=["acknowledge", "reject"])
def test_of_two_threads_that_settle_a_message_at_once_one_wins(
    broker: FakeBroker, connect: Connect, other: Callable[[Message], bool]
) -> None:
    """Scenario 73 [B]: its verdict alone reaches the broker."""
    stream = manual(connect(broker))
    tokens = broker.deliver(b"1")
    message = stream.receive(PATIENCE)
    context: Any = message.context
    context.settler = Meeting(context.settler)
    first, second = results([in_thread(acknowledge, message), in_thread(other, message)])
    assert (first, second) in ((True, False), (False, True))
    verdict = ACKNOWLEDGED if first or other is acknowledge else REJECTED
    assert state(message) is verdict
    sent = {ACKNOWLEDGED: broker.acknowledged, REJECTED: broker.rejected}
    eventually(lambda: sent[verdict] == tokens, "the verdict at the broker")
    settle_loop()
    assert {which: [*given] for which, given in sent.items() if given} == {verdict: tokens}


# --- handler


def test_optional_parameters_of_a_handler_are_left_out(broker: FakeBroker, connect: Connect, journal: Journal) -> None:
    calls: list[object] = []

    def handle(message: Message, extra: object = None, *more: object, key: int = 1) -> None:
        calls.append(extra)

    subscribe(connect(broker), journal, handle_acknowledge=handle)
    broker.deliver(b"1")
    journal.wait()
    assert calls == [None]


# --- post


def test_post_is_not_called_for_a_verdict_after_a_loss(broker: FakeBroker, connect: Connect, journal: Journal) -> None:
    """Scenario 88 [I]: such a verdict is refused."""
    subscribe(connect(broker), journal, post_acknowledge=journal.post)
    broker.deliver(b"1")
    journal.wait()
    broker.lose_and_reconnect()
    assert not acknowledge(journal.messages[0])
    assert [what for what, _, _ in journal] == ["stream"]


def test_post_sees_the_value_and_the_context_of_it(broker: FakeBroker, connect: Connect, journal: Journal) -> None:
    values: list[object] = []
    subscribe(
        connect(broker),
        journal,
        dict[str, int],
        filter_acknowledge=lambda message: message.value()["x"] == 1,
        post_acknowledge=lambda message: values.append((message.value(), message.context.channel)),
    )
    broker.deliver(b'{"x": 1}', content_type="application/json")
    journal.wait()
    assert values == [({"x": 1}, "a")]


# --- targets


def test_an_absent_target_with_auto_acknowledge_acknowledges(
    broker: FakeBroker, connect: Connect, journal: Journal
) -> None:
    """Scenario 82 [I], its exception."""
    subscribe(connect(broker), journal, extensions={"autoAcknowledge": True}, filter_acknowledge="(kind=absent)")
    tokens = broker.deliver(b"1")
    journal.wait()
    assert journal == [("stream", b"1", ACKNOWLEDGED)]
    assert broker.acknowledged == tokens


@table("step", ["filter_acknowledge", "handle_acknowledge", "post_acknowledge"])
def test_a_stream_goes_on_when_the_factory_of_a_callback_service_raises(
    broker: FakeBroker,
    connect: Connect,
    journal: Journal,
    registry: ServiceRegistry,
    caplog: pytest.LogCaptureFixture,
    step: str,
) -> None:
    """Scenario 84 [I]: a prototype's factory is user code like the callback itself."""

    def factory() -> object:
        raise ValueError("no service today")

    interface = AcknowledgeFilter if step == "filter_acknowledge" else AcknowledgeConsumer
    with registry.register(interface, factory, {"kind": "broken"}, scope="prototype"):
        subscribe(connect(broker), journal, **{step: "(kind=broken)"})
        broker.deliver(b"0")
        if step == "post_acknowledge":
            journal.wait()
            assert acknowledge(journal.messages[0])  # the acknowledgement stands
        eventually(lambda: "no service today" in caplog.text)
    repaired = [
        registry.register(AcknowledgeFilter, lambda _: True, {"kind": "broken"}),
        registry.register(AcknowledgeConsumer, lambda _: None, {"kind": "broken"}),
    ]
    broker.deliver(b"1")
    eventually(lambda: journal.messages and journal.messages[-1].payload == b"1", "the stream goes on")
    for registration in repaired:
        registration.unregister()


# --- the builder


@table("step", ["filter_acknowledge", "handle_acknowledge", "post_acknowledge"])
def test_a_callback_is_a_callable_or_a_target(connect: Connect, step: str) -> None:
    builder = connect().acknowledge_context_builder()
    assert getattr(builder, step)(lambda _: True) is builder
    assert getattr(builder, step)("(a=b)") is builder
    with pytest.raises(InvalidFilterError):
        getattr(builder, step)("(a=b")
    with pytest.raises(ArgumentError, match=rf"{step} takes a callable or an LDAP target \(str\), not int"):
        getattr(builder, step)(7)


def test_builders_share_nothing_and_built_contexts_stay(connect: Connect, journal: Journal) -> None:
    m = connect()
    builder = m.acknowledge_context_builder()
    answers = {"a": True, "b": False}
    contexts = [
        builder.filter_acknowledge(lambda _, answer=answer: answer)
        .message_context_builder()
        .channel(name)
        .build_context()
        for name, answer in answers.items()
    ]
    contexts.append(m.acknowledge_context_builder().message_context_builder().channel("c").build_context())
    streams = [m.subscription.subscribe(context) for context in contexts]
    for stream, channel in zip(streams, "abc", strict=True):
        stream.subscribe(journal.stream)
        m.publish(channel, channel.encode()).result(PATIENCE)
    journal.wait(2)
    assert sorted(journal) == [("stream", b"a", ACKNOWLEDGED), ("stream", b"c", RECEIVED)]


def test_a_copied_context_keeps_its_callbacks_and_a_received_one_has_none(connect: Connect, journal: Journal) -> None:
    m = connect()
    with_filter = m.acknowledge_context_builder().filter_acknowledge(journal.filter).message_context_builder()
    context = with_filter.channel("a").build_context()
    copied = m.context_builder().with_context(context).extension_entry("qos", "1").build_context()
    with m.subscription.subscribe(copied) as stream:
        m.publish("a", b"1").result(PATIENCE)
        message = stream.receive(PATIENCE)
        assert journal == [("filter", b"1", RECEIVED)]
    received = m.context_builder().with_context(message.context).build_context()
    with m.subscription.subscribe(received) as stream:
        m.publish("a", b"2").result(PATIENCE)
        assert stream.receive(PATIENCE).payload == b"2"
    assert len(journal) == 1


# --- ``Message.acknowledge()`` and ``Message.reject()``: the short way to the handler of the context


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
