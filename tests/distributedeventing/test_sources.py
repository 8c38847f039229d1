"""Whiteboard sources (RFC 214 5.2.4). Numbers are those of the scenarios."""

from __future__ import annotations

from typing import Any

import pytest

from messaging.distributedeventing import DistributedEventAdmin, EventPublisherSession, PushEvent, PushEventSource
from messaging.distributedeventing.sources import EventSources
from messaging.errors import ArgumentError, ClosedError
from messaging.services import ServiceRegistry
from messaging.testing.tables import table
from messaging.testing.waiting import eventually
from tests.distributedeventing.conftest import Consumer, Pair, consume, flush, record


class Source(PushEventSource[int]):
    """A source that keeps the consumers that it is given."""

    def __init__(self) -> None:
        self.opened: list[Any] = []
        self.closed = 0

    def open(self, consumer: Any) -> Any:
        self.opened.append(consumer)
        return self

    def close(self) -> None:
        self.closed += 1


def test_44_45_46_a_source_is_open_while_it_has_consumers(admin: DistributedEventAdmin) -> None:
    source = Source()
    made: list[Source] = []
    admin.services.register(
        PushEventSource, lambda: made.append(source) or source, {"event.topic": "a"}, scope="prototype"
    )
    record(admin, "b")
    assert made == []
    for number in range(1, 3):
        recorder = Consumer()
        registration = consume(admin, recorder, "a", lifecycle="SESSION")
        eventually(lambda number=number: len(source.opened) == number)  # type: ignore[misc]
        assert source.opened[-1].accept(PushEvent.data(number)) >= 0
        flush(admin)
        assert recorder.values == [number]
        registration.unregister()
        eventually(lambda number=number: source.closed == number)  # type: ignore[misc]
        assert source.opened[-1].accept(PushEvent.data(0)) < 0


@table("event", [PushEvent.close(), PushEvent.error(ValueError("x"))])
def test_45_the_end_of_a_source_passes_through_its_session(admin: DistributedEventAdmin, event: PushEvent[Any]) -> None:
    source, recorder = Source(), record(admin, "a", lifecycle="SESSION")
    admin.services.register(PushEventSource, source, {"event.topic": "a"})
    eventually(lambda: source.opened)
    source.opened[0].accept(PushEvent.data(1))
    source.opened[0].accept(event)
    flush(admin)
    assert recorder.kinds == ["data", event.kind]
    assert source.opened[0].accept(PushEvent.data(2)) < 0
    with pytest.raises(ArgumentError):
        source.opened[0].accept(3)


def test_47_a_wildcard_consumer_elsewhere_opens_a_source(pair: Pair) -> None:
    source = Source()
    pair.one.services.register(PushEventSource, source, {"event.topic": "a/b"})
    recorder = record(pair.other, "a/*")
    eventually(lambda: source.opened)
    source.opened[0].accept(PushEvent.data(1))
    eventually(lambda: recorder.values == [1])


def test_48_the_session_of_an_unregistered_source_closes(admin: DistributedEventAdmin) -> None:
    source, recorder = Source(), record(admin, "a", lifecycle="SESSION")
    registration = admin.services.register(PushEventSource, source, {"event.topic": "a"})
    eventually(lambda: source.opened)
    source.opened[0].accept(PushEvent.data(1))
    registration.unregister()
    eventually(lambda: recorder.kinds == ["data", "close"])
    assert source.closed == 1


def test_an_update_of_its_topic_opens_a_source_anew(admin: DistributedEventAdmin) -> None:
    source, recorder = Source(), record(admin, is_whole=True)
    registration = admin.services.register(PushEventSource, source, {"event.topic": "a"})
    eventually(lambda: len(source.opened) == 1)
    registration.update({"event.topic": "b"})
    eventually(lambda: len(source.opened) == 2)
    source.opened[1].accept(PushEvent.data(1))
    flush(admin)
    assert [each.topic for each in recorder.values] == ["b"]


def test_a_source_that_is_due_while_its_admin_closes_is_not_opened_and_no_failure(
    caplog: pytest.LogCaptureFixture,
) -> None:
    asked: list[str] = []

    def refuse(topic: str) -> EventPublisherSession[Any]:
        asked.append(topic)
        raise ClosedError("the admin is closed")

    services, source = ServiceRegistry(), Source()
    services.register(PushEventSource, source, {"event.topic": "a"})
    sources = EventSources(
        "admin", services, {}, has_consumer=lambda _: True, create_session=refuse, changed=lambda: None
    )
    sources.open()
    eventually(lambda: asked)
    sources.review()
    eventually(lambda: len(asked) == 2)
    sources.close()
    assert source.opened == []
    assert caplog.records == []
