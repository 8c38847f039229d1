"""The codec of ``application/cloudevents+json``, for messages in structured mode."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from messaging.cloudevents.event import CloudEvent
from messaging.cloudevents.json_format import JsonFormat, read_event
from messaging.codecs import codec_for
from messaging.errors import ArgumentError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


class CloudEventsCodec:
    """Encodes events in the JSON event format, and decodes them where a ``CloudEvent`` is asked for. Thread safe.

    Other objects, and other types that are asked for, are left to the codec of ``application/json``. Importing
    :mod:`messaging.cloudevents` registers it.
    """

    content_types: ClassVar[Sequence[str]] = (JsonFormat.CONTENT_TYPE,)

    def encode(self, obj: Any, parameters: Mapping[str, str]) -> bytes:
        """Return ``obj`` as a JSON object.

        Raises:
            InvalidEventError: an attribute of the event is missing or invalid.
            EncodeError: its data, or another object, cannot be represented in JSON.
        """
        if hasattr(obj, "get_attributes"):
            return JsonFormat().write(obj)
        return codec_for("application/json").encode(obj, parameters)

    def decode(self, data: bytes, model: Any, parameters: Mapping[str, str]) -> Any:
        """Return the event that ``data`` represents if ``model`` is ``CloudEvent``, else the value of the JSON text.

        Raises:
            DecodeError: it represents none, or does not fit ``model``.
        """
        if model is CloudEvent:
            return read_event(data)
        if not isinstance(data, (bytes, bytearray, memoryview)):
            raise ArgumentError(f"data must be bytes, not {type(data).__name__}")
        return codec_for("application/json").decode(data, model, parameters)
