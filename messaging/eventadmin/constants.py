"""Names of properties: of handlers, of events, and the conventions for events (RFC 97 5.1, 5.6.1, 6.5)."""

from __future__ import annotations

from typing import Final

#: topic of log events (5.6.3)
LOG_TOPIC: Final = "org/osgi/service/log/LogEntry"


class EventConstants:
    """Names of properties. Of several names use the first; the RFC itself uses the others in some places."""

    #: of a handler: one topic filter or several. Of an event: its topic
    EVENT_TOPIC: Final = "event.topics"
    #: all names of the topics: sections 6.5.1, 5.1.1.2 and 5.1.2 of the RFC
    EVENT_TOPIC_NAMES: Final = ("event.topics", "event.topic", "topic")
    #: of a handler: LDAP filter over the properties of events; case-sensitive
    EVENT_FILTER: Final = "event.filter"
    EVENT_FILTER_NAMES: Final = ("event.filter", "filter")

    #: of a handler: whether it needs its events in order; of later versions of Event Admin
    EVENT_DELIVERY: Final = "event.delivery"
    DELIVERY_ASYNC_ORDERED: Final = "async.ordered"
    DELIVERY_ASYNC_UNORDERED: Final = "async.unordered"

    # --- not in the specification

    #: of a handler: the principal whose permissions count
    EVENT_PRINCIPAL: Final = "event.principal"
    #: of a handler: how long it may take for one event, seconds; 0: unlimited
    EVENT_TIMEOUT: Final = "event.timeout"
    #: of a handler: LDAP filter over the properties of its EventAdmin, among them ``event.admin.name``
    EVENT_TARGET: Final = "event.target"
    EVENT_ADMIN_NAME: Final = "event.admin.name"

    # --- conventions for all events (5.6.1): set only if there is a value

    #: the event of another mechanism that is broadcast again
    EVENT: Final = "event"
    EXCEPTION: Final = "exception"
    EXCEPTION_CLASS: Final = "exception.class"
    EXCEPTION_MESSAGE: Final = "exception.message"
    MESSAGE: Final = "message"
    SERVICE: Final = "service"
    SERVICE_ID: Final = "service.id"
    SERVICE_OBJECTCLASS: Final = "service.objectClass"
    SERVICE_PID: Final = "service.pid"
    #: milliseconds since 1970
    TIMESTAMP: Final = "timestamp"
