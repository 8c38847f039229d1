"""Delayed redelivery: a rejected message waits in a queue of the broker's, and comes back from there.

For each delay there is a queue ``<queue>.delay.<milliseconds>``: what it holds expires after so long, and is
dead-lettered to the queue it came from. A message is published there with a confirm and ``mandatory``; only then is
the original acknowledged. If it cannot be, the original goes back into its queue, after a pause.

**Unchanged.** Its properties and headers are copied as they are on the wire, with one header more (``DELAYED``), which
counts deliveries and remembers exchange and routing key. Headers that mean something to the broker itself are set
aside in there until the message is read again: by ``CC`` it would route copies, and by ``x-death`` it would take a
message on its second way for one that goes round in circles, and drop it. ``user-id`` is left out where it names
somebody else, for whom the broker would not take a message from us.

**Unused queues go away** by ``x-expires``, for which the broker counts neither what is published nor what waits. So a
queue is declared again before it is used, unless that was just done; what is confirmed too late after it is not relied
upon.

**Bounds.** Everything here is an unsettled delivery: ``prefetch`` bounds how many there are. What awaits its confirm is
bounded by a window. A broker that takes no messages is waited for.
"""

from __future__ import annotations

import asyncio
import logging
import struct
from collections import deque
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import aiormq

from adapters.amqp import counting, frames, topology
from adapters.amqp.confirms import ConfirmChannel
from adapters.amqp.connection import Wire, describe
from adapters.amqp.declarations import QueueSpec
from messaging.errors import BrokerError, ConnectionLostError

if TYPE_CHECKING:
    from collections.abc import Callable

    from adapters.amqp.declarations import DelaySpec
    from messaging.errors import MessagingError

logger = logging.getLogger(__name__)

#: messages that may await their confirm
_WINDOW: Final = 256
#: how long a queue outlives its last declaration beyond the delay, and how long that counts as just done, seconds
_LEASE: Final = 600.0
_FRESH: Final = 300.0
_MARGIN: Final = 5.0
#: before a message that cannot be delayed goes back into its queue: at most, seconds
_PAUSE: Final = 1.0
_MAX_MILLISECONDS: Final = 0xFFFF_FFFF


class Kept(NamedTuple):
    """A delivery as it came."""

    #: flags and values, as on the wire
    properties: bytes
    #: exchange and routing key, likewise
    route: bytes
    body: bytes


class _Delayed:
    """A message on its way to wait."""

    __slots__ = ("_delays", "body", "milliseconds", "name", "properties", "queue", "quorum", "verdict")

    def __init__(self, delays: Delays, queue: str, spec: DelaySpec, kept: Kept, verdict: Callable[[bool], object]):
        self._delays = delays
        self.queue = queue
        self.quorum = spec.quorum
        self.properties, deliveries = counting.recount(kept.properties, kept.route, delays.username)
        self.body = kept.body
        self.milliseconds = spec.milliseconds(deliveries - 1)
        self.name = f"{queue}.delay.{self.milliseconds}"
        self.verdict = verdict

    def confirm(self) -> None:
        if self._delays.is_leased(self.name):
            self.verdict(True)
        else:
            self.fail(BrokerError("the confirm came when the queue may have been about to expire"))

    def fail(self, error: MessagingError) -> None:
        self._delays.give_back(self, error)


class _Channel(ConfirmChannel[_Delayed]):
    def __init__(self, delays: Delays, number: int) -> None:
        super().__init__(number)
        self._delays = delays

    def progressed(self) -> None:
        self._delays.progressed()

    def refused(self) -> None:
        self._delays.refused(self)

    def returned(self, code: int, text: str, key: str, _: str | None) -> None:
        self._delays.unroutable(self, key, BrokerError(f"{code} {text}", code=code, detail=text))


class Delays:
    """What waits to be delayed on one connection. On the loop only.

    Args:
        wire: the connection to publish on.
        username: who that is, or ``None`` if its certificate says so.
        spawn: runs the task that publishes.
    """

    def __init__(self, wire: Wire, username: str | None, spawn: Callable[[Any], object]) -> None:
        self.username = username
        self._wire = wire
        self._spawn = spawn
        self._channel: _Channel | None = None
        self._waiting: deque[_Delayed] = deque()
        self._running = self._blocked = False
        self._changed = asyncio.Event()
        #: queue -> when it was declared, in the loop's time
        self._declared: dict[str, float] = {}
        #: queues whose trouble was told of
        self._told: set[str] = set()

    def put(self, queue: str, spec: DelaySpec, kept: Kept, verdict: Callable[[bool], object]) -> None:
        """Delay a message of ``queue``; ``verdict`` is told whether it waits, or has to go back."""
        try:
            delayed = _Delayed(self, queue, spec, kept, verdict)
        except (ValueError, IndexError, struct.error) as error:
            logger.warning("a message of queue %r cannot be delayed, its properties are malformed: %s", queue, error)
            self._pause(spec.milliseconds(0), verdict)
            return
        self._waiting.append(delayed)
        if not self._running:
            self._running = True
            self._spawn(self._run())

    def block(self, reason: str | None) -> None:
        """The broker takes no messages for now; ``None``: it does again."""
        self._blocked = reason is not None
        self.progressed()

    def end(self) -> None:
        """The connection is gone, and the deliveries with it: they come again."""
        self._waiting.clear()
        if self._channel is not None:
            self._channel.pending.clear()
        self.progressed()

    async def settle(self, timeout: float) -> None:
        """Wait until nothing is under way, but not for longer than ``timeout`` seconds."""
        try:
            async with asyncio.timeout(timeout):
                while self._waiting or (self._channel is not None and self._channel.pending):
                    await self._progress()
        except TimeoutError:
            logger.debug("some messages are still on their way to be delayed")

    # --- publishing

    async def _run(self) -> None:
        try:
            while self._waiting:
                await self._take(self._waiting[0])
        except ConnectionLostError:
            self.end()
        finally:
            self._running = False

    async def _take(self, delayed: _Delayed) -> None:
        """Publish the head of what waits, or give it back."""
        try:
            channel = await self._ready(delayed)
        except aiormq.AMQPChannelError as error:
            if self._waiting and self._waiting[0] is delayed:
                self._waiting.popleft()
            delayed.fail(BrokerError(describe(error)))
            return
        if not self._waiting or self._waiting[0] is not delayed:
            return  # the connection ended meanwhile
        self._waiting.popleft()
        if len(delayed.properties) > self._wire.frame_max - frames.CONTENT_OVERHEAD:
            delayed.fail(BrokerError(f"{len(delayed.properties)} bytes of properties are more than a frame holds"))
            return
        channel.expect(delayed)
        head = frames.publish(channel.number, "", delayed.name, mandatory=True)
        content = frames.content(channel.number, delayed.properties, delayed.body, self._wire.frame_max)
        self._wire.write(b"".join((head, *content)))
        await self._wire.drain()

    async def _ready(self, delayed: _Delayed) -> _Channel:
        """Wait for room, a channel, and the queue: all at once."""
        while True:
            if not self._wire.alive:
                raise ConnectionLostError("the connection was lost")
            channel = self._channel
            if self._blocked or (channel is not None and len(channel.pending) >= _WINDOW):
                await self._progress()
            elif channel is None:
                opened = await self._wire.channel(confirms=True)
                self._channel = self._wire.lanes[opened.number] = _Channel(self, opened.number)
            elif asyncio.get_running_loop().time() - self._declared.get(delayed.name, -_FRESH) >= _FRESH:
                await self._declare(delayed)
            else:
                return channel

    async def _declare(self, delayed: _Delayed) -> None:
        began = asyncio.get_running_loop().time()
        arguments = {
            "x-queue-type": "classic",
            "x-message-ttl": delayed.milliseconds,
            "x-expires": min(delayed.milliseconds + round(_LEASE * 1000), _MAX_MILLISECONDS),
            "x-dead-letter-exchange": "",
            "x-dead-letter-routing-key": delayed.queue,
        }
        if delayed.quorum:
            # no weaker than the queue it came from: confirmed on its way back as well
            arguments |= {
                "x-queue-type": "quorum",
                "x-dead-letter-strategy": "at-least-once",
                "x-overflow": "reject-publish",
            }
        channel = await self._wire.channel()
        try:
            await topology.make_queue(self._wire, channel, QueueSpec(delayed.name, arguments=arguments))
        finally:
            await self._wire.close_channel(channel)
        self._declared[delayed.name] = began

    def is_leased(self, name: str) -> bool:
        """Whether the queue is sure to outlive what was confirmed by now."""
        return asyncio.get_running_loop().time() < self._declared.get(name, -_LEASE) + _LEASE - _MARGIN

    # --- outcomes

    def progressed(self) -> None:
        """Something that is waited for may have come about."""
        self._changed.set()

    async def _progress(self) -> None:
        self._changed.clear()
        await self._changed.wait()

    def give_back(self, delayed: _Delayed, error: MessagingError) -> None:
        """``delayed`` cannot wait at the broker: back into its queue, in a moment."""
        told = delayed.name in self._told
        self._told.add(delayed.name)
        logger.log(
            logging.DEBUG if told else logging.WARNING,
            "a message of queue %r cannot be delayed and goes back: %r: %s", delayed.queue, delayed.name, error,
        )  # fmt: skip
        self._pause(delayed.milliseconds, delayed.verdict)
        self.progressed()

    def _pause(self, milliseconds: int, verdict: Callable[[bool], object]) -> None:
        asyncio.get_running_loop().call_later(min(milliseconds / 1000, _PAUSE), verdict, False)

    def refused(self, channel: _Channel) -> None:
        """The broker closed ``channel``, and does not say over which message."""
        if self._channel is channel:
            self._channel = None
        code, text = channel.refusal or (None, None)
        pending, channel.pending = channel.pending, {}
        for delayed in pending.values():
            delayed.fail(BrokerError(f"{code} {text}", code=code, detail=text))
        self.progressed()

    def unroutable(self, channel: _Channel, name: str, error: BrokerError) -> None:
        """The queue ``name`` is gone: what was on its way there goes back, some of it for nothing."""
        self._declared.pop(name, None)
        for tag, delayed in [*channel.pending.items()]:
            if delayed.name == name:
                del channel.pending[tag]
                delayed.fail(error)
