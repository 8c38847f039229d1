"""Observers as arguments of ``subscribe``."""

from __future__ import annotations

from typing import Any, TypeVar

from reactivex import Observable
from reactivex import abc as rx

from messaging.errors import ArgumentError
from messaging.functions import check_procedure, check_result

T = TypeVar("T")


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


class PlainObservable(Observable[T]):
    """An observable whose observers are plain functions: others are refused when they subscribe."""

    def subscribe(
        self, on_next: Any = None, on_error: Any = None, on_completed: Any = None, *, scheduler: Any = None
    ) -> rx.DisposableBase:
        """See ``Observable.subscribe``.

        Raises:
            ArgumentError: see :func:`callbacks_of`.
        """
        next_, on_error, on_completed = callbacks_of(on_next, on_error, on_completed)
        observe = None if next_ is None else lambda item: check_result(next_(item), "an observer")
        return super().subscribe(observe, on_error, on_completed, scheduler=scheduler)
