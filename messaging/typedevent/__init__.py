"""Typed Event Service 1.1 (OSGi compendium, chapter 157): an event bus in the process, for typed and untyped events.

=====================  =================================================================================================
``bus``                TypedEventBus: publishes events, and is the entry to the parts below
``topic_publisher``    TypedEventPublisher: publishes to one topic
``handlers``           the interfaces of handlers, the names of their properties, and decorators for these
``handler_registrar``  from functions to services, and from services to receivers
``receivers``          receivers: handlers with their terms; the receivers, observers and history policy of one topic
``reify``              the type that a handler wants
``monitor``            TypedEventMonitor: observes events, and configures the ``history``
``bus_connection``     BusConnection: the connection to an event network; ``outbound`` queues the events that are sent;
                       ``connected_bus`` takes in those of others; ``connection_terms`` says which events cross;
                       ``asking`` asks other processes for past events, ``past`` answers them, and ``late`` publishes
                       them here before live events, to handlers with a history
``durable``            options of the history on the disk; ``store`` writes it, in the form of ``stored_event``, with
                       its ``history_files``; ``replaying`` reads it
``event``              a published event, converted once to each type
=====================  =================================================================================================

The data of events, as maps and converted to types, is a room of its own: :mod:`messaging.dispatch.eventdata`.
"""

from messaging.dispatch import HandlerDTO, Tolerance, TopicPermission, TopicPermissionCollection, TopicPolicy
from messaging.dispatch.eventdata import convert, to_map, topic_of
from messaging.dispatch.eventnetwork import EventNetwork
from messaging.typedevent.bus import TypedEventBus, TypedEventBusDTO
from messaging.typedevent.bus_connection import BusConnection, BusConnectionDTO
from messaging.typedevent.durable import DurableHistory, DurableHistoryDTO
from messaging.typedevent.handlers import (
    EventFilter,
    EventTopics,
    EventType,
    TypedEventConstants,
    TypedEventHandler,
    UnhandledEventHandler,
    UntypedEventHandler,
)
from messaging.typedevent.history import RangePolicy
from messaging.typedevent.monitor import MonitorEvent, TypedEventMonitor
from messaging.typedevent.topic_publisher import TypedEventPublisher

__all__ = [
    "BusConnection",
    "BusConnectionDTO",
    "DurableHistory",
    "DurableHistoryDTO",
    "EventFilter",
    "EventNetwork",
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
