"""The sinks of a joint subscription: one that collects the messages of all channels, and the plain form of joining.

**Plain form.** For adapters without ``SubscribesJointly``, :class:`Separately` makes one subscription for each channel.
Each has credit of its own, and the order across channels is that in which the adapter calls the sinks. An adapter
delivers a copy for each pattern that matches: the copy of the channel that was joined first is taken, and the others
are acknowledged. While that channel is being parted, the next one takes its copies as well. Nothing tells which copies
belong together, so a message that is on its way meanwhile may be taken twice, or missed if its two copies do not arrive
at about the same time.

Everything runs on the engine loop.
"""

from __future__ import annotations

import abc
import asyncio
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final, Protocol

from messaging.adapter import FlowControl
from messaging.bounded import BoundedCache
from messaging.connection import Subscribed
from messaging.execution import clock, of_library
from messaging.model import AcknowledgeType, channels
from messaging.text import SafeLog

if TYPE_CHECKING:
    from messaging.adapter import Adapter, Sink
    from messaging.connection import Connection
    from messaging.errors import MessagingError
    from messaging.model import Incoming, SubscriptionSpec

logger = SafeLog(__name__)

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


class Way(Protocol):
    """Joins and parts channels at the broker: an adapter with ``SubscribesJointly``, or the plain form."""

    async def join(self, spec: SubscriptionSpec, sink: JointIntake, handle: Any | None) -> Any:
        """See ``SubscribesJointly``."""

    async def part(self, handle: Any, channel: str) -> None:
        """See ``SubscribesJointly``."""

    def abandon(self, handle: Any, is_abandoned: Callable[[str], bool]) -> None:
        """See ``SubscribesJointly``."""

    async def unsubscribe(self, handle: Any) -> None:
        """See ``Adapter``."""

    def acknowledge(self, tokens: Sequence[Any]) -> None:
        """See ``Adapter``."""


class Joined(Subscribed):
    """A joint subscription as its parts know it.

    Args:
        connection: of the instance.
        spec: the options of all channels; its channel means nothing.

    Attributes:
        specs: the channels that are joined or being joined, by pattern.
        is_abandoned: returns whether only an earlier process can have subscribed to a channel that is not joined.
        way: joins and parts channels.
    """

    way: Way

    def __init__(self, connection: Connection, spec: SubscriptionSpec) -> None:
        super().__init__(spec)
        self.connection = connection
        self.specs: dict[str, SubscriptionSpec] = {}
        self.is_abandoned: Callable[[str], bool] | None = None

    @abc.abstractmethod
    def leave(self, channel: str) -> None:
        """Part an abandoned channel, on which a message has arrived."""


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
        self, owner: Joined, callbacks: JointCallbacks, failed: Callable[[str, MessagingError], object]
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
                if self._unclaimed is None or is_abandoned or self._was_joined(incoming.channel):
                    unwanted.append(incoming.token)
                else:
                    self._unclaimed.append(incoming)
        if unwanted:
            self._owner.way.acknowledge(unwanted)

    def _was_joined(self, channel: str) -> bool:
        return any(channels.matches(pattern, channel) for pattern in self._parted)

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


class Pauses:
    """Keeps the broker from sending: by the subscription, and at QoS 0 by not reading at all.

    Args:
        owner: the subscription.

    Attributes:
        is_wanted: whether the consumer asks for no more messages.
    """

    def __init__(self, owner: Joined) -> None:
        self.is_wanted = False
        self._owner = owner
        self._control = owner.way if isinstance(owner.way, FlowControl) else None
        self._reading = owner.connection.reading
        #: the handle that is paused
        self._paused: Any = None
        self._timer: asyncio.TimerHandle | None = None

    def apply(self) -> None:
        """Pause or resume, as is wanted, on the current connection."""
        handle = self._owner.handle
        if self._control is not None and handle is not None:
            if self.is_wanted:
                self._paused = handle
                self._control.pause(handle)
            elif self._paused is handle:
                self._control.resume(handle)
        if not self.is_wanted:
            self._paused = None
        if self._owner.spec.options.qos == "0":
            self._suspend()

    def renew(self) -> None:
        """Pause a new handle, if that is wanted."""
        if self.is_wanted:
            self.apply()

    def _suspend(self) -> None:
        self._resume()
        if self.is_wanted:
            self._reading.suspend(self._owner)
            self._timer = clock.call_later(self._owner.connection.engine.loop, _SUSPENDED, self._let_through)

    def _resume(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._reading.resume(self._owner)

    def _let_through(self) -> None:
        self._resume()
        self._timer = clock.call_later(self._owner.connection.engine.loop, _SLIT, self._suspend)


class JointMember:
    """The subscription to one channel: its sink at the adapter.

    Args:
        group: the joint subscription.
        spec: the channel.
        failed: called with channel and error when the broker ended the subscription.
    """

    def __init__(self, group: Group, spec: SubscriptionSpec, failed: Callable[[str, MessagingError], object]) -> None:
        self.handle: Any = None
        #: whether the channel is being parted
        self.is_parting = False
        self.matches = channels.matcher(spec.channel)
        self._group = group
        self._channel = spec.channel
        self._failed = failed

    def deliver(self, batch: Sequence[Incoming]) -> None:
        """See ``Sink``: pass on the messages that no other member takes."""
        self._group.deliver(self, batch)

    def fail(self, error: MessagingError) -> None:
        """See ``Sink``."""
        if self._group.discard(self._channel, self):
            self._failed(self._channel, error)


class Group:
    """A joint subscription in the plain form: the handle.

    Args:
        adapter: settles the copies that are not taken.
        sink: takes the messages of all members.

    Attributes:
        members: by channel; the ones that the broker has confirmed come first, in the order of the confirmations.
    """

    def __init__(self, adapter: Adapter, sink: Sink) -> None:
        self._adapter = adapter
        self._sink = sink
        self.members: dict[str, JointMember] = {}
        #: channel of a message -> the member that takes it
        self._takers: BoundedCache[str, JointMember | None] = BoundedCache(_CACHED)

    def add(self, channel: str, member: JointMember) -> None:
        """Add a member, or move it to the end."""
        self.members.pop(channel, None)
        self.members[channel] = member
        self._takers.clear()

    def confirm(self, channel: str, member: JointMember, handle: Any) -> None:
        """Move a member to the end of the confirmed ones."""
        member.handle = handle
        members = self.members
        if members.get(channel) is not member:
            return
        self.members = {known: each for known, each in members.items() if each.handle is not None and each != member}
        self.members[channel] = member
        self.members |= {known: each for known, each in members.items() if each.handle is None}
        self._takers.clear()

    def discard(self, channel: str, member: JointMember) -> bool:
        """Remove a member; return whether it was one."""
        if self.members.get(channel) is not member:
            return False
        del self.members[channel]
        self._takers.clear()
        return True

    def deliver(self, member: JointMember, batch: Sequence[Incoming]) -> None:
        """Pass on the messages that ``member`` takes, and acknowledge its copies of the others."""
        taken: list[Incoming] = []
        copies: list[Any] = []
        for incoming in batch:
            if self._taker(incoming.channel) in (member, None) or self._is_changing(incoming.channel, member):
                if incoming.token is not None:
                    incoming.token = member, incoming.token
                taken.append(incoming)
            elif incoming.token is not None:
                copies.append(incoming.token)
        if copies:
            self._adapter.acknowledge(copies)
        if taken:
            self._sink.deliver(taken)

    def _taker(self, channel: str) -> JointMember | None:
        if channel not in self._takers:
            self._takers[channel] = next((each for each in self.members.values() if each.matches(channel)), None)
        return self._takers[channel]

    def _is_changing(self, channel: str, member: JointMember) -> bool:
        """Return whether the taker of a channel is being parted, and ``member`` is next."""
        others = (each for each in self.members.values() if not each.is_parting and each.matches(channel))
        taker = self._taker(channel)
        return taker is not None and taker.is_parting and next(others, None) is member


class Separately:
    """Joins channels by subscriptions of their own; see the module.

    Args:
        adapter: subscribes.
        failed: called with channel and error when the broker ended the subscription to one channel.
    """

    def __init__(self, adapter: Adapter, failed: Callable[[str, MessagingError], object]) -> None:
        self._adapter = adapter
        self._control = adapter if isinstance(adapter, FlowControl) else None
        self._failed = failed

    async def join(self, spec: SubscriptionSpec, sink: Sink, handle: Group | None) -> Group:
        """Subscribe to a channel, in a new group without ``handle``."""
        group = handle or Group(self._adapter, sink)
        if spec.channel in group.members:
            return group
        member = JointMember(group, spec, self._failed)
        group.add(spec.channel, member)
        try:
            confirmed = await of_library(self._adapter.subscribe(spec, member))
        except BaseException:
            group.discard(spec.channel, member)
            raise
        group.confirm(spec.channel, member, confirmed)
        return group

    async def part(self, handle: Group, channel: str) -> None:
        """Unsubscribe from a channel."""
        member = handle.members.get(channel)
        if member is None or member.handle is None:
            return
        member.is_parting = True
        try:
            await of_library(self._adapter.unsubscribe(member.handle))
        finally:
            handle.discard(channel, member)

    def abandon(self, handle: Group, is_abandoned: Callable[[str], bool]) -> None:
        """Do nothing: the adapter delivers no messages of channels that are not subscribed to."""

    async def unsubscribe(self, handle: Group) -> None:
        """Unsubscribe from all channels."""
        await asyncio.gather(*(self.part(handle, channel) for channel in handle.members))

    def acknowledge(self, tokens: Sequence[tuple[JointMember, Any]]) -> None:
        """Acknowledge messages, by subscription."""
        found: dict[JointMember, list[Any]] = {}
        for member, token in tokens:
            found.setdefault(member, []).append(token)
        for each in found.values():
            self._adapter.acknowledge(each)

    def pause(self, handle: Group) -> None:
        """Ask for no more messages of the channels."""
        if self._control is not None:
            for member in handle.members.values():
                if member.handle is not None:
                    self._control.pause(member.handle)

    def resume(self, handle: Group) -> None:
        """Undo :meth:`pause`."""
        if self._control is not None:
            for member in handle.members.values():
                if member.handle is not None:
                    self._control.resume(member.handle)
