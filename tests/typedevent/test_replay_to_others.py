"""Past events of other processes: requested, answered, merged, bounded; over memory, MQTT and AMQP."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import pytest

import messaging
from messaging.dispatch.eventdata import WireEvent, decode, encode
from messaging.dispatch.eventnetwork import ArrivedEvent, EventNetwork, EventNode
from messaging.errors import ArgumentError, MessagingError, PartialNotificationError
from messaging.services import ServiceRegistry
from messaging.testing.brokers import Mosquitto
from messaging.testing.tables import table
from messaging.testing.waiting import PATIENCE, Recorder, eventually, subscribed
from messaging.typedevent import (
    BusConnection,
    DurableHistory,
    MonitorEvent,
    RangePolicy,
    TopicPermission,
    TopicPolicy,
    TypedEventBus,
)
from tests.dispatch.helpers import renewed
from tests.doubles.fake import on_loop
from tests.doubles.memory import broker_of

NETWORK = EventNetwork(heartbeat=0.5)
KEPT = {"*": RangePolicy.at_most(10_000)}


class Events(Recorder[MonitorEvent]):
    """The events of a replay or of a monitor."""

    @property
    def numbers(self) -> list[int]:
        return [each.event_data["n"] for each in self]


class Numbers(Recorder[int]):
    """A handler that records the numbers of its events."""

    def __call__(self, event: dict[str, Any]) -> None:
        self.append(event["n"])


def started(connection: BusConnection, history: Any = 10_000, topics: Any = "*", **options: Any) -> Events:
    found = Events()
    connection.replay(topics, history, **options).subscribe(found)
    return found


def replayed(connection: BusConnection, history: Any = 10_000, topics: Any = "*", **options: Any) -> Events:
    """Return what a replay emitted, once it has ended."""
    found = started(connection, history, topics, **options)
    found.wait_ended()
    return found


def past(bus: TypedEventBus, count: int = 100) -> Events:
    """Return the newest events of the history of a bus."""
    found = Events()
    bus.monitor.monitor_events(count, history_only=True).subscribe(found)
    found.wait_completed()
    return found


class Plant:
    """Buses with an instance each, on one broker."""

    def __init__(self, url: str, stack: ExitStack) -> None:
        self.url = url
        self.stack = stack
        self.instances: list[messaging.Messaging] = []

    def instance(self) -> messaging.Messaging:
        self.instances.append(self.stack.enter_context(messaging.connect(self.url)))
        return self.instances[-1]

    def bus(self, *, shares: bool = True, **options: Any) -> tuple[TypedEventBus, BusConnection]:
        connecting = {key: options.pop(key) for key in ("outbound_policy", "inbound_policy", "principal", "inbound",
                                                        "outbound", "network") if key in options}  # fmt: skip
        options = {"history": KEPT, **options} if shares else options
        bus = self.stack.enter_context(TypedEventBus(ServiceRegistry(), **options))
        connecting = {"network": NETWORK, **connecting}
        connection = bus.connect(self.instance(), "*", shares_history=shares, **connecting)
        connection.ready.result(PATIENCE)
        return bus, connection


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@contextmanager
def planted() -> Iterator[Plant]:
    with ExitStack() as stack:
        yield Plant(f"memory://{uuid4()}", stack)


#: gives each row of a table a plant of its own
own_plant = renewed("plant", planted)


@pytest.fixture
def plant() -> Iterator[Plant]:
    with planted() as plant:
        yield plant


@pytest.fixture(params=["memory", "mosquitto", "rabbitmq"])
def network(request: pytest.FixtureRequest, stack: ExitStack) -> Plant:
    if request.param == "memory":
        return Plant(f"memory://{uuid4()}", stack)
    return Plant(request.getfixturevalue(request.param).url, stack)


def count(bus: TypedEventBus, numbers: Any, topic: str = "a") -> None:
    for n in numbers:
        bus.deliver_untyped(topic, {"n": n})


def until_known(connection: BusConnection, members: int) -> None:
    eventually(lambda: len(connection.get_dto().node.members) >= members)


# --- the result


def test_a_late_joiner_receives_the_past_events_of_all_others_by_time_and_each_once(network: Plant) -> None:
    first, to_first = network.bus()
    count(first, range(3))  # no other process is there yet
    second, to_second = network.bus()
    until_known(to_first, 1)
    to_second.announced().result(PATIENCE)
    to_first.announced().result(PATIENCE)
    for n in range(3, 40, 2):
        count(first, [n])
        count(second, [n + 1], "b/c")
    eventually(lambda: first.get_dto().recorded == second.get_dto().recorded + 3 == 41)
    _, late = network.bus(shares=False)
    until_known(late, 2)
    found = replayed(late)
    assert found.error is None
    assert found.numbers == [*range(41)]
    assert [each.publication_time for each in found] == sorted(each.publication_time for each in found)
    assert {each.sequence for each in found} == {0}
    assert all(isinstance(each.origin, UUID) for each in found)
    assert {each.topic for each in found} == {"a", "b/c"}
    assert replayed(late, 5).numbers == [*range(36, 41)]
    assert replayed(late, topics="b/*").numbers == [*range(4, 41, 2)]


def test_the_history_is_limited_by_number_time_or_duration(plant: Plant) -> None:
    bus, _ = plant.bus()
    count(bus, range(10))
    times = {each.event_data["n"]: each.publication_time for each in past(bus)}
    middle = times[5]
    _, late = plant.bus(shares=False)
    assert replayed(late, middle).numbers == [number for number in range(10) if times[number] >= middle]
    assert replayed(late, middle.astimezone().replace(tzinfo=None)).numbers[-1] == 9
    assert replayed(late, timedelta(hours=1)).numbers == [*range(10)]
    assert replayed(late, timedelta(hours=1), limit=4).numbers == [6, 7, 8, 9]
    assert replayed(late, timedelta(0)).numbers == []
    assert replayed(late, datetime.now(UTC) + timedelta(hours=1)).numbers == []
    assert replayed(late, datetime.min).numbers == [*range(10)]
    assert replayed(late, 3).numbers == [7, 8, 9]


def test_a_durable_history_is_shared_with_the_events_of_earlier_runs(plant: Plant, tmp_path: Path) -> None:
    with TypedEventBus(ServiceRegistry(), history=KEPT, durable_history=DurableHistory(tmp_path)) as bus:
        count(bus, range(20))
    bus, _ = plant.bus(history={"*": RangePolicy.at_most(2)}, durable_history=DurableHistory(tmp_path))
    count(bus, range(20, 25))
    _, late = plant.bus(shares=False)
    for _ in range(2):
        assert replayed(late).numbers == [*range(25)]
    assert replayed(late, 3).numbers == [22, 23, 24]


def test_events_that_two_durable_histories_have_are_emitted_once_after_a_restart(plant: Plant, tmp_path: Path) -> None:
    folders = [tmp_path / "1", tmp_path / "2"]
    with ExitStack() as before:
        earlier = Plant(plant.url, before)
        first, to_first = earlier.bus(durable_history=DurableHistory(folders[0]))
        second, to_second = earlier.bus(durable_history=DurableHistory(folders[1]))
        until_known(to_first, 1)
        to_second.announced().result(PATIENCE)
        count(first, range(10))
        eventually(lambda: second.get_dto().recorded == 10)
    for folder in folders:
        plant.bus(durable_history=DurableHistory(folder))
    _, late = plant.bus(shares=False)
    assert replayed(late).numbers == [*range(10)]


def test_values_that_json_lacks_arrive_as_they_were(plant: Plant) -> None:
    bus, _ = plant.bus()
    event = {"n": 2**70, "at": datetime.now(UTC), "raw": b"\0\xff", "id": uuid4(), "set": {1, 2}}
    bus.deliver_untyped("a", event)
    _, late = plant.bus(shares=False)
    assert replayed(late)[0].event_data == event


# --- who answers, and who may


def test_a_member_that_does_not_share_its_history_is_neither_asked_nor_waited_for(plant: Plant) -> None:
    bus, _ = plant.bus()
    count(bus, range(3))
    private = plant.stack.enter_context(TypedEventBus(ServiceRegistry(), history=KEPT))
    private.connect(plant.instance(), "*", network=NETWORK, outbound=False).ready.result(PATIENCE)
    count(private, range(100, 103))
    _, late = plant.bus(shares=False)
    found = replayed(late, timeout=PATIENCE)
    assert found.error is None
    assert found.numbers == [0, 1, 2]


def test_without_another_member_the_stream_is_empty_and_completes(plant: Plant) -> None:
    _, alone = plant.bus()
    found = replayed(alone)
    assert found == []
    assert found.error is None


def test_a_request_that_arrives_while_the_bus_connects_is_answered(
    plant: Plant, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    _, asking = plant.bus(shares=False)
    held = threading.Event()

    def held_node(*arguments: Any, **options: Any) -> EventNode:
        node = EventNode(*arguments, **options)
        assert held.wait(PATIENCE)
        return node

    monkeypatch.setattr("messaging.typedevent.bus_connection.EventNode", held_node)
    bus = plant.stack.enter_context(TypedEventBus(ServiceRegistry(), history=KEPT))
    count(bus, range(3))
    instance = plant.instance()
    with ThreadPoolExecutor(1) as pool:
        connecting = pool.submit(lambda: bus.connect(instance, "*", shares_history=True, network=NETWORK))
        until_known(asking, 1)
        eventually(lambda: asking.get_dto().node.is_settled)
        found = started(asking)
        asking.announced().result(PATIENCE)  # announcements are read in order: the request, too
        held.set()
        connecting.result(PATIENCE)
    found.wait_ended()
    assert found.error is None
    assert found.numbers == [0, 1, 2]
    assert "AttributeError" not in caplog.text


def test_policies_and_directions_apply_as_for_live_events(plant: Plant) -> None:
    policy = TopicPolicy({"meter": [TopicPermission("a", "publish"), TopicPermission("b", "publish")]})
    bus, _ = plant.bus(outbound_policy=policy, principal="meter", outbound=["a", "b", "c"])
    for n, topic in enumerate("abcd"):
        count(bus, [n], topic)
    _, late = plant.bus(shares=False)
    assert replayed(late).numbers == [0, 1]
    strict = TopicPolicy({"meter": [TopicPermission("b", "publish")]})
    _, late = plant.bus(shares=False, inbound_policy=strict)
    assert replayed(late).numbers == [1]
    _, late = plant.bus(shares=False, inbound="a")
    assert replayed(late).numbers == [0]
    with pytest.raises(ArgumentError, match="none of them is connected inbound"):
        late.replay("b", 1)


def test_a_wrong_history_or_limit_is_refused(plant: Plant) -> None:
    _, late = plant.bus(shares=False)
    history: Any
    for history in (0, -1, True, None, "1", 1.5, timedelta(-1)):
        with pytest.raises(ArgumentError, match="history must be"):
            late.replay("*", history)
    limit: Any
    for limit in (0, 100_001, "1", None):
        with pytest.raises(ArgumentError, match="limit"):
            late.replay("*", 1, limit=limit)


@pytest.mark.usefixtures("virtual_clock")
def test_at_most_16_requests_are_pending(plant: Plant) -> None:
    Forger(plant)
    _, late = plant.bus(shares=False)
    pending = [started(late, timeout=1.0) for _ in range(17)]
    errors = [each.wait_error() for each in pending]
    assert isinstance(errors[-1], MessagingError)
    assert "16 requests are pending" in str(errors[-1])
    assert {type(each) for each in errors[:-1]} == {PartialNotificationError}
    assert isinstance(replayed(late, timeout=1.0).error, PartialNotificationError)


def test_the_end_of_the_connection_ends_a_request(plant: Plant) -> None:
    Forger(plant)
    _, late = plant.bus(shares=False)
    found = started(late)
    late.close()
    assert "closed" in str(found.wait_error())


# --- a bus that joins late with history


def test_handlers_with_history_receive_past_events_of_others_before_live_ones(network: Plant) -> None:
    bus, _ = network.bus()
    count(bus, range(20))
    late = network.stack.enter_context(TypedEventBus(ServiceRegistry(), history={"a": RangePolicy.at_most(100)}))
    few, filtered, live = Numbers(), Numbers(), Numbers()
    late.on("a", handler=few, history=5)
    late.on("*", handler=filtered, history=5, filter="(n<=7)")
    late.on("a", handler=live)
    joined = late.connect(network.instance(), "*", network=NETWORK, history=timedelta(hours=1))
    joined.ready.result(PATIENCE)
    for n in range(20, 60):
        count(bus, [n])
    joined.caught_up.result(PATIENCE)
    joined.announced().result(PATIENCE)
    count(bus, [60])
    for each in (few, live):
        each.wait_until(lambda numbers: numbers[-1:] == [60])
    first_live = live[0]
    assert live == [*range(first_live, 61)]
    assert first_live >= 20
    assert few == [*range(few[0], 61)]
    assert first_live - 5 <= few[0] <= 60 - 5
    assert filtered == [3, 4, 5, 6, 7]
    after = Numbers()
    late.on("a", handler=after, history=100)
    assert after.wait_for(61) == [*range(61)]


def test_an_event_that_comes_live_and_as_a_past_one_reaches_each_handler_once(plant: Plant) -> None:
    late = plant.stack.enter_context(TypedEventBus(ServiceRegistry(), history=KEPT))
    with_history, without, filtered = Numbers(), Numbers(), Numbers()
    late.on("a", handler=with_history, history=10)
    late.on("a", handler=without)
    late.on("a", handler=filtered, filter="(n=1)")
    joined = late.connect(plant.instance(), "*", network=NETWORK)
    joined.announced().result(PATIENCE)
    arrival = ArrivedEvent(WireEvent("a", {"n": 1}), str(uuid4()), None, None)
    inbound = joined._inbound
    past = inbound.begin_with_past()
    inbound.receive(arrival)  # is held
    past.done([arrival], None)
    inbound.receive(arrival)  # by another way
    late.flush().result(PATIENCE)
    assert (with_history, without, filtered) == ([1], [1], [1])
    assert late.get_dto().recorded == 1
    assert joined.get_dto().duplicates == 1


def test_a_handler_receives_no_more_past_events_than_it_asked_for(plant: Plant) -> None:
    bus, _ = plant.bus()
    count(bus, range(10))
    late = plant.stack.enter_context(TypedEventBus(ServiceRegistry(), history=KEPT))
    count(late, range(100, 103))
    own = past(late, 3)
    got = Numbers()
    late.on("a", handler=got, history=5)
    joined = late.connect(plant.instance(), "*", network=NETWORK, history=8)
    joined.caught_up.result(PATIENCE)
    late.flush().result(PATIENCE)
    assert got == [100, 101, 102, 8, 9]
    assert late.get_dto().recorded == 3 + 8
    others = past(late, 8)
    assert max(each.publication_time for each in others) < min(each.publication_time for each in own)
    assert None not in {each.origin for each in others}


def test_a_late_joiner_with_a_durable_history_takes_only_events_that_it_lacks(plant: Plant, tmp_path: Path) -> None:
    bus, to_others = plant.bus()
    options = {"history": KEPT, "durable_history": DurableHistory(tmp_path, window=0.01)}
    with TypedEventBus(ServiceRegistry(), **options) as earlier:  # type: ignore[arg-type]
        connection = earlier.connect(plant.instance(), "*", network=NETWORK)
        connection.announced().result(PATIENCE)
        count(bus, range(10))
        count(earlier, range(100, 103), "own")
        eventually(lambda: earlier.get_dto().recorded == 13)
        eventually(lambda: bus.get_dto().recorded == 13)
    count(bus, range(10, 15))
    again = plant.stack.enter_context(TypedEventBus(ServiceRegistry(), **options))  # type: ignore[arg-type]
    connection = again.connect(plant.instance(), "*", network=NETWORK, history=1000)
    connection.caught_up.result(PATIENCE)
    assert again.get_dto().recorded == 18
    assert sorted(past(again).numbers) == [*range(15), 100, 101, 102]
    assert to_others.get_dto().past_sent == 18


def test_live_events_follow_although_a_member_does_not_answer(plant: Plant) -> None:
    Forger(plant)
    bus, connection = plant.bus()
    count(bus, range(3))
    late = plant.stack.enter_context(TypedEventBus(ServiceRegistry()))
    got = Numbers()
    late.on("a", handler=got, history=10)
    joined = late.connect(plant.instance(), "*", network=NETWORK, history=10)
    joined.ready.result(PATIENCE)
    until_known(connection, 2)
    eventually(lambda: joined.get_dto().past_arrived == 3)
    count(bus, range(3, 6))
    eventually(lambda: joined.get_dto().node.received == 3)
    assert got == []  # held
    joined.close()
    eventually(joined.caught_up.done)
    assert joined.caught_up.exception() is not None
    assert got.wait_for(6) == [*range(6)]


def test_a_connection_without_past_events_has_caught_up_at_once(plant: Plant) -> None:
    _, connection = plant.bus()
    connection.caught_up.result(PATIENCE)
    bus = plant.stack.enter_context(TypedEventBus(ServiceRegistry()))
    for wrong in (0, "1", True):
        with pytest.raises(ArgumentError, match="history must be"):
            bus.connect(plant.instance(), "*", history=wrong)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="shares_history"):
        bus.connect(plant.instance(), "*", shares_history=1)  # type: ignore[arg-type]


# --- hostile and dying members


class Forger:
    """A program that announces itself by hand, and answers as a test says."""

    def __init__(self, plant: Plant, answer: Callable[[Forger, dict[str, Any]], object] = lambda *_: None) -> None:
        self.member = str(uuid4())
        self.instance = plant.instance()
        self.asked: list[dict[str, Any]] = []
        self._answer = answer
        self.instance.on("topics-members/all", self._read)
        self.announce("update", interests=[], offers=[])

    def announce(self, kind: str, **fields: Any) -> None:
        content = {"announcement": 1, "kind": kind, "member": self.member, "heartbeat": 60, "replays": True, **fields}
        self.instance.publish("topics-members/all", json.dumps(content).encode()).result(PATIENCE)

    def _read(self, message: messaging.Message) -> None:
        found = json.loads(message.payload)
        if found["member"] == self.member:
            return
        if found["kind"] == "query":
            self.announce("update", interests=[], offers=[])
        elif found["kind"] == "replay":
            self.asked.append(found)
            self._answer(self, found)

    def send(self, request: dict[str, Any], number: int, **fields: Any) -> None:
        event = WireEvent(fields.pop("topic", "a"), fields.pop("data", {"n": number}), sender=self.member)
        event.correlation_id, event.sequence, event.id, event.time = request["token"], number, str(uuid4()), number
        for key, value in fields.items():
            setattr(event, key, value)
        self.instance.publish(f"topics-past/{request['member']}", encode(event)).result(PATIENCE)

    def end(self, request: dict[str, Any], count: int) -> None:
        self.send(request, count, kind="close")


def test_a_request_has_the_documented_form_and_a_plain_program_can_answer_it(plant: Plant) -> None:
    def answer(forger: Forger, request: dict[str, Any]) -> None:
        forger.send(request, 1)
        forger.send(request, 0)
        forger.send(request, 1)  # a broker may deliver a message twice
        forger.end(request, 2)

    forger = Forger(plant, answer)
    _, late = plant.bus(shares=False)
    assert replayed(late, datetime(2025, 1, 1, tzinfo=UTC), ["a", "b/*"], limit=7).numbers == [0, 1]
    (request,) = forger.asked
    assert request["since"] == 1_735_689_600_000_000
    assert request["limit"] == 7
    assert request["interests"] == [{"topics": "a", "grammar": "typed"}, {"topics": "b/*", "grammar": "typed"}]


def too_many(forger: Forger, request: dict[str, Any]) -> None:
    for n in range(6):
        forger.send(request, n)
    forger.end(request, 6)


def never_ending(forger: Forger, request: dict[str, Any]) -> None:
    forger.send(request, 0)


def more_than_its_end_says(forger: Forger, request: dict[str, Any]) -> None:
    for n in range(3):
        forger.send(request, n)
    forger.end(request, 1)


def fewer_than_its_end_says(forger: Forger, request: dict[str, Any]) -> None:
    forger.send(request, 0)
    forger.end(request, 2)


def another_topic(forger: Forger, request: dict[str, Any]) -> None:
    forger.send(request, 0, topic="z")
    forger.end(request, 1)


@table("answer", [too_many, never_ending, more_than_its_end_says, fewer_than_its_end_says, another_topic])
@own_plant
@pytest.mark.usefixtures("virtual_clock")
def test_a_wrong_answer_is_refused_and_its_member_named(
    plant: Plant, answer: Callable[[Forger, dict[str, Any]], object]
) -> None:
    bus, _ = plant.bus()
    count(bus, range(100, 103))
    forger = Forger(plant, answer)
    _, late = plant.bus(shares=False)
    # the rest of an answer that is too short may come yet
    found = replayed(late, 5, "a", timeout=1.5 if answer in (never_ending, fewer_than_its_end_says) else PATIENCE)
    assert isinstance(found.error, PartialNotificationError)
    assert len(found.error.missing) == 1
    assert forger.member in found.error.missing[0]
    assert found.numbers[-3:] == [100, 101, 102]
    assert len(found.numbers) <= 5


def test_events_that_were_not_asked_for_are_refused_and_counted(plant: Plant) -> None:
    def answer(forger: Forger, request: dict[str, Any]) -> None:
        forger.send({**request, "token": str(uuid4())}, 0)
        forger.send(request, 0, sender=str(uuid4()))
        forger.send(request, 0, correlation_id=None)
        forger.instance.publish(f"topics-past/{request['member']}", b"\xffjunk").result(PATIENCE)
        forger.send(request, 0, data=["no map"])
        forger.send(request, 1, data={"$unknown": 1})
        forger.send(request, 2)
        forger.end(request, 3)
        forger.send(request, 3)

    Forger(plant, answer)
    _, late = plant.bus(shares=False)
    found = replayed(late)
    assert found.error is None
    assert found.numbers == [2]
    eventually(lambda: late.get_dto().node.refused == 5)


def test_a_request_of_a_stranger_is_answered_within_its_bounds(plant: Plant) -> None:
    """A stranger that has announced itself and asks for as much as it can."""
    bus, _ = plant.bus()
    count(bus, range(50))
    forger = Forger(plant)
    answers = subscribed(forger.instance, f"topics-past/{forger.member}")
    forger.announce("replay", token="t", limit=2**50, interests=[{"topics": "*", "grammar": "typed"}])
    answers.wait_for(51)
    got = [decode(payload) for payload in answers.payloads]
    assert got[-1].kind == "close"
    assert got[-1].sequence == 50
    assert [each.value()["n"] for each in got[:-1]] == [*range(50)]
    assert {each.correlation_id for each in got} == {"t"}


ANSWERING = """
import os, signal, sys, messaging
from messaging.dispatch.eventnetwork import ArrivedEvent, EventNetwork, EventNode
from messaging.services import ServiceRegistry
from messaging.typedevent import RangePolicy, TypedEventBus

m = messaging.connect(sys.argv[1])
bus = TypedEventBus(ServiceRegistry(), history={"*": RangePolicy.at_most(100_000)}, history_capacity=-1)
connection = bus.connect(m, "*", network=EventNetwork(heartbeat=0.5, name="remote"), shares_history=True)
for n in range(int(sys.argv[2])):
    bus.deliver_untyped("a", {"n": n, "text": "x" * 100})
connection.ready.result(20)
if len(sys.argv) > 3:  # killed while it answers
    send_to, left = connection._node.sender.send_to, int(sys.argv[3])

    def send_and_die(*arguments):
        global left
        left -= 1
        promise = send_to(*arguments)
        if not left:
            promise.result(20)
            os.kill(os.getpid(), signal.SIGKILL)
        return promise

    connection._node.sender.send_to = send_and_die
print("ready", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def answering(mosquitto: Mosquitto) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Start a process that shares its history over a broker."""
    processes: list[subprocess.Popen[str]] = []

    def start(*numbers: int) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", ANSWERING, mosquitto.url, *map(str, numbers)]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        processes.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        return process

    yield start
    for each in processes:
        each.kill()
        each.communicate()


@pytest.mark.timeout(400)
def test_the_history_of_a_real_process_is_replayed(
    mosquitto: Mosquitto, stack: ExitStack, answering: Callable[..., subprocess.Popen[str]]
) -> None:
    answering(1000)
    _, late = Plant(mosquitto.url, stack).bus(shares=False)
    until_known(late, 1)
    found = replayed(late, timeout=6 * PATIENCE)
    assert found.error is None
    assert found.numbers == [*range(1000)]


@pytest.mark.timeout(400)
def test_a_process_that_is_killed_while_it_answers_is_named_and_the_others_events_are_there(
    mosquitto: Mosquitto, stack: ExitStack, answering: Callable[..., subprocess.Popen[str]]
) -> None:
    process = answering(1_000, 500)
    plant = Plant(mosquitto.url, stack)
    bus, _ = plant.bus(inbound=False)
    bus.deliver_untyped("b", {"n": -1})
    _, late = plant.bus(shares=False)
    until_known(late, 2)
    found = replayed(late, timeout=6 * PATIENCE)
    assert process.wait(6 * PATIENCE) == -signal.SIGKILL
    assert isinstance(found.error, PartialNotificationError)
    assert len(found.error.missing) == 1
    assert "remote" in found.error.missing[0]
    assert -1 in found.numbers
    assert late.get_dto().past_arrived == len(found.numbers)
    assert 1 < len(found.numbers) <= 501


def test_past_events_arrive_again_after_the_broker_ended_their_subscription(plant: Plant) -> None:
    bus, _ = plant.bus()
    count(bus, range(3))
    late, connection = plant.bus(shares=False, network=EventNetwork(heartbeat=0.5, queue="late"))
    late.on("a", handler=lambda _: None, type=dict)
    connection.announced().result(PATIENCE)
    assert replayed(connection).numbers == [0, 1, 2]
    broker = broker_of(plant.instances[-1])
    on_loop(lambda: broker.delete("late", if_empty=False, if_unused=False))
    eventually(lambda: not connection.get_dto().node.is_settled)
    found = replayed(connection, timeout=5.0)
    assert found.error is None
    assert found.numbers == [0, 1, 2]
