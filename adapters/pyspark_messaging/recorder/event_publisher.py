"""The publishing side of a recorder: a bounded queue of events, a thread that publishes them, and their outcomes."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import Counter, deque
from dataclasses import dataclass
from typing import Any, Final

from messaging.errors import ArgumentError, DeadlineError, MessagingError, OutcomeUnknownError
from messaging.execution import Promise, Waiters, start_thread
from messaging.instance import Messaging
from messaging.model import Features
from pyspark_messaging.recorder.recorded_event import RecordedEvent, dump_event

logger = logging.getLogger(__name__)

#: events that are published between two checks of confirms
_BATCH: Final = 256
#: pause between two checks whether the recorder is closed, in seconds
_STEP: Final = 0.1


@dataclass(frozen=True, slots=True)
class RecorderDTO:
    """The state of a recorder. A snapshot."""

    #: the name of the recorder in the archive
    recorder: str
    #: events that the broker has taken responsibility for
    recorded: int
    #: events that wait for the broker
    pending: int
    #: events left out since too many were pending
    crowded: int
    #: events that the broker refused, or did not take in time
    failed: int
    #: events that were sent and not confirmed in time: they may be in the archive, or not
    unknown: int
    #: events with data, or on a topic, that cannot be recorded
    unfit: int
    #: events that the monitor dropped before the recorder saw them
    missed: int
    #: sequence of the first event of the durable history that the broker has not confirmed: ``since`` of the next
    #: recorder; 0 if this one has seen no event of the history
    resume: int = 0

    @property
    def lost(self) -> int:
        """Events that are, or may be, missing in the archive."""
        return self.crowded + self.failed + self.unknown + self.unfit + self.missed


class EventPublisher:
    """Publishes the events of one recorder. :meth:`put` never blocks. Thread safe.

    Raises:
        UnsupportedFeatureError: the instance has no delivery with QoS 1.
    """

    def __init__(
        self, recorder: str, instance: Messaging, channel: str, max_pending: int, timeout: float | None
    ) -> None:
        self._recorder = recorder
        self._instance = instance
        self._channel = channel
        self._max_pending = max_pending
        self._options: dict[str, Any] = {"qos": 1}
        if timeout is not None:
            self._options["timeout"] = timeout
        builder = instance.context_builder().channel(channel)
        for key, value in self._options.items():
            builder.extension_entry(key, value)
        if Features.MESSAGE_PROPERTIES in instance.features:
            self._options["content_type"] = "application/json"
            builder.content_type("application/json")
        self._names_messages = Features.EXTENSION_MESSAGE_ID in instance.features
        instance.publisher.compile(builder.build_context())
        #: woken when something below changes for a thread that waits
        self._changed = Waiters()
        #: reentrant: a signal handler may close the recorder at any place
        self._lock = threading.RLock()
        # --- guarded by the lock
        #: each with its sequence on the bus
        self._queue: deque[tuple[RecordedEvent, int]] = deque()
        self._pending = 0
        #: number of events for each outcome, by the names of :class:`RecorderDTO`
        self._outcomes: Counter[str] = Counter()
        self._is_ending = False
        #: an event was lost, and since then none was recorded while at most half of ``max_pending`` were pending
        self._is_losing = False
        #: sequences on the bus of the events that were put and have no outcome yet, in that order
        self._sequences: dict[int, None] = {}
        #: the greatest of all sequences, and the smallest of an event that is not recorded
        self._last_sequence = 0
        self._first_lost: int | None = None
        # --- used by the publishing thread
        self._unconfirmed: deque[tuple[Promise[None], int]] = deque()

    def start(self) -> None:
        """Start the publishing thread."""
        start_thread(self._run, "messaging-recorder")

    def put(self, event: RecordedEvent, sequence: int = 0, patience: float = 0.0) -> None:
        """Enqueue an event, or drop and count it if too many are pending.

        Args:
            event: the event.
            sequence: its number on the bus; 0 if it was not recorded there.
            patience: seconds to wait for room before it is dropped.
        """
        if patience and self._pending >= self._max_pending:
            self._changed.wait_for(lambda: self._pending < self._max_pending or self._is_ending, patience)
        with self._lock:
            self._last_sequence = max(self._last_sequence, sequence)
            is_dropped = self._pending >= self._max_pending
            if is_dropped:
                self._outcomes["crowded"] += 1
                self._note_lost(sequence)
                is_first, self._is_losing = not self._is_losing, True
            else:
                self._pending += 1
                self._queue.append((event, sequence))
                if sequence:
                    self._sequences[sequence] = None
                is_first = len(self._queue) == 1
        if is_first and is_dropped:
            self._warn(f"{self._max_pending} events wait for the broker already")
        elif is_first:
            self._changed.wake()

    def skip(self, sequence: int) -> None:
        """Note an event that is not to be recorded."""
        with self._lock:
            self._last_sequence = max(self._last_sequence, sequence)

    def count_missed(self, events: int) -> None:
        """Count events that the monitor dropped."""
        with self._lock:
            self._outcomes["missed"] += events
            self._note_lost(self._last_sequence + 1)

    def _note_lost(self, sequence: int) -> None:
        if sequence and (self._first_lost is None or sequence < self._first_lost):
            self._first_lost = sequence

    def _resume(self) -> int:
        """Return the first sequence that is not recorded. Called with the lock."""
        following = self._last_sequence + 1 if self._last_sequence else 0
        candidates = [following, self._first_lost, next(iter(self._sequences), None)]
        return min(each for each in candidates if each is not None)

    def get_dto(self) -> RecorderDTO:
        """Return the number of events for each outcome."""
        with self._lock:
            counts: dict[str, Any] = {name: self._outcomes[name] for name in RecorderDTO.__slots__}
            counts |= {"recorder": self._recorder, "pending": self._pending, "resume": self._resume()}
            return RecorderDTO(**counts)

    def end(self) -> None:
        """Let the publishing thread end after the events that are enqueued."""
        self._is_ending = True
        self._changed.wake()

    def wait_confirmed(self, timeout: float) -> int:
        """Wait up to ``timeout`` seconds until no event is pending, then drop the events that were not published.

        Returns the number of events that the broker has not confirmed. The publishing thread still waits for the events
        that it has published, and counts them.
        """
        self._changed.wait_for(lambda: not self._pending, timeout)
        with self._lock:
            unconfirmed = self._pending
            self._outcomes["failed"] += len(self._queue)
            self._pending -= len(self._queue)
            self._queue.clear()
        return unconfirmed

    # --- the publishing thread

    def _run(self) -> None:
        while True:
            while not self._queue and not self._unconfirmed:
                if self._is_ending:
                    return
                self._changed.wait_for(lambda: bool(self._queue) or self._is_ending)
            with self._lock:
                batch = [self._queue.popleft() for _ in range(min(len(self._queue), _BATCH))]
            for event, sequence in batch:
                self._publish(event, sequence)
            batch.clear()
            self._take_confirms()

    def _publish(self, event: RecordedEvent, sequence: int) -> None:
        options = self._options
        if self._names_messages:
            options = {**options, "message_id": f"{event.recorder}-{event.sequence}"}
        try:
            payload = dump_event(event)
            promise = self._instance.publish(f"{self._channel}/{event.topic}", payload, **options)
        except ArgumentError as error:  # its data, or a topic or a payload that is too long for the broker
            self._settle("unfit", [sequence])
            logger.error("%s: an event on %.200r is not recorded: %s", self._recorder, event.topic, error)
        except MessagingError as error:
            self._settle_failed(error, sequence)
        except Exception:  # a defect: the other events are recorded all the same
            self._settle("unfit", [sequence])
            logger.exception("%s: an event on %.200r is not recorded", self._recorder, event.topic)
        else:
            self._unconfirmed.append((promise, sequence))

    def _take_confirms(self) -> None:
        """Count the confirms that have arrived. With nothing else to do, wait a moment for the oldest one."""
        unconfirmed = self._unconfirmed
        confirmed: list[int] = []
        while unconfirmed:
            oldest, sequence = unconfirmed[0]
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
                confirmed.append(sequence)
            else:
                self._settle_failed(error, sequence)
        if confirmed:
            self._settle("recorded", confirmed)

    def _settle_failed(self, error: MessagingError, sequence: int) -> None:
        if self._settle("unknown" if isinstance(error, OutcomeUnknownError) else "failed", [sequence]):
            self._warn(str(error))

    def _settle(self, outcome: str, sequences: list[int]) -> bool:
        """Count the outcome of pending events; return whether no event was lost shortly before."""
        with self._lock:
            self._pending -= len(sequences)
            self._outcomes[outcome] += len(sequences)
            for sequence in sequences:
                self._sequences.pop(sequence, None)
                if outcome in ("failed", "unknown"):
                    self._note_lost(sequence)
            was_losing = self._is_losing
            recovered = outcome == "recorded" and self._pending <= self._max_pending // 2
            self._is_losing = outcome in ("failed", "unknown") or (was_losing and not recovered)
        self._changed.wake()
        if was_losing and not self._is_losing:
            logger.warning("%s: events are recorded again", self._recorder)
        return not was_losing

    def _warn(self, cause: str) -> None:
        logger.warning("%s: events are not recorded: %s", self._recorder, cause)
