"""Mailboxes for other processes: the server. ``remote`` has the operations and the stubs.

**Threads.** Operations run on worker threads. A fetch that waits for events holds none.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, Final

from messaging.dispatch.calls import checked_instance
from messaging.errors import ArgumentError, UnknownLeaseError
from messaging.errors.checks import check_instance
from messaging.leases import Lease, LeasingServer, RemoteGrantor
from messaging.model import check_name
from messaging.remoteevent.mailbox.iterator import LONG_POLL
from messaging.remoteevent.mailbox.mailbox import EventMailbox
from messaging.remoteevent.mailbox.remote import MAILBOX
from messaging.remoteevent.remote_listener import LISTENERS, ListenerReference, NotifyOperation, RemoteListener

if TYPE_CHECKING:
    from messaging.execution import Promise
    from messaging.instance import Messaging
    from messaging.remoteevent.listener import EventTarget
    from messaging.remoteevent.mailbox.box import Entry
    from messaging.remoteevent.mailbox.registration import MailboxRegistration

#: events of one reply
_MOST: Final = 1000


class MailboxServer(LeasingServer):
    """Makes a mailbox available to other processes. Thread safe; a context manager, which closes it.

    Args:
        messaging: an instance with requests. It also reaches the targets and the leases to renew.
        channel: of the mailbox. One channel has one mailbox: two would each execute every request.
        mailbox: stays open when the server is closed.

    Raises:
        InvalidChannelError, UnsupportedFeatureError, SubscriptionRefusedError: as ``CallServer``.
    """

    def __init__(self, messaging: Messaging, channel: str, mailbox: EventMailbox) -> None:
        check_instance("mailbox", mailbox, EventMailbox)
        checked_instance(messaging)
        self._mailbox = mailbox
        operations = {
            **LISTENERS.served(notify=NotifyOperation(self._listener)),
            **MAILBOX.served(
                register=self._register,
                enable=self._enable,
                disable=lambda registration_id, taken: self._taken(registration_id, taken).disable_delivery(),
                refuse=lambda registration_id, kinds: mailbox.registration(registration_id).add_unknown_events(kinds),
                iterate=self._iterate,
                fetch=self._fetch,
                renew_lease=self._renew_lease,
                registrations=mailbox.registrations,
                mailbox=mailbox.__len__,
            ),
        }
        self._is_closed = False
        #: answers that wait for events; changed by any thread
        self._fetching: dict[Promise[list[Entry]], None] = {}
        self._end = mailbox.note_served(check_name(channel))
        with contextlib.ExitStack() as resources:
            resources.callback(self._end)
            super().__init__(messaging, channel, operations, mailbox.landlord)
            resources.pop_all()

    def reference(self, registration_id: str) -> ListenerReference:
        """Return where the listener of a registration is reached."""
        return ListenerReference(self.channel, registration_id)

    def _listener(self, registration_id: str) -> EventTarget | None:
        try:
            return self._mailbox.registration(registration_id).listener
        except UnknownLeaseError:
            return None

    def _register(self, duration: float, keep: Any, max_events: Any, full: Any) -> Lease:
        return self._mailbox.register(duration, keep=keep, max_events=max_events, full=full).lease

    def _enable(self, registration_id: str, target: ListenerReference, taken: tuple[str, int] | None) -> None:
        self._taken(registration_id, taken).enable_delivery(RemoteListener(self.messaging, target))

    def _iterate(self, registration_id: str, taken: tuple[str, int] | None) -> tuple[str, int]:
        registration = self._taken(registration_id, taken)
        return registration.begin_iterator(), len(registration)

    def _taken(self, registration_id: str, taken: tuple[str, int] | None) -> MailboxRegistration:
        """Return the registration, after acknowledging the events that the owner took with an earlier iterator."""
        registration = self._mailbox.registration(registration_id)
        if taken is not None:
            registration.note_taken(*taken)
        return registration

    def _fetch(
        self, registration_id: str, token: str, ticket: int | None, most: int, timeout: float
    ) -> Promise[list[Entry]]:
        registration = self._mailbox.registration(registration_id)
        promise = registration.fetch(token, ticket, min(most, _MOST), min(max(timeout, 0.0), LONG_POLL))
        self._fetching[promise] = None
        promise.listen(lambda: self._fetching.pop(promise, None))
        return promise

    def _renew_lease(self, registration_id: str, renewed: tuple[str, str, float], duration: float) -> None:
        channel, lease_id, granted = renewed
        if granted <= 0:
            raise ArgumentError(f"a lease to renew must have more than 0 seconds left, not {granted:g}")
        lease = Lease(lease_id, RemoteGrantor(self.messaging, channel), granted, granted)
        self._mailbox.renew_lease(self._mailbox.registration(registration_id), lease, duration)

    def close(self) -> None:
        """Answer no further requests. Idempotent."""
        if not self._is_closed:
            self._is_closed = True
            super().close()
            for each in [*self._fetching]:
                each.resolve([])  # the owner asks again
            self._end()
