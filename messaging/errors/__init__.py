"""Every error this project raises on purpose.

::

    MessagingError
    ├── ConfigurationError (ValueError)      the configuration cannot be set up
    │   ├── InvalidUrlError                  the broker URL does not parse
    │   ├── UnknownSchemeError               no adapter serves the URL's scheme
    │   ├── InvalidOptionError               unknown option, or a value it does not accept
    │   ├── DuplicateNameError               osgi.messaging.name is taken in this registry
    │   ├── MissingExtraError                an optional package is not installed
    │   └── GatewaySettingsError             problems of the configuration of a gateway
    ├── ArgumentError (ValueError)           an argument is invalid; nothing was sent
    │   ├── InvalidChannelError              channel name or pattern outside the grammar
    │   ├── InvalidExtensionError            extension value of the wrong type or range
    │   │   └── InvalidHeaderError           user header of the wrong type
    │   ├── InvalidFilterError               LDAP filter does not parse
    │   ├── InvalidTopicError                topic or topic filter outside the grammar
    │   ├── InvalidEventError                event data outside the model of events
    │   │   └── NullEventError (TypeError)   an event or a topic is required and missing
    │   ├── InvalidContentError              payload that is not bytes and has no mapper or codec
    │   └── PayloadTooLargeError             over the announced message size limit
    ├── UnsupportedFeatureError              the instance does not announce that feature
    │   └── UnknownKeywordError (TypeError)  no such keyword of ``publish``, ``subscribe``, ``on``, …
    ├── BrokerError                          the broker or the connection to it failed
    │   ├── ConnectFailedError               no connection could be made
    │   │   ├── AuthenticationError          the broker refused the credentials
    │   │   └── CredentialsError             no credentials: their provider failed
    │   ├── ConnectionLostError              an established connection ended
    │   │   ├── TakenOverError               another client connected with the same identity
    │   │   ├── RedirectedError              the broker sent this client to another server
    │   │   └── PlannedLossError             the connection was ended on purpose, to make another one
    │   ├── PublishRefusedError              the broker refused the message
    │   │   └── UnroutableError              a mandatory message has no route
    │   ├── QueueRefusedError                the broker refused a request about a queue
    │   └── SubscriptionRefusedError         the broker refused or cancelled the subscription
    ├── DatabaseError                        the database of an outbox failed, or cannot be reached
    ├── ReplyError                           the responder reported a failure
    ├── RequestCancelledError                the requester cancelled the request
    ├── DeadlineError (TimeoutError)         not done in time; nothing was handed to the broker
    │   └── OutcomeUnknownError              sent; whether the broker took it is unknown
    ├── BoundReachedError                    a bound was reached
    │   ├── OutboxFullError                  too many messages or bytes are pending
    │   ├── TooManyRequestsError             too many requests are pending
    │   ├── HistoryFullError                 the history has no room for the events to keep
    │   ├── EventQueueOverflowError          the queue of an event consumer is full; it was disconnected
    │   └── StreamOverflowError              a stream with overflow policy ``fail`` overflowed
    ├── JournalError                         the journal of a folder, or the way to it
    │   ├── JournalUnreadableError           it cannot be reached, or is no journal
    │   ├── JournalCorruptError              a file of it is damaged
    │   ├── JournalLockedError               another writer uses it
    │   ├── JournalRangeError                offsets are asked for that it does not have
    │   └── JournalFullError (BoundReachedError)  no room: a bound is reached, or the disk is full
    ├── CodecError                           content type, content encoding or payload is invalid
    │   ├── UnknownContentTypeError          no codec is registered for the content type
    │   ├── UnknownContentEncodingError      the content encoding is unknown
    │   ├── EncodeError                      the object cannot be encoded
    │   └── DecodeError                      the payload cannot be decoded
    │       └── UnknownMetricError           Sparkplug data of a metric that no birth defines
    ├── PartialNotificationError             not every consumer was notified of an event
    ├── EventSessionLostError                the process that sent an event session is gone
    ├── RemoteEventError                     an event session in another process ended with this error
    ├── UnknownEventError                    a generator or a listener does not know that kind of event
    ├── ListenerGoneError                    the listener of remote events does not exist any more
    ├── InvalidIteratorError                 a newer iterator, or delivery to a target, took its place
    ├── LeaseError                           the leasing of a resource failed
    │   ├── UnknownLeaseError                the lease has expired, was cancelled, or is of another grantor
    │   ├── LeaseDeniedError                 the grantor refuses to grant or to renew
    │   └── LeaseMapError                    some leases of a batch were not renewed or cancelled
    ├── TransactionError                     a transaction cannot do that
    │   ├── UnknownTransactionError          the manager does not know the transaction, or it has ended
    │   ├── CannotJoinError                  the transaction is no longer active
    │   ├── CannotCommitError                the transaction was aborted, or a participant refused
    │   └── CannotAbortError                 the transaction is committed, or is being committed
    ├── PermissionDeniedError                a principal lacks the permission for a topic
    ├── SignatureError                       a message of an event network has an invalid signature
    ├── ConversionError                      event data does not fit the type a handler asks for
    ├── StreamConsumedError                  a stream's iterator is in use already
    ├── InterceptorError                     an interceptor failed; the message was not sent
    ├── WouldBlockError                      a blocking call on a thread that runs an event loop
    └── ClosedError                          the instance or the stream is closed

The text of an error names the problem, its place and a correct value. It never holds a password: URLs are redacted
before they become part of a text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any


class MessagingError(Exception):
    """Root of all errors that this project raises. Every one of them can be pickled."""

    def __reduce__(self) -> tuple[Callable[..., MessagingError], tuple[Any, ...]]:
        # constructors of subclasses take other arguments than the text
        return _revived, (type(self), self.args, self.__dict__)


def _revived(kind: type[MessagingError], arguments: tuple[Any, ...], attributes: dict[str, Any]) -> MessagingError:
    error = kind.__new__(kind)
    error.args = arguments
    error.__dict__.update(attributes)
    return error


# --- configuration ---------------------------------------------------------------------------------------


class ConfigurationError(MessagingError, ValueError):
    """The configuration cannot be set up; nothing was started."""


class InvalidUrlError(ConfigurationError):
    """The broker URL does not parse."""


class UnknownSchemeError(ConfigurationError):
    """No installed adapter serves the URL's scheme."""


class InvalidOptionError(ConfigurationError):
    """An option is unknown, or its value is not accepted.

    Attributes:
        option: the name of the option, as given.
    """

    def __init__(self, option: str, message: str) -> None:
        super().__init__(message)
        self.option = option


class DuplicateNameError(ConfigurationError):
    """Another instance in the same service registry has this ``osgi.messaging.name`` (RFC 5.2)."""


class MissingExtraError(ConfigurationError):
    """An optional package is needed and not installed.

    Attributes:
        extra: the extra of this distribution that installs it.
    """

    def __init__(self, extra: str, needed_for: str) -> None:
        super().__init__(f"{needed_for} needs an optional package: pip install 'rx-messaging[{extra}]'")
        self.extra = extra


class GatewaySettingsError(ConfigurationError):
    """The configuration of a gateway has problems: one or several of them are errors.

    The text has a line for each problem, with file, line, column and key. It holds no secret.

    Attributes:
        problems: all of them, warnings included; see :class:`messaging.gateway.Problem`.
    """

    def __init__(self, problems: Iterable[object]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(map(str, self.problems)))


# --- arguments -------------------------------------------------------------------------------------------


class ArgumentError(MessagingError, ValueError):
    """An argument of a call is invalid; nothing was sent, and the instance stays usable."""


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
    """A topic, or a topic filter, is outside its grammar (157.3.1, 157.4.3; RFC 97 5.1.1.1; RFC 214 5.1.1, 5.2.2).

    Attributes:
        topic: the topic, as given.
    """

    def __init__(self, topic: object, message: str) -> None:
        super().__init__(message)
        self.topic = topic


class InvalidEventError(ArgumentError):
    """Event data is outside the model of events, such as data with keys that are no text (157.2.2)."""


class NullEventError(InvalidEventError, TypeError):
    """An event or a topic is required and missing (157.5.1: ``NullPointerException``)."""


class InvalidContentError(ArgumentError):
    """Content is neither bytes nor has a mapper or codec that makes it bytes."""


class PayloadTooLargeError(ArgumentError):
    """A payload exceeds the announced message size limit (MSG205).

    Attributes:
        size: bytes of the payload.
        limit: bytes that a payload may have.
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


class UnknownKeywordError(UnsupportedFeatureError, TypeError):
    """A short form was called with a keyword that is none of its parameters, and no extension of any instance.

    Attributes:
        keyword: as it was given.
    """

    def __init__(self, call: str, keyword: str, instance: str, hint: str) -> None:
        Exception.__init__(self, f"{call}() has no keyword {keyword!r}" + (f"; {hint}" if hint else ""))
        self.keyword = self.feature = keyword
        self.instance = instance


# --- the broker and the way to it ------------------------------------------------------------------------


class BrokerError(MessagingError):
    """The broker or the connection to it failed.

    Attributes:
        code: the broker's reason as a number of its protocol (MQTT: reason code, AMQP: reply code), or ``None``.
        detail: the broker's reason as text (MQTT: reason string, AMQP: reply text), or ``None``.
    """

    def __init__(self, message: str, *, code: int | None = None, detail: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.detail = detail


class ConnectFailedError(BrokerError):
    """No connection to the broker could be made."""


class AuthenticationError(ConnectFailedError):
    """The broker refused the credentials."""


class CredentialsError(ConnectFailedError):
    """There are no credentials to connect with: a callable, command or file failed, hangs, or returned none.

    The text never repeats what a callable returned or raised, nor the output of a command: it may hold a secret.
    """


class ConnectionLostError(BrokerError):
    """An established connection ended."""


class TakenOverError(ConnectionLostError):
    """Another client connected with the same identity, and the broker ended this connection for it."""


class PlannedLossError(ConnectionLostError):
    """The adapter ended a connection on purpose, to make another one; it is not reported as a problem."""


class RedirectedError(ConnectionLostError):
    """The broker refused or ended a connection, and sent this client to another server.

    Attributes:
        servers: where to connect instead, as ``host`` or ``host:port``, in the broker's order; empty if it names none.
        is_permanent: whether this client is never to come back.
    """

    def __init__(
        self,
        message: str,
        *,
        servers: tuple[str, ...] = (),
        is_permanent: bool = False,
        code: int | None = None,
        detail: str | None = None,
    ) -> None:
        super().__init__(message, code=code, detail=detail)
        self.servers = servers
        self.is_permanent = is_permanent


class PublishRefusedError(BrokerError):
    """The broker refused a message; it was not delivered."""


class UnroutableError(PublishRefusedError):
    """A mandatory message has no route: the broker returned it."""


class SubscriptionRefusedError(BrokerError):
    """The broker refused a subscription, or cancelled one."""


class QueueRefusedError(BrokerError):
    """The broker refused a request about a queue: the queue does not exist, differs, is in use, or is not yours."""


class DatabaseError(MessagingError):
    """The database of an outbox failed, or cannot be reached.

    The text holds neither statements nor their parameters.
    """


# --- requests ---------------------------------------------------------------------------------------------


class ReplyError(MessagingError):
    """The responder reported a failure (RFC 5.7.4).

    Attributes:
        kind: the name of the exception that the handler raised, such as ``ValueError``.
        reason: the text of the exception, possibly shortened.
    """

    def __init__(self, kind: str, reason: str) -> None:
        super().__init__(f"{kind}: {reason}" if reason else kind)
        self.kind = kind
        self.reason = reason


class RequestCancelledError(MessagingError):
    """The requester cancelled the request."""


# --- time and bounds -------------------------------------------------------------------------------------


class DeadlineError(MessagingError, TimeoutError):
    """A deadline passed. Unless it is an :class:`OutcomeUnknownError`, nothing was handed to the broker."""


class OutcomeUnknownError(DeadlineError):
    """The message was sent, and whether the broker took it is unknown.

    Publishing it again may duplicate it; a receiver can recognize the duplicate by the message id.
    """


class BoundReachedError(MessagingError):
    """A configured bound was reached."""


class OutboxFullError(BoundReachedError):
    """The outbox holds as many messages or bytes as it may; this message was not accepted."""


class TooManyRequestsError(BoundReachedError):
    """The maximum number of requests is pending; this one was not sent."""


class EventQueueOverflowError(BoundReachedError):
    """The queue of an event consumer is full, and the consumer was disconnected (RFC 214 5.2.1: IllegalState)."""


class HistoryFullError(BoundReachedError):
    """The history has no room for the minimum number of events that a policy asks for (157.6.2.2)."""


class StreamOverflowError(BoundReachedError):
    """A stream with overflow policy ``fail`` received more messages than its buffer holds."""


# --- journals --------------------------------------------------------------------------------------------


class JournalError(MessagingError):
    """Base of the errors of a journal: a read or a write failed.

    Attributes:
        path: the folder of the journal, without secrets.
        option: the setting or option with the path, if there is one.
    """

    def __init__(self, path: str, message: str, option: str | None = None) -> None:
        super().__init__(path, message)
        self.path = path
        self.option = option

    def __str__(self) -> str:
        path, message = self.args
        return f"journal {path}: {message}" if self.option is None else f"option {self.option!r} ({path}): {message}"


class JournalUnreadableError(JournalError):
    """The folder cannot be reached, or it holds no journal."""


class JournalCorruptError(JournalError):
    """A file of the journal is not as it was written."""


class JournalLockedError(JournalError):
    """Another writer has the journal open."""


class JournalRangeError(JournalError):
    """Offsets are asked for that the journal does not have: they were trimmed, or are not written yet."""


class JournalFullError(JournalError, BoundReachedError):
    """The journal has no room, or the disk is full; nothing was written."""


# --- content ---------------------------------------------------------------------------------------------


class CodecError(MessagingError):
    """Content type, content encoding or payload is invalid."""


class UnknownContentTypeError(CodecError):
    """No codec is registered for the content type."""


class UnknownContentEncodingError(CodecError):
    """The content encoding is unknown."""


class EncodeError(CodecError):
    """An object cannot be encoded."""


class DecodeError(CodecError):
    """A payload cannot be decoded to the requested object. The payload stays available, unchanged."""


class UnknownMetricError(DecodeError):
    """Sparkplug data leaves out the name or the type of a metric, and no birth that was received tells it."""


# --- events ----------------------------------------------------------------------------------------------


class PartialNotificationError(MessagingError):
    """Not every consumer of an event was notified: the deadline passed, or a process was lost.

    Attributes:
        missing: names of the consumers and of the other processes that did not confirm.
    """

    def __init__(self, message: str, missing: Iterable[str] = ()) -> None:
        super().__init__(message)
        self.missing = tuple(missing)


class EventSessionLostError(MessagingError):
    """The process that sent an event session is gone: the session ends without a close event."""


class RemoteEventError(MessagingError):
    """An event session in another process ended with an error.

    Attributes:
        kind: name of the type of the error there.
    """

    def __init__(self, message: str, kind: str = "Error") -> None:
        super().__init__(message)
        self.kind = kind


class UnknownEventError(MessagingError):
    """A generator or a listener does not know that kind of event (EV.2.3.3).

    A listener that raises it asks the sender to send no further events of this kind from this source.
    """


class ListenerGoneError(MessagingError):
    """The listener of remote events does not exist any more. Senders stop the delivery to it."""


class InvalidIteratorError(MessagingError):
    """A newer iterator of the mailbox registration, or delivery to a target, took the place of this iterator."""


# --- leases and transactions -----------------------------------------------------------------------------


class LeaseError(MessagingError):
    """The leasing of a resource failed."""


class UnknownLeaseError(LeaseError):
    """The grantor does not know the lease: it has expired, was cancelled, or another grantor granted it."""


class LeaseDeniedError(LeaseError):
    """The grantor refuses to grant or to renew a lease."""


class LeaseMapError(LeaseError):
    """Some leases of a batch were not renewed or cancelled; the others were.

    Attributes:
        failures: the error of each such lease.
    """

    def __init__(self, message: str, failures: Mapping[Any, MessagingError]) -> None:
        super().__init__(message)
        self.failures = dict(failures)


class TransactionError(MessagingError):
    """A transaction cannot do what it was asked for."""


class UnknownTransactionError(TransactionError):
    """The manager does not know the transaction, or the transaction has ended."""


class CannotJoinError(TransactionError):
    """The transaction is no longer active, or the participant has crashed since it joined."""


class CannotCommitError(TransactionError):
    """The transaction was aborted, or a participant refused to commit."""


class CannotAbortError(TransactionError):
    """The transaction is committed, or is being committed."""


class PermissionDeniedError(MessagingError):
    """A principal lacks the permission for a topic (157.8; RFC 97: ``SecurityException``)."""


class SignatureError(MessagingError):
    """A message of an event network is unsigned or has an invalid signature, and was discarded.

    Attributes:
        problem: ``unsigned``, ``malformed``, ``unknown_key``, ``wrong_signature``, ``wrong_channel``, ``expired``,
            ``premature``, ``replayed``, ``full`` (it may be a replay: too many messages to remember),
            ``forged_member`` or ``wrong_principal``.
        channel: the channel that it arrived on.
        key: name of the key that it names; ``None`` if it names no key, or an unknown one.
    """

    def __init__(self, problem: str, text: str, channel: str, key: str | None = None) -> None:
        super().__init__(f"a message on {channel!r:.200}: {text}")
        self.problem = problem
        self.channel = channel
        self.key = key


class ConversionError(MessagingError):
    """Event data does not fit the type that a handler asks for (157.4.9).

    Attributes:
        path: place in the data, such as ``order.items[2].price``; empty for the whole data.
        reason: the problem at that place, without the value.
    """

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(f"{path}: {reason}" if path else reason)
        self.path = path
        self.reason = reason


# --- life cycle ------------------------------------------------------------------------------------------


class StreamConsumedError(MessagingError):
    """The stream's iterator is in use already; subscribe again for a second one."""


class InterceptorError(MessagingError):
    """An interceptor raised on an outgoing message, which was not sent. The cause is what it raised."""


class WouldBlockError(MessagingError):
    """A call would block the event loop that runs on its thread; use the form with ``await``."""


class ClosedError(MessagingError):
    """The instance or the stream is closed."""
