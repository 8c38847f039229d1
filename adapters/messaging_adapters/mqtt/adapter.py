"""The adapter: joins the parts of this package for one instance."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, ClassVar

from messaging.adapter import Adapter, Events, Sink
from messaging.errors import (
    ConnectionLostError,
    InvalidChannelError,
    InvalidExtensionError,
    MissingExtraError,
)
from messaging.execution import clock
from messaging.model import BrokerUrl, Endpoint, Features, Outgoing, PublishPlan, SubscriptionSpec, channels
from messaging.model.credentials import Credentials
from messaging.model.settings import Settings
from messaging_adapters.mqtt import capabilities, mapping
from messaging_adapters.mqtt import settings as options
from messaging_adapters.mqtt.capabilities import NO_LOCAL, WILL_DELAY
from messaging_adapters.mqtt.settings import MqttSettings
from messaging_adapters.mqtt.streams import CopyToken, JointOutlet, Stream, filter_of, shown


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
            from messaging_adapters.mqtt import handshake, session
        except ImportError as error:
            if (error.name or "").partition(".")[0] != "paho":
                raise
            raise MissingExtraError("mqtt", f"{url.scheme}://") from error
        target = handshake.target_of(url, self.settings, name)
        self._username = target.username
        #: those of a broker that restricts nothing
        self.capabilities = capabilities.announced(self.settings, name, target.client_id)
        if not self.settings.v5:
            self.addressing = capabilities.IndividualAddressing()
        self.session = session.Session(self, self.settings, target)

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
        self.session.target = self.session.target.at(endpoint, options.PORTS.get(self.url.scheme))

    async def open(self, events: Events) -> bool:
        if self.credentials is not None:
            self.session.target = self.session.target.logged_in(await self.credentials(), self._username)
        return await self.session.open(events)

    async def close(self) -> None:
        await self.session.close()

    def pause(self, handle: Any | None) -> None:
        """Read nothing. MQTT cannot pause single subscriptions, which have their credit."""
        if handle is None and self.session.connection is not None:
            self.session.connection.reader.suspend()

    def resume(self, handle: Any | None) -> None:
        """Undo :meth:`pause`."""
        if handle is None and self.session.connection is not None:
            self.session.connection.reader.resume()

    # --- publishing

    async def publish(self, batch: Sequence[Outgoing]) -> None:
        await self.session.publish(batch)

    async def set_will(self, will: Outgoing) -> None:
        """See ``TakesLastWill``: MQTT fixes the will in CONNECT."""
        session = self.session
        if session.will.set(will, is_trial=session.opened_before) and session.opened_before:
            await session.end_as_planned("to register the last will", lambda: session.will.is_pending)

    async def renew(self, credentials: Credentials) -> None:
        """See ``TakesCredentials``: re-authentication if there is a method for it, else a planned reconnect."""
        session, connection = self.session, self.session.connection
        if connection is None:
            return
        target = session.target.logged_in(credentials, self._username)
        session.is_renewing = True
        try:
            is_accepted = target.username == session.target.username and await connection.reauthenticate(
                target, target.settings.connect_timeout
            )
        finally:
            session.is_renewing = False
        if is_accepted:
            session.target = target
        elif connection is session.connection:
            await session.end_as_planned("to log in with new credentials", lambda: connection is session.connection)

    # --- subscribing

    async def join(self, spec: SubscriptionSpec, sink: Sink, handle: JointOutlet | None) -> JointOutlet:
        joint = handle or JointOutlet(sink)
        await self.subscribe(spec, sink, joint)
        return joint

    async def part(self, handle: JointOutlet, channel: str) -> None:
        await self.session.subscriptions.part(handle, channel)

    def abandon(self, handle: JointOutlet, is_abandoned: Callable[[str], bool]) -> None:
        handle.is_abandoned = is_abandoned
        self.session.inbound.abandon(handle)

    async def subscribe(self, spec: SubscriptionSpec, sink: Sink, joint: JointOutlet | None = None) -> Stream:
        """See ``Adapter.subscribe``; or subscribe as a part of ``joint``.

        A connection without an answer within ``timeout`` is lost: the next one subscribes.
        """
        session, timeout = self.session, self.settings.timeout
        await session.subscriptions.check_sharing(session.target, spec)  # on a connection of its own, with its limits
        connection = session.connection
        try:
            async with clock.timeout(timeout):
                return await session.subscriptions.subscribe(session.target, spec, sink, joint)
        except TimeoutError:
            why = f"no answer to {shown(spec)} within {timeout:g} s"
            error = ConnectionLostError(f"connection to {session.target} lost: {why}")
            if connection is not None:
                connection.end(error)
            raise error from None

    async def unsubscribe(self, handle: Stream | JointOutlet) -> None:
        if isinstance(handle, JointOutlet):
            await self.session.subscriptions.unsubscribe_joint(handle)
        else:
            await self.session.subscriptions.unsubscribe(handle)

    def detach(self, handle: Stream) -> None:
        if not handle.ended:
            self.session.inbound.leave(handle)
            self.session.router.detach(handle)

    def bequeath(self, handle: Stream, heir: Stream) -> None:
        if not handle.ended and not heir.ended and heir.settles:
            self.session.inbound.bequeath(handle, heir)

    def redelivers(self, spec: SubscriptionSpec, handle: Stream | None = None) -> bool:  # noqa: ARG002  # the contract's
        """Return ``False`` for a lost connection: only a resumed session redelivers, which ``open`` tells the core."""
        return handle is not None and self.session.subscriptions.requeues(handle)

    def acknowledge(self, tokens: Sequence[Any]) -> None:
        settle = self.session.inbound.answers.settle
        for token in tokens:
            settle(token)

    def is_stale(self, token: CopyToken) -> bool:
        return token.receipt.session != self.session.inbound.answers.session or token.stream.ended
