"""The stored form of a context: every value comes back as it was, and damaged text is refused."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import UTC, datetime
from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from messaging.errors import ArgumentError, InvalidExtensionError
from messaging.model import MessageContext, restored_context, stored_properties
from messaging.model.context import frozen
from messaging.testing.tables import table

_texts = st.none() | st.text(max_size=20)
_leaves = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text(max_size=10)
    | st.binary(max_size=10)
    | st.decimals(allow_nan=False)
    | st.datetimes(timezones=st.just(UTC))
    | st.frozensets(st.text(max_size=3), max_size=3)
)
_values = st.recursive(
    _leaves, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3)
)


@given(_texts, _texts, _texts, _texts, _texts, st.dictionaries(st.text(max_size=5), _values, max_size=4))
def test_a_context_comes_back_equal_with_the_types_of_its_values(extension, kind, encoding, correlation, reply, values):
    extensions = frozen(values)
    context = MessageContext("a/b", extension, kind, encoding, correlation, reply, extensions)
    restored = restored_context("a/b", stored_properties(context))
    assert restored == context
    assert typed(restored.extensions) == typed(extensions)  # 1, 1.0 and True are equal, and not the same


def typed(value):
    """Return ``value`` with the type of each part."""
    if isinstance(value, Mapping):
        return {key: typed(each) for key, each in value.items()}
    if isinstance(value, tuple):
        return [typed(each) for each in value]
    return type(value), value


def test_a_context_with_nothing_but_a_channel_has_no_stored_text():
    assert stored_properties(MessageContext("a/b")) == ""
    assert restored_context("a/b", "") == MessageContext("a/b")


def test_the_keys_of_mappings_do_not_collide_with_the_tags_of_values():
    extensions = frozen({"headers": {"$": ["bytes", "AA=="], "x": b"\0", "when": datetime(2026, 1, 2, tzinfo=UTC)}})
    context = MessageContext("a", extensions=extensions)
    assert restored_context("a", stored_properties(context)) == context


@table("value", [None, [], [b"", None], ["bytes", "AA=="], {"$": 1}])
def test_the_name_of_an_extension_does_not_collide_with_the_tags_of_values(value):
    context = MessageContext("a/b", extensions=frozen({"$": value, "ttl": 1}))
    assert restored_context("a/b", stored_properties(context)) == context


@table("value", [float("inf"), float("-inf"), Decimal("1.50")])
def test_numbers_that_json_does_not_have_keep_type_and_precision(value):
    context = MessageContext("a", extensions=frozen({"headers": {"x": value}}))
    text = stored_properties(context)
    json.loads(text, parse_constant=pytest.fail)
    assert repr(restored_context("a", text).extensions["headers"]["x"]) == repr(value)


def test_a_value_that_cannot_be_stored_is_refused_by_the_name_of_its_extension():
    with pytest.raises(InvalidExtensionError, match="'custom': a value of type object cannot be stored") as caught:
        stored_properties(MessageContext("a", extensions={"custom": [object()]}))
    assert caught.value.key == "custom"
    with pytest.raises(InvalidExtensionError, match="'headers'"):
        stored_properties(MessageContext("a", extensions={"headers": {1: "x"}}))


@table(
    "text",
    [
        "{", "[]", "3", '{"contentType":3}', '{"extensions":[]}', '{"extensions":3}', '{"extensions":{"a":{"$":1}}}',
        '{"extensions":{"a":{"$":["pickle","x"]}}}', '{"extensions":{"a":{"$":["bytes","*"]}}}',
        '{"extensions":{"a":{"$":["decimal","x"]}}}', '{"extensions":{"a":{"$":["map",3]}}}',
        '{"extensions":{"a":{"$":["time",1]}}}', '{"extensions":{"a":' + "[" * 500 + "]" * 500 + "}}",
        '{"extensions":{"a":' + "[" * 100_000,
    ],
)  # fmt: skip
def test_damaged_text_is_refused(text):
    with pytest.raises(ArgumentError, match="do not parse"):
        restored_context("a", text)
