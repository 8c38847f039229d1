"""Records on their way to the disk, and how each is told its outcome."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from messaging.execution import Flag, Promise

if TYPE_CHECKING:
    from messaging.errors import MessagingError


class Append(Protocol):
    """A record on its way to the disk."""

    #: of ``encode_record``
    record: bytes
    #: when to give up waiting for room, in seconds of the monotonic clock
    deadline: float

    def stored(self, offset: int) -> None:
        """Succeed: the record is stored as the fsync policy says. On the committing thread; must not raise."""

    def failed(self, error: MessagingError) -> None:
        """Fail: the record is not in the journal. On the committing thread; must not raise."""


class Blocking:
    """A record whose caller waits."""

    __slots__ = ("_done", "_error", "_offset", "deadline", "record")

    def __init__(self, record: bytes, deadline: float) -> None:
        self.record = record
        self.deadline = deadline
        self._done = Flag()
        self._offset = -1
        self._error: MessagingError | None = None

    def stored(self, offset: int) -> None:
        """See :class:`Append`."""
        self._offset = offset
        self._done.set()

    def failed(self, error: MessagingError) -> None:
        """See :class:`Append`."""
        self._error = error
        self._done.set()

    def result(self) -> int:
        """Wait for the outcome; return the offset, or raise the error."""
        self._done.wait()
        if self._error is not None:
            raise self._error.with_traceback(None)
        return self._offset


class Promised:
    """A record with a promise."""

    __slots__ = ("deadline", "promise", "record")

    def __init__(self, record: bytes, deadline: float, promise: Promise[int]) -> None:
        self.record = record
        self.deadline = deadline
        self.promise = promise

    def stored(self, offset: int) -> None:
        """See :class:`Append`."""
        self.promise.resolve(offset)

    def failed(self, error: MessagingError) -> None:
        """See :class:`Append`."""
        self.promise.reject(error)
