"""Consumers, their credit, and the turns that they take.

A consumer that is out of credit is set aside when its turn comes, and joins the end of the line again once it has
credit, as in RabbitMQ's classic queues; a quorum queue sets it aside at once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.simulation.brokers.amqp.frames import short

if TYPE_CHECKING:
    from tests.simulation.brokers.amqp.channel import Channel
    from tests.simulation.brokers.amqp.queues import Queue
    from tests.simulation.brokers.amqp.tables import Table


class Consumer:
    """A consumer of a queue.

    Args:
        prefetch: the largest number of its unacknowledged messages; 0 for unlimited.

    Attributes:
        wire_tag: its tag as on the wire.
        in_flight: its unacknowledged messages.
        is_aside: whether it was set aside for want of credit.
        is_paused: whether a fault keeps messages from it for now.
    """

    __slots__ = ("arguments", "channel", "exclusive", "in_flight", "is_aside", "is_paused", "no_ack", "prefetch",
                 "priority", "queue", "tag", "wire_tag")  # fmt: skip

    def __init__(
        self, tag: str, channel: Channel, queue: Queue, *, no_ack: bool, exclusive: bool, prefetch: int,
        arguments: Table,
    ) -> None:  # fmt: skip
        self.tag = tag
        self.wire_tag = short(tag)
        self.channel = channel
        self.queue = queue
        self.no_ack = no_ack
        self.exclusive = exclusive
        self.prefetch = 0 if no_ack else prefetch
        self.arguments = arguments
        priority = arguments.get("x-priority")
        self.priority: int = priority.value if priority is not None else 0
        self.in_flight = 0
        self.is_aside = False
        self.is_paused = False

    @property
    def has_credit(self) -> bool:
        """Return whether it may be sent one more message."""
        if self.is_paused or self.channel.connection.is_congested:
            return False
        if self.prefetch and self.in_flight >= self.prefetch:
            return False
        # the limit of the channel holds for consumers without acknowledgement as well
        limit = self.channel.prefetch
        return not limit or self.channel.in_flight < limit or not self.queue.is_limited_by_channel


class Turns:
    """The consumers of one queue, by priority and turn.

    Args:
        is_eager: whether a consumer is set aside as soon as it has no credit left, rather than when its turn comes.

    Attributes:
        all: every consumer, in the order of their arrival.
    """

    __slots__ = ("_aside", "_is_eager", "_line", "all")

    def __init__(self, *, is_eager: bool) -> None:
        self.all: list[Consumer] = []
        self._line: list[Consumer] = []
        #: those out of credit, in the order in which they were set aside
        self._aside: list[Consumer] = []
        self._is_eager = is_eager

    def add(self, consumer: Consumer) -> None:
        """Add a consumer, last of its priority."""
        self.all.append(consumer)
        self._join(consumer)

    def remove(self, consumer: Consumer) -> None:
        """Remove a consumer."""
        self.all.remove(consumer)
        (self._aside if consumer.is_aside else self._line).remove(consumer)

    def first(self) -> Consumer | None:
        """Return the consumer that becomes the single active one."""
        return self._line[0] if self._line else self.all[0] if self.all else None

    def take(self) -> Consumer | None:
        """Return the consumer whose turn it is, which then joins the end of its priority."""
        line = self._line
        while line:
            consumer = line.pop(0)
            if consumer.has_credit:
                self._join(consumer)
                return consumer
            self._set_aside(consumer)
        return None

    def _set_aside(self, consumer: Consumer) -> None:
        consumer.is_aside = True
        self._aside.append(consumer)

    def delivered(self, consumer: Consumer) -> None:
        """Set a consumer aside if it has no credit left, where that is done at once."""
        if self._is_eager and not consumer.is_aside and not consumer.has_credit:
            self._line.remove(consumer)
            self._set_aside(consumer)

    def credit_channel(self, channel: Channel) -> None:
        """Let the consumers of a channel that were set aside join again if they have credit."""
        if not self._aside:
            return
        for consumer in [each for each in self._aside if each.channel is channel and each.has_credit]:
            self._aside.remove(consumer)
            consumer.is_aside = False
            self._join(consumer)

    def _join(self, consumer: Consumer) -> None:
        line, priority = self._line, consumer.priority
        at = len(line)
        while at and line[at - 1].priority < priority:
            at -= 1
        line.insert(at, consumer)
