"""Requests while something breaks: each has an outcome, the next one works, and replies reach only their requester.

What becomes of a request depends on what the protocol keeps: RabbitMQ its queues, MQTT a session that is asked for.
"""

from __future__ import annotations

import contextlib
import secrets
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final, Self

import pytest
import reactivex
from reactivex import abc as rx
from reactivex.disposable import Disposable

import messaging
from messaging import ConnectionLostError, Messaging, OutcomeUnknownError
from messaging.execution import engine
from messaging.replyto import Request
from messaging.runtime import MessagingRuntimeDTO
from messaging.services import ServiceRegistry
from messaging.testing.brokers import Broker, Mosquitto
from messaging.testing.proxy import Proxy
from messaging.testing.waiting import PATIENCE, Recorder, eventually
from tests.faults.scenario import OUTAGE, QUICK, Victim, through

#: requests a handler that is a function works on at a time
CONCURRENCY: Final = 8


@dataclass(frozen=True)
class Kind:
    """A protocol.

    Attributes:
        options: that follow the broker's URL.
        session: settings with which the broker keeps what an instance misses, and needs a ``client_id``.
    """

    name: str
    options: str = ""
    session: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.name


MQTT5: Final = Kind("mqtt5", "?version=5", MappingProxyType({"session_expiry": 3600, "clean_start": False}))
MQTT311: Final = Kind("mqtt311", "?version=3.1.1&envelope=true", MappingProxyType({"clean_start": False}))
AMQP: Final = Kind("amqp")

kinds = pytest.mark.parametrize("kind", [MQTT5, MQTT311, AMQP], ids=str)
sessions = pytest.mark.parametrize("kind", [MQTT5, MQTT311], ids=str)


class Place:
    """A broker of one kind, and what a test needs of it. Closes what it connected."""

    def __init__(self, kind: Kind, broker: Broker) -> None:
        self.kind = kind
        self.broker = broker
        self.url = broker.url + kind.options
        number = secrets.token_hex(4)  # another process may use the broker
        self.channel, self.queue = f"requests/{number}", f"requests-{number}"
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def connect(self, proxy: Proxy | None = None, **settings: Any) -> Messaging:
        """An instance; it comes back quickly."""
        url = self.url if proxy is None else through(proxy, self.url)
        settings = {**QUICK, "timeout": OUTAGE, "services": ServiceRegistry(), **settings}
        return self._stack.enter_context(messaging.connect(url, **settings))

    def session(self, role: str) -> dict[str, Any]:
        """Settings of an instance whose session the broker keeps."""
        return {"client_id": f"{self.queue}-{role}", **self.kind.session}

    def proxy(self) -> Proxy:
        """A way to the broker that can be cut."""
        return self._stack.enter_context(Proxy(self.broker.host, self.broker.port))


@pytest.fixture
def place(request: pytest.FixtureRequest, kind: Kind) -> Iterator[Place]:
    """Where the test is."""
    with Place(kind, request.getfixturevalue("own_rabbitmq" if kind is AMQP else "broker")) as place:
        yield place


def online(*instances: Messaging) -> None:
    """Wait until they are connected, and their handlers take requests."""

    def is_online(dto: MessagingRuntimeDTO) -> bool:
        return dto.connection.state == "connected" and all(
            each.request_channel.connected for each in dto.reply_to_subscriptions
        )

    for m in instances:
        eventually(lambda m=m: is_online(m.runtime.get_runtime_dto()), "it is back", patience=OUTAGE)  # type: ignore[misc]


def check_books(m: Messaging, *, made: int, answered: int | None = None) -> None:
    """See that what the runtime tells agrees with ``made`` requests, of which none is pending."""

    def settled() -> bool:
        dto = m.runtime.get_runtime_dto()
        return dto.requests.pending == dto.publisher.pending == 0

    eventually(settled, lambda: f"nothing is pending: {m.runtime.get_runtime_dto()}")
    found = m.runtime.get_runtime_dto().requests
    assert found.answered + found.faults + found.failed == made, found
    assert answered is None or found.answered == answered, found


class Held:
    """A handler that answers when it is let, and keeps what it was asked.

    Args:
        m: whose handler it is.
        channel: of its requests.
    """

    def __init__(self, m: Messaging, channel: str, **options: Any) -> None:
        self.channel = channel
        self.go = threading.Event()
        self.handled: list[bytes] = []
        m.reply(channel, self._handle, **options)

    def _handle(self, request: bytes) -> bytes:
        self.handled.append(request)
        assert self.go.wait(OUTAGE)
        return b"re:" + request


# --- processes that are killed

#: prints when it is there, and when it is busy; see below
_RESPONDER: Final = """
import sys, threading
import messaging
url, settings, channel, options, name, first_held = sys.argv[1], *map(eval, sys.argv[2:])
def handler(request: bytes) -> bytes:
    if int(request) >= first_held:
        sys.stdout.write("held\\n")  # at once: they are several
        sys.stdout.flush()
        threading.Event().wait()
    return name + b":" + request
m = messaging.connect(url, **settings)
m.reply(channel, handler, **options)
print("up", flush=True)
threading.Event().wait()
"""
_REQUESTER: Final = """
import sys
import messaging
url, channel = sys.argv[1:]
m = messaging.connect(url)
for number, message in enumerate(m.request_many(channel, sys.maxsize)):
    if number == 5:
        print("up", flush=True)
"""


def responding(
    place: Place,
    name: bytes,
    options: Mapping[str, Any],
    settings: Mapping[str, Any] | None = None,
    *,
    first_held: int = sys.maxsize,
) -> Victim:
    """Answers requests that are numbers below ``first_held``, with its name; writes ``held`` for each of the others."""
    return Victim(_RESPONDER, place.url, *map(repr, [settings or {}, place.channel, dict(options), name, first_held]))


# --- responders


@kinds
def test_unanswered_requests_of_a_killed_responder_are_delivered_to_the_next(place: Place) -> None:
    """Where the protocol promises it: by a queue, or by the session of a client id."""
    m = place.connect()
    options: dict[str, Any] = {"qos": 1}
    settings: dict[str, Any] = {}
    if place.kind is AMQP:
        options["queue"] = place.queue
    else:
        settings = place.session("responder")
    with responding(place, b"first", options, settings, first_held=10) as first:
        promises = [m.request(place.channel, b"%d" % number, qos=1) for number in range(100)]
        for _ in range(CONCURRENCY):
            first.expect("held")
        for promise in promises[:10]:
            promise.result(PATIENCE)
        eventually(lambda: m.runtime.get_runtime_dto().publisher.pending == 0, "the broker has all requests")
        first.kill()
        assert m.runtime.get_runtime_dto().requests.pending == 90
        with responding(place, b"second", options, settings):
            answers = [promise.result(OUTAGE).payload for promise in promises]
    assert answers == [b"%s:%d" % (b"first" if number < 10 else b"second", number) for number in range(100)]
    check_books(m, made=100, answered=100)


@kinds
def test_the_requests_of_a_killed_responder_that_is_one_of_two_are_settled(place: Place) -> None:
    """RabbitMQ gives them to the other one. Of MQTT, those it had are known to be unknown at their deadline."""
    m = place.connect()
    options = {"qos": 1, "queue": place.queue}
    timeout = OUTAGE if place.kind is AMQP else 3.0
    with responding(place, b"first", options, first_held=0) as first, responding(place, b"second", options):
        m.request(place.channel, b"-1", qos=1).result(PATIENCE)  # what is made once is there
        promises = [m.request(place.channel, b"%d" % number, qos=1, timeout=timeout) for number in range(100)]
        first.expect("held")
        first.kill()
        errors = [promise.exception(PATIENCE) for promise in promises]
        assert {type(error) for error in errors} <= {type(None), OutcomeUnknownError}
        for number, (promise, error) in enumerate(zip(promises, errors, strict=True)):
            assert error is not None or promise.result().payload == b"second:%d" % number
        answered = errors.count(None)
        assert 0 < answered <= 100
        assert answered == 100 or place.kind is not AMQP
        assert m.request(place.channel, b"100", qos=1).result(PATIENCE).payload == b"second:100"
    check_books(m, made=102, answered=answered + 2)


# --- brokers


@pytest.mark.parametrize("kind", [MQTT5, MQTT311, pytest.param(AMQP, marks=pytest.mark.slow)], ids=str)
def test_a_killed_broker_fails_pending_requests_and_later_ones_are_answered(place: Place) -> None:
    """At once; requester and responder reconnect by themselves."""
    m, responder = place.connect(), place.connect()
    held = Held(responder, place.channel)
    promises = [m.request(place.channel, b"%d" % number, qos=1) for number in range(20)]
    eventually(lambda: len(held.handled) == CONCURRENCY, "handlers are busy")
    eventually(lambda: m.runtime.get_runtime_dto().publisher.pending == 0, "the broker has all requests")
    start = time.monotonic()
    place.broker.kill()
    errors = [promise.exception(PATIENCE) for promise in promises]
    assert {type(error) for error in errors} == {ConnectionLostError}
    assert time.monotonic() - start < OUTAGE / 2
    place.broker.start()
    held.go.set()
    online(m, responder)
    for number in range(20, 40):
        assert m.request(place.channel, b"%d" % number, qos=1).result(PATIENCE).payload == b"re:%d" % number
    check_books(m, made=40, answered=20)
    check_books(responder, made=0)


@sessions
def test_with_sessions_pending_requests_outlive_a_restart_of_the_broker(kind: Kind) -> None:
    with Mosquitto(["autosave_on_changes false"], persistence=True) as broker, Place(kind, broker) as place:
        m = place.connect(**place.session("requester"))
        responder = place.connect(**place.session("responder"))
        held = Held(responder, place.channel, qos=1)
        promises = [m.request(place.channel, b"%d" % number, qos=1) for number in range(20)]
        eventually(lambda: len(held.handled) == CONCURRENCY, "handlers are busy")
        eventually(lambda: m.runtime.get_runtime_dto().publisher.pending == 0, "the broker has all requests")
        broker.restart()
        held.go.set()
        for number, promise in enumerate(promises):
            assert promise.result(OUTAGE).payload == b"re:%d" % number
        check_books(m, made=20, answered=20)


# --- replies that get lost

lost = pytest.mark.parametrize("on_the_way", [False, True], ids=["in the handler", "on the way"])


def lose_connection(proxy: Proxy, held: Held, m: Messaging, responder: Messaging, *, on_the_way: bool) -> Request:
    """A request whose connection is reset when it was handled, or just before its reply arrives."""
    held.go.set()
    m.request(held.channel, b"warm", qos=1).result(PATIENCE)  # what is made once is there
    if on_the_way:
        proxy.hold()
    else:
        held.go.clear()
    promise = m.request(held.channel, b"1", qos=1)
    eventually(lambda: held.handled[-1] == b"1", "it is handled")
    if on_the_way:
        eventually(lambda: responder.runtime.get_runtime_dto().publisher.published == 2, "the broker has the reply")
    assert not promise.done()
    proxy.sever()
    proxy.release()
    return promise


@kinds
@lost
def test_a_request_whose_reply_is_lost_fails_at_once_and_the_next_is_right(place: Place, on_the_way: bool) -> None:
    """Without a session; a reply that arrives all the same is dropped. No request is sent twice."""
    proxy = place.proxy()
    m, responder = place.connect(proxy), place.connect()
    held = Held(responder, place.channel)
    promise = lose_connection(proxy, held, m, responder, on_the_way=on_the_way)
    start = time.monotonic()
    with pytest.raises(ConnectionLostError):
        promise.result(PATIENCE)
    assert time.monotonic() - start < OUTAGE / 2
    following = m.request(place.channel, b"2", qos=1)
    eventually(lambda: b"2" in held.handled, "the next one is handled")
    held.go.set()
    assert following.result(PATIENCE).payload == b"re:2"
    assert held.handled == [b"warm", b"1", b"2"]
    if not on_the_way and place.kind is not AMQP:  # whose reply channels end with their connection
        eventually(lambda: m.runtime.get_runtime_dto().requests.late == 1, "the late one is counted")
    check_books(m, made=3, answered=2)
    found = m.runtime.get_runtime_dto().requests
    assert (found.duplicate, found.foreign) == (0, 0)


@sessions
@lost
def test_with_a_session_the_reply_comes_after_reconnecting(place: Place, on_the_way: bool) -> None:
    proxy = place.proxy()
    m, responder = place.connect(proxy, **place.session("requester")), place.connect()
    held = Held(responder, place.channel)
    promise = lose_connection(proxy, held, m, responder, on_the_way=on_the_way)
    held.go.set()
    assert promise.result(PATIENCE).payload == b"re:1"
    # the confirm of the request was on the way, too: then it is sent again, as any message of QoS 1
    assert held.handled == [b"warm", b"1"] or (on_the_way and held.handled == [b"warm", b"1", b"1"])
    check_books(m, made=2, answered=2)


# --- streams of replies


class Endless:
    """A handler that goes on until it is told to stop, or that many items; ``stopped`` has an item for each end.

    Args:
        form: what it returns.
        m: whose handler it is.
        channel: of its requests.
    """

    def __init__(self, form: str, m: Messaging, channel: str) -> None:
        self.stopped: Recorder[str] = Recorder()
        m.reply(channel, getattr(self, form), concurrency=1)

    def generator(self, count: int) -> Iterator[int]:
        try:
            yield from range(count)
        finally:
            self.stopped.append("stopped")

    async def coroutine(self, count: int) -> AsyncIterator[int]:
        try:
            for number in range(count):
                yield number
        finally:
            self.stopped.append("stopped")

    def observable(self, count: int) -> reactivex.Observable[int]:
        def subscribe(observer: rx.ObserverBase[int], _: rx.SchedulerBase | None = None) -> rx.DisposableBase:
            over = threading.Event()

            def work() -> None:
                for number in range(count):
                    if over.is_set():
                        break
                    observer.on_next(number)
                else:
                    observer.on_completed()
                self.stopped.append("stopped")

            threading.Thread(target=work, name="endless", daemon=True).start()
            return Disposable(over.set)

        return reactivex.create(subscribe)

    def check_stopped(self, m: Messaging, channel: str) -> None:
        """See that it stops, and is free for the next request."""
        self.stopped.wait_for(1)
        assert [message.value() for message in m.request_many(channel, 3)] == [0, 1, 2]
        self.stopped.wait_for(2)


forms = pytest.mark.parametrize("form", ["generator", "coroutine", "observable"])


@kinds
def test_streams_without_a_fault_are_complete_and_in_order(place: Place) -> None:
    """More than the broker's window, in order, again and again: no item overtakes another."""
    m, responder = place.connect(), place.connect()
    Endless("generator", responder, place.channel)
    for _ in range(20):
        assert [message.value() for message in m.request_many(place.channel, 300)] == [*range(300)]


@kinds
@pytest.mark.parametrize("paused", [False, True], ids=["flowing", "paused"])
def test_a_handler_stops_although_it_subscribes_late_to_cancellations(
    place: Place, paused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cancellation is behind more replies than the broker sends without an answer."""
    m, responder = place.connect(), place.connect()
    requests = responder._requests
    begin, inboxes = requests.start, []
    monkeypatch.setattr(requests, "start", inboxes.append)  # it cannot be told before it has subscribed
    endless = Endless("generator", responder, place.channel)
    stream = m.request_many(place.channel, sys.maxsize)
    received: Recorder[Any] = Recorder()
    disposable = stream.subscribe(received)
    received.wait_for(100)
    if paused:
        stream.pause()
    eventually(lambda: len(inboxes) == 1, "it is about to subscribe")
    disposable.dispose()
    engine().call(engine().loop.call_later, 0.2, begin, inboxes[0])
    endless.check_stopped(m, place.channel)


@pytest.mark.parametrize("kind", [MQTT5, AMQP], ids=str)
@forms
def test_the_handler_of_a_stream_stops_when_its_requester_is_killed(place: Place, form: str) -> None:
    """The broker reports that the replies have no receiver. MQTT 3.1.1 does not."""
    m, responder = place.connect(), place.connect()
    endless = Endless(form, responder, place.channel)
    with Victim(_REQUESTER, place.url, place.channel) as requester:
        requester.kill()
        endless.check_stopped(m, place.channel)


# --- whiteboards that are closed


@pytest.mark.parametrize("kind", [AMQP], ids=str)
@pytest.mark.parametrize("in_time", [True, False], ids=["in time", "too late"])
def test_requests_of_a_closed_instance_are_answered_there_or_go_to_another(place: Place, in_time: bool) -> None:
    """Each is handled once. The replies of handlers that end after ``close_timeout`` come too late."""
    m, first = place.connect(), place.connect(close_timeout=OUTAGE if in_time else 0.5)
    held = Held(first, place.channel, queue=place.queue, concurrency=2)
    promises = [m.request(place.channel, b"%d" % number, qos=1) for number in range(10)]
    eventually(lambda: len(held.handled) == 2, "handlers are busy")
    closing = threading.Thread(target=first.close)
    closing.start()
    eventually(lambda: first._closing is not None if in_time else not closing.is_alive(), "it closes")
    second = Held(place.connect(), place.channel, queue=place.queue)
    second.go.set()
    if in_time:
        held.go.set()
    answers = [promise.result(PATIENCE).payload for promise in promises]
    held.go.set()
    closing.join(PATIENCE)
    assert not closing.is_alive()
    assert answers == [b"re:%d" % number for number in range(10)]
    assert len(held.handled) == 2
    assert sorted(second.handled + held.handled * in_time) == [b"%d" % number for number in range(10)]
    check_books(m, made=10, answered=10)
    assert m.runtime.get_runtime_dto().requests.duplicate == 0
