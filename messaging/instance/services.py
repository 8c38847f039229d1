"""The services of one instance in its service registry, and the name that is unique there (RFC 5.1, 5.2)."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal
from weakref import WeakKeyDictionary

from messaging.adapter import Adapter
from messaging.connection import Connection
from messaging.connection.properties import builder_properties, instance_properties
from messaging.environment.forks import hold_over_fork, in_child
from messaging.errors import DuplicateNameError, MessagingError
from messaging.receiving import MessageSubscription
from messaging.replyto import ReplyToManySubscriptionHandler, ReplyToSingleSubscriptionHandler, ReplyToWhiteboard
from messaging.services import ServiceEventKind

if TYPE_CHECKING:
    from messaging.services import ListenerRegistration, ServiceEvent, ServiceRegistration, ServiceRegistry

#: the instances that have the names of each registry
_names: WeakKeyDictionary[ServiceRegistry, dict[str, InstanceServices]] = WeakKeyDictionary()
_names_lock = threading.Lock()  # guards _names
hold_over_fork(_names_lock)
in_child(_names.clear)


class InstanceServices:
    """The name of one instance in its registry, its services, and those added through it, until it is closed.

    Args:
        registry: where the services are registered.
        adapter: of the instance.
        name: of the instance.
        refuse_closed: raises ``ClosedError`` if the instance is closed.
    """

    def __init__(
        self, registry: ServiceRegistry, adapter: Adapter, name: str, refuse_closed: Callable[[], None]
    ) -> None:
        self._registry = registry
        self._adapter = adapter
        self._name = name
        self.refuse_closed = refuse_closed
        #: the instance's own services
        self.own: list[ServiceRegistration] = []
        #: the added services by their id; those of context builders with the properties given by the application
        self._added: dict[int, tuple[ServiceRegistration, Mapping[str, Any] | None]] = {}
        self._watches: list[ListenerRegistration] = []
        self._connection: Connection
        self._whiteboard: ReplyToWhiteboard | None = None

    def claim_name(self) -> None:
        """Reserve the name in the registry until :meth:`unregister`.

        Raises:
            DuplicateNameError: another instance has it.
        """
        with _names_lock:
            if _names.setdefault(self._registry, {}).setdefault(self._name, self) is not self:
                raise DuplicateNameError(
                    f"another instance in this service registry has the osgi.messaging.name {self._name!r}; "
                    f"give each its own name="
                )

    def properties(self) -> dict[str, Any]:
        """Return the properties of the instance's own services, as they are now."""
        return instance_properties(self._name, self._adapter)

    def register(
        self, interface: type[Any], service: object, scope: Literal["singleton", "prototype"] = "singleton"
    ) -> ServiceRegistration:
        """Register a service of the instance itself."""
        # in one expression: an interrupt in between would leave the service registered
        self.own.append(self._registry.register(interface, service, self.properties(), scope=scope))
        return self.own[-1]

    def add(self, interface: type[Any], service: object, properties: Mapping[str, Any]) -> ServiceRegistration:
        """Register a service of the application.

        Raises:
            ArgumentError: a property is malformed.
            ClosedError: the instance is closed.
        """
        return self._add(self._registry.register(interface, service, properties), None)

    def add_builder(
        self, interface: type[Any], factory: Callable[[], object], given: Mapping[str, Any]
    ) -> ServiceRegistration:
        """Register context builders of the application, with the ``given`` properties and those of the instance."""
        properties = builder_properties(self.properties(), given)
        return self._add(self._registry.register(interface, factory, properties, scope="prototype"), given)

    def _add(self, registration: ServiceRegistration, given: Mapping[str, Any] | None) -> ServiceRegistration:
        self._added[registration.reference.id] = registration, given
        try:
            self.refuse_closed()
        except MessagingError:  # closed meanwhile: the closing thread may have missed this one
            registration.unregister()
            raise
        return registration

    def watch(self, connection: Connection, whiteboard: ReplyToWhiteboard) -> None:
        """Follow the registry, and refresh and close ``whiteboard`` with the services."""
        self._connection = connection
        self._whiteboard = whiteboard
        listen = self._registry.add_listener
        self._watches.append(listen(self._end_subscriptions, MessageSubscription))
        self._watches.append(listen(self._forget, ReplyToSingleSubscriptionHandler))
        self._watches.append(listen(self._forget, ReplyToManySubscriptionHandler))

    def _end_subscriptions(self, event: ServiceEvent) -> None:
        """End the subscriptions when the application unregisters the subscription service (RFC 5.4)."""
        gone = event.kind is ServiceEventKind.UNREGISTERING and any(
            event.reference is own.reference for own in self.own
        )
        if gone and not self._connection.endings.is_closing:
            for subscription in self._connection.subscriptions.snapshot():
                self._connection.engine.call(self._connection.subscriptions.end, subscription)

    def _forget(self, event: ServiceEvent) -> None:
        if event.kind is ServiceEventKind.UNREGISTERING:
            self._added.pop(event.reference.id, None)

    def refresh(self) -> None:
        """Announce the features again, which have changed."""
        for registration in self.own:
            with contextlib.suppress(MessagingError):  # unregistered meanwhile
                registration.update(self.properties())
        for registration, given in [*self._added.values()]:
            if given is not None:
                with contextlib.suppress(MessagingError):
                    registration.update(builder_properties(self.properties(), given))
        if self._whiteboard is not None:
            self._whiteboard.refresh()

    def unregister(self) -> None:
        """Unregister every service, the added ones first, and release the name."""
        for watch in self._watches:
            watch.remove()
        if self._whiteboard is not None:
            self._whiteboard.close()
        for registration in [*(each for each, _ in [*self._added.values()]), *self.own]:
            registration.unregister()
        with _names_lock:
            taken = _names.get(self._registry, {})
            if taken.get(self._name) is self:
                del taken[self._name]
