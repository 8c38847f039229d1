"""Parts: tokens of one message of the source of which several messages were made.

The parts of a message may leave the pipeline at different times: held for sampling, or in batches of several targets.
The message is settled with the last part: an earlier acknowledgement would lose the parts that are not stored yet.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    from messaging.gateway.pipeline.draft import Draft


class _Divided:
    """A message of the source, and how many of its parts are not settled. Thread safe."""

    __slots__ = ("_is_acknowledged", "_left", "_lock", "source")

    def __init__(self, source: Any, count: int) -> None:
        self.source = source
        self._lock = threading.Lock()  # guards what follows
        self._left = count
        self._is_acknowledged = True

    def settle(self, acknowledged: bool) -> None:
        with self._lock:
            self._left -= 1
            self._is_acknowledged = self._is_acknowledged and acknowledged
            is_last, is_acknowledged = not self._left, self._is_acknowledged
        if is_last:
            self.source.context.settle(is_acknowledged)


class Part:
    """A part of a message of the source: used like the message, and like its context. Thread safe."""

    __slots__ = ("_is_settled", "_whole", "context")

    def __init__(self, whole: _Divided) -> None:
        self._whole = whole
        self._is_settled = False
        self.context = self

    @property
    def payload(self) -> Any:
        """Return the payload of the message."""
        return self._whole.source.payload

    def settle(self, acknowledged: bool) -> None:
        """Settle the part, and with the last one the message. Settling again has no effect."""
        if not self._is_settled:
            self._is_settled = True
            self._whole.settle(acknowledged)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._whole.source.context, name)


def divide(drafts: Sequence[Draft]) -> None:
    """Give each draft parts in place of the messages of the source that it shares with others."""
    counts: dict[int, int] = {}
    for draft in drafts:
        for source in draft.sources:
            counts[id(source)] = counts.get(id(source), 0) + 1
    shared: dict[int, _Divided] = {}
    for draft in drafts:
        if any(counts[id(source)] > 1 for source in draft.sources):
            draft.sources = tuple(
                source
                if counts[id(source)] == 1
                else Part(shared.setdefault(id(source), _Divided(source, counts[id(source)])))
                for source in draft.sources
            )
