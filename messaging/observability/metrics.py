"""Metrics of a program for Prometheus: every number that its parts report. Needs the extra ``metrics``.

::

    from prometheus_client import CollectorRegistry, start_http_server
    from messaging.observability.metrics import MetricsCollector

    registry = CollectorRegistry()
    registry.register(MetricsCollector())
    start_http_server(9100, addr="127.0.0.1", registry=registry)

:class:`~messaging.observability.endpoint.MonitoringEndpoint` does that, with health checks beside it. Names and labels
are described in :mod:`messaging.observability.samples`. Nothing is counted for metrics: a collection reads what the
parts know, so they cost nothing between two collections. Routes of a gateway report their latency, measured for some of
their messages. :class:`LatencyInterceptor` measures the messages of other instances.
"""

from __future__ import annotations

import contextlib
import gzip
import itertools
import math
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Final

from messaging.errors import ArgumentError
from messaging.errors import MissingExtraError as _MissingExtraError
from messaging.errors.checks import check_instance
from messaging.execution import clock
from messaging.interception import InboundMessage, Interceptor, OutboundMessage, Outcome
from messaging.observability.samples import Family, Sampler

try:
    from prometheus_client import CollectorRegistry, GCCollector, PlatformCollector, ProcessCollector
    from prometheus_client import Histogram as PrometheusHistogram
    from prometheus_client.exposition import choose_encoder
    from prometheus_client.metrics_core import Metric
    from prometheus_client.utils import floatToGoString
except ImportError as error:
    raise _MissingExtraError("metrics", "messaging.observability.metrics") from error

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from messaging.services import ServiceRegistry
    from messaging.services.reporting import HistogramDTO


#: upper bounds of the buckets of latencies, seconds
LATENCIES: Final = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)


class MetricsCollector:
    """Collects the reports of the parts in a registry, for a ``prometheus_client.CollectorRegistry``. Thread safe.

    Args:
        services: the registry; by default that of the process.

    Raises:
        ArgumentError: ``services`` is no registry.
    """

    def __init__(self, services: ServiceRegistry | None = None) -> None:
        self._sampler = Sampler(services)

    def collect(self) -> Iterator[Metric]:
        """Return the metrics as they are now."""
        return map(_metric, self._sampler.collect())

    def describe(self) -> list[Metric]:
        """Return nothing: which metrics there are depends on the parts, which come and go."""
        return []


def _metric(family: Family) -> Metric:
    text = family.help[:1].upper() + family.help[1:]
    metric = Metric(family.name, f"{text}.", family.kind, family.unit if family.kind != "info" else "")
    for labels, counts in family.histograms:
        _add_histogram(metric, family.name, dict(labels), counts)
    suffix = {"histogram": "", "counter": "_total", "info": "_info", "gauge": ""}[family.kind]
    for labels, value in family.samples:
        metric.add_sample(family.name + suffix, dict(labels), value)
    return metric


def _add_histogram(metric: Metric, name: str, labels: dict[str, str], counts: HistogramDTO) -> None:
    """Add the samples of a histogram: buckets hold the numbers up to their bound, those of lower buckets included."""
    total = 0
    for bound, count in zip((*counts.bounds, math.inf), counts.counts, strict=True):
        total += count
        le = str(floatToGoString(bound))  # type: ignore[no-untyped-call]
        metric.add_sample(f"{name}_bucket", {**labels, "le": le}, total)
    metric.add_sample(f"{name}_count", labels, total)
    metric.add_sample(f"{name}_sum", labels, counts.sum)


def default_metrics(services: ServiceRegistry | None = None) -> CollectorRegistry:
    """Return a registry with the metrics of the parts, and those of the process, the platform and garbage collection.

    Args:
        services: see :class:`MetricsCollector`.
    """
    registry = CollectorRegistry(auto_describe=False)
    registry.register(MetricsCollector(services))
    ProcessCollector(registry=registry)
    PlatformCollector(registry=registry)
    GCCollector(registry=registry)
    return registry


def rendered(registry: CollectorRegistry, accept: str, encodings: str) -> tuple[bytes, dict[str, str]]:
    """Return the body and the headers of an answer to Prometheus.

    Args:
        registry: of :func:`default_metrics`, say.
        accept: the header ``Accept`` of the request, which chooses the format.
        encodings: its header ``Accept-Encoding``: the body is compressed if it admits gzip.
    """
    encode, content_type = choose_encoder(accept)
    body = encode(registry)
    headers = {"Content-Type": content_type}
    if "gzip" in encodings.lower():
        body = gzip.compress(body, 5)
        headers["Content-Encoding"] = "gzip"
    return body, headers


class LatencyInterceptor(Interceptor):
    """Measures how long brokers take to confirm messages, responders to reply, and handlers to process. Thread safe.

    ``messaging_publish_duration_seconds`` and ``messaging_process_duration_seconds``, with the labels ``name`` of the
    instance, ``operation`` and ``outcome`` (``ok`` or ``error``).

    Args:
        registry: that of :func:`default_metrics`, say.
        every: measures every so many-th message, to cost less.

    Raises:
        ArgumentError: ``every`` is no number above 0.
    """

    def __init__(self, registry: CollectorRegistry, *, every: int = 1) -> None:
        check_instance("registry", registry, CollectorRegistry)
        if not isinstance(every, int) or isinstance(every, bool) or every < 1:
            raise ArgumentError(f"every must be a whole number above 0, not {every!r:.40}")
        labels = ("name", "operation", "outcome")
        self._published = PrometheusHistogram(
            "messaging_publish_duration_seconds", "Time until a message was confirmed, or a request answered.", labels,
            registry=registry, buckets=LATENCIES,
        )  # fmt: skip
        self._processed = PrometheusHistogram(
            "messaging_process_duration_seconds", "Time in which a message was processed.", labels,
            registry=registry, buckets=LATENCIES,
        )  # fmt: skip
        self._every = every
        self._outbound, self._inbound = itertools.count(), itertools.count()

    def intercept_publish(self, outbound: OutboundMessage) -> Callable[[Outcome], object] | None:
        """See :class:`messaging.interception.Interceptor`."""
        if next(self._outbound) % self._every:
            return None
        start, name, operation = clock.wall_ns(), outbound.instance.name, outbound.operation

        def settle(outcome: Outcome) -> None:
            result = "ok" if outcome.error is None else "error"
            self._published.labels(name, operation, result).observe(max(0, outcome.at - start) / 1e9)

        return settle

    def intercept_process(self, inbound: InboundMessage) -> AbstractContextManager[object] | None:
        """See :class:`messaging.interception.Interceptor`."""
        if next(self._inbound) % self._every:
            return None
        return self._measured(inbound)

    @contextlib.contextmanager
    def _measured(self, inbound: InboundMessage) -> Iterator[None]:
        start, result = clock.monotonic(), "error"
        try:
            yield
            result = "error" if inbound.outcome == "rejected" else "ok"
        finally:
            self._processed.labels(inbound.instance.name, inbound.operation, result).observe(clock.monotonic() - start)
