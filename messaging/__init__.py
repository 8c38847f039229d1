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
    ArgumentError,
    AuthenticationError,
    ClosedError,
    CodecError,
    ConfigurationError,
    ConnectFailedError,
    ConnectionLostError,
    DeadlineError,
    DuplicateNameError,
    InvalidChannelError,
    InvalidExtensionError,
    InvalidFilterError,
    InvalidUrlError,
    MessagingError,
    MissingExtraError,
    OutboxFullError,
    OutcomeUnknownError,
    PayloadTooLargeError,
    PublishRefusedError,
    StreamOverflowError,
    SubscriptionRefusedError,
    UnknownSchemeError,
    UnsupportedFeatureError,
)
from messaging.features import Features
from messaging.instance import Messaging, connect
from messaging.message import Message, MessageContext
from messaging.promise import Promise
from messaging.publisher import MessagePublisher
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
    "ArgumentError",
    "AuthenticationError",
    "ClosedError",
    "CodecError",
    "ConfigurationError",
    "ConnectFailedError",
    "ConnectionLostError",
    "DeadlineError",
    "DuplicateNameError",
    "Features",
    "InvalidChannelError",
    "InvalidExtensionError",
    "InvalidFilterError",
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
    "StreamOverflowError",
    "SubscriptionRefusedError",
    "UnknownSchemeError",
    "UnsupportedFeatureError",
    "connect",
]
