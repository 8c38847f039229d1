"""The errors of the data source, beside those of :mod:`messaging.errors`.

::

    MessagingError
    ├── JournalError                   the journal, or the way to it; names the option ``journalPath``
    │   ├── JournalUnreadableError     it cannot be reached, or is none
    │   ├── JournalCorruptError        what was written is not there any more as it was
    │   ├── JournalMismatchError       it is that of another query, or of other channels
    │   ├── JournalLockedError         another query is using it now
    │   ├── MicroBatchSkippedError     the sink skipped a micro-batch: no task has read its rows
    │   └── JournalFullError           there is no room for more messages
    ├── DataLossError                  offsets of the checkpoint are not to be had any more (``failOnDataLoss``)
    ├── InvalidColumnError (ValueError)  a column that messages have not, or of the wrong type
    └── InvalidRowError (ValueError)   a row that does not become a message

Wrong options are :class:`~messaging.errors.InvalidOptionError`. All of them come out of Spark as text within its own
errors (``StreamingQueryException``, ``AnalysisException``), name of the class first. URLs of journals may hold the
keys of an object store: no error shows them.
"""

from __future__ import annotations

import re
from typing import ClassVar, Final

from messaging.errors import MessagingError

#: who logs in: up to the last ``@``, since keys are often not escaped; and what a query says beside
_LOGIN: Final = re.compile(r"(?<=://)[^\n]*@")
_SECRET: Final = re.compile(r"([?&][^=&\s]*(?:pass|secret|token|key|sig)[^=&\s]*=)[^&\s'\"]*", re.IGNORECASE)


def redacted(text: str) -> str:
    """``text`` without what URLs in it keep secret."""
    return _SECRET.sub(r"\1***", _LOGIN.sub("***@", text))


class JournalError(MessagingError):
    """Something about the journal at ``journalPath``.

    Attributes:
        option: the name of the option that says where the journal is.
        path: where it is, without secrets.
    """

    option: ClassVar = "journalPath"

    def __init__(self, path: str, message: str) -> None:
        self.path = redacted(path)
        super().__init__(self.path, redacted(message))  # its arguments: it is pickled on its way from an executor

    def __str__(self) -> str:
        return "option 'journalPath' ({}): {}".format(*self.args)


class JournalUnreadableError(JournalError):
    """The journal cannot be reached, or what is there is none."""


class JournalCorruptError(JournalError):
    """What was written to the journal is not there any more as it was written."""


class JournalMismatchError(JournalError):
    """The journal is that of another query, or of other channels."""


class JournalLockedError(JournalError):
    """Another query is using the journal."""


class MicroBatchSkippedError(JournalError):
    """The sink skipped a micro-batch of a new query: no task has read its rows. The journal keeps them."""


class JournalFullError(JournalError):
    """There is no room for more messages; the broker keeps them."""


class DataLossError(MessagingError):
    """Offsets that the checkpoint asks for are not to be had any more; ``failOnDataLoss=false`` goes on without."""

    def __init__(self, message: str) -> None:
        super().__init__(redacted(message))


class InvalidColumnError(MessagingError, ValueError):
    """A column of what is to be written is unknown, missing, or of the wrong type; nothing was published.

    Attributes:
        column: its name.
    """

    def __init__(self, column: str, message: str) -> None:
        super().__init__(message)
        self.column = column


class InvalidRowError(MessagingError, ValueError):
    """A row that does not become a message; nothing of it was published. The rows of its task before it were.

    Attributes:
        row: its number among the rows of its task, from 0.
        column: which of its values is to blame.
        partition: the number of the task.
    """

    def __init__(self, row: int, column: str, problem: str, *, partition: int = 0) -> None:
        super().__init__(f"row {row} of partition {partition} (counted from 0), column {column!r}: {problem}")
        self.row = row
        self.column = column
        self.partition = partition
