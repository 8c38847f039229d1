"""Event mailboxes: they store the events of owners that are away (EV.3.3).

A folder holds the registrations, and the events of each in a folder of its own::

    DIRECTORY/
      state/         registrations: leases, targets, refused kinds, leases to renew
      boxes/ID/      journal of the events of one registration

**Acknowledgement.** An event is acknowledged to its sender when it is on the disk. It is removed when the target has
acknowledged it, or when the owner has taken it.

**Threads.** Any thread may use a mailbox. Its lock guards the registrations; no code of the application runs under it.
"""

from __future__ import annotations

import contextlib
import shutil
import threading
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self

from messaging.errors import ArgumentError, ClosedError, JournalError, MessagingError, UnknownLeaseError
from messaging.journal import JournalTable
from messaging.leases import (
    Landlord,
    Lease,
    LeaseEnd,
    LeaseRenewalManager,
    RemoteGrantor,
    StoredTime,
    reference_of,
    release,
    seconds_of,
    value_of,
)
from messaging.remoteevent.delivery import RetryPolicy, wait_for_all
from messaging.remoteevent.kept_leases import KeptLeases
from messaging.remoteevent.kept_listeners import KeptListeners
from messaging.remoteevent.mailbox.box import BOX_FULL, Box, BoxFull, LatestBox, QueueBox
from messaging.remoteevent.mailbox.registration import KEEP, Keep, MailboxListener, MailboxRegistration
from messaging.remoteevent.remote_listener import RemoteListener
from messaging.text import SafeLog, tolerant

if TYPE_CHECKING:
    from types import TracebackType

    from messaging.instance import Messaging
    from messaging.leases import GrantedLease

logger = SafeLog(__name__)

#: bytes of the events of one registration
MAX_BYTES: Final = 2**30
_REGISTRATION: Final = "registration "
_RENEWAL: Final = "renewal "


class _Kept:
    """What a mailbox knows of one registration beside its state."""

    __slots__ = ("full", "max_events", "registration")

    def __init__(self, registration: MailboxRegistration, max_events: int | None, full: BoxFull) -> None:
        self.registration = registration
        self.max_events = max_events
        self.full: BoxFull = full


class EventMailbox:
    """Stores events until their owners want them (EV.3.3). Thread safe; a context manager, which closes it.

    Example::

        with EventMailbox("mailbox") as mailbox:
            box = mailbox.register(3600.0)
            generator.register("overheated", None, box.listener, 3600.0)
            ...
            for event in box.drain():
                print(event)

    Args:
        path: its folder.
        messaging: reaches targets and leases of other processes.
        listeners: listeners of this process by name: targets that are found again after a restart.
        landlord: grants the leases of the registrations; ``None``: one of its own, which grants up to ``max_duration``.
        max_duration: longest lease, seconds, without ``landlord``.
        max_events: events of one registration; ``None``: unlimited. A registration may have less.
        max_bytes: bytes of the events of one registration; ``None``: unlimited.
        full: what happens to an event that has no room: ``"refuse"``: its sender is told, and tries again;
            ``"drop_oldest"``, ``"drop_newest"``: an event is dropped and counted.
        retry: what happens after a notification of a target failed; by default it is tried again without end.
        name: for the log.

    Raises:
        ArgumentError: an argument is not as described.
        JournalError: the folder cannot be used.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        messaging: Messaging | None = None,
        listeners: Mapping[str, Any] | None = None,
        landlord: Landlord | None = None,
        max_duration: float = 30 * 86400.0,
        max_events: int | None = None,
        max_bytes: int | None = MAX_BYTES,
        full: BoxFull = "refuse",
        retry: RetryPolicy | None = None,
        name: str = "mailbox",
    ) -> None:
        if not isinstance(name, str) or not name:
            raise ArgumentError(f"name must be a non-empty text, not {name!r:.80}")
        _check_bound("max_events", max_events)
        _check_bound("max_bytes", max_bytes)
        _check_choice("full", full, BOX_FULL)
        self.name = name
        self._messaging = messaging
        self._kept_listeners = KeptListeners(messaging, listeners or {})
        self._max_events = max_events
        self._max_bytes = max_bytes
        self._full: BoxFull = full
        self._retry = retry or RetryPolicy()
        self._folder = Path(path).expanduser()
        self.landlord = Landlord(name, max_duration=max_duration) if landlord is None else landlord
        self._owns_landlord = landlord is None
        #: channels at which this mailbox is reached by others
        self.channels: set[str] = set()
        self._renewals = LeaseRenewalManager()
        self._lock = threading.Lock()  # guards the following two
        self._kept: dict[str, _Kept] = {}
        self._is_closed = False
        self._state = JournalTable(self._folder / "state")
        try:
            self._leases = KeptLeases(self._state, self.landlord)
            self._recover()
        except BaseException:
            self._state.close()
            raise

    # --- registering

    def register(
        self,
        duration: float = Lease.ANY,
        *,
        keep: Keep = "all",
        max_events: int | None = None,
        full: BoxFull | None = None,
    ) -> MailboxRegistration:
        """Register an owner of events.

        Args:
            duration: seconds that are asked for.
            keep: which events are stored: ``"all"``; of each kind the ``"latest"``; or ``"latest_and_count"``: each
                event then has the number of older ones that it took the place of, as ``event.suppressed``.
            max_events, full: as for the mailbox, for this registration.

        Returns:
            The registration, on the disk.

        Raises:
            ArgumentError: an argument is not as described.
            LeaseDeniedError, JournalError, ClosedError: it cannot be registered.
        """
        _check_choice("keep", keep, KEEP)
        _check_bound("max_events", max_events)
        if full is not None:
            _check_choice("full", full, BOX_FULL)
        if self._is_closed:
            raise ClosedError(f"mailbox '{self.name}': closed")
        kept = _Kept(self._made(keep), self._max_events if max_events is None else max_events, full or self._full)
        registration = kept.registration
        registration.lease = self.landlord.grant(
            duration, lambda end: self._end(registration, end), about=f"{self.name}: {keep}"
        )
        with self._lock:
            self._kept[registration.id] = kept
        try:
            self._persist(registration)
        except BaseException:
            release(registration.lease)
            raise
        return registration

    def _made(self, keep: Keep) -> MailboxRegistration:
        return MailboxRegistration(
            keep, self._open_box, self._persist, self._refuse_loop, self._retry, f"mailbox '{self.name}'"
        )

    def _open_box(self, registration: MailboxRegistration) -> Box:
        kept = self._kept[registration.id]
        options: dict[str, Any] = {
            "max_events": kept.max_events,
            "max_bytes": self._max_bytes,
            "full": kept.full,
            "changed": registration.note_stored,
        }
        path = self._folder / "boxes" / registration.id
        if registration.keep == "all":
            return QueueBox(path, self._state, registration.id, **options)
        is_counting = registration.keep == "latest_and_count"
        return LatestBox(path, self._state, registration.id, is_counting=is_counting, **options)

    def _refuse_loop(self, target: Any) -> None:
        """Raise ``ArgumentError`` if events of this mailbox would come back to it, or the target cannot be kept."""
        is_own = isinstance(target, MailboxListener) and any(
            each.registration is target.registration for each in self._kept.values()
        )
        if is_own or (isinstance(target, RemoteListener) and target.reference.channel in self.channels):
            raise ArgumentError("a listener of the mailbox itself cannot be a target: its events would go round")

    def _persist(self, registration: MailboxRegistration) -> None:
        """Store the state of a registration. Raises ``JournalError``."""
        kept = self._kept.get(registration.id)
        if kept is None:
            return
        target = registration.target
        try:
            reference = None if target is None else self._kept_listeners.reference(target)
        except ArgumentError:
            reference = None  # a target of this process alone: after a restart the events are stored only
        self._leases.keep(
            _REGISTRATION + registration.id,
            registration.lease,
            {
                "keep": registration.keep,
                "max_events": kept.max_events,
                "full": kept.full,
                "target": reference,
                "refused": [list(each) for each in registration.refused],
            },
        )

    def _end(self, registration: MailboxRegistration, end: LeaseEnd) -> None:
        """End a registration with its lease. On a worker thread."""
        if end is LeaseEnd.CLOSED:
            return
        error = UnknownLeaseError(f"mailbox '{self.name}': the registration {registration.id} has ended: {end.value}")
        box, stopped = registration.end(error)
        wait_for_all(stopped)
        with self._lock:
            self._kept.pop(registration.id, None)
        with contextlib.suppress(ClosedError):
            for key in self._state.keys_with(f"{_RENEWAL}{registration.id} "):
                self._state.remove(key)
            self._leases.forget(_REGISTRATION + registration.id)
            self._state.remove(f"box {registration.id}")
        if box is not None:
            box.abandon()
        shutil.rmtree(self._folder / "boxes" / registration.id, ignore_errors=True)

    # --- leases of the owners

    def renew_lease(self, registration: MailboxRegistration, lease: Lease, duration: float = Lease.FOREVER) -> None:
        """Renew a lease for an owner that is away, as long as its registration lasts (EV.3.3).

        A lease of another process is renewed again after a restart of the mailbox.

        Args:
            registration: of the owner.
            lease: such as that of its registration at a generator.
            duration: seconds from now until which it is renewed.

        Raises:
            ArgumentError: an argument is not as described.
            UnknownLeaseError: the registration has ended.
            JournalError, ClosedError: it cannot be stored.
        """
        if registration.lease.is_ended:
            raise UnknownLeaseError(f"mailbox '{self.name}': the registration {registration.id} has ended")
        self._renewals.renew_for(lease, duration)
        registration.lease.when_ended(partial(self._forget_renewal, lease))
        try:
            reference = reference_of(lease)
        except ArgumentError:
            return  # its landlord ends with this process
        self._state.put(
            f"{_RENEWAL}{registration.id} {lease.id}",
            [*reference, value_of(lease.duration), StoredTime.after(duration).to_value()],
        )

    # --- restart

    def _recover(self) -> None:
        for key, grant, values in self._leases.kept(_REGISTRATION):
            try:
                keep, full = values["keep"], values["full"]
                _check_choice("keep", keep, KEEP)
                _check_choice("full", full, BOX_FULL)
                refused = [(str(source), event_id) for source, event_id in values["refused"]]
                kept = _Kept(self._made(keep), values["max_events"], full)
            except (ArgumentError, KeyError, TypeError, ValueError) as error:
                logger.warning("mailbox '%s': %r is not a registration: %s", self.name, key, error)
                continue
            registration = kept.registration
            registration.lease = self._granted(grant, registration)
            with self._lock:
                self._kept[registration.id] = kept
            self._resume(registration, values.get("target"), refused)
        self._recover_renewals()
        boxes = self._folder / "boxes"
        if boxes.is_dir():
            for folder in boxes.iterdir():
                if folder.name not in self._kept:  # the lease has ended, before or while the mailbox was closed
                    shutil.rmtree(folder, ignore_errors=True)
                    self._state.remove(f"box {folder.name}")

    def _granted(self, grant: Any, registration: MailboxRegistration) -> GrantedLease:
        lease: GrantedLease = grant(lambda end: self._end(registration, end))
        return lease

    def _resume(self, registration: MailboxRegistration, reference: Any, refused: list[tuple[str, Any]]) -> None:
        target = None
        if reference is not None:
            try:
                target = self._kept_listeners.listener(reference, str(self._folder))
            except MessagingError as error:
                logger.warning("mailbox '%s': delivery does not resume: %s; events are stored", self.name, error)
        registration.restore(refused, target)

    def _recover_renewals(self) -> None:
        for key, value in self._state.items():
            if not key.startswith(_RENEWAL):
                continue
            owner = key.split(" ")[1]
            kept = self._kept.get(owner)
            try:
                channel, lease_id, duration, end = value
                left = StoredTime.from_value(end).remaining()
                if kept is None or left <= 0 or self._messaging is None:
                    if kept is None or left <= 0:
                        self._state.remove(key)
                    continue
                granted = seconds_of(duration)
            except (MessagingError, TypeError, ValueError) as error:
                logger.warning("mailbox '%s': %r is no lease to renew: %s", self.name, key, error)
                continue
            # what is left of it is not known: it is renewed at once, and given up if the grantor does not know it
            lease = Lease(lease_id, RemoteGrantor(self._messaging, channel), granted, min(granted, 60.0))
            self._renewals.renew_for(lease, left)
            self._renewals.renew_now(lease)
            kept.registration.lease.when_ended(partial(self._forget_renewal, lease))

    def _forget_renewal(self, lease: Lease, _end: LeaseEnd) -> None:
        self._renewals.remove(lease)

    # --- state and life cycle

    def registration(self, registration_id: str) -> MailboxRegistration:
        """Return a registration.

        Raises:
            UnknownLeaseError: there is none, or it has ended.
        """
        kept = self._kept.get(registration_id)
        if kept is None or kept.registration.lease.is_ended:
            raise UnknownLeaseError(f"mailbox '{self.name}': no registration {registration_id!r:.80}")
        return kept.registration

    def registrations(self) -> list[MailboxRegistration]:
        """Return the registrations, in the order of their making."""
        with self._lock:
            return [each.registration for each in self._kept.values() if not each.registration.lease.is_ended]

    def close(self) -> None:
        """Close the mailbox: deliveries stop, waits end with ``ClosedError``, and all is kept for the next run.

        Idempotent. Events that a target has not acknowledged are delivered again.

        Raises:
            JournalError: the last state is not stored.
        """
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            kept = [*self._kept.values()]
        self._renewals.close()
        error = ClosedError(f"mailbox '{self.name}': closed")
        ended = [each.registration.end(error) for each in kept]
        wait_for_all([each for _, stopped in ended for each in stopped])
        if self._owns_landlord:
            self.landlord.close()
        failure: JournalError | None = None
        for box, _ in ended:
            if box is not None:
                try:
                    box.close()
                except JournalError as problem:
                    failure = failure or problem
        self._state.close()
        if failure is not None:
            raise failure

    def __len__(self) -> int:
        """Return the number of registrations."""
        return len(self._kept)

    def __bool__(self) -> bool:
        """Return ``True``, also when it is empty."""
        return True

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    @tolerant
    def __repr__(self) -> str:
        return f"<EventMailbox {self.name!r} of {len(self._kept)} registrations>"


def _check_bound(name: str, value: object) -> None:
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
        raise ArgumentError(f"{name} must be an int from 1, or None, not {value!r:.80}")


def _check_choice(name: str, value: object, known: tuple[str, ...]) -> None:
    if not isinstance(value, str) or value not in known:
        raise ArgumentError(f"{name} must be one of {', '.join(known)}, not {value!r:.80}")
