"""The type that a typed handler wants (157.4.1), and the parameter of a handler that takes the event."""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
import typing
from collections.abc import Callable
from typing import Any, TypeVar

from messaging.dispatch import name_of
from messaging.dispatch.eventdata import bound, is_reified
from messaging.errors import ArgumentError
from messaging.typedevent.handlers import TypedEventHandler


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
