"""The publisher of an instance with interceptors. Instances without have the plain one, which knows nothing of them."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

from messaging.model import Features, Message, MessageContext, PublishPlan, as_context, as_message, parts, with_headers
from messaging.model.context import ForwardedContext
from messaging.publishing.publication import Publication
from messaging.publishing.publisher import MessagePublisher

if TYPE_CHECKING:
    from messaging.connection import Connection
    from messaging.execution import Promise
    from messaging.interception import OutboundMessage, PublishChain
    from messaging.model import MessageContextProvider
    from messaging.publishing.outbox import Outbox

_HEADERS: Final = Features.EXTENSION_HEADERS


class InterceptedPublisher(MessagePublisher):
    """Publishes messages of one instance through its interceptors. See :class:`MessagePublisher`."""

    is_intercepted = True

    def __init__(self, connection: Connection, outbox: Outbox, chain: PublishChain) -> None:
        super().__init__(connection, outbox)
        self._chain = chain

    def publish(
        self,
        message: Message | MessageContextProvider,
        channel_or_context: str | MessageContext | MessageContextProvider | None = None,
    ) -> Promise[None]:
        """See ``MessagePublisher.publish``.

        Raises:
            InterceptorError, MessagingError: an interceptor failed, or refused the message.
        """
        chain = self._chain
        if chain.is_bypassed():
            return super().publish(message, channel_or_context)
        outbound = chain.outbound("publish", self.merged(message, channel_or_context, "publish"))
        told = chain.begin(outbound)
        try:
            promise = super().publish(self.intercepted(outbound))
        except BaseException as error:
            chain.failed(told, error)
            raise
        chain.follow(promise, told, sent_as)
        return promise

    def merged(
        self,
        message: Message | MessageContextProvider,
        override: str | MessageContext | MessageContextProvider | None,
        call: str,
    ) -> Message:
        """Return the message that a call means, with its payload checked and the context that counts."""
        try:
            payload, context = parts(message)  # type: ignore[arg-type]  # a provider builds its message
        except AttributeError:
            payload, context = parts(as_message(message, call))
        context = as_context(context)
        if override is not None:
            context = self.override(context, override)
        return Message(self.check_payload(payload), context)

    def intercepted(self, outbound: OutboundMessage) -> Message:
        """Return the message that interceptors have left, with the headers that they added.

        Raises:
            MessagingError: its context cannot be published.
        """
        if not outbound.added:
            return outbound.message
        payload, context = parts(outbound.message)
        context = as_context(context)
        extended = extend(context, outbound.added)
        extended.plan = self.extended(self.compile(context), outbound.added)
        return Message(payload, extended)

    def extended(self, plan: PublishPlan, headers: Mapping[str, str]) -> PublishPlan:
        """Return a copy of ``plan`` with further headers; only these are checked.

        Raises:
            InvalidHeaderError: a header cannot be sent.
        """
        other = PublishPlan(
            plan.stamp, with_headers(plan.options, headers), plan.channel, plan.channel_extension, plan.content_type,
            plan.content_encoding, plan.correlation_id, plan.reply_to_channel,
        )  # fmt: skip
        self._adapter.check_publish(other)
        return other


def extend(context: MessageContext, headers: Mapping[str, str]) -> MessageContext:
    """Return a copy of ``context`` with further headers."""
    extensions = context.extensions
    own = extensions.get(_HEADERS)
    if not isinstance(own, Mapping):
        own = {}
    return (ForwardedContext if context.is_received else MessageContext)(
        context.channel,
        context.channel_extension,
        context.content_type,
        context.content_encoding,
        context.correlation_id,
        context.reply_to_channel,
        MappingProxyType({**extensions, _HEADERS: MappingProxyType({**own, **headers})}),
    )


def sent_as(promise: Promise[Any]) -> dict[str, Any]:
    """Return the ids of a published message, for its ``Outcome``."""
    if not isinstance(promise, Publication):
        return {}
    options = promise.plan.options
    has_id = options.message_id is not None or options.qos != "0"  # otherwise it is not sent
    return {"message_id": promise.message_id if has_id else None, "correlation_id": promise.correlation_id}
