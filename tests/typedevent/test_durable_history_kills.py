"""A durable history whose process is killed: at most the events of the loss window are lost, no number is reused."""

from __future__ import annotations

import itertools
import random
import time
from pathlib import Path
from typing import NamedTuple

import pytest

from messaging.services import ServiceRegistry
from messaging.testing.waiting import PATIENCE, eventually
from messaging.typedevent import DurableHistory, MonitorEvent, TypedEventBus
from tests.forking import ForkedProcess

PROGRAM = """
import os, random, sys, threading, time
from messaging.services import ServiceRegistry
from messaging.typedevent import DurableHistory, RangePolicy, TypedEventBus

path, run, window = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
bus = TypedEventBus(
    ServiceRegistry(), history={"a/*": RangePolicy.at_most(50)}, durable_history=DurableHistory(path, window=window)
)
bus.monitor.monitor_events().subscribe(lambda event: os.write(1, b"s %d\\n" % event.sequence))

def publish(thread):
    choose = random.Random(f"{run}/{thread}")
    n = 0
    while True:
        for _ in range(choose.choice((1, 2, 30))):
            bus.deliver_untyped(f"a/{thread}", {"run": run, "n": n, "text": "x" * choose.randrange(200)})
            os.write(1, b"n %d %d %.6f\\n" % (thread, n, time.monotonic()))
            n += 1
        time.sleep(choose.random() / 200)  # sleeps: it publishes at random times until it is killed

def beat():
    while True:
        time.sleep(0.01)  # sleeps: how much later than this it goes on tells how busy the machine is
        os.write(1, b"b %.6f\\n" % time.monotonic())

threading.Thread(target=beat, daemon=True).start()
for thread in range(2):
    threading.Thread(target=publish, args=(thread,), daemon=True).start()
time.sleep(60)  # sleeps: until it is killed
"""


class Run(NamedTuple):
    """What a killed run has said."""

    #: by thread: the time after each publication, in the order of its events
    published: list[list[float]]
    #: sequences of events that an observer has received
    seen: set[int]
    killed: float
    #: longest time in which a thread that wanted to run did not, seconds
    late: float


def killed(path: Path, out: Path, run: int, window: float, after: float) -> Run:
    """Run the program until it has published for ``after`` seconds."""
    with out.open("wb") as writing:
        process = ForkedProcess(PROGRAM, (str(path), str(run), str(window)), stdout=writing)
        with process.stdin, process.stderr:
            eventually(lambda: out.stat().st_size > 0)
            time.sleep(after)  # sleeps: the process is killed at a random time
            at = time.monotonic()
            process.kill()
            process.wait(PATIENCE)
    published: list[list[float]] = [[], []]
    seen = set()
    beats: list[float] = []
    for line in out.read_bytes().splitlines(keepends=True):
        if not line.endswith(b"\n"):
            continue
        kind, *rest = line.split()
        if kind == b"s":
            seen.add(int(rest[0]))
        elif kind == b"b":
            beats.append(float(rest[0]))
        else:
            of = published[int(rest[0])]
            assert int(rest[1]) == len(of)
            of.append(float(rest[2]))
    late = max((after - before for before, after in itertools.pairwise([*beats, at])), default=at)
    return Run(published, seen, at, late)


def read(path: Path) -> list[MonitorEvent]:
    durable = DurableHistory(path, topics="none")
    found: list[MonitorEvent] = []
    with TypedEventBus(ServiceRegistry(), durable_history=durable) as bus:
        bus.monitor.replay(0).subscribe(found.append)
        bus.monitor.flush().result(PATIENCE)
    return found


@pytest.mark.slow  # simulated worlds hold the same promise
@pytest.mark.parametrize(("window", "seed"), [(0.0, 1), (0.1, 2), (0.4, 3)])
def test_a_killed_process_loses_at_most_the_window(tmp_path: Path, window: float, seed: int) -> None:
    choose = random.Random(seed)
    path = tmp_path / "history"
    used: set[int] = set()
    lost_for = []
    for number in range(4):
        run = killed(path, tmp_path / f"out{number}", number, window, 0.1 + choose.random() * 0.5)
        events = read(path)
        sequences = [each.sequence for each in events]
        assert sequences == sorted({*sequences})
        mine = [each for each in events if each.event_data["run"] == number]
        assert used.isdisjoint(each.sequence for each in mine), "a number is used again"
        assert used.isdisjoint(run.seen), "a number is used again"
        used |= run.seen | {each.sequence for each in mine}
        for thread, times in enumerate(run.published):
            stored = [each.event_data["n"] for each in mine if each.topic == f"a/{thread}"]
            assert stored == [*range(len(stored))], "an event in the middle is lost"
            if len(stored) < len(times):
                lost_for.append(run.killed - times[len(stored)] - 5 * run.late)
        assert {each.event_data["run"] for each in events} <= {*range(number + 1)}
    # the disk takes some time, too; and several threads of a busy machine, one after the other
    assert max(lost_for, default=0.0) <= window + 0.3
    assert len(used) > 100
