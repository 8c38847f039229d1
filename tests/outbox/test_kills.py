"""SIGKILL of relays and of consumers."""

from __future__ import annotations

from uuid import uuid4

import pytest
from sqlalchemy import Engine, text

from messaging.outbox.sql import Relay
from messaging.testing.brokers import Mosquitto, RabbitMQ
from messaging.testing.postgresql import PostgreSQL
from messaging.testing.waiting import PATIENCE, eventually
from tests.cli.program import environment
from tests.forking import ForkedProcess
from tests.outbox import kills
from tests.outbox.conftest import put


def test_relays_that_are_killed_lose_nothing_and_keep_the_order(postgresql: PostgreSQL, mosquitto: Mosquitto) -> None:
    result = kills.run(postgresql, mosquitto, seconds=3.0, seed=5)
    result.check()
    assert result.kills >= 3
    assert result.total > 100


#: handles the messages of a queue; says "reached", and waits for its end, at the point that is named
CONSUMER = """
import sys, threading
import messaging, sqlalchemy
from messaging.outbox.sql import process_once

url, database, queue, point = sys.argv[1:]
engine = sqlalchemy.create_engine(database)

def reach(name):
    if name == point:
        sys.stdout.write("reached\\n")
        sys.stdout.flush()
        threading.Event().wait()

def handle(message):
    with engine.begin() as connection:
        is_new = process_once(connection, message)
        if is_new:
            connection.execute(sqlalchemy.text("INSERT INTO effects VALUES (:it)"), {"it": message.payload.decode()})
        reach("before the commit")
    reach("before the acknowledgement")
    sys.stdout.write(f"handled {is_new}\\n")
    sys.stdout.flush()

m = messaging.connect(url)
m.on(queue, handle, queue=queue)
sys.stdout.write("subscribed\\n")
sys.stdout.flush()
sys.stdin.read()
"""


@pytest.mark.parametrize("point", ["before the commit", "before the acknowledgement"])
def test_a_consumer_that_is_killed_has_the_effect_once(postgres: Engine, rabbitmq: RabbitMQ, point: str) -> None:
    """The broker delivers the message again; after the commit the inbox knows it."""
    queue = f"consumer-{uuid4().hex}"
    with postgres.begin() as connection:
        connection.execute(text("CREATE TABLE effects (payload TEXT)"))

    def start(stop_at: str) -> ForkedProcess:
        database = postgres.url.render_as_string(hide_password=False)
        return ForkedProcess(CONSUMER, (rabbitmq.url, database, queue, stop_at), environment())

    def says(process: ForkedProcess) -> str:
        assert process.stdout is not None
        return process.stdout.readline().decode().strip()

    def effects() -> list[str]:
        with postgres.begin() as connection:
            return list(connection.execute(text("SELECT payload FROM effects")).scalars())

    first = start(point)
    assert says(first) == "subscribed"
    put(postgres, 7, channel=queue)
    Relay(postgres, rabbitmq.url).drain()
    assert says(first) == "reached"
    first.kill()
    first.wait(PATIENCE)
    is_committed = point == "before the acknowledgement"
    eventually(lambda: effects() == (["7"] if is_committed else []))
    second = start("none")
    assert says(second) == "subscribed"
    assert says(second) == f"handled {not is_committed}"
    assert effects() == ["7"]
    second.kill()
    second.wait(PATIENCE)
    for each in (first, second):
        each.close()
