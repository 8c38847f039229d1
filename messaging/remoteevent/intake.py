"""Storing the events that a durable party is notified of: each once, and in order.

**Duplicates.** An event that arrives again is recognised by its number and acknowledged. One that arrives again while
it is being written waits for the outcome of that.

**Checkpoint.** The received numbers are stored now and then, see :class:`~messaging.remoteevent.event_journal.
Checkpoint`; after a restart the numbers behind it are read from the records.

**Threads.** Any thread stores events. The lock guards the received numbers, and what subclasses say; no code of the
application runs under it.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from hashlib import blake2b
from typing import Any, Final

from messaging.dispatch.eventdata import to_portable, write_json
from messaging.errors import ClosedError, DecodeError, JournalFullError, MessagingError
from messaging.errors.text import SafeLog
from messaging.execution import Promise, workers
from messaging.journal import JournalTable, Record
from messaging.remoteevent.event import EventKind, RemoteEvent, decode_event, encode_event
from messaging.remoteevent.event_journal import Checkpoint, EventJournal, channel_of, record_of
from messaging.remoteevent.listener import Outcome, settled
from messaging.remoteevent.sequences import SequenceRanges

logger = SafeLog(__name__)


class _Arrived:
    """A notified event, and what becomes of it."""

    __slots__ = ("channel", "event", "key", "line", "size")

    def __init__(self, event: RemoteEvent) -> None:
        self.event = event
        self.channel = channel_of(event.kind)
        self.line = encode_event(event)
        #: identifies the notification
        self.key = stream_of(event), event.sequence_number
        #: bytes of its record; 0 if it is acknowledged without being stored
        self.size = 0


class EventIntake:
    """Stores events in a journal. Thread safe.

    Subclasses decide which events are stored, and learn which ones are.

    Args:
        events: the journal.
        state: the table for the checkpoint.
        key: of the checkpoint in the table.
        name: of the party, for the log and in errors.
        changed: called with the channels of stored events, without the lock, on the writing thread; quick.

    Attributes:
        stored: number of stored events since the party was opened.
        duplicates: number of events that had arrived before.
    """

    def __init__(
        self,
        events: EventJournal,
        state: JournalTable,
        key: str,
        name: str,
        changed: Callable[[Sequence[str]], object],
    ) -> None:
        self._changed = changed
        self.events = events
        self.name = name
        self.stored = self.duplicates = 0
        self._lock = threading.Lock()  # guards the following
        self._received = ReceivedEvents()
        #: offset before which all records are part of the received numbers
        self._until = 0
        #: the events on their way to the disk, with the promises of their batches
        self._coming: dict[tuple[str, int], Promise[list[Outcome]]] = {}
        self._is_closed = False
        self._checkpoint = Checkpoint(events, state, self._snapshot, key)

    def recover(self) -> None:
        """Continue with the state of the earlier run. Raises ``JournalError``."""
        self._checkpoint.recover(self._received.restore, self._recover_record)
        self._until = self.events.journal.end

    def _recover_record(self, record: Record) -> None:
        try:
            event = decode_event(record.payload)
        except DecodeError as error:
            logger.warning("%s: record %d holds no event: %s", self.name, record.offset, error)
            return
        self._received.add(stream_of(event), event)

    def _snapshot(self) -> tuple[Any, int]:
        with self._lock:
            return self._received.to_value(), self._until

    def last(self, source: str, event_id: int | str) -> int:
        """Return the number of the last event of a kind that arrived; 0 before the first one."""
        with self._lock:
            return self._received.last((source, event_id))

    # --- what subclasses decide; with the lock

    def admit(self, _event: RemoteEvent, _size: int) -> MessagingError | bool:
        """Return ``True`` to store an event, ``False`` to drop it, or why it is refused. With the lock.

        Args:
            event: it has not arrived before.
            size: bytes of its line.
        """
        return True

    def drops(self, _event: RemoteEvent) -> bool:
        """Return whether an event that the full journal refused is dropped, rather than refused. With the lock."""
        return False

    def message_id(self, _event: RemoteEvent) -> str:
        """Return the message id of the record of an event. With the lock."""
        return ""

    def note(self, _event: RemoteEvent, _offset: int, _size: int) -> None:
        """Note that an admitted event is stored. With the lock.

        Args:
            event: the event.
            offset: of its record; -1 if it was not stored after all.
            size: bytes of its line.
        """

    # --- storing

    def store(self, events: Sequence[RemoteEvent]) -> Promise[list[Outcome]]:
        """Store events; see :class:`~messaging.remoteevent.listener.EventTarget`."""
        arrived: list[_Arrived] = []
        try:
            for event in events:
                arrived.append(_Arrived(event))  # noqa: PERF401  # those before one that fails are stored
        except MessagingError as error:
            if not arrived:
                return settled([error])
        promise: Promise[list[Outcome]] = Promise("store remote events")
        refusal: MessagingError | None = None
        failure: MessagingError | None = None
        is_written = False
        with self._lock:
            if self._is_closed:
                return settled([ClosedError(f"{self.name}: closed")])
            earlier = self._coming.get(arrived[0].key)
            if earlier is None:
                arrived, refusal = self._admitted(arrived, promise)
                wanted = [each for each in arrived if each.size]
                if wanted:
                    try:
                        self._write(wanted, arrived, refusal, promise)
                        is_written = True
                    except MessagingError as error:
                        failure = error
        if earlier is not None:
            earlier.listen(lambda: workers().submit(lambda: _follow(self.store(events), promise)))
        elif not is_written:
            self._finish(arrived, refusal, promise, 0, -1, failure)
        return promise

    def _admitted(
        self, arrived: list[_Arrived], promise: Promise[list[Outcome]]
    ) -> tuple[list[_Arrived], MessagingError | None]:
        """Decide on events; return those with a decision, and why the next one is refused. With the lock."""
        for count, each in enumerate(arrived):
            if self._received.has(*each.key):
                self.duplicates += 1
                continue
            coming = self._coming.get(each.key)
            if coming is promise:  # twice in this batch: the first one decides for both
                self.duplicates += 1
                continue
            if coming is not None:  # its sender passes it again
                return arrived[:count], None
            decision = self.admit(each.event, len(each.line))
            if isinstance(decision, MessagingError):
                return arrived[:count], decision
            if decision:
                each.size = len(each.line)
                self._coming[each.key] = promise
            else:
                self._received.add(each.key[0], each.event)
        return arrived, None

    def _write(
        self,
        wanted: list[_Arrived],
        arrived: list[_Arrived],
        refusal: MessagingError | None,
        promise: Promise[list[Outcome]],
    ) -> None:
        """Pass admitted events to the journal. With the lock: in this order. Raises ``MessagingError``."""
        records = [record_of(each.channel, each.line, self.message_id(each.event)) for each in wanted]
        self.events.store(
            [each.channel for each in wanted],
            records,
            lambda count, first, error: self._finish(arrived, refusal, promise, count, first, error),
        )

    def _finish(
        self,
        arrived: list[_Arrived],
        refusal: MessagingError | None,
        promise: Promise[list[Outcome]],
        count: int,
        first: int,
        error: MessagingError | None,
    ) -> None:
        """Note what is stored, and answer the sender. On the thread that wrote it, or on the sender's.

        Args:
            arrived: the events with a decision.
            refusal: why the event behind them was refused.
            promise: of the outcomes.
            count, first, error: see :data:`~messaging.remoteevent.event_journal.Stored`.
        """
        outcomes: list[Outcome] = []
        channels: list[str] = []
        size = at = 0
        is_over = False  # the sender has to pass the other events again
        with self._lock:
            for each in arrived:
                if each.size:
                    del self._coming[each.key]
                    is_stored = at < count
                    self.note(each.event, first + at if is_stored else -1, each.size)
                    at += 1
                    if is_stored:
                        self._received.add(each.key[0], each.event)
                        channels.append(each.channel)
                        size += each.size
                    elif not is_over:
                        is_over = True
                        if isinstance(error, JournalFullError) and self.drops(each.event):
                            self._received.add(each.key[0], each.event)
                            outcomes.append(None)
                        elif error is not None:
                            outcomes.append(error)
                if not is_over:
                    outcomes.append(None)
            self._until = max(self._until, first + count)
            self.stored += count
        if refusal is not None and not is_over:
            outcomes.append(refusal)
        if isinstance(error, JournalFullError):
            self._checkpoint.note(0, 0, is_full=True)
        if count:
            self._checkpoint.note(count, size)
            self._changed(channels)
        promise.resolve(outcomes)

    # --- closing

    def refuse_further(self) -> None:
        """Store no further events."""
        with self._lock:
            self._is_closed = True

    def close_checkpoint(self, *, is_stored: bool = True) -> None:
        """Store the state for the last time, unless it is not needed any more. Raises ``JournalError``."""
        try:
            if is_stored:
                self._checkpoint.store()
        finally:
            self._checkpoint.close()


def _follow(found: Promise[list[Outcome]], promise: Promise[list[Outcome]]) -> None:
    """Resolve ``promise`` with the outcomes of another one."""
    found.listen(lambda: promise.resolve(found.result(0)))


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
