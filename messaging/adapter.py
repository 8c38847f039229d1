"""The contract an adapter implements.

An adapter speaks one protocol to one broker for one messaging instance. It is small, asynchronous, batch-shaped and
dumb: it buffers only what its protocol demands, retries no request, correlates nothing, encodes no payload. Outbox,
deadlines, reconnecting, stream buffers, overflow, redelivery counting, dead letters and acknowledgement are the core's.

**Threads.** Every method is called on the engine's loop unless its docstring states otherwise, and every callback
must be called on it. Nothing here needs a lock. Blocking work goes to a thread (``messaging.execution.on_worker``).

**Life cycle.** ``set_endpoint`` → ``open`` → any of the rest → (connection lost → ``events.lost(cause)`` → the same
again)* → ``close``. The core decides when and where to open again; it never calls ``open`` twice at once. After a loss
and until ``open`` returns, only these two, ``unsubscribe``, ``acknowledge``, ``reject`` and ``close`` are called.

**Errors.** Every error raised or reported is a :class:`~messaging.errors.MessagingError`, with the exception of the
library as ``__cause__``. Its text never holds a password.

**Optional parts** are protocols: :class:`TakesEndpoint`, :class:`TakesCredentials`, :class:`TakesLastWill`,
:class:`FlowControl`, :class:`KeepsSession`, :class:`AdministersQueues`.

An adapter announces itself by an entry point in the group ``messaging.adapters``: name = URL scheme, value = the
:class:`Adapter` subclass. ``docs/adapters.md`` walks through writing one.
"""

from __future__ import annotations

import abc
from collections.abc import Awaitable, Callable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Final, Protocol, runtime_checkable

from messaging.errors import MessagingError
from messaging.errors import PlannedLossError as PlannedLossError
from messaging.model import Addressing

if TYPE_CHECKING:
    from messaging.model import BrokerUrl, Capabilities, Endpoint, Incoming, Outgoing, PublishPlan, SubscriptionSpec
    from messaging.model.credentials import Credentials
    from messaging.model.settings import Settings

ENTRY_POINT_GROUP: Final = "messaging.adapters"


class Events(Protocol):
    """Receives what happens to a connection. Implemented by the core; called on the loop."""

    def lost(self, cause: MessagingError) -> None:
        """Report the end of the connection, once, unless ``close`` ended it: the core opens the next host.

        After a ``PlannedLossError`` it opens the same host at once, after a ``RedirectedError`` the host in it.
        """

    def impaired(self, cause: MessagingError | None) -> None:
        """Report, while connected, that the broker is degraded (out of memory, say); ``None``: that it is not."""


class Sink(Protocol):
    """Receives the messages of a subscription. Implemented by the core; called on the loop."""

    def deliver(self, batch: Sequence[Incoming]) -> None:
        """Hand over messages in arrival order. Never blocks and never raises."""

    def fail(self, error: MessagingError) -> None:
        """Report that the broker ended the subscription for good (cancelled, queue deleted). The handle is void."""


class Adapter(abc.ABC):
    """Base class of adapters; see the module for threads, life cycle and errors."""

    #: ``osgi.messaging.provider`` (RFC 5.1)
    provider: ClassVar[str]
    #: the settings of this adapter, which are the query options of its URLs; a subclass of the common ones
    settings_type: ClassVar[type[Settings]]
    #: extension keys, also listed in ``capabilities.features`` -> check that returns the value to use, or raises
    #: ``ValueError`` naming correct values; those of the side at hand arrive in ``options.custom``
    publish_extensions: ClassVar[Mapping[str, Callable[[Any], Any]]] = MappingProxyType({})
    subscribe_extensions: ClassVar[Mapping[str, Callable[[Any], Any]]] = MappingProxyType({})

    #: what this instance can do, set by ``__init__``; replaced, before ``open`` returns, once the broker is known
    capabilities: Capabilities
    #: how requests and replies are addressed
    addressing: Addressing = Addressing()

    def __init__(self, url: BrokerUrl, settings: Settings, name: str) -> None:
        """Check the settings, an instance of ``settings_type``, as far as possible without a connection. No I/O.

        ``url`` is valid, ``url.password`` a ``SecretStr``; ``name`` is the ``osgi.messaging.name``, for client ids,
        consumer tags and logs. Raises ``ConfigurationError`` if settings contradict each other, and
        ``MissingExtraError`` if a library is not installed.
        """
        self.url = url
        self.settings = settings
        self.name = name

    def check_publish(self, plan: PublishPlan) -> None:  # noqa: B027  # most protocols refuse nothing
        """Refuse messages that this protocol cannot carry although it has the features, before anything is sent.

        Called on the *caller's* thread, once per distinct context: must be thread safe and do no I/O. Raises
        ``ArgumentError`` or ``UnsupportedFeatureError``, for a channel that is too long once translated, say.
        """

    def check_subscribe(self, spec: SubscriptionSpec) -> None:  # noqa: B027
        """Refuse a subscription that this protocol cannot make, as :meth:`check_publish` does messages."""

    @abc.abstractmethod
    async def open(self, events: Events) -> bool:
        """Connect. Cancelled by the core when the deadline of the attempt passes; must then leave nothing behind.

        Returns whether the broker resumed a session with all current subscriptions; if not, the core subscribes again.
        Raises ``AuthenticationError`` for refused credentials, ``RedirectedError`` to a named server, or
        ``ConnectFailedError``. ``events`` is told what happens to this connection.
        """

    @abc.abstractmethod
    async def close(self) -> None:
        """Disconnect in good order (no will is sent) and release everything. Idempotent; also after a loss.

        Returns within about a second even if the broker is silent. Does not raise. The core fails unsettled messages.
        """

    @abc.abstractmethod
    async def publish(self, batch: Sequence[Outgoing]) -> None:
        """Hand messages to the protocol, in order. Called by one task at a time.

        Returns as soon as the adapter can take the next batch: waiting in here, for room in its in-flight window or in
        the socket's buffer, *is* the back-pressure on publishers. It does not wait for confirms. Every message of the
        batch is settled sooner or later by ``confirm`` or ``fail``. On connection loss it returns at once, and each
        message not settled yet is either failed with ``ConnectionLostError`` or kept, if the protocol's session will
        finish the exchange after the next ``open`` (MQTT with QoS > 0); if that finds the session gone, it sends again.
        """

    @abc.abstractmethod
    async def subscribe(self, spec: SubscriptionSpec, sink: Sink) -> Any:
        """Subscribe and return a handle once the broker has confirmed.

        ``sink.deliver`` may be called before this returns. Subscriptions that overlap are independent of each other.
        Raises ``SubscriptionRefusedError``, or ``ConnectionLostError``: the core tries again after the next ``open``.
        """

    @abc.abstractmethod
    async def join(self, spec: SubscriptionSpec, sink: Sink, handle: Any | None) -> Any:
        """Subscribe to a further channel of ``handle``, or of a new one, and return it, as :meth:`subscribe`.

        All channels are delivered to one sink, in the order in which one publisher published. A message that several
        match is delivered once; one that is on its way while one of these is parted may be delivered twice. Tokens of
        all may be acknowledged together; ``unsubscribe`` and ``sink.fail`` end all. The bindings of a ``queue`` last as
        it does. The options are equal. The first call is alone, others come at the same time; a refusal ends no other
        channel. A protocol that subscribes to one filter at a time keeps a handle for each channel in this one.
        """

    @abc.abstractmethod
    async def part(self, handle: Any, channel: str) -> None:
        """Unsubscribe from a channel, joined or not; its tokens stay valid. Raises only ``ConnectionLostError``."""

    def abandon(self, handle: Any, is_abandoned: Callable[[str], bool]) -> None:  # noqa: B027  # only a session has any
        """Deliver messages of other subscriptions of a session on such channels, too: the core then parts them."""

    @abc.abstractmethod
    async def unsubscribe(self, handle: Any) -> None:
        """End a subscription; the broker is told when the last one of a channel ends. Idempotent.

        Every delivery of the subscription that was not settled is released, and its token is stale from now on. Where
        :meth:`redelivers` was true of the handle it must reach another consumer: requeued by the broker, or left
        unacknowledged for the session's next consumer. While disconnected it only forgets the subscription.
        Raises nothing but ``ConnectionLostError``.
        """

    @abc.abstractmethod
    def acknowledge(self, tokens: Sequence[Any]) -> None:
        """Acknowledge deliveries of one subscription, given by their tokens; never blocks.

        A token of an earlier connection is dropped unless the session still knows it: it must answer nothing else.
        """

    def reject(self, tokens: Sequence[Any]) -> None:
        """Make the broker deliver again, to any consumer, as :meth:`acknowledge`; only with ``can_reject``."""
        raise NotImplementedError

    def is_stale(self, token: Any) -> bool:
        """Return whether a verdict on ``token`` can no longer reach the broker. From any thread: only compare."""
        return False

    def redelivers(self, spec: SubscriptionSpec, handle: Any = None) -> bool:
        """Return whether unsettled messages of a subscription that ends are delivered again.

        With ``handle``, which is about to be unsubscribed: to another or the next consumer. If not, the core
        dead-letters them first, or counts them as dropped. Without: by the next connection, after a loss. If so, the
        core drops them from its buffers; otherwise it hands them out.
        """
        return spec.options.queue is not None and self.capabilities.can_reject


@runtime_checkable
class TakesEndpoint(Protocol):
    """An adapter that connects where it is told. One that does not is refused URLs with several hosts."""

    def set_endpoint(self, endpoint: Endpoint) -> None:
        """Connect to ``endpoint`` from the next ``open`` on, and verify its host's name, not its address, with TLS.

        The URL may not name it, if a broker referred to it. A session belongs to the host where it was made.
        """


@runtime_checkable
class TakesCredentials(Protocol):
    """An adapter that logs in with credentials that may change."""

    #: set by the core if they may; awaited before each connection. They win over those of URL and settings.
    credentials: Callable[[], Awaitable[Credentials]] | None

    async def renew(self, credentials: Credentials) -> None:
        """Log in anew within the connect timeout: here, or on the next connection after a ``PlannedLossError``.

        Raises ``ConnectionLostError`` if the connection ended meanwhile.
        """


@runtime_checkable
class TakesLastWill(Protocol):
    """An adapter with feature ``lastWill`` (RFC 6.3)."""

    async def set_will(self, will: Outgoing) -> None:
        """Have the broker publish ``will`` when this instance is lost; at most once in the life of an adapter.

        It is settled with ``confirm`` once the broker knows it. Before the first ``open`` it goes with that one and
        must not be dropped. Later, where the protocol fixes the will at connecting, the adapter ends the connection in
        good order and reports a ``PlannedLossError``.
        """


@runtime_checkable
class FlowControl(Protocol):
    """An adapter that can keep the broker from sending. Hints only: messages that still arrive are delivered."""

    def pause(self, handle: Any | None) -> None:
        """Ask for no more messages of a subscription; without a handle, read nothing for up to a second (for QoS 0)."""

    def resume(self, handle: Any | None) -> None:
        """Undo :meth:`pause`."""


@runtime_checkable
class KeepsSession(Protocol):
    """An adapter whose sessions may outlive a connection, see ``Capabilities.keeps_session``."""

    def detach(self, handle: Any) -> None:
        """End a subscription here and leave it, and its unsettled deliveries, at the broker; its tokens are stale."""

    def bequeath(self, handle: Any, heir: Any) -> None:
        """Deliver unsettled messages of ``handle``, which ends, to ``heir`` on its channel; not with ``can_reject``."""


@runtime_checkable
class AdministersQueues(Protocol):
    """An adapter with feature ``queueAdministration``. A refusal is a ``QueueRefusedError``, also for no such queue."""

    async def declare_queue(self, specs: Sequence[SubscriptionSpec], *, is_bound: bool) -> None:
        """Declare one queue as ``subscribe`` would and, if ``is_bound``, bind it. Refused if there is another one."""

    async def peek_queue(self, name: str, limit: int) -> Sequence[Incoming]:
        """Return the first messages, without tokens, and requeue them."""

    async def purge_queue(self, name: str) -> int:
        """Remove the messages that no consumer has, and return their number."""

    async def delete_queue(self, name: str, *, if_empty: bool, if_unused: bool) -> int:
        """Delete a queue, which ends its subscriptions; return the number of its messages."""
