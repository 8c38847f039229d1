"""ReplyToWhiteboard (RFC 5.7.3): finds request handlers in the service registry, and gives them the requests.

Handlers come, change and go at any time; which channels are subscribed to follows. For each channel there is one
subscription, whose requests go to the preferred handler there (``service.ranking``, then the one registered first) of
those that are meant: one with ``replyChannel`` is meant by the requests that name that channel. So each request is
handled once by each whiteboard. Requests that mean no handler are acknowledged, and dropped.

**Threads.** What the registry tells is evaluated where it tells it; the bindings belong to the engine's loop.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from messaging import channels
from messaging.coroutines import running_loop
from messaging.delivery import Subscription
from messaging.errors import ArgumentError, MessagingError
from messaging.promise import Promise
from messaging.replyto import handlers, serving
from messaging.replyto.exchange import Exchange, Replies, Verdict
from messaging.services import ServiceEvent, ServiceEventKind
from messaging.services.filter import as_filter
from messaging.services.registry import interface_name
from messaging.workers import workers

if TYPE_CHECKING:
    from messaging.connection import Connection
    from messaging.message import Message
    from messaging.replyto.serving import Handler, Runner
    from messaging.services import ServiceReference, ServiceRegistry
    from messaging.subscription import MessageSubscription

logger = logging.getLogger(__name__)

_INTERFACES: Final = {
    interface_name(handlers.ReplyToSubscriptionHandler): serving.PLAIN,
    interface_name(handlers.ReplyToSingleSubscriptionHandler): serving.SINGLE,
    interface_name(handlers.ReplyToManySubscriptionHandler): serving.MANY,
}
#: when a subscription that failed is tried again, at first and at most, seconds
_RETRY_FIRST: Final = 1.0
_RETRY_LAST: Final = 60.0
#: complaints that are remembered
_COMPLAINTS: Final = 1024
#: keys of an example in the RFC, which its table does not have
_MISTAKEN: Final = ("osgi.messaging.replyTo.channel", "messaging.name")


def channel_list(value: object, what: str) -> tuple[str, ...]:
    """Return the channels that ``value``, a str or an iterable of them, names: each once, in order.

    Raises:
        ArgumentError: it is neither, or names no channel. ``what`` is what the error calls it.
        InvalidChannelError: one of them is malformed.
    """
    if isinstance(value, str):
        several: tuple[object, ...] = (value,)
    elif isinstance(value, Iterable) and not isinstance(value, (bytes, bytearray, memoryview, Mapping)):
        several = tuple(value)
    else:
        raise ArgumentError(f"{what} must be a channel (str) or a list of channels, not {type(value).__name__}")
    if not several:
        raise ArgumentError(f"{what} is empty: name at least one channel to take requests from")
    return tuple(dict.fromkeys(channels.check_pattern(each) for each in several))  # type: ignore[arg-type]  # it checks


@dataclass(frozen=True, slots=True)
class Wanted:
    """What the properties of a handler ask for."""

    reference: ServiceReference
    handler: Handler
    channels: tuple[str, ...]
    reply_channel: str | None
    concurrency: int | None
    extensions: Mapping[str, Any]
    ranking: int

    @property
    def order(self) -> tuple[int, int]:
        """The preferred first."""
        return -self.ranking, self.reference.id


class RequestSubscription(Subscription):
    """The subscription to the requests of one channel."""

    is_listed = False
    is_stream = False


class Route:
    """A channel with handlers: the consumer of its subscription. On the loop, but for what says otherwise."""

    def __init__(self, whiteboard: ReplyToWhiteboard, key: tuple[str, str], retry_after: float) -> None:
        self.key = key
        #: if its subscription fails, seconds
        self.retry_after = retry_after
        self.channel = key[0]
        self.subscription: Subscription
        #: the preferred first
        self.bindings: list[tuple[Wanted, Runner]] = []
        self._whiteboard = whiteboard
        self._replies = whiteboard.replies
        #: requests in the hands of handlers, or waiting for them
        self._exchanges: set[Exchange] = set()
        #: how many there may be: the protocol's credit does not bound those without acknowledgement
        self._limit = 1
        self._is_full = False
        self._has_failed = False
        self._is_stopping = False
        self._quiet: Promise[None] = Promise(f"the handlers of {self.channel!r}")

    def open(self, subscription: Subscription) -> None:
        """Take the requests of ``subscription``."""
        self.subscription = subscription
        self._limit = min(subscription.spec.options.prefetch, subscription.spec.options.buffer_size)
        subscription.consumer = self
        subscription.ready.listen(self._confirmed)

    def _confirmed(self) -> None:
        if not self.subscription.ended:
            self.retry_after = _RETRY_FIRST

    def wake(self) -> None:
        """Give what has arrived to the handlers; see ``Consumer``."""
        subscription, exchanges = self.subscription, self._exchanges
        if self._is_stopping:
            return
        while len(exchanges) < self._limit:
            message = subscription.take()
            if message is None:
                if subscription.error is not None and not self._has_failed:
                    self._has_failed = True
                    self._whiteboard.failed(self, subscription.error)
                return
            exchange = Exchange(self._replies, message, self)
            exchanges.add(exchange)
            self.dispatch(exchange)
        self._is_full = True

    def dispatch(self, exchange: Exchange) -> None:
        """Give a request to the handler that is meant."""
        if self._is_stopping:
            self._leave(exchange)
            return
        if exchange.has_begun:
            workers().submit(exchange.give_back)
            return
        # if the broker has ended this subscription, there may be another for the channel by now, or none
        route = self._whiteboard.route(self.key)
        if route is None:
            self._leave(exchange)
            return
        named = exchange.request._context._reply_to_channel
        for wanted, runner in route.bindings:
            if wanted.reply_channel is None or wanted.reply_channel == named:
                runner.submit(exchange)
                return
        logger.debug("a request on %r means no handler", self.channel)
        exchange.done()

    def _leave(self, exchange: Exchange) -> None:
        """Let a request go that was not begun: back to the broker, if it delivers it to another one."""
        if exchange.request._context.token is not None and self._replies.adapter.redelivers(self.subscription.spec):  # type: ignore[attr-defined]
            exchange.finish(Verdict.LEAVE)
        else:
            workers().submit(exchange.give_back)

    def finished(self, exchange: Exchange, verdict: Verdict) -> None:
        """See ``exchange.Origin``."""
        self._exchanges.discard(exchange)
        if verdict is Verdict.ACCEPT:
            self.subscription.accept(exchange.request)
        elif verdict is Verdict.REFUSE:
            self.subscription.refuse(exchange.request)
        if self._is_stopping:
            if not self._exchanges:
                self._quiet.resolve(None)
        elif self._is_full:
            self._is_full = False
            self.wake()

    def is_void(self, request: Message) -> bool:
        """See ``exchange.Origin``."""
        return self.subscription.is_void(request)

    def stop(self) -> Promise[None]:
        """Take no more, and let the handlers finish; see ``Consumer``. From any thread."""
        self._is_stopping = True
        self._replies.connection.engine.call(self._stop)
        return self._quiet

    def _stop(self) -> None:
        waiting = [each for _, runner in self.bindings for each in runner.withdraw(lambda each: each.origin is self)]
        for exchange in waiting:
            self._leave(exchange)
        for exchange in self._exchanges.copy():
            if exchange.wants_many:
                exchange.stop("the handler was stopped")
        if not self._exchanges:
            self._quiet.resolve(None)


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
        self._handlers: dict[int, tuple[Any, Handler]] = {}
        # --- on the loop
        self._version = 0
        self._routes: dict[tuple[str, str], Route] = {}
        self._runners: dict[ServiceReference, tuple[Wanted, Runner]] = {}
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
        properties = reference.properties
        named = properties.get(handlers.CHANNEL)
        mistaken = [key for key in _MISTAKEN if key in properties]
        hint = f"{mistaken[0]!r} means nothing" if mistaken else ""
        if named is None:
            raise ValueError(f"it has no {handlers.CHANNEL}" + (f"; {hint}" if hint else ""))
        if hint:
            self._complain(logging.WARNING, reference, hint)
        several = channel_list(named, handlers.CHANNEL)
        reply_channel = properties.get(handlers.REPLY_CHANNEL)
        if reply_channel is not None:
            channels.check_name(reply_channel)
        concurrency = properties.get(handlers.CONCURRENCY)
        if concurrency is not None and (
            isinstance(concurrency, bool) or not isinstance(concurrency, int) or concurrency < 1
        ):
            raise ValueError(f"{handlers.CONCURRENCY} must be an int of at least 1, not {concurrency!r}")
        extensions = properties.get(handlers.EXTENSIONS)
        if extensions is not None and not isinstance(extensions, Mapping):
            raise ArgumentError(f"{handlers.EXTENSIONS} must be a mapping, not {type(extensions).__name__}")
        handler = self._handler(reference, kind)
        if handler is None:
            return None
        return Wanted(
            reference,
            handler,
            several,
            reply_channel,
            concurrency,
            dict(extensions or {}),
            reference.ranking,
        )

    def _handler(self, reference: ServiceReference, kind: str) -> Handler | None:
        known = self._handlers.get(reference.id)
        if known is not None:
            handler = known[1]
            if handler.is_async and handler.loop is not None and handler.loop.is_closed():
                raise ValueError("the event loop that it was registered on is closed")
            return handler
        service = self._services.get(reference)
        if service is None:  # unregistered meanwhile
            return None
        handler = serving.Handler(kind, service, running_loop())
        if not callable(handler.call):
            raise TypeError(f"{type(service).__name__} is neither a function nor has the method of its interface")
        self._handlers[reference.id] = service, handler
        return handler

    # --- bindings, on the loop

    def _apply(self, version: int, wanted: Sequence[Wanted]) -> None:
        if version < self._version or self._connection.closing or self._connection.state == "closed":
            return
        self._version = version
        runners: dict[ServiceReference, tuple[Wanted, Runner]] = {}
        routes: dict[tuple[str, str], list[tuple[Wanted, Runner]]] = {}
        for each in sorted(wanted, key=lambda each: each.order):
            known = self._runners.get(each.reference)
            same = known is not None and known[0].concurrency == each.concurrency and known[0].handler is each.handler
            runner = known[1] if same and known is not None else self._runner(each)
            runners[each.reference] = each, runner
            for channel in each.channels:
                routes.setdefault((channel, repr(sorted(map(repr, each.extensions.items())))), []).append(
                    (each, runner)
                )
        self._runners, before = runners, self._runners
        replaced = [
            runner
            for reference, (_, runner) in before.items()
            if reference not in runners or runners[reference][1] is not runner
        ]
        for key in [*self._routes.keys() - routes.keys()]:
            self._end(self._routes.pop(key))
        for key, bindings in routes.items():
            route = self._routes.get(key)
            if route is not None:
                route.bindings = bindings
            else:
                self._open(key, bindings)
        for runner in replaced:
            runner.is_retired = True
            for exchange in runner.withdraw(lambda _: True):
                exchange.origin.dispatch(exchange)
        if any(each.handler.kind == serving.MANY for each in wanted):
            # where their replies are cancelled, to be there before the first request; not made on the loop
            workers().submit(self.replies.requests.own_inbox)
        self.replies.served = tuple(channels.matcher(channel) for channel, _ in self._routes)

    def _end(self, route: Route) -> None:
        route.stop()  # at once: what its handlers give back is not to be dispatched again
        self._connection.end_subscription(route.subscription)

    def _runner(self, wanted: Wanted) -> Runner:
        handler = wanted.handler
        limit = wanted.concurrency if wanted.concurrency is not None else serving.CONCURRENCY[handler.is_async]
        if handler.is_async:
            return serving.LoopRunner(handler, limit, self._orphaned)
        return serving.ThreadRunner(handler, limit)

    def _orphaned(self, runner: Runner, exchanges: Sequence[Exchange]) -> None:
        """The loop of a handler was closed, with these in its hands."""
        for key, route in [*self._routes.items()]:
            route.bindings = [(wanted, each) for wanted, each in route.bindings if each is not runner]
            if not route.bindings:
                del self._routes[key]
                self._end(route)
        for exchange in exchanges:
            exchange.origin.dispatch(exchange)
        workers().submit(self.refresh)

    def _open(
        self, key: tuple[str, str], bindings: list[tuple[Wanted, Runner]], retry_after: float = _RETRY_FIRST
    ) -> None:
        route = Route(self, key, retry_after)
        route.bindings = bindings
        try:
            subscription = self._subscriptions.open_requests(
                route.channel, bindings[0][0].extensions, RequestSubscription
            )
        except MessagingError as error:
            logger.error("%s: no requests are taken on %r: %s", self._connection.adapter.name, route.channel, error)
            return
        route.open(subscription)
        self._routes[key] = route
        self._connection.start_subscription(subscription)

    def route(self, key: tuple[str, str]) -> Route | None:
        """The one that takes the requests of a channel now."""
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
            del self._routes[route.key]
            self._open(route.key, route.bindings, min(2 * route.retry_after, _RETRY_LAST))

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
