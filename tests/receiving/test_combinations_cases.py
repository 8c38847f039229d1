"""Combinations that went wrong once, and every call of the API from within every callback of it."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable
from typing import Any

import pytest
from pydantic import BaseModel, field_validator
from reactivex import operators as ops

from messaging import (
    ArgumentError,
    ClosedError,
    DeadlineError,
    DecodeError,
    Message,
    MessageStream,
    Messaging,
    MessagingError,
)
from messaging.services import ServiceEvent, ServiceEventKind
from messaging.testing.tables import table
from messaging.testing.waiting import PATIENCE, Recorder, eventually
from tests.doubles.consumers import receive
from tests.doubles.fake import on_loop, settle_loop
from tests.doubles.fixtures import Connect
from tests.doubles.memory import broker_of, drop_and_reconnect
from tests.receiving.test_combinations import RefusedError


def refuse(message: Message) -> None:
    raise RefusedError


def queued(m: Messaging) -> int:
    """Return how many messages are in the queue, which has no consumer."""
    queue = broker_of(m).queues["q"]
    return on_loop(lambda: len(queue))


def make_queue(m: Messaging) -> None:
    with m.subscribe("a", queue="q"):
        pass


# --- streams that end by a refusal


def refusing(seen: list[int | None]) -> Callable[[Message], None]:
    """Notes which delivery it is, and refuses."""

    def refuse(message: Message) -> None:
        seen.append(message.context.delivery_count)  # type: ignore[attr-defined]
        raise RefusedError

    return refuse


def observe_to_its_end(
    stream: MessageStream, *operators: Any, on_next: Callable[[Message], None] = lambda _: None
) -> None:
    over: Recorder[Any] = Recorder()
    stream.pipe(*operators).subscribe(on_next, over.on_error)
    over.wait_error()
    stream.close().result(PATIENCE)


def by_observer(m: Messaging, seen: list[int | None], **context: Any) -> None:
    observe_to_its_end(m.subscribe("a", queue="q", **context), on_next=refusing(seen))


def by_operator(m: Messaging, seen: list[int | None], **context: Any) -> None:
    observe_to_its_end(m.subscribe("a", queue="q", **context), ops.map(refusing(seen)))


def by_block(m: Messaging, seen: list[int | None], **context: Any) -> None:
    with contextlib.suppress(RefusedError), m.subscribe("a", queue="q", **context) as stream:
        refusing(seen)(stream.receive(PATIENCE))


def by_model(m: Messaging, seen: list[int | None], **context: Any) -> None:
    observe_to_its_end(m.subscribe("a", int, on_invalid="raise", queue="q", **context))
    seen.append(len(seen) + 1)


def by_model_of_an_iterator(m: Messaging, seen: list[int | None], **context: Any) -> None:
    with contextlib.suppress(DecodeError), m.subscribe("a", int, on_invalid="raise", queue="q", **context) as stream:
        stream.receive(PATIENCE)
    seen.append(len(seen) + 1)


@table("way", [by_observer, by_operator, by_block, by_model, by_model_of_an_iterator])
@table("limit", [{}, {"max_deliveries": 3}], ids=["dead letters", "three deliveries"])
def test_a_refusal_that_ends_its_stream_counts_as_one_delivery_and_its_dead_letter_does_not_come_back(
    connect: Connect, way: Callable[..., None], limit: dict[str, int]
) -> None:
    m = connect()
    make_queue(m)
    seen: list[int | None] = []
    with m.subscribe("dead") as dead:
        m.publish("a", b"poison", content_type="application/json").result(PATIENCE)
        # what cannot be read is not delivered again
        deliveries = 1 if way in (by_model, by_model_of_an_iterator) else limit.get("max_deliveries", 1)
        for _ in range(deliveries):
            way(m, seen, dead_letter_channel="dead", **limit)
        assert seen == [*range(1, deliveries + 1)]
        letter = dead.receive(PATIENCE)
        assert letter.payload == b"poison"
        assert letter.context.extensions["headers"]["x-dead-letter-deliveries"] == str(len(seen))
        assert queued(m) == 0


def test_invalid_messages_on_their_way_to_the_dead_letters_do_not_come_back_too(connect: Connect) -> None:
    m = connect()
    make_queue(m)
    with m.subscribe("dead") as dead:
        m.publish("a", b"poison", content_type="application/json").result(PATIENCE)
        stream = m.subscribe("a", int, on_invalid="dead_letter", queue="q", dead_letter_channel="dead")
        stream.subscribe(lambda _: None)
        eventually(lambda: stream.counters.invalid)
        stream.close().result(PATIENCE)
        assert dead.receive(PATIENCE).payload == b"poison"
        assert queued(m) == 0


def test_messages_behind_one_that_an_operator_failed_on_are_not_lost(connect: Connect) -> None:
    """Messages are there before the operators have their disposable."""
    m = connect()
    make_queue(m)
    payloads = [b"%d" % number for number in range(200)]
    for payload in payloads:
        m.publish("a", payload)
    m.publish("a").result(PATIENCE)
    by_operator(m, [])
    with m.subscribe("a", queue="q") as stream:
        assert sorted(receive(stream, 201)) == sorted([*payloads, b""])


# --- retained messages


def test_retained_messages_of_several_routing_keys_are_several(connect: Connect) -> None:
    m = connect()
    m.publish("a", b"plain", retain=True).result(PATIENCE)
    for key in ("k.1", "k.2"):
        m.publish("a", key.encode(), retain=True, channel_extension=key).result(PATIENCE)
    m.publish("a", b"", retain=True, channel_extension="k.9").result(PATIENCE)
    with m.subscribe("a") as stream:
        assert receive(stream, 1) == [b"plain"]
    with m.subscribe("a", channel_extension="k.*") as stream:
        assert sorted(receive(stream, 2)) == [b"k.1", b"k.2"]


def test_a_subscription_made_while_a_retained_message_waits_for_room_gets_it(connect: Connect) -> None:
    m = connect(max_queue_length=1)
    other = connect(m.runtime.get_runtime_dto().connection_uri)
    with m.subscribe("a", prefetch=1) as slow:
        slow.pause()
        settle_loop()
        m.publish("a", b"first").result(PATIENCE)
        promise = m.publish("a", b"kept", retain=True)
        settle_loop()
        assert not promise.done()
        with other.subscribe("a") as late:
            slow.resume()
            assert receive(slow, 2) == [b"first", b"kept"]
            promise.result(PATIENCE)
            assert receive(late, 1) == [b"kept"]


# --- bounds


def test_unacknowledged_messages_do_not_pile_up_behind_messages_acknowledged_on_arrival(connect: Connect) -> None:
    m = connect()
    with m.subscribe("a", auto_acknowledge=True, buffer_size=2) as stream:
        for _ in range(3):
            m.publish("a", b"held").result(PATIENCE)
        for _ in range(100):
            promise = m.publish("a", b"flood", qos=0)
        promise.result(PATIENCE)
        buffered = m.runtime.get_runtime_dto().subscriptions[0].buffered
        assert buffered + stream.counters.dropped == stream.counters.received == 103
        assert buffered <= 4
        assert receive(stream, 3) == [b"held"] * 3


# --- losses


class Slow(BaseModel):
    """A model whose validator can be held up."""

    v: int

    @field_validator("v")
    @classmethod
    def check(cls, v: int) -> int:
        inside("inside")
        assert gate.wait(PATIENCE)
        raise ValueError("never")


inside: Recorder[str] = Recorder()
gate = threading.Event()


def test_credit_of_an_invalid_message_is_given_back_once_even_over_a_loss(connect: Connect) -> None:
    inside.clear()
    gate.clear()
    m = connect()
    context = (
        m.acknowledge_context_builder()
        .message_context_builder()
        .channel("a")
        .extensions({"queue": "q", "deadLetterChannel": "dead", "prefetch": 1})
        .build_context()
    )
    other = connect(m.runtime.get_runtime_dto().connection_uri)
    stream = m.subscription.subscribe(context, model=Slow, on_invalid="dead_letter")
    push: Any = stream.subscribe()
    other.subscribe("dead").subscribe()
    other.publish("a", {"v": 1}).result(PATIENCE)
    inside.wait_for(1)
    drop_and_reconnect(m)
    gate.set()
    credit = push.subscription.credit
    eventually(lambda: stream.counters.dead_lettered >= 1 and credit.is_returned)
    stream.close().result(PATIENCE)
    assert credit.is_returned


def test_unsettled_messages_of_a_lost_instance_are_requeued_once(connect: Connect) -> None:
    """Not from one of its own consumers to the next."""
    m = connect()
    other = connect(m.runtime.get_runtime_dto().connection_uri)
    make_queue(m)
    with m.subscribe("a", queue="q") as one, m.subscribe("a", queue="q") as two:
        for _ in range(4):
            other.publish("a").result(PATIENCE)
        drop_and_reconnect(m)
        assert sum(each.buffered for each in m.runtime.get_runtime_dto().subscriptions) >= 4
        eventually(lambda: one.counters.received + two.counters.received >= 8)
        settle_loop()
        assert one.counters.received + two.counters.received == 8


def test_queued_and_retained_messages_outlive_the_loss_of_the_only_instance(connect: Connect) -> None:
    m = connect()
    with m.subscribe("a", queue="q", prefetch=2) as stream:
        for number in range(4):
            m.publish("a", b"%d" % number, retain=True).result(PATIENCE)
        drop_and_reconnect(m)
        assert receive(stream, 4) == [b"0", b"1", b"2", b"3"]
    with m.subscribe("a") as stream:
        assert receive(stream, 1) == [b"3"]


@pytest.mark.usefixtures("virtual_clock")
def test_messages_held_back_at_a_loss_are_not_delivered_twice(connect: Connect) -> None:
    m = connect()
    other = connect(m.runtime.get_runtime_dto().connection_uri)
    with m.subscribe("a", queue="q", auto_acknowledge=True, buffer_size=2, prefetch=2) as stream:
        for number in range(5):
            other.publish("a", b"%d" % number).result(PATIENCE)
        drop_and_reconnect(m)
        assert receive(stream, 5) == [b"0", b"1", b"2", b"3", b"4"]
        with pytest.raises(DeadlineError):
            stream.receive(5.0)


def test_observers_of_a_closed_instance_are_told_so_and_not_of_an_old_loss(connect: Connect) -> None:
    m = connect()
    stream = m.subscribe("a")
    stream.subscribe()
    drop_and_reconnect(m)
    m.close()
    told: Recorder[Message] = Recorder()
    stream.subscribe(told)
    assert isinstance(told.wait_error(), ClosedError)


# --- contradictions


def test_a_private_queue_that_must_not_be_made_is_refused(connect: Connect) -> None:
    with pytest.raises(ArgumentError, match="autocreate"):
        connect().subscribe("a", autocreate=False).close()


@table("pattern", ["dead", "#", "+"])
def test_a_dead_letter_channel_that_leads_back_is_refused(connect: Connect, pattern: str) -> None:
    with pytest.raises(ArgumentError, match="dead"):
        connect().subscribe(pattern, dead_letter_channel="dead").close()


# --- every call from within every callback


def subscribe_and_receive(m: Messaging, _: MessageStream) -> None:
    with m.subscribe("b") as inner:
        m.publish("b", b"nested").result(PATIENCE)
        assert inner.receive(PATIENCE).payload == b"nested"


def pause_and_resume(_: Messaging, stream: MessageStream) -> None:
    stream.pause()
    stream.resume()


ACTIONS: dict[str, Callable[[Messaging, MessageStream], object]] = {
    "publish": lambda m, _: m.publish("b", b"nested"),
    "publish_and_wait": lambda m, _: m.publish("b", b"nested").result(PATIENCE),
    "subscribe": lambda m, _: m.subscribe("b").subscribe(lambda _: None),
    "subscribe_and_receive": subscribe_and_receive,
    "observe_again": lambda _, stream: stream.subscribe(lambda _: None, lambda _: None),
    "pause_and_resume": pause_and_resume,
    "look": lambda m, _: m.runtime.get_runtime_dto(),
    "close_stream": lambda _, stream: stream.close(),
    "close_instance": lambda m, _: m.close(),
}


PLACES = ("observer", "filter", "handler", "post", "validator", "operator", "completed", "error", "promise", "listener")


@table("action", [*ACTIONS])
@table("place", [*PLACES, "pull"])
def test_every_call_in_every_callback(
    connect: Connect, caplog: pytest.LogCaptureFixture, place: str, action: str
) -> None:
    """It ends soon, raises nothing but our errors, and leaves nothing behind."""
    m = connect(close_timeout=PATIENCE)
    over: Recorder[str] = Recorder()
    problems: list[BaseException] = []
    streams: list[MessageStream] = []

    def act(*_: object) -> bool:
        if over:
            return True
        try:
            ACTIONS[action](m, streams[0])
        except MessagingError as error:
            if not isinstance(error, ClosedError):
                problems.append(error)
        except BaseException as error:  # noqa: BLE001  # shown at the end
            problems.append(error)
        over(action)
        return True

    class Model(BaseModel):
        @field_validator("*", mode="before")
        @classmethod
        def check(cls, value: Any) -> Any:
            return value

        def model_post_init(self, context: Any) -> None:
            act()

    acknowledge = m.acknowledge_context_builder()
    if place in ("filter", "pull"):
        acknowledge.filter_acknowledge(act)
    elif place == "handler":
        acknowledge.handle_acknowledge(act)
    elif place == "post":
        acknowledge.post_acknowledge(act)
    direct = place in ("filter", "pull", "handler", "post")
    builder = acknowledge.message_context_builder() if direct else m.context_builder()
    context = builder.channel("a").extension_entry("queue", "q").build_context()
    stream = m.subscription.subscribe(context, model=Model if place == "validator" else None)
    streams.append(stream)
    if place == "listener":

        def listen(event: ServiceEvent) -> None:
            if event.kind is ServiceEventKind.UNREGISTERING:
                act()

        m.services.add_listener(listen, type(m.publisher))
    if place == "pull":
        stream.ready.result(PATIENCE)
    elif place == "operator":
        stream.pipe(ops.map(act)).subscribe(lambda _: None, problems.append)
    else:
        callbacks: dict[str, Callable[[Message], object]] = {
            "observer": act,
            "post": Message.acknowledge,
            "error": refuse,
        }
        stream.subscribe(
            callbacks.get(place, lambda _: None),
            act if place == "error" else problems.append,
            act if place == "completed" else None,
        )
    promise = m.publish("a", {})
    if place == "promise":
        promise.add_done_callback(act)
    promise.result(PATIENCE)
    if place == "pull":
        try:
            stream.receive(PATIENCE)
        except ClosedError:
            assert action in ("close_stream", "close_instance")
    if place == "completed":
        stream.close()
    elif place == "listener":
        m.close()
    over.wait_for(1)
    m.close()
    assert problems == []
    assert m.runtime.get_runtime_dto().publisher.pending == 0
    assert m.runtime.get_runtime_dto().subscriptions == ()
    assert [record for record in caplog.records if record.levelno >= logging.ERROR] == []
