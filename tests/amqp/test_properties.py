"""Message properties, written and read by hand, against pamqp's; and whatever strangers put into them."""

from __future__ import annotations

import datetime
import struct
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pamqp import decode, encode, header
from pamqp.commands import Basic

from messaging.errors import ArgumentError
from messaging.model import NO_EXTENSIONS, MessageContext, PublishOptions, headers
from messaging.testing.tables import table
from messaging_adapters.amqp import properties, tables
from messaging_adapters.amqp.properties import AmqpProperties, PropertiesTemplate
from tests.doubles.plans import plan_of

TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=60)
SHORT = st.none() | TEXT
NAME = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1, max_size=30)


def unmarshalled(data: bytes) -> Basic.Properties:
    frame = header.ContentHeader()
    frame.unmarshal(struct.pack(">HHQ", 60, 0, 0) + data)
    return frame.properties


def read(data: bytes, redelivered: bool = False) -> AmqpProperties:
    """Read with something before and after it, as in a read buffer."""
    return properties.read(b"before" + data + b"\xce\x01after", 6, 6 + len(data), redelivered)


@given(
    SHORT, SHORT, SHORT, st.none() | st.sampled_from(["a/b", "r.s/t"]), st.dictionaries(NAME, TEXT, max_size=5),
    st.none() | st.integers(0, 9), st.none() | st.floats(0.001, 4_294_967), st.booleans(), st.none() | TEXT,
    st.integers(0, 2**32 - 1),
)  # fmt: skip
def test_written_properties_are_read_alike_by_pamqp_and_here(
    content_type: str | None, encoding: str | None, correlation: str | None, reply: str | None,
    texts: dict[str, str], priority: int | None, ttl: float | None, persistent: bool, message_id: str | None,
    now: int,
) -> None:  # fmt: skip
    context = MessageContext("c", None, content_type, encoding, correlation, reply)
    options = PublishOptions(headers=texts, priority=priority, time_to_live=ttl, guaranteed_delivery=persistent)
    data = PropertiesTemplate(plan_of(context, options)).fill(correlation, message_id, now)

    seen = unmarshalled(data)
    assert (seen.content_type, seen.content_encoding, seen.correlation_id) == (content_type, encoding, correlation)
    assert seen.reply_to == (None if reply is None else reply.replace(".", "%2E").replace("/", "."))
    assert (seen.headers or {}) == texts
    assert (seen.priority, seen.message_id) == (priority, message_id)
    assert seen.expiration == (None if ttl is None else str(max(1, round(ttl * 1000))))
    assert seen.delivery_mode == (2 if persistent else 1)
    assert seen.timestamp is not None
    assert seen.timestamp.timestamp() == now

    known = read(data)
    assert known[:4] == (content_type, encoding, correlation, reply)
    expected: dict[str, Any] = {"timestamp": float(now)}
    if texts:
        expected["headers"] = texts
    if priority is not None:
        expected["priority"] = priority
    if ttl is not None:
        expected["timeToLive"] = max(1, round(ttl * 1000)) / 1000
    if message_id is not None:
        expected["messageId"] = message_id
    assert dict(known.extensions) == expected
    assert known.delivery_count is None


def test_nothing_is_read_from_nothing() -> None:
    assert read(b"\0\0") == AmqpProperties()
    assert read(b"\0\0").extensions is NO_EXTENSIONS
    assert dict(read(b"\0\0", redelivered=True).extensions) == {"redelivered": True}


def test_type_and_application_are_written() -> None:
    options = PublishOptions(custom={"type": "t", "appId": "a"})
    seen = unmarshalled(PropertiesTemplate(plan_of(MessageContext("c"), options)).fill("c", "m", 5))
    assert (seen.message_type, seen.app_id, seen.user_id, seen.message_id) == ("t", "a", None, "m")


def test_extensions_cannot_be_written_to() -> None:
    known = read(Basic.Properties(headers={"a": "b"}, priority=1).marshal())
    mappings: tuple[Any, ...] = known.extensions, known.extensions["headers"]
    for mapping in mappings:
        with pytest.raises(TypeError, match="assignment"):
            mapping["x"] = 1


@table(
    "context, what",
    [
        (MessageContext("c", content_type="x" * 256), "content type: 256 bytes"),
        (MessageContext("c", content_encoding="ä" * 128), "content encoding: 256 bytes"),
        (MessageContext("c", correlation_id="x" * 300), "correlation id: 300 bytes"),
        (MessageContext("c", reply_to_channel="." * 86), "reply channel: 258 bytes"),
        (MessageContext("c", correlation_id="\ud800"), "correlation id: .*surrogates"),
    ],
)
def test_values_longer_than_a_short_string_are_refused(context: MessageContext, what: str) -> None:
    with pytest.raises(ArgumentError, match=what):
        PropertiesTemplate(plan_of(context))


# --- headers of other programs

SCALAR = st.one_of(
    st.none(), st.booleans(), st.integers(-(2**63), 2**63 - 1), st.floats(width=32), TEXT,
    st.decimals(0, 10_000, places=2), st.binary(max_size=20).map(bytearray),
    st.integers(0, 2**32 - 1).map(lambda seconds: datetime.datetime.fromtimestamp(seconds, datetime.UTC)),
)  # fmt: skip
FIELD = st.recursive(
    SCALAR, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(NAME, inner, max_size=4), max_leaves=12
)


def ours(value: Any) -> Any:
    """A field as we read it."""
    if isinstance(value, bytearray):
        return bytes(value)
    if isinstance(value, list):
        return [ours(each) for each in value]
    if isinstance(value, dict):
        return {name: ours(value[name]) for name in sorted(value)}  # as pamqp writes them
    return value


@given(st.dictionaries(NAME, FIELD, max_size=6))
def test_any_table_is_read_with_its_types(table: dict[str, Any]) -> None:
    data = encode.field_table(table)
    fields, end = tables.read_table(data, 0, len(data))
    assert end == len(data)
    assert repr(fields) == repr(ours(table))


@given(st.dictionaries(NAME, FIELD, max_size=6))
def test_any_headers_are_written_as_pamqp_reads_them_and_read_again(table: dict[str, Any]) -> None:
    checked = headers.check(headers.carried(ours(table), headers.TYPED))
    data = tables.write_table(checked)
    length, theirs = decode.field_table(data)
    assert length == len(data)
    assert repr(headers.check(theirs)) == repr(checked)
    options = PublishOptions(headers=checked)
    known = read(PropertiesTemplate(plan_of(MessageContext("c"), options)).fill(None, None, 0))
    assert repr(known.extensions.get("headers", {})) == repr(checked if checked else {})


@table(
    "encoding, compressed, known",
    [
        (None, "application/x-gzip", "zlib"),
        ("utf-8", "application/x-gzip", "utf-8, zlib"),
        ("binary", "application/zstd", "binary, zstd"),
        ("utf-8", "application/x-bz2", "utf-8, bzip2"),
    ],
)
def test_kombus_header_for_compression_is_read_as_content_encoding(
    encoding: str | None, compressed: str, known: str
) -> None:
    told = read(Basic.Properties(content_encoding=encoding, headers={"compression": compressed, "a": 1}).marshal())
    assert (told.content_encoding, told.extensions) == (known, {"headers": {"a": 1}})


@table("value", ["none", 5, None, ["application/x-gzip"], ""])
def test_a_header_compression_of_another_meaning_is_left_alone(value: Any) -> None:
    told = read(Basic.Properties(content_encoding="gzip", headers={"compression": value}).marshal())
    assert told.content_encoding == "gzip"
    assert headers.frozen(value) == told.extensions["headers"]["compression"]


@table(
    "content_type, encoding, written",
    [
        ("text/plain; charset=utf-8", None, "text/plain"),
        ("text/plain; charset=utf-8", "UTF-8, gzip", "text/plain"),
        ("text/plain; charset=utf-8", "latin-1", "text/plain; charset=utf-8"),
        ("text/plain; charset=utf-8", "unknown", "text/plain; charset=utf-8"),
        ("text/plain; charset=latin-1", None, "text/plain; charset=latin-1"),
        ("text/html; charset=utf-8", None, "text/html; charset=utf-8"),
    ],
)
def test_a_charset_is_left_out_where_it_is_the_default(content_type: str, encoding: str | None, written: str) -> None:
    context = MessageContext("c", content_type=content_type, content_encoding=encoding)
    assert unmarshalled(PropertiesTemplate(plan_of(context)).fill(None, None, 0)).content_type == written


@table(
    "encoding, property_, fields",
    [
        ("zlib", None, {"a": 1, "compression": "application/x-gzip"}),
        ("utf-8, Zlib", "utf-8", {"a": 1, "compression": "application/x-gzip"}),
        ("gzip,zlib", "gzip", {"a": 1, "compression": "application/x-gzip"}),
        ("zlib, gzip", "zlib, gzip", {"a": 1}),
        ("zlib, gzip, utf-8", "zlib, gzip, utf-8", {"a": 1}),
        ("gzip", "gzip", {"a": 1}),
    ],
)
def test_zlib_is_written_as_kombu_writes_it(encoding: str, property_: str | None, fields: dict[str, Any]) -> None:
    context = MessageContext("c", content_type="text/plain; charset=utf-8", content_encoding=encoding)
    data = PropertiesTemplate(plan_of(context, PublishOptions(headers={"a": 1}))).fill(None, None, 0)
    seen = unmarshalled(data)
    assert (seen.content_encoding, seen.headers, seen.content_type) == (property_, fields, "text/plain")
    assert (read(data).content_encoding or "").replace(" ", "") == encoding.replace(" ", "").lower()


@table(
    "field, value",
    [
        (b"b\xff", -1), (b"B\xff", 255), (b"s\xff\xff", -1), (b"u\xff\xff", 65_535), (b"I\xff\xff\xff\xff", -1),
        (b"i\xff\xff\xff\xff", 2**32 - 1), (b"l" + b"\xff" * 8, -1), (b"L" + b"\xff" * 8, -1),
        (b"d" + struct.pack(">d", 0.1), 0.1), (b"t\x02", True), (b"\x00", None), (b"V", None),
        (b"S\0\0\0\x02\xc3\x28", "c328"),
        # times beyond all times are numbers
        *((b"T" + struct.pack(">Q", seconds), seconds) for seconds in (253_402_300_800, 1_700_000_000_000, 2**64 - 1)),
    ],
)  # fmt: skip
def test_field_types_of_other_programs_are_read(field: bytes, value: Any) -> None:
    table = b"\x01n" + field
    data = struct.pack(">I", len(table)) + table
    assert tables.read_table(data, 0, len(data)) == ({"n": value}, len(data))


def test_a_table_nested_deeper_than_python_recurses_is_cut_off() -> None:
    table = b""
    for _ in range(5_000):
        table = b"\x01nF" + struct.pack(">I", len(table)) + table
    data = b"\x20\x80" + struct.pack(">I", len(table)) + table + b"\x02id"
    known = read(data)
    assert known.extensions["messageId"] == "id"
    value, levels = known.extensions["headers"], 0
    while not isinstance(value, str):
        value, levels = value["n"], levels + 1
    assert (value, levels) == ("<nested too deeply>", 17)
    headers.check(known.extensions["headers"])


def test_the_brokers_count_of_deliveries_includes_this_one() -> None:
    assert read(Basic.Properties(headers={"x-delivery-count": 2}).marshal()).delivery_count == 3
    assert read(Basic.Properties(headers={"x-delivery-count": "2"}).marshal()).delivery_count is None
    # RabbitMQ 4.3: acquisitions and failures
    both = {"x-acquired-count": 3, "x-delivery-count": 1}
    assert read(Basic.Properties(headers=both).marshal()).delivery_count == 4
    assert read(Basic.Properties(headers={"x-acquired-count": 3}).marshal()).delivery_count == 4


@table(
    "data, known",
    [
        (
            Basic.Properties(message_id="m", message_type="t", user_id="u", app_id="a").marshal(),
            {"messageId": "m", "type": "t", "userId": "u", "appId": "a"},
        ),
        (Basic.Properties(app_id="a").marshal(), {"appId": "a"}),
        # a type that could not be passed on is left out
        (struct.pack(">H", 1 << 5 | 1 << 3) + b"\xff" + b"\xff" * 255 + b"\x00", {"appId": ""}),
        (Basic.Properties(expiration="soon").marshal(), {}),
        (Basic.Properties(expiration="9" * 200).marshal(), {}),
        (b"\x00\x40" + struct.pack(">Q", 1_700_000_000_500), {"timestamp": 1_700_000_000.5}),
        (b"\x00\x40" + b"\xff" * 8, {"timestamp": (2**64 - 1) / 1000}),
        (b"\x00\x80\x02\xff\xfe", {"messageId": "\\xff\\xfe"}),
        (b"\x00\x81\x00\x00\x01m", {"messageId": "m"}),
    ],
)
def test_properties_are_extensions_and_odd_values_do_no_harm(data: bytes, known: dict[str, Any]) -> None:
    assert dict(read(data).extensions) == known


@given(st.binary(max_size=80))
def test_reading_properties_never_fails(data: bytes) -> None:
    assert isinstance(read(data), AmqpProperties)


@table(
    "data",
    [b"", b"\x80", b"\x80\x00", b"\x80\x00\xffx", b"\x20\x00\0\0\0\x02\x01n", b"\x20\x00\0\0\0\x03\x01n?", b"\xff\xff"],
)
def test_malformed_properties_are_left_out_and_logged(data: bytes, caplog: pytest.LogCaptureFixture) -> None:
    assert read(data) == AmqpProperties()
    assert "malformed properties" in caplog.text


@table("name", ["x-reply-to-topic", "x-opt-reply-to-topic"])
def test_where_a_client_of_mqtt_5_wants_its_reply_is_its_reply_channel(name: str) -> None:
    """RabbitMQ's MQTT plugin, from 3.13 on, tells in a header: a routing key of the topic exchange."""

    def told(header: dict[str, str], **other: str) -> AmqpProperties:
        return read(Basic.Properties(headers={name: "replies.of.me", **header}, **other).marshal())

    known = told({"k": "v"}, correlation_id="1")
    assert known.reply_to_channel == "replies/of/me"
    assert known.correlation_id == "1"
    assert known.extensions == {"headers": {"k": "v"}}
    assert told({}).extensions == {}
    assert told({}, reply_to="b.c").reply_to_channel == "b/c"
    for value in (None, 3):  # set by an application
        assert read(Basic.Properties(headers={name: value}).marshal()).extensions == {"headers": {name: value}}
