"""Topics and topic filters, against naive readings of 157.3.1, 157.4.3 and 157.6.2.1; their index: ``test_indexes``."""

from __future__ import annotations

import itertools
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from messaging.dispatch.topics import EVENT_ADMIN, TYPED_EVENTS, TopicFilter, check_topic, is_topic, parse_filter
from messaging.errors import ArgumentError, InvalidTopicError, NullEventError
from messaging.testing.tables import table
from messaging.testing.waiting import PATIENCE
from tests.dispatch.helpers import FILTERS, NEITHER, TOPICS

# --- grammar


@table("topic", TOPICS)
def test_a_topic_is_a_filter_for_itself_only(topic: str) -> None:
    check_topic(topic)
    assert is_topic(topic)
    exact = TopicFilter(topic)
    assert not exact.has_wildcard
    assert exact.matches(topic)
    assert not any(exact.matches(other) for other in TOPICS if other != topic)


@table("text", NEITHER)
def test_a_text_outside_the_grammar_is_neither_topic_nor_filter(text: str) -> None:
    """Scenarios 2 and 5 of the bus, 1 of Event Admin; 157.3.1, 157.4.3."""
    assert not is_topic(text)
    with pytest.raises(InvalidTopicError) as caught:
        check_topic(text)
    assert type(caught.value) is InvalidTopicError
    assert isinstance(caught.value, ArgumentError)
    assert caught.value.topic == text
    for parse in (TopicFilter, TYPED_EVENTS.parse, EVENT_ADMIN.parse):
        with pytest.raises(InvalidTopicError):
            parse(text)


@table("text", FILTERS)
def test_wildcards_are_for_handlers(text: str) -> None:
    """Scenario 4."""
    assert TopicFilter(text).has_wildcard
    assert not is_topic(text)
    with pytest.raises(InvalidTopicError, match="wildcards are for handlers"):
        check_topic(text)


@table("text", [*FILTERS, *TOPICS])
def test_event_admin_has_no_single_level_wildcard(text: str) -> None:
    """RFC 97, 5.1.2."""
    if "+" in text:
        for parse in (EVENT_ADMIN.parse, EVENT_ADMIN.make_filter):
            with pytest.raises(InvalidTopicError, match="Event Admin"):
                parse(text)
    else:
        assert EVENT_ADMIN.parse(text) == TopicFilter(text)


@table("call", [check_topic, TopicFilter, parse_filter])
@table("value", [None, 5, b"a", ["a"], {}, object()])
def test_none_and_other_types_are_no_topics(call: Any, value: Any) -> None:
    """Scenario 1; 157.5.1. What has no hash is no ``TypeError``."""
    with pytest.raises(NullEventError if value is None else InvalidTopicError):
        call(value)


@table(
    ("text", "told"),
    [
        ("", "an empty token at position 0"),
        ("/a", "an empty token at position 0"),
        ("a//b", "an empty token at position 2"),
        ("a/b/", "an empty token at position 4"),
        ("a/b c", "' ' at position 3"),
        ("é/é\n", r"'\\n' at position 3"),
        ("a/*", r"'\*' at position 2; wildcards are for handlers"),
        ("+", r"'\+' at position 0; wildcards are for handlers"),
    ],
)
def test_the_error_of_a_topic_names_fault_and_position(text: str, told: str) -> None:
    with pytest.raises(InvalidTopicError, match=f"{told}$"):
        check_topic(text)


@table(
    ("text", "told"),
    [
        ("a//b", "level 2 of 'a//b' is empty"),
        ("", "level 1 of '' is empty"),
        ("*/a", r"level 1 of '\*/a' is '\*', which may only be the last one"),
        ("a/b*", r"level 2 of 'a/b\*' is 'b\*': a wildcard stands alone between solidi"),
        ("a.b/c", "level 1 of 'a.b/c' is 'a.b': only letters, digits, '_', '\\$' and '-' are allowed"),
    ],
)
def test_the_error_of_a_filter_names_fault_and_level(text: str, told: str) -> None:
    with pytest.raises(InvalidTopicError, match=told):
        TopicFilter(text)


def test_errors_of_long_texts_are_short() -> None:
    for call in (check_topic, TopicFilter):
        with pytest.raises(InvalidTopicError) as caught:
            call("x" * 100_000 + ".")
        assert len(str(caught.value)) < 400


@given(st.text(max_size=8) | st.text("ab/+*$ é\n", max_size=8))
def test_the_grammar_agrees_with_a_naive_reading(text: str) -> None:
    def is_token(token: str) -> bool:
        return token != "" and all(char in "-_$" or (char + "x").isidentifier() or char.isdecimal() for char in token)

    tokens = text.split("/")
    if text.isascii():
        assert is_topic(text) is all(map(is_token, tokens))
    levels = tokens[:-1] if tokens[-1] == "*" else tokens
    expected = all(level == "+" or is_topic(level) for level in levels)
    try:
        TopicFilter(text)
    except InvalidTopicError:
        assert not expected
    else:
        assert expected


# --- what matches what


TOKENS = st.sampled_from(["a", "b", "ab", "$", "-", "é", "A"])
PATHS = st.lists(TOKENS, min_size=1, max_size=5).map("/".join)
WILD = st.builds(
    lambda levels, tail: "/".join([*levels, *tail]),
    st.lists(TOKENS | st.just("+"), max_size=4),
    st.sampled_from([[], ["*"]]),
).filter(bool)


def naive(wanted: list[str], topic: list[str]) -> bool:
    """157.4.3, token by token."""
    if not wanted or not topic:
        return wanted == topic
    if wanted == ["*"]:
        return True
    return wanted[0] in ("+", topic[0]) and naive(wanted[1:], topic[1:])


@given(WILD, PATHS)
def test_matching_agrees_with_a_naive_reading(text: str, topic: str) -> None:
    """Scenario 44; 157.4.3.1, 157.4.3.2."""
    assert TopicFilter(text).matches(topic) is naive(text.split("/"), topic.split("/"))


def test_a_filter_is_its_text() -> None:
    wanted = TopicFilter("a/+/*")
    assert wanted == TopicFilter("a/+/*") == parse_filter("a/+/*")
    assert wanted != TopicFilter("a/*")
    assert wanted != "a/+/*"
    assert len({wanted, TopicFilter("a/+/*"), TopicFilter("a")}) == 2
    assert repr(wanted) == "TopicFilter('a/+/*')"
    assert (wanted.text, wanted.tokens) == ("a/+/*", ("a", "+", "*"))


def test_parsed_filters_are_remembered_and_errors_are_not() -> None:
    assert parse_filter("x/+/y") is TYPED_EVENTS.parse("x/+/y")
    for _ in range(2):
        with pytest.raises(InvalidTopicError):
            EVENT_ADMIN.parse("x/+/y")
    assert parse_filter("x/+/y").has_wildcard


def test_filters_of_a_thousand_levels_match_in_linear_time() -> None:
    tokens = ["x"] * 1_000
    wanted = TopicFilter("/".join(["+"] * 999) + "/*")
    started = time.perf_counter()
    assert wanted.matches("/".join(tokens))
    assert not wanted.matches("/".join(tokens[1:]))
    assert not wanted.matches("/".join(tokens[:-1]) + "/")
    assert time.perf_counter() - started < PATIENCE


# --- what implies what


#: every topic that there is of these tokens; filters are made of all but one of them, which stands for any other
ALL_TOPICS = ["/".join(tokens) for length in range(1, 5) for tokens in itertools.product("abc", repeat=length)]
ALL_FILTERS = [
    "/".join([*levels, *tail])
    for length in range(4)
    for levels in itertools.product("ab+", repeat=length)
    for tail in ([], ["*"])
    if levels or tail
]


def test_one_filter_implies_another_if_it_matches_all_that_the_other_does() -> None:
    """Scenarios 85 and 87; 157.8.1: every pair of up to three levels, with every topic that tells them apart."""
    matched = {
        text: {topic for topic in ALL_TOPICS if naive(text.split("/"), topic.split("/"))} for text in ALL_FILTERS
    }
    parsed = {text: TopicFilter(text) for text in ALL_FILTERS}
    for mine, theirs in itertools.product(ALL_FILTERS, repeat=2):
        assert parsed[mine].implies(parsed[theirs]) is (matched[mine] >= matched[theirs]), (mine, theirs)


# --- the trie


def most_specific(filters: list[str], topic: str) -> str | None:
    """The algorithm of 157.6.2.1, step by step."""
    retained = [(text.split("/"), text) for text in filters if naive(text.split("/"), topic.split("/"))]
    for token in topic.split("/"):
        for preferred in (token, "+", "*"):
            kept = [(tokens, text) for tokens, text in retained if tokens[:1] == [preferred]]
            if kept:
                break
        else:
            return None
        if preferred == "*":
            return kept[0][1]
        retained = [(tokens[1:], text) for tokens, text in kept]
    return retained[0][1] if retained else None
