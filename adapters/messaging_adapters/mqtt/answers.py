"""Answers to received messages of QoS 1 and 2: which are owed, and when each is sent.

**Credit.** A broker may have sent ``receive_maximum`` messages that are not answered. mosquitto 2.0 exceeds that: if
more wait in its queue, answering one message makes it send up to a whole window more. Once it has exceeded the limit,
answers wait until fewer messages than that are unsettled, and then go out a few at a time.

Their order matters. mosquitto counts its window from the position of the answered message among those it has sent. An
answer to the oldest may bring tens of thousands more. An answer to a message beyond the window brings none, but leaves
a slot that the next published message takes, ahead of all messages in the queue. An answer at the last position of the
window brings exactly one more. So the newest settled message within the window is answered first. The window is the
oldest ``receive_maximum`` messages. With MQTT 3.1.1 the broker does not know that limit: there it is the oldest 20,
mosquitto's default.

**Sessions.** A broker that resumes a session sends the unanswered messages again, under the same packet ids and marked
as duplicates. A message that this process still holds is not delivered a second time: its tokens stay valid. Its
answer goes to the new connection once the broker has sent the message there. If the session is lost, all its messages
are lost with it and their tokens are stale.

**Order after a loss.** If answers were lost with a connection, their messages come again, are delivered a second time
and answered after that, while later messages may be settled already. With MQTT 5 that is within the credit. With MQTT
3.1.1 the broker's limit is unknown, and mosquitto lets new messages overtake its queue where a message beyond its
limit is answered before others. So the messages that it sends again are answered in the order in which it does
(:class:`_ResentOrder`), unless one of them is not settled for a second.
"""

from __future__ import annotations

import asyncio
import bisect
import itertools
import operator
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Final

from messaging.execution import clock
from messaging_adapters.mqtt import packets
from messaging_adapters.mqtt.packets import Publish
from messaging_adapters.mqtt.streams import CopyToken, Receipt

if TYPE_CHECKING:
    from messaging_adapters.mqtt.transport import Transport

#: seconds between answers that no verdict prompts
_PACE: Final = 0.01
#: ``max_inflight_messages`` of mosquitto, unless configured
_MOSQUITTO_WINDOW: Final = 20
#: seconds that an unsettled message may hold up the answers to messages that were sent again after it
ORDER_TIMEOUT: Final = 1.0

_number = operator.attrgetter("number")


class Answers:
    """The unanswered messages of a session."""

    def __init__(self, limit: int, v5: bool) -> None:
        #: Receive Maximum
        self._limit = limit
        #: messages that may be answered once the broker has exceeded the limit: the oldest so many
        self.window = limit if v5 else min(limit, _MOSQUITTO_WINDOW)
        self._transport: Transport | None = None
        #: number of the session; read from other threads
        self.session = 0
        #: by packet id, in the broker's order: messages of this connection
        self._open: dict[int, Receipt] = {}
        #: messages of earlier connections that the broker has not sent again: it would not understand an answer
        self._held: dict[int, Receipt] = {}
        #: of messages and streams, in order of arrival
        self.numbers = itertools.count()
        #: unsettled messages, of both
        self._unsettled = 0
        #: by number: once the broker has exceeded the limit, its messages beyond the window
        self._behind: OrderedDict[int, Receipt] = OrderedDict()
        #: by number: settled messages within the window whose answer waits for credit
        self._due: list[Receipt] = []
        self._pacer: asyncio.TimerHandle | None = None
        self._resent = None if v5 else _ResentOrder(self._open, self._answer_in_turn)

    # --- connection

    def connected(self, transport: Transport) -> None:
        """Send answers through ``transport`` from now on."""
        self._transport = transport

    def disconnected(self) -> None:
        """Hold all unanswered messages until the broker sends them again."""
        self._transport = None
        self._held.update(self._open)
        self._drop_open()

    def forget(self) -> None:
        """Begin a new session: every receipt is stale."""
        self.session += 1
        self._held.clear()
        self._unsettled = 0
        self._drop_open()

    def _drop_open(self) -> None:
        self._open.clear()
        self._behind.clear()
        self._due.clear()
        if self._resent is not None:
            self._resent.clear()

    # --- messages

    def is_owed(self, receipt: Receipt) -> bool:
        """Return whether the broker still awaits an answer to ``receipt``, on this connection or a resumed one."""
        return (self._open.get(receipt.id) or self._held.get(receipt.id)) is receipt

    def receive(self, publish: Publish) -> Receipt:
        """Return the receipt of a new message."""
        # an earlier one with the same packet id was forgotten by the broker
        forgotten = self._open.pop(publish.id, None) or self._held.pop(publish.id, None)
        if forgotten is not None:
            self._behind.pop(forgotten.number, None)
        if forgotten is None or not forgotten.copies:
            self._unsettled += 1
        receipt = Receipt(publish, self.session, next(self.numbers))
        self._line_up(receipt)
        if publish.dup and self._resent is not None:
            self._resent.add(receipt)
        return receipt

    def receive_again(self, publish: Publish) -> bool:
        """Return whether ``publish``, marked as a duplicate, is held already. Then only its answer, if due, is sent."""
        receipt = self._open.get(publish.id) or self._held.get(publish.id)
        if receipt is None:
            return False
        known = receipt.publish
        if not receipt.recorded and (known.topic != publish.topic or known.payload != publish.payload):
            # a broker that lost part of its memory gave the id to another message
            return False
        if self._held.pop(receipt.id, None) is not None:
            if receipt.recorded:  # the PUBREC was lost
                receipt.recorded, receipt.publish = False, publish
            receipt.number = next(self.numbers)
            self._line_up(receipt)
            if self._resent is not None:
                self._resent.add(receipt)
        if not receipt.copies and not receipt.waits:
            self._await_credit(receipt)
            self._answer_some()
        return True

    def _line_up(self, receipt: Receipt) -> None:
        """Add the newest message of this connection."""
        self._open[receipt.id] = receipt
        if self._behind:
            self._behind[receipt.number] = receipt
        elif len(self._open) > self._limit:
            for each in itertools.islice(self._open.values(), self.window, None):
                self._behind[each.number] = each

    def released(self, body: bytes) -> None:
        """Answer a PUBREL with PUBCOMP, also for an unknown packet id: the broker needs it to free the id."""
        packet_id, _ = packets.parse_acknowledgement(body)
        self._open.pop(packet_id, None)
        self._held.pop(packet_id, None)
        if self._transport is not None:
            self._transport.answer(packets.acknowledgement(packets.PUBCOMP, packet_id))
        if self._behind:
            self._move_up()
            self._answer_some()

    # --- verdicts

    def settle(self, token: CopyToken) -> None:
        """Settle a stream's copy. The second time, and after the session is lost, this does nothing."""
        unsettled = token.stream.unsettled
        if token not in unsettled:
            return
        del unsettled[token]
        receipt = token.receipt
        receipt.copies -= 1
        if not receipt.copies:
            self.settled(receipt)

    def settled(self, receipt: Receipt) -> None:
        """Answer a message of which no copy is unsettled, now or when its turn comes."""
        is_open = self._open.get(receipt.id) is receipt
        if not is_open and self._held.get(receipt.id) is not receipt:
            return
        receipt.copies = 0
        self._unsettled -= 1
        if is_open:  # a held one is answered when the broker sends it again, see receive_again
            if receipt.waits and self._resent is not None:
                self._resent.advance()
            elif self._behind:
                self._await_credit(receipt)
            else:
                self._answer(receipt)
        if self._due:
            self._answer_some()

    def pass_over(self, receipt: Receipt) -> None:
        """Have no answer wait for one to ``receipt``, which may be unsettled for long.

        The answers to the others have their positions within the window all the same.
        """
        if receipt.waits and self._resent is not None:
            self._resent.remove(receipt)

    def answer_all(self) -> None:
        """Answer every settled message without regard to credit: no further message is wanted."""
        for receipt in [*self._open.values()]:
            if receipt.is_due:
                self._answer(receipt)
        self._due.clear()
        if self._resent is not None:
            self._resent.clear()

    def _answer_in_turn(self, receipt: Receipt) -> None:
        """Answer a settled message that need not wait for those sent again before it."""
        receipt.waits = False
        if self._open.get(receipt.id) is receipt:
            self._await_credit(receipt)
            self._answer_some()

    # --- credit

    def _await_credit(self, receipt: Receipt) -> None:
        """Note that the answer to a settled message is due, unless the message is beyond the window."""
        if not self._behind or receipt.number < next(iter(self._behind)):
            bisect.insort(self._due, receipt, key=_number)

    def _move_up(self) -> None:
        """Move messages into the window after one was answered."""
        while self._behind and len(self._open) - len(self._behind) < self.window:
            _, receipt = self._behind.popitem(last=False)
            if receipt.is_due and not receipt.waits:
                self._await_credit(receipt)

    def _answer_some(self) -> None:
        """Send the answers that there is credit for."""
        if not self._unsettled or not self._behind:
            while self._due:
                self._answer(self._due.pop())
        elif self._due and self._unsettled < self._limit:
            self._answer(self._due.pop())
            self._continue_later()

    def _continue_later(self) -> None:
        """Answer more soon: there may be no further verdict to prompt it."""
        if self._pacer is None and self._due:
            self._pacer = clock.call_later(asyncio.get_running_loop(), _PACE, self._pace)

    def _pace(self) -> None:
        self._pacer = None
        for _ in range(min(len(self._due), self._limit - self._unsettled)):
            self._answer(self._due.pop())
        if self._unsettled < self._limit:  # else the next verdict goes on
            self._continue_later()

    def _answer(self, receipt: Receipt) -> None:
        if self._open.get(receipt.id) is not receipt:
            return  # answered meanwhile, because the broker sent it again
        if receipt.qos == 1:
            del self._open[receipt.id]
            if self._transport is not None:
                self._transport.answer(packets.acknowledgement(packets.PUBACK, receipt.id))
            if self._behind:
                self._move_up()
        else:
            receipt.recorded = True
            receipt.publish.payload = b""
            if self._transport is not None:
                self._transport.answer(packets.acknowledgement(packets.PUBREC, receipt.id))


class _ResentOrder:
    """MQTT 3.1.1: answers the messages that a broker sends again in the order in which it does."""

    def __init__(self, unanswered: Mapping[int, Receipt], answer: Callable[[Receipt], None]) -> None:
        self._open = unanswered
        self._answer = answer
        self._queue: deque[Receipt] = deque()
        self._timer: asyncio.TimerHandle | None = None

    def add(self, receipt: Receipt) -> None:
        """Answer ``receipt`` after the messages that were added before it."""
        if not (self._queue or receipt.copies):
            return
        receipt.waits = True
        self._queue.append(receipt)
        if self._timer is None:
            self._watch()

    def remove(self, receipt: Receipt) -> None:
        """Answer ``receipt`` out of turn."""
        receipt.waits = False
        self._queue.remove(receipt)
        self.advance()

    def advance(self) -> None:
        """Answer the messages before the first unsettled one."""
        queue = self._queue
        while queue and not (queue[0].copies and self._open.get(queue[0].id) is queue[0]):
            self._answer(queue.popleft())

    def _watch(self) -> None:
        self._timer = clock.call_later(asyncio.get_running_loop(), ORDER_TIMEOUT, self._check, self._queue[0])

    def _check(self, head: Receipt) -> None:
        """Give the order up if ``head`` is still the first: answer all settled messages."""
        self._timer = None
        if self._queue and self._queue[0] is not head:
            self._watch()
            return
        waiting = [*self._queue]
        self.clear()
        for receipt in waiting:
            if receipt.is_due:
                self._answer(receipt)

    def clear(self) -> None:
        """Forget the order."""
        for receipt in self._queue:
            receipt.waits = False
        self._queue.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
