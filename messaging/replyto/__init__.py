"""Requests and replies (RFC 5.7): publishers of requests, the whiteboard, and the interfaces of request handlers.

``handlers`` has the interfaces and property names of handlers, for applications. May import: ``publishing``,
``receiving``, ``connection``, ``services``, ``codecs``, ``adapter`` (the contract), ``model``, ``execution``.
"""

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
from messaging.replyto.inboxes import Request
from messaging.replyto.many import ReplyToManyPublisher
from messaging.replyto.publisher import ReplyToPublisher
from messaging.replyto.registration import ReplyRegistration
from messaging.replyto.replies import Replies
from messaging.replyto.requests import Requests
from messaging.replyto.terms import channel_list
from messaging.replyto.typed import TypedHandler
from messaging.replyto.whiteboard import ReplyToWhiteboard

__all__ = [
    "CHANNEL",
    "CONCURRENCY",
    "EXTENSIONS",
    "REPLY_CHANNEL",
    "TARGET",
    "Replies",
    "ReplyRegistration",
    "ReplyToManyPublisher",
    "ReplyToManySubscriptionHandler",
    "ReplyToPublisher",
    "ReplyToSingleSubscriptionHandler",
    "ReplyToSubscriptionHandler",
    "ReplyToWhiteboard",
    "Request",
    "Requests",
    "TypedHandler",
    "channel_list",
]
