"""A small durable map on a journal: registrations, positions, decisions.

Each change appends a record with the key as channel and the value as JSON; the last record of a key holds. When most
records are out of date, all entries are appended again, and the records before them are deleted. A crash at any moment
leaves records that say the same.

**Failures.** A change whose record is not stored holds in memory, also if too many records wait. Its record is appended
again with the next change of the table, and when the table is closed, so that the disk does not stay behind. If that
fails, too, closing raises the error: also of a change that its caller did not wait for.

**Threads.** Any thread may use a table. One lock guards the entries, and the records have the order of the changes. A
record that cannot be written is told of on the thread that appends another one, under the lock: it is reentrant.
"""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any, Final

from messaging.environment.signals import on_failure
from messaging.errors import ArgumentError, JournalCorruptError, JournalError, MessagingError
from messaging.errors.text import SafeLog
from messaging.execution import Closeable, Promise, refuse_in_loop, result_of
from messaging.journal.journal import Journal
from messaging.journal.options import Fsync

logger = SafeLog(__name__)

#: records beyond twice the entries from which on the journal is compacted
_SLACK: Final = 1000
_CURSOR: Final = "table"
_READ: Final = 1000
#: bytes of a key in UTF-8
_MAX_KEY: Final = 10_000
#: size from which on a file is closed: compaction deletes whole files
_SEGMENT_BYTES: Final = 2**20


class JournalTable(Closeable):
    """A map of texts to values with a form in JSON, on the local disk. Thread safe; a context manager.

    All entries are in memory as well. One object at a time uses a folder.

    Args:
        path: its folder.
        fsync, lock_timeout: see :meth:`Journal.open`.

    Raises:
        JournalError: the folder cannot be used.
    """

    def __init__(self, path: str | Path, *, fsync: Fsync = "always", lock_timeout: float = 0.0) -> None:
        self._journal = Journal.open(path, fsync=fsync, lock_timeout=lock_timeout, segment_bytes=_SEGMENT_BYTES)
        self._lock = threading.RLock()  # guards the following, and the order of the records
        #: values as JSON
        self._entries: dict[str, bytes] = {}
        #: records since the last compaction
        self._records = 0
        #: of each key whose last record is not on the disk yet, the promise that it is
        self._coming: dict[str, Promise[int]] = {}
        #: of each key whose last record was not stored, the reason
        self._failed: dict[str, MessagingError] = {}
        with on_failure(self._journal.close):
            self._cursor = self._journal.cursor(_CURSOR)
            while records := self._cursor.read(_READ, most_bytes=2**22):
                for record in records:
                    if record.payload:
                        self._entries[record.channel] = record.payload
                    else:
                        self._entries.pop(record.channel, None)
                self._records += len(records)

    # --- reading

    def get(self, key: str, default: Any = None) -> Any:
        """Return the value of a key, a new object each time; ``default`` if there is none."""
        found = self._entries.get(key)
        return default if found is None else self._parsed(key, found)

    def items(self) -> list[tuple[str, Any]]:
        """Return keys and values, the keys in the order in which they were first put."""
        with self._lock:
            found = [*self._entries.items()]
        return [(key, self._parsed(key, value)) for key, value in found]

    def keys_with(self, prefix: str) -> list[str]:
        """Return the keys that begin with a text, in the order in which they were first put."""
        with self._lock:
            return [each for each in self._entries if each.startswith(prefix)]

    def __contains__(self, key: object) -> bool:
        return key in self._entries

    def __len__(self) -> int:
        return len(self._entries)

    def _parsed(self, key: str, value: bytes) -> Any:
        try:
            return json.loads(value)
        except ValueError:
            raise JournalCorruptError(self._journal.path, f"the value of {key!r:.80} is no JSON") from None

    # --- changing

    def put(self, key: str, value: Any) -> None:
        """Set the value of a key, and wait until it is stored.

        Raises:
            ArgumentError: the key is no text of 1 to 10,000 bytes, or the value has no form in JSON.
            JournalError: it is not stored. The entry is as asked for until the table is opened again; then it is as
                before, or, if a later change or :meth:`close` could store it, as asked for.
            ClosedError: the table is closed.
            WouldBlockError: the thread runs an event loop: use :meth:`put_soon`. Nothing was done.
        """
        result_of(lambda: self.put_soon(key, value), "the disk", "use put_soon()")

    def put_soon(self, key: str, value: Any) -> Promise[int]:
        """Set the value of a key; return the promise that it is stored. Raises as :meth:`put`."""
        _check_key(key)
        try:
            data = json.dumps(value, allow_nan=False, separators=(",", ":")).encode()
        except (TypeError, ValueError, RecursionError) as error:
            raise ArgumentError(f"the value of {key!r:.80} has no form in JSON: {error}") from None
        with self._lock:
            promise = self._append(key, data)
            self._note_record()
        return self._watched(key, promise)

    def remove(self, key: str) -> bool:
        """Remove a key, and wait until that is stored; return whether there was one. Raises as :meth:`put`.

        A key whose removal was not stored is there as long as that: call it again.
        """
        if key in self._entries or key in self._failed or key in self._coming:
            refuse_in_loop("the disk", "use remove_soon()")
        promise = self.remove_soon(key)
        if promise is None:
            return False
        promise.result()
        return True

    def remove_soon(self, key: str) -> Promise[int] | None:
        """Remove a key; return the promise that it is stored, ``None`` without such a key. Raises as :meth:`put`."""
        _check_key(key)
        with self._lock:
            if key not in self._entries and key not in self._failed:
                return self._coming.get(key)
            promise = self._append(key, b"")
            self._note_record()
        return self._watched(key, promise)

    def forget(self, key: str) -> None:
        """Remove a key without waiting, where a record that stays on the disk does no harm. Raises as :meth:`put`."""
        promise = self.remove_soon(key)
        if promise is not None:
            promise.was_retrieved = True

    def _append(self, key: str, data: bytes) -> Promise[int]:
        """Make a change and append its record, then those that were not stored. With the lock. Raises as :meth:`put`.

        Args:
            key: what is changed.
            data: its value as JSON; empty: it is removed.
        """
        try:
            promise = self._journal.submit(key, data)
        except JournalError as error:  # too many records wait
            self._failed[key] = error
            self._change(key, data)
            raise
        self._change(key, data)
        self._failed.pop(key, None)
        self._coming[key] = promise
        self._append_failed()
        return promise

    def _change(self, key: str, data: bytes) -> None:
        if data:
            self._entries[key] = data
        else:
            self._entries.pop(key, None)

    def _append_failed(self) -> None:
        """Append the records again that were not stored. With the lock."""
        failed, self._failed = self._failed, {}
        for key in failed:
            try:
                promise = self._journal.submit(key, self._entries.get(key, b""))
            except MessagingError as error:  # too many records wait
                self._failed[key] = error
                continue
            promise.was_retrieved = True  # the caller of the change was told
            self._coming[key] = promise
            self._records += 1
            self._watched(key, promise)

    def _watched(self, key: str, promise: Promise[int]) -> Promise[int]:
        """Return the promise of a record, whose outcome is noted."""

        def settled() -> None:
            _, error = promise.peek()
            with self._lock:
                if self._coming.get(key) is promise:
                    del self._coming[key]
                    if error is not None:
                        self._failed[key] = error

        promise.listen(settled)
        return promise

    def _note_record(self) -> None:
        """Count a record, and compact the journal if most are out of date. With the lock."""
        self._records += 1
        if self._records <= 2 * len(self._entries) + _SLACK:
            return
        self._records = len(self._entries)
        entries = [*self._entries.items()] or [(_CURSOR, b"")]  # without entries, one record that removes nothing
        try:
            promises = [self._journal.submit(key, data) for key, data in entries]
        except JournalError:  # too many records wait
            return  # the older records hold; the next compaction tries again
        promises[-1].listen(lambda: self._trim(promises))

    def _trim(self, promises: list[Promise[int]]) -> None:
        """Delete the records before the entries that were appended again. On the thread of the journal, or the loop."""
        errors = [each.exception(0) for each in promises]
        if any(error is not None for error in errors):
            return  # the older records hold; the next compaction tries again
        try:
            self._cursor.commit(promises[0].result(0), wait=False)
        except MessagingError as error:
            logger.warning(
                "journal table %s: compaction failed: %s; it is tried again later", self._journal.path, error
            )

    # --- closing

    def close(self) -> None:
        """Append the records again that were not stored, and close the journal. Idempotent.

        Raises:
            JournalError: a change is not stored; when the table is opened again, its entry is as before. Or as
                :meth:`Journal.close`. The table is closed.
        """
        with self._lock:
            self._append_failed()
        try:
            self._journal.close()  # each record has an outcome then
        finally:
            with self._lock:
                failed, self._failed = self._failed, {}
        if failed:
            cause = next(iter(failed.values()))
            kind = type(cause) if isinstance(cause, JournalError) else JournalError
            raise kind(self._journal.path, f"the last changes ({len(failed)}) are not stored: {cause.args[-1]}")


def _check_key(key: object) -> None:
    if isinstance(key, str) and key and len(key) <= _MAX_KEY:
        try:
            if len(key.encode()) <= _MAX_KEY:
                return
        except UnicodeEncodeError:
            pass
    raise ArgumentError(f"a key must be a text of 1 to {_MAX_KEY:,} bytes in UTF-8, not {key!r:.80}")
