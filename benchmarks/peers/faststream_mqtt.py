"""FastStream over MQTT: each publish awaited, or gathered by the window; a subscriber of its own per topic.

On uvloop, as ``faststream run`` does it where that is installed.
"""

from __future__ import annotations

import asyncio
import time

from faststream.mqtt import MQTTBroker, QoS

from benchmarks.peers.job import REQUESTS, TOPIC, Job, Replies, Tally, run, run_async, serve_until_told


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


async def request(job: Job) -> None:
    replies = Replies(job)
    qos = QoS(job.qos)
    async with _broker(job) as broker:

        async def ask(payload: bytes) -> bytes:
            reply = await broker.request(payload, REQUESTS, timeout=60.0, qos=qos)
            body: bytes = reply.body
            return body

        await ask(b"-")
        job.ready()
        await asyncio.to_thread(job.wait_for_go)
        await replies.gather(ask)
        replies.finish()


async def respond(job: Job) -> None:
    broker = _broker(job)

    @broker.subscriber(REQUESTS, qos=QoS(job.qos))  # type: ignore[untyped-decorator]
    async def echo(body: bytes) -> bytes:
        return body

    async with broker:
        await broker.start()
        await asyncio.to_thread(serve_until_told, job)


if __name__ == "__main__":
    run(
        {
            "publish": run_async(publish),
            "subscribe": run_async(subscribe),
            "request": run_async(request),
            "respond": run_async(respond),
        },
        "faststream",
        "zmqtt",
    )
