"""A million events in a mailbox that is killed: opening it, and its memory. 100,000 leases: renewing them.

The events are stored in batches of 256, as an agent sends them. The process is killed with SIGKILL when the last batch
is acknowledged. Each opening is a process of its own; it ends when the first event is there. The leases are renewed
by their landlord in the same process, and by one in another process over MQTT.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
import tracemalloc
from pathlib import Path
from typing import Final

import messaging
from benchmarks import mqtt
from benchmarks.flat import resident
from messaging.leases import Landlord, LeaseServer, lease_from_value, lease_time, lease_to_value, renew_all
from messaging.remoteevent import EventMailbox, RemoteEvent
from messaging.testing.brokers import Mosquitto

_ROOT: Final = Path(__file__).parent.parent
_BATCH: Final = 256
_MIB: Final = 2**20
#: seconds
_RECOVERY: Final = 5.0
_RENEWAL: Final = 5.0
#: bytes of a lease
_LEASE: Final = 1024
_OPENINGS: Final = 5


def fill(folder: str, count: int) -> None:
    """Store events, print the id of the registration, and wait to be killed."""
    with EventMailbox(folder, max_bytes=None) as mailbox:
        box = mailbox.register(86_400.0)
        before, began = resident(), time.monotonic()
        for first in range(1, count + 1, _BATCH):
            events = [
                RemoteEvent("boiler", "overheated", number, {"room": "cellar"})
                for number in range(first, min(first + _BATCH, count + 1))
            ]
            stored = 0
            while stored < len(events):
                stored += len(box.listener.deliver(events[stored:]).result(60))
        rate, grown = count / (time.monotonic() - began), (resident() - before) / _MIB
        print(box.id, f"{rate:,.0f} events/s stored, memory {grown:+.1f} MiB", flush=True)
        sys.stdin.read()


def reopen(folder: str, registration: str, count: int) -> None:
    """Open the mailbox; print the seconds until the first event is there, and the bytes that it takes."""
    before, began = resident(), time.perf_counter()
    with EventMailbox(folder, max_bytes=None) as mailbox:
        box = mailbox.registration(registration)
        with box.remote_events() as iterator:
            event = iterator.next()
        seconds = time.perf_counter() - began
        assert event is not None
        assert len(box) >= count - 2 * _OPENINGS, "events are missing"
        print(seconds, resident() - before, flush=True)


def _recovery(folder: Path, count: int) -> None:
    command = [sys.executable, "-m", "benchmarks.remote_flat"]
    with subprocess.Popen(
        [*command, "fill", str(folder), str(count)], cwd=_ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        registration, _, figures = process.stdout.readline().partition(" ")
        process.kill()
    print(f"{count:,} events in a mailbox: {figures.strip()}")
    times, sizes = [], []
    for _ in range(_OPENINGS):
        done = subprocess.run(
            [*command, "reopen", str(folder), registration, str(count)],
            check=True, capture_output=True, text=True, cwd=_ROOT,
        )  # fmt: skip
        seconds, size = done.stdout.split()
        times.append(float(seconds))
        sizes.append(int(size))
    median = statistics.median(times)
    print(f"after a kill it opens in {median:.3f} s (max {max(times):.3f}), with {max(sizes) / _MIB:+.1f} MiB")
    verdict = "met" if max(times) < _RECOVERY else "MISSED"
    print(f"target {verdict:7} mailbox of {count:,} events: {_RECOVERY:g} s, is {max(times):.3f} s")


def _leases(count: int, runs: int) -> None:
    with Landlord(max_leases=2 * count) as landlord:
        tracemalloc.start()
        before = tracemalloc.get_traced_memory()[0]
        leases = [landlord.grant(600.0, lambda _end: None) for _ in range(count)]
        size = (tracemalloc.get_traced_memory()[0] - before) / count
        tracemalloc.stop()
        times = []
        for _ in range(runs):
            began = time.perf_counter()
            renew_all(dict.fromkeys(leases, 600.0)).result()
            times.append(time.perf_counter() - began)
        _tell(f"{count:,} leases, renewed by their landlord", times)
        verdict = "met" if size <= _LEASE else "MISSED"
        print(f"target {verdict:7} bytes of a lease: {_LEASE}, is {size:.0f}")
        with (
            Mosquitto(mqtt.BROKER) as broker,
            messaging.connect(f"{broker.url}?version=5") as here,
            messaging.connect(f"{broker.url}?version=5") as there,
            LeaseServer(there, "bench/leases", landlord) as server,
        ):
            server.ready.result(30)
            now = lease_time()
            remote = [
                lease_from_value(here, "bench/leases", lease_to_value(each), 600.0, now, timeout=60) for each in leases
            ]
            times = []
            for _ in range(runs):
                began = time.perf_counter()
                renew_all(dict.fromkeys(remote, 600.0)).result(60)
                times.append(time.perf_counter() - began)
            _tell(f"{count:,} leases, renewed over MQTT", times)


def _tell(what: str, times: list[float]) -> None:
    print(f"{what}: {statistics.median(times):.2f} s (max {max(times):.2f})")
    verdict = "met" if max(times) <= _RENEWAL else "MISSED"
    print(f"target {verdict:7} {what}: {_RENEWAL:g} s, is {max(times):.2f} s")


def run(arguments: argparse.Namespace) -> None:
    """Run and print."""
    count = arguments.messages or (20_000 if arguments.quick else 1_000_000)
    arguments.results.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=arguments.results) as folder:
        _recovery(Path(folder, "mailbox"), count)
    _leases(max(100, count // 10), arguments.runs)


if __name__ == "__main__":
    if sys.argv[1] == "fill":
        fill(sys.argv[2], int(sys.argv[3]))
    else:
        reopen(sys.argv[2], sys.argv[3], int(sys.argv[4]))
