"""The side of an admin that faces its network: what may pass, what is wanted and listed, and what arrives.

**Inbound.** An event whose principal may not publish here is refused: no consumer receives it, and the log of refused
messages names it. Without ``EventNetwork.signing`` the principal is claimed by the sender, and not proven.

**Outbound.** An event whose principal may not publish to the network reaches the consumers of this process only. Its
publisher has published it, so a plain call raises nothing; a notification fails with ``PermissionDeniedError``, since
consumers elsewhere are not notified. It is logged once for each principal and topic, and counted.

**Private topics** are exempt from both (RFC 214 5.1.3): their names are random, so that no permission can name them in
advance, and no wildcard matches them. Only programs that were given the name can publish to it.

**Interests** are announced whatever the policies say: other members may send events that are refused on arrival.
"""

from __future__ import annotations

import math
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from messaging.codecs.cache import BoundedCache
from messaging.dispatch import DISTRIBUTED_EVENTS, Principal, TopicPermission, TopicPolicy, is_private_topic
from messaging.dispatch.eventnetwork import (
    DISPATCH,
    ArrivedEvent,
    DeliveryNotification,
    NodeDTO,
    NodeService,
    SeenEvents,
    TopicInterest,
    framework_of,
)
from messaging.distributedeventing.event_consumer import EventConsumer, Route
from messaging.distributedeventing.events import DispatchedEvent, EventKind, check_reply_topic
from messaging.distributedeventing.queues import ConsumerQueue
from messaging.errors import ArgumentError, EventSessionLostError, PermissionDeniedError, RemoteEventError
from messaging.errors.checks import check_optional
from messaging.errors.text import SafeLog
from messaging.services.reporting import counter, gauge, part

if TYPE_CHECKING:
    from messaging.dispatch import Dispatcher, HandlerDTO

logger = SafeLog(__name__)

#: principals and topics whose first refusal was logged
_MAX_LOGGED: Final = 10_000
#: topics that are listed of one process
MAX_TOPICS: Final = 10_000
#: open sessions of other members that are known; the oldest are forgotten first
MAX_SESSIONS: Final = 10_000
#: ended sessions of other members that are remembered
_MAX_ENDED: Final = 10_000

_KINDS: Final[dict[str, EventKind]] = {"data": "data", "close": "close", "error": "error"}


class NetworkPolicy:
    """A policy for one direction. Thread safe.

    Args:
        title: of the admin, for the log and for errors.
        direction: ``inbound`` or ``outbound``, the name of the argument.
        policy: grants the right to publish; without it all principals may.

    Raises:
        ArgumentError: ``policy`` is no policy of the topics of RFC 214.
    """

    def __init__(self, title: str, direction: str, policy: TopicPolicy | None) -> None:
        check_optional(direction, policy, TopicPolicy)
        if policy is not None and policy.grammar is not DISTRIBUTED_EVENTS:  # it would refuse everything
            raise ArgumentError(
                f"{title}: {direction} needs a TopicPolicy of the grammar {DISTRIBUTED_EVENTS}, not of {policy.grammar}"
            )
        self._title = title
        self._direction = direction
        self._policy = policy
        self._lock = threading.Lock()  # guards the following
        self._logged: BoundedCache[tuple[Principal, str], None] = BoundedCache(_MAX_LOGGED)
        #: number of events that :meth:`withhold` counted
        self.withheld = 0

    def check(self, principal: Principal, topic: str) -> None:
        """Refuse an event that may not pass.

        Raises:
            PermissionDeniedError: ``principal`` may not publish to ``topic``.
        """
        policy = self._policy
        if policy is None or is_private_topic(topic):
            return
        if not policy.permits(principal, TopicPermission(topic, TopicPermission.PUBLISH, DISTRIBUTED_EVENTS)):
            subject = "a sender without a principal" if principal is None else f"the principal {principal!r:.200}"
            raise PermissionDeniedError(f"{self._title}: {self._direction}: {subject} may not publish {topic!r:.200}")

    def withhold(self, principal: Principal, topic: str, error: PermissionDeniedError) -> None:
        """Count an event that is not sent, and log the first one of its principal and topic."""
        with self._lock:
            self.withheld += 1
            is_logged = (principal, topic) in self._logged
            if not is_logged:
                self._logged[principal, topic] = None
        if not is_logged:
            logger.warning("%s; the event is for this process only; further ones like it are counted", error)


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
        self.on_interest = on_interest
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


# --- lists and snapshots (DE085, DE087)


@dataclass(frozen=True, slots=True)
class TopicDTO:
    """A topic or topic filter that processes list. ``None`` stands for this process."""

    topic: str
    #: names of the members that publish it, and names of the members that consume it
    publishers: tuple[str | None, ...]
    consumers: tuple[str | None, ...]


@dataclass(frozen=True, slots=True)
class DistributedEventAdminDTO:
    """A snapshot of an admin."""

    name: str
    qos: tuple[str, ...]
    consumers: tuple[HandlerDTO, ...] = field(metadata=part("consumer"))
    #: topics of the whiteboard sources
    sources: tuple[str, ...]
    sessions: int = field(metadata=gauge("open sessions", "sessions"))
    threads: int = field(metadata=gauge("running delivery threads", "threads"))
    #: the member of the network; ``None`` for an admin of this process only
    node: NodeDTO | None
    withheld: int = field(
        default=0,
        metadata=counter("events that outbound, or the key of the member, kept from going out", "events"),
    )


class Offers:
    """The topics that one process publishes and lists. Thread safe.

    Args:
        unadvertised: topic filters of topics that are not listed.
    """

    def __init__(self, unadvertised: Iterable[Any]) -> None:
        self._unadvertised = tuple(unadvertised)
        #: topics that were published lately, with whether they are listed
        self._known: BoundedCache[str, bool] = BoundedCache(MAX_TOPICS)

    def note(self, topic: str) -> bool:
        """Note that a topic is published; return whether it is new, and listed."""
        if topic in self._known:
            return False
        is_listed = self._known[topic] = self.is_listed(topic)
        return is_listed

    def is_listed(self, topic: str) -> bool:
        """Return whether a topic may be listed: private topics never are."""
        return not is_private_topic(topic) and not any(each.matches(topic) for each in self._unadvertised)

    def topics(self) -> frozenset[str]:
        """Return the topics to list."""
        return frozenset(topic for topic, is_listed in [*self._known.items()] if is_listed)


def topics_of(offers: Iterable[str], filters: Iterable[str], node: NodeDTO | None) -> tuple[TopicDTO, ...]:
    """Return the listed topics of this process and of the other members.

    Args:
        offers: topics that this process publishes.
        filters: topic filters of its consumers.
        node: its view of the others.
    """
    publishers: dict[str, list[str | None]] = {each: [None] for each in offers}
    consumers: dict[str, list[str | None]] = {each: [None] for each in filters}
    for member in () if node is None else node.members:
        name = member.name or member.id
        for topic in member.offers:
            publishers.setdefault(topic, []).append(name)
        for topic in member.interests:
            consumers.setdefault(topic, []).append(name)
    return tuple(
        TopicDTO(topic, tuple(publishers.get(topic, ())), tuple(consumers.get(topic, ())))
        for topic in sorted({*publishers, *consumers})
    )
