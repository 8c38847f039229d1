"""The rules that the outbox in memory and the durable one share: one test each, run on both."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from messaging import Messaging
from messaging.errors import (
    ArgumentError,
    DeadlineError,
    MessagingError,
    OutboxFullError,
    OutcomeUnknownError,
    PayloadTooLargeError,
    PublishRefusedError,
)
from messaging.execution import engine
from messaging.testing.clock import VirtualClock
from messaging.testing.tables import table
from messaging.testing.waiting import PATIENCE, eventually, in_thread, results
from tests.doubles.fake import FakeBroker
from tests.doubles.fixtures import Connect

BOTH = pytest.mark.parametrize("kind", ["memory", "disk"])


@pytest.fixture
def outbox(kind: str, tmp_path: Path) -> dict[str, Any]:
    return {"outbox_path": tmp_path / "outbox"} if kind == "disk" else {}


def is_accepted(m: Messaging, count: int) -> bool:
    return m.runtime.get_runtime_dto().publisher.pending >= count


@BOTH
def test_a_time_to_live_counts_from_publish(
    virtual_clock: VirtualClock, broker: FakeBroker, connect: Connect, outbox: dict[str, Any]
) -> None:
    """The broker is told what is left, again after each loss; an expired message is not sent."""
    m = connect(broker, **outbox, timeout=100.0)
    broker.go_down()
    short, long = m.publish("a", b"short", time_to_live=5.0), m.publish("a", b"long", time_to_live=60.0)
    identified = m.publish("a", b"own", time_to_live=60.0, message_id="own")
    eventually(lambda: is_accepted(m, 3))
    virtual_clock.advance(10.0)
    broker.hold = True
    broker.gates["open"].open()
    with pytest.raises(DeadlineError, match="time to live"):
        short.result(PATIENCE)
    eventually(lambda: len(broker.held) == 2)
    left = broker.held[0].plan.options.time_to_live
    assert left is not None
    assert 45.0 < left < 50.001
    assert broker.held[1].message_id == "own"
    broker.go_down()
    virtual_clock.advance(10.0)
    broker.gates["open"].open()
    eventually(lambda: len(broker.held) == 2)
    again = broker.held[0].plan.options.time_to_live
    assert again is not None
    assert again < left - 9.9
    broker.confirm()
    results([long, identified])
    assert b"short" not in broker.payloads


@BOTH
def test_a_message_that_expires_after_it_was_sent_may_have_arrived(
    virtual_clock: VirtualClock, broker: FakeBroker, connect: Connect, outbox: dict[str, Any]
) -> None:
    """It is not sent again, and nothing of it is left in the outbox."""
    m = connect(broker, **outbox, timeout=100.0)
    broker.hold = True
    short = m.publish("a", b"short", time_to_live=5.0)
    eventually(lambda: broker.held)
    broker.go_down()
    virtual_clock.advance(10.0)
    broker.hold = False
    broker.gates["open"].open()
    with pytest.raises(OutcomeUnknownError, match="time to live"):
        short.result(PATIENCE)
    m.publish("a", b"last").result(PATIENCE)
    assert broker.payloads[-1] == b"last"
    assert broker.payloads.count(b"short") <= 1
    eventually(lambda: m.runtime.get_runtime_dto().publisher.pending == 0)
    if outbox:
        eventually(lambda: waiting_on_disk(m) == 0, "an empty outbox")


@BOTH
def test_an_adapter_that_sends_a_message_another_time_tells_what_is_left_of_its_time_to_live(
    virtual_clock: VirtualClock, broker: FakeBroker, connect: Connect, outbox: dict[str, Any]
) -> None:
    """After a refusal, say, on the same connection: an expired message fails, and leaves the outbox."""
    m = connect(broker, **outbox, timeout=100.0)
    broker.hold = True
    short, long = m.publish("a", b"short", time_to_live=5.0), m.publish("a", b"long", time_to_live=60.0)
    eventually(lambda: len(broker.held) == 2)
    held = [*broker.held]
    virtual_clock.advance(10.0)
    prepared: list[bool] = []
    engine().call(lambda: prepared.extend(each.prepare() for each in held))
    with pytest.raises(OutcomeUnknownError, match="time to live"):
        short.result(PATIENCE)
    eventually(lambda: prepared == [False, True])
    assert held[0].plan.options.time_to_live == 0.0
    assert held[0].settled
    left = held[1].plan.options.time_to_live
    assert left is not None
    assert 45.0 < left < 50.001
    broker.confirm()
    results([long])
    eventually(lambda: m.runtime.get_runtime_dto().publisher.pending == 0)
    if outbox:
        eventually(lambda: waiting_on_disk(m) == 0, "an empty outbox")


@BOTH
def test_an_adapter_may_send_a_message_without_a_time_to_live_another_time(
    broker: FakeBroker, connect: Connect, outbox: dict[str, Any]
) -> None:
    m = connect(broker, **outbox)
    broker.hold = True
    promises = [m.publish("a", b"plain"), m.publish("a", b"with an id", message_id="7")]
    eventually(lambda: len(broker.held) == 2)
    held = [*broker.held]
    prepared: list[bool] = []
    engine().call(lambda: prepared.extend(each.prepare() for each in held))
    eventually(lambda: prepared == [True, True])
    assert [each.plan.options.time_to_live for each in held] == [None, None]
    broker.confirm()
    results(promises)


def waiting_on_disk(m: Messaging) -> int:
    dto = m.runtime.get_runtime_dto().outbox
    assert dto is not None
    return dto.waiting


@BOTH
@table("kind_of_request", ["request", "given reply channel", "many"])
def test_the_time_to_live_of_a_request_counts_from_the_call(
    virtual_clock: VirtualClock,
    broker: FakeBroker,
    connect: Connect,
    outbox: dict[str, Any],
    tmp_path: Path,
    kind_of_request: str,
) -> None:
    if outbox:
        outbox["outbox_path"] = tmp_path / kind_of_request
    m = connect(broker, **outbox, timeout=100.0)
    broker.go_down()
    broker.held.clear()

    def request(payload: bytes, time_to_live: float) -> Any:
        if kind_of_request == "many":
            return in_thread(list, m.request_many("a", payload, time_to_live=time_to_live))
        given = {} if kind_of_request == "request" else {"reply_to": "answers"}
        return m.request("a", payload, time_to_live=time_to_live, **given)

    short, long = request(b"short", 5.0), request(b"long", 60.0)
    virtual_clock.advance(10.0)
    broker.hold = True
    broker.gates["open"].open()
    with pytest.raises(DeadlineError, match="time to live"):
        short.result(PATIENCE)
    eventually(lambda: broker.held)
    (sent,) = broker.held
    assert sent.payload == b"long"
    left = sent.plan.options.time_to_live
    assert left is not None
    assert 45.0 < left < 50.001
    m.close(0)
    long.exception(PATIENCE)  # however it ends


@BOTH
def test_a_clock_that_is_set_forward_lets_no_message_expire(
    virtual_clock: VirtualClock, broker: FakeBroker, connect: Connect, outbox: dict[str, Any]
) -> None:
    m = connect(broker, **outbox, timeout=1000.0)
    stored = {"store_and_forward": True} if outbox else {}
    broker.go_down()
    for number in range(30):  # without a reference to the promise
        m.publish("a", b"%d" % number, time_to_live=60.0, **stored)
    eventually(lambda: is_accepted(m, 30))
    virtual_clock.shift_wall(86_400.0)
    broker.gates["open"].open()
    eventually(lambda: len(broker.payloads) == 30, "all messages")


@table("when", ["in an earlier run", "after the clock was set"])
def test_a_time_to_live_is_over_in_time_if_the_clock_is_set_forward(
    virtual_clock: VirtualClock, broker: FakeBroker, connect: Connect, tmp_path: Path, when: str
) -> None:
    """A machine without a battery for its clock starts hours behind, and gets the time from the network."""
    path = tmp_path / when
    m = connect(broker, outbox_path=path, timeout=1000.0)
    broker.go_down()
    if when == "in an earlier run":
        m.publish("a", b"stale", time_to_live=60.0, store_and_forward=True).result(PATIENCE)
        m.close(0)
        m = connect(broker, outbox_path=path, timeout=1000.0, start_offline=True)
        virtual_clock.shift_wall(86_400.0)
    else:
        virtual_clock.shift_wall(86_400.0)
        m.publish("a", b"stale", time_to_live=60.0, store_and_forward=True).result(PATIENCE)
        virtual_clock.advance(61.0)
    last = m.publish("a", b"last")
    broker.gates["open"].open()
    last.result(PATIENCE)
    assert b"stale" not in broker.payloads


@BOTH
def test_a_time_to_live_reaches_the_broker_as_it_was_given_if_nothing_waits(
    virtual_clock: VirtualClock, broker: FakeBroker, connect: Connect, outbox: dict[str, Any]
) -> None:
    del virtual_clock
    broker.hold = True
    m = connect(broker, **outbox)
    m.publish("a", b"1", time_to_live=60.0)
    eventually(lambda: broker.held)
    assert broker.held[0].plan.options.time_to_live == 60.0
    broker.confirm()


@BOTH
def test_messages_are_sent_in_order_with_the_same_ids_over_a_loss(
    broker: FakeBroker, connect: Connect, outbox: dict[str, Any]
) -> None:
    broker.hold = True
    m = connect(broker, **outbox)
    promises = [
        m.publish("a", b"%d" % number, **({"message_id": "own"} if number == 1 else {}), time_to_live=60.0)
        if number % 2
        else m.publish("a", b"%d" % number)
        for number in range(6)
    ]
    broker.wait_sent(6)
    broker.lose_and_reconnect()
    broker.wait_sent(12)
    broker.confirm()
    results(promises)
    first, again = broker.sent[:6], broker.sent[6:]
    assert [each.payload for each in first] == [each.payload for each in again] == [b"%d" % n for n in range(6)]
    assert [each.message_id for each in first] == [each.message_id for each in again]
    assert first[1].message_id == "own"
    assert len({each.message_id for each in first}) == 6


@BOTH
def test_wrong_messages_are_refused_by_the_call(broker: FakeBroker, connect: Connect, outbox: dict[str, Any]) -> None:
    broker.limit = 4
    m = connect(broker, **outbox)
    with pytest.raises(PayloadTooLargeError):
        m.publish("a", b"12345")
    for wrong in ({"time_to_live": 0}, {"time_to_live": -1}, {"message_id": ""}, {"message_id": "x" * 256}):
        with pytest.raises(ArgumentError):
            m.publish("a", b"1", **wrong)  # type: ignore[arg-type]
    m.publish("a", b"").result(PATIENCE)
    assert broker.payloads == [b""]


@BOTH
def test_a_refused_message_fails_alone(broker: FakeBroker, connect: Connect, outbox: dict[str, Any]) -> None:
    broker.hold = True
    m = connect(broker, **outbox)
    bad, good = m.publish("a", b"bad", time_to_live=60.0), m.publish("a", b"good")
    broker.wait_sent(2)
    broker.fail(PublishRefusedError("no"))
    broker.confirm()
    assert isinstance(bad.exception(PATIENCE), PublishRefusedError)
    good.result(PATIENCE)


@BOTH
def test_a_full_outbox_fails_with_the_same_error(
    broker: FakeBroker, connect: Connect, outbox: dict[str, Any], kind: str
) -> None:
    bound = {"outbox_size": 2} if kind == "memory" else {"outbox_disk_bytes": 3_000_000}
    m = connect(broker, **outbox, **bound)
    broker.go_down()
    errors: list[MessagingError] = []
    for number in range(5):
        patience = 60.0 if kind == "memory" and number < 2 else 0.2
        try:
            promise = m.publish("a", bytes(1_000_000), timeout=patience)
            promise.was_retrieved = True
            if kind == "disk" and (error := promise.stored.exception(PATIENCE)) is not None:
                errors.append(error)
        except MessagingError as error:
            errors.append(error)
    assert errors
    assert {type(each) for each in errors} == {OutboxFullError}
