"""aiomqtt: each publish awaited, or gathered; ``async for`` over the messages."""

from __future__ import annotations

import asyncio
import time

import aiomqtt

from benchmarks.peers.job import TOPIC, Job, Tally, run, run_async

#: aiomqtt looks through all pending calls at each, and warns of more
_GATHERED = 10


def _client(job: Job) -> aiomqtt.Client:
    protocol = aiomqtt.ProtocolVersion.V5 if job.version == "5" else aiomqtt.ProtocolVersion.V311
    return aiomqtt.Client(job.host, job.port, protocol=protocol, max_inflight_messages=job.window)


async def publish(job: Job) -> None:
    async with _client(job) as client:
        job.ready()
        await asyncio.to_thread(job.wait_for_go)
        start = time.monotonic()
        pending = []
        for payload in job.payloads():
            if payload is None:
                await asyncio.sleep(job.delay)
            elif job.style != "gathered":
                await client.publish(TOPIC, payload, job.qos)
            else:
                pending.append(client.publish(TOPIC, payload, job.qos))
                if len(pending) == _GATHERED:
                    await asyncio.gather(*pending)
                    pending.clear()
        await asyncio.gather(*pending)
        job.finish(start=start, end=time.monotonic())


async def subscribe(job: Job) -> None:
    tally = Tally(job)
    received = tally.received
    async with _client(job) as client:
        await client.subscribe(TOPIC, job.qos)
        job.ready()
        waiting = asyncio.create_task(asyncio.to_thread(tally.wait))

        async def receive() -> None:
            async for message in client.messages:
                received(message.payload)

        receiving = asyncio.create_task(receive())
        await asyncio.wait([waiting, receiving], return_when=asyncio.FIRST_COMPLETED)
        receiving.cancel()
        tally.finish()


if __name__ == "__main__":
    run({"publish": run_async(publish), "subscribe": run_async(subscribe)}, "aiomqtt", "paho-mqtt")
