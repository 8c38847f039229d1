"""Payloads: round trips of arbitrary values, and bytes of hostile publishers."""

from __future__ import annotations

import contextlib
import math
import struct
import zlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from messaging import MessagingError
from messaging.errors import ArgumentError, DecodeError, EncodeError
from messaging.sparkplug import (
    DataSet,
    DataType,
    MetaData,
    Metric,
    Parameter,
    Payload,
    Property,
    Template,
    decode,
    encode,
)
from messaging.sparkplug.payloads import MAX_DEPTH, MAX_PAYLOAD, MAX_VALUES
from messaging.testing.tables import table

# --- the wire format, written by hand


def varint(number: int) -> bytes:
    found = bytearray()
    while number > 0x7F:
        found.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*found, number])


def field(number: int, content: bytes) -> bytes:
    return varint(number << 3 | 2) + varint(len(content)) + content


def integer(number: int, value: int) -> bytes:
    return varint(number << 3) + varint(value)


def metric(kind: int, value: bytes, name: str = "m") -> bytes:
    return field(2, field(1, name.encode()) + integer(4, kind) + value)


# --- round trips

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
UINT64 = st.integers(0, 2**64 - 1)


def signed(bits: int) -> st.SearchStrategy[int]:
    return st.integers(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)


def unsigned(bits: int) -> st.SearchStrategy[int]:
    return st.integers(0, 2**bits - 1)


BASIC: dict[DataType, st.SearchStrategy[Any]] = {
    DataType.Int8: signed(8),
    DataType.Int16: signed(16),
    DataType.Int32: signed(32),
    DataType.Int64: signed(64),
    DataType.UInt8: unsigned(8),
    DataType.UInt16: unsigned(16),
    DataType.UInt32: unsigned(32),
    DataType.UInt64: unsigned(64),
    DataType.Float: st.floats(width=32, allow_nan=False),
    DataType.Double: st.floats(allow_nan=False),
    DataType.Boolean: st.booleans(),
    DataType.String: TEXT,
    DataType.Text: TEXT,
    # the lowest one is null in data sets
    DataType.DateTime: st.integers(-(2**63) + 1, 2**63 - 1),
}
ARRAYS: dict[DataType, st.SearchStrategy[Any]] = {
    DataType[f"{kind.name}Array"]: st.lists(
        values if kind is not DataType.String else TEXT.filter(lambda text: "\0" not in text), max_size=20
    ).map(tuple)
    for kind, values in BASIC.items()
    if kind is not DataType.Text
}


def same_float(value: Any) -> Any:
    """Return a 32-bit number by its bits: it is read as the shortest decimal number that is the same."""
    return ("float", struct.pack("<f", value)) if isinstance(value, float) else value


def basic_value(kinds: dict[DataType, st.SearchStrategy[Any]]) -> st.SearchStrategy[tuple[DataType, Any]]:
    return st.sampled_from([*kinds]).flatmap(lambda kind: st.tuples(st.just(kind), st.none() | kinds[kind]))


def data_sets() -> st.SearchStrategy[DataSet]:
    kinds = st.lists(st.sampled_from([*BASIC]), max_size=4)
    return kinds.flatmap(
        lambda types: st.builds(
            DataSet,
            st.tuples(*[TEXT for _ in types]),
            st.just(tuple(types)),
            st.lists(st.tuples(*[st.none() | BASIC[kind] for kind in types]), max_size=4).map(tuple),
        )
    )


PROPERTIES = st.recursive(
    st.dictionaries(TEXT, basic_value(BASIC).map(lambda pair: Property(*pair)), max_size=3),
    lambda inner: st.dictionaries(
        TEXT,
        inner.map(lambda found: Property(DataType.PropertySet, found))
        | st.lists(inner, max_size=2).map(lambda found: Property(DataType.PropertySetList, tuple(found))),
        max_size=2,
    ),
    max_leaves=4,
)
METADATA = st.builds(
    MetaData,
    st.none() | st.booleans(), st.none() | TEXT, st.none() | UINT64, st.none() | UINT64,
    st.none() | TEXT, st.none() | TEXT, st.none() | TEXT, st.none() | TEXT,
)  # fmt: skip
SIMPLE = {
    **BASIC,
    **ARRAYS,
    DataType.UUID: TEXT,
    DataType.Bytes: st.binary(max_size=20),
    DataType.File: st.binary(max_size=20),
    DataType.DataSet: data_sets(),
}


def metrics(values: st.SearchStrategy[tuple[DataType, Any]]) -> st.SearchStrategy[Metric]:
    return st.builds(
        lambda pair, **rest: Metric(type=pair[0], value=pair[1], **rest),
        values,
        name=st.none() | TEXT,
        timestamp=st.none() | UINT64,
        alias=st.none() | UINT64,
        is_historical=st.booleans(),
        is_transient=st.booleans(),
        metadata=st.none() | METADATA,
        properties=st.none() | PROPERTIES,
    )


PARAMETERS = st.builds(lambda name, pair: Parameter(name, *pair), TEXT.filter(bool), basic_value(BASIC))
METRICS = st.recursive(
    metrics(basic_value(SIMPLE)),
    lambda inner: metrics(
        st.builds(
            Template,
            st.none() | TEXT,
            st.none() | TEXT,
            st.booleans(),
            st.lists(PARAMETERS, max_size=2).map(tuple),
            st.lists(inner, max_size=2).map(tuple),
        ).map(lambda found: (DataType.Template, found))
    ),
    max_leaves=4,
)
PAYLOADS = st.builds(
    Payload,
    st.none() | UINT64,
    st.lists(METRICS, max_size=3).map(tuple),
    st.none() | st.integers(0, 255),
    st.none() | TEXT.filter(lambda text: text != "SPBV1.0_COMPRESSED"),
    st.none() | st.binary(max_size=20),
)


@given(PAYLOADS)
def test_what_is_written_is_read_again(payload: Payload) -> None:
    data = encode(payload)
    found = decode(data)
    assert encode(found) == data
    assert decode(encode(found)) == found
    if "Float" not in repr(payload):  # 32-bit numbers are read as shorter decimal ones
        assert found == payload


@given(st.fixed_dictionaries({**BASIC, **ARRAYS}))
def test_every_type_keeps_its_values(values: dict[DataType, Any]) -> None:
    payload = Payload(1, tuple(Metric(kind.name, value, kind) for kind, value in values.items()))
    found = decode(encode(payload)).metrics
    assert len(found) == len(values)
    for metric, (kind, value) in zip(found, values.items(), strict=True):
        if kind in (DataType.Float, DataType.FloatArray):
            items, expected = (metric.value, value) if kind is DataType.FloatArray else ([metric.value], [value])
            assert [*map(same_float, items)] == [*map(same_float, expected)]
        else:
            assert metric.value == value
            assert type(metric.value) is type(value)


@table("value", [12.1, 0.1, 3.4028235e38, 1.4013e-45, 1.1754944e-38, -7.0, 16777216.0])
def test_a_float_is_read_as_a_short_number_with_its_bits(value: float) -> None:
    (found,) = decode(encode(Payload(1, (Metric("m", value, DataType.Float),)))).metrics
    assert found.value == value


@table("kind", [DataType.Float, DataType.Double])
def test_numbers_that_are_not_finite_are_kept(kind: DataType) -> None:
    made = [Metric("m", value, kind) for value in (math.inf, -math.inf, math.nan)]
    found = [each.value for each in decode(encode(Payload(1, made))).metrics]
    assert found[:2] == [math.inf, -math.inf]
    assert math.isnan(found[2])


# --- what publishers do differently


@table(
    "kind, number, value, expected",
    [
        (DataType.Int8, 10, 0xFF, -1),
        (DataType.Int8, 10, 0xFFFFFFFF, -1),
        (DataType.Int8, 11, 2**64 - 1, -1),
        (DataType.Int16, 10, 0x8000, -(2**15)),
        (DataType.Int16, 10, 0xFFFF8000, -(2**15)),
        (DataType.Int32, 11, 2**64 - 2**31, -(2**31)),
        (DataType.UInt32, 11, 2**32 - 1, 2**32 - 1),
        (DataType.Int64, 11, 2**63, -(2**63)),
    ],
)
def test_integers_of_other_widths_are_read(kind: DataType, number: int, value: int, expected: int) -> None:
    assert decode(metric(kind, integer(number, value))).metrics[0].value == expected


def test_a_metric_without_value_is_null() -> None:
    assert decode(metric(DataType.Int8, b"")).metrics[0].value is None
    assert decode(metric(DataType.Int8, integer(7, 1) + integer(10, 5))).metrics[0].is_null


def test_a_number_without_a_type_is_as_it_was_transmitted() -> None:
    found = decode(field(2, integer(2, 7) + integer(10, 0xFFFFFFFF))).metrics[0]
    assert (found.type, found.alias, found.value) == (None, 7, 0xFFFFFFFF)


def test_fields_of_third_parties_are_left_out() -> None:
    extended = field(2, field(1, b"m") + integer(4, 1) + integer(10, 5) + field(99, b"theirs")) + field(6, b"theirs")
    assert decode(extended) == Payload(None, (Metric("m", 5, DataType.Int8),))


# --- hostile publishers

DEEP = MAX_DEPTH + 2


def nested_template(depth: int) -> bytes:
    found = b""
    for _ in range(depth):
        found = field(1, b"t") + integer(4, DataType.Template) + field(18, field(2, found) if found else b"")
    return field(2, found)


def nested_properties(depth: int) -> bytes:
    found = field(1, b"p") + field(2, integer(1, DataType.Int32) + integer(3, 1))
    for _ in range(depth):
        found = field(1, b"p") + field(2, integer(1, DataType.PropertySet) + field(9, found))
    return field(2, field(1, b"m") + integer(4, 1) + integer(10, 1) + field(9, found))


HOSTILE = {
    "text": (b"not protobuf at all", "no Sparkplug B payload"),
    "truncated": (encode(Payload(1, (Metric("m", "text", DataType.String),)))[:-2], "no Sparkplug B payload"),
    "length": (b"\x12\xff\xff\xff\xff\x07abc", "no Sparkplug B payload"),
    "varint": (b"\x08" + b"\xff" * 11, "no Sparkplug B payload"),
    "group": (b"\x0b" * 1000, "no Sparkplug B payload"),
    "deep template": (nested_template(DEEP), "more than 16 deep"),
    "very deep template": (nested_template(5000), "no Sparkplug B payload"),
    "deep properties": (nested_properties(DEEP), "more than 16 deep"),
    "name": (field(2, field(1, b"\xff\xfe") + integer(4, 1)), "not UTF-8"),
    "string": (metric(12, field(15, b"\xff")), "'m': a text is not UTF-8"),
    "uuid": (field(4, b"\xff"), "not UTF-8"),
    "metadata": (field(2, field(8, field(2, b"\xff"))), "not UTF-8"),
    "type": (metric(35, integer(10, 1)), "no data type 35"),
    "type of properties": (metric(20, integer(10, 1)), "PropertySet is not allowed"),
    "range": (metric(1, integer(10, 300)), "300 is out of the range of Int8"),
    "unsigned range": (metric(5, integer(10, 256)), "out of the range of UInt8"),
    "field": (metric(1, field(15, b"5")), "Int8 is transmitted as int_value, not as string_value"),
    "wide type": (metric(4, integer(10, 5)), "Int64 is transmitted as long_value"),
    "array length": (metric(23, field(16, b"abc")), "3 bytes are no Int16Array"),
    "boolean array": (metric(32, field(16, b"\xff\xff\xff\xff\x00")), "BooleanArray of 4294967295 items"),
    "short boolean array": (metric(32, field(16, b"\x01")), "begins with the number"),
    "string array": (metric(33, field(16, b"abc")), "does not end with a zero byte"),
    "text of an array": (metric(33, field(16, b"\xff\x00")), "not UTF-8"),
    "sequence": (integer(3, 256), "sequence number is 256"),
    "columns": (metric(16, field(17, integer(1, 3) + field(2, b"a") + integer(3, 1))), "says that it has 3"),
    "types": (metric(16, field(17, field(2, b"a"))), "1 names of columns, and 0 types"),
    "column type": (metric(16, field(17, field(2, b"a") + integer(3, 16))), "DataSet is not allowed"),
    "row": (metric(16, field(17, field(4, field(1, b"")))), "1 values for 0 columns"),
    "keys": (metric(1, field(9, field(1, b"p"))), "1 names, and 0 values"),
    "property type": (metric(1, field(9, field(1, b"p") + field(2, b""))), "a property has no type"),
    "parameter": (metric(19, field(18, field(3, b""))), "parameter of a template has no name"),
    "third party": (field(2, field(1, b"m") + field(19, b"")), "third party"),
    "third party with a type": (metric(1, field(19, b"")), "not as extension_value"),
    "metrics": (b"\x12\x00" * (MAX_VALUES + 1), "more than 500000"),
    "items": (metric(22, field(16, bytes(MAX_VALUES + 1))), "more than 500000"),
    "bits": (metric(32, field(16, struct.pack("<I", MAX_VALUES * 8) + bytes(MAX_VALUES))), "more than 500000"),
    "size": (bytes(MAX_PAYLOAD + 1), "at most 4194304"),
    "bomb": (field(4, b"SPBV1.0_COMPRESSED") + field(5, zlib.compress(bytes(MAX_PAYLOAD + 1))), "4194304"),
    "compression": (field(4, b"SPBV1.0_COMPRESSED") + field(5, b"xx"), "zlib"),
    "algorithm": (
        field(2, field(1, b"algorithm") + field(15, b"LZMA")) + field(4, b"SPBV1.0_COMPRESSED"),
        "the algorithm 'LZMA'",
    ),
}


@table("data, text", HOSTILE)
def test_a_hostile_payload_is_refused(data: bytes, text: str) -> None:
    with pytest.raises(DecodeError) as raised:
        decode(data)
    assert text in str(raised.value)
    assert len(str(raised.value)) < 1000


def test_a_compressed_payload_in_a_compressed_one_is_not_expanded() -> None:
    data = encode(Payload(1, (Metric("m", 1, DataType.Int8),)))
    for _ in range(3):
        data = encode(Payload(uuid="SPBV1.0_COMPRESSED", body=zlib.compress(data)))
    assert decode(data).uuid == "SPBV1.0_COMPRESSED"


@given(st.binary(max_size=200))
def test_any_bytes_are_read_or_refused(data: bytes) -> None:
    try:
        payload = decode(data)
    except DecodeError:
        return
    assert isinstance(payload, Payload)


@given(PAYLOADS, st.data())
def test_a_damaged_payload_is_read_or_refused(payload: Payload, data: st.DataObject) -> None:
    found = bytearray(encode(payload))
    if found:
        found[data.draw(st.integers(0, len(found) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(DecodeError):
        decode(bytes(found[: data.draw(st.integers(0, len(found)))]))


# --- values that cannot be written


@table(
    "made, text",
    [
        (Metric("m", 128, DataType.Int8), "metric 'm': Int8 must be an int from -128 to 127"),
        (Metric("m", -1, DataType.UInt8), "from 0 to 255"),
        (Metric("m", True, DataType.Int8), "must be an int"),
        (Metric("m", "5", DataType.Double), "must be a float, not str"),
        (Metric("m", 1e39, DataType.Float), "too large"),
        (Metric("m", 10**400, DataType.Double), "too large"),
        (Metric("m", 1, DataType.Boolean), "Boolean must be a bool"),
        (Metric("m", b"x", DataType.String), "String must be a str"),
        (Metric("m", "x", DataType.Bytes), "Bytes must be a bytes"),
        (Metric("m", "\ud800", DataType.String), "surrogates"),
        (Metric("\ud800", 1, DataType.Int8), "surrogates"),
        (Metric("m", 1), "needs its type"),
        (Metric("m", 1, 1), "must be a DataType"),  # type: ignore[arg-type]
        (Metric("m", 1, DataType.PropertySet), "not allowed here"),
        (Metric("m", ("a\0b",), DataType.StringArray), "U+0000"),
        (Metric("m", 5, DataType.Int8Array), "must be a list or a tuple"),
        (Metric("m", (200,), DataType.Int8Array), "from -128 to 127"),
        (Metric("m", 5, DataType.DataSet), "must be a DataSet"),
        (Metric("m", DataSet(("a",), (), ()), DataType.DataSet), "1 columns, and 0 types"),
        (Metric("m", DataSet(("a",), (DataType.Int8,), ((1, 2),)), DataType.DataSet), "2 values for 1 columns"),
        (Metric("m", DataSet(("a",), (DataType.File,), ()), DataType.DataSet), "File is not allowed"),
        (Metric("m", 5, DataType.Template), "must be a Template"),
        (Metric("m", timestamp=-1), "timestamp must be an int"),
        (Metric("m", alias=2**64), "alias must be an int"),
        (Metric("m", is_historical=1), "is_historical must be a bool"),  # type: ignore[arg-type]
        (Metric("m", metadata=5), "must be a MetaData"),  # type: ignore[arg-type]
        (Metric("m", properties={"p": 5}), "values of Property"),  # type: ignore[dict-item]
        (Metric("m", properties={"p": Property(DataType.Bytes, b"")}), "property 'p': the data type Bytes"),
        (Metric("m", properties=5), "must be a mapping"),  # type: ignore[arg-type]
    ],
    ids=str,
)
def test_a_metric_that_cannot_be_written_is_refused(made: Metric, text: str) -> None:
    with pytest.raises(EncodeError) as raised:
        encode(Payload(1, (made,)))
    assert text in str(raised.value)


def test_nesting_is_bounded_when_writing() -> None:
    made = Metric("m", Template(), DataType.Template)
    for _ in range(DEEP):
        made = Metric("m", Template(metrics=(made,)), DataType.Template)
    with pytest.raises(EncodeError, match="more than 16 deep"):
        encode(Payload(1, (made,)))


@table("junk", [None, 5, "x", bytearray(b"x"), object(), {}])
def test_other_arguments_are_refused(junk: Any) -> None:
    with pytest.raises(ArgumentError):
        decode(junk)
    with pytest.raises(ArgumentError):
        encode(junk)
    for made in (Payload(metrics=junk), Payload(metrics=(junk,)), Payload(seq=256), Payload(body=5)):  # type: ignore[arg-type]
        with pytest.raises(MessagingError):
            encode(made)
