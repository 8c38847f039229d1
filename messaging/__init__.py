"""One messaging API over MQTT, AMQP and memory: the OSGi Messaging RFC in Python, over RxPY observables.

A handler is called with each message; the message is acknowledged when it returns, and rejected when it raises:

>>> import queue
>>> import messaging
>>> greeted = queue.SimpleQueue()
>>> with messaging.connect("memory://demo") as m:  # or mqtt://localhost, amqp://user:password@host/vhost
...     registration = m.on("greetings/+", greeted.put, model=str)  # returns once the broker has confirmed
...     promise = m.publish("greetings/world", "hello")
...     print(greeted.get(timeout=5))
hello

A stream is iterated, or observed. Entering its ``with`` block waits for the broker's confirmation:

>>> with messaging.connect("memory://demo") as m, m.subscribe("greetings/+") as stream:
...     promise = m.publish("greetings/world", "hello again")
...     print(stream.receive(timeout=5).value(str))
hello again
"""

from messaging.acknowledge import (
    AcknowledgeConsumer,
    AcknowledgeFilter,
    AcknowledgeHandler,
    AcknowledgeMessageContext,
    AcknowledgeType,
)
from messaging.builder import AcknowledgeMessageContextBuilder, MessageContextBuilder, MessageContextProvider
from messaging.errors import (
    AdapterClashError,
    ArgumentError,
    AuthenticationError,
    BoundReachedError,
    BrokerError,
    ClosedError,
    CodecError,
    ConfigurationError,
    ConnectFailedError,
    ConnectionLostError,
    DeadlineError,
    DecodeError,
    DuplicateNameError,
    EncodeError,
    InvalidChannelError,
    InvalidContentError,
    InvalidExtensionError,
    InvalidFilterError,
    InvalidHeaderError,
    InvalidOptionError,
    InvalidUrlError,
    MessagingError,
    MissingExtraError,
    OutboxFullError,
    OutcomeUnknownError,
    PayloadTooLargeError,
    PublishRefusedError,
    ReplyError,
    RequestCancelledError,
    StreamConsumedError,
    StreamOverflowError,
    SubscriptionRefusedError,
    TakenOverError,
    TooManyRequestsError,
    UnknownContentEncodingError,
    UnknownContentTypeError,
    UnknownSchemeError,
    UnroutableError,
    UnsupportedFeatureError,
    WouldBlockError,
)
from messaging.features import Features
from messaging.handling import HandlerRegistration
from messaging.instance import Messaging, connect
from messaging.message import Message, MessageContext, ReceivedMessage
from messaging.promise import Promise
from messaging.publisher import MessagePublisher
from messaging.replyto.many import ReplyToManyPublisher
from messaging.replyto.publisher import ReplyToPublisher
from messaging.replyto.whiteboard import ReplyToWhiteboard
from messaging.runtime import MessageServiceRuntime, MessagingRuntimeDTO
from messaging.stream import MessageStream
from messaging.subscription import MessageSubscription

__all__ = [
    "AcknowledgeConsumer",
    "AcknowledgeFilter",
    "AcknowledgeHandler",
    "AcknowledgeMessageContext",
    "AcknowledgeMessageContextBuilder",
    "AcknowledgeType",
    "AdapterClashError",
    "ArgumentError",
    "AuthenticationError",
    "BoundReachedError",
    "BrokerError",
    "ClosedError",
    "CodecError",
    "ConfigurationError",
    "ConnectFailedError",
    "ConnectionLostError",
    "DeadlineError",
    "DecodeError",
    "DuplicateNameError",
    "EncodeError",
    "Features",
    "HandlerRegistration",
    "InvalidChannelError",
    "InvalidContentError",
    "InvalidExtensionError",
    "InvalidFilterError",
    "InvalidHeaderError",
    "InvalidOptionError",
    "InvalidUrlError",
    "Message",
    "MessageContext",
    "MessageContextBuilder",
    "MessageContextProvider",
    "MessagePublisher",
    "MessageServiceRuntime",
    "MessageStream",
    "MessageSubscription",
    "Messaging",
    "MessagingError",
    "MessagingRuntimeDTO",
    "MissingExtraError",
    "OutboxFullError",
    "OutcomeUnknownError",
    "PayloadTooLargeError",
    "Promise",
    "PublishRefusedError",
    "ReceivedMessage",
    "ReplyError",
    "ReplyToManyPublisher",
    "ReplyToPublisher",
    "ReplyToWhiteboard",
    "RequestCancelledError",
    "StreamConsumedError",
    "StreamOverflowError",
    "SubscriptionRefusedError",
    "TakenOverError",
    "TooManyRequestsError",
    "UnknownContentEncodingError",
    "UnknownContentTypeError",
    "UnknownSchemeError",
    "UnroutableError",
    "UnsupportedFeatureError",
    "WouldBlockError",
    "connect",
]
