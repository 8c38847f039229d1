"""FastStream over RabbitMQ: each publish awaited, or gathered by the window; a subscriber that acknowledges.

On uvloop, as ``faststream run`` does it where that is installed.
"""

from __future__ import annotations

import asyncio
import time

from faststream.rabbit import Channel, ExchangeType, RabbitBroker, RabbitExchange, RabbitQueue

from benchmarks.peers.job import (
    EXCHANGE,
    QUEUE,
    REQUESTS,
    ROUTING_KEY,
    Job,
    Replies,
    Tally,
    run,
    run_async,
    serve_until_told,
)

_EXCHANGE = RabbitExchange(EXCHANGE, type=ExchangeType.TOPIC, declare=False)


def _broker(job: Job) -> RabbitBroker:
    # it would log each message it receives
    return RabbitBroker(
        f"amqp://guest:guest@{job.host}:{job.port}/",
        default_channel=Channel(prefetch_count=job.window),
        logger=None,
    )


async def publish(job: Job) -> None:
    async with _broker(job) as broker:
        job.ready()
        await asyncio.to_thread(job.wait_for_go)
        start = time.monotonic()
        pending = []
        for payload in job.payloads():
            if payload is None:
                await asyncio.sleep(job.delay)
                continue
            publishing = broker.publish(payload, exchange=_EXCHANGE, routing_key=ROUTING_KEY)
            if job.style != "gathered":
                await publishing
                continue
            pending.append(publishing)
            if len(pending) == job.window:
                await asyncio.gather(*pending)
                pending.clear()
        await asyncio.gather(*pending)
        job.finish(start=start, end=time.monotonic())


async def subscribe(job: Job) -> None:
    tally = Tally(job)
    received = tally.received
    broker = _broker(job)
    queue = RabbitQueue(QUEUE, routing_key=ROUTING_KEY, declare=False)

    @broker.subscriber(queue, _EXCHANGE)  # type: ignore[untyped-decorator]
    async def handle(body: bytes) -> None:
        received(body)

    async with broker:
        if job.role == "consume":
            job.ready()
            await asyncio.to_thread(job.wait_for_go)
            tally.start()
        await broker.start()
        if job.role == "subscribe":
            job.ready()
        await asyncio.to_thread(tally.wait)
        tally.finish()


async def request(job: Job) -> None:
    replies = Replies(job)
    async with _broker(job) as broker:

        async def ask(payload: bytes) -> bytes:
            reply = await broker.request(payload, REQUESTS, timeout=60.0)
            body: bytes = reply.body
            return body

        await ask(b"-")
        job.ready()
        await asyncio.to_thread(job.wait_for_go)
        await replies.gather(ask)
        replies.finish()


async def respond(job: Job) -> None:
    broker = _broker(job)

    @broker.subscriber(RabbitQueue(REQUESTS, auto_delete=True))  # type: ignore[untyped-decorator]
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
            "consume": run_async(subscribe),
            "request": run_async(request),
            "respond": run_async(respond),
        },
        "faststream",
        "aio-pika",
        "aiormq",
    )
