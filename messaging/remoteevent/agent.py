"""Store-and-forward agents: they keep events on the disk until their listeners have them (EV.3.1).

A folder holds the events and the registrations::

    DIRECTORY/
      events/     journal of events
      state/      registrations, and what the agent has received

**Acknowledgement.** An event is acknowledged to its sender when it is on the disk, as the fsync policy says; an agent
that cannot store it fails the notification, and the sender tries again. An event that arrives twice is stored once.

**Threads.** Each listener has a delivery of its own (:mod:`messaging.remoteevent.delivery`), so one that is away delays
no other one. The lock of the agent guards its registrations; no code of the application runs under it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from messaging.dispatch.eventdata import from_portable, to_portable
from messaging.environment.signals import on_failure
from messaging.errors import ArgumentError
from messaging.errors.checks import check_instance
from messaging.errors.text import SafeLog, tolerant
from messaging.execution import Promise, refuse_in_loop
from messaging.journal.options import Fsync, Full
from messaging.leases import Landlord, Lease, LeaseEnd, LeaseRenewalManager, release
from messaging.remoteevent.delivery import POSITION, DeliveryCounts, EventDelivery, Interest, RetryPolicy, wait_for_all
from messaging.remoteevent.event import EventRegistration, RemoteEvent, check_kind, check_sequence_number
from messaging.remoteevent.event_journal import channel_of
from messaging.remoteevent.intake import EventIntake
from messaging.remoteevent.listener import BatchListener, Outcome, as_target
from messaging.remoteevent.party import EventFolder, Party
from messaging.remoteevent.renewals import OwnedRenewals

if TYPE_CHECKING:
    from messaging.instance import Messaging

logger = SafeLog(__name__)

#: bytes of the events that wait
MAX_BYTES: Final = 2**30
#: name of the position of the target that gets everything
_TARGET: Final = "target"


class StoreAndForwardAgent(BatchListener, Party):
    """Keeps events on the disk and forwards them to its listeners (EV.3.1). A listener; thread safe; a context manager.

    Used in one of two ways, or in both:

    - as the listener of a registration at a generator, with ``target``: what arrives is forwarded unchanged;
    - by a generator that leaves its registrations to the agent: see :meth:`register`.

    Args:
        path: its folder.
        target: gets every event, unchanged; ``None``: only registered listeners get events.
        retry: what happens after a notification failed; by default it is tried again until the lease ends.
        messaging: reaches the listeners of other processes.
        listeners: listeners of this process by name: registrations of these survive a restart.
        landlord: grants the leases; ``None``: one of its own, which grants up to an hour.
        fsync: when an event counts as stored, see :meth:`Journal.open <messaging.journal.Journal.open>`.
        max_bytes: bytes of the events that wait; ``None``: unlimited.
        full: what happens to an event that has no room: ``"block"`` and ``"reject"`` fail the notification, after 30 s
            or at once; ``"drop_oldest"`` drops the oldest events, counted.
        name: for the log.

    Raises:
        ArgumentError: an argument is not as described.
        JournalError: the folder cannot be used.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        target: Any = None,
        retry: RetryPolicy | None = None,
        messaging: Messaging | None = None,
        listeners: Mapping[str, Any] | None = None,
        landlord: Landlord | None = None,
        fsync: Fsync = "always",
        max_bytes: int | None = MAX_BYTES,
        full: Full = "reject",
        name: str = "agent",
    ) -> None:
        if not isinstance(name, str) or not name:
            raise ArgumentError(f"name must be a non-empty text, not {name!r:.80}")
        everything = None if target is None else as_target(target)
        self.name = name
        self._retry = retry or RetryPolicy()
        super().__init__(f"agent '{name}'", landlord, name)
        #: by the channel of their kind; guarded by the lock
        self._forwardings: dict[str, tuple[Interest, ...]] = {}
        resources = self.resources
        with on_failure(resources.close):
            self._folder = EventFolder(path, self, messaging, listeners, fsync=fsync, max_bytes=max_bytes, full=full)
            self._events = self._folder.events
            self._manager = resources.enter_context(LeaseRenewalManager())
            self._renewals = OwnedRenewals(self._folder.table, messaging, self._manager, self.title)
            self._intake = EventIntake(self._events, self._folder.table, "checkpoint", self.title, self._forward)
            self._intake.recover()
            self._target: EventDelivery | None = None
            if everything is None:
                self._release_target()
            else:
                begin = self._events.journal.begin
                queue = self._events.queue(_TARGET, None, lambda event: event, start=begin)
                self._target = EventDelivery(name, everything, queue, policy=self._retry)
            self._recover_registrations()
            resources.callback(self._intake.close_checkpoint)
        for each in self._deliveries():  # last: nothing is delivered by an agent that could not be opened
            each.wake()

    def _release_target(self) -> None:
        """Forget the position of the target of an earlier run, unless events wait for it."""
        position = self._events.journal.cursors().get(_TARGET)
        if position is None:
            return
        waiting = self._events.journal.end - position
        if waiting:
            logger.warning(
                "agent '%s': %d events wait for the target of an earlier run: they are kept; open the agent with a "
                "target to deliver them", self.name, waiting,
            )  # fmt: skip
        else:
            self._events.forget(_TARGET)  # it would keep all further events

    # --- registering

    def register(
        self,
        source: str,
        event_id: int | str,
        handback: Any,
        listener: Any,
        duration: float = Lease.ANY,
        *,
        upstream: Lease | None = None,
        sequence_number: int | None = None,
    ) -> EventRegistration:
        """Forward the events of a kind to a listener, from the next one on.

        Args:
            source, event_id: the kind, as the registration at the generator has it.
            handback: replaces that of the events; ``None``: none.
            listener: see :meth:`EventGenerator.register <messaging.remoteevent.EventGenerator.register>`.
            duration: seconds that are asked for. It may be longer than the lease of the agent at the generator.
            upstream: lease of the agent at the generator. It is renewed as long as this registration lasts; one of
                another process also after a restart.
            sequence_number: of the last event before the registration; ``None``: the last one that arrived.

        Raises:
            ArgumentError: an argument is not as described; or the registration could not be restored after a restart,
                because the listener is neither in another process nor one of ``listeners``.
            InvalidEventError: the handback has no form in JSON.
            LeaseDeniedError, JournalError, ClosedError: it cannot be registered.
            WouldBlockError: the thread runs an event loop: use ``asyncio.to_thread``. Nothing was done.
        """
        self._refuse_closed()
        refuse_in_loop("the disk of an agent", "`await asyncio.to_thread(agent.register, ...)`")
        kind = check_kind(source, event_id)
        form = None if handback is None else from_portable(to_portable(handback))
        self._folder.reference(listener)
        after = self._intake.last(*kind) if sequence_number is None else check_sequence_number(sequence_number)
        forwarding = Interest(kind, listener, form, after)
        lease = forwarding.lease = self.landlord.grant(duration, about=f"{self.name} {kind!r}")
        with on_failure(self._undo, forwarding):
            # events since the number may be stored already
            self._add(forwarding, None if sequence_number is None else self._events.journal.begin)
            self._folder.keep(forwarding, source=source)
            if upstream is not None:
                self._renewals.keep(lease.id, upstream).result()
        # last: it is called at once if the lease has ended meanwhile
        lease.when_ended(lambda end: self._end(forwarding, end))
        forwarding.delivery.wake()
        return EventRegistration(event_id, source, lease, after)

    def _add(self, forwarding: Interest, start: int | None) -> None:
        """Add a registration, whose delivery is not begun; ``start``: see ``EventFolder.queue``."""
        channel = channel_of(forwarding.kind)
        queue = self._folder.queue(forwarding, start)
        target = as_target(forwarding.listener)
        forwarding.begin(f"{self.name} {forwarding.kind}", target, queue, self._retry, ends_when_gone=False)
        with self._lock:
            self._forwardings[channel] = (*self._forwardings.get(channel, ()), forwarding)

    def _undo(self, forwarding: Interest) -> None:
        """End a registration that failed."""
        release(forwarding.lease)
        self._end(forwarding, LeaseEnd.CANCELLED)

    def _end(self, forwarding: Interest, end: LeaseEnd) -> None:
        """End a registration with its lease. On a worker thread, or of one that failed."""
        forwarding.stop()
        if end is not LeaseEnd.CLOSED:
            self._forget(forwarding)
        channel = channel_of(forwarding.kind)
        with self._lock:  # last: closing looks for registrations that are not forgotten yet
            left = tuple(each for each in self._forwardings.get(channel, ()) if each is not forwarding)
            if left:
                self._forwardings[channel] = left
            else:
                self._forwardings.pop(channel, None)

    def _forget(self, forwarding: Interest) -> None:
        """Keep a registration no longer."""
        self._renewals.forget(forwarding.lease.id)
        self._folder.forget(forwarding)

    # --- receiving

    def deliver(self, events: Sequence[RemoteEvent], /) -> Promise[list[Outcome]]:
        """Store events; see :class:`~messaging.remoteevent.listener.EventTarget`."""
        return self._intake.store(events)

    def _forward(self, channels: Sequence[str]) -> None:
        """Forward stored events of these channels. On the thread that wrote them."""
        if self._target is not None:
            self._target.wake()
        if self._forwardings:
            for channel in dict.fromkeys(channels):
                for each in self._forwardings.get(channel, ()):
                    each.delivery.wake()

    def _recover_registrations(self) -> None:
        for forwarding, grant in self._folder.interests():
            forwarding.lease = grant(lambda _end: None)
            self._add(forwarding, None)
            forwarding.lease.when_ended(partial(self._end, forwarding))
        # a crash may have come between two steps of register()
        known = [each.lease.id for each in self._all_forwardings()]
        self._folder.remove_others(known)
        self._renewals.recover(known)

    # --- state and life cycle

    @property
    def stored(self) -> int:
        """Number of events that were stored since the agent was opened."""
        return self._intake.stored

    @property
    def duplicates(self) -> int:
        """Number of events that had arrived before."""
        return self._intake.duplicates

    @property
    def pending(self) -> int:
        """Number of stored events that ``target``, or else the slowest registered listener, has not acknowledged."""
        journal = self._events.journal
        positions = [at for name, at in journal.cursors().items() if name == _TARGET or name.startswith(POSITION)]
        return journal.end - min(positions, default=journal.end)

    @property
    def dropped(self) -> int:
        """Number of events that were dropped to make room, with ``full="drop_oldest"``."""
        return self._events.journal.dropped

    def counts(self, registration: EventRegistration | None = None) -> DeliveryCounts | None:
        """Return the numbers of notifications of a registration, or of ``target``; ``None`` if there is none."""
        if registration is None:
            return None if self._target is None else self._target.counts
        check_instance("registration", registration, EventRegistration)
        for each in self._forwardings.get(channel_of(registration.kind), ()):
            if each.lease.id == registration.lease.id:
                return each.delivery.counts
        return None

    def resume(self) -> None:
        """Try again now, also where the listener was gone: it is back."""
        for each in self._deliveries():
            each.enable()

    def _all_forwardings(self) -> list[Interest]:
        with self._lock:
            return [each for several in self._forwardings.values() for each in several]

    def _deliveries(self) -> list[EventDelivery]:
        deliveries = [each.delivery for each in self._all_forwardings()]
        return deliveries if self._target is None else [self._target, *deliveries]

    def _stop(self) -> None:
        """See ``Party``."""
        self._intake.refuse_further()
        self._renewals.close()
        self._manager.close()
        wait_for_all([each.close() for each in self._deliveries()])
        self._folder.leases.close()

    @tolerant
    def __repr__(self) -> str:
        return f"<StoreAndForwardAgent {self.name!r}>"
