"""Blocking calls are refused on a thread that runs an event loop, by an error that names the form with ``await``."""

from __future__ import annotations

import asyncio
import threading
import warnings
from collections.abc import Callable
from typing import Any

import pytest

import messaging
from messaging import DeadlineError, Messaging, WouldBlockError
from messaging.execution import engine
from messaging.testing.waiting import PATIENCE, eventually
from tests.doubles.fake import FakeBroker
from tests.doubles.fixtures import Connect


def in_loop(function: Callable[[], Any]) -> Any:
    async def main() -> Any:
        return function()

    return asyncio.run(main())


def test_waiting_for_a_promise_is_refused(m: Messaging, broker: FakeBroker) -> None:
    broker.hold = True
    pending = m.publish("a", b"", qos=1)
    request = m.request("a", b"")
    for promise in (pending, request):
        for wait in (promise.result, promise.exception, lambda promise=promise: promise.result(5)):
            with pytest.raises(WouldBlockError, match="await"):
                in_loop(wait)
        with pytest.raises(DeadlineError):
            in_loop(lambda promise=promise: promise.result(0))
    request.cancel()
    broker.confirm()
    assert pending.exception(PATIENCE) is None


def test_the_outcome_of_a_promise_that_is_done_may_be_read(connect: Connect) -> None:
    m = connect()
    done = m.publish("a", b"")
    assert done.exception(PATIENCE) is None
    assert in_loop(done.result) is None


def test_iterating_a_stream_is_refused(connect: Connect) -> None:
    m = connect()
    with m.subscribe("a") as stream:
        m.publish("a", b"1").result(PATIENCE)
        for wait in (lambda: next(iter(stream)), stream.receive, lambda: stream.receive(5)):
            with pytest.raises(WouldBlockError, match=r"await|async for"):
                in_loop(wait)
        eventually(lambda: stream.counters.received == 1)
        assert in_loop(lambda: stream.receive(0)).payload == b"1"
        with pytest.raises(DeadlineError):
            in_loop(lambda: stream.receive(0))


def test_with_warns_that_its_block_begins_too_early() -> None:
    async def main() -> None:
        entered(lambda: messaging.connect("memory://loop"))
        async with messaging.connect("memory://loop") as m:
            entered(lambda: m.subscribe("a"))
            entered(lambda: m.on("a", print))
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                stream = m.subscribe("a")
                await stream.ready
                with stream, m:
                    pass

    def entered(make: Callable[[], Any]) -> None:
        go_on = threading.Event()
        engine().call(go_on.wait, PATIENCE)  # its loop: nothing is ready before the block begins
        try:
            context = make()
            with pytest.warns(RuntimeWarning, match="async with"):
                context.__enter__()
        finally:
            go_on.set()
        context.__exit__(None, None, None)

    asyncio.run(main())
