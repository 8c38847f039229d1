"""EventNode: one member of an event network, on a messaging instance.

An event service (a distributed event admin, a connected typed event bus) has a node for each network that it is
connected to. The node tells the other members what the service wants, sends them the events that they want, and hands
their events to the service.

**Threads.** Publishing runs on the calling thread. Announcements, heartbeats and changes of interests run one at a time
on a worker thread (``control``), events that arrive on another one (``intake``). The engine loop only queues. No lock
is held while the service is called.

**Order.** The instance publishes in the order of the calls of each thread. A joint subscription hands over what arrives
in one order, whatever the channel.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final
from uuid import UUID, uuid4, uuid5

from messaging.dispatch import TopicGrammar
from messaging.dispatch.eventnetwork.announcements import Announcement
from messaging.dispatch.eventnetwork.asking import Pings, Replays
from messaging.dispatch.eventnetwork.channels import ChannelNames, EventContexts
from messaging.dispatch.eventnetwork.intake import AnnouncementIntake, NetworkEventIntake
from messaging.dispatch.eventnetwork.membership import ANSWER_DELAY, MemberChanges, Membership
from messaging.dispatch.eventnetwork.other_members import MemberDTO
from messaging.dispatch.eventnetwork.own_announcements import Announcer, OwnInterests
from messaging.dispatch.eventnetwork.own_member import EVERYTHING, Control, EventNetwork, NodeService, OwnMember
from messaging.dispatch.eventnetwork.seals import Seals
from messaging.dispatch.eventnetwork.sending import EventSender
from messaging.environment.forks import LiveObjects
from messaging.errors import ClosedError, DeadlineError, MessagingError, UnsupportedFeatureError
from messaging.errors.checks import check_instance
from messaging.errors.text import SafeLog, printable, tolerant
from messaging.execution import Promise, clock, engine, may_block
from messaging.instance import Messaging
from messaging.model import Features, Incoming
from messaging.receiving import JointSubscription
from messaging.services.reporting import counter, gauge, part

logger = SafeLog(__name__)

#: time for the announcement of the end of a member that is closed, seconds
_LEAVE_WITHIN: Final = 1.0
#: the framework of this process, for sender information (DE080)
_FRAMEWORK: Final = uuid4()
#: namespace of the inboxes of members with a queue
_INBOXES: Final = UUID("5d0c7c0e-3c0b-4f0f-9a43-0f6f4f6b4c1e")
#: first and longest pause before subscriptions that the broker refused or ended are asked for again, seconds
_RETRY: Final = (1.0, 60.0)
#: longest wait for the confirmation of subscriptions, seconds
_CONFIRM_TIMEOUT: Final = 10.0


def framework_uuid() -> UUID:
    """Return the UUID of this process as a framework: the origin of its events."""
    return _FRAMEWORK


@dataclass(frozen=True, slots=True)
class NodeDTO:
    """A snapshot of one member, and of the others as it sees them."""

    member: str
    prefix: str
    is_connected: bool = field(metadata=gauge("whether this member is connected to the network", name="connected"))
    is_settled: bool = field(metadata=gauge("whether this member knows the others", name="settled"))
    members: tuple[MemberDTO, ...] = field(metadata=part("member"))
    sent: int = field(metadata=counter("events that were sent to other members", "events"))
    unwanted: int = field(metadata=counter("events that were not sent, because no member wanted them", "events"))
    received: int = field(metadata=counter("events that arrived from other members", "events"))
    refused: int = field(metadata=counter("messages that were refused", "messages"))
    replayed: int = field(
        default=0,
        metadata=counter("signed messages that arrived before: copies by the broker, and replays", "messages"),
    )


class EventNode:
    """A member of an event network. Thread safe.

    Args:
        service: the event service.
        instance: the messaging instance of the network's broker.
        settings: of the network.
        title: of the event service, for the log.
        name: of the member, for people.
        grammar: of the topics.
        qos: the qualities of service that are announced.
        shares_history: whether the service answers a ``replay``.

    Raises:
        UnsupportedFeatureError: the instance lacks wildcards or publish-subscribe.
        InvalidChannelError, ArgumentError, InvalidTopicError: a setting is invalid.
        ClosedError: the instance is closed.
    """

    def __init__(
        self,
        service: NodeService,
        instance: Messaging,
        settings: EventNetwork,
        *,
        title: str,
        name: str,
        grammar: TopicGrammar[Any],
        qos: tuple[str, ...] = (),
        shares_history: bool = False,
    ) -> None:
        check_instance("instance", instance, Messaging)
        for feature in (Features.PUBLISH_SUBSCRIBE, Features.WILDCARDS):
            if feature not in instance.features:
                raise UnsupportedFeatureError(feature, instance.name, "an event network needs it")
        self.title = title
        self._instance = instance
        self.names = ChannelNames(settings.prefix, grammar)
        #: id of this member, new for each run
        self.member = str(uuid4())
        self._control = Control(title)
        inbox = str(uuid5(_INBOXES, settings.queue)) if isinstance(settings.queue, str) else None
        announced = Announcement(
            kind="update",
            member=self.member,
            framework=str(framework_uuid()),
            name=settings.name or name,
            heartbeat=settings.heartbeat,
            linger=settings.linger,
            qos=qos,
            replays=shares_history,
            answers=True,
            inbox=inbox,
        )
        seals = None if settings.signing is None else Seals(settings.signing, self.member)
        contexts = EventContexts(instance, as_cbor=settings.as_cbor and seals is None)
        own = OwnMember(
            title, self.member, self, service, instance, settings, self.names, contexts, self._control, seals
        )

        def inbox_of(member: str) -> str:
            found = self._membership.members.get(member)
            return member if found is None else found.inbox

        self._announcer = Announcer(own, inbox_of)
        changes = MemberChanges(
            service,
            settled=lambda: self.replays.ask_all(),
            # the last events of a member arrived before the announcement that it is gone, and are taken in before
            in_order=lambda call: self._events.put_call(call),
        )
        self._notifications = changes.notifications
        self._membership = membership = Membership(announced, EVERYTHING[grammar], changes, self._announcer.announce)
        #: sends the events of this member
        self.sender = EventSender(own, membership, [grammar.parse(each) for each in settings.send_always])
        self._joint: JointSubscription

        def settle(batch: Sequence[Incoming]) -> None:
            self._joint.settle(batch)

        self._events = NetworkEventIntake(own, settle=settle, confirm=self._announcer.confirm)
        self._announcements = AnnouncementIntake(own, membership, settle)
        #: asks other members for past events
        self.replays = Replays(own, membership, lambda: self._joint.add(self.names.past(self.member)), settle)
        #: resolves when this member is subscribed and has announced itself for the first time
        self.ready: Promise[None] = Promise(f"connecting {title}")
        self._is_closed = False
        #: channels of announcements whose subscription the broker ended; and those that are subscribed to again
        self._failed: dict[str, None] = {}
        self._rejoining: dict[str, None] = {}
        #: when subscriptions are asked for again, monotonic seconds; and the pause before the time after that
        self._retry_at, self._retry_pause = math.inf, _RETRY[0]
        self._closed: Promise[None] = Promise(f"closing {title}")
        self._joint = instance.subscription.open_joint(self._take, queue=settings.queue)
        self._joint.on_failed = partial(self._control.post, self._channel_failed)
        self._wants = OwnInterests(
            title, self._control, self._joint, service.wanted, self.names.pattern, self._membership.own.set
        )
        #: announces what the service wants now
        self.refresh = self._wants.request
        self._pings = Pings(own, membership, self._announcer.announce, self.refresh, lambda: self._is_connected)
        #: promises that every live member that answers has read the announcements of this one
        self.announced = self._pings.ask
        if settings.last_will:
            self._announcer.set_last_will()
        channels = (self.names.all_members, self.names.member(inbox or self.member))
        joined = [self._joint.add(each) for each in channels]
        joined[-1].listen(partial(self._control.post, self._joined, channels, joined))
        self.refresh()
        self._control.post_later(self._membership.interval, self._tick)
        _nodes.add(self)

    # --- what arrives

    def _take(self, batch: Sequence[Incoming]) -> None:
        """Sort what arrives into announcements and events. On the loop."""
        is_announcement = self.names.is_announcement
        if self.replays.is_listening:
            is_past = self.names.is_past
            answers = [each for each in batch if is_past(each.channel)]
            if answers:
                self.replays.intake.put(answers)
                batch = [each for each in batch if not is_past(each.channel)]
        announcements = [each for each in batch if is_announcement(each.channel)]
        if not announcements:
            self._events.put(batch)
            return
        if len(announcements) < len(batch):  # first: see MemberChanges
            self._events.put([each for each in batch if not is_announcement(each.channel)])
        admitted = self._announcements.unacknowledged.admit(announcements)
        self._control.post(self._take_announcements, admitted, clock.monotonic())

    def _take_announcements(self, batch: Sequence[Incoming], now: float) -> None:
        was_due = self._membership.is_answer_due
        self._announcements.take(batch, now)
        if self._membership.is_answer_due and not was_due:
            self._control.post_later(ANSWER_DELAY, self._tick)

    # --- the connection and time, on the control thread

    def _joined(self, channels: Sequence[str], joined: Sequence[Promise[None]]) -> None:
        """Join the network: the channels of announcements are subscribed to, or will be with a later attempt."""
        errors = {channel: each.exception() for channel, each in zip(channels, joined, strict=True)}
        failed = {channel: error for channel, error in errors.items() if error is not None}
        for error in failed.values():
            engine().call(self.ready.reject, error)
            self.ready.was_retrieved = True
            if isinstance(error, ClosedError):
                return
        self._joint.abandon(self.names.is_of_one_run)  # an earlier run may have been killed
        self._joint.on_restored = partial(self._control.post, self._connected)
        self._joint.on_lost = partial(self._control.post, self._disconnected)
        for channel, error in failed.items():
            self._channel_failed(channel, error)
        if not failed:
            self._connected()

    def _connected(self) -> None:
        if self._is_closed:
            return
        self._retry_pause = _RETRY[0]
        try:
            self._membership.connected(clock.monotonic())
        finally:
            engine().call(self.ready.resolve, None)
            self._control.post_later(self._membership.interval, self._tick)
        if self._failed or self._rejoining:  # ended before the connection was lost
            self._membership.deafened()
        self._retry()
        if not self._membership.is_deaf:
            self._pings.ask_again()

    def _disconnected(self) -> None:
        self._membership.disconnected()
        for each in self._notifications.all():
            each.lose_connection()

    def _tick(self) -> None:
        if self._is_closed:
            return
        now = clock.monotonic()
        try:
            self._membership.tick(now)
        finally:
            self._control.post_later(self._membership.interval, self._tick)
        if not (self._failed or self._wants.are_refused):
            self._retry_at = math.inf
        elif self._retry_at == math.inf:
            self._retry_at = now + self._retry_pause
        elif now >= self._retry_at and self._instance.connection_state.value.is_up:
            self._retry_at, self._retry_pause = math.inf, min(2 * self._retry_pause, _RETRY[1])
            self._retry()

    def _retry(self) -> None:
        """Ask for the subscriptions again that the broker refused or ended: a member must not stay deaf."""
        failed, self._failed = self._failed, {}
        self._rejoining |= failed
        for channel in failed:
            joined = self._joint.add(channel)
            joined.listen(partial(self._control.post, self._rejoined, channel, joined))
        self._wants.retry()

    def _rejoined(self, channel: str, joined: Promise[None]) -> None:
        self._rejoining.pop(channel, None)
        error = joined.exception()
        if error is not None:
            self._channel_failed(channel, error)
        elif not (self._failed or self._rejoining):
            self._connected()  # announcements were missed

    def _channel_failed(self, channel: str, error: MessagingError) -> None:
        """Note that the broker ended a subscription."""
        if self._is_closed or isinstance(error, ClosedError):
            return
        if self.names.is_announcement(channel):
            self._failed[channel] = None
            self._membership.deafened()
            self._pings.deafened()
            if self._retry_at == math.inf:
                self._retry_at = clock.monotonic() + self._retry_pause
                self._control.post_later(self._membership.interval, self._tick)  # sooner than while it was settled
            logger.error(
                "%s: the announcements on %r do not arrive: %s; subscribing again in %g s",
                self.title, channel, error, self._retry_pause,
            )  # fmt: skip
        elif self.names.is_past(channel):
            self.replays.deafened()
        else:
            self._wants.failed(channel, error)

    # --- interests

    def confirm(self) -> Promise[None]:
        """Announce as ``refresh`` does, and wait for it where the calling thread may wait and there is a
        connection.

        Returns:
            The promise of ``refresh``. It is settled unless the broker took more than ten seconds.
        """
        confirmed = self.refresh()
        if may_block() and self._instance.connection_state.value.is_up:
            with contextlib.suppress(DeadlineError):
                confirmed.exception(_CONFIRM_TIMEOUT)
        return confirmed

    # --- state

    def is_live(self, member: str) -> bool:
        """Return whether another member is known and not lost. From any thread."""
        found = self._membership.members.get(member)
        return found is not None and not found.is_lost

    def heard_of(self, member: str) -> None:
        """Have ``NodeService.member_lost`` called for the sender of an event in the end.

        Also for a sender that is not known, or was lost before: a broker or an outbox may keep events longer than their
        sender lives. On the thread of :meth:`NodeService.receive`.
        """
        found = self._membership.members.get(member)
        if found is None or found.is_lost or not found.is_known:
            self._control.post(lambda: self._membership.heard_of(member, clock.monotonic()))

    def get_dto(self) -> NodeDTO:
        """Return a snapshot."""
        now = clock.monotonic()
        return NodeDTO(
            member=self.member,
            prefix=self.names.prefix,
            is_connected=self._is_connected,
            is_settled=self._membership.is_settled and not self._is_closed,
            members=tuple(each.get_dto(now) for each in [*self._membership.members.values()]),
            sent=self.sender.sent,
            unwanted=self.sender.unwanted,
            received=self._events.received,
            refused=self._events.refusals.refused + self._announcements.refused + self.replays.intake.refusals.refused,
            replayed=self._events.refusals.replayed + self._announcements.refusals.replayed,
        )

    @property
    def _is_connected(self) -> bool:
        """Return whether announcements arrive: a closed instance does not tell that it lost its connection."""
        is_up = self._instance.connection_state.value.is_up
        return self._membership.own.is_connected and is_up and not self._is_closed

    def problems(self) -> list[str]:
        """Return what keeps events of other members from this one, as texts for people; empty: nothing does."""
        if not self._is_connected:
            return [f"{self.title}: not connected to the event network {self.names.prefix!r}"]
        if self._failed:
            return [f"{self.title}: no announcements of the event network {self.names.prefix!r} arrive"]
        if not self._membership.is_settled:
            return [f"{self.title}: still learning the members of the event network {self.names.prefix!r}"]
        return []

    def close(self) -> Promise[None]:
        """Leave the network; idempotent. The promise resolves when the subscription has ended.

        A plain thread waits until the end is announced, for at most ``_LEAVE_WITHIN`` seconds: the instance may be
        closed next.
        """
        self._control.post(self._leave)
        if may_block() and not self._control.is_current_thread():
            self._announcer.left.wait(_LEAVE_WITHIN)
        return self._closed

    def _leave(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        self._announcements.close()
        self._announcer.end()
        error = ClosedError(f"{self.title} is closed")
        for each in self._notifications.all():
            each.fail(error)
        self._wants.close(error)
        engine().call(self.ready.reject, error)
        self.ready.was_retrieved = True
        self._control.close()
        self._joint.close().listen(partial(engine().call, self._closed.resolve, None))

    def after_fork(self) -> None:
        """See ``Forkable``: the member is the parent's, and a child must not speak for it."""
        self._is_closed = True
        error = ClosedError(f"{self.title} is the member of the parent of this process")
        self._control.abandon()
        self._announcements.close()
        self._announcer.abandon()
        self._wants.abandon(error)
        self._notifications.abandon()
        self._closed = Promise(f"closing {self.title}")
        self._closed.resolve(None)

    @tolerant
    def __repr__(self) -> str:
        return f"<EventNode {self.member} of {printable(self.title)}>"


_nodes: Final = LiveObjects[EventNode]()
