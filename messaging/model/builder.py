"""Builders of messages and contexts (RFC 5.6.3) and of acknowledgement (RFC 5.8.4)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Final, Protocol, Self, TypeVar, runtime_checkable

from messaging.errors import ArgumentError, InvalidContentError
from messaging.errors.checks import check_procedure
from messaging.errors.text import exact
from messaging.model.context import NO_EXTENSIONS, DirectAcknowledgement, MessageContext, frozen
from messaging.model.message import Message
from messaging.services import LdapFilter

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
    """Builds messages and contexts: the interface of every context builder (RFC 5.6.3).

    A builder of an application's own needs these two methods only. ``publish``, ``subscribe``, ``publish_with_reply``
    and ``with_context`` accept a provider in place of a message or a context.
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

    Every method but ``build_*`` returns the builder. Built messages and contexts are immutable, and later calls of the
    builder do not change them. The values of a context given to :meth:`with_context` win over every other call, in any
    order; the builder supplies values that the context leaves unset. Not thread safe: use one builder per thread
    (builders are prototypes, RFC 5.6.3).
    """

    def __init__(self) -> None:
        self._values: dict[str, str | None] = {}
        self._extensions: dict[str, Any] = {}
        self._context: MessageContext | None = None
        self._content: bytes | None = None
        #: an object that is encoded when the message is built, by the content type set until then
        self._object: Any = _NOTHING
        self.direct_acknowledgement: DirectAcknowledgement | None = None

    def with_context(self, context: MessageContext | MessageContextProvider) -> Self:
        """Use the values of ``context``, which may be a foreign implementation of a context.

        Raises:
            ArgumentError: ``context`` lacks one of the properties of a context.
        """
        self._context = as_context(context)
        return self

    def content(self, content: T, mapper: Callable[[T], bytes] | None = None) -> Self:
        """Set the payload.

        Args:
            content: bytes-like content is used unchanged, already in the content encoding if one is set. Any other
                object is encoded by the codec of the content type and content encoding when the message is built
                (without a content type: ``str`` as ``text/plain``, other objects as ``application/json``).
            mapper: called once, immediately, with ``content``; returns the payload. Its exceptions reach the caller.

        Raises:
            ArgumentError: ``mapper`` is not callable.
            InvalidContentError: ``mapper`` did not return bytes.
        """
        if mapper is not None:
            check_procedure(mapper, "a content mapper")
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
        """Set the channel for replies."""
        return self._text("reply_to_channel", channel)

    def correlation_id(self, correlation_id: str) -> Self:
        """Set the correlation id, which identifies the request that a reply answers."""
        return self._text("correlation_id", correlation_id)

    def content_encoding(self, content_encoding: str) -> Self:
        """Set the content encoding, such as ``gzip``."""
        return self._text("content_encoding", content_encoding)

    def content_type(self, content_type: str) -> Self:
        """Set the content type, such as ``application/json``."""
        return self._text("content_type", content_type)

    def channel(self, name: str, extension: str | None = None) -> Self:
        """Set the channel, and its routing key where the instance announces ``routingKey``."""
        self._text("channel", name)
        if extension is not None:
            return self._text("channel_extension", extension)
        self._values.pop("channel_extension", None)
        return self

    def extension_entry(self, key: str, value: Any) -> Self:
        """Set one extension; see :class:`~messaging.model.features.Features`. The last value of a key wins."""
        if not isinstance(key, str):
            raise ArgumentError(f"an extension key must be a str, not {type(key).__name__}")
        self._extensions[exact(key)] = frozen(value)
        return self

    def extensions(self, extensions: Mapping[str, Any]) -> Self:
        """Add extensions to the ones set before."""
        if not isinstance(extensions, Mapping):
            raise ArgumentError(f"extensions must be a mapping of str to values, not {type(extensions).__name__}")
        for key, value in extensions.items():
            self.extension_entry(key, value)
        return self

    def build_context(self) -> MessageContext:
        """Return a new context. Values that were not set are ``None``."""
        return self._build(self._values)

    def build_message(self) -> Message:
        """Return a new message with its context. Without content the payload is empty.

        Raises:
            CodecError: the content is an object that cannot be encoded.
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
        acknowledgement = self.direct_acknowledgement
        if given is not None:
            kept = {name: value for name in _CONTEXT_VALUES if (value := getattr(given, name)) is not None}
            if "channel" in kept:
                # a routing key belongs to its channel: that of the builder does not apply to the context's channel
                kept.setdefault("channel_extension", None)
            values = {**values, **kept}
            extensions = {**extensions, **given.extensions}
            acknowledgement = given.direct_acknowledgement or acknowledgement
        merged = MappingProxyType(dict(extensions)) if extensions else NO_EXTENSIONS
        if given is not None:
            context = given.replace(**{**dict.fromkeys(_CONTEXT_VALUES), **values, "extensions": merged})
        else:
            context = MessageContext(**values, extensions=merged)
        context.direct_acknowledgement = acknowledgement
        return context


class AcknowledgeMessageContextBuilder:
    """Configures direct acknowledgement and makes context builders with that configuration (RFC 5.8.4).

    Each callback is a callable, or an LDAP target (str) that is looked up in the service registry for each message. A
    target that matches no service is logged as a warning, and its step is skipped. The services are registered under
    :class:`~messaging.model.message.AcknowledgeFilter` and :class:`~messaging.model.message.AcknowledgeConsumer`.

    Order for each message, before it enters the stream: filter, acknowledge or reject, handler, post. With a filter, a
    callable handler is not called, and a handler given by target is called after the filter (RFC 5.8.4 says both).
    With neither filter nor handler the consumer decides, and post is called after its decision.

    The callbacks run on the observer's worker thread, or on the thread or event loop that iterates the stream.
    """

    def __init__(self) -> None:
        self._filter: str | Callable[[Message], bool] | None = None
        self._handle: str | Callable[..., object] | None = None
        self._post: str | Callable[[Message], object] | None = None

    def filter_acknowledge(self, acknowledge_filter: str | Callable[[Message], bool]) -> Self:
        """Acknowledge the messages for which the filter is true, and reject the others, which do not enter the stream.

        An exception of the filter is logged, and the message is rejected.
        """
        self._filter = _callback(acknowledge_filter, "filter_acknowledge")
        return self

    def handle_acknowledge(self, acknowledge_handler: str | Callable[..., object]) -> Self:
        """Call a handler that decides; it gets the message, and the acknowledge handler if it takes two arguments."""
        self._handle = _callback(acknowledge_handler, "handle_acknowledge")
        return self

    def post_acknowledge(self, acknowledge_consumer: str | Callable[[Message], object]) -> Self:
        """Call a consumer once after a message was acknowledged or rejected. Its exceptions are logged."""
        self._post = _callback(acknowledge_consumer, "post_acknowledge")
        return self

    def message_context_builder(self) -> MessageContextBuilder:
        """Return a new context builder whose contexts carry this configuration."""
        builder = MessageContextBuilder()
        builder.direct_acknowledgement = DirectAcknowledgement(self._filter, self._handle, self._post)
        return builder


_NOTHING: Final = object()


def _callback(value: Any, what: str) -> Any:
    if isinstance(value, str):
        LdapFilter.parse(value)  # raises InvalidFilterError here rather than at the first message
    elif not callable(value):
        raise ArgumentError(f"{what} takes a callable or an LDAP target (str), not {type(value).__name__}")
    else:
        check_procedure(value, f"the callable of {what}")
    return value


def as_message(message: Any, call: str) -> Message:
    """Return ``message``, or the message that it builds. ``call`` is the name of the call for the error.

    Raises:
        ArgumentError: ``message`` is no :class:`MessageContextProvider`, or builds no message.
    """
    built = message.build_message() if isinstance(message, MessageContextProvider) else message
    if not isinstance(built, Message):
        raise ArgumentError(f"{call} takes a Message or a MessageContextProvider, not {type(built).__name__}")
    return built


def as_context(context: Any) -> MessageContext:
    """Return ``context``, the context that it builds, or a copy of a foreign implementation.

    Raises:
        ArgumentError: ``context`` lacks one of the properties of a context.
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
            f"extensions; {type(context).__name__} lacks at least one of them"
        ) from None
    # the context interface of the RFC has no getter for the routing key
    values["channel_extension"] = getattr(context, "channel_extension", None)
    return MessageContext(**values, extensions=MappingProxyType({k: frozen(v) for k, v in extensions.items()}))
