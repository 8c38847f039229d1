"""Request handlers as runners call them: the function of a handler, and how its replies are sent (RFC 5.7.4)."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Final

from reactivex import Observable

from messaging.errors import ArgumentError
from messaging.functions import is_coroutine
from messaging.model import Message, MessageContextBuilder
from messaging.receiving import Handler
from messaging.replyto import streaming
from messaging.replyto.deferred import DeferredReply
from messaging.replyto.served_request import Content

if TYPE_CHECKING:
    from messaging.replyto.served_request import ServedRequest

PLAIN: Final = "plain"
SINGLE: Final = "single"
MANY: Final = "many"

#: requests that one handler works on at a time, by whether it is a coroutine function, unless its properties set them
CONCURRENCY: Final = {False: 8, True: 64}


class RequestHandler(Handler):
    """A handler service of one of the three interfaces.

    Args:
        kind: the interface: ``PLAIN``, ``SINGLE`` or ``MANY``.
        service: an object with the method of its interface, or a function.
        loop: the event loop it was registered on, if any.

    Raises:
        ArgumentError: ``service`` is neither.
    """

    __slots__ = ("call", "expected", "kind", "takes_builder")

    replies = True

    def __init__(self, kind: str, service: Any, loop: asyncio.AbstractEventLoop | None) -> None:
        method = getattr(service, "handle_responses" if kind == MANY else "handle_response", None)
        call = method if callable(method) else service
        if not callable(call):
            raise ArgumentError(f"{type(service).__name__} is neither a function nor has the method of its interface")
        super().__init__(loop, is_async=is_coroutine(call) or bool(getattr(service, "is_async", False)))
        self.call = call
        self.kind = kind
        #: exceptions that are logged without a traceback, by the terms of the handler
        self.expected: tuple[type[Exception], ...] = ()
        self.takes_builder = kind != PLAIN and not getattr(service, "makes_content", False)

    def start(self, task: ServedRequest) -> Any:
        """See ``Handler.start``."""
        task.expected = self.expected
        if self.takes_builder:
            return self.call(task.request, _builder(task))
        return self.call(task.request)

    def needs_loop(self, found: Any) -> bool:
        """See ``Handler.needs_loop``."""
        if self.kind == SINGLE and isinstance(found, (Message, Content)):  # nearly always
            return False
        return super().needs_loop(found) or (self.kind == MANY and hasattr(found, "__aiter__"))

    def outlives_call(self, found: Any) -> bool:
        """See ``Handler.outlives_call``."""
        return self.kind == MANY and isinstance(found, Observable)

    def send(self, task: ServedRequest, found: Any) -> None:
        """Send the replies of a function. See ``Handler.send``."""
        if self.kind == PLAIN:
            task.done()
        elif self.kind == MANY:
            streaming.send_all(task, found)
        elif isinstance(found, DeferredReply):
            task.defer(found, streaming.checked)
        else:
            task.reply(streaming.checked(found))

    async def send_async(self, task: ServedRequest, found: Any) -> None:
        """Send the replies of a coroutine function. See ``Handler.send_async``."""
        if self.kind == PLAIN:
            task.done()
        elif self.kind == MANY:
            await streaming.send_all_async(task, found)
        elif isinstance(found, DeferredReply):
            task.defer(found, streaming.checked)
        else:
            reply = streaming.checked(found)
            await streaming.with_room(lambda: task.reply(reply))

    async def fail_async(self, task: ServedRequest, error: BaseException) -> None:
        """Report the exception of a handler to the requester. See ``Handler.fail_async``."""
        task.log(error)
        await streaming.with_room(lambda: task.fault(error))


def _builder(task: ServedRequest) -> MessageContextBuilder:
    """Return a builder of replies: channel and correlation id are set (RFC 5.7.3)."""
    builder = MessageContextBuilder()
    if task.reply_to is not None:
        builder.channel(task.reply_to)
    if task.correlation_id is not None:
        builder.correlation_id(task.correlation_id)
    return builder
