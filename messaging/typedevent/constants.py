"""Names of the service properties of event handlers, and of what the bus announces (157.9.4)."""

from __future__ import annotations

from typing import Final


class TypedEventConstants:
    """Standard names (157.9.4); those that are not in the specification say so."""

    #: LDAP filter over the event data; case-sensitive
    TYPED_EVENT_FILTER: Final = "event.filter"
    #: how many events of the history a new handler gets before all others; an int of at least 0
    TYPED_EVENT_HISTORY: Final = "event.history"
    #: topic filter, or several
    TYPED_EVENT_TOPICS: Final = "event.topics"
    #: class that a typed handler wants, or its qualified name
    TYPED_EVENT_TYPE: Final = "event.type"

    #: whose permissions count; not in the specification
    TYPED_EVENT_PRINCIPAL: Final = "event.principal"
    #: seconds that the handler may take for one event, 0 for any time; not in the specification
    TYPED_EVENT_TIMEOUT: Final = "event.timeout"
    #: LDAP filter over the properties of a bus: which buses the handler is for; not in the specification
    TYPED_EVENT_TARGET: Final = "event.target"
    #: property of a bus: its name; not in the specification
    TYPED_EVENT_BUS_NAME: Final = "event.bus.name"

    #: what a bus announces as ``osgi.implementation`` (157.7.1)
    TYPED_EVENT_IMPLEMENTATION: Final = "osgi.typedevent"
    TYPED_EVENT_SPECIFICATION_VERSION: Final = "1.1"
