"""The consumer of handlers, and ``m.on``: a handler that is called with each message, and survives its own exceptions.

A message is acknowledged when the handler returns (a coroutine function: when its coroutine finishes) and rejected when
the handler raises: it is then redelivered, or dead-lettered, as the subscription says, and the next message is handled.

**Threads.** The consumer takes messages on the engine's loop and hands them to a runner
(:mod:`messaging.receiving.runners`): functions run on worker threads, coroutine functions on the event loop that was
running where they were registered, or else on a loop that all such handlers share.

**Bounds.** Up to ``prefetch`` messages are taken in advance. Of these, ``concurrency`` are being handled at a time.
"""

from __future__ import annotations

import abc
import asyncio
from collections.abc import Sequence
from typing import Any, Final, Generic, Literal, TypeVar, get_args

from messaging.connection import Connection
from messaging.errors import ClosedError
from messaging.errors.text import SafeLog, printable, tolerant
from messaging.execution import Promise
from messaging.interception import ProcessChain
from messaging.model import Message, context_of
from messaging.receiving.buffer import StreamCounters
from messaging.receiving.calling import HandlingVerdict, InvalidPayloadError, MessageHandler, Work
from messaging.receiving.consumers import Block, remove
from messaging.receiving.runners import LoopRunner, runner_of
from messaging.receiving.subscription import Subscription

logger = SafeLog(__name__)

W = TypeVar("W", bound=Work)

#: how a payload that does not fit the model of a handler is settled
HandlerOnInvalid = Literal["skip", "dead_letter"]
ON_INVALID: Final[tuple[HandlerOnInvalid, ...]] = get_args(HandlerOnInvalid)

_ACCEPT: Final = HandlingVerdict.ACCEPT


class HandlerConsumer(abc.ABC, Generic[W]):
    """The ``SubscriptionConsumer`` of a subscription whose messages runners handle, and their ``Origin``.

    Attributes:
        channel, queue: see ``Origin``.
        subscription: set by :meth:`open`.
        in_hand: messages that handlers have, or that wait for them, the oldest first.
        is_stopping: takes no more messages.
    """

    subscription: Subscription

    def __init__(self, connection: Connection, channel: str, queue: str | None) -> None:
        self._connection = connection
        self.channel = channel
        self.queue = queue
        self.in_hand: dict[W, None] = {}
        self.is_stopping = False
        #: the most messages in hand: without acknowledgement, the protocol's credit is no bound
        self._limit = 1
        #: with how many in hand more are taken again
        self._low = 0
        #: whether more messages wait in the buffer
        self._is_full = False
        self._quiet: Promise[None] = Promise(f"the handlers of {channel!r}")

    def open(self, subscription: Subscription, concurrency: int) -> None:
        """Take the messages of ``subscription``.

        Args:
            subscription: has no consumer yet.
            concurrency: how many messages are handled at a time, at most.
        """
        options = subscription.spec.options
        self.subscription = subscription
        self._limit = max(min(options.prefetch, options.buffer_size), concurrency)
        self._low = self._limit - 1 if self._limit <= concurrency else max(self._limit // 2, concurrency)
        subscription.consumer = self

    @abc.abstractmethod
    def begin(self, message: Message) -> None:
        """Give a message to a handler; it is in hand until :meth:`finished`. On the engine's loop."""

    @abc.abstractmethod
    def dispatch(self, work: W) -> None:
        """Give a message to another handler: the runner it was given to is retired. On the engine's loop."""

    @abc.abstractmethod
    def ended(self) -> None:
        """The subscription has ended. On the engine's loop; maybe several times."""

    @abc.abstractmethod
    def withdraw(self) -> None:
        """Release the messages whose handling was not begun. On the engine's loop."""

    def wake(self) -> None:
        """Take messages from the subscription; see ``SubscriptionConsumer``."""
        subscription, in_hand = self.subscription, self.in_hand
        if subscription.ended:
            self.ended()
            return
        hand_out = subscription.hand_out
        while not self.is_stopping:
            if len(in_hand) >= self._limit:
                self._is_full = True
                # a thread that finished just before this line did not see it
                if len(in_hand) > self._low:
                    return
                self._is_full = False
            message = hand_out.fetch()
            hand_out.fetched = None  # no signal handler interrupts this thread
            if message is None:
                return
            self.begin(message)

    def finished(self, work: W, verdict: HandlingVerdict) -> None:
        """Settle a message, and take more; called once for each. From any thread."""
        self.settle(work.request, verdict)
        self.in_hand.pop(work, None)
        if work.after is not None:
            self._connection.engine.call(work.after)
        if self.is_stopping:
            if not self.in_hand:
                self._connection.engine.call(self._stop)  # the loop may have taken one more meanwhile
        elif self._is_full and len(self.in_hand) <= self._low:
            self._is_full = False
            self._connection.engine.call(self.wake)

    def settle(self, message: Message, verdict: HandlingVerdict) -> None:
        """Record the verdict on a message. From any thread."""
        if verdict is _ACCEPT:
            self.subscription.settlement.accept(message)
        elif verdict is HandlingVerdict.REFUSE:
            self.subscription.settlement.refuse(message)

    def is_void(self, message: Message) -> bool:
        """Return whether a message was delivered by a lost connection and will be redelivered. From any thread."""
        return self.subscription.buffer.is_void(message)

    def stop(self) -> Promise[None]:
        """Take no more messages, and let the handlers finish; see ``SubscriptionConsumer``. From any thread."""
        self.is_stopping = True
        self._connection.engine.call(self._stop)
        return self._quiet

    def _stop(self) -> None:
        self.withdraw()
        if not self.in_hand:
            self._quiet.resolve(None)


class MessageWork(Work):
    """One message in the hands of a runner: its unit of work."""

    origin: MessageConsumer

    def __init__(self, consumer: MessageConsumer, message: Message) -> None:
        self.origin = consumer
        self.request = message

    def done(self) -> None:
        """Acknowledge the message. From any thread."""
        self._end(_ACCEPT)

    def failed(self, error: BaseException) -> None:
        """Log what the handler raised, and reject the message. From any thread."""
        self.log(error)
        self.fault(error)

    def log(self, error: BaseException) -> None:
        """Log what the handler raised."""
        if not isinstance(error, InvalidPayloadError):
            self.origin.log_failure(self.request, error)

    def fault(self, error: BaseException) -> None:
        """Reject the message, or treat its payload as invalid."""
        self.leave_scope(error)
        if isinstance(error, InvalidPayloadError):
            if not self.is_over:
                self.origin.invalid(self.request, error.__cause__)
            self._end(HandlingVerdict.LEAVE)
        else:
            self._end(HandlingVerdict.REFUSE)

    def requeue(self) -> None:
        """Reject the message: the handler was cancelled before it had finished."""
        self.failed(asyncio.CancelledError("the handler was cancelled"))

    def finish(self, verdict: HandlingVerdict) -> None:
        """Settle a message that is not to be handled: its connection was lost, or the registration is closing."""
        if self.origin.is_stopping:
            self.release()
        else:
            self._end(verdict)

    def release(self) -> None:
        """Release the message: its handling was not begun."""
        self.origin.subscription.untake(self.request)
        self._end(HandlingVerdict.LEAVE)

    def _end(self, verdict: HandlingVerdict) -> None:
        """Settle the message; the first time counts."""
        if not self.is_over:
            self.is_over = True
            if self.scope is not None:
                self.scope.leave(None)
            self.origin.finished(self, verdict)


class MessageConsumer(HandlerConsumer[MessageWork]):
    """The consumer of one handler of messages.

    Args:
        connection: of the instance.
        subscription: has the messages.
        handler: is called with them.
        concurrency: how many it is called with at a time.
        on_invalid: see ``Messaging.on``.
        chain: interceptors, which wrap the handler.

    Attributes:
        closed: see ``HandlerRegistration``.
    """

    def __init__(
        self,
        connection: Connection,
        subscription: Subscription,
        handler: MessageHandler,
        concurrency: int,
        on_invalid: HandlerOnInvalid | None,
        chain: ProcessChain | None,
    ) -> None:
        options = subscription.spec.options
        super().__init__(connection, subscription.spec.channel, options.queue)
        self.closed: Promise[None] = Promise(f"the end of the handler of {self.channel!r}")
        self.name = handler.typed.name
        default: HandlerOnInvalid = "skip" if options.dead_letter_channel is None else "dead_letter"
        self._is_dead_lettered = (on_invalid or default) == "dead_letter"
        self._runner: Any = runner_of(handler, concurrency, self._orphaned, chain)
        self.open(subscription, concurrency)

    def begin(self, message: Message) -> None:
        """See ``HandlerConsumer``."""
        handling = MessageWork(self, message)
        self.in_hand[handling] = None
        self._runner.submit(handling)

    def dispatch(self, work: MessageWork) -> None:
        """See ``HandlerConsumer``: runners of message handlers are not replaced."""
        work.release()

    def withdraw(self) -> None:
        """See ``HandlerConsumer``."""
        for handling in self._runner.withdraw(lambda _: True):
            handling.release()

    def ended(self) -> None:
        """See ``HandlerConsumer``."""
        if self.closed.done():
            return
        self.stop()
        error = self.subscription.error
        if error is None:
            self.closed.resolve(None)
            return
        logger.error("%s: the handler of %r has ended: %s", self.subscription.adapter.name, self.channel, error)
        self.closed.reject(error)
        self.closed.exception()  # it is logged

    def _orphaned(self, _: LoopRunner, several: Sequence[MessageWork]) -> None:
        """Release the messages that the handler has not begun, and fail: its event loop was closed."""
        for handling in several:
            handling.release()
        if not self.is_stopping:
            error = ClosedError(f"the event loop of the handler of {self.channel!r} was closed")
            self.subscription.fail(error)

    # --- from the runner, on any thread

    def is_void(self, message: Message) -> bool:
        """Return whether to leave ``message`` alone: it will be redelivered, or the registration is closing."""
        return self.is_stopping or self.subscription.buffer.is_void(message)

    def log_failure(self, message: Message, error: BaseException) -> None:
        """Log what the handler raised."""
        logger.error(
            "%s: handler %s of %r raised %s on a message of %r; the message is rejected",
            self.subscription.adapter.name, self.name, self.channel, type(error).__name__, message.context.channel,
            exc_info=error,
        )  # fmt: skip

    def invalid(self, message: Message, error: BaseException | None) -> None:
        """Dead-letter a message whose payload does not fit, or skip it."""
        logger.warning(
            "%s: a message of %r does not fit handler %s: %s; it is %s",
            self.subscription.adapter.name, message.context.channel, self.name, error,
            "dead-lettered" if self._is_dead_lettered else "skipped",
        )  # fmt: skip
        settle = self.subscription.settlement.settle_invalid
        self._connection.engine.call(settle, context_of(message), "dead_letter" if self._is_dead_lettered else "skip")


class HandlerRegistration(Block):
    """A handler and its subscription, returned by ``m.on``. Thread safe; a context manager of both kinds.

    Leaving its ``with`` block closes it. Entering the block, or ``await registration``, waits for the broker's
    confirmation.

    Attributes:
        channel: the channel or pattern.
        handler: the function.
        ready: a promise that resolves when the broker has confirmed the subscription; it fails with
            ``SubscriptionRefusedError`` if it refuses.
        closed: a promise that resolves when the registration has ended: closed, or its instance was. It fails with the
            error if the broker ended the subscription, or if the event loop of the handler was closed.
    """

    _noun = "handler"

    def __init__(self, connection: Connection, consumer: MessageConsumer, handler: MessageHandler) -> None:
        self.channel = self._channel = consumer.channel
        self.handler = handler.typed.function
        self.ready: Promise[None] = consumer.subscription.ready
        self.closed: Promise[None] = consumer.closed
        self._connection = connection
        self._consumer = consumer

    @property
    def counters(self) -> StreamCounters:
        """Counters of the subscription, live."""
        return self._consumer.subscription.counters

    def close(self) -> Promise[None]:
        """End the subscription. From any thread, also from the handler; idempotent.

        Messages being handled are finished, for at most ``close_timeout`` seconds; messages not begun are released.

        Returns:
            A promise that resolves when the broker was told and the handler runs no more. The handler itself must not
            wait for it.
        """
        subscription = self._consumer.subscription
        self._consumer.is_stopping = subscription.dismissed = True
        return remove(self._connection, self.channel, subscription)

    def end_block(self, _: bool, /) -> Promise[None]:
        """Close the registration."""
        return self.close()

    def __await__(self) -> Any:
        yield from self.ready.__await__()
        return self

    @tolerant
    def __repr__(self) -> str:
        return f"<HandlerRegistration of {printable(self._consumer.name)} for {self.channel!r}>"
