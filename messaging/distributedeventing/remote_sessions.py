"""The sessions that other members send, and that have ended (RFC 214 5.1.2)."""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import Final

from messaging.bounded import BoundedCache

#: open sessions that are known; the oldest are forgotten first
MAX_SESSIONS: Final = 10_000
#: ended sessions that are remembered
_MAX_ENDED: Final = 10_000


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
