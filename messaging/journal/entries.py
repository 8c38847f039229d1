"""Records on their way to the disk, and how each is told its outcome."""

from __future__ import annotations

import math
import threading
from collections import deque
from typing import TYPE_CHECKING, Final, Protocol

from messaging.execution import Flag, Promise

if TYPE_CHECKING:
    from collections.abc import Sequence

    from messaging.errors import MessagingError

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
