"""Listeners and waits for the tests of remote events."""

from __future__ import annotations

import threading
from typing import Any

from messaging.errors import ListenerGoneError, UnknownEventError
from messaging.remoteevent import RemoteEvent


class Recorder:
    """A listener that keeps what it is notified of, and refuses what it is told to."""

    def __init__(self) -> None:
        self.events: list[RemoteEvent] = []
        #: all notifications, also those that were refused
        self.calls: list[RemoteEvent] = []
        #: kinds that it does not know
        self.unknown: set[Any] = set()
        #: raised by each notification; ``None``: it returns
        self.error: Exception | None = None
        #: held by a test to block it
        self.gate = threading.Lock()

    def notify(self, event: RemoteEvent) -> None:
        with self.gate:
            self.calls.append(event)
            if event.kind in self.unknown:
                raise UnknownEventError("not wanted")
            if self.error is not None:
                raise self.error
            self.events.append(event)

    @property
    def numbers(self) -> list[int]:
        """The sequence numbers, in the order of their arrival."""
        return [each.sequence_number for each in self.events]

    def of(self, event_id: int | str) -> list[int]:
        """The sequence numbers of one kind."""
        return [each.sequence_number for each in self.events if each.id == event_id]

    def go(self) -> None:
        """Be gone: each notification tells so."""
        self.error = ListenerGoneError("gone")


def event(number: int, event_id: int | str = 1, source: str = "source", handback: Any = None) -> RemoteEvent:
    """Return an event."""
    return RemoteEvent(source, event_id, number, handback)


def events(first: int, last: int, event_id: int | str = 1, source: str = "source") -> list[RemoteEvent]:
    """Return events with the numbers from ``first`` to ``last``."""
    return [event(number, event_id, source) for number in range(first, last + 1)]
