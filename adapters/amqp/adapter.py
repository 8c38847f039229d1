"""``AmqpAdapter``: AMQP 0-9-1, with RabbitMQ's extensions, behind the contract of :mod:`messaging.adapter`.

**Channels.** A channel without extension is a routing key on the topic exchange ``exchange`` (:mod:`.names`), and a
subscription pattern a binding of it. ``channel(name, extension)`` is AMQP as it is: the exchange ``name``, and the
extension its routing key or, subscribing, its binding key. With ``autocreate`` (the default) an exchange or queue that
does not exist is made, as the extensions say (:mod:`.extensions`); what exists is used as it is.

**Queues.** A subscription without ``queue`` has an exclusive queue of its own, which ends with it. Subscriptions with
the same ``queue`` compete for a durable queue, which keeps what arrives while nobody consumes and is never deleted
from here. Whatever such a queue holds is delivered, also what other bindings or the default exchange put there.

**Guarantees.** Level "1" (the default): confirmed by the broker when publishing, acknowledged when consuming. Level
"0": a message is done once written, a delivery once sent. ``guaranteedDelivery`` makes messages persistent as well.
``docs/amqp.md`` says all of it.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal
from weakref import WeakKeyDictionary

from pydantic import Field, SecretStr

from adapters.amqp import declarations, extensions, names, properties
from adapters.amqp.overflow import RefusingQueues
from adapters.amqp.streams import StreamPosition
from adapters.amqp.target import Target
from messaging.adapter import CORE_FEATURES, Adapter, ReplyAddress, ReplyRoute, Sink, SubscriptionSpec
from messaging.connection.tls import client_context
from messaging.errors import (
    ConnectionLostError,
    InvalidChannelError,
    InvalidExtensionError,
    InvalidHeaderError,
    InvalidOptionError,
    InvalidUrlError,
    MissingExtraError,
)
from messaging.model import Features, channels, headers
from messaging.model.settings import Settings, TlsSettings

if TYPE_CHECKING:
    import ssl
    from collections.abc import Sequence

    from adapters.amqp.declarations import Source
    from adapters.amqp.link import Link
    from messaging.errors import MessagingError
    from messaging.model import BrokerUrl, MessageContext, Outgoing, PublishOptions

DEFAULT_PORT: Final = 5672
DEFAULT_TLS_PORT: Final = 5671
#: characters of a virtual host's name (AMQP 0-9-1, 1.1: path)
MAX_VHOST: Final = 127
#: what RabbitMQ takes unless it is configured otherwise, bytes
DEFAULT_MAX_MESSAGE_SIZE: Final = 134_217_728

_FEATURES: Final = CORE_FEATURES | frozenset(
    {
        Features.PUBLISH_SUBSCRIBE,
        Features.POINT_TO_POINT,
        Features.WILDCARDS,
        Features.ROUTING_KEY,
        Features.MESSAGE_PROPERTIES,
        Features.BROKER_REDELIVERY,
        Features.QUEUE_RETENTION,
        Features.EXTENSION_GUARANTEED_DELIVERY,
        Features.EXTENSION_QOS,
        Features.EXTENSION_TIME_TO_LIVE,
        Features.EXTENSION_PRIORITY,
        Features.EXTENSION_HEADERS,
        Features.EXTENSION_MANDATORY,
        Features.EXTENSION_MESSAGE_ID,
        Features.EXTENSION_QUEUE,
        Features.EXTENSION_AUTOCREATE,
        *extensions.EXTENSIONS,
    }
)


class AmqpSettings(TlsSettings):
    """Settings of ``amqp://`` and ``amqps://``; the path of the URL is the virtual host, ``/`` if there is none."""

    heartbeat: int = Field(
        10, ge=0, le=65_534, description="interval of heartbeats, seconds; two silent ones are a loss; 0 for none"
    )
    sasl: Literal["plain", "external"] = Field(
        "plain", description="who this client is: `plain`, user name and password; `external`, its certificate"
    )
    exchange: str = Field("amq.topic", min_length=1, description="topic exchange of channels without extension")
    publish_window: int = Field(4096, ge=1, description="messages that may await the broker's confirm")
    max_priority: int = Field(
        0,
        ge=0,
        le=9,
        description="levels of `priority` in queues declared here (`x-max-priority`); 0 for none, the plain queue",
    )


class AmqpAdapter(Adapter):
    """See the module and :class:`~messaging.adapter.Adapter`."""

    provider: ClassVar[str] = "rx-messaging.amqp"
    settings_type: ClassVar[type[Settings]] = AmqpSettings
    can_reject: ClassVar[bool] = True
    has_credit: ClassVar[bool] = True
    publish_extensions: ClassVar[Mapping[str, Callable[[Any], Any]]] = extensions.PUBLISH_EXTENSIONS
    subscribe_extensions: ClassVar[Mapping[str, Callable[[Any], Any]]] = extensions.SUBSCRIBE_EXTENSIONS

    reply_extensions: ClassVar[frozenset[str]] = frozenset({extensions.ENVELOPE})

    settings: AmqpSettings

    def __init__(self, url: BrokerUrl, settings: Settings, name: str) -> None:
        super().__init__(url, settings, name)
        try:
            from adapters.amqp import connection, link
        except ModuleNotFoundError as error:
            if (error.name or "").partition(".")[0] not in ("aiormq", "pamqp", "yarl"):
                raise
            raise MissingExtraError("amqp", f"{url.scheme}://") from error
        self._connection, self._link_type = connection, link.Link
        self._target = self._make_target()
        self._link: Link | None = None
        self._refusing = RefusingQueues()
        #: where those who read streams have got to
        self._positions: WeakKeyDictionary[Sink, StreamPosition] = WeakKeyDictionary()

    def _make_target(self) -> Target:
        url, settings = self.url, self.settings
        username, password = self._credentials()
        given = [
            option
            for option in ("cafile", "certfile", "keyfile", "allow_insecure")
            if getattr(settings, option) not in (None, False)
        ]
        secure = url.scheme == "amqps"
        if given and not secure:
            raise InvalidOptionError(given[0], f"{given[0]!r} is for TLS: use amqps:// instead of amqp://")
        if settings.keyfile is not None and settings.certfile is None:
            raise InvalidOptionError("keyfile", "'keyfile' needs the certificate it belongs to: 'certfile'")
        if len(url.path or "") > MAX_VHOST:
            raise InvalidUrlError(f"the virtual host has {len(url.path or '')} characters; at most {MAX_VHOST} fit")
        try:
            names.check_length(settings.exchange, "the exchange")
        except InvalidChannelError as error:
            raise InvalidOptionError("exchange", str(error)) from None
        if settings.sasl == "external" and not (secure and settings.certfile is not None):
            raise InvalidOptionError(
                "sasl", "'external' lets the client's certificate say who it is: it needs amqps:// and 'certfile'"
            )
        return Target(
            host=url.host,
            port=url.port or (DEFAULT_TLS_PORT if secure else DEFAULT_PORT),
            username=username,
            password=password,
            vhost=url.path or "/",
            heartbeat=settings.heartbeat,
            name=settings.client_id or self.name,
            timeout=settings.connect_timeout,
            tls=functools.partial(client_context, settings) if secure else None,
        )

    def _credentials(self) -> tuple[str | None, SecretStr | None]:
        url, settings = self.url, self.settings
        username = url.username if url.username is not None else settings.username
        password = url.password if url.password is not None else settings.password
        if settings.sasl == "external":
            for option, given in (("username", username), ("password", password)):
                if given is not None:
                    raise InvalidOptionError(option, "sasl 'external' takes none: the certificate stands for it")
            return None, None
        if username is None and password is None:
            username, password = "guest", SecretStr("guest")
        elif username is None:
            raise InvalidOptionError("username", "a password is given, but no user name")
        elif password is None:
            raise InvalidOptionError("password", f"user {username!r} is given without a password")
        if not username or not password.get_secret_value():
            raise InvalidOptionError("password" if username else "username", "user name and password are not empty")
        return username, password

    # --- what it can do

    @property
    def protocols(self) -> tuple[str, ...]:
        """AMQP in the version RabbitMQ speaks."""
        return ("amqp", "amqp0-9-1")

    @property
    def features(self) -> frozenset[str]:
        """The same for every instance. ``priority`` travels with every message; queues with levels deliver by it."""
        return _FEATURES

    @property
    def qos_levels(self) -> tuple[str, ...]:
        """Unconfirmed and at least once: AMQP has no exactly once."""
        return ("0", "1")

    @property
    def default_qos(self) -> str:
        """At least once."""
        return "1"

    @property
    def max_message_size(self) -> int:
        """The setting, or what RabbitMQ takes by default."""
        return self.settings.max_message_size or DEFAULT_MAX_MESSAGE_SIZE

    @property
    def publish_window(self) -> int:
        """Enough for a few writes to the socket."""
        return min(1024, self.settings.publish_window)

    @property
    def header_types(self) -> frozenset[type]:
        """All: tables have a type for each."""
        return headers.TYPED

    def check_publish(self, context: MessageContext, options: PublishOptions) -> None:
        """Refuse what is too long for AMQP, ``CC``, and extensions that contradict each other."""
        channel = context.channel or ""
        _check_names(channel, context.channel_extension, names.routing_key(channel))
        if options.time_to_live is not None and options.time_to_live > properties.MAX_TIME_TO_LIVE:
            raise InvalidExtensionError(
                Features.EXTENSION_TIME_TO_LIVE,
                f"must be at most {properties.MAX_TIME_TO_LIVE:.0f} seconds, not {options.time_to_live:g}",
            )
        for header in options.headers:
            if len(header.encode()) > properties.MAX_HEADER_NAME:
                raise InvalidHeaderError(
                    Features.EXTENSION_HEADERS,
                    f"AMQP carries header names of at most {properties.MAX_HEADER_NAME} bytes, not {header[:60]!r}...",
                )
            if header in properties.ROUTING_HEADERS:
                raise InvalidHeaderError(
                    Features.EXTENSION_HEADERS,
                    f"{header!r} is not for text: RabbitMQ routes by it; publish to each channel instead",
                )
        properties.Template(context, options)
        declarations.destination(context, options, self.settings.exchange)

    def check_subscribe(self, spec: SubscriptionSpec) -> None:
        """Refuse names that are too long for AMQP, and extensions that contradict each other."""
        if spec.channel == names.DIRECT_CHANNEL:
            raise InvalidChannelError(f"{spec.channel!r} is for the replies to requests that name no reply channel")
        if spec.channel_extension is not None and channels.has_wildcard(spec.channel):
            raise InvalidChannelError(
                f"{spec.channel!r} names an exchange and can have no wildcards; "
                "they go into the extension, as '*' and '#' of AMQP"
            )
        _check_names(spec.channel, spec.channel_extension, names.binding_key(spec.channel))
        options = spec.options
        declare = options.custom.get(extensions.DECLARE, "create" if options.autocreate else "passive")
        if options.queue is None and declare != "create":
            raise InvalidExtensionError(
                extensions.DECLARE if options.autocreate else Features.EXTENSION_AUTOCREATE,
                "a subscription without queue makes one of its own; name an existing queue with the extension "
                f"{Features.EXTENSION_QUEUE!r}",
            )
        if options.dead_letter_channel is not None:
            _check_names(options.dead_letter_channel, None, names.routing_key(options.dead_letter_channel))
        self._source(spec)

    def redelivers(self, spec: SubscriptionSpec) -> bool:
        """Unless the queue ended with the connection, or may have."""
        custom = spec.options.custom
        gone = custom.get(extensions.EXCLUSIVE, False) or custom.get(extensions.AUTO_DELETE, False)
        return super().redelivers(spec) and not gone

    def requeues(self, spec: SubscriptionSpec, handle: Any) -> bool:  # noqa: ARG002  # it depends on the queue alone
        """Unless the queue ends with its last consumer."""
        return spec.options.queue is not None and not spec.options.custom.get(extensions.AUTO_DELETE, False)

    def reply_address(self, token: str) -> ReplyAddress:  # noqa: ARG002  # the broker has better ones
        """Direct reply-to."""
        return ReplyAddress(names.DIRECT_CHANNEL, names.DIRECT_CHANNEL)

    def reply_routes(self, channel: str) -> tuple[ReplyRoute, ...]:
        """By the exchange of channels, as others here listen; or to the queue of that name, as is AMQP's custom."""
        if channel.startswith(f"{names.DIRECT_CHANNEL}/"):
            return (ReplyRoute(channel),)
        queue = names.routing_key(channel)
        return ReplyRoute(channel, mandatory=True), ReplyRoute(declarations.DEFAULT_EXCHANGE, queue, mandatory=True)

    def patterns(self, spec: SubscriptionSpec) -> tuple[str, ...]:
        """See ``Adapter.patterns``: those of the extension ``bindings``, too."""
        return _compiled(spec, self.settings.exchange, self.settings.max_priority).patterns or (spec.channel,)

    def reaches(self, spec: SubscriptionSpec, channel: str, channel_extension: str | None) -> bool:
        """See ``Adapter.reaches``: by the exchange and its routing key, or to the queue by its name."""
        source = _compiled(spec, self.settings.exchange, self.settings.max_priority)
        if channel_extension is None:
            return source.exchange.name == self.settings.exchange and any(
                channels.matches(pattern, channel) for pattern in source.patterns
            )
        if channel == declarations.DEFAULT_EXCHANGE:
            return channel_extension == source.queue.name
        key = names.channel_name(channel_extension)
        return channel == source.exchange.name and any(channels.matches(pattern, key) for pattern in source.patterns)

    # --- connection

    async def open(self, lost: Callable[[MessagingError], None]) -> bool:
        """Connect for publishing; the connection for consuming is made with the first subscription."""
        if self._link is not None:
            # of the connection that was lost: two generations must not mix
            await self._link.close()
            self._link = None
        target, settings = self._target, self.settings
        context: ssl.SSLContext | None = None
        if target.tls is not None:
            # each time anew: certificates are renewed while programs run
            context = await asyncio.get_running_loop().run_in_executor(None, target.tls)
        wire = await self._connection.connect(target, "publishing", context)
        self._link = self._link_type(
            target,
            wire,
            context,
            exchange=settings.exchange,
            window=settings.publish_window,
            refusing=self._refusing,
            lost=lost,
            impaired=lambda error: self.impaired(error),
        )
        return False

    async def close(self) -> None:
        """Disconnect; unsettled deliveries go back to their queues."""
        link, self._link = self._link, None
        if link is not None:
            await link.close()

    # --- publishing

    async def publish(self, batch: Sequence[Outgoing]) -> None:
        """See :class:`adapters.amqp.publisher.Publisher`."""
        link = self._link
        if link is None or not link.alive:
            error = ConnectionLostError(f"there is no connection to {self._target}")
            for message in batch:
                message.fail(error)
        else:
            await link.publisher.publish(batch)

    # --- subscribing

    async def subscribe(self, spec: SubscriptionSpec, sink: Sink) -> Any:
        """See :class:`adapters.amqp.consumer.Consumer`."""
        if self._link is None:
            raise ConnectionLostError(f"there is no connection to {self._target}")
        if spec.channel == names.DIRECT_CHANNEL and spec.channel_extension is None:
            return await self._link.publisher.receive_replies(sink)
        source = self._source(spec)
        position: StreamPosition | None = None
        if source.stream_offset is not None:
            position = self._positions.setdefault(sink, StreamPosition(source.stream_offset))
        return await self._link.subscribe(spec, sink, source, position)

    def _source(self, spec: SubscriptionSpec) -> Source:
        return declarations.source(spec, self.settings.exchange, self.settings.max_priority)

    def suspend_reading(self) -> None:
        """See ``Adapter.suspend_reading``: deliveries have a connection of their own."""
        if self._link is not None:
            self._link.read(False)

    def resume_reading(self) -> None:
        """See ``Adapter.resume_reading``."""
        if self._link is not None:
            self._link.read(True)

    async def unsubscribe(self, handle: Any) -> None:
        """Close the subscription's AMQP channel: its unsettled deliveries go back to the queue."""
        await handle.close()

    def acknowledge(self, tokens: Sequence[Any]) -> None:
        """``basic.ack``, gathered until the end of the loop's turn."""
        for consumer, tag in tokens:
            consumer.settle(tag, requeue=False)

    def reject(self, tokens: Sequence[Any]) -> None:
        """``basic.nack`` with requeue, gathered likewise; or what :mod:`.delays` and :mod:`.streams` do instead."""
        for consumer, tag in tokens:
            consumer.reject(tag)

    def is_stale(self, token: Any) -> bool:
        """Whether the delivery's AMQP channel is gone."""
        return not token[0].is_open


#: the subscriptions of request handlers are looked at again for each reply that names its channel
_compiled = lru_cache(maxsize=1024)(declarations.source)


def _check_names(channel: str, extension: str | None, key: str) -> None:
    if extension is None:
        names.check_length(key, f"channel {channel[:80]!r} as a routing key")
    else:
        names.check_length(channel, f"exchange {channel[:80]!r}")
        names.check_length(extension, f"routing key {extension[:80]!r}")
