"""A gateway under random kills, a black-holed uplink and restarts of its brokers.

``python -m tests.faults.gateway --protocol amqp --kills 300 --seed 7`` (or ``make gateway``). Devices publish at a
broker of their own; the gateway, a process of its own, stores and forwards to a second broker, through a proxy; a
receiver there keeps what arrives. Half of the devices speak MQTT 3.1.1: their messages have no ids, and some of them
are equal. Each fault comes at a random moment. Then the ledgers are compared: each message that the devices' broker
confirmed has arrived; the first arrivals of each device are in order; a duplicate has the message id of its original;
equal messages have arrived under as many ids as were confirmed. A message without an id that a device itself sends
again, after the loss of its connection, is another message to its broker: it may arrive under two ids. Ends with status
1, and says why, if not.

Longer outages: ``--kills 0 --brokers 0 --black-holes 1 --black-hole 600`` for ten minutes, ``--outage 100000`` for so
many messages that the devices publish while the uplink is a black hole, ``--data DIR --body 1000`` for buffers on
another disk, such as one that is too small for them.
"""

from __future__ import annotations

import itertools
import json
import random
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import messaging
from messaging.testing.brokers import Broker, Mosquitto, RabbitMQ
from messaging.testing.proxy import Proxy
from messaging.testing.waiting import PATIENCE, eventually
from tests.faults import command
from tests.faults.ledger import Stamp, decode, encode
from tests.faults.scenario import OUTAGE, Lives

PROTOCOLS: Final = ("mqtt", "amqp")
DEVICES: Final = 4
#: the device whose messages are all equal
EQUAL: Final = "equal"
#: one of so many messages is one of those
_EQUAL_SHARE: Final = 20
#: messages per second of all devices together
RATE: Final = 1000
IN_FLIGHT: Final = 500
_PAUSE: Final = (0.2, 1.4)
_SETTLING: Final = 6 * PATIENCE


@dataclass
class Outcome:
    """What the ledgers say."""

    faults: dict[str, int] = field(default_factory=dict)
    confirmed: int = 0
    received: int = 0
    duplicates: int = 0
    #: most messages that arrived again between two that arrived for the first time. Each counts once: if the gateway is
    #: killed before it has sent them all again, the next one sends them once more
    burst: int = 0
    #: most bytes of the buffer on the disk
    disk: int = 0
    #: seconds from the end of the last fault until all had arrived
    drained: float = 0.0
    problems: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        faults = ", ".join(f"{count} x {kind}" for kind, count in sorted(self.faults.items()))
        return (
            f"{faults}; {self.confirmed} messages confirmed, {self.received} received, {self.duplicates} duplicates "
            f"(of at most {self.burst} messages in a row), {len(self.problems)} problems; "
            f"at most {self.disk / 2**20:.1f} MiB on the disk, drained {self.drained:.1f} s after the last fault"
        )


class Devices:
    """Publishes stamped messages at a rate, and keeps which ones the broker has confirmed."""

    def __init__(self, url: str, rate: int, body: bytes) -> None:
        self._url = url
        self._rate = rate
        self._body = body
        self.confirmed: set[tuple[str, int]] = set()
        #: equal messages that the broker has confirmed
        self.equal = 0
        #: those that were published, and that may have been sent twice
        self.equal_sent = self.equal_resent = 0
        #: messages without an id that may have been sent twice: their connection was lost before they were confirmed
        self.resent: set[tuple[str, int]] = set()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="devices")
        self._pending = 0

    def __enter__(self) -> Devices:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(60)

    def _run(self) -> None:
        with ExitStack() as stack:
            m, plain = (
                stack.enter_context(messaging.connect(url, name=name, keep_session=True, outbox_size=1_000_000))
                for name, url in (("devices", self._url), ("plain", self._url.replace("version=5", "version=3.1.1")))
            )
            begun, sent = time.monotonic(), 0
            while not self._stop.is_set():
                due = int((time.monotonic() - begun) * self._rate)
                for number in range(sent, due):
                    device, sequence = f"d{number % DEVICES}", number // DEVICES
                    self._publish(m if number % 2 else plain, device, sequence, has_id=bool(number % 2))
                    if number % _EQUAL_SHARE == 0:
                        self.equal_sent += 1
                        self._publish(plain, EQUAL, 0, has_id=False)
                sent = due
                self._stop.wait(0.01)
            m.close(30)
            plain.close(30)

    def _publish(self, m: messaging.Messaging, device: str, sequence: int, *, has_id: bool) -> None:
        payload = encode(Stamp("run", device, sequence), self._body)
        connection = m.connection_state.value  # another object after each loss
        promise = m.publish(f"plant/{device}/data", payload, qos=1, timeout=600.0)

        def note() -> None:
            if not has_id and m.connection_state.value is not connection:
                self.resent.add((device, sequence))
                self.equal_resent += device == EQUAL
            self._note(promise, (device, sequence))

        promise.listen(note)

    def _note(self, promise: Any, key: tuple[str, int]) -> None:
        if promise.exception(0) is not None:
            return
        if key[0] == EQUAL:
            self.equal += 1  # each outcome is told on the engine's loop
        else:
            self.confirmed.add(key)


class Receiver:
    """Keeps what arrives at the target: device, sequence and message id, in order."""

    def __init__(self, url: str, protocol: str) -> None:
        self.arrived: list[tuple[str, int, str | None]] = []
        self._m = messaging.connect(url, name="receiver", keep_session=True)
        source: dict[str, Any] = {"queue": "cloud"} if protocol == "amqp" else {"qos": 1}
        # the broker delivers at most so many again after a loss, as the gateway publishes at most so many again
        self._registration = self._m.on("cloud/+", self._note, keep_subscription=True, prefetch=IN_FLIGHT, **source)

    def _note(self, message: messaging.Message) -> None:
        stamp, _ = decode(message.payload)
        self.arrived.append((stamp.publisher, stamp.sequence, message.context.extensions.get("messageId")))

    def close(self) -> None:
        """Disconnect."""
        self._m.close()


class Run:
    """One run.

    Args:
        protocol: of the target: ``mqtt`` or ``amqp``.
        folder: for the data of the gateway; empty.
        seed: of the random numbers.
        say: gets lines about the progress.
        rate: messages per second.
        body: bytes of each message.
        data: folder of the buffers, if they are not to be in ``folder``.
    """

    def __init__(
        self, protocol: str, folder: Path, seed: int, say: Callable[[str], object] = lambda _: None,
        *, rate: int = RATE, body: int = 60, data: Path | None = None,
    ) -> None:  # fmt: skip
        self._protocol = protocol
        self._folder = folder
        self._data = folder / "data" if data is None else data
        self._body = b"x" * body
        self._random = random.Random(f"{protocol}{seed}")
        self._say = say
        self._rate = rate
        self.outcome = Outcome()

    def run(
        self, kills: int, *, brokers: int = 0, black_holes: int = 0, black_hole: float = 2.0, outage: int = 0
    ) -> Outcome:
        """Run under faults in random order; return what the ledgers say.

        Args:
            kills: SIGKILLs of the gateway.
            brokers: restarts of one of the two brokers.
            black_holes: times at which the uplink swallows everything, without an end of its connections.
            black_hole: how long each lasts, seconds.
            outage: one more black hole, which lasts for so many messages of the devices.
        """
        faults = ["kill"] * kills + ["broker"] * brokers + ["black hole"] * black_holes + ["outage"] * bool(outage)
        self._random.shuffle(faults)
        outcome = self.outcome
        with ExitStack() as stack:
            source = stack.enter_context(_mosquitto())
            target: Broker = stack.enter_context(_mosquitto() if self._protocol == "mqtt" else RabbitMQ())
            proxy = stack.enter_context(Proxy(target.host, target.port))
            receiver = Receiver(_version(target.url), self._protocol)
            stack.callback(receiver.close)
            settings = self._settings(source.url, target.url.replace(f":{target.port}", f":{proxy.port}"))
            file = self._folder / "gateway.json"
            file.write_text(json.dumps(settings))
            gateway = Lives("from tests.faults import gateway_process; gateway_process.main()", self._folder / "log")
            stack.callback(gateway.kill)
            gateway.start(str(file))
            gateway.wait_up()
            self._probe(_version(source.url), receiver)
            with Devices(_version(source.url), self._rate, self._body) as devices:
                for number, fault in enumerate(faults):
                    time.sleep(self._random.uniform(*_PAUSE))  # sleeps: a random moment
                    if fault == "kill":
                        gateway.kill()
                        gateway.start(str(file))
                    elif fault == "broker":
                        self._random.choice((source, target)).restart()
                    elif fault == "outage":
                        enough = len(devices.confirmed) + outage
                        self._swallow(proxy, lambda enough=enough: len(devices.confirmed) >= enough)  # type: ignore[misc]
                    else:
                        end = time.monotonic() + black_hole
                        self._swallow(proxy, lambda end=end: time.monotonic() >= end)  # type: ignore[misc]
                    outcome.faults[fault] = outcome.faults.get(fault, 0) + 1
                    if number % 20 == 19:
                        self._say(
                            f"{number + 1} faults, {len(devices.confirmed)} sent, {len(receiver.arrived)} received"
                        )
                ended = time.monotonic()
            confirmed, equal = devices.confirmed, devices.equal
            try:
                arrived = receiver.arrived
                eventually(
                    lambda: confirmed <= {each[:2] for each in arrived} and len(_equal_ids(arrived)) >= equal,
                    "all arrive", patience=_SETTLING,
                )  # fmt: skip
                outcome.drained = time.monotonic() - ended
            except AssertionError:
                outcome.problems.append(gateway.log.read_text(errors="replace")[-3000:])
        self._check(confirmed, [each for each in receiver.arrived if each[0] != EQUAL], devices.resent)
        found = len(_equal_ids(receiver.arrived))
        if not equal <= found <= devices.equal_sent + devices.equal_resent:
            outcome.problems.append(
                f"{equal} of {devices.equal_sent} equal messages confirmed, {devices.equal_resent} perhaps sent twice, "
                f"{found} ids received"
            )
        return outcome

    def _probe(self, url: str, receiver: Receiver) -> None:
        """Wait until the gateway forwards: it has subscribed then; before, devices would publish to nobody."""
        with messaging.connect(url, name="probe") as m:
            sequence = itertools.count()

            def arrives() -> bool:
                m.publish("plant/probe/data", encode(Stamp("run", "probe", next(sequence))), qos=1).result(PATIENCE)
                return bool(receiver.arrived)

            eventually(arrives, "a probe arrives", patience=OUTAGE)

    def _swallow(self, proxy: Proxy, until: Callable[[], bool]) -> None:
        """Have the uplink lose everything, and keep its connections open."""
        proxy.up.swallow()
        proxy.down.swallow()
        while not until():
            time.sleep(0.2)  # sleeps: an outage of so long
            self.outcome.disk = max(self.outcome.disk, _bytes(self._data))
        proxy.up.restore()
        proxy.down.restore()

    def _settings(self, source: str, target: str) -> dict[str, Any]:
        to: dict[str, Any] = {"url": _version(target), "reconnect_max": 1.0, "connect_timeout": 5.0}
        if self._protocol == "mqtt":
            to |= {"keepalive": 2}
        else:
            to |= {"heartbeat": 2}
        return {
            "name": "gw",
            "data": str(self._data),
            "instances": {
                "plant": {
                    "url": _version(source), "reconnect_max": 1.0,
                },
                "cloud": to,
            },
            "routes": {
                "data": {
                    "from": {"instance": "plant", "channel": "plant/{device}/data"},
                    "to": {"instance": "cloud", "channel": "cloud/{device}"},
                    "buffer": {"full": "block", "in_flight": IN_FLIGHT},
                }
            },
        }  # fmt: skip

    def _check(
        self, confirmed: set[tuple[str, int]], arrived: list[tuple[str, int, str | None]], resent: set[tuple[str, int]]
    ) -> None:
        outcome = self.outcome
        outcome.confirmed, outcome.received = len(confirmed), len(arrived)
        first: dict[tuple[str, int], str | None] = {}
        latest: dict[str, int] = {}
        again: set[tuple[str, int]] = set()
        for device, sequence, message_id in arrived:
            key = (device, sequence)
            if key in first:
                outcome.duplicates += 1
                again.add(key)
                outcome.burst = max(outcome.burst, len(again))
                if message_id is None or (first[key] != message_id and key not in resent):
                    outcome.problems.append(f"duplicate {key} has the id {message_id}, not {first[key]}")
                continue
            again.clear()
            first[key] = message_id
            if sequence < latest.get(device, -1):
                outcome.problems.append(f"out of order: {key} after {latest[device]}")
            latest[device] = max(sequence, latest.get(device, -1))
        lost = sorted(confirmed - set(first))
        outcome.problems += [f"lost: {each}" for each in lost[:20]]
        if len(lost) > 20:
            outcome.problems.append(f"{len(lost)} messages are lost")
        del outcome.problems[60:]


def _equal_ids(arrived: list[tuple[str, int, str | None]]) -> set[str | None]:
    """Return the ids of the equal messages."""
    return {message_id for device, _, message_id in [*arrived] if device == EQUAL}


def _mosquitto() -> Mosquitto:
    """Return a broker that keeps its sessions over a restart in good order, as a packaged one does.

    One that writes each change to the disk is slow. Acknowledgements that it has not read are lost with the connection.
    """
    return Mosquitto(["autosave_on_changes false", "autosave_interval 1800"], persistence=True)


def _bytes(folder: Path) -> int:
    """Return the bytes that the files of a folder occupy."""
    found = 0
    for path in folder.rglob("*"):
        with suppress(OSError):  # the journal has deleted it meanwhile
            found += path.stat().st_blocks * 512
    return found


def _version(url: str) -> str:
    return url + "?version=5" if url.startswith("mqtt") else url


def main() -> int:
    """The command; see the module."""
    parser = command.parser(__doc__, PROTOCOLS)
    parser.add_argument("--kills", type=int, default=300)
    parser.add_argument("--brokers", type=int, default=10, help="restarts of brokers")
    parser.add_argument("--black-holes", type=int, default=5)
    parser.add_argument("--black-hole", type=float, default=5.0, help="how long each lasts, seconds")
    parser.add_argument("--outage", type=int, default=0, help="messages of one more black hole")
    parser.add_argument("--rate", type=int, default=RATE, help="messages per second")
    parser.add_argument("--body", type=int, default=60, help="bytes of a message")
    parser.add_argument("--data", type=Path, help="folder of the buffers, which must be empty")
    given = parser.parse_args()

    def run(protocol: str, folder: Path) -> Outcome:
        data = None if given.data is None else given.data / protocol
        made = Run(protocol, folder, given.seed, command.progress, rate=given.rate, body=given.body, data=data)
        return made.run(
            given.kills, brokers=given.brokers, black_holes=given.black_holes, black_hole=given.black_hole,
            outage=given.outage,
        )  # fmt: skip

    return command.run_all(given, run)


if __name__ == "__main__":
    sys.exit(main())
