"""The exchanges, queues, bindings and consumers that a context asks for, compiled from its extensions.

Exchanges and queues have a typed core, and mappings of arguments that are passed to the broker: ``QUEUE_NAMES`` and
``EXCHANGE_NAMES`` list the extensions that become arguments. The extensions ``queueArguments`` and
``exchangeArguments`` add arguments by RabbitMQ's own names. Extensions that contradict each other are refused, with the
key that does not fit and a remedy. This module does no I/O.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from typing import Any, Final, Literal, NamedTuple, NoReturn

from messaging.errors import InvalidChannelError, InvalidExtensionError
from messaging.execution import doubled
from messaging.model import EMPTY, Features, PublishPlan, SubscriptionSpec, channels
from messaging_adapters.amqp import extensions as keys
from messaging_adapters.amqp import names

Declare = Literal["create", "passive", "none"]

#: RabbitMQ's name of the exchange without name, which routes by the names of queues
DEFAULT_EXCHANGE: Final = "amq.default"
#: exchanges of type headers that every virtual host has
_HEADERS_EXCHANGES: Final = ("amq.headers", "amq.match")
#: longest delay of a redelivery unless said otherwise, seconds
_DELAY_MAX: Final = 60.0
#: queues that refuse messages when they are full and are remembered
_MAX_QUEUES: Final = 1024

_EXCHANGE_KEYS: Final = (
    keys.EXCHANGE_TYPE,
    keys.EXCHANGE_DURABLE,
    keys.EXCHANGE_AUTO_DELETE,
    keys.EXCHANGE_INTERNAL,
    keys.ALTERNATE_EXCHANGE,
    keys.EXCHANGE_ARGUMENTS,
)
_BINDING_KEYS: Final = (keys.BINDINGS, keys.BINDING_ARGUMENTS)


def _milliseconds(seconds: float) -> int:
    return max(1, round(seconds * 1000))


def _exchange_name(name: str) -> str:
    return "" if name == DEFAULT_EXCHANGE else name


#: a function that converts the value of an extension to that of its argument; ``None`` if they are the same
Convert = Callable[[Any], Any] | None

#: name and conversion of the arguments, by extension
EXCHANGE_NAMES: Final[Mapping[str, tuple[str, Convert]]] = {keys.ALTERNATE_EXCHANGE: ("alternate-exchange", None)}
QUEUE_NAMES: Final[Mapping[str, tuple[str, Convert]]] = {
    keys.MESSAGE_TIME_TO_LIVE: ("x-message-ttl", _milliseconds),
    keys.QUEUE_EXPIRES: ("x-expires", _milliseconds),
    keys.SINGLE_ACTIVE_CONSUMER: ("x-single-active-consumer", None),
    keys.DELIVERY_LIMIT: ("x-delivery-limit", None),
    keys.MAX_LENGTH: ("x-max-length", None),
    keys.MAX_LENGTH_BYTES: ("x-max-length-bytes", None),
    keys.QUEUE_OVERFLOW: ("x-overflow", None),
    keys.DEAD_LETTER_EXCHANGE: ("x-dead-letter-exchange", _exchange_name),
    keys.DEAD_LETTER_ROUTING_KEY: ("x-dead-letter-routing-key", None),
    keys.STREAM_SEGMENT_BYTES: ("x-stream-max-segment-size-bytes", None),
    keys.MAX_AGE: ("x-max-age", lambda seconds: f"{math.ceil(seconds)}s"),
}
#: the extensions that are for declarations only; the type may also be given for a queue that exists
_QUEUE_KEYS: Final = (
    *QUEUE_NAMES,
    keys.QUEUE_ARGUMENTS,
    keys.MAX_PRIORITY,
    keys.DURABLE,
    keys.EXCLUSIVE,
    keys.AUTO_DELETE,
)
#: extensions by the names of their arguments, which further arguments must not have
_TAKEN: Final = {
    **{name: key for key, (name, _) in {**EXCHANGE_NAMES, **QUEUE_NAMES}.items()},
    "x-queue-type": keys.QUEUE_TYPE,
    "x-max-priority": keys.MAX_PRIORITY,
}
#: the extensions that have no meaning for the queue of a single subscription
_NAMED_ONLY: Final = (
    keys.DURABLE,
    keys.EXCLUSIVE,
    keys.AUTO_DELETE,
    keys.SINGLE_ACTIVE_CONSUMER,
    keys.CONSUMER_PRIORITY,
    keys.QUEUE_EXPIRES,
    keys.REDELIVERY_DELAY,
    keys.REDELIVERY_DELAY_MAX,
)
_STREAM_ONLY: Final = (keys.MAX_AGE, keys.STREAM_SEGMENT_BYTES, keys.STREAM_OFFSET)
_NOT_FOR_QUORUM: Final = {
    keys.EXCLUSIVE: "a quorum queue is shared",
    keys.AUTO_DELETE: "a quorum queue stays; queueExpires deletes it once it is not used",
    keys.MAX_PRIORITY: "a quorum queue has no levels of priority to choose from",
}
_NOT_FOR_STREAM: Final = {
    keys.EXCLUSIVE: "a stream is shared",
    keys.AUTO_DELETE: "a stream stays",
    keys.MAX_PRIORITY: "a stream keeps the order of publishing",
    keys.CONSUMER_PRIORITY: "every consumer of a stream gets everything",
    keys.SINGLE_ACTIVE_CONSUMER: "every consumer of a stream gets everything",
    keys.DELIVERY_LIMIT: "nothing is returned to a stream; use maxDeliveries",
    keys.MESSAGE_TIME_TO_LIVE: "a stream forgets by maxAge and maxLengthBytes",
    keys.QUEUE_EXPIRES: "a stream stays",
    keys.MAX_LENGTH: "a stream is bounded by maxAge and maxLengthBytes",
    keys.QUEUE_OVERFLOW: "a stream drops its oldest messages",
    keys.DEAD_LETTER_EXCHANGE: "nothing leaves a stream; use deadLetterChannel",
    keys.DEAD_LETTER_ROUTING_KEY: "nothing leaves a stream; use deadLetterChannel",
    keys.REDELIVERY_DELAY: "nothing is returned to a stream",
    keys.REDELIVERY_DELAY_MAX: "nothing is returned to a stream",
}


class ExchangeSpec(NamedTuple):
    """An exchange, and its declaration if it is missing. The default exchange has no name and always exists."""

    name: str
    kind: str = "topic"
    durable: bool = True
    auto_delete: bool = False
    internal: bool = False
    arguments: Mapping[str, Any] = EMPTY
    declare: Declare = "create"


class QueueSpec(NamedTuple):
    """A queue, and its declaration if it is missing. A queue without a name belongs to its subscription."""

    name: str | None
    durable: bool = True
    exclusive: bool = False
    auto_delete: bool = False
    arguments: Mapping[str, Any] = EMPTY
    declare: Declare = "create"


class DelaySpec(NamedTuple):
    """The delay of rejected messages of a queue: ``first`` seconds, doubled each time, at most ``longest``."""

    first: float
    longest: float
    #: whether the queues of the delays are quorum queues
    quorum: bool

    def milliseconds(self, count: int) -> int:
        """Return the delay after ``count`` delayed redeliveries."""
        return _milliseconds(doubled(self.first, self.longest, count))


class AmqpDestination(NamedTuple):
    """The exchange and routing key that messages of one context are published to."""

    exchange: ExchangeSpec
    routing_key: str
    mandatory: bool = False


class QueueSource(NamedTuple):
    """The queue that a subscription consumes, and its bindings."""

    exchange: ExchangeSpec
    queue: QueueSpec
    #: binding keys; empty if nothing is bound
    bindings: tuple[str, ...]
    #: channel patterns of a subscription without extension
    patterns: tuple[str, ...]
    binding_arguments: Mapping[str, Any] = EMPTY
    consumer_arguments: Mapping[str, Any] = EMPTY
    #: the position at which reading begins; ``None`` unless the queue is a stream
    stream_offset: str | int | float | None = None
    delay: DelaySpec | None = None


def destination(plan: PublishPlan, exchange: str) -> AmqpDestination:
    """Return the destination of a publish plan; ``exchange`` is the exchange of channels without extension.

    Raises:
        InvalidExtensionError: extensions contradict each other.
    """
    options, custom = plan.options, plan.options.custom
    channel, extension = plan.channel, plan.channel_extension
    if extension is None and channel.startswith(f"{names.DIRECT_CHANNEL}/"):
        # the address is no queue, so a mandatory message would be returned
        return AmqpDestination(ExchangeSpec(""), names.reply_key(channel))
    if not custom and options.autocreate:  # the fast path
        if extension is None:
            return AmqpDestination(ExchangeSpec(exchange), names.routing_key(channel), options.mandatory)
        found = ExchangeSpec(_exchange_name(channel))
        return AmqpDestination(found, extension, options.mandatory)
    declare = _declare(custom, options.autocreate, _EXCHANGE_KEYS)
    found = _exchange(channel, extension, exchange, custom, declare)
    return AmqpDestination(found, names.routing_key(channel) if extension is None else extension, options.mandatory)


def source(spec: SubscriptionSpec, exchange: str, max_priority: int) -> QueueSource:
    """Compile a subscription; ``exchange`` and ``max_priority`` are the settings of these names.

    Raises:
        InvalidExtensionError: extensions contradict each other, or a further pattern is malformed or too long.
    """
    options, custom = spec.options, spec.options.custom
    declare = _declare(custom, options.autocreate, (*_EXCHANGE_KEYS, *_BINDING_KEYS, *_QUEUE_KEYS))
    found = _exchange(spec.channel, spec.channel_extension, exchange, custom, declare)
    if not found.name and spec.channel_extension != options.queue:
        _refuse(
            Features.EXTENSION_QUEUE,
            f"the default exchange delivers to queues by name: it must be {spec.channel_extension!r}, too",
        )
    _check_queue(spec)
    kind = custom.get(keys.QUEUE_TYPE)
    delay = None
    if (first := custom.get(keys.REDELIVERY_DELAY)) is not None:
        longest = custom.get(keys.REDELIVERY_DELAY_MAX, max(first, _DELAY_MAX))
        if longest < first:
            _refuse(keys.REDELIVERY_DELAY_MAX, f"must be at least the first delay, {first:g} seconds, not {longest:g}")
        delay = DelaySpec(first, longest, kind == "quorum")
    patterns, bindings = _bindings(spec, found)
    priority = custom.get(keys.CONSUMER_PRIORITY)
    return QueueSource(
        exchange=found,
        queue=_queue(spec, kind, declare, max_priority),
        bindings=bindings if declare == "create" else (),
        patterns=patterns,
        binding_arguments=custom.get(keys.BINDING_ARGUMENTS, EMPTY),
        consumer_arguments={"x-priority": priority} if priority else EMPTY,
        stream_offset=custom.get(keys.STREAM_OFFSET, "next") if kind == "stream" else None,
        delay=delay,
    )


def _refuse(key: str, why: str) -> NoReturn:
    raise InvalidExtensionError(key, why)


def _declare(custom: Mapping[str, Any], autocreate: bool, making: tuple[str, ...]) -> Declare:
    """Return how missing exchanges and queues are treated; the keys in ``making`` are for declarations only."""
    declare: Declare = custom.get(keys.DECLARE, "create" if autocreate else "passive")
    if declare == "create":
        if not autocreate:
            _refuse(keys.DECLARE, "'create' contradicts autocreate=False; leave one of them out")
        return declare
    for key in making:
        if key in custom:
            how = f"declare={declare!r}" if autocreate else "autocreate=False"
            _refuse(key, f"has no effect: with {how} nothing is declared or bound; leave one of them out")
    return declare


def _exchange(
    channel: str, extension: str | None, exchange: str, custom: Mapping[str, Any], declare: Declare
) -> ExchangeSpec:
    name = exchange if extension is None else _exchange_name(channel)
    for key in _EXCHANGE_KEYS if extension is None or not name else ():
        if key in custom:
            _refuse(
                key,
                "the default exchange is always there, as it is"
                if not name
                else f"channels without extension share the topic exchange {name!r}; name an exchange of your own: "
                "channel(exchange, routing_key)",
            )
    return ExchangeSpec(
        name,
        kind=custom.get(keys.EXCHANGE_TYPE, "topic"),
        durable=custom.get(keys.EXCHANGE_DURABLE, True),
        auto_delete=custom.get(keys.EXCHANGE_AUTO_DELETE, False),
        internal=custom.get(keys.EXCHANGE_INTERNAL, False),
        arguments=_arguments(custom, EXCHANGE_NAMES) | _further(custom, keys.EXCHANGE_ARGUMENTS) or EMPTY,
        declare=declare,
    )


def _arguments(custom: Mapping[str, Any], known: Mapping[str, tuple[str, Convert]]) -> dict[str, Any]:
    """Return the arguments that the extensions in ``known`` ask for.

    An argument that is off is left out: a queue that was declared without it is equal.
    """
    return {
        name: convert(custom[key]) if convert else custom[key]
        for key, (name, convert) in known.items()
        if custom.get(key, False) is not False
    }


def _further(custom: Mapping[str, Any], key: str) -> dict[str, Any]:
    """Return the arguments that the extension ``key`` gives by RabbitMQ's names."""
    further: Mapping[str, Any] = custom.get(key, EMPTY)
    for name in further:
        if name in _TAKEN:
            _refuse(key, f"{name!r} has an extension of its own: set {_TAKEN[name]!r}")
    return dict(further)


def _check_queue(spec: SubscriptionSpec) -> None:
    """Refuse extensions that a queue of this type does not have."""
    options, custom = spec.options, spec.options.custom
    kind = custom.get(keys.QUEUE_TYPE, "classic")
    if options.queue is None:
        for key in _NAMED_ONLY:
            if key in custom:
                _refuse(key, f"is for a queue with a name: set the extension {Features.EXTENSION_QUEUE!r} as well")
        if kind != "classic":
            _refuse(
                keys.QUEUE_TYPE,
                f"a {kind} needs a name: set the extension {Features.EXTENSION_QUEUE!r} as well",
            )
    if kind != "classic" and custom.get(keys.DURABLE) is False:
        _refuse(keys.DURABLE, f"a {kind} is always durable; leave it out, or use queueType 'classic'")
    for key, why in {"classic": {}, "quorum": _NOT_FOR_QUORUM, "stream": _NOT_FOR_STREAM}[kind].items():
        if custom.get(key):
            _refuse(key, f"contradicts queueType {kind!r}: {why}")
    for key in _STREAM_ONLY if kind != "stream" else ():
        if key in custom:
            _refuse(key, "is for streams: set queueType 'stream' as well")
    if kind != "quorum" and keys.DELIVERY_LIMIT in custom:
        _refuse(
            keys.DELIVERY_LIMIT, "only quorum queues count deliveries: set queueType 'quorum', or use maxDeliveries"
        )
    if kind == "quorum" and custom.get(keys.QUEUE_OVERFLOW) == "reject-publish-dlx":
        _refuse(keys.QUEUE_OVERFLOW, "a quorum queue knows 'drop-head' and 'reject-publish'")
    if keys.DEAD_LETTER_ROUTING_KEY in custom and keys.DEAD_LETTER_EXCHANGE not in custom:
        _refuse(keys.DEAD_LETTER_ROUTING_KEY, f"needs an exchange: set {keys.DEAD_LETTER_EXCHANGE!r} as well")
    if kind == "stream" and options.qos == "0":
        _refuse(Features.EXTENSION_QOS, "a stream is read with acknowledgement; use '1' or leave it out")
    if keys.REDELIVERY_DELAY_MAX in custom and keys.REDELIVERY_DELAY not in custom:
        _refuse(keys.REDELIVERY_DELAY_MAX, f"needs a first delay: set {keys.REDELIVERY_DELAY!r} as well")
    if keys.REDELIVERY_DELAY in custom:
        if options.guaranteed_ordering:
            _refuse(
                keys.REDELIVERY_DELAY,
                f"lets others overtake and so contradicts {Features.EXTENSION_GUARANTEED_ORDERING!r}; leave one out",
            )
        if options.qos == "0" or options.auto_acknowledge:
            _refuse(keys.REDELIVERY_DELAY, "nothing can be rejected with qos '0' or autoAcknowledge; leave one out")


def _queue(spec: SubscriptionSpec, kind: str | None, declare: Declare, max_priority: int) -> QueueSpec:
    custom = spec.options.custom
    arguments: dict[str, Any] = {"x-queue-type": kind} if kind is not None else {}
    arguments |= _arguments(custom, QUEUE_NAMES) | _further(custom, keys.QUEUE_ARGUMENTS)
    priority = custom.get(keys.MAX_PRIORITY, max_priority)
    if priority and kind in (None, "classic"):
        arguments["x-max-priority"] = priority
    if spec.options.queue is None:
        return QueueSpec(None, exclusive=True, auto_delete=True, arguments=arguments, declare=declare)
    return QueueSpec(
        spec.options.queue,
        durable=custom.get(keys.DURABLE, True),
        exclusive=custom.get(keys.EXCLUSIVE, False),
        auto_delete=custom.get(keys.AUTO_DELETE, False),
        arguments=arguments,
        declare=declare,
    )


def _bindings(spec: SubscriptionSpec, exchange: ExchangeSpec) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the channel patterns and the binding keys of a subscription."""
    custom = spec.options.custom
    more: tuple[str, ...] = custom.get(keys.BINDINGS, ())
    if not exchange.name:
        for key in _BINDING_KEYS:
            if key in custom:
                _refuse(key, "nothing can be bound to the default exchange")
        return (), ()
    if (
        keys.BINDING_ARGUMENTS in custom
        and exchange.kind != "headers"
        and not exchange.kind.startswith("x-")
        and exchange.name not in _HEADERS_EXCHANGES
    ):
        _refuse(keys.BINDING_ARGUMENTS, "is for headers exchanges: set exchangeType 'headers' as well")
    if spec.channel_extension is not None:
        return (), tuple(dict.fromkeys((spec.channel_extension, *more)))
    patterns = tuple(dict.fromkeys((spec.channel, *more)))
    dead = spec.options.dead_letter_channel
    for pattern in more:
        try:
            key = names.binding_key(channels.check_pattern(pattern))
            names.check_length(key, f"{pattern[:80]!r} as a binding key")
        except InvalidChannelError as error:
            _refuse(keys.BINDINGS, str(error))
        if dead is not None and channels.matches(pattern, dead):
            _refuse(
                Features.EXTENSION_DEAD_LETTER_CHANNEL,
                f"{dead!r} is matched by {pattern!r} itself: its messages would be delivered again and again",
            )
    return patterns, tuple(names.binding_key(pattern) for pattern in patterns)


# --- queues that refuse messages when they are full


def refuses(overflow: object) -> bool:
    """Return whether a queue with this ``queueOverflow`` refuses messages when it is full."""
    return isinstance(overflow, str) and overflow.startswith("reject-publish")


def topic_pattern(binding: str) -> re.Pattern[str]:
    """Return a pattern of the routing keys, after a dot, that a binding of a topic exchange accepts."""
    words = {"*": r"\.[^.]*", "#": r"(?:\.[^.]*)*"}
    return re.compile("".join(words.get(word, rf"\.{re.escape(word)}") for word in binding.split(".")), re.DOTALL)


class RefusingQueues:
    """The queues declared by this instance that refuse messages when they are full."""

    def __init__(self) -> None:
        self._sources: dict[str, QueueSource] = {}

    def declared(self, source: QueueSource) -> None:
        """Remember a queue if it refuses messages when it is full."""
        arguments = source.queue.arguments
        if refuses(arguments.get("x-overflow")) and (len(self._sources) < _MAX_QUEUES):
            self._sources[f"{source.queue.name}\n{source.exchange.name}\n{source.bindings}"] = source

    def may_take(self, destination: AmqpDestination) -> bool:
        """Return whether a message to ``destination`` may go to one of these queues."""
        return any(_reaches(destination, source) for source in self._sources.values())


def _reaches(destination: AmqpDestination, source: QueueSource) -> bool:
    exchange, key = destination.exchange.name, destination.routing_key
    if not exchange:
        return key == source.queue.name
    if exchange != source.exchange.name:
        return False
    kind = source.exchange.kind
    if kind == "direct":
        return key in source.bindings
    # exchanges of other types than topic may route any message to a queue that is bound to them
    return kind != "topic" or any(topic_pattern(binding).fullmatch(f".{key}") for binding in source.bindings)
