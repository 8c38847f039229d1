"""Handlers of ``m.on`` inside interceptors. Registrations without interceptors call :class:`MessageHandler`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from messaging.execution import Promise
from messaging.receiving.handler import InvalidPayloadError, MessageHandler
from messaging.receiving.runners import is_awaitable

if TYPE_CHECKING:
    from messaging.interception import InboundMessage, ProcessChain, Scope
    from messaging.model import Message, SubscriptionSpec


class InterceptedMessageHandler(MessageHandler):
    """Calls a handler inside interceptors: until it has returned, or what it returned has been awaited.

    Args:
        handler: the handler.
        chain: the interceptors.
        spec: of the subscription.
    """

    def __init__(self, handler: MessageHandler, chain: ProcessChain, spec: SubscriptionSpec) -> None:
        self.function = handler.function
        self.is_async = handler.is_async
        self._handler = handler
        self._chain = chain
        self._spec = spec

    def __call__(self, message: Message) -> Any:
        """Call the handler; see ``MessageHandler``."""
        chain, spec = self._chain, self._spec
        inbound = chain.inbound(message, spec.channel, spec.options.queue)
        if self.is_async:
            return self._process(inbound)
        scope = chain.open(inbound)
        try:
            found = scope.run(self._handler, message)
            if isinstance(found, Promise):
                return _Followed(found, scope)
            if is_awaitable(found):
                return _awaited(found, scope)
        except BaseException as error:
            _leave(scope, error)
            raise
        scope.leave(None)
        return found

    async def _process(self, inbound: InboundMessage) -> Any:
        scope = self._chain.open(inbound)
        try:
            found = await scope.stepping(self._handler(inbound.message))
            while is_awaitable(found):
                found = await scope.stepping(found)
        except BaseException as error:
            _leave(scope, error)
            raise
        scope.leave(None)
        return found


async def _awaited(found: Awaitable[Any], scope: Scope) -> Any:
    """Await what a function returned, in its scope."""
    try:
        while is_awaitable(found):
            found = await scope.stepping(found)
    except BaseException as error:
        _leave(scope, error)
        raise
    scope.leave(None)
    return found


def _leave(scope: Scope, error: BaseException) -> None:
    """Leave a scope whose handler failed; of an invalid payload, interceptors are given the cause."""
    cause = error.__cause__ if isinstance(error, InvalidPayloadError) else None
    scope.leave(error if cause is None else cause)


class _Followed(Promise[Any]):
    """The promise that a function returned: its scope is left before its callback is called."""

    __slots__ = ("_promise", "_scope")

    def __init__(self, promise: Promise[Any], scope: Scope) -> None:
        super().__init__(lambda: promise.what)
        self._promise = promise
        self._scope = scope

    def add_done_callback(self, callback: Callable[[Promise[Any]], object]) -> None:
        """See ``Promise``."""

        def done(promise: Promise[Any]) -> None:
            self._scope.leave(promise.peek()[1])
            callback(promise)

        self._promise.add_done_callback(done)
