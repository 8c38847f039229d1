"""The MQTT handshake by paho-mqtt: makes CONNECT, and reads CONNACK and DISCONNECT.

For each connection there is a new client, so that no queue and no half-read packet is left in it. paho's callbacks run
while it holds a lock and is in the middle of a packet, and an exception would leave it there. So they only note the
result.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, Final

import paho.mqtt.client as mqtt
from paho.mqtt.enums import CallbackAPIVersion
from paho.mqtt.packettypes import PacketTypes

from messaging.errors import ConnectionLostError, TakenOverError
from messaging_adapters.mqtt import handshake, packets
from messaging_adapters.mqtt.paho_socket import new_socket

if TYPE_CHECKING:
    from paho.mqtt.properties import Properties as PahoProperties
    from paho.mqtt.reasoncodes import ReasonCode

    from messaging.errors import BrokerError
    from messaging_adapters.mqtt.handshake import Connack, ConnectTarget, Will

logger = logging.getLogger(__name__)

#: return codes of MQTT 3.1.1 that paho takes for protocol errors, and the reason codes that mean the same
_RETURN_CODES: Final = {b"\x01": 0x84, b"\x02": 0x85}


class ControlClient:
    """paho's client of one connection. On the loop, but for :meth:`connect`."""

    def __init__(self, target: ConnectTarget, *, clean_start: bool, will: Will | None) -> None:
        self._target = target
        self._clean_start = clean_start
        self._accepted: Connack | None = None
        self._ended: BrokerError | None = None
        self._socket = new_socket(
            CallbackAPIVersion.VERSION2,
            client_id=target.client_id,
            clean_session=None if target.settings.v5 else clean_start,
            protocol=mqtt.MQTTv5 if target.settings.v5 else mqtt.MQTTv311,
            # else paho answers some refusals by connecting again, blocking, on the thread of the loop
            reconnect_on_failure=False,
        )
        client = self._client = self._socket.client
        if target.username is not None:
            # with an authentication method the password is its data
            password = target.password if target.settings.auth_method is None else None
            client.username_pw_set(target.username, None if password is None else password.get_secret_value())
        if will is not None:
            properties = handshake.will_properties(will) if target.settings.v5 else None
            client.will_set(will.topic, will.payload, will.qos, will.retain, properties)
        client.on_connect = self._on_connect
        client.on_disconnect = self._on_disconnect

    def connect(self) -> bytes:
        """Return CONNECT. On a worker thread: paho's ``connect`` may block.

        Raises:
            OSError, ValueError: paho refused.
        """
        target = self._target
        options: dict[str, Any] = {}
        if target.settings.v5:
            properties = handshake.new_properties(PacketTypes.CONNECT)
            properties.ReceiveMaximum = target.settings.receive_maximum
            if target.settings.connect_expiry:
                properties.SessionExpiryInterval = target.settings.connect_expiry
            if target.settings.topic_alias_maximum:
                properties.TopicAliasMaximum = target.settings.topic_alias_maximum
            if target.settings.max_packet_size is not None:
                properties.MaximumPacketSize = target.settings.max_packet_size
            if target.settings.auth_method is not None and target.password is not None:
                properties.AuthenticationMethod = target.settings.auth_method
                properties.AuthenticationData = target.password.get_secret_value().encode()
            options = {"clean_start": self._clean_start, "properties": properties}
        self._socket.connect(lambda host, port: self._client.connect(host, port, target.settings.keepalive, **options))
        return self._socket.take()

    def read(self, head: int, body: bytes) -> Connack | BrokerError:
        """Let paho read a CONNACK or DISCONNECT. Return the accepting CONNACK, or the reason why the connection ends.

        Raises:
            ProtocolError: it is another packet.
        """
        kind, target = head & 0xF0, self._target
        if kind not in (packets.CONNACK, packets.DISCONNECT):
            raise packets.ProtocolError(f"a packet of type {kind >> 4}, which is not for clients")
        if kind == packets.CONNACK and not target.settings.v5 and body[1:2] in _RETURN_CODES:
            code = _RETURN_CODES[body[1:2]]
            return handshake.refusal(target, handshake.reason_name(code), code)
        given = (body[1:2] if kind == packets.CONNACK else body[:1]) if target.settings.v5 else b""
        if given and given[0] >= packets.FAILURE and (unlisted := handshake.unlisted(target, kind, given[0])):
            return unlisted  # paho fails on such reason codes
        packet = bytes((head,)) + packets.varint(len(body)) + body
        try:
            self._socket.give(packet, lambda: self._accepted or self._ended)
        except Exception as error:  # of paho, over a packet it did not expect
            logger.exception(
                "%s: paho cannot read a packet of type %d; the connection ends", target.component, kind >> 4
            )
            return ConnectionLostError(f"paho failed on {target}: {type(error).__name__}")
        if self._ended is not None:
            return self._ended
        accepted, self._accepted = self._accepted, None
        return accepted or ConnectionLostError(f"paho cannot read a packet of type {kind >> 4} from {target}")

    def close(self) -> None:
        """Release everything. Idempotent."""
        self._socket.close()

    # --- paho's callbacks

    def _on_connect(
        self,
        _client: Any,
        _userdata: Any,
        flags: mqtt.ConnectFlags,
        reason: ReasonCode,
        properties: PahoProperties | None,
    ) -> None:
        if reason.is_failure:
            self._ended = handshake.refusal(self._target, str(reason), reason.value, properties)
        else:
            self._accepted = handshake.connack(flags.session_present, properties)

    def _on_disconnect(
        self,
        _client: Any,
        _userdata: Any,
        flags: mqtt.DisconnectFlags,
        reason: ReasonCode,
        properties: PahoProperties | None,
    ) -> None:
        if self._ended is None:
            is_told = flags.is_disconnect_packet_from_server
            event = "disconnected this client" if is_told else "connection lost"
            detail = handshake.detail_of(self._target, properties)
            text = f"{self._target} {event}: {handshake.with_detail(str(reason), detail)}"
            code = reason.value if is_told else None
            kind = TakenOverError if code == packets.SESSION_TAKEN_OVER else ConnectionLostError
            redirect = handshake.redirected(self._target, text, code, properties)
            self._ended = redirect or kind(text, code=code, detail=detail)
