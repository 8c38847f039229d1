"""Message (RFC 5.6.1): an immutable payload with its context.

Messages and contexts are plain classes with slots and read-only properties rather than frozen dataclasses: one is made
for every message, and a frozen dataclass takes three times as long to create.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar, overload

from messaging.errors.text import tolerant
from messaging.model.acknowledge import AcknowledgeMessageContext
from messaging.model.context import NO_EXTENSIONS, MessageContext

T = TypeVar("T")
if TYPE_CHECKING:
    from typing_extensions import TypeVar as TypeVarWithDefault

    #: type of ``Message.value()``: the model, or any
    V = TypeVarWithDefault("V", default=Any)
    V_co = TypeVarWithDefault("V_co", default=Any, covariant=True)
else:  # defaults of type variables are of Python 3.13
    V = TypeVar("V")
    V_co = TypeVar("V_co", covariant=True)


class Message(Generic[V_co]):
    """A payload and its context (RFC 5.6.1). Immutable; may be shared between threads.

    Generic in the model: ``value()`` of a ``Message[Reading]`` returns a ``Reading``.

    Messages can be pickled and deep-copied for other processes. The copy of a received message cannot be acknowledged:
    its state is ``UNSUPPORTED``, unless the message was settled before the copy.
    """

    __slots__ = ("_context", "_model", "_payload", "_value")

    #: the model of the last decoding and its result; unset before the first one
    _value: tuple[Any, Any]
    #: content type for a context without one: a setting of the instance that received the message
    default_content_type: str | None = None

    def __init__(self, payload: bytes, context: MessageContext, model: Any = None) -> None:
        self._payload = payload
        self._context = context
        self._model = model
        # _value stays unset to save the assignment: most messages are decoded at most once

    @property
    def payload(self) -> bytes:
        """Return the payload in its content encoding; it may be empty and is never ``None``."""
        return self._payload

    @property
    def context(self) -> MessageContext:
        """Return the context, never ``None``. A received message has an :class:`AcknowledgeMessageContext`."""
        return self._context

    @property
    def channel(self) -> str | None:
        """Channel of the context."""
        return self._context.channel

    @property
    def headers(self) -> Mapping[str, Any]:
        """User headers of the context; empty if there are none."""
        found: Mapping[str, Any] = self._context.extensions.get("headers", NO_EXTENSIONS)
        return found

    @property
    def message_id(self) -> str | None:
        """Message id of the context; ``None`` if it has none."""
        return self._context.extensions.get("messageId")

    @property
    def reply_to(self) -> str | None:
        """Reply channel of the context."""
        return self._context.reply_to_channel

    @overload
    def value(self) -> V_co: ...
    @overload
    def value(self, model: type[T]) -> T: ...
    def value(self, model: type[T] | None = None) -> T | Any:
        """Return the payload as an object: decoded by content encoding, parsed by content type, validated by ``model``.

        Args:
            model: a pydantic model, dataclass, TypedDict or any type pydantic can validate. Without it, the
                model of the subscription, or else the result of the content type's codec.

        Raises:
            UnknownContentTypeError, UnknownContentEncodingError: no codec or encoding of that name is known.
            DecodeError: the payload cannot be decoded. It stays available.
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
            default_content_type=self.default_content_type,
        )
        self._value = (wanted, value)
        return value

    def acknowledge(self) -> bool:
        """Acknowledge the message, see ``AcknowledgeHandler.acknowledge``; ``False`` if it was not received."""
        settle = getattr(self._context, "settle", None)
        return settle is not None and settle(True)

    def reject(self) -> bool:
        """Reject the message, see ``AcknowledgeHandler.reject``; ``False`` if it was not received."""
        settle = getattr(self._context, "settle", None)
        return settle is not None and settle(False)

    def reject_invalid(self) -> bool:
        """Reject a message that cannot be read: with a dead-letter channel it goes there at once, as ``invalid``.

        Another delivery would fit no better. Without a dead-letter channel this is :meth:`reject`.
        """
        settle = getattr(self._context, "settle_invalid", None)
        return settle is not None and settle()

    def __reduce__(self) -> tuple[Any, ...]:
        # without the decoded value, which may be of any type: the copy decodes again on demand
        default = self.default_content_type
        state = () if default is None else ((None, {"default_content_type": default}),)
        return type(self), (self._payload, self._context, self._model), *state

    # without a hash: the context has none
    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Message):
            return NotImplemented
        return bool(self._payload == other._payload and self._context == other._context)

    @tolerant
    def __repr__(self) -> str:
        return f"Message({len(self._payload)} bytes, {self._context!r})"


class ReceivedMessage(Message[V_co]):
    """A received message, whose context has a channel and can be acknowledged (RFC 5.8.5)."""

    __slots__ = ()

    if TYPE_CHECKING:

        @property
        def context(self) -> AcknowledgeMessageContext:
            """Return the context, never ``None``."""


class _ReceivedWithDefault(ReceivedMessage[V_co]):
    """A message received by an instance with the setting ``default_content_type``."""

    __slots__ = ("default_content_type",)

    default_content_type: str


def maker(default_content_type: str | None) -> Callable[[bytes, MessageContext, Any], ReceivedMessage[Any]]:
    """Return the function or class that makes a received message of payload, context and model.

    Args:
        default_content_type: the setting of the receiving instance.
    """
    if default_content_type is None:
        return ReceivedMessage

    def make(payload: bytes, context: MessageContext, model: Any) -> ReceivedMessage[Any]:
        message: _ReceivedWithDefault[Any] = _ReceivedWithDefault(payload, context, model)
        message.default_content_type = default_content_type
        return message

    return make


def parts(message: Message) -> tuple[bytes, MessageContext]:
    """Return payload and context of a message, for paths where two properties cost too much."""
    return message._payload, message._context


def context_of(message: Message) -> Any:
    """Return the context of a message, of a received one its ``Incoming``, where a property costs too much."""
    return message._context


class AcknowledgeFilter(Protocol):
    """Service interface of an acknowledge filter (RFC 5.8.7), whose services are looked up by target."""

    def __call__(self, message: Message, /) -> bool:
        """Return ``True`` to acknowledge, ``False`` to reject."""


class AcknowledgeConsumer(Protocol):
    """Service interface of an acknowledge handler or post-acknowledge consumer (RFC 5.8.7)."""

    def __call__(self, message: Message, /) -> object:
        """Process the message; a handler settles it through its context."""
