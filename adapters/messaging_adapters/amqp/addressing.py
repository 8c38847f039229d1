"""Addresses of requests and replies: direct reply-to, channels, and queues by name."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Final

from messaging.model import Addressing, ReplyAddress, ReplyRoute, channels
from messaging_adapters.amqp import declarations, names

if TYPE_CHECKING:
    from messaging.model import SubscriptionSpec
    from messaging_adapters.amqp.settings import AmqpSettings

#: each reply that names its channel is checked against the subscriptions of request handlers
_SOURCES: Final = 1024


class AmqpAddressing(Addressing):
    """See :class:`~messaging.model.Addressing`."""

    def __init__(self, settings: AmqpSettings) -> None:
        self._exchange = settings.exchange
        self._max_priority = settings.max_priority
        self._source = lru_cache(maxsize=_SOURCES)(declarations.source)

    def reply_address(self, token: str) -> ReplyAddress:
        """Return the address of direct reply-to."""
        del token  # the broker makes its own addresses
        return ReplyAddress(names.DIRECT_CHANNEL, names.DIRECT_CHANNEL)

    def reply_routes(self, channel: str) -> tuple[ReplyRoute, ...]:
        """Return two routes: the exchange of channels, and the queue of that name, as is AMQP's custom."""
        if channel.startswith(f"{names.DIRECT_CHANNEL}/"):
            return (ReplyRoute(channel, mandatory=False),)
        queue = names.routing_key(channel)
        return ReplyRoute(channel), ReplyRoute(declarations.DEFAULT_EXCHANGE, queue)

    def patterns(self, spec: SubscriptionSpec) -> tuple[str, ...]:
        """Return also the patterns of the extension ``bindings``."""
        return self._source(spec, self._exchange, self._max_priority).patterns or (spec.channel,)

    def reaches(self, spec: SubscriptionSpec, channel: str, channel_extension: str | None) -> bool:
        """Compare exchange and routing key, or the name of the queue."""
        source = self._source(spec, self._exchange, self._max_priority)
        if channel_extension is None:
            return source.exchange.name == self._exchange and any(
                channels.matches(pattern, channel) for pattern in source.patterns
            )
        if channel == declarations.DEFAULT_EXCHANGE:
            return channel_extension == source.queue.name
        key = names.channel_name(channel_extension)
        return channel == source.exchange.name and any(channels.matches(pattern, key) for pattern in source.patterns)
