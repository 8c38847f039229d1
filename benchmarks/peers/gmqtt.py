"""gmqtt: ``publish`` in a loop that lets the event loop run now and then, ``on_message``.

It has no back-pressure. With QoS 1 and 2, packet ids run out beyond what the broker allows, and ``publish`` raises: the
window is kept by the store of unconfirmed messages, which a client may be given.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

import gmqtt
from gmqtt.mqtt.constants import MQTTv50, MQTTv311
from gmqtt.storage import PersistentStorage

from benchmarks.peers.job import TOPIC, Job, Tally, run, run_async

#: QoS 0 messages between two turns of the loop
_BURST = 100


class _Window(PersistentStorage):  # type: ignore[misc]  # no types
    """The store of unconfirmed messages, which can be waited for."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size
        self._low = size // 2
        self._room = asyncio.Event()

    def remove_message_by_mid(self, mid: int) -> None:
        super().remove_message_by_mid(mid)
        if len(self._messages) <= self._low:
            self._room.set()

    def is_full(self) -> bool:
        return len(self._messages) >= self.size

    async def wait_for_room(self) -> None:
        self._room.clear()
        await self._room.wait()


async def _connect(job: Job, client: Any) -> None:
    await client.connect(job.host, job.port, version=MQTTv50 if job.version == "5" else MQTTv311)


async def publish(job: Job) -> None:
    window = _Window(job.window)
    client = gmqtt.Client("", persistent_storage=window)
    await _connect(job, client)
    job.ready()
    await asyncio.to_thread(job.wait_for_go)
    start = time.monotonic()
    unsent = 0
    for payload in job.payloads():
        if payload is None:
            await asyncio.sleep(job.delay)
            continue
        client.publish(TOPIC, payload, qos=job.qos)
        if job.qos:
            if window.is_full():
                await window.wait_for_room()
        else:
            unsent += 1
            if unsent == _BURST:
                unsent = 0
                await asyncio.sleep(0)
    await window.wait_empty()
    job.finish(start=start, end=time.monotonic())
    await client.disconnect()


async def subscribe(job: Job) -> None:
    tally = Tally(job)
    received = tally.received
    subscribed = asyncio.Event()
    client = gmqtt.Client("")
    await _connect(job, client)

    def on_message(_client: Any, _topic: str, payload: bytes, _qos: int, _properties: Any) -> None:
        received(payload)

    client.on_message = on_message
    client.on_subscribe = lambda *_: subscribed.set()
    client.subscribe(TOPIC, qos=job.qos)
    await asyncio.wait_for(subscribed.wait(), 10)
    job.ready()
    await asyncio.to_thread(tally.wait)
    tally.finish()
    await client.disconnect()


if __name__ == "__main__":
    run({"publish": run_async(publish), "subscribe": run_async(subscribe)}, "gmqtt")
