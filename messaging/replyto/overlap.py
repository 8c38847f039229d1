"""Request routes whose subscriptions overlap: which one handles a request, and which ones have copies of it.

Everything runs on the engine's loop.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final, Protocol

from messaging.model import Features, channels
from messaging.replyto.request_copies import ExpectedCopies, SharedVerdict, identity_of

if TYPE_CHECKING:
    from messaging.adapter import Adapter
    from messaging.model import Message
    from messaging.receiving import Runner, Verdict
    from messaging.replyto.served_request import ServedRequest
    from messaging.replyto.terms import RegisteredHandler

    #: a request handler, and its runner
    Binding = tuple[RegisteredHandler, Runner]

#: idle time of a subscription after which no earlier message waits for it at the broker, seconds
_CAUGHT_UP: Final = 1.0


class OverlappingRoute(Protocol):
    """A request route, as the others see it."""

    channel: str
    queue: str | None
    overlap: Overlap
    bindings: list[Binding]

    @property
    def is_full(self) -> bool:
        """Whether requests wait at the broker, or in the buffer, until a handler has finished."""

    @property
    def is_idle(self) -> bool:
        """Whether no handler has a request of the route."""

    def may_serve(self, queue: str | None) -> bool:
        """Return whether handlers of the route may take requests of another one, which consumes from ``queue``."""

    def preferred(self, named: str | None) -> Binding | None:
        """Return the preferred handler for requests that name this reply channel, or none."""

    def settle(self, request: Message, verdict: Verdict) -> None:
        """Pass a verdict on a copy to the broker."""


class Overlap:
    """The overlap of one route with the others: its rivals.

    Args:
        route: the route.
        adapter: of its instance.
    """

    def __init__(self, route: OverlappingRoute, adapter: Adapter) -> None:
        self._route = route
        self._adapter = adapter
        #: patterns of the channels that the subscription receives
        self.patterns: tuple[str, ...] = (route.channel,)
        #: other routes that a request of this one may reach as well, or whose requests may arrive here
        self.rivals: list[OverlappingRoute] = []
        #: copies of requests that handlers took from other routes
        self.expected = ExpectedCopies()
        #: number of unsettled copies
        self.copies = 0
        #: rivals that were subscribed to while requests waited here: they have no copies of these
        self._behind: set[OverlappingRoute] = set()
        #: when a rival was added to these, or a request was taken or finished since; monotonic seconds
        self._busy_at = 0.0

    # --- rivals

    def is_rival(self, other: OverlappingRoute) -> bool:
        """Return whether a request may reach both routes, or either of them."""
        queue = self._route.queue
        if queue is not None and queue == other.queue:
            return True
        return any(_overlap(mine, theirs) for mine in self.patterns for theirs in other.overlap.patterns)

    def forget(self, rival: OverlappingRoute) -> None:
        """Forget a rival that ends."""
        self.rivals.remove(rival)
        self._behind.discard(rival)
        self.expected.doubt(rival)

    def confirmed(self) -> None:
        """Tell the rivals that the broker has confirmed the subscription."""
        for other in self.rivals:
            if other.is_full:
                other.overlap.mark_behind(self._route)

    def mark_behind(self, rival: OverlappingRoute) -> None:
        """Note that ``rival`` has no copies of the requests that wait here."""
        self._behind.add(rival)
        self._busy_at = time.monotonic()

    def matches(self, channel: str) -> bool:
        """Return whether the subscription receives a channel."""
        return any(channels.matches(pattern, channel) for pattern in self.patterns)

    # --- requests

    def take_copy(self, message: Message) -> bool:
        """Settle ``message`` with the request that it is a copy of; return ``False`` if it is no copy."""
        shared = self.expected.take(identity_of(message))
        if shared is None:
            return False
        self.copies += 1
        shared.add(self._route, message)
        return True

    def is_left_to_queue(self, queue: str | None) -> bool:
        """Return whether another program may have a request: the preferred handler consumes from ``queue``.

        Requests may also have been waiting here since before there was a subscription to ``queue``.
        """
        return queue not in (None, self._route.queue) and not self._is_behind(queue)

    def _is_behind(self, queue: str | None) -> bool:
        if not self._behind:
            return False
        now = time.monotonic()
        if now - self._busy_at > _CAUGHT_UP and self._route.is_idle:
            self._behind.clear()
        self._busy_at = now
        return any(other.queue == queue for other in self._behind)

    def expect_copies(self, served: ServedRequest) -> None:
        """Have the rivals that a request reaches expect a copy of it."""
        request = served.request
        channel, shared = request._context._channel or "", SharedVerdict(self._route)
        for other in self.rivals:
            if other.overlap.matches(channel) and not self._shares_copies(other):
                served.shared_verdict = shared
                # a rival that was subscribed to since may have no copy of a request that waited here
                other.overlap.expected.expect(identity_of(request), shared, is_uncertain=other in self._behind)

    def _shares_copies(self, other: OverlappingRoute) -> bool:
        """Return whether a request arrives at one of both routes only, since they consume from one queue."""
        route = self._route
        if route.queue is None or route.queue != other.queue:
            return False
        # a queue that keeps messages is one for all channels; otherwise each channel has a queue of that name
        return route.channel == other.channel or Features.QUEUE_RETENTION in self._adapter.features

    def preferred(self, request: Message, home: OverlappingRoute | None) -> Binding | None:
        """Return the preferred one of the handlers that a request means; ``None`` if it means none.

        Args:
            request: the request.
            home: the route that takes the requests of this channel now: another one than this route, if the broker has
                ended its subscription since.
        """
        context = request._context
        named = context._reply_to_channel
        rivals = self.rivals if home is None else home.overlap.rivals
        if not rivals:
            return None if home is None else home.preferred(named)
        channel = context._channel or ""
        queue = self._route.queue
        reached = [other for other in rivals if other.overlap.matches(channel) and other.may_serve(queue)]
        # a queue may have requests on channels that none of its routes here names: they belong to the route they reach
        if home is not None and (not reached or home.overlap.matches(channel)):
            reached.append(home)
        found = [best for best in (route.preferred(named) for route in reached) if best is not None]
        return min(found, key=lambda best: best[0].preference(named), default=None)

    def finished(self) -> None:
        """Note that a handler has finished a request of the route."""
        if self._behind:
            self._busy_at = time.monotonic()


def _overlap(first: str, second: str) -> bool:
    # most channels have no wildcards, and there may be many of them
    if channels.has_wildcard(first) or channels.has_wildcard(second):
        return channels.overlap(first, second)
    return first == second
