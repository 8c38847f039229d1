"""Records that are written together to a journal, and their outcomes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from messaging.execution import Flag

if TYPE_CHECKING:
    from messaging.errors import MessagingError


class Batch:
    """The outcomes of some records, which the thread of the journal tells, or the writing thread itself."""

    __slots__ = ("_count", "_errors", "_outcomes", "done", "first")

    def __init__(self) -> None:
        #: whether each record is stored
        self._outcomes: list[bool] = []
        self._errors: list[MessagingError] = []
        #: the number of records, once all were put
        self._count = -1
        #: offset of the first record that is stored
        self.first = -1
        self.done = Flag()

    def add(self, error: MessagingError | None) -> None:
        """Add an outcome."""
        if error is not None:
            self._errors.append(error)
        self._outcomes.append(error is None)
        if len(self._outcomes) == self._count:
            self.done.set()

    def expect(self, count: int) -> None:
        """Set the flag with the last of ``count`` outcomes."""
        self._count = count  # before the length is read: `add` looks the other way round
        if len(self._outcomes) == count:
            self.done.set()

    @property
    def stored(self) -> int:
        """The number of stored records."""
        return sum(self._outcomes)

    @property
    def error(self) -> MessagingError | None:
        """Why a record is not stored."""
        return self._errors[0] if self._errors else None


class BatchEntry:
    """One record of a batch; see ``messaging.journal.Append``.

    Args:
        record, deadline: see there.
        batch: is told the outcome.
    """

    __slots__ = ("_batch", "deadline", "record")
    count = 1

    def __init__(self, record: bytes, deadline: float, batch: Batch) -> None:
        self.record = record
        self.deadline = deadline
        self._batch = batch

    def note_stored(self, offset: int) -> None:
        """See ``Append``."""
        if self._batch.first < 0:
            self._batch.first = offset
        self._batch.add(None)

    def note_refused(self, error: MessagingError) -> None:
        """See ``Append``."""
        self._batch.add(error)
