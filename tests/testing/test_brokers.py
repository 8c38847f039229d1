"""The private brokers: they keep their promises, and leave nothing behind."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from paho.mqtt import MQTTException, publish, subscribe

from messaging.testing import brokers
from messaging.testing.brokers import HOST, Broker, BrokerError, Mosquitto, RabbitMQ, require
from messaging.testing.waiting import eventually
from tests.processes import has_ended
from tests.scripts import ROOT


def listening(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex((HOST, port)) == 0


def speaks_amqp(port: int) -> bool:
    with socket.create_connection((HOST, port), timeout=5) as connection:
        connection.sendall(b"AMQP\x00\x00\x09\x01")
        return connection.recv(1) == b"\x01"


def retained(topic: str, broker: Broker) -> bytes:
    found = subscribe.simple(topic, hostname=broker.host, port=broker.port)  # type: ignore[no-untyped-call]
    return bytes(found.payload)


@pytest.fixture(autouse=True)
def _installed() -> None:
    require("mosquitto", "rabbitmq")


@pytest.mark.parametrize("how", ["stop", "kill"])
def test_mosquitto_with_persistence_comes_back_with_its_port_and_data(how: str) -> None:
    with Mosquitto(persistence=True) as broker:
        port, pid = broker.port, broker.pid
        publish.single("t", b"kept", qos=1, retain=True, hostname=broker.host, port=port)
        if how == "kill":
            eventually(lambda: any(b"kept" in f.read_bytes() for f in broker.directory.glob("mosquitto.db")))
        getattr(broker, how)()
        assert has_ended(pid)
        assert not listening(port)
        assert not broker.running
        broker.start()
        assert (broker.port, broker.pid != pid) == (port, True)
        assert retained("t", broker) == b"kept"


def test_no_process_and_no_directory_is_left_behind() -> None:
    with Mosquitto() as broker:
        pid, directory = broker.pid, broker.directory
        assert directory.is_dir()
    assert has_ended(pid)
    assert not directory.exists()
    with pytest.raises(BrokerError, match="not running"):
        _ = broker.pid


def test_a_suspended_broker_can_be_stopped_in_good_order() -> None:
    with Mosquitto() as broker:
        pid = broker.pid
        os.kill(pid, signal.SIGSTOP)
        broker.stop()
        assert has_ended(pid)
        assert "terminating" in broker.log()


def test_a_broker_that_ended_by_itself_can_be_started_again() -> None:
    with Mosquitto() as broker:
        pid = broker.pid
        os.kill(pid, signal.SIGKILL)
        eventually(lambda: not broker.running)
        broker.start()
        assert broker.pid != pid
        assert listening(broker.port)


def test_config_lines_replace_defaults() -> None:
    with Mosquitto(["allow_anonymous false"]) as broker:
        with pytest.raises(MQTTException, match=r"(?i)not authori"):
            publish.single("t", b"x", hostname=broker.host, port=broker.port)
        assert "allow_anonymous true" not in (broker.directory / "mosquitto.conf").read_text()


def test_a_broker_that_ends_while_starting_is_noticed_at_once_and_says_why() -> None:
    broker = Mosquitto(["no_such_option 1"])
    started = time.monotonic()
    with pytest.raises(BrokerError, match=r"(?s)ended while starting.*no_such_option"), broker:
        pytest.fail("it started")
    assert time.monotonic() - started < 5
    assert not broker.directory.exists()


def test_a_taken_port_is_avoided_at_the_first_start_and_reported_later() -> None:
    broker = Mosquitto()
    with socket.socket() as squatter:
        squatter.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        squatter.bind((HOST, broker.port))
        squatter.listen()
        with broker:
            assert broker.port != squatter.getsockname()[1]
            broker.stop()
            with socket.socket() as second:
                second.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                second.bind((HOST, broker.port))
                second.listen()
                with pytest.raises(BrokerError, match="in use"):
                    broker.start()
            broker.start()


def test_a_missing_broker_skips_the_test_and_fails_it_in_ci(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(brokers, "find_mosquitto", lambda: None)
    monkeypatch.delenv("CI", raising=False)
    with pytest.raises(pytest.skip.Exception, match="mosquitto is not installed: install it"):
        require("mosquitto")
    monkeypatch.setenv("CI", "true")
    with pytest.raises(pytest.fail.Exception, match="mosquitto is not installed"):
        require("mosquitto")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_brokers_die_with_the_process_that_started_them(number: signal.Signals) -> None:
    program = (
        "import sys; from messaging.testing.brokers import Mosquitto\n"
        "with Mosquitto() as b: print(b.pid, b.directory, flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", program]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        pid, directory = process.stdout.readline().split()
        assert not has_ended(int(pid))
        process.send_signal(number)
        process.wait(10)
    eventually(lambda: has_ended(int(pid)))
    eventually(lambda: not Path(directory).exists())


@pytest.mark.slow
def test_rabbitmq_is_under_control_listens_on_loopback_only_and_leaves_nothing_running() -> None:
    def processes(broker: Broker) -> set[int]:
        """Everything that has the broker's directory for its working directory or home."""
        found = set()
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                environment = (folder / "environ").read_bytes()
            except OSError:
                continue
            if f"HOME={broker.directory}\0".encode() in environment:
                found.add(int(folder.name))
        return found

    with RabbitMQ() as broker:
        assert speaks_amqp(broker.port)
        assert "guest" in broker.ctl("list_users")
        with pytest.raises(BrokerError, match=r"rabbitmqctl .* exit"):
            broker.ctl("no_such_command")
        pids = processes(broker)
        assert broker.pid in pids
        assert len(pids) >= 2  # at least the node and its port mapper
        ports = (broker.port, broker._dist_port, broker._mapper.port)
        assert all(map(listening, ports))
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as route:
            route.connect(("192.0.2.1", 9))  # sends nothing: only asks for our address towards the outside
            outside = route.getsockname()[0]
        for port in ports:
            with socket.socket() as probe:
                assert probe.connect_ex((outside, port)) != 0
    eventually(lambda: all(map(has_ended, pids)))
    assert not any(map(listening, ports))
    assert not broker.directory.exists()
