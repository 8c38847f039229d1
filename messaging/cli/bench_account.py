"""The accounts of ``messaging bench``: received, lost and duplicate messages, and latencies."""

from __future__ import annotations

import math
import struct
from collections import Counter
from collections.abc import Mapping
from typing import Final, NamedTuple

#: begins each payload: mark, run, publisher, sequence number, nanoseconds since the epoch when it was published
_HEADER: Final = struct.Struct(">4s8sIQQ")
_MARK: Final = b"RXB1"

#: of a payload, bytes
LEAST_SIZE: Final = _HEADER.size
#: of one run: a byte is kept for each
MOST_MESSAGES: Final = 10_000_000
#: of all runs that are received at a time, bytes
_MOST_KEPT: Final = 100_000_000
#: publishers that are told apart
_MOST_PUBLISHERS: Final = 1_000

#: percentiles of a report
_PERCENTILES: Final = (50.0, 90.0, 99.0, 99.9)
#: leading bits of a latency that are kept: percentiles are right to 1 %
_BITS: Final = 8


class Stamp(NamedTuple):
    """The origin of a payload: run, publisher, sequence number, and when it was published."""

    run: bytes
    publisher: int
    sequence: int
    sent: int


def stamped(run: bytes, publisher: int, sequence: int, sent: int, padding: bytes) -> bytes:
    """Return the payload of one message."""
    return _HEADER.pack(_MARK, run, publisher, sequence, sent) + padding


def stamp_of(payload: bytes) -> Stamp | None:
    """Return the origin of a payload, or ``None`` if it is not one of a bench."""
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
        """Count one. One below 0, of two clocks that differ, counts as 0."""
        value = max(0, nanoseconds)
        shift = max(0, value.bit_length() - _BITS)
        self._counts[value >> shift << shift] += 1
        self._sum += value
        self._least = min(self._least, value)
        self._most = max(self._most, value)
        self.count += 1

    def merge(self, other: Latencies) -> None:
        """Count those of another histogram, too."""
        self._counts.update(other._counts)
        self._sum += other._sum
        self._least = min(self._least, other._least)
        self._most = max(self._most, other._most)
        self.count += other.count

    def summary(self) -> dict[str, float] | None:
        """Return least, mean, percentiles and most in seconds; ``None`` if there are none."""
        if not self.count:
            return None
        found = {"min": self._least, "mean": self._sum / self.count}
        ordered = sorted(self._counts.items())
        for percentile in _PERCENTILES:
            wanted, below = math.ceil(self.count * percentile / 100), 0
            for value, count in ordered:
                below += count
                if below >= wanted:
                    found[f"p{percentile:g}"] = min(max(value, self._least), self._most)
                    break
        found["max"] = self._most
        return {key: value / 1e9 for key, value in found.items()}


class _Publisher:
    """The messages that arrived of one publisher."""

    def __init__(self) -> None:
        self.seen = bytearray()
        self.first = MOST_MESSAGES
        self.highest = -1


class Tally:
    """Tells messages, duplicates and gaps. For one thread at a time.

    Attributes:
        received: all messages, duplicates included.
        distinct: messages of a bench, without duplicates.
        duplicates: messages of a bench that had arrived before.
        out_of_order: messages of a bench with a sequence number below an earlier one of their publisher.
        unknown: messages that are not of a bench, or not of the run that is looked for.
        latencies: from publishing to arriving.
    """

    def __init__(self, run: bytes | None = None) -> None:
        self._run = run
        self._publishers: dict[tuple[bytes, int], _Publisher] = {}
        self.received = self.distinct = self.duplicates = self.out_of_order = self.unknown = 0
        self.latencies = Latencies()
        #: bytes
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
        """Return how many messages are missing between the first and the last that arrived of each publisher."""
        return sum(
            publisher.highest - publisher.first + 1 - publisher.seen.count(1) for publisher in self._publishers.values()
        )

    def missing(self, accepted: Mapping[int, bytearray]) -> int:
        """Return how many of the accepted messages of the run did not arrive.

        Args:
            accepted: number of each publisher -> a byte for each message, 1 if the broker, or the socket, has it.
        """
        count = 0
        for number, flags in accepted.items():
            publisher = self._publishers.get((self._run or b"", number))
            seen = publisher.seen if publisher is not None else bytearray()
            width = max(len(flags), len(seen))
            one = int.from_bytes(flags.ljust(width, b"\0"), "big")
            other = int.from_bytes(seen.ljust(width, b"\0"), "big")
            count += (one & ~other).bit_count()
        return count
