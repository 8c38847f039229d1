"""Forks of the process: no lock, thread or event loop of the parent may be used in a forked child.

This module has the only fork handler of the project. In the child it releases the held locks, increments
:data:`generation`, and calls the resets in the order in which they were added. The late resets follow: they may run
code of the application.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from functools import wraps
from typing import Any, Final, Protocol, TypeVar, cast
from weakref import WeakSet

from messaging.environment.signals import attempt

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)

#: number of forks between the first process and this one. An object that remembers another number was made by a parent
#: process
generation = 0

_held: Final[list[threading.Lock]] = []
_resets: Final[list[Callable[[], object]]] = []
_late_resets: Final[list[Callable[[], object]]] = []


def hold_over_fork(lock: threading.Lock) -> None:
    """Acquire ``lock`` before each fork and release it afterwards in both processes.

    A child would otherwise inherit it locked if another thread held it. For locks of modules that are held for moments
    only, and never while another lock is acquired.
    """
    _held.append(lock)
    os.register_at_fork(before=lock.acquire, after_in_parent=lock.release)


def in_child(reset: Callable[[], object], *, is_late: bool = False) -> None:
    """Call ``reset`` in each forked child; with ``is_late`` after the others, because it may run application code."""
    (_late_resets if is_late else _resets).append(reset)


class Forkable(Protocol):
    """An object with state that a forked child must not inherit."""

    def after_fork(self) -> None:
        """Replace locks and forget threads of the parent process. In the child."""


F = TypeVar("F", bound=Forkable)


class LiveObjects(WeakSet[F]):
    """Weak set of objects whose ``after_fork`` is called in each forked child."""

    def __init__(self, *, is_late: bool = False) -> None:
        super().__init__()
        in_child(self._after_fork, is_late=is_late)

    def _after_fork(self) -> None:
        for each in [*self]:
            _attempt(each.after_fork)


class PerProcess(Protocol[T_co]):
    """Returns the only object of its kind in the process."""

    def __call__(self) -> T_co:
        """Return the object. Thread safe."""

    def swap(self, other: Any) -> Any:
        """Put ``other`` in the place of the object, and return that; ``None``: it is not made yet. For tests."""


#: the only objects of their kinds in this process, by the functions that make them
objects: dict[Callable[[], Any], Any] = {}


def per_process(make: Callable[[], T]) -> PerProcess[T]:
    """Decorate a function that makes the only object of its kind in the process.

    The decorated function calls it once, and once again in each forked child. Thread safe.
    """
    lock = threading.Lock()  # held only while the object is made

    def reset() -> None:
        nonlocal lock
        lock = threading.Lock()
        objects.pop(make, None)

    @wraps(make)
    def get() -> T:
        found = objects.get(make)
        if found is None:
            with lock:
                found = objects.get(make)
                if found is None:
                    found = objects[make] = make()
        return cast("T", found)

    def swap(other: T | None) -> T | None:
        with lock:
            found: T | None = objects.pop(make, None)
            if other is not None:
                objects[make] = other
        return found

    in_child(reset)
    get.swap = swap  # type: ignore[attr-defined]
    return cast("PerProcess[T]", get)


def _attempt(reset: Callable[[], object]) -> None:
    error = attempt(reset)
    if error is not None:  # the other resets have to be called all the same
        logging.getLogger(__name__).error("%r failed in a forked child", reset, exc_info=error)


def _after_fork() -> None:
    global generation
    for lock in _held:
        _attempt(lock.release)
    generation += 1
    for reset in [*_resets, *_late_resets]:
        _attempt(reset)


os.register_at_fork(after_in_child=_after_fork)
