"""Steps that let fewer messages of a key through: deadband (report by exception) and sampling."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable
from typing import Final, NamedTuple

from messaging.errors import CodecError
from messaging.gateway.pipeline.draft import Draft
from messaging.gateway.pipeline.paths import FieldPath
from messaging.gateway.pipeline.steps import number_of
from messaging.gateway.settings import DeadbandSettings

#: keys whose state is kept
KEYS: Final = 100_000


class _LastPassed(NamedTuple):
    """The last message of a key that has passed."""

    #: of the deadband; ``None``: the message has none
    number: float | None
    #: monotonic seconds
    time: float
    #: of the last one with an id
    message_id: str | None


class Thinning:
    """Deadband, and sampling that passes the first message of a key in each interval.

    A deadband passes a message if its number differs enough from that of the last one that passed, or after a time. A
    message without the number always passes, and the next one with a number, too.

    The key that was not seen for longest is forgotten first, and its next message passes. :meth:`passes` decides, and
    :meth:`note` remembers: a message that fails in a later step changes nothing.

    Args:
        deadband: its settings; ``None``: each number passes.
        interval: of sampling, seconds.
        keys: whose state is kept, at most.
    """

    def __init__(self, deadband: DeadbandSettings | None = None, interval: float = 0.0, keys: int = KEYS) -> None:
        self._deadband = deadband
        self._path = None if deadband is None else FieldPath(deadband.field)
        self._interval = interval
        self._most = keys
        #: in the order of use
        self._last: OrderedDict[str, _LastPassed] = OrderedDict()

    def repeats(self, draft: Draft, key: str) -> bool:
        """Return whether a message is delivered again that was the last one of its key to pass."""
        last = self._last.get(key)
        is_last = last is not None and draft.message_id is not None and last.message_id == draft.message_id
        return is_last and draft.is_redelivered

    def passes(self, draft: Draft, key: str, now: float) -> bool:
        """Return whether a message passes."""
        last = self._last.get(key)
        if last is None:
            return True
        return now - last.time >= self._interval and self._is_changed(draft, last, now)

    def _is_changed(self, draft: Draft, last: _LastPassed, now: float) -> bool:
        band, number = self._deadband, self._number(draft)
        if band is None or number is None or last.number is None:
            return True
        if band.max_silence is not None and now - last.time >= band.max_silence:
            return True
        difference = abs(number - last.number)
        if band.absolute is not None:
            return difference > band.absolute or (band.absolute > 0 and difference == band.absolute)
        return difference > 0 and difference >= abs(last.number) * (band.percent or 0.0) / 100

    def note(self, draft: Draft, key: str, now: float) -> Callable[[], None]:
        """Remember a message that has passed; return what undoes that."""
        before, message_id = self._last.get(key), draft.message_id
        if message_id is None and before is not None:
            message_id = before.message_id
        self._put(key, _LastPassed(self._number(draft), now, message_id))
        return lambda: self._put(key, before)

    def _put(self, key: str, state: _LastPassed | None) -> None:
        if state is None:
            self._last.pop(key, None)
            return
        self._last[key] = state
        self._last.move_to_end(key)
        if len(self._last) > self._most:
            self._last.popitem(last=False)

    def _number(self, draft: Draft) -> float | None:
        try:
            return None if self._path is None else number_of(self._path.get(draft.value))
        except CodecError:
            return None


class LastSample:
    """Holds the last message of each key until the interval that its first one began is over.

    Args:
        interval: seconds.
        most: messages that are held, at most; then the one that waits longest is passed early.
    """

    def __init__(self, interval: float, most: int) -> None:
        self._interval = interval
        self._most = most
        #: end of the interval, and the last message, by key; in the order of the ends
        self._held: OrderedDict[str, tuple[float, Draft]] = OrderedDict()

    def put(self, draft: Draft, key: str, now: float) -> tuple[Draft | None, Draft | None]:
        """Hold a message; return the one that it replaces, and one that is passed early."""
        found = self._held.get(key)
        if found is not None:
            self._held[key] = (found[0], draft)
            return found[1], None
        self._held[key] = (now + self._interval, draft)
        if len(self._held) <= self._most:
            return None, None
        return None, self._held.popitem(last=False)[1][1]

    @property
    def next_due(self) -> float | None:
        """Return when the first interval ends, in monotonic seconds."""
        return next(iter(self._held.values()))[0] if self._held else None

    def due(self, now: float = math.inf) -> list[Draft]:
        """Return the messages whose interval is over; all of them by default."""
        found: list[Draft] = []
        while self._held and next(iter(self._held.values()))[0] <= now:
            found.append(self._held.popitem(last=False)[1][1])
        return found
