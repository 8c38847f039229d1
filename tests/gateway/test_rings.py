"""Rings of gateways: copies of a message are recognised where something marks them, and reported where not."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import messaging
from messaging import Message
from messaging.gateway import Gateway
from messaging.gateway.intake import MANY, WITHIN, RingWatch
from messaging.testing.brokers import Mosquitto, RabbitMQ
from messaging.testing.tables import table
from messaging.testing.waiting import PATIENCE, Recorder, eventually
from tests.gateway.kit import settings, started, unique

KINDS = ("mqtt5", "amqp", "envelope")


def url_of(kind: str, mosquitto: Mosquitto, rabbitmq: RabbitMQ) -> str:
    return {
        "mqtt5": f"{mosquitto.url}?version=5",
        "amqp": rabbitmq.url,
        "envelope": f"{mosquitto.url}?version=3.1.1&envelope=true",
        "plain": f"{mosquitto.url}?version=3.1.1",
    }[kind]


def bridge(url: str, source: str, target: str) -> dict[str, Any]:
    """A route between two sites, which are prefixes of the channels of one broker."""
    return {
        "from": {"instance": "a", "channel": f"{source}/{{rest#}}"},
        "to": {"instance": "a", "channel": f"{target}/{{rest}}"},
        "buffer": {"full": "block"},
    }


@contextlib.contextmanager
def ring(url: str, folder: Path, sites: list[str], *, entry: str | None = None) -> Iterator[list[Gateway]]:
    """Run a gateway, both ways, between each site and the next; with ``entry`` one from there to the first site."""
    pairs = [*zip(sites, [*sites[1:], sites[0]], strict=True)]
    with contextlib.ExitStack() as stack:
        gateways: list[Gateway] = []
        for one, other in pairs:
            routes = {"there": bridge(url, one, other), "back": bridge(url, other, one)}
            gateways.append(_running(stack, url, folder, routes))
        if entry is not None:
            gateways.append(_running(stack, url, folder, {"entry": bridge(url, entry, sites[0])}))
        yield gateways


def _running(stack: contextlib.ExitStack, url: str, folder: Path, routes: dict[str, Any]) -> Gateway:
    name = unique("ring")
    given = settings(folder / name, instances={"a": {"url": url}}, routes=routes, name=name)
    return started(stack.enter_context(Gateway(given)))


@table("kind", KINDS)
def test_a_ring_of_three_hands_on_each_message_with_one_id_and_comes_to_an_end(
    kind: str, mosquitto: Mosquitto, rabbitmq: RabbitMQ, tmp_path: Path
) -> None:
    url = url_of(kind, mosquitto, rabbitmq)
    sites = [unique(each) for each in "abc"]
    with messaging.connect(url) as m, ring(url, tmp_path, sites) as gateways:
        every: dict[str, Recorder[Message]] = {each: Recorder() for each in sites}
        once: dict[str, Recorder[Message]] = {each: Recorder() for each in sites}
        for site in sites:
            m.on(f"{site}/x", every[site], qos=1).ready.result(PATIENCE)
            m.on(f"{site}/x", once[site], qos=1, deduplicate=60.0).ready.result(PATIENCE)
        for number in range(3):
            m.publish(f"{sites[0]}/x", b"equal", qos=1, message_id=f"m{number}").result(PATIENCE)
        # the message itself and a copy of each way round; at the others one copy of each way
        eventually(lambda: [len(every[each]) for each in sites] == [9, 6, 6])
        eventually(lambda: sum(each.looped for one in gateways for each in one.report().routes) == 3 * 8)
        assert [len(once[each]) for each in sites] == [3, 3, 3]
        for site in sites:
            assert Counter(each.context.extensions["messageId"] for each in every[site]) == dict.fromkeys(
                ("m0", "m1", "m2"), 3 if site == sites[0] else 2
            )


@table("kind", KINDS)
def test_messages_without_an_id_get_one_where_one_gateway_lets_them_in(
    kind: str, mosquitto: Mosquitto, rabbitmq: RabbitMQ, tmp_path: Path
) -> None:
    url = url_of(kind, mosquitto, rabbitmq)
    device_url = rabbitmq.url if kind == "amqp" else url_of("plain", mosquitto, rabbitmq)
    sites, door = [unique(each) for each in "abc"], unique("door")
    with messaging.connect(url) as m, messaging.connect(device_url) as device:
        once: dict[str, Recorder[Message]] = {each: Recorder() for each in sites}
        with ring(url, tmp_path, sites, entry=door) as gateways:
            for site in sites:
                m.on(f"{site}/x", once[site], qos=1, deduplicate=60.0).ready.result(PATIENCE)
            for _ in range(3):  # of a device that sends equal values
                device.publish(f"{door}/x", b"equal", qos=1).result(PATIENCE)
            eventually(lambda: sum(each.looped for one in gateways for each in one.report().routes) == 3 * 8)
            eventually(lambda: [len(once[each]) for each in sites] == [3, 3, 3])


def test_a_ring_without_headers_is_reported(
    mosquitto: Mosquitto, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    url = f"{mosquitto.url}?version=3.1.1"
    sites = [unique(each) for each in "abc"]
    with messaging.connect(url) as m, ring(url, tmp_path, sites):
        m.publish(f"{sites[0]}/x", b"1", qos=1).result(PATIENCE)
        eventually(lambda: "ring of gateways" in caplog.text)


def test_equal_messages_are_reported_only_if_they_come_as_fast_as_in_a_ring() -> None:
    watch = RingWatch()
    assert not any(watch.note("a", b"on", second) for second in range(10 * MANY))
    assert not any(watch.note("a", b"%d" % number, 0.0) for number in range(10 * MANY))
    found = [watch.note("a", b"on", 5000 + number * WITHIN / (2 * MANY)) for number in range(5 * MANY)]
    assert found.index(True) == MANY - 1
    assert found.count(True) == 1  # not again for a while
