"""The answering side (RFC 5.7.3 to 5.7.5): no request is lost, whatever a handler does."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import itertools
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import reactivex
from reactivex.subject import Subject

from messaging import (
    ArgumentError,
    DecodeError,
    Message,
    MessageContextBuilder,
    Messaging,
    MessagingError,
    OutcomeUnknownError,
    Promise,
    ReplyError,
    SubscriptionRefusedError,
)
from messaging.execution import handlers_loop
from messaging.interception import Interceptor
from messaging.receiving import HandlerExhaustedError
from messaging.receiving.runners import ThreadRunner
from messaging.replyto import (
    CHANNEL,
    CONCURRENCY,
    EXPECTED,
    EXTENSIONS,
    TARGET,
    DeferredReply,
    ReplyToManySubscriptionHandler,
    ReplyToSingleSubscriptionHandler,
    ReplyToSubscriptionHandler,
    request_copies,
)
from messaging.services import SERVICE_RANKING, ServiceRegistration
from messaging.testing.conformance.backends import Backend
from messaging.testing.tables import table
from messaging.testing.waiting import PATIENCE, Recorder, eventually, observed, results, within
from tests.doubles.fake import settle_loop
from tests.replyto.conftest import in_hand, nothing_left, routes
from tests.threads import in_background

Builder = MessageContextBuilder


def register(m: Messaging, kind: type, handler: Any, channel: Any, **properties: Any) -> ServiceRegistration:
    keys = {"concurrency": CONCURRENCY, "expected": EXPECTED, "ranking": SERVICE_RANKING}
    registration = m.services.register(
        kind,
        handler,
        {TARGET: f"(osgi.messaging.name={m.name})", CHANNEL: channel}
        | {keys[name]: value for name, value in properties.items()},
    )
    several = [channel] if isinstance(channel, str) else channel

    def is_bound() -> bool:
        subscribed = {route.channel for route in routes(m) if route.subscription.handle is not None}
        return subscribed.issuperset(several)

    eventually(is_bound, "the handler is bound")
    return registration


def test_the_reply_channel_of_one_reply_does_not_reach_the_next(m: Messaging, responder: Messaging) -> None:

    @responder.reply("a/reply")
    def answer(request: Message) -> Message:
        builder = MessageContextBuilder().content(request.payload)
        return (builder.reply_to("later") if request.payload == b"1" else builder).build_message()

    replies = [m.request("a/reply", payload).result(PATIENCE).context for payload in (b"1", b"2")]
    assert [each.reply_to_channel for each in replies] == ["later", None]


class Gate:
    """A handler that answers when it is told to, and how many requests it is at."""

    def __init__(self) -> None:
        self.open = threading.Event()
        self.begun: Recorder[bytes] = Recorder()

    def __call__(self, request: Message, builder: Builder) -> Message:
        return builder.content(self.answer(request.payload)).build_message()

    def answer(self, payload: bytes) -> bytes:
        """Answer, as a handler of ``m.reply``."""
        self.begun.append(payload)
        assert self.open.wait(PATIENCE)
        return payload


# --- bounds


def test_requests_without_acknowledgement_are_bounded_too(m: Messaging) -> None:
    """Only so many are in the handlers' hands; the buffer and its policy hold the others."""
    gate = Gate()
    registration = m.reply("c", gate.answer, qos=0, buffer_size=10)
    for _ in range(100):
        m.publish("c", b"x", qos=0).result(PATIENCE)
    (route,) = routes(m)
    eventually(lambda: route.subscription.counters.received == 100, "all have arrived")
    eventually(lambda: (in_hand(m), route.subscription.buffered) == (10, 10), "ten are with the handler, ten wait")
    gate.open.set()
    gate.begun.wait_for(20)
    nothing_left(m)
    registration.unregister()


# --- what handlers return


def test_a_handler_may_pass_on_what_it_received(backend: Backend, caplog: pytest.LogCaptureFixture) -> None:
    """A received message knows where it arrived: that is not where it is to go now."""
    front, back, m = backend.connect(), backend.connect(), backend.connect()
    calls: list[bytes] = []

    def echo(request: Message, _: Builder) -> Message:
        calls.append(request.payload)
        return request

    register(back, ReplyToSingleSubscriptionHandler, echo, "backend")
    register(front, ReplyToSingleSubscriptionHandler, lambda request, _: front.request("backend", request.payload), "a")
    front.reply("b", lambda payload: front.request("backend", payload))

    async def proxy(payload: bytes) -> Any:
        return await front.request("backend", payload)

    front.reply("c", proxy)
    for channel in ("a", "b", "c", "backend"):
        reply = m.request(channel, channel.encode(), headers={"k": "v"}).result(PATIENCE)
        assert reply.payload == channel.encode()
    assert calls == [b"a", b"b", b"c", b"backend"]
    for each in (m, front, back):
        nothing_left(each)


def test_no_reply_goes_to_a_channel_that_just_got_a_handler(m: Messaging, monkeypatch: pytest.MonkeyPatch) -> None:
    """The route of the first reply is looked up before the handler of its channel comes, and known only after."""
    calls: Recorder[bytes] = Recorder()
    inbox, ways = m.subscribe("answers"), m._adapter.addressing.reply_routes
    inbox.ready.result(PATIENCE)

    def echo(request: Message) -> Message:
        return request

    def found_late(channel: str) -> Any:
        if channel == "answers" and not calls:
            calls.append(b"")
            register(m, ReplyToSubscriptionHandler, lambda request: calls.append(request.payload), "answers")
        return ways(channel)

    m.reply("a", echo)
    monkeypatch.setattr(m._adapter.addressing, "reply_routes", found_late)
    m.publish("a", b"1", reply_to="answers", correlation_id="1").result(PATIENCE)
    assert calls.wait_for(2) == [b"", b"1"]
    m.publish("a", b"2", reply_to="answers", correlation_id="2").result(PATIENCE)
    assert m.request("a", b"3", bytes).result(PATIENCE) == b"3"  # requests are handled in their order
    m.publish("answers", b"end").result(PATIENCE)
    assert calls.wait_for(3) == [b"", b"1", b"end"]
    inbox.close()


def test_requests_that_outwait_their_copies_are_handled_once(m: Messaging, monkeypatch: pytest.MonkeyPatch) -> None:
    """A slow handler, and copies that wait at the broker because their subscription is full, for two minutes."""
    now = [0.0]
    monkeypatch.setattr(request_copies, "clock", SimpleNamespace(monotonic=lambda: now[0]))
    calls: Recorder[bytes] = Recorder()

    def slow(request: Message) -> None:
        settle_loop()  # the copies that have room arrive in no time
        now[0] += 0.5
        calls.append(request.payload)

    for ranking, channel, prefetch in ((0, "d/+", 10), (1, "d/x", 100)):
        terms = {CHANNEL: channel, CONCURRENCY: 1, SERVICE_RANKING: ranking, EXTENSIONS: {"prefetch": prefetch}}
        m.services.register(ReplyToSubscriptionHandler, slow, terms)
    m.whiteboard.ready().result(PATIENCE)
    sent = [b"%d" % number for number in range(250)]
    for payload in sent:
        m.publish("d/x", payload, qos=1)
    nothing_left(m)
    calls.wait_until(lambda seen: len({*seen}) == len(sent) and in_hand(m) == 0, "all are handled")
    assert sorted(calls) == sorted(sent)


def test_functions_may_return_what_coroutine_functions_would(m: Messaging) -> None:
    """Awaitables and async iterators from a plain function; lists from a coroutine; partial functions of both."""

    async def later(prefix: str, payload: bytes) -> str:
        await asyncio.sleep(0)
        return prefix + payload.decode()

    async def listed() -> list[str]:
        return ["1", "2"]

    async def each() -> AsyncIterator[str]:
        yield "1"
        yield "2"

    def built(request: Message, builder: Builder) -> Any:
        async def make() -> AsyncIterator[Message]:
            for payload in (b"1", b"2"):
                yield builder.content(payload).build_message()

        return make()

    m.reply("lambda", lambda payload: later("a", payload))
    m.reply("partial", functools.partial(later, "b"))
    assert m.request("lambda", b"x", str).result(PATIENCE) == "ax"
    assert m.request("partial", b"x", str).result(PATIENCE) == "bx"
    m.reply("listed", listed, many=True)
    m.reply("each", lambda: each(), many=True)
    register(m, ReplyToManySubscriptionHandler, built, "built")
    for channel in ("listed", "each", "built"):
        inbox = observed(m.request_many(channel))
        inbox.wait_completed()
        assert inbox.payloads == [b"1", b"2"]
    nothing_left(m)


class UnspeakableError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("not even that")


@table("form", ["function", "coroutine", "generator", "observable"])
def test_an_exception_that_cannot_be_shown_is_still_a_fault(m: Messaging, form: str) -> None:

    def function() -> bytes:
        raise UnspeakableError

    async def coroutine() -> bytes:
        raise UnspeakableError

    def generator() -> Iterator[bytes]:
        yield b"x"
        raise UnspeakableError

    def observable() -> reactivex.Observable[bytes]:
        return reactivex.throw(UnspeakableError())

    handler: Callable[..., Any] = {
        "function": function, "coroutine": coroutine, "generator": generator, "observable": observable,
    }[form]  # fmt: skip
    m.reply(form, handler, concurrency=1, many=form in ("generator", "observable"))
    for _ in range(3):  # the handler goes on
        if form in ("generator", "observable"):
            error: Any = observed(m.request_many(form)).wait_error()
        else:
            error = m.request(form).exception(PATIENCE)
        assert isinstance(error, ReplyError)
        assert (error.kind, error.reason) == ("UnspeakableError", "")
    nothing_left(m)


class AbsentError(MessagingError, LookupError):
    """Of an application; promises fail with errors of messaging only."""


class Idle(Interceptor):
    def intercept_process(self, inbound: Any) -> Any:
        return contextlib.nullcontext()


def _failing(form: str, error: MessagingError) -> Callable[..., Any]:
    """Return a handler that answers with ``error``."""
    failed: Promise[bytes] = Promise()
    failed.was_retrieved = True
    failed.reject(error)

    def fail(*_: Any) -> Any:
        raise error

    async def coroutine(text: str) -> bytes:
        raise error

    def generator() -> Iterator[bytes]:
        yield b"x"
        raise error

    async def stream() -> AsyncIterator[bytes]:
        yield b"x"
        raise error

    return {
        "function": lambda text: fail(),
        "promise": lambda text: failed,
        "deferred": lambda text: DeferredReply(failed),
        "coroutine": coroutine,
        "generator": generator,
        "stream": stream,
        "observable": lambda text: reactivex.throw(error),
        "plain": fail, "single": fail, "many": fail,
    }[form]  # fmt: skip


_FORMS = (
    "function",
    "promise",
    "deferred",
    "coroutine",
    "generator",
    "stream",
    "observable",
    "plain",
    "single",
    "many",
)
_SERVICES = {
    "plain": ReplyToSubscriptionHandler, "single": ReplyToSingleSubscriptionHandler,
    "many": ReplyToManySubscriptionHandler,
}  # fmt: skip


@pytest.mark.parametrize("is_intercepted", [False, True])
@table("form", _FORMS)
@table(
    "expected, is_logged",
    [
        (AbsentError, False), (LookupError, False), ((ValueError, LookupError), False), (Exception, False),
        (ValueError, True), ((), True),
    ],
)  # fmt: skip
def test_an_expected_error_reaches_the_requester_without_a_traceback_in_the_log(
    backend: Backend, caplog: pytest.LogCaptureFixture, is_intercepted: bool, form: str, expected: Any, is_logged: bool
) -> None:
    caplog.clear()
    caplog.set_level("INFO")
    m = backend.connect(interceptors=[Idle()] if is_intercepted else ())
    channel = backend.channel()
    is_many = form in ("generator", "stream", "observable", "many")
    handler = _failing(form, AbsentError("no such item"))
    if form in _SERVICES:
        register(m, _SERVICES[form], handler, channel, expected=expected)
    else:
        m.reply(channel, handler, many=is_many, expected=expected)
    error: Any = m.request(channel, "x").exception(PATIENCE) if not is_many else None
    if is_many:
        error = observed(m.request_many(channel, "x")).wait_error()
    assert isinstance(error, ReplyError)
    assert (error.kind, error.reason) == ("AbsentError", "no such item")
    (told,) = [each for each in caplog.records if each.name == "messaging.replyto.served_request"]
    assert (told.exc_info is not None, told.levelname) == ((True, "ERROR") if is_logged else (False, "INFO"))
    assert is_logged or "AbsentError: no such item" in told.getMessage()
    m.close()


def test_an_expected_error_follows_the_properties_of_the_handler(
    m: Messaging, caplog: pytest.LogCaptureFixture
) -> None:
    registration = register(m, ReplyToSingleSubscriptionHandler, _failing("single", AbsentError("x")), "c")
    registration.update({**registration.reference.properties, EXPECTED: AbsentError})
    m.whiteboard.ready().result(PATIENCE)
    assert isinstance(m.request("c").exception(PATIENCE), ReplyError)
    assert "Traceback" not in caplog.text


def test_a_request_that_does_not_fit_may_be_expected(m: Messaging, caplog: pytest.LogCaptureFixture) -> None:
    def answer(number: int) -> int:
        return number

    m.reply("c", answer, expected=DecodeError)
    error: Any = m.request("c", "x").exception(PATIENCE)
    assert error.kind == "DecodeError"
    assert "Traceback" not in caplog.text


@table(
    "expected",
    [KeyError("x"), "KeyError", [KeyError], int, (KeyError, int), KeyboardInterrupt, ((KeyError,),), None, 0],
    ids=str,
)
def test_what_is_no_class_of_exceptions_is_refused_as_expected(m: Messaging, expected: Any) -> None:
    with pytest.raises(ArgumentError, match="expected must be a class of exceptions or a tuple of them, not "):
        m.reply("c", lambda: None, expected=expected)
    with pytest.raises(ArgumentError, match="expected"):
        m.reply("c", expected=expected)(lambda: None)
    assert m.services.find(ReplyToSingleSubscriptionHandler) == []


@table("model", [3, "Unknown", object()], ids=str)
def test_a_model_that_no_reply_can_fit_is_refused_before_anything_is_sent(m: Messaging, model: Any) -> None:
    for request in (m.request, m.request_many):
        with pytest.raises(ArgumentError, match="is no type pydantic can validate") as caught:
            request("c", b"", model)
        assert "\n" not in str(caught.value)
        assert "errors.pydantic.dev" not in str(caught.value)
    nothing_left(m)


# --- requests without a reply channel


@table("items", [0, 3])
def test_replies_without_a_channel_settle_the_request(
    m: Messaging, items: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Scenario 62: the request names no reply channel; it is done, and that is said."""
    with m.reply("c", lambda: iter([b"x"] * items), many=True):
        m.publish("c", b"x").result(PATIENCE)
        (route,) = routes(m)
        eventually(lambda: route.subscription.counters.acknowledged == 1, "acknowledged")
        nothing_left(m)
    assert ("named no reply channel" in caplog.text) == bool(items)


# --- a full outbox


@pytest.mark.parametrize("form", ["generator", "async"])
def test_a_full_outbox_neither_loses_nor_doubles_items(backend: Backend, form: str) -> None:
    m, responder = backend.connect(), backend.connect(outbox_size=1)

    def numbers() -> Iterator[str]:
        yield from map(str, range(60))

    async def numbers_async() -> AsyncIterator[str]:
        for number in range(60):
            yield str(number)

    async def one() -> str:
        return "one"

    responder.reply("c", numbers if form == "generator" else numbers_async)
    responder.reply("one", one)
    inboxes = [observed(m.request_many("c")) for _ in range(3)]
    for inbox in inboxes:
        inbox.wait_completed()
        assert inbox.payloads == [b"%d" % number for number in range(60)]
    replies = [m.request_many("one") for _ in range(20)]
    assert [[message.payload for message in each] for each in replies] == [[b"one"]] * 20
    nothing_left(responder)


# --- requesters that go away


@pytest.mark.parametrize("form", ["async", "observable"])
def test_a_waiting_stream_is_stopped_when_its_requester_goes(m: Messaging, responder: Messaging, form: str) -> None:
    """Not only with the next item, which may never come."""
    ended: Recorder[str] = Recorder()

    async def wait_for_ever() -> AsyncIterator[str]:
        try:
            yield "first"
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)  # it may take its time to clean up
            ended("ended")

    def never() -> reactivex.Observable[str]:
        return reactivex.concat(reactivex.of("first"), reactivex.never()).pipe(
            reactivex.operators.finally_action(lambda: ended("ended"))
        )

    handler: Any = wait_for_ever if form == "async" else never
    responder.reply("c", handler, concurrency=1, many=True)
    for count in (1, 2, 3):
        stream = m.request_many("c")
        assert stream.receive(PATIENCE).payload == b"first"
        eventually(lambda: len(responder._replies.streams), "the stream can be cancelled")
        stream.close()
        ended.wait_for(count)
        nothing_left(responder)


def test_an_observable_that_emits_at_once_and_for_ever_is_stopped(m: Messaging, responder: Messaging) -> None:
    """There is nothing to dispose of while it is being subscribed to."""
    made = itertools.count()
    responder.reply("c", lambda: reactivex.from_iterable(map(str, made)), many=True, concurrency=1)
    for _ in range(2):
        with m.request_many("c") as stream:
            stream.receive(PATIENCE)
        nothing_left(responder)
    count = next(made)
    m.request("c").result(PATIENCE)
    nothing_left(responder)
    assert next(made) - count < 10_000  # the first ones do not go on beside it


def test_a_request_is_in_hand_as_long_as_a_thread_subscribes_to_its_observable(
    m: Messaging, responder: Messaging
) -> None:
    """Also when its requester has gone: nothing of the handler runs after its instance is closed."""
    begun: Recorder[str] = Recorder()
    going = threading.Event()

    def slow(*_: Any) -> Any:
        begun("begun")
        assert going.wait(PATIENCE)

    responder.reply("c", lambda: reactivex.create(slow), many=True, concurrency=1)
    (route,) = routes(responder)
    stream = m.request_many("c", timeout=30)
    begun.wait_for(1)
    (request,) = route.in_hand
    stream.close()
    join = in_background(responder.close)
    eventually(lambda: responder._connection.is_closing and request._stopper.__self__._is_over, "no replies are wanted")
    settle_loop()
    assert [*route.in_hand] == [request]
    going.set()
    join()
    assert begun == ["begun"]
    assert not route.in_hand


def test_a_stop_before_the_observable_is_made_stops_it(m: Messaging, responder: Messaging) -> None:
    """The handler is unregistered while it makes its observable, which then says nothing for ever."""
    begun: Recorder[str] = Recorder()
    going = threading.Event()

    def silent() -> Any:
        begun("begun")
        assert going.wait(PATIENCE)
        return reactivex.never()

    registration = responder.reply("c", silent, many=True)
    (route,) = routes(responder)
    inbox = observed(m.request_many("c", timeout=30))
    begun.wait_for(1)
    registration.unregister()
    eventually(lambda: any(each.is_stopped for each in route.in_hand), "told to stop")
    going.set()
    error = inbox.wait_error()
    assert isinstance(error, ReplyError)
    eventually(lambda: not route.in_hand, "nothing is left")


@pytest.mark.parametrize("form", ["awaitable", "promise", "observable"])
def test_concurrency_counts_what_goes_on_after_a_function_returned(backend: Backend, form: str) -> None:
    m, responder = backend.connect(), backend.connect()
    at_once: list[int] = []
    most = 0
    backend_of_it = backend.connect()
    backend_of_it.reply("behind", lambda: b"")

    async def later() -> bytes:
        nonlocal most
        at_once.append(1)
        most = max(most, len(at_once))
        for _ in range(10):  # others would begin now
            await asyncio.sleep(0)
        at_once.pop()
        return b""

    handlers: dict[str, Callable[[], Any]] = {
        "awaitable": later,
        "promise": lambda: responder.request("behind"),
        "observable": lambda: reactivex.timer(0.002).pipe(reactivex.operators.map(str)),
    }
    make = handlers[form]
    responder.reply("c", lambda: make(), many=form == "observable", concurrency=1)
    promises = [m.request("c") for _ in range(20)]
    (route,) = routes(responder)
    eventually(lambda: len(route.in_hand) > 1 or promises[-1].done(), "several wait")
    assert all(runner._active <= 1 for _, runner in route.bindings if isinstance(runner, ThreadRunner))
    results(promises)
    assert most <= 1
    nothing_left(responder)
    assert all(runner._active == 0 for _, runner in route.bindings if isinstance(runner, ThreadRunner))


def test_a_request_on_a_loop_that_is_closed_without_cancelling_fails(m: Messaging) -> None:
    """Neither cancelled nor finished: a function returned an awaitable for a loop that does not run any more."""
    loop = asyncio.new_event_loop()
    begun = asyncio.Event()

    async def register() -> None:
        async def sleepy() -> bytes:
            begun.set()
            await asyncio.Event().wait()
            return b""

        m.reply("c", lambda: sleepy())
        await m.whiteboard.ready()

    loop.run_until_complete(register())
    promise = m.request("c", timeout=30)
    loop.run_until_complete(within(begun.wait()))
    assert in_hand(m) == 1
    for task in asyncio.all_tasks(loop):
        task._log_destroy_pending = False  # type: ignore[attr-defined]  # it is the test's intention
    loop.close()
    with pytest.raises(ReplyError, match="stopped"):
        promise.result(PATIENCE)
    nothing_left(m)


def test_a_handler_that_is_unregistered_ends_its_streams(m: Messaging, responder: Messaging) -> None:
    """The requester hears that it is over, and unregistering does not wait for a stream without end."""

    async def forever() -> AsyncIterator[str]:
        yield "first"
        await asyncio.Event().wait()

    registration = responder.reply("c", forever)
    inbox = observed(m.request_many("c", timeout=30))
    inbox.wait_for(1)
    registration.unregister()
    error = inbox.wait_error()
    assert isinstance(error, ReplyError)
    assert "was stopped" in error.reason
    nothing_left(responder)


def test_the_items_of_a_completed_observable_are_sent_in_the_end(m: Messaging, responder: Messaging) -> None:
    """They completed: nothing has to be stopped. The last to complete unregisters the handler at once."""
    completed = itertools.count(1)

    def emit(observer: Any, _: Any) -> None:
        for number in range(60):
            observer.on_next(str(number))
        observer.on_completed()
        if next(completed) == 10:
            registration.unregister()

    registration = responder.reply("c", lambda: reactivex.create(emit), many=True)
    inboxes = [observed(m.request_many("c", timeout=30)) for _ in range(10)]
    for inbox in inboxes:
        inbox.wait_completed()
        assert inbox.payloads == [b"%d" % number for number in range(60)]
    nothing_left(responder)


# --- handlers that come and go while requests wait


def test_waiting_requests_go_to_the_next_handler(m: Messaging) -> None:
    """The best one is unregistered, or may work on more at a time; nothing is lost, or handled twice."""
    first, second = Gate(), Gate()
    registration = register(m, ReplyToSingleSubscriptionHandler, first, "c", concurrency=1, ranking=1)
    register(m, ReplyToSingleSubscriptionHandler, second, "c", concurrency=1)
    promises = [m.request("c", b"%d" % number) for number in range(5)]
    eventually(lambda: in_hand(m) == 5 and first.begun, "all wait")
    registration.unregister()
    second.open.set()
    assert [reply.payload for reply in results(promises[1:])] == [b"1", b"2", b"3", b"4"]
    first.open.set()
    assert promises[0].result(PATIENCE).payload == b"0"
    assert (first.begun, second.begun) == ([b"0"], [b"1", b"2", b"3", b"4"])
    nothing_left(m)


def test_more_concurrency_applies_to_waiting_requests(m: Messaging) -> None:
    gate = Gate()
    registration = register(m, ReplyToSingleSubscriptionHandler, gate, "c", concurrency=1)
    promises = [m.request("c", b"%d" % number) for number in range(5)]
    eventually(lambda: in_hand(m) == 5 and gate.begun, "all wait")
    registration.update({**registration.reference.properties, CONCURRENCY: 4})
    gate.begun.wait_for(5)
    gate.open.set()
    assert [reply.payload for reply in results(promises)] == [b"0", b"1", b"2", b"3", b"4"]
    nothing_left(m)


def test_leaving_a_channel_keeps_the_waiting_requests_of_the_others(m: Messaging) -> None:
    """What waits for a handler on one channel stays when it leaves another; there the requester is told."""
    gate = Gate()
    registration = register(m, ReplyToSingleSubscriptionHandler, gate, ["a", "b"], concurrency=1)
    busy = m.request("a", b"busy")
    gate.begun.wait_for(1)
    stays, goes = m.request("a", b"stays", qos="0"), m.request("b", b"goes", qos="0")
    eventually(lambda: in_hand(m) == 3, "all wait")
    registration.update({**registration.reference.properties, CHANNEL: ["a"]})
    with pytest.raises(ReplyError, match="stopped"):
        goes.result(PATIENCE)
    gate.open.set()
    assert (busy.result(PATIENCE).payload, stays.result(PATIENCE).payload) == (b"busy", b"stays")
    assert gate.begun == [b"busy", b"stays"]
    nothing_left(m)


def test_requests_that_were_not_begun_are_requeued(backend: Backend) -> None:
    """Unregistered with requests waiting: another responder gets them, as if for the first time."""
    m, first, second = backend.connect(), backend.connect(), backend.connect()
    gate = Gate()
    registration = first.reply("c", gate.answer, queue="q", concurrency=1)
    promises = [m.request("c", b"%d" % number) for number in range(5)]
    eventually(lambda: in_hand(first) == 5 and gate.begun, "all wait")
    (route,) = routes(first)
    second.reply("c", lambda payload: payload, queue="q", dead_letter_channel="dead")
    with m.subscribe("dead") as dead:
        registration.unregister()
        eventually(lambda: len(route.in_hand) == 1, "waiting requests are requeued")
        gate.open.set()
        assert [reply.payload for reply in results(promises)] == [b"%d" % n for n in range(5)]
        assert dead.counters.received == 0
    assert gate.begun == [b"0"]
    for each in (m, first, second):
        nothing_left(each)


@pytest.mark.parametrize("many", [False, True], ids=["single", "many"])
@pytest.mark.parametrize("is_closed", [False, True], ids=["unregistered", "closed"])
def test_requests_that_a_handler_takes_no_more_are_requeued(backend: Backend, many: bool, is_closed: bool) -> None:
    """None of them is begun again here, whatever ends meanwhile, and none is failed."""
    m, first, second = backend.connect(), backend.connect(), backend.connect()
    gate, refused = asyncio.Event(), []

    async def one(payload: bytes) -> bytes:
        if payload != b"0":
            refused.append(payload)
            await asyncio.sleep(0)
            raise HandlerExhaustedError
        await gate.wait()
        return payload

    async def stream(payload: bytes) -> AsyncIterator[bytes]:
        yield await one(payload)

    def ask(number: int) -> Callable[[], list[bytes]]:
        if not many:
            promise = m.request("c", b"%d" % number, timeout=30)
            return lambda: [promise.result(PATIENCE).payload]
        inbox = observed(m.request_many("c", b"%d" % number, timeout=30))
        return lambda: inbox.wait_payloads(1)

    registration = first.reply("c", stream if many else one, queue="q", concurrency=2)
    answered = [ask(number) for number in range(5)]
    eventually(lambda: in_hand(first) == 5 and bool(refused), "all wait, and one was refused")
    handlers_loop().call_soon_threadsafe(gate.set)
    assert answered[0]() == [b"0"]
    eventually(lambda: in_hand(first) == 4, "the first one is answered")
    if is_closed:
        first.close()
    else:
        registration.unregister()
    second.reply("c", lambda payload: payload, queue="q")
    assert [replies() for replies in answered[1:]] == [[b"1"], [b"2"], [b"3"], [b"4"]]
    assert refused == [b"1"]
    nothing_left(second)
    if not is_closed:
        nothing_left(first)


def test_a_redelivered_request_that_waits_is_handled_once(backend: Backend, m: Messaging) -> None:
    """What waits when the connection is lost comes again from the queue; the copy that waits is forgotten."""
    responder, link = backend.connect_severable()
    gate = Gate()
    responder.reply("c", gate.answer, queue="q", concurrency=1)
    promises = [m.request("c", b"%d" % number, timeout=30) for number in range(4)]
    eventually(lambda: in_hand(responder) == 4 and gate.begun, "all wait")
    link.sever()
    gate.open.set()
    results(promises)
    nothing_left(responder)
    # the one that was in progress was handled, and is handled again: its verdict could not reach the broker
    assert sorted(gate.begun) == [b"0", b"0", b"1", b"2", b"3"]


# --- loops that end


@pytest.mark.parametrize("has_queue", [True, False])
def test_the_requests_of_a_loop_that_ends_go_to_the_next_handler_or_fail(
    backend: Backend, m: Messaging, has_queue: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """To the next handler of their queue; without a queue there is none, and the requester is told."""
    mortal, heir = backend.connect(), backend.connect()
    keywords: dict[str, Any] = {"queue": "q"} if has_queue else {}
    promises: list[Any] = []

    async def sleepy(payload: bytes) -> bytes:
        await asyncio.Event().wait()
        return payload

    async def live() -> None:
        await mortal.reply("c", sleepy, concurrency=2, **keywords)
        promises.extend(m.request("c", b"%d" % number, qos=int(has_queue), timeout=30) for number in range(6))
        await asyncio.to_thread(eventually, lambda: in_hand(mortal) == 6, "six in hand")
        # the loop waits for its executor's threads, and nothing may be begun on it meanwhile
        asyncio.get_running_loop().run_in_executor(None, time.sleep, 0.3)

    asyncio.run(live())
    if has_queue:
        heir.reply("c", lambda payload: payload, **keywords)
        assert sorted(promise.result(PATIENCE).payload for promise in promises) == [b"%d" % n for n in range(6)]
        eventually(lambda: not routes(mortal), "the handler is unbound")
        assert caplog.text.count("event loop that it was registered on is closed") == 1
    else:
        assert all(isinstance(promise.exception(PATIENCE), ReplyError) for promise in promises)
        assert all("stopped" in str(promise.exception(PATIENCE)) for promise in promises)
    nothing_left(mortal)
    gc.collect()
    assert "destroyed" not in caplog.text


def test_a_stream_whose_loop_ends_is_not_begun_again(backend: Backend) -> None:
    """Another handler would begin with its first item; the requester is told instead."""
    m, mortal, heir = backend.connect(), backend.connect(), backend.connect()
    inbox: Recorder[Message] = Recorder()

    async def numbers() -> AsyncIterator[str]:
        yield "1"
        yield "2"
        await asyncio.Event().wait()

    async def live() -> None:
        mortal.reply("c", numbers, queue="q")
        await mortal.whiteboard.ready()
        m.request_many("c", timeout=30).subscribe(inbox)
        await asyncio.to_thread(inbox.wait_for, 2)

    asyncio.run(live())
    heir.reply("c", numbers, queue="q")
    error = inbox.wait_error()
    assert isinstance(error, ReplyError)
    assert "stopped" in error.reason
    assert inbox.payloads == [b"1", b"2"]
    nothing_left(mortal)


def test_a_cancelled_handler_is_tried_once_more(m: Messaging) -> None:
    """Its task is cancelled, which is no answer; the loop goes on, so the request is handled after all."""
    calls: list[bytes] = []

    async def main() -> None:
        async def stubborn(payload: bytes) -> bytes:
            calls.append(payload)
            task = asyncio.current_task()
            if len(calls) == 1 and task is not None:
                task.cancel()
                await asyncio.sleep(0)
            return payload

        m.reply("c", stubborn)
        assert (await m.request("c", b"x", timeout=PATIENCE)).payload == b"x"

    asyncio.run(main())
    assert calls == [b"x", b"x"]
    nothing_left(m)


# --- plain handlers, and the log


def test_a_handler_that_cannot_be_bound_is_logged_once(m: Messaging, caplog: pytest.LogCaptureFixture) -> None:

    def broken() -> Any:
        raise LookupError("no such factory")

    target = {TARGET: f"(osgi.messaging.name={m.name})"}
    m.services.register(ReplyToSingleSubscriptionHandler, broken, {**target, CHANNEL: "c"}, scope="prototype")
    for number in range(3):
        m.reply(f"other/{number}", lambda: b"")
    assert caplog.text.count(f"{m.name}: the request handler") == 1


def test_a_refused_subscription_is_tried_again(m: Messaging, caplog: pytest.LogCaptureFixture) -> None:
    """The broker ends the subscription of a handler: that is said, and it comes back."""
    m.reply("c", lambda: b"here")
    (route,) = routes(m)
    m._connection.engine.call(route.subscription.fail, SubscriptionRefusedError("for the test"))
    eventually(lambda: routes(m) and routes(m)[0] is not route and routes(m)[0].subscription.handle, "subscribed again")
    assert "no requests are taken on 'c'" in caplog.text
    assert m.request("c").result(PATIENCE).payload == b"here"


def test_waiting_requests_of_a_failed_subscription_fail_with_their_handler(m: Messaging) -> None:
    gate = Gate()
    registration = register(m, ReplyToSingleSubscriptionHandler, gate, "c", concurrency=1)
    (route,) = routes(m)
    promises = [m.request("c", b"%d" % number, timeout=30) for number in range(4)]
    eventually(lambda: in_hand(m) == 4 and gate.begun, "all wait")
    m._connection.engine.call(route.subscription.fail, SubscriptionRefusedError("for the test"))
    eventually(lambda: routes(m) and routes(m)[0] is not route, "subscribed again")
    registration.unregister()
    for promise in promises[1:]:
        with pytest.raises(ReplyError, match="stopped"):
            promise.result(PATIENCE)
    gate.open.set()
    assert promises[0].result(PATIENCE).payload == b"0"
    assert gate.begun == [b"0"]
    eventually(lambda: not route.in_hand, "nothing is left")


def test_two_streams_with_one_correlation_id_do_not_cancel_each_other(backend: Backend) -> None:
    x, y, responder = backend.connect(), backend.connect(), backend.connect()
    source: Subject[str] = Subject()
    responder.reply("c", lambda: source, many=True)
    inbox = observed(y.request_many("c", correlation_id="1", timeout=30))
    eventually(lambda: "1" in responder._replies.streams, "the first can be cancelled")
    stream = x.request_many("c", correlation_id="1", timeout=30)
    eventually(lambda: len(source.observers) == 2, "both are handled")
    source.on_next("first")
    assert stream.receive(PATIENCE).payload == b"first"
    stream.close()
    source.on_next("second")
    inbox.wait_for(2)
    source.on_completed()
    inbox.wait_completed()
    assert inbox.payloads == [b"first", b"second"]
    nothing_left(responder)


def test_an_unanswered_request_has_its_deadline(backend: Backend) -> None:
    """A promise that never resolves holds its request; the requester does not wait for it."""
    from messaging import Promise

    m = backend.connect(close_timeout=0.1)
    never: Promise[Any] = Promise("for ever")
    register(m, ReplyToSingleSubscriptionHandler, lambda request, builder: never, "c")
    with pytest.raises(OutcomeUnknownError):
        m.request("c", timeout=0.5).result(PATIENCE)
    assert in_hand(m) == 1
