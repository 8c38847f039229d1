"""Run handlers of messages and requests: bounded, each by itself, on threads or event loops (RFC 5.7.4).

**Threads.** ``submit`` is called on the engine's loop. A function runs on worker threads. A coroutine function runs on
the event loop that was running where the handler was registered, or else on one loop for all such handlers in a thread
of its own. A handler works on at most ``concurrency`` tasks at a time, however many are waiting. The credit of the
subscription that the tasks came from holds back the others.

A second thread is started for a handler when the first one has not reached a waiting task within some milliseconds.
Quick handlers use one thread: it is faster than several that compete for the interpreter, and it keeps the order.
"""

from __future__ import annotations

import abc
import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import Callable
from typing import Any, Final

from messaging.environment.signals import attempt
from messaging.execution import (
    GROW_AFTER,
    Mailbox,
    Promise,
    after_cancelled,
    clock,
    engine,
    handlers_loop,
    mailbox,
    workers,
)
from messaging.interception import ProcessChain
from messaging.receiving.calling import (
    HandlerExhaustedError,
    HandlingVerdict,
    InterceptedHandler,
    ResultForm,
    RunnableHandler,
    Work,
    is_awaitable,
)

#: interval at which the event loop of a handler with unfinished tasks is checked, seconds
_LOOK: Final = 0.25

_FINAL: Final = ResultForm.FINAL
#: in the place of a result: the handler was not called yet
_NOT_STARTED: Final = object()


def runner_of(
    handler: RunnableHandler,
    concurrency: int,
    orphaned: Callable[[LoopRunner, list[Any]], object],
    chain: ProcessChain | None = None,
) -> Runner:
    """Return a runner of a handler: on threads, or for a coroutine function on an event loop.

    Args:
        handler, concurrency: see :class:`Runner`.
        orphaned: see :class:`LoopRunner`.
        chain: interceptors, which wrap the handler.
    """
    wrapped = handler if chain is None else InterceptedHandler(handler, chain)
    return LoopRunner(wrapped, concurrency, orphaned) if handler.is_async else ThreadRunner(wrapped, concurrency)


class Runner(abc.ABC):
    """Runs one handler.

    Args:
        handler: which.
        concurrency: how many requests at a time.
    """

    def __init__(self, handler: RunnableHandler, concurrency: int) -> None:
        self.handler = handler
        self.concurrency = concurrency
        #: its handler is gone, or has another runner: nothing is begun any more
        self.is_retired = False
        self._waiting: deque[Work] = deque()

    @abc.abstractmethod
    def submit(self, work: Work) -> None:
        """Have a request handled. On the engine's loop."""

    def withdraw(self, wanted: Callable[[Any], bool]) -> list[Any]:
        """Take back and return the tasks that were not begun and are ``wanted``. On the engine's loop."""
        found = []
        for work in [*self._waiting]:
            if wanted(work):
                with contextlib.suppress(ValueError):  # the handler's thread was faster
                    self._waiting.remove(work)
                    found.append(work)
        return found

    def pass_on(self, wanted: Callable[[Work], bool]) -> None:
        """Give requests that were not begun and are ``wanted`` to other handlers. On the engine's loop."""
        for work in self.withdraw(wanted):
            work.origin.dispatch(work)

    @staticmethod
    def _is_void(work: Work) -> bool:
        """Return whether there is nothing to do: it will come again. Then it is settled."""
        if work.origin.is_void(work.request):
            work.finish(HandlingVerdict.REFUSE)
            return True
        return False


class ThreadRunner(Runner):
    """Runs a function on worker threads."""

    def __init__(self, handler: RunnableHandler, concurrency: int) -> None:
        super().__init__(handler, concurrency)
        self._lock = threading.Lock()  # guards _active against the emptiness of _waiting
        self._active = 0
        self._growing: asyncio.TimerHandle | None = None

    def submit(self, work: Work) -> None:
        """See ``Runner.submit``."""
        with self._lock:
            self._waiting.append(work)
            is_first = not self._active
            self._active += is_first
        if is_first:
            # once the loop has given out all that arrived: the worker would only take the interpreter from it
            engine().loop.call_soon(workers().submit, self._work)
        elif self._growing is None and self._active < self.concurrency:
            self._growing = clock.call_later(engine().loop, GROW_AFTER, self._grow, work)

    def _grow(self, seen: Work) -> None:
        """Start another thread if no thread has reached ``seen`` meanwhile."""
        self._growing = None
        with self._lock:
            waiting = len(self._waiting)
            more = min(self.concurrency - self._active, waiting) if seen in self._waiting else 0
            self._active += more
            last = self._waiting[-1] if waiting > more and self._active < self.concurrency else None
        for _ in range(more):
            workers().submit(self._work)
        if last is not None:
            self._growing = clock.call_later(engine().loop, GROW_AFTER, self._grow, last)

    def _work(self) -> None:
        while True:
            with self._lock:
                try:
                    work = self._waiting.popleft()
                except IndexError:
                    self._active -= 1
                    return
            if not self._is_void(work) and not self._run(work):
                return

    def _next(self) -> None:
        """A request whose handler went on after it had returned is over: its place is free."""
        with self._lock:
            if not self._waiting:
                self._active -= 1
                return
        workers().submit(self._work)

    def _run(self, work: Work) -> bool:
        """Handle a request; ``False`` if that goes on, and its place is taken until it is over."""
        handler = self.handler
        try:
            found = handler.start(work)
            form = handler.form_of(found)
            if form is not _FINAL:
                work.after = self._next
            if form is ResultForm.PROMISED:
                found.add_done_callback(lambda promise: _settle(handler, work, promise))
            elif form is ResultForm.AWAITED:
                # a function that does what a coroutine function would have done
                _go_on_elsewhere(handler, work, found)
            else:
                handler.send(work, found)
                return work.after is None
            return False
        except BaseException as error:  # noqa: BLE001  # whatever a handler raises, its requester is told
            work.failed(error)
        return work.after is None


#: held, since a loop does not hold its tasks
_tasks: set[asyncio.Task[None]] = set()


def _go_on_elsewhere(handler: RunnableHandler, work: Work, found: Any) -> None:
    """Await what a function returned, on the loop of its handler."""
    loop = handler.loop or handlers_loop()
    engine().call(_look_elsewhere, work, loop)
    loop.call_soon_threadsafe(_spawn, handler, work, found)


def _spawn(handler: RunnableHandler, work: Work, found: Any) -> None:
    def ended(task: asyncio.Task[None]) -> None:
        _tasks.discard(task)
        if task.cancelled() or task.exception() is not None:
            workers().submit(work.requeue)

    task = asyncio.get_running_loop().create_task(_go_on(handler, work, found))
    _tasks.add(task)
    task.add_done_callback(ended)


def _look_elsewhere(work: Work, loop: asyncio.AbstractEventLoop) -> None:
    """See to it that a request does not end with the loop it is on."""
    if work.is_over:
        return
    if loop.is_closed():
        workers().submit(work.requeue)
    else:
        clock.call_later(engine().loop, _LOOK, _look_elsewhere, work, loop)


def _settle(handler: RunnableHandler, work: Work, promise: Promise[Any]) -> None:
    error = attempt(lambda: handler.send(work, promise.result()))
    if error is not None:
        work.failed(error)


# --- coroutines


class LoopRunner(Runner):
    """Runs a coroutine function on an event loop of the application.

    A loop may end with requests in it, as ``asyncio.run`` does: it cancels the tasks, and unsettled ones go to
    ``orphaned``.

    Args:
        handler, concurrency: see :class:`Runner`.
        orphaned: called on the engine's loop with the unsettled tasks, once the loop is closed.
    """

    def __init__(
        self, handler: RunnableHandler, concurrency: int, orphaned: Callable[[LoopRunner, list[Any]], object]
    ) -> None:
        super().__init__(handler, concurrency)
        loop = handler.loop
        self._loop = loop if loop is not None else handlers_loop()
        self._box: Mailbox = mailbox(self._loop)
        self._orphaned = orphaned
        #: on the handler's loop
        self._running: dict[asyncio.Task[None], Work] = {}
        #: its handler takes no more; on the handler's loop
        self._is_exhausted = False
        self._watcher: asyncio.TimerHandle | None = None
        self._was_idle = False

    def submit(self, work: Work) -> None:
        """See ``Runner.submit``."""
        self._was_idle = False
        self._waiting.append(work)
        self._box.post(self._begin)
        if self._watcher is None:
            self._watcher = clock.call_later(engine().loop, _LOOK, self._look)

    def _look(self) -> None:
        self._watcher = None
        if self._loop.is_closed():
            left = [*self._running.values(), *self._waiting]
            self._running.clear()
            self._waiting.clear()
            self._orphaned(self, [work for work in left if not work.is_over])
        elif self._running or self._waiting or not self._was_idle:
            # twice: a task that moves from one to the other is in neither
            self._was_idle = not (self._running or self._waiting)
            self._watcher = clock.call_later(engine().loop, _LOOK, self._look)

    def _begin(self) -> None:
        while self._waiting and len(self._running) < self.concurrency and not self._is_exhausted:
            try:
                work = self._waiting.popleft()
            except IndexError:  # withdrawn
                return
            if self._is_void(work):
                continue
            task = self._loop.create_task(_go_on(self.handler, work))
            self._running[task] = work
            task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        work = self._running.pop(task, None)
        if not task.cancelled():
            if task.exception() is None:
                self._begin()
            elif work is not None:
                self._is_exhausted = True
                self._return(work)
        elif work is not None:
            if work.was_cancelled or work.is_stopped or work.has_begun:
                workers().submit(work.requeue)
            else:
                work.was_cancelled = True
                self._return(work)
            after_cancelled(self._loop, self._begin)

    def _return(self, work: Work) -> None:
        """Let a request wait that was not begun after all."""
        self._waiting.appendleft(work)
        # the others may have been withdrawn by then
        engine().call(self.pass_on, lambda each: self.is_retired or each.origin.is_stopping)


async def _go_on(handler: RunnableHandler, work: Work, found: Any = _NOT_STARTED) -> None:
    """Await the result of a handler, which is called here unless it was, and send it.

    Raises:
        HandlerExhaustedError: the handler takes no more requests.
    """
    try:
        if found is _NOT_STARTED:
            found = handler.start(work)
        while is_awaitable(found):
            found = await found
        await handler.send_async(work, found)
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise  # its loop ends, say: see LoopRunner
        await handler.fail_async(work, error)  # of something that the handler awaited
    except HandlerExhaustedError:
        raise
    except BaseException as error:  # noqa: BLE001  # whatever a handler raises, its requester is told
        await handler.fail_async(work, error)
