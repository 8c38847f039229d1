"""Databases and brokers for the tests of the outbox."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
import sqlalchemy
from sqlalchemy import Engine, text

import messaging
from messaging import Message, MessageContext, Messaging
from messaging.outbox.sql import DeadRow, OutboxStatus, OutboxTables, create_tables, dead_rows, enqueue, outbox_status
from messaging.outbox.sql.tables import DEFAULT_TABLES, prepare
from messaging.testing.brokers import Mosquitto
from messaging.testing.postgresql import PostgreSQL
from messaging.testing.proxy import Proxy
from messaging.testing.waiting import PATIENCE, Recorder


@pytest.fixture(autouse=True)
def _plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [*os.environ]:
        if name.startswith("MESSAGING_"):
            monkeypatch.delenv(name)


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """An empty database."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/outbox.db"
    server: PostgreSQL = request.getfixturevalue("postgresql")
    return server.create_database()


@pytest.fixture(scope="session")
def shared_database(postgresql: PostgreSQL) -> str:
    """A PostgreSQL database with the tables, which the tests of a run share one after the other."""
    url = postgresql.create_database()
    with prepared(url):
        return url


@pytest.fixture
def postgres(shared_database: str) -> Iterator[Engine]:
    """An engine of a PostgreSQL database with empty tables."""
    engine = sqlalchemy.create_engine(shared_database)
    with engine.begin() as connection:
        connection.execute(text("DROP TABLE IF EXISTS effects, orders"))
        connection.execute(
            text("TRUNCATE messaging_outbox, messaging_outbox_lease, messaging_outbox_schema, messaging_inbox")
        )
        prepare(connection, DEFAULT_TABLES)
    yield engine
    engine.dispose()


@pytest.fixture(params=["sqlite", "postgresql"])
def engine(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Engine]:
    """An engine of a database with empty tables."""
    if request.param == "postgresql":
        yield request.getfixturevalue("postgres")
        return
    with prepared(f"sqlite:///{tmp_path}/outbox.db") as engine:
        yield engine


@pytest.fixture
def own_postgres(postgresql: PostgreSQL) -> Iterator[Engine]:
    """An engine of a PostgreSQL database of the test alone, with the tables."""
    with prepared(postgresql.create_database()) as engine:
        yield engine


@contextlib.contextmanager
def prepared(url: str, tables: OutboxTables | None = None) -> Iterator[Engine]:
    engine = sqlalchemy.create_engine(url)
    try:
        with engine.begin() as connection:
            create_tables(connection, *([tables] if tables else []))
        yield engine
    finally:
        engine.dispose()


@pytest.fixture
def m() -> Iterator[Messaging]:
    """A broker in this process."""
    with messaging.connect(f"memory://{uuid4().hex}") as m:
        yield m


class Received(Recorder[Message]):
    """The messages of a subscription, in the order of their arrival."""

    def __init__(self, m: Messaging, channel: str = "#", **context: Any) -> None:
        super().__init__()
        m.on(channel, self, **context).ready.result(PATIENCE)

    @property
    def ids(self) -> list[str]:
        return [message.context.extensions["messageId"] for message in self]

    def wait(self, count: int) -> list[bytes]:
        """Wait for ``count`` messages; return all payloads."""
        self.wait_for(count)
        return self.payloads


@pytest.fixture
def received(m: Messaging) -> Received:
    return Received(m)


def message(payload: bytes | str | int, channel: str = "a/b", **extensions: Any) -> Message:
    data = payload if isinstance(payload, bytes) else str(payload).encode()
    return Message(data, MessageContext(channel, extensions=extensions))


def put(engine: Engine, *payloads: bytes | str | int, key: str | None = None, channel: str = "a/b") -> None:
    """Enqueue messages in one transaction."""
    with engine.begin() as connection:
        for each in payloads:
            enqueue(connection, message(each, channel), key=key)


def store(engine: Engine, content: Message, **options: Any) -> None:
    """Enqueue a message in a transaction of its own."""
    with engine.begin() as connection:
        enqueue(connection, content, **options)


def dead_of(engine: Engine) -> Sequence[DeadRow]:
    with engine.begin() as connection:
        return dead_rows(connection)


def status(engine: Engine) -> OutboxStatus:
    with engine.begin() as connection:
        return outbox_status(connection)


class Held:
    """Mosquitto behind a proxy that holds back what the broker sends, confirmations among it."""

    def __init__(self, broker: Mosquitto) -> None:
        self.direct_url = broker.url
        self._broker = broker
        self._watcher = messaging.connect(broker.url)
        self._received = Received(self._watcher, "held/#", qos="1")
        self.proxy = Proxy(broker.host, broker.port)

    @property
    def url(self) -> str:
        return f"mqtt://{self.proxy.host}:{self.proxy.port}"

    def until_published(self, count: int) -> None:
        """Wait until the broker has so many messages."""
        self._received.wait(count)

    def hold(self) -> None:
        self.proxy.down.hold()

    def release(self) -> None:
        self.proxy.down.release()

    def close(self) -> None:
        self._watcher.close()


@pytest.fixture
def held(mosquitto: Mosquitto) -> Iterator[Held]:
    found = Held(mosquitto)
    with found.proxy:
        yield found
        found.release()
    found.close()
