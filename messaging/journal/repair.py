"""Repairing a damaged ``journal.json``, and a ``state.db`` of another journal.

The segments tell the key of their frames, and so which id is right.
"""

from __future__ import annotations

import json
import string
from collections import Counter
from pathlib import Path
from typing import Any, Final

from messaging.errors import JournalCorruptError, JournalUnreadableError
from messaging.errors.checks import check_path
from messaging.execution import clock
from messaging.journal.database import FILE as STATE
from messaging.journal.database import ForeignStateError, move_aside
from messaging.journal.folders import LocalFolder, journal_errors
from messaging.journal.frames import HEADER_BYTES
from messaging.journal.identity import (
    CHECK,
    FORMAT,
    KIND,
    Identity,
    check_key,
    is_sound,
    keys_in,
    new_identity,
    sealed,
)
from messaging.journal.log import META, Log
from messaging.journal.records import FORMAT as RECORDS
from messaging.journal.state import State

#: the characters of the file
_CHARACTERS: Final = (string.digits + string.ascii_letters + string.punctuation + " \n").encode()


def repair(path: str | Path) -> str:
    """Restore the identity of a journal that no process has open; return what was done, as a text for people.

    One changed character is restored. Otherwise a journal of messages gets a new identity, with all its records. The
    damaged file is kept beside it. A ``state.db`` of another journal is moved aside.

    Args:
        path: its folder; a journal of messages, or of a Spark query.

    Raises:
        JournalLockedError: a process has the journal open.
        JournalUnreadableError: the folder holds no journal, or its identity cannot be restored.
        JournalError: ``state.db`` cannot be read now, as on a full disk; nothing was changed.
    """
    folder = LocalFolder(str(check_path("path", path)), private=True)
    with journal_errors(folder, "cannot repair", JournalUnreadableError):
        files = folder.list()
        partitions = folder.partitions() if files else []
        if META not in files and not partitions:
            raise folder.error(JournalUnreadableError, f"there is no journal: no file {META}")
        with folder.lock(with_folder=True):
            text = bytes(folder.read(META, copy=True)) if META in files else b""
            keys = Counter(keys_in(folder, partitions))
            key = max(keys, key=lambda each: keys[each], default=None)
            if _values_of(text, key) is not None:
                found = Identity.of(json.loads(text)).key
                check_key(folder, found, partitions)
                return _moved_state(folder, found) or f"{META} is intact; nothing was changed"
            new = _restored(text, key)
            if new is not None:
                done = f"one character of {META} was wrong and is restored"
            else:
                new, done = _replaced(folder, text, key)
            moved = _moved_state(folder, Identity.of(json.loads(new)).key)  # first: it may be unreadable
            kept = f"{META}.damaged-{clock.wall_ns()}"
            folder.write(kept, [text])
            folder.write(META, [new])
            return f"{done}; the file of before is {kept}" + (f"; {moved}" if moved else "")


def _moved_state(folder: LocalFolder, key: int) -> str:
    """Move the database of another journal aside; return what was done."""
    path = Path(folder.path)
    if not (path / STATE).exists():
        return ""
    try:
        State(path, writable=False, key=key).close()
    except ForeignStateError:
        moved = move_aside(path, "foreign")
        return f"{STATE} was that of another journal and is now {moved}; cursors begin with the oldest record"
    except JournalCorruptError:
        pass  # it is replaced by the next writer
    return ""


def _values_of(text: bytes, key: int | None) -> dict[str, Any] | None:
    """Return the values in the text of a file, or ``None`` if it is damaged.

    Args:
        text: of the file.
        key: of the segments; ``None``: they tell none.
    """
    try:
        values = json.loads(text)
        identity = Identity.of(values)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None
    if identity.format != FORMAT or not is_sound(values) or key not in (None, identity.key):
        return None
    if CHECK in values:
        return values  # type: ignore[no-any-return]
    is_known = identity.kind == KIND or ("kind" not in values and "source" in values)
    return values if is_known else None


def _restored(text: bytes, key: int | None) -> bytes | None:
    """Return the text that differs from ``text`` in one character and is that of an identity, if one is certain."""
    found: list[tuple[bytes, dict[str, Any]]] = []
    for at in range(len(text)):
        for character in _CHARACTERS:
            changed = text[:at] + bytes([character]) + text[at + 1 :]
            values = _values_of(changed, key)
            # without a checksum only a key can tell that a character is the right one
            if values is not None and (CHECK in values or key is not None):
                found.append((changed, values))
    # another change than that of the checksum would only hide that it does not fit
    found = [each for each in found if CHECK in each[1]] or found
    if found and (found[0][1].get("kind") == KIND or all(values == found[0][1] for _, values in found)):
        return found[0][0]
    return None


def _replaced(folder: LocalFolder, text: bytes, key: int | None) -> tuple[bytes, str]:
    """Return a file for the key of the segments, and what that changes."""
    try:
        values = json.loads(text)
        identity = values["id"] if isinstance(values["id"], str) else None
    except (ValueError, TypeError, KeyError, RecursionError):
        values, identity = {}, None
    if key is not None and identity is not None and "source" in values:
        rest = {name: value for name, value in values.items() if name not in (CHECK, "key")}
        done = f"the id of {META} was wrong and names the right segments again; its other values are as they were"
        return sealed({**rest, "format": FORMAT, "key": key}), done
    if key is None or not _holds_records(folder):
        raise folder.error(
            JournalUnreadableError,
            f"{META} cannot be restored from the segments: put a copy of it in its place. Nothing was changed",
        )
    return new_identity(key), f"{META} could not be restored: a new one names the segments again"


def _holds_records(folder: LocalFolder) -> bool:
    """Return whether the segments are those of a journal of messages."""
    log = Log(folder)
    names = (log.segment_name(segment) for segment, size in log.list_segments() if size)
    return any(RECORDS in bytes(folder.read(name, 0, HEADER_BYTES + len(RECORDS))) for name in names)
