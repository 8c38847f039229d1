"""The session of an instance with its broker: what both know of each other, beyond a single connection.

It publishes, hands received packets on, and keeps what a lost connection leaves for the next one. Packets go down to
the transport. The outcome of each message comes up once: for QoS 0 with the bytes that the transport has written, for
QoS 1 and 2 with the broker's last answer.

**Windows.** At most as many QoS 1 and 2 messages are unconfirmed as the broker allows: Receive Maximum of MQTT 5. With
3.1.1 brokers do not announce their limit, and disconnect a client that exceeds it. There the window is 20 for QoS 2,
which is mosquitto's limit, and 100 altogether, which is the limit of the strictest cloud brokers. ``max_inflight``
lowers all of them, and raises those of 3.1.1.

A full window of 16 or more is refilled once it is half empty: a message for each confirm would cost a system call and a
turn of both sides' loops for each message.

**Loss.** If the session may live on, handshakes are kept and finished after the next ``open``: PUBLISH, marked as a
duplicate, or PUBREL is sent again, in the old order, before any new message, and never more than the window allows.
QoS 2 is exactly once that way. If the broker has lost the session, they are sent again as new messages. If the session
ends with its connection, they fail with ``ConnectionLostError``, and the core sends them again: QoS 2 is then at least
once, since MQTT can do no more without a session.

**Deadlines.** A message that the core has settled meanwhile is not sent for the first time. One of QoS 2 that the
broker may have received is finished nevertheless: its packet id is in use until then.

**Bridged sessions.** A planned reconnect loses no message with QoS 1 or 2 if the broker keeps the session meanwhile.
With MQTT 5 it does so for every instance whose credentials may change: CONNECT asks for a session of one second, the
DISCONNECT of a planned reconnect extends it, and that of ``close`` ends it. A broker that refuses the credentials of
AUTH ends the connection, and keeps the session for that second. After any other loss a new session begins, as without
this. MQTT 3.1.1 has no such means: there ``clean_start=false`` keeps the session.
"""

from __future__ import annotations

import asyncio
import dataclasses
import math
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final

from messaging.adapter import Adapter, Events, PlannedLossError
from messaging.errors import (
    AuthenticationError,
    ConnectFailedError,
    ConnectionLostError,
    MessagingError,
    PayloadTooLargeError,
    PublishRefusedError,
    RedirectedError,
    UnroutableError,
)
from messaging.execution import clock
from messaging.model import Outgoing
from messaging_adapters.mqtt import capabilities, packets
from messaging_adapters.mqtt.connection import NetworkConnection, NetworkEvents
from messaging_adapters.mqtt.handshake import Connack, ConnectTarget, Grants, Will, reason_name
from messaging_adapters.mqtt.in_flight import InFlightWindow, PublishHandshake
from messaging_adapters.mqtt.inbound import Inbound
from messaging_adapters.mqtt.mapping import Mqtt5Codec, PublishCodec
from messaging_adapters.mqtt.router import Router
from messaging_adapters.mqtt.settings import MqttSettings
from messaging_adapters.mqtt.subscriptions import BrokerSubscriptions
from messaging_adapters.mqtt.transport import Transport

#: bytes that may wait for room in the socket's buffer before publishing pauses
HIGH_WATER: Final = 256 * 1024
#: seconds that a planned reconnect is delayed by unconfirmed messages
_PLANNED_TIMEOUT: Final = 1.0
#: seconds that the broker keeps the session for a planned reconnect
_BRIDGE: Final = 60
#: bytes of the payload of a will
_MAX_PAYLOAD: Final = 65_535
#: reasons of a refusing CONNACK that blame the will: topic invalid, payload format, retain and QoS not supported
_REFUSALS: Final = ("Topic name invalid", "Payload format invalid", "Retain not supported", "QoS not supported")


class Session(NetworkEvents):
    """The session of one instance. On the loop.

    Args:
        adapter: has the features; they are replaced once the broker is known.
        target: what CONNECT says.

    Attributes:
        target: replaced when the host, the credentials or the client id change.
        connection: between CONNACK and its end.
        opened_before: whether the instance was connected.
        will: goes with CONNECT.
        is_renewing: whether new credentials are being handed over on the connection.
    """

    def __init__(self, adapter: Adapter, settings: MqttSettings, target: ConnectTarget) -> None:
        self._adapter = adapter
        self._settings = settings
        #: those of a broker that restricts nothing
        self._announced = adapter.capabilities
        self.target = target
        self._codec = Mqtt5Codec() if settings.v5 else PublishCodec(enveloped=settings.envelope)
        self.router = Router(settings.persistent)
        self.inbound = Inbound(adapter.name, self.router, self._codec, settings)
        self.window = InFlightWindow(settings.v5, settings.max_inflight)
        self._grants = Grants()
        self.subscriptions = BrokerSubscriptions(
            adapter, settings, self._grants, self.router, self.inbound, self.window
        )
        self.will = ConnectWill(self._codec)
        self.connection: NetworkConnection | None = None
        #: of the connection, until it has ended
        self._transport: Transport | None = None
        self._connack = Connack(session_present=False)
        #: QoS 0 messages in the transport's buffer, with the value of ``Transport.sent`` at which they have left it
        self._unflushed: deque[tuple[int, Outgoing]] = deque()
        self._is_paused = False
        self._core: Events | None = None
        #: the session at the broker does not hold the subscriptions: the core has to subscribe again
        self._unsubscribed = True
        #: where the session of the last connection is
        self._place: tuple[str, int, str | None] | None = None
        self.opened_before = False
        #: a planned reconnect is under way for which the broker keeps a bridged session
        self._is_bridging = False
        self.is_renewing = False

    # --- connection

    async def open(self, core: Events) -> bool:
        """See ``Adapter.open``."""
        settings, target = self._settings, self.target
        clean = not settings.persistent if self.opened_before and settings.v5 else settings.clean_start
        connection = NetworkConnection(target, self)
        try:
            connack = await connection.connect(clean_start=clean and not self._is_bridging, will=self.will.current())
        except ConnectFailedError as error:
            self.will.connect_failed(error)
            raise
        except asyncio.CancelledError:
            # accepted, but too late
            self.lost(connection, ConnectionLostError(f"connecting to {target} was cancelled"))
            raise
        if isinstance(connection.error, RedirectedError):
            raise connection.error
        if connection.error is not None:
            raise ConnectFailedError(f"cannot connect to {target}: {connection.error}") from connection.error
        denied = self._grants.connected(target, connack, needs_session=settings.persistent)
        if denied is not None:
            await connection.close(self._last_expiry)
            self.lost(connection, ConnectionLostError(str(denied)))
            raise denied
        asks_session = settings.persistent and self.opened_before
        self._grants.resumed(target, asked=asks_session, granted=connack.session_present)
        self._core = core
        self.opened_before = True
        resumed, self._unsubscribed = not self._unsubscribed, False
        self.will.registered()
        return resumed

    def connected(self, connection: NetworkConnection, connack: Connack) -> None:
        """See ``connection.NetworkEvents``."""
        self.connection, self._transport = connection, connection.transport
        self._is_bridging = False
        await_claims = connack.session_present
        is_old = self._is_left(connack)
        of_earlier = await_claims and (is_old or not self.opened_before)
        if connack.assigned_id is not None:
            # from now on this client's own: with it the session can be resumed
            self.target = dataclasses.replace(self.target, client_id=connack.assigned_id)
        # the next host may lack other features than the last one
        self._adapter.capabilities = capabilities.restricted(
            self._announced, self._settings, connack, self.target.client_id
        )
        if is_old:
            connack = dataclasses.replace(connack, session_present=False)
        self._connack = connack
        self.router.copies.connected(is_resumed=connack.session_present)
        if not connack.session_present or self._unsubscribed:
            self.inbound.reset()
            self._unsubscribed = True
        self.inbound.connected(connection.transport, connack.session_present)
        if await_claims:
            self.inbound.leftovers.await_claims(of_earlier=of_earlier)
        self._is_paused = False
        self._codec.connected(connack.topic_alias_maximum)
        self.window.connected(connack, connection.requests.pending)
        self._resume()
        self.subscriptions.connected(connection, connack)

    def _is_left(self, connack: Connack) -> bool:
        """Return whether the session at the target is not the one of the last connection, or may not be.

        A session of this client at another host is that of an earlier connection to it, unless the brokers share their
        sessions, which a client cannot know. Its packet ids stand for other messages. So the subscriptions are made
        again, the unconfirmed messages are sent again as new ones, and its unsettled messages arrive as new ones.
        """
        before, self._place = self._place, (self.target.host, self.target.port, self.target.address)
        return connack.session_present and before is not None and before != self._place

    def lost(self, connection: NetworkConnection, error: ConnectionLostError) -> None:
        """See ``connection.NetworkEvents``."""
        if connection is not self.connection:
            return
        self.connection = None
        if self.is_renewing and error.code in packets.CREDENTIALS_REFUSED:
            # the host and its session are in order, and the next connection has other credentials
            error = PlannedLossError(str(error), code=error.code, detail=error.detail)
            self._begin_planned()
        persistent = self._settings.persistent or self._is_bridging
        self.subscriptions.disconnected()
        self.inbound.disconnected()
        if not persistent:
            self.inbound.forget()
        self._disconnected(error, resumable=persistent)
        core, self._core = self._core, None
        if core is not None:
            core.lost(error)

    def _disconnected(self, error: ConnectionLostError, *, resumable: bool) -> None:
        """Fail messages of a lost connection; with ``resumable`` those of QoS 0 only."""
        self._transport = None
        unflushed, self._unflushed = self._unflushed, deque()
        for _, outgoing in unflushed:
            outgoing.fail(error)
        for handshake in () if resumable else self.window.drop():
            handshake.outgoing.fail(error)
        self.window.changed.set()

    async def end_as_planned(self, purpose: str, is_wanted: Callable[[], bool]) -> None:
        """End the connection in good order, so that the core makes another one.

        Unconfirmed messages have a moment to be confirmed first. If that is cancelled, publishing goes on.
        """
        self._is_paused = True
        try:
            async with clock.timeout(_PLANNED_TIMEOUT):
                while self._transport is not None and (self.window.handshakes or self._unflushed):
                    await self.window.progress()
        except TimeoutError:
            pass
        except asyncio.CancelledError:
            self._is_paused = False
            self.window.changed.set()
            raise
        connection = self.connection
        if connection is None or not is_wanted():  # lost, or lost and connected again, meanwhile
            return
        # an answer after DISCONNECT would be lost: it is sent when the broker sends its message again
        self.inbound.disconnected()
        expiry = self._begin_planned()
        try:
            await connection.close(expiry, takes_late=True)
        finally:
            self.lost(connection, PlannedLossError(f"connection to {self.target} ended {purpose}"))

    def _begin_planned(self) -> int | None:
        """Have the next connection resume the session. Return the session expiry interval of DISCONNECT."""
        self._is_bridging = self._settings.bridges_session
        if not self._is_bridging:
            return None
        # until the next CONNACK
        self._adapter.capabilities = dataclasses.replace(self._adapter.capabilities, keeps_session=True)
        return _BRIDGE

    @property
    def _last_expiry(self) -> int | None:
        """The session expiry interval of a DISCONNECT that ends the instance; ``None`` for no change."""
        return 0 if self._settings.bridges_session else None

    async def close(self) -> None:
        """See ``Adapter.close``. No unsettled message is settled: a session that lives on delivers it again."""
        self._core = None
        connection, self.connection = self.connection, None
        self.inbound.close()  # before subscriptions end: what was left of them is for the session's next connection
        self.subscriptions.end_orphans()
        self.subscriptions.disconnected()
        self._is_paused = True
        if connection is not None:
            await connection.close(self._last_expiry)
            self._disconnected(ConnectionLostError(f"connection to {self.target} closed"), resumable=True)

    # --- publishing

    async def publish(self, batch: Sequence[Outgoing]) -> None:
        """See ``Adapter.publish``."""
        for outgoing in batch:
            qos = int(outgoing.plan.options.qos)
            while self._must_wait(qos):
                await self.window.progress()
            transport = self._transport
            if transport is None:
                outgoing.fail(ConnectionLostError(f"connection to {self.target} lost before the message was sent"))
            elif not outgoing.settled:
                try:
                    self._send(transport, outgoing, qos)
                except MessagingError as error:
                    self._codec.unsent()
                    outgoing.fail(error)

    def _must_wait(self, qos: int) -> bool:
        """Return whether the next message has to wait. Without a connection it does not: it fails."""
        transport = self._transport
        if transport is not None and transport.unsent > HIGH_WATER:
            transport.flush()  # which may end the connection
            transport = self._transport
            if transport is not None and transport.unsent > HIGH_WATER:
                return True
        if transport is None:
            return False
        return self._is_paused or (qos > 0 and (len(self.window.unresumed) > 0 or not self.window.fits()))

    def _send(self, transport: Transport, outgoing: Outgoing, qos: int) -> None:
        connack = self._connack
        if qos > connack.maximum_qos:
            raise PublishRefusedError(f"{self.target} takes no QoS {qos}; at most {connack.maximum_qos}")
        if outgoing.plan.options.retain and not connack.retain:
            raise PublishRefusedError(f"{self.target} retains no messages")
        packet_id = self.window.next_id() if qos else 0
        frame = self._codec.frame(outgoing, outgoing.payload, qos, packet_id)
        if len(frame) > connack.maximum_packet_size:
            size = len(outgoing.payload)
            limit = connack.maximum_packet_size - (len(frame) - size)
            raise PayloadTooLargeError(size, limit, f"{self.target}, with this topic and these properties")
        # from here on it cannot be cancelled
        outgoing.sent()
        if qos:
            self.window.begin(PublishHandshake(outgoing, qos, packet_id))
            transport.send(frame)
        else:
            self._unflushed.append((transport.send(frame), outgoing))

    def _resume(self) -> None:
        """Go on with the handshakes of lost connections, as far as the window allows."""
        window, session_present = self.window, self._connack.session_present
        while self._transport is not None and window.unresumed and window.fits():
            handshake = window.unresumed.popleft()
            if not handshake.outgoing.settled and not handshake.released:
                handshake.outgoing.prepare()
            if handshake.outgoing.settled and (handshake.qos == 1 or not session_present):
                continue
            window.begin(handshake)
            if handshake.released:
                self._transport.send(packets.acknowledgement(packets.PUBREL, handshake.id))
            else:
                frame = self._codec.frame(handshake.outgoing, handshake.payload, handshake.qos, handshake.id)
                if session_present:
                    frame = bytes((frame[0] | packets.DUP,)) + frame[1:]
                self._transport.send(frame)

    # --- events of the connection

    def uses(self, packet_id: int) -> bool:
        """See ``connection.NetworkEvents``."""
        window = self.window
        return packet_id in window.handshakes or any(each.id == packet_id for each in window.unresumed)

    def received(self, head: int, body: bytes) -> None:
        """See ``connection.NetworkEvents``."""
        kind = head & 0xF0
        if kind == packets.PUBLISH:
            self.inbound.receive(head, body)
        elif kind == packets.PUBREL:
            self.inbound.answers.released(body)
        else:
            self._acknowledged(kind, body)

    def received_all(self) -> None:
        """See ``connection.NetworkEvents``."""
        self.inbound.hand_over()

    def written(self, sent: int) -> None:
        """See ``connection.NetworkEvents``. Confirms the QoS 0 messages that were handed to the socket."""
        unflushed = self._unflushed
        while unflushed and unflushed[0][0] <= sent:
            unflushed.popleft()[1].confirm()
        self.window.changed.set()

    def _acknowledged(self, kind: int, body: bytes) -> None:
        """Process a PUBACK, PUBREC or PUBCOMP."""
        packet_id, reason = packets.parse_acknowledgement(body)
        handshake = self.window.handshakes.get(packet_id)
        if handshake is None or (handshake.qos == 1 and kind != packets.PUBACK):
            if kind == packets.PUBREC and reason < packets.FAILURE and self._transport is not None:
                # of an unknown message: with PUBREL the broker forgets it, too
                self._transport.answer(packets.acknowledgement(packets.PUBREL, packet_id))
            return
        if len(body) > 2 and not handshake.released:
            refusal = _refusal(self.target, handshake.outgoing, reason, body)
            if refusal is not None:
                handshake.outgoing.fail(refusal)
        if kind == packets.PUBREC and (reason < packets.FAILURE or handshake.released):
            handshake.released = True
            if self._transport is not None:
                self._transport.answer(packets.acknowledgement(packets.PUBREL, packet_id))
        else:
            # a PUBACK may end QoS 2, too: RabbitMQ downgrades it to QoS 1
            self.window.end(handshake)
            if self.window.unresumed:
                self._resume()
            handshake.outgoing.confirm()  # unless it has failed


def _refusal(target: ConnectTarget, outgoing: Outgoing, reason: int, body: bytes) -> PublishRefusedError | None:
    """Return the error of a message whose answer refuses it, or is malformed; the connection goes on."""
    channel = outgoing.plan.channel
    try:
        detail = target.showable(packets.reason_string(body))
    except packets.ProtocolError as error:
        detail = str(error)
        if reason < packets.FAILURE:
            return PublishRefusedError(f"{target} answered the message on {channel!r} with {detail}")
    if reason < packets.FAILURE:
        if reason != packets.NO_MATCHING_SUBSCRIBERS or not outgoing.plan.options.mandatory:
            return None
        return UnroutableError(f"channel {channel!r} has no subscribers at {target}", code=reason, detail=detail)
    text = f"{target} refused the message on {channel!r}: {reason_name(reason, detail)}"
    return PublishRefusedError(text, code=reason, detail=detail)


class ConnectWill:
    """The will that CONNECT carries.

    Attributes:
        will: the will; ``None`` for none.
    """

    def __init__(self, codec: PublishCodec) -> None:
        self._codec = codec
        #: the message, until the broker has registered it
        self._outgoing: Outgoing | None = None
        #: whether the instance has connected without it
        self._is_trial = True
        self.will: Will | None = None

    @property
    def is_pending(self) -> bool:
        """Whether the broker has not registered it yet."""
        return self._outgoing is not None

    def set(self, outgoing: Outgoing, *, is_trial: bool) -> bool:
        """Set the will. Return whether it fits; otherwise it has failed.

        With ``is_trial`` a connection that is refused with it is tried without it.
        """
        payload, properties = self._codec.will(outgoing)
        if len(payload) > _MAX_PAYLOAD:
            outgoing.fail(PayloadTooLargeError(len(payload), _MAX_PAYLOAD, "a last will in MQTT"))
            return False
        options = outgoing.plan.options
        delay = math.ceil(options.custom.get(capabilities.WILL_DELAY, 0))
        channel = outgoing.plan.channel or ""
        self.will = Will(channel, payload, int(options.qos), options.retain, properties, delay)
        self._outgoing = outgoing
        self._is_trial = is_trial
        return True

    def current(self) -> Will | None:
        """Return the will for the next CONNECT: none if its deadline has passed meanwhile."""
        if self._outgoing is not None and self._outgoing.settled:
            self.will = self._outgoing = None
        return self.will

    def registered(self) -> None:
        """Confirm the will: the broker has accepted the connection."""
        if self._outgoing is not None:
            self._outgoing.confirm()
            self._outgoing = None

    def connect_failed(self, error: ConnectFailedError) -> None:
        """Drop a new will that is, or may be, the reason why the broker refused the connection."""
        outgoing = self._outgoing
        suspicious = isinstance(error, AuthenticationError) or any(reason in str(error) for reason in _REFUSALS)
        if outgoing is not None and suspicious and self._is_trial:
            self.will = self._outgoing = None
            outgoing.fail(PublishRefusedError(f"the last will is not registered: {error}"))
