"""The service interfaces of event handlers (157.9.5, 157.9.7, 157.9.8), and decorators for their properties (157.12).

::

    @EventTopics("orders/*")
    @EventFilter("(total>=100)")
    class LargeOrders(TypedEventHandler[Order]):
        def notify(self, topic: str, event: Order) -> None: ...

    services.register(TypedEventHandler, LargeOrders())

A handler is an object with the method of its interface, whether it inherits from it or not, or a function in its
place; either may be a coroutine function. It gets one event at a time, in order: on a delivery thread or, as a
coroutine, on the event loop that ran where it was registered, or where the bus was opened if that was later; if none
did, on one that all of those share. It should be quick: one that does not return in time is blocked (157.4.6).
"""

from __future__ import annotations

import abc
from collections.abc import Callable
from typing import Any, Final, Generic, TypeVar

from messaging.dispatch import read_filter, read_topics
from messaging.errors import ArgumentError
from messaging.typedevent.constants import TypedEventConstants as Names

T = TypeVar("T")
C = TypeVar("C", bound=Callable[..., Any])

_DECLARED: Final = "__event_properties__"


class TypedEventHandler(abc.ABC, Generic[T]):
    """Gets events as instances of ``T`` (157.9.5).

    ``T`` is the parameter of the base class, the annotation of ``notify``, or the property ``event.type``, which
    goes before both. Without ``event.topics`` it gets the events of the topic that is made of the type's name.
    """

    @abc.abstractmethod
    def notify(self, topic: str, event: T) -> Any:
        """Handle an event.

        Args:
            topic: it was published to.
            event: shared with others: not to be changed (157.2.4.1).
        """


class UntypedEventHandler(abc.ABC):
    """Gets events as nested dicts (157.9.8). Without ``event.topics`` it gets none."""

    @abc.abstractmethod
    def notify_untyped(self, topic: str, event: dict[str, Any]) -> Any:
        """Handle an event.

        Args:
            topic: it was published to.
            event: shared with others: not to be changed (157.2.4.2).
        """


class UnhandledEventHandler(abc.ABC):
    """Gets events that no other handler got, as nested dicts (157.9.7).

    ``event.topics`` and ``event.filter`` say which of them; all, without these.
    """

    @abc.abstractmethod
    def notify_unhandled(self, topic: str, event: dict[str, Any]) -> Any:
        """Handle an event.

        Args:
            topic: it was published to.
            event: shared with others: not to be changed.
        """


def _declare(name: str, value: Any) -> Callable[[C], C]:
    def decorate(target: C) -> C:
        # a copy: what a base class has declared stays its own
        setattr(target, _DECLARED, {**getattr(target, _DECLARED, {}), name: value})
        return target

    return decorate


def declared_properties(service: Any) -> dict[str, Any]:
    """What decorators say about a handler; what it is registered with goes before that."""
    return dict(getattr(service, _DECLARED, {}))


def EventTopics(*topics: str) -> Callable[[C], C]:  # noqa: N802  # the name of the specification
    """Declare ``event.topics`` of a handler class or function (157.12.3).

    Raises:
        ArgumentError, InvalidTopicError: there is none, or one is no topic filter.
    """
    if not topics:
        raise ArgumentError("at least one topic is needed")
    read_topics(topics, Names.TYPED_EVENT_TOPICS)
    return _declare(Names.TYPED_EVENT_TOPICS, topics)


def EventFilter(filter: str) -> Callable[[C], C]:  # noqa: N802, A002
    """Declare ``event.filter`` of a handler class or function (157.12.2).

    Raises:
        InvalidFilterError: it does not parse.
    """
    read_filter(filter)
    return _declare(Names.TYPED_EVENT_FILTER, filter)


def EventType(type: Any) -> Callable[[C], C]:  # noqa: N802, A002
    """Declare ``event.type`` of a typed handler class or function (157.12.4): a class, or its qualified name."""
    return _declare(Names.TYPED_EVENT_TYPE, type)
