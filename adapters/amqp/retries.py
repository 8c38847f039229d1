"""Messages that the broker refused with ``basic.nack`` for now, and the later messages to their destinations.

RabbitMQ answers ``basic.nack`` when a queue cannot take a message: a quorum queue without leader, say. Such a message
is sent again until its deadline, with the same message id. Until then messages that are published to the same exchange
with the same routing key wait behind it: only messages in flight can overtake it. First one message is
sent, after a delay that grows; once that one is confirmed, the others follow in their order. Other destinations are not
held up.

Messages that wait count as unconfirmed, so the window of the publisher bounds them.
"""

from __future__ import annotations

import asyncio
import bisect
import logging
import operator
from collections import deque
from typing import TYPE_CHECKING, Final, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    from messaging.model import Outgoing

logger = logging.getLogger(__name__)

#: delay of the first attempt, and the longest delay, seconds; each is twice the one before
_FIRST: Final = 0.05
_LONGEST: Final = 1.0
#: destinations that are remembered, to log each once
_TOLD: Final = 1024

#: exchange and routing key
Destination = tuple[str, str]
_number = operator.itemgetter(0)


class Writer(Protocol):
    """The publisher, which sends the messages."""

    @property
    def last_number(self) -> int:
        """The number of the message that was written last."""
        ...

    def is_answered(self, number: int, /) -> bool:
        """Return whether the broker has answered for a message that was written."""
        ...

    def has_in_flight(self, destination: Destination, /) -> bool:
        """Return whether messages to ``destination`` await the broker's answer."""
        ...

    def send_again(self, messages: Sequence[Outgoing], /) -> int:
        """Write messages, and return how many: fewer if there is no room for now."""
        ...

    def progressed(self) -> None:
        """Look for room again."""


class _Held:
    """The messages to one destination."""

    __slots__ = ("delay", "probe", "refused", "timer", "waiting")

    def __init__(self) -> None:
        #: with their numbers in the order of publishing; sent before ``waiting``
        self.refused: list[tuple[int, Outgoing]] = []
        self.waiting: deque[Outgoing] = deque()
        #: number of the message that was sent to find out
        self.probe: int | None = None
        self.delay = _FIRST
        self.timer: asyncio.TimerHandle | None = None

    def drop_settled(self) -> None:
        self.refused = [each for each in self.refused if not each[1].settled]
        self.waiting = deque(message for message in self.waiting if not message.settled)

    def messages(self) -> list[Outgoing]:
        return [*(message for _, message in self.refused), *self.waiting]


class Retries:
    """See the module. On the loop only."""

    def __init__(self, writer: Writer) -> None:
        self._writer = writer
        #: the destinations that messages wait for
        self.held: dict[Destination, _Held] = {}
        #: destinations that were logged
        self._told: set[Destination] = set()
        #: messages that wait here
        self.count = 0

    def refused(self, destination: Destination, number: int, message: Outgoing) -> None:
        """Keep a message that was refused; ``number`` rises in the order of publishing."""
        held = self.held.get(destination)
        if held is None:
            held = self.held[destination] = _Held()
            self._tell(destination)
        if held.probe == number:
            held.probe = None
            held.delay = min(held.delay * 2, _LONGEST)
        if not message.settled:
            self.count += 1
            bisect.insort(held.refused, (number, message), key=_number)
        self._arm(destination, held)

    def _tell(self, destination: Destination) -> None:
        is_told = destination in self._told
        if len(self._told) >= _TOLD:
            self._told.clear()
        self._told.add(destination)
        logger.log(
            logging.DEBUG if is_told else logging.WARNING,
            "the broker takes no messages to exchange %r with routing key %r for now (basic.nack): they are sent again "
            "until their deadlines", *destination,
        )  # fmt: skip

    def wait_behind(self, destination: Destination, message: Outgoing) -> None:
        """Keep a message that was not sent yet."""
        self.held[destination].waiting.append(message)
        self.count += 1

    def look(self) -> None:
        """Send the messages that wait for the answer to another one. Call after each answer."""
        for destination, held in [*self.held.items()]:
            if held.probe is not None and self._writer.is_answered(held.probe):
                held.probe = None
                self._send(destination, held)

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

    def _arm(self, destination: Destination, held: _Held) -> None:
        if held.timer is None:
            held.timer = asyncio.get_running_loop().call_later(held.delay, self._again, destination, held)

    def _again(self, destination: Destination, held: _Held) -> None:
        held.timer = None
        before = len(held.refused) + len(held.waiting)
        held.drop_settled()
        self.count += len(held.refused) + len(held.waiting) - before
        messages = held.messages()
        if held.probe is None and not self._writer.has_in_flight(destination):
            if not messages:
                del self.held[destination]
                self._writer.progressed()
                return
            if self._writer.send_again(messages[:1]) and self.held.get(destination) is held:
                held.probe = self._writer.last_number
                self._sent(held, messages, 1)
        if self.held.get(destination) is held:  # the connection lives
            self._arm(destination, held)
            self._writer.progressed()

    def _send(self, destination: Destination, held: _Held) -> None:
        """Send all, as far as there is room."""
        messages = held.messages()
        sent = self._writer.send_again(messages)
        if self.held.get(destination) is not held:  # the connection ended
            return
        self._sent(held, messages, sent)
        if sent == len(messages):
            if held.timer is not None:
                held.timer.cancel()
            del self.held[destination]
            logger.debug("the broker takes messages to exchange %r with routing key %r again", *destination)
        else:
            held.delay = _FIRST
            self._arm(destination, held)

    def _sent(self, held: _Held, messages: list[Outgoing], count: int) -> None:
        """The first ``count`` messages were sent. If they are refused again, they come before the others again."""
        self.count -= count
        held.refused.clear()
        held.waiting = deque(messages[count:])
