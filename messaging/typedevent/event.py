"""Published events: one event, converted once to each type that its handlers want (157.4.1, 157.4.2).

A durable history has them as bytes, in the layout of :mod:`messaging.dispatch.eventdata`: ``recorder`` is the id of the
journal, and ``sequence`` the number of the event in it. ``origin`` is left out for local events. ``id`` identifies the
event in event networks. The bounds of depth and numbers do not apply: the events are those of this process.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, Final
from uuid import UUID

from messaging.dispatch import is_topic
from messaging.dispatch.eventdata import (
    Converter,
    EventData,
    WireEvent,
    checked_copy,
    decode,
    encode,
    microseconds,
    schema_of,
    time_of,
    to_map,
    topic_of,
)
from messaging.dispatch.eventnetwork import last_hop
from messaging.errors import DecodeError, InvalidEventError, NullEventError
from messaging.errors.text import SafeLog
from messaging.execution import clock

logger = SafeLog(__name__)

#: how long a handler waits for a conversion on another thread before it converts the event itself, seconds
_PATIENCE: Final = 1.0


class _Conversion:
    """The conversion of one event to one type. The first handler runs it; the others wait for the result."""

    __slots__ = ("error", "is_done", "lock", "value")

    def __init__(self) -> None:
        self.value: Any = None
        self.error: BaseException | None = None
        self.is_done = False
        self.lock = clock.lock()
        self.lock.acquire()

    def run(self, convert: Converter, data: Any) -> None:
        try:
            self.value = convert(data)
        except BaseException as error:  # noqa: BLE001  # a constructor may raise anything; every waiting handler raises it
            self.error = error
        finally:
            self.is_done = True
            self.lock.release()

    def wait(self) -> bool:
        """Wait for the result; return whether it is there in time."""
        if not self.is_done and self.lock.acquire(timeout=_PATIENCE):
            self.lock.release()
        return self.is_done


class PublishedEvent:
    """An event as it was published. Thread safe.

    Attributes:
        topic: the topic it was published to.
        data: an instance of a schema, or the map of an untyped event, which is never mutated.
        sequence: its number among the recorded events of its bus; 0 if it was not recorded.
        time: when it was published, seconds since the epoch; 0 if it was not recorded, and its publisher set none.
        origin: the framework that a remote event came from; ``None`` for local events.
        id: identifies it in event networks; ``None`` until it is sent to one.
        passed: the event services that it came through before this bus.
    """

    __slots__ = ("_conversions", "data", "id", "origin", "passed", "sequence", "time", "topic")

    def __init__(self, topic: str, data: Any) -> None:
        self.topic = topic
        self.data = data
        self.sequence = 0
        self.time = 0.0
        self.origin: UUID | None = None
        self.id: str | None = None
        self.passed: tuple[object, ...] = ()
        self._conversions: dict[Converter, _Conversion] = {}

    @property
    def network_id(self) -> str | None:
        """Its id in event networks: its own, or the one with which it arrived; ``None`` if it was in none."""
        if self.id is not None:
            return self.id
        hop = last_hop(self.passed)
        return None if hop is None else hop.id

    def owned(self) -> PublishedEvent:
        """Return the event with a copy of its untyped data, which handlers of this one cannot mutate."""
        if self.data.__class__ is not dict:
            return self
        owned = PublishedEvent(self.topic, checked_copy(self.data))
        owned.sequence = self.sequence
        owned.time = self.time
        owned.origin = self.origin
        owned.id = self.id
        owned.passed = self.passed
        return owned

    def as_map(self) -> EventData:
        """Return the data in map form, shared by the handlers and not to be mutated; see ``to_map`` for errors."""
        if self.data.__class__ is dict:
            return self.data
        data: EventData = self.converted(to_map)
        return data

    def converted(self, convert: Converter) -> Any:
        """Return ``convert(data)``, computed once for all handlers on all threads.

        Raises:
            ConversionError, InvalidEventError: the data cannot be converted.
            BaseException: anything else that the conversion raised.
        """
        mine = _Conversion()
        conversion = self._conversions.setdefault(convert, mine)
        if conversion is mine:
            mine.run(convert, self.data)
        elif not conversion.wait():
            # The thread of the other handler may be stuck in its conversion.
            return convert(self.data)
        if conversion.error is not None:
            raise conversion.error.with_traceback(None)
        return conversion.value

    @property
    def publication_time(self) -> datetime:
        """When the event was published, in UTC."""
        return datetime.fromtimestamp(self.time, UTC)


def copy_of(event: Any, is_untyped: bool) -> dict[str, Any]:
    """Return a copy of an event that is a mapping."""
    if isinstance(event, Mapping):
        return checked_copy(event)
    if is_untyped:
        raise InvalidEventError(f"an untyped event must be a mapping; this is of type {type(event).__name__}")
    raise InvalidEventError(
        f"an event must be an instance of a class with fields, or a mapping; this is of type {type(event).__name__}"
    )


def topic_of_event(event: Any) -> str:
    """Return the topic made of the class of an event."""
    if event is None:
        raise NullEventError("the event is None")
    if isinstance(event, Mapping):
        raise InvalidEventError("a mapping has no class that a topic can be made of: give one")
    if schema_of(event.__class__) is None:
        copy_of(event, is_untyped=False)  # raises
    return topic_of(event.__class__)


class StoredEvent:
    """An event of an earlier run, decoded when it is needed. Immutable."""

    __slots__ = ("payload",)

    def __init__(self, payload: bytes) -> None:
        self.payload = payload

    def load(self) -> PublishedEvent | None:
        """Return the event, or ``None`` and a log record if it cannot be read."""
        try:
            return load(self.payload)
        except DecodeError as error:
            logger.error("durable history: an event cannot be read: %s; it is left out", error)
            return None


def dump(event: PublishedEvent, recorder: str) -> bytes:
    """Return a recorded event as bytes.

    Args:
        event: with its sequence and publication time.
        recorder: identifies the numbering of the events.

    Raises:
        InvalidEventError: a value of the event has no form.
    """
    try:
        time = microseconds(event.publication_time)
    except (ValueError, ArithmeticError, OSError):
        raise InvalidEventError(f"its time is no date: {event.time!r:.40}") from None
    wire = WireEvent(
        event.topic,
        recorder=recorder,
        sequence=event.sequence,
        time=time,
        origin=None if event.origin is None else str(event.origin),
        id=event.network_id,
    )
    wire.put(event.data, is_bounded=False)
    return encode(wire)


def load(payload: bytes) -> PublishedEvent:
    """Return the event that :func:`dump` returned as bytes. Raises ``DecodeError`` for other bytes."""
    wire = decode(payload)
    if not is_topic(wire.topic):
        raise DecodeError("a stored event without a valid topic")
    if wire.sequence is None or wire.time is None:
        raise DecodeError("a stored event without a sequence number or a time")
    data = wire.value(is_bounded=False)
    if type(data) is not dict:
        raise DecodeError("a stored event whose data is no map")
    event = PublishedEvent(wire.topic, data)
    event.sequence = wire.sequence
    event.time = time_of(wire.time).timestamp()
    event.id = wire.id
    event.origin = None if wire.origin is None else UUID(wire.origin)
    return event
