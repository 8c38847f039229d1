"""Notices messages that go round between gateways where nothing marks them.

A gateway recognises a message that it has passed on by its name in a header. A broker without headers, MQTT 3.1.1
without the envelope, loses it: in a ring over such a broker a message goes round for ever. Nothing tells it from equal
messages of a device, which must not be dropped. What goes round comes fast, though, and that is reported.
"""

from __future__ import annotations

from typing import Final

from messaging.codecs.cache import BoundedCache

#: equal messages of one channel, and the time in which they come, seconds
MANY: Final = 100
WITHIN: Final = 10.0
#: pause between two reports, seconds
_SILENCE: Final = 600.0
#: different messages that are counted
_KNOWN: Final = 10_000


class RingWatch:
    """Counts equal messages of one source. For one thread at a time."""

    __slots__ = ("_counts", "_silent_until")

    def __init__(self) -> None:
        #: message -> how often it came, and since when
        self._counts: BoundedCache[int, tuple[int, float]] = BoundedCache(_KNOWN)
        self._silent_until = 0.0

    def note(self, channel: str, payload: bytes, now: float) -> bool:
        """Count a message; return whether it is to be reported that equal ones come as fast as in a ring."""
        key = hash((channel, payload))
        count, since = self._counts.get(key) or (0, now)
        if now - since > WITHIN:
            count, since = 0, now
        self._counts[key] = (count + 1, since)
        if count + 1 < MANY or now < self._silent_until:
            return False
        self._silent_until = now + _SILENCE
        return True
