"""The protobuf messages of Sparkplug B payloads (Sparkplug 3.0, 6.4.1).

They are built from the tables below, in a descriptor pool of their own: a program may have another module of the same
schema, such as that of Eclipse Tahu, and protobuf refuses to have a message twice in one pool.
"""

from __future__ import annotations

from typing import Any, Final

from google.protobuf.descriptor_pb2 import DescriptorProto, FieldDescriptorProto, FileDescriptorProto
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass

_PACKAGE: Final = "messaging.sparkplug"
#: message -> fields of the ``oneof value``: number and type by name
_VALUES: Final[dict[str, tuple[str, ...]]] = {
    "Metric": (
        "10 uint32 int_value", "11 uint64 long_value", "12 float float_value", "13 double double_value",
        "14 bool boolean_value", "15 string string_value", "16 bytes bytes_value", "17 DataSet dataset_value",
        "18 Template template_value", "19 Extension extension_value",
    ),
    "PropertyValue": (
        "3 uint32 int_value", "4 uint64 long_value", "5 float float_value", "6 double double_value",
        "7 bool boolean_value", "8 string string_value", "9 PropertySet propertyset_value",
        "10 PropertySetList propertysets_value", "11 Extension extension_value",
    ),
    "Parameter": (
        "3 uint32 int_value", "4 uint64 long_value", "5 float float_value", "6 double double_value",
        "7 bool boolean_value", "8 string string_value", "9 Extension extension_value",
    ),
    "DataSetValue": (
        "1 uint32 int_value", "2 uint64 long_value", "3 float float_value", "4 double double_value",
        "5 bool boolean_value", "6 string string_value", "7 Extension extension_value",
    ),
}  # fmt: skip
#: message -> other fields; ``*`` marks repeated ones
_FIELDS: Final[dict[str, tuple[str, ...]]] = {
    "Payload": ("1 uint64 timestamp", "2 Metric *metrics", "3 uint64 seq", "4 string uuid", "5 bytes body"),
    "Metric": (
        "1 string name", "2 uint64 alias", "3 uint64 timestamp", "4 uint32 datatype", "5 bool is_historical",
        "6 bool is_transient", "7 bool is_null", "8 MetaData metadata", "9 PropertySet properties",
    ),
    "MetaData": (
        "1 bool is_multi_part", "2 string content_type", "3 uint64 size", "4 uint64 seq", "5 string file_name",
        "6 string file_type", "7 string md5", "8 string description",
    ),
    "PropertyValue": ("1 uint32 type", "2 bool is_null"),
    "PropertySet": ("1 string *keys", "2 PropertyValue *values"),
    "PropertySetList": ("1 PropertySet *propertyset",),
    "DataSet": ("1 uint64 num_of_columns", "2 string *columns", "3 uint32 *types", "4 Row *rows"),
    "Row": ("1 DataSetValue *elements",),
    "DataSetValue": (),
    "Template": (
        "1 string version", "2 Metric *metrics", "3 Parameter *parameters", "4 string template_ref",
        "5 bool is_definition",
    ),
    "Parameter": ("1 string name", "2 uint32 type"),
    "Extension": (),
}  # fmt: skip
_TYPES: Final = {
    "uint32": FieldDescriptorProto.TYPE_UINT32,
    "uint64": FieldDescriptorProto.TYPE_UINT64,
    "float": FieldDescriptorProto.TYPE_FLOAT,
    "double": FieldDescriptorProto.TYPE_DOUBLE,
    "bool": FieldDescriptorProto.TYPE_BOOL,
    "string": FieldDescriptorProto.TYPE_STRING,
    "bytes": FieldDescriptorProto.TYPE_BYTES,
}


def _add(message: DescriptorProto, text: str, *, is_value: bool) -> None:
    number, kind, name = text.split()
    field = message.field.add(
        name=name.removeprefix("*"),
        number=int(number),
        label=FieldDescriptorProto.LABEL_REPEATED if name.startswith("*") else FieldDescriptorProto.LABEL_OPTIONAL,
    )
    if kind in _TYPES:
        field.type = _TYPES[kind]
    else:
        field.type, field.type_name = FieldDescriptorProto.TYPE_MESSAGE, f".{_PACKAGE}.{kind}"
    if is_value:
        field.oneof_index = 0


def _build() -> Any:
    file = FileDescriptorProto(name="messaging/sparkplug.proto", package=_PACKAGE, syntax="proto2")
    for name, fields in _FIELDS.items():
        message = file.message_type.add(name=name)
        for each in fields:
            _add(message, each, is_value=False)
        if name in _VALUES:
            message.oneof_decl.add(name="value")
            for each in _VALUES[name]:
                _add(message, each, is_value=True)
    pool = DescriptorPool()
    pool.AddSerializedFile(file.SerializeToString())
    return GetMessageClass(pool.FindMessageTypeByName(f"{_PACKAGE}.Payload"))


#: class of the protobuf message ``Payload``
PayloadMessage: Final = _build()
