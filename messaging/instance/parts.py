"""The services of one instance that depend on whether it has interceptors.

An instance without interceptors gets classes that know nothing of interceptors: they cost it nothing for each message.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from messaging.interception import InstanceInfo, Interceptors
from messaging.publishing import InterceptedPublisher, MessagePublisher
from messaging.receiving import MessageSubscription
from messaging.replyto import (
    InterceptedReplies,
    InterceptedReplyToManyPublisher,
    InterceptedReplyToPublisher,
    Replies,
    ReplyToManyPublisher,
    ReplyToPublisher,
    ReplyToWhiteboard,
    Requests,
)

if TYPE_CHECKING:
    from collections.abc import Iterable

    from messaging.connection import Connection
    from messaging.interception import Interceptor
    from messaging.publishing import Outbox
    from messaging.services import ServiceRegistry


class InstanceParts(NamedTuple):
    """The services; see the attributes of ``Messaging``."""

    publisher: MessagePublisher
    subscription: MessageSubscription
    requests: Requests
    reply_to: ReplyToPublisher
    reply_to_many: ReplyToManyPublisher
    replies: Replies
    whiteboard: ReplyToWhiteboard


def assemble(
    connection: Connection, outbox: Outbox, services: ServiceRegistry, given: Iterable[Interceptor]
) -> InstanceParts:
    """Make the services of an instance.

    Args:
        connection, outbox: of the instance.
        services: the registry, which may have interceptors.
        given: the interceptors that ``connect`` was given.

    Raises:
        ArgumentError: ``given`` are no interceptors.
    """
    adapter = connection.adapter
    info = InstanceInfo(
        adapter.name, adapter.url.scheme, adapter.url.host, adapter.url.port, adapter.capabilities.client_id
    )
    interceptors = Interceptors(given, services, info, adapter)
    if not interceptors:
        publisher = MessagePublisher(connection, outbox)
        subscription = MessageSubscription(connection, services, publisher.publish)
        requests = Requests(connection, publisher)
        reply_to = ReplyToPublisher(connection, publisher, requests)
        many = ReplyToManyPublisher(connection, services, publisher, reply_to, requests)
        replies = Replies(connection, publisher, requests.inboxes)
        whiteboard = ReplyToWhiteboard(connection, services, subscription, replies)
        return InstanceParts(publisher, subscription, requests, reply_to, many, replies, whiteboard)
    chain, processing = interceptors.publishing, interceptors.processing("reply")
    if chain is None:
        publisher = MessagePublisher(connection, outbox)
        requests = Requests(connection, publisher)
        reply_to = ReplyToPublisher(connection, publisher, requests)
        many = ReplyToManyPublisher(connection, services, publisher, reply_to, requests, processing)
    else:
        publisher = intercepted = InterceptedPublisher(connection, outbox, chain)
        requests = Requests(connection, publisher)
        reply_to = InterceptedReplyToPublisher(connection, intercepted, requests, chain)
        many = InterceptedReplyToManyPublisher(connection, services, intercepted, reply_to, requests, processing, chain)
    subscription = MessageSubscription(
        connection, services, publisher.publish_internally, interceptors.processing("message")
    )
    replies = InterceptedReplies(connection, publisher, requests.inboxes, chain)
    whiteboard = ReplyToWhiteboard(connection, services, subscription, replies, interceptors)
    return InstanceParts(publisher, subscription, requests, reply_to, many, replies, whiteboard)
