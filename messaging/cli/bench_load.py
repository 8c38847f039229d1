"""The load of ``messaging bench`` and its account: publishers, received messages, and latencies.

Each publisher or requester has its own thread and a bounded window. Received messages are counted as new, duplicate,
out of order or unknown.
"""

from __future__ import annotations

import bisect
import itertools
import math
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from messaging.errors import MessagingError
from messaging.model import Message, MessageContext

if TYPE_CHECKING:
    from messaging.execution import Promise

#: the start of a payload: mark, run, publisher, sequence number, time of publishing in nanoseconds since the epoch
_HEADER: Final = struct.Struct(">4s8sIQQ")
_MARK: Final = b"RXB1"

#: size of a payload, bytes
LEAST_SIZE: Final = _HEADER.size
#: messages of one run; a byte is kept for each
MOST_MESSAGES: Final = 10_000_000
#: bytes that are kept for all publishers of all received runs
_MOST_KEPT: Final = 100_000_000
#: publishers that are distinguished
_MOST_PUBLISHERS: Final = 1_000

#: percentiles of a report
_PERCENTILES: Final = (50.0, 90.0, 99.0, 99.9)
#: leading bits of a latency that are kept: percentiles are accurate to 1 %
_BITS: Final = 8
#: how often a load with a full window checks whether it was stopped, seconds
_POLL: Final = 0.05
#: how often a publisher that is ahead of the receiver checks again, seconds
_AHEAD: Final = 0.0005
#: a high rate is kept in small bursts, since the interval between two messages is shorter than any sleep, seconds
_SHORTEST_SLEEP: Final = 0.001

Send = Callable[[Message], "Promise[Any]"]


class Stamp(NamedTuple):
    """The origin of a payload; ``sent`` is the time of publishing in nanoseconds since the epoch."""

    run: bytes
    publisher: int
    sequence: int
    sent: int


def stamped(run: bytes, publisher: int, sequence: int, sent: int, padding: bytes) -> bytes:
    """Return the payload of one message."""
    return _HEADER.pack(_MARK, run, publisher, sequence, sent) + padding


def stamp_of(payload: bytes) -> Stamp | None:
    """Return the origin of a payload, or ``None`` if no bench has published it."""
    if len(payload) < LEAST_SIZE or not payload.startswith(_MARK):
        return None
    _, run, publisher, sequence, sent = _HEADER.unpack_from(payload)
    return Stamp(run, publisher, sequence, sent) if sequence < MOST_MESSAGES else None


class Latencies:
    """A histogram of bounded size. For one thread at a time."""

    def __init__(self) -> None:
        self._counts: Counter[int] = Counter()
        self._sum = 0
        self._least = math.inf
        self._most = 0
        self.count = 0

    def add(self, nanoseconds: int) -> None:
        """Count a latency. A negative one, of two clocks that differ, counts as 0."""
        value = max(0, nanoseconds)
        shift = max(0, value.bit_length() - _BITS)
        self._counts[value >> shift << shift] += 1
        self._sum += value
        self._least = min(self._least, value)
        self._most = max(self._most, value)
        self.count += 1

    @classmethod
    def merged(cls, histograms: Iterable[Latencies]) -> Latencies:
        """Return one histogram of all latencies."""
        merged = cls()
        for each in histograms:
            merged._counts.update(each._counts)
            merged._sum += each._sum
            merged._least = min(merged._least, each._least)
            merged._most = max(merged._most, each._most)
            merged.count += each.count
        return merged

    def summary(self) -> dict[str, float] | None:
        """Return minimum, mean, percentiles and maximum in seconds; ``None`` without a latency."""
        if not self.count:
            return None
        found = {"min": self._least, "mean": self._sum / self.count}
        ordered = sorted(self._counts)
        ranks = [*itertools.accumulate(self._counts[value] for value in ordered)]
        for percentile in _PERCENTILES:
            value = ordered[bisect.bisect_left(ranks, math.ceil(self.count * percentile / 100))]
            found[f"p{percentile:g}"] = min(max(value, self._least), self._most)
        found["max"] = self._most
        return {key: value / 1e9 for key, value in found.items()}


class _ReceivedMessages:
    """The received messages of one publisher."""

    def __init__(self) -> None:
        self.seen = bytearray()
        self.first = MOST_MESSAGES
        self.highest = -1


class Tally:
    """Counts messages, duplicates and gaps. For one thread at a time.

    Args:
        run: the expected run, or ``None`` for all.

    Attributes:
        received: all messages, duplicates included.
        distinct: messages of a bench, without duplicates.
        duplicates: messages of a bench that had arrived before.
        out_of_order: messages of a bench with a sequence number below an earlier one of their publisher.
        unknown: messages without a stamp of a bench, of another run, or beyond the bounds of this class.
        latencies: from publishing to receiving.
    """

    def __init__(self, run: bytes | None = None) -> None:
        self._run = run
        self._publishers: dict[tuple[bytes, int], _ReceivedMessages] = {}
        self.received = self.distinct = self.duplicates = self.out_of_order = self.unknown = 0
        self.latencies = Latencies()
        #: bytes that all publishers keep
        self._kept = 0

    def take(self, payload: bytes, now: int) -> None:
        """Count a message that arrived at ``now``, nanoseconds since the epoch."""
        self.received += 1
        stamp = stamp_of(payload)
        if stamp is None or (self._run is not None and stamp.run != self._run):
            self.unknown += 1
            return
        publisher = self._publishers.get(stamp[:2])
        if publisher is None:
            if len(self._publishers) >= _MOST_PUBLISHERS:
                self.unknown += 1
                return
            publisher = self._publishers[stamp[:2]] = _ReceivedMessages()
        sequence, seen = stamp.sequence, publisher.seen
        if sequence >= len(seen):
            more = min(MOST_MESSAGES, max(sequence + 1, 2 * len(seen))) - len(seen)
            if self._kept + more > _MOST_KEPT:
                self.unknown += 1
                return
            self._kept += more
            seen.extend(bytes(more))
        if seen[sequence]:
            self.duplicates += 1
            return
        seen[sequence] = 1
        self.distinct += 1
        self.latencies.add(now - stamp.sent)
        self.out_of_order += sequence < publisher.highest
        publisher.highest = max(publisher.highest, sequence)
        publisher.first = min(publisher.first, sequence)

    def gaps(self) -> int:
        """Return how many messages are missing between the first and the last received one of each publisher."""
        return sum(
            publisher.highest - publisher.first + 1 - publisher.seen.count(1) for publisher in self._publishers.values()
        )

    def missing(self, accepted: Sequence[bytearray]) -> int:
        """Return how many of the accepted messages of the run have not arrived.

        Args:
            accepted: for each publisher a byte per message, 1 if the broker, or the socket, has accepted it.
        """
        count = 0
        for number, flags in enumerate(accepted):
            publisher = self._publishers.get((self._run or b"", number))
            seen = publisher.seen if publisher is not None else bytearray()
            width = max(len(flags), len(seen))
            expected, arrived = (int.from_bytes(each.ljust(width, b"\0"), "big") for each in (flags, seen))
            count += (expected & ~arrived).bit_count()
        return count


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
