"""Names of features (RFC 6): the abilities of an instance, and the keys of extensions.

A *functional* feature states an ability. An *extension* feature is also a key of ``MessageContext.extensions`` with a
value. Using a feature that the instance does not announce raises
:class:`~messaging.errors.UnsupportedFeatureError` before anything is sent (MSG100).
"""

from __future__ import annotations

from typing import Final


class Features:
    """Feature names, as they appear in the ``osgi.messaging.feature`` service property.

    Constants without prefix are functional features. Constants with the prefix ``EXTENSION_`` are also extension keys;
    type and unit of their values follow each name, and :mod:`messaging.model.extensions` enforces them.
    """

    # --- functional features of the RFC (6.2)
    MESSAGE_CONTEXT_BUILDER: Final = "messageContextBuilder"
    REPLY_TO: Final = "replyTo"
    REPLY_TO_MANY_PUBLISH: Final = "replyToManyPublish"
    REPLY_TO_MANY_SUBSCRIBE: Final = "replyToManySubscribe"
    GENERATE_CORRELATION_ID: Final = "generateCorrelationId"
    GENERATE_REPLY_CHANNEL: Final = "generateReplyChannel"
    ACKNOWLEDGE: Final = "acknowledge"

    # --- functional features of this project
    #: every subscriber of a channel gets its own copy (MSG130)
    PUBLISH_SUBSCRIBE: Final = "publishSubscribe"
    #: subscribers that name the same ``queue`` compete (MSG120)
    POINT_TO_POINT: Final = "pointToPoint"
    #: ``+`` and ``#`` in subscriptions (MSG170)
    WILDCARDS: Final = "wildcards"
    #: ``channel(name, extension)``: a routing key beside the channel (MSG170)
    ROUTING_KEY: Final = "routingKey"
    #: content type and encoding, correlation id and reply channel travel with the message (MSG210, MSG220)
    MESSAGE_PROPERTIES: Final = "messageProperties"
    #: payloads over a limit are refused; the limit is in the runtime DTO (MSG205)
    MESSAGE_SIZE_LIMIT: Final = "messageSizeLimit"
    #: the broker, not only this process, redelivers rejected messages
    BROKER_REDELIVERY: Final = "brokerRedelivery"
    #: a queue keeps messages while it has no consumer
    QUEUE_RETENTION: Final = "queueRetention"
    #: queues are declared, peeked at, purged and deleted without consuming: ``Messaging.queues``
    QUEUE_ADMINISTRATION: Final = "queueAdministration"

    # --- extension features of the RFC (6.3)
    EXTENSION_GUARANTEED_ORDERING: Final = "guaranteedOrdering"  #: bool
    EXTENSION_GUARANTEED_DELIVERY: Final = "guaranteedDelivery"  #: bool
    EXTENSION_AUTO_ACKNOWLEDGE: Final = "autoAcknowledge"  #: bool, subscription
    EXTENSION_LAST_WILL: Final = "lastWill"  #: bool, publish
    EXTENSION_QOS: Final = "qos"  #: "0", "1" or "2"

    # --- extension features of this project, publishing
    EXTENSION_RETAIN: Final = "retain"  #: bool
    EXTENSION_TIME_TO_LIVE: Final = "timeToLive"  #: float seconds, > 0 (MSG230)
    EXTENSION_PRIORITY: Final = "priority"  #: int, 0 (lowest) to 9
    EXTENSION_HEADERS: Final = "headers"  #: mapping of str to values, see messaging.model.headers
    EXTENSION_MANDATORY: Final = "mandatory"  #: bool: a message without a route fails
    EXTENSION_TIMEOUT: Final = "timeout"  #: float seconds, > 0: the publish deadline
    EXTENSION_STORE_AND_FORWARD: Final = "storeAndForward"  #: bool: the promise resolves when the message is stored
    EXTENSION_MESSAGE_ID: Final = "messageId"  #: str, 1 to 255 bytes; received messages have it too

    # --- extension features of this project, subscribing
    EXTENSION_QUEUE: Final = "queue"  #: str: name of the queue that subscribers share
    EXTENSION_AUTOCREATE: Final = "autocreate"  #: bool, default true (MSG180)
    EXTENSION_DEAD_LETTER_CHANNEL: Final = "deadLetterChannel"  #: str: a channel name
    EXTENSION_MAX_DELIVERIES: Final = "maxDeliveries"  #: int, >= 1
    EXTENSION_DEDUPLICATE: Final = "deduplicate"  #: bool, or float seconds > 0: for how long settled ids are known
    EXTENSION_PREFETCH: Final = "prefetch"  #: int, 1 to 65535: unsettled messages the broker may send ahead
    EXTENSION_BUFFER_SIZE: Final = "bufferSize"  #: int, >= 1: messages between broker and observer
    EXTENSION_OVERFLOW: Final = "overflow"  #: "block", "drop_oldest", "drop_latest" or "fail"


#: RFC 5.7 calls it generateReplyChannel, the table in 6.2 generateReplyToChannel: both are announced.
GENERATE_REPLY_CHANNEL_ALIAS: Final = "generateReplyToChannel"

#: the features of an instance that can send requests and answer them (RFC 5.7)
REPLY_FEATURES: Final = frozenset({Features.REPLY_TO, Features.REPLY_TO_MANY_PUBLISH, Features.REPLY_TO_MANY_SUBSCRIBE})
