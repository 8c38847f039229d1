"""Secrets are masked by the names of fields, and by patterns in texts."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from messaging.errors import ArgumentError
from messaging.observability.monitor.inspector import payload_text
from messaging.observability.monitor.plain import MASK, Bounds, Masking, Plain, clean
from messaging.testing.tables import table

SECRET = "hunter2hunter2"
#: values that no pattern would find: only the name of the field says that they are secret
SECRETS = st.from_regex(r"[a-z0-9]{8,20}", fullmatch=True).map(lambda text: f"Zq{text}")


@table(
    "text",
    [
        f"amqp://user:{SECRET}@broker/vhost", f"amqp://user:{SECRET}", f"password={SECRET}", f"Password : {SECRET}",
        f'{{"api_key": "{SECRET}"}}', f"api-key='{SECRET}'", f"Authorization: Bearer {SECRET}", f"Basic {SECRET}==",
        f"eyJhbGciOi.{SECRET}.{SECRET}", f"db_password_old={SECRET}", f"token: {SECRET}, a: 1",
        f'password="with \\" {SECRET}"', f"secret={{'a': '{SECRET}'}}", f"my.private.key={SECRET}", f"pwd={SECRET}&a=1",
    ],
)  # fmt: skip
def test_secrets_in_a_text_are_masked(text: str) -> None:
    assert SECRET not in Masking().text(text, is_cut=True)


@table("text", ["celsius=21", "http://host/a@b", "a token ring", "basic", "sensors/attic: 21.5"])
def test_other_texts_stay_as_they_are(text: str) -> None:
    if "@" not in text:
        assert Masking().text(text) == text


@table(
    "name",
    ["password", "PASSWORD", "dbPassword", "x-api-key", "API KEY", "clientSecret", "access_token", "auth", "pin", "jwt",
     "Cookie", "user.credentials"],
)  # fmt: skip
def test_fields_with_the_name_of_a_secret_are_masked(name: str) -> None:
    masking = Masking()
    assert masking.is_secret(name)
    assert masking.value({"a": [{name: {"deep": SECRET}}], "b": {name: 7}}) == {"a": [{name: MASK}], "b": {name: MASK}}


@table("name", ["celsius", "author", "pins", "path", "keyboard", "passed"])
def test_other_fields_are_not_masked(name: str) -> None:
    assert not Masking().is_secret(name)


def test_further_names_are_masked_where_an_application_says_so() -> None:
    masking = Masking(["iban", "social security"])
    assert masking.value({"customer_IBAN": SECRET, "socialSecurity": SECRET}) == {
        "customer_IBAN": MASK,
        "socialSecurity": MASK,
    }
    assert SECRET not in masking.text(f"social-security: {SECRET}")
    assert not Masking().is_secret("iban")


@table("names", ["password", 3, [3], [""], ["-"], ["x" * 101], ["a"] * 101])
def test_names_that_are_none_are_refused(names: Any) -> None:
    with pytest.raises(ArgumentError):
        Masking(names)


@given(st.text(), st.booleans())
def test_any_text_can_be_masked(text: str, is_cut: bool) -> None:
    assert isinstance(Masking().text(text, is_cut=is_cut), str)
    assert clean(text, 40, Masking()).isprintable()
    assert len(clean(text, 40, Masking())) <= 40 * 10, "an unprintable character takes at most ten"


@given(
    st.sampled_from(["password", "apiKey", "x-auth-token", "client_secret"]),
    SECRETS,
    st.recursive(
        st.none() | st.integers() | st.text(max_size=5), lambda inner: st.lists(inner, max_size=3), max_leaves=5
    ),
)
def test_no_secret_of_a_json_payload_is_shown(name: str, secret: str, other: Any) -> None:
    value = {"other": other, "list": [{name: secret}, {name: [secret]}], "text": f"{name}={secret}"}
    form, text, _ = payload_text(json.dumps(value).encode(), Masking())
    assert form == "json"
    assert secret not in text
    for cut in (20, 40, 60, 80):  # the beginning of a large payload is no JSON
        assert secret not in payload_text(json.dumps(value).encode()[:cut], Masking(), is_cut=True)[1]


@given(st.binary(max_size=200), st.booleans())
def test_any_payload_can_be_shown(payload: bytes, is_cut: bool) -> None:
    form, text, _ = payload_text(payload, Masking(), is_cut=is_cut)
    assert form in ("empty", "json", "text", "hex")
    assert all(each.isprintable() or each in "\n\t" for each in text)


def test_a_long_payload_is_cut() -> None:
    form, text, is_cut = payload_text(b"x" * 10_000, Masking())
    assert (form, len(text), is_cut) == ("text", 4096, True)
    assert payload_text(b"\xff" * 1000, Masking())[2]
    assert payload_text("é".encode()[:1], Masking(), is_cut=True) == ("text", "", True), "cut within a character"


def test_a_payload_that_is_nested_too_deeply_is_no_json() -> None:
    form, _, _ = payload_text(b"[" * 10_000 + b"]" * 10_000, Masking())
    assert form == "text"


def test_a_deeply_nested_secret_is_masked() -> None:
    value: Any = SECRET
    for _ in range(100):
        value = [value]
    assert SECRET not in json.dumps(Masking().value(value))


class Odd:
    """An object of the application: neither its text nor its attributes are shown."""

    def __repr__(self) -> str:
        return SECRET


def test_reports_are_converted_within_bounds_and_without_secrets() -> None:
    plain = Plain(Masking(), Bounds(depth=3, items=5, values=50, text=10))
    report = {
        "password": SECRET, "token": b"x", "many": [*range(100)], "deep": [[[[1]]]], "long": "x" * 100, "big": 10**30,
        "inf": float("inf"), "object": Odd(),
    }  # fmt: skip
    found = plain.convert(report)
    assert found == {"password": MASK, "token": MASK, "many": [0, 1, 2, 3, 4], "deep": [["…"]], "long": "x" * 9 + "…"}
    assert plain.omitted == 95 + 1 + 3
    wide = Plain(Masking(), Bounds()).convert(report)
    assert (wide["big"], wide["inf"], wide["object"]) == ("2^100", "inf", "<Odd>")
    assert SECRET not in json.dumps(wide, allow_nan=False)
