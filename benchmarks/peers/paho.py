"""paho-mqtt: ``loop_start``, publishing by the window and waiting for the last of each, ``on_message``.

Of the common ways to bound what is under way this is the fastest: faster than a semaphore released in ``on_publish``,
or waiting for the oldest of a sliding window. ``max_inflight_messages`` is raised to the window; with the default of 20
paho is slower.
"""

from __future__ import annotations

import threading
import time
from typing import Any

import paho.mqtt.client as mqtt
from paho.mqtt.enums import CallbackAPIVersion

from benchmarks.peers.job import TOPIC, Job, Tally, run


def _connect(job: Job) -> mqtt.Client:
    protocol = mqtt.MQTTv5 if job.version == "5" else mqtt.MQTTv311
    client = mqtt.Client(CallbackAPIVersion.VERSION2, protocol=protocol)
    client.max_inflight_messages_set(job.window)
    connected = threading.Event()
    client.on_connect = lambda *_: connected.set()
    client.connect(job.host, job.port)
    client.loop_start()
    if not connected.wait(10):
        raise SystemExit("no CONNACK")
    return client


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


if __name__ == "__main__":
    run({"publish": publish, "subscribe": subscribe}, "paho-mqtt")
