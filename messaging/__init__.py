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

if TYPE_CHECKING:
    from messaging.acknowledge import (
        AcknowledgeConsumer,
        AcknowledgeFilter,
        AcknowledgeHandler,
        AcknowledgeMessageContext,
        AcknowledgeType,
    )
    from messaging.builder import AcknowledgeMessageContextBuilder, MessageContextBuilder, MessageContextProvider
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

#: where the names of this package are that are imported on first use: importing it is quick, and a program that only
#: needs the errors, or a command line that only prints its help, does not import pydantic, reactivex and asyncio
_MODULES: Final = {
    "AcknowledgeConsumer": "messaging.acknowledge",
    "AcknowledgeFilter": "messaging.acknowledge",
    "AcknowledgeHandler": "messaging.acknowledge",
    "AcknowledgeMessageContext": "messaging.acknowledge",
    "AcknowledgeMessageContextBuilder": "messaging.builder",
    "AcknowledgeType": "messaging.acknowledge",
    "Features": "messaging.features",
    "HandlerRegistration": "messaging.handling",
    "Message": "messaging.message",
    "MessageContext": "messaging.message",
    "MessageContextBuilder": "messaging.builder",
    "MessageContextProvider": "messaging.builder",
    "MessagePublisher": "messaging.publisher",
    "MessageServiceRuntime": "messaging.runtime",
    "MessageStream": "messaging.stream",
    "MessageSubscription": "messaging.subscription",
    "Messaging": "messaging.instance",
    "MessagingRuntimeDTO": "messaging.runtime",
    "Promise": "messaging.promise",
    "ReceivedMessage": "messaging.message",
    "ReplyToManyPublisher": "messaging.replyto.many",
    "ReplyToPublisher": "messaging.replyto.publisher",
    "ReplyToWhiteboard": "messaging.replyto.whiteboard",
    "connect": "messaging.instance",
}

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
