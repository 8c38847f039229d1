"""Group commit: records of many threads become one frame, one write and one sync.

**Threads.** Any thread enters records. A blocking append writes on the calling thread if nothing else is being written:
one writer alone waits for nothing but the disk. Otherwise the records wait for the thread ``messaging-journal`` of the
journal, which writes everything that has gathered while it wrote the batch before. That thread also syncs at intervals
and stores lazy cursor positions. It starts with the first job and ends when the journal is closed.

**Locks.** ``_committing`` is held by the thread that writes; the front of ``waiting`` belongs to it.

**Full.** Under the policy ``block`` the records stay in ``waiting``. They are tried again when a cursor has moved, and
every 0.2 s; one whose deadline passes is refused at that time, wherever it stands. If it is the disk that has no room,
:class:`FullDisk` says so, from the first failed write until one succeeds, or room is seen while nothing waits.
"""

from __future__ import annotations

import logging
import math
import threading
from collections import deque
from collections.abc import Sequence
from typing import Final, Protocol

from messaging.errors import ClosedError, JournalError, JournalFullError, MessagingError, WouldBlockError
from messaging.execution import Flag, Promise, Waiters, clock, may_block, seconds, start_thread
from messaging.journal.ages import RecordAges
from messaging.journal.cursors import Cursors
from messaging.journal.options import Full, JournalOptions
from messaging.journal.retention import FullDisk, Retention
from messaging.journal.segments import RecordWriter

logger = logging.getLogger(__name__)

#: how long closing waits for the thread, seconds
_CLOSE_SECONDS: Final = 5.0
#: pause before a write to a full disk or journal is tried again, seconds
_RETRY: Final = 0.2
#: bytes of records in one frame, unless one record alone has more
_BATCH_BYTES: Final = 2**20
#: records in one frame
_BATCH: Final = 4096
#: callers of a batch that wake up side by side
_AT_ONCE: Final = 2
#: longest wait of a caller for its turn, seconds
_STEP: Final = 0.5


class Append(Protocol):
    """A record on its way to the disk; or several, which are stored together or not at all."""

    #: of ``encode_record``; of several records, one behind the other
    record: bytes
    #: number of records in it
    count: int
    #: when to give up waiting for room, in seconds of the monotonic clock
    deadline: float

    def note_stored(self, offset: int) -> object:
        """Succeed: the record is stored as the fsync policy says. On the committing thread; must not raise.

        Args:
            offset: of the first record; the others follow it.
        """

    def note_refused(self, error: MessagingError) -> object:
        """Fail: the record is not in the journal. On the committing thread; must not raise."""


class Turns:
    """Wakes the callers of a batch in turn: each one that wakes up wakes the next.

    The interpreter runs one thread at a time. Threads that are woken all at once would go to sleep a second time, to
    wait for it. Used by the committing thread only.
    """

    def __init__(self) -> None:
        #: of the batch whose callers are told their outcomes
        self._flags: deque[Flag] = deque()

    def add(self, flag: Flag) -> deque[Flag]:
        """Add a caller, who waits for ``flag``; return the flags of its batch, for :func:`wake_next`."""
        self._flags.append(flag)
        return self._flags

    def begin(self) -> None:
        """Wake the first callers of the batch."""
        flags, self._flags = self._flags, deque()
        for _ in range(_AT_ONCE):
            wake_next(flags)


def wake_next(flags: deque[Flag]) -> None:
    """Wake the next caller of a batch. From any thread."""
    if flags:
        try:
            flag = flags.popleft()
        except IndexError:  # another thread took the last one
            return
        flag.set()


class Blocking:
    """A record whose caller waits.

    Args:
        record, deadline: see :class:`Append`.
        turns: wakes the caller.
    """

    __slots__ = ("_batch", "_done", "_error", "_offset", "_turns", "deadline", "record")
    count = 1

    def __init__(self, record: bytes, deadline: float, turns: Turns) -> None:
        self.record = record
        self.deadline = deadline
        self._turns = turns
        self._done = Flag()
        #: set with the outcome
        self._batch: deque[Flag] | None = None
        self._offset = -1
        self._error: MessagingError | None = None

    def note_stored(self, offset: int) -> None:
        """See :class:`Append`."""
        self._offset = offset
        self._batch = self._turns.add(self._done)

    def note_refused(self, error: MessagingError) -> None:
        """See :class:`Append`."""
        self._error = error
        self._batch = self._turns.add(self._done)

    def result(self) -> int:
        """Wait for the outcome; return the offset, or raise the error."""
        try:
            # in steps: a caller that was interrupted may not have woken the next one
            while not self._done.wait(_STEP) and self._batch is None:
                pass
        finally:
            if self._batch is not None:
                wake_next(self._batch)
        if self._error is not None:
            raise self._error.with_traceback(None)
        return self._offset


class Promised:
    """A record with a promise."""

    __slots__ = ("deadline", "note_refused", "note_stored", "record")
    count = 1

    def __init__(self, record: bytes, deadline: float, promise: Promise[int]) -> None:
        self.record = record
        self.deadline = deadline
        self.note_stored = promise.resolve
        self.note_refused = promise.reject


class PendingAppends:
    """The records that wait to be written, in order. Any thread puts; one thread at a time takes.

    Attributes:
        deadline: the earliest deadline of the records, or a time before it; seconds of the monotonic clock.
    """

    def __init__(self) -> None:
        self._entries: deque[Append] = deque()
        #: guards the end of ``_entries``, and what follows
        self._lock = threading.Lock()
        #: bytes of the records that were put, and bytes of the taken records; they begin again at 0 when none waits
        self._put = self._taken = 0
        self._is_closed = False
        self.deadline = math.inf

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def bytes(self) -> int:
        """Return the bytes of the records."""
        return self._put - self._taken if self._entries else 0

    def put(self, entry: Append) -> bool:
        """Add a record at the end; return ``False`` if there will be none any more."""
        with self._lock:
            if self._is_closed:
                return False
            self._put += len(entry.record)
            self.deadline = min(self.deadline, entry.deadline)
            self._entries.append(entry)
        return True

    def remove(self, entry: Append) -> bool:
        """Remove a record that was put; return ``False`` if it was taken."""
        with self._lock:
            try:
                self._entries.remove(entry)
            except ValueError:
                return False
            self._put -= len(entry.record)
            return True

    def take(self) -> list[Append]:
        """Return the records of the next frame."""
        batch: list[Append] = []
        size = 0
        while self._entries and size < _BATCH_BYTES and len(batch) < _BATCH:
            entry = self._entries.popleft()
            size += len(entry.record)
            batch.append(entry)
        self._taken += size
        if not self._entries:
            with self._lock:
                if not self._entries:
                    self._put = self._taken = 0
                    self.deadline = min((entry.deadline for entry in batch), default=math.inf)
        return batch

    def put_back(self, entries: Sequence[Append]) -> None:
        """Return records to the front."""
        self._taken -= sum(len(entry.record) for entry in entries)
        self._entries.extendleft(reversed(entries))

    def take_late(self, now: float | None) -> list[Append]:
        """Return the records whose deadline is not after ``now``, wherever they stand; all of them for ``None``."""
        if now is not None and now < self.deadline:
            return []
        kept: list[Append] = []
        late: list[Append] = []
        with self._lock:  # a moment in which none is put
            while self._entries:
                entry = self._entries.popleft()
                (late if now is None or entry.deadline <= now else kept).append(entry)
            self._entries.extend(kept)
            self.deadline = min((entry.deadline for entry in kept), default=math.inf)
            self._taken += sum(len(entry.record) for entry in late)
        return late

    def close(self) -> None:
        """Take no more records."""
        with self._lock:
            self._is_closed = True


class GroupCommit:
    """Writes the records of all threads to one log.

    Args:
        log: the log; nothing else appends to it.
        cursors: the positions to store.
        ages: are told of each batch.
        retention: what to do when there is no room.
        disk: is told whether it has room.
        options: of the journal.

    Attributes:
        waiting: the records that wait to be written.
    """

    def __init__(
        self,
        log: RecordWriter,
        cursors: Cursors,
        ages: RecordAges,
        retention: Retention,
        disk: FullDisk,
        options: JournalOptions,
    ) -> None:
        self._log = log
        self._cursors = cursors
        self._ages = ages
        self._retention = retention
        self._fsync = options.fsync
        self._interval = options.fsync_interval
        self._timeout = options.timeout
        #: threads that wait for records, and callers of ``append``
        self._readers = Waiters()
        self._turns = Turns()
        self.waiting = PendingAppends()
        self._committing = threading.Lock()
        #: whether records wait for room, under the bounds or on the disk. Read from any thread
        self.is_blocked = False
        self._disk = disk
        #: why the waiting records were not written, and when to try again; ``None`` if there was room
        self._full: JournalFullError | None = None
        self._retry_at = 0.0
        self._wake = Flag()
        #: guards the start of the thread
        self._starting = threading.Lock()
        self._thread: threading.Thread | None = None
        #: whether the last attempt to start it did not fail
        self._can_start = True
        self._ended = Flag()
        self._is_closed = False
        #: monotonic time from which on records are not synced
        self._dirty_since: float | None = None

    # --- any thread

    def append(self, record: bytes, timeout: float | None) -> int:
        """Write ``record``, and wait until it is stored; return its offset. See :meth:`Journal.append` for errors."""
        if not may_block():
            raise WouldBlockError("Journal.append would block the event loop of this thread; `await` Journal.submit")
        self._cursors.refuse_closed()
        entry = Blocking(record, self.deadline(timeout), self._turns)
        if not self._put_now(entry):
            self.put(entry)
        return entry.result()

    def deadline(self, timeout: float | None) -> float:
        """Return when an append fails that waits for room, monotonic; ``None``: by the timeout of the journal."""
        return clock.monotonic() + seconds(self._timeout if timeout is None else timeout)

    def wait_for(self, offset: int, timeout: float) -> bool:
        """Wait until there is a record with ``offset``, for at most ``timeout`` seconds; return whether there is."""
        self._readers.wait_for(lambda: self._log.end > offset or self._is_closed, timeout)
        return self._log.end > offset

    def put(self, entry: Append) -> None:
        """Write ``entry`` soon.

        Raises:
            ClosedError: the journal is closed.
            JournalError: its thread cannot be started.
        """
        if not self.waiting.put(entry):
            raise ClosedError(f"journal {self._log.folder.shown}: closed")
        try:
            self._wake_thread()
        except RuntimeError as error:
            if self.waiting.remove(entry):  # otherwise a thread that another caller has started took it
                raise self._log.folder.error(JournalError, f"cannot write: {error}") from error

    def _put_now(self, entry: Append) -> bool:
        """Write ``entry`` on this thread if nothing else is written or waits; return whether it was taken."""
        if self.waiting or self._committing.locked():
            return False
        try:
            # `acquire(blocking=False)` would leave the lock acquired if a signal interrupts the statement
            with self._committing:
                if self.waiting or self._is_closed or not self._retention.fitting([len(entry.record)], [entry.count]):
                    return False
                return self._write([entry]) is None
        finally:
            if self.waiting:
                self.wake()

    def wake(self) -> None:
        """Have the thread of the journal look for work; if it cannot be started, with the next call."""
        try:
            self._wake_thread()
        except RuntimeError as error:
            if self._can_start:
                logger.error(
                    "journal %s: %s; retried with each append and acknowledgement", self._log.folder.shown, error
                )
            self._can_start = False
        else:
            self._can_start = True

    def _wake_thread(self) -> None:
        """Wake the thread. Raises ``RuntimeError`` if it cannot be started."""
        if not self._wake.is_set():
            if self._thread is None:
                with self._starting:
                    if self._thread is None and not self._is_closed:
                        self._thread = start_thread(self._run, "messaging-journal")
            self._wake.set()

    def note_room(self) -> None:
        """Try the waiting records again: something was acknowledged, or deleted."""
        self._retry_at = 0.0
        self.wake()

    # --- the thread of the journal

    def _run(self) -> None:
        try:
            self._work()
        finally:
            self._ended.set()

    def _work(self) -> None:
        while True:
            self._wake.wait(self._pause())
            self._wake.clear()
            try:
                with self._committing:
                    self._retention.expire()
                    if self._full is None or clock.monotonic() >= self._retry_at:
                        while self._commit():
                            pass
                    else:
                        self._refuse_late()
                    self._sync_in_time()
                    if not self.waiting:
                        self.is_blocked = False
                        self._disk.look_for_room()
            except Exception:  # a defect must not end the thread: records wait for it
                logger.exception("journal %s: failed to write; going on", self._log.folder.shown)
            if self._is_closed:
                self._fail_waiting()
                return

    def _pause(self) -> float | None:
        """Return how long the thread may wait for its next wake-up, in seconds."""
        try:
            pauses = [self._retention.pause(), self._cursors.save_in_time()]
            self._retention.trim_acknowledged(is_needed=bool(self.waiting))
        except Exception:
            logger.exception("journal %s: failed to store positions or to trim; going on", self._log.folder.shown)
            pauses = [_RETRY]
        now = clock.monotonic()
        if self.waiting:
            pauses.append(max(0.0, min(self._retry_at, self.waiting.deadline) - now) if self._full is not None else 0.0)
        elif self._disk.error is not None:
            pauses.append(_RETRY)
        if self._dirty_since is not None:
            pauses.append(max(0.0, self._dirty_since + self._interval - now))
        return min((pause for pause in pauses if pause is not None), default=None)

    def _commit(self) -> bool:
        """Write one batch; return whether another can follow at once."""
        self._full = None
        batch = self.waiting.take()
        if not batch:
            return False
        taken = len(batch)
        try:
            fitting = self._retention.fitting([len(entry.record) for entry in batch], [entry.count for entry in batch])
        except Exception:
            self.waiting.put_back(batch)
            raise
        if not fitting:
            return self._handle_full(batch, self._retention.full_error(), self._retention.full)
        within = fitting
        while True:
            self.waiting.put_back(batch[fitting:])
            batch = batch[:fitting]
            error = self._write(batch, is_whole=fitting == within)
            if error is None:
                if fitting == taken:
                    self.is_blocked = False
                return bool(self.waiting)
            if fitting == 1:
                return self._handle_full(batch, error, self._retention.full_disk, is_disk=True)
            fitting //= 2  # the disk may have room for fewer

    def _handle_full(
        self, batch: Sequence[Append], error: JournalFullError, policy: Full, *, is_disk: bool = False
    ) -> bool:
        """Apply the policy to records of which the first has no room; return whether to go on at once."""
        if self._retention.trim_acknowledged(is_needed=True):
            self.waiting.put_back(batch)
            return True
        needed = len(batch[0].record)
        if policy == "block":
            self.waiting.put_back(batch)
            self._full = error
            if is_disk:
                self._disk.note_full(error, needed)
            self.is_blocked = True  # last: who sees it finds the cause
            self._retry_at = clock.monotonic() + _RETRY
            self._refuse_late()
            return False
        if policy == "drop_oldest" and self._retention.drop_oldest(needed):
            self.waiting.put_back(batch)
            return True
        # a smaller record may still have room
        self.waiting.put_back([entry for entry in batch if len(entry.record) < needed])
        self._refuse([entry for entry in batch if len(entry.record) >= needed], error)
        return bool(self.waiting)

    def _refuse_late(self) -> None:
        """Refuse the waiting records whose deadline has passed; all of them if the journal is being closed."""
        late = self.waiting.take_late(None if self._is_closed else clock.monotonic())
        if late and self._full is not None:
            self._refuse(late, self._full)

    # --- the committing thread

    def _write(self, batch: Sequence[Append], *, is_whole: bool = True) -> JournalFullError | None:
        """Write ``batch``; return the error if the disk is full: then it was not written, and has no outcome.

        Args:
            batch: the records.
            is_whole: whether the disk has refused no larger batch just before.
        """
        sync = self._fsync == "always"
        count = sum([entry.count for entry in batch])
        try:
            first = self._log.append_frame(count, [b"".join([entry.record for entry in batch])], sync=sync)
        except JournalFullError as error:
            self._log.shrink_segments()
            return error
        except MessagingError as error:
            self._refuse(batch, error)
            return None
        except Exception as error:  # a defect, or no memory: no caller must wait for ever
            logger.exception("journal %s: failed to write %d records", self._log.folder.shown, count)
            failure = self._log.folder.error(JournalError, f"cannot write: {type(error).__name__}: {error}")
            self._refuse(batch, failure)
            return None
        if not sync and self._dirty_since is None and self._fsync == "interval":
            self._dirty_since = clock.monotonic()
            self.wake()
        offset = first
        for entry in batch:
            try:
                entry.note_stored(offset)
            except Exception:  # the others have to be told all the same
                logger.exception("journal %s: failed to report a stored record", self._log.folder.shown)
            offset += entry.count
        if is_whole and self._disk.error is not None:
            self._disk.note_room()
        self._note_batch()
        return None

    def _refuse(self, batch: Sequence[Append], error: MessagingError) -> None:
        for entry in batch:
            try:
                entry.note_refused(error)
            except Exception:
                logger.exception("journal %s: failed to report a refused record", self._log.folder.shown)
        self._note_batch()

    def _note_batch(self) -> None:
        """Wake the callers of a batch, and the readers."""
        self._ages.note_batch(self._cursors.slowest)
        self._turns.begin()
        self._readers.wake()

    def _sync_in_time(self) -> None:
        if self._dirty_since is None or clock.monotonic() < self._dirty_since + self._interval:
            return
        self._dirty_since = None
        try:
            self._log.sync(is_background=True)
        except JournalError as error:
            logger.error("%s: records of the last %g s may not survive a crash", error, self._interval)

    # --- closing

    def close(self) -> None:
        """Write what waits, for a moment, and end the thread. Idempotent. Raises ``JournalError``."""
        self._is_closed = True
        self._readers.wake()
        self.waiting.close()
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            self._wake.set()
            self._ended.wait(_CLOSE_SECONDS)
        with self._committing:
            self._fail_waiting()
            self._log.close()

    def _fail_waiting(self) -> None:
        self._disk.error, self.is_blocked = None, False
        while batch := self.waiting.take():
            self._refuse(batch, ClosedError(f"journal {self._log.folder.shown}: closed before the record was written"))

    def after_fork(self) -> None:
        """Forget the thread and the waiting records of the parent. In a forked child, which does not write."""
        self._is_closed = True
        self.waiting = PendingAppends()
        self.waiting.close()
        self._committing = threading.Lock()
        self._starting = threading.Lock()
