"""Channel patterns of topic filters: 157.4.3, RFC 97 5.1.2, RFC 214 5.2.2."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from messaging.dispatch.eventdata import filters_of, merged, pattern_below, pattern_of, patterns_of
from messaging.errors import ArgumentError
from messaging.model import check_pattern
from messaging.model.channels import matches
from messaging.testing.tables import table


@table(
    "topic_filter, pattern, has, has_not",
    [
        ("*", "events/#", ["a", "$a/b"], []),
        ("org/*", "events/org/#", ["org/a", "org/a/b"], ["other/a"]),
        ("org/+/x", "events/org/+/x", ["org/a/x"], ["org/x", "org/a/b/x"]),
        ("org/a", "events/org/a", ["org/a"], ["org/a/b"]),
    ],
)
def test_channel_pattern_of_a_topic_filter(topic_filter: str, pattern: str, has: list[str], has_not: list[str]) -> None:
    (parsed,) = filters_of(topic_filter)
    assert check_pattern(pattern_of("events", parsed)) == pattern
    for topic in has:
        assert parsed.matches(topic)
        assert matches(pattern, f"events/{topic}")
    for topic in has_not:
        assert not matches(pattern, f"events/{topic}")


@table(
    "filters, patterns",
    [
        (["a", "b/+", "c/*"], ["e/a", "e/b/+", "e/c/#"]),
        (["a/+", "a/*", "a/b"], ["e/a/#"]),
        (["a", "a/*"], ["e/a/#"]),
        (["a/+/x", "a/b/*"], ["e/a/+/#"]),
        (["a/+/x", "a/b/+", "c"], ["e/a/+/+", "e/c"]),
        (["a/b", "c/d", "+/d", "*"], ["e/#"]),
    ],
)
def test_channel_patterns_of_topic_filters_do_not_overlap(filters: list[str], patterns: list[str]) -> None:
    assert patterns_of("e", filters_of(filters)) == patterns


topic_filters = st.lists(
    st.tuples(st.lists(st.sampled_from("ab+"), min_size=1, max_size=3), st.booleans()).map(
        lambda each: "/".join([*each[0], *(["*"] if each[1] else [])])
    ),
    min_size=1,
    max_size=5,
)


@given(topic_filters, st.lists(st.sampled_from("abc"), min_size=1, max_size=4).map("/".join))
def test_channel_patterns_have_every_topic_once(filters: list[str], topic: str) -> None:
    parsed = filters_of(filters)
    found = [each for each in patterns_of("e", parsed) if matches(each, f"e/{topic}")]
    assert len(found) <= 1
    assert found or not any(each.matches(topic) for each in parsed)


@table("topics", [[], ()])
def test_at_least_one_filter_is_needed(topics: list[str]) -> None:
    with pytest.raises(ArgumentError, match="at least one"):
        filters_of(topics)


def matches_by_rfc_214(wildcard: str, topic: str) -> bool:
    """Return whether a wildcard topic name matches a topic, by a naive reading of RFC 214 5.2.2."""
    start = wildcard.rstrip("*")
    return topic.startswith(start) and (wildcard.endswith("**") or "/" not in topic[len(start) :])


@table(
    "wildcard, levels, is_deep, pattern",
    [
        ("foo/bar*", ["foo"], False, "x/y/foo/+"),
        ("foo/*", ["foo"], False, "x/y/foo/+"),
        ("foo/bar**", ["foo"], True, "x/y/foo/#"),
        ("*", [], False, "x/y/+"),
        ("**", [], True, "x/y/#"),
    ],
)
def test_channel_pattern_of_a_filter_that_ends_in_a_wildcard(
    wildcard: str, levels: list[str], is_deep: bool, pattern: str
) -> None:
    assert check_pattern(pattern_below("x/y", levels, is_deep=is_deep)) == pattern
    topics = ["foo", "foo/bar", "foo/bare", "foo/bar/a", "foo/bare/a/b", "bar", "bar/foo", "foo/a"]
    for topic in topics:
        assert matches(pattern, f"x/y/{topic}") or not matches_by_rfc_214(wildcard, topic)


def test_patterns_of_two_grammars_are_merged() -> None:
    (typed,) = filters_of("foo/+")
    given = [pattern_of("x", typed), pattern_below("x", ["foo"], is_deep=True), "x/other"]
    assert merged(given) == ["x/foo/#", "x/other"]
