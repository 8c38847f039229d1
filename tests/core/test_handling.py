"""``m.on``: what only a broker that does as it is told can show."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from typing import Any

import pytest

from messaging import Message
from tests.core.conftest import Connect
from tests.core.fake import PATIENCE, FakeBroker, until
from tests.raising import raising_log


@pytest.mark.parametrize("is_async", [False, True])
def test_a_handler_goes_on_when_the_log_of_the_application_raises(
    connect: Connect, broker: FakeBroker, is_async: bool
) -> None:
    m = connect(broker)
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
    connect: Connect, broker: FakeBroker, options: dict[str, Any], is_dead_lettered: bool, is_async: bool
) -> None:
    m = connect(broker)
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
    broker.lose()
    broker.wait_open(2)
    may_raise.set()
    if is_dead_lettered:
        until(lambda: registration.counters.dead_lettered == 1, "dead-lettered")
    registration.close().result(PATIENCE)
    assert broker.payloads == [b"1"] * is_dead_lettered


def test_a_task_that_its_loop_left_behind_is_forgotten(
    connect: Connect, broker: FakeBroker, caplog: pytest.LogCaptureFixture
) -> None:
    m = connect(broker)
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
