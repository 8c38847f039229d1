"""Writers, relays that are killed at random, and a consumer behind an inbox: nothing lost, in order, no duplicates.

``python -m tests.outbox.kills [--minutes 10] [--seed 7] [--relays 2] [--protocol amqp]`` runs for as long as you
like; ``test_kills.py`` runs it for seconds. Relays are killed with SIGKILL; writers roll some transactions back.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import random
import signal
import sys
import threading
import time
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any, Final

import sqlalchemy
from sqlalchemy import Engine, text

import messaging
from messaging import Message, MessageContext
from messaging.outbox.sql import create_tables, enqueue, outbox_status, process_once
from messaging.testing import waiting
from messaging.testing.brokers import Broker, Mosquitto, RabbitMQ
from messaging.testing.postgresql import PostgreSQL
from tests.cli.program import Program

KEYS: Final = 6
WRITERS: Final = 3
LEASE: Final = 0.5
#: seconds without any arrival after which the rest is taken for lost
#: without progress, seconds
PATIENCE: Final = 3 * waiting.PATIENCE


@dataclass
class Result:
    """What was committed, what arrived, and what had an effect; keys name the payloads in order."""

    committed: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    rolled_back: set[str] = field(default_factory=set)
    arrived: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    effects: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    kills: int = 0
    pending: int = 0

    @property
    def total(self) -> int:
        return sum(map(len, self.committed.values()))

    @property
    def duplicates(self) -> int:
        """Messages that arrived more than once."""
        return sum(map(len, self.arrived.values())) - sum(len({*each}) for each in self.arrived.values())

    def check(self) -> None:
        assert self.pending == 0
        for key, committed in self.committed.items():
            assert {*committed} <= {*self.arrived[key]}, f"lost: { ({*committed} - {*self.arrived[key]}) }"
            assert list(dict.fromkeys(self.arrived[key])) == committed, f"arrived out of order: {key}"
            assert self.effects[key] == committed, f"effects differ from what was committed: {key}"
        assert not self.rolled_back & {each for arrived in self.arrived.values() for each in arrived}


class Writers:
    """Threads that commit messages, and know the order of their commits."""

    def __init__(self, engine: Engine, result: Result, seed: int) -> None:
        self._engine = engine
        self._result = result
        self._commits = threading.Lock()
        self._over = threading.Event()
        self._threads = [threading.Thread(target=self._write, args=(n, seed * 100 + n)) for n in range(WRITERS)]
        self.errors: list[BaseException] = []

    def __enter__(self) -> Writers:
        for each in self._threads:
            each.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for each in self._threads:
            each.join(PATIENCE)

    def _write(self, writer: int, seed: int) -> None:
        try:
            self._transactions(writer, random.Random(seed))
        except BaseException as error:  # noqa: BLE001  # the main thread looks at it
            self.errors.append(error)

    def _transactions(self, writer: int, choose: random.Random) -> None:
        number = 0
        with self._engine.connect() as connection:
            while not self._over.wait(choose.random() * 0.01):
                keys = choose.choices([f"key-{each}" for each in range(KEYS)], k=choose.randint(1, 4))
                rows = []
                for key in keys:
                    payload = f"{writer}.{number}"
                    number += 1
                    enqueue(connection, Message(payload.encode(), MessageContext(f"kills/{key}")), key=key)
                    rows.append((key, payload))
                if choose.random() < 0.1:
                    connection.rollback()
                    self._result.rolled_back |= {payload for _, payload in rows}
                    continue
                with self._commits:
                    connection.commit()
                    for key, payload in rows:
                        self._result.committed[key].append(payload)


def run(server: PostgreSQL, broker: Broker, seconds: float, seed: int, relays: int = 2) -> Result:
    """Write, relay, kill and consume for so many seconds; then wait until everything has arrived."""
    result = Result()
    choose = random.Random(seed)
    url = server.create_database()
    engine = sqlalchemy.create_engine(url)
    with contextlib.ExitStack() as stack:
        stack.callback(engine.dispose)
        with engine.begin() as connection:
            create_tables(connection)
            connection.execute(text("CREATE TABLE effects (id SERIAL PRIMARY KEY, key TEXT, payload TEXT)"))
        m = stack.enter_context(messaging.connect(broker.url))

        def handle(message: Message) -> None:
            key = str(message.context.channel).rpartition("/")[2]
            values = {"key": key, "payload": message.payload.decode()}
            result.arrived[key].append(values["payload"])
            with engine.begin() as connection:
                if process_once(connection, message):
                    connection.execute(text("INSERT INTO effects (key, payload) VALUES (:key, :payload)"), values)

        kept: dict[str, Any] = {"queue": "kills"} if isinstance(broker, RabbitMQ) else {"qos": "1"}
        m.on("kills/#", handle, **kept)

        def relay() -> Program:
            return stack.enter_context(
                Program(
                    *("outbox", "relay", broker.url, "--lease", str(LEASE), "--poll-interval", "0.1", "--batch", "20"),
                    variables={"MESSAGING_DATABASE": url},
                )
            )

        running = [relay() for _ in range(relays)]
        with Writers(engine, result, seed) as writers:
            end = time.monotonic() + seconds
            while time.monotonic() < end:
                time.sleep(choose.uniform(0.05, 0.8))  # sleeps: kills at random times
                victim = choose.randrange(relays)
                running[victim].process.send_signal(signal.SIGKILL)
                running[victim].process.wait(PATIENCE)
                running[victim] = relay()
                result.kills += 1
        assert writers.errors == []
        deadline, before = time.monotonic() + PATIENCE, -1
        while time.monotonic() < deadline:
            with engine.begin() as connection:
                result.pending = outbox_status(connection).pending
                found = connection.execute(text("SELECT count(*) FROM effects")).scalar_one()
            if result.pending == 0 and found >= result.total:
                break
            if found > before:  # a slow machine is no loss
                deadline, before = time.monotonic() + PATIENCE, found
            time.sleep(0.05)  # sleeps: as long as anything arrives
        for each in running:
            each.signal(signal.SIGTERM)
            assert each.ended() == 130, each.err.rest()
        with engine.begin() as connection:
            for key, payload in connection.execute(text("SELECT key, payload FROM effects ORDER BY id")):
                result.effects[key].append(payload)
    return result


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=int.from_bytes(os.urandom(3), "big"))
    parser.add_argument("--relays", type=int, default=2)
    parser.add_argument("--protocol", choices=("mqtt", "amqp"), default="mqtt")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    sys.stdout.write(f"seed {arguments.seed}\n")
    sys.stdout.flush()
    with PostgreSQL() as server, Mosquitto() if arguments.protocol == "mqtt" else RabbitMQ() as broker:
        result = run(server, broker, arguments.minutes * 60, arguments.seed, arguments.relays)
    sys.stdout.write(
        f"{result.kills} kills; {result.total} committed, {len(result.rolled_back)} rolled back, "
        f"{result.duplicates} duplicates on arrival\n"
    )
    result.check()
    sys.stdout.write("nothing lost, in order, every effect once\n")


if __name__ == "__main__":
    main()
