"""One connection to the broker: dials it, and joins its parts.

================================  ==========================================================================
:mod:`.dialing`                   TCP, TLS and WebSocket
:mod:`.wire`                      the socket, and bytes as packets
:mod:`.control`                   control packets, by paho
:mod:`.reading`, :mod:`.writing`  when to read, and when to flush
:mod:`.keepalive`                 pings
:mod:`.subscribe_requests`        SUBSCRIBE, UNSUBSCRIBE and their answers
:mod:`.reauthentication`          AUTH
================================  ==========================================================================

Dialing runs on a worker thread, everything else on the loop.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Final, Protocol

from messaging.connection import tls
from messaging.errors import AuthenticationError, ConnectFailedError, ConnectionLostError, RedirectedError
from messaging.execution import clock, on_worker
from messaging_adapters.mqtt import grants, packets
from messaging_adapters.mqtt.control import ControlClient
from messaging_adapters.mqtt.dialing import Dialer
from messaging_adapters.mqtt.handshake import Connack
from messaging_adapters.mqtt.keepalive import Keepalive
from messaging_adapters.mqtt.packets import LimitExceededError, ProtocolError
from messaging_adapters.mqtt.reading import Reader
from messaging_adapters.mqtt.reauthentication import Reauthentication
from messaging_adapters.mqtt.subscribe_requests import SubscribeRequests
from messaging_adapters.mqtt.writing import Writer

if TYPE_CHECKING:
    from messaging.errors import BrokerError
    from messaging_adapters.mqtt.handshake import Target, Will
    from messaging_adapters.mqtt.wire import Wire

#: seconds that a broker may take to close after DISCONNECT
_CLOSE_TIMEOUT: Final = 1.0


class Events(Protocol):
    """The events of a link. Called on the loop."""

    def connected(self, link: Link, connack: Connack) -> None:
        """Called with the accepting CONNACK, before any later packet is processed."""

    def received(self, head: int, body: bytes) -> None:
        """Process a PUBLISH or an acknowledgement. May raise ``ProtocolError``."""

    def received_all(self) -> None:
        """Called when all packets that had arrived were processed."""

    def written(self, link: Link) -> None:
        """Called when ``link.writer.sent`` may have grown."""

    def lost(self, link: Link, error: ConnectionLostError) -> None:
        """Called once, when the connection ended after ``connected`` and without :meth:`Link.close`."""


class Link:
    """A connection to the broker.

    Attributes:
        writer: sends packets.
        requests: subscribes and unsubscribes.
        reauthenticate: logs in anew; see :meth:`.reauthentication.Reauthentication.begin`.
        is_up: between CONNACK and the end.
        closed: after the end.
        error: why the connection ended, if it was lost.
    """

    def __init__(self, target: Target, events: Events) -> None:
        self._target = target
        self._events = events
        self._loop = asyncio.get_running_loop()
        self._dialer = Dialer(target)
        self._wire: Wire | None = None
        self._control: ControlClient | None = None
        self.writer = Writer(self)
        self._reader = Reader(self, self.writer, target.component)
        self.requests = SubscribeRequests(target, self.writer)
        self._reauthentication = Reauthentication(target, self.writer)
        self.reauthenticate = self._reauthentication.begin
        self._keepalive = Keepalive(target.keepalive)
        self._timer: asyncio.TimerHandle | None = None
        self._connack: asyncio.Future[Connack] = self._loop.create_future()
        #: set while closing in good order: resolved at the end of the stream
        self._finished: asyncio.Future[None] | None = None
        self.received = events.received
        self.received_all = events.received_all
        self.suspend_reading = self._reader.suspend
        self.resume_reading = self._reader.resume
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
        target = self._target
        control = self._control = ControlClient(target, clean_start=clean_start, will=will)
        try:
            try:
                connect, wire = await on_worker(lambda: (control.connect(), self._dialer.dial()))
            except ConnectFailedError as error:
                raise ConnectFailedError(f"cannot connect to {target}: {error}") from error.__cause__
            except (OSError, ValueError) as error:
                explained = None
                if target.tls is not None and isinstance(error, OSError):
                    explained = tls.explain(error, *target.schemes)
                reason = explained or getattr(error, "strerror", None) or str(error) or type(error).__name__
                raise ConnectFailedError(f"cannot connect to {target}: {reason}") from error
            self._wire = wire
            wire.send(connect)
            self._reader.open(wire)
            self.writer.open(wire)
            self._tick()
            self.writer.flush()
            return await self._connack
        except BaseException:
            self._dispose()
            raise

    def _tick(self) -> None:
        # uvloop reports no end of the stream if data and a reset came together: look whether there is one
        self._reader.read()
        wire = self._wire
        if wire is not None and self.is_up and self._finished is None and self._keepalive.is_lost(wire, self.writer):
            reason = f"no answer to a ping for {self._keepalive.patience:g} s"
            self._end(ConnectionLostError(f"connection to {self._target} lost: {reason}"))
        if not self.closed:
            self._timer = clock.call_later(self._loop, self._keepalive.tick, self._tick)

    # --- events of reader and writer

    def begun(self, data: bytes) -> bool:
        """See ``reading.ReaderOwner``."""
        kind = data[0] & 0xF0
        if kind == packets.CONNACK or (kind == packets.AUTH and self._target.auth_method is not None):
            return True
        hint = tls.wants_tls(data, *self._target.schemes) if self._target.tls is None else None
        if hint is None:
            raise ProtocolError("its first packet is not CONNACK: it may be no port for MQTT")
        self._end(ConnectFailedError(f"cannot connect to {self._target}: {hint}"))
        return False

    def controlled(self, head: int, body: bytes) -> None:
        """See ``reading.ReaderOwner``."""
        kind = head & 0xF0
        if self.is_up:
            if kind in (packets.SUBACK, packets.UNSUBACK):
                self.requests.answered(kind, body)
                return
            if kind == packets.PINGRESP:
                return  # that bytes arrived is enough for the keepalive
            if kind == packets.CONNACK:
                raise ProtocolError("a second CONNACK")  # MQTT-3.2.0-2
            if kind == packets.AUTH and self._target.auth_method is not None:
                self._reauthentication.answered(body)
                return
        elif kind == packets.AUTH and self._target.auth_method is not None:
            what = f"the method {self._target.auth_method!r} takes another step, which is not supported"
            self._end(AuthenticationError(f"cannot connect to {self._target}: {what}"))
            return
        if self._control is None:
            return
        result = self._control.read(head, body)
        if not isinstance(result, Connack):
            self._end(result)
            return
        self.is_up = True
        self.requests.open(self._control)
        self._keepalive.interval = float(grants.keepalive(self._target.keepalive, result.keepalive))
        self._events.connected(self, result)
        if not self._connack.done():
            self._connack.set_result(result)

    def failed(self, error: Exception) -> None:
        """See ``reading.ReaderOwner`` and ``writing.WriterOwner``."""
        broker = self._target
        if isinstance(error, ProtocolError):
            self._tell(error)
            verdict = "exceeded a limit" if isinstance(error, LimitExceededError) else "broke the protocol"
            self._end(ConnectionLostError(f"{broker} {verdict}: {error}"), error)
        elif isinstance(error, EOFError) and (self.is_up or self._finished is not None):
            self._end(ConnectionLostError(f"connection to {broker} lost: closed by the broker"))
        elif isinstance(error, EOFError):
            self._end(self._unanswered())
        elif isinstance(error, OSError):
            reason = error.strerror or str(error)
            if self._reader.has_begun:
                self._end(ConnectionLostError(f"connection to {broker} lost: {reason}"), error)
            else:
                self._end(self._unanswered(f" ({reason})"), error)
        else:
            self._end(ConnectionLostError(f"cannot process what {broker} sent: {type(error).__name__}"), error)

    def write_failed(self, error: OSError) -> None:
        """See ``writing.WriterOwner``."""
        self._reader.read()  # a packet that the broker sent before it closed may say why
        self.failed(error)

    def _tell(self, error: ProtocolError) -> None:
        """Tell the broker why the connection ends, if it can be told (MQTT 5, 4.13)."""
        if self.is_up and self._target.v5 and self._wire is not None:
            self._wire.send(packets.disconnect(error.code))
            with contextlib.suppress(OSError):
                self._wire.flush()

    def _unanswered(self, reason: str = "") -> ConnectFailedError:
        """Return the error for a connection that ended before the broker sent anything, with hints at the cause."""
        hints = []
        if self._target.v5:
            hints.append("not speak MQTT 5: try version=3.1.1")
        if self._target.tls is None:
            secure, plain = self._target.schemes
            hints.append(f"want TLS: try {secure}:// instead of {plain}://")
        hint = f"; it may {', or '.join(hints)}" if hints else ""
        return ConnectFailedError(f"{self._target} closed the connection without an answer{reason}{hint}")

    def written(self) -> None:
        """See ``writing.WriterOwner``."""
        if self.is_up:
            self._events.written(self)

    # --- ending

    async def close(self, session_expiry: int | None = None, *, takes_late: bool = False) -> None:
        """Send DISCONNECT and wait a moment until the broker has closed. Idempotent; does not raise.

        With ``session_expiry``, the broker keeps the session for so many seconds from now on (MQTT 5). With
        ``takes_late``, messages with QoS 0 are received up to the end of the connection.

        Closing at once could reset the connection: the broker would take that for a loss and publish the will.
        """
        if not self.is_up or self._control is None or self._finished is not None:
            self._dispose()
            return
        self._reader.drain(takes_late=takes_late)
        if self.closed:  # by a packet that was read already
            return
        self._finished = self._loop.create_future()
        self.requests.close()
        try:
            self.writer.finish(self._control.disconnect(session_expiry))
            await clock.wait([self._finished], timeout=_CLOSE_TIMEOUT)
        finally:
            self._dispose()

    def lose(self, error: ConnectionLostError) -> None:
        """End the connection at once, and report ``error``."""
        self._end(error)

    def _end(self, error: BrokerError, cause: BaseException | None = None) -> None:
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
        self._reader.close()
        self.writer.close()
        if self._timer is not None:
            self._timer.cancel()
        self._dialer.cancel()
        if self._control is not None:
            self._control.close()
        self._control = self._wire = None
        self.requests.fail_pending()
        self._reauthentication.fail_pending()
