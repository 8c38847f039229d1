"""Service events, and the listeners that receive them."""

from __future__ import annotations

import enum
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self, TypeAlias

if TYPE_CHECKING:
    from messaging.services.filter import LdapFilter
    from messaging.services.reference import ServiceProperties, ServiceReference

logger = logging.getLogger(__name__)


class ServiceEventKind(enum.Enum):
    """The kind of a change of a service."""

    REGISTERED = "registered"
    #: the properties changed, and match the listener's filter now
    MODIFIED = "modified"
    #: the properties changed, and matched the listener's filter only before
    MODIFIED_ENDMATCH = "modified_endmatch"
    #: the service is no longer available; its users must release it now
    UNREGISTERING = "unregistering"


@dataclass(frozen=True, slots=True)
class ServiceEvent:
    """A change of a service, as listeners receive it.

    Attributes:
        kind: the kind of the change.
        reference: the service.
    """

    kind: ServiceEventKind
    reference: ServiceReference


ServiceListener: TypeAlias = Callable[[ServiceEvent], object]


@dataclass(slots=True)
class Change:
    """A change on its way to the listeners, with properties and listeners of the moment it was made."""

    kind: ServiceEventKind
    reference: ServiceReference
    properties: ServiceProperties
    listeners: tuple[ListenerRegistration, ...]
    #: the properties before a modification
    before: ServiceProperties | None = None
    #: number of listeners that were called or passed over
    done: int = 0

    def count_done(self) -> None:
        """Count one more listener as done."""
        self.done += 1

    def deliver(self) -> None:
        """Call the listeners that were not called yet."""
        while self.done < len(self.listeners):
            self.listeners[self.done].deliver(self)


class ListenerRegistration:
    """A listener in its registry; also a context manager that removes it."""

    __slots__ = ("_active", "_filter", "_interface", "_listener", "_remove")

    def __init__(
        self,
        listener: ServiceListener,
        interface: str | None,
        filter_: LdapFilter | None,
        remove: Callable[[ListenerRegistration], object],
    ) -> None:
        self._listener = listener
        self._interface = interface
        self._filter = filter_
        self._remove = remove
        self._active = True

    def remove(self) -> None:
        """Stop listening; idempotent. A call in progress on another thread may still finish."""
        self._active = False
        self._remove(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    def deliver(self, change: Change) -> None:
        """Call the listener if the change is for it; its exceptions are logged. For the registry."""
        kind = self._kind_of(change)
        if kind is None:
            change.count_done()
            return
        event = ServiceEvent(kind, change.reference)
        try:
            # one expression, so that an interrupt cannot come in between: a listener is called once
            change.count_done() or self._listener(event)  # type: ignore[func-returns-value]
        except Exception:
            logger.exception("service registry: a listener failed on %s of %r", kind.name, change.reference)

    def _kind_of(self, change: Change) -> ServiceEventKind | None:
        """Return the kind of the event for this listener; ``None`` if the change is not for it."""
        if not self._active or (self._interface is not None and self._interface not in change.reference.interfaces):
            return None
        if self._filter is None or self._filter.matches(change.properties):
            return change.kind
        if change.before is not None and self._filter.matches(change.before):
            return ServiceEventKind.MODIFIED_ENDMATCH
        return None
