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
import contextlib
import functools
import inspect
import sys
import typing
from collections.abc import Callable
from typing import Any, Final, Generic, TypeVar

from messaging.dispatch import name_of, read_filter, read_topics
from messaging.dispatch.eventdata import bound, is_reified
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


def reified_type(service: Any) -> Any:
    """Return the type that a typed handler declares, or ``None``.

    It is the parameter of ``TypedEventHandler``, given by the class of the handler, by one of its base classes, or
    where the handler was made; else the annotation of the event of ``notify``. For a function, it is the annotation of
    its event.

    Raises:
        ArgumentError: the annotation names a type that cannot be found.
    """
    found = _parameter_of(type(service))
    made_as = getattr(service, "__orig_class__", None)  # set by Handler[Order]()
    if typing.get_origin(made_as) is type(service):
        found = bound(found, dict(zip(type(service).__parameters__, typing.get_args(made_as), strict=False)))
    if not is_reified(found):
        method = getattr(service, "notify", None)
        found = _event_annotation(service if method is None else method, is_method=method is not None)
    return found if is_reified(found) else None


def _parameter_of(class_: type[Any]) -> Any:
    """Return the argument of ``TypedEventHandler`` in a class, or a type variable that is still open."""
    for base in class_.__dict__.get("__orig_bases__", class_.__bases__):
        origin, arguments = typing.get_origin(base) or base, typing.get_args(base)
        if not isinstance(origin, type) or not issubclass(origin, TypedEventHandler):
            continue
        if origin is TypedEventHandler:
            found = arguments[0] if arguments else None
        else:
            parameters = getattr(origin, "__parameters__", ())
            found = bound(_parameter_of(origin), dict(zip(parameters, arguments, strict=False)))
        if found is not None and not isinstance(found, (type, TypeVar)):  # it may contain names
            raw, found = found, None
            with contextlib.suppress(Exception):  # evaluating an annotation may raise anything
                found = _evaluated(raw, {**vars(sys.modules.get(class_.__module__, typing)), class_.__name__: class_})
        if found is not None:
            return found
    return None


def _evaluated(annotation: Any, scope: dict[str, Any]) -> Any:
    """Evaluate an annotation that is a string or contains names in ``scope``. May raise anything."""
    owner = type("Scope", (), {"__annotations__": {"it": annotation}})
    return typing.get_type_hints(owner, scope, include_extras=True)["it"]


def event_parameter(function: Callable[..., Any], *, is_method: bool = False) -> tuple[bool, inspect.Parameter | None]:
    """Return which parameter of a handler takes the event, and whether one before it takes the topic.

    A parameter for the topic exists if two parameters have no default, or if all have one and there are two.

    Args:
        function: the handler.
        is_method: whether it is the method of an interface, which receives the topic whenever it can take it.

    Returns:
        Whether a parameter takes the topic, and the parameter for the event; ``None`` if ``*arguments`` takes both.

    Raises:
        ArgumentError: it cannot be called with these arguments, or calling it does nothing.
    """
    for each in (function, getattr(function, "__call__", None)):  # noqa: B004  # reads the method, does not test for it
        if inspect.isgeneratorfunction(each) or inspect.isasyncgenfunction(each):
            raise ArgumentError("an event handler must not be a generator: calling it does nothing")
    try:
        parameters = [*inspect.signature(function).parameters.values()]
    except (TypeError, ValueError):
        raise ArgumentError(
            f"an event handler must be a function with a signature, not a {type(function).__name__} without one"
        ) from None
    positional = [each for each in parameters if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)]
    takes_more = any(each.kind is each.VAR_POSITIONAL for each in parameters)
    needed = [each for each in positional if each.default is each.empty]
    keywords = [each.name for each in parameters if each.kind is each.KEYWORD_ONLY and each.default is each.empty]
    if len(needed) > 2 or keywords or not (positional or takes_more):
        raise ArgumentError(
            f"an event handler takes a topic and an event, or an event; this one takes {inspect.signature(function)}"
        )
    if not needed or is_method:
        needed = positional[:2]
    if takes_more and (not needed or (is_method and len(needed) == 1)):
        return True, None
    return len(needed) == 2, needed[-1]


def _event_annotation(function: Any, *, is_method: bool) -> Any:
    """Return the annotation of the event, or ``None``. Raise ``ArgumentError`` if its type cannot be found."""
    try:
        _, event = event_parameter(function, is_method=is_method)
    except ArgumentError:
        return None
    if event is None or event.annotation is event.empty:
        return None
    if not isinstance(event.annotation, str):
        return event.annotation
    plain = function
    while isinstance(plain, functools.partial):
        plain = plain.func
    plain = inspect.unwrap(plain if inspect.isroutine(plain) else plain.__call__)
    scope = {each.__name__: each for each in getattr(plain, "__type_params__", ())}
    try:
        return _evaluated(event.annotation, {**getattr(plain, "__globals__", {}), **scope})
    except Exception as error:  # noqa: BLE001  # evaluating an annotation may raise anything
        raise ArgumentError(
            f"the annotation {event.annotation!r} of {name_of(plain)!r} cannot be resolved ({error}): give the type"
        ) from None
