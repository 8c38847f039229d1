"""The connection: made, lost, made again; and its effects on subscriptions and streams."""

from __future__ import annotations

import asyncio
import itertools
import logging
import re
from typing import Any

import pytest

from messaging.adapter import Sink
from messaging.errors import (
    AuthenticationError,
    ClosedError,
    ConnectFailedError,
    ConnectionLostError,
    DeadlineError,
    SubscriptionRefusedError,
)
from messaging.execution import Backoff, clock
from messaging.instance import Messaging
from messaging.model import SubscriptionSpec
from messaging.testing.tables import table
from messaging.testing.waiting import PATIENCE, Recorder, eventually, eventually_async, observed, subscribed
from tests.connection.test_state import start
from tests.doubles.fake import FakeBroker, Gate, settle_loop
from tests.doubles.fixtures import Connect
from tests.threads import together


def state(m: Messaging) -> str:
    return m.runtime.get_runtime_dto().connection.state


# --- the first connection


@table("face", ["blocking", "async with"])
def test_a_refused_connection_is_an_error_of_connect_and_leaves_nothing(connect: Connect, face: str) -> None:
    broker = FakeBroker()
    broker.errors["open"].append(AuthenticationError("wrong password for 'me'"))

    async def enter() -> None:
        async with connect(broker, name="one"):
            raise AssertionError("entered")

    with pytest.raises(AuthenticationError, match="wrong password for 'me'"):
        connect(broker, name="one") if face == "blocking" else asyncio.run(enter())
    assert broker.closed == 1
    with connect(broker, name="one") as m:  # the name is free again
        assert m.publish("a", b"1").result(PATIENCE) is None


@pytest.mark.usefixtures("virtual_clock")
def test_no_answer_within_the_connect_timeout_is_an_error(broker: FakeBroker, connect: Connect) -> None:
    broker.gates["open"].close()
    started = clock.monotonic()
    with pytest.raises(ConnectFailedError, match=rf"no connection to {broker.url} within 60 s"):
        connect(broker, connect_timeout=60.0)
    assert 60.0 <= clock.monotonic() - started < 61.0
    assert broker.gates["open"].waiting == 0  # the attempt was cancelled


def test_a_defect_of_the_adapter_is_a_typed_error_with_its_cause(broker: FakeBroker, connect: Connect) -> None:
    broker.errors["open"].append(ZeroDivisionError("oops"))
    with pytest.raises(ConnectFailedError, match="ZeroDivisionError") as caught:
        connect(broker)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_on_a_thread_with_an_event_loop_connect_returns_at_once(broker: FakeBroker, connect: Connect) -> None:
    broker.gates["open"].close()

    async def main() -> None:
        m = connect(broker)
        assert state(m) == "connecting"
        promise = m.publish("a", b"early")
        stream = m.subscribe("b")
        broker.gates["open"].open()
        assert await m is m
        await stream.ready
        await promise
        await m.aclose()

    asyncio.run(main())
    assert broker.payloads == [b"early"]


def test_the_first_connection_failing_fails_everything_that_waits_for_it(broker: FakeBroker, connect: Connect) -> None:
    broker.gates["open"].close()
    refusal = AuthenticationError("no")
    broker.errors["open"].append(refusal)

    async def main() -> None:
        m = connect(broker)
        promise = m.publish("a", b"early")
        stream = m.subscribe("b")
        recorder: Recorder[Any] = Recorder()
        stream.subscribe(recorder)
        settle_loop()
        broker.gates["open"].open()
        with pytest.raises(AuthenticationError):
            await m
        with pytest.raises(ClosedError):
            await promise
        with pytest.raises(AuthenticationError):
            await stream.ready
        await eventually_async(lambda: recorder.error is refusal)
        with pytest.raises(ClosedError):
            m.publish("a", b"late")
        with pytest.raises(ClosedError):
            m.subscribe("a")

    asyncio.run(main())


def test_cancelling_the_wait_for_a_connection_closes_the_instance(broker: FakeBroker, connect: Connect) -> None:
    broker.gates["open"].close()

    async def main() -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await connect(broker)

    asyncio.run(main())
    eventually(lambda: broker.closed == 1, "the adapter closed")
    assert broker.gates["open"].waiting == 0


def test_closing_while_connecting_ends_the_attempt(broker: FakeBroker, connect: Connect) -> None:
    broker.gates["open"].close()

    m = start(connect, broker)
    eventually(lambda: broker.gates["open"].waiting == 1)
    m.close(0.1)
    assert broker.gates["open"].waiting == 0
    assert isinstance(m.ready.exception(0), ClosedError)
    assert state(m) == "closed"


def test_a_defect_in_setting_up_the_first_connection_does_not_hang_connect(
    broker: FakeBroker, connect: Connect, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def explode(self: Messaging) -> None:
        raise ZeroDivisionError("a defect")

    monkeypatch.setattr(Messaging, "_connected", explode)

    async def main() -> None:
        async with asyncio.timeout(PATIENCE):
            m = await connect(broker)
            await m.publish("a", b"1")

    asyncio.run(main())
    assert "a defect" in caplog.text


# --- losing it


def told(caplog: pytest.LogCaptureFixture, pattern: str) -> list[int]:
    """The levels of the lines about the connection that match."""
    return [each.levelno for each in caplog.records if re.fullmatch(pattern, each.getMessage())]


def test_the_log_says_why_a_connection_is_lost_when_it_is_tried_again_and_when_it_is_back(
    broker: FakeBroker, connect: Connect, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    connect(broker, name="plant")
    where = rf"fake 'plant' \({broker.url.removeprefix('fake://')}\)"
    assert told(caplog, f"{where}: connected") == [logging.INFO]
    broker.errors["open"].append(ConnectFailedError("still down"))
    broker.lose("the cable was cut")
    broker.wait_open(2)
    seconds = r"\d+\.\d s"
    back = f"{where}: connected again after {seconds}"
    eventually(lambda: told(caplog, back))
    assert told(caplog, f"{where}: connection lost: the cable was cut; reconnecting in {seconds}") == [logging.WARNING]
    assert told(caplog, f"{where}: cannot reconnect: still down; trying again in {seconds}") == [logging.INFO]
    assert told(caplog, back) == [logging.INFO]
    assert told(caplog, f"{where}: connected") == [logging.INFO]  # the first time only


def test_the_log_warns_once_of_a_broker_that_refuses_to_have_the_client_back(
    broker: FakeBroker, connect: Connect, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    connect(broker, reconnect_max=0.02)
    broker.errors["open"] += [
        AuthenticationError("the account is locked"),
        AuthenticationError("the account is locked"),
    ]
    broker.lose_and_reconnect()
    refused = ".*: cannot reconnect: the account is locked; trying again in .* s"
    assert told(caplog, refused) == [logging.WARNING, logging.INFO]


def test_a_loss_right_after_connecting_is_a_loss(broker: FakeBroker, m: Messaging) -> None:
    for _ in range(10):
        broker.lose_and_reconnect()
    assert m.publish("a", b"1").result(PATIENCE) is None


def test_a_loss_within_open_is_a_loss(broker: FakeBroker, m: Messaging) -> None:
    """The adapter calls ``lost`` after it connected and before the core learned of it."""
    broker.go_down()
    eventually(lambda: broker.gates["open"].waiting == 1)
    adapter = broker.adapter
    original = adapter.open

    async def open_and_lose(lost: object) -> bool:
        resumed = await original(lost)  # type: ignore[arg-type]
        adapter.open = original  # type: ignore[method-assign]
        broker.connected = False
        lost(ConnectionLostError("at once"))  # type: ignore[operator]
        return resumed

    broker.errors["open"].append(ConnectFailedError("this attempt was under way already"))
    adapter.open = open_and_lose  # type: ignore[method-assign]
    broker.gates["open"].open()
    broker.wait_open(3)
    assert m.publish("a", b"1").result(PATIENCE) is None


def test_delays_between_attempts_grow_and_stay_within_their_bounds() -> None:
    found = [*itertools.islice(Backoff(0.5, 4.0), 200)]
    assert 0 <= found[0] <= 0.5
    assert all(0.5 <= delay <= 4.0 for delay in found[1:])
    assert max(found) > 2.0
    assert len(set(found)) > 20  # jitter
    assert all(delay <= 3.0 for delay in itertools.islice(Backoff(3.0, 1.0), 50))


@table(
    "stable, refusals, expected",
    [(3600.0, 0, [0, 1, 2]), (-1.0, 0, [0, 0, 0]), (-1.0, 4, [0, 1, 2, 3, 4, 0, 0])],
    ids=["connections that do not last", "connections that last", "attempts that fail"],
)
def test_delays_grow_until_a_connection_lasts(
    connect: Connect, monkeypatch: pytest.MonkeyPatch, stable: float, refusals: int, expected: list[int]
) -> None:
    broker = FakeBroker()
    taken: list[int] = []

    class Counted:
        """A series of delays that take no time; notes the position of each in its series."""

        def __init__(self, *_: object) -> None:
            self.reset()

        def reset(self) -> None:
            self.numbers = itertools.count()

        def __next__(self) -> float:
            taken.append(next(self.numbers))
            return 0.0

    monkeypatch.setattr("messaging.connection.hosts.Backoff", Counted)
    monkeypatch.setattr("messaging.connection.opening.STABLE_SECONDS", stable)
    connect(broker)
    taken.clear()
    broker.errors["open"].extend([ConnectFailedError("not now")] * refusals)
    for _ in range(3):
        broker.lose_and_reconnect()
        settle_loop()
    assert taken == expected


def test_closing_while_reconnecting_ends_the_attempts(broker: FakeBroker, m: Messaging) -> None:
    stream = m.subscribe("a")
    stream.ready.result(PATIENCE)
    broker.go_down()
    eventually(lambda: broker.gates["open"].waiting == 1)
    m.close()
    assert broker.gates["open"].waiting == 0
    assert broker.closed == 1
    assert [*stream] == []


@table("how", ["hangs", "raises"])
@pytest.mark.usefixtures("virtual_clock")
def test_an_adapter_that_hangs_or_raises_in_close_is_logged_and_does_not_hang_close(
    connect: Connect, caplog: pytest.LogCaptureFixture, how: str
) -> None:
    broker = FakeBroker()
    m = connect(broker)
    if how == "hangs":
        broker.gates["close"].close()
    else:
        broker.errors["close"].append(RuntimeError("a defect"))
    started = clock.monotonic()
    m.close(0.1)
    assert clock.monotonic() - started < 10
    assert "failed to close" in caplog.text
    assert state(m) == "closed"


def test_closing_from_many_threads_at_once_closes_once(broker: FakeBroker, connect: Connect) -> None:
    for _ in range(10):
        m = connect(broker)
        closed_before = broker.closed
        together(*[m.close] * 8)
        assert broker.closed == closed_before + 1
        m.close()


# --- subscriptions


def test_a_resumed_session_is_not_subscribed_again(broker: FakeBroker, connect: Connect) -> None:
    broker.resumes = True
    m = connect(broker)
    received = subscribed(m, "a")
    broker.lose_and_reconnect()
    m.publish("b", b"").result(PATIENCE)  # all subscriptions come before
    assert broker.calls.count("subscribe") == 1
    broker.deliver(b"1")
    received.wait_for(1)
    assert received.payloads == [b"1"]


def test_subscriptions_come_before_publishing_after_a_loss(broker: FakeBroker, m: Messaging) -> None:
    """So that the reply to a request that waited in the outbox is not missed."""
    m.subscribe("a").subscribe(print)
    broker.go_down()
    promise = m.publish("a", b"request")
    broker.calls.clear()
    broker.gates["open"].open()
    promise.result(PATIENCE)
    assert broker.calls.index("subscribe") < broker.calls.index("publish")


@table("reported", ["before the next connection", "after it"])
def test_a_loss_while_subscribing_is_made_good(broker: FakeBroker, m: Messaging, reported: str) -> None:
    """The adapter may report it late: the next connection is there before the subscribe of the last one has failed."""
    broker.gates["subscribe"].close()
    stream = m.subscribe("a")
    eventually(lambda: broker.gates["subscribe"].waiting == 1)
    if reported == "after it":
        broker.lose_and_reconnect()
    else:
        broker.go_down()
    settle_loop()
    broker.gates["subscribe"].open()
    settle_loop()
    broker.gates["open"].open()
    try:
        assert stream.ready.result(PATIENCE) is None
        assert len(broker.live) == 1
    finally:
        stream.close().result(PATIENCE)


@table("resumes", [True, False])
def test_a_subscription_that_was_answered_before_a_loss_is_kept_by_a_resumed_session(
    broker: FakeBroker, connect: Connect, monkeypatch: pytest.MonkeyPatch, resumes: bool
) -> None:
    """The core may see the answer late. To end the subscription and make it again would lose messages in between."""
    broker.resumes = resumes
    m = connect(broker)
    adapter, answered = broker.adapter, Gate()
    original = adapter.subscribe
    answered.close()

    async def subscribe(spec: SubscriptionSpec, sink: Sink) -> Any:
        handle = await original(spec, sink)
        await answered.passed()
        return handle

    monkeypatch.setattr(adapter, "subscribe", subscribe)
    stream = m.subscribe("a")
    eventually(lambda: answered.waiting == 1)
    broker.lose_and_reconnect()
    settle_loop()
    answered.open()
    recorder = observed(stream)
    assert (len(broker.handles), len(broker.unsubscribed)) == ((1, 0) if resumes else (2, 1))
    broker.deliver(b"1")
    recorder.wait_for(1)
    assert recorder.payloads == [b"1"]


@pytest.mark.usefixtures("virtual_clock")
def test_a_subscription_the_broker_never_answers_does_not_block_publishing(
    broker: FakeBroker, connect: Connect
) -> None:
    m = connect(broker, connect_timeout=3.0)
    m.subscribe("a").subscribe(print)
    broker.gates["subscribe"].close()
    broker.lose()
    assert m.publish("b", b"1", timeout=PATIENCE).result(PATIENCE) is None
    broker.gates["subscribe"].open()


def test_an_adapter_that_fails_to_subscribe_ends_the_stream_and_nothing_else(
    broker: FakeBroker, m: Messaging, caplog: pytest.LogCaptureFixture
) -> None:
    broker.errors["subscribe"].append(KeyError("a defect"))
    stream = m.subscribe("a")
    error = stream.ready.exception(PATIENCE)
    assert isinstance(error, SubscriptionRefusedError)
    assert isinstance(error.__cause__, KeyError)
    assert "failed to subscribe" in caplog.text
    assert m.publish("a", b"1").result(PATIENCE) is None


@table("how", ["cancelled", "refused after reconnecting"])
def test_a_subscription_the_broker_ends_tells_its_stream_the_reason(broker: FakeBroker, m: Messaging, how: str) -> None:
    recorder = subscribed(m, "a")
    reason = SubscriptionRefusedError("queue deleted")
    if how == "cancelled":
        broker.end_subscription(reason)
    else:
        broker.errors["subscribe"].append(reason)
        broker.lose()
    assert recorder.wait_error() is reason
    broker.lose_and_reconnect()
    m.publish("b", b"").result(PATIENCE)
    assert broker.live == []


def test_a_stream_closed_while_subscribing_is_unsubscribed_once_the_broker_answered(
    broker: FakeBroker, m: Messaging
) -> None:
    broker.gates["subscribe"].close()
    stream = m.subscribe("a")
    eventually(lambda: broker.gates["subscribe"].waiting == 1)
    stream.close().result(PATIENCE)
    assert isinstance(stream.ready.exception(PATIENCE), ClosedError)
    broker.gates["subscribe"].open()
    eventually(lambda: len(broker.unsubscribed) == 1)
    assert broker.live == []


def test_messages_that_arrive_before_the_subscription_is_confirmed_are_not_lost(
    broker: FakeBroker, m: Messaging
) -> None:
    """``deliver`` may be called before ``subscribe`` returns (retained messages)."""
    adapter = broker.adapter
    original = adapter.subscribe

    async def subscribe(spec: object, sink: object) -> object:
        handle = await original(spec, sink)  # type: ignore[arg-type]
        from messaging.model import Incoming

        handle.sink.deliver([Incoming(b"retained", "a")])
        return handle

    adapter.subscribe = subscribe  # type: ignore[method-assign, assignment]
    stream = m.subscribe("a")
    assert stream.receive(PATIENCE).payload == b"retained"


def test_an_unsubscribe_that_hangs_does_not_hang_close_and_one_that_raises_is_logged(
    broker: FakeBroker, connect: Connect, caplog: pytest.LogCaptureFixture
) -> None:
    m = connect(broker, close_timeout=0.2)
    stream = m.subscribe("a")
    stream.ready.result(PATIENCE)
    broker.errors["unsubscribe"].append(RuntimeError("a defect"))
    stream.close().result(PATIENCE)
    assert "failed to unsubscribe" in caplog.text
    assert [*stream] == []
    m.subscribe("a").subscribe(print)
    broker.gates["unsubscribe"].close()
    m.close()


@table("when", ["before the subscription is there", "before a loss"])
def test_a_paused_stream_stays_paused(broker: FakeBroker, m: Messaging, when: str) -> None:
    if when != "before a loss":
        broker.gates["subscribe"].close()
    stream = m.subscribe("a")
    if when == "before a loss":
        stream.ready.result(PATIENCE)
    stream.pause()
    settle_loop()
    if when == "before a loss":
        assert broker.live[0].paused
        broker.lose_and_reconnect()
    broker.gates["subscribe"].open()
    broker.wait_subscribed()
    try:
        eventually(lambda: broker.live[0].paused, "the subscription paused")
        stream.resume()
        eventually(lambda: not broker.live[0].paused)
    finally:
        stream.close().result(PATIENCE)


@pytest.mark.usefixtures("virtual_clock")
def test_a_stream_entered_while_the_broker_is_silent_has_a_deadline(broker: FakeBroker, connect: Connect) -> None:
    m = connect(broker, timeout=0.1)
    broker.gates["subscribe"].close()
    with pytest.raises(DeadlineError, match=r"subscribing to 'a' took longer than 0\.1 s"), m.subscribe("a"):
        raise AssertionError("entered")
    broker.gates["subscribe"].open()
    eventually(lambda: len(broker.unsubscribed) == 1, "unsubscribed: no reference is left to close it by")


@table("resumed", [False, True])
def test_a_subscription_counts_as_connected_once_it_is_subscribed_again(
    broker: FakeBroker, connect: Connect, resumed: bool
) -> None:
    """From the moment in which the state is ``connected``: who waits for both would publish into nothing."""
    m = connect(broker)
    m.on("a", print).ready.result(PATIENCE)
    connection = m._connection
    told, seen = connection.on_connected, Recorder[tuple[str, bool]]()

    def on_connected() -> None:
        dto = m.runtime.get_runtime_dto()
        seen((dto.connection.state, dto.subscriptions[0].channel.connected))
        told()

    connection.on_connected = on_connected
    broker.resumes = resumed
    broker.gates["subscribe"].close()
    broker.lose()
    seen.wait_for(1)
    assert [*seen] == [("connected", resumed)]
    broker.gates["subscribe"].open()
    eventually(lambda: m.runtime.get_runtime_dto().subscriptions[0].channel.connected)
