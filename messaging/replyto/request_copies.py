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

from collections import deque
from collections.abc import Callable
from math import inf
from typing import TYPE_CHECKING, Final, Generic, TypeVar

from messaging.execution import clock
from messaging.receiving import HandlingVerdict

if TYPE_CHECKING:
    from messaging.model import Message

T = TypeVar("T")

#: copies that are expected on one subscription
_EXPECTED: Final = 4096
#: how long a copy is expected, seconds
_PATIENCE: Final = 60.0
#: how long a copy that may not exist is expected, seconds
_UNCERTAIN: Final = 1.0


class SharedVerdict:
    """The verdict on a request, which its copies share.

    Args:
        origin: the subscription that the request arrived on.
    """

    __slots__ = ("_copies", "origin", "verdict")

    def __init__(self, origin: object = None) -> None:
        self.origin = origin
        #: ``None`` while the request is being handled
        self.verdict: HandlingVerdict | None = None
        self._copies: list[Callable[[HandlingVerdict], object]] = []

    def add(self, settle: Callable[[HandlingVerdict], object]) -> None:
        """Have ``settle`` called with the verdict on the request, now or once there is one: it settles a copy."""
        if self.verdict is None:
            self._copies.append(settle)
        else:
            settle(self.verdict)

    def settle(self, verdict: HandlingVerdict) -> None:
        """Settle the copies with the verdict on the request."""
        self.verdict = verdict
        copies, self._copies = self._copies, []
        for settle in copies:
            settle(verdict)


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
        #: since when and for how many seconds each copy is expected, and the verdict that it shares
        self._expected: _ByIdentity[tuple[float, float, SharedVerdict]] = _ByIdentity()
        #: arrival times of copies that were settled before their request was given to a handler
        self._early: _ByIdentity[float] = _ByIdentity()
        #: when the subscription was full last, monotonic seconds
        self._full_at = -inf

    def expect(self, identity: int, shared: SharedVerdict, *, is_uncertain: bool = False) -> None:
        """Expect one more copy of a request, unless it has arrived already.

        Args:
            identity: see :func:`identity_of`.
            shared: the verdict on the request.
            is_uncertain: there may be no copy.
        """
        now = clock.monotonic()
        while (arrived := self._early.pop(identity)) is not None:
            if arrived + _PATIENCE > now:
                return
        self._expected.add(identity, (now, _UNCERTAIN if is_uncertain else _PATIENCE, shared))

    def take(self, identity: int) -> SharedVerdict | None:
        """Return the verdict that an arriving copy shares, and expect it no longer; ``None`` if it is no copy.

        The verdict on a request that is to be handled again is not returned: the copy may be handled in its place.
        """
        while (expected := self._expected.pop(identity)) is not None:
            since, patience, shared = expected
            if (
                max(since, self._full_at) + patience > clock.monotonic()
                and shared.verdict is not HandlingVerdict.REFUSE
            ):
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
            for index, (since, patience, shared) in enumerate(waiting):
                if shared.origin is origin:
                    waiting[index] = since, min(patience, _UNCERTAIN), shared


def identity_of(request: Message) -> int:
    """Return a hash of the content that all copies of a request share: 64 bits that a client cannot predict."""
    context = request.context
    return hash((context.channel, context.reply_to_channel, context.correlation_id, request.payload))
