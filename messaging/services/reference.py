"""References to services, and the names of interfaces (OSGi core 5.2)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, TypeAlias

from messaging.errors import ArgumentError
from messaging.text import exact, printable, tolerant

if TYPE_CHECKING:
    from messaging.services.properties import ServiceProperties

OBJECT_CLASS: Final = "objectClass"
SERVICE_ID: Final = "service.id"
SERVICE_RANKING: Final = "service.ranking"
SERVICE_SCOPE: Final = "service.scope"

Interface: TypeAlias = type[Any] | str


def interface_name(interface: Interface) -> str:
    """Return the name an interface is registered under: ``module.qualname`` of a class, a str as it is.

    Raises:
        ArgumentError: ``interface`` is neither a class nor a non-empty str.
    """
    if isinstance(interface, str) and interface:
        return exact(interface)
    if isinstance(interface, type):
        return f"{interface.__module__}.{interface.__qualname__}"
    raise ArgumentError(f"an interface must be a class or a non-empty str, not {interface!r:.80}")


class ServiceReference:
    """Points at a registered service; made by the registry, compared by identity, valid until unregistered.

    Attributes:
        properties: the present properties: a read-only mapping that never changes. An update replaces it; after
            unregistering it is the last one. Only the registry sets it.
    """

    __slots__ = ("properties",)

    properties: ServiceProperties

    def __init__(self, properties: ServiceProperties) -> None:
        self.properties = properties

    @property
    def id(self) -> int:
        """``service.id``: unique within the registry, increasing."""
        service_id: int = self.properties[SERVICE_ID]
        return service_id

    @property
    def ranking(self) -> int:
        """``service.ranking``: of several services that fit, the highest is preferred. 0 unless set."""
        ranking: int = self.properties[SERVICE_RANKING]
        return ranking

    @property
    def interfaces(self) -> tuple[str, ...]:
        """``objectClass``: the names of the interfaces the service was registered under."""
        names: tuple[str, ...] = self.properties[OBJECT_CLASS]
        return names

    @tolerant
    def __repr__(self) -> str:
        return f"<ServiceReference {self.id}: {', '.join(map(printable, self.interfaces))}>"
