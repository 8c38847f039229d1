"""Messages on their way through a route."""

from __future__ import annotations

import gzip
import json
from typing import Any

import pytest

from messaging.errors import CodecError, DecodeError, EncodeError
from messaging.gateway.pipeline import Draft
from messaging.testing.tables import table


def test_a_value_is_decoded_once_and_encoded_when_it_is_read() -> None:
    made = Draft("a", b'{"x": "\xc3\xa4"}')
    assert made.value == {"x": "ä"}
    assert made.value is made.value
    assert made.payload == b'{"x": "\xc3\xa4"}'
    made.set_value({"y": [1, None]})
    assert made.payload == b'{"y":[1,null]}'
    assert (made.content_type, made.content_encoding) == ("application/json", None)


def test_a_compressed_payload_is_decompressed_for_its_value() -> None:
    payload = gzip.compress(b"[1]")
    made = Draft("a", payload, content_encoding="gzip")
    assert made.value == [1]
    assert (made.payload, made.content_encoding) == (payload, "gzip")


@table("payload", [b"", b"no json", b"\xff", b"[" * 100_000, b"1" * 5000])
def test_what_is_no_json_is_refused(payload: bytes) -> None:
    made = Draft("a", payload)
    with pytest.raises(DecodeError, match="the payload is not JSON"):
        _ = made.value
    assert made.fields == {}


@table("encoding", ["gzip", "unknown"])
def test_an_encoding_that_cannot_be_undone_is_refused(encoding: str) -> None:
    made = Draft("a", b"{}", content_encoding=encoding)
    with pytest.raises(CodecError):
        _ = made.value
    assert made.fields == {}


@table("value", [float("nan"), float("inf"), object(), "\ud800", {1j: 1}])
def test_what_json_cannot_express_is_refused(value: Any) -> None:
    made = Draft("a", b"")
    made.set_value(value)
    with pytest.raises(EncodeError):
        _ = made.payload


def test_only_objects_have_fields() -> None:
    assert Draft("a", b'{"x": 1}').fields == {"x": 1}
    assert Draft("a", b"[1]").fields == Draft("a", b"5").fields == {}


def test_a_copy_has_headers_of_its_own() -> None:
    made = Draft("a", b"1", headers={"h": 1}, message_id="m", captures={"x": "1"})
    made.sources, made.timestamp = ("s",), 5.0
    copied = made.copy(target="t")
    copied.headers["h"] = 2
    copied.set_value(2)
    assert (made.headers, made.payload, made.target) == ({"h": 1}, b"1", None)
    assert (copied.payload, copied.target, copied.sources, copied.message_id) == (b"2", "t", ("s",), "m")
    assert (copied.captures, copied.timestamp, copied.channel) == ({"x": "1"}, 5.0, "a")


def test_a_replaced_payload_is_decoded_anew() -> None:
    made = Draft("a", b"1", content_type="application/json")
    assert made.value == 1
    made.set_payload(b"2", "application/json")
    assert made.value == 2
    assert json.loads(made.payload) == 2
