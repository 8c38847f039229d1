"""The exit codes of docs/cli.md, as far as the tests of the commands do not show them."""

from __future__ import annotations

import re
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

import messaging
from messaging.cli.output import ExitCode
from tests.brokers import Mosquitto, RabbitMQ
from tests.cli.conftest import Run
from tests.cli.program import COMMAND, PATIENCE, ROOT, Program, process

PAGE = (ROOT / "docs" / "cli.md").read_text()


@pytest.fixture
def silent() -> Iterator[socket.socket]:
    """A server that never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(PATIENCE)
        yield server


def test_the_page_lists_all_codes_and_no_others() -> None:
    table = PAGE.partition("| exit code | |\n|---|---|\n")[2].partition("\n\n")[0]
    listed = [int(code) for code in re.findall(r"^\| (\d+) \|", table, re.MULTILINE)]
    assert listed == sorted(map(int, ExitCode))


# --- 0


def test_done_is_0(run: Run, mosquitto: Mosquitto, topic: str) -> None:
    assert run("pub", mosquitto.url, "-t", topic, "-m", "x", "-q", "1", "-r")[0] == 0
    assert run("sub", mosquitto.url, "-t", topic, "-C", "1", "-W", "20")[0] == 0
    assert run("sub", mosquitto.url, "-t", topic, "-W", "0.05")[0] == 0
    assert run("pub", mosquitto.url, "-t", topic, "-n", "-q", "1", "-r")[0] == 0
    assert run("info", mosquitto.url)[0] == 0
    assert run("--version")[0] == run("--help")[0] == run("context", "--help")[0] == 0
    with messaging.connect(mosquitto.url) as m, m.reply(topic, lambda text: text):
        assert run("request", mosquitto.url, "-t", topic, "-m", "x", "-W", "20")[:2] == (0, "x\n")


@pytest.mark.parametrize("arguments", [("--help",), ("info", "--json"), ("context", "list", "--json")])
def test_a_reader_that_wants_no_more_is_0_and_nothing_is_said(arguments: tuple[str, ...]) -> None:
    pipe = " ".join([*COMMAND, *arguments])
    done = process("bash", "-c", f"{pipe} | true; echo ${{PIPESTATUS[0]}}")
    assert (done.stdout, done.stderr) == ("0\n", "")


# --- 1


def test_an_unconfirmed_message_is_1(own: Mosquitto, topic: str) -> None:
    with Program("pub", own.url, "-t", topic, "-q", "1", "-l", "--option", "timeout=0.3") as pub:
        with messaging.connect(own.url) as m, m.subscribe(topic) as stream:
            pub.send(b"1\n")
            stream.receive(PATIENCE)
        own.kill()
        pub.send(b"2\n")
        pub.end_input()
        assert pub.ended() == 1


def test_a_refusal_of_the_broker_is_1(run: Run, rabbitmq: RabbitMQ) -> None:
    where = f"amqp://guest:wrong@{rabbitmq.host}:{rabbitmq.port}"
    assert run("pub", where, "-t", "a", "-m", "x")[0] == 1


def test_no_subscriber_where_one_is_required_is_1(run: Run, rabbitmq: RabbitMQ, topic: str) -> None:
    assert run("pub", rabbitmq.url, "-t", topic, "-m", "x", "-x", "mandatory=true")[0] == 1
    assert run("request", rabbitmq.url, "-t", topic, "-m", "x")[0] == 1


def test_stdout_that_cannot_be_written_is_1() -> None:
    with Path("/dev/full").open("wb") as full, Program("info", "--json", stdout=full) as info:
        assert info.ended() == 1


# --- 2


@pytest.mark.parametrize(
    "arguments",
    [
        (),
        ("nonesuch",),
        ("--nonesuch",),
        ("pub",),
        ("pub", "memory://codes?nonesuch=1", "-t", "a", "-m", "x"),
        ("pub", "@nonesuch", "-t", "a", "-m", "x"),
        ("sub", "memory://codes", "-t", "a", "-F", "%"),
        ("context", "show", "nonesuch"),
        ("bench", "memory://codes", "nonesuch"),
        ("pipeline", "demo", "--seconds", "0"),
    ],
)
def test_a_wrong_command_line_is_2(run: Run, arguments: tuple[str, ...]) -> None:
    assert run(*arguments)[0] == 2


# --- 3


def test_a_timeout_is_3(run: Run, mosquitto: Mosquitto, topic: str) -> None:
    assert run("request", mosquitto.url, "-t", topic, "-m", "x", "-q", "0", "-W", "0.1")[0] == 3
    assert run("bench", mosquitto.url, "sub", "-t", topic, "-W", "0.1")[0] == 3


# --- 130

SIGNALS = pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])


@SIGNALS
def test_an_interrupt_of_a_running_command_is_130(mosquitto: Mosquitto, topic: str, number: signal.Signals) -> None:
    url = mosquitto.url
    with (
        Program("sub", url, "-t", topic) as sub,
        Program("reply", url, "-t", f"{topic}/r", "--exec", "cat") as reply,
        Program("info", url, "--watch") as info,
        Program("bench", url, "sub", "-t", topic) as bench,
    ):
        sub.says("subscribed to")
        reply.says("answering")
        info.out.until(lambda line: b"connected" in line)
        bench.says("subscribed to")
        for program in (sub, reply, info, bench):
            program.signal(number)
            assert program.ended() == 130
            assert b"Traceback" not in program.err.rest()


@SIGNALS
def test_an_interrupt_while_connecting_is_130(silent: socket.socket, number: signal.Signals) -> None:
    url = f"mqtt://127.0.0.1:{silent.getsockname()[1]}"
    with Program("sub", url, "-t", "a", "--option", "connect_timeout=60") as sub, silent.accept()[0]:
        sub.signal(number)
        assert sub.ended() == 130
        assert b"Traceback" not in sub.err.rest()


@pytest.mark.parametrize("module", ["messaging.cli.app", "messaging.cli.sub"])
@SIGNALS
def test_an_interrupt_while_the_command_is_imported_is_130(number: signal.Signals, module: str) -> None:
    """The signal comes at the very moment at which the module is asked for."""
    code = (
        "import os, sys\n"
        "class Finder:\n"
        "    def find_spec(self, name, path, target=None):\n"
        f"        if name == {module!r}: os.kill(os.getpid(), {int(number)})\n"
        "sys.meta_path.insert(0, Finder())\n"
        "from messaging.cli import main\n"
        "sys.exit(main(['sub', 'memory://codes', '-t', 'a']))"
    )
    done = process(COMMAND[0], "-c", code)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")
