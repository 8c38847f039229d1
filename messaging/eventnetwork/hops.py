"""The way of an event through event networks: what it keeps when it is passed on, and what ends it.

An event that reaches a process over one network may be passed on to another network, by way of a typed event bus and
the bridges of the process. It keeps its id, its origin, its time and the members it passed. A member refuses an event
that it passed before; an event that comes by two ways is taken once, because its id is the same. Ids of programs
without this library are compared within one framework, or one sender.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final
from uuid import UUID


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


#: an id that a member of this library made: unique by itself, also in a process that has its durable history
_UNIQUE: Final = re.compile(r"[0-9a-f]{8}-(?:[0-9a-f]{4}-){3}[0-9a-f]{12}-.+")


def key_of(origin: str, event_id: str) -> str:
    """Return the key of an event; see ``Hop``."""
    return event_id if _UNIQUE.fullmatch(event_id) else f"{origin}/{event_id}"


@lru_cache(1024)
def framework_of(text: str) -> UUID:
    """Return a UUID by its text; remembered, since few frameworks send most events."""
    return UUID(text)


def last_hop(passed: tuple[object, ...]) -> Hop | None:
    """Return the last hop among the services that an event came through; ``None`` for an event of this process."""
    for each in reversed(passed):
        if isinstance(each, Hop):
            return each
    return None
