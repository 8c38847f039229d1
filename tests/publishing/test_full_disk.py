"""A durable outbox on a disk that is full: the declared policy, nothing accepted is lost, and it drains by itself."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

import messaging
from messaging import MessageStream, Messaging, MessagingError, Promise
from messaging.errors import OutboxFullError
from messaging.journal import Journal
from messaging.testing.brokers import BrokerError, Mosquitto, RabbitMQ, require
from messaging.testing.servers import Servers
from messaging.testing.waiting import PATIENCE, eventually, results
from tests.faults.kills import PROTOCOLS
from tests.faults.scenario import QUICK

SIZE = 50_000
MANY = 60  # 3 MB, on a disk of 1 MiB
RELIABLE: dict[str, Any] = {"guaranteed_delivery": True}


@pytest.fixture(params=["mosquitto", pytest.param("rabbitmq", marks=pytest.mark.slow)])
def stopped(request: pytest.FixtureRequest, servers: Servers) -> Iterator[Mosquitto | RabbitMQ]:
    """A broker that is stopped, and knows a receiver for which it keeps the messages."""
    require(request.param)
    if request.param == "mosquitto":
        with Mosquitto(["max_queued_messages 0"], persistence=True) as broker:
            yield broker
        return
    with servers.borrow(RabbitMQ) as rabbitmq:
        with contextlib.suppress(BrokerError):  # there is none
            rabbitmq.ctl("delete_queue", "receiver")
        yield rabbitmq


@contextlib.contextmanager
def received(broker: Mosquitto | RabbitMQ) -> Iterator[MessageStream]:
    """A subscription for which the broker keeps messages while it is away."""
    protocol = PROTOCOLS["amqp" if isinstance(broker, RabbitMQ) else "mqtt"]
    with (
        messaging.connect(broker.url, **protocol.instance("receiver")) as r,
        r.subscribe("a/b", **protocol.subscription("receiver")) as stream,
    ):
        stream.ready.result(PATIENCE)
        yield stream


def payload(number: int, size: int = SIZE) -> bytes:
    return b"%06d" % number + b"x" * size


def outcomes(promises: Sequence[Promise[None]]) -> list[str]:
    """Settle ``stored`` of all promises; return the error of each, or ""."""
    return [type(error).__name__ if (error := each.exception(PATIENCE)) is not None else "" for each in promises]


def offline(broker: Mosquitto | RabbitMQ, path: Path, full: str, **settings: Any) -> Messaging:
    """An instance that was connected and has lost its broker."""
    m = messaging.connect(broker.url, outbox_path=path, outbox_full=full, **settings, **QUICK)
    m.ready.result(PATIENCE)
    broker.stop()
    return m


def numbers(stream: MessageStream, count: int) -> list[int]:
    return [int(stream.receive(timeout=PATIENCE).payload[:6]) for _ in range(count)]


def test_messages_without_room_are_refused_and_the_others_sent_when_the_broker_returns(
    stopped: Mosquitto | RabbitMQ, disk_of: Callable[[str], Path]
) -> None:
    path = disk_of("1m") / "outbox"
    with received(stopped) as stream, offline(stopped, path, "reject") as m:
        promises = [m.publish("a/b", payload(number), **RELIABLE) for number in range(MANY)]
        results = outcomes([each.stored for each in promises])
        accepted = [number for number, result in enumerate(results) if not result]
        assert 5 < len(accepted) < 25
        assert {*results} == {"", "OutboxFullError"}
        with pytest.raises(OutboxFullError, match="No space left"):
            promises[-1].result(PATIENCE)
        stopped.start()
        assert numbers(stream, len(accepted)) == accepted
        eventually(lambda: m.runtime.get_runtime_dto().publisher.pending == 0, "the outbox to be empty")
        # there is room again, without a restart, as soon as the confirms are recorded
        more = lambda: m.publish("a/b", payload(MANY), **RELIABLE).exception(PATIENCE) is None  # noqa: E731
        eventually(more, "room on the disk")
        assert numbers(stream, 1) == [MANY]
    assert Journal.view(path).info().damage == []


def test_messages_without_room_wait_for_the_broker(
    stopped: Mosquitto | RabbitMQ, disk_of: Callable[[str], Path]
) -> None:
    path = disk_of("1m") / "outbox"
    with received(stopped) as stream, offline(stopped, path, "block") as m:
        promises = [m.publish("a/b", payload(number), **RELIABLE) for number in range(MANY)]
        promises[0].stored.result(PATIENCE)
        assert not promises[-1].stored.done()
        stopped.start()
        assert numbers(stream, MANY) == [*range(MANY)]
        results(promises)
    assert Journal.view(path).info().damage == []


def test_messages_that_wait_for_room_fail_at_their_deadline(disk_of: Callable[[str], Path], tmp_path: Path) -> None:
    with Mosquitto() as broker, offline(broker, disk_of("1m") / "outbox", "block") as m:
        promises = [m.publish("a/b", payload(number), timeout=1.0, **RELIABLE) for number in range(MANY)]
        results = outcomes([each.stored for each in promises])
        assert {*results} == {"", "OutboxFullError"}
        assert results == sorted(results)  # the first ones had room


def test_the_oldest_messages_on_disk_make_room(stopped: Mosquitto | RabbitMQ, disk_of: Callable[[str], Path]) -> None:
    """Those that are in memory already are still sent."""
    path, many = disk_of("1m") / "outbox", 2000
    with received(stopped) as stream, offline(stopped, path, "drop_oldest", outbox_size=10) as m:
        promises = [m.publish("a/b", payload(number, 2000), **RELIABLE) for number in range(many)]
        promises[-1].stored.result(PATIENCE)
        stopped.start()
        found: list[int] = []
        while not found or found[-1] < many - 1:
            found += numbers(stream, 1)
        assert found == sorted(found)
        assert found[:10] == [*range(10)]  # were in memory
        assert 100 < len(found) < many - 500
        eventually(lambda: m.runtime.get_runtime_dto().publisher.pending == 0, "the outbox to be empty")
        dropped = [number for number, each in enumerate(promises) if each.exception(PATIENCE) is not None]
        assert sorted([*dropped, *found]) == [*range(many)]
        assert m.runtime.get_runtime_dto().publisher.failed == len(dropped)


def test_a_bound_of_the_outbox_is_a_full_outbox(tmp_path: Path) -> None:
    with Mosquitto() as broker, offline(broker, tmp_path / "outbox", "reject", outbox_disk_bytes=500_000) as m:
        promises = [m.publish("a/b", payload(number), **RELIABLE) for number in range(20)]
        errors = [each.stored.exception(PATIENCE) for each in promises]
        assert sum(error is None for error in errors) == 9
        error: MessagingError | None = errors[-1]
        assert isinstance(error, OutboxFullError)
        assert "max_bytes is 500000" in str(error)
