"""The channels that the deliveries of one subscription arrive on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from messaging.model import channels
from messaging_adapters.amqp import frames, names
from messaging_adapters.amqp.declarations import DEFAULT_EXCHANGE

if TYPE_CHECKING:
    from messaging.model import SubscriptionSpec
    from messaging_adapters.amqp.declarations import Source

#: routes whose channel is kept
_MAX_ROUTES: Final = 1024

#: channel and extension; ``None`` for messages that are outside of the subscription
ArrivalChannel = tuple[str, str | None] | None


class ArrivalChannels(dict[bytes, ArrivalChannel]):
    """The channels that deliveries of one subscription arrive on, by route: exchange and routing key as on the wire."""

    def __init__(self, spec: SubscriptionSpec, source: Source, exchange: str) -> None:
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
