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

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

from messaging.errors import (
    ArgumentError,
    AuthenticationError,
    BoundReachedError,
    BrokerError,
    ClosedError,
    CodecError,
    ConfigurationError,
    ConnectFailedError,
    ConnectionLostError,
    CredentialsError,
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
    QueueRefusedError,
    RedirectedError,
    ReplyError,
    RequestCancelledError,
    StreamConsumedError,
    StreamOverflowError,
    SubscriptionRefusedError,
    TakenOverError,
    TooManyRequestsError,
    UnknownContentEncodingError,
    UnknownContentTypeError,
    UnknownKeywordError,
    UnknownSchemeError,
    UnroutableError,
    UnsupportedFeatureError,
    WouldBlockError,
)

if TYPE_CHECKING:
    from messaging.execution.promise import Promise
    from messaging.instance import Messaging, connect
    from messaging.model.acknowledge import AcknowledgeHandler, AcknowledgeMessageContext, AcknowledgeType
    from messaging.model.builder import AcknowledgeMessageContextBuilder, MessageContextBuilder, MessageContextProvider
    from messaging.model.context import MessageContext
    from messaging.model.credentials import Credentials
    from messaging.model.features import Features
    from messaging.model.message import AcknowledgeConsumer, AcknowledgeFilter, Message, ReceivedMessage
    from messaging.publishing.publisher import MessagePublisher
    from messaging.receiving.handler import HandlerRegistration
    from messaging.receiving.service import MessageSubscription
    from messaging.receiving.stream import MessageStream
    from messaging.replyto import ReplyToManyPublisher, ReplyToPublisher, ReplyToWhiteboard
    from messaging.runtime import MessageServiceRuntime, MessagingRuntimeDTO

#: where the names of this package are that are imported on first use: importing it is quick, and a program that only
#: needs the errors, or a command line that only prints its help, does not import pydantic, reactivex and asyncio
_MODULES: Final = {
    "AcknowledgeConsumer": "messaging.model",
    "AcknowledgeFilter": "messaging.model",
    "AcknowledgeHandler": "messaging.model",
    "AcknowledgeMessageContext": "messaging.model",
    "AcknowledgeMessageContextBuilder": "messaging.model",
    "AcknowledgeType": "messaging.model",
    "Credentials": "messaging.model.credentials",
    "Features": "messaging.model",
    "HandlerRegistration": "messaging.receiving",
    "Message": "messaging.model",
    "MessageContext": "messaging.model",
    "MessageContextBuilder": "messaging.model",
    "MessageContextProvider": "messaging.model",
    "MessagePublisher": "messaging.publishing",
    "MessageServiceRuntime": "messaging.runtime",
    "MessageStream": "messaging.receiving",
    "MessageSubscription": "messaging.receiving",
    "Messaging": "messaging.instance",
    "MessagingRuntimeDTO": "messaging.runtime",
    "Promise": "messaging.execution",
    "ReceivedMessage": "messaging.model",
    "ReplyToManyPublisher": "messaging.replyto",
    "ReplyToPublisher": "messaging.replyto",
    "ReplyToWhiteboard": "messaging.replyto",
    "connect": "messaging.instance",
}

__all__ = [
    "AcknowledgeConsumer",
    "AcknowledgeFilter",
    "AcknowledgeHandler",
    "AcknowledgeMessageContext",
    "AcknowledgeMessageContextBuilder",
    "AcknowledgeType",
    "ArgumentError",
    "AuthenticationError",
    "BoundReachedError",
    "BrokerError",
    "ClosedError",
    "CodecError",
    "ConfigurationError",
    "ConnectFailedError",
    "ConnectionLostError",
    "Credentials",
    "CredentialsError",
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
    "QueueRefusedError",
    "ReceivedMessage",
    "RedirectedError",
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
    "UnknownKeywordError",
    "UnknownSchemeError",
    "UnroutableError",
    "UnsupportedFeatureError",
    "WouldBlockError",
    "connect",
]


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


if not TYPE_CHECKING:  # type checkers know the names above, and must find wrong ones

    def __getattr__(name: str) -> Any:
        """Import a public name, or a module of this package, on first use."""
        module = _MODULES.get(name)
        if module is not None:
            value = globals()[name] = getattr(import_module(module), name)
            return value
        if not name.startswith("_"):
            try:
                return import_module(f"{__name__}.{name}")
            except ModuleNotFoundError as error:
                if error.name != f"{__name__}.{name}":
                    raise
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
