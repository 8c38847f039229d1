"""The simulated MQTT broker under virtual time, stopped, killed and started, and with faults."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.simulation.brokers.fake_host import FakeHost, FakePeer
from tests.simulation.brokers.host import Broker, Connection
from tests.simulation.brokers.mqtt import MqttBroker, MqttFaults
from tests.simulation.brokers.mqtt.packets import (
    PINGREQ_BYTES,
    PINGRESP,
    PUBACK,
    PUBCOMP,
    PUBREC,
    PUBREL,
    V5,
    V311,
    Ack,
    Connack,
    Connect,
    Ping,
    Publish,
    Request,
    Subscribe,
    Will,
    encode,
)
from tests.simulation.brokers.mqtt.properties import Property
from tests.simulation.brokers.mqtt.session import NEVER
from tests.simulation.brokers.mqtt.worlds import Client, World, both_versions, disconnect_reason


def test_the_network_needs_nothing_but_the_protocols_of_the_host() -> None:
    peer = FakePeer()
    broker: Broker = MqttBroker(FakeHost())
    connection: Connection = broker.accept(peer)
    connection.received(encode(Connect("c", V311), V311))
    assert peer.take() == encode(Connack(False, 0), V311)
    connection.lost()
    connection.received(PINGREQ_BYTES)
    assert peer.take() == b""
    broker.kill()
    broker.start()
    broker.stop()


# Time.


def test_a_session_expires_after_its_interval_and_not_before() -> None:
    world = World()
    client = world.connect("c", expiry=10)
    client.subscribe("t", qos=1)
    client.drop()
    world.host.advance(9.9)
    world.connect("p").publish("t", b"m", 1)
    client = world.connect("c", is_clean=False, expiry=10)
    assert client.connack.session_present
    assert client.payloads() == [b"m"]
    world.host.advance(100)
    client.drop()
    world.host.advance(10)
    assert list(world.broker.sessions) == ["p"]
    assert world.broker.counters.expired_sessions == 1
    assert world.dropped == [("session ended", "c", b"m")]
    assert world.broker.router.receivers("t") == ()


def test_disconnect_changes_the_expiry_interval() -> None:
    world = World()
    world.connect("short", expiry=1000).leave(properties={Property.SESSION_EXPIRY: 5})
    world.connect("none", expiry=1000).leave(properties={Property.SESSION_EXPIRY: 0})
    world.connect("forever", expiry=NEVER).leave()
    world.connect("311", V311, is_clean=False).leave()
    assert list(world.broker.sessions) == ["short", "forever", "311"]
    world.host.advance(5)
    assert list(world.broker.sessions) == ["forever", "311"]
    world.host.advance(1e9)
    assert list(world.broker.sessions) == ["forever", "311"]
    assert world.host.pending == 0


def with_will(world: World, delay: int = 0, **fields: Any) -> tuple[Client, Client]:
    """Return a client with a will, and one that is subscribed to it."""
    watcher = world.connect("watcher")
    watcher.subscribe("will")
    properties: dict[int, Any] = {Property.WILL_DELAY: delay} if delay else {}
    return world.connect("c", will=Will("will", b"gone", 0, False, properties), **fields), watcher


def test_a_will_is_published_after_its_delay() -> None:
    world = World()
    client, watcher = with_will(world, 10, expiry=100)
    client.drop()
    world.host.advance(9.9)
    assert watcher.payloads() == []
    world.host.advance(0.1)
    assert watcher.payloads() == [b"gone"]
    assert world.broker.counters.wills == 1


def test_a_return_in_time_cancels_a_will() -> None:
    world = World()
    client, watcher = with_will(world, 10, expiry=100)
    client.drop()
    world.host.advance(9)
    world.connect("c", is_clean=False, expiry=100)
    world.host.advance(100)
    assert watcher.payloads() == []


@pytest.mark.parametrize("ends_by", ["expiry", "clean start"])
def test_a_will_is_published_when_its_session_ends_before_the_delay(ends_by: str) -> None:
    world = World()
    client, watcher = with_will(world, 1000, expiry=10)
    client.drop()
    if ends_by == "expiry":
        world.host.advance(10)
    else:
        world.connect("c")
    assert watcher.payloads() == [b"gone"]


@pytest.mark.parametrize(("reason", "expected"), [(0, []), (4, [b"gone"]), (0x80, [b"gone"])])
def test_disconnect_decides_about_the_will(reason: int, expected: list[bytes]) -> None:
    client, watcher = with_will(World())
    client.leave(reason)
    assert watcher.payloads() == expected


@pytest.mark.parametrize(("at_takeover", "expected"), [(False, []), (True, [b"gone"])])
def test_the_will_at_a_takeover_is_a_choice(at_takeover: bool, expected: list[bytes]) -> None:
    world = World(will_at_takeover=at_takeover)
    _, watcher = with_will(world, expiry=10)
    world.resume("c")
    assert watcher.payloads() == expected


@both_versions
def test_a_silent_client_is_disconnected_after_one_and_a_half_keep_alives(version: int) -> None:
    world = World()
    client = world.connect("c", version, keep_alive=10)
    world.host.advance(14)
    client.connection.received(PINGREQ_BYTES)
    world.host.advance(14.9)
    assert client.take() == [Ping(PINGRESP)]
    assert not client.peer.ended
    world.host.advance(0.2)
    if version == V5:
        assert disconnect_reason(client) == 0x8D
    assert client.peer.closed
    assert world.broker.counters.timeouts == 1
    assert world.host.pending == 0


def test_a_connection_without_connect_is_closed() -> None:
    world = World(connect_timeout=20)
    client = world.open()
    client.connection.received(b"\x10")
    world.host.advance(20)
    assert client.peer.closed
    assert world.broker.describe()["connections"] == []


def test_the_expiry_interval_of_a_message_counts_down_while_it_waits() -> None:
    world = World()
    world.resume("c").subscribe("t", qos=1)
    world.resume("c").drop()
    publisher = world.connect("p")
    for payload, expiry in ((b"short", 10), (b"long", 20)):
        publisher.publish("t", payload, 1, retain=True, properties={Property.MESSAGE_EXPIRY: expiry})
    world.host.advance(12.5)
    (message,) = world.resume("c").messages()
    assert (message.payload, message.properties) == (b"long", {Property.MESSAGE_EXPIRY: 8})
    assert world.dropped == [("expired", "c", b"short")]
    late = world.connect("late")
    late.subscribe("t")
    assert [each.properties[Property.MESSAGE_EXPIRY] for each in late.messages()] == [8]
    world.host.advance(7.5)
    late.subscribe("t")
    assert late.messages() == []
    assert world.broker.describe()["retained"] == {}


# Stopping, killing and starting.


def test_a_stopped_broker_keeps_what_is_to_be_kept() -> None:
    world = World(autosave="at stop only")
    away, present, clean = world.resume("away"), world.resume("present"), world.connect("clean")
    for client in (away, present, clean):
        client.subscribe("t", qos=1)
    away.drop()
    publisher = world.resume("p")
    publisher.publish("t", b"m", 1, retain=True)
    assert publisher.publish("t", b"open", 2, 9) == [Ack(PUBREC, 9)]
    world.broker.stop()
    assert [disconnect_reason(each) for each in (present, clean, publisher)] == [0x8B] * 3
    assert world.broker.describe() == {"sessions": {}, "connections": [], "retained": {}}
    assert world.host.pending == 0
    world.broker.start()
    assert list(world.broker.sessions) == ["away", "present", "p"]
    (sent,) = world.resume("away").messages()
    (again,) = world.resume("present").messages()
    assert (sent.payload, sent.duplicate, again.payload, again.duplicate) == (b"m", False, b"m", True)
    late = world.connect("late")
    late.subscribe("t")
    assert late.payloads() == [b"m"]
    world.resume("p").send(Ack(PUBREL, 9))
    assert late.payloads() == [b"open"]


@both_versions
def test_a_killed_broker_that_saves_every_change_loses_nothing_of_a_session(version: int) -> None:
    world = World()
    client, publisher = world.resume("c", version), world.resume("p", version)
    world.connect("clean", version)
    client.subscribe("t")
    assert publisher.publish("t", b"1", 1, 1) == [Ack(PUBACK, 1)]
    assert publisher.publish("t", b"2", 2, 2) == [Ack(PUBREC, 2)]
    (first,) = client.messages()
    world.broker.kill()
    assert client.peer.aborted
    world.broker.start()
    assert list(world.broker.sessions) == ["c", "p"]
    publisher = world.resume("p", version)
    publisher.send(Publish("t", b"2", 2, duplicate=True, packet_id=2), Ack(PUBREL, 2), Ack(PUBREL, 2))
    assert publisher.take() == [Ack(PUBREC, 2), Ack(PUBCOMP, 2), Ack(PUBCOMP, 2)]
    client = world.resume("c", version)
    again, second = client.messages()
    assert (again.packet_id, again.duplicate, again.payload) == (first.packet_id, True, b"1")
    assert second.packet_id != again.packet_id
    client.send(Ack(PUBACK, again.packet_id), Ack(PUBREC, second.packet_id))
    assert client.take() == [Ack(PUBREL, second.packet_id)]
    world.broker.kill()
    world.broker.start()
    client = world.resume("c", version)
    assert client.take() == [Ack(PUBREL, second.packet_id)]
    client.send(Ack(PUBCOMP, second.packet_id))
    assert world.broker.describe()["sessions"]["c"]["inflight"] == 0
    assert world.dropped == []


def test_a_kill_goes_back_to_the_last_save() -> None:
    world = World(autosave="at stop only")
    world.resume("c").subscribe("t", qos=1)
    world.broker.stop()
    world.broker.start()
    client, publisher = world.resume("c"), world.connect("p")
    publisher.publish("t", b"m", 1, retain=True)
    client.subscribe("other")
    assert client.payloads() == []
    world.broker.kill()
    world.broker.start()
    described = world.broker.describe()
    assert described["sessions"]["c"]["subscriptions"] == {"t": 1}
    assert (described["sessions"]["c"]["inflight"], described["retained"]) == (0, {})


def test_saves_happen_at_multiples_of_the_interval_if_something_has_changed() -> None:
    world = World(autosave=30.0)
    world.host.advance(100)
    assert (world.broker.counters.saves, world.host.pending) == (0, 0)
    world.resume("c").subscribe("t", qos=1)  # at 100 s, to be saved at 120 s
    world.host.advance(19)
    publisher = world.connect("p")
    publisher.publish("t", b"saved", 1)
    world.host.advance(2)
    publisher.publish("t", b"lost", 1)
    assert world.broker.counters.saves == 1
    world.broker.kill()
    world.broker.start()
    assert world.resume("c").payloads() == [b"saved"]
    world.host.advance(100)
    assert world.broker.counters.saves == 2


def test_expiry_intervals_go_on_while_the_broker_is_down() -> None:
    world = World()
    world.connect("away", expiry=10).drop()
    world.connect("present", expiry=10)
    world.host.advance(4)
    world.broker.kill()
    world.host.advance(4)
    world.broker.start()
    world.host.advance(2)
    assert list(world.broker.sessions) == ["present"]  # its interval began when the broker started
    world.host.advance(8)
    assert list(world.broker.sessions) == []


def test_wills_are_published_by_a_stop_and_forgotten_by_a_kill() -> None:
    for end, expected in ((MqttBroker.stop, [b"gone"]), (MqttBroker.kill, [])):
        world = World()
        world.resume("watcher").subscribe("will", qos=1)
        world.resume("watcher").drop()
        world.connect("c", expiry=100, will=Will("will", b"gone", 1, False, {Property.WILL_DELAY: 50}))
        end(world.broker)
        world.broker.start()
        world.host.advance(1000)
        assert world.resume("watcher").payloads() == expected


def test_a_broker_that_does_not_run_resets_connections() -> None:
    world = World()
    world.broker.kill()
    client = world.open()
    assert client.peer.aborted
    client.send(Connect("c"))
    assert client.take() == []
    world.broker.start()
    world.connect("c")


# Faults.


def test_late_acknowledgements_keep_their_order() -> None:
    world = World(seed=3, max_inflight=100, faults=MqttFaults(ack_delay=0.5, ack_delay_limit=2.0))
    client = world.connect("c")
    client.send(Subscribe(99, [Request("t", 1)]))
    for packet_id in range(1, 31):
        client.send(Publish("t", b"", 1 + packet_id % 2, packet_id=packet_id))
    at_once = len(client.take())
    world.host.advance(2.0)
    late = [packet for packet in client.take() if isinstance(packet, Ack)]
    assert 0 < len(late) <= 30
    assert at_once + len(late) >= 30
    for kind in (PUBACK, PUBREC):
        ids = [packet.packet_id for packet in late if packet.kind == kind]
        assert ids == sorted(ids)
        assert ids
    assert world.broker.counters.faults["ack_delay"] > 0
    world.host.advance(100)
    assert client.messages() == []
    client.send(Publish("t", b"", 1, packet_id=50))
    client.drop()
    world.host.advance(10)  # a late answer is not sent any more: the peer would complain


@pytest.mark.parametrize(("fault", "has_effect"), [("close_before", False), ("close_after", True)])
@pytest.mark.parametrize(("reset_share", "end"), [(0.0, "closed"), (1.0, "aborted")])
@both_versions
def test_connections_are_closed_instead_of_an_answer(
    fault: str, has_effect: bool, reset_share: float, end: str, version: int
) -> None:
    world = World()
    publisher = world.resume("p", version)
    world.faults.reset_share = reset_share
    setattr(world.faults, fault, 1.0)
    assert publisher.publish("t", b"m", 1) == []
    assert getattr(publisher.peer, end)
    assert len(world.accepted) == has_effect
    again = world.open(version)
    again.send(Connect("q", version))
    assert (again.take(), again.peer.ended) == ([], True)
    setattr(world.faults, fault, 0.0)
    publisher = world.resume("p", version)
    publisher.publish("t", b"2", 2)
    setattr(world.faults, fault, 1.0)
    publisher.send(Ack(PUBREL, 1))
    assert (publisher.take(), publisher.peer.ended) == ([], True)
    assert len(world.accepted) == 2 * has_effect
    setattr(world.faults, fault, 0.0)
    publisher = world.resume("p", version)
    publisher.send(Ack(PUBREL, 1))
    assert publisher.take() == [Ack(PUBCOMP, 1)]
    assert len(world.accepted) == 1 + has_effect
    setattr(world.faults, fault, 1.0)
    publisher.send(Subscribe(1, [Request("t")]))
    assert (publisher.take(), publisher.peer.ended) == ([], True)
    assert (world.broker.describe()["sessions"]["p"]["subscriptions"] == {"t": 0}) == has_effect


def test_publications_are_refused_without_effect() -> None:
    world = World(max_inflight=2, faults=MqttFaults(refuse_publish=1.0))
    client = world.connect("c")
    answers = [client.publish("t", b"", 1 + number % 2, 1 + number) for number in range(20)]
    assert not client.peer.ended  # refused messages do not count against the receive maximum
    reasons = {(answer.kind, answer.reason): None for (answer,) in answers if isinstance(answer, Ack)}
    assert sorted(reasons) == [(PUBACK, 0x80), (PUBACK, 0x97), (PUBREC, 0x80), (PUBREC, 0x97)]
    assert world.accepted == []
    old = world.connect("old", V311)
    assert old.publish("t", b"", 1) == [Ack(PUBACK, 1)]  # it cannot be told
    assert len(world.accepted) == 1


def test_subscriptions_are_refused_or_downgraded() -> None:
    world = World(faults=MqttFaults(refuse_subscribe=1.0))
    assert world.connect("old", V311).subscribe("a", "b") == [0x80, 0x80]
    found = world.connect("c").subscribe(*(f"t{number}" for number in range(20)))
    assert sorted(dict.fromkeys(found)) == [0x80, 0x87]
    assert world.broker.describe()["sessions"]["c"]["subscriptions"] == {}
    world.faults.refuse_subscribe, world.faults.downgrade = 0.0, 1.0
    client = world.connect("c")
    granted = client.subscribe(*(f"t{number}" for number in range(20)))
    assert sorted(dict.fromkeys(granted)) == [0, 1]
    assert list(world.broker.describe()["sessions"]["c"]["subscriptions"].values()) == granted


@pytest.mark.parametrize(("version", "code"), [(V311, 3), (V5, 0x89)])
def test_a_busy_broker_refuses_connections(version: int, code: int) -> None:
    world = World(faults=MqttFaults(busy=1.0))
    client = world.open(version)
    client.send(Connect("c", version))
    assert client.take() == [Connack(False, code)]
    assert client.peer.closed
    assert world.broker.describe()["sessions"] == {}
    assert world.host.pending == 0


def test_slow_deliveries_keep_their_order_and_end_with_the_connection() -> None:
    world = World(seed=1, faults=MqttFaults(slow_delivery=0.9, slow_delivery_limit=1.0))
    client = world.resume("c")
    client.subscribe("t", qos=1)
    publisher = world.connect("p")
    for number in range(10):
        publisher.publish("t", b"%d" % number, number % 2)
    assert len(client.payloads()) < 10
    world.faults.slow_delivery = 1.0
    world.host.advance(10)
    world.faults.slow_delivery = 0.0
    client.drop()
    client = world.resume("c")
    kept = client.payloads()
    assert kept == [b"1", b"3", b"5", b"7", b"9"]
    world.faults.slow_delivery = 1.0
    publisher.publish("t", b"zero", 0)
    publisher.publish("t", b"one", 1)
    assert client.payloads() == []
    client.drop()
    assert world.dropped[-1] == ("offline", "c", b"zero")
    assert world.broker.describe()["sessions"]["c"]["queued"] == 1


def test_every_slow_delivery_arrives_in_the_end() -> None:
    world = World(faults=MqttFaults(slow_delivery=1.0, slow_delivery_limit=1.0))
    client = world.connect("c")
    client.subscribe("t")
    publisher = world.connect("p")
    for number in range(10):
        publisher.publish("t", b"%d" % number)
    world.host.advance(10)
    assert client.payloads() == [b"%d" % number for number in range(10)]


def test_clients_of_5_are_disconnected_with_a_reason() -> None:
    world = World(faults=MqttFaults(disconnect=1.0, disconnect_reasons=(0x98,)))
    client = world.connect("c")
    client.send(Publish("t", b"", 1, packet_id=1))
    assert disconnect_reason(client) == 0x98
    assert world.accepted == []


def test_the_owner_can_end_a_connection() -> None:
    world = World()
    told, closed, reset = (world.connect(each) for each in ("told", "closed", "reset"))
    assert world.broker.drop_connection("told", 0x98)
    assert world.broker.drop_connection("closed")
    assert world.broker.drop_connection("reset", is_reset=True)
    assert not world.broker.drop_connection("reset")
    assert disconnect_reason(told) == 0x98
    assert (closed.peer.closed, reset.peer.aborted, closed.take(), reset.take()) == (True, True, [], [])


# The whole.


def random_run(seed: int) -> tuple[list[str], bytes, dict[str, Any]]:
    """Return notes, bytes and state of a world with every fault, driven by a client that goes on and on."""
    faults = MqttFaults(0.3, 1.0, 0.05, 0.05, 0.5, 0.1, (0x97, 0x80), 0.1, (0x80, 0x87), 0.1, 0.1, 0.2, 1.0, 0.02)
    world = World(seed, faults, autosave=3.0)
    sent = bytearray()
    clients: dict[str, Client] = {}
    for step in range(400):
        client_id = f"c{step % 3}"
        client = clients.get(client_id)
        if client is None or client.peer.ended:
            client = clients[client_id] = world.open()
            client.send(Connect(client_id, V5, False, 10, properties={Property.SESSION_EXPIRY: 20}))
            client.send(Subscribe(1, [Request("t/#", 2), Request("$share/g/t", 1)]))
        client.send(Publish("t", b"%d" % step, step % 3, step % 7 == 0, packet_id=step + 2 if step % 3 else 0))
        sent += client.peer.take()
        world.host.advance(0.3)
        if step % 90 == 89:
            world.broker.kill()
            world.host.advance(1)
            world.broker.start()
    return world.host.notes, bytes(sent), world.broker.describe()


def test_the_same_seed_gives_the_same_history() -> None:
    assert random_run(5) == random_run(5)
    assert random_run(5) != random_run(6)


def test_the_history_does_not_depend_on_hashing() -> None:
    command = f"from {__name__} import random_run; print(random_run(5))"
    histories = [
        subprocess.run(
            [sys.executable, "-c", command],
            cwd=Path(__file__).parents[2],
            env={**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": os.pathsep.join(sys.path)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for hash_seed in ("1", "2")
    ]
    assert histories[0] == histories[1] == f"{random_run(5)}\n"


def test_nothing_is_left_when_all_clients_have_gone() -> None:
    world = World()
    clients = [world.connect(f"c{number}", expiry=number, keep_alive=60) for number in range(3)]
    for client in clients:
        client.subscribe("a/+", "$share/g/#", "b")
        client.publish("a/b", b"x", 1)
    for client in clients:
        client.leave()
    world.host.advance(2)
    assert world.broker.describe() == {"sessions": {}, "connections": [], "retained": {}}
    assert world.broker.router.receivers("a/b") == ()
    assert world.host.pending == 0
