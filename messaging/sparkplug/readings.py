"""Readings: metrics with everything that says where they come from and how far they can be trusted."""

from __future__ import annotations

import base64
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from messaging.errors import ArgumentError
from messaging.sparkplug.datatypes import DataType
from messaging.sparkplug.model import DataSet, MetaData, Metric, Property, Template

#: quality codes (Sparkplug 3.0, 6.4.9)
BAD: Final = 0
GOOD: Final = 192
STALE: Final = 500
_QUALITY: Final = "quality"


@dataclass(frozen=True, slots=True)
class Reading:
    """The value of a metric.

    Attributes:
        group: of the edge node.
        device: ``None`` for a metric of the edge node itself.
        metric: the name.
        type: of the value; ``None`` if it is not known, and the value is null.
        value: as :class:`~messaging.sparkplug.Metric` describes it; ``None``: null.
        timestamp: of the value, or else of the message, milliseconds since the epoch.
        alias: number that stands for the name.
        quality: 192 good, 0 bad, 500 stale; others as the publisher gives them.
        is_historical: the value is an old one, and not the present one.
        is_transient: the publisher asks not to store it.
        is_uncertain: a message before it was lost, and no birth has come since: its alias may have changed.
        properties: by name.
        metadata: of binary data.

    Raises:
        ArgumentError: ``type`` is no ``DataType``.
    """

    group: str
    edge_node: str
    device: str | None
    metric: str
    type: DataType | None
    value: Any
    timestamp: int | None
    alias: int | None = None
    quality: int = GOOD
    is_historical: bool = False
    is_transient: bool = False
    is_uncertain: bool = False
    properties: Mapping[str, Property] | None = None
    metadata: MetaData | None = None

    def __post_init__(self) -> None:
        if self.type is not None and not isinstance(self.type, DataType):
            raise ArgumentError(f"type must be a DataType, not {type(self.type).__name__}")

    @property
    def is_null(self) -> bool:
        """Return whether there is no value."""
        return self.value is None

    @property
    def is_stale(self) -> bool:
        """Return whether the edge node or the device is offline: the last value may not hold any more."""
        return self.quality == STALE

    def to_json(self) -> dict[str, Any]:
        """Return the reading as a JSON object.

        Bytes are base64. Numbers that are not finite are the texts ``NaN``, ``Infinity`` and ``-Infinity``.
        ``alias``, ``is_transient``, ``is_uncertain``, ``properties`` and ``metadata`` are there if they are set.
        """
        found: dict[str, Any] = {
            "group": self.group,
            "edge_node": self.edge_node,
            "device": self.device,
            "metric": self.metric,
            "type": None if self.type is None else self.type.name,
            "value": json_value(self.value),
            "timestamp": self.timestamp,
            "quality": self.quality,
            "is_historical": self.is_historical,
            "is_null": self.is_null,
            "is_stale": self.is_stale,
        }
        more = {
            "alias": self.alias,
            "is_transient": self.is_transient or None,
            "is_uncertain": self.is_uncertain or None,
            "properties": json_value(self.properties) if self.properties else None,
            "metadata": None if self.metadata is None else json_value(self.metadata),
        }
        return found | {name: value for name, value in more.items() if value is not None}


def quality_of(metric: Metric) -> int:
    """Return the quality of a metric: that of its property ``Quality``, otherwise good."""
    for name, each in (metric.properties or {}).items():
        if name.lower() == _QUALITY and isinstance(each.value, int) and not isinstance(each.value, bool):
            return each.value
    return GOOD


def json_value(value: Any) -> Any:
    """Return a value of a metric as one that JSON can express."""
    if isinstance(value, float):
        if math.isfinite(value):
            return value
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    if isinstance(value, (list, tuple)):
        return [json_value(each) for each in value]
    if isinstance(value, Property):
        return json_value(value.value)
    if isinstance(value, Mapping):
        return {name: json_value(each) for name, each in value.items()}
    if isinstance(value, DataSet):
        return {
            "columns": [*value.columns],
            "types": [each.name for each in value.types],
            "rows": [json_value(row) for row in value.rows],
        }
    if isinstance(value, Template):
        return {
            "version": value.version,
            "reference": value.reference,
            "is_definition": value.is_definition,
            "parameters": {each.name: json_value(each.value) for each in value.parameters},
            "metrics": [_member(each) for each in value.metrics],
        }
    if isinstance(value, MetaData):
        names = MetaData.__slots__
        return {name: getattr(value, name) for name in names if getattr(value, name) is not None}
    return value


def _member(metric: Metric) -> dict[str, Any]:
    return {
        "metric": metric.name,
        "type": None if metric.type is None else metric.type.name,
        "value": json_value(metric.value),
        "timestamp": metric.timestamp,
    }
