"""Event Admin (OSGi RFC 97): events with properties, posted or sent, to handlers in the service registry."""

from messaging.dispatch.handler import HandlerDTO, Tolerance
from messaging.dispatch.permission import TopicPermission, TopicPermissionCollection, TopicPolicy
from messaging.eventadmin.admin import EventAdmin, EventAdminDTO
from messaging.eventadmin.bridge import EventBridge
from messaging.eventadmin.constants import EventConstants
from messaging.eventadmin.event import Event
from messaging.eventadmin.handlers import EventHandler
from messaging.eventadmin.sources import ConfigurationEvents, ConnectionEvents, LogEvents, ServiceEvents

__all__ = [
    "ConfigurationEvents",
    "ConnectionEvents",
    "Event",
    "EventAdmin",
    "EventAdminDTO",
    "EventBridge",
    "EventConstants",
    "EventHandler",
    "HandlerDTO",
    "LogEvents",
    "ServiceEvents",
    "Tolerance",
    "TopicPermission",
    "TopicPermissionCollection",
    "TopicPolicy",
]
