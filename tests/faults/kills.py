"""Random kills of processes whose messages are on the disk: nothing accepted is lost, nothing is handled twice.

``python -m tests.faults.kills --kills 300 --protocol all --seed 7`` (or ``make kills``). A publisher with a durable
outbox and a consumer with an inbox run in processes of their own. One of them, or the broker, gets SIGKILL at a random
time and is started again. A device on MQTT 3.1.1, whose messages have no ids, publishes beside them all the while. At
the end the outbox is emptied, and the ledgers are compared:

- every message whose promise ``stored`` resolved, or that the broker confirmed to the device, was received, in order;
- a second receiver, without inbox, got no more duplicates than the windows of publisher and consumer allow;
- the consumer handled each of them, and none with an id twice, unless it was killed between the effect and the stored
  id.

Ends with status 1, and says why, if that is not so.
"""

from __future__ import annotations

import itertools
import os
import random
import sys
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Self

import messaging
from messaging.publishing.durable import WINDOW
from messaging.testing.brokers import Broker, Mosquitto, RabbitMQ
from messaging.testing.waiting import PATIENCE, eventually
from tests.faults import command
from tests.faults.ledger import Arrivals, History, PublisherLog, Stamp, Verdict, compare, decode, encode, read_log
from tests.faults.scenario import QUICK, Victim

RUN: Final = "kills"
CHANNEL: Final = "kills/all"
#: the two publishers, as they are named in payloads
OUTBOX: Final = "outbox"
DEVICE: Final = "device"
_BATCH: Final = 20
_PACE: Final = 0.01
#: time for the outbox to be emptied, and for all messages to arrive, seconds
SETTLING: Final = 6 * PATIENCE
#: how long a victim lives, seconds
_LIFE: Final = (0.05, 0.8)
#: how much earlier than the kill of mosquitto a message may have been confirmed that it loses, seconds
_UNSAVED: Final = 2.5
#: messages that a consumer may have handled without their ids being stored: the broker sends no more ahead
_UNSTORED: Final = 1024
_PUBLISHER: Final = "import sys; from tests.faults import kills; kills.publisher(*sys.argv[1:])"
_CONSUMER: Final = "import sys; from tests.faults import kills; kills.consumer(*sys.argv[1:])"


@dataclass(frozen=True)
class Protocol:
    """How messages travel so that the broker keeps them while a receiver is away."""

    name: str
    publish: dict[str, Any]
    subscribe: dict[str, Any]
    #: of a receiver, by its name
    settings: dict[str, Any] = field(default_factory=dict)
    has_queues: bool = False

    def broker(self) -> Broker:
        """Return a broker that keeps what it has confirmed, as far as it can."""
        if self.name == "amqp":
            return RabbitMQ(plugins=["rabbitmq_mqtt"])
        return Mosquitto(
            ["autosave_on_changes false", "autosave_interval 1", "max_queued_messages 0"], persistence=True
        )

    def subscription(self, name: str) -> dict[str, Any]:
        """Return the extensions of a subscription that outlives its consumer."""
        return {**self.subscribe, "queue": name} if self.has_queues else {**self.subscribe, "keep_subscription": True}

    def device_url(self, broker: Broker) -> str:
        """Return where the device connects."""
        return f"{broker.mqtt_url if isinstance(broker, RabbitMQ) else broker.url}?version=3.1.1"

    def instance(self, name: str) -> dict[str, Any]:
        """Return the settings of a receiver."""
        return {**self.settings, **({} if self.has_queues else {"client_id": name}), **QUICK, "retry_connect": True}


PROTOCOLS: Final = {
    "mqtt": Protocol(
        "mqtt", {"qos": 1}, {"qos": 1}, {"version": "5", "clean_start": False, "session_expiry": 3600, "keepalive": 2}
    ),
    "amqp": Protocol("amqp", {"guaranteed_delivery": True}, {"qos": 1}, {"heartbeat": 2}, has_queues=True),
}


# --- the victims


def publisher(name: str, url: str, folder: str, log: str, first: str) -> None:
    """Publish until killed; note what is stored."""
    protocol = PROTOCOLS[name]
    settings: dict[str, Any] = {"version": "5"} if name == "mqtt" else {}
    m = messaging.connect(url, outbox_path=folder, retry_connect=True, timeout=600.0, **settings, **QUICK)
    with PublisherLog(Path(log)) as ledger:
        sys.stdout.write("up\n")
        sys.stdout.flush()
        for start in itertools.count(int(first), _BATCH):
            sequences = range(start, start + _BATCH)
            ledger.attempt(sequences)
            promises = [
                m.publish(CHANNEL, encode(Stamp(RUN, OUTBOX, sequence)), store_and_forward=True, **protocol.publish)
                for sequence in sequences
            ]
            for sequence, promise in zip(sequences, promises, strict=True):
                promise.result(PATIENCE)
                ledger.confirm(sequence)
            time.sleep(_PACE)  # sleeps: the pace of the publisher


def consumer(name: str, url: str, folder: str, effects: str, incarnation: str) -> None:
    """Handle messages until killed: write the number of each into a file."""
    protocol = PROTOCOLS[name]
    file = os.open(effects, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def handle(payload: bytes) -> None:
        stamp, _ = decode(payload)
        os.write(file, f"{incarnation} {stamp.publisher} {stamp.sequence}\n".encode())

    m = messaging.connect(url, inbox_path=folder, **protocol.instance("consumer"))
    m.on(CHANNEL, handle, model=bytes, deduplicate=True, **protocol.subscription("consumer"))
    sys.stdout.write("up\n")
    sys.stdout.flush()
    threading.Event().wait()


# --- the device


class Device:
    """Publishes messages without ids until it is stopped, in a thread of its own."""

    def __init__(self, protocol: Protocol, broker: Broker, log: Path) -> None:
        self._protocol = protocol
        self._m = messaging.connect(protocol.device_url(broker), timeout=SETTLING, keepalive=2, **QUICK)
        self._log = PublisherLog(log)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="device")

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(SETTLING)
        self._m.close(PATIENCE)
        self._log.close()

    def _run(self) -> None:
        for start in itertools.count(step=_BATCH):
            if self._stop.is_set():
                return
            sequences = range(start, start + _BATCH)
            self._log.attempt(sequences)
            promises = [self._m.publish(CHANNEL, encode(Stamp(RUN, DEVICE, each)), qos=1) for each in sequences]
            for sequence, promise in zip(sequences, promises, strict=True):
                if (error := promise.exception(SETTLING)) is None:
                    self._log.confirm(sequence)
                else:
                    self._log.fail(sequence, error)
            self._stop.wait(5 * _PACE)


# --- the run


@dataclass
class Outcome:
    """What a run showed."""

    kills: Counter[str]
    verdict: Verdict
    handled: int
    #: handled twice by one process of the consumer, and by two
    twice: int
    twice_over_a_kill: int
    problems: list[str]

    def __str__(self) -> str:
        return (
            f"{dict(self.kills)} kills; {self.verdict}; handled {self.handled}, twice by one process {self.twice}, "
            f"again after a kill {self.twice_over_a_kill}"
        )


class Run:
    """Kills the processes of one protocol at random."""

    def __init__(self, protocol: Protocol, folder: Path, seed: int) -> None:
        self.protocol = protocol
        self.random = random.Random(seed)
        self.folder = folder
        self.log = folder / "publisher.log"
        self.device_log = folder / "device.log"
        self.effects = folder / "effects"
        self.effects.touch()
        self.log.touch()
        self.arrivals = Arrivals(RUN)
        self.kills: Counter[str] = Counter()
        self.broker_kills: list[float] = []
        self._incarnations = itertools.count()

    def run(self, kills: int) -> Outcome:
        """Kill so many times, then compare."""
        with self.protocol.broker() as broker:
            receiver = messaging.connect(broker.url, **self.protocol.instance("receiver"))
            try:
                receiver.on(CHANNEL, self._receive, model=bytes, **self.protocol.subscription("receiver")).ready.result(
                    PATIENCE
                )
                self._kill(broker, kills)
                return self._finish(broker)
            finally:
                receiver.close()

    def _receive(self, payload: bytes) -> None:
        self.arrivals.add(payload)

    def _victim(self, kind: str, url: str) -> Victim:
        folder = str(self.folder / kind)
        if kind == "publisher":
            attempted = read_log(self.log).attempted
            return Victim(
                _PUBLISHER, self.protocol.name, url, folder, str(self.log), str(max(attempted, default=-1) + 1)
            )
        return Victim(_CONSUMER, self.protocol.name, url, folder, str(self.effects), str(next(self._incarnations)))

    def _kill(self, broker: Broker, kills: int) -> None:
        victims = {kind: self._victim(kind, broker.url).__enter__() for kind in ("consumer", "publisher")}
        try:
            with Device(self.protocol, broker, self.device_log):
                for _ in range(kills):
                    time.sleep(self.random.uniform(*_LIFE))  # sleeps: a random moment
                    # a broker takes seconds to return: mostly the processes
                    kind = self.random.choices(["publisher", "consumer", "broker"], [10, 10, 1])[0]
                    self.kills[kind] += 1
                    if kind == "broker":
                        self.broker_kills.append(time.monotonic())
                        broker.kill()
                        broker.start()
                    else:
                        victims[kind].__exit__()
                        victims[kind] = self._victim(kind, broker.url).__enter__()
        finally:
            for victim in victims.values():
                victim.__exit__()

    def _finish(self, broker: Broker) -> Outcome:
        settings: dict[str, Any] = {"version": "5"} if self.protocol.name == "mqtt" else {}
        with (
            self._victim("consumer", broker.url),
            messaging.connect(broker.url, outbox_path=self.folder / "publisher", **settings, **QUICK) as m,
        ):
            dto = m.runtime.get_runtime_dto
            eventually(lambda: dto().publisher.pending == 0, "the outbox to be empty", patience=SETTLING)
            wanted = self._wanted()
            eventually(
                lambda: wanted <= set(self.arrivals.stamps) and wanted <= set(self._handled()),
                lambda: (
                    f"{len(wanted)} messages; did not arrive: {sorted(wanted - set(self.arrivals.stamps))[:10]}, "
                    f"were not handled: {sorted(wanted - set(self._handled()))[:10]}"
                ),
                patience=SETTLING,
            )
        return self._compare()

    def _histories(self) -> dict[str, History]:
        return {OUTBOX: read_log(self.log), DEVICE: read_log(self.device_log)}

    def _wanted(self) -> set[Stamp]:
        """The accepted messages; mosquitto may have lost those that it confirmed just before it was killed."""
        return {
            Stamp(RUN, publisher, sequence)
            for publisher, history in self._histories().items()
            for sequence, at in history.confirmed.items()
            if self.protocol.name == "amqp"
            or not any(at - _UNSAVED < killed < at + 2 * _UNSAVED for killed in self.broker_kills)
        }

    def _handled(self) -> list[Stamp]:
        lines = (line.split() for line in self.effects.read_text().splitlines())
        return [Stamp(RUN, publisher, int(sequence)) for _, publisher, sequence in lines]

    def _compare(self) -> Outcome:
        verdict = compare(self._histories(), self.arrivals)
        problems: list[str] = []
        wanted = self._wanted()
        lost = [stamp for stamp in verdict.lost if stamp in wanted]
        if lost:
            problems.append(f"{len(lost)} accepted messages are lost: {lost[:10]}")
        if verdict.unexpected:
            problems.append(f"unexpected: {verdict.unexpected[:10]}")
        if verdict.disorder:
            problems.append(f"out of order: {verdict.disorder[:10]}")
        most = (WINDOW + 100) * (self.kills["publisher"] + 1) + 3 * WINDOW * self.kills["broker"]
        if verdict.duplicates > most:
            problems.append(f"{verdict.duplicates} duplicates without inbox, more than {most}")
        twice, over = self._twice(problems)
        missing = wanted - set(self._handled())
        if missing:
            problems.append(f"{len(missing)} accepted messages were not handled: {sorted(missing)[:10]}")
        return Outcome(self.kills, verdict, len(self._handled()), twice, over, problems)

    def _twice(self, problems: list[str]) -> tuple[int, int]:
        """Count the messages with ids that were handled twice, by one process and by two."""
        seen: dict[int, tuple[str, int]] = {}
        split = (line.split() for line in self.effects.read_text().splitlines())
        lines = [(incarnation, sequence) for incarnation, publisher, sequence in split if publisher == OUTBOX]
        ends = Counter(incarnation for incarnation, _ in lines)
        places: Counter[str] = Counter()
        twice = over = 0
        for incarnation, text in lines:
            sequence = int(text)
            places[incarnation] += 1
            if sequence in seen:
                before, place = seen[sequence]
                if before == incarnation:
                    twice += 1
                    problems.append(f"message {sequence} was handled twice by one process")
                else:
                    over += 1
                    if ends[before] - place > _UNSTORED:
                        problems.append(f"message {sequence} was handled again, and was not the last before the kill")
            seen[sequence] = incarnation, places[incarnation]
        return twice, over


def main() -> int:
    """See the module."""
    parser = command.parser(__doc__, [*PROTOCOLS])
    parser.add_argument("--kills", type=int, default=300)
    given = parser.parse_args()
    return command.run_all(
        given, lambda protocol, folder: Run(PROTOCOLS[protocol], folder, given.seed).run(given.kills)
    )


if __name__ == "__main__":
    sys.exit(main())
