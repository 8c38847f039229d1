"""One request in the hands of a handler, and the ways its replies go (RFC 5.7.3).

A request is acknowledged once its reply is confirmed: a responder that dies before that gets it again, or another one
does. A reply that cannot get there is no reason to do the work again, so the request is acknowledged then, too, unless
the connection was at fault.

**Threads.** A handler has its exchange on one thread at a time, and replies from there. The end of an exchange, and
what becomes of its replies, belong to the engine's loop.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from messaging.errors import (
    ClosedError,
    ConnectionLostError,
    DeadlineError,
    InvalidChannelError,
    MessagingError,
    OutboxFullError,
    UnroutableError,
)
from messaging.execution import workers
from messaging.model import (
    AcknowledgeType,
    Features,
    Incoming,
    MessageContext,
    MessageContextBuilder,
    carried_headers,
    channels,
)
from messaging.receiving import Origin, Verdict
from messaging.replyto import marks
from messaging.replyto.marks import Mark
from messaging.text import SafeLog

if TYPE_CHECKING:
    from messaging.adapter import Adapter, ReplyRoute, SubscriptionSpec
    from messaging.connection import Connection
    from messaging.model import Message, PublishOptions
    from messaging.publishing import MessagePublisher, Publication
    from messaging.replyto.copies import Claim
    from messaging.replyto.requests import Inbox, Requests

logger = SafeLog(__name__)

#: contexts of replies that are kept
_CONTEXTS: Final = 1024
#: characters of an exception's text that travel
_REASON: Final = 1000
_TEXT: Final = "text/plain; charset=utf-8"
_NONE: Final[Mapping[str, Any]] = MappingProxyType({})
_QOS: Final = Features.EXTENSION_QOS
#: of these the request decides: replies that follow each other must not overtake each other
_NOT_OF_ITEMS: Final = frozenset({Features.EXTENSION_QOS, Features.EXTENSION_PRIORITY})
#: why a reply was not confirmed, so that its request is to be handled again
_AT_FAULT: Final = (ConnectionLostError, DeadlineError, ClosedError, OutboxFullError)


class Content(NamedTuple):
    """A reply of which only the content is known."""

    payload: bytes
    content_type: str | None


_ACCEPT: Final = Verdict.ACCEPT


class Replies:
    """Sends the replies of one instance. Thread safe, but for what says otherwise."""

    def __init__(self, connection: Connection, publisher: MessagePublisher, requests: Requests) -> None:
        self.connection = connection
        self.requests = requests
        self.adapter: Adapter = connection.adapter
        self._publisher = publisher
        self.best_qos = self.adapter.default_qos
        self._allowed = self._matcher(connection.settings.reply_channels)
        #: subscriptions to requests: no reply goes to their channels
        self._served: tuple[SubscriptionSpec, ...] = ()
        self._routes: dict[str, tuple[ReplyRoute, ...]] = {}
        self._contexts: dict[tuple[Any, ...], tuple[MessageContext, PublishOptions]] = {}
        self._options: dict[tuple[Any, ...], PublishOptions] = {}
        #: correlation id -> replies that follow each other, and may be cancelled; entered by their handlers' threads
        self._streams: dict[str, Exchange] = {}
        requests.cancelled = self._cancelled
        self.refresh()

    def refresh(self) -> None:
        """Forget what was checked: the adapter announces something else than before."""
        self.best_qos = self.adapter.acknowledging_qos or self.adapter.default_qos
        self._contexts.clear()
        self._options.clear()
        self._routes.clear()

    @staticmethod
    def _matcher(patterns: str | None) -> tuple[Callable[[str], bool], ...] | None:
        if patterns is None:
            return None
        return tuple(channels.matcher(channels.check_pattern(each.strip())) for each in patterns.split(","))

    def is_allowed(self, channel: str) -> bool:
        """Return whether replies may go to a channel that a request names."""
        if channel in self._routes:
            return True
        if self._allowed is not None:
            if not any(matches(channel) for matches in self._allowed):
                return False
        elif channel.startswith("$"):
            return False
        return not self._is_served(channel, None)

    # --- ways

    def serve(self, specs: Sequence[SubscriptionSpec]) -> None:
        """Learn what requests are taken from: no reply goes there from now on. On the loop."""
        self._served = tuple(specs)
        # not cleared: a thread that has looked at the earlier channels may enter its route only now
        self._routes = {}

    def _is_served(self, channel: str, extension: str | None) -> bool:
        reaches = self.adapter.reaches
        return any(reaches(spec, channel, extension) for spec in self._served)

    def refuse_served(self, channel: str, extension: str | None) -> None:
        """Refuse a channel of a reply that handlers of this instance take requests from.

        Raises:
            InvalidChannelError: it is one: the reply would be their next request, and so on.
        """
        if self._is_served(channel, extension):
            shown = repr(channel) if extension is None else f"{channel!r} with the extension {extension!r}"
            raise InvalidChannelError(
                f"a reply to {shown} is not sent: request handlers of {self.adapter.name!r} take requests from there; "
                f"leave the channel as the response builder has it, or name one that no handler here serves"
            )

    def routes(self, channel: str) -> tuple[ReplyRoute, ...]:
        """Return how replies get to a channel, best first.

        Raises:
            InvalidChannelError: handlers of this instance take requests from there.
        """
        routes = self._routes
        found = routes.get(channel)
        if found is None:
            self.refuse_served(channel, None)
            ways = self.adapter.reply_routes(channel)
            found = ways[:1] + tuple(way for way in ways[1:] if not self._is_served(way.channel, way.channel_extension))
            if len(routes) >= _CONTEXTS:
                routes.clear()
            routes[channel] = found
        return found

    def prefer(self, channel: str, route: ReplyRoute) -> None:
        """A reply has got there that way; begin with it the next time."""
        routes = self._routes
        known = routes.get(channel)
        if known is not None:
            routes[channel] = (route, *(each for each in known if each != route))

    def publish(
        self, payload: bytes, made: tuple[MessageContext, PublishOptions], correlation_id: str | None, *, on_loop: bool
    ) -> Publication:
        """Put a reply into the outbox; raises as ``MessagePublisher.publish_checked``."""
        return self._publisher.publish_checked(payload, *made, correlation_id, on_loop=on_loop)

    def context(
        self,
        route: ReplyRoute,
        qos: str,
        content_type: str | None,
        content_encoding: str | None = None,
        extensions: Mapping[str, Any] = _NONE,
        mark: Mark | None = None,
        control: str | None = None,
    ) -> tuple[MessageContext, PublishOptions]:
        """The context of a reply, checked; raises as ``MessagePublisher.publish``."""
        is_plain = not extensions and mark is None
        if is_plain:
            key = (route, qos, content_type, content_encoding)
            found = self._contexts.get(key)
            if found is not None:
                return found
        wanted: dict[str, Any] = {**extensions}
        wanted.setdefault(Features.EXTENSION_QOS, qos)
        if route.mandatory and wanted[Features.EXTENSION_QOS] != "0":
            wanted.setdefault(Features.EXTENSION_MANDATORY, True)
        if mark is not None:
            wanted[Features.EXTENSION_HEADERS] = {**wanted.get(Features.EXTENSION_HEADERS, {}), **mark.headers()}
        context = MessageContext(
            route.channel,
            route.channel_extension,
            content_type,
            content_encoding,
            None,
            control,
            MappingProxyType(wanted),
        )
        if not is_plain:
            return context, self._publisher.check(context)
        # where each request has a reply channel of its own, nothing but its name is to be checked
        alike = (route.channel_extension, route.mandatory, qos, content_type, content_encoding)
        options = self._options.get(alike)
        if options is None:
            options = self._options[alike] = self._publisher.check(context)
        else:
            self._publisher.check_like(context, options)
        if len(self._contexts) >= _CONTEXTS:
            self._contexts.clear()
            self._options.clear()
        made = self._contexts[key] = context, options
        return made

    # --- many replies

    def begin(self, exchange: Exchange) -> None:
        """Many replies follow. The requester is told where to cancel them, as soon as that can be heard.

        Usually that is before the first of them: what comes behind others waits until they are consumed.
        """
        correlation_id = exchange.correlation_id or ""
        if self._streams.setdefault(correlation_id, exchange) is not exchange:
            return  # two requesters with one id: the second one's cannot be told from the first one's
        if exchange.is_over:
            self._streams.pop(correlation_id, None)
            return
        inbox = self.requests.own_inbox()
        control = f"{inbox.reply_to}/{correlation_id}" if inbox.individual else inbox.reply_to
        if inbox.is_open:
            exchange.tell_start(control)
        else:
            self.connection.engine.call(self._begin_later, exchange, inbox, control)

    @staticmethod
    def _begin_later(exchange: Exchange, inbox: Inbox, control: str) -> None:
        inbox.ready.listen(lambda: exchange.tell_start(control, on_loop=True) if not inbox.ended else None)

    def ended(self, exchange: Exchange) -> None:
        """No more of them follow. On the loop."""
        if self._streams and self._streams.get(exchange.correlation_id or "") is exchange:
            del self._streams[exchange.correlation_id or ""]

    def _cancelled(self, correlation_id: str) -> None:
        exchange = self._streams.get(correlation_id)
        if exchange is not None:
            exchange.stop(None)


class Exchange:
    """A request that was taken, until it is settled."""

    __slots__ = (
        "_count",
        "_extensions",
        "_is_answered",
        "_qos",
        "_reason",
        "_replies",
        "_stopper",
        "after",
        "claim",
        "correlation_id",
        "has_begun",
        "is_ending",
        "is_over",
        "is_stopped",
        "origin",
        "reply_to",
        "request",
        "wants_many",
        "was_cancelled",
    )

    def __init__(self, replies: Replies, request: Message, origin: Origin) -> None:
        self.request = request
        self.origin = origin
        #: where other subscriptions put their copies of it; ``None`` if it has none
        self.claim: Claim | None = None
        incoming: Incoming = request._context  # type: ignore[assignment]  # it was received
        mark = marks.read(incoming)
        self.wants_many = mark is not None and mark.kind == marks.MANY
        self.correlation_id = incoming._correlation_id
        #: where the replies go; ``None`` if the request names no channel, or one that is not allowed
        self.reply_to = incoming._reply_to_channel
        #: settled; written on the loop
        self.is_over = False
        #: all replies are known, and only have to be sent
        self.is_ending = False
        #: no more replies are wanted; written on the loop
        self.is_stopped = False
        #: the task of its handler was cancelled, once
        self.was_cancelled = False
        self._replies = replies
        #: the last reply was sent
        self._is_answered = False
        self._stopper: Callable[[], object] | None = None
        #: called on the loop when it is over, if its handler was not through when it returned
        self.after: Callable[[], object] | None = None
        self._reason: str | None = None
        #: items sent
        self._count = 0
        #: whether some of many replies were sent: another handler would begin with the first one again
        self.has_begun = False
        extensions = incoming._extensions
        qos = extensions.get(_QOS)
        if not isinstance(qos, str):
            qos = "0" if incoming._state is AcknowledgeType.UNSUPPORTED else replies.adapter.default_qos
        self._qos = qos
        returned = replies.adapter.reply_extensions
        if returned and not returned.isdisjoint(extensions):
            self._extensions: Mapping[str, Any] = {key: extensions[key] for key in returned if key in extensions}
        else:
            self._extensions = _NONE
        if self.reply_to is not None and not replies.is_allowed(self.reply_to):
            logger.warning(
                "%s: a request on %r wants its reply on %r, which is not allowed: there will be none",
                replies.adapter.name, incoming._channel, self.reply_to,
            )  # fmt: skip
            self.reply_to = None

    def builder(self) -> MessageContextBuilder:
        """A builder of replies: channel and correlation id are set (RFC 5.7.3)."""
        builder = MessageContextBuilder()
        if self.reply_to is not None:
            builder.channel(self.reply_to)
        if self.correlation_id is not None:
            builder.correlation_id(self.correlation_id)
        return builder

    # --- ends

    def done(self) -> None:
        """There is nothing (more) to be sent. From any thread; nothing happens if the last reply is under way."""
        if not self._is_answered:
            self.finish(Verdict.ACCEPT)

    def finish(self, verdict: Verdict) -> None:
        """It is over, with this verdict on the request. From any thread; the first time counts."""
        self._replies.connection.engine.call(self._finish, verdict)

    def _finish(self, verdict: Verdict) -> None:
        if not self.is_over:
            self.is_over = True
            self._replies.ended(self)
            self.origin.finished(self, verdict)
            if self.after is not None:
                self.after()

    def reply(self, message: Message | Content) -> None:
        """Send the only reply; again, if that failed.

        Raises:
            MessagingError: it cannot be sent; nothing was.
        """
        if self.reply_to is None:
            self._warn()
            self.done()
        elif self.wants_many:
            if not self._count:
                self.item(message)
            self.end()
        else:
            self._send(message, None, last=True)
            self._is_answered = True

    def fault(self, error: BaseException) -> None:
        """Tell the requester what went wrong: the kind of exception and its text, nothing else.

        Raises:
            OutboxFullError: there is no room now.
        """
        if self.reply_to is None or self._is_answered:
            self.done()
            return
        try:
            self._send(*self._fault(error), last=True)
            self._is_answered = True
        except OutboxFullError:
            raise
        except ClosedError:
            logger.info("a fault on %r came too late: the instance is closed", self.reply_to)
            self.finish(Verdict.REFUSE)
        except MessagingError as failure:
            logger.warning("a fault cannot be sent to %r: %s", self.reply_to, failure)
            self.finish(Verdict.ACCEPT)

    def _fault(self, error: BaseException) -> tuple[Content, Mark]:
        mark = Mark(marks.FAULT, self._count if self.wants_many else None, type(error).__name__)
        return Content(_text(error).encode(errors="replace"), _TEXT), mark

    def failed(self, error: BaseException) -> None:
        """Log what a handler raised, and tell the requester. On a thread."""
        self.log(error)
        self._fault_or_refuse(error)

    def log(self, error: BaseException) -> None:
        """Log what a handler raised."""
        connection = self._replies.connection
        if isinstance(error, ClosedError) and (connection.endings.is_closing or connection.state == "closed"):
            logger.info("a reply on %r came too late: the instance is closed", self.reply_to)
        else:
            logger.error("the handler of %r failed", self.request._context._channel, exc_info=error)

    def give_back(self) -> None:
        """Tell the requester that nobody will come to its request, or to the end of it. On a thread."""
        reason = self._reason if self.is_stopped else "the handler was stopped before it had answered"
        if reason is None:
            self.done()
        else:
            self._fault_or_refuse(ClosedError(reason))

    def _fault_or_refuse(self, error: BaseException) -> None:
        try:
            self.fault(error)
        except OutboxFullError:
            self.finish(Verdict.REFUSE)

    def _warn(self) -> None:
        logger.warning("the request on %r named no reply channel: the reply is dropped", self.request._context._channel)

    # --- many

    def begin(self, stopper: Callable[[], object] | None = None) -> None:
        """Many replies follow, if the requester wants more than one.

        Args:
            stopper: called on a worker thread when no more are wanted; the handler's side calls :meth:`conclude` then.
        """
        self._stopper = stopper
        if self.is_stopped and stopper is not None:  # before there was anything to stop
            workers().submit(stopper)
        if self.wants_many and self.reply_to is not None and self.correlation_id is not None:
            self._replies.begin(self)

    def tell_start(self, control: str, *, on_loop: bool = False) -> None:
        """Tell the requester where to say that it wants no more."""
        if self.is_over:
            return
        try:
            publication = self._send(Content(b"", _TEXT), Mark(marks.START), control=control, on_loop=on_loop)
        except MessagingError as error:
            logger.debug("the start of replies on %r cannot be told: %s", self.reply_to, error)
        else:
            publication._looked_at = True

    def stop(self, reason: str | None) -> None:
        """Nobody wants the replies any more or, with a ``reason``, this side ends them. On the loop."""
        if not self.is_stopped and (reason is None or not self.is_ending):
            self.is_stopped = True
            self._reason = reason
            if self._stopper is not None:
                workers().submit(self._stopper)

    def conclude(self) -> None:
        """The handler has let go: what it was stopped for, or that nobody listens, is the end of it."""
        if self._reason is not None:
            self.fault(ClosedError(self._reason))
        else:
            self.done()

    def item(self, message: Message | Content) -> Publication | None:
        """Send one of many replies.

        Returns:
            The promise of its confirm; ``None`` if no more are wanted.

        Raises:
            MessagingError: it cannot be sent; nothing was.
        """
        if self.reply_to is None:
            self._warn()
            return None
        if not self.wants_many:
            self.reply(message)
            return None
        publication = self._send(message, Mark(marks.ITEM, self._count))
        self._count += 1
        self.has_begun = True
        publication._looked_at = True  # whoever follows the stream looks at enough of them
        return None if self.is_stopped else publication

    def end(self) -> None:
        """No more replies follow; again, if that failed."""
        if self.reply_to is None or self._is_answered:
            self.done()
        elif self.wants_many:
            self._send(Content(b"", _TEXT), Mark(marks.END, self._count), last=True)
            self._is_answered = True
        else:
            self.fault(LookupError("the handler ended without a reply"))

    # --- sending

    def _send(
        self,
        message: Message | Content,
        mark: Mark | None,
        *,
        last: bool = False,
        control: str | None = None,
        on_loop: bool = False,
    ) -> Publication:
        reply_to = self.reply_to or ""
        routes = self._replies.routes(reply_to)
        publication = self._send_by(routes[0], message, mark, control, on_loop=on_loop)
        if last:
            publication.listen(lambda: self._sent(publication, message, mark, routes, 0))
        return publication

    def _send_by(
        self, route: ReplyRoute, message: Message | Content, mark: Mark | None, control: str | None, *, on_loop: bool
    ) -> Publication:
        replies = self._replies
        # of many replies none may be missing, whatever became of it if the request had been
        qos = self._qos if mark is None and not self.wants_many else replies.best_qos
        if isinstance(message, Content):
            made = replies.context(route, qos, message.content_type, None, self._extensions, mark, control)
            return replies.publish(message.payload, made, self.correlation_id, on_loop=on_loop)
        own = message._context
        extensions: Mapping[str, Any] = own._extensions
        correlation_id = own._correlation_id
        if isinstance(own, Incoming):
            # a received message that is passed on: its channels and its correlation id belong to another exchange
            correlation_id = None
            headers = extensions.get(Features.EXTENSION_HEADERS)
            extensions = {Features.EXTENSION_HEADERS: carried_headers(headers, replies.adapter)} if headers else _NONE
        elif own._channel is not None and own._channel != self.reply_to:
            replies.refuse_served(own._channel, own._channel_extension)
            route = route._replace(channel=own._channel, channel_extension=own._channel_extension)
        if mark is not None and not _NOT_OF_ITEMS.isdisjoint(extensions):
            extensions = {key: value for key, value in extensions.items() if key not in _NOT_OF_ITEMS}
        if self._extensions:
            extensions = {**self._extensions, **extensions}
        made = replies.context(
            route,
            qos,
            own._content_type,
            own._content_encoding,
            extensions,
            mark,
            None if isinstance(own, Incoming) else own._reply_to_channel,
        )
        return replies.publish(message._payload, made, correlation_id or self.correlation_id, on_loop=on_loop)

    def _sent(
        self,
        publication: Publication,
        message: Message | Content,
        mark: Mark | None,
        routes: tuple[ReplyRoute, ...],
        at: int,
    ) -> None:
        """What became of the last reply."""
        engine = self._replies.connection.engine
        if not engine.is_current_thread():  # it was there before anybody listened
            engine.call(self._sent, publication, message, mark, routes, at)
            return
        publication._looked_at = True
        error = publication._error
        if error is None:
            if at:
                self._replies.prefer(self.reply_to or "", routes[at])
            self._finish(_ACCEPT)
        elif isinstance(error, UnroutableError):
            if at + 1 < len(routes):
                self._send_again(message, mark, routes, at + 1)
            else:
                logger.debug("nobody waits for the reply on %r any more", self.reply_to)
                self._finish(Verdict.ACCEPT)
        elif isinstance(error, _AT_FAULT):
            self._finish(Verdict.REFUSE)
        else:
            logger.warning("a reply on %r was not taken: %s", self.reply_to, error)
            if mark is None or mark.kind != marks.FAULT:
                self._send_again(*self._fault(error), routes, at)
            else:
                self._finish(Verdict.ACCEPT)

    def _send_again(
        self, message: Message | Content, mark: Mark | None, routes: tuple[ReplyRoute, ...], at: int
    ) -> None:
        try:
            again = self._send_by(routes[at], message, mark, None, on_loop=True)
        except MessagingError as error:
            logger.warning("a reply on %r cannot be sent: %s", self.reply_to, error)
            self._finish(Verdict.ACCEPT)
        else:
            again.listen(lambda: self._sent(again, message, mark, routes, at))


def _text(error: BaseException) -> str:
    """What an exception says; nothing of the ones that are nobody's concern, such as ``SystemExit``."""
    if not isinstance(error, Exception):
        return ""
    try:
        return str(error)[:_REASON]
    except Exception:  # noqa: BLE001  # an exception of a handler, which may be anything
        return ""
