"""The broker behind ``memory://``: channels, queues, retained messages, wills, time-to-live, redelivery.

Everything runs on the engine's loop, which all instances of a process share, so there is no lock. A broker exists as
long as an instance uses it, connected or reconnecting.

Every subscription consumes from a :class:`Queue`: a private one, or a named one that subscriptions share. A queue is
bounded: publishers to a full queue wait.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

from adapters.memory.modelled import properties_of, wants_retained
from messaging.bounded import BoundedCache
from messaging.errors import ConnectionLostError, SubscriptionRefusedError
from messaging.execution import clock
from messaging.forking import in_child
from messaging.model import Features, Incoming, channels

if TYPE_CHECKING:
    from adapters.memory.modelled import Delay
    from messaging.adapter import Sink
    from messaging.model import Outgoing, PublishPlan, SubscriptionSpec

_PLAIN: Final[Mapping[str, Mapping[str, Any]]] = {
    qos: MappingProxyType({Features.EXTENSION_QOS: qos}) for qos in ("0", "1", "2")
}


#: A message in a queue: payload, plan, correlation id, whether it is a retained copy, how often it was delivered, when
#: it expires (monotonic seconds, or ``None``). A plain tuple, because one is made for every message and queue.
Entry = tuple[bytes, "PublishPlan", str | None, bool, int, float | None]


def _is_expired(entry: Entry) -> bool:
    expires = entry[5]
    return expires is not None and clock.monotonic() >= expires


def _told(entry: Entry, qos: str) -> Mapping[str, Any]:
    """Return the extensions of a received message."""
    _, plan, _, retained, deliveries, expires = entry
    options = plan.options
    told: dict[str, Any] = {Features.EXTENSION_QOS: qos, **properties_of(options.custom)}
    if retained:
        told[Features.EXTENSION_RETAIN] = True
    if deliveries:
        told["redelivered"] = True
    if options.headers:
        told[Features.EXTENSION_HEADERS] = options.headers
    if options.priority is not None:
        told[Features.EXTENSION_PRIORITY] = options.priority
    if options.message_id is not None:
        told[Features.EXTENSION_MESSAGE_ID] = options.message_id
    if expires is not None:
        told[Features.EXTENSION_TIME_TO_LIVE] = max(expires - clock.monotonic(), 0.001)
    return MappingProxyType(told)


class Consumer:
    """The consumer of a queue for one subscription, with the credit of its stream."""

    __slots__ = ("_next_tag", "batch", "closed", "delay", "max_qos", "paused", "prefetch", "queue", "sink", "unsettled")

    def __init__(self, queue: Queue, sink: Sink, prefetch: int, max_qos: str) -> None:
        self.queue = queue
        self.sink = sink
        self.prefetch = prefetch
        self.max_qos = max_qos
        self.paused = False
        self.closed = False
        #: of rejected messages; ``None``: at once
        self.delay: Delay | None = None
        self.unsettled: dict[int, Entry] = {}
        self.batch: list[Incoming] = []
        self._next_tag = 0

    def can_take(self) -> bool:
        """Return whether the stream has credit for another delivery."""
        return len(self.unsettled) < self.prefetch and not self.paused

    def take(self, entry: Entry) -> None:
        """Add a delivery to the batch, which :meth:`flush` hands over."""
        payload, plan, correlation_id, retained, deliveries, expires = entry
        options = plan.options
        qos = options.qos
        if qos > self.max_qos:
            qos = self.max_qos
        token = None
        if qos != "0":
            self._next_tag = tag = self._next_tag + 1
            self.unsettled[tag] = entry
            token = (self, tag)
        plain = not (
            retained
            or deliveries
            or options.headers
            or expires
            or options.priority is not None
            or options.message_id
            or options.custom
        )
        self.batch.append(
            Incoming(
                payload,
                plan.channel,
                plan.channel_extension,
                plan.content_type,
                plan.content_encoding,
                correlation_id,
                plan.reply_to_channel,
                _PLAIN[qos] if plain else _told(entry, qos),
                token,
                deliveries + 1,
            )
        )

    def flush(self) -> None:
        """Hand the batch to the sink."""
        if self.batch:
            batch, self.batch = self.batch, []
            self.sink.deliver(batch)


class Queue:
    """Messages that wait for consumers, by priority, then in order of arrival."""

    __slots__ = (
        "_dispatch_again",
        "_dispatching",
        "_length",
        "_mortal",
        "_ready",
        "_room",
        "consumers",
        "excluded",
        "levels",
        "max_length",
        "name",
        "patterns",
    )

    def __init__(self, name: str | None, max_length: int, levels: int | None = None) -> None:
        #: ``None`` for the private queue of one subscription
        self.name = name
        self.max_length = max_length
        #: of priority; ``None``: one for each
        self.levels = levels
        #: whose messages it does not get
        self.excluded: Client | None = None
        self.consumers: deque[Consumer] = deque()
        self.patterns: dict[tuple[str, str | None], Callable[[PublishPlan], bool]] = {}
        self._ready: dict[int, deque[Entry]] = {0: deque()}
        self._length = 0
        self._dispatching = self._dispatch_again = False
        #: whether there may be messages with a time-to-live
        self._mortal = False
        self._room: asyncio.Event | None = None

    def __len__(self) -> int:
        return self._length

    def bind(self, channel: str, extension: str | None) -> None:
        """Route messages of this pattern to the queue."""
        self.patterns[channel, extension] = _binding(channel, extension)

    def matches(self, plan: PublishPlan) -> bool:
        """Return whether a message is routed to the queue."""
        return any(matches(plan) for matches in self.patterns.values())

    # --- filling

    def is_full(self) -> bool:
        """Return whether publishers must wait."""
        return self._length >= self.max_length

    async def wait_for_room(self, timeout: float) -> None:
        """Wait until there may be room, for at most ``timeout`` seconds."""
        self._drop_expired()
        if self.is_full():
            if self._room is None:
                self._room = asyncio.Event()
            with contextlib.suppress(TimeoutError):
                async with clock.timeout(timeout):
                    await self._room.wait()

    def put(self, entry: Entry) -> None:
        """Accept a message; the caller must :meth:`dispatch` afterwards."""
        if not self._length and len(self.consumers) == 1:
            # the common case: no message is ahead of it, and the queue has one consumer
            consumer = self.consumers[0]
            if len(consumer.unsettled) < consumer.prefetch and not consumer.paused:
                consumer.take(entry)
                return
        self.push(entry)

    def push(self, entry: Entry) -> None:
        """Append a message; :meth:`dispatch` hands it out."""
        self._line(entry).append(entry)

    def push_again(self, entry: Entry) -> None:
        """Return an unsettled message to the front of the queue."""
        payload, plan, correlation_id, retained, deliveries, expires = entry
        self._line(entry).appendleft((payload, plan, correlation_id, retained, deliveries + 1, expires))

    def push_later(self, entry: Entry, seconds: float) -> None:
        """Append an unsettled message after ``seconds``, and hand it out."""
        payload, plan, correlation_id, retained, deliveries, expires = entry

        def come_again() -> None:
            self.push((payload, plan, correlation_id, retained, deliveries + 1, expires))
            self.dispatch()

        clock.call_later(asyncio.get_running_loop(), seconds, come_again)

    def _line(self, entry: Entry) -> deque[Entry]:
        """Return the line of ``entry`` by its priority, and count the message."""
        self._length += 1
        if entry[5] is not None:
            self._mortal = True
        priority = entry[1].options.priority or 0
        if self.levels is not None:
            priority = min(priority, self.levels)
        line = self._ready.get(priority)
        if line is None:
            line = deque()
            # highest first, so that taking from it is a walk from the front
            self._ready = dict(sorted({**self._ready, priority: line}.items(), reverse=True))
        return line

    def _drop_expired(self) -> None:
        if not self._mortal:
            return
        for priority, ready in self._ready.items():
            self._ready[priority] = deque(entry for entry in ready if not _is_expired(entry))
        self._length = sum(map(len, self._ready.values()))
        self._mortal = any(entry[5] is not None for ready in self._ready.values() for entry in ready)

    def purge(self) -> None:
        """Drop all messages, and resume the waiting publishers."""
        for ready in self._ready.values():
            ready.clear()
        self._length = 0
        self._announce_room()

    # --- emptying

    def dispatch(self) -> None:
        """Hand out messages to consumers with credit: highest priority first, consumers in turns.

        A sink may acknowledge at once and thereby call this method again, which then adds a round, not a recursion.
        """
        if self._dispatching:
            self._dispatch_again = True
            return
        self._dispatching = True
        try:
            self._dispatch_again = True
            while self._dispatch_again:
                self._dispatch_again = False
                self._dispatch_once()
        finally:
            self._dispatching = False
        if self._room is not None and not self.is_full():
            self._announce_room()

    def _dispatch_once(self) -> None:
        consumers = self.consumers
        for ready in self._ready.values():
            if len(consumers) == 1:
                self._hand_out(ready, consumers[0])
            else:
                self._hand_out_in_turns(ready)
            if ready:
                break
        for consumer in tuple(consumers):
            consumer.flush()

    def _hand_out(self, ready: deque[Entry], consumer: Consumer) -> None:
        unsettled, prefetch, take = consumer.unsettled, consumer.prefetch, consumer.take
        before = len(ready)
        while ready and len(unsettled) < prefetch and not consumer.paused:
            entry = ready.popleft()
            if entry[5] is None or not _is_expired(entry):
                take(entry)
        self._length -= before - len(ready)

    def _hand_out_in_turns(self, ready: deque[Entry]) -> None:
        consumers = self.consumers
        while ready:
            for _ in range(len(consumers)):
                consumer = consumers[0]
                consumers.rotate(-1)
                if consumer.can_take():
                    break
            else:
                return
            entry = ready.popleft()
            self._length -= 1
            if not _is_expired(entry):
                consumer.take(entry)

    def _announce_room(self) -> None:
        room, self._room = self._room, None
        if room is not None:
            room.set()


class Broker:
    """A named broker; see :func:`join`."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.clients: set[Client] = set()
        #: number of instances that are connected or reconnecting
        self.users = 0
        self.queues: dict[str, Queue] = {}
        self._private: set[Queue] = set()
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

    def subscribe(self, spec: SubscriptionSpec, sink: Sink, max_length: int, levels: int | None = None) -> Consumer:
        """Attach a consumer to a private queue or to the named one; retained messages go to private queues only."""
        options = spec.options
        if options.queue is None:
            queue = Queue(None, max_length, levels)
            self._private.add(queue)
        else:
            existing = self.queues.get(options.queue)
            if existing is None and not options.autocreate:
                raise SubscriptionRefusedError(
                    f"queue {options.queue!r} does not exist at memory://{self.name}, and autocreate is off"
                )
            queue = existing if existing is not None else Queue(options.queue, max_length, levels)
            self.queues[options.queue] = queue
        if options.autocreate:
            queue.bind(spec.channel, spec.channel_extension)
        self._routes.clear()
        consumer = Consumer(queue, sink, options.prefetch, options.qos)
        queue.consumers.append(consumer)
        if wants_retained(spec):
            for retained in self._retained_for(queue):
                queue.push(retained)
        queue.dispatch()
        return consumer

    def bind(self, consumer: Consumer, channel: str) -> None:
        """Route a further channel to the queue of a consumer; to a private one its retained messages, too.

        Raises:
            ConnectionLostError: the consumer was detached with its connection.
        """
        queue = consumer.queue
        if consumer.closed:
            raise ConnectionLostError(f"memory://{self.name} has dropped the subscription")
        if (channel, None) in queue.patterns:
            return
        retained = [] if queue.name is not None else [*self._retained_for(queue, _binding(channel, None))]
        queue.bind(channel, None)
        self._routes.clear()
        for entry in retained:
            queue.push(entry)
        queue.dispatch()

    def unbind(self, consumer: Consumer, channel: str) -> None:
        """Undo :meth:`bind`. Nothing happens if the channel is not bound."""
        consumer.queue.patterns.pop((channel, None), None)
        self._routes.clear()

    def _retained_for(self, queue: Queue, added: Callable[[PublishPlan], bool] | None = None) -> Iterator[Entry]:
        """Return the retained messages of a queue; with ``added`` the further ones that a new pattern matches."""
        for key, entry in [*self._retained.items()]:
            if _is_expired(entry):
                del self._retained[key]
            elif queue.matches(entry[1]) if added is None else added(entry[1]) and not queue.matches(entry[1]):
                payload, plan, correlation_id, _, _, expires = entry
                yield (payload, plan, correlation_id, True, 0, expires)

    def unsubscribe(self, consumer: Consumer) -> None:
        """Detach a consumer; what it did not settle goes back to the queue's front."""
        if consumer.closed:
            return
        consumer.closed = True
        queue = consumer.queue
        queue.consumers.remove(consumer)
        if queue.name is None:
            self._private.discard(queue)
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

    def __init__(self, name: str, broker: Broker, lost: Callable[[], None]) -> None:
        self.name = name
        self.broker = broker
        self.consumers: set[Consumer] = set()
        self.will: Outgoing | None = None
        self._lost = lost
        #: whether the client is disconnected, in order or not
        self.gone = False

    def leave(self) -> None:
        """Disconnect in order, without publishing the will."""
        self._detach()

    def _detach(self) -> None:
        self.gone = True
        self.broker.clients.discard(self)
        for consumer in self.consumers:
            consumer.paused = True  # a requeued message must not go to another consumer of this client
        for consumer in self.consumers:
            self.broker.unsubscribe(consumer)
        self.consumers.clear()

    def drop(self) -> None:
        """Lose the connection, and publish the will."""
        will, self.will = self.will, None
        broker = self.broker
        self._detach()
        if will is not None:
            # without a wait for room: the client is gone
            queues = broker.route(will.plan)
            broker.publish(will, queues)
            for queue in queues:
                queue.dispatch()
        self._lost()


def _binding(channel: str, extension: str | None) -> Callable[[PublishPlan], bool]:
    """Return a predicate for messages. A channel with a routing key differs from the one without."""
    in_channel = channels.matcher(channel)
    if extension is None:
        return lambda plan: plan.channel_extension is None and in_channel(plan.channel)
    in_extension = routing_matcher(extension)
    return lambda plan: (
        plan.channel_extension is not None and in_extension(plan.channel_extension) and in_channel(plan.channel)
    )


def routing_matcher(pattern: str) -> Callable[[str], bool]:
    """Compile a routing key pattern of AMQP: words separated by '.', '*' for one word, '#' for any number."""
    words = pattern.split(".")

    def matches(key: str) -> bool:
        # positions in ``words`` that the key read so far can have reached
        reached = _closure({0}, words)
        for word in key.split("."):
            step = set()
            for at in reached:
                if at < len(words):
                    if words[at] == "#":
                        step.add(at)
                    elif words[at] in ("*", word):
                        step.add(at + 1)
            reached = _closure(step, words)
            if not reached:
                return False
        return len(words) in reached

    return matches


def _closure(reached: set[int], words: list[str]) -> set[int]:
    for at in sorted(reached):
        position = at
        while position < len(words) and words[position] == "#":
            position += 1
            reached.add(position)
    return reached


_brokers: dict[str, Broker] = {}
# a forked child must not publish to copies of its parent's subscribers
in_child(_brokers.clear)


def join(name: str) -> Broker:
    """Return the broker of that name, made on first use; it exists until ``release``. On the engine's loop only."""
    broker = _brokers.get(name)
    if broker is None:
        broker = _brokers[name] = Broker(name)
    broker.users += 1
    return broker
