"""Requests and replies (RFC 5.7): publishers of requests, the whiteboard, and the interfaces of request handlers.

``handlers`` has the interfaces and property names of handlers, for applications. Only these are public; the
other names are for the rooms above.
"""

from messaging.replyto.handlers import (
    CHANNEL,
    CONCURRENCY,
    EXPECTED,
    EXTENSIONS,
    REPLY_CHANNEL,
    TARGET,
    ReplyToManySubscriptionHandler,
    ReplyToSingleSubscriptionHandler,
    ReplyToSubscriptionHandler,
)
from messaging.replyto.publisher import ReplyToManyPublisher as ReplyToManyPublisher
from messaging.replyto.publisher import ReplyToPublisher as ReplyToPublisher
from messaging.replyto.replies import DeferredReply
from messaging.replyto.replies import Replies as Replies
from messaging.replyto.requests import OpenRequests as OpenRequests
from messaging.replyto.requests import Request as Request
from messaging.replyto.serving import TypedHandler as TypedHandler
from messaging.replyto.serving import channel_list as channel_list
from messaging.replyto.serving import expected_errors as expected_errors
from messaging.replyto.whiteboard import ReplyRegistration as ReplyRegistration
from messaging.replyto.whiteboard import ReplyToWhiteboard as ReplyToWhiteboard

__all__ = [
    "CHANNEL",
    "CONCURRENCY",
    "EXPECTED",
    "EXTENSIONS",
    "REPLY_CHANNEL",
    "TARGET",
    "DeferredReply",
    "ReplyToManySubscriptionHandler",
    "ReplyToSingleSubscriptionHandler",
    "ReplyToSubscriptionHandler",
]
