"""The exit codes of docs/cli.md, as far as the tests of the commands do not show them."""

from __future__ import annotations

import re
import signal
import socket
from collections.abc import Iterator

import pytest

import messaging
from messaging.cli.output import ExitCode
from messaging.testing.brokers import Mosquitto, RabbitMQ
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
def test_a_closed_reader_of_stdout_is_0_without_an_error(arguments: tuple[str, ...]) -> None:
    pipe = " ".join([*COMMAND, *arguments])
    done = process("bash", "-c", f"{pipe} | true; echo ${{PIPESTATUS[0]}}")
    assert (done.stdout, done.stderr) == ("0\n", "")


# --- 1


def test_no_subscriber_where_one_is_required_is_1(run: Run, rabbitmq: RabbitMQ, topic: str) -> None:
    assert run("pub", rabbitmq.url, "-t", topic, "-m", "x", "-x", "mandatory=true")[0] == 1


# --- 130

SIGNALS = pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])


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
    """The signal arrives when the module is looked up."""
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
