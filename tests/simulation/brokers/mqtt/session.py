"""The session of one client: subscriptions, queue, messages in flight in both directions, and the will."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from tests.simulation.brokers.mqtt.messages import QUEUED, RELEASED, SENT, Message, Outgoing, publish_bytes
from tests.simulation.brokers.mqtt.packets import PUBREL, V5, Will, encode_ack
from tests.simulation.brokers.mqtt.topics import Subscription

if TYPE_CHECKING:
    from tests.simulation.brokers.host import Timer
    from tests.simulation.brokers.mqtt.broker import MqttBroker
    from tests.simulation.brokers.mqtt.connection import MqttConnection

#: A session expiry interval that never passes (MQTT 5, 3.1.2.11.2), in seconds.
NEVER = 0xFFFFFFFF


class Session:
    """What the broker keeps for one client id.

    Attributes:
        version: protocol level of the last connection.
        expiry: session expiry interval in seconds; 0 ends with the connection, ``NEVER`` is unlimited.
        connection: of the client, or ``None``.
        subscriptions: by filter, in the order of subscribing.
        inflight: sent and not yet completed messages by packet identifier, in the order of sending.
        queued: messages that were not sent yet, in order.
        quota: how many more QoS 1 and 2 messages may be sent on this connection (MQTT 5, 4.9).
        incoming: QoS 2 messages of the client that wait for PUBREL, by packet identifier.
        ended_at: virtual time at which the connection ended, or ``None``.
    """

    __slots__ = (
        "_last_id",
        "_reserved",
        "broker",
        "client_id",
        "connection",
        "ended_at",
        "expiry",
        "expiry_timer",
        "incoming",
        "inflight",
        "queued",
        "quota",
        "subscriptions",
        "version",
        "will",
        "will_timer",
    )

    def __init__(self, broker: MqttBroker, client_id: str) -> None:
        self.broker = broker
        self.client_id = client_id
        self.version = V5
        self.expiry = 0
        self.connection: MqttConnection | None = None
        self.subscriptions: dict[str, Subscription] = {}
        self.inflight: dict[int, Outgoing] = {}
        self.queued: deque[Outgoing] = deque()
        self.quota = 0
        self.incoming: dict[int, Message] = {}
        self.ended_at: float | None = None
        self.expiry_timer: Timer | None = None
        self.will: Will | None = None
        self.will_timer: Timer | None = None
        self._last_id = 0
        #: packet identifiers of messages that were sent on an earlier connection and wait to be sent again
        self._reserved: dict[int, None] = {}

    def offer(
        self,
        message: Message,
        qos: int,
        retain: bool = False,
        identifiers: tuple[int, ...] = (),
        shared: Subscription | None = None,
    ) -> bool:
        """Send a message, queue it until the client takes more, or drop it.

        Returns:
            ``False`` if it was dropped: the queue is full, the reader slow, or QoS 0 and offline.
        """
        connection = self.connection
        broker = self.broker
        if connection is None:
            if not qos:
                broker.drop("offline", self.client_id, message, qos)
                return False
        elif not connection.is_slow():
            if not qos:
                limit = broker.settings.max_unsent
                if limit and connection.peer.unsent > limit:
                    broker.drop("slow reader", self.client_id, message, qos)
                    return False
                self._send(connection, message, 0, retain, identifiers, 0, False)
                return True
            if self.quota and not self.queued:
                self._launch(connection, Outgoing(message, qos, retain, identifiers, shared))
                return True
        limit = broker.settings.max_queued
        if limit and len(self.queued) + (len(self.inflight) if connection is None else 0) >= limit:
            broker.drop("queue full", self.client_id, message, qos)
            return False
        self.queued.append(Outgoing(message, qos, retain, identifiers, shared))
        broker.changed()
        return True

    def pump(self) -> None:
        """Send queued messages as far as the client's window allows."""
        connection = self.connection
        queued = self.queued
        while queued and connection is not None and not connection.is_slow():
            outgoing = queued[0]
            if outgoing.qos and not self.quota:
                return
            queued.popleft()
            if outgoing.qos:
                self._launch(connection, outgoing)
            else:
                self._send(connection, outgoing.message, 0, outgoing.retain, outgoing.identifiers, 0, False)
            connection = self.connection

    def _launch(self, connection: MqttConnection, outgoing: Outgoing) -> None:
        """Send a message of QoS 1 or 2, and keep it until the client has acknowledged it."""
        packet_id = outgoing.packet_id
        is_again = packet_id != 0
        if is_again:
            self._reserved.pop(packet_id, None)
        else:
            packet_id = outgoing.packet_id = self._next_id()
        outgoing.state = SENT
        self.broker.changed()
        if self._send(
            connection, outgoing.message, outgoing.qos, outgoing.retain, outgoing.identifiers, packet_id, is_again
        ):
            self.inflight[packet_id] = outgoing
            if self.quota:
                self.quota -= 1

    def _send(
        self,
        connection: MqttConnection,
        message: Message,
        qos: int,
        retain: bool,
        identifiers: tuple[int, ...],
        packet_id: int,
        duplicate: bool,
    ) -> bool:
        """Send a PUBLISH; return ``False`` if the message is dropped: expired, or too large for the client."""
        broker = self.broker
        now = broker.host.now()
        expires_at = message.expires_at
        if expires_at is not None and now >= expires_at:
            broker.drop("expired", self.client_id, message, qos)
            return False
        data = publish_bytes(message, qos, retain, identifiers, packet_id, duplicate, connection.version == V5, now)
        if connection.max_packet_size and len(data) > connection.max_packet_size:
            broker.drop("too large", self.client_id, message, qos)  # [MQTT-3.1.2-25]
            return False
        counters = broker.counters
        counters.delivered += 1
        counters.resent += duplicate
        broker.on_delivered(self.client_id, message.topic, message.payload, qos, duplicate)
        connection.send(data)
        return True

    def _next_id(self) -> int:
        """Return the next packet identifier that is not in use [MQTT-2.2.1-4]."""
        packet_id = self._last_id
        while True:
            packet_id = packet_id % 0xFFFF + 1
            if packet_id not in self.inflight and packet_id not in self._reserved:
                self._last_id = packet_id
                return packet_id

    def complete(self, packet_id: int) -> None:
        """Forget an acknowledged message, and send the next one."""
        del self.inflight[packet_id]
        self.broker.counters.completed += 1
        self.broker.changed()
        connection = self.connection
        if connection is not None:
            if self.quota < connection.window:
                self.quota += 1
            if self.queued:
                self.pump()

    def resume(self, connection: MqttConnection) -> None:
        """Send the unacknowledged messages again [MQTT-4.4.0-1], then the queued ones.

        Messages beyond the window of the new connection wait, with their packet identifiers, in front of the queue.
        """
        beyond: list[Outgoing] = []
        again: list[Outgoing] = []
        for outgoing in self.inflight.values():
            if outgoing.state == RELEASED or len(again) < connection.window:
                again.append(outgoing)
            else:
                beyond.append(outgoing)
        for outgoing in beyond:
            del self.inflight[outgoing.packet_id]
            outgoing.state = QUEUED
            self._reserved[outgoing.packet_id] = None
        self.queued.extendleft(reversed(beyond))
        self.quota = max(connection.window - len(again), 0)
        for outgoing in again:
            if self.connection is not connection:
                return
            if outgoing.state == RELEASED:
                connection.send(encode_ack(PUBREL, outgoing.packet_id, connection.version))
            else:
                message, packet_id = outgoing.message, outgoing.packet_id
                if not self._send(
                    connection, message, outgoing.qos, outgoing.retain, outgoing.identifiers, packet_id, True
                ):
                    del self.inflight[packet_id]
                    self.quota = min(self.quota + 1, connection.window)
        self.pump()

    def forget_zero(self) -> None:
        """Drop QoS 0 messages that wait at the end of a connection."""
        if any(not outgoing.qos for outgoing in self.queued):
            for outgoing in self.queued:
                if not outgoing.qos:
                    self.broker.drop("offline", self.client_id, outgoing.message, 0)
            self.queued = deque(outgoing for outgoing in self.queued if outgoing.qos)

    def discard(self) -> list[Outgoing]:
        """Empty the session; return the messages that are not delivered, in the order of delivery."""
        left = [each for each in self.inflight.values() if each.state != RELEASED]
        left += self.queued
        self.inflight.clear()
        self.queued.clear()
        self.incoming.clear()
        self._reserved.clear()
        return left

    def cancel_timers(self) -> None:
        """Cancel the timers of session expiry and of the will."""
        for timer in (self.expiry_timer, self.will_timer):
            if timer is not None:
                timer.cancel()
        self.expiry_timer = self.will_timer = None

    def saved(self) -> Session:
        """Return a copy for the disk: no connection, no will. Messages are shared, since they never change."""
        copy = Session(self.broker, self.client_id)
        copy.version = self.version
        copy.expiry = self.expiry
        copy.subscriptions = dict(self.subscriptions)
        copy.inflight = {packet_id: outgoing.copy() for packet_id, outgoing in self.inflight.items()}
        copy.queued = deque(outgoing.copy() for outgoing in self.queued if outgoing.qos)
        copy.incoming = dict(self.incoming)
        copy.ended_at = self.ended_at
        copy._reserved = dict(self._reserved)
        return copy
