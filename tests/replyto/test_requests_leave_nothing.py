"""Ten thousand requests, whatever becomes of them, leave nothing behind: neither in this process nor at the broker."""

from __future__ import annotations

import asyncio
import collections
import gc
import itertools
import logging
import random
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Final

import pytest

import messaging
from messaging import DeadlineError, Messaging, ReplyError, RequestCancelledError
from messaging.execution import engine
from messaging.publishing import Publication
from messaging.receiving import MessageStream
from messaging.replyto import Request
from messaging.replyto.reply_stream import ReplySubscription
from messaging.replyto.requests import ReplyInbox
from messaging.replyto.served_request import ServedRequest
from messaging.services import ServiceRegistry
from messaging.testing.brokers import Mosquitto, RabbitMQ, require
from messaging.testing.waiting import PATIENCE, Recorder, eventually
from messaging_adapters.memory import broker as memory
from tests.doubles.fake import on_loop, settle_loop
from tests.replyto.conftest import held

#: how long ten thousand requests may take to settle, seconds
DEADLINE: Final = 3 * PATIENCE
REQUESTS: Final = 10_000
#: requests at a time
CONCURRENCY: Final = 100
#: of two hundred requests
MIXTURE: Final = {"stream": 1, "given": 1, "early": 1, "cancel": 3, "timeout": 4, "fault": 20, "answer": 170}
#: types of the objects that a request makes; none of them stay
MADE: Final = (Request, Publication, ReplyInbox, ServedRequest, ReplySubscription, MessageStream)
#: how many of anything may come and go while it is counted
LEEWAY: Final = 5


#: counts what a broker keeps for its clients
Kept = Callable[[], dict[str, int]]


def kept_by_memory() -> dict[str, int]:
    broker = memory._brokers["requests-leave-nothing"]
    return on_loop(lambda: {"queues": len(broker.queues) + len(broker._private), "clients": len(broker.clients)})


class KeptByMosquitto:
    """Mosquitto tells every now and then how many subscriptions there are."""

    def __init__(self, watcher: Messaging) -> None:
        self._told: Recorder[tuple[str | None, bytes]] = Recorder()
        # one for both: they come in their order
        watcher.subscribe("$SYS/broker/+/+").subscribe(lambda each: self._told((each.context.channel, each.payload)))

    def __call__(self) -> dict[str, int]:
        def ticks() -> int:
            return sum(channel == "$SYS/broker/bytes/sent" for channel, _ in [*self._told])

        # it tells a number only if that has changed; this one, which always has, behind the other
        seen = ticks()
        eventually(lambda: ticks() > seen, "the next numbers", patience=DEADLINE)
        counts = [int(told) for channel, told in [*self._told] if channel == "$SYS/broker/subscriptions/count"]
        return {"subscriptions": counts[-1] if counts else 0}


def kept_by_rabbitmq(broker: RabbitMQ) -> dict[str, int]:
    queues = broker.ctl("list_queues", "name", "consumers").splitlines()[1:]  # below their names
    return {"queues": len(queues), "consumers": sum(int(line.split("\t")[1]) for line in queues)}


@pytest.fixture(
    params=["memory", *(pytest.param(name, marks=pytest.mark.slow) for name in ("mqtt5", "mqtt311-envelope", "amqp"))]
)
def place(request: pytest.FixtureRequest) -> Iterator[tuple[str, Kept]]:
    """The URL of a broker, and what it keeps."""
    if request.param == "memory":
        yield "memory://requests-leave-nothing", kept_by_memory
    elif request.param == "amqp":
        rabbitmq = request.getfixturevalue("rabbitmq")
        yield rabbitmq.url, partial(kept_by_rabbitmq, rabbitmq)
    else:
        require("mosquitto")
        options = "?version=5" if request.param == "mqtt5" else "?version=3.1.1&envelope=true"
        with Mosquitto(["sys_interval 1"]) as broker, messaging.connect(broker.url) as watcher:
            yield broker.url + options, KeptByMosquitto(watcher)


@pytest.fixture(autouse=True)
def _no_log(caplog: pytest.LogCaptureFixture) -> None:
    """Captured log entries are kept, and their arguments with them."""
    caplog.set_level(logging.CRITICAL, logger="messaging")


# --- counts


def objects() -> dict[str, int]:
    """How many there are of each kind that is made for a request."""
    gc.collect()
    found = collections.Counter(map(type, gc.get_objects()))
    return {
        f"objects {made.__name__}": sum(number for kind, number in found.items() if issubclass(kind, made))
        for made in MADE
    }


def left(kept: Kept, *instances: Messaging) -> dict[str, int]:
    """Return counts of everything that must not grow."""
    settle_loop()
    return {
        "tasks": on_loop(lambda: len(asyncio.all_tasks(engine().loop))),
        "engine tasks": on_loop(lambda: len(engine()._tasks)),
        "threads": threading.active_count(),
        "files": len([*Path("/proc/self/fd").iterdir()]),
        **{f"subscriptions of {m.name}": len(m._connection.subscriptions) for m in instances},
        **objects(),
        **{f"{what} at the broker": number for what, number in kept().items()},
    }


def wait_idle(*instances: Messaging) -> None:
    """Wait until nothing is under way."""

    def busy() -> dict[str, int]:
        found = {f"{what} of {m.name}": number for m in instances for what, number in on_loop(held, m).items()}
        # idle ones leave after a while; the last one stays
        workers = sum(thread.name == "messaging-worker" for thread in threading.enumerate())
        return {what: number for what, number in [*found.items(), ("workers", workers - 1)] if number > 0}

    eventually(lambda: not busy(), lambda: f"nothing under way: {busy()}", patience=DEADLINE)


def wait_gone(before: dict[str, int], kept: Kept, *instances: Messaging) -> None:
    """Wait until there is no more than ``before``."""

    def grown() -> dict[str, int]:
        more = {what: number - before[what] for what, number in left(kept, *instances).items()}
        return {what: n for what, n in more.items() if n > (LEEWAY if what.startswith("objects") else 0)}

    eventually(lambda: not grown(), lambda: f"nothing left behind: {grown()}", patience=DEADLINE)


# --- requests


def answer(responder: Messaging) -> None:
    """Register a handler for each kind of request."""

    @responder.reply("leave/answer")
    def echo(request: bytes) -> bytes:
        return request

    @responder.reply("leave/fault")
    def fault(request: bytes) -> bytes:
        raise ValueError(request.decode())

    @responder.reply("leave/late")
    async def late(request: bytes) -> bytes:
        await asyncio.sleep(0.5)  # sleeps: longer than the requester waits
        return request

    @responder.reply("leave/stream", concurrency=CONCURRENCY)
    def stream() -> Iterator[int]:
        for number in itertools.count():
            yield number
            time.sleep(0.001)  # sleeps: replies sent in vain are no part of this test


async def ask(m: Messaging, number: int, kind: str) -> None:
    """Make one request, and see that it becomes what it should."""
    payload = b"%d" % number
    given: dict[str, Any] = {"reply_to": f"leave/given/{number}"}
    if kind == "stream":
        async with m.request_many("leave/stream", timeout=10 * DEADLINE) as stream:
            async for message in stream:
                assert message.value() == 0
                break
    elif kind == "timeout":
        with pytest.raises(DeadlineError):
            await m.request("leave/late", payload, qos=1, timeout=0.1)
    elif kind in ("early", "cancel"):
        # early: before its reply channel is subscribed to, and it is published
        promise = m.request("leave/late", payload, qos=1, timeout=DEADLINE, **(given if kind == "early" else {}))
        if kind == "cancel":
            await asyncio.sleep(0.01)  # sleeps: so that most requests are sent when they are cancelled
        promise.cancel()
        with pytest.raises(RequestCancelledError):
            await promise
    elif kind == "fault":
        with pytest.raises(ReplyError, match=str(number)):
            await m.request("leave/fault", payload, qos=1, timeout=DEADLINE)
    else:
        reply = await m.request("leave/answer", payload, qos=1, timeout=DEADLINE, **(given if kind == "given" else {}))
        assert reply.payload == payload


async def ask_many(m: Messaging, total: int) -> collections.Counter[str]:
    """Make ``total`` requests; how many of each kind."""
    mixed = [kind for kind, times in MIXTURE.items() for _ in range(times)]
    # the same every time, and not one kind after the other
    random.Random(1).shuffle(mixed)
    numbers = iter(range(total))
    made: collections.Counter[str] = collections.Counter()

    async def work() -> None:
        for number in numbers:
            kind = mixed[number % len(mixed)]
            made[kind] += 1
            await ask(m, number, kind)

    async with asyncio.TaskGroup() as tasks:
        for _ in range(CONCURRENCY):
            tasks.create_task(work())
    return made


def test_ten_thousand_requests_leave_nothing_behind(place: tuple[str, Kept]) -> None:
    url, kept = place
    settings: dict[str, Any] = {"services": ServiceRegistry(), "timeout": DEADLINE}
    with (
        messaging.connect(url, name="requester", **settings) as m,
        messaging.connect(url, name="responder", **settings) as responder,
    ):
        answer(responder)
        asyncio.run(ask_many(m, 2 * CONCURRENCY))  # objects that are made once are there
        wait_idle(m, responder)
        before = left(kept, m, responder)
        counters = m.runtime.get_runtime_dto().requests
        made = asyncio.run(ask_many(m, REQUESTS))
        wait_idle(m, responder)
        wait_gone(before, kept, m, responder)
        found = m.runtime.get_runtime_dto().requests
    assert found.pending == counters.pending == 0
    assert found.answered - counters.answered == made["answer"] + made["given"]
    assert found.faults - counters.faults == made["fault"]
    assert found.failed - counters.failed == made["timeout"] + made["cancel"] + made["early"]
    assert made.total() == REQUESTS
