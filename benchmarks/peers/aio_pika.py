"""aio-pika: publishes gathered by the window, or each awaited; a callback that acknowledges."""

from __future__ import annotations

import asyncio
import time
import uuid
from typing import TYPE_CHECKING

import aio_pika

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


async def request(job: Job) -> None:
    """A client as in the tutorials: a queue for the replies, a dict of who waits; direct reply-to by the style."""
    replies = Replies(job)
    loop = asyncio.get_running_loop()
    waiting: dict[str, asyncio.Future[bytes]] = {}

    async def on_reply(message: AbstractIncomingMessage) -> None:
        future = waiting.pop(message.correlation_id or "", None)
        if future is not None:
            future.set_result(message.body)

    connection = await aio_pika.connect_robust(host=job.host, port=job.port)
    async with connection:
        channel = await connection.channel(publisher_confirms="unconfirmed" not in job.style)
        if "direct" in job.style:
            queue = await channel.declare_queue("amq.rabbitmq.reply-to", passive=True)
        else:
            queue = await channel.declare_queue(exclusive=True)
        await queue.consume(on_reply, no_ack=True)
        publish = channel.default_exchange.publish

        async def ask(payload: bytes) -> bytes:
            correlation_id = uuid.uuid4().hex
            future = waiting[correlation_id] = loop.create_future()
            message = aio_pika.Message(payload, correlation_id=correlation_id, reply_to=queue.name)
            await publish(message, REQUESTS)
            reply: bytes = await future
            return reply

        await ask(b"")
        job.ready()
        await asyncio.to_thread(job.wait_for_go)
        await replies.gather(ask)
        replies.finish()


async def respond(job: Job) -> None:
    connection = await aio_pika.connect_robust(host=job.host, port=job.port)
    async with connection:
        channel = await connection.channel(publisher_confirms="unconfirmed" not in job.style)
        await channel.set_qos(prefetch_count=job.window)
        publish = channel.default_exchange.publish

        async def on_request(message: AbstractIncomingMessage) -> None:
            assert message.reply_to is not None
            await publish(aio_pika.Message(message.body, correlation_id=message.correlation_id), message.reply_to)
            await message.ack()

        queue = await channel.declare_queue(REQUESTS, auto_delete=True)
        await queue.consume(on_request)
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
        "aio-pika",
        "aiormq",
    )
