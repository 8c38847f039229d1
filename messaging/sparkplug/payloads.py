"""Sparkplug B payloads: bytes to values, and back.

**Bounds.** A payload has at most ``MAX_PAYLOAD`` bytes, also after decompression, and at most ``MAX_VALUES`` metrics,
members, properties, and items of tables and arrays together. Templates and property sets are nested ``MAX_DEPTH`` deep
at most. Fields of third parties are left out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from google.protobuf.message import DecodeError as ProtobufError

from messaging.codecs.encodings import Encodings, decompress
from messaging.errors import ArgumentError, DecodeError, EncodeError, MessagingError
from messaging.sparkplug.datatypes import (
    ARRAYS,
    BASIC,
    METRIC,
    DataType,
    check_text,
    data_type,
    read_array,
    read_scalar,
    read_text,
    write_array,
    write_scalar,
)
from messaging.sparkplug.model import DataSet, Definitions, MetaData, Metric, Parameter, Payload, Property, Template
from messaging.sparkplug.schema import PayloadMessage

MAX_PAYLOAD: Final = 4 * 2**20
MAX_VALUES: Final = 500_000
MAX_DEPTH: Final = 16
#: uuid of a payload whose body is another payload, compressed, as Eclipse Tahu writes it
_COMPRESSED: Final = "SPBV1.0_COMPRESSED"
_COMPRESSIONS: Final = {"GZIP": "gzip", "DEFLATE": "zlib"}
_PROPERTY: Final = BASIC | {DataType.PropertySet, DataType.PropertySetList}
#: a date that is null, as Eclipse Tahu writes it in data sets
_NO_DATE: Final = -(2**63)
_MAX_UINT64: Final = 2**64 - 1
_MAX_SEQ: Final = 255


# --- decoding


def decode(payload: bytes, definitions: Definitions | None = None) -> Payload:
    """Return a payload. One that Eclipse Tahu has compressed is decompressed.

    Args:
        payload: the bytes of a message.
        definitions: those of the birth, for names and types that the payload leaves out.

    Raises:
        DecodeError: it is no Sparkplug B payload, or beyond a bound of the module.
        ArgumentError: ``payload`` is not bytes.
    """
    message = _parse(payload)
    if message.HasField("uuid") and message.uuid == _COMPRESSED:
        message = _parse(_decompressed(message))
    return _PayloadReader().payload(message, definitions)


def _parse(payload: bytes) -> Any:
    if not isinstance(payload, bytes):
        raise ArgumentError(f"payload must be bytes, not {type(payload).__name__}")
    if len(payload) > MAX_PAYLOAD:
        raise DecodeError(f"a Sparkplug payload of {len(payload)} bytes; at most {MAX_PAYLOAD} are read")
    message = PayloadMessage()
    try:
        message.ParseFromString(payload)
    except ProtobufError:
        raise DecodeError("the payload is no Sparkplug B payload: it is no protobuf message of that schema") from None
    return message


def _decompressed(message: Any) -> bytes:
    algorithm = "DEFLATE"
    for each in message.metrics:
        if each.name == "algorithm" and each.WhichOneof("value") == "string_value":
            algorithm = read_text(each.string_value).upper()
    if algorithm not in _COMPRESSIONS:
        raise DecodeError(f"a compressed payload with the algorithm {algorithm!a:.40}; GZIP and DEFLATE are known")
    body: bytes = message.body
    return decompress(body, Encodings(None, (_COMPRESSIONS[algorithm],)), MAX_PAYLOAD)


class _PayloadReader:
    """Reads one payload, and counts its values."""

    def __init__(self) -> None:
        self._left = MAX_VALUES

    def _take(self, count: int) -> None:
        self._left -= count
        if self._left < 0:
            raise DecodeError(f"a payload has more than {MAX_VALUES} metrics, properties and items")

    def payload(self, message: Any, definitions: Definitions | None) -> Payload:
        self._take(len(message.metrics))
        seq = _optional(message, "seq")
        if seq is not None and seq > _MAX_SEQ:
            raise DecodeError(f"the sequence number is {seq}; it must be in 0 to {_MAX_SEQ}")
        return Payload(
            _optional(message, "timestamp"),
            tuple(self._metric(each, definitions, 0) for each in message.metrics),
            seq,
            _optional_text(message, "uuid"),
            _optional(message, "body"),
        )

    def _metric(self, message: Any, definitions: Definitions | None, depth: int) -> Metric:
        name = _optional_text(message, "name")
        alias = _optional(message, "alias")
        # some publishers send an empty name beside the alias
        definition = None if definitions is None else definitions.find(name or None, alias)
        try:
            kind = data_type(message.datatype, METRIC)
            if definition is not None:
                name, kind = definition.name, kind or definition.type
            value, kind = self._value(message, kind, None if definition is None else definition.members, depth)
            properties = _optional(message, "properties")
            return Metric(
                name,
                value,
                kind,
                _optional(message, "timestamp"),
                alias,
                message.is_historical,
                message.is_transient,
                _read_metadata(message.metadata) if message.HasField("metadata") else None,
                None if properties is None else self._properties(properties, depth + 1),
            )
        except DecodeError as error:
            label = repr(name) if name else f"with alias {alias}" if alias is not None else "without a name"
            raise DecodeError(f"metric {label:.120}: {error}") from None

    def _value(
        self, message: Any, kind: DataType | None, members: Definitions | None, depth: int
    ) -> tuple[Any, DataType | None]:
        field = message.WhichOneof("value")
        if kind is None and field in ("dataset_value", "template_value"):
            kind = DataType.DataSet if field == "dataset_value" else DataType.Template
        if message.is_null or field is None:
            return None, kind
        value = getattr(message, field)
        if kind is None:
            if field == "extension_value":
                raise DecodeError("the value is one of a third party, which is not understood")
            return read_text(value) if field == "string_value" else value, None
        if kind is DataType.DataSet and field == "dataset_value":
            return self._data_set(value), kind
        if kind is DataType.Template and field == "template_value":
            return self._template(value, members, depth + 1), kind
        if kind in ARRAYS and field == "bytes_value":
            return read_array(kind, value, self._take), kind
        return read_scalar(kind, field, value), kind

    def _data_set(self, message: Any) -> DataSet:
        self._take(len(message.columns) + len(message.rows) + sum(len(row.elements) for row in message.rows))
        columns = tuple(map(read_text, message.columns))
        types = tuple(_required(data_type(each, BASIC), "a column") for each in message.types)
        width = len(columns)
        if message.HasField("num_of_columns") and message.num_of_columns != width:
            raise DecodeError(f"a data set has {width} names of columns, and says that it has {message.num_of_columns}")
        if len(types) != width:
            raise DecodeError(f"a data set has {width} names of columns, and {len(types)} types")
        rows = []
        for row in message.rows:
            if len(row.elements) != width:
                raise DecodeError(f"a row of a data set has {len(row.elements)} values for {width} columns")
            rows.append(tuple(map(_basic, types, row.elements)))
        return DataSet(columns, types, tuple(rows))

    def _template(self, message: Any, members: Definitions | None, depth: int) -> Template:
        _check_depth(depth, DecodeError)
        self._take(len(message.parameters) + len(message.metrics))
        parameters = []
        for each in message.parameters:
            if not each.name:
                raise DecodeError("a parameter of a template has no name")
            kind = _required(data_type(each.type, BASIC), "a parameter of a template")
            parameters.append(Parameter(read_text(each.name), kind, _basic(kind, each)))
        return Template(
            _optional_text(message, "version"),
            _optional_text(message, "template_ref"),
            message.is_definition,
            tuple(parameters),
            tuple(self._metric(each, members, depth) for each in message.metrics),
        )

    def _properties(self, message: Any, depth: int) -> Mapping[str, Property]:
        _check_depth(depth, DecodeError)
        if len(message.keys) != len(message.values):
            raise DecodeError(f"a property set has {len(message.keys)} names, and {len(message.values)} values")
        self._take(len(message.keys))
        return {
            read_text(name): self._property(each, depth)
            for name, each in zip(message.keys, message.values, strict=True)
        }

    def _property(self, message: Any, depth: int) -> Property:
        kind = _required(data_type(message.type, _PROPERTY), "a property")
        field = message.WhichOneof("value")
        if message.is_null or field is None:
            return Property(kind)
        if kind is DataType.PropertySet and field == "propertyset_value":
            return Property(kind, self._properties(message.propertyset_value, depth + 1))
        if kind is DataType.PropertySetList and field == "propertysets_value":
            sets = message.propertysets_value.propertyset
            self._take(len(sets))
            return Property(kind, tuple(self._properties(each, depth + 1) for each in sets))
        return Property(kind, read_scalar(kind, field, getattr(message, field)))


def _optional(message: Any, name: str) -> Any:
    return getattr(message, name) if message.HasField(name) else None


def _optional_text(message: Any, name: str) -> str | None:
    return read_text(getattr(message, name)) if message.HasField(name) else None


def _basic(kind: DataType, message: Any) -> Any:
    field = message.WhichOneof("value")
    if field is None:
        return None
    found = read_scalar(kind, field, getattr(message, field))
    return None if kind is DataType.DateTime and found == _NO_DATE else found


def _required(kind: DataType | None, what: str) -> DataType:
    if kind is None:
        raise DecodeError(f"{what} has no type")
    return kind


def _check_depth(depth: int, kind: type[MessagingError]) -> None:
    if depth > MAX_DEPTH:
        raise kind(f"templates or property sets are nested more than {MAX_DEPTH} deep")


def _read_metadata(message: Any) -> MetaData:
    found = {name: getattr(message, name) for name in MetaData.__slots__ if message.HasField(name)}
    for each in found.values():
        if isinstance(each, bytes):
            read_text(each)
    return MetaData(**found)


# --- encoding


def encode(payload: Payload) -> bytes:
    """Return the bytes of a payload.

    Raises:
        EncodeError: a value does not fit its type, a type is missing, or the payload is beyond a bound of the module.
        ArgumentError: ``payload`` is no ``Payload``.
    """
    if not isinstance(payload, Payload):
        raise ArgumentError(f"payload must be a Payload, not {type(payload).__name__}")
    message = PayloadMessage()
    _put_number(message, "timestamp", payload.timestamp)
    _put_number(message, "seq", payload.seq, _MAX_SEQ)
    _put_text(message, "uuid", payload.uuid)
    if payload.body is not None:
        if not isinstance(payload.body, bytes):
            raise EncodeError(f"body must be bytes, not {type(payload.body).__name__}")
        message.body = payload.body
    for each in _items(payload.metrics, Metric, "metrics"):
        _write_metric(message.metrics.add(), each, 0)
    if message.ByteSize() > MAX_PAYLOAD:
        raise EncodeError(f"a Sparkplug payload of {message.ByteSize()} bytes; at most {MAX_PAYLOAD} are written")
    made: bytes = message.SerializeToString()
    return made


def _items(found: Any, kind: type, what: str) -> Any:
    if not isinstance(found, (list, tuple)):
        raise EncodeError(f"{what} must be a list or a tuple, not {type(found).__name__}")
    for each in found:
        if not isinstance(each, kind):
            raise EncodeError(f"{what} must hold values of {kind.__name__}, not {type(each).__name__}")
    return found


def _put_number(message: Any, name: str, value: Any, most: int = _MAX_UINT64) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= most:
        raise EncodeError(f"{name} must be an int from 0 to {most}")
    setattr(message, name, value)


def _put_text(message: Any, name: str, value: Any) -> None:
    if value is not None:
        setattr(message, name, _within(name, lambda: check_text(value)))


def _put_flag(message: Any, name: str, value: Any, *, always: bool = False) -> None:
    if not isinstance(value, bool):
        raise EncodeError(f"{name} must be a bool, not {type(value).__name__}")
    if value or always:
        setattr(message, name, value)


def _within(place: str, make: Callable[[], Any]) -> Any:
    try:
        return make()
    except EncodeError as error:
        raise EncodeError(f"{place}: {error}") from None


def _checked_type(kind: Any, allowed: frozenset[DataType]) -> DataType:
    if not isinstance(kind, DataType):
        raise EncodeError(f"type must be a DataType, not {type(kind).__name__}")
    if kind not in allowed:
        raise EncodeError(f"the data type {kind.name} is not allowed here")
    return kind


def _write_metric(message: Any, metric: Metric, depth: int) -> None:
    _put_text(message, "name", metric.name)
    label = f"metric {metric.name!a}" if metric.name else f"metric with alias {metric.alias!a:.40}"
    _within(label[:120], lambda: _fill_metric(message, metric, depth))


def _fill_metric(message: Any, metric: Metric, depth: int) -> None:
    _put_number(message, "alias", metric.alias)
    _put_number(message, "timestamp", metric.timestamp)
    _put_flag(message, "is_historical", metric.is_historical)
    _put_flag(message, "is_transient", metric.is_transient)
    if metric.metadata is not None:
        _write_metadata(message.metadata, metric.metadata)
    if metric.properties is not None:
        message.properties.SetInParent()
        _write_properties(message.properties, metric.properties, depth + 1)
    if metric.type is not None:
        message.datatype = _checked_type(metric.type, METRIC)
    if metric.value is None:
        message.is_null = True
        return
    if metric.type is None:
        raise EncodeError("a metric with a value needs its type")
    if metric.type is DataType.DataSet:
        message.dataset_value.SetInParent()
        _write_data_set(message.dataset_value, metric.value)
    elif metric.type is DataType.Template:
        message.template_value.SetInParent()
        _write_template(message.template_value, metric.value, depth + 1)
    elif metric.type in ARRAYS:
        message.bytes_value = write_array(metric.type, metric.value)
    else:
        _write_scalar(message, metric.type, metric.value)


def _write_scalar(message: Any, kind: DataType, value: Any) -> None:
    field, found = write_scalar(kind, value)
    setattr(message, field, found)


def _write_metadata(message: Any, metadata: Any) -> None:
    if not isinstance(metadata, MetaData):
        raise EncodeError(f"metadata must be a MetaData, not {type(metadata).__name__}")
    message.SetInParent()
    for name in MetaData.__slots__:
        value = getattr(metadata, name)
        if value is None:
            continue
        if name == "is_multi_part":
            _put_flag(message, name, value, always=True)
        elif name in ("size", "seq"):
            _put_number(message, name, value)
        else:
            _put_text(message, name, value)


def _write_properties(message: Any, properties: Any, depth: int) -> None:
    _check_depth(depth, EncodeError)
    if not isinstance(properties, Mapping):
        raise EncodeError(f"properties must be a mapping, not {type(properties).__name__}")
    for name, each in properties.items():
        if not isinstance(each, Property):
            raise EncodeError(f"properties must hold values of Property, not {type(each).__name__}")
        message.keys.append(_within("name of a property", lambda name=name: check_text(name)))  # type: ignore[misc]
        _within(f"property {name!a:.90}", lambda each=each: _write_property(message.values.add(), each, depth))  # type: ignore[misc]


def _write_property(message: Any, found: Property, depth: int) -> None:
    kind = _checked_type(found.type, _PROPERTY)
    message.type = kind
    if found.value is None:
        message.is_null = True
    elif kind is DataType.PropertySet:
        message.propertyset_value.SetInParent()
        _write_properties(message.propertyset_value, found.value, depth + 1)
    elif kind is DataType.PropertySetList:
        message.propertysets_value.SetInParent()
        for each in _items(found.value, Mapping, "PropertySetList"):
            _write_properties(message.propertysets_value.propertyset.add(), each, depth + 1)
    else:
        _write_scalar(message, kind, found.value)


def _write_data_set(message: Any, found: Any) -> None:
    if not isinstance(found, DataSet):
        raise EncodeError(f"must be a DataSet, not {type(found).__name__}")
    columns = _items(found.columns, str, "columns")
    types = [_checked_type(each, BASIC) for each in _items(found.types, DataType, "types")]
    if len(columns) != len(types):
        raise EncodeError(f"a data set has {len(columns)} columns, and {len(types)} types")
    message.num_of_columns = len(columns)
    message.columns.extend(map(check_text, columns))
    message.types.extend(types)
    for row in _items(found.rows, (list, tuple), "rows"):  # type: ignore[arg-type]
        if len(row) != len(types):
            raise EncodeError(f"a row has {len(row)} values for {len(types)} columns")
        made = message.rows.add()
        for kind, value in zip(types, row, strict=True):
            element = made.elements.add()
            if value is not None:
                _write_scalar(element, kind, value)


def _write_template(message: Any, found: Any, depth: int) -> None:
    _check_depth(depth, EncodeError)
    if not isinstance(found, Template):
        raise EncodeError(f"must be a Template, not {type(found).__name__}")
    _put_text(message, "version", found.version)
    _put_text(message, "template_ref", found.reference)
    _put_flag(message, "is_definition", found.is_definition, always=True)
    for each in _items(found.parameters, Parameter, "parameters"):
        made = message.parameters.add(type=_checked_type(each.type, BASIC))
        made.name = check_text(each.name)
        if each.value is not None:
            _write_scalar(made, each.type, each.value)
    for each in _items(found.metrics, Metric, "metrics"):
        _write_metric(message.metrics.add(), each, depth)
