"""``messaging events watch``: the events that arrive, and the ends of sessions, in one queue for the main thread.

**Threads.** Events come on a worker thread, which waits while ``LIMIT`` events are unwritten: then the broker sends no
more. The loss of a member comes on the thread of the announcements, which never waits. The main thread writes. One
lock guards the queue.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Any, Final

from messaging.bounded import BoundedCache
from messaging.cli.events_lines import EventLine
from messaging.cli.events_member import interest_in
from messaging.cli.output import LOOK
from messaging.distributedeventing.remote_sessions import RemoteSessions
from messaging.eventdata import WireError, WireEvent
from messaging.eventnetwork import Arrival, Interest, NodeService, SeenEvents

if TYPE_CHECKING:
    from collections.abc import Iterable

    from messaging.cli.events_options import NetworkOptions
    from messaging.dispatch import TopicGrammar
    from messaging.eventnetwork import EventNode

#: events that may be unwritten
LIMIT: Final = 1_000
#: how long the first event of a sender waits for its announcement, which comes on another thread, seconds
_NAMING: Final = 1.0
#: names of members that are remembered, also of members that left
_MAX_NAMES: Final = 4_096


class Watcher(NodeService):
    """Takes the events of some topic filters.

    Args:
        topics: the topic filters.
        network: the options of the network.
        grammar: of the topic filters.
        with_ends: whether the ends of sessions are written, too.

    Raises:
        InvalidTopicError: a topic filter breaks the grammar.
    """

    def __init__(
        self, topics: Iterable[str], network: NetworkOptions, grammar: TopicGrammar[Any], *, with_ends: bool
    ) -> None:
        self._filters = [grammar.parse(each) for each in dict.fromkeys(topics)]
        self._interests = frozenset(interest_in(each.text, network) for each in self._filters)
        self._with_ends = with_ends
        self._seen = SeenEvents()
        #: ``None`` for a sender that did not announce itself in time
        self._names: BoundedCache[str, str | None] = BoundedCache(_MAX_NAMES)
        #: the member of the network, once it is made
        self.node: EventNode | None = None
        self._sessions = RemoteSessions()
        self._changed = threading.Condition()  # guards the following
        self._lines: deque[EventLine] = deque()
        self._is_closed = False

    # --- on worker threads

    def wanted(self) -> tuple[frozenset[Interest], frozenset[str]]:
        """See ``NodeService``."""
        return self._interests, frozenset()

    def receive(self, arrival: Arrival) -> None:
        """See ``NodeService``: queue an event."""
        event, hop = arrival.event, arrival.hop
        # the channel pattern of a filter may match more
        is_wanted = any(each.matches(event.topic) for each in self._filters)
        if is_wanted and (key := hop.key) is not None:
            is_wanted = self._seen.is_new(key)
        if not is_wanted or (event.kind != "data" and not self._with_ends):
            if arrival.notified is not None:
                arrival.notified()
            return
        if event.session is not None and self._with_ends:
            is_late = self._sessions.note((event.sender or "", event.session), event.topic, event.kind)
            if event.sender is not None and event.kind == "data" and not is_late:
                hop.node.heard_of(event.sender)  # the session ends when its sender is lost
        sender = hop.path[0] if hop.path else None
        self._put(EventLine(event, time.time(), sender, self._name(sender), arrival=arrival))

    def interest_changed(self) -> None:
        """See ``NodeService``: learn the names of the members."""
        self._learn()

    def member_lost(self, member: str) -> None:
        """See ``NodeService``: the open sessions of a member end with it (RFC 214 5.1.2)."""
        name = self._names.get(member)
        with self._changed:
            for key, topic in self._sessions.lose(member).items():
                error = WireError("EventSessionLostError", "the process that sent the session is gone")
                event = WireEvent(topic, kind="error", session=key[1], error=error)
                self._lines.append(EventLine(event, time.time(), member, name))
            self._changed.notify_all()

    def _put(self, line: EventLine) -> None:
        with self._changed:
            while len(self._lines) >= LIMIT and not self._is_closed:
                self._changed.wait(LOOK)
            if not self._is_closed:
                self._lines.append(line)
                self._changed.notify_all()

    def _name(self, member: str | None) -> str | None:
        if member is None:
            return None
        deadline = time.monotonic() + _NAMING
        while member not in self._names:
            self._learn()
            with self._changed:
                if member in self._names:
                    break
                if self._is_closed or time.monotonic() > deadline:
                    self._names[member] = None
                else:  # the announcement of a member without interests is told to no service
                    self._changed.wait(_NAMING / 50)
        return self._names.get(member)

    def _learn(self) -> None:
        if self.node is not None:
            members = self.node.get_dto().members
            with self._changed:
                for each in members:
                    self._names[each.id] = each.name
                self._changed.notify_all()

    # --- on the main thread

    def take(self, timeout: float) -> EventLine | None:
        """Return the next event, or ``None`` after ``timeout`` seconds without one."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._lines, timeout):
                return None
            self._changed.notify_all()
            return self._lines.popleft()

    def close(self) -> None:
        """Take no more events, so that no thread waits for room."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
