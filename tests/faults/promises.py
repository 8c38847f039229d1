"""Compare the ledgers of a run of distributed events with what is promised; see ``distributed.py``.

==================  ================================================================================================
promise             for whom
==================  ================================================================================================
nothing is lost     an event that the broker confirmed, for a consumer that every live process knew before and that
                    lived until two seconds later. A *plain* process is exempt while it, or the broker, is disturbed.
                    A *durable* one is exempt only where a broker loses what it had: a killed mosquitto, and RabbitMQ
                    with events that are not ``PERSISTENT``. ``PERSISTENT`` events also survive their publisher
nothing twice       every consumer, in the life of its process
order               of each publishing thread, over all topics, at every consumer
notifications       each is settled in time; resolves only if each consumer that was not disturbed has the event; fails
                    with names, and only if something was disturbed
loss of a member    noticed by every process that is not disturbed
sessions            complete, in order and with their end; replies reach their session; sessions of a killed process end
                    with an error
==================  ================================================================================================

The order holds for the life of the receiving process, except for what its predecessor left at the broker.

*Disturbed* is a process from the beginning of its fault until its connection had time to return, and while
the machine gives it no time.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from messaging.dispatch import DISTRIBUTED_EVENTS, TYPED_EVENTS
from tests.faults.member import HEARTBEAT, LAG, LINGER, NOTIFIED_WITHIN

#: time after a fault until a process is connected, and its members have settled; seconds
RECOVERY: Final = 2.5
#: time for an event to arrive that is not disturbed
_ARRIVES: Final = 2.0
#: time before a kill of mosquitto that its last save may be older
_UNSAVED: Final = 3.0
#: time after which a PERSISTENT event counts as stored
_STORED: Final = 1.0
#: time in which an event that was published counts as pending: after it, what is not pending is confirmed
_HANDED_OVER: Final = 0.1
#: slack of the time in which a loss is noticed: the interval of looking, and a busy machine
NOTICE: Final = 2 * HEARTBEAT + 1.0
_BROKER: Final = ("restart", "crash")
_SHOWN: Final = 5


@dataclass
class Fault:
    """A fault: its kind, the process life that it hit (none: the broker), and when."""

    kind: str
    target: str
    at: float
    over: float = 0.0


class Lines:
    """A ledger that grows while it is read."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._position = 0
        self._entries: list[list[Any]] = []
        self._kinds: Counter[str] = Counter()
        self._seen: set[str] = set()
        self._published: dict[str, int] = {}
        self._confirmed: dict[str, int] = {}
        self._sessions: set[str] = set()
        #: when the last session was closed, and when no publication was pending; monotonic seconds
        self._closed_at = self._idle_at = 0.0
        self._source_is_open = False

    def all(self) -> list[list[Any]]:
        """Return the entries so far."""
        if self._path.exists():
            with self._path.open("rb") as file:
                file.seek(self._position)
                whole, newline, _ = file.read().rpartition(b"\n")
            self._position += len(whole) + len(newline)
            for line in whole.splitlines():
                self._add(json.loads(line))
        return self._entries

    def _add(self, entry: list[Any]) -> None:
        self._entries.append(entry)
        self._kinds[entry[1]] += 1
        match entry[1:]:
            case ["seen", name]:
                self._seen.add(name)
            case ["lost", name]:
                self._seen.discard(name)
            case ["pub", key, number, _]:
                self._published[key] = number
            case ["confirmed", counted]:
                self._confirmed = counted
                self._idle_at = entry[0]
            case ["session", name]:
                self._sessions.add(name)
            case ["session-closed", name]:
                self._sessions.discard(name)
                self._closed_at = entry[0]
            case ["source-open"]:
                self._source_is_open = True
            case ["source-close"]:
                self._source_is_open = False

    def count(self, kind: str) -> int:
        """Return the number of entries of a kind."""
        self.all()
        return self._kinds[kind]

    def seen(self) -> set[str]:
        """Return the members that the process sees."""
        self.all()
        return self._seen

    def all_confirmed(self) -> bool:
        """Return whether every published event is confirmed, and the end of every session."""
        self.all()
        if self._sessions or self._idle_at <= self._closed_at + _HANDED_OVER:
            return False
        return all(self._confirmed.get(key, -1) >= number for key, number in self._published.items())

    def source_is_open(self) -> bool:
        """Return whether the source of the process is open."""
        self.all()
        return self._source_is_open


@dataclass
class Findings:
    """What the comparison found; ``problems`` in words."""

    counts: Counter[str] = field(default_factory=Counter)
    #: longest time in which the loss of a member was noticed, by the member's part; seconds
    notice: dict[str, float] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    def lines(self) -> list[str]:
        """Return the counts in words."""
        notice = ", ".join(f"{part} {seconds:.2f} s" for part, seconds in sorted(self.notice.items()))
        return [
            ", ".join(f"{name} {count}" for name, count in sorted(self.counts.items())),
            f"noticed within: {notice}",
        ]


@dataclass
class Consumer:
    """A consumer of one life of a process."""

    life: str
    label: str
    topics: str
    on: float
    off: float = float("inf")
    #: (publisher, number) in order of arrival, with the first time
    got: dict[tuple[str, int], float] = field(default_factory=dict)

    def wants(self, topic: str) -> bool:
        """Return whether its filter matches."""
        grammar: Any = TYPED_EVENTS if self.label.startswith("bus") else DISTRIBUTED_EVENTS
        return bool(grammar.parse(self.topics).matches(topic))


@dataclass
class Published:
    """An event that was published."""

    publisher: str
    number: int
    topic: str
    at: float
    #: when it was known to be confirmed
    confirmed: float | None = None

    @property
    def life(self) -> str:
        """The life of its process."""
        return self.publisher.rpartition(".")[0]

    @property
    def is_persistent(self) -> bool:
        """Whether it is PERSISTENT."""
        return self.publisher.endswith(".p")


class Disturbances:
    """When processes and the broker were disturbed.

    Args:
        faults: all faults.
    """

    def __init__(self, faults: list[Fault]) -> None:
        self._faults = faults
        #: life -> when it was killed
        self.killed = {each.target: each.at for each in faults if each.kind == "kill"}

    def of(self, life: str | None, begin: float, end: float) -> list[Fault]:
        """Return the faults that disturb a process (``None``: any) at some time from ``begin`` to ``end``."""
        process = None if life is None else life.partition(".")[0]
        return [
            each
            for each in self._faults
            if each.at <= end
            and each.over + RECOVERY >= begin
            and (not each.target or process is None or each.target.partition(".")[0] == process)
        ]

    def of_broker(self, begin: float, end: float) -> list[Fault]:
        """Return the faults of the broker at some time from ``begin`` to ``end``."""
        return [each for each in self._faults if not each.target and each.at <= end and each.over + 1.0 >= begin]


class Check:
    """Compares the ledgers in a folder."""

    def __init__(self, folder: Path, faults: list[Fault], forms: Mapping[str, str], protocol: str, end: float) -> None:
        self.found = Findings()
        self._end_of_run = end
        self._ledgers = {
            path.stem: [each for each in Lines(path).all() if each[0] <= end]
            for path in sorted(folder.glob("*.ledger"))
        }
        lags = [
            Fault("lag", life, at - rest[0], at)
            for life, lines in self._ledgers.items()
            for at, kind, *rest in lines
            if kind == "lag"
        ]
        self._disturbances = Disturbances([*faults, *lags])
        self._forms = forms
        self._is_amqp = protocol == "amqp"
        self._up = {life: each[0] for life, lines in self._ledgers.items() for each in lines if each[1] == "up"}
        self._events: dict[str, list[Published]] = defaultdict(list)
        self._consumers: list[Consumer] = []
        for life, lines in self._ledgers.items():
            self._read(life, lines)

    def _problem(self, kind: str, texts: list[str]) -> None:
        self.found.counts[kind] += len(texts)
        if texts:
            self.found.problems.append(f"{len(texts)} {kind}: {texts[:_SHOWN]}")

    def _end_of(self, life: str) -> float:
        """Return when a process was killed."""
        return self._disturbances.killed.get(life, float("inf"))

    # --- reading

    def _read(self, life: str, lines: list[list[Any]]) -> None:
        end = self._disturbances.killed.get(life, float("inf"))
        consumers: dict[str, Consumer] = {}
        unconfirmed: dict[str, list[Published]] = defaultdict(list)
        doubled = []
        for at, kind, *rest in lines:
            match kind:
                case "on":
                    known = consumers.setdefault(rest[0], Consumer(life, rest[0], "", at, end))
                    known.topics, known.on = rest[1], at
                case "off" if rest[0] in consumers:
                    consumers[rest[0]].off = min(end, at)
                case "got":
                    label, publisher, number = rest
                    consumer = consumers.setdefault(label, Consumer(life, label, "", float("inf"), end))
                    if (publisher, number) in consumer.got:
                        doubled.append(
                            f"{publisher} {number} at {life} {label}: {consumer.got[publisher, number]:.3f}, {at:.3f}"
                        )
                    else:
                        consumer.got[publisher, number] = at
                case "pub":
                    event = Published(f"{life}.{rest[0]}", rest[1], rest[2], at)
                    self._events[event.publisher].append(event)
                    unconfirmed[rest[0]].append(event)
                case "confirmed":
                    for key, number in rest[0].items():
                        waiting = unconfirmed[key]
                        count = next((i for i, each in enumerate(waiting) if each.number > number), len(waiting))
                        for event in waiting[:count]:
                            event.confirmed = at
                        del waiting[:count]
                case "unpublished":
                    self.found.problems.append(f"{life}: event {rest[1]} of {rest[0]} raised {rest[2]}")
                case "bus" if any(rest):
                    self.found.problems.append(f"{life}: the connection of the bus dropped, refused or failed {rest}")
        self._problem("doubled", doubled)
        self._consumers += consumers.values()

    # --- events

    def events(self) -> None:
        """Look for lost events, and for events that came out of order."""
        every = [event for events in self._events.values() for event in events]
        self.found.counts["published"] += len(every)
        self.found.counts["confirmed"] += sum(each.confirmed is not None for each in every)
        lost = []
        for consumer in self._consumers:
            self.found.counts["received"] += len(consumer.got)
            if consumer.topics:
                lost += [self._told(event, consumer) for event in self._lost(consumer)]
        self._problem("lost", lost)
        self._problem("out of order", [text for consumer in self._consumers for text in self._disorder(consumer)])

    @staticmethod
    def _told(event: Published, consumer: Consumer) -> str:
        confirmed = "never" if event.confirmed is None else f"{event.confirmed:.3f}"
        return (
            f"{event.publisher} {event.number} on {event.topic}, published {event.at:.3f}, confirmed {confirmed}, at "
            f"{consumer.life} {consumer.label} {consumer.topics} since {consumer.on:.3f} until {consumer.off:.3f}"
        )

    def _lost(self, consumer: Consumer) -> Iterator[Published]:
        for publisher, events in self._events.items():
            start = bisect_left(events, consumer.on, key=lambda each: each.at)
            end = bisect_left(events, consumer.off - _ARRIVES, key=lambda each: each.at)
            for event in events[start:end]:
                if (publisher, event.number) in consumer.got or not consumer.wants(event.topic):
                    continue
                if self._is_promised(event, consumer):
                    yield event
                else:
                    self.found.counts["missed, not promised"] += 1

    def _is_promised(self, event: Published, consumer: Consumer) -> bool:
        arrived = event.confirmed
        if arrived is None:
            arrived = self._resent(event)
            if arrived is None:
                return False
        if arrived + _ARRIVES > consumer.off:
            return False
        disturbances = self._disturbances
        here = disturbances.of(consumer.life, event.at - 1.0, arrived + 1.0)
        if here and self._forms[consumer.life[0]] == "plain":
            return False
        until = max([arrived, *(each.over + RECOVERY for each in here)]) + 1.0
        broken = disturbances.of_broker(event.at - (0.0 if self._is_amqp else _UNSAVED), until)
        if self._is_amqp and not event.is_persistent and broken:
            return False
        if not self._is_amqp and any(each.kind == "crash" for each in broken):
            return False
        if any(
            each.kind == "crash" and each.at - _UNSAVED < consumer.on < each.at
            for each in disturbances.of_broker(0, until)
        ):
            return False  # the subscription may be one that the last save does not have
        return not self._is_unknown(event, consumer)

    def _resent(self, event: Published) -> float | None:
        """Return when a stored event of a killed publisher is sent again; ``None`` if that is not promised."""
        killed = self._disturbances.killed.get(event.life)
        if not event.is_persistent or killed is None or event.at > killed - _STORED:
            return None
        name, _, life = event.life.partition(".")
        up = self._up.get(f"{name}.{int(life) + 1}")
        return None if up is None or f"{name}.{int(life) + 1}" in self._disturbances.killed else up + RECOVERY

    def _is_unknown(self, event: Published, consumer: Consumer) -> bool:
        """Return whether the publisher could not know of the consumer."""
        disturbances, up = self._disturbances, self._up.get(event.life, 0.0)
        for each in disturbances.of(event.life, event.at, event.at):
            if consumer.on > each.at - 1.0:
                return True  # it joined while the publisher was away
        return any(event.at <= each.over + RECOVERY for each in disturbances.of(consumer.life, up - 1.0, up))

    def _disorder(self, consumer: Consumer) -> Iterator[str]:
        highest: dict[str, int] = {}
        for (publisher, number), at in consumer.got.items():
            if number < highest.get(publisher, -1):
                if at < self._up[consumer.life] + RECOVERY and not consumer.life.endswith(".1"):
                    # events for a killed process reach its successor. MQTT: each channel takes its own, one after the
                    # other. AMQP: the broker returns the unsettled ones to the queue after it delivered newer ones
                    self.found.counts["out of order after a kill, not promised"] += 1
                    continue
                yield f"{publisher} {number} after {highest[publisher]} at {consumer.life} {consumer.label}, {at:.3f}"
            highest[publisher] = max(number, highest.get(publisher, -1))

    # --- notifications

    def notifications(self) -> None:
        """Check the outcome of each notification."""
        late, wrong, causeless, nameless = [], [], [], []
        lasting = [each for each in self._consumers if each.topics]
        for life, lines in self._ledgers.items():
            outcomes = {each[2]: each for each in lines if each[1] == "notified"}
            for event in self._events[f"{life}.n"]:
                outcome = outcomes.get(event.number)
                told = f"{life} {event.number} on {event.topic}, published {event.at:.3f}: {outcome}"
                limit = event.at + NOTIFIED_WITHIN + 1.0
                away = self._disturbances.of(life, event.at, limit)
                if outcome is None:
                    if min(self._disturbances.killed.get(life, float("inf")), self._end_of_run) > limit:
                        late.append(told)
                    continue
                at, _, _, error, missing, text = outcome
                self.found.counts[f"notifications {error or 'resolved'}"] += 1
                if at > limit and not any(each.kind == "suspend" for each in away):
                    late.append(told)
                if not error:
                    wrong += [
                        f"{told}; {each.life} {each.label} got it {each.got.get((event.publisher, event.number))}"
                        for each in lasting
                        if self._was_notified_of(event, at, each)
                        and each.got.get((event.publisher, event.number), at + 1) > at
                    ]
                elif error == "PartialNotificationError" and not missing and "answers of the members" not in text:
                    nameless.append(told)
                if error and not self._disturbances.of(None, event.at - NOTICE, at):
                    causeless.append(told)
        self._problem("late notifications", late)
        self._problem("wrong notifications", wrong)
        self._problem("nameless notifications", nameless)
        self._problem("causeless failures of notifications", causeless)

    def _was_notified_of(self, event: Published, at: float, consumer: Consumer) -> bool:
        """Return whether a consumer must have an event by ``at``."""
        return (
            consumer.on < event.at - 0.1
            and consumer.off > at + 0.1
            and consumer.wants(event.topic)
            and not self._disturbances.of(consumer.life, event.at - NOTICE, at)
            and not self._is_unknown(event, consumer)
        )

    # --- members

    def losses(self) -> None:
        """Check that the loss of each killed process was noticed."""
        late = []
        for life, at in self._disturbances.killed.items():
            for other, lines in self._ledgers.items():
                is_alive = self._up.get(other, float("inf")) < at < self._end_of(other) - NOTICE
                if not is_alive or self._disturbances.of(other, at - 1.0, at + NOTICE):
                    continue
                for part in ("admin", "bus"):
                    name = f"{life}.{part}"
                    seen = [each for each in lines if each[1] in ("seen", "lost") and each[2] == name]
                    before = [each for each in seen if each[0] <= at]
                    if not before or before[-1][1] == "lost":
                        continue
                    took = next((each[0] for each in seen if each[0] > at and each[1] == "lost"), float("inf")) - at
                    self.found.notice[part] = max(took, self.found.notice.get(part, 0.0))
                    if took > NOTICE:
                        late.append(f"{other} noticed {took:.2f} s after its end at {at:.3f} that {name} is lost")
        self._problem("losses noticed late", late)
        for life, lines in self._ledgers.items():
            for at, kind, *rest in lines:
                if kind == "lost" and not self._disturbances.of(None, at - NOTICE, at):
                    self.found.counts["false losses"] += 1
                    if not rest[0]:
                        continue  # a heartbeat that came before the first announcement has no name
                    self.found.problems.append(f"{life} lost {rest[0]} at {at:.3f} without a fault")

    # --- sessions

    def sessions(self) -> None:
        """Check what came of each session."""
        problems: list[str] = []
        for life, lines in self._ledgers.items():
            begun = {each[2]: each[0] for each in lines if each[1] == "session"}
            for name, begin in begun.items():
                problems += self._session(life, name, begin, lines)
        self._problem("broken sessions", problems)

    def _session(self, life: str, name: str, begin: float, lines: list[list[Any]]) -> Iterator[str]:
        sent = [each[3] for each in lines if each[1] == "session-pub" and each[2] == name]
        over = next((each for each in lines if each[1] == "session-over" and each[2] == name), None)
        killed = self._disturbances.killed.get(life)
        if over is None and killed is None:
            return
        end = over[0] if over is not None else killed or 0.0
        for other, theirs in self._ledgers.items():
            is_quiet = not self._disturbances.of(other, begin - 1.0, end + NOTICE)
            is_alive = self._up.get(other, float("inf")) < begin - 1.0 and self._end_of(other) > end + NOTICE
            if not is_alive or not is_quiet:
                continue
            got = [each[3] for each in theirs if each[1] == "session-got" and each[2] == name]
            ends = [each for each in theirs if each[1] == "session-end" and each[2] == name]
            told = f"{name} at {other}, begun {begin:.3f}: sent {sent}, over {over}, got {got}, ends {ends}"
            if over is None:
                taken = [each[0] for each in theirs if each[1] == "session-got" and each[2] == name]
                limit = end + NOTICE + (self._lingers(theirs, f"{life}.admin", taken[0]) if got else 0.0)
                if got and not ends and limit > self._end_of_run:
                    continue  # the run ended before the error had to be there
                if got and ([each[3] for each in ends] != ["error"] or taken[-1] > ends[0][0]):
                    yield f"killed: {told}"
                elif got and ends[-1][0] > limit:
                    yield f"the error is late: {told}"
                else:
                    self.found.counts["sessions of killed processes"] += bool(got)
                continue
            if self._disturbances.of(life, begin - 1.0, end + _ARRIVES):
                continue
            self.found.counts["sessions"] += 1
            replies = sorted(each[3] for each in lines if each[1] == "reply" and each[2] == name and each[4] == other)
            if got != sent or [each[3] for each in ends] != [over[3]]:
                yield told
            if replies != sent and got == sent:
                yield f"replies {replies}: {told}"

    @staticmethod
    def _lingers(lines: list[list[Any]], sender: str, taken: float) -> float:
        """Return how much later a session ends whose first event was taken after its sender was lost.

        The outbox of a killed process is published by its next run. The sender may be alive again, so such a session
        ends when the sender is forgotten. The ledger has the loss a little later than the process knows it.
        """
        known = taken + LAG
        seen = [each[1] for each in lines if each[1] in ("seen", "lost") and each[2] == sender and each[0] <= known]
        return LINGER if seen and seen[-1] == "lost" else 0.0


def check(folder: Path, faults: list[Fault], forms: Mapping[str, str], protocol: str, end: float) -> Findings:
    """Compare the ledgers in ``folder`` with the promises.

    Args:
        folder: has the ledgers.
        faults: all faults of the run.
        forms: process -> ``durable`` or ``plain``.
        protocol: of the broker.
        end: of the run; what was written later does not count.
    """
    checking = Check(folder, faults, forms, protocol, end)
    checking.events()
    checking.notifications()
    checking.losses()
    checking.sessions()
    return checking.found
