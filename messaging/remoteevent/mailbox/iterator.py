"""Pulling the events out of a mailbox: by its owner, whenever that is awake (EV.3.3).

**Taking.** An event that was handed out counts as taken with the next call: of ``next``, ``batch`` or ``close``. A
program that is killed before gets it again, from its next iterator. Over the network, events travel and are
acknowledged up to 256 at a time, so a killed program may get as many again; their numbers tell.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Final, Protocol, Self

from messaging.errors import ArgumentError, InvalidIteratorError, MessagingError
from messaging.execution import Promise, engine, may_block, refuse_in_loop, seconds

if TYPE_CHECKING:
    from messaging.remoteevent.event import RemoteEvent
    from messaging.remoteevent.mailbox.box import Entry

#: events that are taken from the box at a time
READ_AHEAD: Final = 256
#: longest wait of one call to a mailbox in another process, seconds
LONG_POLL: Final = 10.0


class Fetch(Protocol):
    """How an iterator gets events: from a box of this process, or of another one."""

    def __call__(self, ticket: int | None, most: int, timeout: float, /) -> Promise[list[Entry]]:
        """Acknowledge the events up to a ticket, and promise the next ones: none after ``timeout`` seconds."""


class RemoteEventIterator:
    """Takes the stored events of one registration, in order. For one thread at a time.

    An iterator, which waits for events as long as its registration lasts, and a context manager, which closes it.

    Args:
        fetch: gets the events.
        acknowledge: acknowledges at once, where that costs no request.
        longest: longest wait of one fetch, seconds.
    """

    def __init__(
        self, fetch: Fetch, acknowledge: Callable[[int], object] | None = None, longest: float = LONG_POLL
    ) -> None:
        self._fetch = fetch
        self._acknowledge = acknowledge
        self._longest = longest
        self._using = threading.Lock()  # held by the thread that takes events
        self._ready: deque[Entry] = deque()
        #: of the last event that was handed out, and was not acknowledged
        self._handed: int | None = None
        self._error: MessagingError | None = None
        self._is_closed = False

    def next(self, timeout: float = 0.0) -> RemoteEvent | None:
        """Return the next event, or ``None`` if there is none within ``timeout`` seconds; may be called again then.

        Raises:
            ArgumentError: ``timeout`` is negative, or no number.
            InvalidIteratorError: a newer iterator, or delivery to a target, took the place of this one; also while
                waiting.
            UnknownLeaseError: the registration has ended; also while waiting.
            ClosedError: the mailbox or the iterator is closed; also while waiting.
            WouldBlockError: the thread runs an event loop: ``await`` :meth:`next_soon`.
        """
        limit = _checked(timeout)
        if not self._ready and not may_block():
            refuse_in_loop("the next event of a mailbox", "`await` next_soon()")
        with self._using:
            found = self._take(1, limit)
        return found[0] if found else None

    def batch(self, most: int = READ_AHEAD, timeout: float = 0.0) -> list[RemoteEvent]:
        """Return up to ``most`` events; none if there is none within ``timeout`` seconds. Raises as :meth:`next`."""
        if isinstance(most, bool) or not isinstance(most, int) or most < 1:
            raise ArgumentError(f"most must be an int from 1, not {most!r:.80}")
        limit = _checked(timeout)
        if not may_block():
            refuse_in_loop("the events of a mailbox", "`await` next_soon()")
        with self._using:
            return self._take(most, limit)

    async def next_soon(self, timeout: float = 0.0) -> RemoteEvent | None:
        """As :meth:`next`, for event loops."""
        limit = _checked(timeout)
        self._refuse_closed()
        while not self._ready:
            step = min(limit, self._longest)
            handed, self._handed = self._handed, None
            self._ready.extend(await self._fetch(handed, READ_AHEAD, step))
            limit -= step
            if limit <= 0 or self._ready:
                break
        return self._hand_out(1)[0] if self._ready else None

    def surrender(self) -> None:
        """Acknowledge the last event that was handed out: another reader takes over. On any thread."""
        handed, self._handed = self._handed, None
        if handed is not None and self._acknowledge is not None:
            self._acknowledge(handed)
        self._ready.clear()

    def _take(self, most: int, limit: float) -> list[RemoteEvent]:
        self._refuse_closed()
        if self._acknowledge is not None and (self._handed is not None or self._ready):
            last, self._handed = self._handed, None
            self._fetch(last, 0, 0.0).result()  # it also tells whether the iterator is still valid
        while not self._ready:
            step = min(limit, self._longest)
            handed, self._handed = self._handed, None
            self._ready.extend(self._fetch(handed, max(most, READ_AHEAD), step).result())
            limit -= step
            if limit <= 0:
                break
        return self._hand_out(most)

    def _hand_out(self, most: int) -> list[RemoteEvent]:
        found: list[RemoteEvent] = []
        while self._ready and len(found) < most:
            ticket, event = self._ready.popleft()
            self._handed = ticket
            found.append(event)
        return found

    def _refuse_closed(self) -> None:
        if self._is_closed:
            raise InvalidIteratorError("the iterator is closed")

    def __iter__(self) -> Iterator[RemoteEvent]:
        while True:
            event = self.next(self._longest)
            if event is not None:
                yield event

    def close(self) -> None:
        """Acknowledge the last event, and end. Idempotent. Raises as :meth:`next`, but that a closed one is closed."""
        with self._using:
            if self._is_closed:
                return
            self._is_closed = True
            handed, self._handed = self._handed, None
        self._fetch(handed, 0, 0.0).result()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Fetches:
    """The fetches that wait for events of one box. Thread safe.

    Args:
        read: returns the first events.
        acknowledge: removes the events up to a ticket.
        refusal: returns why an iterator, by its number, gets no more events; ``None`` if it does.
    """

    def __init__(
        self,
        read: Callable[[int], list[Entry]],
        acknowledge: Callable[[int], object],
        refusal: Callable[[int], MessagingError | None],
    ) -> None:
        self._read = read
        self._acknowledge = acknowledge
        self._refusal = refusal
        self._lock = threading.Lock()  # guards the following
        self._waiting: list[tuple[int, int, Promise[list[Any]]]] = []

    def fetch(self, number: int, ticket: int | None, most: int, timeout: float) -> Promise[list[Entry]]:
        """See :class:`Fetch`, for the iterator with a number. On a thread that may block for the disk."""
        promise: Promise[list[Entry]] = Promise("fetch events of a mailbox")
        promise.looked_at = True
        try:
            error = self._refusal(number)
            if error is not None:
                raise error
            if ticket is not None:
                self._acknowledge(ticket)
            found = self._read(most) if most else []
        except MessagingError as error:
            promise.reject(error)
            return promise
        if found or not most or timeout <= 0:
            promise.resolve(found)
            return promise
        entry = (number, most, promise)
        with self._lock:
            self._waiting.append(entry)
        running = engine()
        running.call(lambda: running.loop.call_later(timeout, self._expire, entry))
        self.wake()  # an event may have been stored in between
        return promise

    def _expire(self, entry: tuple[int, int, Promise[list[Any]]]) -> None:
        if self._remove(entry):
            entry[2].resolve([])

    def _remove(self, entry: tuple[int, int, Promise[list[Any]]]) -> bool:
        with self._lock:
            if entry in self._waiting:
                self._waiting.remove(entry)
                return True
        return False

    @property
    def is_waiting(self) -> bool:
        """Whether a fetch waits."""
        return bool(self._waiting)

    def wake(self) -> None:
        """Look again: events were stored, or an iterator gets no more of them. On a thread that may block."""
        for entry in [*self._waiting]:
            number, most, promise = entry
            error = self._refusal(number)
            found: list[Entry] = []
            if error is None:
                try:
                    found = self._read(most)
                except MessagingError as failure:
                    error = failure
            if (error is not None or found) and self._remove(entry):
                if error is not None:
                    promise.reject(error)
                else:
                    promise.resolve(found)


def _checked(timeout: float) -> float:
    limit = seconds(timeout)
    if isinstance(timeout, bool) or limit < 0:
        raise ArgumentError(f"timeout must be a number of seconds from 0, not {timeout!r:.80}")
    return limit
