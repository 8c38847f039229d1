"""Snapshots of an admin, and the list of topics (RFC 214 DE085, DE087)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from messaging.codecs.cache import BoundedCache
from messaging.dispatch import is_private_topic
from messaging.services.reporting import counter, gauge, part

if TYPE_CHECKING:
    from messaging.dispatch import HandlerDTO
    from messaging.dispatch.eventnetwork import NodeDTO

#: topics that are listed of one process
MAX_TOPICS: Final = 10_000


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
