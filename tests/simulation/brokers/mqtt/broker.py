"""The simulated MQTT broker: sessions, routing, retained messages, wills, and its life from start to stop.

Speaks MQTT 3.1.1 and 5 at the level of bytes. It does no input or output: see :mod:`tests.simulation.brokers.host`.
Where the specifications leave a choice it does what Mosquitto 2.0 does; :class:`MqttSettings` names the other choices.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from tests.simulation.brokers.mqtt import properties as reasons
from tests.simulation.brokers.mqtt.connection import MqttConnection
from tests.simulation.brokers.mqtt.messages import Message
from tests.simulation.brokers.mqtt.packets import V5, Connect, Request, Subscribe, Unsubscribe, Will
from tests.simulation.brokers.mqtt.persistence import Disk
from tests.simulation.brokers.mqtt.properties import Property, ProtocolError
from tests.simulation.brokers.mqtt.retained import Retained
from tests.simulation.brokers.mqtt.router import Router
from tests.simulation.brokers.mqtt.session import NEVER, Session
from tests.simulation.brokers.mqtt.settings import (
    MqttCounters,
    MqttFaults,
    MqttSettings,
    OnAccepted,
    OnDelivered,
    OnDropped,
    ignore,
)
from tests.simulation.brokers.mqtt.topics import (
    Subscription,
    is_filter,
    is_topic,
    split_shared,
)

if TYPE_CHECKING:
    from tests.simulation.brokers.host import Host, Peer, Timer


class MqttBroker:
    """A broker for MQTT 3.1.1 and 5. Sans-I/O, deterministic, called from one thread.

    It runs when it is made.

    Args:
        host: time and chance.
        settings: limits and choices; may be shared by brokers.
        faults: switched on and off by their owner, also while the broker runs.

    Attributes:
        counters: what happened so far.
        sessions: by client id, in the order of the last CONNECT.
        retained: retained messages.
        connections: that are open, by number, in the order of accepting.
        router: all subscriptions.
        is_running: between start and stop.
        on_accepted: called for each message that a client or a will has published, once: with QoS 2 when PUBREL
            releases it.
        on_delivered: called for each PUBLISH that is sent.
        on_dropped: called for each message that a client is not sent, or that it did not acknowledge and is not sent
            again. Reasons: ``"offline"`` (QoS 0, the client is not connected), ``"queue full"``, ``"expired"``,
            ``"too large"``, ``"slow reader"`` (QoS 0), ``"session ended"``. What a kill takes back is not reported.
    """

    def __init__(self, host: Host, settings: MqttSettings | None = None, faults: MqttFaults | None = None) -> None:
        self.host = host
        self.settings = settings or MqttSettings()
        self.faults = faults or MqttFaults()
        self.counters = MqttCounters()
        self.sessions: dict[str, Session] = {}
        self.retained = Retained()
        self.connections: dict[int, MqttConnection] = {}
        self.router = Router(self.settings)
        self.is_running = True
        self.on_accepted: OnAccepted = ignore
        self.on_delivered: OnDelivered = ignore
        self.on_dropped: OnDropped = ignore
        self._disk = Disk()
        self._save_timer: Timer | None = None
        self._save_interval = 0.0 if isinstance(self.settings.autosave, str) else self.settings.autosave
        self._accepted = 0
        self._assigned = 0

    # Life.

    def accept(self, peer: Peer) -> MqttConnection:
        """Return the connection that takes what ``peer`` sends. A broker that does not run resets it."""
        self._accepted += 1
        connection = self.connections[self._accepted] = MqttConnection(self, peer, self._accepted)
        if not self.is_running:
            connection.cut(is_reset=True)
        return connection

    def stop(self) -> None:
        """Stop in good order: publish the wills of all clients, save everything, end all connections.

        Mosquitto publishes wills when it stops, also those with a delay. Nothing happens if the broker does not run.
        """
        if not self.is_running:
            return
        for session in list(self.sessions.values()):
            self._publish_will(session)
        for connection in list(self.connections.values()):
            self._dismiss(connection, reasons.SHUTTING_DOWN)
        self._save()
        self._halt()
        self.host.note("mqtt broker: stopped")

    def kill(self) -> None:
        """Stop as by SIGKILL: go back to the last save, reset all connections, forget all wills.

        Nothing happens if the broker does not run.
        """
        if not self.is_running:
            return
        if self.settings.autosave == "every change":
            self._save()
        self.is_running = False  # the ends of connections have no effect any more
        for connection in list(self.connections.values()):
            connection.cut(is_reset=True)
        self._halt()
        self.host.note("mqtt broker: killed")

    def forget(self) -> None:
        """Lose everything that was saved. Only while the broker does not run."""
        self._disk = Disk()

    def start(self) -> None:
        """Start from the last saved state. Nothing happens if the broker runs."""
        if self.is_running:
            return
        self.is_running = True
        self._disk.load(self)
        self.host.note(f"mqtt broker: started with {len(self.sessions)} sessions")

    def _halt(self) -> None:
        self.is_running = False
        if self._save_timer is not None:
            self._save_timer.cancel()
            self._save_timer = None
        for session in self.sessions.values():
            session.cancel_timers()
        self.sessions = {}
        self.retained = Retained()
        self.router = Router(self.settings)

    def _save(self) -> None:
        self._save_timer = None
        self.counters.saves += 1
        self._disk.save(self)

    def changed(self) -> None:
        """Note a change of what a save writes. Saves happen at multiples of the interval, if there were changes."""
        if self._save_interval and self._save_timer is None:
            interval = self._save_interval
            self._save_timer = self.host.call_later(interval - self.host.now() % interval, self._save)

    # Chance.

    def chance(self, probability: float) -> bool:
        """Return ``True`` with this probability."""
        return self.host.random.random() < probability

    def happens(self, fault: str, probability: float) -> bool:
        """Return whether a fault happens; count and note it."""
        if self.host.random.random() >= probability:
            return False
        self.host.note(f"mqtt broker: fault {fault}")
        self.counters.faults[fault] = self.counters.faults.get(fault, 0) + 1
        return True

    # Connections.

    def drop_connection(self, client_id: str, reason: int | None = None, is_reset: bool = False) -> bool:
        """End the connection of a client; return whether it had one.

        Args:
            client_id: of the client.
            reason: for DISCONNECT in MQTT 5; ``None`` ends the connection without a word.
            is_reset: by RST, if there is no reason.
        """
        session = self.sessions.get(client_id)
        connection = session.connection if session is not None else None
        if connection is None:
            return False
        if reason is None:
            connection.cut(is_reset)
        else:
            connection.disconnect(reason)
        return True

    def refusal(self, packet: Connect) -> tuple[int, int] | None:
        """Return why a CONNECT is refused: the code of MQTT 3.1.1 and that of MQTT 5; ``None`` if it is not.

        Raises:
            ProtocolError: the will breaks the protocol.
        """
        will = packet.will
        if will is not None and not is_topic(will.topic):
            raise ProtocolError(reasons.TOPIC_NOT_VALID, f"will topic '{will.topic}'")
        if self.faults.busy and self.happens("busy", self.faults.busy):
            return 3, reasons.SERVER_BUSY
        method = packet.properties.get(Property.AUTHENTICATION_METHOD)
        if method is not None and method != self.settings.auth_method:
            return 5, reasons.BAD_AUTHENTICATION_METHOD  # [MQTT-4.12.0-1]
        if packet.version != V5 and not packet.client_id and not packet.is_clean:
            return 2, reasons.CLIENT_ID_NOT_VALID  # [MQTT-3.1.3-8] of 3.1.1
        if will is not None and will.qos > self.settings.max_qos:
            return 5, reasons.QOS_NOT_SUPPORTED
        if will is not None and will.retain and not self.settings.has_retained:
            return 5, reasons.RETAIN_NOT_SUPPORTED
        secret = packet.password if method is None else packet.properties.get(Property.AUTHENTICATION_DATA)
        if not self.settings.authenticate(packet.client_id, packet.username, secret):
            return 5, reasons.NOT_AUTHORIZED
        return None

    def assign_id(self) -> str:
        """Return a client id that no other client was assigned."""
        self._assigned += 1
        return f"assigned-{self._assigned}"

    def attach(self, connection: MqttConnection, packet: Connect, client_id: str) -> tuple[Session, bool]:
        """Give a connection its session (MQTT 5, 3.1.2.4); end the connection that has it (3.1.4).

        Returns:
            The session, and whether it was there before.
        """
        self.counters.connected += 1
        session = self.sessions.get(client_id)
        goes_on = session is not None and not packet.is_clean and session.expiry > 0
        if session is not None:
            if packet.is_clean:
                self._remove_subscriptions(session)
            is_delayed = session.will is not None and session.will.properties.get(Property.WILL_DELAY, 0)
            if session.connection is not None:
                self.counters.taken_over += 1
                if not goes_on and not packet.is_clean:
                    self._publish_will(session)  # the old connection may still get it, as with Mosquitto
                elif goes_on and (is_delayed or not self.settings.will_at_takeover):
                    session.will = None
                self._dismiss(session.connection, reasons.TAKEN_OVER)
            if goes_on:
                session.will = None  # [MQTT-3.1.3-9]
                session.cancel_timers()
            else:
                self._end_session(session)
        if session is None or not goes_on:
            session = Session(self, client_id)
        self.sessions.pop(client_id, None)  # so that the order is that of the last CONNECT
        self.sessions[client_id] = session
        session.version = packet.version
        if packet.version == V5:
            session.expiry = packet.properties.get(Property.SESSION_EXPIRY, 0)
        else:
            session.expiry = 0 if packet.is_clean else NEVER
        session.will = packet.will
        session.ended_at = None
        session.connection = connection
        self.changed()
        self.host.note(f"mqtt {connection.peer.name}: '{client_id}' connected, session {'kept' if goes_on else 'new'}")
        return session, goes_on

    def _dismiss(self, connection: MqttConnection, reason: int) -> None:
        """End a connection on the broker's own account."""
        if self.settings.says_goodbye:
            connection.disconnect(reason)
        else:
            connection.cut(is_reset=False)

    def detach(self, connection: MqttConnection, keep_will: bool) -> None:
        """Take note of the end of a connection: the will, and the end of the session, are due now or later."""
        self.connections.pop(connection.number, None)
        session = connection.session
        if session is None or session.connection is not connection or not self.is_running:
            return
        session.connection = None
        session.ended_at = self.host.now()
        session.forget_zero()
        if not keep_will:
            session.will = None
        delay = 0 if session.will is None else session.will.properties.get(Property.WILL_DELAY, 0)
        self.changed()
        if not session.expiry:
            self._end_session(session)
            return
        if not delay:
            self._publish_will(session)
        elif session.will is not None:
            session.will_timer = self.host.call_later(delay, lambda: self._publish_will(session))
        if session.expiry != NEVER:
            self.expire_later(session, session.expiry)

    def expire_later(self, session: Session, delay: float) -> None:
        """End a session without a connection in ``delay`` seconds (MQTT 5, 3.1.2.11.2)."""

        def expire() -> None:
            self.counters.expired_sessions += 1
            self._end_session(session)

        session.expiry_timer = self.host.call_later(max(delay, 0.0), expire)

    def _end_session(self, session: Session) -> None:
        """Publish the will, if it is still to come, and forget the session [MQTT-3.1.2-23], [MQTT-3.1.2-8]."""
        self._publish_will(session)  # with the session's own subscriptions still there, as Mosquitto does
        session.cancel_timers()
        if self.sessions.get(session.client_id) is session:
            del self.sessions[session.client_id]
        self._remove_subscriptions(session)
        for outgoing in session.discard():
            if not (self.settings.redistribute_shared and self.router.redistribute(outgoing)):
                self.drop("session ended", session.client_id, outgoing.message, outgoing.qos)
        self.changed()

    def _remove_subscriptions(self, session: Session) -> None:
        for subscription in session.subscriptions.values():
            self.router.remove(subscription)
        session.subscriptions.clear()

    def _publish_will(self, session: Session) -> None:
        will, session.will = session.will, None
        if session.will_timer is not None:
            session.will_timer.cancel()
            session.will_timer = None
        if will is not None:
            self.counters.wills += 1
            self.host.note(f"mqtt '{session.client_id}': will on '{will.topic}'")
            self.publish(Message(session.client_id, will, self.host.now()))

    # Messages.

    def drop(self, reason: str, client_id: str, message: Message, qos: int) -> None:
        """Count a message that a client does not get, and report it."""
        dropped = self.counters.dropped
        dropped[reason] = dropped.get(reason, 0) + 1
        self.on_dropped(reason, client_id, message.topic, message.payload, qos)

    def publish(self, message: Message) -> bool:
        """Retain a message if it says so, and give it to all subscribers; return whether there are any."""
        self.counters.accepted += 1
        topic = message.topic
        self.on_accepted(message.source, topic, message.payload, message.qos)
        if message.retain:
            if message.payload:
                self.retained.put(message)
            else:
                self.retained.discard(topic)  # [MQTT-3.3.1-6]
            self.changed()
        return self.router.deliver(message)

    # Subscriptions.

    def subscribe(
        self, session: Session, packet: Subscribe, version: int
    ) -> tuple[list[int], list[Callable[[], None]]]:
        """Add the subscriptions of a SUBSCRIBE.

        Returns:
            The reason codes for SUBACK, and calls that send the retained messages after it.

        Raises:
            ProtocolError: a topic filter is malformed, or a shared subscription has No Local.
        """
        for request in packet.requests:
            if not is_filter(request.filter):
                raise ProtocolError(reasons.FILTER_NOT_VALID, f"topic filter '{request.filter}'")
            if request.no_local and split_shared(request.filter)[0] is not None:  # [MQTT-3.8.3-4]
                raise ProtocolError(reasons.PROTOCOL, "No Local on a shared subscription")
        identifier = packet.properties.get(Property.SUBSCRIPTION_IDENTIFIER)
        identifiers = () if identifier is None else (identifier,)
        granted: list[int] = []
        retained: list[Callable[[], None]] = []
        for request in packet.requests:
            reason = self._refuse_subscribe(request, version)
            if reason is None:
                reason = self._granted_qos(request)
                is_new = request.filter not in session.subscriptions
                subscription = Subscription(
                    session, request.filter, reason, request.no_local, request.retain_as_published, identifiers
                )
                session.subscriptions[request.filter] = subscription
                self.router.add(subscription)
                is_wanted = request.retain_handling == 0 or (request.retain_handling == 1 and is_new)
                if is_wanted and (subscription.group is None or self.settings.retained_to_shared):
                    retained.append(partial(self._send_retained, subscription))
            granted.append(reason)
        self.changed()
        return granted, retained

    def _refuse_subscribe(self, request: Request, version: int) -> int | None:
        """Return the reason code with which a topic filter is refused, or ``None``."""
        faults = self.faults
        if not self.settings.has_shared and split_shared(request.filter)[0] is not None:
            return reasons.SHARED_NOT_SUPPORTED if version == V5 else reasons.UNSPECIFIED
        if faults.refuse_subscribe and self.happens("refuse_subscribe", faults.refuse_subscribe):
            reason = self.host.random.choice(faults.subscribe_reasons)
            return reason if version == V5 else reasons.UNSPECIFIED
        return None

    def _granted_qos(self, request: Request) -> int:
        qos = min(request.qos, self.settings.max_qos)
        if qos and self.faults.downgrade and self.happens("downgrade", self.faults.downgrade):
            qos = self.host.random.randrange(qos)
        return qos

    def _send_retained(self, subscription: Subscription) -> None:
        """Send the retained messages that match a new subscription, the client's own ones included [MQTT-3.3.1-9]."""
        session = subscription.session
        now = self.host.now()
        for message in self.retained.match(subscription.topic_filter):
            if message.is_expired(now):
                self.retained.discard(message.topic)
            else:
                session.offer(message, min(message.qos, subscription.qos), True, subscription.identifiers)

    def unsubscribe(self, session: Session, packet: Unsubscribe) -> list[int]:
        """Remove the subscriptions of an UNSUBSCRIBE; return the reason codes for UNSUBACK.

        Raises:
            ProtocolError: a topic filter is malformed.
        """
        for name in packet.filters:
            if not is_filter(name):
                raise ProtocolError(reasons.FILTER_NOT_VALID, f"topic filter '{name}'")
        found: list[int] = []
        for name in packet.filters:
            subscription = session.subscriptions.pop(name, None)
            if subscription is not None:
                self.router.remove(subscription)
            found.append(reasons.NO_SUBSCRIPTION_EXISTED if subscription is None else reasons.SUCCESS)
        self.changed()
        return found

    # What is at rest.

    def describe(self) -> dict[str, Any]:
        """Return what the broker holds, as plain data: to check that nothing is left over."""
        return {
            "sessions": {client_id: _describe(session) for client_id, session in self.sessions.items()},
            "connections": [connection.peer.name for connection in self.connections.values()],
            "retained": {message.topic: len(message.payload) for message in self.retained},
        }


def _describe(session: Session) -> dict[str, Any]:
    will: Will | None = session.will
    return {
        "connection": None if session.connection is None else session.connection.peer.name,
        "expiry": session.expiry,
        "subscriptions": {name: each.qos for name, each in session.subscriptions.items()},
        "queued": len(session.queued),
        "inflight": len(session.inflight),
        "incoming": len(session.incoming),
        "will": None if will is None else will.topic,
    }
