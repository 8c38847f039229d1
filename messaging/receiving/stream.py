"""MessageStream: what ``subscribe`` returns, in three faces (RFC 5.4).

It is a ``reactivex.Observable[Message]``, an iterator, an async iterator, and a context manager of both kinds.

**When it emits, completes and errors.** The subscription starts at once; messages wait in the bounded buffer until
a consumer takes them. It emits each message once, in arrival order, one at a time. It completes when it is closed or
disposed, or when the instance is closed; messages still in the buffer are then released, not emitted (see
``docs/guarantees.md``). It errors when the broker refuses or ends the subscription, when the overflow policy is
``fail``, when a message does not fit the model and ``on_invalid`` is ``raise``, or when the observer raises. A lost
connection is none of these: the stream goes on after reconnecting.

**Acknowledgement** (unless the context says otherwise): a message is acknowledged when the observer returned, rejected
when it raised, which ends the stream; ``Messaging.on`` takes a handler that survives its exceptions. An iterator
acknowledges a message when the next one is asked for, or when the stream is closed; leaving the ``with`` block by an
exception rejects it.

**Threads.** Observers run on worker threads, one message of a stream at a time; two streams never wait for each other.
Iterators run where they are called.
"""

from __future__ import annotations

import contextlib
import threading
import warnings
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any, Final, Protocol, Self, TypeVar

from reactivex import Observable
from reactivex import abc as rx
from reactivex.scheduler import CurrentThreadScheduler

from messaging.connection import Connection
from messaging.environment.signals import on_failure
from messaging.errors import ClosedError, DeadlineError
from messaging.errors.text import tolerant
from messaging.execution import Promise, callbacks_of, clock, may_block, refuse_in_loop
from messaging.interception import ProcessChain
from messaging.model import ReceivedMessage, V
from messaging.receiving.buffer import StreamCounters
from messaging.receiving.consumers import Block, Pull, Push, StreamEndedError, ignore, remove
from messaging.receiving.subscription import Subscription

#: how long the subscribing thread may take to assemble the rest of a chain of operators
_ASSEMBLY_SECONDS: Final = 0.1


V_contra = TypeVar("V_contra", contravariant=True)


class MessageObserver(Protocol[V_contra]):
    """Observes a stream (an ``rx.ObserverBase`` does)."""

    def on_next(self, value: ReceivedMessage[V_contra], /) -> object:
        """Handle the next message."""

    def on_error(self, error: Exception, /) -> object:
        """Handle the failure of the stream."""

    def on_completed(self) -> object:
        """Handle the end of the stream."""


class MessageStream(Block, Observable[ReceivedMessage[V]]):
    """The messages of one subscription; see the module for when it emits, completes and errors.

    Each observer, and the iterator, has a subscription of its own at the broker: the first one to come takes the one
    that was started with the stream. So observers of one stream are as independent as those of two.

    Attributes:
        ready: a promise that resolves when the broker has confirmed the subscription; it fails with
            ``SubscriptionRefusedError`` if it refuses.
    """

    _noun = "stream"

    def __init__(
        self,
        connection: Connection,
        open_subscription: Callable[[], Subscription],
        interceptors: ProcessChain | None = None,
    ) -> None:
        super().__init__()
        self._connection = connection
        self._open_subscription = open_subscription
        self._interceptors = interceptors
        #: guards the fields below; reentrant, because a finalizer that closes may run anywhere
        self._guard = threading.RLock()
        #: a subscription without a consumer yet
        self._first: Subscription | None = None
        self._pushes: dict[Push, None] = {}
        self._pull: Pull | None = None
        self._closed = False
        self._paused = False
        with on_failure(self._undo_opening):
            self._first = self._primary = open_subscription()
            self._channel = self._primary.spec.channel
            self.ready: Promise[None] = self._primary.ready
            _watch_over(self, self._primary)

    def _undo_opening(self) -> None:
        if self._first is not None:
            remove(self._connection, self._first.spec.channel, self._first)

    # --- Observable

    def subscribe(
        self,
        on_next: MessageObserver[V] | Callable[[ReceivedMessage[V]], object] | None = None,
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
            ArgumentError: no observer, nor a callable.
            ClosedError: the stream is closed.
        """
        next_, on_error, on_completed = callbacks_of(on_next, on_error, on_completed)
        made: list[Push] = []

        def observe() -> Push:
            with self._guard:
                push = Push(self._claim(), next_ or ignore, on_error, on_completed, self._interceptors)
                made.append(push)
                self._pushes[push] = None
                self._first = None
                if self._closed:  # by a finalizer, just now
                    push.stop()
            push.gone.listen(partial(self._pushes.pop, push, None))
            self._start(push)
            return push

        def undo() -> None:
            for push in made:
                push.dispose()

        return on_failure(undo).call(observe)

    def _start(self, push: Push) -> None:
        """Start an observer; wait for the broker's confirmation first, where the calling thread may."""
        if may_block():
            with contextlib.suppress(DeadlineError):
                push.subscription.ready.exception(self._connection.settings.timeout)
        # nothing is emitted before the operators above have the disposable: one that fails ends the stream with it
        trampoline = CurrentThreadScheduler.singleton()
        if not trampoline.schedule_required():  # a caller that blocks in there must not wait for ever
            self._connection.engine.call(clock.call_later, self._connection.engine.loop, _ASSEMBLY_SECONDS, push.start)
        trampoline.schedule(lambda *_: push.start())

    def _subscribe_core(
        self, observer: rx.ObserverBase[ReceivedMessage[V]], scheduler: rx.SchedulerBase | None = None
    ) -> rx.DisposableBase:
        return self.subscribe(observer.on_next, observer.on_error, observer.on_completed, scheduler=scheduler)

    def _claim(self) -> Subscription:
        """Return a subscription for one more consumer; it is ``_first`` until it has one. Under the guard."""
        if self._closed:
            raise ClosedError(f"the stream of {self._channel!r} is closed")
        if self._first is None:
            self._first = self._open_subscription()
        self._first.paused = self._paused
        return self._first

    # --- iterators

    def _puller(self) -> Pull:
        with self._guard:
            pull = self._pull
            if not self._closed:
                if pull is None:
                    pull = self._pull = Pull(self._claim(), self._interceptors)
                    if self._interceptors is not None:
                        weakref.finalize(self, pull.forget).atexit = False
                    _watch_over(self, pull.subscription)
                    self._first = None
                return pull
        if pull is not None:
            pull.settle()  # close() may have been interrupted before it did
        raise ClosedError(f"the stream of {self._channel!r} is closed")

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> ReceivedMessage[V]:
        refuse_in_loop("the next message", "iterate with `async for`")
        try:
            return self._puller().next(None)
        except (StreamEndedError, ClosedError):
            raise StopIteration from None

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> ReceivedMessage[V]:
        try:
            return await self._puller().anext()
        except (StreamEndedError, ClosedError):
            raise StopAsyncIteration from None

    def receive(self, timeout: float | None = None) -> ReceivedMessage[V]:
        """Wait for the next message, as the iterator does, for at most ``timeout`` seconds.

        Raises:
            DeadlineError: none came in time.
            ClosedError: the stream has ended.
            WouldBlockError: the thread runs an event loop, and ``timeout`` is not 0.
        """
        if timeout != 0:
            refuse_in_loop("the next message", "use `await anext(stream)`, or `async for`")
        try:
            return self._puller().next(timeout)
        except StreamEndedError:
            raise ClosedError(f"the stream of {self._channel!r} has ended") from None

    # --- flow

    def pause(self) -> None:
        """Emit nothing until :meth:`resume`; the broker is held back as far as its protocol can."""
        self._set_paused(True)

    def resume(self) -> None:
        """Undo :meth:`pause`."""
        self._set_paused(False)

    def _set_paused(self, paused: bool) -> None:
        with self._guard:
            self._paused = paused
            subscriptions = self._subscriptions()
            for subscription in subscriptions:  # now, rather than when the loop comes to it
                subscription.paused = paused

        def apply() -> None:
            reading = self._connection.reading
            for subscription in subscriptions:
                if subscription.handle is not None:
                    (reading.pause if paused else reading.unpause)(subscription.handle)
                if not paused:
                    subscription.proceed()

        self._connection.engine.call(apply)

    @property
    def counters(self) -> StreamCounters:
        """Counters of the first subscription of this stream, live."""
        return self._primary.counters

    def _subscriptions(self) -> list[Subscription]:
        with self._guard:
            found = {push.subscription: None for push in self._pushes.copy()}  # the loop discards without the guard
            if self._pull is not None:
                found[self._pull.subscription] = None
            if self._first is not None:
                found[self._first] = None
            return [*found]

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
            subscription.dismissed = True  # now, rather than when the loop comes to it
            if subscription.consumer is not None:
                subscription.consumer.stop()
        if self._pull is not None:
            if failed:
                self._pull.subscription.settlement.stop_accepting()
            self._pull.settle(failed=failed)
        return remove(self._connection, self._channel, *subscriptions)

    def end_block(self, failed: bool, /) -> Promise[None]:
        """Close the stream."""
        return self.close(failed=failed)

    @tolerant
    def __repr__(self) -> str:
        return f"<MessageStream of {self._channel!r}>"


def _watch_over(stream: MessageStream[Any], subscription: Subscription) -> None:
    """End ``subscription`` if the stream is forgotten before it is closed or observed."""
    weakref.finalize(stream, _abandoned, subscription.connection, subscription).atexit = False


def _abandoned(connection: Connection, subscription: Subscription) -> None:
    """End a subscription whose stream was forgotten. An observer keeps its own subscription."""
    if subscription.ended or isinstance(subscription.consumer, Push):
        return
    forgotten = not isinstance(subscription.consumer, Pull) and not subscription.dismissed
    remove(connection, subscription.spec.channel, subscription)
    if forgotten:
        message = f"a stream of {subscription.spec.channel!r} was neither consumed nor closed"
        warnings.warn(message, ResourceWarning, stacklevel=2)
