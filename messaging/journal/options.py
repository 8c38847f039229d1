"""The options of a journal: when it syncs, what it keeps, and what it does with a record that has no room."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, Literal

from messaging.errors import ArgumentError
from messaging.execution import seconds

Fsync = Literal["always", "interval", "never"]
Full = Literal["block", "drop_oldest", "reject"]

#: bytes from which on a segment is closed, and the least
SEGMENT_BYTES: Final = 16 * 2**20
_LEAST_SEGMENT: Final = 2**12
#: a bounded journal has at least so many segments, because whole segments are dropped
_SEGMENTS: Final = 8
_FSYNC: Final = ("always", "interval", "never")
_FULL: Final = ("block", "drop_oldest", "reject")


@dataclass(slots=True, kw_only=True)
class JournalOptions:
    """The options of :meth:`Journal.open <messaging.journal.Journal.open>`, which describes them.

    Raises:
        ArgumentError: an option has a value that it cannot have.
    """

    fsync: Fsync = "always"
    fsync_interval: float = 1.0
    max_bytes: int | None = None
    max_records: int | None = None
    max_age: float | None = None
    full: Full = "block"
    full_disk: Full | None = None
    timeout: float = 30.0
    segment_bytes: int = SEGMENT_BYTES
    #: records from which on a segment is closed; ``None``: as many as there are
    segment_records: int | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        for name, known in (("fsync", _FSYNC), ("full", _FULL), ("full_disk", (*_FULL, None))):
            value = getattr(self, name)
            if value not in known:
                raise ArgumentError(f"{name} must be one of {', '.join(filter(None, known))}, not {value!r:.100}")
        for name in ("fsync_interval", "max_age", "timeout"):
            check_positive((int, float), name, getattr(self, name))
        for name in ("max_bytes", "max_records", "segment_bytes"):
            check_positive((int,), name, getattr(self, name))
        if self.max_age is not None:
            self.max_age = seconds(self.max_age, "max_age")
        if self.max_bytes is not None:
            self.segment_bytes = max(_LEAST_SEGMENT, min(self.segment_bytes, self.max_bytes // _SEGMENTS))
        if self.max_records is not None:
            self.segment_records = max(1, self.max_records // _SEGMENTS)


def check_positive(kinds: tuple[type, ...], name: str, value: object) -> None:
    """Raise ``ArgumentError`` unless ``value`` is ``None`` or a number of one of ``kinds`` above 0."""
    if value is not None and (isinstance(value, bool) or not isinstance(value, kinds) or not value > 0):  # type: ignore[operator]
        what = "a number" if float in kinds else "an integer"
        raise ArgumentError(f"{name} must be {what} above 0, not {value!r:.100}")
