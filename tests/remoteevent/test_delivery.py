"""Delivery to one listener: retries, targets that take another's place, targets that do not keep the contract."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from contextlib import closing as closing_all
from types import SimpleNamespace
from typing import Any

import pytest

from messaging.errors import (
    BoundReachedError,
    JournalError,
    ListenerGoneError,
    ReplyError,
    UnknownEventError,
    UnroutableError,
)
from messaging.execution import Promise, clock
from messaging.remoteevent import (
    EventGenerator,
    LeaseRenewalSet,
    NotificationMultiplexer,
    RemoteEvent,
    RetryPolicy,
)
from messaging.remoteevent import delivery as module
from messaging.remoteevent.delivery import EventDelivery, MemoryQueue
from messaging.remoteevent.listener import LocalTarget, Outcome, settled
from messaging.remoteevent.transactions import TransactionManager
from messaging.testing.clock import VirtualClock
from messaging.testing.tables import table
from messaging.testing.waiting import PATIENCE, eventually
from tests.remoteevent.helpers import FAST, Recorder, event, events, taken
from tests.threads import in_background


class Target:
    """Answers with the outcomes that it is given, one list for each batch; then it acknowledges everything."""

    def __init__(self, *answers: Any) -> None:
        self.answers = [*answers]
        self.batches: list[list[int]] = []

    def deliver(self, events: Sequence[RemoteEvent]) -> Any:
        self.batches.append(taken(events))
        answer = self.answers.pop(0) if self.answers else [None] * len(events)
        if isinstance(answer, Exception):
            raise answer
        return answer if answer is None or isinstance(answer, Promise) else settled(answer)


class Queue(MemoryQueue):
    """A queue that cannot be read for some time."""

    def __init__(self, failures: int) -> None:
        super().__init__(100)
        self.failures = failures

    def peek(self, most: int) -> list[RemoteEvent]:
        if self.failures:
            self.failures -= 1
            raise JournalError("journal", "the disk is away")
        return super().peek(most)


def queue_of(*numbers: int, failures: int = 0) -> Queue:
    queue = Queue(failures)
    for number in numbers:
        queue.put(event(number))
    return queue


@pytest.fixture
def closing() -> Iterator[list[EventDelivery]]:
    deliveries: list[EventDelivery] = []
    yield deliveries
    for each in deliveries:
        each.close().result(PATIENCE)


def test_a_timer_that_fires_early_makes_the_attempt(
    closing: list[EventDelivery], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Timers of uvloop do, by some milliseconds; to this clock each one is early."""
    monkeypatch.setattr(module, "clock", SimpleNamespace(monotonic=lambda: 100.0, call_later=clock.call_later))
    target = Target([ReplyError("OSError", "away")], [ReplyError("OSError", "away")])
    closing.append(EventDelivery("d", target, queue_of(1), policy=FAST))
    closing[0].wake()
    eventually(lambda: len(target.batches) == 3)


def test_failures_of_the_queue_do_not_count_against_the_event(closing: list[EventDelivery]) -> None:
    target = Target([ReplyError("OSError", "away")])
    policy = RetryPolicy(attempts=2, max_age=60.0, first_delay=0.01, max_delay=0.02)
    closing.append(EventDelivery("d", target, queue_of(1, failures=3), policy=policy))
    closing[0].wake()
    eventually(lambda: closing[0].counts.delivered == 1)
    assert closing[0].counts.dropped == 0


def _of_a_generator(stack: ExitStack, listener: Recorder) -> None:
    generator = stack.enter_context(EventGenerator("source", events=[1]))
    generator.register(1, None, listener, 600.0)
    generator.generate(1)


def _of_a_multiplexer(stack: ExitStack, listener: Recorder) -> None:
    spread = stack.enter_context(closing_all(NotificationMultiplexer()))
    spread.register("source", 1, None, listener, 600.0)
    _of_a_generator(stack, spread)  # type: ignore[arg-type]


def _of_a_renewal_set(stack: ExitStack, listener: Recorder) -> None:
    renewals = stack.enter_context(LeaseRenewalSet(600.0))
    renewals.set_expiration_warning_listener(listener, 600.0)


def _inside_a_transaction(stack: ExitStack, listener: Recorder) -> None:
    transaction = stack.enter_context(TransactionManager()).create(600.0)
    generator = stack.enter_context(EventGenerator("source", events=[1]))
    generator.register(1, None, listener, 600.0, transaction=transaction)
    generator.generate(1, transaction=transaction)


@table("send", [_of_a_generator, _of_a_multiplexer, _of_a_renewal_set, _inside_a_transaction])
def test_a_listener_that_is_back_40_s_after_a_restart_of_the_broker_misses_nothing(
    virtual_clock: VirtualClock, send: Callable[[ExitStack, Recorder], None]
) -> None:
    """The broker tells at once that a listener is not there: attempts without a wait must not use up the policy."""
    listener = Recorder(UnroutableError("no subscriber"))
    with ExitStack() as stack:
        send(stack, listener)
        virtual_clock.advance(40.0)
        assert not listener.events
        listener.error = None
        virtual_clock.until(lambda: len(listener.events) == 1, 20.0)


@table("answer", [None, [], RuntimeError("broken")], ids=["no promise", "no outcome", "raises"])
def test_a_target_that_does_not_keep_the_contract_is_tried_again(closing: list[EventDelivery], answer: Any) -> None:
    target = Target(answer)
    delivery = EventDelivery("d", target, queue_of(1), policy=FAST)
    closing.append(delivery)
    delivery.wake()
    eventually(lambda: delivery.counts.delivered == 1)
    assert target.batches == [[1], [1]]


@table("failure", [UnknownEventError("no"), ListenerGoneError("gone"), ReplyError("ValueError", "")])
def test_a_late_failure_of_a_replaced_target_concerns_the_new_one_in_no_way(
    closing: list[EventDelivery], failure: Exception
) -> None:
    held: Promise[list[Outcome]] = Promise("the first target")
    first, second = Target(held), Target()
    called: list[Any] = []
    queue = queue_of(1, 2, 3)
    delivery = EventDelivery("d", first, queue, policy=FAST, on_unknown_event=called.append, on_gone=called.append)
    closing.append(delivery)
    delivery.wake()
    eventually(lambda: first.batches)
    delivery.enable(second)
    held.resolve([None, failure])
    eventually(lambda: delivery.counts.delivered == 3)
    assert second.batches == [[2, 3]]
    assert not called
    assert delivery.is_enabled
    queue.put(event(4))
    delivery.wake()
    eventually(lambda: second.batches == [[2, 3], [4]])


def test_an_event_that_the_target_has_no_room_for_is_tried_again_from_there_on(closing: list[EventDelivery]) -> None:
    target = Target([None, BoundReachedError("full")], [None])
    closing.append(EventDelivery("d", target, queue_of(1, 2, 3), policy=FAST))
    closing[0].wake()
    eventually(lambda: closing[0].counts.delivered == 3)
    assert target.batches == [[1, 2, 3], [2, 3], [3]]


def test_closing_waits_for_the_batch_and_no_longer(closing: list[EventDelivery]) -> None:
    held: Promise[list[Outcome]] = Promise("the target")
    delivery = EventDelivery("d", Target(held), queue_of(1, 2))
    delivery.wake()
    eventually(lambda: delivery.is_busy)
    stopped = delivery.close()
    assert not stopped.done()
    in_background(lambda: held.resolve([None, None]))()
    stopped.result(PATIENCE)
    assert not delivery.is_busy


def test_events_that_another_reader_took_meanwhile_are_not_delivered() -> None:
    """Scenario 51: delivery is disabled and enabled while its worker has read events, and not passed them on."""
    target = Recorder()
    waiting = events(1, 5)
    is_switched = False

    class Queue:
        def peek(self, most: int) -> list[RemoteEvent]:
            nonlocal is_switched
            found = waiting[:most]
            if not is_switched:
                is_switched = True
                delivery.disable()
                del waiting[:3]  # by an iterator, which acknowledges them
                delivery.enable()
            return found

        def settle(self, count: int) -> None:
            del waiting[:count]

    delivery = EventDelivery("test", LocalTarget(target), Queue(), is_enabled=False)
    delivery.enable()
    eventually(lambda: not waiting)
    assert target.numbers == [4, 5]
    delivery.close().result(PATIENCE)
