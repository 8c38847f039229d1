"""Checks of arguments: types, paths, mappings, and functions of an application.

Observers, filters and callbacks are called without being awaited, so that a coroutine function in such a place would
never run. It is refused when it is registered; a function that turns out to return a coroutine, such as a ``lambda``
around a coroutine function, fails the call. Handlers (``m.on``, ``m.reply``, event handlers) are awaited and need none
of these checks.

Every function is thread safe.
"""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping
from pathlib import Path
from types import FunctionType
from typing import Any, Final, Protocol, TypeVar

from messaging.errors import ArgumentError

T_contra = TypeVar("T_contra", contravariant=True)

#: of functions whose body does not run when they are called
_NOT_PLAIN: Final = inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR | inspect.CO_GENERATOR


def check_instance(name: str, value: object, kind: type) -> None:
    """Refuse ``value`` of the argument ``name`` unless it is a ``kind``.

    Raises:
        ArgumentError: it is of another type, which the text names.
    """
    if not isinstance(value, kind):
        raise ArgumentError(f"{name} must be a {kind.__name__}, not {type(value).__name__}")


def check_optional(name: str, value: object, kind: type) -> None:
    """Refuse ``value`` of the argument ``name`` unless it is a ``kind`` or ``None``; see :func:`check_instance`."""
    if value is not None:
        check_instance(name, value, kind)


def check_path(name: str, value: object) -> Path:
    """Return the path that was given for the argument ``name``.

    Raises:
        ArgumentError: it is neither a str nor a Path, is empty, or has characters that no file name can have.
    """
    text = os.fspath(value) if isinstance(value, (str, os.PathLike)) else None
    if not isinstance(text, str):
        raise ArgumentError(f"{name} must be a str or a Path, not {type(value).__name__}")
    try:
        is_valid = b"\0" not in os.fsencode(text)
    except UnicodeEncodeError:
        is_valid = False
    if not text or not is_valid:
        raise ArgumentError(f"{name} must be the path of a file or folder, not {text!a:.80}")
    return Path(text)


def check_mapping(name: str, value: Any) -> dict[Any, Any]:
    """Return a copy of the mapping that was given for the argument ``name``.

    Raises:
        ArgumentError: ``value`` is no mapping.
    """
    if not isinstance(value, Mapping):
        raise ArgumentError(f"{name} must be a mapping, not {type(value).__name__}")
    return dict(value)


def is_coroutine(function: Any) -> bool:
    """Return whether ``function``, or the ``__call__`` of an object, needs an event loop."""
    return any(
        inspect.iscoroutinefunction(each) or inspect.isasyncgenfunction(each)
        for each in (function, getattr(function, "__call__", None))  # noqa: B004  # asks for the method, not whether there is one
    )


def check_function(function: Any, what: str) -> None:
    """Refuse what cannot be called, and what would not run when it is called.

    Args:
        function: the argument of the application.
        what: names it in errors, such as ``a filter``.

    Raises:
        ArgumentError: it is not callable, or is a coroutine function or an asynchronous generator function.
    """
    if not callable(function):
        raise ArgumentError(f"{what} must be callable, not {type(function).__name__}")
    if is_coroutine(function):
        raise ArgumentError(
            f"{what} must be a plain function, not the coroutine function {_name(function)}: it is not awaited here; "
            "start the work with asyncio.run_coroutine_threadsafe(), or use a handler (m.on, m.reply), which is awaited"
        )


def check_procedure(function: Any, what: str) -> None:
    """Refuse as :func:`check_function`, and generator functions: nothing iterates what they return."""
    if type(function) is FunctionType and not function.__dict__ and not function.__code__.co_flags & _NOT_PLAIN:
        return  # the usual case, at a fraction of the cost
    check_function(function, what)
    if inspect.isgeneratorfunction(function) or inspect.isgeneratorfunction(getattr(function, "__call__", None)):  # noqa: B004
        raise ArgumentError(f"{what} must not be the generator function {_name(function)}: its body would never run")


def check_result(found: Any, what: str) -> Any:
    """Return what a function returned, unless that is work that would never run.

    A promise, a task or a future does its work by itself and may be returned.

    Raises:
        ArgumentError: it is a coroutine or an asynchronous generator.
    """
    if found is not None and isinstance(found, (Coroutine, AsyncGenerator)):
        if isinstance(found, Coroutine):
            found.close()
        raise ArgumentError(
            f"{what} returned a {type(found).__name__}, which is not awaited here: its body did not run"
        )
    return found


def plain_function(function: Any, what: str, *, is_iterated: bool = False) -> Callable[..., Any]:
    """Return ``function`` with its result checked at each call, see :func:`check_result`.

    Args:
        function: the argument of the application.
        what: names it in errors.
        is_iterated: whether its result is iterated, so that a generator function is right.

    Raises:
        ArgumentError: see :func:`check_procedure`, or with ``is_iterated`` :func:`check_function`.
    """
    (check_function if is_iterated else check_procedure)(function, what)

    @functools.wraps(function, updated=())
    def call(*arguments: Any, **named: Any) -> Any:
        return check_result(function(*arguments, **named), what)

    return call


def _name(function: Any) -> str:
    return getattr(function, "__qualname__", None) or type(function).__qualname__


class ValueObserver(Protocol[T_contra]):
    """Observes a stream of values (an ``rx.ObserverBase`` does)."""

    def on_next(self, value: T_contra, /) -> object:
        """Handle the next value."""

    def on_error(self, error: Exception, /) -> object:
        """Handle the failure of the stream."""

    def on_completed(self) -> object:
        """Handle the end of the stream."""


def callbacks_of(on_next: Any, on_error: Any, on_completed: Any) -> tuple[Any, Any, Any]:
    """Return the arguments of ``subscribe``, an observer or callbacks, as callbacks; missing ones are ``None``.

    Raises:
        ArgumentError: an argument is neither an observer nor a plain function.
    """
    if callable(getattr(on_next, "on_next", None)):
        on_next, on_error, on_completed = on_next.on_next, on_next.on_error, on_next.on_completed
    for callback in (on_next, on_error, on_completed):
        if callback is None:
            continue
        if not callable(callback):
            raise ArgumentError(f"an observer has callables, or is one; {type(callback).__name__} is neither")
        check_procedure(callback, "an observer")
    return on_next, on_error, on_completed
