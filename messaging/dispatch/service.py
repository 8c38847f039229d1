"""What all event services are: they take events until they are closed, and deliver what they took."""

from __future__ import annotations

import abc
import atexit
import contextlib
import os
import time
from collections.abc import Mapping, Sequence
from threading import Lock, get_ident
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Self
from weakref import WeakSet

from messaging.dispatch.dispatcher import when_all_done
from messaging.dispatch.handler import Tolerance
from messaging.dispatch.permission import TopicPolicy
from messaging.errors import ArgumentError, ClosedError, DeadlineError
from messaging.execution import Pool, Promise, may_block, seconds, workers
from messaging.text import SafeLog

if TYPE_CHECKING:
    from messaging.dispatch.dispatcher import Dispatcher
    from messaging.execution import Lane
    from messaging.services import ServiceRegistration

logger = SafeLog(__name__)

#: how long closing waits for what was published, unless it is told otherwise, seconds
CLOSE_TIMEOUT: Final = 5.0

#: between two looks at whether somebody publishes still, seconds
_MOMENT: Final = 0.001

#: what was not closed yet
_open: WeakSet[EventService] = WeakSet()


class EventService(abc.ABC):
    """An event service from opening to closing. Thread safe; a context manager, sync or async, that closes it.

    Args:
        name: of it, in the log and among its properties.
        threads: how many threads deliver at most; ``None`` for as many as are usual.
        tolerance: when a handler that fails or does not return is blocked.
        permissions: who may publish and subscribe to what; everybody to everything, if there is none.

    Raises:
        ArgumentError: one of these is not as described; nothing is open.
    """

    _dispatcher: Dispatcher[Any, Any]

    def __init__(self, name: str, threads: int | None, tolerance: Tolerance, permissions: TopicPolicy | None) -> None:
        if not isinstance(name, str) or not name:
            raise ArgumentError(f"the name of an event service must be a non-empty str, not {name!r:.80}")
        if threads is not None and (not isinstance(threads, int) or isinstance(threads, bool) or threads < 1):
            raise ArgumentError(f"threads must be an int of at least 1, not {threads!r:.80}")
        if not isinstance(tolerance, Tolerance):
            raise ArgumentError(f"tolerance must be a Tolerance, not {type(tolerance).__name__}")
        if permissions is not None and not isinstance(permissions, TopicPolicy):
            raise ArgumentError(f"permissions must be a TopicPolicy, not {type(permissions).__name__}")
        self.name = name
        self._pool = Pool() if threads is None else Pool(threads)
        self._tolerance = tolerance
        self._is_open = False
        #: made when somebody begins to close it, with the dispatcher's lock
        self._closing: Promise[None] | None = None
        #: held by the thread that closes it
        self._finishing = Lock()
        self._finisher: int | None = None
        self._registrations: list[ServiceRegistration] = []
        #: threads that publish now: who closes it waits for those that found it open
        self._publishing: set[int] = set()

    def _open(
        self, dispatcher: Dispatcher[Any, Any], services: Sequence[tuple[type[Any], Any, Mapping[str, Any]]]
    ) -> None:
        """Find handlers and take events from now on, and register what is offered: interface, service, properties."""
        self._dispatcher = dispatcher
        self._is_open = True
        workers().hold(self)
        _open.add(self)
        try:
            dispatcher.open()
            for interface, service, properties in services:
                self._registrations.append(dispatcher.services.register(interface, service, properties))
        except BaseException:
            self.close()
            raise

    def _lanes(self) -> list[Lane]:
        """All lanes that events may wait in."""
        return [each.lane for _, each in self._dispatcher.handlers()]

    @abc.abstractmethod
    def _closed(self) -> None:
        """It is closed: what else there is has to be ended."""

    def flush(self) -> Promise[None]:
        """Resolves when all handlers are through with what was published before this call."""
        return when_all_done(self._lanes(), f"flushing {self.name!r}")

    def _refuse_closed(self) -> None:
        if not self._is_open:
            raise ClosedError(f"{self._dispatcher.name} is closed")

    def close(self, timeout: float = CLOSE_TIMEOUT) -> None:
        """Take no more events, and wait until what was published is delivered; idempotent.

        What is not delivered within ``timeout`` seconds is given up, and counted in the log. On a
        thread that runs an event loop, or in a handler, it does not wait: what was published is delivered in the
        background. ``await aclose()`` waits.

        Raises:
            ArgumentError: ``timeout`` is no number; nothing is closed.
        """
        timeout = seconds(timeout)
        closing = self._begin_closing()
        if not may_block() or self._is_inside():
            self._finish_later(closing, timeout)
        else:
            self._finish(closing, timeout)

    async def aclose(self, timeout: float = CLOSE_TIMEOUT) -> None:
        """As :meth:`close`, for event loops; in a handler it does not wait, either."""
        timeout = seconds(timeout)
        closing = self._begin_closing()
        self._finish_later(closing, timeout)
        if not self._is_inside():
            await closing

    def _is_inside(self) -> bool:
        """Whether this is called in a handler: what waits for handlers must not be waited for."""
        return self._pool.is_inside()

    def _begin_closing(self) -> Promise[None]:
        """Take no more events; returns what resolves when it is closed."""
        with self._dispatcher.lock:
            if self._closing is None:
                self._closing = Promise(f"closing {self._dispatcher.name}")
            self._is_open = False
            return self._closing

    def _finish_later(self, closing: Promise[None], timeout: float) -> None:
        """As :meth:`_finish`, on another thread; not if there is one already that does it."""
        if not closing.done() and self._finisher is None:
            workers().submit(lambda: self._finish(closing, timeout))

    def _finish(self, closing: Promise[None], timeout: float) -> None:
        """Deliver what was published, and let go of everything; once. On a thread that may wait."""
        if self._finisher == get_ident():  # a signal handler closes what its thread is closing
            return
        try:
            with self._finishing:
                if not closing.done():
                    self._let_go(timeout)
                    closing.resolve(None)
        except Exception:  # a defect, and no better the next time
            closing.resolve(None)
            raise
        except BaseException:  # an interrupt: somebody may wait for the end
            workers().submit(lambda: self._finish(closing, timeout))
            raise

    def _let_go(self, timeout: float) -> None:
        """What :meth:`_finish` does. Again, if an interrupt ended it."""
        deadline = time.monotonic() + timeout
        try:
            self._finisher = get_ident()
            for registration in self._registrations:
                registration.unregister()
            self._publishing.discard(get_ident())  # not for this one: a signal may have come while it published
            while self._publishing and time.monotonic() < deadline:
                time.sleep(_MOMENT)
            with contextlib.suppress(DeadlineError):
                self.flush().result(max(0.0, deadline - time.monotonic()))
            lanes = self._lanes()
            self._dispatcher.close()
            lost = sum(each.close() for each in lanes)
            if lost:
                logger.error(
                    "%s was closed before %d events were delivered that waited for its handlers",
                    self._dispatcher.name,
                    lost,
                )
            self._closed()
        finally:
            self._finisher = None
            _open.discard(self)
            workers().release(self)

    def __enter__(self) -> Self:
        self._refuse_closed()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        self._refuse_closed()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.aclose()


@atexit.register
def _close_all() -> None:
    """What was published is delivered, even if the program ends right after that."""
    for service in [*_open]:
        service.close()


def _after_fork() -> None:
    """Other threads are the parent's."""
    for service in [*_open]:
        service._publishing.clear()
        service._finishing = Lock()
        service._finisher = None


os.register_at_fork(after_in_child=_after_fork)
