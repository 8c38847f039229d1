"""Publishing on one connection: pipelined, confirmed, bounded, in order.

Messages with qos 1 travel on a channel with publisher confirms, those with qos 0 on one without; either is opened
when first needed. ``publish`` writes what fits and waits in between: for room in the in-flight window, for the
transport's buffer, for a broker that is out of memory, for a channel. One task publishes at a time.

**A channel the broker closed.** The broker answers a message it does not take (no such exchange, no permission, too
large) by closing the channel, and does not say which message it was. So what was not confirmed is sent again on a
new channel, one message after the other, each confirmed before the next: the one that costs this channel, too, is to
blame and is refused. Some of the others arrive twice then, as they may whenever an outcome is not known.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from typing import TYPE_CHECKING, Final

import aiormq

from adapters.amqp import frames, names, topology
from adapters.amqp.connection import Wire, describe
from adapters.amqp.properties import Template
from messaging.errors import ArgumentError, ConnectionLostError, MessagingError, PublishRefusedError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from messaging.adapter import Outgoing

logger = logging.getLogger(__name__)

#: bytes encoded before they are written and the transport is asked for room
_CHUNK: Final = 65_536
#: contexts whose frames are kept
_PLANS: Final = 256
_NOT_SENT: Final = "the connection was lost before the message was sent"


class _Plan:
    """What the messages of one context have in common."""

    __slots__ = ("channel", "confirms", "context", "exchange", "method", "options", "routing_key", "template")

    def __init__(self, message: Outgoing, exchange: str) -> None:
        # held, so that its id stays its own
        self.context = context = message.context
        self.options = message.options
        self.confirms = message.options.qos != "0"
        channel, extension = context._channel or "", context._channel_extension
        if extension is None:
            self.exchange, self.routing_key = exchange, names.routing_key(channel)
        else:
            self.exchange, self.routing_key = channel, extension
        self.template = Template(context, message.options)
        #: channel number that ``method`` is for
        self.channel = 0
        self.method = b""


class _Channel:
    """A channel to publish on, and what it has not confirmed yet. Takes its acknowledgements as a ``Lane``."""

    def __init__(self, publisher: Publisher, number: int, *, confirms: bool) -> None:
        self.number = number
        self.confirms = confirms
        self.pending: dict[int, Outgoing] = {}
        #: why the broker closed it
        self.refusal = ""
        self._next_tag = 1
        #: no smaller tag is pending
        self._lowest = 1
        self._publisher = publisher

    def expect(self, message: Outgoing) -> None:
        """The next message on this channel is ``message``."""
        self.pending[self._next_tag] = message
        self._next_tag += 1

    def take(self, kind: int, data: bytes, at: int, _end: int) -> bool:
        """Take confirms; see ``connection.Lane``."""
        if kind != frames.METHOD:
            return False
        method = data[at : at + 4]
        if method not in (frames.BASIC_ACK, frames.BASIC_NACK):
            return False
        tag, multiple = frames.read_settlement(data, at)
        pending = self.pending
        if multiple:
            settled = [pending.pop(each, None) for each in range(self._lowest, min(tag, self._next_tag - 1) + 1)]
            self._lowest = max(self._lowest, tag + 1)
        else:
            settled = [pending.pop(tag, None)]
            while self._lowest < self._next_tag and self._lowest not in pending:
                self._lowest += 1
        for message in settled:
            if message is not None:
                if method == frames.BASIC_ACK:
                    message.confirm()
                else:
                    message.fail(PublishRefusedError("the broker did not take the message (basic.nack)"))
        self._publisher.progressed()
        return True

    def closed(self, reason: str) -> None:
        """The broker closed the channel; see ``connection.Lane``."""
        self.refusal = reason
        self._publisher.refused(self)


class Publisher:
    """See the module.

    Args:
        wire: the connection; its publisher is alone on it.
        exchange: where channels without extension are published to.
        window: messages that may await their confirm.
    """

    def __init__(self, wire: Wire, exchange: str, window: int) -> None:
        self._wire = wire
        self._exchange = exchange
        self._window = window
        #: once full, the window is filled again only when there is room worth a write
        self._low = window - max(1, window // 4)
        self._full = False
        self._blocked = False
        self._channels: dict[bool, _Channel] = {}
        self._exchanges: set[str] = set()
        self._plans: dict[int, _Plan] = {}
        self._changed = asyncio.Event()
        self._recovery: asyncio.Task[None] | None = None
        #: what recovery has in its hands
        self._suspects: deque[Outgoing] = deque()
        wire.on_blocked(self._on_blocked)

    async def publish(self, batch: Sequence[Outgoing]) -> None:
        """Write the messages of ``batch``, in order; see ``Adapter.publish``."""
        position = 0
        try:
            while position < len(batch):
                await self._room_for(batch[position])
                position = self._send(batch, position)
                await self._wire.drain()
        except ConnectionLostError as error:
            # what was written and awaits its confirm is failed by ``end``
            for message in batch[position:]:
                message.fail(error)

    def end(self, error: MessagingError) -> None:
        """The connection is gone: fail whatever awaits a confirm, and end all waiting. Idempotent."""
        if self._recovery is not None:
            self._recovery.cancel()
        for channel in self._channels.values():
            pending, channel.pending = channel.pending, {}
            self._suspects.extend(pending.values())
        while self._suspects:
            self._suspects.popleft().fail(error)
        self.progressed()

    # --- waiting

    def progressed(self) -> None:
        """Something that is waited for may have come about."""
        self._changed.set()

    async def _progress(self) -> None:
        self._changed.clear()
        await self._changed.wait()

    def _on_blocked(self, blocked: bool) -> None:
        if blocked:
            logger.warning("the broker is short of memory or disk space and takes no messages for now")
        elif self._blocked:
            logger.info("the broker takes messages again")
        self._blocked = blocked
        self.progressed()

    def _has_room(self, channel: _Channel) -> bool:
        if not channel.confirms:
            return True
        count = len(channel.pending)
        self._full = count > self._low if self._full else count >= self._window
        return not self._full

    async def _room_for(self, message: Outgoing) -> None:
        """Return once ``message`` can be encoded and written, or is settled; until then the connection lives."""
        while True:
            if not self._wire.alive:
                raise ConnectionLostError(_NOT_SENT)
            if message.settled:
                return
            if self._blocked or self._recovery is not None:
                await self._progress()
                continue
            plan = self._plan(message)
            if plan is None:
                return
            channel = self._channels.get(plan.confirms)
            if channel is None or plan.exchange not in self._exchanges:
                await self._prepare(message, plan)
            elif not self._has_room(channel):
                await self._progress()
            else:
                return

    async def _prepare(self, message: Outgoing, plan: _Plan) -> None:
        """See to the channel and the exchange of ``message``; it is failed if the broker does not let it have them."""
        try:
            if plan.confirms not in self._channels:
                await self._open(confirms=plan.confirms)
            if plan.exchange not in self._exchanges:
                await topology.ensure_exchange(self._wire, plan.exchange, create=message.options.autocreate)
                self._exchanges.add(plan.exchange)
        except aiormq.AMQPChannelError as error:
            refusal = PublishRefusedError(f"publish to {message.context.channel!r}: {describe(error)}")
            refusal.__cause__ = error
            message.fail(refusal)

    async def _open(self, *, confirms: bool) -> _Channel:
        opened = await self._wire.channel(confirms=confirms)
        channel = _Channel(self, opened.number, confirms=confirms)
        self._wire.lanes[channel.number] = channel
        self._channels[confirms] = channel
        return channel

    # --- writing

    def _plan(self, message: Outgoing) -> _Plan | None:
        """The plan of ``message``, or ``None`` if it cannot be encoded: it is then failed."""
        context = message.context
        plan = self._plans.get(id(context))
        if plan is None or plan.context is not context or plan.options is not message.options:
            try:
                plan = _Plan(message, self._exchange)
            except ArgumentError as error:
                message.fail(error)
                return None
            if len(self._plans) >= _PLANS:
                self._plans.clear()
            self._plans[id(context)] = plan
        return plan

    def _send(self, batch: Sequence[Outgoing], position: int) -> int:
        """Write messages from ``position`` on as far as nothing has to be waited for; return where that ends."""
        parts: list[bytes] = []
        size = 0
        confirmed: list[Outgoing] = []
        unconfirmed: list[Outgoing] = []
        now = int(time.time())
        while position < len(batch) and size < _CHUNK:
            message = batch[position]
            if not message.settled and (plan := self._plan(message)) is not None:
                channel = self._channels.get(plan.confirms)
                if channel is None or plan.exchange not in self._exchanges or not self._has_room(channel):
                    break
                try:
                    parts += self._encode(message, plan, channel, now)
                except ValueError as error:
                    message.fail(ArgumentError(f"the message cannot be encoded: {error}"))
                else:
                    size += len(message.payload) + 128
                    if plan.confirms:
                        channel.expect(message)
                        confirmed.append(message)
                    else:
                        unconfirmed.append(message)
            position += 1
        if parts and not self._wire.write(b"".join(parts)):
            # a loss found out just now: ``end`` has failed those that await a confirm
            for message in unconfirmed:
                message.fail(ConnectionLostError(_NOT_SENT))
            return position
        for message in confirmed:
            message.sent()
        for message in unconfirmed:
            message.confirm()
        return position

    def _encode(self, message: Outgoing, plan: _Plan, channel: _Channel, now: int) -> Iterable[bytes]:
        if plan.channel != channel.number:
            plan.method = frames.publish(channel.number, plan.exchange, plan.routing_key)
            plan.channel = channel.number
        properties = plan.template.fill(message.message_id if plan.confirms else None, now)
        frame_max = self._wire.frame_max
        if len(properties) > frame_max - frames.CONTENT_OVERHEAD:
            raise ValueError(f"{len(properties)} bytes of properties; the broker takes frames of {frame_max} bytes")
        return (plan.method, *frames.content(channel.number, properties, message.payload, frame_max))

    # --- a channel the broker closed

    def refused(self, channel: _Channel) -> None:
        """The broker closed ``channel``."""
        if self._channels.get(channel.confirms) is channel:
            del self._channels[channel.confirms]
        # the exchange it was about may be gone
        self._exchanges.clear()
        if not channel.confirms:
            logger.warning("a message with qos 0 was refused: %s", channel.refusal)
        self._suspects.extendleft(reversed(channel.pending.values()))
        channel.pending = {}
        if self._suspects and self._recovery is None:
            self._recovery = asyncio.get_running_loop().create_task(self._recover())
        self.progressed()

    async def _recover(self) -> None:
        try:
            while self._suspects:
                await self._convict(await self._open(confirms=True))
        except (ConnectionLostError, aiormq.AMQPChannelError) as error:
            lost = error if isinstance(error, ConnectionLostError) else ConnectionLostError(describe(error))
            while self._suspects:
                self._suspects.popleft().fail(lost)
        finally:
            self._recovery = None
            self.progressed()

    async def _convict(self, channel: _Channel) -> None:
        """Send suspects one by one until ``channel`` is closed over one of them, which is refused."""
        while self._suspects and self._channels.get(True) is channel:
            message = self._suspects[0]
            plan = None if message.settled else self._plan(message)
            if plan is not None and plan.exchange not in self._exchanges:
                await self._prepare(message, plan)
                continue
            self._suspects.popleft()
            if plan is None:
                continue
            channel.expect(message)
            self._wire.write(b"".join(self._encode(message, plan, channel, int(time.time()))))
            while channel.pending and not channel.refusal:
                await self._progress()
            if channel.refusal:
                if self._suspects and self._suspects[0] is message:
                    self._suspects.popleft()
                    message.fail(PublishRefusedError(f"publish to {message.context.channel!r}: {channel.refusal}"))
                return
