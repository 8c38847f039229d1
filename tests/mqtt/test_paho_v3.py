"""Eclipse Paho's interoperability tests for MQTT 3.1.1, ported in meaning, under their names.

The originals are ``interoperability/client_test.py`` of eclipse/paho.mqtt.testing. They drive a client of their own
through every packet; here the same is asked of this adapter against mosquitto, through the public API. Topics are
theirs. Sleeps became conditions.
"""

from __future__ import annotations

from typing import Any

import pytest

from messaging import Messaging
from messaging.errors import ClosedError, InvalidOptionError, SubscriptionRefusedError
from tests.brokers import Mosquitto
from tests.conformance.helpers import PATIENCE, Inbox, manual, nothing_more, online, publish, receive
from tests.mqtt.conftest import Connect
from tests.mqtt.victims import Victim
from tests.proxy import Proxy

pytestmark = pytest.mark.usefixtures("needs_mosquitto")

TOPICS = ("TopicA", "TopicA/B", "Topic/C", "TopicA/C", "/TopicA")
WILD_TOPICS = ("TopicA/+", "+/C", "#", "/#", "/+", "+/+", "TopicA/#")


@pytest.fixture
def persistent(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Settings of a session that no other test has."""
    return {"client_id": request.node.name, "clean_start": False}


@pytest.fixture
def aclient(mosquitto: Mosquitto, connect: Connect) -> Messaging:
    return connect(mosquitto.url, version="3.1.1")


@pytest.fixture
def bclient(mosquitto: Mosquitto, connect: Connect) -> Messaging:
    return connect(mosquitto.url, version="3.1.1")


def publish_each_qos(m: Messaging, *, retain: bool = False, payloads: bool = True) -> None:
    """To three topics, one with each QoS."""
    for qos, topic in enumerate(TOPICS[1:4]):
        publish(m, topic, [b"qos %d" % qos if payloads else b""], qos=qos, retain=retain)


def test_basic(mosquitto: Mosquitto, connect: Connect) -> None:
    """Connecting, and a message of each QoS to oneself.

    Changed: a second CONNECT on a connection cannot be sent here, so what is refused is using an instance again that is
    closed; the protocol name cannot be chosen, but the version can, and a wrong one is refused before connecting.
    """
    connect(mosquitto.url, version="3.1.1").close()
    m = connect(mosquitto.url, version="3.1.1")
    with m.subscribe(TOPICS[0], qos=2) as stream:
        for qos in range(3):
            m.publish(TOPICS[0], b"qos %d" % qos, qos=qos).result(PATIENCE)
        messages = [stream.receive(PATIENCE) for _ in range(3)]
    assert {message.payload: message.context.extensions["qos"] for message in messages} == {
        b"qos 0": "0", b"qos 1": "1", b"qos 2": "2",
    }  # fmt: skip
    m.close()
    with pytest.raises(ClosedError, match="connect"), m:
        pass
    with pytest.raises(InvalidOptionError, match="version"):
        connect(mosquitto.url, version="hj")


def test_retained_messages(aclient: Messaging) -> None:
    """Retained messages of each QoS reach whoever subscribes later, until empty ones clear them. As the original."""
    publish_each_qos(aclient, retain=True)
    with aclient.subscribe(WILD_TOPICS[5], qos=2) as stream:
        messages = [stream.receive(PATIENCE) for _ in range(3)]
        assert sorted(message.payload for message in messages) == [b"qos 0", b"qos 1", b"qos 2"]
        assert all(message.context.extensions["retain"] for message in messages)
    publish_each_qos(aclient, retain=True, payloads=False)
    with aclient.subscribe(WILD_TOPICS[5], qos=2) as stream:
        nothing_more(aclient, TOPICS[1], stream, qos=2)


def test_will_message(mosquitto: Mosquitto, connect: Connect, bclient: Messaging) -> None:
    """A client that is cut off leaves its will. Changed: the cable is cut by a proxy."""
    with Proxy(mosquitto.host, mosquitto.port) as proxy:
        aclient = connect(f"mqtt://{proxy.host}:{proxy.port}", version="3.1.1", keepalive=2)
        aclient.publish(TOPICS[2], b"client not disconnected", last_will=True).result(PATIENCE)
        with bclient.subscribe(TOPICS[2], qos=2) as stream:
            proxy.sever()
            assert receive(stream, 1) == [b"client not disconnected"]
            online(aclient)
            nothing_more(bclient, TOPICS[2], stream, qos=2)


def test_zero_length_clientid(mosquitto: Mosquitto, connect: Connect) -> None:
    """Without a client id there is no session to resume. Changed: that is refused here, before connecting."""
    with pytest.raises(InvalidOptionError, match="client_id") as refusal:
        connect(mosquitto.url, version="3.1.1", client_id="", clean_start=False)
    assert refusal.value.option == "clean_start"
    m = connect(mosquitto.url, version="3.1.1", client_id="", clean_start=True)
    with m.subscribe(TOPICS[0], qos=1) as stream:
        publish(m, TOPICS[0], [b"nameless"], qos=1)
        assert receive(stream, 1) == [b"nameless"]


def test_offline_message_queueing(
    mosquitto: Mosquitto, connect: Connect, bclient: Messaging, persistent: dict[str, Any]
) -> None:
    """What is published meanwhile waits for a client with a session. Whether QoS 0 does is the broker's choice."""
    aclient = connect(mosquitto.url, version="3.1.1", **persistent)
    stream = aclient.subscribe(WILD_TOPICS[5], qos=2)
    stream.ready.result(PATIENCE)
    aclient.close()
    publish_each_qos(bclient)
    aclient = connect(mosquitto.url, version="3.1.1", **persistent)
    inbox = Inbox(aclient.subscribe(WILD_TOPICS[5], qos=2))
    publish(bclient, TOPICS[1], [b"end"], qos=2)
    assert inbox.wait_for(b"end")[:-1] in ([b"qos 1", b"qos 2"], [b"qos 0", b"qos 1", b"qos 2"])
    inbox.disposable.dispose()


def test_overlapping_subscriptions(aclient: Messaging) -> None:
    """One packet or one for each filter is the broker's choice. Changed: each stream has its own copy, and one only."""
    with (
        aclient.subscribe(WILD_TOPICS[6], qos=2) as highest,
        aclient.subscribe(WILD_TOPICS[0], qos=1) as other,
    ):
        publish(aclient, TOPICS[3], [b"overlapping topic filters"], qos=2)
        for stream in (highest, other):
            message = stream.receive(PATIENCE)
            assert message.payload == b"overlapping topic filters"
            assert message.context.extensions["qos"] in ("1", "2")
        nothing_more(aclient, TOPICS[3], highest, qos=2)
        assert receive(other, 1) == [b"sentinel"]


@pytest.mark.slow
def test_keepalive(mosquitto: Mosquitto, connect: Connect, bclient: Messaging) -> None:
    """A client from which nothing is heard any more is thrown out, and its will is published.

    Changed: the original client never pings. This one cannot be told not to, so its process is stopped. The other half
    is tested as well: an idle client that runs is kept.
    """
    idle = connect(mosquitto.url, version="3.1.1", keepalive=1)
    idle.publish(TOPICS[4], b"the idle one", last_will=True).result(PATIENCE)
    online(idle)
    with bclient.subscribe(TOPICS[4], qos=2) as stream, Victim(mosquitto.url, TOPICS[4], version="3.1.1") as victim:
        victim.stop()
        assert stream.receive(PATIENCE * 2).payload == b"victim"  # mosquitto looks every few seconds
        nothing_more(bclient, TOPICS[4], stream, qos=2)
    assert idle.connection_state.value.name == "connected"
    assert idle.runtime.get_runtime_dto().connection.cause is None


@pytest.mark.parametrize("qos", [1, 2])
def test_redelivery_on_reconnect(mosquitto: Mosquitto, connect: Connect, persistent: dict[str, Any], qos: int) -> None:
    """What was not answered is sent again, in order. Changed: answers are withheld by not acknowledging."""
    bclient = connect(mosquitto.url, version="3.1.1", **persistent)
    stream = bclient.subscription.subscribe(manual(bclient, WILD_TOPICS[6], qos=str(qos)))
    stream.ready.result(PATIENCE)
    publish(bclient, TOPICS[1], [b"1"], qos=qos)
    publish(bclient, TOPICS[3], [b"2"], qos=qos)
    assert receive(stream, 2) == [b"1", b"2"]
    bclient.close()
    bclient = connect(mosquitto.url, version="3.1.1", **persistent)
    with bclient.subscribe(WILD_TOPICS[6], qos=qos) as again:
        messages = [again.receive(PATIENCE) for _ in range(2)]
        assert [message.payload for message in messages] == [b"1", b"2"]
        assert all(message.context.extensions["redelivered"] for message in messages)


def test_subscribe_failure(strict_mosquitto: Mosquitto, connect: Connect) -> None:
    """A subscription that is not allowed is refused with 0x80. Changed: what the broker refuses is configured here."""
    m = connect(strict_mosquitto.url, version="3.1.1")
    stream = m.subscribe("nosubscribe", qos=2)
    refusal = stream.ready.exception(PATIENCE)
    assert isinstance(refusal, SubscriptionRefusedError)
    assert refusal.code == 0x80
    assert "'nosubscribe'" in str(refusal)
    with m.subscribe("open/x", qos=2) as stream:  # and the instance goes on
        publish(m, "open/x", [b"fine"], qos=2)
        assert receive(stream, 1) == [b"fine"]


def test_dollar_topics(bclient: Messaging) -> None:
    """A wildcard in the first level matches no topic that starts with ``$``. As the original."""
    with bclient.subscribe(WILD_TOPICS[5], qos=2) as stream:
        publish(bclient, "$" + TOPICS[1], [b"hidden"], qos=1)
        nothing_more(bclient, TOPICS[1], stream, qos=1)
    with bclient.subscribe("$" + TOPICS[1], qos=2) as stream:
        publish(bclient, "$" + TOPICS[1], [b"asked for"], qos=1)
        assert receive(stream, 1) == [b"asked for"]


def test_unsubscribe(aclient: Messaging, bclient: Messaging) -> None:
    """What was unsubscribed from is not delivered any more, the rest is. As the original."""
    streams = [bclient.subscribe(topic, qos=2) for topic in TOPICS[:3]]
    for stream in streams:
        stream.ready.result(PATIENCE)
    streams[0].close().result(PATIENCE)
    for number, topic in enumerate(TOPICS[:3]):
        publish(aclient, topic, [b"topic %d" % number], qos=1)
    assert [receive(stream, 1) for stream in streams[1:]] == [[b"topic 1"], [b"topic 2"]]
    assert streams[0].counters.received == 0
    for stream in streams[1:]:
        stream.close().result(PATIENCE)
