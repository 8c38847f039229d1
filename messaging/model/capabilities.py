"""Capabilities: the abilities of an instance, as its adapter announces them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final

from messaging.errors import UnsupportedFeatureError
from messaging.model import headers
from messaging.model.features import Features

#: The features that the core provides for every adapter that acknowledges. An adapter announces them beside its own.
CORE_FEATURES: Final = frozenset(
    {
        Features.ACKNOWLEDGE,
        Features.MESSAGE_SIZE_LIMIT,
        Features.EXTENSION_GUARANTEED_ORDERING,
        Features.EXTENSION_AUTO_ACKNOWLEDGE,
        Features.EXTENSION_TIMEOUT,
        Features.EXTENSION_DEAD_LETTER_CHANNEL,
        Features.EXTENSION_MAX_DELIVERIES,
        Features.EXTENSION_PREFETCH,
        Features.EXTENSION_BUFFER_SIZE,
        Features.EXTENSION_OVERFLOW,
    }
)
#: what brokers with queues and message properties do, beside :data:`CORE_FEATURES`
QUEUE_BROKER_FEATURES: Final = CORE_FEATURES | frozenset(
    {
        Features.PUBLISH_SUBSCRIBE,
        Features.POINT_TO_POINT,
        Features.WILDCARDS,
        Features.ROUTING_KEY,
        Features.MESSAGE_PROPERTIES,
        Features.BROKER_REDELIVERY,
        Features.QUEUE_RETENTION,
        Features.QUEUE_ADMINISTRATION,
        Features.EXTENSION_GUARANTEED_DELIVERY,
        Features.EXTENSION_QOS,
        Features.EXTENSION_TIME_TO_LIVE,
        Features.EXTENSION_PRIORITY,
        Features.EXTENSION_HEADERS,
        Features.EXTENSION_MANDATORY,
        Features.EXTENSION_MESSAGE_ID,
        Features.EXTENSION_DEDUPLICATE,
        Features.EXTENSION_QUEUE,
        Features.EXTENSION_AUTOCREATE,
    }
)


def _nothing() -> Mapping[str, Any]:
    return MappingProxyType({})


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """The abilities of an instance. Immutable: if a connect changes them, the adapter has new ones.

    Attributes:
        name: the ``osgi.messaging.name`` of the instance, for errors.
        protocols: ``osgi.messaging.protocol``, such as ``("mqtt", "mqtt5")``.
        features: the features of the adapter, all of which must work. Connecting may remove some.
        qos_levels: the values of the extension ``qos``, lowest first; empty without feature ``qos``.
        default_qos: the level of a message or subscription that sets neither a level nor a guarantee.
        header_types: the types of header values that the protocol carries, see :mod:`messaging.model.headers`.
        max_message_size: the largest payload in bytes that can be published; ``None``: unlimited (MSG205).
        publish_window: the maximum number of messages of one ``Adapter.publish``.
        can_reject: whether ``Adapter.reject`` has a form on the wire. Without it the core redelivers by itself.
        keeps_session: whether the broker keeps subscriptions and unsettled deliveries while this instance is away.
            Closing the instance then does not unsubscribe; closing a single stream does.
        client_id: the name of this client at the broker; ``None`` if it is not known yet, or the protocol has none.
        publish_extensions, subscribe_extensions: see ``Adapter``.
        reply_extensions: the extension keys that a reply copies from its request.
        ways_out: features that are not announced -> the settings with which an instance has them, such as
            "set version=5". Errors include the text.
    """

    name: str
    protocols: tuple[str, ...]
    features: frozenset[str]
    qos_levels: tuple[str, ...] = ()
    default_qos: str = "0"
    header_types: frozenset[type] = headers.TEXT
    max_message_size: int | None = None
    publish_window: int = 1024
    can_reject: bool = False
    keeps_session: bool = False
    client_id: str | None = None
    publish_extensions: Mapping[str, Callable[[Any], Any]] = field(default_factory=_nothing)
    subscribe_extensions: Mapping[str, Callable[[Any], Any]] = field(default_factory=_nothing)
    reply_extensions: frozenset[str] = frozenset()
    ways_out: Mapping[str, str] = field(default_factory=_nothing)

    @property
    def acknowledging_qos(self) -> str | None:
        """Return the lowest level with acknowledgement, or ``None``."""
        return next((level for level in self.qos_levels if level != "0"), None)

    def lacks(self, feature: str, hint: str = "", *, supported: Iterable[str] = ()) -> UnsupportedFeatureError:
        """Return the error for ``feature``, which this instance does not announce.

        Args:
            feature: its name, or the unsupported value of it.
            hint: a text in addition to that of ``ways_out``.
            supported: names of supported alternatives.
        """
        hints = "; ".join(filter(None, (hint, self.ways_out.get(feature))))
        return UnsupportedFeatureError(feature, self.name, hints, supported=supported)
