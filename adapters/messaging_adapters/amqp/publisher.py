"""Publishing on one connection: pipelined, confirmed, bounded, in order.

Messages with qos 1 travel on a channel with publisher confirms, messages with qos 0 on one without. A channel is opened
when it is first needed. ``publish`` writes as much as fits, and waits in between: for room in the window of unconfirmed
messages or in the transport's buffer, for a broker that is out of memory, for a channel. One task publishes at a time.

**Message ids.** A mandatory message that reaches no queue is returned, and only its message id identifies it.
So a message waits, with all that follow it, while another one with the same id of the application is unconfirmed.

**A message the broker refused for now.** RabbitMQ answers ``basic.nack`` when a queue cannot take a message: a quorum
queue without leader, say. Such a message is sent again until its deadline, with the same message id. Until then
messages that are published to the same exchange with the same routing key wait behind it: only messages in flight can
overtake it. First one message is sent, after a delay that grows. Once it is confirmed, the others follow in their
order. Messages to other destinations do not wait. Messages that wait count as unconfirmed, so the window of the
publisher bounds them.

A channel of RabbitMQ 3.10 that published first to a quorum queue while its leader was down refuses all messages to that
queue until the leader's node is back, even if there is a new leader meanwhile. So after the second attempt that was
refused the publisher opens another channel, likewise after the fourth, the eighth and so on.

A queue with the overflow "reject-publish" answers in the same way, for as long as it is full. Such queues, if declared
here, are remembered as ``declarations.RefusingQueues``: a message that one may have refused fails at once.

**A channel the broker closed.** The broker answers a message that it rejects (no such exchange, no permission, too
large) by closing the channel, and does not say which message it was. So the unconfirmed messages are sent again on a
new channel, each confirmed before the next one is sent: a message that costs this channel, too, is the rejected one and
fails. Some of the others arrive twice, as after any unknown outcome.
"""

from __future__ import annotations

import asyncio
import bisect
import contextlib
import logging
import math
import operator
from collections import deque
from collections.abc import Sequence
from typing import Final

import aiormq

from messaging.errors import (
    ArgumentError,
    ConnectionLostError,
    MessagingError,
    PublishRefusedError,
)
from messaging.execution import Backoff, clock
from messaging.model import Outgoing
from messaging_adapters.amqp.connection import AmqpWire, refusal
from messaging_adapters.amqp.declarations import RefusingQueues, refuses
from messaging_adapters.amqp.extensions import QUEUE_OVERFLOW
from messaging_adapters.amqp.properties import PublishForm
from messaging_adapters.amqp.publish_channels import PublishChannel, PublishChannels

logger = logging.getLogger(__name__)

#: bytes that are encoded before they are written
_CHUNK: Final = 65_536
#: chunks that are written at once where nothing waits for room in the transport's buffer
_CHUNKS_AGAIN: Final = 16
#: how long the broker may take to read messages that it does not confirm, seconds
_MAY_BE_UNREAD: Final = 30.0
#: how long publishing waits for the answers to unconfirmed messages before it takes another channel, seconds
_RENEWAL: Final = 1.0
_NOT_SENT: Final = "the connection was lost before the message was sent"
#: delay of the first attempt to send a refused message again, and the longest delay, seconds
_FIRST: Final = 0.05
_LONGEST: Final = 1.0
#: destinations with refused messages that are remembered, to log each once
_MAX_LOGGED: Final = 1024

#: exchange and routing key
Goal = tuple[str, str]
_number = operator.itemgetter(0)


class AmqpPublisher:
    """Writes the messages of one connection, and settles each by the answer of the broker. On the loop.

    Args:
        wire: the connection; the publisher is the only one on it.
        exchange: the exchange of channels without extension.
        window: the largest number of unconfirmed messages.
        refusing: the queues that are known to refuse messages when they are full.

    Attributes:
        is_blocked: the broker takes no messages for now, or the connection is about to close.
    """

    def __init__(self, wire: AmqpWire, exchange: str, window: int, refusing: RefusingQueues | None = None) -> None:
        self._wire = wire
        self._window = window
        #: a full window is filled again only when there is room worth a write
        self._low = window - max(1, window // 4)
        self._full = False
        self.is_blocked = False
        self.channels = PublishChannels(self, wire)
        self._exchange = exchange
        self._changed = asyncio.Event()
        self._recovery: asyncio.Task[None] | None = None
        #: unconfirmed messages of closed channels, one of which was rejected
        self._unconfirmed: deque[Outgoing] = deque()
        self._refusing = refusing or RefusingQueues()
        self._retries = Retries(self, wire.label)
        #: when a message without confirm was last written, in the loop's time
        self._unanswered_at = -math.inf

    async def publish(self, batch: Sequence[Outgoing]) -> None:
        """Write the messages of ``batch``, in order; see ``Adapter.publish``."""
        position = 0
        try:
            while position < len(batch):
                await self._wait_for_room(batch[position])
                position = self._send(batch, position)
                await self._wire.drain()
        except ConnectionLostError as error:
            # messages that were written and are unconfirmed are failed by ``end``
            for message in batch[position:]:
                if not message.settled:
                    message.fail(error)

    def end(self, error: MessagingError) -> None:
        """Fail all unconfirmed messages and end all waiting after the connection has ended. Idempotent."""
        if self._recovery is not None:
            self._recovery.cancel()
        for channel in self.channels.open.values():
            pending, channel.pending = channel.pending, {}
            self._unconfirmed.extend(pending.values())
        self._unconfirmed.extend(self._retries.end())
        while self._unconfirmed:
            self._unconfirmed.popleft().fail(error)
        self.progressed()

    async def finish(self, seconds: float) -> None:
        """Write no further message, and wait until none is unconfirmed, at most ``seconds``."""
        self.is_blocked = True
        try:
            async with clock.timeout(seconds):
                while self._wire.alive and (
                    self._unconfirmed or any(not each.settled for each in self.channels.pending())
                ):
                    await self._wait()
        except TimeoutError:
            pass

    def wrote_unanswered(self) -> bool:
        """Return whether messages were written a short time ago that the broker does not confirm."""
        return clock.time_of(asyncio.get_running_loop()) - self._unanswered_at < _MAY_BE_UNREAD

    # --- waiting

    def progressed(self) -> None:
        """Wake up the task that waits for room, a channel or an answer."""
        if self._retries.held:
            self._retries.send_answered()
        self._changed.set()

    async def _wait(self) -> None:
        self._changed.clear()
        await self._changed.wait()

    def block(self, reason: str | None) -> None:
        """Stop writing because the broker accepts no messages, for this reason; resume with ``None``."""
        self.is_blocked = reason is not None
        self.progressed()

    def _has_room(self, channel: PublishChannel) -> bool:
        if not channel.confirms:
            return True
        count = len(channel.pending) + self._retries.count
        self._full = count > self._low if self._full else count >= self._window
        return not self._full

    async def _wait_for_room(self, message: Outgoing) -> None:
        """Return once ``message`` can be encoded and written, or is settled.

        Raises:
            ConnectionLostError: the connection was lost.
        """
        while True:
            if not self._wire.alive:
                raise ConnectionLostError(_NOT_SENT)
            if message.settled:
                return
            if self.is_blocked or self._recovery is not None:
                await self._wait()
                continue
            form = self._form_of(message)
            if form is None:
                return
            channel = self.channels.open.get(form.confirms)
            if channel is None or form.exchange not in self.channels.exchanges:
                await self.channels.prepare(message, form)
            elif not self._has_room(channel) or (form.shared_id is not None and channel.is_taken(form.shared_id)):
                await self._wait()
            else:
                return

    # --- writing

    def _form_of(self, message: Outgoing) -> PublishForm | None:
        """Return the form of ``message``, kept in the slot of its plan; ``None`` if it cannot be encoded and fails."""
        plan = message.plan
        form: PublishForm | None = plan.slot
        if form is None:
            try:
                form = plan.slot = PublishForm(plan, self._exchange)
            except ArgumentError as error:
                message.fail(error)
        return form

    def _send(self, batch: Sequence[Outgoing], position: int, *, again: bool = False) -> int:
        """Write messages from ``position`` on as far as none has to wait, and return the position reached.

        With ``again``, the messages were refused before, and need no room in the window.
        """
        parts: list[bytes] = []
        size = 0
        awaiting: list[Outgoing] = []
        unanswered: list[Outgoing] = []
        now = int(clock.wall())
        held = None if again else self._retries.held
        form_of, frame_max = self._form_of, self._wire.frame_max
        channels, exchanges = self.channels.open, self.channels.exchanges
        while position < len(batch) and size < _CHUNK:
            message = batch[position]
            if not message.settled and (form := form_of(message)) is not None:
                channel = channels.get(form.confirms)
                if channel is None or form.exchange not in exchanges or not (again or self._has_room(channel)):
                    break
                if form.shared_id is not None and channel.is_taken(form.shared_id):
                    break
                if held and form.confirms and form.goal in held:
                    self._retries.wait_behind(form.goal, message)
                    position += 1
                    continue
                try:
                    parts += form.encode(message, channel.number, now, frame_max)
                except ValueError as error:
                    message.fail(ArgumentError(f"the message cannot be encoded: {error}"))
                else:
                    size += len(message.payload) + 128
                    if form.confirms:
                        tag = channel.expect(message)
                        if form.mandatory:
                            channel.mandatory[message.message_id] = tag
                        awaiting.append(message)
                    else:
                        unanswered.append(message)
            position += 1
        if parts and not self._wire.write(b"".join(parts)):
            # the loss was found by the write: ``end`` has failed the messages that await a confirm
            for message in unanswered:
                message.fail(ConnectionLostError(_NOT_SENT))
            return position
        for message in awaiting:
            message.sent()
        if unanswered:
            self._unanswered_at = clock.time_of(asyncio.get_running_loop())
            for message in unanswered:
                message.confirm()
        return position

    # --- messages that the broker refused

    def nacked(self, number: int, message: Outgoing) -> None:
        """Handle the refusal of ``message``, whose number rises in the order of publishing."""
        form = self._form_of(message)
        if form is None:
            return
        if refuses(message.plan.options.custom.get(QUEUE_OVERFLOW)) or self._refusing.may_take(form.destination):
            message.fail(PublishRefusedError("the broker did not take the message (basic.nack): the queue is full"))
        else:
            self._retries.refused(form.goal, number, message)

    def has_in_flight(self, goal: Goal) -> bool:
        """Return whether messages to ``goal`` await the broker's answer."""
        messages = (*self.channels.pending(), *self._unconfirmed)
        forms = (self._form_of(message) for message in messages if not message.settled)
        return any(form is not None and form.goal == goal for form in forms)

    def send_again(self, messages: Sequence[Outgoing]) -> int:
        """Write messages, and return how many: fewer if there is no room for now."""
        position = 0
        for _ in range(_CHUNKS_AGAIN):
            if self.is_blocked or self._recovery is not None or not self._wire.alive:
                break
            position = self._send(messages, position, again=True)
        return position

    def renew(self) -> None:
        """Publish on another channel soon."""
        channel = self.channels.open.get(True)
        if self._recovery is None and channel is not None:
            self._recovery = asyncio.get_running_loop().create_task(self._renew(channel))

    async def _renew(self, channel: PublishChannel) -> None:
        try:
            # messages on two channels could overtake each other
            with contextlib.suppress(TimeoutError):
                async with clock.timeout(_RENEWAL):
                    while channel.pending:
                        await self._wait()
            if not channel.pending and channel.refusal is None:
                await self.channels.renew()
        except (ConnectionLostError, aiormq.AMQPChannelError) as error:
            logger.debug("%s: no other channel to publish on: %s", self._wire.label, error)
        finally:
            self._recovery = None
            if self._unconfirmed and self._wire.alive:  # the broker closed the channel meanwhile
                self._recovery = asyncio.get_running_loop().create_task(self._recover())
            self.progressed()

    # --- channels that the broker closed

    def refused(self, channel: PublishChannel) -> None:
        """Handle the close of ``channel`` by the broker."""
        self.channels.drop(channel)
        if not channel.confirms:
            code, text = channel.refusal or (0, "")
            logger.warning("%s: a message with qos 0 was refused: %d %s; it is lost", self._wire.label, code, text)
        self._unconfirmed.extendleft(reversed(channel.pending.values()))
        channel.pending = {}
        if self._unconfirmed and self._recovery is None:
            self._recovery = asyncio.get_running_loop().create_task(self._recover())
        self.progressed()

    async def _recover(self) -> None:
        try:
            while self._unconfirmed:
                await self._isolate_rejected(await self.channels.channel(confirms=True))
        except (ConnectionLostError, aiormq.AMQPChannelError) as error:
            lost = (
                error
                if isinstance(error, ConnectionLostError)
                else refusal(ConnectionLostError, "cannot open a channel to publish on", error)
            )
            while self._unconfirmed:
                self._unconfirmed.popleft().fail(lost)
        finally:
            self._recovery = None
            self.progressed()

    async def _isolate_rejected(self, channel: PublishChannel) -> None:
        """Send unconfirmed messages one by one until the broker closes ``channel`` over one of them, which fails."""
        while self._unconfirmed and self.channels.open.get(True) is channel:
            message = self._unconfirmed[0]
            form = None if message.settled or not message.prepare() else self._form_of(message)
            if form is not None and form.exchange not in self.channels.exchanges:
                await self.channels.prepare(message, form)
                continue
            self._unconfirmed.popleft()
            self._send([message], 0, again=True)
            while channel.pending and channel.refusal is None:
                await self._wait()
            if channel.refusal is not None:
                if self._unconfirmed and self._unconfirmed[0] is message:
                    self._unconfirmed.popleft()
                    code, text = channel.refusal
                    what = f"publish to {message.plan.channel!r}: {code} {text}"
                    message.fail(PublishRefusedError(what, code=code, detail=text))
                return


class _HeldMessages:
    """The messages to one destination that wait."""

    __slots__ = ("backoff", "probe", "probes", "refused", "timer", "waiting")

    def __init__(self) -> None:
        #: with their numbers in the order of publishing; sent before ``waiting``
        self.refused: list[tuple[int, Outgoing]] = []
        self.waiting: deque[Outgoing] = deque()
        #: number of the message that was sent as a probe
        self.probe: int | None = None
        #: the number of probes that were refused
        self.probes = 0
        self.backoff = Backoff(_FIRST, _LONGEST, has_jitter=False)
        self.timer: asyncio.TimerHandle | None = None

    def drop_settled(self) -> int:
        """Forget the messages that are settled, or whose time to live is over; return how many."""
        before = len(self.refused) + len(self.waiting)
        self.refused = [each for each in self.refused if not each[1].settled and each[1].prepare()]
        self.waiting = deque(message for message in self.waiting if not message.settled and message.prepare())
        return before - len(self.refused) - len(self.waiting)

    def messages(self) -> list[Outgoing]:
        return [*(message for _, message in self.refused), *self.waiting]


class Retries:
    """The refused messages of a publisher, and the later ones to their destinations. For the event loop only.

    Attributes:
        held: the destinations with messages that wait.
        count: the number of messages that wait.
    """

    def __init__(self, publisher: AmqpPublisher, label: str) -> None:
        self.held: dict[Goal, _HeldMessages] = {}
        self.count = 0
        self._publisher = publisher
        self._channels = publisher.channels
        self._label = label
        self._logged: set[Goal] = set()

    def refused(self, goal: Goal, number: int, message: Outgoing) -> None:
        """Keep a message that was refused; ``number`` rises in the order of publishing."""
        held = self.held.get(goal)
        if held is None:
            held = self.held[goal] = _HeldMessages()
            self._log(goal)
        if held.probe == number:
            held.probe = None
            held.backoff.grow()
            held.probes += 1
            if held.probes > 1 and held.probes.bit_count() == 1:
                self._publisher.renew()
        if not message.settled:
            self.count += 1
            bisect.insort(held.refused, (number, message), key=_number)
        self._arm(goal, held)

    def _log(self, goal: Goal) -> None:
        is_logged = goal in self._logged
        if len(self._logged) >= _MAX_LOGGED:
            self._logged.clear()
        self._logged.add(goal)
        logger.log(
            logging.DEBUG if is_logged else logging.WARNING,
            "%s: the broker takes no messages to exchange %r with routing key %r for now (basic.nack): they are sent "
            "again until their deadlines", self._label, *goal,
        )  # fmt: skip

    def wait_behind(self, goal: Goal, message: Outgoing) -> None:
        """Keep a message that was not sent yet."""
        self.held[goal].waiting.append(message)
        self.count += 1

    def send_answered(self) -> None:
        """Send the messages whose probe was answered. Call after each answer."""
        for goal, held in [*self.held.items()]:
            if held.probe is not None and self._channels.is_answered(held.probe):
                held.probe = None
                self._send(goal, held)

    def end(self) -> list[Outgoing]:
        """Stop sending, and return the messages that waited."""
        left: list[Outgoing] = []
        for held in self.held.values():
            if held.timer is not None:
                held.timer.cancel()
            left += held.messages()
        self.held.clear()
        self.count = 0
        return left

    def _arm(self, goal: Goal, held: _HeldMessages) -> None:
        if held.timer is None:
            held.timer = clock.call_later(asyncio.get_running_loop(), held.backoff.pause, self._probe, goal, held)

    def _probe(self, goal: Goal, held: _HeldMessages) -> None:
        """Send the first message, unless others to the same destination are in flight."""
        held.timer = None
        self.count -= held.drop_settled()
        messages = held.messages()
        if held.probe is None and not self._publisher.has_in_flight(goal):
            if not messages:
                del self.held[goal]
                self._publisher.progressed()
                return
            if self._publisher.send_again(messages[:1]) and self.held.get(goal) is held:
                held.probe = self._channels.last_number
                self._sent(held, messages, 1)
        if self.held.get(goal) is held:  # the connection lives
            self._arm(goal, held)
            self._publisher.progressed()

    def _send(self, goal: Goal, held: _HeldMessages) -> None:
        """Send all messages, as far as there is room."""
        self.count -= held.drop_settled()
        messages = held.messages()
        sent = self._publisher.send_again(messages)
        if self.held.get(goal) is not held:  # the connection has ended
            return
        self._sent(held, messages, sent)
        if sent == len(messages):
            if held.timer is not None:
                held.timer.cancel()
            del self.held[goal]
            logger.debug("%s: the broker takes messages to exchange %r with routing key %r again", self._label, *goal)
        else:
            held.backoff.reset()
            self._arm(goal, held)

    def _sent(self, held: _HeldMessages, messages: list[Outgoing], count: int) -> None:
        """Keep the messages after the first ``count``. Sent ones that are refused again come before them."""
        self.count -= count
        held.refused.clear()
        held.waiting = deque(messages[count:])
