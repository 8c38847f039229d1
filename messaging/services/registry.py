"""The service registry: services by interface and LDAP filter (OSGi core 5, without bundles).

The whiteboards of this project use it: a messaging instance registers its publisher, its subscription and its
whiteboard; an application registers handlers. Each finds the others by interface and properties, in either order.

**State and threads.** A registry holds the registered services, an index of them by interface, and the listeners. Any
thread may use it. One lock guards changes of these three and is never held while foreign code (a factory, a filter's
comparison, a listener) runs. The entries of the index and the listeners are replaced, never changed in place, so that
searching takes no lock.

**Events** are delivered on the thread that made the change, before the changing call returns, to the listeners
registered when the change was made. The events of one service never overtake each other: if a registration is changed
while an event of the same registration is being delivered, by another thread or by a listener, the delivering thread
delivers that event too, afterwards, and the changing call does not wait for it. The order of events of different
services is not defined.
"""

from __future__ import annotations

import contextlib
import enum
import itertools
import logging
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from threading import Lock
from typing import Any, Final, Literal, Protocol, Self, TypeAlias, runtime_checkable

from messaging.environment.forks import hold_over_fork
from messaging.environment.signals import on_failure
from messaging.errors import ArgumentError, ClosedError, MessagingError
from messaging.errors.checks import check_procedure, plain_function
from messaging.errors.text import tolerant
from messaging.services.filter import LdapFilter, as_filter
from messaging.services.reference import (
    OBJECT_CLASS,
    SERVICE_ID,
    SERVICE_RANKING,
    SERVICE_SCOPE,
    Interface,
    ServiceProperties,
    ServiceReference,
    interface_name,
)

logger = logging.getLogger(__name__)

#: set by the registry; ``register`` and ``update`` ignore properties of these names, as OSGi does
_OWN: Final = frozenset(key.casefold() for key in (OBJECT_CLASS, SERVICE_ID, SERVICE_SCOPE))

Scope: TypeAlias = Literal["singleton", "prototype"]

#: sort key of a service in the index: the preferred comes first
_Order: TypeAlias = tuple[int, int]


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


@runtime_checkable
class Term(Protocol):
    """The lease of a service, as the registry sees it; see :class:`~messaging.leases.GrantedLease`."""

    @property
    def is_ended(self) -> bool:
        """Whether it has expired, or was cancelled."""

    def when_ended(self, callback: Callable[[Any], object], /) -> None:
        """Call ``callback`` when it has ended, on a worker thread."""

    def cancel(self) -> Any:
        """End it. Raises ``MessagingError`` if it has ended."""


class ServiceRegistration:
    """The registering side's handle of a service; also a context manager that unregisters it."""

    __slots__ = ("_changes", "_deliverer", "_lease", "_reference", "_registry", "_scope", "_service")

    def __init__(
        self,
        registry: ServiceRegistry,
        service: Any,
        scope: Scope,
        names: tuple[str, ...],
        service_id: int,
        lease: Term | None = None,
    ) -> None:
        self._registry = registry
        self._service = service
        self._scope = scope
        self._reference = ServiceReference(ServiceProperties({OBJECT_CLASS: names, SERVICE_ID: service_id}))
        self._lease = lease
        self._changes: deque[Change] = deque()
        #: stands for the call that delivers the changes; ``None`` if there is none
        self._deliverer: object = None

    @property
    def reference(self) -> ServiceReference:
        """The reference of this service; the same object every time."""
        return self._reference

    def update(self, properties: Mapping[str, Any] | None = None) -> None:
        """Replace the properties: earlier ones are removed, and the ranking is 0 again unless given.

        Raises:
            ArgumentError: as for :meth:`ServiceRegistry.register`; nothing has changed.
            ClosedError: the service is unregistered.
        """
        self._registry._update(self, properties)

    def unregister(self) -> bool:
        """Remove the service from the registry, then call the listeners.

        Returns:
            ``True``; ``False`` if it was unregistered before.
        """
        is_unregistered = self._registry._unregister(self)
        if is_unregistered and self._lease is not None:
            with contextlib.suppress(MessagingError):  # it has ended by itself
                self._lease.cancel()
        return is_unregistered

    def _has_lapsed(self) -> bool:
        """Return whether the lease has ended: the service is about to be unregistered, when a thread comes to it."""
        return self._lease is not None and self._lease.is_ended

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with on_failure(self.unregister):  # no later call would unregister it
            self.unregister()

    @tolerant
    def __repr__(self) -> str:
        return f"<ServiceRegistration of {self._reference!r}>"

    def _complete(self, properties: Mapping[str, Any] | None) -> ServiceProperties:
        """Return ``properties`` with the registry's own ones."""
        given = ServiceProperties(properties or {})
        ranking = given.get(SERVICE_RANKING, 0)
        if not isinstance(ranking, int) or isinstance(ranking, bool):
            raise ArgumentError(f"{SERVICE_RANKING} must be an int, not {type(ranking).__name__}")
        own = {
            OBJECT_CLASS: self._reference.interfaces,
            SERVICE_ID: self._reference.id,
            SERVICE_SCOPE: self._scope,
        }
        if SERVICE_RANKING not in given:
            own[SERVICE_RANKING] = 0
        return ServiceProperties(own | {key: value for key, value in given.items() if key.casefold() not in _OWN})


def _order(reference: ServiceReference) -> _Order:
    return -reference.ranking, reference.id


def _order_with(registration: ServiceRegistration, properties: ServiceProperties | None) -> _Order | None:
    """Return the sort key of a service with these properties; ``None`` without any."""
    return None if properties is None else (-properties[SERVICE_RANKING], registration._reference.id)


def _without(
    entry: tuple[ServiceReference, ...], reference: ServiceReference, order: _Order
) -> tuple[ServiceReference, ...]:
    """Return ``entry`` without ``reference``, which is at ``order`` unless a change of it was interrupted."""
    at = bisect_left(entry, order, key=_order)
    if at < len(entry) and entry[at] is reference:
        return entry[:at] + entry[at + 1 :]
    return tuple(each for each in entry if each is not reference)


class ServiceRegistry:
    """Services by interface and properties. Thread safe; see the module for state, threads and events."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._ids = itertools.count(1)
        self._services: dict[ServiceReference, ServiceRegistration] = {}
        #: the preferred first; under ``None`` every service
        self._index: dict[str | None, tuple[ServiceReference, ...]] = {}
        self._listeners: tuple[ListenerRegistration, ...] = ()
        #: whether a service was registered with a lease: searching need not look for ended ones before
        self._has_leases = False

    # --- offering services

    def register(
        self,
        interface: Interface | Sequence[Interface],
        service: Any,
        properties: Mapping[str, Any] | None = None,
        *,
        scope: Scope = "singleton",
        lease: Term | None = None,
    ) -> ServiceRegistration:
        """Offer a service.

        Args:
            interface: a class, a name, or several of them, under which it is found. Whether ``service`` has that
                interface is not checked.
            service: the object; with scope ``prototype`` a callable without arguments that makes one. The registry
                references it until it is unregistered.
            properties: properties for filters, beside ``objectClass``, ``service.id``, ``service.ranking`` (an int,
                0 by default) and ``service.scope``. Copied, but not deeply. Keys are non-empty str; keys that
                differ only by case are the same.
            scope: ``prototype`` for a new object per :meth:`get`.
            lease: a lease that a :class:`~messaging.leases.Landlord` of this process granted: the service is not found
                any more when it has ended, and is unregistered soon after. The lease is cancelled when the service is
                unregistered.

        Raises:
            ArgumentError: an argument is not as described, or the lease has ended.
            BaseException: raised by a signal handler meanwhile, such as ``KeyboardInterrupt``.
            After an exception nothing is registered.
        """
        is_one = isinstance(interface, str) or not isinstance(interface, Sequence)
        interfaces: Any = (interface,) if is_one else interface
        names = tuple(dict.fromkeys(map(interface_name, interfaces)))
        if not names:
            raise ArgumentError("a service needs at least one interface")
        if service is None:
            raise ArgumentError("a service must not be None")
        if scope not in ("singleton", "prototype"):
            raise ArgumentError(f"scope must be 'singleton' or 'prototype', not {scope!r:.80}")
        if scope == "prototype":
            check_procedure(service, "with scope 'prototype' the service")
        if lease is not None and not isinstance(lease, Term):
            raise ArgumentError(f"a lease must be one that a landlord of this process granted, not {lease!r:.80}")
        if lease is not None and lease.is_ended:
            raise ArgumentError(f"{lease!r} has ended")
        registration = ServiceRegistration(self, service, scope, names, next(self._ids), lease)
        reference = registration._reference
        reference.properties = registration._complete(properties)

        def add() -> ServiceRegistration:
            with self._lock:
                self._has_leases = self._has_leases or lease is not None
                self._change(registration, ServiceEventKind.REGISTERED, None, reference.properties)
            self._deliver(registration)
            if lease is not None:
                lease.when_ended(lambda _end: registration.unregister())
            return registration

        return on_failure(self._unregister, registration).call(add)

    def _update(self, registration: ServiceRegistration, properties: Mapping[str, Any] | None) -> None:
        reference = registration._reference
        changed = registration._complete(properties)
        with self._lock:
            if reference not in self._services:
                raise ClosedError(f"{reference!r} is unregistered")
            self._change(registration, ServiceEventKind.MODIFIED, reference.properties, changed)
        self._deliver(registration)

    def _unregister(self, registration: ServiceRegistration) -> bool:
        reference = registration._reference
        with on_failure(self._deliver, registration):  # no later change would deliver this one
            with self._lock:
                if reference not in self._services:
                    return False
                self._change(registration, ServiceEventKind.UNREGISTERING, reference.properties, None)
            self._deliver(registration)
        return True

    def _change(
        self,
        registration: ServiceRegistration,
        kind: ServiceEventKind,
        before: ServiceProperties | None,
        after: ServiceProperties | None,
    ) -> None:
        """Change a service and queue the event; an interrupt undoes both. With the lock.

        Args:
            registration: the registration of the service.
            kind: the kind of the event.
            before: the present properties; ``None`` if it is not registered.
            after: the new properties; ``None`` if it is unregistered.
        """
        reference, changes = registration._reference, registration._changes
        queued = len(changes)
        was, will = _order_with(registration, before), _order_with(registration, after)

        def undo() -> None:
            self._reindex(reference, will or was, was)  # it may be at either place, or at none
            self._put(registration, before)
            while len(changes) > queued:
                changes.pop()

        with on_failure(undo):
            if before is None:
                self._put(registration, after)  # first: a service that is found can be got
            if was != will:
                self._reindex(reference, was, will)
            self._put(registration, after)
            if self._listeners:
                modified = before if kind is ServiceEventKind.MODIFIED else None
                changes.append(Change(kind, reference, reference.properties, self._listeners, modified))

    def _put(self, registration: ServiceRegistration, properties: ServiceProperties | None) -> None:
        reference = registration._reference
        if properties is None:
            self._services.pop(reference, None)
        else:
            reference.properties = properties
            self._services[reference] = registration

    def _reindex(self, reference: ServiceReference, before: _Order | None, after: _Order | None) -> None:
        """Move a reference in the index, in one step. With the lock.

        Compares only a few references and copies the others, so that registering thousands of services one by one
        is fast.

        Args:
            reference: its properties are still those of ``before``, unless it is moved back.
            before: its present place; ``None`` if it has none.
            after: its new place; ``None`` for none.
        """
        entries: dict[str | None, tuple[ServiceReference, ...]] = {}
        for name in (None, *reference.interfaces):
            entry = self._index.get(name, ())
            if before is not None:
                entry = _without(entry, reference, before)
            if after is not None:
                at = bisect_left(entry, after, key=_order)
                entry = (*entry[:at], reference, *entry[at:])
            entries[name] = entry
        self._index.update(entries)  # one call that no signal interrupts
        for name, entry in entries.items():
            if not entry:
                self._index.pop(name, None)

    def _deliver(self, registration: ServiceRegistration) -> None:
        """Deliver the queued changes of a service, unless another call does that already."""
        changes = registration._changes
        me = object()

        def release() -> None:
            with self._lock:
                if registration._deliverer is me:
                    registration._deliverer = None

        with on_failure(release):  # the next call continues here
            with self._lock:
                if registration._deliverer is not None or not changes:
                    return
                registration._deliverer = me
            while True:
                with self._lock:
                    if changes[0].done == len(changes[0].listeners):
                        changes.popleft()
                    if not changes:
                        registration._deliverer = None
                        return
                changes[0].deliver()

    # --- finding services

    def find(
        self,
        interface: Interface | None = None,
        filter: str | LdapFilter | None = None,  # noqa: A002 - OSGi's name
    ) -> list[ServiceReference]:
        """Return the services with that interface whose properties match, the preferred first.

        Args:
            interface: ``None`` for any.
            filter: a str is parsed, and remembered, as a case-insensitive filter.

        Returns:
            In order of ranking, highest first; with equal ranking the one registered first comes first.

        Raises:
            ArgumentError: ``interface`` is neither a class nor a non-empty str.
            InvalidFilterError: the filter does not parse.
        """
        return list(self._found(interface, filter))

    def find_one(
        self,
        interface: Interface | None = None,
        filter: str | LdapFilter | None = None,  # noqa: A002
    ) -> ServiceReference | None:
        """Return the first of :meth:`find`, or ``None``."""
        return next(iter(self._found(interface, filter)), None)

    def get(self, reference: ServiceReference) -> Any:
        """Return the service, or a new one with scope ``prototype``.

        ``None`` if it is not registered here (any more), or its lease has ended.

        Raises:
            Exception: raised by the factory of a prototype.
        """
        registration = self._services.get(reference)
        if registration is None or registration._has_lapsed():
            return None
        return registration._service() if registration._scope == "prototype" else registration._service

    def service(
        self,
        interface: Interface | None = None,
        filter: str | LdapFilter | None = None,  # noqa: A002
    ) -> Any:
        """Return the preferred service with that interface whose properties match, or ``None``.

        Raises:
            ArgumentError, InvalidFilterError, Exception: as for :meth:`find` and :meth:`get`.
        """
        for reference in self._found(interface, filter):
            service = self.get(reference)
            if service is not None:  # not unregistered in between
                return service
        return None

    def _found(self, interface: Interface | None, filter_: str | LdapFilter | None) -> Iterable[ServiceReference]:
        wanted = as_filter(filter_)
        entry = self._index.get(None if interface is None else interface_name(interface), ())
        if self._has_leases:
            services = self._services
            entry = tuple(each for each in entry if (found := services.get(each)) and not found._has_lapsed())
        if wanted is None:
            return entry
        return (reference for reference in entry if wanted.matches(reference.properties))

    def is_registered(self, reference: ServiceReference) -> bool:
        """Return whether the service is still registered here."""
        return reference in self._services

    # --- listening

    def add_listener(
        self,
        listener: ServiceListener,
        interface: Interface | None = None,
        filter: str | LdapFilter | None = None,  # noqa: A002
    ) -> ListenerRegistration:
        """Call ``listener`` with a :class:`ServiceEvent` whenever a service is registered, modified or unregistered.

        It receives every change made after this returns; :meth:`find` returns the services registered before. It is
        called on the thread that made the change and may use the registry; its exceptions are logged.

        Args:
            listener: called with the event; a listener added twice is called twice.
            interface: only services with this interface.
            filter: only services whose properties match. A service that matched only before a modification is reported
                with ``MODIFIED_ENDMATCH``.

        Raises:
            ArgumentError, InvalidFilterError: as for :meth:`find`.
        """
        listener = plain_function(listener, "a service listener")
        name = None if interface is None else interface_name(interface)
        registration = ListenerRegistration(listener, name, as_filter(filter), self._remove_listener)
        with self._lock:
            self._listeners += (registration,)
        return registration

    def _remove_listener(self, registration: ListenerRegistration) -> None:
        with self._lock:
            self._listeners = tuple(other for other in self._listeners if other is not registration)


_default: Final = ServiceRegistry()
hold_over_fork(_default._lock)


def default_registry() -> ServiceRegistry:
    """Return the registry of this process, which instances use by default."""
    return _default
