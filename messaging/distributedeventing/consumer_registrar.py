"""Registration of consumers: functions and objects become services, services become consumers (RFC 214 5.2.1)."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, TypedDict

from messaging.distributedeventing.event_consumer import PLAIN, WHOLE, EventConsumer
from messaging.distributedeventing.terms import is_prototype, read_terms
from messaging.distributedeventing.whiteboard import DistributableEventConsumer, PushEventConsumer
from messaging.distributedeventing.whiteboard import DistributedEventConstants as Names
from messaging.errors import ArgumentError

if TYPE_CHECKING:
    from messaging.dispatch import EventService, Principal
    from messaging.services import ServiceProperties, ServiceReference, ServiceRegistration


#: see ``ConsumerRegistrar``
_PRUNE_AT: Final = 64


class ConsumerOptions(TypedDict, total=False):
    """Options of ``DistributedEventAdmin.on``; see there."""

    type: Any
    is_whole: bool
    is_session_aware: bool
    is_advertised: bool
    filter: str | None
    principal: Principal
    timeout: float | None


class ConsumerRegistrar:
    """Registers functions as consumers of one admin, and makes the consumers of its services. Thread safe.

    Args:
        admin: its registry, its delivery threads, and the time limit of its consumers.
        target: LDAP filter that matches the admin only.
        limit: maximum number of events that a consumer may queue.
        changed: called when the consumers of the admin change.
    """

    def __init__(self, admin: EventService, target: str, limit: int, changed: Callable[[], object]) -> None:
        self._admin = admin
        self._target = target
        self._limit = limit
        self._changed = changed
        self._lock = threading.RLock()  # guards the following; reentrant for signal handlers
        self._made: list[ServiceRegistration] = []
        #: number of registrations at which ended ones are forgotten
        self._prune_at = _PRUNE_AT

    def close(self) -> None:
        """Unregister the consumers that :meth:`register` registered."""
        with self._lock:
            made, self._made = self._made, []
        for each in made:
            each.unregister()

    def _keep(self, registration: ServiceRegistration) -> None:
        with self._lock:
            self._made.append(registration)
            if len(self._made) >= self._prune_at:
                self._made = [each for each in self._made if self._admin.services.is_registered(each.reference)]
                self._prune_at = max(_PRUNE_AT, 2 * len(self._made))
        if not self._admin.is_open:  # closed meanwhile
            registration.unregister()
            self._admin.refuse_closed()

    def register(
        self,
        consumer: Any,
        topics: tuple[str, ...],
        type_: Any,
        *,
        is_whole: bool = False,
        is_session_aware: bool = False,
        is_advertised: bool = True,
        filter: str | None = None,  # noqa: A002  # the name of the option
        principal: Principal = None,
        timeout: float | None = None,
    ) -> ServiceRegistration:
        """Register a consumer of this admin only; raise the errors for which the admin ignores a consumer."""
        self._admin.refuse_closed()
        if not callable(getattr(consumer, "accept", consumer)):
            raise ArgumentError(f"a {type(consumer).__name__} is neither a function nor has accept()")
        optional = {
            Names.EVENT_TYPE: type_,
            Names.EVENT_FILTER: filter,
            Names.EVENT_PRINCIPAL: principal,
            Names.EVENT_TIMEOUT: timeout,
        }
        properties = {
            Names.EVENT_TOPICS: list(topics),
            Names.EVENT_LIFECYCLE: "SESSION" if is_session_aware else "UNIFIED",
            Names.EVENT_ADVERTISED: is_advertised,
            Names.EVENT_TARGET: self._target,
            **{name: value for name, value in optional.items() if value is not None},
        }
        terms = read_terms(properties, is_prototype=False)
        whole = is_whole or isinstance(consumer, DistributableEventConsumer)
        interface = DistributableEventConsumer if whole else PushEventConsumer
        registration = self._admin.dispatcher.register(interface, consumer, properties, terms)
        self._keep(registration)
        return registration

    def make(self, reference: ServiceReference, kind: str, properties: ServiceProperties) -> EventConsumer | None:
        """Return the consumer of a service; ``None`` if its other interface counts (5.2.1). See ``Dispatcher``."""
        if kind == PLAIN and WHOLE in reference.interfaces:
            return None
        return EventConsumer(
            reference,
            kind,
            read_terms(properties, is_prototype=is_prototype(reference)),
            admin=self._admin,
            limit=self._limit,
            changed=self._changed,
        )
