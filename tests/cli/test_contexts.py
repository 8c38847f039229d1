"""Saved contexts: their file, its permissions, and their use in the other commands."""

from __future__ import annotations

import io
import json
import operator
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from messaging.cli import context_file
from messaging.cli.context_file import SavedContext
from messaging.errors import ConfigurationError
from messaging.testing.brokers import Mosquitto
from messaging.testing.tables import table
from messaging.testing.waiting import PATIENCE
from tests.cli.conftest import Run, refused
from tests.cli.program import Program, environment
from tests.forking import ForkedProcess


@pytest.fixture(autouse=True)
def file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The file of the contexts of this test."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    return tmp_path / "config" / "messaging" / "contexts.json"


def add(run: Run, *arguments: str) -> None:
    code, out, err = run("context", "add", *arguments)
    assert (code, out) == (0, "")
    assert err.count("\n") == 1
    assert "hunter2" not in err


def listed(run: Run) -> list[dict[str, Any]]:
    code, out, err = run("context", "list", "--json")
    assert (code, err) == (0, "")
    found: list[dict[str, Any]] = json.loads(out)
    return found


# --- in other commands


def test_a_context_stands_for_url_and_settings(run: Run, mosquitto: Mosquitto, monkeypatch: pytest.MonkeyPatch) -> None:
    add(run, "plant", f"{mosquitto.url}?version=3.1.1", "--option", "keepalive=20", "--id", "me")
    for arguments in (("@plant",), ("--url", "@plant"), ()):
        monkeypatch.setenv("MESSAGING_URL", "@plant" if not arguments else "")
        code, out, err = run("info", *arguments, "--json")
        assert (code, err) == (0, "")
        found = json.loads(out)
        assert (found["connection_uri"], found["protocols"]) == (mosquitto.url, ["mqtt", "mqtt3.1.1"])
        assert found["connection"]["client_id"] == "me"
        assert found["instance_id"].startswith("plant-info-")


def test_options_of_the_command_line_win_over_saved_settings(run: Run, mosquitto: Mosquitto) -> None:
    add(run, "plant", mosquitto.url, "--option", "version=3.1.1", "--id", "saved")
    found = json.loads(run("info", "@plant", "--json", "--option", "version=5", "-i", "given")[1])
    assert found["protocols"] == ["mqtt", "mqtt5"]
    assert found["connection"]["client_id"] == "given"


def test_pub_and_sub_meet_at_a_context(run: Run, mosquitto: Mosquitto, file: Path) -> None:
    add(run, "plant", mosquitto.url)
    variables = {"XDG_CONFIG_HOME": str(file.parents[1])}
    with Program("sub", "@plant", "-t", "contexts/meet", "-C", "1", variables=variables) as sub:
        assert f" at {mosquitto.url} as plantsub" in sub.says("subscribed to")
        assert run("pub", "@plant", "-t", "contexts/meet", "-m", "x")[0] == 0
        assert sub.out.rest() == b"x\n"


def test_the_name_of_a_context_needs_its_mark(run: Run) -> None:
    add(run, "plant", "mqtt://broker")
    assert "did you mean the saved context @plant?" in refused(run, "pub", "plant", "-t", "a", "-m", "x")
    assert "has no '://'" in refused(run, "pub", "other", "-t", "a", "-m", "x")


def test_an_unknown_context_names_the_nearest_one(run: Run) -> None:
    assert "no context 'plant' is saved; none is saved" in refused(run, "info", "@plant")
    add(run, "plant", "mqtt://broker")
    assert "did you mean 'plant'?" in refused(run, "info", "@plnt")
    assert "there are plant" in refused(run, "context", "show", "xyz")
    assert "there are plant" in refused(run, "context", "remove", "xyz")


# --- adding, showing, removing


def test_contexts_are_listed_shown_and_removed(run: Run) -> None:
    assert run("context", "list") == (0, "", "")
    add(run, "plant", "mqtt://broker:1884?keepalive=20")
    add(run, "office", "amqp://rabbit/vhost")
    assert run("context", "list") == (0, "office  amqp://rabbit/vhost\nplant   mqtt://broker:1884\n", "")
    assert run("context", "show", "plant") == (0, "url        mqtt://broker:1884\nkeepalive  20\n", "")
    assert run("context", "remove", "plant", "nonesuch")[0] == 2
    assert [each["name"] for each in listed(run)] == ["office", "plant"], "one was removed although the other is not"
    assert run("context", "remove", "plant", "office") == (0, "", "")
    assert listed(run) == []


def test_a_context_is_replaced_only_when_asked(run: Run) -> None:
    add(run, "plant", "mqtt://one")
    assert "--replace replaces it" in refused(run, "context", "add", "plant", "mqtt://two")
    assert listed(run)[0]["url"] == "mqtt://one"
    add(run, "plant", "mqtt://two", "--replace")
    assert listed(run)[0]["url"] == "mqtt://two"


def test_files_are_saved_with_absolute_names(run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    add(run, "plant", "mqtts://broker?cafile=ca.pem", "--option", "keyfile=/etc/key.pem")
    assert listed(run)[0]["settings"] == {"cafile": str(tmp_path / "ca.pem"), "keyfile": "/etc/key.pem"}


@table(
    "arguments, expected",
    [
        (("a b", "mqtt://x"), "context name 'a b': must be 1 to 64 letters"),
        (("@plant", "mqtt://x"), "context name '@plant'"),
        (("", "mqtt://x"), "context name ''"),
        (("plant", "broker"), "has no '://'"),
        (("plant", "@other"), "has no '://'"),
        (("plant", "mqqt://x"), "did you mean 'mqtt'?"),
        (("plant", "mqtt://x", "--option", "keepalve=3"), "did you mean 'keepalive'?"),
        (("plant", "mqtt://x", "--option", "keepalive=soon"), "option 'keepalive'"),
        (("plant", "mqtt://x?keepalive=3", "--option", "keepalive=4"), "keepalive is given twice"),
        (("plant", "mqtt://x", "-i", "a", "--option", "client_id=b"), "client_id is given twice"),
        (("plant",), "Missing argument"),
    ],
)  # fmt: skip
def test_wrong_settings_are_not_saved(run: Run, file: Path, arguments: tuple[str, ...], expected: str) -> None:
    assert expected in refused(run, "context", "add", *arguments)
    assert not file.exists()


# --- secrets


def test_no_password_is_shown_and_others_may_not_read_it(run: Run, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    add(run, "one", "mqtt://joe:hunter2@broker")
    add(run, "two", "mqtt://joe@broker?password=hunter2")
    add(run, "three", "mqtt://joe@broker", "--option", "password=hunter2")
    monkeypatch.setattr("sys.stdin", io.StringIO("hunter2\nmore\n"))
    add(run, "four", "mqtt://joe@broker", "--password-stdin")
    for arguments in (("list",), ("list", "--json"), *(("show", name) for name in ("one", "two", "three", "four"))):
        code, out, err = run("context", *arguments, "--debug")
        assert code == 0
        assert "hunter2" not in out + err
        assert "***" in out or arguments == ("list",)
    assert file.read_text().count("hunter2") == 4
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700


def test_the_saved_password_is_used(run: Run) -> None:
    add(run, "one", "mqtt://joe:hunter2@127.0.0.1:1")
    code, out, err = run("pub", "@one", "-t", "a", "-m", "x", "--debug")
    assert (code, out) == (1, "")
    assert "127.0.0.1:1" in err
    assert "hunter2" not in err
    assert context_file.get("one").url == "mqtt://joe:hunter2@127.0.0.1:1"


def test_a_file_that_others_may_read_is_warned_of(run: Run, file: Path) -> None:
    add(run, "plant", "mqtt://broker")
    file.chmod(0o644)
    code, out, err = run("context", "list")
    assert (code, out) == (0, "plant  mqtt://broker\n")
    assert "chmod 600" in err
    run("context", "add", "office", "mqtt://broker")
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


@table("text", ["", "mqtt://joe@x"])
def test_a_password_missing_or_there_twice_is_refused(run: Run, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("\n" if not text else "hunter2\n"))
    url = "mqtt://joe:hunter2@x" if text else "mqtt://joe@x"
    found = refused(run, "context", "add", "plant", url, "--password-stdin")
    assert ("given twice" if text else "no password") in found


# --- the file


@table(
    "text, expected",
    [
        ("", "is not JSON"),
        ("{", "is not JSON (line 1)"),
        ("[" * 100_000, "is not JSON"),
        ("[]", "must be an object"),
        ('{"version": 1}', "must be an object"),
        ('{"version": 2, "contexts": {}}', "'version' must be 1"),
        ('{"version": 1, "contexts": {"a b": {"url": "hunter2"}}}', "'a b' is not a name"),
        ('{"version": 1, "contexts": {"a": "hunter2"}}', "context 'a' must be an object"),
        ('{"version": 1, "contexts": {"a": {"url": 5}}}', "context 'a' must be an object"),
        (
            '{"version": 1, "contexts": {"a": {"url": "mqtt://x", "settings": {"password": 5}}}}',
            "'settings' of context",
        ),
        ("x" * 1_000_001, "larger than"),
    ],
)
def test_a_bad_file_is_an_error_that_names_it_and_is_left_alone(run: Run, file: Path, text: str, expected: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    for arguments in (("context", "list"), ("context", "add", "b", "mqtt://x"), ("info", "@a")):
        code, out, err = run(*arguments)
        assert (code, out) == (2, "")
        assert "hunter2" not in err
        assert str(file) in err.splitlines()[-1]
        assert expected in err.splitlines()[-1]
    assert file.read_text() == text


def test_a_bad_file_affects_no_command_that_does_not_need_it(run: Run, file: Path) -> None:
    file.parent.mkdir(parents=True)
    file.write_text("{")
    assert run("info", "memory://contexts")[0] == 0
    file.chmod(0o600)
    assert "has no '://'" in refused(run, "info", "broker")


def test_a_folder_that_cannot_be_written_is_an_error(run: Run, file: Path) -> None:
    file.parents[1].write_text("")  # a file where the folder is to be
    assert f"cannot write {file}" in refused(run, "context", "add", "a", "mqtt://x")


def test_a_failed_write_leaves_the_old_file_and_nothing_else(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    context_file.change(lambda known: known.update(a=SavedContext("mqtt://a", {})))
    before = file.read_bytes()

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(ConfigurationError, match="No space left on device"):
        context_file.change(lambda known: known.update(b=SavedContext("mqtt://b", {})))
    assert file.read_bytes() == before
    assert sorted(each.name for each in file.parent.iterdir()) == ["contexts.json", "contexts.lock"]


def test_a_link_to_the_file_stays_a_link(file: Path, tmp_path: Path) -> None:
    file.parent.mkdir(parents=True)
    elsewhere = tmp_path / "dotfiles.json"
    file.symlink_to(elsewhere)
    context_file.change(lambda known: known.update(a=SavedContext("mqtt://a", {})))
    assert file.is_symlink()
    assert [*json.loads(elsewhere.read_text())["contexts"]] == ["a"]


def test_concurrent_changes_lose_none(file: Path) -> None:
    """From threads of this process, and from other processes."""
    script = (
        "from messaging.cli.context_file import SavedContext, change\n"
        "for number in range(20):\n"
        "    change(lambda known: known.update({f'{NAME}-{number}': SavedContext('mqtt://x', {})}))\n"
        "raise SystemExit(0)\n"
    )
    variables = environment(XDG_CONFIG_HOME=str(file.parents[1]))
    others = [ForkedProcess(f"NAME = 'process{each}'\n{script}", (), variables) for each in range(2)]

    def save(name: str) -> None:
        for number in range(20):
            entry = {f"{name}-{number}": SavedContext("mqtt://x", {})}
            context_file.change(operator.methodcaller("update", entry))

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(save, [f"thread{each}" for each in range(4)], timeout=PATIENCE))
    assert [other.wait(PATIENCE) for other in others] == [0, 0]
    for other in others:
        other.close()
    assert len(context_file.load()) == 120


def test_a_relative_configuration_folder_is_ignored(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CONFIG_HOME", "config")
    assert context_file.path() == tmp_path / ".config" / "messaging" / "contexts.json"


# --- completion


def test_contexts_are_completed(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    add(run, "plant", "mqtt://joe:hunter2@broker")
    monkeypatch.setenv("_MESSAGING_COMPLETE", "zsh")
    assert run("sub", "@")[1] == "@plant\tmqtt://joe:***@broker\n"
    assert run("context", "show", "")[1] == "plant\tmqtt://joe:***@broker\n"
    assert run("context", "remove", "pl")[1] == "plant\tmqtt://joe:***@broker\n"
    assert run("sub", "@plant", "--option", "clean_")[1].startswith("clean_start=")
    assert [line.partition("\t")[0] for line in run("context", "")[1].splitlines()] == ["add", "list", "show", "remove"]
