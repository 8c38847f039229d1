"""The contract an adapter implements, and the few types that cross it.

An adapter speaks one protocol to one broker for one messaging instance. It is small, asynchronous, batch-shaped
and dumb: it buffers nothing beyond what its protocol demands, retries no request, correlates nothing, encodes no
payload. Outbox, deadlines, reconnecting, stream buffers, overflow, redelivery counting, dead letters and
acknowledgement rules are the core's.

**Threads.** Every method is called on the engine's loop, and every callback the adapter was given must be called
on it. Nothing here needs a lock. Blocking work (a TLS handshake in a blocking library, a DNS look-up) goes to
``loop.run_in_executor``.

**Life cycle.** ``open`` → any of the rest → (connection lost → ``lost(cause)`` → ``open`` again)* →
``close``. The core decides when to open again and with what delay; it never calls ``open`` twice at once. After a
loss and until ``open`` returns, only ``open``, ``unsubscribe``, ``acknowledge``, ``reject`` and ``close`` are called.

**Errors.** Every error that an adapter raises or reports is a :class:`~messaging.errors.MessagingError`, with the
exception of its library as ``__cause__``. The text of an error never holds a password.

An adapter announces itself by an entry point in the group ``messaging.adapters``: name = URL scheme, value = the
:class:`Adapter` subclass. ``docs/adapters.md`` walks through writing one.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Final, NamedTuple, Protocol

from messaging.errors import ConnectionLostError, UnsupportedFeatureError
from messaging.model import GENERATE_REPLY_CHANNEL_ALIAS, Features, channels, headers

if TYPE_CHECKING:
    from messaging.errors import MessagingError
    from messaging.model import BrokerUrl, Incoming, Outgoing, PublishPlan, SubscribeOptions
    from messaging.model.settings import Settings

ENTRY_POINT_GROUP: Final = "messaging.adapters"
#: first level of the reply channels that are made for requests
REPLY_CHANNELS: Final = "reply"

#: What the core does for every adapter that acknowledges; an adapter announces these beside its own.
CORE_FEATURES: Final = frozenset(
    {
        Features.ACKNOWLEDGE,
        Features.MESSAGE_SIZE_LIMIT,
        Features.EXTENSION_GUARANTEED_ORDERING,
        Features.EXTENSION_AUTO_ACKNOWLEDGE,
        Features.EXTENSION_TIMEOUT,
        Features.EXTENSION_DEAD_LETTER_CHANNEL,
        Features.EXTENSION_MAX_DELIVERIES,
        Features.EXTENSION_PREFETCH,
        Features.EXTENSION_BUFFER_SIZE,
        Features.EXTENSION_OVERFLOW,
    }
)


#: features an adapter must announce for requests and replies, and the features that the core then adds
_REPLY_NEEDS: Final = frozenset({Features.MESSAGE_PROPERTIES, Features.EXTENSION_HEADERS})
REPLY_FEATURES: Final = frozenset({Features.REPLY_TO, Features.REPLY_TO_MANY_PUBLISH, Features.REPLY_TO_MANY_SUBSCRIBE})


class PlannedLossError(ConnectionLostError):
    """The adapter ended a connection on purpose, to make another one; it is not reported as a problem."""


class ReplyAddress(NamedTuple):
    """Where the replies to an instance's requests arrive.

    Attributes:
        pattern: the pattern to which the instance subscribes.
        channel: the reply channel of its requests.
        individual: whether each request has a reply channel of its own: ``channel``, with the correlation id as a
            further level.
    """

    pattern: str
    channel: str
    individual: bool = False


class ReplyRoute(NamedTuple):
    """One address to which a reply can be published.

    Attributes:
        channel, channel_extension: the address.
        mandatory: whether the broker reports that the address has no subscriber.
    """

    channel: str
    channel_extension: str | None = None
    mandatory: bool = False


class Sink(Protocol):
    """Receives the messages of a subscription. Implemented by the core; called on the loop."""

    def deliver(self, batch: Sequence[Incoming]) -> None:
        """Hand over messages in arrival order. Never blocks and never raises."""

    def fail(self, error: MessagingError) -> None:
        """Report that the broker ended the subscription for good (cancelled, queue deleted). The handle is void."""


class SubscriptionSpec:
    """Channel and options of a subscription. Made by the core.

    Attributes:
        channel: passed ``check_pattern``.
        channel_extension: routing key pattern, as given; only with feature ``routingKey``.
        options: the checked extensions, defaults filled in. ``options.prefetch`` is how many unsettled
            deliveries the core can take; an adapter whose protocol has credit per consumer must not exceed it.
    """

    __slots__ = ("channel", "channel_extension", "options")

    def __init__(self, channel: str, channel_extension: str | None, options: SubscribeOptions) -> None:
        self.channel = channel
        self.channel_extension = channel_extension
        self.options = options


class Adapter(abc.ABC):
    """Base class of adapters; see the module for threads, life cycle and errors."""

    #: ``osgi.messaging.provider`` (RFC 5.1)
    provider: ClassVar[str]
    #: the settings of this adapter, which are the query options of its URLs; a subclass of the common ones
    settings_type: ClassVar[type[Settings]]
    #: whether :meth:`reject` has a form on the wire. Without it the core redelivers by itself.
    can_reject: ClassVar[bool]
    #: extension keys of this adapter alone, for publishing and for subscribing (a key may be in both) -> check that
    #: returns the value to use, or raises ``ValueError`` with a text that names correct values. Their values arrive in
    #: ``options.custom``, those of the other side left out; their names belong into ``features``.
    publish_extensions: ClassVar[Mapping[str, Callable[[Any], Any]]] = MappingProxyType({})
    subscribe_extensions: ClassVar[Mapping[str, Callable[[Any], Any]]] = MappingProxyType({})
    #: extension keys that a reply copies from its request
    reply_extensions: ClassVar[frozenset[str]] = frozenset()
    #: whether the protocol holds back deliveries until earlier ones are settled, so that overflow policy
    #: ``block`` needs nothing else. Deliveries without token are exempt.
    has_credit: ClassVar[bool]

    def __init__(self, url: BrokerUrl, settings: Settings, name: str) -> None:
        """Check the settings as far as possible without a connection. No I/O.

        Args:
            url: parsed and valid; ``url.password`` is a ``SecretStr``.
            settings: an instance of ``settings_type``.
            name: the ``osgi.messaging.name``, for client ids, consumer tags and logs.

        Raises:
            ConfigurationError: settings contradict each other.
            MissingExtraError: the library this adapter needs is not installed.
        """
        self.url = url
        self.settings = settings
        self.name = name
        #: Set by the core. To be called on the loop while connected: with the reason when the broker is degraded (it
        #: accepts no messages for lack of memory, for example), with ``None`` when that is over. A loss ends it, too.
        self.impaired: Callable[[MessagingError | None], object] = _nothing

    # --- what it can do

    @property
    def client_id(self) -> str | None:
        """Return the name of this client at the broker; ``None`` if it is not known yet, or the protocol has none."""
        return None

    @property
    @abc.abstractmethod
    def protocols(self) -> tuple[str, ...]:
        """Return the ``osgi.messaging.protocol`` of this instance, such as ``("mqtt", "mqtt5")``."""

    @property
    @abc.abstractmethod
    def features(self) -> frozenset[str]:
        """Return the announced features, all of which must work. May shrink at the first ``open``."""

    @property
    def announced(self) -> frozenset[str]:
        """Return the ``osgi.messaging.feature`` of the instance: :attr:`features` and those of the core (RFC 5.7)."""
        features = self.features
        if not features >= _REPLY_NEEDS:
            return features
        found = features | REPLY_FEATURES
        if self.settings.generate_correlation_id:
            found |= {Features.GENERATE_CORRELATION_ID}
        if self.settings.generate_reply_channel:
            found |= {Features.GENERATE_REPLY_CHANNEL, GENERATE_REPLY_CHANNEL_ALIAS}
        return found

    def way_out(self, feature: str) -> str:
        """Return the settings with which an instance has ``feature``, such as "set version=5"; empty if there are none.

        Errors include the text.
        """
        return ""

    def lacks(self, feature: str, hint: str = "", *, supported: Iterable[str] = ()) -> UnsupportedFeatureError:
        """Return the error for ``feature``, which this instance does not announce.

        Args:
            feature: its name, or the unsupported value of it.
            hint: a text in addition to :meth:`way_out`.
            supported: names of supported alternatives.
        """
        hints = "; ".join(filter(None, (hint, self.way_out(feature))))
        return UnsupportedFeatureError(feature, self.name, hints, supported=supported)

    @property
    @abc.abstractmethod
    def qos_levels(self) -> tuple[str, ...]:
        """Return the values of the extension ``qos``, lowest first; empty without feature ``qos``."""

    @property
    def acknowledging_qos(self) -> str | None:
        """Return the lowest level with acknowledgement, or ``None``."""
        return next((level for level in self.qos_levels if level != "0"), None)

    @property
    def default_qos(self) -> str:
        """Return the level of a message or subscription that sets neither a level nor a guarantee."""
        return self.qos_levels[0] if self.qos_levels else "0"

    @property
    def header_types(self) -> frozenset[type]:
        """Return the types of header values that the protocol carries, see :mod:`messaging.model.headers`."""
        return headers.TEXT

    @property
    def max_message_size(self) -> int | None:
        """Return the largest payload in bytes that can be published; ``None``: unlimited (MSG205)."""
        return None

    def check_publish(self, plan: PublishPlan) -> None:
        """Refuse messages that this protocol cannot carry although it has the features, before anything is sent.

        Called on the *caller's* thread, once per distinct context: must be thread safe and do no I/O.

        Raises:
            ArgumentError: for instance a channel that is too long once translated.
            UnsupportedFeatureError: a combination this protocol lacks.
        """
        return

    def check_subscribe(self, spec: SubscriptionSpec) -> None:
        """Refuse a subscription that this protocol cannot make, as :meth:`check_publish` does a context."""
        return

    @property
    def keeps_session(self) -> bool:
        """Return whether the broker keeps subscriptions and unsettled deliveries while this instance is away.

        If so, closing the instance does not unsubscribe; closing a single stream does.
        """
        return False

    def redelivers(self, spec: SubscriptionSpec) -> bool:
        """Return whether the next connection delivers the unsettled messages of a lost one again.

        If so, the core drops them from its buffers; otherwise it hands them out.
        """
        return spec.options.queue is not None and self.can_reject

    def requeues(self, spec: SubscriptionSpec, handle: Any) -> bool:
        """Return whether another or the next consumer receives the unsettled messages of an unsubscribed ``handle``.

        If not, the core dead-letters them before it unsubscribes, or counts them as dropped. On the loop.
        """
        return self.redelivers(spec)

    def reply_address(self, token: str) -> ReplyAddress:
        """Return the address for replies to requests without a reply channel (RFC 5.7.2, ``generateReplyChannel``).

        Only with feature ``messageProperties``.

        Args:
            token: unguessable and unique to this instance; without ``/`` and wildcards.
        """
        channel = f"{REPLY_CHANNELS}/{token}"
        return ReplyAddress(channel, channel)

    def reply_routes(self, channel: str) -> tuple[ReplyRoute, ...]:
        """Return the addresses to which a reply for the received reply channel ``channel`` can be published.

        Returns:
            At least one. The core tries the next one if an address has no subscriber.
        """
        return (ReplyRoute(channel, mandatory=Features.EXTENSION_MANDATORY in self.features),)

    def patterns(self, spec: SubscriptionSpec) -> tuple[str, ...]:
        """Return the channel patterns of a subscription: its own, and additions of its extensions."""
        return (spec.channel,)

    def reaches(self, spec: SubscriptionSpec, channel: str, channel_extension: str | None) -> bool:
        """Return whether messages to an address arrive at a subscription, as far as both are known.

        Called on any thread; the channel is a name. A reply that would arrive at a request handler is refused by it.
        """
        same_kind = (spec.channel_extension is None) == (channel_extension is None)
        return same_kind and channels.matches(spec.channel, channel)

    # --- connection

    @abc.abstractmethod
    async def open(self, lost: Callable[[MessagingError], None]) -> bool:
        """Connect. Cancelled by the core when the connect timeout passes; must then leave nothing behind.

        Args:
            lost: to be called once if this connection ends without :meth:`close`.

        Returns:
            Whether the broker resumed a session in which all current subscriptions live on. If not, the core
            subscribes again.

        Raises:
            AuthenticationError: credentials refused.
            ConnectFailedError: anything else that kept the connection from being made.
        """

    @abc.abstractmethod
    async def close(self) -> None:
        """Disconnect in good order (no will is sent) and release everything. Idempotent; also after a loss.

        Returns within about a second even if the broker is silent. Does not raise. The core fails every
        :class:`Outgoing` that the adapter still holds with ``ClosedError``.
        """

    # --- publishing

    @abc.abstractmethod
    async def publish(self, batch: Sequence[Outgoing]) -> None:
        """Hand messages to the protocol, in order. Called by one task at a time.

        Returns as soon as the adapter can take the next batch: waiting in here, for room in its in-flight window
        or in the socket's buffer, *is* the back-pressure on publishers. It does not wait for confirms. Every
        message of the batch is settled sooner or later by ``confirm`` or ``fail``.

        On connection loss it returns at once, and each message not settled yet is either failed with
        ``ConnectionLostError`` or kept, if the protocol's session will finish the exchange after the next
        ``open`` (MQTT with QoS > 0); if that ``open`` finds the session gone, it sends it again by itself.
        """

    @property
    def publish_window(self) -> int:
        """Return the maximum number of messages that the core hands over in one batch."""
        return 1024

    async def set_will(self, will: Outgoing) -> None:
        """Have the broker publish ``will`` when this instance is lost (RFC 6.3, ``lastWill``).

        Only called with feature ``lastWill`` announced, and at most once in the life of an adapter. It is settled
        with ``confirm`` once the broker knows it. Where the protocol fixes the will at connecting, the adapter
        ends the connection in good order and calls ``lost`` with a :class:`PlannedLossError`; the core opens again
        without delay.
        """
        raise self.lacks(Features.EXTENSION_LAST_WILL)

    # --- subscribing

    @abc.abstractmethod
    async def subscribe(self, spec: SubscriptionSpec, sink: Sink) -> Any:
        """Subscribe and return a handle once the broker has confirmed.

        ``sink.deliver`` may be called before this returns. Two subscriptions, equal or overlapping, are
        independent: each gets every matching message exactly once.

        Raises:
            SubscriptionRefusedError: the broker refused the subscription.
            ConnectionLostError: the connection was lost; the core tries again after the next ``open``.
        """

    @abc.abstractmethod
    async def unsubscribe(self, handle: Any) -> None:
        """End a subscription; the broker is told when the last one of a channel ends. Idempotent.

        Every delivery of the subscription that was not settled is released, and its token is stale from now on. Where
        :meth:`requeues` was true it must reach another consumer: requeued by the broker, or left unacknowledged for the
        session's next consumer. While disconnected it only forgets the subscription.
        Raises nothing but ``ConnectionLostError``.
        """

    def detach(self, handle: Any) -> None:
        """End a subscription here and leave it at the broker. Only called with :attr:`keeps_session`.

        Its unsettled deliveries stay unsettled; its tokens are stale from now on.
        """
        raise NotImplementedError

    def bequeath(self, handle: Any, heir: Any) -> None:
        """Deliver the unsettled messages of ``handle`` to ``heir``, which replaces it on the same channel.

        Called before ``handle`` is unsubscribed, only without ``can_reject``. With it the broker does this.
        """
        return

    @abc.abstractmethod
    def acknowledge(self, tokens: Sequence[Any]) -> None:
        """Acknowledge deliveries of one subscription, given by their tokens; never blocks.

        A token of an earlier connection is dropped unless the protocol's session still knows it: it must never
        reach the broker as an answer to something else.
        """

    def reject(self, tokens: Sequence[Any]) -> None:
        """Make the broker deliver again, to this or another consumer; otherwise as :meth:`acknowledge`.

        Only called with ``can_reject``.
        """
        raise self.lacks(Features.BROKER_REDELIVERY)

    def is_stale(self, token: Any) -> bool:
        """Return whether a verdict on ``token`` can no longer reach the broker.

        Called from any thread, so it must only compare; ``AcknowledgeHandler`` then answers ``False``.
        """
        return False

    def suspend_reading(self) -> None:
        """Read nothing from the broker until :meth:`resume_reading`, because the buffers of streams are filling.

        A hint, for a fraction of a second at a time. Under load it leaves processor time to the consumers, makes larger
        batches and, without another form of back-pressure (QoS 0), saves messages from the overflow of a buffer.
        Messages that still arrive are delivered.
        """
        return

    def resume_reading(self) -> None:
        """Read again after :meth:`suspend_reading`."""
        return

    def pause(self, handle: Any) -> None:
        """Ask the broker to send nothing more to this subscription for now, where the protocol can.

        A hint: messages that still arrive are delivered. Without support in the protocol it does nothing; the credit
        of unsettled deliveries then limits the broker.
        """
        return

    def resume(self, handle: Any) -> None:
        """Let the broker send again after :meth:`pause`."""
        return


def _nothing(_: MessagingError | None) -> None:
    """Do nothing: the default of a callback."""
