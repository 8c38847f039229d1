"""Messages that the broker refused with ``basic.nack`` for now, and the later messages to their destinations.

RabbitMQ answers ``basic.nack`` when a queue cannot take a message: a quorum queue without leader, say. Such a message
is sent again until its deadline, with the same message id. Until then messages that are published to the same exchange
with the same routing key wait behind it: only messages in flight can overtake it. First one message is sent, after a
delay that grows. Once it is confirmed, the others follow in their order. Messages to other destinations do not wait.

Messages that wait count as unconfirmed, so the window of the publisher bounds them.

**A new channel.** A channel of RabbitMQ 3.10 that published first to a quorum queue while its leader was down refuses
all messages to that queue until the leader's node is back, even if there is a new leader meanwhile. So after the second
attempt that was refused the publisher opens another channel, likewise after the fourth, the eighth and so on.

**Full queues.** A queue with the overflow "reject-publish" answers in the same way, for as long as it is full. Such
queues, if declared here, are remembered as :class:`RefusingQueues`: a message that one may have refused fails at once.
"""

from __future__ import annotations

import asyncio
import bisect
import logging
import operator
import re
from collections import deque
from typing import TYPE_CHECKING, Final, Protocol

from messaging.execution import Backoff, clock

if TYPE_CHECKING:
    from collections.abc import Sequence

    from messaging.model import Outgoing
    from messaging_adapters.amqp.declarations import AmqpDestination, QueueSource
    from messaging_adapters.amqp.publish_channels import PublishChannels

logger = logging.getLogger(__name__)

#: delay of the first attempt, and the longest delay, seconds
_FIRST: Final = 0.05
_LONGEST: Final = 1.0
#: destinations that are remembered, to log each once
_MAX_LOGGED: Final = 1024
#: queues that refuse messages when they are full and are remembered
_MAX_QUEUES: Final = 1024

#: exchange and routing key
Goal = tuple[str, str]
_number = operator.itemgetter(0)


class RetryWriter(Protocol):
    """The publisher, which sends the messages."""

    def has_in_flight(self, goal: Goal, /) -> bool:
        """Return whether messages to ``goal`` await the broker's answer."""
        ...

    def send_again(self, messages: Sequence[Outgoing], /) -> int:
        """Write messages, and return how many: fewer if there is no room for now."""
        ...

    def progressed(self) -> None:
        """Look for room again."""

    def renew(self) -> None:
        """Publish on another channel soon."""


class _Held:
    """The messages to one destination."""

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

    def drop_settled(self) -> None:
        self.refused = [each for each in self.refused if not each[1].settled]
        self.waiting = deque(message for message in self.waiting if not message.settled)

    def messages(self) -> list[Outgoing]:
        return [*(message for _, message in self.refused), *self.waiting]


class Retries:
    """See the module. For the event loop only.

    Attributes:
        held: the destinations with messages that wait.
        count: the number of messages that wait.
    """

    def __init__(self, writer: RetryWriter, channels: PublishChannels, label: str) -> None:
        self.held: dict[Goal, _Held] = {}
        self.count = 0
        self._writer = writer
        self._channels = channels
        self._label = label
        self._logged: set[Goal] = set()

    def refused(self, goal: Goal, number: int, message: Outgoing) -> None:
        """Keep a message that was refused; ``number`` rises in the order of publishing."""
        held = self.held.get(goal)
        if held is None:
            held = self.held[goal] = _Held()
            self._log(goal)
        if held.probe == number:
            held.probe = None
            held.backoff.grow()
            held.probes += 1
            if held.probes > 1 and held.probes.bit_count() == 1:
                self._writer.renew()
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

    def _arm(self, goal: Goal, held: _Held) -> None:
        if held.timer is None:
            held.timer = clock.call_later(asyncio.get_running_loop(), held.backoff.pause, self._probe, goal, held)

    def _probe(self, goal: Goal, held: _Held) -> None:
        """Send the first message, unless others to the same destination are in flight."""
        held.timer = None
        before = len(held.refused) + len(held.waiting)
        held.drop_settled()
        self.count += len(held.refused) + len(held.waiting) - before
        messages = held.messages()
        if held.probe is None and not self._writer.has_in_flight(goal):
            if not messages:
                del self.held[goal]
                self._writer.progressed()
                return
            if self._writer.send_again(messages[:1]) and self.held.get(goal) is held:
                held.probe = self._channels.last_number
                self._sent(held, messages, 1)
        if self.held.get(goal) is held:  # the connection lives
            self._arm(goal, held)
            self._writer.progressed()

    def _send(self, goal: Goal, held: _Held) -> None:
        """Send all messages, as far as there is room."""
        messages = held.messages()
        sent = self._writer.send_again(messages)
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

    def _sent(self, held: _Held, messages: list[Outgoing], count: int) -> None:
        """Keep the messages after the first ``count``. Sent ones that are refused again come before them."""
        self.count -= count
        held.refused.clear()
        held.waiting = deque(messages[count:])


def refuses(overflow: object) -> bool:
    """Return whether a queue with this ``queueOverflow`` refuses messages when it is full."""
    return isinstance(overflow, str) and overflow.startswith("reject-publish")


def topic_pattern(binding: str) -> re.Pattern[str]:
    """Return a pattern of the routing keys, after a dot, that a binding of a topic exchange accepts."""
    words = {"*": r"\.[^.]*", "#": r"(?:\.[^.]*)*"}
    return re.compile("".join(words.get(word, rf"\.{re.escape(word)}") for word in binding.split(".")), re.DOTALL)


class RefusingQueues:
    """The queues declared by this instance that refuse messages when they are full."""

    def __init__(self) -> None:
        self._sources: dict[str, QueueSource] = {}

    def declared(self, source: QueueSource) -> None:
        """Remember a queue if it refuses messages when it is full."""
        arguments = source.queue.arguments
        if refuses(arguments.get("x-overflow")) and (len(self._sources) < _MAX_QUEUES):
            self._sources[f"{source.queue.name}\n{source.exchange.name}\n{source.bindings}"] = source

    def may_take(self, destination: AmqpDestination) -> bool:
        """Return whether a message to ``destination`` may go to one of these queues."""
        return any(_reaches(destination, source) for source in self._sources.values())


def _reaches(destination: AmqpDestination, source: QueueSource) -> bool:
    exchange, key = destination.exchange.name, destination.routing_key
    if not exchange:
        return key == source.queue.name
    if exchange != source.exchange.name:
        return False
    kind = source.exchange.kind
    if kind == "direct":
        return key in source.bindings
    # exchanges of other types than topic may route any message to a queue that is bound to them
    return kind != "topic" or any(topic_pattern(binding).fullmatch(f".{key}") for binding in source.bindings)
