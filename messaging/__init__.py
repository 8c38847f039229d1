"""One messaging API over MQTT, AMQP and memory: the OSGi Messaging RFC in Python, over RxPY observables.

>>> import messaging
>>> with messaging.connect("memory://demo") as m:
...     stream = m.subscribe("greetings/+")
...     promise = m.publish("greetings/world", "hello")
...     print(stream.receive(timeout=5).value())
...     stream.close().result()
hello
"""

from messaging.acknowledge import (
    AcknowledgeConsumer,
    AcknowledgeFilter,
    AcknowledgeHandler,
    AcknowledgeMessageContext,
    AcknowledgeType,
)
from messaging.builder import AcknowledgeMessageContextBuilder, MessageContextBuilder
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
from messaging.instance import Messaging, connect
from messaging.message import Message, MessageContext
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
