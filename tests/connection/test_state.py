"""The state of the connection, as an Observable and in the DTO (MSG060)."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest
from reactivex import operators as ops

from messaging import ArgumentError, AuthenticationError, ConnectFailedError, ConnectionLostError, Messaging
from messaging.connection import ConnectionState, ConnectionStates
from messaging.errors import TakenOverError
from messaging.testing.tables import table
from messaging.testing.waiting import PATIENCE, Recorder, eventually
from tests.doubles.fake import FakeBroker, on_loop, settle_loop
from tests.doubles.fixtures import Connect


class States(Recorder[ConnectionState]):
    """An observer."""

    def __init__(self) -> None:
        super().__init__()
        self.threads: set[str] = set()

    def on_next(self, item: ConnectionState) -> None:
        self.threads.add(threading.current_thread().name)
        super().on_next(item)

    @property
    def names(self) -> list[str]:
        return [state.name for state in self]

    def wait(self, name: str, count: int = 1) -> ConnectionState:
        eventually(lambda: self.names.count(name) >= count, lambda: f"{name}; there were {self.names}")
        return [state for state in self if state.name == name][count - 1]


async def _start(connect: Connect, url: str | FakeBroker, settings: dict[str, Any]) -> Messaging:
    return connect(url, **settings)


def start(connect: Connect, url: str | FakeBroker, **settings: Any) -> Messaging:
    """An instance whose connection may not be there yet."""
    return asyncio.run(_start(connect, url, settings))


def observe(m: Messaging) -> States:
    states = States()
    m.connection_state.subscribe(states)
    return states


def test_an_observer_is_told_the_current_state_then_every_change_then_completion(
    broker: FakeBroker, m: Messaging
) -> None:
    states = observe(m)
    first = states.wait("connected")
    assert first.cause is None
    assert first.since > 0
    broker.lose("the cable was cut")
    lost = states.wait("reconnecting")
    assert isinstance(lost.cause, ConnectionLostError)
    assert "the cable was cut" in str(lost)
    states.wait("connected", 2)
    assert m.connection_state.value.name == "connected"
    m.close()
    states.wait_completed()
    assert states.names == ["connected", "reconnecting", "connected", "closed"]
    assert not any(name in ("messaging-engine", "MainThread") for name in states.threads)


def test_after_the_end_an_observer_is_told_so(m: Messaging) -> None:
    m.close()
    states = observe(m)
    states.wait_completed()
    assert states.names == ["closed"]


def test_connecting_and_refused_tell_why(broker: FakeBroker, connect: Connect) -> None:
    broker.errors["open"].extend([ConnectFailedError("not there"), AuthenticationError("no entry", code=134)])
    broker.gates["open"].close()

    m = start(connect, broker, retry_connect=True, reconnect_min=0.01, reconnect_max=0.02)
    states = observe(m)
    assert states.wait("connecting").cause is None
    broker.gates["open"].open()
    assert "not there" in str(states.wait("connecting", 2).cause)
    assert "no entry" in str(states.wait("refused").cause)
    states.wait("connected")
    m.ready.result(PATIENCE)
    assert m.runtime.get_runtime_dto().connection.cause == "no entry"  # the last trouble
    assert m.connection_state.value.cause is None


@table(
    "error, state",
    [
        (AuthenticationError("no entry"), "refused"),
        (ConnectFailedError("not now", code=0x88), "refused"),
        (ConnectFailedError("not there"), "reconnecting"),
    ],
)
def test_a_broker_that_says_no_to_a_reconnect_is_told_from_one_that_is_not_there(
    connect: Connect, error: ConnectFailedError, state: str
) -> None:
    broker = FakeBroker()
    m = connect(broker, reconnect_min=0.01, reconnect_max=0.02)
    states = observe(m)
    states.wait("connected")
    broker.errors["open"].append(error)
    broker.lose()
    eventually(lambda: any(each.cause is error for each in states))
    assert next(each for each in states if each.cause is error).name == state
    states.wait("connected", 2)


def test_a_client_that_was_taken_over_waits_before_it_reconnects(
    broker: FakeBroker, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    m = connect(broker, reconnect_min=0.01, reconnect_max=30)
    states = observe(m)
    ranges: list[tuple[float, float]] = []

    def no_time(low: float, high: float) -> float:
        ranges.append((low, high))
        return 0.0

    for module in ("execution.backoff", "connection.hosts"):
        monkeypatch.setattr(f"messaging.{module}.jitter", no_time)
    broker.lose(TakenOverError("another client has this id", code=0x8E))
    states.wait("refused")
    states.wait("connected", 2)
    assert (15, 30) in ranges


def test_the_state_is_degraded_while_the_broker_is_impaired(broker: FakeBroker, m: Messaging) -> None:
    states = observe(m)
    impaired = broker.events.impaired
    cause = ConnectFailedError("out of memory")
    on_loop(impaired, cause)
    assert states.wait("degraded").cause is cause
    assert m.connection_state.value.is_up
    dto = m.runtime.get_runtime_dto()
    assert dto.connection.state == "degraded"
    with m.subscribe("a") as stream:  # it is connected all the same
        stream.ready.result(PATIENCE)
        assert m.runtime.get_runtime_dto().subscriptions[0].channel.connected
    on_loop(impaired, None)
    states.wait("connected", 2)
    on_loop(impaired, cause)
    states.wait("degraded", 2)
    broker.lose()  # with the impaired connection
    states.wait("connected", 3)
    assert m.connection_state.value.cause is None


def test_subscriptions_that_are_not_restored_in_time_are_degraded(broker: FakeBroker, connect: Connect) -> None:
    m = connect(broker, connect_timeout=0.5)
    states = observe(m)
    with m.subscribe("a") as stream:
        stream.ready.result(PATIENCE)
        states.wait("connected")
        broker.gates["subscribe"].close()
        broker.lose()
        assert "1 subscriptions are not restored" in str(states.wait("degraded").cause)
        broker.gates["subscribe"].open()
        states.wait("connected", 3)


def test_an_observer_that_raises_is_not_called_again_and_others_go_on(
    broker: FakeBroker, m: Messaging, caplog: pytest.LogCaptureFixture
) -> None:
    calls: list[Any] = []

    def fail(state: ConnectionState) -> None:
        calls.append(state)
        raise ValueError("mine")

    m.connection_state.subscribe(fail)
    states = observe(m)
    broker.lose()
    states.wait("connected", 2)
    settle_loop()
    eventually(lambda: "connection states: an observer raised" in caplog.text)
    assert len(calls) == 1


def test_a_slow_observer_misses_the_oldest_states_and_does_not_hold_up_the_connection(
    broker: FakeBroker, m: Messaging
) -> None:
    release = threading.Event()
    slow = States()
    held = threading.Event()

    def hold(state: ConnectionState) -> None:
        held.set()
        release.wait(PATIENCE)
        slow.on_next(state)

    m.connection_state.subscribe(hold)
    assert held.wait(PATIENCE)
    for number in range(200):
        on_loop(broker.events.impaired, ConnectFailedError(str(number)))
    release.set()
    eventually(lambda: slow and str(slow[-1].cause) == "199")
    assert [str(state.cause) for state in slow[1:]] == [str(number) for number in range(136, 200)]


def test_a_disposed_observer_is_told_nothing_more(broker: FakeBroker, m: Messaging) -> None:
    gone, stays = States(), States()
    disposable = m.connection_state.subscribe(gone)
    m.connection_state.subscribe(stays)
    gone.wait("connected")
    disposable.dispose()
    broker.lose()
    stays.wait("connected", 2)
    assert gone.names == ["connected"]


def test_operators_work_on_it(broker: FakeBroker, m: Messaging) -> None:
    names: Recorder[str] = Recorder()
    m.connection_state.pipe(ops.map(lambda state: state.name), ops.take(3)).subscribe(names)
    names.wait_for(1)
    broker.lose()
    names.wait_completed()
    assert names == ["connected", "reconnecting", "connected"]


def test_only_observers_and_callables_may_subscribe(broker: FakeBroker, connect: Connect) -> None:
    states: ConnectionStates = connect(broker).connection_state
    with pytest.raises(ArgumentError, match="int is neither"):
        states.subscribe(7)
