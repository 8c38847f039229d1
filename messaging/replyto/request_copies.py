"""Copies of one request on overlapping subscriptions: one is handled, the others share its verdict.

A broker sends a request once to each subscription that matches it. Where the channels of two request handlers overlap
(``d/+`` and ``d/x``, or one channel with two sets of extensions), one request therefore arrives several times. The copy
that arrives first is given to a handler; each of the other subscriptions is told to expect a copy. They share the
promise of the verdict on the request.

Copies are recognized by their content: channel, reply channel, correlation id and payload. They are counted, so equal
requests that were sent twice are handled twice. A copy that does not arrive (a ``queue`` gave it to another program,
say) is expected for a minute, not counting the time in which its subscription was full, or until 4,096 others are
expected on the same subscription. A copy that may not exist is expected for a second.

Everything here runs on the engine's loop.
"""

from __future__ import annotations

from collections import deque
from math import inf
from typing import Final, Generic, TypeVar

from messaging.execution import Promise, clock
from messaging.model import Message
from messaging.receiving import HandlingVerdict

T = TypeVar("T")

#: copies that are expected on one subscription
_EXPECTED: Final = 4096
#: how long a copy is expected, seconds
_PATIENCE: Final = 60.0
#: how long a copy that may not exist is expected, seconds
_UNCERTAIN: Final = 1.0


class _ByIdentity(Generic[T]):
    """Items by identity, first in, first out; of too many the oldest are dropped."""

    __slots__ = ("by_identity", "count")

    def __init__(self) -> None:
        self.by_identity: dict[int, deque[T]] = {}
        self.count = 0

    def add(self, identity: int, item: T) -> None:
        if self.count >= _EXPECTED:
            self.pop(next(iter(self.by_identity)))
        self.by_identity.setdefault(identity, deque()).append(item)
        self.count += 1

    def pop(self, identity: int) -> T | None:
        """Remove and return the oldest item; ``None`` if there is none."""
        items = self.by_identity.get(identity)
        if items is None:
            return None
        self.count -= 1
        item = items.popleft()
        if not items:
            del self.by_identity[identity]
        return item


class ExpectedCopies:
    """The copies that are expected on one subscription."""

    __slots__ = ("_early", "_expected", "_full_at")

    def __init__(self) -> None:
        #: since when and for how many seconds each copy is expected, the verdict that it shares, and its origin
        self._expected: _ByIdentity[tuple[float, float, Promise[HandlingVerdict], object]] = _ByIdentity()
        #: arrival times of copies that were settled before their request was given to a handler
        self._early: _ByIdentity[float] = _ByIdentity()
        #: when the subscription was full last, monotonic seconds
        self._full_at = -inf

    def expect(
        self, identity: int, shared: Promise[HandlingVerdict], origin: object = None, *, is_uncertain: bool = False
    ) -> None:
        """Expect one more copy of a request, unless it has arrived already.

        Args:
            identity: see :func:`identity_of`.
            shared: the verdict on the request.
            origin: the subscription that the request arrived on.
            is_uncertain: there may be no copy.
        """
        now = clock.monotonic()
        while (arrived := self._early.pop(identity)) is not None:
            if arrived + _PATIENCE > now:
                return
        self._expected.add(identity, (now, _UNCERTAIN if is_uncertain else _PATIENCE, shared, origin))

    def take(self, identity: int) -> Promise[HandlingVerdict] | None:
        """Return the verdict that an arriving copy shares, and expect it no longer; ``None`` if it is no copy.

        The verdict on a request that is to be handled again is not returned: the copy may be handled in its place.
        """
        while (expected := self._expected.pop(identity)) is not None:
            since, patience, shared, _ = expected
            is_over = max(since, self._full_at) + patience <= clock.monotonic()
            if not is_over and shared.peek()[0] is not HandlingVerdict.REFUSE:
                return shared
        return None

    def arrived_early(self, identity: int) -> None:
        """Note a copy that was settled before its request is given to a handler: it is not expected then."""
        self._early.add(identity, clock.monotonic())

    def was_full(self) -> None:
        """Note that the subscription was full until now: copies may have waited at the broker."""
        self._full_at = clock.monotonic()

    def doubt(self, origin: object) -> None:
        """Expect the copies of requests from ``origin`` only for a second more: ``origin`` ends, they may not come."""
        for waiting in self._expected.by_identity.values():
            for index, (since, patience, shared, arrived_on) in enumerate(waiting):
                if arrived_on is origin:
                    waiting[index] = since, min(patience, _UNCERTAIN), shared, origin


def identity_of(request: Message) -> int:
    """Return a hash of the content that all copies of a request share: 64 bits that a client cannot predict."""
    context = request.context
    return hash((context.channel, context.reply_to_channel, context.correlation_id, request.payload))
