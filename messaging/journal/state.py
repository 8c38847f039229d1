"""The small mutable state beside a log: cursors, counters, dead letters, ids seen before. See ``StateDatabase``."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple

from messaging.errors import JournalError
from messaging.execution import clock
from messaging.journal.database import StateDatabase
from messaging.journal.records import Record, decode_records

#: counter: records that were dropped before their slowest cursor acknowledged them, since the journal was created
DROPPED: Final = "dropped"
#: counter: microseconds that :meth:`State.seen_time` was ahead of the wall clock when the ids were opened
_SEEN_AHEAD: Final = "seen.ahead"


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


class State(StateDatabase):
    """The state of a journal. Thread safe; see ``StateDatabase`` for its arguments and errors."""

    def __init__(
        self, folder: Path, *, option: str | None = None, writable: bool = True, key: int | None = None
    ) -> None:
        super().__init__(folder, option=option, writable=writable, key=key)
        #: seconds that the time of ids is ahead of ``clock.boot``, see :meth:`open_seen`
        self._seen_base = clock.wall() - clock.boot()

    # --- cursors

    def cursors(self) -> dict[str, int]:
        """Return the position of each cursor."""
        return dict(self.query("SELECT name, position FROM cursors"))

    def passed(self) -> dict[str, bytes]:
        """Return what each cursor has acknowledged beyond its position, as it was stored."""
        return dict(self.query("SELECT name, ranges FROM passed"))

    def save_cursors(
        self,
        positions: Mapping[str, int],
        *,
        passed: Mapping[str, bytes] | None = None,
        drops: int = 0,
        patience: float | None = None,
    ) -> None:
        """Store the positions of some cursors; on the disk when this returns.

        Args:
            positions: name -> position.
            passed: name -> what the cursor has acknowledged beyond it.
            drops: records that were dropped, counted in the same transaction.
            patience: how long to wait for another program that writes, seconds; ``None``: 5.

        Raises:
            JournalError: nothing was stored.
        """
        if not positions and not drops and not self.is_alone:
            return
        now = clock.wall()
        with self.change(patience=patience) as connection:
            connection.executemany(
                "INSERT INTO cursors VALUES (?, ?, ?) ON CONFLICT (name) DO UPDATE SET position=excluded.position, "
                "changed=excluded.changed",
                [(name, position, now) for name, position in positions.items()],
            )
            connection.executemany(
                "INSERT INTO passed VALUES (?, ?) ON CONFLICT (name) DO UPDATE SET ranges=excluded.ranges",
                [*(passed or {}).items()],
            )
            if drops:
                connection.execute(
                    "INSERT INTO counters VALUES (?, ?) ON CONFLICT (name) DO UPDATE SET value=value+excluded.value",
                    (DROPPED, drops),
                )

    def delete_cursor(self, name: str) -> None:
        """Forget a cursor. Raises ``JournalError``."""
        with self.change() as connection:
            connection.execute("DELETE FROM cursors WHERE name=?", (name,))
            connection.execute("DELETE FROM passed WHERE name=?", (name,))

    # --- counters

    def counter(self, name: str) -> int:
        """Return a number that outlives the process; 0 if nothing was counted."""
        found = self.query("SELECT value FROM counters WHERE name=?", name)
        return int(found[0][0]) if found else 0

    # --- dead letters

    def count_dead_letters(self) -> int:
        """Return the number of records that could not be processed."""
        return int(self.query("SELECT count(*) FROM dead_letters")[0][0])

    def add_dead_letter(self, reason: str, offset: int, record: bytes, *, most: int) -> int:
        """Keep a record that cannot be processed; return how many of the oldest were deleted to keep ``most``."""
        with self.change() as connection:
            connection.execute(
                "INSERT INTO dead_letters (reason, at, record_offset, record) VALUES (?, ?, ?, ?)",
                (reason, clock.wall(), offset, record),
            )
            return connection.execute(
                "DELETE FROM dead_letters WHERE id <= (SELECT max(id) FROM dead_letters) - ?", (most,)
            ).rowcount

    def dead_letters(self, *, after: int = 0, most: int = -1) -> list[DeadLetter]:
        """Return the records that could not be processed, the oldest first.

        Args:
            after: only those with a larger id.
            most: number of records, at most; below 0: unlimited.
        """
        found = self.query("SELECT * FROM dead_letters WHERE id > ? ORDER BY id LIMIT ?", after, most)
        return [DeadLetter(*row) for row in found]

    def delete_dead_letters(self, ids: Sequence[int]) -> int:
        """Delete dead letters by their ids; return how many there were. Raises ``JournalError``."""
        with self.change() as connection:
            return connection.executemany("DELETE FROM dead_letters WHERE id=?", [(each,) for each in ids]).rowcount

    # --- ids seen before

    def open_seen(self) -> None:
        """Go on with the time by which the ages of ids are counted. To be called before ids are added.

        That time never goes back, so no id looks older than it is. While the wall clock is behind the newest id, time
        passes from that id on: either the clock is wrong now, or it was ahead then. An opening at which the wall clock
        has caught up with the newest id goes by the wall clock again.

        Raises:
            JournalError: the database cannot be read.
        """
        latest = self.query("SELECT max(at) FROM seen")[0][0] or 0.0
        before = self.counter(_SEEN_AHEAD)
        wall = clock.wall()
        behind = max(0.0, latest - wall)
        ahead = max(behind, before / 1e6) if behind else 0.0
        self._seen_base = wall + ahead - clock.boot()
        if (micros := int(ahead * 1e6)) != before:
            with suppress(JournalError), self.change() as connection:  # without it, ids are kept for longer
                connection.execute("REPLACE INTO counters VALUES (?, ?)", (_SEEN_AHEAD, micros))

    def seen_time(self) -> float:
        """Return the time by which the ages of ids are counted, seconds since the epoch.

        A wall clock that is set after :meth:`open_seen` does not change it, so no id is forgotten early.
        """
        return clock.boot() + self._seen_base

    def add_seen(self, ids: Sequence[tuple[str, str]]) -> None:
        """Store pairs of channel and message id as seen now, one after the other.

        Raises:
            JournalError: nothing was stored.
        """
        with self.change() as connection:
            # after the latest one, also if the clock was set back: the oldest are forgotten first
            latest = connection.execute("SELECT max(at) FROM seen").fetchone()[0]
            # nor before the wall clock: if that was set right in this run, the next run goes by it
            now = max(self.seen_time(), clock.wall(), math.nextafter(latest or 0.0, math.inf))
            rows = []
            for each in ids:
                rows.append((*each, now))
                now = math.nextafter(now, math.inf)  # ids of one time would be sorted, and forgotten, by their texts
            connection.executemany("INSERT INTO seen VALUES (?, ?, ?) ON CONFLICT DO UPDATE SET at=excluded.at", rows)

    def forget_seen(self, *, oldest: float, most: int) -> None:
        """Forget the ids seen before ``oldest``, and the oldest ones over ``most``. Looks at every id.

        Args:
            oldest: seconds since the epoch, by :meth:`seen_time`.
            most: number of ids that are kept.

        Raises:
            JournalError: nothing was forgotten.
        """
        with self.change() as connection:
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
        return self.query("SELECT channel, message_id, at FROM seen WHERE at >= ? ORDER BY at", oldest)
