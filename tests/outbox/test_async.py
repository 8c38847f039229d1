"""asyncio: async connections, sessions and engines, and the relay in the running loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from sqlalchemy import Engine
from sqlalchemy.ext.asyncio import (
    AsyncEngine,
    AsyncSession,
    async_scoped_session,
    async_sessionmaker,
    create_async_engine,
)

import messaging
from messaging import Messaging
from messaging.errors import ArgumentError, ClosedError, ConfigurationError
from messaging.outbox.sql import (
    Inbox,
    Relay,
    create_tables,
    dead_rows,
    delete_sent,
    discard_dead,
    enqueue,
    outbox_status,
    process_once,
    retry_dead,
)
from messaging.testing.waiting import PATIENCE, eventually
from tests.outbox.conftest import Received, message, put, status


@asynccontextmanager
async def opened(url: str) -> AsyncIterator[AsyncEngine]:
    engine = create_async_engine(url.replace("sqlite://", "sqlite+aiosqlite://"))
    try:
        async with engine.begin() as connection:
            await create_tables(connection)
        yield engine
    finally:
        await engine.dispose()


def test_connections_and_sessions_take_part_in_their_transaction(url: str, m: Messaging, received: Received) -> None:
    async def main() -> None:
        async with opened(url) as engine:
            async with engine.begin() as connection:
                assert await enqueue(connection, message(1, messageId="m-1")) == "m-1"
            async with AsyncSession(engine) as session, session.begin():
                await enqueue(session, message(2))
            scoped = async_scoped_session(async_sessionmaker(engine), asyncio.current_task)
            await enqueue(scoped, message(3))
            await scoped.commit()
            await scoped.remove()
            async with engine.connect() as connection:
                await enqueue(connection, message("lost"))
                await connection.rollback()
            async with Relay(engine, m):
                await asyncio.to_thread(received.wait, 3)
            async with engine.begin() as connection:
                assert (await outbox_status(connection)).pending == 0

    asyncio.run(main())
    assert received.payloads == [b"1", b"2", b"3"]


def test_the_inbox_and_the_administration_are_awaitable(url: str, m: Messaging) -> None:
    async def main() -> None:
        async with opened(url) as engine:
            for expected in (True, False):
                async with engine.begin() as connection:
                    assert await process_once(connection, "m-1") is expected
                async with AsyncSession(engine) as session, session.begin():
                    assert await Inbox("other").process_once(session, "m-1") is expected
                    assert await Inbox("other").cleanup(session) == 0
            async with engine.begin() as connection:
                await enqueue(connection, message(1, mandatory=True))
                await enqueue(connection, message(2, mandatory=True))
            async with Relay(engine, m, max_attempts=1) as relay:
                await asyncio.to_thread(eventually, lambda: relay.counters.dead == 2)
            async with engine.begin() as connection:
                dead = await dead_rows(connection)
                assert await discard_dead(connection, [dead[0].id]) == 1
                assert await retry_dead(connection) == 1
                assert await delete_sent(connection) == 0
                assert (await outbox_status(connection)).pending == 1

    asyncio.run(main())


def test_the_relay_runs_in_the_loop_with_a_blocking_engine(engine: Engine, m: Messaging, received: Received) -> None:
    async def main() -> None:
        async with Relay(engine, m, poll_interval=0.05):
            await asyncio.to_thread(put, engine, 1)
            await asyncio.to_thread(received.wait, 1)

    asyncio.run(main())
    assert status(engine).pending == 0


def test_an_awaited_driver_listens(postgresql: object, postgres: Engine, m: Messaging, received: Received) -> None:
    url = postgres.url

    async def main() -> None:
        engine = create_async_engine(url)
        async with Relay(engine, m, poll_interval=PATIENCE * 2):
            for number in range(1, 3):
                async with engine.begin() as connection:
                    await enqueue(connection, message(number))
                await asyncio.to_thread(received.wait, number)
        await engine.dispose()

    asyncio.run(main())


def test_a_url_with_an_async_driver_runs_in_a_thread(engine: Engine, m: Messaging, received: Received) -> None:
    url = engine.url.render_as_string(hide_password=False).replace("sqlite://", "sqlite+aiosqlite://")
    put(engine, 1)
    with Relay(url, m, poll_interval=0.05):
        received.wait(1)
        put(engine, 2)
        received.wait(2)


def test_the_errors_of_the_start_are_raised_by_the_block(url: str, m: Messaging) -> None:
    async def main() -> None:
        with pytest.raises(ConfigurationError, match="no table"):
            async with Relay(url, m):
                pass

    asyncio.run(main())


def test_a_relay_that_ended_by_itself_raises_when_it_is_stopped(engine: Engine) -> None:
    async def main() -> None:
        async with messaging.connect("memory://ended") as m:
            relay = Relay(engine, m, poll_interval=0.05)
            await relay.astart()
            assert relay.is_running
            await m.aclose()
            await asyncio.to_thread(eventually, lambda: not relay.is_running)
            with pytest.raises(ClosedError, match="is closed"):
                await relay.astop()

    asyncio.run(main())


def test_a_block_that_is_cancelled_stops_the_relay(engine: Engine, m: Messaging, received: Received) -> None:
    entered = asyncio.Event()

    async def block() -> None:
        async with Relay(engine, m, poll_interval=0.05):
            entered.set()
            await asyncio.Event().wait()

    async def main() -> None:
        task = asyncio.create_task(block())
        await entered.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert len(asyncio.all_tasks()) == 1

    asyncio.run(main())
    put(engine, 1)
    assert status(engine).pending == 1


def test_an_async_engine_belongs_to_its_loop(url: str, m: Messaging) -> None:
    async def made() -> AsyncEngine:
        async with opened(url) as engine:
            return engine

    with pytest.raises(ArgumentError, match="async with"):
        Relay(asyncio.run(made()), m).start()
