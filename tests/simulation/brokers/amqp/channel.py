"""One channel: its methods, consumers, deliveries and unacknowledged messages."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any, Final

from pamqp import commands

from tests.simulation.brokers.amqp import arguments, declarations, frames, methods, properties
from tests.simulation.brokers.amqp.confirms import Confirms
from tests.simulation.brokers.amqp.consumers import Consumer
from tests.simulation.brokers.amqp.errors import AmqpError, access_refused, not_found, precondition_failed, resource
from tests.simulation.brokers.amqp.frames import short
from tests.simulation.brokers.amqp.messages import Entry, Message
from tests.simulation.brokers.amqp.queues import REFUSED, STORED, Queue
from tests.simulation.brokers.amqp.virtual_host import REPLY_TO

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from pamqp.base import Frame

    from tests.simulation.brokers.amqp.connection import AmqpConnection

_U64: Final = struct.Struct(">Q")
#: the largest message, bytes
MAX_BODY: Final = 134_217_728
_MULTIPLE: Final = 1
_REQUEUE: Final = 2
#: targets of publishes that are remembered
_MAX_TARGETS: Final = 1024

#: an unacknowledged message, its queue, and the consumer it was delivered to; ``None`` for ``basic.get``
Unacked = tuple[Entry, Queue, Consumer | None]


class Channel:
    """See the module. Methods raise :class:`AmqpError` for what RabbitMQ refuses.

    Attributes:
        prefetch: the largest number of unacknowledged messages of all consumers; 0 for unlimited.
        in_flight: the messages that count for ``prefetch``: all that are unacknowledged when the limit is set, and what
            consumers are sent afterwards.
        is_closing: whether the broker has closed it, so that everything but the answer is ignored.
        last_queue: name of the queue that was declared last.
        reply_address: that replies to requests of this channel are published to, while there is a consumer of them.
    """

    def __init__(self, connection: AmqpConnection, number: int) -> None:
        self.connection = connection
        self.number = number
        self.broker = connection.broker
        self.vhost = connection.open_vhost
        self.confirms = Confirms(self)
        self.prefetch = 0
        self.in_flight = 0
        self.is_closing = False
        self.consumers: dict[str, Consumer] = {}
        self.unacked: dict[int, Unacked] = {}
        self.reply_address = ""
        self._reply_tag = ""
        self._consumer_prefetch = 0
        self._last_tag = 0
        self.last_queue = ""
        #: exchange, routing key, both as on the wire, and "mandatory", by the arguments of a publish
        self._targets: dict[bytes, tuple[str, str, bytes, bool]] = {}

    # --- publishing

    def target(self, given: bytes) -> tuple[str, str, bytes, bool]:
        """Return exchange, routing key, both as on the wire, and "mandatory" of the arguments of a publish."""
        found = self._targets.get(given)
        if found is None:
            middle = 1 + given[0]
            end = middle + 1 + given[middle]
            flags = given[end]
            if flags & 2:
                raise AmqpError(540, "immediate=true")
            names = (given[1:middle].decode("utf-8", "surrogateescape"),
                     given[middle + 1 : end].decode("utf-8", "surrogateescape"))  # fmt: skip
            if len(self._targets) >= _MAX_TARGETS:
                self._targets.clear()
            found = self._targets[given] = (*names, given[:end], bool(flags & 1))
        return found

    def publish(self, target: tuple[str, str, bytes, bool], raw: bytes, body: bytes) -> None:
        """Publish a message: route it, and confirm it once it is stored.

        Args:
            target: see :meth:`target`.
            raw: properties, flags and values as on the wire.
        """
        name, key, route, mandatory = target
        broker, vhost, confirms = self.broker, self.vhost, self.confirms
        counters = broker.counters
        counters.published += 1
        exchange = vhost.exchanges.get(name)
        if exchange is None:
            vhost.exchange(name)
            return
        if exchange.internal:
            raise access_refused(f"cannot publish to internal {resource('exchange', name, vhost.name)}")
        if len(body) > MAX_BODY:
            raise precondition_failed(f"message size {len(body)} is larger than configured max size {MAX_BODY}")
        message = Message(name, key, route, raw, body, self.connection.user_bytes)
        if message.reply_to is not None and message.reply_to == REPLY_TO.encode():
            if not self.reply_address:
                raise precondition_failed("fast reply consumer does not exist")
            message.raw = properties.with_reply_to(message.raw, self.reply_address)
        number = confirms.expect(message) if confirms.is_on else 0
        if number and broker.is_faulty and broker.injector.nacks():
            confirms.refuse(number)
            return
        if not name:
            broker.deliver_replies(message)
        queues = vhost.route(exchange, message)
        if not queues:
            if mandatory:
                counters.returned += 1
                payload = frames.returned(312, "NO_ROUTE", message.route)
                self._send_content(payload, message.raw, body)
            broker.dropped("unroutable", message)
            if number:
                confirms.stored(number)
            return
        is_stored = is_refused = is_taken = False
        for queue in queues:
            outcome = queue.publish(message, self)
            if outcome == REFUSED:
                is_refused = True
            else:
                is_taken = True
                is_stored = is_stored or outcome == STORED
        if is_taken:
            counters.accepted += 1
            if broker.on_accepted is not None:
                broker.on_accepted(name, key, body)
        if not number:
            return
        if is_refused:
            confirms.refuse(number)
        elif is_stored:
            broker.storage.confirm_after(self, number)
        else:
            confirms.stored(number)

    # --- deliveries

    def deliver(self, consumer: Consumer, entry: Entry) -> None:
        """Send a message to a consumer."""
        self._last_tag = tag = self._last_tag + 1
        message, queue, counters = entry.message, consumer.queue, self.broker.counters
        counters.delivered += 1
        if entry.redelivered:
            counters.redelivered += 1
        if not consumer.no_ack:
            self.unacked[tag] = (entry, queue, consumer)
        payload = frames.deliver(consumer.wire_tag, tag, entry.redelivered, message.route)
        connection = self.connection
        connection.write(frames.content(self.number, payload, queue.raw(entry), message.body, connection.frame_max))
        if self.broker.on_delivered is not None:
            self.broker.on_delivered(consumer, message.body)

    def deliver_reply(self, message: Message) -> None:
        """Send a message that was published to the address of replies."""
        self._last_tag += 1
        payload = frames.deliver(short(self._reply_tag), self._last_tag, False, message.route)
        self._send_content(payload, message.raw, message.body)

    def _send_content(self, payload: bytes, raw: bytes, body: bytes) -> None:
        self.connection.write(frames.content(self.number, payload, raw, body, self.connection.frame_max))

    def consumer_gone(self, consumer: Consumer) -> None:
        """Tell the client that the broker has cancelled a consumer."""
        if self.consumers.pop(consumer.tag, None) is not None and self.connection.can("consumer_cancel_notify"):
            self.send(commands.Basic.Cancel, consumer_tag=consumer.tag, nowait=True)

    def hand_over(self, former: Consumer, consumer: Consumer) -> None:
        """Give the unacknowledged messages of a consumer that was cancelled to another one."""
        for tag, (entry, queue, owner) in self.unacked.items():
            if owner is former:
                self.unacked[tag] = (entry, queue, consumer)
        consumer.in_flight, former.in_flight = former.in_flight, 0

    # --- settling

    def ack(self, tag: int, multiple: bool) -> None:
        """Acknowledge messages."""
        if not multiple:
            found = self.unacked.pop(tag, None)
            if found is None:
                raise precondition_failed(f"unknown delivery tag {tag}")
            entry, queue, consumer = found
            self.broker.counters.acknowledged += 1
            queue.acknowledge((entry,))
            if consumer is not None:
                consumer.in_flight -= 1
                if self.prefetch:
                    self._count_settled([found])
                    self._resume([queue])
                elif not queue.is_deleted:
                    queue.credit(self)
                    queue.run()
            return
        taken = self._take(tag, multiple)
        self.broker.counters.acknowledged += len(taken)
        self._settle(taken, Queue.acknowledge)

    def nack(self, tag: int, *, multiple: bool, requeue: bool) -> None:
        """Reject messages."""
        self._reject(self._take(tag, multiple), requeue=requeue)

    def _reject(self, taken: list[Unacked], *, requeue: bool) -> None:
        counters = self.broker.counters
        if requeue:
            counters.requeued += len(taken)
            self._settle(taken, lambda queue, entries: queue.requeue(entries))
        else:
            counters.rejected += len(taken)
            self._settle(taken, lambda queue, entries: queue.reject(entries))

    def _settle(self, taken: list[Unacked], how: Callable[[Queue, list[Entry]], object]) -> None:
        """Settle messages and deliver others: for each queue and consumer at once, in the order of their names."""
        groups: dict[tuple[str, str], list[Unacked]] = {}
        for each in taken:
            _, queue, consumer = each
            groups.setdefault((queue.name, "" if consumer is None else consumer.tag), []).append(each)
        for key in sorted(groups):
            group = groups[key]
            _, queue, consumer = group[0]
            if consumer is not None:
                consumer.in_flight -= len(group)
            if not queue.is_deleted:
                queue.credit(self)
                how(queue, [entry for entry, _, _ in group])
                queue.run()
        self._count_settled(taken)
        self._resume(dict.fromkeys(queue for _, queue, _ in taken))

    def _count_settled(self, taken: list[Unacked]) -> None:
        """Give back the credit of the channel."""
        if self.prefetch:
            count = sum(consumer is not None and queue.is_limited_by_channel for _, queue, consumer in taken)
            self.in_flight = max(0, self.in_flight - count)

    def _take(self, tag: int, multiple: bool) -> list[Unacked]:
        """Remove messages from the unacknowledged ones, and return them in order."""
        unacked = self.unacked
        if multiple and not tag:
            tags = [*unacked]
        elif tag not in unacked:
            raise precondition_failed(f"unknown delivery tag {tag}")
        elif multiple:
            tags = []
            for each in unacked:
                tags.append(each)
                if each == tag:
                    break
        else:
            tags = [tag]
        return [unacked.pop(each) for each in tags]

    def resume(self) -> None:
        """Deliver to all consumers that have credit again."""
        self._resume([consumer.queue for consumer in self.consumers.values()])

    def _resume(self, queues: Iterable[Queue]) -> None:
        """Deliver to consumers that have credit again; the limit of the channel favours no queue."""
        everywhere = (consumer.queue for consumer in self.consumers.values()) if self.prefetch else ()
        found = [*dict.fromkeys((*queues, *everywhere))]
        if self.prefetch and len(found) > 1:
            first = self.broker.host.random.randrange(len(found))
            found = found[first:] + found[:first]
        for queue in found:
            if not queue.is_deleted:
                queue.credit(self)
                queue.run()

    # --- methods that pass rarely

    def handle(self, index: int, given: Any) -> None:
        """Execute a method; ``given`` has its arguments."""
        handler = _HANDLERS.get(index) or declarations.HANDLERS.get(index)
        if handler is None:
            name = methods.NAMES.get(index, f"{index >> 16}.{index & 0xFFFF}")
            self.broker.host.note(f"amqp: {self.connection.peer.name} asked for {name}, which is not simulated")
            raise AmqpError(540, f"{name} is not simulated")
        handler(self, given)

    def send(self, kind: type[Frame], **values: Any) -> None:
        """Send a method."""
        self.connection.write(methods.encode(kind, self.number, **values))

    def answer(self, given: Any, kind: type[Frame], **values: Any) -> None:
        """Send the answer to a method with the arguments ``given``, unless the client wants none."""
        if not getattr(given, "nowait", False):
            self.send(kind, **values)

    def _flow(self, given: Any) -> None:
        if not given.active:
            raise AmqpError(540, "active=false")
        self.send(commands.Channel.FlowOk, active=True)

    def _select_confirms(self, given: Any) -> None:
        self.confirms.is_on = True
        self.answer(given, commands.Confirm.SelectOk)

    def queue_name(self, name: str) -> str:
        """Return the name of a queue; without one, of the queue that was declared last on this channel."""
        if name:
            return name
        if not self.last_queue:
            raise not_found("no previously declared queue")
        return self.last_queue

    def _qos(self, given: Any) -> None:
        if given.prefetch_size:
            raise AmqpError(540, f"prefetch_size!=0 ({given.prefetch_size})")
        if given.global_:
            if not self.prefetch:
                self.in_flight = len(self.unacked)
            self.prefetch = given.prefetch_count
        else:
            self._consumer_prefetch = given.prefetch_count
            self.prefetch = 0  # as RabbitMQ does
        self.send(commands.Basic.QosOk)
        self.resume()

    def _consume(self, given: Any) -> None:
        if given.queue == REPLY_TO:
            self._consume_replies(given)
            return
        name, tag = self.queue_name(given.queue), given.consumer_tag
        if tag in self.consumers:
            raise AmqpError(530, f"attempt to reuse consumer tag '{tag}'")
        queue = self.vhost.accessible(name, self.connection)
        what = resource("queue", name, self.vhost.name)
        arguments.check_consumer(what, given.arguments)
        exclusive = given.exclusive and queue.type == "classic"
        if queue.type == "quorum" and self.prefetch:
            raise AmqpError(540, f"{what} does not support global qos")
        if queue.exclusive_consumer is not None or (exclusive and (queue.turns.all or queue.is_single)):
            raise access_refused(f"{what} in exclusive use")
        tag = tag or f"amq.ctag-{self.broker.token()}"
        consumer = self.consumers[tag] = Consumer(
            tag, self, queue, no_ack=given.no_ack, exclusive=exclusive, prefetch=self._consumer_prefetch,
            arguments=given.arguments,
        )  # fmt: skip
        self.answer(given, commands.Basic.ConsumeOk, consumer_tag=tag)
        queue.add_consumer(consumer)
        queue.run()

    def _consume_replies(self, given: Any) -> None:
        if not given.no_ack:
            raise precondition_failed("reply consumer cannot acknowledge")
        if self.reply_address:
            raise precondition_failed("reply consumer already set")
        self._reply_tag = given.consumer_tag or f"amq.ctag-{self.broker.token()}"
        self.reply_address = f"{REPLY_TO}.{self.broker.token()}"
        self.broker.replies[self.reply_address] = self
        self.answer(given, commands.Basic.ConsumeOk, consumer_tag=self._reply_tag)

    def _cancel(self, given: Any) -> None:
        tag = given.consumer_tag
        if self.reply_address and tag == self._reply_tag:
            self._end_replies()
        consumer = self.consumers.pop(tag, None)
        self.answer(given, commands.Basic.CancelOk, consumer_tag=tag)
        if consumer is not None:
            consumer.queue.remove_consumer(consumer)

    def _get(self, given: Any) -> None:
        name = self.queue_name(given.queue)
        queue = self.vhost.accessible(name, self.connection)
        if queue.type == "quorum" and queue.is_single:
            what = resource("queue", name, self.vhost.name)
            raise AmqpError(405, f"cannot obtain access to locked {what}. basic.get operations are not supported by "
                                 "quorum queues with single active consumer")  # fmt: skip
        found = queue.get(no_ack=given.no_ack)
        if found is None:
            self.send(commands.Basic.GetEmpty)
            return
        entry, left = found
        self._last_tag += 1
        self.broker.counters.delivered += 1
        if not given.no_ack:
            self.unacked[self._last_tag] = (entry, queue, None)
        payload = frames.got(self._last_tag, entry.redelivered, entry.message.route, left)
        self._send_content(payload, queue.raw_got(entry), entry.message.body)
        entry.redelivered = True

    def _recover(self, given: Any, *, is_answered: bool = True) -> None:
        if not given.requeue:
            raise AmqpError(540, "requeue=false")
        taken = self._take(0, True)
        if is_answered:
            self.send(commands.Basic.RecoverOk)
        self._reject(taken, requeue=True)

    # --- the end

    def pause(self) -> None:
        """Deliver nothing more to the consumers."""
        for consumer in self.consumers.values():
            consumer.is_paused = True

    def end(self) -> None:
        """End: remove the consumers, and requeue unacknowledged messages."""
        self.confirms.end()
        self._end_replies()
        consumers, self.consumers = self.consumers, {}
        unacked, self.unacked = self.unacked, {}
        gone: dict[Queue, tuple[list[Consumer], list[Entry]]] = {}
        for consumer in consumers.values():
            gone.setdefault(consumer.queue, ([], []))[0].append(consumer)
        # in the order of the consumers' names, which is that of messages that a quorum queue gets back
        for entry, queue, _ in sorted(unacked.values(), key=lambda each: each[2].tag if each[2] is not None else ""):
            gone.setdefault(queue, ([], []))[1].append(entry)
        for queue, (theirs, entries) in gone.items():
            if not queue.is_deleted:
                queue.channel_gone(self, [each for each in theirs if each in queue.turns.all], entries)

    def _end_replies(self) -> None:
        if self.reply_address:
            self.broker.replies.pop(self.reply_address, None)
            self.reply_address = ""


_HANDLERS: Final[dict[int, Callable[[Channel, Any], None]]] = {
    commands.Channel.Flow.index: Channel._flow,
    commands.Confirm.Select.index: Channel._select_confirms,
    commands.Basic.Qos.index: Channel._qos,
    commands.Basic.Consume.index: Channel._consume,
    commands.Basic.Cancel.index: Channel._cancel,
    commands.Basic.Get.index: Channel._get,
    commands.Basic.Recover.index: Channel._recover,
    (60 << 16 | 100): lambda channel, given: channel._recover(given, is_answered=False),
}
