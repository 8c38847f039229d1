"""The copies of a message that a broker sends for overlapping filters of one MQTT 5 session.

On the connection that began the session each copy is for the streams of the filter that it names. But a session that
mosquitto has restored after its restart gets a message that is published before its client is back only once, with one
of several identifiers. So where a session was resumed, the first copy of a message is for all matching filters, and the
copies for the others are dropped as they come. If the connection is lost between the copies of a message, those that
come on the next one are told from new messages by their place in the broker's queue (:class:`_LastCopy`).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Final, NamedTuple, TypeAlias

from messaging_adapters.mqtt.packets import Publish
from messaging_adapters.mqtt.streams import FilterRoute, Stream

_MAX_PACKET_ID: Final = 65_535
#: mosquitto finds a level itself first, then these, and the filter that ends there last
_LEVELS: Final = {"+": 1, "#": 2}
_END: Final = 3
#: messages whose further copies are awaited: the broker sends them one after the other
_AWAITED: Final = 64

#: channel, payload, correlation data and user properties of a message
_Content: TypeAlias = "tuple[str, bytes, bytes | None, tuple[tuple[str, str], ...]]"

#: streams of a message of which another copy was delivered to all
COVERED: Final[list[Stream]] = []


class _LastCopy(NamedTuple):
    """The last message of a session, if it came as one of several copies. A loss may part it from the next ones.

    A new message that is equal must not be taken for a further copy. After its restart the broker may send it but once,
    and the streams of all other filters would miss it. What tells them apart is how mosquitto makes copies:

    - It numbers them one after the other when it puts them into the queue of the session, and the numbers outlive it.
    - It finds the filters in one order (:func:`_place`), and a single copy has the identifier of the first. So a new
      message does not begin with a filter behind that of the last copy, which is subscribed to.

    Where a broker numbers or orders copies in another way, a further one counts as a new message, and comes twice.
    """

    packet_id: int
    content: _Content
    route: FilterRoute
    #: routes whose streams have received the message with this copy or an earlier one, whether or not theirs came
    served: Sequence[FilterRoute]
    #: whether the connection was lost after it
    is_parted: bool = False

    def is_followed_by(self, packet_id: int, content: _Content) -> bool:
        """Return whether a message with an equal content is the next one in the queue of the session."""
        return packet_id == self.packet_id % _MAX_PACKET_ID + 1 and content == self.content

    def is_before(self, route: FilterRoute) -> bool:
        """Return whether the broker finds the filter of ``route`` after that of this copy."""
        return _place(self.route.pattern) < _place(route.pattern)


class MessageCopies:
    """The copies that a broker sends of one message, one for each matching filter.

    Attributes:
        is_resumed: whether this connection has resumed a session.
        last: the last message of QoS 1 or 2, if one of several copies.
    """

    def __init__(self) -> None:
        self.is_resumed = False
        self.last: _LastCopy | None = None
        #: by content: the route of the first copy, and those whose copies are still awaited
        self._awaited: OrderedDict[_Content, tuple[FilterRoute, set[FilterRoute]]] = OrderedDict()

    def _is_further(self, content: _Content, route: FilterRoute, routes: Sequence[FilterRoute]) -> bool:
        """Return whether a copy for ``route`` is a further one of the last message with an equal content.

        Otherwise it is the first copy of a message that is for all ``routes``.
        """
        _, awaited = self._awaited.get(content, (route, None))
        if awaited is not None and route in awaited:
            awaited.remove(route)
            if not awaited:
                del self._awaited[content]
            return True
        self._awaited[content] = route, {each for each in routes if each is not route}
        if len(self._awaited) > _AWAITED:
            self._awaited.popitem(last=False)
        return False

    def connected(self, *, is_resumed: bool) -> None:
        """Note a new connection: no copies of the last one are awaited."""
        self.is_resumed = is_resumed
        self._awaited.clear()
        if self.last is not None:
            self.last = self.last._replace(is_parted=True) if is_resumed else None

    @property
    def is_parted(self) -> bool:
        """Whether the last message was a further copy of one whose first copies came on an earlier connection."""
        return self.last is not None and self.last.is_parted

    def once(
        self, publish: Publish, route: FilterRoute, routes: Sequence[FilterRoute], last: _LastCopy | None
    ) -> list[Stream]:
        """Return the streams of all ``routes`` for the first copy of a message, ``COVERED`` for the further ones.

        On the connection that began the session each copy is for the streams of its own route.
        """
        same = alike(route, routes)
        content = _content(publish)
        is_alone = route not in same or len(same) == 1
        served: Sequence[FilterRoute] = same if self.is_resumed else ()
        if last is not None and last.is_followed_by(publish.id, content):
            if last.is_before(route):
                served = last.served
                # a copy for a filter with noLocal served also those that get a copy of their own from this instance
                if route in served if is_alone else last.is_parted:
                    self.last = last._replace(packet_id=publish.id, route=route)
                    return COVERED if route in served else route.receivers()
            if is_alone:  # between the copies for the others
                self.last = last._replace(packet_id=publish.id)
        if is_alone:
            return route.receivers()
        self.last = _LastCopy(publish.id, content, route, served)
        if not self.is_resumed:
            return route.receivers()
        if self._is_further(content, route, same):
            return COVERED
        return [stream for each in same for stream in each.receivers()]

    def forget(self, route: FilterRoute) -> None:
        """Await no further copies of messages whose first one came for ``route``, which is removed.

        A restored session got no others. Those of the next equal message would be taken for them.
        """
        for content in [content for content, (first, _) in self._awaited.items() if first is route]:
            del self._awaited[content]
        if self.last is not None and self.last.route is route:
            self.last = None


def alike(named: FilterRoute, routes: Sequence[FilterRoute]) -> list[FilterRoute]:
    """Return those of ``routes`` that a single copy for ``named`` is for in a restored session.

    It comes for the filter that the broker finds first. A message of this instance comes for filters without
    ``noLocal`` alone. So a copy for one with it is of another client, and if the broker finds that filter first,
    the copy may be the only one. A filter with ``noLocal`` that is found later gets what comes for itself.
    """
    if not named.no_local:
        return [each for each in routes if each.qos and not (each.is_shared or each.no_local)]
    same = [each for each in routes if each.qos and not each.is_shared]
    return same if named is min(same, key=lambda each: _place(each.pattern), default=None) else [named]


def _content(publish: Publish) -> _Content:
    """Return what is the same in all copies of a message, its id among it.

    A settled message does not keep its payload.
    """
    properties = publish.properties
    return publish.topic, publish.payload, properties.correlation, tuple(properties.user)


def _place(pattern: str) -> tuple[int, ...]:
    """Return the place of a filter in the order in which mosquitto finds those that match a channel."""
    return *(_LEVELS.get(level, 0) for level in pattern.split("/")), _END
