"""Options and state of a durable history of a typed event bus: recorded events on the local disk (157.6.1).

Publishers do not wait for the disk. An event that does not fit in the queue is dropped, counted and logged. A crash
loses at most the events of the queue: those of the last ``window`` seconds, if the disk takes less than half of that
for a write, and at most ``max_pending`` events in any case.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from messaging.dispatch import check_count, parse_filter
from messaging.errors import ArgumentError
from messaging.services.reporting import counter, gauge

#: defaults of ``DurableHistory``: seconds, events, bytes
WINDOW: Final = 1.0
MAX_PENDING: Final = 50_000
MAX_BYTES: Final = 256 * 2**20
#: least values: bytes, seconds
_LEAST_BYTES: Final = 2**15
_LEAST_AGE: Final = 0.001
#: greatest number of seconds
_MOST: Final = 1e10


@dataclass(frozen=True, slots=True)
class DurableHistory:
    """Where and how a bus keeps its history over a restart. Immutable.

    Attributes:
        path: the folder, on a local disk; ``~`` is the home of the user. It is used by one bus at a time.
        topics: filter of the topics that are stored, or several; by default the topics whose events a history policy
            keeps (157.6.2).
        window: seconds after which a published event is on the disk at the latest, if the disk takes less than half of
            it for a write. A longer window needs fewer writes. 0: each event is written as soon as the disk is free.
        max_pending: number of events that may wait for the disk. Further events are not stored.
        max_bytes: bound of the stored events, bytes; the oldest are dropped. At least 32 KiB; ``None``: unlimited.
        max_age: seconds after which a stored event is dropped; ``None``: never.

    Raises:
        ArgumentError, InvalidTopicError: a value is not as described.
    """

    path: str | Path
    topics: str | Iterable[str] | None = None
    window: float = WINDOW
    max_pending: int = MAX_PENDING
    max_bytes: int | None = MAX_BYTES
    max_age: float | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.path, (str, Path)) or not str(self.path) or not str(self.path).isprintable():
            raise ArgumentError(f"path must be the path of a folder, not {self.path!r:.80}")
        topics = self.topics
        if topics is not None:
            if not isinstance(topics, str) and not isinstance(topics, Iterable):
                raise ArgumentError(f"topics must be a topic filter, or several, not {type(topics).__name__}")
            texts = (topics,) if isinstance(topics, str) else tuple(topics)
            for each in texts:
                parse_filter(each)
            if not texts:
                raise ArgumentError("topics must have at least one topic filter; None stands for the kept topics")
            object.__setattr__(self, "topics", texts)
        _check_number("window", self.window, least=0)
        check_count("max_pending", self.max_pending, 1)
        if self.max_bytes is not None:
            check_count("max_bytes", self.max_bytes, _LEAST_BYTES)
        if self.max_age is not None:
            _check_number("max_age", self.max_age, least=_LEAST_AGE)


@dataclass(frozen=True, slots=True)
class DurableHistoryDTO:
    """A snapshot of a durable history: what this run of the bus has done."""

    path: str
    stored: int = field(metadata=counter("events that were stored on the disk", "events"))
    pending: int = field(metadata=gauge("events that wait for the disk: a crash would lose at most these", "events"))
    dropped: int = field(metadata=counter("events that were not stored, because too many waited", "events"))
    failed: int = field(
        metadata=counter(
            "events that were not stored, because the disk failed or they have a value without a form on the disk",
            "events",
        )
    )
    bytes: int = field(metadata=gauge("bytes of the files with events, also of earlier runs", "bytes"))


def _check_number(name: str, value: object, least: float) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not least <= value <= _MOST:
        raise ArgumentError(f"{name} must be a number of seconds from {least:g} to {_MOST:g}, not {value!r:.80}")
