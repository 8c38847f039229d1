"""The envelope: it gives back its payload and header, and hostile bytes do no harm."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from messaging.model import envelope
from messaging.testing.tables import table

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)
HEADER = st.fixed_dictionaries(
    {},
    optional={
        "contentType": TEXT,
        "contentEncoding": TEXT,
        "correlationId": TEXT,
        "replyTo": TEXT,
        "messageId": TEXT,
        "headers": st.dictionaries(TEXT, TEXT, max_size=5),
        "repeated": st.dictionaries(TEXT, st.lists(TEXT, max_size=3), max_size=3),
        "expires": st.floats(allow_nan=False, allow_infinity=False) | st.integers(-(2**53), 2**53),
    },
)
PAYLOAD = st.binary(max_size=200) | st.binary(max_size=50).map(lambda tail: envelope.MAGIC + tail)


def enveloped(header: bytes, payload: bytes = b"x", version: int = 1) -> bytes:
    return envelope.MAGIC + bytes((version,)) + len(header).to_bytes(4, "big") + header + payload


@given(PAYLOAD, HEADER)
def test_an_envelope_gives_back_its_payload_and_header(payload: bytes, header: dict[str, Any]) -> None:
    assert envelope.decode(envelope.encode(payload, header)) == (payload, header)


@given(PAYLOAD)
def test_a_payload_that_looks_like_an_envelope_survives(payload: bytes) -> None:
    inner = envelope.encode(payload, {"contentType": "a"})
    assert envelope.decode(envelope.encode(inner, {})) == (inner, {})


@given(st.binary(max_size=300))
def test_bytes_that_do_not_start_with_the_magic_are_the_payload(data: bytes) -> None:
    assert envelope.decode(data) == (data, {})


@given(st.binary(max_size=60), st.binary(max_size=20), st.integers(0, 255), st.integers(0, 2**32 - 1))
def test_damaged_envelopes_never_raise(header: bytes, payload: bytes, version: int, length: int) -> None:
    good = enveloped(header, payload, version)
    for data in (good, good[:-1], good[:9] + length.to_bytes(4, "big") + good[13:]):
        found, known = envelope.decode(data)
        assert found == data or data.endswith(found)
        assert set(known) <= {
            "contentType", "contentEncoding", "correlationId", "replyTo", "messageId", "headers", "repeated", "expires",
        }  # fmt: skip


def test_without_header_a_payload_stays_as_it_is() -> None:
    assert envelope.encode(b"plain", {}) == b"plain"
    assert envelope.encode(b"", {}) == b""


def test_unknown_keys_are_ignored_so_that_a_later_version_may_add_some() -> None:
    assert envelope.decode(enveloped(b'{"contentType":"a","later":[1]}')) == (b"x", {"contentType": "a"})


@table(
    "data",
    [
        *map(enveloped, [
            b"[]", b"{", b"\xff", "{}".encode("utf-16"), b'{"contentType":1}', b'{"headers":{"a":1}}',
            b'{"headers":[]}', b'{"headers":{"a":"b"},"repeated":{"a":"b"}}',
            b'{"headers":{"a":"b"},"repeated":{"a":[1,"b"]}}', b'{"repeated":[]}', b'{"expires":true}',
            b'{"expires":NaN}', b'{"expires":Infinity}', b'{"expires":1' + b"0" * 400 + b"}",
            b'{"expires":1' + b"0" * 5000 + b"}", b'{"replyTo":"\\ud800"}',
            b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}", b"", b"{" + b" " * envelope.MAX_HEADER + b"}",
        ]),
        enveloped(b"{}", version=2), envelope.MAGIC, envelope.MAGIC + b"\x01\x00\x00",
        envelope.MAGIC + b"\x01\xff\xff\xff\xff{}",
    ],
)  # fmt: skip
def test_a_malformed_envelope_is_a_payload_like_any_other(data: bytes) -> None:
    assert envelope.decode(data) == (data, {})


def test_the_longest_header_the_core_lets_through_fits() -> None:
    longest = "\x01" * 65_535  # each letter takes six in JSON
    header = {
        **dict.fromkeys(("contentType", "contentEncoding", "correlationId", "replyTo", "messageId"), longest),
        "headers": {"a": "\x01" * 32_767},
    }
    assert len(json.dumps(header)) < envelope.MAX_HEADER
    assert envelope.decode(envelope.encode(b"x", header)) == (b"x", header)
