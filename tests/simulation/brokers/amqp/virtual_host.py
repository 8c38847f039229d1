"""A virtual host: its exchanges, queues and bindings, and how messages are routed."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from tests.simulation.brokers.amqp import arguments, dead_letters
from tests.simulation.brokers.amqp.errors import AmqpError, access_refused, not_found, precondition_failed, resource
from tests.simulation.brokers.amqp.exchanges import PREDECLARED, TYPES, Binding, Destination, Exchange
from tests.simulation.brokers.amqp.messages import Entry, Message
from tests.simulation.brokers.amqp.queues import REFUSED, Queue
from tests.simulation.brokers.amqp.quorum import QuorumQueue
from tests.simulation.brokers.amqp.tables import Table

if TYPE_CHECKING:
    from tests.simulation.brokers.amqp.broker import AmqpBroker
    from tests.simulation.brokers.amqp.connection import AmqpConnection

#: queues by their names, a prefix of the names of replies
REPLY_TO: Final = "amq.rabbitmq.reply-to"
_LOCKED: Final = (
    "It could be originally declared on another connection or the exclusive property value does not match that of the "
    "original declaration."
)


class VirtualHost:
    """See the module. Methods raise :class:`AmqpError` for what RabbitMQ refuses."""

    def __init__(self, broker: AmqpBroker, name: str) -> None:
        self.broker = broker
        self.name = name
        self.queues: dict[str, Queue] = {}
        self.exchanges: dict[str, Exchange] = {
            each: Exchange(each, kind, durable=True, auto_delete=False, internal=each == "amq.rabbitmq.trace",
                           arguments={})
            for each, kind in PREDECLARED.items()
        }  # fmt: skip
        #: queues whose node is down: see :meth:`take_away`
        self.absent: dict[str, Queue] = {}
        #: queues by exchange and routing key; ``None`` where the headers matter
        self._routes: dict[tuple[str, str], tuple[Queue, ...] | None] = {}

    # --- looking up

    def exchange(self, name: str) -> Exchange:
        """Return an exchange, or raise 404."""
        found = self.exchanges.get(name)
        if found is None:
            raise not_found(f"no {self._exchange_name(name)}")
        return found

    def queue(self, name: str) -> Queue:
        """Return a queue, or raise 404."""
        found = self.queues.get(name)
        if found is None:
            self._check_present(name)
            raise not_found(f"no {self._queue_name(name)}")
        return found

    def _check_present(self, name: str) -> None:
        if name in self.absent:
            what = f"durable {self._queue_name(name)} is down or inaccessible"
            raise not_found(f"home node 'other@localhost' of {what}")

    def accessible(self, name: str, connection: AmqpConnection) -> Queue:
        """Return a queue that ``connection`` may use, or raise 404 or 405."""
        found = self.queue(name)
        if found.owner is not None and found.owner is not connection:
            raise self._locked(name)
        return found

    def _locked(self, name: str) -> AmqpError:
        return AmqpError(405, f"cannot obtain exclusive access to locked {self._queue_name(name)}. {_LOCKED}")

    def _queue_name(self, name: str) -> str:
        return resource("queue", name, self.name)

    def _exchange_name(self, name: str) -> str:
        return resource("exchange", name, self.name)

    # --- exchanges

    def declare_exchange(
        self, name: str, kind: str, *, durable: bool, auto_delete: bool, internal: bool, given: Table
    ) -> None:
        """Declare an exchange, or compare it with the one that exists."""
        if kind not in TYPES:
            raise AmqpError(503, f"unknown exchange type '{kind}'")
        self._check_not_default(name)
        what = self._exchange_name(name)
        current = self.exchanges.get(name)
        if current is None:
            if name.startswith("amq."):
                raise access_refused(f"exchange name '{name}' contains reserved prefix 'amq.*'")
            arguments.check_exchange(what, given)
            self.exchanges[name] = Exchange(
                name, kind, durable=durable, auto_delete=auto_delete, internal=internal, arguments=given
            )
            self._routes.clear()
            return
        arguments.check_same(what, "type", current.kind, kind)
        arguments.check_flag(what, "durable", current.durable, durable)
        arguments.check_flag(what, "auto_delete", current.auto_delete, auto_delete)
        arguments.check_flag(what, "internal", current.internal, internal)
        key = "alternate-exchange"
        arguments.check_argument(what, key, current.arguments.get(key), given.get(key))

    def check_exchange(self, name: str) -> None:
        """Declare passively."""
        self._check_not_default(name)
        self.exchange(name)

    def _check_not_default(self, *names: str) -> None:
        if "" in names:
            raise access_refused("operation not permitted on the default exchange")

    def delete_exchange(self, name: str, *, if_unused: bool) -> None:
        """Delete an exchange, if it exists."""
        self._check_not_default(name)
        if name.startswith("amq."):
            raise access_refused(f"deletion of system {self._exchange_name(name)} not allowed")
        found = self.exchanges.get(name)
        if found is None:
            return
        if if_unused and found.bindings:
            raise precondition_failed(f"{self._exchange_name(name)} in use")
        self._remove_exchange(found)

    def _remove_exchange(self, exchange: Exchange) -> None:
        if self.exchanges.pop(exchange.name, None) is not None:
            exchange.bindings.clear()
            self._remove_bindings_to(Destination(False, exchange.name))

    # --- bindings

    def bind(self, source: str, destination: Destination, key: str, given: Table, connection: AmqpConnection) -> None:
        """Bind a queue or an exchange to an exchange."""
        self._check_not_default(source, *(() if destination.is_queue else (destination.name,)))
        exchange = self.exchange(source)
        (self.queue if destination.is_queue else self.exchange)(destination.name)
        exchange.check_binding(given)
        if destination.is_queue:
            self.accessible(destination.name, connection)
        binding = Binding(destination, key, given)
        exchange.bindings.setdefault(binding.identity, binding)
        self._routes.clear()

    def unbind(self, source: str, destination: Destination, key: str, given: Table, connection: AmqpConnection) -> None:
        """Remove a binding, if it exists."""
        self._check_not_default(source, *(() if destination.is_queue else (destination.name,)))
        exchange = self.exchanges.get(source)
        if exchange is None:
            return
        identity = Binding(destination, key, given).identity
        if identity in exchange.bindings:
            if destination.is_queue:
                self.accessible(destination.name, connection)
            del exchange.bindings[identity]
            self._routes.clear()
            self._delete_if_unbound(exchange)

    def _remove_bindings_to(self, destination: Destination) -> None:
        self._routes.clear()
        for exchange in [*self.exchanges.values()]:
            gone = [key for key, each in exchange.bindings.items() if each.destination == destination]
            for key in gone:
                exchange.bindings.pop(key, None)
            if gone:
                self._delete_if_unbound(exchange)

    def _delete_if_unbound(self, exchange: Exchange) -> None:
        if exchange.auto_delete and not exchange.bindings:
            self._remove_exchange(exchange)

    # --- queues

    def declare_queue(
        self, name: str, *, durable: bool, exclusive: bool, auto_delete: bool, given: Table, connection: AmqpConnection
    ) -> Queue:
        """Declare a queue, or compare it with the one that exists. Without a name it gets one."""
        kind = arguments.queue_type(given)
        if not name:
            if kind == "quorum":
                raise precondition_failed(f"Cannot declare a server-named queue for type rabbit_{kind}_queue")
            name = f"amq.gen-{self.broker.token()}"
        elif name.startswith("amq."):
            raise access_refused(f"queue name '{name}' contains reserved prefix 'amq.*'")
        what = self._queue_name(name)
        self._check_present(name)
        current = self.queues.get(name)
        if current is not None:
            if current.owner is not (connection if exclusive else None):
                raise self._locked(name)
            if not exclusive:
                arguments.check_flag(what, "durable", current.durable, durable)
            arguments.check_flag(what, "auto_delete", current.auto_delete, auto_delete)
            arguments.check_queue_arguments(what, current.type, current.arguments, given)
            current.touch()
            return current
        if kind == "stream":
            self.broker.host.note(f"amqp: stream {name!r} asked for; streams are not simulated")
            raise AmqpError(540, "streams are not simulated")
        arguments.check_queue(what, given, durable=durable, exclusive=exclusive, auto_delete=auto_delete)
        make = QuorumQueue if kind == "quorum" else Queue
        queue = self.queues[name] = make(
            self.broker, self, name, durable=durable and not exclusive, auto_delete=auto_delete,
            owner=connection if exclusive else None, arguments=given,
        )  # fmt: skip
        if exclusive:
            connection.exclusive_queues[name] = queue
        self._routes.clear()
        return queue

    def delete_queue(self, queue: Queue) -> int:
        """Delete a queue, with its bindings, cancel its consumers, and return the number of its messages."""
        if self.queues.get(queue.name) is not queue:
            return 0
        del self.queues[queue.name]
        if queue.owner is not None:
            queue.owner.exclusive_queues.pop(queue.name, None)
        self._routes.clear()
        count = queue.ready
        queue.end("queue deleted")
        self._remove_bindings_to(Destination(True, queue.name))
        for consumer in sorted(queue.turns.all, key=lambda each: each.tag):
            consumer.channel.consumer_gone(consumer)
        return count

    def take_away(self, name: str) -> None:
        """Let the node of a durable queue go down: the queue cannot be used, and gets no messages."""
        queue = self.absent[name] = self.queues.pop(name)
        self._routes.clear()
        queue.interrupt()
        for consumer in sorted(queue.turns.all, key=lambda each: each.tag):
            consumer.channel.consumer_gone(consumer)
        queue.forget_consumers()

    def bring_back(self, name: str) -> None:
        """Let the node of a queue come up again."""
        queue = self.queues[name] = self.absent.pop(name)
        self._routes.clear()
        queue.resume()

    # --- routing

    def route(self, exchange: Exchange, message: Message) -> tuple[Queue, ...]:
        """Return the queues that a message goes to."""
        keys = message.keys
        if len(keys) > 1:
            return self._find(exchange, keys, lambda: message.headers)
        where = (exchange.name, keys[0])
        try:
            found = self._routes[where]
        except KeyError:
            depends: list[bool] = []

            def headers() -> Table:
                depends.append(True)
                return message.headers

            found = self._find(exchange, keys, headers)
            if len(self._routes) > 4096:
                self._routes.clear()
            self._routes[where] = None if depends else found
            return found
        return self._find(exchange, keys, lambda: message.headers) if found is None else found

    def _find(self, exchange: Exchange, keys: tuple[str, ...], headers: Callable[[], Table]) -> tuple[Queue, ...]:
        found: dict[str, Queue] = {}
        seen = {exchange.name: True}
        todo = [exchange]
        while todo:
            each = todo.pop()
            if not each.name:
                matches = [Destination(True, key) for key in keys]
            else:
                matches = each.matches(keys, headers)
                if not matches and each.alternate is not None:
                    matches = [Destination(False, each.alternate)]
            for destination in matches:
                if destination.is_queue:
                    queue = self.queues.get(destination.name)
                    if queue is not None:
                        found.setdefault(destination.name, queue)
                    elif destination.name.startswith(REPLY_TO) and not each.name:
                        # replies are delivered to a channel, not to a queue
                        continue
                elif destination.name in self.exchanges and destination.name not in seen:
                    seen[destination.name] = True
                    todo.append(self.exchanges[destination.name])
        return tuple(found.values())

    def dead_letter(self, queue: Queue, message: Message, reason: str) -> bool:
        """Publish a dead message; return whether a queue has taken it."""
        exchange = self.exchanges.get(queue.dead_letter_exchange or "")
        if exchange is None:
            return False
        seconds = self.broker.seconds()
        letter = dead_letters.letter(message, reason, queue.name, exchange.name, queue.dead_letter_key, seconds)
        if not exchange.name:
            self.broker.deliver_replies(letter)
        targets = self.route(exchange, letter)
        if reason != dead_letters.REJECTED:
            targets = tuple(each for each in targets if not dead_letters.goes_in_circles(letter, each))
        taken = False
        for each in targets:
            taken = each.publish(letter) != REFUSED or taken
        return taken

    # --- restart

    def restart(self, removed: dict[Queue, list[Entry]], *, was_killed: bool) -> None:
        """Keep what is durable: after a kill only what was synced, and with messages whose removal was lost."""
        self.queues.update(self.absent)
        self.absent.clear()
        for queue in [*self.queues.values()]:
            if not queue.durable or queue.owner is not None:
                del self.queues[queue.name]
                queue.end("not durable")
        for name in [name for name, each in self.exchanges.items() if not each.durable]:
            del self.exchanges[name]
        for exchange in [*self.exchanges.values()]:
            for key, binding in [*exchange.bindings.items()]:
                there = self.queues if binding.destination.is_queue else self.exchanges
                if binding.destination.name not in there:
                    del exchange.bindings[key]
            self._delete_if_unbound(exchange)
        self._routes.clear()
        for queue in self.queues.values():
            kept, back = [], removed.get(queue, [])
            for entry in queue.entries():
                if entry.is_synced or (not was_killed and queue.is_stored(entry.message)):
                    kept.append(entry)
                else:
                    self.broker.dropped("lost in a restart", entry.message)
            queue.restore(kept, back)

    def resume(self) -> None:
        """Begin to count time again after a restart."""
        for queue in [*self.queues.values()]:
            queue.resume()

    def describe(self) -> dict[str, object]:
        """Return what there is, without what every virtual host has."""
        return {
            "queues": {
                queue.name: {
                    "ready": queue.ready,
                    "unacked": len(queue.unacked),
                    "consumers": [each.tag for each in queue.turns.all],
                    **({"letters": len(queue.letters)} if isinstance(queue, QuorumQueue) and queue.letters else {}),
                }
                for queue in self.queues.values()
            },
            "exchanges": [name for name in self.exchanges if name not in PREDECLARED],
            **({"absent": [*self.absent]} if self.absent else {}),
            "bindings": [
                (exchange.name, each.destination.name, each.key)
                for exchange in self.exchanges.values()
                for each in exchange.bindings.values()
            ],
        }
