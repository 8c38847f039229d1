"""ReplyToManyPublisher (RFC 5.7.2.1): one request, a stream of replies.

Each such request has a reply channel of its own: a slow consumer holds back its own stream like any other, and no other
request. Markers beside the replies say where they end, see :mod:`messaging.replyto.markers`.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from messaging.codecs import check_model
from messaging.errors import StreamConsumedError
from messaging.execution import clock
from messaging.model import REPLY_CHANNELS, Features, SubscriptionSpec, requested, subscribe_options
from messaging.receiving import Consumption, MessageStream, Subscription
from messaging.replyto.inboxes import RequestPublication
from messaging.replyto.reply_stream import OpenReplyStreams, ReplySubscription

if TYPE_CHECKING:
    from messaging.connection import Connection
    from messaging.interception import ProcessChain
    from messaging.model import Message, MessageContext, MessageContextProvider
    from messaging.publishing import MessagePublisher
    from messaging.replyto.publisher import ReplyToPublisher
    from messaging.replyto.requests import Requests
    from messaging.services import ServiceRegistry


class ReplyToManyPublisher:
    """Publishes requests with many replies (RFC 5.7.2.1). Thread safe; get it as ``Messaging.reply_to_many``."""

    def __init__(
        self,
        connection: Connection,
        services: ServiceRegistry,
        publisher: MessagePublisher,
        single: ReplyToPublisher,
        requests: Requests,
        interceptors: ProcessChain | None = None,
    ) -> None:
        self._connection = connection
        self._services = services
        self._publisher = publisher
        self._single = single
        self._requests = requests
        self._streams = OpenReplyStreams(connection, publisher)
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
            ArgumentError, UnsupportedFeatureError, ClosedError: as ``publish_with_reply``.
        """
        return self._stream(request_message, reply_to_context, model, None)

    def _stream(
        self,
        request_message: Message | MessageContextProvider,
        reply_to_context: MessageContext | MessageContextProvider | None,
        model: Any,
        ended: Callable[[ReplySubscription], object] | None,
    ) -> MessageStream:
        """Publish a request; ``ended`` is called with the subscription to its replies once that has ended."""
        check_model(model)
        requests = self._requests
        payload, context, correlation_id = self._single.prepare_many(
            request_message, reply_to_context, f"{REPLY_CHANNELS}/{secrets.token_hex(16)}"
        )
        connection, adapter = self._connection, self._connection.adapter
        requests.refuse_closed()
        wanted = {
            key: value
            for key, value in requested(context, adapter.capabilities).items()
            if key != Features.EXTENSION_QOS
        }
        if adapter.capabilities.acknowledging_qos is not None:
            wanted[Features.EXTENSION_QOS] = adapter.capabilities.acknowledging_qos
        spec = SubscriptionSpec(
            context.reply_to_channel or "", None, subscribe_options(wanted, adapter.capabilities, adapter.settings)
        )
        plan = self._publisher.compile(context)
        patience = plan.options.timeout if plan.options.timeout is not None else adapter.settings.timeout
        subscription = ReplySubscription(
            connection,
            self._services,
            self._publisher,
            spec,
            Consumption(model),
            streams=self._streams,
            correlation_id=correlation_id,
            patience=patience,
        )
        publication = RequestPublication(self._publisher.outbox, payload, plan, clock.monotonic() + patience)
        publication.correlation_id = correlation_id
        publication.requester = subscription
        subscription.publication = publication
        unused = [subscription]
        # without effect on a generated reply channel: only this request names it
        requests.reserve(spec.channel, correlation_id, subscription)

        def end() -> None:
            requests.release(spec.channel, correlation_id, subscription)
            if ended is not None:
                ended(subscription)

        subscription.on_end = end

        def open_subscription() -> Subscription:
            if not unused:
                raise StreamConsumedError(
                    f"the replies of a request to {context.channel!r} have a consumer; publish it again for another one"
                )
            opened = unused.pop()
            connection.engine.call(opened.start)
            return opened

        try:
            return MessageStream(connection, open_subscription, self._interceptors)
        except BaseException:
            requests.release(spec.channel, correlation_id, subscription)
            raise
