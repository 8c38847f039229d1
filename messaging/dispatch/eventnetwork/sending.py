"""Sends the events of one member to the members that want them.

**Threads.** Everything runs on the publishing thread, without a lock: the interests of the other members are read as
they are.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import Any

from messaging.dispatch import is_private_topic
from messaging.dispatch.eventdata import WireEvent, encode
from messaging.dispatch.eventnetwork.membership import Membership
from messaging.dispatch.eventnetwork.notifications import MEMBERS, DeliveryNotification
from messaging.dispatch.eventnetwork.own_member import OwnMember
from messaging.execution import Promise
from messaging.model import Message


class EventSender:
    """Sends events. Thread safe.

    Args:
        own: the member that sends.
        membership: the other members, and what they want.
        send_always: parsed topic filters of events that are sent in any case.
    """

    def __init__(self, own: OwnMember, membership: Membership, send_always: Iterable[Any]) -> None:
        self._member = own.id
        self._publish = own.instance.publisher.publish
        self._names = own.names
        self._contexts = own.contexts
        self._as_cbor = own.settings.as_cbor
        self._seals = own.seals
        self._membership = membership
        self._interests = membership.changes.interests
        self._notifications = membership.changes.notifications
        self._always = tuple(send_always)
        self._numbers = itertools.count(1)
        #: number of events that were sent, and of events that no member wanted
        self.sent = self.unwanted = 0

    def has_consumer(self, topic: str) -> bool:
        """Return whether another member is known to want events of a topic."""
        return self._interests.wanted(topic).is_any

    def may_send(self, topic: str) -> bool:
        """Return whether an event of a topic may have to be sent: :meth:`send` decides by its data."""
        return self._interests.wanted(topic).is_any or self._is_unconditional(topic)

    def _is_unconditional(self, topic: str) -> bool:
        """Return whether events are sent although no member is known to want them."""
        if not self._membership.is_settled or is_private_topic(topic):
            return True
        return bool(self._always) and any(each.matches(topic) for each in self._always)

    def send(
        self,
        event: WireEvent,
        data: Callable[[], Any],
        *,
        qos: str,
        is_stored: bool = False,
        notification: DeliveryNotification | None = None,
    ) -> Promise[None] | None:
        """Send an event to the members that want it; may wait for room in the outbox of the instance.

        Args:
            event: ``sender`` and ``sequence`` are set here.
            data: returns the data that filters see.
            qos: of the message, ``0`` or ``1``.
            is_stored: whether it is stored before, and sent even if no member is known to want it.
            notification: waits for the members that want it.

        Returns:
            The promise of the message; ``None`` if no member wants the event.

        Raises:
            InvalidEventError: the event cannot be encoded.
            PermissionDeniedError: the own key may not speak for the principal of the event.
            MessagingError: as ``MessagePublisher.publish``.
        """
        topic = event.topic
        wanted = self._interests.wanted(topic)
        members = wanted.of(data) if wanted.filtered else wanted.members
        if not (members or is_stored or self._is_unconditional(topic)):
            self.unwanted += 1
            return None
        seals = self._seals
        if seals is not None:
            seals.check_own(event.principal, topic)
        event.sender = self._member
        event.sequence = next(self._numbers)
        if notification is not None:
            self._expect(event, members, data, notification)
        channel = self._names.of(topic)
        payload = encode(event, as_cbor=self._as_cbor)
        if seals is not None:
            payload = seals.seal(payload, channel)
        promise = self._publish(Message(payload, self._contexts.of_event(channel, qos, is_stored=is_stored)))
        self.sent += 1
        return promise

    def encode(self, event: WireEvent) -> bytes:
        """Return the payload of an event that is for one member; ``sender`` is set here. Raises as :meth:`send`."""
        event.sender = self._member
        return encode(event, as_cbor=self._as_cbor)

    def send_to(self, channel: str, payload: bytes) -> Promise[None]:
        """Send an event to one member; may wait for room in the outbox. Raises as :meth:`send`."""
        if self._seals is not None:
            payload = self._seals.seal(payload, channel)
        return self._publish(Message(payload, self._contexts.of_event(channel, "1")))

    def _expect(
        self, event: WireEvent, members: frozenset[str], data: Callable[[], Any], notification: DeliveryNotification
    ) -> None:
        event.notify = True
        if event.id is None:
            event.id = f"{self._member}-{event.sequence}"
        topic, membership = event.topic, self._membership
        notification.is_for = lambda member: member.id in self._interests.wanted(topic).of(data)
        notification.hold(MEMBERS)
        expected = [found for each in sorted(members) if (found := membership.members.get(each)) is not None]
        notification.expect(expected)
        # The control thread tells the pending notifications what changes: from here on this one, too. What changed
        # before is seen below.
        self._notifications.add(event.id, notification)
        for each in expected:
            if each.id not in membership.members or not notification.is_for(each):
                notification.confirmed(each.id)
            elif each.is_lost:
                notification.ignore(each.id)
        if membership.is_settled:
            notification.release(MEMBERS)
