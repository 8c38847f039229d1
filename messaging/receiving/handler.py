"""``m.on``: a handler that is called with each message of a channel, and survives its own exceptions.

A message is acknowledged when the handler returns (a coroutine function: when its coroutine finishes) and rejected when
the handler raises: it is then redelivered, or dead-lettered, as the subscription says, and the next message is handled.

**Threads.** The registration takes messages on the engine's loop and hands them to a runner of request handlers
(:mod:`messaging.receiving.runners`): functions run on worker threads, coroutine functions on the event loop that was
running where they were registered, or else on a loop that all such handlers share.

**Bounds.** Up to ``prefetch`` messages are taken in advance. Of these, ``concurrency`` are being handled at a time.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Sequence
from types import CoroutineType
from typing import TYPE_CHECKING, Any, Final, Literal, get_args

from messaging.errors import ArgumentError, ClosedError, CodecError
from messaging.execution import Promise, running_loop
from messaging.functions import is_coroutine
from messaging.receiving.blocks import Block
from messaging.receiving.consumers import await_inside, call_inside, remove
from messaging.receiving.parameters import NOT_ANNOTATED, MessageParameter, parameter_of
from messaging.receiving.runners import Handler, LoopRunner, Runner, ThreadRunner, Verdict
from messaging.text import SafeLog, printable, tolerant

if TYPE_CHECKING:
    from messaging.connection import Connection
    from messaging.model import Message
    from messaging.receiving.receiver import StreamCounters
    from messaging.receiving.subscription import Subscription

logger = SafeLog(__name__)

#: how a payload that does not fit the model of a handler is settled
HandlerOnInvalid = Literal["skip", "dead_letter"]
ON_INVALID: Final[tuple[HandlerOnInvalid, ...]] = get_args(HandlerOnInvalid)


class InvalidPayloadError(Exception):
    """The payload does not fit the parameter of the handler, which was not called. The cause says why."""


class MessageHandler:
    """A function or coroutine function of one message, called with the type that its parameter is annotated with.

    Args:
        function: takes the message, its value, or nothing.
        model: what the value is validated against; without it, the annotation of the parameter.

    Raises:
        ArgumentError: ``function`` is not callable with one argument, or is a generator function.
    """

    def __init__(self, function: Callable[..., Any], model: Any = None) -> None:
        if not callable(function):
            raise ArgumentError(f"a message handler must be callable, not {type(function).__name__}")
        plain = function if inspect.isroutine(function) else function.__call__  # type: ignore[operator]
        if inspect.isgeneratorfunction(plain) or inspect.isasyncgenfunction(plain):
            raise ArgumentError("a message handler must not be a generator function: its body would never run")
        takes = parameter_of(function, "a message handler", "the message")
        self.function = function
        self.is_async = is_coroutine(function)
        self._takes_nothing = takes is None
        self._message: MessageParameter | None = None
        if isinstance(takes, MessageParameter):
            self._message = takes if model is None else MessageParameter(model)
        elif takes is NOT_ANNOTATED and model is None:
            self._message = MessageParameter()
        self._model = model if model is not None or self._takes_nothing else takes

    @property
    def name(self) -> str:
        """Qualified name of the function, for logs."""
        return getattr(self.function, "__qualname__", None) or type(self.function).__qualname__

    def __call__(self, message: Message) -> Any:
        """Call the function.

        Raises:
            InvalidPayloadError: the payload does not fit.
        """
        if self.is_async:
            return self._call_async(message)
        found = call_inside(self.function, self._arguments(message))
        return await_inside(found) if type(found) is CoroutineType else found

    async def _call_async(self, message: Message) -> Any:
        return await await_inside(self.function(*self._arguments(message)))

    def _arguments(self, message: Message) -> tuple[Any, ...]:
        if self._takes_nothing and self._model is None:
            return ()
        try:
            if self._message is not None:
                return (self._message.argument(message),)
            value = message.value(self._model)
        except CodecError as error:
            raise InvalidPayloadError from error
        return () if self._takes_nothing else (value,)


class _Handling:
    """One message in the hands of a runner: its unit of work."""

    __slots__ = ("after", "has_begun", "is_over", "is_stopped", "origin", "request", "was_cancelled")

    def __init__(self, registration: HandlerRegistration, message: Message) -> None:
        self.origin = registration
        self.request = message
        self.is_over = False
        #: called on the loop when the message is settled, if the handler went on after its function returned
        self.after: Callable[[], object] | None = None
        #: the task of the handler was cancelled, once
        self.was_cancelled = False
        self.is_stopped = self.has_begun = False

    def done(self) -> None:
        """Acknowledge the message. From any thread."""
        self._end(Verdict.ACCEPT)

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
        if isinstance(error, InvalidPayloadError):
            if not self.is_over:
                self.origin.invalid(self.request, error.__cause__)
            self._end(Verdict.LEAVE)
        else:
            self._end(Verdict.REFUSE)

    def requeue(self) -> None:
        """Reject the message: the handler was cancelled before it had finished."""
        self.failed(asyncio.CancelledError("the handler was cancelled"))

    def finish(self, _: Verdict) -> None:
        """Settle a message that is not to be handled: its connection was lost, or the registration is closing."""
        if self.origin.is_stopping:
            self.leave()
        else:
            self._end(Verdict.REFUSE)

    def leave(self) -> None:
        """Release the message: its handling was not begun."""
        self.origin.untake(self.request)
        self._end(Verdict.LEAVE)

    def _end(self, verdict: Verdict) -> None:
        """Settle the message; the first time counts."""
        if not self.is_over:
            self.is_over = True
            self.origin.finished(self, verdict)


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

    def __init__(
        self,
        connection: Connection,
        subscription: Subscription,
        handler: MessageHandler,
        concurrency: int,
        on_invalid: HandlerOnInvalid | None,
    ) -> None:
        self.channel = self._channel = subscription.spec.channel
        self.handler = handler.function
        self.ready: Promise[None] = subscription.ready
        self.closed: Promise[None] = Promise(f"the end of the handler of {self.channel!r}")
        self._name = handler.name
        self._connection = connection
        self._subscription = subscription
        options = subscription.spec.options
        #: messages taken and not finished; how many there may be, and with how many more are taken again
        self._handled: set[_Handling] = set()
        self._limit = max(min(options.prefetch, options.buffer_size), concurrency)
        self._low = self._limit - 1 if self._limit <= concurrency else max(self._limit // 2, concurrency)
        self._is_full = False
        #: the handler is not called any more
        self.is_stopping = False
        self._quiet: Promise[None] = Promise(f"the handler of {self.channel!r}")
        default: HandlerOnInvalid = "skip" if options.dead_letter_channel is None else "dead_letter"
        self._on_invalid = on_invalid or default
        runs = Handler(handler, running_loop(), handler.is_async)
        self._runner: Runner = (
            LoopRunner(runs, concurrency, self._orphaned) if runs.is_async else ThreadRunner(runs, concurrency)
        )
        subscription.consumer = self

    # --- consumer of the subscription, on the engine's loop

    def wake(self) -> None:
        """Take messages from the subscription, and give them to the handler; see ``Consumer``."""
        subscription, handled = self._subscription, self._handled
        if subscription.ended:
            self._ended()
            return
        while not self.is_stopping:
            if len(handled) >= self._limit:
                self._is_full = True
                # a thread that finished just before this line did not see it
                if len(handled) > self._low:
                    return
                self._is_full = False
            message = subscription.hand_out.take()
            if message is None:
                return
            handling = _Handling(self, message)
            handled.add(handling)
            runner: Any = self._runner
            runner.submit(handling)

    def stop(self) -> Promise[None]:
        """Call the handler no more, and let it finish; see ``Consumer``. From any thread."""
        self.is_stopping = True
        self._connection.engine.call(self._stop)
        return self._quiet

    def _stop(self) -> None:
        waiting: Sequence[Any] = self._runner.withdraw(lambda _: True)
        self._leave(waiting)
        if not self._handled:
            self._quiet.resolve(None)

    def _leave(self, several: Sequence[_Handling]) -> None:
        """Release messages whose handling was not begun."""
        for handling in several:
            handling.leave()

    def _ended(self) -> None:
        if self.closed.done():
            return
        self.stop()
        error = self._subscription.error
        if error is None:
            self.closed.resolve(None)
            return
        logger.error("%s: the handler of %r has ended: %s", self._subscription.adapter.name, self.channel, error)
        self.closed.reject(error)
        self.closed.exception()  # it is logged

    def _orphaned(self, _: LoopRunner, several: Sequence[Any]) -> None:
        """Release the messages that the handler has not begun, and fail: its event loop was closed."""
        self._leave(several)
        if not self.is_stopping:
            error = ClosedError(f"the event loop of the handler of {self.channel!r} was closed")
            self._subscription.fail(error)

    # --- from the runner, on any thread

    def is_void(self, message: Message) -> bool:
        """Return whether to leave ``message`` alone: it will be redelivered, or the registration is closing."""
        return self.is_stopping or self._subscription.buffer.is_void(message)

    def untake(self, message: Message) -> None:
        """Release a message whose handling was not begun."""
        self._subscription.untake(message)

    def dispatch(self, handling: _Handling) -> None:
        """See ``runners.Origin``: runners of message handlers are not replaced."""
        self._leave([handling])

    def log_failure(self, message: Message, error: BaseException) -> None:
        """Log what the handler raised."""
        logger.error(
            "%s: handler %s of %r raised %s on a message of %r; the message is rejected",
            self._subscription.adapter.name, self._name, self.channel, type(error).__name__, message.context.channel,
            exc_info=error,
        )  # fmt: skip

    def invalid(self, message: Message, error: BaseException | None) -> None:
        """Dead-letter a message whose payload does not fit, or skip it."""
        logger.warning(
            "%s: a message of %r does not fit handler %s: %s; it is %s",
            self._subscription.adapter.name, message.context.channel, self._name, error,
            "dead-lettered" if self._on_invalid == "dead_letter" else "skipped",
        )  # fmt: skip
        self._connection.engine.call(self._subscription.drop_invalid, message, self._on_invalid == "dead_letter")

    def finished(self, handling: _Handling, verdict: Verdict) -> None:
        """Settle a message, and take more."""
        if verdict is Verdict.ACCEPT:
            self._subscription.settlement.accept(handling.request)
        elif verdict is Verdict.REFUSE:
            self._subscription.settlement.refuse(handling.request)
        self._handled.discard(handling)
        if handling.after is not None:
            self._connection.engine.call(handling.after)
        if self.is_stopping:
            if not self._handled:
                self._connection.engine.call(self._stop)  # the loop may have taken one more meanwhile
        elif self._is_full and len(self._handled) <= self._low:
            self._is_full = False
            self._connection.engine.call(self.wake)

    # --- the user's side

    @property
    def counters(self) -> StreamCounters:
        """Counters of the subscription, live."""
        return self._subscription.counters

    def close(self) -> Promise[None]:
        """End the subscription. From any thread, also from the handler; idempotent.

        Messages being handled are finished, for at most ``close_timeout`` seconds; messages not begun are released.

        Returns:
            A promise that resolves when the broker was told and the handler runs no more. The handler itself must not
            wait for it.
        """
        self.is_stopping = self._subscription.dismissed = True
        return remove(self._connection, self.channel, self._subscription)

    def end_block(self, _: bool, /) -> Promise[None]:
        """Close the registration."""
        return self.close()

    def __await__(self) -> Any:
        yield from self.ready.__await__()
        return self

    @tolerant
    def __repr__(self) -> str:
        return f"<HandlerRegistration of {printable(self._name)} for {self.channel!r}>"
