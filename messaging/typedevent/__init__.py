"""Typed Event Service 1.1 (OSGi compendium, chapter 157): an event bus in the process, for typed and untyped events.

==================  ================================================================================================
``bus``             TypedEventBus: publishes events, and is the entry to the parts below; TypedEventPublisher
``handlers``        the interfaces of handlers, and decorators for their properties (``constants``)
``registration``    from functions to services, and from services to receivers
``receivers``       receivers: handlers with their terms; the receivers, observers and history policy of one topic
``reify``           the type that a handler wants, and the topic made of its name
``monitor``         TypedEventMonitor: observes events, and configures the ``history``
``event``           a published event, converted once to each type
``conversion``      conversion to types; ``simple`` has the values without parts, ``problems`` the errors
``schema``          the fields of classes; ``maps`` turns events into nested maps
==================  ================================================================================================
"""

from messaging.dispatch import HandlerDTO, Tolerance, TopicPermission, TopicPermissionCollection, TopicPolicy
from messaging.typedevent.bus import TypedEventBus, TypedEventBusDTO, TypedEventPublisher
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
