"""Bridges to remote events: events of another kind of source become the remote events of a generator.

**Threads.** Any thread may use a bridge. Its lock guards the known ids; no code of the application runs under it.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, TypeVar

from messaging.errors import ArgumentError, BoundReachedError
from messaging.errors.checks import plain_function
from messaging.execution import Closeable
from messaging.leases import Landlord, Lease, LeaseRenewalManager, release
from messaging.remoteevent.event import check_event_id
from messaging.remoteevent.generator import EventGenerator

if TYPE_CHECKING:
    from messaging.remoteevent.event import EventId, RemoteEvent

S = TypeVar("S")
#: event ids that one bridge makes of topics
MAX_IDS: Final = 10_000
#: how long the source waits until a persistent generator has stored an event, seconds
_TIMEOUT: Final = 30.0


class Bridge(Closeable):
    """A source of events that feeds a generator. Thread safe; a context manager, which closes it.

    Args:
        generator: numbers the events, and notifies its listeners; ``None``: one of its own.
        listener: gets all events of the bridge, such as the listener of a mailbox; needed without a generator.
        event_id: id of all events, or a function that returns the id for a topic; ``None``: the topic is the id.

    Attributes:
        generator: of the remote events.

    Raises:
        ArgumentError, InvalidEventError: an argument is not as described.
    """

    def __init__(
        self, generator: EventGenerator | None, listener: Any, event_id: EventId | Callable[[str], EventId] | None
    ) -> None:
        if generator is None and listener is None:
            raise ArgumentError("a generator or a listener is needed")
        if generator is not None and not isinstance(generator, EventGenerator):
            raise ArgumentError(f"an EventGenerator is needed, not {type(generator).__name__}")
        self._end: Callable[[], object] = lambda: None
        self._landlord = Landlord("feed", max_duration=math.inf) if generator is None else None
        self.generator = generator or EventGenerator(landlord=self._landlord)
        self._listener = listener
        self._renewals = LeaseRenewalManager()
        self._lock = threading.Lock()  # guards the following two
        self._ids: set[EventId] = set()
        self._leases: list[Lease] = []
        self._id_of: Callable[[str], EventId]
        try:
            if event_id is None:
                self._id_of = lambda topic: topic
            elif callable(event_id):
                self._id_of = plain_function(event_id, "event_id")
            else:
                fixed = check_event_id(event_id)
                self._id_of = lambda _topic: fixed
                self._introduce(fixed)
        except Exception:
            self.close()
            raise

    def open(self, start: Callable[[], S], end: Callable[[S], object]) -> S:
        """Start the source, which :meth:`close` ends; return what ``start`` returned.

        The bridge is closed if ``start`` raises.
        """
        try:
            source = start()
        except BaseException:  # an interrupt, too: the leases of the listener would be renewed without end
            self.close()
            raise
        self._end = lambda: end(source)
        return source

    def generate(self, topic: str, event_type: type[RemoteEvent], /, **fields: Any) -> None:
        """Generate an event, and wait until the generator has it. For the source, on a thread of its own.

        Raises:
            MessagingError: see :meth:`EventGenerator.generate <messaging.remoteevent.EventGenerator.generate>`.
        """
        event_id = check_event_id(self._id_of(topic))
        if event_id not in self._ids:
            self._introduce(event_id)
        self.generator.generate(event_id, event_type, **fields).result(_TIMEOUT)

    def _introduce(self, event_id: EventId) -> None:
        """Declare a kind of events, and register the listener for it."""
        with self._lock:
            if event_id in self._ids:
                return
            if len(self._ids) >= MAX_IDS:
                raise BoundReachedError(f"the bridge has {MAX_IDS} kinds of events already")
            self.generator.declare(event_id)
            if self._listener is not None:
                lease = self.generator.register(event_id, None, self._listener, Lease.FOREVER).lease
                self._leases.append(lease)
                self._renewals.renew_until(lease)
            self._ids.add(event_id)

    def close(self) -> None:
        """Make no further events, and close the generator if it is the bridge's own. Idempotent."""
        self._end()
        self._renewals.close()
        with self._lock:
            leases, self._leases = self._leases, []
        for lease in leases:
            release(lease)
        if self._landlord is not None:
            self.generator.close()
            self._landlord.close()
