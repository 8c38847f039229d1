"""Published messages: windows, packet ids, and the handshakes of QoS 1 and 2.

**Windows.** At most as many QoS 1 and 2 messages are unconfirmed as the broker allows: Receive Maximum of MQTT 5. With
3.1.1 brokers do not announce their limit, and disconnect a client that exceeds it. There the window is 20 for QoS 2,
which is mosquitto's limit, and 100 altogether, which is the limit of the strictest cloud brokers. ``max_inflight``
lowers all of them, and raises those of 3.1.1.

A full window of 16 or more is refilled once it is half empty: a message for each confirm would cost a system call and a
turn of both sides' loops for each message.

**Loss.** If the session may live on, handshakes are kept and finished after the next ``open``: PUBLISH, marked as a
duplicate, or PUBREL is sent again, in the old order, before any new message, and never more than the window allows.
QoS 2 is exactly once that way. If the broker has lost the session, they are sent again as new messages. If the session
ends with its connection, they fail with ``ConnectionLostError``, and the core sends them again: QoS 2 is then at least
once, since MQTT can do no more without a session.

**Deadlines.** A message that the core has settled meanwhile is not sent for the first time. One of QoS 2 that the
broker may have received is finished nevertheless: its packet id is in use until then.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING, Final

from messaging.errors import (
    ConnectionLostError,
    MessagingError,
    PayloadTooLargeError,
    PublishRefusedError,
    UnroutableError,
)
from messaging.execution import clock
from messaging_adapters.mqtt import packets
from messaging_adapters.mqtt.handshake import Connack, reason_name

if TYPE_CHECKING:
    from collections.abc import Container, Sequence

    from messaging.model import Outgoing
    from messaging_adapters.mqtt.handshake import Target
    from messaging_adapters.mqtt.mapping import Codec
    from messaging_adapters.mqtt.writing import Writer

#: 3.1.1: unconfirmed messages at most, and how many of them may have QoS 2
WINDOW: Final = 100
WINDOW_QOS2: Final = 20
#: MQTT 5: most unconfirmed messages, if the broker allows more
WINDOW_V5: Final = 1024
#: bytes that may wait for room in the socket's buffer before publishing pauses
HIGH_WATER: Final = 256 * 1024
#: smaller windows are refilled at once
_SMALL: Final = 16
_MAX_ID: Final = 65_535
#: first packet id of an instance: half of all ids away from 1, where paho begins for SUBSCRIBE
FIRST_ID: Final = 32_768


def _low(window: int) -> int:
    """Return how many unconfirmed messages a window that was full may hold when it is refilled."""
    return window - 1 if window < _SMALL else window // 2


class Handshake:
    """A QoS 1 or 2 message between its PUBLISH and the broker's last answer."""

    __slots__ = ("id", "outgoing", "payload", "qos", "released")

    def __init__(self, outgoing: Outgoing, qos: int, packet_id: int) -> None:
        self.outgoing = outgoing
        self.qos = qos
        self.id = packet_id
        #: kept here, since the message drops it once its deadline has passed
        self.payload = outgoing.payload
        #: QoS 2: PUBREC was received and PUBREL sent
        self.released = False


class Outbound:
    """The sending half of a session.

    Args:
        codec: encodes the packets.
        v5: protocol version.
        max_inflight: the setting.
        target: the broker, for error messages.

    Attributes:
        target: replaced when another host is connected to.
    """

    def __init__(self, codec: Codec, v5: bool, max_inflight: int | None, target: Target) -> None:
        self._codec = codec
        self._v5 = v5
        self._max_inflight = max_inflight
        self.target = target
        self._writer: Writer | None = None
        #: packet ids of SUBSCRIBE and UNSUBSCRIBE that the broker has not answered
        self._other_ids: Container[int] = ()
        self._connack = Connack(session_present=False)
        self._window = self._window_qos2 = 0
        #: a window was filled, and has not been half empty since
        self._full = False
        self._handshakes: dict[int, Handshake] = {}
        self._qos2 = 0
        #: handshakes of the lost connection that were not resumed yet, oldest first
        self._unresumed: deque[Handshake] = deque()
        self._session_present = False
        self._id = FIRST_ID - 1
        #: QoS 0 messages in the writer's buffer, with the value of ``Writer.sent`` at which they have left it
        self._unflushed: deque[tuple[int, Outgoing]] = deque()
        self._changed = asyncio.Event()
        self._is_paused = False

    # --- connection

    def connected(self, writer: Writer, other_ids: Container[int], connack: Connack) -> None:
        """Resume unfinished handshakes on a new connection.

        Args:
            writer: sends the packets.
            other_ids: packet ids that this connection uses for other packets.
            connack: the broker's limits.
        """
        self._writer = writer
        self._other_ids = other_ids
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
        self._unresumed.extendleft(reversed(self._handshakes.values()))
        self._handshakes.clear()
        self._qos2 = 0
        if not connack.session_present:
            for handshake in self._unresumed:
                handshake.released = False
        self._resume()

    def disconnected(self, error: ConnectionLostError, *, resumable: bool) -> None:
        """Fail messages of a lost connection; with ``resumable`` those of QoS 0 only."""
        self._writer = None
        unflushed, self._unflushed = self._unflushed, deque()
        for _, outgoing in unflushed:
            outgoing.fail(error)
        if not resumable:
            lost = [*self._handshakes.values(), *self._unresumed]
            self._handshakes.clear()
            self._unresumed.clear()
            for handshake in lost:
                handshake.outgoing.fail(error)
        self._changed.set()

    def _resume(self) -> None:
        writer = self._writer
        while writer is not None and self._unresumed and self._fits():
            handshake = self._unresumed.popleft()
            if handshake.outgoing.settled and (handshake.qos == 1 or not self._session_present):
                continue
            self._begin(handshake)
            if handshake.released:
                writer.send(packets.acknowledgement(packets.PUBREL, handshake.id))
            else:
                frame = self._codec.frame(handshake.outgoing, handshake.payload, handshake.qos, handshake.id)
                if self._session_present:
                    frame = bytes((frame[0] | packets.DUP,)) + frame[1:]
                writer.send(frame)

    # --- publishing

    async def publish(self, batch: Sequence[Outgoing]) -> None:
        """See ``Adapter.publish``."""
        for outgoing in batch:
            qos = int(outgoing.plan.options.qos)
            while True:
                if self._writer is not None and self._writer.unsent > HIGH_WATER:
                    self._writer.flush()  # which may end the connection
                writer = self._writer
                if writer is None or self._can_send(writer, qos):
                    break
                await self.progress()
            if writer is None:
                outgoing.fail(ConnectionLostError(f"connection to {self.target} lost before the message was sent"))
            elif not outgoing.settled:
                try:
                    self._send(writer, outgoing, qos)
                except MessagingError as error:
                    self._codec.unsent()
                    outgoing.fail(error)

    async def progress(self) -> None:
        """Wait until a message was confirmed or flushed, or the connection was lost."""
        self._changed.clear()
        await self._changed.wait()

    def pause(self) -> None:
        """Send no further message on this connection."""
        self._is_paused = True

    async def finish(self, seconds: float) -> None:
        """Pause, and wait until no message is unconfirmed, at most ``seconds``. If it is cancelled, sending goes on."""
        self.pause()
        try:
            async with clock.timeout(seconds):
                while self._writer is not None and (self._handshakes or self._unflushed):
                    await self.progress()
        except TimeoutError:
            pass
        except asyncio.CancelledError:
            self._is_paused = False
            self._changed.set()
            raise

    def _fits(self) -> bool:
        # QoS 1 counts with QoS 2: mosquitto disconnects a client that sends QoS 1 beside its limit of QoS 2
        count, qos2 = len(self._handshakes), self._qos2
        if self._full:
            self._full = count > _low(self._window) or qos2 > _low(self._window_qos2)
        else:
            self._full = count >= self._window or qos2 >= self._window_qos2
        return not self._full

    def _can_send(self, writer: Writer, qos: int) -> bool:
        if self._is_paused or writer.unsent > HIGH_WATER:
            return False
        return not qos or (not self._unresumed and self._fits())

    def _send(self, writer: Writer, outgoing: Outgoing, qos: int) -> None:
        connack = self._connack
        if qos > connack.maximum_qos:
            raise PublishRefusedError(f"{self.target} takes no QoS {qos}; at most {connack.maximum_qos}")
        if outgoing.plan.options.retain and not connack.retain:
            raise PublishRefusedError(f"{self.target} retains no messages")
        packet_id = self._next_id() if qos else 0
        frame = self._codec.frame(outgoing, outgoing.payload, qos, packet_id)
        if len(frame) > connack.maximum_packet_size:
            size = len(outgoing.payload)
            limit = connack.maximum_packet_size - (len(frame) - size)
            raise PayloadTooLargeError(size, limit, f"{self.target}, with this topic and these properties")
        # from here on it cannot be cancelled
        outgoing.sent()
        if qos:
            self._begin(Handshake(outgoing, qos, packet_id))
            writer.send(frame)
        else:
            self._unflushed.append((writer.send(frame), outgoing))

    def _begin(self, handshake: Handshake) -> None:
        self._handshakes[handshake.id] = handshake
        if handshake.qos == 2:
            self._qos2 += 1

    def _next_id(self) -> int:
        packet_id = self._id
        while True:
            packet_id = packet_id % 65_535 + 1
            if packet_id not in self._handshakes and packet_id not in self._other_ids:
                self._id = packet_id
                return packet_id

    def uses(self, packet_id: int) -> bool:
        """Return whether a handshake has this packet id."""
        return packet_id in self._handshakes or any(each.id == packet_id for each in self._unresumed)

    async def free_id(self) -> None:
        """Wait until a packet id is free."""
        while len(self._handshakes) + len(self._unresumed) >= _MAX_ID:
            await self.progress()

    # --- answers

    def written(self, writer: Writer) -> None:
        """Confirm the QoS 0 messages that were handed to the socket."""
        unflushed, sent = self._unflushed, writer.sent
        while unflushed and unflushed[0][0] <= sent:
            unflushed.popleft()[1].confirm()
        self._changed.set()

    def acknowledged(self, kind: int, body: bytes) -> None:
        """Process a PUBACK, PUBREC or PUBCOMP."""
        packet_id, reason = packets.parse_acknowledgement(body)
        handshake = self._handshakes.get(packet_id)
        if handshake is None or (handshake.qos == 1 and kind != packets.PUBACK):
            if kind == packets.PUBREC and reason < packets.FAILURE and self._writer is not None:
                # of an unknown message: with PUBREL the broker forgets it, too
                self._writer.answer(packets.acknowledgement(packets.PUBREL, packet_id))
            return
        if len(body) > 2 and not handshake.released:
            refusal = self._refusal(handshake, reason, body)
            if refusal is not None:
                handshake.outgoing.fail(refusal)
        if kind == packets.PUBREC and (reason < packets.FAILURE or handshake.released):
            handshake.released = True
            if self._writer is not None:
                self._writer.answer(packets.acknowledgement(packets.PUBREL, packet_id))
        else:
            # a PUBACK may end QoS 2, too: RabbitMQ downgrades it to QoS 1
            self._end(handshake)
            handshake.outgoing.confirm()  # unless it has failed

    def _refusal(self, handshake: Handshake, reason: int, body: bytes) -> PublishRefusedError | None:
        """Return the error of a message whose answer refuses it, or is malformed; the connection goes on."""
        channel = handshake.outgoing.plan.channel
        try:
            detail = self.target.showable(packets.reason_string(body))
        except packets.ProtocolError as error:
            detail = str(error)
            if reason < packets.FAILURE:
                return PublishRefusedError(f"{self.target} answered the message on {channel!r} with {detail}")
        if reason < packets.FAILURE:
            if reason != packets.NO_MATCHING_SUBSCRIBERS or not handshake.outgoing.plan.options.mandatory:
                return None
            text = f"channel {channel!r} has no subscribers at {self.target}"
            return UnroutableError(text, code=reason, detail=detail)
        return PublishRefusedError(
            f"{self.target} refused the message on {channel!r}: {reason_name(reason, detail)}",
            code=reason,
            detail=detail,
        )

    def _end(self, handshake: Handshake) -> None:
        del self._handshakes[handshake.id]
        if handshake.qos == 2:
            self._qos2 -= 1
        if self._unresumed:
            self._resume()
        self._changed.set()
