"""Generators and third parties for other processes: one server for all of them, and stubs (EV.3.4).

A party serves, on its channel, what it can do (:mod:`messaging.calls`):

==================================  =================================================================================
operation                           of
==================================  =================================================================================
``register``                        generators, agents and multiplexers
``notify``                          agents, filters, multiplexers, demultiplexers: every listener
``renew``, ``cancel``, ``leases``   parties that grant leases, see :mod:`messaging.leases.remote`
==================================  =================================================================================

**Threads.** Operations run on worker threads. A registration at a persistent party waits for the disk.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Self

from messaging.calls import CallServer, Operation, call
from messaging.errors import ArgumentError, DecodeError, OutcomeUnknownError, check_instance
from messaging.leases import (
    Landlord,
    Lease,
    LeaseDirectory,
    lease_from_value,
    lease_operations,
    lease_time,
    lease_to_value,
    seconds_of,
    value_of,
)
from messaging.leases.lease import check_duration
from messaging.model import check_name
from messaging.remoteevent.event import EventRegistration, check_event_id, check_sequence_number
from messaging.remoteevent.remote_listener import ListenerReference, LocalListeners, NotifyOperation, RemoteListener

if TYPE_CHECKING:
    from messaging.execution import Promise
    from messaging.instance import Messaging
    from messaging.remoteevent.event import EventId


class EventServer:
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
        self._messaging = messaging
        self._party = party
        self.channel = check_name(channel)
        operations: dict[str, Operation] = {}
        if callable(getattr(party, "deliver", None)):
            operations["notify"] = NotifyOperation(lambda name: None if name else party)
        if callable(getattr(party, "register", None)):
            operations["register"] = self._register
            check_instance("the landlord of party", getattr(party, "landlord", None), Landlord)
            operations |= lease_operations(party.landlord)
        if not operations:
            raise ArgumentError(f"{type(party).__name__} is neither a generator nor a third party of remote events")
        self._server = CallServer(messaging, channel, operations)
        try:
            self._directory = LeaseDirectory(messaging, channel, party.landlord) if "renew" in operations else None
        except BaseException:
            self._server.close()
            raise

    @property
    def ready(self) -> Promise[None]:
        """The promise that the broker has confirmed the subscription."""
        return self._server.ready

    def _register(self, arguments: Mapping[str, Any], _body: bytes) -> dict[str, Any]:
        listener = RemoteListener(self._messaging, ListenerReference.from_value(arguments.get("listener")))
        source = arguments.get("source")
        kind = () if source is None else (source,)
        registration: EventRegistration = self._party.register(
            *kind, arguments.get("id"), arguments.get("handback"), listener, seconds_of(arguments.get("duration"))
        )
        return {
            "id": registration.id,
            "source": registration.source,
            "sequence": registration.sequence_number,
            "lease": lease_to_value(registration.lease),
            "fully_ordered": registration.is_fully_ordered,
        }

    def close(self) -> None:
        """Answer no further requests. Idempotent."""
        self._server.close()
        if self._directory is not None:
            self._directory.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class RemoteGenerator:
    """The way to a generator, an agent or a multiplexer in another process. Thread safe; a context manager.

    Args:
        messaging: an instance that is connected to the broker of the generator.
        channel: of its :class:`EventServer`.
        timeout: seconds until a request fails; ``None``: the setting ``timeout`` of the instance.

    Raises:
        InvalidChannelError: the channel is malformed.
    """

    def __init__(self, messaging: Messaging, channel: str, *, timeout: float | None = None) -> None:
        self._messaging = messaging
        self.channel = check_name(channel)
        self._timeout = timeout
        self._listeners = LocalListeners(messaging)

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
        reference, remove = self._listeners.reference(listener)
        arguments: dict[str, Any] = {
            "id": event_id,
            "handback": handback,
            "listener": reference.to_value(),
            "duration": value_of(asked),
        }
        if source is not None:
            arguments["source"] = source
        asked_at = lease_time()

        def convert(result: Any) -> EventRegistration:
            if not isinstance(result, dict):
                raise DecodeError("not a registration")
            lease = lease_from_value(
                self._messaging, self.channel, result["lease"], asked, asked_at, timeout=self._timeout
            )
            return EventRegistration(
                check_event_id(result["id"]),
                str(result["source"]),
                lease,
                check_sequence_number(result["sequence"]),
                is_fully_ordered=result["fully_ordered"] is True,
            )

        try:
            promise = call(self._messaging, self.channel, "register", arguments, timeout=self._timeout, convert=convert)
        except BaseException:
            remove()
            raise
        promise.listen(lambda: _remove_refused(promise, remove))
        return promise

    def close(self) -> None:
        """Make the listeners of this process unreachable. Registrations stay until their leases end. Idempotent."""
        self._listeners.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _remove_refused(promise: Promise[EventRegistration], remove: Callable[[], object]) -> None:
    """Remove the listener of a registration that failed: nothing will be sent to it."""
    was_looked_at = promise.looked_at
    error = promise.exception(0)
    promise.looked_at = was_looked_at  # by the application
    # if the outcome is not known there may be a registration, whose events are taken until its lease ends
    if error is not None and not isinstance(error, OutcomeUnknownError):
        remove()
