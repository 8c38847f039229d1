"""A bus that joins late: the past events of other processes come before their live events.

The connection asks the others once it is connected. Until they have answered, live events are held. Then the past
events are published as events of the past: they are recorded, monitors observe them, and handlers with
``event.history`` receive the newest of them, as many as the history of this bus has left of their number. Handlers
without do not. Then the held events follow, and each event is taken once, by its id.

**Threads.** Live events arrive on the intake thread. The answers arrive on a worker thread, which publishes the past
events and the held ones; meanwhile new ones are still held.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from messaging.dispatch import TopicPermission
from messaging.errors import ClosedError, MessagingError
from messaging.errors.text import SafeLog
from messaging.execution import Promise, engine
from messaging.typedevent.receivers import UNHANDLED, BusRoute, EventReceiver

if TYPE_CHECKING:
    from messaging.dispatch import Dispatcher
    from messaging.dispatch.eventnetwork import ArrivedEvent
    from messaging.execution import Lane
    from messaging.typedevent.event import PublishedEvent

logger = SafeLog(__name__)

#: live events that are held
MAX_HELD: Final = 10_000


class LateJoin:
    """The past events of other processes, and the live ones that wait for them. Thread safe.

    Args:
        title: of the bus, for the log.
        past_event: returns the past event that arrived, ``None`` if the bus has it. Raises a ``MessagingError`` to
            refuse it.
        publish_past: publishes past events.
        publish: publishes a live event that was held. Raises a ``MessagingError`` to refuse it.
    """

    def __init__(
        self,
        title: str,
        *,
        past_event: Callable[[ArrivedEvent], PublishedEvent | None],
        publish_past: Callable[[list[PublishedEvent]], object],
        publish: Callable[[ArrivedEvent], object],
    ) -> None:
        self._title = title
        self._past_event = past_event
        self._publish_past = publish_past
        self._publish = publish
        #: resolves when the past events were published
        self.promise: Promise[None] = Promise(f"receiving the past events for {title}")
        self.promise.was_retrieved = True
        self._releasing = threading.Lock()  # one thread at a time publishes held events: their order is kept
        self._lock = threading.Lock()  # guards the following
        self._held: deque[ArrivedEvent] = deque()
        self._is_holding = True

    def hold(self, arrival: ArrivedEvent) -> bool:
        """Hold a live event; return whether it is held. A full queue ends the holding of further ones."""
        with self._lock:
            if not self._is_holding:
                return False
            if len(self._held) < MAX_HELD:
                self._held.append(arrival)
                return True
        self._release()
        return False

    def done(self, arrivals: list[ArrivedEvent], error: MessagingError | None) -> None:
        """Publish the past events, then the held ones. On a worker thread."""
        if error is not None and not isinstance(error, ClosedError):
            logger.error("%s: past events of other processes are missing: %s; live events follow", self._title, error)
        try:
            self._publish_past([event for each in arrivals if (event := self._read(each)) is not None])
        except ClosedError as closed:
            error = closed
        finally:
            self._release()
            if error is None:
                engine().call(self.promise.resolve, None)
            else:
                engine().call(self.promise.reject, error)

    def _read(self, arrival: ArrivedEvent) -> PublishedEvent | None:
        try:
            return self._past_event(arrival)
        except MessagingError as error:
            logger.error("%s: a past event on %r is refused: %s", self._title, arrival.event.topic, error)
            return None

    def _release(self) -> None:
        """Publish the held events, and hold no more."""
        with self._releasing:
            while True:
                with self._lock:
                    if not self._held:
                        self._is_holding = False
                        return
                    held = self._held.popleft()
                try:
                    self._publish(held)
                except ClosedError:
                    continue
                except MessagingError as error:
                    logger.error("%s: an event on %r is refused: %s", self._title, held.event.topic, error)
                except Exception:  # the others must be released all the same
                    logger.exception("%s: cannot publish an event on %r; it is dropped", self._title, held.event.topic)


class PastDelivery:
    """Which handlers receive which of some past events. Used by one thread.

    Args:
        dispatcher: the handlers of the bus.
        events: the events, the oldest first.
    """

    def __init__(self, dispatcher: Dispatcher[EventReceiver, BusRoute], events: list[PublishedEvent]) -> None:
        self._dispatcher = dispatcher
        #: number of events that a handler may still receive, for the handlers that were there at the beginning
        self._first: dict[EventReceiver, int] = {}
        for receiver in self._receivers():
            left = receiver.terms.history - receiver.replayed
            first = len(events)
            while first and left > 0:
                first -= 1
                left -= self._is_for(receiver, events[first])
            self._first[receiver] = first

    def _receivers(self) -> list[EventReceiver]:
        return [
            each
            for _, each in self._dispatcher.handlers()
            if each.terms.history and each.kind != UNHANDLED and each.blocked is None
        ]

    def _is_for(self, receiver: EventReceiver, event: PublishedEvent) -> bool:
        topic = event.topic
        return (
            any(each.matches(topic) for each in receiver.topics)
            and self._dispatcher.may(receiver.terms.principal, TopicPermission.SUBSCRIBE, topic)
            and receiver.accepts(event, receiver.terms)
        )

    def lanes_for(self, number: int, event: PublishedEvent) -> list[Lane]:
        """Return the lanes that the event with this index goes to.

        A handler that came meanwhile has the earlier ones from the history of the bus, and receives the rest.
        """
        first = self._first
        return [
            each.lane
            for each in self._receivers()
            if number >= first.setdefault(each, number) and self._is_for(each, event)
        ]
