"""One member of a network, over ``memory://``."""

from __future__ import annotations

import json
import random
import threading
import time
from typing import Any
from uuid import UUID, uuid4

import pytest

import messaging
from messaging.dispatch import DISTRIBUTED_EVENTS
from messaging.dispatch.eventnetwork import DeliveryNotification, EventNetwork, intake
from messaging.dispatch.eventnetwork.channels import ChannelNames
from messaging.dispatch.eventnetwork.own_member import OwnMember
from messaging.errors import ClosedError, ConnectionLostError, PartialNotificationError
from messaging.model import Incoming
from messaging.services import ServiceRegistry
from messaging.testing.waiting import PATIENCE, Recorder, eventually, subscribed
from tests.dispatch.eventnetwork.conftest import Gate, Join, Participant, Service, resident, wire
from tests.dispatch.eventnetwork.plain import event, update
from tests.dispatch.eventnetwork.test_announcements import mutated
from tests.dispatch.helpers import logged
from tests.doubles.fake import on_loop, settle_loop
from tests.doubles.memory import drop_and_reconnect
from tests.scripts import FORK, run_script
from tests.threads import in_background


def raw(url: str, **options: Any) -> messaging.Messaging:
    return messaging.connect(url, services=ServiceRegistry(), **options)


def beats(heard: Recorder[Any], member: str) -> int:
    """Return how many heartbeats of a member are among recorded announcements."""
    found = [json.loads(payload) for payload in heard.payloads]
    return sum(each["kind"] == "heartbeat" and each["member"] == member for each in found)


def test_members_know_each_other_and_events_go_to_those_that_want_them(join: Join, memory: str) -> None:
    one, two = join(memory, "a/*"), join(memory, "b/**")
    eventually(lambda: one.knows(two, "b/**") and two.knows(one, "a/*"))
    eventually(lambda: one.node.get_dto().is_settled)
    assert one.send("b/x/y", 1) is not None
    assert one.send("c", 2) is None
    eventually(lambda: two.service.values == [1])
    assert one.node.get_dto().unwanted == 1


def test_a_member_that_leaves_is_forgotten_at_once_also_if_its_instance_is_closed_next(join: Join, memory: str) -> None:
    one, two = join(memory, settings={"heartbeat": 60.0}), join(memory, "a", settings={"heartbeat": 60.0})
    eventually(lambda: one.knows(two, "a"))
    two.node.close()
    two.instance.close()
    eventually(lambda: not one.node.get_dto().members)


def test_closing_twice_settles_both_promises_and_all_others(join: Join, memory: str) -> None:
    one, two = join(memory), join(memory, "a")
    eventually(lambda: one.knows(two, "a"))
    two.service.act = lambda _: None  # never confirms
    notification = DeliveryNotification("x", PATIENCE)
    one.send("a", 1, notification)
    announced = one.node.announced(PATIENCE)
    first, second = one.node.close(), one.node.close()
    assert first.result(PATIENCE) is None
    assert second.result(PATIENCE) is None
    assert isinstance(notification.promise.exception(PATIENCE), ClosedError)
    assert announced.exception(PATIENCE) is None or isinstance(announced.exception(), ClosedError)
    assert isinstance(one.node.announced(PATIENCE).exception(PATIENCE), ClosedError)
    assert isinstance(one.node.refresh().exception(PATIENCE), ClosedError)


def test_nothing_is_announced_after_the_end(join: Join, memory: str) -> None:
    one, two = join(memory), join(memory)
    eventually(lambda: one.live() == {two.id})
    gate = Gate()
    one.service.on_interest = lambda: gate(None)  # type: ignore[method-assign]
    two.want("x")  # holds up the control thread of the first member
    settle_loop()
    for _ in range(20):
        one.node.refresh()
        one.node.announced(5)
    join_closing = in_background(one.node.close)
    gate.opened.set()
    join_closing()
    eventually(lambda: one.id not in {each.id for each in two.node.get_dto().members})
    with raw(memory) as listening:
        heard = subscribed(listening, "topics-members/+")
        heard.wait_until(lambda _: beats(heard, two.id) >= 3, "three heartbeats of the other member")
    assert one.id not in {json.loads(payload)["member"] for payload in heard.payloads}


def test_announced_resolves_when_every_other_member_has_read_it(join: Join, memory: str) -> None:
    members = [join(memory) for _ in range(4)]
    eventually(lambda: all(len(each.live()) == 3 for each in members))
    members[0].service.topics = {"a"}
    members[0].node.announced(PATIENCE).result(PATIENCE)
    assert all(each.knows(members[0], "a") for each in members[1:])


def test_announced_counts_members_that_join_meanwhile(join: Join, memory: str) -> None:
    with raw(memory) as other:
        one = join(memory)
        announced = [one.node.announced(PATIENCE)]
        two = Participant(other, (), {})
        announced += [two.node.announced(PATIENCE), one.node.announced(PATIENCE)]
        for each in announced:
            assert each.exception(PATIENCE) is None
        two.node.close().result(PATIENCE)


def test_a_notification_resolves_after_all_and_names_a_member_that_does_not_answer(join: Join, memory: str) -> None:
    one, two, three = join(memory), join(memory, "a"), join(memory, "*")
    eventually(lambda: one.knows(two, "a") and one.knows(three, "*") and one.node.get_dto().is_settled)
    found = DeliveryNotification("x", PATIENCE)
    one.send("a", 1, found)
    assert found.promise.exception(PATIENCE) is None
    three.service.act = lambda _: None
    late = DeliveryNotification("x", 1.5)
    one.send("a", 2, late)
    error = late.promise.exception(PATIENCE)
    assert isinstance(error, PartialNotificationError)
    assert three.id in str(error)
    assert two.id not in str(error)
    leaving = DeliveryNotification("x", PATIENCE)
    one.send("a", 3, leaving)
    three.node.close()
    assert leaving.promise.exception(PATIENCE) is None


def test_a_lost_connection_fails_the_pending_notifications_and_the_members_meet_again(join: Join, memory: str) -> None:
    one, two = join(memory), join(memory, "a")
    eventually(lambda: one.knows(two, "a"))
    two.service.act = lambda _: None
    found = DeliveryNotification("x", PATIENCE)
    one.send("a", 1, found)
    drop_and_reconnect(one.instance)
    assert isinstance(found.promise.exception(PATIENCE), ConnectionLostError)
    one.want("b")
    eventually(lambda: two.knows(one, "b") and one.knows(two, "a") and one.node.get_dto().is_settled)


def test_a_service_that_fails_ends_no_heartbeat(join: Join, memory: str, caplog: pytest.LogCaptureFixture) -> None:
    one, two = join(memory), join(memory)

    def fail(*_: object) -> None:
        raise RuntimeError("boom")

    one.service.on_interest = one.service.member_lost = fail  # type: ignore[method-assign]
    two.want("a")
    join(memory, "b").node.close()
    eventually(lambda: logged(caplog, "the event service failed"))
    with raw(memory) as listening:
        heard = subscribed(listening, "topics-members/+")
        heard.wait_until(lambda _: beats(heard, one.id) >= 3, "three heartbeats")


def test_a_full_outbox_holds_up_neither_the_control_thread_nor_heartbeats(join: Join, memory: str) -> None:
    one = join(memory, outbox_size=3)
    two = join(memory, "a", settings={"heartbeat": 2.0})
    eventually(lambda: one.knows(two, "a") and two.live() == {one.id})
    stop = threading.Event()

    def flood() -> None:
        while not stop.is_set():
            one.send("a", 1)

    joins = [in_background(flood) for _ in range(4)]
    try:
        with raw(memory) as listening:
            heard = subscribed(listening, "topics-members/+")
            heard.wait_until(lambda _: beats(heard, one.id) >= 4, "four heartbeats")
        assert two.service.lost == []
    finally:
        stop.set()
        for each in joins:
            each()


def test_announcements_are_not_kept_for_a_later_run(join: Join, memory: str, tmp_path: Any) -> None:
    one = join(memory, "a", outbox_path=str(tmp_path / "outbox"))
    outbox = one.instance.publisher.outbox
    assert outbox.intake is not None
    assert outbox.intake.admission.pending == 0
    one.want("b")
    assert outbox.intake.admission.pending == 0
    files = [each.read_bytes() for each in (tmp_path / "outbox").rglob("*") if each.is_file()]
    assert not any(b"announcement" in each for each in files)


def test_its_own_events_and_those_that_passed_it_are_not_taken_again(join: Join, memory: str) -> None:
    one = join(memory, "a")
    with raw(memory) as peer:
        other = str(uuid4())
        for fields in ({"sender": one.id}, {"sender": other, "path": (one.id,)}, {"sender": other, "sequence": 7}):
            peer.publish("topics/a", wire("a", 1, **fields)).result(PATIENCE)
        peer.publish("topics/a", wire("a", "end")).result(PATIENCE)
        eventually(lambda: one.service.values == [1, "end"])
    assert one.service.arrived[0].hop.path == (other,)
    assert one.service.arrived[0].hop.id == f"{other}-7"


def test_refused_messages_are_logged_at_most_once_a_second_with_their_number(
    join: Join, memory: str, caplog: pytest.LogCaptureFixture
) -> None:
    one = join(memory, "a", settings={"max_event_bytes": 1_000})
    with raw(memory) as peer:
        begun = time.monotonic()
        for n in range(500):
            peer.publish("topics/a", (b"junk", b"x" * 1_001, event(1, topic="b"), event(1, event=2))[n % 4])
            peer.publish("topics-members/all", b"{}")
        eventually(lambda: one.node.get_dto().refused == 1_000)
        took = time.monotonic() - begun
    assert len(logged(caplog, "is refused")) <= 2 * (took + 1)
    assert one.service.arrived == []


def test_two_thousand_damaged_announcements_and_events_disturb_nobody(
    join: Join, memory: str, caplog: pytest.LogCaptureFixture
) -> None:
    one, two = join(memory, "a"), join(memory)
    eventually(lambda: two.knows(one, "a"))
    random_ = random.Random(9)
    with raw(memory) as peer:
        for n in range(2_000):
            payload = mutated(random_)
            peer.publish("topics-members/all", payload)
            if n % 2:
                payload = wire("a", {"n": [n]}, sender=str(uuid4()), sequence=n, notify=True)
                changed = bytearray(payload)
                changed[random_.randrange(len(changed))] = random_.randrange(256)
                payload = bytes(changed)
            peer.publish("topics/a", payload)
        peer.publish("topics/a", b'{"event":1,"data":' + b"[" * 100_000).result(PATIENCE)
        peer.publish("topics/a", event("end")).result(PATIENCE)
    eventually(lambda: one.service.arrived and one.service.arrived[-1].event.data == "end")
    assert two.knows(one, "a")
    assert not [each for each in logged(caplog) if "Traceback" in each]
    assert logged(caplog, "is refused")


@pytest.mark.slow
def test_two_hundred_thousand_topics_and_five_thousand_members_take_bounded_memory(
    join: Join, memory: str, caplog: pytest.LogCaptureFixture
) -> None:
    one, two = join(memory, "a"), join(memory)
    eventually(lambda: two.knows(one, "a"))
    before = resident()
    with raw(memory) as peer:
        greedy = str(uuid4())
        for n in range(20):
            topics = [f"t{n}/{i}" for i in range(10_000)]
            kind = {"kind": "add", "version": n} if n else {}
            peer.publish("topics-members/all", update(greedy, *topics, heartbeat=5.0, **kind)).result(PATIENCE)
        for n in range(5_000):
            member = str(UUID(int=n))
            found = f'{{"announcement":1,"kind":"heartbeat","member":"{member}","heartbeat":60}}'
            sent = peer.publish("topics-members/all", found.encode())
            if not n % 100:
                sent.result(PATIENCE)
        sent.result(PATIENCE)
        two.send("a", "end")
        eventually(lambda: one.service.values == ["end"], patience=5 * PATIENCE)
        assert len(one.node.get_dto().members) <= 1_000
        assert resident() - before < 256 << 20
    assert len(logged(caplog, "is refused")) < 100
    assert two.id in one.live()


def test_a_forked_child_does_not_speak_for_its_parent() -> None:
    program = """
import os, sys, messaging
from messaging.distributedeventing import DistributedEventAdmin
from messaging.services import ServiceRegistry
from messaging.errors import ClosedError
from messaging.dispatch.eventnetwork import EventNetwork
settings = EventNetwork(heartbeat=60.0)
m, n = (messaging.connect("memory://forked", name=name) for name in "ab")
one, two = (DistributedEventAdmin(ServiceRegistry(), each, network=settings) for each in (m, n))
two.announced(10).result(10); one.announced(10).result(10)
assert len(two.members()) == 1
def work():
    assert isinstance(one.node.refresh().exception(5), ClosedError)
    assert isinstance(one.node.announced(5).exception(5), ClosedError)
    assert one.node.close().exception(5) is None
child(work)
one.announced(10).result(10)
assert len(two.members()) == 1
one.close()
"""
    run_script(FORK + program)


def test_the_interpreter_ends_with_an_open_node() -> None:
    program = """
import sys, messaging
from messaging.distributedeventing import DistributedEventAdmin
m = messaging.connect("memory://open")
admin = DistributedEventAdmin(instance=m)
admin.ready.result(5)
"""
    assert run_script(program).stderr == ""


def test_messages_without_acknowledgement_are_bounded_while_the_service_waits(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(intake, "MAX_UNACKNOWLEDGED", 100)
    gate, settled = Gate(), []
    arrived: list[Any] = []
    names = ChannelNames("topics", DISTRIBUTED_EVENTS)

    def receive(arrival: Any) -> None:
        gate(arrival)
        arrived.append(arrival.event.data)

    service = Service()
    service.act = receive
    own = OwnMember("x", str(uuid4()), None, service, None, EventNetwork(), names, None, None)  # type: ignore[arg-type]
    waiting = intake.NetworkEventIntake(own, settle=settled.extend, confirm=lambda *_: None)
    acknowledged = [Incoming(event(n), "topics/a", token=n) for n in range(200)]
    on_loop(waiting.put, [Incoming(event("loose"), "topics/a") for n in range(1_000)] + acknowledged)
    assert waiting.waiting <= 300
    gate.opened.set()
    eventually(lambda: len(settled) == 300)
    assert arrived == ["loose"] * 100 + [*range(200)]
    assert logged(caplog, "without acknowledgement", "900 dropped")
