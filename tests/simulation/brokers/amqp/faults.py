"""Faults that the owner of a broker can switch on. Chance decides, from ``Host.random``."""

from __future__ import annotations

from dataclasses import astuple, dataclass
from typing import TYPE_CHECKING, Final

from tests.simulation.brokers.amqp.errors import AmqpError

if TYPE_CHECKING:
    from tests.simulation.brokers.amqp.broker import AmqpBroker
    from tests.simulation.brokers.amqp.confirms import Confirms
    from tests.simulation.brokers.amqp.connection import AmqpConnection
    from tests.simulation.brokers.amqp.consumers import Consumer

_TIMED_OUT: Final = (
    "delivery acknowledgement on channel {} timed out. Timeout value used: 1800000 ms. This timeout value can be "
    "configured, see consumers doc guide to learn more"
)
FORCED: Final = "broker forced connection closure with reason 'shutdown'"


@dataclass(frozen=True, slots=True)
class AmqpFaults:
    """Probabilities from 0 to 1, and limits in seconds. Assign a new one to ``AmqpBroker.faults`` to change them.

    Attributes:
        late_confirm: per message: its confirm comes up to ``late_confirm_max`` after the sync, out of order.
        shuffle_confirms: per batch: each message is confirmed by itself, in any order.
        nack: per message with confirms: it is refused, and not taken.
        close_channel: per method on a channel: the broker closes the channel with 406 instead of an effect.
        internal_error: per method on a channel: the broker closes the connection with 541 instead of an effect.
        force_close: per method on a channel: the broker closes the connection with 320 after the effect.
        drop_before, drop_after: per method: the connection is reset before or after the effect of the method.
        block: per message: the broker takes no messages on the connection for up to ``block_max``.
        cancel_consumer: per delivery: the broker cancels the consumer after it.
        slow_delivery: per delivery: the consumer gets nothing for up to ``slow_delivery_max``.
    """

    late_confirm: float = 0.0
    late_confirm_max: float = 5.0
    shuffle_confirms: float = 0.0
    nack: float = 0.0
    close_channel: float = 0.0
    internal_error: float = 0.0
    force_close: float = 0.0
    drop_before: float = 0.0
    drop_after: float = 0.0
    block: float = 0.0
    block_max: float = 5.0
    cancel_consumer: float = 0.0
    slow_delivery: float = 0.0
    slow_delivery_max: float = 1.0


class Injector:
    """Decides which faults happen."""

    def __init__(self, broker: AmqpBroker, faults: AmqpFaults) -> None:
        self._broker = broker
        self._host = broker.host
        self.faults = faults

    @property
    def is_on(self) -> bool:
        """Return whether any fault can happen."""
        return astuple(self.faults) != astuple(AmqpFaults())

    def _happens(self, chance: float) -> bool:
        return chance > 0 and self._host.random.random() < chance

    def _time(self, longest: float) -> float:
        return self._host.random.uniform(0, longest)

    def before_method(self, connection: AmqpConnection, channel: int) -> None:
        """Let a fault happen instead of the effect of a method.

        Raises:
            AmqpError: the channel or the connection is to be closed.
        """
        faults = self.faults
        if self._happens(faults.drop_before):
            self._host.note(f"amqp: fault: {connection.peer.name} is reset before a method")
            connection.cut()
        elif channel and self._happens(faults.close_channel):
            self._host.note(f"amqp: fault: channel {channel} of {connection.peer.name} is closed")
            self._ended(connection)
            raise AmqpError(406, _TIMED_OUT.format(channel))
        elif channel and self._happens(faults.internal_error):
            self._host.note(f"amqp: fault: internal error in {connection.peer.name}")
            raise AmqpError(541, "")

    def after_method(self, connection: AmqpConnection, channel: int) -> None:
        """Let a fault happen after the effect of a method. Raises as :meth:`before_method`."""
        faults = self.faults
        if self._happens(faults.drop_after):
            self._host.note(f"amqp: fault: {connection.peer.name} is reset after a method")
            connection.cut()
        elif channel and self._happens(faults.force_close):
            self._host.note(f"amqp: fault: {connection.peer.name} is closed by force")
            raise AmqpError(320, FORCED)

    def blocks(self, connection: AmqpConnection) -> None:
        """Let the broker take no messages on a connection for a time."""
        if self._happens(self.faults.block):
            seconds = self._time(self.faults.block_max)
            self._host.note(f"amqp: fault: {connection.peer.name} is blocked for {seconds:.3f} s")
            connection.set_alarm("low on memory")
            self._host.call_later(seconds, lambda: connection.set_alarm(self._broker.alarm))

    def nacks(self) -> bool:
        """Return whether a message is refused."""
        return self._happens(self.faults.nack)

    def delays_confirm(self, confirms: Confirms, number: int) -> bool:
        """Return whether a confirm comes later, which it then does by itself."""
        if not self._happens(self.faults.late_confirm):
            return False
        self._host.call_later(self._time(self.faults.late_confirm_max), lambda: confirms.late(number))
        return True

    def shuffles(self, numbers: list[int]) -> bool:
        """Return whether messages are confirmed one by one, and put their numbers into a random order."""
        if not self._happens(self.faults.shuffle_confirms):
            return False
        self._host.random.shuffle(numbers)
        return True

    def holds_back(self, consumer: Consumer) -> bool:
        """Return whether a consumer gets nothing for a time."""
        if not self._happens(self.faults.slow_delivery):
            return False
        consumer.is_paused = True

        def resume() -> None:
            consumer.is_paused = False
            if not consumer.queue.is_deleted:
                consumer.queue.credit(consumer.channel)
                consumer.queue.run()

        self._host.call_later(self._time(self.faults.slow_delivery_max), resume)
        return True

    def after_delivery(self, consumer: Consumer) -> None:
        """Let the broker cancel a consumer."""
        if self._happens(self.faults.cancel_consumer):
            self._host.call_later(0.0, lambda: self._cancel(consumer))

    def _cancel(self, consumer: Consumer) -> None:
        self._ended(consumer.channel.connection)
        self._broker.cancel(consumer)

    def _ended(self, connection: AmqpConnection) -> None:
        if self._broker.on_ended is not None:
            self._broker.on_ended(connection)
