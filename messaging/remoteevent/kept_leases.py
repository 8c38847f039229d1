"""Registrations with leases that survive a restart: in a table, with the end of each lease."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Final

from messaging.errors import ClosedError, DecodeError, JournalError
from messaging.leases import StoredTime, seconds_of, value_of
from messaging.text import SafeLog

if TYPE_CHECKING:
    from messaging.journal import JournalTable
    from messaging.leases import GrantedLease, Landlord, Lease, LeaseEnd

logger = SafeLog(__name__)

_LEASE: Final = "lease"


class KeptLeases:
    """The leases of one durable party. Thread safe.

    A lease that is renewed is stored again, soon: a crash in between may cost it the renewal, so a holder renews in
    time for another attempt.

    Args:
        table: holds the registrations: values with the key ``lease`` beside those of the party.
        landlord: grants the leases.
    """

    def __init__(self, table: JournalTable, landlord: Landlord) -> None:
        self._table = table
        self._landlord = landlord
        #: keys in the table, by id of the lease
        self._keys: dict[str, str] = {}
        landlord.when_renewed(self._renewed)

    def keep(self, key: str, lease: Lease, values: dict[str, Any]) -> None:
        """Store a registration. Raises ``JournalError``."""
        self._table.put(key, {**values, _LEASE: _value(lease)})
        self._keys[lease.id] = key

    def change(self, key: str, lease: Lease, values: dict[str, Any]) -> None:
        """Store a registration whose values have changed. Raises ``JournalError``."""
        self.keep(key, lease, values)

    def forget(self, key: str) -> None:
        """Forget a registration. Raises ``JournalError``."""
        for lease_id, each in [*self._keys.items()]:
            if each == key:
                self._keys.pop(lease_id, None)
        self._table.remove(key)

    def _renewed(self, lease: Lease) -> None:
        key = self._keys.get(lease.id)
        values = None if key is None else self._table.get(key)
        if key is None or values is None:
            return
        try:
            self._table.put_soon(key, {**values, _LEASE: _value(lease)})
        except (JournalError, ClosedError) as error:
            logger.warning("lease %s was renewed, and is not stored: %s", lease.id, error)

    def kept(
        self, prefix: str
    ) -> Iterator[tuple[str, Callable[[Callable[[LeaseEnd], Any]], GrantedLease], dict[str, Any]]]:
        """Yield the registrations of earlier runs: key, a function that continues the lease, and values.

        A registration whose lease has expired meanwhile is removed, and not yielded.
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
            if remaining <= 0:
                self._table.remove(key)
                continue

            def grant(
                on_end: Callable[[LeaseEnd], Any],
                lease_id: str = lease_id,
                remaining: float = remaining,
                granted: float = granted,
                key: str = key,
            ) -> GrantedLease:
                self._keys[lease_id] = key
                return self._landlord.restore(lease_id, remaining, granted, on_end, about=key)

            yield key, grant, values


def _value(lease: Lease) -> list[Any]:
    return [lease.id, value_of(lease.duration), StoredTime.after(lease.remaining).to_value()]
