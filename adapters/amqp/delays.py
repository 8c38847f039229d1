"""Delayed redelivery: a rejected message waits in a queue at the broker, and comes back from there.

Each delay has a queue ``<queue>.delay.<milliseconds>``: a message expires there after the delay, and is dead-lettered
to the queue that it came from. A message is published there with a confirm and ``mandatory``. Only then is the original
acknowledged. If that fails, the original is requeued after a pause.

**Unchanged.** Properties and headers are copied as they are on the wire, with one header more (``DELAYED``), which
counts deliveries and keeps exchange and routing key. Headers that the broker acts upon are set aside in it until the
message is read again: by ``CC`` the broker would route copies, and by ``x-death`` it would take a message that is
delayed a second time for one that goes round in circles, and drop it. ``user-id`` is left out if it names another user,
because the broker would refuse the message.

**Unused queues are deleted** by ``x-expires``. For that the broker counts neither messages that are published nor
messages that wait. So a queue is declared again before it is used, unless that was done recently. A confirm that comes
too late after the declaration does not count.

**Bounds.** Each message here is an unsettled delivery, so ``prefetch`` bounds their number. A window bounds the number
of unconfirmed ones. Nothing is published while the broker accepts no messages.
"""

from __future__ import annotations

import asyncio
import logging
import struct
from collections import deque
from typing import TYPE_CHECKING, Any, Final, NamedTuple, cast

import aiormq

from adapters.amqp import counting, frames, topology
from adapters.amqp.confirms import ConfirmChannel
from adapters.amqp.connection import describe
from adapters.amqp.declarations import QueueSpec
from messaging.errors import BrokerError, ConnectionLostError

if TYPE_CHECKING:
    from collections.abc import Callable

    from adapters.amqp.connection import Wire
    from adapters.amqp.declarations import DelaySpec
    from messaging.errors import MessagingError

    #: called with the outcome: whether the message waits at the broker, or has to be requeued
    Settle = Callable[[bool], object]

logger = logging.getLogger(__name__)

#: largest number of unconfirmed messages
_WINDOW: Final = 256
#: how long a queue outlives its last declaration beyond the delay, and how long that declaration is recent, seconds
LEASE: Final = 600.0
_RECENT: Final = 300.0
#: how long before the end of the lease confirms stop to count, seconds
LEASE_MARGIN: Final = 5.0
#: longest pause before a message that cannot be delayed is requeued, seconds
_MAX_PAUSE: Final = 1.0
_MAX_MILLISECONDS: Final = 0xFFFF_FFFF


class RawMessage(NamedTuple):
    """A delivery as it was received."""

    #: flags and values, as on the wire
    properties: bytes
    #: exchange and routing key, as on the wire
    route: bytes
    body: bytes


class _Delayed:
    """A message that is being moved to the queue of its delay."""

    __slots__ = ("_delays", "body", "milliseconds", "name", "properties", "queue", "quorum", "settle")

    def __init__(self, delays: Delays, queue: str, spec: DelaySpec, kept: RawMessage, settle: Settle):
        self._delays = delays
        self.queue = queue
        self.quorum = spec.quorum
        self.properties, deliveries = counting.recount(kept.properties, kept.route, delays.username)
        self.body = kept.body
        self.milliseconds = spec.milliseconds(deliveries - 1)
        self.name = f"{queue}.delay.{self.milliseconds}"
        self.settle = settle

    def confirm(self) -> None:
        if self._delays.is_leased(self.name):
            self.settle(True)
        else:
            self.fail(BrokerError("the confirm came when the queue may have been about to expire"))

    def fail(self, error: MessagingError) -> None:
        self._delays.requeue(self, error)


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
    """The messages that are moved to queues of delays on one connection. For the event loop only.

    Args:
        wire: the connection to publish on.
        username: the user of the connection; ``None`` if the client certificate names the user.
        spawn: starts the task that publishes.
    """

    def __init__(self, wire: Wire, username: str | None, spawn: Callable[[Any], object]) -> None:
        self.username = username
        self._wire = wire
        self._spawn = spawn
        self._channel: _Channel | None = None
        self._waiting: deque[_Delayed] = deque()
        self._running = self._blocked = False
        self._changed = asyncio.Event()
        #: when each queue was declared, in the loop's time
        self._declared: dict[str, float] = {}
        #: queues whose failures were logged
        self._logged: set[str] = set()

    def put(self, queue: str, spec: DelaySpec, kept: RawMessage, settle: Settle) -> None:
        """Delay a message of ``queue``; ``settle`` is called with the outcome."""
        try:
            delayed = _Delayed(self, queue, spec, kept, settle)
        except (ValueError, IndexError, struct.error) as error:
            logger.warning(
                "amqp: a message of queue %r cannot be delayed: malformed properties: %s; it is requeued", queue, error
            )
            self._requeue_later(spec.milliseconds(0), settle)
            return
        self._waiting.append(delayed)
        if not self._running:
            self._running = True
            self._spawn(self._run())

    def block(self, reason: str | None) -> None:
        """Stop publishing because the broker accepts no messages, for this reason; resume with ``None``."""
        self._blocked = reason is not None
        self.progressed()

    def end(self) -> None:
        """Forget all messages after the connection has ended: the broker redelivers them."""
        self._waiting.clear()
        if self._channel is not None:
            self._channel.pending.clear()
        self.progressed()

    async def wait(self, timeout: float) -> None:
        """Wait until no message is being moved, for at most ``timeout`` seconds."""
        try:
            async with asyncio.timeout(timeout):
                while self._waiting or (self._channel is not None and self._channel.pending):
                    await self._wait()
        except TimeoutError:
            logger.debug("amqp: some messages are still being moved to the queues of their delays")

    # --- publishing

    async def _run(self) -> None:
        try:
            while self._waiting:
                await self._publish(self._waiting[0])
        except ConnectionLostError:
            self.end()
        finally:
            self._running = False

    async def _publish(self, delayed: _Delayed) -> None:
        """Publish ``delayed``, which is the first that waits, or requeue it."""
        try:
            channel = await self._ready(delayed)
        except aiormq.AMQPChannelError as error:
            if self._waiting and self._waiting[0] is delayed:
                self._waiting.popleft()
            delayed.fail(BrokerError(describe(error)))
            return
        if not self._waiting or self._waiting[0] is not delayed:
            return  # the connection has ended
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
        """Return once there are room, a channel and the queue, all at the same time."""
        while True:
            if not self._wire.alive:
                raise ConnectionLostError("the connection was lost")
            channel = self._channel
            if self._blocked or (channel is not None and len(channel.pending) >= _WINDOW):
                await self._wait()
            elif channel is None:
                opened = await self._wire.channel(confirms=True)
                number = cast("int", opened.number)
                self._channel = self._wire.lanes[number] = _Channel(self, number)
            elif asyncio.get_running_loop().time() - self._declared.get(delayed.name, -_RECENT) >= _RECENT:
                await self._declare(delayed)
            else:
                return channel

    async def _declare(self, delayed: _Delayed) -> None:
        began = asyncio.get_running_loop().time()
        arguments = {
            "x-queue-type": "classic",
            "x-message-ttl": delayed.milliseconds,
            "x-expires": min(delayed.milliseconds + round(LEASE * 1000), _MAX_MILLISECONDS),
            "x-dead-letter-exchange": "",
            "x-dead-letter-routing-key": delayed.queue,
        }
        if delayed.quorum:
            # as safe as the queue it came from: confirmed on the way back as well
            arguments |= {
                "x-queue-type": "quorum",
                "x-dead-letter-strategy": "at-least-once",
                "x-overflow": "reject-publish",
            }
        channel = await self._wire.channel()
        try:
            await topology.declare_queue(self._wire, channel, QueueSpec(delayed.name, arguments=arguments))
        finally:
            await self._wire.close_channel(channel)
        self._declared[delayed.name] = began

    def is_leased(self, name: str) -> bool:
        """Return whether the queue outlives a message that is confirmed now."""
        return asyncio.get_running_loop().time() < self._declared.get(name, -LEASE) + LEASE - LEASE_MARGIN

    # --- outcomes

    def progressed(self) -> None:
        """Wake up the tasks that wait for room, a channel or an answer."""
        self._changed.set()

    async def _wait(self) -> None:
        self._changed.clear()
        await self._changed.wait()

    def requeue(self, delayed: _Delayed, error: MessagingError) -> None:
        """Requeue a message that cannot wait at the broker, after a pause."""
        is_logged = delayed.name in self._logged
        self._logged.add(delayed.name)
        logger.log(
            logging.DEBUG if is_logged else logging.WARNING,
            "amqp: a message of queue %r cannot be delayed in %r: %s; it is requeued",
            delayed.queue, delayed.name, error,
        )  # fmt: skip
        self._requeue_later(delayed.milliseconds, delayed.settle)
        self.progressed()

    def _requeue_later(self, milliseconds: int, settle: Settle) -> None:
        asyncio.get_running_loop().call_later(min(milliseconds / 1000, _MAX_PAUSE), settle, False)

    def refused(self, channel: _Channel) -> None:
        """Requeue all messages of a channel that the broker closed: it does not say over which one."""
        if self._channel is channel:
            self._channel = None
        code, text = channel.refusal or (None, None)
        pending, channel.pending = channel.pending, {}
        for delayed in pending.values():
            delayed.fail(BrokerError(f"{code} {text}", code=code, detail=text))
        self.progressed()

    def unroutable(self, channel: _Channel, name: str, error: BrokerError) -> None:
        """Requeue all messages to the queue ``name``, which was deleted."""
        self._declared.pop(name, None)
        for tag, delayed in [*channel.pending.items()]:
            if delayed.name == name:
                del channel.pending[tag]
                delayed.fail(error)
