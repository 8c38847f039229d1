"""The ways to consume a stream: :class:`Push` drives an observer, :class:`Pull` serves an iterator, and its blocks."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Callable
from functools import partial
from types import TracebackType
from typing import ClassVar, Literal, Self

from reactivex import abc as rx

from messaging.connection import Connection
from messaging.environment.signals import attempt, on_failure
from messaging.errors import CodecError, DeadlineError, DecodeError, MessagingError, StreamConsumedError
from messaging.errors.checks import check_result
from messaging.errors.text import SafeLog
from messaging.execution import (
    Flag,
    Promise,
    Serial,
    clock,
    mailbox,
    may_block,
    seconds,
    wait_for,
    warn_in_loop,
    workers,
)
from messaging.interception import InboundMessage, ProcessChain, PulledScope, Scope
from messaging.model import Message, ReceivedMessage
from messaging.receiving.calling import in_observer, observing
from messaging.receiving.subscription import Subscription

logger = SafeLog(__name__)


class Push(rx.DisposableBase):
    """Drives one observer, on one worker thread at a time.

    Args:
        subscription: has the messages.
        on_next, on_error, on_completed: of the observer.
        chain: interceptors, which wrap ``on_next``.

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
        chain: ProcessChain | None = None,
    ) -> None:
        self.subscription = subscription
        self._channel = subscription.spec.channel
        self._on_next = on_next if chain is None else partial(self._intercepted, chain, on_next)
        self._on_error = on_error
        self._on_completed = on_completed
        self._serial = Serial(self._drain, self._has_work)
        self._thread: int | None = None
        self._started = self._over = False
        #: what a user's function raised, as an operator reports it by disposing from its except block
        self._reported: BaseException | None = None
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
        observing.push = subscription
        try:
            if not (self._over or self._stopping):
                self._consume(subscription)
            if not self._over and (self._stopping or subscription.ended):
                self._finish(subscription.error, notify=self._complete or not self._stopping)
        finally:
            observing.push = None

    def _has_work(self) -> bool:
        return not self._over and (self._stopping or self.subscription.hand_out.has_next)

    def _consume(self, subscription: Subscription) -> None:
        on_next, hand_out, settlement = self._on_next, subscription.hand_out, subscription.settlement
        fetch = hand_out.fetch
        accept = ignore if subscription.manual else settlement.accept
        while not subscription.ended:
            message = None
            try:
                message = fetch()
                hand_out.fetched = None
                if message is None:
                    return
                found = on_next(message)
                if found is not None:
                    check_result(found, "an observer")
            except BaseException as error:  # noqa: BLE001  # an observer that raises ends this stream only
                self._failed(message, error)
                return
            if self._stopping:
                if self._reported is not None and not subscription.manual:
                    settlement.stop_accepting()
                    settlement.refuse(message)
                else:
                    accept(message)
                return
            accept(message)

    def _intercepted(self, chain: ProcessChain, on_next: Callable[[Message], object], message: Message) -> object:
        """Call ``on_next`` inside interceptors."""
        scope = Scope(chain, _inbound(chain, self.subscription, message, is_pulled=False))
        has_returned = False
        try:
            found = scope.context.run(on_next, message)
            has_returned = True
        finally:  # without an error of the block, sys.exception() is one that a caller is handling
            scope.leave(self._reported if has_returned else sys.exception())
        return found

    def _failed(self, message: Message | None, error: BaseException) -> None:
        """Reject the message whose observer raised, and end; without one, a check before the observer raised."""
        if message is not None:
            self.subscription.settlement.stop_accepting()
            if not self.subscription.manual:
                self.subscription.settlement.refuse(message, is_invalid=isinstance(error, DecodeError))
        elif isinstance(error, CodecError):
            self._finish(error, notify=True)
            return
        else:  # of a direct acknowledgement callback
            self.subscription.hand_out.reject_unfinished()
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
        raised = attempt(self._notify, error) if notify else None
        if raised is not None:
            logger.error("observer of %r raised from on_error or on_completed", self._channel, exc_info=raised)
        connection = self.subscription.connection
        connection.engine.call(self.quiet.resolve, None)
        remove(connection, self._channel, self.subscription).listen(lambda: self.gone.resolve(None))

    def _notify(self, error: Exception | None) -> None:
        if error is None:
            if self._on_completed is not None:
                self._on_completed()
        elif self._on_error is not None:
            self._on_error(error)
        elif isinstance(error, MessagingError):
            logger.error("stream of %r ended: %s", self._channel, error)

    def stop(self) -> Promise[None]:
        """Complete after the message in progress; the promise resolves when that is done. From any thread."""
        self._complete = self._complete or not self._stopping
        self._stopping = self.subscription.dismissed = True
        self.start()
        return self.quiet

    def dispose(self) -> None:
        """Stop: no message is emitted after the one in progress, which is still settled. From any thread."""
        if self._thread == threading.get_ident():
            self._reported = self._reported or sys.exception()
        self._stopping = self.subscription.dismissed = True
        self.start()


def observed_here() -> Subscription | None:
    """Return the subscription whose observer calls this function."""
    found: Subscription | Literal[True] | None = observing.push
    return found if found is not True else None


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
    """Returns messages to one thread or event loop at a time.

    Args:
        subscription: has the messages.
        chain: interceptors, which are entered when a message is fetched, and exited when it is settled.
    """

    def __init__(self, subscription: Subscription, chain: ProcessChain | None = None) -> None:
        self.subscription = subscription
        self._hand_out = subscription.hand_out
        self._fetch = self._hand_out.fetch if chain is None else partial(self._fetch_intercepted, chain)
        #: the interceptors of the message in hand
        self._scope: PulledScope | None = None
        #: the caller that waits for a message: written under the guard
        self._asking: object = None
        self._guard = threading.Lock()
        #: the message that was handed out last, until it is settled
        self._in_hand: ReceivedMessage | None = None
        self._is_stopped = False
        #: what ended the stream here, before the loop knows
        self._error: CodecError | None = None
        self._arrived: Callable[[], object] = _nothing
        subscription.consumer = self

    def wake(self) -> None:
        """Wake the caller that is asking, if any."""
        self._arrived()

    def stop(self) -> None:
        """Hand out no more messages: one that a caller is about to get is released. From any thread.

        A message that was handed out before is in hand when this returns.
        """
        self._is_stopped = True

    def settle(self, *, failed: bool = False) -> None:
        """Settle the message handed out last, and forget it when its verdict is recorded: an interrupt repeats this."""
        message, subscription = self._in_hand, self.subscription
        if message is None:
            return
        if self._scope is not None:
            self._leave_scope(self._scope, failed=failed)
        if not subscription.manual:
            settlement = subscription.settlement
            if failed:
                settlement.refuse(message, is_invalid=isinstance(sys.exception(), DecodeError))
            else:
                settlement.accept(message)
        if self._in_hand is message:
            self._in_hand = None

    def _fetch_intercepted(self, chain: ProcessChain) -> ReceivedMessage | None:
        """Return the next message, with its interceptors entered."""
        message = self._hand_out.fetch()
        if message is not None:
            if self._scope is not None:  # an interrupt came before it was handed out
                self._scope.leave(None)
            self._scope = PulledScope(chain, _inbound(chain, self.subscription, message, is_pulled=True))
        return message

    def _leave_scope(self, scope: PulledScope, *, failed: bool) -> None:
        self._scope = None
        error: BaseException | None = None
        if failed:
            channel = self.subscription.spec.channel
            error = sys.exception() or MessagingError(f"the message of {channel!r} was rejected")
        scope.leave(error)

    def forget(self) -> None:
        """Exit the interceptors when the stream is garbage-collected: on any thread, maybe under its locks."""
        scope, self._scope = self._scope, None
        if scope is not None:
            scope.restore()
            workers().submit(partial(scope.leave, None))

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
            return self._fetch()
        except CodecError as error:
            self._error = error
            subscription.connection.engine.call(subscription.fail, error)
            return error

    def _end_stopped(self) -> StreamEndedError:
        """Return the error that ends a stream which was stopped before the caller got the message that it took."""
        if self._scope is not None:
            self._leave_scope(self._scope, failed=False)
        self._asking = None
        return StreamEndedError()

    def _withdraw(self, caller: object, found: ReceivedMessage | Exception | None) -> None:
        """Return the right to wait after an interrupt; a message that was taken already is handed out next."""
        if found is not None and not isinstance(found, Exception):
            self._hand_out.fetched, self._in_hand = found, None
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
            elif self._is_stopped:
                found = self._end_stopped()
            else:
                # From here on it is the caller's. Between the condition and the return Python looks for no signal, and
                # runs no other thread; on a thread that is interrupted otherwise, see _withdraw.
                self._in_hand = found
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
            elif self._is_stopped:
                found = self._end_stopped()
            else:
                self._in_hand = found
                self._asking = self._hand_out.fetched = None  # as in next()
                return found
        except BaseException:
            self._withdraw(caller, found)
            raise
        raise found


def _inbound(chain: ProcessChain, subscription: Subscription, message: Message, *, is_pulled: bool) -> InboundMessage:
    """Return what interceptors are given of a message."""
    spec = subscription.spec
    return chain.inbound(message, spec.channel, spec.options.queue, is_pulled=is_pulled, is_manual=subscription.manual)


def _nothing() -> None:
    """Do nothing: no caller waits for a message."""


def ignore(_: Message) -> None:
    """Do nothing: the callback of a stream without observer, and the acknowledgement that is left to the consumer."""


# --- blocks


class AsyncBlock:
    """An ``async with`` block that begins when the broker has confirmed a subscription.

    Attributes:
        ready: resolves when the broker has confirmed it.
    """

    __slots__ = ()

    ready: Promise[None]

    def end_block(self, failed: bool, /) -> Promise[None] | None:
        """End the subscription; return a promise of its end, unless that need not be waited for.

        Args:
            failed: the block ended with an exception that rejects the message in hand.
        """
        raise NotImplementedError

    async def __aenter__(self) -> Self:
        with on_failure(self.end_block, False):
            await self.ready
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        is_cancelled = kind is not None and issubclass(kind, (GeneratorExit, asyncio.CancelledError))
        closing = self.end_block(kind is not None and not is_cancelled)
        if closing is not None and not in_observer():
            await closing


class Block(AsyncBlock):
    """A block of both kinds. A thread that runs an event loop does not wait, but is warned."""

    #: for texts
    _noun: ClassVar[str]
    _channel: str
    _connection: Connection

    def __enter__(self) -> Self:
        if may_block():
            return on_failure(self.end_block, False).call(self._confirmed)
        if not self.ready.done():
            with on_failure(self.end_block, False):
                warn_in_loop("the broker has confirmed the subscription", "use `async with`")
        return self

    def _confirmed(self) -> Self:
        wait_for(self.ready, self._connection.settings.timeout, f"subscribing to {self._channel!r}")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        failed = kind is not None and not issubclass(kind, GeneratorExit)
        with on_failure(self.end_block, failed):  # nothing else would end it
            closing = self.end_block(failed)
        if closing is not None and may_block() and not in_observer():
            timeout = self._connection.settings.close_timeout * 2
            wait_for(closing, timeout, f"closing the {self._noun} of {self._channel!r}")
