"""The loop's side of a joint subscription: its channels at the broker, and what the connection tells it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from messaging.adapter import SubscribesJointly
from messaging.errors import ClosedError, ConnectionLostError, MessagingError
from messaging.execution import Promise, of_library
from messaging.receiving.changes import Change, Changes
from messaging.receiving.intake import Intake, Joined, Pauses, Take
from messaging.receiving.separately import Separately
from messaging.text import SafeLog

if TYPE_CHECKING:
    from messaging.adapter import Adapter
    from messaging.connection import Connection
    from messaging.model import Incoming, SubscriptionSpec
    from messaging.receiving.intake import Way


logger = SafeLog(__name__)


class JoinedChannels(Joined):
    """A joint subscription at the broker. On the engine loop, unless a docstring states otherwise.

    Args:
        connection: of the instance.
        spec: the options of all channels; its channel means nothing.
        take: see :class:`~messaging.receiving.joint.JointSubscription`.

    Attributes:
        keeps_order: whether the adapter keeps the order of a publisher across channels.
        closed: resolves when the subscription has ended.
        on_lost, on_restored, on_failed: see ``JointSubscription``.
        acknowledged: tokens of acknowledged messages that are not flushed; appended by any thread.
    """

    is_lasting = False

    def __init__(self, connection: Connection, spec: SubscriptionSpec, take: Take) -> None:
        super().__init__(connection, spec)
        self.ready.was_retrieved = True
        self.closed: Promise[None] = Promise("closing a joint subscription")
        self.on_lost: Callable[[], object] = _nothing
        self.on_restored: Callable[[], object] = _nothing
        self.on_failed: Callable[[str, MessagingError], object] = _nothing
        self.acknowledged: deque[Any] = deque()
        self.keeps_order = isinstance(connection.adapter, SubscribesJointly)
        self.way = self._choose_way(connection.adapter)
        self._intake = Intake(self, take, self._all_failed)
        self._pauses = Pauses(self)
        self._changes = Changes(self, self._intake, self._has_handle)
        #: the connection was lost, and ``on_restored`` has not been called since
        self._is_lost = False
        #: the handle that knows of the abandoned channels
        self._informed: Any = None

    def _choose_way(self, adapter: Adapter) -> Way:
        return adapter if isinstance(adapter, SubscribesJointly) else Separately(adapter, self._failed)

    def change(self, change: Change) -> None:
        """Join or part a channel, after the changes before."""
        if self.ended or self.leaving:
            change.refuse(self.closed_error())
        else:
            self._changes.put(change)

    def abandon(self, is_abandoned: Callable[[str], bool]) -> None:
        """Part such channels, which only an earlier process has joined, once a message arrives on them."""
        self.is_abandoned = is_abandoned
        if self._informed is not None:
            self.way.abandon(self._informed, is_abandoned)
        self._intake.changed()

    def leave(self, channel: str) -> None:
        """See ``Joined``."""
        if self._changes.adds(channel):  # it was parted, and is joined again
            return
        logger.info(
            "%s: %r was subscribed to by an earlier process; unsubscribing", self.connection.adapter.name, channel
        )
        self.change(Change(channel, None, Promise(f"leaving {channel!r}")))

    # --- at the broker

    async def subscribe_at(self, adapter: Adapter) -> Any:
        """Join all channels on a new connection, then apply the changes that wait, then call ``on_restored``."""
        del adapter
        changes = self._changes
        async with changes.lock:
            self.handle = None
            try:
                refused = await changes.join([*self.specs.values()])
                for channel, error in refused.items():
                    self._failed(channel, error)
                await changes.apply()
            except ConnectionLostError:
                handle, self.handle = self.handle, None
                if handle is not None:  # a session must not deliver to it
                    await self.connection.endings.unsubscribe(self, handle)
                raise
            changes.joined()
            is_restored, self._is_lost = self._is_lost, False
            if is_restored and not self.leaving:
                self.call(self.on_restored)
            return self.handle

    async def unsubscribe_at(self, adapter: Adapter, handle: Any) -> None:
        """Part from all channels."""
        del adapter
        await of_library(self.way.unsubscribe(handle))

    def deliver(self, batch: Sequence[Incoming]) -> None:
        """See :class:`Intake`, which is the sink of the adapter."""
        self._intake.deliver(batch)

    def _all_failed(self, error: MessagingError) -> None:
        """Report that the broker ended the subscriptions to all channels; the handle is void."""
        self.handle = None
        for channel in [*self.specs]:
            self._failed(channel, error)

    def _failed(self, channel: str, error: MessagingError) -> None:
        if channel in self.specs and not self.ended:
            self._changes.forget(channel)
            self.call(self.on_failed, channel, error)

    # --- acknowledgement and flow

    def flush(self) -> None:
        """Acknowledge the settled messages at the broker."""
        acknowledged = self.acknowledged
        tokens = [acknowledged.popleft() for _ in range(len(acknowledged))]
        if tokens:
            self.way.acknowledge(tokens)

    def pause(self, wanted: bool) -> None:
        """Ask for no more messages, or for messages again."""
        self._pauses.is_wanted = wanted and not self.ended
        self._pauses.apply()

    def _has_handle(self) -> None:
        """Tell a new handle of the abandoned channels, and of a pause."""
        if self.handle is not None and self.handle is not self._informed:  # it may have been closed meanwhile
            self._informed = self.handle
            self._intake.connected()
            if self.is_abandoned is not None:
                self.way.abandon(self.handle, self.is_abandoned)
        self._pauses.renew()

    # --- from the connection

    def on_connection_lost(self) -> None:
        """Stop applying changes until the next connection."""
        self._changes.is_joined = False
        self._is_lost = True
        self._intake.disconnected()
        if not self.leaving:
            self.call(self.on_lost)

    def reconnected(self, resumed: bool) -> None:
        """Prepare for a new connection."""
        self._changes.is_joined = False
        if resumed and self.handle is not None:
            self._changes.joined()
            self._is_lost = False
            if not self.leaving:
                self.call(self.on_restored)
        self._pauses.renew()

    def stop(self) -> Promise[None] | None:
        """Apply no more changes; the promise resolves when those in progress are done. Thread safe."""
        self.leaving = True
        return self._changes.working

    def fail(self, error: MessagingError) -> None:
        """End: the connection failed, or was closed, before the broker was asked."""
        self.connection.subscriptions.discard(self)
        self._end(error)
        if self.handle is not None:
            self.connection.endings.end(self)

    def complete(self) -> None:
        """End: closed by the consumer, or with the instance."""
        self._end(self.closed_error())

    def closed_error(self) -> ClosedError:
        """Return the error of changes that come too late. From any thread."""
        return ClosedError(f"the joint subscription of {self.connection.adapter.name!r} is closed")

    def _end(self, error: MessagingError) -> None:
        self.ended = self.leaving = True
        self.ready.reject(error)
        self.pause(wanted=False)
        self._changes.refuse(error)
        self.specs.clear()
        self.closed.resolve(None)


def _nothing(*_: object) -> None:
    """Do nothing: the default of a callback."""
