"""ReplyToWhiteboard (RFC 5.7.3): finds request handlers in the service registry, and gives them the requests.

Handlers come, change and go at any time; the subscriptions follow. There is one subscription for each channel and set
of extensions: a :class:`~messaging.replyto.route.Route`. Each request goes to one handler of the whiteboard, the
preferred one (``service.ranking``, then the order of registration) of the handlers that it means, whichever route it
arrived on: their channel matches, and so does their ``replyChannel`` if they have one. A request that means no handler
is acknowledged and dropped.

**Threads.** What the registry tells is evaluated where it tells it; the bindings belong to the engine's loop.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from messaging.errors import MessagingError
from messaging.execution import running_loop, workers
from messaging.receiving import LoopRunner, ThreadRunner
from messaging.replyto import handlers, serving
from messaging.replyto.route import RETRY_FIRST, RequestSubscription, Route
from messaging.replyto.wanted import Wanted, mistaken_key, read_terms
from messaging.services import ServiceEvent, ServiceEventKind, as_filter, interface_name
from messaging.text import SafeLog

if TYPE_CHECKING:
    from messaging.connection import Connection
    from messaging.execution import Promise
    from messaging.receiving import MessageSubscription, Runner
    from messaging.replyto.exchange import Exchange, Replies
    from messaging.replyto.route import Binding
    from messaging.replyto.serving import RequestHandler
    from messaging.services import ServiceReference, ServiceRegistry

logger = SafeLog(__name__)

_INTERFACES: Final = {
    interface_name(handlers.ReplyToSubscriptionHandler): serving.PLAIN,
    interface_name(handlers.ReplyToSingleSubscriptionHandler): serving.SINGLE,
    interface_name(handlers.ReplyToManySubscriptionHandler): serving.MANY,
}
#: when a subscription that failed is tried again, at most, seconds
_RETRY_LAST: Final = 60.0
#: complaints that are remembered
_COMPLAINTS: Final = 1024


class ReplyToWhiteboard:
    """The whiteboard of one instance; get it as ``Messaging.whiteboard``. A marker: it is used by registering handlers.

    Thread safe.
    """

    def __init__(
        self, connection: Connection, services: ServiceRegistry, subscriptions: MessageSubscription, replies: Replies
    ) -> None:
        self._connection = connection
        self._services = services
        self._subscriptions = subscriptions
        self.replies = replies
        self._properties: Callable[[], Mapping[str, Any]] = dict
        self._versions = itertools.count(1)
        #: by reference id: what its service is, made once so that its loop stays
        self._handlers: dict[int, tuple[Any, RequestHandler]] = {}
        # --- on the loop
        self._version = 0
        self._routes: dict[tuple[str, str], Route] = {}
        self._runners: dict[ServiceReference, Binding] = {}
        self._watches: list[Any] = []
        #: what was complained about, so that it is only once
        self._complaints: set[tuple[int, str]] = set()

    # --- the registry, on its threads

    def open(self, properties: Callable[[], Mapping[str, Any]]) -> None:
        """Bind handlers from now on.

        Args:
            properties: of the whiteboard, which targets are matched with.
        """
        self._properties = properties
        self._watches = [self._services.add_listener(self._event, name) for name in _INTERFACES]
        self.refresh()

    def close(self) -> None:
        """Bind no more; the instance ends the subscriptions."""
        for watch in self._watches:
            watch.remove()

    def _event(self, event: ServiceEvent) -> None:
        if event.kind is not ServiceEventKind.MODIFIED:
            # registered: the loop of its coroutines is the one that runs here, whoever else has looked at it before
            self._handlers.pop(event.reference.id, None)
        self.refresh()

    def refresh(self) -> None:
        """Look what is registered, and bind what is meant for this whiteboard."""
        version = next(self._versions)
        mine = self._properties()
        self._connection.engine.call(self._apply, version, [*self._wanted(mine)])

    def _wanted(self, properties: Mapping[str, Any]) -> Iterator[Wanted]:
        """What the handlers ask for that are meant for a whiteboard with these properties."""
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
        """Log what is wrong with a handler; once, though it is looked at again whenever another one comes or goes."""
        if (reference.id, what) not in self._complaints and not self._connection.closing:
            if len(self._complaints) >= _COMPLAINTS:
                self._complaints.clear()
            self._complaints.add((reference.id, what))
            logger.log(level, "%s: the request handler %r: %s", self._connection.adapter.name, reference, what)

    def _read(self, reference: ServiceReference, kind: str) -> Wanted | None:
        terms = read_terms(reference.properties)
        mistaken = mistaken_key(reference.properties)
        if mistaken is not None:
            self._complain(logging.WARNING, reference, f"{mistaken!r} means nothing")
        handler = self._handler(reference, kind)
        return None if handler is None else Wanted(reference, handler, terms, reference.ranking)

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
        if not callable(handler.call):
            raise TypeError(f"{type(service).__name__} is neither a function nor has the method of its interface")
        self._handlers[reference.id] = service, handler
        return handler

    # --- bindings, on the loop

    def _apply(self, version: int, wanted: Sequence[Wanted]) -> None:
        if version < self._version or self._connection.closing or self._connection.state == "closed":
            return
        self._version = version
        runners: dict[ServiceReference, Binding] = {}
        routes: dict[tuple[str, str], list[Binding]] = {}
        for each in sorted(wanted, key=lambda each: each.order):
            known = self._runners.get(each.reference)
            same = (
                known is not None
                and known[0].terms.concurrency == each.terms.concurrency
                and known[0].handler is each.handler
            )
            runner = known[1] if same and known is not None else self._runner(each)
            runners[each.reference] = each, runner
            extensions = repr(sorted(map(repr, each.terms.extensions.items())))
            for channel in each.terms.channels:
                routes.setdefault((channel, extensions), []).append((each, runner))
        self._runners, before = runners, self._runners
        replaced = [
            runner
            for reference, (_, runner) in before.items()
            if reference not in runners or runners[reference][1] is not runner
        ]
        for key in self._routes.keys() & routes.keys():
            self._routes[key].bindings = routes[key]
        self._end([*self._routes.keys() - routes.keys()])
        for key, bindings in routes.items():
            if key not in self._routes:
                self._open(key, bindings)
        self._tell_served()
        for runner in replaced:
            runner.is_retired = True
            runner.pass_on(lambda _: True)
        if any(each.handler.kind == serving.MANY for each in wanted):
            # where their replies are cancelled, to be there before the first request; not made on the loop
            workers().submit(self.replies.requests.own_inbox)

    def _end(self, keys: Sequence[tuple[str, str]]) -> None:
        for route in [self._remove(key) for key in keys]:
            route.stop()  # at once: what its handlers give back is not to be dispatched again
            self._connection.end_subscription(route.subscription)

    def _remove(self, key: tuple[str, str]) -> Route:
        route = self._routes.pop(key)
        for other in route.rivals:
            other.forget(route)
        return route

    def _tell_served(self) -> None:
        self.replies.serve([route.subscription.spec for route in self._routes.values()])

    def _runner(self, wanted: Wanted) -> Runner:
        handler = wanted.handler
        asked = wanted.terms.concurrency
        limit = asked if asked is not None else serving.CONCURRENCY[handler.is_async]
        if handler.is_async:
            return LoopRunner(handler, limit, self._orphaned)
        return ThreadRunner(handler, limit)

    def _orphaned(self, runner: Runner, exchanges: Sequence[Exchange]) -> None:
        """The loop of a handler was closed, with these in its hands."""
        for route in self._routes.values():
            route.bindings = [(wanted, each) for wanted, each in route.bindings if each is not runner]
        self._end([key for key, route in self._routes.items() if not route.bindings])
        self._tell_served()
        for exchange in exchanges:
            exchange.origin.dispatch(exchange)
        workers().submit(self.refresh)

    def _open(self, key: tuple[str, str], bindings: list[Binding], retry_after: float = RETRY_FIRST) -> None:
        wanted = bindings[0][0]
        route = Route(self, key, wanted.queue, retry_after)
        route.bindings = bindings
        try:
            subscription = self._subscriptions.open_requests(
                route.channel, wanted.terms.extensions, RequestSubscription
            )
        except MessagingError as error:
            logger.error("%s: no requests are taken on %r: %s", self._connection.adapter.name, route.channel, error)
            return
        route.open(subscription)
        route.rivals = [other for other in self._routes.values() if route.is_rival(other)]
        for other in route.rivals:
            other.rivals.append(route)
        self._routes[key] = route
        self._connection.start_subscription(subscription)

    def route(self, key: tuple[str, str]) -> Route | None:
        """Return the route that takes the requests of a channel now."""
        return self._routes.get(key)

    def failed(self, route: Route, error: MessagingError) -> None:
        """The broker ended the subscription of ``route``, or refused it: try again, later and later."""
        if self._routes.get(route.key) is not route or self._connection.closing:
            return
        logger.error(
            "%s: no requests are taken on %r for %g s: %s",
            self._connection.adapter.name, route.channel, route.retry_after, error,
        )  # fmt: skip
        self._connection.engine.loop.call_later(route.retry_after, self._retry, route)

    def _retry(self, route: Route) -> None:
        if self._routes.get(route.key) is route and not self._connection.closing:
            self._remove(route.key)
            self._open(route.key, route.bindings, min(2 * route.retry_after, _RETRY_LAST))
            self._tell_served()

    def ready(self, reference: ServiceReference | None = None) -> Promise[None]:
        """Resolves when the channels of all handlers that are registered now are subscribed to. From any thread.

        Args:
            reference: only those of this one, if it is bound here.

        Returns:
            A promise, which fails with ``SubscriptionRefusedError`` if the broker does not let one of them be.

        Example:
            ``await m.whiteboard.ready()``, where handlers were registered on an event loop.
        """
        return self._connection.engine.run(self._ready(reference), "binding the request handlers")

    async def _ready(self, reference: ServiceReference | None) -> None:
        for route in [*self._routes.values()]:
            if reference is None or any(wanted.reference is reference for wanted, _ in route.bindings):
                await route.subscription.ready

    @property
    def bindings(self) -> list[tuple[str, Wanted, bool]]:
        """Channel, what its handler asked for, and whether it is subscribed to. A snapshot, from any thread."""
        return [
            (route.channel, wanted, route.subscription.handle is not None)
            for route in [*self._routes.values()]
            for wanted, _ in route.bindings
        ]
