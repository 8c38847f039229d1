"""The in-flight window: QoS 1 and 2 messages between their PUBLISH and the broker's last answer, and packet ids."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Container

    from messaging.model import Outgoing
    from messaging_adapters.mqtt.handshake import Connack

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
