"""What an MQTT instance can do: its features, extensions, limits and addresses. No I/O."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

from messaging.model import (
    CORE_FEATURES,
    REPEATED_TEXT,
    REPLY_FEATURES,
    Addressing,
    Capabilities,
    Features,
    ReplyAddress,
    boolean,
    integer,
    seconds,
)
from messaging_adapters.mqtt import mapping, packets
from messaging_adapters.mqtt.settings import MqttSettings

if TYPE_CHECKING:
    from messaging_adapters.mqtt.handshake import Connack

#: bytes of a PUBLISH packet beside its payload, at least: type, length, topic of one character
_LEAST_HEADER: Final = 5

_FEATURES: Final = CORE_FEATURES | frozenset(
    {
        Features.PUBLISH_SUBSCRIBE,
        Features.POINT_TO_POINT,
        Features.WILDCARDS,
        Features.EXTENSION_GUARANTEED_DELIVERY,
        Features.EXTENSION_LAST_WILL,
        Features.EXTENSION_QOS,
        Features.EXTENSION_RETAIN,
        Features.EXTENSION_QUEUE,
        mapping.PACKET_ID,
    }
)
# extensions of MQTT 5 alone
#: float seconds, beside ``lastWill``: time between the loss and the will, at least
WILL_DELAY: Final = "willDelay"
#: 0: retained messages at each SUBSCRIBE; 1: only if the broker has no such subscription yet; 2: none
RETAIN_HANDLING: Final = "retainHandling"
#: bool: messages that were published with ``retain`` have it, also if they are not sent because of it
RETAIN_AS_PUBLISHED: Final = "retainAsPublished"
#: bool: no message that this instance published
NO_LOCAL: Final = "noLocal"

#: way out where a broker has no shared subscriptions
NO_SHARING: Final = (
    "the broker has no shared subscriptions with MQTT 3.1.1, which queues need; set version=5 if it speaks MQTT 5"
)

#: features that need properties, or an envelope
_PROPERTY_FEATURES: Final = frozenset(
    {
        Features.MESSAGE_PROPERTIES,
        Features.EXTENSION_HEADERS,
        Features.EXTENSION_TIME_TO_LIVE,
        Features.EXTENSION_MESSAGE_ID,
        Features.EXTENSION_DEDUPLICATE,
    }
)
#: features that MQTT 3.1.1 has with an envelope only
_ENVELOPE_FEATURES: Final = _PROPERTY_FEATURES | REPLY_FEATURES


PUBLISH_EXTENSIONS: Final[Mapping[str, Callable[[Any], Any]]] = MappingProxyType({WILL_DELAY: seconds})
SUBSCRIBE_EXTENSIONS: Final[Mapping[str, Callable[[Any], Any]]] = MappingProxyType(
    {
        RETAIN_HANDLING: integer(0, 2),
        RETAIN_AS_PUBLISHED: boolean,
        NO_LOCAL: boolean,
        mapping.PACKET_ID: boolean,
    }
)
_ONLY_V5: Final = frozenset({*PUBLISH_EXTENSIONS, *SUBSCRIBE_EXTENSIONS, Features.EXTENSION_MANDATORY})
_QOS_LEVELS: Final = ("0", "1", "2")


def announced(settings: MqttSettings, name: str, client_id: str) -> Capabilities:
    """Return the capabilities of an instance that does not know its broker yet."""
    features = _FEATURES
    if settings.v5 or settings.envelope:
        features |= _PROPERTY_FEATURES
    if settings.v5:
        features |= _ONLY_V5
    return Capabilities(
        name=name,
        protocols=("mqtt", "mqtt5" if settings.v5 else "mqtt3.1.1"),
        features=features,
        qos_levels=_QOS_LEVELS,
        header_types=REPEATED_TEXT,
        max_message_size=_limit(settings, packets.MAX_PACKET),
        keeps_session=settings.persistent,
        client_id=client_id,
        publish_extensions=PUBLISH_EXTENSIONS,
        subscribe_extensions=SUBSCRIBE_EXTENSIONS,
        ways_out={} if settings.v5 else _WAYS_OUT,
    )


def restricted(before: Capabilities, settings: MqttSettings, connack: Connack, client_id: str) -> Capabilities:
    """Return ``before`` without the features that the broker lacks, and with its limits."""
    lacking: set[str] = set()
    if not connack.retain:
        lacking |= {Features.EXTENSION_RETAIN, RETAIN_HANDLING, RETAIN_AS_PUBLISHED}
    if not connack.wildcards:
        lacking |= {Features.WILDCARDS}
    if not connack.shared:
        lacking |= {Features.POINT_TO_POINT, Features.EXTENSION_QUEUE}
    if not connack.maximum_qos:
        lacking |= {Features.EXTENSION_GUARANTEED_DELIVERY}
    return replace(
        before,
        features=before.features - lacking,
        qos_levels=_QOS_LEVELS[: connack.maximum_qos + 1],
        max_message_size=_limit(settings, connack.maximum_packet_size),
        keeps_session=settings.persistent,
        client_id=client_id,
    )


def _limit(settings: MqttSettings, max_packet: int) -> int:
    """Return the largest payload with a short topic and no properties: the limit is that of the whole packet."""
    limit = max_packet - _LEAST_HEADER
    return min(limit, settings.max_message_size or limit)


#: of MQTT 3.1.1
_WAYS_OUT: Final[Mapping[str, str]] = MappingProxyType(
    {
        **dict.fromkeys(_ONLY_V5, "set version=5"),
        **dict.fromkeys(_ENVELOPE_FEATURES, "set version=5, or envelope=true on both sides"),
        **dict.fromkeys((Features.POINT_TO_POINT, Features.EXTENSION_QUEUE), NO_SHARING),
    }
)


class IndividualAddressing(Addressing):
    """Addresses of MQTT 3.1.1: each request has its own reply channel, so that a responder needs no envelope."""

    def reply_address(self, token: str) -> ReplyAddress:
        """See ``Addressing``."""
        address = super().reply_address(token)
        return address._replace(pattern=f"{address.channel}/+", individual=True)
