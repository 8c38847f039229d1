"""One connection: paho-mqtt on the engine's loop.

paho is driven from outside, with its public API only: ``connect`` on a thread of the executor, everything else on the
loop. It reads what :class:`~adapters.mqtt.wire.Wire` feeds it and writes into its buffer, which is flushed once per
turn of the loop. It makes CONNECT, SUBSCRIBE, UNSUBSCRIBE and DISCONNECT, and reads CONNACK and DISCONNECT; PUBLISH,
all answers and the pings go past it (see the package). For each connection there is a client of its own, so nothing of
an earlier one is ever left in it: no queue, no half-read packet, no message that it would send again by itself.

paho's callbacks run while it holds a lock and is in the middle of a packet, and what they raise would leave it there.
So they only note what happened; it is acted on when paho has returned.

**Keepalive.** A ping goes out when nothing was received, or nothing sent, for three quarters of the interval, which may
be the broker's; a broker that does not answer one for as long again is gone. So a dead peer is noticed within twice the
interval, whatever this side is doing meanwhile. A ping may stand behind megabytes, here and in the kernel: as long as
the other end takes some of them, it is not dead but slow.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import time
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

import paho.mqtt.client as mqtt
from paho.mqtt.packettypes import PacketTypes

from adapters.mqtt import handshake, packets
from adapters.mqtt.pacing import ReadPacer
from adapters.mqtt.packets import LimitExceededError, ProtocolError
from adapters.mqtt.wire import READ_SIZE, Dialer, Wire
from messaging.connection import tls
from messaging.errors import BrokerError, ConnectFailedError, ConnectionLostError, TakenOverError

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterator

    from paho.mqtt.properties import Properties as PahoProperties
    from paho.mqtt.reasoncodes import ReasonCode
    from paho.mqtt.subscribeoptions import SubscribeOptions

    from adapters.mqtt.handshake import Connack, Target, Will

logger = logging.getLogger(__name__)

#: how often keepalive is looked after at least, seconds
_TICK: Final = 1.0
#: part of the keepalive interval after which silence is answered by a ping, and a ping is given up
_PATIENCE: Final = 0.75
#: how long a broker may take to close after DISCONNECT, seconds
_CLOSE_TIMEOUT: Final = 1.0
#: bytes of answers to the broker's packets that it may leave unread: more than those to all packet ids there are
_UNREAD: Final = 2 * 1024 * 1024
#: packets handed over at a time
_HANDFUL: Final = 256
#: return codes of MQTT 3.1.1 that paho would act on by itself, and the reason codes that mean the same
_NOT_FOR_PAHO: Final = {b"\x01": 0x84, b"\x02": 0x85}
#: packets that are the events' business
_DATA: Final = frozenset((packets.PUBLISH, packets.PUBACK, packets.PUBREC, packets.PUBREL, packets.PUBCOMP))


class Answer(NamedTuple):
    """What the broker answered to SUBSCRIBE or UNSUBSCRIBE of one filter."""

    code: int
    #: its reason string
    detail: str | None


class Events(Protocol):
    """What a link tells, on the loop."""

    def connected(self, link: Link, connack: Connack) -> None:
        """Before anything else that follows CONNACK is looked at."""

    def received(self, head: int, body: bytes) -> None:
        """A PUBLISH, or an acknowledgement. May raise ``ProtocolError``."""

    def received_all(self) -> None:
        """All that had arrived was handed over."""

    def written(self, link: Link) -> None:
        """``link.sent`` grew."""

    def lost(self, link: Link, error: ConnectionLostError) -> None:
        """The connection ended, after ``connected`` and without :meth:`Link.close`. Called once."""


class Link:
    """A connection to the broker. Everything runs on the loop."""

    def __init__(self, target: Target, events: Events) -> None:
        self._target = target
        self._events = events
        self._loop = asyncio.get_running_loop()
        self._client: mqtt.Client | None = None
        self._wire: Wire | None = None
        self._dialer = Dialer()
        self._connack: asyncio.Future[Connack] = self._loop.create_future()
        #: packet id -> answer, of SUBSCRIBE and UNSUBSCRIBE
        self._answers: dict[int, asyncio.Future[Answer]] = {}
        #: filter -> answer, of UNSUBSCRIBE
        self._ending: dict[str, asyncio.Future[Answer]] = {}
        self._last_id = 0
        self._timer: asyncio.TimerHandle | None = None
        #: seconds; the broker's, if it has one
        self._keepalive = float(target.keepalive)
        #: the value of ``sent`` from which on a ping is out, and since when that is known, or has been waited for
        self._ping: int | None = None
        self._ping_at = 0.0
        #: how far the line was with what stands before the ping
        self._delivered = 0
        self._flush_due = False
        self._writing = False
        #: whether the loop tells when there is something to read
        self._listening = False
        #: nothing is read for now; what was, and is not processed yet
        self._suspended = False
        self._rest: Iterator[tuple[int, bytes]] | None = None
        #: nothing is read before this
        self._pause: asyncio.TimerHandle | None = None
        self._pacer = ReadPacer()
        #: whether anything has arrived
        self._greeted = False
        #: bytes of answers queued so far; of those, the socket has :attr:`_taken`, and :attr:`_marked` once it has
        #: everything up to :attr:`_mark`
        self._queued = self._taken = self._marked = self._mark = 0
        #: between CONNACK and the end
        self._is_up = False
        #: set while closing in good order: resolved at the end of the stream
        self._finished: asyncio.Future[None] | None = None
        #: noted by paho's callbacks
        self._accepted: Connack | None = None
        self._ended: BrokerError | None = None
        #: why it ended, if it did
        self.error: BrokerError | None = None
        self.closed = False

    # --- connecting

    async def connect(self, *, clean_start: bool, will: Will | None) -> Connack:
        """Connect and wait for CONNACK. Leaves nothing behind if it fails or is cancelled.

        Raises:
            AuthenticationError: the broker refused the credentials.
            ConnectFailedError: anything else.
        """
        target, dialer = self._target, self._dialer
        client = self._client = handshake.new_client(target, dialer, clean_start=clean_start, will=will)
        client.on_connect = self._on_connect
        client.on_disconnect = self._on_disconnect
        # with this, paho only queues what it has to send
        client.on_socket_register_write = self._on_register_write
        dial = functools.partial(handshake.dial, client, target, dialer, clean_start=clean_start)
        try:
            try:
                await self._loop.run_in_executor(None, dial)
            except ConnectFailedError as error:
                raise ConnectFailedError(f"cannot connect to {target}: {error}") from error.__cause__
            except (OSError, ValueError) as error:
                explained = None
                if target.tls is not None and isinstance(error, OSError):
                    explained = tls.explain(error, *target.schemes)
                reason = explained or getattr(error, "strerror", None) or str(error) or type(error).__name__
                raise ConnectFailedError(f"cannot connect to {target}: {reason}") from error
            wire = self._wire = dialer.wire
            assert wire is not None  # noqa: S101  # paho connected, so it has its socket
            self._listen()
            self._tick()
            self.flush()
            return await self._connack
        except BaseException:
            self._dispose()
            raise

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
            who = "disconnected this client" if is_told else "connection lost"
            detail = handshake.detail_of(self._target, properties)
            text = f"{self._target} {who}: {handshake.with_detail(str(reason), detail)}"
            code = reason.value if is_told else None
            kind = TakenOverError if code == packets.SESSION_TAKEN_OVER else ConnectionLostError
            self._ended = kind(text, code=code, detail=detail)

    def _on_register_write(self, _client: Any, _userdata: Any, _sock: Any) -> None:
        if self._wire is not None:  # else it is CONNECT, on the connecting thread
            self._schedule_flush()

    # --- reading

    def _listen(self) -> None:
        """Have the loop tell when there is something to read, unless nothing is to be read now."""
        if self._wire is not None and not (self._listening or self._suspended or self._pause):
            self._listening = True
            self._loop.add_reader(self._wire.fileno(), self._on_readable)

    def _ignore(self) -> None:
        if self._wire is not None and self._listening:
            self._listening = False
            self._loop.remove_reader(self._wire.fileno())

    def suspend_reading(self) -> None:
        """Read and process nothing until :meth:`resume_reading`."""
        if self._finished is None:
            self._suspended = True
            self._ignore()

    def resume_reading(self) -> None:
        """Go on with what was read, then read again."""
        self._suspended = False
        rest, self._rest = self._rest, None
        if rest is not None and self._wire is not None:
            self._process(self._wire, rest)
        if self._pause is None and not self._suspended:
            # most likely there is something: to look is cheaper than to have the loop watch, and be stopped again
            self._pause = self._loop.call_later(0, self._go_on)

    def _go_on(self) -> None:
        self._pause = None
        self._on_readable()
        self._listen()

    def _on_readable(self) -> None:
        wire = self._wire
        if wire is None or self._suspended:
            return
        try:
            data = wire.receive()
            if not wire.is_flushed:  # a WebSocket has answered a ping
                self._schedule_flush()
            if data is None:
                return
            if not data:
                self._end_of_stream()
                return
            if self._finished is not None:
                return  # closing: what still arrives would come too late
            if not self._greeted:
                # at once: what another protocol answers may look like the beginning of a long packet
                if data[0] & 0xF0 != packets.CONNACK:
                    hint = tls.wants_tls(data, *self._target.schemes) if self._target.tls is None else None
                    if hint is not None:
                        self._end(ConnectFailedError(f"cannot connect to {self._target}: {hint}"))
                        return
                    raise ProtocolError("its first packet is not CONNACK: it may be no port for MQTT")
                self._greeted = True
        except OSError as error:
            self._broke(error)
        except ProtocolError as error:
            self._broken(wire, error)
        else:
            count = self._process(wire, wire.split(data))
            seconds = self._pacer.pause_after(count, wire.received_at)
            if seconds and len(data) < READ_SIZE and self._pause is None and not self.closed:
                self._ignore()
                self._pause = self._loop.call_later(seconds, self._go_on)

    def _process(self, wire: Wire, found: Iterator[tuple[int, bytes]]) -> int:
        """Process packets, and say how many; should somebody suspend reading meanwhile, the rest of them later."""
        count = 0
        try:
            for head, body in found:
                count += 1
                if head & 0xF0 in _DATA:
                    if not self._is_up:
                        raise ProtocolError("a packet before CONNACK")
                    self._events.received(head, body)
                    if not count % _HANDFUL:
                        self._events.received_all()
                        if self._suspended:
                            self._rest = found
                            break
                else:
                    self._control(wire, head, body)
                    if self.closed:
                        break
        except ProtocolError as error:
            self._broken(wire, error)
        except Exception as error:
            logger.exception("cannot process what %s sent", self._target)
            self._end(ConnectionLostError(f"cannot process what {self._target} sent: {type(error).__name__}"), error)
        finally:
            if self._is_up:
                self._events.received_all()
        return count

    def _end_of_stream(self) -> None:
        if self._finished is not None:
            self._ignore()
            if not self._finished.done():
                self._finished.set_result(None)
            return
        if self._is_up:
            self._end(ConnectionLostError(f"connection to {self._target} lost: closed by the broker"))
        else:
            self._end(self._unanswered())

    def _broke(self, error: OSError) -> None:
        """The socket failed."""
        reason = error.strerror or str(error)
        if self._greeted:
            self._end(ConnectionLostError(f"connection to {self._target} lost: {reason}"), error)
        else:
            self._end(self._unanswered(f" ({reason})"), error)

    def _unanswered(self, reason: str = "") -> ConnectFailedError:
        """The connection ended before the broker said anything: what it may want instead."""
        hints = []
        if self._target.v5:
            hints.append("not speak MQTT 5: try version=3.1.1")
        if self._target.tls is None:
            secure, plain = self._target.schemes
            hints.append(f"want TLS: try {secure}:// instead of {plain}://")
        hint = f"; it may {', or '.join(hints)}" if hints else ""
        return ConnectFailedError(f"{self._target} closed the connection without an answer{reason}{hint}")

    def _broken(self, wire: Wire, error: ProtocolError) -> None:
        """End the connection to a broker that broke the protocol; tell it why, if it can be told (MQTT 5, 4.13)."""
        if self._is_up and self._target.v5:
            wire.send(packets.disconnect(error.code))
            with contextlib.suppress(OSError):
                wire.flush()
        verdict = "exceeded a limit" if isinstance(error, LimitExceededError) else "broke the protocol"
        self._end(ConnectionLostError(f"{self._target} {verdict}: {error}"), error)

    def _control(self, wire: Wire, head: int, body: bytes) -> None:
        """An answer, or something for paho to process; then act on what it told."""
        kind = head & 0xF0
        if self._is_up and kind in (packets.SUBACK, packets.UNSUBACK):
            self._answered(kind, body)
            return
        if self._is_up and kind == packets.PINGRESP:
            return  # that something came is what counts
        if self._is_up and kind == packets.CONNACK:
            raise ProtocolError("a second CONNACK")  # MQTT-3.2.0-2; paho would begin anew
        if kind == packets.CONNACK and not self._target.v5 and body[1:2] in _NOT_FOR_PAHO:
            # it would call them protocol errors, the second one if there is no client id
            code = _NOT_FOR_PAHO[body[1:2]]
            self._end(handshake.refusal(self._target, handshake.reason_name(code), code))
            return
        given = (body[1:2] if kind == packets.CONNACK else body[:1]) if self._target.v5 else b""
        if given and given[0] >= packets.FAILURE and not handshake.is_listed(kind, given[0]):
            # neither are those the specification does not list
            self._end(handshake.unlisted(self._target, kind, given[0]))
            return
        wire.feed(head, body)
        while wire.pending() and not self.closed:
            self._drive(mqtt.Client.loop_read)
        if self._accepted is not None:
            connack, self._accepted = self._accepted, None
            self._is_up = True
            if connack.keepalive is not None:
                self._keepalive = float(connack.keepalive)
            self._events.connected(self, connack)
            if not self._connack.done():
                self._connack.set_result(connack)

    def _drive(self, step: Callable[[mqtt.Client], object]) -> None:
        """Let paho take a step, and end the connection if that was its end."""
        if self._client is None:
            return
        try:
            step(self._client)
        except Exception as error:  # of paho, over a packet it did not expect
            logger.exception("paho failed on %s", self._target)
            self._ended = ConnectionLostError(f"paho failed on {self._target}: {type(error).__name__}")
        if self._ended is not None and self._finished is None:
            self._end(self._ended)

    def _tick(self) -> None:
        # uvloop calls a reader no more after data and a reset came together: look whether there is an end to see
        self._on_readable()
        if self._wire is not None and self._is_up and self._keepalive and self._finished is None:
            self._keep_alive(self._wire)
        if not self.closed:
            self._timer = self._loop.call_later(min(_TICK, self._keepalive / 8 or _TICK), self._tick)

    def _keep_alive(self, wire: Wire) -> None:
        now, patience = time.monotonic(), self._keepalive * _PATIENCE
        if self._ping is None:
            if now - min(wire.received_at, wire.sent_at) >= patience:
                self._ping, self._ping_at = self.send(packets.PING), now
                self._delivered = wire.delivered
        elif wire.received_at > self._ping_at:
            self._ping = None
        elif self._delivered < self._ping and wire.delivered > self._delivered:
            # it stands behind what is slow to leave: as long as that goes on, so does the connection
            self._delivered, self._ping_at = wire.delivered, now
        if self._ping is not None and now - self._ping_at >= patience:
            self._end(ConnectionLostError(f"connection to {self._target} lost: no answer to a ping for {patience:g} s"))

    # --- writing

    @property
    def unsent(self) -> int:
        """Bytes waiting for room in the socket's buffer."""
        return self._wire.unsent if self._wire is not None else 0

    @property
    def sent(self) -> int:
        """Bytes handed to the socket so far, those of paho included."""
        return self._wire.sent if self._wire is not None else 0

    def send(self, frame: bytes) -> int:
        """Queue a packet for the next flush.

        Returns:
            The value of :attr:`sent` from which on it is with the socket.
        """
        wire = self._wire
        if wire is None or self._finished is not None:
            return 0
        wire.send(frame)
        if not self._flush_due:
            self._schedule_flush()
        return wire.sent + wire.unsent

    def answer(self, frame: bytes) -> None:
        """Queue an answer to a packet. A broker that sends packets and reads no answers is left."""
        self._queued += len(frame)
        self.send(frame)

    def _check_answers(self, wire: Wire) -> None:
        if wire.sent >= self._mark:
            self._taken, self._marked, self._mark = self._marked, self._queued, wire.sent + wire.unsent
        unread = self._queued - self._taken
        if unread > _UNREAD and self._is_up:
            self._broken(wire, LimitExceededError(f"{unread} bytes of answers to its packets wait for it to read them"))

    def _schedule_flush(self) -> None:
        if not self._flush_due:
            self._flush_due = True
            self._loop.call_soon(self.flush)

    def flush(self) -> None:
        """Hand what is queued to the socket, as far as it takes it."""
        self._flush_due = False
        wire, client = self._wire, self._client
        if wire is None or client is None:
            return
        if client.want_write():
            self._drive(mqtt.Client.loop_write)
        try:
            wire.flush()
        except OSError as error:
            # what the broker sent before it closed may say why
            self._on_readable()
            self._broke(error)
            return
        if self._is_up:
            self._events.written(self)
        if self._queued:
            self._check_answers(wire)
            if self.closed:
                return
        if wire.is_flushed is self._writing:
            self._writing = not self._writing
            if self._writing:
                self._loop.add_writer(wire.fileno(), self.flush)
            else:
                self._loop.remove_writer(wire.fileno())
        if self._finished is not None and wire.is_flushed:
            wire.finish()

    # --- subscribing

    @property
    def next_id(self) -> int:
        """The packet id that paho will use next: it counts, and only we make it count."""
        return self._last_id % 65_535 + 1

    @property
    def ids(self) -> Container[int]:
        """Packet ids of SUBSCRIBE and UNSUBSCRIBE that the broker has not answered."""
        return self._answers

    async def subscribe(self, topic_filter: str, options: SubscribeOptions, identifier: int | None) -> Answer:
        """Subscribe, and return the broker's answer.

        Raises:
            ConnectionLostError: the connection ended before the answer.
        """
        client = self._require_client()
        if self._target.v5:
            properties = handshake.new_properties(PacketTypes.SUBSCRIBE)
            if identifier is not None:
                properties.SubscriptionIdentifier = identifier
            _, mid = client.subscribe(topic_filter, options=options, properties=properties)
        else:
            _, mid = client.subscribe(topic_filter, options.QoS)
        return await self._expect_answer(mid)

    async def unsubscribe(self, topic_filter: str) -> None:
        """Unsubscribe and wait for the answer. Raises as :meth:`subscribe`."""
        answer = await asyncio.shield(self._unsubscribe(self._require_client(), topic_filter))
        if answer.code >= packets.FAILURE:
            reason = handshake.reason_name(answer.code, answer.detail)
            logger.warning("%s did not end the subscription to %r: %s", self._target, topic_filter, reason)

    def unsubscribe_soon(self, topic_filter: str) -> None:
        """Unsubscribe without waiting for the answer."""
        if self._client is not None:
            self._unsubscribe(self._client, topic_filter)

    def _unsubscribe(self, client: mqtt.Client, topic_filter: str) -> asyncio.Future[Answer]:
        _, mid = client.unsubscribe(topic_filter)
        answer = self._ending[topic_filter] = self._expect_answer(mid)

        def answered(_: asyncio.Future[Answer]) -> None:
            answer.exception()  # nobody has to look at it
            if self._ending.get(topic_filter) is answer:
                del self._ending[topic_filter]

        answer.add_done_callback(answered)
        return answer

    async def unsubscribed(self, topic_filter: str) -> None:
        """Wait for the answer to an UNSUBSCRIBE of the filter, if one is on its way. Raises as :meth:`subscribe`."""
        answer = self._ending.get(topic_filter)
        if answer is not None:
            await asyncio.shield(answer)

    def _require_client(self) -> mqtt.Client:
        if self._client is None or self._finished is not None:
            raise ConnectionLostError(f"no connection to {self._target}")
        return self._client

    def _expect_answer(self, mid: int | None) -> asyncio.Future[Answer]:
        answer: asyncio.Future[Answer] = self._loop.create_future()
        if mid is not None:
            self._last_id = mid
            # stays there until the broker has answered, even if nobody waits any more: the id is in use
            self._answers[mid] = answer
        return answer

    def _answered(self, kind: int, body: bytes) -> None:
        packet_id, codes, detail = packets.parse_answer(body, self._target.v5)
        if kind == packets.SUBACK and len(codes) != 1:
            raise ProtocolError(f"SUBACK with {len(codes)} reason codes for one subscription")
        answer = self._answers.pop(packet_id, None)
        if answer is not None and not answer.done():
            answer.set_result(Answer(codes[0] if codes else 0, self._target.showable(detail)))

    # --- ending

    async def close(self) -> None:
        """Send DISCONNECT, and wait a moment until the broker has closed. Idempotent; does not raise.

        Closing at once could reset the connection, and the broker would take that for a loss and publish the will.
        """
        if not self._is_up or self.closed or self._finished is not None:
            self._dispose()
            return
        if self._pause is not None:
            self._pause.cancel()
            self._pause = None
        self.resume_reading()
        self._finished = self._loop.create_future()
        try:
            self._drive(mqtt.Client.disconnect)
            self.flush()
            await asyncio.wait([self._finished], timeout=_CLOSE_TIMEOUT)
        finally:
            self._dispose()

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
            if not isinstance(error, ConnectFailedError):
                cause, error = error, ConnectFailedError(f"cannot connect: {error}")
                error.__cause__ = cause
            self._connack.set_exception(error)
        elif isinstance(error, ConnectionLostError):
            self._events.lost(self, error)

    def _dispose(self) -> None:
        """Give everything back. Idempotent."""
        if not self.closed and self._wire is not None:
            self._ignore()
            self._loop.remove_writer(self._wire.fileno())
        if self._pause is not None:
            self._pause.cancel()
            self._pause = None
        self.closed = True
        self._is_up = False
        self._rest = None
        if self._timer is not None:
            self._timer.cancel()
        self._dialer.cancel()
        self._client = self._wire = None
        answers, self._answers = self._answers, {}
        for answer in answers.values():
            if not answer.done():
                answer.set_exception(ConnectionLostError(f"connection to {self._target} lost before it answered"))
