"""One process of a run of distributed events: it publishes, consumes, and writes down all of it.

``distributed.py`` starts it, kills it and suspends it; ``promises.py`` reads what it wrote. It has a distributed event
admin and a connected typed event bus, on one instance. It reads commands from its stdin, one in a line::

    join NAME TOPICS    register a consumer; its lines have NAME
    leave NAME          unregister it
    quiet               publish no more, unregister the consumers that come and go
    again               publish again

Each line of the ledger is a JSON list: monotonic seconds, the kind of the entry, and its fields. A line is written with
one system call, so a killed process leaves whole lines.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import os
import random
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import messaging
from messaging import MessagingError, Promise
from messaging.distributedeventing import (
    ABORT,
    PERSISTENT,
    DistributableEventConsumer,
    DistributedEventAdmin,
    EventNetwork,
    PushEvent,
    PushEventSource,
)
from messaging.errors import ConnectionLostError, PartialNotificationError
from messaging.services import ServiceRegistry
from messaging.typedevent import BusConnection, TypedEventBus

#: seconds
HEARTBEAT: Final = 0.5
LINGER: Final = 3.0
NOTIFIED_WITHIN: Final = 4.0
#: pause of a publisher between two events, seconds
_PACE: Final = (0.01, 0.06)
#: delay of a thread that shows a busy machine, or a suspended process; seconds
LAG: Final = 0.25
#: filters of the consumers that come and go, and of all others
PASSING: Final = ("ev/**", "ev/admin/1", "ev/bus/*", "ev/*/0")
LASTING: Final = {"wild": "ev/**", "exact": "ev/admin/0"}
BUS_LASTING: Final = {"bus-wild": "ev/*", "bus-exact": "ev/bus/0"}
PROGRAM: Final = "import sys; from tests.faults import member; member.main(*sys.argv[1:])"


@dataclass(frozen=True)
class Form:
    """How a process takes part.

    Attributes:
        settings: of the instance.
        queue: of its two members on AMQP, or ``None``.
        is_durable: whether the broker keeps its events while it is away.
    """

    settings: dict[str, Any] = field(default_factory=dict)
    queue: str | None = None
    is_durable: bool = False

    def network(self, name: str, part: str) -> EventNetwork:
        """Return the settings of the admin or the bus."""
        return EventNetwork(
            name=f"{name}.{part}",
            heartbeat=HEARTBEAT,
            linger=LINGER,
            queue=None if self.queue is None else f"{self.queue}-{part}",
            last_will=part == "admin",  # an instance has one
        )


def form_of(protocol: str, name: str, *, is_durable: bool, folder: str) -> Form:
    """Return how the process ``name`` takes part."""
    settings: dict[str, Any] = {"reconnect_min": 0.02, "reconnect_max": 0.3, "retry_connect": True, "timeout": 600.0}
    if is_durable:
        settings["outbox_path"] = f"{folder}/outbox-{name}"
    if protocol == "amqp":
        return Form({**settings, "heartbeat": 4}, name if is_durable else None, is_durable)
    settings |= {"keepalive": 4, "version": "5" if protocol == "mqtt5" else "3.1.1"}
    if is_durable:
        settings |= {"client_id": name, "clean_start": False}
        if protocol == "mqtt5":
            settings["session_expiry"] = 3600
    return Form(settings, None, is_durable)


class Ledger:
    """An append-only file. Thread safe."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def write(self, kind: str, *fields: Any) -> None:
        """Write an entry."""
        os.write(self._file, (json.dumps([time.monotonic(), kind, *fields]) + "\n").encode())


class _SessionConsumer(DistributableEventConsumer[Any]):
    """Consumes one session, and answers each event."""

    def __init__(self, member: Member) -> None:
        self._member = member
        self._session: str | None = None

    def accept(self, event: PushEvent[Any]) -> None:
        """Write the event down, and answer it."""
        if event.kind != "data":
            self._member.ledger.write("session-end", self._session, event.kind, type(event.failure).__name__)
            return
        whole = event.value
        self._session = whole.data["session"]
        self._member.ledger.write("session-got", self._session, whole.data["n"])
        if whole.reply_to is not None:
            answer = {"session": self._session, "n": whole.data["n"], "by": self._member.name}
            self._member.admin.publish_event(whole.reply_to, answer)


class _Source(PushEventSource[Any]):
    """A whiteboard source that writes down when it is open."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger

    def open(self, consumer: Any) -> Any:
        """Open, and publish one event."""
        self._ledger.write("source-open")
        consumer.accept(PushEvent.data({"opened": True}))
        return self

    def close(self) -> None:
        """Close."""
        self._ledger.write("source-close")


class Member:
    """The process."""

    def __init__(self, name: str, life: int, protocol: str, url: str, folder: str, *, is_durable: bool) -> None:
        self.process = name
        self.name = f"{name}.{life}"
        self.ledger = Ledger(Path(folder) / f"{self.name}.ledger")
        self._random = random.Random(f"{self.name}")
        form = form_of(protocol, name, is_durable=is_durable, folder=folder)
        self._is_durable = form.is_durable
        self._is_publishing = threading.Event()
        self._is_publishing.set()
        self._idle = threading.Semaphore(0)
        self._counted: dict[str, int] = {}
        self._joined: dict[str, Any] = {}
        services = ServiceRegistry()
        self._m = messaging.connect(url, **form.settings)
        self.admin = DistributedEventAdmin(
            services, self._m, network=form.network(self.name, "admin"), notification_timeout=NOTIFIED_WITHIN
        )
        self._bus = TypedEventBus(services)
        self._connection = self._bus.connect(self._m, "ev/*", network=form.network(self.name, "bus"))
        for label, topics in LASTING.items():
            self.admin.on(topics, handler=self._consumer(label))
        for label, topics in BUS_LASTING.items():
            self._bus.on(topics, handler=self._handler(label), type=dict)
        services.register(
            DistributableEventConsumer,
            lambda: _SessionConsumer(self),
            {"event.topics": ["sessions/*"]},
            scope="prototype",
        )
        services.register(PushEventSource, _Source(self.ledger), {"event.topic": f"sources/{name}"})
        for part in (self.admin, self._connection):
            self._wait(part.ready)
            self._announce(part)
        for label, topics in {**LASTING, **BUS_LASTING}.items():
            self.ledger.write("on", label, topics)
        self.ledger.write("up")

    def _announce(self, part: DistributedEventAdmin | BusConnection) -> None:
        """Wait until the other processes know the consumers, also over the reconnect that sets the last will."""
        end = time.monotonic() + 20.0
        while time.monotonic() < end:
            try:
                part.announced().result(20.0)
            except ConnectionLostError:
                continue
            except MessagingError:
                pass
            return

    def _wait(self, promise: Promise[None]) -> None:
        """Wait; a process that is lost meanwhile is no reason to stop."""
        with contextlib.suppress(MessagingError):
            promise.result(20.0)

    def _consumer(self, label: str) -> Callable[[PushEvent[Any]], None]:
        def consume(event: PushEvent[Any]) -> None:
            if event.kind == "data":
                self.ledger.write("got", label, event.value["p"], event.value["n"])

        return consume

    def _handler(self, label: str) -> Callable[[str, dict[str, Any]], None]:
        def handle(topic: str, event: dict[str, Any]) -> None:
            self.ledger.write("got", label, event["p"], event["n"])

        return handle

    # --- threads

    def run(self) -> None:
        """Start the threads, and obey commands until the end of stdin."""
        works = {"t": self._transient, "b": self._bus_event, "n": self._notifying}
        if self._is_durable:
            works["p"] = self._persistent
        for key, work in works.items():
            threading.Thread(target=self._publish, args=(key, work), daemon=True).start()
        for each in (self._sessions, self._passing, self._watch, self._confirm):
            threading.Thread(target=each, daemon=True).start()
        for line in sys.stdin:
            command, *arguments = line.split()
            match command:
                case "join":
                    self._join(*arguments)
                case "leave":
                    self._joined.pop(arguments[0]).unregister()
                    self.ledger.write("off", arguments[0])
                case "quiet":
                    self._is_publishing.clear()
                    self.ledger.write("quiet")
                case "again":
                    self._is_publishing.set()

    def _join(self, label: str, topics: str) -> None:
        self._joined[label] = self.admin.on(topics, handler=self._consumer_of_sources(label))
        self._wait(self.admin.announced(3.0))
        self.ledger.write("joined", label, topics)

    def _consumer_of_sources(self, label: str) -> Callable[[PushEvent[Any]], None]:
        return lambda event: self.ledger.write("source-got", label, event.kind)

    def _publish(self, key: str, work: Callable[[str, dict[str, Any]], None]) -> None:
        choose = random.Random(f"{self.name}.{key}")
        publisher = f"{self.name}.{key}"
        for number in itertools.count():
            self._is_publishing.wait()
            topic = f"ev/{'bus' if key == 'b' else 'admin'}/{choose.randrange(3)}"
            self.ledger.write("pub", key, number, topic)
            try:
                work(topic, {"p": publisher, "n": number, "topic": topic})
            except MessagingError as error:
                self.ledger.write("unpublished", key, number, type(error).__name__)
            self._counted[key] = number
            time.sleep(choose.uniform(*_PACE) * (4 if key == "n" else 1))  # sleeps: the pace of the member

    def _transient(self, topic: str, event: dict[str, Any]) -> None:
        self.admin.publish_event(topic, event)

    def _persistent(self, topic: str, event: dict[str, Any]) -> None:
        self.admin.publish_event(topic, event, qos=PERSISTENT)

    def _bus_event(self, topic: str, event: dict[str, Any]) -> None:
        self._bus.deliver_untyped(topic, event)

    def _notifying(self, topic: str, event: dict[str, Any]) -> None:
        promise = self.admin.publish_event_with_notification(topic, event)
        promise.add_done_callback(lambda done: self._notified(event["n"], done))

    def _notified(self, number: int, promise: Promise[None]) -> None:
        error = promise.exception()
        missing = list(error.missing) if isinstance(error, PartialNotificationError) else []
        self.ledger.write("notified", number, "" if error is None else type(error).__name__, missing, str(error or ""))

    def _sessions(self) -> None:
        choose = random.Random(f"{self.name}.sessions")
        for number in itertools.count():
            self._is_publishing.wait()
            name = f"{self.name}.s{number}"

            def replied(event: PushEvent[Any], mine: str = name) -> None:
                if event.kind == "data":
                    assert event.value["session"] == mine
                    self.ledger.write("reply", mine, event.value["n"], event.value["by"])

            session = self.admin.create_session(f"sessions/{self.process}", response_handler=replied)
            self.ledger.write("session", name)
            for n in range(choose.randint(1, 6)):
                session.publish_event({"session": name, "n": n})
                self.ledger.write("session-pub", name, n)
                time.sleep(choose.uniform(0.02, 0.15))  # sleeps: the pace of the member
            time.sleep(1.0)  # sleeps: replies come
            end = choose.choice(("close", "error"))
            self.ledger.write("session-over", name, end)
            if end == "close":
                session.close()
            else:
                session.error(ValueError("wanted"))
            self.ledger.write("session-closed", name)

    def _passing(self) -> None:
        """Have consumers come and go; some raise, some are slow, some ask to be discarded."""
        choose = random.Random(f"{self.name}.passing")
        for number in itertools.count():
            self._is_publishing.wait()
            label, topics = f"passing-{number}", choose.choice(PASSING)
            manner = choose.choice(("good", "good", "slow", "raises", "leaves"))
            registration = self.admin.on(topics, handler=self._passing_consumer(label, manner))
            known = True
            try:
                self.admin.announced(3.0).result(5.0)
            except MessagingError:
                known = False
            if known and manner == "good":
                self.ledger.write("on", label, topics)
            time.sleep(choose.uniform(0.1, 1.5))  # sleeps: the pace of the member
            self.ledger.write("off", label)
            registration.unregister()

    def _passing_consumer(self, label: str, manner: str) -> Callable[[PushEvent[Any]], int]:
        left = [5]

        def consume(event: PushEvent[Any]) -> int:
            if event.kind != "data":
                return 0
            self.ledger.write("got", label, event.value["p"], event.value["n"])
            left[0] -= 1
            if manner == "slow":
                return 20
            if left[0] < 0 and manner == "raises":
                raise ValueError("wanted")
            if left[0] < 0 and manner == "leaves":
                return ABORT
            return 0

        return consume

    def _watch(self) -> None:
        """Write down which members are there, as they come and are lost."""
        before: set[str] = set()
        looked = time.monotonic()
        while True:
            if (late := time.monotonic() - looked) > LAG:
                self.ledger.write("lag", late)
            looked = time.monotonic()
            now = {each.name for each in self.admin.members() if not each.is_lost}
            for each in sorted(before - now):
                self.ledger.write("lost", each)
            for each in sorted(now - before):
                self.ledger.write("seen", each)
            before = now
            time.sleep(0.02)  # sleeps: the pace of the member

    def _confirm(self) -> None:
        """Write down up to which number the events of each publisher are confirmed."""
        while True:
            counted = dict(self._counted)
            time.sleep(0.05)  # sleeps: an event may have left the queue of the bus, and not be in the outbox yet
            deadline = time.monotonic() + 5.0
            while self._connection.get_dto().waiting and time.monotonic() < deadline:
                time.sleep(0.01)  # sleeps: the pace of the member
            while (pending := self._m.runtime.get_runtime_dto().publisher.pending) and time.monotonic() < deadline:
                time.sleep(0.005)  # sleeps: the pace of the member
            if not pending:
                self.ledger.write("confirmed", counted)
            dto = self._connection.get_dto()
            self.ledger.write("bus", dto.dropped, dto.unfit, dto.failed)
            time.sleep(0.05)  # sleeps: the pace of the member


def _with_clock(record: logging.LogRecord) -> bool:
    """Give a line of the log the clock of the ledger."""
    record.clock = time.monotonic()
    return True


def main(name: str, life: str, protocol: str, url: str, folder: str, form: str) -> None:
    """Run until killed, or until stdin ends."""
    logging.basicConfig(level=logging.INFO, stream=sys.stdout, format="%(clock).3f %(name)s %(message)s")
    for handler in logging.getLogger().handlers:
        handler.addFilter(_with_clock)
    member = Member(name, int(life), protocol, url, folder, is_durable=form == "durable")
    sys.stdout.write("up\n")
    sys.stdout.flush()
    member.run()
