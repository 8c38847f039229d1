"""The way of an event through event networks: what it keeps when it is passed on, and what ends it.

An event that reaches a process over one network may be passed on to another network, by way of a typed event bus and
the bridges of the process. It keeps its id, its origin, its time and the members it passed. A member refuses an event
that it passed before; an event that comes by two ways is taken once, because its id is the same. Ids of programs
without this library are compared within one framework, or one sender.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final
from uuid import UUID

from messaging.dispatch.eventdata import WireEvent

#: ids that are remembered at least
MAX_SEEN: Final = 100_000


@dataclass(slots=True, eq=False, repr=False)
class Hop:
    """An event came through ``node`` into this process. Immutable; compared by identity.

    Attributes:
        node: the member of the network that it came from.
        id: of the event; ``None`` if its sender gave none.
        origin: the UUID of the framework that published it first, as text, if known.
        bundle: the bundle that published it, if known.
        time: when it was published, microseconds since the epoch; ``None`` if unknown.
        path: the members that it passed, the first one first.
    """

    node: Any
    id: str | None
    origin: str | None
    bundle: int | None
    time: int | None
    path: tuple[str, ...]

    @property
    def key(self) -> str | None:
        """Return what tells the event from all others, ``None`` without an id: its id, and where it was published.

        An event keeps it over every way. Senders that do not tell their framework are told apart by themselves.
        """
        return None if self.id is None else key_of(self.origin or (self.path[0] if self.path else ""), self.id)

    @property
    def framework(self) -> UUID | None:
        """Return the framework that published it first, if known."""
        return None if self.origin is None else framework_of(self.origin)


@dataclass(slots=True, eq=False, repr=False)
class ArrivedEvent:
    """An event that arrived.

    Attributes:
        event: the event; its ``topic`` is that of its channel.
        id: its id, or one made of its sender and number; ``None`` if it has neither.
        node: the member of the network that it came to.
        notified: to be called when every consumer here was notified, if the sender asked for it; further calls have no
            effect.
    """

    event: WireEvent
    id: str | None
    node: object
    notified: Callable[[], object] | None

    @property
    def hop(self) -> Hop:
        """Return its way so far."""
        event = self.event
        path = event.path if event.sender is None else (*event.path, event.sender)
        return Hop(self.node, self.id, event.origin, event.bundle, event.time, path)


#: an id that a member of this library made: unique by itself, also in a process that has its durable history
_UNIQUE: Final = re.compile(r"[0-9a-f]{8}-(?:[0-9a-f]{4}-){3}[0-9a-f]{12}-.+")


def key_of(origin: str, event_id: str) -> str:
    """Return the key of an event; see ``Hop``."""
    return event_id if _UNIQUE.fullmatch(event_id) else f"{origin}/{event_id}"


#: returns a UUID by its text; remembered, since few frameworks send most events
framework_of: Final = lru_cache(1024)(UUID)


def last_hop(passed: tuple[object, ...]) -> Hop | None:
    """Return the last hop among the services that an event came through; ``None`` for an event of this process."""
    for each in reversed(passed):
        if isinstance(each, Hop):
            return each
    return None


class SeenEvents:
    """The ids of the events that were taken last. Thread safe.

    The ids are bounded by number: at least the last ``limit`` ids are known, and at most twice as many. They are in two
    sets; when the newer one is full it replaces the older one.
    """

    __slots__ = ("_limit", "_lock", "_newer", "_older")

    def __init__(self, limit: int = MAX_SEEN) -> None:
        self._limit = limit
        self._lock = threading.Lock()  # guards the following
        self._newer: set[str] = set()
        self._older: set[str] = set()

    def is_new(self, event_id: str) -> bool:
        """Note an event; return whether it was not seen before."""
        with self._lock:
            newer = self._newer
            if event_id in newer or event_id in self._older:
                return False
            newer.add(event_id)
            if len(newer) >= self._limit:
                self._older, self._newer = newer, set()
            return True

    def __len__(self) -> int:
        """Return the number of ids that are known."""
        return len(self._newer) + len(self._older)
