"""Any sequence of calls, beside a model."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path
from unittest import mock

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from messaging.errors import JournalFullError
from messaging.journal import Cursor, Journal
from messaging.journal.options import Full
from messaging.testing.waiting import eventually
from tests.journal.logs import payload
from tests.threads import in_threads

NAMES = ("one", "two", "three")


class Machine(RuleBasedStateMachine):
    """A journal beside the offsets of its records and the positions of its cursors."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = [mock.patch.object(os, name) for name in ("fsync", "fdatasync")]
        for patch in self.patches:
            patch.start()
        self.folder = Path(tempfile.mkdtemp(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None))
        self.number = 0
        self.end = 0
        self.dropped = 0
        self.cursors: dict[str, Cursor] = {}
        self.acknowledged: dict[str, set[int]] = {}

    @initialize(
        segment_bytes=st.sampled_from([1, 300, 2000, 2**20]),
        full=st.sampled_from(["block", "reject", "drop_oldest"]),
        max_records=st.sampled_from([None, None, 5, 40, 200]),
        max_bytes=st.sampled_from([None, None, 5000]),
    )
    def begin(self, segment_bytes: int, full: Full, max_records: int | None, max_bytes: int | None) -> None:
        self.options = {
            "segment_bytes": segment_bytes, "full": full, "max_records": max_records, "max_bytes": max_bytes,
            "timeout": 0.01, "fsync": "never",
        }  # fmt: skip
        self.open()

    @property
    def path(self) -> Path:
        return self.folder / str(self.number)

    def open(self) -> None:
        self.journal = Journal.open(self.path, **self.options)  # type: ignore[arg-type]

    def slowest(self) -> int:
        positions = self.journal.cursors().values()
        return max(self.journal.begin, min(positions, default=0))

    # --- appending

    @rule(count=st.sampled_from([1, 1, 2, 20]))
    def append(self, count: int) -> None:
        for _ in range(count):
            try:
                assert self.journal.append("a", payload(self.end), timestamp=self.end) == self.end
                self.end += 1
                self.check_bound()
            except JournalFullError:
                assert self.options["full"] != "drop_oldest"
                assert self.is_bounded()

    @rule(threads=st.integers(2, 4), count=st.sampled_from([1, 10]))
    def append_from_threads(self, threads: int, count: int) -> None:
        stored: list[int] = []

        def work() -> None:
            for _ in range(count):
                try:
                    stored.append(self.journal.append("b", b"thread"))
                except JournalFullError:
                    return

        in_threads(threads, lambda _: work())
        assert sorted(stored) == list(range(self.end, self.end + len(stored)))
        self.end += len(stored)
        if stored:
            self.check_bound()
        assert len(stored) == threads * count or self.is_bounded()

    def check_bound(self) -> None:
        """Raise if a record was accepted beyond the bound. A cursor that is opened later may find more."""
        most = self.options["max_records"]
        assert most is None or self.end - self.slowest() <= most  # type: ignore[operator]

    def is_bounded(self) -> bool:
        return bool(self.options["max_records"] or self.options["max_bytes"])

    # --- cursors

    @rule(name=st.sampled_from(NAMES), start=st.sampled_from(["earliest", "latest"]))
    def cursor(self, name: str, start: str) -> None:
        known = self.journal.cursors().get(name)
        cursor = self.journal.cursor(name, start)  # type: ignore[arg-type]
        if known is None:
            assert cursor.position == (self.end if start == "latest" else self.journal.begin)
            self.acknowledged[name] = set(range(cursor.position))
        else:
            assert cursor.position == known
        self.cursors[name] = cursor

    @precondition(lambda self: self.cursors)
    @rule(data=st.data(), most=st.sampled_from([1, 7, 1000]))
    def read(self, data: st.DataObject, most: int) -> None:
        cursor = self.cursors[data.draw(st.sampled_from(sorted(self.cursors)))]
        for record in cursor.read(most):
            self.check(record.offset, record.channel, record.payload)

    @precondition(lambda self: self.cursors)
    @rule(data=st.data(), part=st.floats(0, 1), wait=st.booleans())
    def commit(self, data: st.DataObject, part: float, wait: bool) -> None:
        name = data.draw(st.sampled_from(sorted(self.cursors)))
        until_offset = int(self.end * part)
        self.cursors[name].commit(until_offset, wait=wait)
        self.acknowledged[name].update(range(until_offset))

    @precondition(lambda self: self.cursors)
    @rule(data=st.data(), steps=st.lists(st.integers(0, 6), max_size=6))
    def acknowledge(self, data: st.DataObject, steps: list[int]) -> None:
        name = data.draw(st.sampled_from(sorted(self.cursors)))
        position = self.cursors[name].position
        for offset in (position + step for step in steps):
            if offset < self.end:
                self.cursors[name].acknowledge(offset)
                self.acknowledged[name].add(offset)

    @precondition(lambda self: self.cursors)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.cursors)))
        assert self.journal.remove_cursor(name)
        del self.cursors[name], self.acknowledged[name]

    @rule(part=st.floats(0, 1.1))
    def trim(self, part: float) -> None:
        positions = self.journal.cursors().values()
        begin = self.journal.trim(int(self.end * part))
        assert begin <= min([*positions, self.end])

    # --- opening again

    @rule()
    def reopen(self) -> None:
        self.journal.close()
        self.open()
        self.forget()

    @rule()
    def kill(self) -> None:
        """What a killed process leaves behind: what the operating system has."""
        eventually(self.is_quiet)
        shutil.copytree(self.path, self.folder / str(self.number + 1))
        self.journal.close()
        self.number += 1
        self.open()
        self.forget()

    def is_quiet(self) -> bool:
        """Return whether the thread of the journal has nothing to store and to delete."""
        log, cursors = self.journal._log, self.journal._cursors
        self.journal._commit.wake()  # it trims when it does something else
        is_trimmed = not cursors.positions() or not log.segment_of(cursors.slowest())
        with cursors._storing:  # nothing is on its way to the database
            is_saved = cursors.is_saved
        return is_saved and is_trimmed and len(log.list_segments()) == len(log.segments)

    def forget(self) -> None:
        """Forget the cursors: what was acknowledged, also beyond their positions, is stored."""
        stored = self.journal.cursors()
        assert set(stored) == set(self.cursors)
        for name, position in stored.items():
            self.acknowledged[name].update(range(position))
            self.cursors[name] = self.journal.cursor(name)

    @rule()
    def view(self) -> None:
        with Journal.view(self.path) as view:
            assert view.end == self.end
            for record in view.read():
                self.check(record.offset, record.channel, record.payload)

    # --- what always holds

    def check(self, offset: int, channel: str, found: bytes) -> None:
        assert found == (payload(offset) if channel == "a" else b"thread")

    @invariant()
    def agrees(self) -> None:
        if not hasattr(self, "journal"):
            return
        journal = self.journal
        assert journal.end == self.end
        assert journal.dropped >= self.dropped
        self.dropped = journal.dropped
        for name, cursor in self.cursors.items():
            position = cursor.position
            assert position <= self.end
            done = self.acknowledged[name]
            first = next(n for n in range(self.end + 1) if n not in done)
            # records that were dropped are passed, and none else
            assert position == first or (self.dropped and position > first)
            done.update(range(position))
        offsets = []
        for record in journal.read():
            self.check(record.offset, record.channel, record.payload)
            offsets.append(record.offset)
        # segments before the slowest cursor may be deleted meanwhile
        assert offsets == sorted(set(offsets))
        assert set(range(self.slowest(), self.end)) <= set(offsets)

    def teardown(self) -> None:
        if hasattr(self, "journal"):
            self.journal.close()
        shutil.rmtree(self.folder)
        for patch in self.patches:
            patch.stop()


TestAnySequence = Machine.TestCase
TestAnySequence.settings = settings(max_examples=30, stateful_step_count=25, deadline=None)
