"""The broker behind ``memory://``: channels, queues, retained messages, wills, time-to-live, redelivery.

Everything runs on the engine's loop, which all instances of a process share, so there is no lock. A broker exists as
long as an instance uses it, connected or reconnecting.

Every subscription consumes from a :class:`Queue`: a private one, or a named one that subscriptions share. A queue is
bounded: publishers to a full queue wait.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

from messaging.adapter import Sink
from messaging.codecs.cache import BoundedCache
from messaging.environment.forks import in_child
from messaging.errors import ConnectionLostError, QueueRefusedError, SubscriptionRefusedError
from messaging.execution import clock
from messaging.model import Outgoing, PublishPlan, SubscriptionSpec
from messaging_adapters.memory.modelled import wants_retained
from messaging_adapters.memory.queues import Entry, MemoryConsumer, Queue, QueueLimits, binding, is_expired

#: interval at which a publisher that waits for room checks its deadline and connection, seconds
_ROOM_STEP: Final = 0.1


class MemoryBroker:
    """A named broker; see :func:`join`."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.clients: dict[Client, None] = {}
        #: number of instances that are connected or reconnecting
        self.users = 0
        self.queues: dict[str, Queue] = {}
        self._private: dict[Queue, None] = {}
        self._retained: dict[tuple[str | None, str | None], Entry] = {}
        self._routes: BoundedCache[tuple[str | None, str | None], tuple[Queue, ...]] = BoundedCache(4096)

    # --- clients

    def release(self) -> None:
        """Leave the broker, as an instance that is closed. The last one ends the broker."""
        self.users -= 1
        if not self.users and _brokers.get(self.name) is self:
            del _brokers[self.name]

    def disconnect(self, name: str) -> bool:
        """Drop a client as if it had failed, and publish its will. For tests of reconnecting.

        On the engine's loop only. Returns whether there is such a client.
        """
        found = [client for client in self.clients if client.name == name]
        for client in found:
            client.drop()
        return bool(found)

    # --- subscribing

    def subscribe(self, spec: SubscriptionSpec, sink: Sink, limits: QueueLimits) -> MemoryConsumer:
        """Attach a consumer to a private queue or to the named one; retained messages go to private queues only."""
        options = spec.options
        if options.queue is None:
            queue = Queue(None, limits)
            self._private[queue] = None
        else:
            existing = self.queues.get(options.queue)
            if existing is None and not options.autocreate:
                raise SubscriptionRefusedError(
                    f"queue {options.queue!r} does not exist at memory://{self.name}, and autocreate is off"
                )
            queue = existing if existing is not None else self._declare(options.queue, limits)
        if options.autocreate:
            queue.bind(spec.channel, spec.channel_extension)
        self._routes.clear()
        consumer = MemoryConsumer(queue, sink, options.prefetch, options.qos)
        queue.consumers.append(consumer)
        if wants_retained(spec):
            for retained in self._retained_for(queue):
                queue.push(retained)
        queue.dispatch()
        return consumer

    def _declare(self, name: str, limits: QueueLimits) -> Queue:
        queue = self.queues[name] = Queue(name, limits)
        return queue

    # --- administration

    def named(self, name: str) -> Queue:
        """Return a queue.

        Raises:
            QueueRefusedError: there is none of that name.
        """
        queue = self.queues.get(name)
        if queue is None:
            raise QueueRefusedError(f"queue {name!r} does not exist at memory://{self.name}")
        return queue

    def declare(self, spec: SubscriptionSpec, limits: QueueLimits, *, is_bound: bool) -> None:
        """Make the queue that :meth:`subscribe` would, and bind it if ``is_bound``.

        Raises:
            QueueRefusedError: it exists with other limits, or does not exist and must not be made.
        """
        name = spec.options.queue or ""
        if not spec.options.autocreate:
            self.named(name)
            return
        queue = self.queues.get(name)
        if queue is None:
            queue = self._declare(name, limits)
        elif queue.limits != limits:
            raise QueueRefusedError(
                f"queue {name!r} exists at memory://{self.name} with max_queue_length={queue.limits.max_length} and "
                f"max_priority={queue.limits.levels}, not {limits.max_length} and {limits.levels}; "
                "ask for what it has, or delete it"
            )
        if is_bound:
            queue.bind(spec.channel, spec.channel_extension)
            self._routes.clear()

    def delete(self, name: str, *, if_empty: bool, if_unused: bool) -> int:
        """Delete a named queue, end its subscriptions, and return the number of its messages.

        Raises:
            QueueRefusedError: there is none, or it is not as empty or unused as it must be.
        """
        queue = self.named(name)
        messages = queue.count()
        if if_empty and messages:
            raise QueueRefusedError(f"queue {name!r} at memory://{self.name} is not empty: it has {messages} messages")
        if if_unused and queue.consumers:
            raise QueueRefusedError(f"queue {name!r} at memory://{self.name} has {len(queue.consumers)} consumers")
        del self.queues[name]
        self._routes.clear()
        error = SubscriptionRefusedError(f"queue {name!r} was deleted at memory://{self.name}")
        for consumer in (*queue.consumers,):
            consumer.closed = True
            consumer.unsettled.clear()
            for client in self.clients:
                client.consumers.pop(consumer, None)
            consumer.sink.fail(error)
        queue.consumers.clear()
        queue.purge()
        return messages

    def bind(self, consumer: MemoryConsumer, channel: str) -> None:
        """Route a further channel to the queue of a consumer; to a private one its retained messages, too.

        Raises:
            ConnectionLostError: the consumer was detached with its connection.
        """
        queue = consumer.queue
        if consumer.closed:
            raise ConnectionLostError(f"memory://{self.name} has dropped the subscription")
        if (channel, None) in queue.patterns:
            return
        retained = [] if queue.name is not None else [*self._retained_for(queue, binding(channel, None))]
        queue.bind(channel, None)
        self._routes.clear()
        for entry in retained:
            queue.push(entry)
        queue.dispatch()

    def unbind(self, consumer: MemoryConsumer, channel: str) -> None:
        """Undo :meth:`bind`. Nothing happens if the channel is not bound."""
        consumer.queue.patterns.pop((channel, None), None)
        self._routes.clear()

    def _retained_for(self, queue: Queue, added: Callable[[PublishPlan], bool] | None = None) -> Iterator[Entry]:
        """Return the retained messages of a queue; with ``added`` the further ones that a new pattern matches."""
        for key, entry in [*self._retained.items()]:
            if is_expired(entry):
                del self._retained[key]
            elif queue.matches(entry[1]) if added is None else added(entry[1]) and not queue.matches(entry[1]):
                payload, plan, correlation_id, _, _, expires = entry
                yield (payload, plan, correlation_id, True, 0, expires)

    def unsubscribe(self, consumer: MemoryConsumer) -> None:
        """Detach a consumer; what it did not settle goes back to the queue's front."""
        if consumer.closed:
            return
        consumer.closed = True
        queue = consumer.queue
        queue.consumers.remove(consumer)
        if queue.name is None:
            self._private.pop(queue, None)
            self._routes.clear()
            queue.purge()
        else:
            for entry in reversed(consumer.unsettled.values()):
                queue.push_again(entry)
            queue.dispatch()
        consumer.unsettled.clear()

    # --- publishing

    def route(self, plan: PublishPlan) -> tuple[Queue, ...]:
        """Return the queues of a message."""
        key = (plan.channel, plan.channel_extension)
        found = self._routes.get(key)
        if found is None:
            found = tuple(queue for queue in (*self._private, *self.queues.values()) if queue.matches(plan))
            self._routes[key] = found
        return found

    def retain(self, entry: Entry) -> None:
        """Retain the message for later subscribers; an empty payload removes it, as in MQTT."""
        key = (entry[1].channel, entry[1].channel_extension)
        if entry[0]:
            self._retained[key] = entry
        else:
            self._retained.pop(key, None)

    def publish(self, message: Outgoing, queues: tuple[Queue, ...], publisher: Client | None = None) -> None:
        """Add a message of ``publisher`` to ``queues``, which the caller must dispatch."""
        options = message.plan.options
        ttl = options.time_to_live
        expires = None if ttl is None else clock.monotonic() + ttl
        entry = (message.payload, message.plan, message.correlation_id, False, 0, expires)
        if options.retain:
            self.retain(entry)
        for queue in queues:
            if queue.excluded is None or queue.excluded is not publisher:
                queue.put(entry)


class Client:
    """A connected instance, as the broker sees it."""

    def __init__(self, name: str, broker: MemoryBroker, lost: Callable[[], None]) -> None:
        self.name = name
        self.broker = broker
        self.consumers: dict[MemoryConsumer, None] = {}
        self.will: Outgoing | None = None
        self._lost = lost
        #: whether the client is disconnected, in order or not
        self.gone = False

    def leave(self) -> None:
        """Disconnect in order, without publishing the will."""
        self.gone = True
        self.broker.clients.pop(self, None)
        for consumer in self.consumers:
            consumer.paused = True  # a requeued message must not go to another consumer of this client
        for consumer in self.consumers:
            self.broker.unsubscribe(consumer)
        self.consumers.clear()

    async def wait_for_room(self, outgoing: Outgoing, touched: dict[Queue, None]) -> tuple[Queue, ...]:
        """Wait until all queues of a message have room, and return its queues, which may have changed meanwhile."""
        while True:
            for queue in touched:
                queue.dispatch()
            queues = self.broker.route(outgoing.plan)
            touched.update(dict.fromkeys(queues))
            full = next((queue for queue in queues if queue.is_full()), None)
            if full is None or outgoing.settled or self.gone:
                return queues
            # in steps, because the deadline of the message may pass, or the connection end, meanwhile
            await full.wait_for_room(_ROOM_STEP)

    def drop(self) -> None:
        """Lose the connection, and publish the will."""
        will, self.will = self.will, None
        broker = self.broker
        self.leave()
        if will is not None:
            # without a wait for room: the client is gone
            queues = broker.route(will.plan)
            broker.publish(will, queues)
            for queue in queues:
                queue.dispatch()
        self._lost()


_brokers: dict[str, MemoryBroker] = {}
# a forked child must not publish to copies of its parent's subscribers
in_child(_brokers.clear)


def join(name: str) -> MemoryBroker:
    """Return the broker of that name, made on first use; it exists until ``release``. On the engine's loop only."""
    broker = _brokers.get(name)
    if broker is None:
        broker = _brokers[name] = MemoryBroker(name)
    broker.users += 1
    return broker
