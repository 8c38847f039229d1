"""Listeners and waits for the tests of remote events."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

from messaging.errors import ListenerGoneError, UnknownEventError
from messaging.remoteevent import (
    EventGenerator,
    EventMailbox,
    EventTarget,
    MailboxRegistration,
    RemoteEvent,
    RetryPolicy,
)
from messaging.testing import waiting
from messaging.testing.waiting import PATIENCE

FAST: Final = RetryPolicy(first_delay=0.01, max_delay=0.05)
Box = MailboxRegistration
OpenMailbox = Callable[..., EventMailbox]


class Recorder:
    """A listener that keeps what it is notified of, and refuses what it is told to."""

    def __init__(self, error: Exception | None = None) -> None:
        self.events: waiting.Recorder[RemoteEvent] = waiting.Recorder()
        #: all notifications, also those that were refused
        self.calls: waiting.Recorder[RemoteEvent] = waiting.Recorder()
        #: kinds that it does not know
        self.unknown: set[Any] = set()
        #: raised by each notification; ``None``: it returns
        self.error = error
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


@dataclass(frozen=True, kw_only=True)
class Long(RemoteEvent):
    """An event of any size."""

    text: str


def long(number: int, size: int, event_id: int | str = 1) -> Long:
    return Long("source", event_id, number, None, text="y" * size)


@contextmanager
def ready(server: Any) -> Iterator[Any]:
    """Enter a server, and yield it when the broker has confirmed its subscription."""
    with server:
        server.ready.result(PATIENCE)
        yield server


def taken(found: Iterable[RemoteEvent]) -> list[int]:
    """Return the sequence numbers of events."""
    return [each.sequence_number for each in found]


def generate(generator: EventGenerator, count: int, event_id: int | str = 1, **options: Any) -> None:
    """Generate so many events of one kind."""
    for _ in range(count):
        generator.generate(event_id, **options)


def deliver_all(target: EventTarget, given: Sequence[RemoteEvent]) -> None:
    """Deliver events until the target has taken each: it may take some at a time, see ``LocalTarget``."""
    while given:  # a sender passes the events without an outcome again
        outcomes = target.deliver(given).result(PATIENCE)
        assert outcomes == [None] * len(outcomes)
        given = given[len(outcomes) :]


def store(box: MailboxRegistration, given: Sequence[RemoteEvent]) -> None:
    """Deliver events to a mailbox until it has them all."""
    deliver_all(box.listener, given)
