"""FastStream over MQTT: each publish awaited, or gathered by the window; a subscriber of its own per topic.

On uvloop, as ``faststream run`` does it where that is installed.
"""

from __future__ import annotations

import asyncio
import time

from faststream.mqtt import MQTTBroker, QoS

from benchmarks.peers.job import TOPIC, Job, Tally, run, run_async


def _broker(job: Job) -> MQTTBroker:
    version = "5.0" if job.version == "5" else "3.1.1"
    # it would log each message it receives
    return MQTTBroker(f"mqtt://{job.host}:{job.port}", version=version, logger=None)


async def publish(job: Job) -> None:
    qos = QoS(job.qos)
    async with _broker(job) as broker:
        job.ready()
        await asyncio.to_thread(job.wait_for_go)
        start = time.monotonic()
        pending = []
        for payload in job.payloads():
            if payload is None:
                await asyncio.sleep(job.delay)
            elif job.style != "gathered":
                await broker.publish(payload, TOPIC, qos=qos)
            else:
                pending.append(broker.publish(payload, TOPIC, qos=qos))
                if len(pending) == job.window:
                    await asyncio.gather(*pending)
                    pending.clear()
        await asyncio.gather(*pending)
        job.finish(start=start, end=time.monotonic())


async def subscribe(job: Job) -> None:
    tally = Tally(job)
    received = tally.received
    broker = _broker(job)

    @broker.subscriber(TOPIC, qos=QoS(job.qos))  # type: ignore[untyped-decorator]
    async def handle(body: bytes) -> None:
        received(body)

    async with broker:
        await broker.start()
        job.ready()
        await asyncio.to_thread(tally.wait)
        tally.finish()


if __name__ == "__main__":
    run({"publish": run_async(publish), "subscribe": run_async(subscribe)}, "faststream", "zmqtt")
