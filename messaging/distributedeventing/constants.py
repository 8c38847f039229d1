"""Names of service properties and of qualities of service (RFC 214 5.2, 5.3.1, 7.1)."""

from __future__ import annotations

from typing import Final


class DistributedEventConstants:
    """Names that RFC 214 defines, and names that this project adds."""

    #: topic filters of a consumer: a str or several (5.2.1)
    EVENT_TOPICS: Final = "event.topics"
    #: type of the payloads that a consumer wants: a class or its qualified name (5.2.1)
    EVENT_TYPE: Final = "event.type"
    #: lifecycle of a consumer, in the spelling of the text (5.2.3): ``UNIFIED`` or ``SESSION``
    EVENT_LIFECYCLE: Final = "event.lifecycle"
    #: lifecycle of a consumer, in the spelling of the API (7.1): ``GLOBAL`` or ``PER_SESSION``
    CONSUMER_LIFECYCLE: Final = "consumer.lifecycle"
    #: topic of a whiteboard event source, exactly one (5.2.4)
    EVENT_TOPIC: Final = "event.topic"
    #: qualities of service that an admin keeps (5.3.1)
    EVENT_DELIVERY_QOS: Final = "event.delivery.qos"

    # --- of this project
    #: whether the topics of a consumer or source are listed (DE087): ``True`` by default
    EVENT_ADVERTISED: Final = "event.advertised"
    #: LDAP filter over the properties of the admins that a consumer or source is for
    EVENT_TARGET: Final = "event.target"
    #: LDAP filter over the top level of the payload of a consumer's events
    EVENT_FILTER: Final = "event.filter"
    #: principal whose permissions count for a consumer
    EVENT_PRINCIPAL: Final = "event.principal"
    #: time limit of a consumer for one event, seconds
    EVENT_TIMEOUT: Final = "event.timeout"
    #: name of an admin
    EVENT_ADMIN_NAME: Final = "event.admin.name"
