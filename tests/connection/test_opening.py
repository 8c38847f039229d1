"""Instances behind several hosts: which host they connect to, what they tell of it, and what waits meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from messaging.connection import hosts as rules
from messaging.connection.opening import addresses_of
from messaging.errors import (
    AuthenticationError,
    ConnectFailedError,
    CredentialsError,
    InvalidOptionError,
    InvalidUrlError,
    PlannedLossError,
    RedirectedError,
)
from messaging.execution import clock, engine
from messaging.instance import Messaging
from messaging.model import Endpoint, Host
from messaging.testing.tables import table
from messaging.testing.waiting import PATIENCE, eventually, eventually_async
from tests.connection.test_state import observe, start
from tests.doubles.fake import FakeBroker, brokers
from tests.doubles.fixtures import Connect

#: delays that no test waits for
NEVER = {"reconnect_min": 3 * PATIENCE, "reconnect_max": 3 * PATIENCE}

Pool = Callable[[int], list[FakeBroker]]


@pytest.fixture
def pool() -> Iterator[Pool]:
    """``pool(3)``: so many brokers of one URL."""
    made: list[FakeBroker] = []

    def make(count: int) -> list[FakeBroker]:
        new = [FakeBroker("pool") for _ in range(count)]
        made.extend(new)
        return new

    yield make
    for broker in made:
        brokers.pop(broker.name, None)


@pytest.fixture(autouse=True)
def addresses(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[str]]:
    """The addresses of names, instead of those of the machine's resolver; further names have none."""
    known: dict[str, list[str]] = {}

    async def addresses_of(name: str) -> list[str]:
        if name not in known:
            raise OSError("no such name")
        return known[name]

    monkeypatch.setattr("messaging.connection.opening.addresses_of", addresses_of)
    return known


def url(*hosts: FakeBroker) -> str:
    return f"pool://{','.join(broker.name for broker in hosts)}"


def down(*hosts: FakeBroker, count: int = 99) -> None:
    for broker in hosts:
        broker.errors["open"].extend(ConnectFailedError(f"{broker.name} is down") for _ in range(count))


def host_of(m: Messaging) -> str | None:
    assert m.runtime.get_runtime_dto().connection.host == m.connection_state.value.host
    return m.connection_state.value.host


# --- the first connection


def test_the_first_host_that_answers_is_connected_to(pool: Pool, connect: Connect) -> None:
    a, b, c = pool(3)
    down(a)
    m = connect(url(a, b, c))
    assert host_of(m) == b.name
    assert (a.opened, b.opened, c.opened) == (0, 1, 0)
    assert b.endpoints == [Endpoint(Host(b.name))]
    m.publish("t", b"x").result(PATIENCE)
    assert b.payloads == [b"x"]


def test_shuffled_hosts_are_all_candidates(pool: Pool, connect: Connect, monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = pool(2)
    monkeypatch.setattr(rules, "shuffle", list.reverse)
    assert host_of(connect(url(a, b), host_order="shuffled")) == b.name
    assert host_of(connect(url(a, b), host_order="ordered")) == a.name


def test_an_unknown_order_is_refused(pool: Pool, connect: Connect) -> None:
    with pytest.raises(InvalidOptionError, match="'host_order'"):
        connect(url(*pool(2)) + "?host_order=random")


def test_if_no_host_connects_the_error_names_what_each_said(pool: Pool, connect: Connect) -> None:
    a, b = pool(2)
    down(a, b)
    with pytest.raises(ConnectFailedError, match=rf"any host of {a.name},{b.name}: {a.name} is down; {b.name} is down"):
        connect(url(a, b))
    assert a.calls.count("open") == b.calls.count("open") == 1


def test_refused_credentials_are_the_error_if_no_host_connects_and_keep_from_no_other(
    pool: Pool, connect: Connect
) -> None:
    a, b = pool(2)
    a.errors["open"] += [AuthenticationError("wrong password", code=134)] * 2
    down(b, count=1)
    with pytest.raises(AuthenticationError, match="wrong password") as caught:
        connect(url(a, b))
    assert caught.value.code == 134
    assert host_of(connect(url(a, b))) == b.name


def test_a_host_that_is_slow_is_tried_again_with_the_whole_connect_timeout(pool: Pool, connect: Connect) -> None:
    """Its share of the deadline of messages ends the first attempt: a third of a second here."""
    a, b = pool(2)
    down(b)
    a.gates["open"].close()
    m = start(connect, url(a, b), timeout=0.1, connect_timeout=PATIENCE)
    eventually(lambda: b.calls.count("open") == 1)
    a.gates["open"].open()
    m.ready.result(PATIENCE)
    assert host_of(m) == a.name


def test_an_adapter_that_is_told_no_host_takes_urls_with_one(connect: Connect, broker: FakeBroker) -> None:
    assert host_of(connect(broker)) == broker.name
    with pytest.raises(InvalidUrlError, match="fake URL has 2 hosts; fake:// connects to one"):
        connect(f"fake://{broker.name},other")
    with pytest.raises(InvalidUrlError, match="memory URL has 2 hosts"):
        connect("memory://a,b")


def test_with_retry_connect_hosts_are_tried_until_one_answers(pool: Pool, connect: Connect) -> None:
    a, b = pool(2)
    down(a)
    down(b, count=3)
    m = start(connect, url(a, b), retry_connect=True)
    m.ready.result(PATIENCE)
    assert host_of(m) == b.name


# --- losses


def test_after_a_loss_the_next_host_is_connected_to_at_once(
    pool: Pool, connect: Connect, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    a, b, c = pool(3)
    m = connect(url(a, b, c), name="plant", **NEVER)
    states = observe(m)
    stream = m.subscribe("t")
    stream.ready.result(PATIENCE)
    down(b)
    a.lose("the cable was cut")
    c.wait_open()
    c.wait_subscribed()
    states.wait("connected", 2)
    assert [(state.name, state.host) for state in states] == [
        ("connected", a.name),
        ("reconnecting", a.name),
        ("reconnecting", b.name),
        ("connected", c.name),
    ]
    m.publish("t", b"x").result(PATIENCE)
    assert c.payloads == [b"x"]
    lines = [re.sub(r"\d+\.\d s", "N s", record.getMessage()) for record in caplog.records]
    for line in (
        f"pool 'plant' ({a.name}): connected",
        f"pool 'plant' ({a.name}): connection lost: the cable was cut; connecting to {b.name} in N s",
        f"pool 'plant' ({b.name}): cannot reconnect: {b.name} is down; connecting to {c.name} in N s",
        f"pool 'plant' ({c.name}): connected again after N s",
    ):
        assert line in lines
    stream.close().result(PATIENCE)


@pytest.mark.usefixtures("virtual_clock")
def test_a_host_that_hangs_leaves_time_for_messages_at_the_next(pool: Pool, connect: Connect) -> None:
    a, b, c = pool(3)
    m = connect(url(a, b, c), timeout=PATIENCE, connect_timeout=3 * PATIENCE, **NEVER)
    b.gates["open"].close()
    started = clock.monotonic()
    a.lose()
    m.publish("t", b"x").result(PATIENCE)
    assert PATIENCE / 6 * 0.99 < clock.monotonic() - started < PATIENCE / 6 * 1.1  # a sixth of the deadline
    assert host_of(m) == c.name
    assert b.gates["open"].waiting == 0
    b.gates["open"].open()


# --- names with several addresses


@table(
    "first, later, at",
    {
        "several are tried one by one": (["10.0.0.1", "10.0.0.2"], None, ["10.0.0.2", "10.0.0.1"]),
        "changes are followed": (["10.0.0.1", "10.0.0.2"], ["10.0.1.1", "10.0.1.2"], ["10.0.0.2", "10.0.1.1"]),
        "one is connected to by its name": (["10.0.0.1"], None, [None, None]),
    },
)
def test_the_addresses_of_a_name(
    pool: Pool, connect: Connect, addresses: dict[str, list[str]], monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture, first: list[str], later: list[str] | None, at: list[str | None],
) -> None:  # fmt: skip
    monkeypatch.setattr("messaging.connection.opening._FRESH_SECONDS", 0.0)
    [a] = pool(1)
    addresses[a.name] = first
    down(a, count=1 if len(first) > 1 else 0)
    m = connect(url(a))
    addresses[a.name] = later or first
    a.lose()
    a.wait_open(2)
    observe(m).wait("connected")
    where = [a.name if address is None else f"{a.name} at {address}" for address in at]
    assert host_of(m) == where[1]
    assert [endpoint.address for endpoint in a.endpoints][-2:] == at
    assert f"({where[0]}): connection lost" in caplog.text


@pytest.mark.usefixtures("virtual_clock")
def test_a_look_up_that_hangs_ends_the_attempt_at_its_host_alone(
    pool: Pool, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def addresses_of(name: str) -> list[str]:
        if name == a.name:
            await asyncio.Event().wait()
        return []

    monkeypatch.setattr("messaging.connection.opening.addresses_of", addresses_of)
    a, b = pool(2)
    started = clock.monotonic()
    with pytest.raises(ConnectFailedError, match=r"within 0\.2 s; its name is still being looked up"):
        connect(url(a), connect_timeout=0.2)
    assert host_of(connect(url(a, b), connect_timeout=0.2)) == b.name
    assert clock.monotonic() - started < 1.0
    assert a.calls == ["close"]  # the adapter would look the name up, and hang, too


@pytest.mark.usefixtures("virtual_clock")
def test_a_look_up_that_is_slow_is_waited_for_with_the_whole_connect_timeout(
    pool: Pool, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("messaging.connection.opening._LEAST_SHARE", 0.05)
    a, b = pool(2)
    down(b)

    async def addresses_of(name: str) -> list[str]:
        if name == a.name:
            await eventually_async(lambda: b.calls.count("open"), "its share is over")
        return []

    monkeypatch.setattr("messaging.connection.opening.addresses_of", addresses_of)
    assert host_of(connect(url(a, b), connect_timeout=PATIENCE, timeout=0.4)) == a.name


def test_a_look_up_that_hangs_takes_one_thread_however_often_its_name_is_needed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    release = threading.Event()
    asked: list[str] = []

    def hang(name: str, *_: object, **__: object) -> list[Any]:
        asked.append(name)
        release.wait(PATIENCE)
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("10.0.0.1", 0))]

    async def look_up() -> list[str]:
        for _ in range(3):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(0.05):
                    await addresses_of("broker.example")
        release.set()
        return await addresses_of("broker.example")

    monkeypatch.setattr(socket, "getaddrinfo", hang)
    assert engine().run(look_up(), "looking up").result(PATIENCE) == ["10.0.0.1"]
    assert asked == ["broker.example"]


def test_a_link_local_address_keeps_its_link(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [
        (socket.AF_INET6, socket.SOCK_STREAM, 6, "", ("fe80::1", 0, 0, 3)),
        (socket.AF_INET6, socket.SOCK_STREAM, 6, "", ("fd00::1", 0, 0, 0)),
        (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("10.0.0.1", 0)),
    ]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    addresses = engine().run(addresses_of("broker.local"), "looking up").result(PATIENCE)
    assert addresses == ["fe80::1%3", "fd00::1", "10.0.0.1"]


@table("failure", [OSError("try again"), RuntimeError("can't start new thread")])
def test_a_look_up_that_fails_leaves_the_addresses_that_are_known(
    pool: Pool, connect: Connect, addresses: dict[str, list[str]], monkeypatch: pytest.MonkeyPatch, failure: Exception
) -> None:
    monkeypatch.setattr("messaging.connection.opening._FRESH_SECONDS", 0.0)
    [a] = pool(1)
    addresses[a.name] = ["10.0.0.1", "10.0.0.2"]
    m = connect(url(a))

    async def fail(_: str) -> list[str]:
        raise failure

    monkeypatch.setattr("messaging.connection.opening.addresses_of", fail)
    a.lose()
    a.wait_open(2)
    observe(m).wait("connected")
    assert host_of(m) == f"{a.name} at 10.0.0.2"


def test_a_planned_loss_stays_at_its_host_when_the_addresses_have_changed(
    pool: Pool, connect: Connect, addresses: dict[str, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("messaging.connection.opening._FRESH_SECONDS", 0.0)
    a, b = pool(2)
    down(a, count=1)
    m = connect(url(a, b))
    assert host_of(m) == b.name
    addresses[b.name] = ["10.0.0.1", "10.0.0.2"]
    b.lose(PlannedLossError("to log in anew"))
    b.wait_open(2)
    observe(m).wait("connected")
    assert host_of(m) == f"{b.name} at 10.0.0.1"


# --- credentials


def test_a_provider_that_fails_is_asked_once_and_not_for_each_host(pool: Pool, connect: Connect) -> None:
    hosts = pool(5)
    asked = 0

    def fail() -> str:
        nonlocal asked
        asked += 1
        raise OSError("no issuer")

    with pytest.raises(CredentialsError):
        connect(url(*hosts), credentials=fail)
    assert asked == 1


def test_an_instance_without_credentials_stays_at_its_host(pool: Pool, connect: Connect) -> None:
    a, b = pool(2)
    failures = [OSError("no issuer")]

    def provide() -> str:
        if len(a.logins) == 1 and failures:
            raise failures.pop()
        return "p"

    m = connect(url(a, b), credentials=provide)
    a.lose(PlannedLossError("to log in anew"))
    a.wait_open(2)
    observe(m).wait("connected")
    assert not failures
    assert host_of(m) == a.name
    assert b.calls == []


@pytest.mark.usefixtures("virtual_clock")
def test_a_provider_that_is_slow_takes_no_time_from_the_hosts(
    pool: Pool, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("messaging.connection.opening._LEAST_SHARE", 0.05)
    a, b = pool(2)
    asked = 0

    async def provide() -> str:
        nonlocal asked
        asked += 1
        await asyncio.sleep(1.0)  # sleeps: longer than the share of a host
        return "p"

    m = connect(url(a, b), credentials=provide, timeout=1.8)
    assert host_of(m) == a.name
    assert asked == 1


# --- redirects


@table("when", ["connecting", "connected"])
def test_a_redirect_is_followed_to_a_host_that_the_url_does_not_name(pool: Pool, connect: Connect, when: str) -> None:
    a, b = pool(2)
    redirect = RedirectedError("go elsewhere", servers=(b.name,), code=0x9C)
    if when == "connecting":
        a.errors["open"].append(redirect)
        m = connect(url(a), **NEVER)
    else:
        m = connect(url(a), **NEVER)
        a.lose(redirect)
        b.wait_open()
    observe(m).wait("connected")
    assert host_of(m) == b.name


def test_a_redirect_that_names_no_host_is_a_refusal(pool: Pool, connect: Connect) -> None:
    [a] = pool(1)
    a.errors["open"].append(RedirectedError("go elsewhere", servers=("no host!",), code=0x9C))
    with pytest.raises(ConnectFailedError, match="go elsewhere; not followed: it names no server") as caught:
        connect(url(a))
    assert caught.value.code == 0x9C


@table("server", [f"b:000001{'0' * 5000}", "b:00000199999", "[::1%\x1b[31m]", "mqtt://b"])
def test_a_redirect_to_nonsense_does_not_end_the_reconnecting(pool: Pool, connect: Connect, server: str) -> None:
    [a] = pool(1)
    m = connect(url(a))
    a.lose(RedirectedError("go elsewhere", servers=(server,), code=0x9C))
    a.wait_open(2)
    observe(m).wait("connected")


def test_a_redirect_is_not_followed_by_an_adapter_that_is_told_no_host(broker: FakeBroker, connect: Connect) -> None:
    broker.errors["open"].append(RedirectedError("go elsewhere", servers=("b:1",)))
    with pytest.raises(ConnectFailedError, match="not followed"):
        connect(broker)


@table("ending", [ConnectFailedError("interrupted"), None])
def test_closing_ends_an_attempt_whose_library_swallows_the_cancellation(
    pool: Pool, connect: Connect, monkeypatch: pytest.MonkeyPatch, ending: ConnectFailedError | None
) -> None:
    (broker,) = pool(1)
    broker.gates["open"].close()
    passed = broker.gates["open"].passed

    async def swallowing() -> None:
        try:
            await passed()
        except asyncio.CancelledError:
            if ending is not None:
                raise ending from None

    monkeypatch.setattr(broker.gates["open"], "passed", swallowing)
    m = start(connect, url(broker), retry_connect=True, reconnect_min=0.01, reconnect_max=0.02)
    eventually(lambda: broker.gates["open"].waiting == 1)
    m.close()
    assert m._connection._task is not None
    assert m._connection._task.cancelled()
    assert broker.calls.count("open") == 1
