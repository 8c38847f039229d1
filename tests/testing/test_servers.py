"""The servers of a run: started once, used by all workers, repaired when a test leaves one broken."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import messaging
from messaging.services import ServiceRegistry
from messaging.testing import brokers
from messaging.testing import servers as module
from messaging.testing.brokers import (
    HOST,
    STARTS,
    Broker,
    BrokerError,
    Mosquitto,
    RabbitMQ,
    free_port,
    release_port,
    require,
)
from messaging.testing.postgresql import PostgreSQL
from messaging.testing.servers import RemoteServers, Servers, Starts, Steward
from messaging.testing.waiting import eventually
from tests.processes import has_ended
from tests.scripts import ROOT
from tests.testing.test_brokers import listening


@pytest.fixture(autouse=True)
def _installed() -> None:
    require("mosquitto")


@pytest.fixture
def steward() -> Iterator[Steward]:
    made = Steward()
    yield made
    made.close()


Worker = Callable[[str], RemoteServers]


@pytest.fixture
def worker(steward: Steward) -> Iterator[Worker]:
    """``worker(name)``: what a worker of pytest-xdist has."""
    made: list[RemoteServers] = []

    def make(name: str) -> RemoteServers:
        made.append(RemoteServers(*steward.listen(), name))
        return made[-1]

    yield make
    for each in made:
        each.close()


def works(broker: Mosquitto | RabbitMQ) -> bool:
    with messaging.connect(broker.url, services=ServiceRegistry()) as m, m.subscribe("works") as stream:
        m.publish("works", b"x", qos=1).result(30)
        return stream.receive(30).payload == b"x"


class Slow(Mosquitto):
    """Starts when the test says so, and counts."""

    started = 0
    may_start = threading.Event()

    def start(self) -> None:
        assert self.may_start.wait(30)
        type(self).started += 1
        super().start()


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> type[Slow]:
    monkeypatch.setattr(Slow, "started", 0)
    monkeypatch.setattr(Slow, "may_start", threading.Event())
    return Slow


# --- shared servers


def test_two_workers_that_ask_at_once_get_the_same_server(
    worker: Worker, slow: type[Slow], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_shared", lambda kind, workers: slow())
    workers = [worker(name) for name in ("gw0", "gw1")]
    with ThreadPoolExecutor(2) as pool:
        asking = [pool.submit(each._ask, "share", "postgresql", each._worker) for each in workers]
        assert not asking[0].done()
        slow.may_start.set()
        numbers = {each.result(30)[0] for each in asking}
    assert len(numbers) == 1
    assert slow.started == 1


def test_each_worker_has_a_mosquitto_of_its_own_and_always_the_same(worker: Worker) -> None:
    one, other = worker("gw0"), worker("gw1")
    assert one.mosquitto() is one.mosquitto()
    assert works(one.mosquitto())
    assert worker("gw0").mosquitto().port == one.mosquitto().port
    assert other.mosquitto().port != one.mosquitto().port


@pytest.mark.parametrize("name", ["stop", "kill", "restart"])
def test_a_shared_server_cannot_be_stopped(worker: Worker, name: str) -> None:
    broker = worker("gw0").mosquitto()
    with pytest.raises(BrokerError, match=rf"is shared by the tests of a run: a test that needs {name}\(\) borrows"):
        getattr(broker, name)()
    broker.close()
    with broker:
        pass
    assert broker.running
    assert listening(broker.port)
    os.kill(broker.pid, 0)


def test_workers_cannot_see_the_queues_of_each_other(servers: Servers) -> None:
    require("rabbitmq")

    def of(worker: str) -> RabbitMQ:
        made = object.__new__(type(servers))
        made.__dict__.update(servers.__dict__, _worker=worker, _handles={})
        return made.rabbitmq()

    one, other = of("testing-0"), of("testing-1")
    assert one.port == other.port == servers.rabbitmq().port
    assert all(works(broker) for broker in (one, other))
    with messaging.connect(one.url, services=ServiceRegistry()) as m, m.subscribe("seen", queue="testing") as stream:
        stream.ready.result(30)
        assert "testing" in one.ctl("list_queues", "name").split()
        assert "testing" not in other.ctl("list_queues", "name").split()


def test_a_url_for_a_proxy_has_credentials_and_virtual_host() -> None:
    broker = RabbitMQ()
    assert broker.url_at("h", 1) == "amqp://guest:guest@h:1/"
    broker.virtual_host = "a/b"
    assert broker.url_at("h", 1) == "amqp://guest:guest@h:1/a%2Fb"
    broker.close()
    other = Mosquitto()
    assert other.url_at("h", 1) == "mqtt://h:1"
    other.close()


def test_databases_of_all_workers_are_different(postgresql: PostgreSQL) -> None:
    assert len({postgresql.create_database() for _ in range(2)}) == 2


# --- borrowed servers


def test_a_borrowed_server_is_killed_started_and_used_again(worker: Worker) -> None:
    one, other = worker("gw0"), worker("gw1")
    with one.borrow(Mosquitto, ["max_inflight_messages 5"]) as broker:
        assert works(broker)
        pid = broker.pid
        broker.kill()
        assert has_ended(pid)
        assert not broker.running
        with pytest.raises(BrokerError, match="not running"):
            _ = broker.pid
        broker.start()
        assert works(broker)
        assert broker.pid != pid
        port, pid = broker.port, broker.pid
        with other.borrow(Mosquitto, ["max_inflight_messages 5"]) as second:
            assert second.port != port
    with other.borrow(Mosquitto, ["max_inflight_messages 5"], limit=1) as again:
        assert again.port in (port, second.port)
    with other.borrow(Mosquitto, ["max_inflight_messages 6"]) as another:
        assert another.port not in (port, second.port)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_server_that_was_left_broken_is_started_for_the_next_borrower(worker: Worker, how: signal.Signals) -> None:
    one = worker("gw0")
    with one.borrow(Mosquitto) as broker:
        port, pid = broker.port, broker.pid
        os.kill(pid, how)
        if how == signal.SIGKILL:
            eventually(lambda: not broker.running)
    with one.borrow(Mosquitto) as broker:
        assert (broker.port, broker.pid != pid) == (port, True)
        assert works(broker)


@pytest.mark.slow
def test_a_killed_rabbitmq_of_the_pool_is_replaced(servers: Servers) -> None:
    require("rabbitmq")
    with servers.borrow(RabbitMQ) as broker:
        broker.kill()
    with servers.borrow(RabbitMQ) as broker:
        assert works(broker)


def test_a_borrower_waits_where_the_limit_is_reached(worker: Worker) -> None:
    one, other = worker("gw0"), worker("gw1")
    ports: list[int] = []

    def borrow() -> None:
        with other.borrow(Mosquitto, limit=1) as broker:
            ports.append(broker.port)

    with one.borrow(Mosquitto, limit=1) as broker:
        waiting = threading.Thread(target=borrow)
        waiting.start()
        waiting.join(0.2)
        assert ports == []
    waiting.join(30)
    assert ports == [broker.port]


def test_a_test_that_borrows_more_than_the_limit_gets_them(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "WAIT_FOR_POOLED", 0.1)
    one = worker("gw0")
    with one.borrow(Mosquitto, limit=1) as first, one.borrow(Mosquitto, limit=1) as second:
        assert first.port != second.port


def test_what_a_worker_that_died_had_borrowed_is_free(worker: Worker, steward: Steward) -> None:
    address, key = steward.listen()
    code = (
        "import os, sys; from messaging.testing.brokers import Mosquitto\n"
        "from messaging.testing.servers import RemoteServers\n"
        "with RemoteServers(sys.argv[1], sys.argv[2], 'gw0').borrow(Mosquitto) as broker:\n"
        "    print(broker.port, flush=True); broker.kill(); os.kill(os.getpid(), 9)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, address, key], cwd=ROOT, stdout=subprocess.PIPE, text=True, timeout=60, check=False
    )
    assert done.returncode == -signal.SIGKILL
    with worker("gw1").borrow(Mosquitto, limit=1) as broker:
        assert broker.port == int(done.stdout)
        assert works(broker)


def test_a_server_that_does_not_start_is_an_error_for_each_who_asks(worker: Worker) -> None:
    one = worker("gw0")
    for _ in range(2):
        with pytest.raises(BrokerError, match="no_such_option"), one.borrow(Mosquitto, ["no_such_option 1"], limit=1):
            pass
    assert one.mosquitto().running


def test_what_the_steward_cannot_make_is_an_error(worker: Worker) -> None:
    one = worker("gw0")
    with pytest.raises(BrokerError, match="unexpected keyword"), one.borrow(Mosquitto, no_such_argument=1):
        pass
    assert one.mosquitto().running


def test_an_interrupted_question_is_not_answered_with_the_next(worker: Worker) -> None:
    one = worker("gw0")

    def interrupt(*_: object) -> None:
        raise LookupError("the test takes too long")

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        with worker("gw1").borrow(Mosquitto, limit=1) as taken:
            signal.setitimer(signal.ITIMER_REAL, 0.3)
            with pytest.raises(LookupError, match="too long"), one.borrow(Mosquitto, limit=1):
                pass
            port = taken.port
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert one.mosquitto().name == "mosquitto"
    assert one.mosquitto().running
    with one.borrow(Mosquitto, limit=1) as broker:
        assert broker.port == port


def test_a_server_that_cannot_be_described_is_an_error(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    one = worker("gw0")
    monkeypatch.setattr(Mosquitto, "__getstate__", lambda self: {"lock": threading.Lock()}, raising=False)
    with pytest.raises(BrokerError, match="cannot be described to another process"), one.borrow(Mosquitto):
        pass
    monkeypatch.undo()
    assert one.mosquitto().running


def test_the_end_of_the_steward_is_an_error_that_says_so(worker: Worker, steward: Steward) -> None:
    one = worker("gw0")
    pid = one.mosquitto().pid
    steward.close()
    assert has_ended(pid)
    with pytest.raises(BrokerError):
        one.mosquitto().start()


def test_without_workers_there_is_no_other_process(steward: Steward) -> None:
    servers = Servers(steward)
    assert works(servers.mosquitto())
    with servers.borrow(Mosquitto) as broker:
        broker.restart()
        assert works(broker)
        assert broker.port != servers.mosquitto().port


# --- whole runs

SUITE = """
import os
import pathlib

import pytest


@pytest.mark.parametrize("number", range(4))
def test_it(servers, mosquitto, number):
    from messaging.testing.brokers import Mosquitto

    with servers.borrow(Mosquitto, ["max_inflight_messages 5"], limit=1) as broker:
        pathlib.Path(f"found-{number}").write_text(f"{broker.pid} {mosquitto.pid} {broker.directory}")
    if number == 3 and "CRASH" in os.environ:
        os.kill(os.getpid(), 9)
"""


def run(folder: Path, *options: str, **environment: str) -> str:
    """Run a suite of its own with the plugin, as another project does."""
    (folder / "test_suite.py").write_text(SUITE)
    known = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", STARTS))}
    command = [sys.executable, "-m", "pytest", "-p", "messaging.testing.plugin", "-q", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, *options],
        cwd=folder,
        env={**known, "PYTHONPATH": str(ROOT), **environment},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    return done.stdout + done.stderr


def found(folder: Path) -> tuple[set[str], set[str], set[str]]:
    texts = [file.read_text().split() for file in folder.glob("found-*")]
    borrowed, shared, directories = (set(each) for each in zip(*texts, strict=True))
    for pid in borrowed | shared:
        eventually(lambda pid=pid: has_ended(pid))  # type: ignore[misc]
    for directory in directories:
        eventually(lambda directory=directory: not Path(directory).exists())  # type: ignore[misc]
    return borrowed, shared, directories


@pytest.mark.parametrize(("options", "processes"), [((), 1), (("-n", "2", "--dist", "load"), 2)])
def test_a_run_starts_each_server_once_tells_how_many_and_leaves_none(
    tmp_path: Path, options: tuple[str, ...], processes: int
) -> None:
    told = run(tmp_path, *options)
    assert "4 passed" in told
    borrowed, shared, _ = found(tmp_path)
    assert len(borrowed) == 1
    assert len(shared) <= processes
    assert f"brokers started: mosquitto {len(borrowed | shared)}" in told


def test_a_worker_that_crashes_leaves_no_server_and_its_replacement_works(tmp_path: Path) -> None:
    told = run(tmp_path, "-n", "2", CRASH="1")
    assert "crashed" in told
    assert re.search(r"1 failed, 3 passed", told)
    found(tmp_path)


def test_a_controller_that_is_killed_leaves_no_server(tmp_path: Path) -> None:
    code = (
        "import os, sys; from messaging.testing.servers import Servers, Steward\n"
        "broker = Servers(Steward()).mosquitto()\n"
        "print(broker.pid, broker.directory, flush=True); os.kill(os.getpid(), 9)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False)
    pid, directory = done.stdout.split()
    eventually(lambda: has_ended(pid))
    eventually(lambda: not Path(directory).exists())


def test_starts_of_all_processes_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(STARTS, raising=False)
    starts, nested = Starts(), Starts()
    starts.begin()
    nested.begin()
    with Mosquitto() as broker:
        broker.restart()
        broker.start()  # it runs already
    code = "from messaging.testing.brokers import Mosquitto\nwith Mosquitto(): pass"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)
    assert starts.read() == {"mosquitto": 2, "mosquitto again": 1}
    assert nested.read() == {}
    nested.end()
    assert str(starts) == "brokers started: mosquitto 2; started again: mosquitto 1"
    starts.end()
    assert STARTS not in os.environ
    assert str(starts) == ""


# --- ports


def test_a_free_port_is_given_to_one_process_only() -> None:
    code = "from messaging.testing import brokers; brokers._PORTS = range(15_000, 15_150)\n"
    code += "import sys; print(*(brokers.free_port() for _ in range(40)), flush=True); sys.stdin.read()"
    children: list[Any] = []
    try:
        for _ in range(2):
            children.append(
                subprocess.Popen(
                    [sys.executable, "-c", code], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
                )
            )
        first, second = ({*child.stdout.readline().split()} for child in children)
    finally:
        for child in children:
            child.communicate()
    assert len(first) == len(second) == 40
    assert first.isdisjoint(second)


def test_a_free_port_refuses_connections_until_a_server_listens_on_it() -> None:
    port = free_port()
    assert not listening(port)
    with pytest.raises(OSError, match="in use"), socket.socket() as other:
        other.bind((HOST, port))  # as free_port of another process does
    with socket.create_server((HOST, port)):
        assert listening(port)
    release_port(port)
    release_port(port)


@pytest.mark.parametrize("maker", [Mosquitto, RabbitMQ, PostgreSQL])
def test_a_closed_broker_holds_no_port(maker: type[Broker]) -> None:
    """None of them was started."""
    before = held_ports()
    broker = maker()
    assert held_ports() > before
    broker._change_ports()
    broker.close()
    assert held_ports() == before


def held_ports() -> int:
    return len([holder for holder in brokers._issued.values() if holder is not None])
