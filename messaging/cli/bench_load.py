"""The publishers and requesters of ``messaging bench``, each with its own thread and a bounded window."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from messaging.cli.bench_account import Latencies, stamped
from messaging.errors import MessagingError
from messaging.model import Message, MessageContext

if TYPE_CHECKING:
    from messaging.execution import Promise

#: how often a load with a full window checks whether it was stopped, seconds
_POLL: Final = 0.05
#: how often a publisher that is ahead of the receiver checks again, seconds
_AHEAD: Final = 0.0005
#: a high rate is kept in small bursts, since the interval between two messages is shorter than any sleep, seconds
_SHORTEST_SLEEP: Final = 0.001

Send = Callable[[Message], "Promise[Any]"]


class Gate:
    """Bounds the messages in flight between all publishers and the receiver. Thread safe.

    Args:
        limit: most messages in flight.
        patience: silence of the receiver, in seconds, after which the messages in flight count as lost.
        received: returns the number of received messages.
    """

    def __init__(self, limit: int, patience: float, received: Callable[[], int]) -> None:
        self._limit = limit
        self._patience = patience
        self._received = received
        self._lock = threading.Lock()  # guards the following
        self._sent = 0
        self._lost = 0
        self._last, self._changed = 0, time.monotonic()

    def passed(self) -> bool:
        """Return whether one more message may be sent; if so, count it."""
        received = self._received()
        with self._lock:
            now = time.monotonic()
            if received != self._last:
                self._last, self._changed = received, now
            ahead = self._sent - received - self._lost
            if ahead >= self._limit:
                if now - self._changed < self._patience:
                    return False
                self._lost += ahead
                self._changed = now
            self._sent += 1
            return True


class Load:
    """One publisher or requester: a thread that sends ``count`` messages unless it is stopped.

    Args:
        send: publishes a message, or sends a request.
        number: number of the publisher.
        size: bytes of padding in a payload.
        window: most messages whose promise is pending.

    Attributes:
        accepted: a byte for each message, 1 if its promise resolved.
        latencies: from sending a message until its promise resolved.
        sent: messages that were handed to ``send``.
        done, failed: messages whose promise resolved, or was rejected.
        error: the first failure.
        ended: when the last promise was settled, seconds of ``time.monotonic``.
    """

    def __init__(
        self, send: Send, context: MessageContext, count: int, *, number: int, run: bytes, size: int, window: int
    ) -> None:
        self._send = send
        self._context = context
        self._count = count
        self._number = number
        self._run = run
        self._padding = bytes(size)
        self._window = threading.BoundedSemaphore(window)
        self._open = window
        self._lock = threading.Lock()  # guards the counters, which callbacks change
        self.accepted = bytearray(count)
        self.latencies = Latencies()
        self.sent = self.done = self.failed = 0
        self.error: MessagingError | None = None
        self.ended = 0.0
        self._thread: threading.Thread | None = None

    def start(self, rate: float | None, gate: Gate | None, stop: threading.Event) -> None:
        """Start sending: at most ``rate`` messages per second, as ``gate`` allows, until ``stop`` is set."""
        self._thread = threading.Thread(target=self._run_all, args=(rate, gate, stop), daemon=True)
        self._thread.start()

    @property
    def is_running(self) -> bool:
        """Return whether the thread is sending or waiting for outcomes."""
        return self._thread is not None and self._thread.is_alive()

    @property
    def unsettled(self) -> int:
        """Return the number of pending promises."""
        return self.sent - self.done - self.failed

    def _run_all(self, rate: float | None, gate: Gate | None, stop: threading.Event) -> None:
        started = time.monotonic()
        for sequence in range(self._count):
            if rate is not None:
                ahead = started + sequence / rate - time.monotonic()
                if ahead > _SHORTEST_SLEEP and stop.wait(ahead):
                    break
            while gate is not None and not gate.passed():
                if stop.wait(_AHEAD):
                    return
            while not self._window.acquire(timeout=_POLL):
                if stop.is_set():
                    return
            if stop.is_set():
                return
            self._send_one(sequence)
        # wait for the outcomes; every promise has its own deadline
        for _ in range(self._open):
            while not self._window.acquire(timeout=_POLL):
                if stop.is_set():
                    return

    def _send_one(self, sequence: int) -> None:
        payload = stamped(self._run, self._number, sequence, time.time_ns(), self._padding)
        began = time.monotonic_ns()
        self.sent += 1
        try:
            promise = self._send(Message(payload, self._context))
        except MessagingError as error:
            self._settled(sequence, 0, error)
            return
        promise.add_done_callback(
            lambda settled: self._settled(sequence, time.monotonic_ns() - began, settled.exception())
        )

    def _settled(self, sequence: int, took: int, error: MessagingError | None) -> None:
        with self._lock:
            self.ended = time.monotonic()
            if error is None:
                self.accepted[sequence] = 1
                self.done += 1
                self.latencies.add(took)
            else:
                self.failed += 1
                self.error = self.error or error
        self._window.release()
