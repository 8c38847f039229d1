"""Sends the replies of a handler that has many: from iterators, async iterators and observables (RFC 5.7.5).

At most 64 replies of a request are unconfirmed at a time. Beyond that the handler waits; of an observable, its replies
do. Once the requester wants no more, an iterator is closed after its next item, an async iterator where it waits, and
an observable is disposed of.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import threading
from collections import deque
from collections.abc import Callable
from typing import Any, Final, TypeVar

from reactivex import Observable
from reactivex.disposable import SingleAssignmentDisposable

from messaging.errors import MessagingError, OutboxFullError, StreamOverflowError, UnroutableError
from messaging.errors.text import SafeLog
from messaging.execution import Serial, Waiters, clock, mailbox, may_block
from messaging.publishing import Publication
from messaging.replyto.served_request import ServedRequest, checked

logger = SafeLog(__name__)

T = TypeVar("T")

#: returned instead of an item: the stream was stopped
_STOPPED: Final = object()

#: replies of one request that may be unconfirmed at a time
_AHEAD: Final = 64
#: further replies that an observable may emit where the emitting thread must not wait
_BUFFER: Final = 1024
#: pause of a coroutine before it sends again to a full outbox, seconds
_NO_ROOM: Final = 0.01


async def with_room(send: Callable[[], T]) -> T:
    """Call ``send`` until the outbox has room."""
    while True:
        try:
            return send()
        except OutboxFullError:
            await clock.sleep(_NO_ROOM)


def send_all(request: ServedRequest, found: Any) -> None:
    """Send the replies that a handler returned: an observable, an iterator, or an iterable. On a thread."""
    if isinstance(found, Observable):
        _Forwarder(request).follow(found)
        return
    iterator = iter(found)
    request.begin()
    window: deque[Publication] = deque()
    try:
        for message in iterator:
            publication = request.item(checked(message))
            if publication is None:
                break
            window.append(publication)
            if not _goes_on(request, window):
                break
        else:
            request.end()
            return
    finally:
        close = getattr(iterator, "close", None)
        if callable(close):
            close()
    request.conclude()


def _goes_on(request: ServedRequest, window: deque[Publication]) -> bool:
    """Retrieve the outcomes of replies, waiting for the first if too many are open; return whether to send more.

    After ``False`` the sender calls ``request.conclude``. A reply that was not taken is no exception of the handler.
    """
    while window and (len(window) >= _AHEAD or window[0].done()):
        error = window.popleft().exception()
        if error is not None:
            if not isinstance(error, UnroutableError):  # otherwise the requester is gone
                request.not_taken(error)
            return False
    return True


async def send_all_async(request: ServedRequest, found: Any) -> None:
    """Send as :func:`send_all`, on an event loop: async iterables too."""
    if isinstance(found, Observable):
        await _follow(request, found)
        return
    await _send_each(request, found)


async def _follow(request: ServedRequest, observable: Observable[Any]) -> None:
    """Send the replies of an observable, until it is over or this task is cancelled."""
    over = asyncio.Event()
    box = mailbox(asyncio.get_running_loop())
    forwarder = _Forwarder(request, lambda: box.post(over.set))
    forwarder.follow(observable)
    try:
        await over.wait()
    except asyncio.CancelledError:
        forwarder.abandon()
        raise


async def _send_each(request: ServedRequest, found: Any) -> None:
    """Send the replies of an iterable, in this task."""
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    #: whether the task waits for the next item, and may be cancelled; on the loop
    is_waiting = False

    def stop() -> None:  # on a worker
        with contextlib.suppress(RuntimeError):  # the loop is closed, and the iterator with it
            loop.call_soon_threadsafe(wake)

    def wake() -> None:
        nonlocal is_waiting
        if is_waiting and task is not None:
            is_waiting = False
            task.cancel()

    async def next_item() -> Any:
        nonlocal is_waiting
        is_waiting = True
        try:
            return await anext(iterator)
        except asyncio.CancelledError:
            if is_waiting or task is None:
                raise  # cancelled by other code
            task.uncancel()
            return _STOPPED
        finally:
            is_waiting = False

    is_async = hasattr(found, "__aiter__")
    iterator = aiter(found) if is_async else iter(found)
    request.begin(stop)
    window: deque[Publication] = deque()
    try:
        while not request.is_stopped:
            try:
                message = await next_item() if is_async else next(iterator)
            except (StopAsyncIteration, StopIteration):
                await with_room(request.end)
                return
            if message is _STOPPED:
                break
            publication = await with_room(functools.partial(request.item, checked(message)))
            if publication is None:
                break
            window.append(publication)
            if len(window) >= _AHEAD:
                with contextlib.suppress(MessagingError):
                    await window[0]
            if not _goes_on(request, window):
                break
    finally:
        close = getattr(iterator, "aclose", None) or getattr(iterator, "close", None)
        if callable(close):
            closing = close()
            if inspect.isawaitable(closing):
                await closing
    await with_room(request.conclude)


class _Forwarder:
    """Sends the replies of an observable.

    An observable may emit on any thread, also on one that runs an event loop. Its replies wait in a queue, which worker
    threads send. An emitting thread waits for room in the queue if it may block; otherwise the stream fails when the
    queue is full.

    Args:
        request: the request.
        ended: called when the stream is over, on a worker.
    """

    def __init__(self, request: ServedRequest, ended: Callable[[], object] | None = None) -> None:
        self._request = request
        self._ended = ended
        #: the thread that subscribes to the observable, as long as it does: an end of the request waits for it
        self._following: int | None = None
        self._is_concluding = False
        #: emitting threads that wait for room
        self._blocked = Waiters()
        self._lock = threading.RLock()  # guards all below
        self._queue: deque[Callable[[], bool]] = deque()
        self._is_over = False
        self._disposable = SingleAssignmentDisposable()
        self._sending = Serial(self._work, lambda: self._queue)
        #: on the sending thread
        self._window: deque[Publication] = deque()

    def follow(self, observable: Observable[Any]) -> None:
        """Subscribe to ``observable``. Returns at once, unless the observable emits at once.

        Raises:
            Exception: subscribing raised it.
        """
        self._following = threading.get_ident()
        try:
            self._request.begin(self._stopped)
            with contextlib.suppress(_EnoughError):
                self._disposable.disposable = observable.subscribe(self._next, self._failed, self._completed)
        finally:
            with self._lock:
                self._following = None
        if self._is_concluding:
            self._request.conclude()

    # --- from the observable, and from the request

    def _next(self, message: Any) -> None:
        if self._is_over and self._following == threading.get_ident():
            raise _EnoughError  # there is no subscription to dispose of yet
        self._put(lambda: self._send(message), wait=True)

    def _failed(self, error: Exception) -> None:
        self._put(functools.partial(_raise, error))

    def _completed(self) -> None:
        def complete() -> bool:
            self._request.end()
            self._finish()
            return True

        self._request.is_ending = True
        self._put(complete)

    def _stopped(self) -> None:
        with self._lock:
            self._queue.clear()
        self._put(lambda: False)

    def _put(self, step: Callable[[], bool], *, wait: bool = False) -> None:
        if wait and may_block():
            self._blocked.wait_for(lambda: self._is_over or len(self._queue) < _AHEAD)
            wait = False
        with self._lock:
            if wait and len(self._queue) >= _BUFFER:
                overflow = StreamOverflowError(f"{_BUFFER} replies wait to be sent, and their emitter cannot wait")
                self._queue.clear()
                step = functools.partial(_raise, overflow)
            if self._is_over:
                return
            self._queue.append(step)
        self._sending.wake()

    # --- on a worker

    def _work(self) -> None:
        while True:
            with self._lock:
                if not self._queue:  # it is over, say
                    return
                step = self._queue.popleft()
            self._blocked.wake()
            try:
                if not step():
                    self._finish()
                    with self._lock:
                        self._is_concluding = self._following is not None
                    if not self._is_concluding:
                        self._request.conclude()
            except BaseException as error:  # noqa: BLE001  # it is reported to the requester
                self._finish()
                self._request.failed(error)

    def _send(self, message: Any) -> bool:
        request, window = self._request, self._window
        publication = request.item(checked(message))
        if publication is None:
            return False
        window.append(publication)
        return _goes_on(request, window)

    def _finish(self) -> None:
        with self._lock:
            self._is_over = True
            self._queue.clear()
        self._blocked.wake()
        try:
            self._disposable.dispose()
        except Exception:
            logger.exception("an observable of replies raised when it was disposed of")
        if self._ended is not None:
            self._ended()

    def abandon(self) -> None:
        """Send no more replies; the caller reports the reason."""
        self._ended = None
        self._finish()


class _EnoughError(Exception):
    """Ends an observable that emits while it is being subscribed to."""


def _raise(error: Exception) -> bool:
    raise error
