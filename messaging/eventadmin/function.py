"""The function of a handler: found, or made by a factory, when its first event comes."""

from __future__ import annotations

import asyncio
import inspect
import os
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from messaging.dispatch import name_of
from messaging.errors import ArgumentError
from messaging.errors.checks import is_coroutine
from messaging.execution import Flag, handlers_loop, running_loop

if TYPE_CHECKING:
    from messaging.eventadmin.event import Event
    from messaging.services import ServiceReference, ServiceRegistry


class _Making:
    """A call that makes the service, on one thread; other threads wait for it."""

    __slots__ = ("_thread", "done")

    def __init__(self) -> None:
        self._thread = threading.get_ident()
        self.done = Flag()

    def wait(self) -> None:
        """Wait until the service is made, or the call has failed."""
        if self._thread == threading.get_ident():
            raise ArgumentError("it is not made yet: its own factory caused an event for it")
        self.done.wait()


class HandlerFunction:
    """The function that a handler's service provides. Thread safe.

    A prototype's service is made with the first event, and released when the handler is removed. A coroutine function
    runs on the event loop of the registering thread, or else on one that all of those share.
    """

    __slots__ = ("_loop", "_making", "_reference", "_services", "current", "is_coroutine", "is_released")

    def __init__(self, reference: ServiceReference, services: ServiceRegistry) -> None:
        self._reference = reference
        self._services = services
        self._loop = running_loop()
        #: the call that makes the service, by process: a child process does not continue the call of its parent
        self._making: dict[int, _Making] = {}
        #: the function; ``None`` before it is made, and after it was released
        self.current: Callable[[Event], Any] | None = None
        #: whether it is a coroutine function; ``None`` before it is made
        self.is_coroutine: bool | None = None
        self.is_released = False

    @property
    def name(self) -> str:
        """Its name in the log: the service, and the function once it is made."""
        function = self.current
        return f"{self._reference!r}{'' if function is None else f' ({name_of(function)})'}"

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The event loop for coroutines."""
        return self._loop or handlers_loop()

    def fetch(self) -> Callable[[Event], Any] | None:
        """Return the function; ``None`` if the service was unregistered.

        The service is made once: further threads wait for the thread that makes it.

        Raises:
            ArgumentError: the service is no handler.
            Exception: raised by its factory.
        """
        while (function := self.current) is None:
            mine, process = _Making(), os.getpid()
            making = self._making.setdefault(process, mine)  # atomic
            if making is not mine:
                making.wait()
                continue
            try:
                function = self.current or self._get()
                self.current = function
            finally:
                del self._making[process]
                mine.done.set()
            if function is None or self.is_released:
                self.current = None
                return None
        return function

    def _get(self) -> Any:
        service = None if self.is_released else self._services.get(self._reference)
        if service is None:
            return None
        function = getattr(service, "handle_event", service)
        if not callable(function):
            raise ArgumentError(f"a {type(service).__name__} is neither a function nor has handle_event()")
        if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
            raise ArgumentError(f"{name_of(function)} is a generator function: calling it would run nothing")
        self.is_coroutine = is_coroutine(function)
        return function

    def runs_on(self, loop: asyncio.AbstractEventLoop) -> bool:
        """Return whether it is a coroutine function that runs on ``loop``."""
        return bool(self.is_coroutine) and self.loop is loop

    def renew_loop(self) -> None:
        """Replace a closed event loop with the one that runs here."""
        if self._loop is not None and self._loop.is_closed():
            self._loop = running_loop()

    def release(self) -> None:
        """Keep neither the function nor the service any longer."""
        self.is_released = True
        self.current = None
