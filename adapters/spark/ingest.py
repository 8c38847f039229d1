"""The way of messages from the broker into one partition of the journal.

Messages are taken with manual acknowledgement, gathered for as long as the disk is busy with those before, appended
to the log, and acknowledged when the disk has them. What is not in the journal is still at the broker.

**Bounds.** At most ``pending_bytes`` of payload wait here for the disk, and at most ``journal_bytes`` in the journal
for the query. Beyond that the observers of the streams wait, their buffers fill, and the broker keeps what it has.

**Deliveries made again.** A broker that was not told, or did not hear, that a message is safe delivers it again
after a loss. If the sender gave it an id, or the MQTT session does, it is known among the last rows of the journal,
and acknowledged instead of stored twice.

**Threads.** Observers run on worker threads of :mod:`messaging`; one thread for each ingest writes and acknowledges.
A lock guards the messages that wait between them; nothing is called under it. Spark's reader calls on the main thread
of a worker process: no thread here waits in a way that a signal could break, see :mod:`messaging.execution.waiting`.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import messaging
from adapters.spark.columns import Identity, batch_of, identities, identity_of
from adapters.spark.errors import JournalFullError
from adapters.spark.owner import QueueLock, taken_over
from adapters.spark.rivals import RivalWatch
from messaging import Message, MessageStream, Messaging, MessagingError
from messaging.errors import ClosedError, InvalidOptionError, SubscriptionRefusedError, TakenOverError
from messaging.execution import Flag, Waiters, start_thread

if TYPE_CHECKING:
    import pyarrow as pa

    from adapters.spark.log import LogWriter
    from messaging.connection import ConnectionState

logger = logging.getLogger(__name__)

#: rows and bytes of one write, at most; a single message may be larger
BATCH_ROWS: Final = 16_384
BATCH_BYTES: Final = 8 * 2**20
#: payload that may wait to be written, bytes
PENDING_BYTES: Final = 32 * 2**20
#: rows that a broker may have sent without knowing that they are safe, if it does not keep to our window
_MIN_TAIL: Final = 1024
#: how long stopping may take, seconds
_STOP_SECONDS: Final = 30.0
#: pauses between attempts to write to a full disk, seconds
_RETRY_FIRST, _RETRY_LAST = 0.1, 2.0


@dataclass(frozen=True, slots=True)
class Subscription:
    """One subscription of an ingest: a channel and the extensions of its context."""

    channel: str
    extensions: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Feed:
    """Where an ingest takes its messages from. Holds secrets, hence no ``repr`` of its settings."""

    url: str = field(repr=False)
    settings: Mapping[str, Any] = field(repr=False)
    subscriptions: tuple[Subscription, ...]
    #: messages the broker may send ahead of their acknowledgement
    prefetch: int
    #: bytes that may wait in the journal
    journal_bytes: int
    #: how long the first write waits for more messages, seconds; for file systems where each write is a file
    linger: float = 0.0
    deduplicate: bool = True
    #: the group of the query, for errors
    group: str = ""
    #: AMQP: the group whose exclusive queue this ingest holds, so that one query consumes the queues of the group
    guard: str | None = None
    #: MQTT: whether this ingest finds out if another query uses the session
    rivals: bool = False


class Ingest:
    """See the module. :meth:`start`, :meth:`stop`: once each, from one thread; the rest from any.

    Args:
        feed: where messages come from.
        log: where they go; appended to by this ingest alone.
    """

    def __init__(self, feed: Feed, log: LogWriter) -> None:
        self.log = log
        #: rows not stored because they were known
        self.repeated = 0
        self._feed = feed
        self._instance: Messaging | None = None
        self._streams: list[MessageStream] = []
        self._guard: QueueLock | None = None
        self._rivals: RivalWatch | None = None
        #: woken when something below changes for a thread that waits
        self._changed = Waiters()
        #: reentrant: a finalizer or a signal handler may stop the ingest at any place
        self._lock = threading.RLock()
        # guarded by the lock
        self._pending: deque[Message] = deque()
        self._pending_bytes = 0
        self._is_idle = False
        self._stopping = False
        #: what ended it
        self._ended_by: MessagingError | None = None
        #: why it cannot write for now, and since when, monotonic
        self._blocked: tuple[JournalFullError, float] | None = None
        #: when the last message came, monotonic
        self._last = 0.0
        #: while deliveries are made again: what the last rows were, the oldest first
        self._known: dict[Identity, None] | None = None
        self._has_started = False
        #: the writing thread has ended
        self._over = Flag()

    # --- from outside

    def start(self) -> None:
        """Connect and subscribe; returns when the broker has confirmed all subscriptions.

        Raises:
            MessagingError: it could not; nothing is left open.
        """
        self._instance = messaging.connect(self._feed.url, **self._feed.settings)
        try:
            start_thread(self._run, f"messaging-ingest-{self.log.partition}")
            self._has_started = True
            if self._feed.rivals:
                self._rivals = RivalWatch(self._feed.url, self._feed.settings, self._feed.group, self._fail)
            self._instance.connection_state.subscribe(self._connection_changed)
            if self._feed.guard is not None:
                self._guard = QueueLock(self._instance, self._feed.guard, self._fail, self._instance_timeout())
                self._guard.acquire()
            for subscription in self._feed.subscriptions:
                self._streams.append(self._subscribe(self._instance, subscription))
            for stream in self._streams:
                stream.ready.result(self._instance_timeout())
            self._last = time.monotonic()
        except BaseException:
            self.stop()
            raise

    def _instance_timeout(self) -> float:
        return float(self._feed.settings.get("timeout", 30.0))

    def _subscribe(self, instance: Messaging, subscription: Subscription) -> MessageStream:
        builder = instance.acknowledge_context_builder().message_context_builder().channel(subscription.channel)
        names = {feature.lower(): feature for feature in instance.features}
        for key, value in subscription.extensions.items():
            name = names.get(key.lower())
            if name is None:
                raise InvalidOptionError(
                    f"extension.{key}", f"option 'extension.{key}': {instance!r} has no such extension"
                )
            builder.extension_entry(name, value)
        stream = instance.subscription.subscribe(builder.build_context())
        stream.subscribe(self._arrived, self._ended)
        return stream

    @property
    def is_full(self) -> bool:
        """Whether the journal takes no more until something of it is committed."""
        return self.log.backlog >= self._feed.journal_bytes

    @property
    def failure(self) -> MessagingError | None:
        """What ended it, or keeps it from going on."""
        with self._lock:
            return self._ended_by or (self._blocked[0] if self._blocked is not None else None)

    def raise_failure(self, patience: float = 0.0) -> None:
        """Raise what ended the ingest, or has kept it from storing anything for ``patience`` seconds."""
        with self._lock:
            failure = self._ended_by
            if failure is None and self._blocked is not None and time.monotonic() - self._blocked[1] >= patience:
                failure = self._blocked[0]
        if failure is not None:
            raise failure.with_traceback(None)

    def wait_quiet(self, quiet: float, deadline: float) -> None:
        """Wait until nothing has come for ``quiet`` seconds and all of it is stored, or the journal is full.

        Args:
            quiet: seconds.
            deadline: monotonic; then it is left.
        """

        def is_over() -> bool:
            if self._ended_by is not None or self._blocked is not None or self.is_full:
                return True
            return self._last + quiet <= time.monotonic() and self._is_idle and not self._pending

        while not is_over() and (now := time.monotonic()) < deadline:
            rest = self._last + quiet - now
            self._changed.wait_for(is_over, min(max(rest, 0.01), deadline - now))

    def make_room(self) -> None:
        """Something was committed: go on if it was the journal that was full."""
        self._changed.wake()

    def stop(self) -> None:
        """End it. What is not in the journal stays with the broker: in the session, or in the queue."""
        self._stopping = True
        self._changed.wake()
        if self._has_started:
            self._over.wait(_STOP_SECONDS)
        self._disconnect()

    def _disconnect(self) -> None:
        for watch in (self._guard, self._rivals):
            if watch is not None:
                watch.close()
        if self._instance is not None:
            self._instance.close()

    # --- worker threads

    def _arrived(self, message: Message) -> None:
        """Take a message; waits while too much is pending."""
        while not self._put(message):
            self._changed.wait_for(lambda: self._stopping or self._pending_bytes < PENDING_BYTES)

    def _put(self, message: Message) -> bool:
        """Add a message to those that wait for the disk; ``False`` if too much is pending."""
        with self._lock:
            if self._stopping:
                return True  # the broker keeps it
            if self._pending_bytes >= PENDING_BYTES:
                return False
            self._pending.append(message)
            self._pending_bytes += len(message.payload)
            was_idle, self._is_idle = self._is_idle, False
        if was_idle:
            self._changed.wake()
        return True

    def _connection_changed(self, state: ConnectionState) -> None:
        """End when the broker has given the MQTT session to another client: reconnecting would take it back."""
        if isinstance(state.cause, TakenOverError):
            self._fail(taken_over(self._feed.group, "another query connected with the group later"))
        elif self._rivals is not None:
            self._rivals.state_changed(state)

    def _ended(self, error: Exception) -> None:
        """A stream ended: the broker refused the subscription, or took it away."""
        if not isinstance(error, MessagingError):
            error = SubscriptionRefusedError(f"the subscription ended: {type(error).__name__}")
        with self._lock:
            if self._ended_by is None and not self._stopping and not isinstance(error, ClosedError):
                self._ended_by = error
                logger.error("ingest of partition %d ended: %s", self.log.partition, error)
        self._changed.wake()

    # --- the writing thread

    def _run(self) -> None:
        try:
            self._store_all()
        finally:
            self._over.set()

    def _store_all(self) -> None:
        try:
            while (batch := self._gather()) is not None:
                self._store(batch)
        except MessagingError as error:
            self._fail(error)
        except Exception as error:  # a defect: the query has to hear of it
            logger.exception("ingest of partition %d", self.log.partition)
            self._fail(MessagingError(f"ingest of partition {self.log.partition}: {type(error).__name__}: {error}"))
        if isinstance(self._ended_by, TakenOverError):
            self._disconnect()  # the other query has the session, or the queue

    def _fail(self, error: MessagingError) -> None:
        with self._lock:
            if isinstance(error, TakenOverError) and self._stopping:
                return
            if isinstance(error, TakenOverError):
                logger.error("ingest of partition %d ends: %s", self.log.partition, error)
            self._ended_by = error
            self._stopping = True  # observers must not wait for a thread that is gone
        self._changed.wake()

    def _gather(self) -> list[Message] | None:
        """The messages of the next write; ``None`` when it is over."""
        while not self._may_write():
            self._changed.wake()
            self._changed.wait_for(lambda: self._stopping or (bool(self._pending) and not self.is_full))
        if self._stopping:
            return None
        if self._feed.linger:
            self._changed.wait_for(lambda: self._stopping or self._pending_bytes >= BATCH_BYTES, self._feed.linger)
        with self._lock:
            batch: list[Message] = []
            size = 0
            while self._pending and len(batch) < BATCH_ROWS and size < BATCH_BYTES:
                message = self._pending.popleft()
                batch.append(message)
                size += len(message.payload)
            self._pending_bytes -= size
            self._last = time.monotonic()
        self._changed.wake()
        return batch

    def _may_write(self) -> bool:
        """Return whether the writing thread goes on: there is something to write and room for it, or it is to end."""
        is_full = self.is_full
        with self._lock:
            self._is_idle = not self._stopping and not self._pending
            return self._stopping or (bool(self._pending) and not is_full)

    def _store(self, batch: list[Message]) -> None:
        fresh = self._without_known(batch) if self._feed.deduplicate else batch
        if fresh:
            rows = batch_of(fresh, self.log.partition, self.log.end, time.time_ns() // 1000)
            if not self._append(rows):
                return
        for message in batch:
            message.acknowledge()

    def _append(self, rows: pa.RecordBatch) -> bool:
        """Append, again and again while the disk is full; ``False`` if it was stopped meanwhile."""
        pause = _RETRY_FIRST
        while True:
            try:
                self.log.append(rows)
            except JournalFullError as error:
                with self._lock:
                    if self._blocked is None:
                        logger.warning("ingest of partition %d waits: %s", self.log.partition, error)
                    self._blocked = (error, time.monotonic() if self._blocked is None else self._blocked[1])
                self._changed.wake()
                if self._changed.wait_for(lambda: self._stopping, pause):
                    return False
                pause = min(pause * 2, _RETRY_LAST)
                continue
            if self._blocked is not None:
                with self._lock:
                    self._blocked = None
            return True

    def _without_known(self, batch: list[Message]) -> list[Message]:
        """``batch`` without what the journal has already."""
        if not any(message.context.extensions.get("redelivered") for message in batch):
            self._known = None  # nothing of an earlier connection comes any more
            return batch
        window = max(self._feed.prefetch, _MIN_TAIL)
        if self._known is None:
            self._known = dict.fromkeys(identities(self.log.tail(window)))
        fresh = []
        for message in batch:
            identity = identity_of(message)
            if identity is not None and identity in self._known and message.context.extensions.get("redelivered"):
                self.repeated += 1
                continue
            if identity is not None:
                self._known[identity] = None  # it may come again in the same batch, by a new connection
                if len(self._known) > 2 * window:
                    del self._known[next(iter(self._known))]
            fresh.append(message)
        return fresh


def deadline_in(seconds: float) -> float:
    """``seconds`` from now, monotonic."""
    return time.monotonic() + seconds
