"""The outbox: accepted messages are settled in time, in order, once; bounded in messages and bytes."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from functools import partial
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from messaging import Message, MessageContext, Messaging, Promise
from messaging.errors import (
    ClosedError,
    ConnectionLostError,
    DeadlineError,
    InvalidExtensionError,
    InvalidOptionError,
    MessagingError,
    OutboxFullError,
    OutcomeUnknownError,
    PublishRefusedError,
)
from messaging.execution import clock, engine
from messaging.model import Capabilities
from messaging.publishing import Outbox, Publication
from messaging.testing.tables import table
from messaging.testing.waiting import PATIENCE, eventually, in_thread, results
from tests.doubles.calling import Calling
from tests.doubles.fake import FakeBroker, on_loop, settle_loop
from tests.doubles.fixtures import Connect
from tests.doubles.plans import plan_of
from tests.scripts import run_script
from tests.threads import together

# --- deadlines


@pytest.mark.usefixtures("virtual_clock")
def test_without_a_connection_a_message_waits_until_its_deadline(broker: FakeBroker, m: Messaging) -> None:
    """Scenario 23 [S][G]: waiting is bounded, and nothing is lost."""
    broker.go_down()
    will = m.publish("a", b"gone", last_will=True, timeout=0.05)
    too_late, in_time = m.publish("a", b"1", timeout=0.05), m.publish("a", b"2", timeout=PATIENCE)
    error = too_late.exception(PATIENCE)
    assert type(error) is type(will.exception(PATIENCE)) is DeadlineError
    assert isinstance(error, TimeoutError)
    assert "'a'" in str(error)
    assert "no connection" in str(error)
    broker.gates["open"].open()
    assert in_time.result(PATIENCE) is None
    assert broker.payloads == [b"2"]


@pytest.mark.usefixtures("virtual_clock")
def test_a_broker_that_takes_nothing_lets_the_deadline_pass(broker: FakeBroker, m: Messaging) -> None:
    broker.gates["publish"].close()
    promises = [m.publish("a", b"%d" % number, timeout=0.05) for number in range(3)]
    errors = [promise.exception(PATIENCE) for promise in promises]
    assert [type(error) for error in errors] == [DeadlineError] * 3
    broker.gates["publish"].open()
    m.publish("a", b"after").result(PATIENCE)
    assert broker.payloads == [b"after"]  # those whose deadline passed are not sent any more


@table("is_lost", [False, True])
@pytest.mark.usefixtures("virtual_clock")
def test_a_message_not_confirmed_in_time_has_an_unknown_outcome(
    broker: FakeBroker, connect: Connect, is_lost: bool
) -> None:
    m = connect(broker)
    broker.hold = True
    promise = m.publish("a", b"1", timeout=0.3)
    broker.wait_sent(1)
    if is_lost:
        broker.go_down()
    error = promise.exception(PATIENCE)
    assert type(error) is OutcomeUnknownError
    assert "'a'" in str(error)
    broker.confirm()  # too late: nothing changes
    assert promise.exception() is error
    assert m.runtime.get_runtime_dto().publisher.pending == 0
    broker.gates["open"].open()


@pytest.mark.usefixtures("virtual_clock")
def test_the_setting_timeout_is_the_deadline_unless_the_message_has_one(broker: FakeBroker, connect: Connect) -> None:
    m = connect(broker, timeout=8.0)
    broker.hold = True
    started = clock.monotonic()
    quick, patient = m.publish("a", b"1"), m.publish("a", b"2", timeout=60.0)
    assert type(quick.exception(PATIENCE)) is OutcomeUnknownError
    assert 8.0 <= clock.monotonic() - started <= 8.25
    assert not patient.done()
    broker.confirm()
    assert patient.result(PATIENCE) is None


@pytest.mark.usefixtures("virtual_clock")
def test_deadlines_are_kept_to_a_quarter_second_even_beside_long_ones(broker: FakeBroker, connect: Connect) -> None:
    m = connect(broker, timeout=600.0)
    broker.hold = True
    long = m.publish("a", b"long")
    for _ in range(3):
        started = clock.monotonic()
        m.publish("a", b"short", timeout=0.05).exception(PATIENCE)
        taken = round(clock.monotonic() - started, 6)  # floats: the difference may be a little less
        assert 0.05 <= taken <= 0.3
    broker.confirm()
    long.result(PATIENCE)


def test_the_longest_deadline_works_and_a_longer_one_is_refused(broker: FakeBroker, connect: Connect) -> None:
    m = connect(broker, outbox_size=1, timeout=1e9)
    broker.hold = True
    with pytest.raises(InvalidExtensionError, match="timeout"):
        m.publish("a", b"1", timeout=1e200)
    first = m.publish("a", b"1")
    second = in_thread(m.publish, "a", b"2")
    broker.wait_sent(1)
    broker.confirm()
    assert first.result(1e200) is None
    broker.wait_sent(2)
    broker.confirm()
    assert second.result(PATIENCE).result(PATIENCE) is None
    with pytest.raises(InvalidOptionError, match="timeout"):
        connect("memory://x", timeout=1e200)


# --- confirms


def test_settling_twice_counts_once(broker: FakeBroker, m: Messaging) -> None:
    broker.hold = True
    promise = m.publish("a", b"1")
    broker.wait_sent(1)
    outgoing = broker.held[0]

    def settle() -> None:
        outgoing.confirm()
        outgoing.confirm()
        outgoing.fail(PublishRefusedError("late"))
        outgoing.fail(ConnectionLostError("late"))

    on_loop(settle)
    assert promise.result(PATIENCE) is None
    publisher = m.runtime.get_runtime_dto().publisher
    assert (publisher.published, publisher.failed, publisher.pending) == (1, 0, 0)
    assert broker.payloads == [b"1"]


def test_an_adapter_that_raises_fails_the_batch_and_nothing_else(broker: FakeBroker, m: Messaging) -> None:
    broker.errors["publish"].append(RuntimeError("a defect"))
    error = m.publish("a", b"1").exception(PATIENCE)
    assert type(error) is MessagingError
    assert isinstance(error.__cause__, RuntimeError)
    assert m.publish("a", b"2").result(PATIENCE) is None


# --- after a loss


def test_messages_lost_with_a_connection_are_sent_again_with_the_same_id(broker: FakeBroker, m: Messaging) -> None:
    broker.hold = True
    before = [m.publish("a", b"%d" % number) for number in range(5)]
    broker.wait_sent(5)
    broker.confirm(2)
    broker.go_down()
    after = [m.publish("a", b"%d" % number) for number in range(5, 8)]
    broker.hold = False
    broker.gates["open"].open()
    results((*before, *after))
    assert broker.payloads == [b"0", b"1", b"2", b"3", b"4", b"2", b"3", b"4", b"5", b"6", b"7"]
    ids = {each.payload: set[str]() for each in broker.sent}
    for each in broker.sent:
        ids[each.payload].add(each.message_id)
    assert all(len(known) == 1 for known in ids.values())
    assert len(set.union(*ids.values())) == 8


def test_messages_that_fail_one_by_one_while_sending_keep_their_order(broker: FakeBroker, m: Messaging) -> None:
    """A protocol may lose messages singly (an AMQP channel that closed); the connection is another matter."""
    broker.hold = True
    promises = [m.publish("a", b"%d" % number) for number in range(4)]
    broker.wait_sent(4)
    broker.gates["publish"].close()
    blocker = m.publish("a", b"blocker")
    eventually(lambda: broker.gates["publish"].waiting == 1, "a sender that is busy")
    for _ in range(4):
        broker.fail(ConnectionLostError("this one only"))
        settle_loop()
    broker.hold = False
    broker.gates["publish"].open()
    results((*promises, blocker))
    assert broker.payloads == [b"0", b"1", b"2", b"3", b"blocker", b"0", b"1", b"2", b"3"]


def test_messages_that_an_adapter_fails_late_are_sent_again_in_their_order(broker: FakeBroker, m: Messaging) -> None:
    broker.hold = broker.keeps = True
    old = [m.publish("a", b"%d" % number) for number in range(3)]
    broker.wait_sent(3)
    broker.gates["publish"].close()
    broker.lose()
    new = [m.publish("a", b"%d" % number) for number in range(3, 6)]
    broker.wait_open(2)
    eventually(lambda: broker.gates["publish"].waiting == 1, "the batch of new ones")

    def give_back() -> None:
        held, broker.held[:] = [*broker.held], []
        for outgoing in reversed(held):  # whatever order it likes
            outgoing.fail(ConnectionLostError("the session is gone"))

    on_loop(give_back)
    broker.hold = False
    broker.gates["publish"].open()
    results((*old, *new))
    assert broker.payloads[3:] == [b"3", b"4", b"5", b"0", b"1", b"2"]


def test_messages_that_the_adapter_keeps_over_a_loss_are_not_sent_twice(broker: FakeBroker, m: Messaging) -> None:
    broker.hold = broker.keeps = True
    promise = m.publish("a", b"1")
    broker.wait_sent(1)
    broker.lose_and_reconnect()
    settle_loop()
    broker.confirm()
    assert promise.result(PATIENCE) is None
    assert broker.payloads == [b"1"]


def test_message_ids_are_unique_over_instances_and_forked_processes() -> None:
    script = """
import os, sys
import messaging
from tests.doubles.fake import FakeBroker, FakeAdapter

def ids(count):
    broker = FakeBroker()
    with messaging.instance.Messaging(
        FakeAdapter, messaging.model.url.parse_url(broker.url), messaging.services.ServiceRegistry(), {}
    ) as m:
        m.ready.result(5)
        for _ in range(count):
            m.publish("a", b"").result(5)
    return [each.message_id for each in broker.sent]

read, write = os.pipe()
known = ids(3)
pid = os.fork()
if pid == 0:
    os.write(write, "\\n".join(ids(3)).encode())
    os._exit(0)
known += ids(3)
os.waitpid(pid, 0)
known += os.read(read, 65536).decode().split("\\n")
assert len(known) == 9, known
assert len(set(known)) == 9, known
"""
    run_script(script)


# --- bounds


@pytest.mark.usefixtures("virtual_clock")
def test_a_full_outbox_is_an_error_after_the_deadline(broker: FakeBroker, connect: Connect) -> None:
    m = connect(broker, outbox_size=1)
    broker.hold = True
    first = m.publish("a", b"1")
    started = clock.monotonic()
    with pytest.raises(OutboxFullError, match=r"1 messages \(1 bytes\).*outbox_size"):
        m.publish("b", b"2", timeout=5.0)
    assert 5.0 <= clock.monotonic() - started <= 5.25
    broker.wait_sent(1)
    broker.confirm()
    first.result(PATIENCE)
    broker.hold = False
    assert m.publish("b", b"3").result(PATIENCE) is None
    assert broker.payloads == [b"1", b"3"]


def test_a_full_outbox_is_an_error_at_once_on_a_thread_with_an_event_loop(broker: FakeBroker, connect: Connect) -> None:
    m = connect(broker, outbox_size=1)
    broker.hold = True
    first = m.publish("a", b"1")

    async def publish() -> None:
        with pytest.raises(OutboxFullError):
            m.publish("a", b"2")

    asyncio.run(publish())
    broker.wait_sent(1)
    broker.confirm()
    first.result(PATIENCE)


@pytest.mark.usefixtures("virtual_clock")
def test_bytes_are_bounded_as_well_and_one_giant_goes_alone(broker: FakeBroker, connect: Connect) -> None:
    m = connect(broker, outbox_bytes=10)
    broker.hold = True
    small = [m.publish("a", b"12345"), m.publish("a", b"12345")]
    with pytest.raises(OutboxFullError, match=r"2 messages \(10 bytes\).*outbox_bytes"):
        m.publish("a", b"1", timeout=0.05)
    empty = m.publish("a", b"")  # nothing is not too much
    broker.wait_sent(3)
    broker.confirm()
    results((*small, empty))
    giant = m.publish("a", b"x" * 100)
    with pytest.raises(OutboxFullError):
        m.publish("a", b"1", timeout=0.05)
    broker.wait_sent(4)
    broker.confirm()
    assert giant.result(PATIENCE) is None


@pytest.mark.usefixtures("virtual_clock")
def test_a_deadline_that_passes_makes_room(broker: FakeBroker, connect: Connect) -> None:
    m = connect(broker, outbox_size=1)
    broker.hold = True
    first = m.publish("a", b"1", timeout=0.1)
    broker.wait_sent(1)
    broker.hold = False
    assert m.publish("a", b"2").result(PATIENCE) is None  # waited for the first to time out
    assert isinstance(first.exception(0), OutcomeUnknownError)


def test_a_blocked_publisher_is_released_when_the_instance_closes(broker: FakeBroker, connect: Connect) -> None:
    m = connect(broker, outbox_size=1, close_timeout=0.1)
    broker.hold = True
    first = m.publish("a", b"1")
    second = Calling(m.publish, "a", b"2")
    second.until_waiting()
    m.close()
    assert isinstance(second.exception(), ClosedError)
    assert isinstance(first.exception(0), OutcomeUnknownError)


# --- order


@table("losses", [0, 5])
def test_a_storm_from_eight_threads_keeps_the_order_of_each(broker: FakeBroker, connect: Connect, losses: int) -> None:
    """Scenario 26 [S]: arrival order is publish order, of every thread, losses or not."""
    each, threads = 500, 8
    m = connect(broker, outbox_size=64)
    broker.window = 10

    def storm(thread: int) -> list[Promise[None]]:
        context = MessageContext(f"t{thread}")
        return [m.publisher.publish(Message(b"%d" % number, context)) for number in range(each)]

    storms = [in_thread(storm, thread) for thread in range(threads)]
    for number in range(1, losses + 1):
        broker.wait_sent(number * 300)
        broker.lose_and_reconnect()
    results(promise for promises in results(storms, 3 * PATIENCE) for promise in promises)
    for thread in range(threads):
        arrived = [int(sent.payload) for sent in broker.sent if sent.channel == f"t{thread}"]
        fresh = [number for number, _ in itertools.groupby(arrived)]
        assert sorted(set(fresh)) == [*range(each)]
        first = {number: arrived.index(number) for number in range(each)}
        assert sorted(first, key=first.__getitem__) == [*range(each)]
    assert max(broker.batches) <= 10


# --- closing


@pytest.mark.usefixtures("virtual_clock")
def test_closing_settles_everything_when_time_is_up(broker: FakeBroker, m: Messaging) -> None:
    broker.hold = True
    sent = [m.publish("a", b"%d" % number) for number in range(3)]
    broker.wait_sent(3)
    broker.gates["publish"].close()
    waiting = [m.publish("a", b"%d" % number) for number in range(3)]
    eventually(lambda: broker.gates["publish"].waiting == 1, "a sender that is busy")
    queued = [m.publish("a", b"%d" % number) for number in range(3)]
    started = clock.monotonic()
    m.close(5.0)
    assert 5.0 <= clock.monotonic() - started < 7.0
    assert [type(promise.exception(0)) for promise in sent] == [OutcomeUnknownError] * 3
    assert [type(promise.exception(0)) for promise in (*waiting, *queued)] == [ClosedError] * 6
    publisher = m.runtime.get_runtime_dto().publisher
    assert (publisher.pending, publisher.published, publisher.failed) == (0, 0, 9)


def test_closing_while_disconnected_settles_everything(broker: FakeBroker, m: Messaging) -> None:
    broker.hold = True
    sent = m.publish("a", b"1")
    broker.wait_sent(1)
    broker.go_down()
    waiting = m.publish("a", b"2")
    will = m.publish("a", b"gone", last_will=True)
    m.close(0.1)
    assert type(sent.exception(0)) is OutcomeUnknownError
    assert type(waiting.exception(0)) is ClosedError
    assert type(will.exception(0)) is ClosedError


def test_a_loss_while_closing_leaves_the_outcome_of_sent_messages_unknown(broker: FakeBroker, m: Messaging) -> None:
    """Not ``ConnectionLostError``, which no publish promises: whether to send again is what the caller must know."""
    broker.hold = True
    promise = m.publish("a", b"1")
    broker.wait_sent(1)
    closing = Calling(m.close, 0.5)
    closing.until_waiting()
    broker.go_down()
    closing.result()
    assert type(promise.exception(0)) is OutcomeUnknownError
    broker.gates["open"].open()


def test_a_loss_while_closing_does_not_end_the_attempts_before_their_time(broker: FakeBroker, m: Messaging) -> None:
    """``close`` sends accepted messages for so many seconds; a reconnect within them is what they are for."""
    broker.hold = True
    promise = m.publish("a", b"1")
    broker.wait_sent(1)
    closing = Calling(m.close, 5.0)
    closing.until_waiting()
    broker.hold = False
    broker.lose()
    closing.result()
    assert promise.exception(0) is None
    assert broker.payloads == [b"1", b"1"]


def test_publishing_races_with_closing_and_every_promise_is_settled(broker: FakeBroker, connect: Connect) -> None:
    """That of a last will, too: accepting it and telling the loop are two steps."""
    for _ in range(20):
        m = connect(broker, close_timeout=1.0)
        promises: list[Promise[None]] = []

        def storm(times: int, m: Any = m, into: list[Promise[None]] = promises, **options: Any) -> None:
            with contextlib.suppress(ClosedError):
                for _ in range(times):
                    into.append(m.publish("a", b"1", qos=0, **options))

        together(m.close, partial(storm, 1, last_will=True), *[partial(storm, 10**6)] * 4)
        assert all(promise.done() for promise in promises)
        assert all(isinstance(promise.exception(0), (ClosedError, type(None))) for promise in promises)
        assert m.runtime.get_runtime_dto().publisher.pending == 0


# --- the last will


def test_a_will_whose_connection_is_lost_is_never_published_as_a_message(broker: FakeBroker, m: Messaging) -> None:
    broker.errors["set_will"].append(ConnectionLostError("while registering"))
    promise = m.publish("a", b"gone", last_will=True, timeout=5.0)
    eventually(lambda: broker.calls.count("set_will") >= 1, "the will handed over")
    settle_loop()
    broker.lose_and_reconnect()
    assert m.publish("a", b"a message").result(PATIENCE) is None
    assert broker.payloads == [b"a message"]
    assert promise.result(PATIENCE) is None  # registered with the next connection
    assert [will.payload for will in broker.wills] == [b"gone"]


@pytest.mark.usefixtures("virtual_clock")
def test_a_will_the_outbox_had_no_room_for_can_be_tried_again(broker: FakeBroker, connect: Connect) -> None:
    m = connect(broker, outbox_size=1)
    broker.hold = True
    first = m.publish("a", b"1")
    with pytest.raises(OutboxFullError):
        m.publish("a", b"gone", last_will=True, timeout=0.05)
    broker.wait_sent(1)
    broker.confirm()
    first.result(PATIENCE)
    assert m.publish("a", b"gone", last_will=True).result(PATIENCE) is None


def test_an_adapter_that_fails_to_register_a_will_keeps_its_connection(broker: FakeBroker, m: Messaging) -> None:
    broker.go_down()
    broker.errors["set_will"].append(RuntimeError("a defect"))
    promise = m.publish("a", b"gone", last_will=True)
    settle_loop()
    broker.gates["open"].open()
    assert isinstance(promise.exception(PATIENCE), MessagingError)
    assert m.publish("a", b"1").result(PATIENCE) is None


# --- against a model


class Scripted:
    """An outbox on a made-up adapter, driven step by step on the loop."""

    capabilities = Capabilities(name="scripted", protocols=(), features=frozenset(), publish_window=3)
    name = "scripted"

    def __init__(self) -> None:
        self.sent: list[tuple[int, str]] = []
        self.held: list[Publication] = []
        self.outbox = Outbox(engine(), self, 30.0, 1000, 10**6)  # type: ignore[arg-type]
        on_loop(self.outbox.start)

    async def publish(self, batch: list[Publication]) -> None:
        for entry in batch:
            if not entry.settled:
                entry.sent()
                self.sent.append((entry.sequence, entry.message_id))
                self.held.append(entry)


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("publish"), st.integers(1, 4)),
        st.tuples(st.just("confirm"), st.integers(0, 5)),
        st.tuples(st.just("refuse"), st.integers(0, 5)),
        st.tuples(st.just("lose"), st.booleans()),
        st.tuples(st.just("connect"), st.none()),
        st.tuples(st.just("expire"), st.integers(0, 5)),
    ),
    max_size=25,
)


@given(steps=STEPS)
@settings(max_examples=120)
def test_any_order_of_confirms_refusals_losses_and_deadlines_agrees_with_a_model(steps: list[tuple[str, Any]]) -> None:
    """Model: each message is accepted, then sent (again after a loss), then settled once; sending follows order."""
    scripted = Scripted()
    outbox = scripted.outbox
    entries: list[Publication] = []
    expected: dict[int, str] = {}
    connected = False

    def take(number: int) -> Publication | None:
        return scripted.held.pop(number) if number < len(scripted.held) else None

    for step, argument in steps:
        marker = len(scripted.sent)
        if step == "publish":
            for _ in range(argument):
                entry = Publication(outbox, b"x", plan_of(MessageContext("a")), time.monotonic() + 60)
                outbox.put(entry)
                entries.append(entry)
        elif step in ("confirm", "refuse"):
            entry = take(argument)  # type: ignore[assignment]
            if entry is not None:
                already = expected.get(entry.sequence)
                expected.setdefault(entry.sequence, "confirmed" if step == "confirm" else "refused")
                refusal = PublishRefusedError("no")
                on_loop(entry.confirm) if step == "confirm" else on_loop(entry.fail, refusal)
                assert already is None or entry.settled
        elif step == "lose":
            held, scripted.held[:] = [*scripted.held], []
            if argument:
                held.reverse()

            def lose(held: list[Publication] = held) -> None:
                outbox.disconnected()
                for entry in held:
                    entry.fail(ConnectionLostError("gone"))

            on_loop(lose)
            connected = False
        elif step == "connect":
            on_loop(outbox.connected)
            connected = True
        elif entries and argument < len(entries):
            entry = entries[argument]
            entry.deadline = 0.0
            if not entry.settled:
                expected[entry.sequence] = "unknown" if entry.was_sent else "expired"
            on_loop(outbox.deadlines.run)
        settle_loop(8)
        if not connected:
            assert len(scripted.sent) == marker
        now = [sequence for sequence, _ in scripted.sent[marker:]]
        assert now == sorted(now), "sent out of order"
        with_the_adapter = {entry.sequence for entry in scripted.held}
        outstanding = {entry.sequence for entry in entries} - set(expected)
        if connected:
            assert outstanding <= with_the_adapter, "neither sent nor settled"
        assert outbox.pending == len(outstanding)
    on_loop(outbox.close)
    for entry in entries:
        error = entry.exception(0)
        outcome = {
            "confirmed": type(None),
            "refused": PublishRefusedError,
            "unknown": OutcomeUnknownError,
            "expired": DeadlineError,
            None: OutcomeUnknownError if entry.was_sent else ClosedError,
        }[expected.get(entry.sequence)]
        assert type(error) is outcome
    assert outbox.pending == 0
    ids: dict[int, str] = {}
    for sequence, message_id in scripted.sent:
        assert ids.setdefault(sequence, message_id) == message_id
    assert len(set(ids.values())) == len(ids)


# --- interrupted publishers


def test_closing_does_not_wait_for_an_interrupted_publisher(m: Messaging) -> None:
    """As from a signal handler: the thread it interrupted may be the one that holds the lock."""
    outbox = m._connection.outbox
    with outbox.admission._lock:
        m.close()
        late = Publication(outbox, b"x", plan_of(MessageContext("a")), time.monotonic() + 30)
        outbox.admission.waiting.append(late)  # the interrupted call goes on
    on_loop(outbox._wake)
    assert isinstance(late.exception(PATIENCE), ClosedError)


def test_publishers_that_wait_are_woken_although_another_holds_the_lock(broker: FakeBroker, connect: Connect) -> None:
    m = connect(broker, outbox_size=1)
    broker.hold = True
    m.publish("a", b"1")
    waiting = Calling(m.publish, "a", b"2")
    waiting.until_waiting()
    with m._connection.outbox.admission._lock:
        on_loop(m._connection.outbox.refuse)
        assert not waiting.done()
    assert isinstance(waiting.exception(), ClosedError)
    broker.confirm()
