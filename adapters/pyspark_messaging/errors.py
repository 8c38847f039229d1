"""The errors of the data source, beside those of :mod:`messaging.errors`.

::

    MessagingError
    ├── JournalError                   the journal, or the way to it; names the option ``journalPath``
    │   ├── JournalMismatchError       it belongs to another query, or to other channels
    │   └── MicroBatchSkippedError     the sink skipped a micro-batch: no task has read its rows
    ├── DataLossError                  offsets of the checkpoint are lost (``failOnDataLoss``)
    ├── InvalidColumnError (ValueError)  a column that messages do not have, or of the wrong type
    └── InvalidRowError (ValueError)   a row that does not become a message

Wrong options are :class:`~messaging.errors.InvalidOptionError`. Spark reports all of them as text within its own
errors (``StreamingQueryException``, ``AnalysisException``), name of the class first. URLs of journals may hold the
keys of an object store: no error shows them.
"""

from __future__ import annotations

import contextlib
import re
from typing import Final

from messaging.errors import InvalidOptionError, MessagingError
from messaging.errors import JournalCorruptError as JournalCorruptError
from messaging.errors import JournalError as JournalError
from messaging.errors import JournalFullError as JournalFullError
from messaging.errors import JournalLockedError as JournalLockedError
from messaging.errors import JournalUnreadableError as JournalUnreadableError

#: the option with the path of the journal
OPTION: Final = "journalPath"

#: the login of a URL, up to the last ``@``, since keys are often not escaped; and secrets in its query
_LOGIN: Final = re.compile(r"(?<=://)[^\n]*@")
_SECRET: Final = re.compile(r"([?&][^=&\s]*(?:pass|secret|token|key|sig)[^=&\s]*=)[^&\s'\"]*", re.IGNORECASE)


def redacted(text: str) -> str:
    """Return ``text`` without the secrets of URLs in it."""
    return _SECRET.sub(r"\1***", _LOGIN.sub("***@", text))


def first_line(error: BaseException) -> str:
    """Return the first line of an error of Spark, without the query plan and stack traces."""
    text = ""
    with contextlib.suppress(Exception):  # PySpark asks a Java process that may have ended
        text = str(error)
    # the last line of a Python trace is the cause
    lines = [line.strip(" :") for line in text.split("== Streaming Query")[0].splitlines() if line.strip(" :")]
    lines = [line for line in lines if not line.startswith("An error occurred while calling")]
    ours = [line for line in lines if line.partition(":")[0].rpartition(".")[2].endswith("Error")]
    return (ours or lines or [type(error).__name__])[0][:500]


def invalid_option(option: str, problem: str) -> InvalidOptionError:
    """Return the error of an option with a wrong value."""
    return InvalidOptionError(option, f"option {option!r}: {problem}")


class JournalMismatchError(JournalError):
    """The journal belongs to another query, or to other channels."""


class MicroBatchSkippedError(JournalError):
    """The sink skipped a micro-batch of a new query: no task has read its rows. The journal keeps them."""


class DataLossError(MessagingError):
    """Offsets of the checkpoint are lost; ``failOnDataLoss=false`` continues without them."""

    def __init__(self, message: str) -> None:
        super().__init__(redacted(message))


class InvalidColumnError(MessagingError, ValueError):
    """A column of rows to write is unknown, missing, or of the wrong type; nothing was published.

    Attributes:
        column: the name of the column.
    """

    def __init__(self, column: str, message: str) -> None:
        super().__init__(message)
        self.column = column


class InvalidRowError(MessagingError, ValueError):
    """A row does not become a message and was not published. The rows of its task before it were.

    Attributes:
        row: the number of the row in its task, from 0.
        column: the column of the wrong value.
        partition: the number of the task.
    """

    def __init__(self, row: int, column: str, problem: str, *, partition: int = 0) -> None:
        super().__init__(f"row {row} of partition {partition} (counted from 0), column {column!r}: {problem}")
        self.row = row
        self.column = column
        self.partition = partition
