"""What became of each message of durable outboxes and inboxes: where it is kept, and whether it may be gone."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable

#: how long before a loss of power a message must have been stored to be on the disk with ``outbox_fsync=interval``:
#: "the last second may be lost" (docs/durability.md), and threads are held up
INTERVAL: Final = 10.0
#: errors of messages that never arrive: "a message that fails with `DeadlineError` never arrives" (docs/faults.md)
REFUSED: Final = frozenset({"ClosedError", "DeadlineError", "OutboxFullError", "PayloadTooLargeError", "ArgumentError"})


@dataclass(slots=True)
class Sent:
    """A message.

    Attributes:
        publisher: its role.
        thread, number: who has published it there, and as which of its messages.
        at: when.
        due: when its promises must have an outcome.
        kind: ``plain``, ``forward`` (it resolves when it is stored), or ``nowhere`` (no queue takes it).
        lasts: its time to live, seconds.
        size: of the payload, bytes.
        stored_at: when it was stored; ``None``: not known.
        outcome: ``sent``, ``confirmed`` by the broker, ``stored``, ``killed``, or the name of an error.
        is_dropped: its error says that it was dropped from the full outbox, after it was accepted.
        is_unsure: it was stored, and its machine has lost power before the disk had it for certain, or its instance has
            ended before its dead letter had room.
    """

    publisher: str
    thread: str
    number: int
    at: float
    due: float
    kind: str
    lasts: float
    size: int
    stored_at: float | None = None
    outcome: str = "sent"
    is_dropped: bool = False
    is_unsure: bool = False


@dataclass(slots=True)
class Handled:
    """A message that was handled.

    Attributes:
        life: of the consumer, that has handled it last.
        at: when that ended.
        place: among the messages that were settled.
    """

    life: int
    at: float
    place: int


@dataclass(slots=True)
class Ledger:
    """All messages of a run, by their names.

    Attributes:
        broken: reports a broken promise.
        sent: what was published, in this order.
        handled: how often each was handled, in the order of the first times.
        last: when each was handled last.
        dead: how often each was a dead letter of its consumer.
        unhandled: acknowledged by closing a stream whose iterator had them, and whose process has died over them.
        letters: reasons of the messages that publishers keep as dead letters.
        settlements: messages that were handled or became dead letters, each time.
        again: how many messages of an earlier life each life of the consumer has handled again.
    """

    broken: Callable[[str], object]
    sent: dict[str, Sent] = field(default_factory=dict)
    handled: dict[str, int] = field(default_factory=dict)
    last: dict[str, Handled] = field(default_factory=dict)
    dead: dict[str, int] = field(default_factory=dict)
    unhandled: dict[str, None] = field(default_factory=dict)
    letters: dict[str, str] = field(default_factory=dict)
    settlements: list[str] = field(default_factory=list)
    again: dict[int, int] = field(default_factory=dict)

    def is_there(self, message: str) -> bool:
        """Return whether a message has arrived, or is kept as a dead letter."""
        return any(message in each for each in (self.handled, self.dead, self.unhandled, self.letters))

    def must_be_there(self, message: str, now: float) -> bool:
        """Return whether a message must have arrived, or be kept, once everything has come to rest."""
        sent = self.sent[message]
        if now >= sent.at + sent.lasts:
            return False  # it may have expired
        if sent.outcome == "confirmed":
            return True
        return sent.stored_at is not None and not sent.is_unsure and not sent.is_dropped

    def died(self, publisher: str, now: float, *, vanishes: bool, fsync: str, is_failing: bool) -> None:
        """Note that the process of a publisher has ended, and perhaps its machine."""
        for sent in self.sent.values():
            if sent.publisher != publisher:
                continue
            if sent.outcome == "sent":
                sent.outcome = "killed"
            if not vanishes or sent.stored_at is None or fsync == "always":
                continue
            # "interval: the last second may be lost"; "never: what the system had not written is lost"
            if fsync == "never" or is_failing or now < sent.stored_at + INTERVAL:
                sent.is_unsure = True

    def ended_on_full_disk(self, publisher: str) -> None:
        """Note that the instance of a publisher has ended on a disk that may be full.

        "On a full disk a dead letter is kept in memory until there is room; if the instance ends before, it is lost"
        """
        for message, sent in self.sent.items():
            if sent.publisher == publisher and sent.outcome == "UnroutableError" and message not in self.letters:
                sent.is_unsure = True

    def check_order(self) -> None:
        """Check that the first deliveries of each thread come in its order."""
        last: dict[str, int] = {}
        for message in self.handled:
            sent = self.sent[message]
            if sent.number < last.get(sent.thread, -1):
                self.broken(f"{message} was handled for the first time behind {sent.thread}:{last[sent.thread]}")
                return
            last[sent.thread] = sent.number

    def check_arrival(self, message: str) -> None:
        """Check that a message that arrives has not failed with an error that says that it never does."""
        sent = self.sent[message]
        if sent.outcome in REFUSED and not sent.is_dropped:
            self.broken(f"{message} arrives although its promise failed with {sent.outcome}")

    def settled(self, message: str, error: BaseException | None, now: float) -> None:
        """Note the outcome of a promise."""
        sent = self.sent[message]
        if error is None:
            sent.outcome = "stored" if sent.kind == "forward" else "confirmed"
        else:
            sent.outcome = type(error).__name__
            sent.is_dropped = "dropped from the full outbox" in str(error)
            if message in self.handled or message in self.dead:
                self.check_arrival(message)
        if now > sent.due:
            self.broken(f"the promise of {message} took until {sent.outcome} for longer than its deadline")


#: a time to live that never ends
FOREVER: Final = inf
