"""The MQTT handshake: CONNECT and the will, CONNACK and DISCONNECT of the broker, and what it grants. No I/O.

Properties and names of reason codes are paho's.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote

from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties as PahoProperties
from paho.mqtt.reasoncodes import ReasonCode

from messaging.codecs.cache import BoundedCache
from messaging.connection.proxies import Proxy, parse_proxy
from messaging.connection.tls import ClientTls
from messaging.errors import (
    AuthenticationError,
    BrokerError,
    ConnectFailedError,
    ConnectionLostError,
    CredentialsError,
    MissingExtraError,
    RedirectedError,
    TakenOverError,
)
from messaging.model import BrokerUrl, Endpoint, Host
from messaging.model.credentials import Credentials
from messaging_adapters.mqtt import packets
from messaging_adapters.mqtt import settings as options
from messaging_adapters.mqtt.settings import MqttSettings

if TYPE_CHECKING:
    from pydantic import SecretStr


logger = logging.getLogger(__name__)

#: empty properties for a packet type of paho, whose properties have no types
_new_properties: Callable[[int], Any] = PahoProperties
#: return codes of a refusing CONNACK of MQTT 3.1.1 -> the reason codes that mean the same
_RETURN_CODES: Final = {1: 0x84, 2: 0x85, 3: 0x88, 4: 0x86, 5: 0x87}
#: characters of a reference to other servers that an error shows
_SHOWN: Final = 200
_CREDENTIALS_REFUSED: Final = ("Bad user name or password", "Not authorized", "Bad authentication method")
#: A broker counts a client as lost after this many intervals of silence (MQTT-3.1.2-22).
_SILENT_INTERVALS: Final = 1.5


@dataclass(frozen=True, slots=True)
class Will:
    """The message that the broker publishes when this client is lost."""

    topic: str
    payload: bytes
    qos: int
    retain: bool
    properties: packets.PacketProperties
    #: MQTT 5: seconds between the loss and the will, at least
    delay: int = 0


@dataclass(frozen=True, slots=True)
class ConnectTarget:
    """The broker's address and the fields of CONNECT, except the will. Its repr shows no secret."""

    host: str
    port: int
    #: of the instance, for log lines
    name: str
    settings: MqttSettings = field(repr=False)
    client_id: str
    username: str | None
    password: SecretStr | None
    #: ``None`` for no TLS
    tls: ClientTls | None = None
    #: connected through; ``None`` for none
    proxy: Proxy | None = None
    #: of the WebSocket's URL, percent-encoded, with its slash; ``None`` for no WebSocket
    web_path: str | None = None
    #: the latest passwords of an instance whose credentials change; shared by all its targets
    secrets: deque[SecretStr] = field(default_factory=lambda: deque(maxlen=4), repr=False, compare=False)
    #: the IP address to connect to, if the name of the host has several; TLS verifies the name
    address: str | None = None

    @property
    def component(self) -> str:
        """The beginning of log lines."""
        return f"mqtt '{self.name}' ({self})"

    @property
    def schemes(self) -> tuple[str, str]:
        """The URL schemes of this transport: with TLS, and without."""
        return ("mqtts", "mqtt") if self.web_path is None else ("wss", "ws")

    def __str__(self) -> str:
        return str(Endpoint(Host(self.host, self.port), self.address))

    def at(self, endpoint: Endpoint, default_port: int | None) -> ConnectTarget:
        """Return the same target at another host or address. Schemes of subclasses may have no default port."""
        host = endpoint.host
        return replace(self, host=host.name, port=host.port or default_port or self.port, address=endpoint.address)

    def logged_in(self, credentials: Credentials, username: str | None) -> ConnectTarget:
        """Return the same target with these credentials, and with ``username`` if they have none.

        Raises:
            CredentialsError: there is no user name, and no authentication method.
        """
        if credentials.username is not None:
            username = credentials.username
        if username is None and self.settings.auth_method is None:
            raise CredentialsError(
                "the credentials have no user name: return one with the password, or set the option 'username'"
            )
        self.secrets.append(credentials.password)
        return replace(self, username=username, password=credentials.password)

    def showable(self, detail: str | None) -> str | None:
        """Return the broker's text, or ``None`` if it contains a password: the broker may send any text."""
        passwords = (*self.secrets, *filter(None, (self.password,)))
        return None if detail and any(each.get_secret_value() in detail for each in passwords) else detail


#: properties of CONNACK -> fields of :class:`Connack`
_GRANTED: Final = {
    "ReceiveMaximum": "receive_maximum",
    "MaximumQoS": "maximum_qos",
    "MaximumPacketSize": "maximum_packet_size",
    "RetainAvailable": "retain",
    "WildcardSubscriptionAvailable": "wildcards",
    "SharedSubscriptionAvailable": "shared",
    "SubscriptionIdentifierAvailable": "identifiers",
    "TopicAliasMaximum": "topic_alias_maximum",
    "ServerKeepAlive": "keepalive",
    "SessionExpiryInterval": "session_expiry",
    "AssignedClientIdentifier": "assigned_id",
}


@dataclass(frozen=True, slots=True)
class Connack:
    """The broker's limits and the state of the session. The defaults apply where the broker names none."""

    session_present: bool
    receive_maximum: int = 65_535
    maximum_qos: int = 2
    maximum_packet_size: int = packets.MAX_PACKET
    retain: bool = True
    wildcards: bool = True
    shared: bool = True
    identifiers: bool = True
    topic_alias_maximum: int = 0
    #: seconds; ``None`` if the broker accepts the offered interval
    keepalive: int | None = None
    #: seconds; ``None`` if the broker keeps the session for as long as was asked for
    session_expiry: int | None = None
    #: the client id the broker gave to a client without one
    assigned_id: str | None = None


def target_of(url: BrokerUrl, settings: MqttSettings, name: str) -> ConnectTarget:
    """Return where to connect to, and as which client."""
    username, password = options.credentials(url, settings)
    path = None
    if url.scheme in options.WEB:
        try:
            import websockets.client  # noqa: F401  # here, not on the loop
        except ImportError as error:
            raise MissingExtraError("ws", f"{url.scheme}://") from error
        path = "/" + quote(url.path or options.WEB_PATH)
    return ConnectTarget(
        host=url.host,
        port=url.port or options.PORTS[url.scheme],
        name=name,
        settings=settings,
        client_id=options.client_id(settings, name),
        username=username,
        password=password,
        tls=ClientTls(settings, url.label(name)) if url.scheme in options.SECURE else None,
        proxy=parse_proxy(settings.proxy),
        web_path=path,
    )


def connect_packet(target: ConnectTarget, *, clean_start: bool, will: Will | None) -> bytes:
    """Return CONNECT. No local variable holds the password: an error report may show variables.

    Raises:
        ValueError: the user name or the password is too long.
    """
    settings, username = target.settings, target.username
    # with an authentication method the password is its data
    password = target.password if settings.auth_method is None and username is not None else None
    if username is not None and len(username.encode()) > packets.MAX_TEXT:
        raise ValueError(f"the user name has more than {packets.MAX_TEXT:,} bytes in UTF-8")
    if password is not None and len(password.get_secret_value().encode()) > packets.MAX_TEXT:
        raise ValueError(f"the password has more than {packets.MAX_TEXT:,} bytes in UTF-8")
    flags = clean_start << 1 | (username is not None) << 7 | (password is not None) << 6
    if will is not None:
        flags |= 4 | will.qos << 3 | will.retain << 5
    head = packets.text("MQTT") + bytes((5 if settings.v5 else 4, flags)) + settings.keepalive.to_bytes(2, "big")
    return packets.framed(
        packets.CONNECT,
        b"".join(
            (
                head,
                _connect_properties(target) if settings.v5 else b"",
                packets.text(target.client_id),
                b"" if will is None else _packed_will(will, settings.v5),
                b"" if username is None else packets.text(username),
                b"" if password is None else packets.text(password.get_secret_value()),
            )
        ),
    )


def _connect_properties(target: ConnectTarget) -> bytes:
    settings, properties = target.settings, _new_properties(PacketTypes.CONNECT)
    properties.ReceiveMaximum = settings.receive_maximum
    if settings.connect_expiry:
        properties.SessionExpiryInterval = settings.connect_expiry
    if settings.topic_alias_maximum:
        properties.TopicAliasMaximum = settings.topic_alias_maximum
    if settings.max_packet_size is not None:
        properties.MaximumPacketSize = settings.max_packet_size
    if settings.auth_method is not None and target.password is not None:
        properties.AuthenticationMethod = settings.auth_method
        properties.AuthenticationData = target.password.get_secret_value().encode()
    return bytes(properties.pack())


def _packed_will(will: Will, v5: bool) -> bytes:
    properties = packets.properties_bytes(will.properties, will.delay)
    packed = packets.varint(len(properties)) + properties if v5 else b""
    return packed + packets.text(will.topic) + packets.binary(will.payload)


def read(target: ConnectTarget, head: int, body: bytes) -> Connack | BrokerError:
    """Read a CONNACK or DISCONNECT. Return the accepting CONNACK, or the reason why the connection ends.

    Raises:
        ProtocolError: it is another packet.
    """
    kind = head & 0xF0
    if kind not in (packets.CONNACK, packets.DISCONNECT):
        raise packets.ProtocolError(f"a packet of type {kind >> 4}, which is not for clients")
    try:
        return _read_connack(target, body) if kind == packets.CONNACK else _read_disconnect(target, body)
    except Exception as error:  # noqa: BLE001  # of paho, too, over a packet that it does not expect
        lost = ConnectionLostError(f"{target} connection lost: Protocol error")
        lost.__cause__ = error
        return lost


def _read_connack(target: ConnectTarget, body: bytes) -> Connack | BrokerError:
    v5, code, properties = target.settings.v5, body[1], _new_properties(PacketTypes.CONNACK)
    if not v5 and len(body) != 2:
        raise ValueError("CONNACK of MQTT 3.1.1 has two bytes")
    if not v5 or code == 1:  # also of a broker that does not know MQTT 5
        code = code and _RETURN_CODES.get(code, packets.FAILURE)
    elif not _is_unlisted(PacketTypes.CONNACK, code):
        properties.unpack(body[2:])
    if code >= packets.FAILURE:
        return _refusal(target, reason_name(code), code, properties)
    ReasonCode(PacketTypes.CONNACK, identifier=code)  # raises unless it is specified

    granted = {field: getattr(properties, name) for name, field in _GRANTED.items() if hasattr(properties, name)}
    granted["maximum_packet_size"] = min(granted.get("maximum_packet_size", packets.MAX_PACKET), packets.MAX_PACKET)
    return Connack(bool(body[0] & 1), **granted)


def _refusal(target: ConnectTarget, reason: str, code: int, properties: Any) -> BrokerError:
    """Return the error for a refusing CONNACK."""
    detail = target.showable(getattr(properties, "ReasonString", None))
    why = _with_detail(reason, detail)
    redirect = _redirected(target, f"{target} refused the connection: {why}", code, properties)
    if redirect is not None:
        return redirect
    if reason in _CREDENTIALS_REFUSED:
        what = "a client without user name" if target.username is None else f"the credentials of {target.username!r}"
        return AuthenticationError(f"{target} refused {what}: {why}", code=code, detail=detail)
    text = f"{target} refused the connection: {why}"
    if reason == "Unsupported protocol version":
        text += f"; try version={'3.1.1' if target.settings.v5 else '5'}"
    return ConnectFailedError(text, code=code, detail=detail)


def _read_disconnect(target: ConnectTarget, body: bytes) -> BrokerError:
    if not target.settings.v5:
        raise ValueError("MQTT 3.1.1 has no DISCONNECT of the broker")
    code, properties = body[0] if body else 0, _new_properties(PacketTypes.DISCONNECT)
    if _is_unlisted(PacketTypes.DISCONNECT, code):
        return ConnectionLostError(f"{target} disconnected this client: {reason_name(code)}", code=code)
    reason = str(ReasonCode(PacketTypes.DISCONNECT, identifier=code))
    if len(body) > 1:
        properties.unpack(body[1:])
    detail = target.showable(getattr(properties, "ReasonString", None))
    text = f"{target} disconnected this client: {_with_detail(reason, detail)}"
    kind = TakenOverError if code == packets.SESSION_TAKEN_OVER else ConnectionLostError
    return _redirected(target, text, code, properties) or kind(text, code=code, detail=detail)


def _redirected(target: ConnectTarget, what: str, code: int, properties: Any) -> RedirectedError | None:
    """Return the error for a CONNACK or DISCONNECT that refers to other servers (MQTT 5, 4.11); ``None`` for others.

    ``what`` is the beginning of its text.
    """
    reference = target.showable(getattr(properties, "ServerReference", None))
    is_redirect = code in (packets.USE_ANOTHER_SERVER, packets.SERVER_MOVED)
    if not is_redirect or not reference or not target.settings.follow_redirects:
        return None
    return RedirectedError(
        f"{what}: {reference[:_SHOWN]}",
        servers=tuple(reference.split()),
        is_permanent=code == packets.SERVER_MOVED,
        code=code,
        detail=target.showable(getattr(properties, "ReasonString", None)),
    )


def reason_name(code: int, detail: str | None = None) -> str:
    """Return the specification's name for the reason code of a failure, and the broker's text.

    The type of packet does not matter: mosquitto's PUBACK may say Packet too large, which is not specified for PUBACK.
    """
    return _with_detail(next(iter(ReasonCode.names.get(code, ())), f"reason code 0x{code:02X}"), detail)


def _is_unlisted(packet_type: int, code: int) -> bool:
    """Return whether a reason code is a failure that the specification does not list for this type of packet."""
    return code >= packets.FAILURE and not any(
        packet_type in types for types in ReasonCode.names.get(code, {}).values()
    )


def _with_detail(reason: str, detail: str | None) -> str:
    """Return a reason with the broker's text."""
    return f"{reason} ({detail})" if detail else reason


def agreed_keepalive(asked: int, granted: int | None) -> int:
    """Return the interval of pings, seconds: the broker's may shorten the one asked for, but not lengthen it.

    A client may send pings at any time (MQTT 5, 3.1.2.10), so this side notices a lost broker as early as it was
    asked to.
    """
    if granted is None:
        return asked
    return min(asked, granted) if asked and granted else asked or granted


class Grants:
    """Compares the answers of the brokers of one instance with what it asked for. On the loop.

    A guarantee that is lost is an error: a session that the broker does not keep, a subscription with acknowledgement
    that it makes without. Less of the same is a warning, given once by an instance for each case.
    """

    def __init__(self) -> None:
        self._warned: BoundedCache[str, bool] = BoundedCache()

    def _warn(self, target: ConnectTarget, text: str) -> None:
        key = f"{target} {text}"
        if key not in self._warned:
            self._warned[key] = True
            logger.warning("%s: %s", target.component, text)

    def connected(self, target: ConnectTarget, connack: Connack, *, needs_session: bool) -> ConnectFailedError | None:
        """Compare a CONNACK. Return the error for a guarantee that the broker does not give.

        Args:
            target: what CONNECT asked for.
            connack: what the broker granted.
            needs_session: whether the user asked for a session that outlives the connection.
        """
        asked, granted = target.settings.connect_expiry, connack.session_expiry
        if granted is not None and not granted and needs_session:
            return ConnectFailedError(
                f"{target} keeps no session: it grants a session expiry of 0 s, and {asked} s were asked for; have the "
                "broker allow sessions, or connect without 'session_expiry' and 'keep_session'"
            )
        if granted is not None and granted < asked:
            self._warn(
                target,
                f"the broker keeps the session of a lost client for {granted} s, not for {asked} s: messages that it "
                "holds for longer are lost",
            )
        asked, granted = target.settings.keepalive, connack.keepalive
        if granted is not None and asked and (granted > asked or not granted):
            when = f"after up to {granted * _SILENT_INTERVALS:g} s" if granted else "never"
            self._warn(
                target,
                f"the broker set the keepalive to {granted} s instead of {asked} s: it notices the silent loss of this "
                f"client {when}, and sends its last will then",
            )
        return None

    def subscribed(self, target: ConnectTarget, topic_filter: str, asked: int, granted: int) -> None:
        """Compare the QoS of a SUBACK; QoS 0 instead of another is refused elsewhere."""
        if granted < asked:
            self._warn(
                target,
                f"the broker granted QoS {granted} to the subscription to {topic_filter!r}, which asked for QoS "
                f"{asked}: messages may come twice",
            )

    def resumed(self, target: ConnectTarget, *, asked: bool, granted: bool) -> None:
        """Compare the session of a reconnect; each one that is lost is a warning of its own."""
        if asked and not granted:
            logger.warning(
                "%s: the broker no longer has the session of this client: messages that it held for it are lost; "
                "subscribing again",
                target.component,
            )
