"""Publishers of requests and replies inside interceptors. Instances without interceptors use the base classes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from messaging.execution import clock
from messaging.interception import Outcome
from messaging.model import Features, Message, as_context, parts
from messaging.model.plan import PublishPlan
from messaging.publishing import InterceptedPublisher
from messaging.replyto.many import ReplyToManyPublisher
from messaging.replyto.publisher import ReplyToPublisher
from messaging.replyto.replies import NO_EXTENSIONS, Replies

if TYPE_CHECKING:
    from messaging.connection import Connection
    from messaging.interception import OutboundMessage, ProcessChain, PublishChain
    from messaging.model import MessageContext, MessageContextProvider, ReplyRoute
    from messaging.publishing import MessagePublisher
    from messaging.receiving import MessageStream
    from messaging.replyto.inboxes import Inboxes, Request
    from messaging.replyto.markers import Marker
    from messaging.replyto.reply_stream import ReplySubscription
    from messaging.replyto.requests import Requests
    from messaging.services import ServiceRegistry

_HEADERS: Final = Features.EXTENSION_HEADERS


class InterceptedReplyToPublisher(ReplyToPublisher):
    """Publishes requests of one instance through its interceptors. See :class:`ReplyToPublisher`."""

    _publisher: InterceptedPublisher

    def __init__(
        self, connection: Connection, publisher: InterceptedPublisher, requests: Requests, chain: PublishChain
    ) -> None:
        super().__init__(connection, publisher, requests)
        self._chain = chain

    def publish_with_reply(
        self,
        request_message: Message | MessageContextProvider,
        reply_to_context: MessageContext | MessageContextProvider | None = None,
        *,
        model: Any = None,
    ) -> Request[Any]:
        """See ``ReplyToPublisher.publish_with_reply``.

        Raises:
            InterceptorError, MessagingError: an interceptor failed, or refused the request.
        """
        chain = self._chain
        if chain.is_bypassed():
            return super().publish_with_reply(request_message, reply_to_context, model=model)
        message = self._publisher.merged(request_message, reply_to_context, "publish_with_reply")
        outbound = chain.outbound("request", message)
        told = chain.begin(outbound)
        try:
            request = super().publish_with_reply(self._intercepted(outbound), model=model)
        except BaseException as error:
            chain.failed(told, error)
            raise
        chain.follow(request, told, _answered_by)
        return request

    def _intercepted(self, outbound: OutboundMessage) -> Message:
        """Return the request that interceptors have left; the plan of its context has the headers that they added."""
        if not outbound.added:
            return outbound.message
        payload, context = parts(outbound.message)
        context = as_context(context)
        compiled = self._publisher.compile(context)
        known = compiled.request or self._plan(context)
        other = context.replace()
        carrier = other.plan = PublishPlan(compiled.stamp, compiled.options, compiled.channel)
        carrier.request = known._replace(message=self._publisher.extended(known.message, outbound.added))
        return Message(payload, other)


class InterceptedReplyToManyPublisher(ReplyToManyPublisher):
    """Publishes requests with many replies through interceptors. See :class:`ReplyToManyPublisher`."""

    _publisher: InterceptedPublisher

    def __init__(
        self,
        connection: Connection,
        services: ServiceRegistry,
        publisher: InterceptedPublisher,
        single: ReplyToPublisher,
        requests: Requests,
        interceptors: ProcessChain | None,
        chain: PublishChain,
    ) -> None:
        super().__init__(connection, services, publisher, single, requests, interceptors)
        self._chain = chain

    def publish_with_reply_many(
        self,
        request_message: Message | MessageContextProvider,
        reply_to_context: MessageContext | MessageContextProvider | None = None,
        *,
        model: Any = None,
    ) -> MessageStream:
        """See ``ReplyToManyPublisher.publish_with_reply_many``.

        Raises:
            InterceptorError, MessagingError: an interceptor failed, or refused the request.
        """
        chain = self._chain
        if chain.is_bypassed():
            return super().publish_with_reply_many(request_message, reply_to_context, model=model)
        message = self._publisher.merged(request_message, reply_to_context, "publish_with_reply_many")
        outbound = chain.outbound("request", message)
        told = chain.begin(outbound)

        def ended(subscription: ReplySubscription) -> None:
            outcome = Outcome(
                subscription.error, clock.wall_ns(), correlation_id=subscription.publication.correlation_id
            )
            chain.tell(told, outcome)

        try:
            return self._stream(self._publisher.intercepted(outbound), None, model, ended)
        except BaseException as error:
            chain.failed(told, error)
            raise


class InterceptedReplies(Replies):
    """Addresses and publishes the replies of one instance, whose interceptors may add headers. See :class:`Replies`.

    Attributes:
        chain: the interceptors of outgoing messages; ``None`` if there are none.
    """

    def __init__(
        self, connection: Connection, publisher: MessagePublisher, inboxes: Inboxes, chain: PublishChain | None
    ) -> None:
        super().__init__(connection, publisher, inboxes)
        self.chain = chain

    def plan(
        self,
        route: ReplyRoute,
        qos: str,
        content_type: str | None,
        content_encoding: str | None = None,
        extensions: Mapping[str, Any] = NO_EXTENSIONS,
        marker: Marker | None = None,
        control: str | None = None,
    ) -> PublishPlan:
        """Return the plan of a reply, with headers made from the plan without them. See ``Replies.plan``."""
        headers = extensions.get(_HEADERS)
        publisher = self._publisher
        if marker is not None or not headers or not isinstance(publisher, InterceptedPublisher):
            return super().plan(route, qos, content_type, content_encoding, extensions, marker, control)
        others = {key: value for key, value in extensions.items() if key != _HEADERS}
        plain = super().plan(route, qos, content_type, content_encoding, others, None, control)
        return publisher.extended(plain, headers)


def _answered_by(request: Any) -> dict[str, Any]:
    """Return the reply and the correlation id of a request, for its ``Outcome``."""
    reply, error = request.peek()
    return {"reply": None if error is not None else reply, "correlation_id": request.correlation_id}
