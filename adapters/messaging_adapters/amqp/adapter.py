"""``AmqpAdapter``: AMQP 0-9-1, with RabbitMQ's extensions, behind the contract of :mod:`messaging.adapter`.

**Channels.** A channel without extension is a routing key on the topic exchange ``exchange`` (:mod:`.names`), and a
subscription pattern a binding of it. ``channel(name, extension)`` is AMQP as it is: the exchange ``name``, and the
extension its routing key or, subscribing, its binding key. With ``autocreate`` (the default) an exchange or queue that
does not exist is declared, as the extensions say (:mod:`.extensions`). One that exists is used as it is.

**Queues.** A subscription without ``queue`` has an exclusive queue of its own, which is deleted with it. Subscriptions
with the same ``queue`` compete for a durable queue, which keeps messages while it has no consumer and is never deleted
from here. All messages of such a queue are delivered, also messages that arrived by bindings of other programs or by
the default exchange.

**Guarantees.** Level "1" (the default): confirmed by the broker when publishing, acknowledged when consuming. Level
"0": a message is done once written, a delivery once sent. ``guaranteedDelivery`` makes messages persistent as well.
``docs/amqp.md`` is the reference.
"""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Final
from weakref import WeakKeyDictionary

from messaging.adapter import Adapter, Events, Sink
from messaging.errors import (
    ConnectionLostError,
    InvalidChannelError,
    InvalidExtensionError,
    InvalidHeaderError,
    MissingExtraError,
)
from messaging.model import QUEUE_BROKER_FEATURES, Capabilities, Features, Outgoing, SubscriptionSpec, channels, headers
from messaging.model.credentials import Credentials
from messaging.model.settings import Settings
from messaging_adapters.amqp import extensions, names, properties
from messaging_adapters.amqp.addressing import AmqpAddressing
from messaging_adapters.amqp.deliveries import QueueSubscription, StreamPosition
from messaging_adapters.amqp.target import AmqpSettings, make_target

if TYPE_CHECKING:
    from messaging.model import BrokerUrl, Endpoint, Incoming, PublishPlan
    from messaging_adapters.amqp.consumer import QueueConsumer

#: largest message that RabbitMQ takes by default, bytes
DEFAULT_MAX_MESSAGE_SIZE: Final = 134_217_728

_FEATURES: Final = QUEUE_BROKER_FEATURES | {*extensions.EXTENSIONS}
#: messages of one publish: a few writes to the socket
_BATCH: Final = 1024


class AmqpAdapter(Adapter):
    """See the module and :class:`~messaging.adapter.Adapter`."""

    provider: ClassVar[str] = "rx-messaging.amqp"
    settings_type: ClassVar[type[Settings]] = AmqpSettings
    publish_extensions: ClassVar[Mapping[str, Callable[[Any], Any]]] = extensions.PUBLISH_EXTENSIONS
    subscribe_extensions: ClassVar[Mapping[str, Callable[[Any], Any]]] = extensions.SUBSCRIBE_EXTENSIONS

    settings: AmqpSettings
    addressing: AmqpAddressing
    credentials: Callable[[], Awaitable[Credentials]] | None = None

    def __init__(self, url: BrokerUrl, settings: Settings, name: str) -> None:
        super().__init__(url, settings, name)
        try:
            from messaging_adapters.amqp import administration, link
        except ModuleNotFoundError as error:
            if (error.name or "").partition(".")[0] not in ("aio_pika", "aiormq", "pamqp", "yarl"):
                raise
            raise MissingExtraError("amqp", f"{url.scheme}://") from error
        self._administration = administration
        self._connector = link.Connector(make_target(url, self.settings, name), self.settings)
        self.capabilities = Capabilities(
            name=name,
            protocols=("amqp", "amqp0-9-1"),
            features=_FEATURES,
            qos_levels=("0", "1"),  # unconfirmed, and at least once: AMQP has no exactly once
            default_qos="1",
            header_types=headers.TYPED,  # all: field tables have a type for each
            max_message_size=self.settings.max_message_size or DEFAULT_MAX_MESSAGE_SIZE,
            publish_window=min(_BATCH, self.settings.publish_window),
            can_reject=True,
            publish_extensions=self.publish_extensions,
            subscribe_extensions=self.subscribe_extensions,
            reply_extensions=frozenset({extensions.ENVELOPE}),
        )
        self.addressing = AmqpAddressing(self.settings)
        #: positions of the subscriptions that read streams
        self._positions: WeakKeyDictionary[Sink, StreamPosition] = WeakKeyDictionary()

    # --- checks and capabilities

    def check_publish(self, plan: PublishPlan) -> None:
        """Refuse values that are too long for AMQP, ``CC``, and extensions that contradict each other."""
        options, channel = plan.options, plan.channel
        _check_names(channel, plan.channel_extension, names.routing_key(channel))
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
        plan.slot = properties.PublishForm(plan, self.settings.exchange)

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
        self.addressing.source(spec)

    def redelivers(self, spec: SubscriptionSpec, handle: Any = None) -> bool:
        """Return ``False`` for queues that may be deleted with the connection, or with their last consumer."""
        custom = spec.options.custom
        gone = custom.get(extensions.AUTO_DELETE, False)
        if handle is None:
            gone = gone or custom.get(extensions.EXCLUSIVE, False)
        return spec.options.queue is not None and not gone

    # --- connection

    def set_endpoint(self, endpoint: Endpoint) -> None:
        self._connector.target = self._connector.target.at(endpoint)

    async def open(self, events: Events) -> bool:
        """Connect for publishing; the connection for consuming is made with the first subscription."""
        self._connector.provider = self.credentials
        await self._connector.open(events)
        return False

    async def renew(self, credentials: Credentials) -> None:
        await self._connector.renew(credentials)

    async def close(self) -> None:
        """Disconnect. Unsettled deliveries are requeued."""
        await self._connector.close()

    # --- publishing

    async def publish(self, batch: Sequence[Outgoing]) -> None:
        """See :class:`messaging_adapters.amqp.publisher.AmqpPublisher`."""
        link = self._connector.link
        if link is None or not link.alive:
            error = ConnectionLostError(f"there is no connection to {self._connector.target}")
            for message in batch:
                message.fail(error)
        else:
            await link.publisher.publish(batch)

    # --- subscribing

    async def subscribe(self, spec: SubscriptionSpec, sink: Sink) -> Any:
        """See :class:`messaging_adapters.amqp.consumer.QueueConsumer`."""
        link = self._connector.linked()
        if spec.channel == names.DIRECT_CHANNEL and spec.channel_extension is None:
            return await link.publisher.channels.receive_replies(sink)
        source = self.addressing.source(spec)
        position: StreamPosition | None = None
        if source.stream_offset is not None:
            position = self._positions.setdefault(sink, StreamPosition(source.stream_offset))
        return await link.subscribe(QueueSubscription(spec, sink, source, position))

    async def join(self, spec: SubscriptionSpec, sink: Sink, handle: QueueConsumer | None) -> QueueConsumer:
        """See ``Adapter.join`` and :meth:`messaging_adapters.amqp.consumer.QueueConsumer.join`."""
        link, source = self._connector.linked(), self.addressing.source(spec)
        if handle is None:
            # the core knows the channels: to the consumer, whatever is in the queue is wanted
            return await link.subscribe(QueueSubscription(spec, sink, source._replace(patterns=())))
        await handle.join(spec.channel, names.binding_key(spec.channel))
        return handle

    async def part(self, handle: QueueConsumer, channel: str) -> None:
        await handle.part(names.binding_key(channel))

    def pause(self, handle: Any | None) -> None:
        """Read no more deliveries, which have a connection of their own. Single subscriptions have their credit."""
        if handle is None and self._connector.link is not None:
            self._connector.link.read(False)

    def resume(self, handle: Any | None) -> None:
        """Undo :meth:`pause`."""
        if handle is None and self._connector.link is not None:
            self._connector.link.read(True)

    async def unsubscribe(self, handle: Any) -> None:
        """Close the subscription's AMQP channel: its unsettled deliveries are requeued."""
        await handle.close()

    def acknowledge(self, tokens: Sequence[Any]) -> None:
        """Acknowledge deliveries with ``basic.ack``, sent together at the end of the loop's turn."""
        for consumer, tag in tokens:
            consumer.settle(tag, requeue=False)

    def reject(self, tokens: Sequence[Any]) -> None:
        """Requeue deliveries with ``basic.reject``, sent likewise, delay them (:mod:`.delays`), or redeliver them."""
        for consumer, tag in tokens:
            consumer.reject(tag)

    def is_stale(self, token: Any) -> bool:
        """Return whether the delivery's AMQP channel is closed."""
        return not token[0].is_open

    # --- queues

    async def declare_queue(self, specs: Sequence[SubscriptionSpec], *, is_bound: bool) -> None:
        sources = [self.addressing.source(spec) for spec in specs]
        queue = sources[0].queue
        if queue.exclusive:
            raise InvalidExtensionError(
                extensions.EXCLUSIVE,
                "the queue would be deleted at once, with the connection that declares it; a subscription declares one",
            )
        if queue.declare == "none":
            raise InvalidExtensionError(extensions.DECLARE, "'none' declares nothing; 'passive' checks for the queue")
        declare = functools.partial(self._administration.declare, sources=sources, is_bound=is_bound)
        await self._connector.linked().administer(f"queue {queue.name!r} is not declared", declare, queue)
        for source in sources if is_bound else ():
            self._connector.refusing.declared(source)

    async def peek_queue(self, name: str, limit: int) -> list[Incoming]:
        peek = functools.partial(self._administration.peek, name=name, limit=limit, exchange=self.settings.exchange)
        return await self._connector.linked().administer(f"queue {name!r} is not peeked at", peek)

    async def purge_queue(self, name: str) -> int:
        purge = functools.partial(self._administration.purge, name=name)
        return await self._connector.linked().administer(f"queue {name!r} is not purged", purge)

    async def delete_queue(self, name: str, *, if_empty: bool, if_unused: bool) -> int:
        delete = functools.partial(self._administration.delete, name=name, if_empty=if_empty, if_unused=if_unused)
        return await self._connector.linked().administer(f"queue {name!r} is not deleted", delete)


def _check_names(channel: str, extension: str | None, key: str) -> None:
    if extension is None:
        names.check_length(key, f"channel {channel[:80]!r} as a routing key")
    else:
        names.check_length(channel, f"exchange {channel[:80]!r}")
        names.check_length(extension, f"routing key {extension[:80]!r}")
