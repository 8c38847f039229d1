"""The box of a registration as the queue of its delivery."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from messaging.remoteevent.event import EventKind, RemoteEvent
    from messaging.remoteevent.mailbox.box import Box
    from messaging.remoteevent.mailbox.open_boxes import BoxSlot


class Reader(Protocol):
    """The registration, as the queue sees it."""

    #: the box, open or closed
    slot: BoxSlot

    @property
    def target(self) -> Any:
        """The target of the delivery; ``None`` without delivery."""

    @property
    def refused(self) -> frozenset[EventKind]:
        """The kinds that the target refused."""

    def pass_over(self, box: Box, ticket: int, refused: frozenset[EventKind]) -> bool:
        """Remove events that the target refused; return ``False`` if delivery has changed meanwhile."""


class BoxQueue:
    """The box of a registration as an ``EventQueue``: without the kinds that the target refused."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self._tickets: list[int] = []

    def peek(self, most: int) -> list[RemoteEvent]:
        """See ``EventQueue``."""
        with self._reader.slot.using() as box:
            while True:
                entries = box.first(most)
                refused = self._reader.refused
                wanted = [each for each in entries if each[1].kind not in refused] if refused else entries
                if wanted or not entries:
                    break
                if not self._reader.pass_over(box, entries[-1][0], refused) and self._reader.target is None:
                    return []
        self._tickets = [ticket for ticket, _ in wanted]
        return [event for _, event in wanted]

    def settle(self, count: int) -> None:
        """See ``EventQueue``."""
        if count:
            with self._reader.slot.using() as box:
                box.acknowledge(self._tickets[count - 1])
            del self._tickets[:count]
