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

**Bounds.** Each message has a task, and is an unsettled delivery, so ``prefetch`` bounds their number. A window bounds
the number of unconfirmed ones. Nothing is published while the broker accepts no messages.
"""

from __future__ import annotations

import asyncio
import logging
import math
import struct
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, NamedTuple, cast

import aiormq

from messaging.errors import BrokerError, ConnectionLostError, MessagingError
from messaging.execution import clock
from messaging_adapters.amqp import counting, frames, topology
from messaging_adapters.amqp.connection import AmqpWire, describe
from messaging_adapters.amqp.declarations import DelaySpec, QueueSpec
from messaging_adapters.amqp.publish_channels import ConfirmChannel

if TYPE_CHECKING:
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


class _Confirm:
    """The answer of the broker to a message for the queue ``name``: ``None`` if the broker has taken it."""

    __slots__ = ("answer", "name")

    def __init__(self, name: str) -> None:
        self.name = name
        self.answer: asyncio.Future[MessagingError | None] = asyncio.get_running_loop().create_future()

    def confirm(self) -> None:
        self.fail(None)

    def fail(self, error: MessagingError | None) -> None:
        if not self.answer.done():
            self.answer.set_result(error)


class _DelayChannel(ConfirmChannel[_Confirm]):
    def refused(self) -> None:
        """Fail all messages: the broker does not say over which one it closed the channel."""
        code, text = self.refusal or (0, "")
        self.returned(code, text, None)

    def returned(self, code: int, text: str, key: str | None, _: str | None = None) -> None:
        """Fail all messages to the queue ``key``, which was deleted, or all."""
        for confirm in self.pending.values():
            if key in (None, confirm.name):
                confirm.fail(BrokerError(f"{code} {text}", code=code, detail=text))


class Delays:
    """The messages that are moved to queues of delays on one connection. For the event loop only.

    ``username`` is the user of the connection; ``None`` if the client certificate names the user.
    """

    def __init__(self, wire: AmqpWire, username: str | None) -> None:
        self._wire = wire
        self._username = username
        self._channel: _DelayChannel | None = None
        #: one task at a time opens the channel or declares a queue
        self._preparing = asyncio.Lock()
        self._window = asyncio.Semaphore(_WINDOW)
        #: set unless the broker accepts no messages
        self._accepts = asyncio.Event()
        self._accepts.set()
        self._moving: set[asyncio.Task[None]] = set()
        #: when each queue was declared, in the loop's time
        self._declared: dict[str, float] = {}
        #: queues whose failures were logged
        self._logged: set[str] = set()

    def put(self, queue: str, spec: DelaySpec, kept: RawMessage, settle: Settle) -> None:
        """Delay a message of ``queue``; ``settle`` is called with the outcome."""
        task = asyncio.get_running_loop().create_task(self._move(queue, spec, kept, settle))
        self._moving.add(task)
        task.add_done_callback(self._moving.discard)

    def block(self, reason: str | None) -> None:
        """Stop publishing because the broker accepts no messages, for this reason; resume with ``None``."""
        (self._accepts.set if reason is None else self._accepts.clear)()

    def end(self) -> None:
        """Forget all messages after the connection has ended: the broker redelivers them."""
        self._accepts.set()
        if self._channel is not None:
            for confirm in self._channel.pending.values():
                confirm.fail(_lost())
        for _ in self._moving:
            self._window.release()

    async def wait(self, timeout: float) -> None:
        """Wait until no message is being moved, for at most ``timeout`` seconds."""
        if self._moving and (await clock.wait([*self._moving], timeout=timeout))[1]:
            logger.debug("%s: some messages are still being moved to the queues of their delays", self._wire.label)

    async def _move(self, queue: str, spec: DelaySpec, kept: RawMessage, settle: Settle) -> None:
        """Move a message to the queue of its delay, or have it requeued after a pause."""
        name, milliseconds = queue, spec.milliseconds(0)
        try:
            properties, deliveries = counting.recount(kept.properties, kept.route, self._username)
            if len(properties) > self._wire.frame_max - frames.CONTENT_OVERHEAD:
                raise BrokerError(f"{len(properties)} bytes of properties are more than a frame holds")
            milliseconds = spec.milliseconds(deliveries - 1)
            name = f"{queue}.delay.{milliseconds}"
            async with self._window:
                channel = await self._ready(name, queue, spec, milliseconds)
                confirm = _Confirm(name)
                channel.expect(confirm)
                head = frames.publish(channel.number, "", name, mandatory=True)
                content = frames.content(channel.number, properties, kept.body, self._wire.frame_max)
                self._wire.write(b"".join((head, *content)))
                await self._wire.drain()
                error = await confirm.answer
            if error is not None:
                raise error
            if self._age(name) >= LEASE - LEASE_MARGIN:
                raise BrokerError("the confirm came when the queue may have been about to expire")
        except ConnectionLostError:
            return
        except (MessagingError, aiormq.AMQPChannelError, ValueError, IndexError, struct.error) as failure:
            if isinstance(failure, BrokerError) and failure.code is not None:
                self._declared.pop(name, None)  # it may have been deleted
            is_known = isinstance(failure, (MessagingError, aiormq.AMQPChannelError))
            logger.log(
                logging.DEBUG if name in self._logged else logging.WARNING,
                "%s: a message of queue %r cannot be delayed in %r: %s; it is requeued",
                self._wire.label, queue, name, describe(failure) if is_known else f"malformed properties: {failure}",
            )  # fmt: skip
            self._logged.add(name)
            clock.call_later(asyncio.get_running_loop(), min(milliseconds / 1000, _MAX_PAUSE), settle, False)
        else:
            settle(True)

    async def _ready(self, name: str, queue: str, spec: DelaySpec, milliseconds: int) -> _DelayChannel:
        """Return the channel once the broker accepts messages and the queue ``name`` of the delay exists."""
        while True:
            channel = self._channel
            if not self._wire.alive:
                raise _lost()
            if not self._accepts.is_set():
                await self._accepts.wait()
            elif channel is not None and channel.refusal is None and self._age(name) < _RECENT:
                return channel
            else:
                async with self._preparing:
                    if self._channel is not channel:
                        continue  # another task has opened one
                    if channel is None or channel.refusal is not None:
                        opened = await self._wire.channel(confirms=True)
                        number = cast("int", opened.number)
                        self._channel = self._wire.lanes[number] = _DelayChannel(number)
                    elif self._age(name) >= _RECENT:
                        await self._declare(name, queue, spec, milliseconds)

    async def _declare(self, name: str, queue: str, spec: DelaySpec, milliseconds: int) -> None:
        began = clock.time_of(asyncio.get_running_loop())
        arguments = {
            "x-queue-type": "classic",
            "x-message-ttl": milliseconds,
            "x-expires": min(milliseconds + round(LEASE * 1000), _MAX_MILLISECONDS),
            "x-dead-letter-exchange": "",
            "x-dead-letter-routing-key": queue,
        }
        if spec.quorum:
            # as safe as the queue it came from: confirmed on the way back as well
            arguments |= {
                "x-queue-type": "quorum",
                "x-dead-letter-strategy": "at-least-once",
                "x-overflow": "reject-publish",
            }
        channel = await self._wire.channel()
        try:
            await topology.declare_queue(self._wire, channel, QueueSpec(name, arguments=arguments))
        finally:
            await self._wire.close_channel(channel)
        self._declared[name] = began

    def _age(self, name: str) -> float:
        """Return the time since a queue was declared, seconds; infinite if it was not."""
        return clock.time_of(asyncio.get_running_loop()) - self._declared.get(name, -math.inf)


def _lost() -> ConnectionLostError:
    return ConnectionLostError("the connection was lost")
