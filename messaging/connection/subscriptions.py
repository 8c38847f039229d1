"""The subscriptions of one connection: subscribing, resubscribing, ending.

Everything runs on the engine loop unless a docstring states otherwise.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

from messaging.adapter import Adapter
from messaging.connection.endings import Endings
from messaging.connection.state import ConnectionStates, Epoch
from messaging.connection.subscribed import ReadControl, Source, Subscribed
from messaging.errors import ClosedError, ConnectionLostError, MessagingError, SubscriptionRefusedError
from messaging.errors.text import SafeLog
from messaging.execution import Engine, clock, shielded

logger = SafeLog(__name__)

#: subscriptions opened at the same time after a reconnect
_RESUBSCRIBE_AT_ONCE: Final = 32
#: sources whose delivery counts wait for the next subscription; the oldest are dropped first
_LEFT_COUNTS: Final = 256


class ConnectionSubscriptions:
    """The subscriptions of one connection. Iterating yields the active ones.

    Args:
        engine: runs the tasks.
        adapter: subscribes and unsubscribes.
        epoch: of the connection.
        states: of the connection.
        reading: pauses subscriptions.
        cause: returns the error that ended the connection, if there is one.

    Attributes:
        endings: the subscriptions that are being ended.
    """

    def __init__(
        self,
        engine: Engine,
        adapter: Adapter,
        epoch: Epoch,
        states: ConnectionStates,
        reading: ReadControl,
        cause: Callable[[], MessagingError | None],
    ) -> None:
        self._engine = engine
        self._adapter = adapter
        self._settings = adapter.settings
        self._epoch = epoch
        self._states = states
        self._reading = reading
        self._cause = cause
        self._active: dict[Subscribed, None] = {}  # in the order of their beginning
        self._opening: dict[Subscribed, asyncio.Task[Any] | None] = {}
        #: delivery counts of messages that ended subscriptions have rejected, by source
        self._left_counts: dict[Source, dict[object, int]] = {}
        #: number of the session: connections that resume it keep the handles
        self._session = 0
        self.endings = Endings(engine, adapter, epoch, states, self._active)

    def __iter__(self) -> Iterator[Subscribed]:
        return iter(self.snapshot())

    def __len__(self) -> int:
        return len(self._active)

    def snapshot(self) -> tuple[Subscribed, ...]:
        """Return the active subscriptions. From any thread."""
        return (*self._active,)

    def discard(self, subscription: Subscribed) -> None:
        """Forget a subscription that has failed."""
        self._active.pop(subscription, None)

    # --- connecting

    def reconnected(self, resumed: bool) -> None:
        """Prepare for a new connection, before its state is seen: no subscription is connected yet.

        Args:
            resumed: the broker kept the session, and the subscriptions with it.
        """
        if not resumed:
            self._session += 1
        for subscription in self._active:
            subscription.reconnected(resumed)
            if not resumed:
                subscription.handle = None

    async def restore(self) -> set[asyncio.Task[Any]]:
        """Subscribe again after a reconnect, for at most the connect timeout.

        Returns:
            The tasks of subscriptions that are not confirmed yet.
        """
        gate = asyncio.Semaphore(_RESUBSCRIBE_AT_ONCE)

        async def open_one(subscription: Subscribed) -> None:
            async with gate:
                await self._subscribe(subscription)

        opening = [self._engine.spawn(open_one(each)) for each in self._active if each.handle is None]
        if not opening:
            return set()
        _, pending = await clock.wait(opening, timeout=self._settings.connect_timeout)
        return pending

    def connection_lost(self) -> None:
        """Tell the active subscriptions that the connection is lost."""
        for subscription in self._active:
            subscription.on_connection_lost()

    async def end_all(self, timeout: float) -> None:
        """End every subscription, for at most ``timeout`` seconds."""
        ending = [self._engine.spawn(self.remove(each)) for each in dict.fromkeys([*self._active, *self.endings.tasks])]
        if ending:
            await clock.wait(ending, timeout=max(0.0, timeout))

    def complete_all(self) -> None:
        """Complete the subscriptions that are left, and cancel those being opened."""
        for subscription in [*self._active]:
            subscription.complete()
        self._active.clear()
        for task in self._opening.values():
            if task is not None:
                task.cancel()

    def fail_all(self, error: MessagingError) -> None:
        """Fail every subscription with ``error``."""
        for subscription in [*self._active]:
            subscription.fail(error)

    def abandon(self) -> None:
        """End every subscription in a forked child, without touching the parent's connection."""
        for subscription in self._active:
            subscription.ended = True
        self._active.clear()

    def start(self, subscription: Subscribed) -> None:
        """Subscribe in a task of its own."""
        self._engine.spawn(self.add(subscription))

    async def add(self, subscription: Subscribed) -> None:
        """Subscribe now or, while there is no connection, after the next one."""
        if self._states.is_closed or self.endings.is_closing:
            subscription.fail(
                (None if self.endings.is_closing else self._cause()) or ClosedError(f"{self._adapter.name!r} is closed")
            )
            return
        self._active[subscription] = None
        subscription.take_over(self._left_counts.pop(subscription.source, {}))
        if self._epoch.is_usable:
            await self._subscribe(subscription)

    async def _subscribe(self, subscription: Subscribed) -> None:
        if subscription in self._opening or subscription not in self._active:
            return
        self._opening[subscription] = asyncio.current_task()
        try:
            await self._await_former(subscription)
            await self._subscribe_once_or_again(subscription)
        except MessagingError as error:
            self._active.pop(subscription, None)
            subscription.fail(error)
        except Exception as error:
            logger.exception("%s: the adapter failed to subscribe", self._adapter.url.label(self._adapter.name))
            self._active.pop(subscription, None)
            failure = SubscriptionRefusedError(f"subscribing to {subscription.spec.channel!r} failed")
            failure.__cause__ = error
            subscription.fail(failure)
        finally:
            del self._opening[subscription]

    async def _await_former(self, subscription: Subscribed) -> None:
        """Wait until closed subscriptions to the same queue get nothing more, for at most the close timeout.

        What the broker gives them meanwhile returns to the queue behind messages that this one got. Ended streams may
        finish a message first, and are not waited for.
        """
        queue = subscription.spec.options.queue
        if queue is None:
            return
        former = [
            task
            for each, task in (*self._opening.items(), *self.endings.tasks.items())
            if task is not None
            and each not in self._active
            and each.spec.options.queue == queue
            and (each in self._opening or not each.is_stream)
            and each.heir is None
        ]
        if former:
            await clock.wait(former, timeout=self._settings.close_timeout)

    async def _subscribe_once_or_again(self, subscription: Subscribed) -> None:
        """Subscribe, and repeat it if the connection changed before the broker answered.

        A session that was resumed after the answer keeps the subscription: to end it would lose messages.
        """
        while subscription in self._active:
            number, session = self._epoch.number, self._session
            try:
                handle = await subscription.subscribe_at(self._adapter)
            except ConnectionLostError:
                if number == self._epoch.number:
                    return  # the next connection subscribes
                continue
            if subscription in self._active and session == self._session:
                subscription.handle = handle
                if subscription.paused:
                    self._reading.pause(handle)
                subscription.ready.resolve(None)
                return
            if handle is None:
                continue  # of a joint subscription: closing it has ended the handle already
            if subscription in self._active:
                await self.endings.unsubscribe(subscription, handle)
            else:
                await self.endings.leave(subscription, handle)

    def end(self, subscription: Subscribed) -> None:
        """Start :meth:`remove` in a task of its own."""
        self._engine.spawn(self.remove(subscription))

    async def remove(self, subscription: Subscribed) -> None:
        """Let the consumer finish the message in progress, unsubscribe, and complete.

        Concurrent callers wait for the same end. When the instance closes, a broker that keeps its session keeps
        its subscriptions.
        """
        self._active.pop(subscription, None)
        subscription.leaving = True
        if subscription.ended:  # it failed, and its consumer is still to be stopped
            await self.endings.stop_consumer(subscription)
        await shielded(self.endings.end(subscription))

    def hand_on(self, subscription: Subscribed, counts: Mapping[object, int]) -> None:
        """Pass delivery counts to the other subscriptions to the same source, or else to the next one."""
        source = subscription.source
        heirs = [each for each in self._active if each is not subscription and each.source == source]
        for heir in heirs:
            heir.take_over(counts)
        if not heirs and counts:
            self._left_counts.setdefault(source, {}).update(counts)
            if len(self._left_counts) > _LEFT_COUNTS:
                self._left_counts.pop(next(iter(self._left_counts)))
