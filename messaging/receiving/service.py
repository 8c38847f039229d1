"""MessageSubscription (RFC 5.4): checks a context and opens a stream for it."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final, Literal, get_args

from messaging.codecs import check_model
from messaging.connection import Connection
from messaging.environment.signals import on_failure
from messaging.errors import (
    ArgumentError,
    InvalidChannelError,
    InvalidExtensionError,
)
from messaging.interception import ProcessChain
from messaging.model import (
    DirectAcknowledgement,
    Features,
    MessageContext,
    MessageContextProvider,
    SubscriptionSpec,
    as_context,
    channels,
    check_text,
    requested,
    subscribe_options,
)
from messaging.receiving.buffer import OnInvalid
from messaging.receiving.calling import MessageHandler
from messaging.receiving.consumers import observed_here
from messaging.receiving.deduplication import SettledIdStores
from messaging.receiving.handler import ON_INVALID, HandlerOnInvalid, HandlerRegistration, MessageConsumer
from messaging.receiving.joined_channels import Take
from messaging.receiving.joint import JointSubscription
from messaging.receiving.redelivery import Publish
from messaging.receiving.stream import MessageStream
from messaging.receiving.subscription import Consumption, Subscription
from messaging.services import ServiceRegistry

#: how the messages of a stream are acknowledged
Acknowledge = Literal["automatic", "manual"]

#: default prefetch of a responder, requests
_REQUESTS: Final = 128
#: a channel that stands for all, where only the options are checked
_ANY: Final = "any"


class MessageSubscription:
    """Subscribes to channels of one instance (RFC 5.4). Thread safe; get it as ``Messaging.subscription``."""

    def __init__(
        self,
        connection: Connection,
        services: ServiceRegistry,
        publish: Publish,
        interceptors: ProcessChain | None = None,
    ) -> None:
        self._connection = connection
        self._services = services
        self._publish = publish
        self._interceptors = interceptors
        settings = connection.adapter.settings
        self._stores = SettledIdStores(settings.inbox_path, settings.inbox_size)
        self._handlers: dict[HandlerRegistration, None] = {}

    def subscribe(
        self,
        channel_or_context: str | MessageContext | MessageContextProvider,
        *,
        model: Any = None,
        on_invalid: OnInvalid | None = None,
        keep_subscription: bool = False,
        acknowledge: Acknowledge = "automatic",
    ) -> MessageStream:
        """Subscribe to a channel or pattern.

        Args:
            channel_or_context: a channel pattern, or a context with one and with extensions, or a provider (a builder,
                RFC 5.6.3) that builds such a context. A context from
                ``AcknowledgeMessageContextBuilder`` also says how messages are acknowledged.
            model: type that ``Message.value()`` of each message is validated against before it is emitted.
            on_invalid: how a message that does not fit the model is settled: ``dead_letter`` sends its original bytes
                to the dead-letter channel, ``reject`` rejects it, ``skip`` acknowledges it, ``raise`` ends the stream
                with the ``DecodeError`` (the message is dead-lettered if it can be, or else rejected). All count it.
                By default ``dead_letter`` if there is a dead-letter channel, or else ``reject``: the stream goes on.
            keep_subscription: whether closing the stream leaves the subscription at the broker, which keeps messages
                for the next consumer: in an MQTT session that it keeps, or in a ``queue``. It asks for acknowledgement.
            acknowledge: ``automatic``, or ``manual``: the consumer calls ``Message.acknowledge()`` or ``reject()``, at
                any time and on any thread.

        Returns:
            The stream; ``MessageStream.ready`` resolves when the broker has confirmed it. Until then, and while there
            is no connection, no message is missed that the protocol keeps.

        Raises:
            InvalidChannelError: no channel, or a malformed pattern.
            InvalidExtensionError: an extension has the wrong type or range.
            UnsupportedFeatureError: something the instance does not announce.
            ArgumentError: ``model`` is no type pydantic can validate, or the broker has nothing that keeps the
                subscription.
            ClosedError: the instance is closed.
        """
        if isinstance(channel_or_context, str):
            context = MessageContext(channel_or_context)
        else:
            context = as_context(channel_or_context)
        spec, direct = self._consumed(context, keep_subscription, acknowledge)
        check_model(model)
        if on_invalid is None:
            on_invalid = "reject" if spec.options.dead_letter_channel is None else "dead_letter"
        elif on_invalid not in get_args(OnInvalid):
            raise ArgumentError(f"on_invalid must be one of {', '.join(map(repr, get_args(OnInvalid)))}")
        self._check_dead_letters(spec, on_invalid)
        self._connection.refuse_closed()
        consumption = Consumption(model, on_invalid, direct, keep_subscription)

        def open_subscription() -> Subscription:
            observed = observed_here()
            replaced = observed if observed is not None and observed.dismissed else None
            subscription = self._subscription(spec, consumption, replaced)
            if observed is not None and observed.source == subscription.source:
                observed.heir = subscription

            def start() -> Subscription:
                call(subscriptions.start, subscription)
                return subscription

            return on_failure(call, subscriptions.end, subscription).call(start)

        call, subscriptions = self._connection.engine.call, self._connection.subscriptions
        return MessageStream(self._connection, open_subscription, self._interceptors)

    def _consumed(
        self, context: MessageContext, keep_subscription: bool, acknowledge: Acknowledge
    ) -> tuple[SubscriptionSpec, DirectAcknowledgement | None]:
        """Check how a subscription is consumed; return its spec, and how it is acknowledged."""
        adapter = self._connection.adapter
        direct = context.direct_acknowledgement
        if acknowledge not in get_args(Acknowledge):
            raise ArgumentError(f"acknowledge must be 'automatic' or 'manual', not {acknowledge!r}")
        if not isinstance(keep_subscription, bool):
            raise ArgumentError(f"keep_subscription must be a bool, not {type(keep_subscription).__name__}")
        if acknowledge == "manual":
            if direct is not None:
                raise ArgumentError("acknowledge='manual' is for contexts without acknowledgement of their own")
            direct = DirectAcknowledgement()
        if (
            keep_subscription
            and adapter.capabilities.acknowledging_qos is not None
            and Features.EXTENSION_QOS not in context.extensions
        ):
            extensions = MappingProxyType(
                {**context.extensions, Features.EXTENSION_QOS: adapter.capabilities.acknowledging_qos}
            )
            context = MessageContext(context.channel, context.channel_extension, extensions=extensions)
        spec = self._check(context, acknowledging=direct is not None)
        if keep_subscription and spec.options.qos == "0":
            raise ArgumentError("keep_subscription=True needs acknowledgement: leave qos out, or set it to 1 or more")
        if keep_subscription and not (adapter.capabilities.keeps_session or adapter.redelivers(spec)):
            raise ArgumentError(
                f"keep_subscription=True: the broker of {adapter.name!r} keeps nothing for this subscription; give "
                "it a queue, or with MQTT connect with a client_id and session_expiry (version 5) or clean_start=false "
                "(3.1.1)"
            )
        return spec, direct

    def open_handler(
        self,
        context: MessageContext,
        handler: MessageHandler,
        model: Any,
        concurrency: int,
        on_invalid: HandlerOnInvalid | None,
        keep_subscription: bool,
    ) -> HandlerRegistration:
        """Subscribe, and have ``handler`` called with each message; see ``Messaging.on``."""
        spec, _ = self._consumed(context, keep_subscription, "automatic")
        check_model(model)
        if on_invalid is not None and on_invalid not in ON_INVALID:
            raise ArgumentError(f"on_invalid must be 'skip' or 'dead_letter', not {on_invalid!r}")
        self._check_dead_letters(spec, on_invalid)
        self._connection.refuse_closed()
        subscription = self._subscription(spec, Consumption(is_kept=keep_subscription))
        consumer = MessageConsumer(self._connection, subscription, handler, concurrency, on_invalid, self._interceptors)
        registration = HandlerRegistration(self._connection, consumer, handler)
        registration.closed.listen(lambda: self._handlers.pop(registration, None))

        def start() -> HandlerRegistration:
            self._handlers[registration] = None
            self._connection.engine.call(self._connection.subscriptions.start, subscription)
            return registration

        return on_failure(registration.close).call(start)

    def _subscription(
        self, spec: SubscriptionSpec, consumption: Consumption, replaced: Subscription | None = None
    ) -> Subscription:
        return Subscription(self._connection, self._services, self._publish, spec, consumption, self._stores, replaced)

    @property
    def handlers(self) -> tuple[HandlerRegistration, ...]:
        """The registrations that have not ended, the oldest first."""
        return tuple(each for each in self._handlers.copy() if not each.closed.done())

    @staticmethod
    def _check_dead_letters(spec: SubscriptionSpec, on_invalid: str | None) -> None:
        if on_invalid == "dead_letter" and spec.options.dead_letter_channel is None:
            raise ArgumentError(
                "on_invalid='dead_letter' needs a dead-letter channel: set the extension deadLetterChannel"
            )

    def check(
        self, channel: str, extensions: Mapping[str, Any], channel_extension: str | None = None
    ) -> SubscriptionSpec:
        """Return the checked spec of a subscription; raise as :meth:`subscribe`."""
        return self._check(MessageContext(channel, channel_extension, extensions=MappingProxyType({**extensions})))

    def open_requests(self, channel: str, extensions: Mapping[str, Any]) -> Subscription:
        """Return a subscription to requests, which its caller starts; raise as :meth:`subscribe`.

        Unless the extensions say otherwise, it has acknowledgement, since a request is acknowledged when it is
        answered, and a small prefetch: another responder may handle the requests beyond that.
        """
        adapter = self._connection.adapter
        wanted = {**extensions}
        if adapter.capabilities.acknowledging_qos is not None:
            wanted.setdefault(Features.EXTENSION_QOS, adapter.capabilities.acknowledging_qos)
        if str(wanted.get(Features.EXTENSION_QOS)) != "0":
            wanted.setdefault(Features.EXTENSION_PREFETCH, adapter.settings.prefetch or _REQUESTS)
        spec = self._check(MessageContext(channel, extensions=MappingProxyType(wanted)))
        return self._subscription(spec, Consumption(is_stream=False))

    def open_joint(
        self, take: Take, *, qos: str | None = None, queue: str | None = None, prefetch: int | None = None
    ) -> JointSubscription:
        """Open a subscription to a changing set of channels, see :mod:`messaging.receiving.joint`.

        Args:
            take: called on the engine loop with the messages of one turn, in arrival order; must not block or raise.
            qos: level of all channels; by default the lowest with acknowledgement, or "0" if there is none.
            queue: a queue that subscribers share and that lasts, as its channels do; see the extension ``queue``.
            prefetch: bound of unsettled messages; by default that of the instance.

        Raises:
            ArgumentError, UnsupportedFeatureError, ClosedError: as :meth:`subscribe`.
        """
        adapter = self._connection.adapter
        wanted: dict[str, Any] = {
            Features.EXTENSION_QOS: qos if qos is not None else adapter.capabilities.acknowledging_qos,
            Features.EXTENSION_QUEUE: queue,
            Features.EXTENSION_PREFETCH: prefetch,
        }
        extensions = MappingProxyType({key: value for key, value in wanted.items() if value is not None})

        def check(channel: str) -> SubscriptionSpec:
            return self._check(MessageContext(channel, extensions=extensions))

        if not callable(take):
            raise ArgumentError(f"take must be callable, not {type(take).__name__}")
        spec = check(_ANY)
        self._connection.refuse_closed()
        joint = JointSubscription(self._connection, spec, check, take)
        joint.start()
        return joint

    def _check(self, context: MessageContext, *, acknowledging: bool = False) -> SubscriptionSpec:
        adapter = self._connection.adapter
        if context.channel is None:
            raise InvalidChannelError("no channel: the context names none; use builder.channel(...)")
        channel, extension = channels.check_pattern(context.channel), context.channel_extension
        if channels.has_wildcard(channel) and Features.WILDCARDS not in adapter.capabilities.features:
            raise adapter.capabilities.lacks(Features.WILDCARDS)
        if extension is not None:
            if Features.ROUTING_KEY not in adapter.capabilities.features:
                raise adapter.capabilities.lacks(Features.ROUTING_KEY)
            check_text("channel_extension", extension)
        if acknowledging and Features.ACKNOWLEDGE not in adapter.capabilities.features:
            raise adapter.capabilities.lacks(Features.ACKNOWLEDGE)
        extensions = requested(context, adapter.capabilities)
        if adapter.settings.outbox_path is not None and Features.EXTENSION_STORE_AND_FORWARD in extensions:
            # announced by the core, with a meaning for publishing only
            extensions = {k: v for k, v in extensions.items() if k != Features.EXTENSION_STORE_AND_FORWARD}
        options = subscribe_options(
            extensions,
            adapter.capabilities,
            adapter.settings,
            acknowledging=acknowledging,
        )
        spec = SubscriptionSpec(channel, extension, options)
        dead = options.dead_letter_channel
        if dead is not None and extension is None and channels.matches(channel, dead):
            raise InvalidExtensionError(
                Features.EXTENSION_DEAD_LETTER_CHANNEL,
                f"{dead!r} is matched by {channel!r} itself: its messages would go round in circles",
            )
        adapter.check_subscribe(spec)
        return spec
