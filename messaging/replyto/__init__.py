"""Requests and replies (RFC 5.7): the interfaces of request handlers, and what they are registered with."""

from messaging.replyto.handlers import (
    CHANNEL,
    CONCURRENCY,
    EXTENSIONS,
    REPLY_CHANNEL,
    TARGET,
    ReplyToManySubscriptionHandler,
    ReplyToSingleSubscriptionHandler,
    ReplyToSubscriptionHandler,
)

__all__ = [
    "CHANNEL",
    "CONCURRENCY",
    "EXTENSIONS",
    "REPLY_CHANNEL",
    "TARGET",
    "ReplyToManySubscriptionHandler",
    "ReplyToSingleSubscriptionHandler",
    "ReplyToSubscriptionHandler",
]
