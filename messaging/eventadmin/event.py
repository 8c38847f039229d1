"""Event: a topic and properties (RFC 97 5.1.1, 6.3)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any, Final

from messaging.dispatch.topics import check_topic
from messaging.errors import InvalidEventError
from messaging.eventadmin.constants import EventConstants
from messaging.services.filter import LdapFilter, as_filter

#: what subclasses must not override (6.3)
_FINAL: Final = (
    *("topic", "get_topic", "properties", "get_property", "get_property_names", "matches"),
    *("__eq__", "__hash__", "__repr__", "__str__"),
)


class Event:
    """An event. Immutable, but for what its values can do: those should be immutable, too (5.1.1.2).

    Its topic is one of its properties: ``event.topics``, and under the other names that the RFC has for it.

    Args:
        topic: what happened.
        properties: what else is to be known; copied. Keys that are no ``str`` are left out.
        topic_names: under which names the topic is a property. Properties of these names cannot be given.

    Raises:
        NullEventError, InvalidTopicError: it is no topic.
        InvalidEventError: the properties are no mapping.
    """

    __slots__ = ("__weakref__", "_names", "_properties", "_topic")

    def __init__(
        self,
        topic: str,
        properties: Mapping[str, Any] | None = None,
        *,
        topic_names: Iterable[str] = EventConstants.EVENT_TOPIC_NAMES,
    ) -> None:
        check_topic(topic)
        if properties is not None and not isinstance(properties, Mapping):
            raise InvalidEventError(
                f"the properties of an event must be a mapping; these are {type(properties).__name__}"
            )
        names = (topic_names,) if isinstance(topic_names, str) else tuple(topic_names)
        given = {key: value for key, value in (properties or {}).items() if isinstance(key, str) and key not in names}
        self._topic = topic
        self._names = (EventConstants.EVENT_TOPIC, *given)
        self._properties = {**given, **dict.fromkeys(names, topic), EventConstants.EVENT_TOPIC: topic}

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        overridden = [name for name in _FINAL if name in cls.__dict__]
        if overridden:
            raise TypeError(f"{cls.__name__} must not override {', '.join(overridden)} of Event (RFC 97 6.3)")

    @property
    def topic(self) -> str:
        """Its topic (6.3.4)."""
        return self._topic

    @property
    def properties(self) -> Mapping[str, Any]:
        """Its properties, the topic among them; read-only."""
        return MappingProxyType({name: self._properties[name] for name in self._names})

    def get_topic(self) -> str:
        """Its topic (6.3.4)."""
        return self._topic

    def get_property(self, name: str) -> Any:
        """The value of a property, ``None`` if there is no such one (6.3.2)."""
        return self._properties.get(name)

    def get_property_names(self) -> list[str]:
        """The names of its properties, once each; never empty, since the topic is one (6.3.3)."""
        return [*self._names]

    def matches(self, filter: str | LdapFilter) -> bool:  # noqa: A002  # the name of the specification
        """Whether the properties match a filter, in which case counts (6.3.5, 5.7.1).

        Raises:
            InvalidFilterError: it does not parse.
        """
        wanted = as_filter(filter)
        if wanted is None:
            raise InvalidEventError("a filter is needed, not None")
        return wanted.match_case(self._properties)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Event):
            return False
        return self._topic == other._topic and self._properties == other._properties

    def __hash__(self) -> int:
        # values may have no hash; equal events have equal names
        return hash((self._topic, frozenset(self._properties)))

    def __repr__(self) -> str:
        # values may be secrets of the application: names only
        return f"<{type(self).__name__} {self._topic!r}: {', '.join(self._names)}>"
