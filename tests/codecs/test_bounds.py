"""Payloads of a few bytes that stand for far more than their size: each is read at once, or refused at once."""

from __future__ import annotations

import enum
import ipaddress
import math
import struct
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import date, datetime, timedelta
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Annotated, Any, Literal

import cbor2
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, ByteSize, Field

from messaging.codecs import decode, encode
from messaging.codecs.bounds import MAX_EXPONENT, MAX_INT_BITS, holds_vast, is_vast, is_vast_text, leaves
from messaging.codecs.tags import MAX_REFERENCED
from messaging.errors import DecodeError
from messaging.model import MessageContext
from messaging.testing.tables import table

JSON = "application/json"
CBOR = "application/cbor"
MSGPACK = "application/msgpack"
TEXT = "text/plain"

#: processor time that one payload may take, seconds: a hundred times what the slowest of them takes
DEADLINE = 1.0


class Amount(BaseModel):
    value: int = 0
    price: Decimal = Decimal(0)
    share: Fraction = Fraction(0)


@dataclass
class Span:
    value: timedelta = timedelta(0)
    ratio: float = 0.0


class Colour(enum.Enum):
    RED = 1


class Bits(enum.IntFlag):
    ONE = 1


class Temperature(BaseModel):
    celsius: float = 0
    serial: int = 0


MODELS: list[Any] = [
    *(None, Any, int, float, complex, bool, Decimal, Fraction, str, bytes, datetime, date, timedelta, uuid.UUID, Path),
    *(list, dict, set[int], list[int], dict[int, int], dict[str, Fraction], int | str, int | Decimal, Fraction | None),
    *(Amount, Span, Temperature, Colour, Bits, Literal[1, 2], ByteSize, ipaddress.IPv4Address),
    *(Annotated[int, Field(multiple_of=3)], Annotated[Decimal, Field(max_digits=5, multiple_of=Decimal("0.1"))]),
]


@contextmanager
def at_once() -> Iterator[None]:
    """The processor time of the block stays below the deadline: a busy machine makes no difference."""
    start = time.process_time()
    yield
    assert time.process_time() - start < DEADLINE


def read(payload: bytes, content_type: str, model: Any = None, encoding: str | None = None) -> Any:
    with at_once():
        return decode(payload, MessageContext(content_type=content_type, content_encoding=encoding), model)


@pytest.fixture(autouse=True, scope="module")
def compiled_models() -> None:
    """Pydantic compiles a model when it is asked for the first time."""
    for content_type in (JSON, CBOR, MSGPACK, TEXT):
        for model in MODELS:
            try:
                decode(b"1", MessageContext(content_type=content_type), model)
            except DecodeError:
                continue


def decimal_fraction(exponent: Any, mantissa: Any = 1) -> bytes:
    return b"\xc4\x82" + cbor2.dumps(exponent) + cbor2.dumps(mantissa)


def bigfloat(exponent: Any, mantissa: Any = 1) -> bytes:
    return b"\xc5\x82" + cbor2.dumps(exponent) + cbor2.dumps(mantissa)


def bignum(size: int, fill: bytes = b"\xfd") -> bytes:
    return b"\xc2" + cbor2.dumps(fill * size)


def tagged(tag: int, *items: bytes) -> bytes:
    return cbor2.dumps(cbor2.CBORTag(tag, None))[:-1] + b"".join(items)


HUGE = decimal_fraction(3_000_000)
TINY = decimal_fraction(-3_000_000)
HOSTILE: dict[str, dict[str, bytes]] = {
    CBOR: {
        "decimal fraction": HUGE,
        "small decimal fraction": TINY,
        "decimal fraction, exponent of 64 bits": decimal_fraction(10**18 - 1),
        "decimal fraction, bignum as exponent": decimal_fraction(10**30),
        "decimal fraction, bignum as mantissa": b"\xc4\x82\x05" + bignum(100_000),
        "decimal fraction of decimal fractions": b"\xc4\x82" + HUGE + HUGE,
        "decimal fraction, text as exponent": decimal_fraction("3000000", "1"),
        "decimal fraction, infinite exponent": decimal_fraction(math.inf, 1),
        "bigfloat": bigfloat(10**9),
        "small bigfloat": bigfloat(-(10**9)),
        "bigfloat, bignum as exponent": bigfloat(10**30),
        "bigfloat of decimal fractions": b"\xc5\x82" + HUGE + HUGE,
        "bignum": bignum(500_000),
        "negative bignum": b"\xc3" + bignum(500_000)[1:],
        "rational of bignums": tagged(30, b"\x82", bignum(100_000), bignum(100_000, b"\xfb")),
        "rational of decimal fractions": tagged(30, b"\x82", HUGE, HUGE),
        "rational of texts": tagged(30, b"\x82", cbor2.dumps("1e3000000"), b"\x01"),
        "rational of one text": tagged(30, b"\x81", cbor2.dumps("1e3000000")),
        "complex of decimal fractions": tagged(43000, b"\x82", HUGE, TINY),
        "date of a decimal fraction": b"\xc1" + HUGE,
        "date of a bignum": b"\xc1" + bignum(1000),
        "days of a decimal fraction": tagged(100, HUGE),
        "days of a bignum": tagged(100, bignum(100)),
        "set of decimal fractions": tagged(258, b"\x82", HUGE, TINY),
        "decimal fractions as keys": b"\xa2" + HUGE + b"\x01" + TINY + b"\x02",
        "network with a decimal fraction": tagged(261, b"\xa1", cbor2.dumps(b"\1\2\3\4"), HUGE),
        "nested in a list": b"\x81" * 100 + HUGE,
        "field of a model": b"\xa1" + cbor2.dumps("value") + HUGE,
        "text that is a number": cbor2.dumps("1e3000000"),
        "text that is a small number": cbor2.dumps("1e-3000000"),
        "text of digits": cbor2.dumps("9" * 500_000),
        "string references": cbor2.dumps(
            cbor2.CBORTag(256, [b"x" * 60_000, *[cbor2.CBORTag(25, 0)] * (MAX_REFERENCED // 60_000)])
        ),
        "shared value in itself": cbor2.dumps(cbor2.CBORTag(28, [cbor2.CBORTag(29, 0)])),
        "lists that claim to be long": (b"\x9a" + struct.pack(">I", 2**31)) * 190,
        "maps that claim to be long": (b"\xba" + struct.pack(">I", 2**31) + b"\x60") * 190,
        "bytes that claim to be long": b"\x5b" + struct.pack(">Q", 2**40),
        "tags, nested": b"\xd8\x64" * 100_000,
        "lists, nested": b"\x9f" * 100_000,
        "long date": b"\xc0" + cbor2.dumps("2026-01-01T00:00:00." + "1" * 500_000 + "Z"),
    },
    JSON: {
        "exponent": b"1e999999999",
        "negative": b"-1e400",
        "exponent after zeros": b"1E+000000309",
        "digits and exponent": b"1" + b"0" * 300 + b"e9",
        "digits before the point": b"9" * 400 + b".0",
        "in a list": b"[1,1e999]",
        "in a field": b'{"value":1e999,"celsius":1e999,"ratio":1e999}',
        "small": b"1e-999999999",
        "integer": b"9" * 400,
        "longest integer": b"9" * 4299,
        "too long integer": b"9" * 1_000_000,
        "text that is a number": b'"1e3000000"',
        "text that is a small number": b'"1e-3000000"',
        "text with spaces that is a number": b'" 1_0E+3000000 "',
        "text with escapes that is a number": b'"1\\u0065\\u00303000000"',
        "text of digits": b'"' + b"9" * 500_000 + b'"',
        "text of digits after the point": b'"0.' + b"9" * 500_000 + b'"',
        "texts of numbers": b'{"value":"1e3000000","share":"1e3000000"}',
        "nested": b"[" * 100_000,
        "key that is there often": b"{" + b'"x":1,' * 50_000 + b'"x":1}',
        "long duration": b'"P' + b"9" * 500_000 + b'D"',
        "long date": b'"2026-01-01T00:00:00.' + b"1" * 500_000 + b'Z"',
    },
    MSGPACK: {
        "lists that claim to be long": (b"\xdd" + struct.pack(">I", 2**31)) * 500,
        "lists that claim to be as long as the payload": (b"\xdd" + struct.pack(">I", 10**5)) * 500 + b"\xc0" * 10**5,
        "maps that claim to be long": (b"\xdf" + struct.pack(">I", 2**31)) * 500,
        "text that claims to be long": b"\xdb" + struct.pack(">I", 2**32 - 1),
        "list and map that claim to be longest": b"\x92\xdd\xff\xff\xff\xff\xdf\xff\xff\xff\xff",
        "lists, nested": b"\x91" * 100_000,
        "extension": b"\xc7\x0c\x05" + bytes(12),
        "timestamp far away": b"\xc7\x0c\xff" + struct.pack(">Iq", 0, 2**62),
        "text that is a number": b"\xa91e3000000",
        "field that is a number": b"\x81\xa5share\xa91e3000000",
    },
    TEXT: {"number": b"1e3000000", "small number": b"1e-3000000", "digits": b"9" * 500_000, "infinity": b"1e999"},
}


@pytest.mark.timeout(60)
@table(
    "content_type, payload, is_malformed",
    [
        pytest.param(kind, data, any(word in name for word in ("claim", "nested", "too long")), id=f"{kind}, {name}")
        for kind, table in HOSTILE.items()
        for name, data in table.items()
    ],
)
def test_hostile_payloads_are_read_or_refused_at_once(content_type: str, payload: bytes, is_malformed: bool) -> None:
    for model in MODELS:
        try:
            value = read(payload, content_type, model)
        except DecodeError as error:
            assert str(error).startswith(f"{'text' if content_type == TEXT else content_type}: ")  # noqa: PT017
            assert len(str(error)) < 400  # noqa: PT017
            continue
        assert not is_malformed
        # a text may become a Decimal of any exponent, which takes no time by itself
        assert all(isinstance(each, Decimal) or not is_vast(each) for each in leaves(value))


def test_a_decimal_fraction_of_8_bytes_does_not_become_an_integer_of_10_million_digits() -> None:
    payload = b"\xc4\x82\x1a" + struct.pack(">I", 10**7) + b"\x01"
    assert len(payload) == 8
    for model in (None, int, Decimal, Fraction, Amount):
        with pytest.raises(DecodeError, match="decimal fraction with an exponent beyond 10000"):
            read(payload, CBOR, model)


@table(
    "number",
    [
        *(Decimal("0.1"), Decimal("-1.23e-20"), Decimal("9.99e6144"), Decimal("1e-6176"), Decimal(f"1e{MAX_EXPONENT}")),
        *(2**64, -(2**64) - 1, 2**MAX_INT_BITS - 1, -(2**MAX_INT_BITS) + 1, 3**500, Fraction(2**200, 3**100)),
    ],
    ids=lambda number: type(number).__name__,
)
def test_numbers_within_the_bounds_come_back_exactly(number: Any) -> None:
    payload, content_type = encode({"value": [number]}, CBOR)
    (found,) = read(payload, content_type)["value"]
    assert found == number
    assert type(found) is type(number)
    assert read(payload, content_type, dict[str, list[type(number)]]) == {"value": [number]}


@table(
    "number",
    [
        *(Decimal("1e10001"), Decimal("1e-10001"), 2**MAX_INT_BITS, -(2**MAX_INT_BITS) - 1),
        *(Fraction(2**MAX_INT_BITS, 3), Fraction(1, 2**MAX_INT_BITS)),
    ],
    ids=lambda number: type(number).__name__,
)
def test_numbers_just_beyond_the_bounds_are_refused(number: Any) -> None:
    with pytest.raises(DecodeError):
        read(cbor2.dumps(number), CBOR)


def test_bigfloats_within_the_bounds_are_decimals() -> None:
    assert read(bigfloat(-1, 3), CBOR) == Decimal("1.5")
    assert read(bigfloat(10), CBOR, int) == 1024
    assert read(bigfloat(33_000), CBOR).adjusted() == 9933


@table("model", [None, Any, float, list[float], Temperature, complex, Annotated[float, Field(gt=0)]])
@table("number", [b"1e999999999", b"-1e309", b"1.8E+308", b"9" * 400 + b".5", b"1" + b"0" * 250 + b"e99"])
def test_json_numbers_beyond_the_range_of_a_float_are_refused(number: bytes, model: Any) -> None:
    payload = (
        b"[%s]" % number if model == list[float] else b'{"celsius":%s}' % number if model is Temperature else number
    )
    with pytest.raises(DecodeError, match=r"beyond the range of a float|finite|greater"):
        read(payload, JSON, model)


def test_json_integers_beyond_the_range_of_a_float_are_integers_and_nothing_else() -> None:
    digits = b"9" * 400
    assert read(digits, JSON) == read(digits, JSON, int) == 10**400 - 1
    assert read(b'{"serial":%s}' % digits, JSON, Temperature).serial == 10**400 - 1
    for payload, model in ((digits, float), (b"[%s]" % digits, list[float]), (b'{"celsius":%s}' % digits, Temperature)):
        with pytest.raises(DecodeError, match="beyond the range of a float"):
            read(payload, JSON, model)
    with pytest.raises(DecodeError, match="beyond the range of a float"):
        read(b'{"ratio":%s}' % digits, JSON, Span)


@table("text", ["1e308", "-1.7e308", "1e-999", "1E+0010", "0." + "3" * 500, "1" * 300 + ".0", "1e005"])
def test_json_numbers_within_the_range_of_a_float_are_read(text: str) -> None:
    for model in (None, float):
        assert read(text.encode(), JSON, model) == float(text)
    assert read(b'{"a":%s,"b":"1e999 1e999"}' % text.encode(), JSON) == {"a": float(text), "b": "1e999 1e999"}


@given(st.floats(allow_nan=False, allow_infinity=False) | st.integers(-(2**80), 2**80) | st.text())
def test_every_finite_json_value_is_read(value: Any) -> None:
    payload, _ = encode([value], JSON)
    assert read(payload, JSON) == [value]
    assert read(payload, JSON, list[float | int | str]) == [value]


class Limits(BaseModel):
    serial: str | int
    highest: float = math.inf


@table("text, model", [("1e999", float), ("-" + "9" * 400, float), ("1e999j", complex), (" 1e309 ", float | int)])
def test_texts_of_numbers_beyond_the_range_of_a_float_do_not_become_infinite(text: str, model: Any) -> None:
    with pytest.raises(DecodeError, match="beyond the range of a float"):
        read(b'"%s"' % text.encode(), JSON, model)


@table("serial", ["3e123", "8c3e1234-5f", "0" * 300 + "-a", 12345])
def test_a_model_with_an_infinite_default_reads_numbers_and_texts_that_look_large(serial: str | int) -> None:
    """What a model adds was not in the payload: neither hexadecimal digits nor long texts are to blame for it."""
    payload, _ = encode({"serial": serial, "spread": 1e300}, JSON)
    assert read(payload, JSON, Limits).highest == math.inf


def test_string_references_are_read_as_far_as_they_stand_for_little() -> None:
    texts = ["temperature", "temperature", "humidity", "temperature"]
    assert read(cbor2.dumps(texts, string_referencing=True), CBOR) == texts
    assert read(cbor2.dumps({"a": texts}, string_referencing=True), CBOR, dict[str, list[str]]) == {"a": texts}
    with pytest.raises(DecodeError, match="string references stand for more than"):
        read(HOSTILE[CBOR]["string references"], CBOR)


@table("encoding", ["gzip", "zstd", "gzip, zstd"])
def test_compressed_payloads_are_bounded_as_others(encoding: str) -> None:
    payload, _ = encode(HUGE, CBOR, encoding)
    with pytest.raises(DecodeError, match="decimal fraction"):
        read(payload, CBOR, int, encoding)


def colliding(count: int) -> list[int]:
    """Integers of one hash: a set of them takes quadratic time."""
    return [number * sys.hash_info.modulus for number in range(count)]


@table(
    "value, model",
    [
        (colliding(20_000), set[int]),
        (colliding(20_000), frozenset[float | int]),
        ([str(number) for number in colliding(20_000)], set[Decimal]),
        ([str(number) for number in colliding(20_000)], dict[str, int] | set[int]),
        ({str(number): 0 for number in colliding(20_000)}, dict[int, int]),
        ({"a": [{"b": colliding(20_000)}]}, dict[str, list[dict[str, set[Any]]]]),
    ],
    ids=["integers", "union", "decimals", "texts", "keys", "nested"],
)
@table("content_type", [JSON, CBOR])
def test_numbers_that_may_collide_are_no_sets_nor_keys(content_type: str, value: Any, model: Any) -> None:
    payload, _ = encode(value, content_type)
    with pytest.raises(DecodeError, match="more than 1000 numbers beyond 64 bits"):
        read(payload, content_type, model)


@table("content_type", [JSON, CBOR, MSGPACK])
def test_large_sets_and_maps_of_ordinary_numbers_and_texts_are_read(content_type: str) -> None:
    numbers = [2**64 - number for number in range(1, 20_000)]
    assert read(encode(numbers, content_type)[0], content_type, set[int]) == set(numbers)
    assert (
        read(encode({str(n): n for n in numbers}, content_type)[0], content_type, dict[int, int])[2**64 - 7]
        == 2**64 - 7
    )
    texts = [f"{number:030}" for number in numbers]
    assert read(encode(texts, content_type)[0], content_type, set[str]) == set(texts)
    assert read(encode(texts[:900], content_type)[0], content_type, set[Decimal]) == set(map(Decimal, texts[:900]))


NUMBERS = st.integers() | st.sampled_from([10**6, -(10**6), 10**18, -(10**18), 2**70, 10**4000, -(10**4000)])


def tags(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    numeric = st.sampled_from([2, 3, 4, 5, 30, 1, 100, 258, 43000, 260, 261, 52, 54, 37, 25, 256, 28, 29, 0, 55799])
    content = inner | st.lists(inner, max_size=3) | st.dictionaries(st.binary(max_size=4) | st.text(max_size=4), inner)
    return st.builds(cbor2.CBORTag, numeric, content) | st.lists(inner, max_size=3)


@given(
    st.recursive(
        NUMBERS | st.binary(max_size=20) | st.just(bytes(100_000)) | st.text(max_size=20) | st.floats(),
        tags,
        max_leaves=6,
    ),
    st.sampled_from(MODELS),
)
def test_any_tags_of_any_numbers_are_read_or_refused_at_once(value: Any, model: Any) -> None:
    try:
        payload = cbor2.dumps(value)
    except (cbor2.CBOREncodeError, TypeError):  # what cannot be a key, say
        return
    try:
        read(payload, CBOR, model)
    except DecodeError:
        return


@table(
    "text, is_vast",
    [
        *(("1e10000", False), ("1e10001", True), ("-1E-10001", True), (" 1_0e1_0_0_0_0_0 ", True), ("5", False)),
        *(("1e" + "0" * 50 + "5", False), ("1e" + "9" * 50, True), ("9" * 10_001, True), ("e99999", False)),
        *(
            ("1e99999x", False),
            ("a1e99999", False),
            ("", False),
            ("1e", False),
            ("\u0661e\u0669\u0669\u0669\u0669\u0669", True),
        ),
    ],
)
def test_texts_of_numbers_are_vast_by_their_digits_and_exponent(text: str, is_vast: bool) -> None:
    assert is_vast_text(text) is is_vast
    assert holds_vast({"a": [text, 1]}) is is_vast


@table(
    "text",
    [
        "1" * 1_000_000 + "x",
        " " * 1_000_000,
        "1e" + "9" * 1_000_000 + "x",
        "_" * 1_000_000,
        "1" * 500_000 + "e" * 500_000,
    ],
)
def test_looking_at_a_long_text_takes_no_time(text: str) -> None:
    with at_once():
        is_vast_text(text)
