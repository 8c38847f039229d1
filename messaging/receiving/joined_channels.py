"""The channels of a joint subscription at the broker: what changes them, and what they receive.

Channels are added and removed in the order of the calls. A task applies these changes while there is a connection: runs
of equal changes at the same time, each run after the one before. A change that the loss of the connection interrupted
is applied again by the next one.

Everything runs on the engine loop, unless a docstring states otherwise.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

from messaging.adapter import Adapter
from messaging.codecs.cache import BoundedCache
from messaging.connection import Connection, Subscribed
from messaging.errors import ClosedError, ConnectionLostError, MessagingError, SubscriptionRefusedError
from messaging.errors.text import SafeLog
from messaging.execution import Promise, clock, of_library
from messaging.model import AcknowledgeType, Incoming, SubscriptionSpec, channels

logger = SafeLog(__name__)

#: channels that are joined or parted at the same time
_AT_ONCE: Final = 32
#: takes the messages of one turn of the loop
Take = Callable[[list["Incoming"]], object]

#: channels of messages for which it is cached whether they are joined, or which member takes them
_CACHED: Final = 4096
#: how long messages of a named queue wait for their channels to be joined, seconds
CLAIM_TIMEOUT: Final = 30.0
#: while reading is suspended it goes on for ``_SLIT`` every ``_SUSPENDED`` seconds: keepalive answers must get through
_SUSPENDED: Final = 1.0
_SLIT: Final = 0.01

_UNSUPPORTED: Final = AcknowledgeType.UNSUPPORTED
_RECEIVED: Final = AcknowledgeType.RECEIVED


class JointCallbacks:
    """The callbacks of the consumer of a joint subscription.

    They are called on the engine loop, and must neither block nor raise.

    Args:
        name: of the instance, for the log.
        take: see below.

    Attributes:
        take: takes the messages of one turn of the loop, in arrival order.
        on_lost: the connection was lost.
        on_restored: after a reconnect, all channels are subscribed again, or the broker has kept the session.
        on_failed: the broker ended the subscription to a channel, or refused it after a reconnect. The channel is
            removed; it may be added again.
    """

    def __init__(self, name: str, take: Take) -> None:
        self._name = name
        self.take = take
        self.on_lost: Callable[[], object] | None = None
        self.on_restored: Callable[[], object] | None = None
        self.on_failed: Callable[[str, MessagingError], object] | None = None

    def tell(self, callback: Callable[..., object] | None, *args: Any) -> None:
        """Call a callback, if it is set. One that raises is logged, and ends nothing."""
        try:
            if callback is not None:
                callback(*args)
        except Exception:
            logger.exception("%s: the consumer of a joint subscription failed", self._name)


class JoinedChannels(Subscribed):
    """A joint subscription at the broker. On the engine loop, unless a docstring states otherwise.

    Args:
        connection: of the instance.
        spec: the options of all channels; its channel means nothing.
        callbacks: of the consumer.

    Attributes:
        specs: the channels that are joined or being joined, by pattern.
        is_abandoned: returns whether only an earlier process can have subscribed to a channel that is not joined.
        closed: resolves when the subscription has ended.
        acknowledged: tokens of acknowledged messages that are not flushed; appended by any thread.
    """

    is_lasting = False

    def __init__(self, connection: Connection, spec: SubscriptionSpec, callbacks: JointCallbacks) -> None:
        super().__init__(spec)
        self.connection = connection
        self.specs: dict[str, SubscriptionSpec] = {}
        self.is_abandoned: Callable[[str], bool] | None = None
        self.ready.was_retrieved = True
        self.closed: Promise[None] = Promise("closing a joint subscription")
        self._callbacks = callbacks
        self.acknowledged: deque[Any] = deque()
        self._intake = JointIntake(self, callbacks, self._failed)
        #: the consumer asks for no more messages
        self._is_paused = False
        #: the handle that is paused
        self._paused_handle: Any = None
        self._pause_timer: asyncio.TimerHandle | None = None
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
        """Part an abandoned channel, on which a message has arrived."""
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
        self._is_paused = wanted and not self.ended
        self._apply_pause()

    def _apply_pause(self) -> None:
        """Pause or resume on the current connection: by the subscription, and at QoS 0 by not reading at all."""
        reading = self.connection.reading
        if self.handle is not None:
            if self._is_paused:
                self._paused_handle = self.handle
                reading.pause(self.handle)
            elif self._paused_handle is self.handle:
                reading.unpause(self.handle)
        if not self._is_paused:
            self._paused_handle = None
        if self.spec.options.qos == "0":
            self._suspend_reading()

    def _suspend_reading(self) -> None:
        self._resume_reading()
        if self._is_paused:
            self.connection.reading.suspend(self)
            self._pause_timer = clock.call_later(self.connection.engine.loop, _SUSPENDED, self._let_through)

    def _resume_reading(self) -> None:
        if self._pause_timer is not None:
            self._pause_timer.cancel()
            self._pause_timer = None
        self.connection.reading.resume(self)

    def _let_through(self) -> None:
        self._resume_reading()
        self._pause_timer = clock.call_later(self.connection.engine.loop, _SLIT, self._suspend_reading)

    def _has_handle(self) -> None:
        """Tell a new handle of the abandoned channels, and of a pause."""
        if self.handle is not None and self.handle is not self._informed:  # it may have been closed meanwhile
            self._informed = self.handle
            self._intake.connected()
            if self.is_abandoned is not None:
                self.connection.adapter.abandon(self.handle, self.is_abandoned)
        if self._is_paused:
            self._apply_pause()

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
        if self._is_paused:
            self._apply_pause()

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


class JointChange(NamedTuple):
    """A channel that is to be joined, or with ``spec`` ``None`` parted."""

    channel: str
    spec: SubscriptionSpec | None
    #: of the caller
    promise: Promise[None]

    def refuse(self, error: MessagingError) -> None:
        """Fail the change: the application has closed the subscription itself."""
        self.promise.was_retrieved = True
        self.promise.reject(error)


class Changes:
    """The changes that are not applied yet.

    Args:
        owner: the subscription.
        intake: the sink of the channels.
        has_handle: called when the owner has a new handle, or its handle has a further channel.

    Attributes:
        is_joined: whether the channels are joined on the current connection, so that changes can be applied.
        working: pending while changes are being applied.
        lock: held by the task that joins and parts channels.
    """

    def __init__(self, owner: JoinedChannels, intake: JointIntake, has_handle: Callable[[], object]) -> None:
        self.is_joined = False
        self.working: Promise[None] | None = None
        self.lock = asyncio.Lock()
        self._owner = owner
        self._intake = intake
        self._has_handle = has_handle
        self._name = owner.connection.adapter.name
        self._queue: deque[JointChange] = deque()
        #: the changes that are being applied
        self._applying: list[JointChange] = []
        #: number of connections so far
        self._connections = 0

    def put(self, change: JointChange) -> None:
        """Append a change."""
        self._queue.append(change)
        self.proceed()

    def adds(self, channel: str) -> bool:
        """Return whether a channel is about to be joined."""
        return any(each.channel == channel and each.spec is not None for each in (*self._applying, *self._queue))

    def joined(self) -> None:
        """Note that the channels are joined on a new connection."""
        self.is_joined = True
        self._connections += 1
        self.proceed()

    def proceed(self) -> None:
        """Apply the changes, if there is a connection and no task that applies them."""
        if self.is_joined and self._queue and self.working is None and not self._owner.leaving:
            self.working = Promise("changing a joint subscription")
            self._owner.connection.engine.spawn(self._work(self.working))

    async def _work(self, working: Promise[None]) -> None:
        try:
            while self.is_joined and self._queue and not self._owner.leaving:
                number = self._connections
                try:
                    async with self.lock:
                        await self.apply()
                except ConnectionLostError:
                    if number == self._connections:
                        self.is_joined = False  # the next connection proceeds
        finally:
            self.working = None
            working.resolve(None)

    def refuse(self, error: MessagingError) -> None:
        """Fail all changes, also the ones in progress."""
        for change in (*self._applying, *self._queue):
            change.refuse(error)
        self._queue.clear()

    async def apply(self) -> None:
        """Apply the changes; the caller holds the lock. A lost connection leaves them in the queue, and is raised."""
        while self._queue and not self._owner.leaving:
            run = self._applying = self._next_run()
            try:
                if run[0].spec is None:
                    await self._part(run)
                else:
                    await self._join(run)
            except ConnectionLostError:
                if not self._owner.ended:
                    self._queue.extendleft(reversed(run))
                raise
            finally:
                self._applying = []

    def _next_run(self) -> list[JointChange]:
        """Take changes of one kind off the queue, each of another channel."""
        run: list[JointChange] = []
        known: set[str] = set()
        queue = self._queue
        while queue and len(run) < _AT_ONCE:
            change = queue[0]
            if change.channel in known or (run and (change.spec is None) is not (run[0].spec is None)):
                break
            known.add(change.channel)
            run.append(queue.popleft())
        return run

    async def _join(self, run: Sequence[JointChange]) -> None:
        specs = self._owner.specs
        wanted = {each.channel: each.spec for each in run if each.spec is not None and each.channel not in specs}
        specs |= wanted
        self._intake.changed()
        try:
            refused = await self.join([*wanted.values()])
        except ConnectionLostError:
            for channel in wanted:
                self.forget(channel)
            raise
        for change in run:
            error = refused.get(change.channel)
            if error is None:
                change.promise.resolve(None)
            else:
                self.forget(change.channel)
                change.promise.reject(error)

    async def _part(self, run: Sequence[JointChange]) -> None:
        owner, handle = self._owner, self._owner.handle
        is_abandoned = owner.is_abandoned
        parting = [
            each.channel
            for each in run
            if each.channel in owner.specs or (is_abandoned is not None and is_abandoned(each.channel))
        ]
        if handle is not None:
            await _together([owner.connection.adapter.part(handle, channel) for channel in parting])
        for channel in parting:
            self.forget(channel)
        for change in run:
            change.promise.resolve(None)

    def forget(self, channel: str) -> None:
        """Take no more messages of a channel."""
        self._owner.specs.pop(channel, None)
        self._intake.parted(channel)

    async def join(self, specs: Sequence[SubscriptionSpec]) -> dict[str, MessagingError]:
        """Join channels; return the errors of the refused ones.

        Raises:
            ConnectionLostError: the connection was lost; some may be joined.
        """
        refused: dict[str, MessagingError] = {}
        rest = deque(specs)
        while rest and self._owner.handle is None:  # the first one makes the handle
            await self._join_one(rest.popleft(), refused)
        while rest:
            chunk = [rest.popleft() for _ in range(min(len(rest), _AT_ONCE))]
            await _together([self._join_one(spec, refused) for spec in chunk])
        return refused

    async def _join_one(self, spec: SubscriptionSpec, refused: dict[str, MessagingError]) -> None:
        owner = self._owner
        known = owner.handle
        try:
            handle = await of_library(owner.connection.adapter.join(spec, self._intake, known))
        except ConnectionLostError:
            raise
        except MessagingError as error:
            refused[spec.channel] = error
            return
        except Exception as error:
            logger.exception("%s: the adapter failed to join %r", self._name, spec.channel)
            failure = refused[spec.channel] = SubscriptionRefusedError(f"subscribing to {spec.channel!r} failed")
            failure.__cause__ = error
            return
        if owner.ended:  # closing did not wait for the broker
            await owner.connection.endings.unsubscribe(owner, handle)
            return
        if known is None:
            owner.handle = handle
        self._has_handle()


async def _together(calls: Sequence[Any]) -> None:
    """Await calls of the adapter at the same time, all to their ends, and raise the first error."""
    outcomes = await asyncio.gather(*map(of_library, calls), return_exceptions=True)
    for outcome in outcomes:
        if isinstance(outcome, BaseException):
            raise outcome


class JointIntake:
    """The sink of the adapter: collects the messages of one turn of the loop.

    Messages of channels that are not joined any more are acknowledged and dropped. Abandoned channels are parted then.

    A named queue has messages of an earlier process, whose channels may still be joined: for ``CLAIM_TIMEOUT`` seconds
    they are kept, at most ``prefetch`` of them.

    Args:
        owner: knows the channels.
        callbacks: of the consumer.
        failed: called with a channel and the error when the broker ended its subscription.
    """

    def __init__(
        self, owner: JoinedChannels, callbacks: JointCallbacks, failed: Callable[[str, MessagingError], object]
    ) -> None:
        self._owner = owner
        self._callbacks = callbacks
        self._failed = failed
        self._loop = owner.connection.engine.loop
        self._batch: list[Incoming] = []
        self._wanted: BoundedCache[str, bool] = BoundedCache(_CACHED)
        #: messages of channels that may still be joined; ``None`` when none are kept any more
        self._unclaimed: list[Incoming] | None = None if owner.spec.options.queue is None else []
        self._is_timed = False
        #: patterns of channels that were parted while messages are kept
        self._parted: list[str] = []
        #: abandoned channels that are being parted
        self._left: BoundedCache[str, None] = BoundedCache(_CACHED)

    def changed(self) -> None:
        """Note that the channels have changed, or that some are abandoned."""
        self._wanted.clear()
        if self._unclaimed:
            kept, self._unclaimed = self._unclaimed, []
            self.deliver(kept)

    def parted(self, channel: str) -> None:
        """Note that a channel is no longer joined."""
        if self._unclaimed is not None:
            self._parted.append(channel)
        self.changed()

    def connected(self) -> None:
        """Note that messages may arrive."""
        if self._unclaimed is not None and not self._is_timed:
            self._is_timed = True
            clock.call_later(self._loop, CLAIM_TIMEOUT, self._drop_unclaimed)

    def disconnected(self) -> None:
        """Forget the messages that are kept: the queue delivers them again."""
        if self._unclaimed:
            self._unclaimed = []

    def _drop_unclaimed(self) -> None:
        kept, self._unclaimed = self._unclaimed, None
        self._parted.clear()
        if kept and not self._owner.leaving:
            logger.warning(
                "%s: %d messages of queue %r match no channel and are dropped, the first on %r",
                self._owner.connection.adapter.name, len(kept), self._owner.spec.options.queue, kept[0].channel,
            )  # fmt: skip
            self.deliver(kept)

    def deliver(self, batch: Sequence[Incoming]) -> None:
        """See ``Sink``."""
        if self._owner.leaving:
            return  # released when it unsubscribes
        if not self._batch:
            self._loop.call_soon(self._hand_over)
        unwanted: list[Any] = []
        for incoming in batch:
            incoming.settler = None
            if self._is_wanted(incoming):
                incoming.state = _UNSUPPORTED if incoming.token is None else _RECEIVED
                self._batch.append(incoming)
            elif incoming.token is not None:
                is_abandoned = self._leave(incoming.channel)
                was_joined = any(channels.matches(pattern, incoming.channel) for pattern in self._parted)
                if self._unclaimed is None or is_abandoned or was_joined:
                    unwanted.append(incoming.token)
                else:
                    self._unclaimed.append(incoming)
        if unwanted:
            self._owner.connection.adapter.acknowledge(unwanted)

    def _leave(self, channel: str) -> bool:
        """Have a channel parted if it is abandoned; return whether it is."""
        owner = self._owner
        if owner.is_abandoned is None or not (channel in self._left or owner.is_abandoned(channel)):
            return False
        if channel not in self._left:
            self._left[channel] = None
            owner.leave(channel)
        return True

    def fail(self, error: MessagingError) -> None:
        """Report that the broker ended the subscriptions to all channels; the handle is void. See ``Sink``."""
        self._owner.handle = None
        for channel in [*self._owner.specs]:
            self._failed(channel, error)

    def _is_wanted(self, incoming: Incoming) -> bool:
        if incoming.channel_extension is not None:
            return False
        channel = incoming.channel
        wanted = self._wanted.get(channel)
        if wanted is None:
            specs = self._owner.specs
            wanted = channel in specs or any(channels.matches(pattern, channel) for pattern in specs)
            self._wanted[channel] = wanted
        return wanted

    def _hand_over(self) -> None:
        batch, self._batch = self._batch, []
        if batch and not self._owner.leaving:
            self._callbacks.tell(self._callbacks.take, batch)
