"""Reading waits: for more to come, or for consumers to catch up. Nothing may get stuck or lost over it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

import pytest

from adapters.mqtt.pacing import ReadPacer
from messaging.model import Incoming
from tests.mqtt.harness import Core, In, run
from tests.mqtt.peer import Connection, Peer

Test = Callable[[Core, Connection, In], Awaitable[None]]


class Always:
    """A pacer that never has enough."""

    pause = 0.001

    def pause_after(self, count: int, now: float) -> float:
        return self.pause


def with_stream(test: Test, sink: In | None = None) -> None:
    async def main() -> None:
        async with Peer() as peer:
            core = Core(peer.url)
            opening = asyncio.create_task(core.open())
            connection, _ = await peer.accept()
            connection.connack()
            await opening
            subscribing = asyncio.create_task(core.subscribe("#", sink))
            await connection.suback()
            found, _ = await subscribing
            await test(core, connection, found)
            await core.adapter.close()

    run(main())


@pytest.fixture
def paced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("adapters.mqtt.reading.ReadPacer", Always)


@pytest.mark.usefixtures("paced")
def test_what_arrives_while_reading_waits_arrives() -> None:
    async def test(_: Core, connection: Connection, sink: In) -> None:
        for number in range(500):
            connection.deliver("t", b"%d" % number)
            if not number % 10:
                await sink.wait(number // 2)
        assert [int(payload) for payload in (await sink.wait(500), sink.payloads)[1]] == list(range(500))

    with_stream(test)


@pytest.mark.usefixtures("paced")
def test_a_loss_while_reading_waits_is_noticed() -> None:
    async def test(core: Core, connection: Connection, sink: In) -> None:
        connection.deliver("t", b"last")
        await sink.wait(1)
        connection.abort()
        await core.lost()

    with_stream(test)


def test_closing_does_not_wait_for_reading_to_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    class Forever(Always):
        pause = 1000.0

    async def test(core: Core, connection: Connection, sink: In) -> None:
        connection.deliver("t", b"1")
        await sink.wait(1)
        closing = asyncio.create_task(core.adapter.close())
        await connection.expect(0xE0)
        connection.close()
        async with asyncio.timeout(0.9):  # not the time that a broker is given
            await closing

    # from now on: what came before was not to be waited for
    def pacer() -> ReadPacer:
        return ReadPacer()

    monkeypatch.setattr("adapters.mqtt.reading.ReadPacer", pacer)

    async def with_pause(core: Core, connection: Connection, sink: In) -> None:
        core.adapter.link._reader._pacer = Forever()  # type: ignore[assignment, union-attr]
        await test(core, connection, sink)

    with_stream(with_pause)


class Suspending(In):
    """A sink whose consumer is behind as soon as it got anything."""

    core: Core

    def deliver(self, batch: Sequence[Incoming]) -> None:
        super().deliver(batch)
        self.core.adapter.suspend_reading()


@pytest.mark.parametrize("paced", [True, False])
def test_packets_read_already_wait_as_well_and_go_on_where_they_were(
    paced: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if paced:
        monkeypatch.setattr("adapters.mqtt.reading.ReadPacer", Always)
    sink = Suspending()

    async def test(core: Core, connection: Connection, _: In) -> None:
        sink.core = core
        for number in range(2000):
            connection.deliver("t", b"%d" % number)
        handed: list[int] = []
        while len(sink.messages) < 2000:
            before = len(sink.messages)
            core.adapter.resume_reading()
            await sink.wait(before + 1)
            handed.append(len(sink.messages) - before)
        assert max(handed) <= 512  # a handful, and what was left of the read before
        assert [int(payload) for payload in sink.payloads] == list(range(2000))

    with_stream(test, sink)


def test_a_loss_while_packets_wait_is_noticed_and_closing_goes_on_with_them() -> None:
    sink = Suspending()

    async def test(core: Core, connection: Connection, _: In) -> None:
        sink.core = core
        for number in range(1000):
            connection.deliver("t", b"%d" % number)
        await sink.wait(1)
        connection.abort()
        core.adapter.resume_reading()
        while not core.losses:
            await asyncio.sleep(0)
            core.adapter.resume_reading()
        assert [int(payload) for payload in sink.payloads] == list(range(len(sink.payloads)))

    with_stream(test, sink)
