"""A small host and peer for tests of the simulated brokers: virtual timers, and a network without delay."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable


class FakeTimer:
    """A call that is due at :attr:`due`, in virtual seconds."""

    __slots__ = ("due", "function", "number")

    def __init__(self, due: float, number: int, function: Callable[[], object]) -> None:
        self.due = due
        self.number = number
        self.function: Callable[[], object] | None = function

    def cancel(self) -> None:
        """Drop the call. Idempotent."""
        self.function = None

    def __lt__(self, other: FakeTimer) -> bool:
        return (self.due, self.number) < (other.due, other.number)


class FakeHost:
    """Virtual time that only :meth:`advance` moves, and seeded chance.

    Args:
        seed: of :attr:`random`.

    Attributes:
        random: chance of the broker.
        notes: lines of the history, in order.
    """

    def __init__(self, seed: int = 0) -> None:
        self.random = random.Random(seed)
        self.notes: list[str] = []
        self._now = 0.0
        self._timers: list[FakeTimer] = []
        self._count = 0

    def now(self) -> float:
        """Return the virtual time in seconds."""
        return self._now

    def call_later(self, delay: float, function: Callable[[], object]) -> FakeTimer:
        """Call ``function`` when :meth:`advance` has moved the time by ``delay`` seconds."""
        self._count += 1
        timer = FakeTimer(self._now + delay, self._count, function)
        heapq.heappush(self._timers, timer)
        return timer

    def note(self, text: str) -> None:
        """Add a line to :attr:`notes`."""
        self.notes.append(text)

    def advance(self, seconds: float) -> None:
        """Move the time by ``seconds``; make the calls that fall due, each at its own time."""
        end = self._now + seconds
        while self._timers and self._timers[0].due <= end:
            timer = heapq.heappop(self._timers)
            function = timer.function
            if function is not None:
                self._now = max(self._now, timer.due)
                timer.function = None
                function()
        self._now = end

    @property
    def pending(self) -> int:
        """Return how many calls are still due."""
        return sum(timer.function is not None for timer in self._timers)


class FakePeer:
    """The broker's end of a connection: keeps what the broker sends.

    Args:
        name: for notes.

    Attributes:
        received: bytes that the client has not taken yet.
        closed: the broker sent FIN.
        aborted: the broker sent RST.
        backlog: the value of :attr:`unsent`, which a test sets to imitate a slow reader.
    """

    def __init__(self, name: str = "client-1") -> None:
        self.name = name
        self.received = bytearray()
        self.closed = False
        self.aborted = False
        self.backlog = 0

    def send(self, data: bytes) -> None:
        """Keep ``data`` for the client.

        Raises:
            AssertionError: the broker ended the connection before.
        """
        if self.closed or self.aborted:
            raise AssertionError(f"{self.name}: data sent after the end of the connection")
        self.received += data

    def close(self) -> None:
        """Note the FIN."""
        self.closed = True

    def abort(self) -> None:
        """Note the RST."""
        self.aborted = True

    @property
    def unsent(self) -> int:
        """Return :attr:`backlog`, in bytes."""
        return self.backlog

    @property
    def ended(self) -> bool:
        """Return whether the broker ended the connection."""
        return self.closed or self.aborted

    def take(self) -> bytes:
        """Return the bytes that arrived since the last call."""
        taken = bytes(self.received)
        self.received.clear()
        return taken
