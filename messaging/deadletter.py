"""What becomes of messages nobody can use: the dead-letter channel, and the count of deliveries."""

from __future__ import annotations

from collections import OrderedDict
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from messaging.features import Features
from messaging.message import MessageContext

if TYPE_CHECKING:
    from messaging.adapter import Adapter, Incoming

#: user headers that say where a dead letter comes from, on instances that announce ``headers``
REASON_HEADER: Final = "x-dead-letter-reason"
CHANNEL_HEADER: Final = "x-dead-letter-channel"
DELIVERIES_HEADER: Final = "x-dead-letter-deliveries"

#: why a message is a dead letter
REJECTED: Final = "rejected"
MAX_DELIVERIES: Final = "maxDeliveries"
INVALID: Final = "invalid"

#: messages whose deliveries are counted here at the same time; the ones not seen for longest are forgotten first
_COUNTED: Final = 65_536


class DeliveryCounter:
    """Counts deliveries of messages where the broker does not. On the loop only.

    A message is known by its id or, without one, by its channel and payload. The counts are those of this consumer:
    with competing consumers each has its own.
    """

    def __init__(self) -> None:
        self._counts: OrderedDict[object, int] = OrderedDict()

    def count(self, incoming: Incoming) -> int:
        """How often ``incoming`` was delivered and rejected, this time included."""
        key = self._key(incoming)
        count = self._counts.pop(key, 0) + 1
        self._counts[key] = count
        if len(self._counts) > _COUNTED:
            self._counts.popitem(last=False)
        return count

    def forget(self, incoming: Incoming) -> None:
        """The message is done with."""
        self._counts.pop(self._key(incoming), None)

    @staticmethod
    def _key(incoming: Incoming) -> object:
        return incoming._extensions.get("messageId") or (incoming._channel, hash(incoming.payload))


def dead_letter_context(
    incoming: Incoming, channel: str, reason: str, deliveries: int, adapter: Adapter
) -> MessageContext:
    """The context a dead letter travels with: that of the message, as far as the instance can carry it."""
    extensions: dict[str, object] = {}
    if Features.EXTENSION_GUARANTEED_DELIVERY in adapter.features:
        extensions[Features.EXTENSION_GUARANTEED_DELIVERY] = True
    if Features.EXTENSION_HEADERS in adapter.features:
        extensions[Features.EXTENSION_HEADERS] = MappingProxyType(
            {
                **incoming._extensions.get(Features.EXTENSION_HEADERS, {}),
                REASON_HEADER: reason,
                CHANNEL_HEADER: incoming._channel or "",
                DELIVERIES_HEADER: str(deliveries),
            }
        )
    carried = Features.MESSAGE_PROPERTIES in adapter.features
    return MessageContext(
        channel,
        content_type=incoming._content_type if carried else None,
        content_encoding=incoming._content_encoding if carried else None,
        correlation_id=incoming._correlation_id if carried else None,
        reply_to_channel=incoming._reply_to_channel if carried else None,
        extensions=MappingProxyType(extensions),
    )
