"""Parties that others register at: how they open and close, and their registrations on the disk."""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from messaging.dispatch.eventdata import from_portable, to_portable
from messaging.errors import ArgumentError, ClosedError, DecodeError, JournalError
from messaging.errors.checks import check_optional, check_path
from messaging.errors.text import SafeLog
from messaging.execution import Closeable, Promise, may_block
from messaging.journal import JournalTable
from messaging.leases import GrantedLease, Landlord, LeaseEnd, StoredTime, lease_time, seconds_of, value_of
from messaging.remoteevent.delivery import POSITION, Interest
from messaging.remoteevent.event import check_kind
from messaging.remoteevent.event_journal import EventJournal, JournalQueue, channel_of
from messaging.remoteevent.listener import as_target
from messaging.remoteevent.remote import ListenerReference, RemoteListener

if TYPE_CHECKING:
    from messaging.instance import Messaging

logger = SafeLog(__name__)


_LEASE: Final = "lease"
#: begins the keys of the records of registrations
REGISTRATION: Final = "registration "

#: continues the lease of a registration of an earlier run, with the callback for its end
Grant = Callable[[Callable[[LeaseEnd], Any]], "GrantedLease"]


class KeptLeases:
    """The leases of one durable party. Thread safe; call :meth:`close` when the party closes.

    A lease that is renewed is stored again, soon: a crash in between may cost it the renewal, so a holder renews in
    time for another attempt.

    Args:
        table: holds the registrations by the ids of their leases: values with the key ``lease`` beside those of the
            party.
        landlord: grants the leases.
    """

    def __init__(self, table: JournalTable, landlord: Landlord) -> None:
        self._table = table
        self._landlord = landlord
        self._lock = threading.Lock()  # guards the following, and the order of changes of one registration
        #: the leases by their ids, each with the end that was stored last, in seconds of the lease clock
        self._kept: dict[str, tuple[GrantedLease, float]] = {}

    def keep(self, lease: GrantedLease, values: dict[str, Any]) -> None:
        """Store a registration, or its changed values, unless its lease has expired or was cancelled.

        Raises:
            JournalError: it is not stored.
            ClosedError: its lease has ended because the party or its landlord is closed: the next run will not find it.
        """
        with self._lock:
            if lease.end is LeaseEnd.CLOSED:
                raise ClosedError(f"lease {lease.id}: its landlord or its party is closed")
            if lease.is_ended:  # it was forgotten already, or will be
                return
            lease.on_renewed = self._note_renewed
            end = lease.expires  # first: a renewal may follow
            promise = self._put(lease, values)
            self._kept[lease.id] = lease, end
        promise.result()

    def forget(self, lease_id: str) -> None:
        """Forget a registration that has ended, and wait for the disk, except on an event loop.

        A failure of the disk is logged: the next run finds the registration, until its lease has expired.

        Raises:
            ClosedError: the table is closed.
        """
        key = REGISTRATION + lease_id
        try:
            with self._lock:
                self._kept.pop(lease_id, None)
                promise = self._table.remove_soon(key)
            if promise is not None and may_block():
                promise.result()
        except JournalError as error:
            logger.warning("%r has ended, and its record is not removed: %s", key, error)

    def close(self) -> None:
        """End the leases with ``LeaseEnd.CLOSED``, and store what has become of them until then. Idempotent.

        A later object with the same table continues the leases. Until then their holders get ``ClosedError``.
        """
        with self._lock:
            kept, self._kept = self._kept, {}
        self._landlord.suspend(kept)  # renews and cancels none of them any more
        for lease, stored_end in kept.values():  # the callbacks of the last changes come too late
            try:
                with self._lock:
                    if lease.is_over:
                        self._table.forget(REGISTRATION + lease.id)
                    elif lease.expires != stored_end:
                        self._put_end(lease)
            except (JournalError, ClosedError) as error:
                logger.warning("lease %s has changed, and is not stored: %s", lease.id, error)

    def _note_renewed(self, lease: GrantedLease) -> None:
        """Store a renewed lease. For the landlord."""
        try:
            with self._lock:
                if lease.id in self._kept and not lease.is_ended:
                    end = lease.expires  # as above
                    self._put_end(lease)
                    self._kept[lease.id] = lease, end
        except (JournalError, ClosedError) as error:
            logger.warning("lease %s was renewed, and is not stored: %s", lease.id, error)

    def _put_end(self, lease: GrantedLease) -> None:
        """Change the end of a lease in the record of its registration, if there is one. With the lock."""
        values = self._table.get(REGISTRATION + lease.id)
        if values is not None:
            self._put(lease, values)

    def _put(self, lease: GrantedLease, values: dict[str, Any]) -> Promise[int]:
        """Store a registration; return the promise that it is on the disk. With the lock."""
        end = StoredTime.after(max(0.0, lease.expires - lease_time()))  # also of a lease that was ended to go on later
        return self._table.put_soon(
            REGISTRATION + lease.id, {**values, _LEASE: [lease.id, value_of(lease.duration), end.to_value()]}
        )

    def kept(self) -> Iterator[tuple[str, Grant, dict[str, Any]]]:
        """Yield the registrations of earlier runs: key, a function that continues the lease, and values.

        A registration whose lease has expired meanwhile is removed, and not yielded. A lease that goes on at the
        landlord, because its party did not end it when it closed, is ended there, and continued with its present time.
        """
        for key, values in self._table.items():
            if not key.startswith(REGISTRATION):
                continue
            live = None
            try:
                lease_id, duration, end = values[_LEASE]
                remaining = StoredTime.from_value(end).remaining()
                granted = seconds_of(duration)
            except (DecodeError, KeyError, TypeError, ValueError) as error:
                logger.warning("%r is not a registration, and is dropped: %s", key, error)
                remaining = 0.0
            else:
                live = self._landlord.lease(lease_id)
                if live is not None:
                    remaining, granted = live.remaining, live.duration
            if remaining <= 0:
                self._table.forget(key)  # a record that stays does no harm: the next run finds it expired, too
                continue

            def grant(
                on_end: Callable[[LeaseEnd], Any],
                lease_id: str = lease_id,
                remaining: float = remaining,
                granted: float = granted,
                key: str = key,
                is_stored: bool = live is None,
            ) -> GrantedLease:
                self._landlord.suspend([lease_id])
                with self._lock:
                    lease = self._landlord.restore(
                        lease_id, remaining, granted, on_end, about=key, on_renewed=self._note_renewed
                    )
                    self._kept[lease_id] = lease, lease.expires if is_stored else -math.inf
                return lease

            yield key, grant, values


class Party(Closeable):
    """A party that others register at: its landlord, and one way to open and to close. Thread safe; a context manager.

    **Opening.** What a subclass opens it closes by :attr:`resources`, an exit stack. The part of its constructor that
    may fail is the block of ``with on_failure(self.resources.close)``. Deliveries begin at the end: a party that cannot
    be opened delivers nothing.

    **Closing.** The first call of :meth:`close` refuses further calls, lets the subclass stop its deliveries, and
    closes the resources, the last one first.

    Args:
        title: of the party, for the log and in errors.
        landlord: grants the leases; ``None``: one of its own, which closes with the party.
        name, **limits: of a landlord of its own.

    Attributes:
        title: of the party.
        landlord: grants the leases.
        resources: closes what the party has opened.
    """

    def __init__(self, title: str, landlord: Landlord | None, name: str, **limits: Any) -> None:
        check_optional("landlord", landlord, Landlord)
        self.title = title
        self._lock = threading.Lock()  # guards what the subclass says
        self._is_closed = False
        self.resources = contextlib.ExitStack()
        self.landlord = self.resources.enter_context(Landlord(name, **limits)) if landlord is None else landlord

    def _refuse_closed(self) -> None:
        if self._is_closed:
            raise ClosedError(f"{self.title}: closed")

    def _stop(self) -> None:
        """Stop the deliveries and wait for their last outcomes. Called once, when further calls are refused."""

    def close(self) -> None:
        """Stop all deliveries, and keep what waits for the next run. Idempotent.

        Raises:
            JournalError: the last state is not stored.
        """
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
        with self.resources:
            self._stop()


class PartyFolder:
    """The folder of a durable party: a table with its state, the leases of its registrations, and their listeners.

    Args:
        path: the folder.
        party: the party, which is being opened, and closes the table.
        messaging: reaches the listeners of other processes; ``None``: there are none.
        named: listeners of this process by name.

    Attributes:
        path: the folder.
        title: of the party.
        table: in ``state`` of the folder.
        leases: of the registrations in the table.

    Raises:
        ArgumentError: an argument is not as described.
        JournalError: the folder cannot be used.
    """

    def __init__(
        self, path: str | Path, party: Party, messaging: Messaging | None, named: Mapping[str, Any] | None
    ) -> None:
        named = {} if named is None else named
        if not isinstance(named, Mapping) or not all(isinstance(each, str) and each for each in named):
            raise ArgumentError("listeners must be a mapping of names to listeners")
        for each in named.values():
            as_target(each)
        self.title = party.title
        self._messaging = messaging
        self._named = dict(named)
        self.path = check_path("path", path).expanduser()
        self.table = party.resources.enter_context(JournalTable(self.path / "state"))
        self.leases = KeptLeases(self.table, party.landlord)
        party.resources.callback(self.leases.close)

    def reference(self, listener: Any) -> list[Any]:
        """Return a listener in portable form.

        Raises:
            ArgumentError: it is neither in another process nor one of the named ones.
        """
        if isinstance(listener, RemoteListener):
            return ["remote", *listener.reference.to_value()]
        for name, each in self._named.items():
            if each is listener or each == listener:
                return ["named", name]
        raise ArgumentError(
            "a listener of a persistent party must be found again after a restart: pass a RemoteListener, or one of "
            f"`listeners`; not {type(listener).__name__}"
        )

    def listener(self, reference: Any) -> Any:
        """Return the listener of a portable form.

        Raises:
            JournalError: it is not there in this run.
        """
        if isinstance(reference, list) and len(reference) == 3 and reference[0] == "remote":
            if self._messaging is None:
                raise JournalError(
                    str(self.path), f"a registration has the listener {reference[1]!r:.100}: pass `messaging`"
                )
            return RemoteListener(self._messaging, ListenerReference.from_value(reference[1:]))
        if isinstance(reference, list) and len(reference) == 2 and reference[1] in self._named:
            return self._named[reference[1]]
        raise JournalError(
            str(self.path), f"a registration has the listener {reference!r:.100}, which `listeners` lacks"
        )


class EventFolder(PartyFolder):
    """The folder of a generator or an agent: also the events, and the registrations of interest in them.

    Args:
        path, party, messaging, named: see ``PartyFolder``.
        **options: of the journal.

    Attributes:
        events: in ``events`` of the folder.
    """

    def __init__(
        self,
        path: str | Path,
        party: Party,
        messaging: Messaging | None,
        named: Mapping[str, Any] | None,
        **options: Any,
    ) -> None:
        super().__init__(path, party, messaging, named)
        self.events = EventJournal(self.path / "events", **options)
        party.resources.callback(self.events.journal.close)

    def queue(self, interest: Interest, start: int | None = None) -> JournalQueue:
        """Return the events for a registration, from its position on.

        Args:
            interest: the registration, with its lease.
            start: offset of the first record that it may want, if it has no position yet; ``None``: the next record.
        """
        return self.events.queue(interest.position, channel_of(interest.kind), interest.event_for, start=start)

    def keep(self, interest: Interest, **more: Any) -> None:
        """Keep a registration over a restart, with further values. Raises ``ArgumentError``, and as ``KeptLeases``."""
        self.leases.keep(
            interest.lease,
            {
                **more,
                "id": interest.kind[1],
                "handback": None if interest.handback is None else to_portable(interest.handback),
                "listener": self.reference(interest.listener),
                "after": interest.after,
            },
        )

    def forget(self, interest: Interest) -> None:
        """Forget a registration that has ended, and its position; nothing if the party is closed."""
        with contextlib.suppress(ClosedError):
            self.leases.forget(interest.lease.id)
            self.events.forget(interest.position)

    def interests(self, source: str | None = None) -> Iterator[tuple[Interest, Grant]]:
        """Yield the registrations of earlier runs, and what continues their leases. Raises ``JournalError``.

        Args:
            source: of the events; ``None``: the records say.
        """
        for key, grant, values in self.leases.kept():
            try:
                kind = check_kind(values["source"] if source is None else source, values["id"])
                handback = None if values["handback"] is None else from_portable(values["handback"])
                listener = self.listener(values["listener"])
                interest = Interest(kind, listener, handback, int(values["after"]))
            except (KeyError, TypeError, ValueError) as error:
                logger.warning("%s: %r is not a registration: %s", self.title, key, error)
                continue
            yield interest, grant

    def remove_others(self, lease_ids: Iterable[str]) -> None:
        """Forget the positions of registrations, but those with these leases."""
        self.events.remove_others(POSITION, [POSITION + each for each in lease_ids])
