"""The extensions of AMQP alone: features of RabbitMQ that other adapters do not have.

Each key has its side, its check and its line in ``docs/amqp.md``, which is generated from here. :mod:`.declarations`
compiles the values of one context and refuses contradictions. Durations are float seconds.
"""

from __future__ import annotations

import math
import re
import reprlib
from collections.abc import Callable, Mapping
from datetime import datetime
from types import MappingProxyType
from typing import Any, Final, Literal, NamedTuple

from messaging.model import boolean, headers, integer

EXCHANGE_TYPE: Final = "exchangeType"
EXCHANGE_DURABLE: Final = "exchangeDurable"
EXCHANGE_AUTO_DELETE: Final = "exchangeAutoDelete"
EXCHANGE_INTERNAL: Final = "exchangeInternal"
ALTERNATE_EXCHANGE: Final = "alternateExchange"
EXCHANGE_ARGUMENTS: Final = "exchangeArguments"
DECLARE: Final = "declare"
ENVELOPE: Final = "envelope"
BINDINGS: Final = "bindings"
BINDING_ARGUMENTS: Final = "bindingArguments"
QUEUE_TYPE: Final = "queueType"
DURABLE: Final = "durable"
EXCLUSIVE: Final = "exclusive"
AUTO_DELETE: Final = "autoDelete"
SINGLE_ACTIVE_CONSUMER: Final = "singleActiveConsumer"
CONSUMER_PRIORITY: Final = "consumerPriority"
DELIVERY_LIMIT: Final = "deliveryLimit"
MAX_PRIORITY: Final = "maxPriority"
MESSAGE_TIME_TO_LIVE: Final = "messageTimeToLive"
QUEUE_EXPIRES: Final = "queueExpires"
MAX_LENGTH: Final = "maxLength"
MAX_LENGTH_BYTES: Final = "maxLengthBytes"
QUEUE_OVERFLOW: Final = "queueOverflow"
DEAD_LETTER_EXCHANGE: Final = "deadLetterExchange"
DEAD_LETTER_ROUTING_KEY: Final = "deadLetterRoutingKey"
QUEUE_ARGUMENTS: Final = "queueArguments"
MAX_AGE: Final = "maxAge"
STREAM_SEGMENT_BYTES: Final = "streamSegmentBytes"
STREAM_OFFSET: Final = "streamOffset"
TYPE: Final = "type"
APP_ID: Final = "appId"
#: of received messages only: the broker accepts no other name than that of the connection's user
USER_ID: Final = "userId"
REDELIVERY_DELAY: Final = "redeliveryDelay"
REDELIVERY_DELAY_MAX: Final = "redeliveryDelayMax"

#: AMQP 0-9-1 carries names and keys as short strings, bytes
_MAX_NAME: Final = 255
#: the largest number of milliseconds for a broker: 32 bits without sign
_MAX_SECONDS: Final = 0xFFFF_FFFF / 1000
_MAX_INT: Final = 2**63 - 1
#: the year 5138: seconds since the epoch, and not milliseconds
_MAX_TIMESTAMP: Final = 1e11
_INTERVAL: Final = re.compile("([1-9][0-9]{0,8})([YMDhms])", re.ASCII)
_UNITS: Final = {"Y": 365 * 86_400, "M": 30 * 86_400, "D": 86_400, "h": 3600, "m": 60, "s": 1}
_EXCHANGE_TYPES: Final = ("topic", "direct", "fanout", "headers")
_MATCHES: Final = ("all", "any", "all-with-x", "any-with-x")


class Extension(NamedTuple):
    """One key: its side, its check, and its documentation: value, default and effect."""

    side: Literal["publish", "subscribe", "both"]
    check: Callable[[Any], Any]
    value: str
    default: str
    effect: str


def seconds_of(interval: str) -> int:
    """Return the seconds of an interval such as ``1h``, which passed the check of ``streamOffset``."""
    return int(interval[:-1]) * _UNITS[interval[-1]]


# --- checks: each returns the value to use, or raises ValueError with the valid values


def _seconds(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= _MAX_SECONDS:
        raise ValueError(
            f"must be a number of seconds above 0 and at most {_MAX_SECONDS:.0f}, not {reprlib.repr(value)}"
        )
    return float(value)


def _one_of(*allowed: str) -> Callable[[Any], str]:
    def check(value: Any) -> str:
        if not isinstance(value, str) or value not in allowed:
            raise ValueError(f"must be one of {', '.join(allowed)}, not {reprlib.repr(value)}")
        return value

    return check


def _text(what: str, shortest: int = 0) -> Callable[[Any], str]:
    def check(value: Any) -> str:
        if not isinstance(value, str):
            raise ValueError(f"must be a str, not {type(value).__name__}")
        try:
            size = len(value.encode())
        except UnicodeEncodeError:
            raise ValueError(f"the {what} holds a lone surrogate") from None
        if not shortest <= size <= _MAX_NAME:
            raise ValueError(f"a {what} has {shortest} to {_MAX_NAME} bytes in UTF-8, not {size}")
        return value

    return check


_name: Final = _text("name", 1)
_key: Final = _text("key")
_property: Final = _text("property")


def _exchange_type(value: Any) -> str:
    if isinstance(value, str) and value.startswith("x-") and len(value) > 2:
        return _name(value)
    if not isinstance(value, str) or value not in _EXCHANGE_TYPES:
        raise ValueError(
            f"must be one of {', '.join(_EXCHANGE_TYPES)}, or the x-... of a plugin, not {reprlib.repr(value)}"
        )
    return value


def _bindings(value: Any) -> tuple[str, ...]:
    if isinstance(value, (str, bytes)) or not isinstance(value, (list, tuple)):
        raise ValueError(f"must be a list or tuple of str, not {type(value).__name__}")
    return tuple(dict.fromkeys(_key(each) for each in value))


def _arguments(value: Any) -> Mapping[str, Any]:
    checked = headers.check(value)
    for name in checked:
        if len(name.encode()) > 128:
            raise ValueError(f"names are str of 1 to 128 bytes in UTF-8, not {reprlib.repr(name)}")
    return checked


def _binding_arguments(value: Any) -> Mapping[str, Any]:
    checked = _arguments(value)
    if checked.get("x-match", "all") not in _MATCHES:
        raise ValueError(f"x-match must be one of {', '.join(_MATCHES)}, not {reprlib.repr(checked['x-match'])}")
    return checked


def _stream_offset(value: Any) -> str | int | float:
    """Return names and intervals as str, an offset as int, a point in time as float seconds since the epoch."""
    if isinstance(value, str) and (value in ("first", "last", "next") or _INTERVAL.fullmatch(value)):
        return value
    if isinstance(value, datetime):
        if value.tzinfo is None:
            raise ValueError("a datetime needs its time zone: datetime(..., tzinfo=timezone.utc)")
        value = value.timestamp()
    if isinstance(value, float) and math.isfinite(value) and 0 <= value <= _MAX_TIMESTAMP:
        return value
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= _MAX_INT:
        return value
    raise ValueError(
        "must be first, last, next, an offset (int), a datetime, seconds since the epoch (float), or an interval such "
        f"as 1h, not {reprlib.repr(value)}"
    )


_COUNT: Final = integer(1, _MAX_INT)

#: every key of this adapter
EXTENSIONS: Final[Mapping[str, Extension]] = MappingProxyType(
    {
        # --- exchanges
        EXCHANGE_TYPE: Extension(
            "both", _exchange_type, "`topic`, `direct`, `fanout`, `headers`, or the `x-...` of a plugin", "`topic`",
            "type of the exchange, if it is declared",
        ),
        EXCHANGE_DURABLE: Extension(
            "both", boolean, "bool", "`True`", "whether a declared exchange survives a restart of the broker"
        ),
        EXCHANGE_AUTO_DELETE: Extension(
            "both", boolean, "bool", "`False`", "whether a declared exchange is deleted with its last binding"
        ),
        EXCHANGE_INTERNAL: Extension(
            "subscribe", boolean, "bool", "`False`",
            "whether a declared exchange accepts messages from other exchanges only",
        ),
        ALTERNATE_EXCHANGE: Extension(
            "both", _name, "name of an exchange", "none",
            "receives the messages of a declared exchange that match no binding; it is not declared itself",
        ),
        EXCHANGE_ARGUMENTS: Extension(
            "both", _arguments, "mapping of names to values", "none",
            "further arguments of a declared exchange, as a plugin asks for them: `{\"x-delayed-type\": \"topic\"}`",
        ),
        DECLARE: Extension(
            "both", _one_of("create", "passive", "none"), "`create`, `passive`, `none`", "`create`",
            "`create`: missing exchanges, queues and bindings are declared; `passive`: they must exist, and nothing is "
            "bound (the meaning of `autocreate=False`); `none`: existence is not checked, either",
        ),
        ENVELOPE: Extension(
            "publish", boolean, "bool", "`False`",
            "properties and headers travel in front of the payload, for clients of MQTT 3.1.1 with the setting "
            "`envelope`; messages that were received that way have it set, and their replies are sent that way",
        ),
        TYPE: Extension(
            "publish", _property, "str of at most 255 bytes", "none",
            "property `type`: the application's name for this kind of message; received messages have it",
        ),
        APP_ID: Extension(
            "publish", _property, "str of at most 255 bytes", "none",
            "property `app-id`: the application that publishes; received messages have it, and `userId`: the "
            "broker's user that published",
        ),
        # --- bindings
        BINDINGS: Extension(
            "subscribe", _bindings, "list of str", "none",
            "further patterns beside the channel's own; with a channel extension, further binding keys",
        ),
        BINDING_ARGUMENTS: Extension(
            "subscribe", _binding_arguments, "mapping of header names to values", "none",
            "user `headers` that a message must have; for headers exchanges; `x-match`: `all` (default), `any`",
        ),
        # --- queues
        QUEUE_TYPE: Extension(
            "subscribe", _one_of("classic", "quorum", "stream"), "`classic`, `quorum`, `stream`", "the broker's",
            "type of the queue; required for a stream even if it exists",
        ),
        DURABLE: Extension(
            "subscribe", boolean, "bool", "`True`", "whether a named queue survives a restart of the broker"
        ),
        EXCLUSIVE: Extension(
            "subscribe", boolean, "bool", "`False`",
            "whether a named queue is for this connection only, and deleted with it",
        ),
        AUTO_DELETE: Extension(
            "subscribe", boolean, "bool", "`False`", "whether a named queue is deleted with its last consumer"
        ),
        SINGLE_ACTIVE_CONSUMER: Extension(
            "subscribe", boolean, "bool", "`False`",
            "one consumer receives all messages; the next one takes over when it ends",
        ),
        CONSUMER_PRIORITY: Extension(
            "subscribe", integer(-(2**31), 2**31 - 1), "int", "0",
            "a consumer receives messages only while all consumers of higher priority are out of credit",
        ),
        DELIVERY_LIMIT: Extension(
            "subscribe", _COUNT, "int, from 1", "the broker's",
            "requeues to a quorum queue before the broker discards a message, or sends it to `deadLetterExchange`",
        ),
        MAX_PRIORITY: Extension(
            "subscribe", integer(0, 9), "int, 0 to 9", "setting `max_priority`",
            "levels of `priority` in a classic queue (`x-max-priority`); 0 for none, first in, first out",
        ),
        MESSAGE_TIME_TO_LIVE: Extension(
            "subscribe", _seconds, "seconds, above 0", "none", "how long a message stays in the queue"
        ),
        QUEUE_EXPIRES: Extension(
            "subscribe", _seconds, "seconds, above 0", "never",
            "a named queue without consumers for this time is deleted, with its messages",
        ),
        MAX_LENGTH: Extension("subscribe", _COUNT, "int, from 1", "none", "largest number of messages in a queue"),
        MAX_LENGTH_BYTES: Extension(
            "subscribe", _COUNT, "int, from 1", "none", "largest size of the payloads in a queue or stream, bytes"
        ),
        QUEUE_OVERFLOW: Extension(
            "both", _one_of("drop-head", "reject-publish", "reject-publish-dlx"),
            "`drop-head`, `reject-publish`, `reject-publish-dlx`", "`drop-head`",
            "a full queue drops its oldest message, or refuses the new one (`PublishRefusedError`). When publishing: "
            "states that a queue of another program refuses, so that the message is not sent again",
        ),
        DEAD_LETTER_EXCHANGE: Extension(
            "subscribe", _name, "name of an exchange, `amq.default` for the default one", "none",
            "receives, from the *broker*, messages that expire, overflow or exceed `deliveryLimit`; it is not declared",
        ),
        DEAD_LETTER_ROUTING_KEY: Extension(
            "subscribe", _key, "routing key", "the message's own",
            "routing key of messages sent to `deadLetterExchange`",
        ),
        QUEUE_ARGUMENTS: Extension(
            "subscribe", _arguments, "mapping of names to values", "none",
            "further arguments of a declared queue, by RabbitMQ's names: `{\"x-queue-leader-locator\": \"balanced\"}`",
        ),
        # --- streams
        MAX_AGE: Extension("subscribe", _seconds, "seconds, above 0", "none", "how long a stream keeps messages"),
        STREAM_SEGMENT_BYTES: Extension(
            "subscribe", integer(1, 3_000_000_000), "int, from 1", "the broker's",
            "size of a stream's files, bytes: the smallest amount it deletes at once",
        ),
        STREAM_OFFSET: Extension(
            "subscribe", _stream_offset,
            "`first`, `last`, `next`, an offset (int), a time (datetime, or float seconds since the epoch), or an "
            "interval such as `1h` (`Y M D h m s`)",
            "`next`",
            "position at which reading a stream begins; received messages have their own",
        ),
        # --- redelivery
        REDELIVERY_DELAY: Extension(
            "subscribe", _seconds, "seconds, above 0", "none: at once",
            "a rejected message is redelivered after this time, which doubles with each further rejection",
        ),
        REDELIVERY_DELAY_MAX: Extension(
            "subscribe", _seconds, "seconds, above 0", "60", "the longest delay of a redelivery"
        ),
    }
)  # fmt: skip

PUBLISH_EXTENSIONS: Final[Mapping[str, Callable[[Any], Any]]] = MappingProxyType(
    {key: extension.check for key, extension in EXTENSIONS.items() if extension.side != "subscribe"}
)
SUBSCRIBE_EXTENSIONS: Final[Mapping[str, Callable[[Any], Any]]] = MappingProxyType(
    {key: extension.check for key, extension in EXTENSIONS.items() if extension.side != "publish"}
)
