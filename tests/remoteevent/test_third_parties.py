"""Filters, multiplexers, demultiplexers, correlators, and chains of them (EV.3.2, EV.3.4)."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from messaging.errors import (
    ArgumentError,
    DeadlineError,
    InvalidEventError,
    ListenerGoneError,
    MessagingError,
    UnknownEventError,
)
from messaging.remoteevent import (
    EventCorrelator,
    EventGenerator,
    EventMailbox,
    EventServer,
    ListenerReference,
    NotificationDemultiplexer,
    NotificationFilter,
    NotificationMultiplexer,
    RemoteEvent,
    RemoteListener,
    RetryPolicy,
    StoreAndForwardAgent,
)
from messaging.testing.tables import table
from messaging.testing.waiting import PATIENCE, eventually
from tests.leases.conftest import Connect
from tests.remoteevent.helpers import FAST, Recorder, deliver_all, event, events, generate, taken

# --- filters


def test_an_event_that_the_predicate_does_not_want_is_consumed(target: Recorder) -> None:
    """Scenario 39: no unknown-event, no delivery; the numbers show a gap."""
    third = NotificationFilter(lambda each: each.sequence_number % 3 == 0, target)
    deliver_all(third, events(1, 10))
    third.notify(event(11))
    third.notify(event(12))
    assert target.numbers == [3, 6, 9, 12]
    assert (third.passed, third.consumed) == (4, 8)


def test_a_filter_may_change_what_it_passes_on(target: Recorder) -> None:
    NotificationFilter(lambda each: each.with_handback("changed"), target).notify(event(1))
    assert target.events == [event(1, handback="changed")]


def test_the_sender_of_a_filter_sees_the_outcomes_of_the_next_party(target: Recorder) -> None:
    third = NotificationFilter(lambda each: each.sequence_number != 2, target)
    target.unknown = {("source", 9)}
    outcomes = third.deliver([event(1), event(2), event(1, 9), event(3)]).result(PATIENCE)
    assert [type(each) for each in outcomes] == [type(None), type(None), UnknownEventError, type(None)]
    target.error = OSError("busy")
    outcomes = third.deliver(events(2, 5)).result(PATIENCE)
    assert [each is None for each in outcomes] == [True, False]  # 3 failed: what follows was not tried
    target.error = None
    target.go()
    with pytest.raises(ListenerGoneError):
        third.notify(event(3))


def test_a_predicate_that_raises_or_hangs_fails_the_notification(target: Recorder) -> None:
    third = NotificationFilter(lambda each: 1 // (each.sequence_number - 3), target)
    outcomes = third.deliver(events(1, 5)).result(PATIENCE)
    assert outcomes[:2] == [None, None]
    assert "ZeroDivisionError" in str(outcomes[2])
    assert len(outcomes) == 3
    release = threading.Event()
    hanging = NotificationFilter(lambda _event: release.wait(PATIENCE), target, time_limit=0.1)
    with pytest.raises(DeadlineError):
        hanging.notify(event(1))
    with pytest.raises(DeadlineError, match="earlier"):
        hanging.notify(event(2))
    release.set()
    eventually(lambda: hanging.deliver([event(3)]).result(PATIENCE) == [None])


# --- multiplexers


def test_one_registration_at_the_source_serves_many_listeners() -> None:
    """Scenario 36: each with its own handback, put in by the agent."""
    listeners = {name: Recorder() for name in ("a", "b", "c")}
    with EventGenerator("source", events=[1], begin=0) as generator:
        spread = NotificationMultiplexer()
        generator.register(1, "of the source", spread, 60.0)
        for name, each in listeners.items():
            registration = spread.register("source", 1, None if name == "c" else name, each, 60.0)
            assert registration.kind == ("source", 1)
        generate(generator, 50)
        eventually(lambda: all(len(each.events) == 50 for each in listeners.values()))
        assert len(generator.landlord) == 1
    for name, each in listeners.items():
        assert each.numbers == [*range(1, 51)]
        assert {received.handback for received in each.events} == {None if name == "c" else name}
    spread.close()


def test_a_listener_that_fails_is_tried_again_and_the_others_get_nothing_twice() -> None:
    good, bad = Recorder(), Recorder()
    bad.error = OSError("away")
    with EventGenerator("source", events=[1], begin=0, retry=FAST) as generator:
        spread = NotificationMultiplexer()
        spread.register("source", 1, None, good, 60.0)
        spread.register("source", 1, None, bad, 60.0)
        generator.register(1, None, spread, 60.0)
        generate(generator, 5)
        bad.calls.wait_for(4)
        bad.error = None
        eventually(lambda: bad.numbers == [1, 2, 3, 4, 5])
        eventually(lambda: good.numbers == [1, 2, 3, 4, 5])


def test_a_listener_that_stays_away_holds_up_the_others_for_a_bounded_time() -> None:
    good, bad = Recorder(), Recorder()
    bad.error = OSError("away")
    retry = RetryPolicy(attempts=3, first_delay=0.01, max_delay=0.2)
    with EventGenerator("source", events=[1], begin=0, retry=FAST) as generator:
        spread = NotificationMultiplexer(retry=retry)
        spread.register("source", 1, None, good, 60.0)
        failing = spread.register("source", 1, None, bad, 60.0)
        generator.register(1, None, spread, 60.0)
        generate(generator, 1000)
        eventually(lambda: good.numbers == [*range(1, 1001)])
        counts = spread.counts(failing)
        assert counts is not None
        assert counts.dropped > 0
        bad.error = None

        def is_back() -> bool:
            generator.generate(1)
            return bool(bad.events)

        eventually(is_back)  # it is tried again from time to time
    assert good.numbers == [*range(1, good.numbers[-1] + 1)]


def test_a_predicate_that_ends_its_thread_ends_no_filter(target: Recorder) -> None:
    calls: list[int] = []

    def predicate(event: RemoteEvent) -> bool:
        calls.append(event.sequence_number)
        if len(calls) == 1:
            raise SystemExit
        return True

    party = NotificationFilter(predicate, target)
    (outcome,) = party.deliver(events(1, 2)).result(PATIENCE)
    assert outcome is not None
    assert party.deliver(events(1, 2)).result(PATIENCE) == [None, None]
    assert target.numbers == [1, 2]


def test_a_multiplexer_forgets_listeners_that_are_gone_or_do_not_know_the_kind() -> None:
    listeners = [Recorder() for _ in range(3)]
    listeners[0].go()
    listeners[1].unknown = {("source", 1)}
    spread = NotificationMultiplexer()
    registrations = [spread.register("source", 1, None, each, 60.0) for each in listeners]
    deliver_all(spread, events(1, 3))
    assert [each.lease.is_ended for each in registrations] == [True, True, False]
    assert listeners[2].numbers == [1, 2, 3]
    registrations[2].lease.cancel()
    with pytest.raises(UnknownEventError):
        spread.notify(event(4))
    assert spread.register("source", 1, None, listeners[2], 60.0).sequence_number in (0, 3)


# --- demultiplexers


def test_notifications_are_spread_by_source_and_id() -> None:
    """Scenario 37."""
    listeners = {kind: Recorder() for kind in itertools.product(("a", "b"), (1, 2))}
    spread = NotificationDemultiplexer()
    for kind, each in listeners.items():
        spread.add(kind, each)
    with EventGenerator("a", events=[1, 2], begin=0) as first, EventGenerator("b", events=[1, 2], begin=0) as second:
        for generator in (first, second):
            for event_id in (1, 2):
                generator.register(event_id, None, spread, 60.0)
            for _ in range(10):
                generator.generate(1)
                generator.generate(2)
        eventually(lambda: all(len(each.events) == 10 for each in listeners.values()))
    for kind, each in listeners.items():
        assert {received.kind for received in each.events} == {kind}
        assert each.numbers == [*range(1, 11)]


def test_an_event_for_no_local_listener_is_refused_to_the_sender(target: Recorder) -> None:
    """Scenario 38."""
    spread = NotificationDemultiplexer()
    with EventGenerator("source", events=[1, 2], begin=0) as generator:
        known = generator.register(1, None, spread, 60.0)
        unknown = generator.register(2, None, spread, 60.0)
        spread.add(known, target)
        with pytest.raises(UnknownEventError):
            spread.notify(event(1, 2))
        generator.generate(2)
        eventually(lambda: unknown.lease.is_ended)
        generator.generate(1)
        target.events.wait_for(1)
        assert not known.lease.is_ended
        assert spread.remove(known)
        assert not spread.remove(known)
    junk: tuple[Any, ...] = (None, "a", ("a",), ("", 1), ("a", True), 5)
    for each in junk:
        with pytest.raises((ArgumentError, InvalidEventError)):
            spread.add(each, target)


# --- correlators


@dataclass(frozen=True, kw_only=True)
class Burst(RemoteEvent):
    size: int


def test_a_pattern_of_events_makes_a_new_event(target: Recorder, tmp_path: Path) -> None:
    """EV.3.2.2."""
    seen: list[int] = []

    def match(received: RemoteEvent) -> list[dict[str, Any]]:
        seen.append(received.sequence_number)
        return [{"size": len(seen)}] if len(seen) % 3 == 0 else []

    with EventGenerator("bursts", events=["burst"], begin=0, path=tmp_path / "g", listeners={"t": target}) as generator:
        generator.register("burst", None, target, 60.0)
        correlator = EventCorrelator(match, generator, "burst", Burst)
        deliver_all(correlator, events(1, 7))
        eventually(lambda: len(target.events) == 2)
        with pytest.raises(UnknownEventError):
            EventCorrelator(match, generator, "other")
        with pytest.raises(ArgumentError):
            EventCorrelator("match", generator, "burst")  # type: ignore[arg-type]
    assert [(each.source, each.sequence_number, each.data["size"]) for each in target.events] == [
        ("bursts", 1, 3),
        ("bursts", 2, 6),
    ]


# --- chains


class _Party:
    """Makes the parties of a chain, from the last one to the first."""

    def __init__(self, stack: ExitStack, folder: Path) -> None:
        self._stack = stack
        self._folder = folder
        self._count = itertools.count()

    def filter(self, target: Any) -> Any:
        return NotificationFilter(lambda each: each.sequence_number % 2 == 0, target)

    def agent(self, target: Any) -> Any:
        path = self._folder / f"agent{next(self._count)}"
        return self._stack.enter_context(StoreAndForwardAgent(path, target=target, retry=FAST))

    def mailbox(self, target: Any) -> Any:
        path = self._folder / f"mailbox{next(self._count)}"
        box = self._stack.enter_context(EventMailbox(path, retry=FAST)).register(60.0)
        box.enable_delivery(target)
        return box.listener

    def multiplexer(self, target: Any) -> Any:
        spread = NotificationMultiplexer()
        self._stack.callback(spread.close)
        spread.register("source", 1, "h", target, 60.0)
        return spread


@table("order", [*itertools.permutations(["filter", "agent", "mailbox"])], ids="-".join)
def test_chains_in_any_order_obey_each_policy(order: tuple[str, ...], tmp_path: Path) -> None:
    """Scenario 40: generator, filter, agent and mailbox; the listener is away at first."""
    target = Recorder(OSError("away"))
    with ExitStack() as stack:
        party = _Party(stack, tmp_path)
        first: Any = target
        for name in reversed([*order, "multiplexer"]):
            first = getattr(party, name)(first)
        generator = stack.enter_context(EventGenerator("source", events=[1], begin=0, retry=FAST))
        generator.register(1, "h", first, 60.0)
        generate(generator, 100)
        target.calls.wait_for(1)
        target.error = None
        eventually(lambda: target.numbers and target.numbers[-1] == 100)
    assert target.numbers == [*range(2, 101, 2)]
    assert {(each.source, each.id, each.handback) for each in target.events} == {("source", 1, "h")}


def test_a_chain_over_a_broker(connect: Connect, channel: str, target: Recorder, tmp_path: Path) -> None:
    """Scenario 40: each party is reached over the broker, and knows the next one's channel only."""
    with ExitStack() as stack:
        here, there = connect(), connect()
        box = stack.enter_context(EventMailbox(tmp_path / "mailbox")).register(60.0)
        parties: dict[str, Callable[[Any], Any]] = {
            "box": lambda _: box.listener,
            "agent": lambda before: StoreAndForwardAgent(tmp_path / "agent", target=before, retry=FAST),
            "filter": lambda before: NotificationFilter(lambda each: each.sequence_number > 10, before),
        }
        before: Any = None
        for name, make in parties.items():
            party = make(before)
            if hasattr(party, "close"):
                stack.enter_context(party)
            server = stack.enter_context(EventServer(there, f"{channel}/{name}", party))
            server.ready.result(PATIENCE)
            before = RemoteListener(here, ListenerReference(f"{channel}/{name}"))
        generator = stack.enter_context(EventGenerator("source", events=[1], begin=0))
        generator.register(1, {"h": 1}, before, 60.0)
        generate(generator, 30)
        eventually(lambda: len(box) == 20)
        received = box.drain()
    assert taken(received) == [*range(11, 31)]
    assert {each.handback["h"] for each in received} == {1}


def test_parties_refuse_what_is_no_listener(target: Recorder) -> None:
    junk: tuple[Any, ...] = (None, 5, "x", object())
    for each in junk:
        with pytest.raises(ArgumentError):
            NotificationFilter(lambda _event: True, each)
        with pytest.raises(MessagingError):
            NotificationMultiplexer().register("s", 1, None, each)
    for make in (
        lambda: NotificationFilter("x", target),  # type: ignore[arg-type]
        lambda: NotificationFilter(lambda _event: True, target, time_limit=0),
        lambda: NotificationMultiplexer(""),
    ):
        with pytest.raises(ArgumentError):
            make()
