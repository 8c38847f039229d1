"""Observers as arguments of ``subscribe``."""

from __future__ import annotations

from typing import Any, Protocol, TypeVar

from messaging.errors import ArgumentError
from messaging.functions import check_procedure

T_contra = TypeVar("T_contra", contravariant=True)


class Observer(Protocol[T_contra]):
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
