"""The other members of a network: what each announced, and which of them want an event, found by topic.

**Threads.** One thread at a time makes changes. Any thread may ask meanwhile, without a lock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from messaging.codecs.cache import BoundedCache
from messaging.dispatch import DISTRIBUTED_EVENTS, TYPED_EVENTS, TopicGrammar, TopicIndex
from messaging.dispatch.eventnetwork.announcements import DISTRIBUTED, TYPED, Announcement, TopicInterest
from messaging.errors import DecodeError, InvalidFilterError, InvalidTopicError
from messaging.errors.text import SafeLog, printable
from messaging.services import LdapFilter
from messaging.services.reporting import gauge, identity, label

logger = SafeLog(__name__)

#: grammars by their names in announcements
GRAMMARS: Final[dict[str, TopicGrammar[Any]]] = {DISTRIBUTED: DISTRIBUTED_EVENTS, TYPED: TYPED_EVENTS}
#: problems of the announcements of one member that are logged
_MAX_REPORTED: Final = 16
#: topics whose members are remembered
_ROUTES: Final = 65_536


@dataclass(frozen=True, slots=True)
class MemberDTO:
    """A snapshot of another member."""

    id: str = field(metadata=identity())
    name: str = field(metadata=label("member"))
    framework: str | None
    silent: float = field(metadata=gauge("time since the member was last heard of", "seconds"))
    is_lost: bool = field(metadata=gauge("whether the member is lost", name="lost"))
    heartbeat: float = field(metadata=gauge("interval at which the member sends", "seconds"))
    #: topic filters that it wants and topics that it publishes, without the hidden ones
    interests: tuple[str, ...]
    offers: tuple[str, ...]
    qos: tuple[str, ...]


class OtherMember:
    """Another member. Read from any thread, written by the thread of its :class:`Membership`.

    Attributes:
        id: its UUID; ``framework``: that of its framework, or ``None``; ``name``: for people.
        heartbeat, linger, qos, replays, inbox: as it announces them.
        answers: whether it answers pings, as it announces or has shown.
        version: number of its changes that are known.
        is_known: whether its interests and offers are complete up to ``version``.
        is_refused: whether those of ``version`` were refused, so that earlier ones are in force.
        is_lost: whether it is silent, or its broker says that it is gone.
        is_heard_late: whether events of it arrived since it was lost, and more may follow.
        interests, offers: its interests and offers; replaced as a whole.
        heard: when it was last heard of, monotonic seconds.
        reported: what was wrong in its announcements, and was logged.
    """

    __slots__ = (
        "answers", "framework", "heard", "heartbeat", "id", "inbox", "interests", "is_heard_late", "is_known",
        "is_lost", "is_refused", "linger", "lost_at", "name", "offers", "qos", "queried", "replays", "reported",
        "version",
    )  # fmt: skip

    def __init__(self, id: str, now: float) -> None:  # noqa: A002
        self.id = self.inbox = id
        self.framework: str | None = None
        self.name = ""
        self.heartbeat = 0.0
        self.linger = 0.0
        self.qos: tuple[str, ...] = ()
        self.replays = self.answers = False
        self.version = 0
        self.is_known = self.is_refused = False
        self.is_lost = self.is_heard_late = False
        self.lost_at = 0.0
        self.interests: frozenset[TopicInterest] = frozenset()
        self.offers: frozenset[str] = frozenset()
        self.heard = now
        #: when it was last queried; ``None``: never
        self.queried: float | None = None
        self.reported: set[str] = set()

    @property
    def is_watched(self) -> bool:
        """Return whether its silence is to be noticed."""
        return not self.is_lost or self.is_heard_late

    def describe(self, announcement: Announcement) -> None:
        """Take over what an announcement says of the member itself."""
        self.framework = announcement.framework
        self.name = announcement.name or ""
        self.qos = announcement.qos
        self.replays = announcement.replays

    def get_dto(self, now: float) -> MemberDTO:
        """Return a snapshot; ``now`` is in monotonic seconds."""
        return MemberDTO(
            id=self.id,
            name=self.name,
            framework=self.framework,
            silent=max(0.0, now - self.heard),
            is_lost=self.is_lost,
            heartbeat=self.heartbeat,
            interests=tuple(sorted({each.topics for each in self.interests if not each.is_hidden})),
            offers=tuple(sorted(self.offers)),
            qos=self.qos,
        )

    def report(self, problems: tuple[str, ...]) -> None:
        """Log what was wrong in an announcement: each problem once, as long as the member is known."""
        for each in problems:
            if each not in self.reported and len(self.reported) < _MAX_REPORTED:
                self.reported.add(each)
                logger.warning("event network: member %s: %s; the rest of its announcement is taken", self, each)

    def __str__(self) -> str:
        return f"{printable(self.name)} ({self.id})" if self.name else self.id


class Wanted:
    """The members that want the events of one topic. Immutable.

    Attributes:
        members: members that want every event.
        filtered: the others, each with the filters of which one has to match.
    """

    __slots__ = ("filtered", "is_any", "members")

    def __init__(self, members: frozenset[str], filtered: Mapping[str, tuple[LdapFilter, ...]]) -> None:
        self.members = members
        self.filtered = filtered
        #: whether a member may want an event
        self.is_any = bool(members or filtered)

    def of(self, data: Callable[[], Any]) -> frozenset[str]:
        """Return the members that want one event; ``data`` returns its data, if there are filters."""
        values = data() if self.filtered else None
        if not isinstance(values, dict):
            return self.members
        return self.members | {
            member for member, filters in self.filtered.items() if any(_matches(each, values) for each in filters)
        }


def _matches(wanted: LdapFilter, values: dict[str, Any]) -> bool:
    try:
        return wanted.matches(values)
    except Exception:  # a value may raise anything when it is compared
        logger.exception("event network: the filter %s of another member failed; the event is sent", wanted)
        return True


class Interests:
    """The interests of all other members, whatever the grammars of their topic filters."""

    def __init__(self) -> None:
        #: by grammar; values: a member and the filter, which is ``None`` if it wants every event
        self._indexes: dict[str, TopicIndex[Any, tuple[str, str | None]]] = {
            name: grammar.new_index() for name, grammar in GRAMMARS.items()
        }
        self._routes: BoundedCache[str, Wanted] = BoundedCache(_ROUTES)

    @property
    def size(self) -> int:
        """Number of nodes of the indexes; 0 when no member wants anything."""
        return sum(map(len, self._indexes.values()))

    @staticmethod
    def check(interest: TopicInterest) -> None:
        """Refuse an interest that does not parse, with ``DecodeError``."""
        try:
            GRAMMARS[interest.grammar].parse(interest.topics)
            if interest.filter is not None:
                LdapFilter.parse(interest.filter, case_sensitive=True)
        except (InvalidTopicError, InvalidFilterError) as error:
            raise DecodeError(f"an announcement with an invalid interest: {error}") from None

    def change(self, member: str, added: Iterable[TopicInterest], removed: Iterable[TopicInterest]) -> None:
        """Apply the change of one member's interests."""
        for each in removed:
            self._indexes[each.grammar].remove(GRAMMARS[each.grammar].parse(each.topics), (member, each.filter))
        for each in added:
            self._indexes[each.grammar].add(GRAMMARS[each.grammar].parse(each.topics), (member, each.filter))
        self._routes = BoundedCache(_ROUTES)

    def wanted(self, topic: str) -> Wanted:
        """Return which members want the events of a topic, which must be one. From any thread."""
        routes = self._routes  # read first: a change meanwhile replaces them, and the result goes with them
        found = routes.get(topic)
        if found is None:
            found = routes[topic] = self._found(topic)
        return found

    def _found(self, topic: str) -> Wanted:
        matching = [each for index in self._indexes.values() for each in index.match(topic)]
        members = frozenset(member for member, text in matching if text is None)
        filtered: dict[str, tuple[LdapFilter, ...]] = {}
        for member, text in matching:
            if text is not None and member not in members:
                filtered[member] = (*filtered.get(member, ()), LdapFilter.parse(text, case_sensitive=True))
        return Wanted(members, filtered)
