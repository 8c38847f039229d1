"""Acknowledgement: the state machine, and direct acknowledgement by filter, handler and post (RFC 5.8)."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from messaging import (
    AcknowledgeConsumer,
    AcknowledgeFilter,
    AcknowledgeHandler,
    AcknowledgeMessageContext,
    AcknowledgeType,
    Features,
    Message,
    MessageContext,
    MessageStream,
)
from messaging.errors import ArgumentError, InvalidFilterError, UnsupportedFeatureError
from messaging.instance import Messaging
from messaging.model import DirectAcknowledgement
from messaging.services import ServiceRegistry
from tests.doubles.consumers import acknowledge, manual, numbered, reject, state
from tests.doubles.fake import PATIENCE, FakeBroker, settle_loop, until
from tests.doubles.fixtures import Connect

RECEIVED, ACKNOWLEDGED = AcknowledgeType.RECEIVED, AcknowledgeType.ACKNOWLEDGED
REJECTED, UNSUPPORTED = AcknowledgeType.REJECTED, AcknowledgeType.UNSUPPORTED


class Journal:
    """Callbacks that write down, in order, that they were called, with the state they saw."""

    def __init__(self) -> None:
        self.entries: list[tuple[str, bytes, AcknowledgeType]] = []
        self.messages: list[Message] = []
        self.done = threading.Semaphore(0)

    def note(self, what: str, message: Message) -> None:
        self.entries.append((what, message.payload, state(message)))

    def filter(self, answer: bool | Callable[[Message], bool]) -> Callable[[Message], bool]:
        def call(message: Message) -> bool:
            self.note("filter", message)
            return answer(message) if callable(answer) else answer

        return call

    def handler(self, act: Callable[[AcknowledgeHandler], object] = lambda _: None) -> Callable[[Message], None]:
        def call(message: Message) -> None:
            self.note("handler", message)
            assert isinstance(message.context, AcknowledgeMessageContext)
            act(message.context.acknowledge_handler)

        return call

    def post(self, message: Message) -> None:
        self.note("post", message)
        self.done.release()

    def stream(self, message: Message) -> None:
        self.messages.append(message)
        self.note("stream", message)
        self.done.release()

    @property
    def order(self) -> list[str]:
        return [what for what, _, _ in self.entries]

    def wait(self, count: int = 1) -> None:
        for _ in range(count):
            assert self.done.acquire(timeout=PATIENCE)
        settle_loop()


@pytest.fixture
def journal() -> Journal:
    return Journal()


def subscribe(m: Messaging, journal: Journal, **callbacks: Any) -> MessageStream:
    """A stream with direct acknowledgement, observed by the journal."""
    builder = m.acknowledge_context_builder()
    for name, callback in callbacks.items():
        getattr(builder, name)(callback)
    stream = m.subscription.subscribe(builder.message_context_builder().channel("a").build_context())
    stream.subscribe(journal.stream)
    return stream


# --- the state machine


def test_a_fresh_message_is_received_and_its_context_can_acknowledge(broker: FakeBroker, connect: Connect) -> None:
    """Scenario 69 [S]."""
    stream = manual(connect(broker))
    broker.deliver(b"1")
    message = stream.receive(PATIENCE)
    assert isinstance(message.context, AcknowledgeMessageContext)
    assert message.context.acknowledge_state is RECEIVED
    assert repr(message.context.acknowledge_handler) == "<AcknowledgeHandler RECEIVED>"
    stream.close().result(PATIENCE)


def test_without_the_feature_a_context_cannot_ask_for_it(broker: FakeBroker, connect: Connect) -> None:
    m = connect(broker)
    context = m.acknowledge_context_builder().message_context_builder().channel("a").build_context()
    broker.features = broker.features - {Features.ACKNOWLEDGE}
    with pytest.raises(UnsupportedFeatureError, match="acknowledge"):
        m.acknowledge_context_builder()
    with pytest.raises(UnsupportedFeatureError, match="acknowledge"):
        m.subscription.subscribe(context)


@pytest.mark.parametrize(
    ("first", "second", "final"),
    [
        (acknowledge, reject, ACKNOWLEDGED),
        (reject, acknowledge, REJECTED),
        (acknowledge, acknowledge, ACKNOWLEDGED),
        (reject, reject, REJECTED),
    ],
)
def test_the_first_verdict_counts(
    broker: FakeBroker,
    connect: Connect,
    first: Callable[[Message], bool],
    second: Callable[[Message], bool],
    final: AcknowledgeType,
) -> None:
    """Scenarios 70, 71 [S], 72 [I][B]."""
    stream = manual(connect(broker))
    tokens = broker.deliver(b"1")
    message = stream.receive(PATIENCE)
    assert first(message) is True
    assert state(message) is final
    assert second(message) is False
    assert second(message) is False
    assert state(message) is final
    stream.close().result(PATIENCE)
    assert (broker.acknowledged, broker.rejected) == ((tokens, []) if final is ACKNOWLEDGED else ([], tokens))


def test_a_message_passes_verdicts_on_to_its_context(broker: FakeBroker, connect: Connect) -> None:
    stream = manual(connect(broker))
    tokens = broker.deliver(*numbered(2))
    first, second = stream.receive(PATIENCE), stream.receive(PATIENCE)
    assert first.acknowledge()
    assert not first.reject()
    assert second.reject()
    assert not second.acknowledge()
    assert (state(first), state(second)) == (ACKNOWLEDGED, REJECTED)
    stream.close().result(PATIENCE)
    assert (broker.acknowledged, broker.rejected) == (tokens[:1], tokens[1:])
    made_here = Message(b"", MessageContext("a"))
    assert not made_here.acknowledge()
    assert not made_here.reject()


def test_of_racing_threads_exactly_one_wins(broker: FakeBroker, connect: Connect) -> None:
    """Scenario 73 [B]: however often the handler is fetched, there is one state."""
    stream = manual(connect(broker))
    threads, rounds = 8, 50
    barrier = threading.Barrier(threads)
    broker.deliver(*numbered(rounds))
    messages = [stream.receive(PATIENCE) for _ in range(rounds)]

    def race(number: int) -> list[bool]:
        answers = []
        for message in messages:
            assert isinstance(message.context, AcknowledgeMessageContext)
            handler = message.context.acknowledge_handler
            barrier.wait(PATIENCE)
            answers.append(handler.acknowledge() if number % 2 else handler.reject())
        return answers

    with ThreadPoolExecutor(threads) as pool:
        answers = [each.result(PATIENCE) for each in [pool.submit(race, number) for number in range(threads)]]
    for column in zip(*answers, strict=True):
        assert column.count(True) == 1
    stream.close().result(PATIENCE)
    settled = [token.number for token in (*broker.acknowledged, *broker.rejected)]
    assert sorted(settled) == [*range(1, rounds + 1)]


def test_a_verdict_from_any_thread_or_loop_counts(broker: FakeBroker, connect: Connect) -> None:
    import asyncio

    stream = manual(connect(broker))
    broker.deliver(*numbered(3))
    messages = [stream.receive(PATIENCE) for _ in range(3)]

    async def in_a_loop() -> bool:
        return acknowledge(messages[0])

    assert asyncio.run(in_a_loop())
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(acknowledge, messages[1]).result(PATIENCE)
    assert acknowledge(messages[2])
    broker.wait_acknowledged(3)
    stream.close().result(PATIENCE)


# --- filter


@pytest.mark.parametrize("accept", [True, False])
def test_a_filter_decides_before_the_message_enters_the_stream(
    broker: FakeBroker, connect: Connect, journal: Journal, accept: bool
) -> None:
    """Scenarios 74 [S], 75 [I][B] (a rejected message does not enter; post is called), 76 [S]."""
    subscribe(connect(broker), journal, filter_acknowledge=journal.filter(accept), post_acknowledge=journal.post)
    tokens = broker.deliver(b"1")
    journal.wait(2 if accept else 1)
    if accept:
        assert journal.entries == [
            ("filter", b"1", RECEIVED),
            ("post", b"1", ACKNOWLEDGED),
            ("stream", b"1", ACKNOWLEDGED),
        ]
        until(lambda: broker.acknowledged == tokens)
    else:
        assert journal.entries == [("filter", b"1", RECEIVED), ("post", b"1", REJECTED)]
        until(lambda: broker.rejected == tokens)
    settle_loop()
    assert len(broker.acknowledged) + len(broker.rejected) == 1


def test_a_filter_sorts(broker: FakeBroker, connect: Connect, journal: Journal) -> None:
    subscribe(connect(broker), journal, filter_acknowledge=lambda message: int(message.payload) % 2 == 0)
    broker.deliver(*numbered(10))
    journal.wait(5)
    assert [message.payload for message in journal.messages] == [b"0", b"2", b"4", b"6", b"8"]
    until(lambda: len(broker.acknowledged) == len(broker.rejected) == 5)


def test_a_filter_that_raises_rejects_and_the_subscription_lives(
    broker: FakeBroker, connect: Connect, journal: Journal, caplog: pytest.LogCaptureFixture
) -> None:
    """Scenario 84 [I]: rejected, by documented choice."""

    def explode(message: Message) -> bool:
        if message.payload == b"0":
            raise ValueError("cannot")
        return True

    subscribe(connect(broker), journal, filter_acknowledge=journal.filter(explode), post_acknowledge=journal.post)
    tokens = broker.deliver(*numbered(2))
    journal.wait(3)
    assert journal.entries == [
        ("filter", b"0", RECEIVED),
        ("post", b"0", REJECTED),
        ("filter", b"1", RECEIVED),
        ("post", b"1", ACKNOWLEDGED),
        ("stream", b"1", ACKNOWLEDGED),
    ]
    until(lambda: (broker.rejected, broker.acknowledged) == (tokens[:1], tokens[1:]))
    assert "acknowledge filter of 'a' raised; the message is rejected" in caplog.text
    assert "ValueError: cannot" in caplog.text


# --- handler


@pytest.mark.parametrize(
    ("act", "final"), [(AcknowledgeHandler.acknowledge, ACKNOWLEDGED), (AcknowledgeHandler.reject, REJECTED)]
)
def test_a_handler_acts_then_post_then_the_stream(
    broker: FakeBroker,
    connect: Connect,
    journal: Journal,
    act: Callable[[AcknowledgeHandler], bool],
    final: AcknowledgeType,
) -> None:
    """Scenario 77 [S]: post is called once, for a reject as well; what is rejected does not enter (75)."""
    subscribe(connect(broker), journal, handle_acknowledge=journal.handler(act), post_acknowledge=journal.post)
    tokens = broker.deliver(b"1")
    journal.wait(2 if final is ACKNOWLEDGED else 1)
    entries = [("handler", b"1", RECEIVED), ("post", b"1", final)]
    if final is ACKNOWLEDGED:
        entries.append(("stream", b"1", final))
    assert journal.entries == entries
    until(lambda: (broker.acknowledged if final is ACKNOWLEDGED else broker.rejected) == tokens)


def test_a_handler_that_takes_two_gets_the_acknowledge_handler(
    broker: FakeBroker, connect: Connect, journal: Journal
) -> None:
    def handle(message: Message, handler: AcknowledgeHandler) -> None:
        journal.note("handler", message)
        assert handler.acknowledge()

    subscribe(connect(broker), journal, handle_acknowledge=handle)
    broker.deliver(b"1")
    journal.wait()
    assert journal.entries == [("handler", b"1", RECEIVED), ("stream", b"1", ACKNOWLEDGED)]


def test_optional_parameters_do_not_make_a_handler_take_two(
    broker: FakeBroker, connect: Connect, journal: Journal
) -> None:
    calls: list[object] = []

    def handle(message: Message, extra: object = None, *more: object, key: int = 1) -> None:
        calls.append(extra)

    subscribe(connect(broker), journal, handle_acknowledge=handle)
    broker.deliver(b"1")
    journal.wait()
    assert calls == [None]


def test_a_callable_handler_yields_to_a_filter(broker: FakeBroker, connect: Connect, journal: Journal) -> None:
    """Scenario 78 [I]."""
    subscribe(
        connect(broker),
        journal,
        filter_acknowledge=journal.filter(True),
        handle_acknowledge=journal.handler(AcknowledgeHandler.reject),
        post_acknowledge=journal.post,
    )
    broker.deliver(b"1")
    journal.wait(2)
    assert journal.order == ["filter", "post", "stream"]


def test_a_handler_by_target_is_called_after_a_filter(
    broker: FakeBroker, connect: Connect, journal: Journal, registry: ServiceRegistry
) -> None:
    """Scenario 78 [I], the other half."""
    registry.register(AcknowledgeConsumer, journal.handler(AcknowledgeHandler.reject), {"kind": "mine"})
    subscribe(
        connect(broker),
        journal,
        filter_acknowledge=journal.filter(True),
        handle_acknowledge="(kind=mine)",
        post_acknowledge=journal.post,
    )
    broker.deliver(b"1")
    journal.wait(2)
    assert journal.entries == [
        ("filter", b"1", RECEIVED),
        ("handler", b"1", ACKNOWLEDGED),
        ("post", b"1", ACKNOWLEDGED),
        ("stream", b"1", ACKNOWLEDGED),
    ]


def test_a_handler_that_abstains_leaves_the_verdict_to_the_consumer(
    broker: FakeBroker, connect: Connect, journal: Journal
) -> None:
    """Scenario 79 [I]: RECEIVED, post is not called, and the stream may act later; then post is."""
    subscribe(connect(broker), journal, handle_acknowledge=journal.handler(), post_acknowledge=journal.post)
    tokens = broker.deliver(b"1")
    journal.wait()
    assert journal.entries == [("handler", b"1", RECEIVED), ("stream", b"1", RECEIVED)]
    message = journal.messages[0]
    assert state(message) is RECEIVED  # nor is it acknowledged because the observer returned
    assert acknowledge(message)
    journal.wait()
    assert journal.entries[2:] == [("post", b"1", ACKNOWLEDGED)]
    until(lambda: broker.acknowledged == tokens)


def test_a_handler_that_raises_rejects_and_the_subscription_lives(
    broker: FakeBroker, connect: Connect, journal: Journal, caplog: pytest.LogCaptureFixture
) -> None:
    def explode(handler: AcknowledgeHandler) -> None:
        raise ValueError("cannot")

    subscribe(connect(broker), journal, handle_acknowledge=journal.handler(explode), post_acknowledge=journal.post)
    tokens = broker.deliver(*numbered(2))
    journal.wait(2)
    assert journal.order == ["handler", "post"] * 2
    until(lambda: broker.rejected == tokens)
    assert "acknowledge handler of 'a' raised; the message is rejected" in caplog.text


def test_a_handler_that_acts_and_then_raises_has_acted(broker: FakeBroker, connect: Connect, journal: Journal) -> None:
    def act(handler: AcknowledgeHandler) -> None:
        handler.acknowledge()
        raise ValueError("afterwards")

    subscribe(connect(broker), journal, handle_acknowledge=journal.handler(act), post_acknowledge=journal.post)
    broker.deliver(b"1")
    journal.wait(2)
    assert journal.order == ["handler", "post", "stream"]
    assert state(journal.messages[0]) is ACKNOWLEDGED


# --- post


def test_post_alone_is_called_once_after_the_consumer_acted(
    broker: FakeBroker, connect: Connect, journal: Journal
) -> None:
    """Scenario 80 [S]."""
    subscribe(connect(broker), journal, post_acknowledge=journal.post)
    broker.deliver(*numbered(2))
    journal.wait(2)
    assert journal.entries == [("stream", b"0", RECEIVED), ("stream", b"1", RECEIVED)]
    first, second = journal.messages
    assert acknowledge(first)
    assert reject(second)
    assert not acknowledge(second)
    journal.wait(2)
    assert journal.entries[2:] == [("post", b"0", ACKNOWLEDGED), ("post", b"1", REJECTED)]


def test_a_post_that_raises_is_logged_and_the_acknowledgement_stands(
    broker: FakeBroker, connect: Connect, journal: Journal, caplog: pytest.LogCaptureFixture
) -> None:
    """Scenario 85 [I]: and the message still enters the stream."""

    def explode(message: Message) -> None:
        journal.note("post", message)
        raise ValueError("cannot")

    subscribe(connect(broker), journal, filter_acknowledge=journal.filter(True), post_acknowledge=explode)
    tokens = broker.deliver(*numbered(2))
    journal.wait(2)
    assert journal.order == ["filter", "post", "stream"] * 2
    until(lambda: broker.acknowledged == tokens)
    assert caplog.text.count("post-acknowledge callback of 'a' raised") == 2


def test_post_does_not_run_for_a_verdict_in_vain(broker: FakeBroker, connect: Connect, journal: Journal) -> None:
    m = connect(broker)
    subscribe(m, journal, post_acknowledge=journal.post)
    broker.deliver(b"1")
    journal.wait()
    broker.lose()
    broker.wait_open(2)
    assert not acknowledge(journal.messages[0])
    assert journal.order == ["stream"]


def test_post_sees_the_value_and_the_context_of_the_message(
    broker: FakeBroker, connect: Connect, journal: Journal
) -> None:
    m = connect(broker)
    values: list[object] = []
    context = (
        m.acknowledge_context_builder()
        .filter_acknowledge(lambda message: message.value()["x"] == 1)
        .post_acknowledge(lambda message: values.append((message.value(), message.context.channel)))
        .message_context_builder()
        .channel("a")
        .build_context()
    )
    m.subscription.subscribe(context, model=dict[str, int]).subscribe(journal.stream)
    broker.deliver(b'{"x": 1}', content_type="application/json")
    journal.wait()
    assert values == [({"x": 1}, "a")]


# --- targets


def test_targets_find_their_services_whenever_a_message_arrives(
    broker: FakeBroker, connect: Connect, journal: Journal, registry: ServiceRegistry
) -> None:
    """Scenario 81 [S]."""
    subscribe(
        connect(broker),
        journal,
        filter_acknowledge="(kind=filter)",
        post_acknowledge="(kind=post)",
    )
    registry.register(AcknowledgeConsumer, journal.post, {"kind": "post"})
    with registry.register(AcknowledgeFilter, journal.filter(False), {"kind": "filter"}):
        broker.deliver(b"0")
        journal.wait()
    registry.register(AcknowledgeFilter, journal.filter(True), {"kind": "filter"})
    broker.deliver(b"1")
    journal.wait(2)
    assert journal.entries == [
        ("filter", b"0", RECEIVED),
        ("post", b"0", REJECTED),
        ("filter", b"1", RECEIVED),
        ("post", b"1", ACKNOWLEDGED),
        ("stream", b"1", ACKNOWLEDGED),
    ]


def test_of_several_services_the_highest_ranking_is_used(
    broker: FakeBroker, connect: Connect, journal: Journal, registry: ServiceRegistry
) -> None:
    registry.register(AcknowledgeFilter, lambda _: False, {"kind": "filter"})
    registry.register(AcknowledgeFilter, journal.filter(True), {"kind": "filter", "service.ranking": 5})
    subscribe(connect(broker), journal, filter_acknowledge="(kind=filter)")
    broker.deliver(b"1")
    journal.wait()
    assert journal.order == ["filter", "stream"]


def test_a_service_of_another_interface_is_no_filter(
    broker: FakeBroker, connect: Connect, journal: Journal, registry: ServiceRegistry
) -> None:
    registry.register(AcknowledgeConsumer, lambda _: pytest.fail("called"), {"kind": "filter"})
    subscribe(connect(broker), journal, filter_acknowledge="(kind=filter)")
    broker.deliver(b"1")
    journal.wait()
    assert journal.order == ["stream"]


def test_a_target_without_service_is_warned_of_and_ignored(
    broker: FakeBroker, connect: Connect, journal: Journal, caplog: pytest.LogCaptureFixture
) -> None:
    """Scenarios 81 [S], 82 [I]: as if there were no filter: not acknowledged by accident."""
    subscribe(
        connect(broker),
        journal,
        filter_acknowledge="(kind=nobody)",
        post_acknowledge=journal.post,
    )
    broker.deliver(b"1")
    journal.wait()
    assert "acknowledge filter (kind=nobody) of 'a' matches no service and is ignored" in caplog.text
    assert journal.entries == [("stream", b"1", RECEIVED)]
    assert state(journal.messages[0]) is RECEIVED
    assert broker.acknowledged == []
    assert reject(journal.messages[0])
    journal.wait()
    assert journal.order == ["stream", "post"]


def test_a_target_without_service_and_auto_acknowledge_acknowledges(
    broker: FakeBroker, connect: Connect, journal: Journal
) -> None:
    """Scenario 82 [I], its exception."""
    m = connect(broker)
    context = (
        m.acknowledge_context_builder()
        .filter_acknowledge("(kind=nobody)")
        .message_context_builder()
        .channel("a")
        .extension_entry("autoAcknowledge", True)
        .build_context()
    )
    m.subscription.subscribe(context).subscribe(journal.stream)
    tokens = broker.deliver(b"1")
    journal.wait()
    assert journal.entries == [("stream", b"1", ACKNOWLEDGED)]
    assert broker.acknowledged == tokens


@pytest.mark.parametrize("step", ["filter_acknowledge", "handle_acknowledge", "post_acknowledge"])
def test_a_factory_of_a_service_that_raises_costs_no_stream(
    broker: FakeBroker,
    connect: Connect,
    journal: Journal,
    registry: ServiceRegistry,
    caplog: pytest.LogCaptureFixture,
    step: str,
) -> None:
    """A prototype's factory is user code like the callback itself."""

    def factory() -> object:
        raise ValueError("no service today")

    interface = AcknowledgeFilter if step == "filter_acknowledge" else AcknowledgeConsumer
    with registry.register(interface, factory, {"kind": "broken"}, scope="prototype"):
        stream = subscribe(connect(broker), journal, **{step: "(kind=broken)"})
        broker.deliver(b"0")
        if step == "post_acknowledge":
            journal.wait()
            assert acknowledge(journal.messages[0])  # the acknowledgement stands
        until(lambda: "no service today" in caplog.text)
    registry.register(AcknowledgeFilter, lambda _: True, {"kind": "broken"})
    registry.register(AcknowledgeConsumer, lambda _: None, {"kind": "broken"})
    broker.deliver(b"1")
    until(lambda: journal.messages and journal.messages[-1].payload == b"1", "the stream goes on")
    stream.close().result(PATIENCE)


# --- automatic


def test_auto_acknowledge_comes_first_and_leaves_nothing_to_decide(
    broker: FakeBroker, connect: Connect, journal: Journal
) -> None:
    """Scenario 83 [S]: acknowledged on arrival; a reject fails."""
    answers: list[bool] = []
    m = connect(broker)
    context = (
        m.acknowledge_context_builder()
        .handle_acknowledge(lambda message: answers.append(reject(message)))
        .message_context_builder()
        .channel("a")
        .extension_entry("autoAcknowledge", True)
        .build_context()
    )
    m.subscription.subscribe(context).subscribe(journal.stream)
    tokens = broker.deliver(b"1")
    journal.wait()
    assert answers == [False]
    assert journal.entries == [("stream", b"1", ACKNOWLEDGED)]
    assert broker.acknowledged == tokens
    assert broker.rejected == []


def test_without_acknowledgement_a_filter_still_decides_what_enters(
    broker: FakeBroker, connect: Connect, journal: Journal
) -> None:
    subscribe(connect(broker), journal, filter_acknowledge=lambda message: message.payload == b"1")
    broker.deliver(*numbered(3), qos0=True)
    journal.wait()
    assert journal.entries == [("stream", b"1", UNSUPPORTED)]


# --- the builder


@pytest.mark.parametrize("step", ["filter_acknowledge", "handle_acknowledge", "post_acknowledge"])
def test_a_callback_is_a_callable_or_a_target(connect: Connect, step: str) -> None:
    builder = connect().acknowledge_context_builder()
    assert getattr(builder, step)(lambda _: True) is builder
    assert getattr(builder, step)("(a=b)") is builder
    with pytest.raises(InvalidFilterError):
        getattr(builder, step)("(a=b")
    with pytest.raises(ArgumentError, match=rf"{step} takes a callable or an LDAP target \(str\), not int"):
        getattr(builder, step)(7)


def test_builders_share_nothing_and_what_was_built_stays(connect: Connect) -> None:
    builder = connect().acknowledge_context_builder()
    first = builder.filter_acknowledge("(a=1)").message_context_builder().channel("a").build_context()
    second = builder.filter_acknowledge("(a=2)").message_context_builder().channel("a").build_context()
    third = connect().acknowledge_context_builder().message_context_builder().channel("a").build_context()
    targets = []
    for context in (first, second, third):
        assert isinstance(context._acknowledgement, DirectAcknowledgement)
        targets.append(context._acknowledgement.filter)
    assert targets == ["(a=1)", "(a=2)", None]


def test_direct_acknowledgement_survives_with_context(connect: Connect) -> None:
    m = connect()
    with_filter = m.acknowledge_context_builder().filter_acknowledge("(a=1)").message_context_builder()
    context = with_filter.channel("a").build_context()
    copied = m.context_builder().with_context(context).extension_entry("qos", "1").build_context()
    assert copied._acknowledgement is context._acknowledgement
    with m.subscribe("a") as stream:
        m.publish("a", b"1").result(PATIENCE)
        received = stream.receive(PATIENCE).context
    assert m.context_builder().with_context(received).build_context()._acknowledgement is None


def test_the_context_of_a_received_message_can_be_subscribed_with(connect: Connect) -> None:
    """It is a context like any other: its channel decides."""
    m = connect()
    with m.subscribe("a") as stream:
        m.publish("a", b"1").result(PATIENCE)
        message = stream.receive(PATIENCE)
        with m.subscription.subscribe(message.context) as other:
            m.publish("a", b"2").result(PATIENCE)
            assert other.receive(PATIENCE).payload == b"2"
