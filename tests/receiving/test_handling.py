"""``m.on``: what only a broker that does as it is told can show."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from typing import Any

import pytest

from messaging import AcknowledgeType, Message, Messaging, Promise
from messaging.errors import DeadlineError, SubscriptionRefusedError
from messaging.testing.conformance.helpers import ack_state, in_form
from messaging.testing.tables import table
from messaging.testing.waiting import PATIENCE, Recorder, eventually, in_thread
from tests.doubles.fake import FakeBroker
from tests.doubles.fixtures import Connect
from tests.raising import raising_log


def test_a_refusal_that_comes_at_the_timeout_is_raised(
    connect: Connect, broker: FakeBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    m = connect(broker, timeout=0.01)
    broker.errors["subscribe"].append(SubscriptionRefusedError("not allowed"))
    gate = broker.gates["subscribe"]
    gate.close()
    result = Promise.result

    def result_and_refusal(self: Promise[Any], timeout: float | None = None) -> Any:
        try:
            return result(self, timeout)
        except DeadlineError:
            gate.open()
            eventually(self.done, "the refusal")
            raise

    monkeypatch.setattr(Promise, "result", result_and_refusal)
    with pytest.raises(SubscriptionRefusedError, match="not allowed"):
        m.on("a", print)


@table("is_async", [False, True])
def test_a_handler_goes_on_when_logging_raises(connect: Connect, broker: FakeBroker, is_async: bool) -> None:
    m = connect(broker)
    seen: list[int] = []

    def handle(number: int) -> None:
        seen.append(number)
        raise ValueError

    registration = m.on("a", in_form(handle, is_async=is_async), max_deliveries=1)
    with raising_log("messaging"):
        broker.deliver(b'"x"', b"1", b"2")
        broker.wait_acknowledged(3)
        registration.close().result(PATIENCE)
    assert seen == [1, 2]
    assert registration.counters.invalid == 1


@table("is_async", [False, True])
@table(("options", "is_dead_lettered"), [({}, True), ({"queue": "q"}, False)])
def test_a_message_rejected_after_its_connection_was_lost_is_dead_lettered_unless_it_comes_again(
    connect: Connect, broker: FakeBroker, options: dict[str, Any], is_dead_lettered: bool, is_async: bool
) -> None:
    m = connect(broker)
    may_raise = threading.Event()
    begun: Recorder[Message] = Recorder()

    def handle(message: Message) -> None:
        begun(message)
        may_raise.wait(PATIENCE)
        raise ValueError

    registration = m.on("a", in_form(handle, is_async=is_async), dead_letter_channel="dead", **options)
    broker.deliver(b"1")
    begun.wait_for(1)
    broker.lose_and_reconnect()
    may_raise.set()
    if is_dead_lettered:
        eventually(lambda: registration.counters.dead_lettered == 1, "dead-lettered")
    registration.close().result(PATIENCE)
    assert broker.payloads == [b"1"] * is_dead_lettered


def test_a_task_left_behind_is_forgotten(m: Messaging, broker: FakeBroker, caplog: pytest.LogCaptureFixture) -> None:
    locals_: list[weakref.ref[Any]] = []
    begun = asyncio.Event()

    class Local:
        """In the frame of the handler."""

    async def handle(_: Message) -> None:
        local = Local()
        locals_.append(weakref.ref(local))
        begun.set()
        await asyncio.Event().wait()

    async def register() -> Any:
        registration = m.on("a", handle)
        await registration
        broker.deliver(b"1")
        await begun.wait()
        return registration

    loop = asyncio.new_event_loop()
    registration = loop.run_until_complete(register())
    loop.close()
    registration.closed.exception(PATIENCE)

    def is_forgotten() -> bool:
        gc.collect()
        return locals_[0]() is None

    eventually(is_forgotten, "the task forgotten")
    caplog.clear()  # asyncio tells of the task


def test_a_message_taken_while_its_registration_closes_is_released_like_the_others(
    connect: Connect, broker: FakeBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    broker.requeues = False
    m = connect(broker)
    may_end, may_take = threading.Event(), threading.Event()
    taking: Recorder[Any] = Recorder()
    begun: Recorder[Message] = Recorder()
    ended: Recorder[Message] = Recorder()

    def handle(message: Message) -> None:
        begun(message)
        may_end.wait(PATIENCE)
        ended(message)

    registration = m.on("a", handle, dead_letter_channel="dead")
    broker.deliver(b"1")
    begun.wait_for(1)
    broker.lose()  # from now on the connection of each message is looked at while it is taken
    broker.wait_subscribed()
    is_stale = broker.adapter.is_stale

    def slow(token: Any) -> bool:
        if not taking and token.epoch == broker.epoch:
            taking(token)
            may_take.wait(PATIENCE)
        return is_stale(token)

    monkeypatch.setattr(broker.adapter, "is_stale", slow)
    delivering = in_thread(broker.deliver, b"2")
    taking.wait_for(1)
    closing = registration.close()
    may_end.set()
    ended.wait_for(1)
    eventually(lambda: ack_state(begun[0]) is not AcknowledgeType.RECEIVED, "the first one settled")
    may_take.set()
    delivering.result(PATIENCE)
    closing.result(PATIENCE)
    assert broker.payloads == [b"2"]
    assert registration.counters.dead_lettered == 1
