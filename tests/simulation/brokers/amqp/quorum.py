"""Quorum queues: every message is stored, and its deliveries are counted.

Messages of a channel that has ended are delivered next, in the order of delivery. So are those that a consumer returns,
if the queue has a delivery limit; without one they are appended.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Final

from tests.simulation.brokers.amqp import dead_letters, properties, tables
from tests.simulation.brokers.amqp.messages import Entry, Message
from tests.simulation.brokers.amqp.queues import Queue

if TYPE_CHECKING:
    from tests.simulation.brokers.amqp.broker import AmqpBroker
    from tests.simulation.brokers.amqp.channel import Channel
    from tests.simulation.brokers.amqp.connection import AmqpConnection
    from tests.simulation.brokers.amqp.consumers import Consumer
    from tests.simulation.brokers.amqp.tables import Table
    from tests.simulation.brokers.amqp.virtual_host import VirtualHost
    from tests.simulation.brokers.host import Timer

#: a queue that refuses messages takes them again up to this part of its limits
_LOW: Final = 0.8
_RETURNED: Final = 0
_NEW: Final = 1
#: after this time an unconfirmed dead letter is published again, seconds
_LETTER_RETRY: Final = 180.0


class QuorumQueue(Queue):
    """A quorum queue."""

    type = "quorum"
    is_limited_by_channel = False
    #: instead of delivering a message at once or not at all
    shortest_ttl = 1

    def __init__(
        self, broker: AmqpBroker, vhost: VirtualHost, name: str, *, durable: bool, auto_delete: bool,
        owner: AmqpConnection | None, arguments: Table,
    ) -> None:  # fmt: skip
        #: dead letters that no queue has taken yet, with their reasons
        self.letters: list[tuple[Entry, str]] = []
        self._retries: list[Timer] = []
        #: consumers that were cancelled with unacknowledged messages
        self._cancelled: list[Consumer] = []
        #: positions of unacknowledged messages of ``basic.get``
        self._got: dict[int, None] = {}
        #: the channels that publish, and whether their messages are refused
        self._refused: dict[Channel, bool] = {}
        self._publisher: Channel | None = None
        limit = arguments.get("x-delivery-limit")
        # RabbitMQ takes any value, and no count is above one that is not a number
        self._delivery_limit: float | None = (
            None if limit is None else limit.value if isinstance(limit.value, int) else math.inf
        )
        super().__init__(
            broker, vhost, name, durable=durable, auto_delete=auto_delete, owner=owner, arguments=arguments
        )
        strategy = arguments.get("x-dead-letter-strategy")
        is_sure = strategy is not None and strategy.value == b"at-least-once"
        self._is_sure = is_sure and self.overflow == "reject-publish"

    def _level_count(self) -> int:
        return 2  # returned messages, and new ones

    def _expire_after_publish(self, entry: Entry, has_dropped: bool) -> None:
        del entry, has_dropped
        self._drop_expired()

    def run(self) -> None:
        """See ``Queue.run``."""
        if self._expires:
            self._drop_expired()
        super().run()

    def is_stored(self, message: Message) -> bool:
        """See ``Queue.is_stored``."""
        del message
        return True

    def _level(self, entry: Entry) -> int:
        del entry
        return _NEW

    def publish(self, message: Message, publisher: Channel | None = None) -> int:
        """See ``Queue.publish``."""
        if not self._has_limit or self.overflow == "drop-head":
            return super().publish(message, publisher)
        self._publisher = publisher
        outcome = super().publish(message, publisher)
        if self._is_over_limit():
            self._refused = dict.fromkeys(self._refused, True)
        return outcome

    def _refuses(self, message: Message) -> bool:
        """Refuse messages of the channels that found a limit exceeded, until the queue is well below it again.

        Dead letters are never refused.
        """
        del message
        publisher = self._publisher
        if publisher is None:
            return False
        if (self.max_length is None or self.ready <= int(self.max_length * _LOW)) and (
            self.max_bytes is None or self._bytes <= int(self.max_bytes * _LOW)
        ):
            self._refused = dict.fromkeys((each for each in self._refused if not each.is_closing), False)
        return self._refused.setdefault(publisher, self._is_over_limit())

    def raw(self, entry: Entry) -> bytes:
        """See ``Queue.raw``; a message that was delivered before has its count."""
        return self.raw_got(entry) if entry.count else entry.message.raw

    def raw_got(self, entry: Entry) -> bytes:
        """See ``Queue.raw_got``; here it has its count always."""
        raw = entry.message.raw
        counted = {**properties.headers(raw), "x-delivery-count": tables.long(entry.count)}
        return properties.with_headers(raw, tables.sort(counted))

    @property
    def consumer_count(self) -> int:
        """See ``Queue.consumer_count``.

        Those that wait for the single active one do not count. Those that were cancelled count until their last message
        is settled, and so do unacknowledged messages of ``basic.get``.
        """
        count = min(1, len(self.turns.all)) if self.is_single else len(self.turns.all)
        return count + len(self._got) + sum(each.in_flight > 0 for each in self._cancelled)

    def _hand_out(self, entry: Entry, consumer: Consumer) -> None:
        entry.redelivered = entry.count > 0
        super()._hand_out(entry, consumer)

    def get(self, *, no_ack: bool) -> tuple[Entry, int] | None:
        """See ``Queue.get``."""
        if self._expires:
            self._drop_expired()
        found = super().get(no_ack=no_ack)
        if found is not None:
            entry, _ = found
            entry.redelivered = entry.count > 0
            if not no_ack:
                self._got[entry.position] = None
        return found

    def _left(self, before: int) -> int:
        return before

    # --- consumers

    def add_consumer(self, consumer: Consumer) -> None:
        """See ``Queue.add_consumer``; one that was cancelled before continues with its unacknowledged messages."""
        for former in [each for each in self._cancelled if each.in_flight]:
            if former.channel is consumer.channel and former.tag == consumer.tag:
                consumer.channel.hand_over(former, consumer)
        super().add_consumer(consumer)

    def remove_consumer(self, consumer: Consumer) -> None:
        """See ``Queue.remove_consumer``."""
        self._cancelled = [each for each in (*self._cancelled, consumer) if each.in_flight]
        super().remove_consumer(consumer)

    def channel_gone(self, channel: Channel, consumers: list[Consumer], entries: list[Entry]) -> None:
        """See ``Queue.channel_gone``."""
        self._cancelled = [each for each in self._cancelled if each.in_flight and each.channel is not channel]
        super().channel_gone(channel, consumers, entries)

    # --- settling

    def settled(self, entry: Entry) -> bool:
        """See ``Queue.settled``."""
        self._got.pop(entry.position, None)
        return super().settled(entry)

    def requeue(self, entries: Iterable[Entry], *, is_channel_gone: bool = False) -> None:
        """See the module."""
        for entry in entries:
            if not self.settled(entry):
                continue
            entry.count += 1
            limit = self._delivery_limit
            if limit is not None and entry.count > limit:
                self.discard(entry, dead_letters.DELIVERY_LIMIT)
                continue
            self.ready += 1
            self._bytes += len(entry.message.body)
            if limit is not None or is_channel_gone:
                self._levels[_RETURNED].append(entry)
            else:
                entry.position = self._next
                self._next += 1
                self._levels[_NEW].append(entry)
                self.run()
        if self._has_limit:
            # consumers come first
            self.run()
            self._drop_head()

    # --- dead letters

    def discard(self, entry: Entry, reason: str) -> None:
        """See ``Queue.discard``; with the strategy at-least-once it is kept until a queue has taken it."""
        if not self._is_sure or self.dead_letter_exchange is None or reason == dead_letters.MAXLEN:
            super().discard(entry, reason)
        else:
            self.letters.append((entry, reason))
            self.broker.letters.post(self, entry.message, reason, lambda taken: self._posted(entry, reason, taken))

    def _posted(self, entry: Entry, reason: str, taken: bool) -> None:
        """Forget a dead letter that a queue has taken, or try again later."""
        if (entry, reason) not in self.letters or self.is_deleted:
            return
        self.letters.remove((entry, reason))
        if taken:
            self.removed(entry)
            return
        self.letters.append((entry, reason))
        self._retries.append(self.broker.host.call_later(_LETTER_RETRY, lambda: self._retry(entry, reason)))

    def _retry(self, entry: Entry, reason: str) -> None:
        if (entry, reason) in self.letters and not self.is_deleted:
            self.letters.remove((entry, reason))
            self.discard(entry, reason)

    def stop_timers(self) -> None:
        """See ``Queue.stop_timers``."""
        super().stop_timers()
        for timer in self._retries:
            timer.cancel()
        self._retries.clear()

    def entries(self) -> list[Entry]:
        """Return all messages in the order in which they are delivered after a restart."""
        returned, new = self._levels
        letters = [entry for entry, _ in self.letters]
        return [*letters, *returned, *sorted(self.unacked.values(), key=lambda entry: entry.position), *new]

    def restore(self, kept: list[Entry], back: list[Entry]) -> None:
        """See ``Queue.restore``: deliveries that were not settled count."""
        dying = {entry.position: reason for entry, reason in self.letters}
        returned = {entry.position for entry in self._levels[_RETURNED]} | {entry.position for entry in back}
        again, new = [], []
        self.letters = []
        for entry in [*back, *kept]:
            if entry.position in self.unacked or entry in back:
                entry.count += 1
            if entry.position in dying:
                self.letters.append((entry, dying[entry.position]))
            elif self._delivery_limit is not None and entry.count > self._delivery_limit:
                self.letters.append((entry, dead_letters.DELIVERY_LIMIT))
            elif entry.position in returned or entry.position in self.unacked:
                again.append(entry)
            else:
                new.append(entry)
        self._got.clear()
        self._cancelled.clear()
        self._reset(new)
        self._refused.clear()
        for entry in again:
            entry.is_synced = True
            self._levels[_RETURNED].append(entry)
            self.ready += 1
            self._bytes += len(entry.message.body)

    def resume(self) -> None:
        """See ``Queue.resume``."""
        super().resume()
        letters, self.letters = self.letters, []
        for entry, reason in letters:
            entry.is_synced = True
            self.discard(entry, reason)
