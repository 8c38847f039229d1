"""Credentials as values, and the settings that name their provider."""

from __future__ import annotations

import base64
import functools
import json
import math
import pickle
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from pydantic import SecretStr

import messaging
from messaging.errors import ArgumentError, InvalidOptionError
from messaging.model import parse_url
from messaging.model.credentials import Credentials, token_expiry
from messaging.model.settings import Settings, load_settings
from messaging.testing.tables import table
from tests.doubles.fake import FakeSettings

SECRET = "hunter2-pl4nted"


def load(url: str = "fake://x", **keywords: Any) -> Settings:
    return load_settings(FakeSettings, parse_url(url), keywords)


def token(**claims: Any) -> str:
    """A JSON Web Token without a valid signature."""

    def part(value: object) -> str:
        return base64.urlsafe_b64encode(json.dumps(value).encode()).rstrip(b"=").decode()

    return f"{part({'alg': 'none'})}.{part(claims)}.c2ln"


# --- the value


def test_credentials_are_exported_with_the_user_name_first() -> None:
    given = messaging.Credentials("me", SECRET)
    assert (given.username, given.password.get_secret_value()) == ("me", SECRET)
    assert given.expires_at is None
    assert given.remaining == math.inf


def test_a_lifetime_is_counted_from_the_creation() -> None:
    given = Credentials("me", SECRET, valid_for=60)
    assert 59 < given.remaining <= 60
    assert given.expires_at is not None
    assert 59 < given.expires_at - time.time() < 61


@table("kind", ["seconds", "datetime"])
def test_an_expiry_is_a_time(kind: str) -> None:
    at = datetime.now(UTC) + timedelta(seconds=100)
    given = Credentials("me", SECRET, expires_at=at if kind == "datetime" else at.timestamp())
    assert 99 < given.remaining < 101


def test_expired_credentials_have_a_negative_time_left() -> None:
    assert Credentials("me", SECRET, expires_at=time.time() - 5).remaining < -4


MALFORMED: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
    "no password": (("me",), {}),
    "bytes": (("me", SECRET.encode()), {}),
    "empty password": (("me", ""), {}),
    "empty user name": (("", SECRET), {}),
    "number as user name": ((7, SECRET), {}),
    "line end": (("me", f"{SECRET}\n"), {}),
    "too long": (("me", SECRET * 5000), {}),
    "no time": (("me", SECRET), {"valid_for": 0}),
    "negative time": (("me", SECRET), {"valid_for": -1}),
    "endless time": (("me", SECRET), {"valid_for": math.inf}),
    "time as text": (("me", SECRET), {"valid_for": "60"}),
    "true as time": (("me", SECRET), {"valid_for": True}),
    "not a time": (("me", SECRET), {"expires_at": math.nan}),
    "both times": (("me", SECRET), {"valid_for": 1, "expires_at": 2}),
    "naive datetime": (("me", SECRET), {"expires_at": datetime(2030, 1, 1)}),
}


@table("name", [*MALFORMED])
def test_malformed_credentials_are_refused_without_a_value_in_the_text(name: str) -> None:
    arguments, keywords = MALFORMED[name]
    with pytest.raises(ArgumentError) as caught:
        Credentials(*arguments, **keywords)
    assert SECRET not in str(caught.value)


def test_credentials_show_no_password_and_cannot_be_changed_or_pickled() -> None:
    given = Credentials("me", SECRET, valid_for=60)
    for text in (repr(given), str(given), f"{given}", repr([given]), repr(given.password)):
        assert SECRET not in text
    assert "'me'" in repr(given)
    with pytest.raises(AttributeError):
        given.password = SecretStr("x")
    with pytest.raises(AttributeError):
        del given.username
    with pytest.raises(TypeError, match="pickled"):
        pickle.dumps(given)


def test_a_json_web_token_says_when_it_expires() -> None:
    at = int(time.time()) + 30
    assert token_expiry(SecretStr(token(exp=at))) == at
    assert 28 < Credentials("me", token(exp=at)).remaining <= 30
    # a lifetime that is given wins
    assert Credentials("me", token(exp=at), valid_for=5).remaining <= 5


@table(
    "text",
    ["a.b.c", "eyJ.e.s", "eyJhbGciOiJub25lIn0.W10.s", token(), token(exp="soon"), token(exp=True), token(exp=-1),
     token(exp=1e300), f"{token(exp=9)}.more", "eyJ" + "x" * 70_000 + ".b.c", "plain"],
)  # fmt: skip
def test_any_other_password_says_nothing(text: str) -> None:
    assert token_expiry(SecretStr(text)) is None


# --- the settings


def test_the_provider_must_be_callable() -> None:
    for value in (SECRET, ("me", SECRET), Credentials("me", SECRET), 7, Credentials):
        with pytest.raises(InvalidOptionError, match="option 'credentials': must be a callable") as caught:
            load(credentials=value)
        assert SECRET not in str(caught.value)
    assert load(credentials=lambda: SECRET).credentials is not None


def test_a_provider_is_a_keyword_only(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvalidOptionError, match="option 'credentials': not in a URL"):
        load("fake://x?credentials=ask")
    monkeypatch.setenv("MESSAGING_CREDENTIALS", "ask")
    with pytest.raises(InvalidOptionError, match=r"'credentials' \(from MESSAGING_CREDENTIALS\): must be a callable"):
        load()


def test_settings_show_neither_provider_nor_command() -> None:
    found = load(credentials=functools.partial(str, SECRET))
    for each in (found, load(password_command=["vault", SECRET])):
        for text in (repr(each), str(each), each.model_dump_json(), repr(each.model_dump()), repr(each.credentials)):
            assert SECRET not in text


@table(
    "value, words",
    [
        ("vault read 'a b'", ("vault", "read", "a b")),
        (["vault", "read", "a b"], ("vault", "read", "a b")),
        (("vault",), ("vault",)),
    ],
)
def test_a_command_is_a_line_or_a_list(value: Any, words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    assert load(password_command=value).password_command == words
    if isinstance(value, str):
        monkeypatch.setenv("MESSAGING_PASSWORD_COMMAND", value)
        assert load().password_command == words


def test_a_url_runs_no_command() -> None:
    with pytest.raises(InvalidOptionError, match="option 'password_command': not in a URL") as caught:
        load(f"fake://x?password_command=echo%20{SECRET}")
    assert SECRET not in str(caught.value)


def test_a_file_is_named_by_keyword_or_url() -> None:
    assert load(password_file="/run/secrets/p").password_file == Path("/run/secrets/p")
    assert load("fake://x?password_file=/run/secrets/p").password_file == Path("/run/secrets/p")


@table("value", ["", "  ", "a 'b", [], [""], ["a", 7], 7, b"x", ["a\0b"]])
def test_what_is_no_command_is_refused(value: Any) -> None:
    with pytest.raises(InvalidOptionError, match="option 'password_command': "):
        load(password_command=value)


PROVIDERS: dict[str, Callable[[], Any]] = {
    "credentials": lambda: lambda: SECRET,
    "password_command": lambda: "vault read",
    "password_file": lambda: "/nowhere/password",
    "password": lambda: SECRET,
}


@table("one, other", [(one, other) for one in PROVIDERS for other in PROVIDERS if one < other])
def test_two_sources_of_a_password_exclude_each_other(one: str, other: str) -> None:
    with pytest.raises(InvalidOptionError, match="exclude each other") as caught:
        load(**{one: PROVIDERS[one](), other: PROVIDERS[other]()})
    assert one in str(caught.value)
    assert other in str(caught.value)
    assert SECRET not in str(caught.value)


@table("option", [each for each in PROVIDERS if each != "password"])
def test_a_password_in_the_url_excludes_a_provider(option: str) -> None:
    with pytest.raises(InvalidOptionError, match="and the password of the URL exclude each other"):
        load(f"fake://me:{SECRET}@x", **{option: PROVIDERS[option]()})


def test_a_source_that_is_given_wins_over_those_of_the_environment(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "password"
    file.write_text("of the file\n")

    def names(**keywords: Any) -> list[str]:
        found = load(**keywords)
        return [each for each in PROVIDERS if getattr(found, each) is not None]

    monkeypatch.setenv("MESSAGING_PASSWORD_FILE", str(file))
    assert names() == ["password_file", "password"]  # read once, for adapters that read it only once
    monkeypatch.setenv("MESSAGING_PASSWORD_COMMAND", "vault read")
    assert "password_file" not in names()
    assert "password_command" in names()
    monkeypatch.setenv("MESSAGING_PASSWORD", "of the environment")
    assert names() == ["password"]
    for option, make in PROVIDERS.items():
        assert names(**{option: make()}) == [option]
    assert names(url=f"fake://me:{SECRET}@x") == ["password"]
