"""Names of the service properties of event handlers and of typed event buses (157.9.4)."""

from __future__ import annotations

from typing import Final


class TypedEventConstants:
    """Standard names (157.9.4). Names that the specification does not define are marked."""

    #: LDAP filter over the event data; case-sensitive
    TYPED_EVENT_FILTER: Final = "event.filter"
    #: number of past events that a new handler receives before all others; an int of at least 0
    TYPED_EVENT_HISTORY: Final = "event.history"
    #: topic filter, or several
    TYPED_EVENT_TOPICS: Final = "event.topics"
    #: class that a typed handler wants, or its qualified name
    TYPED_EVENT_TYPE: Final = "event.type"

    #: principal whose permissions count; not in the specification
    TYPED_EVENT_PRINCIPAL: Final = "event.principal"
    #: time limit of the handler for one event, seconds, 0 for none; not in the specification
    TYPED_EVENT_TIMEOUT: Final = "event.timeout"
    #: LDAP filter over the properties of the buses that the handler is for; not in the specification
    TYPED_EVENT_TARGET: Final = "event.target"
    #: property of a bus: its name; not in the specification
    TYPED_EVENT_BUS_NAME: Final = "event.bus.name"

    #: value that a bus announces as ``osgi.implementation`` (157.7.1)
    TYPED_EVENT_IMPLEMENTATION: Final = "osgi.typedevent"
    TYPED_EVENT_SPECIFICATION_VERSION: Final = "1.1"
