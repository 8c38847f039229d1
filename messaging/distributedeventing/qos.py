"""Qualities of service: which ones an admin keeps, and the one of an event (RFC 214 5.3.1; DE030 to DE048).

=================  ====================================================================================================
name               meaning, and what it rests on
=================  ====================================================================================================
``TRANSIENT``      an event may be lost with a process or a broker
``PERSISTENT``     an event is stored before it is sent, and sent after a restart: needs the durable outbox of the
                   instance (``outbox_path``). It is sent whether or not a member wants it now
``AT_MOST_ONCE``   sent without confirmation (QoS 0)
``AT_LEAST_ONCE``  sent with confirmation (QoS 1, publisher confirms), again if that is missing
``EXACTLY_ONCE``   as ``AT_LEAST_ONCE``; copies are recognised by the id of the event, for the life of the receiving
                   process. No transport needs QoS 2 for it
``IN_ORDER``       events of one thread arrive in the order in which they were published, on all topics
``OUT_OF_ORDER``   no order is promised
=================  ====================================================================================================
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

from messaging.errors import ArgumentError, UnsupportedFeatureError
from messaging.instance import Messaging
from messaging.model import Features

TRANSIENT: Final = "TRANSIENT"
PERSISTENT: Final = "PERSISTENT"
AT_MOST_ONCE: Final = "AT_MOST_ONCE"
AT_LEAST_ONCE: Final = "AT_LEAST_ONCE"
EXACTLY_ONCE: Final = "EXACTLY_ONCE"
IN_ORDER: Final = "IN_ORDER"
OUT_OF_ORDER: Final = "OUT_OF_ORDER"

#: values of which an event has one each
_STORAGE: Final = (TRANSIENT, PERSISTENT)
_DELIVERY: Final = (AT_MOST_ONCE, AT_LEAST_ONCE, EXACTLY_ONCE)
_ORDER: Final = (IN_ORDER, OUT_OF_ORDER)
STANDARD: Final = (*_STORAGE, *_DELIVERY, *_ORDER)


@dataclass(frozen=True, slots=True)
class DeliveryQos:
    """The quality of service of an event. Immutable.

    Attributes:
        is_persistent: whether it is stored before it is sent.
        delivery: ``AT_MOST_ONCE``, ``AT_LEAST_ONCE`` or ``EXACTLY_ONCE``.
        is_ordered: whether its order is kept.
    """

    is_persistent: bool = False
    delivery: str = EXACTLY_ONCE
    is_ordered: bool = True

    @property
    def message_qos(self) -> str:
        """Return the QoS of the message that carries it."""
        return "0" if self.delivery == AT_MOST_ONCE and not self.is_persistent else "1"


def several(name: str, value: Any) -> tuple[Any, ...]:
    """Return the values of an argument that is one text, or several. Raises ``ArgumentError``."""
    if isinstance(value, str):
        return (value,)
    if not isinstance(value, Iterable):
        raise ArgumentError(f"{name} must be a str or several, not {type(value).__name__}")
    return tuple(value)


def supported_by(instance: Messaging | None, proprietary: str | Iterable[str] = ()) -> tuple[str, ...]:
    """Return the qualities of service that an admin on ``instance`` keeps; without one, only within the process."""
    found = [TRANSIENT, AT_MOST_ONCE, IN_ORDER, OUT_OF_ORDER]
    if instance is None or Features.ACKNOWLEDGE in instance.features:
        found += [AT_LEAST_ONCE, EXACTLY_ONCE]
    if instance is not None and Features.EXTENSION_STORE_AND_FORWARD in instance.features:
        found.append(PERSISTENT)
    for each in several("proprietary_qos", proprietary):
        if not isinstance(each, str) or not each.isprintable() or not each:
            raise ArgumentError(f"a proprietary quality of service must be a printable str, not {each!r:.80}")
        if each not in found:
            found.append(each)
    return tuple(each for each in STANDARD if each in found) + tuple(each for each in found if each not in STANDARD)


class QosReader:
    """Reads the qualities of service that senders ask for.

    Args:
        name: of the admin, for errors.
        supported: what it keeps.
        default: what an event has that asks for nothing.
    """

    def __init__(self, name: str, supported: tuple[str, ...], default: Any = ()) -> None:
        self._name = name
        self.supported = supported
        best = EXACTLY_ONCE if EXACTLY_ONCE in supported else AT_MOST_ONCE
        self._default = DeliveryQos(delivery=best)
        self._default = self.read(default)

    def read(self, wanted: str | Iterable[str] | None) -> DeliveryQos:
        """Return the quality of service that ``wanted`` names; what it leaves open is as by default.

        Raises:
            UnsupportedFeatureError: the admin does not keep one of them (DE048).
            ArgumentError: two of them exclude each other, or one is no str.
        """
        if not wanted:
            return self._default
        names = several("qos", wanted)
        for each in names:
            if not isinstance(each, str):
                raise ArgumentError(f"qos must be a str or several, not {type(each).__name__}")
            if each not in self.supported:
                raise UnsupportedFeatureError(each, self._name, "", supported=self.supported)
        return DeliveryQos(
            _one_of(names, _STORAGE, PERSISTENT if self._default.is_persistent else TRANSIENT) == PERSISTENT,
            _one_of(names, _DELIVERY, self._default.delivery),
            _one_of(names, _ORDER, IN_ORDER if self._default.is_ordered else OUT_OF_ORDER) == IN_ORDER,
        )


def _one_of(names: tuple[str, ...], choices: tuple[str, ...], default: str) -> str:
    found = dict.fromkeys(each for each in names if each in choices)
    if len(found) > 1:
        raise ArgumentError(f"qos: {' and '.join(found)} exclude each other: give one of them")
    return next(iter(found), default)
