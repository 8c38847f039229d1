"""Metrics of a program for Prometheus: every number that its parts report. Needs the extra ``metrics``.

::

    from prometheus_client import CollectorRegistry, start_http_server
    from messaging.observability.metrics import MetricsCollector

    registry = CollectorRegistry()
    registry.register(MetricsCollector())
    start_http_server(9100, addr="127.0.0.1", registry=registry)

:class:`~messaging.observability.endpoint.MonitoringEndpoint` does that, with health checks beside it. Nothing is
counted for metrics: a collection reads what the parts know, so they cost nothing between two collections. Routes of a
gateway report their latency, measured for some of their messages. :class:`LatencyInterceptor` measures the messages of
other instances.

**Names** are made of the kind of the reporter, the fields that lead to the number, and its unit:
``messaging_instance_publisher_pending_messages``.

**Labels** are the name of the reporter and the fields of a report with the meaning ``label``. Reporters of one kind and
name get ``name="bus"``, ``name="bus#2"`` and so on. Objects that have an identity get a label ``index``, from 1, which
tells apart those with equal labels. An object keeps its index while it lives; then another object gets it.

**Bounds.** At most ``MAX_OBJECTS`` objects of each field are read, and ``MAX_TEXT`` characters of each text. What is
left out is counted in ``messaging_omitted_objects``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gzip
import itertools
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, Final, Literal

from messaging.errors import ArgumentError
from messaging.errors import MissingExtraError as _MissingExtraError
from messaging.errors.checks import check_instance, check_optional
from messaging.errors.text import SafeLog, visible
from messaging.execution import clock
from messaging.interception import InboundMessage, Interceptor, OutboundMessage, Outcome
from messaging.services import ServiceRegistry, default_registry
from messaging.services.reporting import HistogramDTO, Meaning, Reporter, meanings, reporters

try:
    from prometheus_client import CollectorRegistry, GCCollector, PlatformCollector, ProcessCollector
    from prometheus_client import Histogram as PrometheusHistogram
    from prometheus_client.exposition import choose_encoder
    from prometheus_client.metrics_core import Metric
    from prometheus_client.utils import floatToGoString
except ImportError as error:
    raise _MissingExtraError("metrics", "messaging.observability.metrics") from error


logger = SafeLog(__name__)

#: objects of one field of a report that are read
MAX_OBJECTS: Final = 1000
#: characters of a text
MAX_TEXT: Final = 200
#: reporters that are read
MAX_REPORTERS: Final = 10_000
#: objects inside of each other
_MAX_DEPTH: Final = 8
#: upper bounds of the buckets of latencies, seconds
LATENCIES: Final = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)

Labels = tuple[tuple[str, str], ...]
#: kinds of metrics: a counter only rises; the labels of an info are its content, and its value is 1
_Kind = Literal["counter", "gauge", "histogram", "info"]
#: of the names of samples
_SUFFIXES: Final = {"counter": "_total", "gauge": "", "info": "_info"}
#: metrics of the collection itself
_PROBLEMS: Final = Meaning("", "gauge", "problems that keep a part from working now", "problems")
_OMITTED: Final = Meaning("", "gauge", "objects of reports beyond the bounds", "objects")
_FAILURES: Final = Meaning("", "counter", "reports that could not be read")


class MetricsCollector:
    """Collects the reports of the parts in a registry, for a ``prometheus_client.CollectorRegistry``. Thread safe.

    Args:
        services: the registry; by default that of the process.

    Raises:
        ArgumentError: ``services`` is no registry.
    """

    def __init__(self, services: ServiceRegistry | None = None) -> None:
        check_optional("services", services, ServiceRegistry)
        self._services = default_registry() if services is None else services
        self._lock = threading.Lock()  # guards the following, and is not held while reporters are called
        self._indexes = _Indexes()
        self._failures = 0
        #: what was logged
        self._failed: set[tuple[str, str]] = set()

    def collect(self) -> Iterator[Metric]:
        """Return the metrics as they are now, in the order of the names. A reporter that fails is left out."""
        reports: list[tuple[Reporter, Any, int]] = []
        failures = 0
        found = reporters(self._services)
        for each in found[:MAX_REPORTERS]:
            try:
                reports.append((each, each.report(), len(each.problems())))
            except Exception as error:  # noqa: BLE001  # of the reporter, which may be of any program
                failures += 1
                self._log(each, error)
        with self._lock:
            self._failures += failures
            collection = _Collection(self._indexes, max(0, len(found) - MAX_REPORTERS))
            for each, report, problems in reports:
                try:
                    collection.add(each, report, problems)
                except Exception as error:  # noqa: BLE001  # a report of another shape than it should have
                    self._failures += 1
                    self._log(each, error)
            self._indexes.end()
            return iter(collection.finish(self._failures))

    def describe(self) -> list[Metric]:
        """Return nothing: which metrics there are depends on the parts, which come and go."""
        return []

    def _log(self, reporter: Reporter, error: Exception) -> None:
        """Log the failure of a reporter, once."""
        kind, name = str(reporter.kind), type(error).__name__
        key = (kind, f"{name}: {error}"[:MAX_TEXT])
        if key not in self._failed and len(self._failed) < MAX_OBJECTS:
            self._failed.add(key)
            logger.error("reporter %s %r: cannot be read: %s: %s; it is left out", kind, reporter.name, name, error)


class _Indexes:
    """The indexes of objects that have equal labels. An index is free again when a collection lacks its object."""

    def __init__(self) -> None:
        self._given: dict[object, dict[object, int]] = {}
        self._seen: dict[object, dict[object, int]] = {}

    def index(self, group: object, identity: object) -> int:
        """Return the index of an object, from 1; the smallest free one for a new object."""
        seen = self._seen.setdefault(group, {})
        given = self._given.setdefault(group, {})
        found = given.get(identity)
        if found is None:
            taken = {*given.values(), *seen.values()}
            found = next(number for number in range(1, len(taken) + 2) if number not in taken)
            given[identity] = found
        seen[identity] = found
        return found

    def end(self) -> None:
        """Forget the objects that were not seen since the last call."""
        self._given, self._seen = self._seen, {}


class _Collection:
    """The metrics of one collection.

    Args:
        indexes: of the objects.
        omitted: number of objects that are left out already.
    """

    def __init__(self, indexes: _Indexes, omitted: int) -> None:
        self._indexes = indexes
        self._omitted = omitted
        self._metrics: dict[str, Metric] = {}

    def add(self, reporter: Reporter, report: Any, problems: int) -> None:
        """Add the numbers of one report."""
        kind, name = str(reporter.kind), _label_text(reporter.name)
        number = self._indexes.index((kind, name), id(reporter))
        labels = (("name", name if number == 1 else f"{name}#{number}"),)
        self._put("messaging_problems", "gauge", _PROBLEMS, (("kind", kind), *labels), problems)
        if report is not None:
            self._read(kind, (), labels, report, 0)

    def finish(self, failures: int) -> list[Metric]:
        """Return the metrics, with those of the collection itself."""
        self._put("messaging_omitted_objects", "gauge", _OMITTED, (), self._omitted)
        self._put("messaging_reporter_failures", "counter", _FAILURES, (), failures)
        return sorted((each for each in self._metrics.values() if each.samples), key=lambda each: each.name)

    def _read(self, kind: str, path: tuple[str, ...], labels: Labels, report: Any, depth: int) -> None:
        """Add the numbers of an object and of those in it."""
        prefix = "_".join(("messaging", kind, *path))
        texts: list[tuple[str, str]] = []
        for meaning in meanings(type(report)):
            value = getattr(report, meaning.field)
            role = meaning.role
            name = f"{prefix}_{meaning.name}"
            if meaning.unit and not name.endswith(f"_{meaning.unit}"):
                name = f"{name}_{meaning.unit}"
            if role == "counter" or role == "gauge":
                if value is not None:
                    self._put(name, role, meaning, labels, float(value))
            elif role == "histogram":
                if isinstance(value, HistogramDTO):
                    self._put_histogram(name, meaning, dict(labels), value)
            elif role == "part":
                self._read_part(kind, path, labels, meaning, value, depth)
            elif role == "info":
                texts.append((meaning.name, "" if value is None else _label_text(_at(value, meaning.path))))
            elif role == "state":
                for each in meaning.values:
                    self._put(name, "gauge", meaning, (*labels, ("state", each)), float(each == value))
        if texts:
            about = Meaning("", "info", f"about the {' '.join((kind.replace('_', ' '), *path))}")
            self._put(prefix, "info", about, (*labels, *_apart(texts, labels)), 1.0)

    def _read_part(
        self, kind: str, path: tuple[str, ...], labels: Labels, meaning: Meaning, value: Any, depth: int
    ) -> None:
        if depth >= _MAX_DEPTH:
            return
        inner = (*path, meaning.name) if meaning.name else path
        if isinstance(value, (tuple, list)):
            found = [each for each in value[:MAX_OBJECTS] if dataclasses.is_dataclass(each)]
            if found:
                self._omitted += max(0, len(value) - MAX_OBJECTS)
        elif dataclasses.is_dataclass(value) and not isinstance(value, type):
            found = [value]
        else:
            return
        taken: set[Labels] = set()
        for each in found:
            own = self._labels(kind, inner, labels, each)
            if own in taken:  # without an identity they cannot be told apart
                self._omitted += 1
                continue
            taken.add(own)
            self._read(kind, inner, own, each, depth + 1)

    def _labels(self, kind: str, path: tuple[str, ...], around: Labels, report: Any) -> Labels:
        """Return the labels of an object: those of the objects around it, and its own."""
        own: list[tuple[str, str]] = []
        identity: list[object] = []
        for meaning in meanings(type(report)):
            if meaning.role == "label":
                own.append((meaning.name, _label_text(_at(getattr(report, meaning.field), meaning.path))))
            elif meaning.role == "identity":
                identity.append(getattr(report, meaning.field))
        labels = (*around, *_apart(own, around))
        if identity:
            labels = (*labels, ("index", str(self._indexes.index((kind, path, labels), tuple(identity)))))
        return labels

    def _metric(self, name: str, kind: _Kind, meaning: Meaning) -> Metric | None:
        """Return the metric of a name; ``None`` if it is of another kind than this number."""
        found = self._metrics.get(name)
        if found is None:
            text = meaning.help[:1].upper() + meaning.help[1:]
            found = self._metrics[name] = Metric(name, f"{text}.", kind, meaning.unit)
        return found if found.type == kind else None

    def _put(self, name: str, kind: _Kind, meaning: Meaning, labels: Labels, value: float) -> None:
        metric = self._metric(name, kind, meaning)
        if metric is not None and not math.isnan(value):
            metric.add_sample(name + _SUFFIXES[kind], dict(labels), value)

    def _put_histogram(self, name: str, meaning: Meaning, labels: dict[str, str], counts: HistogramDTO) -> None:
        """Add a histogram: each bucket holds the numbers up to its bound, those of lower buckets included."""
        metric = self._metric(name, "histogram", meaning)
        if metric is None:
            return
        total = 0
        for bound, count in zip((*counts.bounds, math.inf), counts.counts, strict=True):
            total += count
            le = str(floatToGoString(bound))  # type: ignore[no-untyped-call]
            metric.add_sample(f"{name}_bucket", {**labels, "le": le}, total)
        metric.add_sample(f"{name}_count", labels, total)
        metric.add_sample(f"{name}_sum", labels, counts.sum)


def _label_text(value: object) -> str:
    """Return a text of a report for a label: bounded, without control characters and lone surrogates."""
    if isinstance(value, (tuple, list, frozenset, set)):
        value = ",".join(str(each) for each in [*value][:20])
    text = str(value)
    if len(text) > MAX_TEXT:
        text = f"{text[: MAX_TEXT - 1]}…"
    return visible(text)


def _at(value: Any, path: str) -> Any:
    return getattr(value, path) if path else value


def _apart(own: Sequence[tuple[str, str]], around: Labels) -> Iterator[tuple[str, str]]:
    """Return labels with names that those around them do not have."""
    taken = {name for name, _ in around}
    for name, text in own:
        yield (f"own_{name}" if name in taken else name), text


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
