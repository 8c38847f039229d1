"""Codecs: content types, content encodings, hostile input, codecs of other distributions."""

from __future__ import annotations

import base64
import functools
import gzip
import importlib.metadata
import logging
import random
import struct
import sys
import threading
import tracemalloc
import typing
import uuid
import zlib
from collections import deque
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import UTC, date, datetime
from decimal import Decimal
from enum import Enum, IntEnum, StrEnum
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Annotated, Any, Generic, Literal, NamedTuple, NewType, Required, TypeVar

import cbor2
import msgpack  # type: ignore[import-untyped]
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, PlainSerializer, RootModel, SecretStr
from pydantic.dataclasses import dataclass as pydantic_dataclass
from typing_extensions import TypedDict

import messaging.codecs
from messaging.codecs import Codec, codec_for, decode, encode, register_codec
from messaging.codecs import models as codecs_models
from messaging.codecs.builtin import MAX_DEPTH, MAX_FREE_KEYS, JsonCodec, TextCodec
from messaging.codecs.mediatype import parse_media_type
from messaging.codecs.registry import Codecs
from messaging.errors import (
    ArgumentError,
    CodecError,
    DecodeError,
    EncodeError,
    MissingExtraError,
    UnknownContentEncodingError,
    UnknownContentTypeError,
)
from messaging.model import MessageContext
from messaging.testing.tables import table
from messaging.testing.waiting import PATIENCE
from tests.doubles.fixtures import install

JSON = "application/json"
CBOR = "application/cbor"
MSGPACK = "application/msgpack"
OBJECT_TYPES = [JSON, CBOR, MSGPACK]


def read(payload: bytes, content_type: str | None = None, model: Any = None, encoding: str | None = None) -> Any:
    return decode(payload, MessageContext(content_type=content_type, content_encoding=encoding), model)


def turn_round(obj: Any, content_type: str | None = None, model: Any = None, encoding: str | None = None) -> Any:
    payload, chosen = encode(obj, content_type, encoding)
    return read(payload, chosen, model, encoding)


class Colour(Enum):
    RED = "red"


class Level(IntEnum):
    HIGH = 3


class Reading(BaseModel):
    sensor: str = Field(alias="sensorId")
    value: float
    when: datetime
    tags: set[str] = set()
    colour: Colour = Colour.RED
    level: Level = Level.HIGH
    ident: uuid.UUID = uuid.UUID(int=7)
    price: Decimal = Decimal("1.50")
    path: Path = Path("/a/b")
    counts: dict[int, str] = {}


READING = Reading(
    sensorId="a", value=1.5, when=datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC), tags={"x", "y"}, counts={1: "one"}
)


@dataclass
class Point:
    x: int
    y: Annotated[int, PlainSerializer(lambda number: f"#{number}"), AfterValidator(lambda number: number)] = 0


@dataclass
class Line:
    start: Point
    points: list[Point] = field(default_factory=list)


class Pair(NamedTuple):
    key: str
    value: int


class Settings(TypedDict):
    name: str
    size: int


class Blob(BaseModel):
    data: bytes


# --- media types -------------------------------------------------------------------------------------------


@table(
    "text, essence, parameters",
    [
        ("application/json", "application/json", {}),
        (" Application/JSON ", "application/json", {}),
        ("text/plain; charset=utf-8", "text/plain", {"charset": "utf-8"}),
        ("text/plain;Charset=UTF-8 ;\tq=1;", "text/plain", {"charset": "UTF-8", "q": "1"}),
        (r'a/b; x="a;b=\"c\"\\"', "a/b", {"x": 'a;b="c"\\'}),
        ('a/b; x=""', "a/b", {"x": ""}),
        ("application/vnd.x+json;;", "application/vnd.x+json", {}),
    ],
)
def test_media_types_are_parsed(text: str, essence: str, parameters: dict[str, str]) -> None:
    assert parse_media_type(text) == (essence, parameters)


@table(
    "text",
    [
        "json",
        "/",
        "a/",
        "/b",
        "a b/c",
        "a/b/c",
        "a/b c",
        "a/b; x",
        "a/b; x=",
        'a/b; x="',
        "a/b; x=1; X=2",
        "a/b\n",
        "é/b",
    ],
)
def test_malformed_content_types_are_refused(text: str) -> None:
    with pytest.raises(UnknownContentTypeError, match="malformed content type"):
        read(b"{}", text)
    with pytest.raises(UnknownContentTypeError, match="malformed content type"):
        encode({}, text)


def test_content_types_that_are_no_text_or_too_long_are_refused() -> None:
    with pytest.raises(UnknownContentTypeError, match="must be a str, not int"):
        encode({}, 5)  # type: ignore[arg-type]
    with pytest.raises(UnknownContentTypeError, match="at most 1024"):
        read(b"{}", "a/" + "b" * 2000)


@given(st.text() | st.text(alphabet='ab/;="\\ +*', max_size=30))
def test_arbitrary_content_types_are_known_or_unknown(text: str) -> None:
    try:
        essence, parameters = parse_media_type(text)
    except UnknownContentTypeError:
        return
    assert "/" in essence
    assert all(isinstance(value, str) for value in parameters.values())


# --- choosing ----------------------------------------------------------------------------------------------


@table(
    "obj, payload, content_type",
    [
        (b"\x00\xff", b"\x00\xff", "application/octet-stream"),
        (bytearray(b"ab"), b"ab", "application/octet-stream"),
        (memoryview(b"abcdef")[1:5:2], b"bd", "application/octet-stream"),
        ("grün", "grün".encode(), "text/plain; charset=utf-8"),
        ({"a": [1, None]}, b'{"a":[1,null]}', JSON),
        (None, b"null", JSON),
        (Point(1, 2), b'{"x":1,"y":"#2"}', JSON),
    ],
)
def test_the_content_type_is_chosen_by_the_object(obj: Any, payload: bytes, content_type: str) -> None:
    assert encode(obj) == (payload, content_type)
    assert encode(obj, "") == (payload, content_type)


def test_without_content_type_the_wanted_type_decides() -> None:
    assert read(b"\xff") == b"\xff"
    assert read(b"\xff", "") == b"\xff"
    assert read(b"\xff", None, bytes) == b"\xff"
    assert read(b"ab", None, bytearray) == bytearray(b"ab")
    assert read(b"ab", None, memoryview) == b"ab"
    assert read(b"[1]", None, str) == "[1]"
    assert read(b"[1]", None, list[int]) == [1]
    assert read(b'{"x":1}', None, Point) == Point(1)
    assert read(b"[1]", None, Any) == [1]


@table("content_type", [JSON, "text/plain", CBOR, "application/x-whatever"])
def test_bytes_are_encoded_content_for_every_content_type(content_type: str) -> None:
    assert encode(b'{"a":1}', content_type) == (b'{"a":1}', content_type)
    payload, _ = encode(bytearray(b"x" * 100), content_type, "gzip")
    assert gzip.decompress(payload) == b"x" * 100


def test_objects_are_no_octet_stream() -> None:
    with pytest.raises(EncodeError, match="must be bytes, not dict; give a content type such as application/json"):
        encode({}, "application/octet-stream")
    with pytest.raises(DecodeError, match="application/octet-stream: Reading"):
        read(b"{}", "application/octet-stream", Reading)


def test_the_error_of_an_unknown_content_type_lists_the_known_ones() -> None:
    with pytest.raises(UnknownContentTypeError, match=r"'application/x-unknown'.*application/json.*text/\*") as caught:
        read(b"", "application/x-unknown; a=b")
    assert "messaging.codecs" in str(caught.value)
    with pytest.raises(UnknownContentTypeError):
        encode({}, "image/png")
    with pytest.raises(UnknownContentTypeError):
        codec_for("image/png")


def test_structured_suffixes_lead_to_their_codec() -> None:
    assert isinstance(codec_for("application/senml+json"), JsonCodec)
    assert isinstance(codec_for("Text/x+JSON; a=b"), JsonCodec)
    assert codec_for("application/senml+cbor") is codec_for(CBOR)
    assert codec_for("application/x+msgpack") is codec_for("application/vnd.msgpack")
    assert isinstance(codec_for("text/csv"), TextCodec)
    assert isinstance(codec_for("text/x+unknown"), TextCodec)
    with pytest.raises(UnknownContentTypeError):
        codec_for("application/x+unknown")


def test_hostile_content_types_do_not_fill_memory() -> None:
    codecs = Codecs()
    for number in range(5000):
        codecs.resolve(f"text/x{number}")
    assert len(codecs._resolved) <= 1024


# --- text --------------------------------------------------------------------------------------------------


def test_text_has_the_charset_of_its_content_type() -> None:
    assert encode("é", "text/plain")[0] == b"\xc3\xa9"
    assert encode("é", "text/plain; charset=ISO-8859-1")[0] == b"\xe9"
    assert read(b"\xe9", 'text/html; charset="latin-1"') == "é"
    assert read("é".encode("utf-16"), "text/plain; charset=utf-16", str) == "é"


def test_text_can_be_validated() -> None:
    assert read(b"5", "text/plain", int) == 5
    with pytest.raises(DecodeError, match="text: int: Input should be a valid integer"):
        read(b"five", "text/plain", int)


def test_bad_text_is_refused_without_quoting_it() -> None:
    with pytest.raises(DecodeError, match=r"^text: not utf-8 at index 6$"):
        read(b"secret\xff", "text/plain")
    with pytest.raises(EncodeError, match=r"^text: no us-ascii for the character at index 1$"):
        encode("aé", "text/plain; charset=us-ascii")
    with pytest.raises(EncodeError, match=r"^text: no utf-8 for the character at index 0$"):
        encode("\ud800")
    with pytest.raises(EncodeError, match="must be a str, not dict"):
        encode({}, "text/plain")


@table("charset", ["nonsense", "base64", "rot13", "idna", "punycode", "unicode_escape", "utf-7", "os"])
def test_charsets_are_a_closed_list(charset: str) -> None:
    with pytest.raises(UnknownContentTypeError, match="unknown charset"):
        read(b"a", f"text/plain; charset={charset}")
    with pytest.raises(UnknownContentTypeError, match="unknown charset"):
        encode("a", f"text/plain; charset={charset}")


def test_every_charset_of_the_list_is_one_python_has() -> None:
    for charset in messaging.codecs.encodings.CHARSETS:
        assert turn_round("a", f"text/plain; charset={charset.upper()}") == "a"


# --- JSON, CBOR, msgpack: objects --------------------------------------------------------------------------


@table("content_type", OBJECT_TYPES)
@table(
    "obj, model",
    [
        (READING, Reading),
        ([READING], list[Reading]),
        ({"a": READING}, dict[str, Reading]),
        (deque([READING]), deque[Reading]),
        (Line(Point(1), [Point(2)]), None),
        (Pair("a", 1), Pair),
        ({"name": "a", "size": 1}, Settings),
        (RootModel[list[int]]([1, 2]), RootModel[list[int]]),
        ({1, 2}, set[int]),
        (frozenset({1}), frozenset[int]),
        ({1: "a"}, dict[int, str]),
        (MappingProxyType({"a": 1}), dict[str, int]),
        (Colour.RED, Colour),
        ([Level.HIGH], list[Level]),
        (date(2026, 1, 2), date),
        ([datetime(2026, 1, 2, tzinfo=UTC)], list[datetime]),
        (uuid.UUID(int=5), uuid.UUID),
        ([Decimal("1.10")], list[Decimal]),
        (Path("/a"), Path),
        (None, None),
        (True, bool),
        ([1.5, -3], list[float]),
        ("text", str),
        ({"a": (1, "b")}, dict[str, tuple[int, str]]),
    ],
)
def test_objects_come_back_as_the_type_that_is_asked_for(content_type: str, obj: Any, model: Any) -> None:
    back = turn_round(obj, content_type, model)

    if isinstance(obj, Line):
        assert back == {"start": {"x": 1, "y": "#0"}, "points": [{"x": 2, "y": "#0"}]}
    else:
        assert back == obj
        assert model is None or isinstance(back, type(obj)) or isinstance(obj, MappingProxyType)


@table("content_type", OBJECT_TYPES)
def test_fields_go_by_their_alias(content_type: str) -> None:
    assert set(turn_round(READING, content_type)) >= {"sensorId", "value"}
    assert "sensorId" in turn_round([READING], content_type)[0]


@table("content_type", OBJECT_TYPES)
def test_values_that_do_not_fit_their_field_raise_no_warning(content_type: str) -> None:
    # pytest is configured to turn warnings, which would quote the value, into errors
    crooked = Blob.model_construct(data="text")

    assert turn_round(crooked, content_type) == {"data": "text"}


@table("content_type", OBJECT_TYPES)
def test_secrets_stay_masked(content_type: str) -> None:
    class Login(BaseModel):
        password: SecretStr

    payload, _ = encode([Login(password=SecretStr("hush")), SecretStr("hush")], content_type)
    assert b"hush" not in payload


@table("content_type", [CBOR, MSGPACK])
def test_binary_formats_carry_bytes(content_type: str) -> None:
    binary = {"a": b"\x00\xff", "b": [bytearray(b"\xfe")]}

    assert turn_round(binary, content_type) == {"a": b"\x00\xff", "b": [b"\xfe"]}
    assert turn_round(Blob(data=b"\xff"), content_type, Blob) == Blob(data=b"\xff")


def test_json_carries_bytes_as_utf8_or_as_the_model_says() -> None:
    class Packed(BaseModel):
        model_config = ConfigDict(ser_json_bytes="base64", val_json_bytes="base64")
        data: bytes

    assert encode(Blob(data="é".encode()))[0] == '{"data":"é"}'.encode()
    assert turn_round(Packed(data=b"\xff"), JSON, Packed) == Packed(data=b"\xff")
    assert base64.urlsafe_b64decode(turn_round(Packed(data=b"\xff"))["data"]) == b"\xff"
    with pytest.raises(EncodeError, match=r"application/json: .*utf-8"):
        encode(Blob(data=b"\xff"))
    with pytest.raises(EncodeError, match=r"application/json: .*utf-8"):
        encode({"data": b"\xff"})


def test_nan_and_infinity_are_not_json() -> None:
    class Constants(BaseModel):
        model_config = ConfigDict(ser_json_inf_nan="constants")
        value: float

    class Strings(BaseModel):
        model_config = ConfigDict(ser_json_inf_nan="strings")
        value: float

    for value in (float("nan"), float("inf"), float("-inf")):
        for obj in (value, {"a": [value]}, Constants(value=value)):
            with pytest.raises(EncodeError, match="NaN and infinity are not JSON"):
                encode(obj, JSON)
        assert repr(turn_round(Strings(value=value), JSON, Strings).value) == repr(value)
    for payload in (b"NaN", b'{"value":Infinity}', b"[-Infinity]"):
        for model in (None, Constants, float, list[float]):
            with pytest.raises(DecodeError):
                read(payload, JSON, model)
    assert turn_round({"NaN": "Infinity"}, JSON) == {"NaN": "Infinity"}
    assert turn_round({"NaN": "Infinity"}, JSON, dict[str, str]) == {"NaN": "Infinity"}


@table("content_type", [CBOR, MSGPACK])
def test_binary_formats_carry_nan_and_infinity(content_type: str) -> None:
    assert repr(turn_round([float("nan"), float("inf")], content_type)) == "[nan, inf]"


def test_json_may_start_with_a_byte_order_mark() -> None:
    assert read(b"\xef\xbb\xbf[1]", JSON) == [1]
    assert read(b"\xef\xbb\xbf[1]", JSON, list[int]) == [1]


def test_json_is_utf8_in_spite_of_a_charset() -> None:
    assert read('"é"'.encode(), "application/json; charset=iso-8859-1") == "é"
    assert encode("é", "application/json; charset=iso-8859-1")[0] == '"é"'.encode()


def test_dates_without_zone_need_json_or_msgpack() -> None:
    naive = datetime(2026, 1, 2)

    assert turn_round([naive], JSON, list[datetime]) == [naive]
    assert turn_round([naive], MSGPACK, list[datetime]) == [naive]
    with pytest.raises(EncodeError, match="naive datetime"):
        encode([naive], CBOR)


def test_integers_are_as_large_as_the_format_allows() -> None:
    assert turn_round(10**400, JSON) == 10**400
    assert turn_round(10**400, CBOR) == 10**400
    assert turn_round(2**64 - 1, MSGPACK) == 2**64 - 1
    with pytest.raises(EncodeError, match="more than 64 bits"):
        encode([2**64], MSGPACK)


def broken(_: Any) -> Any:
    raise LookupError


class Broken(BaseModel):
    value: Annotated[int, PlainSerializer(broken)] = 1


@table("content_type", OBJECT_TYPES)
@table("obj", [object(), [object()], {"a": lambda: 1}, "\ud800", ["\ud800"], Broken()])
def test_an_object_that_does_not_encode_is_an_encode_error(content_type: str, obj: Any) -> None:
    with pytest.raises(EncodeError, match=f"^{content_type}: "):
        encode(obj, content_type)


@table("content_type", OBJECT_TYPES)
def test_an_object_that_contains_itself_is_an_encode_error(content_type: str) -> None:
    loop: list[Any] = []
    loop += [loop, loop]
    ring: dict[str, Any] = {}
    ring["ring"] = ring

    for obj in (loop, ring):
        with pytest.raises(EncodeError):
            encode(obj, content_type)


class Node(BaseModel):
    child: Node | None = None


@dataclass
class Link:
    child: Link | None = None


@table("content_type", OBJECT_TYPES)
@table(
    "wrap",
    [
        lambda inner: [inner],
        lambda inner: (inner,),
        lambda inner: {"a": inner},
        lambda inner: {"a": deque([inner])},
        lambda inner: MappingProxyType({"a": inner}),
        lambda inner: Node.model_construct(child=inner),
        Link,
    ],
)
def test_an_object_nested_too_deep_is_an_encode_error(content_type: str, wrap: Any) -> None:
    obj: Any = None
    for _ in range(30_000):
        obj = wrap(obj)

    with pytest.raises(EncodeError):
        encode(obj, content_type)
    while obj is not None:  # piece by piece: an object nested so deep overruns the stack when it is released
        if isinstance(obj, (Node, Link)):
            obj.child, obj = None, obj.child
        else:
            obj = obj["a"] if isinstance(obj, Mapping) else obj[0]


@table("content_type", OBJECT_TYPES)
def test_an_object_nested_deep_but_not_too_deep_comes_back(content_type: str) -> None:
    obj: Any = 1
    for _ in range(MAX_DEPTH - 10):
        obj = [obj]

    assert turn_round(obj, content_type) == obj


def test_dataclasses_that_pydantic_does_not_know_are_encoded_by_their_fields() -> None:
    class Foreign:
        pass

    @dataclass
    class Holder:
        number: int
        foreign: Foreign | None = None

    for content_type in OBJECT_TYPES[:1]:
        assert turn_round(Holder(1), content_type) == {"number": 1, "foreign": None}
    with pytest.raises(EncodeError):
        encode(Holder(1, Foreign()), JSON)


# --- what arrives ------------------------------------------------------------------------------------------


def test_validation_errors_tell_where_and_why_but_not_what() -> None:
    payload = b'{"sensorId":["hush-1"],"value":"hush-2","when":"hush-3","tags":["a"],"counts":{"hush":1}}'
    with pytest.raises(DecodeError) as caught:
        read(payload, JSON, Reading)

    text = str(caught.value)
    assert text.startswith("application/json: Reading: sensorId: Input should be a valid string; value: ")
    assert "and 1 more" not in text
    assert "hush-" not in text
    assert caught.value.__cause__ is None
    assert caught.value.__context__ is None


def test_validation_errors_stay_short() -> None:
    class Cat(BaseModel):
        kind: Literal["cat"]

    class Dog(BaseModel):
        kind: Literal["dog"]

    for content_type in OBJECT_TYPES:
        many, _ = encode(["x"] * 5000, content_type)
        with pytest.raises(DecodeError, match=r"5000 problems with list\[int\]$"):
            read(many, content_type, list[int])
        few, _ = encode(["x"] * 50, content_type)
        with pytest.raises(DecodeError, match="and 45 more"):
            read(few, content_type, list[int])
        keys, _ = encode({"k" * 10_000: 1}, content_type)
        with pytest.raises(DecodeError) as caught:
            read(keys, content_type, dict[str, str])
        assert len(str(caught.value)) < 400
        tagged, _ = encode({"kind": "hush"}, content_type)
        with pytest.raises(DecodeError, match="the tag is none of 'cat', 'dog'") as caught:
            read(tagged, content_type, Annotated[Cat | Dog, Field(discriminator="kind")])
        assert "hush" not in str(caught.value)


def test_validators_that_raise_are_decode_errors() -> None:
    def broken(value: int) -> int:
        raise LookupError("hush")

    with pytest.raises(DecodeError, match="LookupError while validating"):
        read(b"1", JSON, Annotated[int, AfterValidator(broken)])


def test_a_model_pydantic_cannot_compile_is_a_decode_error() -> None:
    class Foreign:
        pass

    for model in (Foreign, list[Foreign], "Nowhere", 5):
        with pytest.raises(DecodeError, match="is no type pydantic can validate"):
            read(b"1", JSON, model)


def test_models_are_told_apart_by_the_order_of_their_unions() -> None:
    class One(BaseModel):
        a: int

    class Two(BaseModel):
        a: int

    assert (One | Two) == (Two | One)
    assert type(read(b'{"a":1}', JSON, One | Two)) is One
    assert type(read(b'{"a":1}', JSON, Two | One)) is Two
    assert type(read(b'[{"a":1}]', JSON, list[Two | One])[0]) is Two
    assert type(read(b'[{"a":1}]', JSON, list[One | Two])[0]) is One


def test_models_that_are_not_hashable_work() -> None:
    model = Annotated[int, Field(json_schema_extra={"a": []}), ["unhashable"]]

    assert read(b"1", JSON, model) == 1
    assert read(b"2", JSON, model) == 2


def test_throwaway_models_do_not_fill_memory() -> None:
    for number in range(600):
        assert read(b"1", JSON, Annotated[int, number]) == 1
    assert len(messaging.codecs.models._validators) <= 512


BAD: dict[str, list[bytes]] = {
    JSON: [
        b"",
        b"{",
        b"[1,]",
        b"1 2",
        b"{'a':1}",
        b'"\xff"',
        b'"\\ud800"',
        b"[" * 1000 + b"]" * 1000,
        b"\x00",
    ],
    CBOR: [
        b"",
        b"\x01\x02",
        b"\x81",
        b"\x61\xff",
        b"\xff",
        b"\x81" * 250 + b"\x01",
        b"\x9b" + struct.pack(">Q", 2**60),
        b"\xbb" + struct.pack(">Q", 2**60),
        b"\x7b" + struct.pack(">Q", 2**60),
        b"\xc4\x82\x1b" + struct.pack(">Q", 2**62) + b"\x01",
        b"\xc5\x82\x1a" + struct.pack(">I", 2**30) + b"\x01",
        b"\xd8\x1e\x82\x01\x00",
        b"\xd8\x23\x61(",
        b"\xd8\x24\x61a",
        b"\xd8\x1c\x82\x01\xd8\x1d\x00",
        b"\xc1\x1b" + struct.pack(">Q", 2**60),
    ],
    MSGPACK: [
        b"",
        b"\x01\x02",
        b"\x91",
        b"\xa1\xff",
        b"\xc1",
        b"\xd4\x05\x01",
        b"\x81\x91\x01\x01",
    ],
}


@table("content_type, payload", [(kind, payload) for kind in BAD for payload in BAD[kind]])
@table("model", [None, Any, Reading, list[int]])
def test_bad_payloads_are_decode_errors(content_type: str, payload: bytes, model: Any) -> None:
    with pytest.raises(DecodeError, match=f"^{content_type}: .") as caught:
        read(payload, content_type, model)
    assert len(str(caught.value)) < 400


def test_shared_values_cannot_stand_for_more_than_memory_holds() -> None:
    bomb = b"\xd8\x1c\x81\x01"  # a shared list, then 60 times a shared pair of the one before
    for depth in range(60):
        bomb = b"\xd8\x1c\x82" + bomb + b"\xd8\x1d" + bytes([0x18, 60 - depth])
    with pytest.raises(DecodeError, match="tag 29"):
        read(bomb, CBOR)


def colliding(count: int) -> list[int]:
    """Integers of one hash: a map of them takes quadratic time."""
    return [number * sys.hash_info.modulus for number in range(count)]


def test_keys_that_may_collide_are_accepted_in_small_payloads_only() -> None:
    few = dict.fromkeys(colliding(8), 0)
    assert turn_round(few, CBOR) == few
    assert turn_round(few, MSGPACK) == few

    numbers = {2**16 + number: 0 for number in range(20_000)}
    texts = {f"key {number}": 0 for number in numbers}
    for content_type in (CBOR, MSGPACK):
        payload, _ = encode(numbers, content_type)
        assert len(payload) > MAX_FREE_KEYS
        with pytest.raises(DecodeError):
            read(payload, content_type)
        assert turn_round(texts, content_type) == texts


def test_recursive_models_meet_deep_input() -> None:
    for content_type in OBJECT_TYPES:
        deep: Any = None
        for _ in range(150):
            deep = {"child": deep}
        payload, _ = encode(deep, content_type)
        try:
            node = read(payload, content_type, Node)
        except DecodeError:
            continue
        assert node.child.child is not None


# --- content encodings -------------------------------------------------------------------------------------


@table(
    "encoding",
    ["gzip", "GZIP", "x-gzip", "zlib", "zstd", "identity", "binary", "Binary, zlib", "", " gzip , zstd ", "gzip,gzip"],
)
@table("obj", [{"a": "x" * 1000}, "text" * 100])
def test_content_encodings_pack_and_unpack(encoding: str, obj: Any) -> None:
    assert turn_round(obj, None, None, encoding) == obj


def test_several_encodings_are_applied_in_order() -> None:
    payload, _ = encode("text", None, "gzip, zstd")

    assert gzip.decompress(zstandard.decompress(payload)) == b"text"


def test_compressing_gives_the_same_bytes_for_the_same_content() -> None:
    for encoding in ("gzip", "zstd"):
        assert encode("text" * 100, None, encoding) == encode("text" * 100, None, encoding)
        assert len(encode("text" * 100, None, encoding)[0]) < 100


@table("encoding", ["br", "deflate", "gzip;q=1", "gzip br", "utf-99", "base64", "x" * 300, "gzip," * 9])
def test_unknown_content_encodings_are_refused(encoding: str) -> None:
    with pytest.raises(UnknownContentEncodingError):
        read(b"[]", JSON, None, encoding)
    with pytest.raises(UnknownContentEncodingError):
        encode([], JSON, encoding)
    with pytest.raises(UnknownContentEncodingError):
        encode(b"", None, encoding)


def test_a_charset_as_content_encoding_is_the_charset_of_text() -> None:
    assert encode("é", None, "UTF-8") == (b"\xc3\xa9", "text/plain; charset=utf-8")
    assert encode("é", None, "ISO-8859-1") == (b"\xe9", "text/plain; charset=iso-8859-1")
    assert encode("é", "text/plain", "latin-1") == (b"\xe9", "text/plain")
    assert read(b"\xe9", "text/plain", None, "latin-1") == "é"
    assert read(b"\xe9", None, str, "latin-1") == "é"
    assert turn_round("é", "text/plain", None, "latin-1, gzip") == "é"


def test_a_charset_as_content_encoding_yields_to_the_content_type_and_means_nothing_to_others() -> None:
    assert read(b"\xc3\xa9", "text/plain; charset=utf-8", None, "latin-1") == "é"
    assert encode("é", "text/plain; charset=utf-8", "latin-1")[0] == b"\xc3\xa9"
    assert read('"é"'.encode(), JSON, None, "UTF-8") == "é"
    assert read('"é"'.encode(), JSON, str, "latin-1") == "é"
    assert read(b"\xff", "application/octet-stream", None, "utf-8") == b"\xff"
    assert read(b"\xff", None, None, "UTF-8") == b"\xff"


def packed_by(encoding: str, data: bytes) -> bytes:
    return gzip.compress(data) if encoding == "gzip" else zstandard.compress(data)


@table("encoding", ["gzip", "zstd"])
@table("size", [0, 1, 100, 200_000])
def test_members_one_after_the_other_are_one_content(encoding: str, size: int) -> None:
    data = random.Random(size).randbytes(size)
    payload = packed_by(encoding, data)

    assert read(payload, None, None, encoding) == data
    assert read(payload * 3, None, None, encoding) == data * 3


def test_zstd_streams_without_a_size_and_skippable_frames_are_read() -> None:
    compressor = zstandard.ZstdCompressor().compressobj()
    stream = compressor.compress(b"x" * 300_000) + compressor.flush()
    skippable = struct.pack("<II", 0x184D2A50, 4) + b"skip"

    assert zstandard.frame_content_size(stream) == -1
    assert read(skippable + stream + skippable, None, None, "zstd") == b"x" * 300_000


@table("encoding", ["gzip", "zstd"])
def test_every_truncation_and_any_garbage_behind_is_a_decode_error(encoding: str) -> None:
    payload = packed_by(encoding, b"secret" * 30)

    for end in range(len(payload)):
        with pytest.raises(DecodeError, match=f"content encoding {encoding}: the data ends too soon"):
            read(payload[:end], None, None, encoding)
    for garbage in (b"\x00", b"garbage", payload[:-1], b"\xff" * 1000):
        with pytest.raises(DecodeError, match=f"content encoding {encoding}"):
            read(payload + garbage, None, None, encoding)


@table("encoding", ["gzip", "zstd"])
def test_corrupt_data_is_a_decode_error(encoding: str) -> None:
    payload = bytearray(packed_by(encoding, b"secret" * 30))
    payload[0] ^= 0xFF
    with pytest.raises(DecodeError, match=f"content encoding {encoding}: corrupt"):
        read(bytes(payload), None, None, encoding)


def test_too_many_members_are_a_decode_error() -> None:
    for encoding in ("gzip", "zstd"):
        with pytest.raises(DecodeError, match="more than 1000 members"):
            read(packed_by(encoding, b"") * 1001, None, None, encoding)


def repeating_frame(header: bytes) -> bytes:
    """A zstd frame of 1 GiB in 32 KiB."""
    header = b"\x28\xb5\x2f\xfd" + header
    block = 128 * 1024
    blocks = 8192
    repeated = [struct.pack("<I", (block << 3) | 0b010 | (number == blocks - 1))[:3] + b"x" for number in range(blocks)]
    return header + b"".join(repeated)


#: far above the limit, and above the 8 MiB that one step may expand to
BOMB = bytes(2**26)


@functools.cache
def deflated() -> bytes:
    return gzip.compress(BOMB)


TOO_LARGE = "larger than the limit of 1048576 bytes"


@table(
    "encoding, bomb, says",
    [
        ("gzip", lambda: deflated(), TOO_LARGE),
        ("zlib", lambda: zlib.compress(BOMB), TOO_LARGE),
        ("gzip, gzip", lambda: gzip.compress(deflated()), TOO_LARGE),
        ("zstd", lambda: zstandard.compress(BOMB), TOO_LARGE),
        ("zstd", lambda: zstandard.compress(bytes(2**18)) * 900, TOO_LARGE),
        ("zstd", lambda: repeating_frame(b"\x00\x58"), TOO_LARGE),
        # this one claims to be of 300 bytes
        ("zstd", lambda: repeating_frame(b"\x40\x58" + struct.pack("<H", 300 - 256)), "corrupt"),
        ("gzip, zstd", lambda: zstandard.compress(deflated()), TOO_LARGE),
    ],
)
def test_a_bomb_does_not_go_off(encoding: str, bomb: Any, says: str) -> None:
    payload = bomb()
    context = MessageContext(content_encoding=encoding)
    limit = 2**20
    tracemalloc.start()
    try:
        with pytest.raises(DecodeError, match=says):
            decode(payload, context, max_decoded_size=limit)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    # the limit, what one slice can become, and the buffer growing: far from what the bomb holds
    assert peak < 32 * 2**20


def test_the_limit_is_exact() -> None:
    for encoding in ("gzip", "zstd"):
        context = MessageContext(content_encoding=encoding)
        payload = packed_by(encoding, b"x" * 1000)
        assert decode(payload, context, max_decoded_size=1000) == b"x" * 1000
        with pytest.raises(DecodeError, match="larger than the limit of 999 bytes"):
            decode(payload, context, max_decoded_size=999)


def test_zstd_may_look_back_as_far_as_the_limit_allows() -> None:
    data = random.Random(1).randbytes(2**10) * (20 * 2**10)
    parameters = zstandard.ZstdCompressionParameters.from_level(3, window_log=25)
    payload = zstandard.ZstdCompressor(compression_params=parameters).compress(data)
    context = MessageContext(content_encoding="zstd")

    assert decode(payload, context) == data
    with pytest.raises(DecodeError, match="requires too much memory"):
        decode(payload, context, max_decoded_size=1000)


# --- extras ------------------------------------------------------------------------------------------------


@table(
    "module, extra, content_type, encoding",
    [("cbor2", "cbor", CBOR, None), ("msgpack", "msgpack", MSGPACK, None), ("zstandard", "zstd", JSON, "zstd")],
)
def test_a_missing_package_names_its_extra(
    monkeypatch: pytest.MonkeyPatch, module: str, extra: str, content_type: str, encoding: str | None
) -> None:
    monkeypatch.setattr(messaging.codecs.registry._codecs, "__dict__", vars(Codecs()))
    monkeypatch.setitem(sys.modules, module, None)

    for action in (lambda: encode([], content_type, encoding), lambda: read(b"", content_type, None, encoding)):
        with pytest.raises(MissingExtraError, match=rf"rx-messaging\[{extra}\]") as caught:
            action()
        assert caught.value.extra == extra
    assert turn_round([1], JSON) == [1]
    monkeypatch.undo()
    assert turn_round([1], content_type, None, encoding) == [1]


# --- codecs of others --------------------------------------------------------------------------------------


class Reversed:
    content_types = ("application/x-reversed", "image/*")

    def encode(self, obj: Any, parameters: Mapping[str, str]) -> bytes:
        return bytes(reversed(obj.encode())) + parameters.get("tail", "").encode()

    def decode(self, data: bytes, model: Any, parameters: Mapping[str, str]) -> Any:
        return bytes(reversed(data)).decode()


@pytest.fixture
def codecs(monkeypatch: pytest.MonkeyPatch) -> Codecs:
    """The codecs of a process that has not met any yet."""
    found = messaging.codecs.registry._codecs
    monkeypatch.setattr(found, "__dict__", vars(Codecs()))
    return found


@pytest.mark.usefixtures("codecs")
def test_a_registered_codec_serves_its_content_types() -> None:
    codec: Codec = Reversed()
    with pytest.raises(UnknownContentTypeError):
        codec_for("image/png")
    register_codec(codec)
    register_codec(codec)

    assert codec_for("Application/X-Reversed") is codec
    assert codec_for("image/png") is codec
    assert encode("abc", "application/x-reversed; tail=!") == (b"cba!", "application/x-reversed; tail=!")
    assert read(b"cba", "application/x-reversed") == "abc"
    assert isinstance(codec_for("image/svg+json"), JsonCodec)


@pytest.mark.usefixtures("codecs")
def test_a_codec_for_one_text_type_takes_precedence_over_text() -> None:
    assert isinstance(codec_for("text/csv"), TextCodec)
    register_codec(SimpleNamespace(content_types=["text/csv"], encode=lambda *_: b"", decode=lambda *_: "csv"))

    assert read(b"a", "text/csv") == "csv"
    assert read(b"a", "text/plain") == "a"


@pytest.mark.usefixtures("codecs")
@table(
    "codec, says",
    [
        (object(), "no method encode"),
        (SimpleNamespace(encode=print), "no method decode"),
        (SimpleNamespace(encode=print, decode=print), "content_types must be"),
        (SimpleNamespace(encode=print, decode=print, content_types="a/b"), "content_types must be"),
        (SimpleNamespace(encode=print, decode=print, content_types=[]), "names no content type"),
        (SimpleNamespace(encode=print, decode=print, content_types=["json"]), "malformed"),
        (SimpleNamespace(encode=print, decode=print, content_types=["a/b; c=d"]), "leave them out"),
        (SimpleNamespace(encode=print, decode=print, content_types=["a/b", "Application/JSON"]), "built in"),
        (SimpleNamespace(encode=print, decode=print, content_types=["text/*"]), "built in"),
    ],
)
def test_objects_that_are_no_codecs_are_not_registered(codec: Any, says: str) -> None:
    with pytest.raises(ArgumentError, match=says):
        register_codec(codec)
    with pytest.raises(UnknownContentTypeError):
        codec_for("a/b")


@pytest.mark.usefixtures("codecs")
def test_a_content_type_has_one_registered_codec() -> None:
    register_codec(Reversed())
    with pytest.raises(ArgumentError, match="'application/x-reversed' has a codec already"):
        register_codec(Reversed())


@pytest.mark.usefixtures("codecs")
def test_codecs_that_fail_are_codec_errors() -> None:
    def broken(*_: Any) -> Any:
        raise ZeroDivisionError("hush")

    register_codec(SimpleNamespace(content_types=["a/broken"], encode=broken, decode=broken))
    register_codec(SimpleNamespace(content_types=["a/text"], encode=lambda *_: "text", decode=print))

    with pytest.raises(EncodeError, match=r"^a/broken: the codec failed with ZeroDivisionError$"):
        encode(1, "a/broken")
    with pytest.raises(DecodeError, match=r"^a/broken: the codec failed with ZeroDivisionError$"):
        read(b"", "a/broken")
    with pytest.raises(EncodeError, match="returned str, not bytes"):
        encode(1, "a/text")


MODULE = """
loaded = []

class Shout:
    content_types = ("application/x-shout",)

    def __init__(self):
        loaded.append(self)

    def encode(self, obj, parameters):
        return obj.upper().encode()

    def decode(self, data, model, parameters):
        return data.decode().lower()

whisper = Shout()
unfit = object()
"""


def install_codecs(folder: Path, name: str, *lines: str) -> None:
    install(folder, name, "\n".join(["[messaging.codecs]", *lines]))


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder on the path, with a module of codecs."""
    (tmp_path / "shouting_codecs.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "shouting_codecs", raising=False)
    return tmp_path


@pytest.mark.usefixtures("codecs")
def test_codecs_are_found_by_entry_point_and_loaded_when_their_type_is_met(
    site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_codecs(
        site,
        "shouting",
        "application/x-shout = shouting_codecs:Shout",
        "Text/X-Whisper = shouting_codecs:whisper",
    )
    assert read(b"a", "text/plain") == "a"
    assert read(b"A", "text/other") == "A"
    assert "shouting_codecs" not in sys.modules
    assert encode("abc", "application/x-shout") == (b"ABC", "application/x-shout")
    module = sys.modules["shouting_codecs"]
    assert read(b"ABC", "application/x-shout; a=b") == "abc"
    assert codec_for("application/x-shout") is module.loaded[-1]
    assert len(module.loaded) == 2  # the object of the module, and one of the class
    assert codec_for("text/x-whisper") is module.whisper
    assert codec_for("application/y+x-shout") is codec_for("application/x-shout")
    with pytest.raises(UnknownContentTypeError, match="application/x-shout"):
        codec_for("application/x-nothing")
    mine = SimpleNamespace(content_types=["application/x-shout"], encode=print, decode=lambda *_: "mine")
    register_codec(mine)  # takes precedence
    assert read(b"ABC", "application/x-shout") == "mine"
    monkeypatch.delitem(sys.modules, "shouting_codecs")


@pytest.mark.usefixtures("codecs")
def test_a_broken_entry_point_says_so_and_breaks_no_other(site: Path, caplog: pytest.LogCaptureFixture) -> None:
    install_codecs(
        site,
        "half-broken",
        "application/x-shout = shouting_codecs:Shout",
        "application/x-missing = no_such_module_anywhere:Codec",
        "application/x-absent = shouting_codecs:Absent",
        "application/x-unfit = shouting_codecs:unfit",
        "application/json = shouting_codecs:Shout",
        "nonsense = shouting_codecs:Shout",
    )
    with caplog.at_level(logging.WARNING, "messaging.codecs"):
        for name, says in (
            ("missing", "codec no_such_module_anywhere:Codec of half-broken .* ModuleNotFoundError: "),
            ("absent", "AttributeError: "),
            ("unfit", "object is no codec: it has no method encode"),
        ):
            with pytest.raises(UnknownContentTypeError, match=says):
                codec_for(f"application/x-{name}")
    assert "application/json is built in" in caplog.text
    assert "malformed content type 'nonsense'" in caplog.text
    assert read(b"ABC", "application/x-shout") == "abc"
    assert turn_round([1], JSON) == [1]


@pytest.mark.usefixtures("codecs")
def test_two_distributions_that_claim_a_type_are_both_named(site: Path) -> None:
    install_codecs(site, "one", "application/x-shout = shouting_codecs:Shout")
    install_codecs(site, "two", "application/X-Shout = shouting_codecs:whisper")

    with pytest.raises(UnknownContentTypeError, match=r"claimed by .*Shout of one and .*whisper of two; uninstall"):
        codec_for("application/x-shout")
    register_codec(SimpleNamespace(content_types=["application/x-shout"], encode=print, decode=lambda *_: "mine"))
    assert read(b"", "application/x-shout") == "mine"


@pytest.mark.usefixtures("codecs")
def test_unreadable_metadata_of_others_costs_only_the_codecs_of_others(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def unreadable(**_: Any) -> Any:
        raise TypeError("malformed entry_points.txt")

    monkeypatch.setattr(importlib.metadata, "entry_points", unreadable)

    assert read(b"a", "text/csv") == "a"
    with pytest.raises(UnknownContentTypeError):
        codec_for("application/x-shout")
    assert caplog.text.count("cannot be read") == 1


# --- threads -----------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("codecs")
def test_many_threads_meet_codecs_and_models_for_the_first_time_together() -> None:
    count = 8
    barrier = threading.Barrier(count)

    class Fresh(BaseModel):
        number: int

    def work(index: int) -> None:
        barrier.wait(PATIENCE)
        for turn in range(50):
            for content_type in OBJECT_TYPES:
                for encoding in (None, "gzip", "zstd"):
                    obj = Fresh(number=index * turn)
                    assert turn_round(obj, content_type, Fresh, encoding) == obj
            if index == 0:
                register_codec(
                    SimpleNamespace(content_types=[f"a/{turn}"], encode=print, decode=lambda *_, turn=turn: turn)
                )
                assert read(b"", f"a/{turn}") == turn

    with ThreadPoolExecutor(count) as pool:
        for done in [pool.submit(work, index) for index in range(count)]:
            done.result(PATIENCE * 2)


# --- properties --------------------------------------------------------------------------------------------

SCALARS = st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False) | st.text()
FINITE = (
    st.none()
    | st.booleans()
    | st.integers(-(10**40), 10**40)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text()
)


def trees(leaves: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.recursive(
        leaves, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4), max_leaves=10
    )


ENCODINGS = st.sampled_from([None, "gzip", "zstd", "gzip, zstd"])


@given(trees(FINITE), ENCODINGS)
def test_json_values_come_back(obj: Any, encoding: str | None) -> None:
    assert turn_round(obj, JSON, None, encoding) == obj
    assert turn_round(obj, JSON, Any, encoding) == obj
    assert turn_round(obj, JSON, object, encoding) == obj


@given(trees(SCALARS | st.binary()), ENCODINGS, st.sampled_from([CBOR, MSGPACK]))
def test_binary_values_come_back(obj: Any, encoding: str | None, content_type: str) -> None:
    if not isinstance(obj, bytes):  # these are content
        assert turn_round(obj, content_type, None, encoding) == obj


@given(trees(SCALARS | st.binary()))
def test_binary_formats_are_written_as_their_libraries_write_them(obj: Any) -> None:
    if not isinstance(obj, bytes):
        assert encode(obj, CBOR)[0] == cbor2.dumps(obj)
        assert encode(obj, MSGPACK)[0] == msgpack.packb(obj)


@given(st.text(), ENCODINGS)
def test_text_comes_back(text: str, encoding: str | None) -> None:
    assert turn_round(text, None, None, encoding) == text
    assert turn_round(text, "text/html", str, encoding) == text


@given(st.binary(), ENCODINGS)
def test_bytes_come_back(data: bytes, encoding: str | None) -> None:
    assert turn_round(data, None, None, encoding) == data


@given(
    st.binary(max_size=300),
    st.sampled_from(
        [None, JSON, CBOR, MSGPACK, "text/plain", "text/plain; charset=utf-16", "application/octet-stream"]
    ),
    st.sampled_from([None, Any, str, bytes, int, list[int], dict[str, Any], Reading, Point, Node]),
    st.sampled_from([None, "gzip", "zstd", "utf-8"]),
)
def test_arbitrary_bytes_are_a_value_or_a_codec_error(
    data: bytes, content_type: str | None, model: Any, encoding: str | None
) -> None:
    try:
        read(data, content_type, model, encoding)
    except CodecError:
        return


@given(st.binary(min_size=1, max_size=200), st.data())
def test_damaged_compressed_data_is_a_value_or_a_codec_error(data: bytes, draw: st.DataObject) -> None:
    for encoding in ("gzip", "zstd"):
        payload = bytearray(packed_by(encoding, data))
        payload[draw.draw(st.integers(0, len(payload) - 1))] ^= draw.draw(st.integers(1, 255))
        try:
            read(bytes(payload), None, None, encoding)
        except CodecError:
            continue


@given(trees(SCALARS), st.sampled_from([Reading, Point, Pair, Settings, list[int], dict[str, float], Node]))
def test_any_value_fits_a_model_or_is_a_decode_error(obj: Any, model: Any) -> None:
    for content_type in (CBOR, MSGPACK):
        payload, _ = encode([obj], content_type)
        try:
            read(payload, content_type, list[model])
        except DecodeError as error:
            assert len(str(error)) < 2000  # noqa: PT017 - either outcome is right


# --- kinds of models that the page names


class OldDict(typing.TypedDict):
    n: int


class Numbers(NamedTuple):
    n: int
    text: str = "x"


class Colour(Enum):
    RED = "red"


class Level(IntEnum):
    HIGH = 3


class Shade(StrEnum):
    DARK = "dark"


V = TypeVar("V")


class Box(BaseModel, Generic[V]):
    n: V


class Several(RootModel[list[int]]):
    pass


@dataclass
class Plain:
    n: int


@dataclass(frozen=True, slots=True)
class Frozen:
    n: int


@dataclass
class GenericBox(Generic[V]):
    n: V


@pydantic_dataclass
class Checked:
    n: int


class PartlyRequired(TypedDict, total=False):
    n: Required[int]
    more: str


@dataclass
class Nested:
    box: Box[int]
    numbers: Numbers
    colours: list[Colour]
    part: PartlyRequired


Identity = NewType("Identity", int)
MODELS: list[tuple[Any, Any]] = [
    (Box[int], Box(n=1)), (Several, Several([1, 2])), (Plain, Plain(1)), (Frozen, Frozen(1)), (Checked, Checked(1)),
    (GenericBox[int], GenericBox(1)), (Numbers, Numbers(1)), (PartlyRequired, {"n": 1}), (Colour, Colour.RED),
    (Level, Level.HIGH), (Shade, Shade.DARK), (list[Plain], [Plain(1)]), (dict[str, Box[int]], {"a": Box(n=1)}),
    (tuple[int, str], (1, "a")), (set[int], {1, 2}), (Plain | str, Plain(1)), (Plain | None, None),
    (Literal["a", "b"], "b"), (Annotated[int, Field(gt=0)], 1), (Identity, 7), (int, 1), (float, 1.5), (bool, True),
    (datetime, datetime(2026, 1, 1, tzinfo=UTC)), (uuid.UUID, uuid.UUID(int=7)), (Decimal, Decimal("1.50")),
    (Nested, Nested(Box(n=1), Numbers(2), [Colour.RED], {"n": 3})),
    (list[PartlyRequired], [{"n": 1, "more": "x"}]),
]  # fmt: skip


@table("model, value", MODELS)
@table("content_type", OBJECT_TYPES)
def test_each_kind_of_model_that_the_page_names_travels(model: Any, value: Any, content_type: str) -> None:
    codecs_models.check_model(model)
    payload, told = encode(value, content_type)
    assert decode(payload, MessageContext("a", content_type=told), model) == value


@table("model", [OldDict, list[OldDict], OldDict | None])
def test_a_typed_dict_of_the_standard_library_works_or_is_refused_with_the_reason(model: Any) -> None:
    """It works from Python 3.12 on."""
    if sys.version_info >= (3, 12):
        codecs_models.check_model(model)
        return
    with pytest.raises(ArgumentError, match=r"typing_extensions\.TypedDict") as caught:
        codecs_models.check_model(model)
    assert "\n" not in str(caught.value)
