"""A bridge between an EventAdmin and a TypedEventBus, both ways.

An event that crosses a bridge remembers the services it came through, and is not taken back to any of them. Each
service receives it at most once for each way between the bridges, and no event goes round for ever.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from typing import Any

from messaging.dispatch import Principal, TopicFilter, check_principal, parse_filter
from messaging.dispatch.eventdata import checked_copy, is_simple
from messaging.errors import ArgumentError, ClosedError, MessagingError
from messaging.errors.checks import check_instance
from messaging.errors.text import SafeLog
from messaging.eventadmin.admin import EventAdmin
from messaging.eventadmin.event import Event, EventConstants, EventHandler
from messaging.execution import Closeable
from messaging.services import ServiceRegistration, ServiceRegistry, escaped
from messaging.typedevent import TypedEventBus, TypedEventConstants, UntypedEventHandler
from messaging.typedevent.event import PublishedEvent
from messaging.typedevent.receivers import EventRelay

logger = SafeLog(__name__)


class BridgedEvent(Event):
    """An event that came through other event services, which it remembers in ``passed``."""

    __slots__ = ("passed",)

    def __init__(self, topic: str, properties: Mapping[str, Any], passed: tuple[object, ...]) -> None:
        super().__init__(topic, properties)
        self.passed = passed


class EventBridge(Closeable):
    """Takes events from an EventAdmin to a TypedEventBus, and back, until it is closed. Thread safe; a context manager.

    On the bus they become untyped events: the properties without the topic. Properties that no event of a bus can have
    (the reference of a service, an exception) are left out silently, and the rest passes (5.5). To the EventAdmin they
    are posted, with their data in map form as properties. The bridge does not count as a handler on the bus: an event
    without other handlers is unhandled there.

    Args:
        admin: the EventAdmin.
        bus: the typed event bus.
        topics: filters of the topics that cross.
        to_bus, to_admin: the directions.
        principal: its permissions count, on both sides.

    Raises:
        InvalidTopicError: one of the topics is no topic filter.
        ArgumentError: there is no topic or no direction, or the principal is no str.
    """

    def __init__(
        self,
        admin: EventAdmin,
        bus: TypedEventBus,
        topics: str | Iterable[str] = "*",
        *,
        to_bus: bool = True,
        to_admin: bool = True,
        principal: Principal = None,
    ) -> None:
        check_instance("admin", admin, EventAdmin)
        check_instance("bus", bus, TypedEventBus)
        if not isinstance(topics, Iterable):
            raise ArgumentError(f"topics must be a str or several, not {type(topics).__name__}")
        self._admin = admin
        self._bus = bus
        self._principal = check_principal(principal)
        self._topics = [parse_filter(each) for each in ([topics] if isinstance(topics, str) else topics)]
        if not self._topics or not (to_bus or to_admin):
            raise ArgumentError("a bridge needs a topic, and a direction")
        self._registrations: list[ServiceRegistration] = []
        if to_bus:
            topics = [_without_single_level(each) for each in self._topics]
            target = f"({EventConstants.EVENT_ADMIN_NAME}={escaped(admin.name)})"
            self._serve(admin.services, EventHandler, self._from_admin, topics, target)
        if to_admin:
            topics = [each.text for each in self._topics]
            target = f"({TypedEventConstants.TYPED_EVENT_BUS_NAME}={escaped(bus.name)})"
            self._serve(bus.services, UntypedEventHandler, EventRelay(self._from_bus), topics, target)

    def _serve(
        self, services: ServiceRegistry, interface: type, handler: object, topics: list[str], target: str
    ) -> None:
        """Register a handler. The names of its properties are the same in both services."""
        properties: dict[str, Any] = {EventConstants.EVENT_TOPIC: topics, EventConstants.EVENT_TARGET: target}
        if self._principal is not None:
            properties[EventConstants.EVENT_PRINCIPAL] = self._principal
        self._registrations.append(services.register(interface, handler, properties))

    def _from_admin(self, event: Event) -> None:
        passed = event.passed if isinstance(event, BridgedEvent) else ()
        if self._bus in passed or not any(each.matches(event.topic) for each in self._topics):
            return
        try:
            passed = (*passed, self._admin)
            self._bus.publish(event.topic, _data_of(event), self._principal, is_untyped=True, passed=passed)
        except MessagingError as error:
            self._lost(event.topic, error)

    def _from_bus(self, event: PublishedEvent) -> None:
        if self._admin in event.passed:
            return
        try:
            bridged = BridgedEvent(event.topic, event.as_map(), (*event.passed, self._bus))
            self._admin.post_event(bridged, principal=self._principal)
        except MessagingError as error:
            self._lost(event.topic, error)

    def _lost(self, topic: str, error: MessagingError) -> None:
        if isinstance(error, ClosedError):
            self.close()
        else:
            logger.error("bridge: an event on %r does not cross the bridge: %s; it is dropped", topic, error)

    def close(self) -> None:
        """Let no more events cross; idempotent."""
        for registration in self._registrations:
            registration.unregister()


def _without_single_level(topic_filter: TopicFilter) -> str:
    """Return a filter without ``+``, which Event Admin lacks, that matches at least the same topics."""
    tokens = topic_filter.tokens
    if "+" not in tokens:
        return topic_filter.text
    return "/".join((*tokens[: tokens.index("+")], "*"))


def _data_of(event: Event) -> dict[str, Any]:
    """Return the properties of ``event`` that an event of a bus can have."""
    found = {}
    for name, value in event.properties.items():
        if name != EventConstants.EVENT_TOPIC:
            with contextlib.suppress(Exception):  # a value may raise anything when it is inspected
                if is_simple(value):
                    if not isinstance(value, type):
                        found[name] = value
                else:
                    found[name] = checked_copy({name: value})[name]
    return found
