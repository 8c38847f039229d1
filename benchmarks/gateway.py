"""Messages a second through a gateway with its durable journal, beside the bare adapters and a bridge of mosquitto.

The messages wait at the source's broker, in the session of the one that forwards them, before it starts: so no
publisher takes part. The rate is that of the arrivals at the target, from the first to the last. 100-byte payloads,
QoS 1, confirms; the gateway syncs each message to the disk before it acknowledges it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import messaging
from benchmarks import report
from messaging import MessageContext
from messaging.testing.brokers import Broker, Mosquitto, RabbitMQ

PAYLOAD: Final = b"x" * 100
_PATIENCE: Final = 120.0
#: mosquitto as a broker that sends without waiting for each acknowledgement
FAST: Final = ("max_inflight_messages 1000",)
_TARGETS: Final = ("amqp", "mqtt")


class Arrivals:
    """Counts what arrives at the target."""

    def __init__(self, broker: Broker, count: int, channel: str = "bench/out") -> None:
        self._count = count
        self.seen = 0
        self._first = 0.0
        self._done = threading.Event()
        self.rate = 0.0
        self._m = messaging.connect(broker.url)
        options: dict[str, Any] = (
            {"queue": "bench", "auto_acknowledge": True} if broker.url.startswith("amqp") else {"qos": 0}
        )
        stream = self._m.subscribe(channel, **options)
        stream.subscribe(self._note)

    def _note(self, _: object) -> None:
        if not self.seen:
            self._first = time.perf_counter()
        self.seen += 1
        if self.seen == self._count:
            self.rate = (self._count - 1) / (time.perf_counter() - self._first)
            self._done.set()

    def wait(self) -> float:
        """Return messages a second, once all have arrived."""
        if not self._done.wait(_PATIENCE):
            raise SystemExit(f"{self.seen} of {self._count} messages arrived within {_PATIENCE:g} s")
        return self.rate

    def close(self) -> None:
        """Disconnect."""
        self._m.close()


def settings(source: str, target: str, data: Path) -> dict[str, Any]:
    """Return the settings of a gateway with one route."""
    return {
        "name": "bench",
        "data": str(data),
        "instances": {"plant": {"url": source}, "cloud": {"url": target}},
        "routes": {
            "r": {
                "from": {"instance": "plant", "channel": "bench/in"},
                "to": {"instance": "cloud", "channel": "bench/out"},
                "buffer": {"full": "block", "max_bytes": "4 GiB"},
            }
        },
    }


def subscribe(source: Broker) -> None:
    """Make the session in which the messages wait."""
    with messaging.connect(source.url, name="bench-plant", keep_session=True) as m:
        stream = m.subscription.subscribe(
            MessageContext("bench/in", extensions={"qos": 1}), keep_subscription=True, acknowledge="manual"
        )
        stream.ready.result(10)


def fill(source: Broker, count: int) -> None:
    """Publish the messages, and wait until the broker has them."""
    with messaging.connect(source.url, outbox_size=count + 1, timeout=_PATIENCE) as m:
        promises = [m.publish("bench/in", PAYLOAD, qos=1) for _ in range(count)]
        for promise in promises:
            promise.result(_PATIENCE)


@contextlib.contextmanager
def process(kind: str, chosen: dict[str, Any], folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Run a forwarder."""
    file = folder / f"{kind}.json"
    file.write_text(json.dumps(chosen))
    running = subprocess.Popen([sys.executable, "-m", "benchmarks.peers.forwarder", kind, str(file)])
    try:
        yield running
    finally:
        running.kill()
        running.wait()


def forwarded(kind: str, target_kind: str, count: int) -> float:
    """Return messages a second of ``gateway`` or ``bare``."""
    with contextlib.ExitStack() as stack:
        source = stack.enter_context(Mosquitto(FAST))
        target = stack.enter_context(_target(target_kind))
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        subscribe(source)
        fill(source, count)
        arrivals = Arrivals(target, count)
        stack.callback(arrivals.close)
        stack.enter_context(process(kind, settings(source.url, target.url, folder / "data"), folder))
        return arrivals.wait()


def bridged(count: int) -> float:
    """Return messages a second of a bridge of mosquitto, which keeps its queue in memory."""
    with contextlib.ExitStack() as stack:
        target = stack.enter_context(Mosquitto(FAST))
        target_port = target.port
        target.stop()
        source = stack.enter_context(
            Mosquitto(
                [
                    *FAST,
                    "connection bench",
                    f"address 127.0.0.1:{target_port}",
                    'topic bench/in out 1 "" ""',
                    "bridge_protocol_version mqttv50",
                    "cleansession false",
                    "restart_timeout 1 2",
                    "notifications false",
                ]
            )
        )
        fill(source, count)
        target.start()
        arrivals = Arrivals(target, count, "bench/in")
        stack.callback(arrivals.close)
        return arrivals.wait()


def _target(kind: str) -> Broker:
    return RabbitMQ() if kind == "amqp" else Mosquitto(FAST)


def run(arguments: argparse.Namespace) -> None:
    """Run and print."""
    count = arguments.messages or (2_000 if arguments.quick else 60_000)
    runs = 1 if arguments.quick else arguments.runs
    print(f"messages/s, {count} messages of {len(PAYLOAD)} bytes, median of {runs}; {report.machine()}")
    for target in _TARGETS:
        found: dict[str, list[float]] = {"gateway": [], "bare": []}
        for _ in range(runs):  # one after the other, so that a slow minute hits both
            for kind, rates in found.items():
                rates.append(forwarded(kind, target, count))
        print(f"\n{'mqtt -> ' + target:36} {'median':>10} {'min':>10} {'max':>10}")
        for kind, rates in found.items():
            _show({"gateway": "gateway, journal synced", "bare": "bare adapters, nothing stored"}[kind], rates)
        if target == "mqtt":
            _show("bridge of mosquitto, in memory", [bridged(count) for _ in range(runs)])
        ratio = statistics.median(ours / bare for ours, bare in zip(found["gateway"], found["bare"], strict=True))
        print(f"gateway / bare adapters: {ratio:.2f}")


def _show(name: str, rates: list[float]) -> None:
    print(f"{name:36} {statistics.median(rates):10,.0f} {min(rates):10,.0f} {max(rates):10,.0f}")
