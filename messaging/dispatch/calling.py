"""Calling what an application registers: functions for events, awaitables that they return, and observers."""

from __future__ import annotations

import asyncio
import functools
import inspect
import math
from collections.abc import Callable
from types import TracebackType
from typing import Any, Final, TypeVar

from reactivex import Observable
from reactivex import abc as rx

from messaging.environment.signals import is_interrupt
from messaging.errors import ClosedError, DeadlineError
from messaging.errors.checks import check_result
from messaging.errors.text import SafeLog
from messaging.execution import Flag, callbacks_of, clock
from messaging.services import ServiceRegistration

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")

logger = SafeLog(__name__)

#: interval at which a waiting thread checks that the event loop is still open, seconds
_CHECK_INTERVAL: Final = 0.5


def registered(
    register: Callable[[Callable[..., Any], tuple[Any, ...]], ServiceRegistration],
    topics: tuple[Any, ...],
    handler: Callable[..., Any] | None,
) -> Any:
    """Return the registration of ``handler``; without it, the result of using ``on`` as a decorator.

    Args:
        register: registers a function for topics.
        topics: the topics; or the function of ``@bus.on`` without parentheses.
        handler: the argument ``handler`` of ``on``.
    """
    bare: Callable[..., Any] | None = None
    if len(topics) == 1 and callable(topics[0]) and not isinstance(topics[0], type):
        (bare,), topics = topics, ()
    if handler is not None:
        return register(handler, topics)

    def decorate(function: F) -> F:
        register(function, topics)
        return function

    return decorate if bare is None else decorate(bare)


def name_of(function: Any) -> str:
    """Return the name of a function for people: a method with its object's class, a callable object by its class."""
    while isinstance(function, functools.partial):
        function = function.func
    if inspect.ismethod(function):
        owner = function.__self__
        class_ = owner if isinstance(owner, type) else type(owner)
        return f"{class_.__qualname__}.{getattr(function, '__name__', '?')}"
    name = getattr(function, "__qualname__", None)
    return name if isinstance(name, str) else type(function).__qualname__


def run_elsewhere(awaitable: Any, loop: asyncio.AbstractEventLoop, timeout: float = 0) -> Any:
    """Await ``awaitable`` on another thread's event loop, and wait for its result.

    Args:
        awaitable: awaited on ``loop``.
        loop: the event loop.
        timeout: maximum wait, seconds; 0: unlimited. The awaitable is cancelled when it has passed.

    Raises:
        DeadlineError: ``timeout`` passed.
        ClosedError: the loop is closed.
        Exception: raised by the awaitable.
    """
    deadline = clock.monotonic() + timeout if timeout else math.inf
    waiting = _awaited(awaitable)
    try:
        future = asyncio.run_coroutine_threadsafe(waiting, loop)
    except RuntimeError:
        _abandon(waiting, awaitable)
        raise ClosedError("the event loop it ran on is closed") from None
    ended = Flag()
    future.add_done_callback(lambda _: ended.set())
    while not ended.wait(max(0.0, min(_CHECK_INTERVAL, deadline - clock.monotonic()))):
        if loop.is_closed():
            _abandon(waiting, awaitable)
            raise ClosedError("the event loop it ran on is closed")
        if clock.monotonic() >= deadline:
            future.cancel()
            raise DeadlineError(f"it took more than {timeout:g} s")
    return future.result()


async def _awaited(awaitable: Any) -> Any:
    try:
        return await awaitable
    except (KeyboardInterrupt, SystemExit) as error:
        if is_interrupt(error):
            raise
        # it would end the event loop, which other handlers share
        raise RuntimeError(f"a handler raised {type(error).__name__}") from error


def _abandon(*awaitables: Any) -> None:
    """Close the coroutines that have not started, so that asyncio does not warn that they were never awaited."""
    for each in awaitables:
        if inspect.iscoroutine(each) and inspect.getcoroutinestate(each) == inspect.CORO_CREATED:
            each.close()


class contained:  # noqa: N801  # reads as a statement: with contained(failed)
    """Call a function with the exception that the block of a ``with`` statement raises, and go on after the block.

    The block calls code of the application, which may raise anything. An interrupt of the program goes on.

    Args:
        failed: called with the exception, on the thread of the block.
        arguments: of ``failed``, before the exception.
    """

    __slots__ = ("_arguments", "_failed")

    def __init__(self, failed: Callable[..., object], *arguments: object) -> None:
        self._failed = failed
        self._arguments = arguments

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> bool:
        if error is None or is_interrupt(error):
            return False
        self._failed(*self._arguments, error)
        return True


def fail_observer(observer: rx.ObserverBase[Any], who: str, error: BaseException) -> None:
    """Pass its own exception to an observer whose subscription has ended by it, and log it.

    Args:
        observer: the observer.
        who: names it in the log.
        error: what it raised.
    """
    logger.error("%s failed; subscription closed", who, exc_info=error)
    with contained(lambda raised: logger.error("%s failed in on_error; the error is dropped", who, exc_info=raised)):
        observer.on_error(error if isinstance(error, Exception) else RuntimeError(repr(error)))


def too_long(seconds: float) -> str:
    """Return the reason for blocking a handler that did not return in time."""
    return f"it took more than {seconds:g} s for one event"


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
