"""One network connection to the broker: connects, reads packets, keeps it alive, ends it, handles control packets.

================================  ==========================================================================
:mod:`.transport`                 TCP, TLS and WebSocket; gathered writes
:mod:`.handshake`                 CONNECT, CONNACK and DISCONNECT
:mod:`.in_flight`                 SUBSCRIBE, UNSUBSCRIBE and their answers
================================  ==========================================================================

Everything runs on the loop. Packets of data go to the session as they are.

**Pacing.** A broker writes message by message, and a client that is waiting reads them one by one: each read, each turn
of the loop and each hand-over to a consumer's thread is then for the sake of a few bytes. Under load that is most of
the work, on both sides. So where many packets arrive in small pieces, reading waits for a millisecond, as network cards
do with their interrupts. It stops doing so when that does not bring enough, since the broker may be the one that waits.

**Suspension.** The core suspends reading while consumers are behind: nothing is read, and packets that were read
already wait as well.

**Keepalive.** A ping goes out when nothing was received, or nothing sent, for three quarters of the interval, which the
broker may have set. A broker that does not answer it for as long again is lost. So a dead peer is noticed within twice
the interval, whatever this side does meanwhile. A ping may stand behind megabytes, here and in the kernel: as long as
the peer takes some of them, it is slow and not dead.

**Re-authentication** (AUTH; MQTT 5, 4.12.1). Supported are methods of one step: the client sends its token, and the
broker accepts or refuses it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from typing import Final

from messaging.connection import tls
from messaging.connection.proxies import reason_of
from messaging.environment.signals import on_failure
from messaging.errors import AuthenticationError, BrokerError, ConnectFailedError, ConnectionLostError, RedirectedError
from messaging.execution import clock
from messaging_adapters.mqtt import handshake, packets
from messaging_adapters.mqtt.handshake import Connack, ConnectTarget, Will
from messaging_adapters.mqtt.in_flight import SubscribeRequests
from messaging_adapters.mqtt.packets import LimitExceededError, PacketSplitter, ProtocolError
from messaging_adapters.mqtt.transport import READ_SIZE, Transport, dial

logger = logging.getLogger(__name__)

#: seconds that a broker may take to close after DISCONNECT
_CLOSE_TIMEOUT: Final = 1.0
#: seconds between two checks of the keepalive, at most
_TICK: Final = 1.0
#: part of the interval after which silence is answered by a ping, and a ping without answer ends the connection
_PATIENCE: Final = 0.75
#: packets between two calls of ``received_all``, and between two looks at whether reading was suspended
_BATCH: Final = 256
#: bits of the first byte of a PUBLISH that tell it from other packets, and those with QoS 0 from others
_KIND_AND_QOS: Final = 0xF0 | packets.QOS
#: types of packets that carry messages or belong to their handshakes
_DATA: Final = frozenset((packets.PUBLISH, packets.PUBACK, packets.PUBREC, packets.PUBREL, packets.PUBCOMP))
#: how long reading waits, seconds: the shortest that event loops can
PAUSE: Final = 0.001
#: packets that make a read worth while
WORTH: Final = 32
#: packets a second from which on it may be worth waiting
BUSY: Final = 10_000
#: how long to look before that is said, seconds
_LOOK: Final = 0.01
#: how long not to try it again if it brought too little: doubled each time, seconds
_FIRST_BREAK: Final = 0.1
_LONGEST_BREAK: Final = 10.0


class NetworkEvents:
    """The session, as its connection sees it. Called on the loop. The defaults ignore everything."""

    def received(self, head: int, body: bytes) -> None:
        """Process a PUBLISH or an acknowledgement. May raise ``ProtocolError``."""

    def received_all(self) -> None:
        """Called when all packets that had arrived, or a batch of them, were processed."""

    def written(self, sent: int) -> None:
        """Called after bytes were handed to the socket: ``sent`` of packets so far."""

    def uses(self, packet_id: int) -> bool:  # noqa: ARG002
        """Return whether a packet id is in use for a published message."""
        return False

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
        self.transport = Transport(events.written, self._writing_failed)
        largest = target.settings.max_packet_size or packets.MAX_PACKET
        self.reader = PacketReader(self, events, self.transport, largest, target.component)
        self.requests = SubscribeRequests(target, self.transport, events.uses)
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
        with on_failure(self._give_up):
            try:
                self.transport.open(*await dial(target))
                # no local: tracebacks show their values
                self.transport.send(handshake.connect_packet(target, clean_start=clean_start, will=will))
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

    def _give_up(self) -> None:
        """Leave nothing behind: a broker that has taken the connection would publish the will without DISCONNECT."""
        self.transport.tell(packets.disconnect())
        self._dispose()

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
        """Check the first bytes of the connection. Return whether they may be MQTT; may raise ``ProtocolError``."""
        kind = data[0] & 0xF0
        if kind == packets.CONNACK or (kind == packets.AUTH and self.target.settings.auth_method is not None):
            return True
        hint = tls.wants_tls(data, *self.target.schemes) if self.target.tls is None else None
        if hint is None:
            raise ProtocolError("its first packet is not CONNACK: it may be no port for MQTT")
        self.end(ConnectFailedError(f"cannot connect to {self.target}: {hint}"))
        return False

    def controlled(self, head: int, body: bytes) -> None:
        """Process a packet that is no ``NetworkEvents.received``. May raise ``ProtocolError``."""
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
        if self.closed:
            return
        result = handshake.read(self.target, head, body)
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
        """End the connection.

        Args:
            error: EOFError if the broker has closed its side, OSError of the socket, ProtocolError if the broker
                violated the protocol; any other error if a packet could not be processed.
        """
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

    def _writing_failed(self, error: OSError | LimitExceededError) -> None:
        """End the connection: the socket takes no bytes, or the broker reads none."""
        if isinstance(error, OSError):
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
        self.requests.fail_pending()
        if self._authenticated is not None and not self._authenticated.done():
            self._authenticated.set_exception(ConnectionLostError(f"connection to {self.target} lost"))
            self._authenticated.exception()  # marks it as retrieved: its caller may have been cancelled


class ReadPacer:
    """Decides for one connection whether to read again at once. Not thread safe."""

    __slots__ = ("_break", "_count", "_not_before", "_paced", "_reads", "_since")

    def __init__(self) -> None:
        self._paced = False
        self._reads = self._count = 0
        self._since = self._not_before = 0.0
        self._break = _FIRST_BREAK

    def pause_after(self, count: int, now: float) -> float:
        """How long to wait before reading again, seconds; 0 for not at all.

        Args:
            count: packets in the last read.
            now: monotonic seconds.
        """
        if self._paced:
            if count >= WORTH:
                self._break = _FIRST_BREAK
                return PAUSE
            self._paced = False
            self._not_before = now + self._break
            self._break = min(self._break * 2, _LONGEST_BREAK)
            self._look(now)
            return 0.0
        self._reads += 1
        self._count += count
        seconds = now - self._since
        if seconds < _LOOK:
            return 0.0
        self._paced = self._count >= BUSY * seconds and self._count < WORTH * self._reads and now >= self._not_before
        self._look(now)
        return PAUSE if self._paced else 0.0

    def _look(self, now: float) -> None:
        self._since = now
        self._reads = self._count = 0


class PacketReader:
    """The reading half of one connection. On the loop.

    Attributes:
        has_begun: whether bytes have arrived on this connection.
    """

    def __init__(
        self, owner: NetworkConnection, events: NetworkEvents, transport: Transport, largest: int, component: str
    ) -> None:
        """Read packets of at most ``largest`` bytes; ``component`` is the beginning of log lines."""
        self._owner = owner
        self._events = events
        self._transport = transport
        self._splitter = PacketSplitter(largest)
        self._component = component
        self._loop = asyncio.get_running_loop()
        #: the loop reports when there are bytes to read
        self._listening = False
        self._suspended = False
        #: packets that were read and are not processed yet
        self._rest: Iterator[tuple[int, bytes]] | None = None
        #: nothing is read before this
        self._pause: asyncio.TimerHandle | None = None
        self._pacer = ReadPacer()
        self.has_begun = False
        #: DISCONNECT was sent: packets that still arrive are ignored, but for messages with QoS 0 if those are wanted
        self._draining = False
        self._takes_late = False

    def close(self) -> None:
        """Stop reading, before the transport is closed. Idempotent."""
        self._ignore()
        self._unpause()
        self._rest = None

    def listen(self) -> None:
        """Read whenever the transport, which is open, has bytes; unless reading is suspended or paused."""
        if self._transport.fileno() >= 0 and not (self._listening or self._suspended or self._pause):
            self._listening = True
            self._loop.add_reader(self._transport.fileno(), self.read)

    def _ignore(self) -> None:
        if self._listening:
            self._listening = False
            self._loop.remove_reader(self._transport.fileno())

    def _unpause(self) -> None:
        if self._pause is not None:
            self._pause.cancel()
            self._pause = None

    def suspend(self) -> None:
        """Read and process nothing until :meth:`resume`."""
        if not self._draining:
            self._suspended = True
            self._ignore()

    def resume(self) -> None:
        """Process the packets that were read, then read again."""
        self._suspended = False
        rest, self._rest = self._rest, None
        if rest is not None:
            self._process(rest)
        if self._pause is None and not self._suspended:
            # most likely bytes are there: a look is cheaper than to have the loop watch, and stop it again
            self._pause = clock.call_later(self._loop, 0, self._continue)

    def drain(self, *, takes_late: bool) -> None:
        """Process the packets that were read, then only watch for the end of the stream.

        With ``takes_late``, messages with QoS 0 that arrive before the end are processed: the broker does not send them
        again.
        """
        self._unpause()
        self._draining = True
        self._takes_late = takes_late
        self.resume()

    def _continue(self) -> None:
        self._pause = None
        self.read()
        self.listen()

    def read(self) -> None:
        """Read and process the bytes that are available."""
        if self._suspended:
            return
        transport, owner = self._transport, self._owner
        try:
            data = transport.receive()
            if data is None:
                return
            if not data:
                if self._draining:
                    self._ignore()
                owner.failed(EOFError())
                return
            if self._draining:
                if self._takes_late:
                    packets_ = self._splitter.split(data)
                    self._process(each for each in packets_ if each[0] & _KIND_AND_QOS == packets.PUBLISH)
                return
            if not self.has_begun:
                # at once: an answer in another protocol may look like the beginning of a long packet
                if not owner.begun(data):
                    return
                self.has_begun = True
        except (OSError, ProtocolError) as error:
            owner.failed(error)
        else:
            count = self._process(self._splitter.split(data))
            seconds = self._pacer.pause_after(count, transport.received_at)
            if seconds and len(data) < READ_SIZE and self._pause is None and not owner.closed:
                self._ignore()
                self._pause = clock.call_later(self._loop, seconds, self._continue)

    def _process(self, found: Iterator[tuple[int, bytes]]) -> int:
        """Process packets and return how many. If reading is suspended meanwhile, the rest is kept for later."""
        owner, events = self._owner, self._events
        received, count = events.received, 0
        try:
            for head, body in found:
                count += 1
                if head & 0xF0 in _DATA:
                    if not owner.is_up:
                        raise ProtocolError("a packet before CONNACK")
                    received(head, body)
                    if not count % _BATCH:
                        events.received_all()
                        if self._suspended:
                            self._rest = found
                            break
                else:
                    owner.controlled(head, body)
                    if owner.closed:
                        break
        except ProtocolError as error:
            owner.failed(error)
        except Exception as error:
            logger.exception("%s: a packet cannot be processed; the connection ends", self._component)
            owner.failed(error)
        finally:
            if owner.is_up:
                events.received_all()
        return count


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
