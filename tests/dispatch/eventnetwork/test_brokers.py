"""Event networks at real brokers: plain programs, kills, suspended processes, restarts."""

from __future__ import annotations

import json
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final
from uuid import uuid4

import paho.mqtt.client as paho
import pika
import pytest

import messaging
from messaging.dispatch.eventnetwork import DeliveryNotification
from messaging.services import ServiceRegistry
from messaging.testing.brokers import Mosquitto, RabbitMQ
from messaging.testing.waiting import PATIENCE, eventually
from messaging_adapters.mqtt.leftovers import CLAIM_TIMEOUT
from tests.dispatch.eventnetwork.conftest import BEAT, Join, Participant, resident
from tests.dispatch.eventnetwork.plain import event, update
from tests.dispatch.eventnetwork.test_announcements import mutated
from tests.dispatch.helpers import logged
from tests.scripts import ROOT

#: a member in a process of its own: it prints its id, then the values that it receives
PROGRAM: Final = """
import json, sys, messaging
from tests.dispatch.eventnetwork.conftest import Participant
url, topic, settings = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
instance = messaging.connect(url)
member = Participant(instance, (), settings)
member.service.act = lambda arrival: print(json.dumps(arrival.event.value()), flush=True)
member.want(topic)
member.node.announced(10).exception(10)
print(member.id, flush=True)
sys.stdin.readline()
member.node.close()
instance.close()
"""


@contextmanager
def process(url: str, topic: str, **settings: Any) -> Iterator[tuple[subprocess.Popen[str], str]]:
    command = [sys.executable, "-c", PROGRAM, url, topic, json.dumps(settings)]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as started:
        try:
            assert started.stdout is not None
            yield started, started.stdout.readline().strip()
        finally:
            started.kill()


@contextmanager
def mosquitto_sub(broker: Mosquitto, topic: str, count: int) -> Iterator[Callable[[], list[Any]]]:
    """Subscribe with a plain program; it yields a function that returns the messages."""
    command = [
        "stdbuf", "-oL", "mosquitto_sub", "-h", broker.host, "-p", str(broker.port), "-q", "1", "-t", topic,
        "-C", str(count), "-W", "15", "-d",
    ]  # fmt: skip
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as started:
        assert started.stdout is not None
        while "Subscribed" not in started.stdout.readline():
            assert started.poll() is None

        def read() -> list[Any]:
            text, _ = started.communicate(timeout=PATIENCE)
            return [json.loads(line) for line in text.splitlines() if line.startswith("{")]

        try:
            yield read
        finally:
            started.kill()


def mosquitto_pub(broker: Mosquitto, topic: str, payload: bytes) -> None:
    command = ["mosquitto_pub", "-h", broker.host, "-p", str(broker.port), "-q", "1", "-t", topic, "-s"]
    subprocess.run(command, input=payload, check=True, timeout=PATIENCE)


needs_mosquitto_clients = pytest.mark.skipif(
    shutil.which("mosquitto_sub") is None, reason="the clients of mosquitto are not installed"
)


@needs_mosquitto_clients
def test_mosquitto_pub_and_sub_take_part(mosquitto: Mosquitto, join: Join) -> None:
    one = join(mosquitto.url, "plain/*", settings={"prefix": "script"})
    with mosquitto_sub(mosquitto, "script/orders/#", 1) as read:
        mosquitto_pub(mosquitto, "script-members/all", update(str(uuid4()), "orders/**", heartbeat=30.0, name="script"))
        eventually(lambda: [each.name for each in one.node.get_dto().members] == ["script"])
        assert one.send("orders/placed", {"n": 1}) is not None
        (found,) = read()
    assert (found["event"], found["data"], found["sender"]) == (1, {"n": 1}, one.id)
    mosquitto_pub(mosquitto, "script/plain/x", event({"n": 2}))
    eventually(lambda: one.service.values == [{"n": 2}])


@needs_mosquitto_clients
def test_events_that_are_always_sent_reach_a_program_that_announces_nothing(mosquitto: Mosquitto, join: Join) -> None:
    one = join(mosquitto.url, settings={"send_always": "alarms/**", "prefix": "always"})
    eventually(lambda: one.node.get_dto().is_settled)
    with mosquitto_sub(mosquitto, "always/alarms/#", 1) as read:
        assert one.send("other", 1) is None
        assert one.send("alarms/fire", 2) is not None
        assert [each["data"] for each in read()] == [2]


def test_a_killed_process_is_lost_at_once_by_its_last_will(mosquitto: Mosquitto, join: Join) -> None:
    settings = {"heartbeat": 60.0, "prefix": "will"}
    one = join(mosquitto.url, settings=settings)
    with process(mosquitto.url, "a", **settings) as (other, member):
        eventually(lambda: one.live() == {member})
        other.kill()
        eventually(lambda: not one.live(), patience=30.0)  # by half a heartbeat
    eventually(lambda: one.service.lost == [member])


def test_a_killed_process_without_a_will_is_lost_within_two_heartbeats(rabbitmq: RabbitMQ, join: Join) -> None:
    settings = {"heartbeat": 1.0, "linger": 0.5, "prefix": "killed"}
    one = join(rabbitmq.url, settings=settings)
    with process(rabbitmq.url, "a", **settings) as (other, member):
        eventually(lambda: one.live() == {member})
        other.kill()
        eventually(lambda: not one.live())  # the connection is given up after a minute
    eventually(lambda: not one.node.get_dto().members)


@pytest.mark.parametrize("name", ["mosquitto", "rabbitmq"])
def test_a_suspended_process_misses_no_event(name: str, request: pytest.FixtureRequest, join: Join) -> None:
    broker = request.getfixturevalue(name)
    settings = {"heartbeat": 0.5, "linger": 60.0, "prefix": "suspended"}
    one = join(broker.url, settings=settings)
    with process(broker.url, "a", **settings) as (other, member):
        assert other.stdout is not None
        eventually(lambda: one.live() == {member})
        other.send_signal(signal.SIGSTOP)
        eventually(lambda: not one.live())
        for n in range(50):
            one.send("a", n).result(PATIENCE)
        other.send_signal(signal.SIGCONT)
        assert [json.loads(other.stdout.readline()) for _ in range(50)] == [*range(50)]
        eventually(lambda: one.live() == {member})


def test_members_meet_again_after_a_restart_of_the_broker(join: Join) -> None:
    with Mosquitto() as broker:
        one, two = join(broker.url, "a"), join(broker.url, "b")
        eventually(lambda: one.knows(two, "b") and two.knows(one, "a"))
        broker.kill()
        eventually(lambda: not one.node.get_dto().is_connected)
        two.service.topics = {"c"}
        changed = two.node.refresh()
        broker.start()
        assert changed.exception(PATIENCE) is None
        eventually(lambda: one.knows(two, "c") and two.knows(one, "a") and one.node.get_dto().is_settled)
        found = DeliveryNotification("x", PATIENCE)
        one.send("c", 1, found)
        assert found.promise.exception(PATIENCE) is None
        assert two.service.values == [1]


def queues(broker: RabbitMQ) -> list[str]:
    return broker.ctl("list_queues", "name", "--silent").split()


def test_each_member_has_one_queue_and_leaves_none(rabbitmq: RabbitMQ, join: Join) -> None:
    before = len(queues(rabbitmq))
    members = [join(rabbitmq.url, f"a{n}/*", "b", "c/**", settings={"prefix": "queues"}) for n in range(2)]
    eventually(lambda: members[0].knows(members[1], "a1/*", "b", "c/**"))
    assert len(queues(rabbitmq)) == before + 2
    for each in members:
        assert each.node.close().exception(PATIENCE) is None
    eventually(lambda: len(queues(rabbitmq)) == before)


def test_members_meet_again_after_their_connections_were_killed(rabbitmq: RabbitMQ, join: Join) -> None:
    one, two = (join(rabbitmq.url, topic, settings={"prefix": "cut"}) for topic in "ab")
    eventually(lambda: one.knows(two, "b") and two.knows(one, "a"))
    rabbitmq.ctl("close_all_connections", "test")
    eventually(lambda: not one.node.get_dto().is_connected or not one.node.get_dto().is_settled)
    eventually(lambda: one.knows(two, "b") and two.knows(one, "a") and one.node.get_dto().is_settled)
    eventually(lambda: two.node.get_dto().is_settled)
    found = DeliveryNotification("x", PATIENCE)
    one.send("b", 1, found)
    assert found.promise.exception(PATIENCE) is None


def test_pika_takes_part(rabbitmq: RabbitMQ, join: Join) -> None:
    one = join(rabbitmq.url, "plain/*", settings={"prefix": "pika"})
    connection = pika.BlockingConnection(pika.URLParameters(rabbitmq.url))
    try:
        channel = connection.channel()
        queue = channel.queue_declare("", exclusive=True).method.queue
        channel.queue_bind(queue, "amq.topic", "pika.orders.#")
        channel.basic_publish("amq.topic", "pika-members.all", update(None, "orders/**", heartbeat=30.0, name="pika"))
        eventually(lambda: [each.name for each in one.node.get_dto().members] == ["pika"])
        assert one.send("orders/placed", {"n": 1}) is not None
        found: list[bytes] = []

        def arrived() -> bool:
            connection.process_data_events(0)
            body = channel.basic_get(queue, auto_ack=True)[2]
            if body is not None:
                found.append(body)
            return bool(found)

        eventually(arrived)
        assert json.loads(found[0])["data"] == {"n": 1}
        channel.basic_publish("amq.topic", "pika.plain.x", event({"n": 2}))
        eventually(lambda: one.service.values == [{"n": 2}])
    finally:
        connection.close()


@pytest.mark.parametrize("name", ["mosquitto", "rabbitmq"])
def test_a_peer_that_sends_junk_delays_the_others_little(name: str, request: pytest.FixtureRequest, join: Join) -> None:
    broker = request.getfixturevalue(name)
    one, two = (join(broker.url, topic, settings={"prefix": "junk", "heartbeat": 1.0}) for topic in "ab")
    eventually(lambda: one.knows(two, "b") and two.knows(one, "a"))
    with messaging.connect(broker.url, services=ServiceRegistry()) as peer:
        for n in range(2_000):
            sent = peer.publish("junk-members/all", b"{" * (n % 500)), peer.publish("junk/b", b"[" * (n % 500))
        found = DeliveryNotification("x", PATIENCE)
        one.send("b", 1, found)
        assert found.promise.exception(PATIENCE) is None
        for each in sent:
            each.result(PATIENCE)
    eventually(lambda: two.node.get_dto().refused >= 4_000)
    assert one.live() == {two.id}


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", ["mosquitto", "rabbitmq"])
def test_a_peer_that_announces_a_million_topics_and_damaged_messages_takes_bounded_memory(
    name: str, request: pytest.FixtureRequest, join: Join, caplog: pytest.LogCaptureFixture
) -> None:
    broker = request.getfixturevalue(name)
    one, two = (join(broker.url, topic, settings={"prefix": "greedy", "heartbeat": 5.0}) for topic in "ab")
    eventually(lambda: one.knows(two, "b") and two.knows(one, "a"))
    before = resident()
    random_ = random.Random(name)
    greedy = str(uuid4())
    with messaging.connect(broker.url, services=ServiceRegistry()) as peer:
        for n in range(100):
            kind = {"kind": "add", "version": n} if n else {}
            topics = update(greedy, *(f"t{n}/{i}" for i in range(10_000)), heartbeat=60.0, **kind)
            peer.publish("greedy-members/all", topics, qos="1").result(PATIENCE)
            for _ in range(20):
                peer.publish("greedy-members/all", mutated(random_), qos="1")
                payload = bytearray(event({"n": [n]}, sender=greedy, sequence=n, notify=True))
                payload[random_.randrange(len(payload))] = random_.randrange(256)
                sent = peer.publish("greedy/b", bytes(payload), qos="1")
            sent.result(PATIENCE)
    one.send("b", "end")
    eventually(lambda: two.service.arrived and two.service.arrived[-1].event.data == "end", patience=10 * PATIENCE)
    assert resident() - before < 256 << 20
    assert {one.id, two.id} <= one.live() | two.live()
    (found,) = (each for each in one.node.get_dto().members if each.id == greedy)
    assert len(found.interests) <= 10_000
    assert not [each for each in logged(caplog) if "Traceback" in each]


def bindings(broker: RabbitMQ, queue: str) -> set[str]:
    """The binding keys of a queue."""
    lines = broker.ctl("list_bindings", "destination_name", "routing_key", "--silent").splitlines()
    return {line.split()[1] for line in lines if line.startswith(f"{queue}\t")}


def is_subscribed(broker: Mosquitto, channel: str) -> bool:
    """Whether a subscription to exactly this channel is left at the broker."""
    reasons: list[Any] = []
    client = paho.Client(paho.CallbackAPIVersion.VERSION2, protocol=paho.MQTTv5)
    client.on_connect = lambda *_: client.publish(channel, b"{}", qos=1)
    client.on_publish = lambda _, __, ___, reason, ____: reasons.append(reason)
    client.connect(broker.host, broker.port)
    client.loop_start()
    try:
        eventually(lambda: reasons)
    finally:
        client.disconnect()
        client.loop_stop()
    return str(reasons[0]) != "No matching subscribers"


@contextmanager
def killed_and_back(
    one: Participant, url: str, prefix: str, settings: dict[str, Any], away: Callable[[str], object]
) -> Iterator[None]:
    """Kill a member that keeps its events, call ``away`` with its id, and start it again: it misses nothing."""
    begin = time.monotonic()
    with process(url, "kept/*", **settings) as (killed, dead):
        eventually(lambda: any(each.id == dead and each.interests for each in one.node.get_dto().members))
        undisturbed = time.monotonic() - begin
        killed.kill()
    eventually(lambda: all(each.is_lost for each in one.node.get_dto().members))
    away(f"{prefix}-members/{dead}")
    for n in range(30):
        one.send("kept/x", n).result(PATIENCE)
    begin = time.monotonic()
    with process(url, "kept/*", **settings) as (started, first):
        assert started.stdout is not None
        lines = [first, *(started.stdout.readline().strip() for _ in range(30))]
        assert [int(each) for each in lines if each.isdigit()] == [*range(30)]
        assert time.monotonic() - begin < 2 * undisturbed + CLAIM_TIMEOUT / 2
        yield


def test_the_channel_of_a_killed_run_delays_its_next_one_by_nothing_and_is_left(
    mosquitto: Mosquitto, join: Join
) -> None:
    """Its session keeps what arrives for a member that will never be back: more than the broker's window."""
    settings: dict[str, Any] = {"prefix": "killed", "heartbeat": BEAT, "linger": 60.0}
    url = f"{mosquitto.url}?version=5&client_id=killed&clean_start=false&session_expiry=600"
    one = join(mosquitto.url, settings=settings)
    left: list[str] = []

    def away(channel: str) -> None:
        left.append(channel)
        assert is_subscribed(mosquitto, channel)
        for promise in [one.instance.publish(channel, b"{}", qos="1") for _ in range(100)]:
            promise.result(PATIENCE)

    with killed_and_back(one, url, "killed", settings | {"last_will": False}, away):
        eventually(lambda: not is_subscribed(mosquitto, left[0]))


def test_a_queue_has_the_same_bindings_after_a_kill(rabbitmq: RabbitMQ, join: Join) -> None:
    settings: dict[str, Any] = {"prefix": "killed", "heartbeat": BEAT, "linger": 60.0}
    queue = f"killed-{uuid4().hex}"
    one = join(rabbitmq.url, settings=settings)
    before: list[set[str]] = []
    with killed_and_back(
        one, rabbitmq.url, "killed", settings | {"queue": queue}, lambda _: before.append(bindings(rabbitmq, queue))
    ):
        eventually(lambda: any(each.interests and not each.is_lost for each in one.node.get_dto().members))
        assert bindings(rabbitmq, queue) == before[0]
        assert len(before[0]) == 4  # its own name, all members, its inbox, and its topic


def test_announcements_to_a_member_with_a_queue_reach_its_inbox(rabbitmq: RabbitMQ, join: Join) -> None:
    settings: dict[str, Any] = {"prefix": "inbox"}
    join(rabbitmq.url, settings=settings)
    two = join(rabbitmq.url, settings=settings | {"queue": f"inbox-{uuid4().hex}"})
    eventually(lambda: two.node.get_dto().members)
    assert two.node.announced(PATIENCE).exception(PATIENCE) is None
