"""paho-mqtt: ``loop_start``, publishing by the window and waiting for the last of each, ``on_message``.

Of the common ways to bound what is under way this is the fastest: faster than a semaphore released in ``on_publish``,
or waiting for the oldest of a sliding window. ``max_inflight_messages`` is raised to the window; with the default of 20
paho is slower.
"""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable
from concurrent.futures import Future
from socket import IPPROTO_TCP, TCP_NODELAY
from typing import Any

import paho.mqtt.client as mqtt
from paho.mqtt.enums import CallbackAPIVersion
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties

from benchmarks.peers.job import REQUESTS, TOPIC, Job, Replies, Tally, run, serve_until_told


def _connect(job: Job) -> mqtt.Client:
    protocol = mqtt.MQTTv5 if job.version == "5" else mqtt.MQTTv311
    client = mqtt.Client(CallbackAPIVersion.VERSION2, protocol=protocol)
    client.max_inflight_messages_set(max(job.window, 20))
    if "nodelay" in job.style:
        client.on_socket_open = _set_nodelay
    connected = threading.Event()
    client.on_connect = lambda *_: connected.set()
    client.connect(job.host, job.port)
    client.loop_start()
    if not connected.wait(10):
        raise SystemExit("no CONNACK")
    return client


def _set_nodelay(_client: mqtt.Client, _userdata: Any, opened: Any) -> None:
    opened.setsockopt(IPPROTO_TCP, TCP_NODELAY, 1)


def publish(job: Job) -> None:
    client = _connect(job)
    window = 1 if job.style == "awaited" else job.window
    job.ready()
    job.wait_for_go()
    start = time.monotonic()
    for number, payload in enumerate(job.blocking_payloads(), 1):
        info = client.publish(TOPIC, payload, job.qos)
        # what is paced cannot wait: others are due
        if (number % window == 0 and job.rate is None) or number == job.count:
            info.wait_for_publish()
    job.finish(start=start, end=time.monotonic())
    client.disconnect()
    client.loop_stop()


def subscribe(job: Job) -> None:
    tally = Tally(job)
    received = tally.received
    subscribed = threading.Event()
    client = _connect(job)

    def on_message(_client: Any, _userdata: Any, message: mqtt.MQTTMessage) -> None:
        received(message.payload)

    client.on_message = on_message
    client.on_subscribe = lambda *_: subscribed.set()
    client.subscribe(TOPIC, job.qos)
    if not subscribed.wait(10):
        raise SystemExit("no SUBACK")
    job.ready()
    tally.wait()
    tally.finish()
    client.disconnect()
    client.loop_stop()


class Requester:
    """A client for requests as one writes it by hand: response topic, correlation data, a dict of who waits."""

    def __init__(self, client: mqtt.Client, qos: int) -> None:
        self._client = client
        self._qos = qos
        self._reply_to = f"replies/{uuid.uuid4().hex}"
        self._waiting: dict[bytes, Callable[[bytes], None]] = {}
        subscribed = threading.Event()
        client.on_message = self._on_message
        client.on_subscribe = lambda *_: subscribed.set()
        client.subscribe(self._reply_to, qos)
        if not subscribed.wait(10):
            raise SystemExit("no SUBACK")

    def ask(self, payload: bytes, answered: Callable[[bytes], None]) -> None:
        """Send a request; ``answered`` gets the reply."""
        correlation = uuid.uuid4().bytes
        self._waiting[correlation] = answered
        properties = Properties(PacketTypes.PUBLISH)  # type: ignore[no-untyped-call]
        properties.ResponseTopic = self._reply_to
        properties.CorrelationData = correlation
        self._client.publish(REQUESTS, payload, self._qos, properties=properties)

    def ask_and_wait(self, payload: bytes) -> bytes:
        """Send a request, and wait for the reply."""
        future: Future[bytes] = Future()
        self.ask(payload, future.set_result)
        return future.result(10)

    def _on_message(self, _client: Any, _userdata: Any, message: mqtt.MQTTMessage) -> None:
        answered = self._waiting.pop(getattr(message.properties, "CorrelationData", b""), None)
        if answered is not None:
            answered(bytes(message.payload))


def request(job: Job) -> None:
    replies = Replies(job)
    client = _connect(job)
    requester = Requester(client, job.qos)
    requester.ask_and_wait(b"")
    job.ready()
    job.wait_for_go()
    if job.window == 1:
        replies.thread(requester.ask_and_wait)
    else:
        replies.pipeline(requester.ask)
    replies.finish()
    client.disconnect()
    client.loop_stop()


def respond(job: Job) -> None:
    subscribed = threading.Event()
    client = _connect(job)

    def on_message(_client: Any, _userdata: Any, message: mqtt.MQTTMessage) -> None:
        asked: Any = message.properties
        properties = Properties(PacketTypes.PUBLISH)  # type: ignore[no-untyped-call]
        properties.CorrelationData = asked.CorrelationData
        client.publish(asked.ResponseTopic, message.payload, job.qos, properties=properties)

    client.on_message = on_message
    client.on_subscribe = lambda *_: subscribed.set()
    client.subscribe(REQUESTS, job.qos)
    if not subscribed.wait(10):
        raise SystemExit("no SUBACK")
    serve_until_told(job)
    client.disconnect()
    client.loop_stop()


if __name__ == "__main__":
    run({"publish": publish, "subscribe": subscribe, "request": request, "respond": respond}, "paho-mqtt")
