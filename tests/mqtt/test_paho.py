"""Eclipse Paho's interoperability tests for MQTT 3.1.1 and 5, ported in meaning, under their names.

The originals are ``interoperability/client_test.py`` and ``client_test5.py`` of eclipse/paho.mqtt.testing, and
``tests/test_mqttv5.py`` of eclipse/paho.mqtt.python. They drive a client of their own through every packet. Here the
same is asked of this adapter: against mosquitto through the public API, and against a scripted broker where mosquitto
cannot be told what to send. Topics are the originals'. Sleeps became conditions. Tests with the fixture ``version`` are
in both suites. Left out is a session expiry of its own for DISCONNECT, which this API does not have. Covered elsewhere:

==========================  =====================================================================================
``test_connect_fail``       test_connection.py: a_refused_connection_says_where_and_why
``test_assigned_clientid``  test_assigned_client_id.py
``test_*_topic_alias``      test_topic_aliases.py
``test_will_delay``         test_last_will_delay.py
``test_subscribe_options``  test_subscribe_options.py: No Local and Retain As Published
``test_shared_...``         test_messages.py: members_of_a_queue_compete
``test_flow_control1``      test_messages.py: unacknowledged_messages_hold_the_broker_back
``test_flow_control2``      test_session.py: the_window_is_receive_maximum_and_ids_are_unique
==========================  =====================================================================================
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest

from adapters.mqtt import packets
from messaging import Messaging
from messaging.errors import (
    ClosedError,
    InvalidOptionError,
    PayloadTooLargeError,
    SubscriptionRefusedError,
)
from tests.brokers import Mosquitto
from tests.conformance.helpers import PATIENCE, Inbox, eventually, manual, nothing_more, online, publish, receive
from tests.mqtt.conftest import Connect
from tests.mqtt.foreign import Foreign
from tests.mqtt.harness import lasting
from tests.mqtt.peer import session
from tests.mqtt.victims import Victim
from tests.proxy import Proxy

pytestmark = pytest.mark.usefixtures("needs_mosquitto")

TOPICS = ("TopicA", "TopicA/B", "Topic/C", "TopicA/C", "/TopicA")
WILD_TOPICS = ("TopicA/+", "+/C", "#", "/#", "/+", "+/+", "TopicA/#")
HEADERS = {"a": "2", "c": "3"}


@pytest.fixture
def v5(request: pytest.FixtureRequest) -> bool:
    """Whether this test runs with MQTT 5: those of one version do so."""
    return "version" not in request.fixturenames or request.getfixturevalue("version") == "5"


@pytest.fixture
def settings(v5: bool) -> dict[str, Any]:
    """The version, as a setting."""
    return {"version": "5" if v5 else "3.1.1"}


@pytest.fixture
def properties(v5: bool) -> dict[str, Any]:
    """Properties of a message, where the version has any."""
    return {"headers": HEADERS} if v5 else {}


@pytest.fixture
def persistent(settings: dict[str, Any]) -> dict[str, Any]:
    """Settings of a session that no other test has."""
    return lasting(settings["version"])


@pytest.fixture
def aclient(mosquitto: Mosquitto, connect: Connect, settings: dict[str, Any]) -> Messaging:
    return connect(mosquitto.url, **settings)


@pytest.fixture
def bclient(mosquitto: Mosquitto, connect: Connect, settings: dict[str, Any]) -> Messaging:
    return connect(mosquitto.url, **settings)


@pytest.fixture
def retained(aclient: Messaging, properties: dict[str, Any]) -> Iterator[None]:
    """Three retained messages, one of each QoS, as long as the test lasts."""
    publish_each_qos(aclient, retain=True, **properties)
    yield
    for topic in TOPICS[1:4]:
        publish(aclient, topic, [b""], qos=1, retain=True)


def publish_each_qos(m: Messaging, **context: Any) -> None:
    """Publish to three topics, one with each QoS."""
    for qos, topic in enumerate(TOPICS[1:4]):
        publish(m, topic, [b"qos %d" % qos], qos=qos, **context)


# --- both versions


@pytest.mark.usefixtures("version")
def test_basic(mosquitto: Mosquitto, connect: Connect, settings: dict[str, Any]) -> None:
    """Connecting, and a message of each QoS to oneself.

    Changed: a second CONNECT on a connection cannot be sent here, so using a closed instance again is refused; the
    protocol name cannot be chosen, but the version can, and a wrong one is refused before connecting.
    """
    connect(mosquitto.url, **settings).close()
    m = connect(mosquitto.url, **settings)
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


@pytest.mark.usefixtures("version", "retained")
def test_retained_messages(aclient: Messaging, properties: dict[str, Any]) -> None:
    """Retained messages of each QoS, with their user properties, reach later subscribers until empty ones clear them.

    As the originals; user properties are ``headers`` here.
    """
    with aclient.subscribe(WILD_TOPICS[5], qos=2) as stream:
        messages = [stream.receive(PATIENCE) for _ in range(3)]
    assert sorted(message.payload for message in messages) == [b"qos 0", b"qos 1", b"qos 2"]
    assert sorted(message.context.extensions["qos"] for message in messages) == ["0", "1", "2"]
    assert all(message.context.extensions["retain"] for message in messages)
    assert all(message.context.extensions.get("headers") == properties.get("headers") for message in messages)
    for qos, topic in enumerate(TOPICS[1:4]):
        publish(aclient, topic, [b""], qos=qos, retain=True)
    with aclient.subscribe(WILD_TOPICS[5], qos=2) as stream:
        nothing_more(aclient, TOPICS[1], stream, qos=2)


@pytest.mark.usefixtures("version")
def test_will_message(
    mosquitto: Mosquitto,
    connect: Connect,
    bclient: Messaging,
    settings: dict[str, Any],
    properties: dict[str, Any],
) -> None:
    """A client that is cut off leaves its will, with its user properties. Changed: the cable is cut by a proxy."""
    with Proxy(mosquitto.host, mosquitto.port) as proxy:
        aclient = connect(f"mqtt://{proxy.host}:{proxy.port}", keepalive=2, **settings)
        aclient.publish(TOPICS[2], b"will message", last_will=True, **properties).result(PATIENCE)
        with bclient.subscribe(TOPICS[2], qos=2) as stream:
            proxy.sever()
            message = stream.receive(PATIENCE)
            assert message.payload == b"will message"
            assert message.context.extensions.get("headers") == properties.get("headers")
            online(aclient)
            nothing_more(bclient, TOPICS[2], stream, qos=2)


@pytest.mark.usefixtures("version")
def test_zero_length_clientid(mosquitto: Mosquitto, connect: Connect, settings: dict[str, Any], v5: bool) -> None:
    """Without a client id there is no session to resume. Changed: that is refused here, before connecting.

    With MQTT 5 the broker assigns an id to a client without one, and none to one that has.
    """
    with pytest.raises(InvalidOptionError, match="client_id") as refusal:
        connect(mosquitto.url, client_id="", clean_start=False, **settings)
    assert refusal.value.option == "clean_start"
    nameless = connect(mosquitto.url, client_id="", clean_start=True, **settings)
    with nameless.subscribe(TOPICS[0], qos=1) as stream:
        publish(nameless, TOPICS[0], [b"nameless"], qos=1)
        assert receive(stream, 1) == [b"nameless"]
    assert bool(nameless.runtime.get_runtime_dto().connection.client_id) is v5
    named = connect(mosquitto.url, client_id="client0", **settings)
    assert named.runtime.get_runtime_dto().connection.client_id == "client0"


@pytest.mark.usefixtures("version")
def test_offline_message_queueing(
    mosquitto: Mosquitto, connect: Connect, bclient: Messaging, persistent: dict[str, Any]
) -> None:
    """Messages published meanwhile wait for a client with a session. Whether QoS 0 does is the broker's choice."""
    aclient = connect(mosquitto.url, **persistent)
    stream = aclient.subscribe(WILD_TOPICS[5], qos=2)
    stream.ready.result(PATIENCE)
    aclient.close()
    publish_each_qos(bclient)
    aclient = connect(mosquitto.url, **persistent)
    inbox = Inbox(aclient.subscribe(WILD_TOPICS[5], qos=2))
    publish(bclient, TOPICS[1], [b"end"], qos=2)
    assert inbox.wait_for(b"end")[:-1] in ([b"qos 1", b"qos 2"], [b"qos 0", b"qos 1", b"qos 2"])
    inbox.disposable.dispose()


@pytest.mark.usefixtures("version")
def test_overlapping_subscriptions(aclient: Messaging, v5: bool) -> None:
    """One packet or one for each filter is the broker's choice. Changed: each stream has its own copy, and one only."""
    with (
        aclient.subscribe(WILD_TOPICS[6], qos=2) as highest,
        aclient.subscribe(WILD_TOPICS[0], qos=1) as other,
    ):
        publish(aclient, TOPICS[3], [b"overlapping topic filters"], qos=2)
        for stream in (highest, other):
            message = stream.receive(PATIENCE)
            assert message.payload == b"overlapping topic filters"
            assert message.context.extensions["qos"] in (("2",) if v5 and stream is highest else ("1", "2"))
        nothing_more(aclient, TOPICS[3], highest, qos=2)
        assert receive(other, 1) == [b"sentinel"]


@pytest.mark.slow
@pytest.mark.usefixtures("version")
def test_keepalive(mosquitto: Mosquitto, connect: Connect, bclient: Messaging, settings: dict[str, Any]) -> None:
    """A client that has gone silent is thrown out, and its will is published. An idle client that runs is kept.

    Changed: the original client never pings. This one cannot be told not to, so its process is stopped.
    """
    idle = connect(mosquitto.url, keepalive=1, **settings)
    idle.publish(TOPICS[4], b"the idle one", last_will=True).result(PATIENCE)
    online(idle)
    with bclient.subscribe(TOPICS[4], qos=2) as stream, Victim(mosquitto.url, TOPICS[4], **settings) as victim:
        victim.stop()
        assert stream.receive(PATIENCE * 2).payload == b"victim"  # mosquitto looks every few seconds
        nothing_more(bclient, TOPICS[4], stream, qos=2)
    assert idle.connection_state.value.name == "connected"
    assert idle.runtime.get_runtime_dto().connection.cause is None


@pytest.mark.usefixtures("version")
@pytest.mark.parametrize("qos", [1, 2])
def test_redelivery_on_reconnect(mosquitto: Mosquitto, connect: Connect, persistent: dict[str, Any], qos: int) -> None:
    """Unanswered messages are sent again, in order. Changed: answers are withheld by not acknowledging."""
    bclient = connect(mosquitto.url, **persistent)
    stream = bclient.subscription.subscribe(manual(bclient, WILD_TOPICS[6], qos=str(qos)))
    stream.ready.result(PATIENCE)
    publish(bclient, TOPICS[1], [b"1"], qos=qos)
    publish(bclient, TOPICS[3], [b"2"], qos=qos)
    assert receive(stream, 2) == [b"1", b"2"]
    bclient.close()
    bclient = connect(mosquitto.url, **persistent)
    with bclient.subscribe(WILD_TOPICS[6], qos=qos) as again:
        messages = [again.receive(PATIENCE) for _ in range(2)]
        assert [message.payload for message in messages] == [b"1", b"2"]
        assert all(message.context.extensions["redelivered"] for message in messages)


@pytest.mark.usefixtures("version")
def test_subscribe_failure(strict_mosquitto: Mosquitto, connect: Connect, settings: dict[str, Any], v5: bool) -> None:
    """A subscription that is not allowed is refused: with 0x80, or with the reason that mosquitto gives (MQTT 5)."""
    m = connect(strict_mosquitto.url, **settings)
    stream = m.subscribe("test/nosubscribe", qos=2)
    refusal = stream.ready.exception(PATIENCE)
    assert isinstance(refusal, SubscriptionRefusedError)
    assert refusal.code == (0x87 if v5 else 0x80)
    assert f"'test/nosubscribe'{': Not authorized' if v5 else ''}" in str(refusal)
    with m.subscribe("open/x", qos=2) as stream:  # and the instance goes on
        publish(m, "open/x", [b"fine"], qos=2)
        assert receive(stream, 1) == [b"fine"]


@pytest.mark.usefixtures("version")
def test_dollar_topics(bclient: Messaging) -> None:
    """A wildcard in the first level matches no topic that starts with ``$``. As the original."""
    with bclient.subscribe(WILD_TOPICS[5], qos=2) as stream:
        publish(bclient, "$" + TOPICS[1], [b"hidden"], qos=1)
        nothing_more(bclient, TOPICS[1], stream, qos=1)
    with bclient.subscribe("$" + TOPICS[1], qos=2) as stream:
        publish(bclient, "$" + TOPICS[1], [b"asked for"], qos=1)
        assert receive(stream, 1) == [b"asked for"]


@pytest.mark.usefixtures("version")
def test_unsubscribe(aclient: Messaging, bclient: Messaging) -> None:
    """A topic that was unsubscribed from is not delivered any more, the others are. As the original."""
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


# --- MQTT 5


@pytest.mark.slow
def test_session_expiry(connect: Connect) -> None:
    """A session lives as long as ``session_expiry`` says, counted from the loss, and not longer.

    Changed: the public API does not tell whether a session was there, but messages published meanwhile are delivered if
    it was. When it ended is taken from the broker's log.
    """

    def kept(broker: Mosquitto, client_id: str, expiry: int, *, wait: bool) -> bool:
        settings = {"client_id": client_id, "session_expiry": expiry}
        m = connect(broker.url, **settings)
        stream = m.subscribe(TOPICS[0], qos=2)
        stream.ready.result(PATIENCE)
        m.close()
        if wait:
            eventually(lambda: f"Expiring client {client_id}" in broker.log(), "the session expires")
        with connect(broker.url) as other:
            publish(other, TOPICS[0], [b"meanwhile"], qos=1)
        m = connect(broker.url, **settings, clean_start=False)
        inbox = Inbox(m.subscribe(TOPICS[0], qos=2))
        publish(m, TOPICS[0], [b"end"], qos=2)
        inbox.wait_for(b"end")
        m.close()
        return b"meanwhile" in inbox.payloads

    with Mosquitto() as broker:
        assert not kept(broker, "immediately", 0, wait=False)
        assert kept(broker, "long", 100, wait=False)
        assert not kept(broker, "short", 1, wait=True)


def test_user_properties(mosquitto: Mosquitto, aclient: Messaging) -> None:
    """User properties travel with every QoS. Changed: as ``headers``; both ways with a client that is not ours."""
    with Foreign(mosquitto) as foreign, aclient.subscribe(TOPICS[0], qos=2) as stream:
        foreign.subscribe(TOPICS[1], 2)
        for qos in range(3):
            aclient.publish(TOPICS[0], b"ours", qos=qos, headers=HEADERS).result(PATIENCE)
            assert dict(stream.receive(PATIENCE).context.extensions["headers"]) == HEADERS
            aclient.publish(TOPICS[1], b"", qos=qos, headers=HEADERS).result(PATIENCE)
            found = foreign.receive().properties.UserProperty
            assert [pair for pair in found if pair[0] != "message-id"] == [*HEADERS.items()]
            assert len(found) == (3 if qos else 2)  # with QoS 0 nothing is sent again, so no id is needed
            foreign.publish(TOPICS[0], b"", qos, UserProperty=[("a", "1"), ("c", "3"), ("a", "2")])
            assert dict(stream.receive(PATIENCE).context.extensions["headers"]) == {"a": ("1", "2"), "c": "3"}
            aclient.publish(TOPICS[1], b"", qos=qos, headers={"a": ["1", "2"], "c": "3"}).result(PATIENCE)
            found = [pair for pair in foreign.receive().properties.UserProperty if pair[0] != "message-id"]
            assert found == [("a", "1"), ("a", "2"), ("c", "3")]


def test_payload_format(mosquitto: Mosquitto, aclient: Messaging) -> None:
    """The content type travels with every QoS; the format indicator of others is taken, and says nothing new here."""
    with Foreign(mosquitto) as foreign, aclient.subscribe(TOPICS[0], qos=2) as stream:
        foreign.subscribe(TOPICS[1], 2)
        for qos in range(3):
            foreign.publish(TOPICS[0], b"qos %d" % qos, qos, PayloadFormatIndicator=1, ContentType="My name")
            message = stream.receive(PATIENCE)
            assert (message.payload, message.context.content_type) == (b"qos %d" % qos, "My name")
            assert message.context.extensions["qos"] == str(qos)
            aclient.publish(TOPICS[1], b"", qos=qos, content_type="My name").result(PATIENCE)
            assert foreign.receive().properties.ContentType == "My name"


@pytest.mark.slow
def test_publication_expiry(
    mosquitto: Mosquitto, connect: Connect, aclient: Messaging, persistent: dict[str, Any]
) -> None:
    """What has expired is not delivered; what has not tells how long it is still good for. As the original."""
    bclient = connect(mosquitto.url, **persistent)
    stream = bclient.subscribe(TOPICS[0], qos=2)
    stream.ready.result(PATIENCE)
    bclient.close()
    for qos in (1, 2):
        publish(aclient, TOPICS[0], [b"qos %d - expire" % qos], qos=qos, time_to_live=1.0)
        publish(aclient, TOPICS[0], [b"qos %d - don't expire" % qos], qos=qos, time_to_live=60.0)
    time.sleep(2.1)  # brokers count whole seconds
    bclient = connect(mosquitto.url, **persistent)
    with bclient.subscribe(TOPICS[0], qos=2) as stream:
        messages = [stream.receive(PATIENCE) for _ in range(2)]
        assert [message.payload for message in messages] == [b"qos 1 - don't expire", b"qos 2 - don't expire"]
        assert all(50 < message.context.extensions["timeToLive"] < 60 for message in messages)
        nothing_more(bclient, TOPICS[0], stream, qos=2)


@pytest.mark.parametrize(("handling", "first", "second"), [(0, 3, 3), (1, 3, 0), (2, 0, 0)])
def test_subscribe_options_retain_handling(
    bclient: Messaging, retained: None, handling: int, first: int, second: int
) -> None:
    """What each value brings at a first and a second SUBSCRIBE. Changed: the second is a second stream's."""
    with bclient.subscribe(WILD_TOPICS[5], qos=2, retain_handling=handling) as one:
        assert len({message.payload for message in (one.receive(PATIENCE) for _ in range(first))}) == first
        with bclient.subscribe(WILD_TOPICS[5], qos=2, retain_handling=handling) as two:
            assert len({message.payload for message in (two.receive(PATIENCE) for _ in range(second))}) == second
            nothing_more(bclient, TOPICS[1], two, qos=2)
            assert receive(one, 1) == [b"sentinel"]


def test_subscription_identifiers(aclient: Messaging, bclient: Messaging) -> None:
    """A message names the subscriptions it was sent for.

    Changed: identifiers are the adapter's own affair. What they are for is that overlapping streams get one copy each,
    and those of another client are no concern.
    """
    with (
        aclient.subscribe(TOPICS[0], qos=2) as other,
        bclient.subscribe(TOPICS[0], qos=2) as plain,
        bclient.subscribe(TOPICS[0] + "/#", qos=2) as wild,
    ):
        publish(bclient, TOPICS[0], [b"sub identifier test"], qos=1)
        for stream in (other, plain, wild):
            assert receive(stream, 1) == [b"sub identifier test"]
        publish(bclient, TOPICS[1], [b"for one"], qos=1)
        assert receive(wild, 1) == [b"for one"]
        nothing_more(bclient, TOPICS[0], plain, qos=2)
        assert [receive(stream, 1) for stream in (other, wild)] == [[b"sentinel"]] * 2


def test_request_response(mosquitto: Mosquitto, aclient: Messaging) -> None:
    """Response topic and correlation data travel there, correlation data back. Changed: the responder is not ours."""
    with Foreign(mosquitto) as responder, aclient.subscribe(TOPICS[1], qos=2) as answers:
        responder.subscribe(TOPICS[0], 2)
        publish(aclient, TOPICS[0], [b"request"], qos=1, reply_to=TOPICS[1], correlation_id="334")
        request = responder.receive()
        assert request.payload == b"request"
        assert (request.properties.ResponseTopic, request.properties.CorrelationData) == (TOPICS[1], b"334")
        responder.publish(request.properties.ResponseTopic, b"response", 1, CorrelationData=b"334")
        answer = answers.receive(PATIENCE)
        assert (answer.payload, answer.context.correlation_id) == (b"response", "334")


def test_maximum_packet_size(connect: Connect) -> None:
    """Neither side sends what the other does not take. Changed: ours is refused before it is sent."""
    with Mosquitto(["max_packet_size 1000"]) as broker:
        m = connect(broker.url, max_packet_size=100)
        assert m.runtime.get_runtime_dto().max_message_size == 1000 - 5
        with pytest.raises(PayloadTooLargeError):
            m.publish(TOPICS[0], b"." * 1000).result(PATIENCE)
        with (
            connect(broker.url) as other,
            other.subscribe(TOPICS[0], qos=1) as theirs,
            m.subscribe(TOPICS[0], qos=1) as ours,
        ):
            publish(m, TOPICS[0], [b"." * 32, b"." * 100, b"end"], qos=1)
            assert receive(theirs, 3) == [b"." * 32, b"." * 100, b"end"]
            assert receive(ours, 2) == [b"." * 32, b"end"]
        assert m.runtime.get_runtime_dto().connection.cause is None


async def test_server_keep_alive() -> None:
    """The broker's keep-alive replaces ours. Changed: the original only looks at the property, and is commented out."""
    async with session(b"\x13\x00\x01", keepalive=600) as (_, _, connection):
        await connection.expect(packets.PINGREQ)
