"""CloudEvent: the event class of the ``cloudevents`` package, with equality, checks, and validation by pydantic."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final, Self
from uuid import uuid4

from cloudevents.core.v1.event import CloudEvent as SdkEvent
from pydantic_core import PydanticCustomError, core_schema

from messaging.cloudevents.attributes import (
    MAX_ATTRIBUTES,
    REQUIRED,
    SPECVERSION,
    check_name,
    check_uris,
    checked,
    is_json,
    timestamp,
)
from messaging.errors import InvalidEventError
from messaging.errors.checks import check_mapping
from messaging.errors.text import tolerant
from messaging.execution import clock

if TYPE_CHECKING:
    from cloudevents.core.base import BaseCloudEvent


class CloudEvent(SdkEvent):
    """An event of CloudEvents 1.0: ``cloudevents.core.v1.event.CloudEvent``, and usable wherever that is.

    Besides, events with equal attributes and equal data are equal, an invalid attribute is a ``MessagingError``, and
    the class can be the model of a subscription to messages in structured mode. Do not change the attributes of an
    event after it was published.

    Args:
        attributes: by name; copied. ``None`` is an attribute that is not set. Without ``id``, ``specversion`` or
            ``time``, the event gets a random one, 1.0 and now.
        data: bytes, or a value for the content type: a JSON value, or text. ``None``: no data.

    Raises:
        InvalidEventError: an attribute is missing or invalid.
    """

    def __init__(self, attributes: dict[str, Any], data: Any = None) -> None:
        given = {name: each for name, each in check_mapping("attributes", attributes).items() if each is not None}
        full = checked({"specversion": SPECVERSION, "id": str(uuid4()), "time": clock.now(), **_named(given)})
        check_uris(full)
        super().__init__(full, data)

    @classmethod
    def received(cls, attributes: Mapping[str, Any], data: Any) -> Self:
        """Return a received event, which has no other attributes than ``attributes``.

        Raises:
            InvalidEventError: an attribute is missing or invalid. ``source`` and ``dataschema`` may be any text.
        """
        found = checked(attributes)
        event = cls.__new__(cls)
        SdkEvent.__init__(event, found, data)
        if "time" not in attributes:
            event.get_attributes().pop("time", None)  # made by that constructor, which is for new events
        return event

    def __eq__(self, other: object) -> bool:
        try:
            theirs: Any = other
            return bool(self.get_attributes() == theirs.get_attributes() and self.get_data() == theirs.get_data())
        except AttributeError:
            return NotImplemented

    __hash__ = None  # type: ignore[assignment]  # attributes and data may be changed

    @tolerant
    def __repr__(self) -> str:
        # neither data nor extensions: they may be secrets of the application
        shown = " ".join(f"{name}={self.get_extension(name)!r}" for name in ("id", "source", "type"))
        return f"<CloudEvent {shown}>"

    @classmethod
    def __get_pydantic_core_schema__(cls, _source: Any, _handler: Any) -> core_schema.CoreSchema:
        return core_schema.no_info_plain_validator_function(_validated)


def _named(attributes: dict[Any, Any]) -> dict[str, Any]:
    return {check_name(name): each for name, each in attributes.items()}


def _validated(value: Any) -> CloudEvent:
    if isinstance(value, CloudEvent):
        return value
    if isinstance(value, dict) and not any(name in value for name in REQUIRED):
        problem = "no attribute is there; in binary mode they are headers, which from_message() reads, not a model"
    else:
        try:
            return event_of(value)
        except InvalidEventError as error:
            problem = str(error)
    raise PydanticCustomError("cloud_event", "{problem}", {"problem": problem})


def event_of(value: Any) -> CloudEvent:
    """Return the event that a parsed JSON object represents (JSON event format 2.2, 3.1.2).

    Raises:
        InvalidEventError: it represents none.
    """
    if not isinstance(value, dict):
        raise InvalidEventError(f"a CloudEvent in JSON must be an object, not {_kind(value)}")
    if len(value) > MAX_ATTRIBUTES:
        raise InvalidEventError(f"a CloudEvent has at most {MAX_ATTRIBUTES} attributes, not {len(value)}")
    attributes = {name: each for name, each in value.items() if each is not None and name not in _DATA}
    for name, each in attributes.items():
        if isinstance(each, float) or not isinstance(each, (str, int)):
            raise InvalidEventError(
                f"attribute {name[:100]!r}: must be a string, an integer or a boolean, not {_kind(each)}"
            )
    if "time" in attributes:
        attributes["time"] = timestamp("time", attributes["time"])
    return CloudEvent.received(attributes, _data_of(value))


#: members of the JSON object that are no attributes
_DATA: Final = frozenset({"data", "data_base64"})


def _data_of(value: dict[str, Any]) -> Any:
    encoded = value.get("data_base64")
    if encoded is None:
        data = value.get("data")
        if data is not None and not isinstance(data, str) and not is_json(value.get("datacontenttype")):
            raise InvalidEventError(f"'data' must be a string, as 'datacontenttype' is not JSON, not {_kind(data)}")
        return data
    if value.get("data") is not None:
        raise InvalidEventError("a CloudEvent in JSON has 'data' or 'data_base64', not both")
    if not isinstance(encoded, str):
        raise InvalidEventError(f"'data_base64' must be a string in base64, not {_kind(encoded)}")
    try:
        return base64.b64decode(encoded, validate=True)
    except (ValueError, binascii.Error):
        raise InvalidEventError("'data_base64' is not in base64") from None


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "an array", str: "a string", bool: "a boolean", float: "a fraction"}
    return names.get(type(value), "null" if value is None else "a number")


def attributes_of(event: BaseCloudEvent) -> dict[str, Any]:
    """Return the checked attributes of an event to send, which may be of another class.

    Raises:
        InvalidEventError: it is no event, or an attribute is missing or invalid.
    """
    try:
        given = event.get_attributes()
        event.get_data  # noqa: B018
    except AttributeError:
        raise InvalidEventError(f"event must be a CloudEvent, not {type(event).__name__}") from None
    return checked(check_mapping("the attributes of an event", given))
