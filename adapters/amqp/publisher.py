"""Publishing on one connection: pipelined, confirmed, bounded, in order.

Messages with qos 1 travel on a channel with publisher confirms, those with qos 0 on one without; either is opened
when first needed. ``publish`` writes what fits and waits in between: for room in the in-flight window, for the
transport's buffer, for a broker that is out of memory, for a channel. One task publishes at a time.

**Message ids.** A mandatory message that no queue takes comes back, and is known by its message id alone. So of those
to which the application gave the same id one waits, with all that follow it, until the other is confirmed.

**A message the broker refused** (``basic.nack``) is sent again until its deadline, see :mod:`.retries`, unless a full
queue refused it, as far as that is known: see :mod:`.overflow`.

**A channel the broker closed.** The broker answers a message it does not take (no such exchange, no permission, too
large) by closing the channel, and does not say which message it was. So what was not confirmed is sent again on a
new channel, one message after the other, each confirmed before the next: the one that costs this channel, too, is to
blame and is refused. Some of the others arrive twice then, as they may whenever an outcome is not known.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import time
from collections import deque
from typing import TYPE_CHECKING, Final

import aiormq

from adapters.amqp import frames, names, overflow, topology
from adapters.amqp.confirms import ConfirmChannel
from adapters.amqp.connection import BasicConsume, Wire, refusal
from adapters.amqp.declarations import destination
from adapters.amqp.extensions import ENVELOPE, QUEUE_OVERFLOW
from adapters.amqp.overflow import RefusingQueues
from adapters.amqp.properties import Template
from adapters.amqp.replies import DirectReplies
from adapters.amqp.retries import Retries
from messaging.errors import (
    ArgumentError,
    ConnectionLostError,
    MessagingError,
    PublishRefusedError,
    SubscriptionRefusedError,
    UnroutableError,
)
from messaging.model import envelope

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from messaging.adapter import Sink
    from messaging.model import Outgoing

logger = logging.getLogger(__name__)

#: bytes encoded before they are written and the transport is asked for room
_CHUNK: Final = 65_536
#: so many of them at once where nothing waits for room in the transport
_CHUNKS_AGAIN: Final = 16
#: contexts whose frames are kept
_PLANS: Final = 256
#: how long what is not confirmed may wait to be read by the broker, seconds
_MAY_BE_UNREAD: Final = 30.0
_NOT_SENT: Final = "the connection was lost before the message was sent"


class _Plan:
    """What the messages of one context have in common."""

    __slots__ = (
        "channel", "confirms", "context", "destination", "exchange", "goal", "has_id", "is_enveloped", "mandatory",
        "method", "options", "shared_id", "template",
    )  # fmt: skip

    def __init__(self, message: Outgoing, exchange: str) -> None:
        # held, so that its id stays its own
        self.context = context = message.context
        self.options = message.options
        # requests with direct reply-to have to be published where the replies arrive
        self.is_enveloped = message.options.custom.get(ENVELOPE, False)
        self.confirms = message.options.qos != "0" or context._reply_to_channel == names.DIRECT_CHANNEL
        self.destination = destination(context, message.options, exchange)
        #: messages with the same goal keep their order
        self.goal = self.destination.exchange.name, self.destination.routing_key
        self.mandatory = self.destination.mandatory
        #: whether the message id travels
        self.has_id = self.confirms or self.options.message_id is not None
        #: the application's own message id, which others may have, if the message would come back under it
        self.shared_id = self.options.message_id if self.mandatory and self.confirms else None
        #: the exchange to be seen to first; the default one needs nothing, nor does one that nobody is to be asked for
        self.exchange = self.destination.exchange.name if self.destination.exchange.declare != "none" else ""
        self.template = Template(context, message.options)
        #: channel number that ``method`` is for
        self.channel = 0
        self.method = b""


class _Channel(ConfirmChannel["Outgoing"]):
    """A channel of the publisher's."""

    def __init__(self, publisher: Publisher, opened: aiormq.Channel, *, confirms: bool) -> None:
        super().__init__(opened.number, confirms=confirms)
        self.opened = opened
        #: what arrives for direct reply-to
        self.replies: DirectReplies | None = None
        #: message id -> tag of those that may come back
        self.mandatory: dict[str, int] = {}
        #: messages that were published on the channels before
        self.base = 0
        self._publisher = publisher

    def take(self, kind: int, data: bytes, at: int, end: int) -> bool:
        """Take confirms, returns and direct replies; see ``connection.Lane``."""
        replies = self.replies
        return (replies is not None and replies.take(kind, data, at, end)) or super().take(kind, data, at, end)

    def progressed(self) -> None:
        if self.mandatory:
            self._forget_settled()
        self._publisher.progressed()

    def is_taken(self, message_id: str) -> bool:
        """Whether another message of that id may come back: the two could not be told apart."""
        return self.mandatory.get(message_id, 0) in self.pending

    def _forget_settled(self) -> None:
        pending = self.pending
        # in the order of publishing, which is about that of the confirms
        for message_id, _ in [*itertools.takewhile(lambda each: each[1] not in pending, self.mandatory.items())]:
            del self.mandatory[message_id]

    def nacked(self, tag: int, message: Outgoing) -> None:
        self._publisher.nacked(self.base + tag, message)

    def refused(self) -> None:
        self._publisher.refused(self)

    def returned(self, code: int, text: str, key: str, message_id: str | None) -> None:
        tag = self.mandatory.pop(message_id or "", 0)
        message = self.pending.pop(tag, None)
        if message is None:
            logger.debug("a message that nobody waits for came back from %r: %d %s", key, code, text)
        else:
            what = f"publish to {message.context.channel!r}: {code} {text}: no queue takes {key!r}"
            message.fail(UnroutableError(what, code=code, detail=text))


class Publisher:
    """See the module.

    Args:
        wire: the connection; its publisher is alone on it.
        exchange: where channels without extension are published to.
        window: messages that may await their confirm.
        refusing: the queues that refuse messages when they are full.
    """

    def __init__(self, wire: Wire, exchange: str, window: int, refusing: RefusingQueues | None = None) -> None:
        self._wire = wire
        self._exchange = exchange
        self._window = window
        #: once full, the window is filled again only when there is room worth a write
        self._low = window - max(1, window // 4)
        self._full = False
        self._blocked = False
        self._channels: dict[bool, _Channel] = {}
        #: those that are there
        self._exchanges = {""}
        self._plans: dict[int, _Plan] = {}
        self._opening = asyncio.Lock()
        self._changed = asyncio.Event()
        self._recovery: asyncio.Task[None] | None = None
        #: what recovery has in its hands
        self._suspects: deque[Outgoing] = deque()
        self._refusing = refusing or RefusingQueues()
        self._retries = Retries(self)
        #: messages that were published on channels that are closed
        self._base = 0
        #: when something that is not confirmed was last written, in the loop's time
        self._unconfirmed_at = -math.inf

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
                if not message.settled:
                    message.fail(error)

    def hand_over(self) -> None:
        """Pass on the replies that have arrived: they count, also if the connection is lost now."""
        for channel in self._channels.values():
            if channel.replies is not None:
                channel.replies.hand_over()

    def end(self, error: MessagingError) -> None:
        """The connection is gone: fail whatever awaits a confirm, and end all waiting. Idempotent."""
        if self._recovery is not None:
            self._recovery.cancel()
        for channel in self._channels.values():
            pending, channel.pending = channel.pending, {}
            self._suspects.extend(pending.values())
        self._suspects.extend(self._retries.end())
        while self._suspects:
            self._suspects.popleft().fail(error)
        self.progressed()

    def wrote_unconfirmed(self) -> bool:
        """Whether messages were written not long ago that the broker does not confirm."""
        return asyncio.get_running_loop().time() - self._unconfirmed_at < _MAY_BE_UNREAD

    # --- waiting

    def progressed(self) -> None:
        """Something that is waited for may have come about."""
        if self._retries.held:
            self._retries.look()
        self._changed.set()

    async def _progress(self) -> None:
        self._changed.clear()
        await self._changed.wait()

    def block(self, reason: str | None) -> None:
        """The broker takes no messages for now, for this reason; ``None``: it does again."""
        self._blocked = reason is not None
        self.progressed()

    def _has_room(self, channel: _Channel) -> bool:
        if not channel.confirms:
            return True
        count = len(channel.pending) + self._retries.count
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
            elif not self._has_room(channel) or (plan.shared_id is not None and channel.is_taken(plan.shared_id)):
                await self._progress()
            else:
                return

    async def _prepare(self, message: Outgoing, plan: _Plan) -> None:
        """See to the channel and the exchange of ``message``; it is failed if the broker does not let it have them."""
        try:
            if plan.confirms not in self._channels:
                await self._open(confirms=plan.confirms)
            if plan.exchange not in self._exchanges:
                await topology.ensure_exchange(self._wire, plan.destination.exchange)
                self._exchanges.add(plan.exchange)
        except aiormq.AMQPChannelError as error:
            message.fail(refusal(PublishRefusedError, f"publish to {message.context.channel!r}", error))

    async def _open(self, *, confirms: bool) -> _Channel:
        async with self._opening:
            channel = self._channels.get(confirms)
            if channel is None:
                opened = await self._wire.channel(confirms=confirms)
                channel = _Channel(self, opened, confirms=confirms)
                channel.base = self._base
                self._wire.lanes[channel.number] = channel
                self._channels[confirms] = channel
            return channel

    async def receive_replies(self, sink: Sink) -> DirectReplies:
        """Have the replies to requests with direct reply-to delivered to ``sink``.

        Raises:
            SubscriptionRefusedError: the broker has no such thing.
            ConnectionLostError: the connection went away.
        """
        try:
            channel = await self._open(confirms=True)
            if channel.replies is not None:  # nobody wanted them any more
                channel.replies.sink = sink
                return channel.replies
            replies = channel.replies = DirectReplies(sink)
            request = BasicConsume(queue=names.DIRECT_REPLY_TO, consumer_tag="replies", no_ack=True)
            await self._wire.command(channel.opened, request)
        except aiormq.AMQPChannelError as error:
            raise refusal(SubscriptionRefusedError, "replies", error) from error
        return replies

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

    def _send(self, batch: Sequence[Outgoing], position: int, *, again: bool = False) -> int:
        """Write messages from ``position`` on as far as nothing has to be waited for; return where that ends.

        With ``again``, the messages were refused before, and wait for no room in the window.
        """
        parts: list[bytes] = []
        size = 0
        confirmed: list[Outgoing] = []
        unconfirmed: list[Outgoing] = []
        now = int(time.time())
        held = None if again else self._retries.held
        while position < len(batch) and size < _CHUNK:
            message = batch[position]
            if not message.settled and (plan := self._plan(message)) is not None:
                channel = self._channels.get(plan.confirms)
                if channel is None or plan.exchange not in self._exchanges or not (again or self._has_room(channel)):
                    break
                if plan.shared_id is not None and channel.is_taken(plan.shared_id):
                    break
                if held and plan.confirms and plan.goal in held:
                    self._retries.wait_behind(plan.goal, message)
                    position += 1
                    continue
                try:
                    parts += self._encode(message, plan, channel, now)
                except ValueError as error:
                    message.fail(ArgumentError(f"the message cannot be encoded: {error}"))
                else:
                    size += len(message.payload) + 128
                    if plan.confirms:
                        tag = channel.expect(message)
                        if plan.mandatory:
                            channel.mandatory[message.message_id] = tag
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
        if unconfirmed:
            self._unconfirmed_at = asyncio.get_running_loop().time()
            for message in unconfirmed:
                message.confirm()
        return position

    def _encode(self, message: Outgoing, plan: _Plan, channel: _Channel, now: int) -> Iterable[bytes]:
        if plan.channel != channel.number:
            goal = plan.destination
            plan.method = frames.publish(channel.number, goal.exchange.name, goal.routing_key, mandatory=plan.mandatory)
            plan.channel = channel.number
        properties = plan.template.fill(message.correlation_id, message.message_id if plan.has_id else None, now)
        frame_max = self._wire.frame_max
        if len(properties) > frame_max - frames.CONTENT_OVERHEAD:
            raise ValueError(f"{len(properties)} bytes of properties; the broker takes frames of {frame_max} bytes")
        payload = envelope.wrap(message, message.payload) if plan.is_enveloped else message.payload
        return (plan.method, *frames.content(channel.number, properties, payload, frame_max))

    # --- messages the broker refused

    def nacked(self, number: int, message: Outgoing) -> None:
        """The broker did not take ``message``, whose number rises in the order of publishing."""
        plan = self._plan(message)
        if plan is None:
            return
        if overflow.refuses(plan.options.custom.get(QUEUE_OVERFLOW)) or self._refusing.may_take(plan.destination):
            message.fail(PublishRefusedError("the broker did not take the message (basic.nack): the queue is full"))
        else:
            self._retries.refused(plan.goal, number, message)

    @property
    def last_number(self) -> int:
        """See ``retries.Writer``."""
        channel = self._channels.get(True)
        return self._base if channel is None else channel.base + channel.last_tag

    def is_answered(self, number: int) -> bool:
        """See ``retries.Writer``."""
        channel = self._channels.get(True)
        return channel is None or number - channel.base not in channel.pending

    def has_in_flight(self, goal: tuple[str, str]) -> bool:
        """See ``retries.Writer``."""
        channel = self._channels.get(True)
        pending = [] if channel is None else channel.pending.values()
        plans = (self._plan(message) for message in (*pending, *self._suspects) if not message.settled)
        return any(plan is not None and plan.goal == goal for plan in plans)

    def send_again(self, messages: Sequence[Outgoing]) -> int:
        """See ``retries.Writer``."""
        position = 0
        for _ in range(_CHUNKS_AGAIN):
            if self._blocked or self._recovery is not None or not self._wire.alive:
                break
            position = self._send(messages, position, again=True)
        return position

    # --- a channel the broker closed

    def refused(self, channel: _Channel) -> None:
        """The broker closed ``channel``."""
        if self._channels.get(channel.confirms) is channel:
            del self._channels[channel.confirms]
        self._base += channel.last_tag
        if channel.replies is not None:
            code, text = channel.refusal or (0, "")
            what = f"the channel that replies arrive on was closed: {code} {text}"
            channel.replies.fail(SubscriptionRefusedError(what, code=code, detail=text))
        # the exchange it was about may be gone
        self._exchanges = {""}
        if not channel.confirms:
            logger.warning("a message with qos 0 was refused: %d %s", *channel.refusal or (0, ""))
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
            lost = (
                error
                if isinstance(error, ConnectionLostError)
                else refusal(ConnectionLostError, "cannot open a channel to publish on", error)
            )
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
            tag = channel.expect(message)
            if plan.mandatory:
                channel.mandatory[message.message_id] = tag
            self._wire.write(b"".join(self._encode(message, plan, channel, int(time.time()))))
            while channel.pending and channel.refusal is None:
                await self._progress()
            if channel.refusal is not None:
                if self._suspects and self._suspects[0] is message:
                    self._suspects.popleft()
                    code, text = channel.refusal
                    what = f"publish to {message.context.channel!r}: {code} {text}"
                    message.fail(PublishRefusedError(what, code=code, detail=text))
                return
