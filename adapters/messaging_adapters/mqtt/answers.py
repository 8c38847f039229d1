"""Answers to received messages of QoS 1 and 2: which are owed, and when each is sent.

**Order.** mosquitto 2.0 counts its window from the position of the answered message among those it has sent. An answer
to the oldest may bring tens of thousands more, if so many wait in its queue, and these are more than its window. An
answer at the last position of the window brings exactly one more. An answer to a message beyond the window brings none,
but leaves a slot that the next published message takes, ahead of all messages in the queue. So the window is the oldest
``receive_maximum`` messages, and answers to others wait until they belong to it. With MQTT 3.1.1 the broker does not
know that limit: there it is the oldest 20, mosquitto's default. The window of another broker may be larger, and its
oldest 20 may be the unsettled messages of one stream. So with 3.1.1 the answers wait while messages move up into the
window, and otherwise for a second.

**Credit.** A broker may have sent ``receive_maximum`` messages that are not answered. Once it has exceeded that limit,
answers wait until fewer messages than that are unsettled, and then go out a few at a time: those to the newest settled
messages within the window first, which bring the fewest.

**Sessions.** A broker that resumes a session sends the unanswered messages again, under the same packet ids and marked
as duplicates. A message that this process still holds is not delivered a second time: its tokens stay valid. Its
answer goes to the new connection once the broker has sent the message there. If the session is lost, all its messages
are lost with it and their tokens are stale.
"""

from __future__ import annotations

import asyncio
import bisect
import itertools
import operator
from collections import OrderedDict
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
#: MQTT 3.1.1: seconds that a window of unsettled messages may hold up the answers to others, and how often it is looked
#: at meanwhile: a process that was suspended is late, and has not had that time
ORDER_TIMEOUT: Final = 1.0
_LOOKS: Final = 4

_number = operator.attrgetter("number")


class Answers:
    """The unanswered messages of a session."""

    def __init__(self, limit: int, v5: bool) -> None:
        #: Receive Maximum
        self._limit = limit
        self._v5 = v5
        #: messages that may be answered: the oldest so many
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
        #: by number: messages of this connection beyond the window
        self._behind: OrderedDict[int, Receipt] = OrderedDict()
        #: by number: settled messages within the window whose answer waits for credit
        self._due: list[Receipt] = []
        self._pacer: asyncio.TimerHandle | None = None
        #: looks whether messages move up into the window
        self._watcher: asyncio.TimerHandle | None = None
        #: none has moved up for long: messages beyond the window are answered until one does
        self._is_stuck = False

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
        self._is_stuck = False
        if self._watcher is not None:
            self._watcher.cancel()
            self._watcher = None

    # --- messages

    def is_owed(self, receipt: Receipt) -> bool:
        """Return whether the broker still awaits an answer to ``receipt``, on this connection or a resumed one."""
        return (self._open.get(receipt.id) or self._held.get(receipt.id)) is receipt

    def receive(self, publish: Publish) -> Receipt:
        """Return the receipt of a new message."""
        # an earlier one with the same packet id was forgotten by the broker
        forgotten = self._forget_id(publish.id)
        if forgotten is None or not forgotten.copies:
            self._unsettled += 1
        receipt = Receipt(publish, self.session, next(self.numbers))
        self._line_up(receipt)
        return receipt

    def _forget_id(self, packet_id: int) -> Receipt | None:
        """Remove a message that the broker has forgotten, and return it."""
        receipt = self._open.pop(packet_id, None) or self._held.pop(packet_id, None)
        if receipt is not None:
            self._behind.pop(receipt.number, None)
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
        if not receipt.copies:
            self._await_turn(receipt)
            self._answer_some()
        return True

    def _line_up(self, receipt: Receipt) -> None:
        """Add the newest message of this connection."""
        self._open[receipt.id] = receipt
        if self._behind or len(self._open) > self.window:
            self._behind[receipt.number] = receipt

    def released(self, body: bytes) -> None:
        """Answer a PUBREL with PUBCOMP, also for an unknown packet id: the broker needs it to free the id."""
        packet_id, _ = packets.parse_acknowledgement(body)
        self._forget_id(packet_id)
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
            if self._behind:
                self._await_turn(receipt)
            else:
                self._answer(receipt)
        if self._due:
            self._answer_some()

    def answer_all(self) -> None:
        """Answer every settled message without regard to credit: no further message is wanted."""
        for receipt in [*self._open.values()]:
            if receipt.is_due:
                self._answer(receipt)
        self._due.clear()

    # --- order

    def _await_turn(self, receipt: Receipt) -> None:
        """Answer a settled message now, or later: it is beyond the window, or there is no credit."""
        if not self._behind or receipt.number < next(iter(self._behind)):
            if len(self._open) <= self._limit:
                self._answer(receipt)
            else:
                bisect.insort(self._due, receipt, key=_number)
        elif self._is_stuck:
            self._answer(receipt)
        elif not self._v5 and self._watcher is None:
            self._watch(0)

    def _move_up(self) -> None:
        """Move messages into the window after one was answered."""
        while self._behind and len(self._open) - len(self._behind) < self.window:
            _, receipt = self._behind.popitem(last=False)
            self._is_stuck = False
            if receipt.is_due:
                self._due.append(receipt)  # the newest within the window

    def _watch(self, looks: int) -> None:
        first = next(iter(self._behind))
        self._watcher = clock.call_later(asyncio.get_running_loop(), ORDER_TIMEOUT / _LOOKS, self._look, first, looks)

    def _look(self, first: int, looks: int) -> None:
        """Answer the settled messages beyond the window, if ``first`` has not moved up for long."""
        self._watcher = None
        waiting = [each for each in self._behind.values() if each.is_due]
        if not waiting:
            return
        looks = looks + 1 if first in self._behind else 0
        if looks < _LOOKS:
            self._watch(looks)
            return
        self._is_stuck = True
        for receipt in waiting:
            self._answer(receipt)

    # --- credit

    def _answer_some(self) -> None:
        """Send the answers that there is credit for."""
        if not self._unsettled or len(self._open) <= self._limit:
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
                self._behind.pop(receipt.number, None)
                self._move_up()
        else:
            receipt.recorded = True
            receipt.publish.payload = b""
            if self._transport is not None:
                self._transport.answer(packets.acknowledgement(packets.PUBREC, receipt.id))
