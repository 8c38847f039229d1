"""Publisher confirms of one channel, sent in batches as RabbitMQ does.

The answers that are ready together are sent together: refusals first, then one ``basic.ack`` with "multiple" for the
messages below the first one that is unconfirmed or refused, then one for each further message.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.simulation.brokers.amqp import frames

if TYPE_CHECKING:
    from tests.simulation.brokers.amqp.channel import Channel
    from tests.simulation.brokers.amqp.messages import Message


class Confirms:
    """See the module.

    Attributes:
        is_on: whether the client has selected confirms.
        unconfirmed: messages that were not answered for, by number.
    """

    def __init__(self, channel: Channel) -> None:
        self.is_on = False
        self.unconfirmed: dict[int, Message] = {}
        self._channel = channel
        self._last = 0
        self._acks: list[int] = []
        self._nacks: list[int] = []

    def expect(self, message: Message) -> int:
        """Return the number of a message that is published."""
        self._last = number = self._last + 1
        self.unconfirmed[number] = message
        return number

    def stored(self, number: int) -> None:
        """Confirm a message with the next flush."""
        broker = self._channel.broker
        if broker.is_faulty and broker.injector.delays_confirm(self, number):
            return
        if number in self.unconfirmed:
            self._acks.append(number)

    def late(self, number: int) -> None:
        """Confirm a message whose confirm a fault has delayed."""
        if number in self.unconfirmed:
            self._acks.append(number)
            self.flush()

    def refuse(self, number: int) -> None:
        """Refuse a message with the next flush."""
        self._nacks.append(number)

    def flush(self) -> None:
        """Send the answers that are ready."""
        if not self._acks and not self._nacks:
            return
        channel, acks, nacks = self._channel, self._acks, self._nacks
        self._acks, self._nacks = [], []
        if channel.is_closing or channel.connection.is_ended:
            self.unconfirmed.clear()
            return
        counters, broker = channel.broker.counters, channel.broker
        counters.nacked += len(nacks)
        counters.confirmed += len(acks)
        number, write = channel.number, channel.connection.write
        for each in nacks:
            self.unconfirmed.pop(each, None)
            write(frames.nack(number, each))
        confirmed = [self.unconfirmed.pop(each) for each in acks]
        if broker.on_confirmed is not None:
            for message in confirmed:
                broker.on_confirmed(message.exchange, message.keys[0], message.body)
        if len(acks) == 1:
            write(frames.ack(number, acks[0], False))
            return
        acks.sort()
        if broker.is_faulty and broker.injector.shuffles(acks):
            for each in acks:
                write(frames.ack(number, each, False))
            return
        cutoff = min((next(iter(self.unconfirmed), acks[-1] + 1 if acks else 0), *nacks))
        first = 0
        while first < len(acks) and acks[first] < cutoff:
            first += 1
        if first:
            write(frames.ack(number, acks[first - 1], True))
        for each in acks[first:]:
            write(frames.ack(number, each, False))

    def end(self) -> None:
        """Forget all messages: the channel has ended."""
        self.unconfirmed.clear()
        self._acks.clear()
        self._nacks.clear()
