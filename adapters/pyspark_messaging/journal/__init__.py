"""The journal: messages that were received and are not processed yet, in a folder that outlives the query.

::

    journal      the open journal: which source and which query it belongs to
    log          one partition: append, read, commit; the spans of tasks
    folders      file systems: local disk, object stores

Segments, frames and offsets are those of :mod:`messaging.journal`.
"""

from __future__ import annotations as annotations

from pyspark_messaging.journal.journal import JournalSource as JournalSource
from pyspark_messaging.journal.journal import Meta as Meta
from pyspark_messaging.journal.journal import RowJournal as RowJournal
from pyspark_messaging.journal.journal import leave_mark as leave_mark
