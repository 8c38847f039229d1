"""Rounds leave nothing behind: no thread, task, socket, entry, and no object more than before."""

from __future__ import annotations

import asyncio
import collections
import gc
import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import messaging
from messaging.errors import MessagingError
from messaging.execution import engine, mailboxes, workers
from messaging.execution import threads as module
from messaging.instance.messaging import _open
from messaging.instance.services import _names
from messaging.services import ServiceRegistry, default_registry
from messaging.testing.waiting import Recorder, eventually, results
from messaging_adapters.memory import broker as memory
from tests.doubles.fake import FakeBroker, brokers, on_loop, settle_loop

#: objects of these kinds are counted: ours, and what ours are made of
OURS = ("messaging.", "adapters.", "tests.doubles.fake", "asyncio.", "threading", "_asyncio", "uvloop")
#: an object left behind by one round of ten is detected
ROUNDS = 300


def ours() -> collections.Counter[str]:
    gc.collect()
    return collections.Counter(
        f"{kind.__module__}.{kind.__qualname__}"
        for kind in map(type, gc.get_objects())
        if str(kind.__module__).startswith(OURS)
    )


@pytest.fixture(autouse=True)
def _no_log(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """Captured log entries are kept, and their arguments with them. Idle worker threads leave soon."""
    caplog.set_level(logging.CRITICAL, logger="messaging")
    monkeypatch.setattr(module, "IDLE_SECONDS", 0.1)


def left() -> dict[str, int]:
    """Return counts of everything that must not grow."""
    settle_loop()
    return {
        **ours(),
        "threads": sum(thread.name != "messaging-worker" for thread in threading.enumerate()),
        "tasks": len(on_loop(lambda: asyncio.all_tasks(engine().loop))),
        "files": len([*Path("/proc/self/fd").iterdir()]),
        "services": len(default_registry().find()),
        "names": sum(len(names) for names in _names.values()),
        "brokers": len(memory._brokers),
        "mailboxes": len(mailboxes._mailboxes),
        "open": len(_open),
        "engine tasks": len(engine()._tasks),
    }


def grown(before: dict[str, int]) -> dict[str, int]:
    """Return the counts that have grown; the names of classes have dots, and some objects come and go."""
    grown = {name: count - before.get(name, 0) for name, count in left().items()}
    return {name: more for name, more in grown.items() if more > (20 if "." in name else 0)}


def repeat(round_: Callable[[int], None], rounds: int, warm_up: int = 30) -> None:
    """Do ``rounds`` rounds, and fail if more is left than after the ``warm_up`` rounds before."""
    for number in range(warm_up):
        round_(number)
    before = left()
    for number in range(rounds):
        round_(number)
    # closing may finish in the background, within a moment
    eventually(lambda: not grown(before), lambda: f"nothing left behind by {rounds} rounds: {grown(before)}")


def check(round_: Callable[[int], None], rounds: int, warm_up: int = 30) -> None:
    """Repeat, and wait until the worker threads have left."""
    repeat(round_, rounds, warm_up)
    eventually(lambda: not workers()._idle, "the idle workers gone")
    assert not [thread for thread in threading.enumerate() if thread.name == "messaging-worker"]


def test_rounds_leave_nothing_behind() -> None:
    def one_round(number: int) -> None:
        url = f"memory://leak{number % 3}"
        with messaging.connect(url, name="the same every time") as m, m.subscribe("a/+") as stream:
            m.publish("a/b", b"1").result(10)
            assert stream.receive(10).payload == b"1"

    check(one_round, ROUNDS)


@pytest.mark.timeout(240)
@pytest.mark.parametrize("broker", ["mosquitto", pytest.param("rabbitmq", marks=pytest.mark.slow)])
def test_rounds_at_a_broker_leave_nothing_behind(request: pytest.FixtureRequest, broker: str) -> None:
    url = request.getfixturevalue(broker).url

    def one_round(number: int) -> None:
        with messaging.connect(url) as m, m.subscribe("rounds/#") as stream:
            m.publish("rounds/a", b"x", qos=1)
            if number % 10 == 0:
                assert stream.receive(30).payload == b"x"

    check(one_round, 100)


def test_rounds_with_observers_leave_nothing_behind() -> None:
    def one_round(number: int) -> None:
        seen: Recorder[Any] = Recorder()
        with messaging.connect("memory://leak") as m:
            m.subscribe("a").subscribe(seen)
            m.subscribe("a").subscribe(lambda _: None).dispose()
            m.publish("a", b"1")
            seen.wait_for(1)

    check(one_round, 100)


def test_rounds_on_event_loops_leave_nothing_behind() -> None:
    async def main() -> None:
        async with messaging.connect("memory://leak") as m, m.subscribe("a") as stream:
            await m.publish("a", b"1")
            async for message in stream:
                assert message.payload == b"1"
                break

    check(lambda _: asyncio.run(main()), 100)


def test_rounds_of_failing_connects_leave_nothing_behind() -> None:
    registry = ServiceRegistry()
    broker = FakeBroker()

    def one_round(number: int) -> None:
        broker.errors["open"].append(messaging.ConnectFailedError("no"))
        for url in (broker.url, "memory://x/path", "nats://x", "memory://x?nmae=1"):
            with pytest.raises(MessagingError):
                messaging.connect(url, name="the same every time", services=registry)
        broker.calls.clear()

    check(one_round, 60, 10)
    assert registry.find() == []
    del brokers[broker.name]


def test_rounds_of_losses_leave_nothing_behind() -> None:
    broker = FakeBroker()
    registry = ServiceRegistry()
    with messaging.connect(broker.url, services=registry, reconnect_min=0.0001, reconnect_max=0.0002) as m:
        m.subscribe("a").subscribe(lambda _: None)
        with m.subscribe("b", buffer_size=10) as stream:

            def one_round(number: int) -> None:
                broker.deliver(b"1", handle=next(each for each in broker.live if each.spec.channel == "b"))
                if number % 2:
                    stream.receive(10)
                promise = m.publish("a", b"1")
                broker.lose_and_reconnect(subscriptions=2)
                promise.result(10)
                for list_ in (broker.sent, broker.acknowledged, broker.rejected, broker.calls, broker.batches):
                    list_.clear()
                broker.handles[:] = broker.live

            repeat(one_round, 200, 30)
            assert stream.counters.received == 230
    del brokers[broker.name]


def test_rounds_of_promises_that_fail_leave_nothing_behind() -> None:
    broker = FakeBroker()
    with messaging.connect(broker.url, services=ServiceRegistry()) as m:

        def one_round(number: int) -> None:
            broker.hold = True
            promises = [m.publish("a", b"x" * 100, timeout=0.02) for _ in range(20)]
            for promise in promises:
                with pytest.raises(messaging.OutcomeUnknownError):
                    promise.result(10)
            for list_ in (broker.held, broker.sent, broker.calls, broker.batches):
                list_.clear()

        repeat(one_round, 20, 5)
    del brokers[broker.name]


def test_the_memory_of_publishing_does_not_grow_with_the_messages() -> None:
    """Confirmed messages are released; contexts and plans are bounded."""
    with messaging.connect("memory://leak", services=ServiceRegistry()) as m:

        def one_round(number: int) -> None:
            promises = [m.publish(f"c/{number}/{each}", b"x", qos=1) for each in range(50)]
            promises += [m.publish("d", b"x", message_id=f"{number}/{each}") for each in range(50)]
            results(promises)

        for number in range(200):  # enough to fill every cache
            one_round(number)
        before = ours()
        for number in range(200, 300):
            one_round(number)
        after = ours()
        assert sum(after.values()) < sum(before.values()) * 1.2
