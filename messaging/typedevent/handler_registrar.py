"""Registration of the handlers of a typed event bus: functions become services, services become receivers (157.4)."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final

from messaging.dispatch import TopicPermission
from messaging.dispatch.eventdata import is_untyped, load_type, topic_of
from messaging.errors import ArgumentError
from messaging.services import interface_name
from messaging.typedevent.handlers import TypedEventConstants as Names
from messaging.typedevent.handlers import TypedEventHandler, UntypedEventHandler, declared_properties
from messaging.typedevent.receivers import TYPED, EventReceiver, TypedReceiver, function_of, read_terms
from messaging.typedevent.reify import reified_type

if TYPE_CHECKING:
    from messaging.dispatch import EventService
    from messaging.services import ServiceProperties, ServiceReference, ServiceRegistration
    from messaging.typedevent.event import PublishedEvent
    from messaging.typedevent.history import EventHistory

#: property of a bus, unique in the process; names of buses need not be unique
_BUS_ID: Final = "event.bus.id"
_numbers: Final = itertools.count(1)


def next_bus_id() -> int:
    """Return a number that no other bus of the process has."""
    return next(_numbers)


class HandlerRegistrar:
    """Registers functions as handlers of one bus, and makes the receivers of its handlers. Thread safe.

    Args:
        bus_id: the number of the bus.
        announced: other properties that the bus announces; handlers select buses by these.
        history: the history that new handlers are given events of; guarded by the lock of the dispatcher.
        bus: whether it is open, its delivery threads, and when a handler is blocked.
    """

    def __init__(self, bus_id: int, announced: Mapping[str, Any], history: EventHistory, bus: EventService) -> None:
        self.properties = {**announced, _BUS_ID: bus_id}
        self._history = history
        self._bus = bus

    # --- from functions to services

    def register_by_type(
        self, function: Callable[..., Any], topics: tuple[Any, ...], type_: Any, options: Mapping[str, Any]
    ) -> ServiceRegistration:
        """Register a function as a typed handler, or as an untyped one if it names no type; see :meth:`register`."""
        declared = declared_properties(function)
        wanted = declared.get(Names.TYPED_EVENT_TYPE) if type_ is None else type_
        if wanted is None:
            wanted = reified_type(function)
        elif isinstance(wanted, str) or not is_untyped(wanted):
            wanted = load_type(wanted)
        if not is_untyped(wanted):
            return self.register(TypedEventHandler, function, topics, {**options, Names.TYPED_EVENT_TYPE: wanted})
        if not topics and Names.TYPED_EVENT_TOPICS not in declared:
            raise ArgumentError("a handler that is not annotated with the type of its events needs a topic")
        return self.register(UntypedEventHandler, function, topics, options)

    def register(
        self, interface: type[Any], function: Callable[..., Any], topics: tuple[Any, ...], options: Mapping[str, Any]
    ) -> ServiceRegistration:
        """Register a function as a handler of this bus only; raises the errors for which a bus ignores a handler."""
        self._bus.refuse_closed()
        named = [topic_of(each) if isinstance(each, type) else each for each in topics]
        properties = {
            **{name: value for name, value in options.items() if value is not None},
            Names.TYPED_EVENT_TARGET: f"({_BUS_ID}={self.properties[_BUS_ID]})",
        }
        if named:
            properties[Names.TYPED_EVENT_TOPICS] = named
        kind = interface_name(interface)
        function_of(kind, function)
        terms = read_terms(kind, function, properties)
        return self._bus.dispatcher.register(interface, function, properties, terms)

    # --- from services to receivers

    def make(self, reference: ServiceReference, kind: str, properties: ServiceProperties) -> EventReceiver | None:
        """Return the receiver of a service, or ``None`` if the service is gone; see ``Dispatcher``."""
        services = self._bus.services
        service = services.get(reference)
        if service is None:
            if services.is_registered(reference):
                raise ArgumentError("its factory returned None")
            return None
        return (TypedReceiver if kind == TYPED else EventReceiver)(
            self._bus.title,
            reference,
            kind,
            service,
            read_terms(kind, service, properties),
            replay=self._replay,
            pool=self._bus.pool,
            tolerance=self._bus.tolerance,
            block=self._bus.dispatcher.block,
        )

    def _replay(self, receiver: EventReceiver) -> Iterator[PublishedEvent]:
        """Yield the past events of a receiver's topics, the newest first. Called with the lock, iterated without."""
        past = self._history.of(receiver.topics)
        principal = receiver.terms.principal
        return (each for each in past if self._bus.dispatcher.may(principal, TopicPermission.SUBSCRIBE, each.topic))
