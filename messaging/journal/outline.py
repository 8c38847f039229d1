"""The outline of any journal: what :func:`~messaging.journal.Journal.view` tells, also of Spark's journals."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from messaging.errors import JournalUnreadableError, check_path
from messaging.journal.folders import LocalFolder, journal_errors
from messaging.journal.identity import KIND, Identity, read_kind
from messaging.journal.journal import Journal
from messaging.journal.log import META, Log

if TYPE_CHECKING:
    from pathlib import Path


def outline(path: str | Path) -> dict[str, Any]:
    """Return kind, id, sizes and offsets of a journal; of a journal of messages also cursors, drops and damage.

    Args:
        path: its folder; a journal of messages, or of a Spark query.

    Raises:
        JournalUnreadableError: the folder holds no journal, or cannot be read.
        JournalCorruptError: the journal of a Spark query is damaged.
    """
    folder = LocalFolder(str(check_path("path", path)))
    with journal_errors(folder, "cannot read", JournalUnreadableError):
        found = read_kind(folder)
        if found is None:
            raise folder.error(JournalUnreadableError, f"there is no journal: no file {META}")
        if found.kind != KIND:
            return _of_other(folder, found)
    with Journal.view(path) as view:
        info = view.info()
    return {
        "path": info.path,
        "kind": KIND,
        "id": info.id,
        "segments": info.segments,
        "bytes": info.bytes,
        "partitions": [{"partition": 0, "begin": info.begin, "end": info.end}],
        "cursors": info.cursors,
        "dropped": info.dropped,
        "dead_letters": info.dead_letters,
        "damage": [each._asdict() for each in info.damage],
    }


def _of_other(folder: LocalFolder, identity: Identity) -> dict[str, Any]:
    partitions: list[dict[str, int]] = []
    segments = size = 0
    for number in folder.partitions():
        log = Log(folder, number, seed=identity.seed(number))
        log.load()
        partitions.append({"partition": number, "begin": log.begin, "end": log.end})
        files = log.list_segments()
        segments += len(files)
        size += sum(each for _, each in files)
    return {
        "path": folder.path, "kind": identity.kind, "id": identity.id, "segments": segments, "bytes": size,
        "partitions": partitions, "damage": [],
    }  # fmt: skip
