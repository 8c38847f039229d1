"""Events as bytes, for the durable history: recorded events in the layout of :mod:`messaging.dispatch.eventdata`.

``recorder`` is the id of the journal, and ``sequence`` the number of the event in it. ``origin`` is left out for local
events. ``id`` identifies the event in event networks. The bounds of depth and numbers do not apply: the events are
those of this process.
"""

from __future__ import annotations

from uuid import UUID

from messaging.dispatch import is_topic
from messaging.dispatch.eventdata import WireEvent, decode, encode, microseconds, time_of
from messaging.errors import DecodeError, InvalidEventError
from messaging.errors.text import SafeLog
from messaging.typedevent.event import PublishedEvent

logger = SafeLog(__name__)


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
    """Return the event that :func:`dump` returned as bytes. Raises ``DecodeError`` if it is none."""
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
