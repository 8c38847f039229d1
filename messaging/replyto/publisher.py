"""ReplyToPublisher (RFC 5.7.2): publishes a request and promises its reply."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from messaging.errors import ArgumentError
from messaging.model import Features, MessageContext, as_context, as_message, channels, kind_like
from messaging.replyto.marks import MANY, Mark

if TYPE_CHECKING:
    from collections.abc import Mapping

    from messaging.connection import Connection
    from messaging.model import Message, MessageContextProvider, PublishOptions
    from messaging.publishing import MessagePublisher
    from messaging.replyto.requests import Request, Requests

#: contexts whose check is remembered
_PLANS: Final = 1024
#: bytes of a correlation id that is made here: nobody guesses it, or gets the same
_CORRELATION_BYTES: Final = 16


class _Plan(NamedTuple):
    """What the requests with one context have in common."""

    #: what it was made of: kept, so that their ids stay theirs
    sources: tuple[MessageContext, MessageContext | None]
    #: checked; without reply channel if each request has one of its own
    context: MessageContext
    options: PublishOptions
    #: that the request names itself
    correlation_id: str | None
    is_given: bool
    #: the first levels of the reply channels that are made, if each request has one of its own
    individual: str | None


class ReplyToPublisher:
    """Publishes requests of one instance (RFC 5.7.2). Thread safe; get it as ``Messaging.reply_to``."""

    def __init__(self, connection: Connection, publisher: MessagePublisher, requests: Requests) -> None:
        self._connection = connection
        self._adapter = connection.adapter
        self._publisher = publisher
        self._requests = requests
        self._plans: dict[tuple[int, int], _Plan] = {}

    def publish_with_reply(
        self,
        request_message: Message | MessageContextProvider,
        reply_to_context: MessageContext | MessageContextProvider | None = None,
        *,
        model: Any = None,
    ) -> Request:
        """Publish a request, and promise its first reply.

        Args:
            request_message: the request. Its channel is where it goes. Its correlation id and reply channel are used
                if they are set; otherwise they are made (features ``generateCorrelationId`` and
                ``generateReplyChannel``).
            reply_to_context: *replaces* the message's context altogether, as the second argument of
                ``MessagePublisher.publish`` does (RFC 5.5): what it leaves unset is unset, with one exception: without
                a channel, the message's is used.
            model: the promise is then not that of the reply, but of ``reply.value(model)``.

        Returns:
            A promise, which can be cancelled: :class:`~messaging.replyto.requests.Request`. It fails with
            ``ReplyError`` if the handler failed; ``UnroutableError`` if nobody takes requests there, where the
            protocol tells; ``OutcomeUnknownError`` if there was no reply before the deadline, and ``DeadlineError``
            if the request was not even sent by then; ``ConnectionLostError`` if the connection was lost after it was
            sent, and the broker keeps no session; otherwise as ``MessagePublisher.publish``. The deadline is the
            extension ``timeout`` or else the instance's setting ``timeout``.

            A reply channel that is made is subscribed to with the first request and kept; one that the request names,
            as long as requests wait for replies on it.

        Raises:
            ArgumentError: no channel, a malformed one, no correlation id or reply channel where none is made, or a
                correlation id that a request with this reply channel waits with.
            UnsupportedFeatureError: the instance does not announce ``replyTo``, or something the context asks for.
            TooManyRequestsError: ``max_pending_requests`` wait for their replies already.
            OutboxFullError, ClosedError: as for ``MessagePublisher.publish``.
        """
        source, payload = self._opened(request_message, "publish_with_reply")
        if reply_to_context is not None:
            reply_to_context = as_context(reply_to_context)  # what a provider builds now
        plan = self._plans.get((id(source), id(reply_to_context)))
        if plan is None or plan.sources[0] is not source or plan.sources[1] is not reply_to_context:
            plan = self._plan(source, reply_to_context)
        correlation_id = plan.correlation_id or _new_id()
        context = plan.context
        if plan.individual is not None:
            context = _copy(context, f"{plan.individual}/{correlation_id}", context._extensions)
        timeout = plan.options.timeout
        return self._requests.request(
            payload,
            context,
            plan.options,
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
    ) -> tuple[bytes, MessageContext, PublishOptions, str]:
        """Check a request with many replies: payload, context, what it asks for, correlation id.

        ``reply_to`` is for a request that names no reply channel. Raises as :meth:`publish_with_reply`.
        """
        source, payload = self._opened(request_message, "publish_with_reply_many")
        merged = self._merge(source, None if reply_to_context is None else as_context(reply_to_context))
        if merged._reply_to_channel is not None and self._requests.is_own(merged._reply_to_channel):
            raise ArgumentError(f"reply channel {merged._reply_to_channel!r}: many replies need one of their own")
        headers = {**merged._extensions.get(Features.EXTENSION_HEADERS, {}), **Mark(MANY).headers()}
        context = self._addressed(merged, merged._reply_to_channel or reply_to, headers)
        return payload, context, self._publisher.check(context), merged._correlation_id or _new_id()

    def refresh(self) -> None:
        """Forget what was checked: the adapter announces something else than before."""
        self._plans.clear()

    def _opened(self, request_message: Message | MessageContextProvider, call: str) -> tuple[MessageContext, bytes]:
        """Context and payload of a request, the latter checked."""
        try:
            source, payload = request_message._context, request_message._payload  # type: ignore[union-attr]
        except AttributeError:
            message = as_message(request_message, call)
            source, payload = message._context, message._payload
        return source, self._publisher.check_payload(payload)

    def _plan(self, source: MessageContext, override: MessageContext | None) -> _Plan:
        merged = self._merge(source, override)
        individual = None
        reply_to = merged._reply_to_channel
        is_given = reply_to is not None and not self._requests.is_own(reply_to)
        if reply_to is None or not is_given:
            inbox = self._requests.own_inbox()
            individual = inbox.reply_to if inbox.individual else None
            reply_to = inbox.reply_to
        if individual is not None and merged._correlation_id is not None:
            _check_level(merged._correlation_id)
        context = self._addressed(merged, reply_to, None)
        options = self._publisher.check(context)
        plan = _Plan((source, override), context, options, merged._correlation_id, is_given, individual)
        if len(self._plans) >= _PLANS:
            self._plans.clear()
        self._plans[id(source), id(override)] = plan
        return plan

    def _merge(self, source: MessageContext, override: MessageContext | None) -> MessageContext:
        """The context of a request, with what it has to have or can be given."""
        context = as_context(source)
        if override is not None:
            context = self._publisher.override(context, override)
        features, name = self._adapter.announced, self._adapter.name
        if Features.REPLY_TO not in features:
            raise self._adapter.lacks(Features.REPLY_TO, "it needs messageProperties and headers")
        if context._correlation_id is None and Features.GENERATE_CORRELATION_ID not in features:
            raise ArgumentError(
                f"the request has no correlation id, and {name!r} makes none: "
                f"use builder.correlation_id(...), or the setting generate_correlation_id"
            )
        if context._reply_to_channel is None and Features.GENERATE_REPLY_CHANNEL not in features:
            raise ArgumentError(
                f"the request has no reply channel, and {name!r} makes none: "
                f"use builder.reply_to(...), or the setting generate_reply_channel"
            )
        if self._publisher.check(context).last_will:
            raise ArgumentError("a last will is no request: nobody is left to wait for its reply")
        return context

    def _addressed(self, context: MessageContext, reply_to: str, headers: dict[str, str] | None) -> MessageContext:
        """``context`` with a reply channel, and failing at once if nobody takes requests there."""
        extensions = context._extensions
        if headers is not None:
            extensions = {**extensions, Features.EXTENSION_HEADERS: headers}
        if (
            Features.EXTENSION_MANDATORY in self._adapter.features
            and Features.EXTENSION_MANDATORY not in extensions
            and self._publisher.check(context).qos != "0"
        ):
            extensions = {**extensions, Features.EXTENSION_MANDATORY: True}
        return _copy(context, reply_to, extensions)


def _check_level(correlation_id: str) -> None:
    if "/" in correlation_id or channels.has_wildcard(correlation_id) or not correlation_id:
        raise ArgumentError(
            f"correlation id {correlation_id!r}: without properties it is a level of the reply channel, "
            f"so it must not be empty or hold '/', '+' or '#'"
        )


def _new_id() -> str:
    return secrets.token_hex(_CORRELATION_BYTES)


def _copy(context: MessageContext, reply_to: str, extensions: Mapping[str, Any]) -> MessageContext:
    """``context`` with another reply channel and other extensions."""
    return kind_like(context)(
        context._channel,
        context._channel_extension,
        context._content_type,
        context._content_encoding,
        context._correlation_id,
        reply_to,
        extensions,
    )
