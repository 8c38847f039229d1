"""Buffers of routes that earlier versions have left: opened, drained and replayed by the present one.

The folder ``stored`` was written by :func:`write` before the buffer and the drain were changed in November 2026. It
stays as it is: what a gateway has stored must be published by every later version.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from messaging import MessageContext
from messaging.gateway import Gateway
from messaging.gateway.buffer import Buffer
from messaging.gateway.dead_letters import Selection
from messaging.gateway.destinations import Destination
from messaging.gateway.settings import BufferSettings
from messaging.gateway.stored import StoredMessage
from messaging.journal import Record
from messaging.testing.waiting import eventually
from tests.gateway.kit import Broker, route, settings, unique

FOLDER = Path(__file__).parent / "stored"
BUFFER = {"full": "block", "order": "newest_first"}
CHANNEL = "out/a"
#: what recognises the messages of the stored batch
MEMBERS = ["0123456789abcdef", "fedcba9876543210"]
#: payloads in the order in which they leave: those after an outage first. 7 was settled out of order
LEFT = [b"6", b"8", b"1", b"2", b"3", b"4", b"batch"]


def write(data: Path) -> None:
    """Write the data folder of a gateway with a route ``r``: two ranges, some messages of each settled."""
    path = data / "routes" / "r"
    path.parent.mkdir(parents=True, mode=0o700)
    buffer = Buffer("r", path, BufferSettings.model_validate(BUFFER), lambda: None)
    destination = Destination(MessageContext(CHANNEL, content_type="text/plain"))

    def store(*payloads: bytes, members: list[str] | None = None) -> None:
        expected = buffer.accepted + len(payloads)
        for payload in payloads:
            buffer.store(StoredMessage(payload, destination, f"id-{payload.decode()}", members=members or ()))
        eventually(lambda: buffer.accepted == expected)

    store(*(b"%d" % number for number in range(5)))
    store(b"batch", members=MEMBERS)
    buffer.queue.begin_range()  # after an outage of the target
    store(b"6", b"7", b"8")
    taken = [buffer.take() for _ in range(4)]
    six, seven, _, zero = (each for each in taken if each is not None)
    for each in (seven, zero):
        buffer.queue.settle(each.offset, len(each.payload))
    buffer.queue.put_back([six])
    record = Record(42, 1.0, CHANNEL, b"dead", destination.properties, "id-dead")
    buffer.journal.add_dead_letter(record, "PublishRefusedError: no", most=10)
    buffer.close()


@pytest.mark.parametrize("fill", [lambda data: shutil.copytree(FOLDER, data), write], ids=["stored", "written_now"])
def test_a_stored_buffer_is_drained_in_order_and_its_dead_letter_replayed(
    tmp_path: Path, fill: Callable[[Path], object]
) -> None:
    data = tmp_path / "data"
    fill(data)
    name = unique("stored")
    instances = {"a": {"url": f"memory://{name}-a"}, "b": {"url": f"memory://{name}-b"}}
    configured = settings(data, instances=instances, routes={"r": route(target="out/{x}", buffer=BUFFER)})
    with Broker(f"memory://{name}-b", CHANNEL, queue="q") as target, Gateway(configured) as gateway:
        target.messages.wait_for(len(LEFT))
        assert target.payloads == LEFT
        assert [each.context.content_type for each in target.messages] == ["text/plain"] * len(LEFT)
        stored = gateway.route("r")
        assert [stored.buffer.recognition.is_stored(each) for each in MEMBERS] == [True, True]
        assert stored.report().buffer.dead_letters == 1
        assert stored.replay(Selection()).replayed == 1
        target.messages.wait_for(len(LEFT) + 1)
        assert target.payloads[-1] == b"dead"
        eventually(lambda: stored.buffer.queue.depth == 0 and len(stored.buffer.journal.cursors()) == 1, "recorded")
        assert stored.report().buffer.dead_letters == 0
