"""A persistent MQTT session outlives its instance: messages published meanwhile are there for the next one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import messaging
from messaging.testing.brokers import Mosquitto

DEADLINE = 15.0
SESSIONS = {
    "5": {"version": "5", "session_expiry": 300},
    "3.1.1": {"version": "3.1.1"},
}


@pytest.mark.parametrize("version", SESSIONS)
def test_closing_the_instance_leaves_its_subscriptions_at_the_broker(mosquitto: Mosquitto, version: str) -> None:
    channel = f"session/{version}"
    settings = {"client_id": f"keeper-{version}", "clean_start": False, **SESSIONS[version]}
    with messaging.connect(mosquitto.url, **settings) as m:
        stream = m.subscribe(channel, qos=1)
        stream.ready.result(DEADLINE)
    with messaging.connect(mosquitto.url) as other:
        for number in range(5):
            other.publish(channel, b"%d" % number, qos=1).result(DEADLINE)
    with messaging.connect(mosquitto.url, **settings) as m, m.subscribe(channel, qos=1) as stream:
        assert [stream.receive(DEADLINE).payload for _ in range(5)] == [b"0", b"1", b"2", b"3", b"4"]


@pytest.mark.parametrize("version", SESSIONS)
def test_unsettled_messages_are_delivered_to_the_next_instance(mosquitto: Mosquitto, version: str) -> None:
    channel = f"session/unsettled/{version}"
    settings = {"client_id": f"unsettled-{version}", "clean_start": False, **SESSIONS[version]}
    with messaging.connect(mosquitto.url, **settings) as m:
        context = m.acknowledge_context_builder().message_context_builder().channel(channel)
        stream = m.subscription.subscribe(context.extension_entry("qos", "1").build_context())
        stream.ready.result(DEADLINE)
        m.publish(channel, b"kept", qos=1)
        assert stream.receive(DEADLINE).payload == b"kept"  # and never acknowledged
    with messaging.connect(mosquitto.url, **settings) as m, m.subscribe(channel, qos=1) as again:
        message = again.receive(DEADLINE)
        assert message.payload == b"kept"
        assert message.context.extensions["redelivered"] is True


@pytest.mark.parametrize("version", SESSIONS)
def test_closing_the_stream_ends_its_subscription(mosquitto: Mosquitto, version: str) -> None:
    channel = f"session/ended/{version}"
    settings = {"client_id": f"ender-{version}", "clean_start": False, **SESSIONS[version]}
    with messaging.connect(mosquitto.url, **settings) as m, m.subscribe(channel, qos=1):
        pass  # the stream is closed before the instance
    with messaging.connect(mosquitto.url) as other:
        other.publish(channel, b"missed", qos=1).result(DEADLINE)
    with messaging.connect(mosquitto.url, **settings) as m, m.subscribe(channel, qos=1) as stream:
        m.publish(channel, b"sentinel", qos=1).result(DEADLINE)
        assert stream.receive(DEADLINE).payload == b"sentinel"


#: takes three messages, acknowledges the second, says so, and waits for the end
CONSUMER = """
import sys, threading
import messaging
url, channel, qos, settings = sys.argv[1], sys.argv[2], sys.argv[3], eval(sys.argv[4])
m = messaging.connect(url, **settings)
context = m.acknowledge_context_builder().message_context_builder().channel(channel).extension_entry("qos", qos)
stream = m.subscription.subscribe(context.build_context())
stream.ready.result(15)
print("ready", flush=True)
messages = [stream.receive(15) for _ in range(3)]
messages[1].acknowledge()
while stream.counters.acknowledged < 1:
    threading.Event().wait(0.01)
m.publish(channel + "/elsewhere", b"", qos=1).result(15)  # confirmed after the acknowledgement has arrived
print("acknowledged", flush=True)
threading.Event().wait()
"""


@pytest.mark.parametrize(("version", "qos"), [("5", "2"), ("3.1.1", "1")])
def test_unsettled_messages_of_a_killed_process_are_delivered_to_the_next_one(
    mosquitto: Mosquitto, version: str, qos: str
) -> None:
    channel = f"session/killed/{version}/{qos}"
    settings = {"client_id": f"killed-{version}-{qos}", "clean_start": False, **SESSIONS[version]}
    with (
        messaging.connect(mosquitto.url) as other,
        subprocess.Popen(
            [sys.executable, "-c", CONSUMER, mosquitto.url, channel, qos, repr(settings)],
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2],
        ) as process,
    ):  # fmt: skip
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            for number in range(3):
                other.publish(channel, b"%d" % number, qos=qos).result(DEADLINE)
            assert process.stdout.readline() == "acknowledged\n"
        finally:
            process.kill()
        other.publish(channel, b"meanwhile", qos=qos).result(DEADLINE)
        with messaging.connect(mosquitto.url, **settings) as m, m.subscribe(channel, qos=qos) as stream:
            messages = [stream.receive(DEADLINE) for _ in range(3)]
            assert [message.payload for message in messages] == [b"0", b"2", b"meanwhile"]
            assert all(message.context.extensions["redelivered"] for message in messages[:2])
            m.publish(channel, b"end", qos=qos).result(DEADLINE)
            assert stream.receive(DEADLINE).payload == b"end"
