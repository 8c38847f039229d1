"""Messages that their source delivers again after a crash, although they are on the disk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from messaging.gateway import buffer as buffer_module
from messaging.gateway.stored import StoredMessage
from messaging.testing.waiting import eventually
from tests.gateway.test_ranges import DESTINATION, opened


def stored(buffer: buffer_module.Buffer, number: int, payload: bytes = b"x") -> StoredMessage:
    message_id = f"id{number}"
    key = buffer.recognition.key(message_id, DESTINATION.channel, payload)
    return StoredMessage(payload, DESTINATION, message_id, key=key)


def test_a_stored_message_is_recognised_after_a_restart(tmp_path: Path) -> None:
    with opened(tmp_path) as buffer:
        for number in range(10):
            buffer.store(stored(buffer, number))
        eventually(lambda: buffer.accepted == 10)
        while (taken := buffer.take()) is not None:
            buffer.queue.settle(taken.offset, len(taken.payload))
    with opened(tmp_path) as buffer:
        assert all(buffer.recognition.is_stored(stored(buffer, number).keys[0]) for number in range(10))
        assert not buffer.recognition.is_stored(stored(buffer, 10).keys[0])


def test_another_payload_with_the_same_id_is_another_message(tmp_path: Path) -> None:
    with opened(tmp_path) as buffer:
        buffer.store(stored(buffer, 1))
        eventually(lambda: buffer.accepted == 1)
        assert not buffer.recognition.is_stored(stored(buffer, 1, b"y").keys[0])


class Received:
    """A message of a source, which remembers whether it was acknowledged."""

    def __init__(self) -> None:
        self.outcomes: list[bool] = []

    def settle(self, acknowledged: bool) -> None:
        self.outcomes.append(acknowledged)


def test_a_message_that_comes_again_on_its_way_to_the_disk_is_stored_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is acknowledged with the first one, whose connection may be lost, and not before."""
    with opened(tmp_path) as buffer:
        held: list[Any] = []
        put = buffer.journal.put
        monkeypatch.setattr(buffer.journal, "put", held.append)
        first, again, other = Received(), Received(), stored(buffer, 2)
        message, repeated = stored(buffer, 1), stored(buffer, 1)
        message.sources, repeated.sources = [first], [again]
        buffer.store(message)
        assert buffer.recognition.joins(repeated.keys[0], repeated.sources)
        assert not buffer.recognition.joins(other.keys[0], [])
        assert (first.outcomes, again.outcomes) == ([], [])
        put(*held)
        eventually(lambda: buffer.accepted == 1)
        assert (first.outcomes, again.outcomes) == ([True], [True])
        assert not buffer.recognition.joins(stored(buffer, 1).keys[0], []), "it is stored"
        assert buffer.recognition.is_stored(stored(buffer, 1).keys[0])


def test_the_number_of_known_messages_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buffer_module, "RECENT", 5)
    with opened(tmp_path) as buffer:
        for number in range(8):
            buffer.store(stored(buffer, number))
        eventually(lambda: buffer.accepted == 8)
        assert [buffer.recognition.is_stored(stored(buffer, number).keys[0]) for number in range(8)] == [False] * 3 + [
            True
        ] * 5
    with opened(tmp_path) as buffer:
        assert [buffer.recognition.is_stored(stored(buffer, number).keys[0]) for number in range(8)] == [False] * 3 + [
            True
        ] * 5
