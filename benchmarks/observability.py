"""Processor time of messages with metrics, a watched monitor, and tracing, beside the same without.

One process publishes and receives its own messages. ``metrics`` are rendered once a second; a monitor takes a snapshot
once a second; ``interceptor`` is one that does nothing. ``tracing, API`` has no SDK; ``tracing, SDK`` has spans that a
batch processor hands to an exporter that drops them. ``spans of the SDK alone`` is the time of two spans of six
attributes, without messages: no interceptor can be faster.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final

import messaging
from benchmarks import report
from messaging.interception import InboundMessage, Interceptor, OutboundMessage
from messaging.testing.brokers import Mosquitto

if TYPE_CHECKING:
    from messaging.services import ServiceRegistry

_PATIENCE: Final = 60.0
#: messages a second of the case with a monitor
_RATE: Final = 10_000
#: follows the events of a page
_VIEWER: Final = """
import sys, urllib.request
for line in urllib.request.urlopen(sys.argv[1]):
    print(flush=True)
"""


class _Nothing(Interceptor):
    def intercept_publish(self, outbound: OutboundMessage) -> None:
        """Do nothing."""

    def intercept_process(self, inbound: InboundMessage) -> None:
        """Do nothing."""


def cost(url: str, count: int, interceptors: Sequence[Interceptor], beside: Callable[[Any], Any]) -> float:
    """Return microseconds of processor time for each message: published, confirmed, received."""
    with messaging.connect(url, outbox_size=count, interceptors=interceptors) as m, beside(m):
        done = threading.Event()
        left = [count]

        def note(_: messaging.Message) -> None:
            left[0] -= 1
            if not left[0]:
                done.set()

        options: dict[str, Any] = {"qos": 1} if url.startswith("mqtt") else {}
        m.on("bench/x", note, **options)
        payload = b"x" * 100
        began = time.process_time()
        for _ in range(count):
            m.publish("bench/x", payload, **options)
        if not done.wait(_PATIENCE):
            raise SystemExit(f"{left[0]} of {count} messages did not arrive")
        return (time.process_time() - began) / count * 1e6


@contextlib.contextmanager
def scraped(services: ServiceRegistry) -> Iterator[None]:
    """Render the metrics once a second."""
    from messaging.observability.metrics import default_metrics, rendered

    registry, stop = default_metrics(services), threading.Event()

    def scrape() -> None:
        while not stop.wait(1.0):
            rendered(registry, "", "gzip")

    thread = threading.Thread(target=scrape)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def tracing(*, sdk: bool) -> Interceptor:
    """Return the interceptor of OpenTelemetry, with an SDK whose exporter does nothing, or without."""
    from messaging.observability.opentelemetry import OpenTelemetryInterceptor

    return OpenTelemetryInterceptor(tracer_provider=_provider() if sdk else None)


def _provider() -> Any:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult

    class Dropping(SpanExporter):
        def export(self, spans: Sequence[Any]) -> SpanExportResult:  # noqa: ARG002
            return SpanExportResult.SUCCESS

    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(Dropping()))
    return provider


def bare_spans(count: int) -> float:
    """Return microseconds of processor time for two spans of the SDK."""
    tracer = _provider().get_tracer("bench")
    attributes = dict.fromkeys("abcdef", "value")
    began = time.process_time()
    for _ in range(2 * count):
        tracer.start_span("publish bench/x", attributes=attributes).end()
    return (time.process_time() - began) / count * 1e6


#: what watches the process, in the order of the windows
WATCHING: Final = ("nothing", "a publisher of snapshots", "a page with a viewer")


def monitored(rate: int, seconds: float, windows: int) -> dict[str, list[float]]:
    """Return the processor time of a process that is watched, in percent of a core, for each window.

    The same process is watched by one after the other, so that a slow minute of the machine hits all.

    Args:
        rate: messages a second that it publishes and receives.
        seconds: length of a window.
        windows: number of windows with each of :data:`WATCHING`.
    """
    found: dict[str, list[float]] = {name: [] for name in WATCHING}
    with messaging.connect("memory://bench-monitor", name="bench") as m:
        m.on("bench/x", lambda _: None)
        payload = b"x" * 100
        for number in range(windows * len(WATCHING)):
            name = WATCHING[number % len(WATCHING)]
            with _watched(m, name):
                sent, cpu, began = 0, time.process_time(), time.monotonic()
                while (now := time.monotonic() - began) < seconds:
                    while sent < now * rate:
                        m.publish("bench/x", payload)
                        sent += 1
                    time.sleep(0.005 if rate else seconds - now)
                found[name].append((time.process_time() - cpu) / now * 100)
    return found


@contextlib.contextmanager
def _watched(m: messaging.Messaging, name: str) -> Iterator[None]:
    from messaging.observability.monitor import SnapshotPublisher
    from messaging.observability.monitor.server import Monitor

    if name == WATCHING[0]:
        yield
    elif name == WATCHING[1]:
        with SnapshotPublisher(m, interval=1.0):
            yield
    else:
        with Monitor(services=m.services, port=0, interval=1.0) as monitor:
            viewer = subprocess.Popen(  # in a process of its own: its processor time does not count
                [sys.executable, "-c", _VIEWER, f"{monitor.url}api/events"], stdout=subprocess.PIPE
            )
            try:
                assert viewer.stdout is not None  # a pipe
                viewer.stdout.readline()  # it follows
                yield
            finally:
                viewer.kill()
                viewer.communicate()


def run(arguments: argparse.Namespace) -> None:
    """Run and print."""
    count = arguments.messages or (2_000 if arguments.quick else 150_000)
    runs = 1 if arguments.quick else arguments.runs
    print(f"{count} messages, medians of {runs}; {report.machine()}")
    nothing = lambda _: contextlib.nullcontext()  # noqa: E731
    cases: dict[str, tuple[Callable[[], Sequence[Interceptor]], Callable[[Any], Any]]] = {
        "without": (tuple, nothing),
        "metrics, read once a second": (tuple, lambda m: scraped(m.services)),
        "interceptor that does nothing": (lambda: [_Nothing()], nothing),
        "tracing, API alone": (lambda: [tracing(sdk=False)], nothing),
        "tracing, SDK, exporter drops": (lambda: [tracing(sdk=True)], nothing),
    }
    with Mosquitto(["max_inflight_messages 1000"]) as broker:
        for url in ("memory://bench-observed", f"{broker.url}?version=5"):
            found: dict[str, list[float]] = {name: [] for name in cases}
            for _ in range(runs):  # one after the other, so that a slow minute hits all
                for name, (interceptors, beside) in cases.items():
                    some = count // 10 if name.startswith("tracing") else count
                    found[name].append(cost(url, some, interceptors(), beside))
            print(f"\n{url.partition(':')[0]:34} {'us of processor time':>22} {'ratio':>8}")
            for name, times in found.items():
                ratio = statistics.median(one / base for one, base in zip(times, found["without"], strict=True))
                print(f"{name:34} {statistics.median(times):22.1f} {ratio:8.3f}")
    print(f"{'two spans of the SDK alone':34} {statistics.median(bare_spans(count // 10) for _ in range(runs)):22.1f}")
    seconds, windows = (0.5, 1) if arguments.quick else (2.0, 3 * runs)
    print(f"\n{'monitors':34} {'% of a core':>22} {'more':>8}")
    for rate, some in ((_RATE, windows), (0, runs)):  # without messages the difference is exact
        watched = monitored(rate, seconds, some)
        for name, shares in watched.items():
            more = statistics.median(one - base for one, base in zip(shares, watched[WATCHING[0]], strict=True))
            print(f"{rate:6,}/s, {name:24} {statistics.median(shares):22.2f} {more:8.2f}")
