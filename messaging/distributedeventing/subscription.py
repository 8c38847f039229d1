"""EventSubscription: the payloads of a topic as an Observable (RFC 214 7.1, ``createSubscription``)."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, TypeVar

from reactivex.disposable import Disposable

from messaging.dispatch import PlainObservable, contained, fail_observer
from messaging.distributedeventing.events import ABORT, CONTINUE, PushEvent
from messaging.errors import EventQueueOverflowError, StreamConsumedError
from messaging.errors.checks import check_instance
from messaging.errors.text import tolerant
from messaging.execution import Closeable, Promise, Serial

if TYPE_CHECKING:
    from reactivex import abc as rx


T = TypeVar("T")

#: the last item
_END: Final = object()


class EventSubscription(PlainObservable[T], Closeable):
    """A subscription to a topic, from its creation on. Thread safe; a context manager that closes it.

    It keeps up to ``limit`` payloads until an observer subscribes, and while the observer is busy; beyond that it ends
    with ``EventQueueOverflowError``. It has one observer, which is called on a worker thread, with one payload at a
    time. The stream completes when the subscription or its admin is closed. Disposing of the observer closes the
    subscription.

    Attributes:
        topic: the topic, or topic filter.
        ready: resolves when the broker has confirmed the subscription, and the other processes are told of it.
    """

    def __init__(self, topic: str, limit: int, unsubscribe: Callable[[EventSubscription[Any]], object]) -> None:
        super().__init__()
        self.topic = topic
        self.ready: Promise[None]
        self._limit = limit
        self._unsubscribe = unsubscribe
        self._lock_items = threading.Lock()  # guards the following
        self._items: deque[Any] = deque()
        self._is_ended = False
        self._observer: rx.ObserverBase[T] | None = None
        #: used by the worker thread: whether the observer receives nothing more
        self._is_over = False
        self._serial = Serial(self._drain, self._has_work)

    # --- from the admin, on a delivery thread

    def accept(self, event: PushEvent[T]) -> int:
        """Take a payload; see ``PushEventConsumer``. Raise ``ArgumentError`` for an object that is no event."""
        check_instance("event", event, PushEvent)
        if event.is_terminal:
            self.end(event.failure)
            return ABORT
        with self._lock_items:
            if self._is_ended:
                return ABORT
            is_full = len(self._items) >= self._limit
            if not is_full:
                self._items.append(event.value)
        if is_full:
            self.end(
                EventQueueOverflowError(f"the subscription to {self.topic!r} is {self._limit} events behind: it ends")
            )
            return ABORT
        self._serial.wake()
        return CONTINUE

    def end(self, error: Exception | None = None) -> None:
        """Complete after the payloads that are kept, or fail with ``error``."""
        with self._lock_items:
            if self._is_ended:
                return
            self._is_ended = True
            self._items.append((_END, error))
        self._serial.wake()

    # --- the observer

    def _subscribe_core(
        self,
        observer: rx.ObserverBase[T],
        scheduler: rx.SchedulerBase | None = None,  # noqa: ARG002  # it runs on a worker thread
    ) -> rx.DisposableBase:
        with self._lock_items:
            is_first = self._observer is None
            if is_first:
                self._observer = observer
        if not is_first:
            observer.on_error(
                StreamConsumedError(f"the subscription to {self.topic!r} has an observer: use ops.share() for several")
            )
            return Disposable()
        self._serial.wake()
        return Disposable(self.close)

    def _has_work(self) -> bool:
        return bool(self._items) and self._observer is not None

    def _drain(self) -> None:
        observer = self._observer
        if observer is None:
            return
        while self._items:
            item = self._items.popleft()
            if self._is_over:
                continue
            with contained(self._fail, observer):
                if isinstance(item, tuple) and len(item) == 2 and item[0] is _END:
                    self._is_over = True
                    if item[1] is None:
                        observer.on_completed()
                    else:
                        observer.on_error(item[1])
                else:
                    observer.on_next(item)

    def _fail(self, observer: rx.ObserverBase[T], error: BaseException) -> None:
        self._is_over = True
        self.close()
        fail_observer(observer, f"subscription to {self.topic!r}: its observer", error)

    # --- closing

    def close(self) -> None:
        """Unsubscribe; the stream completes after the payloads that are kept. Idempotent."""
        self._unsubscribe(self)
        self.end()

    @tolerant
    def __repr__(self) -> str:
        return f"<EventSubscription to {self.topic!r}{', ended' if self._is_ended else ''}>"
