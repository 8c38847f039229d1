"""The engine's event loop, which all instances share, and the loop of callbacks registered without a running one.

Adapters and the core's bookkeeping run on the engine's loop; user code never does. The loop starts with the first
instance and keeps running: an idle loop costs nothing, and stopping it would race with the next ``connect()``. A forked
child gets an engine of its own. The loop stops when the process ends, after all instances are closed.

A coroutine function as callback of the application runs on the loop that was running when it was registered. Callbacks
registered without a running loop share :func:`handlers_loop`.

:class:`~messaging.execution.Mailbox` hands results to other event loops, waking each once per burst, and
:mod:`messaging.execution.threads` runs observers on threads.
"""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import contextlib
import sys
import threading
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Final, TypeVar

from messaging.environment import forks
from messaging.environment.forks import per_process
from messaging.environment.signals import attempt
from messaging.errors import ConnectionLostError, DeadlineError, MessagingError
from messaging.errors.text import SafeLog
from messaging.execution.clock import clock
from messaging.execution.promise import Promise
from messaging.execution.threads import start_thread, workers
from messaging.execution.waiting import Flag

logger = SafeLog(__name__)

T = TypeVar("T")

THREAD_NAME: Final = "messaging-engine"
#: how long the end of the process waits for the engine's thread, seconds
_PARK_TIMEOUT: Final = 1.0


def _nothing() -> None:
    """Do nothing: scheduling this wakes the loop."""


class Engine:
    """The event loop and its thread. Use :func:`engine` to get the one of the process."""

    def __init__(self) -> None:
        self.loop = clock.new_loop()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._ident: int | None = None
        self._generation = forks.generation
        self._is_parked = Flag()
        self._is_ended = False
        try:
            self._thread = start_thread(self._run, THREAD_NAME)
        except RuntimeError:
            self.loop.close()
            raise

    def _run(self) -> None:
        self._ident = threading.get_ident()
        asyncio.set_event_loop(self.loop)
        self.loop.run_forever()
        if self._is_ended:
            self.loop.close()
        self._is_parked.set()
        if self._is_ended:
            return
        # the thread keeps the loop alive: late calls are accepted, and do not run
        never = clock.lock()
        never.acquire()
        never.acquire()

    def park(self) -> None:
        """Stop the loop for good, at the end of the process. The thread then waits for ever.

        uvloop runs without the interpreter lock. A timer or a socket that wakes it after the interpreter was finalized
        would crash the process.
        """
        if self._generation == forks.generation:  # otherwise the thread is the parent's
            self.call(self.loop.stop)
            self._is_parked.wait(_PARK_TIMEOUT)

    def end(self) -> None:
        """Stop and close the loop, and end the thread. For tests: every instance has to be closed before.

        Late calls raise ``RuntimeError``.
        """
        _engines.remove(self)
        self._is_ended = True
        self.park()

    def is_current_thread(self) -> bool:
        """Return whether the calling thread is the engine's."""
        return threading.get_ident() == self._ident

    def call(self, function: Callable[..., object], *args: Any) -> None:
        """Run ``function`` on the loop soon. Thread safe.

        If an interrupt ends this call, ``function`` may or may not have been handed over. If it was, it runs without
        delay.
        """
        try:
            self.loop.call_soon_threadsafe(function, *args)
        except RuntimeError:  # the loop is closed
            raise
        except BaseException:
            # asyncio hands over first and wakes the loop afterwards: the interrupt may have come in between
            self.loop.call_soon_threadsafe(_nothing)
            raise

    def spawn(self, coroutine: Coroutine[Any, Any, object]) -> asyncio.Task[Any]:
        """Start a task and keep it referenced until it ends; its exceptions are logged. On the loop only."""
        task = self.loop.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("engine task %s failed", task.get_name(), exc_info=error)

    def run(self, coroutine: Coroutine[Any, Any, T], what: str) -> Promise[T]:
        """Run a coroutine on the loop and return a promise of its result. Thread safe."""
        promise: Promise[T] = Promise(what)

        async def settle() -> None:
            try:
                promise.resolve(await coroutine)
            except MessagingError as error:
                promise.reject(error)
            except asyncio.CancelledError:
                promise.reject(MessagingError(f"{what} was cancelled"))
                raise
            finally:
                raised = sys.exception()
                if raised is not None:  # whatever it is, the promise ends
                    promise.reject(MessagingError(f"{what} failed: {type(raised).__name__}"), raised)

        self.call(lambda: self.spawn(settle()))
        return promise


#: the engine of this process, behind those of its parents
_engines: Final[list[Engine]] = []


@per_process
def engine() -> Engine:
    """Return the engine of the process, started on first use. Thread safe."""
    made = Engine()
    _engines.append(made)
    return made


@atexit.register  # before those of instances and event services, which therefore run first
def _park_at_exit() -> None:
    for each in _engines:
        each.park()


@per_process
def handlers_loop() -> asyncio.AbstractEventLoop:
    """Return the loop of callbacks registered without a running loop. Starts its daemon thread on first use."""
    loop = asyncio.new_event_loop()

    def run() -> None:
        asyncio.set_event_loop(loop)
        loop.run_forever()  # until a test stops it
        loop.close()

    start_thread(run, "messaging-handlers")
    return loop


def on_worker(function: Callable[[], T]) -> asyncio.Future[T]:
    """Run ``function``, which may block, on a worker thread, and return the future of its outcome. On a running loop.

    The executor of the loop has few threads, which all instances share: a few calls that hang would stop every
    instance, and delay the end of the process. Cancelling the future does not end the call, whose outcome is then
    ignored. So a caller bounds the calls that hang.

    Raises:
        RuntimeError: no thread can be started.
    """
    loop = asyncio.get_running_loop()
    outcome: asyncio.Future[T] = loop.create_future()

    def settle(finished: concurrent.futures.Future[T]) -> None:
        if outcome.done():
            return
        error = finished.exception()
        if error is None:
            outcome.set_result(finished.result())
        else:
            outcome.set_exception(error)

    def work() -> None:
        finished: concurrent.futures.Future[T] = concurrent.futures.Future()
        error = attempt(lambda: finished.set_result(function()))
        if error is not None:
            finished.set_exception(error)
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(settle, finished)

    workers().submit(work)
    return outcome


def wait_for(promise: Promise[T], timeout: float, what: str) -> T:
    """Return ``promise.result(timeout)``, with a :class:`DeadlineError` that names the operation ``what``."""
    try:
        return promise.result(timeout)
    except DeadlineError as error:
        if promise.done():
            raise
        raise DeadlineError(f"{what} took longer than {timeout:g} s") from error


async def of_library(call: Awaitable[T]) -> T:
    """Await a call of an adapter.

    Libraries cancel their own futures when a connection breaks. A task that awaits one gets a ``CancelledError`` that
    was not meant for it and would end it silently; it becomes a :class:`ConnectionLostError`.
    """
    try:
        return await call
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        raise ConnectionLostError("the call was cancelled by the library below") from None


async def shielded(awaitable: Awaitable[T]) -> T:
    """Await without cancelling ``awaitable`` with the caller.

    If it fails after the caller was cancelled, its exception is ignored. ``asyncio.shield`` reports it to the event
    loop, from Python 3.14 on.
    """
    future = asyncio.ensure_future(awaitable)
    try:
        await asyncio.wait((future,))
    except asyncio.CancelledError:
        future.add_done_callback(_ignore_exception)
        raise
    return future.result()


def _ignore_exception(future: asyncio.Future[Any]) -> None:
    if not future.cancelled():
        future.exception()
