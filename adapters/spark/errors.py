"""The errors of the data source, beside those of :mod:`messaging.errors`.

::

    MessagingError
    ├── JournalError                   the journal, or the way to it; names the option ``journalPath``
    │   ├── JournalUnreadableError     it cannot be reached, or is none
    │   ├── JournalCorruptError        what was written is not there any more as it was
    │   ├── JournalMismatchError       it is that of another query, or of other channels
    │   ├── JournalLockedError         another query is using it now
    │   └── JournalFullError           there is no room for more messages
    ├── DataLossError                  offsets of the checkpoint are not to be had any more (``failOnDataLoss``)
    └── InvalidRowError                a row that does not become a message

Wrong options are :class:`~messaging.errors.InvalidOptionError`. All of them come out of Spark as text within its own
errors (``StreamingQueryException``, ``AnalysisException``), name of the class first.
"""

from __future__ import annotations

from typing import ClassVar

from messaging.errors import MessagingError


class JournalError(MessagingError):
    """Something about the journal at ``journalPath``.

    Attributes:
        option: the name of the option that says where the journal is.
    """

    option: ClassVar = "journalPath"

    def __init__(self, path: str, message: str) -> None:
        super().__init__(f"option 'journalPath' ({path}): {message}")
        self.path = path

    def __reduce__(self) -> tuple[type, tuple[str, str]]:
        return type(self), (self.path, str(self).partition("): ")[2])


class JournalUnreadableError(JournalError):
    """The journal cannot be reached, or what is there is none."""


class JournalCorruptError(JournalError):
    """What was written to the journal is not there any more as it was written."""


class JournalMismatchError(JournalError):
    """The journal is that of another query, or of other channels."""


class JournalLockedError(JournalError):
    """Another query is using the journal."""


class JournalFullError(JournalError):
    """There is no room for more messages; the broker keeps them."""


class DataLossError(MessagingError):
    """Offsets that the checkpoint asks for are not to be had any more; ``failOnDataLoss=false`` goes on without."""


class InvalidRowError(MessagingError):
    """A row that does not become a message; nothing of it was published."""
