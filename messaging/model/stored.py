"""The stored form of a context: text that a journal or a database keeps beside the channel and the payload.

The text is a JSON object, or empty for a context with nothing but a channel. Its keys are ``channelExtension``,
``contentType``, ``contentEncoding``, ``correlationId``, ``replyTo`` and ``extensions``. Some values of extensions have
no form in JSON. Such a value is an object with the single key ``$`` and an array: the name of the type, and a text, an
array or an object.
"""

from __future__ import annotations

import json
import math
from base64 import b64decode, b64encode
from collections.abc import Callable, Mapping
from datetime import datetime
from decimal import Decimal
from types import MappingProxyType
from typing import Any, Final

from messaging.errors import ArgumentError, InvalidExtensionError
from messaging.model.context import NO_EXTENSIONS, MessageContext

_TAG: Final = "$"
#: JSON key -> attribute of the context and parameter of its constructor
_TEXTS: Final = {
    "channelExtension": "channel_extension",
    "contentType": "content_type",
    "contentEncoding": "content_encoding",
    "correlationId": "correlation_id",
    "replyTo": "reply_to_channel",
}
_EXTENSIONS: Final = "extensions"
#: nesting of values in a stored text, tags included; deeper texts were not written by :func:`stored_properties`
_MAX_DEPTH: Final = 100


def stored_properties(context: MessageContext) -> str:
    """Return the properties of ``context``, all but its channel, as text for :func:`restored_context`.

    Raises:
        InvalidExtensionError: an extension has a value that cannot be stored: its type is not one that
            :mod:`messaging.model.headers` lists. The error names the extension.
    """
    values: dict[str, Any] = {
        key: value for key, name in _TEXTS.items() if (value := getattr(context, name)) is not None
    }
    if context.extensions:
        extensions = {name: _stored_extension(name, value) for name, value in context.extensions.items()}
        values[_EXTENSIONS] = _untagged(extensions)
    return json.dumps(values, separators=(",", ":"), allow_nan=False) if values else ""


def restored_context(channel: str, properties: str) -> MessageContext:
    """Return the context of a stored message.

    Raises:
        ArgumentError: ``properties`` is not a text of :func:`stored_properties`.
    """
    if not properties:
        return MessageContext(channel)
    try:
        values = json.loads(properties)
        texts = {name: value for key, name in _TEXTS.items() if (value := values.get(key)) is not None}
        if not all(isinstance(value, str) for value in texts.values()):
            raise TypeError("a property is not a text")
        extensions = _restored(values.get(_EXTENSIONS, {}), 0)
        if not isinstance(extensions, Mapping):
            raise TypeError("the extensions are not an object")
    except (ValueError, TypeError, AttributeError, KeyError, ArithmeticError, RecursionError) as error:
        raise ArgumentError(f"the stored properties of a message do not parse: {type(error).__name__}") from None
    return MessageContext(channel, extensions=extensions or NO_EXTENSIONS, **texts)


def _stored_extension(name: str, value: Any) -> Any:
    try:
        return _stored(value)
    except TypeError as error:
        raise InvalidExtensionError(
            name,
            f"{error} cannot be stored; a value must be str, int, float, bool, None, bytes, Decimal, datetime, "
            "or a sequence or mapping of such values",
        ) from None


def _stored(value: Any) -> Any:
    if value is None or isinstance(value, (str, bool, int)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {_TAG: ["float", repr(value)]}
    if isinstance(value, Mapping):
        if not all(isinstance(key, str) for key in value):
            raise TypeError("a key that is not a str")
        return _untagged({key: _stored(each) for key, each in value.items()})
    if isinstance(value, (list, tuple)):
        return [_stored(each) for each in value]
    if isinstance(value, bytes):
        return {_TAG: ["bytes", b64encode(value).decode()]}
    if isinstance(value, Decimal):
        return {_TAG: ["decimal", str(value)]}
    if isinstance(value, datetime):
        return {_TAG: ["time", value.isoformat()]}
    if isinstance(value, frozenset):
        return {_TAG: ["set", [_stored(each) for each in value]]}
    raise TypeError(f"a value of type {type(value).__name__}")


def _untagged(stored: dict[str, Any]) -> dict[str, Any]:
    """Return an object that is not taken for a tagged value, whatever its keys are."""
    return {_TAG: ["map", stored]} if _TAG in stored else stored


_RESTORED: Final[Mapping[str, Callable[[Any], Any]]] = MappingProxyType(
    {"float": float, "bytes": lambda text: b64decode(text, validate=True), "decimal": Decimal,
     "time": datetime.fromisoformat}
)  # fmt: skip


def _restored(value: Any, depth: int) -> Any:
    """Return a value as :func:`~messaging.model.context.frozen` makes it."""
    if depth > _MAX_DEPTH:
        raise ValueError("the values are nested too deeply")
    if isinstance(value, list):
        return tuple(_restored(each, depth + 1) for each in value)
    if not isinstance(value, dict):
        return value
    if _TAG not in value:
        return MappingProxyType({key: _restored(each, depth + 1) for key, each in value.items()})
    kind, inner = value[_TAG]
    if kind == "map":
        return MappingProxyType({key: _restored(each, depth + 1) for key, each in inner.items()})
    if kind == "set":
        return frozenset(_restored(each, depth + 1) for each in inner)
    return _RESTORED[kind](inner)
