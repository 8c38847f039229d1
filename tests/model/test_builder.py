"""The builder of messages and contexts (RFC 5.6.3): scenarios 1-17."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from messaging import Message, MessageContext, MessageContextBuilder, Messaging
from messaging.errors import ArgumentError, InvalidContentError
from messaging.services import ServiceRegistry
from messaging.testing.tables import table
from messaging.testing.waiting import PATIENCE
from tests.doubles.fake import FakeBroker
from tests.doubles.fixtures import Connect

GETTERS = (
    "channel",
    "channel_extension",
    "content_type",
    "content_encoding",
    "correlation_id",
    "reply_to_channel",
)


def values(context: MessageContext) -> dict[str, Any]:
    return {name: getattr(context, name) for name in GETTERS}


class Foreign:
    """A context of another program: the getters of the RFC, and no base class."""

    channel = "c"
    content_type: str | None = "text/plain"
    content_encoding: str | None = None
    correlation_id: str | None = "id"
    reply_to_channel: str | None = None

    def __init__(self, extensions: Any) -> None:
        self.extensions = extensions


def test_extensions_cannot_be_written_to() -> None:
    """Scenario 3 [S][B]."""
    for context in (
        MessageContextBuilder().build_context(),
        MessageContextBuilder().extension_entry("a", 1).build_context(),
        MessageContext(),
    ):
        with pytest.raises(TypeError):
            context.extensions["b"] = 2  # type: ignore[index]
        for name in (*GETTERS, "extensions"):
            with pytest.raises(AttributeError):
                setattr(context, name, "x")


def test_changing_the_arguments_afterwards_has_no_effect() -> None:
    """Scenario 3 [S][B], at any depth."""
    headers = {"a": "b"}
    data = bytearray(b"x")
    nested: dict[str, Any] = {"inner": {"list": [1]}, "set": {1}, "bytes": bytearray(b"x"), "view": memoryview(data)}
    given: dict[str, Any] = {"headers": headers, "custom": nested, "list": [[1]]}
    builder = MessageContextBuilder().extensions(given)
    context = builder.build_context()
    headers["a"] = headers["c"] = "changed"
    nested["inner"]["list"].append(2)
    nested["set"].add(2)
    nested["bytes"].extend(b"y")
    data[0] = 0
    nested["new"] = 1
    given["list"][0].append(2)
    given["new"] = 1
    assert set(context.extensions) == {"headers", "custom", "list"}
    assert context.extensions["headers"] == {"a": "b"}
    assert [*context.extensions["list"][0]] == [1]
    custom = context.extensions["custom"]
    assert "new" not in custom
    assert [*custom["inner"]["list"]] == [1]
    assert set(custom["set"]) == {1}
    assert bytes(custom["bytes"]) == b"x"
    assert bytes(custom["view"]) == b"x"
    with pytest.raises(TypeError):
        context.extensions["headers"]["x"] = "y"


def test_a_message_always_has_a_context_and_a_payload() -> None:
    """Scenarios 5 [S], 8 [I]: both are empty if nothing was set."""
    message = MessageContextBuilder().build_message()
    assert isinstance(message.context, MessageContext)
    assert values(message.context) == dict.fromkeys(GETTERS)
    assert isinstance(message.context.extensions, Mapping)
    assert message.context.extensions == {}
    assert message.payload == b""


@table(
    "content, payload",
    [
        (b"x\x00y", b"x\x00y"),
        (bytearray(b"xy"), b"xy"),
        (memoryview(b"0123456789")[2:5], b"234"),
        (memoryview(b"0123456789")[::3], b"0369"),
        (memoryview(b"01234567").cast("I"), b"01234567"),
        (memoryview(b""), b""),
    ],
)
def test_the_payload_is_the_content_of_the_buffer(content: Any, payload: bytes) -> None:
    """Scenario 6 [S]: of a slice only the slice."""
    message = MessageContextBuilder().content(content).build_message()
    assert message.payload == payload
    assert type(message.payload) is bytes


def test_a_buffer_changed_later_has_no_effect() -> None:
    content = bytearray(b"before")
    builder = MessageContextBuilder().content(content)
    content[:] = b"after!"
    assert builder.build_message().payload == b"before"


def test_a_mapper_runs_once_and_makes_the_payload() -> None:
    """Scenario 7 [S]."""
    calls: list[object] = []

    def mapper(value: object) -> bytes:
        calls.append(value)
        return b"mapped"

    builder = MessageContextBuilder().content(["x"], mapper)
    assert builder.build_message().payload == b"mapped"
    assert builder.build_message().payload == b"mapped"
    assert calls == [["x"]]
    assert MessageContextBuilder().content(b"raw", lambda raw: raw[::-1]).build_message().payload == b"war"
    mapped = MessageContextBuilder().content(1, lambda _: memoryview(b"abc")[1:])  # type: ignore[arg-type, return-value]
    assert mapped.build_message().payload == b"bc"


def test_an_exception_of_a_mapper_reaches_the_caller() -> None:
    """Scenario 7 [S]."""
    with pytest.raises(ZeroDivisionError):
        MessageContextBuilder().content(0, lambda zero: b"%d" % (1 // zero))
    with pytest.raises(InvalidContentError, match="must return bytes, not str"):
        MessageContextBuilder().content(0, lambda _: "text")  # type: ignore[arg-type, return-value]


def test_the_last_content_counts() -> None:
    builder = MessageContextBuilder().content("text").content(b"bytes")
    assert builder.build_message().payload == b"bytes"
    assert builder.build_message().context.content_type is None
    assert builder.content("text").build_message().payload == b"text"


def test_an_object_is_encoded_by_the_content_type_known_in_the_end() -> None:
    builder = MessageContextBuilder().content({"x": 1})
    message = builder.build_message()
    assert message.payload == b'{"x":1}'
    assert message.context.content_type == "application/json"
    text = MessageContextBuilder().content("é").build_message()
    assert text.payload == "é".encode()
    assert (text.context.content_type or "").startswith("text/plain")
    late = MessageContextBuilder().content("é").content_type("application/json").build_message()
    assert late.payload == '"é"'.encode()
    assert late.context.content_type == "application/json"
    given_type = MessageContext(content_type="application/json")
    by_context = MessageContextBuilder().content_type("text/plain").content("é").with_context(given_type)
    assert by_context.build_message().payload == '"é"'.encode()


@table("first", [True, False])
def test_a_given_context_wins_whatever_the_order(first: bool) -> None:
    """Scenarios 9, 10 [I][B]: the builder fills what the context leaves unset."""
    context = MessageContext("c", correlation_id="id")
    builder = MessageContextBuilder()
    if first:
        builder.with_context(context)
    builder.channel("x").correlation_id("other").content_type("text/plain").reply_to("r")
    if not first:
        builder.with_context(context)
    built = builder.build_context()
    assert values(built) == {
        "channel": "c",
        "channel_extension": None,
        "content_type": "text/plain",
        "content_encoding": None,
        "correlation_id": "id",
        "reply_to_channel": "r",
    }


def test_a_routing_key_stays_with_its_channel() -> None:
    builder = MessageContextBuilder().channel("x", "key")
    assert builder.with_context(MessageContext("c")).build_context().channel_extension is None
    kept = MessageContextBuilder().channel("x", "key").with_context(MessageContext()).build_context()
    assert kept == MessageContext("x", "key")
    assert MessageContextBuilder().channel("x", "key").channel("y").build_context().channel_extension is None


def test_a_given_context_is_not_changed() -> None:
    """Scenario 11 [I][B]."""
    context = MessageContext("c", extensions=MappingProxyType({"k": 1}))
    builder = MessageContextBuilder().with_context(context)
    builder.channel("x").extension_entry("k", 2).extension_entry("j", 3).content_type("text/plain").build_context()
    assert context == MessageContext("c", extensions={"k": 1})


def test_extensions_of_a_given_context_win_key_by_key() -> None:
    """Scenario 12 [I]."""
    context = MessageContext("c", extensions=MappingProxyType({"k": 1}))
    builder = MessageContextBuilder().with_context(context).extension_entry("k", 2).extension_entry("j", 3)
    assert builder.build_context().extensions == {"k": 1, "j": 3}


@table("extensions", [{"k": [1]}, None, MappingProxyType({"k": (1,)})])
def test_a_foreign_context_is_read_through_its_getters(extensions: Any) -> None:
    """Scenario 13 [I][B]."""
    foreign = Foreign(extensions)
    built = MessageContextBuilder().with_context(foreign).channel("x").content_encoding("gzip").build_context()  # type: ignore[arg-type]
    assert (built.channel, built.content_type, built.content_encoding) == ("c", "text/plain", "gzip")
    assert built.correlation_id == "id"
    assert {key: [*value] for key, value in built.extensions.items()} == ({"k": [1]} if extensions else {})
    foreign.channel = "changed"
    if isinstance(extensions, dict):
        extensions["k"].append(2)
        assert [*built.extensions["k"]] == [1]
    assert built.channel == "c"


def test_a_foreign_context_publishes_and_subscribes(broker: FakeBroker, m: Messaging) -> None:
    m.publisher.publish(Message(b"1", Foreign({"qos": "1"})))  # type: ignore[arg-type]
    m.publisher.publish(Message(b"2", MessageContext("x")), Foreign({})).result(PATIENCE)  # type: ignore[arg-type]
    assert [(sent.channel, sent.payload) for sent in broker.sent] == [("c", b"1"), ("c", b"2")]
    with m.subscription.subscribe(Foreign({})):  # type: ignore[arg-type]
        assert broker.live[0].spec.channel == "c"


@table("bad", [None, "c", 7, object(), {"channel": "c"}])
def test_objects_without_the_getters_of_a_context_are_refused(bad: Any) -> None:
    with pytest.raises(ArgumentError, match=f"a message context needs channel.*{type(bad).__name__}"):
        MessageContextBuilder().with_context(bad)


def test_building_twice_leaves_the_first_alone() -> None:
    """Scenario 14 [B]."""
    builder = MessageContextBuilder().channel("a").extension_entry("k", 1).content(b"1")
    context, message = builder.build_context(), builder.build_message()
    builder.channel("b").extension_entry("k", 2).extension_entry("j", 3).content_type("t/p").content(b"2")
    assert context == message.context
    assert (context.channel, dict(context.extensions), context.content_type) == ("a", {"k": 1}, None)
    assert message.payload == b"1"
    assert builder.build_message().payload == b"2"


def test_builders_of_the_service_share_nothing(connect: Connect, registry: ServiceRegistry) -> None:
    """Scenario 15 [S]: prototype scope."""
    m = connect()
    first, second = m.context_builder(), m.context_builder()
    third = registry.service(MessageContextBuilder)
    assert len({id(first), id(second), id(third)}) == 3
    first.channel("a").extension_entry("k", 1).content(b"x")
    for other in (second, third):
        assert other.build_context() == MessageContext()
        assert other.build_message().payload == b""


@table("step", ["channel", "content_type", "content_encoding", "correlation_id", "reply_to"])
@table("value", [None, 7, b"a", ["a"]])
def test_text_is_text(step: str, value: Any) -> None:
    with pytest.raises(ArgumentError, match=f"must be a str, not {type(value).__name__}"):
        getattr(MessageContextBuilder(), step)(value)


@table("key", [None, 7, b"a", ("a",)])
def test_an_extension_key_is_text(key: Any) -> None:
    with pytest.raises(ArgumentError, match="an extension key must be a str"):
        MessageContextBuilder().extension_entry(key, 1)
    with pytest.raises(ArgumentError, match="an extension key must be a str"):
        MessageContextBuilder().extensions({key: 1})


@table("bad", [None, 7, "ab", [1], ["ab"]])
def test_extensions_are_a_mapping(bad: Any) -> None:
    with pytest.raises(ArgumentError):
        MessageContextBuilder().extensions(bad)


STEPS = st.lists(
    st.one_of(
        st.tuples(
            st.sampled_from(["channel", "content_type", "content_encoding", "correlation_id", "reply_to"]),
            st.text(max_size=3),
        ),
        st.tuples(st.just("extension_entry"), st.tuples(st.sampled_from("abc"), st.integers(0, 3))),
        st.tuples(st.just("extensions"), st.dictionaries(st.sampled_from("abc"), st.integers(0, 3))),
        st.tuples(st.just("build"), st.none()),
    ),
    max_size=15,
)


@given(steps=STEPS)
def test_any_sequence_of_calls_agrees_with_a_model(steps: list[tuple[str, Any]]) -> None:
    """Scenarios 1 [S], 2 [S], 4 [S]: unset values are None, entries add up, and the later one wins."""
    builder = MessageContextBuilder()
    model: dict[str, Any] = dict.fromkeys(GETTERS)
    extensions: dict[str, int] = {}
    built: list[tuple[MessageContext, dict[str, Any], dict[str, int]]] = []
    for step, argument in steps:
        if step == "build":
            built.append((builder.build_context(), dict(model), dict(extensions)))
        elif step == "extension_entry":
            builder.extension_entry(*argument)
            extensions[argument[0]] = argument[1]
        elif step == "extensions":
            builder.extensions(argument)
            extensions |= argument
        else:
            assert getattr(builder, step)(argument) is builder
            model["reply_to_channel" if step == "reply_to" else step] = argument
    for context, expected, expected_extensions in built:
        assert values(context) == expected
        assert context.extensions == expected_extensions
