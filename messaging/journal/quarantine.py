"""Quarantine: copies of damaged bytes of a journal, and of writes that a crash left unfinished.

Nothing is destroyed that may still be of use: bytes that cannot be read, or are cut off, are copied to files of
``quarantine/`` first. The name of a file tells its place: segment, bytes, and the offsets that are lost.
"""

from __future__ import annotations

import bisect
import logging
import re
import threading
from collections.abc import Iterable
from math import inf
from typing import Final, NamedTuple

from messaging.journal.folders import LocalFolder
from messaging.journal.frames import Damage

logger = logging.getLogger(__name__)

FOLDER: Final = "quarantine"
#: most bytes of all copies, and most files; later damage is only reported
_MOST_BYTES: Final = 256 * 2**20
_MOST_FILES: Final = 1000
_NAME: Final = re.compile(r"(\d{20})-(\d+)-(\d+)-(\d+)-(\d+)\.damaged")


class DamagedRange(NamedTuple):
    """A damaged place of a journal."""

    #: the first offset of the segment
    segment: int
    #: the bytes that cannot be used
    position: int
    end: int
    #: offset of the first record that is lost, and the offset after the last one; equal if none is
    first: int
    until: int

    def is_part_of(self, other: DamagedRange) -> bool:
        """Return whether ``other`` has all its bytes, if it has any, and tells its records as lost as well."""
        is_within = other.segment == self.segment and other.position <= self.position and self.end <= other.end
        is_told = self.first == self.until or (other.first <= self.first and self.until <= other.until)
        return is_told and (is_within or self.position == self.end)


class Quarantine:
    """The damage of one journal that was found so far. Thread safe.

    Args:
        folder: of the journal.
        writable: whether to copy damaged bytes; a process that only reads leaves that to the writer.
    """

    def __init__(self, folder: LocalFolder, *, writable: bool = True) -> None:
        self._folder = folder
        self._writable = writable
        #: guards everything below, and the files
        self._lock = threading.Lock()
        #: the damage that was logged, by an earlier writer, too, in order of the bytes; ``None`` until it is needed
        self._known: list[DamagedRange] | None = None
        #: files in the folder, and their bytes
        self._files = self._bytes = 0

    def add(self, segment: int, damage: Damage, data: memoryview) -> None:
        """Copy damaged bytes, log the damage, and remember it; once for each damage."""
        found = DamagedRange(segment, damage.position, damage.end, damage.first, damage.until)
        with self._lock:
            known = self._load() if self._known is None else self._known
            at = bisect.bisect(known, (found.segment, found.position, inf))
            # a reader that begins within the damage finds a part of it again, and one that passes the gap which
            # offsets are missing
            if any(map(found.is_part_of, known if found.position == found.end else known[max(at - 1, 0) : at])):
                return
            known.insert(at, found)
            copy = self._copy(found, data) if self._writable else "nothing is copied by a reader"
        lost = f"{found.until - found.first} records are lost, with offsets from {found.first}"
        logger.error(
            "journal %s: segment %020d is damaged at bytes %d to %d: %s; %s; %s",
            self._folder.shown, segment, found.position, found.end, damage.reason,
            lost if found.until > found.first else "no stored record is lost", copy,
        )  # fmt: skip

    def _load(self) -> list[DamagedRange]:
        files = self._folder.list(FOLDER) if self._writable else {}
        self._files, self._bytes = len(files), sum(files.values())
        self._known = sorted(_parsed(files))
        return self._known

    def _copy(self, found: DamagedRange, data: memoryview) -> str:
        """Copy damaged bytes; return what became of them."""
        if self._files >= _MOST_FILES:
            return f"they are not copied: {FOLDER} has {self._files} files already"
        name = f"{found.segment:020d}-{'-'.join(map(str, found[1:]))}.damaged"
        has_room = self._bytes + len(data) <= _MOST_BYTES
        try:
            self._folder.make(FOLDER)
            self._bytes += self._folder.write(
                f"{FOLDER}/{name}", [data] if has_room else []
            )  # the name tells the range
        except OSError as error:
            return f"they cannot be copied to {FOLDER}: {error.strerror or error}"
        self._files += 1
        if not has_room:
            return f"they are not copied: {FOLDER} has {_MOST_BYTES} bytes already"
        return f"{len(data)} bytes are in {FOLDER}/{name}"

    def ranges(self) -> list[DamagedRange]:
        """Return the damage that this process has found, and that the folder has copies of, in order of the offsets."""
        with self._lock:
            found = set(self._known or ()) | _parsed(self._folder.list(FOLDER))
        spans = [each for each in found if each.position < each.end]
        found -= {each for each in found if each.position == each.end and any(map(each.is_part_of, spans))}
        return sorted(found, key=lambda each: (each.first, each.segment, each.position))


def _parsed(names: Iterable[str]) -> set[DamagedRange]:
    found = map(_NAME.fullmatch, names)
    return {DamagedRange(*map(int, parts.groups())) for parts in found if parts}
