"""Channels of this project and routes of AMQP: the channel of a delivery, and where requests and replies go."""

from __future__ import annotations

from functools import lru_cache
from typing import Final

from messaging.model import Addressing, ReplyAddress, ReplyRoute, SubscriptionSpec, channels
from messaging_adapters.amqp import declarations, frames, names
from messaging_adapters.amqp.declarations import DEFAULT_EXCHANGE, QueueSource
from messaging_adapters.amqp.target import AmqpSettings

#: each reply that names its channel is checked against the subscriptions of request handlers
_SOURCES: Final = 1024


class AmqpAddressing(Addressing):
    """See :class:`~messaging.model.Addressing`."""

    def __init__(self, settings: AmqpSettings) -> None:
        self._exchange = settings.exchange
        self._max_priority = settings.max_priority
        self._compile = lru_cache(maxsize=_SOURCES)(declarations.source)

    def source(self, spec: SubscriptionSpec) -> QueueSource:
        """Return the queue of a subscription, compiled; see ``declarations.source``."""
        return self._compile(spec, self._exchange, self._max_priority)

    def reply_address(self, token: str) -> ReplyAddress:
        """Return the address of direct reply-to."""
        del token  # the broker makes its own addresses
        return ReplyAddress(names.DIRECT_CHANNEL, names.DIRECT_CHANNEL)

    def reply_routes(self, channel: str) -> tuple[ReplyRoute, ...]:
        """Return two routes: the exchange of channels, and the queue of that name, as is AMQP's custom."""
        if channel.startswith(f"{names.DIRECT_CHANNEL}/"):
            return (ReplyRoute(channel, mandatory=False),)
        queue = names.routing_key(channel)
        return ReplyRoute(channel), ReplyRoute(DEFAULT_EXCHANGE, queue)

    def patterns(self, spec: SubscriptionSpec) -> tuple[str, ...]:
        """Return also the patterns of the extension ``bindings``."""
        return self.source(spec).patterns or (spec.channel,)

    def reaches(self, spec: SubscriptionSpec, channel: str, channel_extension: str | None) -> bool:
        """Compare exchange and routing key, or the name of the queue."""
        source = self.source(spec)
        if channel_extension is None:
            return source.exchange.name == self._exchange and any(
                channels.matches(pattern, channel) for pattern in source.patterns
            )
        if channel == DEFAULT_EXCHANGE:
            return channel_extension == source.queue.name
        key = names.channel_name(channel_extension)
        return channel == source.exchange.name and any(channels.matches(pattern, key) for pattern in source.patterns)


#: routes whose channel is kept
_MAX_ROUTES: Final = 1024

#: channel and extension; ``None`` for messages that are outside of the subscription
ArrivalChannel = tuple[str, str | None] | None


class ArrivalChannels(dict[bytes, ArrivalChannel]):
    """The channels that deliveries of one subscription arrive on, by route: exchange and routing key as on the wire."""

    def __init__(self, spec: SubscriptionSpec, source: QueueSource, exchange: str) -> None:
        super().__init__()
        self._has_extension = spec.channel_extension is not None
        self._source = source
        self._exchange = exchange
        self._matchers = [channels.matcher(pattern) for pattern in source.patterns]

    def __missing__(self, route: bytes) -> ArrivalChannel:
        found = self.translate(*frames.read_route(route))
        if len(self) >= _MAX_ROUTES:
            self.clear()
        self[route] = found
        return found

    def translate(self, exchange: str, key: str) -> ArrivalChannel:
        """Return the channel of messages published to ``exchange`` with the routing key ``key``."""
        if self._has_extension and exchange == self._source.exchange.name:
            return exchange or DEFAULT_EXCHANGE, key
        if exchange not in (self._exchange, ""):
            return exchange, key  # by a binding that another program made
        name = names.channel_name(key)
        if not self._matchers:
            return name, None  # by another exchange
        if any(matches(name) for matches in self._matchers):
            return name, None
        # A shared queue may hold messages by bindings of other programs, which must not be lost. A message is outside
        # of the subscription only if its own bindings let it in although no pattern matches: '$...' by a wildcard in
        # the first level.
        is_wanted = self._source.queue.name is not None and not (
            name.startswith("$")
            and any(pattern[0] in (channels.ANY_LEVEL, channels.ANY_LEVELS) for pattern in self._source.patterns)
        )
        return (name, None) if is_wanted else None
