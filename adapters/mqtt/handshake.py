"""CONNECT and CONNACK: whom to connect as, what the broker answered, and paho's words for both."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import paho.mqtt.client as mqtt
from paho.mqtt.enums import CallbackAPIVersion
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties as PahoProperties
from paho.mqtt.reasoncodes import ReasonCode
from paho.mqtt.subscribeoptions import SubscribeOptions

from adapters.mqtt import packets
from messaging.errors import AuthenticationError, ConnectFailedError, ConnectionLostError

if TYPE_CHECKING:
    import ssl
    from collections.abc import Callable

    from pydantic import SecretStr

    from adapters.mqtt.websocket import WebSocket
    from adapters.mqtt.wire import Dialer

_CREDENTIALS_REFUSED: Final = ("Bad user name or password", "Not authorized", "Bad authentication method")


@dataclass(frozen=True, slots=True)
class Will:
    """What the broker publishes when this client is lost."""

    topic: str
    payload: bytes
    qos: int
    retain: bool
    properties: packets.Properties
    #: MQTT 5: how long after the loss it is sent at the earliest, seconds
    delay: int = 0


@dataclass(frozen=True, slots=True)
class Target:
    """Where to connect to, and as whom. No secret shows in its repr."""

    host: str
    port: int
    #: makes the TLS context; ``None`` for no TLS
    tls: Callable[[], ssl.SSLContext] | None
    v5: bool
    client_id: str
    username: str | None
    password: SecretStr | None
    #: seconds
    keepalive: int
    connect_timeout: float
    session_expiry: int
    receive_maximum: int
    topic_alias_maximum: int = 0
    #: bytes; ``None`` for what the protocol allows
    maximum_packet_size: int | None = None
    #: makes the WebSocket; ``None`` for none
    web: Callable[[], WebSocket] | None = None

    @property
    def schemes(self) -> tuple[str, str]:
        """The URL schemes of this transport: with TLS, and without."""
        return ("mqtts", "mqtt") if self.web is None else ("wss", "ws")

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    def showable(self, detail: str | None) -> str | None:
        """What the broker added to a reason, unless it holds our password: it may add what it likes."""
        if detail and self.password is not None and self.password.get_secret_value() in detail:
            return None
        return detail


@dataclass(frozen=True, slots=True)
class Connack:
    """What the broker said about itself and the session. The defaults are what its silence means."""

    session_present: bool
    receive_maximum: int = 65_535
    maximum_qos: int = 2
    maximum_packet_size: int = packets.MAX_PACKET
    retain: bool = True
    wildcards: bool = True
    shared: bool = True
    identifiers: bool = True
    topic_alias_maximum: int = 0
    #: seconds, if the broker wants another interval than it was offered
    keepalive: int | None = None
    #: the client id the broker gave to a client without one
    assigned_id: str | None = None


def new_client(target: Target, dialer: Dialer, *, clean_start: bool, will: Will | None) -> mqtt.Client:
    """A paho client that has not connected yet."""
    client = mqtt.Client(
        CallbackAPIVersion.VERSION2,
        client_id=target.client_id,
        clean_session=None if target.v5 else clean_start,
        protocol=mqtt.MQTTv5 if target.v5 else mqtt.MQTTv311,
        # else it answers some refusals by connecting again, blocking, on the thread of the loop
        reconnect_on_failure=False,
    )
    client.connect_timeout = target.connect_timeout
    client.tls_set_context(dialer)  # type: ignore[arg-type]  # it is used for nothing but wrap_socket
    if target.username is not None:
        client.username_pw_set(target.username, target.password.get_secret_value() if target.password else None)
    if will is not None:
        properties = _will_properties(will) if target.v5 else None
        client.will_set(will.topic, will.payload, will.qos, will.retain, properties)
    return client


def dial(client: mqtt.Client, target: Target, dialer: Dialer, *, clean_start: bool) -> None:
    """Connect TCP, TLS and WebSocket, and put CONNECT into the wire's buffer. Blocks.

    Raises:
        OSError, ValueError: it cannot be done.
        ConnectFailedError: a file that TLS needs cannot be used, or the other end takes no WebSocket.
    """
    try:
        if target.tls is not None:
            dialer.tls = target.tls()
        if target.web is not None:
            dialer.web = target.web()
        dialer.largest = target.maximum_packet_size or packets.MAX_PACKET
        if not target.v5:
            client.connect(target.host, target.port, target.keepalive)
            return
        properties = new_properties(PacketTypes.CONNECT)
        properties.ReceiveMaximum = target.receive_maximum
        if target.session_expiry:
            properties.SessionExpiryInterval = target.session_expiry
        if target.topic_alias_maximum:
            properties.TopicAliasMaximum = target.topic_alias_maximum
        if target.maximum_packet_size is not None:
            properties.MaximumPacketSize = target.maximum_packet_size
        client.connect(target.host, target.port, target.keepalive, clean_start=clean_start, properties=properties)
    finally:
        dialer.dialed()


def connack(session_present: bool, properties: PahoProperties | None) -> Connack:
    """What an accepting CONNACK says."""

    def value(name: str, default: int) -> int:
        return int(getattr(properties, name, default))

    return Connack(
        session_present=session_present,
        receive_maximum=value("ReceiveMaximum", 65_535),
        maximum_qos=value("MaximumQoS", 2),
        maximum_packet_size=min(value("MaximumPacketSize", packets.MAX_PACKET), packets.MAX_PACKET),
        retain=bool(value("RetainAvailable", 1)),
        wildcards=bool(value("WildcardSubscriptionAvailable", 1)),
        shared=bool(value("SharedSubscriptionAvailable", 1)),
        identifiers=bool(value("SubscriptionIdentifierAvailable", 1)),
        topic_alias_maximum=value("TopicAliasMaximum", 0),
        keepalive=getattr(properties, "ServerKeepAlive", None),
        assigned_id=getattr(properties, "AssignedClientIdentifier", None),
    )


def refusal(target: Target, reason: str, code: int, properties: PahoProperties | None = None) -> ConnectFailedError:
    """The error for a refusing CONNACK."""
    detail = detail_of(target, properties)
    why = with_detail(reason, detail)
    if reason in _CREDENTIALS_REFUSED:
        what = "a client without user name" if target.username is None else f"the credentials of {target.username!r}"
        return AuthenticationError(f"{target} refused {what}: {why}", code=code, detail=detail)
    text = f"{target} refused the connection: {why}"
    if reason == "Unsupported protocol version":
        text += f"; try version={'3.1.1' if target.v5 else '5'}"
    return ConnectFailedError(text, code=code, detail=detail)


def reason_name(code: int, detail: str | None = None) -> str:
    """What the specification calls the reason code of a failure, and what the broker added.

    Whatever the packet: mosquitto's PUBACK may say Packet too large, which the specification has for others only.
    """
    return with_detail(next(iter(ReasonCode.names.get(code, ())), f"reason code 0x{code:02X}"), detail)


def is_listed(kind: int, code: int) -> bool:
    """Whether the specification has this reason code for packets of that type."""
    return any(kind >> 4 in kinds for kinds in ReasonCode.names.get(code, {}).values())


def unlisted(target: Target, kind: int, code: int) -> ConnectFailedError | ConnectionLostError:
    """The error for a CONNACK, or else a DISCONNECT, with a reason code of the broker's own invention."""
    if kind == packets.CONNACK:
        return refusal(target, reason_name(code), code)
    return ConnectionLostError(f"{target} disconnected this client: {reason_name(code)}", code=code)


def detail_of(target: Target, properties: PahoProperties | None) -> str | None:
    """The reason string of a packet that paho has read, if it can be shown."""
    return target.showable(getattr(properties, "ReasonString", None))


def with_detail(reason: str, detail: str | None) -> str:
    """A reason, and what the broker added."""
    return f"{reason} ({detail})" if detail else reason


def new_properties(kind: int) -> PahoProperties:
    """Properties of packets of a paho type."""
    return PahoProperties(kind)  # type: ignore[no-untyped-call]  # paho left its constructor without types


def subscribe_options(qos: int, *, no_local: bool, as_published: bool, retain_handling: int) -> SubscribeOptions:
    """What SUBSCRIBE asks for beside the filter."""
    return SubscribeOptions(qos, no_local, as_published, retain_handling)


def _will_properties(will: Will) -> PahoProperties:
    given = will.properties
    properties = new_properties(PacketTypes.WILLMESSAGE)
    for name, value in (
        ("ContentType", given.content_type),
        ("ResponseTopic", given.response_topic),
        ("CorrelationData", given.correlation),
        ("MessageExpiryInterval", given.expiry),
        ("UserProperty", given.user or None),
        ("WillDelayInterval", will.delay or None),
    ):
        if value is not None:
            setattr(properties, name, value)
    return properties
