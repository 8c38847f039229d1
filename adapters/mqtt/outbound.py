"""What is published: windows, packet ids, and the exchanges of QoS 1 and 2.

**Windows.** At most as many QoS 1 and 2 messages are unconfirmed as the broker allows: Receive Maximum of MQTT 5. In
3.1.1 brokers do not tell their limit, and disconnect a client that goes over it: 20 for QoS 2, which is mosquitto's,
and 100 altogether, which is that of the strictest cloud brokers. ``max_inflight`` lowers all of them, and raises
those of 3.1.1.

Once full, a window of some size is filled again when it is half empty: a message for each confirm would cost a system
call, and a turn of both sides' loops, for each message.

**Loss.** If the session may live on, exchanges are kept and finished after the next ``open``: PUBLISH is sent again,
marked as duplicate, or PUBREL, in the old order and before anything new, and never more than the window allows. QoS 2
is exactly once that way. If the broker turns out to have lost the session, they are sent again as new messages. If
the session ends with its connection, they fail with ``ConnectionLostError``, and sending them again is the core's
business: QoS 2 is then at least once, which is all that MQTT can do without a session.

**Deadlines.** A message that the core has settled meanwhile is not sent for the first time. One of QoS 2 that the
broker may have seen is finished nevertheless: its packet id is not free before.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING, Final

from adapters.mqtt import packets
from adapters.mqtt.handshake import reason_name
from messaging.errors import (
    ConnectionLostError,
    MessagingError,
    PayloadTooLargeError,
    PublishRefusedError,
    UnroutableError,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from adapters.mqtt.handshake import Connack, Target
    from adapters.mqtt.link import Link
    from adapters.mqtt.mapping import Codec
    from messaging.model import Outgoing

#: 3.1.1: unconfirmed messages, and those of them with QoS 2
WINDOW: Final = 100
WINDOW_QOS2: Final = 20
#: MQTT 5: most unconfirmed messages, if the broker allows more
WINDOW_V5: Final = 1024
#: bytes that may wait for room in the socket's buffer before publishing pauses
HIGH_WATER: Final = 256 * 1024


#: smaller windows are filled again at once
_SMALL: Final = 16


def _low(window: int) -> int:
    """How many unconfirmed messages are few enough, in a window that was full, to go on."""
    return window - 1 if window < _SMALL else window // 2


class Exchange:
    """A QoS 1 or 2 message between its PUBLISH and the broker's last word."""

    __slots__ = ("id", "outgoing", "payload", "qos", "released")

    def __init__(self, outgoing: Outgoing, qos: int, packet_id: int) -> None:
        self.outgoing = outgoing
        self.qos = qos
        self.id = packet_id
        #: kept here, since the message lets go of it once its deadline has passed
        self.payload = outgoing.payload
        #: QoS 2: PUBREC has come, PUBREL was sent
        self.released = False


class Outbound:
    """The sending half of a session.

    Args:
        codec: makes the packets.
        v5: protocol version.
        max_inflight: the setting.
        target: the broker, for messages of errors.
    """

    def __init__(self, codec: Codec, v5: bool, max_inflight: int | None, target: Target) -> None:
        self._codec = codec
        self._v5 = v5
        self._max_inflight = max_inflight
        self._target = target
        self._link: Link | None = None
        self._connack: Connack | None = None
        self._window = self._window_qos2 = 0
        #: a window was filled, and has not become half empty since
        self._full = False
        self._exchanges: dict[int, Exchange] = {}
        self._qos2 = 0
        #: exchanges of the lost connection that have not been taken up again, oldest first
        self._unresumed: deque[Exchange] = deque()
        self._session_present = False
        # far from where paho begins to count for SUBSCRIBE
        self._id = 32_767
        #: QoS 0 messages in the link's buffer, with the count of bytes at which they have left it
        self._unflushed: deque[tuple[int, Outgoing]] = deque()
        self._changed = asyncio.Event()
        self._is_paused = False

    # --- connection

    def connected(self, link: Link, connack: Connack) -> None:
        """A connection was accepted: take up again what is unfinished."""
        self._link = link
        self._is_paused = False
        self._connack = connack
        self._codec.connected(connack.topic_alias_maximum)
        limit = self._max_inflight
        if self._v5:
            self._window = min(connack.receive_maximum, limit or WINDOW_V5)
            self._window_qos2 = self._window
        else:
            self._window = limit or WINDOW
            self._window_qos2 = limit or WINDOW_QOS2
        self._session_present = connack.session_present
        self._full = False
        self._unresumed.extendleft(reversed(self._exchanges.values()))
        self._exchanges.clear()
        self._qos2 = 0
        if not connack.session_present:
            for exchange in self._unresumed:
                exchange.released = False
        self._resume()

    def disconnected(self, error: ConnectionLostError, *, resumable: bool) -> None:
        """The connection is gone. Without ``resumable`` nothing will come of what was sent."""
        self._link = None
        unflushed, self._unflushed = self._unflushed, deque()
        for _, outgoing in unflushed:
            outgoing.fail(error)
        if not resumable:
            lost = [*self._exchanges.values(), *self._unresumed]
            self._exchanges.clear()
            self._unresumed.clear()
            for exchange in lost:
                exchange.outgoing.fail(error)
        self._changed.set()

    def _resume(self) -> None:
        link = self._link
        while link is not None and self._unresumed and self._fits():
            exchange = self._unresumed.popleft()
            if exchange.outgoing.settled and (exchange.qos == 1 or not self._session_present):
                continue
            self._begin(exchange)
            if exchange.released:
                link.send(packets.acknowledgement(packets.PUBREL, exchange.id))
            else:
                frame = self._codec.frame(exchange.outgoing, exchange.payload, exchange.qos, exchange.id)
                if self._session_present:
                    frame = bytes((frame[0] | packets.DUP,)) + frame[1:]
                link.send(frame)

    # --- publishing

    async def publish(self, batch: Sequence[Outgoing]) -> None:
        """See ``Adapter.publish``."""
        for outgoing in batch:
            qos = int(outgoing.options.qos)
            while True:
                if self._link is not None and self._link.unsent > HIGH_WATER:
                    self._link.flush()  # which may be the end of it
                link = self._link
                if link is None or self._can_send(link, qos):
                    break
                await self.progress()
            if link is None:
                outgoing.fail(ConnectionLostError(f"connection to {self._target} lost before the message was sent"))
            elif not outgoing.settled:
                try:
                    self._send(link, outgoing, qos)
                except MessagingError as error:
                    self._codec.unsent()
                    outgoing.fail(error)

    async def progress(self) -> None:
        """Wait until something was confirmed, flushed or lost."""
        self._changed.clear()
        await self._changed.wait()

    def pause(self) -> None:
        """Send nothing more on this connection."""
        self._is_paused = True

    async def finish(self, seconds: float) -> None:
        """Wait until nothing is unconfirmed, at most ``seconds``."""
        try:
            async with asyncio.timeout(seconds):
                while self._link is not None and (self._exchanges or self._unflushed):
                    await self.progress()
        except TimeoutError:
            pass

    def _fits(self) -> bool:
        # whatever has a packet id counts: mosquitto drops a client that sends QoS 1 beside its limit of QoS 2
        count, qos2 = len(self._exchanges), self._qos2
        if self._full:
            self._full = count > _low(self._window) or qos2 > _low(self._window_qos2)
        else:
            self._full = count >= self._window or qos2 >= self._window_qos2
        return not self._full

    def _can_send(self, link: Link, qos: int) -> bool:
        if self._is_paused or link.unsent > HIGH_WATER:
            return False
        return not qos or (not self._unresumed and self._fits())

    def _send(self, link: Link, outgoing: Outgoing, qos: int) -> None:
        connack = self._connack
        assert connack is not None  # noqa: S101  # there is a link
        if qos > connack.maximum_qos:
            raise PublishRefusedError(f"{self._target} takes no QoS {qos}; at most {connack.maximum_qos}")
        if outgoing.options.retain and not connack.retain:
            raise PublishRefusedError(f"{self._target} retains no messages")
        packet_id = self._next_id(link) if qos else 0
        frame = self._codec.frame(outgoing, outgoing.payload, qos, packet_id)
        if len(frame) > connack.maximum_packet_size:
            size = len(outgoing.payload)
            limit = connack.maximum_packet_size - (len(frame) - size)
            raise PayloadTooLargeError(size, limit, f"{self._target}, with this topic and these properties")
        # from here on it cannot be called back
        outgoing.sent()
        if qos:
            self._begin(Exchange(outgoing, qos, packet_id))
            link.send(frame)
        else:
            self._unflushed.append((link.send(frame), outgoing))

    def _begin(self, exchange: Exchange) -> None:
        self._exchanges[exchange.id] = exchange
        if exchange.qos == 2:
            self._qos2 += 1

    def _next_id(self, link: Link) -> int:
        packet_id = self._id
        while True:
            packet_id = packet_id % 65_535 + 1
            if packet_id not in self._exchanges and packet_id not in link.ids:
                self._id = packet_id
                return packet_id

    def uses(self, packet_id: int) -> bool:
        """Whether an exchange has this packet id."""
        return packet_id in self._exchanges or any(each.id == packet_id for each in self._unresumed)

    # --- what comes back

    def written(self, link: Link) -> None:
        """The link handed bytes to the socket."""
        unflushed, sent = self._unflushed, link.sent
        while unflushed and unflushed[0][0] <= sent:
            unflushed.popleft()[1].confirm()
        self._changed.set()

    def acknowledged(self, kind: int, body: bytes) -> None:
        """A PUBACK, PUBREC or PUBCOMP arrived."""
        packet_id, reason = packets.parse_acknowledgement(body)
        exchange = self._exchanges.get(packet_id)
        if exchange is None or (exchange.qos == 1 and kind != packets.PUBACK):
            if kind == packets.PUBREC and reason < packets.FAILURE and self._link is not None:
                # nothing we know of; with PUBREL the broker is done with it too
                self._link.answer(packets.acknowledgement(packets.PUBREL, packet_id))
            return
        if len(body) > 2 and not exchange.released:
            refusal = self._refusal(exchange, reason, body)
            if refusal is not None:
                exchange.outgoing.fail(refusal)
        if kind == packets.PUBREC and (reason < packets.FAILURE or exchange.released):
            exchange.released = True
            if self._link is not None:
                self._link.answer(packets.acknowledgement(packets.PUBREL, packet_id))
        else:
            # a PUBACK may end QoS 2 too: RabbitMQ makes QoS 1 of it
            self._end(exchange)
            exchange.outgoing.confirm()  # unless it has failed

    def _refusal(self, exchange: Exchange, reason: int, body: bytes) -> PublishRefusedError | None:
        """Why an answer fails its message, if it does. A malformed one does, and is no reason to end the connection."""
        channel = exchange.outgoing.context.channel
        try:
            detail = self._target.showable(packets.reason_string(body))
        except packets.ProtocolError as error:
            detail = str(error)
            if reason < packets.FAILURE:
                return PublishRefusedError(f"{self._target} answered the message on {channel!r} with {detail}")
        if reason < packets.FAILURE:
            if reason != packets.NO_MATCHING_SUBSCRIBERS or not exchange.outgoing.options.mandatory:
                return None
            what = f"nobody subscribes to channel {channel!r} at {self._target}"
            return UnroutableError(what, code=reason, detail=detail)
        return PublishRefusedError(
            f"{self._target} refused the message on {channel!r}: {reason_name(reason, detail)}",
            code=reason,
            detail=detail,
        )

    def _end(self, exchange: Exchange) -> None:
        del self._exchanges[exchange.id]
        if exchange.qos == 2:
            self._qos2 -= 1
        if self._unresumed:
            self._resume()
        self._changed.set()
