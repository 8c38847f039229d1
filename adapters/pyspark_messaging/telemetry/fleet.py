"""The simulated fleet: devices that measure, networks that fail, and a gateway that publishes.

:func:`simulate` derives all messages, their bytes and their order from the seed. The module, run as a program,
publishes them in real time and writes the ledger: a line for each message that the broker has accepted.

Time in the payload is simulated: the devices report every :data:`INTERVAL`, as many of them as the rate allows. With
the default options a second is about forty minutes, so that a run of half a minute has day and night.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import random
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final, NamedTuple

import messaging
from messaging import Promise
from pyspark_messaging.telemetry import INTERVAL, FleetPlan
from pyspark_messaging.telemetry.model import METRICS, TELEMETRY_CHANNEL, Telemetry

START: Final = datetime(2025, 6, 2, 12, tzinfo=UTC)

#: site -> mean temperature, °C
SITES: Final = {"cork": 14.0, "oslo": 9.0, "riga": 17.0, "rome": 24.0}
#: wrong clocks: number of the device -> how much its clock is ahead
SKEWS: Final = {1: timedelta(minutes=4), 6: timedelta(minutes=-7), 11: timedelta(seconds=45)}

#: shares of all readings: delayed, delayed beyond the watermark, and garbled
_LATE: Final = 0.05
_TOO_LATE: Final = 0.006
_CORRUPT: Final = 0.004
#: share of the devices that lose their network for a while
_OUTAGES: Final = 0.25
#: readings before the first anomaly of a device
_QUIET: Final = 30
#: simulated time before the first reading that is too late: by then, windows can be closed
_SETTLING: Final = timedelta(hours=3)

#: messages that may be unconfirmed
_WINDOW: Final = 500
_PROGRESS: Final = 0.5


class Sent(NamedTuple):
    """A message of the fleet.

    Attributes:
        at: its publication time, as a fraction of the run.
        kind: ``reading`` or ``rejected``, the kind under which it must be stored.
        injected: the metrics that are anomalies.
        too_late: whether it is delayed beyond the watermark.
    """

    at: float
    channel: str
    payload: bytes
    device: str
    sequence: int
    kind: str
    injected: tuple[str, ...]
    too_late: bool


def simulate(plan: FleetPlan) -> list[Sent]:
    """Return all messages of a run, in the order of publishing."""
    messages = [message for number in range(plan.devices) for message in _device(plan, number)]
    return sorted(messages, key=lambda message: (message.at, message.device, message.sequence))


def _device(plan: FleetPlan, number: int) -> Iterator[Sent]:
    rng = random.Random(f"{plan.seed}/{number}")  # noqa: S311  # a simulation
    site = list(SITES)[number % len(SITES)]
    device = f"{site}-{number // len(SITES) + 1:02}"
    skew = SKEWS.get(number, timedelta())
    phase = rng.uniform(0, INTERVAL.total_seconds())
    character = (SITES[site] + rng.gauss(0, 1), rng.uniform(1.5, 3.0), rng.uniform(75, 95))
    injected = _injections(rng, plan)
    outage = _outage(rng, plan)
    for sequence in range(plan.readings):
        measured = START + sequence * INTERVAL + timedelta(seconds=phase)
        values = [
            value + injected.get((sequence, metric.name), 0.0)
            for value, metric in zip(_values(rng, measured, character), METRICS, strict=True)
        ]
        delay, too_late = _delay(rng, plan, measured)
        sent = measured + delay
        if outage is not None and outage[0] <= sent < outage[1]:  # sent in sequence when the network is back
            sent = outage[1] + timedelta(seconds=sequence % 60)
        metrics = tuple(metric.name for metric in METRICS if (sequence, metric.name) in injected)
        reading = Telemetry(
            device=device,
            site=site,
            sequence=sequence,
            measured_at=_milliseconds(measured + skew),
            sent_at=_milliseconds(sent),
            temperature=round(values[0], 2),
            vibration=round(max(0.0, values[1]), 3),
            battery=round(min(100.0, max(0.0, values[2])), 1),
        )
        payload, kind = reading.model_dump_json().encode(), "reading"
        if rng.random() < _CORRUPT and not metrics:
            payload, kind, too_late = _garbled(rng, reading, payload), "rejected", False
        channel = f"{TELEMETRY_CHANNEL}/{site}/{device}"
        yield Sent((sent - START) / plan.span, channel, payload, device, sequence, kind, metrics, too_late)


def _milliseconds(moment: datetime) -> datetime:
    return moment.replace(microsecond=moment.microsecond // 1000 * 1000)


def _values(rng: random.Random, at: datetime, character: Sequence[float]) -> Iterator[float]:
    """Yield temperature, vibration and battery, with day and night, and noise."""
    hour = at.hour + at.minute / 60 + at.second / 3600
    warmth = math.cos((hour - 15) / 24 * math.tau)  # warmest at three
    work = 0.5 + 0.5 * math.cos((hour - 13) / 24 * math.tau)  # busiest at one
    sun = math.cos((hour - 17) / 24 * math.tau)  # charged from the sun until five
    temperature, vibration, battery = character
    yield temperature + 5 * warmth + rng.gauss(0, 0.25)
    yield vibration * (0.6 + 0.8 * work) + rng.gauss(0, 0.12)
    yield battery + 5 * sun + rng.gauss(0, 0.3)


def _injections(rng: random.Random, plan: FleetPlan) -> dict[tuple[int, str], float]:
    """Return the values to add to readings: spikes, bursts and sags that the pipeline should find."""
    found: dict[tuple[int, str], float] = {}
    for _ in range(rng.choices((0, 1, 2), (5, 4, 1))[0]):
        name, low, high, length = rng.choice(
            (("temperature", 5.0, 22.0, 2), ("vibration", 2.0, 18.0, 4), ("battery", -45.0, -7.0, 1))
        )
        first = rng.randrange(_QUIET, max(_QUIET + 1, plan.readings - length))
        for sequence in range(first, min(plan.readings, first + rng.randint(1, length))):
            found[sequence, name] = rng.uniform(low, high)
    return found


def _outage(rng: random.Random, plan: FleetPlan) -> tuple[datetime, datetime] | None:
    """Return begin and end of the outage of a device, if it has one."""
    begin, length = START + rng.uniform(0.2, 0.8) * plan.span, timedelta(minutes=rng.uniform(20, 50))
    return (begin, begin + length) if rng.random() < _OUTAGES else None


def _delay(rng: random.Random, plan: FleetPlan, measured: datetime) -> tuple[timedelta, bool]:
    """Return the delay of a reading, and whether that is beyond the watermark."""
    usual, late, hours = rng.lognormvariate(1.5, 0.8), rng.expovariate(1 / 300) + 30, rng.uniform(5, 9)
    chance = rng.random()
    held_up = timedelta(hours=hours)
    if chance < _TOO_LATE and measured > START + _SETTLING and measured + held_up < START + plan.span:
        return held_up, True
    return timedelta(seconds=min(late, 1500.0) if chance < _TOO_LATE + _LATE else usual), False


def _garbled(rng: random.Random, reading: Telemetry, payload: bytes) -> bytes:
    """Return a payload that is no valid reading. It keeps device and number, so that it can be found."""
    fields: dict[str, Any] = json.loads(payload)
    damage = rng.randrange(5)
    if damage == 0:
        return payload[: -rng.randint(1, 20)]  # cut off
    if damage == 1:
        return b"\xff\xfe\x00" + f"{reading.device}/{reading.sequence}".encode()  # no text at all
    if damage == 2:
        fields["temperature"] = "ERR"
    elif damage == 3:
        fields["vibration"] = -1.0
    else:
        del fields["measured_at"]
    return json.dumps(fields).encode()


# --- the process --------------------------------------------------------------------------------------------


def digest(payload: bytes) -> str:
    """What a message is known by in the ledger: of the text that a table has of it."""
    return hashlib.sha256(payload.decode(errors="replace").encode()).hexdigest()


def publish(url: str, plan: FleetPlan, ledger: Path, stop: threading.Event) -> None:
    """Publish all messages with QoS 1, in real time, until ``stop``; write the ledger; report progress to stdout."""
    told = began = time.monotonic()
    accepted = failed = 0
    waiting: list[tuple[Sent, Promise[None]]] = []
    with messaging.connect(url, client_id="fleet") as m, ledger.open("w", encoding="utf-8") as file:

        def settle(upto: int) -> None:
            nonlocal accepted, failed
            for message, promise in waiting[:upto]:
                try:
                    promise.result(30)
                except messaging.MessagingError as error:
                    failed += 1
                    _tell({"failed": failed, "error": str(error)})
                else:
                    accepted += 1
                    file.write(json.dumps(_entry(message)) + "\n")
            del waiting[:upto]

        for message in simulate(plan):
            while (early := began + message.at * plan.seconds - time.monotonic()) > 0 and not stop.is_set():
                settle(sum(promise.done() for _, promise in waiting))
                time.sleep(min(early, 0.05))
            if stop.is_set():
                break
            waiting.append((message, m.publish(message.channel, message.payload, qos=1)))
            if len(waiting) >= _WINDOW:
                settle(_WINDOW // 2)
            if time.monotonic() - told >= _PROGRESS:
                told = time.monotonic()
                _tell({"accepted": accepted})
        settle(len(waiting))
    _tell({"accepted": accepted, "failed": failed, "ended": True})


def _entry(message: Sent) -> dict[str, Any]:
    return {
        "device": message.device,
        "sequence": message.sequence,
        "kind": message.kind,
        "digest": digest(message.payload),
        "injected": list(message.injected),
        "too_late": message.too_late,
    }


def _tell(news: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(news) + "\n")
    sys.stdout.flush()


def _set_at_end_of_stdin(stop: threading.Event) -> None:
    while os.read(0, 4096):
        pass
    stop.set()


def main() -> None:
    """Publish until the run is over; with ``--end-with-stdin``, until stdin ends.

    By default stdin is not read: the stdin of a service or of ``nohup`` has ended before the program starts.
    """
    parser = argparse.ArgumentParser(description="Publish the telemetry of a simulated fleet.")
    parser.add_argument("url", help="broker, such as mqtt://localhost")
    parser.add_argument("ledger", type=Path, help="file for the messages that the broker has accepted")
    defaults = asdict(FleetPlan())
    for name, default in defaults.items():
        parser.add_argument(f"--{name}", type=type(default), default=default)
    parser.add_argument(
        "--end-with-stdin", action="store_true", help="end early when stdin does: for a program that starts this one"
    )
    given = parser.parse_args()
    stop = threading.Event()
    if given.end_with_stdin:
        threading.Thread(target=_set_at_end_of_stdin, args=(stop,), daemon=True).start()
    publish(given.url, FleetPlan(**{name: getattr(given, name) for name in defaults}), given.ledger, stop)


if __name__ == "__main__":
    main()
