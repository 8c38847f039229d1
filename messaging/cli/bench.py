"""``messaging bench``: measure the rates and latencies of a broker and of the connections to it."""

import contextlib
import itertools
import logging
import math
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Annotated, Any, Final

from messaging.cli import options
from messaging.cli.bench_load import LEAST_SIZE, MOST_MESSAGES, Gate, Latencies, Load, Tally
from messaging.cli.connecting import BrokerOptions, identity, warn_of_memory
from messaging.cli.options import argument, flag, option
from messaging.cli.output import ExitCode, dump, report, show, write
from messaging.errors import ArgumentError
from messaging.instance import Messaging
from messaging.model import Message, MessageContext, check_name

logger = logging.getLogger(__name__)

MODES: Final = ("both", "pub", "sub", "request")

#: silence after which the missing messages of a run count as lost, seconds
_SILENCE: Final = 3.0
#: how long an interrupted run waits for outcomes and deliveries, seconds
_LAST_WAIT: Final = 5.0
#: how often to check whether the run is over, seconds
_POLL: Final = 0.02


@dataclass(frozen=True)
class _BenchPlan:
    """The options that describe a run."""

    topic: Annotated[str | None, option("--topic -t", "CHANNEL", "Channel; default: a new one for each run.")] = None
    messages: Annotated[int, option("--messages", "N", "Messages or requests of all publishers.")] = 10_000
    size: Annotated[int, option("--size", "BYTES", f"Size of a payload, at least {LEAST_SIZE}.")] = 100
    qos: options.Qos = None
    rate: Annotated[float | None, option("--rate", "N", "Most messages per second of all publishers together.")] = None
    publishers: Annotated[int, option("--publishers", "N", "Number of publishing connections.")] = 1
    window: Annotated[
        int | None,
        option(
            "--window",
            "N",
            "Most messages per publisher that are unconfirmed or in flight; default: 1000, of requests 1.",
        ),
    ] = None
    timeout: Annotated[float | None, options.timeout("End after that long.")] = None
    responder: Annotated[
        bool, flag("--responder/--no-responder", "Answer the requests, on a connection of its own.")
    ] = True

    def check(self, mode: str) -> None:
        """Refuse values that do not go together with an ``ArgumentError``."""
        if mode not in MODES:
            raise ArgumentError(f"no mode {mode!r}; there are {', '.join(MODES)}")
        if self.topic is not None:
            check_name(self.topic)
        elif mode == "sub" or (mode == "request" and not self.responder):
            raise ArgumentError("--topic is missing: name the channel of the other side")
        for name, low, high in (
            ("messages", 1, MOST_MESSAGES),
            ("size", LEAST_SIZE, 64 * 2**20),
            ("publishers", 1, 100),
            ("window", 1, 10_000),
        ):
            value = getattr(self, name)
            if value is not None and not low <= value <= high:
                raise ArgumentError(f"--{name} must be from {low} to {high}, not {value}")
        if self.messages < self.publishers:
            raise ArgumentError(f"--messages {self.messages}: fewer than there are publishers")
        options.check_rate(self.rate)
        options.check_timeout(self.timeout, threading.TIMEOUT_MAX)


@options.command
def bench(
    broker: BrokerOptions,
    plan: _BenchPlan,
    mode: Annotated[
        str, argument("[both|pub|sub|request]", "Direction to measure.", autocompletion=lambda: MODES)
    ] = "both",
    json: Annotated[bool, flag("--json", "Report as one JSON object.")] = False,
) -> int:
    """Measure a broker: rates and latencies of publishing, receiving, both at once, or requests.

    Ends by itself; an interrupted run reports, too. The number of messages that are unconfirmed or
    in flight is bounded, so no broker is flooded. Exit code 1 if messages failed or were lost.

    Example: messaging bench mqtt://localhost both --messages 50000 --qos 1 --publishers 2
    """
    if broker.url in MODES and mode == "both":
        mode, broker = str(broker.url), replace(broker, url=None)  # --url or the environment names the broker
    plan.check(mode)
    if broker.client_id is not None and (plan.publishers > 1 or mode in ("both", "request")):
        raise ArgumentError("--id: this bench has several connections, and each needs a client id of its own")
    with contextlib.ExitStack() as stack:
        names = (f"bench{number}" for number in itertools.count(1))
        run = _Bench(mode, plan, lambda: stack.enter_context(broker.connect(next(names))))
        run.prepare()
        interrupted = False
        try:
            run.play()
        except KeyboardInterrupt:
            interrupted = True
        run.end()
        found = run.report(interrupted=interrupted)
        if json:
            write(dump(found))
        else:
            show(*_lines(found))
        return run.exit_code(interrupted=interrupted)


class _Bench:
    """One run: its instances, the publishers, and the tally of received messages."""

    def __init__(self, mode: str, plan: _BenchPlan, connect: Callable[[], Messaging]) -> None:
        self._mode = mode
        self._plan = plan
        self._connect = connect
        self._run = secrets.token_bytes(8)
        self._topic = plan.topic if plan.topic is not None else f"bench/{self._run.hex()}"
        self._window = plan.window if plan.window is not None else 1 if mode == "request" else 1000
        self._is_receiving = mode in ("both", "sub")
        self._tally = Tally(self._run if mode == "both" else None)
        self._lock = threading.Lock()  # guards the tally and its times
        self._first = self._last = 0.0
        self._loads: list[Load] = []
        self._stop = threading.Event()
        self._enough = threading.Event()
        self._error: Exception | None = None
        self._began = self._seconds = 0.0
        self._timed_out = False
        self._broker = ""
        #: when the last load ended
        self._quiet_since = 0.0

    def prepare(self) -> None:
        """Connect and subscribe."""
        plan = self._plan
        extensions = options.extensions(None, qos=plan.qos)
        if self._is_receiving:
            m = self._instance()
            stream = m.subscription.subscribe(self._context(m, extensions))
            stream.subscribe(self._take, self._fail)
            stream.ready.result()
            if self._mode == "sub":
                logger.info("subscribed to %s at %s", self._topic, identity(m))
        if self._mode == "request" and plan.responder:
            m = self._instance()
            m.reply(self._topic, lambda payload: payload, concurrency=max(8, min(64, self._window)), **extensions)
        for number in range(plan.publishers if self._mode != "sub" else 0):
            m = self._instance()
            send: Any = m.reply_to.publish_with_reply if self._mode == "request" else m.publisher.publish
            count = plan.messages // plan.publishers + (number < plan.messages % plan.publishers)
            size = plan.size - LEAST_SIZE
            load = Load(
                send, self._context(m, extensions), count, number=number, run=self._run, size=size, window=self._window
            )
            self._loads.append(load)
        if self._mode in ("pub", "sub") or not plan.responder:
            warn_of_memory(m)

    def _context(self, m: Messaging, extensions: dict[str, Any]) -> MessageContext:
        return m.context_builder().channel(self._topic).extensions(extensions).build_context()

    def _instance(self) -> Messaging:
        m = self._connect()
        self._broker = m.runtime.get_runtime_dto().connection_uri
        return m

    def play(self) -> None:
        """Publish and receive until all is done, the timeout has passed or no message arrives any more.

        Raises:
            MessagingError: the subscription failed.
        """
        plan = self._plan
        self._began = time.monotonic()
        deadline = math.inf if plan.timeout is None else self._began + plan.timeout
        gate = None
        if self._mode == "both":
            gate = Gate(self._window * plan.publishers, _SILENCE, lambda: self._tally.distinct)
        rate = plan.rate / plan.publishers if plan.rate is not None else None
        for load in self._loads:
            load.start(rate, gate, self._stop)
        try:
            while self._goes_on():
                if time.monotonic() >= deadline:
                    self._timed_out = True
                    break
                self._enough.wait(_POLL)
        finally:
            self._stop.set()
            self._seconds = time.monotonic() - self._began
        if self._error is not None:
            raise self._error

    def _goes_on(self) -> bool:
        if self._error is not None:
            return False
        if any(load.is_running for load in self._loads):
            self._quiet_since = time.monotonic()
            return True
        if self._mode == "sub":
            return not self._enough.is_set()
        if self._mode != "both" or self._tally.distinct >= sum(load.done for load in self._loads):
            return False
        return time.monotonic() - max(self._last, self._quiet_since) < _SILENCE

    def end(self) -> None:
        """Stop the publishers, and wait for messages in flight, so that they do not count as lost."""
        self._stop.set()
        deadline = time.monotonic() + _LAST_WAIT
        while time.monotonic() < deadline and any(load.is_running or load.unsettled for load in self._loads):
            time.sleep(_POLL)
        if self._mode == "both":
            accepted = sum(load.done for load in self._loads)
            while self._tally.distinct < accepted and time.monotonic() < min(deadline, self._last + _SILENCE):
                time.sleep(_POLL)

    # --- receiving

    def _take(self, message: Message) -> None:
        now, moment = time.time_ns(), time.monotonic()
        with self._lock:
            if self._enough.is_set():
                return
            self._tally.take(message.payload, now)
            self._first, self._last = self._first or moment, moment
            if self._mode == "sub" and self._tally.received >= self._plan.messages:
                self._enough.set()

    def _fail(self, error: Exception) -> None:
        self._error = error

    # --- the report

    def report(self, *, interrupted: bool) -> dict[str, Any]:
        """Return the figures of the run."""
        plan, tally = self._plan, self._tally
        found: dict[str, Any] = {
            "mode": self._mode,
            "broker": self._broker,
            "channel": self._topic,
            "size": plan.size,
            "qos": plan.qos,
            "publishers": plan.publishers if self._loads else 0,
            "window": self._window,
            "seconds": round(self._seconds, 6),
            "interrupted": interrupted,
        }
        if self._loads:
            done = sum(load.done for load in self._loads)
            key = "requests" if self._mode == "request" else "published"
            found[key] = {
                "messages": done,
                "failed": sum(load.failed for load in self._loads),
                "unsettled": sum(load.unsettled for load in self._loads),
                **self._rates(done, max(load.ended for load in self._loads) - self._began),
                "latency": Latencies.merged(load.latencies for load in self._loads).summary(),
            }
        if self._is_receiving:
            with self._lock:
                seconds = self._last - (self._first if self._mode == "sub" else self._began)
                found["received"] = {
                    "messages": tally.received,
                    "lost": self._lost(),
                    "duplicates": tally.duplicates,
                    "out_of_order": tally.out_of_order,
                    "unknown": tally.unknown,
                    **self._rates(tally.received, seconds),
                    "latency": tally.latencies.summary(),
                }
        return found

    def _rates(self, count: int, seconds: float) -> dict[str, float | None]:
        rate = count / seconds if seconds > 0 else None
        return {
            "per_second": None if rate is None else round(rate, 1),
            "bytes_per_second": None if rate is None else round(rate * self._plan.size),
        }

    def _lost(self) -> int:
        if self._mode == "sub":
            return self._tally.gaps()
        return self._tally.missing([load.accepted for load in self._loads])

    def exit_code(self, *, interrupted: bool) -> ExitCode:
        """Return the exit code, and report the reason on stderr."""
        error = next((load.error for load in self._loads if load.error is not None), None)
        if error is not None:
            report(f"{sum(load.failed for load in self._loads)} messages failed: {error}")
        if interrupted:
            return ExitCode.INTERRUPTED
        if self._timed_out:
            logger.warning("timeout: not done within %g s", self._plan.timeout)
            return ExitCode.TIMED_OUT
        lost = self._lost() if self._is_receiving else 0
        if lost:
            report(f"{lost} messages were lost")
        return ExitCode.FAILED if error is not None or lost else ExitCode.OK


def _lines(found: dict[str, Any]) -> Iterator[str]:
    """Yield the lines of the report as text."""
    settings = f"{found['size']} bytes" + (f", QoS {found['qos']}" if found["qos"] is not None else "")
    senders = f", {found['publishers']} publishers" if found["publishers"] > 1 else ""
    yield f"{found['mode']} at {found['broker']}, channel {found['channel']}: {settings}{senders}"
    for key in ("published", "requests", "received"):
        if key in found:
            yield from _part(key, found[key])
    yield f"  {'time':12}{found['seconds']:.3f} s{', interrupted' if found['interrupted'] else ''}"


def _part(key: str, part: dict[str, Any]) -> Iterator[str]:
    rate = "" if part["per_second"] is None else f", {part['per_second']:,.0f}/s"
    volume = "" if part["bytes_per_second"] is None else f", {part['bytes_per_second'] / 1e6:,.2f} MB/s"
    yield f"  {key:12}{part['messages']:,}{rate}{volume}"
    wrong = ("failed", "unsettled", "lost", "duplicates", "out_of_order", "unknown")
    yield f"  {'':12}" + ", ".join(f"{part[name]:,} {name.replace('_', ' ')}" for name in wrong if name in part)
    if part["latency"] is not None:
        yield f"  {'':12}" + ", ".join(f"{name} {_milliseconds(value)}" for name, value in part["latency"].items())


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms" if seconds < 1 else f"{seconds:.2f} s"
