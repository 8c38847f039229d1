"""The adapter: settings, features, and what connects the parts of this package."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import logging
import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Final
from urllib.parse import quote

from adapters.mqtt import mapping, packets, sharing
from adapters.mqtt import settings as options
from adapters.mqtt.inbound import Inbound
from adapters.mqtt.router import Route, Router, filter_of
from adapters.mqtt.settings import MqttSettings
from messaging.adapter import CORE_FEATURES, REPLY_FEATURES, Adapter, PlannedLossError, ReplyAddress
from messaging.connection.tls import client_context
from messaging.errors import (
    AuthenticationError,
    ConnectFailedError,
    ConnectionLostError,
    InvalidChannelError,
    InvalidExtensionError,
    MissingExtraError,
    PayloadTooLargeError,
    PublishRefusedError,
    SubscriptionRefusedError,
)
from messaging.model import REPEATED_TEXT, Features, boolean, channels, integer, seconds

if TYPE_CHECKING:
    from collections.abc import Sequence

    from adapters.mqtt.handshake import Connack, Will
    from adapters.mqtt.link import Link
    from adapters.mqtt.router import Stream
    from messaging.adapter import Sink, SubscriptionSpec
    from messaging.errors import MessagingError
    from messaging.model import BrokerUrl, MessageContext, Outgoing, PublishOptions
    from messaging.model.settings import Settings

logger = logging.getLogger(__name__)

#: how long messages of a resumed session wait for those who subscribe to them, seconds
CLAIM_TIMEOUT: Final = 30.0
#: how long a new connection for the will waits for confirms, seconds
_WILL_PATIENCE: Final = 1.0
#: bytes of a PUBLISH packet that are not payload, at least: type, length, topic of one character
_LEAST_HEADER: Final = 5
#: reason codes of CONNACK that blame the will: topic invalid, payload format, retain and QoS not supported
_WILL_REFUSED: Final = ("Topic name invalid", "Payload format invalid", "Retain not supported", "QoS not supported")

_FEATURES: Final = CORE_FEATURES | frozenset(
    {
        Features.PUBLISH_SUBSCRIBE,
        Features.POINT_TO_POINT,
        Features.WILDCARDS,
        Features.EXTENSION_GUARANTEED_DELIVERY,
        Features.EXTENSION_LAST_WILL,
        Features.EXTENSION_QOS,
        Features.EXTENSION_RETAIN,
        Features.EXTENSION_QUEUE,
        mapping.PACKET_ID,
    }
)
# extensions of MQTT 5 alone
#: float seconds, beside ``lastWill``: how long after the loss the will is sent at the earliest
WILL_DELAY: Final = "willDelay"
#: 0: retained messages at each subscribing; 1: only if the broker has no such subscription yet; 2: none
RETAIN_HANDLING: Final = "retainHandling"
#: bool: messages that were published with ``retain`` say so, also those that are not sent because of it
RETAIN_AS_PUBLISHED: Final = "retainAsPublished"
#: bool: nothing that this instance published
NO_LOCAL: Final = "noLocal"

#: what needs properties, or an envelope
_PROPERTY_FEATURES: Final = frozenset(
    {
        Features.MESSAGE_PROPERTIES,
        Features.EXTENSION_HEADERS,
        Features.EXTENSION_TIME_TO_LIVE,
        Features.EXTENSION_MESSAGE_ID,
    }
)
#: what MQTT 3.1.1 has with an envelope only
_ENVELOPE_FEATURES: Final = _PROPERTY_FEATURES | REPLY_FEATURES


class MqttAdapter(Adapter):
    """MQTT 5 and 3.1.1.

    ``prefetch`` is the core's to keep: MQTT has credit for a connection, not for a subscription, so at the broker the
    setting ``receive_maximum`` bounds what is unsettled, of all subscriptions together.

    With MQTT 5, ``clean_start`` is for the first connection: reconnecting resumes the session if ``session_expiry``
    lets it live that long. With 3.1.1 it is for all of them (there it is called clean session).
    """

    provider = "rx-messaging.mqtt"
    settings_type = MqttSettings
    can_reject = False
    has_credit = True

    publish_extensions: ClassVar[Mapping[str, Callable[[Any], Any]]] = MappingProxyType({WILL_DELAY: seconds})
    subscribe_extensions: ClassVar[Mapping[str, Callable[[Any], Any]]] = MappingProxyType(
        {
            RETAIN_HANDLING: integer(0, 2),
            RETAIN_AS_PUBLISHED: boolean,
            NO_LOCAL: boolean,
            mapping.PACKET_ID: boolean,
        }
    )

    settings: MqttSettings

    def __init__(self, url: BrokerUrl, settings: Settings, name: str) -> None:
        """See ``Adapter``. Raises also InvalidUrlError: the URL has a path."""
        super().__init__(url, settings, name)
        assert isinstance(settings, MqttSettings)  # noqa: S101  # settings_type
        options.check(url, settings)
        try:
            from adapters.mqtt import handshake, link, outbound
        except ImportError as error:
            if (error.name or "").partition(".")[0] != "paho":
                raise
            raise MissingExtraError("mqtt", f"{url.scheme}://") from error
        if url.scheme in options.WEB:
            try:
                from adapters.mqtt import websocket
            except ImportError as error:
                if (error.name or "").partition(".")[0] != "websockets":
                    raise
                raise MissingExtraError("ws", f"{url.scheme}://") from error
        v5 = settings.v5
        username, password = options.credentials(url, settings)
        self._new_link = link.Link
        self._new_will = handshake.Will
        self._subscribe_options = handshake.subscribe_options
        self._reason_name = handshake.reason_name
        self._target = handshake.Target(
            host=url.host,
            port=url.port or options.PORTS[url.scheme],
            tls=functools.partial(client_context, settings) if url.scheme in options.SECURE else None,
            v5=v5,
            client_id=options.client_id(settings, name),
            username=username,
            password=password,
            keepalive=settings.keepalive,
            connect_timeout=settings.connect_timeout,
            session_expiry=settings.session_expiry,
            receive_maximum=settings.receive_maximum,
            topic_alias_maximum=settings.topic_alias_maximum if v5 else 0,
            maximum_packet_size=settings.max_packet_size,
        )
        if url.scheme in options.WEB:
            secure, path = url.scheme in options.SECURE, "/" + quote(url.path or options.WEB_PATH)
            web = functools.partial(websocket.WebSocket, url.host, self._target.port, path, secure=secure)
            self._target = dataclasses.replace(self._target, web=web)
        codec: mapping.Codec = mapping.Mqtt5Codec() if v5 else mapping.Mqtt3Codec(settings.envelope)
        self._codec = codec
        self._router = Router(settings.persistent)
        self._inbound = Inbound(self._router, codec, v5, settings.receive_maximum, self._target.topic_alias_maximum)
        plain = functools.partial(handshake.subscribe_options, 0, no_local=False, as_published=False, retain_handling=0)
        self._sharing = sharing.Sharing(name, link.Link, plain)
        self._outbound = outbound.Outbound(codec, v5, settings.max_inflight, self._target)
        self._features = _FEATURES
        if v5 or settings.envelope:
            self._features |= _PROPERTY_FEATURES
        if v5:
            self._features |= {Features.EXTENSION_MANDATORY}
            self._features |= self.publish_extensions.keys() | self.subscribe_extensions.keys()
        self._qos_levels: tuple[str, ...] = ("0", "1", "2")
        self._max_packet = packets.MAX_PACKET
        self._link: Link | None = None
        self._lost: Callable[[MessagingError], None] | None = None
        self._connack: Connack | None = None
        #: whether the core has to subscribe again: the session at the broker does not hold its subscriptions
        self._unsubscribed = True
        self._opened_before = False
        self._will: Will | None = None
        #: who is to be told of the will, until the broker knows it
        self._will_outgoing: Outgoing | None = None
        self._claim_timer: asyncio.TimerHandle | None = None

    # --- what it can do

    @property
    def client_id(self) -> str:
        """The setting, one made from the name, or the one the broker assigned."""
        return self._target.client_id

    @property
    def protocols(self) -> tuple[str, ...]:
        """``mqtt``, and the version."""
        return ("mqtt", "mqtt5" if self.settings.v5 else "mqtt3.1.1")

    @property
    def features(self) -> frozenset[str]:
        """What works with this version and, once connected, this broker."""
        return self._features

    @property
    def header_types(self) -> frozenset[type]:
        """Text, and several texts of one name."""
        return REPEATED_TEXT

    def way_out(self, feature: str) -> str:
        """See ``Adapter.way_out``: most of what MQTT 3.1.1 lacks, MQTT 5 has, or an envelope."""
        if self.settings.v5:
            return ""
        if feature in _ENVELOPE_FEATURES:
            return "set version=5, or envelope=true on both sides"
        if feature in (Features.POINT_TO_POINT, Features.EXTENSION_QUEUE):
            return sharing.NO_SHARING
        only_v5 = {*self.publish_extensions, *self.subscribe_extensions, Features.EXTENSION_MANDATORY}
        return "set version=5" if feature in only_v5 else ""

    def reply_address(self, token: str) -> ReplyAddress:
        """With 3.1.1 each request has a reply channel of its own: whoever answers need not know the envelope."""
        address = super().reply_address(token)
        if self.settings.v5:
            return address
        return address._replace(pattern=f"{address.channel}/+", individual=True)

    @property
    def qos_levels(self) -> tuple[str, ...]:
        """Up to Maximum QoS."""
        return self._qos_levels

    @property
    def max_message_size(self) -> int:
        """Largest payload, with a short topic and no properties: these are part of the packet that is limited."""
        limit = self._max_packet - _LEAST_HEADER
        return min(limit, self.settings.max_message_size or limit)

    def check_publish(self, context: MessageContext, options: PublishOptions) -> None:
        """The channel must be for clients to publish to, and properties what brokers and receivers take as meant."""
        mapping.check_channel(context.channel or "")
        if self.settings.v5:
            mapping.check_headers(options.headers)
        if WILL_DELAY in options.custom:
            if not options.last_will:
                raise InvalidExtensionError(WILL_DELAY, f"is for a last will: set {Features.EXTENSION_LAST_WILL!r} too")
            if not self.settings.session_expiry:
                raise InvalidExtensionError(
                    WILL_DELAY,
                    "a will is sent when the session ends, which without the option 'session_expiry' is at once",
                )

    def check_subscribe(self, spec: SubscriptionSpec) -> None:
        """The filter must fit, with the queue before it, and dead letters need a channel that takes them."""
        mapping.check_channel(spec.options.dead_letter_channel or "")
        if spec.options.queue is not None and spec.options.custom.get(NO_LOCAL):
            raise InvalidExtensionError(NO_LOCAL, "MQTT has it for subscriptions without queue only")
        size = len(filter_of(spec.options.queue, spec.channel).encode())
        if size > channels.MAX_BYTES:
            raise InvalidChannelError(
                f"channel pattern and queue make a filter of {size} bytes in UTF-8; at most {channels.MAX_BYTES} fit"
            )

    @property
    def keeps_session(self) -> bool:
        return self.settings.persistent

    # --- connection

    async def open(self, lost: Callable[[MessagingError], None]) -> bool:
        """See ``Adapter.open``."""
        settings = self.settings
        clean = not settings.persistent if self._opened_before and settings.v5 else settings.clean_start
        if self._will_outgoing is not None and self._will_outgoing.settled:
            self._will = self._will_outgoing = None  # too late
        link = self._new_link(self._target, self)
        try:
            await link.connect(clean_start=clean, will=self._will)
        except ConnectFailedError as error:
            self._will_failed(error)
            raise
        except asyncio.CancelledError:
            if link is self._link:  # accepted, and too late
                self._disconnected(ConnectionLostError(f"connecting to {self._target} was cancelled"))
            raise
        if link.error is not None:
            raise ConnectFailedError(f"cannot connect to {self._target}: {link.error}") from link.error
        self._lost = lost
        self._opened_before = True
        resumed = not self._unsubscribed
        self._unsubscribed = False
        if self._will_outgoing is not None:
            self._will_outgoing.confirm()
            self._will_outgoing = None
        return resumed

    def _will_failed(self, error: ConnectFailedError) -> None:
        """Go on without a new will if it is, or may be, why the broker refused the connection."""
        outgoing = self._will_outgoing
        suspicious = isinstance(error, AuthenticationError) or any(reason in str(error) for reason in _WILL_REFUSED)
        if outgoing is not None and suspicious:
            self._will = self._will_outgoing = None
            outgoing.fail(PublishRefusedError(f"the last will is not registered: {error}"))

    def connected(self, link: Link, connack: Connack) -> None:
        """See ``link.Events``."""
        self._link = link
        self._connack = connack
        if connack.assigned_id is not None:
            # from now on ours: with it the session can be resumed
            self._target = dataclasses.replace(self._target, client_id=connack.assigned_id)
        self._announce(connack)
        if not connack.session_present or self._unsubscribed:
            self._router.reset()
            self._unsubscribed = True
        wait = connack.session_present and not self._opened_before
        self._inbound.connected(link, connack.session_present, wait_for_claims=wait)
        if wait:
            self._claim_timer = asyncio.get_running_loop().call_later(CLAIM_TIMEOUT, self._inbound.stop_waiting)
        self._outbound.connected(link, connack)
        for orphan in self._router.orphans:
            link.unsubscribe_soon(orphan)
        self._router.orphans.clear()

    def _announce(self, connack: Connack) -> None:
        self._max_packet = connack.maximum_packet_size
        self._qos_levels = ("0", "1", "2")[: connack.maximum_qos + 1]
        missing: set[str] = set()
        if not connack.retain:
            missing |= {Features.EXTENSION_RETAIN, RETAIN_HANDLING, RETAIN_AS_PUBLISHED}
        if not connack.wildcards:
            missing.add(Features.WILDCARDS)
        if not connack.shared:
            missing |= {Features.POINT_TO_POINT, Features.EXTENSION_QUEUE}
        if not connack.maximum_qos:
            missing.add(Features.EXTENSION_GUARANTEED_DELIVERY)
        self._features -= missing

    def received(self, head: int, body: bytes) -> None:
        """See ``link.Events``."""
        kind = head & 0xF0
        if kind == packets.PUBLISH:
            self._inbound.publish(head, body)
        elif kind == packets.PUBREL:
            self._inbound.released(body)
        else:
            self._outbound.acknowledged(kind, body)

    def received_all(self) -> None:
        """See ``link.Events``."""
        self._inbound.hand_over()

    def written(self, link: Link) -> None:
        """See ``link.Events``."""
        self._outbound.written(link)

    def lost(self, link: Link, error: ConnectionLostError) -> None:
        """See ``link.Events``."""
        if link is self._link:
            self._disconnected(error)

    def _disconnected(self, error: ConnectionLostError) -> None:
        self._link = None
        persistent = self.settings.persistent
        self._inbound.hand_over()
        self._inbound.disconnected()
        if not persistent:
            self._inbound.forget()
        self._outbound.disconnected(error, resumable=persistent)
        lost, self._lost = self._lost, None
        if lost is not None:
            lost(error)

    async def close(self) -> None:
        """See ``Adapter.close``. Nothing is settled: a session that lives on delivers again."""
        self._lost = None
        link, self._link = self._link, None
        self._inbound.answer_all()
        self._inbound.disconnected()
        self._outbound.pause()
        if self._claim_timer is not None:
            self._claim_timer.cancel()
            self._claim_timer = None
        if link is not None:
            await link.close()
            self._outbound.disconnected(ConnectionLostError(f"connection to {self._target} closed"), resumable=True)

    # --- publishing

    async def publish(self, batch: Sequence[Outgoing]) -> None:
        """See ``Adapter.publish``."""
        await self._outbound.publish(batch)

    async def set_will(self, will: Outgoing) -> None:
        """See ``Adapter.set_will``: MQTT fixes the will at connecting."""
        payload, properties = self._codec.will(will)
        if len(payload) > 65_535:
            will.fail(PayloadTooLargeError(len(payload), 65_535, "a last will in MQTT"))
            return
        channel = will.context.channel or ""
        delay = math.ceil(will.options.custom.get(WILL_DELAY, 0))
        self._will = self._new_will(channel, payload, int(will.options.qos), will.options.retain, properties, delay)
        self._will_outgoing = will
        self._outbound.pause()
        await self._outbound.finish(_WILL_PATIENCE)
        link = self._link
        if link is None or self._will_outgoing is None:  # lost, or lost and made again with the will
            return
        try:
            await link.close()
        finally:
            if link is self._link:
                self._disconnected(PlannedLossError(f"connection to {self._target} ended to register the last will"))

    # --- subscribing

    async def subscribe(self, spec: SubscriptionSpec, sink: Sink) -> Stream:
        """See ``Adapter.subscribe``."""
        try:
            async with asyncio.timeout(self.settings.timeout):
                return await self._subscribe(spec, sink)
        except TimeoutError:
            raise SubscriptionRefusedError(f"{self._target} did not answer: {_shown(spec)}") from None

    async def _subscribe(self, spec: SubscriptionSpec, sink: Sink) -> Stream:
        if spec.options.queue is not None and not self.settings.v5:
            await self._require_sharing()
        link, connack = self._link, self._connack
        if link is None or connack is None:
            raise ConnectionLostError(f"no connection to {self._target}")
        # what is on its way to the streams that were there before is not for this one
        await link.unsubscribed(filter_of(spec.options.queue, spec.channel))
        custom = spec.options.custom
        stream = self._router.add(
            spec.options.queue,
            spec.channel,
            int(spec.options.qos),
            sink,
            no_local=custom.get(NO_LOCAL, False),
            as_published=custom.get(RETAIN_AS_PUBLISHED, False),
            tells_id=custom.get(mapping.PACKET_ID, False),
        )
        route = stream.route
        self._inbound.claim(stream)
        # asking again has the broker send retained messages again, which shared subscriptions do not get
        if route.is_shared and route.confirmed:
            return stream
        try:
            while self._outbound.uses(link.next_id):
                await self._outbound.progress()
            qos = route.qos
            identifier = self._router.identify(stream) if connack.identifiers else None
            if not (self.settings.v5 and connack.identifiers):
                self._warn_of_overlap(route)
            wanted = self._subscribe_options(
                qos,
                no_local=route.no_local,
                as_published=route.as_published,
                # a queue gets none (MQTT 5, 4.8.2); mosquitto sends it some unless told not to
                retain_handling=2 if route.is_shared else custom.get(RETAIN_HANDLING, 0),
            )
            answer = await link.subscribe(route.filter, wanted, identifier)
        except BaseException:
            self._forget(stream)
            raise
        if answer.code >= packets.FAILURE:
            self._forget(stream)
            reason = self._reason_name(answer.code, answer.detail)
            raise SubscriptionRefusedError(
                f"{self._target} refused {_shown(spec)}: {reason}", code=answer.code, detail=answer.detail
            )
        route.confirmed = route.confirmed or qos == route.qos
        return stream

    async def _require_sharing(self) -> None:
        """Refuse a queue if the broker has none; see :mod:`.sharing`."""
        try:
            await self._sharing.require(self._target)
        except SubscriptionRefusedError:
            self._features -= {Features.POINT_TO_POINT, Features.EXTENSION_QUEUE}
            raise

    def _warn_of_overlap(self, route: Route) -> None:
        """Of overlapping filters the broker picks any one, and its QoS, for the one packet it sends."""
        for other in self._router.contradicting(route):
            logger.warning(
                "%s: subscriptions to %r (QoS %d) and %r (QoS %d) overlap: without MQTT 5 a message for both may "
                "come with QoS 0, and without acknowledgement; give both the same qos",
                self.name, route.filter, route.qos, other.filter, other.qos,
            )  # fmt: skip

    def _forget(self, stream: Stream) -> None:
        """Undo a subscription that was not confirmed. The session's next stream gets the messages it has claimed."""
        if stream.ended:
            return
        self._end(stream)
        if self._router.remove(stream):
            if self._link is not None:
                self._link.unsubscribe_soon(stream.route.filter)
            else:
                self._router.orphans.add(stream.route.filter)

    def suspend_reading(self) -> None:
        """See ``Adapter.suspend_reading``."""
        if self._link is not None:
            self._link.suspend_reading()

    def resume_reading(self) -> None:
        """See ``Adapter.resume_reading``."""
        if self._link is not None:
            self._link.resume_reading()

    async def unsubscribe(self, handle: Stream) -> None:
        """See ``Adapter.unsubscribe``."""
        if handle.ended:
            return
        route = handle.route
        others = [stream for stream in route.streams if stream is not handle and stream.settles]
        if route.is_shared and others:
            self._inbound.bequeath(handle, others[0])
        else:
            self._end(handle)
        if not self._router.remove(handle):
            return
        if self._link is not None:
            with self._inbound.departing(handle) if self.settings.persistent else contextlib.nullcontext():
                await self._link.unsubscribe(handle.route.filter)
        else:
            self._router.orphans.add(handle.route.filter)

    def _end(self, stream: Stream) -> None:
        """Leave unsettled messages of a stream to the next one, if the broker keeps the session; else settle them."""
        if self.settings.persistent:
            self._inbound.leave(stream)
        else:
            self._inbound.release(stream)

    def detach(self, handle: Stream) -> None:
        """See ``Adapter.detach``."""
        if not handle.ended:
            self._inbound.leave(handle)
            self._router.detach(handle)

    def requeues(self, spec: SubscriptionSpec, handle: Stream) -> bool:  # noqa: ARG002
        """See ``Adapter.requeues``."""
        route = handle.route
        return self.settings.persistent or (route.is_shared and any(each is not handle for each in route.streams))

    def bequeath(self, handle: Stream, heir: Stream) -> None:
        """See ``Adapter.bequeath``."""
        if not handle.ended and not heir.ended and heir.settles:
            self._inbound.bequeath(handle, heir)

    def acknowledge(self, tokens: Sequence[Any]) -> None:
        """See ``Adapter.acknowledge``."""
        for token in tokens:
            self._inbound.settle(token)

    def is_stale(self, token: Any) -> bool:
        """See ``Adapter.is_stale``."""
        return self._inbound.is_stale(token)


def _shown(spec: SubscriptionSpec) -> str:
    queue = f" (queue {spec.options.queue!r})" if spec.options.queue is not None else ""
    return f"the subscription to {spec.channel!r}{queue}"
