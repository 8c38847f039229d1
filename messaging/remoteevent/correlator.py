"""New events made of several received ones (EV.3.2.2).

**Threads.** The function of the application runs on worker threads: for one event of a sender at a time, and for
several senders side by side.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from messaging.errors.checks import check_instance, plain_function
from messaging.remoteevent.generator import EventGenerator
from messaging.remoteevent.listener import BatchListener
from messaging.remoteevent.targets import LocalTarget
from messaging.remoteevent.time_limits import TIME_LIMIT

if TYPE_CHECKING:
    from messaging.remoteevent.event import EventId, RemoteEvent


class EventCorrelator(LocalTarget, BatchListener):
    """Generates an event when the received ones fit a pattern (EV.3.2.2). A listener; thread safe.

    The program registers the correlator as the listener for all kinds that the pattern is about. A received event is
    acknowledged when the events that it causes are generated: with a persistent generator, when they are on the disk.

    Args:
        match: called with each received event; returns the fields of each event to generate, as a list of dicts. It
            keeps what it needs of earlier events. A duplicate is passed on as it arrives: wrap the correlator in
            :class:`~messaging.remoteevent.IdempotentListener` if the pattern counts.
        generator, event_id: generates the new events; the kind is declared.
        event_type: class of the new events.
        time_limit: seconds that one call of ``match`` may take.

    Raises:
        ArgumentError: an argument is not as described.
        UnknownEventError: the generator has not declared the kind.
    """

    def __init__(
        self,
        match: Callable[[RemoteEvent], Iterable[dict[str, Any]] | None],
        generator: EventGenerator,
        event_id: EventId,
        event_type: type[RemoteEvent] | None = None,
        *,
        time_limit: float = TIME_LIMIT,
    ) -> None:
        check_instance("generator", generator, EventGenerator)
        matching = plain_function(match, "a pattern", is_iterated=True)
        generator.sequence_number(event_id)
        self._match = matching
        self._generator = generator
        self._event_id = event_id
        self._types = () if event_type is None else (event_type,)
        super().__init__(self._take, time_limit)

    def _take(self, event: RemoteEvent) -> None:
        promises = [
            self._generator.generate(self._event_id, *self._types, **fields) for fields in self._match(event) or ()
        ]
        for each in promises:
            each.result()
