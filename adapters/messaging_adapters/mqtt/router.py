"""Routes each message that arrives to its streams.

**MQTT 5.** Each SUBSCRIBE carries an identifier of its own, and the broker names the identifiers that a message was
sent for. So routing does not depend on whether the broker sends one packet or several for overlapping filters. Shared
and plain subscriptions are told apart, and a retained message goes to the one stream whose SUBSCRIBE it answers.

In a resumed session the first copy of a message may be for all matching filters, see :mod:`.copies`.

**MQTT 3.1.1** (and brokers without identifiers). A message goes to every route whose filter matches. That is right if
the broker sends one packet for overlapping filters, as mosquitto does. From a broker that sends several, streams of
overlapping filters get as many copies. So does a queue: mosquitto sends a client one packet for its plain subscription
and the queues it is a member of, and does not name them, so the packet serves all of them. If such a queue has members
in other processes too, it may see a message twice. A retained message, known by its flag, answers a SUBSCRIBE: it goes
to the newest matching stream that has received none on that channel. Its QoS is that of the overlapping filter that
the broker finds first.

Shared subscriptions are part of MQTT 5. With 3.1.1 they are the broker's choice (mosquitto and most others have them,
RabbitMQ does not). They get no retained messages (MQTT 5, 4.8.2). A broker that sends them nevertheless is ignored,
since the queue would process them again for each member that joins.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Final

from messaging.adapter import Sink
from messaging.codecs.cache import BoundedCache
from messaging.errors import SubscriptionRefusedError
from messaging.model import SubscriptionSpec, channels
from messaging_adapters.mqtt.capabilities import NO_LOCAL, RETAIN_AS_PUBLISHED
from messaging_adapters.mqtt.copies import MessageCopies, alike
from messaging_adapters.mqtt.mapping import PACKET_ID
from messaging_adapters.mqtt.packets import Publish
from messaging_adapters.mqtt.streams import FilterRoute, JointOutlet, Stream, StreamOutlet, filter_of

_MAX_IDENTIFIER: Final = 268_435_455
#: identifiers kept for each route: the broker may still hold messages with the identifiers of earlier SUBSCRIBEs
_IDENTIFIERS: Final = 64
#: removed routes whose identifiers and options are kept for the next route of their filter
_FORMER: Final = 1024
#: channels remembered for each stream, whose retained message it has received
_REPLAYED: Final = 4096
#: channels whose routes are cached, and the longest such channel in characters: others are looked up each time
_MATCHED: Final = 4096
_MATCHED_LENGTH: Final = 1024


class Router:
    """The routes of one instance.

    Args:
        persistent: whether a session may hold subscriptions of an earlier process, with identifiers of its own.

    Attributes:
        has_joints: whether there is, or was, a joint subscription.
        has_kept: whether a subscription is, or was, kept without a stream.
        copies: the copies of messages of the session.
    """

    def __init__(self, persistent: bool) -> None:
        self._routes: dict[str, FilterRoute] = {}
        #: subscription identifier -> its route, and the stream whose SUBSCRIBE it was
        self._identified: dict[int, tuple[FilterRoute, Stream]] = {}
        self._foreign_identifiers = persistent
        #: removed routes, by filter: the session may still hold messages with their identifiers, and the broker a
        #: subscription that no SUBSCRIBE has replaced. The next stream of the filter gets those messages
        self._former: dict[str, FilterRoute] = {}
        # random: unlikely to meet the identifiers that an earlier process used in this session
        self._first = secrets.randbelow(_MAX_IDENTIFIER) if persistent else 0
        self._given = 0
        self._matched: BoundedCache[str, list[FilterRoute]] = BoundedCache(_MATCHED)
        #: pairs of filters that were reported to contradict each other
        self._told: set[frozenset[str]] = set()
        self._streams = 0
        self.has_joints = False
        self.has_kept = False
        self.copies = MessageCopies()
        #: by filter: the last streams that ended without a connection, or whose connection ended before the broker
        #: answered UNSUBSCRIBE. The filters are to be unsubscribed unless other streams take them over
        self.orphans: dict[str, Stream] = {}
        #: by filter: streams whose SUBSCRIBE was not confirmed; the session may have the subscription all the same
        self.withdrawn: BoundedCache[str, Stream] = BoundedCache(_FORMER)

    def reset(self) -> None:
        """Void every handle: the broker has lost all subscriptions."""
        for route in self._routes.values():
            for stream in route.streams:
                stream.end()
        self._routes.clear()
        self._identified.clear()
        self._former.clear()
        self._matched.clear()
        self.orphans.clear()
        self.withdrawn.clear()

    def add(self, spec: SubscriptionSpec, sink: Sink, joint: JointOutlet | None = None) -> Stream:
        """Add a stream, by itself or to ``joint``, and its route if this is the first stream of its filter.

        Raises:
            SubscriptionRefusedError: the route exists, with options that contradict.
        """
        queue, pattern, qos, custom = spec.options.queue, spec.channel, int(spec.options.qos), spec.options.custom
        no_local, as_published = custom.get(NO_LOCAL, False), custom.get(RETAIN_AS_PUBLISHED, False)
        topic_filter = filter_of(queue, pattern)
        route, former = self._routes.get(topic_filter), None
        if route is None:
            former = self._former.pop(topic_filter, None)
            held = set() if former is None else former.held
            route = self._routes[topic_filter] = FilterRoute(queue, pattern, no_local, as_published, held)
            self._matched.clear()
            self.orphans.pop(topic_filter, None)
            self.withdrawn.pop(topic_filter, None)
        elif route.options != (no_local, as_published) and route.streams:
            raise SubscriptionRefusedError(
                f"this instance has a stream of {topic_filter!r} with other values of noLocal and retainAsPublished, "
                f"and MQTT has one subscription for each filter: use equal values, close that stream first, or use "
                f"another instance"
            )
        elif as_published and route.streams and not route.is_shared:
            # an old retained message could not be told from a new one, nor from the replay to the other stream
            raise SubscriptionRefusedError(
                f"this instance has a subscription to {topic_filter!r} with retainAsPublished, and there can be but one"
            )
        if qos > route.qos:
            route.qos = qos
            route.confirmed = False
        self._streams += 1
        stream = Stream(route, joint or StreamOutlet(sink), self._streams, qos > 0, custom.get(PACKET_ID, False))
        self.has_joints = self.has_joints or joint is not None
        route.streams.append(stream)
        if route.options != (no_local, as_published):
            # the messages that the session has for the kept subscription are for this stream
            route.change(no_local, as_published)
            self._identified |= dict.fromkeys(route.identifiers, (route, stream))
        if former is not None and self._foreign_identifiers:
            route.identifiers = former.identifiers
            self._identified |= dict.fromkeys(route.identifiers, (route, stream))
        return stream

    def remove(self, stream: Stream) -> bool:
        """Remove a stream. Return whether its route was removed with it."""
        stream.end()
        return self.unroute(stream)

    def unroute(self, stream: Stream) -> bool:
        """Remove a stream, which may still settle its messages. Return whether its route was removed with it."""
        route = stream.route
        route.streams.remove(stream)
        if route.streams:
            return False
        route.is_kept = False
        del self._routes[route.filter]
        self._matched.clear()
        self.copies.forget(route)
        for identifier in route.identifiers:
            del self._identified[identifier]
        if route.held or (self._foreign_identifiers and route.identifiers):
            self._former[route.filter] = route
            if len(self._former) > _FORMER:
                del self._former[next(iter(self._former))]
        return True

    def has(self, topic_filter: str) -> bool:
        """Return whether there is a route, with streams or kept."""
        return topic_filter in self._routes

    def unsubscribed(self, topic_filter: str, last: Stream | None) -> None:
        """Note that the broker has no subscription to the filter of removed streams.

        Args:
            topic_filter: of the subscription.
            last: the last stream, if the messages that still arrive are kept for the next one.
        """
        former = self._former.get(topic_filter)
        if former is not None:
            former.held.clear()
            former.detached = last
            if not self._foreign_identifiers:
                del self._former[topic_filter]

    @property
    def departed(self) -> list[Stream]:
        """The last streams of unsubscribed filters for which the broker may still have messages in its queue."""
        return self._detached([*self._former.values()])

    def orphan(self, stream: Stream) -> None:
        """Note that the filter of a removed stream is to be unsubscribed on the next connection."""
        if stream.route.filter not in self._routes:
            self.orphans[stream.route.filter] = stream

    def detach(self, stream: Stream) -> None:
        """Remove a stream and keep its route: the broker keeps the subscription."""
        stream.end()
        route = stream.route
        route.streams.remove(stream)
        route.is_kept, route.detached = True, stream
        self.has_kept = True

    def kept_beside(self, publish: Publish) -> list[Stream]:
        """Return the detached streams of the kept routes that a message with receivers is for as well."""
        routes = self._matching(publish.topic)
        meant = self._meant(publish, routes)
        return self._detached([route for route in routes if not route.is_shared] if meant is None else meant)

    def _meant(self, publish: Publish, routes: Sequence[FilterRoute]) -> Sequence[FilterRoute] | None:
        """Return those of ``routes`` that a message is for; ``None`` if its identifiers do not tell."""
        identifiers = publish.properties.subscriptions
        named = [route for route in routes if any(each in route.identifiers for each in identifiers)]
        if not named:
            # from the broker's queue, for a filter that is no longer subscribed to: the others get copies of their own
            is_former = any(each in former.identifiers for former in self._former.values() for each in identifiers)
            return () if is_former and not self.copies.is_resumed else None
        if len(named) == 1 and self.copies.is_resumed and not self.copies.is_parted:
            same = alike(named[0], routes)
            # a retained message is for the one SUBSCRIBE that it answers
            if named[0] in same and (named[0].passes_flags or not publish.retain):
                return same
        return named

    def kept(self, publish: Publish, ended: Sequence[Stream]) -> list[Stream]:
        """Return the streams that a message without receivers is for.

        They are those of ``ended``, which were removed and match its channel, and the detached ones of kept routes.
        """
        routes = self._matching(publish.topic)
        candidates = [*routes, *(stream.route for stream in ended)]
        meant = self._meant(publish, candidates)
        if meant is None:
            meant = candidates
        found = self._detached([route for route in routes if route in meant])
        return found + [stream for stream in ended if stream.route in meant]

    @staticmethod
    def _detached(routes: Sequence[FilterRoute]) -> list[Stream]:
        return [route.detached for route in routes if route.detached is not None and not route.streams]

    @property
    def settles(self) -> bool:
        """Whether any stream has to acknowledge its messages."""
        return any(stream.settles for route in self._routes.values() for stream in route.streams)

    def contradicting(self, route: FilterRoute) -> list[FilterRoute]:
        """Return the routes that overlap ``route`` where one side acknowledges messages and the other does not.

        Pairs that were returned before, perhaps on another connection, are left out.
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
        """Return an identifier for the SUBSCRIBE of ``stream``. It replaces the route's identifier at the broker."""
        identifier = (self._first + self._given) % _MAX_IDENTIFIER + 1
        self._given += 1
        route = stream.route
        if len(route.identifiers) == _IDENTIFIERS:
            del self._identified[route.identifiers.popleft()]
        route.identifiers.append(identifier)
        self._identified[identifier] = (route, stream)
        return identifier

    def receivers(self, publish: Publish) -> list[Stream]:
        """Return the streams that ``publish`` is for, each one once; an empty list if there is none.

        A shared route moves on to its next stream. The caller must not change the list.
        """
        last = None
        if publish.qos:
            last, self.copies.last = self.copies.last, None
        identifiers = publish.properties.subscriptions
        if not identifiers:
            return self._newcomer(publish.topic) if publish.retain else self._by_topic(publish.topic)
        if len(identifiers) == 1 and not publish.retain:  # the common case
            known = self._identified.get(identifiers[0])
            if known is None:
                if self._foreign_identifiers and not self._is_own(identifiers[0]):
                    return self._by_topic(publish.topic)
            elif not self._foreign_identifiers:
                return known[0].receivers()
            else:
                routes = self._matching(publish.topic)
                if known[0] in routes:
                    if len(routes) > 1 and publish.qos:
                        return self.copies.once(publish, known[0], routes, last)
                    return known[0].receivers()
        found = [self._identified[each] for each in identifiers if each in self._identified]
        if self._foreign_identifiers:
            found = [(route, stream) for route, stream in found if route.matches(publish.topic)]
            if not found and not any(map(self._is_own, identifiers)):
                # an earlier process subscribed with this session
                return self._by_topic(publish.topic)
        if not found and self.has_joints and not publish.retain:
            # from the broker's queue, for a channel that was parted meanwhile
            return [stream for stream in self._by_topic(publish.topic) if stream.outlet.is_joint]
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
        # two identifiers may belong to an earlier and a later SUBSCRIBE of one route
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
        if any(route.passes_flags for route in routes):
            return self._by_topic(topic)
        streams = [stream for route in routes if not route.is_shared for stream in route.streams]
        waiting = [stream for stream in streams if topic not in stream.replayed]
        if not waiting:
            return []
        newest = max(waiting, key=lambda stream: stream.number)
        if len(newest.replayed) < _REPLAYED and len(topic) <= _MATCHED_LENGTH:
            newest.replayed.add(topic)
        return [newest]

    def _matching(self, topic: str) -> list[FilterRoute]:
        routes = self._matched.get(topic)
        if routes is None:
            routes = [route for route in self._routes.values() if route.matches(topic)]
            if len(topic) <= _MATCHED_LENGTH:
                self._matched[topic] = routes
        return routes
