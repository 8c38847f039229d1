"""The records of the registrations of a mailbox, and the options in them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from messaging.errors import ArgumentError, DecodeError
from messaging.leases import StoredTime, seconds_of
from messaging.remoteevent.event import check_kind
from messaging.remoteevent.mailbox.box import BOX_FULL
from messaging.remoteevent.mailbox.registration import KEEP

if TYPE_CHECKING:
    from messaging.remoteevent.event import EventKind


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
