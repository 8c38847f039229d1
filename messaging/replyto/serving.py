"""Runs request handlers: bounded, each by itself, on threads or event loops (RFC 5.7.4).

**Threads.** ``submit`` is called on the engine's loop. A function runs on worker threads, a coroutine function on the
event loop that was running where the handler was registered, or else on one loop for all such handlers in a thread of
its own. However many requests wait, no more than ``concurrency`` of them are worked on by one handler; the others are
held back by the credit of the subscription they came from.

A second thread is started for a handler when the first one has not come to what waits within some milliseconds: quick
handlers have one, which is quicker than several that take the interpreter from each other, and stay in order.
"""

from __future__ import annotations

import abc
import asyncio
import threading
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from reactivex import Observable

from messaging.coroutines import handlers_loop, is_coroutine
from messaging.engine import Mailbox, engine, mailbox
from messaging.message import Message
from messaging.promise import Promise
from messaging.replyto import streaming
from messaging.replyto.exchange import Content, Verdict
from messaging.workers import workers

if TYPE_CHECKING:
    from messaging.replyto.exchange import Exchange

PLAIN: Final = "plain"
SINGLE: Final = "single"
MANY: Final = "many"

#: requests one handler works on at a time, unless its properties say otherwise
CONCURRENCY: Final = {False: 8, True: 64}
#: how long what waits is left to the threads there are, seconds
_GROW_AFTER: Final = 0.003
#: how often to look whether the loop of a handler that has something to do is still there, seconds
_LOOK: Final = 0.25
#: pause of a runner whose task somebody has cancelled: most likely its loop is about to end, seconds
_AFTER_CANCELLED: Final = 0.1


class HandlerExhaustedError(Exception):
    """Raised by a coroutine handler that takes no more requests, before it has sent a reply.

    The request counts as not begun. It waits, with those that come later, until the handler is unregistered.
    """


class Handler:
    """A handler service, whatever form it has.

    Args:
        kind: which of the three interfaces.
        service: an object with the method of its interface, or a function.
        loop: the event loop it was registered on, if any.
    """

    __slots__ = ("call", "is_async", "kind", "loop", "takes_builder")

    def __init__(self, kind: str, service: Any, loop: asyncio.AbstractEventLoop | None) -> None:
        method = getattr(service, "handle_responses" if kind == MANY else "handle_response", None)
        self.kind = kind
        self.call: Callable[..., Any] = method if callable(method) else service
        self.is_async = is_coroutine(self.call) or bool(getattr(service, "is_async", False))
        self.takes_builder = kind != PLAIN and not getattr(service, "makes_content", False)
        self.loop = loop

    def start(self, exchange: Exchange) -> Any:
        """Call it; what comes back may have to be awaited, or iterated."""
        if self.takes_builder:
            return self.call(exchange.request, exchange.builder())
        return self.call(exchange.request)


class Runner(abc.ABC):
    """Runs one handler.

    Args:
        handler: which.
        concurrency: how many requests at a time.
    """

    def __init__(self, handler: Handler, concurrency: int) -> None:
        self.handler = handler
        self.concurrency = concurrency
        #: its handler is gone, or has another runner: nothing is begun any more
        self.is_retired = False
        self._waiting: deque[Exchange] = deque()

    @abc.abstractmethod
    def submit(self, exchange: Exchange) -> None:
        """Have a request handled. On the engine's loop."""

    @abc.abstractmethod
    def withdraw(self, wanted: Callable[[Exchange], bool]) -> list[Exchange]:
        """Take back what was not begun and is ``wanted``. On the engine's loop."""

    def pass_on(self, wanted: Callable[[Exchange], bool]) -> None:
        """Give requests that were not begun and are ``wanted`` to other handlers. On the engine's loop."""
        for exchange in self.withdraw(wanted):
            exchange.origin.dispatch(exchange)

    @staticmethod
    def _is_void(exchange: Exchange) -> bool:
        """Whether there is nothing to do: it will come again. Then it is settled."""
        if exchange.origin.is_void(exchange.request):
            exchange.finish(Verdict.REFUSE)
            return True
        return False


class ThreadRunner(Runner):
    """Runs a function on worker threads."""

    def __init__(self, handler: Handler, concurrency: int) -> None:
        super().__init__(handler, concurrency)
        self._lock = threading.Lock()  # guards _waiting and _active
        self._active = 0
        self._growing: asyncio.TimerHandle | None = None

    def submit(self, exchange: Exchange) -> None:
        """See ``Runner.submit``."""
        with self._lock:
            self._waiting.append(exchange)
            is_first = not self._active
            self._active += is_first
        if is_first:
            # once the loop has given out all that arrived: the worker would only take the interpreter from it
            engine().loop.call_soon(workers().submit, self._work)
        elif self._growing is None and self._active < self.concurrency:
            self._growing = engine().loop.call_later(_GROW_AFTER, self._grow, exchange)

    def withdraw(self, wanted: Callable[[Exchange], bool]) -> list[Exchange]:
        """See ``Runner.withdraw``."""
        with self._lock:
            waiting, self._waiting = self._waiting, deque()
            found: list[Exchange] = []
            for exchange in waiting:
                (found if wanted(exchange) else self._waiting).append(exchange)
        return found

    def _grow(self, seen: Exchange) -> None:
        """Another thread, if nobody has come to ``seen`` meanwhile."""
        self._growing = None
        with self._lock:
            waiting = len(self._waiting)
            more = min(self.concurrency - self._active, waiting) if seen in self._waiting else 0
            self._active += more
            last = self._waiting[-1] if waiting > more and self._active < self.concurrency else None
        for _ in range(more):
            workers().submit(self._work)
        if last is not None:
            self._growing = engine().loop.call_later(_GROW_AFTER, self._grow, last)

    def _work(self) -> None:
        while True:
            with self._lock:
                if not self._waiting:
                    self._active -= 1
                    return
                exchange = self._waiting.popleft()
            if not self._is_void(exchange) and not self._run(exchange):
                return

    def _next(self) -> None:
        """A request whose handler went on after it had returned is over: its place is free."""
        with self._lock:
            if not self._waiting:
                self._active -= 1
                return
        workers().submit(self._work)

    def _run(self, exchange: Exchange) -> bool:
        """Handle a request; ``False`` if that goes on, and its place is taken until it is over."""
        handler = self.handler
        try:
            found = handler.start(exchange)
            if handler.kind == SINGLE and isinstance(found, (Message, Content)):
                exchange.reply(found)
            elif isinstance(found, Promise):
                exchange.after = self._next
                found.add_done_callback(lambda promise: _settle(handler.kind, exchange, promise))
                return False
            elif streaming.is_promise(found) or (handler.kind == MANY and hasattr(found, "__aiter__")):
                # a function that does what a coroutine function would have done
                exchange.after = self._next
                _go_on_elsewhere(handler, exchange, found)
                return False
            elif handler.kind == MANY and isinstance(found, Observable):
                exchange.after = self._next
                _send(MANY, exchange, found)
                return False
            else:
                _send(handler.kind, exchange, found)
        except BaseException as error:  # noqa: BLE001  # whatever a handler raises is its requester's to know
            exchange.failed(error)
            return exchange.after is None
        return True


#: held, since a loop does not hold its tasks
_tasks: set[asyncio.Task[None]] = set()


def _go_on_elsewhere(handler: Handler, exchange: Exchange, found: Any) -> None:
    """Await what a function returned, on the loop of its handler."""
    loop = handler.loop or handlers_loop()
    engine().call(_look_elsewhere, exchange, loop)
    loop.call_soon_threadsafe(_spawn, handler.kind, exchange, found)


def _spawn(kind: str, exchange: Exchange, found: Any) -> None:
    def ended(task: asyncio.Task[None]) -> None:
        _tasks.discard(task)
        if task.cancelled() or task.exception() is not None:
            workers().submit(exchange.give_back)

    task = asyncio.get_running_loop().create_task(_go_on(kind, exchange, found))
    _tasks.add(task)
    task.add_done_callback(ended)


def _look_elsewhere(exchange: Exchange, loop: asyncio.AbstractEventLoop) -> None:
    """See to it that a request does not end with the loop it is on."""
    if exchange.is_over:
        return
    if loop.is_closed():
        workers().submit(exchange.give_back)
    else:
        engine().loop.call_later(_LOOK, _look_elsewhere, exchange, loop)


def _settle(kind: str, exchange: Exchange, promise: Promise[Any]) -> None:
    try:
        _send(kind, exchange, promise.result())
    except BaseException as error:  # noqa: BLE001
        exchange.failed(error)


def _send(kind: str, exchange: Exchange, found: Any) -> None:
    """Send what a handler returned. On a thread."""
    if kind == PLAIN:
        exchange.done()
    elif kind == MANY:
        streaming.send_all(exchange, found)
    else:
        exchange.reply(streaming.checked(found))


async def _failed(exchange: Exchange, error: BaseException) -> None:
    exchange.log(error)
    await streaming.with_room(lambda: exchange.fault(error))


# --- coroutines


class LoopRunner(Runner):
    """Runs a coroutine function on an event loop of the application.

    A loop may end with requests in it, as ``asyncio.run`` does: it cancels the tasks, and what is not settled by then
    goes to ``orphaned``.

    Args:
        handler, concurrency: see :class:`Runner`.
        orphaned: called on the engine's loop with what is left, once the loop is closed.
    """

    def __init__(
        self, handler: Handler, concurrency: int, orphaned: Callable[[LoopRunner, list[Exchange]], object]
    ) -> None:
        super().__init__(handler, concurrency)
        loop = handler.loop
        self._loop = loop if loop is not None else handlers_loop()
        self._box: Mailbox = mailbox(self._loop)
        self._orphaned = orphaned
        #: on the handler's loop
        self._running: dict[asyncio.Task[None], Exchange] = {}
        #: its handler takes no more; on the handler's loop
        self._is_exhausted = False
        self._watcher: asyncio.TimerHandle | None = None
        self._was_idle = False

    def submit(self, exchange: Exchange) -> None:
        """See ``Runner.submit``."""
        self._was_idle = False
        self._waiting.append(exchange)
        self._box.post(self._begin)
        if self._watcher is None:
            self._watcher = engine().loop.call_later(_LOOK, self._look)

    def withdraw(self, wanted: Callable[[Exchange], bool]) -> list[Exchange]:
        """See ``Runner.withdraw``."""
        found = []
        for exchange in [*self._waiting]:
            if wanted(exchange):
                try:
                    self._waiting.remove(exchange)
                except ValueError:  # the handler's loop was faster
                    continue
                found.append(exchange)
        return found

    def _look(self) -> None:
        self._watcher = None
        if self._loop.is_closed():
            left = [*self._running.values(), *self._waiting]
            self._running.clear()
            self._waiting.clear()
            self._orphaned(self, [exchange for exchange in left if not exchange.is_over])
        elif self._running or self._waiting or not self._was_idle:
            # twice, since what is between the two is in neither
            self._was_idle = not (self._running or self._waiting)
            self._watcher = engine().loop.call_later(_LOOK, self._look)

    def _begin(self) -> None:
        while self._waiting and len(self._running) < self.concurrency and not self._is_exhausted:
            try:
                exchange = self._waiting.popleft()
            except IndexError:  # withdrawn
                return
            if self._is_void(exchange):
                continue
            task = self._loop.create_task(_run(self.handler, exchange))
            self._running[task] = exchange
            task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        exchange = self._running.pop(task, None)
        if not task.cancelled():
            if task.exception() is None:
                self._begin()
            elif exchange is not None:
                self._is_exhausted = True
                self._return(exchange)
        elif exchange is not None and (exchange.was_cancelled or exchange.is_stopped or exchange.has_begun):
            workers().submit(exchange.give_back)
            self._loop.call_later(_AFTER_CANCELLED, self._begin)
        elif exchange is not None:
            exchange.was_cancelled = True
            self._return(exchange)
            self._loop.call_later(_AFTER_CANCELLED, self._begin)

    def _return(self, exchange: Exchange) -> None:
        """Let a request wait that was not begun after all."""
        self._waiting.appendleft(exchange)
        # the others may have been withdrawn by then
        engine().call(self.pass_on, lambda each: self.is_retired or each.origin.is_stopping)


async def _run(handler: Handler, exchange: Exchange) -> None:
    try:
        found = handler.start(exchange)
    except BaseException as error:  # noqa: BLE001  # whatever a handler raises is its requester's to know
        await _failed(exchange, error)
    else:
        await _go_on(handler.kind, exchange, found)


async def _go_on(kind: str, exchange: Exchange, found: Any) -> None:
    """Await what a handler returned, and send what comes of it.

    Raises:
        HandlerExhaustedError: the handler takes no more requests.
    """
    try:
        while streaming.is_promise(found):
            found = await found
        if kind == PLAIN:
            exchange.done()
        elif kind == MANY:
            await streaming.send_all_async(exchange, found)
        else:
            reply = streaming.checked(found)
            await streaming.with_room(lambda: exchange.reply(reply))
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise  # its loop ends, say: see LoopRunner
        await _failed(exchange, error)  # of something that the handler awaited
    except HandlerExhaustedError:
        raise
    except BaseException as error:  # noqa: BLE001
        await _failed(exchange, error)
