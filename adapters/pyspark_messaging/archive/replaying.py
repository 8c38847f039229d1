"""``replay``: delivers a time range of an archive to a bus, as untyped events (157.2.2, 157.9.3.6)."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime, timedelta
from os import PathLike
from typing import TYPE_CHECKING, Any, Final, Protocol

from messaging.dispatch.permission import check_principal
from messaging.dispatch.topics import check_topic
from messaging.errors import ArgumentError, DeadlineError, InvalidEventError
from messaging.errors.checks import check_instance
from messaging.execution import Promise, may_block
from messaging.typedevent import TypedEventBus
from pyspark_messaging.archive.reader import ReadRows, read_events

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


logger = logging.getLogger(__name__)

#: events that are delivered between two waits for the handlers
_BURST: Final = 1000
#: pause between two checks of ``stop``, in seconds
_STEP: Final = 0.1


class ReplayClock(Protocol):
    """The time source of a replay. Tests have one of their own."""

    def now(self) -> float:
        """Return seconds since an arbitrary time."""

    def wait(self, stop: threading.Event, seconds: float) -> None:
        """Wait at most ``seconds``. The caller repeats it until the time has come, or ``stop`` is set."""


class _Monotonic:
    def now(self) -> float:
        return time.monotonic()

    def wait(self, stop: threading.Event, seconds: float) -> None:
        # not stop.wait(): an interrupt of the main thread could leave the lock of the event taken
        if not stop.is_set():
            time.sleep(min(seconds, _STEP))


_CLOCK: Final = _Monotonic()


@dataclass(frozen=True, slots=True)
class Replayed:
    """The result of a replay."""

    #: events that were delivered
    delivered: int
    #: rows with an event that was delivered before: a broker may deliver it to the archive twice
    duplicates: int
    #: rows whose data cannot be decoded
    unreadable: int
    #: events that the bus refused
    refused: int
    #: publication times of the first and the last delivered event
    first: datetime | None
    last: datetime | None
    #: whether ``stop`` was set before the end of the range
    is_stopped: bool


def replay(
    source: str | PathLike[str] | DataFrame,
    bus: TypedEventBus,
    *,
    start: datetime,
    end: datetime,
    topics: str | Iterable[str] = "*",
    speed: float | None = None,
    prefix: str | None = None,
    mark: str | None = None,
    stop: threading.Event | None = None,
    principal: str | None = None,
    clock: ReplayClock = _CLOCK,
) -> Replayed:
    """Deliver a time range of an archive to a bus, as untyped events.

    Handlers and monitors get them as events that are published now; typed handlers get them converted. To tell them
    from other events, set a ``prefix``, so that only handlers of such topics get them, or a ``mark``, a field that also
    holds the original publication time. A recorder on the same bus records replayed events again, unless they have a
    prefix that it does not record.

    Runs on the calling thread, and returns when the handlers have processed all events. Slow handlers slow it down. The
    archive is read step by step, see :mod:`pyspark_messaging.archive.reader` for the memory that this takes. A handler
    of the bus must not call ``replay``: it would wait for itself.

    Args:
        source, start, end, topics: see :func:`~pyspark_messaging.archive.reader.read_events`.
        bus: the bus that gets the events.
        speed: 1.0 for the original pace, 10.0 for ten times as fast. The first event comes at once. ``None``, or a
            replay that is late, delivers as fast as the handlers are.
        prefix: first tokens of topics: ``replay`` delivers ``orders/placed`` on ``replay/orders/placed``.
        mark: name of a field that each event gets: a map with ``time``, ``recorder`` and ``sequence``. It replaces a
            field of that name. Typed handlers whose type has no such field ignore it.
        stop: ends the replay when it is set, within a tenth of a second, from any thread.
        principal: the publisher of the events (157.8).
        clock: for tests.

    Returns:
        The number of delivered, duplicate, unreadable and refused events.

    Raises:
        InvalidRangeError, InvalidTopicError, ArgumentError: an argument is wrong; or the calling thread runs an event
            loop: use ``asyncio.to_thread``. Nothing was delivered.
        ArchiveMissingError, ArchiveUnreadableError: the archive cannot be read. Earlier events were delivered.
        PermissionDeniedError, ClosedError: as ``TypedEventBus.deliver_untyped``.
    """
    if not may_block():
        raise ArgumentError("a replay blocks: on an event loop, await asyncio.to_thread(replay, ...)")
    check_instance("bus", bus, TypedEventBus)
    if stop is not None:
        check_instance("stop", stop, threading.Event)
    principal = check_principal(principal)
    if speed is not None and (isinstance(speed, bool) or not isinstance(speed, (int, float)) or not 0 < speed < 1e9):
        raise ArgumentError(f"speed must be a number above 0, or None for the speed of the handlers, not {speed!r:.80}")
    if prefix is not None:
        check_topic(prefix)
    if mark is not None and not isinstance(mark, str):
        raise ArgumentError(f"mark must be the name of a field, not {type(mark).__name__}")
    reading = ReadRows()
    events = read_events(source, start=start, end=end, topics=topics, reading=reading)
    stop = threading.Event() if stop is None else stop
    delivered = refused = 0
    first = last = None
    begun = clock.now()
    with contextlib.closing(events):
        for event in events:
            if speed is not None and first is not None:
                due = begun + (event.time - first) / timedelta(seconds=1) / speed
                while not stop.is_set() and (left := due - clock.now()) > 0:
                    clock.wait(stop, left)
            if stop.is_set():
                break
            data = event.data
            if mark is not None:
                data[mark] = {"time": event.time, "recorder": event.recorder, "sequence": event.sequence}
            topic = event.topic if prefix is None else f"{prefix}/{event.topic}"
            try:
                bus.deliver_untyped(topic, data, principal=principal)
            except InvalidEventError as error:
                refused += 1
                logger.warning("event %d of %s is left out: %s", event.sequence, event.recorder, error)
                continue
            if first is None:
                first, begun = event.time, clock.now()
            last = event.time
            delivered += 1
            if delivered % _BURST == 0:
                _wait(bus.flush(), stop)
    _wait(bus.flush(), stop)
    return Replayed(delivered, reading.duplicates, reading.unreadable, refused, first, last, stop.is_set())


def _wait(promise: Promise[Any], stop: threading.Event) -> None:
    while not (promise.done() or stop.is_set()):
        with contextlib.suppress(DeadlineError):
            promise.result(_STEP)
