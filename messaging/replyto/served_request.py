"""A request in the hands of a handler, and how its replies are sent (RFC 5.7.3).

A request is acknowledged once its reply is confirmed. If the responder dies before that, the request is redelivered, to
it or to another responder. A reply that cannot be delivered is no reason to handle the request again: the request is
acknowledged then, too, unless the connection was at fault.

**Threads.** A handler has its request on one thread at a time, and replies from there. The end of a request, and the
outcome of its replies, belong to the engine's loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from messaging.errors import (
    ClosedError,
    ConnectionLostError,
    DeadlineError,
    MessagingError,
    OutboxFullError,
    ReplyError,
    UnroutableError,
)
from messaging.errors.text import SafeLog
from messaging.execution import Promise, workers
from messaging.interception import OutboundMessage
from messaging.model import (
    NO_EXTENSIONS,
    AcknowledgeType,
    Features,
    Incoming,
    Message,
    MessageContext,
    ReplyRoute,
    carried_headers,
    context_of,
    parts,
)
from messaging.publishing import Publication
from messaging.publishing.publisher import extend, sent_as
from messaging.receiving import HandlerConsumer, HandlingVerdict, Work
from messaging.replyto import markers
from messaging.replyto.markers import Marker
from messaging.replyto.replies import DeferredReply, Replies

logger = SafeLog(__name__)

#: log lines with several causes
_TOO_LATE: Final = "%s: a reply on %r came too late: the instance is closed"
_NOT_TAKEN: Final = "%s: a reply on %r was not taken: %s"
#: characters of an exception's text that are sent to the requester
_REASON: Final = 1000
_TEXT: Final = "text/plain; charset=utf-8"
_QOS: Final = Features.EXTENSION_QOS
_HEADERS: Final = Features.EXTENSION_HEADERS
#: markers of messages without content for a requester, which are not intercepted
_SIGNALS: Final = frozenset({markers.START, markers.END, markers.CANCEL})
#: extensions that the request decides: consecutive replies must not overtake each other
_NOT_OF_ITEMS: Final = frozenset({Features.EXTENSION_QOS, Features.EXTENSION_PRIORITY})
#: failures to confirm a reply after which its request is handled again
_AT_FAULT: Final = (ConnectionLostError, DeadlineError, ClosedError, OutboxFullError)
_ACCEPT: Final = HandlingVerdict.ACCEPT


class ReplyContent(NamedTuple):
    """A reply that consists of content alone."""

    payload: bytes
    content_type: str | None


def checked(found: Any) -> Message | ReplyContent:
    """Return the result of a handler, if it is a reply.

    Raises:
        TypeError: it is no reply.
    """
    if isinstance(found, (Message, ReplyContent)):
        return found
    raise TypeError(f"a handler must return a Message, or a promise of one; not {type(found).__name__}")


class ServedRequest(Work):
    """A request with one reply, from its arrival until it is settled.

    Args:
        replies: sends the replies of its instance.
        request: the message.
        origin: the route that it arrived on.

    Attributes:
        replies: see above.
        correlation_id: of the request.
        reply_to: the channel of the replies; ``None`` if the request names none, or one that is not allowed.
        shared_verdict: for the copies of the request on other subscriptions; ``None`` if there are none.
        expected: exceptions of the handler that are logged without a traceback.
        is_ending: whether all replies are known, and only have to be sent.
        wants_many: whether the requester takes more than one reply.
    """

    shared_verdict: Promise[HandlingVerdict] | None = None
    expected: tuple[type[Exception], ...] = ()
    is_ending = wants_many = False
    #: of many replies, how many items were sent
    _count: int | None = None
    #: whether the last reply was sent
    _is_answered = False
    _stopper: Callable[[], object] | None = None
    #: why this side has stopped the handler
    _reason: str | None = None
    #: why one of many replies was not taken
    _failure: MessagingError | None = None

    def __init__(self, replies: Replies, request: Message, origin: HandlerConsumer[Any]) -> None:
        self.request = request
        self.origin = origin
        incoming: Incoming = context_of(request)
        self.correlation_id = incoming.correlation_id
        self.reply_to = incoming.reply_to_channel
        self.replies = replies
        extensions = incoming.extensions
        qos = extensions.get(_QOS)
        if not isinstance(qos, str):
            qos = "0" if incoming.state is AcknowledgeType.UNSUPPORTED else replies.adapter.capabilities.default_qos
        self._qos = qos
        returned = replies.adapter.capabilities.reply_extensions
        if returned and not returned.isdisjoint(extensions):
            self._extensions: Mapping[str, Any] = {key: extensions[key] for key in returned if key in extensions}
        else:
            self._extensions = NO_EXTENSIONS
        if self.reply_to is not None and not replies.is_allowed(self.reply_to):
            logger.warning(
                "%s: a request on %r wants its reply on %r, which is not allowed: no reply is sent",
                self.replies.adapter.name, incoming.channel, self.reply_to,
            )  # fmt: skip
            self.reply_to = None

    # --- ends

    def done(self) -> None:
        """Acknowledge the request, unless its last reply is being sent. From any thread."""
        if not self._is_answered:
            self.finish(_ACCEPT)

    def finish(self, verdict: HandlingVerdict) -> None:
        """Settle the request. From any thread; the first verdict counts."""
        self.replies.connection.engine.call(self._finish, verdict)

    def _finish(self, verdict: HandlingVerdict) -> None:
        if not self.is_over:
            self.is_over = True
            self.origin.finished(self, verdict)

    def fault(self, error: BaseException) -> None:
        """Report an exception to the requester: its kind and its text, nothing else.

        Raises:
            OutboxFullError: the outbox has no room now.
        """
        if self.reply_to is None or self._is_answered:
            self.done()
            return
        try:
            self._send(*_fault_of(error, self._count), last=True)
            self._is_answered = True
        except OutboxFullError:
            raise
        except ClosedError:
            logger.info(
                "%s: a fault on %r is not reported: the instance is closed", self.replies.adapter.name, self.reply_to
            )
            self.finish(HandlingVerdict.REFUSE)
        except MessagingError as failure:
            logger.warning(
                "%s: a fault cannot be reported to %r: %s", self.replies.adapter.name, self.reply_to, failure
            )
            self.finish(_ACCEPT)

    def _report(self, error: BaseException) -> None:
        """Report an exception to the requester; have the request handled again if there is no room for the report."""
        try:
            self.fault(error)
        except OutboxFullError:
            self.finish(HandlingVerdict.REFUSE)

    def failed(self, error: BaseException) -> None:
        """Log the exception of the handler, and report it to the requester. On a thread."""
        self.log(error)
        self._report(error)
        self.leave_scope(error)

    def log(self, error: BaseException) -> None:
        """Log the exception of the handler."""
        if isinstance(error, ClosedError) and self.replies.connection.is_closing:
            logger.info(_TOO_LATE, self.replies.adapter.name, self.reply_to)
        elif isinstance(error, self.expected):
            logger.info(
                "%s: the handler of %r answered with an expected error: %s: %s",
                self.replies.adapter.name, self.request.context.channel, type(error).__name__, _text(error),
            )  # fmt: skip
        elif isinstance(error, ReplyError):  # the log of the other responder has the traceback
            logger.warning("the handler of %r failed: it passed on %s", self.request.context.channel, error)
        else:
            logger.error("the handler of %r failed", self.request.context.channel, exc_info=error)

    def requeue(self) -> None:
        """Report to the requester that its request is not handled, or not to its end. On a thread."""
        reason = self._reason if self.is_stopped else "the handler was stopped before it had answered"
        if reason is None:
            self.done()
        else:
            self._report(ClosedError(reason))
        self.leave_scope(asyncio.CancelledError("the handler was stopped"))

    # --- replies

    def reply(self, message: Message | ReplyContent) -> None:
        """Send the only reply; call it again if that failed.

        Raises:
            MessagingError: the reply cannot be sent, and was not.
        """
        if self.reply_to is None:
            _warn_unaddressed(self.request)
            self.done()
        else:
            self._send(message, None, last=True)
            self._is_answered = True

    def defer(self, found: DeferredReply, checked: Callable[[Any], Message | ReplyContent]) -> None:
        """Acknowledge the request now, and send its reply when there is one. From any thread."""

        deferred = self.replies.deferred

        def send(_: Promise[Any]) -> None:
            if not deferred.take(self.abandon):
                return
            try:
                self.reply(checked(found.reply()))
            except BaseException as error:  # noqa: BLE001  # whatever a handler raises, its requester is told
                self.failed(error)
            finally:
                deferred.sent(self.abandon)

        deferred.add(self.abandon)
        self.finish(_ACCEPT)
        found.promise.add_done_callback(send)

    def begin(self, stopper: Callable[[], object] | None = None) -> None:
        """Prepare for many replies.

        Args:
            stopper: called on a worker thread when no more replies are wanted. The sender calls :meth:`conclude` then.
        """
        self._stopper = stopper
        if self.is_stopped and stopper is not None:  # stopped before there was a stopper
            workers().submit(stopper)

    def item(self, message: Message | ReplyContent) -> Publication | None:
        """Send one of many replies.

        Returns:
            The promise of its confirm; ``None`` if no more replies are wanted.

        Raises:
            MessagingError: the reply cannot be sent, and was not.
        """
        self.reply(message)
        return None

    def end(self) -> None:
        """End the replies; call it again if that failed."""
        if self.reply_to is None or self._is_answered:
            self.done()
        else:
            self.fault(LookupError("the handler ended without a reply"))

    def stop(self, reason: str | None) -> None:
        """Stop the handler: cancelled by the requester or, with a ``reason``, by this side. On the loop."""
        if not self.is_stopped and (reason is None or not self.is_ending):
            self.is_stopped = True
            self._reason = reason
            if self._stopper is not None:
                workers().submit(self._stopper)

    def abandon(self) -> None:
        """Report that the reply was not ready when the instance closed. On a thread."""
        self._report(ClosedError("the responder was closed before the reply was ready"))

    def not_taken(self, error: MessagingError) -> None:
        """Log that one of many replies failed with ``error``; the sender calls :meth:`conclude`, which reports it."""
        self._failure = error
        if self.replies.connection.is_closing:
            logger.info(_TOO_LATE, self.replies.adapter.name, self.reply_to)
        else:
            logger.warning(_NOT_TAKEN, self.replies.adapter.name, self.reply_to, error)

    def conclude(self) -> None:
        """Finish the request after its handler was stopped, or a reply was not taken; call it again if that failed.

        Raises:
            OutboxFullError: the outbox has no room now for the report of the reason.
        """
        if self._failure is not None:
            self.fault(self._failure)
        elif self._reason is not None:
            self.fault(ClosedError(self._reason))
        else:
            self.done()

    # --- sending

    def _send(
        self,
        message: Message | ReplyContent,
        marker: Marker | None,
        *,
        last: bool = False,
        control: str | None = None,
        on_loop: bool = False,
        is_intercepted: bool = False,
    ) -> Publication:
        chain = None if is_intercepted else self.replies.publisher.chain
        if chain is None or on_loop or (marker is not None and marker.kind in _SIGNALS) or chain.is_bypassed():
            routes = self.replies.routes(self.reply_to or "")
            publication = self._send_by(routes[0], message, marker, control, on_loop=on_loop)
            if last:
                publication.listen(lambda: self._sent(publication, message, marker, routes, 0))
            return publication
        outbound = chain.outbound("reply", _as_message(self, message), self.request)
        offered = outbound.message

        def publish() -> Publication:
            changed = message if outbound.message is offered and not outbound.added else _intercepted(outbound)
            return self._send(changed, marker, last=last, control=control, is_intercepted=True)

        if self.scope is None:
            return chain.send(outbound, publish, sent_as)
        return self.scope.run_beside(lambda: chain.send(outbound, publish, sent_as))

    def _send_by(
        self,
        route: ReplyRoute,
        message: Message | ReplyContent,
        marker: Marker | None,
        control: str | None,
        *,
        on_loop: bool,
    ) -> Publication:
        replies = self.replies
        # each of many replies is confirmed, whatever the quality of service of the request: none may be missing
        qos = self._qos if marker is None and not self.wants_many else replies.best_qos
        if isinstance(message, ReplyContent):
            plan = replies.plan(route, qos, message.content_type, None, self._extensions, marker, control)
            return replies.publisher.publish_checked(message.payload, plan, self.correlation_id, on_loop=on_loop)
        own = message.context
        extensions: Mapping[str, Any] = own.extensions
        correlation_id = own.correlation_id
        if isinstance(own, Incoming):
            # a received message that is passed on: its channels and its correlation id belong to another request
            correlation_id = None
            extensions = _passed_on(own, replies)
        elif own.channel is not None and own.channel != self.reply_to:
            replies.refuse_served(own.channel, own.channel_extension)
            route = route._replace(channel=own.channel, channel_extension=own.channel_extension)
        if marker is not None and not _NOT_OF_ITEMS.isdisjoint(extensions):
            extensions = {key: value for key, value in extensions.items() if key not in _NOT_OF_ITEMS}
        if self._extensions:
            extensions = {**self._extensions, **extensions}
        plan = replies.plan(
            route,
            qos,
            own.content_type,
            own.content_encoding,
            extensions,
            marker,
            None if isinstance(own, Incoming) else own.reply_to_channel,
        )
        if correlation_id is None:
            correlation_id = self.correlation_id
        return replies.publisher.publish_checked(message.payload, plan, correlation_id, on_loop=on_loop)

    def _sent(
        self,
        publication: Publication,
        message: Message | ReplyContent,
        marker: Marker | None,
        routes: tuple[ReplyRoute, ...],
        at: int,
    ) -> None:
        """Settle the request by the outcome of its last reply, or send the reply by the next route."""
        engine = self.replies.connection.engine
        if not engine.is_current_thread():  # the outcome was there before the listener
            engine.call(self._sent, publication, message, marker, routes, at)
            return
        error = publication.exception()
        if error is None:
            if at:
                self.replies.prefer(self.reply_to or "", routes[at])
            self._finish(_ACCEPT)
            return
        if isinstance(error, _AT_FAULT):
            self._finish(HandlingVerdict.REFUSE)
            return
        if isinstance(error, UnroutableError):
            at += 1
            if at == len(routes):
                logger.debug(
                    "%s: a reply on %r is dropped: no requester is subscribed", self.replies.adapter.name, self.reply_to
                )
                self._finish(_ACCEPT)
                return
        else:
            logger.warning(_NOT_TAKEN, self.replies.adapter.name, self.reply_to, error)
            if marker is not None and marker.kind == markers.FAULT:
                self._finish(_ACCEPT)
                return
            message, marker = _fault_of(error, self._count)
        try:
            again = self._send_by(routes[at], message, marker, None, on_loop=True)
        except MessagingError as failure:
            logger.warning("%s: a reply on %r cannot be sent: %s", self.replies.adapter.name, self.reply_to, failure)
            self._finish(_ACCEPT)
        else:
            again.listen(lambda: self._sent(again, message, marker, routes, at))


class ServedStreamRequest(ServedRequest):
    """A request whose requester takes many replies: each has a number, and a marker behind the last says that it is."""

    wants_many = True
    _count: int = 0

    def _finish(self, verdict: HandlingVerdict) -> None:
        if self.replies.streams.get(self.correlation_id or "") == self.stop:
            del self.replies.streams[self.correlation_id or ""]
        super()._finish(verdict)

    def reply(self, message: Message | ReplyContent) -> None:
        """See ``ServedRequest.reply``: an item, and the end."""
        if self.reply_to is None:
            super().reply(message)
            return
        if not self._count:
            self.item(message)
        self.end()

    def begin(self, stopper: Callable[[], object] | None = None) -> None:
        """See ``ServedRequest.begin``: the requester is told where to cancel the replies, once that can be received.

        Usually that is before the first reply: a later marker waits behind replies that are not consumed yet.
        """
        super().begin(stopper)
        streams, correlation_id = self.replies.streams, self.correlation_id
        if self.reply_to is None or correlation_id is None:
            return
        if streams.setdefault(correlation_id, self.stop) != self.stop:
            return  # two requesters use one id: their cancellations could not be told apart
        if self.is_over:
            streams.pop(correlation_id, None)
            return
        inbox = self.replies.requests.own_inbox()
        control = f"{inbox.reply_to}/{correlation_id}" if inbox.individual else inbox.reply_to

        def tell_later() -> None:
            if not inbox.ended:
                self._tell_start(control, on_loop=True)

        if inbox.is_open:
            self._tell_start(control)
        else:
            self.replies.connection.engine.call(inbox.ready.listen, tell_later)

    def _tell_start(self, control: str, *, on_loop: bool = False) -> None:
        """Tell the requester the channel that takes its cancellation."""
        if self.is_over:
            return
        try:
            start = Marker(markers.START)
            publication = self._send(ReplyContent(b"", _TEXT), start, control=control, on_loop=on_loop)
        except MessagingError as error:
            logger.debug(
                "%s: the start of replies on %r cannot be told: %s", self.replies.adapter.name, self.reply_to, error
            )
        else:
            publication.was_retrieved = True

    def item(self, message: Message | ReplyContent) -> Publication | None:
        """See ``ServedRequest.item``."""
        if self.reply_to is None:
            _warn_unaddressed(self.request)
            return None
        publication = self._send(message, Marker(markers.ITEM, self._count))
        self._count += 1
        self.has_begun = True
        publication.was_retrieved = True  # the sender of the stream retrieves enough of the outcomes
        return None if self.is_stopped else publication

    def end(self) -> None:
        """See ``ServedRequest.end``."""
        if self.reply_to is None or self._is_answered:
            self.done()
            return
        self._send(ReplyContent(b"", _TEXT), Marker(markers.END, self._count), last=True)
        self._is_answered = True


def _as_message(served: ServedRequest, message: Message | ReplyContent) -> Message:
    """Return the message that the requester gets, as far as the handler decides it."""
    extensions = NO_EXTENSIONS
    if isinstance(message, ReplyContent):
        content_type, content_encoding = message.content_type, None
    elif isinstance(message.context, Incoming):
        content_type, content_encoding = message.context.content_type, message.context.content_encoding
        extensions = _passed_on(message.context, served.replies)
    else:
        return message
    context = MessageContext(
        served.reply_to, None, content_type, content_encoding, served.correlation_id, None, MappingProxyType(extensions)
    )
    return Message(message.payload, context)


def _passed_on(own: Incoming, replies: Replies) -> Mapping[str, Any]:
    """Return the extensions of a received message that is passed on: its headers."""
    headers = own.extensions.get(_HEADERS)
    return {_HEADERS: carried_headers(headers, replies.adapter.capabilities)} if headers else NO_EXTENSIONS


def _intercepted(outbound: OutboundMessage) -> Message:
    """Return the reply that interceptors have left, with the headers that they added."""
    if not outbound.added:
        return outbound.message
    payload, context = parts(outbound.message)
    return Message(payload, extend(context, outbound.added))


def _warn_unaddressed(request: Message) -> None:
    logger.warning("the request on %r named no reply channel: the reply is dropped", request.context.channel)


def _fault_of(error: BaseException, count: int | None) -> tuple[ReplyContent, Marker]:
    """Return the reply that reports ``error``, after ``count`` items of a stream."""
    if isinstance(error, ReplyError):  # of another responder, whose failure the handler passes on
        kind, text = error.kind, error.reason[:_REASON]
    else:
        kind, text = type(error).__name__, _text(error)
    return ReplyContent(text.encode(errors="replace"), _TEXT), Marker(markers.FAULT, count, kind)


def _text(error: BaseException) -> str:
    """Return the text of an exception; nothing of one that is not for the requester, such as ``SystemExit``."""
    if not isinstance(error, Exception):
        return ""
    try:
        return str(error)[:_REASON]
    except Exception:  # noqa: BLE001  # an exception of a handler, which may be anything
        return ""
