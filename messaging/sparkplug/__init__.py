"""Sparkplug B: payloads, topics, and the state of edge nodes.

``decode`` and ``encode`` convert payloads, ``SparkplugDecoder`` turns messages into readings: it keeps births, resolves
aliases, checks sequence numbers, asks for rebirths, and marks metrics stale. See ``docs/sparkplug.md``.

::

    datatypes     data types, and their values on the wire
    model         payloads as values, and what a birth defines
    schema        the protobuf messages
    payloads      bytes to payloads, and back
    topics        topics of Sparkplug B
    readings      metrics with their origin and quality
    decoder       the state of edge nodes

Needs the extra ``sparkplug``.
"""

from messaging.errors import MissingExtraError as _MissingExtraError

try:
    import google.protobuf as _protobuf  # noqa: F401
except ImportError as error:
    raise _MissingExtraError("sparkplug", "messaging.sparkplug") from error

from messaging.sparkplug.datatypes import DataType
from messaging.sparkplug.decoder import SparkplugDecoder, rebirth_request
from messaging.sparkplug.model import DataSet, MetaData, Metric, Parameter, Payload, Property, Template
from messaging.sparkplug.payloads import decode, encode
from messaging.sparkplug.readings import Reading
from messaging.sparkplug.topics import MessageType, Topic

__all__ = [
    "DataSet",
    "DataType",
    "MessageType",
    "MetaData",
    "Metric",
    "Parameter",
    "Payload",
    "Property",
    "Reading",
    "SparkplugDecoder",
    "Template",
    "Topic",
    "decode",
    "encode",
    "rebirth_request",
]
