"""Settings: from where, in which order, and what a mistake says."""

from __future__ import annotations

import dataclasses
import threading
from concurrent.futures import ThreadPoolExecutor
from ipaddress import IPv4Network
from pathlib import Path
from typing import Annotated, Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import Field, SecretStr

from messaging.errors import ConfigurationError, InvalidOptionError
from messaging.model import parse_url
from messaging.model.settings import Settings, TlsSettings, load_settings
from messaging.testing.tables import table
from messaging.testing.waiting import PATIENCE
from tests.doubles.fake import FakeSettings

SECRET = "hunter2-pl4nted"


def load(url: str = "fake://x", **keywords: Any) -> FakeSettings:
    return load_settings(FakeSettings, parse_url(url), keywords)


def test_defaults_are_those_documented() -> None:
    defaults = load_settings(Settings, parse_url("fake://x"), {})
    assert defaults.timeout == 30.0
    assert defaults.connect_timeout == 10.0
    assert defaults.close_timeout == 5.0
    assert (defaults.name, defaults.client_id, defaults.username, defaults.password) == (None, None, None, None)
    assert (defaults.retry_connect, defaults.overflow, defaults.buffer_size) == (False, "block", 1024)
    assert all(field.description for field in Settings.model_fields.values())
    assert TlsSettings.model_fields["allow_insecure"].default is False


def test_a_keyword_wins_over_the_url_which_wins_over_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MESSAGING_COLOUR", "environment")
    assert load().colour == "environment"
    assert load("fake://x?colour=url").colour == "url"
    assert load("fake://x?colour=url", colour="keyword").colour == "keyword"
    monkeypatch.setenv("messaging_timeout", "7")
    assert load().timeout == 7.0
    monkeypatch.delenv("MESSAGING_COLOUR")
    assert load().colour == "red"


def test_a_secret_is_also_read_from_a_file_which_loses_to_everything(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "secret"
    file.write_text(f"{SECRET}\n")
    monkeypatch.setenv("MESSAGING_PASSWORD_FILE", str(file))

    def password(**keywords: Any) -> str:
        found = load(**keywords).password
        assert found is not None
        return found.get_secret_value()

    assert password() == SECRET
    monkeypatch.delenv("MESSAGING_PASSWORD_FILE")
    monkeypatch.setenv("messaging_password_file", str(file))
    assert password() == SECRET
    monkeypatch.setenv("MESSAGING_PASSWORD", "environment")
    assert password() == "environment"
    assert password(url="fake://x?password=url") == "url"
    assert password(url="fake://x?password=url", password="keyword") == "keyword"
    assert password(password=SecretStr("wrapped")) == "wrapped"


@table("content, expected", [(" a b \r\n", " a b "), ("a\n\n", "a"), ("", ""), ("é", "é")])
def test_only_line_ends_are_cut_off_a_secret_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, content: str, expected: str
) -> None:
    file = tmp_path / "secret"
    file.write_bytes(content.encode())
    monkeypatch.setenv("MESSAGING_PASSWORD_FILE", str(file))
    found = load().password
    assert found is not None
    assert found.get_secret_value() == expected


@table("kind", ["missing", "directory", "binary"])
def test_a_secret_file_that_cannot_be_read_says_which(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kind: str
) -> None:
    path = tmp_path / "secret"
    if kind == "directory":
        path.mkdir()
    elif kind == "binary":
        path.write_bytes(b"\xff\xfe" + SECRET.encode())
    monkeypatch.setenv("MESSAGING_PASSWORD_FILE", str(path))
    with pytest.raises(InvalidOptionError, match=r"MESSAGING_PASSWORD_FILE: cannot read '.*/secret'") as caught:
        load()
    assert caught.value.option == "password"
    assert SECRET not in str(caught.value)


def test_options_that_are_no_secrets_are_not_read_from_files(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "x"
    file.write_text("blue")
    monkeypatch.setenv("MESSAGING_COLOUR_FILE", str(file))
    assert load().colour == "red"


def test_variables_of_others_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MESSAGING_URL", "memory://x")
    monkeypatch.setenv("MESSAGING_SOMETHING_ELSE", "1")
    monkeypatch.setenv("TIMEOUT", "1")
    assert load().timeout == 30.0


@table(
    "option, hint",
    [("colur", "did you mean 'colour'"), ("time_out", "did you mean 'timeout'"), ("zzz", "known: ")],
)
def test_an_unknown_option_suggests_the_near_one(option: str, hint: str) -> None:
    cases: list[dict[str, Any]] = [{"url": f"fake://x?{option}=1"}, {option: 1}]
    for case in cases:
        with pytest.raises(InvalidOptionError, match=f"unknown option '{option}' for fake://.*{hint}") as caught:
            load(**case)
        assert caught.value.option == option
        assert isinstance(caught.value, ConfigurationError)


BAD: dict[str, list[Any]] = {
    "timeout": [0, -1, "soon", "nan", "inf", float("inf"), 1e200, None, []],
    "connect_timeout": [0, "x"],
    "reconnect_min": [0, -0.1],
    "outbox_size": [0, -1, "many", 1.5],
    "outbox_bytes": [0, "1k"],
    "buffer_size": [0],
    "prefetch": [0, 65_536, "x"],
    "overflow": ["drop", "", 1],
    "name": ["", "a\nb", "a\x00", "x" * 201, 7],
    "client_id": ["x" * 201, 7],
    "retry_connect": ["perhaps", 2],
    "max_message_size": [0, "big"],
    "password": [7],
    "labels": ["not json", 7],
    "cafile": ["", 7],
    "inbox_path": ["", 7],
    "outbox_path": ["", 7],
}


@table("option, value", [(option, value) for option in BAD for value in BAD[option]])
def test_a_value_that_does_not_fit_names_its_option_and_not_the_value(option: str, value: Any) -> None:
    with pytest.raises(InvalidOptionError, match=f"option '{option}': ") as caught:
        load(**{option: value})
    assert caught.value.option == option
    assert len(str(caught.value)) < 500


@table("option, value", [("timeout", SECRET), ("labels", SECRET), ("outbox_size", SECRET)])
def test_a_value_of_the_environment_that_does_not_fit_names_its_variable(
    monkeypatch: pytest.MonkeyPatch, option: str, value: str
) -> None:
    monkeypatch.setenv(f"MESSAGING_{option.upper()}", value)
    with pytest.raises(InvalidOptionError, match=f"MESSAGING_{option.upper()}") as caught:
        load()
    assert SECRET not in str(caught.value)
    assert caught.value.option == option


@dataclasses.dataclass
class Point:
    x: int


class Collections(Settings):
    """Settings that are no single values."""

    names: list[str] = Field(default_factory=list)
    sizes: dict[str, int] | None = None
    either: int | tuple[int, ...] = 0
    bounded: Annotated[list[str], Field(max_length=2)] | None = None
    written: str | list[str] = ""
    point: Point | None = None
    network: IPv4Network | None = None
    text: str | bytes = ""


@table(
    "option, written, value",
    [
        ("names", '["a", "b"]', ["a", "b"]),
        ("sizes", '{"a": 1}', {"a": 1}),
        ("sizes", "null", None),
        ("either", "[1, 2]", (1, 2)),
        ("either", "7", 7),
        ("text", '["a"]', '["a"]'),
        ("bounded", '["a"]', ["a"]),
        ("written", "a,b", "a,b"),
        ("written", '["a"]', ["a"]),
        ("point", '{"x": 1}', Point(1)),
        ("network", "10.0.0.0/8", IPv4Network("10.0.0.0/8")),
        ("retry_connect", "true", True),
        ("prefetch", "7", 7),
    ],
)
def test_collections_in_the_environment_are_json(
    monkeypatch: pytest.MonkeyPatch, option: str, written: str, value: Any
) -> None:
    monkeypatch.setenv(f"Messaging_{option}", written)
    assert getattr(load_settings(Collections, parse_url("fake://x"), {}), option) == value
    monkeypatch.setenv(f"Messaging_{option}", "[")
    if option not in ("text", "written"):
        with pytest.raises(InvalidOptionError, match=f"option '{option}' .from MESSAGING_{option.upper()}"):
            load_settings(Collections, parse_url("fake://x"), {})
    monkeypatch.delenv(f"Messaging_{option}")


def test_threads_may_be_the_first_to_use_settings_together() -> None:
    """They are compiled on first use, by one of the threads."""
    barrier = threading.Barrier(8)

    def first(kind: type[TlsSettings]) -> float:
        barrier.wait(PATIENCE)
        return kind(timeout="3").timeout

    with ThreadPoolExecutor(8) as pool:
        for _ in range(5):
            kind = type("Fresh", (TlsSettings,), {"__annotations__": {"own": int}, "own": 1})
            assert [*pool.map(first, [kind] * 8)] == [3.0] * 8


def test_options_of_a_url_are_parsed_from_text() -> None:
    found = load("fake://x?timeout=1.5&retry_connect=true&outbox_size=7&cafile=%2Ftmp%2Fca.pem&name=n&overflow=fail")
    assert (found.timeout, found.retry_connect, found.outbox_size) == (1.5, True, 7)
    assert (found.cafile, found.name, found.overflow) == (Path("/tmp/ca.pem"), "n", "fail")


def test_settings_cannot_be_changed_and_do_not_show_the_password() -> None:
    found = load(password=SECRET)
    with pytest.raises(ValueError, match="frozen"):
        found.timeout = 1.0
    assert SECRET not in repr(found) + str(found)


@table(
    "keywords, option",
    [
        ({"outbox_full": "reject"}, "outbox_full"),
        ({"outbox_fsync": "never"}, "outbox_fsync"),
        ({"outbox_disk_bytes": 10**6}, "outbox_disk_bytes"),
        ({"outbox_full": "reject", "outbox_path": "folder"}, None),
    ],
)
def test_options_without_effect_are_refused(keywords: dict[str, Any], option: str | None) -> None:
    refused = None
    try:
        load(**keywords)
    except InvalidOptionError as error:
        refused = error.option
    assert refused == option


@table(
    "keywords, warnings",
    [
        ({"reconnect_min": 2, "reconnect_max": 1}, 1),
        ({"reconnect_min": 2, "reconnect_max": 2}, 0),
        ({"reconnect_max": 0.01}, 0),
    ],
)
def test_bounds_that_exclude_each_other_are_a_warning(
    keywords: dict[str, Any], warnings: int, caplog: pytest.LogCaptureFixture
) -> None:
    load(**keywords)
    assert caplog.text.count("'reconnect_min' (2 s) is above 'reconnect_max' (1 s)") == warnings


@given(option=st.sampled_from(sorted(FakeSettings.model_fields)), value=st.text(max_size=8) | st.integers() | st.none())
@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_value_is_taken_or_an_invalid_option(option: str, value: Any) -> None:
    refused = ""
    try:
        load(**{option: value})
    except InvalidOptionError as error:
        refused = error.option
    assert refused in ("", option)
