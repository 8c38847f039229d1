"""``messaging bench``: measure rates and latencies of a broker and of the way to it."""

from __future__ import annotations

import contextlib
import logging
import math
import secrets
import threading
import time
from collections.abc import Iterator
from typing import Annotated, Any, Final, NamedTuple

import typer

from messaging import Message, Messaging  # noqa: TC001  # typer evaluates annotations
from messaging.cli import options
from messaging.cli.bench_account import LEAST_SIZE, MOST_MESSAGES, Latencies, Tally
from messaging.cli.bench_load import Gate, Load
from messaging.cli.connecting import choose_target, connect, identity, warn_of_memory
from messaging.cli.output import ExitCode, dump, report, show, write
from messaging.errors import ArgumentError
from messaging.model import check_name

logger = logging.getLogger(__name__)

MODES: Final = ("both", "pub", "sub", "request")

#: silence after which the missing messages of a run count as lost, seconds
_SILENCE: Final = 3.0
#: how long an interrupted run waits for outcomes and deliveries, seconds
_LAST_WAIT: Final = 5.0
#: how often to look whether it is over, seconds
_LOOK: Final = 0.02

_Mode = Annotated[
    str, typer.Argument(metavar="[both|pub|sub|request]", help="Which direction to measure.", show_default=False)
]
_Topic = Annotated[
    str | None, typer.Option("--topic", "-t", metavar="CHANNEL", help="By default one that is new for each run.")
]
_Messages = Annotated[int, typer.Option("--messages", metavar="N", help="Messages or requests, of all publishers.")]
_Size = Annotated[int, typer.Option("--size", metavar="BYTES", help=f"Of a payload, at least {LEAST_SIZE}.")]
_Rate = Annotated[float | None, typer.Option("--rate", metavar="N", help="At most so many a second, of all together.")]
_Publishers = Annotated[int, typer.Option("--publishers", metavar="N", help="Connections that send.")]
_Window = Annotated[
    int | None,
    typer.Option(
        "--window",
        metavar="N",
        show_default=False,
        help="Messages of a publisher that may be unconfirmed, and on their way: 1000; requests: 1.",
    ),
]
_Timeout = Annotated[float | None, typer.Option("--timeout", "-W", metavar="SECONDS", help="End after that long.")]
_Responder = Annotated[
    bool, typer.Option("--responder/--no-responder", help="Of requests: answer them, too, on a connection of its own.")
]
_Json = Annotated[bool, typer.Option("--json", help="Report as one JSON object.")]


class _Plan(NamedTuple):
    mode: str
    topic: str
    run: bytes
    messages: int
    size: int
    rate: float | None
    publishers: int
    window: int
    timeout: float | None
    qos: str | None
    responder: bool


def bench(
    url: options.Url = None,
    mode: _Mode = "both",
    topic: _Topic = None,
    messages: _Messages = 10_000,
    size: _Size = 100,
    qos: options.Qos = None,
    rate: _Rate = None,
    publishers: _Publishers = 1,
    window: _Window = None,
    timeout: _Timeout = None,
    responder: _Responder = True,
    json: _Json = False,
    url_option: options.UrlOption = None,
    client_id: options.ClientId = None,
    option: options.Settings = None,
    quiet: options.Quiet = False,  # noqa: ARG001  # its callback did it
    debug: options.Debug = False,  # noqa: ARG001
) -> int:
    """Measure a broker: rates and latencies of publishing, receiving, both at once, or requests.

    Ends by itself, and reports when it is interrupted, too. Messages that are unconfirmed or on
    their way are bounded, so no broker is flooded. Exit code 1 if messages failed or were lost.

    Example: messaging bench mqtt://localhost both --messages 50000 --qos 1 --publishers 2
    """
    if url in MODES and mode == "both":
        mode, url = str(url), None  # the broker is given by --url or the environment
    plan = _checked(mode, topic, messages, size, rate, publishers, window, timeout, qos, responder)
    if client_id is not None and (publishers > 1 or mode in ("both", "request")):
        raise ArgumentError("--id: this bench has several connections, and each needs a client id of its own")
    target = choose_target(url, url_option)
    with contextlib.ExitStack() as stack:
        count = 0

        def open_instance() -> Messaging:
            nonlocal count
            count += 1
            return stack.enter_context(connect(target, f"bench{count}", client_id, option))

        run = _Bench(plan, open_instance)
        interrupted = False
        try:
            run.prepare()
            run.play()
        except KeyboardInterrupt:
            if not run.is_prepared:
                raise
            interrupted = True
        run.end()
        found = run.report(interrupted=interrupted)
        if json:
            write(dump(found))
        else:
            show(*_lines(found))
        return run.exit_code(interrupted=interrupted)


def _checked(
    mode: str,
    topic: str | None,
    messages: int,
    size: int,
    rate: float | None,
    publishers: int,
    window: int | None,
    timeout: float | None,
    qos: str | None,
    responder: bool,
) -> _Plan:
    if mode not in MODES:
        raise ArgumentError(f"no mode {mode!r}; there are {', '.join(MODES)}")
    run = secrets.token_bytes(8)
    if topic is None:
        if mode == "sub" or (mode == "request" and not responder):
            raise ArgumentError("--topic is missing: name the channel that others use")
        topic = f"bench/{run.hex()}"
    check_name(topic)
    window = window if window is not None else 1 if mode == "request" else 1000
    for name, value, low, high in (
        ("messages", messages, 1, MOST_MESSAGES),
        ("size", size, LEAST_SIZE, 64 * 2**20),
        ("publishers", publishers, 1, 100),
        ("window", window, 1, 10_000),
    ):
        if not low <= value <= high:
            raise ArgumentError(f"--{name} must be from {low} to {high}, not {value}")
    if messages < publishers:
        raise ArgumentError(f"--messages {messages}: fewer than there are publishers")
    if rate is not None and not 0 < rate < math.inf:
        raise ArgumentError("--rate must be a number of messages above 0")
    options.check_timeout(timeout, threading.TIMEOUT_MAX)
    return _Plan(mode, topic, run, messages, size, rate, publishers, window, timeout, qos, responder)


class _Bench:
    """One run: instances, a tally of what arrives, loads that send."""

    def __init__(self, plan: _Plan, open_instance: Any) -> None:
        self._plan = plan
        self._open = open_instance
        self._tally = Tally(plan.run if plan.mode == "both" else None)
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
        self.is_prepared = False

    def prepare(self) -> None:
        """Connect and subscribe."""
        plan = self._plan
        extensions = options.extensions(None, qos=plan.qos)
        if plan.mode in ("both", "sub"):
            m = self._instance()
            builder = m.context_builder().channel(plan.topic).extensions(extensions)
            stream = m.subscription.subscribe(builder.build_context())
            stream.subscribe(self._take, self._fail)
            stream.ready.result()
            if plan.mode == "sub":
                logger.info("subscribed to %s at %s", plan.topic, identity(m))
        if plan.mode == "request" and plan.responder:
            m = self._instance()
            m.reply(plan.topic, _echo, concurrency=max(8, min(64, plan.window)), **extensions)
        if plan.mode != "sub":
            for number in range(plan.publishers):
                m = self._instance()
                send: Any = m.reply_to.publish_with_reply if plan.mode == "request" else m.publisher.publish
                context = m.context_builder().channel(plan.topic).extensions(extensions).build_context()
                count = plan.messages // plan.publishers + (number < plan.messages % plan.publishers)
                self._loads.append(
                    Load(
                        send, context, count, number=number, run=plan.run, size=plan.size - LEAST_SIZE,
                        window=plan.window,
                    )
                )  # fmt: skip
        if plan.mode in ("pub", "sub") or not plan.responder:
            warn_of_memory(m)
        self.is_prepared = True

    def _instance(self) -> Messaging:
        m: Messaging = self._open()
        self._broker = m.runtime.get_runtime_dto().connection_uri
        return m

    def play(self) -> None:
        """Send and receive, until all is done, the time is over or nothing comes any more.

        Raises:
            MessagingError: the subscription ended.
        """
        plan = self._plan
        self._began = time.monotonic()
        deadline = math.inf if plan.timeout is None else self._began + plan.timeout
        gate = Gate(plan.window * plan.publishers, _SILENCE, self._received) if plan.mode == "both" else None
        rate = plan.rate / plan.publishers if plan.rate is not None else None
        for load in self._loads:
            load.start(rate, gate, self._stop)
        try:
            while self._goes_on():
                if time.monotonic() >= deadline:
                    self._timed_out = True
                    break
                self._enough.wait(_LOOK)
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
        if self._plan.mode == "sub":
            return not self._enough.is_set()
        if self._plan.mode != "both" or self._tally.distinct >= sum(load.done for load in self._loads):
            return False
        return time.monotonic() - max(self._last, self._quiet_since) < _SILENCE

    def end(self) -> None:
        """Stop the loads, and wait for messages on their way, so that they do not count as lost."""
        self._stop.set()
        deadline = time.monotonic() + _LAST_WAIT
        while time.monotonic() < deadline and any(load.is_running or load.unsettled for load in self._loads):
            time.sleep(_LOOK)
        if self._plan.mode == "both":
            accepted = sum(load.done for load in self._loads)
            while self._tally.distinct < accepted and time.monotonic() < min(deadline, self._last + _SILENCE):
                time.sleep(_LOOK)

    # --- receiving

    def _take(self, message: Message) -> None:
        now, moment = time.time_ns(), time.monotonic()
        with self._lock:
            if self._enough.is_set():
                return
            self._tally.take(message.payload, now)
            self._first, self._last = self._first or moment, moment
            if self._plan.mode == "sub" and self._tally.received >= self._plan.messages:
                self._enough.set()

    def _received(self) -> int:
        return self._tally.distinct

    def _fail(self, error: Exception) -> None:
        self._error = error

    # --- the report

    def report(self, *, interrupted: bool) -> dict[str, Any]:
        """Return the figures."""
        plan, tally = self._plan, self._tally
        found: dict[str, Any] = {
            "mode": plan.mode,
            "broker": self._broker,
            "channel": plan.topic,
            "size": plan.size,
            "qos": plan.qos,
            "publishers": plan.publishers if self._loads else 0,
            "window": plan.window,
            "seconds": round(self._seconds, 6),
            "interrupted": interrupted,
        }
        if self._loads:
            done = sum(load.done for load in self._loads)
            key = "requests" if plan.mode == "request" else "published"
            found[key] = {
                "messages": done,
                "failed": sum(load.failed for load in self._loads),
                "unsettled": sum(load.unsettled for load in self._loads),
                **self._rates(done, max(load.ended for load in self._loads) - self._began),
                "latency": _merged(self._loads),
            }
        if plan.mode in ("both", "sub"):
            with self._lock:
                seconds = self._last - (self._first if plan.mode == "sub" else self._began)
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
        if self._plan.mode == "sub":
            return self._tally.gaps()
        return self._tally.missing({number: load.accepted for number, load in enumerate(self._loads)})

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
        lost = self._lost() if self._plan.mode in ("both", "sub") else 0
        if lost:
            report(f"{lost} messages were lost")
        return ExitCode.FAILED if error is not None or lost else ExitCode.OK


def _echo(request: Message) -> bytes:
    return request.payload


def _merged(loads: list[Load]) -> dict[str, float] | None:
    merged = Latencies()
    for load in loads:
        merged.merge(load.latencies)
    return merged.summary()


def _lines(found: dict[str, Any]) -> Iterator[str]:
    """Yield the report for people."""
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
