"""One connection of a client: the protocol machine between the network and the session."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Final

from tests.simulation.brokers.mqtt import properties as reasons
from tests.simulation.brokers.mqtt.messages import RELEASED, SENT, Message
from tests.simulation.brokers.mqtt.packets import (
    AUTH,
    CONNACK,
    CONNECT,
    DISCONNECT,
    PINGREQ,
    PINGRESP_BYTES,
    PUBACK,
    PUBCOMP,
    PUBLISH,
    PUBREC,
    PUBREL,
    SUBACK,
    SUBSCRIBE,
    UNSUBACK,
    UNSUBSCRIBE,
    V5,
    V311,
    Ack,
    Connack,
    Connect,
    Disconnect,
    Framer,
    Packet,
    Publish,
    Reasons,
    Subscribe,
    Unsubscribe,
    decode,
    decode_ack,
    decode_publish,
    encode,
    encode_ack,
)
from tests.simulation.brokers.mqtt.properties import Properties, Property, ProtocolError
from tests.simulation.brokers.mqtt.topics import is_topic

if TYPE_CHECKING:
    from tests.simulation.brokers.host import Peer, Timer
    from tests.simulation.brokers.mqtt.broker import MqttBroker
    from tests.simulation.brokers.mqtt.session import Session

#: A client may be silent for one and a half times its keep alive [MQTT-3.1.2-22].
_GRACE: Final = 1.5
#: Beginnings of topics that clients cannot publish to.
_RESERVED: Final = ("$SYS", "$share")
#: Packets that have an effect and an answer: the faults close connections instead of these.
_ANSWERED: Final = (CONNECT, PUBREL, SUBSCRIBE, UNSUBSCRIBE, AUTH)


class MqttConnection:
    """The broker's side of one connection. Made by ``MqttBroker.accept``.

    Attributes:
        peer: of the network.
        number: among the connections of the broker.
        session: of the client, once CONNECT was accepted.
        version: protocol level.
        window: how many QoS 1 and 2 messages may be unacknowledged: the client's Receive Maximum.
        max_packet_size: bytes that the client accepts; 0 means unlimited.
        is_open: whether neither side has ended the connection.
        username, secret: what the client has authenticated with last.
    """

    __slots__ = (
        "_acks",
        "_aliases",
        "_delivery_timer",
        "_framer",
        "_has_grace",
        "_heard_at",
        "_method",
        "_silence",
        "_silence_timer",
        "_unanswered",
        "broker",
        "is_open",
        "max_packet_size",
        "number",
        "peer",
        "secret",
        "session",
        "username",
        "version",
        "window",
    )

    def __init__(self, broker: MqttBroker, peer: Peer, number: int) -> None:
        self.broker = broker
        self.peer = peer
        self.number = number
        self.session: Session | None = None
        self.version = V5
        self.window = broker.settings.max_inflight
        self.max_packet_size = 0
        self.is_open = True
        self.username: str | None = None
        self.secret: bytes | None = None
        #: authentication method; ``None`` without one
        self._method: str | None = None
        self._framer = Framer(broker.settings.max_packet_size)
        self._aliases: dict[int, str] = {}
        #: packet identifiers that the client counts against the broker's Receive Maximum
        self._unanswered: dict[int, None] = {}
        #: late answers by packet type; each timer sends the oldest one
        self._acks: dict[int, deque[bytes]] = {}
        self._delivery_timer: Timer | None = None
        self._has_grace = False
        self._heard_at = 0.0
        self._silence = broker.settings.connect_timeout
        self._silence_timer: Timer | None = broker.host.call_later(self._silence, self._check_silence)

    # What the network calls.

    def received(self, data: bytes) -> None:
        """Take bytes from the client, in any fragmentation."""
        if self.is_open:
            self._take(data)

    def _take(self, data: bytes) -> None:
        self._heard_at = self.broker.host.now()
        try:
            for first, body in self._framer.feed(data):
                self._handle(first, body)
                if not self.is_open:
                    return
        except ProtocolError as error:
            self._refuse(error)

    def lost(self) -> None:
        """End the connection: nothing is sent any more, and the will is due."""
        if self.is_open:
            self._end(keep_will=True)

    # What the broker calls.

    def send(self, data: bytes) -> None:
        """Send a packet, unless the connection has ended."""
        if self.is_open:
            self.peer.send(data)

    def disconnect(self, reason: int, keep_will: bool = True) -> None:
        """End the connection, with DISCONNECT in MQTT 5.

        Args:
            reason: for the DISCONNECT.
            keep_will: whether the will is due.
        """
        if self.is_open:
            if self.version == V5 and self.session is not None:
                self.peer.send(encode(Disconnect(reason), V5))
            self.peer.close()
            self._end(keep_will)

    def cut(self, is_reset: bool) -> None:
        """End the connection without a word: by FIN, or by RST."""
        if self.is_open:
            if is_reset:
                self.peer.abort()
            else:
                self.peer.close()
            self._end(keep_will=True)

    def is_slow(self) -> bool:
        """Return whether messages to the client have to wait; see ``MqttFaults.slow_delivery``."""
        if self._delivery_timer is not None:
            return True
        broker = self.broker
        if not broker.faults.slow_delivery:
            return False
        if self._has_grace:  # at least one message after each pause
            self._has_grace = False
            return False
        if not broker.happens("slow_delivery", broker.faults.slow_delivery):
            return False
        delay = broker.host.random.random() * broker.faults.slow_delivery_limit
        self._delivery_timer = broker.host.call_later(delay, self._end_pause)
        return True

    def _end_pause(self) -> None:
        self._delivery_timer = None
        self._has_grace = True
        if self.session is not None:
            self.session.pump()

    def _end(self, keep_will: bool) -> None:
        self.is_open = False
        for timer in (self._silence_timer, self._delivery_timer):
            if timer is not None:
                timer.cancel()
        self._silence_timer = self._delivery_timer = None
        self.broker.detach(self, keep_will)

    def _refuse(self, error: ProtocolError) -> None:
        """End the connection because of what the client sent (MQTT 5, 4.13)."""
        self.broker.counters.protocol_errors += 1
        self.broker.host.note(f"mqtt {self._label()}: {error} ({error.reason:#x})")
        if self.session is None and self.version == V5 and error.reason == reasons.UNSUPPORTED_VERSION:
            self.peer.send(encode(Connack(False, 1), V311))
        self.disconnect(error.reason)

    def _label(self) -> str:
        return self.peer.name if self.session is None else f"{self.peer.name} '{self.session.client_id}'"

    def _check_silence(self) -> None:
        """End the connection if the client was silent for too long; otherwise look again when it may have been."""
        host = self.broker.host
        left = self._heard_at + self._silence - host.now()
        if left > 1e-9:
            self._silence_timer = host.call_later(left, self._check_silence)
            return
        self.broker.counters.timeouts += 1
        host.note(f"mqtt {self._label()}: silent for {self._silence:g} s")
        self.disconnect(reasons.KEEP_ALIVE_TIMEOUT)

    # Answers.

    def _answer(self, kind: int, data: bytes) -> None:
        """Send an answer, now or late, or close the connection instead."""
        broker = self.broker
        faults = broker.faults
        if faults.close_after and broker.happens("close_after", faults.close_after):
            self.cut(broker.chance(faults.reset_share))
            return
        waiting = self._acks.get(kind)
        if waiting is None:
            if not (faults.ack_delay and kind != CONNACK and broker.happens("ack_delay", faults.ack_delay)):
                self._send_answer(kind, data)
                return
            waiting = self._acks[kind] = deque()
        waiting.append(data)
        broker.host.call_later(broker.host.random.random() * faults.ack_delay_limit, lambda: self._send_late(kind))

    def _send_late(self, kind: int) -> None:
        if self.is_open:
            waiting = self._acks[kind]
            self._send_answer(kind, waiting.popleft())
            if not waiting:
                del self._acks[kind]

    def _send_answer(self, kind: int, data: bytes) -> None:
        if kind in (PUBACK, PUBCOMP):
            self._unanswered.pop(data[2] << 8 | data[3], None)
        self.peer.send(data)

    def _is_interrupted(self) -> bool:
        """Close the connection instead of an effect and its answer, if the faults want it so."""
        broker = self.broker
        faults = broker.faults
        if faults.close_before and broker.happens("close_before", faults.close_before):
            self.cut(broker.chance(faults.reset_share))
        elif (
            faults.disconnect
            and self.version == V5
            and self.session is not None
            and broker.happens("disconnect", faults.disconnect)
        ):
            self.disconnect(broker.host.random.choice(faults.disconnect_reasons))
        return not self.is_open

    # Packets of the client.

    def _handle(self, first: int, body: bytes) -> None:
        kind = first >> 4
        session = self.session
        if session is None:
            if kind != CONNECT:
                raise ProtocolError(reasons.PROTOCOL, "the first packet is not CONNECT")  # [MQTT-3.1.0-1]
            packet = decode(first, body, V5)
            assert isinstance(packet, Connect)
            self._connect(packet)
        elif kind == PUBLISH:
            self._publish(session, decode_publish(first, body, self.version))
        elif kind == PINGREQ:
            decode(first, body, self.version)
            self.peer.send(PINGRESP_BYTES)
        elif PUBACK <= kind <= PUBCOMP:
            self._acknowledge(session, decode_ack(first, body, self.version))
        else:
            self._handle_rare(session, decode(first, body, self.version), kind)

    def _handle_rare(self, session: Session, packet: Packet, kind: int) -> None:
        if kind in _ANSWERED and self._is_interrupted():
            return
        if isinstance(packet, Subscribe):
            self._subscribe(session, packet)
        elif isinstance(packet, Unsubscribe):
            found = self.broker.unsubscribe(session, packet)
            self._answer(UNSUBACK, encode(Reasons(UNSUBACK, packet.packet_id, found), self.version))
        elif isinstance(packet, Disconnect) and kind == DISCONNECT:
            self._disconnect(session, packet)
        elif isinstance(packet, Disconnect) and kind == AUTH:
            self._authenticate_again(session, packet)
        else:
            raise ProtocolError(reasons.PROTOCOL, f"packet type {kind} of a client")

    def _authenticate_again(self, session: Session, packet: Disconnect) -> None:
        """Take an AUTH (MQTT 5, 4.12.1)."""
        told = packet.properties
        if self._method is None:
            raise ProtocolError(reasons.PROTOCOL, "AUTH without an authentication method")  # [MQTT-4.12.0-6]
        if packet.reason != reasons.REAUTHENTICATE or told.get(Property.AUTHENTICATION_METHOD) != self._method:
            raise ProtocolError(reasons.PROTOCOL, "AUTH that does not begin anew with the same method")
        secret = told.get(Property.AUTHENTICATION_DATA)
        if not self.broker.settings.authenticate(session.client_id, self.username, secret):
            raise ProtocolError(reasons.NOT_AUTHORIZED, "AUTH is refused")
        self.secret = secret
        self._answer(AUTH, encode(Disconnect(0, {Property.AUTHENTICATION_METHOD: self._method}, AUTH), V5))

    def _connect(self, packet: Connect) -> None:
        self.version = packet.version
        broker = self.broker
        settings = broker.settings
        if self._is_interrupted():
            return
        refusal = broker.refusal(packet)
        if refusal is not None:
            self._refuse_connect(*refusal)
            return
        told: dict[int, object] = {}
        client_id = packet.client_id
        if not client_id:
            client_id = broker.assign_id()
            told[Property.ASSIGNED_CLIENT_ID] = client_id  # [MQTT-3.2.2-16]
        properties = packet.properties
        keep_alive = packet.keep_alive
        if self.version == V5:
            self.window = properties.get(Property.RECEIVE_MAXIMUM, self.window)
            self.max_packet_size = properties.get(Property.MAXIMUM_PACKET_SIZE, 0)
            if settings.max_keep_alive and not 0 < keep_alive <= settings.max_keep_alive:
                keep_alive = told[Property.SERVER_KEEP_ALIVE] = settings.max_keep_alive
            told.update(self._announcement())
            self._method = properties.get(Property.AUTHENTICATION_METHOD)
            if self._method is not None:
                told[Property.AUTHENTICATION_METHOD] = self._method  # [MQTT-4.12.0-5]
        self.username, self.secret = packet.username, packet.password
        if self._method is not None:
            self.secret = properties.get(Property.AUTHENTICATION_DATA)
        self._silence = keep_alive * _GRACE
        if self._silence_timer is not None:
            self._silence_timer.cancel()
            self._silence_timer = broker.host.call_later(self._silence, self._check_silence) if keep_alive else None
        session, is_present = broker.attach(self, packet, client_id)
        self.session = session
        self._answer(CONNACK, encode(Connack(is_present, 0, told), self.version))
        if self.is_open:
            session.resume(self)

    def _announcement(self) -> Properties:
        """Return what CONNACK tells of the broker's limits: only what differs from the default of MQTT 5."""
        settings = self.broker.settings
        every = (
            (Property.TOPIC_ALIAS_MAXIMUM, settings.max_topic_alias, 0),
            (Property.RECEIVE_MAXIMUM, settings.max_inflight, 0xFFFF),
            (Property.MAXIMUM_PACKET_SIZE, settings.max_packet_size, 0),
            (Property.MAXIMUM_QOS, settings.max_qos, 2),
            (Property.RETAIN_AVAILABLE, int(settings.has_retained), 1),
            (Property.SHARED_AVAILABLE, int(settings.has_shared), 1),
        )
        return {number: value for number, value, default in every if value != default}

    def _refuse_connect(self, code_311: int, reason: int) -> None:
        self.broker.counters.refused += 1
        self.broker.host.note(f"mqtt {self.peer.name}: CONNECT refused ({reason:#x})")
        self.peer.send(encode(Connack(False, reason if self.version == V5 else code_311), self.version))
        self.peer.close()
        self._end(keep_will=False)

    def _publish(self, session: Session, packet: Publish) -> None:
        broker = self.broker
        qos = packet.qos
        if qos > broker.settings.max_qos:
            raise ProtocolError(reasons.QOS_NOT_SUPPORTED, f"QoS {qos}")  # [MQTT-3.2.2-11]
        if packet.retain and not broker.settings.has_retained:
            raise ProtocolError(reasons.RETAIN_NOT_SUPPORTED, "RETAIN")  # [MQTT-3.2.2-14]
        if packet.properties:
            self._resolve(packet)
        if not is_topic(packet.topic):
            raise ProtocolError(
                reasons.TOPIC_NOT_VALID if packet.topic else reasons.PROTOCOL, f"topic '{packet.topic}'"
            )
        if packet.topic.startswith(_RESERVED):
            self._deny(packet)
            return
        if not qos:
            broker.publish(Message(session.client_id, packet, broker.host.now()))
            return
        if self._is_interrupted():
            return
        packet_id = packet.packet_id
        if self.version == V5:
            self._unanswered[packet_id] = None
            if len(self._unanswered) > broker.settings.max_inflight:  # [MQTT-3.3.4-8]
                raise ProtocolError(reasons.RECEIVE_MAXIMUM_EXCEEDED, "more messages than the receive maximum")
            if broker.faults.refuse_publish and broker.happens("refuse_publish", broker.faults.refuse_publish):
                self._refuse_publish(session, packet)
                return
        if qos == 1:
            found = broker.publish(Message(session.client_id, packet, broker.host.now()))
            reason = 0 if found else reasons.NO_MATCHING_SUBSCRIBERS
            self._answer(PUBACK, encode_ack(PUBACK, packet_id, self.version, reason))
            return
        known = session.incoming.get(packet_id)
        if known is None or (known.topic, known.payload) != (packet.topic, packet.payload):
            session.incoming[packet_id] = Message(session.client_id, packet, broker.host.now())
            broker.changed()
        self._answer(PUBREC, encode_ack(PUBREC, packet_id, self.version))

    def _deny(self, packet: Publish) -> None:
        """Answer a PUBLISH to a topic of the broker itself; it has no effect."""
        if packet.qos:
            kind = PUBACK if packet.qos == 1 else PUBREC
            self._answer(kind, encode_ack(kind, packet.packet_id, self.version, reasons.NOT_AUTHORIZED))

    def _resolve(self, packet: Publish) -> None:
        """Check the properties of a PUBLISH, and replace a topic alias by its topic (MQTT 5, 3.3.2.3.4)."""
        properties = packet.properties
        if Property.SUBSCRIPTION_IDENTIFIER in properties:  # [MQTT-3.3.4-6]
            raise ProtocolError(reasons.PROTOCOL, "subscription identifier in a PUBLISH of a client")
        response = properties.get(Property.RESPONSE_TOPIC)
        if response is not None and not is_topic(response):  # [MQTT-3.3.2-14]
            raise ProtocolError(reasons.PROTOCOL, f"response topic '{response}'")
        alias = properties.get(Property.TOPIC_ALIAS)
        if alias is None:
            return
        if not 0 < alias <= self.broker.settings.max_topic_alias:  # [MQTT-3.3.2-8], [MQTT-3.3.2-9]
            raise ProtocolError(reasons.TOPIC_ALIAS_NOT_VALID, f"topic alias {alias}")
        if packet.topic:
            self._aliases[alias] = packet.topic
        elif alias in self._aliases:
            packet.topic = self._aliases[alias]
        else:
            raise ProtocolError(reasons.PROTOCOL, f"topic alias {alias} is not set")

    def _refuse_publish(self, session: Session, packet: Publish) -> None:
        kind = PUBACK if packet.qos == 1 else PUBREC
        reason = self.broker.host.random.choice(self.broker.faults.publish_reasons)
        if kind == PUBREC:
            session.incoming.pop(packet.packet_id, None)
            self._unanswered.pop(packet.packet_id, None)
        self._answer(kind, encode_ack(kind, packet.packet_id, V5, reason))

    def _acknowledge(self, session: Session, packet: Ack) -> None:
        packet_id, kind = packet.packet_id, packet.kind
        if kind == PUBREL:
            if self._is_interrupted():
                return
            message = session.incoming.pop(packet_id, None)
            if message is not None:
                self.broker.publish(message)
                self.broker.changed()
            self._answer(PUBCOMP, encode_ack(PUBCOMP, packet_id, self.version))
            return
        outgoing = session.inflight.get(packet_id)
        if kind == PUBREC:
            if outgoing is None:
                self.send(encode_ack(PUBREL, packet_id, self.version))
            elif outgoing.qos != 2:
                raise ProtocolError(reasons.PROTOCOL, f"PUBREC for a message of QoS {outgoing.qos}")
            elif packet.reason >= reasons.UNSPECIFIED and outgoing.state == SENT:
                session.complete(packet_id)
            else:
                outgoing.state = RELEASED
                self.broker.changed()
                self.send(encode_ack(PUBREL, packet_id, self.version))
        elif outgoing is not None:
            expected = (1, SENT) if kind == PUBACK else (2, RELEASED)
            if (outgoing.qos, outgoing.state) != expected:
                raise ProtocolError(reasons.PROTOCOL, f"packet type {kind} for a message of QoS {outgoing.qos}")
            session.complete(packet_id)

    def _subscribe(self, session: Session, packet: Subscribe) -> None:
        granted, retained = self.broker.subscribe(session, packet, self.version)
        self._answer(SUBACK, encode(Reasons(SUBACK, packet.packet_id, granted), self.version))
        for send in retained:
            send()

    def _disconnect(self, session: Session, packet: Disconnect) -> None:
        expiry = packet.properties.get(Property.SESSION_EXPIRY)
        if expiry is not None:
            if expiry and not session.expiry:  # [MQTT-3.1.2-23], 3.14.2.2.2
                raise ProtocolError(reasons.PROTOCOL, "session expiry interval was 0")
            session.expiry = expiry
        self.peer.close()
        self._end(keep_will=packet.reason != 0)  # [MQTT-3.14.4-3]
