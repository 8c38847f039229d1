"""Processor time of messages with metrics, a watched monitor, and tracing, beside the same without.

One process publishes and receives its own messages. ``metrics`` are rendered once a second; ``monitor`` publishes a
snapshot once a second; ``interceptor`` is one that does nothing. ``tracing, API`` has no SDK; ``tracing, SDK`` has
spans that a batch processor hands to an exporter that drops them. ``spans of the SDK alone`` is the time of two spans
of six attributes, without messages: no interceptor can be faster.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
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


def monitored(seconds: float, *, is_watched: bool) -> float:
    """Return the processor time of a process in percent: 10,000 messages a second, with or without a publisher."""
    from messaging.observability.monitor import SnapshotPublisher

    with messaging.connect("memory://bench-monitor", name="bench") as m, contextlib.ExitStack() as stack:
        m.on("bench/x", lambda _: None)
        if is_watched:
            stack.enter_context(SnapshotPublisher(m, interval=1.0))
        payload, sent = b"x" * 100, 0
        began, cpu = time.monotonic(), time.process_time()
        while (now := time.monotonic() - began) < seconds:
            while sent < now * _RATE:
                m.publish("bench/x", payload)
                sent += 1
            time.sleep(0.005)
        return (time.process_time() - cpu) / seconds * 100


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
    seconds = 1.0 if arguments.quick else 5.0
    differences = []
    for _ in range(runs):
        before, after = monitored(seconds, is_watched=False), monitored(seconds, is_watched=True)
        differences.append((before, after))
    before, after = (statistics.median(each[side] for each in differences) for side in (0, 1))
    print(f"\n10,000 messages/s: {before:.1f} % of a core, {after:.1f} % with a monitor that watches once a second")
