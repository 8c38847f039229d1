"""ReplyToWhiteboard (RFC 5.7.3): finds request handlers in the service registry, and has them bound.

Handlers come, change and go at any time; the subscriptions follow, see :mod:`messaging.replyto.bindings`.

**Threads.** Events of the registry are evaluated on the threads that cause them; the bindings belong to the engine's
loop.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final

from messaging.execution import running_loop
from messaging.replyto import handlers, serving
from messaging.replyto.bindings import Bindings
from messaging.replyto.terms import RegisteredHandler, mistaken_key, read_terms
from messaging.services import ServiceEvent, ServiceEventKind, interface_name
from messaging.services.filter import as_filter
from messaging.text import SafeLog

if TYPE_CHECKING:
    from messaging.connection import Connection
    from messaging.execution import Promise
    from messaging.interception import ProcessChain
    from messaging.receiving import MessageSubscription
    from messaging.replyto.replies import Replies
    from messaging.replyto.serving import RequestHandler
    from messaging.services import ServiceReference, ServiceRegistry

logger = SafeLog(__name__)

_INTERFACES: Final = {
    interface_name(handlers.ReplyToSubscriptionHandler): serving.PLAIN,
    interface_name(handlers.ReplyToSingleSubscriptionHandler): serving.SINGLE,
    interface_name(handlers.ReplyToManySubscriptionHandler): serving.MANY,
}
#: log entries that are remembered, so that each is written once
_COMPLAINTS: Final = 1024


class ReplyToWhiteboard:
    """The whiteboard of one instance; get it as ``Messaging.whiteboard``. Registering a handler is all that uses it.

    Thread safe.
    """

    def __init__(
        self,
        connection: Connection,
        services: ServiceRegistry,
        subscriptions: MessageSubscription,
        replies: Replies,
        interceptors: ProcessChain | None = None,
    ) -> None:
        #: the routes of requests, and the handlers that are bound to them
        self.routes = Bindings(connection, subscriptions, replies, self.refresh, interceptors)
        self._connection = connection
        self._services = services
        self._properties: Callable[[], Mapping[str, Any]] = dict
        self._versions = itertools.count(1)
        #: by reference id: the service and its handler, made once so that the loop of its coroutines stays
        self._handlers: dict[int, tuple[Any, RequestHandler]] = {}
        self._watches: list[Any] = []
        self._complaints: set[tuple[int, str]] = set()

    def open(self, properties: Callable[[], Mapping[str, Any]]) -> None:
        """Bind handlers from now on.

        Args:
            properties: returns the properties of the whiteboard, which the targets of handlers are matched with.
        """
        self._properties = properties
        self._watches = [self._services.add_listener(self._event, name) for name in _INTERFACES]
        self.refresh()

    def close(self) -> None:
        """Bind no more handlers; the instance ends the subscriptions."""
        for watch in self._watches:
            watch.remove()

    def _event(self, event: ServiceEvent) -> None:
        if event.kind is not ServiceEventKind.MODIFIED:
            # registered: its coroutines run on the loop of this thread, though another thread may have read it before
            self._handlers.pop(event.reference.id, None)
        self.refresh()

    def refresh(self) -> None:
        """Read the registry, and bind the handlers that are meant for this whiteboard."""
        version = next(self._versions)
        mine = self._properties()
        self._connection.engine.call(self.routes.bind, version, [*self._wanted(mine)])

    def _wanted(self, properties: Mapping[str, Any]) -> Iterator[RegisteredHandler]:
        """Return the handlers that are meant for a whiteboard with these properties."""
        for name, kind in _INTERFACES.items():
            for reference in self._services.find(name):
                try:
                    target = as_filter(reference.properties.get(handlers.TARGET))
                    if target is None or target.matches(properties):
                        found = self._read(reference, kind)
                        if found is not None:
                            yield found
                except Exception as error:  # noqa: BLE001  # of a factory of the application, say
                    self._complain(logging.ERROR, reference, f"it is not bound: {error}")

    def _complain(self, level: int, reference: ServiceReference, what: str) -> None:
        """Log a problem of a handler, once, though the handler is read again whenever another one comes or goes."""
        if (reference.id, what) not in self._complaints and not self._connection.endings.is_closing:
            if len(self._complaints) >= _COMPLAINTS:
                self._complaints.clear()
            self._complaints.add((reference.id, what))
            logger.log(level, "%s: the request handler %r: %s", self._connection.adapter.name, reference, what)

    def _read(self, reference: ServiceReference, kind: str) -> RegisteredHandler | None:
        terms = read_terms(reference.properties)
        mistaken = mistaken_key(reference.properties)
        if mistaken is not None:
            self._complain(logging.WARNING, reference, f"{mistaken!r} means nothing")
        handler = self._handler(reference, kind)
        if handler is None:
            return None
        handler.expected = terms.expected
        return RegisteredHandler(reference, handler, terms, reference.ranking)

    def _handler(self, reference: ServiceReference, kind: str) -> RequestHandler | None:
        known = self._handlers.get(reference.id)
        if known is not None:
            handler = known[1]
            if handler.is_async and handler.loop is not None and handler.loop.is_closed():
                raise ValueError("the event loop that it was registered on is closed")
            return handler
        service = self._services.get(reference)
        if service is None:  # unregistered meanwhile
            return None
        handler = serving.RequestHandler(kind, service, running_loop())
        self._handlers[reference.id] = service, handler
        return handler

    # --- results

    def ready(self, reference: ServiceReference | None = None) -> Promise[None]:
        """Return a promise that resolves when the channels of all handlers registered now are subscribed to.

        From any thread.

        Args:
            reference: wait only for the channels of this handler, if it is bound here.

        Returns:
            A promise, which fails with ``SubscriptionRefusedError`` if the broker refuses a subscription.

        Example:
            ``await m.whiteboard.ready()``, where handlers were registered on an event loop.
        """
        return self._connection.engine.run(self._ready(reference), "binding the request handlers")

    async def _ready(self, reference: ServiceReference | None) -> None:
        for route in self.routes:
            if reference is None or any(wanted.reference is reference for wanted, _ in route.bindings):
                await route.subscription.ready

    @property
    def bindings(self) -> list[tuple[str, RegisteredHandler, bool]]:
        """Each channel with its handler, and whether it is subscribed to. A snapshot, from any thread."""
        return [
            (route.channel, wanted, route.subscription.handle is not None)
            for route in self.routes
            for wanted, _ in route.bindings
        ]
