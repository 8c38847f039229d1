"""Observables of events, whose observers are checked when they subscribe."""

from __future__ import annotations

from typing import Any, TypeVar

from reactivex import Observable
from reactivex import abc as rx

from messaging.execution import callbacks_of
from messaging.functions import check_result

T = TypeVar("T")


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
