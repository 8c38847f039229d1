"""Bookkeeping of ``messaging bench``: received, lost and duplicate messages, and latencies."""

from __future__ import annotations

import bisect
import itertools
import math
import struct
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

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


class _Publisher:
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
        self._publishers: dict[tuple[bytes, int], _Publisher] = {}
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
            publisher = self._publishers[stamp[:2]] = _Publisher()
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
