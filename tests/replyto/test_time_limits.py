"""Time limits of requests and replies, in virtual time."""

from __future__ import annotations

import asyncio

import pytest

import messaging
from messaging.errors import DeadlineError
from messaging.execution import clock
from messaging.testing.clock import VirtualClock


def test_a_reply_in_time_is_received_and_a_late_one_is_not(virtual_clock: VirtualClock) -> None:
    async def answer(request: messaging.Message) -> bytes:
        await clock.sleep(float(request.payload))
        return b"here"

    with messaging.connect("memory://limits") as m:
        m.reply("ask", answer)
        begun = virtual_clock.time
        assert m.request("ask", b"299", timeout=300.0).result().payload == b"here"
        assert virtual_clock.time - begun == pytest.approx(299.0, abs=0.1)
        begun = virtual_clock.time
        with pytest.raises(DeadlineError):
            m.request("ask", b"301", timeout=300.0).result()
        assert 300.0 <= virtual_clock.time - begun <= 300.25


def test_requests_with_different_limits_end_each_at_its_own(virtual_clock: VirtualClock) -> None:
    with messaging.connect("memory://limits") as m, m.subscribe("heard"):
        begun, ended = virtual_clock.time, dict[float, float]()
        for limit in (40.0, 5.0, 20.0):
            promise = m.request("heard", b"", timeout=limit)
            promise.add_done_callback(lambda _, limit=limit: ended.setdefault(limit, clock.monotonic() - begun))  # type: ignore[misc]
        virtual_clock.advance(60.0)
    assert sorted(ended) == [5.0, 20.0, 40.0]
    assert all(0.0 <= at - limit <= 0.25 for limit, at in ended.items()), ended


def test_many_replies_end_when_none_has_come_for_the_time_limit(virtual_clock: VirtualClock) -> None:
    with messaging.connect("memory://limits") as m, m.subscribe("heard"):
        begun = virtual_clock.time
        with pytest.raises(DeadlineError):
            list(m.request_many("heard", timeout=60.0))
        assert 60.0 <= virtual_clock.time - begun <= 61.0


def test_a_request_is_awaited_on_an_event_loop_until_its_limit(virtual_clock: VirtualClock) -> None:
    async def main() -> float:
        async with messaging.connect("memory://limits") as m, m.subscribe("heard"):
            begun = clock.monotonic()
            with pytest.raises(DeadlineError):
                await m.request("heard", b"", timeout=600.0)
            return clock.monotonic() - begun

    assert asyncio.run(main()) == pytest.approx(600.0, abs=0.25)
