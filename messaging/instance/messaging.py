"""Messaging: one instance, which puts the services of one connection together (RFC 5.2)."""

from __future__ import annotations

import atexit
import contextlib
import threading
from collections.abc import Callable, Generator, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Final, Self
from uuid import uuid4

from messaging.adapter import Adapter, TakesEndpoint
from messaging.connection import Connection, ConnectionStates
from messaging.connection.properties import announced
from messaging.environment.forks import LiveObjects
from messaging.environment.signals import on_failure
from messaging.errors import ClosedError, InvalidUrlError
from messaging.errors.checks import check_mapping
from messaging.errors.text import tolerant
from messaging.execution import AsyncCloseable, Promise, engine, may_block, seconds, warn_in_loop, workers
from messaging.instance.contexts import Announced, Contexts
from messaging.instance.queues import Queues
from messaging.instance.services import InstanceServices
from messaging.instance.shortcuts import Shortcuts
from messaging.interception import InstanceInfo, Interceptor, Interceptors
from messaging.model import AcknowledgeMessageContextBuilder, Features, MessageContextBuilder, MessageContextProvider
from messaging.model.settings import load_settings
from messaging.publishing import MessagePublisher, Outbox
from messaging.receiving import MessageSubscription, in_observer
from messaging.replyto import OpenRequests, Replies, ReplyToManyPublisher, ReplyToPublisher, ReplyToWhiteboard
from messaging.runtime import MessageServiceRuntime
from messaging.services import ServiceRegistration, ServiceRegistry
from messaging.services.reporting import PartReporter, Reporter

if TYPE_CHECKING:
    from messaging.journal import Journal
    from messaging.model import BrokerUrl

#: the open instances
_open: Final = LiveObjects["Messaging"](is_late=True)  # listeners of the registry are application code


class Messaging(Shortcuts, AsyncCloseable):
    """A messaging instance: the services of one connection setup (RFC 5.2). Thread safe.

    A context manager, sync and async. Closing it sends the accepted messages, ends its streams, and settles every
    promise.

    Attributes:
        name: the ``osgi.messaging.name``, unique in ``services``.
        services: the registry its services are in.
        publisher, subscription, reply_to, reply_to_many, whiteboard, runtime: its services.
        queues: the administration of the queues at the broker, with the feature ``queueAdministration``.
        connection_state: the state of the connection: an Observable of
            :class:`~messaging.connection.state.ConnectionState`, and its current ``value``.
        ready: resolves with the first connection.
        starts_offline: whether it can be used before its first connection, which it retries to make: messages wait.
    """

    def __init__(
        self,
        kind: type[Adapter],
        url: BrokerUrl,
        services: ServiceRegistry,
        keywords: Mapping[str, Any],
        interceptors: Iterable[Interceptor] = (),
        will: Announced | None = None,
        birth: Announced | None = None,
    ) -> None:
        if url.others and not issubclass(kind, TakesEndpoint):
            raise InvalidUrlError(f"{url.scheme} URL has {len(url.hosts)} hosts; {url.scheme}:// connects to one")
        self._settings = load_settings(kind.settings_type, url, keywords)
        self.name = self._settings.name or f"{url.scheme}-{uuid4().hex[:12]}"
        self.starts_offline = self._settings.start_offline or (
            self._settings.outbox_path is not None and self._settings.retry_connect
        )
        self.services = services
        self._closing: Promise[None] | None = None
        self._adapter = kind(url, self._settings, self.name)
        self._registered = InstanceServices(services, self._adapter, self.name, self._refuse_closed)
        with on_failure(self._registered.unregister):  # there is no instance that could be closed
            self._registered.claim_name()
            self._open(interceptors, will, birth)

    def _open(self, interceptors: Iterable[Interceptor], will: Announced | None, birth: Announced | None) -> None:
        settings = self._settings
        outbox: Outbox | None = None
        connection: Connection | None = None
        try:
            if settings.outbox_path is None:
                outbox = Outbox(engine(), self._adapter, settings.timeout, settings.outbox_size, settings.outbox_bytes)
            else:
                from messaging.publishing.durable import open_durable  # not at import: few instances have a journal

                outbox = open_durable(engine(), self._adapter)
            self._connection = connection = Connection(engine(), self._adapter, outbox)
            self.ready: Promise[None] = connection.ready
            self.connection_state: ConnectionStates = connection.states
            self._make_services(connection, outbox, interceptors)
            self.runtime = MessageServiceRuntime(connection, outbox, self._requests, self.whiteboard)
            self._contexts = Contexts(self._adapter)
            self.queues = Queues(connection, self._contexts, self.subscription)
            self.publisher.announce(self._contexts.announced("will", will), self._contexts.announced("birth", birth))
            self._features = announced(self._adapter)
            self._register_services(outbox.journal)
            #: identifies the thread that is unregistering the services
            self._unregistering: int | None = None
            self._close_lock = threading.RLock()  # guards _closing; reentrant for signal handlers
            connection.on_connected = self._connected
            connection.on_closed = self._closed
            _open.add(self)
            workers().hold(self)
            connection.engine.call(connection.start)
        except BaseException:  # an interrupt, too: it must not leave the outbox locked
            if connection is not None:
                engine().run(connection.close(0.0), f"closing {self.name!r}")
            elif outbox is not None and outbox.journal is not None:
                outbox.journal.close()
            raise

    def _make_services(self, connection: Connection, outbox: Outbox, given: Iterable[Interceptor]) -> None:
        """Make the services of the connection, with the interceptors that are given and those in the registry."""
        adapter, services = connection.adapter, self.services
        url = adapter.url
        info = InstanceInfo(adapter.name, url.scheme, url.host, url.port, adapter.capabilities.client_id)
        interceptors = Interceptors(given, services, info, adapter)
        self.publisher = publisher = MessagePublisher(connection, outbox, interceptors.publishing)
        self.subscription = MessageSubscription(
            connection, services, publisher.publish_internally, interceptors.processing("message")
        )
        self._requests = requests = OpenRequests(connection, publisher)
        self.reply_to = ReplyToPublisher(publisher, requests)
        self.reply_to_many = ReplyToManyPublisher(
            services, publisher, self.reply_to, requests, interceptors.processing("reply")
        )
        self._replies = Replies(connection, publisher, requests)
        self.whiteboard = ReplyToWhiteboard(
            connection, services, self.subscription, self._replies, interceptors.processing("request")
        )

    def _register_services(self, journal: Journal | None) -> None:
        registered = self._registered
        runtime = registered.register(MessageServiceRuntime, self.runtime)
        subscription = registered.register(MessageSubscription, self.subscription)
        self.runtime.bind(runtime.reference, subscription.reference)
        registered.register(
            Reporter, PartReporter("instance", self.name, self.runtime.get_runtime_dto, self.runtime.problems)
        )
        if journal is not None:
            from messaging.journal import JournalReporter

            registered.register(Reporter, JournalReporter(journal, f"{self.name}/outbox"))
        registered.register(MessagePublisher, self.publisher)
        registered.register(MessageContextBuilder, self.context_builder, "prototype")
        if Features.REPLY_TO in self.features:
            registered.register(ReplyToPublisher, self.reply_to)
            registered.register(ReplyToManyPublisher, self.reply_to_many)
            registered.register(ReplyToWhiteboard, self.whiteboard)
            self.whiteboard.open(registered.properties)
        if Features.ACKNOWLEDGE in self.features:
            registered.register(AcknowledgeMessageContextBuilder, self.acknowledge_context_builder, "prototype")
        registered.watch(self._connection, self.whiteboard)

    # --- services

    @property
    def features(self) -> frozenset[str]:
        """Return the announced functional features and extension keys; the first connection may remove some."""
        return announced(self._adapter)

    @property
    def timeout(self) -> float:
        """The setting ``timeout``: the deadline of messages and requests without one of their own, seconds."""
        return self._settings.timeout

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
        return self._registered.add_builder(MessageContextProvider, factory, given)

    def _connected(self) -> None:
        """Announce the features again: the broker may support fewer than its protocol. On the loop."""
        self.publisher.refresh()
        self._replies.refresh()
        if announced(self._adapter) != self._features:
            self._features = announced(self._adapter)
            workers().submit(self._registered.refresh)  # listeners of the registry are user code

    def _closed(self) -> Promise[None]:
        """Unregister the services: the instance was closed, or never got a connection. On the loop."""
        done: Promise[None] = Promise(f"unregistering the services of {self.name!r}")

        def unregister() -> None:  # listeners of the registry are user code
            self._unregistering = threading.get_ident()
            try:
                _open.discard(self)
                self._registered.unregister()
            finally:
                self._unregistering = None
                workers().release(self)
                self._connection.engine.call(done.resolve, None)

        workers().submit(unregister)
        return done

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
        # closing waits for the listeners of the registry: a listener that closes must not wait for closing
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
            subscription.stop()  # at once, before the loop ends it
        return closing

    def after_fork(self) -> None:
        """See ``Forkable``: an instance of the parent is closed here, without touching the parent's connection."""
        self._close_lock = threading.RLock()
        self._closing = Promise(f"closing {self.name!r}")
        self._closing.resolve(None)
        self._connection.abandon()
        self._registered.unregister()

    def __enter__(self) -> Self:
        self._refuse_closed()
        if not may_block() and not self.starts_offline and not self.ready.done():
            warn_in_loop("the connection is there", "use `async with connect(...)`")
        return self

    def _refuse_closed(self) -> None:
        if self._closing is not None:
            raise ClosedError(f"the instance {self.name!r} is closed; connect() again")

    def __await__(self) -> Generator[Any, None, Self]:
        with on_failure(self._close, 0.0):
            yield from self.ready.__await__()
        return self

    async def __aenter__(self) -> Self:
        self._refuse_closed()
        return self if self.starts_offline else await self

    @tolerant
    def __repr__(self) -> str:
        return f"<Messaging {self.name!r} {self._connection.state} at {self._adapter.url}>"


def _close_all() -> None:
    """Send accepted messages at exit, for programs that did not close their instances."""
    closing = []
    for instance in [*_open]:
        with contextlib.suppress(RuntimeError):  # no more threads can be started: go on
            closing.append(instance._close(None))
    for each in closing:
        each.exception()


atexit.register(_close_all)
