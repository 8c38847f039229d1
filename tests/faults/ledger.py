"""A ledger of sent and received messages, and their comparison.

Every message carries its origin (run, publisher, sequence) and a hash over that and its body. A publisher logs each
message, synced to disk, before it is sent, and later its outcome. A receiver keeps what arrives in order of arrival.
:func:`compare` then compares both.

::

    with PublisherLog(path) as log:
        log.attempt([0, 1, 2])
        ...  # publish encode(Stamp(run, "p1", 0), body), ...
        log.confirm(0)
    arrivals = Arrivals(run)
    arrivals.add(payload)  # for every message received
    compare({"p1": read_log(path)}, arrivals).check()
"""

from __future__ import annotations

import hashlib
import os
import threading
import time
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Self

_MAGIC: Final = b"ledger"
_SHOWN: Final = 20
#: errors after which a message may arrive or not; after all others it must not
_OPEN_OUTCOMES: Final = frozenset({"OutcomeUnknownError"})


class ForgedError(ValueError):
    """A payload that no publisher made, or not like this."""


@dataclass(frozen=True, slots=True, order=True)
class Stamp:
    """Where a message comes from. ``run`` and ``publisher`` hold no spaces; ``sequence`` counts from 0."""

    run: str
    publisher: str
    sequence: int


def encode(stamp: Stamp, body: bytes = b"") -> bytes:
    """The payload of a message: a line of text, and the body."""
    identity = f"{stamp.run} {stamp.publisher} {stamp.sequence}".encode()
    return b"%b %b %b\n%b" % (_MAGIC, identity, _hash(identity, body), body)


def decode(payload: bytes) -> tuple[Stamp, bytes]:
    """The stamp and the body of a payload.

    Raises:
        ForgedError: it is none of :func:`encode`, or something in it has changed.
    """
    line, newline, body = payload.partition(b"\n")
    words = line.split(b" ")
    if not newline or len(words) != 5 or words[0] != _MAGIC or not words[3].isdigit():
        raise ForgedError(f"not a message of this suite: {payload[:60]!r}")
    if _hash(b" ".join(words[1:4]), body) != words[4]:
        raise ForgedError(f"something in it has changed: {payload[:60]!r}")
    return Stamp(words[1].decode(), words[2].decode(), int(words[3])), body


def _hash(identity: bytes, body: bytes) -> bytes:
    return hashlib.blake2b(identity + b"\n" + body, digest_size=12).hexdigest().encode()


# --- the publisher's side


@dataclass(slots=True)
class History:
    """What one publisher did.

    Attributes:
        attempted: sequence -> when it was written down, monotonic seconds of the machine.
        confirmed: sequence -> when its promise resolved.
        failed: sequence -> the kind of error its promise failed with.
    """

    attempted: dict[int, float] = field(default_factory=dict)
    confirmed: dict[int, float] = field(default_factory=dict)
    failed: dict[int, str] = field(default_factory=dict)


class PublisherLog:
    """A publisher's log, appended to a file. Thread safe.

    What is attempted is on the disk when :meth:`attempt` returns, so that a message whose publisher was killed is
    never an unexpected one. Outcomes are synced with the next attempt: one that is lost makes the comparison milder,
    never wrong. A line that an earlier publisher was killed over is cut off.
    """

    def __init__(self, path: Path) -> None:
        self._lock = threading.Lock()  # guards the file, and that lines stay whole
        self._file = path.open("ab")
        self._file.truncate(path.read_bytes().rfind(b"\n") + 1)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def attempt(self, sequences: Iterable[int]) -> None:
        """Write down what is about to be sent."""
        self._write(f"attempted {sequence}" for sequence in sequences)
        self.sync()

    def confirm(self, sequence: int) -> None:
        """Write down that the promise of a message resolved."""
        self._write([f"confirmed {sequence}"])

    def fail(self, sequence: int, error: BaseException) -> None:
        """Write down that the promise of a message failed."""
        self._write([f"failed {sequence} {type(error).__name__}"])

    def _write(self, entries: Iterable[str]) -> None:
        now = time.monotonic()
        lines = "".join(f"{now:.6f} {entry}\n" for entry in entries).encode()
        with self._lock:
            if not self._file.closed:
                self._file.write(lines)

    def sync(self) -> None:
        """Return once everything is on the disk. Does nothing after :meth:`close`."""
        with self._lock:
            if not self._file.closed:
                self._file.flush()
                os.fsync(self._file.fileno())

    def close(self) -> None:
        """Sync and close; what comes later is dropped. Idempotent."""
        self.sync()
        self._file.close()


def read_log(path: Path) -> History:
    """What a publisher wrote, which may have been killed in the middle of a line.

    Raises:
        ValueError: a line that is whole makes no sense.
    """
    history = History()
    *lines, _torn = path.read_bytes().decode().split("\n")
    for line in lines:
        at, what, sequence, *kind = line.split(" ")
        match what:
            case "attempted":
                history.attempted[int(sequence)] = float(at)
            case "confirmed":
                history.confirmed[int(sequence)] = float(at)
            case "failed":
                history.failed[int(sequence)] = kind[0]
            case _:
                raise ValueError(f"{path}: {line!r}")
    return history


# --- the receiver's side


class Arrivals:
    """What was received, in its order. One thread adds; any may look.

    Args:
        run: what others send is unexpected.
        earlier: runs before this one: a broker may deliver again what it had, so their messages are only counted.
    """

    def __init__(self, run: str, earlier: Collection[str] = ()) -> None:
        self.run = run
        self.earlier = earlier
        self.late = 0
        self.stamps: list[Stamp] = []
        #: what is not of this run, or forged, in words
        self.foreign: list[str] = []
        #: publisher -> highest sequence so far
        self.latest: dict[str, int] = {}

    def add(self, payload: bytes) -> Stamp | None:
        """Keep a message; its stamp, if it is one of this run."""
        try:
            stamp, _ = decode(payload)
        except ForgedError as error:
            self.foreign.append(str(error))
            return None
        if stamp.run in self.earlier:
            self.late += 1
            return None
        if stamp.run != self.run:
            self.foreign.append(f"of another run: {stamp}")
            return None
        self.stamps.append(stamp)
        self.latest[stamp.publisher] = max(stamp.sequence, self.latest.get(stamp.publisher, -1))
        return stamp


# --- the comparison


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the comparison found.

    Attributes:
        lost: confirmed and never received.
        unexpected: received, and never attempted, known to have failed, forged, or of another run; in words.
        disorder: received for the first time after a later one of the same publisher.
        duplicates: deliveries beyond the first.
        unconfirmed: received, though the publisher was never told so.
        confirmed, received: how many messages; each received one counts once.
        failed: kind of error -> how many promises.
        open: attempted, and no outcome written down.
    """

    lost: tuple[Stamp, ...]
    unexpected: tuple[str, ...]
    disorder: tuple[Stamp, ...]
    duplicates: int
    unconfirmed: int
    confirmed: int
    received: int
    failed: Mapping[str, int]
    open: int

    def check(self, *, may_lose: bool = False, ordered: bool = True) -> Self:
        """Raise AssertionError unless what was confirmed was received, in order, and nothing else.

        Args:
            may_lose: whether the caller looks at ``lost`` by itself.
            ordered: whether order is promised.
        """
        assert not self.unexpected, f"{len(self.unexpected)} unexpected: {self.unexpected[:_SHOWN]}\n{self}"
        assert not ordered or not self.disorder, f"{len(self.disorder)} out of order: {self.disorder[:_SHOWN]}\n{self}"
        assert may_lose or not self.lost, f"{len(self.lost)} lost: {self.lost[:_SHOWN]}\n{self}"
        return self

    def __str__(self) -> str:
        failed = ", ".join(f"{count} {kind}" for kind, count in self.failed.items()) or "none"
        return (
            f"confirmed {self.confirmed}, failed {failed}, open {self.open}; received {self.received} "
            f"({self.unconfirmed} of them unconfirmed), duplicates {self.duplicates}; lost {len(self.lost)}, "
            f"unexpected {len(self.unexpected)}, out of order {len(self.disorder)}"
        )


def compare(histories: Mapping[str, History], arrivals: Arrivals) -> Verdict:
    """Hold what was received against what was sent.

    Args:
        histories: publisher -> what it did.
        arrivals: what one receiver, or one after the other, got of all of them.
    """
    unexpected = list(arrivals.foreign)
    disorder: list[Stamp] = []
    seen: dict[str, set[int]] = {publisher: set() for publisher in histories}
    highest: dict[str, int] = {}
    unconfirmed = 0
    for stamp in arrivals.stamps:
        history = histories.get(stamp.publisher)
        if history is None or stamp.sequence not in history.attempted:
            unexpected.append(f"never attempted: {stamp}")
            continue
        if (failure := history.failed.get(stamp.sequence)) is not None and failure not in _OPEN_OUTCOMES:
            unexpected.append(f"failed with {failure}: {stamp}")
            continue
        known = seen[stamp.publisher]
        if stamp.sequence in known:
            continue
        known.add(stamp.sequence)
        unconfirmed += stamp.sequence not in history.confirmed
        if stamp.sequence < highest.get(stamp.publisher, -1):
            disorder.append(stamp)
        highest[stamp.publisher] = max(stamp.sequence, highest.get(stamp.publisher, -1))
    lost = [
        Stamp(arrivals.run, publisher, sequence)
        for publisher, history in histories.items()
        for sequence in sorted(history.confirmed.keys() - seen[publisher])
    ]
    received = sum(map(len, seen.values()))
    every = histories.values()
    return Verdict(
        lost=tuple(lost),
        unexpected=tuple(unexpected),
        disorder=tuple(disorder),
        duplicates=len(arrivals.stamps) + len(arrivals.foreign) - len(unexpected) - received,
        unconfirmed=unconfirmed,
        confirmed=sum(len(history.confirmed) for history in every),
        received=received,
        failed=Counter(kind for history in every for kind in history.failed.values()),
        open=sum(len(history.attempted.keys() - history.confirmed.keys() - history.failed.keys()) for history in every),
    )
