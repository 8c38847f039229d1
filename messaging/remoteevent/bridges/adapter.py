"""Local listeners for each kind of event: a method, a function or a Subject instead of one ``notify`` (EV.4.2)."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from reactivex.subject import Subject

from messaging.errors import ArgumentError
from messaging.remoteevent.demultiplexer import NotificationDemultiplexer

if TYPE_CHECKING:
    import reactivex as rx

    from messaging.remoteevent.event import EventKind, EventRegistration, RemoteEvent


class EventAdapter(NotificationDemultiplexer):
    """Calls the target of source and id of an event. A listener; thread safe.

    An event of another kind is refused with ``UnknownEventError``, which asks the sender to send no further ones. A
    target runs on a worker thread, or on its event loop if it is a coroutine function; its failure is the one of the
    notification.

    Example::

        adapter = EventAdapter(panel)
        adapter.add(("boiler", "overheated"), "show_alarm")  # panel.show_alarm(event)
        adapter.add(registration, subject)  # subject.on_next(event)
        generator.register("overheated", None, adapter)

    Args:
        owner: the object of the methods that :meth:`add` names.
    """

    def __init__(self, owner: Any = None) -> None:
        super().__init__()
        self._owner = owner

    def add(self, kind: EventRegistration | EventKind, target: Any) -> None:
        """Call ``target`` with the events of a kind, instead of an earlier one.

        Args:
            kind: a registration, or source and id.
            target: a function or coroutine function of one parameter, the name of a method of the owner, an observer
                such as a Subject, whose ``on_next`` is called, or a listener.

        Raises:
            ArgumentError, InvalidEventError: an argument is not as described.
        """
        super().add(kind, self._callable(target))

    def subject(self, kind: EventRegistration | EventKind) -> rx.Observable[RemoteEvent]:
        """Return a Subject of the events of a kind, instead of an earlier target. Raises as :meth:`add`."""
        subject: Subject[RemoteEvent] = Subject()
        self.add(kind, subject)
        return subject

    def _callable(self, target: Any) -> Any:
        if isinstance(target, str):
            method: Callable[[RemoteEvent], Any] | None = getattr(self._owner, target, None)
            if not callable(method):
                raise ArgumentError(f"{type(self._owner).__name__} has no method {target!r:.80}")
            return method
        on_next = getattr(target, "on_next", None)
        return on_next if callable(on_next) and not isinstance(target, type) else target
