"""MessageStream: what ``subscribe`` returns, in three faces (RFC 5.4).

It is a ``reactivex.Observable[Message]``, an iterator, an async iterator, and a context manager of both kinds.

**When it emits, completes and errors.** The subscription starts at once; messages wait in the bounded buffer until
somebody consumes them. It emits each message once, in arrival order, one at a time. It completes when it is closed or
disposed, or when the instance is closed; messages still in the buffer are then released to the broker, not emitted.
It errors when the broker refuses or ends the subscription, when the overflow policy is ``fail``, when a message does
not fit the model and ``on_invalid`` is ``raise``, or when the observer raises. A lost connection is none of these: the
stream goes on after reconnecting.

**Acknowledgement** (unless the context says otherwise): a message is acknowledged when the observer returned, rejected
when it raised. An iterator acknowledges a message when the next one is asked for, or when the stream is closed;
leaving the ``with`` block by an exception rejects it.

**Threads.** Observers run on worker threads, one message of a stream at a time; two streams never wait for each other.
Iterators run where they are called.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from reactivex import Observable
from reactivex import abc as rx

from messaging.engine import mailbox, may_block, wait_for
from messaging.errors import ClosedError, CodecError, DeadlineError, MessagingError, StreamConsumedError
from messaging.message import Message
from messaging.promise import Promise
from messaging.workers import workers

if TYPE_CHECKING:
    from messaging.connection import Connection
    from messaging.delivery import StreamCounters, Subscription

logger = logging.getLogger(__name__)


class _Push(rx.DisposableBase):
    """Drives one observer from a worker thread.

    ``_busy`` is the right to drain: whoever acquires it submits the job, the job releases it when there is nothing
    left. So at most one job of a stream runs at a time, and none while there is nothing to do.
    """

    def __init__(
        self,
        connection: Connection,
        subscription: Subscription,
        on_next: Callable[[Message], object],
        on_error: Callable[[Exception], object] | None,
        on_completed: Callable[[], object] | None,
    ) -> None:
        self._connection = connection
        self.subscription = subscription
        self._on_next = on_next
        self._on_error = on_error
        self._on_completed = on_completed
        self._busy = threading.Lock()
        self._thread: int | None = None
        #: take no more messages; with ``_complete``, tell the observer
        self._stopping = False
        self._complete = False
        self._in_error = False
        self._over = False
        #: resolves when the observer will not be called any more
        self.quiet: Promise[None] = Promise("the end of an observer")
        subscription.consumer = self

    def wake(self) -> None:
        """Have a worker drain the buffer, unless one does."""
        if not self._over and self._busy.acquire(blocking=False):
            workers().submit(self._drain)

    def _drain(self) -> None:
        subscription = self.subscription
        self._thread = _in_observer.push = threading.get_ident()
        try:
            while True:
                if not self._over:
                    self._consume(subscription)
                if not self._over:
                    if self._stopping:
                        self._finish(None, notify=self._complete)
                    elif subscription.ended:
                        self._finish(subscription.error, notify=True)
                self._busy.release()
                idle = self._over or not (self._stopping or subscription.has_next)
                if idle or not self._busy.acquire(blocking=False):
                    return
        finally:
            _in_observer.push = None

    def _consume(self, subscription: Subscription) -> None:
        on_next = self._on_next
        take = subscription.take
        accept = _ignore if subscription.manual else subscription.accept
        while not (self._stopping or subscription.ended):
            try:
                message = take()
            except CodecError as error:
                self._finish(error, notify=True)
                return
            except BaseException as error:  # noqa: BLE001  # out of a direct acknowledgement callback
                self._observer_raised(error)
                return
            if message is None:
                return
            try:
                on_next(message)
            except BaseException as error:  # noqa: BLE001  # whatever an observer raises ends this stream only
                if not subscription.manual:
                    subscription.refuse(message)
                self._observer_raised(error)
                return
            if self._in_error and not subscription.manual:
                subscription.refuse(message)
            else:
                accept(message)

    def _observer_raised(self, error: BaseException) -> None:
        channel = self.subscription.spec.channel
        if not isinstance(error, Exception):
            wrapped = MessagingError(f"the observer of {channel!r} raised {type(error).__name__}")
            wrapped.__cause__ = error
            error = wrapped
        if self._on_error is None:
            logger.error("the observer of %r raised; its stream ends", channel, exc_info=error)
        self._finish(error, notify=not self._stopping)

    def _finish(self, error: Exception | None, *, notify: bool) -> None:
        """Tell the observer that it is over, then unsubscribe. On the worker thread."""
        self._over = True
        channel = self.subscription.spec.channel
        if notify:
            try:
                if error is None:
                    if self._on_completed is not None:
                        self._on_completed()
                elif self._on_error is not None:
                    self._on_error(error)
                elif isinstance(error, MessagingError):
                    logger.error("stream of %r ended: %s", channel, error)
            except BaseException:  # whatever it is, nobody else is to suffer from it
                logger.exception("observer of %r raised from on_error or on_completed", channel)
        self._connection.engine.call(self.quiet.resolve, None)
        _remove(self._connection, self.subscription)

    def stop(self) -> Promise[None]:
        """Complete after the message in progress; the promise resolves when that is done. From any thread."""
        self._complete = self._complete or not self._stopping
        self._stopping = True
        self.wake()
        return self.quiet

    def dispose(self) -> None:
        """Stop: no message is emitted after the one in progress, which is still settled. From any thread."""
        if self._thread == threading.get_ident() and sys.exception() is not None:
            # an operator reports what a user's function raised by disposing from its except block
            self._in_error = True
        self._stopping = True
        self.wake()


class _InObserver(threading.local):
    push: int | None = None


_in_observer = _InObserver()


def in_observer() -> bool:
    """Whether the calling thread is in an observer's callback, which must not wait for its own end."""
    return _in_observer.push is not None


def _remove(connection: Connection, subscription: Subscription) -> Promise[None]:
    return connection.engine.run(connection.remove(subscription), f"unsubscribing from {subscription.spec.channel!r}")


class _EndedError(Exception):
    """The stream is complete: how a pull says it to whichever iterator asked."""


class _Pull:
    """Lets one thread or event loop at a time ask for messages."""

    def __init__(self, connection: Connection, subscription: Subscription) -> None:
        self._connection = connection
        self.subscription = subscription
        self._busy = threading.Lock()  # held by the caller that is asking
        self._in_hand: Message | None = None
        #: what ended the stream here, before the loop knows
        self._error: CodecError | None = None
        self._arrived: Callable[[], object] = _nothing
        subscription.consumer = self

    def wake(self) -> None:
        """Wake the caller that is asking, if any."""
        self._arrived()

    def stop(self) -> None:
        """Nothing runs here that could be waited for."""

    def settle(self, *, failed: bool = False) -> None:
        """Settle the message handed out last."""
        message, self._in_hand = self._in_hand, None
        if message is not None and not self.subscription.manual:
            if failed:
                self.subscription.refuse(message)
            else:
                self.subscription.accept(message)

    def _claim(self) -> None:
        if not self._busy.acquire(blocking=False):
            raise StreamConsumedError(
                f"the stream of {self.subscription.spec.channel!r} is being iterated already; "
                f"subscribe again for a second consumer"
            )

    def _take(self) -> Message | None:
        subscription = self.subscription
        if self._error is not None:
            raise self._error.with_traceback(None)
        if subscription.ended:
            if subscription.error is not None:
                raise subscription.error.with_traceback(None)
            raise _EndedError
        try:
            message = self._in_hand = subscription.take()
        except CodecError as error:
            self._error = error
            self._connection.engine.call(subscription.fail, error)
            raise
        return message

    def next(self, timeout: float | None) -> Message:
        """The next message; raises ``_EndedError``, or ``DeadlineError`` after ``timeout`` seconds."""
        self._claim()
        try:
            self.settle()
            deadline = None if timeout is None else time.monotonic() + timeout
            arrived = threading.Event()
            while True:
                arrived.clear()
                self._arrived = arrived.set
                message = self._take()
                if message is not None:
                    return message
                left = None if deadline is None else deadline - time.monotonic()
                if not arrived.wait(None if left is None else min(left, threading.TIMEOUT_MAX)) and left is not None:
                    raise DeadlineError(f"no message on {self.subscription.spec.channel!r} within {timeout:g} s")
        finally:
            self._busy.release()

    async def anext(self) -> Message:
        """The next message; raises ``_EndedError``. Cancelling loses none."""
        self._claim()
        try:
            self.settle()
            loop = asyncio.get_running_loop()
            box = mailbox(loop)
            arrived = asyncio.Event()

            def wake() -> None:
                box.post(arrived.set)

            while True:
                arrived.clear()
                self._arrived = wake
                message = self._take()
                if message is not None:
                    return message
                await arrived.wait()
        finally:
            self._busy.release()


class MessageStream(Observable[Message]):
    """The messages of one subscription; see the module for when it emits, completes and errors.

    Each observer, and the iterator, has a subscription of its own at the broker: the first one to come takes the one
    that was started with the stream. So observers of one stream are as independent as those of two.

    Attributes:
        ready: a promise that resolves when the broker has confirmed the subscription; it fails with
            ``SubscriptionRefusedError`` if it refuses.
    """

    def __init__(self, connection: Connection, open_subscription: Callable[[], Subscription]) -> None:
        super().__init__()
        self._connection = connection
        self._open_subscription = open_subscription
        #: guards the fields below; reentrant, because a finalizer that closes may run anywhere
        self._guard = threading.RLock()
        self._first: Subscription | None = open_subscription()
        self._primary = self._first
        self._pushes: set[_Push] = set()
        self._pull: _Pull | None = None
        self._closed = False
        self._paused = False
        self.ready: Promise[None] = self._primary.ready
        self._watch_over(self._primary)

    def _watch_over(self, subscription: Subscription) -> None:
        """End ``subscription`` if this stream is forgotten before it is closed or observed."""
        weakref.finalize(self, _abandoned, self._connection, subscription).atexit = False

    # --- Observable

    def subscribe(
        self,
        on_next: Any = None,
        on_error: Callable[[Exception], object] | None = None,
        on_completed: Callable[[], object] | None = None,
        *,
        scheduler: rx.SchedulerBase | None = None,  # noqa: ARG002  # observers run on workers; see the class
    ) -> rx.DisposableBase:
        """Subscribe an observer, or callbacks.

        Called on a plain thread it returns when the broker has confirmed the subscription (at the latest after the
        instance's ``timeout``); called on a thread that runs an event loop it returns at once: await ``ready``. A
        refusal goes to ``on_error``.

        Returns:
            A disposable; disposing it unsubscribes at the broker. No message is emitted after that but the one in
            progress.

        Raises:
            ClosedError: the stream is closed.
        """
        if callable(getattr(on_next, "on_next", None)):
            on_next, on_error, on_completed = on_next.on_next, on_next.on_error, on_next.on_completed
        with self._guard:
            subscription = self._claim()
            push = _Push(self._connection, subscription, on_next or _ignore, on_error, on_completed)
            self._pushes.add(push)
            if self._closed:  # by a finalizer, just now
                push.stop()
        push.quiet.listen(lambda: self._pushes.discard(push))
        # messages and even the end may have come before the observer did
        push.wake()
        if may_block():
            with contextlib.suppress(DeadlineError):
                subscription.ready.exception(self._connection.settings.timeout)
        return push

    def _subscribe_core(
        self, observer: rx.ObserverBase[Message], scheduler: rx.SchedulerBase | None = None
    ) -> rx.DisposableBase:
        return self.subscribe(observer.on_next, observer.on_error, observer.on_completed, scheduler=scheduler)

    def _claim(self) -> Subscription:
        """A subscription for one more consumer. Under the guard."""
        if self._closed:
            raise ClosedError(f"the stream of {self._primary.spec.channel!r} is closed")
        first, self._first = self._first, None
        subscription = first if first is not None else self._open_subscription()
        subscription.paused = self._paused
        return subscription

    # --- iterators

    def _puller(self) -> _Pull:
        with self._guard:
            if self._closed:
                raise ClosedError(f"the stream of {self._primary.spec.channel!r} is closed")
            if self._pull is None:
                self._pull = _Pull(self._connection, self._claim())
                self._watch_over(self._pull.subscription)
            return self._pull

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Message:
        try:
            return self._puller().next(None)
        except (_EndedError, ClosedError):
            raise StopIteration from None

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Message:
        try:
            return await self._puller().anext()
        except (_EndedError, ClosedError):
            raise StopAsyncIteration from None

    def receive(self, timeout: float | None = None) -> Message:
        """Wait for the next message, as the iterator does, for at most ``timeout`` seconds.

        Raises:
            DeadlineError: none came in time.
            ClosedError: the stream has ended.
        """
        try:
            return self._puller().next(timeout)
        except _EndedError:
            raise ClosedError(f"the stream of {self._primary.spec.channel!r} has ended") from None

    # --- flow

    def pause(self) -> None:
        """Emit nothing until :meth:`resume`; the broker is held back as far as its protocol can."""
        self._set_paused(True)

    def resume(self) -> None:
        """Undo :meth:`pause`."""
        self._set_paused(False)

    def _set_paused(self, paused: bool) -> None:
        self._paused = paused
        subscriptions = self._subscriptions()

        def apply() -> None:
            adapter = self._connection.adapter
            for subscription in subscriptions:
                subscription.paused = paused
                if subscription.handle is not None:
                    (adapter.pause if paused else adapter.resume)(subscription.handle)
                if not paused:
                    subscription.proceed()

        self._connection.engine.call(apply)

    @property
    def counters(self) -> StreamCounters:
        """Counters of the first subscription of this stream, live."""
        return self._primary.counters

    def _subscriptions(self) -> set[Subscription]:
        with self._guard:
            found = {push.subscription for push in self._pushes}
            if self._pull is not None:
                found.add(self._pull.subscription)
            if self._first is not None:
                found.add(self._first)
            return found

    # --- end

    def close(self, *, failed: bool = False) -> Promise[None]:
        """End the stream: unsubscribe, and complete every observer. From any thread; idempotent.

        Args:
            failed: whether the message the iterator handed out last is rejected rather than acknowledged.

        Returns:
            A promise that resolves when the broker was told and no observer runs any more.
        """
        with self._guard:
            self._closed = True
        subscriptions = self._subscriptions()
        for subscription in subscriptions:
            subscription.consumer.stop()  # now, rather than when the loop comes to it
        if self._pull is not None:
            self._pull.settle(failed=failed)

        async def end() -> None:
            await asyncio.gather(*[self._connection.remove(subscription) for subscription in subscriptions])

        return self._connection.engine.run(end(), f"closing the stream of {self._primary.spec.channel!r}")

    def __enter__(self) -> Self:
        if may_block():
            what = f"subscribing to {self._primary.spec.channel!r}"
            try:
                wait_for(self.ready, self._connection.settings.timeout, what)
            except BaseException:
                self.close()
                raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        closing = self.close(failed=kind is not None and not issubclass(kind, GeneratorExit))
        if may_block() and not in_observer():
            wait_for(closing, self._connection.settings.close_timeout * 2, "closing a stream")

    async def __aenter__(self) -> Self:
        try:
            await self.ready
        except BaseException:
            self.close()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        cancelled = kind is not None and issubclass(kind, (GeneratorExit, asyncio.CancelledError))
        await self.close(failed=kind is not None and not cancelled)

    def __repr__(self) -> str:
        return f"<MessageStream of {self._primary.spec.channel!r}>"


def _nothing() -> None:
    """Nobody is asking."""


def _ignore(_: Message) -> None:
    """Do nothing: the observer of a stream subscribed without one, and the acknowledgement left to the consumer."""


def _abandoned(connection: Connection, subscription: Subscription) -> None:
    """End what nobody can consume any more. An observer goes on by itself: it holds on to its subscription."""
    if subscription.ended or isinstance(subscription.consumer, _Push):
        return
    forgotten = not isinstance(subscription.consumer, _Pull)
    _remove(connection, subscription)
    if forgotten:
        message = f"a stream of {subscription.spec.channel!r} was neither consumed nor closed"
        warnings.warn(message, ResourceWarning, stacklevel=2)
