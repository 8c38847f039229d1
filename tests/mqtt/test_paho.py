"""Eclipse Paho's interoperability tests for MQTT 3.1.1 and 5, ported in meaning, under their names.

The originals are ``interoperability/client_test.py`` and ``client_test5.py`` of eclipse/paho.mqtt.testing, and
``tests/test_mqttv5.py`` of eclipse/paho.mqtt.python. They drive a client of their own through every packet. Here the
same is asked of this adapter: against mosquitto through the public API, and against a scripted broker where mosquitto
cannot be told what to send. Topics are the originals'. Sleeps became conditions. Left out is a session expiry of its
own for DISCONNECT, which this API does not have. Covered elsewhere, for both versions (files without a folder are in
this one, ``conformance`` is ``messaging/testing/conformance``, ``faults`` is ``tests/faults``):

====================================  ===========================================================================
``test_basic``                        conformance/test_delivery.py: qos_levels_are_used_or_refused
``test_retained_messages``            conformance/test_delivery.py: retained_messages_of_a_pattern
``test_will_message``                 conformance/test_last_will.py: a_will_is_sent_when_the_link_is_lost...
``test_zero_length_clientid``         test_assigned_client_id.py, test_settings.py: options_that_do_not_fit_are_named
``test_assigned_clientid``            test_assigned_client_id.py
``test_connect_fail``                 test_connection.py: a_refused_connection_says_where_and_why
``test_offline_message_queueing``     faults/test_shutdown.py: a_receiver_that_is_closed_leaves_the_rest...
``test_redelivery_on_reconnect``      test_packet_id.py: a_message_delivered_again_after_a_reconnect_...
``test_overlapping_subscriptions``    conformance/test_subscriptions.py: overlapping_patterns_get_one_copy_each
``test_subscription_identifiers``     the same
``test_dollar_topics``                conformance/test_subscriptions.py: a_wildcard_in_the_first_level_...
``test_unsubscribe``                  conformance/test_subscriptions.py: closing_one_of_two_subscribers_...
``test_subscribe_failure``            conformance/test_subscriptions.py: a_refused_subscription_ends_with_an_error
``test_keepalive``                    test_keepalive.py
``test_publication_expiry``           conformance/test_delivery.py: an_expired_retained_message_is_not_delivered
``test_subscribe_options``            test_subscribe_options.py: No Local and Retain As Published
``..._retain_handling``               test_subscribe_options.py: retain_handling_of_a_second_stream_is_its_own
``test_shared_...``                   conformance/test_queues.py: of_competing_consumers_one_gets_a_message
``test_maximum_packet_size``          test_session.py: messages_over_the_brokers_packet_size..., test_reason_codes.py
``test_*_topic_alias``                test_topic_aliases.py
``test_will_delay``                   test_last_will_delay.py
``test_flow_control1``                test_messages.py: unacknowledged_messages_hold_the_broker_back
``test_flow_control2``                test_session.py: the_window_is_receive_maximum_and_ids_are_unique
====================================  ===========================================================================
"""

from __future__ import annotations

import pytest

from messaging import Messaging
from messaging.testing.brokers import Mosquitto
from messaging.testing.conformance.helpers import publish
from messaging.testing.waiting import PATIENCE, eventually, subscribed
from messaging_adapters.mqtt import packets
from tests.mqtt.conftest import Connect
from tests.mqtt.foreign import Foreign
from tests.mqtt.peer import session

pytestmark = pytest.mark.usefixtures("needs_mosquitto")

TOPICS = ("TopicA", "TopicA/B")
HEADERS = {"a": "2", "c": "3"}


@pytest.fixture
def aclient(mosquitto: Mosquitto, connect: Connect) -> Messaging:
    return connect()


def test_session_expiry(connect: Connect) -> None:
    """A session lives as long as ``session_expiry`` says, counted from the loss, and not longer.

    Changed: the public API does not tell whether a session was there, but messages published meanwhile are delivered if
    it was. When it ended is taken from the broker's log.
    """

    def kept(broker: Mosquitto, client_id: str, expiry: int, *, wait: bool) -> bool:
        settings = {"client_id": client_id, "session_expiry": expiry}
        m = connect(broker.url, **settings)
        subscribed(m, TOPICS[0], qos=2)
        m.close()
        if wait:
            eventually(lambda: f"Expiring client {client_id}" in broker.log(), "the session expires")
        with connect(broker.url) as other:
            publish(other, TOPICS[0], [b"meanwhile"], qos=1)
        m = connect(broker.url, **settings, clean_start=False)
        inbox = subscribed(m, TOPICS[0], qos=2)
        publish(m, TOPICS[0], [b"end"], qos=2)
        eventually(lambda: b"end" in inbox.payloads)
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


def test_request_response(mosquitto: Mosquitto, aclient: Messaging) -> None:
    """Response topic and correlation data travel there, correlation data back. Changed: the responder is not ours."""
    with Foreign(mosquitto) as responder:
        responder.subscribe(TOPICS[0], 2)
        promise = aclient.request(TOPICS[0], b"request", qos=1, reply_to=TOPICS[1], correlation_id="334")
        request = responder.receive()
        assert request.payload == b"request"
        assert (request.properties.ResponseTopic, request.properties.CorrelationData) == (TOPICS[1], b"334")
        responder.publish(request.properties.ResponseTopic, b"response", 1, CorrelationData=b"334")
        assert promise.result(PATIENCE).payload == b"response"


async def test_server_keep_alive() -> None:
    """The broker's keep-alive replaces ours. Changed: the original only looks at the property, and is commented out."""
    async with session(b"\x13\x00\x01", keepalive=600) as (_, _, connection):
        await connection.expect(packets.PINGREQ)
