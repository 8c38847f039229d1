"""Registrations with leases that survive a restart: in a table, with the end of each lease."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Final

from messaging.errors import ClosedError, DecodeError, JournalError
from messaging.errors.text import SafeLog
from messaging.execution import may_block
from messaging.leases import LeaseEnd, StoredTime, seconds_of, value_of

if TYPE_CHECKING:
    from messaging.journal import JournalTable
    from messaging.leases import GrantedLease, Landlord, Lease

logger = SafeLog(__name__)

_LEASE: Final = "lease"


class KeptLeases:
    """The leases of one durable party. Thread safe; call :meth:`close` when the party closes.

    A lease that is renewed is stored again, soon: a crash in between may cost it the renewal, so a holder renews in
    time for another attempt.

    The landlord may outlive the party. It does not keep this object alive.

    Args:
        table: holds the registrations: values with the key ``lease`` beside those of the party.
        landlord: grants the leases.
    """

    def __init__(self, table: JournalTable, landlord: Landlord) -> None:
        self._table = table
        self._landlord = landlord
        self._lock = threading.Lock()  # guards the following, and the order of changes of one registration
        #: keys in the table, by id of the lease
        self._keys: dict[str, str] = {}
        #: ids of leases, by key in the table
        self._ids: dict[str, str] = {}
        self._stop = landlord.when_renewed(self.note_renewed, is_weak=True)

    def keep(self, key: str, lease: GrantedLease, values: dict[str, Any]) -> None:
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
            promise = self._table.put_soon(key, {**values, _LEASE: _value(lease)})
            self._note(key, lease.id)
        promise.result()

    def forget(self, key: str) -> None:
        """Forget a registration that has ended, and wait for the disk, except on an event loop.

        A failure of the disk is logged: the next run finds the registration, until its lease has expired.

        Raises:
            ClosedError: the table is closed.
        """
        try:
            with self._lock:
                lease_id = self._ids.pop(key, None)
                if lease_id is not None:
                    self._keys.pop(lease_id, None)
                promise = self._table.remove_soon(key)
            if promise is not None and may_block():
                promise.result()
        except JournalError as error:
            logger.warning("%r has ended, and its record is not removed: %s", key, error)

    def close(self) -> None:
        """Store no further renewals, and end the leases with ``LeaseEnd.CLOSED``. Idempotent.

        A later object with the same table continues the leases. Until then their holders get ``ClosedError``.
        """
        self._stop()
        with self._lock:
            lease_ids = [*self._keys]
            self._keys.clear()
            self._ids.clear()
        self._landlord.suspend(lease_ids)

    def _note(self, key: str, lease_id: str) -> None:
        """Note which lease a registration has. With the lock."""
        before = self._ids.get(key)
        if before is not None and before != lease_id:
            self._keys.pop(before, None)
        self._ids[key] = lease_id
        self._keys[lease_id] = key

    def note_renewed(self, lease: Lease) -> None:
        """Store a renewed lease. For the landlord."""
        try:
            with self._lock:
                key = self._keys.get(lease.id)
                values = None if key is None or lease.is_ended else self._table.get(key)
                if key is not None and values is not None:
                    self._table.put_soon(key, {**values, _LEASE: _value(lease)})
        except (JournalError, ClosedError) as error:
            logger.warning("lease %s was renewed, and is not stored: %s", lease.id, error)

    def kept(
        self, prefix: str
    ) -> Iterator[tuple[str, Callable[[Callable[[LeaseEnd], Any]], GrantedLease], dict[str, Any]]]:
        """Yield the registrations of earlier runs: key, a function that continues the lease, and values.

        A registration whose lease has expired meanwhile is removed, and not yielded. A lease that goes on at the
        landlord, because its party did not end it when it closed, is ended there, and continued with its present time.
        """
        for key, values in self._table.items():
            if not key.startswith(prefix):
                continue
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
            ) -> GrantedLease:
                self._landlord.suspend([lease_id])
                with self._lock:
                    self._note(key, lease_id)
                return self._landlord.restore(lease_id, remaining, granted, on_end, about=key)

            yield key, grant, values


def _value(lease: Lease) -> list[Any]:
    return [lease.id, value_of(lease.duration), StoredTime.after(lease.remaining).to_value()]
