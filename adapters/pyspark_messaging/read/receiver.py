"""A receiver: it writes the messages of a connection to one partition of the journal.

Messages are received with manual acknowledgement, collected while the disk is busy with earlier ones, appended to the
log, and acknowledged when the disk has them. The broker keeps every message that is not in the journal.

**Bounds.** At most ``PENDING_BYTES`` of payload wait here for the disk, and at most ``journal_bytes`` wait in the
journal for the query. A write that has no room, there or on the disk, is tried with fewer messages. Beyond that the
observers of the streams block, their buffers fill, and the broker keeps the rest.

**Redeliveries.** A broker that did not get an acknowledgement delivers the message again after a connection loss. If
the sender gave it an id, or the MQTT session a packet identifier, it is found among the last rows of the journal, and
acknowledged instead of stored twice.

**Threads.** Observers run on worker threads of :mod:`messaging`; one thread for each receiver writes and acknowledges.
A lock guards the messages that wait between them; nothing is called under it. Spark's reader calls on the main thread
of a worker process: no thread here waits in a way that a signal could break, see :mod:`messaging.execution.waiting`.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Mapping
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, Final

import messaging
from messaging import Message, MessageStream, Messaging, MessagingError
from messaging.connection import ConnectionState
from messaging.environment.signals import on_failure
from messaging.errors import ClosedError, SubscriptionRefusedError, TakenOverError
from messaging.execution import Flag, Waiters, start_thread
from pyspark_messaging.columns import Identity, batch_of, identities, identity_of
from pyspark_messaging.errors import JournalFullError, invalid_option
from pyspark_messaging.journal.log import SEGMENT_BYTES, RowLogWriter
from pyspark_messaging.options import Broker, ReadOptions
from pyspark_messaging.read.group import connection_settings, subscriptions
from pyspark_messaging.read.group_lock import QueueLock, TakeoverWatch, taken_over

if TYPE_CHECKING:
    import pyarrow as pa


logger = logging.getLogger(__name__)

#: rows and bytes of one write, at most; a single message may be larger
BATCH_ROWS: Final = 16_384
BATCH_BYTES: Final = 8 * 2**20
#: bytes of payload that may wait to be written
PENDING_BYTES: Final = 32 * 2**20
#: rows at the end of the journal that are compared with redeliveries, at least: a broker may exceed our window
_MIN_TAIL: Final = 1024
#: how long stopping may take, in seconds
_STOP_SECONDS: Final = 30.0
#: how long the first message waits for others where each write is a file, in seconds
_LINGER: Final = 0.5
#: pauses between attempts to write to a full disk, in seconds
_RETRY_FIRST, _RETRY_LAST = 0.1, 2.0


def segment_share(options: ReadOptions) -> int:
    """Return the bytes that a partition may have on the disk beyond its part of ``journalBytes``, in one segment.

    A segment is closed when half of that is left, and a write has at most the other half.
    """
    return max(1, min(SEGMENT_BYTES, options.journal_bytes // options.receivers // 4))


def write_bytes(options: ReadOptions) -> int:
    """Return the bytes of one write of a partition; a single message may be larger."""
    return min(BATCH_BYTES, segment_share(options) // 2)


class Receiver:
    """Receives messages and stores them, see the module. Call :meth:`start` and :meth:`stop` once, from one thread.

    The receiver has the number of its partition, and appends to its ``log`` alone.

    Raises:
        InvalidOptionError: ``passwordFile`` cannot be read, or an option is given that the query sets itself.
    """

    def __init__(self, options: ReadOptions, group: str, log: RowLogWriter) -> None:
        self.partition = log.partition
        self._log = log
        self._options = options
        self._group = group
        self._settings = connection_settings(options, group, log.partition)
        #: how long the broker may take to answer, in seconds
        self._timeout = float(self._settings.get("timeout", 30.0))
        #: bytes that may wait in the journal
        self._journal_bytes = options.journal_bytes // options.receivers
        #: bytes of one write; a single message may be larger
        self._write_bytes = write_bytes(options)
        #: payloads of one write: the rest of a row seldom has more bytes
        self._gathered_bytes = max(1, self._write_bytes // 2)
        #: whether the next message waits for room within these bytes
        self._needs_room = False
        #: how long the first message waits for others, in seconds
        self._linger = 0.0 if log.folder.appends else _LINGER
        self._instance: Messaging | None = None
        self._streams: list[MessageStream] = []
        self._queue_lock: QueueLock | None = None
        self._takeover_watch: TakeoverWatch | None = None
        #: filters redeliveries; used by the writing thread
        self.redeliveries = Redeliveries(log, max(options.prefetch, _MIN_TAIL))
        #: woken when something below changes for a thread that waits
        self._changed = Waiters()
        #: reentrant: a finalizer or a signal handler may stop the receiver at any place
        self._lock = threading.RLock()
        # guarded by the lock
        self._pending: deque[Message] = deque()
        #: bytes of the payloads in it
        self.pending_bytes = 0
        self._is_idle = False
        self._stopping = False
        #: the error that ended the receiver
        self._ended_by: MessagingError | None = None
        #: why it cannot write for now, and since when, monotonic
        self._blocked: tuple[JournalFullError, float] | None = None
        #: when the last message arrived, monotonic
        self._last = 0.0
        self._has_started = False
        #: set when the writing thread has ended
        self._over = Flag()

    # --- from outside

    def start(self) -> None:
        """Connect and subscribe; return when the broker has confirmed all subscriptions.

        Raises:
            MessagingError: it could not; nothing is left open.
        """
        broker = self._options.required_broker
        self._instance = messaging.connect(broker.url, **self._settings)
        try:
            with on_failure(self.stop):
                self._start(self._instance, broker)
        except ClosedError:
            self.raise_failure()  # what closed the streams
            raise

    def _start(self, instance: Messaging, broker: Broker) -> None:
        start_thread(self._run, f"messaging-receiver-{self.partition}")
        self._has_started = True
        is_first = self.partition == 0
        if is_first and broker.is_mqtt:
            self._takeover_watch = TakeoverWatch(broker.url, self._settings, self._group, self._fail)
        instance.connection_state.subscribe(self._connection_changed)
        # another query must not consume the queues of the group; queues of the user may be shared
        if is_first and not broker.is_mqtt and not self._options.queues:
            self._queue_lock = QueueLock(instance, self._group, self._fail, self._timeout)
            self._queue_lock.acquire()
        for channel, extensions in subscriptions(self._options, self._group):
            self._streams.append(self._subscribe(instance, channel, extensions))
        for stream in self._streams:
            stream.ready.result(self._timeout)
        self._last = time.monotonic()

    def _subscribe(self, instance: Messaging, channel: str, extensions: Mapping[str, Any]) -> MessageStream:
        builder = instance.acknowledge_context_builder().message_context_builder().channel(channel)
        names = {feature.lower(): feature for feature in instance.features}
        for key, value in extensions.items():
            name = names.get(key.lower())
            if name is None:
                raise invalid_option(f"extension.{key}", f"{instance!r} has no such extension")
            builder.extension_entry(name, value)
        stream = instance.subscription.subscribe(builder.build_context())
        stream.subscribe(self._arrived, self._stream_ended)
        return stream

    @property
    def is_full(self) -> bool:
        """Return whether the journal accepts no more rows until some are committed."""
        backlog = self._log.backlog
        return backlog >= self._journal_bytes or (self._needs_room and backlog > 0)

    @property
    def failure(self) -> MessagingError | None:
        """The error that ended the receiver, or that blocks it now."""
        with self._lock:
            return self._ended_by or (self._blocked[0] if self._blocked is not None else None)

    def raise_failure(self, patience: float = 0.0) -> None:
        """Raise the error that ended the receiver, or that has blocked it for ``patience`` seconds."""
        with self._lock:
            failure = self._ended_by
            if failure is None and self._blocked is not None and time.monotonic() - self._blocked[1] >= patience:
                failure = self._blocked[0]
        if failure is not None:
            raise failure.with_traceback(None)

    def wait_quiet(self, quiet: float, deadline: float) -> None:
        """Wait until no message has arrived for ``quiet`` seconds and all are stored, or the journal is full.

        Return at ``deadline`` (monotonic) at the latest.
        """

        def is_over() -> bool:
            if self._ended_by is not None or self._blocked is not None or self.is_full:
                return True
            return self._last + quiet <= time.monotonic() and self._is_idle and not self._pending

        while not is_over() and (now := time.monotonic()) < deadline:
            rest = self._last + quiet - now
            self._changed.wait_for(is_over, min(max(rest, 0.01), deadline - now))

    def commit(self, offset: int) -> None:
        """Delete the rows before ``offset``, and continue if the journal was full.

        Raises:
            JournalError: something cannot be deleted. The next commit tries again.
        """
        if self._options.deduplicate:
            self.redeliveries.remember(offset)
        self._log.commit(offset)
        self._needs_room = False  # the writing thread looks again
        self._changed.wake()

    def stop(self) -> None:
        """Stop receiving. The session, or the queue, keeps every message that is not in the journal."""
        self._stopping = True
        self._changed.wake()
        if self._has_started:
            self._over.wait(_STOP_SECONDS)
        self._disconnect()

    def _disconnect(self) -> None:
        for each in (self._queue_lock, self._takeover_watch):
            if each is not None:
                each.closed.set()
        if self._instance is not None:
            self._instance.close()

    # --- worker threads

    def _arrived(self, message: Message) -> None:
        """Enqueue a message for the writing thread; block while too many bytes wait."""
        while True:
            with self._lock:
                if self._stopping:
                    return  # the broker keeps it
                if self.pending_bytes < PENDING_BYTES:
                    self._pending.append(message)
                    self.pending_bytes += len(message.payload)
                    was_idle, self._is_idle = self._is_idle, False
                    break
            self._changed.wait_for(lambda: self._stopping or self.pending_bytes < PENDING_BYTES)
        if was_idle:
            self._changed.wake()

    def _connection_changed(self, state: ConnectionState) -> None:
        """End when the broker has given the MQTT session to another client: reconnecting would take it back."""
        if isinstance(state.cause, TakenOverError):
            self._fail(taken_over(self._group, "another query connected with the group later"))
        elif self._takeover_watch is not None:
            self._takeover_watch.state_changed(state)

    def _stream_ended(self, error: Exception) -> None:
        """Note that the broker refused or cancelled a subscription. Stored messages are still processed."""
        if not isinstance(error, MessagingError):
            error = SubscriptionRefusedError(f"the subscription ended: {type(error).__name__}")
        with self._lock:
            if self._ended_by is None and not self._stopping and not isinstance(error, ClosedError):
                self._ended_by = error
                logger.error("receiver of partition %d: subscription ended: %s", self.partition, error)
        self._changed.wake()

    def _fail(self, error: MessagingError) -> None:
        """End with ``error``."""
        with self._lock:
            if isinstance(error, TakenOverError):
                if self._stopping:
                    return
                logger.error("receiver of partition %d: ended: %s", self.partition, error)
            self._ended_by = error
            self._stopping = True  # observers must not wait for a writing thread that has ended
        self._changed.wake()

    # --- the writing thread

    def _run(self) -> None:
        try:
            while (batch := self._gather()) is not None:
                self._store(batch)
        except MessagingError as error:
            self._fail(error)
        except Exception as error:  # a defect: the query has to report it
            logger.exception("receiver of partition %d: failed", self.partition)
            self._fail(MessagingError(f"receiver of partition {self.partition}: {type(error).__name__}: {error}"))
        finally:
            try:
                if isinstance(self._ended_by, TakenOverError):
                    self._disconnect()  # the other query has the session, or the queue
            finally:
                self._over.set()

    def _gather(self) -> list[Message] | None:
        """Return the messages of the next write, or ``None`` when the receiver stops."""
        while not self._may_write():
            self._changed.wake()
            self._changed.wait_for(lambda: self._stopping or (bool(self._pending) and not self.is_full))
        if self._stopping:
            return None
        if self._linger:
            self._changed.wait_for(lambda: self._stopping or self.pending_bytes >= self._gathered_bytes, self._linger)
        with self._lock:
            batch: list[Message] = []
            size = 0
            while self._pending and len(batch) < BATCH_ROWS and size < self._gathered_bytes:
                message = self._pending.popleft()
                batch.append(message)
                size += len(message.payload)
            self.pending_bytes -= size
            self._last = time.monotonic()
        self._changed.wake()
        return batch

    def _may_write(self) -> bool:
        """Return whether the writing thread continues: messages wait and there is room, or the receiver stops."""
        is_full = self.is_full
        with self._lock:
            self._is_idle = not self._stopping and not self._pending
            return self._stopping or (bool(self._pending) and not is_full)

    def _store(self, batch: list[Message]) -> None:
        """Append ``batch`` in as few writes as the bounds and the disk have room for, and acknowledge each of them."""
        fresh = self.redeliveries.without_stored(batch) if self._options.deduplicate else batch
        missing = {id(message) for message in fresh}
        # this thread alone appends: the offsets stay right, however often a part is tried
        rows = batch_of(fresh, self.partition, self._log.end, time.time_ns() // 1000)
        done, stored, count = 0, 0, len(batch)
        pause = _RETRY_FIRST
        while done < len(batch):
            part = batch[done : done + count]
            new = sum(id(message) in missing for message in part)
            if self._append(rows.slice(stored, new)):
                for message in part:
                    message.acknowledge()
                done, stored, count, pause = done + len(part), stored + new, 2 * count, _RETRY_FIRST
            elif len(part) > 1:
                count = len(part) // 2  # there may be room for fewer
            else:
                self._changed.wait_for(lambda: self._stopping or self._has_room(), pause)
                if self._stopping:
                    return
                pause = min(pause * 2, _RETRY_LAST)

    def _has_room(self) -> bool:
        """Return whether a commit has made room for a message that waits for it."""
        return self._blocked is None and not self.is_full

    def _append(self, rows: pa.RecordBatch) -> bool:
        """Append rows in one write; return ``False`` if it has too many bytes, or there is no room for it now."""
        if not rows.num_rows:
            return True
        size, backlog = rows.nbytes, self._log.backlog
        if rows.num_rows > 1 and size > self._write_bytes:
            return False
        if backlog and backlog + size > self._journal_bytes:
            self._needs_room = rows.num_rows == 1
            self._changed.wake()
            return False
        try:
            self._log.append(rows)
        except JournalFullError as error:
            if rows.num_rows == 1:
                with self._lock:
                    if self._blocked is None:
                        logger.warning("receiver of partition %d: waits for room: %s", self.partition, error)
                    self._blocked = (error, time.monotonic() if self._blocked is None else self._blocked[1])
                self._changed.wake()
            return False
        if self._blocked is not None:
            with self._lock:
                self._blocked = None
        return True


class Redeliveries:
    """Finds messages that a broker delivers again although one of the last ``window`` rows has them.

    For one thread, which writes; :meth:`remember` is for any.
    """

    def __init__(self, log: RowLogWriter, window: int) -> None:
        #: messages that were not stored again
        self.dropped = 0
        self._log = log
        self._window = window
        #: while messages are redelivered: the identities of the last rows, the oldest first
        self._known: dict[Identity, None] | None = None
        # guarded by the lock
        self._lock = threading.RLock()
        #: of the last rows that may have been deleted: an offset behind some of them, and their identities
        self._deleted: deque[tuple[int, set[Identity]]] = deque()
        #: the offset before which rows are in it
        self._remembered = 0

    def remember(self, offset: int) -> None:
        """Keep the identities of the rows before ``offset``, which are about to be deleted.

        The broker may not have got the acknowledgements of rows that are processed already.
        """
        with self._lock:
            end = self._log.end
            first = max(self._log.begin, end - self._window, self._remembered)
            try:
                rows = self._log.rows(first, min(offset, end))
            except MessagingError as error:
                logger.warning("redeliveries of rows from %d to %d are not recognized: %s", first, offset, error)
                return
            self._remembered = max(self._remembered, min(offset, end))
            if rows.num_rows:
                self._deleted.append((self._remembered, {_digested(each) for each in identities(rows)}))
            while self._deleted and self._deleted[0][0] <= end - self._window:
                self._deleted.popleft()

    def _is_stored(self, identity: Identity) -> bool:
        if self._known is not None and identity in self._known:
            return True
        with self._lock:
            digested = _digested(identity)
            return any(digested in several for _, several in self._deleted)

    def without_stored(self, batch: list[Message]) -> list[Message]:
        """Return the messages of ``batch`` that the journal does not have yet."""
        if not any(message.context.extensions.get("redelivered") for message in batch):
            self._known = None  # redeliveries come first on a connection
            return batch
        if self._known is None:
            self._known = dict.fromkeys(identities(self._log.tail(self._window)))
        fresh = []
        for message in batch:
            identity = identity_of(message)
            is_again = identity is not None and message.context.extensions.get("redelivered")
            if identity is not None and is_again and self._is_stored(identity):
                self.dropped += 1
                continue
            if identity is not None:
                self._known[identity] = None  # a new connection may deliver it again within this batch
                if len(self._known) > 2 * self._window:
                    del self._known[next(iter(self._known))]
            fresh.append(message)
        return fresh


def _digested(identity: Identity) -> Identity:
    """Return ``identity`` with a digest in the place of the payload."""
    known, channel, payload = identity
    return known, channel, blake2b(payload, digest_size=16).digest()
