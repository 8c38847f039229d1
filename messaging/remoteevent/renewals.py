"""Leases that a party renews for its owners, also after a restart if it is durable (EV.3.1, EV.3.3).

A record of the table of a durable party has a key ``renewal [OWNER, CHANNEL, LEASE]`` and a value with the granted
seconds, the end of the lease, and the time until which it is renewed. The end is stored when the party closes. After a
crash it is not known: the lease is renewed at once, and again after failures, until its grantor says that it has ended,
or until the granted seconds have passed since the start.

**Failures.** The owner of a lease that is not renewed any more is told of it, where the party can tell. The record
stays until then: after a kill before that, the lease is renewed again, fails again, and the owner is told.

**Threads.** Any thread may use the object. Its lock guards the leases, and the order of the records of one lease. It is
not held while the disk is waited for.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from messaging.errors import ArgumentError, ClosedError, DecodeError, MessagingError, UnknownLeaseError
from messaging.errors.text import SafeLog
from messaging.execution import Promise
from messaging.journal import JournalTable
from messaging.leases import Lease, LeaseRenewalManager, RemoteGrantor, StoredTime, reference_of, seconds_of, value_of
from messaging.leases.lease import check_duration

if TYPE_CHECKING:
    from messaging.instance import Messaging
    from messaging.leases import LeaseRenewalEvent

logger = SafeLog(__name__)

_PREFIX: Final = "renewal "
#: what a lease is kept under: its owner, its channel (empty for a landlord of this process), and its id
_Key = tuple[str, str, str]


class _Renewed:
    """A lease that is renewed for an owner; it listens to the end of the renewals (``DesiredExpirationListener``)."""

    __slots__ = ("_renewals", "key", "lease", "until")

    def __init__(self, renewals: OwnedRenewals, key: _Key, lease: Lease, until: StoredTime) -> None:
        self._renewals = renewals
        self.key = key
        self.lease = lease
        #: end of the renewals
        self.until = until

    def notify(self, event: LeaseRenewalEvent) -> None:
        """See ``LeaseListener``."""
        self._renewals.note_ended(self, event.error)

    def expiration_reached(self, _event: LeaseRenewalEvent) -> None:
        """See ``DesiredExpirationListener``."""
        self._renewals.note_ended(self, None)


class RenewalFailure(NamedTuple):
    """A lease that is not renewed any more, although its owner wanted that.

    Attributes:
        owner: whose lease it is.
        channel: of its grantor; empty for a landlord of this process.
        lease_id: of the lease.
        error: why it was not renewed.
        told: to be called once the owner knows, or is gone. On any thread; does not wait for the disk.
    """

    owner: str
    channel: str
    lease_id: str
    error: MessagingError
    told: Callable[[], object]


class OwnedRenewals:
    """The leases that one party renews for its owners. Thread safe.

    Args:
        table: holds the records, beside others of the party; ``None``: nothing is stored.
        messaging: reaches the grantors of an earlier run; ``None``: their leases are not renewed in this run.
        manager: renews the leases. The party closes it.
        name: of the party, for the log.
        on_failed: called for each lease that is not renewed any more, on a worker thread or in :meth:`recover`, without
            a lock; ``None``: failures are only logged.
    """

    def __init__(
        self,
        table: JournalTable | None,
        messaging: Messaging | None,
        manager: LeaseRenewalManager,
        name: str,
        on_failed: Callable[[RenewalFailure], object] | None = None,
    ) -> None:
        self._table = table
        self._messaging = messaging
        self._manager = manager
        self._name = name
        self._on_failed = on_failed
        self._lock = threading.Lock()  # guards the following two
        self._leases: dict[_Key, _Renewed] = {}
        #: what was renewed when the party closed: their records are for the next run
        self._left: frozenset[_Key] = frozenset()

    def __len__(self) -> int:
        """Return the number of leases."""
        return len(self._leases)

    def keep(
        self, owner: str, lease: Lease, duration: float = Lease.FOREVER, renew_duration: float = Lease.ANY
    ) -> Promise[Any]:
        """Renew a lease for an owner; replaces an earlier call for the same owner and lease.

        A lease of another process is renewed again after a restart.

        Args:
            owner: identifies the owner within the party.
            lease: such as that of a registration at a generator.
            duration: seconds from now until which it is renewed.
            renew_duration: seconds to ask for each time; ``Lease.ANY``: the grantor chooses.

        Returns:
            The promise that it is stored, if it is one to store. It fails with ``JournalError``; the lease is renewed
            until the party closes then.

        Raises:
            ArgumentError: an argument is not as described.
            ClosedError: the party is closed.
        """
        if not isinstance(lease, Lease):
            raise ArgumentError(f"a lease is needed, not {type(lease).__name__}")
        duration = check_duration(duration)
        if duration == Lease.ANY:
            raise ArgumentError("the duration of renewing must be a number of seconds above 0, or Lease.FOREVER")
        key = _key_of(owner, lease)
        is_stored = bool(key[1]) and self._table is not None
        until = StoredTime.after(duration)
        stored: Promise[Any] = Promise.resolved(None, "keep a lease that is not stored")
        with self._lock:
            kept = _Renewed(self, key, lease, until)
            try:
                if is_stored:
                    stored = self._put(kept, None)
                self._manager.renew_until(lease, duration, renew_duration, kept, owner=kept)
            except Exception:
                if is_stored and key not in self._leases:
                    self._remove(_text(key))
                raise
            self._replace(kept)
        return stored

    def _replace(self, kept: _Renewed) -> None:
        """Note a lease that is renewed, and renew an earlier handle of it no more. With the lock."""
        before = self._leases.get(kept.key)
        self._leases[kept.key] = kept
        if before is not None:
            self._manager.remove(before.lease, owner=before)

    def leases(self, owner: str) -> list[Lease]:
        """Return the leases that are renewed for an owner."""
        with self._lock:
            return [kept.lease for key, kept in self._leases.items() if key[0] == owner]

    def remove(self, owner: str, lease: Lease) -> bool:
        """Renew a lease of an owner no more; return whether it was renewed. Otherwise as :meth:`forget`."""
        with self._lock:
            return self._drop(_key_of(owner, lease))

    def forget(self, owner: str) -> None:
        """Renew the leases of an owner no more. Does not wait for the disk; raises nothing."""
        with self._lock:
            for key in [each for each in self._leases if each[0] == owner]:
                self._drop(key)

    def _drop(self, key: _Key) -> bool:
        """Renew a lease no more. With the lock."""
        kept = self._leases.pop(key, None)
        if kept is None:
            return False
        self._manager.remove(kept.lease, owner=kept)
        self._remove(_text(key))
        return True

    def note_ended(self, kept: _Renewed, error: MessagingError | None) -> None:
        """Forget a lease that is not renewed any more. For its listener.

        Args:
            kept: the lease.
            error: why it was not renewed; ``None``: its owner wanted it until now.
        """
        with self._lock:
            if self._leases.get(kept.key) is not kept:
                return  # another handle of it is renewed
            del self._leases[kept.key]
            if error is None:
                self._remove(_text(kept.key))
        if error is not None:
            self._fail(kept.key, error)

    def _fail(self, key: _Key, error: MessagingError) -> None:
        """Tell of a lease that is not renewed any more. Without the lock."""
        owner, channel, lease_id = key
        logger.warning("%s: lease %s at '%s' is not renewed any more: %s", self._name, lease_id, channel, error)
        if self._on_failed is None:
            self._told(key)
        else:
            self._on_failed(RenewalFailure(owner, channel, lease_id, error, lambda: self._told(key)))

    def _told(self, key: _Key) -> None:
        """Remove the record of a lease that failed, unless it is renewed again, in this run or the next one."""
        with self._lock:
            if key not in self._leases and key not in self._left:
                self._remove(_text(key))

    # --- restart

    def recover(self, owners: Iterable[str]) -> None:
        """Renew the leases of an earlier run, at once; tell of those that have ended meanwhile.

        Args:
            owners: those that are there in this run. The records of others are removed.

        Raises:
            JournalError, ClosedError: the table cannot be used.
        """
        known = {*owners}
        table = self._table
        for text in () if table is None else table.keys_with(_PREFIX):
            try:
                key = _key(text)
                granted, end, until = _read(None if table is None else table.get(text))
            except (MessagingError, TypeError, ValueError) as error:
                logger.warning("%s: %r is not a lease to renew: %s; it is not renewed", self._name, text, error)
                continue
            if key[0] not in known or until.remaining() <= 0:
                self._remove(text)
                continue
            left = granted if end is None else end.remaining()
            if left <= 0:
                self._fail(key, UnknownLeaseError(f"it ended while the {self._name} was closed"))
            elif self._messaging is not None:
                self._recover(key, granted, left, until)

    def _recover(self, key: _Key, granted: float, left: float, until: StoredTime) -> None:
        _, channel, lease_id = key
        assert self._messaging is not None  # noqa: S101  # checked by the caller
        lease = Lease(lease_id, RemoteGrantor(self._messaging, channel), granted, left)
        lease.duration = granted
        kept = _Renewed(self, key, lease, until)
        with self._lock:
            self._manager.renew_until(lease, until.remaining(), listener=kept, owner=kept)
            self._replace(kept)
            self._put(kept, None)  # from now on the stored end may be out of date
        self._manager.renew_now(lease)

    def close(self) -> None:
        """Store when the leases end, for the next run. The party calls it before it closes the table."""
        with self._lock:
            for kept in self._leases.values():
                if kept.key[1] and self._table is not None:
                    try:
                        self._put(kept, StoredTime.after(kept.lease.remaining))
                    except MessagingError as error:
                        logger.warning("%s: the ends of renewed leases are not stored: %s", self._name, error)
                        break
            self._left |= self._leases.keys()
            self._leases.clear()

    # --- records

    def _put(self, kept: _Renewed, end: StoredTime | None) -> Promise[int]:
        """Store a record. With the lock."""
        value = [value_of(kept.lease.duration), None if end is None else end.to_value(), kept.until.to_value()]
        assert self._table is not None  # noqa: S101  # checked by the caller
        promise = self._table.put_soon(_text(kept.key), value)
        promise.was_retrieved = True
        return promise

    def _remove(self, text: str) -> None:
        try:
            if self._table is not None:
                self._table.forget(text)
        except ClosedError:
            pass  # the next run removes it
        except MessagingError as error:
            logger.warning("%s: the record of a renewed lease is not removed: %s", self._name, error)


def _key_of(owner: str, lease: Lease) -> _Key:
    try:
        channel, lease_id = reference_of(lease)
    except ArgumentError:
        return owner, "", lease.id  # its landlord ends with this process
    return owner, channel, lease_id


def _text(key: _Key) -> str:
    return _PREFIX + json.dumps(key)


def _key(text: str) -> _Key:
    value = json.loads(text.removeprefix(_PREFIX))
    if not isinstance(value, list) or len(value) != 3 or not all(isinstance(each, str) for each in value):
        raise DecodeError("its key must be [owner, channel, lease]")
    owner, channel, lease_id = value
    return owner, channel, lease_id


def _read(value: Any) -> tuple[float, StoredTime | None, StoredTime]:
    granted, end, until = value
    return seconds_of(granted), None if end is None else StoredTime.from_value(end), StoredTime.from_value(until)
