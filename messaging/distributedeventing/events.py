"""Events with their sender, events on their way, and the push events that consumers receive (RFC 214 7.1, RFC 216)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, field
from enum import Enum
from typing import Any, Final, Generic, Literal, Self, TypeVar, get_args
from uuid import UUID

from messaging.dispatch import DISTRIBUTED_EVENTS
from messaging.dispatch.eventdata import Converter, as_data
from messaging.errors import ArgumentError, InvalidEventError
from messaging.errors.checks import check_instance
from messaging.errors.text import tolerant

T = TypeVar("T")

#: back-pressure that asks for the next event at once
CONTINUE: Final = 0
#: back-pressure that ends the delivery to a consumer
ABORT: Final = -1


class ConsumerLifecycle(Enum):
    """Whether a consumer is aware of sessions (5.2.3). ``UNIFIED`` and ``SESSION`` are the names in the text."""

    #: one consumer object for all events, without close and error events
    GLOBAL = "GLOBAL"
    #: a consumer object for each session, with its close and error events
    PER_SESSION = "PER_SESSION"
    UNIFIED = "GLOBAL"  # noqa: PIE796  # an alias: the name in the text
    SESSION = "PER_SESSION"  # noqa: PIE796


@dataclass(frozen=True, slots=True, eq=False)
class DistributableEvent(Generic[T]):
    """An event with its sender (7.1). Immutable.

    Attributes:
        topic: a public or private topic.
        originating_bundle: the number of the bundle that sent it; ``None`` if unknown, as from foreign senders (DE080).
        originating_framework: the UUID of the framework that sent it; ``None`` if unknown.
        reply_to: the topic for replies; ``None`` if its sender takes none.
        correlation_id: relates a reply to its event, or ``None``.
        data: the payload.

    Raises:
        InvalidTopicError, NullEventError: the topic is malformed or missing.
        ArgumentError: another argument has the wrong type.
    """

    topic: str
    originating_bundle: int | None = None
    originating_framework: UUID | None = None
    reply_to: str | None = None
    correlation_id: str | None = None
    data: T = None  # type: ignore[assignment]

    def __post_init__(self) -> None:
        object.__setattr__(self, "topic", DISTRIBUTED_EVENTS.check_topic(self.topic))
        if self.reply_to is not None:
            check_reply_topic(self.reply_to)
        if self.correlation_id is not None:
            check_instance("correlation_id", self.correlation_id, str)
        if self.originating_framework is not None:
            check_instance("originating_framework", self.originating_framework, UUID)
        bundle = self.originating_bundle
        if bundle is not None and (type(bundle) is not int or bundle < 0):
            raise ArgumentError(f"originating_bundle must be an int of at least 0, not {bundle!r:.80}")


def check_reply_topic(topic: str) -> None:
    """Refuse a topic for replies that is neither a topic nor begins as a private topic does.

    The format of a private topic of others is unspecified, aside from its first character (7.1). An event that names
    one that no channel has (with ``+`` or ``#``) is delivered; a reply to it is refused.

    Raises:
        InvalidTopicError, NullEventError: as described.
    """
    if not isinstance(topic, str) or not topic.startswith(".") or topic == "." or not topic.isprintable():
        DISTRIBUTED_EVENTS.check_topic(topic)


EventKind = Literal["data", "error", "close"]
_KINDS: Final[tuple[EventKind, ...]] = get_args(EventKind)


class PushEvent(Generic[T]):
    """What a consumer is called with: a data event, or the end of a session. Immutable.

    Attributes:
        kind: ``data``, ``error`` or ``close``.
        value: the payload, or for a ``DistributableEventConsumer`` the whole event; ``None`` unless it is a data event.
        failure: the error of an error event, else ``None``.
    """

    __slots__ = ("failure", "kind", "value")

    kind: EventKind
    value: T
    failure: Exception | None

    def __init__(self, kind: EventKind, value: Any = None, failure: Exception | None = None) -> None:
        if kind not in _KINDS:
            raise ArgumentError(f"the kind of a PushEvent must be one of {', '.join(_KINDS)}, not {kind!r:.80}")
        self.kind = kind
        self.value = value
        self.failure = failure

    @property
    def is_terminal(self) -> bool:
        """Return whether it ends a session."""
        return self.kind != "data"

    @classmethod
    def data(cls, value: Any) -> Self:
        """Return a data event."""
        return cls("data", value)

    @classmethod
    def error(cls, failure: Exception) -> Self:
        """Return an error event. Raise ``ArgumentError`` if ``failure`` is no exception."""
        check_instance("failure", failure, Exception)
        return cls("error", None, failure)

    @classmethod
    def close(cls) -> Self:
        """Return a close event."""
        return cls("close")

    @tolerant
    def __repr__(self) -> str:
        return f"<PushEvent {self.kind}>"


#: takes a push event and returns its back-pressure: negative to end, 0 or ``None``, or milliseconds to wait
Accept = Callable[[PushEvent[Any]], Any]


#: identifies a session: the member and the session there; ``None`` is the default session of all senders (5.2.3)
SessionKey = tuple[str, str] | None

_MISSING: Any = object()


@dataclass(slots=True, eq=False, repr=False)
class DispatchedEvent:
    """One event, shared by its consumers. Thread safe: conversions are computed at most once for each consumer thread.

    Attributes:
        topic, kind, data, failure: see ``PushEvent``.
        session: the session that it belongs to.
        is_late: whether its session has ended before: consumers that are aware of sessions do not receive it.
        bundle, framework, reply_to, correlation_id: see ``DistributableEvent``.
    """

    topic: str
    kind: EventKind
    data: Any
    _: KW_ONLY
    session: SessionKey = None
    bundle: int | None = None
    framework: UUID | None = None
    reply_to: str | None = None
    correlation_id: str | None = None
    failure: Exception | None = None
    is_late: bool = field(default=False, init=False)
    _map: Any = field(default=_MISSING, init=False)
    _converted: dict[Converter, Any] = field(default_factory=dict, init=False)

    def as_map(self) -> Any:
        """Return the payload with maps in place of objects; see ``as_data`` for errors."""
        if self._map is _MISSING:
            self._map = as_data(self.data)
        return self._map

    def push_event(self, convert: Converter | None, is_whole: bool) -> PushEvent[Any]:
        """Return what a consumer is called with.

        Args:
            convert: converts the payload to the type that the consumer wants; ``None``: it takes the payload as it is.
            is_whole: whether it takes the event with its sender.

        Raises:
            ConversionError, InvalidEventError: the payload cannot be converted.
        """
        if self.kind != "data":
            return PushEvent(self.kind, None, self.failure)
        data = self.data
        if convert is not None:
            data = self._converted.get(convert, _MISSING)
            if data is _MISSING:
                data = self._converted[convert] = convert(self.data)
        if is_whole:
            data = DistributableEvent(self.topic, self.bundle, self.framework, self.reply_to, self.correlation_id, data)
        return PushEvent("data", data)

    def matches(self, accepts: Callable[[dict[str, Any]], bool]) -> bool:
        """Return whether the payload has named fields, and these pass a filter."""
        try:
            found = self.as_map()
        except InvalidEventError:
            return False
        return isinstance(found, dict) and accepts(found)
