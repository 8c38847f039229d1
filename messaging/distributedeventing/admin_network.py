"""The side of an admin that faces its network: what it wants, what arrives, and the sessions of other members."""

from __future__ import annotations

import math
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Final

from messaging.codecs.cache import BoundedCache
from messaging.dispatch.eventnetwork import (
    DISPATCH,
    ArrivedEvent,
    DeliveryNotification,
    NodeService,
    SeenEvents,
    TopicInterest,
    framework_of,
)
from messaging.distributedeventing.events import DispatchedEvent, check_reply_topic
from messaging.errors import EventSessionLostError, RemoteEventError
from messaging.errors.text import SafeLog

if TYPE_CHECKING:
    from messaging.dispatch import Dispatcher
    from messaging.distributedeventing.event_consumer import EventConsumer
    from messaging.distributedeventing.events import EventKind
    from messaging.distributedeventing.policies import NetworkPolicy
    from messaging.distributedeventing.publishing import Route
    from messaging.distributedeventing.queues import ConsumerQueue

logger = SafeLog(__name__)

#: open sessions of other members that are known; the oldest are forgotten first
MAX_SESSIONS: Final = 10_000
#: ended sessions of other members that are remembered
_MAX_ENDED: Final = 10_000

_KINDS: Final[dict[str, EventKind]] = {"data": "data", "close": "close", "error": "error"}


class RemoteSessions:
    """The sessions of other members, each a sender and its session. Thread safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards the following
        #: open sessions with their topics
        self._open: OrderedDict[tuple[str, str], str] = OrderedDict()
        self._ended: BoundedCache[tuple[str, str], None] = BoundedCache(_MAX_ENDED)

    def note(self, session: tuple[str, str], topic: str, kind: str) -> bool:
        """Note an event; return whether its session has ended before.

        Events come after the end when their sender was lost: it was suspended for too long and goes on, or was killed
        and its outbox is published by its next run.
        """
        with self._lock:
            if session in self._ended:
                return True
            if kind != "data":
                self._open.pop(session, None)
                self._ended[session] = None
            else:
                self._open[session] = topic
                if len(self._open) > MAX_SESSIONS:
                    self._open.popitem(last=False)
            return False

    def lose(self, member: str) -> dict[tuple[str, str], str]:
        """End the sessions of a member; return them with their topics."""
        with self._lock:
            gone = {session: topic for session, topic in self._open.items() if session[0] == member}
            for session in gone:
                del self._open[session]
                self._ended[session] = None
        return gone


class AdminNetwork(NodeService):
    """Connects an admin to a node. Its methods run on worker threads; see ``NodeService``.

    Args:
        title: of the admin, for the log.
        dispatcher: finds the consumers of this process.
        offered: returns the topics to list.
        inbound: decides which senders of other processes may publish here.
        on_interest: called when other members want other events.
    """

    def __init__(
        self,
        title: str,
        dispatcher: Dispatcher[EventConsumer, Route],
        offered: Callable[[], frozenset[str]],
        inbound: NetworkPolicy,
        on_interest: Callable[[], object],
    ) -> None:
        self._title = title
        self._dispatcher = dispatcher
        self._offered = offered
        self._inbound = inbound
        self._on_interest = on_interest
        self._is_open = False
        self._seen = SeenEvents()
        #: queues with events of the present batch, and their number; used by the intake thread
        self._later: dict[ConsumerQueue, int] = {}
        self._sessions = RemoteSessions()

    def open(self) -> None:
        """Want events from now on: the consumers that were registered before the admin are all known.

        A kept event that arrived earlier would reach only some of them.
        """
        self._is_open = True

    def wanted(self) -> tuple[Iterable[TopicInterest], Iterable[str]]:
        """Return the interests of all consumers, and the topics to list."""
        if not self._is_open:
            return (), ()
        found = {
            interest: None
            for _, consumer in self._dispatcher.handlers()
            if consumer.blocked is None
            for interest in _interests_of(consumer)
        }
        return found, self._offered()

    def interest_changed(self) -> None:
        """See ``NodeService``."""
        self._on_interest()

    def receive(self, arrival: ArrivedEvent) -> None:
        """Deliver an event of another member to the consumers of this process."""
        wire, key = arrival.event, arrival.hop.key
        topic = wire.topic
        self._inbound.check(wire.principal, topic)  # before its id is noted: it must not displace a permitted event
        if wire.reply_to is not None:  # a consumer must not fail on what a foreign sender wrote
            check_reply_topic(wire.reply_to)
        if key is not None and not self._seen.is_new(key):
            self._answer_copy(arrival, topic)
            return
        # sessions of this process have the sender "", which no other may end
        session = None if wire.session is None else (wire.sender or "?", wire.session)
        failure = None
        if wire.kind == "error":
            told = wire.error
            failure = RemoteEventError("" if told is None else told.message, "Error" if told is None else told.type)
        event = DispatchedEvent(
            topic,
            _KINDS[wire.kind],
            wire.value() if wire.kind == "data" else None,
            session=session,
            bundle=wire.bundle,
            framework=None if wire.origin is None else framework_of(wire.origin),
            reply_to=wire.reply_to,
            correlation_id=wire.correlation_id,
            failure=failure,
        )
        if session is not None:
            event.is_late = self._sessions.note(session, topic, event.kind)
            if wire.sender is not None and event.kind == "data" and not event.is_late:
                arrival.hop.node.heard_of(wire.sender)  # the session ends when its sender is lost
        notification = self._confirming(arrival, topic)
        dispatcher = self._dispatcher
        route = dispatcher.routes.get(topic)
        for consumer, terms in dispatcher.route(topic) if route is None else route:
            consumer.offer(event, terms, notification, self._later)
        if notification is not None:
            notification.release(DISPATCH)

    def batch_received(self) -> None:
        """See ``NodeService``: have the events of a batch delivered."""
        later = self._later
        if later:
            self._later = {}
            for queue, events in later.items():
                queue.deliver(events)

    @staticmethod
    def _confirming(arrival: ArrivedEvent, topic: str) -> DeliveryNotification | None:
        """Return the notification of the consumers here, which confirms the event to its sender."""
        confirm = arrival.notified
        if confirm is None:
            return None
        notification = DeliveryNotification(f"an event on {topic!r}", math.inf)  # the sender has the deadline
        notification.promise.listen(confirm)
        return notification

    def _answer_copy(self, arrival: ArrivedEvent, topic: str) -> None:
        """Answer an event that came before, or by another way, when the consumers here have processed it."""
        notification = self._confirming(arrival, topic)
        if notification is not None:
            for consumer, _ in self._dispatcher.route(topic):
                for each in consumer.objects.all():
                    each.queue.when_done(notification.expect_part(consumer.name))
            notification.release(DISPATCH)

    def member_lost(self, member: str) -> None:
        """End the sessions of a member that is gone, with an error event (5.1.2)."""
        for session, topic in self._sessions.lose(member).items():
            error = EventSessionLostError(f"the process that sent the session on {topic!r} is gone")
            for consumer, terms in self._dispatcher.route(topic):
                consumer.offer(DispatchedEvent(topic, "error", None, session=session, failure=error), terms)


def _interests_of(consumer: EventConsumer) -> list[TopicInterest]:
    terms = consumer.terms
    text = None if terms.filter is None else str(terms.filter)
    return [TopicInterest(each.text, text, terms.is_hidden) for each in consumer.topics]
