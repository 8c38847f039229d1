"""Snapshots of a journal, and its reporter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from messaging.errors import ArgumentError
from messaging.services.reporting import PartReporter, counter, gauge, info, label, part


@dataclass(frozen=True, slots=True)
class CursorDTO:
    """A snapshot of a cursor."""

    name: str = field(metadata=label("cursor"))
    position: int = field(metadata=gauge("offset of the first record that the cursor has not acknowledged"))
    behind: int = field(metadata=gauge("records that the cursor has not acknowledged", "records"))


@dataclass(frozen=True, slots=True)
class JournalDTO:
    """A snapshot of an open journal."""

    path: str = field(metadata=info())
    begin: int = field(metadata=gauge("offset of the oldest record"))
    end: int = field(metadata=gauge("offset after the newest record: records since the journal was created"))
    segments: int = field(metadata=gauge("files with records"))
    bytes: int = field(metadata=gauge("bytes of the files with records", "bytes"))
    unstored: int = field(metadata=gauge("records that wait to be written", "records"))
    backlog: int = field(metadata=gauge("records that the slowest cursor has not acknowledged", "records"))
    backlog_bytes: int = field(
        metadata=gauge("bytes of the records that the slowest cursor has not acknowledged", "bytes")
    )
    oldest: float = field(
        metadata=gauge("age of the oldest record that is not acknowledged; 0: there is none", "seconds")
    )
    max_bytes: int | None = field(metadata=gauge("bound of the backlog; absent: unlimited", "bytes"))
    max_records: int | None = field(metadata=gauge("bound of the backlog; absent: unlimited", "records"))
    dropped: int = field(
        metadata=counter("records that were dropped to make room, or for their age, since its creation", "records")
    )
    dead_letters: int = field(metadata=gauge("records that are kept as dead letters", "records"))
    cursors: tuple[CursorDTO, ...] = field(metadata=part("cursor"))


class _Journal(Protocol):
    """The journal, as its reporter needs it."""

    path: str

    def get_dto(self) -> JournalDTO:
        """Return a snapshot."""

    def problems(self) -> Sequence[str]:
        """Return why no record can be appended now."""


class JournalReporter(PartReporter):
    """Reports the state of an open journal; register it by :func:`messaging.services.reporting.register_reporter`.

    Args:
        journal: an open :class:`~messaging.journal.Journal`.
        name: distinguishes the journals of a program; by default the path of its folder.

    Raises:
        ArgumentError: an argument is not as described.
    """

    __slots__ = ()

    def __init__(self, journal: _Journal, name: str | None = None) -> None:
        if not callable(getattr(journal, "get_dto", None)) or not callable(getattr(journal, "problems", None)):
            raise ArgumentError(f"journal must be an open Journal, not {type(journal).__name__}")
        super().__init__("journal", journal.path if name is None else name, journal.get_dto, journal.problems)
