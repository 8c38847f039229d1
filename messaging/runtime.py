"""MessageServiceRuntime and its data transfer objects (RFC 5.3, RFC 7).

A DTO is a snapshot: it does not change with the instance, and holds no secret. ``dataclasses.asdict`` converts it to
plain data.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import field
from typing import TYPE_CHECKING, Any, Protocol, get_args

from messaging.connection import Connection, StateName
from messaging.connection.properties import announced
from messaging.model import Features
from messaging.receiving import StreamCounters, Subscription
from messaging.services import ServiceReference
from messaging.services.reporting import counter, gauge, identity, info, label, part, state

if TYPE_CHECKING:
    from messaging.publishing import Outbox
    from messaging.publishing.stored import DurableOutboxDTO


@dataclasses.dataclass(frozen=True, slots=True)
class ServiceReferenceDTO:
    """A service in the registry."""

    id: int
    #: a copy, of plain values
    properties: dict[str, Any]


@dataclasses.dataclass(frozen=True, slots=True)
class ChannelDTO:
    """A channel (RFC 7.2)."""

    name: str
    #: routing key or routing key pattern, or ``None``
    extension: str | None
    #: whether the channel is connected now
    connected: bool


@dataclasses.dataclass(frozen=True, slots=True)
class SubscriptionDTO:
    """A subscription (RFC 7.3)."""

    #: the ``MessageSubscription`` service that made the subscription
    service: ServiceReferenceDTO
    channel: ChannelDTO = field(metadata=label("channel", "name"))
    buffered: int = field(metadata=gauge("messages buffered between broker and consumer", "messages"))
    counters: StreamCounters = field(metadata=part(""))
    #: distinguishes the subscriptions of an instance
    id: int = field(default=0, metadata=identity())


@dataclasses.dataclass(frozen=True, slots=True)
class ReplyToSubscriptionDTO:
    """A request handler bound to a channel (RFC 7.4)."""

    service: ServiceReferenceDTO
    request_channel: ChannelDTO
    response_channel: ChannelDTO | None
    handler_service: ServiceReferenceDTO
    generate_correlation_id: bool = False
    generate_reply_channel: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class PublisherDTO:
    """Counters of published messages; not in the RFC."""

    pending: int = field(metadata=gauge("messages that are accepted and not settled", "messages"))
    published: int = field(metadata=counter("messages whose promises resolved", "messages"))
    failed: int = field(metadata=counter("messages whose promises failed", "messages"))


@dataclasses.dataclass(frozen=True, slots=True)
class RequestsDTO:
    """Counters of requests; not in the RFC."""

    pending: int = field(metadata=gauge("requests that wait for their replies"))
    answered: int = field(metadata=counter("requests with a reply"))
    faults: int = field(metadata=counter("requests whose reply reported a failure of the handler"))
    failed: int = field(metadata=counter("requests that failed for another reason"))
    late: int = field(metadata=counter("replies that arrived after their request had failed", name="late_replies"))
    duplicate: int = field(metadata=counter("replies after the first one to a request", name="duplicate_replies"))
    foreign: int = field(
        metadata=counter("messages on a reply channel that belong to no request of this instance", "messages")
    )


@dataclasses.dataclass(frozen=True, slots=True)
class ConnectionDTO:
    """The state of the connection (MSG060); not in the RFC."""

    #: see :mod:`messaging.connection.state`
    state: str = field(metadata=state("state of the connection", get_args(StateName)))
    #: text of the last problem, or ``None``; kept after the problem is over
    cause: str | None
    since: float = field(
        metadata=gauge("begin of the state, since the epoch", "seconds", name="state_since_timestamp_seconds")
    )
    #: name of this client at the broker; ``None`` if it is not known, or the protocol has none
    client_id: str | None
    #: the host that the instance is connected to, or tried last; ``None`` before the first attempt
    host: str | None = None
    connects: int = field(
        default=0,
        metadata=counter("connections that were made; one more than the reconnects", name="established"),
    )
    losses: int = field(default=0, metadata=counter("connections that were lost", name="lost"))


@dataclasses.dataclass(frozen=True, slots=True)
class MessagingRuntimeDTO:
    """A messaging instance (RFC 7.1)."""

    #: the ``MessageServiceRuntime`` service
    service: ServiceReferenceDTO
    #: the broker URL; a password is masked
    connection_uri: str
    provider_name: str = field(metadata=info("provider"))
    protocols: tuple[str, ...] = field(metadata=info())
    #: the ``osgi.messaging.name``
    instance_id: str
    features: tuple[str, ...]
    subscriptions: tuple[SubscriptionDTO, ...] = field(metadata=part("subscription"))
    reply_to_subscriptions: tuple[ReplyToSubscriptionDTO, ...]
    connection: ConnectionDTO
    publisher: PublisherDTO
    requests: RequestsDTO
    #: ``None``: unlimited (MSG205)
    max_message_size: int | None = field(
        metadata=gauge("largest payload that can be published; absent: unlimited", "bytes")
    )
    #: the messages on disk; ``None`` without the setting ``outbox_path``
    outbox: DurableOutboxDTO | None = None


def reference_dto(reference: ServiceReference) -> ServiceReferenceDTO:
    """Return the DTO of a service reference."""
    properties = dict(reference.properties)
    return ServiceReferenceDTO(id=properties["service.id"], properties=properties)


class Requests(Protocol):
    """The requests of an instance."""

    @property
    def pending(self) -> int:
        """Number of requests that wait for their replies."""

    @property
    def counters(self) -> Any:
        """Counters of requests: the other fields of :class:`RequestsDTO`."""


class Whiteboard(Protocol):
    """The whiteboard of an instance."""

    @property
    def bindings(self) -> Iterable[tuple[str, Any, bool]]:
        """Channel, requested binding and whether the channel is subscribed, for each handler."""


class MessageServiceRuntime:
    """The service that describes a messaging instance (RFC 5.3). Thread safe; get it as ``Messaging.runtime``."""

    def __init__(self, connection: Connection, outbox: Outbox, requests: Requests, whiteboard: Whiteboard) -> None:
        self._connection = connection
        self._outbox = outbox
        self._requests = requests
        self._whiteboard = whiteboard
        self._own: ServiceReference
        self._subscription_service: ServiceReference

    def bind(self, own: ServiceReference, subscription_service: ServiceReference) -> None:
        """Set the references of this service and of the subscription service, once they are registered."""
        self._own = own
        self._subscription_service = subscription_service

    def get_runtime_dto(self) -> MessagingRuntimeDTO:
        """Return a snapshot of the instance: connection, features, subscriptions and counters."""
        connection = self._connection
        adapter = connection.adapter
        capabilities = adapter.capabilities
        outbox = self._outbox
        current = connection.states.value
        return MessagingRuntimeDTO(
            service=reference_dto(self._own),
            connection_uri=str(adapter.url),
            provider_name=adapter.provider,
            protocols=capabilities.protocols,
            instance_id=adapter.name,
            features=tuple(sorted(announced(adapter))),
            subscriptions=tuple(
                self._subscription(each)
                for each in connection.subscriptions.snapshot()
                if isinstance(each, Subscription) and each.is_stream and not each.dismissed
            ),
            reply_to_subscriptions=self._handlers(),
            connection=ConnectionDTO(
                current.name,
                str(connection.cause) if connection.cause else None,
                current.since,
                capabilities.client_id,
                current.host,
                connection.epoch.number,
                connection.losses,
            ),
            publisher=PublisherDTO(outbox.pending, outbox.published, outbox.failed),
            requests=RequestsDTO(self._requests.pending, **dataclasses.asdict(self._requests.counters)),
            max_message_size=capabilities.max_message_size,
            outbox=outbox.get_dto(),
        )

    def problems(self) -> Sequence[str]:
        """Return why the instance cannot be used now, as texts for people; empty: it works."""
        name = self._connection.adapter.name
        current = self._connection.states.value
        return () if current.name == "connected" else (f"instance '{name}': {current}",)

    def _handlers(self) -> tuple[ReplyToSubscriptionDTO, ...]:
        features = announced(self._connection.adapter)
        is_up = self._connection.states.value.is_up
        return tuple(
            ReplyToSubscriptionDTO(
                service=reference_dto(self._subscription_service),
                request_channel=ChannelDTO(channel, None, is_up and subscribed),
                response_channel=(
                    ChannelDTO(wanted.terms.reply_channel, None, is_up)
                    if wanted.terms.reply_channel is not None
                    else None
                ),
                handler_service=reference_dto(wanted.reference),
                generate_correlation_id=Features.GENERATE_CORRELATION_ID in features,
                generate_reply_channel=Features.GENERATE_REPLY_CHANNEL in features,
            )
            for channel, wanted, subscribed in self._whiteboard.bindings
        )

    def _subscription(self, subscription: Subscription) -> SubscriptionDTO:
        spec = subscription.spec
        return SubscriptionDTO(
            service=reference_dto(self._subscription_service),
            channel=ChannelDTO(
                spec.channel,
                spec.channel_extension,
                self._connection.states.value.is_up and subscription.handle is not None,
            ),
            buffered=subscription.buffered,
            counters=dataclasses.replace(subscription.counters),
            id=id(subscription),
        )
