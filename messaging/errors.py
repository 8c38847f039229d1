"""Every error this project raises on purpose.

::

    MessagingError
    ├── ConfigurationError (ValueError)      what was asked for cannot be set up
    │   ├── InvalidUrlError                  the broker URL does not parse
    │   ├── UnknownSchemeError               no adapter serves the URL's scheme
    │   ├── InvalidOptionError               unknown option, or a value it cannot take
    │   ├── DuplicateNameError               osgi.messaging.name is taken in this registry
    │   ├── MissingExtraError                an optional package is not installed
    │   └── AdapterClashError                a foreign package named ``adapters`` is in the way
    ├── ArgumentError (ValueError)           what a call was given is wrong; nothing was sent
    │   ├── InvalidChannelError              channel name or pattern outside the grammar
    │   ├── InvalidExtensionError            extension value of the wrong type or range
    │   │   └── InvalidHeaderError           user header of the wrong type
    │   ├── InvalidFilterError               LDAP filter does not parse
    │   ├── InvalidTopicError                topic or topic filter outside the grammar
    │   ├── InvalidEventError                event data that no event can have
    │   │   └── NullEventError (TypeError)   no event, or no topic, where one is needed
    │   ├── InvalidContentError              payload that is not bytes and has no mapper or codec
    │   └── PayloadTooLargeError             over the announced message size limit
    ├── UnsupportedFeatureError              the instance does not announce that feature
    ├── BrokerError                          the broker, or the way to it
    │   ├── ConnectFailedError               no connection could be made
    │   │   └── AuthenticationError          the broker refused the credentials
    │   ├── ConnectionLostError              an established connection went away
    │   │   └── TakenOverError               another client connected with the same identity
    │   ├── PublishRefusedError              the broker refused the message
    │   │   └── UnroutableError              nobody would have got it, and it was mandatory
    │   └── SubscriptionRefusedError         the broker refused or cancelled the subscription
    ├── ReplyError                           whoever answered a request says that it went wrong there
    ├── RequestCancelledError                whoever made a request does not want its reply any more
    ├── DeadlineError (TimeoutError)         not done in time, and known not to have happened
    │   └── OutcomeUnknownError              sent, but whether it arrived cannot be known
    ├── BoundReachedError                    a bound was reached
    │   ├── OutboxFullError                  too much is waiting to be published
    │   ├── TooManyRequestsError             too many requests are waiting for their replies
    │   ├── HistoryFullError                 the history has no room for the events that are to be kept
    │   └── StreamOverflowError              a stream with overflow policy ``fail`` overflowed
    ├── CodecError                           content type, encoding, or the bytes themselves
    │   ├── UnknownContentTypeError          no codec is registered for the content type
    │   ├── UnknownContentEncodingError      no such content encoding
    │   ├── EncodeError                      the object does not become bytes
    │   └── DecodeError                      the bytes do not become the object
    ├── PermissionDeniedError                a principal lacks the permission for a topic
    ├── ConversionError                      event data does not become the type that a handler asks for
    ├── StreamConsumedError                  a stream's iterator is taken already
    ├── WouldBlockError                      a call that waits, on a thread that runs an event loop
    └── ClosedError                          the instance or the stream is closed

Messages say what is wrong, where, and what would be right. None of them ever holds a password: URLs are
redacted before they get here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any


class MessagingError(Exception):
    """Root of all errors raised by this project. All of them can be pickled."""

    def __reduce__(self) -> tuple[Callable[..., MessagingError], tuple[Any, ...]]:
        # subclasses make their texts from other arguments than the text
        return _revived, (type(self), self.args, self.__dict__)


def _revived(kind: type[MessagingError], arguments: tuple[Any, ...], attributes: dict[str, Any]) -> MessagingError:
    error = kind.__new__(kind)
    error.args = arguments
    error.__dict__.update(attributes)
    return error


# --- configuration ---------------------------------------------------------------------------------------


class ConfigurationError(MessagingError, ValueError):
    """What was asked for cannot be set up; nothing was started."""


class InvalidUrlError(ConfigurationError):
    """The broker URL does not parse."""


class UnknownSchemeError(ConfigurationError):
    """No installed adapter serves the URL's scheme."""


class InvalidOptionError(ConfigurationError):
    """An option is unknown or its value cannot be taken.

    Attributes:
        option: the name of the option, as it was given.
    """

    def __init__(self, option: str, message: str) -> None:
        super().__init__(message)
        self.option = option


class DuplicateNameError(ConfigurationError):
    """Another instance in the same service registry has this ``osgi.messaging.name`` (RFC 5.2)."""


class MissingExtraError(ConfigurationError):
    """An optional package is needed and not installed.

    Attributes:
        extra: the extra of this distribution that brings it.
    """

    def __init__(self, extra: str, needed_for: str) -> None:
        super().__init__(f"{needed_for} needs an optional package: pip install 'rx-messaging[{extra}]'")
        self.extra = extra


class AdapterClashError(ConfigurationError):
    """An unrelated distribution's top-level package ``adapters`` shadows the one of this project."""


# --- arguments -------------------------------------------------------------------------------------------


class ArgumentError(MessagingError, ValueError):
    """What a call was given is wrong; nothing was sent and the instance goes on."""


class InvalidChannelError(ArgumentError):
    """A channel name or pattern is outside the grammar of :mod:`messaging.model.channels`."""


class InvalidExtensionError(ArgumentError):
    """An extension's value has the wrong type or range.

    Attributes:
        key: the extension's name.
    """

    def __init__(self, key: str, message: str) -> None:
        super().__init__(f"extension {key!r}: {message}")
        self.key = key


class InvalidHeaderError(InvalidExtensionError):
    """A user header has the wrong type or holds characters no protocol can carry."""


class InvalidFilterError(ArgumentError):
    """An LDAP filter does not parse.

    Attributes:
        position: zero-based index of the character where parsing stopped.
    """

    def __init__(self, message: str, position: int) -> None:
        super().__init__(message)
        self.position = position


class InvalidTopicError(ArgumentError):
    """A topic, or a topic filter, is outside the grammar of :mod:`messaging.dispatch.topics` (157.3.1, 157.4.3).

    Attributes:
        topic: as it was given.
    """

    def __init__(self, topic: object, message: str) -> None:
        super().__init__(message)
        self.topic = topic


class InvalidEventError(ArgumentError):
    """Event data that no event can have: not a tree of text keys and simple values, say (157.2.2)."""


class NullEventError(InvalidEventError, TypeError):
    """There is no event, or no topic, where one is needed (157.5.1: ``NullPointerException``)."""


class InvalidContentError(ArgumentError):
    """Content that is neither bytes nor has a mapper or codec to become bytes."""


class PayloadTooLargeError(ArgumentError):
    """A payload exceeds the announced message size limit (MSG205).

    Attributes:
        size: bytes that were to be sent.
        limit: bytes that can be sent.
    """

    def __init__(self, size: int, limit: int, where: str) -> None:
        super().__init__(f"payload of {size} bytes exceeds the limit of {limit} bytes of {where}")
        self.size = size
        self.limit = limit


# --- features --------------------------------------------------------------------------------------------


class UnsupportedFeatureError(MessagingError):
    """The instance does not announce the feature that was asked for (MSG100).

    Attributes:
        feature: the feature's name, as in :class:`messaging.Features`.
        instance: the ``osgi.messaging.name`` of the instance that lacks it.
    """

    def __init__(self, feature: str, instance: str, hint: str = "", *, supported: Iterable[str] = ()) -> None:
        text = f"{instance!r} does not support {feature!r}"
        if hint:
            text += f": {hint}"
        names = ", ".join(sorted(supported))
        if names:
            text += f" (supported: {names})"
        super().__init__(text)
        self.feature = feature
        self.instance = instance


# --- the broker and the way to it ------------------------------------------------------------------------


class BrokerError(MessagingError):
    """The broker, or the way to it, failed.

    Attributes:
        code: what the broker gave as the reason, as its protocol numbers reasons (MQTT: reason code, AMQP: reply
            code); ``None`` if it gave none.
        detail: what it added in words (MQTT: reason string, AMQP: reply text), or ``None``.
    """

    def __init__(self, message: str, *, code: int | None = None, detail: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.detail = detail


class ConnectFailedError(BrokerError):
    """No connection to the broker could be made."""


class AuthenticationError(ConnectFailedError):
    """The broker refused the credentials."""


class ConnectionLostError(BrokerError):
    """An established connection went away."""


class TakenOverError(ConnectionLostError):
    """Another client connected with the same identity, and the broker ended this connection for it."""


class PublishRefusedError(BrokerError):
    """The broker refused a message; it was not delivered."""


class UnroutableError(PublishRefusedError):
    """A mandatory message was bound for nobody: the broker gave it back."""


class SubscriptionRefusedError(BrokerError):
    """The broker refused a subscription, or cancelled one."""


# --- requests ---------------------------------------------------------------------------------------------


class ReplyError(MessagingError):
    """Whoever answered a request says that it went wrong there (RFC 5.7.4).

    Attributes:
        kind: the name of the exception that the handler raised, such as ``ValueError``.
        reason: its text, or as much of it as travels.
    """

    def __init__(self, kind: str, reason: str) -> None:
        super().__init__(f"{kind}: {reason}" if reason else kind)
        self.kind = kind
        self.reason = reason


class RequestCancelledError(MessagingError):
    """Whoever made a request does not want its reply any more."""


# --- time and bounds -------------------------------------------------------------------------------------


class DeadlineError(MessagingError, TimeoutError):
    """Not done in time. Unless it is an :class:`OutcomeUnknownError`, nothing was handed to the broker."""


class OutcomeUnknownError(DeadlineError):
    """The message was sent, but whether the broker took it cannot be known.

    Publishing it again may duplicate it; a receiver can tell by the message id.
    """


class BoundReachedError(MessagingError):
    """A bound was reached."""


class OutboxFullError(BoundReachedError):
    """More is waiting to be published than the outbox may hold; this message was not accepted."""


class TooManyRequestsError(BoundReachedError):
    """More requests are waiting for their replies than may; this one was not sent."""


class HistoryFullError(BoundReachedError):
    """The history cannot keep the least number of events that a policy asks for (157.6.2.2)."""


class StreamOverflowError(BoundReachedError):
    """A stream with overflow policy ``fail`` got more messages than its buffer holds."""


# --- content ---------------------------------------------------------------------------------------------


class CodecError(MessagingError):
    """Content type, content encoding, or the bytes themselves."""


class UnknownContentTypeError(CodecError):
    """No codec is registered for the content type."""


class UnknownContentEncodingError(CodecError):
    """No such content encoding."""


class EncodeError(CodecError):
    """An object does not become bytes."""


class DecodeError(CodecError):
    """Bytes do not become the object that was asked for. The payload is still there, unchanged."""


# --- events ----------------------------------------------------------------------------------------------


class PermissionDeniedError(MessagingError):
    """A principal lacks the permission for a topic (157.8; RFC 97: ``SecurityException``)."""


class ConversionError(MessagingError):
    """Event data does not become the type that a handler asks for (157.4.9).

    Attributes:
        path: where in the data, such as ``order.items[2].price``; empty for all of it.
        reason: what is wrong there, without the value.
    """

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(f"{path}: {reason}" if path else reason)
        self.path = path
        self.reason = reason


# --- life cycle ------------------------------------------------------------------------------------------


class StreamConsumedError(MessagingError):
    """The stream's iterator is taken already; subscribe again for a second one."""


class WouldBlockError(MessagingError):
    """The call waits, and its thread runs an event loop, which would stop meanwhile; use the form with ``await``."""


class ClosedError(MessagingError):
    """The instance or the stream is closed."""


def check_instance(name: str, value: object, kind: type) -> None:
    """Refuse ``value``, the argument ``name``, unless it is a ``kind``.

    Raises:
        ArgumentError: it is not; says what it is.
    """
    if not isinstance(value, kind):
        raise ArgumentError(f"{name} must be a {kind.__name__}, not {type(value).__name__}")


def check_mapping(name: str, value: Any) -> dict[Any, Any]:
    """Return the argument ``name`` as a dict of its own.

    Raises:
        ArgumentError: it is no mapping.
    """
    if not isinstance(value, Mapping):
        raise ArgumentError(f"{name} must be a mapping, not {type(value).__name__}")
    return dict(value)
