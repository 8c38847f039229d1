"""Quarantine: copies of damaged bytes of a journal, and of writes that a crash left unfinished.

Nothing is destroyed that may still be of use: bytes that cannot be read, or are cut off, are copied to files of
``quarantine/`` first. The name of a file tells its place: segment, bytes, and the offsets that are lost.
"""

from __future__ import annotations

import logging
import re
import threading
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from messaging.journal.folders import LocalFolder
    from messaging.journal.frames import Damage

logger = logging.getLogger(__name__)

FOLDER: Final = "quarantine"
#: most bytes of all copies; later damage is only reported
_MOST_BYTES: Final = 256 * 2**20
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


class Quarantine:
    """The damage of one journal that was found so far. Thread safe."""

    def __init__(self, folder: LocalFolder) -> None:
        self._folder = folder
        #: guards ``_known`` and the files
        self._lock = threading.Lock()
        self._known: set[DamagedRange] = set()

    def add(self, segment: int, damage: Damage, data: memoryview) -> None:
        """Copy damaged bytes, log the damage, and remember it; once for each damage."""
        found = DamagedRange(segment, damage.position, damage.end, damage.first, damage.until)
        name = f"{segment:020d}-{'-'.join(map(str, found[1:]))}.damaged"
        with self._lock:
            if found in self._known:
                return
            self._known.add(found)
            try:
                self._folder.make(FOLDER)
                files = self._folder.list(FOLDER)
                if name in files:
                    return
                if sum(files.values()) + len(data) <= _MOST_BYTES:
                    self._folder.write(f"{FOLDER}/{name}", [data])
                copy = f"{len(data)} bytes are in {FOLDER}/{name}"
            except OSError as error:
                copy = f"they cannot be copied to {FOLDER}: {error.strerror or error}"
        lost = f"{found.until - found.first} records are lost, with offsets from {found.first}"
        logger.error(
            "journal %s: segment %020d is damaged at bytes %d to %d: %s; %s; %s",
            self._folder.shown, segment, found.position, found.end, damage.reason,
            lost if found.until > found.first else "no stored record is lost", copy,
        )  # fmt: skip

    def ranges(self) -> list[DamagedRange]:
        """Return the damage that this process has found, and that the folder has copies of, in order of the offsets."""
        with self._lock:
            found = {*self._known}
            for name in self._folder.list(FOLDER):
                if parts := _NAME.fullmatch(name):
                    found.add(DamagedRange(*map(int, parts.groups())))
        return sorted(found, key=lambda each: (each.first, each.segment, each.position))
