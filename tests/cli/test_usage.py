"""Help, wrong command lines, missing packages, secrets, and exit codes."""

from __future__ import annotations

import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import pytest
from typer.testing import CliRunner

from messaging.cli.app import app
from messaging.cli.commands import OWN, load_own
from messaging.cli.output import ExitCode, one_line
from messaging.testing.brokers import RabbitMQ
from messaging.testing.tables import table
from messaging.testing.waiting import PATIENCE
from tests.cli.conftest import Run, refused
from tests.cli.program import COMMAND, ROOT, Program, process

# --- help


@table("arguments", [["--help"], []])
def test_help_names_the_commands_and_explains_the_exit_codes(run: Run, arguments: list[str]) -> None:
    code, out, err = run(*arguments)
    assert code == (0 if arguments else 2)
    for command in ("pub", "sub", "request", "reply", "info", "demo"):
        assert f" {command} " in out
    text = " ".join(out.split())
    meanings = ("0 done", "1 failed", "2 the command line", "3 the timeout", "130 interrupted")
    for meaning in (*meanings, "an error of the responder", "or the reply arrived"):
        assert meaning in text
    assert err == ""


@table(
    "command, options",
    [
        ("pub", "-t -m -f -s -l -n -q -r -D -x --repeat --rate --content-type --encoding --reply-to"),
        ("sub", "-t -q -C -W -v -N -x --count --timeout --json --queue --ack"),
        ("request", "-t -m -f -s -n -q -C -W -N -x -D --many --count --timeout --json --encoding --reply-to"),
        ("reply", "-t -q -C -W -l -x --exec --lines --queue --concurrency --timeout --count --content-type"),
        ("info", "--json --features"),
        ("bench", "-t -q -W --messages --size --rate --publishers --window --json"),
        ("demo", ""),
    ],
)
def test_help_of_each_command_lists_its_options(command: str, options: str) -> None:
    result = CliRunner().invoke(app, [command, "--help"], env={"COLUMNS": "100"})
    assert result.exit_code == 0
    expected = {*options.split(), "-i", "-u", "-d", "--option", "--quiet"}
    assert expected - {*result.output.split()} == set()


def test_version(run: Run) -> None:
    assert run("--version") == (0, f"messaging {version('rx-messaging')}\n", "")


def test_debug_shows_logs_and_quiet_shows_none(run: Run) -> None:
    assert "messaging.connection.connection: memory 'info-" in run("info", "memory://usage", "--debug")[2]
    arguments = ("sub", "memory://usage", "-t", "a", "-W", "0.01", "-C", "1")
    subscribed, _hint, timeout = run(*arguments)[2].splitlines()
    assert subscribed.startswith("messaging: subscribed to a at memory://usage as sub-")
    assert timeout.startswith("messaging: warning: timeout")
    assert run(*arguments, "--quiet") == (3, "", "")


# --- missing packages


def without(module: str) -> subprocess.CompletedProcess[str]:
    code = f"import sys; sys.modules[{module!r}] = None; from messaging.cli import main; sys.exit(main(['info']))"
    return process(sys.executable, "-c", code)


@pytest.mark.parametrize("missing", ["typer", "rich"])
def test_a_missing_extra_is_one_line_that_says_which(missing: str) -> None:
    done = without(missing)
    assert (done.returncode, done.stdout) == (2, "")
    assert (
        done.stderr == "messaging: error: the command line needs an optional package: pip install 'rx-messaging[cli]'\n"
    )


def test_a_defect_in_an_import_is_not_taken_for_a_missing_extra() -> None:
    done = without("messaging.cli.info")
    assert done.returncode == 1
    assert "Traceback" in done.stderr


# --- wrong command lines

PUB = ("pub", "memory://usage", "-t", "a/b", "-m", "x")
SUB = ("sub", "memory://usage", "-t", "a/b", "--timeout", "1")
REQUEST = ("request", "memory://usage", "-t", "a/b", "-m", "x")
REPLY = ("reply", "memory://usage", "-t", "a/b", "--exec", "true")


@table(
    "arguments, expected",
    [
        # the URL
        (("pub", "localhost", "-t", "a", "-m", "x"), "has no '://'"),
        (("pub", "mqtt://local host", "-t", "a", "-m", "x"), "U+0020"),
        (("sub", "nonesuch://x", "-t", "a"), "no adapter for nonesuch:// is installed"),
        (("pub", "-t", "a", "-m", "x"), "no broker URL"),
        ((*PUB, "--url", "memory://other"), "two broker URLs"),
        (("info", "memory://usage?prefetsh=3"), "did you mean 'prefetch'?"),
        ((*PUB, "--option", "timeout=soon"), "option 'timeout'"),
        ((*PUB, "--option", "timeuot=3"), "did you mean 'timeout'?"),
        ((*PUB, "--option", "services=x"), "unknown option 'services'"),
        ((*PUB, "--option", "timeout"), "--option takes KEY=VALUE"),
        ((*PUB, "-i", "a", "--option", "client_id=b"), "client_id is given twice"),
        # options
        (("--nonesuch",), "--nonesuch"),
        (("context",), "Missing command"),
        (("pipeline", "demo", "--seconds", "0"), "--seconds must be from"),
        ((*PUB, "--qoss", "1"), "--qos)"),
        ((*SUB, "--cuont", "1"), "(Possible options: --count"),
        ((*PUB, "-h", "localhost"), "part of the URL"),
        ((*PUB, "--pw", "x"), "MESSAGING_PASSWORD"),
        (("pbu", "-t", "a"), "no command 'pbu'; did you mean 'pub'?"),
        (("subscribe", "-t", "a"), "did you mean 'sub'?"),
        (("pipelines",), "did you mean 'pipeline'?"),
        (("xxxxxx",), "no command 'xxxxxx'; there are pub, sub, "),
        (("mqtt://localhost", "sub"), "the command comes before the broker: messaging sub mqtt://localhost -t CHANNEL"),
        (("pub", "mqqt://localhost", "-t", "a", "-m", "x"), "did you mean 'mqtt'?"),
        ((*PUB, "-x", "timetolive=3"), "did you mean 'timeToLive'?"),
        ((*SUB, "-x", "dead_letter_channel=d"), "did you mean 'deadLetterChannel'?"),
        ((*PUB, "extra"), "extra"),
        (("pub", "memory://usage", "-m", "x"), "--topic"),
        ((*SUB, "--count", "0"), "--count"),
        ((*SUB, "--count", "many"), "--count"),
        ((*SUB, "--timeout", "0"), "--timeout must be"),
        ((*SUB, "--timeout", "nan"), "--timeout must be"),
        ((*SUB, "--timeout", "inf"), "--timeout must be"),
        ((*SUB, "--timeout", "-1"), "--timeout must be"),
        ((*SUB, "--timeout", "soon"), "--timeout"),
        ((*SUB, "--ack", "maybe"), "--ack"),
        ((*PUB, "--rate", "0"), "--rate must be"),
        (("pub", "memory://usage", "-t", "a", "-l", "--repeat", "2"), "--repeat does not go with -l"),
        (("info", "--features"), "--features needs a broker URL"),
        # what to publish
        (("pub", "memory://usage", "-t", "a"), "exactly one of -m, -f, -s, -l and -n"),
        ((*PUB, "-n"), "exactly one of -m, -f, -s, -l and -n"),
        (("pub", "memory://usage", "-t", "a", "-f", "/no/such/file"), "cannot read '/no/such/file'"),
        (("pub", "memory://usage", "-t", "a", "-f", "/"), "cannot read '/'"),
        (("pub", "memory://usage", "-t", "a", "-m", "xy", "--option", "max_message_size=1"), "exceeds the limit"),
        ((*PUB, "--encoding", "rot13"), "rot13"),
        # channels
        (("pub", "memory://usage", "-t", "a/#", "-m", "x"), "wildcards are for subscriptions only"),
        (("pub", "memory://usage", "-t", "", "-m", "x"), "channel is empty"),
        (("pub", "memory://usage", "-t", "a\udcff", "-m", "x"), "U+DCFF"),
        (("sub", "memory://usage", "-t", "a/#/b"), "'#' must be the whole of the last level"),
        (("sub", "memory://usage", "-t", "a", "-t", "b+"), "'+' must be a whole level"),
        # extensions
        ((*PUB, "-q", "3"), "qos"),
        ((*PUB, "-x", "qos=1", "-q", "1"), "qos is given twice"),
        ((*PUB, "-x", "priority=10"), "extension 'priority'"),
        ((*PUB, "-x", "priority=1", "-x", "priority=2"), "priority is given twice"),
        ((*PUB, "-x", "nonesuch=1"), "does not support 'nonesuch'"),
        ((*PUB, "-x", "timeToLive"), "--extension takes KEY=VALUE"),
        ((*PUB, "-D", "=v"), "--header takes KEY=VALUE"),
        ((*PUB, "-D", "k=\udcff"), "U+DCFF"),
        ((*SUB, "--queue", "a/b"), "extension 'queue'"),
        # requests
        (("request", "memory://usage", "-m", "x"), "--topic"),
        (("request", "memory://usage", "-t", "a"), "exactly one of -m, -f, -s and -n"),
        ((*REQUEST, "-n"), "exactly one of -m, -f, -s and -n"),
        (("request", "memory://usage", "-t", "a/#", "-n"), "wildcards are for subscriptions only"),
        ((*REQUEST, "--count", "2"), "--count goes with --many"),
        ((*REQUEST, "--many", "--count", "0"), "--count"),
        ((*REQUEST, "--timeout", "0"), "--timeout must be"),
        ((*REQUEST, "-W", "1", "-x", "timeout=1"), "timeout is given twice"),
        ((*REQUEST, "-x", "lastWill=true"), "a last will is no request"),
        ((*REQUEST, "--option", "generate_reply_channel=false"), "makes none"),
        # responders
        (("reply", "memory://usage", "--exec", "true"), "--topic"),
        (("reply", "memory://usage", "-t", "a"), "--exec"),
        (("reply", "memory://usage", "-t", "a", "--exec", " "), "--exec is empty"),
        (("reply", "memory://usage", "-t", "a", "-t", "b+", "--exec", "true"), "'+' must be a whole level"),
        ((*REPLY, "--timeout", "nan"), "--timeout must be"),
        ((*REPLY, "--concurrency", "0"), "--concurrency"),
        ((*REPLY, "--count", "0"), "--count"),
        ((*REPLY, "--queue", "a/b"), "extension 'queue'"),
        ((*REPLY, "--queue", "a", "-x", "queue=a"), "queue is given twice"),
        ((*REPLY, "-q", "3"), "qos"),
        ((*REPLY, "-q", "0", "-x", "prefetch=3"), "contradicts prefetch"),
        ((*REPLY, "-x", "nonesuch=1"), "does not support 'nonesuch'"),
        ((*REPLY, "-x", "concurrency=1"), "does not support 'concurrency'"),
        ((*REPLY, "--content-type", "\udcff"), "lone surrogate"),
    ],
)
def test_a_wrong_command_line_is_one_line_that_says_why(run: Run, arguments: tuple[str, ...], expected: str) -> None:
    assert expected in refused(run, *arguments)


def test_an_error_is_written_as_one_printable_line(run: Run) -> None:
    assert "\\x1b" in refused(run, "pub", "memory://usage", "-t", "a", "-m", "x", "--o\n\x1b[31m")


# --- at run time


@table(
    "arguments",
    [
        ("pub", "-t", "a", "-m", "x"),
        ("sub", "-t", "a"),
        ("request", "-t", "a", "-n"),
        ("reply", "-t", "a", "--exec", "true"),
        ("info",),
        ("demo",),
        ("bench",),
        ("events", "watch"),
        ("events", "publish", "a", "1"),
        ("events", "topics"),
        ("events", "members"),
    ],
)
def test_a_broker_that_is_not_there_is_a_failure(run: Run, refusing_port: int, arguments: tuple[str, ...]) -> None:
    assert "cannot connect" in refused(run, *arguments, "--url", f"mqtt://127.0.0.1:{refusing_port}", code=1)


@table("command", [("sub",), ("reply", "--exec", "true")])
def test_a_refused_subscription_is_a_failure(run: Run, command: tuple[str, ...]) -> None:
    command_line = (*command, "memory://usage", "-t", "a", "--queue", "nonesuch", "-x", "autocreate=false")
    code, out, err = run(*command_line)
    assert (code, out) == (1, "")
    assert "queue 'nonesuch' does not exist" in err.splitlines()[-1]


# --- secrets


SECRET = "hunter2&%C3%A9"


@table(
    "arguments",
    [
        ("pub", f"mqtt://joe:{SECRET}@127.0.0.1:1", "-t", "a", "-m", "x"),
        ("pub", f"mqtt://joe:{SECRET}@127.0.0.1:port", "-t", "a", "-m", "x"),
        ("pub", f"mqtt://joe:{SECRET}@x@127.0.0.1:1", "-t", "a", "-m", "x"),
        ("pub", f"nonesuch://joe:{SECRET}@127.0.0.1", "-t", "a", "-m", "x"),
        ("pub", f"memory://joe:{SECRET}@usage", "-t", "a", "-m", "x"),
        ("pub", "memory://a", f"mqtt://joe:{SECRET}@127.0.0.1:1", "-t", "a", "-m", "x"),
        ("pub", f"mqtt://127.0.0.1:1?username=joe&password={SECRET.replace('&', '')}", "-t", "a", "-m", "x"),
        ("pub", f"memory://a?passwort={SECRET.replace('&', '')}", "-t", "a", "-m", "x"),
        ("pub", "mqtt://joe@127.0.0.1:1", "--option", f"password={SECRET}", "-t", "a", "-m", "x"),
        ("pub", "mqtt://joe@127.0.0.1:1", f"--password={SECRET}", "-t", "a", "-m", "x"),
        ("pub", "memory://a", f"password={SECRET}", "-t", "a", "-m", "x"),
        ("pub", "memory://a", "-t", "a", "-m", "x", "-x", f"headers={SECRET}"),
        ("pub", "memory://a", "-t", "a", "-m", "x", "-D", SECRET),
        (f"mqtt://joe:{SECRET}@127.0.0.1:1", "pub"),
        *(
            (*command, "-t", "a", *where)
            for command in (("request", "-n"), ("reply", "--exec", f"echo {SECRET}"))
            for where in (
                (f"mqtt://joe:{SECRET}@127.0.0.1:1",),
                (f"mqtt://joe:{SECRET}@127.0.0.1:port",),
                ("mqtt://joe@127.0.0.1:1", "--option", f"password={SECRET}"),
                ("memory://a", "-x", f"headers={SECRET}"),
            )
        ),
    ],
)
@table("debug", [[], ["--debug"]])
def test_no_secret_is_ever_shown(run: Run, arguments: tuple[str, ...], debug: list[str]) -> None:
    code, out, err = run(*arguments, *debug)
    assert code in (1, 2)
    assert err
    assert "hunter2" not in out + err


def test_secrets_in_logs_of_libraries_are_redacted() -> None:
    text = "opening amqp://joe:hunter2@[::1]/v?password=hunter2&x=y, client_secret=hunter2\nthen https://a/b"
    assert one_line(text) == "opening amqp://***@[::1]/v?password=***&x=y, client_secret=*** then https://a/b"


def test_the_password_of_the_environment_is_not_shown(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "password"
    file.write_text("hunter2\n")
    monkeypatch.setenv("MESSAGING_URL", "mqtt://joe@127.0.0.1:1")
    monkeypatch.setenv("MESSAGING_PASSWORD_FILE", str(file))
    code, out, err = run("pub", "-t", "a", "-m", "x", "--debug")
    assert code == 1
    assert "127.0.0.1:1" in err
    assert "hunter2" not in out + err


SCRIPT = Path(sys.executable).with_name("messaging")


@pytest.mark.parametrize(
    "command", [[SCRIPT], [sys.executable, "-m", "messaging"], COMMAND], ids=["script", "m", "cli"]
)
def test_the_installed_script_and_python_m_run_the_program_and_report_its_exit_code(command: list[str | Path]) -> None:
    assert SCRIPT.exists(), "the project is not installed in this environment"
    done = process(*map(str, command), "pub", "memory://a")
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert done.stderr.startswith("messaging: error: Missing option '--topic'")


def test_the_list_of_commands_shows_the_first_sentence_of_their_help() -> None:
    for name, sentence in OWN.items():
        assert sentence.endswith(".")
        assert " ".join(str(load_own(name).help).split()).startswith(sentence)


def imported(*arguments: str) -> set[str]:
    """Return the modules that the program has imported when it ends."""
    code = "import sys; from messaging.cli import main; main(sys.argv[1:]); print('\\n'.join(sys.modules))"
    return {*process(sys.executable, "-c", code, *arguments).stdout.split()}


def test_a_command_imports_neither_the_other_commands_nor_tables_nor_other_packages() -> None:
    found = imported("pub", "memory://usage", "-t", "a", "-m", "x")
    assert "messaging.cli.pub" in found
    others = {f"messaging.cli.{name}" for name in OWN if name != "pub"}
    heavy = {"rich.console", "rich.progress", "typer.rich_utils", "pyspark_messaging.telemetry.command"}
    assert found & (others | heavy) == set()


def test_the_list_of_commands_imports_none_of_them() -> None:
    assert imported("--help") & {f"messaging.cli.{name}" for name in OWN} == set()


#: what takes long to import, and only commands that connect need
TOOLKIT = {"messaging.model", "messaging.instance", "messaging.execution", "reactivex", "asyncio", "ssl"}
#: what no command needs that connects and writes no tables
NEVER = {"pydantic_settings", "rich", "typer.rich_utils", "messaging.journal", "sqlite3", "sqlalchemy", "pyspark"}


@table("command", ["pub", "sub", "request", "mailbox", "gateway", "queue", "pipeline"])
def test_the_help_of_a_command_imports_nothing_of_the_toolkit(command: str) -> None:
    found = imported(command, "--help")
    assert f"messaging.cli.{command}" in found or "pyspark_messaging.telemetry.command" in found
    assert found & (TOOLKIT | NEVER) == set()


def test_the_list_of_commands_imports_nothing_of_the_toolkit() -> None:
    assert imported("--help") & (TOOLKIT | NEVER) == set()


@table(
    "arguments, needed, others",
    [
        (("pub", "memory://usage", "-t", "a", "-m", "x"), "messaging_adapters.memory", {"paho", "aio_pika"}),
        (("sub", "memory://usage", "-t", "a", "-W", "0.01"), "messaging_adapters.memory", {"paho", "aio_pika"}),
        (("info", "memory://usage", "--json"), "messaging_adapters.memory", {"paho", "aio_pika"}),
        (("queue", "purge", "memory://usage", "q"), "messaging_adapters.memory", {"paho", "aio_pika"}),
        (("pub", "mqtt://127.0.0.1:1", "-t", "a", "-m", "x"), "paho", {"messaging_adapters.memory", "aio_pika"}),
        (("sub", "amqp://127.0.0.1:1", "-t", "a"), "aio_pika", {"messaging_adapters.memory", "paho"}),
    ],
)
def test_a_command_that_connects_imports_its_own_adapter_and_no_journal(
    arguments: tuple[str, ...], needed: str, others: set[str]
) -> None:
    found = imported(*arguments)
    assert needed in found
    assert found & (NEVER | others) == set()


@table(
    "arguments",
    [
        ("-h",),
        ("pub", "-h"),
        ("pub", "memory://x", "-h"),
        ("mailbox", "-h"),
        ("mailbox", "run", "-h"),
        ("queue", "peek", "-h"),
        ("pipeline", "-h"),
        ("pipeline", "demo", "-h"),
    ],
)
def test_h_is_help(run: Run, arguments: tuple[str, ...]) -> None:
    code, out, _ = run(*arguments)
    assert (code, "Usage: messaging" in out) == (0, True)
    assert run(*arguments[:-1], "--help")[1] == out


def test_the_version_is_told_without_the_toolkit() -> None:
    found = imported("--version")
    assert "messaging.cli.app" in found
    assert found & {"messaging.model", "pydantic", "reactivex"} == set()


# --- exit codes, as far as the tests of the commands do not show them

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


@pytest.mark.parametrize("arguments", [("--help",), ("info", "--json"), ("context", "list", "--json")])
def test_a_closed_reader_of_stdout_is_0_without_an_error(arguments: tuple[str, ...]) -> None:
    pipe = " ".join([*COMMAND, *arguments])
    done = process("bash", "-c", f"{pipe} | true; echo ${{PIPESTATUS[0]}}")
    assert (done.stdout, done.stderr) == ("0\n", "")


def test_no_subscriber_where_one_is_required_is_1(run: Run, rabbitmq: RabbitMQ, topic: str) -> None:
    assert run("pub", rabbitmq.url, "-t", topic, "-m", "x", "-x", "mandatory=true")[0] == 1


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_while_connecting_is_130(silent: socket.socket, number: signal.Signals) -> None:
    url = f"mqtt://127.0.0.1:{silent.getsockname()[1]}"
    with Program("sub", url, "-t", "a", "--option", "connect_timeout=60") as sub, silent.accept()[0]:
        sub.signal(number)
        assert sub.ended() == 130
        assert b"Traceback" not in sub.err.rest()


@pytest.mark.parametrize(
    ("number", "module"),
    [
        (signal.SIGINT, "messaging.cli.app"),
        (signal.SIGTERM, "messaging.cli.sub"),
        pytest.param(signal.SIGTERM, "messaging.cli.app", marks=pytest.mark.slow),
        pytest.param(signal.SIGINT, "messaging.cli.sub", marks=pytest.mark.slow),
    ],
)
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
