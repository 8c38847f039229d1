"""Events as nested maps (157.2.2, 157.4.2).

An untyped event is a mapping with ``str`` keys. Its values are simple (numbers, text, bytes, dates, enums, UUIDs,
``None``), collections of simple values, or mappings of the same kind. It is a tree without instances of schemas
(157.2.2).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from typing import Any, Final, TypeAlias

from messaging.dispatch.eventdata.schema import COMMON, Schema, is_collection, is_simple, schema_of
from messaging.errors import InvalidEventError, NullEventError
from messaging.errors.text import exact

#: event data in map form
EventData: TypeAlias = dict[str, Any]

#: collections beside the built-in ones; a schema may be one of them, so schemas are tested first
_OTHER_COLLECTIONS: Final = (Sequence, Set)
#: characters that an error shows of a place in an event
_SHOWN: Final = 200
_STR: Final = frozenset({str})


def to_map(event: Any) -> EventData:
    """Return a typed event as nested maps (157.4.2), or a copy of an untyped event.

    Collections become lists; sets of simple values stay sets. Everything is copied except simple values and objects
    without fields. An object that occurs twice is copied once.

    Raises:
        NullEventError: ``event`` is ``None``.
        InvalidEventError: it has no fields, a field cannot be read, or it is no tree: a value is a part of itself.
    """
    schema = schema_of(type(event))
    if schema is not None and not schema.is_root:
        try:
            data = schema.read(event)
            if COMMON.issuperset(map(type, data.values())):
                return data
        except Exception:  # noqa: BLE001, S110  # the copy below raises it again, with its place
            pass
    copy = as_data(event)
    if type(copy) is not dict:
        if event is None:
            raise NullEventError("the event is None")
        raise InvalidEventError(f"an event must have named fields, which a {type(event).__name__} has not")
    return copy


def checked_copy(event: Mapping[str, Any]) -> EventData:
    """Return a copy of an untyped event that shares no mutable value with it.

    Raises:
        NullEventError: ``event`` is ``None``.
        InvalidEventError: it is not as the module describes; the error shows the place.
    """
    if event is None:
        raise NullEventError("the event data is None")
    if type(event) is dict and COMMON.issuperset(map(type, event.values())) and _STR.issuperset(map(type, event)):
        return event.copy()
    copy = _copied(event, is_untyped=True)
    if type(copy) is not dict:
        raise InvalidEventError(f"an untyped event is a mapping, not a {type(event).__name__}")
    return copy


def as_data(value: Any) -> Any:
    """Return a copy of ``value`` with maps in place of schemas; see :func:`to_map` for errors."""
    return value if type(value) in COMMON else _copied(value, is_untyped=False)


#: place of a value in an event: the place of its container, and its key there; ``None`` for the event itself
_Path: TypeAlias = tuple[Any, Any] | None


def _copied(event: Any, *, is_untyped: bool) -> Any:
    """Copy without recursion: the depth of events has no limit (157.2.1.1)."""
    top: dict[str, Any] = {}
    # Entries of four: a value, the container and the key that its copy goes to, and its place in the event.
    # Entries of two: a container and its copy, below the entries of its parts, so popped when these are complete.
    todo: list[tuple[Any, Any, Any, _Path] | tuple[Any, Any]] = [(event, top, "", None)]
    #: by id: complete containers with their copies, and the containers that enclose the current value
    complete: dict[int, tuple[Any, Any]] = {}
    above: set[int] = set()
    while todo:
        step = todo.pop()
        if len(step) == 2:
            above.discard(id(step[0]))
            complete[id(step[0])] = step  # with the source, so that its id is not reused
            continue
        value, target, key, path = step
        if id(value) in above:
            raise InvalidEventError(f"an event must be a tree: {_shown(path)} is a part of itself")
        if id(value) in complete:
            target[key] = complete[id(value)][1]
            continue
        try:
            copy = target[key] = _shallow_copy(value, path, is_untyped)
        except InvalidEventError:
            raise
        except Exception as error:  # a property or a mapping may raise anything
            problem = f"{_shown(path)}, a {type(value).__name__}, cannot be read: {type(error).__name__}"
            raise InvalidEventError(problem) from error
        items = copy.items() if type(copy) is dict else enumerate(copy) if type(copy) is list else ()
        parts = [(part, copy, name, (path, name)) for name, part in items if type(part) not in COMMON]
        if parts:
            above.add(id(value))
            todo.append((value, copy))
            todo.extend(parts)
        elif copy is not value:
            complete[id(value)] = value, copy
    return top[""]


def _shallow_copy(value: Any, path: _Path, is_untyped: bool) -> Any:
    """Return a dict or a list with the parts of ``value``; for a value without parts, its converted form."""
    if type(value) is dict:
        return _checked_keys(value.copy(), path) if is_untyped else value.copy()
    if type(value) is list or type(value) is tuple:
        return [*value]
    schema = schema_of(type(value))
    if schema is not None:
        return _read(schema, value, path, is_untyped)
    if isinstance(value, Mapping):
        return _checked_keys(dict(value), path) if is_untyped else dict(value)
    if isinstance(value, (set, frozenset)):
        parts = [*value]
        if not all(map(is_simple, parts)):
            return parts
        return frozenset(parts) if isinstance(value, frozenset) else set(parts)
    if is_collection(value):
        return [*value]
    if isinstance(value, (bytearray, memoryview)):
        return bytes(value)
    if is_simple(value):
        return value
    if isinstance(value, _OTHER_COLLECTIONS):
        return [*value]
    if is_untyped:
        raise InvalidEventError(
            f"an event must have nothing like this in it: {_shown(path)} is a {type(value).__name__}"
        )
    return value


def _read(schema: Schema, value: Any, path: _Path, is_untyped: bool) -> Any:
    if schema.is_root:
        return _shallow_copy(value.root, path, is_untyped)
    if is_untyped:
        raise InvalidEventError(
            f"an untyped event must have no instances of schemas in it: {_shown(path)} is a {type(value).__name__}"
        )
    return schema.read(value)


def _checked_keys(data: dict[Any, Any], path: _Path) -> dict[Any, Any]:
    if not _STR.issuperset(map(type, data)):
        for key in data:
            if not isinstance(key, str):
                raise InvalidEventError(
                    f"the keys of an event are str: in {_shown(path)} there is a {type(key).__name__}"
                )
        return {exact(key): value for key, value in data.items()}
    return data


def _shown(path: _Path) -> str:
    names: list[str] = []
    while path is not None:
        path, key = path
        names.append(f".{key}" if isinstance(key, str) else f"[{key if type(key) is int else '...'}]")
    return "".join(reversed(names)).removeprefix(".")[:_SHOWN] or "the event"
