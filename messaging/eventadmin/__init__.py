"""Event Admin (OSGi RFC 97): events with properties, posted or sent to handlers in the service registry.

The room stands on ``messaging.dispatch``, ``messaging.services`` and, for the bridge, ``messaging.typedevent``.

=================  =====================================================================================================
``admin``          EventAdmin: posting, sending, and finding handlers
``admin_handler``  one handler: its terms, its function, its posted events, and the context of its deliveries
``event``          Event, its conventional names, and the interface of handlers
``sources``        service, log, configuration and connection events
``bridge``         events of an EventAdmin on a typed event bus, and back
=================  =====================================================================================================
"""

from messaging.dispatch import HandlerDTO, Tolerance, TopicPermission, TopicPermissionCollection, TopicPolicy
from messaging.eventadmin.admin import EventAdmin, EventAdminDTO
from messaging.eventadmin.bridge import EventBridge
from messaging.eventadmin.event import Event, EventConstants, EventHandler
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
