"""Copies of one request on overlapping subscriptions: one is handled, the others share its verdict.

A broker sends a request once to each subscription that matches it. Where the channels of two request handlers overlap
(``d/+`` and ``d/x``, or one channel with two sets of extensions), one request therefore arrives several times. The copy
that arrives first is given to a handler; each of the other subscriptions is told to expect a copy.

Copies are recognized by their content: channel, reply channel, correlation id and payload. They are counted, so equal
requests that were sent twice are handled twice. A copy that does not arrive (a ``queue`` gave it to another program,
say) is expected for a minute, not counting the time in which its subscription was full, or until 4,096 others are
expected on the same subscription. A copy that may not exist is expected for a second.

Everything here runs on the engine's loop.
"""

from __future__ import annotations

import time
from collections import deque
from math import inf
from typing import TYPE_CHECKING, Final, Generic, Protocol, TypeVar

from messaging.receiving import Verdict

if TYPE_CHECKING:
    from messaging.model import Message

T = TypeVar("T")

#: copies that are expected on one subscription
_EXPECTED: Final = 4096
#: how long a copy is expected, seconds
_PATIENCE: Final = 60.0
#: how long a copy is expected that may not exist, seconds
_UNCERTAIN: Final = 1.0


class Holder(Protocol):
    """A subscription that a copy arrived on."""

    def settle(self, request: Message, verdict: Verdict) -> None:
        """Pass a verdict on a copy to the broker."""
        ...


class Claim:
    """A request that was given to a handler, and the copies of it that arrived since.

    Args:
        origin: the subscription that the request arrived on.
    """

    __slots__ = ("_copies", "origin", "verdict")

    def __init__(self, origin: Holder | None = None) -> None:
        self.origin = origin
        #: verdict on the request; ``None`` while it is handled
        self.verdict: Verdict | None = None
        self._copies: list[tuple[Holder, Message]] = []

    def add(self, holder: Holder, copy: Message) -> None:
        """Have a copy share the verdict on the request."""
        if self.verdict is None:
            self._copies.append((holder, copy))
        else:
            holder.settle(copy, self.verdict)

    def settle(self, verdict: Verdict) -> None:
        """Pass the verdict on the request to its copies."""
        self.verdict = verdict
        copies, self._copies = self._copies, []
        for holder, copy in copies:
            holder.settle(copy, verdict)


class _Queues(Generic[T]):
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
        """Take out the oldest item; ``None`` if there is none."""
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

    __slots__ = ("_claims", "_early", "_full_at")

    def __init__(self) -> None:
        #: since when and for how many seconds each copy is expected, and the request that it is a copy of
        self._claims: _Queues[tuple[float, float, Claim]] = _Queues()
        #: when copies arrived that were settled before their request was given to a handler
        self._early: _Queues[float] = _Queues()
        #: when the subscription was full last, monotonic seconds
        self._full_at = -inf

    def expect(self, identity: int, claim: Claim, *, is_uncertain: bool = False) -> None:
        """Expect one more copy of the request behind ``claim``, unless it has arrived already.

        Args:
            identity: see :func:`identity_of`.
            claim: the request.
            is_uncertain: there may be no copy.
        """
        now = time.monotonic()
        while (arrived := self._early.pop(identity)) is not None:
            if arrived + _PATIENCE > now:
                return
        self._claims.add(identity, (now, _UNCERTAIN if is_uncertain else _PATIENCE, claim))

    def take(self, identity: int) -> Claim | None:
        """Return the request that an arriving one is a copy of, and expect the copy no longer; ``None`` if it is none.

        A request that is to be handled again is not returned: the copy may be handled in its place.
        """
        while (expected := self._claims.pop(identity)) is not None:
            since, patience, claim = expected
            if max(since, self._full_at) + patience > time.monotonic() and claim.verdict is not Verdict.REFUSE:
                return claim
        return None

    def arrived_early(self, identity: int) -> None:
        """Note a copy that was settled before its request is given to a handler: it is not expected then."""
        self._early.add(identity, time.monotonic())

    def was_full(self) -> None:
        """Note that the subscription was full until now: copies may have waited at the broker."""
        self._full_at = time.monotonic()

    def doubt(self, origin: Holder) -> None:
        """Learn that ``origin`` ends: copies of its requests that have not arrived by now may never arrive."""
        for waiting in self._claims.by_identity.values():
            for index, (since, patience, claim) in enumerate(waiting):
                if claim.origin is origin:
                    waiting[index] = since, min(patience, _UNCERTAIN), claim


def identity_of(request: Message) -> int:
    """Return a hash of the content that all copies of a request share: 64 bits that others cannot predict."""
    context = request._context
    return hash((context._channel, context._reply_to_channel, context._correlation_id, request._payload))
