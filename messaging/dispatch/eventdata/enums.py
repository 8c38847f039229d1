"""Members of enums on their way between processes.

A member travels as ``{"$enum": [class, name, value]}``; a fourth element ``true``: the member is its value, too
(``IntEnum``). Beside the data, an event names the classes as ``module:class``, so that a process in which such a class
is imported reads the member itself. Reading imports nothing, and runs no code of a module: modules and
classes are looked up in their dictionaries.

Where the class is not imported, or has no such member with this value, the member is read as one of a generated enum
with the same name and value. A member that is a combination of named flags is read if the class has all of them.

Every function is thread safe: what belongs to one event belongs to the thread that reads or writes it.
"""

from __future__ import annotations

import enum
import sys
import threading
from collections.abc import Callable, Collection
from functools import lru_cache
from typing import Any, Final

from messaging.errors import DecodeError

#: enums that are generated for one event, beside those of earlier events that are kept
MAX_ENUMS: Final = 1000
#: classes that one event names, and characters of their names
MAX_CLASSES: Final = 32
MAX_PATH_TEXT: Final = 200
#: generated enums that are kept; the characters of each text in a key bound their memory
_KEPT_ENUMS: Final = 1024
_MAX_CACHED_TEXT: Final = 200
_LONG: Final = range(-(2**63), 2**63)


class _EnumState(threading.local):
    """What is known of the event that this thread reads or writes."""

    #: the number of enums that may still be generated; negative: any number
    left = 0
    #: classes that the event names, by their last names; replaced, never changed
    classes: dict[str, list[type[enum.Enum]]] = {}  # noqa: RUF012
    #: gets the paths of the classes of the members that are written; ``None``: they are not wanted
    found: list[str] | None = None


#: set by the functions that read and write an event
state: Final = _EnumState()


def classes_at(paths: Collection[str]) -> dict[str, list[type[enum.Enum]]]:
    """Return the imported enums that an event names, by their last names."""
    classes: dict[str, list[type[enum.Enum]]] = {}
    for each in paths:
        class_ = _class_at(each)
        if class_ is not None:
            classes.setdefault(class_.__name__, []).append(class_)
    return classes


def note_class(class_: type[enum.Enum]) -> None:
    """Note the class of a member that is written."""
    found = state.found
    if found is not None and len(found) < MAX_CLASSES:
        path = f"{class_.__module__}:{class_.__qualname__}"
        if path not in found and len(path) <= MAX_PATH_TEXT and _class_at(path) is class_:
            found.append(path)


def _class_at(path: str) -> type[enum.Enum] | None:
    """Return an imported enum by its path; ``None`` if there is none. Runs no code of the module."""
    module, _, names = path.partition(":")
    found: Any = sys.modules.get(module)
    try:
        found = object.__getattribute__(found, "__dict__")
        for name in names.split("."):
            # not with `vars`, which asks the metaclass, nor with `isinstance`, which asks the object
            held = found[name]
            if not issubclass(type(held), type):
                return None
            found = type.__getattribute__(held, "__dict__")
    except (AttributeError, KeyError, TypeError):
        return None
    return held if issubclass(type(held), enum.EnumType) and type.__getattribute__(held, "__name__") == name else None


def read_member(name: str, member: str, value: Any, is_value: bool, has_value: Callable[[Any], bool]) -> Any:
    """Return a member.

    Args:
        name: of its class.
        member: its own name.
        value: its value, as it was read.
        is_value: whether it is its value, too.
        has_value: whether another member has the value that was written.
    """
    for class_ in state.classes.get(name, ()):
        known = _known(class_, member, has_value)
        if known is not None:
            return known
    if member.startswith("__") or (member.startswith("_") and member.endswith("_")):
        return value  # a name that Python reserves: such a class would not be a plain enum
    is_value = is_value and type(value) in (str, int, float)
    is_small = type(value) in (str, bool, type(None), float) or (type(value) is int and value in _LONG)
    if is_small and all(len(each) <= _MAX_CACHED_TEXT for each in (name, member, value) if type(each) is str):
        return _cached_stand_in(name, member, value, is_value)
    return _stand_in(name, member, value, is_value)


def _known(class_: type[enum.Enum], name: str, has_value: Callable[[Any], bool]) -> Any:
    """Return the member of a class with a name and the value that was written; ``None`` if it has none."""
    try:
        found = _member_of(class_, name)
        return found if found is not None and has_value(found) else None
    except RecursionError:
        raise
    except Exception:  # noqa: BLE001  # of the code of the class, or its value has no portable form
        return None


def _member_of(class_: type[enum.Enum], name: str) -> Any:
    """Return the member of a class with a name, such as ``READ`` or ``READ|WRITE``; ``None`` if it has none."""
    members = class_.__members__
    if name in members:
        return members[name]
    if not issubclass(class_, enum.Flag) or not 0 < name.count("|") < len(members):
        return None
    parts = [members.get(each) for each in name.split("|")]
    found = parts[0]
    for each in parts[1:]:
        if found is None or each is None:
            return None
        found = found | each  # type: ignore[operator]
    return found


def _stand_in(name: str, member: str, value: Any, is_value: bool) -> Any:
    """Return a member of an enum that is generated for it."""
    if state.left == 0:
        raise DecodeError(f"data of an event: more than {MAX_ENUMS} members of enums that differ")
    state.left -= 1
    make: Any = enum.Enum
    try:
        return make(name, [(member, value)], type=type(value) if is_value else None)[member]
    except (ValueError, TypeError, KeyError):  # not a valid name of a member
        return value


#: typed, since ``1 == True``
_cached_stand_in: Final = lru_cache(_KEPT_ENUMS, typed=True)(_stand_in)
