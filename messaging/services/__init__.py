"""The service registry and LDAP filters: parts of a program find each other by interface and properties.

Import from the room, not from its modules, but for :mod:`reporting <messaging.services.reporting>`.

==============  ==================================================================================================
``registry``    ServiceRegistry and ServiceRegistration: offering and finding services; service events
``reference``   ServiceReference; properties of services, with case-insensitive keys; versions; names of interfaces
``filter``      LdapFilter, and reading its text; ``matching`` compiles it
``reporting``   reporters: parts that report their state to metrics, health checks and the monitor
==============  ==================================================================================================
"""

from messaging.services.filter import LdapFilter, as_filter, escaped
from messaging.services.reference import SERVICE_RANKING, ServiceProperties, ServiceReference, Version, interface_name
from messaging.services.registry import (
    ListenerRegistration,
    ServiceEvent,
    ServiceEventKind,
    ServiceListener,
    ServiceRegistration,
    ServiceRegistry,
    default_registry,
)

__all__ = [
    "SERVICE_RANKING",
    "LdapFilter",
    "ListenerRegistration",
    "ServiceEvent",
    "ServiceEventKind",
    "ServiceListener",
    "ServiceProperties",
    "ServiceReference",
    "ServiceRegistration",
    "ServiceRegistry",
    "Version",
    "as_filter",
    "default_registry",
    "escaped",
    "interface_name",
]
