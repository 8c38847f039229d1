"""Makes tests that race fail every time: the broker confirms subscriptions late, and delivers late.

::

    pytest -p tests.lateness --late-subscriptions 0.3 --late-deliveries 0.1

The order of deliveries stays. Tests with a virtual clock are not affected, nor are other processes. A test that fails
with this publishes before its subscription is confirmed, looks at a subscriber when only the publisher has its
confirmation, or has a deadline too short for a busy machine. Many times:
``make test-stress STRESS_ARGS=--pytest=-ptests.lateness``.
"""

from __future__ import annotations

import asyncio
import functools
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import pytest

from messaging.connection.subscribed import Subscribed
from messaging.connection.subscriptions import ConnectionSubscriptions
from messaging.execution import clock
from messaging.receiving import Subscription
from messaging.receiving.joined_channels import JointIntake
from messaging.replyto.reply_stream import ReplySubscription
from messaging.replyto.requests import ReplyInbox

#: seconds, without the options
SUBSCRIPTIONS, DELIVERIES = 0.3, 0.1
#: what the adapters deliver to
_SINKS: Final = (Subscription, JointIntake, ReplyInbox)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add an option for each delay."""
    group = parser.getgroup("lateness")
    group.addoption("--late-subscriptions", type=float, default=SUBSCRIPTIONS, metavar="SECONDS")
    group.addoption("--late-deliveries", type=float, default=DELIVERIES, metavar="SECONDS")


@pytest.fixture(scope="session", autouse=True)
def _lateness(request: pytest.FixtureRequest) -> Iterator[None]:
    option = request.config.getoption
    with pytest.MonkeyPatch.context() as patch:
        delay(patch, option("--late-subscriptions"), option("--late-deliveries"))
        yield


def delay(patch: pytest.MonkeyPatch, subscriptions: float, deliveries: float) -> None:
    """Delay what the adapters of this process confirm and deliver, by so many seconds."""
    if subscriptions:
        _delay_subscriptions(patch, subscriptions)
    if deliveries:
        for kind in _SINKS:
            patch.setattr(kind, "deliver", _late_deliver(kind.deliver, deliveries))


def _delay_subscriptions(patch: pytest.MonkeyPatch, seconds: float) -> None:
    original = ConnectionSubscriptions._subscribe_once_or_again

    async def subscribe(self: ConnectionSubscriptions, subscription: Subscribed) -> None:
        number = -1
        while _is_real() and number != self._epoch.number:  # the broker of a new connection is as late
            number = self._epoch.number
            # the second of two is later, so that one which is confirmed says nothing of the other
            await asyncio.sleep(seconds * len(self._opening))  # sleeps: this is the delay
        await original(self, subscription)

    patch.setattr(ConnectionSubscriptions, "_subscribe_once_or_again", subscribe)


def _late_deliver(original: Callable[..., None], seconds: float) -> Callable[..., None]:
    waiting: dict[Any, deque[Sequence[Any]]] = {}

    @functools.wraps(original)
    def deliver(self: Any, batch: Sequence[Any]) -> None:
        if not _is_real() or isinstance(self, ReplySubscription):  # the inbox delivers to this one
            original(self, batch)
            return
        waiting.setdefault(self, deque()).append(batch)
        asyncio.get_running_loop().call_later(seconds, hand_over, self)

    def hand_over(self: Any) -> None:
        batches = waiting[self]
        batch = batches.popleft()  # the oldest, whichever timer this is
        if not batches:
            del waiting[self]
        original(self, batch)

    return deliver


def _is_real() -> bool:
    return clock.monotonic is time.monotonic
