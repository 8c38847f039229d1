"""The JSON event format (CloudEvents 1.0.2, JSON event format), its codec, and the data of events in binary mode."""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from cloudevents.core.formats.json import JSONFormat

from messaging.cloudevents.attributes import canonical, is_json, is_text
from messaging.cloudevents.event import CloudEvent, attributes_of, event_of
from messaging.codecs import codec_for, decode, encode
from messaging.errors import ArgumentError, CodecError, DecodeError, EncodeError, InvalidEventError
from messaging.model import MessageContext

if TYPE_CHECKING:
    from cloudevents.core.base import BaseCloudEvent, EventFactory

_BYTES = (bytes, bytearray, memoryview)


class JsonFormat(JSONFormat):
    """The JSON format of the ``cloudevents`` package with the checks that messages of strangers need. Thread safe.

    It is a ``Format`` of that package, so its other bindings can use it, too. In contrast to the class that it extends:

    - an object with a member twice, NaN, a number beyond a float, and base64 with other characters are refused;
    - ``null`` attributes count as not set, and no ``time`` or ``id`` is made up for a received event;
    - text as data of a JSON content type is a JSON string in both modes.
    """

    def read(self, event_factory: EventFactory | None, data: str | bytes) -> BaseCloudEvent:
        """Return the event that ``data`` represents.

        Args:
            event_factory: makes the event of its attributes and data; ``None``: :class:`CloudEvent`.
            data: a JSON object, in UTF-8.

        Raises:
            DecodeError: it represents none; the text names the attribute.
        """
        event = read_event(data)
        return event if event_factory is None else event_factory(event.get_attributes(), event.get_data())

    def write(self, event: BaseCloudEvent) -> bytes:
        """Return ``event`` as a JSON object.

        Raises:
            InvalidEventError: an attribute is missing or invalid.
            EncodeError: the data cannot be represented in JSON.
        """
        attributes = attributes_of(event)
        data = event.get_data()
        found: dict[str, Any] = {
            name: each if isinstance(each, (bool, int)) else canonical(each) for name, each in attributes.items()
        }
        if isinstance(data, _BYTES):
            found["data_base64"] = base64.b64encode(data).decode("ascii")
        elif data is not None:
            content_type = attributes.get("datacontenttype")
            if not is_json(content_type):
                _check_text(data, content_type)
            found["data"] = data
        return encode(found, "application/json")[0]

    def write_data(self, data: Any, datacontenttype: str | None) -> bytes:
        """Return the data of an event as the payload of a message in binary mode. ``None`` is an empty payload.

        Raises:
            EncodeError: ``data`` does not suit the content type.
        """
        if data is None:
            return b""
        if isinstance(data, _BYTES):
            return bytes(data)
        _check_content_type(datacontenttype)
        if datacontenttype is None or is_json(datacontenttype):
            return encode(data, "application/json")[0]
        _check_text(data, datacontenttype)
        return encode(data, _text_type(datacontenttype))[0]

    def read_data(self, body: bytes, datacontenttype: str | None) -> Any:
        """Return the data of an event from a payload: a JSON value, a str for ``text/*`` and XML, or bytes.

        Without a content type the payload is read as JSON, or else as text, or as bytes.

        Raises:
            DecodeError: the payload is not of that content type.
        """
        if not body:
            return None
        _check_content_type(datacontenttype)
        if datacontenttype is None:
            return _guessed(body)
        if is_json(datacontenttype):
            return decode(body, MessageContext(content_type="application/json"))
        if is_text(datacontenttype):
            return decode(body, MessageContext(content_type=_text_type(datacontenttype)), str)
        return body


def _guessed(body: bytes) -> Any:
    for content_type in ("application/json", "text/plain"):
        try:
            return decode(body, MessageContext(content_type=content_type))
        except CodecError:
            continue
    return body


def _text_type(media_type: str) -> str:
    """Return ``text/plain`` with the charset of ``media_type``, for the codec."""
    _, semicolon, parameters = media_type.partition(";")
    return f"text/plain{semicolon}{parameters}"


def _check_text(data: Any, datacontenttype: Any) -> None:
    if not isinstance(data, str):
        raise EncodeError(
            f"the data of a CloudEvent must be bytes or a str for datacontenttype {datacontenttype!r:.80}, "
            f"not {type(data).__name__}"
        )


def _check_content_type(value: object) -> None:
    if value is not None and not isinstance(value, str):
        raise ArgumentError(f"datacontenttype must be a str or None, not {type(value).__name__}")


def parse(data: str | bytes) -> Any:
    """Return the value that a JSON text represents.

    Raises:
        InvalidEventError: it is no JSON text, or an object in it has a member twice.
    """
    if not isinstance(data, (str, *_BYTES)):
        raise InvalidEventError(f"a JSON text must be bytes or a str, not {type(data).__name__}")
    try:
        text = data if isinstance(data, str) else bytes(data).removeprefix(b"\xef\xbb\xbf").decode()
        return json.loads(text, object_pairs_hook=_object, parse_constant=_refuse, parse_float=_finite)
    except _RepeatedError as error:
        problem = str(error)
    except UnicodeDecodeError as error:
        problem = f"not UTF-8 at byte {error.start}"
    except json.JSONDecodeError as error:
        problem = f"not JSON at index {error.pos}"
    except RecursionError:
        problem = "nested too deeply"
    except (TypeError, ValueError):
        problem = "not JSON, or a number in it is too large"
    # outside of the handlers: the context of the error would hold the payload
    raise InvalidEventError(problem)


class _RepeatedError(ValueError):
    """A member is twice in one object."""


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        for name, _ in pairs:
            if name in seen:
                raise _RepeatedError(f"member {name[:100]!r} is there more than once")
            seen.add(name)
    return found


def _refuse(constant: str) -> Any:
    raise ValueError(constant)


def _finite(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise ValueError("beyond the range of a float")
    return value


def read_event(data: str | bytes) -> CloudEvent:
    """Return the event of a message in structured mode; raises as :meth:`JsonFormat.read`."""
    try:
        return event_of(parse(data))
    except InvalidEventError as error:
        problem = str(error)
    # outside of the handler, as in parse()
    raise DecodeError(f"{JsonFormat.CONTENT_TYPE}: {problem}")


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
