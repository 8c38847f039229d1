"""Random faults at random times, for as long as one likes, under traffic whose ledger must come out right.

``python -m tests.faults.soak --minutes 60 --protocol both --seed 7`` (or ``make soak``). In rounds: faults for a while,
each outlived before the next; then everything arrives, the ledger is compared and begun anew, and what the process
holds is measured: memory, open files, threads, tasks of the engine. From the warm-up on none of it may grow. With two
protocols both have their faults at the same time, in one process. The same seed makes the same choices.

Ends with status 1, and says why, if anything was lost, came unexpected or out of order, or grew.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import gc
import json
import random
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from messaging import Message
from messaging.execution import engine
from messaging.testing.brokers import Broker, Mosquitto, RabbitMQ
from messaging.testing.proxy import Flow, Proxy
from messaging.testing.waiting import PATIENCE, eventually
from tests.faults.ledger import Verdict
from tests.faults.scenario import AMQP, MQTT5, MQTT311, Scene, state

#: seconds of faults in a round, by default; rounds that count for nothing yet, as caches and pools of threads fill up
ROUND: Final = 20.0
WARM_UP: Final = 3
#: faults in a round, at least: on a busy machine each may take long
LEAST: Final = 5
#: what memory may vary by, bytes: the last rounds against the first ones after the warm-up
MEMORY_SLACK: Final = 12 * 2**20
#: how long counts may take to come back to what they were, seconds
SETTLING: Final = 2 * PATIENCE
#: mosquitto writes its memory to disk every second: saving every change would leave it time for little else
SAVES: Final = ("autosave_on_changes false", "autosave_interval 1")
#: how much earlier than the kill of a broker a message may have been confirmed that it loses, seconds
UNSAVED: Final = 2.5

PROFILES: Final = {"mqtt": dataclasses.replace(MQTT5, ahead=400), "mqtt311": MQTT311, "amqp": AMQP}
#: notices a half-open connection within a few seconds
_SETTINGS: Final = {"mqtt": {"keepalive": 1}, "mqtt311": {"keepalive": 1}, "amqp": {"heartbeat": 1}}


@dataclass(frozen=True)
class Sample:
    """What the process holds, between two rounds."""

    at: float
    memory: int
    files: int
    threads: int
    tasks: int


def sample(start: float) -> Sample:
    """Measure now."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return Sample(round(time.monotonic() - start, 1), pages * 4096, open_files(), threading.active_count(), tasks())


def open_files() -> int:
    """Descriptors of this process."""
    return len([*Path("/proc/self/fd").iterdir()])


def tasks() -> int:
    """Tasks on the engine's loop."""

    async def count() -> int:
        return len(asyncio.all_tasks()) - 1  # without this one

    return asyncio.run_coroutine_threadsafe(count(), engine().loop).result(PATIENCE)


class Driver:
    """One protocol: a broker, the traffic through it, and what happens to them.

    Args:
        protocol: a key of ``PROFILES``.
        seed: of the choices.
        folder: for the publishers' logs.

    Attributes:
        faults: how often each was outlived.
        verdicts: one of each round.
    """

    def __init__(self, protocol: str, seed: int, folder: Path) -> None:
        self.protocol = protocol
        self.faults: Counter[str] = Counter()
        self.verdicts: list[Verdict] = []
        self._random = random.Random(f"{seed}-{protocol}")
        self._folder = folder
        self._slow = threading.Event()
        self._slow.set()
        self._stack = contextlib.ExitStack()
        #: when the broker was killed, in this round
        self._kills: list[float] = []

    def __enter__(self) -> Driver:
        with contextlib.ExitStack() as stack:
            broker = RabbitMQ() if self.protocol == "amqp" else Mosquitto(SAVES, persistence=True)
            self._broker: Broker = stack.enter_context(broker)
            settings: dict[str, Any] = {**_SETTINGS[self.protocol], "connect_timeout": 2.0}
            self._scene = stack.enter_context(
                Scene(PROFILES[self.protocol], self._broker, self._folder, before=self._consume, pace=0.03, **settings)
            )
            self._stack = stack.pop_all()
        self._scene.stop()
        return self

    def __exit__(self, *_: object) -> None:
        self._slow.set()
        self._stack.close()

    def _consume(self, _: Message) -> None:
        self._slow.wait(PATIENCE)

    def settle(self) -> None:
        """Wait until every instance is connected: each has all its sockets then."""
        instances = [self._scene.receiver, *(publisher.instance for publisher in self._scene.publishers)]
        eventually(lambda: all(state(m) == "connected" for m in instances), "all instances are connected")

    # --- a round

    def round(self, seconds: float) -> None:
        """Have faults for so long, and at least :data:`LEAST`, then let everything arrive, and compare.

        Raises:
            AssertionError: a promise was broken, or work did not go on after a fault.
        """
        scene = self._scene
        self._kills.clear()
        scene.begin()
        scene.progress()
        end = time.monotonic() + seconds
        enough = self.faults.total() + LEAST
        while time.monotonic() < end or self.faults.total() < enough:
            time.sleep(self._random.uniform(0.0, 1.0))  # sleeps: a random time
            names, weights = zip(*FAULTS[self.protocol == "amqp"].items(), strict=True)
            (name,) = self._random.choices(names, weights)
            try:
                getattr(self, name)()
                scene.progress()
            except AssertionError as error:
                raise AssertionError(f"{self.protocol}, {name}: {error}") from error
            self.faults[name] += 1
        verdict = scene.finish(may_lose=bool(self._kills) and self.protocol != "amqp")
        self.verdicts.append(verdict)
        self._check(verdict)
        for publisher in scene.publishers:
            publisher.path.unlink()

    def _check(self, verdict: Verdict) -> None:
        histories = self._scene.histories()
        for stamp in verdict.lost:
            confirmed = histories[stamp.publisher].confirmed[stamp.sequence]
            assert any(0 <= kill - confirmed < UNSAVED for kill in self._kills), f"lost {stamp}: {verdict}"

    # --- faults

    def _proxy(self) -> Proxy:
        return self._random.choice([self._scene.sending, self._scene.receiving])

    def _flow(self) -> Flow:
        proxy = self._proxy()
        return self._random.choice([proxy.up, proxy.down])

    def sever(self) -> None:
        """Every connection of one side is reset."""
        proxy = self._proxy()
        self._scene.outlived(proxy.sever, proxy)

    def reset_client(self) -> None:
        """The clients of one side see a reset, the broker an end."""
        proxy = self._proxy()
        self._scene.outlived(lambda: proxy.reset("client"), proxy)

    def reset_broker(self) -> None:
        """The other way round."""
        proxy = self._proxy()
        self._scene.outlived(lambda: proxy.reset("broker"), proxy)

    def cut(self) -> None:
        """A connection ends anywhere, in a frame as a rule."""
        flow = self._flow()
        cuts = flow.cuts
        flow.cut_after(self._random.randint(1, 5000), reset=self._random.random() < 0.5)
        eventually(lambda: flow.cuts > cuts, "the cut")

    def delay(self) -> None:
        """A slow line for a while."""
        flow = self._flow()
        flow.shape(latency=self._random.uniform(0.01, 0.1), rate=self._random.choice([0, 50_000]))
        time.sleep(self._random.uniform(0.5, 2.0))  # sleeps: a random time
        flow.shape()

    def slice(self) -> None:
        """Small pieces for a while."""
        flow = self._flow()
        flow.shape(piece=self._random.choice([1, 3, 100]))
        time.sleep(self._random.uniform(0.2, 1.0))  # sleeps: a random time
        flow.shape()

    def hold(self) -> None:
        """Nothing comes through for a while, and then all of it, unless it took too long."""
        flow = self._flow()
        flow.hold()
        time.sleep(self._random.uniform(0.2, 3.0))  # sleeps: a random time
        flow.release()

    def half_open(self) -> None:
        """A half-open connection, until it is noticed."""
        scene, proxy = self._scene, self._proxy()
        sending = proxy is scene.sending
        instances = [publisher.instance for publisher in scene.publishers] if sending else [scene.receiver]
        for flow in (proxy.up, proxy.down):
            flow.swallow()
        eventually(lambda: any(state(m) != "connected" for m in instances), "the loss is noticed")
        if isinstance(self._broker, RabbitMQ) and not sending:
            # by the broker, too: a new consumer would get what follows before that takes back what the old one had
            ctl = self._broker.ctl
            eventually(lambda: not ctl("list_consumers", "--silent").strip(), "the broker gives up the consumer")
        for flow in (proxy.up, proxy.down):
            flow.restore()

    def refuse(self) -> None:
        """Connections are refused for a while."""
        proxy = self._proxy()
        proxy.refuse()
        time.sleep(self._random.uniform(0.2, 2.0))  # sleeps: a random time
        proxy.accept()

    def slow_consumer(self) -> None:
        """The receiver takes its time."""
        self._slow.clear()
        time.sleep(self._random.uniform(0.2, 2.0))  # sleeps: a random time
        self._slow.set()

    def replace_receiver(self) -> None:
        """The receiver is closed, and another one takes its place."""
        self._scene.receiver.close()
        self._scene.receive_anew()

    def kill_broker(self) -> None:
        """SIGKILL, and a new start on the same data."""
        self._broker.kill()
        self._kills.append(time.monotonic())
        time.sleep(self._random.uniform(0.0, 1.0))  # sleeps: a random time
        self._broker.start()

    def memory_alarm(self) -> None:
        """RabbitMQ takes no messages for a while."""
        assert isinstance(self._broker, RabbitMQ)
        self._broker.ctl("set_vm_memory_high_watermark", "0.00001")
        time.sleep(self._random.uniform(0.2, 1.0))  # sleeps: a random time
        self._broker.ctl("set_vm_memory_high_watermark", "0.8")


_ANYWHERE: Final = {
    "sever": 4, "reset_client": 2, "reset_broker": 2, "cut": 6, "delay": 3, "slice": 2, "hold": 3, "half_open": 1,
    "refuse": 2, "slow_consumer": 2, "replace_receiver": 2,
}  # fmt: skip
#: whether it is AMQP -> method -> how likely it is
FAULTS: Final = {False: {**_ANYWHERE, "kill_broker": 2}, True: {**_ANYWHERE, "kill_broker": 1, "memory_alarm": 1}}


@dataclass
class Report:
    """What came of it."""

    seed: int
    protocols: list[str]
    rounds: int = 0
    seconds: float = 0.0
    samples: list[Sample] = field(default_factory=list)
    faults: dict[str, dict[str, int]] = field(default_factory=dict)
    ledgers: dict[str, dict[str, int]] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        lines = [f"{self.rounds} rounds in {self.seconds / 60:.1f} minutes, seed {self.seed}"]
        for protocol in self.protocols:
            faults = ", ".join(f"{name} {count}" for name, count in sorted(self.faults[protocol].items()))
            ledger = ", ".join(f"{name} {count:,}" for name, count in self.ledgers[protocol].items())
            lines += [f"{protocol}: {ledger}", f"{protocol} outlived: {faults}"]
        for name in ("memory", "files", "threads", "tasks"):
            values = [getattr(each, name) for each in self.samples]
            shown = [f"{value / 2**20:.1f} MiB" if name == "memory" else str(value) for value in values]
            lines.append(f"{name}: {' '.join(shown[:: max(1, len(shown) // 12)])}")
        return "\n".join([*lines, *(f"FAILED: {problem}" for problem in self.problems)])


def soak(minutes: float, seconds: float, protocols: list[str], seed: int, say: Callable[[str], object]) -> Report:
    """Run, in rounds of so many seconds; what went wrong is in ``problems`` of the report."""
    report = Report(seed, protocols)
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        drivers = [stack.enter_context(Driver(protocol, seed, Path(folder))) for protocol in protocols]
        # at least one round is measured
        while not report.problems and (time.monotonic() - start < 60 * minutes or report.rounds <= WARM_UP):
            report.problems += _round(drivers, seconds)
            report.rounds += 1
            if not report.problems:
                for driver in drivers:
                    driver.settle()
                report.problems += _measure(report, start)
            say(f"round {report.rounds}, {(time.monotonic() - start) / 60:.1f} minutes: {report.samples[-1:]}")
        report.seconds = time.monotonic() - start
        for driver in drivers:
            report.faults[driver.protocol] = dict(driver.faults)
            report.ledgers[driver.protocol] = _totals(driver.verdicts)
    report.problems += growth(report.samples)
    return report


def _round(drivers: list[Driver], seconds: float) -> list[str]:
    """One for each driver, at the same time; in words, what went wrong."""
    problems: list[str] = []

    def run(driver: Driver) -> None:
        try:
            driver.round(seconds)
        except Exception as error:  # noqa: BLE001  # told in the report, whatever it is
            problems.append(f"{driver.protocol}: {type(error).__name__}: {error}")

    threads = [threading.Thread(target=run, args=(driver,)) for driver in drivers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return problems


def _measure(report: Report, start: float) -> list[str]:
    """Take a sample, once the counts are back at what they were in the warm-up; in words, which of them are not."""
    known = report.samples[:WARM_UP]
    found: list[str] = []

    def settled() -> bool:
        now = sample(start)
        found[:] = counts_grown(now, known) if len(known) == WARM_UP else ()
        report.samples[len(before) :] = [now]
        return not found

    before = report.samples.copy()
    with contextlib.suppress(AssertionError):
        eventually(settled, patience=SETTLING)
    return found


def counts_grown(now: Sample, known: list[Sample]) -> Iterator[str]:
    """In words, what there is more of than there ever was."""
    for name in ("files", "threads", "tasks"):
        most = max(getattr(each, name) for each in known)
        if getattr(now, name) > most:
            yield f"{name} grew from {most} to {getattr(now, name)}"


def growth(samples: list[Sample]) -> Iterator[str]:
    """In words, if memory grew: the median of the last third against that of the first, after the warm-up."""
    memory = [each.memory for each in samples[WARM_UP:]]
    third = len(memory) // 3
    if third:
        first, last = statistics.median(memory[:third]), statistics.median(memory[-third:])
        if last > first + MEMORY_SLACK:
            yield f"memory grew from {first / 2**20:.1f} to {last / 2**20:.1f} MiB"


def _totals(verdicts: list[Verdict]) -> dict[str, int]:
    return {
        "confirmed": sum(each.confirmed for each in verdicts),
        "received": sum(each.received for each in verdicts),
        "failed": sum(sum(each.failed.values()) for each in verdicts),
        "duplicates": sum(each.duplicates for each in verdicts),
        "lost": sum(len(each.lost) for each in verdicts),
        "unexpected": sum(len(each.unexpected) for each in verdicts),
        "out of order": sum(len(each.disorder) for each in verdicts),
    }


def main() -> int:
    """The command; see the module."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--protocol", choices=[*PROFILES, "both"], default="both", help="both: mqtt and amqp")
    parser.add_argument("--round", type=float, default=ROUND, help="seconds of faults between two measurements")
    parser.add_argument("--seed", type=int, default=random.randrange(10_000))
    parser.add_argument("--json", type=Path, help="file for the report")
    given = parser.parse_args()
    protocols = ["mqtt", "amqp"] if given.protocol == "both" else [given.protocol]

    def say(line: str) -> None:
        sys.stderr.write(f"{line}\n")

    report = soak(given.minutes, given.round, protocols, given.seed, say)
    sys.stdout.write(f"{report}\n")
    if given.json is not None:
        given.json.write_text(json.dumps(dataclasses.asdict(report), indent=2) + "\n")
    return 1 if report.problems else 0


if __name__ == "__main__":
    sys.exit(main())
