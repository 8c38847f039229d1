"""Losing the link: streams go on, publishes wait, verdicts go stale, the runtime tells."""

from __future__ import annotations

import asyncio
import threading
from urllib.parse import urlsplit

import pytest

from messaging import (
    AcknowledgeType,
    ConnectFailedError,
    Features,
    InvalidUrlError,
    Messaging,
    OutcomeUnknownError,
    Promise,
)
from messaging.adapter import TakesEndpoint
from messaging.instance import find_adapter
from messaging.testing.conformance.backends import Backend, Wire
from messaging.testing.conformance.helpers import (
    ack_state,
    acknowledgement,
    feature,
    manual,
    nothing_more,
    online,
    publish,
    receive,
    restart,
    state,
    subscription_to,
    wire,
)
from messaging.testing.tables import table
from messaging.testing.waiting import PATIENCE, Recorder, eventually, in_thread, observed, results


def test_streams_go_on_after_a_reconnect(backend: Backend, channel: str) -> None:
    """Scenario 36 [I]: in every face, without any call of the application, and no message arrives twice."""
    m, link = backend.connect_severable()
    publisher = backend.connect()
    inbox = observed(m.subscribe(channel, **backend.reliable))
    with m.subscribe(channel, **backend.reliable) as stream:
        for number in range(3):
            payload = b"%d" % number
            publish(publisher, channel, [payload], **backend.reliable)
            assert receive(stream, 1) == [payload]
            inbox.wait_payload(payload)
            link.sever()
            online(m)
        nothing_more(publisher, channel, stream, **backend.reliable)
        assert inbox.wait_payload(b"sentinel") == [b"0", b"1", b"2", b"sentinel"]
    assert inbox.error is None
    assert not inbox.is_completed


def test_an_asynchronous_iterator_goes_on_after_a_reconnect(backend: Backend) -> None:
    m, link = backend.connect_severable()
    publisher = backend.connect()
    channel = backend.channel()

    async def main() -> None:
        async with asyncio.timeout(2 * PATIENCE), m.subscribe(channel) as stream:
            pending = asyncio.ensure_future(anext(stream))
            await asyncio.to_thread(link.sever)
            await asyncio.to_thread(online, m)
            await publisher.publish(channel, b"1")
            assert (await pending).payload == b"1"

    asyncio.run(main())


@feature(Features.WILDCARDS)
def test_many_subscriptions_are_renewed(backend: Backend) -> None:
    """Scenario 36 [I]: also subscriptions that differ in options, and patterns."""
    m, link = backend.connect_severable()
    publisher = backend.connect()
    base = backend.channel("many")
    streams = [m.subscribe(f"{base}/{number}/+") for number in range(40)]
    closed = m.subscribe(f"{base}/closed")
    results(stream.ready for stream in [*streams, closed])
    link.down()
    closed.close().result(PATIENCE)
    link.up()
    online(m)
    for number, stream in enumerate(streams):
        publish(publisher, f"{base}/{number}/x", [b"%d" % number])
        with stream:
            assert receive(stream, 1) == [b"%d" % number]
    assert subscription_to(m, f"{base}/closed") is None


def test_subscribing_while_the_link_is_down_waits_for_it(backend: Backend, channel: str) -> None:
    m, link = backend.connect_severable()
    link.down()
    stream = m.subscribe(channel)
    assert not stream.ready.done()
    link.up()
    with stream:
        publish(m, channel, [b"1"])
        assert receive(stream, 1) == [b"1"]


def test_subscribing_and_closing_while_the_link_breaks(backend: Backend) -> None:
    """Whatever the connection interrupted: open subscriptions work in the end, and no other is left."""
    m, link = backend.connect_severable()
    calm = threading.Event()
    rounds: Recorder[str] = Recorder()

    def work(channel: str) -> None:
        while not calm.is_set():
            with m.subscribe(channel):
                rounds.append(channel)
        online(m)
        with m.subscribe(channel, **backend.reliable) as stream:
            publish(m, channel, [b"1", b"2"], **backend.reliable)
            assert receive(stream, 2) == [b"1", b"2"]

    working = [in_thread(work, backend.channel(str(number))) for number in range(4)]
    for more in (0, 1, 3, 7, 15, 31):
        eventually(lambda: state(m) == "connected", "reconnected")
        rounds.wait_for(len(rounds) + more)
        link.sever()
    calm.set()
    results(working, 3 * PATIENCE)
    eventually(lambda: not m.runtime.get_runtime_dto().subscriptions, "all gone")


def test_publishes_wait_for_the_link_in_their_order(backend: Backend, channel: str) -> None:
    """Scenario 23 [S]: queued, not lost."""
    m, link = backend.connect_severable()
    payloads = [b"%d" % number for number in range(100)]
    with backend.connect().subscribe(channel, **backend.reliable) as stream:
        link.down()
        promises = [m.publish(channel, payload, **backend.reliable) for payload in payloads]
        assert not any(promise.done() for promise in promises)
        assert m.runtime.get_runtime_dto().publisher.pending == len(payloads)
        link.up()
        results(promises)
        assert receive(stream, len(payloads)) == payloads


@feature(Features.EXTENSION_GUARANTEED_DELIVERY)
def test_nothing_guaranteed_is_lost_when_the_link_breaks_under_load(backend: Backend, channel: str) -> None:
    """Every promise resolves, everything arrives at least once; a repetition keeps its message id, given or not."""
    m, link = backend.connect_severable(timeout=2 * PATIENCE)
    payloads = [b"%d" % number for number in range(600)]
    has_ids = Features.EXTENSION_MESSAGE_ID in m.features
    given = {each: {"message_id": f"id-{int(each)}"} for each in payloads[::2] if has_ids}
    with backend.connect().subscribe(channel, guaranteed_delivery=True) as stream:
        inbox = observed(stream)

        def work() -> list[Promise[None]]:
            return [m.publish(channel, each, guaranteed_delivery=True, **given.get(each, {})) for each in payloads]

        working = in_thread(work)
        for count in (50, 200, 400):
            inbox.wait_for(count)
            link.sever()
            online(m)
        results(working.result(PATIENCE), 2 * PATIENCE)
        eventually(lambda: set(inbox.payloads) == set(payloads), "everything arrived")
    ids: dict[bytes, set[object]] = {}
    for message in inbox:
        ids.setdefault(message.payload, set()).add(message.context.extensions.get("messageId"))
    assert all(len(known) == 1 for known in ids.values())
    assert all(ids[each] == {context["message_id"]} for each, context in given.items())


@feature(Features.QUEUE_RETENTION, Features.EXTENSION_QUEUE)
def test_a_queue_keeps_what_arrives_while_its_consumer_is_away(backend: Backend) -> None:
    m, link = backend.connect_severable()
    publisher = backend.connect()
    channel, queue = backend.channel(), backend.queue()
    payloads = [b"%d" % number for number in range(20)]
    with m.subscribe(channel, queue=queue) as stream:
        link.down()
        publish(publisher, channel, payloads, **backend.reliable)
        link.up()
        assert receive(stream, len(payloads)) == payloads


@restart
@feature(Features.EXTENSION_GUARANTEED_DELIVERY, Features.QUEUE_RETENTION, Features.EXTENSION_QUEUE)
def test_guaranteed_delivery_outlives_the_broker(backend: Backend, m: Messaging) -> None:
    """Scenario 27 [S]: what the broker has taken responsibility for is on its disk."""
    channel, queue = backend.channel(), backend.queue()
    with m.subscribe(channel, queue=queue):
        pass
    payloads = [b"1", b"2", b"3"]
    publish(m, channel, payloads, guaranteed_delivery=True)
    backend.restart()
    with m.subscribe(channel, queue=queue) as stream:
        assert receive(stream, len(payloads)) == payloads


# --- verdicts


@feature(Features.ACKNOWLEDGE)
@table("manually", [True, False])
def test_a_verdict_on_a_message_of_a_lost_connection_is_refused(backend: Backend, manually: bool) -> None:
    """Scenario 88 [I]: it returns ``False``, and must not end the new connection or settle something else there."""
    m, link = backend.connect_severable()
    publisher = backend.connect()
    channel = backend.channel()
    with (
        m.subscription.subscribe(manual(m, channel)) if manually else m.subscribe(channel, **backend.reliable) as stream
    ):
        publish(publisher, channel, [b"1", b"2"], **backend.reliable)
        old = [stream.receive(PATIENCE), stream.receive(PATIENCE)][not manually :]  # the iterator has settled one
        link.sever()
        online(m)
        publish(publisher, channel, [b"3"], **backend.reliable)
        if manually:
            new = stream.receive(PATIENCE)
            while new.payload != b"3":  # those of the lost connection may have come again
                acknowledgement(new).acknowledge_handler.acknowledge()
                new = stream.receive(PATIENCE)
        assert acknowledgement(old[0]).acknowledge_handler.acknowledge() is False
        assert all(acknowledgement(message).acknowledge_handler.reject() is False for message in old)
        assert ack_state(old[0]) is AcknowledgeType.UNKNOWN
        if not manually:
            new = stream.receive(PATIENCE)
            while new.payload != b"3":
                new = stream.receive(PATIENCE)
        assert ack_state(new) is AcknowledgeType.RECEIVED
        assert acknowledgement(new).acknowledge_handler.acknowledge() is True
        nothing_more(publisher, channel, stream, **backend.reliable)
    assert state(m) == "connected"


@feature(Features.BROKER_REDELIVERY, Features.EXTENSION_QUEUE, Features.ACKNOWLEDGE)
def test_what_was_not_settled_when_the_link_broke_is_delivered_again(backend: Backend) -> None:
    m, link = backend.connect_severable()
    channel, queue = backend.channel(), backend.queue()
    with m.subscription.subscribe(manual(m, channel, queue=queue)) as stream:
        publish(m, channel, [b"1", b"2"], **backend.reliable)
        assert acknowledgement(stream.receive(PATIENCE)).acknowledge_handler.acknowledge()
        eventually(lambda: stream.counters.acknowledged == 1, "the verdict was passed on")
        publish(m, channel, [b"3"], **backend.reliable)  # and arrived there before this was confirmed
        held = stream.receive(PATIENCE)
        assert held.payload == b"2"
        for _ in range(2):  # a late verdict does not settle what has come again
            link.sever()
            online(m)
            again = [stream.receive(PATIENCE) for _ in range(2)]
            assert [message.payload for message in again] == [b"2", b"3"]
            assert all(message.context.extensions.get("redelivered") for message in again)
            assert acknowledgement(held).acknowledge_handler.acknowledge() is False
        for message in again:
            assert acknowledgement(message).acknowledge_handler.acknowledge()
        nothing_more(m, channel, stream, **backend.reliable)


# --- what the runtime tells


def test_the_runtime_tells_of_the_loss(backend: Backend, channel: str) -> None:
    """Scenario 99 [S]: ``connected`` is false while the link is down, and true again after."""
    m, link = backend.connect_severable()
    with m.subscribe(channel):
        before = subscription_to(m, channel)
        link.down()
        during = subscription_to(m, channel)
        dto = m.runtime.get_runtime_dto()
        link.up()
        online(m)
        after = subscription_to(m, channel)
    assert before is not None
    assert during is not None
    assert after is not None
    assert (before.channel.connected, during.channel.connected, after.channel.connected) == (True, False, True)
    assert dto.connection.state == "reconnecting"
    assert dto.connection.cause


# --- closing


@wire
@feature(Features.EXTENSION_GUARANTEED_DELIVERY)
def test_closing_with_confirms_outstanding_leaves_their_outcome_unknown(backend: Backend, channel: str) -> None:
    link = backend.wire()
    m = link.connect()
    m.publish(channel, b"first", guaranteed_delivery=True).result(PATIENCE)
    with backend.connect().subscribe(channel) as stream:
        link.proxy.hold()
        promise = m.publish(channel, b"x", guaranteed_delivery=True)
        assert receive(stream, 1) == [b"x"]
        m.close(timeout=0.1)
        assert isinstance(promise.exception(0), OutcomeUnknownError)


def test_closing_sends_what_was_accepted(backend: Backend, m: Messaging, channel: str) -> None:
    payloads = [b"%d" % number for number in range(200)]
    with backend.connect().subscribe(channel, **backend.reliable) as stream:
        promises = [m.publish(channel, payload, **backend.reliable) for payload in payloads]
        m.close()
        assert all(promise.done() and promise.exception() is None for promise in promises)
        assert receive(stream, len(payloads)) == payloads


# --- the first connection


@wire
def test_a_broker_that_is_not_there_or_silent(backend: Backend) -> None:
    link = backend.wire()
    link.proxy.hold()
    with pytest.raises(ConnectFailedError):
        link.connect(connect_timeout=0.3)
    link.proxy.release()
    link.proxy.refuse()
    with pytest.raises(ConnectFailedError):
        link.connect(connect_timeout=5.0)
    # with retry_connect the same is no error, only a matter of time
    waiting = in_thread(lambda: link.connect(retry_connect=True))
    link.proxy.accept()
    assert state(waiting.result(PATIENCE)) == "connected"


@wire
def test_an_instance_that_starts_offline_is_there_at_once(backend: Backend, channel: str) -> None:
    link = backend.wire()
    link.proxy.refuse()
    m = link.connect(start_offline=True, reconnect_max=0.1, connect_timeout=PATIENCE)
    assert m.starts_offline
    assert not m.ready.done()
    promise = m.publish(channel, b"early", **backend.reliable)  # waits in the outbox
    stream = m.subscribe(channel, **backend.reliable)
    link.proxy.accept()
    promise.result(PATIENCE)
    stream.ready.result(PATIENCE)
    m.publish(channel, b"later", **backend.reliable).result(PATIENCE)
    while stream.receive(PATIENCE).payload != b"later":
        pass
    m.close()


# --- several hosts in one URL: the next one is connected to when one is lost, or the URL is refused


def _address(link: Wire) -> str:
    return f"{link.proxy.host}:{link.proxy.port}"


def _host(m: Messaging) -> str | None:
    return m.runtime.get_runtime_dto().connection.host


@wire
def test_the_next_host_is_connected_to_and_streams_go_on(backend: Backend, channel: str) -> None:
    """Both hosts lead to the same broker. An adapter that is told no host must not connect to the first for ever."""
    first, second = backend.wire(), backend.wire()
    parts = urlsplit(first.url)
    url = parts._replace(netloc=f"{parts.netloc},{_address(second)}").geturl()
    if not issubclass(find_adapter(parts.scheme), TakesEndpoint):
        with pytest.raises(InvalidUrlError, match="2 hosts"):
            backend.connect(url)
        return
    m = backend.connect(url, reconnect_min=0.02, reconnect_max=0.1)
    publisher = backend.connect()
    assert _host(m) == _address(first)
    with m.subscribe(channel, **backend.reliable) as stream:
        for here, there in ((first, second), (second, first)):
            publish(publisher, channel, [b"here"], **backend.reliable)
            assert receive(stream, 1) == [b"here"]
            here.cut()
            eventually(lambda there=there: _host(m) == _address(there), "connected to the other host")  # type: ignore[misc]
            online(m)
            publish(m, channel, [b"there"], **backend.reliable)
            assert receive(stream, 1) == [b"there"]
            here.up()
        nothing_more(publisher, channel, stream, **backend.reliable)
    first.cut()  # a host that is down is left out by the first connection
    assert _host(backend.connect(url)) == _address(second)
