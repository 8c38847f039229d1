"""Reports on stderr: the broker and the client id, the loss and the return of the connection."""

from __future__ import annotations

import re
import signal
import subprocess

import pytest

import messaging
from messaging.testing.brokers import Mosquitto, RabbitMQ
from messaging.testing.proxy import Proxy
from messaging.testing.tables import table
from messaging.testing.waiting import PATIENCE, eventually
from tests.cli.conftest import Run
from tests.cli.program import COMMAND, ROOT, Lines, Program, environment

SECONDS = r"\d+\.\d s"


LISTENERS = pytest.mark.parametrize("listener", [("sub",), ("reply", "--exec", "cat")], ids=["sub", "reply"])


@LISTENERS
def test_a_listener_reports_a_lost_and_a_new_connection(own: Mosquitto, topic: str, listener: tuple[str, ...]) -> None:
    with Program(*listener, own.url, "-t", topic) as program:
        program.says(f" {topic} at {own.url} as ")
        where = rf"mqtt '{listener[0]}-{program.process.pid}' \(127\.0\.0\.1:{own.port}\)"
        for _ in range(2):
            own.kill()
            lost = program.says("connection lost")
            assert re.fullmatch(f"messaging: warning: {where}: connection lost: .+; reconnecting in {SECONDS}\n", lost)
            own.start()
            back = program.says("connected again")
            assert re.fullmatch(f"messaging: {where}: connected again after {SECONDS}\n", back)
        program.signal(signal.SIGTERM)
        assert program.ended() == 130
        assert program.err.rest().count(b"\n") == 5, "nothing else is said"


def test_debug_reports_the_return_of_a_connection_once(own: Mosquitto, topic: str) -> None:
    with Program("sub", own.url, "-t", topic, "--debug") as program:
        program.says("subscribed to")
        own.kill()
        program.says("connection lost")
        own.start()
        program.says("connected again")
        program.signal(signal.SIGTERM)
        assert program.ended() == 130
        assert program.err.rest().count(b"connected again") == 1


def test_quiet_does_not_report_a_lost_connection(own: Mosquitto, topic: str) -> None:
    with messaging.connect(own.url) as m:
        m.publish(topic, "one", retain=True, qos=1).result(PATIENCE)
    with Program("sub", own.url, "-t", topic, "-C", "2", "--quiet") as program:
        assert program.out.until(bool) == b"one\n"
        own.kill()
        own.start()
        with messaging.connect(own.url) as m:
            m.publish(topic, "two", retain=True, qos=1).result(PATIENCE)
        assert program.out.rest() == b"one\ntwo\n"
        assert program.ended() == 0
        assert program.err.rest() == b""


def test_a_lost_amqp_connection_is_reported(rabbitmq: RabbitMQ, topic: str) -> None:
    with Proxy(rabbitmq.host, rabbitmq.port) as proxy:
        url = rabbitmq.url_at(proxy.host, proxy.port)
        with Program("sub", url, "-t", topic, "-C", "1") as program:
            program.says("subscribed to")
            proxy.sever()
            where = f"amqp 'sub-{program.process.pid}' ({proxy.host}:{proxy.port}): "
            assert where + "connection lost: " in program.says("connection lost")
            assert where + "connected again after " in program.says("connected again")
            with messaging.connect(rabbitmq.url) as m:

                def has_ended() -> bool:  # the subscription comes back after the connection
                    m.publish(topic, "after").result(PATIENCE)
                    return program.process.poll() is not None

                eventually(has_ended)
            assert program.out.rest() == b"after\n"
            assert b"guest:guest" not in program.err.rest()


@LISTENERS
def test_a_listener_works_with_a_closed_stdin(mosquitto: Mosquitto, topic: str, listener: tuple[str, ...]) -> None:
    command = " ".join([*COMMAND, *listener, mosquitto.url, "-t", topic, "-C", "1"])
    program = subprocess.Popen(
        ["bash", "-c", f"exec {command} <&-"], cwd=ROOT, env=environment(), stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )  # fmt: skip
    assert program.stdout is not None
    assert program.stderr is not None
    try:
        assert f" {topic} at ".encode() in Lines(program.stderr).until(bool)
        with messaging.connect(mosquitto.url) as m:
            if listener[0] == "sub":
                m.publish(topic, "x", qos=1).result(PATIENCE)
            else:
                assert m.request(topic, b"x", timeout=PATIENCE).result().payload == b"x"
        assert Lines(program.stdout).rest() == (b"x\n" if listener[0] == "sub" else b"")
        assert program.wait(PATIENCE) == 0
    finally:
        program.kill()
        program.wait(PATIENCE)


# --- who is connected


def test_stderr_has_the_client_id_that_the_broker_logs(mosquitto: Mosquitto, topic: str) -> None:
    with (
        Program("sub", mosquitto.url, "-t", topic, "-W", "20", "-C", "1") as one,
        Program("sub", mosquitto.url, "-t", topic) as two,
    ):
        names = [re.search(" as (.+)\n", each.says("subscribed to")) for each in (one, two)]
        assert all(names)
        found = [name[1] for name in names if name]
        assert found[0].startswith(f"sub{one.process.pid}"[:11])
        assert found[1].startswith(f"sub{two.process.pid}"[:11])
        assert all(f" as {name} (p" in mosquitto.log() for name in found)


def test_a_given_name_is_kept(run: Run, mosquitto: Mosquitto, topic: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for arguments in (("--option", "name=given"), ("--url", f"{mosquitto.url}?name=given")):
        url = () if "--url" in arguments else (mosquitto.url,)
        assert '"instance_id":"given"' in run("info", *url, "--json", *arguments)[1]
    monkeypatch.setenv("MESSAGING_NAME", "given")
    assert '"instance_id":"given"' in run("info", mosquitto.url, "--json")[1]


def test_on_amqp_stderr_names_the_connection_as_the_broker_lists_it(rabbitmq: RabbitMQ, topic: str) -> None:
    with Program("sub", rabbitmq.url, "-t", topic) as program:
        line = program.says("subscribed to")
        assert f" as sub-{program.process.pid}\n" in line
        assert f" - sub-{program.process.pid} (" in rabbitmq.log()


# --- memory://


@table(
    "arguments, code",
    [
        (("pub", "-t", "a", "-m", "x"), 0),
        (("sub", "-t", "a", "-W", "0.05"), 0),
        (("sub", "-t", "a", "-C", "1", "-W", "0.05"), 3),
        (("request", "-t", "a", "-m", "x", "-W", "20"), 1),
    ],
)
def test_a_warning_says_that_memory_reaches_no_other_process(run: Run, arguments: tuple[str, ...], code: int) -> None:
    found, out, err = run(*arguments, "memory://alone")
    assert (found, out) == (code, "")
    hint = "messaging: warning: memory://alone is a broker inside this process: no other process reaches it; "
    assert hint in err
    assert hint not in run(*arguments, "memory://alone", "--quiet")[2]


def test_a_responder_at_memory_warns_too() -> None:
    with Program("reply", "memory://alone", "-t", "a", "--exec", "cat") as program:
        program.says("memory://alone is a broker inside this process")
        program.signal(signal.SIGTERM)
        assert program.ended() == 130
