"""The journal: one durable, replayable, bounded log for everything that keeps messages on disk.

::

    journal      Journal: appending records, opening cursors, trimming, closing
    views        JournalView: reading beside the writer; snapshots of the state
    commit       group commit: records of many threads in one write
    options      what a caller sets, checked
    retention    which records are kept, and what a full journal does
    ages         when records were stored
    cursors      named positions, each of which acknowledges for itself
    queue        DurableQueue: records that wait until they are settled
    table        JournalTable: a small durable map
    state        cursors, dead letters, counters and known ids, in SQLite
    database     the SQLite file: opening, sharing with readers, transactions

    segments     which offsets and bytes the files of records have
    reader       reading records in order, and skipping damage
    records      the format of a record
    quarantine   copies of damaged bytes
    verify       reading every byte, and reporting damage; sizes and offsets
    repair       restoring a damaged journal.json

    identity     journal.json, which tells what kind of journal it is
    log          the files of one partition: appending, syncing, deleting
    frames       the binary format of segments
    folders      files, and the lock of the writer

The last four also serve other kinds of journals, such as those of Spark queries; so do ``verify`` and ``repair``.
"""

from messaging.journal.commit import Append
from messaging.journal.cursors import Cursor
from messaging.journal.journal import Journal
from messaging.journal.journal import JournalReporter as JournalReporter
from messaging.journal.quarantine import DamagedRange
from messaging.journal.queue import DurableQueue as DurableQueue
from messaging.journal.records import Record
from messaging.journal.records import RecordTemplate as RecordTemplate
from messaging.journal.records import encode_message as encode_message
from messaging.journal.records import encode_record as encode_record
from messaging.journal.repair import repair as repair
from messaging.journal.state import DeadLetter
from messaging.journal.state import State as State
from messaging.journal.table import JournalTable as JournalTable
from messaging.journal.verify import Damaged, Verification, verify
from messaging.journal.verify import outline as outline
from messaging.journal.views import CursorDTO, Info, JournalDTO, JournalView

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
