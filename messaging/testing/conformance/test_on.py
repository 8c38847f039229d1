"""``m.on``: a handler that survives its exceptions, on every adapter."""

from __future__ import annotations

import asyncio
import logging
import threading
from dataclasses import dataclass
from typing import Any

import pytest

from messaging import ArgumentError, ClosedError, Features, Message, Messaging
from messaging.testing.conformance.backends import Backend
from messaging.testing.conformance.helpers import feature, in_form, publish, receive, subscription_to
from messaging.testing.tables import table
from messaging.testing.waiting import PATIENCE, Recorder, eventually, results, within


@dataclass
class Reading:
    celsius: float


class Seen(Recorder[bytes]):
    """A handler that keeps the payloads it is given, and raises as it is told to."""

    def __init__(self, fails: Any = lambda _: False) -> None:
        super().__init__()
        self._fails = fails

    def __call__(self, message: Message) -> None:  # type: ignore[override]  # it keeps the payloads only
        self.append(message.payload)
        if self._fails(message):
            raise ValueError(f"no {message.payload!r}")

    def wait_all(self, *payloads: bytes) -> None:
        """Wait until these payloads were handled, in any order, and no others."""
        self.wait_until(lambda seen: sorted(seen) == sorted(payloads), f"{payloads} handled")


@feature(Features.ACKNOWLEDGE)
def test_a_message_is_acknowledged_when_its_handler_returns(backend: Backend, m: Messaging, channel: str) -> None:
    may_return = threading.Event()
    registration = m.on(channel, lambda _: may_return.wait(PATIENCE), **backend.reliable)
    publish(m, channel, [b"1"], **backend.reliable)
    eventually(lambda: registration.counters.delivered == 1, "handled")
    assert registration.counters.acknowledged == 0
    may_return.set()
    eventually(lambda: registration.counters.acknowledged == 1, "acknowledged")


@feature(Features.ACKNOWLEDGE)
def test_a_handler_survives_its_exceptions_and_gets_the_message_again(
    backend: Backend, m: Messaging, channel: str, caplog: pytest.LogCaptureFixture
) -> None:
    failed: list[bytes] = []

    def fails_once(message: Message) -> bool:
        if message.payload in failed:
            return False
        failed.append(message.payload)
        return True

    seen = Seen(fails_once)
    registration = m.on(channel, seen, **backend.reliable)
    publish(m, channel, [b"1", b"2"], **backend.reliable)
    seen.wait_all(b"1", b"1", b"2", b"2")
    eventually(lambda: registration.counters.acknowledged == 2, "acknowledged")
    assert registration.counters.rejected == 2
    told = [record for record in caplog.records if "raised ValueError" in record.getMessage()]
    assert len(told) == 2
    assert channel in told[0].getMessage()
    assert told[0].exc_info


@feature(Features.ACKNOWLEDGE, Features.EXTENSION_MAX_DELIVERIES, Features.EXTENSION_DEAD_LETTER_CHANNEL)
@table("is_async", [False, True])
def test_a_message_that_is_always_rejected_is_dead_lettered_alone(
    backend: Backend, m: Messaging, is_async: bool
) -> None:
    channel, dead = backend.channel(), backend.channel("dead")
    seen = Seen(lambda message: message.payload == b"poison")
    with m.subscribe(dead, **backend.reliable) as letters:
        m.on(channel, in_form(seen.__call__, is_async=is_async), max_deliveries=3, dead_letter_channel=dead)
        publish(m, channel, [b"1", b"poison", b"2"], **backend.reliable)
        assert receive(letters, 1) == [b"poison"]
        seen.wait_all(b"1", b"poison", b"poison", b"poison", b"2")


def test_a_typed_handler_gets_the_value(backend: Backend, m: Messaging) -> None:
    several = [backend.channel(name) for name in ("annotated", "model", "message", "nothing")]
    seen: Recorder[Any] = Recorder()

    @m.on(several[0], **backend.reliable)
    def annotated(reading: Reading) -> None:
        seen.append(reading)

    @m.on(several[1], model=Reading, **backend.reliable)
    def with_model(reading) -> None:
        seen.append(reading)

    @m.on(several[2], model=Reading, **backend.reliable)
    async def with_message(message: Message) -> None:
        seen.append((message.payload, message.value()))

    @m.on(several[3], **backend.reliable)
    def nothing() -> None:
        seen.append(None)

    results(m.publish(channel, b'{"celsius": 1}', **backend.reliable) for channel in several)
    seen.wait_for(4)
    assert [each for each in seen if isinstance(each, Reading)] == [Reading(1)] * 2
    assert (b'{"celsius": 1}', Reading(1)) in seen
    assert None in seen
    assert [registration.handler for registration in m.handlers] == [annotated, with_model, with_message, nothing]


def test_payloads_that_do_not_fit_are_counted_and_skipped(
    backend: Backend, m: Messaging, channel: str, caplog: pytest.LogCaptureFixture
) -> None:
    seen: list[Reading] = []

    def store(reading: Reading) -> None:
        seen.append(reading)

    registration = m.on(channel, store, **backend.reliable)
    publish(m, channel, [b'{"celsius": "warm"}', b"\xff", b'{"celsius": 2}'], **backend.reliable)
    eventually(lambda: seen == [Reading(2)], "the one that fits")
    eventually(lambda: registration.counters.invalid == 2, "counted")
    assert registration.counters.rejected == 0
    assert sum("does not fit handler" in record.getMessage() for record in caplog.records) == 2


@feature(Features.ACKNOWLEDGE, Features.EXTENSION_DEAD_LETTER_CHANNEL)
@table("is_async", [False, True])
def test_payloads_that_do_not_fit_are_dead_lettered_if_asked_for(
    backend: Backend, m: Messaging, is_async: bool
) -> None:
    channel, dead = backend.channel(), backend.channel("dead")
    seen: list[Reading] = []

    def store(reading: Reading) -> None:
        seen.append(reading)

    with m.subscribe(dead, **backend.reliable) as letters:
        registration = m.on(channel, in_form(store, is_async=is_async), dead_letter_channel=dead)
        publish(m, channel, [b"{}", b'{"celsius": 2}'], **backend.reliable)
        letter = letters.receive(PATIENCE)
        assert letter.payload == b"{}"
        if Features.EXTENSION_HEADERS in m.features:
            assert letter.context.extensions["headers"]["x-dead-letter-reason"] == "invalid"
        eventually(lambda: seen == [Reading(2)], "the one that fits")
        eventually(lambda: registration.counters.dead_lettered == 1, "counted")


@feature(Features.ACKNOWLEDGE)
@table("is_async", [False, True])
def test_as_many_messages_are_handled_at_a_time_as_asked_for(backend: Backend, m: Messaging, is_async: bool) -> None:
    channel = backend.channel()
    lock = threading.Lock()
    now: list[bytes] = []
    most = 0
    all_there = threading.Event()

    def handle(message: Message) -> None:
        nonlocal most
        with lock:
            now.append(message.payload)
            most = max(most, len(now))
            if len(now) == 3:
                all_there.set()
        all_there.wait(PATIENCE)
        now.remove(message.payload)

    registration = m.on(channel, in_form(handle, is_async=is_async), concurrency=3, **backend.reliable)
    publish(m, channel, [b"%d" % number for number in range(12)], **backend.reliable)
    eventually(lambda: registration.counters.acknowledged == 12, "acknowledged")
    assert most == 3


@feature(Features.ACKNOWLEDGE, Features.EXTENSION_QUEUE)
def test_messages_finished_out_of_order_are_settled_each_by_itself(backend: Backend) -> None:
    """Those after the first are acknowledged while it is in progress."""
    channel, queue = backend.channel(), backend.queue()
    first = backend.connect(close_timeout=0.2)
    stuck = threading.Event()
    seen = Seen()

    def handle(message: Message) -> None:
        if message.payload == b"0":
            stuck.wait(PATIENCE)
            return
        seen(message)

    registration = first.on(channel, handle, concurrency=2, queue=queue, **backend.reliable)
    publish(first, channel, [b"0", b"1", b"2", b"3"], **backend.reliable)
    seen.wait_all(b"1", b"2", b"3")
    eventually(lambda: registration.counters.acknowledged == 3, "acknowledged")
    stuck.set()
    eventually(lambda: registration.counters.acknowledged == 4, "acknowledged")


def test_prefetch_is_at_least_concurrency(backend: Backend, channel: str) -> None:
    m = backend.connect(prefetch=1)
    barrier = threading.Barrier(2)
    met: Recorder[int] = Recorder()

    def handle(_: Message) -> None:
        met.append(barrier.wait(PATIENCE))

    m.on(channel, handle, concurrency=2, **backend.reliable)
    publish(m, channel, [b"1", b"2"], **backend.reliable)
    assert sorted(met.wait_for(2)) == [0, 1]
    for options in ({"concurrency": 0}, {"concurrency": 2, "prefetch": 1}, {"concurrency": True}):
        with pytest.raises(ArgumentError):
            m.on(channel, print, **options)


def test_a_handler_may_close_its_registration(backend: Backend, m: Messaging, channel: str) -> None:
    seen: list[bytes] = []
    closed: list[bytes] = []

    def handle(message: Message) -> None:
        seen.append(message.payload)
        with registration:  # leaving it closes, and must not wait for the end of this very function
            pass
        closed.append(message.payload)

    registration = m.on(channel, handle, **backend.reliable)
    publish(m, channel, [b"1", b"2"], **backend.reliable)
    registration.closed.result(PATIENCE)
    assert len(seen) == len(closed) == 1
    assert registration not in m.handlers
    eventually(lambda: subscription_to(m, channel) is None, "unsubscribed")


@table("kind", ["function", "coroutine function", "function that returns a coroutine"])
def test_a_handler_may_close_the_instance(backend: Backend, kind: str) -> None:
    """Closing does not wait for the handler that it is called in, which would take all of the ``close_timeout``."""
    m = backend.connect(close_timeout=10 * PATIENCE)
    channel = backend.channel()
    closed: Recorder[str] = Recorder()

    def handle(_: Message) -> None:
        m.close()
        closed.append(kind)

    async def handle_async(_: Message) -> None:
        await m.aclose()
        closed.append(kind)

    handlers: dict[str, Any] = {"function": handle, "coroutine function": handle_async}
    handler = handlers.get(kind, lambda message: handle_async(message))
    registration = m.on(channel, handler, **backend.reliable)
    m.publish(channel, b"1", **backend.reliable)
    closed.wait_for(1)
    registration.closed.result(PATIENCE)
    m.close()
    assert registration.counters.rejected == 0


@feature(Features.ACKNOWLEDGE, Features.EXTENSION_QUEUE)
@table("is_async", [False, True])
def test_closing_finishes_the_message_in_progress_and_releases_the_others(backend: Backend, is_async: bool) -> None:
    m, other = backend.connect(), backend.connect()
    channel, queue = backend.channel(), backend.queue()
    seen, may_end = Seen(), threading.Event()

    def handle(message: Message) -> None:
        seen(message)
        may_end.wait(PATIENCE)

    registration = m.on(channel, in_form(handle, is_async=is_async), queue=queue, **backend.reliable)
    publish(other, channel, [b"1", b"2", b"3"], **backend.reliable)
    seen.wait_for(1)
    eventually(lambda: registration.counters.received == 3, "all there")
    with other.subscribe(channel, queue=queue, **backend.reliable) as rest:
        closing = registration.close()
        assert not closing.done()
        may_end.set()
        closing.result(PATIENCE)
        assert registration.counters.acknowledged == 1
        if "brokerRedelivery" in m.features:
            assert sorted(receive(rest, 2)) == [b"2", b"3"]


@feature(Features.ACKNOWLEDGE)
def test_what_a_handler_raises_may_be_any_base_exception(
    backend: Backend, m: Messaging, channel: str, caplog: pytest.LogCaptureFixture
) -> None:
    kinds: list[type[BaseException]] = [SystemExit, KeyboardInterrupt, GeneratorExit, asyncio.CancelledError]
    done = Seen()

    def raise_or_keep(message: Message) -> None:
        if kinds:
            raise kinds.pop()
        done(message)

    async def raise_or_keep_async(message: Message) -> None:
        raise_or_keep(message)

    with m.on(channel, raise_or_keep, **backend.reliable) as registration:
        publish(m, channel, [b"1"], **backend.reliable)
        done.wait_all(b"1")
        assert registration.counters.rejected == 4
    kinds += [KeyboardInterrupt, asyncio.CancelledError]
    with m.on(channel, raise_or_keep_async, **backend.reliable):
        publish(m, channel, [b"2"], **backend.reliable)
        done.wait_all(b"1", b"2")
    caplog.clear()


def test_a_coroutine_function_runs_on_the_loop_it_was_registered_on(backend: Backend) -> None:
    async def run() -> None:
        loop = asyncio.get_running_loop()
        found: asyncio.Future[Any] = loop.create_future()
        channel = backend.channel()

        async def handle(message: Message) -> None:
            found.set_result((asyncio.get_running_loop(), message.payload))

        async with backend.connect() as m, m.on(channel, handle, **backend.reliable):
            await m.publish(channel, b"hello", **backend.reliable)
            assert await within(found) == (loop, b"hello")

    asyncio.run(run())


def test_a_registration_ends_with_the_loop_of_its_handler(
    backend: Backend, m: Messaging, channel: str, caplog: pytest.LogCaptureFixture
) -> None:
    seen = Seen()

    async def handle(message: Message) -> None:
        seen(message)
        await asyncio.Event().wait()

    async def register() -> Any:
        registration = m.on(channel, handle, **backend.reliable)
        await registration
        m.publish(channel, b"1", **backend.reliable)
        await asyncio.to_thread(seen.wait_for, 1)
        return registration

    registration = asyncio.run(register())
    assert isinstance(registration.closed.exception(PATIENCE), ClosedError)
    assert any("has ended" in record.getMessage() for record in caplog.records if record.levelno == logging.ERROR)
    eventually(lambda: subscription_to(m, channel) is None, "unsubscribed")


@feature(Features.ACKNOWLEDGE)
@pytest.mark.wire
def test_a_handler_goes_on_after_a_lost_connection(backend: Backend, channel: str) -> None:
    m, link = backend.connect_severable(reconnect_min=0.01, reconnect_max=0.1)
    other = backend.connect()
    seen = Seen()
    m.on(channel, seen, **backend.reliable)
    publish(other, channel, [b"1"], **backend.reliable)
    seen.wait_all(b"1")
    link.sever()
    eventually(lambda: (found := subscription_to(m, channel)) is not None and found.channel.connected, "back")

    def arrived() -> bool:
        publish(other, channel, [b"2"], **backend.reliable)
        return b"2" in seen

    eventually(arrived, "goes on")


@feature(Features.ACKNOWLEDGE)
def test_more_messages_than_the_buffer_holds_are_handled_in_order(backend: Backend, m: Messaging, channel: str) -> None:
    seen = Seen()
    registration = m.on(channel, seen, buffer_size=8, prefetch=4, **backend.reliable)
    payloads = [b"%d" % number for number in range(100)]
    publish(m, channel, payloads, **backend.reliable)
    assert seen.wait_for(100) == payloads
    eventually(lambda: registration.counters.acknowledged == 100, "acknowledged")


def test_messages_without_acknowledgement_are_handled_too(m: Messaging, channel: str) -> None:
    seen = Seen(lambda message: message.payload == b"1")
    with m.on(channel, seen, qos=0, buffer_size=4):
        for payload in (b"1", b"2", b"3", b"4", b"5", b"6"):
            m.publish(channel, payload, qos=0).result(PATIENCE)
            eventually(lambda payload=payload: payload in seen, "handled")


def test_what_is_no_handler_is_refused(m: Messaging) -> None:

    def generator(_: Message) -> Any:
        yield

    async def async_generator(_: Message) -> Any:
        yield

    def needs_two(_: Message, __: int) -> None: ...

    for handler in ("x", 7, generator, async_generator, needs_two):
        with pytest.raises(ArgumentError):
            m.on("a", handler)
    with pytest.raises(ArgumentError, match="dead-letter channel"):
        m.on("a", print, on_invalid="dead_letter")
    with pytest.raises(ArgumentError, match="on_invalid"):
        m.on("a", print, on_invalid="raise")
    m.close()
    with pytest.raises(ClosedError):
        m.on("a", print)
