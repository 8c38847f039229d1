"""A request channel and its subscription: takes requests, and gives each one to a handler (RFC 5.7.3).

**Rivals.** A request may reach several subscriptions: those of other request channels are the *rivals* of a channel. Of
the handlers of all of them the preferred one has the request; the copies on the others share its verdict, see
:mod:`messaging.replyto.request_copies`.

Everything runs on the engine's loop, unless it says otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final

from messaging.errors import MessagingError
from messaging.errors.text import SafeLog
from messaging.execution import Promise, clock, workers
from messaging.model import Features, Message, channels, context_of
from messaging.receiving import HandlerConsumer, HandlingVerdict, Runner, Subscription
from messaging.replyto import markers
from messaging.replyto.markers import read as read_marker
from messaging.replyto.replies import Replies
from messaging.replyto.request_copies import ExpectedCopies, identity_of
from messaging.replyto.served_request import ServedRequest, ServedStreamRequest
from messaging.replyto.serving import RegisteredHandler

if TYPE_CHECKING:
    #: a request handler, and its runner
    Binding = tuple[RegisteredHandler, Runner]

logger = SafeLog(__name__)

_ACCEPT: Final = HandlingVerdict.ACCEPT
_MANY: Final = markers.MANY
#: idle time of a subscription after which no earlier message waits for it at the broker, seconds
_CAUGHT_UP: Final = 1.0
#: first delay before a subscription that failed is tried again, seconds
RETRY_FIRST: Final = 1.0


class RequestChannel(HandlerConsumer[ServedRequest]):
    """A channel with request handlers: the consumer of its subscription.

    Args:
        replies: sends replies.
        routes: by key, the routes of the whiteboard that take requests now.
        failed: called when the broker has ended the subscription of a route, or refused it.
        key: the channel, and a text that tells the extensions of its subscription from others.
        bindings: its handlers, the preferred first.
        subscription: to the channel; it is not started yet.
    """

    def __init__(
        self,
        replies: Replies,
        routes: Mapping[tuple[str, str], RequestChannel],
        failed: Callable[[RequestChannel, MessagingError], object],
        key: tuple[str, str],
        bindings: list[Binding],
        subscription: Subscription,
    ) -> None:
        super().__init__(replies.connection, key[0], bindings[0][0].queue)
        self.key = key
        self.bindings = bindings
        #: delay before the subscription is tried again if it fails, seconds
        self.retry_after = RETRY_FIRST
        #: patterns of the channels that the subscription receives
        self.patterns = replies.adapter.addressing.patterns(subscription.spec)
        #: other routes that a request of this one may reach as well, or whose requests may arrive here
        self.rivals: list[RequestChannel] = []
        #: copies of requests that handlers took from other routes
        self.expected = ExpectedCopies()
        #: number of unsettled copies
        self._copies = 0
        #: rivals that were subscribed to while requests waited here: they have no copies of these
        self._behind: set[RequestChannel] = set()
        #: when a rival was added to these, or a request was taken or finished since; monotonic seconds
        self._busy_at = 0.0
        self._routes = routes
        self._on_failed = failed
        self._replies = replies
        self._has_failed = False
        #: whether the broker has confirmed the subscription, once
        self._was_confirmed = False
        options = subscription.spec.options
        self.open(subscription, min(options.prefetch, options.buffer_size))  # as many as it may have in hand
        subscription.ready.listen(self._confirmed)

    def _confirmed(self) -> None:
        if not self.subscription.ended:
            self._was_confirmed = True
            self.retry_after = RETRY_FIRST
            for other in self.rivals:
                if other.is_full:
                    other.mark_behind(self)

    # --- requests

    def begin(self, message: Message) -> None:
        """Give a request to the handler that it means; see ``HandlerConsumer``."""
        if self.rivals and not self._is_served_here(message):
            return
        marker = read_marker(context_of(message))
        kind = ServedRequest if marker is None or marker.kind != _MANY else ServedStreamRequest
        served = kind(self._replies, message, self)
        self.in_hand[served] = None
        if self.rivals:
            self._expect_copies(served)
        self.dispatch(served)

    def ended(self) -> None:
        """See ``HandlerConsumer``."""
        error = self.subscription.error
        if error is not None and not self._has_failed and not self.is_stopping:
            self._has_failed = True
            self._on_failed(self, error)

    def _is_served_here(self, message: Message) -> bool:
        """Return whether a request is to be handled here; settle it if it is a copy, or left to another program."""
        shared = self.expected.take(identity_of(message))
        if shared is not None:
            self._copies += 1
            shared.listen(lambda: self._settle_copy(message, shared.peek()[0]))
            return False
        best = self._best(message, self._routes.get(self.key))
        if best is None or best[0].queue in (None, self.queue) or self._is_behind(best[0].queue):
            return True
        # the queue of the preferred handler has a copy as well: one of the programs that share it handles that
        self.expected.arrived_early(identity_of(message))
        self.subscription.settlement.accept(message)
        return False

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
        """Return whether handlers of this route may take requests of a rival, which consumes from ``queue``."""
        if self.is_stopping or not self._was_confirmed:
            return False
        # a queue of its own has the request as well, as long as there is a subscription to it
        return self.queue is None or self.queue == queue or self.subscription.handle is not None

    def dispatch(self, served: ServedRequest) -> None:
        """Give a request to the handler that it means."""
        if served.has_begun:
            workers().submit(served.requeue)
            return
        is_closing = self.is_stopping and self._replies.connection.endings.is_closing
        home = self._routes.get(self.key)
        best = None if is_closing else self._best(served.request, home)
        if best is not None:
            best[1].submit(served)
        elif self.is_stopping or home is None:
            self._leave(served)
        else:
            logger.debug("request on %r matches no handler; acknowledged and dropped", self.channel)
            served.done()

    def _leave(self, served: ServedRequest) -> None:
        """Release a request that was not begun: to the broker, if it redelivers it to another responder."""
        token: Any = context_of(served.request).token
        if token is not None and self._replies.adapter.redelivers(self.subscription.spec):
            served.finish(HandlingVerdict.LEAVE)
        else:
            workers().submit(served.requeue)

    def finished(self, served: ServedRequest, verdict: HandlingVerdict) -> None:
        """Settle a request that a handler has finished, and its copies; see ``HandlerConsumer``. On the loop."""
        if self.rivals:
            if self._is_at_limit:
                self.expected.was_full()
            if self._behind:
                self._busy_at = clock.monotonic()
        super().finished(served, verdict)
        if served.shared_verdict is not None:
            # a request that goes back to a queue is handled there, and its copies are not
            served.shared_verdict.resolve(_ACCEPT if verdict is HandlingVerdict.LEAVE else verdict)

    def _settle_copy(self, request: Message, verdict: HandlingVerdict) -> None:
        """Pass the verdict on a request to the broker for a copy of it."""
        if self._is_at_limit:
            self.expected.was_full()
        self._copies -= 1
        self.settle(request, verdict)

    # --- capacity

    @property
    def _is_at_limit(self) -> bool:
        """Return whether the broker sends no more until a request, or a copy of one, is settled."""
        return len(self.in_hand) + self._copies >= self._limit

    @property
    def is_full(self) -> bool:
        """Return whether requests wait at the broker, or in the buffer, until a handler has finished."""
        return self._is_full or self._is_at_limit or bool(self.subscription.buffered)

    def withdraw(self) -> None:
        """Give the requests that were not begun to other handlers, or release them; see ``HandlerConsumer``."""
        runners = dict.fromkeys(runner for route in (self, *self.rivals) for _, runner in route.bindings)
        for served in [each for runner in runners for each in runner.withdraw(lambda each: each.origin is self)]:
            self.dispatch(served)
        for served in [*self.in_hand]:
            if served.wants_many:
                served.stop("the handler was stopped")

    # --- rivals

    def is_rival(self, other: RequestChannel) -> bool:
        """Return whether a request may reach both routes, or either of them."""
        if self.queue is not None and self.queue == other.queue:
            return True
        return any(_overlap(mine, theirs) for mine in self.patterns for theirs in other.patterns)

    def forget(self, rival: RequestChannel) -> None:
        """Forget a rival that ends."""
        self.rivals.remove(rival)
        self._behind.discard(rival)
        self.expected.doubt(rival)

    def mark_behind(self, rival: RequestChannel) -> None:
        """Note that ``rival`` has no copies of the requests that wait here."""
        self._behind.add(rival)
        self._busy_at = clock.monotonic()

    def matches(self, channel: str) -> bool:
        """Return whether the subscription receives a channel."""
        return any(channels.matches(pattern, channel) for pattern in self.patterns)

    def _is_behind(self, queue: str | None) -> bool:
        """Return whether requests may have been waiting here since before there was a subscription to ``queue``."""
        if not self._behind:
            return False
        now = clock.monotonic()
        if now - self._busy_at > _CAUGHT_UP and not self.in_hand:
            self._behind.clear()
        self._busy_at = now
        return any(other.queue == queue for other in self._behind)

    def _expect_copies(self, served: ServedRequest) -> None:
        """Have the rivals that a request reaches expect a copy of it."""
        request = served.request
        channel = request.context.channel or ""
        shared: Promise[HandlingVerdict] = Promise("the verdict on a request")
        for other in self.rivals:
            if other.matches(channel) and not self._shares_copies(other):
                served.shared_verdict = shared
                # a rival that was subscribed to since may have no copy of a request that waited here
                other.expected.expect(identity_of(request), shared, self, is_uncertain=other in self._behind)

    def _shares_copies(self, other: RequestChannel) -> bool:
        """Return whether a request arrives at one of both routes only, since they consume from one queue."""
        if self.queue is None or self.queue != other.queue:
            return False
        # a queue that keeps messages is one for all channels; otherwise each channel has a queue of that name
        return self.channel == other.channel or Features.QUEUE_RETENTION in self._replies.adapter.capabilities.features

    def _best(self, request: Message, home: RequestChannel | None) -> Binding | None:
        """Return the preferred one of the handlers that a request means; ``None`` if it means none.

        Args:
            request: the request.
            home: the route that takes the requests of this channel now: another one than this route, if the broker has
                ended its subscription since.
        """
        context = request.context
        named = context.reply_to_channel
        rivals = self.rivals if home is None else home.rivals
        if not rivals:
            return None if home is None else home.preferred(named)
        channel = context.channel or ""
        reached = [other for other in rivals if other.matches(channel) and other.may_serve(self.queue)]
        # a queue may have requests on channels that none of its routes here names: they belong to the route they reach
        if home is not None and (not reached or home.matches(channel)):
            reached.append(home)
        found = [best for best in (route.preferred(named) for route in reached) if best is not None]
        return min(found, key=lambda best: best[0].preference(named), default=None)


def _overlap(first: str, second: str) -> bool:
    # most channels have no wildcards, and there may be many of them
    if channels.has_wildcard(first) or channels.has_wildcard(second):
        return channels.overlap(first, second)
    return first == second
