"""Settings, faults and counters of the simulated MQTT broker."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal


@dataclass(slots=True)
class MqttSettings:
    """What the broker allows and announces. The defaults are those of Mosquitto 2.0.

    Attributes:
        max_inflight: unacknowledged QoS 1 and 2 messages to a client that states no Receive Maximum, and the Receive
            Maximum of the broker.
        max_queued: QoS 1 and 2 messages that wait for one session; 0 means unlimited. Unacknowledged messages do not
            count while the client is connected, and do count while it is not.
        max_packet_size: bytes of the largest packet that is accepted; 0 means unlimited.
        max_topic_alias: topic aliases that a client may use.
        max_qos: the highest QoS that is accepted and granted.
        max_unsent: bytes that a client has not taken yet, beyond which it gets no QoS 0 messages; 0 means unlimited.
        has_retained, has_shared: whether retained messages and shared subscriptions are available.
        max_keep_alive: seconds; an MQTT 5 client that asks for more, or for none, is told this one. 0 means no limit.
        connect_timeout: seconds within which CONNECT has to arrive.
        autosave: when sessions and retained messages reach the disk: ``"every change"``, ``"at stop only"``, or the
            number of seconds between two saves.
        saves_shared: whether shared subscriptions are saved. Mosquitto 2.0.11 forgets them when it ends.
        overlapping: how often a client gets a message that matches several of its subscriptions (MQTT 5, 3.3.4).
            ``"mosquitto"``: in MQTT 5 once for each of them; in MQTT 3.1.1 once, with the QoS of the most specific.
            ``"each"``: once for each of them. ``"once"``: once, with the highest QoS and all identifiers.
        retained_to_shared: send retained messages to new shared subscriptions, as Mosquitto 2.0.11 does; MQTT 5, 4.8.2
            says not to.
        says_goodbye: send DISCONNECT to clients of MQTT 5 whose connection another one takes over [MQTT-3.1.4-3], and
            to all of them when the broker stops. Mosquitto 2.0.11 just ends the connections.
        will_at_takeover: publish the will of a connection that another one takes over although the session goes on,
            as MQTT 5, 3.1.4 says. Mosquitto does not.
        redistribute_shared: when a session ends, hand its unacknowledged messages of shared subscriptions to another
            member of the group (MQTT 5, 4.8.2). Mosquitto drops them.
        share_to_connected: a message for a shared subscription goes to a connected member if there is one. Mosquitto
            takes turns without looking.
        authenticate: called with client id, user name and password; whether the client may connect.
        auth_method: authentication method (MQTT 5, 4.12) of one step: its data is checked as a password is, also when
            a client authenticates again. Empty: there is none.
    """

    max_inflight: int = 20
    max_queued: int = 1000
    max_packet_size: int = 0
    max_topic_alias: int = 10
    max_qos: int = 2
    max_unsent: int = 0
    has_retained: bool = True
    has_shared: bool = True
    max_keep_alive: int = 65535
    connect_timeout: float = 90.0
    autosave: Literal["every change", "at stop only"] | float = "every change"
    saves_shared: bool = True
    overlapping: Literal["mosquitto", "each", "once"] = "mosquitto"
    retained_to_shared: bool = False
    says_goodbye: bool = True
    will_at_takeover: bool = False
    redistribute_shared: bool = False
    share_to_connected: bool = False
    authenticate: Callable[[str, str | None, bytes | None], bool] = lambda *_: True
    auth_method: str = ""


@dataclass(slots=True)
class MqttFaults:
    """Faults that the owner of the broker can switch on, and off again, at any time.

    Probabilities are from 0 to 1, of each single case; times are upper limits in seconds, of which a random share is
    taken.

    Attributes:
        ack_delay: probability that a PUBACK, PUBREC, PUBCOMP, SUBACK or UNSUBACK is late. Packets of one type keep
            their order [MQTT-4.6.0-2], [MQTT-4.6.0-3]; packets of different types may overtake each other.
        ack_delay_limit: for how long.
        close_before: probability that the connection is closed instead of an effect and its answer.
        close_after: probability that the connection is closed after the effect, instead of the answer.
        reset_share: share of those closings that are a reset.
        refuse_publish: probability that a PUBLISH of QoS 1 or 2 has no effect and is answered with a reason of
            ``publish_reasons``; MQTT 5 only.
        refuse_subscribe: probability that a topic filter is refused, with a reason of ``subscribe_reasons``; MQTT 3.1.1
            knows 0x80 only.
        downgrade: probability that a topic filter is granted a QoS lower than requested.
        busy: probability that a CONNECT is refused: 0x89, in MQTT 3.1.1 return code 3.
        slow_delivery: probability that a message to a client waits at the broker, and those after it behind it.
        slow_delivery_limit: for how long.
        disconnect: probability that an MQTT 5 client is sent DISCONNECT, with a reason of ``disconnect_reasons``,
            instead of an effect and its answer.
    """

    ack_delay: float = 0.0
    ack_delay_limit: float = 1.0
    close_before: float = 0.0
    close_after: float = 0.0
    reset_share: float = 0.5
    refuse_publish: float = 0.0
    publish_reasons: tuple[int, ...] = (0x97, 0x80)
    refuse_subscribe: float = 0.0
    subscribe_reasons: tuple[int, ...] = (0x80, 0x87)
    downgrade: float = 0.0
    busy: float = 0.0
    slow_delivery: float = 0.0
    slow_delivery_limit: float = 1.0
    disconnect: float = 0.0
    disconnect_reasons: tuple[int, ...] = (0x97, 0x89, 0x98)


@dataclass(slots=True)
class MqttCounters:
    """What happened since the broker was made; ``kill`` and ``start`` do not reset it.

    Attributes:
        connected, refused: CONNECTs that were accepted and refused.
        accepted: messages that were published by clients and wills, each once.
        delivered: PUBLISH packets that were sent.
        resent: those of them with DUP.
        completed: deliveries of QoS 1 and 2 whose handshake was completed.
        dropped: messages that were not delivered, by reason, see ``MqttBroker.on_dropped``.
        wills: wills that were published.
        taken_over: connections that another one replaced.
        expired_sessions: sessions whose expiry interval passed.
        protocol_errors: connections that were closed because of what the client sent.
        timeouts: connections that were closed because the client was silent.
        saves: times that the state was saved.
        faults: injected faults, by the name of the probability.
    """

    connected: int = 0
    refused: int = 0
    accepted: int = 0
    delivered: int = 0
    resent: int = 0
    completed: int = 0
    dropped: dict[str, int] = field(default_factory=dict)
    wills: int = 0
    taken_over: int = 0
    expired_sessions: int = 0
    protocol_errors: int = 0
    timeouts: int = 0
    saves: int = 0
    faults: dict[str, int] = field(default_factory=dict)


#: Called when the broker has taken responsibility for a message: client id of the publisher, topic, payload, QoS.
OnAccepted = Callable[[str, str, bytes, int], object]
#: Called when a PUBLISH is sent: client id of the subscriber, topic, payload, QoS, and whether it is sent again.
OnDelivered = Callable[[str, str, bytes, int, bool], object]
#: Called when a message is not delivered: reason, client id of the subscriber, topic, payload, QoS.
OnDropped = Callable[[str, str, str, bytes, int], object]


def ignore(*_: object) -> None:
    """Stand for a hook that is not set."""
