"""Typed Event Service 1.1 (OSGi compendium, chapter 157): an event bus in the process, for typed and untyped events."""

from messaging.dispatch import HandlerDTO, Tolerance, TopicPermission, TopicPermissionCollection, TopicPolicy
from messaging.typedevent.bus import TypedEventBus, TypedEventBusDTO
from messaging.typedevent.constants import TypedEventConstants
from messaging.typedevent.conversion import convert
from messaging.typedevent.handlers import (
    EventFilter,
    EventTopics,
    EventType,
    TypedEventHandler,
    UnhandledEventHandler,
    UntypedEventHandler,
)
from messaging.typedevent.history import RangePolicy
from messaging.typedevent.maps import to_map
from messaging.typedevent.monitor import MonitorEvent, TypedEventMonitor
from messaging.typedevent.publisher import TypedEventPublisher
from messaging.typedevent.reify import topic_of

__all__ = [
    "EventFilter",
    "EventTopics",
    "EventType",
    "HandlerDTO",
    "MonitorEvent",
    "RangePolicy",
    "Tolerance",
    "TopicPermission",
    "TopicPermissionCollection",
    "TopicPolicy",
    "TypedEventBus",
    "TypedEventBusDTO",
    "TypedEventConstants",
    "TypedEventHandler",
    "TypedEventMonitor",
    "TypedEventPublisher",
    "UnhandledEventHandler",
    "UntypedEventHandler",
    "convert",
    "to_map",
    "topic_of",
]
