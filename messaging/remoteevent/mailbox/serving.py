"""Mailboxes for other processes: the server. ``remote`` has the stubs.

Operations beside ``notify`` and those of leases (:mod:`messaging.calls`); ``id`` is that of a registration:

=================  ===================================================================  =============================
operation          arguments                                                            result
=================  ===================================================================  =============================
``register``       ``duration``, ``keep``, ``max_events``, ``full``                     ``lease``
``enable``         ``id``, ``target``: a reference, ``taken``                           ``null``
``disable``        ``id``, ``taken``                                                    ``null``
``refuse``         ``id``, ``kinds``                                                    ``null``
``iterate``        ``id``, ``taken``                                                    token of the iterator, and the
                                                                                        number of stored events
``fetch``          ``id``, ``iterator``, ``ticket``, ``most``, ``timeout``              list of ``[ticket, event]``
``renew_lease``    ``id``, ``lease``: ``[channel, id, seconds]``, ``duration``          ``null``
``registrations``  none                                                                 list of objects, for people
``mailbox``        none: asks whether there is a mailbox                                number of registrations
=================  ===================================================================  =============================

``taken`` is ``[iterator, ticket]`` of the earlier iterator of the same owner, or missing: events up to the ticket are
acknowledged before the mode changes.

**Threads.** Operations run on worker threads. A fetch that waits for events holds none.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final, Self

from messaging.calls import CallServer, Operation, checked_instance
from messaging.errors import ArgumentError, DecodeError, InvalidChannelError, UnknownLeaseError, check_instance
from messaging.execution import Promise
from messaging.leases import (
    Lease,
    LeaseDirectory,
    RemoteGrantor,
    lease_operations,
    lease_to_value,
    seconds_of,
    value_of,
)
from messaging.model import check_name
from messaging.remoteevent.layout import encode_event
from messaging.remoteevent.mailbox.iterator import LONG_POLL
from messaging.remoteevent.mailbox.mailbox import EventMailbox
from messaging.remoteevent.remote_listener import ListenerReference, NotifyOperation, RemoteListener

if TYPE_CHECKING:
    from messaging.instance import Messaging
    from messaging.remoteevent.listener import EventTarget
    from messaging.remoteevent.mailbox.box import Entry
    from messaging.remoteevent.mailbox.registration import MailboxRegistration

#: events of one reply
_MOST: Final = 1000
#: bytes of the events of one reply, unless one alone has more
_MOST_BYTES: Final = 128 * 2**10


class MailboxServer:
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
        self._messaging = checked_instance(messaging)
        self._mailbox = mailbox
        self.channel = check_name(channel)
        operations: dict[str, Operation] = {
            "notify": NotifyOperation(self._listener),
            "register": self._register,
            "enable": self._enable,
            "disable": self._disable,
            "refuse": self._refuse,
            "iterate": self._iterate,
            "fetch": self._fetch,
            "renew_lease": self._renew_lease,
            "registrations": self._registrations,
            "mailbox": lambda _arguments, _body: len(mailbox),
            **lease_operations(mailbox.landlord),
        }
        self._is_closed = False
        #: answers that wait for events; changed by any thread
        self._fetching: dict[Promise[Any], None] = {}
        with contextlib.ExitStack() as resources:
            self._end = mailbox.note_served(self.channel)
            resources.callback(self._end)
            self._server = CallServer(messaging, channel, operations)  # requests may arrive from here on
            resources.callback(self._server.close)
            self._directory = LeaseDirectory(messaging, channel, mailbox.landlord)
            resources.pop_all()

    @property
    def ready(self) -> Promise[None]:
        """The promise that the broker has confirmed the subscription."""
        return self._server.ready

    def reference(self, registration_id: str) -> ListenerReference:
        """Return where the listener of a registration is reached."""
        return ListenerReference(self.channel, registration_id)

    def _listener(self, registration_id: str) -> EventTarget | None:
        try:
            return self._mailbox.registration(registration_id).listener
        except UnknownLeaseError:
            return None

    def _register(self, arguments: Mapping[str, Any], _body: bytes) -> list[Any]:
        registration = self._mailbox.register(
            seconds_of(arguments.get("duration")),
            keep=arguments.get("keep", "all"),
            max_events=arguments.get("max_events"),
            full=arguments.get("full"),
        )
        return lease_to_value(registration.lease)

    def _enable(self, arguments: Mapping[str, Any], _body: bytes) -> None:
        try:
            target = RemoteListener(self._messaging, ListenerReference.from_value(arguments.get("target")))
        except InvalidChannelError as error:
            raise ArgumentError(f"the target cannot be reached: {error}") from None
        registration = self._taken(arguments)
        registration.enable_delivery(target)

    def _disable(self, arguments: Mapping[str, Any], _body: bytes) -> None:
        self._taken(arguments).disable_delivery()

    def _refuse(self, arguments: Mapping[str, Any], _body: bytes) -> None:
        kinds = arguments.get("kinds")
        if not isinstance(kinds, list) or not all(isinstance(each, list) and len(each) == 2 for each in kinds):
            raise DecodeError("`kinds` must be a list of [source, id]")
        self._of(arguments).add_unknown_events([(source, event_id) for source, event_id in kinds])

    def _iterate(self, arguments: Mapping[str, Any], _body: bytes) -> list[Any]:
        registration = self._taken(arguments)
        return [registration.begin_iterator(), len(registration)]

    def _taken(self, arguments: Mapping[str, Any]) -> MailboxRegistration:
        """Return the registration, after acknowledging the events that the owner took with an earlier iterator."""
        registration = self._of(arguments)
        match arguments.get("taken"):
            case None:
                pass
            case [str(token), int(ticket)]:
                registration.note_taken(token, ticket)
            case _:
                raise DecodeError("`taken` must be [iterator, ticket]")
        return registration

    def _fetch(self, arguments: Mapping[str, Any], _body: bytes) -> Promise[Any]:
        registration = self._of(arguments)
        token, ticket, most = arguments.get("iterator"), arguments.get("ticket"), arguments.get("most", 0)
        if not isinstance(token, str) or not _is_count(most) or not (ticket is None or _is_count(ticket)):
            raise DecodeError("`iterator` must be a text, `ticket` and `most` integers from 0")
        timeout = min(max(seconds_of(arguments.get("timeout", 0.0)), 0.0), LONG_POLL)
        found = registration.fetch(token, ticket, min(most, _MOST), timeout)
        promise: Promise[Any] = Promise("fetch events of a mailbox")
        promise.looked_at = True

        def settle() -> None:
            error = found.exception(0)
            if error is not None:
                promise.reject(error)
            else:
                promise.resolve(_page(found.result(0)))

        self._fetching[promise] = None
        promise.listen(lambda: self._fetching.pop(promise, None))
        found.listen(settle)
        return promise

    def _renew_lease(self, arguments: Mapping[str, Any], _body: bytes) -> None:
        match arguments.get("lease"):
            case [str(channel), str(lease_id), duration]:
                granted = seconds_of(duration)
            case _:
                raise DecodeError("`lease` must be [channel, id, seconds]")
        if granted <= 0:
            raise ArgumentError(f"a lease to renew must have more than 0 seconds left, not {granted:g}")
        try:
            lease = Lease(lease_id, RemoteGrantor(self._messaging, channel), granted, granted)
        except InvalidChannelError as error:
            raise ArgumentError(f"the grantor of the lease cannot be reached: {error}") from None
        self._mailbox.renew_lease(self._of(arguments), lease, seconds_of(arguments.get("duration")))

    def _registrations(self, _arguments: Mapping[str, Any], _body: bytes) -> list[dict[str, Any]]:
        found = []
        for each in self._mailbox.registrations():
            target = each.target
            found.append(
                {
                    "id": each.id,
                    "keep": each.keep,
                    "stored": len(each),
                    "dropped": each.dropped,
                    "target": list(target.reference) if isinstance(target, RemoteListener) else target and repr(target),
                    "refused": [list(kind) for kind in each.refused],
                    "remaining": value_of(each.lease.remaining),
                    "expiration": each.lease.expiration,
                }
            )
        return found

    def _of(self, arguments: Mapping[str, Any]) -> MailboxRegistration:
        return self._mailbox.registration(str(arguments.get("id")))

    def close(self) -> None:
        """Answer no further requests. Idempotent."""
        if not self._is_closed:
            self._is_closed = True
            self._server.close()
            for each in [*self._fetching]:
                each.resolve([])  # the owner asks again
            self._directory.close()
            self._end()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _page(entries: list[Entry]) -> list[Any]:
    """Return entries as they travel: the first ones, up to a number of bytes."""
    found: list[Any] = []
    size = 0
    for ticket, event in entries:
        line = encode_event(event).decode()
        size += len(line)
        if found and size > _MOST_BYTES:
            break
        found.append([ticket, line])
    return found
