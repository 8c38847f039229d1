"""Pulling the events out of a mailbox: by its owner, whenever that is awake (EV.3.3).

**Taking.** An event that was handed out counts as taken with the next call: of ``next``, ``batch`` or ``close``. A
program that is killed before gets it again, from its next iterator. Over the network, events travel up to 256 at a
time; each call asks the mailbox whether the iterator is still valid. ``batch`` asks once for many events.

**Switching.** When another reader takes the place of an iterator, the iterator hands out nothing further: events that
it has read ahead stay in the mailbox for the other reader. The events that it has handed out are acknowledged.
"""

from __future__ import annotations

import secrets
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final, Protocol

from messaging.errors import ArgumentError, DeadlineError, InvalidIteratorError, MessagingError
from messaging.errors.text import SafeLog, brief
from messaging.execution import Closeable, Promise, Serial, clock, engine, may_block, refuse_in_loop
from messaging.remoteevent.event import RemoteEvent
from messaging.remoteevent.listener import check_wait
from messaging.remoteevent.mailbox.box import Entry
from messaging.remoteevent.mailbox.open_boxes import BoxSlot

logger = SafeLog(__name__)

#: events that are taken from the box at a time
READ_AHEAD: Final = 256
#: longest wait of one call to a mailbox in another process, seconds
LONG_POLL: Final = 10.0
#: how long a call without a timeout waits for the target that has the events of the last delivery, seconds
BATCH_WAIT: Final = 5.0


class Fetch(Protocol):
    """How an iterator gets events: from a box of this process, or of another one."""

    def __call__(self, ticket: int | None, most: int, timeout: float, /) -> Promise[list[Entry]]:
        """Acknowledge the events up to a ticket, and promise the next ones: none after ``timeout`` seconds."""


def new_token() -> str:
    """Return a token for an iterator, which no other iterator of any run has."""
    return secrets.token_hex(8)


class RemoteEventIterator(Closeable):
    """Takes the stored events of one registration, in order. For one thread at a time.

    An iterator, which waits for events as long as its registration lasts, and a context manager, which closes it.

    Args:
        fetch: gets the events.
        acknowledge: acknowledges at once, where that costs no request.
        longest: longest wait of one fetch, seconds.
        token: identifies the iterator at its mailbox.
    """

    def __init__(
        self,
        fetch: Fetch,
        acknowledge: Callable[[int], object] | None = None,
        longest: float = LONG_POLL,
        token: str = "",
    ) -> None:
        self.token = token
        self._fetch = fetch
        self._acknowledge = acknowledge
        self._longest = longest
        self._using = threading.Lock()  # held by the thread that takes events
        self._lock = threading.Lock()  # guards the following; acquired after the lock of the registration
        self._ready: deque[Entry] = deque()
        #: of the last event that was handed out, and was not acknowledged
        self._handed: int | None = None
        #: another reader takes over: nothing is handed out
        self._is_over = False
        self._is_closed = False

    def next(self, timeout: float = 0.0) -> RemoteEvent | None:
        """Return the next event, or ``None`` if there is none within ``timeout`` seconds; may be called again then.

        A failed call changes nothing: the next one returns the next event.

        Raises:
            ArgumentError: ``timeout`` is negative, or no number.
            InvalidIteratorError: a newer iterator, or delivery to a target, took the place of this one; also while
                waiting.
            UnknownLeaseError: the registration has ended; also while waiting.
            ClosedError: the mailbox or the iterator is closed; also while waiting.
            DeadlineError: without a timeout: a target still has the last batch of the delivery, and has not answered
                within 5 s.
            WouldBlockError: the thread runs an event loop: ``await`` :meth:`next_soon`.
        """
        limit = check_wait(timeout)
        if not may_block() and (not self._ready or self._acknowledge is None):
            refuse_in_loop("the next event of a mailbox", "`await` next_soon()")
        with self._using:
            found = self._take(1, limit)
        return found[0] if found else None

    def batch(self, most: int = READ_AHEAD, timeout: float = 0.0) -> list[RemoteEvent]:
        """Return up to ``most`` events; none if there is none within ``timeout`` seconds. Raises as :meth:`next`."""
        if isinstance(most, bool) or not isinstance(most, int) or most < 1:
            raise ArgumentError(f"most must be an int from 1, not {most!r:.80}")
        limit = check_wait(timeout)
        if not may_block():
            refuse_in_loop("the events of a mailbox", "`await` next_soon()")
        with self._using:
            return self._take(most, limit)

    async def next_soon(self, timeout: float = 0.0) -> RemoteEvent | None:
        """As :meth:`next`, for event loops."""
        limit = check_wait(timeout)
        for handed, step in self._steps(limit):
            entries = await self._fetch(handed, READ_AHEAD if step is not None else 0, step or 0.0)
            self._note(handed, entries)
        found = self._hand_out(1)
        return found[0] if found else None

    def _take(self, most: int, limit: float) -> list[RemoteEvent]:
        for handed, step in self._steps(limit):
            promise = self._fetch(handed, max(most, READ_AHEAD) if step is not None else 0, step or 0.0)
            promise.was_retrieved = True  # an interrupt may end the wait
            self._note(handed, promise.result())
        return self._hand_out(most)

    def _steps(self, limit: float) -> Iterator[tuple[int | None, float | None]]:
        """Yield the fetches that it takes to have events: the ticket to acknowledge, and the seconds to wait.

        Without a time, the fetch only acknowledges, and tells whether the iterator is still valid.
        """
        if self._is_closed:
            raise InvalidIteratorError("the iterator is closed")
        if self._is_over or self._ready or (self._acknowledge is not None and self._handed is not None):
            yield (None if self._is_over else self._handed), None
        self._refuse_over()
        deadline = clock.monotonic() + limit
        step = min(limit, self._longest)
        while not self._ready:
            yield self._handed, step
            self._refuse_over()
            step = min(deadline - clock.monotonic(), self._longest)
            if step <= 0:
                return

    def _note(self, handed: int | None, entries: list[Entry]) -> None:
        """Note the events of a fetch that has acknowledged ``handed``."""
        with self._lock:
            if handed is not None and self._handed == handed:
                self._handed = None
            if not self._is_over:
                self._ready.extend(entries)

    def _hand_out(self, most: int) -> list[RemoteEvent]:
        found: list[RemoteEvent] = []
        with self._lock:
            self._refuse_over()
            while self._ready and len(found) < most:
                ticket, event = self._ready.popleft()
                self._handed = ticket
                found.append(event)
        return found

    def _refuse_over(self) -> None:
        if self._is_over:
            raise InvalidIteratorError("another reader took the place of this iterator")

    # --- for registrations

    def surrender(self) -> None:
        """Acknowledge the last event that was handed out: another reader takes over. On any thread."""
        handed = self.suspend()
        if handed is not None and self._acknowledge is not None:
            try:
                self._acknowledge(handed)
            except MessagingError as error:
                logger.warning(
                    "mailbox iterator %s: the events that it has handed out are not acknowledged: %s; "
                    "the next reader gets them again", self.token, error,
                )  # fmt: skip

    def suspend(self) -> int | None:
        """Hand out nothing further until :meth:`resume`; return the ticket to acknowledge. On any thread."""
        with self._lock:
            self._is_over = True
            self._ready.clear()
            return self._handed

    def resume(self) -> None:
        """Go on after :meth:`suspend`, because no other reader may have taken over: the mailbox tells."""
        with self._lock:
            self._is_over = False

    # --- iterating and closing

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
            if self._acknowledge is None:  # at a mailbox in another process
                refuse_in_loop("the end of an iterator", "close it on a worker thread")
            with self._lock:
                handed = None if self._is_over else self._handed
            promise = self._fetch(handed, 0, 0.0)
            promise.was_retrieved = True
            self._note(handed, promise.result())
            self._is_closed = True


@dataclass(slots=True, eq=False)
class WaitingFetch:
    """A fetch that waits for events."""

    token: str
    most: int
    promise: Promise[list[Entry]]
    #: whether it waits for events; otherwise only for the outcomes of the last batch of the delivery
    is_patient: bool


class Pulling:
    """The pulling of the events of one box: the newest iterator, and the fetches that wait. Thread safe.

    Args:
        slot: the box.
        lock: of the registration; guards the iterator, and what it has. The methods acquire it unless they say so.
        ended: returns why the registration has ended; ``None`` before.
    """

    def __init__(self, slot: BoxSlot, lock: Any, ended: Callable[[], MessagingError | None]) -> None:
        self._slot = slot
        self._ended = ended
        #: promise that no target has events of the last delivery any more
        self.stopping: Promise[None] | None = None
        self._switching = lock
        self._iterator: RemoteEventIterator | None = None
        #: begins all tokens of this run
        self._run = new_token()
        #: of the newest iterator
        self._token = f"{self._run}{new_token()}"
        #: last ticket that it has, and has not acknowledged
        self.ticket: int | None = None
        self._is_woken = False
        self._waker = Serial(self._wake_later, lambda: self._is_woken)
        self._lock = threading.Lock()  # guards the following
        #: fetches by token: at most one of each iterator
        self._waiting: dict[str, WaitingFetch] = {}

    # --- iterators

    def begin(self, make: Callable[[str], RemoteEventIterator | None]) -> str:
        """Begin an iterator, which ``make`` makes of its token; return the token. With the lock."""
        self.end()
        self._iterator = make(self._token)
        return self._token

    def end(self) -> None:
        """Make the iterator invalid. With the lock."""
        self._token = f"{self._run}{new_token()}"
        self.ticket = None
        self.surrender()

    def surrender(self) -> None:
        """Have the iterator acknowledge what it has handed out, and hand out nothing further. With the lock."""
        iterator, self._iterator = self._iterator, None
        if iterator is not None:
            iterator.surrender()

    def acknowledge(self, ticket: int) -> None:
        """Acknowledge the events up to a ticket."""
        with self._slot.using() as box:
            box.acknowledge(ticket)
        if self.ticket is not None and ticket >= self.ticket:
            self.ticket = None

    def note_taken(self, token: str, ticket: int) -> None:
        """Acknowledge the events up to a ticket, because another reader takes over; nothing without such an iterator.

        Raises ``JournalError``, ``ClosedError``.
        """
        with self._switching:
            if token == self._token and self._ended() is None:
                self.acknowledge(ticket)

    # --- fetches

    def _refusal(self, token: str) -> MessagingError | None:
        """Return why an iterator gets no more events; ``None`` if it does."""
        error = self._ended()
        if error is None and not token.startswith(self._run):
            error = InvalidIteratorError(
                "the iterator is of an earlier run of the mailbox: get a new one with remote_events()"
            )
        elif error is None and token != self._token:
            error = InvalidIteratorError("a newer iterator, or delivery to a target, took the place of this iterator")
        return error

    def _accept(self, token: str, ticket: int | None) -> None:
        """Acknowledge the events up to a ticket, if the iterator is valid; otherwise raise its error."""
        with self._switching:
            error = self._refusal(token)
            if error is not None:
                raise error
            if ticket is not None:
                self.acknowledge(ticket)

    def _read(self, token: str, most: int) -> list[Entry] | None:
        """Return the first events, for an iterator; ``None`` while a target has some of them."""
        stopping = self.stopping
        if stopping is not None and not stopping.done():
            return None
        with self._slot.using() as box:
            entries = box.first(most)
            with self._switching:
                if entries and token == self._token:
                    self.ticket = entries[-1][0]
        return entries

    def fetch(self, token: str, ticket: int | None, most: int, timeout: float) -> Promise[list[Entry]]:
        """See :class:`Fetch`, for the iterator with a token. On a thread that may wait for the disk.

        An earlier fetch of the iterator that still waits gets no events.
        """
        promise: Promise[list[Entry]] = Promise("fetch events of a mailbox")
        promise.was_retrieved = True
        found: list[Entry] | None = []
        try:
            self._accept(token, ticket)
            if most:
                found = self._read(token, most)
        except MessagingError as error:
            promise.reject(error)
            return promise
        if found or not most or (timeout <= 0 and found is not None):
            promise.resolve(found or [])
            return promise
        entry = WaitingFetch(token, most, promise, is_patient=timeout > 0)
        with self._lock:
            earlier = self._waiting.get(token)
            self._waiting[token] = entry
        if earlier is not None:
            earlier.promise.resolve([])
        running = engine()
        running.call(
            lambda: clock.call_later(running.loop, timeout if timeout > 0 else BATCH_WAIT, self._expire, entry)
        )
        self.wake()  # an event may have been stored in between
        return promise

    def _expire(self, entry: WaitingFetch) -> None:
        """End the wait of a fetch. On the loop of the engine."""
        if self._remove(entry):
            if entry.is_patient:
                entry.promise.resolve([])
            else:
                entry.promise.reject(
                    DeadlineError(
                        "the target that the delivery had has not answered for its last events: they, and those behind "
                        "them, can be taken when it has"
                    )
                )

    def _remove(self, entry: WaitingFetch) -> bool:
        with self._lock:
            if self._waiting.get(entry.token) is entry:
                del self._waiting[entry.token]
                return True
        return False

    @property
    def is_waiting(self) -> bool:
        """Whether a fetch waits."""
        return bool(self._waiting)

    def __len__(self) -> int:
        """Return the number of fetches that wait."""
        return len(self._waiting)

    def wake_soon(self) -> None:
        """As :meth:`wake`, on a worker thread."""
        self._is_woken = True
        self._waker.wake()

    def _wake_later(self) -> None:
        self._is_woken = False
        self.wake()

    def wake(self) -> None:
        """Look again: events were stored, or an iterator gets no more of them. On a thread that may block."""
        with self._lock:
            entries = [*self._waiting.values()]
        for entry in entries:
            error = self._refusal(entry.token)
            found: list[Entry] | None = None
            if error is None:
                try:
                    found = self._read(entry.token, entry.most)
                except MessagingError as failure:
                    error = failure
            is_answered = bool(found) or (found is not None and not entry.is_patient)
            if (error is not None or is_answered) and self._remove(entry):
                if error is not None:
                    entry.promise.reject(error)
                else:
                    entry.promise.resolve(found or [])


def checked_most(most: int | None) -> None:
    """Raise ``ArgumentError`` unless ``most`` is a number of events from 0, or ``None``."""
    if most is not None and (isinstance(most, bool) or not isinstance(most, int) or not 0 <= most <= sys.maxsize):
        raise ArgumentError(f"most must be an int from 0, or None, not {brief(most)}")
