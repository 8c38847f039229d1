"""Reading is paced while more is about to arrive, and suspended while consumers are behind, without any loss."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from messaging.model import Incoming
from messaging.testing.tables import table
from messaging.testing.waiting import PATIENCE, within
from tests.mqtt.harness import Core, Sink
from tests.mqtt.peer import farewell, session, subscribed


class Always:
    """A pacer that waits after each read."""

    pause = 0.001

    def pause_after(self, count: int, now: float) -> float:
        return self.pause


@pytest.fixture(autouse=True)
def _close_has_no_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Closing ends in time because nothing holds it up."""
    monkeypatch.setattr("messaging_adapters.mqtt.connection._CLOSE_TIMEOUT", 3 * PATIENCE)


@pytest.fixture
def paced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("messaging_adapters.mqtt.connection.ReadPacer", Always)


@pytest.mark.usefixtures("paced")
async def test_a_loss_while_reading_waits_is_noticed() -> None:
    async with session() as (core, _, connection):
        sink, _ = await subscribed(core, connection)
        connection.deliver("t", b"last")
        await sink.count(1)
        connection.abort()
        await core.lost()


@pytest.mark.usefixtures("paced")
async def test_closing_does_not_wait_for_a_paced_read(monkeypatch: pytest.MonkeyPatch) -> None:
    async with session() as (core, _, connection):
        sink, _ = await subscribed(core, connection)
        monkeypatch.setattr(Always, "pause", 1000.0)
        connection.deliver("t", b"1")
        await sink.count(1)
        await within(farewell(core, connection))


class Suspending(Sink):
    """A sink whose consumer is behind as soon as it received a message."""

    def __init__(self, core: Core) -> None:
        super().__init__()
        self._core = core

    def deliver(self, batch: Sequence[Incoming]) -> None:
        super().deliver(batch)
        self._core.adapter.pause(None)


@table("is_paced", [True, False])
async def test_packets_that_were_read_wait_while_reading_is_suspended(
    is_paced: bool, request: pytest.FixtureRequest
) -> None:
    if is_paced:
        request.getfixturevalue("paced")
    async with session() as (core, _, connection):
        sink, _ = await subscribed(core, connection, "t", Suspending(core))
        for number in range(2000):
            connection.deliver("t", b"%d" % number)
        handed: list[int] = []
        while len(sink.arrived) < 2000:
            before = len(sink.arrived)
            core.adapter.resume(None)
            await sink.count(before + 1)
            handed.append(len(sink.arrived) - before)
        assert max(handed) <= 512  # a batch, and the rest of the read before
        assert [int(payload) for payload in sink.payloads] == list(range(2000))


async def test_a_loss_while_reading_is_suspended_is_noticed() -> None:
    async with session() as (core, _, connection):
        sink, _ = await subscribed(core, connection, "t", Suspending(core))
        for number in range(1000):
            connection.deliver("t", b"%d" % number)
        await sink.count(1)
        connection.abort()
        core.adapter.resume(None)
        while not core.losses:
            await asyncio.sleep(0)
            core.adapter.resume(None)
        assert [int(payload) for payload in sink.payloads] == list(range(len(sink.payloads)))


async def test_closing_processes_packets_that_were_read() -> None:
    """Also where their sink suspends reading again: their answers are part of closing in good order."""
    async with session() as (core, _, connection):
        sink, _ = await subscribed(core, connection, "t", Suspending(core))
        for number in range(1000):
            connection.deliver("t", b"%d" % number)
        await sink.count(1)
        await within(farewell(core, connection))
