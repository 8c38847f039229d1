"""Metrics of a program for Prometheus: every number that its parts report. Needs the extra ``metrics``.

::

    from prometheus_client import CollectorRegistry, start_http_server
    from messaging.observability.metrics import MetricsCollector

    registry = CollectorRegistry()
    registry.register(MetricsCollector())
    start_http_server(9100, addr="127.0.0.1", registry=registry)

:class:`~messaging.observability.endpoint.MonitoringEndpoint` does that, with health checks beside it. Names and labels
are described in :mod:`messaging.observability.samples`. Nothing is counted for metrics: a collection reads what the
parts know, so metrics cost nothing between two collections.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from messaging.errors import MissingExtraError as _MissingExtraError
from messaging.observability.samples import Family, Sampler

try:
    from prometheus_client import CollectorRegistry, GCCollector, PlatformCollector, ProcessCollector
    from prometheus_client.metrics_core import Metric
except ImportError as error:
    raise _MissingExtraError("metrics", "messaging.observability.metrics") from error

if TYPE_CHECKING:
    from messaging.services import ServiceRegistry


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
    suffix = {"counter": "_total", "info": "_info", "gauge": ""}[family.kind]
    for labels, value in family.samples:
        metric.add_sample(family.name + suffix, dict(labels), value)
    return metric


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
