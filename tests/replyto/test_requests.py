"""The requesting side (RFC 5.7.2): what is counted and kept, whatever goes wrong (scenarios 38 to 53 beside it)."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from messaging import (
    ArgumentError,
    DeadlineError,
    InvalidContentError,
    Message,
    Messaging,
    MessagingError,
    OutboxFullError,
    ReplyError,
    RequestCancelledError,
    SubscriptionRefusedError,
)
from messaging.interception import Interceptor, OutboundMessage, Outcome
from messaging.replyto import markers
from messaging.testing.conformance.backends import Backend
from messaging.testing.tables import table
from messaging.testing.waiting import PATIENCE, Recorder, eventually, in_thread, observed, results
from tests.doubles.fake import on_loop
from tests.replyto.conftest import nothing_left


def test_a_request_that_expires_before_the_outbox_accepts_it_is_not_counted(backend: Backend) -> None:
    """Its inbox is not there yet: the outbox never had it, and goes on counting right."""
    m, link = backend.connect_severable()
    link.down()
    with pytest.raises(DeadlineError):
        m.request("c", b"x", timeout=0.05).result(PATIENCE)
    assert m._connection.outbox.pending == 0
    with pytest.raises(DeadlineError):  # what came after it has its deadline, too
        m.publish("c", b"x", timeout=0.1).result(PATIENCE)
    nothing_left(m)


def test_a_request_that_fails_on_the_caller_and_the_loop_at_once_counts_once(backend: Backend) -> None:
    """The outbox is full and the deadline passes: the caller and the loop fail the same request."""
    m, link = backend.connect_severable(outbox_size=2)
    m.request("c", timeout=0.05).exception(PATIENCE)  # the inbox is there
    link.down()

    def ask(_: int) -> type[MessagingError] | None:
        try:
            return type(m.request("c", b"x", timeout=0.1).exception(PATIENCE))
        except OutboxFullError as error:
            return type(error)

    found = {*results(in_thread(ask, number) for number in range(64))}
    assert found <= {OutboxFullError, DeadlineError}
    nothing_left(m)
    link.up()
    m.reply("c", lambda: b"here")
    assert m.request("c", b"x").result(PATIENCE).payload == b"here"


def test_a_broken_inbox_is_replaced(backend: Backend) -> None:
    """What the broker ends is not subscribed to again; the next request has another inbox."""
    m, link = backend.connect_severable()
    m.reply("c", lambda: b"here")
    m.request("c").result(PATIENCE)
    broken = m._requests.own
    assert broken is not None
    pending = m.request("unserved", qos="0")
    m._connection.engine.call(broken.fail, SubscriptionRefusedError("for the test"))
    with pytest.raises(SubscriptionRefusedError):
        pending.result(PATIENCE)
    assert m.request("c").result(PATIENCE).payload == b"here"
    assert broken not in m._connection.subscriptions
    link.sever()
    assert m.request("c").result(PATIENCE).payload == b"here"
    nothing_left(m)


def test_an_inbox_that_ends_while_requests_are_made_loses_none(m: Messaging) -> None:
    """Each is answered, or says why not, however the threads fall."""
    m.reply("c", lambda: b"here")
    over = threading.Event()

    def break_inboxes() -> None:
        while not over.is_set():
            own = m._requests.own
            if own is not None:
                on_loop(own.fail, SubscriptionRefusedError("for the test"))

    def ask() -> list[BaseException | None]:
        return [m.request("c", timeout=5).exception(PATIENCE) for _ in range(50)]

    breaking = in_thread(break_inboxes)
    errors = [error for found in results(in_thread(ask) for _ in range(8)) for error in found]
    over.set()
    breaking.result(PATIENCE)
    assert {type(error) for error in errors} <= {type(None), SubscriptionRefusedError}
    assert m.request("c").result(PATIENCE).payload == b"here"
    nothing_left(m)


def test_requests_of_a_thread_stay_in_order_while_the_inbox_is_made(m: Messaging, responder: Messaging) -> None:
    seen: list[bytes] = []
    # one at a time: on a busy machine a second thread may come to the aid of the first, and overtake it
    responder.reply("c", lambda payload: seen.append(payload) or b"", concurrency=1)
    promises = [m.request("c", b"%d" % number) for number in range(500)]
    results(promises)
    assert seen == [b"%d" % number for number in range(500)]


def test_many_replies_have_a_deadline_before_they_are_subscribed_to(backend: Backend) -> None:
    m, link = backend.connect_severable()
    link.down()
    replies: Recorder[Message] = Recorder()
    m.request_many("c", timeout=0.1).subscribe(replies)
    assert isinstance(replies.wait_error(), DeadlineError)
    nothing_left(m)


def test_interceptors_are_told_the_outcome_of_a_stream_of_replies(backend: Backend) -> None:
    told: Recorder[Outcome] = Recorder()

    class Listening(Interceptor):
        def intercept_publish(self, outbound: OutboundMessage) -> Callable[[Outcome], object] | None:
            return told if outbound.operation == "request" else None

    m = backend.connect(interceptors=[Listening()])

    def count() -> object:
        yield from "12"

    def fail() -> object:
        yield from "1"
        raise ValueError("for the test")

    m.reply("count", count)
    m.reply("fail", fail)
    assert len([*m.request_many("count", correlation_id="a")]) == 2
    with pytest.raises(ReplyError):
        [*m.request_many("fail", correlation_id="b")]
    told.wait_for(2)
    assert [(each.correlation_id, type(each.error)) for each in told] == [("a", type(None)), ("b", ReplyError)]


def test_the_start_marker_of_a_foreign_stream_cancels_no_request(backend: Backend) -> None:
    """Scenarios 43, 53: two programs share a reply channel; one waits for a reply, the other for many."""
    x, y, responder = backend.connect(), backend.connect(), backend.connect()

    def count() -> object:
        yield from (str(number) for number in range(200))

    responder.reply("many", count)
    waiting = x.request("unserved", qos="0", reply_to="shared", timeout=30)
    eventually(lambda: "shared" in x._requests.given, "the reply channel is subscribed to")
    inbox = observed(y.request_many("many", reply_to="shared"))
    inbox.wait_completed()
    assert len(inbox.payloads) == 200
    waiting.cancel()
    assert isinstance(waiting.exception(PATIENCE), RequestCancelledError)


@table("kind", [markers.START, markers.ITEM, markers.END, "nonsense"])
def test_markers_of_streams_do_not_answer_a_single_request(m: Messaging, responder: Messaging, kind: str) -> None:

    def mislead(request: Message) -> str:
        context = request.context
        assert context.reply_to_channel is not None
        responder.publish(
            context.reply_to_channel, b"wrong", correlation_id=context.correlation_id,
            headers=markers.Marker(kind).headers(),
        ).result(PATIENCE)  # fmt: skip
        return "right"

    before = m.runtime.get_runtime_dto().requests.foreign
    with responder.reply("c", mislead):
        assert m.request("c", model=str).result(PATIENCE) == "right"
    assert m.runtime.get_runtime_dto().requests.foreign == before + 1


def test_a_payload_must_be_bytes(m: Messaging) -> None:
    context = m.context_builder().channel("c").build_context()
    message = Message("text", context)  # type: ignore[arg-type]
    with pytest.raises(InvalidContentError):
        m.reply_to.publish_with_reply(message)
    with pytest.raises(InvalidContentError):
        m.reply_to_many.publish_with_reply_many(message)
    nothing_left(m)


def test_the_own_reply_channel_given_by_name_is_the_own_reply_channel(m: Messaging) -> None:
    m.reply("c", lambda: b"here")
    m.request("c").result(PATIENCE)
    own = m._requests.own
    assert own is not None
    assert m.request("c", reply_to=own.reply_to).result(PATIENCE).payload == b"here"
    assert m.request("c").result(PATIENCE).payload == b"here"
    with pytest.raises(ArgumentError, match="of their own"):
        m.request_many("c", reply_to=own.reply_to)


def test_a_handler_of_many_answers_a_single_request_with_its_first_item(m: Messaging, responder: Messaging) -> None:
    """And plainly: the requester need not know of markers. The other items are not made."""
    made: list[int] = []

    def count() -> object:
        for number in range(3):
            made.append(number)
            yield str(number)

    def nothing() -> object:
        yield from ()

    responder.reply("many", count)
    responder.reply("none", nothing)
    with m.subscribe("plain") as stream:
        m.publish("many", reply_to="plain", correlation_id="1").result(PATIENCE)
        reply = stream.receive(PATIENCE)
        assert (reply.payload, dict(reply.context.extensions.get("headers", {}))) == (b"0", {})
        assert m.request("many", model=str).result(PATIENCE) == "0"
        with pytest.raises(ReplyError, match="without a reply"):
            m.request("none").result(PATIENCE)
        assert stream.counters.received == 1
    assert made == [0, 0]
    nothing_left(responder)
