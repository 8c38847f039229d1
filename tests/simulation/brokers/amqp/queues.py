"""Classic queues: messages ready and unacknowledged, limits, expiry, and the delivery to consumers.

Messages are in levels, one for each priority, the highest first. A requeued message goes back to its position. Only the
message that is next to be delivered expires, as in RabbitMQ.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import TYPE_CHECKING, Final

from tests.simulation.brokers.amqp import dead_letters
from tests.simulation.brokers.amqp.consumers import Consumer, Turns
from tests.simulation.brokers.amqp.messages import Entry, Message
from tests.simulation.brokers.amqp.tables import Table

if TYPE_CHECKING:
    from tests.simulation.brokers.amqp.broker import AmqpBroker
    from tests.simulation.brokers.amqp.channel import Channel
    from tests.simulation.brokers.amqp.connection import AmqpConnection
    from tests.simulation.brokers.amqp.virtual_host import VirtualHost
    from tests.simulation.brokers.host import Timer

#: outcomes of a publish: done with, to be confirmed once it is stored, refused
TAKEN: Final = 0
STORED: Final = 1
REFUSED: Final = 2


def _text(arguments: Table, name: str) -> str | None:
    field = arguments.get(name)
    return None if field is None else field.value.decode("utf-8", "surrogateescape")


def _number(arguments: Table, name: str) -> int | None:
    field = arguments.get(name)
    return None if field is None else field.value


class Queue:
    """A classic queue; its arguments were checked.

    Args:
        owner: the connection of an exclusive queue.

    Attributes:
        ready: the number of messages that are ready.
        unacked: the unacknowledged messages by their positions.
        is_deleted: whether acknowledgements of its messages have no effect any more.
    """

    type = "classic"
    #: whether its messages count for the limit of a channel
    is_limited_by_channel = True
    #: that a message has at least, ms
    shortest_ttl = 0

    def __init__(
        self, broker: AmqpBroker, vhost: VirtualHost, name: str, *, durable: bool, auto_delete: bool,
        owner: AmqpConnection | None, arguments: Table,
    ) -> None:  # fmt: skip
        self.broker = broker
        self.vhost = vhost
        self.name = name
        self.durable = durable
        self.auto_delete = auto_delete
        self.owner = owner
        self.arguments = arguments
        self.is_deleted = False
        self.ready = 0
        self.unacked: dict[int, Entry] = {}
        self.turns = Turns(is_eager=self.type == "quorum")
        self.exclusive_consumer: Consumer | None = None
        self.had_consumers = False
        single = arguments.get("x-single-active-consumer")
        self.is_single = single is not None and bool(single.value)
        self.active: Consumer | None = None
        self.max_length = _number(arguments, "x-max-length")
        self.max_bytes = _number(arguments, "x-max-length-bytes")
        self.overflow = _text(arguments, "x-overflow") or "drop-head"
        self.ttl = _number(arguments, "x-message-ttl")
        self.dead_letter_exchange = _text(arguments, "x-dead-letter-exchange")
        self.dead_letter_key = _text(arguments, "x-dead-letter-routing-key")
        expires = _number(arguments, "x-expires")
        self._lease = None if expires is None else expires / 1000
        self._lease_timer: Timer | None = None
        self._top = _number(arguments, "x-max-priority") or 0
        self._levels: list[deque[Entry]] = [deque() for _ in range(self._level_count())]
        self._has_limit = self.max_length is not None or self.max_bytes is not None
        self._bytes = 0
        self._next = 0
        #: whether a message has ever had an expiry
        self._expires = False
        self._expiry_timer: Timer | None = None
        self.touch()

    def _level_count(self) -> int:
        return self._top + 1

    # --- publishing

    def publish(self, message: Message, publisher: Channel | None = None) -> int:
        """Take a message of a channel, or a dead letter; return ``TAKEN``, ``STORED`` or ``REFUSED``."""
        del publisher
        if self._has_limit and self.overflow != "drop-head" and self._refuses(message):
            return REFUSED
        position = self._next
        self._next = position + 1
        entry = Entry(message, position, None)
        is_stored = self.is_stored(message)
        ttl, own = self.ttl, message.expiration
        if ttl is not None or own is not None:
            least = own if ttl is None else ttl if own is None else min(ttl, own)
            assert least is not None
            entry.expires = self.broker.host.now() + max(least, self.shortest_ttl) / 1000
            self._expires = True
        if not self.ready:
            consumer = self._take_consumer()
            if consumer is not None:
                if not is_stored or consumer.no_ack:
                    self._hand_out(entry, consumer)
                    return TAKEN
                self.broker.storage.add(entry)
                self._hand_out(entry, consumer)
                return STORED
        if is_stored:
            self.broker.storage.add(entry)
        self._append(entry)
        has_dropped = self._has_limit and self._drop_head()
        if self._expires:
            self._expire_after_publish(entry, has_dropped)
        return STORED if is_stored else TAKEN

    def _expire_after_publish(self, entry: Entry, has_dropped: bool) -> None:
        """Look for expired messages where RabbitMQ does: not if a message of higher priority comes to the head."""
        if has_dropped or (self.ready == 1 and entry.expires is not None):
            self._drop_expired()

    def is_stored(self, message: Message) -> bool:
        """Return whether a message survives a restart of the broker."""
        return message.persistent and self.durable

    def _refuses(self, message: Message) -> bool:
        is_full = (self.max_length is not None and self.ready + 1 > self.max_length) or (
            self.max_bytes is not None and self._bytes + len(message.body) > self.max_bytes
        )
        if is_full and self.overflow == "reject-publish-dlx":
            self._dead_letter(message, dead_letters.MAXLEN)
        return is_full

    def _level(self, entry: Entry) -> int:
        return self._top - min(entry.message.priority, self._top)

    def _append(self, entry: Entry) -> None:
        self._levels[self._level(entry)].append(entry)
        self.ready += 1
        self._bytes += len(entry.message.body)

    def _pop(self) -> Entry:
        for level in self._levels:
            if level:
                entry = level.popleft()
                self.ready -= 1
                self._bytes -= len(entry.message.body)
                return entry
        raise IndexError(self.name)

    # --- limits and expiry

    def _is_over_limit(self) -> bool:
        return (self.max_length is not None and self.ready > self.max_length) or (
            self.max_bytes is not None and self._bytes > self.max_bytes
        )

    def _drop_head(self) -> bool:
        before = self.ready
        if self.overflow == "drop-head":
            while self.ready and self._is_over_limit():
                self.discard(self._pop(), dead_letters.MAXLEN)
        return self.ready < before

    def _drop_expired(self) -> None:
        """Drop expired messages while one is the next to be delivered, and watch the one that is next then."""
        now = self.broker.host.now()
        following: float | None = None
        for level in self._levels:
            while level and level[0].expires is not None and level[0].expires <= now:
                entry = level.popleft()
                self.ready -= 1
                self._bytes -= len(entry.message.body)
                self.discard(entry, dead_letters.EXPIRED)
            if level:
                following = level[0].expires
                break
        if self._expiry_timer is not None:
            self._expiry_timer.cancel()
            self._expiry_timer = None
        if following is not None and not self.is_deleted:
            self._expiry_timer = self.broker.host.call_later(following - now, self._on_expiry)

    def _on_expiry(self) -> None:
        self._expiry_timer = None
        self._drop_expired()

    def discard(self, entry: Entry, reason: str) -> None:
        """Drop a message, or send it to the dead-letter exchange."""
        self.removed(entry)
        self._dead_letter(entry.message, reason)

    def _dead_letter(self, message: Message, reason: str) -> None:
        if self.dead_letter_exchange is None:
            self.broker.dropped(reason, message)
        else:
            self.broker.letters.post(self, message, reason)

    def removed(self, entry: Entry) -> None:
        """Forget a message that has left the queue."""
        if entry.is_synced:
            self.broker.storage.remove(self, entry)

    # --- delivering

    def _take_consumer(self) -> Consumer | None:
        while True:
            consumer = self.active if self.is_single else self.turns.take()
            if consumer is None or (self.is_single and not consumer.has_credit):
                return None
            if self.broker.is_faulty and self.broker.injector.holds_back(consumer):
                continue
            return consumer

    def run(self) -> None:
        """Deliver messages while there are consumers with credit."""
        while self.ready:
            consumer = self._take_consumer()
            if consumer is None:
                return
            self._hand_out(self._pop(), consumer)
            if self._expires:
                self._drop_expired()

    def _hand_out(self, entry: Entry, consumer: Consumer) -> None:
        channel = consumer.channel
        if consumer.no_ack:
            self.removed(entry)
        else:
            self.unacked[entry.position] = entry
            consumer.in_flight += 1
            if channel.prefetch and self.is_limited_by_channel:
                channel.in_flight += 1
        channel.deliver(consumer, entry)
        entry.redelivered = True
        if not consumer.no_ack:
            self.turns.delivered(consumer)
        if self.broker.is_faulty:
            self.broker.injector.after_delivery(consumer)

    def raw(self, entry: Entry) -> bytes:
        """Return the properties that a message is delivered with."""
        return entry.message.raw

    def raw_got(self, entry: Entry) -> bytes:
        """Return the same for ``basic.get``."""
        return self.raw(entry)

    @property
    def arrivals(self) -> int:
        """Return the number of messages that have arrived so far."""
        return self._next

    @property
    def consumer_count(self) -> int:
        """Return the number of consumers, as it is told to clients."""
        return len(self.turns.all)

    def get(self, *, no_ack: bool) -> tuple[Entry, int] | None:
        """Return the first message and the number of those left, or ``None`` if there is none."""
        self.touch()
        if not self.ready:
            return None
        entry = self._pop()
        if no_ack:
            self.removed(entry)
        else:
            self.unacked[entry.position] = entry
        left = self.ready
        if self._expires:
            self._drop_expired()
        return entry, self._left(left)

    def _left(self, before: int) -> int:
        """Return the number that ``get`` tells; ``before`` is the one before expired messages were dropped."""
        del before
        return self.ready

    # --- settling; entries come in the order of delivery, the consumers' credit was restored

    def settled(self, entry: Entry) -> bool:
        """Forget an unacknowledged message; return ``False`` if that was done before."""
        return self.unacked.pop(entry.position, None) is not None

    def acknowledge(self, entries: Iterable[Entry]) -> None:
        """Forget messages that were acknowledged."""
        for entry in entries:
            if self.settled(entry):
                self.removed(entry)

    def reject(self, entries: Iterable[Entry]) -> None:
        """Dead-letter messages that were rejected."""
        for entry in entries:
            if self.settled(entry):
                self.discard(entry, dead_letters.REJECTED)

    def requeue(self, entries: Iterable[Entry], *, is_channel_gone: bool = False) -> None:
        """Make messages ready again, at their positions."""
        del is_channel_gone
        groups: dict[int, list[Entry]] = {}
        for entry in entries:
            if self.settled(entry):
                groups.setdefault(self._level(entry), []).append(entry)
                self.ready += 1
                self._bytes += len(entry.message.body)
        for level, back in groups.items():
            self._put_back(level, back)
        if self._has_limit:
            self._drop_head()
        if self._expires:
            self._drop_expired()

    def _put_back(self, level: int, entries: list[Entry]) -> None:
        entries.sort(key=_position)
        line = self._levels[level]
        if not line or entries[-1].position < line[0].position:
            line.extendleft(reversed(entries))
        else:
            self._levels[level] = deque(sorted([*line, *entries], key=_position))

    # --- consumers

    def add_consumer(self, consumer: Consumer) -> None:
        """Add a consumer; ``run`` delivers to it."""
        self.turns.add(consumer)
        self.had_consumers = True
        if consumer.exclusive:
            self.exclusive_consumer = consumer
        if self.is_single and self.active is None:
            self.active = consumer
        if self._lease_timer is not None:
            self._lease_timer.cancel()
            self._lease_timer = None

    def remove_consumer(self, consumer: Consumer) -> None:
        """Remove a consumer. An auto-delete queue is deleted with its last one."""
        self._drop_consumer(consumer)
        if not self._delete_unused():
            self.run()

    def _drop_consumer(self, consumer: Consumer) -> None:
        self.turns.remove(consumer)
        if self.exclusive_consumer is consumer:
            self.exclusive_consumer = None
        if self.active is consumer:
            self.active = self.turns.first()
        self.touch()

    def _delete_unused(self) -> bool:
        if self.auto_delete and self.had_consumers and not self.turns.all and not self.is_deleted:
            self.vhost.delete_queue(self)
        return self.is_deleted

    def channel_gone(self, channel: Channel, consumers: list[Consumer], entries: list[Entry]) -> None:
        """Remove the consumers of a channel that has ended, and requeue its unacknowledged messages."""
        del channel
        for consumer in consumers:
            self._drop_consumer(consumer)
        if not self._delete_unused():
            self.requeue(entries, is_channel_gone=True)
            self.run()

    def credit(self, channel: Channel) -> None:
        """Let consumers of a channel that have credit again take turns."""
        self.turns.credit_channel(channel)

    # --- the queue as a whole

    def interrupt(self) -> None:
        """Requeue unacknowledged messages, and deliver none: the node of the queue is down."""
        self.stop_timers()
        for consumer in self.turns.all:
            consumer.is_paused = True
        self.requeue([*self.unacked.values()], is_channel_gone=True)
        self.stop_timers()

    def forget_consumers(self) -> None:
        """Forget the consumers of a queue whose node is down."""
        self.turns = Turns(is_eager=self.type == "quorum")
        self.active = self.exclusive_consumer = None

    def touch(self) -> None:
        """Begin the time anew after which the unused queue expires."""
        if self._lease_timer is not None:
            self._lease_timer.cancel()
            self._lease_timer = None
        if self._lease is not None and not self.turns.all and not self.is_deleted:
            self._lease_timer = self.broker.host.call_later(self._lease, self._on_lease_end)

    def _on_lease_end(self) -> None:
        self._lease_timer = None
        self.broker.host.note(f"amqp: queue {self.name!r} expires")
        self.vhost.delete_queue(self)

    def purge(self) -> int:
        """Remove the messages that are ready, and return their number."""
        count = self.ready
        for level in self._levels:
            for entry in level:
                self.removed(entry)
                self.broker.dropped("purged", entry.message)
            level.clear()
        self.ready = self._bytes = 0
        return count

    def end(self, reason: str | None) -> None:
        """End after the queue was deleted, or the broker has ended; with a reason, its messages count as dropped."""
        self.is_deleted = True
        self.stop_timers()
        if reason is not None:
            for entry in self.entries():
                self.removed(entry)
                self.broker.dropped(reason, entry.message)
        self.unacked.clear()

    def stop_timers(self) -> None:
        """Withdraw all timers."""
        for timer in (self._lease_timer, self._expiry_timer):
            if timer is not None:
                timer.cancel()
        self._lease_timer = self._expiry_timer = None

    def entries(self) -> list[Entry]:
        """Return all messages in their order, the unacknowledged ones at their positions."""
        found = [*self.unacked.values(), *(entry for level in self._levels for entry in level)]
        return sorted(found, key=_position)

    def restore(self, kept: list[Entry], back: list[Entry]) -> None:
        """Begin again after a restart of the broker.

        Args:
            kept: its messages that are on disk, in the order of ``entries``.
            back: messages that had left it, which the disk does not know yet.
        """
        for entry in back:
            entry.redelivered = True
        self._reset(sorted([*kept, *back], key=_position))

    def _reset(self, entries: list[Entry]) -> None:
        self.forget_consumers()
        self.had_consumers = False
        self.unacked.clear()
        self._levels = [deque() for _ in self._levels]
        self.ready = self._bytes = 0
        for entry in entries:
            entry.is_synced = True
            self._append(entry)

    def resume(self) -> None:
        """Begin to count time again, once all queues are restored."""
        self.touch()
        self._drop_expired()


def _position(entry: Entry) -> int:
    return entry.position
