"""References to services, their properties and versions, and the names of interfaces (OSGi core 3.2.5, 5.2)."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, TypeAlias

from messaging.errors import ArgumentError
from messaging.errors.checks import check_mapping
from messaging.errors.text import exact, printable, tolerant

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


class ServiceProperties(Mapping[str, Any]):
    """Properties of a service: an immutable mapping, safe to share between threads (OSGi core 5.2.5).

    Iteration yields the keys as they were written; looking up ignores their case.

    Args:
        properties: copied; the values are not, so do not change them afterwards.

    Attributes:
        folded: the values by keys without case. For filters, which only read it.
        get_exact: returns the value of a key as it was written, or ``None``. For filters.

    Raises:
        ArgumentError: they are no mapping, a key is not a non-empty str, or two keys differ only by case.
    """

    __slots__ = ("_written", "folded", "get_exact")

    def __init__(self, properties: Mapping[str, Any]) -> None:
        self._written: dict[str, Any] = {}
        self.folded: dict[str, Any] = {}
        self.get_exact: Callable[[str], Any] = self._written.get
        for key, value in check_mapping("properties", properties).items():
            if not isinstance(key, str) or not key:
                raise ArgumentError(f"a property key must be a non-empty str, not {key!r:.80}")
            key = exact(key)
            folded = key.casefold()
            if folded in self.folded:
                raise ArgumentError(f"property {key!r:.80} is given twice; keys that differ only by case are the same")
            self.folded[folded] = value
            self._written[key] = value

    def __getitem__(self, key: str) -> Any:
        try:
            return self.folded[key.casefold()]
        except AttributeError:  # not a str
            raise KeyError(key) from None

    def get(self, key: str, default: Any = None) -> Any:
        """Return the value of ``key`` in any case."""
        try:
            return self.folded.get(key.casefold(), default)
        except AttributeError:  # not a str
            return default

    def __contains__(self, key: object) -> bool:
        return isinstance(key, str) and key.casefold() in self.folded

    def __iter__(self) -> Iterator[str]:
        return iter(self._written)

    def __len__(self) -> int:
        return len(self._written)

    @tolerant
    def __repr__(self) -> str:
        # names only: values may be secrets of the application
        return f"<ServiceProperties {', '.join(map(printable, self._written))}>"


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


_VERSION: Final = re.compile(r"(\d{1,9})(?:\.(\d{1,9})(?:\.(\d{1,9})(?:\.([A-Za-z0-9_-]+))?)?)?", re.ASCII)

#: major, minor, micro, qualifier
Order = tuple[int, int, int, str]


def order_of(text: str) -> Order | None:
    """Return the sort key of a version such as ``1``, ``1.0`` or ``1.0.0.beta``; ``None`` if ``text`` is no version."""
    found = _VERSION.fullmatch(text.strip())
    if found is None:
        return None
    major, minor, micro, qualifier = found.groups()
    return int(major), int(minor or 0), int(micro or 0), qualifier or ""


class Version(str):
    """A version as the value of a service property: text, which filters compare as a version.

    ``(version=1.0.0)``, ``(version>=1.0.0)`` and ``(!(version>=1.1))`` match ``Version("1.0")``.
    """

    __slots__ = ()

    @property
    def order(self) -> Order | None:
        """Sort key; ``None`` if the text is no version."""
        return order_of(self)
