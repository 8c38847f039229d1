"""Channel names and routing keys: two ways to say the same, and never two things said the same way."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from messaging.errors import InvalidChannelError
from messaging.model import channels
from messaging.testing.tables import table
from messaging_adapters.amqp import names

LEVEL = st.text(st.one_of(st.sampled_from(".%*#+$ 2Ee"), st.characters(exclude_categories=["Cs", "Cc"])), max_size=8)
#: more than names may hold: wildcards are escaped, too, if they ever get here
NAME = st.lists(LEVEL.filter(lambda level: "/" not in level), min_size=1, max_size=5).map("/".join)
KEY = st.text(st.one_of(st.sampled_from(".%*#+/2eE"), st.characters(exclude_categories=["Cs"])), max_size=30)


@table(
    "channel, key",
    [
        ("a/b", "a.b"),
        ("a", "a"),
        ("/", "."),
        ("a//b/", "a..b."),
        ("a.b/c", "a%2Eb.c"),
        ("50%", "50%25"),
        ("%2E", "%252E"),
        ("a*b", "a%2Ab"),
        ("$SYS/uptime", "$SYS.uptime"),
        ("größe/日本", "größe.日本"),
    ],
)
def test_a_channel_has_this_routing_key(channel: str, key: str) -> None:
    assert names.routing_key(channel) == key
    assert names.channel_name(key) == channel


@table(
    "pattern, key", [("a/b", "a.b"), ("+/b/#", "*.b.#"), ("#", "#"), ("+", "*"), ("a.b/+", "a%2Eb.*"), ("*/a", "%2A.a")]
)
def test_a_pattern_has_this_binding_key(pattern: str, key: str) -> None:
    assert names.binding_key(pattern) == key


@table(
    "key, channel",
    [
        ("a%2eb", "a.b"),
        ("100%", "100%"),
        ("%zz.%4", "%zz/%4"),
        ("%41", "%41"),
        ("a.*.#", "a/*/#"),
        ("", ""),
        ("a/b", "a/b"),
    ],
)
def test_keys_of_other_programs_are_read_leniently(key: str, channel: str) -> None:
    assert names.channel_name(key) == channel


@given(NAME)
@example("%2E")
@example("%25")
@example("a.b/%2E/%252E")
def test_translation_is_undone_and_keeps_the_levels(channel: str) -> None:
    """The words of a key are the levels of its channel; a pattern without wildcards is bound as it is published."""
    key = names.routing_key(channel)
    assert names.channel_name(key) == channel
    assert len(key.split(".")) == len(channel.split("/"))
    assert not set(key) & set("*#+/")
    if not channels.has_wildcard(channel):
        assert names.binding_key(channel) == key


@given(KEY)
def test_any_key_can_be_read(key: str) -> None:
    assert isinstance(names.channel_name(key), str)


def test_names_longer_than_a_short_string_are_refused() -> None:
    assert names.check_length("x" * 255, "it") == "x" * 255
    with pytest.raises(InvalidChannelError, match="it is 256 bytes"):
        names.check_length("ä" * 128, "it")
    with pytest.raises(InvalidChannelError, match="surrogate"):
        names.check_length("\ud800", "it")
