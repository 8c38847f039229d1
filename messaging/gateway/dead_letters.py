"""Dead letters of a route: messages that the pipeline or the target cannot handle, kept with the reason.

A dead letter of the stage ``source`` is the message as it was received: its pipeline failed. One of the stage
``target`` is the message as it would have been published. A replay runs the rest of the route again, by the present
configuration; the dead letter is removed when what comes out of it is on the disk.

**Threads.** Everything runs on the calling thread, and may wait for the disk.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, NamedTuple

from messaging.gateway.buffer import ROUTES_FOLDER
from messaging.journal import DeadLetter, JournalView
from messaging.services import LdapFilter

SOURCE: Final = "source"
TARGET: Final = "target"


class Letter(NamedTuple):
    """A dead letter of a route.

    Attributes:
        id: identifies it in its route; later ones have larger ids.
        stage: ``source`` or ``target``, see the module.
        at: when it became a dead letter, seconds since the epoch.
        channel: of the message.
    """

    id: int
    stage: str
    at: float
    reason: str
    channel: str
    message_id: str | None
    payload: bytes
    #: the context, as :func:`messaging.model.stored_properties` writes it
    properties: str

    @classmethod
    def of(cls, found: DeadLetter) -> Letter:
        """Return what a journal has kept. Raises ``ValueError``: it is no record."""
        record = found.stored
        stage = SOURCE if found.offset < 0 else TARGET
        return cls(
            found.id, stage, found.at, found.reason, record.channel, record.message_id, record.payload,
            record.properties,
        )  # fmt: skip

    def fields(self) -> dict[str, Any]:
        """Return what filters and lists show: all but payload and properties."""
        return {
            "id": self.id,
            "stage": self.stage,
            "time": datetime.fromtimestamp(self.at, UTC).isoformat(timespec="milliseconds"),
            "reason": self.reason,
            "channel": self.channel,
            "message_id": self.message_id,
            "bytes": len(self.payload),
        }


class Selection:
    """Which dead letters are meant: ids, or an LDAP filter over ``id stage time reason channel message_id bytes``.

    Args:
        ids: only these; empty: all.
        where: text of the filter; ``None``: all.

    Raises:
        InvalidFilterError: the filter does not parse.
    """

    def __init__(self, ids: Iterable[int] = (), where: str | None = None) -> None:
        self.ids = frozenset(ids)
        self.where = where
        self._filter = None if where is None else LdapFilter.parse(where)

    def matches(self, letter: Letter) -> bool:
        """Return whether a dead letter is meant."""
        if self.ids and letter.id not in self.ids:
            return False
        return self._filter is None or self._filter.matches(
            {name: value for name, value in letter.fields().items() if value is not None}
        )


def letters(journal: JournalView, selection: Selection) -> Iterator[Letter]:
    """Yield the dead letters of a journal that are meant, the oldest first."""
    for found in journal.read_dead_letters():
        try:
            letter = Letter.of(found)
        except ValueError:
            letter = Letter(found.id, TARGET, found.at, f"{found.reason} (the record is damaged)", "?", None, b"", "")
        if selection.matches(letter):
            yield letter


class ReplayResult(NamedTuple):
    """The outcome of a replay: dead letters that were stored again, and that failed again, with the last reason."""

    replayed: int
    failed: int
    reason: str | None


def route_folders(data: Path) -> Mapping[str, Path]:
    """Return the folders of routes with a buffer in the data folder of a gateway, by name."""
    folder = data / ROUTES_FOLDER
    if not folder.is_dir():
        return {}
    return {each.name: each for each in sorted(folder.iterdir()) if each.is_dir()}
