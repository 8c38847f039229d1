"""Demultiplexing at the client: one listener for many kinds of events, spread to local listeners (EV.3.2.2, EV.4.2)."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from messaging.errors import ArgumentError, UnknownEventError
from messaging.remoteevent.event import EventRegistration, RemoteEvent, check_kind
from messaging.remoteevent.listener import BatchListener, WantedEvents, wanted_test
from messaging.remoteevent.targets import as_target, settled

if TYPE_CHECKING:
    from messaging.execution import Promise
    from messaging.remoteevent.event import EventKind
    from messaging.remoteevent.listener import EventTarget, Outcome


class NotificationDemultiplexer(BatchListener):
    """Passes each event to the listener of its kind. A listener; thread safe.

    An event of a kind without a listener is refused with ``UnknownEventError``, which asks the sender to send no
    further ones. The demultiplexer stores nothing: the outcome of an event is that of its listener.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards the following
        self._targets: dict[EventKind, EventTarget] = {}

    def add(self, kind: EventRegistration | EventKind, listener: Any) -> None:
        """Pass the events of a kind to ``listener``, instead of an earlier one.

        Args:
            kind: a registration, or source and id.
            listener: see :meth:`EventGenerator.register <messaging.remoteevent.EventGenerator.register>`.

        Raises:
            ArgumentError, InvalidEventError: an argument is not as described.
        """
        target = as_target(listener)
        with self._lock:
            self._targets[_kind(kind)] = target

    def remove(self, kind: EventRegistration | EventKind) -> bool:
        """Refuse the events of a kind from now on; return whether there was a listener. Raises as :meth:`add`."""
        with self._lock:
            return self._targets.pop(_kind(kind), None) is not None

    def deliver(self, events: Sequence[RemoteEvent], /) -> Promise[list[Outcome]]:
        """See :class:`~messaging.remoteevent.listener.EventTarget`: passes on the first events that have one kind."""
        kind = events[0].kind
        target = self._targets.get(kind)
        if target is None:
            return settled([UnknownEventError(f"no listener for event {kind[1]!r} of {kind[0]!r:.80}")])
        count = next((at for at, each in enumerate(events) if each.kind != kind), len(events))
        is_wanted = wanted_test(events)
        return target.deliver(WantedEvents(events[:count], lambda: is_wanted() and self._targets.get(kind) is target))


def _kind(kind: object) -> EventKind:
    if isinstance(kind, EventRegistration):
        return kind.kind
    if isinstance(kind, tuple) and len(kind) == 2:
        return check_kind(*kind)
    raise ArgumentError(f"a kind of event must be a registration, or (source, id), not {kind!r:.80}")
