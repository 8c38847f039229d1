"""Listeners, generators and third parties of other processes: stubs, and servers that answer them (EV.3.4).

A party serves, on its channel, what it can do: :data:`LISTENERS` notifies it, :data:`GENERATORS` registers at it, and
``leases.remote.LEASES`` renews its leases.

A notification is a call (:mod:`messaging.dispatch.calls`) with the operation ``notify``: its argument ``listener``
names one of the listeners behind the channel, and its body has one line for each event
(:mod:`messaging.remoteevent.event`). The result is a list with ``null`` for each event that the listener took, and
``[class, text]`` of the error for others.

**Threads.** Operations run on worker threads. A registration at a persistent party waits for the disk. A server passes
one batch at a time to each listener; the batches of several senders wait in a queue, which is bounded by their number
and their bytes. One that has waited longer than its sender does is not passed on.
"""

from __future__ import annotations

import math
import secrets
import threading
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Self

from messaging.dispatch.calls import (
    PLAIN,
    CallServer,
    Function,
    Interface,
    Operation,
    RemoteObject,
    WireForm,
    checked_limit,
    described,
    error_of,
)
from messaging.errors import (
    ArgumentError,
    BoundReachedError,
    ClosedError,
    ConversionError,
    DeadlineError,
    DecodeError,
    ListenerGoneError,
    MessagingError,
    OutcomeUnknownError,
    PayloadTooLargeError,
    ReplyError,
)
from messaging.errors.checks import check_instance
from messaging.execution import Closeable, Promise, clock, workers
from messaging.leases import LEASE, SECONDS, Landlord, Lease, LeasingServer, lease_from_value, lease_time
from messaging.leases.lease import check_duration
from messaging.model import check_name
from messaging.remoteevent.event import (
    EventRegistration,
    check_event_id,
    check_sequence_number,
    decode_event,
    encode_event,
)
from messaging.remoteevent.listener import (
    BatchListener,
    Disposition,
    EventTarget,
    Outcome,
    WantedEvents,
    as_target,
    disposition,
    outcomes_of,
    settled,
)

if TYPE_CHECKING:
    from messaging.instance import Messaging
    from messaging.remoteevent.event import EventId, RemoteEvent


#: events of the first request
_FIRST: Final = 32
#: bytes of the events of one request, unless one alone has more
_BATCH_BYTES: Final = 128 * 2**10
#: how long a stub waits for the outcomes, seconds
TIMEOUT: Final = 10.0
#: longest wait that a sender can ask for, seconds
_MAX_TIMEOUT: Final = 300.0
#: batches that wait for one listener, and bytes of those that wait for all listeners of a channel
_MAX_WAITING: Final = 1000
_MAX_WAITING_BYTES: Final = 64 * 2**20
#: how long after its start a server waits for listeners that an earlier run had, seconds
STARTING: Final = 10.0
#: bytes of the text of an error
_REASON: Final = 500


class ListenerReference(NamedTuple):
    """Where a listener is reached, by any process that is connected to the same broker.

    Attributes:
        channel: of its server.
        id: its name there.
    """

    channel: str
    id: str = ""

    def to_value(self) -> list[str]:
        """Return the reference in portable form."""
        return [self.channel, self.id]

    @classmethod
    def from_value(cls, value: object) -> Self:
        """Return the reference of a portable form. Raises ``DecodeError``, ``InvalidChannelError``."""
        if not isinstance(value, list) or len(value) != 2 or not all(isinstance(each, str) for each in value):
            raise DecodeError(f"a reference to a listener must be [channel, id], not {value!r:.80}")
        return cls(check_name(value[0]), value[1])


#: a reference to a listener
REFERENCE: Final = WireForm("[channel, id]", ListenerReference.to_value, ListenerReference.from_value)


def _seconds(value: Any) -> float:
    """Return how long a sender waits."""
    return min(value, _MAX_TIMEOUT) if isinstance(value, (int, float)) else TIMEOUT


def _write_outcomes(outcomes: list[Outcome]) -> list[Any]:
    found = [None if each is None else described(each) for each in outcomes]
    return [each if each is None else [each[0], each[1][:_REASON]] for each in found]


def _read_outcomes(value: Any) -> list[Outcome]:
    if not isinstance(value, list) or not value:
        raise TypeError("no list of outcomes")
    return [None if each is None else error_of(each) for each in value]


#: how senders notify the listeners behind a channel: the body has the lines of the events
LISTENERS: Final = Interface(
    notify=Operation(
        WireForm("outcomes", _write_outcomes, _read_outcomes),
        listener=WireForm("an id", read=str, missing=""),
        timeout=WireForm("seconds", read=_seconds),
        has_body=True,
    )
)


class RemoteListener(RemoteObject, BatchListener):
    """A stub of a listener in another process. Thread safe.

    Args:
        messaging: an instance that is connected to the broker of the listener, with requests.
        reference: of the listener; a text is the channel of a server with one listener.
        timeout: seconds until a notification without an answer counts as failed.

    Raises:
        ArgumentError, InvalidChannelError: an argument is not as described.
    """

    interface = LISTENERS

    def __init__(self, messaging: Messaging, reference: ListenerReference | str, *, timeout: float = TIMEOUT) -> None:
        self.reference = ListenerReference(reference) if isinstance(reference, str) else reference
        check_instance("reference", self.reference, ListenerReference)
        super().__init__(messaging, self.reference.channel, timeout=checked_limit(timeout))
        self._arguments = {"listener": self.reference.id, "timeout": self.timeout}
        #: events of the next request, and whether the listener takes fewer at once than it was sent
        self._most = _FIRST
        self._is_limited = False

    def deliver(self, events: Sequence[RemoteEvent], /) -> Promise[list[Outcome]]:
        """See :class:`~messaging.remoteevent.listener.EventTarget`: the events travel in one request."""
        lines: list[bytes] = []
        size = 0
        for event in events[: self._most]:
            try:
                line = encode_event(event)
            except (MessagingError, RecursionError) as error:
                if not lines:
                    nested = DecodeError("an event is nested too deeply")
                    return settled([error if isinstance(error, MessagingError) else nested])
                break  # the next batch begins with it
            size += len(line)
            if lines and size > _BATCH_BYTES:
                break
            lines.append(line)
        promise: Promise[list[Outcome]] = Promise(lambda: f"notify the listener at {self.reference.channel!r}")
        try:
            answer = self._notify(lines)
        except PayloadTooLargeError as error:
            return settled([error])  # the first event is too large
        except MessagingError as error:
            return settled([_of_call(error)])

        def settle() -> None:
            error = answer.exception(0)
            outcomes: list[Outcome] = answer.result(0) if error is None else [_of_call(error)]
            if outcomes[-1] is None:
                self._adapt(sent=len(lines), taken=len(outcomes))
            promise.resolve(outcomes)

        answer.listen(settle)
        return promise

    def _adapt(self, *, sent: int, taken: int) -> None:
        """Send as many events with the next request as the listener takes at once."""
        if taken < sent:
            self._most, self._is_limited = taken, True
        elif sent >= self._most:
            self._most += 1 if self._is_limited else self._most

    def _notify(self, lines: list[bytes]) -> Promise[list[Outcome]]:
        """Send the first events: as many as the broker takes in one message. Raises ``MessagingError``."""
        while True:
            try:
                return self.call("notify", self._arguments, b"\n".join(lines))
            except PayloadTooLargeError:
                if len(lines) == 1:
                    raise
                lines = lines[: len(lines) // 2]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RemoteListener) and (self.reference, id(self.messaging)) == (
            other.reference,
            id(other.messaging),
        )

    def __hash__(self) -> int:
        return hash(self.reference)


def _of_call(error: MessagingError) -> MessagingError:
    """Return the failure of a call as an outcome: it says nothing against the events."""
    if disposition(error) is Disposition.BAD_EVENT:
        return ReplyError(type(error).__name__, str(error))
    return error


class NotifyOperation:
    """The operation ``notify``: passes events to the listeners behind one channel. Thread safe.

    Args:
        find: returns the listener with an id; ``None`` if there is none.
    """

    def __init__(self, find: Callable[[str], EventTarget | None]) -> None:
        self._find = find
        self._lock = threading.Lock()  # guards the following two
        #: the notifications that wait behind the one that a listener has; of listeners that have one
        self._waiting: dict[str, deque[_Notification]] = {}
        self._bytes = 0

    def __call__(self, name: str, timeout: float, body: bytes) -> Promise[list[Outcome]]:
        """Pass the events of ``body`` to the listener ``name``, within ``timeout`` seconds; promise the outcomes."""
        if self._find(name) is None:
            raise _gone(name)
        notification = _Notification(name, body, clock.monotonic() + timeout)
        with self._lock:
            waiting = self._waiting.get(name)
            if waiting is not None:
                if len(waiting) >= _MAX_WAITING or self._bytes + len(body) > _MAX_WAITING_BYTES:
                    raise BoundReachedError(f"{len(waiting)} notifications wait for the listener already")
                waiting.append(notification)
                self._bytes += len(body)
                return notification.promise
            self._waiting[name] = deque()
        self._work(notification)
        return notification.promise

    def _work(self, notification: _Notification | None) -> None:
        """Pass notifications to a listener, as long as it answers at once."""
        while notification is not None and self._pass_on(notification):
            notification = self._next(notification.name)

    def _next(self, name: str) -> _Notification | None:
        with self._lock:
            waiting = self._waiting[name]
            if not waiting:
                del self._waiting[name]
                return None
            found = waiting.popleft()
            self._bytes -= len(found.body)
        return found

    def _pass_on(self, notification: _Notification) -> bool:
        """Notify the listener; return whether the request is answered already."""
        promise = notification.promise
        try:
            if clock.monotonic() >= notification.deadline:
                raise DeadlineError("the notification waited for earlier ones longer than its sender waits")
            target = self._find(notification.name)
            if target is None:
                raise _gone(notification.name)
            events, refused = _decoded(notification.body)
            if not events:
                promise.resolve(refused)
                return True
            answer = target.deliver(WantedEvents(events, lambda: self._has(notification.name, target)))
            if not answer.done():
                answer.listen(lambda: self._settle_later(notification, refused, answer))
                return False
            promise.resolve([*refused, *outcomes_of(answer)])
        except MessagingError as error:
            promise.reject(error)
        except Exception as error:  # noqa: BLE001  # a target of the application
            promise.reject(ReplyError(type(error).__name__, str(error)[:_REASON]))
        return True

    def _has(self, name: str, target: EventTarget) -> bool:
        """Return whether a listener is still the one with a name."""
        try:
            return self._find(name) is target
        except MessagingError:
            return False

    def _settle_later(
        self, notification: _Notification, refused: list[Outcome], answer: Promise[list[Outcome]]
    ) -> None:
        """Answer the request, and go on with the next one. On the thread that resolved the outcomes."""
        notification.promise.resolve([*refused, *outcomes_of(answer)])
        following = self._next(notification.name)
        if following is not None:
            workers().submit(lambda: self._work(following))


class _Notification:
    """One request: its events, and the promise of the reply."""

    __slots__ = ("body", "deadline", "name", "promise")

    def __init__(self, name: str, body: bytes, deadline: float) -> None:
        #: id of the listener
        self.name = name
        self.body = body
        self.deadline = deadline
        self.promise: Promise[list[Outcome]] = Promise("notify a listener")
        self.promise.was_retrieved = True


def _decoded(body: bytes) -> tuple[list[RemoteEvent], list[Outcome]]:
    """Return the first events of a body that can be decoded, and the outcomes of those before them."""
    events: list[RemoteEvent] = []
    refused: list[Outcome] = []
    for line in body.split(b"\n"):
        try:
            events.append(decode_event(line))
        except (DecodeError, ConversionError) as error:
            if events:
                break  # first the events before it
            refused.append(error)
    return events, refused


def _gone(name: str) -> ListenerGoneError:
    return ListenerGoneError(f"there is no listener {name!r:.80}")


class ListenerServer(CallServer):
    """Makes listeners of this process reachable for others. Thread safe; a context manager, which closes it.

    With a channel that the program names, an earlier run may have had listeners there. So for 10 s after its start, the
    senders to a listener that is not added yet are told to try again, rather than that it is gone.

    Args:
        messaging: an instance with requests.
        channel: where the listeners are reached; ``None``: a generated one.

    Raises:
        ArgumentError, InvalidChannelError: the channel cannot be one of requests.
        UnsupportedFeatureError: the instance has no requests.
        SubscriptionRefusedError: the broker refused the subscription.
    """

    def __init__(self, messaging: Messaging, channel: str | None = None) -> None:
        self._targets: dict[str, EventTarget] = {}
        #: until when listeners may be there again, and those that were removed until then
        self._starts_until = -math.inf if channel is None else clock.monotonic() + STARTING
        self._removed: set[str] = set()
        found = f"listeners/{secrets.token_hex(8)}" if channel is None else check_name(channel)
        super().__init__(messaging, found, LISTENERS.served(notify=NotifyOperation(self._find)))

    def add(self, listener: Any, name: str | None = None) -> ListenerReference:
        """Make a listener reachable, and return its reference.

        Args:
            listener: an object with ``notify`` or ``deliver``, or a function.
            name: of the listener; the same one in a later run makes the same reference. ``None``: a generated one.

        Raises:
            ArgumentError: it is no listener, or the name is taken.
        """
        target = as_target(listener)
        found = secrets.token_hex(8) if name is None else name
        if self._targets.setdefault(found, target) is not target:
            raise ArgumentError(f"{self.channel!r} has a listener {found!r:.80} already")
        return ListenerReference(self.channel, found)

    def _find(self, name: str) -> EventTarget | None:
        """Return a listener; ``None`` if it is gone. Raises ``ClosedError`` for one that may be there soon."""
        found = self._targets.get(name)
        if found is None and self._is_starting() and name not in self._removed:
            raise ClosedError(f"there is no listener {name!r:.80} at {self.channel!r} yet: the server has just started")
        return found

    def _is_starting(self) -> bool:
        """Return whether listeners of an earlier run may still be added."""
        if clock.monotonic() < self._starts_until:
            return True
        self._removed.clear()  # no longer needed: each listener that is not there is gone
        return False

    def remove(self, reference: ListenerReference) -> bool:
        """Remove a listener, whose senders are told that it is gone; return whether there was one."""
        check_instance("reference", reference, ListenerReference)
        if self._is_starting():
            self._removed.add(reference.id)
        return self._targets.pop(reference.id, None) is not None


class RemoteParty(RemoteObject, Closeable):
    """The way to a party in another process that notifies listeners. Thread safe; a context manager, which closes it.

    The listeners of this process are reachable at a server of their own, from the first one on.
    """

    def __init__(self, messaging: Messaging, channel: str, *, timeout: float | None = None) -> None:
        super().__init__(messaging, channel, timeout=timeout)
        self._lock = threading.Lock()  # guards the following
        self._server: ListenerServer | None = None

    def reach(self, listener: Any) -> tuple[ListenerReference, Callable[[], object]]:
        """Return where a listener of any process is reached, and what makes it unreachable if it is in this one.

        Raises:
            ArgumentError: it is no listener.
            UnsupportedFeatureError, SubscriptionRefusedError: as :class:`ListenerServer`.
        """
        if isinstance(listener, ListenerReference):
            return listener, _nothing
        if isinstance(listener, RemoteListener):
            return listener.reference, _nothing
        with self._lock:
            if self._server is None:
                self._server = ListenerServer(self.messaging)
            server = self._server
        reference = server.add(listener)
        return reference, partial(server.remove, reference)

    def close(self) -> None:
        """Make the listeners of this process unreachable. Registrations stay until their leases end. Idempotent."""
        with self._lock:
            server, self._server = self._server, None
        if server is not None:
            server.close()


def _nothing() -> None:
    """Do nothing: the listener is reached by others, too."""


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
