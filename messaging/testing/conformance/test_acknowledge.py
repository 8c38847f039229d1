"""Acknowledgement (RFC 5.8): states, verdicts, direct callbacks, automatic acknowledgement."""

from __future__ import annotations

import logging
import threading
from typing import Any

import pytest

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
    ack_state,
    acknowledgement,
    direct,
    feature,
    nothing_more,
    publish,
    receive,
)
from messaging.testing.tables import table
from messaging.testing.waiting import PATIENCE, Recorder, eventually, in_thread, observed, results

RECEIVED, ACKNOWLEDGED, REJECTED = AcknowledgeType.RECEIVED, AcknowledgeType.ACKNOWLEDGED, AcknowledgeType.REJECTED

acknowledge = feature(Features.ACKNOWLEDGE)


class Log(Recorder[str]):
    """What happened, in order."""

    def note(self, what: str, answer: Any = None) -> Any:
        def callback(message: Message) -> Any:
            self.append(f"{what} {message.payload.decode()} {ack_state(message).value}")
            return answer

        return callback


def race(handlers: list[AcknowledgeHandler]) -> list[str]:
    """Acknowledge by every other handler, reject by the rest, all at once; the verdicts that were accepted."""
    go = threading.Barrier(len(handlers))

    def act(number: int, handler: AcknowledgeHandler) -> str:
        go.wait(PATIENCE)
        if number % 2:
            return "REJECTED" if handler.reject() else ""
        return "ACKNOWLEDGED" if handler.acknowledge() else ""

    verdicts = results(in_thread(act, number, handler) for number, handler in enumerate(handlers))
    return [verdict for verdict in verdicts if verdict]


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
def test_manual_acknowledgement_leaves_it_to_the_consumer(backend: Backend, m: Messaging, channel: str) -> None:
    """Scenario 86 [G], 87 [I]: neither returning nor asking for the next message settles anything."""
    stream = m.subscription.subscribe(direct(m, channel))
    inbox = observed(stream)
    publish(m, channel, [b"1", b"2", b"3"], **backend.reliable)
    inbox.wait_for(3)
    assert [ack_state(message) for message in inbox] == [RECEIVED] * 3
    assert acknowledgement(inbox[1]).acknowledge_handler.acknowledge()
    eventually(lambda: stream.counters.acknowledged == 1, "one acknowledged")
    assert [ack_state(message) for message in inbox] == [RECEIVED, ACKNOWLEDGED, RECEIVED]


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


def refuse(message: Message) -> bool:
    return message.payload != b"1"


@feature(Features.EXTENSION_AUTO_ACKNOWLEDGE, Features.ACKNOWLEDGE, Features.EXTENSION_DEAD_LETTER_CHANNEL)
@pytest.mark.feature(Features.EXTENSION_QOS)
@table("buries, extensions", [(False, {"autoAcknowledge": True}), (True, {"autoAcknowledge": True}), (True, {})])
def test_what_a_filter_refuses_of_messages_that_cannot_be_rejected_is_not_swallowed(
    backend: Backend, m: Messaging, buries: bool, extensions: dict[str, Any]
) -> None:
    """Acknowledged on arrival, or published with QoS 0: counted, and sent to the dead-letter channel if there."""
    channel, dead = backend.channel(), backend.channel("dead")
    context = direct(m, channel, filter=refuse, extensions=extensions | ({"deadLetterChannel": dead} if buries else {}))
    with m.subscribe(dead, **backend.reliable) as buried, m.subscription.subscribe(context) as stream:
        inbox = observed(stream)
        publish(m, channel, [b"1", b"2"], **(backend.reliable if extensions else {"qos": "0"}))
        if buries:
            assert receive(buried, 1) == [b"1"]
        eventually(lambda: stream.counters.rejected, "counted")
        assert inbox.wait_payloads(1) == [b"2"]
        assert stream.counters.rejected == 1
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
        results(promises)


@feature(Features.EXTENSION_AUTO_ACKNOWLEDGE, Features.EXTENSION_QUEUE, Features.BROKER_REDELIVERY)
def test_what_was_acknowledged_automatically_does_not_come_again(backend: Backend, m: Messaging) -> None:
    """Scenario 83 [S]: on the wire, too: a consumer that fails has lost the message, with the default it has not."""
    for auto, expected in ((False, [b"1", b"sentinel"]), (True, [b"sentinel"])):
        channel, queue = backend.channel(), backend.queue()

        def fail(_: Message) -> None:
            raise ZeroDivisionError

        inbox = observed(m.subscribe(channel, queue=queue, auto_acknowledge=auto), fail)
        publish(m, channel, [b"1"], **backend.reliable)
        inbox.wait_error()
        # from now on the failed stream takes nothing more, not even while it is being unsubscribed
        with m.subscribe(channel, queue=queue) as stream:
            publish(m, channel, [b"sentinel"], **backend.reliable)
            assert receive(stream, len(expected)) == expected


# --- direct acknowledgement


@acknowledge
@table("form", ["filter", "handler of message and handler", "handler of message"])
def test_a_callback_decides(backend: Backend, m: Messaging, form: str) -> None:
    """Scenarios 74 [S], 75 [I], 76 [S], 77 [S]: callback, verdict, post, stream; post once, also after a reject.

    A rejected message does not enter the stream.
    """
    log, channel = Log(), backend.channel()

    def accept(message: Message) -> bool:
        log.note("callback")(message)
        return message.payload != b"bad" or bool(message.context.extensions.get("redelivered"))

    def decide(message: Message, handler: AcknowledgeHandler) -> None:
        assert handler.acknowledge() if accept(message) else handler.reject()

    def decide_alone(message: Message) -> None:
        decide(message, acknowledgement(message).acknowledge_handler)

    forms: dict[str, dict[str, Any]] = {
        "filter": {"filter": accept},
        "handler of message and handler": {"handle": decide},
        "handler of message": {"handle": decide_alone},
    }
    inbox = observed(
        m.subscription.subscribe(direct(m, channel, post=log.note("post"), **forms[form])), log.note("stream")
    )
    publish(m, channel, [b"good"], **backend.reliable)
    inbox.wait_for(1)
    publish(m, channel, [b"bad"], **backend.reliable)
    assert inbox.wait_payloads(2) == [b"good", b"bad"]
    assert log == [
        "callback good RECEIVED",
        "post good ACKNOWLEDGED",
        "stream good ACKNOWLEDGED",
        "callback bad RECEIVED",
        "post bad REJECTED",
        # delivered again, as a rejected message is
        "callback bad RECEIVED",
        "post bad ACKNOWLEDGED",
        "stream bad ACKNOWLEDGED",
    ]


@acknowledge
@table(
    "callbacks, expected",
    {
        "78 [I]: a callable handler yields to a filter": (
            "filter handle",
            ["filter 1 RECEIVED", "stream 1 ACKNOWLEDGED"],
        ),
        "78 [I]: a handler given by target is called after the filter": (
            "filter target",
            ["filter 1 RECEIVED", "target 1 ACKNOWLEDGED", "stream 1 ACKNOWLEDGED"],
        ),
        "RFC 5.8.4: post sees the outcome of filter and handler": (
            "filter target post",
            ["filter 1 RECEIVED", "target 1 ACKNOWLEDGED", "post 1 ACKNOWLEDGED", "stream 1 ACKNOWLEDGED"],
        ),
        "79 [I]: a handler may leave it open, the stream acts later": (
            "handle post",
            ["handle 1 RECEIVED", "stream 1 RECEIVED", "post 1 ACKNOWLEDGED"],
        ),
    },
)
def test_callbacks_are_called_in_order(backend: Backend, m: Messaging, callbacks: str, expected: list[str]) -> None:
    """Scenarios 78, 79 and RFC 5.8.4: filter, verdict, handler, post; post once there is a verdict."""
    log, channel = Log(), backend.channel()
    given = {name: log.note(name, answer=True) for name in callbacks.split()}

    def act(message: Message) -> None:
        log.note("stream")(message)
        acknowledgement(message).acknowledge_handler.acknowledge()

    if "target" in given:
        role = backend.queue()
        backend.services.register(AcknowledgeConsumer, given.pop("target"), {"role": role})
        given["handle"] = f"(role={role})"
    inbox = observed(m.subscription.subscribe(direct(m, channel, **given)), act)
    publish(m, channel, [b"1"], **backend.reliable)
    inbox.wait_for(1)
    assert log == expected


@acknowledge
@table("how", ["and goes on", "and raises", "on another thread"])
def test_post_runs_after_a_handler_that_gives_its_verdict(backend: Backend, m: Messaging, how: str) -> None:
    """RFC 5.8.4: post is called after the handler, not from within its verdict."""
    log, channel = Log(), backend.channel()

    def decide(message: Message, handler: AcknowledgeHandler) -> None:
        if how == "on another thread":
            in_thread(handler.acknowledge).result(PATIENCE)
        else:
            handler.acknowledge()
        log.note("handler")(message)
        if how == "and raises":
            raise RuntimeError("the test's own")

    inbox = observed(m.subscription.subscribe(direct(m, channel, handle=decide, post=log.note("post"))))
    publish(m, channel, [b"1", b"2"], **backend.reliable)
    inbox.wait_for(2)
    assert log == [f"{what} {number} ACKNOWLEDGED" for number in (1, 2) for what in ("handler", "post")]


@acknowledge
def test_post_alone_is_called_once_the_consumer_acted(backend: Backend, m: Messaging, channel: str) -> None:
    """Scenario 80 [S]."""
    log = Log()
    with m.subscription.subscribe(direct(m, channel, post=log.note("post"))) as stream:
        publish(m, channel, [b"1", b"2"], **backend.reliable)
        first, second = stream.receive(PATIENCE), stream.receive(PATIENCE)
        assert log == []
        acknowledgement(second).acknowledge_handler.acknowledge()
        acknowledgement(second).acknowledge_handler.acknowledge()
        acknowledgement(first).acknowledge_handler.acknowledge()
    assert log == ["post 2 ACKNOWLEDGED", "post 1 ACKNOWLEDGED"]


@acknowledge
def test_callbacks_are_found_by_target(backend: Backend, m: Messaging, channel: str) -> None:
    """Scenario 81 [S]: filter and post as services; looked up whenever a message arrives."""
    log = Log()
    context = direct(m, channel, filter="(&(role=filter)(area=7))", post="(role=post)")
    inbox = observed(m.subscription.subscribe(context))
    backend.services.register(AcknowledgeFilter, log.note("other", False), {"role": "filter", "area": 8})
    backend.services.register(AcknowledgeFilter, log.note("filter", True), {"role": "filter", "area": 7})
    post = backend.services.register(AcknowledgeConsumer, log.note("post"), {"role": "post"})
    publish(m, channel, [b"1"], **backend.reliable)
    inbox.wait_for(1)
    post.unregister()
    publish(m, channel, [b"2"], **backend.reliable)
    inbox.wait_for(2)
    assert log == ["filter 1 RECEIVED", "post 1 ACKNOWLEDGED", "filter 2 RECEIVED"]


@acknowledge
def test_a_target_that_matches_nothing_is_ignored_with_a_warning(
    backend: Backend, m: Messaging, channel: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Scenarios 81 [S], 82 [I]: as if no filter was given: nothing is acknowledged by accident, a handler decides."""
    states: list[AcknowledgeType] = []
    log, judged = Log(), backend.channel("judged")
    backend.services.register(AcknowledgeConsumer, log.note("no filter"), {"role": "absent"})
    with caplog.at_level(logging.WARNING):
        inbox = observed(
            m.subscription.subscribe(direct(m, channel, filter="(role=absent)")),
            lambda message: states.append(ack_state(message)),
        )
        publish(m, channel, [b"1"], **backend.reliable)
        inbox.wait_for(1)
    assert states == [RECEIVED]
    assert "(role=absent)" in caplog.text
    context = direct(m, judged, filter="(role=absent)", handle=Message.reject, post=log.note("post"))
    inbox = observed(m.subscription.subscribe(context))
    publish(m, judged, [b"1"], **backend.reliable)
    log.wait_until(lambda entries: "post 1 REJECTED" in entries, "rejected by the handler")
    assert ({*log}, inbox) == ({"post 1 REJECTED"}, [])  # it comes again and again
    with pytest.raises(InvalidFilterError):
        m.acknowledge_context_builder().filter_acknowledge("(role=")


@acknowledge
@table("step, said", {"filter": ("filter", "acknowledge filter of"), "handler": ("handle", "acknowledge handler of")})
def test_a_callback_that_raises_rejects_and_the_subscription_goes_on(
    backend: Backend, m: Messaging, caplog: pytest.LogCaptureFixture, step: str, said: str
) -> None:
    """Scenario 84 [I]: the documented choice."""
    log, channel = Log(), backend.channel()

    def accept(message: Message) -> bool:
        if message.payload == b"bad" and not message.context.extensions.get("redelivered"):
            raise ZeroDivisionError
        return message.acknowledge() if step == "handle" else True

    context = direct(m, channel, post=log.note("post"), **{step: accept})
    inbox = observed(m.subscription.subscribe(context))
    publish(m, channel, [b"bad"], **backend.reliable)
    assert inbox.wait_payloads(1) == [b"bad"]
    assert log == ["post bad REJECTED", "post bad ACKNOWLEDGED"]
    assert f"{said} '{channel}' raised; the message is rejected" in caplog.text
    assert "ZeroDivisionError" in caplog.text


@acknowledge
def test_a_post_callback_that_raises_changes_nothing(
    backend: Backend, m: Messaging, channel: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Scenario 85 [I]: logged; the acknowledgement stands, the message enters the stream."""

    def post(_: Message) -> None:
        raise ZeroDivisionError

    inbox = observed(m.subscription.subscribe(direct(m, channel, filter=lambda _: True, post=post)))
    publish(m, channel, [b"1", b"2"], **backend.reliable)
    assert inbox.wait_payloads(2) == [b"1", b"2"]
    assert [ack_state(message) for message in inbox] == [ACKNOWLEDGED] * 2
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
