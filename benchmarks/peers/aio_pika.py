"""aio-pika: publishes gathered by the window, or each awaited; a callback that acknowledges."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

import aio_pika

from benchmarks.peers.job import EXCHANGE, QUEUE, ROUTING_KEY, Job, Tally, run, run_async

if TYPE_CHECKING:
    from aio_pika.abc import AbstractIncomingMessage


async def publish(job: Job) -> None:
    connection = await aio_pika.connect_robust(host=job.host, port=job.port)
    async with connection:
        channel = await connection.channel()
        exchange = await channel.get_exchange(EXCHANGE)
        # what is paced cannot be gathered: it is published when it is due
        window = 1 if job.style == "awaited" or job.rate is not None else job.window
        job.ready()
        await asyncio.to_thread(job.wait_for_go)
        start = time.monotonic()
        pending = []
        for payload in job.payloads():
            if payload is None:
                await asyncio.sleep(job.delay)
                continue
            publishing = exchange.publish(aio_pika.Message(payload), ROUTING_KEY)
            if window == 1:
                await publishing
                continue
            pending.append(publishing)
            if len(pending) == window:
                await asyncio.gather(*pending)
                pending.clear()
        await asyncio.gather(*pending)
        job.finish(start=start, end=time.monotonic())


async def subscribe(job: Job) -> None:
    tally = Tally(job)
    received = tally.received

    async def on_message(message: AbstractIncomingMessage) -> None:
        await message.ack()
        received(message.body)

    connection = await aio_pika.connect_robust(host=job.host, port=job.port)
    async with connection:
        channel = await connection.channel()
        await channel.set_qos(prefetch_count=job.window)
        queue = await channel.get_queue(QUEUE)
        if job.role == "consume":
            job.ready()
            await asyncio.to_thread(job.wait_for_go)
            tally.start()
        await queue.consume(on_message)
        if job.role == "subscribe":
            job.ready()
        await asyncio.to_thread(tally.wait)
        tally.finish()


if __name__ == "__main__":
    roles = {"publish": run_async(publish), "subscribe": run_async(subscribe), "consume": run_async(subscribe)}
    run(roles, "aio-pika", "aiormq")
