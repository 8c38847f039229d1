"""Joint subscriptions: several channels, one order of arrival, one consumer. For the modules of this project.

::

    joint = instance.subscription.open_joint(take)
    joint.add("topics/a/b").result()
    joint.add("topics/c/#").result()
    ...
    joint.settle(batch)  # what `take` was given, once it is processed

**Order.** Messages arrive in the order in which one publisher published them, whatever their channels: see
``messaging.adapter.Adapter.join``.

**Threads.** ``take``, ``on_lost``, ``on_restored`` and ``on_failed`` are called on the engine loop; they must neither
block nor raise. Every method may be called from any thread, also from these callbacks. Nothing here is called under a
lock.

**Guarantee.** With acknowledgement each message arrives at least once: one that was not settled when the connection
was lost arrives again if the broker keeps it, and one that several channels match may arrive twice if one of them is
removed while it is on its way. Without (QoS 0) it arrives at most once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from messaging.errors import ClosedError, ConnectionLostError, MessagingError
from messaging.errors.text import SafeLog, tolerant
from messaging.execution import Promise, of_library
from messaging.model import AcknowledgeType, state_lock
from messaging.receiving.changes import Changes, JointChange
from messaging.receiving.joint_intake import Joined, JointCallbacks, JointIntake, Pauses

if TYPE_CHECKING:
    from messaging.adapter import Adapter
    from messaging.connection import Connection
    from messaging.errors import MessagingError
    from messaging.model import Incoming, SubscriptionSpec
    from messaging.receiving.joint_intake import Take

logger = SafeLog(__name__)


class JoinedChannels(Joined):
    """A joint subscription at the broker. On the engine loop, unless a docstring states otherwise.

    Args:
        connection: of the instance.
        spec: the options of all channels; its channel means nothing.
        callbacks: of the consumer.

    Attributes:
        closed: resolves when the subscription has ended.
        acknowledged: tokens of acknowledged messages that are not flushed; appended by any thread.
    """

    is_lasting = False

    def __init__(self, connection: Connection, spec: SubscriptionSpec, callbacks: JointCallbacks) -> None:
        super().__init__(connection, spec)
        self.ready.was_retrieved = True
        self.closed: Promise[None] = Promise("closing a joint subscription")
        self._callbacks = callbacks
        self.acknowledged: deque[Any] = deque()
        self._intake = JointIntake(self, callbacks, self._failed)
        self._pauses = Pauses(self)
        self._changes = Changes(self, self._intake, self._has_handle)
        #: the connection was lost, and ``on_restored`` has not been called since
        self._is_lost = False
        #: the handle that knows of the abandoned channels
        self._informed: Any = None

    def change(self, change: JointChange) -> None:
        """Join or part a channel, after the changes before."""
        if self.ended or self.leaving:
            change.refuse(self.closed_error())
        else:
            self._changes.put(change)

    def abandon(self, is_abandoned: Callable[[str], bool]) -> None:
        """Part such channels, which only an earlier process has joined, once a message arrives on them."""
        self.is_abandoned = is_abandoned
        if self._informed is not None:
            self.connection.adapter.abandon(self._informed, is_abandoned)
        self._intake.changed()

    def leave(self, channel: str) -> None:
        """See ``Joined``."""
        if self._changes.adds(channel):  # it was parted, and is joined again
            return
        logger.info(
            "%s: %r was subscribed to by an earlier process; unsubscribing", self.connection.adapter.name, channel
        )
        self.change(JointChange(channel, None, Promise(f"leaving {channel!r}")))

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
                self._callbacks.tell(self._callbacks.on_restored)
            return self.handle

    async def unsubscribe_at(self, adapter: Adapter, handle: Any) -> None:
        """Part from all channels."""
        await of_library(adapter.unsubscribe(handle))

    def deliver(self, batch: Sequence[Incoming]) -> None:
        """See :class:`JointIntake`, which is the sink of the adapter."""
        self._intake.deliver(batch)

    def _failed(self, channel: str, error: MessagingError) -> None:
        if channel in self.specs and not self.ended:
            self._changes.forget(channel)
            self._callbacks.tell(self._callbacks.on_failed, channel, error)

    # --- acknowledgement and flow

    def flush(self) -> None:
        """Acknowledge the settled messages at the broker."""
        acknowledged = self.acknowledged
        tokens = [acknowledged.popleft() for _ in range(len(acknowledged))]
        if tokens:
            self.connection.adapter.acknowledge(tokens)

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
                self.connection.adapter.abandon(self.handle, self.is_abandoned)
        self._pauses.renew()

    # --- from the connection

    def on_connection_lost(self) -> None:
        """Stop applying changes until the next connection."""
        self._changes.is_joined = False
        self._is_lost = True
        self._intake.disconnected()
        if not self.leaving:
            self._callbacks.tell(self._callbacks.on_lost)

    def reconnected(self, resumed: bool) -> None:
        """Prepare for a new connection."""
        self._changes.is_joined = False
        if resumed and self.handle is not None:
            self._changes.joined()
            self._is_lost = False
            if not self.leaving:
                self._callbacks.tell(self._callbacks.on_restored)
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


class JointSubscription(JointCallbacks):
    """A changing set of channels with one consumer; see the module. Made by ``MessageSubscription.open_joint``.

    Args:
        connection: of the instance.
        spec: the options of all channels; its channel means nothing.
        check: returns the spec of a channel, or raises an ``ArgumentError``.
        take: called with the messages of one turn of the loop, in arrival order.
    """

    def __init__(
        self, connection: Connection, spec: SubscriptionSpec, check: Callable[[str], SubscriptionSpec], take: Take
    ) -> None:
        super().__init__(connection.adapter.name, take)
        self._connection = connection
        self._check = check
        self._joined = JoinedChannels(connection, spec, self)

    @property
    def is_open(self) -> bool:
        """Return whether neither the subscription nor its instance was closed."""
        return not (self._joined.leaving or self._joined.ended)

    @property
    def channels(self) -> tuple[str, ...]:
        """Return the channels that are subscribed to, or about to be, in the order in which they were added."""
        return tuple(self._joined.specs.copy())

    def start(self) -> None:
        """Begin; by the service, once."""
        self._connection.engine.call(self._connection.subscriptions.start, self._joined)

    def add(self, channel: str) -> Promise[None]:
        """Subscribe to a channel or pattern; idempotent.

        Returns:
            Resolves when the broker has confirmed, with the next connection if there is none now. Fails with
            ``SubscriptionRefusedError``, which removes this channel only, or with ``ClosedError``.

        Raises:
            InvalidChannelError: a malformed pattern, or one that the adapter cannot subscribe to.
            UnsupportedFeatureError: a pattern with wildcards, and the instance has none.
        """
        return self._change(channel, self._check(channel))

    def remove(self, channel: str) -> Promise[None]:
        """Unsubscribe from a channel that was added; idempotent.

        Returns:
            Resolves when the broker has confirmed: no message of this channel is taken from then on, unless another
            pattern matches. Fails with ``ClosedError``.
        """
        return self._change(channel, None)

    def abandon(self, is_abandoned: Callable[[str], bool]) -> None:
        """Give up channels that only an earlier process has subscribed to; to be called once, after the first ``add``.

        A session or queue keeps such channels when its process dies. Their messages are acknowledged and dropped, and
        each channel is unsubscribed from with its first message.

        Args:
            is_abandoned: returns whether a channel that no channel of this subscription matches is given up; called
                on the engine loop.
        """
        self._connection.engine.call(self._joined.abandon, is_abandoned)

    def _change(self, channel: str, spec: SubscriptionSpec | None) -> Promise[None]:
        doing = "leaving" if spec is None else "joining"
        change = JointChange(channel, spec, Promise(f"{doing} {channel!r}"))
        if self.is_open:
            self._connection.engine.call(self._joined.change, change)
        else:  # also in a forked child, which has no engine of this instance
            change.refuse(self._joined.closed_error())
        return change.promise

    def settle(self, incomings: Iterable[Incoming]) -> None:
        """Acknowledge messages. Those without acknowledgement, settled before, or of a lost connection are ignored."""
        received, acknowledged = AcknowledgeType.RECEIVED, AcknowledgeType.ACKNOWLEDGED
        tokens = []
        with state_lock:
            for incoming in incomings:
                if incoming.state is received:
                    incoming.state = acknowledged
                    tokens.append(incoming.token)
        if tokens:
            self._joined.acknowledged.extend(tokens)
            self._connection.verdicts.request_flush(self._joined)

    def pause(self) -> None:
        """Ask for no more messages, some of which may still arrive; idempotent.

        With acknowledgement unsettled messages are bounded by ``prefetch`` anyway. At QoS 0 nothing is read from the
        broker: other subscriptions of the instance wait as well, so this should not last for long.
        """
        self._connection.engine.call(self._joined.pause, True)

    def resume(self) -> None:
        """Undo :meth:`pause`."""
        self._connection.engine.call(self._joined.pause, False)

    def close(self) -> Promise[None]:
        """Unsubscribe from all channels; unsettled messages are released. Idempotent.

        Returns:
            Resolves when the broker has confirmed, or after ``close_timeout``. Promises of ``add`` and ``remove``
            that are pending fail with ``ClosedError``.
        """
        joined = self._joined
        joined.stop()
        if not joined.closed.done():
            self._connection.engine.call(self._connection.subscriptions.end, joined)
        return joined.closed

    @tolerant
    def __repr__(self) -> str:
        state = "open" if self.is_open else "closed"
        return f"<JointSubscription of {self._connection.adapter.name!r}: {len(self._joined.specs)} channels, {state}>"
