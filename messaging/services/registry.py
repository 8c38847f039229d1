"""The service registry: who offers what, looked up by interface and LDAP filter (OSGi core 5, without bundles).

The whiteboards of this project hang on it: a messaging instance registers its publisher, its subscription, its
whiteboard; an application registers handlers; each finds the other by interface and properties, whoever came
first.

**State and threads.** A registry holds the registered services, an index of them per interface name, and the
listeners. All of it may be used from any thread. One lock guards changes to these three and is never held while
foreign code (a factory, a filter's comparison, a listener) runs. The index and the listeners are replaced, never
changed in place, so that looking up takes no lock.

**Events** are delivered on the thread that made the change, before the changing call returns, to the listeners
that were there when the change was made. The events of one service never overtake each other: if a registration
is changed while an event of the same registration is being delivered, by another thread or by a listener, the
delivering thread delivers that event too, afterwards, and the changing call does not wait for it. Nothing is
promised about the order of events of different services.
"""

from __future__ import annotations

import enum
import itertools
import logging
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from threading import Lock
from typing import Any, Final, Literal, Self, TypeAlias

from messaging.errors import ArgumentError, ClosedError
from messaging.forking import hold_over_fork
from messaging.services.filter import LdapFilter, as_filter
from messaging.services.properties import ServiceProperties
from messaging.text import exact, printable, tolerant

logger = logging.getLogger(__name__)

OBJECT_CLASS: Final = "objectClass"
SERVICE_ID: Final = "service.id"
SERVICE_RANKING: Final = "service.ranking"
SERVICE_SCOPE: Final = "service.scope"
#: set by the registry; what ``register`` and ``update`` are given under these names is ignored, as in OSGi
_OWN: Final = frozenset(key.casefold() for key in (OBJECT_CLASS, SERVICE_ID, SERVICE_SCOPE))

Interface: TypeAlias = type[Any] | str
Scope: TypeAlias = Literal["singleton", "prototype"]


def interface_name(interface: Interface) -> str:
    """The name an interface is registered under: ``module.qualname`` of a class, a str as it is.

    Raises:
        ArgumentError: neither a class nor a non-empty str.
    """
    if isinstance(interface, str) and interface:
        return exact(interface)
    if isinstance(interface, type):
        return f"{interface.__module__}.{interface.__qualname__}"
    raise ArgumentError(f"an interface must be a class or a non-empty str, not {interface!r:.80}")


class ServiceReference:
    """Points at a registered service; made by the registry, compared by identity, valid until unregistered."""

    __slots__ = ("_properties",)

    def __init__(self, properties: ServiceProperties) -> None:
        self._properties = properties

    @property
    def properties(self) -> ServiceProperties:
        """The properties now: a read-only mapping that never changes; after an update there is another one.

        After unregistering it is the last one.
        """
        return self._properties

    @property
    def id(self) -> int:
        """``service.id``: unique within the registry, increasing."""
        service_id: int = self._properties[SERVICE_ID]
        return service_id

    @property
    def ranking(self) -> int:
        """``service.ranking``: of several services that fit, the highest is preferred. 0 unless set."""
        ranking: int = self._properties[SERVICE_RANKING]
        return ranking

    @property
    def interfaces(self) -> tuple[str, ...]:
        """``objectClass``: the names of the interfaces the service was registered under."""
        names: tuple[str, ...] = self._properties[OBJECT_CLASS]
        return names

    @tolerant
    def __repr__(self) -> str:
        return f"<ServiceReference {self.id}: {', '.join(map(printable, self.interfaces))}>"


class ServiceEventKind(enum.Enum):
    """What happened to a service."""

    REGISTERED = "registered"
    #: the properties changed, and they match the listener's filter now
    MODIFIED = "modified"
    #: the properties changed, and they matched the listener's filter only before
    MODIFIED_ENDMATCH = "modified_endmatch"
    #: the service cannot be got any more; whoever holds it must let go of it now
    UNREGISTERING = "unregistering"


@dataclass(frozen=True, slots=True)
class ServiceEvent:
    """What a listener is called with.

    Attributes:
        kind: what happened.
        reference: the service it happened to.
    """

    kind: ServiceEventKind
    reference: ServiceReference


ServiceListener: TypeAlias = Callable[[ServiceEvent], object]


class ListenerRegistration:
    """A listener in its registry; also a context manager that removes it."""

    __slots__ = ("_active", "_filter", "_interface", "_listener", "_registry")

    def __init__(
        self, registry: ServiceRegistry, listener: ServiceListener, interface: str | None, filter_: LdapFilter | None
    ) -> None:
        self._registry = registry
        self._listener = listener
        self._interface = interface
        self._filter = filter_
        self._active = True

    def remove(self) -> None:
        """Stop listening; idempotent. A call that another thread is in the middle of may still finish."""
        self._active = False
        self._registry._remove_listener(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    def _deliver(self, change: _Change) -> None:
        reference = change.reference
        if not self._active or (self._interface is not None and self._interface not in reference.interfaces):
            change.count_told()
            return
        kind = change.kind
        if self._filter is not None and not self._filter.matches(change.properties):
            if change.before is None or not self._filter.matches(change.before):
                change.count_told()
                return
            kind = ServiceEventKind.MODIFIED_ENDMATCH
        event = ServiceEvent(kind, reference)
        try:
            # one expression, so that an interrupt cannot come in between: a listener is called once
            change.count_told() or self._listener(event)  # type: ignore[func-returns-value]
        except Exception:
            logger.exception("a service listener failed on %s of %r", kind.name, reference)


@dataclass(slots=True)
class _Change:
    """An event on its way, with the properties and listeners of the moment it happened."""

    kind: ServiceEventKind
    reference: ServiceReference
    properties: ServiceProperties
    listeners: tuple[ListenerRegistration, ...]
    #: the properties before a modification
    before: ServiceProperties | None = None
    #: how many of the listeners were told
    told: int = 0

    def count_told(self) -> None:
        """Count one more listener as told."""
        self.told += 1


class ServiceRegistration:
    """The registering side's handle of a service; also a context manager that unregisters it."""

    __slots__ = ("_changes", "_deliverer", "_reference", "_registry", "_scope", "_service")

    def __init__(
        self, registry: ServiceRegistry, service: Any, scope: Scope, names: tuple[str, ...], service_id: int
    ) -> None:
        self._registry = registry
        self._service = service
        self._scope = scope
        self._reference = ServiceReference(ServiceProperties({OBJECT_CLASS: names, SERVICE_ID: service_id}))
        self._changes: deque[_Change] = deque()
        #: an object of the call that delivers the changes; ``None`` if none does
        self._deliverer: object = None

    @property
    def reference(self) -> ServiceReference:
        """The reference of this service; the same object every time."""
        return self._reference

    def update(self, properties: Mapping[str, Any] | None = None) -> None:
        """Replace the properties; those not given are gone, and the ranking is 0 again unless given.

        Raises:
            ArgumentError: as for :meth:`ServiceRegistry.register`; nothing has changed.
            ClosedError: the service is unregistered.
        """
        self._registry._update(self, properties)

    def unregister(self) -> bool:
        """Take the service out of the registry, then tell the listeners.

        Returns:
            Whether this call did it; ``False`` if it was unregistered before.
        """
        return self._registry._unregister(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self.unregister()
        except BaseException:  # an interrupt: nothing else would do it
            self.unregister()
            raise

    @tolerant
    def __repr__(self) -> str:
        return f"<ServiceRegistration of {self._reference!r}>"

    def _complete(self, properties: Mapping[str, Any] | None) -> ServiceProperties:
        """``properties`` with those that are the registry's own."""
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


#: where a service is among those of an interface: the preferred first
_Order: TypeAlias = tuple[int, int]


def _order(reference: ServiceReference) -> _Order:
    return -reference.ranking, reference.id


def _rank(registration: ServiceRegistration, properties: ServiceProperties | None) -> _Order | None:
    """Return where a service with these properties is in the index; ``None`` without any."""
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
        #: best first; under ``None`` every service
        self._index: dict[str | None, tuple[ServiceReference, ...]] = {}
        self._listeners: tuple[ListenerRegistration, ...] = ()

    # --- offering services

    def register(
        self,
        interface: Interface | Sequence[Interface],
        service: Any,
        properties: Mapping[str, Any] | None = None,
        *,
        scope: Scope = "singleton",
    ) -> ServiceRegistration:
        """Offer a service.

        Args:
            interface: a class, a name, or several of them, under which it is found. Whether ``service`` has that
                interface is not checked.
            service: the object; with scope ``prototype`` a callable without arguments that makes one. It is kept
                until unregistered.
            properties: what filters see, beside ``objectClass``, ``service.id``, ``service.ranking`` (an int, 0 if
                not given) and ``service.scope``. Copied, but not deeply. Keys are non-empty str and the same if
                they differ only by case.
            scope: ``prototype`` for a new object per :meth:`get`.

        Raises:
            ArgumentError: anything of this is not as described.
            BaseException: what a signal handler raises meanwhile, such as ``KeyboardInterrupt``.
            After an exception nothing is registered.
        """
        several = isinstance(interface, Sequence) and not isinstance(interface, str)
        names = tuple(dict.fromkeys(map(interface_name, interface if several else (interface,))))  # type: ignore[arg-type]
        if not names:
            raise ArgumentError("a service needs at least one interface")
        if service is None:
            raise ArgumentError("a service must not be None")
        if scope not in ("singleton", "prototype"):
            raise ArgumentError(f"scope must be 'singleton' or 'prototype', not {scope!r:.80}")
        if scope == "prototype" and not callable(service):
            raise ArgumentError(f"with scope 'prototype' the service must be callable, not {type(service).__name__}")
        registration = ServiceRegistration(self, service, scope, names, next(self._ids))
        reference = registration._reference
        reference._properties = registration._complete(properties)
        try:
            with self._lock:
                self._change(registration, ServiceEventKind.REGISTERED, None, reference._properties)
            self._deliver(registration)
            return registration
        except BaseException:  # an interrupt: no registration is returned that could end it
            self._unregister(registration)
            raise

    def _update(self, registration: ServiceRegistration, properties: Mapping[str, Any] | None) -> None:
        reference = registration._reference
        changed = registration._complete(properties)
        with self._lock:
            if reference not in self._services:
                raise ClosedError(f"{reference!r} is unregistered")
            self._change(registration, ServiceEventKind.MODIFIED, reference._properties, changed)
        self._deliver(registration)

    def _unregister(self, registration: ServiceRegistration) -> bool:
        reference = registration._reference
        try:
            with self._lock:
                if reference not in self._services:
                    return False
                self._change(registration, ServiceEventKind.UNREGISTERING, reference._properties, None)
            self._deliver(registration)
            return True
        except BaseException:  # an interrupt: there is no later change that would deliver this one
            self._deliver(registration)
            raise

    def _change(
        self,
        registration: ServiceRegistration,
        kind: ServiceEventKind,
        before: ServiceProperties | None,
        after: ServiceProperties | None,
    ) -> None:
        """Change a service and queue the event; an interrupt undoes both. With the lock.

        Args:
            registration: of the service.
            kind: of the event.
            before: the properties so far; ``None`` if it is not registered.
            after: the properties to come; ``None`` if it is unregistered.
        """
        changes = registration._changes
        queued = len(changes)
        was, will = _rank(registration, before), _rank(registration, after)
        try:
            if before is None:
                self._put(registration, after)  # what is found can be got
            if was != will:
                self._reindex(registration._reference, was, will)
            self._put(registration, after)
            self._note(registration, kind, before if kind is ServiceEventKind.MODIFIED else None)
        except BaseException:
            self._reindex(registration._reference, will or was, was)  # it may be at either place, or at none
            self._put(registration, before)
            while len(changes) > queued:
                changes.pop()
            raise

    def _put(self, registration: ServiceRegistration, properties: ServiceProperties | None) -> None:
        reference = registration._reference
        if properties is None:
            self._services.pop(reference, None)
        else:
            reference._properties = properties
            self._services[reference] = registration

    def _reindex(self, reference: ServiceReference, before: _Order | None, after: _Order | None) -> None:
        """Move a reference in the index, in one step. With the lock.

        Comparing only a few and copying the rest, so that thousands of services may be registered one by one.

        Args:
            reference: its properties are still those of ``before``, unless it is moved back.
            before: where it is; ``None`` if it is nowhere.
            after: where it is to be; ``None`` for nowhere.
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

    # --- finding services

    def find(
        self,
        interface: Interface | None = None,
        filter: str | LdapFilter | None = None,  # noqa: A002 - OSGi's name
    ) -> list[ServiceReference]:
        """The services with that interface whose properties match, the preferred first.

        Args:
            interface: ``None`` for any.
            filter: a str is parsed, and remembered, as a case-insensitive filter.

        Returns:
            In order of ranking, highest first; with equal ranking the one registered first comes first.

        Raises:
            ArgumentError: the interface is no interface.
            InvalidFilterError: the filter does not parse.
        """
        return list(self._found(interface, filter))

    def find_one(
        self,
        interface: Interface | None = None,
        filter: str | LdapFilter | None = None,  # noqa: A002
    ) -> ServiceReference | None:
        """The first of :meth:`find`, or ``None``."""
        return next(iter(self._found(interface, filter)), None)

    def get(self, reference: ServiceReference) -> Any:
        """The service itself, or a new one with scope ``prototype``; ``None`` if it is not registered here (any more).

        Raises:
            Exception: whatever the factory of a prototype raised.
        """
        registration = self._services.get(reference)
        if registration is None:
            return None
        return registration._service() if registration._scope == "prototype" else registration._service

    def service(
        self,
        interface: Interface | None = None,
        filter: str | LdapFilter | None = None,  # noqa: A002
    ) -> Any:
        """The preferred service with that interface whose properties match, or ``None``. Raises as find and get."""
        for reference in self._found(interface, filter):
            service = self.get(reference)
            if service is not None:  # not unregistered in between
                return service
        return None

    def _found(self, interface: Interface | None, filter_: str | LdapFilter | None) -> Iterable[ServiceReference]:
        wanted = as_filter(filter_)
        entry = self._index.get(None if interface is None else interface_name(interface), ())
        if wanted is None:
            return entry
        return (reference for reference in entry if wanted.matches(reference.properties))

    def is_registered(self, reference: ServiceReference) -> bool:
        """Whether the service is registered here, still."""
        return reference in self._services

    # --- listening

    def add_listener(
        self,
        listener: ServiceListener,
        interface: Interface | None = None,
        filter: str | LdapFilter | None = None,  # noqa: A002
    ) -> ListenerRegistration:
        """Have ``listener`` called with a :class:`ServiceEvent` whenever a service comes, changes or goes.

        It is told of every change made after this returns; what is there already, :meth:`find` tells. It is called
        on the thread that made the change and may use the registry; what it raises is logged.

        Args:
            listener: called with the event; added twice, it is called twice.
            interface: only services with this interface.
            filter: only services whose properties match. One that matched before a modification but does not any
                more is told of with ``MODIFIED_ENDMATCH``.

        Raises:
            ArgumentError, InvalidFilterError: as for :meth:`find`.
        """
        if not callable(listener):
            raise ArgumentError(f"a listener must be callable, not {type(listener).__name__}")
        name = None if interface is None else interface_name(interface)
        registration = ListenerRegistration(self, listener, name, as_filter(filter))
        with self._lock:
            self._listeners += (registration,)
        return registration

    def _remove_listener(self, registration: ListenerRegistration) -> None:
        with self._lock:
            self._listeners = tuple(other for other in self._listeners if other is not registration)

    def _note(
        self, registration: ServiceRegistration, kind: ServiceEventKind, before: ServiceProperties | None = None
    ) -> None:
        """Queue an event; called with the lock, together with the change."""
        if self._listeners:
            reference = registration._reference
            registration._changes.append(_Change(kind, reference, reference._properties, self._listeners, before))

    def _deliver(self, registration: ServiceRegistration) -> None:
        changes = registration._changes
        me = object()
        try:
            with self._lock:
                if registration._deliverer is not None or not changes:
                    return
                registration._deliverer = me
            while True:
                with self._lock:
                    if changes[0].told == len(changes[0].listeners):
                        changes.popleft()
                    if not changes:
                        registration._deliverer = None
                        return
                change = changes[0]
                while change.told < len(change.listeners):
                    change.listeners[change.told]._deliver(change)
        except BaseException:  # an interrupt: the next call goes on where this one was
            with self._lock:
                if registration._deliverer is me:
                    registration._deliverer = None
            raise


_default: Final = ServiceRegistry()
hold_over_fork(_default._lock)


def default_registry() -> ServiceRegistry:
    """The registry of this process, which instances use unless they are given another one."""
    return _default
