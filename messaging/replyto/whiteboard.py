"""ReplyToWhiteboard (RFC 5.7.3): finds request handlers in the service registry, and binds them to their channels.

Handlers come, change and go at any time; the subscriptions follow. There is one subscription, a ``RequestChannel``, for
each channel and set of extensions. Each request goes to one handler of the whiteboard, the preferred one
(``service.ranking``, then order of registration) of the handlers that it matches, whichever route it arrived on: by
their channel, and by their ``replyChannel`` if they have one. A request that matches no handler is acknowledged and
dropped.

**Threads.** Events of the registry are evaluated on the threads that cause them; the bindings belong to the engine's
loop.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, Self

from messaging.connection import Connection
from messaging.errors import MessagingError
from messaging.errors.text import SafeLog, tolerant
from messaging.execution import Promise, clock, running_loop, workers
from messaging.interception import ProcessChain
from messaging.receiving import AsyncBlock, MessageSubscription, Runner, runner_of
from messaging.replyto import handlers, serving
from messaging.replyto.replies import Replies
from messaging.replyto.request_channel import RETRY_FIRST, RequestChannel
from messaging.replyto.served_request import ServedRequest
from messaging.replyto.serving import RegisteredHandler, RequestHandler, mistaken_key, read_terms
from messaging.services import ServiceEvent, ServiceEventKind, ServiceReference, ServiceRegistration, interface_name
from messaging.services.filter import as_filter

if TYPE_CHECKING:
    from messaging.replyto.request_channel import Binding
    from messaging.services import ServiceReference, ServiceRegistry

logger = SafeLog(__name__)


class ReplyRegistration(ServiceRegistration, AsyncBlock):
    """A registered request handler. Thread safe.

    ``async with m.reply(channel, function)`` and ``await m.reply(channel, function)`` wait until the broker has
    confirmed its subscriptions; the former unregisters it at the end, as ``with`` does.

    Attributes:
        ready: a promise that resolves when the broker has confirmed the subscriptions of the handler; it fails with
            ``SubscriptionRefusedError`` if the broker refuses one.
    """

    __slots__ = ("_registration", "ready")

    def __init__(self, registration: ServiceRegistration, ready: Promise[None]) -> None:
        # the base is not initialized: the registry knows ``registration``, which answers everything
        self._registration = registration
        self.ready = ready
        ready.was_retrieved = True  # the whiteboard logs a subscription that fails, and tries again

    @property
    def reference(self) -> ServiceReference:
        """See ``ServiceRegistration``."""
        return self._registration.reference

    def update(self, properties: Mapping[str, Any] | None = None) -> None:
        """See ``ServiceRegistration``."""
        self._registration.update(properties)

    def unregister(self) -> bool:
        """See ``ServiceRegistration``."""
        return self._registration.unregister()

    def __await__(self) -> Generator[Any, None, Self]:
        yield from self.ready.__await__()
        return self

    def end_block(self, _: bool, /) -> None:
        """Unregister the handler."""
        self.unregister()

    @tolerant
    def __repr__(self) -> str:
        return repr(self._registration)


#: longest delay before a subscription that failed is tried again, seconds
_RETRY_LAST: Final = 60.0
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
        self._connection = connection
        self._services = services
        self._subscriptions = subscriptions
        self._replies = replies
        self._interceptors = interceptors
        self._properties: Callable[[], Mapping[str, Any]] = dict
        self._versions = itertools.count(1)
        #: by reference id, made once so that the loop of its coroutines stays
        self._handlers: dict[int, RequestHandler] = {}
        self._watches: list[Any] = []
        self._complaints: set[tuple[int, str]] = set()
        #: of the registry contents that were bound last; on the loop
        self._version = 0
        #: the routes of requests by channel, and extensions of the subscription; on the loop
        self.routes: dict[tuple[str, str], RequestChannel] = {}
        #: the handlers that are bound to them, and their runners; on the loop
        self._bound: dict[ServiceReference, Binding] = {}

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
        self._connection.engine.call(self._bind, version, [*self._wanted(mine)])

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
        return RegisteredHandler(reference, handler, terms, reference.ranking, kind != serving.PLAIN)

    def _handler(self, reference: ServiceReference, kind: str) -> RequestHandler | None:
        handler = self._handlers.get(reference.id)
        if handler is None:
            service = self._services.get(reference)
            if service is not None:  # otherwise it was unregistered meanwhile
                handler = self._handlers[reference.id] = serving.RequestHandler(kind, service, running_loop())
        elif handler.is_async and handler.loop is not None and handler.loop.is_closed():
            raise ValueError("the event loop that it was registered on is closed")
        return handler

    # --- bindings, on the loop

    def _bind(self, version: int, wanted: Sequence[RegisteredHandler]) -> None:
        """Bind exactly the handlers that are ``wanted``, unless a later version of the registry is bound."""
        if version < self._version or self._connection.is_closing:
            return
        self._version = version
        bound: dict[ServiceReference, Binding] = {}
        routes: dict[tuple[str, str], list[Binding]] = {}
        for each in sorted(wanted, key=lambda each: each.order):
            runner = self._runner_of(each)
            bound[each.reference] = each, runner
            extensions = repr(sorted(map(repr, each.terms.extensions.items())))
            for channel in each.terms.channels:
                routes.setdefault((channel, extensions), []).append((each, runner))
        self._bound, before = bound, self._bound
        for key, route in self.routes.items():
            if key in routes:
                route.bindings = routes[key]
        self._end([key for key in self.routes if key not in routes])
        for key, bindings in routes.items():
            if key not in self.routes:
                self._open(key, bindings)
        self._refuse_replies()
        kept = {runner for _, runner in bound.values()}
        for _, runner in before.values():
            if runner not in kept:
                runner.is_retired = True
                runner.pass_on(lambda _: True)
        if any(each.handler.kind == serving.MANY for each in wanted):
            # the channel of cancellations is subscribed to before the first request; it is not made on the loop
            workers().submit(self._replies.requests.own_inbox)

    def _runner_of(self, wanted: RegisteredHandler) -> Runner:
        """Return the runner of a handler: the one it has, unless its concurrency or its service has changed."""
        handler, asked = wanted.handler, wanted.terms.concurrency
        known = self._bound.get(wanted.reference)
        if known is not None and known[0].terms.concurrency == asked and known[0].handler is handler:
            return known[1]
        limit = asked if asked is not None else serving.CONCURRENCY[handler.is_async]
        return runner_of(handler, limit, self._orphaned, self._interceptors)

    def _orphaned(self, runner: Runner, requests: Sequence[ServedRequest]) -> None:
        """Pass on the requests of a handler whose event loop was closed."""
        for route in self.routes.values():
            route.bindings = [(wanted, each) for wanted, each in route.bindings if each is not runner]
        self._end([key for key, route in self.routes.items() if not route.bindings])
        self._refuse_replies()
        for served in requests:
            served.origin.dispatch(served)
        workers().submit(self.refresh)

    # --- routes

    def _open(self, key: tuple[str, str], bindings: list[Binding], retry_after: float = RETRY_FIRST) -> None:
        try:
            subscription = self._subscriptions.open_requests(key[0], bindings[0][0].terms.extensions)
        except MessagingError as error:
            logger.error("%s: no requests are taken on %r: %s", self._connection.adapter.name, key[0], error)
            return
        route = RequestChannel(self._replies, self.routes, self._failed, key, bindings, subscription)
        route.retry_after = retry_after
        for other in self.routes.values():
            if route.is_rival(other):
                route.rivals.append(other)
                other.rivals.append(route)
        self.routes[key] = route
        self._connection.subscriptions.start(subscription)

    def _end(self, keys: Sequence[tuple[str, str]]) -> None:
        for route in [self._remove(key) for key in keys]:
            route.stop()  # at once: requests that are withdrawn from its handlers must not be dispatched to it again
            self._connection.subscriptions.end(route.subscription)

    def _remove(self, key: tuple[str, str]) -> RequestChannel:
        route = self.routes.pop(key)
        for other in route.rivals:
            other.forget(route)
        return route

    def _refuse_replies(self) -> None:
        """Have no reply go to a channel that requests are taken from."""
        self._replies.serve([route.subscription.spec for route in self.routes.values()])

    def _failed(self, route: RequestChannel, error: MessagingError) -> None:
        """Try again, at growing intervals: the broker ended the subscription of ``route``, or refused it."""
        if self.routes.get(route.key) is not route or self._connection.endings.is_closing:
            return
        logger.error(
            "%s: no requests are taken on %r for %g s: %s",
            self._connection.adapter.name, route.channel, route.retry_after, error,
        )  # fmt: skip
        clock.call_later(self._connection.engine.loop, route.retry_after, self._retry, route)

    def _retry(self, route: RequestChannel) -> None:
        if self.routes.get(route.key) is route and not self._connection.endings.is_closing:
            self._remove(route.key)
            self._open(route.key, route.bindings, min(2 * route.retry_after, _RETRY_LAST))
            self._refuse_replies()

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
        for route in [*self.routes.values()]:
            if reference is None or any(wanted.reference is reference for wanted, _ in route.bindings):
                await route.subscription.ready

    @property
    def bindings(self) -> list[tuple[str, RegisteredHandler, bool]]:
        """Each channel with its handler, and whether it is subscribed to. A snapshot, from any thread."""
        return [
            (route.channel, wanted, route.subscription.handle is not None)
            for route in [*self.routes.values()]
            for wanted, _ in route.bindings
        ]
