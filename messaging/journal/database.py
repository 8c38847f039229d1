"""The SQLite database beside a log: its schema, opening it, sharing it with readers, and changes.

The database is in WAL mode with ``synchronous=FULL``: when a change returns, it survives the loss of power. It has one
writer. A change takes one lock, whichever thread makes it. The schema has one version, ``PRAGMA user_version``; older
databases are migrated when they are opened, and newer ones are refused. ``PRAGMA application_id`` is the key of the
journal: with the positions of another one its records would pass for acknowledged. Databases of earlier versions have
none, and get it from their first writer.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sqlite3
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from messaging.environment.signals import on_failure
from messaging.errors import ClosedError, JournalCorruptError, JournalError, JournalFullError, JournalUnreadableError
from messaging.execution import clock
from messaging.journal.folders import private, sync_folder

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
    """
    CREATE TABLE passed (name TEXT PRIMARY KEY, ranges BLOB NOT NULL) WITHOUT ROWID;
    """,
)
#: how long a change waits for another program that writes, seconds
_BUSY: Final = 5.0


class ForeignStateError(JournalUnreadableError):
    """The database is that of another journal."""


def move_aside(folder: Path, why: str) -> str:
    """Rename the files of a database that cannot be used, so that the next one is new; return the name of the file.

    When it returns the disk has the names: cursors of the new database must not be lost to the old one.
    """
    moved = f"{FILE}.{why}-{clock.wall_ns()}"
    for suffix in ("-shm", "-wal", ""):  # SQLite would read what is left of them into a new database
        with contextlib.suppress(FileNotFoundError):
            (folder / f"{FILE}{suffix}").rename(folder / f"{moved}{suffix}")
    sync_folder(folder)
    return moved


class StateDatabase:
    """The database of a journal. Thread safe.

    Args:
        folder: of the journal; must exist.
        option: the setting with the path, for errors.
        writable: whether to create and migrate it.
        key: of the frames of the journal; ``None``: there are none beside it.

    Attributes:
        is_alone: whether it is not shared with readers, because the disk was full when it was opened; every change,
            also an empty one, tries to share it.

    Raises:
        JournalUnreadableError: the database was written by a newer version, or cannot be opened to write.
        ForeignStateError: it is that of another journal.
        JournalError: it cannot be opened to read.
        JournalCorruptError: the database is damaged, and not writable; otherwise it is replaced by an empty one.
    """

    def __init__(
        self, folder: Path, *, option: str | None = None, writable: bool = True, key: int | None = None
    ) -> None:
        self._path = folder / FILE
        #: signed, as SQLite has it; 0 stands for none
        self._key = 0 if key is None else (key ^ 2**31) - 2**31 or 1
        self._shown = str(folder)
        self._option = option
        #: guards the connection
        self._lock = threading.Lock()
        self._is_closed = False
        self.is_alone = False
        self._connection = self._open(writable)

    def _open(self, writable: bool) -> sqlite3.Connection:
        try:
            return self._connect(writable)
        except sqlite3.DatabaseError as error:
            with contextlib.suppress(sqlite3.DatabaseError):
                is_busy = getattr(error, "sqlite_errorname", "") == "SQLITE_BUSY"
                if writable and isinstance(error, sqlite3.OperationalError) and not is_busy:
                    # a full disk has no room for the memory that SQLite shares with readers
                    return self._connect_alone(error)
                if not writable and not self._path.with_name(f"{FILE}-wal").exists():
                    # a folder that this process may not write to: SQLite cannot create its files for sharing there
                    return self._connect(writable, "&immutable=1")
            is_damaged = not isinstance(error, sqlite3.OperationalError)
            if not writable or not is_damaged:
                kind = JournalCorruptError if is_damaged else JournalUnreadableError if writable else JournalError
                raise self._error(kind, "cannot open", error) from error
        # the log has all records: without cursors they are delivered again, and none is lost
        moved = move_aside(self._path.parent, "damaged")
        logger.error(
            "journal %s: %s is damaged: moved to %s; cursors begin again with the oldest record",
            self._shown, FILE, moved,
        )  # fmt: skip
        try:
            return self._connect(writable)
        except sqlite3.DatabaseError as error:
            raise self._error(JournalUnreadableError, "cannot open", error) from error

    def _connect_alone(self, error: sqlite3.Error) -> sqlite3.Connection:
        """Connect without sharing after ``error``; the next change tries to share again."""
        connection = self._connect(True, is_alone=True)
        if not self.is_alone:
            logger.warning("journal %s: %s: %s; other processes cannot read cursors for now", self._shown, FILE, error)
        self.is_alone = True
        return connection

    def _share(self) -> None:
        """Reopen the database for readers in other processes, if that works now."""
        self._connection.close()
        try:
            self._connection = self._connect(True)
            self.is_alone = False
        except sqlite3.OperationalError as error:
            self._connection = self._connect_alone(error)

    def _connect(self, writable: bool, more: str = "", *, is_alone: bool = False) -> sqlite3.Connection:
        if writable:
            # SQLite gives its other files the mode of this one. An existing file must not be opened and closed beside
            # SQLite: that would release its locks
            with contextlib.suppress(OSError):
                os.close(private(self._path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC))
        uri = f"{self._path.as_uri()}?mode={'rwc' if writable else 'ro'}{more}"
        connection = sqlite3.connect(uri, uri=True, timeout=_BUSY, isolation_level=None, check_same_thread=False)
        with on_failure(connection.close):
            if is_alone:
                connection.execute("PRAGMA locking_mode=EXCLUSIVE")
            version = connection.execute("PRAGMA user_version").fetchone()[0]
            if version > len(MIGRATIONS):
                text = f"{FILE} has schema version {version}, and this version of the library knows {len(MIGRATIONS)}"
                raise JournalUnreadableError(self._shown, f"{text}; use a newer one", self._option)
            key = connection.execute("PRAGMA application_id").fetchone()[0]
            if key and self._key and key != self._key:
                text = (
                    f"{FILE} is that of another journal: its positions are not those of these records; put the right "
                    "one in its place. `messaging journal repair` moves it aside: cursors begin with the oldest record"
                )
                raise ForeignStateError(self._shown, text, self._option)
            if writable:
                connection.execute("PRAGMA journal_mode=WAL")
                connection.execute("PRAGMA synchronous=FULL")
                for number in range(version, len(MIGRATIONS)):
                    connection.executescript(f"BEGIN; {MIGRATIONS[number]} PRAGMA user_version={number + 1}; COMMIT;")
                if self._key and not key:
                    with contextlib.suppress(sqlite3.OperationalError):  # a full disk: the next open writes it
                        connection.execute(f"PRAGMA application_id={self._key}")
            connection.execute("SELECT * FROM cursors").fetchall()  # a damaged database is detected here
        return connection

    def _error(self, kind: type[JournalError], what: str, error: sqlite3.Error) -> JournalError:
        # errors of the module itself have no name of SQLite
        if getattr(error, "sqlite_errorname", "") == "SQLITE_FULL":
            kind = JournalFullError
        return kind(self._shown, f"{what} {FILE}: {error}", self._option)

    @contextlib.contextmanager
    def change(self, *, patience: float | None = None) -> Iterator[sqlite3.Connection]:
        """A transaction, which is on the disk when the context is left.

        Args:
            patience: how long to wait for another program that writes, seconds; ``None``: 5.

        Raises:
            JournalError: nothing was changed.
        """
        with self._lock:
            connection = self._open_connection()
            try:
                if self.is_alone:
                    self._share()
                    connection = self._connection
                _set_patience(connection, patience)
                connection.execute("BEGIN IMMEDIATE")
                with on_failure(_roll_back, connection):
                    yield connection
                    connection.execute("COMMIT")
            except sqlite3.Error as error:
                raise self._error(JournalError, "cannot write", error) from error

    def query(self, text: str, *values: Any) -> list[Any]:
        """Return the rows of a statement that changes nothing. Raises ``JournalError``."""
        with self._lock:
            connection = self._open_connection()
            try:
                _set_patience(connection, None)
                return connection.execute(text, values).fetchall()
            except sqlite3.Error as error:
                raise self._error(JournalError, "cannot read", error) from error

    def check(self) -> None:
        """Read the whole database. Raises ``JournalError`` if it is damaged."""
        found = [text for (text,) in self.query("PRAGMA integrity_check")]
        if found != ["ok"]:
            raise JournalCorruptError(self._shown, f"{FILE} is damaged: {'; '.join(found)[:200]}", self._option)

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


def _roll_back(connection: sqlite3.Connection) -> None:
    with contextlib.suppress(sqlite3.Error):
        connection.execute("ROLLBACK")


def _set_patience(connection: sqlite3.Connection, patience: float | None) -> None:
    connection.execute(f"PRAGMA busy_timeout={round(1000 * (_BUSY if patience is None else patience))}")


#: connections of parent processes
_inherited: Final[list[sqlite3.Connection]] = []
