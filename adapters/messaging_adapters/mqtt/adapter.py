"""The adapter: joins the parts of this package for one instance."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
from typing import TYPE_CHECKING, Any, ClassVar, Final
from urllib.parse import quote

from messaging.adapter import Adapter, PlannedLossError
from messaging.connection.proxies import parse_proxy
from messaging.connection.tls import ClientTls
from messaging.errors import (
    ConnectFailedError,
    ConnectionLostError,
    InvalidChannelError,
    InvalidExtensionError,
    MissingExtraError,
    RedirectedError,
)
from messaging.execution import clock
from messaging.model import Features, channels
from messaging_adapters.mqtt import capabilities, mapping, packets
from messaging_adapters.mqtt import settings as options
from messaging_adapters.mqtt.capabilities import NO_LOCAL, WILL_DELAY
from messaging_adapters.mqtt.grants import Grants
from messaging_adapters.mqtt.inbound import Inbound
from messaging_adapters.mqtt.joint import Joint
from messaging_adapters.mqtt.login import LogIn, SessionPlace
from messaging_adapters.mqtt.router import Router
from messaging_adapters.mqtt.settings import MqttSettings
from messaging_adapters.mqtt.streams import filter_of

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping, Sequence

    from messaging.adapter import Events, Sink
    from messaging.errors import MessagingError
    from messaging.model import BrokerUrl, Endpoint, Outgoing, PublishPlan, SubscriptionSpec
    from messaging.model.credentials import Credentials
    from messaging.model.settings import Settings
    from messaging_adapters.mqtt.handshake import Connack, Target
    from messaging_adapters.mqtt.link import Link
    from messaging_adapters.mqtt.outbound import Outbound
    from messaging_adapters.mqtt.streams import Stream

#: seconds that the messages of a resumed session are kept for the streams that subscribe to them
CLAIM_TIMEOUT: Final = 30.0
#: seconds that a planned reconnect is delayed by unconfirmed messages
_PLANNED_TIMEOUT: Final = 1.0


class MqttAdapter(Adapter):
    """MQTT 5 and 3.1.1.

    The core keeps to ``prefetch``: MQTT has credit for a connection, not for a subscription. At the broker the setting
    ``receive_maximum`` bounds the unsettled messages of all subscriptions together.

    With MQTT 5, ``clean_start`` is for the first connection: reconnecting resumes the session if ``session_expiry``
    lets it live that long. With 3.1.1 it is for all connections (there it is called clean session).
    """

    provider: ClassVar[str] = "rx-messaging.mqtt"
    settings_type: ClassVar[type[Settings]] = MqttSettings
    publish_extensions: ClassVar[Mapping[str, Callable[[Any], Any]]] = capabilities.PUBLISH_EXTENSIONS
    subscribe_extensions: ClassVar[Mapping[str, Callable[[Any], Any]]] = capabilities.SUBSCRIBE_EXTENSIONS

    settings: MqttSettings
    credentials: Callable[[], Awaitable[Credentials]] | None = None

    def __init__(self, url: BrokerUrl, settings: Settings, name: str) -> None:
        """See ``Adapter``. Raises also InvalidUrlError: the URL has a path."""
        super().__init__(url, settings, name)
        options.check(url, self.settings)
        try:
            from messaging_adapters.mqtt import last_will, link, outbound, subscriptions
        except ImportError as error:
            if (error.name or "").partition(".")[0] != "paho":
                raise
            raise MissingExtraError("mqtt", f"{url.scheme}://") from error
        v5 = self.settings.v5
        self._new_link = link.Link
        self._shown = subscriptions.shown
        self._target = _target(url, self.settings, name)
        self._login = LogIn(self.settings, self._target.username)
        #: those of a broker that restricts nothing
        self._announced = capabilities.announced(self.settings, name, self._target.client_id)
        self.capabilities = self._announced
        if not v5:
            self.addressing = capabilities.IndividualAddressing()
        codec: mapping.Codec = mapping.Mqtt5Codec() if v5 else mapping.Mqtt3Codec(self.settings.envelope)
        self._router = Router(self.settings.persistent)
        self._inbound = Inbound(
            name, self._router, codec, v5, self.settings.receive_maximum, self._target.topic_alias_maximum
        )
        self.received_all = self._inbound.hand_over
        self._outbound = outbound.Outbound(codec, v5, self.settings.max_inflight, self._target)
        traffic = _Traffic(self._inbound, self._outbound)
        self.received, self.written = traffic.received, traffic.written
        self._subscriptions = subscriptions.Subscriptions(self, self._router, self._inbound, self._outbound)
        #: see ``KeepsSession``
        self.detach, self.bequeath = self._subscriptions.detach, self._subscriptions.bequeath
        #: see ``SubscribesJointly``
        self.part = self._subscriptions.part
        self._will = last_will.LastWill(codec)
        self.link: Link | None = None
        self._lost: Callable[[MessagingError], None] | None = None
        #: the session at the broker does not hold the subscriptions: the core has to subscribe again
        self._unsubscribed = True
        self._opened_before = False
        self._place = SessionPlace()
        self.grants = Grants()
        self._claim_timer: asyncio.TimerHandle | None = None

    def check_publish(self, plan: PublishPlan) -> None:
        """Refuse channels that clients must not publish to, and properties that receivers would misread."""
        options = plan.options
        mapping.check_channel(plan.channel)
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
        """Refuse a filter that is too long with its queue, and a dead-letter channel that takes no messages."""
        mapping.check_channel(spec.options.dead_letter_channel or "")
        if spec.options.queue is not None and spec.options.custom.get(NO_LOCAL):
            raise InvalidExtensionError(NO_LOCAL, "MQTT has it for subscriptions without queue only")
        size = len(filter_of(spec.options.queue, spec.channel).encode())
        if size > channels.MAX_BYTES:
            raise InvalidChannelError(
                f"channel pattern and queue make a filter of {size} bytes in UTF-8; at most {channels.MAX_BYTES} fit"
            )

    # --- connection

    def set_endpoint(self, endpoint: Endpoint) -> None:
        """See ``TakesEndpoint``."""
        self._target = self._outbound.target = self._target.at(endpoint, options.PORTS.get(self.url.scheme))

    async def open(self, events: Events) -> bool:
        """See ``Adapter.open``."""
        settings = self.settings
        clean = not settings.persistent if self._opened_before and settings.v5 else settings.clean_start
        if self.credentials is not None:
            self._target = self._login.target(self._target, await self.credentials())
        link = self._new_link(self._target, self)
        try:
            connack = await link.connect(clean_start=clean and not self._login.is_bridging, will=self._will.current())
        except ConnectFailedError as error:
            self._will.connect_failed(error)
            raise
        except asyncio.CancelledError:
            # accepted, but too late
            self.lost(link, ConnectionLostError(f"connecting to {self._target} was cancelled"))
            raise
        if isinstance(link.error, RedirectedError):
            raise link.error
        if link.error is not None:
            raise ConnectFailedError(f"cannot connect to {self._target}: {link.error}") from link.error
        denied = self.grants.connected(self._target, connack, needs_session=settings.persistent)
        if denied is not None:
            await link.close(self._login.end())
            self.lost(link, ConnectionLostError(str(denied)))
            raise denied
        asks_session = settings.persistent and self._opened_before
        self.grants.resumed(self._target, asked=asks_session, granted=connack.session_present)
        self._lost = events.lost
        self._opened_before = True
        resumed = not self._unsubscribed
        self._unsubscribed = False
        self._will.registered()
        return resumed

    def connected(self, link: Link, connack: Connack) -> None:
        """See ``link.Events``."""
        self.link = link
        self._login.is_bridging = False
        is_old = self._place.is_left(self._target, connack)
        if connack.assigned_id is not None:
            # from now on this client's own: with it the session can be resumed
            self._target = dataclasses.replace(self._target, client_id=connack.assigned_id)
        # the next host may lack other features than the last one
        self.capabilities = capabilities.restricted(self._announced, self.settings, connack, self._target.client_id)
        await_claims = connack.session_present
        of_earlier = await_claims and (is_old or not self._opened_before)
        if is_old:
            connack = dataclasses.replace(connack, session_present=False)
        self._router.connected(is_resumed=connack.session_present)
        if not connack.session_present or self._unsubscribed:
            self._router.reset()
            self._unsubscribed = True
        self._inbound.connected(link.writer, connack.session_present)
        if await_claims:
            self._inbound.leftovers.await_claims(of_earlier=of_earlier)
            if self._claim_timer is not None:
                self._claim_timer.cancel()
            drop = self._inbound.leftovers.drop_unclaimed
            self._claim_timer = clock.call_later(asyncio.get_running_loop(), CLAIM_TIMEOUT, drop)
        self._outbound.connected(link.writer, link.requests.pending, connack)
        self._subscriptions.connected(link, connack)

    def lost(self, link: Link, error: ConnectionLostError) -> None:
        """See ``link.Events``."""
        if link is not self.link:
            return
        self.link = None
        if self._login.is_renewing and error.code in packets.CREDENTIALS_REFUSED:
            # the host and its session are in order, and the next connection has other credentials
            error = PlannedLossError(str(error), code=error.code, detail=error.detail)
            self._begin_planned()
        persistent = self.settings.persistent or self._login.is_bridging
        self._subscriptions.disconnected()
        self._inbound.disconnected()
        if not persistent:
            self._inbound.forget()
        self._outbound.disconnected(error, resumable=persistent)
        lost, self._lost = self._lost, None
        if lost is not None:
            lost(error)

    def _begin_planned(self) -> int | None:
        """Have the next connection resume the session. Return the session expiry interval of DISCONNECT."""
        expiry = self._login.begin_planned()
        if self._login.is_bridging:  # until the next CONNACK
            self.capabilities = dataclasses.replace(self.capabilities, keeps_session=True)
        return expiry

    async def close(self) -> None:
        """See ``Adapter.close``. No unsettled message is settled: a session that lives on delivers it again."""
        self._lost = None
        link, self.link = self.link, None
        self._subscriptions.end_orphans()
        self._subscriptions.disconnected()
        self._inbound.close()
        self._outbound.pause()
        if self._claim_timer is not None:
            self._claim_timer.cancel()
            self._claim_timer = None
        if link is not None:
            await link.close(self._login.end())
            self._outbound.disconnected(ConnectionLostError(f"connection to {self._target} closed"), resumable=True)

    def pause(self, handle: Any | None) -> None:
        """Read nothing. MQTT cannot pause single subscriptions, which have their credit."""
        if handle is None and self.link is not None:
            self.link.suspend_reading()

    def resume(self, handle: Any | None) -> None:
        """Undo :meth:`pause`."""
        if handle is None and self.link is not None:
            self.link.resume_reading()

    # --- publishing

    async def publish(self, batch: Sequence[Outgoing]) -> None:
        """See ``Adapter.publish``."""
        await self._outbound.publish(batch)

    async def set_will(self, will: Outgoing) -> None:
        """See ``TakesLastWill``: MQTT fixes the will in CONNECT."""
        if self._will.set(will, is_trial=self._opened_before) and self._opened_before:
            await _end_as_planned(self, "to register the last will", lambda: self._will.is_pending)

    async def renew(self, credentials: Credentials) -> None:
        """See ``TakesCredentials``: re-authentication if there is a method for it, else a planned reconnect."""
        link = self.link
        if link is None:
            return
        target = self._login.target(self._target, credentials)
        self._login.is_renewing = True
        try:
            is_accepted = target.username == self._target.username and await link.reauthenticate(
                target, target.connect_timeout
            )
        finally:
            self._login.is_renewing = False
        if is_accepted:
            self._target = target
        elif link is self.link:
            await _end_as_planned(self, "to log in with new credentials", lambda: link is self.link)

    # --- subscribing

    async def join(self, spec: SubscriptionSpec, sink: Sink, handle: Joint | None) -> Joint:
        """See ``SubscribesJointly``."""
        joint = handle or Joint(sink)
        await self.subscribe(spec, sink, joint)
        return joint

    def abandon(self, handle: Joint, is_abandoned: Callable[[str], bool]) -> None:
        """See ``SubscribesJointly``."""
        handle.is_abandoned = is_abandoned
        self._inbound.abandon(handle)

    async def subscribe(self, spec: SubscriptionSpec, sink: Sink, joint: Joint | None = None) -> Stream:
        """See ``Adapter.subscribe``; or subscribe as a part of ``joint``.

        A connection without an answer within ``timeout`` is lost: the next one subscribes.
        """
        await self._subscriptions.check_sharing(self._target, spec)  # on a connection of its own, with its own limits
        link = self.link
        try:
            async with clock.timeout(self.settings.timeout):
                return await self._subscriptions.subscribe(self._target, spec, sink, joint)
        except TimeoutError:
            why = f"no answer to {self._shown(spec)} within {self.settings.timeout:g} s"
            error = ConnectionLostError(f"connection to {self._target} lost: {why}")
            if link is not None:
                link.lose(error)
            raise error from None

    async def unsubscribe(self, handle: Stream | Joint) -> None:
        """See ``Adapter.unsubscribe``."""
        if isinstance(handle, Joint):
            await self._subscriptions.unsubscribe_joint(handle)
        else:
            await self._subscriptions.unsubscribe(handle)

    def redelivers(self, spec: SubscriptionSpec, handle: Stream | None = None) -> bool:  # noqa: ARG002  # the contract's
        """Return ``False`` for a lost connection: only a resumed session redelivers, which ``open`` tells the core."""
        return handle is not None and self._subscriptions.requeues(handle)

    def acknowledge(self, tokens: Sequence[Any]) -> None:
        """See ``Adapter.acknowledge``."""
        settle = self._inbound.settle
        for token in tokens:
            settle(token)

    def is_stale(self, token: Any) -> bool:
        """See ``Adapter.is_stale``."""
        return self._inbound.is_stale(token)


async def _end_as_planned(adapter: MqttAdapter, purpose: str, is_wanted: Callable[[], bool]) -> None:
    """End the connection of ``adapter`` in good order, so that the core makes another one."""
    await adapter._outbound.finish(_PLANNED_TIMEOUT)
    link = adapter.link
    if link is None or not is_wanted():  # lost, or lost and connected again, meanwhile
        return
    # an answer after DISCONNECT would be lost: it is sent when the broker sends its message again
    adapter._inbound.disconnected()
    expiry = adapter._begin_planned()
    try:
        await link.close(expiry, takes_late=True)
    finally:
        adapter.lost(link, PlannedLossError(f"connection to {adapter._target} ended {purpose}"))


class _Traffic:
    """Hands the packets of a link to the halves of its session."""

    def __init__(self, inbound: Inbound, outbound: Outbound) -> None:
        self._inbound = inbound
        self._outbound = outbound

    def received(self, head: int, body: bytes) -> None:
        """See ``link.Events``."""
        kind = head & 0xF0
        if kind == packets.PUBLISH:
            self._inbound.publish(head, body)
        elif kind == packets.PUBREL:
            self._inbound.released(body)
        else:
            self._outbound.acknowledged(kind, body)

    def written(self, link: Link) -> None:
        """See ``link.Events``."""
        self._outbound.written(link.writer)


def _target(url: BrokerUrl, settings: MqttSettings, name: str) -> Target:
    """Return where to connect to, and as which client."""
    from messaging_adapters.mqtt.handshake import Target

    username, password = options.credentials(url, settings)
    secure = url.scheme in options.SECURE
    target = Target(
        host=url.host,
        port=url.port or options.PORTS[url.scheme],
        tls=ClientTls(settings, url.label(name)) if secure else None,
        proxy=parse_proxy(settings.proxy),
        v5=settings.v5,
        client_id=options.client_id(settings, name),
        username=username,
        password=password,
        auth_method=settings.auth_method,
        keepalive=settings.keepalive,
        connect_timeout=settings.connect_timeout,
        session_expiry=LogIn(settings, username).session_expiry(settings.session_expiry),
        receive_maximum=settings.receive_maximum,
        topic_alias_maximum=settings.topic_alias_maximum if settings.v5 else 0,
        maximum_packet_size=settings.max_packet_size,
        name=name,
        follows_redirects=settings.follow_redirects,
    )
    if url.scheme not in options.WEB:
        return target
    try:
        from messaging_adapters.mqtt import websocket
    except ImportError as error:
        if (error.name or "").partition(".")[0] != "websockets":
            raise
        raise MissingExtraError("ws", f"{url.scheme}://") from error
    path = "/" + quote(url.path or options.WEB_PATH)
    web = functools.partial(
        websocket.WebSocket, path=path, secure=secure, headers=settings.ws_headers, query=settings.ws_query
    )
    return dataclasses.replace(target, web=web)
