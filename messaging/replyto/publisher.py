"""ReplyToPublisher (RFC 5.7.2): publishes a request and promises its reply."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from messaging.codecs import check_model
from messaging.errors import ArgumentError
from messaging.model import Features, as_context, as_message, channels, parts
from messaging.properties import announced
from messaging.replyto.markers import MANY, Marker

if TYPE_CHECKING:
    from messaging.connection import Connection
    from messaging.model import Message, MessageContext, MessageContextProvider, PublishPlan
    from messaging.publishing import MessagePublisher
    from messaging.replyto.inboxes import Request
    from messaging.replyto.requests import Requests

#: bytes of a generated correlation id: unguessable and unique
_CORRELATION_BYTES: Final = 16


class _RequestPlan(NamedTuple):
    """The values that all requests with one context share; kept in the publish plan of the context."""

    #: its reply channel is replaced if each request has one of its own
    message: PublishPlan
    #: named by the request; ``None`` if one is generated
    correlation_id: str | None
    #: whether the request names its reply channel
    is_given: bool
    #: first levels of the generated reply channels, if each request has one of its own
    individual: str | None


class ReplyToPublisher:
    """Publishes requests of one instance (RFC 5.7.2). Thread safe; get it as ``Messaging.reply_to``."""

    def __init__(self, connection: Connection, publisher: MessagePublisher, requests: Requests) -> None:
        self._connection = connection
        self._adapter = connection.adapter
        self._publisher = publisher
        self._requests = requests
        self._inboxes = requests.inboxes

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
            A promise, which can be cancelled: :class:`~messaging.replyto.inboxes.Request`. It fails with
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
            OutboxFullError, ClosedError: as for ``MessagePublisher.publish``.
        """
        check_model(model)
        source, payload = self._open(request_message, "publish_with_reply")
        if reply_to_context is not None:
            source = self._publisher.override(source, reply_to_context)
        compiled = source.plan
        known = compiled.request if compiled is not None and compiled.stamp is self._publisher.stamp else None
        plan: _RequestPlan = known or self._plan(source)
        correlation_id = _new_id() if plan.correlation_id is None else plan.correlation_id
        message = plan.message
        timeout = message.options.timeout
        if plan.individual is not None:
            message = message.replace(reply_to_channel=f"{plan.individual}/{correlation_id}")
        return self._requests.request(
            payload,
            message,
            correlation_id,
            given=plan.is_given,
            timeout=timeout if timeout is not None else self._adapter.settings.timeout,
            model=model,
        )

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
        source, payload = self._open(request_message, "publish_with_reply_many")
        merged = source if reply_to_context is None else self._publisher.override(source, reply_to_context)
        self._check(merged)
        if merged.reply_to_channel is not None and self._inboxes.is_own(merged.reply_to_channel):
            raise ArgumentError(f"reply channel {merged.reply_to_channel!r}: many replies need one of their own")
        headers = {**merged.extensions.get(Features.EXTENSION_HEADERS, {}), **Marker(MANY).headers()}
        context = self._addressed(merged, merged.reply_to_channel or reply_to, headers)
        return payload, context, _new_id() if merged.correlation_id is None else merged.correlation_id

    def _open(self, request_message: Message | MessageContextProvider, call: str) -> tuple[MessageContext, bytes]:
        """Return the context of a request, and its payload, checked."""
        try:
            payload, source = parts(request_message)  # type: ignore[arg-type]  # a provider builds its message
        except AttributeError:
            payload, source = parts(as_message(request_message, call))
        return as_context(source), self._publisher.check_payload(payload)

    def _plan(self, source: MessageContext) -> _RequestPlan:
        compiled = self._check(source)
        if compiled.request is not None:  # of a context like this one
            known: _RequestPlan = compiled.request
            return known
        individual = None
        reply_to = source.reply_to_channel
        is_given = reply_to is not None and not self._inboxes.is_own(reply_to)
        if reply_to is None or not is_given:
            inbox = self._inboxes.own_inbox()
            individual = inbox.reply_to if inbox.individual else None
            reply_to = inbox.reply_to
        if individual is not None and source.correlation_id is not None:
            _check_level(source.correlation_id)
        message = self._publisher.compile(self._addressed(source, reply_to, None))
        plan = compiled.request = _RequestPlan(message, source.correlation_id, is_given, individual)
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


def _new_id() -> str:
    return secrets.token_hex(_CORRELATION_BYTES)
