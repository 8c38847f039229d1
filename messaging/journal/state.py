"""The small mutable state beside a log, in one SQLite database: cursors, dead letters, ids seen before.

The database is in WAL mode with ``synchronous=FULL``: when a change returns, it survives the loss of power. It has one
writer. A change takes one lock, whichever thread makes it. The schema has one version, ``PRAGMA user_version``; older
databases are migrated when they are opened, and newer ones are refused.
"""

from __future__ import annotations

import contextlib
import logging
import sqlite3
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from messaging.errors import ClosedError, JournalCorruptError, JournalError, JournalFullError, JournalUnreadableError
from messaging.journal.records import Record, decode_records

logger = logging.getLogger(__name__)

FILE: Final = "state.db"
#: one script for each version of the schema, which makes it from the one before
MIGRATIONS: Final[Sequence[str]] = (
    """
    CREATE TABLE cursors (name TEXT PRIMARY KEY, position INTEGER NOT NULL, changed REAL NOT NULL) WITHOUT ROWID;
    CREATE TABLE dead_letters (
        id INTEGER PRIMARY KEY, reason TEXT NOT NULL, at REAL NOT NULL, record_offset INTEGER NOT NULL,
        record BLOB NOT NULL
    );
    CREATE TABLE counters (name TEXT PRIMARY KEY, value INTEGER NOT NULL) WITHOUT ROWID;
    """,
    """
    CREATE TABLE seen (channel TEXT NOT NULL, message_id TEXT NOT NULL, at REAL NOT NULL,
        PRIMARY KEY (channel, message_id)) WITHOUT ROWID;
    CREATE INDEX seen_at ON seen (at);
    """,
)
_COUNT: Final = "INSERT INTO counters VALUES (?, ?) ON CONFLICT (name) DO UPDATE SET value=value+excluded.value"
#: how long a change waits for a reader in another process that holds up a checkpoint, seconds
_BUSY: Final = 5.0


class DeadLetter(NamedTuple):
    """A record that cannot be processed."""

    id: int
    reason: str
    #: seconds since the epoch
    at: float
    offset: int
    #: as :func:`~messaging.journal.records.encode_record` makes it
    record: bytes

    @property
    def stored(self) -> Record:
        """The record.

        Raises:
            ValueError: ``record`` does not hold one.
        """
        (found,) = decode_records(memoryview(self.record), self.offset)
        return found


class State:
    """The database of a journal. Thread safe.

    Args:
        folder: of the journal; must exist.
        option: the setting with the path, for errors.
        writable: whether to create and migrate it.

    Raises:
        JournalUnreadableError: the database was written by a newer version, or cannot be opened.
        JournalCorruptError: the database is damaged, and not writable; otherwise it is replaced by an empty one.
    """

    def __init__(self, folder: Path, *, option: str | None = None, writable: bool = True) -> None:
        self._path = folder / FILE
        self._shown = str(folder)
        self._option = option
        #: guards the connection
        self._lock = threading.Lock()
        self._is_closed = False
        self._connection = self._open(writable)

    def _open(self, writable: bool) -> sqlite3.Connection:
        try:
            return self._connect(writable)
        except sqlite3.DatabaseError as error:
            if not writable and not self._path.with_name(f"{FILE}-wal").exists():
                with contextlib.suppress(sqlite3.DatabaseError):
                    # a folder that this process may not write to: SQLite cannot create its files for sharing there
                    return self._connect(writable, "&immutable=1")
            is_damaged = not isinstance(error, sqlite3.OperationalError)
            if not writable or not is_damaged:
                kind = JournalCorruptError if is_damaged else JournalUnreadableError
                raise self._error(kind, "cannot open", error) from error
        # the log has all records: without cursors they are delivered again, and none is lost
        damaged = self._path.with_name(f"{FILE}.damaged-{time.time_ns()}")
        self._path.rename(damaged)
        for suffix in ("-wal", "-shm"):
            self._path.with_name(FILE + suffix).unlink(missing_ok=True)
        logger.error(
            "journal %s: %s is damaged: moved to %s; cursors begin again with the oldest record",
            self._shown, FILE, damaged.name,
        )  # fmt: skip
        try:
            return self._connect(writable)
        except sqlite3.DatabaseError as error:
            raise self._error(JournalUnreadableError, "cannot open", error) from error

    def _connect(self, writable: bool, more: str = "") -> sqlite3.Connection:
        uri = f"{self._path.as_uri()}?mode={'rwc' if writable else 'ro'}{more}"
        connection = sqlite3.connect(uri, uri=True, timeout=_BUSY, isolation_level=None, check_same_thread=False)
        try:
            version = connection.execute("PRAGMA user_version").fetchone()[0]
            if version > len(MIGRATIONS):
                text = f"{FILE} has schema version {version}, and this version of the library knows {len(MIGRATIONS)}"
                raise JournalUnreadableError(self._shown, f"{text}; use a newer one", self._option)
            if writable:
                connection.execute("PRAGMA journal_mode=WAL")
                connection.execute("PRAGMA synchronous=FULL")
                for number in range(version, len(MIGRATIONS)):
                    connection.executescript(f"BEGIN; {MIGRATIONS[number]} PRAGMA user_version={number + 1}; COMMIT;")
            connection.execute("SELECT * FROM cursors").fetchall()  # a damaged database is detected here
        except BaseException:
            connection.close()
            raise
        return connection

    def _error(self, kind: type[JournalError], what: str, error: sqlite3.Error) -> JournalError:
        # errors of the module itself have no name of SQLite
        if getattr(error, "sqlite_errorname", "") == "SQLITE_FULL":
            kind = JournalFullError
        return kind(self._shown, f"{what} {FILE}: {error}", self._option)

    @contextlib.contextmanager
    def _change(self) -> Iterator[sqlite3.Connection]:
        """A transaction, which is on the disk when the context is left."""
        with self._lock:
            connection = self._open_connection()
            try:
                connection.execute("BEGIN IMMEDIATE")
                try:
                    yield connection
                    connection.execute("COMMIT")
                except BaseException:
                    with contextlib.suppress(sqlite3.Error):
                        connection.execute("ROLLBACK")
                    raise
            except sqlite3.Error as error:
                raise self._error(JournalError, "cannot write", error) from error

    def _query(self, text: str, *values: Any) -> list[Any]:
        with self._lock:
            connection = self._open_connection()
            try:
                return connection.execute(text, values).fetchall()
            except sqlite3.Error as error:
                raise self._error(JournalError, "cannot read", error) from error

    def check(self) -> None:
        """Read the whole database. Raises ``JournalError`` if it is damaged."""
        found = [text for (text,) in self._query("PRAGMA integrity_check")]
        if found != ["ok"]:
            raise JournalCorruptError(self._shown, f"{FILE} is damaged: {'; '.join(found)[:200]}", self._option)

    # --- cursors

    def cursors(self) -> dict[str, int]:
        """Return the position of each cursor."""
        return dict(self._query("SELECT name, position FROM cursors"))

    def save_cursors(self, positions: Mapping[str, int], *, drops: Mapping[str, int] | None = None) -> None:
        """Store the positions of some cursors; on the disk when this returns.

        Args:
            positions: name -> position.
            drops: counter -> number to add to it, in the same transaction.

        Raises:
            JournalError: nothing was stored.
        """
        if not positions and not drops:
            return
        now = time.time()
        with self._change() as connection:
            connection.executemany(
                "INSERT INTO cursors VALUES (?, ?, ?) ON CONFLICT (name) DO UPDATE SET position=excluded.position, "
                "changed=excluded.changed",
                [(name, position, now) for name, position in positions.items()],
            )
            connection.executemany(_COUNT, [*(drops or {}).items()])

    def delete_cursor(self, name: str) -> None:
        """Forget a cursor. Raises ``JournalError``."""
        with self._change() as connection:
            connection.execute("DELETE FROM cursors WHERE name=?", (name,))

    # --- counters

    def count(self, name: str, number: int) -> None:
        """Add ``number`` to a counter that outlives the process. Raises ``JournalError``."""
        with self._change() as connection:
            connection.execute(_COUNT, (name, number))

    def counters(self) -> dict[str, int]:
        """Return the counters."""
        return dict(self._query("SELECT name, value FROM counters"))

    # --- dead letters

    def add_dead_letter(self, reason: str, offset: int, record: bytes, *, most: int) -> int:
        """Keep a record that cannot be processed; return how many of the oldest were deleted to keep ``most``."""
        with self._change() as connection:
            connection.execute(
                "INSERT INTO dead_letters (reason, at, record_offset, record) VALUES (?, ?, ?, ?)",
                (reason, time.time(), offset, record),
            )
            return connection.execute(
                "DELETE FROM dead_letters WHERE id <= (SELECT max(id) FROM dead_letters) - ?", (most,)
            ).rowcount

    def dead_letters(self) -> list[DeadLetter]:
        """Return the records that could not be processed, the oldest first."""
        return [DeadLetter(*row) for row in self._query("SELECT * FROM dead_letters ORDER BY id")]

    # --- ids seen before

    def add_seen(self, ids: Sequence[tuple[str, str]]) -> None:
        """Store pairs of channel and message id as seen now.

        Raises:
            JournalError: nothing was stored.
        """
        now = time.time()
        with self._change() as connection:
            connection.executemany(
                "INSERT INTO seen VALUES (?, ?, ?) ON CONFLICT DO UPDATE SET at=excluded.at",
                [(*each, now) for each in ids],
            )

    def forget_seen(self, *, oldest: float, most: int) -> None:
        """Forget the ids seen before ``oldest``, and the oldest ones over ``most``. Looks at every id.

        Raises:
            JournalError: nothing was forgotten.
        """
        with self._change() as connection:
            connection.execute("DELETE FROM seen WHERE at < ?", (oldest,))
            excess = connection.execute("SELECT count(*) FROM seen").fetchone()[0] - most
            if excess > 0:
                connection.execute(
                    "DELETE FROM seen WHERE (channel, message_id) IN "
                    "(SELECT channel, message_id FROM seen ORDER BY at LIMIT ?)",
                    (excess,),
                )

    def seen(self, *, oldest: float) -> list[tuple[str, str, float]]:
        """Return channel, message id and time of the ids seen since ``oldest``, in order of time."""
        return self._query("SELECT channel, message_id, at FROM seen WHERE at >= ? ORDER BY at", oldest)

    def _open_connection(self) -> sqlite3.Connection:
        if self._is_closed:
            raise ClosedError(f"journal {self._shown}: closed")
        return self._connection

    def close(self) -> None:
        """Close the database. Idempotent."""
        with self._lock:
            self._is_closed = True
            self._connection.close()

    def after_fork(self) -> None:
        """Leave the database to the parent process. In a forked child."""
        self._is_closed = True
        self._lock = threading.Lock()
        # SQLite must not be called with a connection of another process, not even to close it
        _inherited.append(self._connection)


#: connections of parent processes
_inherited: Final[list[sqlite3.Connection]] = []
