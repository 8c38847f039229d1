"""Sends the replies of a handler that has many: from iterators, async iterators and observables (RFC 5.7.5).

So many of them may be sent and not confirmed; beyond that the handler waits, or what it emits does. Once nobody wants
them any more, an iterator is closed after its next item, an async one where it waits, an observable disposed of.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import threading
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, TypeVar

from reactivex import Observable

from messaging.errors import MessagingError, OutboxFullError, StreamOverflowError, UnroutableError
from messaging.execution import Waiters, mailbox, may_block, workers
from messaging.model import Message
from messaging.replyto.exchange import Content
from messaging.text import SafeLog

if TYPE_CHECKING:
    from messaging.publishing import Publication
    from messaging.replyto.exchange import Exchange

logger = SafeLog(__name__)

T = TypeVar("T")

#: rather than an item
_STOPPED: Final = object()

#: replies of one request that may wait to be confirmed
_AHEAD: Final = 64
#: replies that an observable may emit ahead of those, where the thread that emits must not wait
_BUFFER: Final = 1024
#: pause of a coroutine that finds no room for its reply, seconds
_NO_ROOM: Final = 0.01


def checked(found: Any) -> Message | Content:
    """What a handler returned, if it is a reply.

    Raises:
        TypeError: it is not.
    """
    if isinstance(found, (Message, Content)):
        return found
    raise TypeError(f"a handler must return a Message, or a promise of one; not {type(found).__name__}")


async def with_room(send: Callable[[], T]) -> T:
    """Call ``send``; again, as long as the outbox is full."""
    while True:
        try:
            return send()
        except OutboxFullError:
            await asyncio.sleep(_NO_ROOM)


def send_all(exchange: Exchange, found: Any) -> None:
    """Send what a handler returned: an observable, an iterator, or anything that can be iterated. On a thread."""
    if isinstance(found, Observable):
        _Forwarder(exchange).follow(found)
        return
    iterator = iter(found)
    exchange.begin()
    window: deque[Publication] = deque()
    try:
        for message in iterator:
            publication = exchange.item(checked(message))
            if publication is None:
                break
            window.append(publication)
            if not _goes_on(window):
                break
        else:
            exchange.end()
            return
    finally:
        close = getattr(iterator, "close", None)
        if callable(close):
            close()
    exchange.conclude()


def _goes_on(window: deque[Publication]) -> bool:
    """Look at outcomes, and wait for one if too many are open; whether more replies are wanted.

    Raises:
        MessagingError: one of them failed otherwise.
    """
    while window and (len(window) >= _AHEAD or window[0].done()):
        error = window.popleft().exception()
        if isinstance(error, UnroutableError):
            return False
        if error is not None:
            raise error
    return True


async def send_all_async(exchange: Exchange, found: Any) -> None:
    """The same on an event loop; what has to be awaited, or iterated asynchronously, is."""
    if isinstance(found, Observable):
        await _follow(exchange, found)
        return
    await _AsyncSender(exchange).send(found)


async def _follow(exchange: Exchange, observable: Observable[Any]) -> None:
    """Send what an observable emits, until it is over or this task is cancelled."""
    over = asyncio.Event()
    box = mailbox(asyncio.get_running_loop())
    forwarder = _Forwarder(exchange, lambda: box.post(over.set))
    forwarder.follow(observable)
    try:
        await over.wait()
    except asyncio.CancelledError:
        forwarder.abandon()
        raise


class _AsyncSender:
    """Sends what is iterated on an event loop, in one task."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self._loop = asyncio.get_running_loop()
        self._task = asyncio.current_task()
        #: the task waits for the next item, and may be cancelled; on the loop
        self._is_waiting = False

    def _stop(self) -> None:
        """No more are wanted. On a worker."""
        with contextlib.suppress(RuntimeError):  # the loop is closed, and the iterator with it
            self._loop.call_soon_threadsafe(self._wake)

    def _wake(self) -> None:
        if self._is_waiting and self._task is not None:
            self._is_waiting = False
            self._task.cancel()

    async def send(self, found: Any) -> None:
        exchange = self._exchange
        is_async = hasattr(found, "__aiter__")
        iterator = aiter(found) if is_async else iter(found)
        exchange.begin(self._stop)
        window: deque[Publication] = deque()
        try:
            while not exchange.is_stopped:
                try:
                    message = await self._next(iterator) if is_async else next(iterator)
                except (StopAsyncIteration, StopIteration):
                    await with_room(exchange.end)
                    return
                if message is _STOPPED:
                    break
                reply = checked(message)
                publication = await with_room(lambda reply=reply: exchange.item(reply))  # type: ignore[misc]
                if publication is None:
                    break
                window.append(publication)
                if len(window) >= _AHEAD:
                    with contextlib.suppress(MessagingError):
                        await window[0]
                if not _goes_on(window):
                    break
        finally:
            close = getattr(iterator, "aclose", None) or getattr(iterator, "close", None)
            if callable(close):
                closing = close()
                if inspect.isawaitable(closing):
                    await closing
        await with_room(exchange.conclude)

    async def _next(self, iterator: Any) -> Any:
        self._is_waiting = True
        try:
            return await anext(iterator)
        except asyncio.CancelledError:
            if self._is_waiting or self._task is None:
                raise  # somebody else's
            self._task.uncancel()
            return _STOPPED
        finally:
            self._is_waiting = False


class _Forwarder:
    """Sends what an observable emits.

    It may emit on any thread, one that runs an event loop, say. So what it emits waits in a queue, which is sent from
    worker threads. Where it may, an emitting thread waits for room; elsewhere the stream fails if there is none.
    """

    def __init__(self, exchange: Exchange, ended: Callable[[], object] | None = None) -> None:
        """``ended`` is called when it is over, on a worker."""
        self._exchange = exchange
        self._ended = ended
        #: the thread that subscribes, as long as it does
        self._following: int | None = None
        #: threads that emit, and wait for room
        self._blocked = Waiters()
        self._lock = threading.RLock()  # guards all below
        self._queue: deque[Callable[[], bool]] = deque()
        self._is_sending = False
        self._is_over = False
        self._disposable: Any = None
        #: on the sending thread
        self._window: deque[Publication] = deque()

    def follow(self, observable: Observable[Any]) -> None:
        """Subscribe; returns at once, unless it emits at once.

        Raises:
            Exception: what subscribing raises.
        """
        self._exchange.begin(self._stopped)
        self._following = threading.get_ident()
        try:
            disposable = observable.subscribe(self._next, self._failed, self._completed)
        except _EnoughError:
            return
        finally:
            self._following = None
        with self._lock:
            self._disposable = disposable
            is_over = self._is_over
        if is_over:
            disposable.dispose()

    # --- from the observable, and from the exchange

    def _next(self, message: Any) -> None:
        if self._is_over and self._following == threading.get_ident():
            raise _EnoughError  # there is nothing to dispose of yet
        self._put(lambda: self._send(message), wait=True)

    def _failed(self, error: Exception) -> None:
        def fail() -> bool:
            raise error

        self._put(fail)

    def _completed(self) -> None:
        def complete() -> bool:
            self._exchange.end()
            self._finish()
            return True

        self._exchange.is_ending = True
        self._put(complete)

    def _stopped(self) -> None:
        def conclude() -> bool:
            return False

        with self._lock:
            self._queue.clear()
        self._put(conclude)

    def _put(self, step: Callable[[], bool], *, wait: bool = False) -> None:
        if wait and may_block():
            self._blocked.wait_for(lambda: self._is_over or len(self._queue) < _AHEAD)
            wait = False
        with self._lock:
            if wait and len(self._queue) >= _BUFFER:
                overflow = StreamOverflowError(f"{_BUFFER} replies wait to be sent, and their emitter cannot wait")
                self._queue.clear()
                step = lambda: _raise(overflow)  # noqa: E731
            if self._is_over:
                return
            self._queue.append(step)
            if self._is_sending:
                return
            self._is_sending = True
        workers().submit(self._work)

    # --- on a worker

    def _work(self) -> None:
        while True:
            with self._lock:
                if self._is_over or not self._queue:
                    self._is_sending = False
                    return
                step = self._queue.popleft()
            self._blocked.wake()
            try:
                if not step():
                    self._finish()
                    self._exchange.conclude()
            except BaseException as error:  # noqa: BLE001  # whatever it came to is its requester's to know
                self._finish()
                self._exchange.failed(error)

    def _send(self, message: Any) -> bool:
        publication = self._exchange.item(checked(message))
        if publication is None:
            return False
        self._window.append(publication)
        return _goes_on(self._window)

    def _finish(self) -> None:
        with self._lock:
            self._is_over = True
            self._queue.clear()
            disposable = self._disposable
        self._blocked.wake()
        if disposable is not None:
            try:
                disposable.dispose()
            except Exception:
                logger.exception("an observable of replies does not let itself be disposed of")
        if self._ended is not None:
            self._ended()

    def abandon(self) -> None:
        """Send no more, and leave it to others to say why."""
        self._ended = None
        self._finish()


class _EnoughError(Exception):
    """Ends an observable that emits while it is being subscribed to."""


def _raise(error: Exception) -> bool:
    raise error
