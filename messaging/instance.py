"""``connect(url)`` and what it returns: one messaging instance and its services (RFC 5.2)."""

from __future__ import annotations

import atexit
import contextlib
import importlib
import importlib.util
import os
import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from importlib.metadata import entry_points
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Self, TypeVar, Unpack, overload
from uuid import uuid4
from weakref import WeakKeyDictionary

from messaging.adapter import ENTRY_POINT_GROUP, Adapter
from messaging.bounded import BoundedCache
from messaging.codecs import encode
from messaging.connection import Connection
from messaging.errors import (
    AdapterClashError,
    ArgumentError,
    ClosedError,
    ConfigurationError,
    DeadlineError,
    DuplicateNameError,
    InvalidExtensionError,
    MessagingError,
    UnknownSchemeError,
    check_mapping,
)
from messaging.execution import Promise, engine, may_block, seconds, warn_in_loop, workers
from messaging.forking import LiveObjects, hold_over_fork, in_child
from messaging.model import (
    MAX_PREFETCH,
    AcknowledgeMessageContextBuilder,
    BrokerUrl,
    Features,
    Message,
    MessageContextBuilder,
    MessageContextProvider,
    check_name,
    concealed,
    integer,
    parse_url,
    publishing_only,
    subscribing_only,
)
from messaging.model.settings import URL_VARIABLE, Settings, load_settings
from messaging.properties import (
    FEATURE_PROPERTY as FEATURE_PROPERTY,  # names that are imported from here, announced, announced
)
from messaging.properties import NAME_PROPERTY as NAME_PROPERTY
from messaging.properties import PROTOCOL_PROPERTY as PROTOCOL_PROPERTY
from messaging.properties import PROVIDER_PROPERTY as PROVIDER_PROPERTY
from messaging.properties import announced, builder_properties, instance_properties
from messaging.publishing import MessagePublisher, Outbox
from messaging.receiving import MessageHandler, MessageSubscription, in_observer
from messaging.replyto import (
    CHANNEL,
    CONCURRENCY,
    EXTENSIONS,
    REPLY_CHANNEL,
    TARGET,
    Replies,
    ReplyRegistration,
    ReplyToManyPublisher,
    ReplyToManySubscriptionHandler,
    ReplyToPublisher,
    ReplyToSingleSubscriptionHandler,
    ReplyToWhiteboard,
    Requests,
    TypedHandler,
    channel_list,
)
from messaging.runtime import MessageServiceRuntime
from messaging.services import (
    SERVICE_RANKING,
    ListenerRegistration,
    ServiceEvent,
    ServiceEventKind,
    ServiceRegistration,
    ServiceRegistry,
    default_registry,
    escaped,
)
from messaging.text import did_you_mean, exact, tolerant

if TYPE_CHECKING:
    from messaging.connection import ConnectionStates
    from messaging.model import (
        MessageContext,
        PublishKeywords,
        ReceivedMessage,
        ReplyKeywords,
        RequestKeywords,
        RequestManyKeywords,
        SubscribeKeywords,
    )
    from messaging.receiving import Acknowledge, HandlerOnInvalid, HandlerRegistration, MessageStream, OnInvalid
    from messaging.replyto import Request

F = TypeVar("F", bound=Callable[..., Any])
V = TypeVar("V")

#: keywords of the short way that are values of the context; the others are extensions in snake case
_CONTEXT_KEYWORDS: Final = frozenset({"content_type", "content_encoding", "correlation_id", "reply_to"})
#: extensions of subscribing that the stream of many replies has, too
_OF_STREAMS: Final = frozenset(
    {Features.EXTENSION_BUFFER_SIZE, Features.EXTENSION_OVERFLOW, Features.EXTENSION_PREFETCH}
)

#: instances that are open
_open: Final = LiveObjects["Messaging"](is_late=True)  # listeners of the registry are application code
#: by name, what has it
_names: WeakKeyDictionary[ServiceRegistry, dict[str, object]] = WeakKeyDictionary()
_names_lock = threading.Lock()  # guards _names


def connect(url: str | None = None, *, services: ServiceRegistry | None = None, **settings: Any) -> Messaging:
    """Create a messaging instance and connect it.

    On a plain thread this returns when the connection is there. On a thread that runs an event loop it returns at
    once: use ``async with connect(...)`` or ``await connect(...)``.

    Args:
        url: ``memory://name``, ``mqtt://host``, ``amqp://user:password@host/vhost?option=value`` and so on; without
            it, the environment variable ``MESSAGING_URL``.
        services: the registry the instance's services go to and direct acknowledgement callbacks come from; by
            default the process's one.
        **settings: settings of the adapter; they win over options in the URL and ``MESSAGING_*`` variables.

    Raises:
        InvalidUrlError, UnknownSchemeError, InvalidOptionError, MissingExtraError, AdapterClashError: as they say.
        DuplicateNameError: ``name`` is taken by another instance in ``services``.
        ConnectFailedError: no connection within ``connect_timeout``; ``AuthenticationError`` if the broker refused
            the credentials. Not raised here on a thread that runs an event loop, but when the result is awaited.
    """
    settings = concealed(settings)
    if url is None:
        url = os.environ.get(URL_VARIABLE)
        if not url:
            raise ConfigurationError(f"no broker URL: give one to connect(), or set {URL_VARIABLE}")
    try:
        parsed = parse_url(url)
    finally:
        url = None  # a report that shows the variables of this frame must not show the password
    if services is not None and not isinstance(services, ServiceRegistry):
        raise ArgumentError(f"services must be a ServiceRegistry, not {type(services).__name__}")
    kind = find_adapter(parsed.scheme)
    instance: Messaging | None = None
    try:
        instance = Messaging(kind, parsed, services if services is not None else default_registry(), settings)
        if may_block():
            instance.ready.result()
        return instance
    except BaseException:
        if instance is not None:
            instance.close()
        raise


def find_adapter(scheme: str) -> type[Adapter]:
    """The adapter class that serves ``scheme``, found by its entry point.

    Raises:
        UnknownSchemeError: none does; the error names the installed schemes.
        AdapterClashError: a foreign package hides this project's ``adapters``.
        MissingExtraError: a library the adapter needs is missing.
    """
    found = {point.name: point for point in entry_points(group=ENTRY_POINT_GROUP)}
    point = found.get(scheme)
    if point is None:
        hint = did_you_mean(scheme, found)
        raise UnknownSchemeError(
            f"no adapter for {scheme}:// is installed; installed: {', '.join(sorted(found)) or 'none'}"
            + (f"; {hint}" if hint else "")
        )
    try:
        kind = point.load()
    except MessagingError:
        raise
    except Exception as error:  # whatever a foreign module does when it is imported
        _refuse_foreign_package(point.module.partition(".")[0], error)
        raise ConfigurationError(
            f"the adapter {point.name} = {point.value} does not load: {type(error).__name__}: {error}"
        ) from error
    if not (isinstance(kind, type) and issubclass(kind, Adapter)):
        raise ConfigurationError(f"entry point {point.name} = {point.value} is not a messaging.adapter.Adapter")
    return kind


def _refuse_foreign_package(package: str, error: Exception) -> None:
    """Say so if ``error`` comes from another distribution's package of the name ``adapters``."""
    if package != "adapters":
        return
    try:
        ours = getattr(importlib.import_module(package), "__rx_messaging__", False)
    except Exception:  # noqa: BLE001  # ours does not fail
        ours = False
    if not ours:
        spec = importlib.util.find_spec(package)
        where = (spec.origin if spec is not None else None) or "an unknown place"
        raise AdapterClashError(
            f"the package 'adapters' at {where} belongs to another distribution and hides the one of rx-messaging; "
            f"uninstall it, or use separate environments"
        ) from error


class Messaging:
    """A messaging instance: the services of one connection setup (RFC 5.2). Thread safe.

    A context manager, sync and async. Closing it sends the accepted messages, ends its streams, and settles every
    promise.

    Attributes:
        name: the ``osgi.messaging.name``, unique in ``services``.
        services: the registry its services are in.
        publisher, subscription, reply_to, reply_to_many, whiteboard, runtime: its services.
        connection_state: the state of the connection: an Observable of
            :class:`~messaging.connection.state.ConnectionState`, and its current ``value``.
        ready: resolves with the first connection.
    """

    def __init__(
        self, kind: type[Adapter], url: BrokerUrl, services: ServiceRegistry, keywords: Mapping[str, Any]
    ) -> None:
        self._settings: Settings = load_settings(kind.settings_type, url, keywords)
        self.name: str = self._settings.name or f"{url.scheme}-{uuid4().hex[:12]}"
        self.services = services
        self._registrations: list[ServiceRegistration] = []
        self._watches: list[ListenerRegistration] = []
        self._closing: Promise[None] | None = None
        self._adapter = kind(url, self._settings, self.name)
        #: has the name in ``services``
        self._claim = object()
        try:
            _claim_name(services, self.name, self._claim)
            settings = self._settings
            outbox = Outbox(engine(), self._adapter, settings.timeout, settings.outbox_size, settings.outbox_bytes)
            self._open(Connection(engine(), self._adapter, outbox), outbox)
        except BaseException:  # an interrupt: there is no instance that could be closed
            for watch in self._watches:
                watch.remove()
            for registration in self._registrations:
                registration.unregister()
            _release_name(services, self.name, self._claim)
            raise

    def _open(self, connection: Connection, outbox: Outbox) -> None:
        services = self.services
        self._connection = connection
        self.ready: Promise[None] = connection.ready
        self.connection_state: ConnectionStates = connection.states
        self.publisher = MessagePublisher(connection, outbox)
        self.subscription = MessageSubscription(connection, services, self.publisher.publish)
        self._requests = Requests(connection, self.publisher)
        self.reply_to = ReplyToPublisher(connection, self.publisher, self._requests)
        self.reply_to_many = ReplyToManyPublisher(connection, services, self.publisher, self.reply_to, self._requests)
        self._replies = Replies(connection, self.publisher, self._requests.inboxes)
        self.whiteboard = ReplyToWhiteboard(connection, services, self.subscription, self._replies)
        self.runtime = MessageServiceRuntime(connection, outbox, self._requests, self.whiteboard)
        self._features = announced(self._adapter)
        #: what ``reply`` registered, by reference id
        self._replying: dict[int, ServiceRegistration] = {}
        #: what ``register_context_builder`` registered, and the properties it was given
        self._builders: list[tuple[ServiceRegistration, Mapping[str, Any]]] = []
        self._register_services()
        #: the thread that takes the services out of the registry, while it does
        self._unregistering: int | None = None
        self._close_lock = threading.RLock()  # guards _closing; reentrant for signal handlers
        self._contexts: BoundedCache[Any, MessageContext] = BoundedCache()
        connection.on_connected = self._connected
        connection.on_closed = self._closed
        _open.add(self)
        workers().hold(self)
        connection.engine.call(connection.start)

    # --- services

    @property
    def features(self) -> frozenset[str]:
        """What this instance announces: functional features and extension keys. May shrink at the first connection."""
        return announced(self._adapter)

    def context_builder(self) -> MessageContextBuilder:
        """A new builder of messages and contexts."""
        return MessageContextBuilder()

    def acknowledge_context_builder(self) -> AcknowledgeMessageContextBuilder:
        """A new builder of contexts with direct acknowledgement.

        Raises:
            UnsupportedFeatureError: the instance does not announce ``acknowledge``.
        """
        if Features.ACKNOWLEDGE not in self.features:
            raise self._adapter.capabilities.lacks(Features.ACKNOWLEDGE)
        return AcknowledgeMessageContextBuilder()

    def _properties(self) -> dict[str, Any]:
        return instance_properties(self.name, self._adapter)

    def register_context_builder(
        self, factory: Callable[[], MessageContextProvider], properties: Mapping[str, Any] | None = None
    ) -> ServiceRegistration:
        """Offer context builders of the application's own, beside ``MessageContextBuilder`` (RFC 5.6.4).

        They are found under :class:`~messaging.MessageContextProvider` by the feature ``messageContextBuilder`` and
        the properties of this instance, until the instance is closed. Each look-up makes a new one (a prototype)::

            m.register_context_builder(ReadingBuilder)
            mine = "(&(osgi.messaging.name=plant)(osgi.messaging.feature=messageContextBuilder))"
            m.publisher.publish(m.services.service(MessageContextProvider, mine).celsius(21.5))

        Args:
            factory: makes a builder: a class, say.
            properties: further service properties; those of the instance win.

        Returns:
            The registration, which ends it.

        Raises:
            ArgumentError: ``factory`` is not callable, or a property is malformed.
            ClosedError: the instance is closed.
        """
        self._refuse_closed()
        given = check_mapping("properties", {} if properties is None else properties)
        registration = self.services.register(
            MessageContextProvider, factory, builder_properties(self._properties(), given), scope="prototype"
        )
        self._builders.append((registration, given))
        if self._closing is not None:  # meanwhile: who closes may not have seen it
            registration.unregister()
            self._refuse_closed()
        return registration

    def _register_services(self) -> None:
        properties = self._properties()
        registrations = self._registrations

        def register(interface: Any, service: object, properties: dict[str, Any], **scope: Any) -> ServiceRegistration:
            registrations.append(self.services.register(interface, service, properties, **scope))
            return registrations[-1]

        runtime = register(MessageServiceRuntime, self.runtime, properties)
        subscription = register(MessageSubscription, self.subscription, properties)
        self._subscription_reference = subscription.reference
        self.runtime.bind(runtime.reference, subscription.reference)
        register(MessagePublisher, self.publisher, properties)
        register(MessageContextBuilder, self.context_builder, properties, scope="prototype")
        if Features.REPLY_TO in self.features:
            register(ReplyToPublisher, self.reply_to, properties)
            register(ReplyToManyPublisher, self.reply_to_many, properties)
            register(ReplyToWhiteboard, self.whiteboard, properties)
            self.whiteboard.open(self._properties)
        if Features.ACKNOWLEDGE in self.features:
            builder = self.acknowledge_context_builder
            register(AcknowledgeMessageContextBuilder, builder, properties, scope="prototype")
        # RFC 5.4: when the subscription service goes, its subscriptions end
        listen = self.services.add_listener
        self._watches.append(listen(self._service_event, MessageSubscription))
        self._watches.append(listen(self._forget_reply, ReplyToSingleSubscriptionHandler))
        self._watches.append(listen(self._forget_reply, ReplyToManySubscriptionHandler))

    def _forget_reply(self, event: ServiceEvent) -> None:
        if event.kind is ServiceEventKind.UNREGISTERING:
            self._replying.pop(event.reference.id, None)

    def _service_event(self, event: ServiceEvent) -> None:
        gone = event.kind is ServiceEventKind.UNREGISTERING and event.reference is self._subscription_reference
        if gone and self._closing is None:
            for subscription in self._connection.subscriptions.snapshot():
                self._connection.engine.call(self._connection.subscriptions.end, subscription)

    def _connected(self) -> None:
        """Announce the features again: the broker may support fewer than its protocol. On the loop."""
        self.publisher.refresh()
        self._replies.refresh()
        if announced(self._adapter) != self._features:
            self._features = announced(self._adapter)
            workers().submit(self._announce)  # listeners of the registry are user code

    def _announce(self) -> None:
        for registration in self._registrations:
            with contextlib.suppress(MessagingError):  # unregistered meanwhile
                registration.update(self._properties())
        for registration, given in [*self._builders]:
            with contextlib.suppress(MessagingError):
                registration.update(builder_properties(self._properties(), given))
        self.whiteboard.refresh()

    def _closed(self) -> Promise[None]:
        """No way back: the instance was closed, or never got a connection. On the loop."""
        done: Promise[None] = Promise(f"unregistering the services of {self.name!r}")

        def unregister() -> None:  # listeners of the registry are user code
            self._unregistering = threading.get_ident()
            try:
                self._unregister()
            finally:
                self._unregistering = None
                workers().release(self)
                self._connection.engine.call(done.resolve, None)

        workers().submit(unregister)
        return done

    def _unregister(self) -> None:
        _open.discard(self)
        for watch in self._watches:
            watch.remove()
        self.whiteboard.close()
        for registration in [*self._replying.values(), *(each for each, _ in self._builders)]:
            registration.unregister()
        for registration in self._registrations:
            with contextlib.suppress(MessagingError):  # unregistered before, by other code
                registration.unregister()
        _release_name(self.services, self.name, self._claim)

    # --- the short way

    def publish(self, channel: str, content: Any = b"", **context: Unpack[PublishKeywords]) -> Promise[None]:
        """Publish ``content`` to ``channel``.

        Args:
            channel: where to.
            content: bytes as they are (already in ``content_encoding``, if one is named), or an object for the codec of
                ``content_type`` (by default ``text/plain`` for a str and ``application/json`` for anything else).
            **context: ``content_type``, ``content_encoding``, ``correlation_id``, ``reply_to``, ``channel_extension``,
                or an extension in snake case, such as ``qos=1``, ``time_to_live=5.0``, ``headers={...}``.
                ``None`` means unset.

        Returns:
            The promise of :meth:`MessagePublisher.publish <messaging.MessagePublisher.publish>`, which also lists
            the errors; besides, ``CodecError`` if ``content`` does not become bytes.
        """
        return self.publisher.publish(self._message(channel, content, context))

    def _message(
        self, channel: str, content: Any, context: Mapping[str, Any], allowed: frozenset[str] = frozenset()
    ) -> Message:
        """``allowed``: keys of subscribing that have a meaning here, too."""
        try:
            # the types too: True and 1 are equal, and mean different things
            if type(channel) is not str and isinstance(channel, str):
                channel = exact(channel)  # one that equals another channel would get its context
            key = (channel, allowed, *context.items(), *map(type, context.values()))
            known = self._contexts.get(key)
        except TypeError:  # a value is not hashable, such as headers
            key, known = None, None
        if known is None:
            known = self._context(
                channel, context, subscribing_only(self._adapter.capabilities) - allowed, "subscribing"
            ).build_context()
            if key is not None and context.get("message_id") is None:  # which is for one message
                self._contexts[key] = known
        if type(content) is bytes:
            return Message(content, known)
        if isinstance(content, (bytes, bytearray, memoryview)):
            return Message(bytes(content), known)
        payload, content_type = encode(content, known.content_type, known.content_encoding)
        if known.content_type is None and Features.MESSAGE_PROPERTIES in self.features:
            # not asked for, so not an error where it cannot travel
            known = MessageContextBuilder().with_context(known).content_type(content_type).build_context()
        return Message(payload, known)

    @overload
    def request(
        self,
        channel: str,
        content: Any = b"",
        model: None = None,
        *,
        timeout: float | None = None,
        **context: Unpack[RequestKeywords],
    ) -> Request[ReceivedMessage]: ...
    @overload
    def request(
        self,
        channel: str,
        content: Any = b"",
        model: type[V] = ...,
        *,
        timeout: float | None = None,
        **context: Unpack[RequestKeywords],
    ) -> Request[V]: ...
    @overload
    def request(
        self,
        channel: str,
        content: Any,
        model: Any,
        *,
        timeout: float | None = None,
        **context: Unpack[RequestKeywords],
    ) -> Request[Any]: ...
    def request(
        self,
        channel: str,
        content: Any = b"",
        model: Any = None,
        *,
        timeout: float | None = None,
        **context: Unpack[RequestKeywords],
    ) -> Request[Any]:
        """Send ``content`` to ``channel``, and promise the reply.

        Args:
            channel: where to.
            content: as for :meth:`publish`.
            model: what the reply is to become: the promise is then that of the value, such as a pydantic model, and
                otherwise that of the reply message.
            timeout: seconds for all of it; the instance's setting ``timeout`` if not given.
            **context: as for :meth:`publish`.

        Returns:
            The promise of :meth:`ReplyToPublisher.publish_with_reply
            <messaging.replyto.publisher.ReplyToPublisher.publish_with_reply>`, which also lists
            the errors; besides,
            ``CodecError`` if ``content`` does not become bytes, or ``DecodeError`` if the reply does not fit ``model``.

        Example:
            ``total = m.request("sums", [1, 2, 3], int, timeout=2).result()``
        """
        options: Any = context
        if timeout is not None:
            options["timeout"] = timeout
        return self.reply_to.publish_with_reply(self._message(channel, content, options), model=model)

    @overload
    def request_many(
        self,
        channel: str,
        content: Any = b"",
        model: type[V] = ...,
        *,
        timeout: float | None = None,
        **context: Unpack[RequestManyKeywords],
    ) -> MessageStream[V]: ...
    @overload
    def request_many(
        self,
        channel: str,
        content: Any = b"",
        model: Any = None,
        *,
        timeout: float | None = None,
        **context: Unpack[RequestManyKeywords],
    ) -> MessageStream[Any]: ...
    def request_many(
        self,
        channel: str,
        content: Any = b"",
        model: Any = None,
        *,
        timeout: float | None = None,
        **context: Unpack[RequestManyKeywords],
    ) -> MessageStream[Any]:
        """Send ``content`` to ``channel``, and stream the replies.

        Arguments as for :meth:`request`, but that ``timeout`` is for each reply; the rest as
        :meth:`ReplyToManyPublisher.publish_with_reply_many
        <messaging.replyto.many.ReplyToManyPublisher.publish_with_reply_many>`.
        """
        options: Any = context
        if timeout is not None:
            options["timeout"] = timeout
        return self.reply_to_many.publish_with_reply_many(
            self._message(channel, content, options, _OF_STREAMS), model=model
        )

    @overload
    def reply(
        self,
        channel: str | Sequence[str],
        handler: None = None,
        *,
        content_type: str | None = None,
        many: bool | None = None,
        reply_channel: str | None = None,
        concurrency: int | None = None,
        ranking: int = 0,
        **extensions: Unpack[ReplyKeywords],
    ) -> Callable[[F], F]: ...
    @overload
    def reply(
        self,
        channel: str | Sequence[str],
        handler: Callable[..., Any],
        *,
        content_type: str | None = None,
        many: bool | None = None,
        reply_channel: str | None = None,
        concurrency: int | None = None,
        ranking: int = 0,
        **extensions: Unpack[ReplyKeywords],
    ) -> ReplyRegistration: ...
    def reply(
        self,
        channel: str | Sequence[str],
        handler: Callable[..., Any] | None = None,
        *,
        content_type: str | None = None,
        many: bool | None = None,
        reply_channel: str | None = None,
        concurrency: int | None = None,
        ranking: int = 0,
        **extensions: Unpack[ReplyKeywords],
    ) -> Any:
        """Answer requests to ``channel`` with a function, or have the function below do it.

        On a plain thread it returns when the broker has confirmed the subscription. On a thread that runs an event loop
        it returns at once: ``async with m.reply(channel, function)`` waits, and so does ``await m.whiteboard.ready()``
        after all decorated functions. A request that is sent before may find no subscription.

        Args:
            channel: of the requests; one or several, but at least one; patterns too.
            handler: a function, coroutine function or generator function of one parameter, the request: see
                :class:`~messaging.replyto.typed.TypedHandler` for what it gets and may return. What it raises, the
                requester gets as ``ReplyError``.
            content_type: of the replies; chosen by their type if not given.
            many: whether what it returns is many replies, to be iterated; found out if not given.
            reply_channel: only requests that name it.
            concurrency: how many requests it works on at a time: 8 in threads, 64 as a coroutine function.
            ranking: of several handlers of a channel, the highest has the requests.
            **extensions: of the subscription, in snake case, such as ``queue="workers"``: responders that share the
                requests between them.

        Returns:
            The registration in ``services``, a :class:`~messaging.replyto.registration.ReplyRegistration`, which ends
            it; or without ``handler`` a decorator.

        Raises:
            ArgumentError: the function is no such handler, or one of the others is not as described.
            UnsupportedFeatureError: the instance does not announce ``replyTo``.
            SubscriptionRefusedError: the broker said no.

        Example::

            @m.reply("orders/price", queue="pricing")
            def price(order: Order) -> Price: ...
        """
        if handler is None:

            def decorate(function: F) -> F:
                self.reply(
                    channel, function, content_type=content_type, many=many, reply_channel=reply_channel,
                    concurrency=concurrency, ranking=ranking, **extensions,
                )  # fmt: skip
                return function

            return decorate
        self._refuse_closed()
        if Features.REPLY_TO not in self.features:
            raise self._adapter.capabilities.lacks(Features.REPLY_TO, "it needs messageProperties and headers")
        typed = TypedHandler(handler, content_type, many=many)
        several = [*channel_list(channel, "the channel of a request handler")]
        keys = {_camel_case(name): value for name, value in extensions.items() if value is not None}
        for each in several:
            self.subscription.check(each, keys)
        properties: dict[str, Any] = {
            TARGET: f"({NAME_PROPERTY}={escaped(self.name)})",
            CHANNEL: several,
            EXTENSIONS: keys,
            SERVICE_RANKING: ranking,
        }
        if reply_channel is not None:
            properties[REPLY_CHANNEL] = check_name(reply_channel)
        if concurrency is not None:
            try:
                properties[CONCURRENCY] = integer(1, None)(concurrency)
            except ValueError as error:
                raise ArgumentError(f"concurrency {error}") from None
        interface = ReplyToManySubscriptionHandler if typed.is_many else ReplyToSingleSubscriptionHandler
        registration = self.services.register(interface, typed, properties)
        self._replying[registration.reference.id] = registration
        if self._closing is not None:  # meanwhile: who closes may not have seen it
            registration.unregister()
            self._refuse_closed()
        found = ReplyRegistration(registration, self.whiteboard.ready(registration.reference))
        if may_block():
            try:
                with contextlib.suppress(DeadlineError):
                    found.ready.result(self._settings.timeout)
            except BaseException:  # an interrupt, too: no registration is returned
                registration.unregister()
                raise
        return found

    @overload
    def subscribe(
        self,
        channel: str,
        model: type[V],
        *,
        on_invalid: OnInvalid = "raise",
        keep_subscription: bool = False,
        acknowledge: Acknowledge = "automatic",
        **context: Unpack[SubscribeKeywords],
    ) -> MessageStream[V]: ...
    @overload
    def subscribe(
        self,
        channel: str,
        model: Any = None,
        *,
        on_invalid: OnInvalid = "raise",
        keep_subscription: bool = False,
        acknowledge: Acknowledge = "automatic",
        **context: Unpack[SubscribeKeywords],
    ) -> MessageStream[Any]: ...
    def subscribe(
        self,
        channel: str,
        model: Any = None,
        *,
        on_invalid: OnInvalid = "raise",
        keep_subscription: bool = False,
        acknowledge: Acknowledge = "automatic",
        **context: Unpack[SubscribeKeywords],
    ) -> MessageStream[Any]:
        """Subscribe to ``channel``; ``context`` as in :meth:`publish`, the rest as ``MessageSubscription.subscribe``.

        Entering the stream's ``with`` block, or ``async with``, waits for the broker's confirmation: messages published
        after that is received.

        Example:
            ``for message in m.subscribe("sensors/+", Reading, qos=1): print(message.value().celsius)``
        """
        return self.subscription.subscribe(
            self._context(channel, context, publishing_only(self._adapter.capabilities), "publishing").build_context(),
            model=model,
            on_invalid=on_invalid,
            keep_subscription=keep_subscription,
            acknowledge=acknowledge,
        )

    @overload
    def on(
        self,
        channel: str,
        handler: None = None,
        *,
        model: Any = None,
        concurrency: int = 1,
        on_invalid: HandlerOnInvalid | None = None,
        keep_subscription: bool = False,
        **context: Unpack[SubscribeKeywords],
    ) -> Callable[[F], F]: ...
    @overload
    def on(
        self,
        channel: str,
        handler: Callable[..., Any],
        *,
        model: Any = None,
        concurrency: int = 1,
        on_invalid: HandlerOnInvalid | None = None,
        keep_subscription: bool = False,
        **context: Unpack[SubscribeKeywords],
    ) -> HandlerRegistration: ...
    def on(
        self,
        channel: str,
        handler: Callable[..., Any] | None = None,
        *,
        model: Any = None,
        concurrency: int = 1,
        on_invalid: HandlerOnInvalid | None = None,
        keep_subscription: bool = False,
        **context: Unpack[SubscribeKeywords],
    ) -> Any:
        """Call a function with each message of ``channel``, or have the function below called.

        A message is acknowledged when the function returns, or when the coroutine it made has finished. When it raises,
        that is logged and the message is rejected: it is redelivered, up to ``max_deliveries`` times, or sent to the
        ``dead_letter_channel``, as configured. The next message is handled all the same.

        On a plain thread this returns when the broker has confirmed the subscription. On a thread that runs an event
        loop it returns at once: ``async with m.on(channel, handler):`` waits.

        Args:
            channel: a channel or pattern.
            handler: a function or coroutine function of one parameter. It gets the
                :class:`~messaging.Message`, or its value if ``model`` is given or the parameter is annotated
                with another type than ``Message``. Functions run on worker threads; coroutines on the event loop that
                runs where this is called, or else on one that such handlers share.
            model: what the value is validated against; wins over the annotation. A parameter annotated with ``Message``
                gets the message, once it is valid.
            concurrency: messages handled at a time, at least 1. With more than 1 they may be finished out of order.
            on_invalid: what becomes of a message that does not fit: ``dead_letter`` sends it to the dead-letter
                channel; ``skip`` acknowledges and counts it. By default the former if there is such a channel.
                Either is logged, and the function is not called.
            keep_subscription: as for :meth:`subscribe`.
            **context: as for :meth:`subscribe`.

        Returns:
            The registration, whose ``close()`` ends it; without ``handler`` a decorator, which returns the function.
            :attr:`handlers` has the registrations of decorated functions.

        Raises:
            ArgumentError: ``handler`` is not callable with one argument, or another argument is not as described.
            SubscriptionRefusedError: the broker refused the subscription.
            MessagingError: as :meth:`subscribe`.

        Example::

            @m.on("sensors/+", qos=1)
            def store(reading: Reading) -> None: ...
        """
        if handler is None:

            def decorate(function: F) -> F:
                self.on(
                    channel, function, model=model, concurrency=concurrency, on_invalid=on_invalid,
                    keep_subscription=keep_subscription, **context,
                )  # fmt: skip
                return function

            return decorate
        options = self._checked_concurrency(concurrency, context)
        registration = self.subscription.open_handler(
            self._context(channel, options, publishing_only(self._adapter.capabilities), "publishing").build_context(),
            MessageHandler(handler, model),
            model,
            concurrency,
            on_invalid,
            keep_subscription,
        )
        try:
            if may_block():
                with contextlib.suppress(DeadlineError):
                    registration.ready.result(self._settings.timeout)
            return registration
        except BaseException:  # an interrupt, too: no registration is returned
            registration.close()
            raise

    def _checked_concurrency(self, concurrency: int, context: Mapping[str, Any]) -> Mapping[str, Any]:
        """Check ``concurrency`` against the other options, which are returned with a prefetch that is as large."""
        try:
            integer(1, MAX_PREFETCH)(concurrency)
        except ValueError as error:
            raise ArgumentError(f"concurrency {error}") from None
        if concurrency == 1:
            return context
        if context.get("guaranteed_ordering"):
            raise ArgumentError("guaranteed_ordering handles one message at a time: it excludes concurrency > 1")
        prefetch = context.get("prefetch")
        if isinstance(prefetch, int) and prefetch < concurrency:
            raise ArgumentError(f"prefetch={prefetch} is less than concurrency={concurrency}")
        if prefetch is None and (self._settings.prefetch or concurrency) < concurrency:
            return {**context, "prefetch": concurrency}
        return context

    @property
    def handlers(self) -> tuple[HandlerRegistration, ...]:
        """The registrations of :meth:`on` that have not ended; their order is that of their subscriptions."""
        return self.subscription.handlers

    @staticmethod
    def _context(
        channel: str, keywords: Mapping[str, Any], refused: frozenset[str], other_side: str
    ) -> MessageContextBuilder:
        builder = MessageContextBuilder()
        builder.channel(channel, keywords.get("channel_extension"))
        for keyword, value in keywords.items():
            if value is None:
                continue  # unset
            if keyword in _CONTEXT_KEYWORDS:
                getattr(builder, keyword)(value)
            elif keyword != "channel_extension":
                key = _camel_case(keyword)
                if key in refused:
                    raise InvalidExtensionError(key, f"{keyword}= is for {other_side}")
                builder.extension_entry(key, value)
        return builder

    # --- life cycle

    def close(self, timeout: float | None = None) -> None:
        """Close in good order and wait for it; idempotent.

        Accepted messages are sent, for at most ``timeout`` seconds (default: the setting
        ``close_timeout``); the others then fail with ``ClosedError``. Streams complete. On a thread that runs an
        event loop, or inside an observer, it does not wait: ``await aclose()`` does.

        Raises:
            ArgumentError: ``timeout`` is no number.
        """
        closing = self._close(timeout)
        # a listener of the registry that closes is waited for by the very closing
        if may_block() and not in_observer() and threading.get_ident() != self._unregistering:
            closing.result()

    async def aclose(self, timeout: float | None = None) -> None:
        """As :meth:`close`, for event loops. Inside a coroutine that :meth:`on` called it does not wait."""
        closing = self._close(timeout)
        if not in_observer():
            await closing

    def _close(self, timeout: float | None) -> Promise[None]:
        limit = self._settings.close_timeout if timeout is None else seconds(timeout)
        with self._close_lock:
            if self._closing is None:
                connection = self._connection
                started = connection.engine.run(connection.close(limit), f"closing {self.name!r}")
                if self._closing is None:  # a signal handler that closes may have come in between
                    self._closing = started
            closing = self._closing
        for subscription in self._connection.subscriptions.snapshot():
            subscription.stop()  # now, rather than when the loop comes to it
        return closing

    def after_fork(self) -> None:
        """See ``Forkable``: an instance of the parent is closed here, without touching the parent's connection."""
        self._close_lock = threading.RLock()
        self._closing = Promise(f"closing {self.name!r}")
        self._closing.resolve(None)
        self._connection.abandon()
        self._unregister()

    def __enter__(self) -> Self:
        self._refuse_closed()
        if not may_block() and not self.ready.done():
            warn_in_loop("the connection is there", "use `async with connect(...)`")
        return self

    def _refuse_closed(self) -> None:
        if self._closing is not None:
            raise ClosedError(f"the instance {self.name!r} is closed; connect() again")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __await__(self) -> Generator[Any, None, Self]:
        try:
            yield from self.ready.__await__()
        except BaseException:
            self._close(0.0)
            raise
        return self

    async def __aenter__(self) -> Self:
        self._refuse_closed()
        return await self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.aclose()

    @tolerant
    def __repr__(self) -> str:
        return f"<Messaging {self.name!r} {self._connection.state} at {self._adapter.url}>"


def _camel_case(keyword: str) -> str:
    head, *tail = keyword.split("_")
    return head + "".join(word.capitalize() for word in tail)


def _close_all() -> None:
    """Send accepted messages at exit, for programs that did not close their instances."""
    closing = []
    for instance in [*_open]:
        with contextlib.suppress(RuntimeError):  # no more threads can be started: go on
            closing.append(instance._close(None))
    for each in closing:
        each.exception()


atexit.register(_close_all)
hold_over_fork(_names_lock)
in_child(_names.clear)


def _claim_name(services: ServiceRegistry, name: str, claim: object) -> None:
    with _names_lock:
        if _names.setdefault(services, {}).setdefault(name, claim) is not claim:
            raise DuplicateNameError(
                f"another instance in this service registry has the osgi.messaging.name {name!r}; "
                f"give each its own name="
            )


def _release_name(services: ServiceRegistry, name: str, claim: object) -> None:
    with _names_lock:
        taken = _names.get(services, {})
        if taken.get(name) is claim:
            del taken[name]
