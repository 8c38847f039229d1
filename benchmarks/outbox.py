"""Rows a second that a relay takes from PostgreSQL to a broker, beside a loop by hand that keeps no order.

PostgreSQL is private and durable: it syncs every commit, as in production. All rows are there before the relay starts.
A run ends when the outbox is empty and every message is confirmed. 100-byte payloads. ``enqueue`` is measured, too:
rows that one connection writes, each in a transaction of its own, or a hundred in one, and next to them plain inserts
into a table without trigger and index.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import time
from collections.abc import Callable
from typing import Final

import sqlalchemy
from sqlalchemy import Engine, delete, insert, select, text

import messaging
from benchmarks import report
from messaging import Message, MessageContext
from messaging.model import restored_context
from messaging.outbox.sql import OutboxTables, Relay, create_tables, enqueue
from messaging.testing.brokers import Mosquitto, RabbitMQ
from messaging.testing.postgresql import PostgreSQL

PAYLOAD: Final = b"x" * 100
TABLES: Final = OutboxTables()
#: rows of a transaction when the outbox is filled
_BULK: Final = 100


def fill(engine: Engine, count: int, keys: int) -> None:
    """Write ``count`` rows, spread evenly over the keys."""
    for first in range(0, count, _BULK):
        with engine.begin() as connection:
            for number in range(first, min(first + _BULK, count)):
                message = Message(PAYLOAD, MessageContext("bench/outbox"))
                enqueue(connection, message, key=f"key {number % keys}", tables=TABLES)


def relayed(engine: Engine, m: messaging.Messaging, count: int, in_flight_per_key: int) -> float:
    """Rows a second of a relay."""
    relay = Relay(engine, m, tables=TABLES, in_flight_per_key=in_flight_per_key)
    start = time.perf_counter()
    counters = relay.drain()
    seconds = time.perf_counter() - start
    if counters.published != count:
        raise SystemExit(f"{counters.published} of {count} rows were published")
    return count / seconds


def by_hand(engine: Engine, m: messaging.Messaging, count: int) -> float:
    """Rows a second of ``FOR UPDATE SKIP LOCKED``, publish, wait for all, delete: no order, no retries."""
    outbox = TABLES.outbox
    wanted = (
        select(outbox.c.id, outbox.c.channel, outbox.c.properties, outbox.c.payload, outbox.c.message_id)
        .order_by(outbox.c.id).limit(500).with_for_update(skip_locked=True)
    )  # fmt: skip
    start = time.perf_counter()
    found = 0
    while True:
        with engine.begin() as connection:
            rows = connection.execute(wanted).all()
            if not rows:
                break
            promises = []
            for row in rows:
                extensions = {"guaranteedDelivery": True, "messageId": row.message_id}
                context = restored_context(row.channel, row.properties).replace(extensions=extensions)
                promises.append(m.publisher.publish(Message(row.payload, context)))
            for promise in promises:
                promise.result(30)
            connection.execute(delete(outbox).where(outbox.c.id.in_([row.id for row in rows])))
            found += len(rows)
    if found != count:
        raise SystemExit(f"{found} of {count} rows were published")
    return count / (time.perf_counter() - start)


def enqueued(engine: Engine, count: int, bulk: int) -> float:
    """Rows a second of ``enqueue``, so many in a transaction."""
    message = Message(PAYLOAD, MessageContext("bench/outbox"))
    start = time.perf_counter()
    for first in range(0, count, bulk):
        with engine.begin() as connection:
            for number in range(first, first + bulk):
                enqueue(connection, message, key=f"key {number % 100}", tables=TABLES)
    return count / (time.perf_counter() - start)


def inserted(engine: Engine, count: int, bulk: int) -> float:
    """Rows a second of plain inserts of a payload, so many in a transaction."""
    plain = sqlalchemy.table("plain", sqlalchemy.column("payload", sqlalchemy.LargeBinary))
    with engine.begin() as connection:
        connection.execute(text("CREATE TABLE IF NOT EXISTS plain (id BIGSERIAL PRIMARY KEY, payload BYTEA)"))
    start = time.perf_counter()
    for _ in range(0, count, bulk):
        with engine.begin() as connection:
            for _ in range(bulk):
                connection.execute(insert(plain), {"payload": PAYLOAD})
    return count / (time.perf_counter() - start)


def run(arguments: argparse.Namespace) -> None:
    """Run and print."""
    count = arguments.messages or (1_000 if arguments.quick else 20_000)
    runs = 1 if arguments.quick else arguments.runs
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(PostgreSQL(durable=True))
        engine = sqlalchemy.create_engine(server.create_database(), pool_size=4)
        stack.callback(engine.dispose)
        with engine.begin() as connection:
            create_tables(connection, TABLES)
        _measure_writers(engine, count // 10, runs)
        brokers: dict[str, Callable[[], str]] = {
            "memory": lambda: "memory://outbox",
            "mqtt": lambda: f"{stack.enter_context(Mosquitto(['max_inflight_messages 0'])).url}?version=5",
            "amqp": lambda: stack.enter_context(RabbitMQ()).url,
        }
        print(f"\nrows/s, {count} rows, 100 bytes, median of {runs}; {report.machine()}")
        for broker in arguments.backends.split(","):
            m = stack.enter_context(messaging.connect(brokers[broker]()))
            stack.enter_context(m.subscribe("bench/outbox", queue="bench", auto_acknowledge=True)).subscribe(
                lambda _: None
            )
            _measure_relays(broker, engine, m, count, runs)


def _measure_writers(engine: Engine, count: int, runs: int) -> None:
    writers: dict[str, Callable[[], float]] = {
        "enqueue, 1 in a transaction": lambda: enqueued(engine, count, 1),
        "insert, 1 in a transaction": lambda: inserted(engine, count, 1),
        "enqueue, 100 in a transaction": lambda: enqueued(engine, count, _BULK),
        "insert, 100 in a transaction": lambda: inserted(engine, count, _BULK),
    }
    print(f"{'rows/s written by one connection':44} {'median':>10} {'min':>10} {'max':>10}")
    for name, writer in writers.items():
        rates = [writer() for _ in range(runs)]
        print(f"{name:44} {statistics.median(rates):10,.0f} {min(rates):10,.0f} {max(rates):10,.0f}")
    with engine.begin() as connection:
        connection.execute(delete(TABLES.outbox))


def _measure_relays(broker: str, engine: Engine, m: messaging.Messaging, count: int, runs: int) -> None:
    cases: list[tuple[str, int, int, Callable[[int], float]]] = [
        ("relay, 1000 keys", 1000, count, lambda rows: relayed(engine, m, rows, 1)),
        ("relay, 100 keys", 100, count, lambda rows: relayed(engine, m, rows, 1)),
        ("relay, 1 key", 1, count // 10, lambda rows: relayed(engine, m, rows, 1)),
        ("relay, 1 key, 100 in flight", 1, count, lambda rows: relayed(engine, m, rows, 100)),
        ("by hand, no order", 1000, count, lambda rows: by_hand(engine, m, rows)),
    ]
    print(f"{broker:44} {'median':>10} {'min':>10} {'max':>10}")
    for name, keys, rows, measured in cases:
        rates = []
        for _ in range(runs):
            fill(engine, rows, keys)
            with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
                connection.execute(text("VACUUM ANALYZE messaging_outbox"))
            rates.append(measured(rows))
        print(f"  {name:42} {statistics.median(rates):10,.0f} {min(rates):10,.0f} {max(rates):10,.0f}")
