"""Vectors of Eclipse Tahu and of the specification are read, and written back to the same bytes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from messaging.sparkplug import DataSet, DataType, Metric, Payload, Property, Template, decode, encode
from messaging.testing.tables import table

VECTORS: dict[str, list[dict[str, Any]]] = json.loads(
    (Path(__file__).parent / "vectors" / "tahu.json").read_text(encoding="utf-8")
)["groups"]
CASES = [
    pytest.param(group, each, id=f"{group}-{number}-{each['name']}")
    for group, vectors in VECTORS.items()
    for number, each in enumerate(vectors)
]
#: groups whose publishers choose other bytes for the same value
OTHER_BYTES = {"PayloadUtilTest.compressionData", "negative integers as the Java encoder widens them"}


def plain(value: Any) -> Any:
    """Return a value of a metric as the vectors write it."""
    if isinstance(value, bytes):
        return {"bytes": value.hex()}
    if isinstance(value, tuple):
        return [*value]
    if isinstance(value, DataSet):
        return {
            "columns": [*value.columns],
            "types": [each.name for each in value.types],
            "rows": [[*row] for row in value.rows],
        }
    if isinstance(value, Template):
        properties = value.metrics[-1].properties
        assert properties is not None
        return {
            "version": value.version,
            "reference": value.reference,
            "is_definition": value.is_definition,
            "parameters": {each.name: each.value for each in value.parameters},
            "metrics": [[each.name, each.type.name, each.value] for each in value.metrics if each.type is not None],
            "properties": {name: each.value for name, each in properties.items()},
        }
    return value


@table("group, vector", CASES)
def test_a_vector_is_read(group: str, vector: dict[str, Any]) -> None:
    payload = decode(bytes.fromhex(vector["hex"]))
    (metric,) = payload.metrics
    expected = {"alias": None, "timestamp": None, "is_historical": False, "is_transient": False, **vector["metric"]}
    assert metric.type is not None
    assert {
        "name": metric.name,
        "type": metric.type.name,
        "value": plain(metric.value),
        "alias": metric.alias,
        "timestamp": metric.timestamp,
        "is_historical": metric.is_historical,
        "is_transient": metric.is_transient,
    } == expected
    if "metadata" in vector:
        assert metric.metadata is not None
        found = {name: getattr(metric.metadata, name) for name in type(metric.metadata).__slots__}
        assert {name: each for name, each in found.items() if each is not None} == vector["metadata"]
    if "payload" in vector:
        assert payload.body == vector["payload"]["body"].encode()
        assert (payload.seq, payload.uuid, payload.timestamp) == (0, "123456789", 1479424852194)


@table("group, vector", CASES)
def test_a_vector_is_written_back(group: str, vector: dict[str, Any]) -> None:
    data = bytes.fromhex(vector["hex"])
    payload = decode(data)
    assert decode(encode(payload)) == payload
    # false flags, and null values, may be written or left out; UInt32 may be transmitted in either field
    has_options = "metricFieldsData" in group or vector["name"] in ("TestDataSet", "TestUnsignedInt")
    if group not in OTHER_BYTES and not has_options:
        assert encode(payload) == data


def test_values_keep_their_python_types() -> None:
    vectors = {each["name"]: each for each in VECTORS["SparkplugTest.metricData"]}
    metrics = {name: decode(bytes.fromhex(each["hex"])).metrics[0] for name, each in vectors.items()}
    assert metrics["TestBoolean"].value is True
    assert isinstance(metrics["TestFloat"].value, float)
    assert metrics["TestDataSet"].type is DataType.DataSet
    template = metrics["TestTemplateDef"].value
    assert isinstance(template, Template)
    assert template.metrics[2].properties == {
        "prop1a": Property(DataType.Float, 1.23),
        "prop2": Property(DataType.DateTime, 1479424852194),
        "prop3": Property(DataType.Text, "PROP3_TEXT"),
        "prop4": Property(DataType.String, None),
    }


def test_every_data_type_of_metrics_has_a_vector() -> None:
    found = {each["metric"]["type"] for vectors in VECTORS.values() for each in vectors}
    assert found == {each.name for each in DataType} - {"PropertySet", "PropertySetList"}


@table("text, seq", [("0800", None), ("08001800", 0), ("08001801", 1)], ids=["none", "zero", "one"])
def test_sequence_numbers_of_the_tahu_sequence_test(text: str, seq: int | None) -> None:
    payload = Payload(0, (), seq)
    assert encode(payload).hex() == text
    assert decode(bytes.fromhex(text)) == payload


def test_a_rebirth_request_is_what_the_specification_shows() -> None:
    """Sparkplug 3.0, 6.4.21: no sequence number, one boolean metric that is true."""
    request = Payload(1486144502122, (Metric("Node Control/Rebirth", True, DataType.Boolean, 1486144502122),))
    header, name, rest = "08eaf2f5a8a02b1221", b"Node Control/Rebirth".hex(), "18eaf2f5a8a02b200b7001"
    assert encode(request).hex() == f"{header}0a14{name}{rest}"
