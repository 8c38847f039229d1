"""The MQTT handshake by paho-mqtt: makes CONNECT, and reads CONNACK and DISCONNECT.

For each connection there is a new client, so that no queue and no half-read packet is left in it. paho's callbacks run
while it holds a lock and is in the middle of a packet, and an exception would leave it there. So they only note the
result.

**The socket of paho's client.** This is the one module that reaches below the public API of paho-mqtt. The connection
is not paho's own: packets of data go past it, see the package. So paho needs a socket whose other end is in this
process. There are two ways to give it one:

==========================  ==========================================================================================
:class:`MemorySocket`       Replaces ``Client._create_socket``, a private method. No system call, no descriptor. For
                            the releases of paho in :data:`TESTED_RELEASES`.
:class:`LoopbackSocket`     Public API only: paho connects to a listening socket of the loopback interface. For all
                            other releases.
==========================  ==========================================================================================

Both carry only CONNECT, CONNACK and DISCONNECT. Messages are equally fast with either, and connecting is, too (2 ms of
CPU). The first opens no listening socket, which a sandbox may forbid, and no descriptors.
"""

from __future__ import annotations

import logging
import select
import socket
from typing import TYPE_CHECKING, Any, Final

import paho.mqtt
import paho.mqtt.client as mqtt
from paho.mqtt.enums import CallbackAPIVersion
from paho.mqtt.packettypes import PacketTypes

from messaging.errors import ConnectionLostError, TakenOverError
from messaging.execution import clock
from messaging_adapters.mqtt import handshake, packets

if TYPE_CHECKING:
    from collections.abc import Callable

    from paho.mqtt.properties import Properties as PahoProperties
    from paho.mqtt.reasoncodes import ReasonCode

    from messaging.errors import BrokerError
    from messaging_adapters.mqtt.handshake import Connack, ConnectTarget, Will

logger = logging.getLogger(__name__)

#: return codes of MQTT 3.1.1 that paho takes for protocol errors, and the reason codes that mean the same
_RETURN_CODES: Final = {b"\x01": 0x84, b"\x02": 0x85}
#: releases whose ``Client._create_socket`` is known, as major and minor version
TESTED_RELEASES: Final = frozenset({"2.2"})
#: seconds that a packet may take through the loopback interface
_LOOPBACK_TIMEOUT: Final = 5.0


class ControlClient:
    """paho's client of one connection. On the loop, but for :meth:`connect`.

    Attributes:
        socket: to be closed with the connection.
    """

    def __init__(self, target: ConnectTarget, *, clean_start: bool, will: Will | None) -> None:
        self._target = target
        self._clean_start = clean_start
        self._accepted: Connack | None = None
        self._ended: BrokerError | None = None
        self.socket = new_socket(
            CallbackAPIVersion.VERSION2,
            client_id=target.client_id,
            clean_session=None if target.settings.v5 else clean_start,
            protocol=mqtt.MQTTv5 if target.settings.v5 else mqtt.MQTTv311,
            # else paho answers some refusals by connecting again, blocking, on the thread of the loop
            reconnect_on_failure=False,
        )
        client = self._client = self.socket.client
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
        self.socket.connect(lambda host, port: self._client.connect(host, port, target.settings.keepalive, **options))
        return self.socket.take()

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
            self.socket.give(packet, lambda: self._accepted or self._ended)
        except Exception as error:  # of paho, over a packet it did not expect
            logger.exception(
                "%s: paho cannot read a packet of type %d; the connection ends", target.component, kind >> 4
            )
            return ConnectionLostError(f"paho failed on {target}: {type(error).__name__}")
        if self._ended is not None:
            return self._ended
        accepted, self._accepted = self._accepted, None
        return accepted or ConnectionLostError(f"paho cannot read a packet of type {kind >> 4} from {target}")

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


def is_tested(release: str = paho.mqtt.__version__) -> bool:
    """Return whether ``release`` is known to take its socket from ``Client._create_socket``."""
    return ".".join(release.split(".")[:2]) in TESTED_RELEASES and "_create_socket" in vars(mqtt.Client)


def new_socket(*arguments: Any, **keywords: Any) -> MemorySocket | LoopbackSocket:
    """Return the socket for this release of paho, with a client of these arguments."""
    if is_tested():
        return MemorySocket(*arguments, **keywords)
    logger.info(
        "paho-mqtt %s is not among the tested releases %s: it is connected through the loopback interface",
        paho.mqtt.__version__, ", ".join(sorted(TESTED_RELEASES)),
    )  # fmt: skip
    return LoopbackSocket(*arguments, **keywords)


class MemorySocket:
    """Both ends in memory. paho takes it for a non-blocking socket.

    Attributes:
        client: its callbacks are called by :meth:`give` and :meth:`connect`.
    """

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        self.client: mqtt.Client = _MemoryClient(self, *arguments, **keywords)
        self._to_paho = b""
        self._from_paho = bytearray()

    def connect(self, connect: Callable[[str, int], object]) -> None:
        """Have ``connect(host, port)`` call ``client.connect`` for this socket."""
        connect("memory", 1)  # neither is used

    def take(self) -> bytes:
        """Return the packets that paho has written since the last call."""
        data = bytes(self._from_paho)
        self._from_paho.clear()
        return data

    def give(self, packet: bytes, is_read: Callable[[], object]) -> None:
        """Let paho read a packet; ``is_read`` returns whether one of its callbacks was called for it."""
        self._to_paho += packet
        while self._to_paho and self.client.socket() is not None and not is_read():
            self.client.loop_read()

    # --- the methods that paho calls

    def recv(self, size: int) -> bytes:
        """Return bytes that were given, or raise ``BlockingIOError``."""
        if not self._to_paho:
            raise BlockingIOError
        data, self._to_paho = self._to_paho[:size], self._to_paho[size:]
        return data

    def send(self, data: bytes | bytearray) -> int:
        """Keep ``data`` for :meth:`take`."""
        self._from_paho += data
        return len(data)

    def setblocking(self, flag: bool) -> None:
        """Do nothing: it never blocks."""

    def fileno(self) -> int:
        """Return -1: there is no descriptor."""
        return -1

    def close(self) -> None:
        """Do nothing: packets that were written can still be taken."""


class _MemoryClient(mqtt.Client):
    """A client that uses a :class:`MemorySocket`."""

    def __init__(self, memory: MemorySocket, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self._memory = memory

    def _create_socket(self) -> MemorySocket:
        return self._memory


class LoopbackSocket:
    """A TCP connection of this process with itself."""

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        self.client = mqtt.Client(*arguments, **keywords)
        self._ours: socket.socket | None = None
        self._closed = False

    def connect(self, connect: Callable[[str, int], object]) -> None:
        """See :class:`MemorySocket`."""
        with socket.create_server(("127.0.0.1", 0)) as server:
            server.settimeout(_LOOPBACK_TIMEOUT)
            connect(*server.getsockname())
            theirs: Any = self.client.socket()
            name = theirs.getsockname()  # fails if it was closed meanwhile
            while True:
                ours, address = server.accept()
                if address == name:  # and not another program's
                    break
                ours.close()
        ours.settimeout(_LOOPBACK_TIMEOUT)
        self._ours = ours
        if self._closed:
            self.close()

    def take(self) -> bytes:
        """See :class:`MemorySocket`. paho writes a packet before its method returns, so it is there or about to be."""
        data = b""
        while self._ours is not None and not _is_complete(data):
            more = self._ours.recv(4096)
            if not more:
                break
            data += more
        return data

    def give(self, packet: bytes, is_read: Callable[[], object]) -> None:
        """See :class:`MemorySocket`."""
        if self._ours is None:
            return
        self._ours.sendall(packet)
        deadline = clock.monotonic() + _LOOPBACK_TIMEOUT
        while not is_read() and clock.monotonic() < deadline:
            theirs: Any = self.client.socket()
            if theirs is None:
                return
            select.select([theirs], [], [], _LOOPBACK_TIMEOUT)
            self.client.loop_read()

    def close(self) -> None:
        """Release everything. Idempotent."""
        self._closed = True
        ours, self._ours = self._ours, None
        if ours is not None:
            ours.close()
        theirs: Any = self.client.socket()
        if theirs is not None:
            theirs.close()


def _is_complete(data: bytes) -> bool:
    """Return whether ``data`` is one whole packet."""
    length = 0
    for at, digit in enumerate(data[1:5]):
        length |= (digit & 127) << 7 * at
        if digit < 128:
            return len(data) >= 2 + at + length
    return False
