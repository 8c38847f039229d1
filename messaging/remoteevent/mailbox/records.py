"""The folder of a mailbox: the records of its registrations with their options, and the folders of their boxes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from messaging.errors import ArgumentError, DecodeError, MessagingError
from messaging.errors.text import SafeLog
from messaging.leases import StoredTime, seconds_of
from messaging.remoteevent.event import check_kind
from messaging.remoteevent.mailbox.box import BOX_FULL, KEEP
from messaging.remoteevent.party import REGISTRATION, PartyFolder

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from messaging.remoteevent.event import EventKind

logger = SafeLog(__name__)


class MailboxFolder(PartyFolder):
    """The folder of a mailbox; see ``mailbox``."""

    def box(self, registration_id: str) -> Path:
        """Return the folder of the box of a registration."""
        return self.path / "boxes" / registration_id

    def boxes(self) -> Iterable[Path]:
        """Return the folders of all boxes."""
        boxes = self.path / "boxes"
        return [*boxes.iterdir()] if boxes.is_dir() else []

    def malformed(self) -> set[str]:
        """Return the ids of the registrations whose records are malformed."""
        found: set[str] = set()
        for key in self.table.keys_with(REGISTRATION):
            try:
                check_record(self.table.get(key))
            except (MessagingError, KeyError, TypeError, ValueError) as error:
                name = key.removeprefix(REGISTRATION)
                logger.warning("%s: the record of registration %r is malformed: %s", self.title, name, error)
                found.add(name)
        return found

    def set_aside(self, folder: Path) -> None:
        """Keep the events of a registration whose record is malformed."""
        place = self.path / "damaged" / folder.name
        try:
            place.parent.mkdir(exist_ok=True)
            folder.rename(place)
        except OSError as error:
            place = folder
            logger.warning("%s: %s is not moved: %s", self.title, folder, error)
        logger.warning(
            "%s: the events of registration %r are kept in %s; read them with `messaging journal`",
            self.title, folder.name, place,
        )  # fmt: skip

    def target(self, reference: Any) -> Any:
        """Return the target of a stored reference; ``None`` if it is not there in this run."""
        if reference is None:
            return None
        try:
            return self.listener(reference)
        except MessagingError as error:
            logger.warning("%s: delivery does not resume: %s; events are stored", self.title, error)
            return None


def check_bound(name: str, value: object) -> None:
    """Raise ``ArgumentError`` if an option is no bound."""
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
        raise ArgumentError(f"{name} must be an int from 1, or None, not {value!r:.80}")


def check_choice(name: str, value: object, known: tuple[str, ...]) -> None:
    """Raise ``ArgumentError`` if an option has none of the known values."""
    if not isinstance(value, str) or value not in known:
        raise ArgumentError(f"{name} must be one of {', '.join(known)}, not {value!r:.80}")


def check_record(values: Any) -> None:
    """Raise an error if the record of a registration is malformed."""
    lease_id, duration, end = values["lease"]
    if not isinstance(lease_id, str):
        raise DecodeError("the id of its lease is no text")
    seconds_of(duration)
    StoredTime.from_value(end)
    check_choice("keep", values["keep"], KEEP)
    check_choice("full", values["full"], BOX_FULL)
    check_bound("max_events", values["max_events"])
    kinds_of(values["refused"])


def kinds_of(value: Any) -> frozenset[EventKind]:
    """Return the refused kinds of a record. Raises ``TypeError``, ``InvalidEventError``."""
    return frozenset(check_kind(*each) for each in value)
