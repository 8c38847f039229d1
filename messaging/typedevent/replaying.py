"""Replaying a durable history: events from the disk, until a subscription receives live events."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from datetime import datetime
from typing import TYPE_CHECKING, Final

from messaging.typedevent.store import position_of, sequence_of
from messaging.typedevent.stored_event import StoredEvent

if TYPE_CHECKING:
    from messaging.journal import Record
    from messaging.typedevent.event import PublishedEvent
    from messaging.typedevent.store import EventStore

#: records that are left when the subscription joins the live events: they are read while live events are queued
NEAR: Final = 1000


#: by which a time as a float may differ from the time that it stands for, seconds
_PRECISION: Final = 1e-5


def is_since(event: PublishedEvent, since: int | datetime) -> bool:
    """Return whether an event has the sequence or the publication time ``since``, or a later one."""
    return event.sequence >= since if isinstance(since, int) else event.publication_time >= since


def replayed(
    store: EventStore,
    since: int | datetime,
    accepts: Callable[[str], bool],
    join: Callable[[], tuple[int, list[PublishedEvent]]],
    missed: Callable[[int], object],
    live_from: int = sys.maxsize,
) -> Iterator[PublishedEvent | None]:
    """Yield the events of a durable history in the order of their sequences, without loading all of them.

    Where it is near the end it calls ``join``, and goes on with the rest. Used by one thread at a time.

    Args:
        store: the durable history.
        since: sequence or publication time of the first event, inclusive. A time has a zone.
        accepts: whether a topic is wanted.
        join: has the subscription receive all events that are published from now on. Returns the greatest sequence of
            the events before, and the events that wait for the disk.
        missed: called with the number of events that the bounds of the history dropped before they were read.
        live_from: least sequence of events published after the subscription, which are wanted whatever ``since`` is.

    Yields:
        Events; ``None`` between records that are left out, so that the caller can stop.

    Raises:
        JournalError: a file cannot be read.
    """
    offset = store.journal.seek(lambda record: position_of(record) < live_from and _is_before(record, since))
    last = 0
    if isinstance(since, int):
        since = min(since, live_from)

    def is_asked_for(event: PublishedEvent) -> bool:
        return event.sequence >= live_from or is_since(event, since)

    def wanted(record: Record) -> PublishedEvent | None:
        nonlocal offset, last
        if record.offset > offset and offset < store.journal.begin:
            missed(min(record.offset, store.journal.begin) - offset)
        offset = record.offset + 1
        sequence = sequence_of(record)
        if sequence <= last or (isinstance(since, int) and sequence < since):
            return None
        last = sequence
        if not accepts(record.channel):
            return None
        event = StoredEvent(record.payload).load()
        return event if event is not None and is_asked_for(event) else None

    while (end := store.journal.end) - offset > NEAR:
        yield from map(wanted, store.read(offset))
        offset = max(offset, end)  # records before it that were not read are damaged
    greatest, pending = join()
    for record in store.read(offset):
        if sequence_of(record) > greatest:
            break
        yield wanted(record)
    yield from (each for each in pending if each.sequence > last and accepts(each.topic) and is_asked_for(each))


def _is_before(record: Record, since: int | datetime) -> bool:
    """Return whether a record, and so all before it, are before ``since``: timestamps of records do not decrease."""
    if isinstance(since, int):
        return position_of(record) < since
    return record.timestamp < since.timestamp() - _PRECISION
