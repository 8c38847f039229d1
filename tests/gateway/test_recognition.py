"""Messages without ids that their MQTT source delivers again although they are on the disk."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from messaging.gateway import Gateway
from messaging.gateway.buffer import Buffer
from messaging.gateway.stored import Stored, members_of, with_members, without_members
from messaging.testing.brokers import Mosquitto
from messaging.testing.proxy import Proxy
from messaging.testing.tables import table
from messaging.testing.waiting import eventually
from tests.gateway.kit import Broker, route, settings, unique
from tests.gateway.test_ranges import DESTINATION, opened


class Source:
    """Messages as an intake receives them in one run: packet identifier, content, and what was stored of them."""

    def __init__(self, buffer: Buffer) -> None:
        self.buffer = buffer
        self.connection = object()

    def new(self, packet: int, payload: bytes = b"x") -> str:
        """Receive a message for the first time, and store it; return its id."""
        return self._store(self._identify(packet, payload, is_redelivered=False), payload)

    def again(self, packet: int, payload: bytes = b"x") -> tuple[str, bool]:
        """Receive a message that the broker has sent before; return its id, and whether it was stored."""
        found = self._identify(packet, payload, is_redelivered=True)
        if self.buffer.recognition.is_stored(self.buffer.recognition.key(found, "in", payload)):
            return found, True
        return self._store(found, payload), False

    def _identify(self, packet: int, payload: bytes, *, is_redelivered: bool) -> str:
        return self.buffer.recognition.identify(
            packet, "in", payload, is_redelivered=is_redelivered, connection=self.connection
        )

    def _store(self, message_id: str, payload: bytes) -> str:
        stored = Stored(self.buffer, payload, DESTINATION, message_id)
        stored.key = self.buffer.recognition.key(message_id, "in", payload)
        accepted = self.buffer.accepted + 1
        self.buffer.store(stored)
        eventually(lambda: self.buffer.accepted == accepted)
        return message_id


@contextmanager
def run(path: Path) -> Iterator[Source]:
    with opened(path) as buffer:
        yield Source(buffer)


def test_a_message_without_an_id_has_the_same_one_when_it_comes_again_after_a_restart(tmp_path: Path) -> None:
    with run(tmp_path) as source:
        ids = [source.new(packet) for packet in range(1, 6)]
        assert len(set(ids)) == 5
        assert [source.again(packet) for packet in (4, 5)] == [(ids[3], True), (ids[4], True)]
    for _ in range(2):
        with run(tmp_path) as source:
            assert [source.again(packet) for packet in (3, 4, 5)] == [(each, True) for each in ids[2:]]


def test_equal_messages_are_never_merged(tmp_path: Path) -> None:
    with run(tmp_path) as source:
        first = [source.new(packet) for packet in (1, 2, 3)]
        # the broker gives the numbers of acknowledged messages to new ones
        second = [source.new(packet) for packet in (1, 2)]
        assert source.again(3) == (first[2], True)
        assert source.again(4)[1] is False, "a message that was sent and not read"
    with run(tmp_path) as source:
        assert source.again(1) == (second[0], True)
        assert source.again(2, b"other")[1] is False
        assert source.again(5)[1] is False


def test_an_acknowledgement_of_a_later_message_that_arrived_tells_of_those_before_it(tmp_path: Path) -> None:
    with run(tmp_path) as source:
        for packet in (1, 2, 3, 2):
            source.new(packet)
    with run(tmp_path) as source:
        assert source.again(1)[1] is False, "acknowledged before 2, whose number was given away"
        assert source.again(3)[1] is True


def test_a_new_session_has_numbers_of_its_own(tmp_path: Path) -> None:
    with run(tmp_path) as source:
        for packet in range(1, 10):
            source.new(packet)
        source.connection = object()
        source.new(1)  # the broker was started anew
        assert source.again(7)[1] is False
    with run(tmp_path) as source:
        assert source.again(8)[1] is False
    with run(tmp_path) as source:
        source.new(1)
    with run(tmp_path) as source:
        assert source.again(8)[1] is False
        assert source.again(1)[1] is True


def test_numbers_go_on_from_the_beginning_after_the_last_one(tmp_path: Path) -> None:
    with run(tmp_path) as source:
        ids = [source.new(packet) for packet in (65_534, 65_535)]
        source.connection = object()
        ids.append(source.new(1))
    with run(tmp_path) as source:
        assert [source.again(packet)[0] for packet in (65_534, 65_535, 1)] == ids


@table("properties", ["", '{"contentType":"a/b"}', '{"extensions":{"headers":{"x":"]\\"members"}}}'])
def test_the_members_of_a_batch_do_not_change_its_properties(properties: str) -> None:
    for members in (["a-1.2.3"], ["a", "b"]):
        text = with_members(properties, members)
        assert (members_of(text), without_members(text)) == (members, properties)
    assert (members_of(properties), without_members(properties)) == ((), properties)


# --- gateways


@table("version", ["5", "3.1.1"])
@table(
    "other",
    [{}, {"transform": [{"set": {"site": "{gateway}"}}]}, {"batch": {"count": 4, "delay": "50 ms"}},
     {"batch": {"count": 4, "delay": "50 ms", "envelope": True, "format": "json_array"}, "compress": "gzip"}],
)  # fmt: skip
def test_messages_whose_acknowledgements_were_lost_are_not_stored_again(
    version: str, other: dict[str, Any], mosquitto: Mosquitto, tmp_path: Path
) -> None:
    name = unique("recognition")
    count = 15  # mosquitto sends 20 with MQTT 3.1.1 before it waits for acknowledgements
    with Proxy(mosquitto.host, mosquitto.port) as proxy, Broker(f"{mosquitto.url}?version=3.1.1") as devices:
        url = f"mqtt://127.0.0.1:{proxy.port}?version={version}"
        chosen = settings(
            tmp_path / unique("data"), name=name,
            instances={"a": {"url": url, "reconnect_max": 0.1}, "b": {"url": f"memory://{name}"}},
            routes={"r": route({"channel": f"{name}/in"}, "out", **other)},
        )  # fmt: skip
        with Gateway(chosen) as gateway:
            eventually(lambda: gateway.report().routes[0].is_subscribed)
            devices.send(f"{name}/in", b'{"probe":1}', qos=1)
            eventually(lambda: stored(gateway) == 1)
            proxy.up.swallow()
            devices.send(f"{name}/in", *(b'{"n":%d}' % (number // 2) for number in range(count)), qos=1)
            eventually(lambda: stored(gateway) == 1 + count)
            total = gateway.route("r").buffer.accepted
        proxy.up.restore()
        with Gateway(chosen) as gateway:
            eventually(lambda: gateway.report().routes[0].repeated >= count, "all come again, and are recognised")
            devices.send(f"{name}/in", b'{"n":0}', qos=1)
            eventually(lambda: gateway.route("r").buffer.accepted == 1)
            report = gateway.report().routes[0]
            assert (report.filtered, report.buffer.accepted) == (0, 1), f"after {total} records"


def stored(gateway: Gateway) -> int:
    """The number of messages that are stored, in batches or not, and can be acknowledged."""
    found = gateway.route("r").buffer
    with_batches = 0
    for record in found.journal.read(found.journal.begin):
        with_batches += len(members_of(record.properties)) or 1
    return with_batches
