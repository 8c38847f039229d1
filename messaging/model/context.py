"""MessageContext (RFC 5.6.2): the immutable properties of a message.

Instances have slots, because one is made for every message.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar, Final, TypeVar

from messaging.errors import ArgumentError
from messaging.errors.text import printable, tolerant
from messaging.model import channels
from messaging.model.features import Features

C = TypeVar("C", bound="MessageContext")

#: maximum nesting of containers in an extension value
_MAX_DEPTH: Final = 32
_BESIDE_CHANNEL: Final = ("content_type", "content_encoding", "correlation_id", "reply_to_channel")

_UNSET: Final = (None, None, None, None)
_MAPPINGS: Final = (MappingProxyType, dict)
_MESSAGE_ID: Final = Features.EXTENSION_MESSAGE_ID

NO_EXTENSIONS: Final[Mapping[str, Any]] = MappingProxyType({})


class MessageContext:
    """The properties of a message, or of its handling (RFC 5.6.2).

    Built by a :class:`~messaging.model.builder.MessageContextBuilder` on the sending side and by the adapter on the
    receiving side. Values that were not set are ``None``; ``extensions`` is never ``None`` and read-only.
    Instances are immutable and may be shared between threads and messages.
    """

    __slots__ = (
        "_channel",
        "_channel_extension",
        "_content_encoding",
        "_content_type",
        "_correlation_id",
        "_extensions",
        "_reply_to_channel",
        "direct_acknowledgement",
        "plan",
    )

    #: whether its extensions include values that a protocol reported, not only requests of an application
    is_received: ClassVar[bool] = False

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
        """Keep ``extensions`` without a copy: the caller must not change the mapping afterwards."""
        self._channel = channel
        self._channel_extension = channel_extension
        self._content_type = content_type
        self._content_encoding = content_encoding
        self._correlation_id = correlation_id
        self._reply_to_channel = reply_to_channel
        self._extensions = extensions
        #: set by the builder
        self.direct_acknowledgement: DirectAcknowledgement | None = None
        #: the ``PublishPlan`` that a publisher compiled of this context
        self.plan: Any = None

    @property
    def channel(self) -> str | None:
        """Return the channel to publish or subscribe to, or on which the message arrived (MSG260)."""
        return self._channel

    @property
    def channel_extension(self) -> str | None:
        """Return the routing key of the channel."""
        return self._channel_extension

    @property
    def content_type(self) -> str | None:
        """Return the content type, such as ``application/json``."""
        return self._content_type

    @property
    def content_encoding(self) -> str | None:
        """Return the content encoding, such as ``gzip``."""
        return self._content_encoding

    @property
    def correlation_id(self) -> str | None:
        """Return the correlation id, which identifies the request that a reply answers."""
        return self._correlation_id

    @property
    def reply_to_channel(self) -> str | None:
        """Return the channel for replies."""
        return self._reply_to_channel

    @property
    def extensions(self) -> Mapping[str, Any]:
        """Return the read-only mapping of extensions (:class:`~messaging.model.features.Features`), never ``None``."""
        return self._extensions

    def replace(self, **changes: Any) -> MessageContext:
        """Return a copy with some values changed.

        Args:
            **changes: new values by the names of the constructor's parameters. The copy shares the extensions unless
                they are among the changes; they must be immutable.
        """
        return (ForwardedContext if self.is_received else MessageContext)(**{**self._constructed_of(), **changes})

    def at(self, channel: str | None, channel_extension: str | None = None) -> MessageContext:
        """Return a copy with another channel: the fast form of :meth:`replace`."""
        return (ForwardedContext if self.is_received else MessageContext)(
            channel,
            channel_extension,
            self._content_type,
            self._content_encoding,
            self._correlation_id,
            self._reply_to_channel,
            self._extensions,
        )

    def _constructed_of(self) -> dict[str, Any]:
        return {
            "channel": self._channel,
            "channel_extension": self._channel_extension,
            **dict(zip(_BESIDE_CHANNEL, self.values_beside_channel(), strict=True)),
            "extensions": self._extensions,
        }

    def __reduce__(self) -> tuple[Any, ...]:
        return rebuilt_context, (type(self), self._state_to_copy())

    def _state_to_copy(self) -> dict[str, Any]:
        changed = {"extensions": thawed(self._extensions), "acknowledgement": self.direct_acknowledgement}
        return {**self._constructed_of(), **changed}

    def values_beside_channel(self) -> tuple[str | None, ...]:
        """Return content type, content encoding, correlation id and reply channel."""
        return (self._content_type, self._content_encoding, self._correlation_id, self._reply_to_channel)

    def _values(self) -> tuple[Any, ...]:
        return (self._channel, self._channel_extension, *self.values_beside_channel(), dict(self._extensions))

    # without a hash: extensions may hold unhashable values
    def __eq__(self, other: object) -> bool:
        if not isinstance(other, MessageContext):
            return NotImplemented
        return self._values() == other._values()

    @tolerant
    def __repr__(self) -> str:
        names = ("channel", "channel_extension", "content_type", "content_encoding", "correlation_id")
        shown = [f"{name}={value!r}" for name in names if (value := getattr(self, "_" + name)) is not None]
        if self._reply_to_channel is not None:
            shown.append(f"reply_to_channel={self._reply_to_channel!r}")
        if self._extensions:
            # names only: values of headers may be secrets of the application
            shown.append(f"extensions=<{', '.join(map(printable, sorted(self._extensions)))}>")
        return f"{type(self).__name__}({', '.join(shown)})"


def thawed(value: Any) -> Any:
    """Return a copy of an extension value with containers that can be pickled."""
    if isinstance(value, Mapping):
        return {key: thawed(each) for key, each in value.items()}
    if isinstance(value, tuple):
        return tuple(map(thawed, value))
    return value


def rebuilt_context(kind: type[C], state: dict[str, Any]) -> C:
    """Return the unpickled or copied context of a state, see ``MessageContext._state_to_copy``."""
    acknowledgement = state.pop("acknowledgement")
    context = kind(**{**state, "extensions": frozen(state["extensions"])})
    context.direct_acknowledgement = acknowledgement
    return context


class ForwardedContext(MessageContext):
    """The context of a received message that is published again, see ``extensions.requested``."""

    __slots__ = ()

    is_received = True


def plan_key(context: MessageContext, extensions: Mapping[str, Any]) -> tuple[Any, ...] | None:
    """Return what contexts have in common that share a publish plan; ``None`` if there are not many like this one.

    Contexts with nothing but a channel are alike, and so are contexts that differ in nothing but their message id.

    Args:
        context: the context.
        extensions: its extensions, or those to publish with.
    """
    if extensions is NO_EXTENSIONS:
        plain = context._channel.__class__ is str and context.values_beside_channel() == _UNSET
        return (context._channel, context._channel_extension) if plain else None
    if context._correlation_id is not None or extensions.__class__ not in _MAPPINGS:
        return None
    if context._channel.__class__ is not str:
        return None
    if extensions.get(_MESSAGE_ID) is None:
        return None
    others = [(name, value) for name, value in extensions.items() if name != _MESSAGE_ID]
    if not all(isinstance(value, (str, int, float)) for _, value in others):
        return None  # such as headers
    return (
        context._channel, context._channel_extension, context._content_type, context._content_encoding,
        context._reply_to_channel, *others, *[type(value) for _, value in others],
    )  # fmt: skip


def frozen(value: Any, depth: int = 0) -> Any:
    """Return an immutable copy of an extension value.

    Raises:
        ArgumentError: the value is nested too deeply.
    """
    if depth > _MAX_DEPTH:
        raise ArgumentError(f"an extension value is nested more than {_MAX_DEPTH} levels deep")
    if isinstance(value, Mapping):
        return MappingProxyType({key: frozen(each, depth + 1) for key, each in value.items()})
    if isinstance(value, (list, tuple)):
        return tuple(frozen(each, depth + 1) for each in value)
    if isinstance(value, (set, frozenset)):
        return frozenset(value)
    return bytes(value) if isinstance(value, (bytearray, memoryview)) else value


@dataclass(frozen=True, slots=True, eq=False)
class DirectAcknowledgement:
    """The configuration made by an ``AcknowledgeMessageContextBuilder`` (RFC 5.8.4). Immutable.

    Each callback is a callable, an LDAP target (str) of a service, or ``None``.
    """

    filter: str | Callable[[Any], bool] | None = None
    handle: str | Callable[..., object] | None = None
    post: str | Callable[[Any], object] | None = None


def check_printable(name: str, value: object) -> None:
    """Refuse text that can make a broker close the connection, such as text of two lines.

    Raises:
        ArgumentError: ``value`` is no such text; ``name`` is its name in the error.
    """
    check_text(name, value)
    bad = channels.forbidden_character(str(value))
    if bad is not None:
        raise ArgumentError(f"{name} holds {bad}")


def check_text(name: str, value: object) -> None:
    """Refuse a value that no protocol can carry as text.

    Raises:
        ArgumentError: ``value`` is no such text; ``name`` is its name in the error.
    """
    if not isinstance(value, str):
        raise ArgumentError(f"{name} must be a str, not {type(value).__name__}")
    try:
        size = len(value.encode())
    except UnicodeEncodeError:
        raise ArgumentError(f"{name} holds a lone surrogate") from None
    if "\x00" in value:
        raise ArgumentError(f"{name} holds a NUL character")
    if size > channels.MAX_BYTES:
        raise ArgumentError(f"{name} is {size} bytes long in UTF-8; at most {channels.MAX_BYTES} fit")
