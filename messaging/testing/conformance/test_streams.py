"""MessageStream in its three faces: blocking, asyncio, Rx."""

from __future__ import annotations

import asyncio

import pytest
import reactivex
from reactivex import operators as ops

from messaging import ClosedError, Message, Messaging
from messaging.errors import DeadlineError
from messaging.testing.conformance.backends import Backend
from messaging.testing.conformance.helpers import nothing_more, publish, receive, subscription_to
from messaging.testing.tables import table
from messaging.testing.waiting import PATIENCE, eventually, in_thread, observed, results

# --- blocking


def test_a_stream_is_iterated(m: Messaging, channel: str) -> None:
    payloads = [b"1", b"2", b"3"]
    seen = []
    with m.subscribe(channel) as stream:
        with pytest.raises(DeadlineError):
            stream.receive(0.05)
        publish(m, channel, payloads)
        for message in stream:
            seen.append(message.payload)
            if len(seen) == len(payloads):
                break
    assert seen == payloads
    assert list(stream) == []
    with pytest.raises(ClosedError):
        stream.receive(PATIENCE)


def test_closing_a_stream_wakes_whoever_waits_for_a_message(m: Messaging, channel: str) -> None:
    with m.subscribe(channel) as stream:
        consuming = in_thread(lambda: [message.payload for message in stream])
        publish(m, channel, [b"1"])
        eventually(lambda: stream.counters.delivered == 1, "it has the first, and waits for the next")
    assert consuming.result(PATIENCE) == [b"1"]


# --- asyncio


def test_the_asyncio_face(backend: Backend) -> None:
    async def main() -> None:
        channel = backend.channel()
        async with asyncio.timeout(PATIENCE), backend.connect() as m:
            async with m.subscribe(channel, **backend.reliable) as stream:
                for payload in (b"1", b"2", b"3"):
                    await m.publish(channel, payload, **backend.reliable)
                seen = []
                async for message in stream:
                    seen.append(message.payload)
                    if len(seen) == 3:
                        break
                assert seen == [b"1", b"2", b"3"]
                waiting = asyncio.ensure_future(anext(stream, "the end"))
                await asyncio.sleep(0)
            assert await waiting == "the end"
            assert [message async for message in stream] == []
        with pytest.raises(ClosedError):
            m.publish(channel, b"late")

    asyncio.run(main())


def test_many_event_loops_share_an_instance(backend: Backend, m: Messaging) -> None:
    """Publishing and iterating from loops of other threads, all at once.

    No more than mosquitto's window of 20: beyond it several streams of one client of MQTT 3.1.1 may lose their order.
    """

    async def round_trip(channel: str) -> None:
        async with asyncio.timeout(PATIENCE), m.subscribe(channel, **backend.reliable) as stream:
            for number in range(5):
                await m.publish(channel, str(number).encode(), **backend.reliable)
            for number in range(5):
                assert (await anext(stream)).payload == str(number).encode()

    results((in_thread(lambda: asyncio.run(round_trip(backend.channel()))) for _ in range(4)), 2 * PATIENCE)


# --- Rx


def test_a_stream_is_an_observable(m: Messaging, channel: str) -> None:
    stream = m.subscribe(channel)
    assert isinstance(stream, reactivex.Observable)
    inbox = observed(stream)
    # a plain thread gets here when the broker has confirmed
    assert stream.ready.done()
    publish(m, channel, [b"1", b"2"])
    assert inbox.wait_payloads(2) == [b"1", b"2"]
    assert not inbox.is_completed
    stream.close().result(PATIENCE)
    inbox.wait_completed()
    assert inbox.error is None


def reciprocal(message: Message) -> int:
    return 1 // int(message.payload)


@table("how", ["take(1)", "dispose"])
def test_an_observer_that_ends_gets_nothing_more(backend: Backend, m: Messaging, how: str) -> None:
    """Scenario 30 [S]: by an operator, and by disposal; nothing is emitted after it, and the broker is told."""
    channel = backend.channel()
    stream = m.subscribe(channel)
    inbox = observed(stream.pipe(ops.take(1)) if how == "take(1)" else stream)
    publish(m, channel, [b"1", b"2"] if how == "take(1)" else [b"1"])
    inbox.wait_for(1)
    if how == "dispose":
        inbox.dispose()
    inbox.dispose()
    eventually(lambda: subscription_to(m, channel) is None, "unsubscribed")
    with m.subscribe(f"{channel}/other") as other:  # its message comes after every earlier one of the broker
        nothing_more(m, f"{channel}/other", other)
    with m.subscribe(channel) as again:
        publish(m, channel, [b"3"])
        assert receive(again, 1) == [b"3"]
    assert inbox.payloads == [b"1"]
    assert inbox.is_completed == (how == "take(1)")


@table("what", ["an observer", "a function of an operator"])
def test_a_callback_that_raises_ends_its_own_stream_only(backend: Backend, m: Messaging, what: str) -> None:
    """Scenario 34 [S]: it gets the error; others, on the same channel too, go on."""
    channel = backend.channel()
    stream, sibling = m.subscribe(channel), observed(m.subscribe(channel))
    if what == "an observer":
        failing = observed(stream, reciprocal)
    else:
        failing = observed(stream.pipe(ops.do_action(reciprocal)))
    publish(m, channel, [b"1", b"0", b"3"])
    assert isinstance(failing.wait_error(), ZeroDivisionError)
    assert sibling.wait_payloads(3) == [b"1", b"0", b"3"]
    eventually(lambda: len(m.runtime.get_runtime_dto().subscriptions) == 1, "the failed one is unsubscribed")
    publish(m, channel, [b"4"])
    assert sibling.wait_payload(b"4") == [b"1", b"0", b"3", b"4"]
    assert failing.payloads == [b"1"]
    sibling.dispose()
    eventually(lambda: not m.runtime.get_runtime_dto().subscriptions, "the other one, too")


# --- pause and resume


def test_a_paused_stream_emits_nothing(backend: Backend, m: Messaging, channel: str) -> None:
    """To an observer; and an iterator waits."""
    stream, iterated = m.subscribe(channel, **backend.reliable), m.subscribe(channel, **backend.reliable)
    inbox = observed(stream)
    iterated.ready.result(PATIENCE)
    publish(m, channel, [b"1"], **backend.reliable)
    inbox.wait_for(1)
    assert receive(iterated, 1) == [b"1"]
    stream.pause()
    iterated.pause()
    with backend.connect().subscribe(channel) as witness:
        publish(m, channel, [b"2", b"3"], **backend.reliable)
        assert receive(witness, 2) == [b"2", b"3"]
    with pytest.raises(DeadlineError):
        iterated.receive(0.05)
    assert inbox.payloads == [b"1"]
    stream.resume()
    iterated.resume()
    assert inbox.wait_payloads(3) == [b"1", b"2", b"3"]
    assert receive(iterated, 2) == [b"2", b"3"]
    assert stream.counters.dropped == 0


# --- the end
