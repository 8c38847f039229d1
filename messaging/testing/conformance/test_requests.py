"""Requests (RFC 5.7.2): correlation, reply channels, deadlines, losses; one reply, and many."""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from messaging import (
    ArgumentError,
    ConnectionLostError,
    DeadlineError,
    Features,
    Message,
    MessageStream,
    Messaging,
    MessagingError,
    OutcomeUnknownError,
    ReplyError,
    RequestCancelledError,
    TooManyRequestsError,
    UnroutableError,
    UnsupportedFeatureError,
)
from messaging.runtime import RequestsDTO
from messaging.testing.conformance.backends import Backend
from messaging.testing.conformance.helpers import feature, nothing_more
from messaging.testing.tables import table
from messaging.testing.waiting import PATIENCE, Recorder, eventually, in_thread, observed, results

pytestmark = [pytest.mark.envelope]

reply_to = feature(Features.REPLY_TO)
many = feature(Features.REPLY_TO_MANY_PUBLISH, Features.REPLY_TO_MANY_SUBSCRIBE)


def answer(m: Messaging, request: Message, payload: bytes, **changes: Any) -> None:
    """Answer a request by hand, as a program without this library would."""
    context = request.context
    m.publish(
        changes.get("channel", context.reply_to_channel),
        payload,
        correlation_id=changes.get("correlation_id", context.correlation_id),
        qos=1,
    ).result(PATIENCE)


def counters(m: Messaging) -> RequestsDTO:
    return m.runtime.get_runtime_dto().requests


# --- one reply


@reply_to
def test_the_reply_with_the_correlation_id_resolves_the_promise(backend: Backend) -> None:
    """Scenarios 38 [S], 41 [S]: given ids and channels are used; the reply channel is there before, and not after."""
    m, responder = backend.connect(), backend.connect()
    channel, replies = backend.channel(), backend.channel("replies")
    with responder.subscribe(channel, qos=1) as requests:
        message = m.context_builder().channel(channel).correlation_id("4711").reply_to(replies).content(b"?")
        promise = m.reply_to.publish_with_reply(message.build_message())
        request = requests.receive(PATIENCE)
        assert (request.context.correlation_id, request.context.reply_to_channel) == ("4711", replies)
        answer(responder, request, b"!")
        reply = promise.result(PATIENCE)
    assert (reply.payload, reply.context.correlation_id, reply.context.channel) == (b"!", "4711", replies)
    if Features.EXTENSION_MANDATORY in responder.features:

        def is_gone() -> bool:
            return isinstance(responder.publish(replies, b"late", mandatory=True).exception(PATIENCE), UnroutableError)

        eventually(is_gone, "no subscription is left there")


@feature(Features.GENERATE_CORRELATION_ID, Features.GENERATE_REPLY_CHANNEL)
def test_missing_correlation_ids_and_reply_channels_are_made(m: Messaging, responder: Messaging, channel: str) -> None:
    """Scenario 39 [S]: unique, and visible to the responder."""
    with responder.subscribe(channel, qos=1) as requests:
        promises = [m.request(channel, b"%d" % number) for number in range(3)]
        received = [requests.receive(PATIENCE) for _ in promises]
        ids = {request.context.correlation_id for request in received}
        assert len(ids) == 3
        assert all(len(each or "") >= 32 for each in ids)
        assert all(request.context.reply_to_channel for request in received)
        for request in reversed(received):
            answer(responder, request, b"to " + request.payload)
        assert [reply.payload for reply in results(promises)] == [b"to 0", b"to 1", b"to 2"]


@reply_to
def test_a_missing_id_or_channel_that_is_not_generated_is_named_in_the_error(backend: Backend, channel: str) -> None:
    """Scenario 40 [S]."""
    m = backend.connect(generate_correlation_id=False, generate_reply_channel=False)
    assert Features.REPLY_TO in m.features
    assert not m.features & {
        Features.GENERATE_CORRELATION_ID,
        Features.GENERATE_REPLY_CHANNEL,
        "generateReplyToChannel",
    }
    with pytest.raises(ArgumentError, match="correlation id"):
        m.request(channel, b"x", reply_to=backend.channel())
    with pytest.raises(ArgumentError, match="reply channel"):
        m.request(channel, b"x", correlation_id="1")


def test_without_the_feature_a_request_is_refused(backend: Backend, m: Messaging) -> None:
    """The error names the feature."""
    if Features.REPLY_TO in m.features:
        assert {Features.REPLY_TO_MANY_PUBLISH, Features.REPLY_TO_MANY_SUBSCRIBE} <= m.features
        return
    for call in (m.request, m.request_many):
        with pytest.raises(UnsupportedFeatureError, match="replyTo"):
            call(backend.channel(), b"x")
    with pytest.raises(UnsupportedFeatureError, match="replyTo"):
        m.reply(backend.channel(), lambda request: request)


@reply_to
@table("call", ["publish", "publish_with_reply", "publish_with_reply_many"])
def test_a_context_beside_the_message_replaces_all_but_its_channel(backend: Backend, call: str) -> None:
    """Scenario 45 [S], RFC 5.5: the context overrides all of the message's, but for a channel that it leaves unset."""
    m, responder = backend.connect(), backend.connect()
    channel, replies = backend.channel(), backend.channel("replies")
    message = m.context_builder().channel(channel).content_type("x/y").reply_to(channel).content(b"?").build_message()
    builder = m.context_builder().correlation_id("2").reply_to(replies).content_encoding("identity")
    publish = {
        "publish": m.publisher.publish,
        "publish_with_reply": m.reply_to.publish_with_reply,
        "publish_with_reply_many": m.reply_to_many.publish_with_reply_many,
    }[call]
    with responder.subscribe(channel, qos=1) as requests:
        requests.ready.result(PATIENCE)
        found = publish(message, builder.build_context())
        context = requests.receive(PATIENCE).context
        assert (context.channel, context.correlation_id, context.reply_to_channel) == (channel, "2", replies)
        assert (context.content_type, context.content_encoding) == (None, "identity")
        if isinstance(found, MessageStream):
            found.close()
        else:
            getattr(found, "cancel", found.exception)()


@reply_to
@table("channel_is", ["given", "generated"])
def test_a_correlation_id_that_waits_already_is_refused_by_the_call(backend: Backend, channel_is: str) -> None:
    """Scenario 44 [B]: the call raises, nothing is sent, and the id is free again once the first request has ended."""
    m, responder = backend.connect(), backend.connect()
    channel = backend.channel()
    ids: dict[str, Any] = {"correlation_id": "1", "qos": 1}
    if channel_is == "given":
        ids["reply_to"] = backend.channel("replies")
    with responder.subscribe(channel, qos=1) as requests:
        requests.ready.result(PATIENCE)
        first = m.request(channel, b"1", **ids)
        with pytest.raises(ArgumentError, match="correlation id '1'"):
            m.request(channel, b"2", **ids)
        assert not first.done()
        request = requests.receive(PATIENCE)
        answer(responder, request, b"!")
        assert first.result(PATIENCE).payload == b"!"
        again = m.request(channel, b"3", **ids)
        request = requests.receive(PATIENCE)
        assert request.payload == b"3"
        again.cancel()
        assert isinstance(again.exception(PATIENCE), RequestCancelledError)
        third = m.request(channel, b"4", **ids)
        answer(responder, requests.receive(PATIENCE), b"?")
        assert third.result(PATIENCE).payload == b"?"


@many
def test_a_correlation_id_that_waits_already_is_refused_by_a_request_with_many_replies(backend: Backend) -> None:
    """On a reply channel that the request names, another request with that id would share its replies."""
    m, responder = backend.connect(), backend.connect()
    channel, replies = backend.channel(), backend.channel("replies")
    responder.reply(channel, lambda: iter((b"1", b"2")), many=True)
    for _ in range(2):
        with m.request_many(channel, reply_to=replies, correlation_id="1", timeout=PATIENCE) as stream:
            with pytest.raises(ArgumentError, match="correlation id '1'"):
                m.request_many(channel, reply_to=replies, correlation_id="1")
            with pytest.raises(ArgumentError, match="correlation id '1'"):
                m.request(channel, reply_to=replies, correlation_id="1")
            assert [each.payload for each in stream] == [b"1", b"2"]


@many
@table("says_many", [True, False])
def test_a_requester_of_another_program_gets_all_replies_if_it_says_so(backend: Backend, says_many: bool) -> None:
    """With the user header ``rx-reply: many``; otherwise the first one, without any header."""
    m, responder = backend.connect(), backend.connect()
    channel, replies = backend.channel(), backend.channel("replies")
    responder.reply(channel, lambda: iter((b"1", b"2", b"3")), many=True)
    with m.subscribe(replies, qos=1) as stream:
        stream.ready.result(PATIENCE)
        headers = {"headers": {"rx-reply": "many"}} if says_many else {}
        m.publish(channel, b"?", reply_to=replies, correlation_id="1", qos=1, **headers).result(PATIENCE)
        found = []
        while not found or (says_many and found[-1][0] != "end"):
            message = stream.receive(PATIENCE)
            assert message.context.correlation_id == "1"
            said = message.context.extensions.get("headers", {}).get("rx-reply")
            if said != "start":
                found.append((said, message.payload))
        if says_many:
            assert found == [("item", b"1"), ("item", b"2"), ("item", b"3"), ("end", b"")]
        else:
            assert found == [(None, b"1")]
            nothing_more(m, replies, stream, qos=1)


@reply_to
def test_a_foreign_reply_is_not_taken(backend: Backend) -> None:
    """Scenario 43 [I]: on a shared reply channel each gets its own."""
    m, other, responder = backend.connect(), backend.connect(), backend.connect()
    channel, shared = backend.channel(), backend.channel("shared")
    with responder.subscribe(channel, qos=1) as requests:
        first = m.request(channel, b"1", reply_to=shared, correlation_id="1")
        one = requests.receive(PATIENCE)
        second = other.request(channel, b"2", reply_to=shared, correlation_id="2")
        two = requests.receive(PATIENCE)
        answer(responder, two, b"foreign", correlation_id="3")
        answer(responder, two, b"second")
        assert second.result(PATIENCE).payload == b"second"
        assert not first.done()
        answer(responder, one, b"first")
        assert first.result(PATIENCE).payload == b"first"
    assert eventually(lambda: counters(m).foreign) >= 1


@reply_to
def test_late_and_double_replies_are_dropped_and_counted(m: Messaging, responder: Messaging, channel: str) -> None:
    """Scenario 42 [S]."""
    with responder.subscribe(channel, qos=1) as requests:
        promise = m.request(channel, b"1", timeout=1.0)
        request = requests.receive(PATIENCE)
        with pytest.raises(OutcomeUnknownError):
            promise.result(PATIENCE)
        answer(responder, request, b"late")
        eventually(lambda: counters(m).late == 1, "the late one is counted")
        promise = m.request(channel, b"2")
        request = requests.receive(PATIENCE)
        answer(responder, request, b"first")
        answer(responder, request, b"second")
        assert promise.result(PATIENCE).payload == b"first"
        eventually(lambda: counters(m).duplicate == 1, "the second one is counted")
    assert counters(m).pending == 0


@reply_to
def test_a_late_reply_to_a_given_channel_does_not_disturb_the_next_request(backend: Backend) -> None:
    """Scenarios 41 [S], 42 [S]: the channel is gone when the reply comes, and there again for the next request."""
    m, responder = backend.connect(), backend.connect()
    channel, replies = backend.channel(), backend.channel("replies")
    going = threading.Event()

    def answer_when_told(payload: bytes) -> bytes:
        assert going.wait(PATIENCE)
        return payload

    responder.reply(channel, answer_when_told)
    for payload in (b"1", b"2"):
        with pytest.raises(OutcomeUnknownError):
            m.request(channel, payload, reply_to=replies, timeout=1.0, qos=1).result(PATIENCE)
    going.set()
    handled = m.request(channel, b"3", qos=1)  # with another reply channel: the requests before it are handled then
    assert handled.result(PATIENCE).payload == b"3"
    for payload in (b"4", b"5"):
        assert m.request(channel, payload, reply_to=replies, qos=1).result(PATIENCE).payload == payload


@feature(Features.REPLY_TO, Features.EXTENSION_MANDATORY)
def test_an_unroutable_request_fails_at_once(backend: Backend, m: Messaging) -> None:
    with pytest.raises(UnroutableError):
        m.request(backend.channel(), b"?", qos=1, timeout=10 * PATIENCE).result(PATIENCE)
    assert counters(m).pending == 0


@reply_to
def test_a_request_can_be_cancelled(m: Messaging, responder: Messaging, channel: str) -> None:
    """Scenario 42 [S]: by its promise, or by cancelling the task that awaits it."""
    with responder.subscribe(channel, qos=1) as requests:
        promise = m.request(channel, b"1")
        requests.receive(PATIENCE)
        promise.cancel()
        with pytest.raises(RequestCancelledError):
            promise.result(PATIENCE)

        async def time_out() -> None:
            await asyncio.wait_for(m.request(channel, b"2"), 0.2)

        with pytest.raises(TimeoutError):
            asyncio.run(time_out())
    eventually(lambda: counters(m).pending == 0, "nothing is pending")


@feature(Features.REPLY_TO)
def test_a_request_fails_with_its_connection(backend: Backend, channel: str) -> None:
    """Scenario 46 [B]: no session, no reply; and the next request works."""
    m, link = backend.connect_severable()
    responder = backend.connect()
    with responder.subscribe(channel, qos=1) as requests:
        promise = m.request(channel, b"1", qos=1, timeout=10 * PATIENCE)
        requests.receive(PATIENCE)
        link.down()
        with pytest.raises(ConnectionLostError):
            promise.result(PATIENCE)
        waiting = m.request(channel, b"2", qos=1)
        with pytest.raises(DeadlineError) as caught:  # one that was not sent says so
            m.request(channel, b"?", timeout=0.3).result(PATIENCE)
        assert not isinstance(caught.value, OutcomeUnknownError)
        link.up()
        answer(responder, requests.receive(PATIENCE), b"!")
        assert waiting.result(PATIENCE).payload == b"!"


@reply_to
def test_pending_requests_are_bounded_and_settled_by_close(backend: Backend, channel: str) -> None:
    m, responder = backend.connect(max_pending_requests=3), backend.connect()
    with responder.subscribe(channel, qos=1) as requests:
        promises = [m.request(channel, b"x") for _ in range(3)]
        with pytest.raises(TooManyRequestsError, match="max_pending_requests"):
            m.request(channel, b"x")
        for _ in promises:
            answer(responder, requests.receive(PATIENCE), b"!")
        results(promises)
        promises = [m.request(channel, b"x") for _ in range(3)]
        requests.receive(PATIENCE)
        m.close()
        for promise in promises:
            assert isinstance(promise.exception(PATIENCE), MessagingError)


@reply_to
def test_a_thousand_requests_at_once_each_get_their_own_reply(m: Messaging, responder: Messaging, channel: str) -> None:
    """Scenario 47 [I]: from several threads, with one reply subscription."""
    responder.reply(channel, lambda request: request * 2)
    before = len(m.runtime.get_runtime_dto().subscriptions)

    def ask(numbers: range) -> bool:
        replies = results(m.request(channel, str(number), int) for number in numbers)
        return replies == [int(str(number) * 2) for number in numbers]

    assert all(results(in_thread(ask, range(start, 1000, 4)) for start in range(4)))
    assert len(m.runtime.get_runtime_dto().subscriptions) == before
    assert counters(m).answered == 1000
    assert counters(m).pending == 0


# --- many replies


@many
def test_a_stream_of_replies_ends_where_the_handler_ends(backend: Backend, m: Messaging, responder: Messaging) -> None:
    """Scenarios 48 [S], 50 [S], 63 [S]: one correlation id, the end mark is hidden; an empty stream completes."""
    three, none = backend.channel("three"), backend.channel("none")
    responder.reply(three, lambda count: iter(range(count)), many=True)
    responder.reply(none, lambda request: iter(()), many=True)
    inbox = observed(m.request_many(three, 3))
    inbox.wait_completed()
    assert [message.value() for message in inbox] == [0, 1, 2]
    assert not any(Features.EXTENSION_HEADERS in message.context.extensions for message in inbox)
    assert len({message.context.correlation_id for message in inbox}) == 1
    empty = observed(m.request_many(none, 0))
    empty.wait_completed()
    assert empty == []


@many
def test_a_stream_of_replies_fails_where_the_handler_fails(m: Messaging, responder: Messaging, channel: str) -> None:
    """Scenarios 49 [S], 64 [S]: two messages and an error; what it was, but not where. The handler goes on."""

    @responder.reply(channel)
    def fails(count: int) -> Any:
        yield from range(count)
        raise ValueError("that was all")

    for _ in range(2):
        inbox = observed(m.request_many(channel, 2))
        error = inbox.wait_error()
        assert isinstance(error, ReplyError)
        assert (error.kind, error.reason) == ("ValueError", "that was all")
        assert [message.value() for message in inbox] == [0, 1]


@many
def test_ending_a_stream_early_ends_the_handler(m: Messaging, responder: Messaging, channel: str) -> None:
    """Scenario 51 [S]: an endless handler is stopped."""
    ended: Recorder[str] = Recorder()

    @responder.reply(channel)
    def endless() -> Any:
        try:
            yield from itertools.count()
        finally:
            ended("ended")

    with m.request_many(channel) as stream:
        assert [stream.receive(PATIENCE).value() for _ in range(5)] == [0, 1, 2, 3, 4]
    ended.wait_for(1)


@many
def test_a_responder_without_end_mark_ends_by_the_timeout(m: Messaging, responder: Messaging, channel: str) -> None:
    """Scenario 52 [I]: with what came, or if nothing came with an error."""
    with responder.subscribe(channel, qos=1) as requests:
        inbox = observed(m.request_many(channel, b"?", timeout=2.0))
        request = requests.receive(PATIENCE)
        for payload in (b"1", b"2"):
            answer(responder, request, payload)
        inbox.wait_completed()
        assert inbox.payloads == [b"1", b"2"]
        silent = observed(m.request_many(channel, b"?", timeout=1.0))
        assert isinstance(silent.wait_error(), OutcomeUnknownError)


@many
def test_the_end_of_one_stream_is_not_that_of_another(backend: Backend) -> None:
    """Scenario 53 [I]: two requesters on one reply channel."""
    m, other, responder = backend.connect(), backend.connect(), backend.connect()
    channel, shared = backend.channel(), backend.channel("shared")
    go = threading.Event()

    @responder.reply(channel)
    def numbers(count: int) -> Any:
        yield from range(count)
        if count > 1:
            assert go.wait(PATIENCE)
            yield "more"

    long = observed(m.request_many(channel, 2, reply_to=shared))
    long.wait_payloads(2)
    short = observed(other.request_many(channel, 1, reply_to=shared))
    short.wait_completed()
    assert not long.is_completed
    go.set()
    long.wait_completed()
    assert [message.value() for message in long] == [0, 1, "more"]
    assert [message.value() for message in short] == [0]


@many
def test_a_slow_consumer_holds_replies_back(m: Messaging, responder: Messaging, channel: str) -> None:
    """All of them arrive, in order, although the first is in its hands while the handler fills its buffer."""
    made: Recorder[int] = Recorder()

    def numbers() -> Any:
        for number in range(500):
            made.append(number)
            yield number

    responder.reply(channel, numbers, many=True)
    with m.request_many(channel, buffer_size=10) as stream:
        first = stream.receive(PATIENCE).value()
        made.wait_for(10)
        assert [first, *(message.value() for message in stream)] == list(range(500))


@feature(Features.REPLY_TO, Features.EXTENSION_TIME_TO_LIVE)
@table("outbox", ["memory", "disk"])
def test_a_request_whose_time_to_live_ended_before_it_was_sent_is_not_sent(
    backend: Backend, tmp_path: Path, outbox: str
) -> None:
    m, link = backend.connect_severable(**({"outbox_path": tmp_path / "outbox"} if outbox == "disk" else {}))
    channel = backend.channel()
    handled: Recorder[bytes] = Recorder()
    with backend.connect().reply(channel, lambda payload: handled(payload) or b"!"):
        link.down()
        short = m.request(channel, b"short", time_to_live=0.1)
        asked = time.monotonic()
        long = m.request(channel, b"long", time_to_live=60.0)
        eventually(lambda: time.monotonic() > asked + 0.1, "the request to expire")
        link.up()
        with pytest.raises(DeadlineError, match="time to live"):
            short.result(PATIENCE)
        assert long.result(PATIENCE).payload == b"!"
    assert handled == [b"long"]
