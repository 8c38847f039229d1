"""Mailboxes for other processes: a server, and stubs with the methods of a mailbox.

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

import threading
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Self

from messaging.calls import CallServer, Operation, call
from messaging.errors import ArgumentError, DecodeError, InvalidChannelError, MessagingError, UnknownLeaseError
from messaging.execution import Promise, refuse_in_loop
from messaging.leases import (
    Lease,
    LeaseDirectory,
    RemoteGrantor,
    lease_from_value,
    lease_operations,
    lease_time,
    lease_to_value,
    reference_of,
    seconds_of,
    value_of,
)
from messaging.leases.lease import check_duration
from messaging.model import check_name
from messaging.remoteevent.event import EventRegistration, check_kind
from messaging.remoteevent.layout import decode_event, encode_event
from messaging.remoteevent.mailbox.iterator import LONG_POLL, RemoteEventIterator, checked_most
from messaging.remoteevent.remote_listener import ListenerReference, ListenerServer, NotifyOperation, RemoteListener
from messaging.text import SafeLog

if TYPE_CHECKING:
    import datetime

    from messaging.instance import Messaging
    from messaging.remoteevent.event import EventKind, RemoteEvent
    from messaging.remoteevent.listener import EventTarget
    from messaging.remoteevent.mailbox.box import BoxFull, Entry
    from messaging.remoteevent.mailbox.mailbox import EventMailbox
    from messaging.remoteevent.mailbox.registration import Keep, MailboxRegistration

logger = SafeLog(__name__)

#: events of one reply
_MOST: Final = 1000
#: bytes of the events of one reply, unless one alone has more
_MOST_BYTES: Final = 128 * 2**10
#: seconds that a request may take beyond the wait that it asks for
_SLACK: Final = 10.0


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
        self._messaging = messaging
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
        self._server = CallServer(messaging, channel, operations)
        self._directory = LeaseDirectory(messaging, channel, mailbox.landlord)
        mailbox.channels.add(self.channel)

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
        self._server.close()
        self._directory.close()
        self._mailbox.channels.discard(self.channel)

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


def _entries(result: Any) -> list[Entry]:
    return [(int(ticket), decode_event(line.encode())) for ticket, line in result]


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


class RemoteMailbox:
    """The way to a mailbox in another process. Thread safe; a context manager, which closes it.

    Args:
        messaging: an instance that is connected to the broker of the mailbox.
        channel: of its :class:`MailboxServer`.
        timeout: seconds until a request fails; ``None``: the setting ``timeout`` of the instance.

    Raises:
        InvalidChannelError: the channel is malformed.
    """

    def __init__(self, messaging: Messaging, channel: str, *, timeout: float | None = None) -> None:
        self.messaging = messaging
        self.channel = check_name(channel)
        self.timeout = timeout
        self._lock = threading.Lock()  # guards the following
        self._listeners: ListenerServer | None = None

    def call(self, operation: str, arguments: Mapping[str, Any] | None = None, **options: Any) -> Promise[Any]:
        """Call an operation of the mailbox. For its registrations."""
        options.setdefault("timeout", self.timeout)
        return call(self.messaging, self.channel, operation, arguments, **options)

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
        arguments: dict[str, Any] = {"duration": value_of(asked), "keep": keep, "max_events": max_events, "full": full}

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
        grantor = RemoteGrantor(self.messaging, self.channel, timeout=self.timeout)
        return RemoteMailboxRegistration(self, Lease(registration_id, grantor, duration, duration))

    def registrations(self) -> Promise[list[MailboxInfo]]:
        """Return the promise of the registrations, for people."""

        def convert(result: Any) -> list[MailboxInfo]:
            return [_info(each) for each in result]

        return self.call("registrations", convert=convert)

    def reference_of(self, listener: Any) -> ListenerReference:
        """Return the reference of a target, which is made reachable if it is in this process. For registrations."""
        if isinstance(listener, ListenerReference):
            return listener
        if isinstance(listener, RemoteListener):
            return listener.reference
        with self._lock:
            if self._listeners is None:
                self._listeners = ListenerServer(self.messaging)
            server = self._listeners
        return server.add(listener)

    def close(self) -> None:
        """Make the targets of this process unreachable. Registrations stay. Idempotent."""
        with self._lock:
            server, self._listeners = self._listeners, None
        if server is not None:
            server.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _info(value: Mapping[str, Any]) -> MailboxInfo:
    return MailboxInfo(
        value["id"],
        value["keep"],
        value["stored"],
        value["dropped"],
        _shown(value["target"]),
        tuple((source, event_id) for source, event_id in value["refused"]),
        seconds_of(value["remaining"]),
        value["expiration"],
    )


def _shown(target: Any) -> str | None:
    return "#".join(each for each in target if each) if isinstance(target, list) else target


class RemoteMailboxRegistration:
    """A registration at a mailbox in another process; see :class:`MailboxRegistration`. Thread safe.

    The methods return promises; iterators wait, or are awaited.

    Attributes:
        lease: of the registration.
        listener: give it to generators, of any process that is connected to the broker.
    """

    def __init__(self, mailbox: RemoteMailbox, lease: Lease) -> None:
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
        reference = self._mailbox.reference_of(target)
        if reference.channel == self._mailbox.channel:
            raise ArgumentError("a listener of the mailbox itself cannot be a target: its events would go round")
        return self._switch("enable", {"target": reference.to_value()})

    def disable_delivery(self) -> Promise[None]:
        """Store events only; see :meth:`MailboxRegistration.disable_delivery`."""
        return self._mailbox.call("disable", {"id": self.id})

    def _switch(
        self, operation: str, arguments: Mapping[str, Any], convert: Callable[[Any], Any] | None = None
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
                taken["taken"] = [iterator.token, ticket]
        try:
            promise = self._mailbox.call(operation, {"id": self.id, **arguments, **taken}, convert=convert)
        except BaseException:
            if iterator is not None:
                iterator.resume()
            raise
        if iterator is not None:
            promise.listen(lambda: iterator.resume() if promise.exception(0) is not None else None)
        return promise

    def add_unknown_events(self, kinds: Iterable[EventRegistration | EventKind]) -> Promise[None]:
        """Refuse kinds of events; see :meth:`MailboxRegistration.add_unknown_events`."""
        found = [[*(each.kind if isinstance(each, EventRegistration) else check_kind(*each))] for each in kinds]
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
            return self._mailbox.call("fetch", arguments, timeout=limit, convert=_entries)

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
        if check_duration(duration) == Lease.ANY:
            raise ArgumentError("the duration of renewing must be a number of seconds above 0, or Lease.FOREVER")
        arguments = {
            "id": self.id,
            "lease": [*reference_of(lease), value_of(lease.remaining)],
            "duration": value_of(duration),
        }
        return self._mailbox.call("renew_lease", arguments)
