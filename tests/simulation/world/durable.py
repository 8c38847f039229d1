"""What a machine finds on its disk after it has lost power: a model beside real files, which then changes them.

A file system keeps writes in memory until they are synced, and writes them in any order meanwhile. The model knows for
each file what the disk has for certain, and for each folder the changes of its names that were not synced:

- Of bytes that were written since the last sync of their file, any part may be on the disk, in sectors. A file that has
  grown may end anywhere in its new part, or have its new size with zeros in it.
- Of the changes of names (a file made, removed, renamed; a folder made, removed) the first ones may be on the disk, for
  each folder alone, until the folder is synced.
- Bytes whose sync failed are lost although they can be read until the crash, and no later sync says so again.

Files that SQLite writes itself are not part of the model: it syncs each transaction, and recovers from any part of
another.
"""

from __future__ import annotations

import os
import shutil
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import random
    from collections.abc import Iterator

#: bytes that a disk writes whole, or not at all
SECTOR: Final = 512


class _File:
    """A file with bytes that may not be on the disk.

    Attributes:
        machine: the machine that has written it.
        durable: what is on the disk for certain.
        lost: where bytes are whose sync failed; ``None``: nowhere.
    """

    __slots__ = ("durable", "lost", "machine")

    def __init__(self, machine: str, durable: bytes) -> None:
        self.machine = machine
        self.durable = durable
        self.lost: tuple[int, int] | None = None


@dataclass(frozen=True)
class _Change:
    """A change of names that may not be on the disk.

    Attributes:
        machine: the machine that has made it.
        kind: ``make``, ``remove``, ``rename``, ``make folder`` or ``remove folder``.
        folder: whose names have changed.
        path: the name, after the change if it is a rename.
        before: the name before a rename.
        content: of the file that was removed or replaced; ``None``: there was none.
        file: what the disk has of that.
    """

    machine: str
    kind: str
    folder: str
    path: str
    before: str = ""
    content: bytes | None = None
    file: _File | None = None


class Unsynced:
    """What is not on the disk yet. Paths are absolute texts."""

    def __init__(self) -> None:
        self._files: dict[str, _File] = {}
        self._changes: list[_Change] = []

    # --- bytes

    def writing(self, machine: str, path: str) -> None:
        """Note that a file is about to be written, or cut off."""
        file = self._files.get(path)
        if file is None:
            self._files[path] = _File(machine, content_of(path) or b"")
        else:
            file.machine = machine

    def cutting_off(self, path: str, size: int) -> None:
        """Note that a file is about to be cut off, after :meth:`writing`."""
        file = self._files[path]
        if file.lost is not None:
            begin, end = file.lost
            file.lost = (begin, min(end, size)) if begin < size else None

    def synced(self, path: str, content: bytes) -> None:
        """Note that the disk has ``content`` of a file: what it held when the sync began."""
        file = self._files.get(path)
        if file is None:
            return
        if file.lost is not None:
            content = _zeroed(content, *file.lost)
        file.durable = content
        if content == content_of(path):
            del self._files[path]

    def failed(self, path: str, content: bytes) -> None:
        """Note that a sync failed: what was written since the one before is lost, and nothing tells so any more."""
        file = self._files.get(path)
        if file is not None and len(content) > len(file.durable):
            begin = len(file.durable) if file.lost is None else file.lost[0]
            file.lost = (begin, len(content))

    # --- names

    def made(self, machine: str, path: str, *, is_folder: bool = False) -> None:
        """Note that a file or a folder was made."""
        self._changes.append(_Change(machine, "make folder" if is_folder else "make", os.path.dirname(path), path))

    def removing(self, machine: str, path: str, *, is_folder: bool = False) -> None:
        """Note that a file or a folder is about to be removed."""
        kind = "remove folder" if is_folder else "remove"
        content = None if is_folder else content_of(path)
        self._changes.append(
            _Change(machine, kind, os.path.dirname(path), path, "", content, self._files.pop(path, None))
        )

    def renaming(self, machine: str, before: str, after: str) -> None:
        """Note that a file or a folder is about to be renamed, in its folder or out of it."""
        content, file = (content_of(after), self._files.pop(after, None)) if os.path.isfile(after) else (None, None)
        self._changes.append(_Change(machine, "rename", os.path.dirname(after), after, before, content, file))
        self._files = {_moved(path, before, after): file for path, file in self._files.items()}

    def folder_synced(self, path: str) -> None:
        """Note that the disk has the names of a folder."""
        kept: list[_Change] = []
        for change in self._changes:
            if change.folder != path:
                kept.append(change)
            elif change.kind == "rename":
                kept = [_renamed(each, change) for each in kept]
        self._changes = kept

    def forget(self, path: str) -> None:
        """Take the bytes of a file for synced; of a folder, all names and bytes in it."""
        inside = path + os.sep
        self._files = {each: file for each, file in self._files.items() if each != path and not each.startswith(inside)}
        self._changes = [
            change for change in self._changes if change.folder != path and not change.folder.startswith(inside)
        ]

    # --- the crash

    def lose(self, machine: str, random: random.Random) -> list[str]:
        """Give the files of a machine the state that they have after it has lost power; return what was lost."""
        told = [*self._take_back(machine, random)]
        for path, file in [*self._files.items()]:
            if file.machine != machine:
                continue
            del self._files[path]
            after = content_of(path)
            if after is None:
                continue
            if file.lost is not None:
                after = _zeroed(after, *file.lost)
            kept = torn(file.durable, after, random)
            if kept != content_of(path):
                Path(path).write_bytes(kept)
                sizes = f"{len(file.durable)} bytes synced, {len(after)} written, {len(kept)} kept"
                told.append(f"{os.path.basename(path)}: {sizes}")
        return told

    def _take_back(self, machine: str, random: random.Random) -> Iterator[str]:
        """Take back some of the last changes of names of each folder."""
        own = [change for change in self._changes if change.machine == machine]
        self._changes = [change for change in self._changes if change.machine != machine]
        counts: dict[str, int] = {}
        for change in own:
            counts[change.folder] = counts.get(change.folder, 0) + 1
        keep = {
            folder: random.choice((0, count, int(random.random() * (count + 1)))) for folder, count in counts.items()
        }
        undone: list[_Change] = []
        for change in own:
            keep[change.folder] -= 1
            if keep[change.folder] < 0:
                undone.append(change)
            elif change.kind == "rename":
                undone = [_renamed(each, change) for each in undone]
        for change in reversed(undone):
            self._undo(change)
            yield f"{change.kind} {os.path.basename(change.path)} was taken back"

    def _undo(self, change: _Change) -> None:
        path = Path(change.path)
        with suppress(FileNotFoundError):  # it went with its folder
            if change.kind == "make":
                path.unlink()
                self._files.pop(change.path, None)
            elif change.kind == "make folder":
                shutil.rmtree(path)
                inside = change.path + os.sep
                self._files = {each: file for each, file in self._files.items() if not each.startswith(inside)}
            elif change.kind == "remove folder":
                path.mkdir(exist_ok=True)
            else:
                if change.kind == "rename":
                    path.rename(change.before)
                    self._files = {_moved(each, change.path, change.before): file for each, file in self._files.items()}
                if change.content is not None:
                    path.write_bytes(change.content)
                    path.chmod(0o600)
                if change.file is not None:
                    self._files[change.path] = change.file


def _moved(path: str, before: str, after: str) -> str:
    """Return the path that ``path`` has after a rename, which may be that of a folder around it."""
    if path == before:
        return after
    return after + path[len(before) :] if path.startswith(before + os.sep) else path


def _renamed(change: _Change, rename: _Change) -> _Change:
    """Return ``change``, which came first, with its names after the rename."""
    return replace(
        change,
        folder=_moved(change.folder, rename.before, rename.path),
        path=_moved(change.path, rename.before, rename.path),
        before=_moved(change.before, rename.before, rename.path),
    )


def torn(durable: bytes, written: bytes, random: random.Random) -> bytes:
    """Return a content that a file may have after a crash, between what was synced and what was written."""
    chosen = random.random()
    if chosen < 0.25 or durable == written:
        return written
    if chosen < 0.5:
        return durable
    if chosen < 0.75 and written.startswith(durable):
        return written[: len(durable) + int(random.random() * (len(written) - len(durable) + 1))]
    size = random.choice((len(durable), len(written)))
    old, new = durable.ljust(size, b"\0"), written.ljust(size, b"\0")
    sectors = range(0, size, SECTOR)
    share = random.random()
    return b"".join((new if random.random() < share else old)[at : at + SECTOR] for at in sectors)[:size]


def _zeroed(content: bytes, begin: int, end: int) -> bytes:
    return content[:begin] + bytes(max(0, min(end, len(content)) - begin)) + content[end:]


def content_of(path: str) -> bytes | None:
    """Return the bytes of a file; ``None``: there is no such file."""
    try:
        return Path(path).read_bytes()
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
        return None
