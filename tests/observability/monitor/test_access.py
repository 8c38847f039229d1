"""Who may use the page: tokens, hosts, origins."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from messaging.errors import ArgumentError, ConfigurationError
from messaging.observability.monitor.access import TOKEN_FILE_VARIABLE, TOKEN_VARIABLE, Access, AccessToken, find_token
from messaging.testing.tables import table

TOKEN = "0123456789abcdef-token"
OTHER = "fedcba9876543210-other"


@pytest.fixture(autouse=True)
def _no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (TOKEN_VARIABLE, TOKEN_FILE_VARIABLE):
        monkeypatch.delenv(name, raising=False)


@table("host", ["127.0.0.1", "127.1.2.3", "::1", "localhost", "LOCALHOST"])
def test_loopback_needs_no_token(host: str) -> None:
    access = Access(host, None)
    assert access.allows(None)


@table("host", ["0.0.0.0", "::", "192.168.1.7", "localhost.example.com", "monitor.example.com"])
def test_any_other_address_needs_a_token(host: str) -> None:
    with pytest.raises(ConfigurationError, match="needs a token"):
        Access(host, None)
    access = Access(host, AccessToken(TOKEN))
    assert access.allows(f"Bearer {TOKEN}")
    assert access.allows(f"bearer  {TOKEN} ")
    for wrong in (
        None,
        "",
        TOKEN,
        f"Basic {TOKEN}",
        f"Bearer {OTHER}",
        f"Bearer {TOKEN}x",
        f"Bearer {TOKEN[:-1]}",
        "Bearer é",
    ):
        assert not access.allows(wrong)


@table(
    "header, is_allowed",
    [
        ("127.0.0.1:8787", True), ("localhost:8787", True), ("[::1]:8787", True), ("127.0.0.9", True),
        ("proxy.example.com", True), ("PROXY.example.com:443", True), ("evil.example.com", False),
        ("localhost.evil.example.com", False), ("192.168.1.7", False), ("", False), ("127.0.0.1@evil", False),
        ("evil/127.0.0.1", False), ("[::1", False), ("127.0.0.1:x", False), ("a" * 400, False),
    ],
)  # fmt: skip
def test_a_monitor_on_loopback_is_opened_by_loopback_or_by_a_given_name(header: str, is_allowed: bool) -> None:
    assert Access("127.0.0.1", None, ["proxy.example.com"]).allows_host(header) is is_allowed


@table(
    "header, is_allowed",
    [("192.168.1.7:8787", True), ("[fe80::1]:8787", True), ("localhost", True), ("evil.example.com", False)],
)
def test_a_monitor_for_other_machines_is_opened_by_any_address(header: str, is_allowed: bool) -> None:
    assert Access("0.0.0.0", AccessToken(TOKEN)).allows_host(header) is is_allowed


@table(
    "origin, site, is_allowed",
    [
        (None, None, True), ("http://localhost:8787", "same-origin", True), ("http://LOCALHOST:8787", None, True),
        (None, "none", True), ("http://localhost:9999", None, False), ("http://evil.example.com", None, False),
        ("null", None, False), ("http://[", None, False), (None, "cross-site", False), (None, "same-site", False),
        ("http://localhost:8787", "cross-site", False),
    ],
)  # fmt: skip
def test_only_the_page_itself_may_ask(origin: str | None, site: str | None, is_allowed: bool) -> None:
    assert Access("127.0.0.1", None).allows_origin(origin, "localhost:8787", site) is is_allowed


@given(st.text(), st.text() | st.none())
def test_any_header_is_allowed_or_not(text: str, other: str | None) -> None:
    access = Access("127.0.0.1", AccessToken(TOKEN))
    assert access.allows_host(text) in (True, False)
    assert access.allows_origin(other, text, other) in (True, False)
    assert not access.allows(other)


def test_a_token_comes_from_argument_file_or_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert find_token(None, None) is None
    file = tmp_path / "token"
    file.write_text(f"  {TOKEN}\n")
    for found in (find_token(TOKEN, None), find_token(None, file), find_token(None, str(file))):
        assert found is not None
        assert found.matches(TOKEN)
    monkeypatch.setenv(TOKEN_FILE_VARIABLE, str(file))
    found = find_token(None, None)
    assert found is not None
    assert found.matches(TOKEN)
    monkeypatch.setenv(TOKEN_VARIABLE, OTHER)
    found = find_token(None, None)
    assert found is not None
    assert found.matches(OTHER), "the variable with the token comes first"


@table(
    "token",
    ["", "short", "x" * 15, "x" * 513, "with a space in it", "with\nnewline-in-it", "ümläüts-ümläüts!", 3, b"x" * 20],
)
def test_a_token_that_is_none_is_refused_without_being_shown(token: Any) -> None:
    with pytest.raises(ArgumentError) as caught:
        find_token(token, None)
    assert not token or str(token) not in str(caught.value)


def test_a_token_file_that_cannot_be_used_is_a_configuration_error(tmp_path: Path) -> None:
    binary = tmp_path / "binary"
    binary.write_bytes(b"\xff" * 20)
    for path in (tmp_path / "none", tmp_path, binary):
        with pytest.raises(ConfigurationError, match="cannot read the token file"):
            find_token(None, path)
    empty = tmp_path / "empty"
    empty.touch()
    with pytest.raises(ArgumentError, match="a token must have"):
        find_token(None, empty)
    with pytest.raises(ArgumentError, match="give one"):
        find_token(TOKEN, binary)


def test_a_token_is_in_no_representation(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG):
        token = AccessToken(TOKEN)
        assert TOKEN not in repr(token)
        assert TOKEN not in repr(vars(Access("127.0.0.1", token)))
    assert TOKEN not in caplog.text


@table(
    "host, names",
    [
        *((host, []) for host in ("", 3, None, "a\nb", "x" * 256)),
        *(("127.0.0.1", names) for names in ("a", 3, [3], ["a/b"], [""], ["x"] * 101)),
    ],
)
def test_hosts_that_are_none_are_refused(host: Any, names: Any) -> None:
    with pytest.raises(ArgumentError):
        Access(host, AccessToken(TOKEN), names)
