"""What an MQTT instance can do: its features, extensions and limits. No I/O."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Final

from adapters.mqtt import mapping, packets
from adapters.mqtt import settings as options
from adapters.mqtt.settings import MqttSettings
from adapters.mqtt.streams import filter_of
from messaging.adapter import CORE_FEATURES, REPLY_FEATURES, Adapter, ReplyAddress
from messaging.errors import InvalidChannelError, InvalidExtensionError
from messaging.model import REPEATED_TEXT, Features, boolean, channels, integer, seconds

if TYPE_CHECKING:
    from adapters.mqtt.handshake import Connack
    from messaging.adapter import SubscriptionSpec
    from messaging.model import BrokerUrl, PublishPlan
    from messaging.model.settings import Settings

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
    }
)
#: features that MQTT 3.1.1 has with an envelope only
_ENVELOPE_FEATURES: Final = _PROPERTY_FEATURES | REPLY_FEATURES


class Capabilities(Adapter):
    """The part of the MQTT adapter that describes and checks; :class:`~adapters.mqtt.MqttAdapter` connects."""

    provider = "rx-messaging.mqtt"
    settings_type = MqttSettings
    can_reject = False
    has_credit = True

    publish_extensions: ClassVar[Mapping[str, Callable[[Any], Any]]] = MappingProxyType({WILL_DELAY: seconds})
    subscribe_extensions: ClassVar[Mapping[str, Callable[[Any], Any]]] = MappingProxyType(
        {
            RETAIN_HANDLING: integer(0, 2),
            RETAIN_AS_PUBLISHED: boolean,
            NO_LOCAL: boolean,
            mapping.PACKET_ID: boolean,
        }
    )

    settings: MqttSettings

    def __init__(self, url: BrokerUrl, settings: Settings, name: str) -> None:
        """See ``Adapter``. Raises also InvalidUrlError: the URL has a path."""
        super().__init__(url, settings, name)
        options.check(url, self.settings)
        self._features = _FEATURES
        if self.settings.v5 or self.settings.envelope:
            self._features |= _PROPERTY_FEATURES
        if self.settings.v5:
            self._features |= {Features.EXTENSION_MANDATORY}
            self._features |= self.publish_extensions.keys() | self.subscribe_extensions.keys()
        self._qos_levels: tuple[str, ...] = ("0", "1", "2")
        self._max_packet = packets.MAX_PACKET

    def withdraw(self, *features: str) -> None:
        """Announce these features no longer."""
        self._features -= {*features}

    def restrict(self, connack: Connack) -> None:
        """Withdraw the features that the broker lacks, and take over its limits."""
        self._max_packet = connack.maximum_packet_size
        self._qos_levels = ("0", "1", "2")[: connack.maximum_qos + 1]
        if not connack.retain:
            self.withdraw(Features.EXTENSION_RETAIN, RETAIN_HANDLING, RETAIN_AS_PUBLISHED)
        if not connack.wildcards:
            self.withdraw(Features.WILDCARDS)
        if not connack.shared:
            self.withdraw(Features.POINT_TO_POINT, Features.EXTENSION_QUEUE)
        if not connack.maximum_qos:
            self.withdraw(Features.EXTENSION_GUARANTEED_DELIVERY)

    # --- the contract

    @property
    def protocols(self) -> tuple[str, ...]:
        """``mqtt``, and the version."""
        return ("mqtt", "mqtt5" if self.settings.v5 else "mqtt3.1.1")

    @property
    def features(self) -> frozenset[str]:
        """The features of this version and, once connected, this broker."""
        return self._features

    @property
    def header_types(self) -> frozenset[type]:
        """Text, and several texts of one name."""
        return REPEATED_TEXT

    def way_out(self, feature: str) -> str:
        """See ``Adapter.way_out``: MQTT 5 or an envelope has most features that MQTT 3.1.1 lacks."""
        if self.settings.v5:
            return ""
        if feature in _ENVELOPE_FEATURES:
            return "set version=5, or envelope=true on both sides"
        if feature in (Features.POINT_TO_POINT, Features.EXTENSION_QUEUE):
            return NO_SHARING
        only_v5 = {*self.publish_extensions, *self.subscribe_extensions, Features.EXTENSION_MANDATORY}
        return "set version=5" if feature in only_v5 else ""

    def reply_address(self, token: str) -> ReplyAddress:
        """See ``Adapter``. With 3.1.1 each request has its own reply channel: a responder needs no envelope."""
        address = super().reply_address(token)
        if self.settings.v5:
            return address
        return address._replace(pattern=f"{address.channel}/+", individual=True)

    @property
    def qos_levels(self) -> tuple[str, ...]:
        """Up to Maximum QoS."""
        return self._qos_levels

    @property
    def max_message_size(self) -> int:
        """Largest payload in bytes, with a short topic and no properties: the limit is that of the whole packet."""
        limit = self._max_packet - _LEAST_HEADER
        return min(limit, self.settings.max_message_size or limit)

    def check_publish(self, plan: PublishPlan) -> None:
        """Refuse channels that clients must not publish to, and properties that receivers would misread."""
        options = plan.options
        mapping.check_channel(plan.channel)
        if self.settings.v5:
            mapping.check_headers(options.headers)
        if WILL_DELAY in options.custom:
            if not options.last_will:
                raise InvalidExtensionError(WILL_DELAY, f"is for a last will: set {Features.EXTENSION_LAST_WILL!r} too")
            if not self.settings.session_expiry:
                raise InvalidExtensionError(
                    WILL_DELAY,
                    "a will is sent when the session ends, which without the option 'session_expiry' is at once",
                )

    def check_subscribe(self, spec: SubscriptionSpec) -> None:
        """Refuse a filter that is too long with its queue, and a dead-letter channel that takes no messages."""
        mapping.check_channel(spec.options.dead_letter_channel or "")
        if spec.options.queue is not None and spec.options.custom.get(NO_LOCAL):
            raise InvalidExtensionError(NO_LOCAL, "MQTT has it for subscriptions without queue only")
        size = len(filter_of(spec.options.queue, spec.channel).encode())
        if size > channels.MAX_BYTES:
            raise InvalidChannelError(
                f"channel pattern and queue make a filter of {size} bytes in UTF-8; at most {channels.MAX_BYTES} fit"
            )

    @property
    def keeps_session(self) -> bool:
        """Whether the session outlives its connection."""
        return self.settings.persistent
