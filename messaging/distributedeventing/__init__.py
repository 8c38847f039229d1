"""Distributed Eventing (RFC 214): events between processes, over any messaging instance.

==================  ================================================================================================
``admin``           DistributedEventAdmin: publish events, sessions, subscriptions, private topics
``events``          DistributableEvent and PushEvent; an event on its way to the consumers of this process
``whiteboard``      the interfaces of consumers and sources, the names of their properties, and the terms these set
``session``         EventPublisherSession: events with an end, and with replies
``subscription``    EventSubscription: the payloads of a topic as an Observable
``qos``             qualities of service
``event_consumer``  consumers and their objects, made of functions and services
``queues``          the queue of one consumer object, delayed by back-pressure
``sources``         whiteboard sources, opened while they have consumers
``publishing``      the way of an event from its sender
``admin_network``   the side that faces the other processes: what may come in and go out, and the list of topics
==================  ================================================================================================
"""

from messaging.dispatch.eventnetwork import EventNetwork, EventSigning, MemberDTO, NodeDTO, SigningKey
from messaging.distributedeventing.admin import DistributedEventAdmin
from messaging.distributedeventing.admin_network import DistributedEventAdminDTO, TopicDTO
from messaging.distributedeventing.events import ABORT, CONTINUE, ConsumerLifecycle, DistributableEvent, PushEvent
from messaging.distributedeventing.qos import (
    AT_LEAST_ONCE,
    AT_MOST_ONCE,
    EXACTLY_ONCE,
    IN_ORDER,
    OUT_OF_ORDER,
    PERSISTENT,
    TRANSIENT,
)
from messaging.distributedeventing.session import EventPublisherSession
from messaging.distributedeventing.subscription import EventSubscription
from messaging.distributedeventing.whiteboard import (
    DistributableEventConsumer,
    DistributedEventConstants,
    PushEventConsumer,
    PushEventSource,
)

__all__ = [
    "ABORT",
    "AT_LEAST_ONCE",
    "AT_MOST_ONCE",
    "CONTINUE",
    "EXACTLY_ONCE",
    "IN_ORDER",
    "OUT_OF_ORDER",
    "PERSISTENT",
    "TRANSIENT",
    "ConsumerLifecycle",
    "DistributableEvent",
    "DistributableEventConsumer",
    "DistributedEventAdmin",
    "DistributedEventAdminDTO",
    "DistributedEventConstants",
    "EventNetwork",
    "EventPublisherSession",
    "EventSigning",
    "EventSubscription",
    "MemberDTO",
    "NodeDTO",
    "PushEvent",
    "PushEventConsumer",
    "PushEventSource",
    "SigningKey",
    "TopicDTO",
]
