"""Event mailboxes: they store the events of owners that are away (EV.3.3).

A folder holds the registrations, and the events of each in a folder of its own::

    DIRECTORY/
      state/         registrations: leases, targets, refused kinds, leases to renew
      boxes/ID/      journal of the events of one registration
      damaged/ID/    the same, of a registration whose record in ``state`` is malformed: for people

**Acknowledgement.** An event is acknowledged to its sender when it is on the disk. It is removed when the target has
acknowledged it, or when the owner has taken it.

**Open boxes.** Of the boxes, a bounded number is open at a time (:mod:`messaging.remoteevent.mailbox.open_boxes`).

**Threads.** Any thread may use a mailbox. Its lock guards the registrations; no code of the application runs under it.
"""

from __future__ import annotations

import contextlib
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from messaging.environment.signals import on_failure
from messaging.errors import (
    ArgumentError,
    ClosedError,
    DecodeError,
    JournalError,
    JournalLockedError,
    MessagingError,
    UnknownLeaseError,
)
from messaging.errors.checks import check_instance
from messaging.errors.text import SafeLog, tolerant
from messaging.execution import refuse_in_loop, workers
from messaging.leases import (
    Landlord,
    Lease,
    LeaseEnd,
    LeaseRenewalManager,
    RemoteGrantor,
    StoredTime,
    release,
    seconds_of,
)
from messaging.remoteevent.delivery import RetryPolicy, wait_for_all
from messaging.remoteevent.event import EventKind, check_kind
from messaging.remoteevent.mailbox.box import BOX_FULL, KEEP, Box, BoxFull, BoxOptions, Keep, LatestBox, QueueBox
from messaging.remoteevent.mailbox.failure_notices import FailureNotices
from messaging.remoteevent.mailbox.open_boxes import OpenBoxes, default_most
from messaging.remoteevent.mailbox.registration import MailboxListener, MailboxRegistration
from messaging.remoteevent.party import REGISTRATION, Party, PartyFolder
from messaging.remoteevent.remote import RemoteListener
from messaging.remoteevent.renewals import OwnedRenewals, RenewalFailure

if TYPE_CHECKING:
    from messaging.instance import Messaging

logger = SafeLog(__name__)


class MailboxFolder(PartyFolder):
    """The folder of a mailbox; see ``mailbox``."""

    def box(self, registration_id: str) -> Path:
        """Return the folder of the box of a registration."""
        return self.path / "boxes" / registration_id

    def boxes(self) -> Iterable[Path]:
        """Return the folders of all boxes."""
        boxes = self.path / "boxes"
        return [*boxes.iterdir()] if boxes.is_dir() else []

    def malformed(self) -> set[str]:
        """Return the ids of the registrations whose records are malformed."""
        found: set[str] = set()
        for key in self.table.keys_with(REGISTRATION):
            try:
                check_record(self.table.get(key))
            except (MessagingError, KeyError, TypeError, ValueError) as error:
                name = key.removeprefix(REGISTRATION)
                logger.warning("%s: the record of registration %r is malformed: %s", self.title, name, error)
                found.add(name)
        return found

    def set_aside(self, folder: Path) -> None:
        """Keep the events of a registration whose record is malformed."""
        place = self.path / "damaged" / folder.name
        try:
            place.parent.mkdir(exist_ok=True)
            folder.rename(place)
        except OSError as error:
            place = folder
            logger.warning("%s: %s is not moved: %s", self.title, folder, error)
        logger.warning(
            "%s: the events of registration %r are kept in %s; read them with `messaging journal`",
            self.title, folder.name, place,
        )  # fmt: skip

    def target(self, reference: Any) -> Any:
        """Return the target of a stored reference; ``None`` if it is not there in this run."""
        if reference is None:
            return None
        try:
            return self.listener(reference)
        except MessagingError as error:
            logger.warning("%s: delivery does not resume: %s; events are stored", self.title, error)
            return None


def check_bound(name: str, value: object) -> None:
    """Raise ``ArgumentError`` if an option is no bound."""
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
        raise ArgumentError(f"{name} must be an int from 1, or None, not {value!r:.80}")


def check_choice(name: str, value: object, known: tuple[str, ...]) -> None:
    """Raise ``ArgumentError`` if an option has none of the known values."""
    if not isinstance(value, str) or value not in known:
        raise ArgumentError(f"{name} must be one of {', '.join(known)}, not {value!r:.80}")


def check_record(values: Any) -> None:
    """Raise an error if the record of a registration is malformed."""
    lease_id, duration, end = values["lease"]
    if not isinstance(lease_id, str):
        raise DecodeError("the id of its lease is no text")
    seconds_of(duration)
    StoredTime.from_value(end)
    check_choice("keep", values["keep"], KEEP)
    check_choice("full", values["full"], BOX_FULL)
    check_bound("max_events", values["max_events"])
    kinds_of(values["refused"])


def kinds_of(value: Any) -> frozenset[EventKind]:
    """Return the refused kinds of a record. Raises ``TypeError``, ``InvalidEventError``."""
    return frozenset(check_kind(*each) for each in value)


#: bytes of the events of one registration
MAX_BYTES: Final = 2**30
_BOX: Final = "box "


class EventMailbox(Party):
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
        max_open_boxes: boxes that stay open while they are idle; each uses about ten file descriptors. ``None``: as
            many as a quarter of the file descriptors of the process allow.
        name: for the log.

    Raises:
        ArgumentError: an argument is not as described.
        JournalLockedError: another mailbox uses the folder.
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
        max_open_boxes: int | None = None,
        name: str = "mailbox",
    ) -> None:
        if not isinstance(name, str) or not name:
            raise ArgumentError(f"name must be a non-empty text, not {name!r:.80}")
        check_bound("max_events", max_events)
        check_bound("max_bytes", max_bytes)
        check_bound("max_open_boxes", max_open_boxes)
        check_choice("full", full, BOX_FULL)
        self.name = name
        self._max_events = max_events
        self._max_bytes = max_bytes
        self._full: BoxFull = full
        self._retry = retry or RetryPolicy()
        super().__init__(f"mailbox '{name}'", landlord, name, max_duration=max_duration)
        self._boxes = OpenBoxes(max_open_boxes or default_most(), name)
        # the lock guards the following three
        #: servers by their channels, at which this mailbox is reached by others
        self._channels: Counter[str] = Counter()
        self._kept: dict[str, MailboxRegistration] = {}
        #: registrations that have ended, and whose targets may have events
        self._ending: set[MailboxRegistration] = set()
        with on_failure(self.resources.close):
            try:
                self._folder = MailboxFolder(path, self, messaging, listeners)
            except JournalLockedError as error:
                raise JournalLockedError(str(path), f"another mailbox uses the folder: {error}") from None
            self._state, self._leases = self._folder.table, self._folder.leases
            self._manager = self.resources.enter_context(LeaseRenewalManager())
            self._notices = FailureNotices(self.title)
            self.resources.callback(self._notices.close)
            self._renewals = OwnedRenewals(self._state, messaging, self._manager, self.title, self._note_not_renewed)
            restored = self._recover()
        self._notices.start()
        for registration, refused, target in restored:  # last: a mailbox that cannot be opened delivers nothing
            registration.pushing.restore(refused, target)

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
            WouldBlockError: the thread runs an event loop: use ``asyncio.to_thread``.
        """
        check_choice("keep", keep, KEEP)
        check_bound("max_events", max_events)
        if full is not None:
            check_choice("full", full, BOX_FULL)
        self._refuse_closed()
        refuse_in_loop("the disk of a mailbox", "`await asyncio.to_thread(mailbox.register, ...)`")
        options = BoxOptions(keep, self._max_events if max_events is None else max_events, full or self._full)
        registration = self._made(options)
        registration.lease = self.landlord.grant(
            duration, lambda end: self._end(registration, end), about=f"{self.name}: {keep}"
        )
        with self._lock:
            self._kept[registration.id] = registration
        with on_failure(release, registration.lease):
            self._persist(registration, None, frozenset())
        return registration

    def _made(self, options: BoxOptions) -> MailboxRegistration:
        return MailboxRegistration(
            options, self._boxes, self._open_box, self._folder.box, self._persist, self._refuse_loop, self._retry,
            f"mailbox '{self.name}'",
        )  # fmt: skip

    def _open_box(self, registration: MailboxRegistration) -> Box:
        kind = QueueBox if registration.keep == "all" else LatestBox
        return kind(
            self._folder.box(registration.id), self._state, registration.id, registration.options,
            max_bytes=self._max_bytes, changed=registration.note_stored,
        )  # fmt: skip

    def note_served(self, channel: str) -> Callable[[], None]:
        """Note a channel at which others reach this mailbox; return the function that ends that. For servers."""
        with self._lock:
            self._channels[channel] += 1

        def end() -> None:
            with self._lock:
                self._channels[channel] -= 1
                self._channels += Counter()  # without the channels that have no server

        return end

    def _refuse_loop(self, target: Any) -> None:
        """Raise ``ArgumentError`` if events of this mailbox would come back to it."""
        is_own = isinstance(target, MailboxListener) and (self._kept.get(target.registration.id) is target.registration)
        if is_own or (isinstance(target, RemoteListener) and target.reference.channel in self._channels):
            raise ArgumentError("a listener of the mailbox itself cannot be a target: its events would go round")

    def _persist(self, registration: MailboxRegistration, target: Any, refused: frozenset[EventKind]) -> None:
        """Store the state of a registration. Raises ``JournalError``, ``ClosedError``."""
        if registration.id not in self._kept:
            return
        try:
            reference = None if target is None else self._folder.reference(target)
        except ArgumentError:
            reference = None  # a target of this process alone: after a restart the events are stored only
        self._leases.keep(
            registration.lease,
            {**registration.options._asdict(), "target": reference, "refused": [list(each) for each in refused]},
        )

    def _end(self, registration: MailboxRegistration, end: LeaseEnd) -> None:
        """End a registration with its lease. On a worker thread of the landlord: waits for no target."""
        if end is LeaseEnd.CLOSED:
            return
        with self._lock:
            if self._is_closed:
                return  # the folder may belong to another run
            self._ending.add(registration)
        error = UnknownLeaseError(f"mailbox '{self.name}': the registration {registration.id} has ended: {end.value}")
        stopped = registration.end(error)
        self._forget(registration)
        if stopped is None:
            self._remove(registration)
        else:
            stopped.listen(lambda: workers().submit(lambda: self._remove(registration)))

    def _forget(self, registration: MailboxRegistration) -> None:
        """Remove the records of a registration that has ended."""
        with self._lock:
            self._kept.pop(registration.id, None)
        self._notices.forget(registration)
        self._renewals.forget(registration.id)
        with contextlib.suppress(ClosedError):
            self._leases.forget(registration.id)

    def _remove(self, registration: MailboxRegistration) -> None:
        """Delete the events of a registration that has ended."""
        with self._lock:
            if registration not in self._ending:
                return  # the mailbox was closed meanwhile: the next run deletes them
            self._ending.discard(registration)
        registration.slot.abandon()
        try:
            self._state.remove(_BOX + registration.id)
        except ClosedError:
            pass
        except JournalError as error:
            logger.warning("mailbox '%s': the state of registration %s is kept: %s", self.name, registration.id, error)
        shutil.rmtree(self._folder.box(registration.id), ignore_errors=True)

    # --- leases of the owners

    def renew_lease(self, registration: MailboxRegistration, lease: Lease, duration: float = Lease.FOREVER) -> None:
        """Renew a lease for an owner that is away, as long as its registration lasts (EV.3.3).

        A lease of another process is renewed again after a restart of the mailbox. A later call for the same lease
        takes the place of an earlier one. When the lease cannot be renewed any more, a
        :class:`~messaging.remoteevent.RenewalFailureEvent` is stored for the owner.

        Args:
            registration: of the owner.
            lease: such as that of its registration at a generator.
            duration: seconds from now until which it is renewed.

        Raises:
            ArgumentError: an argument is not as described; or the lease is one of this mailbox, which would never end.
            UnknownLeaseError: the registration has ended.
            JournalError: it cannot be stored.
            ClosedError: the mailbox is closed.
            WouldBlockError: the thread runs an event loop: use ``asyncio.to_thread``.
        """
        check_instance("registration", registration, MailboxRegistration)
        check_instance("lease", lease, Lease)
        registration.refuse_ended()
        if lease.id in self._kept and self._is_own(lease):
            raise ArgumentError(f"mailbox '{self.name}': the lease {lease.id} is of a registration of this mailbox")
        refuse_in_loop("the disk of a mailbox", "`await asyncio.to_thread(mailbox.renew_lease, ...)`")
        self._renewals.keep(registration.id, lease, duration).result()
        if registration.id not in self._kept:  # it has ended meanwhile
            self._renewals.forget(registration.id)

    def _note_not_renewed(self, failure: RenewalFailure) -> None:
        """Tell an owner that a lease is not renewed any more: with an event in its box."""
        registration = self._kept.get(failure.owner)
        if registration is None:
            failure.told()
            return
        self._notices.add(registration, failure)
        if failure.owner not in self._kept:  # it has ended meanwhile
            self._notices.forget(registration)

    def _is_own(self, lease: Lease) -> bool:
        grantor = lease.grantor
        return grantor is self.landlord or (isinstance(grantor, RemoteGrantor) and grantor.channel in self._channels)

    # --- restart

    def _recover(self) -> list[tuple[MailboxRegistration, frozenset[EventKind], Any]]:
        """Continue with the registrations of an earlier run; return them with their refused kinds and targets."""
        restored: list[tuple[MailboxRegistration, frozenset[EventKind], Any]] = []
        malformed = self._folder.malformed()
        for key, grant, values in self._leases.kept():
            if key.removeprefix(REGISTRATION) in malformed:
                continue
            registration = self._made(BoxOptions(values["keep"], values["max_events"], values["full"]))
            registration.lease = grant(partial(self._end, registration))
            with self._lock:
                self._kept[registration.id] = registration
            restored.append((registration, kinds_of(values["refused"]), self._folder.target(values.get("target"))))
        self._renewals.recover(self._kept)
        for folder in self._folder.boxes():
            if folder.name in malformed:
                self._folder.set_aside(folder)
            elif folder.name not in self._kept:  # the lease has ended, before or while the mailbox was closed
                shutil.rmtree(folder, ignore_errors=True)
                self._state.forget(_BOX + folder.name)  # a failing disk does not hold up the opening
        return restored

    # --- state and life cycle

    def registration(self, registration_id: str) -> MailboxRegistration:
        """Return a registration.

        Raises:
            UnknownLeaseError: there is none, or it has ended.
            ClosedError: the mailbox is closed; the registration may continue with its next run.
        """
        found = self._kept.get(registration_id)
        if found is None:
            self._refuse_closed()
            raise UnknownLeaseError(f"mailbox '{self.name}': no registration {registration_id!r:.80}")
        found.refuse_ended()
        return found

    def registrations(self) -> list[MailboxRegistration]:
        """Return the registrations, in the order of their making."""
        with self._lock:
            return [each for each in self._kept.values() if not each.lease.is_ended]

    @property
    def open_boxes(self) -> int:
        """Number of boxes that are open now."""
        return len(self._boxes)

    def _stop(self) -> None:
        """See ``Party``. Waits end with ``ClosedError``; events that a target has not acknowledged come again."""
        with self._lock:
            kept = [*self._kept.values()]
        self._renewals.close()
        self._manager.close()
        error = ClosedError(f"mailbox '{self.name}': closed")
        stopped = [*self._notices.close(), *(each.end(error) for each in kept)]
        wait_for_all([each for each in stopped if each is not None])
        self._leases.close()
        with self._lock:
            ending, self._ending = [*self._ending], set()
        with contextlib.ExitStack() as slots:
            for each in kept:
                slots.callback(each.slot.close)
            for registration in ending:
                slots.callback(registration.slot.abandon)

    def __len__(self) -> int:
        """Return the number of registrations."""
        return len(self._kept)

    def __bool__(self) -> bool:
        """Return ``True``, also when it is empty."""
        return True

    @tolerant
    def __repr__(self) -> str:
        return f"<EventMailbox {self.name!r} of {len(self._kept)} registrations>"
