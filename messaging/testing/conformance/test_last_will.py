"""``lastWill``: sent by the broker when an instance is lost, and only then (RFC 6.3)."""

from __future__ import annotations

import logging

import pytest

from messaging import Features, Messaging, UnsupportedFeatureError
from messaging.testing.conformance.backends import Backend
from messaging.testing.conformance.helpers import feature, nothing_more, online, publish, receive
from messaging.testing.tables import table
from messaging.testing.waiting import PATIENCE, results

last_will = feature(Features.EXTENSION_LAST_WILL)


@last_will
def test_a_will_is_sent_when_the_link_is_lost_and_not_before(backend: Backend) -> None:
    """Scenario 94 [S]. It is the instance's, not the connection's: the second loss is told as the first."""
    m, link = backend.connect_severable()
    watcher = backend.connect()
    channel = backend.channel("will")
    with watcher.subscribe(channel, **backend.reliable) as stream:
        m.publish(channel, b"will", last_will=True).result(PATIENCE)
        for _ in range(2):
            online(m)
            nothing_more(watcher, channel, stream, **backend.reliable)
            link.down()
            assert receive(stream, 1) == [b"will"]
            nothing_more(watcher, channel, stream, **backend.reliable)
            link.up()


@last_will
def test_a_will_is_not_sent_when_the_instance_closes(backend: Backend) -> None:
    """Scenario 94 [S]: a clean end is no loss."""
    m, watcher = backend.connect(), backend.connect()
    channel = backend.channel("will")
    with watcher.subscribe(channel) as stream:
        m.publish(channel, b"will", last_will=True).result(PATIENCE)
        m.close()
        nothing_more(watcher, channel, stream)


@last_will
def test_an_instance_has_one_will(backend: Backend, m: Messaging, caplog: pytest.LogCaptureFixture) -> None:
    """Registering it is no trouble, even where the protocol has to connect anew for it."""
    channel = backend.channel("will")
    with caplog.at_level(logging.WARNING):
        m.publish(channel, b"first", last_will=True).result(PATIENCE)
        online(m)
    assert not caplog.records
    assert m.runtime.get_runtime_dto().connection.cause is None
    with pytest.raises(UnsupportedFeatureError) as refusal:
        m.publish(channel, b"second", last_will=True)
    assert refusal.value.feature == Features.EXTENSION_LAST_WILL
    assert refusal.value.instance == m.name


@last_will
def test_an_instance_with_a_will_goes_on(backend: Backend, m: Messaging, channel: str) -> None:
    """Even if the protocol had to reconnect for it: subscriptions and publishes do not notice."""
    with m.subscribe(channel, **backend.reliable) as stream:
        publish(m, channel, [b"1"], **backend.reliable)
        will = m.publish(backend.channel("will"), b"will", last_will=True)
        payloads = [b"%d" % number for number in range(50)]
        promises = [m.publish(channel, payload, **backend.reliable) for payload in payloads]
        will.result(PATIENCE)
        results(promises)
        assert stream.receive(PATIENCE).payload == b"1"
        publish(m, channel, [b"end"], **backend.reliable)
        seen = set()
        while (payload := stream.receive(PATIENCE).payload) != b"end":
            seen.add(payload)
        assert seen <= set(payloads)


@pytest.mark.envelope
@feature(Features.EXTENSION_LAST_WILL, Features.MESSAGE_PROPERTIES, Features.EXTENSION_MESSAGE_ID)
def test_a_will_carries_its_context(backend: Backend) -> None:
    m, link = backend.connect_severable()
    channel = backend.channel("will")
    with backend.connect().subscribe(channel) as stream:
        context = {"content_type": "x/y", "correlation_id": "4711", "message_id": "own"}
        m.publish(channel, b"will", last_will=True, **context).result(PATIENCE)
        online(m)
        link.sever()
        message = stream.receive(PATIENCE)
        assert message.payload == b"will"
        assert (message.context.content_type, message.context.correlation_id) == ("x/y", "4711")
        assert message.context.extensions["messageId"] == "own"


@feature(Features.EXTENSION_LAST_WILL, Features.EXTENSION_QOS)
@table("qos", ["0", "1", "2"])
def test_a_will_has_the_qos_asked_for(backend: Backend, qos: str) -> None:
    """RFC 6.3: its sample has QoS 2."""
    m, link = backend.connect_severable()
    channel = backend.channel("will")
    with backend.connect().subscribe(channel, qos="2") as stream:
        m.publish(channel, b"will", last_will=True, qos=qos).result(PATIENCE)
        online(m)
        link.sever()
        assert stream.receive(PATIENCE).context.extensions["qos"] == qos


@feature(Features.EXTENSION_LAST_WILL, Features.EXTENSION_RETAIN)
def test_a_will_can_be_retained(backend: Backend) -> None:
    m, link = backend.connect_severable()
    watcher = backend.connect()
    channel = backend.channel("will")
    with watcher.subscribe(channel) as live:
        m.publish(channel, b"will", last_will=True, retain=True).result(PATIENCE)
        online(m)
        link.down()
        assert receive(live, 1) == [b"will"]
    with watcher.subscribe(channel) as late:
        assert receive(late, 1) == [b"will"]
    publish(watcher, channel, [b""], retain=True)
    link.up()
