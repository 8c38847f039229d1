"""rx-messaging: messages are built from a context made once and given to the publisher; an observer receives.

Promises are looked at, all of them, two thousand at a time, while the next two thousand are under way: whoever waits
for each in turn pays for a switch of threads each time. What bounds the messages under way is the library's own
(``outbox_size``, prefetch, and so on); only the in-flight window of MQTT is set, as it is for the others: to what the
broker allows. The style names the protocol and, after a hyphen, another way of use.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any, Final

import messaging
from benchmarks.peers.job import QUEUE, REQUESTS, TOPIC, Job, Replies, Tally, run, serve_until_told
from messaging import Message, Promise

#: promises that are looked at together, while the next as many are under way
_WINDOW: Final = 2_000
_TIMEOUT: Final = 60.0


def _url(job: Job) -> str:
    if job.style.startswith("amqp"):
        return f"amqp://{job.host}:{job.port}"
    if job.role in ("request", "respond"):
        return f"mqtt://{job.host}:{job.port}?version={job.version}&envelope={str(job.version != '5').lower()}"
    return f"mqtt://{job.host}:{job.port}?version={job.version}&max_inflight={job.window}"


def publish(job: Job) -> None:
    if job.style.endswith("awaited"):
        asyncio.run(_publish_awaited(job))
        return
    with messaging.connect(_url(job)) as m:
        context = _context(m, job)
        window: list[Promise[None]] = []
        last: list[Promise[None]] = []
        publish = m.publisher.publish
        job.ready()
        job.wait_for_go()
        start = time.monotonic()
        for payload in job.blocking_payloads():
            window.append(publish(Message(payload, context)))
            if len(window) == _WINDOW:
                _check(last)
                last, window = window, []
        _check(last)
        _check(window)
        job.finish(start=start, end=time.monotonic())


def _check(promises: list[Promise[None]]) -> None:
    """Wait for all, beginning with the last: the others are there by then, and need no waiting each."""
    for promise in reversed(promises):
        promise.result(_TIMEOUT)


async def _publish_awaited(job: Job) -> None:
    async with messaging.connect(_url(job)) as m:
        context = _context(m, job)
        job.ready()
        await asyncio.to_thread(job.wait_for_go)
        start = time.monotonic()
        for payload in job.payloads():
            if payload is None:
                await asyncio.sleep(job.delay)
            else:
                await m.publisher.publish(Message(payload, context))
        job.finish(start=start, end=time.monotonic())


def _context(m: messaging.Messaging, job: Job) -> messaging.MessageContext:
    return m.context_builder().channel(TOPIC).extension_entry("qos", str(job.qos)).build_context()


def subscribe(job: Job) -> None:
    tally = Tally(job)
    received = tally.received
    with messaging.connect(_url(job)) as m:
        options: dict[str, Any] = {"qos": job.qos}
        if job.style.startswith("amqp"):
            options["queue"] = QUEUE
        if job.style.endswith("buffered"):
            options["buffer_size"] = 65_536
        if job.role == "consume":
            job.ready()
            job.wait_for_go()
            tally.start()
        with m.subscribe(TOPIC, **options) as stream:
            stream.subscribe(lambda message: received(message.payload))
            if job.role == "subscribe":
                job.ready()
            tally.wait()
            tally.finish()


def request(job: Job) -> None:
    if job.style.endswith("threads"):
        _request_from_a_thread(job)
    else:
        asyncio.run(_request(job))


async def _request(job: Job) -> None:
    replies = Replies(job)
    async with messaging.connect(_url(job)) as m:
        context = _request_context(m, job)
        publish = m.reply_to.publish_with_reply

        async def ask(payload: bytes) -> bytes:
            reply: Message = await publish(Message(payload, context))
            return reply.payload

        await ask(b"")  # it subscribes to the replies
        job.ready()
        await asyncio.to_thread(job.wait_for_go)
        await replies.gather(ask)
        replies.finish()


def _request_from_a_thread(job: Job) -> None:
    replies = Replies(job)
    with messaging.connect(_url(job)) as m:
        context = _request_context(m, job)
        publish = m.reply_to.publish_with_reply

        def ask(payload: bytes, answered: Callable[[bytes], None]) -> None:
            promise = publish(Message(payload, context))
            promise.add_done_callback(lambda done: answered(done.result().payload))

        def ask_and_wait(payload: bytes) -> bytes:
            reply: Message = publish(Message(payload, context)).result(_TIMEOUT)
            return reply.payload

        ask_and_wait(b"")
        job.ready()
        job.wait_for_go()
        if job.window == 1:
            replies.thread(ask_and_wait)
        else:
            replies.pipeline(ask)
        replies.finish()


def _request_context(m: messaging.Messaging, job: Job) -> messaging.MessageContext:
    builder = m.context_builder().channel(REQUESTS).extension_entry("timeout", _TIMEOUT)
    if not job.style.startswith("amqp"):
        builder.extension_entry("qos", str(job.qos))
    return builder.build_context()


def respond(job: Job) -> None:
    with messaging.connect(_url(job)) as m:

        @m.reply(REQUESTS)
        def echo(request: Message) -> bytes:
            return request.payload

        serve_until_told(job)


if __name__ == "__main__":
    roles = {"publish": publish, "subscribe": subscribe, "consume": subscribe, "request": request, "respond": respond}
    run(roles, "rx-messaging")
