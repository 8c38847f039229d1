"""Consumers that a test steers: a stream whose messages the test settles, and an observer that waits for the test."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from messaging import AcknowledgeType, Message, MessageStream
from messaging.instance import Messaging
from messaging.testing.waiting import PATIENCE, Recorder


def manual(m: Messaging, channel: str = "a", **extensions: Any) -> MessageStream:
    """A stream whose messages the test settles, or not."""
    builder = m.acknowledge_context_builder().message_context_builder().channel(channel)
    stream = m.subscription.subscribe(builder.extensions(extensions).build_context())
    stream.ready.result(PATIENCE)
    return stream


def acknowledge(message: Message) -> bool:
    handler = message.context.acknowledge_handler  # type: ignore[attr-defined]
    answer: bool = handler.acknowledge()
    return answer


def reject(message: Message) -> bool:
    answer: bool = message.context.acknowledge_handler.reject()  # type: ignore[attr-defined]
    return answer


def state(message: Message) -> AcknowledgeType:
    answer: AcknowledgeType = message.context.acknowledge_state  # type: ignore[attr-defined]
    return answer


def receive(stream: MessageStream, count: int) -> list[bytes]:
    return [stream.receive(PATIENCE).payload for _ in range(count)]


def numbered(count: int, start: int = 0) -> list[bytes]:
    return [b"%d" % number for number in range(start, start + count)]


class Slow(Recorder[bytes]):
    """An observer that records the payload of each message, and holds on to the message until it is let go."""

    def __init__(self) -> None:
        super().__init__()
        #: the thread that called last
        self.thread = 0
        self._proceed = threading.Semaphore(0)
        self._waited = 0

    def __call__(self, message: Message) -> None:  # type: ignore[override]  # it keeps the payloads only
        self.thread = threading.get_ident()
        self.append(message.payload)
        assert self._proceed.acquire(timeout=PATIENCE)

    on_next = __call__

    def wait(self, count: int = 1) -> None:
        """Wait until so many more messages than before are recorded."""
        self._waited += count
        self.wait_for(self._waited)

    def go(self, count: int = 1) -> None:
        """Let go of so many messages."""
        self._proceed.release(count)


@pytest.fixture
def slow() -> Iterator[Slow]:
    observer = Slow()
    yield observer
    observer.go(10_000)
