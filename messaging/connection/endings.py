"""Ending of subscriptions: the consumer is stopped, messages are released, the adapter unsubscribes."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Collection
from typing import Any

from messaging.adapter import Adapter, KeepsSession
from messaging.connection.state import ConnectionStates, Epoch
from messaging.connection.subscribed import Subscribed
from messaging.errors import ConnectionLostError, MessagingError
from messaging.errors.text import SafeLog
from messaging.execution import Engine, clock

logger = SafeLog(__name__)


class Endings:
    """Ends subscriptions, each once. On the engine loop.

    Args:
        engine: runs the tasks.
        adapter: ends the subscriptions at the broker.
        epoch, states: of the connection.
        active: the subscriptions that have not ended.

    Attributes:
        is_closing: the whole instance is being closed, so that a session keeps its subscriptions.
        tasks: of subscriptions that are not unsubscribed at the broker yet.
    """

    def __init__(
        self, engine: Engine, adapter: Adapter, epoch: Epoch, states: ConnectionStates, active: Collection[Subscribed]
    ) -> None:
        self._engine = engine
        self._adapter = adapter
        self._settings = adapter.settings
        self._epoch = epoch
        self._states = states
        self._active = active
        self.is_closing = False
        self.tasks: dict[Subscribed, asyncio.Task[Any]] = {}
        self._warned_of_end = False

    def end(self, subscription: Subscribed) -> asyncio.Task[Any]:
        """Release the messages of a subscription and unsubscribe it; return the task, which may run already."""
        ending = self.tasks.get(subscription)
        if ending is None:
            ending = self.tasks[subscription] = self._engine.spawn(self._end(subscription))
            ending.add_done_callback(lambda _: self.tasks.pop(subscription, None))
        return ending

    async def _end(self, subscription: Subscribed) -> None:
        failed = subscription.ended
        if not failed:
            await self.stop_consumer(subscription)
        if not self._states.is_closed:  # else the adapter is closed too
            await self._await_heir(subscription)
            subscription.flush()
            await subscription.release(self._settings.close_timeout)
        handle, subscription.handle = subscription.handle, None
        if handle is not None:
            await self.leave(subscription, handle, failed=failed)
        subscription.complete()
        subscription.heir = None  # which may have one as well, and so on

    async def leave(self, subscription: Subscribed, handle: Any, *, failed: bool = False) -> None:
        """End ``handle`` at the broker, unless its subscription is kept: by its stream, or by a session.

        Args:
            subscription: which has ended, perhaps before the broker answered.
            handle: of it.
            failed: it has ended with an error.
        """
        adapter = self._adapter
        kept = adapter.capabilities.keeps_session and subscription.is_lasting
        if kept and subscription.is_kept and not self.is_closing and isinstance(adapter, KeepsSession):
            adapter.detach(handle)
        elif failed or not (kept and self.is_closing):
            self._warn_of_end(subscription, kept=kept)
            bequeather = subscription.bequeather(adapter)
            if bequeather is not None and subscription.heir is not None:
                bequeather.bequeath(handle, subscription.heir.handle)
            await self.unsubscribe(subscription, handle)

    def _warn_of_end(self, subscription: Subscribed, *, kept: bool) -> None:
        """Warn once that a session without streams keeps no messages."""
        if not kept or self._warned_of_end or not subscription.is_stream or subscription.heir is not None:
            return
        if any(each.is_stream for each in self._active):
            return
        self._warned_of_end = True
        logger.warning(
            "%s: the subscription to %r has ended with its stream, so the broker keeps no messages for this session; "
            "subscribe with keep_subscription=True to leave it there, or close the instance rather than the stream",
            self._adapter.url.label(self._adapter.name), subscription.spec.channel,
        )  # fmt: skip

    async def _await_heir(self, subscription: Subscribed) -> None:
        """Wait until the subscription that replaces this one is confirmed, before messages are released."""
        heir = subscription.heir
        if heir is None or subscription.handle is None or not self._epoch.is_usable:
            return
        with contextlib.suppress(TimeoutError, MessagingError):
            async with clock.timeout(self._settings.close_timeout):
                await heir.ready

    async def stop_consumer(self, subscription: Subscribed) -> None:
        """Stop the consumer after the message in progress, for at most the close timeout."""
        stopped = subscription.stop()
        if stopped is not None and not stopped.done():
            with contextlib.suppress(TimeoutError):
                await clock.wait_for(stopped, self._settings.close_timeout)

    async def unsubscribe(self, subscription: Subscribed, handle: Any) -> None:
        """End ``handle`` of ``subscription`` at the broker; failures are logged."""
        try:
            async with clock.timeout(self._settings.close_timeout):
                await subscription.unsubscribe_at(self._adapter, handle)
        except (ConnectionLostError, TimeoutError) as error:
            reason = str(error) or "no answer in time"
            label = self._adapter.url.label(self._adapter.name)
            logger.info("%s: unsubscribing failed: %s; continuing", label, reason)
        except Exception:
            logger.exception("%s: the adapter failed to unsubscribe", self._adapter.url.label(self._adapter.name))
