"""EventRecorder: what is published on a typed event bus goes to a channel of a broker, for an archive (157.6).

It watches the bus by its monitor, and so disturbs nobody: publishers do not wait for it, and handlers do not notice.
This module needs neither Spark nor the extra ``spark``.

**Channels.** An event on the topic ``orders/placed`` goes to the channel ``events/orders/placed``. Every topic is the
end of a channel: tokens of topics have none of the characters that channels do not have, and a ``$`` in the beginning,
which brokers treat in a way of their own, is not in the beginning any more. Wildcards differ: see :func:`pattern_of`.

**Bounds.** So many events may be on their way to the broker; what comes while there are more is left out, counted and
logged. Such an event has had its number, as has one that the broker did not confirm in time, so that whoever reads
the archive sees the gap. There is a gap, too, for what the monitor itself has left out since the recorder's thread did
not get to run, as long as it is, and about where it was. A monitor cannot tell which of its observers has missed an
event: with several of them, a gap may be that of another one.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from itertools import zip_longest
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Self
from uuid import uuid4

from adapters.spark.recorded import RecordedEvent, dump_event
from messaging.dispatch.topics import MULTI_LEVEL, TopicFilter, parse_filter
from messaging.errors import ArgumentError, ClosedError, DeadlineError, MessagingError, OutcomeUnknownError
from messaging.execution import Promise, Waiters, may_block, seconds, start_thread, workers
from messaging.instance import Messaging
from messaging.model import Features, check_name, overlap
from messaging.text import tolerant
from messaging.typedevent import MonitorEvent, TypedEventMonitor

if TYPE_CHECKING:
    from reactivex.abc import DisposableBase

logger = logging.getLogger(__name__)

#: the channel of an archive, unless another one is named
CHANNEL: Final = "events"
#: events on their way to the broker, unless it is told otherwise
MAX_PENDING: Final = 10_000
#: how long closing waits for the broker, unless it is told otherwise, seconds
CLOSE_TIMEOUT: Final = 10.0
#: events that are published before their confirms are looked at again
_BATCH: Final = 256
#: between two looks at whether somebody has closed it, seconds
_STEP: Final = 0.1
#: characters of a name
_NAME: Final = 100


def filters_of(topics: str | Iterable[str]) -> tuple[TopicFilter, ...]:
    """Topic filters, of which there is at least one.

    Raises:
        InvalidTopicError, NullEventError: one of them is none.
        ArgumentError: there is none.
    """
    found = tuple(parse_filter(each) for each in ([topics] if isinstance(topics, str) or topics is None else topics))
    if not found:
        raise ArgumentError("at least one topic filter is needed")
    return found


def pattern_of(channel: str, topic_filter: TopicFilter) -> str:
    """The channel pattern that has the events of all topics that a filter matches.

    ``+`` is the same in both. ``org/*`` becomes ``events/org/#``, which has the channel ``events/org`` as well, while
    the filter wants at least one more token: whoever subscribes to it gets a topic too many, and has to look.
    """
    tokens = topic_filter.tokens
    return "/".join((channel, *tokens[:-1], "#" if tokens[-1] == MULTI_LEVEL else tokens[-1]))


def patterns_of(channel: str, filters: Iterable[TopicFilter]) -> list[str]:
    """Channel patterns that have all topics which any of the filters matches, and no channel twice.

    Of filters that overlap comes one pattern that has both, and maybe more.
    """
    found: list[str] = []
    for each in filters:
        pattern = pattern_of(channel, each)
        while (other := next((other for other in found if overlap(pattern, other)), None)) is not None:
            found.remove(other)
            pattern = _cover(pattern, other)
        found.append(pattern)
    return found


def _cover(one: str, other: str) -> str:
    """A pattern that has the channels of both, which overlap."""
    levels: list[str] = []
    for mine, its in zip_longest(one.split("/"), other.split("/")):
        if mine is None or its is None or "#" in (mine, its):
            levels.append("#")
            break
        levels.append(mine if mine == its else "+")
    return "/".join(levels)


@dataclass(frozen=True, slots=True)
class RecorderDTO:
    """A recorder as it is now. A snapshot."""

    #: its name in the archive
    recorder: str
    #: events that the broker has taken responsibility for
    recorded: int
    #: that are on their way
    pending: int
    #: left out, since too many were on their way
    crowded: int
    #: not taken by the broker in time, or refused by it
    failed: int
    #: sent, and not confirmed in time: they may be in the archive, or not
    unknown: int
    #: with data, or on a topic, that cannot be recorded
    unfit: int
    #: left out by the monitor before the recorder saw them
    missed: int

    @property
    def lost(self) -> int:
        """All that are, or may be, missing in the archive."""
        return self.crowded + self.failed + self.unknown + self.unfit + self.missed


class EventRecorder:
    """Publishes what happens on a bus to a broker, until it is closed. Thread safe; a context manager, also async.

    Begin with the archive: until it has run once, the broker keeps nothing for it. The instance may be used for other
    things, too; if they fill its outbox, events wait and may be left out.

    Args:
        monitor: of the bus: ``TypedEventBus.monitor``.
        instance: the messaging instance of the broker. It is not closed with the recorder.
        channel: what channels begin with; see the module.
        topics: filter of the topics that are recorded, or several.
        name: of this recorder in the archive. A suffix makes it unique for each run.
        history: how many past events come first, or from which time on; see ``monitor_events`` (157.6.1).
        principal: only topics that it may subscribe to (157.8).
        max_pending: how many events may be on their way to the broker.
        timeout: how long the broker has for one event, seconds; by default the instance's setting ``timeout``.

    Raises:
        InvalidChannelError, InvalidTopicError, ArgumentError: one of these is not as described.
        UnsupportedFeatureError: the instance has no delivery with QoS 1.
        ClosedError: the bus or the instance is closed.

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
        principal: str | None = None,
        max_pending: int = MAX_PENDING,
        timeout: float | None = None,
    ) -> None:
        if not isinstance(monitor, TypedEventMonitor):
            raise ArgumentError(f"a TypedEventMonitor is needed, such as bus.monitor, not {type(monitor).__name__}")
        if not isinstance(instance, Messaging):
            raise ArgumentError(f"a messaging instance is needed, not {type(instance).__name__}")
        if not isinstance(max_pending, int) or isinstance(max_pending, bool) or max_pending < 1:
            raise ArgumentError(f"max_pending must be an int of at least 1, not {max_pending!r:.80}")
        if not isinstance(name, str) or not 0 < len(name) <= _NAME or not name.isprintable():
            raise ArgumentError(f"name must be a printable str of at most {_NAME} characters, not {name!r:.120}")
        self.channel = check_name(channel)
        #: its name in the archive
        self.recorder = f"{name}-{uuid4().hex}"
        self._filters = filters_of(topics)
        self._monitor = monitor
        self._instance = instance
        self._options: dict[str, Any] = {"qos": 1}
        if timeout is not None:
            self._options["timeout"] = timeout
        if Features.MESSAGE_PROPERTIES in instance.features:
            self._options["content_type"] = "application/json"
        self._names_messages = Features.EXTENSION_MESSAGE_ID in instance.features
        self._check_options()
        self._max_pending = max_pending
        #: woken when something below changes for a thread that waits
        self._changed = Waiters()
        #: reentrant: a signal handler may close the recorder at any place
        self._lock = threading.RLock()
        # --- guarded by the lock
        self._queue: deque[RecordedEvent] = deque()
        self._pending = 0
        self._recorded = self._crowded = self._failed = self._unknown = self._unfit = self._missed = 0
        self._is_ending = False
        self._closing: Promise[None] | None = None
        # --- the observer's, which is called with one event at a time
        self._sequence = 0
        self._missed_before = monitor.missed
        self._failure: Exception | None = None
        # --- the publishing thread's
        self._unconfirmed: deque[Promise[None]] = deque()
        #: an event was not recorded, and there was no time since in which others were, and not too many waited
        self._is_losing = False
        start_thread(self._run, "messaging-recorder")
        try:
            events = monitor.monitor_events(history, principal=principal)
            self._subscription: DisposableBase = events.subscribe(self._seen, self._watching_failed)
            if isinstance(self._failure, ClosedError):
                raise self._failure
        except BaseException:
            self._end()
            raise

    def _check_options(self) -> None:
        builder = self._instance.context_builder().channel(self.channel)
        for key, value in self._options.items():
            if key == "content_type":
                builder.content_type(value)
            else:
                builder.extension_entry(key, value)
        self._instance.publisher.check(builder.build_context())

    # --- any thread

    def get_dto(self) -> RecorderDTO:
        """What became of the events so far."""
        with self._lock:
            return RecorderDTO(
                self.recorder, self._recorded, self._pending, self._crowded, self._failed, self._unknown,
                self._unfit, self._missed,
            )  # fmt: skip

    def close(self, timeout: float = CLOSE_TIMEOUT) -> None:
        """Record what was published before this call, and nothing more; idempotent.

        Waits up to ``timeout`` seconds for the broker to confirm, and logs how many events it has not confirmed by
        then. On a thread that runs an event loop it does not wait: ``await aclose()`` does.

        Raises:
            ArgumentError: ``timeout`` is no number.
        """
        closing = self._close(timeout)
        if may_block():
            closing.result()

    async def aclose(self, timeout: float = CLOSE_TIMEOUT) -> None:
        """As :meth:`close`, for event loops."""
        await self._close(timeout)

    def _close(self, timeout: float) -> Promise[None]:
        """Begin to close, on a thread of its own: an interrupt of the thread that closes does not end it."""
        timeout = seconds(timeout)
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
            self._end()
            self._changed.wait_for(lambda: not self._pending, max(0.0, deadline - time.monotonic()))
            with self._lock:
                left = self._pending
                # what is with the instance is waited for still, by the thread that publishes: to be told of is enough
                self._failed += len(self._queue)
                self._pending -= len(self._queue)
                self._queue.clear()
            if left:
                logger.error(
                    "%s was closed before the broker confirmed %d events that it recorded", self.recorder, left
                )
            lost = self.get_dto().lost
            if lost:
                logger.warning("%s: %d events were not recorded, or may not be", self.recorder, lost)
        finally:
            closing.resolve(None)

    def _end(self) -> None:
        self._is_ending = True
        self._changed.wake()

    # --- delivery threads of the monitor

    def _seen(self, event: MonitorEvent) -> None:
        """An event was published. Quick, so that the monitor need not leave anything out."""
        missed = self._monitor.missed
        skipped, self._missed_before = missed - self._missed_before, missed
        self._sequence += skipped
        topic = event.topic
        is_wanted = any(each.matches(topic) for each in self._filters)
        if not is_wanted and not skipped:
            return
        is_awaited = False
        with self._lock:
            self._missed += skipped
            if not is_wanted:
                return
            recorded = RecordedEvent(topic, event.publication_time, self.recorder, self._sequence, event.event_data)
            self._sequence += 1
            if self._pending >= self._max_pending:
                self._crowded += 1
                is_first, self._is_losing = not self._is_losing, True
            else:
                is_first = False
                self._pending += 1
                self._queue.append(recorded)
                is_awaited = len(self._queue) == 1
        if is_awaited:
            self._changed.wake()
        if is_first:
            self._tell(f"{self._max_pending} events wait for the broker already")

    def _watching_failed(self, error: Exception) -> None:
        self._failure = error
        if isinstance(error, ClosedError):  # at once, to who made it
            return
        logger.error("%s does not see events any more: %s: %s", self.recorder, type(error).__name__, error)

    def _tell(self, why: str) -> None:
        logger.warning("%s: events are not recorded: %s", self.recorder, why)

    # --- the publishing thread

    def _run(self) -> None:
        while True:
            while not self._queue and not self._unconfirmed:
                if self._is_ending:
                    return
                self._changed.wait_for(lambda: bool(self._queue) or self._is_ending)
            with self._lock:
                batch = [self._queue.popleft() for _ in range(min(len(self._queue), _BATCH))]
            for event in batch:
                self._publish(event)
            batch.clear()
            self._look_at_confirms()

    def _publish(self, event: RecordedEvent) -> None:
        options = self._options
        if self._names_messages:
            options = {**options, "message_id": f"{event.recorder}-{event.sequence}"}
        try:
            payload = dump_event(event)
            promise = self._instance.publish(f"{self.channel}/{event.topic}", payload, **options)
        except ArgumentError as error:  # its data, or a topic or a payload that is too long for the broker
            self._settle(unfit=1)
            logger.error("%s: an event on %.200r is not recorded: %s", self.recorder, event.topic, error)
        except MessagingError as error:
            self._settle_failed(error)
        except Exception:  # a defect: the others are recorded all the same
            self._settle(unfit=1)
            logger.exception("%s: an event on %.200r is not recorded", self.recorder, event.topic)
        else:
            self._unconfirmed.append(promise)

    def _look_at_confirms(self) -> None:
        """Count those that are there; if there is nothing else to do, wait for the oldest of the others."""
        unconfirmed = self._unconfirmed
        confirmed = 0
        while unconfirmed:
            oldest = unconfirmed[0]
            if not oldest.done():
                if confirmed or self._queue:
                    break
                with contextlib.suppress(DeadlineError):
                    oldest.exception(_STEP)
                if not oldest.done():
                    break
            unconfirmed.popleft()
            error = oldest.exception()
            if error is None:
                confirmed += 1
            else:
                self._settle_failed(error)
        if confirmed:
            self._settle(recorded=confirmed)

    def _settle_failed(self, error: MessagingError) -> None:
        is_first = self._settle(unknown=1) if isinstance(error, OutcomeUnknownError) else self._settle(failed=1)
        if is_first:
            self._tell(str(error))

    def _settle(self, *, recorded: int = 0, failed: int = 0, unknown: int = 0, unfit: int = 0) -> bool:
        """Events are not on their way any more; whether they are the first that are lost."""
        with self._lock:
            self._pending -= recorded + failed + unknown + unfit
            self._recorded += recorded
            self._failed += failed
            self._unknown += unknown
            self._unfit += unfit
            was_losing = self._is_losing
            is_well = recorded and self._pending <= self._max_pending // 2
            self._is_losing = bool(failed or unknown) or (was_losing and not is_well)
        self._changed.wake()
        if was_losing and not self._is_losing:
            logger.warning("%s: events are recorded again", self.recorder)
        return not was_losing

    # --- a context

    def __enter__(self) -> Self:
        self._refuse_closed()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        self._refuse_closed()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.aclose()

    def _refuse_closed(self) -> None:
        if self._closing is not None:
            raise ClosedError(f"the recorder {self.recorder} is closed")

    @tolerant
    def __repr__(self) -> str:
        return f"<EventRecorder {self.recorder} to {self.channel!r}, {'open' if self._closing is None else 'closed'}>"
