"""The events that a durable party has received: one that arrives again is recognised by its number (EV.2.3.2)."""

from __future__ import annotations

from collections import OrderedDict
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, Final

from messaging.dispatch.eventdata import to_portable, write_json
from messaging.errors import DecodeError
from messaging.remoteevent.event_journal import channel_of
from messaging.remoteevent.ranges import SequenceRanges

if TYPE_CHECKING:
    from messaging.remoteevent.event import EventKind, RemoteEvent

#: streams that are remembered: kinds of events, counted for each handback
_MAX_STREAMS: Final = 10_000
#: bytes of a handback that is part of the name of a stream as it is
_LONGEST: Final = 64


def stream_of(event: RemoteEvent) -> str:
    """Return the stream of an event: events of one stream with equal numbers are the same notification.

    Two registrations at one generator may have one listener. Their notifications of one event have equal numbers and
    differ by the handback (EV.2.3.2); neither is a duplicate of the other. A long handback is represented by its hash.
    """
    if event.handback is None:
        return channel_of(event.kind)
    handback = write_json(to_portable(event.handback))
    if len(handback) > _LONGEST:
        handback = blake2b(handback, digest_size=_LONGEST // 2).hexdigest().encode()
    return f"{channel_of(event.kind)} {handback.decode()}"


class ReceivedEvents:
    """The numbers of received events, by stream. Not thread safe.

    The streams are bounded by number: the one that was longest without an event is forgotten. An event of a forgotten
    stream, or below the numbers that are remembered of its stream, counts as new.
    """

    def __init__(self) -> None:
        #: the one with the latest event last
        self._streams: OrderedDict[str, SequenceRanges] = OrderedDict()
        self._last: OrderedDict[EventKind, int] = OrderedDict()

    def has(self, stream: str, number: int) -> bool:
        """Return whether an event was received."""
        ranges = self._streams.get(stream)
        return ranges is not None and number in ranges

    def add(self, stream: str, event: RemoteEvent) -> None:
        """Note an event that is stored."""
        ranges = self._streams.get(stream)
        if ranges is None:
            ranges = self._streams[stream] = SequenceRanges()
            if len(self._streams) > _MAX_STREAMS:
                self._streams.popitem(last=False)
        else:
            self._streams.move_to_end(stream)
        ranges.add(event.sequence_number)
        kind = event.kind
        if event.sequence_number > self._last.get(kind, -1):
            self._last[kind] = event.sequence_number
            if len(self._last) > _MAX_STREAMS:
                self._last.popitem(last=False)

    def last(self, kind: EventKind) -> int:
        """Return the highest number of a kind; 0 before its first event."""
        return self._last.get(kind, 0)

    def to_value(self) -> Any:
        """Return the numbers in portable form."""
        return {
            "streams": {stream: ranges.to_value() for stream, ranges in self._streams.items()},
            "last": [[*kind, number] for kind, number in self._last.items()],
        }

    def restore(self, value: Any) -> None:
        """Continue with the numbers of an earlier run. Raises ``DecodeError``."""
        try:
            for stream, ranges in value["streams"].items():
                self._streams[stream] = SequenceRanges.from_value(ranges)
            for source, event_id, number in value["last"]:
                self._last[source, event_id] = number
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise DecodeError(f"not the state of a party of remote events: {type(error).__name__}") from None
