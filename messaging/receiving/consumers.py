"""The two ways to consume a subscription: :class:`Push` drives an observer, :class:`Pull` serves an iterator."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Literal, TypeVar

from reactivex import abc as rx

from messaging.errors import CodecError, DeadlineError, DecodeError, MessagingError, StreamConsumedError
from messaging.execution import Flag, Promise, Serial, clock, mailbox, running_loop, seconds
from messaging.functions import check_result
from messaging.text import SafeLog

if TYPE_CHECKING:
    from messaging.connection import Connection
    from messaging.model import Message, ReceivedMessage
    from messaging.receiving.subscription import Subscription

logger = SafeLog(__name__)

T = TypeVar("T")


class Push(rx.DisposableBase):
    """Drives one observer, on one worker thread at a time.

    Attributes:
        quiet: resolves when the observer will not be called any more.
        gone: resolves when the subscription is ended at the broker, too.
    """

    def __init__(
        self,
        subscription: Subscription,
        on_next: Callable[[Message], object],
        on_error: Callable[[Exception], object] | None,
        on_completed: Callable[[], object] | None,
    ) -> None:
        self.subscription = subscription
        self._channel = subscription.spec.channel
        self._on_next = on_next
        self._on_error = on_error
        self._on_completed = on_completed
        self._serial = Serial(self._drain, self._has_work)
        self._thread: int | None = None
        self._started = self._in_error = self._over = False
        #: take no more messages; with ``_complete``, call ``on_completed``
        self._stopping = self._complete = False
        self.quiet: Promise[None] = Promise("the end of an observer")
        self.gone: Promise[None] = Promise("the end of an observed subscription")
        subscription.consumer = self

    def wake(self) -> None:
        """Start a worker that drains the buffer, unless one runs. On the loop."""
        if self._started and not self._over:
            self._serial.wake()

    def start(self) -> None:
        """Emit from now on. From any thread; idempotent."""
        self._started = True
        # on the loop, since no signal handler interrupts it between acquiring and using the right to drain
        self.subscription.connection.engine.call(self.wake)

    def _drain(self) -> None:
        subscription = self.subscription
        self._thread = threading.get_ident()
        _in_observer.push = subscription
        try:
            if not (self._over or self._stopping):
                self._consume(subscription)
            if not self._over and (self._stopping or subscription.ended):
                self._finish(subscription.error, notify=self._complete or not self._stopping)
        finally:
            _in_observer.push = None

    def _has_work(self) -> bool:
        return not self._over and (self._stopping or self.subscription.hand_out.has_next)

    def _consume(self, subscription: Subscription) -> None:
        on_next, hand_out, settlement = self._on_next, subscription.hand_out, subscription.settlement
        fetch = hand_out.fetch
        accept = ignore if subscription.manual else settlement.accept
        while not subscription.ended:
            try:
                message = fetch()
                hand_out.fetched = None
            except CodecError as error:
                self._finish(error, notify=True)
                return
            except BaseException as error:  # noqa: BLE001  # of a direct acknowledgement callback
                hand_out.reject_unfinished()
                self._observer_raised(error)
                return
            if message is None:
                return
            try:
                found = on_next(message)
                if found is not None:
                    check_result(found, "an observer")
            except BaseException as error:  # noqa: BLE001  # an observer that raises ends this stream only
                settlement.stop_accepting()
                if not subscription.manual:
                    (settlement.refuse_invalid if isinstance(error, DecodeError) else settlement.refuse)(message)
                self._observer_raised(error)
                return
            if self._stopping:
                if self._in_error and not subscription.manual:
                    settlement.stop_accepting()
                    settlement.refuse(message)
                else:
                    accept(message)
                return
            accept(message)

    def _observer_raised(self, error: BaseException) -> None:
        if not isinstance(error, Exception):
            wrapped = MessagingError(f"the observer of {self._channel!r} raised {type(error).__name__}")
            wrapped.__cause__ = error
            error = wrapped
        if self._on_error is None:
            logger.error("the observer of %r raised; its stream ends", self._channel, exc_info=error)
        self._finish(error, notify=not self._stopping)

    def _finish(self, error: Exception | None, *, notify: bool) -> None:
        """Call ``on_completed`` or ``on_error``, then unsubscribe. On the worker thread."""
        self._over = self.subscription.dismissed = True
        if notify:
            try:
                if error is None:
                    if self._on_completed is not None:
                        self._on_completed()
                elif self._on_error is not None:
                    self._on_error(error)
                elif isinstance(error, MessagingError):
                    logger.error("stream of %r ended: %s", self._channel, error)
            except BaseException:  # it must not reach the worker
                logger.exception("observer of %r raised from on_error or on_completed", self._channel)
        connection = self.subscription.connection
        connection.engine.call(self.quiet.resolve, None)
        remove(connection, self._channel, self.subscription).listen(lambda: self.gone.resolve(None))

    def stop(self) -> Promise[None]:
        """Complete after the message in progress; the promise resolves when that is done. From any thread."""
        self._complete = self._complete or not self._stopping
        self._stopping = self.subscription.dismissed = True
        self.start()
        return self.quiet

    def dispose(self) -> None:
        """Stop: no message is emitted after the one in progress, which is still settled. From any thread."""
        if self._thread == threading.get_ident() and sys.exception() is not None:
            # an operator reports what a user's function raised by disposing from its except block
            self._in_error = True
        self._stopping = self.subscription.dismissed = True
        self.start()


class _InObserver(threading.local):
    #: the subscription whose observer runs on this thread; ``True`` for a message handler
    push: Subscription | Literal[True] | None = None


_in_observer = _InObserver()


#: the task that runs the coroutine of a message handler, in the context of this task and of those it starts
_handler_task: Final[ContextVar[asyncio.Task[Any] | None]] = ContextVar("messaging_handler_task", default=None)


def in_observer() -> bool:
    """Return whether the caller is an observer's callback or a message handler, which must not wait for its own end."""
    if _in_observer.push is not None:
        return True
    task = _handler_task.get()
    return task is not None and running_loop() is not None and task is asyncio.current_task()


def observed_here() -> Subscription | None:
    """Return the subscription whose observer calls this function."""
    found = _in_observer.push
    return found if found is not True else None


def call_inside(function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    """Call a message handler on this thread; :func:`in_observer` returns true meanwhile."""
    outer, _in_observer.push = _in_observer.push, True
    try:
        return function(*arguments)
    finally:
        _in_observer.push = outer


async def await_inside(awaitable: Awaitable[T]) -> T:
    """Await a message handler in a task of its own; :func:`in_observer` returns true meanwhile."""
    _handler_task.set(asyncio.current_task())
    return await awaitable


def remove(connection: Connection, channel: str, *subscriptions: Subscription) -> Promise[None]:
    """End subscriptions to a channel. From any thread."""
    what = f"unsubscribing from {channel!r}"
    if connection.is_abandoned:
        gone: Promise[None] = Promise(what)
        gone.resolve(None)
        return gone

    async def end() -> None:
        await asyncio.gather(*map(connection.subscriptions.remove, subscriptions))

    return connection.engine.run(end(), what)


class StreamEndedError(Exception):
    """The stream is complete. Internal: each face raises its own exception."""


class Pull:
    """Returns messages to one thread or event loop at a time."""

    def __init__(self, subscription: Subscription) -> None:
        self.subscription = subscription
        self._hand_out = subscription.hand_out
        #: the caller that waits for a message: written under the guard
        self._asking: object = None
        self._guard = threading.Lock()
        self._in_hand: ReceivedMessage | None = None
        #: what ended the stream here, before the loop knows
        self._error: CodecError | None = None
        self._arrived: Callable[[], object] = _nothing
        subscription.consumer = self

    def wake(self) -> None:
        """Wake the caller that is asking, if any."""
        self._arrived()

    def stop(self) -> None:
        """Do nothing: no message is in progress here. See ``Consumer.stop``."""

    def settle(self, *, failed: bool = False) -> None:
        """Settle the message handed out last, and forget it when its verdict is recorded: an interrupt repeats this."""
        message, subscription = self._in_hand, self.subscription
        if message is None or message is self._hand_out.fetched:  # an interrupt came before that one was handed out
            return
        if not subscription.manual:
            settlement = subscription.settlement
            if failed:
                is_invalid = isinstance(sys.exception(), DecodeError)
                (settlement.refuse_invalid if is_invalid else settlement.refuse)(message)
            else:
                settlement.accept(message)
        if self._in_hand is message:
            self._in_hand = None

    def _claim(self, caller: object) -> None:
        """Acquire the right to wait for a message. The caller must be in its ``try`` already: interrupts may come."""
        with self._guard:
            if self._asking is not None:
                raise StreamConsumedError(
                    f"the stream of {self.subscription.spec.channel!r} is being iterated already; "
                    f"subscribe again for a second consumer"
                )
            self._asking = caller

    def take(self) -> ReceivedMessage | Exception | None:
        """Return the next message, or the error that ends the stream, which :meth:`next` raises after its ``try``."""
        subscription = self.subscription
        if self._error is not None:
            return self._error.with_traceback(None)
        if subscription.ended:
            return StreamEndedError() if subscription.error is None else subscription.error.with_traceback(None)
        try:
            message = self._in_hand = self._hand_out.fetch()
        except CodecError as error:
            self._error = error
            subscription.connection.engine.call(subscription.fail, error)
            return error
        return message

    def _withdraw(self, caller: object, found: ReceivedMessage | Exception | None) -> None:
        """Return the right to wait after an interrupt; a message that was taken already is handed out next."""
        if found is not None and not isinstance(found, Exception):
            self._hand_out.fetched = found
        if self._asking is caller:
            self._asking = None

    def next(self, timeout: float | None) -> ReceivedMessage:
        """Return the next message; raise ``StreamEndedError``, or ``DeadlineError`` after ``timeout`` seconds."""
        if timeout is not None:
            timeout = seconds(timeout)
        caller = object()
        found: ReceivedMessage | Exception | None = None
        arrived: Flag | None = None
        deadline = None if timeout is None else clock.monotonic() + timeout
        try:
            self._claim(caller)
            self.settle()
            while (found := self.take()) is None:
                if arrived is None:
                    arrived = Flag()
                    self._arrived = arrived.set
                    continue  # the arrival of an earlier message set no flag
                if not arrived.wait(None if deadline is None else deadline - clock.monotonic()):
                    found = DeadlineError(f"no message on {self.subscription.spec.channel!r} within {timeout:g} s")
                    break
                arrived.clear()
            if isinstance(found, Exception):
                self._asking = None
            else:
                # From here on it is the caller's. No signal is looked for between the assignments and the return; on a
                # thread that is interrupted otherwise, see _withdraw.
                self._asking = self._hand_out.fetched = None
                return found
        except BaseException:
            self._withdraw(caller, found)
            raise
        raise found

    async def anext(self) -> ReceivedMessage:
        """Return the next message; raise ``StreamEndedError``. Cancelling loses no message."""
        caller = object()
        found: ReceivedMessage | Exception | None = None
        arrived: asyncio.Event | None = None
        try:
            self._claim(caller)
            self.settle()
            while (found := self.take()) is None:
                if arrived is None:
                    arrived = asyncio.Event()
                    self._arrived = partial(mailbox(asyncio.get_running_loop()).post, arrived.set)
                    continue
                await arrived.wait()
                arrived.clear()
            if isinstance(found, Exception):
                self._asking = None
            else:
                self._asking = self._hand_out.fetched = None  # as in next()
                return found
        except BaseException:
            self._withdraw(caller, found)
            raise
        raise found


def _nothing() -> None:
    """Do nothing: no caller waits for a message."""


def ignore(_: Message) -> None:
    """Do nothing: the callback of a stream without observer, and the acknowledgement that is left to the consumer."""
