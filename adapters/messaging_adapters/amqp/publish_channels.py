"""Channels to publish on: their unconfirmed messages, confirms, refusals and returned messages.

:class:`PublishChannels` are those of one publisher, opened when they are first needed, and the exchanges that are known
to exist.

A mandatory message that reaches no queue is returned with ``basic.return`` and its content, and is then confirmed like
any other. Its message id identifies it, and it fails at once. The confirm that follows has no effect.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Iterable
from typing import TYPE_CHECKING, Final, Generic, Protocol, TypeVar, cast

import aiormq

from messaging.adapter import Sink
from messaging.errors import MessagingError, PublishRefusedError, SubscriptionRefusedError, UnroutableError
from messaging.model import Outgoing
from messaging_adapters.amqp import frames, names, properties, topology
from messaging_adapters.amqp.connection import AmqpWire, refusal
from messaging_adapters.amqp.deliveries import DirectReplies
from messaging_adapters.amqp.properties import PublishForm

if TYPE_CHECKING:
    from aio_pika.abc import AbstractChannel


logger = logging.getLogger(__name__)

#: replaced channels that are kept open for direct replies
_MAX_RETIRED: Final = 4


class Confirmable(Protocol):
    """A message that is published: a ``model.Outgoing``, or a delayed message."""

    def confirm(self) -> None:
        """Report that the broker has taken the message."""

    def fail(self, error: MessagingError, /) -> None:
        """Report that the broker has not taken the message."""


M = TypeVar("M", bound=Confirmable)


class ConfirmChannel(Generic[M]):
    """A channel to publish on, and its unconfirmed messages; a ``protocol.FrameLane``."""

    def __init__(self, number: int, *, confirms: bool = True) -> None:
        self.number = number
        self.confirms = confirms
        self.pending: dict[int, M] = {}
        #: why the broker closed the channel: reply code and text
        self.refusal: tuple[int, str] | None = None
        self._next_tag = 1
        #: no smaller tag is pending
        self._lowest = 1
        #: reply code, reply text and routing key of the returned message whose content is arriving
        self._returning: tuple[int, str, str] | None = None
        self._returning_id: str | None = None
        self._missing = 0

    @property
    def last_tag(self) -> int:
        """Return the tag of the message that was published last; 0 before the first."""
        return self._next_tag - 1

    def expect(self, message: M) -> int:
        """Add ``message``, the next one that is published on this channel, and return its tag."""
        tag = self._next_tag
        self.pending[tag] = message
        self._next_tag = tag + 1
        return tag

    def take(self, kind: int, data: bytes, at: int, end: int) -> bool:
        """Take confirms and returned messages; see ``protocol.FrameLane``."""
        if kind != frames.METHOD:
            return self._returning is not None and self._take_content(kind, data, at, end)
        method = data[at : at + 4]
        if method not in (frames.BASIC_ACK, frames.BASIC_NACK):
            if method != frames.BASIC_RETURN:
                return False
            self._returning, self._missing = frames.read_return(data, at, end), 0
            return True
        tag, multiple = frames.read_settlement(data, at)
        pending = self.pending
        if multiple:
            last = min(tag or self._next_tag, self._next_tag - 1)  # 0 stands for all (basic.ack, 1.8.3.13)
            tags: Iterable[int] = range(self._lowest, last + 1)
            self._lowest = max(self._lowest, last + 1)
        else:
            tags = (tag,)
        for each in tags:
            message = pending.pop(each, None)
            if message is not None:
                if method == frames.BASIC_ACK:
                    message.confirm()
                else:
                    self.nacked(each, message)
        while self._lowest < self._next_tag and self._lowest not in pending:
            self._lowest += 1
        self.progressed()
        return True

    def _take_content(self, kind: int, data: bytes, at: int, end: int) -> bool:
        if kind == frames.HEADER:
            self._missing = frames.read_body_size(data, at)
            self._returning_id = properties.read(data, at + 12, end, False).extensions.get("messageId")
        elif self._missing > 0:
            self._missing -= end - at
        else:
            return False
        if self._missing <= 0 and self._returning is not None:
            (code, text, key), self._returning = self._returning, None
            self.returned(code, text, key, self._returning_id)
            self.progressed()
        return True

    def closed(self, code: int, text: str) -> None:
        """Handle the close of the channel by the broker; see ``protocol.FrameLane``."""
        self.refusal = code, text
        self.refused()

    # --- outcomes

    def nacked(self, tag: int, message: M) -> None:
        """Handle a message that the broker refused. Tags rise in the order of publishing."""
        del tag
        message.fail(PublishRefusedError("the broker did not take the message (basic.nack)"))

    def progressed(self) -> None:
        """Handle an answer of the broker."""

    def refused(self) -> None:
        """Handle the close of the channel by the broker."""

    def returned(self, code: int, text: str, key: str, message_id: str | None, /) -> None:
        """Handle a returned message: reply code and text, its routing key, its message id."""


class ChannelOwner(Protocol):
    """The publisher, as its channels see it."""

    def progressed(self) -> None:
        """Look for room and answers again."""

    def nacked(self, number: int, message: Outgoing, /) -> None:
        """Handle a message that the broker refused; ``number`` rises in the order of publishing."""

    def refused(self, channel: PublishChannel, /) -> None:
        """Handle the close of a channel by the broker."""


class PublishChannel(ConfirmChannel["Outgoing"]):
    """A channel of a publisher.

    Args:
        opened: the channel at the library.
        confirms: whether the broker confirms messages on it.
        base: the number of messages that were published on earlier channels.
    """

    def __init__(self, owner: ChannelOwner, opened: AbstractChannel, *, confirms: bool, base: int) -> None:
        super().__init__(cast("int", opened.number), confirms=confirms)
        self.opened = opened
        self.base = base
        #: whether another channel has replaced it
        self.is_retired = False
        #: the receiver of direct replies
        self.replies: DirectReplies | None = None
        #: tag by message id of the messages that may be returned
        self.mandatory: dict[str, int] = {}
        self._owner = owner

    def take(self, kind: int, data: bytes, at: int, end: int) -> bool:
        """Take confirms, returns and direct replies; see ``protocol.FrameLane``."""
        replies = self.replies
        return (replies is not None and replies.take(kind, data, at, end)) or super().take(kind, data, at, end)

    def progressed(self) -> None:
        """See ``ConfirmChannel.progressed``."""
        if self.mandatory:
            self._forget_settled()
        self._owner.progressed()

    def is_taken(self, message_id: str) -> bool:
        """Return whether another message with this id may be returned: the two could not be told apart."""
        return self.mandatory.get(message_id, 0) in self.pending

    def _forget_settled(self) -> None:
        pending = self.pending
        # the order of publishing, which is about the order of confirms
        for message_id, _ in [*itertools.takewhile(lambda each: each[1] not in pending, self.mandatory.items())]:
            del self.mandatory[message_id]

    def nacked(self, tag: int, message: Outgoing) -> None:
        """See ``ConfirmChannel.nacked``."""
        self._owner.nacked(self.base + tag, message)

    def refused(self) -> None:
        """See ``ConfirmChannel.refused``."""
        if not self.is_retired:
            self._owner.refused(self)

    def returned(self, code: int, text: str, key: str, message_id: str | None) -> None:
        """See ``ConfirmChannel.returned``."""
        tag = self.mandatory.pop(message_id or "", 0)
        message = self.pending.pop(tag, None)
        if message is None:
            logger.debug(
                "amqp: channel %d: an unknown message was returned from %r: %d %s", self.number, key, code, text
            )
        else:
            what = f"publish to {message.plan.channel!r}: {code} {text}: no queue takes {key!r}"
            message.fail(UnroutableError(what, code=code, detail=text))


class PublishChannels:
    """See the module.

    Attributes:
        open: the open channels, with publisher confirms and without.
        exchanges: the names of exchanges that are known to exist.
    """

    def __init__(self, owner: ChannelOwner, wire: AmqpWire) -> None:
        self.open: dict[bool, PublishChannel] = {}
        self.exchanges = {""}
        self._owner = owner
        self._wire = wire
        self._opening = asyncio.Lock()
        #: messages that were published on closed channels
        self._base = 0
        #: channels that are not published on any more, and receive direct replies
        self._retired: list[PublishChannel] = []

    async def prepare(self, message: Outgoing, form: PublishForm) -> None:
        """Open the channel and declare the exchange of ``message``. If the broker refuses, the message fails."""
        try:
            if form.confirms not in self.open:
                await self.channel(confirms=form.confirms)
            if form.exchange not in self.exchanges:
                await topology.ensure_exchange(self._wire, form.destination.exchange)
                self.exchanges.add(form.exchange)
        except aiormq.AMQPChannelError as error:
            message.fail(refusal(PublishRefusedError, f"publish to {message.plan.channel!r}", error))

    async def channel(self, *, confirms: bool) -> PublishChannel:
        """Return the channel with or without confirms. Raises as ``AmqpWire.channel``."""
        async with self._opening:
            channel = self.open.get(confirms)
            if channel is None:
                channel = self.open[confirms] = await self._new(confirms=confirms)
            return channel

    async def _new(self, *, confirms: bool) -> PublishChannel:
        opened = await self._wire.channel(confirms=confirms)
        channel = PublishChannel(self._owner, opened, confirms=confirms, base=self._base)
        self._wire.lanes[channel.number] = channel
        return channel

    def drop(self, channel: PublishChannel) -> None:
        """Forget a channel that the broker closed, and fail the subscription to replies on it."""
        if self.open.get(channel.confirms) is channel:
            del self.open[channel.confirms]
        self._base += channel.last_tag
        # the exchange that the broker closed the channel over may have been deleted
        self.exchanges = {""}
        if channel.replies is not None:
            code, text = channel.refusal or (0, "")
            what = f"the channel that replies arrive on was closed: {code} {text}"
            channel.replies.fail(SubscriptionRefusedError(what, code=code, detail=text))

    async def renew(self) -> None:
        """Replace the channel with confirms, on which no message may be unconfirmed. Raises as ``AmqpWire.channel``.

        A channel that receives direct replies stays open for those to earlier requests.
        """
        async with self._opening:
            old = self.open.pop(True, None)
            if old is not None:
                self._base += old.last_tag
                old.is_retired = True
                self._retired.append(old)
                while self._retired and (self._retired[0].replies is None or len(self._retired) > _MAX_RETIRED):
                    await self._close(self._retired.pop(0))
            channel = await self._new(confirms=True)
            if old is not None and old.replies is not None:
                # first: the broker closes a channel with a request whose replies it cannot deliver
                channel.replies = old.replies.moved()
                await self._consume_replies(channel)
            self.open[True] = channel

    async def _close(self, channel: PublishChannel) -> None:
        await self._wire.close_channel(channel.opened)
        if self._wire.lanes.get(channel.number) is channel:
            del self._wire.lanes[channel.number]

    async def _consume_replies(self, channel: PublishChannel) -> None:
        queue = await channel.opened.get_queue(names.DIRECT_REPLY_TO, ensure=False)
        await topology.consume(self._wire, queue, "replies", no_ack=True)

    async def receive_replies(self, sink: Sink) -> DirectReplies:
        """Have the replies to requests with direct reply-to delivered to ``sink``.

        Raises:
            SubscriptionRefusedError: the broker does not support it.
            ConnectionLostError: the connection was lost.
        """
        try:
            channel = await self.channel(confirms=True)
            if channel.replies is not None:  # an earlier subscription has ended
                channel.replies.sink = sink
                return channel.replies
            replies = channel.replies = DirectReplies(sink)
            await self._consume_replies(channel)
        except aiormq.AMQPChannelError as error:
            raise refusal(SubscriptionRefusedError, "replies", error) from error
        return replies

    def flush_replies(self) -> None:
        """Deliver the replies that have arrived: they count even if the connection is lost now."""
        for channel in (*self._retired, *self.open.values()):
            if channel.replies is not None:
                channel.replies.flush()

    # --- the numbers of messages, which rise in the order of publishing

    @property
    def last_number(self) -> int:
        """Return the number of the message that was written last."""
        channel = self.open.get(True)
        return self._base if channel is None else channel.base + channel.last_tag

    def is_answered(self, number: int) -> bool:
        """Return whether the broker has answered for a message that was written."""
        channel = self.open.get(True)
        return channel is None or number - channel.base not in channel.pending

    def pending(self) -> list[Outgoing]:
        """Return the unconfirmed messages."""
        channel = self.open.get(True)
        return [] if channel is None else [*channel.pending.values()]
