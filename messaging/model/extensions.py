"""Checks extensions of a context and compiles them to options (RFC 6.3).

``MessageContext.extensions`` is an open mapping. This module defines type, range and meaning of each key for all
adapters. A context with an extension that the instance does not announce is refused before anything is sent (MSG090,
MSG100). The error for a value of the wrong type or range names the key.
"""

from __future__ import annotations

import operator
import reprlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from types import MappingProxyType
from typing import Any, Final, Literal, NamedTuple

from messaging.errors import (
    ArgumentError,
    InvalidChannelError,
    InvalidExtensionError,
    InvalidHeaderError,
    UnsupportedFeatureError,
)
from messaging.errors.text import did_you_mean
from messaging.model import channels, headers
from messaging.model.capabilities import Capabilities
from messaging.model.context import MessageContext
from messaging.model.features import Features

Overflow = Literal["block", "drop_oldest", "drop_latest", "fail"]

OVERFLOW_POLICIES: Final = ("block", "drop_oldest", "drop_latest", "fail")
EMPTY: Final[Mapping[str, Any]] = MappingProxyType({})
#: about 30 years: a duration that every protocol and every wait of this project can represent
MAX_SECONDS: Final = 1e9
#: the maximum of an AMQP prefetch count and of an MQTT Receive Maximum
MAX_PREFETCH: Final = 65_535
#: bounds of user headers that every protocol of this project can carry
MAX_HEADERS: Final = headers.MAX_HEADERS
MAX_HEADER_BYTES: Final = headers.MAX_HEADER_BYTES
#: seconds for which ``deduplicate=True`` knows the ids of settled messages
DEDUPLICATE_SECONDS: Final = 3600.0
#: bytes of a message id: a short string of AMQP
MAX_MESSAGE_ID: Final = 255


def _empty() -> Mapping[str, Any]:
    return EMPTY


@dataclass(frozen=True, slots=True)
class PublishOptions:
    """The compiled extensions of a context for publishing; durations in seconds."""

    #: "0" unconfirmed, "1" at least once, "2" exactly once; raised to "1" by ``guaranteed_delivery``
    qos: str = "0"
    guaranteed_delivery: bool = False
    guaranteed_ordering: bool = False
    last_will: bool = False
    retain: bool = False
    time_to_live: float | None = None
    priority: int | None = None
    #: checked, see :mod:`messaging.model.headers`
    headers: Mapping[str, Any] = field(default_factory=_empty)
    #: fail with ``UnroutableError`` if the message has no route
    mandatory: bool = False
    #: publish deadline; ``None``: that of the instance
    timeout: float | None = None
    autocreate: bool = True
    #: checked values of the adapter's own extensions
    custom: Mapping[str, Any] = field(default_factory=_empty)
    #: message id set by the application, sent with every ``qos``; ``None``: one is generated
    message_id: str | None = None


_NAMES: Final = [each.name for each in fields(PublishOptions)]
#: all fields but ``message_id``, which is the last one
_shared: Final = operator.attrgetter(*_NAMES[:-1])
_before_headers: Final = operator.attrgetter(*_NAMES[: _NAMES.index("headers")])
_behind_headers: Final = operator.attrgetter(*_NAMES[_NAMES.index("headers") + 1 :])


@dataclass(frozen=True, slots=True)
class SubscribeOptions:
    """The compiled extensions of a context for subscribing."""

    qos: str = "0"
    auto_acknowledge: bool = False
    #: a message is delivered after the previous one is settled, so that a redelivery keeps its place
    guaranteed_ordering: bool = False
    #: subscribers that name the same queue compete
    queue: str | None = None
    autocreate: bool = True
    dead_letter_channel: str | None = None
    max_deliveries: int | None = None
    #: seconds for which the ids of settled messages are known; ``None``: not at all
    deduplicate: float | None = None
    #: unsettled deliveries the broker may send ahead
    prefetch: int = 1024
    #: messages between broker and observer
    buffer_size: int = 1024
    overflow: Overflow = "block"
    custom: Mapping[str, Any] = field(default_factory=_empty)


def _shown(value: Any) -> str:
    """Return a short representation of ``value`` for an error text. Never raises."""
    try:
        return reprlib.repr(value)
    except Exception:  # noqa: BLE001  # the repr of the value failed
        return f"a {type(value).__name__}"


# checks that adapters use for their own extensions as well


def boolean(value: Any) -> bool:
    """Return ``value`` if it is a bool."""
    if not isinstance(value, bool):
        raise ValueError(f"must be True or False, not {_shown(value)}")
    return value


def _number(value: Any, what: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError(f"must be {what}, not {_shown(value)}")
    return value


def seconds(value: Any) -> float:
    """Return ``value`` as a float if it is a number of seconds above 0."""
    number = _number(value, "a number of seconds")
    if not 0 < number <= MAX_SECONDS:
        raise ValueError(f"must be a number of seconds above 0 and at most {MAX_SECONDS:g}, not {_shown(value)}")
    return float(number)


def integer(low: int, high: int | None) -> Callable[[Any], int]:
    """Return a check for an int from ``low`` to ``high``; ``None``: without an upper bound."""
    wanted = f"an int from {low} to {high}" if high is not None else f"an int of at least {low}"

    def check(value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or value < low or (high is not None and value > high):
            raise ValueError(f"must be {wanted}, not {_shown(value)}")
        return value

    return check


def _qos(value: Any) -> str:
    # users of MQTT write an int; RFC 6.3 says String
    text = str(value) if isinstance(value, int) and not isinstance(value, bool) else value
    if text not in ("0", "1", "2"):
        raise ValueError(f"must be '0', '1' or '2', not {_shown(value)}")
    return str(text)


def _deduplicate(value: Any) -> float | bool:
    if value is True:
        return DEDUPLICATE_SECONDS
    return value if value is False else seconds(value)


def _overflow(value: Any) -> str:
    if value not in OVERFLOW_POLICIES:
        raise ValueError(f"must be one of {', '.join(OVERFLOW_POLICIES)}, not {_shown(value)}")
    return str(value)


def _queue(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"must be a str, not {type(value).__name__}")
    try:
        channels.check_name(value)
    except InvalidChannelError as error:
        raise ValueError(str(error).replace("channel", "queue name", 1)) from None
    if channels.SEPARATOR in value or len(value.encode()) > 200:
        raise ValueError(f"must have no '/' and at most 200 bytes in UTF-8, not {_shown(value)}")
    return value


def _channel(value: Any) -> str:
    try:
        return channels.check_name(value)
    except InvalidChannelError as error:
        raise ValueError(str(error)) from None


def _message_id(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"must be a str, not {type(value).__name__}")
    # each message id is checked, and most are printable ASCII
    bad = None if value.isascii() and value.isprintable() else channels.forbidden_character(value)
    if bad is not None:
        raise ValueError(f"holds {bad}")
    size = len(value.encode())
    if not 0 < size <= MAX_MESSAGE_ID:
        raise ValueError(f"must have 1 to {MAX_MESSAGE_ID} bytes in UTF-8, not {size}")
    return value


class CommonExtension(NamedTuple):
    """An extension that all adapters share; they add their own, see ``adapter.Adapter``."""

    #: returns the value in its canonical form, or raises ``ValueError`` with a text for users
    check: Callable[[Any], Any]
    #: the only side for which it has a meaning
    only: Literal["publish", "subscribe"] | None = None
    #: the value that requests nothing and needs no feature
    default: bool | None = None
    #: a subscription with it needs acknowledgement
    needs_acknowledgement: bool = False


EXTENSIONS: Final[Mapping[str, CommonExtension]] = MappingProxyType(
    {
        Features.EXTENSION_GUARANTEED_DELIVERY: CommonExtension(boolean, default=False, needs_acknowledgement=True),
        Features.EXTENSION_GUARANTEED_ORDERING: CommonExtension(boolean, default=False, needs_acknowledgement=True),
        Features.EXTENSION_QOS: CommonExtension(_qos),
        Features.EXTENSION_AUTOCREATE: CommonExtension(boolean, default=True),
        Features.EXTENSION_LAST_WILL: CommonExtension(boolean, "publish", default=False),
        Features.EXTENSION_RETAIN: CommonExtension(boolean, "publish", default=False),
        Features.EXTENSION_TIME_TO_LIVE: CommonExtension(seconds, "publish"),
        Features.EXTENSION_PRIORITY: CommonExtension(integer(0, 9), "publish"),
        Features.EXTENSION_HEADERS: CommonExtension(headers.check, "publish"),
        Features.EXTENSION_MANDATORY: CommonExtension(boolean, "publish", default=False),
        Features.EXTENSION_TIMEOUT: CommonExtension(seconds, "publish"),
        Features.EXTENSION_STORE_AND_FORWARD: CommonExtension(boolean, "publish", default=False),
        Features.EXTENSION_MESSAGE_ID: CommonExtension(_message_id, "publish"),
        Features.EXTENSION_AUTO_ACKNOWLEDGE: CommonExtension(
            boolean, "subscribe", default=False, needs_acknowledgement=True
        ),
        Features.EXTENSION_QUEUE: CommonExtension(_queue, "subscribe"),
        Features.EXTENSION_DEAD_LETTER_CHANNEL: CommonExtension(_channel, "subscribe"),
        Features.EXTENSION_MAX_DELIVERIES: CommonExtension(integer(1, None), "subscribe", needs_acknowledgement=True),
        Features.EXTENSION_DEDUPLICATE: CommonExtension(_deduplicate, "subscribe", default=False),
        Features.EXTENSION_PREFETCH: CommonExtension(integer(1, MAX_PREFETCH), "subscribe", needs_acknowledgement=True),
        Features.EXTENSION_BUFFER_SIZE: CommonExtension(integer(1, None), "subscribe"),
        Features.EXTENSION_OVERFLOW: CommonExtension(_overflow, "subscribe"),
    }
)

#: extension key -> check of its value
CHECKS: Final[Mapping[str, Callable[[Any], Any]]] = MappingProxyType(
    {key: each.check for key, each in EXTENSIONS.items()}
)
#: Keys with a meaning for one side only. A context may have keys of both sides. The methods of ``Messaging`` that take
#: extensions as keywords refuse those of the other side.
PUBLISH_ONLY: Final = frozenset(key for key, each in EXTENSIONS.items() if each.only == "publish")
SUBSCRIBE_ONLY: Final = frozenset(key for key, each in EXTENSIONS.items() if each.only == "subscribe")

_QOS_CONTRADICTION: Final = "'0' is send-and-forget and contradicts {}; use '1' or leave it out"

#: Keys of received messages. They are ignored unless the adapter accepts them as an extension of this side, so that a
#: received message can be published again unchanged. For ``messageId``, which is an extension, see :func:`requested`.
RECEIVED_ONLY: Final = frozenset({"timestamp", "redelivered", "streamOffset", "packetId", "type", "appId", "userId"})


def check_extensions(
    extensions: Mapping[str, Any], capabilities: Capabilities, *, publishing: bool = False
) -> dict[str, Any]:
    """Return the extensions with checked values.

    With ``publishing``, keys that both subscribing and received messages use are ignored.

    Raises:
        UnsupportedFeatureError: a key is unknown or not announced by ``capabilities``.
        InvalidExtensionError: a value has the wrong type or range; ``InvalidHeaderError`` for headers.
    """
    if not isinstance(extensions, Mapping):
        raise ArgumentError(f"extensions must be a mapping of str to values, not {type(extensions).__name__}")
    checked: dict[str, Any] = {}
    features = capabilities.features
    for key, value in extensions.items():
        check = CHECKS.get(key) or capabilities.publish_extensions.get(key)
        if check is None and publishing and key in RECEIVED_ONLY and key in capabilities.subscribe_extensions:
            continue
        check = check or capabilities.subscribe_extensions.get(key)
        # a packet id of a received message is a number: ``True`` asks for them
        if check is None and key in RECEIVED_ONLY and not (key == "packetId" and value is True):
            continue
        if check is None:
            supported = known(capabilities)
            hint = did_you_mean(str(key), supported)
            text = f"unknown extension; {hint}" if hint else "unknown extension"
            raise UnsupportedFeatureError(str(key), capabilities.name, text, supported=supported)
        checked[key] = _checked(key, check, value)
        if key not in features and not (key in EXTENSIONS and checked[key] is EXTENSIONS[key].default):
            raise capabilities.lacks(key, supported=known(capabilities))
    _check_header_types(checked.get(Features.EXTENSION_HEADERS, EMPTY), capabilities)
    qos = checked.get(Features.EXTENSION_QOS)
    if qos is not None and qos not in capabilities.qos_levels:
        raise UnsupportedFeatureError(
            f"qos={qos}", capabilities.name, f"qos levels here: {', '.join(capabilities.qos_levels)}"
        )
    return checked


def _check_header_types(given: Mapping[str, Any], capabilities: Capabilities) -> None:
    """Refuse header values that the protocol of ``capabilities`` cannot carry."""
    if headers.uncarried(given, headers.TEXT) is None:  # the common case
        return
    name = headers.uncarried(given, capabilities.header_types)
    if name is not None:
        raise InvalidHeaderError(
            Features.EXTENSION_HEADERS,
            f"the value of {name[:60]!r} is a {type(given[name]).__name__}; {capabilities.name} carries "
            f"{headers.described(capabilities.header_types)}: make it a str",
        )


def _checked(key: str, check: Callable[[Any], Any], value: Any) -> Any:
    try:
        return check(value)
    except Exception as error:  # noqa: BLE001
        # a check raises ValueError with a text for users; any other exception comes from the value itself
        text = str(error) if isinstance(error, ValueError) else f"cannot be read: {type(error).__name__}"
        kind = InvalidHeaderError if key == Features.EXTENSION_HEADERS else InvalidExtensionError
        raise kind(key, text) from None


def carried_headers(received: Mapping[str, Any], capabilities: Capabilities) -> Mapping[str, Any]:
    """Return received headers as ``capabilities`` can publish them, see :func:`messaging.model.headers.carried`."""
    is_text = headers.uncarried(received, headers.TEXT) is None  # the common case
    return headers.carried(received, headers.TEXT if is_text else capabilities.header_types)


def requested(context: MessageContext, capabilities: Capabilities) -> Mapping[str, Any]:
    """Return the extensions of ``context`` to publish with.

    A received message keeps its message id, and its headers as :func:`carried_headers` returns them. It gets a new
    message id if the instance lacks that feature, or if applications may not set such an id.
    """
    extensions = context.extensions
    if not context.is_received:
        return extensions
    told = extensions.get(Features.EXTENSION_HEADERS)
    if isinstance(told, Mapping) and (carried := carried_headers(told, capabilities)) is not told:
        extensions = {**extensions, Features.EXTENSION_HEADERS: carried}
    key = Features.EXTENSION_MESSAGE_ID
    if key not in extensions:
        return extensions
    if key in capabilities.features:
        try:
            _message_id(extensions[key])
        except ValueError:
            pass
        else:
            return extensions
    return {each: value for each, value in extensions.items() if each != key}


def identified(options: PublishOptions, message_id: Any) -> PublishOptions:
    """Return a copy of ``options`` with a message id; raises ``InvalidExtensionError`` for an invalid one."""
    checked = _checked(Features.EXTENSION_MESSAGE_ID, _message_id, message_id)
    # takes half the time of dataclasses.replace
    return PublishOptions(*(*_shared(options), checked))


def with_headers(options: PublishOptions, added: Mapping[str, str]) -> PublishOptions:
    """Return a copy of ``options`` with further headers; raises ``InvalidHeaderError`` for invalid ones."""
    own = options.headers
    merged = {**own, **added} if own else {**added}
    # of most messages there are a few short headers in ASCII
    size = 0
    for name, value in merged.items():
        if not (name and type(value) is str and name.isascii() and value.isascii()):
            break
        if not (name.isprintable() and value.isprintable()):
            break
        size += len(name) + len(value)
    else:
        if len(merged) <= MAX_HEADERS and size <= MAX_HEADER_BYTES:
            return _copied(options, MappingProxyType(merged))
    key = Features.EXTENSION_HEADERS
    return _copied(options, _checked(key, CHECKS[key], merged))


def _copied(options: PublishOptions, checked_headers: Mapping[str, Any]) -> PublishOptions:
    # takes half the time of dataclasses.replace
    return PublishOptions(*(*_before_headers(options), checked_headers, *_behind_headers(options)))


def known(capabilities: Capabilities) -> list[str]:
    """Return the extension keys that ``capabilities`` announces, sorted."""
    every = {*CHECKS, *capabilities.publish_extensions, *capabilities.subscribe_extensions}
    return sorted(every & capabilities.features)


def subscribing_only(capabilities: Capabilities) -> frozenset[str]:
    """Return the extension keys without a meaning for publishing."""
    return SUBSCRIBE_ONLY | (capabilities.subscribe_extensions.keys() - capabilities.publish_extensions.keys())


def publishing_only(capabilities: Capabilities) -> frozenset[str]:
    """Return the extension keys without a meaning for subscribing."""
    return PUBLISH_ONLY | (capabilities.publish_extensions.keys() - capabilities.subscribe_extensions.keys())


def publish_options(extensions: Mapping[str, Any], capabilities: Capabilities) -> PublishOptions:
    """Compile the extensions of a context for publishing. Raises as :func:`check_extensions`."""
    values = check_extensions(extensions, capabilities, publishing=True)
    guaranteed = values.get(Features.EXTENSION_GUARANTEED_DELIVERY, False)
    mandatory = values.get(Features.EXTENSION_MANDATORY, False)
    qos = values.get(Features.EXTENSION_QOS)
    if qos is None:
        qos = capabilities.default_qos
        if (guaranteed or mandatory) and qos == "0":
            qos = "1"
    elif qos == "0" and (guaranteed or mandatory):
        key = Features.EXTENSION_GUARANTEED_DELIVERY if guaranteed else Features.EXTENSION_MANDATORY
        raise InvalidExtensionError(Features.EXTENSION_QOS, _QOS_CONTRADICTION.format(key))
    return PublishOptions(
        qos=qos,
        guaranteed_delivery=guaranteed,
        guaranteed_ordering=values.get(Features.EXTENSION_GUARANTEED_ORDERING, False),
        last_will=values.get(Features.EXTENSION_LAST_WILL, False),
        retain=values.get(Features.EXTENSION_RETAIN, False),
        time_to_live=values.get(Features.EXTENSION_TIME_TO_LIVE),
        priority=values.get(Features.EXTENSION_PRIORITY),
        headers=values.get(Features.EXTENSION_HEADERS, EMPTY),
        mandatory=mandatory,
        timeout=values.get(Features.EXTENSION_TIMEOUT),
        autocreate=values.get(Features.EXTENSION_AUTOCREATE, True),
        message_id=values.get(Features.EXTENSION_MESSAGE_ID),
        custom=_custom(values, capabilities.publish_extensions),
    )


def subscribe_options(
    extensions: Mapping[str, Any], capabilities: Capabilities, settings: Any, *, acknowledging: bool = False
) -> SubscribeOptions:
    """Compile the extensions of a context for subscribing. Raises as :func:`check_extensions`.

    Args:
        extensions: of the context.
        capabilities: of the instance.
        settings: of the instance (``Settings``): the defaults of buffer, overflow and prefetch.
        acknowledging: whether an acknowledge builder made the context, which therefore needs acknowledgement.
    """
    values = check_extensions(extensions, capabilities)
    ordered = values.get(Features.EXTENSION_GUARANTEED_ORDERING, False)
    buffer_size = values.get(Features.EXTENSION_BUFFER_SIZE, settings.buffer_size)
    overflow = values.get(Features.EXTENSION_OVERFLOW, settings.overflow)
    overflow_chosen = Features.EXTENSION_OVERFLOW in values or "overflow" in settings.model_fields_set
    # a policy that drops needs the surplus messages: the broker must not hold them back
    default_prefetch = min(buffer_size, MAX_PREFETCH) if overflow == "block" else MAX_PREFETCH
    prefetch = values.get(Features.EXTENSION_PREFETCH, settings.prefetch or default_prefetch)
    qos = values.get(Features.EXTENSION_QOS) or capabilities.default_qos
    if qos == "0":
        wanting = [key for key, each in EXTENSIONS.items() if each.needs_acknowledgement and values.get(key)]
        if Features.EXTENSION_QOS in values:
            if wanting:
                raise InvalidExtensionError(
                    Features.EXTENSION_QOS,
                    f"'0' is without acknowledgement and contradicts {wanting[0]}; use '1' or leave it out",
                )
        # with an explicit "0" only messages that are invalid, or refused by a filter, are dead-lettered
        elif acknowledging or wanting or Features.EXTENSION_DEAD_LETTER_CHANNEL in values:
            qos = "1" if "1" in capabilities.qos_levels else qos
    if qos == "0" and overflow == "block" and overflow_chosen:
        raise UnsupportedFeatureError(
            f"{Features.EXTENSION_OVERFLOW}=block",
            capabilities.name,
            "without acknowledgement (qos 0) nothing can hold messages back; subscribe with qos '1', or choose "
            "drop_oldest, drop_latest or fail",
        )
    return SubscribeOptions(
        qos=qos,
        auto_acknowledge=values.get(Features.EXTENSION_AUTO_ACKNOWLEDGE, False),
        guaranteed_ordering=ordered,
        queue=values.get(Features.EXTENSION_QUEUE),
        autocreate=values.get(Features.EXTENSION_AUTOCREATE, True),
        dead_letter_channel=values.get(Features.EXTENSION_DEAD_LETTER_CHANNEL),
        max_deliveries=values.get(Features.EXTENSION_MAX_DELIVERIES),
        deduplicate=values.get(Features.EXTENSION_DEDUPLICATE) or None,
        # with one unsettled delivery at a time no message overtakes a redelivery
        prefetch=1 if ordered else prefetch,
        buffer_size=buffer_size,
        overflow=overflow,
        custom=_custom(values, capabilities.subscribe_extensions),
    )


def _custom(values: Mapping[str, Any], keys: Iterable[str]) -> Mapping[str, Any]:
    own = {key: values[key] for key in keys if key in values}
    return MappingProxyType(own) if own else EMPTY
