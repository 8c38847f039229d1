"""Generators and third parties for other processes: one server for all of them, and stubs (EV.3.4).

A party serves, on its channel, what it can do: ``remote_listener.LISTENERS`` notifies it, :data:`GENERATORS` registers
at it, and ``leases.remote.LEASES`` renews its leases.

**Threads.** Operations run on worker threads. A registration at a persistent party waits for the disk.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from messaging.dispatch.calls import PLAIN, Function, Interface, Operation, WireForm
from messaging.errors import ArgumentError, OutcomeUnknownError
from messaging.errors.checks import check_instance
from messaging.leases import LEASE, SECONDS, Landlord, Lease, LeasingServer, lease_from_value, lease_time
from messaging.leases.lease import check_duration
from messaging.remoteevent.event import EventRegistration, check_event_id, check_sequence_number
from messaging.remoteevent.remote_listener import (
    LISTENERS,
    REFERENCE,
    ListenerReference,
    NotifyOperation,
    RemoteListener,
    RemoteParty,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from messaging.execution import Promise
    from messaging.instance import Messaging
    from messaging.remoteevent.event import EventId


def _write_registration(registration: EventRegistration) -> dict[str, Any]:
    return {
        "id": registration.id,
        "source": registration.source,
        "sequence": registration.sequence_number,
        "lease": LEASE.write(registration.lease),
        "fully_ordered": registration.is_fully_ordered,
    }


#: how other processes register; a generator has its own source, agents and multiplexers need one
GENERATORS: Final = Interface(
    register=Operation(
        WireForm("a registration", _write_registration),
        id=PLAIN,
        handback=PLAIN,
        listener=REFERENCE,
        duration=SECONDS,
        source=PLAIN,
    )
)


class EventServer(LeasingServer):
    """Makes a generator, an agent, a filter or another party available to other processes. Thread safe.

    A context manager, which closes it. The party stays as it is.

    Args:
        messaging: an instance with requests. It also reaches the listeners that are registered.
        channel: of the party; its reference for listeners is ``ListenerReference(channel)``.
        party: what it can do is found out.

    Raises:
        ArgumentError: the party can neither be notified nor registered at.
        InvalidChannelError, UnsupportedFeatureError, SubscriptionRefusedError: as ``CallServer``.
    """

    def __init__(self, messaging: Messaging, channel: str, party: Any) -> None:
        self._party = party
        operations: dict[str, Function] = {}
        landlord = None
        if callable(getattr(party, "deliver", None)):
            notify = NotifyOperation(lambda name: None if name else party)
            operations |= LISTENERS.served(notify=notify)
        if callable(getattr(party, "register", None)):
            landlord = getattr(party, "landlord", None)
            check_instance("the landlord of party", landlord, Landlord)
            operations |= GENERATORS.served(register=self._register)
        if not operations:
            raise ArgumentError(f"{type(party).__name__} is neither a generator nor a third party of remote events")
        super().__init__(messaging, channel, operations, landlord)

    def _register(
        self, event_id: EventId, handback: Any, listener: ListenerReference, duration: float, source: str | None
    ) -> EventRegistration:
        kind = (event_id,) if source is None else (source, event_id)
        found: EventRegistration = self._party.register(
            *kind, handback, RemoteListener(self.messaging, listener), duration
        )
        return found


class RemoteGenerator(RemoteParty):
    """The way to a generator, an agent or a multiplexer in another process. Thread safe; a context manager.

    The channel is that of its :class:`EventServer`; see :class:`~messaging.dispatch.calls.RemoteObject`.
    """

    interface = GENERATORS

    def register(
        self,
        event_id: EventId,
        handback: Any,
        listener: Any,
        duration: float = Lease.ANY,
        *,
        source: str | None = None,
    ) -> Promise[EventRegistration]:
        """Register interest; see :meth:`EventGenerator.register <messaging.remoteevent.EventGenerator.register>`.

        Args:
            event_id, handback, duration: as there.
            listener: a listener in any process: a ``RemoteListener`` or a ``ListenerReference``; or one of this
                process, which is made reachable at the same instance until :meth:`close`.
            source: of the events; for agents and multiplexers.

        Returns:
            The promise of the registration. It fails as ``register`` there, or as requests do.

        Raises:
            ArgumentError, InvalidEventError: an argument is not as described.
        """
        check_event_id(event_id)
        asked = check_duration(duration)
        reference, remove = self.reach(listener)
        arguments = {"id": event_id, "handback": handback, "listener": reference, "duration": asked}
        if source is not None:
            arguments["source"] = source
        asked_at = lease_time()

        def convert(result: Any) -> EventRegistration:
            lease = lease_from_value(
                self.messaging, self.channel, result["lease"], asked, asked_at, timeout=self.timeout
            )
            return EventRegistration(
                check_event_id(result["id"]),
                str(result["source"]),
                lease,
                check_sequence_number(result["sequence"]),
                is_fully_ordered=result["fully_ordered"] is True,
            )

        try:
            promise = self.call("register", arguments, convert=convert)
        except Exception:
            remove()
            raise
        promise.listen(lambda: _remove_refused(promise, remove))
        return promise


def _remove_refused(promise: Promise[EventRegistration], remove: Callable[[], object]) -> None:
    """Remove the listener of a registration that failed: nothing will be sent to it."""
    was_retrieved = promise.was_retrieved
    error = promise.exception(0)
    promise.was_retrieved = was_retrieved  # by the application
    # if the outcome is not known there may be a registration, whose events are taken until its lease ends
    if error is not None and not isinstance(error, OutcomeUnknownError):
        remove()
