"""Bridges between remote events and others (EV.4; scenarios 57 and 58)."""

from __future__ import annotations

import datetime
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from reactivex.subject import Subject

import messaging
from messaging import Messaging
from messaging.distributedeventing import DistributedEventAdmin
from messaging.errors import (
    ArgumentError,
    ClosedError,
    DecodeError,
    InvalidEventError,
    InvalidTopicError,
    UnknownEventError,
)
from messaging.remoteevent import EventGenerator, RemoteEvent
from messaging.remoteevent.bridges import (
    BusEvent,
    ChannelGenerator,
    ChannelListener,
    ChannelMessage,
    EventAdapter,
    as_map,
    from_distributed,
    from_map,
    from_typed,
    kind_of,
    to_typed,
    topic_of,
)
from messaging.remoteevent.event import ForeignEvent, decode_event
from messaging.remoteevent.mailbox import EventMailbox
from messaging.services import ServiceRegistry
from messaging.testing.tables import table
from messaging.testing.waiting import PATIENCE, Recorder, eventually, subscribed
from messaging.typedevent import TypedEventBus
from tests.leases.conftest import Connect
from tests.remoteevent.helpers import ready, taken


@dataclass(frozen=True, kw_only=True)
class Overheated(RemoteEvent):
    """An event with fields of its own."""

    celsius: float
    at: datetime.datetime | None = None
    raw: bytes = b""


@dataclass(frozen=True)
class Order:
    """A typed event."""

    number: int
    lines: list[str]


TEXTS = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12)
IDS = st.one_of(TEXTS, st.integers(-(2**63), 2**63 - 1))
VALUES = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(-(2**53), 2**53),
        st.floats(allow_nan=False, allow_infinity=False),
        st.text(st.characters(exclude_categories=["Cs"]), max_size=8),
        st.binary(max_size=8),
    ),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(TEXTS, inner, max_size=3)),
    max_leaves=8,
)
EVENTS = st.one_of(
    st.builds(RemoteEvent, TEXTS, IDS, st.integers(0, 2**63 - 1), VALUES),
    st.builds(
        Overheated, TEXTS, IDS, st.integers(0, 2**63 - 1), VALUES,
        celsius=st.floats(allow_nan=False, allow_infinity=False), raw=st.binary(max_size=8),
        at=st.none() | st.datetimes(timezones=st.just(datetime.UTC)),
    ),
    st.builds(
        ForeignEvent, TEXTS, IDS, st.integers(0, 2**63 - 1), VALUES,
        foreign_type=st.just("far.Away"), foreign_data=st.dictionaries(TEXTS, st.integers(0, 9), max_size=3),
    ),
)  # fmt: skip


# --- forms and topics


@given(EVENTS)
def test_an_event_as_a_map_and_back_loses_nothing(event: RemoteEvent) -> None:
    """Scenario 57."""
    back = from_map(as_map(event))
    assert back == event
    assert type(back) is type(event)


@given(TEXTS, IDS, TEXTS, IDS)
def test_the_topic_of_a_kind_is_its_own(source: str, event_id: Any, other: str, other_id: Any) -> None:
    """Scenario 57: source and id come back, and two kinds have two topics."""
    topic = topic_of(source, event_id)
    assert kind_of(topic) == (source, event_id)
    assert (topic == topic_of(other, other_id)) is ((source, event_id) == (other, other_id))


def test_topics_are_readable() -> None:
    assert topic_of("boiler 7", "overheated") == "remoteevent/boiler_207/toverheated"
    assert topic_of("boiler", -3) == "remoteevent/boiler/i-3"


@table(
    "topic",
    ["", "x", "remoteevent/a", "remoteevent/a/b", "remoteevent/a/i1x", "remoteevent/_41/tx", "remoteevent/a/i01"],
)
def test_other_topics_are_refused(topic: str) -> None:
    with pytest.raises(InvalidTopicError):
        kind_of(topic)
    with pytest.raises(InvalidTopicError):
        topic_of("\ud800", 1)


@table("value", [None, 3, {}, {"source": "s"}, {"source": "", "id": 1, "sequence": 1}])
def test_other_maps_are_refused(value: Any) -> None:
    with pytest.raises(DecodeError):
        from_map(value)


# --- typed events


@pytest.fixture
def bus() -> Iterator[TypedEventBus]:
    with TypedEventBus(ServiceRegistry()) as found:
        yield found


def test_remote_events_become_typed_events_and_back_without_loss(bus: TypedEventBus) -> None:
    """Scenario 57, through a bus."""
    got: Recorder[Any] = Recorder()

    @bus.on("remoteevent/*")
    def handle(topic: str, event: dict[str, Any]) -> None:
        got.append((kind_of(topic), from_map(event)))

    events = [
        RemoteEvent("boiler 7", "hot", 3, {"bytes": b"\x00", "list": [1, None]}),
        Overheated("boiler/8", -4, 5, celsius=99.5, raw=b"\xff", at=datetime.datetime.now(datetime.UTC)),
        ForeignEvent("far", 1, 2, None, foreign_type="far.Away", foreign_data={"x": 1}),
    ]
    listener = to_typed(bus)
    for each in events:
        listener.notify(each)
    got.wait_for(3)
    assert got == [(each.kind, each) for each in events]


def test_typed_events_become_remote_events_and_back_without_loss(bus: TypedEventBus) -> None:
    """Scenario 57, the other way."""
    got: Recorder[Any] = Recorder()
    with TypedEventBus(ServiceRegistry()) as other:
        other.on("orders/+/placed", handler=lambda topic, event: got.append((topic, event)), type=Order)
        with from_typed(bus, "orders/*", listener=to_typed(other)):
            for number in range(50):
                bus.deliver(Order(number, ["a", "b"]), f"orders/{number % 3}/placed")
            got.wait_for(50)
    for shop in range(3):  # in order within each topic, which is a kind of events
        wanted = [number for number in range(50) if number % 3 == shop]
        assert [event.number for topic, event in got if topic == f"orders/{shop}/placed"] == wanted
    assert all(event.lines == ["a", "b"] for _, event in got)


def test_typed_events_are_events_of_a_generator(bus: TypedEventBus) -> None:
    got: Recorder[Any] = Recorder()
    with EventGenerator("shop", events=["order"], begin=0) as shop:
        registration = shop.register("order", {"h": 1}, got.append)
        with from_typed(bus, "orders/*", generator=shop, event_id="order") as bridge:
            assert bridge.generator is shop
            bus.deliver_untyped("orders/new", {"number": 1})
            bus.deliver_untyped("orders/old", {"number": 2})
            got.wait_for(2)
        bus.deliver_untyped("orders/new", {"number": 3})
        bus.flush().result(PATIENCE)
    assert [type(each) for each in got] == [BusEvent, BusEvent]
    assert [(each.topic, each.content) for each in got] == [
        ("orders/new", {"number": 1}),
        ("orders/old", {"number": 2}),
    ]
    assert taken(got) == [1, 2]
    assert {each.kind for each in got} == {registration.kind}
    assert got[0].handback == {"h": 1}


def test_a_topic_of_ones_own_is_used(bus: TypedEventBus) -> None:
    got: Recorder[Any] = Recorder()
    bus.on("mine", handler=lambda topic, event: got.append((topic, event["sequence"])))
    to_typed(bus, lambda _event: "mine").notify(RemoteEvent("s", 1, 9))
    got.wait_for(1)
    assert got == [("mine", 9)]


def test_a_closed_bus_refuses(bus: TypedEventBus) -> None:
    bus.close()
    with pytest.raises(ClosedError):
        to_typed(bus).notify(RemoteEvent("s", 1, 9))
    with pytest.raises(ClosedError):
        from_typed(bus, "x", listener=print)


# --- local listeners


class Panel:
    """An object with a method for each kind of event."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def show_alarm(self, event: RemoteEvent) -> None:
        self.calls.append(("alarm", event.sequence_number))

    def show_cold(self, event: RemoteEvent) -> None:
        self.calls.append(("cold", event.sequence_number))


def test_an_adapter_calls_what_is_registered_for_the_kind() -> None:
    """Scenario 58."""
    panel, subject, got = Panel(), Subject[RemoteEvent](), list[Any]()
    subject.subscribe(got.append)
    adapter = EventAdapter(panel)
    adapter.add(("boiler", "hot"), "show_alarm")
    adapter.add(("boiler", 1), panel.show_cold)
    adapter.add(("pump", "hot"), subject)
    observed: list[Any] = []
    adapter.subject(("pump", 2)).subscribe(observed.append)

    async def later(event: RemoteEvent) -> None:
        panel.calls.append(("later", event.sequence_number))

    adapter.add(("pump", 3), later)
    events = [
        RemoteEvent("boiler", "hot", 1), RemoteEvent("boiler", 1, 2), RemoteEvent("pump", "hot", 3),
        RemoteEvent("pump", 2, 4), RemoteEvent("pump", 3, 5),
    ]  # fmt: skip
    for each in events:
        adapter.notify(each)
    assert panel.calls == [("alarm", 1), ("cold", 2), ("later", 5)]
    assert (got, observed) == ([events[2]], [events[3]])


def test_an_adapter_refuses_an_unknown_kind() -> None:
    """Scenario 58: the sender is told, and ends the registration of that kind only."""
    got: Recorder[Any] = Recorder()
    adapter = EventAdapter()
    adapter.add(("boiler", "hot"), got.append)
    for kind in (("boiler", "cold"), ("pump", "hot"), ("boiler", 1)):
        with pytest.raises(UnknownEventError):
            adapter.notify(RemoteEvent(kind[0], kind[1], 1))
    with EventGenerator("boiler", events=["hot", "cold"], begin=0) as boiler:
        hot = boiler.register("hot", None, adapter)
        cold = boiler.register("cold", None, adapter)
        boiler.generate("cold")
        boiler.generate("hot")
        eventually(lambda: cold.lease.is_ended and got)
        assert not hot.lease.is_ended
    assert adapter.remove(("boiler", "hot"))
    assert not adapter.remove(hot)
    with pytest.raises(UnknownEventError):
        adapter.notify(RemoteEvent("boiler", "hot", 1))


def test_junk_is_refused(bus: TypedEventBus) -> None:
    adapter = EventAdapter(Panel())
    for kind, target in [(("a", "b"), "missing"), (("a", "b"), 3), (("a",), print), (None, print), (("", 1), print)]:
        with pytest.raises(ArgumentError):
            adapter.add(kind, target)  # type: ignore[arg-type]
    for junk in (None, 3, "x"):
        with pytest.raises(ArgumentError):
            to_typed(junk)  # type: ignore[arg-type]
        with pytest.raises(ArgumentError):
            ChannelListener(junk, "x")  # type: ignore[arg-type]
    with pytest.raises(ArgumentError):
        to_typed(bus, 3)  # type: ignore[arg-type]
    for options in ({}, {"generator": 3}, {"listener": 3, "event_id": "x"}, {"listener": print, "event_id": 1.5}):
        with pytest.raises(ArgumentError):
            from_typed(bus, "x", **options)
    with pytest.raises(ArgumentError):
        from_typed(bus, listener=print)
    with pytest.raises(InvalidTopicError):
        from_typed(bus, "//", listener=print)


# --- channels of a broker


@pytest.fixture
def instance(connect: Connect) -> Messaging:
    return connect()


def test_messages_of_a_channel_are_events_of_a_generator(instance: Messaging) -> None:
    """Scenario 58 in the sense of EV.4: a channel of a broker as a generator."""
    got: Recorder[ChannelMessage] = Recorder()
    channel = f"bridges/{uuid.uuid4().hex}"
    with EventGenerator("broker", events=["message"], begin=0) as broker:
        broker.register("message", None, got.append)
        with ready(ChannelGenerator(instance, channel, generator=broker, event_id="message")):
            for number in range(3):
                instance.publish(channel, bytes([number, 255]), content_type="application/x-raw").result(PATIENCE)
            got.wait_for(3)
    assert [each.payload for each in got] == [bytes([number, 255]) for number in range(3)]
    assert {(each.channel, each.content_type) for each in got} == {(channel, "application/x-raw")}
    assert taken(got) == [1, 2, 3]


def test_events_are_messages_of_a_channel_without_loss(instance: Messaging) -> None:
    """Scenario 57: notify returns when the broker has confirmed the message."""
    channel = f"bridges/{uuid.uuid4().hex}"
    events: list[RemoteEvent] = [
        RemoteEvent("s", 1, 1, {"b": b"\x00"}),
        Overheated("s", "hot", 2, celsius=1.5, raw=b"\xff"),
    ]
    got = subscribed(instance, channel)
    assert ChannelListener(instance, channel).deliver(events).result(PATIENCE) == [None, None]
    got.wait_for(2)
    assert [decode_event(each) for each in got.payloads] == events


def test_an_event_that_cannot_be_published_fails_alone() -> None:
    with messaging.connect(f"memory://{uuid.uuid4().hex}") as instance:
        listener = ChannelListener(instance, lambda event: "ok" if event.sequence_number < 2 else "#bad+")
        outcomes = listener.deliver([RemoteEvent("s", 1, number) for number in (1, 2, 3)]).result(PATIENCE)
        assert outcomes[0] is None
        assert isinstance(outcomes[1], ArgumentError)
        assert len(outcomes) == 2
        unfit = RemoteEvent("s", 1, 1, object())
        assert isinstance(listener.deliver([unfit]).result(PATIENCE)[0], InvalidEventError)
    assert isinstance(listener.deliver([RemoteEvent("s", 1, 1)]).result(PATIENCE)[0], ClosedError)


# --- distributed events


def test_distributed_events_go_to_a_mailbox(tmp_path: Path) -> None:
    """Scenario 58 in the sense of EV.4: a consumer of distributed events in front of a mailbox."""
    got: Recorder[Any] = Recorder()
    with (
        EventMailbox(tmp_path / "box") as mailbox,
        DistributedEventAdmin(ServiceRegistry()) as admin,
    ):
        registration = mailbox.register()
        with from_distributed(admin, "orders/**", listener=registration.listener) as bridge:
            for number in range(5):
                admin.publish_event("orders/new", {"number": number})
            admin.flush().result(PATIENCE)
            source = bridge.generator.source
            registration.enable_delivery(got.append)
            got.wait_for(5)
    assert [each.content for each in got] == [{"number": number} for number in range(5)]
    assert {(each.source, each.id, each.topic) for each in got} == {(source, "orders/new", "orders/new")}
    assert all(each.framework for each in got)


def test_typed_events_of_a_bus_go_to_a_mailbox(tmp_path: Path, bus: TypedEventBus) -> None:
    got: Recorder[Any] = Recorder()
    with EventMailbox(tmp_path / "box") as mailbox:
        registration = mailbox.register()
        with from_typed(bus, "orders/*", listener=registration.listener):
            bus.deliver_untyped("orders/new", {"number": 1})
            registration.enable_delivery(got.append)
            got.wait_for(1)
    assert got[0].content == {"number": 1}
