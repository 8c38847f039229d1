"""The rest of a batch is not passed after the reason for it has ended (EV.2.1); what was passed counts."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from messaging import Messaging, execution
from messaging.errors import DeadlineError
from messaging.execution import Promise
from messaging.leases import Landlord
from messaging.remoteevent import (
    EventGenerator,
    EventMailbox,
    IdempotentListener,
    ListenerServer,
    NotificationDemultiplexer,
    NotificationFilter,
    NotificationMultiplexer,
    RemoteEvent,
    RemoteListener,
)
from messaging.remoteevent.delivery import EventDelivery, MemoryQueue
from messaging.remoteevent.listener import BatchListener, LocalTarget, settled
from messaging.testing import waiting
from messaging.testing.tables import table
from messaging.testing.waiting import PATIENCE, eventually
from tests.remoteevent.helpers import FAST, Box, Recorder, events, generate, ready, store, taken


class Slow:
    """A listener that returns when the test lets it."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget all calls, and hold the next ones."""
        self.calls: waiting.Recorder[RemoteEvent] = waiting.Recorder()
        self.permits = threading.Semaphore(0)

    def notify(self, event: RemoteEvent) -> None:
        self.calls.append(event)
        assert self.permits.acquire(timeout=PATIENCE)

    def go_on(self) -> None:
        """Return from all calls."""
        self.permits.release(1000)


@pytest.fixture
def slow() -> Iterator[Slow]:
    listener = Slow()
    yield listener
    listener.go_on()


def _demultiplexed(listener: Any) -> NotificationDemultiplexer:
    made = NotificationDemultiplexer()
    made.add(("boiler", 1), listener)
    return made


def _multiplexed(listener: Any) -> NotificationMultiplexer:
    made = NotificationMultiplexer()
    made.register("boiler", 1, None, listener)
    return made


def _begin_batch(boiler: EventGenerator, slow: Slow) -> None:
    """Have the listener hold the first event of a batch of many; it has returned from one event before."""
    generate(boiler, 1)
    slow.calls.wait_for(1)
    generate(boiler, 20)
    slow.permits.release()
    slow.calls.wait_for(2)


@table(
    "wrap",
    [lambda each: each, _demultiplexed, _multiplexed, IdempotentListener, lambda each: NotificationFilter(bool, each)],
)
def test_nothing_follows_the_end_of_a_lease_within_a_batch(
    slow: Slow, wrap: Callable[[Any], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Scenario 18."""
    now = [0.0]
    monkeypatch.setattr(execution.clock, "boot", lambda: now[0])
    with Landlord() as landlord:
        for end in (lambda lease: lease.cancel(), lambda _lease: now.append(now.pop() + 101.0)):
            slow.reset()
            with EventGenerator("boiler", events=[1], landlord=landlord, begin=0) as boiler:
                registration = boiler.register(1, None, wrap(slow), 100.0)
                _begin_batch(boiler, slow)
                end(registration.lease)
                slow.go_on()
            assert len(slow.calls) == 2


def test_nothing_follows_the_close_of_a_party_within_a_batch(slow: Slow) -> None:
    queue = MemoryQueue(100)
    for each in events(1, 20):
        queue.put(each)
    delivery = EventDelivery("boiler", LocalTarget(slow), queue)
    delivery.wake()
    slow.calls.wait_for(1)
    stopped = delivery.close()
    slow.go_on()
    stopped.result(PATIENCE)
    assert (len(slow.calls), len(queue)) == (1, 19)


def test_nothing_follows_the_end_of_a_registration_at_a_multiplexer_within_a_batch(slow: Slow) -> None:
    other = Recorder()
    multiplexer = NotificationMultiplexer(retry=FAST)
    with EventGenerator("boiler", events=[1], begin=0, retry=FAST) as boiler:
        branch = multiplexer.register("boiler", 1, None, slow)
        multiplexer.register("boiler", 1, None, other)
        boiler.register(1, None, multiplexer)
        _begin_batch(boiler, slow)
        branch.lease.cancel()
        slow.go_on()
        other.events.wait_for(21)
    assert (len(slow.calls), other.numbers) == (2, [*range(1, 22)])


def test_nothing_follows_the_removal_of_a_listener_within_a_batch(m: Messaging, slow: Slow) -> None:
    with ready(ListenerServer(m)) as server, EventGenerator("boiler", events=[1], begin=0, retry=FAST) as boiler:
        reference = server.add(slow)
        registration = boiler.register(1, None, RemoteListener(m, reference))
        _begin_batch(boiler, slow)
        server.remove(reference)
        slow.go_on()
        eventually(lambda: registration.lease.is_ended)
    assert len(slow.calls) == 2


@pytest.fixture
def holding(box: Box, slow: Slow) -> Box:
    """A registration whose target has the first of 20 events."""
    store(box, events(1, 20))
    box.enable_delivery(slow)
    slow.calls.wait_for(1)
    return box


def test_a_target_gets_nothing_more_of_its_batch_after_its_delivery_was_disabled(holding: Box, slow: Slow) -> None:
    holding.disable_delivery()
    slow.go_on()
    assert taken(holding.drain()) == [*range(2, 21)]
    assert len(slow.calls) == 1


def test_a_target_gets_nothing_more_of_its_batch_after_another_took_its_place(
    holding: Box, slow: Slow, other: Recorder
) -> None:
    holding.enable_delivery(other)
    slow.go_on()
    other.events.wait_for(19)
    assert (len(slow.calls), other.numbers) == (1, [*range(2, 21)])


def test_an_iterator_has_what_was_left_of_the_batch_of_a_target(holding: Box, slow: Slow) -> None:
    iterator = holding.remote_events()
    slow.go_on()
    first = iterator.next(PATIENCE)
    assert first is not None
    assert (first.sequence_number, len(slow.calls)) == (2, 1)


def test_a_target_gets_nothing_more_of_its_batch_after_the_end_of_its_registration(
    holding: Box, mailbox: EventMailbox, slow: Slow
) -> None:
    holding.lease.cancel()
    slow.go_on()
    mailbox.close()
    assert len(slow.calls) == 1


# --- the window of duplicates


def test_a_sender_that_is_killed_passes_at_most_32_events_again() -> None:
    """It passes again what it has not been told the outcome of."""
    listener = Recorder()
    for target in (LocalTarget(listener), NotificationFilter(bool, listener)):
        listener.events.clear()
        outcomes = target.deliver(events(1, 256)).result(PATIENCE)
        assert 0 < len(outcomes) == len(listener.events) <= 32


def test_a_slow_listener_gets_no_event_of_a_batch_after_50_ms(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("messaging.remoteevent.listener.clock", SimpleNamespace(monotonic=lambda: now[0]))

    def listener(_event: RemoteEvent) -> None:
        now[0] += 0.03

    assert LocalTarget(listener).deliver(events(1, 20)).result(PATIENCE) == [None, None]


def test_a_stub_sends_as_many_events_as_the_listener_takes_at_once(m: Messaging, channel: str) -> None:
    sent: list[int] = []

    class Choosy(BatchListener):
        def deliver(self, events: Sequence[RemoteEvent], /) -> Promise[list[Any]]:
            sent.append(len(events))
            return settled([None] * min(len(events), 40))

    with ready(ListenerServer(m, channel)) as server:
        stub = RemoteListener(m, server.add(Choosy()))
        for _ in range(5):
            stub.deliver(events(1, 256)).result(PATIENCE)
    assert sent == [32, 64, 40, 41, 40]


def test_a_call_that_is_cancelled_counts_as_failed_rather_than_withdrawn() -> None:
    """Otherwise its sender would try again at once, for ever, or would end its registration."""

    def listen(_event: RemoteEvent) -> None:
        raise asyncio.CancelledError

    outcomes = LocalTarget(listen).deliver(events(1, 2)).result(PATIENCE)
    assert [type(each) for each in outcomes] == [DeadlineError]
