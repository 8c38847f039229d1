"""Typed Event Service 1.1 (OSGi compendium, chapter 157): an event bus in the process, for typed and untyped events.

====================  ==================================================================================================
``bus``               TypedEventBus: publishes events, and is the entry to the parts below
``topic_publisher``   TypedEventPublisher: publishes to one topic
``event``             a published event, converted once to each type; as bytes for the disk
``handlers``          the interfaces of handlers, and what they declare: properties, and the type of their events
``receivers``         handlers with their terms, made of functions and services; what one topic leads to
``monitor``           TypedEventMonitor: observes events, and configures the ``history``
``history``           the events that are kept of each topic, in memory
``durable``           the history on the disk: its options, and its files beside the records
``store``             the records of that history: writes and reads them
``bus_connection``    BusConnection: the connection to an event network, both ways
``outbound``          the queue of the events that it sends
``connection_terms``  which events cross a connection
``past``              answers other processes that ask for past events
``late``              asks other processes for past events, and publishes them before live ones
====================  ==================================================================================================

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
