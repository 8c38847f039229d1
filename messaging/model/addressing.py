"""How requests and replies are addressed on a protocol (RFC 5.7.2): the part of an adapter that replies need."""

from __future__ import annotations

from typing import Final, NamedTuple

from messaging.model import channels
from messaging.model.plan import SubscriptionSpec

#: first level of the reply channels that are made for requests
REPLY_CHANNELS: Final = "reply"


class ReplyAddress(NamedTuple):
    """Where the replies to an instance's requests arrive.

    Attributes:
        pattern: the pattern to which the instance subscribes.
        channel: the reply channel of its requests.
        individual: whether each request has a reply channel of its own: ``channel``, with the correlation id as a
            further level.
    """

    pattern: str
    channel: str
    individual: bool = False


class ReplyRoute(NamedTuple):
    """One address to which a reply can be published.

    Attributes:
        channel, channel_extension: the address.
        mandatory: whether an instance with feature ``mandatory`` is told that the address has no subscriber.
    """

    channel: str
    channel_extension: str | None = None
    mandatory: bool = True


class Addressing:
    """Addresses by channels alone, which most protocols can do; an adapter with other addresses overrides methods.

    Methods are called on any thread, and do no I/O.
    """

    def reply_address(self, token: str) -> ReplyAddress:
        """Return the address for replies to requests without a reply channel (``generateReplyChannel``).

        Args:
            token: unguessable and unique to this instance; without ``/`` and wildcards.
        """
        channel = f"{REPLY_CHANNELS}/{token}"
        return ReplyAddress(channel, channel)

    def reply_routes(self, channel: str) -> tuple[ReplyRoute, ...]:
        """Return the addresses to which a reply for the received reply channel ``channel`` can be published.

        Returns:
            At least one. The core tries the next one if an address has no subscriber.
        """
        return (ReplyRoute(channel),)

    def patterns(self, spec: SubscriptionSpec) -> tuple[str, ...]:
        """Return the channel patterns of a subscription: its own, and additions of its extensions."""
        return (spec.channel,)

    def reaches(self, spec: SubscriptionSpec, channel: str, channel_extension: str | None) -> bool:
        """Return whether messages to an address arrive at a subscription, as far as both are known.

        The channel is a name. A reply that would arrive at a request handler is refused by it.
        """
        same_kind = (spec.channel_extension is None) == (channel_extension is None)
        return same_kind and channels.matches(spec.channel, channel)
