"""``m.on``: what only a broker that does as it is told can show."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from typing import Any

import pytest

from messaging import AcknowledgeType, Message, Messaging
from messaging.testing.conformance.helpers import ack_state
from tests.doubles.fake import PATIENCE, FakeBroker, until
from tests.doubles.fixtures import Connect
from tests.raising import raising_log


@pytest.mark.parametrize("is_async", [False, True])
def test_a_handler_goes_on_when_the_log_of_the_application_raises(
    m: Messaging, broker: FakeBroker, is_async: bool
) -> None:
    seen: list[int] = []

    def handle(number: int) -> None:
        seen.append(number)
        raise ValueError

    async def handle_async(number: int) -> None:
        handle(number)

    registration = m.on("a", handle_async if is_async else handle, max_deliveries=1)
    with raising_log("messaging"):
        broker.deliver(b'"x"', b"1", b"2")
        broker.wait_acknowledged(3)
        registration.close().result(PATIENCE)
    assert seen == [1, 2]
    assert registration.counters.invalid == 1


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize(("options", "is_dead_lettered"), [({}, True), ({"queue": "q"}, False)])
def test_a_message_rejected_after_its_connection_was_lost_is_dead_lettered_unless_it_comes_again(
    m: Messaging, broker: FakeBroker, options: dict[str, Any], is_dead_lettered: bool, is_async: bool
) -> None:
    may_raise = threading.Event()
    begun = threading.Event()

    def handle(_: Message) -> None:
        begun.set()
        may_raise.wait(PATIENCE)
        raise ValueError

    async def handle_async(message: Message) -> None:
        await asyncio.to_thread(handle, message)

    registration = m.on("a", handle_async if is_async else handle, dead_letter_channel="dead", **options)
    broker.deliver(b"1")
    assert begun.wait(PATIENCE)
    broker.lose_and_reconnect()
    may_raise.set()
    if is_dead_lettered:
        until(lambda: registration.counters.dead_lettered == 1, "dead-lettered")
    registration.close().result(PATIENCE)
    assert broker.payloads == [b"1"] * is_dead_lettered


def test_a_task_that_its_loop_left_behind_is_forgotten(
    m: Messaging, broker: FakeBroker, caplog: pytest.LogCaptureFixture
) -> None:
    locals_: list[weakref.ref[Any]] = []
    begun = asyncio.Event()

    class Local:
        """In the frame of the handler."""

    async def handle(_: Message) -> None:
        local = Local()
        locals_.append(weakref.ref(local))
        begun.set()
        await asyncio.sleep(PATIENCE)

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

    until(is_forgotten, "the task forgotten")
    caplog.clear()  # asyncio tells of the task


def test_a_message_taken_while_its_registration_closes_is_released_like_the_others(
    connect: Connect, broker: FakeBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    broker.requeues = False
    m = connect(broker)
    begun, may_end, ended = threading.Event(), threading.Event(), threading.Event()
    taking, may_take = threading.Event(), threading.Event()
    first: list[Message] = []

    def handle(message: Message) -> None:
        first.append(message)
        begun.set()
        may_end.wait(PATIENCE)
        ended.set()

    registration = m.on("a", handle, dead_letter_channel="dead")
    broker.deliver(b"1")
    assert begun.wait(PATIENCE)
    broker.lose()  # from now on the connection of each message is looked at while it is taken
    broker.wait_subscribed()
    is_stale = broker.adapter.is_stale

    def slow(token: Any) -> bool:
        if not taking.is_set() and token.epoch == broker.epoch:
            taking.set()
            may_take.wait(PATIENCE)
        return is_stale(token)

    monkeypatch.setattr(broker.adapter, "is_stale", slow)
    delivering = threading.Thread(target=broker.deliver, args=(b"2",))
    delivering.start()
    assert taking.wait(PATIENCE)
    closing = registration.close()
    may_end.set()
    assert ended.wait(PATIENCE)
    until(lambda: ack_state(first[0]) is not AcknowledgeType.RECEIVED, "the first one settled")
    may_take.set()
    delivering.join(PATIENCE)
    closing.result(PATIENCE)
    assert broker.payloads == [b"2"]
    assert registration.counters.dead_lettered == 1
