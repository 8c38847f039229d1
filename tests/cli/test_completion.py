"""Shell completion: its candidates, its behaviour in bash, and its installation."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from messaging.cli.completion import SCRIPTS
from messaging.testing.tables import table
from messaging.testing.waiting import PATIENCE, eventually
from tests.cli.conftest import Run
from tests.cli.program import COMMAND, ROOT, environment, process

SHELLS = ("bash", "zsh", "fish")


def values(output: str) -> list[str]:
    """Return the candidates without their explanations."""
    return [line.partition("\t")[0] for line in output.splitlines()]


SCHEMES = ["amqp://", "amqps://", "memory://", "mqtt://", "mqtts://", "ws://", "wss://"]


@table(
    "words, expected",
    [
        (("su",), ["sub"]),
        (("sub", ""), SCHEMES),
        (("sub", "mq"), ["mqtt://", "mqtts://"]),
        (("sub", "-t", "a", "--url", "amqp"), ["amqp://", "amqps://"]),
        (("sub", "mqtt://x", "--tim"), ["--timeout"]),
        (("sub", "mqtt://x", ""), []),
        (("sub", "-q", ""), ["0", "1", "2"]),
        (("sub", "--ack", ""), ["written", "arrival", "never"]),
        (("sub", "--ack=n"), ["--ack=never"]),
        (("sub", "-x", "dead"), ["deadLetterChannel="]),
        (("sub", "-x", "autoA"), ["autoAcknowledge=true", "autoAcknowledge=false"]),
        (("sub", "-x", "overflow=drop"), ["overflow=drop_oldest", "overflow=drop_latest"]),
        (("pub", "-x", "dead"), []),
        (("pub", "mqtt://x", "-x", "contentT"), []),
        (("sub", "mqtt://x", "--option", "clean_"), ["clean_start="]),
        (("sub", "amqp://x", "--option", "clean_"), []),
        (("pub", "--content-type", "application/js"), ["application/json"]),
        (("pub", "--encoding", ""), ["gzip", "zstd"]),
        (("pipeline", "d"), ["demo"]),
        (("pipeline", "demo", "--see"), ["--seed"]),
        (("events", "w"), ["watch"]),
        (("events", "watch", "mq"), ["mqtt://", "mqtts://"]),
        (("events", "watch", "--type", ""), ["data", "all"]),
        (("events", "topics", "--grammar", ""), ["distributed", "typed"]),
        (("events", "watch", "-F", ""), ["text", "json", "payload"]),
        (("events", "publish", "--qos", "AT"), ["AT_MOST_ONCE", "AT_LEAST_ONCE"]),
        (("--show-completion", ""), [*SHELLS]),
        (("nonesuch", ""), []),
        (("sub", "nonesuch://x", "-x", ""), []),
        (("pub", "-m", "it's"), []),
    ],
)
def test_candidates_fit_the_words_before_them(
    run: Run, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], expected: list[str]
) -> None:
    monkeypatch.setenv("_MESSAGING_COMPLETE", "zsh")
    _, out, err = run(*words)
    assert (values(out), err) == (expected, "")


@table("shell", SHELLS)
def test_every_shell_gets_the_commands_as_candidates(run: Run, monkeypatch: pytest.MonkeyPatch, shell: str) -> None:
    monkeypatch.setenv("_MESSAGING_COMPLETE", shell)
    _, out, err = run("messaging " if shell == "bash" else "")
    assert err == ""
    found = values(out)
    assert [*found[:2], found[-1]] == ["pub", "sub", "pipeline"]


def test_candidates_are_explained_where_the_shell_shows_explanations(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("_MESSAGING_COMPLETE", "fish")
    assert run("info", "--feat")[1] == "--features\tList every known feature, and whether it is announced.\n"


def test_commands_are_completed_without_importing_any() -> None:
    code = (
        "import sys; from messaging.cli import main; main(['']); "
        "print(sorted(set(sys.modules) & {'messaging.cli.sub', 'messaging.cli.demo', 'rich.console', "
        "'typer.rich_utils', 'pyspark_messaging.telemetry.command'}))"
    )
    done = process(COMMAND[0], "-c", code, _MESSAGING_COMPLETE="zsh")
    assert done.stdout.splitlines()[-1] == "[]"


# --- in bash


class Bash:
    """An interactive bash with a command ``messaging`` that notes its arguments, and completes as the real one does."""

    def __init__(self, folder: Path) -> None:
        self._notes = folder / "notes"
        program = folder / "messaging"
        program.write_text(
            f'#!/bin/sh\n[ -n "$_MESSAGING_COMPLETE" ] && exec {" ".join(COMMAND)} "$@"\n'
            f"printf '%s\\n' \"$@\" END > {self._notes}\n"
        )
        program.chmod(0o755)
        config = folder / "config"
        (config / "messaging").mkdir(parents=True)
        contexts = {"version": 1, "contexts": {"plant": {"url": "mqtt://broker"}}}
        (config / "messaging" / "contexts.json").write_text(json.dumps(contexts))
        self._terminal, slave = pty.openpty()
        self._process = subprocess.Popen(
            ["bash", "--norc", "-i"], stdin=slave, stdout=slave, stderr=slave, start_new_session=True,
            env=environment(
                PATH=f"{folder}:{os.environ['PATH']}", TERM="dumb", HISTFILE="/dev/null", XDG_CONFIG_HOME=str(config)
            ),
            cwd=ROOT,
        )  # fmt: skip
        os.close(slave)
        (folder / "script").write_text(SCRIPTS["bash"])
        self._write(f". {folder}/script; echo loa''ded\n")
        self._until(b"loaded")

    def _write(self, text: str) -> None:
        os.write(self._terminal, text.encode())

    def _until(self, wanted: bytes) -> None:
        seen = b""
        while wanted not in seen:
            ready, _, _ = select.select([self._terminal], [], [], PATIENCE)
            assert ready, f"bash did not write {wanted!r}, but {seen!r}"
            seen += os.read(self._terminal, 4096)

    def run(self, typed: str) -> list[str]:
        """Type ``typed``, where a tab completes; the arguments that the command then has."""
        self._notes.unlink(missing_ok=True)
        self._write(typed + " | cat\n")
        eventually(lambda: self._notes.exists() and self._notes.read_text().endswith("END\n"))
        return self._notes.read_text().splitlines()[:-1]

    def close(self) -> None:
        self._process.kill()
        self._process.wait(PATIENCE)
        os.close(self._terminal)


@pytest.fixture(scope="module")
def bash(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bash]:
    bash = Bash(tmp_path_factory.mktemp("bash"))
    yield bash
    bash.close()


@pytest.mark.parametrize(
    ("typed", "arguments"),
    [
        ("messaging inf\t --j\t", ["info", "--json"]),
        ("messaging info memo\tx", ["info", "memory://x"]),
        ("messaging info memory:\tx", ["info", "memory://x"]),
        ("messaging info @pl\t--json", ["info", "@plant", "--json"]),
        ("messaging sub -x deadL\tx", ["sub", "-x", "deadLetterChannel=x"]),
        ("messaging sub -x deadLetterChannel=a -x autoAcknowledge=t\t", [
            "sub", "-x", "deadLetterChannel=a", "-x", "autoAcknowledge=true"
        ]),
    ],
)  # fmt: skip
def test_bash_completes(bash: Bash, typed: str, arguments: list[str]) -> None:
    assert bash.run(typed) == arguments


# --- the scripts


def test_the_script_is_that_of_the_shell_that_is_named(run: Run) -> None:
    for shell in SHELLS:
        code, out, err = run("--show-completion", shell)
        assert (code, err) == (0, "")
        assert f"_MESSAGING_COMPLETE{'=' if shell != 'fish' else ' '}{shell}" in out


def test_a_shell_without_completion_is_refused(run: Run) -> None:
    for option in ("--show-completion", "--install-completion"):
        assert run(option, "tcsh") == (
            2, "", "messaging: error: no completion for the shell 'tcsh'; name one of bash, zsh, fish\n"
        )  # fmt: skip


@table("shell", SHELLS)
def test_installing_twice_loads_it_once_and_keeps_the_start_up_file(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, shell: str
) -> None:
    for name in ("XDG_CONFIG_HOME", "XDG_DATA_HOME", "ZDOTDIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    start = tmp_path / f".{shell}rc"
    start.write_text("alias ll='ls -l'")
    for _ in range(2):
        code, out, err = run("--install-completion", shell)
        assert (code, out) == (0, "")
        found = re.fullmatch(rf"messaging: completion for {shell} is in (\S+?)(, which \S+ loads)?: .*\n", err)
        assert found is not None
    script = Path(found[1])
    assert script.read_text() == run("--show-completion", shell)[1]
    assert script.is_relative_to(tmp_path)
    lines = start.read_text().splitlines()
    assert lines == ["alias ll='ls -l'"] + ([] if shell == "fish" else [f"[ -r '{script}' ] && . '{script}'"])


def test_the_shell_that_runs_it_is_recognised(tmp_path: Path) -> None:
    done = process("bash", "--norc", "-c", f"{' '.join(COMMAND)} --show-completion; :", SHELL="/bin/false")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("_messaging_completion() {")
