"""Notification (RFC 214 5.1.4). Numbers are those of the scenarios."""

from __future__ import annotations

import time

import pytest

from messaging.distributedeventing import DistributedEventAdmin, EventPublisherSession
from messaging.errors import ConnectionLostError, PartialNotificationError
from messaging.testing.brokers import Mosquitto
from messaging.testing.proxy import Proxy
from messaging.testing.tables import table
from messaging.testing.waiting import PATIENCE, eventually
from tests.distributedeventing.conftest import (
    Consumer,
    Failing,
    Gate,
    Nodes,
    Pair,
    announce,
    consume,
    named,
    record,
)


def test_39_the_promise_waits_for_consumers_here_and_elsewhere(pair: Pair) -> None:
    here, there = Gate(), Gate()
    consume(pair.one, here, "a")
    consume(pair.other, there, "a")
    pair.announce()
    promise = pair.one.publish_event_with_notification("a", 1)
    here.events.wait_for(1)
    there.events.wait_for(1)
    here.opened.set()
    assert not promise.done()
    there.opened.set()
    promise.result(PATIENCE)


def test_40_without_consumers_the_promise_resolves_at_once(admin: DistributedEventAdmin) -> None:
    admin.publish_event_with_notification("a", 1).result(PATIENCE)


def test_41_failures_count_as_notified(pair: Pair) -> None:
    consume(pair.one, Failing(ValueError("x")), "a")
    consume(pair.other, Consumer(-1), "a")
    pair.announce()
    pair.one.publish_event_with_notification("a", 1).result(PATIENCE)


def test_41_the_promise_fails_when_the_connection_is_lost(nodes: Nodes, mosquitto: Mosquitto) -> None:
    with Proxy(mosquitto.host, mosquitto.port) as proxy:
        one, other = nodes("mqtt5", settings={"url": f"mqtt://127.0.0.1:{proxy.port}"}), nodes("mqtt5")
        gate = Gate()
        consume(other, gate, "a")
        eventually(lambda: one.create_session("a").is_connected)
        promise = one.publish_event_with_notification("a", 1)
        gate.events.wait_for(1)
        proxy.refuse()
        with pytest.raises((ConnectionLostError, PartialNotificationError)):
            promise.result(PATIENCE)
        gate.opened.set()


def test_42_the_promise_waits_for_a_delayed_consumer(admin: DistributedEventAdmin) -> None:
    consume(admin, Consumer(300))
    admin.publish_event_with_notification("a", 1).result(PATIENCE)
    begin = time.monotonic()
    admin.publish_event_with_notification("a", 2).result(PATIENCE)
    assert time.monotonic() - begin > 0.2


@table("end", ["close", "end_of_stream", "error"])
def test_43_the_end_of_a_session_is_notified(pair: Pair, end: str) -> None:
    aware = record(pair.other, "a", lifecycle="SESSION")
    pair.announce()
    session: EventPublisherSession[int] = pair.one.create_session("a")
    session.publish_event(1)
    if end == "error":
        session.error_with_notification(ValueError("x")).result(PATIENCE)
    else:
        getattr(session, f"{end}_with_notification")().result(PATIENCE)
    assert aware.kinds == ["data", "error" if end == "error" else "close"]


def test_the_deadline_holds_without_a_network(admin: DistributedEventAdmin) -> None:
    gate = Gate()
    consume(admin, gate)
    with pytest.raises(PartialNotificationError, match=r"within 0\.1 s"):
        admin.publish_event_with_notification("a", 1, timeout=0.1).result(PATIENCE)
    gate.opened.set()


@table("way", ["unregister", "negative answer", "exception", "modified"])
def test_a_consumer_that_goes_away_ends_the_waits_for_it(nodes: Nodes, way: str) -> None:
    one, other = nodes(), nodes()
    consumer = {"negative answer": Consumer(-1), "exception": Failing(ValueError("x"))}.get(way, Consumer(2))
    registration = consume(other, consumer, f"{way[:2]}/x")
    announce(one, other)
    promises = [one.publish_event_with_notification(f"{way[:2]}/x", number) for number in range(100)]
    if way == "unregister":
        registration.unregister()
    elif way == "modified":
        registration.update(named(f"{way[:2]}/y"))
    promises += [one.publish_event_with_notification(f"{way[:2]}/x", number) for number in range(100)]
    assert [each.exception(PATIENCE) for each in promises] == [None] * 200
