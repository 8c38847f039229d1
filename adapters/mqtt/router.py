"""Which streams a message is for.

At the broker there is one subscription for each distinct filter; here, any number of streams share it. A *route* is
such a subscription: a filter, its streams, and whether they compete (``queue``, a shared subscription) or each get a
copy.

**MQTT 5.** Each SUBSCRIBE carries an identifier of its own, and a broker names those a message was sent for. So
routing does not depend on whether overlapping filters make the broker send one packet or several, shared and plain
subscriptions are told apart, and a retained message goes to the one stream whose SUBSCRIBE it answers.

**MQTT 3.1.1** (and brokers without identifiers). A message goes to every route whose filter matches. That is right if
the broker sends one packet for overlapping filters, as mosquitto does; from a broker that sends several, streams of
overlapping filters get as many copies. So does a queue: mosquitto sends a client only one packet for its plain
subscription and the queues it is a member of, without saying which, so the packet serves all of them. If such a queue
has members in other processes too, it may see a message twice. A retained message, known by its flag, answers a
SUBSCRIBE: it goes to the newest matching stream that has not had one on that channel. And it has the QoS of any one of
the overlapping filters, whichever the broker finds first.

Shared subscriptions are part of MQTT 5; with 3.1.1 it is the broker's choice to have them (mosquitto and most others
do, RabbitMQ does not). They get no retained messages (MQTT 5, 4.8.2); those of brokers that send them nevertheless
are dropped, since each member joining would have the queue process them again.
"""

from __future__ import annotations

import random
from collections import deque
from typing import TYPE_CHECKING, Final

from messaging.errors import SubscriptionRefusedError
from messaging.model import channels

if TYPE_CHECKING:
    from adapters.mqtt.inbound import Token
    from adapters.mqtt.packets import Publish
    from messaging.adapter import Sink
    from messaging.model import Incoming

_MAX_IDENTIFIER: Final = 268_435_455
#: identifiers a route answers to: the broker may still hold messages with those of earlier SUBSCRIBEs
_IDENTIFIERS: Final = 64
#: channels whose retained message a stream is known to have had
_REPLAYED: Final = 4096
#: channels whose routes are remembered, and the longest such channel: others are looked up each time
_MATCHED: Final = 4096
_MATCHED_LENGTH: Final = 1024


class Stream:
    """A subscription of the core: its handle."""

    __slots__ = ("batch", "ended", "number", "replayed", "route", "settles", "since", "sink", "tells_id", "unsettled")

    def __init__(self, route: Route, sink: Sink, number: int, settles: bool, tells_id: bool) -> None:
        self.route = route
        #: whether its messages tell their packet identifiers
        self.tells_id = tells_id
        #: whether its messages have to be acknowledged: it asked for more than QoS 0
        self.settles = settles
        self.sink = sink
        #: grows with each stream
        self.number = number
        #: messages with a lower number arrived before this stream was there
        self.since = 0
        #: what arrived since the sink was last called
        self.batch: list[Incoming] = []
        #: in the order of their arrival
        self.unsettled: dict[Token, None] = {}
        #: without identifiers: channels whose retained message it has had
        self.replayed: set[str] = set()
        self.ended = False


class Route:
    """A subscription at the broker and the streams behind it."""

    __slots__ = (
        "_turn",
        "as_published",
        "confirmed",
        "detached",
        "filter",
        "identifiers",
        "is_kept",
        "is_shared",
        "matches",
        "no_local",
        "pattern",
        "qos",
        "streams",
    )

    def __init__(self, queue: str | None, pattern: str, no_local: bool, as_published: bool) -> None:
        self.filter = filter_of(queue, pattern)
        self.pattern = pattern
        #: subscription options (MQTT 5, 3.8.3.1): No Local, Retain As Published
        self.no_local = no_local
        self.as_published = as_published
        self.is_shared = queue is not None
        self.matches = channels.matcher(pattern)
        #: the highest that one of its streams asked for
        self.qos = 0
        #: whether the broker has confirmed it, with that QoS
        self.confirmed = False
        self.streams: list[Stream] = []
        #: the last stream was detached: the subscription stays at the broker
        self.is_kept = False
        self.detached: Stream | None = None
        self.identifiers: deque[int] = deque()
        self._turn = 0

    def receivers(self) -> list[Stream]:
        """The streams the next message is for."""
        if not self.is_shared or len(self.streams) < 2:
            return self.streams
        self._turn = (self._turn + 1) % len(self.streams)
        return self.streams[self._turn : self._turn + 1]


def filter_of(queue: str | None, pattern: str) -> str:
    """The topic filter that is subscribed to at the broker."""
    return pattern if queue is None else f"$share/{queue}/{pattern}"


class Router:
    """The routes of one instance.

    Args:
        persistent: whether a session may hold subscriptions of an earlier process, with identifiers of its own.
    """

    def __init__(self, persistent: bool) -> None:
        self._routes: dict[str, Route] = {}
        #: subscription identifier -> its route, and the stream whose SUBSCRIBE it was
        self._identified: dict[int, tuple[Route, Stream]] = {}
        self._foreign_identifiers = persistent
        # unlikely to be those that an earlier process gave to subscriptions of this session
        self._first = random.randrange(_MAX_IDENTIFIER) if persistent else 0  # noqa: S311
        self._given = 0
        self._matched: dict[str, list[Route]] = {}
        #: pairs of filters that were found to contradict: told once
        self._told: set[frozenset[str]] = set()
        self._streams = 0
        #: filters whose last stream went while there was no connection
        self.orphans: set[str] = set()

    def reset(self) -> None:
        """The broker has forgotten all subscriptions: every handle is void."""
        for route in self._routes.values():
            for stream in route.streams:
                stream.ended = True
        self._routes.clear()
        self._identified.clear()
        self._matched.clear()
        self.orphans.clear()

    def add(
        self,
        queue: str | None,
        pattern: str,
        qos: int,
        sink: Sink,
        *,
        no_local: bool = False,
        as_published: bool = False,
        tells_id: bool = False,
    ) -> Stream:
        """Add a stream, and its route if it is the first one there.

        Raises:
            SubscriptionRefusedError: the route is there, with options that contradict.
        """
        topic_filter = filter_of(queue, pattern)
        route = self._routes.get(topic_filter)
        if route is None:
            route = self._routes[topic_filter] = Route(queue, pattern, no_local, as_published)
            self._matched.clear()
            self.orphans.discard(topic_filter)
        elif (route.no_local, route.as_published) != (no_local, as_published):
            raise SubscriptionRefusedError(
                f"this instance has a subscription to {topic_filter!r} with other values of noLocal and "
                f"retainAsPublished, and MQTT has one for each filter: use equal ones, or another instance"
            )
        elif as_published and not route.is_shared:
            # what was retained before could not be told from what is retained now, and that from what another had
            raise SubscriptionRefusedError(
                f"this instance has a subscription to {topic_filter!r} with retainAsPublished, and there can be but one"
            )
        if qos > route.qos:
            route.qos = qos
            route.confirmed = False
        self._streams += 1
        stream = Stream(route, sink, self._streams, qos > 0, tells_id)
        route.streams.append(stream)
        return stream

    def remove(self, stream: Stream) -> bool:
        """Remove a stream; whether its route went with it."""
        stream.ended = True
        route = stream.route
        route.streams.remove(stream)
        if route.streams:
            return False
        del self._routes[route.filter]
        self._matched.clear()
        for identifier in route.identifiers:
            del self._identified[identifier]
        return True

    def detach(self, stream: Stream) -> None:
        """Remove a stream, and keep its route: the broker keeps the subscription."""
        stream.ended = True
        route = stream.route
        route.streams.remove(stream)
        route.is_kept, route.detached = True, stream

    def kept(self, topic: str) -> list[Stream]:
        """The last streams of the routes that match a channel and are kept without any."""
        return [route.detached for route in self._matching(topic) if route.detached is not None and not route.streams]

    @property
    def settles(self) -> bool:
        """Whether there are streams that wait for messages to settle."""
        return any(stream.settles for route in self._routes.values() for stream in route.streams)

    def contradicting(self, route: Route) -> list[Route]:
        """Routes a message for ``route`` may be for as well, of which one is acknowledged and the other is not.

        Those it was told of before, perhaps on another connection, are left out.
        """
        found = [
            other
            for other in self._routes.values()
            if bool(other.qos) != bool(route.qos)
            and frozenset((route.filter, other.filter)) not in self._told
            and channels.overlap(route.pattern, other.pattern)
        ]
        if len(self._told) < _MATCHED:
            self._told |= {frozenset((route.filter, other.filter)) for other in found}
        return found

    def identify(self, stream: Stream) -> int:
        """A subscription identifier for the SUBSCRIBE of ``stream``. It replaces that of its route at the broker."""
        identifier = (self._first + self._given) % _MAX_IDENTIFIER + 1
        self._given += 1
        route = stream.route
        if len(route.identifiers) == _IDENTIFIERS:
            del self._identified[route.identifiers.popleft()]
        route.identifiers.append(identifier)
        self._identified[identifier] = (route, stream)
        return identifier

    def receivers(self, publish: Publish) -> list[Stream]:
        """The streams ``publish`` is for, each one once; none if it is for nobody here.

        Shared routes count this as their turn. The list is not the caller's to change.
        """
        identifiers = publish.properties.subscriptions
        if not identifiers:
            return self._newcomer(publish.topic) if publish.retain else self._by_topic(publish.topic)
        if len(identifiers) == 1 and not publish.retain:  # nearly always
            known = self._identified.get(identifiers[0])
            if known is None:
                if self._foreign_identifiers and not self._is_own(identifiers[0]):
                    return self._by_topic(publish.topic)
            elif not self._foreign_identifiers or known[0] in self._matching(publish.topic):
                return known[0].receivers()
        found = [self._identified[each] for each in identifiers if each in self._identified]
        if self._foreign_identifiers:
            found = [(route, stream) for route, stream in found if route.matches(publish.topic)]
            if not found and not any(map(self._is_own, identifiers)):
                # subscribed to by an earlier process with this session
                return self._by_topic(publish.topic)
        if publish.retain:
            streams = (
                stream
                for route, subscribed in found
                for stream in (route.receivers() if route.as_published else () if route.is_shared else (subscribed,))
                if not stream.ended
            )
            return [*dict.fromkeys(streams)]
        if len(found) == 1:
            return found[0][0].receivers()
        # two identifiers may be those of an earlier and a later SUBSCRIBE of one route
        return [stream for route in dict.fromkeys(route for route, _ in found) for stream in route.receivers()]

    def _is_own(self, identifier: int) -> bool:
        return (identifier - 1 - self._first) % _MAX_IDENTIFIER < self._given

    def _by_topic(self, topic: str) -> list[Stream]:
        routes = self._matching(topic)
        if len(routes) == 1:
            return routes[0].receivers()
        return [stream for route in routes for stream in route.receivers()]

    def _newcomer(self, topic: str) -> list[Stream]:
        routes = self._matching(topic)
        if any(route.as_published for route in routes):
            return self._by_topic(topic)
        streams = [stream for route in routes if not route.is_shared for stream in route.streams]
        waiting = [stream for stream in streams if topic not in stream.replayed]
        if not waiting:
            return []
        newest = max(waiting, key=lambda stream: stream.number)
        if len(newest.replayed) < _REPLAYED and len(topic) <= _MATCHED_LENGTH:
            newest.replayed.add(topic)
        return [newest]

    def _matching(self, topic: str) -> list[Route]:
        routes = self._matched.get(topic)
        if routes is None:
            if len(self._matched) >= _MATCHED:
                self._matched.clear()
            routes = [route for route in self._routes.values() if route.matches(topic)]
            if len(topic) <= _MATCHED_LENGTH:
                self._matched[topic] = routes
        return routes
