"""The types of events: loaded by name, told from the absence of a type (157.4.1), and made into topics (157.3.2).

Every function is thread safe.
"""

from __future__ import annotations

import importlib
import inspect
import typing
from collections.abc import Mapping
from typing import Any, Final, TypeVar

from messaging.codecs.cache import BoundedCache
from messaging.dispatch import is_topic
from messaging.errors import ArgumentError, InvalidTopicError

_topics: Final[BoundedCache[type[Any], str]] = BoundedCache(4096)


def topic_of(type_: type[Any]) -> str:
    """Return the topic made of the name of a class: ``package/module/ClassName`` (157.3.2). Cached.

    Raises:
        ArgumentError: ``type_`` is no class.
        InvalidTopicError: the name of the class is no topic, for example because it is defined in a function.
    """
    known = _topics.get(type_) if isinstance(type_, type) else None
    if known is not None:
        return known
    if not isinstance(type_, type):
        raise ArgumentError(f"a topic can be made of a class, not of {type_!r:.80}")
    name = f"{type_.__module__}.{type_.__qualname__}"
    topic = name.replace(".", "/")
    if not is_topic(topic):
        raise InvalidTopicError(topic, f"no topic can be made of the name of {name!r}: give a topic")
    _topics[type_] = topic
    return topic


def load_type(name: Any) -> Any:
    """Return the class that ``event.type`` gives or names; raise ``ArgumentError`` if it does not exist."""
    if not isinstance(name, str):
        if is_reified(name) and _is_type(name):
            return name
        raise ArgumentError(f"event.type must be a class or its qualified name, not {name!r:.80}")
    parts = name.replace(":", ".").split(".")
    for end in range(len(parts) - 1, 0, -1):
        module = ".".join(parts[:end])
        try:
            found: Any = importlib.import_module(module)
            for part in parts[end:]:
                found = getattr(found, part, None)
        except ImportError as error:
            if isinstance(error, ModuleNotFoundError) and error.name and f"{module}.".startswith(f"{error.name}."):
                continue  # the module is probably a class that encloses the named one
            raise ArgumentError(f"event.type {name!r:.80} cannot be loaded: {error}") from error
        except (Exception, SystemExit) as error:  # importing a module may raise anything
            raise ArgumentError(f"event.type {name!r:.80} cannot be loaded: {type(error).__name__}") from error
        if isinstance(found, type):
            return found
        break
    raise ArgumentError(f"event.type {name!r:.80} cannot be loaded: there is no such class")


def _is_type(type_: Any) -> bool:
    """Return whether ``type_`` is a class or made of classes: ``X | Y``, ``list[X]``, ``Page[X]``."""
    return (
        isinstance(type_, (type, typing.NewType))
        or typing.get_origin(type_) is not None
        or hasattr(type_, "__value__")  # type X = ...
    )


def is_reified(type_: Any) -> bool:
    """Return whether ``type_`` is a type that events can be converted to."""
    return not isinstance(type_, (str, TypeVar, typing.ForwardRef)) and not any(type_ is each for each in _OPEN)


_OPEN: Final = (None, Any, object, inspect.Parameter.empty)


def is_untyped(type_: Any) -> bool:
    """Return whether ``type_`` stands for data in map form."""
    origin = typing.get_origin(type_) or type_
    return origin is dict or origin is Mapping or origin is typing.Mapping or not is_reified(type_)
