"""An event on its way: published once, and turned into what each handler wants (157.4.1, 157.4.2)."""

from __future__ import annotations

import threading
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

from messaging.typedevent.maps import EventData, checked_copy, to_map

if TYPE_CHECKING:
    from messaging.typedevent.simple import Converter

#: how long one handler waits for what another one is converting, before it does that itself, seconds
_PATIENCE: Final = 1.0


class _Conversion:
    """Of one event to one type: whoever makes it does it, and the others wait."""

    __slots__ = ("error", "is_done", "lock", "value")

    def __init__(self) -> None:
        self.value: Any = None
        self.error: BaseException | None = None
        self.is_done = False
        self.lock = threading.Lock()
        self.lock.acquire()

    def run(self, convert: Converter, data: Any) -> None:
        try:
            self.value = convert(data)
        except BaseException as error:  # noqa: BLE001  # a constructor may raise anything: so do all that wait for it
            self.error = error
        finally:
            self.is_done = True
            self.lock.release()

    def wait(self) -> bool:
        """Whether it is done in time."""
        if not self.is_done and self.lock.acquire(timeout=_PATIENCE):
            self.lock.release()
        return self.is_done


class PublishedEvent:
    """An event as it was published. Thread safe.

    Attributes:
        topic: it was published to.
        data: an instance of a schema, or the map of an untyped event, which nobody changes.
        sequence: its place in what the bus has recorded; 0 if it was not.
        time: when it was published, seconds since the epoch; 0 if it was not recorded.
        passed: the event services that it came through, if it was not published here at first.
    """

    __slots__ = ("_conversions", "data", "passed", "sequence", "time", "topic")

    def __init__(self, topic: str, data: Any) -> None:
        self.topic = topic
        self.data = data
        self.sequence = 0
        self.time = 0.0
        self.passed: tuple[object, ...] = ()
        self._conversions: dict[Converter, _Conversion] = {}

    def copy(self) -> PublishedEvent:
        """The same event without what it was converted to, which whoever keeps it long need not keep."""
        copy = PublishedEvent(self.topic, self.data)
        copy.sequence = self.sequence
        copy.time = self.time
        copy.passed = self.passed
        return copy

    def owned(self) -> PublishedEvent:
        """The same event with a copy of untyped data, which handlers of this one cannot reach."""
        if self.data.__class__ is not dict:
            return self
        owned = self.copy()
        owned.data = checked_copy(self.data)
        return owned

    def as_map(self) -> EventData:
        """The data in map form, made once. It is shared by handlers: not to be changed.

        Raises:
            InvalidEventError: the data is no tree.
        """
        if self.data.__class__ is dict:
            return self.data
        return self.converted(to_map)  # type: ignore[no-any-return]

    def converted(self, convert: Converter) -> Any:
        """What ``convert`` makes of the data: made once, however many handlers on however many threads want it.

        Raises:
            ConversionError, InvalidEventError: it cannot be made.
            BaseException: whatever else making it raised.
        """
        mine = _Conversion()
        conversion = self._conversions.setdefault(convert, mine)
        if conversion is mine:
            mine.run(convert, self.data)
        elif not conversion.wait():
            # the other handler's thread is stuck in it: that is no reason for this one to be
            return convert(self.data)
        if conversion.error is not None:
            raise conversion.error.with_traceback(None)
        return conversion.value

    @property
    def publication_time(self) -> datetime:
        """When it was published, in UTC."""
        return datetime.fromtimestamp(self.time, UTC)
