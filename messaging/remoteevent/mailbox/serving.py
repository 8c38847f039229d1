"""Mailboxes for other processes: a server, and stubs with the methods of a mailbox.

Operations beside ``notify`` and those of leases (:mod:`messaging.calls`); ``id`` is that of a registration:

=================  ===================================================================  =============================
operation          arguments                                                            result
=================  ===================================================================  =============================
``register``       ``duration``, ``keep``, ``max_events``, ``full``                     ``lease``
``enable``         ``id``, ``target``: a reference                                      ``null``
``disable``        ``id``                                                               ``null``
``refuse``         ``id``, ``kinds``                                                    ``null``
``iterate``        ``id``                                                               number of the iterator
``fetch``          ``id``, ``iterator``, ``ticket``, ``most``, ``timeout``              list of ``[ticket, event]``
``renew_lease``    ``id``, ``lease``: ``[channel, id, seconds]``, ``duration``          ``null``
``registrations``  none                                                                 list of objects, for people
=================  ===================================================================  =============================

**Threads.** Operations run on worker threads. A fetch that waits for events holds none.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Self

from messaging.calls import CallServer, Operation, call
from messaging.errors import ArgumentError, DecodeError, UnknownLeaseError
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
from messaging.remoteevent.event import EventRegistration
from messaging.remoteevent.layout import decode_event, encode_event
from messaging.remoteevent.mailbox.iterator import LONG_POLL, RemoteEventIterator
from messaging.remoteevent.remote_listener import ListenerReference, ListenerServer, NotifyOperation, RemoteListener

if TYPE_CHECKING:
    import datetime

    from messaging.instance import Messaging
    from messaging.remoteevent.event import EventKind, RemoteEvent
    from messaging.remoteevent.listener import EventTarget
    from messaging.remoteevent.mailbox.box import BoxFull, Entry
    from messaging.remoteevent.mailbox.mailbox import EventMailbox
    from messaging.remoteevent.mailbox.registration import Keep

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
        channel: of the mailbox.
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
        target = RemoteListener(self._messaging, ListenerReference.from_value(arguments.get("target")))
        self._of(arguments).enable_delivery(target)

    def _disable(self, arguments: Mapping[str, Any], _body: bytes) -> None:
        self._of(arguments).disable_delivery()

    def _refuse(self, arguments: Mapping[str, Any], _body: bytes) -> None:
        kinds = arguments.get("kinds")
        if not isinstance(kinds, list):
            raise DecodeError("`kinds` must be a list of [source, id]")
        self._of(arguments).add_unknown_events([tuple(each) for each in kinds])

    def _iterate(self, arguments: Mapping[str, Any], _body: bytes) -> int:
        number: int = self._of(arguments).begin_iterator()
        return number

    def _fetch(self, arguments: Mapping[str, Any], _body: bytes) -> Promise[Any]:
        registration = self._of(arguments)
        number, ticket, most = arguments.get("iterator"), arguments.get("ticket"), arguments.get("most", 0)
        if not isinstance(number, int) or not isinstance(most, int) or not isinstance(ticket, int | None):
            raise DecodeError("`iterator`, `ticket` and `most` must be integers")
        timeout = min(max(seconds_of(arguments.get("timeout", 0.0)), 0.0), LONG_POLL)
        found = registration.fetch(number, ticket, min(most, _MOST), timeout)
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
        lease = Lease(lease_id, RemoteGrantor(self._messaging, channel), granted, granted)
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
                    "dropped": each.box.dropped,
                    "target": list(target.reference) if isinstance(target, RemoteListener) else target and repr(target),
                    "refused": [list(kind) for kind in each.refused],
                    "remaining": value_of(each.lease.remaining),
                    "expiration": each.lease.expiration,
                }
            )
        return found

    def _of(self, arguments: Mapping[str, Any]) -> Any:
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
        if self._listeners is None:
            self._listeners = ListenerServer(self.messaging)
        return self._listeners.add(listener)

    def close(self) -> None:
        """Make the targets of this process unreachable. Registrations stay. Idempotent."""
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
        return self._mailbox.call("enable", {"id": self.id, "target": reference.to_value()})

    def disable_delivery(self) -> Promise[None]:
        """Store events only; see :meth:`MailboxRegistration.disable_delivery`."""
        return self._mailbox.call("disable", {"id": self.id})

    def add_unknown_events(self, kinds: Iterable[EventRegistration | EventKind]) -> Promise[None]:
        """Refuse kinds of events; see :meth:`MailboxRegistration.add_unknown_events`."""
        found = [list(each.kind if isinstance(each, EventRegistration) else each) for each in kinds]
        return self._mailbox.call("refuse", {"id": self.id, "kinds": found})

    def remote_events(self) -> Promise[RemoteEventIterator]:
        """Return the promise of an iterator; see :meth:`MailboxRegistration.remote_events`."""

        def convert(number: Any) -> RemoteEventIterator:
            def fetch(ticket: int | None, most: int, timeout: float) -> Promise[list[Entry]]:
                arguments = {"id": self.id, "iterator": number, "ticket": ticket, "most": most, "timeout": timeout}
                return self._mailbox.call(
                    "fetch", arguments, timeout=timeout + (self._mailbox.timeout or _SLACK), convert=_entries
                )

            return RemoteEventIterator(fetch)

        return self._mailbox.call("iterate", {"id": self.id}, convert=convert)

    def drain(self, most: int | None = None) -> list[RemoteEvent]:
        """Return the stored events, and remove them; see :meth:`MailboxRegistration.drain`.

        The events are removed when they have arrived: if the connection is lost meanwhile, some may arrive again with
        the next call.

        Raises:
            WouldBlockError: the thread runs an event loop: ``await`` :meth:`remote_events`.
        """
        refuse_in_loop("the events of a mailbox", "`await` remote_events()")
        found: list[RemoteEvent] = []
        with self.remote_events().result() as iterator:
            while (left := _MOST if most is None else most - len(found)) > 0:
                batch = iterator.batch(min(left, _MOST))
                if not batch:
                    break
                found += batch
        return found

    def renew_lease(self, lease: Lease, duration: float = Lease.FOREVER) -> Promise[None]:
        """Have the mailbox renew a lease as long as the registration lasts; see :meth:`EventMailbox.renew_lease`.

        Args:
            lease: of a landlord in another process.
            duration: seconds from now.

        Raises:
            ArgumentError: the landlord of the lease is in this process.
        """
        arguments = {
            "id": self.id,
            "lease": [*reference_of(lease), value_of(lease.remaining)],
            "duration": value_of(duration),
        }
        return self._mailbox.call("renew_lease", arguments)
