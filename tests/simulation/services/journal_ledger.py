"""What a journal has to hold: the records, cursors and dead letters of one run, by what the journal has answered."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from messaging.journal import DamagedRange, Journal, JournalView, Record


class Entry:
    """A record that was to be appended.

    Attributes:
        thread, number: who has appended it, and as which of its records.
        state: ``sent``: no outcome yet. ``stored``: it has an offset. ``maybe``: it had one, and its machine crashed
            before it was synced. ``unknown``: its process was killed. ``gone``: a later run has not found it. Otherwise
            the name of an error.
        offset: once it is known.
        is_synced: no crash may lose it.
        is_doomed: the sync that should have stored it failed, so no later one does.
        since: the moment of its last change of state.
    """

    __slots__ = ("is_doomed", "is_synced", "number", "offset", "since", "state", "thread")

    def __init__(self, thread: str, number: int) -> None:
        self.thread = thread
        self.number = number
        self.state = "sent"
        self.offset = -1
        self.is_synced = False
        self.is_doomed = False
        self.since = 0.0

    @property
    def is_certain(self) -> bool:
        """Return whether the journal must have it, unless it was deleted or damaged."""
        return self.state == "stored"


class Acknowledged:
    """What one cursor has acknowledged.

    Attributes:
        start: where it began.
        floor: everything before it is acknowledged.
        offsets: what is acknowledged beyond that.
        durable_floor, durable: as those, as far as it is certain that this is stored.
        earlier_floor, earlier: as those, when the present run of the journal began.
        uncertain: what earlier runs have acknowledged without telling whether that is stored.
    """

    def __init__(self, start: int) -> None:
        self.start = self.floor = self.durable_floor = self.earlier_floor = start
        self.offsets: dict[int, None] = {}
        self.durable: dict[int, None] = {}
        self.earlier: dict[int, None] = {}
        self.uncertain: dict[int, None] = {}

    def __contains__(self, offset: int) -> bool:
        return offset < self.floor or offset in self.offsets

    def begin(self, position: int) -> None:
        """Begin a run in which the cursor stands at ``position``."""
        self.floor = position
        self.offsets = {each: None for each in self.offsets if each >= position}
        self.earlier_floor, self.earlier = self.durable_floor, dict(self.durable)
        self.uncertain = {each: None for each in self.offsets if each not in self.durable}

    def acknowledge(self, offset: int) -> None:
        """Note that a record is about to be acknowledged, in any order."""
        self.offsets[offset] = None
        self.uncertain.pop(offset, None)

    def read(self, offset: int) -> None:
        """Note that the cursor reads ``offset``: if an earlier run has acknowledged it, that is not stored."""
        if offset in self.uncertain:
            del self.uncertain[offset], self.offsets[offset]

    def is_settled(self, offset: int) -> bool:
        """Return whether this run must not read ``offset``: the acknowledgement of an earlier one was stored."""
        return offset < self.earlier_floor or offset in self.earlier

    def mark(self) -> tuple[int, dict[int, None]]:
        """Return what is acknowledged now, for :meth:`saved`."""
        return self.floor, {each: None for each in self.offsets if each not in self.uncertain}

    def saved(self, mark: tuple[int, dict[int, None]]) -> None:
        """Note that what was acknowledged at a moment is on the disk."""
        self.durable_floor = max(self.durable_floor, mark[0])
        self.durable |= mark[1]


class Ledger:
    """The records, cursors and dead letters of one journal.

    Args:
        broken: reports a broken promise.
        now: returns the time.
        may_drop: whether the journal may drop records that nobody has acknowledged.
    """

    def __init__(self, broken: Callable[[str], object], now: Callable[[], float], *, may_drop: bool) -> None:
        self._broken = broken
        self._now = now
        self.may_drop = may_drop
        self.entries: dict[str, Entry] = {}
        #: certain records by offset
        self.at: dict[int, str] = {}
        self.cursors: dict[str, Acknowledged] = {}
        #: records before it may have been deleted
        self.released = 0
        #: records before it were deleted by a run whose machine has crashed: they may be there again
        self.dropped_until = 0
        #: whether any record may have been deleted: a cursor is made that may not be kept
        self.is_releasing = False
        #: dead letters by their reasons: whether they are certain to be there
        self.letters: dict[str, bool] = {}
        #: cursors that may have been made, and that may have been deleted, by calls without an outcome
        self.tried: dict[str, None] = {}
        self.removing: dict[str, None] = {}
        #: ranges of offsets whose records a fault may have damaged
        self.damaged: list[tuple[int, int]] = []

    def copy(self) -> Ledger:
        """Return a copy: what a copy of the folder has at this moment."""
        made = copy.copy(self)
        made.entries = {message: copy.copy(entry) for message, entry in self.entries.items()}
        made.at = dict(self.at)
        made.cursors = copy.deepcopy(self.cursors)
        made.letters = dict(self.letters)
        made.tried, made.removing = dict(self.tried), dict(self.removing)
        made.damaged = [*self.damaged]
        return made

    # --- what the program does

    def stored(self, message: str, offset: int, *, is_synced: bool) -> None:
        """Note that an append has returned an offset."""
        entry = self.entries[message]
        if offset in self.at:
            self._broken(f"{message} has got the offset {offset}, which {self.at[offset]} has")
        entry.state, entry.offset, entry.since, entry.is_synced = "stored", offset, self._now(), is_synced
        self.at[offset] = message

    def failed(self, message: str, error: BaseException) -> None:
        """Note that an append has failed."""
        entry = self.entries[message]
        entry.state, entry.since = type(error).__name__, self._now()

    def synced(self, messages: list[str]) -> None:
        """Note that these records are on the disk."""
        for message in messages:
            entry = self.entries[message]
            entry.is_synced = entry.is_synced or not entry.is_doomed

    def doom(self) -> None:
        """Note that a sync has failed: no later one tells what became of the records before it."""
        for entry in self.entries.values():
            entry.is_doomed = entry.is_doomed or not entry.is_synced

    def unsynced(self) -> list[str]:
        """Return the records that a crash may lose."""
        return [message for message, entry in self.entries.items() if entry.is_certain and not entry.is_synced]

    def marks(self) -> dict[str, tuple[int, dict[int, None]]]:
        """Return what all cursors have acknowledged now."""
        return {name: cursor.mark() for name, cursor in self.cursors.items()}

    def saved(self, marks: dict[str, tuple[int, dict[int, None]]]) -> None:
        """Note that what cursors had acknowledged at a moment is on the disk."""
        for name, mark in marks.items():
            if name in self.cursors:
                self.cursors[name].saved(mark)

    def release(self, offset: int) -> None:
        """Note that records before ``offset`` may be deleted from now on."""
        self.released = max(self.released, offset)

    def is_released(self, offset: int) -> bool:
        """Return whether the record at ``offset`` may have been deleted."""
        return offset < self.released or self.is_releasing or self.may_drop

    # --- faults

    def forget_state(self) -> None:
        """Note that the cursors and dead letters are those of another journal, and begin anew in a repair."""
        self.cursors.clear()
        self.letters.clear()
        self.tried.clear()
        self.removing.clear()

    def died(self, *, has_crashed: bool) -> None:
        """Note that the process was killed, or its machine has crashed."""
        for _message, entry in self.entries.items():
            if entry.state == "sent":
                entry.state = "unknown"
            elif has_crashed and entry.is_certain and not entry.is_synced:
                entry.state = "maybe"
                del self.at[entry.offset]

    # --- checks

    def is_excused(self, offset: int) -> bool:
        """Return whether the record at ``offset`` may be missing though nobody has acknowledged it."""
        return any(begin <= offset < end for begin, end in self.damaged)

    def examine(self, journal: Journal) -> None:
        """Compare a journal that was opened just now with what it must have. Its records become certain."""
        found: dict[int, str] = {}
        last = -1
        for record in journal.read():
            if record.offset <= last:
                self._broken(f"offset {record.offset} comes behind {last}")
            last = record.offset
            message = self.named(record)
            if message is not None:
                found[record.offset] = message
        begin = journal.begin
        damage = journal.info().damage
        for offset, message in found.items():
            entry = self.entries[message]
            if entry.state in ("sent", "unknown", "maybe"):
                if entry.state == "maybe" and entry.offset != offset:
                    self._broken(f"{message} has come back at {offset}, and was stored at {entry.offset}")
                entry.state, entry.offset = "stored", offset
                if offset in self.at:
                    self._broken(f"{message} is at {offset}, where {self.at[offset]} was stored")
                self.at[offset] = message
        for message, entry in self.entries.items():
            if entry.state in ("unknown", "maybe"):
                entry.state, entry.since = "gone", self._now()
            elif entry.is_certain and entry.offset not in found:
                self._missing(message, entry, begin, damage)
        if self.is_releasing:
            self.is_releasing = False
            self.release(begin)
        self._check_order(found)
        self._check_letters(journal)

    def named(self, record: Record) -> str | None:
        """Return the message of a record that was read; report one that must not be there."""
        message = record.payload.rstrip(b".").decode(errors="replace")
        entry = self.entries.get(message)
        if entry is None:
            self._broken(f"at {record.offset} is a record that nobody has appended: {message[:50]!r}")
            return None
        if entry.state not in ("sent", "stored", "unknown", "maybe", "deleted"):
            self._broken(f"{message} is at {record.offset} although its append has ended with {entry.state}")
        elif entry.state in ("stored", "deleted") and entry.offset != record.offset:
            self._broken(f"{message} is at {record.offset}, and was stored at {entry.offset}")
        elif record.channel != f"c/{entry.thread}" or record.message_id != message:
            self._broken(f"{message} has the channel {record.channel!r} and the id {record.message_id!r}")
        return message

    def _missing(self, message: str, entry: Entry, begin: int, damage: list[DamagedRange]) -> None:
        if entry.offset < begin:
            if not self.is_released(entry.offset) and not self.is_excused(entry.offset):
                self._broken(f"{message} at {entry.offset} was deleted, and nobody has released it")
        elif not self.is_excused(entry.offset):
            self._broken(f"{message} was stored at {entry.offset}, and is lost: {begin} is the first, {damage}")
        elif not any(each.first <= entry.offset < each.until for each in damage):
            self._broken(f"{message} at {entry.offset} is damaged, and is not reported: {damage}")
        entry.state, entry.since = "deleted" if entry.offset < begin else "gone", self._now()
        self.at.pop(entry.offset, None)

    def _check_order(self, found: dict[int, str]) -> None:
        last: dict[str, int] = {}
        for message in found.values():
            entry = self.entries[message]
            if entry.number < last.get(entry.thread, -1):
                self._broken(f"{message} is behind number {last[entry.thread]} of its thread")
            last[entry.thread] = entry.number

    def _check_letters(self, journal: JournalView) -> None:
        there = [letter.reason for letter in journal.dead_letters()]
        for reason in there:
            if reason not in self.letters or there.count(reason) > 1:
                self._broken(f"{there.count(reason)} dead letters {reason!r}")
            self.letters[reason] = True
        for reason, is_certain in [*self.letters.items()]:
            if reason not in there:
                if is_certain:
                    self._broken(f"the dead letter {reason!r} is lost")
                del self.letters[reason]

    def between(self, first: int, until: int) -> Iterator[int]:
        """Yield the offsets of certain records from ``first`` to before ``until``, in order."""
        yield from (offset for offset in range(first, until) if offset in self.at)
