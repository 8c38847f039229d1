"""Joins channels by one subscription for each: the plain form, for adapters without ``SubscribesJointly``.

Each channel has the credit of a subscription of its own, and the order across channels is that in which the adapter
calls the sinks. An adapter delivers a copy for each pattern that matches: the copy of the channel that was joined
first is taken, and the others are acknowledged. While that channel is being parted, the next one takes its copies as
well. Nothing tells which copies belong together, so a message that is on its way meanwhile may be taken twice, or
missed if its two copies do not arrive at about the same time.

Everything runs on the engine loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

from messaging.adapter import FlowControl
from messaging.bounded import BoundedCache
from messaging.execution import of_library
from messaging.model import channels

if TYPE_CHECKING:
    from messaging.adapter import Adapter, Sink
    from messaging.errors import MessagingError
    from messaging.model import Incoming, SubscriptionSpec

#: channels whose member is cached
_CACHED: Final = 4096


class Member:
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
        self.members: dict[str, Member] = {}
        #: channel of a message -> the member that takes it
        self._takers: BoundedCache[str, Member | None] = BoundedCache(_CACHED)

    def add(self, channel: str, member: Member) -> None:
        """Add a member, or move it to the end."""
        self.members.pop(channel, None)
        self.members[channel] = member
        self._takers.clear()

    def confirm(self, channel: str, member: Member, handle: Any) -> None:
        """Move a member to the end of the confirmed ones."""
        member.handle = handle
        members = self.members
        if members.get(channel) is not member:
            return
        self.members = {known: each for known, each in members.items() if each.handle is not None and each != member}
        self.members[channel] = member
        self.members |= {known: each for known, each in members.items() if each.handle is None}
        self._takers.clear()

    def discard(self, channel: str, member: Member) -> bool:
        """Remove a member; return whether it was one."""
        if self.members.get(channel) is not member:
            return False
        del self.members[channel]
        self._takers.clear()
        return True

    def deliver(self, member: Member, batch: Sequence[Incoming]) -> None:
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

    def _taker(self, channel: str) -> Member | None:
        if channel not in self._takers:
            self._takers[channel] = next((each for each in self.members.values() if each.matches(channel)), None)
        return self._takers[channel]

    def _is_changing(self, channel: str, member: Member) -> bool:
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
        member = Member(group, spec, self._failed)
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

    def acknowledge(self, tokens: Sequence[tuple[Member, Any]]) -> None:
        """Acknowledge messages, by subscription."""
        found: dict[Member, list[Any]] = {}
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
