"""Distribution and qualities of service (RFC 214 5.3). Numbers are those of the scenarios."""

from __future__ import annotations

import enum
import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import messaging
from messaging.distributedeventing import (
    AT_LEAST_ONCE,
    AT_MOST_ONCE,
    EXACTLY_ONCE,
    IN_ORDER,
    OUT_OF_ORDER,
    PERSISTENT,
    TRANSIENT,
    DistributedEventAdmin,
    EventNetwork,
)
from messaging.errors import ArgumentError, InvalidEventError, MessagingError, UnsupportedFeatureError
from messaging.execution import Promise
from messaging.services import ServiceReference, ServiceRegistry
from messaging.testing.proxy import Proxy
from messaging.testing.tables import table
from messaging.testing.waiting import PATIENCE, eventually
from tests.dispatch.eventnetwork.plain import event
from tests.distributedeventing.conftest import (
    Admins,
    Consumer,
    Nodes,
    Pair,
    announce,
    connect,
    consume,
    flush,
    logged,
    named,
    prefix,
    record,
)
from tests.threads import in_threads


def test_49_events_reach_exact_and_wildcard_consumers_of_the_other(pair: Pair) -> None:
    recorders = [record(pair.other, topics) for topics in ("a/b", "a/*", "a**", "**")]
    pair.announce()
    pair.one.publish_event("a/b", 1)
    for recorder in recorders:
        eventually(lambda recorder=recorder: recorder.values == [1])  # type: ignore[misc]


def test_50_an_own_event_is_consumed_once(pair: Pair) -> None:
    here, there = record(pair.one, "**"), record(pair.other, "**")
    pair.announce()
    for number in range(20):
        pair.one.publish_event("a", number)
    pair.one.publish_event_with_notification("a", 20).result(PATIENCE)
    eventually(lambda: there.values == list(range(21)))
    assert here.values == list(range(21))


def test_51_56_the_qualities_of_service_are_advertised(admins: Admins) -> None:
    admin = admins(proprietary_qos=["FAST"])
    (reference,) = admin.services.find(DistributedEventAdmin)
    assert reference.properties["event.delivery.qos"] == list(admin.qos)
    assert set(admin.qos) == {*(TRANSIENT, AT_MOST_ONCE, AT_LEAST_ONCE, EXACTLY_ONCE, IN_ORDER, OUT_OF_ORDER, "FAST")}
    admin.publish_event("a", 1, qos="FAST")
    assert admin.services.find(DistributedEventAdmin, "(event.delivery.qos=FAST)") == [reference]


@table("qos", [IN_ORDER, OUT_OF_ORDER])
def test_52_events_of_each_thread_arrive_in_order(pair: Pair, qos: str) -> None:
    recorder = record(pair.other, "**")
    pair.announce()
    in_threads(3, lambda thread: [pair.one.publish_event(f"t{n % 3}", [thread, n], qos=qos) for n in range(50)])
    eventually(lambda: len(recorder.values) == 150)
    for thread in range(3):
        found = [n for one, n in recorder.values if one == thread]
        assert sorted(found) == list(range(50))
        assert qos == OUT_OF_ORDER or found == list(range(50))


def test_53_a_message_that_is_sent_again_is_consumed_once(
    pair: Pair, transport: str, request: pytest.FixtureRequest
) -> None:
    recorder = record(pair.other, "a")
    pair.announce()
    assert pair.other.node is not None
    again = event(7, id="the same")
    with connect(transport, request) as m:
        for _ in range(3):
            m.publish(pair.other.node.names.of("a"), again).result(PATIENCE)
    for qos in (AT_MOST_ONCE, AT_LEAST_ONCE, EXACTLY_ONCE):
        pair.one.publish_event("a", qos, qos=qos)
    sent = {7, AT_MOST_ONCE, AT_LEAST_ONCE, EXACTLY_ONCE}
    eventually(lambda: sent <= {*recorder.values}, "all arrived, in whatever order")
    assert len(recorder.values) == len(sent)


def test_54_a_persistent_event_is_sent_after_a_restart(tmp_path: Path, nodes: Nodes, mosquitto: Any) -> None:
    path = f"{tmp_path}/outbox"
    other = nodes("mqtt5")
    recorder = record(other, "a")
    other.announced().result(PATIENCE)
    assert other.node is not None
    name = other.node.names.prefix
    from messaging.distributedeventing import EventNetwork

    with Proxy(mosquitto.host, mosquitto.port) as proxy:
        url = f"mqtt://127.0.0.1:{proxy.port}"
        with (
            messaging.connect(url, version="5", outbox_path=path) as m,
            DistributedEventAdmin(ServiceRegistry(), m, network=EventNetwork(prefix=name)) as one,
        ):
            one.ready.result(PATIENCE)
            proxy.refuse()
            one.publish_event("a", 1, qos=PERSISTENT)
            one.close(0)
            m.close(0)
        proxy.accept()
        with messaging.connect(url, version="5", outbox_path=path):
            eventually(lambda: recorder.values == [1])


def test_55_a_quality_of_service_that_is_not_kept_is_refused(admins: Admins) -> None:
    admin = admins()
    for qos in (PERSISTENT, "FAST"):
        with pytest.raises(UnsupportedFeatureError, match=qos):
            admin.publish_event("a", 1, qos=qos)
    with pytest.raises(UnsupportedFeatureError):
        admins(qos=PERSISTENT)
    with pytest.raises(ArgumentError, match="exclude"):
        admin.publish_event("a", 1, qos=[IN_ORDER, OUT_OF_ORDER])


def test_57_a_plain_program_is_read_and_reads(pair: Pair, transport: str, request: pytest.FixtureRequest) -> None:
    recorder = record(pair.other, "a", is_whole=True)
    record(pair.other, "b")
    pair.announce()
    assert pair.one.node is not None
    names = pair.one.node.names
    with connect(transport, request) as m, m.subscribe(names.of("b")) as stream:
        stream.ready.result(PATIENCE)
        m.publish(names.of("a"), b'{"event": 1, "data": {"id": 3}}').result(PATIENCE)
        eventually(lambda: len(recorder.values) == 1)
        pair.one.publish_event("b", {"id": 4})
        found = json.loads(stream.receive(PATIENCE).payload)
    assert recorder.values[0].data == {"id": 3}
    assert recorder.values[0].originating_framework is None
    assert (found["event"], found["topic"], found["data"]) == (1, "b", {"id": 4})


def test_58_a_payload_that_cannot_be_serialised_reaches_local_consumers(
    pair: Pair, checked: pytest.LogCaptureFixture
) -> None:
    here, there = record(pair.one, "a"), record(pair.other, "a")
    pair.announce()
    payload = object()
    pair.one.publish_event("a", payload)
    assert logged(checked, "is not sent to other processes")
    with pytest.raises(MessagingError):
        pair.one.publish_event_with_notification("a", payload).result(PATIENCE)
    flush(pair.one)
    assert here.values == [payload, payload]
    assert there.values == []


# --- beyond the scenarios


def test_an_invalid_reply_topic_of_a_plain_program_discards_no_consumer(
    nodes: Nodes, checked: pytest.LogCaptureFixture, request: pytest.FixtureRequest
) -> None:
    node = nodes("memory")
    recorder = record(node, "a", is_whole=True)
    node.announced().result(PATIENCE)
    assert node.node is not None
    with connect("memory", request) as m:
        m.publish(node.node.names.of("a"), b'{"event": 1, "data": 1, "reply": "no topic"}').result(PATIENCE)
        m.publish(node.node.names.of("a"), b'{"event": 1, "data": 2}').result(PATIENCE)
    eventually(lambda: [each.data for each in recorder.values] == [2])
    assert logged(checked, "no topic")


def test_values_survive_both_encodings(nodes: Nodes) -> None:
    senders, other = [nodes("memory", network={"as_cbor": as_cbor}) for as_cbor in (True, False)], nodes("memory")
    recorder = record(other, "a")
    announce(*senders, other)
    value = {"bytes": b"\x00\xff", "list": [1, 2.5, None, "ä"]}
    for each in senders:
        each.publish_event("a", value)
    eventually(lambda: recorder.values == [value, value])


#: publishes five persistent events while the broker is away, and dies when they are stored
_DYING = """
import os, sys
import messaging
from messaging.distributedeventing import DistributableEvent, DistributedEventAdmin, EventNetwork
url, path, prefix = sys.argv[1:]
m = messaging.connect(url, version="5", outbox_path=path)
admin = DistributedEventAdmin(instance=m, network=EventNetwork(prefix=prefix))
admin.ready.result(20)
print("ready", flush=True)
sys.stdin.readline()
session = admin.create_session("a")
promises = [
    admin.publish_event("a", 1, qos="PERSISTENT"),
    admin.publish(DistributableEvent("a", data=2), qos="PERSISTENT"),
    session.publish_event(3, qos="PERSISTENT"),
    session.publish(DistributableEvent("a", data=4), qos="PERSISTENT"),
    admin.publish_event_with_notification("a", 5, qos="PERSISTENT"),
]
for each in promises:
    each.stored.result(20)
os._exit(9)
"""


def test_a_consumer_whose_topics_change_misses_no_event_that_it_wants_before_and_after(pair: Pair) -> None:
    consumer = Consumer()
    registration = consume(pair.other, consumer, "a/b")
    pair.announce()
    stop = threading.Event()
    sent: list[int] = []

    def publish() -> None:
        while not stop.is_set():
            pair.one.publish_event("a/b", len(sent)).result(PATIENCE)
            sent.append(len(sent))

    publishing = threading.Thread(target=publish)
    publishing.start()
    try:
        for topics in ["a/*", "a/b", "a**", ["a/b", "x"], "a/b*", "a/b"] * 3:
            before = len(sent)
            registration.update(named(topics))
            eventually(lambda before=before: len(sent) > before + 3)  # type: ignore[misc]
    finally:
        stop.set()
        publishing.join(PATIENCE)
    eventually(lambda: len(consumer.values) >= len(sent))
    assert consumer.values == sent


class Colour(enum.Enum):
    RED = "crimson"


def test_members_of_enums_cross_as_themselves(nodes: Nodes) -> None:
    """Without a type, which a consumer need not name."""
    one, other = nodes("memory"), nodes("memory")
    consumer, whole = record(other, "a"), record(other, "a", is_whole=True)
    announce(one, other)
    values = [Colour.RED, [Colour.RED], {"colour": {"of": Colour.RED}}, {Colour.RED}]
    for each in values:
        one.publish_event("a", each)
    eventually(lambda: len(consumer.values) == len(whole.values) == len(values))
    assert consumer.values == whole.data == values


def test_a_stored_event_is_sent_after_a_kill(tmp_path: Path, nodes: Nodes, mosquitto: Any) -> None:
    other = nodes("mqtt5")
    recorder = record(other, "a")
    other.announced().result(PATIENCE)
    assert other.node is not None
    with Proxy(mosquitto.host, mosquitto.port) as proxy:
        url, path = f"mqtt://127.0.0.1:{proxy.port}", f"{tmp_path}/outbox"
        arguments = [sys.executable, "-c", _DYING, url, path, other.node.names.prefix]
        with subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
            assert process.stdin is not None
            assert process.stdout is not None
            assert process.stdout.readline() == b"ready\n"
            proxy.refuse()
            process.stdin.write(b"go\n")
            process.stdin.flush()
            assert process.wait(PATIENCE) == 9
        proxy.accept()
        with messaging.connect(url, version="5", outbox_path=path):
            eventually(lambda: sorted(recorder.values) == [1, 2, 3, 4, 5])


def test_publishing_returns_the_promise_of_the_message(
    nodes: Nodes, admin: DistributedEventAdmin, checked: pytest.LogCaptureFixture
) -> None:
    assert admin.publish_event("a", 1).result(PATIENCE) is None
    with pytest.raises(UnsupportedFeatureError):
        admin.publish_event("a", 1).stored.result(PATIENCE)
    one, other = nodes("mqtt5"), nodes("mqtt5")
    recorder = record(other, "a")
    announce(one, other)
    assert one.publish_event("b", "unwanted").result(PATIENCE) is None
    one.publish_event("a", 1).result(PATIENCE)
    eventually(lambda: recorder.values == [1])
    unfit = one.publish_event("a", object())
    assert isinstance(unfit.exception(PATIENCE), InvalidEventError)
    assert unfit.stored is unfit
    assert "its result was never retrieved" not in checked.text


def test_a_consumer_may_end_with_the_promise_of_an_event(admin: DistributedEventAdmin) -> None:
    recorder = record(admin, "b")
    admin.on("a", handler=lambda event: admin.publish_event("b", event.value))
    pending: Promise[None] = Promise("an event that is not confirmed")
    admin.on("a", handler=lambda _: pending)
    for number in (1, 2):
        admin.publish_event("a", number)
    flush(admin)
    flush(admin)
    assert recorder.values == [1, 2]
    assert not admin.problems()


class PausedRegistry(ServiceRegistry):
    """Pauses between the consumers that it is asked for."""

    def __init__(self, pause: Callable[[], object]) -> None:
        super().__init__()
        self._pause = pause

    def find(self, interface: Any = None, filter: Any = None) -> Any:  # noqa: A002
        found = super().find(interface, filter)
        return self._slowly(found) if isinstance(interface, str) else found

    def _slowly(self, found: list[ServiceReference]) -> Iterator[ServiceReference]:
        for each in found:
            yield each
            self._pause()


def test_kept_events_reach_all_consumers_that_were_registered_before_the_admin(
    request: pytest.FixtureRequest, admins: Admins, nodes: Nodes
) -> None:
    network = EventNetwork(prefix=prefix(), heartbeat=3.0, last_will=False)
    other = nodes("mqtt5", network={"prefix": network.prefix})
    channel = f"{network.prefix}/a/b"
    settings: Any = {"client_id": network.prefix, "clean_start": False, "session_expiry": 600}
    with connect("mqtt5", request, **settings) as m, m.subscribe(channel, keep_subscription=True) as stream:
        stream.ready.result(PATIENCE)
    with connect("mqtt5", request) as m:
        m.publish(channel, event(7), qos="1").result(PATIENCE)

    def pause() -> None:
        eventually(other.members)
        for _ in range(20):  # each has the opening admin do what it was asked for before
            other.announced(PATIENCE).result(PATIENCE)

    services = PausedRegistry(pause)
    recorders = [record(services, topics) for topics in ("**", "a/*", "a/b")]
    with connect("mqtt5", request, **settings) as m:
        admin = admins(services, instance=m, network=network)
        for recorder in recorders:
            eventually(lambda recorder=recorder: recorder.values == [7])  # type: ignore[misc]
        admin.close()


def test_a_single_proprietary_quality_of_service_is_one_name(admins: Admins) -> None:
    assert "FAST" in admins(proprietary_qos="FAST").qos
    assert "F" not in admins(proprietary_qos="FAST").qos
    with pytest.raises(ArgumentError):
        admins(proprietary_qos=None)
