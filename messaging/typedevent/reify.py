"""The type that a typed handler wants (157.4.1), and the topic that is made of it (157.3.2)."""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
import typing
from collections.abc import Callable, Mapping
from typing import Any, Final, TypeVar

from messaging.dispatch.topics import is_topic
from messaging.errors import ArgumentError, InvalidTopicError
from messaging.typedevent.handlers import TypedEventHandler

#: types whose topics are remembered
_REMEMBERED: Final = 4096


_topics: dict[type[Any], str] = {}


def topic_of(type_: type[Any]) -> str:
    """The topic of events that are published without one: ``package/module/ClassName`` (157.3.2). Remembered.

    Raises:
        ArgumentError: it is no class.
        InvalidTopicError: the class has a name that no topic can have, such as one that is defined in a function.
    """
    known = _topics.get(type_) if isinstance(type_, type) else None
    if known is not None:
        return known
    if not isinstance(type_, type):
        raise ArgumentError(f"a topic can be made of a class, not of {type_!r:.80}")
    name = f"{type_.__module__}.{type_.__qualname__}"
    topic = name.replace(".", "/")
    if not is_topic(topic):
        raise InvalidTopicError(topic, f"no topic can be made of the name of {name!r}: give one")
    if len(_topics) >= _REMEMBERED:
        _topics.clear()
    _topics[type_] = topic
    return topic


def load_type(name: Any) -> Any:
    """The class that ``event.type`` names: a class, or a text such as ``package.module.Class``.

    Raises:
        ArgumentError: there is no such class.
    """
    if not isinstance(name, str):
        if is_reified(name):
            return name
        raise ArgumentError(f"event.type must be a class or its qualified name, not {name!r:.80}")
    parts = name.replace(":", ".").split(".")
    for end in range(len(parts) - 1, 0, -1):
        module = ".".join(parts[:end])
        try:
            found: Any = importlib.import_module(module)
        except ImportError as error:
            if isinstance(error, ModuleNotFoundError) and error.name and f"{module}.".startswith(f"{error.name}."):
                continue  # it is a class within a module, most likely
            raise ArgumentError(f"event.type {name!r} cannot be loaded: {error}") from error
        except Exception as error:  # a module may do anything while it is loaded
            raise ArgumentError(f"event.type {name!r} cannot be loaded: {type(error).__name__}") from error
        for part in parts[end:]:
            found = getattr(found, part, None)
        if isinstance(found, type):
            return found
        break
    raise ArgumentError(f"event.type {name!r} cannot be loaded: there is no such class")


def is_reified(type_: Any) -> bool:
    """Whether events can be converted to it: it says what they are to be."""
    return type_ not in (None, Any, object, inspect.Parameter.empty) and not isinstance(type_, (str, TypeVar))


def is_untyped(type_: Any) -> bool:
    """Whether it stands for data in map form."""
    origin = typing.get_origin(type_) or type_
    return origin is dict or origin is Mapping or origin is typing.Mapping or not is_reified(type_)


def reified_type(service: Any) -> Any:
    """The type that a typed handler is written for, or ``None`` if it does not say.

    That is the parameter of ``TypedEventHandler``, given to it by the class of the handler or by one that it inherits
    from, or else the annotation of the event of ``notify``; of a function, the annotation of its last parameter.
    """
    found = _parameter_of(type(service))
    if not is_reified(found):
        found = event_annotation(getattr(service, "notify", service))
    return found if is_reified(found) else None


def _parameter_of(class_: type[Any]) -> Any:
    """What stands for the type variable of ``TypedEventHandler`` in a class; a type variable if that is still open."""
    for base in class_.__dict__.get("__orig_bases__", class_.__bases__):
        origin, arguments = typing.get_origin(base) or base, typing.get_args(base)
        if not isinstance(origin, type) or not issubclass(origin, TypedEventHandler):
            continue
        found = arguments[0] if origin is TypedEventHandler and arguments else None
        if origin is not TypedEventHandler:
            found = _parameter_of(origin)
            if isinstance(found, TypeVar):
                found = dict(zip(getattr(origin, "__parameters__", ()), arguments, strict=False)).get(found, found)
        if isinstance(found, (str, typing.ForwardRef)):
            found = _resolved(found, class_)
        if found is not None:
            return found
    return None


def _resolved(name: str | typing.ForwardRef, class_: type[Any]) -> Any:
    text = name if isinstance(name, str) else name.__forward_arg__
    scope = {**vars(sys.modules.get(class_.__module__, typing)), class_.__name__: class_}
    try:
        return typing.get_type_hints(type("Scope", (), {"__annotations__": {"it": text}}), scope)["it"]
    except Exception:  # noqa: BLE001  # a name that is not there, or anything an annotation may do
        return None


def parameters_of(function: Callable[..., Any]) -> list[inspect.Parameter]:
    """The positional parameters of a function.

    Raises:
        ArgumentError: it has no signature.
    """
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        raise ArgumentError(f"an event handler must be callable, not {type(function).__name__}") from None
    return [
        each
        for each in signature.parameters.values()
        if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD, each.VAR_POSITIONAL)
    ]


def event_annotation(function: Callable[..., Any]) -> Any:
    """How the event is annotated among the parameters of a handler; ``None`` if it is not.

    Raises:
        ArgumentError: it is annotated with something that cannot be found.
    """
    try:
        parameters = [each for each in parameters_of(function) if each.kind is not each.VAR_POSITIONAL]
    except ArgumentError:
        return None
    required = [each for each in parameters if each.default is each.empty] or parameters
    if not required:
        return None
    event = required[min(len(required), 2) - 1]
    if event.annotation is event.empty:
        return None
    if not isinstance(event.annotation, str):
        return event.annotation
    plain: Any = function
    while isinstance(plain, functools.partial):
        plain = plain.func
    plain = plain if inspect.isroutine(plain) else plain.__call__
    try:
        return typing.get_type_hints(plain, include_extras=True).get(event.name)
    except Exception as error:  # noqa: BLE001  # a name that is not there, or anything an annotation may do
        raise ArgumentError(
            f"the annotation {event.annotation!r} of {getattr(plain, '__qualname__', plain)!r} cannot be resolved "
            f"({error}): give the type"
        ) from None
