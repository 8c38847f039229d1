"""Credentials that expire every few seconds, for as long as one likes, under traffic whose ledger must come out right.

``python -m tests.faults.tokens --minutes 10 --lifetime 10`` (or ``make soak-tokens``). For each protocol there is a
broker that refuses expired credentials, an instance that publishes, and one that receives; every credential is used by
one of them only.

============  ========================================================================================================
``amqp``      RabbitMQ with JSON Web Tokens. Expected: no lost message, and no reconnect.
``mqtt``      Mosquitto, MQTT 5, clients without a session of their own. Every token is a user with a password; the
              broker disconnects the clients of a user that it has forgotten. Expected: no lost message, and no
              reconnect but planned ones.
``mqtt311``   The same with MQTT 3.1.1; the receiver has a session (``clean_start=false``).
============  ========================================================================================================

Ends with status 1, and says why, if anything was lost, came unexpected, failed or was not planned.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import dataclasses
import hashlib
import json
import logging
import secrets
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final, Protocol

import messaging
from messaging import Credentials, Message, Promise
from messaging.connection import ConnectionState
from messaging.services import ServiceRegistry
from messaging.testing.brokers import Mosquitto
from messaging.testing.waiting import PATIENCE, eventually
from tests.faults.ledger import Arrivals, PublisherLog, Stamp, Verdict, compare, encode, read_log
from tests.faults.scenario import WINDOW
from tests.oauth import TokenRabbitMQ, token

PROTOCOLS: Final = ("amqp", "mqtt", "mqtt311")
#: pause between two messages, seconds
PACE: Final = 0.005
#: what is published with, and subscribed with
_GUARANTEED: Final[Mapping[str, Any]] = {"guaranteed_delivery": True}


class TokenMosquitto(Mosquitto):
    """Asks for a password. Users come, and go when their time is over. Thread safe, but for start and end."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards _users and the file
        #: user name -> line of the password file, and when it is removed, monotonic seconds
        self._users: dict[str, tuple[str, float]] = {}
        self._ended = threading.Event()
        self._remover = threading.Thread(target=self._remove, name="expiry", daemon=True)
        super().__init__(["allow_anonymous false"])
        self._lines.append(f"password_file {self.directory}/users")
        self._write()

    def start(self) -> None:
        """See ``Broker.start``."""
        super().start()
        if not self._remover.is_alive():
            self._remover.start()

    def close(self) -> None:
        """See ``Broker.close``."""
        self._ended.set()
        super().close()

    def issue(self, valid_for: float) -> Credentials:
        """Return the credentials of a new user; the broker knows it when this returns."""
        name, password, salt = f"token-{secrets.token_hex(4)}", secrets.token_hex(16), secrets.token_bytes(12)
        digest = hashlib.pbkdf2_hmac("sha512", password.encode(), salt, 101)
        line = f"{name}:$7$101${base64.b64encode(salt).decode()}${base64.b64encode(digest).decode()}"
        with self._lock:
            self._users[name] = line, time.monotonic() + valid_for
            self._write()
            self.reload()
        return Credentials(name, password, valid_for=valid_for)

    def _remove(self) -> None:
        while not self._ended.wait(0.1):
            now = time.monotonic()
            with self._lock:
                expired = [name for name, (_, end) in self._users.items() if end <= now]
                for name in expired:
                    del self._users[name]
                if expired and self.running:
                    self._write()
                    self.reload()

    def _write(self) -> None:
        new = self.directory / "users.new"
        new.write_text("".join(f"{line}\n" for line, _ in self._users.values()))
        new.rename(self.directory / "users")


class Issuer(Protocol):
    """Issues credentials."""

    def __call__(self, valid_for: float) -> Any:
        """Return what a provider returns, valid for so many seconds."""


@contextlib.contextmanager
def broker_of(protocol: str) -> Iterator[tuple[str, Issuer, Callable[[], object]]]:
    """A broker: its URL, what issues tokens, and a function whose result stays the same while connections do."""
    if protocol == "amqp":
        with TokenRabbitMQ() as rabbitmq:
            yield rabbitmq.bare_url, token, rabbitmq.connections
    else:
        with TokenMosquitto() as mosquitto:
            yield mosquitto.url, mosquitto.issue, lambda: None


class Watched:
    """An instance whose connections are counted.

    Attributes:
        asked: how often its provider was.
        reconnects: how often it connected again.
        causes: why connections were lost that were not ended as planned.
    """

    def __init__(self, url: str, issue: Issuer, lifetime: float, **settings: Any) -> None:
        self.asked = self.reconnects = 0
        self.causes: list[str] = []
        self._issue, self._lifetime = issue, lifetime
        self.instance = messaging.connect(url, services=ServiceRegistry(), credentials=self._ask, **settings)
        self._was_down = False
        self.instance.connection_state.subscribe(self._changed)

    def _ask(self) -> Any:
        self.asked += 1
        return self._issue(self._lifetime)

    def _changed(self, state: ConnectionState) -> None:
        if state.cause is not None:
            self.causes.append(str(state))
        if state.name == "reconnecting":
            self._was_down = True
        elif state.name == "connected" and self._was_down:
            self._was_down = False
            self.reconnects += 1


@dataclasses.dataclass
class Figures:
    """What came of one protocol."""

    protocol: str
    seconds: float = 0.0
    published: int = 0
    confirmed: int = 0
    received: int = 0
    lost: int = 0
    duplicates: int = 0
    failed: int = 0
    reconnects: int = 0
    tokens: int = 0
    #: whether the broker has the connections that it had at the beginning; ``None`` if that cannot be told
    same_connections: bool | None = None
    problems: list[str] = dataclasses.field(default_factory=list)

    def __str__(self) -> str:
        values = {name: value for name, value in vars(self).items() if name not in ("protocol", "problems")}
        shown = ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in values.items())
        return "\n".join([f"{self.protocol}: {shown}", *(f"FAILED: {problem}" for problem in self.problems)])


class _Traffic:
    """Publishes until it is told to stop, and keeps the log of it."""

    def __init__(self, instance: messaging.Messaging, run: str, log: PublisherLog) -> None:
        self._instance, self._run, self._log = instance, run, log
        self._room = threading.Semaphore(WINDOW)
        self.count = 0

    def publish(self, seconds: float) -> None:
        """Publish for so many seconds, then wait for the outcomes."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            self._publish_one()
            time.sleep(PACE)  # sleeps: the pace of the publisher
        for _ in range(WINDOW):
            assert self._room.acquire(timeout=PATIENCE), "messages have no outcome"

    def _publish_one(self) -> None:
        assert self._room.acquire(timeout=PATIENCE), "messages have no outcome"
        number, self.count = self.count, self.count + 1
        if number % 100 == 0:
            self._log.attempt(range(number, number + 100))

        def settled(promise: Promise[None]) -> None:
            error = promise.exception(0)
            if error is None:
                self._log.confirm(number)
            else:
                self._log.fail(number, error)
            self._room.release()

        body = encode(Stamp(self._run, "p", number), b"x" * 100)
        self._instance.publish("tokens/t", body, **_GUARANTEED).add_done_callback(settled)


def run(protocol: str, minutes: float, lifetime: float) -> Figures:
    """Run one protocol; what went wrong is in ``problems`` of the figures."""
    figures = Figures(protocol)
    sending: dict[str, Any] = {"version": "3.1.1"} if protocol == "mqtt311" else {}
    receiving = {**sending, "clean_start": False, "client_id": "receiver"} if protocol == "mqtt311" else sending
    name = secrets.token_hex(4)
    arrivals = Arrivals(name)
    with tempfile.TemporaryDirectory() as folder, broker_of(protocol) as (url, issue, connections):
        path = Path(folder) / "log"
        receiver = Watched(url, issue, lifetime, **receiving)
        sender = Watched(url, issue, lifetime, **sending)
        with receiver.instance, sender.instance, PublisherLog(path) as log:

            def receive(message: Message) -> None:
                arrivals.add(message.payload)

            receiver.instance.on("tokens/t", receive, guaranteed_ordering=True, **_GUARANTEED)
            sender.instance.publish("tokens/none", b"", **_GUARANTEED).result(PATIENCE)
            before = connections()
            started = time.monotonic()
            traffic = _Traffic(sender.instance, name, log)
            traffic.publish(60 * minutes)
            figures.seconds = round(time.monotonic() - started, 1)
            with contextlib.suppress(AssertionError):  # the comparison tells what is missing
                eventually(lambda: arrivals.latest.get("p", -1) >= traffic.count - 1, "the last message")
                eventually(lambda: len({each.sequence for each in arrivals.stamps}) >= traffic.count, patience=5.0)
            figures.same_connections = connections() == before if protocol == "amqp" else None
            log.sync()
            _fill(figures, traffic.count, compare({"p": read_log(path)}, arrivals), sender, receiver)
    return figures


def _fill(figures: Figures, published: int, verdict: Verdict, *instances: Watched) -> None:
    figures.published = published
    figures.confirmed, figures.received = verdict.confirmed, verdict.received
    figures.lost, figures.duplicates = len(verdict.lost), verdict.duplicates
    figures.failed = sum(verdict.failed.values())
    figures.reconnects = sum(each.reconnects for each in instances)
    figures.tokens = sum(each.asked for each in instances)
    problems = figures.problems
    if verdict.lost:
        problems.append(f"lost: {verdict.lost[:5]}")
    if verdict.unexpected:
        problems.append(f"unexpected: {verdict.unexpected[:5]}")
    if verdict.failed:
        problems.append(f"failed: {dict(verdict.failed)}")
    problems += [f"not planned: {cause}" for each in instances for cause in each.causes[:5]]
    if figures.protocol == "amqp" and (figures.reconnects or not figures.same_connections):
        problems.append(f"{figures.reconnects} reconnects of RabbitMQ's clients")


def main() -> int:
    """The command; see the module."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults.tokens", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--lifetime", type=float, default=10.0, help="of a token, seconds")
    parser.add_argument("--protocol", choices=PROTOCOLS, action="append", help="all, unless given; may be repeated")
    parser.add_argument("--json", type=Path, help="file for the figures")
    given = parser.parse_args()
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr, format="%(asctime)s %(message)s")
    protocols = given.protocol or PROTOCOLS
    found: dict[str, Figures] = {}

    def work(protocol: str) -> None:
        try:
            found[protocol] = run(protocol, given.minutes, given.lifetime)
        except Exception as error:  # noqa: BLE001  # told in the figures, whatever it is
            found[protocol] = Figures(protocol, problems=[f"{type(error).__name__}: {error}"])

    threads = [threading.Thread(target=work, args=(protocol,)) for protocol in protocols]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for protocol in protocols:
        sys.stdout.write(f"{found[protocol]}\n")
    if given.json is not None:
        given.json.write_text(json.dumps([dataclasses.asdict(found[each]) for each in protocols], indent=2) + "\n")
    return 1 if any(each.problems for each in found.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
