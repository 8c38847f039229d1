"""Service registry and LDAP filters: how parts that do not know each other find each other."""

from messaging.services.filter import LdapFilter, as_filter, escaped
from messaging.services.properties import ServiceProperties
from messaging.services.registry import (
    SERVICE_RANKING,
    ListenerRegistration,
    ServiceEvent,
    ServiceEventKind,
    ServiceListener,
    ServiceReference,
    ServiceRegistration,
    ServiceRegistry,
    default_registry,
    interface_name,
)
from messaging.services.version import Version

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
