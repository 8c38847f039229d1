"""What the process of a peer is asked to do, and how it answers.

The command line says what to do. On its standard output the process prints ``READY`` once it is connected (and
subscribed), and at the end a line of JSON. On its standard input it gets ``GO`` when both sides are ready, and a
subscriber or responder gets ``PUBLISHED`` when the other is through: what has not come a moment later is lost.

Times are those of ``time.monotonic``, which all processes of a machine share. A payload begins with eight bytes: its
number, or, where latency is measured (``--rate``), when it was due in nanoseconds.
"""

from __future__ import annotations

import argparse
import asyncio
import faulthandler
import functools
import json
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

TOPIC: Final = "benchmark/messages"
REQUESTS: Final = "benchmark-requests"
ROUTING_KEY: Final = "benchmark.messages"
EXCHANGE: Final = "amq.topic"
QUEUE: Final = "benchmark"
ROLES: Final = ("publish", "subscribe", "consume", "request", "respond", "dispatch", "latency", "append")
#: bytes of the number or time in a payload
STAMP: Final = 8
#: the time is noted of every message whose number has none of these bits
_NOTED: Final = 127
#: seconds without a message after which the rest is lost
PATIENCE: Final = 2.0


@dataclass
class Job:
    """One role of one run; see the module."""

    role: str
    host: str
    port: int
    #: messages
    count: int
    #: bytes of a payload
    size: int
    qos: int
    #: of MQTT: 3.1.1 or 5
    version: str
    #: messages that may be unconfirmed, where the application keeps count of them; the consumer's prefetch; requests
    #: that wait for their replies
    window: int
    #: messages a second; ``None``: as fast as possible
    rate: float | None
    #: how to publish, where there are several usual ways
    style: str
    #: event loop, where there is one
    loop: str
    #: of events within a process: how many handlers, and topics, and whether events are typed or untyped
    handlers: int = 1
    topics: int = 1
    kind: str = "typed"
    #: of remote events: the parties between generator and listener
    between: str = "nothing"
    #: of Spark: where rows come from (``journal``, ``mqtt``, ``backlog``, ``queue``, ``stream``), and where they go
    source: str = "mqtt"
    sink: str = "noop"
    #: of Spark: where to write, and the journal that is read
    folder: str = ""
    journal: str = ""
    #: seconds until the next payload is due, when ``payloads`` has none
    delay: float = 0.0
    _libraries: tuple[str, ...] = ()
    _started: tuple[float, int] = field(default=(0.0, 0))

    # --- the conversation

    def ready(self) -> None:
        """Say that everything is set up; what is used up from here on counts."""
        self._started = time.process_time(), memory("VmRSS")
        print("READY", flush=True)

    def wait_for_go(self) -> None:
        """Wait until the other side is ready, too. Blocks."""
        if sys.stdin.readline().strip() != "GO":
            raise SystemExit("given up")

    def finish(self, **result: Any) -> None:
        """Print the result: what is given, and what this process took."""
        cpu, before = self._started
        result |= {
            "role": self.role,
            "cpu_seconds": time.process_time() - cpu,
            "rss_ready": before,
            "rss_peak": memory("VmHWM"),
            "libraries": {name: version(name) for name in self._libraries} | result.get("libraries", {}),
        }
        print(json.dumps(result), flush=True)

    # --- publishing

    def payloads(self) -> Iterator[bytes | None]:
        """The payloads to publish; ``None`` while the next is not due for ``delay`` seconds."""
        filler = b"x" * (self.size - STAMP)
        if self.rate is None:
            for number in range(self.count):
                yield number.to_bytes(STAMP, "big") + filler
            return
        start = woken = time.monotonic()
        for number in range(self.count):
            due = start + number / self.rate
            while (now := time.monotonic()) < due:
                self.delay = due - now
                yield None
                # how exactly a loop wakes is not what is measured; what holds up a message that is due, is
                woken = time.monotonic()
            yield int(max(due, woken) * 1e9).to_bytes(STAMP, "big") + filler

    def blocking_payloads(self) -> Iterator[bytes]:
        """The same for a thread that may sleep."""
        for payload in self.payloads():
            if payload is None:
                time.sleep(self.delay)
            else:
                yield payload


class Tally:
    """Counts what arrives, and looks at it.

    ``received`` is called with each payload, on one thread at a time. It costs every peer the same.
    """

    def __init__(self, job: Job) -> None:
        self._job = job
        self._done = threading.Event()
        self._published = threading.Event()
        self._start = 0.0
        self.received: Callable[[bytes | bytearray], None]
        self._progress: Callable[[], tuple[int, float, int]]
        #: a mark for each number; or nanoseconds from when it was due to when it was here
        self._marks = bytearray(job.count)
        self._latencies: list[int] = []
        if job.rate is None:
            self._count_numbers()
        else:
            self._measure_latency()

    def _count_numbers(self) -> None:
        job, marks, done, now = self._job, self._marks, self._done, time.monotonic
        size, expected = job.size, job.count
        count = wrong = 0
        last = 0.0

        def received(payload: bytes | bytearray) -> None:
            nonlocal count, wrong, last
            try:
                marks[int.from_bytes(payload[:STAMP], "big")] = 1
            except IndexError:
                wrong += 1
            if len(payload) != size:
                wrong += 1
            count += 1
            if not count & _NOTED:  # in case the last one never comes
                last = now()
            if count == expected:
                last = now()
                done.set()

        def progress() -> tuple[int, float, int]:
            return count, last, wrong

        self.received, self._progress = received, progress

    def _measure_latency(self) -> None:
        job, done, latencies, now = self._job, self._done, self._latencies, time.monotonic_ns
        count = wrong = 0

        def received(payload: bytes | bytearray) -> None:
            nonlocal count, wrong
            latencies.append(now() - int.from_bytes(payload[:STAMP], "big"))
            if len(payload) != job.size:
                wrong += 1
            count += 1
            if count == job.count:
                done.set()

        def progress() -> tuple[int, float, int]:
            return count, time.monotonic() if done.is_set() else 0.0, wrong

        self.received, self._progress = received, progress

    def start(self) -> None:
        """Consuming begins now."""
        self._start = time.monotonic()

    def wait(self) -> None:
        """Return when all has arrived, or nothing more does. Blocks."""
        threading.Thread(target=self._watch, daemon=True).start()
        self._done.wait()

    def _watch(self) -> None:
        sys.stdin.readline()  # PUBLISHED, or the end of whoever started this process
        self._published.set()
        seen = -1
        while not self._done.wait(PATIENCE):
            count, _, _ = self._progress()
            if count == seen:
                self._done.set()
            seen = count

    def wait_published(self) -> None:
        """Return when the publisher is through: until then it may wait for an answer to what has arrived. Blocks."""
        self._published.wait()

    def finish(self) -> None:
        """Print the result."""
        count, last, wrong = self._progress()
        job = self._job
        result: dict[str, Any] = {"start": self._start, "received": count, "wrong": wrong}
        if job.rate is None:
            different = sum(self._marks)
            result |= {"end": last, "lost": job.count - different, "duplicates": count - wrong - different}
        else:
            result |= {"end": last, "lost": job.count - count, **percentiles(self._latencies)}
        job.finish(**result)


class Replies:
    """Makes requests, looks at their replies, and takes the time of each.

    ``window`` of them are under way at any time. A reply must be what the request was.
    """

    def __init__(self, job: Job) -> None:
        self._job = job
        self._latencies: list[int] = []
        self._wrong = 0
        self._start = self._end = 0.0

    async def gather(self, ask: Callable[[bytes], Coroutine[Any, Any, bytes]]) -> None:
        """As many tasks as the window, each of which awaits ``ask`` over and over."""
        payloads = self._job.payloads()
        latencies, now = self._latencies, time.monotonic_ns

        async def one_after_the_other() -> None:
            for payload in payloads:
                assert payload is not None
                asked = now()
                reply = await ask(payload)
                latencies.append(now() - asked)
                if reply != payload:
                    self._wrong += 1

        self._start = time.monotonic()
        async with asyncio.TaskGroup() as group:
            for _ in range(self._job.window):
                group.create_task(one_after_the_other())
        self._end = time.monotonic()

    def pipeline(self, ask: Callable[[bytes, Callable[[bytes], None]], None]) -> None:
        """One thread, which calls ``ask`` with what to do with the reply, as long as the window has room."""
        job = self._job
        latencies, now = self._latencies, time.monotonic_ns
        room = threading.Semaphore(job.window)

        def answered(payload: bytes, asked: int, reply: bytes) -> None:
            latencies.append(now() - asked)
            if reply != payload:
                self._wrong += 1
            room.release()

        self._start = time.monotonic()
        for payload in job.blocking_payloads():
            room.acquire()
            ask(payload, functools.partial(answered, payload, now()))
        for _ in range(job.window):
            room.acquire()
        self._end = time.monotonic()

    def thread(self, ask: Callable[[bytes], bytes]) -> None:
        """One thread, which calls ``ask`` over and over: a window of 1."""
        self._start = time.monotonic()
        for payload in self._job.blocking_payloads():
            asked = time.monotonic_ns()
            reply = ask(payload)
            self._latencies.append(time.monotonic_ns() - asked)
            if reply != payload:
                self._wrong += 1
        self._end = time.monotonic()

    def finish(self) -> None:
        """Print the result."""
        lost = self._job.count - len(self._latencies)
        figures = percentiles(self._latencies)
        self._job.finish(start=self._start, end=self._end, wrong=self._wrong, lost=lost, **figures)


def serve_until_told(job: Job) -> None:
    """The end of a responder: ready, until the other side is through. Blocks."""
    job.ready()
    sys.stdin.readline()
    job.finish()


def percentiles(latencies: list[int]) -> dict[str, float]:
    """The 50th and the 99th percentile of nanoseconds, in microseconds; nothing of nothing."""
    ranked = sorted(latencies)
    return {f"p{percent}": ranked[-(-percent * len(ranked) // 100) - 1] / 1000 for percent in (50, 99) if ranked}


def run(roles: Mapping[str, Callable[[Job], None]], *libraries: str) -> None:
    """The command line of a peer.

    Args:
        roles: what to do in which role.
        *libraries: distributions whose versions are told.

    On SIGUSR1 the process writes the stacks of its threads to standard error.
    """
    faulthandler.register(signal.SIGUSR1)
    parser = argparse.ArgumentParser()
    parser.add_argument("role", choices=sorted(roles))
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--count", type=int, required=True)
    parser.add_argument("--size", type=int, default=100)
    parser.add_argument("--qos", type=int, default=0)
    parser.add_argument("--version", default="3.1.1", choices=["3.1.1", "5", "amqp"])
    parser.add_argument("--window", type=int, default=100)
    parser.add_argument("--rate", type=float)
    parser.add_argument("--style", default="")
    parser.add_argument("--handlers", type=int, default=1)
    parser.add_argument("--topics", type=int, default=1)
    parser.add_argument("--kind", default="typed", choices=["typed", "untyped"])
    parser.add_argument("--between", default="nothing", choices=["nothing", "agent", "mailbox", "agent, mailbox"])
    parser.add_argument("--source", default="mqtt", choices=["journal", "mqtt", "backlog", "queue", "stream"])
    parser.add_argument("--sink", default="noop", choices=["noop", "parquet", "foreachBatch"])
    parser.add_argument("--folder", default="")
    parser.add_argument("--journal", default="")
    parser.add_argument("--loop", default="asyncio", choices=["asyncio", "uvloop"])
    job = Job(**vars(parser.parse_args()), _libraries=libraries)
    roles[job.role](job)


def run_async(main: Callable[[Job], Coroutine[Any, Any, None]]) -> Callable[[Job], None]:
    """The role of an asynchronous peer, on the event loop of the job."""

    def role(job: Job) -> None:
        factory = None
        if job.loop == "uvloop":
            import uvloop

            factory = uvloop.new_event_loop
        with asyncio.Runner(loop_factory=factory) as runner:
            runner.run(main(job))

    return role


def memory(what: str) -> int:
    """Memory of this process, bytes: ``VmRSS`` is what is resident, ``VmHWM`` the most that was.

    Where the system does not tell, the peak; which is not taken where it does, because Linux counts what the program
    had before that started this one.
    """
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return int(status.partition(f"{what}:")[2].split()[0]) * 1024
