"""The extensions of other adapters that this broker models.

``like`` accepts the rest of them, too, without effect: see ``docs/memory.md``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from messaging.errors import InvalidExtensionError
from messaging.execution import doubled
from messaging.model import Features, SubscriptionSpec, boolean, integer, seconds

#: of AMQP: seconds until a rejected message comes again, doubled with each rejection, and the longest delay
_DELAY: Final = "redeliveryDelay"
_DELAY_MAX: Final = "redeliveryDelayMax"
#: of AMQP: levels of priority in a new queue, and its type
MAX_PRIORITY: Final = "maxPriority"
_QUEUE_TYPE: Final = "queueType"
#: of MQTT 5: no message that this instance published; 2: no retained messages
NO_LOCAL: Final = "noLocal"
_RETAIN_HANDLING: Final = "retainHandling"
#: of AMQP: properties of messages
_PROPERTIES: Final = ("type", "appId")

_DEFAULT_DELAY_MAX: Final = 60.0
#: of AMQP: 32 bits of milliseconds
_LONGEST_DELAY: Final = 4_294_967.0


def _queue_type(value: Any) -> str:
    if value not in ("classic", "quorum"):
        raise ValueError("must be 'classic' or 'quorum': memory:// has no streams")
    return str(value)


def _delay(value: Any) -> float:
    number = seconds(value)
    if number > _LONGEST_DELAY:
        raise ValueError(f"must be a number of seconds above 0 and at most {_LONGEST_DELAY:.0f}, not {value!r}")
    return number


#: those of an instance without ``like``, with their checks
SUBSCRIBE_EXTENSIONS: Final[Mapping[str, Callable[[Any], Any]]] = MappingProxyType(
    {
        _DELAY: _delay,
        _DELAY_MAX: _delay,
        MAX_PRIORITY: integer(0, 9),
        _QUEUE_TYPE: _queue_type,
        NO_LOCAL: boolean,
        _RETAIN_HANDLING: integer(0, 2),
    }
)


class Delay(NamedTuple):
    """How long rejected messages wait, seconds."""

    first: float
    longest: float

    def after(self, rejections: int) -> float:
        """Return how long a message waits that was rejected so often before, seconds."""
        return doubled(self.first, self.longest, rejections)


def delay_of(spec: SubscriptionSpec) -> Delay | None:
    """Return the delay of a subscription's rejected messages; ``None`` for none.

    Raises:
        InvalidExtensionError: it contradicts other extensions.
    """
    options, custom = spec.options, spec.options.custom
    first, longest = custom.get(_DELAY), custom.get(_DELAY_MAX)
    if first is None:
        if longest is not None:
            raise InvalidExtensionError(_DELAY_MAX, f"needs a first delay: set {_DELAY!r} as well")
        return None
    if options.queue is None:
        raise InvalidExtensionError(_DELAY, f"is for a queue with a name: set {Features.EXTENSION_QUEUE!r} as well")
    if options.auto_acknowledge or options.qos == "0":
        raise InvalidExtensionError(_DELAY, "nothing can be rejected with qos '0' or autoAcknowledge; leave one out")
    if options.guaranteed_ordering:
        raise InvalidExtensionError(
            _DELAY, f"lets others overtake and so contradicts {Features.EXTENSION_GUARANTEED_ORDERING!r}"
        )
    if longest is not None and longest < first:
        raise InvalidExtensionError(_DELAY_MAX, f"must be at least the first delay, {first:g} seconds, not {longest:g}")
    return Delay(first, longest if longest is not None else max(first, _DEFAULT_DELAY_MAX))


def check(spec: SubscriptionSpec) -> None:
    """Refuse extensions that contradict each other, as the adapters do that have them.

    Raises:
        InvalidExtensionError: naming the extension at fault.
    """
    options, custom = spec.options, spec.options.custom
    delay_of(spec)
    if custom.get(_QUEUE_TYPE) == "quorum":
        if options.queue is None:
            raise InvalidExtensionError(
                _QUEUE_TYPE, f"a quorum needs a name: set the extension {Features.EXTENSION_QUEUE!r} as well"
            )
        if MAX_PRIORITY in custom:
            raise InvalidExtensionError(
                MAX_PRIORITY, f"contradicts {_QUEUE_TYPE} 'quorum': a quorum queue has no levels of priority to choose"
            )
    if custom.get(NO_LOCAL) and options.queue is not None:
        raise InvalidExtensionError(NO_LOCAL, "is for subscriptions without queue only")


def wants_retained(spec: SubscriptionSpec) -> bool:
    """Return whether a new subscription gets the retained messages."""
    return spec.options.queue is None and spec.options.custom.get(_RETAIN_HANDLING) != 2


def properties_of(custom: Mapping[str, Any]) -> dict[str, Any]:
    """Return the properties of a published message that its receivers are told."""
    return {key: custom[key] for key in _PROPERTIES if key in custom}
