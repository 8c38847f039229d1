"""Opening and closing of event services: they accept events until they are closed, and deliver what they accepted."""

from __future__ import annotations

import atexit
import contextlib
from collections.abc import Iterable, Mapping
from threading import Lock, get_ident
from typing import Any, Final, Self

from messaging.dispatch.dispatcher import Dispatcher, when_all_done
from messaging.dispatch.handler import HandlerDTO, Tolerance, check_count, dto_of
from messaging.dispatch.permission import TopicPolicy
from messaging.environment.forks import LiveObjects
from messaging.environment.signals import on_failure
from messaging.errors import ArgumentError, ClosedError, DeadlineError
from messaging.errors.checks import check_instance, check_optional
from messaging.errors.text import SafeLog, tolerant
from messaging.execution import AsyncCloseable, Closeable, Lane, Pool, Promise, clock, may_block, seconds, workers
from messaging.services import ServiceRegistration, ServiceRegistry, default_registry

logger = SafeLog(__name__)

#: default time that closing waits for the delivery of published events, seconds
CLOSE_TIMEOUT: Final = 5.0

#: interval at which closing checks for threads that still publish, seconds
_CHECK_INTERVAL: Final = 0.001

#: services that are not closed yet
_open: Final = LiveObjects["EventService"]()


class EventService(AsyncCloseable):
    """The part of an event service that all of them share: handlers, threads, flushing and closing. Thread safe.

    It accepts events until it is closed, and delivers what it accepted.

    Args:
        kind: kind of the service, which precedes its name in the log.
        name: name of the service in the log and among its properties.
        services: registry of the handlers; ``None`` for the registry of the process.
        threads: maximum number of delivery threads; ``None`` for the default.
        tolerance: when a handler that fails or does not return is blocked.
        permissions: grants publishing and subscribing; without it all principals may do both.

    Raises:
        ArgumentError: an argument is not as described; nothing is open.
    """

    #: finds the handlers; set before :meth:`open`
    dispatcher: Dispatcher[Any, Any]
    #: closed when closing begins, before the published events are delivered, and again after an interrupt
    _entry: Closeable | None = None

    def __init__(
        self,
        kind: str,
        name: str,
        services: ServiceRegistry | None,
        *,
        threads: int | None,
        tolerance: Tolerance,
        permissions: TopicPolicy | None,
    ) -> None:
        if not isinstance(name, str) or not name:
            raise ArgumentError(f"the name of an event service must be a non-empty str, not {name!r:.80}")
        if threads is not None:
            check_count("threads", threads, 1)
        check_instance("tolerance", tolerance, Tolerance)
        check_optional("permissions", permissions, TopicPolicy)
        check_optional("services", services, ServiceRegistry)
        self.name = name
        #: kind and name, for the log
        self.title = f"{kind} {name!r}"
        self.services = default_registry() if services is None else services
        self.tolerance = tolerance
        self.pool = Pool(name=self.title) if threads is None else Pool(threads, self.title)
        self.is_open = False
        #: threads that publish now: closing waits for the threads that found the service open
        self.publishing: set[int] = set()
        #: deliveries that their publishers wait for, by a token of each, with the thread; closing waits for them, too
        self.sending: dict[object, int] = {}
        #: made with the dispatcher's lock when closing begins
        self._closing: Promise[None] | None = None
        #: held by the thread that closes the service
        self._finishing = Lock()
        self._finisher: int | None = None
        self._registrations: list[ServiceRegistration] = []

    # --- what services may override

    def lanes(self) -> list[Lane]:
        """Return all lanes that events may wait in: by default the lanes of the handlers."""
        return [each.lane for _, each in self.dispatcher.handlers()]

    def _is_in_handler(self) -> bool:
        """Return whether the calling code is a handler, which must not wait for handlers."""
        return self.pool.is_inside()

    def _release(self) -> None:
        """Release what the service holds, at the end of closing."""

    # --- opening

    def open(self, services: Iterable[tuple[type[Any], Any, Mapping[str, Any]]]) -> None:
        """Accept events from now on, and register the services: each with interface, object and properties."""
        self.is_open = True
        workers().hold(self)
        _open.add(self)
        with on_failure(self.close):
            self.dispatcher.open()
            for interface, service, properties in services:
                self._registrations.append(self.services.register(interface, service, properties))

    def refuse_closed(self) -> None:
        """Raise ``ClosedError`` unless the service is open."""
        if not self.is_open:
            raise ClosedError(f"{self.title} is closed")

    def flush(self) -> Promise[None]:
        """Return a promise that resolves when all handlers have processed the events published before this call."""
        return when_all_done(self.lanes(), f"flushing {self.name!r}")

    # --- state

    def handler_dtos(self) -> tuple[HandlerDTO, ...]:
        """Return snapshots of the handlers."""
        return tuple(dto_of(each, name.rpartition(".")[2]) for name, each in self.dispatcher.handlers())

    def problems(self) -> list[str]:
        """Return which handlers are blocked, and why, as texts for people; empty: all are served."""
        return [
            f"{self.title}: handler {each.name} is blocked: {each.blocked}"
            for _, each in self.dispatcher.handlers()
            if each.blocked is not None
        ]

    @tolerant
    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name!r}{'' if self.is_open else ', closed'}>"

    # --- closing

    def close(self, timeout: float = CLOSE_TIMEOUT) -> None:
        """Accept no more events, and wait until the published events are delivered; idempotent.

        Deliveries that other threads wait for (``EventAdmin.send_event``) continue after ``timeout`` seconds. Other
        events that are not delivered within ``timeout`` seconds are dropped, and counted in the log. On a
        thread that runs an event loop, or in a handler, this does not wait: the published events are delivered in the
        background. ``await aclose()`` waits.

        Raises:
            ArgumentError: ``timeout`` is no number; nothing is closed.
        """
        timeout = seconds(timeout)
        closing = self._begin_closing()
        if not may_block() or self._is_in_handler():
            self._finish_later(closing, timeout)
        else:
            self._finish(closing, timeout)

    async def aclose(self, timeout: float = CLOSE_TIMEOUT) -> None:
        """Close it as :meth:`close` does, for event loops; in a handler this does not wait, either."""
        timeout = seconds(timeout)
        closing = self._begin_closing()
        self._finish_later(closing, timeout)
        if not self._is_in_handler():
            await closing

    def _begin_closing(self) -> Promise[None]:
        """Accept no more events; return the promise that resolves when the service is closed."""
        with self.dispatcher.lock:
            if self._closing is None:
                self._closing = Promise(f"closing {self.title}")
            self.is_open = False
            return self._closing

    def _finish_later(self, closing: Promise[None], timeout: float) -> None:
        """Call :meth:`_finish` on another thread, unless a thread does that already."""
        if not closing.done() and self._finisher is None:
            workers().submit(lambda: self._finish(closing, timeout))

    def _finish(self, closing: Promise[None], timeout: float) -> None:
        """Deliver the published events and release everything; once. On a thread that may wait."""
        if self._finisher == get_ident():  # a signal handler closes the service that its thread is closing
            return
        try:
            with self._finishing:
                if not closing.done():
                    self._deliver_and_release(timeout)
                    closing.resolve(None)
        except Exception:  # a defect: trying again would fail again
            closing.resolve(None)
            raise
        except BaseException:  # an interrupt: other threads may wait for the end
            workers().submit(lambda: self._finish(closing, timeout))
            raise

    def _deliver_and_release(self, timeout: float) -> None:
        """Do the work of :meth:`_finish`; it is repeated after an interrupt."""
        deadline = clock.monotonic() + timeout
        try:
            self._finisher = get_ident()
            for registration in self._registrations:
                registration.unregister()
            if self._entry is not None:
                self._entry.close()
            self.publishing.discard(get_ident())  # this thread may be in a signal handler that interrupted publishing
            here = get_ident()
            while clock.monotonic() < deadline and (
                self.publishing or any(thread != here for thread in self.sending.copy().values())
            ):
                clock.pause(_CHECK_INTERVAL)
            with contextlib.suppress(DeadlineError):
                self.flush().result(max(0.0, deadline - clock.monotonic()))
            lanes = self.lanes()
            self.dispatcher.close()
            lost = sum(each.close() for each in lanes)
            if lost:
                logger.error("%s: closed before %d pending events were delivered; they are dropped", self.title, lost)
            self._release()
        finally:
            self._finisher = None
            _open.discard(self)
            workers().release(self)

    def after_fork(self) -> None:
        """See ``Forkable``: forget the threads of the parent process."""
        self.publishing.clear()
        self.sending.clear()
        self._finishing = Lock()
        self._finisher = None

    def __enter__(self) -> Self:
        self.refuse_closed()
        return self


@atexit.register
def _close_all() -> None:
    """Deliver the published events even if the program ends right after publishing."""
    for service in [*_open]:
        service.close()
