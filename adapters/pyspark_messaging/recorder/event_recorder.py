"""EventRecorder: publishes the events of a typed event bus to a channel of a broker, for an archive (157.6).

The recorder observes the monitor of the bus: publishers do not wait for it, and handlers do not notice it. An event on
the topic ``orders/placed`` goes to the channel ``events/orders/placed``.

**Bounds.** At most ``max_pending`` events wait for the broker; the recorder drops, counts and logs further events. A
dropped event has a sequence number, as has an event that the broker did not confirm in time: readers of the archive see
the gap. If the monitor drops events because the recorder's thread did not get to run, the gap has the same length, and
about the same place. A monitor does not tell which of its observers has missed an event: with several observers, a gap
may belong to another one.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Iterable
from datetime import datetime
from typing import TYPE_CHECKING, Final, Self
from uuid import uuid4

from messaging.dispatch.eventdata import filters_of
from messaging.environment.signals import on_failure
from messaging.errors import ArgumentError, ClosedError, DeadlineError
from messaging.errors.checks import check_instance
from messaging.errors.text import tolerant
from messaging.execution import AsyncCloseable, Promise, may_block, seconds, workers
from messaging.instance import Messaging
from messaging.model import check_name
from messaging.typedevent import MonitorEvent, TypedEventMonitor
from pyspark_messaging.recorder.event_publisher import EventPublisher, RecorderDTO
from pyspark_messaging.recorder.recorded_event import RecordedEvent

if TYPE_CHECKING:
    from reactivex.abc import DisposableBase

logger = logging.getLogger(__name__)

#: default of ``channel``, also for archives
CHANNEL: Final = "events"
#: default of ``max_pending``
MAX_PENDING: Final = 10_000
#: how long a recorder with ``since`` waits until the broker takes an event, in seconds
PATIENCE: Final = 30.0
#: default timeout of closing, in seconds
CLOSE_TIMEOUT: Final = 10.0
#: characters of a name
_MAX_NAME: Final = 100


class EventRecorder(AsyncCloseable):
    """Publishes the events of a bus to a broker, until it is closed. Thread safe; a context manager, also async.

    Start the archive first: until it has run once, the broker keeps no events for it. The instance may be used for
    other purposes, too; if they fill its outbox, events wait and may be dropped.

    Args:
        monitor: the monitor of the bus: ``TypedEventBus.monitor``.
        instance: the messaging instance of the broker. It is not closed with the recorder.
        channel: the first levels of the channels; the topic follows.
        topics: filter of the topics that are recorded, or several.
        name: the name of this recorder in the archive. A suffix makes it unique for each run; with ``since`` it is the
            id of the durable history, which all runs share.
        history: how many past events come first, or from which time on; see ``monitor_events`` (157.6.1).
        since: instead, the sequence or the time from which on the events of the durable history come first; see
            ``TypedEventMonitor.replay``. With ``RecorderDTO.resume`` of the run before, the events that were published
            while no recorder ran are recorded, and the unconfirmed ones. The recorder then waits for
            the broker, up to ``PATIENCE`` seconds for one event, before it drops any. The archive recognises
            events that are recorded twice: their names and sequences are those of the durable history. A missing number
            is a lost event, or an event of a topic that is not recorded. Events that the history does not number are
            those of a recorder of this run.
        principal: record only topics that it may subscribe to (157.8).
        max_pending: number of events that may wait for the broker.
        timeout: how long the broker has for one event, in seconds; by default the instance's setting ``timeout``.

    Raises:
        InvalidChannelError, InvalidTopicError, ArgumentError: an argument is wrong.
        UnsupportedFeatureError: the instance has no delivery with QoS 1.
        ClosedError: the bus or the instance is closed.
        JournalError: the durable history cannot be read; logged if that happens later.

    Example::

        with messaging.connect("mqtt://localhost") as m, EventRecorder(bus.monitor, m, topics="orders/*"):
            bus.deliver(Order(1), "orders/placed")
    """

    def __init__(
        self,
        monitor: TypedEventMonitor,
        instance: Messaging,
        channel: str = CHANNEL,
        topics: str | Iterable[str] = "*",
        *,
        name: str = "bus",
        history: int | datetime = 0,
        since: int | datetime | None = None,
        principal: str | None = None,
        max_pending: int = MAX_PENDING,
        timeout: float | None = None,
    ) -> None:
        check_instance("monitor", monitor, TypedEventMonitor)
        check_instance("instance", instance, Messaging)
        if not isinstance(max_pending, int) or isinstance(max_pending, bool) or max_pending < 1:
            raise ArgumentError(f"max_pending must be an int of at least 1, not {max_pending!r:.80}")
        if not isinstance(name, str) or not 0 < len(name) <= _MAX_NAME or not name.isprintable():
            raise ArgumentError(f"name must be a printable str of at most {_MAX_NAME} characters, not {name!r:.120}")
        self.channel = check_name(channel)
        #: the name in the archive for events that have a sequence of this run only
        self._run = f"{name}-{uuid4().hex}"
        history_id = None if since is None else monitor.history_id
        self._is_lasting = history_id is not None
        #: the name in the archive: of this run, or with ``since`` of all runs with one durable history
        self.recorder = self._run if history_id is None else f"{name}-{history_id}"
        self._filters = filters_of(topics)
        self._monitor = monitor
        self._publisher = EventPublisher(self.recorder, instance, self.channel, max_pending, timeout)
        #: reentrant: a signal handler may close the recorder at any place
        self._lock = threading.RLock()
        #: guarded by the lock
        self._closing: Promise[None] | None = None
        # --- used by the observer, which is called with one event at a time
        self._sequence = 0
        self._missed_before = monitor.missed
        self._failure: Exception | None = None
        self._patience = 0.0 if since is None else PATIENCE
        if since is None:
            events = monitor.monitor_events(history, principal=principal)
        elif history != 0:
            raise ArgumentError("history and since exclude each other: give one of them")
        else:
            events = monitor.replay(since, principal=principal)
        self._publisher.start()
        with on_failure(self._publisher.end):
            self._subscription: DisposableBase = events.subscribe(self._observed, self._observing_failed)
            if isinstance(self._failure, ClosedError):
                raise self._failure

    def get_dto(self) -> RecorderDTO:
        """Return the number of events so far, for each outcome."""
        return self._publisher.get_dto()

    # --- the observer of the monitor

    def _observed(self, event: MonitorEvent) -> None:
        """Record an event. Blocks only with ``since``: the monitor drops the events of slow observers."""
        missed = self._monitor.missed
        if skipped := missed - self._missed_before:
            self._missed_before = missed
            self._sequence += skipped
            self._publisher.count_missed(skipped)
        topic = event.topic
        if any(each.matches(topic) for each in self._filters):
            if self._is_lasting and event.sequence:
                recorder, number = self.recorder, event.sequence
            else:
                recorder = self._run
                number, self._sequence = self._sequence, self._sequence + 1
            recorded = RecordedEvent(topic, event.publication_time, recorder, number, event.event_data)
            self._publisher.put(recorded, event.sequence, self._patience)
        else:
            self._publisher.skip(event.sequence)

    def _observing_failed(self, error: Exception) -> None:
        self._failure = error
        if not isinstance(error, ClosedError):  # that one is raised to the caller of the constructor
            logger.error("%s: the monitor delivers no more events: %s: %s", self.recorder, type(error).__name__, error)

    # --- closing

    def close(self, timeout: float = CLOSE_TIMEOUT) -> None:
        """Record the events that were published before this call, and no more; idempotent.

        Waits up to ``timeout`` seconds for the broker to confirm, and logs how many events it has not confirmed by
        then. On a thread that runs an event loop it does not wait: ``await aclose()`` does.

        Raises:
            ArgumentError: ``timeout`` is no number.
        """
        closing = self._close(seconds(timeout))
        if may_block():
            closing.result()

    async def aclose(self, timeout: float = CLOSE_TIMEOUT) -> None:
        """As :meth:`close`, for event loops."""
        await self._close(seconds(timeout))

    def _close(self, timeout: float) -> Promise[None]:
        """Begin to close, on a thread of its own, which an interrupt of the calling thread does not end."""
        with self._lock:
            if self._closing is None:
                closing: Promise[None] = Promise(f"closing the recorder {self.recorder}")
                workers().submit(lambda: self._finish(closing, timeout))
                self._closing = closing
            return self._closing

    def _finish(self, closing: Promise[None], timeout: float) -> None:
        deadline = time.monotonic() + timeout
        try:
            with contextlib.suppress(DeadlineError):
                self._monitor.flush().result(timeout)
            self._subscription.dispose()
            self._publisher.end()
            if unconfirmed := self._publisher.wait_confirmed(max(0.0, deadline - time.monotonic())):
                logger.error(
                    "%s was closed before the broker confirmed %d events that it recorded", self.recorder, unconfirmed
                )
            if lost := self.get_dto().lost:
                logger.warning("%s: %d events were not recorded, or may not be", self.recorder, lost)
        finally:
            closing.resolve(None)

    def __enter__(self) -> Self:
        if self._closing is not None:
            raise ClosedError(f"the recorder {self.recorder} is closed")
        return self

    @tolerant
    def __repr__(self) -> str:
        return f"<EventRecorder {self.recorder} to {self.channel!r}, {'open' if self._closing is None else 'closed'}>"
