"""Service interfaces of event handlers (157.9.5, 157.9.7, 157.9.8), and decorators for their properties (157.12).

::

    @EventTopics("orders/*")
    @EventFilter("(total>=100)")
    class LargeOrders(TypedEventHandler[Order]):
        def notify(self, topic: str, event: Order) -> None: ...

    services.register(TypedEventHandler, LargeOrders())

A handler is an object with the method of its interface, with or without inheriting from it, or a function. Both may be
coroutine functions. A handler receives one event at a time, in order. Functions run on a delivery thread. Coroutines
run on the event loop that was running where the handler was registered, or where the bus was opened if that was later;
without one, on a loop that all such coroutines share. A handler should be quick: one that exceeds its time limit is
blocked (157.4.6).
"""

from __future__ import annotations

import abc
from collections.abc import Callable
from typing import Any, Final, Generic, TypeVar

from messaging.dispatch import read_filter, read_topics
from messaging.errors import ArgumentError

T = TypeVar("T")
C = TypeVar("C", bound=Callable[..., Any])

_DECLARED: Final = "__event_properties__"


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


class TypedEventHandler(abc.ABC, Generic[T]):
    """Receives events as instances of ``T`` (157.9.5).

    ``T`` is the property ``event.type``, else the parameter of the base class, else the annotation of ``notify``.
    Without ``event.topics`` the handler receives the events of the topic made of the name of ``T``.
    """

    @abc.abstractmethod
    def notify(self, topic: str, event: T) -> Any:
        """Handle an event.

        Args:
            topic: the topic it was published to.
            event: shared with other handlers, so it must not be mutated (157.2.4.1).
        """


class UntypedEventHandler(abc.ABC):
    """Receives events as nested dicts (157.9.8). Without ``event.topics`` it receives none."""

    @abc.abstractmethod
    def notify_untyped(self, topic: str, event: dict[str, Any]) -> Any:
        """Handle an event.

        Args:
            topic: the topic it was published to.
            event: shared with other handlers, so it must not be mutated (157.2.4.2).
        """


class UnhandledEventHandler(abc.ABC):
    """Receives events that no other handler received, as nested dicts (157.9.7).

    ``event.topics`` and ``event.filter`` restrict them; without these it receives all such events.
    """

    @abc.abstractmethod
    def notify_unhandled(self, topic: str, event: dict[str, Any]) -> Any:
        """Handle an event.

        Args:
            topic: the topic it was published to.
            event: shared with other handlers, so it must not be mutated.
        """


def _declare(name: str, value: Any) -> Callable[[C], C]:
    def decorate(target: C) -> C:
        # A copy, so that the properties of a base class stay unchanged.
        setattr(target, _DECLARED, {**getattr(target, _DECLARED, {}), name: value})
        return target

    return decorate


def declared_properties(service: Any) -> dict[str, Any]:
    """Return the properties that decorators declare for a handler. Those of its registration override them."""
    return dict(getattr(service, _DECLARED, {}))


def EventTopics(*topics: str) -> Callable[[C], C]:  # noqa: N802  # the name of the specification
    """Declare ``event.topics`` of a handler class or function (157.12.3).

    Raises:
        ArgumentError, InvalidTopicError: there is no topic, or one is no topic filter.
    """
    if not topics:
        raise ArgumentError("EventTopics: at least one topic is needed")
    read_topics(topics, TypedEventConstants.TYPED_EVENT_TOPICS)
    return _declare(TypedEventConstants.TYPED_EVENT_TOPICS, topics)


def EventFilter(filter: str) -> Callable[[C], C]:  # noqa: N802, A002
    """Declare ``event.filter`` of a handler class or function (157.12.2).

    Raises:
        InvalidFilterError: the filter does not parse.
    """
    read_filter(filter)
    return _declare(TypedEventConstants.TYPED_EVENT_FILTER, filter)


def EventType(type: Any) -> Callable[[C], C]:  # noqa: N802, A002
    """Declare ``event.type`` of a typed handler class or function (157.12.4): a class, or its qualified name."""
    return _declare(TypedEventConstants.TYPED_EVENT_TYPE, type)
