"""The journal: one durable, replayable, bounded log for everything that keeps messages on disk.

::

    journal      Journal: append, read, cursors
    views        JournalView: reading beside the writer of another process
    verify       reading every byte, and reporting damage; sizes and offsets; also of other kinds of journals
    identity     the file that tells what kind of journal a folder holds
    repair       restoring that file when it is damaged
    entries      records on their way to the disk
    commit       group commit: records of many threads in one write and one sync
    options      the options of a journal, checked
    retention    bounds, and what happens when there is no room
    table        a small durable map on a journal
    cursors      named positions, each of which acknowledges for itself
    queue        DurableQueue: records that wait until they are settled, in memory as far as there is room
    segments     which offsets and bytes the files have
    reader       reading records in order, and skipping damage
    records      the format of a record
    quarantine   copies of damaged bytes
    state        the small mutable state, in SQLite
    report       snapshots for metrics and health checks
    ages         when records were stored

    log          one partition: segments and offsets, also of other kinds of journals
    frames       the binary format of segments
    folders      files, and the lock of the writer

May import: ``model``, ``services``, ``execution``, ``errors``, ``environment``.
"""

from messaging.journal.cursors import Cursor as Cursor
from messaging.journal.entries import Append as Append
from messaging.journal.journal import Journal as Journal
from messaging.journal.quarantine import DamagedRange as DamagedRange
from messaging.journal.queue import DurableQueue as DurableQueue
from messaging.journal.records import Record as Record
from messaging.journal.records import RecordTemplate as RecordTemplate
from messaging.journal.records import encode_message as encode_message
from messaging.journal.records import encode_record as encode_record
from messaging.journal.repair import repair as repair
from messaging.journal.report import CursorDTO as CursorDTO
from messaging.journal.report import JournalDTO as JournalDTO
from messaging.journal.report import JournalReporter as JournalReporter
from messaging.journal.state import DeadLetter as DeadLetter
from messaging.journal.state import State as State
from messaging.journal.table import JournalTable as JournalTable
from messaging.journal.verify import Damaged as Damaged
from messaging.journal.verify import Verification as Verification
from messaging.journal.verify import outline as outline
from messaging.journal.verify import verify as verify
from messaging.journal.views import Info as Info
from messaging.journal.views import JournalView as JournalView

__all__ = [
    "Append",
    "Cursor",
    "CursorDTO",
    "Damaged",
    "DamagedRange",
    "DeadLetter",
    "Info",
    "Journal",
    "JournalDTO",
    "JournalView",
    "Record",
    "Verification",
    "verify",
]
