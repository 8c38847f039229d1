"""Messages without ids that their MQTT source delivers again although they are on the disk."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from messaging.gateway import Gateway
from messaging.gateway.buffer import Buffer
from messaging.gateway.recognition import FILE
from messaging.gateway.stored import StoredMessage, members_of, with_members, without_members
from messaging.testing.brokers import Mosquitto
from messaging.testing.proxy import Proxy
from messaging.testing.tables import table
from messaging.testing.waiting import eventually
from tests.gateway.kit import Broker, route, settings, unique
from tests.gateway.test_ranges import DESTINATION, opened, take


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

    def other(self, payload: bytes, numbers: Iterable[int], prefix: str) -> None:
        """Store messages with ids of their own."""
        numbers = [*numbers]
        accepted = self.buffer.accepted + len(numbers)
        for number in numbers:
            key = self.buffer.recognition.key(f"{prefix}{number}", "t", payload)
            self.buffer.store(StoredMessage(payload, DESTINATION, f"{prefix}{number}", key=key))
        eventually(lambda: self.buffer.accepted == accepted)

    def is_stored(self, message_id: str, payload: bytes) -> bool:
        """Whether a message with an id of its own is known."""
        return self.buffer.recognition.is_stored(self.buffer.recognition.key(message_id, "t", payload))

    def forward_all(self) -> None:
        """Have the target confirm all, so that the journal deletes them."""
        for stored in take(self.buffer):
            self.buffer.queue.settle(stored.offset, len(stored.payload))
        journal = self.buffer.journal
        eventually(lambda: journal.begin == journal.end)

    def _identify(self, packet: int, payload: bytes, *, is_redelivered: bool) -> str:
        return self.buffer.recognition.identify(
            packet, "in", payload, is_redelivered=is_redelivered, connection=self.connection
        )

    def _store(self, message_id: str, payload: bytes) -> str:
        key = self.buffer.recognition.key(message_id, "in", payload)
        accepted = self.buffer.accepted + 1
        self.buffer.store(StoredMessage(payload, DESTINATION, message_id, key=key))
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


@table("unread", [0, 2])
def test_a_session_that_goes_on_may_have_numbers_of_a_new_one(unread: int, tmp_path: Path) -> None:
    """A broker that was started again sends what is in flight again, and then counts from 1."""
    with run(tmp_path) as source:
        ids = [source.new(packet) for packet in range(1, 10 - unread)]
        source.connection = object()
        ids += [source.again(packet)[0] for packet in range(10 - unread, 10)]
        assert [source.again(packet)[0] for packet in range(7, 10)] == ids[6:]
        first = source.new(1)
        assert [source.again(packet) for packet in (8, 9, 1)] == [(ids[7], True), (ids[8], True), (first, True)]
    with run(tmp_path) as source:
        assert [source.again(packet) for packet in (8, 9, 1)] == [(ids[7], True), (ids[8], True), (first, True)]
        source.connection = object()
        assert source.again(8) == (ids[7], True)
        source.new(2)
        assert source.again(9) == (ids[8], True)


def test_numbers_go_on_from_the_beginning_after_the_last_one(tmp_path: Path) -> None:
    with run(tmp_path) as source:
        ids = [source.new(packet) for packet in (65_534, 65_535)]
        source.connection = object()
        ids.append(source.new(1))
    with run(tmp_path) as source:
        assert [source.again(packet)[0] for packet in (65_534, 65_535, 1)] == ids


@table("size", [1000, 600_000])
def test_messages_are_recognised_after_the_journal_has_deleted_them(size: int, tmp_path: Path) -> None:
    def rounds(source: Source) -> None:
        """Have the target take all, in as many segments as there are rounds."""
        for number in range(3):
            source.other(b"x" * size, range(2 * 10**6 // size), f"other{number}-")
            source.forward_all()

    with run(tmp_path) as source:
        ids = [source.new(packet, b"%d" % packet) for packet in range(1, 6)]
        source.other(b"y", [1, 2], "foreign")
        rounds(source)
        assert source.again(4, b"4") == (ids[3], True)
    with run(tmp_path) as source:
        rounds(source)  # before the first message of the source
        assert [source.again(packet, b"%d" % packet) for packet in range(1, 6)] == [(each, True) for each in ids]
    with run(tmp_path) as source:
        assert source.is_stored("foreign2", b"y")
        assert not source.is_stored("foreign2", b"z")
        assert not source.is_stored("foreign3", b"y")
        source.new(6)
        assert source.new(2, b"2") != ids[1], "the broker has the acknowledgements of 1 and 2"
        rounds(source)
    with run(tmp_path) as source:
        assert source.again(1, b"1")[1] is False
        assert source.again(3, b"3") == (ids[2], True)
        assert source.again(4, b"other")[1] is False


@table(
    ("content", "is_known"),
    [(lambda kept: kept, True), (lambda kept: kept[4:], False), (lambda _: b"\0\xff\n\n" * 1000, False),
     (lambda _: b"", False)],
)  # fmt: skip
def test_a_message_that_a_damaged_file_does_not_name_is_stored(
    content: Callable[[bytes], bytes], is_known: bool, tmp_path: Path
) -> None:
    with run(tmp_path) as source:
        source.new(1)
        source.other(b"x" * 10**6, [1, 2], "other")
        source.forward_all()
    file = tmp_path / FILE
    file.write_bytes(content(file.read_bytes()))
    with run(tmp_path) as source:
        assert source.again(1)[1] is is_known


def test_a_message_is_stored_again_if_the_disk_lost_its_record(tmp_path: Path) -> None:
    """The file names only what is deleted: a record that stays may be lost with the power, before it is synced."""
    with run(tmp_path) as source:
        deleted = source.new(1)
        source.other(b"x" * 10**6, [1, 2], "other")
        source.forward_all()
        kept = source.new(2)
        assert kept not in (tmp_path / FILE).read_text()
        source.buffer.journal._log.start_segment()
        source.new(3)
        first = next(iter(take(source.buffer)))
        source.buffer.queue.settle(first.offset, len(first.payload))
        eventually(lambda: first.offset < source.buffer.journal.begin)
        text = (tmp_path / FILE).read_text()
        assert deleted in text
        assert kept in text
        assert text.count("\n") == 4, "of the last message there is none"


def test_a_file_that_cannot_be_written_stops_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with run(tmp_path) as source:
        (tmp_path / FILE).mkdir()
        for packet in (1, 2):
            source.new(packet)
            source.other(b"x" * 10**6, [1, 2], f"other{packet}-")
            source.forward_all()
        assert source.again(2)[1] is True
        (tmp_path / FILE).rmdir()
        source.other(b"x" * 10**6, [1, 2], "last")
        source.forward_all()
    with run(tmp_path) as source:
        assert source.again(1)[1] is True
    assert [each.getMessage().split(":")[0] for each in caplog.records] == ["route 'r'"], "said once"
    assert "may not be recognised after a crash" in caplog.text


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
