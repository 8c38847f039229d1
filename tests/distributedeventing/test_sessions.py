"""Sessions and their consumers (RFC 214 5.1.2, 5.2.3). Numbers are those of the scenarios."""

from __future__ import annotations

from typing import Any
from uuid import uuid4

import pytest

import messaging
from messaging.dispatch.eventdata import WireEvent, encode
from messaging.dispatch.eventnetwork.announcements import Announcement, dump_announcement
from messaging.distributedeventing import (
    ConsumerLifecycle,
    DistributableEvent,
    DistributedEventAdmin,
    EventNetwork,
    EventPublisherSession,
)
from messaging.errors import ArgumentError, ClosedError, EventSessionLostError, RemoteEventError
from messaging.testing.clock import VirtualClock
from messaging.testing.tables import table
from messaging.testing.waiting import PATIENCE, Recorder, eventually
from tests.distributedeventing.conftest import (
    Admins,
    Consumer,
    Gate,
    Pair,
    Prototype,
    consume,
    flush,
    record,
)
from tests.threads import in_background, in_threads


def test_25_the_topic_of_a_session_is_fixed(admin: DistributedEventAdmin) -> None:
    session: EventPublisherSession[int] = admin.create_session("a/b")
    session.close()
    assert session.topic == "a/b"
    with pytest.raises(AttributeError):
        session.topic = "c"  # type: ignore[misc]
    with pytest.raises(ArgumentError), admin.create_session("a") as other:
        other.publish(DistributableEvent("b", data=1))


@table("end", ["close", "end_of_stream"])
def test_26_29_the_end_reaches_aware_consumers_and_the_data_all(admin: DistributedEventAdmin, end: str) -> None:
    aware, unified = record(admin, lifecycle="SESSION"), record(admin)
    session: EventPublisherSession[int] = admin.create_session("a")
    session.publish_event(1)
    getattr(session, end)()
    flush(admin)
    assert aware.kinds == ["data", "close"]
    assert unified.kinds == ["data"]


def test_26_27_the_end_of_a_session_crosses_the_network(pair: Pair) -> None:
    aware, unified = record(pair.other, "a", lifecycle="SESSION"), record(pair.other, "a")
    pair.announce()
    with pair.one.create_session("a") as session:
        session.publish_event(1)

    def fail() -> None:
        with pair.one.create_session("a") as session:
            session.publish_event(2)
            raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        fail()
    eventually(lambda: aware.kinds == ["data", "close", "data", "error"])
    (failure,) = aware.failures
    assert isinstance(failure, RemoteEventError)
    assert "broken" in str(failure)
    eventually(lambda: unified.values == [1, 2])
    assert unified.kinds == ["data", "data"]


def test_a_sender_that_returns_after_it_was_lost_does_not_go_on_with_its_session(
    admins: Admins, checked: pytest.LogCaptureFixture
) -> None:
    """The consumer has its error event: it receives nothing after it, and no second one (5.1.2)."""
    url = f"memory://returned{uuid4().hex}"
    member, session = str(uuid4()), "s1"
    with messaging.connect(url) as m, messaging.connect(url) as raw:
        admin = admins(instance=m)
        objects = Prototype()
        consume(admin, objects, "a", lifecycle="SESSION", scope="prototype")
        single, unified = record(admin, "a", lifecycle="SESSION"), record(admin, "a")
        admin.ready.result(PATIENCE)
        admin.announced(PATIENCE).result(PATIENCE)

        def send(number: int, kind: Any = "data") -> None:
            event = WireEvent("a", number, kind=kind, sender=member, sequence=number, session=session)
            raw.publish("topics/a", encode(event), qos="1").result(PATIENCE)

        def announce_as(kind: Any, **fields: Any) -> None:
            announcement = Announcement(kind=kind, member=member, heartbeat=60.0, **fields)
            raw.publish("topics-members/all", dump_announcement(announcement), qos="1").result(PATIENCE)

        announce_as("update")
        send(1)
        eventually(lambda: unified.values == [1])
        announce_as("leave", is_lost=True)
        ended = ["data", "error"]
        eventually(lambda: ended == single.kinds == objects.made[0].kinds)
        announce_as("update")
        send(2)
        send(3, "close")
        send(4)
        eventually(lambda: unified.values == [1, 2, 4])
        flush(admin)
        assert ended == single.kinds == objects.made[0].kinds
        assert isinstance(single.failures[0], EventSessionLostError)
        session = "s2"
        send(5)
        eventually(lambda: single.values == [1, 5])
        eventually(lambda: [each.values for each in objects.made] == [[1], [5]])


def test_a_session_of_a_sender_that_ended_before_ends_with_an_error(
    admins: Admins, virtual_clock: VirtualClock
) -> None:
    """A queue or a session of the broker, or an outbox, keeps events longer than their sender lives."""
    url = f"memory://ended{uuid4().hex}"
    with messaging.connect(url) as m, messaging.connect(url) as raw:
        admin = admins(instance=m, network=EventNetwork(heartbeat=1.0))
        recorder = record(admin, "a", lifecycle="SESSION")
        admin.announced(PATIENCE).result(PATIENCE)
        event = WireEvent("a", 1, sender=str(uuid4()), sequence=1, session="s")
        raw.publish("topics/a", encode(event), qos="1").result(PATIENCE)
        eventually(lambda: recorder.kinds == ["data"])
        virtual_clock.advance(5.0)
        assert recorder.kinds == ["data", "error"]
        assert isinstance(recorder.failures[0], EventSessionLostError)
        assert admin.members() == ()


@table("known_by", ["update", "add"])
def test_a_session_that_arrives_after_its_sender_was_lost_ends_with_an_error(
    admins: Admins, virtual_clock: VirtualClock, known_by: Any
) -> None:
    """The broker kept its events longer than the announcements of the sender, or the outbox of the sender did."""
    url = f"memory://late{uuid4().hex}"
    member = str(uuid4())
    with messaging.connect(url) as m, messaging.connect(url) as raw:
        admin = admins(instance=m, network=EventNetwork(heartbeat=1.0))
        recorder = record(admin, "a", lifecycle="SESSION")
        admin.announced(PATIENCE).result(PATIENCE)

        def announce(kind: Any, **fields: Any) -> None:
            announcement = Announcement(kind=kind, member=member, **fields)
            raw.publish("topics-members/all", dump_announcement(announcement), qos="1").result(PATIENCE)

        def send(number: int, session: str) -> None:
            event = WireEvent("a", number, sender=member, sequence=number, session=session)
            raw.publish("topics/a", encode(event), qos="1").result(PATIENCE)

        announce(known_by, version=3, heartbeat=1.0, linger=3_600.0)
        announce("leave", is_lost=True)
        eventually(lambda: [each.is_lost for each in admin.members()] == [True])
        ended = []
        for number, session in ((1, "first"), (3, "second")):
            send(number, session)
            eventually(lambda number=number: recorder.values[-1:] == [number])
            virtual_clock.advance(1.0)
            send(number + 1, session)
            eventually(lambda number=number: recorder.values[-1:] == [number + 1])
            assert recorder.kinds == [*ended, "data", "data"]
            virtual_clock.advance(5.0)
            ended += ["data", "data", "error"]
            eventually(lambda ended=tuple(ended): tuple(recorder.kinds) == ended)
        assert [type(each) for each in recorder.failures] == [EventSessionLostError] * 2
        assert [each.is_lost for each in admin.members()] == [True]


def test_27_an_error_ends_the_session(admin: DistributedEventAdmin) -> None:
    aware = record(admin, lifecycle="SESSION")
    error = ValueError("x")
    session: EventPublisherSession[int] = admin.create_session("a")
    session.publish_event(1)
    session.error(error)
    flush(admin)
    assert aware.failures == [error]
    assert not session.is_connected
    with pytest.raises(ArgumentError):
        session.error("x")  # type: ignore[arg-type]


def test_28_a_closed_session_publishes_nothing(admin: DistributedEventAdmin) -> None:
    recorder = record(admin)
    session: EventPublisherSession[int] = admin.create_session("a")
    assert session.is_connected
    session.close()
    session.close()
    session.close_with_notification().result(PATIENCE)
    for call in (session.publish_event, session.publish_event_with_notification, session.publish_with_notification):
        with pytest.raises(ClosedError):
            call(1)
    assert not session.is_connected
    flush(admin)
    assert recorder.values == []


def test_30_sessions_close_with_their_admin(admins: Admins, pair: Pair) -> None:
    local = admins()
    here, there = record(local, lifecycle="SESSION"), record(pair.other, lifecycle="SESSION")
    pair.announce()
    for admin in (local, pair.one):
        session: EventPublisherSession[int] = admin.create_session("a")
        session.publish_event(1)
        admin.close()
        assert not session.is_connected
    assert here.kinds == ["data", "close"]
    eventually(lambda: there.kinds == ["data", "close"])


def test_31_32_replies_reach_the_handler_until_the_session_ends(admin: DistributedEventAdmin) -> None:
    replies, whole = Consumer(), record(admin, "a", is_whole=True)
    session = admin.create_session("a", None, replies, int)
    session.publish_event("question", "c1")
    flush(admin)
    (question,) = whole.values
    assert question.reply_to == session.reply_to
    assert question.reply_to.startswith(".")
    assert question.correlation_id == "c1"
    admin.publish_event(question.reply_to, "7", correlation_id="c1")
    flush(admin)
    assert replies.values == [7]
    before = len(admin.get_dto().consumers)
    session.close()
    admin.publish_event(question.reply_to, 8)
    flush(admin)
    assert replies.values == [7]
    assert len(admin.get_dto().consumers) == before - 1


def test_33_each_session_has_a_consumer_of_its_own(admin: DistributedEventAdmin) -> None:
    prototype = Prototype()
    consume(admin, prototype, scope="prototype", lifecycle="SESSION")
    one, other = admin.create_session("a"), admin.create_session("a")
    assert prototype.made == []
    one.publish_event(1)
    flush(admin)
    other.publish_event(2)
    flush(admin)
    admin.publish_event("a", 3)
    one.publish_event(4)
    one.close()
    other.error(ValueError("x"))
    flush(admin)
    assert [each.values for each in prototype.made] == [[1, 4], [2], [3]]
    assert [each.kinds[-1] for each in prototype.made] == ["close", "error", "data"]
    ((_, consumer),) = admin.dispatcher.handlers()
    eventually(lambda: len(consumer.objects.all()) == 1)


def test_34_without_prototype_scope_one_object_serves_all_sessions(admin: DistributedEventAdmin) -> None:
    recorder = record(admin, lifecycle="SESSION")
    for number in range(3):
        with admin.create_session("a") as session:
            session.publish_event(number)
    flush(admin)
    assert recorder.kinds == ["data", "close"] * 3


@table("scope, is_aware", [("prototype", True), ("singleton", False)])
def test_35_the_scope_decides_on_the_lifecycle(admin: DistributedEventAdmin, scope: str, is_aware: bool) -> None:
    prototype = Prototype()
    consume(admin, prototype if is_aware else prototype(), scope=scope)
    with admin.create_session("a") as session:
        session.publish_event(1)
    flush(admin)
    assert prototype.made[0].kinds == (["data", "close"] if is_aware else ["data"])


@table("scope", ["prototype", "singleton"])
def test_36_a_unified_consumer_has_one_object(admin: DistributedEventAdmin, scope: str) -> None:
    prototype = Prototype()
    consume(admin, prototype if scope == "prototype" else prototype(), scope=scope, lifecycle="UNIFIED")
    for number in range(3):
        with admin.create_session("a") as session:
            session.publish_event(number)
    flush(admin)
    (made,) = prototype.made
    assert made.values == [0, 1, 2]
    assert set(made.kinds) == {"data"}


@table(
    "name, value",
    [
        ("event.lifecycle", "session"),
        ("consumer.lifecycle", "PER_SESSION"),
        ("consumer.lifecycle", ConsumerLifecycle.PER_SESSION),
        ("event.lifecycle", ConsumerLifecycle.SESSION),
    ],
)
def test_both_spellings_of_the_lifecycle_are_read(admin: DistributedEventAdmin, name: str, value: Any) -> None:
    from messaging.distributedeventing import PushEventConsumer

    recorder = Consumer()
    admin.services.register(PushEventConsumer, recorder, {"event.topics": "**", name: value})
    with admin.create_session("a") as session:
        session.publish_event(1)
    flush(admin)
    assert recorder.kinds == ["data", "close"]


def test_37_no_object_is_made_merely_to_be_closed(admin: DistributedEventAdmin) -> None:
    prototype = Prototype()
    consume(admin, prototype, scope="prototype")
    admin.create_session("a").close_with_notification().result(PATIENCE)
    assert prototype.made == []


def test_38_a_session_knows_whether_it_has_consumers(pair: Pair) -> None:
    session: EventPublisherSession[int] = pair.one.create_session("a")
    assert not session.is_connected
    registration = consume(pair.other, Consumer(), "a*")
    eventually(lambda: session.is_connected)
    registration.unregister()
    eventually(lambda: not session.is_connected)


# --- beyond the scenarios


def test_flushing_and_closing_wait_for_sessions_that_ended(admins: Admins) -> None:
    admin = admins()
    prototype = Prototype(Gate)
    consume(admin, prototype, scope="prototype")
    with admin.create_session("a") as session:
        session.publish_event(1)
        session.publish_event(2)
    flushed = admin.flush()
    eventually(lambda: prototype.made and prototype.made[0].values)
    assert not flushed.done()
    prototype.made[0].opened.set()
    flushed.result(PATIENCE)
    assert prototype.made[0].kinds == ["data", "data", "close"]


def test_an_unregistered_consumer_is_not_called_for_sessions_that_ended(admin: DistributedEventAdmin) -> None:
    prototype = Prototype(Gate)
    registration = consume(admin, prototype, scope="prototype")
    with admin.create_session("a") as session:
        session.publish_event(1)
        promise = session.publish_event_with_notification(2)
    eventually(lambda: prototype.made and prototype.made[0].values)
    registration.unregister()
    prototype.made[0].opened.set()
    promise.result(PATIENCE)
    flush(admin)
    assert prototype.made[0].kinds == ["data"]


def test_no_data_follows_the_end_of_a_session(admin: DistributedEventAdmin) -> None:
    aware = record(admin, lifecycle="SESSION")
    for _ in range(30):
        session: EventPublisherSession[int] = admin.create_session("a")
        session.publish_event(0)

        def publish(thread: int, session: EventPublisherSession[int] = session) -> None:
            if thread == 0:
                session.close()
                return
            try:
                for number in range(20):
                    session.publish_event(number)
            except ClosedError:
                pass

        in_threads(3, publish)
        flush(admin)
        assert aware.kinds[-1] == "close"
        assert aware.kinds.count("close") == 1
        aware.events.clear()


def test_a_session_is_not_locked_while_a_payload_is_read(admin: DistributedEventAdmin) -> None:
    """A property of a payload may wait for another thread that closes the session."""
    session: EventPublisherSession[Any] = admin.create_session("a")
    aware = record(admin, lifecycle="SESSION", filter="(n=1)")
    aware_of_all = record(admin, lifecycle="SESSION")

    class Payload:
        m: int
        n: int

        def __getattribute__(self, name: str) -> Any:
            if name == "n":
                closing = in_background(session.close, 5.0)
                closing()
                return 1
            return 2 if name == "m" else super().__getattribute__(name)

    session.publish_event(Payload())
    flush(admin)
    assert aware_of_all.kinds == ["data", "close"]
    assert len(aware.values) <= 1


def test_a_session_may_be_closed_by_a_consumer(admin: DistributedEventAdmin) -> None:
    session: EventPublisherSession[int] = admin.create_session("a")
    kinds: Recorder[str] = Recorder(lambda kind: kind == "data" and session.close())
    admin.on("a", handler=lambda event: kinds.append(event.kind), is_session_aware=True)
    session.publish_event(1)
    assert kinds.wait_for(2) == ["data", "close"]
