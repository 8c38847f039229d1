"""Configuration files: TOML and YAML, variables of the environment, relative paths, and what they refuse."""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from messaging.errors import ArgumentError, ConfigurationError, GatewaySettingsError
from messaging.gateway import GatewaySettings, Severity, load, read
from messaging.testing.tables import table

TOML = """
name = "gw"
data = "data"

[instances.plant]
url = "mqtt://localhost"

[instances.cloud]
url = "amqp://localhost"

[routes.data]
from = { instance = "plant", channel = "site/{site}/data" }
to = { instance = "cloud", channel = "uplink/{site}" }
buffer = { full = "block", max_bytes = "64 MiB", max_age = "7 d" }
"""
YAML = """
name: gw
data: data
instances:
  plant:
    url: mqtt://localhost
  cloud:
    url: amqp://localhost
routes:
  data:
    from: {instance: plant, channel: "site/{site}/data"}
    to: {instance: cloud, channel: "uplink/{site}"}
    buffer: {full: block, max_bytes: 64 MiB, max_age: 7 d}
"""


#: each list holds the one before nine times
BOMB = "a: &a [x]\n" + "".join(
    f"{after}: &{after} [{', '.join(['*' + before] * 9)}]\n"
    for before, after in zip("abcdefgh", "bcdefghi", strict=True)
)


def test_functions_in_a_module_beside_the_file_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "beside_the_file.py").write_text("def keep(draft):\n    return draft\n")
    step = 'transform = [{ call = "beside_the_file:keep" }]\n'
    assert load(write(tmp_path, TOML + step)).routes["data"].transform[0].call == "beside_the_file:keep"
    assert sys.path[-1] == str(tmp_path)
    before = [*sys.path]
    load(write(tmp_path, TOML))
    assert sys.path == before


def test_a_warning_is_logged_once_although_the_file_is_read_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = write(tmp_path, TOML.replace("mqtt://localhost", "mqtt://u:secret@localhost"))
    for _ in range(3):
        load(file)
    (record,) = [each for each in caplog.records if "password" in each.getMessage()]
    assert "secret" not in record.getMessage()


def write(folder: Path, text: str, name: str = "gateway.toml") -> Path:
    file = folder / name
    file.write_text(text)
    return file


def errors(file: Path) -> list[str]:
    return [each.text for each in read(file).problems if each.severity is Severity.ERROR]


def test_a_file_becomes_settings(tmp_path: Path) -> None:
    settings = load(write(tmp_path, TOML))
    assert isinstance(settings, GatewaySettings)
    assert settings.routes["data"].buffer.max_bytes == 64 * 2**20
    assert settings.routes["data"].buffer.max_age == 7 * 86_400
    assert settings.data == tmp_path / "data"


@table("name", ["gateway.yaml", "gateway.yml"])
def test_yaml_says_the_same(tmp_path: Path, name: str) -> None:
    assert load(write(tmp_path, YAML, name)) == load(write(tmp_path, TOML))


def test_anchors_and_merged_mappings_of_yaml_are_understood(tmp_path: Path) -> None:
    text = YAML.replace("  plant:\n", "  plant: &broker\n").replace(
        "    url: amqp://localhost", "    <<: *broker\n    keepalive: 30"
    )
    settings = load(write(tmp_path, text, "a.yaml"))
    assert settings.instances["cloud"].url == "mqtt://localhost"


def test_variables_of_the_environment_are_put_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RX_BROKER", "broker.example.com")
    text = TOML.replace("amqp://localhost", "amqp://${RX_BROKER}:${RX_UNSET:-5673}/$${x}")
    assert load(write(tmp_path, text.replace("/$${x}", ""))).instances["cloud"].url == "amqp://broker.example.com:5673"
    settings = load(write(tmp_path, TOML.replace('"uplink/{site}"', '"$$SYS/{site}"')))
    assert settings.routes["data"].target.channel == "$SYS/{site}"


@table("line, text, value", [("priority", "7", 7), ("enabled", "false", False), ("priority", "0", 0)])
def test_a_whole_variable_may_stand_for_a_number_or_a_boolean(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str, text: str, value: object
) -> None:
    monkeypatch.setenv("RX_VALUE", text)
    settings = load(write(tmp_path, f'{TOML}{line} = "${{RX_VALUE}}"\n'))
    assert getattr(settings.routes["data"], line) == value


def test_a_number_in_a_variable_is_a_text_where_one_is_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RX_NAME", "123")
    assert load(write(tmp_path, TOML.replace('name = "gw"', 'name = "${RX_NAME}"'))).name == "123"


def test_paths_are_relative_to_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "secret").write_text("hunter2\n")
    text = TOML.replace('"mqtt://localhost"', '"mqtt://gw@localhost"\npassword_file = "secret"')
    file = write(tmp_path, text)
    monkeypatch.chdir("/")
    settings = load(os.path.relpath(file))
    assert settings.instances["plant"].password_file == tmp_path / "secret"
    settings.instances["plant"].check_password_file()


def test_paths_of_instances_are_relative_to_the_file_and_must_be_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = 'cafile = "ca.pem"\ncertfile = "c.pem"\nkeyfile = "k.pem"\ninbox_path = "in"\noutbox_path = "~/out"'
    text = TOML.replace('"mqtt://localhost"', f'"mqtts://localhost"\n{options}').replace(
        '"amqp://localhost"', '"amqps://localhost?cafile=my%20ca.pem&heartbeat=5"'
    )
    file = write(tmp_path, text)
    monkeypatch.chdir("/")
    monkeypatch.setenv("HOME", "/home/me")
    problems = {(each.key, each.text) for each in read(os.path.relpath(file)).problems}
    assert {each for each in problems if "cannot read" in each[1]} == {
        ("instances.plant.cafile", f"cafile: cannot read the file {tmp_path}/ca.pem"),
        ("instances.plant.certfile", f"certfile: cannot read the file {tmp_path}/c.pem"),
        ("instances.plant.keyfile", f"keyfile: cannot read the file {tmp_path}/k.pem"),
        ("instances.cloud.url", f"cafile: cannot read the file {tmp_path}/my ca.pem"),
    }
    for name in ("ca.pem", "c.pem", "k.pem", "my ca.pem"):
        (tmp_path / name).write_text("")
    instances = load(os.path.relpath(file)).instances
    assert instances["plant"].model_extra == {
        "cafile": f"{tmp_path}/ca.pem", "certfile": f"{tmp_path}/c.pem", "keyfile": f"{tmp_path}/k.pem",
        "inbox_path": f"{tmp_path}/in", "outbox_path": "/home/me/out",
    }  # fmt: skip
    assert instances["cloud"].url == f"amqps://localhost?cafile={tmp_path}/my%20ca.pem&heartbeat=5"


def test_a_credential_of_systemd_is_read_when_it_connects(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = TOML.replace('"mqtt://localhost"', '"mqtt://gw@localhost"\ncredential = "plant"')
    instance = load(write(tmp_path, text)).instances["plant"]
    with pytest.raises(ConfigurationError, match=r"\$CREDENTIALS_DIRECTORY is not set"):
        instance.check_password_file()
    monkeypatch.setenv("CREDENTIALS_DIRECTORY", str(tmp_path))
    with pytest.raises(ConfigurationError, match="FileNotFoundError"):
        instance.check_password_file()
    (tmp_path / "plant").write_text("hunter2")
    instance.check_password_file()
    assert instance.keywords("gw-plant")["password_file"] == tmp_path / "plant"


@table("variable", ["MESSAGING_KEEP_SESSION", "messaging_keep_session", "Messaging_Keep_Session"])
def test_a_setting_of_the_environment_wins_over_what_a_gateway_asks_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    with monkeypatch.context() as environment:
        environment.setenv(variable, "false")
        given = load(write(tmp_path, TOML)).instances["plant"].keywords("gw-plant")
    assert given == {"start_offline": True, "name": "gw-plant"}


def test_secrets_are_in_no_text(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    text = TOML.replace('"mqtt://localhost"', '"mqtt://gw:hunter2@localhost"').replace(
        '"amqp://localhost"', '"amqp://gw@localhost"\npassword = "hunter3"'
    )
    with caplog.at_level(logging.DEBUG):
        settings = load(write(tmp_path, text))
    shown = f"{settings!r}{settings}{settings.instances}{caplog.text}"
    assert "hunter" not in shown
    assert "the file holds a password" in caplog.text
    wrong = write(tmp_path, text.replace('"hunter3"', '"hunter3"\nkeepalife = "hunter4"') + "hops = 3\n")
    with pytest.raises(GatewaySettingsError) as refusal:
        load(wrong)
    assert "hunter" not in f"{refusal.value}{refusal.value.problems}"


def test_all_errors_are_named_at_once(tmp_path: Path) -> None:
    text = TOML.replace("mqtt://localhost", "mqtx://localhost").replace('"site/{site}/data"', '"{a}/{a}"')
    problems = read(write(tmp_path, text)).problems
    assert [each.key for each in problems] == ["instances.plant.url", "routes.data.from.channel"]


@table(
    "name, content, text",
    [
        ("gateway.ini", b"", "ends with .toml, .yaml, .yml"),
        ("gateway.toml", b"name = '\xff'", "gateway.toml:1: a byte is no UTF-8"),
        ("gateway.toml", b"#" * (2**20 + 1), "more than 1048576 bytes"),
        ("missing.toml", None, "No such file"),
    ],
)
def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path, name: str, content: bytes | None, text: str) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigurationError, match=text):
        load(tmp_path / name)


@table("path", [None, 3, b"gateway.toml", "a\0b.toml"])
def test_what_is_no_path_is_refused(path: object) -> None:
    with pytest.raises(ArgumentError, match="path"):
        load(path)  # type: ignore[arg-type]


def test_a_byte_order_mark_is_skipped(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_bytes(b"\xef\xbb\xbf" + TOML.encode())
    assert load(tmp_path / "a.toml").name == "gw"


@table(
    "name, text",
    [
        ("a.toml", "x = " + "[" * 5000),
        ("a.yaml", "x: " + "[" * 5000),
        ("a.yaml", BOMB),
        ("a.yaml", "a: &a [*a]\n"),
        ("a.yaml", "? [a, b]\n: c\n"),
        ("a.yaml", "1: a\n"),
        ("a.yaml", "when: 2026-13-45\n"),
        ("a.yaml", "x: !!python/object/apply:os.system [id]\n"),
        ("a.yaml", "a: 1\n---\nb: 2\n"),
        ("a.yaml", "\x00"),
        ("a.yaml", ""),
        ("a.toml", ""),
    ],
)  # fmt: skip
def test_hostile_documents_are_problems(tmp_path: Path, name: str, text: str) -> None:
    assert errors(write(tmp_path, text, name))


@table(
    "change, key",
    [
        ('data = "data" -> data = "a\\u0000b"', "data"),
        ('data = "data" -> data = ""', "data"),
        (f'data = "data" -> data = "{"x" * 5000}"', "data"),
        (f'"mqtt://localhost" -> "mqtts://localhost"\ncafile = "{"x" * 5000}"', "instances.plant.cafile"),
        ('"mqtt://localhost" -> "mqtt://localhost"\noutbox_path = "a\\u0000"', "instances.plant.outbox_path"),
        (" -> rate = { messages = inf }\n", "routes.data.rate.messages"),
        (" -> rate = { messages = 1e30 }\n", "routes.data.rate.messages"),
        (" -> batch = { count = 1000000000000 }\n", "routes.data.batch.count"),
        (' -> deadband = { field = "v", absolute = inf }\n', "routes.data.deadband.absolute"),
        ('"64 MiB" -> 10000000000000000000000', "routes.data.buffer.max_bytes"),
    ],
)
def test_values_that_no_part_can_use_are_problems_at_their_key(tmp_path: Path, change: str, key: str) -> None:
    old, new = change.split(" -> ")
    text = TOML.replace(old, new) if old else TOML + new
    assert [each.key for each in read(write(tmp_path, text)).problems] == [key]


@table("step", ["rename", "select", "drop", "set", "map", "unit", "model", "call", "sparkplug"])
def test_a_step_without_a_value_is_a_problem(tmp_path: Path, step: str) -> None:
    text = YAML + f"    transform: [{{{step}: null}}]\n"
    (problem,) = read(write(tmp_path, text, "a.yaml")).problems
    assert problem.key == "routes.data.transform[0]"
    assert "exactly one of rename" in problem.text


@given(text=st.text(max_size=80))
def test_any_text_is_settings_or_problems(text: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.getbasetemp()
    for name in ("any.toml", "any.yaml"):
        (folder / name).write_bytes(text.encode("utf-8", "replace"))
        found = read(folder / name)
        assert found.settings is not None or found.problems


@given(
    value=st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(
                st.sampled_from(
                    ["url", "from", "to", "buffer", "full", "instance", "channel", "transform", "unit", "a"]
                ),
                inner,
                max_size=4,
            )
        ),
        max_leaves=12,
    ),
    key=st.sampled_from(["name", "data", "instances", "routes", "requests", "devices", "status", "monitoring"]),
)
def test_values_of_any_shape_are_handled(
    value: object, key: str, tmp_path_factory: pytest.TempPathFactory
) -> None:  # fmt: skip
    import yaml

    file = tmp_path_factory.getbasetemp() / "shape.yaml"
    document = {**yaml.safe_load(YAML), key: value}
    file.write_text(yaml.safe_dump(document))
    found = read(file)
    assert found.settings is not None or any(each.severity is Severity.ERROR for each in found.problems)
    assert all(each.line for each in found.problems)
