"""Request handlers (RFC 5.7.3 to 5.7.5): binding, kinds, builders, faults, acknowledgement, DTOs."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, Final

import pytest
from pydantic import BaseModel

from messaging import (
    ArgumentError,
    Features,
    InvalidChannelError,
    Message,
    MessageContextBuilder,
    Messaging,
    Promise,
    ReplyError,
)
from messaging.replyto import (
    CHANNEL,
    CONCURRENCY,
    EXPECTED,
    EXTENSIONS,
    REPLY_CHANNEL,
    TARGET,
    DeferredReply,
    ReplyToManySubscriptionHandler,
    ReplyToSingleSubscriptionHandler,
    ReplyToSubscriptionHandler,
)
from messaging.runtime import ReplyToSubscriptionDTO
from messaging.services import SERVICE_RANKING, ServiceRegistration
from messaging.testing.conformance.backends import Backend
from messaging.testing.conformance.helpers import feature
from messaging.testing.tables import table
from messaging.testing.waiting import PATIENCE, Recorder, eventually, in_thread, results

reply_to = feature(Features.REPLY_TO)

Single = Callable[[Message, MessageContextBuilder], Any]


def upper(request: Message, builder: MessageContextBuilder) -> Message:
    return builder.content(request.payload.upper()).build_message()


def says(text: str) -> Single:
    return lambda _, builder: builder.content(text.encode()).build_message()


def bound(m: Messaging) -> list[ReplyToSubscriptionDTO]:
    return [each for each in m.runtime.get_runtime_dto().reply_to_subscriptions if each.request_channel.connected]


def register(
    m: Messaging, handler: Any, channel: Any, kind: type = ReplyToSingleSubscriptionHandler, **properties: Any
) -> ServiceRegistration:
    """Register a handler for ``m`` alone, and wait until it is bound."""
    names = {"ranking": SERVICE_RANKING, "reply_channel": REPLY_CHANNEL, "concurrency": CONCURRENCY}
    registration = m.services.register(
        kind,
        handler,
        {TARGET: f"(osgi.messaging.name={m.name})", CHANNEL: channel}
        | {names.get(key, EXTENSIONS): value for key, value in properties.items()},
    )
    eventually(lambda: handled_by(m, registration), "the handler is bound")
    return registration


def handled_by(m: Messaging, registration: ServiceRegistration) -> bool:
    return any(each.handler_service.id == registration.reference.id for each in bound(m))


# --- binding


@pytest.mark.envelope
@reply_to
@table("several", [False, True])
def test_a_handler_is_bound_to_each_of_its_channels(backend: Backend, several: bool) -> None:
    """Scenarios 55 [S], 65 [S]: one subscription for each, also for a single string; gone when it is unregistered."""
    m, responder = backend.connect(), backend.connect()
    channels = [backend.channel("a"), backend.channel("b")][: 2 if several else 1]
    registration = register(responder, upper, channels if several else channels[0])
    eventually(lambda: len(bound(responder)) == len(channels), "all channels are bound")
    for channel in channels:
        assert m.request(channel, b"x").result(PATIENCE).payload == b"X"
    registration.unregister()
    eventually(lambda: not responder.runtime.get_runtime_dto().reply_to_subscriptions, "the DTO disappears")
    if Features.EXTENSION_MANDATORY in m.features:
        eventually(lambda: m.request(channels[0], b"x", qos=1, timeout=1.0).exception(PATIENCE), "no handler answers")


@reply_to
def test_a_target_decides_which_whiteboards_a_handler_is_for(backend: Backend, channel: str) -> None:
    """Scenarios 55 [S], 56 [S]: every whiteboard whose properties match, also when one appears, and no other."""
    names = [backend.queue() for _ in range(3)]
    one, three = backend.connect(name=names[0]), backend.connect(name=names[2])
    backend.services.register(
        ReplyToSingleSubscriptionHandler,
        upper,
        {
            TARGET: f"(&(|(osgi.messaging.name={one.name})(osgi.messaging.name={names[1]}))"
            f"(osgi.messaging.protocol={one.runtime.get_runtime_dto().protocols[0]})(osgi.messaging.feature=replyTo))",
            CHANNEL: channel,
        },
    )
    eventually(lambda: len(bound(one)) == 1, "it is bound")
    two = backend.connect(name=names[1])
    eventually(lambda: len(bound(two)) == 1, "it is bound when its whiteboard appears")
    assert three.request(channel, b"x").result(PATIENCE).payload == b"X"
    assert bound(three) == []


@reply_to
def test_a_change_of_properties_binds_anew(backend: Backend, m: Messaging, responder: Messaging) -> None:
    """Scenario 66 [S]: another channel, and another target."""
    first, second = backend.channel("first"), backend.channel("second")
    registration = register(responder, upper, first)
    target = {TARGET: f"(osgi.messaging.name={responder.name})"}
    registration.update({**target, CHANNEL: second})
    eventually(lambda: [each.request_channel.name for each in bound(responder)] == [second], "it has moved")
    assert m.request(second, b"x").result(PATIENCE).payload == b"X"
    registration.update({TARGET: "(osgi.messaging.name=another)", CHANNEL: second})
    eventually(lambda: not bound(responder), "it is for others")


@reply_to
def test_the_preferred_handler_answers(m: Messaging, responder: Messaging, channel: str) -> None:
    """Scenario 67 [I]: by ranking, then the one registered first; the next one when it is gone."""
    register(responder, says("first"), channel)
    register(responder, says("second"), channel)
    best = register(responder, says("best"), channel, ranking=7)
    assert m.request(channel, b"x").result(PATIENCE).payload == b"best"
    best.unregister()
    eventually(lambda: len(bound(responder)) == 2, "it is gone")
    assert m.request(channel, b"x").result(PATIENCE).payload == b"first"


@pytest.mark.envelope
@reply_to
def test_a_reply_channel_selects_requests(backend: Backend, m: Messaging, responder: Messaging, channel: str) -> None:
    """Scenario 59 [S]: such a handler is called only if channel and reply channel of the request are its own."""
    special = backend.channel("special")
    register(responder, says("special"), channel, reply_channel=special, ranking=1)
    register(responder, says("other"), channel)
    assert m.request(channel, b"x").result(PATIENCE).payload == b"other"
    assert m.request(channel, b"x", reply_to=special).result(PATIENCE).payload == b"special"
    shown = {each.response_channel.name if each.response_channel else None for each in bound(responder)}
    assert shown == {special, None}


@reply_to
def test_a_handler_with_wrong_properties_is_not_bound_and_says_why(
    backend: Backend, m: Messaging, channel: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Scenario 68 [I]: the keys of the RFC's example mean nothing. The others go on."""
    for properties, wrong in WRONG:
        caplog.clear()
        with caplog.at_level(logging.ERROR):
            registration = backend.services.register(ReplyToSingleSubscriptionHandler, upper, properties)
        assert any(wrong in record.getMessage() for record in caplog.records), (properties, caplog.text)
        registration.unregister()
    register(m, upper, channel)
    assert m.request(channel, b"x").result(PATIENCE).payload == b"X"


#: properties that bind no handler, and what the log says about them
WRONG: Final[tuple[tuple[dict[str, Any], str], ...]] = (
    ({}, CHANNEL),
    ({"osgi.messaging.replyTo.channel": "c"}, "osgi.messaging.replyTo.channel"),
    ({CHANNEL: "a/#/b"}, "#"),
    ({CHANNEL: 7}, "int"),
    ({CHANNEL: []}, f"{CHANNEL} is empty"),
    ({CHANNEL: b"ab"}, "bytes"),
    ({CHANNEL: {"c": 1}}, "dict"),
    ({CHANNEL: ["c", 7]}, "int"),
    ({CHANNEL: "c", EXTENSIONS: ["queue"]}, EXTENSIONS),
    ({CHANNEL: "c", TARGET: "(broken"}, "LDAP"),
    ({CHANNEL: "c", REPLY_CHANNEL: "a/+"}, "wildcard"),
    ({CHANNEL: "c", CONCURRENCY: 0}, CONCURRENCY),
    ({CHANNEL: "c", EXPECTED: KeyError("x")}, EXPECTED),
)


# --- kinds


@reply_to
def test_a_plain_handler_answers_nothing(backend: Backend, m: Messaging, responder: Messaging, channel: str) -> None:
    """Scenario 57 [S]."""
    replies = backend.channel("replies")
    got: Recorder[bytes] = Recorder()
    register(responder, lambda request: got.append(request.payload), channel, ReplyToSubscriptionHandler)
    with m.subscribe(replies, qos=1) as stream:
        m.publish(channel, b"1", qos=1).result(PATIENCE)
        m.publish(channel, b"2", qos=1, reply_to=replies, correlation_id="c").result(PATIENCE)
        assert got.wait_for(2) == [b"1", b"2"]
        m.publish(replies, b"sentinel", qos=1).result(PATIENCE)
        assert stream.receive(PATIENCE).payload == b"sentinel"


@reply_to
@table("is_async", [False, True])
def test_deferred_replies_delay_no_other_request(backend: Backend, is_async: bool) -> None:
    """More requests wait than the handler, the prefetch and the window of the broker allow at a time."""
    m, responder = backend.connect(), backend.connect()
    channel = backend.channel()
    waiting: Recorder[Promise[bytes]] = Recorder()

    def answer(request: bytes) -> bytes | DeferredReply:
        if request == b"now":
            return b"at once"
        waiting.append(Promise("a reply"))
        return DeferredReply(waiting[-1])

    async def answer_async(request: bytes) -> bytes | DeferredReply:
        return answer(request)

    responder.reply(channel, answer_async if is_async else answer, concurrency=1, prefetch=4)
    promises = [m.request(channel, b"later", bytes, qos=1, timeout=PATIENCE) for _ in range(150)]
    waiting.wait_for(150)
    assert m.request(channel, b"now", bytes, qos=1).result(PATIENCE) == b"at once"
    for number, each in enumerate(waiting):
        each.resolve(b"%d" % number)
    assert sorted(map(int, results(promises))) == [*range(150)]


@reply_to
def test_a_deferred_reply_may_fail_or_be_of_the_wrong_type(m: Messaging, channel: str) -> None:
    failing: Promise[bytes] = Promise("a reply")
    failing.was_retrieved = True

    def read(_: Promise[Any]) -> bytes:
        raise LookupError("nothing found")

    found = {
        b"promise": DeferredReply(failing),
        b"read": DeferredReply(failing, read),
        b"type": DeferredReply(failing, lambda _: object()),
    }
    m.reply(channel, lambda request: found[request])
    promises = {what: m.request(channel, what, qos=1, timeout=PATIENCE) for what in found}
    failing.reject(ArgumentError("no such order"))
    kinds = {}
    for what, promise in promises.items():
        error = promise.exception(PATIENCE)
        assert isinstance(error, ReplyError)
        kinds[what] = error.kind
    assert (kinds[b"promise"], kinds[b"read"]) == ("ArgumentError", "LookupError")
    assert kinds[b"type"]


async def shout_async(request: Message, builder: MessageContextBuilder) -> Message:
    await asyncio.sleep(0)
    return upper(request, builder)


def promise_of_shout(request: Message, builder: MessageContextBuilder) -> Promise[Message]:
    promise: Promise[Message] = Promise("shouting")
    in_thread(lambda: promise.resolve(upper(request, builder)))
    return promise


@reply_to
@table(
    "handler",
    {
        "function": upper,
        "coroutine function": shout_async,
        "function that returns a promise": promise_of_shout,
        "object": SimpleNamespace(handle_response=upper),
        "object with a coroutine function": SimpleNamespace(handle_response=shout_async),
    },
)
def test_handlers_are_functions_coroutines_or_objects(backend: Backend, handler: Any) -> None:
    m, responder = backend.connect(), backend.connect()
    channel = backend.channel()
    register(responder, handler, channel)
    assert [m.request(channel, b"x").result(PATIENCE).payload for _ in range(3)] == [b"X"] * 3


@reply_to
def test_a_coroutine_runs_on_the_loop_it_was_registered_on(backend: Backend) -> None:
    """And a function on no event loop at all."""
    seen: dict[str, Any] = {}
    channels = {name: backend.channel(name) for name in ("sync", "async")}

    async def main() -> None:
        async with backend.connect() as m, backend.connect() as responder:

            async def handler() -> str:
                seen["async"] = asyncio.get_running_loop()
                return "a"

            def function() -> str:
                seen["sync"] = threading.current_thread()
                return "s"

            responder.reply(channels["async"], handler)
            responder.reply(channels["sync"], function)
            await asyncio.to_thread(eventually, lambda: len(bound(responder)) == 2, "both are bound")
            assert (await m.request(channels["async"], b"")).value() == "a"
            assert (await m.request(channels["sync"], b"")).value() == "s"
            assert seen["async"] is asyncio.get_running_loop()
            assert seen["sync"] is not threading.current_thread()

    asyncio.run(main())


@pytest.mark.envelope
@reply_to
def test_the_builder_is_configured(backend: Backend, m: Messaging, responder: Messaging, channel: str) -> None:
    """Scenario 58 [S]: with the reply channel and the correlation id, and nothing else of the request."""
    replies = backend.channel("replies")
    built: list[Message] = []

    def handler(_: Message, builder: MessageContextBuilder) -> Message:
        built.append(builder.build_message())
        return built[0]

    register(responder, handler, channel)
    m.request(channel, b"payload", reply_to=replies, correlation_id="4711", content_type="x/y").result(PATIENCE)
    (message,) = built
    assert (message.payload, message.context.content_type) == (b"", None)
    assert (message.context.channel, message.context.correlation_id) == (replies, "4711")
    assert message.context.reply_to_channel is None


# --- faults


@pytest.mark.envelope
@reply_to
@table("form", ["raises", "coroutine", "promise", "none", "wrong"])
def test_a_failure_is_reported_to_the_requester_and_the_handler_goes_on(
    backend: Backend, form: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Scenarios 60 [S], 61 [I]: kind and text travel, no traceback; the next request is handled."""
    m, responder = backend.connect(), backend.connect()
    channel = backend.channel()

    class TooBadError(Exception):
        pass

    def raises(request: Message, builder: MessageContextBuilder) -> Any:
        if request.payload == b"good":
            return upper(request, builder)
        if form == "none":
            return None
        if form == "wrong":
            return "a str"
        if form == "promise":
            promise: Promise[Message] = Promise("failing")
            promise.reject(ReplyError("TooBadError", "so it is"))
            return promise
        raise TooBadError("so it is")

    async def coroutine(request: Message, builder: MessageContextBuilder) -> Any:
        return raises(request, builder)

    register(responder, coroutine if form == "coroutine" else raises, channel)
    with pytest.raises(ReplyError) as caught:
        m.request(channel, b"bad").result(PATIENCE)
    if form in ("none", "wrong"):
        assert caught.value.kind == "TypeError"
    else:
        assert "so it is" in caught.value.reason
    assert "Traceback" not in str(caught.value)
    assert ".py" not in str(caught.value)
    assert m.request(channel, b"good").result(PATIENCE).payload == b"GOOD"
    assert "failed" in caplog.text


@pytest.mark.envelope
@reply_to
def test_a_request_without_reply_channel_is_handled(backend: Backend, caplog: pytest.LogCaptureFixture) -> None:
    """Scenario 62 [I]: the answer is dropped with a warning."""
    m, responder = backend.connect(), backend.connect()
    channel = backend.channel()
    handled: Recorder[Message] = Recorder()

    def handler(request: Message, builder: MessageContextBuilder) -> Message:
        handled(request)
        return builder.channel(channel + "/never").content(request.payload).build_message()

    register(responder, handler, channel)
    with caplog.at_level(logging.WARNING):
        m.publish(channel, b"x", qos=1).result(PATIENCE)
        handled.wait_for(1)
        eventually(lambda: "no reply channel" in caplog.text, "a warning")


@reply_to
def test_replies_go_only_to_allowed_channels(backend: Backend, caplog: pytest.LogCaptureFixture) -> None:
    """A requester cannot have a handler publish to any channel, if the setting names the allowed ones."""
    own = backend.channel("allowed")
    m, responder = backend.connect(), backend.connect(reply_channels=f"{own}/#, reply/#, amq/rabbitmq/#")
    channel, victim = backend.channel(), backend.channel("victim")
    responder.reply(channel, lambda request: request)
    with m.subscribe(victim, qos=1) as stream, caplog.at_level(logging.WARNING):
        refused = m.request(channel, b"x", reply_to=victim, timeout=1.0)
        assert m.request(channel, b"y", reply_to=f"{own}/mine").result(PATIENCE).payload == b"y"
        assert m.request(channel, b"z").result(PATIENCE).payload == b"z"
        eventually(lambda: "not allowed" in caplog.text, "a warning")
        m.publish(victim, b"sentinel", qos=1).result(PATIENCE)
        assert stream.receive(PATIENCE).payload == b"sentinel"
        refused.cancel()


@reply_to
@table("way", ["context of the request", "own channel", "channel of another handler", "pattern of another handler"])
@table("kind", [ReplyToSingleSubscriptionHandler, ReplyToManySubscriptionHandler])
def test_a_reply_to_a_channel_that_the_whiteboard_serves_is_an_error_of_its_handler(
    backend: Backend, way: str, kind: type, caplog: pytest.LogCaptureFixture
) -> None:
    """It would be the next request: the handler is called once, the requester is told, and the log says it."""
    m, responder = backend.connect(), backend.connect()
    channel, other = backend.channel(), backend.channel("other")
    calls: list[bytes] = []

    def handler(request: Message, builder: MessageContextBuilder) -> Any:
        calls.append(request.payload)
        if way == "context of the request":
            builder = builder.with_context(request.context)
        else:
            builder = builder.channel({"own channel": channel, "channel of another handler": other}.get(way, other))
        reply = builder.content(b"again").reply_to(channel).build_message()
        return reply if kind is ReplyToSingleSubscriptionHandler else iter([reply])

    register(responder, handler, channel, kind)
    wildcard = way.startswith("pattern") and Features.WILDCARDS in responder.features
    register(responder, handler, f"{other.rpartition('/')[0]}/+" if wildcard else other, kind, concurrency=1)
    with caplog.at_level(logging.ERROR), pytest.raises(ReplyError, match="take requests from there") as caught:
        m.request(channel, b"x", qos=1).result(PATIENCE)
    assert caught.value.kind == "InvalidChannelError"
    assert "take requests from there" in caplog.text
    # a reply to a served channel would arrive before this request
    for each in (channel, other):
        with pytest.raises(ReplyError):
            m.request(each, b"end", qos=1).result(PATIENCE)
    assert calls == [b"x", b"end", b"end"]


@reply_to
@table("settings", [{}, {"reply_channels": "#"}], ids=["default", "all allowed"])
def test_replies_never_go_to_channels_of_requests(backend: Backend, settings: dict[str, Any]) -> None:
    """Or two handlers would answer each other for ever: neither a request nor a handler can name such a channel."""
    m, responder = backend.connect(), backend.connect(**settings)
    channel = backend.channel()
    calls: list[bytes] = []

    def handler(request: Message, builder: MessageContextBuilder) -> Message:
        calls.append(request.payload)
        if request.payload == b"y":
            builder = builder.channel(channel)
        return builder.content(b"again").reply_to(channel).build_message()

    register(responder, handler, channel)
    m.publish(channel, b"x", qos=1, reply_to=channel, correlation_id="c").result(PATIENCE)
    with pytest.raises(ReplyError, match="take requests from there"):
        m.request(channel, b"y", qos=1).result(PATIENCE)
    assert m.request(channel, b"z", qos=1).result(PATIENCE).payload == b"again"
    assert calls == [b"x", b"y", b"z"]


# --- acknowledgement and bounds


@feature(Features.REPLY_TO, Features.BROKER_REDELIVERY, Features.EXTENSION_QUEUE)
def test_an_unanswered_request_is_not_lost(backend: Backend, m: Messaging) -> None:
    """It is acknowledged after its reply: a responder that goes away before leaves it to the next."""
    channel, queue = backend.channel(), backend.queue()
    first = backend.connect(close_timeout=0.3)
    started: Recorder[str] = Recorder()
    may_end = threading.Event()

    @first.reply(channel, queue=queue)
    def stuck() -> str:
        started("started")
        may_end.wait(PATIENCE)
        return "too late"

    promise = m.request(channel, b"x", qos=1)
    started.wait_for(1)
    first.close()
    second = backend.connect()
    second.reply(channel, lambda: "second", queue=queue)
    assert promise.result(PATIENCE).value() == "second"
    may_end.set()


# --- the short way


class Order(BaseModel):
    count: int
    price: float


class Total(BaseModel):
    total: float


@pytest.mark.envelope
@reply_to
def test_typed_handlers_get_and_return_objects(backend: Backend, m: Messaging, responder: Messaging) -> None:
    price, later = backend.channel("price"), backend.channel("later")

    @responder.reply(price)
    def total(order: Order) -> Total:
        return Total(total=order.count * order.price)

    @responder.reply(later)
    async def total_later(order: Order) -> Total:
        await asyncio.sleep(0)
        return total(order)

    for channel in (price, later):
        assert m.request(channel, Order(count=2, price=1.5), Total).result(PATIENCE) == Total(total=3.0)
        with pytest.raises(ReplyError, match="count") as caught:
            m.request(channel, {"count": "many"}).result(PATIENCE)
        assert caught.value.kind == "DecodeError"
    assert total(Order(count=1, price=1)).total == 1  # the decorator leaves the function as it is


@reply_to
def test_a_value_that_cannot_be_a_handler_is_refused(m: Messaging, channel: str) -> None:
    for handler in (7, lambda a, b: a, lambda *, k: k):
        with pytest.raises(ArgumentError):
            m.reply(channel, handler)
    with pytest.raises(InvalidChannelError):
        m.reply("a/#/b", lambda request: request)
    for several in ([], 7, {"a": 1}):
        with pytest.raises(ArgumentError, match="channel"):
            m.reply(several, lambda request: request)
    with pytest.raises(ArgumentError):
        m.reply(channel, lambda request: request, concurrency=0)
    assert m.runtime.get_runtime_dto().reply_to_subscriptions == ()


@reply_to
def test_the_runtime_lists_handlers_and_no_other_subscription_of_theirs(backend: Backend, m: Messaging) -> None:
    """Scenario 98 [S]."""
    a, b, c = (backend.channel(name) for name in "abc")
    with m.subscribe(a), m.subscribe(b), m.reply(c, lambda request: request):
        m.request(c, b"x").result(PATIENCE)
        dto = m.runtime.get_runtime_dto()
        assert {each.channel.name for each in dto.subscriptions} == {a, b}
        (handler,) = dto.reply_to_subscriptions
        assert (handler.request_channel.name, handler.request_channel.connected) == (c, True)
        assert handler.response_channel is None
        assert handler.generate_correlation_id
        assert handler.generate_reply_channel
    eventually(lambda: not m.runtime.get_runtime_dto().reply_to_subscriptions, "a registration ends with its block")
