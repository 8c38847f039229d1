"""The journal alone: a process that appends, reads and acknowledges, and another one that looks on.

What is promised, and checked (``docs/journal.md``):

- each record whose append has returned is there, under its offset, until all cursors have acknowledged it or it is
  deleted by a call or a bound; after a crash of the machine those that were synced are;
- a record whose append has failed is not there; none is there twice, under two offsets, or in another order than its
  thread has appended it;
- a cursor passes no record that was not acknowledged, and reads none again whose acknowledgement is stored;
- bounds hold; an append that has no room waits for its timeout, and not for longer; dropped records are counted;
- damage costs the records of its place only, and is reported; a crash is none;
- files of another journal in its folder are refused, and nothing is changed, until they are replaced or repaired.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from messaging.errors import JournalFullError, JournalLockedError, JournalUnreadableError, MessagingError
from messaging.execution import clock
from messaging.journal import Journal, repair, verify
from tests.simulation.plans import Fault, Plan, Step
from tests.simulation.services.journal_ledger import Acknowledged, Entry, Ledger
from tests.simulation.simulation import Role, Simulation, scheduling, span
from tests.simulation.world.disk import Copy

if TYPE_CHECKING:
    import random
    from collections.abc import Callable

    from messaging.journal import Cursor, Record

FOLDER: Final = "journal"
#: of another journal, whose files get into this one
OTHER: Final = "other"
#: time that an append may take beyond its timeout, virtual seconds: threads are held up, and syncs are slow
SLACK: Final = 120.0
CURSORS: Final = ("one", "two", "three")
#: faults after which calls may fail
DISK_FAULTS: Final = frozenset({"full_disk", "failing_sync", "failing_write", "change", "remove_segment", "exchange"})


class Writer(Role):
    """The program that has the journal open to write."""

    simulation: JournalAlone

    def open(self) -> None:
        """Open the journal, and compare it with the ledger."""
        self.ledger = self.simulation.ledger
        self.options = self.simulation.plan.options
        self.threads = 0
        self.number = getattr(self, "number", 0)
        self._open()

    def _open(self) -> None:
        path = str(self.world.disk.folder / FOLDER)
        while True:
            try:
                self.journal = Journal.open(path, lock_timeout=5.0, **self.options["open"])
                break
            except JournalUnreadableError as error:
                self.note(f"cannot open: {error}")
                if not self.simulation.is_unreadable:
                    self._unexpected("open", error)
                elif not self.simulation.put_back():
                    self._repair(path)
            except MessagingError as error:
                self._unexpected("open", error)
            clock.pause(0.5)
        self.note(f"opened: {self.journal.begin} to {self.journal.end}")
        self.ledger.examine(self.journal)
        self.readers: dict[str, Cursor] = {}
        self.last: dict[str, int] = {}
        self._reopen_cursors()

    def _repair(self, path: str) -> None:
        try:
            self.note(repair(path))
            self.simulation.is_unreadable = False
        except MessagingError as error:
            self.note(f"cannot repair: {error}")

    def _reopen_cursors(self) -> None:
        known = self.journal.cursors()
        for name in known:
            if name not in self.ledger.cursors and name not in self.ledger.tried:
                self.simulation.broken(f"there is a cursor {name} that was never made")
            self.ledger.cursors.setdefault(name, Acknowledged(known[name]))
        for name in [*self.ledger.cursors]:
            if name not in known:
                if name not in self.ledger.removing:
                    self.simulation.broken(f"the cursor {name} is gone")
                del self.ledger.cursors[name]
                continue
            cursor = self._reader(name)
            acknowledged = self.ledger.cursors[name]
            position = cursor.position
            if position < acknowledged.durable_floor:
                self.simulation.broken(
                    f"the cursor {name} is at {position}, and {acknowledged.durable_floor} was stored"
                )
            self._check_position(name)
            acknowledged.begin(position)
        self.ledger.tried.clear()
        self.ledger.removing.clear()

    def _reader(self, name: str) -> Cursor:
        cursor = self.readers[name] = self.journal.cursor(name)
        self.last[name] = cursor.position - 1
        return cursor

    def _unexpected(self, what: str, error: MessagingError) -> None:
        """Note an error that a fault explains; report any other."""
        self.note(f"{what}: {type(error).__name__}: {error}")
        if not self.simulation.has_disk_faults:
            self.simulation.broken(f"{what} failed without a fault of the disk: {type(error).__name__}: {error}")

    def _attempt(self, what: str, function: Callable[[], object]) -> bool:
        """Call a function of the journal; return whether it has succeeded."""
        try:
            function()
        except MessagingError as error:
            self._unexpected(what, error)
            return False
        return True

    # --- appending

    def _begin(self, thread: str, number: int) -> str:
        message = f"{thread}:{number}"
        self.ledger.entries[message] = Entry(thread, number)
        return message

    def _run(self, function: Callable[[str], None]) -> None:
        """Run ``function`` on a thread with a name of its own."""
        thread = f"t{self.number}"
        self.number += 1
        self.threads += 1

        def run() -> None:
            function(thread)
            self.threads -= 1

        self.process.start(run, thread)

    def do_append(self, threads: int, count: int, size: int, timeout: float) -> None:
        """Step: have threads append so many records each."""

        def append(thread: str) -> None:
            for number in range(count):
                self._append(thread, number, size, timeout)

        for _ in range(threads):
            self._run(append)

    def do_mix(self, count: int, size: int, timeout: float) -> None:
        """Step: have a thread append records by turns with and without waiting."""

        def append(thread: str) -> None:
            for number in range(count):
                (self._submit if number % 3 else self._append)(thread, number, size, timeout)

        self._run(append)

    def _append(self, thread: str, number: int, size: int, timeout: float) -> None:
        message = self._begin(thread, number)
        payload = message.encode().ljust(size, b".")
        begin = self.world.scheduler.now
        try:
            offset = self.journal.append(f"c/{thread}", payload, message_id=message, timeout=timeout)
        except MessagingError as error:
            self._append_failed(message, error, begin, timeout)
        else:
            self._stored(message, offset)
            self._check_bounds()
            if self.world.scheduler.now > begin + timeout + SLACK:
                self.simulation.broken(f"the append of {message} took longer than its timeout")

    def _submit(self, thread: str, number: int, size: int, timeout: float) -> None:
        message = self._begin(thread, number)
        payload = message.encode().ljust(size, b".")
        begin = self.world.scheduler.now
        try:
            promise = self.journal.submit(f"c/{thread}", payload, message_id=message, timeout=timeout)
        except MessagingError as error:
            self._append_failed(message, error, begin, timeout)
            return

        def settle() -> None:
            error = promise.exception(0)
            if error is not None:
                self._append_failed(message, error, begin, timeout)
            else:
                self._stored(message, promise.result(0))

        promise.listen(settle)

    def _stored(self, message: str, offset: int) -> None:
        self.note(f"{message} stored at {offset}")
        is_synced = self.options["open"]["fsync"] == "always"
        self.ledger.stored(message, offset, is_synced=is_synced)

    def _append_failed(self, message: str, error: BaseException, begin: float, timeout: float) -> None:
        name = type(error).__name__
        took = self.world.scheduler.now - begin
        self.note(f"{message} {name}: {error}")
        self.ledger.failed(message, error)
        if took > timeout + SLACK:
            self.simulation.broken(f"the append of {message} took until {name} for longer than its timeout")
        if isinstance(error, JournalFullError):
            policies = {self.options["open"]["full"], self.options["open"]["full_disk"]}
            if took < timeout - 0.001 and policies == {"block"} and self.journal.problems() == ():
                self.simulation.broken(f"{message} was refused after {took} s, and may wait for {timeout} s")
            if not self.simulation.has_disk_faults and not self.options["is_bounded"]:
                self.simulation.broken(f"{message} has no room, and nothing is bounded: {error}")
        elif name != "ClosedError" and not self.simulation.has_disk_faults:
            self.simulation.broken(f"the append of {message} failed without a fault of the disk: {name}: {error}")

    def _check_bounds(self) -> None:
        most = self.options["open"]["max_records"]
        if most is None or not self.options["is_bound_sure"]:
            return
        end = self.journal.end
        begin = max(self.journal.begin, min(self.journal.cursors().values(), default=0))
        if end - begin > most:
            self.simulation.broken(f"{end - begin} records are not acknowledged, and at most {most} may be")

    def do_join(self) -> None:
        """Step: wait for the threads."""
        while self.threads:
            clock.pause(0.05)

    # --- cursors

    def do_cursor(self, name: str, start: str) -> None:
        """Step: make a cursor, or open it again."""
        if name in self.readers and name in self.ledger.cursors:
            self._reader(name)
            return
        self.ledger.tried[name] = None
        end = self.journal.end
        self.ledger.is_releasing = self.ledger.is_releasing or not self.ledger.cursors

        def make() -> None:
            cursor = self.readers[name] = self.journal.cursor(name, start)  # type: ignore[arg-type]
            position = cursor.position
            if start == "latest" and position < end:
                self.simulation.broken(f"the cursor {name} begins at {position}, and the end was {end}")
            self.ledger.cursors[name] = Acknowledged(position)
            self.last[name] = position - 1

        if self._attempt("cursor", make):
            self.ledger.tried.pop(name, None)
            self._release()
            self.ledger.is_releasing = False

    def do_remove(self, name: str) -> None:
        """Step: delete a cursor."""
        if name not in self.ledger.cursors:
            return
        self.ledger.removing[name] = None
        self._release(without=name)
        if self._attempt("remove", lambda: self.journal.remove_cursor(name)):
            del self.ledger.cursors[name], self.readers[name]
            del self.ledger.removing[name]

    def do_read(self, name: str, most: int, times: int, way: str) -> None:
        """Step: read with a cursor, and acknowledge."""
        if name not in self.ledger.cursors:
            return
        cursor = self.readers[name]
        for _ in range(times):
            end = max(self.ledger.at, default=-1) + 1
            try:
                records = cursor.read(most, timeout=0.01)
            except MessagingError as error:
                self._unexpected("read", error)
                return
            self._check_read(name, records, end if not records else records[-1].offset + 1)
            if records:
                self._acknowledge(name, [record.offset for record in records], way)

    def _check_read(self, name: str, records: list[Record], until: int) -> None:
        """Check that the cursor has passed no record but those that were acknowledged."""
        acknowledged = self.ledger.cursors[name]
        expected = self.last[name] + 1
        for record in records:
            offset = record.offset
            if offset < expected:
                self.simulation.broken(f"the cursor {name} reads {offset} behind {expected - 1}")
            self.ledger.named(record)
            self._check_passed(name, expected, offset)
            if acknowledged.is_settled(offset):
                self.simulation.broken(f"the cursor {name} reads {offset} again, whose acknowledgement was stored")
            acknowledged.read(offset)
            expected = offset + 1
        self._check_passed(name, expected, until)
        self.last[name] = max(self.last[name], until - 1)
        self._check_position(name)

    def _check_passed(self, name: str, first: int, until: int) -> None:
        begin, ledger = self.journal.begin, self.ledger
        for offset in ledger.between(first, until):
            if offset in ledger.cursors[name] or ledger.is_excused(offset):
                continue
            if offset < max(begin, ledger.dropped_until) and ledger.is_released(offset):
                continue
            self.simulation.broken(f"the cursor {name} has passed {ledger.at[offset]} at {offset}")

    def _check_position(self, name: str) -> None:
        self._check_passed(name, self.ledger.cursors[name].start, self.readers[name].position)

    def _acknowledge(self, name: str, offsets: list[int], way: str) -> None:
        cursor, acknowledged = self.readers[name], self.ledger.cursors[name]
        if way in ("commit", "lazy"):
            acknowledged.floor = max(acknowledged.floor, self.last[name] + 1)
            self._release()
            marks = self.ledger.marks()
            if self._attempt("commit", lambda: cursor.commit(wait=way == "commit")) and way == "commit":
                self.ledger.saved(marks)
        elif way != "none":
            chosen = offsets[::-1] if way == "backwards" else [each for each in offsets if way == "each" or each % 3]
            for offset in chosen:
                acknowledged.acknowledge(offset)
                self._release()
                self._attempt("acknowledge", lambda offset=offset: cursor.acknowledge(offset))  # type: ignore[misc]
        self._check_position(name)

    def _release(self, without: str = "") -> None:
        """Note which records may be deleted now: before the call that allows it."""
        floors = []
        for name, acknowledged in self.ledger.cursors.items():
            if name != without:
                rest = (each for each in self.ledger.at if each >= acknowledged.floor and each not in acknowledged)
                floors.append(min(rest, default=self.journal.end))
        if floors:
            self.ledger.release(min(floors))

    def do_rewind(self, name: str) -> None:
        """Step: read again what is not acknowledged."""
        if name in self.ledger.cursors and self._attempt("rewind", self.readers[name].rewind):
            self.last[name] = self.readers[name].position - 1

    # --- the rest

    def do_trim(self, part: float) -> None:
        """Step: delete the first records, as far as cursors allow."""
        begin, end = self.journal.begin, self.journal.end
        before = begin + round(part * (end - begin))
        self.ledger.release(min([before, *self.journal.cursors().values()]))
        self._attempt("trim", lambda: self.journal.trim(before))

    def do_purge(self) -> None:
        """Step: delete all records."""
        if self.threads or any(entry.state == "sent" for entry in self.ledger.entries.values()):
            return  # which of the records that are appended meanwhile are deleted is not known
        end = self.journal.end
        self.ledger.release(end)
        for acknowledged in self.ledger.cursors.values():
            acknowledged.floor = max(acknowledged.floor, end)
        marks = self.ledger.marks()
        if self._attempt("purge", self.journal.purge):
            self.ledger.saved(marks)
            if self.journal.begin < end:
                self.simulation.broken(f"purge() has left records from {self.journal.begin}")

    def do_sync(self) -> None:
        """Step: wait for the disk."""
        messages, marks = self.ledger.unsynced(), self.ledger.marks()
        if self._attempt("sync", self.journal.sync):
            self.ledger.synced(messages)
            self.ledger.saved(marks)
        else:
            self.ledger.doom()

    def do_letter(self) -> None:
        """Step: keep a dead letter."""
        reason = f"reason {self.number}"
        self.number += 1
        for record in self.journal.read():
            self.ledger.letters[reason] = False
            if self._attempt("letter", lambda record=record: self.journal.add_dead_letter(record, reason)):  # type: ignore[misc]
                self.ledger.letters[reason] = True
            return

    def do_second(self) -> None:
        """Step: try to open it a second time."""
        try:
            Journal.open(self.journal.path).close()
        except JournalLockedError:
            return
        except MessagingError as error:
            self._unexpected("second", error)
            return
        self.simulation.broken("the journal could be opened twice")

    def do_reopen(self) -> None:
        """Step: close it, and open it again."""
        self._close()
        self.do_join()
        self._open()

    def _close(self) -> None:
        messages, marks = self.ledger.unsynced(), self.ledger.marks()
        is_closed = self._attempt("close", self.journal.close)
        if not is_closed:
            self.ledger.doom()
        elif self.options["open"]["fsync"] != "never":
            self.ledger.synced(messages)
        if not self.simulation.has_disk_faults:
            self.ledger.saved(marks)

    def close(self) -> None:
        """Read everything, close, and look once more."""
        self.do_append(1, 2, 10, 30.0)
        self.do_join()
        for name in [*self.ledger.cursors]:
            self.do_rewind(name)
            self.do_read(name, 10_000, 3, "commit")
            cursor = self.readers[name]
            if cursor.position != self.journal.end or cursor.behind:
                self.simulation.broken(f"the cursor {name} is at {cursor.position}, and {cursor.behind} behind")
        self._check_drops()
        self._close()
        self._open()
        for name, cursor in self.readers.items():
            if cursor.read(10_000) or (cursor.behind and not self.simulation.may_be_damaged):
                self.simulation.broken(f"the cursor {name} was at the end, and is {cursor.behind} behind")
        self.journal.close()
        found = verify(self.journal.path)
        if found.unknown or found.state or (found.damage and not self.simulation.may_be_damaged):
            self.simulation.broken(f"verify() finds {found}")

    def _check_drops(self) -> None:
        if self.journal.dropped and not self.ledger.may_drop:
            self.simulation.broken(f"{self.journal.dropped} records were dropped, and no bound says so")
        if self.ledger.may_drop and not self.simulation.has_died and not self.simulation.has_disk_faults:
            begin, ledger = self.journal.begin, self.ledger
            lost = [offset for offset in ledger.at if ledger.released <= offset < begin]
            if len(lost) > self.journal.dropped:
                self.simulation.broken(f"{len(lost)} records were dropped, and {self.journal.dropped} are counted")


class Viewer(Role):
    """A program that reads beside the writer."""

    simulation: JournalAlone

    def open(self) -> None:
        """Begin without a view."""
        self.view: Any = None
        if self.simulation.other is None and any(fault.name == "exchange" for fault in self.simulation.plan.faults):
            try:
                self._make_other()
            except MessagingError as error:
                self.note(f"cannot make another journal: {type(error).__name__}: {error}")

    def _make_other(self) -> None:
        """Make another journal, and keep a copy of its files."""
        with Journal.open(str(self.world.disk.folder / OTHER), segment_bytes=1000) as other:
            for number in range(30):
                other.submit("other", b"other", message_id=f"other:{number}")
            other.sync()
            for most, name in enumerate(CURSORS):
                cursor = other.cursor(name)
                cursor.read(10 * most + 5)
                cursor.commit()
        self.simulation.other = self.world.disk.copy(OTHER)

    def do_look(self, is_new: bool) -> None:
        """Step: read all records."""
        simulation, ledger = self.simulation, self.simulation.ledger
        begun = self.world.scheduler.now
        must = {message: entry.offset for message, entry in ledger.entries.items() if entry.is_certain}
        try:
            if is_new or self.view is None:
                self.close()
                self.view = Journal.view(str(self.world.disk.folder / FOLDER))
            else:
                self.view.refresh()
            records = [*self.view.read()]
            end = self.view.end
            info = self.view.info()
            self.view.refresh()
            begin = self.view.begin
        except MessagingError as error:
            self.note(f"look: {type(error).__name__}: {error}")
            if not simulation.has_disk_faults and not self._is_transient(error):
                simulation.broken(f"a view failed: {type(error).__name__}: {error}")
            self.close()
            return
        found = self._named(records, begun)
        for message, offset in must.items():
            is_there = found.get(message) == offset or not ledger.entries[message].is_certain
            if not is_there and offset >= begin and not ledger.is_excused(offset):
                simulation.broken(f"a view does not show {message} at {offset}: {begin} to {end}, {info.damage}")
        if not simulation.may_be_damaged and any(each.until > each.first for each in info.damage):
            simulation.broken(f"a view finds damage: {info.damage}")

    def _is_transient(self, error: MessagingError) -> bool:
        """Return whether a view may fail so while the writer begins, or deletes records."""
        return not self.simulation.writer.is_open or "are there" in str(error)

    def _named(self, records: list[Record], begun: float) -> dict[str, int]:
        found = {}
        for record in records:
            message = record.payload.rstrip(b".").decode(errors="replace")
            entry = self.simulation.ledger.entries.get(message)
            if entry is not None and (entry.since >= begun or entry.state == "sent"):
                continue  # its append has ended, or may yet end, meanwhile
            self.simulation.ledger.named(record)
            found[message] = record.offset
        return found

    def close(self) -> None:
        """Close the view."""
        if self.view is not None:
            self.view.close()
            self.view = None


class JournalAlone(Simulation):
    """A writer and a viewer of one journal."""

    name = "journal"
    protocols = ("memory",)
    has_broker = False

    def begin(self) -> None:
        """See ``Simulation``."""
        options, names = self.plan.options, {fault.name for fault in self.plan.faults}
        opening = options["open"]
        may_drop = "drop_oldest" in (opening["full"], opening["full_disk"]) or opening["max_age"] is not None
        self.ledger = Ledger(self.broken, lambda: self.world.scheduler.now, may_drop=may_drop)
        self.has_disk_faults = bool(names & DISK_FAULTS)
        self.has_died = False
        self.is_unreadable = False
        self.may_be_damaged = bool(names & {"change", "remove_segment"}) or any(
            fault.name == "kill" and fault.arguments["vanishes"] for fault in self.plan.faults
        )
        self._copy: tuple[Copy, Ledger, bool] | None = None
        #: the files of another journal
        self.other: Copy | None = None
        #: the right files, and those that are there instead
        self._exchanged: tuple[Copy, Copy] | None = None
        self.writer = Writer(self, "writer")
        self.roles += [self.writer, Viewer(self, "viewer")]

    def is_at_rest(self) -> bool:
        """See ``Simulation``."""
        return not self.writer.threads and all(entry.state != "sent" for entry in self.ledger.entries.values())

    def judge(self) -> None:
        """See ``Simulation``. The writer itself compares the journal with the ledger when it closes."""
        for message, entry in self.ledger.entries.items():
            if entry.state == "sent":
                self.broken(f"the append of {message} has no outcome")

    # --- faults

    def fault_kill(self, role: str, seconds: float, vanishes: bool) -> None:
        """Fault: as everywhere; both programs are on one machine."""
        for each in self.roles:
            if each.process.is_alive and (vanishes or each.name == role):
                if each is self.writer:
                    self.has_died = True
                    if vanishes and each.is_open:
                        # a crash may take back the removal of a segment, and keep the positions stored after it
                        self.ledger.dropped_until = max(self.ledger.dropped_until, self.writer.journal.begin)
                    self.ledger.died(has_crashed=vanishes)
                super().fault_kill(each.name, seconds, vanishes)

    def fault_copy(self) -> None:
        """Fault, or what makes it possible: the folder is copied."""
        if self._exchanged is not None:
            return  # files of another journal are there
        copied = self.ledger.copy()
        copied.died(has_crashed=False)
        self._copy = self.world.disk.copy(FOLDER), copied, self.is_unreadable

    def fault_restore(self, seconds: float) -> None:
        """Fault: an older copy of the folder is put in its place, while no program runs."""
        if self._copy is None or not self._copy[0].files.get("journal.json"):
            return
        for each in self.roles:
            self.fault_kill(each.name, seconds, vanishes=False)
        self.world.disk.restore(FOLDER, self._copy[0])
        self._exchanged = None
        self.ledger = self._copy[1].copy()
        self.is_unreadable = self._copy[2]

    def fault_exchange(self, what: str, seconds: float, is_put_back: bool) -> None:
        """Fault: files of another journal replace those of this one, while no program runs."""
        own = self.world.disk.copy(FOLDER)
        is_known = any(not self.ledger.is_excused(offset) for offset in self.ledger.at)
        if self.other is None or self.is_unreadable or not is_known or "state.db" not in own.files:
            return
        for each in self.roles:
            self.fault_kill(each.name, seconds, vanishes=False)
        own = self.world.disk.copy(FOLDER)

        def is_exchanged(file: str) -> bool:
            return file.startswith({"state": "state.db", "segments": "0/", "identity": "journal.json"}[what])

        changed = Copy(
            {file: content for file, content in own.files.items() if not is_exchanged(file)}
            | {file: content for file, content in self.other.files.items() if is_exchanged(file)},
            own.folders,
        )
        self.world.disk.restore(FOLDER, changed)
        self.is_unreadable = True
        if is_put_back or what == "segments":
            self._exchanged = own, changed
        elif what == "state":
            self.ledger.forget_state()

    def put_back(self) -> bool:
        """Put the right files in the place of those of another journal; return whether there are such."""
        if self._exchanged is None:
            return False
        own, changed = self._exchanged
        there = self.world.disk.copy(FOLDER).files
        for file in (file for file, content in changed.files.items() if there.get(file) != content):
            self.broken(f"{file} of a journal that was refused has changed")
        self.world.disk.restore(FOLDER, own)
        self._exchanged, self.is_unreadable = None, False
        return True

    def fault_change(self, what: str, count: int) -> None:
        """Fault: bytes of a segment, or of ``journal.json``, change."""
        folder = self.world.disk.folder / FOLDER
        segments = self._segments()
        if what == "identity":
            if (
                segments
                and not self.writer.process.is_alive
                and self.world.disk.change_bytes(folder / "journal.json", 1)
            ):
                self.is_unreadable = True
                self._keep_damage()
        elif segments:
            at = int(self.world.disk.random.random() * len(segments))
            name = f"0/{segments[at]:020d}.segment"
            if (place := self.world.disk.change_bytes(folder / name, count)) is not None:
                self._damage(segments, at)
                self.world.note("disk", f"bytes {place} of {name} have changed")

    def fault_remove_segment(self) -> None:
        """Fault: the file of a segment that is not the last one is gone."""
        segments = self._segments()
        if len(segments) > 1:
            at = int(self.world.disk.random.random() * (len(segments) - 1))
            with self.world.disk.work():
                (self.world.disk.folder / FOLDER / "0" / f"{segments[at]:020d}.segment").unlink()
            self._damage(segments, at)
            self.world.note("disk", f"segment {segments[at]} is gone")

    def _segments(self) -> list[int]:
        folder = self.world.disk.folder / FOLDER / "0"
        with self.world.disk.work():
            return sorted(int(path.stem) for path in folder.glob("*.segment"))

    def _keep_damage(self) -> None:
        """Note that a journal that is refused has this damage, and keeps it."""
        if self._exchanged is not None:
            self._exchanged = self._exchanged[0], self.world.disk.copy(FOLDER)

    def _damage(self, segments: list[int], at: int) -> None:
        self._keep_damage()
        in_flight = sum(entry.state == "sent" for entry in self.ledger.entries.values())
        end = max(self.ledger.at, default=-1) + 1 + in_flight
        self.ledger.damaged.append((segments[at], segments[at + 1] if at + 1 < len(segments) else end))

    # --- plans

    @classmethod
    def make_plan(cls, random: random.Random, protocol: str) -> Plan:
        """See ``Simulation``."""
        del protocol
        is_bounded = random.random() < 0.4
        policy = random.choice(("block", "block", "reject", "drop_oldest"))
        opening: dict[str, Any] = {
            "fsync": random.choice(("always", "always", "interval", "never")),
            "fsync_interval": random.choice((0.05, 1.0)),
            "segment_bytes": random.choice((300, 1000, 5000, 100_000)),
            "max_records": random.choice((None, 5, 20, 100)) if is_bounded else None,
            "max_bytes": random.choice((None, 2000, 40_000)) if is_bounded else None,
            "max_age": random.choice((2.0, 30.0)) if random.random() < 0.1 else None,
            "full": policy,
            "full_disk": random.choice((policy, "block", "reject", "drop_oldest")) if random.random() < 0.3 else policy,
        }
        steps = [cls._step(random) for _ in range(random.randint(24, 45))]
        steps += [
            Step(
                "viewer",
                *random.choice(
                    (
                        ("pause", {"seconds": span(random, 1e-3, 2.0)}),
                        ("look", {"is_new": False}),
                        ("look", {"is_new": True}),
                    )
                ),
            )
            for _ in range(random.randint(6, 16))
        ]
        made: dict[str, None] = {}
        is_bound_sure = True
        for step in steps:
            if step.name == "cursor":
                is_bound_sure = is_bound_sure and (step.arguments["start"] == "latest" or not made)
                made[step.arguments["name"]] = None
            elif step.name == "remove":
                is_bound_sure = False
        faults = cls._faults(random)
        options = {**scheduling(random), "open": opening, "is_bounded": is_bounded, "is_bound_sure": is_bound_sure}
        options["is_bound_sure"] = is_bound_sure and not faults
        return Plan(options, tuple(steps), tuple(faults))

    @classmethod
    def _step(cls, random: random.Random) -> Step:
        name = random.choice(CURSORS)
        size, timeout = random.choice((0, 0, 30, 300, 3000)), random.choice((0.5, 5.0, 30.0))
        chosen = random.choices(
            (
                (
                    "append",
                    {
                        "threads": random.choice((1, 1, 2, 5)),
                        "count": random.choice((1, 3, 10)),
                        "size": size,
                        "timeout": timeout,
                    },
                ),
                ("mix", {"count": random.choice((3, 10)), "size": size, "timeout": timeout}),
                (
                    "read",
                    {
                        "name": name,
                        "most": random.choice((1, 5, 1000)),
                        "times": random.choice((1, 2, 5)),
                        "way": random.choice(("commit", "lazy", "each", "backwards", "some", "some", "none")),
                    },
                ),
                ("cursor", {"name": name, "start": random.choice(("earliest", "earliest", "latest"))}),
                ("pause", {"seconds": span(random, 1e-4, 2.0)}),
                ("join", {}),
                ("rewind", {"name": name}),
                ("remove", {"name": name}),
                ("trim", {"part": random.random()}),
                ("purge", {}),
                ("sync", {}),
                ("letter", {}),
                ("second", {}),
                ("reopen", {}),
            ),
            (10, 5, 12, 5, 5, 4, 2, 1, 1, 0.5, 2, 1, 0.5, 2),
        )[0]
        return Step("writer", *chosen)

    @classmethod
    def _faults(cls, random: random.Random) -> list[Fault]:
        if random.random() < 0.1:
            return []

        def kill():
            return {
                "role": random.choice(("writer", "writer", "writer", "viewer")),
                "seconds": span(random, 0.01, 3.0),
            }

        makers: list[Callable[[], tuple[str, dict[str, Any]]]] = [
            *[lambda: ("kill", {**kill(), "vanishes": False})] * 3,
            *[lambda: ("kill", {**kill(), "vanishes": True})] * 4,
            *[
                lambda: (
                    "full_disk",
                    {"seconds": span(random, 0.05, 20.0), "left": random.choice((0, 100, 1000, 10_000))},
                )
            ]
            * 2,
            lambda: ("failing_sync", {"count": random.choice((1, 1, 3))}),
            lambda: ("failing_write", {"count": random.choice((1, 1, 3))}),
            lambda: ("slow_sync", {"seconds": span(random, 0.1, 10.0), "longest": span(random, 0.01, 1.0)}),
            lambda: ("copy", {}),
            *[lambda: ("restore", {"seconds": span(random, 0.01, 1.0)})] * 2,
            lambda: (
                "change",
                {"what": random.choice(("segment", "segment", "identity")), "count": random.choice((1, 1, 20, 2000))},
            ),
        ]
        if random.random() < 0.1:
            makers.append(lambda: ("remove_segment", {}))
        if random.random() < 0.2:
            makers += [
                lambda: (
                    "exchange",
                    {
                        "what": random.choice(("state", "state", "segments", "identity")),
                        "seconds": span(random, 0.01, 1.0),
                        "is_put_back": random.random() < 0.5,
                    },
                )
            ] * 4
        faults = []
        for _ in range(random.choice((1, 2, 2, 3, 3, 4, 6))):
            name, arguments = random.choice(makers)()
            at = span(random, 1e-3, 6.0)
            faults.append(Fault(at, name, arguments))
            if name == "restore":
                faults.append(Fault(round(at * random.random(), 6), "copy", {}))
            if name == "change" and arguments["what"] == "identity":
                faults.append(Fault(round(at - 1e-4, 6), "kill", {"role": "writer", "seconds": 0.5, "vanishes": False}))
        return sorted(faults, key=lambda fault: fault.at)
