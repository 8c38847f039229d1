"""``m.on``: what only a broker that does as it is told can show."""

from __future__ import annotations

import pytest

from tests.core.conftest import Connect
from tests.core.fake import PATIENCE, FakeBroker
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
