"""One request, one handler (RFC 5.7.3): channels that overlap, extensions that differ, kinds that differ."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, Self

import pytest

from messaging import Features, Message, MessageContextBuilder, Messaging
from messaging.replyto import (
    CHANNEL,
    EXTENSIONS,
    TARGET,
    ReplyToSingleSubscriptionHandler,
    ReplyToSubscriptionHandler,
)
from messaging.services import SERVICE_RANKING, ServiceRegistration
from messaging.testing.conformance.backends import Backend
from messaging.testing.conformance.helpers import feature
from messaging.testing.tables import table
from messaging.testing.waiting import PATIENCE, Recorder, in_thread, results

reply_to = feature(Features.REPLY_TO)

#: requests of one test: enough for copies to arrive in another order than their requests
COUNT = 20


class Calls(Recorder[tuple[str, bytes]]):
    """Which handler was called with which request."""

    def handler(self, name: str) -> Callable[[Message, MessageContextBuilder], Message]:
        """Make a handler that answers with its name."""

        def handle(request: Message, builder: MessageContextBuilder) -> Message:
            self.append((name, request.payload))
            return builder.content(name.encode()).build_message()

        return handle

    def plain(self, name: str) -> Callable[[Message], None]:
        """Make a handler that answers nothing."""
        return lambda request: self.append((name, request.payload))

    def wait(self, name: str, payload: bytes) -> None:
        """Wait until a handler was called with a payload."""
        self.wait_until(lambda calls: (name, payload) in calls, f"{name} called with {payload!r}")


def register(
    m: Messaging,
    handler: Any,
    channel: Any,
    ranking: int = 0,
    kind: type = ReplyToSingleSubscriptionHandler,
    **keys: Any,
) -> ServiceRegistration:
    """Register a handler for ``m`` alone, and wait until it is subscribed."""
    registration = m.services.register(
        kind,
        handler,
        {TARGET: f"(osgi.messaging.name={m.name})", CHANNEL: channel, SERVICE_RANKING: ranking, EXTENSIONS: keys},
    )
    m.whiteboard.ready().result(PATIENCE)
    return registration


def ask(m: Messaging, channel: str, count: int = COUNT) -> set[bytes]:
    """Send requests, all before the first reply is awaited; the replies, each once."""
    promises = [m.request(channel, b"%d" % number, qos=1) for number in range(count)]
    return {reply.payload for reply in results(promises)}


class Blocked:
    """A handler that answers when it is released."""

    def __init__(self, calls: Calls, name: str) -> None:
        self._answer = calls.handler(name)
        self._started: Recorder[Message] = Recorder()
        self._going = threading.Event()

    def __call__(self, request: Message, builder: MessageContextBuilder | None = None) -> Message:
        answer = self._answer(request, builder or MessageContextBuilder())
        self._started.append(answer)
        self._going.wait(PATIENCE)
        return answer

    def __enter__(self) -> Self:
        """Wait for the first request, which is blocked until the end of the block."""
        self._started.wait_for(1)
        return self

    def __exit__(self, *_: object) -> None:
        self._going.set()


def check_served_once(m: Messaging, channel: str, calls: Calls, name: str) -> None:
    """Check that requests on ``channel`` are handled once each, by one handler alone."""
    assert ask(m, channel) == {name.encode()}
    settled(m, channel, calls, name)
    assert sorted(calls) == sorted({*calls})
    assert {called for called, _ in calls} == {name}


def settled(m: Messaging, channel: str, calls: Calls, name: str) -> None:
    """Wait until no copy of an earlier request is left: its handlers take those of a channel in order."""
    for number in range(3):
        m.request(channel, b"last %d" % number, qos=1).result(PATIENCE)
        calls.wait(name, b"last %d" % number)


@pytest.mark.envelope
@reply_to
@table("preferred_first", [True, False])
@table(
    ("low", "high"),
    [
        ({}, {"prefetch": 5}),
        ({"prefetch": 5}, {}),
        ({"qos": "0"}, {}),
        ({}, {"bufferSize": 50, "autoAcknowledge": True}),
        ({"queue": "shared"}, {}),
        ({}, {"queue": "shared"}),
        ({"queue": "shared"}, {"queue": "shared", "prefetch": 5}),
        ({"queue": "one"}, {"queue": "two"}),
    ],
)
def test_one_channel_with_different_extensions_is_served_by_the_highest_ranking(
    backend: Backend, low: dict[str, Any], high: dict[str, Any], preferred_first: bool
) -> None:
    """Each request once, by the preferred handler, whichever subscription brings its first copy."""
    m, responder = backend.connect(), backend.connect()
    if {*low, *high} - responder.features:
        pytest.skip("the instance does not announce all of these extensions")
    names = {queue: backend.queue() for queue in ("shared", "one", "two")}
    low, high = ({key: names.get(value, value) for key, value in each.items()} for each in (low, high))
    channel, calls = backend.channel(), Calls()
    for name, ranking, keys in [("high", 3, high), ("low", 0, low)][:: 1 if preferred_first else -1]:
        register(responder, calls.handler(name), channel, ranking, **keys)
    check_served_once(m, channel, calls, "high")


@feature(Features.REPLY_TO, Features.WILDCARDS)
@table("preferred_first", [True, False])
@table(("low", "high"), [("d/+", "d/x"), ("d/x", "d/+"), ("d/#", "d/+"), ("d/+", "+/x")])
def test_overlapping_channels_are_served_by_rank(backend: Backend, low: str, high: str, preferred_first: bool) -> None:
    """Requests on both channels go to the preferred handler, once; those on one of them to its handler."""
    m, responder = backend.connect(), backend.connect()
    root = backend.channel()
    calls = Calls()
    for name, ranking, channel in [("high", 3, high), ("low", 0, low)][:: 1 if preferred_first else -1]:
        register(responder, calls.handler(name), f"{root}/{channel}", ranking)
    check_served_once(m, f"{root}/d/x", calls, "high")
    if low != "d/x":
        expected = b"low" if high in ("d/x", "+/x") else b"high"
        assert ask(m, f"{root}/d/y") == {expected}


@feature(Features.REPLY_TO, Features.WILDCARDS)
def test_equal_requests_without_reply_channel_are_handled_as_often_as_they_were_sent(backend: Backend) -> None:
    """Nothing tells such requests apart: they are counted."""
    m, responder = backend.connect(), backend.connect()
    root, calls = backend.channel(), Calls()
    register(responder, calls.plain("low"), f"{root}/+", kind=ReplyToSubscriptionHandler)
    register(responder, calls.plain("high"), f"{root}/x", 1, kind=ReplyToSubscriptionHandler)
    results([m.publish(f"{root}/x", b"same", qos=1) for _ in range(COUNT)])
    m.publish(f"{root}/x", b"end", qos=1).result(PATIENCE)
    calls.wait("high", b"end")
    m.publish(f"{root}/x", b"end of all", qos=1).result(PATIENCE)
    calls.wait("high", b"end of all")
    calls.wait_until(lambda each: each.count(("high", b"same")) >= COUNT, "all are handled")
    assert calls.count(("high", b"same")) == COUNT
    assert not [each for each in calls if each[0] == "low"]


@feature(Features.REPLY_TO, Features.WILDCARDS)
@table("shares_a_queue", [False, True])
def test_a_handler_with_overlapping_channels_gets_each_request_once(backend: Backend, shares_a_queue: bool) -> None:
    m, responder = backend.connect(), backend.connect()
    keys = {"queue": backend.queue()} if shares_a_queue else {}
    root, calls = backend.channel(), Calls()
    register(responder, calls.handler("only"), [f"{root}/+", f"{root}/b", f"{root}/#"], **keys)
    check_served_once(m, f"{root}/b", calls, "only")


@reply_to
def test_channels_that_share_a_queue_keep_their_handlers(backend: Backend, m: Messaging, responder: Messaging) -> None:
    """Where the broker has one queue for both channels, a request may arrive on either subscription."""
    if Features.EXTENSION_QUEUE not in responder.features:
        pytest.skip("no queues")
    queue, calls = backend.queue(), Calls()
    channels = [backend.channel(name) for name in ("x", "y")]
    for channel in channels:
        register(responder, calls.handler(channel), channel, queue=queue)
    for channel in channels:
        assert ask(m, channel) == {channel.encode()}


@feature(Features.REPLY_TO, Features.WILDCARDS)
def test_no_request_is_lost_or_handled_twice_while_an_overlapping_handler_comes_and_goes(backend: Backend) -> None:
    m, responder = backend.connect(), backend.connect()
    root, calls = backend.channel(), Calls()
    register(responder, calls.handler("low"), f"{root}/+")
    over = threading.Event()

    def come_and_go() -> None:
        while not over.is_set():
            registration = register(responder, calls.handler("high"), f"{root}/x", 1)
            registration.unregister()

    restless = in_thread(come_and_go)
    try:
        for start in range(0, 200, 20):
            replies = results(m.request(f"{root}/x", b"%d" % number, qos=1) for number in range(start, start + 20))
            assert {reply.payload for reply in replies} <= {b"low", b"high"}
    finally:
        over.set()
        restless.result(PATIENCE)
    settled(m, f"{root}/y", calls, "low")
    handled = [payload for _, payload in calls if not payload.startswith(b"last")]
    assert sorted(handled, key=int) == [b"%d" % number for number in range(200)]


@reply_to
@table("plain_first", [True, False])
@table("ranking", [0, 7])
def test_a_plain_handler_does_not_hide_one_that_answers(backend: Backend, plain_first: bool, ranking: int) -> None:
    """RFC 5.7.4: a request that names a reply channel goes to a handler that answers, whatever the rankings."""
    m, responder = backend.connect(), backend.connect()
    channel, calls = backend.channel(), Calls()

    def register_plain() -> None:
        register(responder, calls.plain("plain"), channel, ranking, kind=ReplyToSubscriptionHandler)

    if plain_first:
        register_plain()
    register(responder, calls.handler("single"), channel)
    if not plain_first:
        register_plain()
    assert ask(m, channel) == {b"single"}
    assert {name for name, _ in calls} == {"single"}
    m.publish(channel, b"tell", qos=1).result(PATIENCE)
    calls.wait("plain" if plain_first or ranking else "single", b"tell")


@feature(Features.REPLY_TO, Features.BROKER_REDELIVERY, Features.EXTENSION_QUEUE)
def test_the_copy_in_a_queue_is_not_acknowledged_before_the_request_is(backend: Backend) -> None:
    """A responder that goes away before it has answered leaves the copy of the queue to the next one."""
    m, first = backend.connect(), backend.connect(close_timeout=0.3)
    channel, queue = backend.channel(), backend.queue()
    stuck = Blocked(Calls(), "too late")
    register(first, Calls().handler("low"), channel, queue=queue)
    register(first, stuck, channel, 1)
    promise = m.request(channel, b"x", qos=1)
    with stuck:
        first.close()
        register(backend.connect(), Calls().handler("second"), channel, queue=queue)
        assert promise.result(PATIENCE).payload == b"second"


@feature(Features.REPLY_TO, Features.EXTENSION_QUEUE)
def test_requests_that_wait_when_a_queue_is_made_are_not_left_to_it(backend: Backend) -> None:
    """A handler with a queue and a higher ranking comes while requests wait: its queue has no copies of them."""
    m, responder = backend.connect(), backend.connect()
    channel, slow = backend.channel(), Blocked(Calls(), "slow")
    register(responder, slow, channel, prefetch=1)
    promises = [m.request(channel, b"%d" % number, qos=1) for number in range(10)]
    with slow:
        register(responder, Calls().handler("queue"), channel, 1, queue=backend.queue())
    assert {reply.payload for reply in results(promises)} <= {b"slow", b"queue"}


@feature(Features.REPLY_TO, Features.WILDCARDS, Features.EXTENSION_QUEUE)
def test_an_equal_request_is_handled_after_the_preferred_handler_and_its_queue_are_gone(backend: Backend) -> None:
    """The copies of the first request, which were left to the queue, do not stand for the second request."""
    m, responder = backend.connect(), backend.connect()
    root, calls = backend.channel(), Calls()
    for number, channel in enumerate(("#", "+")):
        register(responder, calls.plain("low"), f"{root}/{channel}", -number, kind=ReplyToSubscriptionHandler)
    queued = register(
        responder, calls.plain("queue"), f"{root}/x", 1, kind=ReplyToSubscriptionHandler, queue=backend.queue()
    )
    m.publish(f"{root}/x", b"same", qos=1).result(PATIENCE)
    calls.wait("queue", b"same")
    m.publish(f"{root}/y", b"other", qos=1).result(PATIENCE)
    calls.wait("low", b"other")
    queued.unregister()
    responder.whiteboard.ready().result(PATIENCE)
    m.publish(f"{root}/x", b"same", qos=1).result(PATIENCE)
    calls.wait("low", b"same")


@feature(Features.REPLY_TO, Features.EXTENSION_QUEUE)
def test_an_equal_request_is_handled_after_others_that_waited_when_the_queue_was_made(backend: Backend) -> None:
    """Its queue has no copies of the requests that waited: it takes the next one for a request."""
    m, responder = backend.connect(), backend.connect()
    channel, calls = backend.channel(), Calls()
    slow = Blocked(calls, "slow")
    register(responder, slow, channel, kind=ReplyToSubscriptionHandler, prefetch=1)
    for payload in (b"first", b"same", b"end"):
        m.publish(channel, payload, qos=1).result(PATIENCE)
    with slow:
        register(responder, calls.plain("queue"), channel, 1, kind=ReplyToSubscriptionHandler, queue=backend.queue())
    calls.wait_for(3)
    handled = calls.count(("queue", b"same"))
    time.sleep(1.2)  # sleeps: the window in which a copy of a request may still arrive is a second of the product's own
    m.publish(channel, b"same", qos=1).result(PATIENCE)
    calls.wait_until(lambda each: each.count(("queue", b"same")) > handled, "the next request is handled")
