"""Acknowledgement (RFC 5.8): states, verdicts, direct callbacks, automatic acknowledgement."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

import pytest
from reactivex import operators as ops

from messaging import (
    AcknowledgeConsumer,
    AcknowledgeFilter,
    AcknowledgeHandler,
    AcknowledgeType,
    Features,
    InvalidFilterError,
    Message,
    Messaging,
)
from messaging.testing.conformance.backends import Backend
from messaging.testing.conformance.helpers import (
    PATIENCE,
    Inbox,
    ack_state,
    acknowledgement,
    direct,
    eventually,
    feature,
    nothing_more,
    publish,
    receive,
)

RECEIVED, ACKNOWLEDGED, REJECTED = AcknowledgeType.RECEIVED, AcknowledgeType.ACKNOWLEDGED, AcknowledgeType.REJECTED

acknowledge = feature(Features.ACKNOWLEDGE)


class Log:
    """What happened, in order. Thread safe."""

    def __init__(self) -> None:
        self.entries: list[str] = []

    def note(self, what: str, answer: Any = None) -> Any:
        def callback(message: Message) -> Any:
            self.entries.append(f"{what} {message.payload.decode()} {ack_state(message).value}")
            return answer

        return callback


def race(handlers: list[AcknowledgeHandler]) -> list[str]:
    """Acknowledge by every other handler, reject by the rest, all at once; the verdicts that were accepted."""
    go = threading.Barrier(len(handlers))
    winners: list[str] = []

    def act(verdict: str, attempt: Callable[[], bool]) -> None:
        go.wait(PATIENCE)
        if attempt():
            winners.append(verdict)

    attempts = [
        ("REJECTED", handler.reject) if number % 2 else ("ACKNOWLEDGED", handler.acknowledge)
        for number, handler in enumerate(handlers)
    ]
    threads = [threading.Thread(target=act, args=attempt) for attempt in attempts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    return winners


# --- the state machine


@acknowledge
def test_a_verdict_is_given_once(backend: Backend, m: Messaging, channel: str) -> None:
    """Scenarios 69 [S], 70 [S], 71 [S], 72 [I]: RECEIVED, then ACKNOWLEDGED or REJECTED, for good."""
    with m.subscription.subscribe(direct(m, channel)) as stream:
        publish(m, channel, [b"1", b"2"], **backend.reliable)
        one, two = acknowledgement(stream.receive(PATIENCE)), acknowledgement(stream.receive(PATIENCE))
        assert (one.acknowledge_state, two.acknowledge_state) == (RECEIVED, RECEIVED)
        assert one.acknowledge_handler.acknowledge() is True
        assert one.acknowledge_state is ACKNOWLEDGED
        assert one.acknowledge_handler.reject() is False
        assert one.acknowledge_handler.acknowledge() is False
        assert one.acknowledge_state is ACKNOWLEDGED
        assert two.acknowledge_handler.reject() is True
        assert two.acknowledge_state is REJECTED
        assert two.acknowledge_handler.acknowledge() is False
        assert two.acknowledge_handler.reject() is False
        assert two.acknowledge_state is REJECTED


@acknowledge
def test_of_racing_threads_one_wins(backend: Backend, m: Messaging, channel: str) -> None:
    """Scenario 73 [B]: the handler fetched twice has one state."""
    with m.subscription.subscribe(direct(m, channel)) as stream:
        for number in range(20):
            publish(m, channel, [str(number).encode()], **backend.reliable)
            context = acknowledgement(stream.receive(PATIENCE))
            while context.extensions.get("redelivered"):
                context.acknowledge_handler.acknowledge()
                context = acknowledgement(stream.receive(PATIENCE))
            winners = race([context.acknowledge_handler for _ in range(4)])
            assert winners == [context.acknowledge_state.value]


@feature(Features.EXTENSION_QOS)
def test_without_acknowledgement_the_state_is_unsupported(m: Messaging, channel: str) -> None:
    """Scenario 69 [S], 95 [S]: QoS 0 has none."""
    with m.subscribe(channel, qos="0") as stream:
        publish(m, channel, [b"1", b"2"], qos="0")
        context = acknowledgement(stream.receive(PATIENCE))
        assert context.acknowledge_state is AcknowledgeType.UNSUPPORTED
        assert context.acknowledge_handler.acknowledge() is False
        assert context.acknowledge_handler.reject() is False
        assert context.acknowledge_state is AcknowledgeType.UNSUPPORTED
        assert receive(stream, 1) == [b"2"]


# --- who gives it


@acknowledge
def test_an_observer_that_returned_has_acknowledged(backend: Backend, m: Messaging, channel: str) -> None:
    stream = m.subscribe(channel, **backend.reliable)
    states: list[AcknowledgeType] = []
    inbox = Inbox(stream, lambda message: states.append(ack_state(message)))
    publish(m, channel, [b"1"], **backend.reliable)
    inbox.wait(1)
    assert states == [RECEIVED]
    eventually(lambda: ack_state(inbox.messages[0]) is ACKNOWLEDGED, "acknowledged")
    eventually(lambda: stream.counters.acknowledged == 1, "counted")
    assert stream.counters.rejected == 0


@acknowledge
def test_an_observer_that_raised_has_rejected(backend: Backend, m: Messaging, channel: str) -> None:
    seen: list[Message] = []

    def fail(message: Message) -> None:
        seen.append(message)
        raise ZeroDivisionError

    inbox = Inbox(m.subscribe(channel, **backend.reliable), fail)
    publish(m, channel, [b"1"], **backend.reliable)
    inbox.wait_error()
    assert ack_state(seen[0]) is REJECTED


@acknowledge
def test_an_operator_that_raised_has_rejected(backend: Backend, m: Messaging, channel: str) -> None:
    seen: list[Message] = []
    raised = threading.Event()

    def fail(message: Message) -> int:
        seen.append(message)
        return 1 // 0

    m.subscribe(channel, **backend.reliable).pipe(ops.map(fail)).subscribe(on_error=lambda _: raised.set())
    publish(m, channel, [b"1"], **backend.reliable)
    assert raised.wait(PATIENCE)
    eventually(lambda: ack_state(seen[0]) is REJECTED, "rejected")


@acknowledge
def test_an_iterator_acknowledges_when_it_goes_on(backend: Backend, m: Messaging, channel: str) -> None:
    with m.subscribe(channel, **backend.reliable) as stream:
        publish(m, channel, [b"1", b"2"], **backend.reliable)
        first = stream.receive(PATIENCE)
        assert ack_state(first) is RECEIVED
        second = stream.receive(PATIENCE)
        assert ack_state(first) is ACKNOWLEDGED
        assert ack_state(second) is RECEIVED
    assert ack_state(second) is ACKNOWLEDGED


@acknowledge
def test_leaving_by_an_exception_rejects_the_message_in_hand(backend: Backend, m: Messaging, channel: str) -> None:
    with pytest.raises(ZeroDivisionError), m.subscribe(channel, **backend.reliable) as stream:  # noqa: PT012
        publish(m, channel, [b"1"], **backend.reliable)
        message = stream.receive(PATIENCE)
        raise ZeroDivisionError
    assert ack_state(message) is REJECTED


@acknowledge
def test_manual_acknowledgement_leaves_it_to_the_consumer(backend: Backend, m: Messaging, channel: str) -> None:
    """Scenario 86 [G], 87 [I]: neither returning nor asking for the next message settles anything."""
    stream = m.subscription.subscribe(direct(m, channel))
    inbox = Inbox(stream)
    publish(m, channel, [b"1", b"2", b"3"], **backend.reliable)
    inbox.wait(3)
    assert [ack_state(message) for message in inbox.messages] == [RECEIVED] * 3
    assert acknowledgement(inbox.messages[1]).acknowledge_handler.acknowledge()
    eventually(lambda: stream.counters.acknowledged == 1, "one acknowledged")
    assert [ack_state(message) for message in inbox.messages] == [RECEIVED, ACKNOWLEDGED, RECEIVED]


@feature(Features.EXTENSION_AUTO_ACKNOWLEDGE, Features.ACKNOWLEDGE)
def test_automatic_acknowledgement_is_on_arrival(backend: Backend, m: Messaging, channel: str) -> None:
    """Scenario 83 [S]: the consumer sees ACKNOWLEDGED and its reject fails, nothing is delivered again."""
    with m.subscribe(channel, auto_acknowledge=True, **backend.reliable) as stream:
        publish(m, channel, [b"1"], **backend.reliable)
        context = acknowledgement(stream.receive(PATIENCE))
        assert context.acknowledge_state is ACKNOWLEDGED
        assert context.acknowledge_handler.reject() is False
        assert context.acknowledge_state is ACKNOWLEDGED
        nothing_more(m, channel, stream, **backend.reliable)


def refuse(_: Message) -> bool:
    return False


@feature(Features.EXTENSION_AUTO_ACKNOWLEDGE, Features.ACKNOWLEDGE, Features.EXTENSION_DEAD_LETTER_CHANNEL)
def test_what_a_filter_refuses_after_it_was_acknowledged_is_not_swallowed(backend: Backend, m: Messaging) -> None:
    """It is counted, and goes to the dead-letter channel if there is one."""
    channel, dead = backend.channel(), backend.channel("dead")
    for more in ({}, {"deadLetterChannel": dead}):
        context = direct(m, channel, filter=refuse, extensions={"autoAcknowledge": True, **more})
        with m.subscribe(dead, **backend.reliable) as buried, m.subscription.subscribe(context) as stream:
            inbox = Inbox(stream)
            publish(m, channel, [b"1"], **backend.reliable)
            if more:
                assert receive(buried, 1) == [b"1"]
            else:
                eventually(lambda: stream.counters.rejected)  # within this round
            assert (stream.counters.rejected, inbox.messages) == (1, [])
            nothing_more(m, dead, buried, **backend.reliable)


@feature(Features.EXTENSION_QOS, Features.ACKNOWLEDGE, Features.EXTENSION_DEAD_LETTER_CHANNEL)
def test_what_a_filter_refuses_of_messages_without_acknowledgement_is_not_swallowed(
    backend: Backend, m: Messaging
) -> None:
    """Published with QoS 0 they can not be rejected: they are counted, and go to the dead-letter channel."""
    channel, dead = backend.channel(), backend.channel("dead")
    context = direct(m, channel, filter=refuse, extensions={"deadLetterChannel": dead})
    with m.subscribe(dead, **backend.reliable) as buried, m.subscription.subscribe(context) as stream:
        inbox = Inbox(stream)
        publish(m, channel, [b"1"], qos="0")
        assert receive(buried, 1) == [b"1"]
        assert (stream.counters.rejected, inbox.messages) == (1, [])
        nothing_more(m, dead, buried, **backend.reliable)


@acknowledge
def test_acknowledging_gives_credit_back(backend: Backend, m: Messaging, channel: str) -> None:
    """However many there are: a broker that hears nothing would stop sending."""
    payloads = [b"%d" % number for number in range(3000)]
    with m.subscription.subscribe(direct(m, channel)) as stream:
        promises = [m.publish(channel, payload, **backend.reliable) for payload in payloads]
        for payload in payloads:
            message = stream.receive(PATIENCE)
            assert message.payload == payload
            assert acknowledgement(message).acknowledge_handler.acknowledge()
        for promise in promises:
            promise.result(PATIENCE)


@feature(Features.EXTENSION_AUTO_ACKNOWLEDGE, Features.EXTENSION_QUEUE, Features.BROKER_REDELIVERY)
def test_what_was_acknowledged_automatically_does_not_come_again(backend: Backend, m: Messaging) -> None:
    """Scenario 83 [S]: on the wire, too: a consumer that fails has lost the message, with the default it has not."""
    for auto, expected in ((False, [b"1", b"sentinel"]), (True, [b"sentinel"])):
        channel, queue = backend.channel(), backend.queue()

        def fail(_: Message) -> None:
            raise ZeroDivisionError

        inbox = Inbox(m.subscribe(channel, queue=queue, auto_acknowledge=auto), fail)
        publish(m, channel, [b"1"], **backend.reliable)
        inbox.wait_error()
        # from now on the failed stream takes nothing more, not even while it is being unsubscribed
        with m.subscribe(channel, queue=queue) as stream:
            publish(m, channel, [b"sentinel"], **backend.reliable)
            assert receive(stream, len(expected)) == expected


# --- direct acknowledgement


@acknowledge
def test_a_filter_decides(backend: Backend, m: Messaging, channel: str) -> None:
    """Scenarios 74 [S], 75 [I], 76 [S]: filter, verdict, post, stream; a rejected message does not enter the stream."""
    log = Log()

    def accept(message: Message) -> bool:
        log.note("filter")(message)
        return message.payload != b"bad" or bool(message.context.extensions.get("redelivered"))

    inbox = Inbox(
        m.subscription.subscribe(direct(m, channel, filter=accept, post=log.note("post"))), log.note("stream")
    )
    publish(m, channel, [b"good"], **backend.reliable)
    inbox.wait(1)
    publish(m, channel, [b"bad"], **backend.reliable)
    assert inbox.wait(2) == [b"good", b"bad"]
    assert log.entries == [
        "filter good RECEIVED",
        "post good ACKNOWLEDGED",
        "stream good ACKNOWLEDGED",
        "filter bad RECEIVED",
        "post bad REJECTED",
        # delivered again, as a rejected message is
        "filter bad RECEIVED",
        "post bad ACKNOWLEDGED",
        "stream bad ACKNOWLEDGED",
    ]


@acknowledge
@pytest.mark.parametrize("form", ["message and handler", "message"])
def test_a_handler_decides(backend: Backend, m: Messaging, channel: str, form: str) -> None:
    """Scenario 77 [S]: handler, post, stream; post once, also after a reject."""
    log = Log()

    def decide(message: Message, handler: AcknowledgeHandler) -> None:
        log.note("handler")(message)
        if message.payload == b"bad" and not message.context.extensions.get("redelivered"):
            handler.reject()
        else:
            handler.acknowledge()

    def decide_alone(message: Message) -> None:
        decide(message, acknowledgement(message).acknowledge_handler)

    handle = decide if form == "message and handler" else decide_alone
    inbox = Inbox(
        m.subscription.subscribe(direct(m, channel, handle=handle, post=log.note("post"))), log.note("stream")
    )
    publish(m, channel, [b"good"], **backend.reliable)
    inbox.wait(1)
    publish(m, channel, [b"bad"], **backend.reliable)
    assert inbox.wait(2) == [b"good", b"bad"]
    assert log.entries == [
        "handler good RECEIVED",
        "post good ACKNOWLEDGED",
        "stream good ACKNOWLEDGED",
        "handler bad RECEIVED",
        "post bad REJECTED",
        "handler bad RECEIVED",
        "post bad ACKNOWLEDGED",
        "stream bad ACKNOWLEDGED",
    ]


@acknowledge
def test_a_callable_handler_yields_to_a_filter(backend: Backend, m: Messaging, channel: str) -> None:
    """Scenario 78 [I], first half."""
    log = Log()
    context = direct(m, channel, filter=log.note("filter", True), handle=log.note("handler"))
    inbox = Inbox(m.subscription.subscribe(context))
    publish(m, channel, [b"1"], **backend.reliable)
    inbox.wait(1)
    assert log.entries == ["filter 1 RECEIVED"]


@acknowledge
def test_a_handler_given_by_target_is_called_after_the_filter(backend: Backend, m: Messaging, channel: str) -> None:
    """Scenario 78 [I], second half."""
    log = Log()
    backend.services.register(AcknowledgeConsumer, log.note("handler"), {"role": "handler"})
    context = direct(m, channel, filter=log.note("filter", True), handle="(role=handler)")
    inbox = Inbox(m.subscription.subscribe(context))
    publish(m, channel, [b"1"], **backend.reliable)
    inbox.wait(1)
    assert log.entries == ["filter 1 RECEIVED", "handler 1 ACKNOWLEDGED"]


@acknowledge
def test_a_handler_may_leave_it_open(backend: Backend, m: Messaging, channel: str) -> None:
    """Scenario 79 [I]: the state stays RECEIVED, post is not called, the stream may act later."""
    log = Log()
    states: list[AcknowledgeType] = []
    context = direct(m, channel, handle=log.note("handler"), post=log.note("post"))

    def act(message: Message) -> None:
        states.append(ack_state(message))
        log.note("stream")(message)
        assert acknowledgement(message).acknowledge_handler.acknowledge()

    inbox = Inbox(m.subscription.subscribe(context), act)
    publish(m, channel, [b"1"], **backend.reliable)
    inbox.wait(1)
    assert log.entries == ["handler 1 RECEIVED", "stream 1 RECEIVED", "post 1 ACKNOWLEDGED"]


@acknowledge
def test_post_runs_after_the_filter_and_the_handler_given_by_target(
    backend: Backend, m: Messaging, channel: str
) -> None:
    """RFC 5.8.4: filter, verdict, handler, post; the handler sees the verdict, and post the outcome of both."""
    log = Log()
    backend.services.register(AcknowledgeConsumer, log.note("handler"), {"role": "handler"})
    context = direct(m, channel, filter=lambda _: True, handle="(role=handler)", post=log.note("post"))
    inbox = Inbox(m.subscription.subscribe(context), log.note("stream"))
    publish(m, channel, [b"1"], **backend.reliable)
    inbox.wait(1)
    assert log.entries == ["handler 1 ACKNOWLEDGED", "post 1 ACKNOWLEDGED", "stream 1 ACKNOWLEDGED"]


@acknowledge
def test_post_runs_after_a_handler_that_goes_on_after_its_verdict(backend: Backend, m: Messaging, channel: str) -> None:
    """RFC 5.8.4: post is called after the handler, not from within its verdict; also if the handler raises then."""
    log = Log()

    def decide(message: Message, handler: AcknowledgeHandler) -> None:
        handler.acknowledge()
        log.note("handler")(message)
        if message.payload == b"2":
            raise RuntimeError("the test's own")

    inbox = Inbox(m.subscription.subscribe(direct(m, channel, handle=decide, post=log.note("post"))))
    publish(m, channel, [b"1", b"2"], **backend.reliable)
    inbox.wait(2)
    assert log.entries == [
        "handler 1 ACKNOWLEDGED",
        "post 1 ACKNOWLEDGED",
        "handler 2 ACKNOWLEDGED",
        "post 2 ACKNOWLEDGED",
    ]


@acknowledge
def test_post_runs_after_the_handler_when_another_thread_gives_the_verdict(
    backend: Backend, m: Messaging, channel: str
) -> None:
    """The verdict may come from any thread while the handler runs; post waits for the handler all the same."""
    log = Log()

    def decide(message: Message, handler: AcknowledgeHandler) -> None:
        other = threading.Thread(target=handler.acknowledge)
        other.start()
        other.join(PATIENCE)
        log.note("handler")(message)

    inbox = Inbox(m.subscription.subscribe(direct(m, channel, handle=decide, post=log.note("post"))))
    publish(m, channel, [b"1"], **backend.reliable)
    inbox.wait(1)
    assert log.entries == ["handler 1 ACKNOWLEDGED", "post 1 ACKNOWLEDGED"]


@acknowledge
def test_post_alone_is_called_once_the_consumer_acted(backend: Backend, m: Messaging, channel: str) -> None:
    """Scenario 80 [S]."""
    log = Log()
    with m.subscription.subscribe(direct(m, channel, post=log.note("post"))) as stream:
        publish(m, channel, [b"1", b"2"], **backend.reliable)
        first, second = stream.receive(PATIENCE), stream.receive(PATIENCE)
        assert log.entries == []
        acknowledgement(second).acknowledge_handler.acknowledge()
        acknowledgement(second).acknowledge_handler.acknowledge()
        acknowledgement(first).acknowledge_handler.acknowledge()
    assert log.entries == ["post 2 ACKNOWLEDGED", "post 1 ACKNOWLEDGED"]


@acknowledge
def test_callbacks_are_found_by_target(backend: Backend, m: Messaging, channel: str) -> None:
    """Scenario 81 [S]: filter and post as services; looked up whenever a message arrives."""
    log = Log()
    context = direct(m, channel, filter="(&(role=filter)(area=7))", post="(role=post)")
    inbox = Inbox(m.subscription.subscribe(context))
    backend.services.register(AcknowledgeFilter, log.note("other", False), {"role": "filter", "area": 8})
    backend.services.register(AcknowledgeFilter, log.note("filter", True), {"role": "filter", "area": 7})
    post = backend.services.register(AcknowledgeConsumer, log.note("post"), {"role": "post"})
    publish(m, channel, [b"1"], **backend.reliable)
    inbox.wait(1)
    post.unregister()
    publish(m, channel, [b"2"], **backend.reliable)
    inbox.wait(2)
    assert log.entries == ["filter 1 RECEIVED", "post 1 ACKNOWLEDGED", "filter 2 RECEIVED"]


@acknowledge
def test_a_target_that_matches_nothing_is_ignored_with_a_warning(
    backend: Backend, m: Messaging, channel: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Scenarios 81 [S], 82 [I]: without a filter service the message is not acknowledged by accident."""
    states: list[AcknowledgeType] = []
    with caplog.at_level(logging.WARNING):
        inbox = Inbox(
            m.subscription.subscribe(direct(m, channel, filter="(role=absent)")),
            lambda message: states.append(ack_state(message)),
        )
        publish(m, channel, [b"1"], **backend.reliable)
        inbox.wait(1)
    assert states == [RECEIVED]
    assert "(role=absent)" in caplog.text


@acknowledge
def test_a_callable_handler_decides_where_the_target_of_the_filter_matches_nothing(
    backend: Backend, m: Messaging, channel: str
) -> None:
    """Scenario 82 [I]: as if no filter was given."""
    log = Log()
    context = direct(m, channel, filter="(role=absent)", handle=lambda message: message.reject(), post=log.note("post"))
    inbox = Inbox(m.subscription.subscribe(context))
    publish(m, channel, [b"1"], **backend.reliable)
    eventually(lambda: "post 1 REJECTED" in log.entries, "rejected by the handler")
    assert inbox.messages == []


@acknowledge
def test_a_malformed_target_is_refused(backend: Backend) -> None:
    with pytest.raises(InvalidFilterError):
        backend.connect().acknowledge_context_builder().filter_acknowledge("(role=")


@acknowledge
def test_a_filter_that_raises_rejects_and_the_subscription_goes_on(
    backend: Backend, m: Messaging, channel: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Scenario 84 [I]: the documented choice."""
    log = Log()

    def accept(message: Message) -> bool:
        if message.payload == b"bad" and not message.context.extensions.get("redelivered"):
            raise ZeroDivisionError
        return True

    inbox = Inbox(m.subscription.subscribe(direct(m, channel, filter=accept, post=log.note("post"))))
    publish(m, channel, [b"bad"], **backend.reliable)
    assert inbox.wait(1) == [b"bad"]
    assert log.entries == ["post bad REJECTED", "post bad ACKNOWLEDGED"]
    assert "ZeroDivisionError" in caplog.text


@acknowledge
def test_a_post_callback_that_raises_changes_nothing(
    backend: Backend, m: Messaging, channel: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Scenario 85 [I]: logged; the acknowledgement stands, the message enters the stream."""

    def post(_: Message) -> None:
        raise ZeroDivisionError

    inbox = Inbox(m.subscription.subscribe(direct(m, channel, filter=lambda _: True, post=post)))
    publish(m, channel, [b"1", b"2"], **backend.reliable)
    assert inbox.wait(2) == [b"1", b"2"]
    assert [ack_state(message) for message in inbox.messages] == [ACKNOWLEDGED] * 2
    assert "ZeroDivisionError" in caplog.text


@feature(Features.ACKNOWLEDGE, Features.EXTENSION_MAX_DELIVERIES)
def test_direct_acknowledgement_works_for_iterators(backend: Backend, m: Messaging, channel: str) -> None:
    # a rejected message is not worth another delivery
    once = {Features.EXTENSION_MAX_DELIVERIES: 1}
    context = direct(m, channel, filter=lambda message: message.payload != b"bad", extensions=once)
    with m.subscription.subscribe(context) as stream:
        publish(m, channel, [b"1", b"bad", b"2"], **backend.reliable)
        for payload in (b"1", b"2"):
            message = stream.receive(PATIENCE)
            assert message.payload == payload
            assert ack_state(message) is ACKNOWLEDGED
