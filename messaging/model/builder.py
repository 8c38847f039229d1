"""Builders of messages and contexts (RFC 5.6.3) and of acknowledgement (RFC 5.8.4)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Final, Protocol, Self, TypeVar, runtime_checkable

from messaging.errors import ArgumentError, InvalidContentError
from messaging.model.context import NO_EXTENSIONS, DirectAcknowledgement, MessageContext, frozen, kind_like
from messaging.model.message import Message
from messaging.services import LdapFilter
from messaging.text import exact

T = TypeVar("T")

_CONTEXT_VALUES: Final = (
    "channel",
    "channel_extension",
    "content_type",
    "content_encoding",
    "correlation_id",
    "reply_to_channel",
)


@runtime_checkable
class MessageContextProvider(Protocol):
    """Builds messages and contexts: what every context builder can do (RFC 5.6.3).

    A builder of an application's own needs no more than these two methods. Wherever a message or a context is taken, by
    ``publish``, ``subscribe``, ``publish_with_reply`` and ``with_context``, a provider may stand in its place.
    ``Messaging.register_context_builder`` offers it as a service (RFC 5.6.4).
    """

    def build_context(self) -> MessageContext:
        """Return a new context."""
        ...

    def build_message(self) -> Message:
        """Return a new message with its context."""
        ...


class MessageContextBuilder(MessageContextProvider):
    """Builds a :class:`~messaging.model.message.Message` or a :class:`~messaging.model.context.MessageContext`.

    Every method but ``build_*`` returns the builder. What was built is immutable and independent of what the builder
    does later. A context given to :meth:`with_context` wins over every other call, whatever the order; what it leaves
    unset is filled from the builder. Not thread safe: take a builder of your own (they are prototypes, RFC 5.6.3).
    """

    def __init__(self) -> None:
        self._values: dict[str, str | None] = {}
        self._extensions: dict[str, Any] = {}
        self._context: MessageContext | None = None
        self._content: bytes | None = None
        #: an object still to be encoded: by the content type known at the time of building
        self._object: Any = _NOTHING
        self._acknowledgement: DirectAcknowledgement | None = None

    def with_context(self, context: MessageContext | MessageContextProvider) -> Self:
        """Use the values of ``context``; other implementations of its properties are read through them.

        Raises:
            ArgumentError: ``context`` lacks one of the properties of a context.
        """
        self._context = as_context(context)
        return self

    def content(self, content: T, mapper: Callable[[T], bytes] | None = None) -> Self:
        """Set the payload.

        Args:
            content: bytes-like: taken as it is, already in the content encoding if one is set. Anything else: encoded
                by the codec of the content type and content encoding when the message is built (without a content
                type: ``str`` as ``text/plain``, other objects as ``application/json``).
            mapper: called once, now, with ``content``; returns the payload. Its exceptions are the caller's.

        Raises:
            ArgumentError: ``mapper`` is not callable.
            InvalidContentError: ``mapper`` returned something else than bytes.
        """
        if mapper is not None and not callable(mapper):
            raise ArgumentError(f"a content mapper must be callable, not {type(mapper).__name__}")
        self._object, self._content = _NOTHING, None
        if mapper is not None:
            mapped = mapper(content)
            if not isinstance(mapped, (bytes, bytearray, memoryview)):
                raise InvalidContentError(f"the content mapper must return bytes, not {type(mapped).__name__}")
            self._content = bytes(mapped)
        elif isinstance(content, (bytes, bytearray, memoryview)):
            self._content = bytes(content)
        else:
            self._object = content
        return self

    def reply_to(self, channel: str) -> Self:
        """Set the channel that replies are to be sent to."""
        return self._text("reply_to_channel", channel)

    def correlation_id(self, correlation_id: str) -> Self:
        """Set the id that ties a reply to its request."""
        return self._text("correlation_id", correlation_id)

    def content_encoding(self, content_encoding: str) -> Self:
        """Set the content encoding, such as ``gzip``."""
        return self._text("content_encoding", content_encoding)

    def content_type(self, content_type: str) -> Self:
        """Set the content type, such as ``application/json``."""
        return self._text("content_type", content_type)

    def channel(self, name: str, extension: str | None = None) -> Self:
        """Set the channel, and a routing key beside it where the instance announces ``routingKey``."""
        self._text("channel", name)
        if extension is not None:
            return self._text("channel_extension", extension)
        self._values.pop("channel_extension", None)
        return self

    def extension_entry(self, key: str, value: Any) -> Self:
        """Set one extension; see :class:`~messaging.model.features.Features`. A later value for a key wins."""
        if not isinstance(key, str):
            raise ArgumentError(f"an extension key must be a str, not {type(key).__name__}")
        self._extensions[exact(key)] = frozen(value)
        return self

    def extensions(self, extensions: Mapping[str, Any]) -> Self:
        """Add extensions to those set before."""
        if not isinstance(extensions, Mapping):
            raise ArgumentError(f"extensions must be a mapping of str to values, not {type(extensions).__name__}")
        for key, value in extensions.items():
            self.extension_entry(key, value)
        return self

    def build_context(self) -> MessageContext:
        """Return a new context. Values that were not set are ``None``."""
        return self._build(self._values)

    def build_message(self) -> Message:
        """Return a new message with its context; without content its payload is empty.

        Raises:
            CodecError: the content is an object that does not become bytes.
        """
        if self._object is _NOTHING:
            return Message(self._content or b"", self.build_context())
        from messaging.codecs import encode  # not at import: codecs are found by entry points, on first use

        context = self.build_context()
        payload, content_type = encode(self._object, context.content_type, context.content_encoding)
        if context.content_type is None:
            context = self._build({**self._values, "content_type": content_type})
        return Message(payload, context)

    def _text(self, name: str, value: str) -> Self:
        if not isinstance(value, str):
            raise ArgumentError(f"{name} must be a str, not {type(value).__name__}")
        self._values[name] = exact(value)
        return self

    def _build(self, values: Mapping[str, str | None]) -> MessageContext:
        given = self._context
        extensions = self._extensions
        acknowledgement = self._acknowledgement
        kind = MessageContext
        if given is not None:
            kind = kind_like(given)
            kept = {name: value for name in _CONTEXT_VALUES if (value := getattr(given, name)) is not None}
            if "channel" in kept:
                # a routing key belongs to its channel: the builder's must not stick to the context's channel
                kept.setdefault("channel_extension", None)
            values = {**values, **kept}
            extensions = {**extensions, **given.extensions}
            acknowledgement = given._acknowledgement or acknowledgement
        context = kind(
            **values,
            extensions=MappingProxyType(dict(extensions)) if extensions else NO_EXTENSIONS,
        )
        context._acknowledgement = acknowledgement
        return context


class AcknowledgeMessageContextBuilder:
    """Configures direct acknowledgement, then hands over to a :class:`MessageContextBuilder` (RFC 5.8.4).

    Each callback is a callable, or an LDAP target (str) that is looked up in the service registry whenever a message
    arrives; a target that matches no service is logged as a warning and its step is ignored. The services are
    registered under :class:`~messaging.model.message.AcknowledgeFilter` and
    :class:`~messaging.model.message.AcknowledgeConsumer`.

    Order for each message, before it enters the stream: filter, acknowledge or reject, handler, post. A callable
    handler is not called if there is a filter; a handler given by target is called after it (RFC 5.8.4 says both). A
    context with neither filter nor handler leaves the decision to the consumer; post is then called after it acted.

    The callbacks run where the messages are consumed: on the observer's worker thread, or on the thread or event
    loop that iterates.
    """

    def __init__(self) -> None:
        self._filter: str | Callable[[Message], bool] | None = None
        self._handle: str | Callable[..., object] | None = None
        self._post: str | Callable[[Message], object] | None = None

    def filter_acknowledge(self, acknowledge_filter: str | Callable[[Message], bool]) -> Self:
        """Acknowledge messages for which this is true; reject the others, which then do not enter the stream.

        If it raises, that is logged and the message is rejected.
        """
        self._filter = _callback(acknowledge_filter, "filter_acknowledge")
        return self

    def handle_acknowledge(self, acknowledge_handler: str | Callable[..., object]) -> Self:
        """Decide by code: called with the message, or with the message and its acknowledge handler if it takes two."""
        self._handle = _callback(acknowledge_handler, "handle_acknowledge")
        return self

    def post_acknowledge(self, acknowledge_consumer: str | Callable[[Message], object]) -> Self:
        """Call this once after a message was acknowledged or rejected. What it raises is logged."""
        self._post = _callback(acknowledge_consumer, "post_acknowledge")
        return self

    def message_context_builder(self) -> MessageContextBuilder:
        """Return a new context builder whose contexts carry this configuration."""
        builder = MessageContextBuilder()
        builder._acknowledgement = DirectAcknowledgement(self._filter, self._handle, self._post)
        return builder


_NOTHING: Final = object()


def _callback(value: Any, what: str) -> Any:
    if isinstance(value, str):
        LdapFilter.parse(value)  # InvalidFilterError now rather than at the first message
    elif not callable(value):
        raise ArgumentError(f"{what} takes a callable or an LDAP target (str), not {type(value).__name__}")
    return value


def as_message(message: Any, call: str) -> Message:
    """Return the message that a provider builds. ``call`` is what the error names.

    Raises:
        ArgumentError: ``message`` is no :class:`MessageContextProvider`, or builds no message.
    """
    built = message.build_message() if isinstance(message, MessageContextProvider) else message
    if not isinstance(built, Message):
        raise ArgumentError(f"{call} takes a Message or a MessageContextProvider, not {type(built).__name__}")
    return built


def as_context(context: Any) -> MessageContext:
    """Return ``context`` itself, the context that a provider builds, or a copy of a foreign implementation's values.

    Raises:
        ArgumentError: it lacks one of the properties.
    """
    if isinstance(context, MessageContext):
        return context
    if isinstance(context, MessageContextProvider):
        context = context.build_context()
        if isinstance(context, MessageContext):
            return context
    try:
        values = {name: getattr(context, name) for name in _CONTEXT_VALUES if name != "channel_extension"}
        extensions = dict(context.extensions or {})
    except (AttributeError, TypeError, ValueError):
        raise ArgumentError(
            f"a message context needs channel, content_type, content_encoding, correlation_id, reply_to_channel and "
            f"extensions; {type(context).__name__} does not have them all"
        ) from None
    # the context interface of the RFC has no getter for the routing key
    values["channel_extension"] = getattr(context, "channel_extension", None)
    return MessageContext(**values, extensions=MappingProxyType({k: frozen(v) for k, v in extensions.items()}))
