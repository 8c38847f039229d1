"""The interests of the other members, found by topic: which of them want an event.

**Threads.** One thread at a time makes changes. Any thread may ask meanwhile, without a lock.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from messaging.codecs.cache import BoundedCache
from messaging.dispatch import DISTRIBUTED_EVENTS, TYPED_EVENTS, TopicGrammar
from messaging.dispatch.eventnetwork.announcements import DISTRIBUTED, TYPED
from messaging.errors import DecodeError, InvalidFilterError, InvalidTopicError
from messaging.errors.text import SafeLog
from messaging.services import LdapFilter

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from messaging.dispatch import TopicIndex
    from messaging.dispatch.eventnetwork.announcements import TopicInterest

logger = SafeLog(__name__)

#: grammars by their names in announcements
GRAMMARS: Final[dict[str, TopicGrammar[Any]]] = {DISTRIBUTED: DISTRIBUTED_EVENTS, TYPED: TYPED_EVENTS}
#: topics whose members are remembered
_ROUTES: Final = 65_536


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
