"""Published events: one event, converted once to each type that its handlers want (157.4.1, 157.4.2)."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

from messaging.dispatch.eventdata import EventData, checked_copy, schema_of, to_map, topic_of
from messaging.dispatch.eventnetwork import last_hop
from messaging.errors import InvalidEventError, NullEventError
from messaging.execution import clock

if TYPE_CHECKING:
    from uuid import UUID

    from messaging.dispatch.eventdata import Converter

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
