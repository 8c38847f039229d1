"""What the failure of a notification means for its event, and for the delivery to the listener."""

from __future__ import annotations

import enum
from typing import Final

from messaging.errors import (
    ArgumentError,
    CodecError,
    ConversionError,
    InvalidEventError,
    ListenerGoneError,
    MessagingError,
    ReplyError,
    UnknownEventError,
)

#: exceptions of listeners in other processes that refuse the value, not the time
_REFUSALS: Final = frozenset({"ValueError", "TypeError"})


class Disposition(enum.Enum):
    """What a sender does after a notification failed."""

    #: drop the event, and send no further events of its kind (EV.2.3.3)
    UNKNOWN_EVENT = "unknown event"
    #: keep the event, and stop the delivery: the listener does not exist any more
    GONE = "gone"
    #: drop the event, and go on with the next one: the listener refuses the event itself
    BAD_EVENT = "bad event"
    #: keep the event, and try again: whether the listener got it is not known, or it cannot take it now
    RETRY = "retry"


def disposition(error: MessagingError) -> Disposition:
    """Return what a sender does after ``error``."""
    if isinstance(error, UnknownEventError):
        return Disposition.UNKNOWN_EVENT
    if isinstance(error, ListenerGoneError):
        return Disposition.GONE
    if isinstance(error, (InvalidEventError, ArgumentError, CodecError, ConversionError)):
        return Disposition.BAD_EVENT
    if isinstance(error, ReplyError) and error.kind in _REFUSALS:
        return Disposition.BAD_EVENT
    return Disposition.RETRY


def as_failure(error: BaseException) -> MessagingError:
    """Return the exception of a listener as a failure of the notification."""
    if isinstance(error, MessagingError):
        return error
    # classes of subclasses are not known to senders in other processes
    name = type(error).__name__
    kind = next((each.__name__ for each in (ValueError, TypeError) if isinstance(error, each)), name)
    return ReplyError(kind, f"{'' if kind == name else f'{name}: '}{error}"[:500])
