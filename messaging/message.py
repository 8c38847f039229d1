"""Message and MessageContext (RFC 5.6): immutable, slotted, cheap to make.

Both are plain classes with read-only properties rather than frozen dataclasses: one is made for every message
that passes, and a frozen dataclass costs three plain ones.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Final, Generic, TypeVar, overload

from messaging.reprs import tolerant
from messaging.text import printable

if TYPE_CHECKING:
    from messaging.acknowledge import AcknowledgeMessageContext, DirectAcknowledgement

T = TypeVar("T")
if TYPE_CHECKING:
    from typing_extensions import TypeVar as TypeVarWithDefault

    #: what ``Message.value()`` returns: the model, or anything
    V = TypeVarWithDefault("V", default=Any)
    V_co = TypeVarWithDefault("V_co", default=Any, covariant=True)
else:  # defaults of type variables are of Python 3.13
    V = TypeVar("V")
    V_co = TypeVar("V_co", covariant=True)

_BESIDE_CHANNEL: Final = ("content_type", "content_encoding", "correlation_id", "reply_to_channel")

NO_EXTENSIONS: Final[Mapping[str, Any]] = MappingProxyType({})


class MessageContext:
    """What describes a message, or how it is to be handled (RFC 5.6.2).

    Built by a :class:`~messaging.builder.MessageContextBuilder` on the sending side and by the adapter on the
    receiving side. Values that were not set are ``None``; ``extensions`` is never ``None`` and cannot be written
    to. Instances are immutable and may be shared between threads and messages.
    """

    __slots__ = (
        "_acknowledgement",
        "_channel",
        "_channel_extension",
        "_content_encoding",
        "_content_type",
        "_correlation_id",
        "_extensions",
        "_plan",
        "_reply_to_channel",
    )

    #: whether its extensions are what a protocol told, and not only what an application asks for
    _is_received: ClassVar[bool] = False

    def __init__(
        self,
        channel: str | None = None,
        channel_extension: str | None = None,
        content_type: str | None = None,
        content_encoding: str | None = None,
        correlation_id: str | None = None,
        reply_to_channel: str | None = None,
        extensions: Mapping[str, Any] = NO_EXTENSIONS,
    ) -> None:
        """``extensions`` is kept, not copied: whoever calls must hand over a mapping nobody writes to."""
        self._channel = channel
        self._channel_extension = channel_extension
        self._content_type = content_type
        self._content_encoding = content_encoding
        self._correlation_id = correlation_id
        self._reply_to_channel = reply_to_channel
        self._extensions = extensions
        #: direct acknowledgement, set by the builder
        self._acknowledgement: DirectAcknowledgement | None = None
        #: the publisher's cache of what it checked and compiled this context to
        self._plan: Any = None

    @property
    def channel(self) -> str | None:
        """The channel: where to publish, what to subscribe to, or where a message arrived (MSG260)."""
        return self._channel

    @property
    def channel_extension(self) -> str | None:
        """Routing key beside the channel."""
        return self._channel_extension

    @property
    def content_type(self) -> str | None:
        """Content type, such as ``application/json``."""
        return self._content_type

    @property
    def content_encoding(self) -> str | None:
        """Content encoding, such as ``gzip``."""
        return self._content_encoding

    @property
    def correlation_id(self) -> str | None:
        """Ties a reply to its request."""
        return self._correlation_id

    @property
    def reply_to_channel(self) -> str | None:
        """Channel that replies are to be sent to."""
        return self._reply_to_channel

    @property
    def extensions(self) -> Mapping[str, Any]:
        """Read-only mapping of extensions (:class:`~messaging.features.Features`); never ``None``."""
        return self._extensions

    def __reduce__(self) -> tuple[Any, ...]:
        return rebuilt_context, (type(self), self._state_to_copy())

    def _state_to_copy(self) -> dict[str, Any]:
        return {
            "channel": self._channel,
            "channel_extension": self._channel_extension,
            **dict(zip(_BESIDE_CHANNEL, self._values_beside_channel(), strict=True)),
            "extensions": thawed(self._extensions),
            "acknowledgement": self._acknowledgement,
        }

    def _values_beside_channel(self) -> tuple[str | None, ...]:
        return (self._content_type, self._content_encoding, self._correlation_id, self._reply_to_channel)

    def _values(self) -> tuple[Any, ...]:
        return (
            self._channel,
            self._channel_extension,
            *self._values_beside_channel(),
            dict(self._extensions),
        )

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, MessageContext):
            return NotImplemented
        return self._values() == other._values()

    __hash__ = None  # type: ignore[assignment]  # extensions may hold unhashable values

    @tolerant
    def __repr__(self) -> str:
        names = ("channel", "channel_extension", "content_type", "content_encoding", "correlation_id")
        shown = [f"{name}={value!r}" for name in names if (value := getattr(self, "_" + name)) is not None]
        if self._reply_to_channel is not None:
            shown.append(f"reply_to_channel={self._reply_to_channel!r}")
        if self._extensions:
            # headers may carry tokens of the application: names only
            shown.append(f"extensions=<{', '.join(map(printable, sorted(self._extensions)))}>")
        return f"{type(self).__name__}({', '.join(shown)})"


def thawed(value: Any) -> Any:
    """Return extensions as containers that can be pickled."""
    if isinstance(value, Mapping):
        return {key: thawed(each) for key, each in value.items()}
    if isinstance(value, tuple):
        return tuple(map(thawed, value))
    return value


def rebuilt_context(kind: type[MessageContext], state: dict[str, Any]) -> MessageContext:
    """Unpickle or copy a context; see ``MessageContext._state_to_copy``."""
    from messaging.builder import frozen  # it is built on this module

    acknowledgement = state.pop("acknowledgement")
    acknowledge_state = state.pop("acknowledge_state", None)
    context = kind(**{**state, "extensions": frozen(state["extensions"])})
    context._acknowledgement = acknowledgement
    if acknowledge_state is not None:
        context._state, context._settler = acknowledge_state, None  # type: ignore[attr-defined]  # it was received
    return context


class ForwardedContext(MessageContext):
    """A context made from that of a received message, which is passed on: see ``extensions.requested``."""

    __slots__ = ()

    _is_received = True


def kind_like(context: MessageContext) -> type[MessageContext]:
    """The class of a context that takes over the extensions of ``context``."""
    return ForwardedContext if context._is_received else MessageContext


class Message(Generic[V_co]):
    """A payload and its context (RFC 5.6.1). Immutable; may be shared between threads.

    Generic in the model: ``value()`` of a ``Message[Reading]`` returns a ``Reading``.

    It can be pickled and deep-copied, for other processes. The copy of a received message cannot be acknowledged: its
    state is ``UNSUPPORTED``, unless the message was settled before.
    """

    __slots__ = ("_context", "_model", "_payload", "_value")

    #: the model last decoded for, and the outcome; unset until then
    _value: tuple[Any, Any]
    #: of a payload whose context has none: of the instance that received it
    _default_content_type: str | None = None

    def __init__(self, payload: bytes, context: MessageContext, model: Any = None) -> None:
        self._payload = payload
        self._context = context
        self._model = model
        # _value is left out: most messages are decoded never or once

    @property
    def payload(self) -> bytes:
        """The bytes as they travel; empty, never ``None``."""
        return self._payload

    @property
    def context(self) -> MessageContext:
        """The context; never ``None``. That of a received message is an :class:`AcknowledgeMessageContext`."""
        return self._context

    @overload
    def value(self) -> V_co: ...
    @overload
    def value(self, model: type[T]) -> T: ...
    def value(self, model: type[T] | None = None) -> T | Any:
        """The payload as an object: decoded by content encoding, parsed by content type, validated by ``model``.

        Args:
            model: a pydantic model, dataclass, TypedDict or any type pydantic can validate. Without it, the
                model the stream was subscribed with, or else whatever the content type's codec yields.

        Raises:
            UnknownContentTypeError, UnknownContentEncodingError: nothing here reads it.
            DecodeError: the bytes do not fit. The payload stays available.
        """
        wanted = self._model if model is None else model
        try:
            known, value = self._value
        except AttributeError:
            pass
        else:
            if known is wanted:
                return value
        from messaging.codecs import decode  # not at import: codecs are found by entry points, on first use

        value = decode(
            self._payload,
            self._context,
            wanted,
            default_content_type=self._default_content_type,
        )
        self._value = (wanted, value)
        return value

    def acknowledge(self) -> bool:
        """``context.acknowledge_handler.acknowledge()``; ``False`` for a message that was not received."""
        settle = getattr(self._context, "_settle", None)
        return settle is not None and settle(True)

    def reject(self) -> bool:
        """``context.acknowledge_handler.reject()``; ``False`` for a message that was not received."""
        settle = getattr(self._context, "_settle", None)
        return settle is not None and settle(False)

    def __reduce__(self) -> tuple[Any, ...]:
        # without the value, which may be of any type: it is decoded again when it is asked for
        default = self._default_content_type
        state = () if default is None else ((None, {"_default_content_type": default}),)
        return type(self), (self._payload, self._context, self._model), *state

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Message):
            return NotImplemented
        return bool(self._payload == other._payload and self._context == other._context)

    __hash__ = None  # type: ignore[assignment]

    @tolerant
    def __repr__(self) -> str:
        return f"Message({len(self._payload)} bytes, {self._context!r})"


class ReceivedMessage(Message[V_co]):
    """A message that was received: its context names a channel, and can be acknowledged (RFC 5.8.5)."""

    __slots__ = ()

    if TYPE_CHECKING:

        @property
        def context(self) -> AcknowledgeMessageContext:
            """The context; never ``None``."""


class _ReceivedWithDefault(ReceivedMessage[V_co]):
    """A message received by an instance with the setting ``default_content_type``."""

    __slots__ = ("_default_content_type",)

    _default_content_type: str


def maker(default_content_type: str | None) -> Callable[[bytes, MessageContext, Any], ReceivedMessage[Any]]:
    """Return what makes received messages: of payload, context and model.

    Args:
        default_content_type: the setting of the instance that receives them.
    """
    if default_content_type is None:
        return ReceivedMessage

    def make(payload: bytes, context: MessageContext, model: Any) -> ReceivedMessage[Any]:
        message: _ReceivedWithDefault[Any] = _ReceivedWithDefault(payload, context, model)
        message._default_content_type = default_content_type
        return message

    return make
