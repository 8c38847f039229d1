"""Mailboxes for other processes: their operations, the server, and stubs with the methods of a mailbox.

**Threads.** Operations run on worker threads; a fetch that waits for events holds none. Any thread may use a stub.
Replies are read on the event loop of the engine."""

from __future__ import annotations

import contextlib
import datetime
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from messaging.dispatch.calls import PLAIN, TEXT, Interface, Operation, WireForm, checked_instance, list_of
from messaging.environment.signals import on_failure
from messaging.errors import ArgumentError, MessagingError, UnknownLeaseError
from messaging.errors.checks import check_instance
from messaging.errors.text import SafeLog, brief
from messaging.execution import Promise, refuse_in_loop
from messaging.leases import (
    LEASE,
    SECONDS,
    Lease,
    LeasingServer,
    RemoteGrantor,
    lease_from_value,
    lease_time,
    reference_of,
    seconds_of,
    value_of,
)
from messaging.leases.lease import check_duration
from messaging.model import check_name
from messaging.remoteevent.event import EventRegistration, check_kind, decode_event, encode_event
from messaging.remoteevent.listener import EventTarget
from messaging.remoteevent.mailbox.box import BoxFull, Entry, Keep
from messaging.remoteevent.mailbox.iterator import LONG_POLL, RemoteEventIterator, checked_most
from messaging.remoteevent.mailbox.mailbox import EventMailbox
from messaging.remoteevent.mailbox.registration import MailboxRegistration
from messaging.remoteevent.remote import (
    LISTENERS,
    REFERENCE,
    ListenerReference,
    NotifyOperation,
    RemoteListener,
    RemoteParty,
)

if TYPE_CHECKING:
    from messaging.instance import Messaging
    from messaging.remoteevent.event import EventKind, RemoteEvent

logger = SafeLog(__name__)


#: events of one request, and of one reply
_MOST: Final = 1000
#: bytes of the events of one reply, unless one alone has more
_MOST_BYTES: Final = 128 * 2**10
#: seconds that a request may take beyond the wait that it asks for
_SLACK: Final = 10.0


class MailboxInfo(NamedTuple):
    """A registration of a mailbox, for people.

    Attributes:
        id: of the registration, and of its lease.
        keep: which events are kept.
        stored: number of events that wait.
        dropped: number of events that were dropped because the box was full.
        target: gets the events; ``None`` if they are stored only.
        refused: kinds that the target refused.
        remaining: seconds until the lease expires.
        expiration: of the lease, by the wall clock; ``None`` for never.
    """

    id: str
    keep: str
    stored: int
    dropped: int
    target: str | None
    refused: tuple[EventKind, ...]
    remaining: float
    expiration: datetime.datetime | None


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


def _entries(page: Any) -> list[Entry]:
    return [(int(ticket), decode_event(line.encode())) for ticket, line in page]


def _write_info(registration: MailboxRegistration) -> dict[str, Any]:
    target = registration.target
    return {
        "id": registration.id,
        "keep": registration.keep,
        "stored": len(registration),
        "dropped": registration.dropped,
        "target": list(target.reference) if isinstance(target, RemoteListener) else target and repr(target),
        "refused": [list(kind) for kind in registration.refused],
        "remaining": value_of(registration.lease.remaining),
        "expiration": registration.lease.expiration,
    }


def _read_info(value: Mapping[str, Any]) -> MailboxInfo:
    target = value["target"]
    return MailboxInfo(
        value["id"],
        value["keep"],
        value["stored"],
        value["dropped"],
        "#".join(each for each in target if each) if isinstance(target, list) else target,
        tuple((source, event_id) for source, event_id in value["refused"]),
        seconds_of(value["remaining"]),
        value["expiration"],
    )


def _read_kind(value: Any) -> tuple[Any, Any]:
    if not isinstance(value, list):
        raise TypeError
    source, event_id = value
    return source, event_id


def _read_taken(value: Any) -> tuple[str, int] | None:
    match value:
        case None:
            return None
        case [str(token), int(ticket)]:
            return token, ticket
    raise TypeError


def _write_renewed(lease: Lease) -> list[Any]:
    return [*reference_of(lease), value_of(lease.remaining)]


def _read_renewed(value: Any) -> tuple[str, str, float]:
    match value:
        case [str(channel), str(lease_id), duration]:
            return check_name(channel), lease_id, seconds_of(duration)
    raise TypeError


def _read_count(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise TypeError
    return value


_ID: Final = WireForm("the id of a registration", read=str)
_COUNT: Final = WireForm("an integer from 0", read=_read_count, missing=0)
_TICKET: Final = WireForm("null or an integer from 0", read=lambda value: None if value is None else _read_count(value))
#: the earlier iterator of an owner, and the ticket up to which events are acknowledged before the mode changes
_TAKEN: Final = WireForm("[iterator, ticket]", list, _read_taken)
#: the operations of a mailbox, beside those of listeners and leases
MAILBOX: Final = Interface(
    register=Operation(LEASE, duration=SECONDS, keep=WireForm(missing="all"), max_events=PLAIN, full=PLAIN),
    enable=Operation(id=_ID, target=REFERENCE, taken=_TAKEN),
    disable=Operation(id=_ID, taken=_TAKEN),
    refuse=Operation(id=_ID, kinds=list_of(WireForm("[source, id]", list, _read_kind))),
    # token of the iterator, and the number of stored events
    iterate=Operation(WireForm("[iterator, stored]", list), id=_ID, taken=_TAKEN),
    fetch=Operation(
        WireForm("a list of [ticket, event]", _page, _entries),
        id=_ID,
        iterator=TEXT,
        ticket=_TICKET,
        most=_COUNT,
        timeout=SECONDS._replace(missing=0.0),
    ),
    renew_lease=Operation(
        id=_ID, lease=WireForm("[channel, id, seconds]", _write_renewed, _read_renewed), duration=SECONDS
    ),
    registrations=Operation(list_of(WireForm("a registration", _write_info, _read_info))),
    # the number of registrations: asks whether there is a mailbox
    mailbox=Operation(),
)


class RemoteMailbox(RemoteParty):
    """The way to a mailbox in another process. Thread safe; a context manager, which closes it.

    The channel is that of its :class:`MailboxServer`; see :class:`~messaging.dispatch.calls.RemoteObject`.
    """

    interface = MAILBOX

    def register(
        self,
        duration: float = Lease.ANY,
        *,
        keep: Keep = "all",
        max_events: int | None = None,
        full: BoxFull | None = None,
    ) -> Promise[RemoteMailboxRegistration]:
        """Register an owner of events; see :meth:`EventMailbox.register`.

        Returns:
            The promise of the registration. It fails as ``register`` there, or as requests do.

        Raises:
            ArgumentError: ``duration`` is not as described.
        """
        asked = check_duration(duration)
        asked_at = lease_time()
        arguments = {"duration": asked, "keep": keep, "max_events": max_events, "full": full}

        def convert(result: Any) -> RemoteMailboxRegistration:
            lease = lease_from_value(self.messaging, self.channel, result, asked, asked_at, timeout=self.timeout)
            return RemoteMailboxRegistration(self, lease)

        return self.call("register", arguments, convert=convert)

    def registration(self, registration_id: str, duration: float = Lease.FOREVER) -> RemoteMailboxRegistration:
        """Return a registration of an earlier run of the owner, by its id, without asking the mailbox.

        Args:
            registration_id: its id.
            duration: seconds that are left of its lease, as far as the owner knows.
        """
        if not isinstance(registration_id, str) or not registration_id.isprintable():
            raise ArgumentError(f"the id of a registration must be a printable text, not {brief(registration_id)}")
        duration = check_duration(duration)
        grantor = RemoteGrantor(self.messaging, self.channel, timeout=self.timeout)
        return RemoteMailboxRegistration(self, Lease(registration_id, grantor, duration, duration))

    def registrations(self) -> Promise[list[MailboxInfo]]:
        """Return the promise of the registrations, for people."""
        return self.call("registrations", {})


class RemoteMailboxRegistration:
    """A registration at a mailbox in another process; see :class:`MailboxRegistration`. Thread safe.

    The methods return promises; iterators wait, or are awaited.

    Attributes:
        lease: of the registration.
        listener: give it to generators, of any process that is connected to the broker.
    """

    def __init__(self, mailbox: RemoteMailbox, lease: Lease) -> None:
        check_instance("mailbox", mailbox, RemoteMailbox)
        check_instance("lease", lease, Lease)
        self._mailbox = mailbox
        self.lease = lease
        self.listener = RemoteListener(mailbox.messaging, ListenerReference(mailbox.channel, lease.id))
        self._lock = threading.Lock()  # guards the following
        #: the newest iterator of this object
        self._iterator: RemoteEventIterator | None = None

    @property
    def id(self) -> str:
        """Identifies the registration within its mailbox: keep it to find the registration again."""
        return self.lease.id

    def enable_delivery(self, target: Any) -> Promise[None]:
        """Push events to ``target``; see :meth:`MailboxRegistration.enable_delivery`.

        Args:
            target: a listener of this process, a ``RemoteListener`` or a ``ListenerReference``; ``None``: as
                :meth:`disable_delivery`.
        """
        if target is None:
            return self.disable_delivery()
        reference, _ = self._mailbox.reach(target)
        if reference.channel == self._mailbox.channel:
            raise ArgumentError("a listener of the mailbox itself cannot be a target: its events would go round")
        return self._switch("enable", {"target": reference})

    def disable_delivery(self) -> Promise[None]:
        """Store events only; see :meth:`MailboxRegistration.disable_delivery`."""
        return self._mailbox.call("disable", {"id": self.id})

    def _switch(
        self, operation: str, arguments: Mapping[str, Any], convert: Callable[[Any], Any] = lambda result: result
    ) -> Promise[Any]:
        """Call an operation that ends the newest iterator of this object, and acknowledge what that has handed out.

        The iterator hands out nothing meanwhile. After a failure it goes on, unless the mailbox refuses it.
        """
        with self._lock:
            iterator = self._iterator
        taken: dict[str, Any] = {}
        if iterator is not None:
            ticket = iterator.suspend()
            if ticket is not None:
                taken["taken"] = iterator.token, ticket
        with on_failure(_resume, iterator):
            promise = self._mailbox.call(operation, {"id": self.id, **arguments, **taken}, convert=convert)
        if iterator is not None:
            promise.listen(lambda: iterator.resume() if promise.exception(0) is not None else None)
        return promise

    def add_unknown_events(self, kinds: Iterable[EventRegistration | EventKind]) -> Promise[None]:
        """Refuse kinds of events; see :meth:`MailboxRegistration.add_unknown_events`."""
        found = [each.kind if isinstance(each, EventRegistration) else check_kind(*each) for each in kinds]
        return self._mailbox.call("refuse", {"id": self.id, "kinds": found})

    def remote_events(self) -> Promise[RemoteEventIterator]:
        """Return the promise of an iterator; see :meth:`MailboxRegistration.remote_events`.

        An earlier iterator of this object becomes invalid at once: the events that it has handed out are acknowledged,
        and the others come from the new one.
        """
        return self._switch("iterate", {}, lambda result: self._begun(result)[0])

    def _begun(self, result: Any) -> tuple[RemoteEventIterator, int]:
        """Return the iterator of a result of ``iterate``, and the number of stored events."""
        token, stored = str(result[0]), int(result[1])

        def fetch(ticket: int | None, most: int, timeout: float) -> Promise[list[Entry]]:
            arguments = {"id": self.id, "iterator": token, "ticket": ticket, "most": most, "timeout": timeout}
            limit = timeout + (self._mailbox.timeout or _SLACK)
            return self._mailbox.call("fetch", arguments, timeout=limit)

        iterator = RemoteEventIterator(fetch, token=token)
        with self._lock:
            self._iterator = iterator
        return iterator, stored

    def drain(self, most: int | None = None) -> list[RemoteEvent]:
        """Return the stored events, and remove them; see :meth:`MailboxRegistration.drain`.

        The events travel in pages of up to 1000. A page is removed when it has arrived. If an error ends the draining,
        the events that have arrived are returned, and the last page of them may arrive again with the next call; the
        error is raised if none has arrived.

        Args:
            most: number of events, at most; ``None``: as many as are stored now.

        Raises:
            ArgumentError: ``most`` is negative, or no number.
            DeadlineError: the target that the delivery had has not answered for its last events; or the mailbox has not
                answered.
            MessagingError: as requests do, and as :meth:`RemoteEventIterator.next`.
            WouldBlockError: the thread runs an event loop: ``await`` :meth:`remote_events`.
        """
        checked_most(most)
        refuse_in_loop("the events of a mailbox", "`await` remote_events()")
        iterator, stored = self._switch("iterate", {}, self._begun).result()
        most = stored if most is None else most
        found: list[RemoteEvent] = []
        try:
            while len(found) < most and (batch := iterator.batch(min(most - len(found), _MOST))):
                found += batch
            iterator.close()
        except MessagingError as error:
            if not found:
                raise
            logger.warning(
                "mailbox at '%s': draining registration %s ended after %d events: %s; the last ones may arrive again",
                self._mailbox.channel, self.id, len(found), error,
            )  # fmt: skip
        return found

    def renew_lease(self, lease: Lease, duration: float = Lease.FOREVER) -> Promise[None]:
        """Have the mailbox renew a lease as long as the registration lasts; see :meth:`EventMailbox.renew_lease`.

        Args:
            lease: of a landlord in another process.
            duration: seconds from now.

        Raises:
            ArgumentError: the landlord of the lease is in this process, or the duration is not as described.
        """
        check_instance("lease", lease, Lease)
        if check_duration(duration) == Lease.ANY:
            raise ArgumentError("the duration of renewing must be a number of seconds above 0, or Lease.FOREVER")
        return self._mailbox.call("renew_lease", {"id": self.id, "lease": lease, "duration": duration})


def _resume(iterator: RemoteEventIterator | None) -> None:
    if iterator is not None:
        iterator.resume()


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
            registration.pulling.note_taken(*taken)
        return registration

    def _fetch(
        self, registration_id: str, token: str, ticket: int | None, most: int, timeout: float
    ) -> Promise[list[Entry]]:
        registration = self._mailbox.registration(registration_id)
        promise = registration.pulling.fetch(token, ticket, min(most, _MOST), min(max(timeout, 0.0), LONG_POLL))
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
