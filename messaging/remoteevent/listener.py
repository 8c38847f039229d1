"""The listener of remote events (EV.2.3.1), how senders pass events to it, and what its failures mean."""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, Any, Final, Protocol, runtime_checkable

from messaging.errors import (
    ArgumentError,
    CodecError,
    ConversionError,
    DeadlineError,
    InvalidEventError,
    ListenerGoneError,
    MessagingError,
    ReplyError,
    UnknownEventError,
)
from messaging.execution import result_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from messaging.execution import Promise
    from messaging.remoteevent.event import RemoteEvent


#: the outcome of a notification: ``None`` if the listener returned, otherwise the failure
Outcome = MessagingError | None


@runtime_checkable
class RemoteEventListener(Protocol):
    """Receives notifications of events (EV.2.3.1)."""

    def notify(self, event: RemoteEvent, /) -> Any:
        """Note the event, and return soon (EV.2.3.2).

        Returning acknowledges the notification. The same event may arrive again: source, id and sequence number tell.

        Raises:
            UnknownEventError: the listener has no interest in this kind of event: the sender drops the event, sends no
                further ones of the kind, and may cancel the registration (EV.2.3.3).
            ListenerGoneError: the listener does not exist any more: the sender stops the delivery.
            ValueError, TypeError, DecodeError: the event itself is unusable: the sender drops it.
            Exception: any other one: the sender tries again, as its policy says.
        """


@runtime_checkable
class EventTarget(Protocol):
    """Takes several events at a time: third parties and stubs of listeners (EV.3.4).

    Events that are passed together travel in one request, and are stored with one sync of the disk.
    """

    def deliver(self, events: Sequence[RemoteEvent], /) -> Promise[list[Outcome]]:
        """Notify of events, in order. It returns soon and does not raise. On any thread that may block for moments.

        Callers have one batch of a stream under way at a time: with two, a failure of the first would change the order.

        Args:
            events: at least one.

        Returns:
            The promise of the outcomes of the first events, one for each. The list ends behind the first failure whose
            disposition is ``RETRY`` or ``GONE``, and where the target takes no more at once: later events were not
            tried. It has at least one outcome. The promise never fails, and has a deadline.
        """


class WantedEvents(list["RemoteEvent"]):
    """Events of one delivery that may stop being wanted before all are passed: their lease ends, say (EV.2.1).

    A target that passes events one by one looks between two of them; see :func:`wanted_test`.

    Args:
        events: the events.
        is_wanted: returns whether the rest of them is still to be passed. Quick; on any thread.
    """

    __slots__ = ("is_wanted",)

    def __init__(self, events: Iterable[RemoteEvent], is_wanted: Callable[[], bool]) -> None:
        super().__init__(events)
        self.is_wanted = is_wanted


class WithdrawnError(DeadlineError):
    """The events stopped being wanted before the first one was passed. It counts against neither event nor listener."""


def wanted_test(events: Sequence[RemoteEvent]) -> Callable[[], bool]:
    """Return the function that tells whether the rest of ``events`` is still to be passed."""
    return events.is_wanted if isinstance(events, WantedEvents) else _always


def _always() -> bool:
    return True


def outcomes_of(promise: Promise[list[Outcome]]) -> list[Outcome]:
    """Return the outcomes that a target promised: at least one, also if its answer is not as it must be."""
    error = promise.exception(0)
    if error is not None:
        return [error]
    outcomes = promise.result(0)
    if not isinstance(outcomes, list) or not outcomes:
        return [DeadlineError("the listener returned no outcome")]
    return outcomes


class BatchListener:
    """Base of listeners that take several events at a time: they define ``deliver``, and ``notify`` is made of it."""

    def deliver(self, events: Sequence[RemoteEvent], /) -> Promise[list[Outcome]]:
        """See :class:`EventTarget`."""
        raise NotImplementedError

    def notify(self, event: RemoteEvent, /) -> None:
        """Notify of one event, and wait for its outcome.

        Raises:
            UnknownEventError, ListenerGoneError: see :class:`RemoteEventListener`.
            MessagingError: the notification failed otherwise.
            WouldBlockError: the thread runs an event loop: ``await`` :meth:`deliver`. Nothing was done.
        """
        outcome = result_of(lambda: self.deliver([event]), "the listener", "`await` deliver([event])")[0]
        if outcome is not None:
            raise outcome


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
