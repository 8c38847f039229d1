"""Where a generator keeps its numbers, its registrations and the events that wait: here in memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

from messaging.remoteevent.interests import Interest, MemoryQueue
from messaging.remoteevent.layout import NumberedLine

if TYPE_CHECKING:
    from messaging.execution import Promise
    from messaging.leases import GrantedLease, LeaseEnd
    from messaging.remoteevent.delivery import EventQueue
    from messaging.remoteevent.event import EventId, RemoteEvent

#: continues the lease of a registration of an earlier run, with the callback for its end
Grant = Callable[[Callable[["LeaseEnd"], Any]], "GrantedLease"]


class Storage(Protocol):
    """The state of one generator. The generator calls :meth:`add` with its lock; the other methods without."""

    def check(self, interest: Interest) -> None:
        """Raise ``ArgumentError`` if the registration cannot be kept."""

    def queue(self, interest: Interest) -> EventQueue:
        """Return the events that wait for a registration, whose lease is granted. With the lock of the generator."""

    def keep(self, interest: Interest) -> None:
        """Keep a registration over a restart. Raises ``JournalError``."""

    def forget(self, interest: Interest) -> None:
        """Forget a registration that has ended."""

    def prepare(self, event: RemoteEvent) -> Any:
        """Return what :meth:`add` needs of an event, beside its number. Raises ``InvalidEventError``."""

    def add(
        self,
        event: RemoteEvent,
        prepared: Any,
        interests: tuple[Interest, ...],
        promise: Promise[int],
        message_id: str | None,
        /,
    ) -> None:
        """Add a numbered event for these registrations. It must be quick.

        Raises:
            JournalFullError, ClosedError: it is not added; its number is free.
        """

    def added(self, interests: tuple[Interest, ...], promise: Promise[int], number: int) -> None:
        """Continue after :meth:`add`, without the lock."""

    def keep_transaction(self, name: str, events: list[RemoteEvent] | None) -> None:
        """Keep the events of a prepared transaction over a restart, or forget it. Raises ``JournalError``."""

    def transactions(self) -> Mapping[str, list[RemoteEvent]]:
        """Return the prepared transactions of earlier runs: their events that are not stored for listeners yet."""

    def is_stored(self, message_id: str, /) -> bool:
        """Return whether an event of such a transaction was published already, by its message id."""

    def recover(
        self,
        number: Callable[[EventId, int], object],
        interest: Callable[[Interest, Grant], object],
    ) -> None:
        """Pass on the numbers and the registrations of earlier runs."""

    def close(self, stopped: Iterable[Promise[None]] = ()) -> None:
        """Close, when the deliveries have stopped. Raises ``JournalError``."""


class MemoryStorage:
    """Keeps everything in memory.

    Args:
        max_pending: events that wait for one listener.
    """

    def __init__(self, max_pending: int) -> None:
        self._max_pending = max_pending

    def check(self, interest: Interest) -> None:
        """See :class:`Storage`."""

    def queue(self, interest: Interest) -> EventQueue:
        """See :class:`Storage`."""
        interest.queue = MemoryQueue(self._max_pending, interest.handback)
        return interest.queue

    def keep(self, interest: Interest) -> None:
        """See :class:`Storage`."""

    def forget(self, interest: Interest) -> None:
        """See :class:`Storage`."""

    def prepare(self, event: RemoteEvent) -> NumberedLine | None:
        """See :class:`Storage`."""
        return NumberedLine(event) if event.type_name is not None else None

    def add(
        self,
        event: RemoteEvent,
        prepared: Any,
        interests: tuple[Interest, ...],
        _promise: Promise[int],
        _message_id: str | None,
        /,
    ) -> None:
        """See :class:`Storage`."""
        if prepared is not None:
            event.keep_line(prepared.numbered(event.sequence_number))
        for each in interests:
            if each.queue is not None and each.queue.put(event):
                each.delivery.counts.overflowed += 1

    def added(self, interests: tuple[Interest, ...], promise: Promise[int], number: int) -> None:
        """See :class:`Storage`."""
        promise.resolve(number)
        for each in interests:
            each.delivery.wake()

    def keep_transaction(self, name: str, events: list[RemoteEvent] | None) -> None:
        """See :class:`Storage`."""

    def transactions(self) -> Mapping[str, list[RemoteEvent]]:
        """See :class:`Storage`."""
        return {}

    def is_stored(self, _message_id: str, /) -> bool:
        """See :class:`Storage`."""
        return False

    def recover(
        self,
        number: Callable[[EventId, int], object],
        interest: Callable[[Interest, Grant], object],
    ) -> None:
        """See :class:`Storage`."""

    def close(self, stopped: Iterable[Promise[None]] = ()) -> None:
        """See :class:`Storage`."""
