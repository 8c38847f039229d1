"""What arrives: from PUBLISH packets to streams, and from verdicts to acknowledgements.

**QoS 1 and 2.** The first answer to a message, PUBACK or PUBREC, is sent once every stream that got a copy has
settled it. For QoS 2 that is earlier in the exchange than libraries commonly do it (PUBREC at once, PUBCOMP when
done), and on purpose: with PUBREC the broker lets go of the message, so a process that dies with it unprocessed would
lose it. Withheld either way, the message takes a slot of Receive Maximum, or of the broker's own limit: that is the
credit.

**Credit.** A broker may have sent ``receive_maximum`` messages that are not answered. mosquitto 2.0 does not keep to
that: if more wait in its queue, answering one message has it send up to a whole window more. So where it exceeded the
limit, answers wait until fewer messages than that are unsettled, and then go out a few at a time. Which goes first
matters, since mosquitto counts its window from the position of the message that is answered among those it has sent: an
answer to the oldest may bring tens of thousands more; one to a message beyond the window brings none but leaves a slot
that the next message published takes, ahead of all that wait in the queue. The last position in the window brings
exactly one more. So the newest is answered of those that are settled and within the window. That is the oldest
``receive_maximum``; with MQTT 3.1.1, where the broker does not know that limit, the oldest 20, mosquitto's default.

**Sessions.** A broker that resumes a session sends again what it has no answer for, under the same packet id and marked
as duplicate. If this process still holds the message, it is not delivered a second time: its tokens stay valid, and the
answer goes to the new connection, once the broker has sent the message there. If the session is gone, so is every
message in it, and the tokens are stale.

Answers that were lost with a connection bring messages back that are delivered a second time, and answered after that;
those that follow may be settled already. With MQTT 5 that is within the credit. MQTT 3.1.1 has none: the broker's limit
is unknown, and mosquitto lets new messages overtake its queue where a message beyond its limit is answered before
others. So what it sends again is answered in the order in which it does, unless one is not settled for a while.

**Ended streams.** What a stream had not settled when it ended stays unanswered where the broker keeps the session: the
next stream of the same filter gets it, or the session's next connection. If such messages fill the window while other
streams wait for theirs, they are acknowledged and dropped after a while, and a warning says so.

**Nobody's messages.** A resumed session may hold messages for subscriptions of an earlier process. They are kept,
unacknowledged, for those who subscribe within a while, then acknowledged and dropped.
"""

from __future__ import annotations

import asyncio
import bisect
import contextlib
import itertools
import logging
import operator
from collections import OrderedDict, deque
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from adapters.mqtt import packets
from adapters.mqtt.mapping import PACKET_ID
from adapters.mqtt.packets import ProtocolError
from messaging.model import Incoming

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from adapters.mqtt.link import Link
    from adapters.mqtt.mapping import Codec, Decoded
    from adapters.mqtt.packets import Publish
    from adapters.mqtt.router import Router, Stream

logger = logging.getLogger(__name__)

#: pause between answers that nothing prompts, seconds
_PACE: Final = 0.01
#: ``max_inflight_messages``, unless configured
_MOSQUITTOS_WINDOW: Final = 20
#: how long a message that was sent again may keep others like it from being answered, seconds
_ORDER_PATIENCE: Final = 1.0
#: how long messages of ended streams may fill the whole window, seconds
LEFT_PATIENCE: Final = 30.0

_number = operator.attrgetter("number")


class Receipt:
    """A QoS 1 or 2 message that the broker has not been answered, or (``recorded``) only in part."""

    __slots__ = ("copies", "id", "number", "publish", "qos", "recorded", "session", "waits")

    def __init__(self, publish: Publish, session: int, number: int) -> None:
        self.id = publish.id
        self.qos = publish.qos
        self.publish = publish
        self.session = session
        #: those not settled yet
        self.copies = 1
        #: QoS 2: PUBREC was sent, PUBREL is awaited; not if the broker then sent the message again
        self.recorded = False
        #: grows with each that a connection brings, new or again
        self.number = number
        #: answered when those that were sent again before it are
        self.waits = False

    @property
    def is_due(self) -> bool:
        """Settled, and the broker has not been told."""
        return not (self.copies or self.recorded)


class Token:
    """One stream's copy of a message."""

    __slots__ = ("receipt", "stream")

    def __init__(self, receipt: Receipt, stream: Stream) -> None:
        self.receipt = receipt
        self.stream = stream


class Inbound:
    """The receiving half of a session."""

    def __init__(self, router: Router, codec: Codec, v5: bool, limit: int, aliases: int = 0) -> None:
        self._router = router
        self._limit = limit
        self._window = limit if v5 else min(limit, _MOSQUITTOS_WINDOW)
        #: topic aliases the broker may use, and those it did on this connection
        self._alias_maximum = aliases
        self._aliases: dict[int, str] = {}
        self._codec = codec
        self._v5 = v5
        self._link: Link | None = None
        #: read from other threads by ``is_stale``
        self._session = 0
        #: what the broker sent on this connection and has no answer to yet, in its order
        self._receipts: dict[int, Receipt] = {}
        #: what it sent on earlier ones, until it sends it again: an answer would not be understood before
        self._held: dict[int, Receipt] = {}
        self._numbers = itertools.count()
        #: those of both that are not settled
        self._unsettled = 0
        #: once the broker has exceeded the limit: all that are not in the window, in order, by their number
        self._behind: OrderedDict[int, Receipt] = OrderedDict()
        #: of the others those that are settled, and whose answer waits for credit; in order
        self._due: list[Receipt] = []
        self._pacer: asyncio.TimerHandle | None = None
        #: MQTT 3.1.1: what the broker sent again on this connection, in that order, until it is answered
        self._resent: deque[Receipt] = deque()
        self._impatience: asyncio.TimerHandle | None = None
        #: streams with a batch
        self._touched: list[Stream] = []
        #: copies of streams that have ended, kept unanswered for the next stream of the same filter
        self._left: dict[Token, None] = {}
        self._left_timer: asyncio.TimerHandle | None = None
        #: ended streams that the broker has not unsubscribed yet
        self._departing: set[Stream] = set()
        #: by packet id, messages that no stream has claimed yet; ``None`` once streams are not waited for
        self._unclaimed: dict[int, tuple[Publish, Receipt]] | None = None

    # --- connection

    def connected(self, link: Link, session_present: bool, *, wait_for_claims: bool) -> None:
        """A connection was accepted, with the session of the last one or a new one."""
        if not session_present:
            self.forget()
        self._link = link
        self._aliases.clear()
        if wait_for_claims:
            self._unclaimed = {}

    def disconnected(self) -> None:
        """The connection is gone; the session may be resumed."""
        self._link = None
        self._held.update(self._receipts)
        self._receipts.clear()
        self._behind.clear()
        self._due.clear()
        self._forget_order()

    def forget(self) -> None:
        """The session is gone: every token is stale."""
        self._session += 1
        self._receipts.clear()
        self._held.clear()
        self._unsettled = 0
        self._behind.clear()
        self._due.clear()
        self._forget_order()
        self._left.clear()
        self._unclaimed = None

    # --- packets

    def publish(self, head: int, body: bytes) -> None:
        """A PUBLISH packet arrived."""
        publish = packets.parse_publish(head, body, self._v5)
        if publish.properties.alias:
            self._resolve(publish)
        receipt = None
        if publish.qos:
            if publish.dup and self._is_held(publish):
                return
            receipt = self._receive(publish)
            if publish.dup:
                self._keep_order(receipt)
        streams = self._router.receivers(publish)
        if not streams:
            self._keep_or_drop(publish, receipt)
            return
        decoded = self._codec.decode(publish)
        if decoded is None:
            self._settled(receipt)
            return
        self._deliver(publish.topic, decoded, receipt, streams)

    def _resolve(self, publish: Publish) -> None:
        """Replace a topic alias by the topic it stands for, or learn it (MQTT 5, 3.3.2.3.4)."""
        alias = publish.properties.alias
        if alias > self._alias_maximum:
            raise ProtocolError(
                f"topic alias {alias}; at most {self._alias_maximum} were allowed", packets.TOPIC_ALIAS_INVALID
            )
        if publish.topic:
            self._aliases[alias] = publish.topic
        elif alias in self._aliases:
            publish.topic = self._aliases[alias]
        else:
            raise ProtocolError(f"topic alias {alias} stands for nothing yet", packets.TOPIC_ALIAS_INVALID)

    def _receive(self, publish: Publish) -> Receipt:
        forgotten = self._receipts.pop(publish.id, None) or self._held.pop(publish.id, None)  # by the broker
        if forgotten is not None:
            self._behind.pop(forgotten.number, None)
        if forgotten is None or not forgotten.copies:
            self._unsettled += 1
        receipt = Receipt(publish, self._session, next(self._numbers))
        self._line_up(receipt)
        return receipt

    def _find(self, packet_id: int) -> Receipt | None:
        return self._receipts.get(packet_id) or self._held.get(packet_id)

    def _line_up(self, receipt: Receipt) -> None:
        """The broker sent it, after all that it sent before on this connection."""
        self._receipts[receipt.id] = receipt
        if self._behind:
            self._behind[receipt.number] = receipt
        elif len(self._receipts) > self._limit:
            for each in itertools.islice(self._receipts.values(), self._window, None):
                self._behind[each.number] = each

    def _is_held(self, publish: Publish) -> bool:
        """Whether this is known already; then only the answer, if it is due, is sent again."""
        receipt = self._find(publish.id)
        if receipt is None:
            return False
        known = receipt.publish
        if not receipt.recorded and (known.topic != publish.topic or known.payload != publish.payload):
            # a broker that lost part of its memory gave the id to another message
            return False
        if self._held.pop(receipt.id, None) is not None:
            if receipt.recorded:  # the answer was lost
                receipt.recorded, receipt.publish = False, publish
            receipt.number = next(self._numbers)
            self._line_up(receipt)
            self._keep_order(receipt)
        if not receipt.copies and not receipt.waits:
            self._await_credit(receipt)
            self._answer_some()
        return True

    def released(self, body: bytes) -> None:
        """A PUBREL arrived."""
        packet_id, _ = packets.parse_acknowledgement(body)
        self._receipts.pop(packet_id, None)
        self._held.pop(packet_id, None)
        # also for an unknown id: it is what the broker needs to be done with it
        self._send(packets.PUBCOMP, packet_id)
        if self._behind:
            self._move_up()
            self._answer_some()

    def _keep_or_drop(self, publish: Publish, receipt: Receipt | None) -> None:
        if receipt is not None and self._unclaimed is not None and not publish.retain:
            self._unclaimed.pop(receipt.id, None)  # given to another message by the broker
            self._unclaimed[receipt.id] = publish, receipt
            return
        kept = self._router.kept(publish.topic) if receipt is not None else []
        if receipt is not None and not publish.retain:
            kept += [stream for stream in self._departing if stream.settles and stream.route.matches(publish.topic)]
        if receipt is not None and kept:
            receipt.copies = len(kept)
            self._left |= {Token(receipt, stream): None for stream in kept}
            self._watch_left()
            return
        logger.debug("message on %r matches no stream and is dropped", publish.topic)
        self._settled(receipt)

    def _deliver(self, topic: str, decoded: Decoded, receipt: Receipt | None, streams: Sequence[Stream]) -> None:
        payload, content_type, content_encoding, correlation_id, reply_to, extensions = decoded
        copies = 0
        for stream in streams:
            token, told = None, extensions
            if receipt is not None:
                # a stream that asked for QoS 0 has nothing to settle, whatever QoS it shares a subscription with
                if stream.settles:
                    token = Token(receipt, stream)
                    stream.unsettled[token] = None
                    copies += 1
                if stream.tells_id:
                    more = extensions.copy()
                    more[PACKET_ID] = receipt.id
                    told = MappingProxyType(more)
            if not stream.batch:
                self._touched.append(stream)
            stream.batch.append(
                Incoming(payload, topic, None, content_type, content_encoding, correlation_id, reply_to, told, token)
            )
        if receipt is not None:
            receipt.copies = copies
            if not copies:
                self._settled(receipt)

    def hand_over(self) -> None:
        """Call the sinks of all streams something arrived for."""
        touched, self._touched = self._touched, []
        for stream in touched:
            batch, stream.batch = stream.batch, []
            if not stream.ended:
                try:
                    stream.sink.deliver(batch)
                except Exception:  # it must not, and must not cost the others their messages
                    logger.exception("a sink of %r failed", stream.route.filter)

    # --- streams

    def claim(self, stream: Stream) -> None:
        """Give a new stream what was kept for it: to one that settles, since it is answered for all."""
        stream.since = next(self._numbers)
        if not stream.settles:
            return
        for token in [each for each in self._left if each.stream.route.filter == stream.route.filter]:
            del self._left[token]
            self._hand_on(token.receipt, stream)
        self.hand_over()
        if not self._unclaimed:
            return
        kept = {}
        for publish, receipt in self._unclaimed.values():
            if not stream.route.matches(publish.topic):
                kept[receipt.id] = publish, receipt
                continue
            decoded = self._codec.decode(publish)
            if decoded is None:
                self._settled(receipt)
            else:
                self._deliver(publish.topic, decoded, receipt, (stream,))
        self._unclaimed = kept
        self.hand_over()

    def stop_waiting(self) -> None:
        """Drop what nobody has claimed."""
        unclaimed, self._unclaimed = self._unclaimed, None
        if unclaimed:
            logger.warning(
                "%d messages of the resumed session match no subscription and are dropped, the first on %r",
                len(unclaimed), next(iter(unclaimed.values()))[0].topic,
            )  # fmt: skip
            for _, receipt in unclaimed.values():
                self._settled(receipt)

    def release(self, stream: Stream) -> None:
        """A stream has ended: what it did not settle is settled."""
        for token in [*stream.unsettled]:  # in the order of their arrival
            self.settle(token)

    def leave(self, stream: Stream) -> None:
        """Keep what an ended stream did not settle unanswered: the session delivers it to its next consumer."""
        for token in [*stream.unsettled]:
            del stream.unsettled[token]
            self._left[token] = None
        self._watch_left()

    @contextlib.contextmanager
    def departing(self, stream: Stream) -> Iterator[None]:
        """Keep what the broker sends before it has confirmed that ``stream`` is unsubscribed, as ``leave`` does."""
        self._departing.add(stream)
        try:
            yield
        finally:
            self._departing.discard(stream)

    def bequeath(self, stream: Stream, heir: Stream) -> None:
        """Deliver what an ended stream did not settle to ``heir``, unless that has had a copy of its own."""
        for token in [*stream.unsettled]:
            if token.receipt.number < heir.since or heir.route.is_shared:
                del stream.unsettled[token]
                self._hand_on(token.receipt, heir)
            else:
                self.settle(token)
        self.hand_over()

    def _hand_on(self, receipt: Receipt, stream: Stream) -> None:
        """Deliver a message again, in place of an unsettled copy of it."""
        if self._find(receipt.id) is not receipt:
            return
        receipt.publish.dup = True
        decoded = self._codec.decode(receipt.publish)
        copies = receipt.copies
        if decoded is None:  # expired meanwhile
            receipt.copies = copies - 1
            if not receipt.copies:
                self._settled(receipt)
            return
        self._deliver(receipt.publish.topic, decoded, receipt, (stream,))
        receipt.copies = copies

    def _watch_left(self) -> None:
        """Look in a while whether messages of ended streams fill the window, so that nothing else can arrive."""
        self._left = {each: None for each in self._left if self._find(each.receipt.id) is each.receipt}
        if self._left_timer is None and len(self._left) >= self._window:
            self._left_timer = asyncio.get_running_loop().call_later(LEFT_PATIENCE, self._drop_left)

    def _drop_left(self) -> None:
        self._left_timer = None
        kept = sum(not token.stream.route.streams and token.stream.route.is_kept for token in self._left)
        if len(self._left) < self._window or not self._router.settles:
            self._watch_left()
            return
        logger.warning(
            "unacknowledged messages of closed streams fill the window of %d messages: %d are acknowledged and lost, "
            "%d of kept subscriptions stay; subscribe to their channels again, or close the instance",
            self._window, len(self._left) - kept, kept,
        )  # fmt: skip
        for token in [*self._left]:
            if token.stream.route.streams or not token.stream.route.is_kept:
                del self._left[token]
                token.stream.unsettled[token] = None
                self.settle(token)

    # --- verdicts

    def is_stale(self, token: Token) -> bool:
        """See ``Adapter.is_stale``. From any thread."""
        return token.receipt.session != self._session or token.stream.ended

    def settle(self, token: Token) -> None:
        """A stream is done with its copy. Does nothing the second time, or if the session is gone."""
        unsettled = token.stream.unsettled
        if token not in unsettled:
            return
        del unsettled[token]
        receipt = token.receipt
        receipt.copies -= 1
        if not receipt.copies:
            self._settled(receipt)

    def _settled(self, receipt: Receipt | None) -> None:
        if receipt is None or self._find(receipt.id) is not receipt:
            return
        receipt.copies = 0
        self._unsettled -= 1
        if receipt.id not in self._held:  # else it is answered when the broker sends it again, see _is_held
            if receipt.waits:
                self._answer_in_order()
            elif self._behind:
                self._await_credit(receipt)
            else:
                self._answer(receipt)
        if self._due:
            self._answer_some()

    # --- answers in order

    def _keep_order(self, receipt: Receipt) -> None:
        """A message was sent again: it is answered after those that were before it."""
        if self._v5 or not (self._resent or receipt.copies):
            return
        receipt.waits = True
        self._resent.append(receipt)
        if self._impatience is None:
            self._watch_order()

    def _watch_order(self) -> None:
        loop = asyncio.get_running_loop()
        self._impatience = loop.call_later(_ORDER_PATIENCE, self._give_up_order, self._resent[0])

    def _answer_in_order(self) -> None:
        """Answer what was sent again, up to the first that is not settled."""
        resent = self._resent
        while resent and not (resent[0].copies and self._receipts.get(resent[0].id) is resent[0]):
            self._answer_resent(resent.popleft())

    def _answer_resent(self, receipt: Receipt) -> None:
        receipt.waits = False
        if self._receipts.get(receipt.id) is receipt:
            self._await_credit(receipt)
            self._answer_some()

    def _give_up_order(self, head: Receipt) -> None:
        """Whether there was an answer meanwhile. If not, the others do not wait any longer."""
        self._impatience = None
        if self._resent and self._resent[0] is not head:
            self._watch_order()
            return
        resent = [*self._resent]
        self._forget_order()
        for receipt in resent:
            if receipt.is_due:
                self._answer_resent(receipt)

    def _forget_order(self) -> None:
        for receipt in self._resent:
            receipt.waits = False
        self._resent.clear()
        if self._impatience is not None:
            self._impatience.cancel()
            self._impatience = None

    # --- credit

    def _await_credit(self, receipt: Receipt) -> None:
        """A settled message: its answer is due, unless it has to move up first."""
        if not self._behind or receipt.number < next(iter(self._behind)):
            bisect.insort(self._due, receipt, key=_number)

    def _move_up(self) -> None:
        """A message was answered: what was behind may take its place."""
        while self._behind and len(self._receipts) - len(self._behind) < self._window:
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
            self._go_on()

    def _go_on(self) -> None:
        """Answer more soon: there may be no further verdict to do it with."""
        if self._pacer is None and self._due:
            self._pacer = asyncio.get_running_loop().call_later(_PACE, self._pace)

    def _pace(self) -> None:
        self._pacer = None
        for _ in range(min(len(self._due), self._limit - self._unsettled)):
            self._answer(self._due.pop())
        if self._unsettled < self._limit:  # else the next verdict goes on
            self._go_on()

    def answer_all(self) -> None:
        """Answer whatever is settled, credit or not: nothing more is wanted."""
        for receipt in [*self._receipts.values()]:
            if receipt.is_due:
                self._answer(receipt)
        self._due.clear()
        self._forget_order()
        if self._left_timer is not None:
            self._left_timer.cancel()
            self._left_timer = None

    def _answer(self, receipt: Receipt) -> None:
        if self._receipts.get(receipt.id) is not receipt:
            return  # answered meanwhile, because the broker sent it again
        if receipt.qos == 1:
            del self._receipts[receipt.id]
            self._send(packets.PUBACK, receipt.id)
            if self._behind:
                self._move_up()
        else:
            receipt.recorded = True
            receipt.publish.payload = b""
            self._send(packets.PUBREC, receipt.id)

    def _send(self, kind: int, packet_id: int) -> None:
        if self._link is not None:
            self._link.answer(packets.acknowledgement(kind, packet_id))
