"""What awaits the broker's answer, and its packet ids: published messages, SUBSCRIBE and UNSUBSCRIBE.

Published messages are a session's, and outlive a connection. Requests are a connection's, and fail with it.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Container
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias

from messaging.errors import ConnectionLostError
from messaging.execution import shielded
from messaging.model import Outgoing
from messaging_adapters.mqtt import handshake, packets
from messaging_adapters.mqtt.handshake import Connack, ConnectTarget
from messaging_adapters.mqtt.packets import ProtocolError

if TYPE_CHECKING:
    from messaging_adapters.mqtt.transport import Transport

logger = logging.getLogger(__name__)

#: 3.1.1: unconfirmed messages at most, and how many of them may have QoS 2
WINDOW: Final = 100
WINDOW_QOS2: Final = 20
#: MQTT 5: most unconfirmed messages, if the broker allows more
WINDOW_V5: Final = 1024
#: smaller windows are refilled at once
_SMALL: Final = 16
_MAX_ID: Final = 65_535
#: first packet id of an instance: half of all ids away from 1, where SUBSCRIBE begins
FIRST_ID: Final = 32_768


def _low(window: int) -> int:
    """Return how many unconfirmed messages a window that was full may hold when it is refilled."""
    return window - 1 if window < _SMALL else window // 2


class PublishHandshake:
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


class InFlightWindow:
    """The unconfirmed messages of a session; see :mod:`.session` for the sizes.

    Attributes:
        handshakes: by packet id, those of the present connection.
        unresumed: handshakes of lost connections that were not resumed yet, oldest first.
        changed: set when a message was confirmed or written, or the connection was lost.
    """

    def __init__(self, v5: bool, max_inflight: int | None) -> None:
        self._v5 = v5
        self._max_inflight = max_inflight
        self._size = self._size_qos2 = 0
        #: it was filled, and has not been half empty since
        self._full = False
        self._qos2 = 0
        self._id = FIRST_ID - 1
        #: packet ids of SUBSCRIBE and UNSUBSCRIBE that the broker has not answered
        self._other_ids: Container[int] = ()
        self.handshakes: dict[int, PublishHandshake] = {}
        self.unresumed: deque[PublishHandshake] = deque()
        self.changed = asyncio.Event()

    def connected(self, connack: Connack, other_ids: Container[int]) -> None:
        """Start on a new connection, with the broker's limits: every handshake is to be resumed.

        Args:
            connack: the broker's limits, and whether it has the session.
            other_ids: packet ids that this connection uses for other packets.
        """
        self._other_ids = other_ids
        limit = self._max_inflight
        if self._v5:
            self._size = self._size_qos2 = min(connack.receive_maximum, limit or WINDOW_V5)
        else:
            self._size = limit or WINDOW
            self._size_qos2 = limit or WINDOW_QOS2
        self._full = False
        self.unresumed.extendleft(reversed(self.handshakes.values()))
        self.handshakes.clear()
        self._qos2 = 0
        if not connack.session_present:
            for handshake in self.unresumed:
                handshake.released = False

    def drop(self) -> list[PublishHandshake]:
        """Forget all handshakes and return them, oldest first."""
        dropped = [*self.handshakes.values(), *self.unresumed]
        self.handshakes.clear()
        self.unresumed.clear()
        return dropped

    def fits(self) -> bool:
        """Return whether the window has room for a handshake."""
        # QoS 1 counts with QoS 2: mosquitto disconnects a client that sends QoS 1 beside its limit of QoS 2
        count, qos2 = len(self.handshakes), self._qos2
        if self._full:
            self._full = count > _low(self._size) or qos2 > _low(self._size_qos2)
        else:
            self._full = count >= self._size or qos2 >= self._size_qos2
        return not self._full

    def begin(self, handshake: PublishHandshake) -> None:
        """Add a handshake, whose packet is about to be sent."""
        self.handshakes[handshake.id] = handshake
        if handshake.qos == 2:
            self._qos2 += 1

    def end(self, handshake: PublishHandshake) -> None:
        """Remove a handshake: it got its last answer."""
        del self.handshakes[handshake.id]
        if handshake.qos == 2:
            self._qos2 -= 1
        self.changed.set()

    def next_id(self) -> int:
        """Return an unused packet id."""
        packet_id = self._id
        while True:
            packet_id = packet_id % _MAX_ID + 1
            if packet_id not in self.handshakes and packet_id not in self._other_ids:
                self._id = packet_id
                return packet_id

    async def free_id(self) -> None:
        """Wait until a packet id is free."""
        while len(self.handshakes) + len(self.unresumed) >= _MAX_ID:
            await self.progress()

    async def progress(self) -> None:
        """Wait until a message was confirmed or written, or the connection was lost."""
        self.changed.clear()
        await self.changed.wait()


class Answer(NamedTuple):
    """The broker's answer to SUBSCRIBE or UNSUBSCRIBE of one filter."""

    code: int
    #: its reason string
    detail: str | None


#: called when an answer is read
_Read: TypeAlias = "Callable[[Answer], object]"


class SubscribeRequests:
    """The requests that the broker has not answered. On the loop.

    Args:
        is_used: returns whether a packet id is in use for a published message.

    Attributes:
        is_open: whether further requests can be made.
        pending: by packet id, which is in use until the answer arrives: its future, and what reads it.
    """

    def __init__(self, target: ConnectTarget, transport: Transport, is_used: Callable[[int], bool]) -> None:
        self._target = target
        self._transport = transport
        self._is_used = is_used
        self._loop = asyncio.get_running_loop()
        self._id = 0
        self.is_open = False
        self.pending: dict[int, tuple[asyncio.Future[Answer], _Read | None]] = {}
        #: by filter: UNSUBSCRIBE
        self._ending: dict[str, asyncio.Future[Answer]] = {}

    def fail_pending(self) -> None:
        """Fail all requests without answer: the connection ended. Idempotent."""
        self.is_open = False
        pending, self.pending = self.pending, {}
        for answer, _ in pending.values():
            if not answer.done():
                answer.set_exception(ConnectionLostError(f"connection to {self._target} lost before it answered"))

    async def subscribe(
        self, topic_filter: str, options: int, identifier: int | None, read: _Read | None = None
    ) -> Answer:
        """Subscribe and return the broker's answer.

        Args:
            topic_filter: what to subscribe to.
            options: made by :func:`.packets.subscribe_options`.
            identifier: MQTT 5: the subscription identifier.
            read: called when the answer is read, before the packets that follow it.

        Raises:
            ConnectionLostError: the connection ended before the answer.
        """
        if not self.is_open:
            raise ConnectionLostError(f"no connection to {self._target}")
        packet_id = self._next_id()
        packet = packets.subscribe(packet_id, topic_filter, options, self._target.settings.v5, identifier)
        return await self._request(packet_id, packet, read)

    async def unsubscribe(
        self, topic_filter: str, read: _Read | None = None, lost: Callable[[], object] | None = None
    ) -> None:
        """Unsubscribe and wait for the answer. Arguments as for :meth:`unsubscribe_soon`.

        Raises:
            ConnectionLostError: the connection ended before the answer.
        """
        request = self.unsubscribe_soon(topic_filter, read, lost)
        if request is None:
            raise ConnectionLostError(f"no connection to {self._target}")
        answer = await shielded(request)
        if answer.code >= packets.FAILURE:
            reason = handshake.reason_name(answer.code, answer.detail)
            logger.warning(
                "%s: the broker refused to end the subscription to %r: %s; messages that still arrive are dropped",
                self._target.component, topic_filter, reason,
            )  # fmt: skip

    def unsubscribe_soon(
        self, topic_filter: str, read: _Read | None = None, lost: Callable[[], object] | None = None
    ) -> asyncio.Future[Answer] | None:
        """Unsubscribe without waiting for the answer; ``None`` without a connection.

        Args:
            topic_filter: what to unsubscribe from.
            read: as for :meth:`subscribe`.
            lost: called when the connection has ended before the answer.
        """
        if not self.is_open:
            if lost is not None:
                lost()
            return None
        packet_id = self._next_id()
        answer = self._request(packet_id, packets.unsubscribe(packet_id, topic_filter, self._target.settings.v5), read)
        self._ending[topic_filter] = answer

        def answered(_: asyncio.Future[Answer]) -> None:
            error = answer.exception()  # its result need not be retrieved
            if isinstance(error, ConnectionLostError) and lost is not None:
                lost()
            if self._ending.get(topic_filter) is answer:
                del self._ending[topic_filter]

        answer.add_done_callback(answered)
        return answer

    async def unsubscribed(self, topic_filter: str) -> None:
        """Wait for the answer to an UNSUBSCRIBE of the filter, if one was sent. Raises as :meth:`subscribe`."""
        answer = self._ending.get(topic_filter)
        if answer is not None:
            await shielded(answer)

    def answered(self, kind: int, body: bytes) -> None:
        """Process a SUBACK or UNSUBACK. May raise ``ProtocolError``."""
        packet_id, codes, detail = packets.parse_answer(body, self._target.settings.v5)
        if kind == packets.SUBACK and len(codes) != 1:
            raise ProtocolError(f"SUBACK with {len(codes)} reason codes for one subscription")
        answer, read = self.pending.pop(packet_id, (None, None))
        if answer is not None and not answer.done():
            told = Answer(codes[0] if codes else 0, self._target.showable(detail))
            if read is not None:
                read(told)
            answer.set_result(told)

    def _next_id(self) -> int:
        for _ in range(_MAX_ID):
            self._id = self._id % _MAX_ID + 1
            if self._id not in self.pending and not self._is_used(self._id):
                return self._id
        raise ConnectionLostError(f"{self._target}: all packet ids are in use")

    def _request(self, packet_id: int, packet: bytes, read: _Read | None) -> asyncio.Future[Answer]:
        answer: asyncio.Future[Answer] = self._loop.create_future()
        # stays there until the broker has answered, also after its caller was cancelled
        self.pending[packet_id] = answer, read
        self._transport.send(packet)
        return answer
