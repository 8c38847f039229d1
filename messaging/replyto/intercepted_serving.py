"""Request handlers and their replies inside interceptors. Instances without interceptors use the base classes."""

from __future__ import annotations

import asyncio
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

from messaging.execution import Promise, workers
from messaging.model import Features, Incoming, Message, MessageContext, carried_headers, parts
from messaging.publishing.intercepted import extend, sent_as
from messaging.receiving import is_awaitable
from messaging.replyto import markers
from messaging.replyto.request_route import RequestRoute
from messaging.replyto.served_request import Content, ServedRequest, ServedStreamRequest
from messaging.replyto.serving import RequestHandler

if TYPE_CHECKING:
    from messaging.interception import OutboundMessage, ProcessChain, Scope
    from messaging.publishing import Publication
    from messaging.receiving import Origin, Verdict
    from messaging.replyto.intercepted import InterceptedReplies
    from messaging.replyto.markers import Marker
    from messaging.replyto.replies import Replies

_HEADERS: Final = Features.EXTENSION_HEADERS
#: markers of messages without content for a requester, which are not intercepted
_SIGNALS: Final = frozenset({markers.START, markers.END, markers.CANCEL})


class InterceptedRequestHandler(RequestHandler):
    """A request handler inside interceptors: until its replies were handed over. See :class:`RequestHandler`."""

    __slots__ = ("_chain",)

    def __init__(self, kind: str, service: Any, loop: asyncio.AbstractEventLoop | None, chain: ProcessChain) -> None:
        super().__init__(kind, service, loop)
        self._chain = chain

    def start(self, task: Any) -> Any:
        """See ``Handler.start``."""
        if task.scope is not None:  # another handler had it, and did not begin
            task.scope.leave(asyncio.CancelledError("the handler was stopped"))
        scope = task.scope = self._chain.open(self._chain.inbound(task.request, task.origin.channel, task.origin.queue))
        found = scope.run(super().start, task)
        if is_awaitable(found) and not isinstance(found, Promise):
            return scope.stepping(found)
        return found

    def send(self, task: Any, found: Any) -> None:
        """See ``Handler.send``."""
        task.is_outlived = self.outlives_call(found)
        task.scope.run(super().send, task, found)
        if not task.is_outlived:
            task.scope.leave(None)

    async def send_async(self, task: Any, found: Any) -> None:
        """See ``Handler.send_async``."""
        await task.scope.stepping(super().send_async(task, found))
        task.scope.leave(None)

    async def fail_async(self, task: Any, error: BaseException) -> None:
        """See ``Handler.fail_async``."""
        try:
            await super().fail_async(task, error)
        finally:
            task.leave(error)


class _Served(ServedRequest):
    """The parts that intercepted requests with one reply and with many have in common."""

    __slots__ = ()

    #: in which the handler runs; ``None`` before, and if no interceptor wraps it
    scope: Scope | None
    #: whether sending the replies goes on after the handler has returned
    is_outlived: bool
    _replies: InterceptedReplies

    def leave(self, error: BaseException | None) -> None:
        """Leave the scope of the handler; idempotent."""
        if self.scope is not None:
            self.scope.leave(error)

    def failed(self, error: BaseException) -> None:
        """See ``ServedRequest.failed``."""
        super().failed(error)
        self.leave(error)

    def requeue(self) -> None:
        """See ``ServedRequest.requeue``."""
        super().requeue()
        self.leave(asyncio.CancelledError("the handler was stopped"))

    def _finish(self, verdict: Verdict) -> None:
        super()._finish(verdict)
        if self.is_outlived:  # interceptors do not run on the engine loop
            workers().submit(partial(self.leave, None))

    def _send(
        self,
        message: Message | Content,
        marker: Marker | None,
        *,
        last: bool = False,
        control: str | None = None,
        on_loop: bool = False,
    ) -> Publication:
        chain = self._replies.chain
        is_signal = marker is not None and marker.kind in _SIGNALS
        if chain is None or on_loop or is_signal or chain.is_bypassed():
            return super()._send(message, marker, last=last, control=control, on_loop=on_loop)
        outbound = chain.outbound("reply", self._as_message(message), self.request)
        offered = outbound.message
        scope = self.scope
        told = chain.begin(outbound) if scope is None else scope.run_beside(chain.begin, outbound)
        try:
            if outbound.added or outbound.message is not offered:
                message = _intercepted(outbound)
            publication = super()._send(message, marker, last=last, control=control)
        except BaseException as error:
            chain.failed(told, error)
            raise
        chain.follow(publication, told, sent_as)
        return publication

    def _as_message(self, message: Message | Content) -> Message:
        """Return the message that the requester gets, as far as the handler decides it."""
        if isinstance(message, Content):
            context = MessageContext(
                self.reply_to, content_type=message.content_type, correlation_id=self.correlation_id
            )
            return Message(message.payload, context)
        own = message.context
        if not isinstance(own, Incoming):
            return message
        # a received message that is passed on: its channels and its correlation id belong to another request
        headers = own.extensions.get(_HEADERS)
        extensions = {_HEADERS: carried_headers(headers, self._replies.adapter.capabilities)} if headers else {}
        return Message(
            message.payload,
            MessageContext(
                self.reply_to,
                content_type=own.content_type,
                content_encoding=own.content_encoding,
                correlation_id=self.correlation_id,
                extensions=MappingProxyType(extensions),
            ),
        )


def _intercepted(outbound: OutboundMessage) -> Message:
    """Return the reply that interceptors have left, with the headers that they added."""
    if not outbound.added:
        return outbound.message
    payload, context = parts(outbound.message)
    return Message(payload, extend(context, outbound.added))


class InterceptedRequest(_Served):
    """A request with one reply, inside interceptors."""

    __slots__ = ("is_outlived", "scope")

    def __init__(self, replies: Replies, request: Message, origin: Origin) -> None:
        super().__init__(replies, request, origin)
        self.scope = None
        self.is_outlived = False


class InterceptedStreamRequest(_Served, ServedStreamRequest):
    """A request with many replies, inside interceptors."""

    __slots__ = ("is_outlived", "scope")

    def __init__(self, replies: Replies, request: Message, origin: Origin) -> None:
        super().__init__(replies, request, origin)
        self.scope = None
        self.is_outlived = False


class InterceptedRoute(RequestRoute):
    """A route of requests inside interceptors."""

    single = InterceptedRequest
    many = InterceptedStreamRequest
