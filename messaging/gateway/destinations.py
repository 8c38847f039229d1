"""Destinations: where the messages of a route go to, and with which context they are published.

Most messages of a route differ in their payload only. Whatever they share is made once: the channel, the context, its
stored form, the encoder of journal records.

**Loop protection.** A gateway adds its name to the header ``messaging-gateways`` of the messages that it publishes,
where the target carries headers, and drops messages that have its name there: they have passed it before.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from messaging import Messaging
from messaging.codecs.cache import BoundedCache
from messaging.errors import InvalidHeaderError, MessagingError
from messaging.gateway.extensions import of_target
from messaging.gateway.patterns import ChannelPattern, ChannelTemplate, filled
from messaging.gateway.settings import SourceSettings, TargetSettings
from messaging.journal import RecordTemplate
from messaging.model import Features, MessageContext, stored_properties
from messaging.model import headers as headers_

#: the header with the names of the gateways that a message has passed, separated by commas
PASSED_HEADER: Final = "messaging-gateways"
#: deadline of a message in flight, seconds. The loss of a connection does not end it: the instance sends the message
#: again by itself when it has reconnected
CONFIRM_TIMEOUT: Final = 300.0
#: destinations that a route keeps
_CACHED: Final = 4096
_SEPARATOR: Final = ","


def passed_gateways(extensions: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the names of the gateways that a received message has passed."""
    found = extensions.get(Features.EXTENSION_HEADERS)
    if not found:
        return ()
    passed = found.get(PASSED_HEADER)
    return tuple(passed.split(_SEPARATOR)) if isinstance(passed, str) and passed else ()


class Destination:
    """The channel and the context of messages of a route that have both in common. Immutable.

    Attributes:
        channel: where they are published.
        publishing: the context with which they are published. It has no message id.
        properties: the stored form of the context.
        template: encodes their records.
    """

    __slots__ = ("channel", "properties", "publishing", "template")

    def __init__(self, context: MessageContext, properties: str | None = None) -> None:
        channel = context.channel
        if channel is None:
            raise MessagingError("a destination needs a channel")
        self.channel = channel
        self.publishing = context.replace(
            extensions=MappingProxyType({**context.extensions, Features.EXTENSION_TIMEOUT: CONFIRM_TIMEOUT})
        )
        self.properties = stored_properties(context) if properties is None else properties
        self.template = RecordTemplate(channel, self.properties)


class MessageTraits(NamedTuple):
    """Everything of a message that decides about its destination, apart from its channel; each value may be missing."""

    content_type: str | None = None
    content_encoding: str | None = None
    correlation_id: str | None = None
    headers: Mapping[str, Any] | None = None
    #: names of the gateways that it has passed
    passed: tuple[str, ...] = ()
    retain: bool = False
    priority: int | None = None

    @classmethod
    def of(cls, context: MessageContext) -> MessageTraits:
        """Return the traits of a received message."""
        extensions = context.extensions
        return cls(
            context.content_type,
            context.content_encoding,
            context.correlation_id,
            extensions.get(Features.EXTENSION_HEADERS),
            passed_gateways(extensions),
            retain=bool(extensions.get(Features.EXTENSION_RETAIN)),
            priority=extensions.get(Features.EXTENSION_PRIORITY),
        )

    @property
    def key(self) -> tuple[Any, ...] | None:
        """Return the key in a cache; ``None`` if the same traits are unlikely to come again."""
        if self.headers or self.correlation_id is not None:
            return None
        return self.content_type, self.content_encoding, self.passed, self.retain, self.priority


class Destinations:
    """Makes the destinations of one route. For one thread at a time.

    Args:
        source: settings of the source of the messages.
        target: settings of the target.
        gateway: name of the gateway.
        max_hops: gateways that a message may pass.
        messaging: the instance of the target; its publisher checks the contexts.

    Attributes:
        template: the channel of the target.
    """

    def __init__(
        self, source: SourceSettings, target: TargetSettings, gateway: str, max_hops: int, messaging: Messaging
    ) -> None:
        self._settings = target
        self._gateway = gateway
        self._max_hops = max_hops
        self._publisher = messaging.publisher
        self._features = features = messaging.features
        self._pattern = ChannelPattern(source.channel)
        self.template = ChannelTemplate(target.channel)
        self._values: BoundedCache[str, Mapping[str, str]] = BoundedCache(_CACHED)
        self._carries_properties = Features.MESSAGE_PROPERTIES in features
        self._carries_headers = Features.EXTENSION_HEADERS in features
        self._fixed: Mapping[str, Any] = of_target(target, features)
        self._cache: BoundedCache[tuple[Any, ...], Destination] = BoundedCache(_CACHED)

    def values(self, channel: str) -> Mapping[str, str]:
        """Return the values for templates: the captures of a channel of the source, ``channel`` and ``gateway``."""
        found = self._values.get(channel)
        if found is None:
            captured = self._pattern.match(channel) or {}
            found = self._values[channel] = MappingProxyType({"channel": channel, "gateway": self._gateway, **captured})
        return found

    def is_loop(self, passed: Sequence[str]) -> bool:
        """Return whether a message that has passed these gateways must not be passed on."""
        return bool(passed) and (self._gateway in passed or len(passed) >= self._max_hops)

    def find(self, channel: str, traits: MessageTraits, values: Mapping[str, str]) -> Destination:
        """Return the destination of a message.

        Args:
            channel: where it is published.
            traits: of the message.
            values: for the templates of the configured headers.

        Raises:
            ArgumentError, UnsupportedFeatureError: the target cannot carry the message.
        """
        key = traits.key
        if key is None or (self._settings.headers and values):
            return self._make(channel, traits, values)
        found = self._cache.get((channel, *key))
        if found is None:
            found = self._cache[(channel, *key)] = self._make(channel, traits, values)
        return found

    def _make(self, channel: str, traits: MessageTraits, values: Mapping[str, str]) -> Destination:
        settings = self._settings
        extensions = dict(self._fixed)
        if traits.retain and settings.retain == "keep":
            extensions[Features.EXTENSION_RETAIN] = True
        if traits.priority is not None and Features.EXTENSION_PRIORITY in self._features:
            extensions.setdefault(Features.EXTENSION_PRIORITY, traits.priority)
        found: dict[str, Any] = {}
        if self._carries_headers:
            found |= traits.headers or {}
            found[PASSED_HEADER] = _SEPARATOR.join((*traits.passed, self._gateway))
        found |= {name: filled(text, values) for name, text in settings.headers.items()}
        if found:
            extensions[Features.EXTENSION_HEADERS] = MappingProxyType(found)
        try:
            return self._checked(channel, traits, extensions)
        except InvalidHeaderError:
            # a protocol with fewer types of headers: they become text
            extensions[Features.EXTENSION_HEADERS] = headers_.carried(found, headers_.TEXT)
            return self._checked(channel, traits, extensions)

    def _checked(self, channel: str, traits: MessageTraits, extensions: Mapping[str, Any]) -> Destination:
        settings = self._settings
        has_properties = self._carries_properties
        context = MessageContext(
            channel,
            content_type=(traits.content_type if has_properties else None)
            if settings.content_type is None
            else settings.content_type,
            content_encoding=traits.content_encoding if has_properties else None,
            correlation_id=traits.correlation_id if has_properties else None,
            extensions=MappingProxyType(dict(extensions)),
        )
        found = Destination(context)
        self._publisher.compile(found.publishing)
        return found
