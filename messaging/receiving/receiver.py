"""The base of a subscription, for its parts: connection and counters."""

from __future__ import annotations

import abc
from dataclasses import dataclass
from typing import TYPE_CHECKING

from messaging.connection import Subscribed

if TYPE_CHECKING:
    from messaging.connection import Connection
    from messaging.model import SubscriptionSpec


@dataclass(slots=True)
class StreamCounters:
    """Counts the messages of a subscription by their fate. Each counter is written by one thread at a time."""

    #: arrived from the broker, redeliveries included
    received: int = 0
    #: handed to the consumer
    delivered: int = 0
    acknowledged: int = 0
    #: by a verdict, or by a filter where the protocol takes none
    rejected: int = 0
    #: rejected and redelivered by this process, because the protocol cannot
    redelivered: int = 0
    dead_lettered: int = 0
    #: discarded by the overflow policy, or unsettled when the stream ended and not delivered to another consumer
    dropped: int = 0
    #: did not fit the model, or could not be decoded
    invalid: int = 0
    #: deliveries of messages that were settled before, see ``deduplicate``
    duplicates: int = 0


class Receiver(Subscribed):
    """A subscription as its parts know it."""

    def __init__(self, connection: Connection, spec: SubscriptionSpec) -> None:
        super().__init__(spec)
        self.connection = connection
        self.adapter = connection.adapter
        self.counters = StreamCounters()

    @abc.abstractmethod
    def proceed(self) -> None:
        """Wake the consumer if there are messages: it may have waited for a verdict. On the loop."""
