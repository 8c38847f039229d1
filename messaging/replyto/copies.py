"""Copies of one request on overlapping subscriptions: one is handled, the others share its verdict.

A broker sends a request once to each subscription that matches it. Where the channels of two request handlers overlap
(``d/+`` and ``d/x``, or one channel with two sets of extensions), one request therefore arrives several times. The copy
that arrives first is given to a handler; each of the other subscriptions is told to expect a copy.

Copies are recognized by what they carry: channel, reply channel, correlation id and payload. They are counted, so equal
requests that were sent twice are handled twice. A copy that never comes (a ``queue`` gave it to another program, say)
is forgotten after a minute, or when 4,096 others are expected on the same subscription.

Everything here runs on the engine's loop.
"""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING, Final, Protocol

if TYPE_CHECKING:
    from messaging.message import Message
    from messaging.replyto.exchange import Verdict

#: copies that are expected on one subscription
_EXPECTED: Final = 4096
#: how long a copy is expected, seconds
_PATIENCE: Final = 60.0


class Holder(Protocol):
    """A subscription that a copy arrived on."""

    def settle(self, request: Message, verdict: Verdict) -> None:
        """Pass a verdict on a copy to the broker."""
        ...


class Claim:
    """A request that was given to a handler, and the copies of it that arrived since."""

    __slots__ = ("_copies", "verdict")

    def __init__(self) -> None:
        #: what became of the request; ``None`` while it is handled
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


class ExpectedCopies:
    """The copies that are expected on one subscription."""

    __slots__ = ("_claims",)

    def __init__(self) -> None:
        #: by identity: until when each is expected, and the request that it is a copy of
        self._claims: dict[int, deque[tuple[float, Claim]]] = {}

    def expect(self, identity: int, claim: Claim) -> None:
        """Expect one more copy of the request behind ``claim``."""
        claims = self._claims
        if identity not in claims:
            if len(claims) >= _EXPECTED:
                del claims[next(iter(claims))]
            claims[identity] = deque()
        claims[identity].append((time.monotonic() + _PATIENCE, claim))

    def take(self, identity: int) -> Claim | None:
        """Return what an arriving request is a copy of, and expect it no longer; ``None`` if it is no copy."""
        waiting = self._claims.get(identity)
        if waiting is None:
            return None
        now = time.monotonic()
        found = None
        while waiting and found is None:
            until, claim = waiting.popleft()
            if until > now:
                found = claim
        if not waiting:
            del self._claims[identity]
        return found


def identity_of(request: Message) -> int:
    """Return what all copies of a request have in common, as a hash of 64 bits that others cannot predict."""
    context = request._context
    return hash((context._channel, context._reply_to_channel, context._correlation_id, request._payload))
