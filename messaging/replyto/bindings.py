"""Bindings of request handlers to the channels they serve (RFC 5.7.3). Everything runs on the engine's loop.

There is one subscription, a ``RequestRoute``, for each channel and set of extensions. Each request goes to one handler
of the whiteboard, the preferred one (``service.ranking``, then order of registration) of the handlers that it means,
whichever route it arrived on: their channel matches, and so does their ``replyChannel`` if they have one. A request
that means no handler is acknowledged and dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Final

from messaging.errors import MessagingError
from messaging.execution import clock, workers
from messaging.receiving import runner_of
from messaging.replyto import serving
from messaging.replyto.request_route import RETRY_FIRST, RequestRoute, RequestSubscription
from messaging.text import SafeLog

if TYPE_CHECKING:
    from messaging.connection import Connection
    from messaging.interception import ProcessChain
    from messaging.receiving import MessageSubscription, Runner
    from messaging.replyto.replies import Replies
    from messaging.replyto.request_route import Binding
    from messaging.replyto.served_request import ServedRequest
    from messaging.replyto.terms import RegisteredHandler
    from messaging.services import ServiceReference

logger = SafeLog(__name__)

#: longest delay before a subscription that failed is tried again, seconds
_RETRY_LAST: Final = 60.0


class Bindings:
    """The handlers of one whiteboard, their runners, and the routes of their requests.

    Args:
        connection: of the instance.
        subscriptions: opens subscriptions to requests.
        replies: sends replies.
        reread: called on a worker thread when the service registry has to be read again.
        chain: interceptors, which wrap the handlers.
    """

    def __init__(
        self,
        connection: Connection,
        subscriptions: MessageSubscription,
        replies: Replies,
        reread: Callable[[], object],
        chain: ProcessChain | None = None,
    ) -> None:
        self.replies = replies
        self._chain = chain
        self._connection = connection
        self._subscriptions = subscriptions
        self._reread = reread
        #: of the registry contents that were bound last
        self._version = 0
        #: by channel, and extensions of the subscription
        self._routes: dict[tuple[str, str], RequestRoute] = {}
        self._bound: dict[ServiceReference, Binding] = {}

    def __iter__(self) -> Iterator[RequestRoute]:
        """Iterate over the routes. A snapshot, from any thread."""
        return iter([*self._routes.values()])

    def bind(self, version: int, wanted: Sequence[RegisteredHandler]) -> None:
        """Bind exactly the handlers that are ``wanted``, unless a later version of the registry is bound."""
        if version < self._version or self._connection.endings.is_closing or self._connection.state == "closed":
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
        for key, route in self._routes.items():
            if key in routes:
                route.bindings = routes[key]
        self._end([key for key in self._routes if key not in routes])
        for key, bindings in routes.items():
            if key not in self._routes:
                self._open(key, bindings)
        self._refuse_replies()
        kept = {runner for _, runner in bound.values()}
        for _, runner in before.values():
            if runner not in kept:
                runner.is_retired = True
                runner.pass_on(lambda _: True)
        if any(each.handler.kind == serving.MANY for each in wanted):
            # the channel of cancellations is subscribed to before the first request; it is not made on the loop
            workers().submit(self.replies.streams.prepare)

    def _runner_of(self, wanted: RegisteredHandler) -> Runner:
        """Return the runner of a handler: the one it has, unless its concurrency or its service has changed."""
        handler, asked = wanted.handler, wanted.terms.concurrency
        known = self._bound.get(wanted.reference)
        if known is not None and known[0].terms.concurrency == asked and known[0].handler is handler:
            return known[1]
        limit = asked if asked is not None else serving.CONCURRENCY[handler.is_async]
        return runner_of(handler, limit, self._orphaned, self._chain)

    def _orphaned(self, runner: Runner, requests: Sequence[ServedRequest]) -> None:
        """Pass on the requests of a handler whose event loop was closed."""
        for route in self._routes.values():
            route.bindings = [(wanted, each) for wanted, each in route.bindings if each is not runner]
        self._end([key for key, route in self._routes.items() if not route.bindings])
        self._refuse_replies()
        for served in requests:
            served.origin.dispatch(served)
        workers().submit(self._reread)

    # --- routes

    def route(self, key: tuple[str, str]) -> RequestRoute | None:
        """Return the route that takes the requests of a channel now."""
        return self._routes.get(key)

    def _open(self, key: tuple[str, str], bindings: list[Binding], retry_after: float = RETRY_FIRST) -> None:
        wanted = bindings[0][0]
        route = RequestRoute(self, key, wanted.queue, retry_after)
        route.bindings = bindings
        try:
            subscription = self._subscriptions.open_requests(
                route.channel, wanted.terms.extensions, RequestSubscription
            )
        except MessagingError as error:
            logger.error("%s: no requests are taken on %r: %s", self._connection.adapter.name, route.channel, error)
            return
        route.take(subscription)
        for other in self._routes.values():
            if route.overlap.is_rival(other):
                route.overlap.rivals.append(other)
                other.overlap.rivals.append(route)
        self._routes[key] = route
        self._connection.subscriptions.start(subscription)

    def _end(self, keys: Sequence[tuple[str, str]]) -> None:
        for route in [self._remove(key) for key in keys]:
            route.stop()  # at once: requests that are withdrawn from its handlers must not be dispatched to it again
            self._connection.subscriptions.end(route.subscription)

    def _remove(self, key: tuple[str, str]) -> RequestRoute:
        route = self._routes.pop(key)
        for other in route.overlap.rivals:
            other.overlap.forget(route)
        return route

    def _refuse_replies(self) -> None:
        """Have no reply go to a channel that requests are taken from."""
        self.replies.serve([route.subscription.spec for route in self._routes.values()])

    def failed(self, route: RequestRoute, error: MessagingError) -> None:
        """Try again, at growing intervals: the broker ended the subscription of ``route``, or refused it."""
        if self._routes.get(route.key) is not route or self._connection.endings.is_closing:
            return
        logger.error(
            "%s: no requests are taken on %r for %g s: %s",
            self._connection.adapter.name, route.channel, route.retry_after, error,
        )  # fmt: skip
        clock.call_later(self._connection.engine.loop, route.retry_after, self._retry, route)

    def _retry(self, route: RequestRoute) -> None:
        if self._routes.get(route.key) is route and not self._connection.endings.is_closing:
            self._remove(route.key)
            self._open(route.key, route.bindings, min(2 * route.retry_after, _RETRY_LAST))
            self._refuse_replies()
