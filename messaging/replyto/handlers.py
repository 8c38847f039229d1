"""The service interfaces of request handlers, and the properties they are registered with (RFC 5.7.4, 5.7.5).

::

    services.register(
        ReplyToSingleSubscriptionHandler,
        lambda request, builder: builder.content(request.payload.upper()).build_message(),
        {TARGET: "(osgi.messaging.name=orders)", CHANNEL: "orders/new"},
    )

A handler is an object with the method of its interface, or a function in its place. A plain function runs on a worker
thread, a coroutine function on the event loop that it was registered on.
"""

from __future__ import annotations

from typing import Any, Final, Protocol

from messaging.model import Message, MessageContextBuilder

#: LDAP filter that the properties of a whiteboard must match; without it, every whiteboard does
TARGET: Final = "osgi.messaging.replyToSubscription.target"
#: channel or channels of the requests; patterns, where the instance announces ``wildcards``
CHANNEL: Final = "osgi.messaging.replyToSubscription.channel"
#: the reply channel that requests have to name; without it, every request is taken
REPLY_CHANNEL: Final = "osgi.messaging.replyToSubscription.replyChannel"
#: maximum number of requests the handler works on at a time; not in the RFC
CONCURRENCY: Final = "osgi.messaging.replyToSubscription.concurrency"
#: extensions of the subscription to each channel, such as ``{"queue": "workers"}``; not in the RFC
EXTENSIONS: Final = "osgi.messaging.replyToSubscription.extensions"
#: exceptions that are answers rather than failures: a class, or a tuple of classes. The requester gets them as any
#: other exception; the log has a line without a traceback, at level INFO; not in the RFC
EXPECTED: Final = "osgi.messaging.replyToSubscription.expected"


class ReplyToSubscriptionHandler(Protocol):
    """Handles requests without answering them (RFC 5.7.4).

    Its exception goes to the requester, if the request names a reply channel. A request that names a reply channel goes
    to a handler that answers instead, if it means one.
    """

    def handle_response(self, request_message: Message) -> object:
        """Handle a request."""
        ...


class ReplyToSingleSubscriptionHandler(Protocol):
    """Answers a request with one message (RFC 5.7.4)."""

    def handle_response(self, request_message: Message, response_builder: MessageContextBuilder) -> Any:
        """Return the reply.

        Args:
            request_message: the request.
            response_builder: of the reply; channel and correlation id are set.

        Returns:
            The reply (a ``Message``), or a promise of it. Never ``None``.
        """
        ...


class ReplyToManySubscriptionHandler(Protocol):
    """Answers a request with any number of messages (RFC 5.7.5)."""

    def handle_responses(self, request_message: Message, response_builder: MessageContextBuilder) -> Any:
        """Return the replies.

        Args:
            request_message: the request.
            response_builder: of each reply; channel and correlation id are set.

        Returns:
            The replies: an ``Observable`` of messages, an iterable (a generator, say), or an async iterable. Once
            the requester wants no more, an observable is disposed of, a generator is closed after its next item, and
            an async generator where it waits.
        """
        ...
