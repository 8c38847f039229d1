"""Delays of batches, rates, samples and ages of a gateway, in virtual time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from messaging.execution import clock
from messaging.gateway import Gateway
from messaging.gateway.drain import TokenBucket
from messaging.testing.clock import VirtualClock
from messaging.testing.tables import table
from tests.gateway.kit import Broker, route, settings, unique


@contextmanager
def running(
    time: VirtualClock, folder: Path, pattern: str | None = "out/+", **options: Any
) -> Iterator[tuple[Broker, Broker, Gateway]]:
    """Run a gateway between two brokers of this process; give its source, its target, and it."""
    names = {name: {"url": f"memory://{unique(name)}"} for name in "ab"}
    chosen = settings(folder, instances=names, routes={"r": route(**options)})
    with Broker(names["a"]["url"]) as a, Broker(names["b"]["url"], pattern) as b, Gateway(chosen) as gateway:
        time.until(lambda: all(each.is_subscribed and each.is_target_up for each in gateway.report().routes))
        yield a, b, gateway


def test_a_batch_waits_for_its_delay_and_no_longer(virtual_clock: VirtualClock, tmp_path: Path) -> None:
    with running(virtual_clock, tmp_path, batch={"count": 10, "delay": "30 s"}) as (a, b, _):
        a.send("in/1", b"1", b"2")
        virtual_clock.advance(20.0)
        a.send("in/1", b"3")
        virtual_clock.advance(9.5)
        assert b.payloads == []
        virtual_clock.advance(1.0)
        assert b.payloads == [b"1\n2\n3\n"]
        virtual_clock.advance(300.0)
        assert len(b.payloads) == 1


def test_a_full_batch_does_not_wait(virtual_clock: VirtualClock, tmp_path: Path) -> None:
    with running(virtual_clock, tmp_path, batch={"count": 2, "delay": "1 h"}) as (a, b, _):
        a.send("in/1", b"1", b"2", b"3")
        virtual_clock.advance(1.0)
        assert b.payloads == [b"1\n2\n"]


def test_messages_are_published_at_the_rate_of_their_route(virtual_clock: VirtualClock, tmp_path: Path) -> None:
    with running(virtual_clock, tmp_path, rate={"messages": 2, "burst": 10}) as (a, b, _):
        virtual_clock.advance(3600.0)  # a rest saves no more than one burst
        a.send("in/1", *(b"%d" % number for number in range(60)))
        begun = clock.monotonic()
        virtual_clock.until(lambda: len(b.received) == 60, within=60.0)
        assert 24.0 <= clock.monotonic() - begun <= 26.0
    assert b.payloads == [b"%d" % number for number in range(60)]


@table("rate", [0.1, 2.0, 3.0, 70.0, 1e6])
def test_a_wait_for_a_token_is_long_enough_whatever_the_clock_shows(
    rate: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A wait that does not move the clock would be repeated for ever."""
    for uptime in (0.3, 12_780.123456, 16_383.7, 3e6 + 0.1):
        now = uptime
        monkeypatch.setattr(clock, "monotonic", lambda: now)  # noqa: B023  # called within this turn
        bucket = TokenBucket(rate, 1.0)
        for _ in range(1000):
            assert bucket.available() >= 1
            bucket.take(1)
            now += bucket.wait()
        assert now - uptime == pytest.approx(1000 / rate, rel=0.01)


def test_one_message_of_a_channel_passes_in_an_interval(virtual_clock: VirtualClock, tmp_path: Path) -> None:
    with running(virtual_clock, tmp_path, sample={"every": "60 s"}) as (a, b, _):
        for number in range(30):
            a.send("in/1", b"%d" % number)
            virtual_clock.advance(10.0)
        assert len(b.payloads) in (5, 6)


def test_a_clock_that_is_set_forward_drops_no_stored_message(virtual_clock: VirtualClock, tmp_path: Path) -> None:
    slow = {"messages": 1 / 10, "burst": 1}
    with running(virtual_clock, tmp_path, buffer={"max_age": "60 s"}, rate=slow) as (a, b, gateway):
        a.send("in/1", b"1", b"2", b"3")
        virtual_clock.until(lambda: gateway.route("r").report().buffer.depth == 2)
        virtual_clock.shift_wall(86_400.0)
        virtual_clock.advance(25.0)
        assert b.payloads == [b"1", b"2", b"3"]
        assert gateway.route("r").report().buffer.dropped == 0


def test_stored_messages_that_are_too_old_are_dropped_and_counted(virtual_clock: VirtualClock, tmp_path: Path) -> None:
    """The route publishes one message at once, and the next one in two hours."""
    slow = {"messages": 1 / 7200, "burst": 1}
    with running(virtual_clock, tmp_path, buffer={"max_age": "30 s"}, rate=slow) as (a, b, gateway):
        a.send("in/1", b"1", b"2", b"3")
        virtual_clock.advance(29.0)
        assert b.payloads == [b"1"]
        assert gateway.route("r").report().buffer.dropped == 0
        virtual_clock.advance(31.0)
        assert gateway.route("r").report().buffer.dropped == 2
