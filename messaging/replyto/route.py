"""A request channel and its subscription: takes requests, and gives each one to a handler (RFC 5.7.3).

Everything runs on the engine's loop, unless it says otherwise.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Final, Protocol

from messaging.execution import Promise, workers
from messaging.model import Features, channels
from messaging.receiving import Subscription, Verdict
from messaging.replyto.copies import Claim, ExpectedCopies, identity_of
from messaging.replyto.exchange import Exchange, Replies
from messaging.text import SafeLog

if TYPE_CHECKING:
    from messaging.errors import MessagingError
    from messaging.model import Message
    from messaging.receiving import Runner
    from messaging.replyto.wanted import Wanted

    #: the terms of a handler, and its runner
    Binding = tuple[Wanted, Runner]

logger = SafeLog(__name__)

_ACCEPT: Final = Verdict.ACCEPT
#: when a subscription that failed is tried again, at first, seconds
RETRY_FIRST: Final = 1.0
#: idle time of a subscription after which no earlier message waits for it at the broker, seconds
_CAUGHT_UP: Final = 1.0


class RequestSubscription(Subscription):
    """The subscription to the requests of one channel."""

    is_listed = False
    is_stream = False


class Routes(Protocol):
    """All routes of a whiteboard."""

    replies: Replies

    def route(self, key: tuple[str, str]) -> Route | None:
        """Return the route that takes the requests of a channel now."""
        ...

    def failed(self, route: Route, error: MessagingError) -> None:
        """Learn that the broker ended the subscription of ``route``, or refused it."""
        ...


class Route:
    """A channel with handlers: the consumer of its subscription.

    Args:
        routes: those of the whiteboard.
        key: the channel, and what tells the extensions of its subscription from others.
        queue: the extension of that name.
        retry_after: when the subscription is tried again if it fails, seconds.
    """

    def __init__(self, routes: Routes, key: tuple[str, str], queue: str | None, retry_after: float) -> None:
        self.key = key
        self.retry_after = retry_after
        self.channel = key[0]
        self.queue = queue
        #: patterns of the channels that the subscription receives
        self.patterns: tuple[str, ...] = (self.channel,)
        self.subscription: Subscription
        #: the preferred first
        self.bindings: list[Binding] = []
        #: other routes that a request of this one may reach as well, or whose requests may arrive here
        self.rivals: list[Route] = []
        self.expected = ExpectedCopies()
        self._routes = routes
        self._replies = routes.replies
        #: requests in the hands of handlers, or waiting for them
        self._exchanges: set[Exchange] = set()
        #: copies of requests that handlers have from other routes
        self._copies = 0
        #: how many there may be: the protocol's credit does not bound those without acknowledgement
        self._limit = 1
        self._is_full = False
        #: rivals that were subscribed to while requests waited here: they have no copies of these
        self._behind: set[Route] = set()
        #: when one of those was added, or a request was taken or finished since; monotonic seconds
        self._busy_at = 0.0
        self._has_failed = False
        #: takes no more requests; see ``exchange.Origin``
        self.is_stopping = False
        #: the broker has confirmed the subscription, once
        self._was_confirmed = False
        self._quiet: Promise[None] = Promise(f"the handlers of {self.channel!r}")

    def open(self, subscription: Subscription) -> None:
        """Take the requests of ``subscription``."""
        self.subscription = subscription
        self.patterns = self._replies.adapter.patterns(subscription.spec)
        self._limit = min(subscription.spec.options.prefetch, subscription.spec.options.buffer_size)
        subscription.consumer = self
        subscription.ready.listen(self._confirmed)

    def _confirmed(self) -> None:
        if not self.subscription.ended:
            self._was_confirmed = True
            self.retry_after = RETRY_FIRST
            for other in self.rivals:
                if other._is_full or other._is_at_limit or other.subscription.buffered:
                    other._behind.add(self)
                    other._busy_at = time.monotonic()

    def is_rival(self, other: Route) -> bool:
        """Return whether a request may reach both routes, or either of them."""
        if self.queue is not None and self.queue == other.queue:
            return True
        return any(_overlap(mine, theirs) for mine in self.patterns for theirs in other.patterns)

    def forget(self, rival: Route) -> None:
        """Learn that a rival ends."""
        self.rivals.remove(rival)
        self._behind.discard(rival)
        self.expected.doubt(rival)

    def matches(self, channel: str) -> bool:
        """Return whether the subscription hears a channel."""
        return any(channels.matches(pattern, channel) for pattern in self.patterns)

    # --- requests

    def wake(self) -> None:
        """Give the requests that have arrived to the handlers; see ``Consumer``."""
        subscription, exchanges = self.subscription, self._exchanges
        if self.is_stopping:
            return
        fetch = subscription.fetch
        while len(exchanges) < self._limit:
            message = fetch()
            subscription.fetched = None  # no signal handler interrupts this thread
            if message is None:
                if subscription.error is not None and not self._has_failed:
                    self._has_failed = True
                    self._routes.failed(self, subscription.error)
                return
            if self.rivals and not self._is_served_here(message):
                continue
            exchange = Exchange(self._replies, message, self)
            exchanges.add(exchange)
            if self.rivals:
                self._expect_copies(exchange)
            self.dispatch(exchange)
        self._is_full = True

    def _is_served_here(self, message: Message) -> bool:
        """Whether a request is to be handled here, and is no copy of another one; otherwise it is settled."""
        identity = identity_of(message)
        claim = self.expected.take(identity)
        if claim is not None:
            self._copies += 1
            claim.add(self, message)
            return False
        best = self._best(message)
        if best is None or best[0].queue in (None, self.queue):
            return True
        if self._is_behind(best[0].queue):
            return True
        # the queue of the preferred handler has a copy as well: one of the programs that share it handles that
        self.expected.arrived_early(identity)
        self.subscription.accept(message)
        return False

    def _is_behind(self, queue: str | None) -> bool:
        """Whether requests may have been waiting here since before there was a subscription to ``queue``."""
        if not self._behind:
            return False
        now = time.monotonic()
        if now - self._busy_at > _CAUGHT_UP and not self._exchanges:
            self._behind.clear()
        self._busy_at = now
        return any(other.queue == queue for other in self._behind)

    def _expect_copies(self, exchange: Exchange) -> None:
        """Have the other routes that a request reaches expect a copy of it."""
        request = exchange.request
        channel, claim = request._context._channel or "", Claim(self)
        for other in self.rivals:
            if other.matches(channel) and not self._shares_copies(other):
                exchange.claim = claim
                # a rival that was subscribed to since may have no copy of a request that waited here
                other.expected.expect(identity_of(request), claim, is_uncertain=other in self._behind)

    def _shares_copies(self, other: Route) -> bool:
        """Whether a request arrives at one of both routes only, since they consume from one queue."""
        if self.queue is None or self.queue != other.queue:
            return False
        # a queue that keeps messages is one for all channels; otherwise each channel has a queue of that name
        return self.channel == other.channel or Features.QUEUE_RETENTION in self._replies.adapter.features

    def _best(self, request: Message) -> Binding | None:
        """Return the preferred one of the handlers that a request means; ``None`` if it means none."""
        context = request._context
        named = context._reply_to_channel
        # if the broker has ended this subscription, there may be another one for the channel by now
        home = self._routes.route(self.key)
        rivals = self.rivals if home is None else home.rivals
        if not rivals:
            return None if home is None else home.preferred(named)
        channel = context._channel or ""
        reached = [other for other in rivals if other.matches(channel) and other.may_serve(self.queue)]
        # a queue may have requests on channels that none of its routes here names: then they are those of their route
        if home is not None and (not reached or home.matches(channel)):
            reached.append(home)
        found = [best for best in (route.preferred(named) for route in reached) if best is not None]
        return min(found, key=lambda best: best[0].preference(named), default=None)

    def preferred(self, named: str | None) -> Binding | None:
        """Return the preferred handler of this route for requests that name this reply channel, or none.

        A request that names a reply channel goes to a handler that answers, if there is one (RFC 5.7.4).
        """
        plain = None
        for binding in self.bindings:
            wanted = binding[0]
            asked = wanted.terms.reply_channel
            if asked is None or asked == named:
                if named is None or wanted.answers:
                    return binding
                plain = plain or binding
        return plain

    def may_serve(self, queue: str | None) -> bool:
        """Return whether handlers of this route may have requests of a rival, which consumes from ``queue``."""
        if self.is_stopping or not self._was_confirmed:
            return False
        # a queue of its own has the request as well, as long as there is a subscription to it
        return self.queue is None or self.queue == queue or self.subscription.handle is not None

    def dispatch(self, exchange: Exchange) -> None:
        """Give a request to the handler that is meant."""
        if exchange.has_begun:
            workers().submit(exchange.give_back)
            return
        is_closing = self.is_stopping and self._replies.connection.endings.is_closing
        best = None if is_closing else self._best(exchange.request)
        if best is not None:
            best[1].submit(exchange)
        elif self.is_stopping or self._routes.route(self.key) is None:
            self._leave(exchange)
        else:
            logger.debug("a request on %r means no handler", self.channel)
            exchange.done()

    def _leave(self, exchange: Exchange) -> None:
        """Let a request go that was not begun: back to the broker, if it delivers it to another one."""
        token: Any = exchange.request._context.token  # type: ignore[attr-defined]  # it was received
        if token is not None and self._replies.adapter.redelivers(self.subscription.spec):
            exchange.finish(Verdict.LEAVE)
        else:
            workers().submit(exchange.give_back)

    def finished(self, exchange: Exchange, verdict: Verdict) -> None:
        """See ``exchange.Origin``."""
        if self.rivals and self._is_at_limit:
            self.expected.was_full()
        self._exchanges.discard(exchange)
        if self._behind:
            self._busy_at = time.monotonic()
        if verdict is _ACCEPT:  # as in _settle(), without a call
            self.subscription.accept(exchange.request)
        else:
            self._settle(exchange.request, verdict)
        if exchange.claim is not None:
            # a request that goes back to a queue is handled there, and its copies are not
            exchange.claim.settle(Verdict.ACCEPT if verdict is Verdict.LEAVE else verdict)
        if self.is_stopping:
            if not self._exchanges:
                self._quiet.resolve(None)
        elif self._is_full:
            self._is_full = False
            self.wake()

    def settle(self, request: Message, verdict: Verdict) -> None:
        """Pass a verdict on a copy to the broker; see ``copies.Holder``."""
        if self._is_at_limit:
            self.expected.was_full()
        self._copies -= 1
        self._settle(request, verdict)

    @property
    def _is_at_limit(self) -> bool:
        """Whether the broker sends no more until a request, or a copy of one, is settled."""
        return len(self._exchanges) + self._copies >= self._limit

    def _settle(self, request: Message, verdict: Verdict) -> None:
        if verdict is Verdict.ACCEPT:
            self.subscription.accept(request)
        elif verdict is Verdict.REFUSE:
            self.subscription.refuse(request)

    def is_void(self, request: Message) -> bool:
        """See ``exchange.Origin``. From any thread."""
        return self.subscription.is_void(request)

    # --- the end

    def stop(self) -> Promise[None]:
        """Take no more, and let the handlers finish; see ``Consumer``. From any thread."""
        self.is_stopping = True
        self._replies.connection.engine.call(self._stop)
        return self._quiet

    def _stop(self) -> None:
        runners = {runner for route in (self, *self.rivals) for _, runner in route.bindings}
        for exchange in [each for runner in runners for each in runner.withdraw(lambda each: each.origin is self)]:
            self.dispatch(exchange)
        for exchange in self._exchanges.copy():
            if exchange.wants_many:
                exchange.stop("the handler was stopped")
        if not self._exchanges:
            self._quiet.resolve(None)


def _overlap(first: str, second: str) -> bool:
    # most channels have no wildcards, and there may be many of them
    if channels.has_wildcard(first) or channels.has_wildcard(second):
        return channels.overlap(first, second)
    return first == second
