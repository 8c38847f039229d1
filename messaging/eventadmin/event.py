"""Event: a topic and properties; the interface of handlers, and the names of the properties of both (RFC 97 5.1, 6).

::

    services.register(EventHandler, handler, {EventConstants.EVENT_TOPIC: ["org/osgi/topic", "com/isv/*"]})
"""

from __future__ import annotations

import abc
import contextlib
import functools
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any, Final

from messaging.dispatch import check_topic
from messaging.errors import InvalidEventError, InvalidFilterError
from messaging.errors.text import exact, printable, tolerant
from messaging.services import LdapFilter, as_filter

#: topic of log events (5.6.3)
LOG_TOPIC: Final = "org/osgi/service/log/LogEntry"
#: members that subclasses must not override (6.3)
_FINAL: Final = (
    *("topic", "get_topic", "properties", "get_property", "get_property_names", "matches"),
    *("__eq__", "__hash__", "__repr__", "__str__"),
)
_STR: Final = frozenset({str})
#: remembers the texts that are topics
_check_topic: Final = functools.lru_cache(1024)(check_topic)


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


class Event:
    """An event. Immutable if the values of its properties are, as they should be (5.1.1.2).

    The topic is one of its properties: ``event.topics``, and the other names that the RFC has for it.

    Args:
        topic: the kind of event.
        properties: further properties; copied. Keys that are no ``str`` are left out.
        topic_names: names under which the topic is a property, beside ``event.topics``. Properties of these names
            cannot be given.

    Raises:
        NullEventError, InvalidTopicError: ``topic`` is no topic.
        InvalidEventError: the properties are no mapping, or a name of the topic is no ``str``.
    """

    __slots__ = ("__weakref__", "_properties", "_topic", "_topic_names")

    def __init__(
        self,
        topic: str,
        properties: Mapping[str, Any] | None = None,
        *,
        topic_names: Iterable[str] = EventConstants.EVENT_TOPIC_NAMES,
    ) -> None:
        if type(topic) is not str:
            topic = check_topic(topic)  # an exact str: a subclass may behave differently
        _check_topic(topic)
        found: dict[str, Any] = {}
        if properties is not None:
            if not isinstance(properties, Mapping):
                raise InvalidEventError(
                    f"the properties of an event must be a mapping; these are {type(properties).__name__}"
                )
            found = dict(properties)  # atomic for a dict, which other threads may mutate
            if not _STR.issuperset(map(type, found)):
                found = {exact(key): value for key, value in found.items() if isinstance(key, str)}
        if topic_names is not EventConstants.EVENT_TOPIC_NAMES:
            topic_names = _checked(topic_names)
        for name in topic_names:
            found[name] = topic
        self._topic = topic
        self._topic_names = topic_names
        self._properties = found

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        overridden = [name for name in _FINAL if getattr(cls, name) is not getattr(Event, name)]
        if overridden:
            raise TypeError(f"{cls.__name__} must not override {', '.join(overridden)} of Event (RFC 97 6.3)")

    @property
    def topic(self) -> str:
        """Its topic (6.3.4)."""
        return self._topic

    @property
    def properties(self) -> Mapping[str, Any]:
        """Its properties, including the topic; read-only."""
        return MappingProxyType({name: self._properties[name] for name in self.get_property_names()})

    def get_topic(self) -> str:
        """Return its topic (6.3.4)."""
        return self._topic

    def get_property(self, name: str) -> Any:
        """Return the value of a property; ``None`` if there is no such property (6.3.2)."""
        return self._properties.get(name)

    def get_property_names(self) -> list[str]:
        """Return the names of its properties, once each; the topic is always one of them (6.3.3)."""
        return [EventConstants.EVENT_TOPIC, *(name for name in self._properties if name not in self._topic_names)]

    def matches(self, filter: str | LdapFilter) -> bool:  # noqa: A002  # the name of the specification
        """Return whether the properties match a filter; case-sensitive (6.3.5, 5.7.1).

        Raises:
            InvalidFilterError: ``filter`` does not parse, or is ``None``.
        """
        wanted = as_filter(filter)
        if wanted is None:
            raise InvalidFilterError("an LDAP filter is needed, not None", 0)
        return wanted.match_case(self._properties)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Event):
            return NotImplemented
        if self._topic != other._topic:
            return False
        with contextlib.suppress(Exception):  # values may not be comparable, such as arrays of numbers
            return self._properties == other._properties
        return False

    def __hash__(self) -> int:
        # values may not be hashable; equal events have equal names
        return hash((self._topic, frozenset(self._properties)))

    @tolerant
    def __repr__(self) -> str:
        # names only: values may be secrets of the application
        return f"<{type(self).__name__} {self._topic!r}: {', '.join(map(printable, self.get_property_names()))}>"

    __str__ = __repr__


def _checked(topic_names: Iterable[str]) -> tuple[str, ...]:
    """Return the names of the topic, including ``event.topics``."""
    names = (topic_names,) if isinstance(topic_names, str) else tuple(topic_names)
    if not all(isinstance(name, str) for name in names):
        raise InvalidEventError(f"the names of the topic must be str: {names!r:.80}")
    return tuple(dict.fromkeys((EventConstants.EVENT_TOPIC, *names)))


class EventHandler(abc.ABC):
    """Receives events. A function, or a coroutine function, may be registered in its place.

    Its service properties select the events: ``event.topics`` (topic filters; all events without it) and
    ``event.filter``. It receives posted events on a delivery thread and sent events on the sending thread; a coroutine
    function runs on the event loop that it was registered on. It should return quickly: other handlers wait for it.
    """

    @abc.abstractmethod
    def handle_event(self, event: Event) -> Any:
        """Handle an event (6.6.1). An exception is logged, and the next handler is called (5.3.1)."""
