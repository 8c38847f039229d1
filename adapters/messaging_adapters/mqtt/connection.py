"""One network connection to the broker: connects, keeps it alive, ends it, and handles its control packets.

================================  ==========================================================================
:mod:`.transport`                 TCP, TLS and WebSocket; gathered writes
:mod:`.reading`                   when to read; bytes as packets
:mod:`.control`                   CONNECT and CONNACK, by paho
:mod:`.in_flight`                 SUBSCRIBE, UNSUBSCRIBE and their answers
================================  ==========================================================================

Everything runs on the loop. Packets of data go to the session as they are.

**Keepalive.** A ping goes out when nothing was received, or nothing sent, for three quarters of the interval, which the
broker may have set. A broker that does not answer it for as long again is lost. So a dead peer is noticed within twice
the interval, whatever this side does meanwhile. A ping may stand behind megabytes, here and in the kernel: as long as
the peer takes some of them, it is slow and not dead.

**Re-authentication** (AUTH; MQTT 5, 4.12.1). Supported are methods of one step: the client sends its token, and the
broker accepts or refuses it.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

from messaging.connection import tls
from messaging.connection.proxies import reason_of
from messaging.errors import AuthenticationError, ConnectFailedError, ConnectionLostError, RedirectedError
from messaging.execution import clock, on_worker
from messaging_adapters.mqtt import handshake, packets
from messaging_adapters.mqtt.control import ControlClient
from messaging_adapters.mqtt.handshake import Connack
from messaging_adapters.mqtt.in_flight import SubscribeRequests
from messaging_adapters.mqtt.packets import LimitExceededError, ProtocolError
from messaging_adapters.mqtt.reading import PacketReader
from messaging_adapters.mqtt.transport import PacketEvents, Transport, dial

if TYPE_CHECKING:
    from messaging.errors import BrokerError
    from messaging_adapters.mqtt.handshake import ConnectTarget, Will

#: seconds that a broker may take to close after DISCONNECT
_CLOSE_TIMEOUT: Final = 1.0
#: seconds between two checks of the keepalive, at most
_TICK: Final = 1.0
#: part of the interval after which silence is answered by a ping, and a ping without answer ends the connection
_PATIENCE: Final = 0.75


class NetworkEvents(PacketEvents):
    """The session, as its connection sees it. Called on the loop."""

    def connected(self, connection: NetworkConnection, connack: Connack) -> None:
        """Called with the accepting CONNACK, before any later packet is processed."""

    def lost(self, connection: NetworkConnection, error: ConnectionLostError) -> None:
        """Called once, when it ended after ``connected`` and without :meth:`NetworkConnection.close`."""


class NetworkConnection:
    """A connection to the broker.

    Attributes:
        target: what CONNECT says.
        transport: sends packets.
        reader: can be suspended.
        requests: subscribes and unsubscribes.
        is_up: between CONNACK and the end.
        closed: after the end.
        error: why the connection ended, if it was lost.
    """

    def __init__(self, target: ConnectTarget, events: NetworkEvents) -> None:
        self.target = target
        self._events = events
        self._loop = asyncio.get_running_loop()
        self._control: ControlClient | None = None
        self.transport = Transport(self, events)
        largest = target.settings.max_packet_size or packets.MAX_PACKET
        self.reader = PacketReader(self, events, self.transport, largest, target.component)
        self.requests = SubscribeRequests(target, self.transport, events)
        self._keepalive = _Keepalive(self.transport, target.settings.keepalive)
        self._timer: asyncio.TimerHandle | None = None
        self._connack: asyncio.Future[Connack] = self._loop.create_future()
        #: the answer to AUTH, while one is awaited
        self._authenticated: asyncio.Future[bool] | None = None
        #: set while closing in good order: resolved at the end of the stream
        self._finished: asyncio.Future[None] | None = None
        self.is_up = False
        self.closed = False
        self.error: BrokerError | None = None

    # --- connecting

    async def connect(self, *, clean_start: bool, will: Will | None) -> Connack:
        """Connect and wait for CONNACK. Leaves nothing behind if it fails or is cancelled.

        Raises:
            AuthenticationError: the broker refused the credentials.
            RedirectedError: the broker refers to another server.
            ConnectFailedError: anything else.
        """
        target = self.target
        control = self._control = ControlClient(target, clean_start=clean_start, will=will)
        try:
            try:
                self.transport.open(*await dial(target))
                self.transport.send(await on_worker(control.connect))  # no local: tracebacks show their values
            except ConnectFailedError as error:
                raise ConnectFailedError(f"cannot connect to {target}: {error}") from error.__cause__
            except (OSError, ValueError) as error:
                reason = None
                if target.tls is not None and isinstance(error, OSError):
                    reason = tls.explain(error, *target.schemes)
                if reason is None and isinstance(error, (OSError, UnicodeError)):
                    reason = reason_of(error)
                reason = reason or str(error) or type(error).__name__
                raise ConnectFailedError(f"cannot connect to {target}: {reason}") from error
            self.reader.listen()
            self._tick()
            self.transport.flush()
            return await self._connack
        except BaseException:
            self._dispose()
            raise

    def _tick(self) -> None:
        # uvloop reports no end of the stream if data and a reset came together: look whether there is one
        self.reader.read()
        if self.is_up and self._finished is None and self._keepalive.is_lost():
            reason = f"no answer to a ping for {self._keepalive.patience:g} s"
            self.end(ConnectionLostError(f"connection to {self.target} lost: {reason}"))
        if not self.closed:
            self._timer = clock.call_later(self._loop, self._keepalive.tick, self._tick)

    # --- events of reader and transport

    def begun(self, data: bytes) -> bool:
        """See ``transport.TransportOwner``."""
        kind = data[0] & 0xF0
        if kind == packets.CONNACK or (kind == packets.AUTH and self.target.settings.auth_method is not None):
            return True
        hint = tls.wants_tls(data, *self.target.schemes) if self.target.tls is None else None
        if hint is None:
            raise ProtocolError("its first packet is not CONNACK: it may be no port for MQTT")
        self.end(ConnectFailedError(f"cannot connect to {self.target}: {hint}"))
        return False

    def controlled(self, head: int, body: bytes) -> None:
        """See ``transport.TransportOwner``."""
        kind = head & 0xF0
        if self.is_up:
            if kind in (packets.SUBACK, packets.UNSUBACK):
                self.requests.answered(kind, body)
                return
            if kind == packets.PINGRESP:
                return  # that bytes arrived is enough for the keepalive
            if kind == packets.CONNACK:
                raise ProtocolError("a second CONNACK")  # MQTT-3.2.0-2
            if kind == packets.AUTH and self.target.settings.auth_method is not None:
                self._authentication_answered(body)
                return
        elif kind == packets.AUTH and self.target.settings.auth_method is not None:
            what = f"the method {self.target.settings.auth_method!r} takes another step, which is not supported"
            self.end(AuthenticationError(f"cannot connect to {self.target}: {what}"))
            return
        if self._control is None:
            return
        result = self._control.read(head, body)
        if not isinstance(result, Connack):
            self.end(result)
            return
        self.is_up = True
        self.requests.is_open = True
        self._keepalive.interval = float(handshake.agreed_keepalive(self.target.settings.keepalive, result.keepalive))
        self._events.connected(self, result)
        if not self._connack.done():
            self._connack.set_result(result)

    def failed(self, error: Exception) -> None:
        """See ``transport.TransportOwner``."""
        broker = self.target
        if isinstance(error, ProtocolError):
            if self.is_up and self.target.settings.v5:
                self.transport.tell(packets.disconnect(error.code))  # MQTT 5, 4.13
            verdict = "exceeded a limit" if isinstance(error, LimitExceededError) else "broke the protocol"
            self.end(ConnectionLostError(f"{broker} {verdict}: {error}"), error)
        elif isinstance(error, EOFError) and (self.is_up or self._finished is not None):
            self.end(ConnectionLostError(f"connection to {broker} lost: closed by the broker"))
        elif isinstance(error, EOFError):
            self.end(self._unanswered())
        elif isinstance(error, OSError):
            reason = error.strerror or str(error)
            if self.reader.has_begun:
                self.end(ConnectionLostError(f"connection to {broker} lost: {reason}"), error)
            else:
                self.end(self._unanswered(f" ({reason})"), error)
        else:
            self.end(ConnectionLostError(f"cannot process what {broker} sent: {type(error).__name__}"), error)

    def write_failed(self, error: OSError) -> None:
        """See ``transport.TransportOwner``."""
        self.reader.read()  # a packet that the broker sent before it closed may say why
        self.failed(error)

    def _unanswered(self, reason: str = "") -> ConnectFailedError:
        """Return the error for a connection that ended before the broker sent anything, with hints at the cause."""
        hints = []
        if self.target.settings.v5:
            hints.append("not speak MQTT 5: try version=3.1.1")
        if self.target.tls is None:
            secure, plain = self.target.schemes
            hints.append(f"want TLS: try {secure}:// instead of {plain}://")
        hint = f"; it may {', or '.join(hints)}" if hints else ""
        return ConnectFailedError(f"{self.target} closed the connection without an answer{reason}{hint}")

    # --- authentication

    async def reauthenticate(self, target: ConnectTarget, timeout: float) -> bool:
        """Authenticate with the credentials of ``target``; at most one attempt at a time.

        Returns:
            Whether the broker accepted them; ``False`` if it asks for another step, or does not answer within
            ``timeout`` seconds. A broker that refuses them ends the connection.

        Raises:
            ConnectionLostError: the connection ended meanwhile.
        """
        method, password = target.settings.auth_method, target.password
        if method is None or password is None or self._authenticated is not None:
            return False
        answer = self._authenticated = self._loop.create_future()
        try:
            self.transport.send(packets.auth(packets.REAUTHENTICATE, method, password.get_secret_value().encode()))
            done, _ = await clock.wait([answer], timeout=timeout)
            return answer.result() if done else False
        finally:
            self._authenticated = None

    def _authentication_answered(self, body: bytes) -> None:
        """Process an AUTH. May raise ``ProtocolError``."""
        reason = body[0] if body else 0
        if self._authenticated is None or reason not in (0, packets.CONTINUE_AUTHENTICATION):
            raise ProtocolError(f"an unexpected AUTH with reason code 0x{reason:02X}")
        if not self._authenticated.done():
            self._authenticated.set_result(reason == 0)

    # --- ending

    async def close(self, session_expiry: int | None = None, *, takes_late: bool = False) -> None:
        """Send DISCONNECT and wait a moment until the broker has closed. Idempotent; does not raise.

        With ``session_expiry``, the broker keeps the session for so many seconds from now on (MQTT 5). With
        ``takes_late``, messages with QoS 0 are received up to the end of the connection.

        Closing at once could reset the connection: the broker would take that for a loss and publish the will.
        """
        if not self.is_up or self._finished is not None:
            self._dispose()
            return
        self.reader.drain(takes_late=takes_late)
        if self.closed:  # by a packet that was read already
            return
        self._finished = self._loop.create_future()
        self.requests.is_open = False
        try:
            self.transport.finish(packets.disconnect(session_expiry=session_expiry))
            await clock.wait([self._finished], timeout=_CLOSE_TIMEOUT)
        finally:
            self._dispose()

    def end(self, error: BrokerError, cause: BaseException | None = None) -> None:
        """End the connection at once, and report ``error``."""
        if self.closed:
            return
        if self._finished is not None:
            if not self._finished.done():
                self._finished.set_result(None)
            return
        if cause is not None:
            error.__cause__ = cause
        self.error = error
        self._dispose()
        if not self._connack.done():
            if not isinstance(error, (ConnectFailedError, RedirectedError)):
                cause, error = error, ConnectFailedError(f"cannot connect: {error}")
                error.__cause__ = cause
            self._connack.set_exception(error)
        elif isinstance(error, ConnectionLostError):
            self._events.lost(self, error)

    def _dispose(self) -> None:
        """Release everything. Idempotent."""
        self.closed = True
        self.is_up = False
        self.reader.close()
        self.transport.close()
        if self._timer is not None:
            self._timer.cancel()
        if self._control is not None:
            self._control.close()
            self._control = None
        self.requests.fail_pending()
        if self._authenticated is not None and not self._authenticated.done():
            self._authenticated.set_exception(ConnectionLostError(f"connection to {self.target} lost"))
            self._authenticated.exception()  # marks it as retrieved: its caller may have been cancelled


class _Keepalive:
    """The pings of one connection, and whether the broker still answers.

    Attributes:
        interval: seconds; 0 for none.
    """

    def __init__(self, transport: Transport, interval: int) -> None:
        self._transport = transport
        self.interval = float(interval)
        #: value of ``Transport.sent`` from which on a ping was handed to the socket; ``None`` without a ping
        self._ping: int | None = None
        #: when it was queued, or when the backlog before it last shrank; monotonic seconds
        self._ping_at = 0.0
        #: value of ``Transport.delivered`` at that time
        self._delivered = 0

    @property
    def tick(self) -> float:
        """Seconds until the next check."""
        return min(_TICK, self.interval / 8 or _TICK)

    @property
    def patience(self) -> float:
        """Seconds that the broker has for an answer to a ping."""
        return self.interval * _PATIENCE

    def is_lost(self) -> bool:
        """Send a ping if one is due. Return whether the broker has not answered one in time."""
        if not self.interval:
            return False
        transport, now, patience = self._transport, clock.monotonic(), self.patience
        if self._ping is None:
            if now - min(transport.received_at, transport.sent_at) >= patience:
                self._ping, self._ping_at = transport.send(packets.PING), now
                self._delivered = transport.delivered
        elif transport.received_at > self._ping_at:
            self._ping = None
        elif self._delivered < self._ping and transport.delivered > self._delivered:
            # the backlog before the ping shrinks: the connection is slow
            self._delivered, self._ping_at = transport.delivered, now
        return self._ping is not None and now - self._ping_at >= patience
