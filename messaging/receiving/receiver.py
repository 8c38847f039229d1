"""The base of a subscription, for its parts: connection and counters."""

from __future__ import annotations

import abc
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from messaging.connection import Subscribed
from messaging.reporting import counter

if TYPE_CHECKING:
    from messaging.connection import Connection
    from messaging.model import SubscriptionSpec

#: how a message that does not fit the model of its stream is settled
OnInvalid = Literal["raise", "reject", "skip", "dead_letter"]


@dataclass(slots=True)
class StreamCounters:
    """Counts the messages of a subscription by their fate. Each counter is written by one thread at a time."""

    received: int = field(
        default=0, metadata=counter("messages that arrived from the broker, redeliveries included", "messages")
    )
    delivered: int = field(default=0, metadata=counter("messages that were handed to the consumer", "messages"))
    acknowledged: int = field(default=0, metadata=counter("messages that were acknowledged", "messages"))
    rejected: int = field(
        default=0,
        metadata=counter("messages rejected by a verdict, or by a filter where the protocol takes none", "messages"),
    )
    redelivered: int = field(
        default=0,
        metadata=counter("rejected messages redelivered by this process, because the protocol cannot", "messages"),
    )
    dead_lettered: int = field(default=0, metadata=counter("messages that went to the dead-letter channel", "messages"))
    unrouted: int = field(
        default=0,
        metadata=counter("dead letters that nothing received, so that their messages were kept", "messages"),
    )
    dropped: int = field(
        default=0,
        metadata=counter(
            "messages discarded by the overflow policy, or not handled when the stream ended and not delivered to "
            "another consumer",
            "messages",
        ),
    )
    invalid: int = field(
        default=0, metadata=counter("messages that did not fit the model, or could not be decoded", "messages")
    )
    duplicates: int = field(
        default=0,
        metadata=counter(
            "deliveries of messages that were settled before, see deduplicate", "messages", name="duplicate"
        ),
    )


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
