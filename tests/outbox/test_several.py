"""Several relays on one outbox: no key is with two of them, and the rows of one that died are taken over."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import defaultdict
from datetime import UTC, datetime, timedelta

import pytest
from sqlalchemy import Engine, select, update

import messaging
from messaging import MessageContext, Messaging
from messaging.outbox.sql import Relay, enqueue
from messaging.outbox.sql.tables import BUCKETS, DEFAULT_TABLES, bucket_of
from messaging.testing.brokers import RabbitMQ
from messaging.testing.waiting import PATIENCE, eventually
from tests.outbox.conftest import Held, Received, message, put, status


def by_key(received: Received) -> dict[str, list[int]]:
    found: dict[str, list[int]] = defaultdict(list)
    for each in received:
        found[str(each.context.channel)].append(int(each.payload))
    return found


def test_relays_side_by_side_make_no_duplicates_and_keep_the_order(engine: Engine, m: Messaging) -> None:
    received = Received(m, "keys/#")
    keys, rows = 40, 15

    def write(first: int) -> None:
        for number in range(rows):
            with engine.begin() as connection:
                for key in range(first, first + keys // 2):
                    enqueue(connection, message(number, f"keys/{key}"))

    relays = [Relay(engine, m, batch=20, poll_interval=0.02) for _ in range(3)]
    with contextlib.ExitStack() as stack:
        for relay in relays:
            stack.enter_context(relay)
        writers = [threading.Thread(target=write, args=(first,)) for first in (0, keys // 2)]
        for each in writers:
            each.start()
        for each in writers:
            each.join(PATIENCE)
        received.wait(keys * rows)
        eventually(lambda: status(engine).pending == 0)
    assert by_key(received) == {f"keys/{key}": [*range(rows)] for key in range(keys)}
    assert sum(relay.counters.published for relay in relays) == keys * rows


def test_a_key_in_flight_is_no_other_relays(engine: Engine, held: Held, m: Messaging) -> None:
    put(engine, 1, channel="held/1")
    with messaging.connect(held.url) as slow:
        held.hold()
        with Relay(engine, slow, name="slow", lease=PATIENCE * 2, poll_interval=0.05) as relay:
            held.until_published(1)
            put(engine, 2, channel="held/1")
            put(engine, 3, channel="other")
            assert [each.partition("/")[0] for each in status(engine).relays] == ["slow"]
            received = Received(m)
            assert bucket_of("other") != bucket_of("held/1")
            Relay(engine, m).drain()
            assert received.wait(1) == [b"3"]
            held.release()
            held.until_published(2)
            eventually(lambda: relay.counters.published == 2)
    assert status(engine).pending == 0


def test_a_relay_renews_its_lease(engine: Engine, held: Held, m: Messaging) -> None:
    """The confirmation takes longer than the lease; another relay looks for rows all the while."""
    put(engine, 1, channel="held/1")
    other = Received(m)
    with messaging.connect(held.url) as slow:
        held.hold()
        with Relay(engine, slow, name="slow", lease=0.9) as relay:
            held.until_published(1)
            first = lease_end(engine)
            with Relay(engine, m, poll_interval=0.02):
                eventually(lambda: lease_end(engine) > first + timedelta(seconds=0.9), "the lease is renewed")
                assert [each.partition("/")[0] for each in status(engine).relays] == ["slow"]
                held.release()
                eventually(lambda: relay.counters.published == 1)
    assert other == []


def lease_end(engine: Engine) -> datetime:
    with engine.begin() as connection:
        return max(connection.execute(select(DEFAULT_TABLES.lease.c.until)).scalars())


def lease_to_the_dead(engine: Engine, until_: datetime) -> None:
    with engine.begin() as connection:
        connection.execute(update(DEFAULT_TABLES.lease).values(owner="dead", until=until_))


def test_the_rows_of_a_dead_relay_are_taken_over_after_its_lease(
    engine: Engine, m: Messaging, received: Received
) -> None:
    put(engine, 1)
    Relay(engine, m).drain()
    received.wait(1)
    lease_to_the_dead(engine, datetime(2999, 1, 1, tzinfo=UTC))
    put(engine, 2)
    Relay(engine, m).drain()
    assert status(engine).pending == 1
    assert status(engine).relays == ("dead",)
    lease_to_the_dead(engine, datetime.now(UTC))
    Relay(engine, m).drain()
    assert received.wait(2) == [b"1", b"2"]


def test_a_relay_that_lost_its_lease_stops_publishing(
    engine: Engine, held: Held, caplog: pytest.LogCaptureFixture
) -> None:
    put(engine, 1, 2, channel="held/1")
    with messaging.connect(held.url) as slow:
        held.hold()
        with Relay(engine, slow, lease=0.3, poll_interval=0.05):
            held.until_published(1)
            lease_to_the_dead(engine, datetime(2999, 1, 1, tzinfo=UTC))
            eventually(lambda: any("lost its lease" in each.getMessage() for each in caplog.records))
            held.release()
            eventually(lambda: status(engine).pending == 1)  # the first one was confirmed, and is removed
    with engine.begin() as connection:
        owners = connection.execute(select(DEFAULT_TABLES.lease.c.owner)).scalars().all()
    assert owners == ["dead"] * BUCKETS  # what is another's is not given back


def test_an_unconfirmed_key_holds_back_no_other(
    engine: Engine, rabbitmq: RabbitMQ, caplog: pytest.LogCaptureFixture
) -> None:
    """A queue is full and refuses: the adapter sends the message again until it is accepted."""
    full, other = f"full-{time.time_ns()}", f"other-{time.time_ns()}"
    extensions = {"queue": full, "maxLength": 1, "queueOverflow": "reject-publish", "prefetch": 1}
    with messaging.connect(rabbitmq.url) as m:
        received = Received(m, other, queue=other)
        with m.subscription.subscribe(MessageContext(full, extensions=extensions)) as stream:
            put(engine, *range(4), channel=full)
            with Relay(engine, rabbitmq.url, in_flight_per_key=10, poll_interval=0.02) as relay:
                eventually(lambda: relay.counters.claims)
                numbers = [each for each in range(120) if bucket_of(f"key {each}") != bucket_of(full)][:100]
                for number in numbers:
                    put(engine, number, channel=other, key=f"key {number}")
                assert sorted(map(int, received.wait(100))) == numbers
                assert status(engine).pending >= 1  # the full queue's
                found = [stream.receive(timeout=PATIENCE).payload for _ in range(4)]
                eventually(lambda: status(engine).pending == 0)
    assert sorted(found) == [b"0", b"1", b"2", b"3"]
    assert "lost its lease" not in caplog.text


def test_more_rows_than_the_instance_takes_are_no_failure(engine: Engine, caplog: pytest.LogCaptureFixture) -> None:
    with messaging.connect("memory://narrow?outbox_size=3") as m:
        received = Received(m)
        with engine.begin() as connection:
            for number in range(200):
                enqueue(connection, message(number), key=f"key {number}")
        Relay(engine, m).drain()
        assert len({*received.wait(200)}) == 200
    assert "outbox relay" not in caplog.text
