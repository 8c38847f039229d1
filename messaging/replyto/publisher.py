"""Publishers of requests (RFC 5.7.2): one promises a reply, the other returns a stream of replies (RFC 5.7.2.1).

A request with many replies has a reply channel of its own: a slow consumer holds back its own stream like any other,
and no other request. Markers beside the replies say where they end, see :mod:`messaging.replyto.markers`.
"""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING, Any

from messaging.codecs import check_model
from messaging.connection.properties import announced
from messaging.environment.signals import on_failure
from messaging.errors import ArgumentError, StreamConsumedError
from messaging.execution import Promise, clock
from messaging.interception import ProcessChain
from messaging.model import (
    REPLY_CHANNELS,
    Features,
    Message,
    SubscriptionSpec,
    channels,
    requested,
    subscribe_options,
)
from messaging.publishing import MessagePublisher
from messaging.receiving import Consumption, MessageStream, Subscription
from messaging.replyto.markers import MANY, Marker
from messaging.replyto.reply_stream import ReplySubscription
from messaging.replyto.requests import OpenRequests, Request, RequestPlan, RequestPublication, new_correlation_id
from messaging.services import ServiceRegistry

if TYPE_CHECKING:
    from messaging.model import MessageContext, MessageContextProvider, PublishPlan


class ReplyToPublisher:
    """Publishes requests of one instance (RFC 5.7.2). Thread safe; get it as ``Messaging.reply_to``."""

    def __init__(self, publisher: MessagePublisher, requests: OpenRequests) -> None:
        if publisher.chain is not None:
            self.publish_with_reply = self._publish_intercepted  # type: ignore[method-assign]
        self._adapter = requests.connection.adapter
        self._publisher = publisher
        self._requests = requests

    def publish_with_reply(
        self,
        request_message: Message | MessageContextProvider,
        reply_to_context: MessageContext | MessageContextProvider | None = None,
        *,
        model: Any = None,
    ) -> Request[Any]:
        """Publish a request, and promise its first reply.

        Args:
            request_message: the request, with the channel that it is published to. Its correlation id and reply channel
                are used if they are set; otherwise they are generated (features ``generateCorrelationId`` and
                ``generateReplyChannel``).
            reply_to_context: *replaces* the message's context altogether, as the second argument of
                ``MessagePublisher.publish`` does (RFC 5.5): what it leaves unset is unset, with one exception: without
                a channel, the message's is used.
            model: the promise resolves to ``reply.value(model)`` instead of the reply.

        Returns:
            A promise, which can be cancelled: :class:`~messaging.replyto.requests.Request`. It fails with
            ``ReplyError`` if the handler failed; ``UnroutableError`` if no responder takes requests there, where the
            protocol tells; ``OutcomeUnknownError`` if there was no reply before the deadline, and ``DeadlineError``
            if the request was not even sent by then; ``ConnectionLostError`` if the connection was lost after it was
            sent, and the broker keeps no session; otherwise as ``MessagePublisher.publish``. The deadline is the
            extension ``timeout`` or else the instance's setting ``timeout``.

            A generated reply channel is subscribed to with the first request and kept; one that the request names is
            subscribed to as long as requests wait for replies on it.

        Raises:
            ArgumentError: no channel, a malformed one, no correlation id or reply channel where none is generated, a
                correlation id that another request with this reply channel uses, or a model that pydantic cannot
                validate.
            UnsupportedFeatureError: the instance does not announce ``replyTo``, or a feature that the context needs.
            TooManyRequestsError: ``max_pending_requests`` wait for their replies already.
            OutboxFullError, ClosedError, InterceptorError: as for ``MessagePublisher.publish``.
        """
        check_model(model)
        payload, source = self._publisher.open(request_message, reply_to_context, "publish_with_reply")
        compiled = source.plan
        known = compiled.request if compiled is not None and compiled.stamp is self._publisher.stamp else None
        return self._requests.request(payload, known or self._plan(source), model)

    #: publishes a request without the interceptors
    _publish = publish_with_reply

    def _publish_intercepted(
        self,
        request_message: Message | MessageContextProvider,
        reply_to_context: MessageContext | MessageContextProvider | None = None,
        *,
        model: Any = None,
    ) -> Request[Any]:
        """Publish a request through the interceptors."""
        publisher = self._publisher
        chain = publisher.chain
        if chain is None or chain.is_bypassed():
            return self._publish(request_message, reply_to_context, model=model)
        message = Message(*publisher.open(request_message, reply_to_context, "publish_with_reply"))
        outbound = chain.outbound("request", message)

        def publish() -> Request[Any]:
            if not outbound.added:
                return self._publish(outbound.message, model=model)
            check_model(model)
            payload, source = publisher.open(outbound.message, None, "publish_with_reply")
            plan = self._plan(source)
            plan = plan._replace(message=publisher.extended(plan.message, outbound.added))
            return self._requests.request(payload, plan, model)

        return chain.send(outbound, publish, _answered_by)

    def prepare_many(
        self,
        request_message: Message | MessageContextProvider,
        reply_to_context: MessageContext | MessageContextProvider | None,
        reply_to: str,
    ) -> tuple[bytes, MessageContext, str]:
        """Check a request with many replies.

        Args:
            request_message, reply_to_context: as for :meth:`publish_with_reply`, which also lists the errors.
            reply_to: the reply channel, unless the request names one.

        Returns:
            Payload, context and correlation id of the request.
        """
        payload, merged = self._publisher.open(request_message, reply_to_context, "publish_with_reply_many")
        self._check(merged)
        if merged.reply_to_channel is not None and self._requests.is_own(merged.reply_to_channel):
            raise ArgumentError(f"reply channel {merged.reply_to_channel!r}: many replies need one of their own")
        headers = {**merged.extensions.get(Features.EXTENSION_HEADERS, {}), **Marker(MANY).headers()}
        context = self._addressed(merged, merged.reply_to_channel or reply_to, headers)
        return payload, context, new_correlation_id() if merged.correlation_id is None else merged.correlation_id

    def _plan(self, source: MessageContext) -> RequestPlan:
        compiled = self._check(source)
        if compiled.request is not None:  # of a context like this one
            known: RequestPlan = compiled.request
            return known
        individual = None
        reply_to = source.reply_to_channel
        is_given = reply_to is not None and not self._requests.is_own(reply_to)
        if reply_to is None or not is_given:
            inbox = self._requests.own_inbox()
            individual = inbox.reply_to if inbox.individual else None
            reply_to = inbox.reply_to
        if individual is not None and source.correlation_id is not None:
            _check_level(source.correlation_id)
        message = self._publisher.compile(self._addressed(source, reply_to, None))
        plan = compiled.request = RequestPlan(message, source.correlation_id, is_given, individual)
        return plan

    def _check(self, context: MessageContext) -> PublishPlan:
        """Check the context of a request: it has, or can be given, a correlation id and a reply channel."""
        features, name = announced(self._adapter), self._adapter.name
        if Features.REPLY_TO not in features:
            raise self._adapter.capabilities.lacks(Features.REPLY_TO, "it needs messageProperties and headers")
        if context.correlation_id is None and Features.GENERATE_CORRELATION_ID not in features:
            raise ArgumentError(
                f"the request has no correlation id, and {name!r} makes none: "
                f"use builder.correlation_id(...), or the setting generate_correlation_id"
            )
        if context.reply_to_channel is None and Features.GENERATE_REPLY_CHANNEL not in features:
            raise ArgumentError(
                f"the request has no reply channel, and {name!r} makes none: "
                f"use builder.reply_to(...), or the setting generate_reply_channel"
            )
        plan = self._publisher.compile(context)
        if plan.options.last_will:
            raise ArgumentError("a last will is no request: when it is sent, its requester is gone")
        return plan

    def _addressed(self, context: MessageContext, reply_to: str, headers: dict[str, str] | None) -> MessageContext:
        """Return ``context`` with a reply channel, and mandatory where the protocol tells unroutable messages."""
        extensions = context.extensions
        if headers is not None:
            extensions = {**extensions, Features.EXTENSION_HEADERS: headers}
        if (
            Features.EXTENSION_MANDATORY in self._adapter.capabilities.features
            and Features.EXTENSION_MANDATORY not in extensions
            and self._publisher.compile(context).options.qos != "0"
        ):
            extensions = {**extensions, Features.EXTENSION_MANDATORY: True}
        return context.replace(reply_to_channel=reply_to, extensions=extensions)


def _check_level(correlation_id: str) -> None:
    if "/" in correlation_id or channels.has_wildcard(correlation_id) or not correlation_id:
        raise ArgumentError(
            f"correlation id {correlation_id!r}: without properties it is a level of the reply channel, "
            f"so it must not be empty or hold '/', '+' or '#'"
        )


def _answered_by(request: Any) -> dict[str, Any]:
    """Return the reply and the correlation id of a request, for its ``Outcome``."""
    reply, error = request.peek()
    return {"reply": None if error is not None else reply, "correlation_id": request.correlation_id}


class ReplyToManyPublisher:
    """Publishes requests with many replies (RFC 5.7.2.1). Thread safe; get it as ``Messaging.reply_to_many``."""

    def __init__(
        self,
        services: ServiceRegistry,
        publisher: MessagePublisher,
        single: ReplyToPublisher,
        requests: OpenRequests,
        interceptors: ProcessChain | None = None,
    ) -> None:
        self._services = services
        self._publisher = publisher
        self._single = single
        self._requests = requests
        self._interceptors = interceptors

    def publish_with_reply_many(
        self,
        request_message: Message | MessageContextProvider,
        reply_to_context: MessageContext | MessageContextProvider | None = None,
        *,
        model: Any = None,
    ) -> MessageStream:
        """Publish a request, and stream its replies.

        Args:
            request_message, reply_to_context: as for ``ReplyToPublisher.publish_with_reply``.
            model: ``Message.value()`` of each reply is validated against it before the reply is emitted.

        Returns:
            The replies: an observable, an iterator, and so on, for one consumer. The request is sent at once. The
            stream completes behind the last reply. It fails with ``ReplyError`` if the handler failed,
            ``OutcomeUnknownError`` if no reply came for the extension ``timeout`` (or else the setting),
            ``OutboxFullError`` if there was no room for the request, and otherwise as the promise of
            ``publish_with_reply``. If the responder does not say where its replies end, the stream completes when none
            came for that long. Closing it early tells the responder to stop, as far as the protocol can.

        Raises:
            ArgumentError, UnsupportedFeatureError, ClosedError, InterceptorError: as ``publish_with_reply``.
        """
        chain = self._publisher.chain
        if chain is None or chain.is_bypassed():
            return self._stream(request_message, reply_to_context, model)[0]
        message = Message(*self._publisher.open(request_message, reply_to_context, "publish_with_reply_many"))
        outbound = chain.outbound("request", message)
        stream: MessageStream
        subscription: ReplySubscription

        def publish() -> Promise[None]:
            nonlocal stream, subscription
            stream, subscription = self._stream(self._publisher.intercepted(outbound), None, model)
            return subscription.over

        chain.send(outbound, publish, lambda _: {"correlation_id": subscription.publication.correlation_id})
        return stream

    def _stream(
        self,
        request_message: Message | MessageContextProvider,
        reply_to_context: MessageContext | MessageContextProvider | None,
        model: Any,
    ) -> tuple[MessageStream, ReplySubscription]:
        """Publish a request; return the stream of its replies, and their subscription."""
        check_model(model)
        requests = self._requests
        payload, context, correlation_id = self._single.prepare_many(
            request_message, reply_to_context, f"{REPLY_CHANNELS}/{secrets.token_hex(16)}"
        )
        connection, adapter = requests.connection, requests.connection.adapter
        connection.refuse_closed()
        wanted = {**requested(context, adapter.capabilities)}
        wanted.pop(Features.EXTENSION_QOS, None)
        if adapter.capabilities.acknowledging_qos is not None:
            wanted[Features.EXTENSION_QOS] = adapter.capabilities.acknowledging_qos
        spec = SubscriptionSpec(
            context.reply_to_channel or "", None, subscribe_options(wanted, adapter.capabilities, adapter.settings)
        )
        plan = self._publisher.compile(context)
        patience = plan.options.timeout if plan.options.timeout is not None else adapter.settings.timeout
        publication = RequestPublication(self._publisher.outbox, payload, plan, clock.monotonic() + patience)
        publication.correlation_id = correlation_id
        consumption = Consumption(model, is_stream=False)
        subscription = ReplySubscription(
            requests, self._services, self._publisher, spec, consumption, publication, patience
        )
        unused = [subscription]

        def open_subscription() -> Subscription:
            if not unused:
                raise StreamConsumedError(
                    f"the replies of a request to {context.channel!r} have a consumer; publish it again for another one"
                )
            opened = unused.pop()
            connection.engine.call(opened.start)
            return opened

        # without effect on a generated reply channel: only this request names it
        requests.reserve(subscription.key, subscription)
        opening = on_failure(requests.release, subscription.key, subscription)
        return opening.call(MessageStream, connection, open_subscription, self._interceptors), subscription
