"""Steps that let fewer messages of a key through: deadband (report by exception) and sampling.

They keep the state of each key, for ``KEYS`` keys at most; the key that was not seen for longest is forgotten first,
and its next message passes. A step decides with ``passes`` and remembers with ``note``, which returns what ``restore``
needs: a message that fails in a later step changes nothing.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Final, TypeVar

from messaging.errors import CodecError
from messaging.gateway.pipeline.paths import FieldPath
from messaging.gateway.pipeline.steps import number_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from messaging.gateway.pipeline.draft import Draft
    from messaging.gateway.settings import DeadbandSettings

T = TypeVar("T")

#: keys whose state is kept
KEYS: Final = 100_000


class RecentKeys(OrderedDict[str, T]):
    """The states of the keys that were used last, in the order of use. Change them by :meth:`put`."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self._most = most

    def put(self, key: str, state: T) -> None:
        """Set the state of a key, which is then the last one to be forgotten."""
        self[key] = state
        self.move_to_end(key)
        if len(self) > self._most:
            self.popitem(last=False)

    def restore(self, key: str, state: T | None) -> None:
        """Set the state of a key as it was; ``None``: it had none."""
        if state is None:
            self.pop(key, None)
        else:
            self.put(key, state)


class Deadband:
    """Passes a message if its number differs enough from that of the last one that passed, or after a time.

    A message without the number always passes, and the next one with a number, too.

    Args:
        settings: of the deadband.
        keys: bound of the keys.
    """

    def __init__(self, settings: DeadbandSettings, keys: int = KEYS) -> None:
        self._path = FieldPath(settings.field)
        self._absolute = settings.absolute
        self._percent = settings.percent
        self._silence = settings.max_silence
        #: number and monotonic time of the last message that passed
        self._last: RecentKeys[tuple[float | None, float]] = RecentKeys(keys)

    def passes(self, draft: Draft, key: str, now: float) -> bool:
        """Return whether a message passes."""
        last = self._last.get(key)
        number = self._number(draft)
        if last is None or number is None or last[0] is None:
            return True
        if self._silence is not None and now - last[1] >= self._silence:
            return True
        difference = abs(number - last[0])
        if self._absolute is not None:
            return difference > self._absolute or (self._absolute > 0 and difference == self._absolute)
        return difference > 0 and difference >= abs(last[0]) * (self._percent or 0.0) / 100

    def note(self, draft: Draft, key: str, now: float) -> Callable[[], None]:
        """Remember a message that has passed; return what undoes that."""
        before = self._last.get(key)
        self._last.put(key, (self._number(draft), now))
        return lambda: self._last.restore(key, before)

    def _number(self, draft: Draft) -> float | None:
        try:
            return number_of(self._path.get(draft.value))
        except CodecError:
            return None


class FirstSample:
    """Passes the first message of a key in each interval.

    Args:
        interval: seconds.
        keys: bound of the keys.
    """

    def __init__(self, interval: float, keys: int = KEYS) -> None:
        self._interval = interval
        self._begun: RecentKeys[float] = RecentKeys(keys)

    def passes(self, key: str, now: float) -> bool:
        """Return whether a message passes."""
        begun = self._begun.get(key)
        return begun is None or now - begun >= self._interval

    def note(self, key: str, now: float) -> Callable[[], None]:
        """Remember that a message has passed; return what undoes that."""
        before = self._begun.get(key)
        self._begun.put(key, now)
        return lambda: self._begun.restore(key, before)


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

    def due(self, now: float) -> list[Draft]:
        """Return the messages whose interval is over."""
        found: list[Draft] = []
        while self._held and next(iter(self._held.values()))[0] <= now:
            found.append(self._held.popitem(last=False)[1][1])
        return found

    def flush(self) -> list[Draft]:
        """Return all messages that are held."""
        found = [draft for _, draft in self._held.values()]
        self._held.clear()
        return found
