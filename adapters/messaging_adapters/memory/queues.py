"""The queues of ``memory://`` and their consumers, see :mod:`.broker`. Everything runs on the engine's loop."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import operator
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from messaging.adapter import Sink
from messaging.errors import MessagingError
from messaging.execution import clock
from messaging.model import Features, Incoming, PublishPlan, SubscriptionSpec, channels
from messaging_adapters.memory.modelled import MAX_PRIORITY, Delay, properties_of
from messaging_adapters.memory.settings import MemorySettings

_PLAIN: Final[Mapping[str, Mapping[str, Any]]] = {
    qos: MappingProxyType({Features.EXTENSION_QOS: qos}) for qos in ("0", "1", "2")
}


#: A message in a queue: payload, plan, correlation id, whether it is a retained copy, how often it was delivered, when
#: it expires (monotonic seconds, or ``None``). A plain tuple, because one is made for every message and queue.
Entry = tuple[bytes, "PublishPlan", str | None, bool, int, float | None]


def is_expired(entry: Entry) -> bool:
    """Return whether the time to live of a message has passed."""
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


class QueueLimits(NamedTuple):
    """The bounds of a queue."""

    #: messages; publishers to a full queue wait
    max_length: int
    #: of priority; ``None``: one for each
    levels: int | None = None


def limits_of(spec: SubscriptionSpec, settings: MemorySettings) -> QueueLimits:
    """Return the bounds of a queue made for ``spec``."""
    return QueueLimits(settings.max_queue_length, spec.options.custom.get(MAX_PRIORITY, settings.max_priority))


class MemoryConsumer:
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


class _Nowhere:
    """The sink of messages that are looked at."""

    def deliver(self, batch: Sequence[Incoming]) -> None:
        """Do nothing: the batch is never flushed."""

    def fail(self, error: MessagingError) -> None:
        """Do nothing: there is no subscription."""


class Queue:
    """Messages that wait for consumers, by priority, then in order of arrival."""

    __slots__ = (
        "_delayed",
        "_dispatch_again",
        "_dispatching",
        "_length",
        "_max_length",
        "_mortal",
        "_ready",
        "_room",
        "consumers",
        "excluded",
        "limits",
        "name",
        "patterns",
    )

    def __init__(self, name: str | None, limits: QueueLimits) -> None:
        #: ``None`` for the private queue of one subscription
        self.name = name
        self.limits = limits
        self._max_length = limits.max_length
        #: the client whose messages it does not get
        self.excluded: object | None = None
        self.consumers: deque[MemoryConsumer] = deque()
        self.patterns: dict[tuple[str, str | None], Callable[[PublishPlan], bool]] = {}
        self._ready: dict[int, deque[Entry]] = {0: deque()}
        self._length = 0
        #: messages that come again later
        self._delayed: set[asyncio.TimerHandle] = set()
        self._dispatching = self._dispatch_again = False
        #: whether there may be messages with a time-to-live
        self._mortal = False
        self._room: asyncio.Event | None = None

    def __len__(self) -> int:
        return self._length + len(self._delayed)

    def bind(self, channel: str, extension: str | None) -> None:
        """Route messages of this pattern to the queue."""
        self.patterns[channel, extension] = binding(channel, extension)

    def matches(self, plan: PublishPlan) -> bool:
        """Return whether a message is routed to the queue."""
        return any(matches(plan) for matches in self.patterns.values())

    # --- filling

    def is_full(self) -> bool:
        """Return whether publishers must wait: delayed messages count, those in the hands of consumers do not."""
        return self._length + len(self._delayed) >= self._max_length

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
            self._delayed.discard(timer)
            self.push((payload, plan, correlation_id, retained, deliveries + 1, expires))
            self.dispatch()

        timer = clock.call_later(asyncio.get_running_loop(), seconds, come_again)
        self._delayed.add(timer)

    def _line(self, entry: Entry) -> deque[Entry]:
        """Return the line of ``entry`` by its priority, and count the message."""
        self._length += 1
        if entry[5] is not None:
            self._mortal = True
        priority = entry[1].options.priority or 0
        if self.limits.levels is not None:
            priority = min(priority, self.limits.levels)
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
            self._ready[priority] = deque(entry for entry in ready if not is_expired(entry))
        self._length = sum(map(len, self._ready.values()))
        self._mortal = any(entry[5] is not None for ready in self._ready.values() for entry in ready)

    def count(self) -> int:
        """Return the number of messages that have not expired, with those that wait for their delay."""
        self._drop_expired()
        return len(self)

    def purge(self) -> int:
        """Drop all messages, resume the waiting publishers, and return how many messages there were."""
        dropped = self.count()
        for ready in self._ready.values():
            ready.clear()
        self._length = 0
        for timer in self._delayed:
            timer.cancel()
        self._delayed.clear()
        self._announce_room()
        return dropped

    def peek(self, limit: int) -> list[Incoming]:
        """Return the first messages, which stay and count as delivered once more."""
        self._drop_expired()
        looking = MemoryConsumer(self, _Nowhere(), limit, "2")
        for ready in self._ready.values():
            for position in range(min(len(ready), limit - len(looking.batch))):
                entry = ready[position]
                looking.take(entry)
                ready[position] = (*entry[:4], entry[4] + 1, entry[5])
        for incoming in looking.batch:
            incoming.token = None
        return looking.batch

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

    def _hand_out(self, ready: deque[Entry], consumer: MemoryConsumer) -> None:
        unsettled, prefetch, take = consumer.unsettled, consumer.prefetch, consumer.take
        before = len(ready)
        while ready and len(unsettled) < prefetch and not consumer.paused:
            entry = ready.popleft()
            if entry[5] is None or not is_expired(entry):
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
            if not is_expired(entry):
                consumer.take(entry)

    def _announce_room(self) -> None:
        room, self._room = self._room, None
        if room is not None:
            room.set()


def settle(tokens: Sequence[tuple[MemoryConsumer, int]], *, redeliver: bool) -> None:
    """Settle messages, each once: they are gone, or come again at once or after the delay of their consumer."""
    touched: dict[Queue, None] = {}
    last = None
    for consumer, tag in tokens:
        entry = consumer.unsettled.pop(tag, None)
        if entry is not None:
            if redeliver and consumer.delay is not None:
                consumer.queue.push_later(entry, consumer.delay.after(entry[4]))
            elif redeliver:
                consumer.queue.push_again(entry)
            if consumer is not last:
                touched[consumer.queue] = None
                last = consumer
    for queue in touched:
        queue.dispatch()


def binding(channel: str, extension: str | None) -> Callable[[PublishPlan], bool]:
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
        given = key.split(".")
        # for each number of words of the key: whether the words of the pattern read so far match them
        reached = [True, *(False for _ in given)]
        for word in words:
            if word == "#":
                reached = [*itertools.accumulate(reached, operator.or_)]
            else:
                matched = (word in ("*", each) for each in given)
                reached = [False, *map(operator.and_, reached, matched)]
        return reached[-1]

    return matches
