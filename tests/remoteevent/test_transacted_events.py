"""Registrations and events within transactions (EV.2.4)."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import messaging
from messaging.errors import CannotCommitError, DeadlineError, JournalError, MessagingError, UnknownLeaseError
from messaging.execution import Promise
from messaging.remoteevent import EventGenerator, EventRegistration, transacted
from messaging.remoteevent.storage import Storage
from messaging.remoteevent.transactions import (
    RemoteTransactionManager,
    TransactionManager,
    TransactionServer,
    TransactionState,
)
from messaging.testing import waiting
from messaging.testing.clock import VirtualClock
from messaging.testing.tables import table
from messaging.testing.waiting import PATIENCE, eventually
from tests.leases.conftest import url_of
from tests.remoteevent.helpers import Recorder, generate, ready
from tests.threads import in_background


@pytest.fixture
def manager() -> Iterator[TransactionManager]:
    with TransactionManager() as made:
        yield made


@pytest.fixture
def generator() -> Iterator[EventGenerator]:
    with EventGenerator("source", events=["hot", "cold"], begin=0) as made:
        yield made


@pytest.fixture
def inside() -> Recorder:
    return Recorder()


@pytest.fixture
def outside() -> Recorder:
    return Recorder()


def test_a_registration_inside_has_an_id_of_its_own(
    generator: EventGenerator, manager: TransactionManager, inside: Recorder
) -> None:
    """Scenario 24."""
    before = generator.register("hot", None, inside, 60.0)
    transaction = manager.create(60.0)
    registration = generator.register("hot", "h", inside, 60.0, transaction=transaction)
    other = generator.register("hot", None, inside, 60.0, transaction=manager.create(60.0))
    assert len({before.id, registration.id, other.id}) == 3
    assert registration.source == before.source
    generator.generate("hot", transaction=transaction)
    inside.events.wait_for(1)
    assert (inside.events[0].id, inside.events[0].handback) == (registration.id, "h")
    assert inside.events[0].kind == registration.kind


def test_numbers_inside_count_relative_to_the_transaction_also_for_events_from_outside(
    generator: EventGenerator, manager: TransactionManager, inside: Recorder
) -> None:
    """Scenario 25."""
    generate(generator, 7, "hot")
    transaction = manager.create(60.0)
    registration = generator.register("hot", None, inside, 60.0, transaction=transaction)
    assert registration.sequence_number == 0
    generator.generate("hot", transaction=transaction)
    generator.generate("hot")  # visible inside
    generator.generate("cold")
    generator.generate("hot", transaction=transaction)
    eventually(lambda: len(inside.events) == 3)
    assert inside.numbers == [1, 2, 3]
    late = generator.register("hot", None, Recorder(), 60.0, transaction=transaction)
    assert late.sequence_number == 3


def test_listeners_outside_hear_nothing_until_the_commit(
    generator: EventGenerator, manager: TransactionManager, outside: Recorder
) -> None:
    """Scenario 26."""
    generator.register("hot", None, outside, 60.0)
    transaction = manager.create(60.0)
    generator.generate("hot", transaction=transaction)
    generator.generate("hot")
    generator.generate("hot", transaction=transaction)
    outside.events.wait_for(1)
    assert outside.numbers == [1]
    assert generator.sequence_number("hot") == 1
    transaction.commit(10)
    eventually(lambda: len(outside.events) == 3)
    assert outside.numbers == [1, 2, 3]


def test_listeners_outside_never_hear_of_an_aborted_transaction(
    generator: EventGenerator, manager: TransactionManager, outside: Recorder
) -> None:
    """Scenario 26."""
    generator.register("hot", None, outside, 60.0)
    transaction = manager.create(60.0)
    generator.generate("hot", transaction=transaction)
    transaction.abort(10)
    generator.generate("hot")
    outside.events.wait_for(1)
    assert outside.numbers == [1]
    with pytest.raises(MessagingError):
        generator.generate("hot", transaction=transaction)


@table("end", ["commit", "abort", "expire"])
def test_a_registration_inside_ends_with_the_transaction(
    generator: EventGenerator, manager: TransactionManager, inside: Recorder, end: str
) -> None:
    """Scenario 27."""
    transaction = manager.create(60.0)
    registration = generator.register("hot", None, inside, 600.0, transaction=transaction)
    if end == "commit":
        transaction.commit(10)
    elif end == "abort":
        transaction.abort(10)
    else:
        transaction.lease.renew(0.05)
    eventually(lambda: registration.lease.is_ended)
    with pytest.raises(UnknownLeaseError):
        registration.lease.renew(600.0)
    with pytest.raises(MessagingError):
        generator.register("hot", None, inside, 60.0, transaction=transaction)
    generator.generate("hot")
    assert not inside.events


def test_a_lease_that_is_shorter_than_the_transaction_ends_the_registration(
    generator: EventGenerator, manager: TransactionManager, inside: Recorder
) -> None:
    """Scenario 28."""
    transaction = manager.create(60.0)
    registration = generator.register("hot", None, inside, 0.2, transaction=transaction)
    eventually(lambda: registration.lease.is_ended)
    generator.generate("hot", transaction=transaction)
    transaction.commit(10)
    assert not inside.events


def test_an_object_that_is_registered_inside_and_outside_gets_two_notifications(
    generator: EventGenerator, manager: TransactionManager, inside: Recorder
) -> None:
    """Scenario 29."""
    generate(generator, 4, "hot")
    outer: EventRegistration = generator.register("hot", None, inside, 60.0)
    transaction = manager.create(60.0)
    inner = generator.register("hot", None, inside, 60.0, transaction=transaction)
    generator.generate("hot", transaction=transaction)
    eventually(lambda: len(inside.events) == 1)
    transaction.commit(10)
    eventually(lambda: len(inside.events) == 2)
    assert [(each.id, each.sequence_number) for each in inside.events] == [(inner.id, 1), (outer.id, 5)]


def test_a_prepared_transaction_of_a_persistent_generator_is_completed_once_after_a_restart(
    tmp_path: Path, outside: Recorder
) -> None:
    """The generator and the manager end between the two phases."""

    def open_generator() -> EventGenerator:
        return EventGenerator(
            "source", events=["hot"], begin=0, path=tmp_path / "generator", listeners={"out": outside}
        )

    with TransactionManager() as manager, open_generator() as generator:
        generator.register("hot", None, outside, 60.0)
        transaction = manager.create(60.0)
        generate(generator, 5, "hot", transaction=transaction)
        generator.participant.prepare(transaction.id)
        name = transaction.id
    with open_generator() as generator:
        generator.participant.commit(name)
        generator.participant.commit(name)  # told twice: the first answer was lost
        eventually(lambda: len(outside.events) == 5)
    with open_generator() as generator:
        generator.participant.commit(name)
        generator.generate("hot").result(PATIENCE)
        eventually(lambda: len(outside.events) == 6)
    assert outside.numbers == [1, 2, 3, 4, 5, 6]


def test_the_events_of_a_transaction_are_bounded(
    generator: EventGenerator, manager: TransactionManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("messaging.remoteevent.transacted.MAX_EVENTS", 3)
    transaction = manager.create(60.0)
    generate(generator, 3, "hot", transaction=transaction)
    with pytest.raises(MessagingError, match="3 events"):
        generator.generate("hot", transaction=transaction)


@table("is_persistent", [False, True])
def test_a_transaction_with_events_of_a_generator_that_has_closed_is_not_committed(
    tmp_path: Path, manager: TransactionManager, is_persistent: bool
) -> None:
    """The commit would claim that listeners outside are notified (EV.2.4)."""
    outside = Recorder()
    options: dict[str, Any] = {"path": tmp_path / "closed"} if is_persistent else {"begin": 0}
    with EventGenerator("open", events=[1], begin=0) as other:
        other.register(1, None, outside, 60.0)
        transaction = manager.create(60.0)
        with EventGenerator("closed", events=[1], **options) as closing:
            closing.generate(1, transaction=transaction)
            other.generate(1, transaction=transaction)
        with pytest.raises(CannotCommitError, match="closed"):
            transaction.commit(PATIENCE)
        other.generate(1)
        outside.events.wait_for(1)
        assert outside.numbers == [1]


def test_generators_of_one_transaction_commit_together(manager: TransactionManager, outside: Recorder) -> None:
    with EventGenerator("a", events=[1], begin=0) as first, EventGenerator("b", events=[1], begin=0) as second:
        for each in (first, second):
            each.register(1, None, outside, 60.0)
        transaction = manager.create(60.0)
        first.generate(1, transaction=transaction)
        second.generate(1, transaction=transaction)
        transaction.commit(10)
        eventually(lambda: len(outside.events) == 2)
        assert {each.source for each in outside.events} == {"a", "b"}


# --- what other transactions do, and managers that are gone


def test_a_registration_inside_hears_what_the_commit_of_another_transaction_makes_visible(
    generator: EventGenerator, manager: TransactionManager, inside: Recorder, outside: Recorder
) -> None:
    """EV.2.4: in order with the other events, and numbered relative to its own transaction."""
    mine, other = manager.create(60.0), manager.create(60.0)
    own = Recorder()
    generator.register("hot", None, inside, 60.0, transaction=mine)
    generator.register("hot", None, own, 60.0, transaction=other)
    generator.register("hot", None, outside, 60.0)
    generator.generate("hot", transaction=mine)
    generate(generator, 2, "hot", transaction=other)
    own.events.wait_for(2)
    other.commit(PATIENCE)
    inside.events.wait_for(3)
    outside.events.wait_for(2)
    mine.commit(PATIENCE)
    outside.events.wait_for(3)
    assert (inside.numbers, own.numbers, outside.numbers) == ([1, 2, 3], [1, 2], [1, 2, 3])


@table("is_holder", [True, False])
def test_a_transaction_whose_manager_is_gone_ends_with_its_lease(
    request: pytest.FixtureRequest, is_holder: bool
) -> None:
    """EV.2.4: also in a process that does not hold the lease of the transaction."""
    inside, outside = Recorder(), Recorder()
    url = url_of("memory", request)
    with (
        messaging.connect(url) as m,
        TransactionManager(time_limit=0.2) as manager,
        EventGenerator("source", events=["hot"], begin=0) as generator,
    ):
        with messaging.connect(url) as gone, ready(TransactionServer(gone, "transactions", manager)):
            remote = RemoteTransactionManager(m, "transactions")
            created = remote.create(0.5)
            transaction = created if is_holder else remote.transaction(created.id)
            registration = generator.register("hot", None, inside, 3600.0, transaction=transaction)
            generator.register("hot", None, outside, 3600.0)
            generator.generate("hot", transaction=transaction)
            inside.events.wait_for(1)
        eventually(lambda: registration.lease.is_ended)
        generator.generate("hot")
        outside.events.wait_for(1)
        remote.close()
    assert (len(inside.events), outside.numbers) == (1, [1])


def test_a_transaction_goes_on_if_its_lease_was_renewed_in_another_process(
    request: pytest.FixtureRequest, inside: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: waiting.Recorder[str] = waiting.Recorder()
    state_of = TransactionManager.state
    monkeypatch.setattr(TransactionManager, "state", lambda self, each: asked.append(each) or state_of(self, each))
    with (
        messaging.connect(url_of("memory", request)) as m,
        TransactionManager() as manager,
        EventGenerator("source", events=["hot"], begin=0) as generator,
        ready(TransactionServer(m, "transactions", manager)),
        RemoteTransactionManager(m, "transactions") as remote,
    ):
        created = remote.create(0.5)
        transaction = remote.transaction(created.id)
        registration = generator.register("hot", None, inside, 3600.0, transaction=transaction)
        assert created.lease is not None
        created.lease.renew(60.0).result(PATIENCE)
        asked.wait_for(1)
        generator.generate("hot", transaction=transaction)
        inside.events.wait_for(1)
        transaction.commit(PATIENCE)
        eventually(lambda: registration.lease.is_ended)


class Foreign:
    """A transaction of a manager of an application."""

    def __init__(
        self, remaining: Callable[[], float], name: str = "foreign", answer: Promise[TransactionState] | None = None
    ) -> None:
        self.id = name
        self._answer = answer or Promise.resolved(TransactionState.ABORTED)
        self.asked: waiting.Recorder[str] = waiting.Recorder()
        self._remaining = remaining

    @property
    def remaining(self) -> float:
        return self._remaining()

    def join(self, *_: Any, **__: Any) -> None:
        """Note the participant."""

    def when_ended(self, callback: Any) -> None:
        """Note the callback."""

    def ask_state(self) -> Promise[TransactionState]:
        self.asked.append(threading.current_thread().name)
        return self._answer


def test_a_transaction_of_an_application_that_does_not_answer_keeps_no_generator_waiting(
    generator: EventGenerator, manager: TransactionManager, inside: Recorder
) -> None:
    """Its code runs under no lock, and not on the event loop of the engine."""
    gate, looking = threading.Event(), threading.Event()
    calls: list[float] = []

    def remaining() -> float:
        calls.append(0.0)
        if len(calls) == 1:
            return 0.05
        looking.set()
        assert gate.wait(PATIENCE)
        return 0.0

    foreign = Foreign(remaining)
    registration = generator.register("hot", None, inside, 3600.0, transaction=foreign)  # type: ignore[arg-type]
    assert looking.wait(PATIENCE)
    other = manager.create(60.0)
    generator.register("hot", None, inside, 60.0, transaction=other)
    generator.generate("hot", transaction=other)
    inside.events.wait_for(1)
    gate.set()
    eventually(lambda: registration.lease.is_ended)


def test_transactions_of_applications_do_not_wait_for_one_that_does_not_answer(
    virtual_clock: VirtualClock, inside: Recorder
) -> None:
    """It occupies one worker, however long it takes."""
    gate = threading.Event()
    calls: list[str] = []

    def remaining(name: str) -> float:
        calls.append(name)
        if calls.count(name) == 1:
            return 0.05
        if name == "hanging":
            gate.wait()
        return 0.0

    with EventGenerator("source", events=["hot"], begin=0) as generator:
        registrations = {}
        for name in ("hanging", "answering"):
            foreign: Any = Foreign(partial(remaining, name), name)
            registrations[name] = generator.register("hot", None, inside, 3600.0, transaction=foreign)
        virtual_clock.advance(100.0)
        assert registrations["answering"].lease.is_ended
        assert not registrations["hanging"].lease.is_ended
        assert calls.count("hanging") == 2
        gate.set()
        virtual_clock.until(lambda: registrations["hanging"].lease.is_ended)


@table("error", [ValueError("no"), UnknownLeaseError("no"), None, "soon", float("nan")])
def test_a_transaction_of_an_application_that_fails_to_say_when_it_ends_is_asked_for_its_state(
    generator: EventGenerator, inside: Recorder, error: Any
) -> None:
    calls: list[float] = []

    def remaining() -> float:
        calls.append(0.0)
        if len(calls) == 1:
            return 0.05
        if isinstance(error, Exception):
            raise error
        return error  # type: ignore[no-any-return]

    foreign = Foreign(remaining)
    registration = generator.register("hot", None, inside, 3600.0, transaction=foreign)  # type: ignore[arg-type]
    foreign.asked.wait_for(1)
    eventually(lambda: registration.lease.is_ended)


# --- prepared transactions


def test_a_commit_that_is_called_again_while_it_waits_for_the_disk_publishes_each_event_once(
    generator: EventGenerator, manager: TransactionManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A manager that got no answer in time calls again."""
    published: waiting.Recorder[Promise[int]] = waiting.Recorder()

    def publish(*_: Any) -> Promise[int]:
        published.append(Promise("publish"))
        return published[-1]

    monkeypatch.setattr(generator.participant, "_publish_outside", publish)
    transaction = manager.create(60.0)
    generator.generate("hot", transaction=transaction)
    participant = generator.participant
    participant.prepare(transaction.id)
    first = in_background(lambda: participant.commit(transaction.id))
    published.wait_for(1)
    with pytest.raises(DeadlineError, match="being committed"):
        participant.commit(transaction.id)
    published[0].resolve(1)
    first()
    participant.commit(transaction.id)
    assert len(published) == 1
    assert not participant.is_active


def test_a_commit_whose_disk_takes_too_long_goes_on_with_the_same_writes(
    generator: EventGenerator, manager: TransactionManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    published: list[Promise[int]] = []

    def publish(*_: Any) -> Promise[int]:
        published.append(Promise("publish"))
        return published[-1]

    monkeypatch.setattr(generator.participant, "_publish_outside", publish)
    monkeypatch.setattr(transacted, "_TIMEOUT", 0.01)
    transaction = manager.create(60.0)
    generator.generate("hot", transaction=transaction)
    participant = generator.participant
    participant.prepare(transaction.id)
    for _ in range(2):
        with pytest.raises(DeadlineError):
            participant.commit(transaction.id)
    assert len(published) == 1
    published[0].reject(JournalError("events", "no space"))
    with pytest.raises(DeadlineError):
        participant.commit(transaction.id)
    published[1].resolve(1)
    participant.commit(transaction.id)
    assert len(published) == 2


def test_a_prepared_transaction_asks_for_an_outcome_that_it_was_not_told(
    virtual_clock: VirtualClock, generator: EventGenerator
) -> None:
    """A manager tells of an abort a few times only, and the generator may have been out of reach."""
    foreign = Foreign(lambda: 3600.0)
    generator.generate("hot", transaction=foreign)  # type: ignore[arg-type]
    generator.participant.prepare(foreign.id)
    virtual_clock.advance(59.0)
    assert not foreign.asked
    virtual_clock.advance(2.0)
    eventually(lambda: not generator.participant.is_active)
    assert len(foreign.asked) == 1


def test_a_transaction_that_a_failing_disk_did_not_prepare_ends_when_the_disk_works_again(
    virtual_clock: VirtualClock, generator: EventGenerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The manager tells of the abort a few times only, and what the disk has of it is unknown."""
    kept: list[object] = []
    is_failing = True

    def keep(_self: object, _name: str, events: object) -> None:
        if is_failing:
            raise JournalError("events", "no space")
        kept.append(events)

    monkeypatch.setattr(Storage, "keep_transaction", keep)
    foreign = Foreign(lambda: 30.0)
    generator.generate("hot", transaction=foreign)  # type: ignore[arg-type]
    for call in (generator.participant.prepare, generator.participant.abort):
        with pytest.raises(JournalError):
            call(foreign.id)
    virtual_clock.advance(35.0)
    assert len(foreign.asked) == 1
    assert generator.participant.is_active
    is_failing = False
    virtual_clock.advance(10.0)
    assert not generator.participant.is_active
    assert kept == [None]


def test_a_transaction_that_is_prepared_while_its_manager_does_not_answer_waits_for_its_outcome(
    virtual_clock: VirtualClock, generator: EventGenerator, outside: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, storing = threading.Event(), threading.Event()

    def keep(_self: object, _name: str, events: object) -> None:
        if events is not None:
            storing.set()
            assert gate.wait(3600.0)  # of the virtual clock

    monkeypatch.setattr(Storage, "keep_transaction", keep)
    answer: Promise[TransactionState] = Promise("ask")
    answer.reject(DeadlineError("no answer"))
    foreign = Foreign(lambda: 30.0, answer=answer)
    generator.register("hot", None, outside, 3600.0)
    generator.generate("hot", transaction=foreign)  # type: ignore[arg-type]
    prepared = in_background(lambda: generator.participant.prepare(foreign.id))
    assert storing.wait(PATIENCE)
    virtual_clock.advance(35.0)
    assert foreign.asked
    gate.set()
    prepared()
    generator.participant._give_up(foreign.id)  # of an answer that came before
    virtual_clock.advance(120.0)
    generator.participant.commit(foreign.id)
    outside.events.wait_for(1)
